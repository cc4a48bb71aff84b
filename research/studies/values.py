"""How far an average of estimates is from the KL itself, by the number of samples (2506.09477, Fig. 1); Gaussians.

Nothing is sampled. An average of n estimates has the mean squared error bias^2 + variance / n; both are sums over the
vocabulary, or integrals over a fine grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.registry import ESTIMATORS
from kl_comedy.results.figures import legend_below
from research.studies.pages import figure, looks_of, markdown, read_frame, save_frame, three_digits

if TYPE_CHECKING:
    import pandas as pd

# As the usual families of these estimators are drawn.
LOOKS = dict(zip(("k1", "k2", "k3"), looks_of(("k1 in reward", "k2 in loss", "k3 in loss")).values(), strict=True))
NAMES = tuple(LOOKS)
KLS = (0.001, 0.01, 0.1, 1.0, 5.0)
"""nats"""
COUNTS = tuple(4**power for power in range(10))
VOCABULARY = 2000
GAUSSIANS = ((0.1, 1.0), (1.0, 1.0), (0.1, 0.8), (0.1, 0.2))
"""Mean and standard deviation of the policy; the reference is N(0, 1)."""

PAGE = """# The error of an estimated KL

<!-- python research/scripts/stored_tables.py values -->

Root mean squared error of an average of n estimates, relative to the KL, computed without sampling: a softmax policy
over {vocabulary} tokens whose logits are the reference's plus noise, scaled so that the KL is as stated; geometric
means over {seeds} policies. The estimates are those of one token (2506.09477, Fig. 1).

    {command}

![relative error against the number of samples, a panel per KL](error.svg)

{table}

k1 is the noisiest near the reference: its error falls below the KL after about 2 / KL samples. k2 is the value of
another quantity, and its error stops at that bias, which grows with the KL. k3 is unbiased and as quiet as k2 near the
reference; far from it, rare tokens with a large ratio of reference to policy make it useless: at 5 nats its standard
deviation is millions of times the KL, where k1's is 0.4 times.

## Gaussians

The policy is N(mean, sd), the reference N(0, 1); standard deviation of one estimate, and bias, over the KL.

{gaussians}

