"""The policy term on stale samples: bias and variance of every correction against staleness and length, by enumeration.

Binary policies with shared parameters and a random reward of 0 or 1. The target is the gradient of ``-E_pi[R]``; the
advantage is the reward less the sampler's expected reward. The error at N completions is ``sqrt(bias^2 + variance/N)``
over the target's norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.kl.oracle import Instance, Tree, effective_sample_share
from kl_comedy.kl.oracle.policy_certificate import DECOUPLED, reward_gradient, reward_loss
from kl_comedy.lab.batched_gradients import Tables, enumerated
from kl_comedy.lab.pages import figure, legend_below, markdown, save_csv, tab10
from kl_comedy.objective import PolicyTerm

if TYPE_CHECKING:
    import pandas as pd


LENGTHS = (4, 8, 12)
STALENESS = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Standard deviation of the logit noise between the policy and its sampler."""
SAMPLES = (64, 1024, 16384)
PARAMETERS = 8

CANDIDATES: dict[str, PolicyTerm] = {
    "reinforce (no ratio)": PolicyTerm(),
    "token": PolicyTerm(corrections={"token": {}}),
    "tis 2": PolicyTerm(corrections={"tis": {"cap": 2.0}}),
    "icepop 0.5..5": PolicyTerm(corrections={"icepop": {}}),
    "ppo_clip 0.2": PolicyTerm(loss="ppo_clip"),
    "gspo 3e-4": PolicyTerm(loss="gspo"),
    "gspo 0.2": PolicyTerm(loss="gspo", options={"clip_low": 0.2, "clip_high": 0.2}),
    "cispo 5": PolicyTerm(loss="cispo"),
    "decoupled ppo": DECOUPLED,
    "geometric_tis 2": PolicyTerm(corrections={"geometric_tis": {}}),
    "tis 2 + geometric_mask 0.9..1.1": PolicyTerm(corrections={"tis": {}, "geometric_mask": {"low": 0.9, "high": 1.1}}),
    "opsm 0.1": PolicyTerm(corrections={"opsm": {"threshold": 0.1}}),
    "tis 2 + opsm 0.1": PolicyTerm(corrections={"tis": {}, "opsm": {"threshold": 0.1}}),
    "sequence": PolicyTerm(corrections={"sequence": {}}),
    "sequence_tis 2": PolicyTerm(corrections={"sequence_tis": {"cap": 2.0}}),
    "sequence_tis 8": PolicyTerm(corrections={"sequence_tis": {"cap": 8.0}}),
    "sequence_mis 2": PolicyTerm(corrections={"sequence_mis": {"high": 2.0}}),
}
SHOWN = (
    "reinforce (no ratio)",
    "tis 2",
    "ppo_clip 0.2",
    "gspo 0.2",
    "geometric_tis 2",
    "opsm 0.1",
    "sequence",
    "sequence_tis 2",
    "sequence_tis 8",
)
"""What the figure shows."""


