"""The open problem's tables and figures from its data frames; nothing here computes a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.laboratory.open_problem import SAMPLES

if TYPE_CHECKING:
    import pandas as pd

HEADLINE = (
    "sequence IS, k1 total",
    "per decision, k1",
    "per decision, k3 differentiated",
    "RB per decision",
    "RB + own baseline",
    "RB, prefix truncated at 8 + own baseline",
    "RB, self-normalized over the group",
    "RB without prefix ratio",
    "token ratio x k3",
    "bare k3 in loss",
)
"""What the figures and the short table show; the CSV has every candidate."""

YARDSTICKS = ("doubly robust", "truncated at 2 then corrected", "value only")
"""Prefixes of candidates that need a value of every next token: shown, never recommended."""


def error_table(frame: pd.DataFrame, samples: int, candidates: Sequence[str] = HEADLINE) -> pd.DataFrame:
    """Mean error over seeds at ``samples`` completions: one row per candidate, one column per length and staleness."""
    chosen = frame[frame.candidate.isin(candidates)]
    table = chosen.pivot_table(
        index="candidate", columns=["length", "staleness"], values=f"error_{samples}", aggfunc="mean"
    )
    table.columns = [f"T={length}, {staleness:g}" for length, staleness in table.columns]
    return table.reindex(list(candidates)).reset_index()


def regret_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Per candidate and sample size: error over the least error of any trainable candidate, mean and worst instance."""
    import pandas as pd

    trainable = frame[~frame.candidate.str.startswith(YARDSTICKS)]
    keys = ["length", "staleness", "seed"]
    columns: dict[str, Any] = {}
    for n in SAMPLES:
        least = trainable.groupby(keys)[f"error_{n}"].transform("min")
        regret = (trainable[f"error_{n}"] / least).groupby(trainable.candidate)
        columns[f"mean, N={n}"] = regret.mean()
        columns[f"worst, N={n}"] = regret.max()
    table = pd.DataFrame(columns)
    return table.sort_values("mean, N=1024").reset_index()


def setting_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What the instances are: effective sample share and KL (nats), means and ranges over seeds."""
    once = frame.drop_duplicates(["length", "staleness", "seed"])
    grouped = once.groupby(["length", "staleness"]).agg(
        ess=("ess", "mean"), ess_low=("ess", "min"), ess_high=("ess", "max"), kl=("kl", "mean")
    )
    return grouped.reset_index()


def plot_errors(frame: pd.DataFrame, path: Path, *, samples: int = 1024) -> None:
    """Error at equal samples against staleness, one panel per length; means over seeds."""
    plt = _pyplot()
    lengths = sorted(frame.length.unique())
    figure, panels = plt.subplots(1, len(lengths), figsize=(4.2 * len(lengths), 5.2), sharey=True, layout="constrained")
    for axes, length in zip(_listed(panels), lengths, strict=True):
        for color, name in zip(plt.cm.tab10.colors, HEADLINE, strict=False):
            rows = frame[(frame.length == length) & (frame.candidate == name)]
            grouped = rows.groupby("staleness")[f"error_{samples}"]
            axes.plot(grouped.mean().index, grouped.mean(), marker=".", color=color, label=name)
        axes.set_yscale("log")
        axes.set_title(f"{length} tokens")
        axes.set_xlabel("staleness (logit noise)")
        axes.grid(alpha=0.3)
    _listed(panels)[0].set_ylabel(f"error of the gradient at N = {samples}, relative to |G*|")
    handles, labels = _listed(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    _save(plt, figure, path)


def plot_variance(frame: pd.DataFrame, path: Path) -> None:
    """Left: variance against length at one staleness. Right: variance against the effective sample share."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.4), layout="constrained")
    middle = sorted(frame.staleness.unique())[-2]
    for color, name in zip(plt.cm.tab10.colors, HEADLINE, strict=False):
        rows = frame[frame.candidate == name]
        grouped = rows[rows.staleness == middle].groupby("length").variance
        left.plot(grouped.mean().index, grouped.mean(), marker="o", color=color, label=name)
        left.fill_between(grouped.min().index, grouped.min(), grouped.max(), color=color, alpha=0.10)
        right.scatter(rows.ess, rows.variance, color=color, s=14, label=name)
    left.set_title(f"Against length, staleness {middle:g}")
    left.set_xlabel("length (tokens)")
    right.set_title("Against the effective sample share, every instance")
    right.set_xlabel("effective sample size / samples (sequence ratio)")
    right.set_xscale("log")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_ylabel("trace variance of one completion / |G*|²")
        axes.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    _save(plt, figure, path)


