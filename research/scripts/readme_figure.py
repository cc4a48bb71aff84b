"""Draw the README's figure from stored runs: held-out reward by KL configuration, on fresh and on stale samples.

python research/scripts/readme_figure.py        writes results/forms.svg and results/forms.md

Each configuration has five seeds at two learning rates: the one at which training without KL ends with the highest
reward, and one at which it collapses or loses most of it. Every run is a mark; nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.results.figures import new_figure, paper_style, save_figure
from kl_comedy.results.looks import family_look
from kl_comedy.results.runs import NO_KL
from kl_comedy.results.tables import markdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[2]
EXPORT = ROOT / "results" / "evidence" / "export.parquet"
CURVES = ROOT / "results" / "evidence" / "export.curves.parquet"
REWARD = "metrics.eval/heldout/reward"
LABEL = "tags.kl.label"
FAMILY = "tags.kl.family"
RATE = "params.optimizer.lr"
SEED = "params.seed"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One half of the figure: a sweep at one age of the samples."""

    title: str
    sweep: str
    lag: str
    good_rate: str
    """At which the runs without KL of this panel end with the highest mean reward."""
    high_rate: str
    forms: tuple[tuple[str, str], ...]
    """KL families, from the best objective down, and their names on the axis."""


FRESH = Panel(
    title="fresh samples",
    sweep="evidence_core",
    lag="0",
    good_rate="0.0001",
    high_rate="0.0008",
    forms=(
        ("k2_reverse_token in loss", "k2 in loss"),
        ("k1_reverse_token in reward total before baseline", "k1 in reward"),
        ("k3_reverse_token in loss", "k3 in loss"),
        ("k3_reverse_token in reward total before baseline", "k3 in reward"),
        ("k1_reverse_token in loss", "k1 in loss"),
        (NO_KL, "no KL"),
    ),
)
STALE = Panel(
    title="samples ten updates old",
    sweep="evidence_lags",
    lag="10",
    good_rate="5e-05",
    high_rate="0.0002",
    forms=(
        ("exact_reverse_token in loss x prefix_previous", "exact × prefix ratio"),
        ("k3_reverse_token in loss x token", "k3 × token ratio"),
        ("k3_reverse_token in loss", "k3 in loss"),
        ("k1_reverse_token in reward total before baseline", "k1 in reward"),
        ("k1_reverse_token in reward to_go x sequence", "k1 × sequence ratio"),
        (NO_KL, "no KL"),
    ),
)
PANELS = (FRESH, STALE)


def runs_of(panel: Panel) -> pd.DataFrame:
    """The finished runs of a panel at its two rates, one per configuration, rate and seed."""
    import pandas as pd

    frame = pd.read_parquet(EXPORT)
    frame = frame[(frame["tags.sweep"] == panel.sweep) & (frame["params.lag.steps"] == panel.lag)]
    frame = frame[frame[RATE].isin([panel.good_rate, panel.high_rate])]
    frame = frame[frame["status"] == "FINISHED"]
    # A seed that was trained twice counts once, by its newest run.
    return frame.sort_values("start_time").drop_duplicates([FAMILY, RATE, SEED], keep="last")


def rewards(runs: pd.DataFrame, family: str, rate: str) -> list[float]:
    """The held-out reward of each seed of a configuration at the end of training, by seed."""
    chosen = runs[(runs[FAMILY] == family) & (runs[RATE] == rate)].sort_values(SEED)
    return [float(value) for value in chosen[REWARD]]


def best_rate_without_kl(panel: Panel) -> str:
    """The rate of the sweep at which the mean reward without KL is highest."""
    import pandas as pd

    frame = pd.read_parquet(EXPORT)
    is_here = (frame["tags.sweep"] == panel.sweep) & (frame["params.lag.steps"] == panel.lag)
    without_kl = frame[is_here & (frame[FAMILY] == NO_KL)]
    return str(without_kl.groupby(RATE)[REWARD].mean().idxmax())


def reward_before_training(runs: pd.DataFrame) -> float:
    """The mean held-out reward of the runs before their first update; they begin with the same weights."""
    import pandas as pd

    curves = pd.read_parquet(CURVES)
    is_here = curves["run_id"].isin(runs["run_id"]) & (curves["metric"] == REWARD.removeprefix("metrics."))
    return float(curves[is_here & (curves["step"] == 0)]["value"].mean())


def draw_panel(axes: Axes, panel: Panel, runs: pd.DataFrame) -> None:
    """Mark every run: filled at the good rate, open at the high one; a dotted line is the reward before training."""
    axes.axvline(reward_before_training(runs), color="black", linestyle=":", linewidth=0.9, zorder=1)
    for row, (family, _) in enumerate(panel.forms):
        look = family_look(family)
        good = rewards(runs, family, panel.good_rate)
        high = rewards(runs, family, panel.high_rate)
        # Half a row apart, so that the runs of the two rates do not hide each other.
        axes.plot(good, [row - 0.17] * len(good), look.marker, color=look.colour, ms=4.5, alpha=0.8, zorder=3)
        axes.plot(high, [row + 0.17] * len(high), look.marker, color=look.colour, ms=4.5, mfc="white", zorder=2)
    axes.set_yticks(range(len(panel.forms)), [name for _, name in panel.forms])
    axes.set_ylim(len(panel.forms) - 0.5, -0.5)
    axes.set_xlim(-0.02, 0.65)
    axes.set_xlabel("held-out reward at the end (per problem)")
    good = f"{float(panel.good_rate):.0e}".replace("e-0", "e-")
    high = f"{float(panel.high_rate):.0e}".replace("e-0", "e-")
    axes.set_title(f"{panel.title}, five seeds\nfilled: learning rate {good}; open: {high}")


def draw(out: Path) -> None:
    """Write the figure."""
    with paper_style():
        figure = new_figure(7.0, 2.6)
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            draw_panel(axes, panel, runs_of(panel))
        save_figure(figure, out)


def tables() -> str:
    """The runs of the figure: the lowest and highest reward of the seeds, as Markdown."""
    rows: list[Sequence[str]] = []
    for panel in PANELS:
        runs = runs_of(panel)
        for family, name in panel.forms:
            cells = []
            for rate in (panel.good_rate, panel.high_rate):
                values = rewards(runs, family, rate)
                cells += [str(len(values)), f"{min(values):.3f} to {max(values):.3f}"]
            rows.append([panel.title, name, *cells])
    head = ["samples", "KL", "n, good rate", "reward, good rate", "n, high rate", "reward, high rate"]
    return markdown(head, rows)


def main() -> None:
    for panel in PANELS:
        best = best_rate_without_kl(panel)
        if best != panel.good_rate:
            raise SystemExit(f"{panel.title}: training without KL does best at {best}, not at {panel.good_rate}")
    out = ROOT / "results" / "forms.svg"
    draw(out)
    page = (
        "# Held-out reward by KL configuration, on fresh and on stale samples\n\n"
        "<!-- python research/scripts/stored_tables.py forms -->\n\n"
        "The runs of `forms.svg`, from results/evidence/export.parquet: `python research/scripts/readme_figure.py`. "
        "The good rate is the one at which training without KL ends with the highest reward; beta is 0.1 on fresh "
        "samples and 0.05 on stale ones. A range is that of the seeds.\n\n"
    )
    page += tables() + "\n"
    (out.with_suffix(".md")).write_text(page, encoding="utf-8")
    print(f"wrote {out} and {out.with_suffix('.md')}")


if __name__ == "__main__":
    main()
