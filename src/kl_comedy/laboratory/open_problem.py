"""The open problem of 2512.21852: a sequence-level reverse-KL gradient from off-policy samples, and what it costs.

Every candidate is judged by its error at equal samples, ``sqrt(bias^2 + variance / N)`` over the norm of
the true gradient. Candidates without a group are enumerated; those that couple the completions of a
group (baselines, self-normalization) are sampled, with intervals over independent batches; the doubly
robust forms need a value of every next token and are enumerated from tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.oracle import (
    Loss,
    Rows,
    Setting,
    Tree,
    effective_sample_share,
    exact_moments,
    sampled_moments,
    sequence_kl,
    target_gradient,
    terms_loss,
)
from kl_comedy.laboratory.doubly_robust import doubly_robust_moments

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = (4, 8, 12, 16)
STALENESS = (0.0, 0.1, 0.3, 0.6, 1.0)
SAMPLES = (64, 256, 1024, 4096)
CAPS = (1.0, 1.5, 2.0, 4.0, 8.0)
WINDOWS = (1, 2, 4)
PARAMETERS = 8
DISTANCE = 0.5
GROUP = 8
BATCHES = 12
BATCH = 8192
Z95 = 2.201
"""The t quantile of 95% intervals over :data:`BATCHES` batches."""


def exact_candidates() -> dict[str, KLTerm]:
    """Terms without a group, by the name they have in the tables."""

    def rb(**fields: Any) -> KLTerm:
        return KLTerm("exact", credit="to_go", correction="prefix_previous", **fields)

    found = {
        "sequence IS, k1 total": KLTerm("k1", credit="total", correction="sequence"),
        "sequence IS, k3 differentiated": KLTerm("k3", placement="loss", correction="sequence"),
        "per decision, k1": KLTerm("k1", credit="to_go", correction="prefix"),
        "per decision, k3 differentiated": KLTerm("k3", placement="loss", correction="prefix"),
        "RB per decision": rb(),
        "RB without prefix ratio": KLTerm("exact", credit="to_go"),
        "token ratio x k3": KLTerm("k3", placement="loss", correction="token"),
        "bare k3 in loss": KLTerm("k3", placement="loss"),
        "bare k1 in reward": KLTerm("k1", credit="to_go"),
    }
    for cap in CAPS:
        found[f"RB, prefix truncated at {cap:g}"] = rb(cap=cap)
        found[f"RB, each ratio truncated at {cap:g}"] = rb(cap=cap, cap_mode="each")
        found[f"RB, masked above {cap:g}"] = rb(cap=cap, cap_mode="mask")
    for window in WINDOWS:
        found[f"RB, window of {window}"] = rb(window=window)
    return found


def grouped_candidates() -> dict[str, Loss]:
    """Losses that couple the completions of a group."""

    def rb(**fields: Any) -> Loss:
        term = KLTerm("exact", credit="to_go", correction="prefix_previous", baseline="own", **fields)
        return terms_loss([term])

    return {
        "RB + own baseline": rb(),
        "RB, prefix truncated at 2 + own baseline": rb(cap=2.0),
        "RB, prefix truncated at 4 + own baseline": rb(cap=4.0),
        "RB, prefix truncated at 8 + own baseline": rb(cap=8.0),
        "RB, each ratio truncated at 4 + own baseline": rb(cap=4.0, cap_mode="each"),
        "RB without prefix ratio + own baseline": terms_loss([KLTerm("exact", credit="to_go", baseline="own")]),
        "per decision, k1 + own baseline": terms_loss([KLTerm("k1", correction="prefix", baseline="own")]),
        "RB, self-normalized over the group": self_normalized(None),
        "RB, truncated at 4, self-normalized": self_normalized(4.0),
    }


def self_normalized(cap: float | None) -> Loss:
    """RB per decision with each prefix ratio over its mean in the group (weighted importance sampling)."""

    def loss(rows: Rows, /) -> Tensor:
        delta_BT = torch.where(rows.mask_BT, rows.logp_BT.detach() - rows.behaviour_logp_BT, 0.0)
        weight_BT = weights_of("prefix_previous", delta_BT, cap=cap)
        _, index_B = torch.unique(rows.group_B, return_inverse=True)
        groups = int(index_B.max()) + 1
        sums_GT = weight_BT.new_zeros(groups, weight_BT.shape[1]).index_add_(0, index_B, weight_BT)
        size_G = torch.bincount(index_B, minlength=groups)
        weight_BT = weight_BT * size_G[index_B, None] / sums_GT[index_B]
        cost_BT = weight_BT * rows.reverse_kl_BT.detach()
        future_BT = cost_BT.flip(-1).cumsum(-1).flip(-1) - cost_BT
        return torch.where(rows.mask_BT, future_BT * rows.logp_BT + weight_BT * rows.reverse_kl_BT, 0.0)

    return loss


def instances(
    lengths: Sequence[int], staleness: Sequence[float], seeds: int
) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Seeded binary instances with what describes them: length, staleness, seed, ESS share, KL in nats."""
    for length in lengths:
        for stale in staleness:
            for seed in range(seeds):
                setting = Setting.random(
                    Tree.build(vocabulary=2, length=length, ends=False), regime="off_policy", seed=seed,
                    parameters=PARAMETERS, distance=DISTANCE, staleness=stale,
                )  # fmt: skip
                facts = {
                    "length": length,
                    "staleness": stale,
                    "seed": seed,
                    "ess": effective_sample_share(setting),
                    "kl": sequence_kl(setting),
                }
                yield setting, facts