def study(
    *,
    lengths: Sequence[int] = LENGTHS,
    staleness: Sequence[float] = STALENESS,
    seeds: int = 5,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per length, staleness, seed and candidate; ``done`` is called after each seed."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for length in lengths:
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        for value in staleness:
            for seed in range(seeds):
                setting = Instance.random(tree, regime="off_policy", seed=seed, parameters=PARAMETERS, staleness=value)
                facts = {"length": length, "staleness": value, "seed": seed, "ess": effective_sample_share(setting)}
                rows += _candidate_rows(setting, facts)
                done()
    return pd.DataFrame(rows)


def _candidate_rows(setting: Instance, facts: dict[str, Any]) -> list[dict[str, Any]]:
    target_D = reward_gradient(setting)
    size = float(target_D.square().sum())
    losses = {name: reward_loss(term, setting) for name, term in CANDIDATES.items()}
    rows = []
    for name, moments in enumerated(Tables(setting), losses).items():
        bias, variance = moments.relative_bias(target_D), moments.variance / size
        rows.append(
            {
                **facts,
                "candidate": name,
                "bias": bias,
                "cosine": moments.cosine(target_D),
                "strength": float(moments.gradient_D @ target_D) / size,
                "variance": variance,
                **{f"error_{n}": math.sqrt(bias**2 + variance / n) for n in SAMPLES},
            }
        )
    return rows


def over_seeds(frame: pd.DataFrame, column: str) -> pd.DataFrame:
    """Median over seeds: one row per candidate, one column per length and staleness."""
    table = frame.pivot_table(index="candidate", columns=["length", "staleness"], values=column, aggfunc="median")
    table.columns = [f"T={length}, {staleness:g}" for length, staleness in table.columns]
    return table.reindex(list(CANDIDATES)).reset_index()


def winners(frame: pd.DataFrame) -> pd.DataFrame:
    """Per length, staleness and N: the candidate with the least median error, and that error; with the ESS."""
    import pandas as pd

    rows = []
    for (length, staleness), here in frame.groupby(["length", "staleness"]):
        row: dict[str, Any] = {"length": length, "staleness": staleness, "ess": here.ess.median()}
        for n in SAMPLES:
            error = here.groupby("candidate")[f"error_{n}"].median().reindex(list(CANDIDATES))
            row[f"least at N={n}"] = f"{error.idxmin()} ({error.min():.2g})" if staleness else "all alike"
        rows.append(row)
    return pd.DataFrame(rows)


def plot(frame: pd.DataFrame, path: Path) -> None:
    """Bias (above) and error at N = 1024 (below) against staleness, one column per length; medians over seeds."""
    lengths = sorted(frame.length.unique())
    size = (4.4 * len(lengths), 8.0)
    with figure(path, 2, len(lengths), size, sharex=True, sharey="row") as (drawing, panels):
        for column, length in enumerate(lengths):
            for axes, value in zip(panels[:, column], ("bias", "error_1024"), strict=True):
                for color, name in zip(tab10(), SHOWN, strict=False):
                    rows = frame[(frame.length == length) & (frame.candidate == name)]
                    middle = rows.groupby("staleness")[value].median().clip(lower=1e-3)
                    axes.plot(middle.index, middle, marker=".", color=color, label=name)
                axes.set_yscale("log")
                axes.grid(alpha=0.3)
            panels[0][column].set_title(f"{length} tokens")
            panels[1][column].set_xlabel("staleness (logit noise)")
        panels[0][0].set_ylabel("relative bias (0 shown as 0.001)")
        panels[1][0].set_ylabel("error at N = 1024, relative to |G|")
        legend_below(drawing, panels[0][0], 5)


def write_report(frame: pd.DataFrame, out: Path, *, command: str) -> None:
    """CSV, figure and README into ``out``; ``command`` is what regenerates them."""
    save_csv(frame, out / "policy_corrections.csv")
    plot(frame, out / "policy_corrections.png")
    parts = [
        "# The policy term on stale samples",
        f"Regenerated by `{command}`. Binary policies with {PARAMETERS} shared parameters, a random reward of 0 or 1, "
        f"{frame.seed.nunique()} seeds; every completion is enumerated in float64, tables are medians over seeds. "
        "Staleness is the standard deviation of the logit noise between policy and sampler; the target is the gradient "
        "of the expected reward at the current policy; the advantage is the reward less the sampler's expected reward; "
        "the error at N completions is `sqrt(bias^2 + variance / N)` over the target's norm. What to take: "
        "docs/decision.md.",
        "![bias and error](policy_corrections.png)",
        "## Least error",
        markdown(winners(frame)),
        "## Relative bias (columns: length, staleness)",
        markdown(over_seeds(frame, "bias")),
        "## Cosine with the reward gradient",
        markdown(over_seeds(frame, "cosine")),
        "## Variance of one completion's gradient over the squared norm of the target",
        markdown(over_seeds(frame, "variance")),
        "## Error at N = 1024",
        markdown(over_seeds(frame, "error_1024")),
        "## Error at N = 16384",
        markdown(over_seeds(frame, "error_16384")),
    ]
    (out / "README.md").write_text("\n\n".join(parts) + "\n")
