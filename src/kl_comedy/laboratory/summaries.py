"""The synthetic study's frames as the short tables of its page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kl_comedy.laboratory.distance import gap_table
from kl_comedy.laboratory.study_tables import markdown

if TYPE_CHECKING:
    import pandas as pd


def length_tables(frame: pd.DataFrame, memory: pd.DataFrame) -> str:
    """Exact figures at the least, a middle and the greatest length; memory; how often sampling covers them."""
    lengths = sorted(frame.length.unique())
    shown = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    exact = frame[(frame.method == "exact") & frame.length.isin(shown)]
    parts = [
        _by(exact, "length", value, f"{title}, exact: mean over seeds [least, greatest]")
        for value, title in (("bias", "Relative bias"), ("variance", "Relative variance"))
    ]
    for name, group in memory.groupby("configuration", sort=False):
        by_memory = group.assign(configuration=[f"{p:g}" for p in group.persistence])
        parts.append(_by(by_memory, "length", "bias", f"Relative bias of {name} by the correlation of next prefixes"))
    return "\n\n".join([*parts, "**Monte Carlo (first policy), against the exact values of the same policy**",
                        markdown(coverage(frame))])  # fmt: skip


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """By regime and configuration: at how many lengths the 95% interval holds the exact value; the noise floor."""
    import pandas as pd

    keys = ["regime", "length", "seed", "configuration"]
    sampled = frame[frame.method == "monte_carlo"].set_index(keys)
    exact = frame[frame.method == "exact"].set_index(keys).loc[sampled.index]
    tiny = 1e-9
    joined = pd.DataFrame({
        "bias": (exact.bias >= sampled.bias_low - tiny) & (exact.bias <= sampled.bias_high + tiny),
        "naive": (exact.bias >= sampled.naive_bias_low) & (exact.bias <= sampled.naive_bias_high),
        "variance": (exact.variance >= sampled.variance_low) & (exact.variance <= sampled.variance_high),
        "floor": sampled.naive_bias - exact.bias,
        "ratio": sampled.variance / exact.variance,
    })  # fmt: skip
    grouped = joined.groupby(["regime", "configuration"], sort=False)
    rows = []
    for (regime, name), group in grouped:
        count = len(group)
        rows.append({
            "regime": regime, "configuration": name,
            "bias covered": f"{group.bias.sum()}/{count}",
            "covered by the mean error of rounds": f"{group.naive.sum()}/{count}",
            "what that mean adds to the bias": float(group.floor.mean()),
            "variance covered": f"{group.variance.sum()}/{count}",
            "sampled / exact variance (least)": float(group.ratio.min()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def distance_tables(frame: pd.DataFrame, gaps: pd.DataFrame) -> str:
    """Bias, cosine and variance at some distances, and the replication's table."""
    shown = [d for d in sorted(frame.distance.unique()) if d in (0.01, 0.1, 0.5, 1.0, 2.0, 4.0)]
    here = frame[frame.distance.isin(shown)].assign(regime="on_policy")
    parts = [
        _by(here, "distance", value, f"{title} by logit distance: mean over seeds [least, greatest]")
        for value, title in (("bias", "Relative bias"), ("cosine", "Cosine"), ("variance", "Relative variance"))
    ]
    note = f"**Relative gaps that a replication reports, and ours ({gaps.seed.nunique()} tabular instances)**"
    return "\n\n".join([*parts, note, markdown(gap_table(gaps))])


def optimum_tables(ends: pd.DataFrame) -> str:
    """Where descent ended: one table per setting and beta, means over seeds."""
    parts = []
    for (setting, beta), group in ends.groupby(["setting", "beta"], sort=False):
        rows = group.groupby("configuration", sort=False).agg(
            **{
                "KL to the optimum": ("to_optimum", "mean"),
                "worst seed": ("to_optimum", "max"),
                "J* - J": ("gap", "mean"),
                "KL to the forward-KL optimum": ("to_forward_optimum", "mean"),
                "KL to the optimum of beta / 2": ("to_half_beta_optimum", "mean"),
                "KL to ref": ("to_ref", "mean"),
                "entropy": ("entropy", "mean"),
                "reward": ("reward", "mean"),
                "verdict": ("verdict", _counted),
            }
        )
        parts += [f"**{setting}, beta = {beta:g}** (nats; means over {group.seed.nunique()} games)",
                  markdown(rows.reset_index())]  # fmt: skip
    return "\n\n".join(parts)


def modes_tables(frame: pd.DataFrame) -> str:
    """Updates until a mode is back or given up, and what it has at the end."""
    parts = []
    for (setting, kind), group in frame.groupby(["setting", "kind"], sort=False):
        rows = []
        for name, of_name in group.groupby("configuration", sort=False):
            row: dict[str, Any] = {"configuration": name}
            for rare, cell in of_name.groupby("rare", sort=False):
                row[f"{rare:g}"] = _recovery(cell)
            rows.append(row)
        what = "until a lost mode is back" if kind == "lost" else "until an invented mode is given up"
        where = "that the policy starts with" if kind == "lost" else "that the reference has"
        parts += [f"**{setting}: updates {what}, by the probability {where}**; in brackets its final probability",
                  _markdown(rows)]  # fmt: skip
    return "\n\n".join(parts)


def _recovery(cell: pd.DataFrame) -> str:
    came = int(cell.step.notna().sum())
    share = "" if len(cell) == 1 else f" {came}/{len(cell)}"
    middle = f"{cell.step.median():.0f}" if came else "never"
    return f"{middle}{share if came else ''} [{cell['mode'].mean():.2g}]"


def _counted(verdicts: Any) -> str:
    counts = verdicts.value_counts()
    return counts.index[0] if len(counts) == 1 else ", ".join(f"{name} {n}" for name, n in counts.items())


def _by(frame: pd.DataFrame, column: str, value: str, title: str) -> str:
    """Configurations down, ``column`` across; a cell is the mean over seeds with their range."""
    rows = []
    for (regime, name), group in frame.groupby(["regime", "configuration"], sort=False):
        row: dict[str, Any] = {"regime": str(regime).replace("_", "-"), "configuration": name}
        for at, cell in group.groupby(column)[value]:
            row[f"{at:g}"] = _range(cell.mean(), cell.min(), cell.max())
        rows.append(row)
    return f"**{title}**\n\n{_markdown(rows)}"


def _range(middle: float, low: float, high: float) -> str:
    if middle != middle:
        return "-"
    shown = [_figure(v) for v in (middle, low, high)]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _figure(value: float) -> str:
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def _markdown(rows: list[dict[str, Any]]) -> str:
    import pandas as pd

    return markdown(pd.DataFrame(rows))