The variance of k3 exists only where the policy is wide enough, sd^2 > 1/2. For N(0.1, 0.2) the figures of 2510.01555
are standard deviations of 8.8 (k3) and 0.69 (k1). Ours for k1 is 0.68; that of k3 is infinite, so
any sample's figure grows with the sample.
"""


def moments(logp: Tensor, ref_logp: Tensor, weight: Tensor) -> dict[str, tuple[float, float]]:
    """Mean and variance (nats, nats^2) of each of :data:`NAMES` under ``weight``, which sums to one."""
    moments_of = {}
    for name in NAMES:
        values = ESTIMATORS.get(name).fn(logp - ref_logp)
        mean = float((weight * values).sum())
        variance = float((weight * (values - mean) ** 2).sum())
        moments_of[name] = (mean, variance)
    return moments_of


def token_errors(seeds: int = 10, counts: Sequence[int] = COUNTS) -> pd.DataFrame:
    """A row per KL, seed, estimator and number of samples: relative ``bias`` and root mean squared ``error``."""
    import pandas as pd

    rows = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        ref_logits = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        noise = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
        ref_logp = ref_logits.log_softmax(0)
        # The same noise at every KL, scaled: a policy moves along one line away from the reference.
        for kl in KLS:
            logp = _at_kl(ref_logp, noise, kl)
            for name, (mean, variance) in moments(logp, ref_logp, logp.exp()).items():
                bias = mean / kl - 1
                for count in counts:
                    error = math.sqrt(bias**2 + variance / kl**2 / count)
                    rows.append((kl, seed, name, count, bias, error))
    return pd.DataFrame(rows, columns=["kl", "seed", "estimator", "samples", "bias", "error"])


def _at_kl(ref_logp: Tensor, noise: Tensor, kl: float) -> Tensor:
    """The log-probs of ``ref + scale * noise`` whose KL to ``ref`` is ``kl``, by bisection: it rises with scale."""
    low = 0.0
    high = 100.0
    # A hundred halvings go below float64's resolution.
    for _ in range(100):
        scale = (low + high) / 2
        logp = (ref_logp + scale * noise).log_softmax(0)
        kl_at_scale = float((logp.exp() * (logp - ref_logp)).sum())
        if kl_at_scale < kl:
            low = scale
        else:
            high = scale
    return logp


def gaussian_table() -> pd.DataFrame:
    """A row per policy of :data:`GAUSSIANS`; a variance that does not exist is ``infinite``."""
    import pandas as pd

    # A grid of the standardized policy, whose density is the weight; the constants of both densities cancel.
    z = torch.linspace(-30, 30, 300_001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z**2, 0)
    rows = []
    for mean, sd in GAUSSIANS:
        x = mean + sd * z
        logp = -0.5 * z**2 - math.log(sd)
        ref_logp = -0.5 * x**2
        kl = math.log(1 / sd) + (sd**2 + mean**2 - 1) / 2
        row: dict[str, float | str] = {"mean": mean, "sd": sd, "KL": kl}
        for name, (value, variance) in moments(logp, ref_logp, weight).items():
            # E[(ref / pi)^2] diverges for a policy this narrow, whatever sum the grid has.
            is_infinite = name == "k3" and sd**2 <= 0.5
            row[f"{name}: sd / KL"] = "infinite" if is_infinite else math.sqrt(variance) / kl
            row[f"{name}: bias / KL"] = value / kl - 1
        rows.append(row)
    return pd.DataFrame(rows)


def error_table(frame: pd.DataFrame, counts: Sequence[int] = (1, 64, 4096)) -> pd.DataFrame:
    """A row per KL and estimator: the bias, and the error at some numbers of samples; geometric means over seeds."""
    shown = frame[frame.samples.isin(counts)]
    errors = shown.groupby(["kl", "estimator", "samples"]).error.agg(_geometric_mean)
    table = errors.unstack().rename(columns=lambda n: f"error, n = {n}")
    bias = frame.groupby(["kl", "estimator"]).bias.mean()
    table.insert(0, "bias / KL", bias.map(three_digits))
    return table.rename_axis(columns=None).reset_index().rename(columns={"kl": "KL, nats"})


def _geometric_mean(values: pd.Series[float]) -> float:
    import numpy as np

    return float(np.exp(np.log(values).mean()))


def draw(out: Path) -> None:
    """The figure, from the data in ``out``."""

    frame = read_frame(out / "errors.parquet")
    with figure(out / "error.svg", 1, len(KLS), 2.0, sharey=True) as (drawing, (panels,)):
        for axes, kl in zip(panels, KLS, strict=True):
            for name, style in LOOKS.items():
                rows = frame[(frame.kl == kl) & (frame.estimator == name)]
                middle = rows.groupby("samples").error.agg(_geometric_mean)
                axes.plot(middle.index, middle, label=name, **style)
            axes.set(xscale="log", yscale="log", title=f"KL {kl:g} nats", xlabel="samples (log axis)")
        panels[0].set_ylabel("root mean squared\nerror / KL (log axis)")
        legend_below(drawing, f"geometric mean of {frame.seed.nunique()} policies")


def write_report(frame: pd.DataFrame, out: Path, *, command: str) -> None:
    """Write ``errors.parquet``, ``error.svg`` and ``README.md`` into ``out``."""

    save_frame(frame, out / "errors.parquet")
    draw(out)
    # Read back: the page shows the six digits of the file, from which it can be printed again.
    frame = read_frame(out / "errors.parquet")
    page = PAGE.format(
        vocabulary=f"{VOCABULARY:,}",
        seeds=frame.seed.nunique(),
        command=command,
        table=markdown(error_table(frame)),
        gaussians=markdown(gaussian_table()),
    )
    (out / "README.md").write_text(page)