def plot_knobs(frame: pd.DataFrame, path: Path, *, samples: int = 1024) -> None:
    """The bias-variance knobs: error against the cap, by kind of bound, at the longest length."""
    plt = _pyplot()
    longest = frame.length.max()
    stale = [value for value in sorted(frame.staleness.unique()) if value > 0]
    kinds = {"prefix truncated": "RB, prefix truncated at ", "each ratio truncated": "RB, each ratio truncated at ",
             "masked": "RB, masked above "}  # fmt: skip
    figure, panels = plt.subplots(1, len(stale), figsize=(4.0 * len(stale), 4.8), sharey=True, layout="constrained")
    for axes, value in zip(_listed(panels), stale, strict=True):
        here = frame[(frame.length == longest) & (frame.staleness == value)]
        for kind, prefix in kinds.items():
            mask = here.candidate.str.startswith(prefix) & ~here.candidate.str.contains("baseline")
            caps = here[mask].assign(cap=here[mask].candidate.str.removeprefix(prefix).astype(float))
            grouped = caps.groupby("cap")[f"error_{samples}"]
            axes.plot(grouped.mean().index, grouped.mean(), marker="o", label=kind)
        for name, style in (("RB per decision", "--"), ("RB without prefix ratio", ":")):
            axes.axhline(
                here[here.candidate == name][f"error_{samples}"].mean(), color="black", linestyle=style, label=name
            )
        axes.set_title(f"staleness {value:g}, {longest} tokens")
        axes.set_xlabel("cap")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    _listed(panels)[0].set_ylabel(f"error at N = {samples}, relative to |G*|")
    handles, labels = _listed(panels)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    _save(plt, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _listed(panels: Any) -> list[Any]:
    return list(panels.flat) if hasattr(panels, "flat") else [panels]


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_report(frame: pd.DataFrame, lambdas: pd.DataFrame, out: Path, *, command: str) -> None:
    """Data, figures and a README with every table into ``out``; ``command`` is what regenerates them."""
    out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(out / "open_problem.csv", index=False, float_format="%.6g")
    lambdas.to_csv(out / "k_lambda.csv", index=False, float_format="%.6g")
    plot_errors(frame, out / "error.png")
    plot_variance(frame, out / "variance.png")
    plot_knobs(frame, out / "knobs.png")
    (out / "README.md").write_text(readme(frame, lambdas, command=command))


def readme(frame: pd.DataFrame, lambdas: pd.DataFrame, *, command: str) -> str:
    """The page of tables, Markdown."""
    from kl_comedy.laboratory.study_tables import markdown

    seeds = frame.seed.nunique()
    parts = [
        "# The open problem: a sequence-level reverse-KL gradient from off-policy samples",
        f"Regenerated by `{command}`. Binary policies with shared parameters, {seeds} seeds each; the error at N is "
        "`sqrt(bias^2 + variance / N)` over the norm of the true gradient G*. What it means: docs/open_problem.md.",
        "![error](error.png)", "![variance](variance.png)", "![knobs](knobs.png)",
        "## The instances", markdown(setting_table(frame)),
        "## Error at N = 1024, mean over seeds (columns: length, staleness)", markdown(error_table(frame, 1024)),
        "## Error at N = 64", markdown(error_table(frame, 64)),
        "## Regret: error over the least error of any trainable candidate", markdown(regret_table(frame)),
        "## k_lambda per decision: variance at lambda 0 (k1), 1 (k3) and the best, beside RB",
        markdown(lambdas.groupby(["length", "staleness"])[["k1", "k3", "lambda", "best", "rb"]].mean().reset_index()),
        "## Every candidate: bias, variance, errors, means over seeds at the longest length",
        markdown(_longest(frame)),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _longest(frame: pd.DataFrame) -> pd.DataFrame:
    here = frame[frame.length == frame.length.max()]
    columns = ["bias", "variance", *(f"error_{n}" for n in SAMPLES)]
    return here.groupby(["staleness", "candidate"])[columns].mean().reset_index()