def study(
    *, lengths: Sequence[int] = LENGTHS, staleness: Sequence[float] = STALENESS, seeds: int = 5,
    batches: int = BATCHES, batch: int = BATCH, done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """One row per candidate and instance: relative bias, variance, error at each of :data:`SAMPLES`.

    ``bias_low`` and ``bias_high`` bound a sampled bias; for an enumerated one they equal it.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for setting, facts in instances(lengths, staleness, seeds):
        target_D = target_gradient(setting, "sequence_reverse")
        size = float(target_D.square().sum())
        for name, term in exact_candidates().items():
            moments = exact_moments(setting, terms_loss([term]))
            bias = moments.relative_bias(target_D)
            rows.append(
                {**facts, "candidate": name, "method": "enumerated", **_row(bias, bias, bias, moments.variance / size)}
            )
        for name, (bias, variance) in doubly_robust_moments(setting, target_D).items():
            rows.append({**facts, "candidate": name, "method": "enumerated", **_row(bias, bias, bias, variance)})
        for name, loss in grouped_candidates().items():
            found = _sampled(setting, loss, target_D, batches=batches, batch=batch, seed=int(facts["seed"]))
            rows.append({**facts, "candidate": name, "method": "sampled", **_row(*found)})
        done()
    return pd.DataFrame(rows)


def _row(bias: float, low: float, high: float, variance: float) -> dict[str, float]:
    errors = {f"error_{n}": math.sqrt(bias**2 + variance / n) for n in SAMPLES}
    return {"bias": bias, "bias_low": low, "bias_high": high, "variance": variance, **errors}


def _sampled(
    setting: Setting, loss: Loss, target_D: Tensor, *, batches: int, batch: int, seed: int
) -> tuple[float, float, float, float]:
    """Relative bias with its bounds, and relative variance, from independent batches of groups.

    The squared bias is estimated from products of different batches, which noise leaves unbiased; its
    interval is Student's over the batches' leave-one-out estimates (a jackknife).
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    found = [
        sampled_moments(setting, loss, samples=batch, group_size=GROUP, generator=generator) for _ in range(batches)
    ]
    size = float(target_D.square().sum())
    off_RD = torch.stack([m.gradient_D for m in found]) - target_D
    whole = _cross(off_RD)
    left = torch.tensor([_cross(torch.cat([off_RD[:r], off_RD[r + 1 :]])) for r in range(batches)])
    spread = Z95 * math.sqrt(float((left - left.mean()).square().sum()) * (batches - 1) / batches)
    variance = sum(m.variance for m in found) / batches / size
    low, middle, high = (math.sqrt(max(value, 0.0) / size) for value in (whole - spread, whole, whole + spread))
    return middle, low, high, variance


def _cross(off_RD: Tensor) -> float:
    """The mean inner product of different rows: an unbiased estimate of the squared norm of their mean."""
    count = len(off_RD)
    total = off_RD.sum(0).square().sum() - off_RD.square().sum()
    return float(total) / (count * (count - 1))


def lambda_study(
    *, lengths: Sequence[int] = LENGTHS, staleness: Sequence[float] = STALENESS, seeds: int = 5
) -> pd.DataFrame:
    """The variance of per-decision ``k_lambda`` at 0 (k1), 1 (k3) and at the lambda of least variance.

    Unbiased for every lambda, and the variance is a parabola in lambda, so three points give the best.
    """
    import pandas as pd

    rows = []
    for setting, facts in instances(lengths, staleness, seeds):
        size = float(target_gradient(setting, "sequence_reverse").square().sum())

        def variance(lam: float, setting: Setting = setting, size: float = size) -> float:
            term = KLTerm("k_lambda", placement="loss", correction="prefix", options={"lam": lam})
            return exact_moments(setting, terms_loss([term])).variance / size

        at_0, at_1, at_2 = variance(0.0), variance(1.0), variance(2.0)
        curvature = (at_2 - 2 * at_1 + at_0) / 2
        best = 1 - (at_2 - at_0) / (4 * curvature)
        rb = exact_moments(setting, terms_loss([KLTerm("exact", correction="prefix_previous")])).variance / size
        rows.append({**facts, "k1": at_0, "k3": at_1, "lambda": best, "best": variance(best), "rb": rb})
    return pd.DataFrame(rows)
