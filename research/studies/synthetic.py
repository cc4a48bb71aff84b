"""The synthetic study: measure, write data and figures, and put the tables into the page beside them.

Lines of figures are means over seeds (geometric ones of variances, medians of paths), bands span the least and the
greatest seed. Figures are drawn from the CSV files.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.results.figures import Look, legend_below, plain_ticks
from kl_comedy.tracking import provenance_tags
from research.studies import bias_variance, optimum
from research.studies.bias_variance import CLAMPED, OPTIMIZED, RECOVERING, gap_table
from research.studies.optimum import Optimization
from research.studies.pages import figure, looks_of, markdown, read_frame, save_frame, three_digits, update_page

if TYPE_CHECKING:
    import pandas as pd


# --- tables -------------------------------------------------------------------------------------------------------
def length_tables(frame: pd.DataFrame, memory: pd.DataFrame) -> str:
    """Exact figures at the least, a middle and the greatest length; memory; how often sampling covers them."""
    lengths = sorted(frame.length.unique())
    shown = {lengths[0], lengths[len(lengths) // 2], lengths[-1]}
    exact = frame[(frame.method == "exact") & frame.length.isin(shown)]
    parts = []
    for value, title in (("bias", "Relative bias"), ("variance", "Relative variance")):
        parts.append(_seed_table(exact, "length", value, f"{title}, exact: mean over seeds [least, greatest]"))
    for name, group in memory.groupby("configuration", sort=False):
        # The rows of this table are the correlations of one form, in the place of configurations.
        rows = group.assign(configuration=[f"{persistence:g}" for persistence in group.persistence])
        title = f"Relative bias of {name} by the correlation of next prefixes"
        parts.append(_seed_table(rows, "length", "bias", title))
    parts.append("**Monte Carlo (first policy), against the exact values of the same policy**")
    parts.append(markdown(coverage(frame)))
    return "\n\n".join(parts)


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """By regime and configuration: at how many lengths the 95% interval contains the exact value; the noise floor."""
    keys = ["regime", "length", "seed", "configuration"]
    sampled = frame[frame.method == "monte_carlo"].set_index(keys)
    exact = frame[frame.method == "exact"].set_index(keys).loc[sampled.index]
    # An unbiased form has an exact bias of 1e-16, and an interval that begins at 0.
    rounding = 1e-9
    above_low = exact.bias >= sampled.bias_low - rounding
    below_high = exact.bias <= sampled.bias_high + rounding
    compared = sampled.assign(
        bias_covered=above_low & below_high,
        naive_covered=exact.bias.between(sampled.naive_bias_low, sampled.naive_bias_high),
        noise_floor=sampled.naive_bias - exact.bias,
        variance_covered=exact.variance.between(sampled.variance_low, sampled.variance_high),
        variance_ratio=sampled.variance / exact.variance,
    )
    table = compared.groupby(["regime", "configuration"], sort=False).agg(
        **{
            "bias covered": ("bias_covered", _share),
            "covered by the mean error of rounds": ("naive_covered", _share),
            "what that mean adds to the bias": ("noise_floor", "mean"),
            "variance covered": ("variance_covered", _share),
            "sampled / exact variance (least)": ("variance_ratio", "min"),
        }
    )
    return table.reset_index()


def _share(values: pd.Series[bool]) -> str:
    return f"{values.sum()}/{len(values)}"


def distance_tables(frame: pd.DataFrame, gaps: pd.DataFrame) -> str:
    """Bias, cosine and variance at some distances, and the replication's table."""
    shown = frame[frame.distance.isin((0.01, 0.1, 0.5, 1.0, 2.0, 4.0))].assign(regime="on_policy")
    parts = []
    for value, title in (("bias", "Relative bias"), ("cosine", "Cosine"), ("variance", "Relative variance")):
        full_title = f"{title} by logit distance: mean over seeds [least, greatest]"
        parts.append(_seed_table(shown, "distance", value, full_title))
    parts.append(f"**Relative gaps that a replication reports, and ours ({gaps.seed.nunique()} tabular instances)**")
    parts.append(markdown(gap_table(gaps)))
    return "\n\n".join(parts)


def optimum_tables(ends: pd.DataFrame) -> str:
    """Where optimization ended: one table per setting and beta, means over seeds."""
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
        title = f"**{setting}, beta = {beta:g}** (nats; means over {group.seed.nunique()} games)"
        parts += [title, markdown(rows.reset_index())]
    return "\n\n".join(parts)


def modes_tables(frame: pd.DataFrame) -> str:
    """Updates until a mode is back or given up, and what it has at the end."""
    parts = []
    for (setting, kind), group in frame.groupby(["setting", "kind"], sort=False):
        if kind == "lost":
            event = "until a lost mode is back"
            probability = "that the policy starts with"
        else:
            event = "until an invented mode is given up"
            probability = "that the reference has"
        title = f"**{setting}: updates {event}, by the probability {probability}**; in brackets its final probability"
        parts += [title, markdown(_cells(group, ["configuration"], "rare", _recovery))]
    return "\n\n".join(parts)


def _cells(frame: pd.DataFrame, keys: list[str], column: str, text: Callable[[pd.DataFrame], str]) -> pd.DataFrame:
    """``keys`` down, ``column`` across, a text per group of rows; everything in the order of the rows."""
    import pandas as pd

    cells = {key: text(group) for key, group in frame.groupby([*keys, column], sort=False)}
    # Without pivot_table, which would sort, and aggregates to numbers only.
    table = pd.Series(cells).unstack(sort=False)
    table.columns = [f"{value:g}" for value in table.columns]
    return table.rename_axis(keys).reset_index()


def _recovery(cell: pd.DataFrame) -> str:
    """The median step, how many seeds reached it where not one only, and the mode's final probability."""
    seeds = len(cell)
    recovered = int(cell.step.notna().sum())
    if recovered == 0:
        steps = "never"
    elif seeds == 1:
        steps = f"{cell.step.median():.0f}"
    else:
        steps = f"{cell.step.median():.0f} {recovered}/{seeds}"
    return f"{steps} [{cell['mode'].mean():.2g}]"


def _counted(verdicts: pd.Series[str]) -> str:
    """The verdict of all games, or each verdict with its number of games."""
    counts = verdicts.value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _seed_table(frame: pd.DataFrame, column: str, value: str, title: str) -> str:
    """Configurations down, ``column`` across; an entry is the mean over seeds with their range."""

    def text(cell: pd.DataFrame) -> str:
        values = cell[value]
        # The cosine of a gradient that is zero.
        if math.isnan(values.mean()):
            return "-"
        mean = three_digits(values.mean())
        least = three_digits(values.min())
        greatest = three_digits(values.max())
        if mean == least == greatest:
            return mean
        return f"{mean} [{least}, {greatest}]"

    named = frame.assign(regime=frame.regime.str.replace("_", "-"))
    return f"**{title}**\n\n{markdown(_cells(named, ['regime', 'configuration'], column, text))}"


# --- figures ------------------------------------------------------------------------------------------------------
FLOOR = 1e-10
"""Where KLs that are zero up to rounding are drawn (nats)."""

SHOWN = {
    "on_policy": (
        "k1 in reward",
        "k3 in loss",
        "k1 in loss",
        "k3 in reward",
        "k2 in loss",
        "k1 in reward, to go",
        "exact KL in loss (rb/token)",
        "exact KL to go (rb/full)",
    ),
    "off_policy": (
        "k1 in reward",
        "k3 in loss",
        "k1 in loss",
        "k2 in loss",
        "exact KL in loss (rb/token)",
        "k1 x sequence ratio",
        "k1 x prefix ratio (per decision)",
        "exact KL x prefix ratio (rb/per_decision)",
    ),
    "clamped": ("k2 in loss", "k3 in loss", *CLAMPED),
    "optimum": (
        "no KL",
        "k1 in reward",
        "k3 in loss",
        "k1 in loss",
        "k3 in reward",
        "k2 in loss",
        "exact KL to go (rb/full)",
        "k1 x sequence ratio",
        "exact KL x prefix ratio (rb/per_decision)",
    ),
}
"""The configurations of each figure, at most nine lines; the tables have all."""

TITLES = {"on_policy": "on-policy", "off_policy": "off-policy", "clamped": "clamped estimates"}
LABELS = {
    "bias": "relative bias |E g - G*| / |G*|",
    "cosine": "cosine with G*\n(undefined for k1 in loss)",
    "variance": "variance of one completion's\ngradient / |G*|² (log axis)",
}
SPREAD = "mean of {seeds} seeds (of variances geometric), from the least to the greatest"


def drawn(frame: pd.DataFrame, figure: str) -> Iterator[tuple[str, Look, pd.DataFrame]]:
    """Name, look and rows of each configuration that ``figure`` shows, in the order of the legend."""
    # Figures name a form alike on-policy and off-policy, where the tables say more.
    names = frame.configuration.str.replace(", bare", "").str.replace(", total", "")
    for name, style in looks_of(SHOWN[figure]).items():
        yield name, style, frame[names == name]


def draw_length(out: Path) -> None:
    """Exact bias and variance against length, one row of panels per regime; the same sampled."""

    frame = read_frame(out / "length.parquet")
    exact = frame[frame.method == "exact"]
    with figure(out / "length.svg", 2, 2, 2.6) as (drawing, panels):
        for row, regime in zip(panels, ("on_policy", "off_policy"), strict=True):
            for axes, value in zip(row, ("bias", "variance"), strict=True):
                curves(axes, exact[exact.regime == regime], regime, "length", value)
                label(axes, value, regime, xlabel="length (tokens)")
        legend_below(drawing, SPREAD.format(seeds=exact.seed.nunique()))
    plot_monte_carlo(frame, out / "length_monte_carlo.svg")


def plot_monte_carlo(frame: pd.DataFrame, path: Path) -> None:
    """Rounds of sampling with intervals over the exact curves of the same policy, and the noise floor of rounds."""
    sampled_seed = frame[frame.method == "monte_carlo"].seed.min()
    frame = frame[frame.seed == sampled_seed]
    titles = {"naive_bias": "mean |error|", "bias": "noise removed", "variance": ""}
    with figure(path, 2, 3, 2.4) as (drawing, panels):
        for row, regime in zip(panels, ("on_policy", "off_policy"), strict=True):
            for axes, (value, title) in zip(row, titles.items(), strict=True):
                exact_value = value.removeprefix("naive_")
                for name, style, rows in drawn(frame[frame.regime == regime], regime):
                    exact = rows[rows.method == "exact"]
                    axes.plot(exact.length, exact[exact_value], color=style["color"], alpha=0.7)
                    points = rows[rows.method == "monte_carlo"]
                    bars: dict[str, Any] = {"yerr": _error_bars(points, value), "elinewidth": 0.7}
                    marks = style | {"linestyle": "none", "markersize": 2.5}
                    axes.errorbar(points.length, points[value], label=name, **bars, **marks)
                label(axes, exact_value, regime, title, xlabel="length (tokens)")
            # Both biases on one scale, so that the noise floor is seen.
            row[1].set_ylim(row[0].get_ylim())
        legend_below(
            drawing, "lines: exact; marks: sampled, with 95% intervals (of variances in logarithms); one policy"
        )


def _error_bars(points: pd.DataFrame, value: str) -> list[pd.Series[float]]:
    """Distances from the points to the two ends of their intervals."""
    import numpy as np

    middle = points[value]
    low = points[f"{value}_low"]
    high = points[f"{value}_high"]
    if value == "variance":
        # The interval of the logarithm, to first order: on a logarithmic axis the other can begin below 0.
        relative = (high - low) / 2 / middle
        low = middle * np.exp(-relative)
        high = middle * np.exp(relative)
    return [(middle - low).clip(lower=0), (high - middle).clip(lower=0)]


def draw_distance(out: Path) -> None:
    """Bias, cosine and variance against the logit distance; clamped forms in a row of their own."""

    frame = read_frame(out / "distance.parquet")
    with figure(out / "distance.svg", 2, 3, 2.4) as (drawing, panels):
        for row, group in zip(panels, ("on_policy", "clamped"), strict=True):
            for axes, value in zip(row, ("bias", "cosine", "variance"), strict=True):
                curves(axes, frame, group, "distance", value)
                xlabel = "logit distance of policy\nand reference (nats, log axis)"
                label(axes, value, group, xlabel=xlabel, xscale="log")
                plain_ticks(axes.xaxis)
        legend_below(drawing, SPREAD.format(seeds=frame.seed.nunique()))


def draw_optimum(out: Path) -> None:
    """KL to the closed-form optimum during optimization, one panel per setting, at the smallest beta."""

    frame = read_frame(out / "optimum_paths.parquet")
    # The paths are of all games at once, and do not name them.
    games = read_frame(out / "optimum.parquet").seed.nunique()
    beta = frame.beta.min()
    settings = list(frame.setting.unique())
    with figure(out / "optimum.svg", math.ceil(len(settings) / 2), 2, 2.6, sharey=True) as (drawing, panels):
        for axes, setting in zip(panels.flat, settings, strict=False):
            rows_of_setting = frame[(frame.setting == setting) & (frame.beta == beta)]
            for number, (name, style, rows) in enumerate(drawn(rows_of_setting, "optimum")):
                # What reached the optimum is at 1e-16, and would stretch the axis by six decades.
                ends = rows[["min", "median", "max"]].clip(lower=FLOOR)
                markers = _marker_places(number, len(rows))
                axes.plot(rows.step + 1, ends["median"], label=name, markevery=markers, **style)
                colour = {"color": style["color"], "alpha": 0.08, "linewidth": 0}
                axes.fill_between(rows.step + 1, ends["min"], ends["max"], **colour)
            axes.set(xscale="log", yscale="log", ylim=(FLOOR / 2, 20), title=setting, xlabel="updates (log axis)")
            plain_ticks(axes.xaxis)
        for axes in panels[:, 0]:
            axes.set_ylabel(f"KL(policy‖optimum)\n(nats, at least {FLOOR:g}, log axis)")
        legend_below(drawing, f"beta {beta:g}; median of {games} games, from the least to the greatest")


def draw_modes(out: Path) -> None:
    """Updates until a lost mode is back, by how lost it was; what never came back is drawn at the top."""

    frame = read_frame(out / "modes.parquet")
    lost = frame[frame.kind == "lost"]
    settings = list(frame.setting.unique())
    looks = looks_of(list(lost.configuration.unique()))
    # What never came back is drawn above every number of updates that was tried.
    ceiling = 3 * frame.steps.max()
    rows_of_panels = math.ceil(len(settings) / 2)
    with figure(out / "modes.svg", rows_of_panels, 2, 2.6, sharex=True, sharey=True) as (drawing, panels):
        for axes, setting in zip(panels.flat, settings, strict=False):
            runs = lost[lost.setting == setting]
            runs = runs.assign(updates=(runs.step + 1).fillna(ceiling))
            for position, (name, style) in enumerate(looks.items()):
                updates = runs[runs.configuration == name].groupby("rare").updates
                # A factor, because the axis is logarithmic.
                shift = 1.12 ** (position - len(looks) / 2)
                shifted = [rare * shift for rare in updates.median().index]
                axes.plot(shifted, updates.median(), label=name, **style)
                axes.vlines(shifted, updates.min(), updates.max(), color=style["color"], alpha=0.4, linewidth=0.8)
            axes.axhline(ceiling, color="black", linewidth=0.6)
            never = f"never within {int(runs.steps.max())} updates"
            axes.text(0.98, ceiling * 1.25, never, fontsize=7, ha="right", transform=axes.get_yaxis_transform())
            title = f"{setting} (n={runs.seed.nunique()})"
            axes.set(xscale="log", yscale="log", ylim=(8, ceiling * 3), title=title)
        for axes in panels[-1]:
            axes.set_xlabel("initial probability of the mode's first token (log axis)")
        for axes in panels[:, 0]:
            axes.set_ylabel("updates until the mode has half\nof its optimal probability (log axis)")
            plain_ticks(axes.yaxis)
        legend_below(
            drawing, "median of n seeds, from the least to the greatest; marks are shifted so that all are seen"
        )


def curves(axes: Any, frame: pd.DataFrame, group: str, x: str, y: str) -> None:
    """One line per configuration of ``group`` against ``x``: mean over seeds, band from the least to the greatest."""
    import numpy as np

    for number, (name, style, rows) in enumerate(drawn(frame, group)):
        seeds = rows.groupby(x)[y]
        if y == "variance":
            # Variances of seeds differ by decades: an arithmetic mean would show the largest alone.
            middle = np.exp(np.log(rows[y]).groupby(rows[x]).mean())
        else:
            middle = seeds.mean()
        axes.plot(middle.index, middle, label=name, markevery=_marker_places(number, len(middle)), **style)
        axes.fill_between(seeds.min().index, seeds.min(), seeds.max(), color=style["color"], alpha=0.08, linewidth=0)


def _marker_places(number: int, points: int) -> tuple[int, int]:
    """First marker of line ``number`` and the distance between markers: about six, beside those of other lines."""
    distance = max(1, points // 6)
    return number % distance, distance


def label(axes: Any, value: str, group: str, subtitle: str = "", **settings: Any) -> None:
    """Set title, labels and scale of a panel of ``value``."""
    title = f"{TITLES[group]}: {subtitle}" if subtitle else TITLES[group]
    axes.set(title=title, ylabel=LABELS[value], **settings)
    if value == "bias":
        # A bias of 1: as far off as no gradient at all.
        axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
        # At most 3: a form that is far off would flatten all others.
        axes.set_ylim(-0.05, min(max(axes.get_ylim()[1], 1.2), 3.0))
    if value == "variance":
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)


# --- parts --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a part is measured; ``quick`` shrinks every axis. ``seeds`` overrides the part's default number."""

    quick: bool = False
    seeds: int | None = None

    def of(self, part: str) -> int:
        """The seeds of a part: policies or games."""
        if self.seeds is not None:
            return self.seeds
        if self.quick:
            return 2
        return PARTS[part].seeds

    def steps(self, part: str) -> int:
        """How many times a part reports progress."""
        return {
            "length": len(self.lengths) * self.of(part),
            "distance": len(bias_variance.DISTANCES),
            "optimum": len(optimum.SETTINGS) * len(OPTIMIZED),
            "modes": len(optimum.MODE_SETTINGS) * len(optimum.KINDS) * len(RECOVERING),
        }[part]

    @property
    def lengths(self) -> tuple[int, ...]:
        return (5, 7, 9) if self.quick else bias_variance.LENGTHS

    @property
    def memory_lengths(self) -> tuple[int, ...]:
        return self.lengths if self.quick else bias_variance.MEMORY_LENGTHS

    def settings(self, settings: dict[str, Optimization]) -> dict[str, Optimization]:
        """With a tenth of the steps where quick."""
        if not self.quick:
            return settings
        return {name: dataclasses.replace(item, steps=item.steps // 10) for name, item in settings.items()}


def _measure_length(out: Path, size: Size, done: Callable[[], None]) -> None:
    rounds = 20 if size.quick else bias_variance.ROUNDS
    samples = 200 if size.quick else bias_variance.SAMPLES
    seeds = size.of("length")
    frame = bias_variance.length_study(lengths=size.lengths, seeds=seeds, rounds=rounds, samples=samples, done=done)
    memory = bias_variance.memory_study(lengths=size.memory_lengths, seeds=seeds)
    save_frame(frame, out / "length.parquet")
    save_frame(memory, out / "memory.parquet")


def _measure_distance(out: Path, size: Size, done: Callable[[], None]) -> None:
    frame = bias_variance.distance_study(seeds=size.of("distance"), done=done)
    gaps = bias_variance.gap_study(seeds=10 if size.quick else 100)
    save_frame(frame, out / "distance.parquet")
    save_frame(gaps, out / "gaps.parquet")


def _measure_optimum(out: Path, size: Size, done: Callable[[], None]) -> None:
    ends, paths = optimum.optimum_study(seeds=size.of("optimum"), settings=size.settings(optimum.SETTINGS), done=done)
    save_frame(ends, out / "optimum.parquet")
    # Over games, because the path of each would be a file of megabytes; their ends are in the other table.
    keys = ["setting", "configuration", "beta", "step"]
    by_step = paths.groupby(keys, sort=False).to_optimum.agg(["median", "min", "max"]).reset_index()
    save_frame(by_step, out / "optimum_paths.parquet")


def _measure_modes(out: Path, size: Size, done: Callable[[], None]) -> None:
    frame = optimum.mode_study(seeds=size.of("modes"), settings=size.settings(optimum.MODE_SETTINGS), done=done)
    save_frame(frame, out / "modes.parquet")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the study: how it is measured, drawn and shown."""

    seeds: int
    """Policies or games, by default."""
    measure: Callable[[Path, Size, Callable[[], None]], None]
    """Write the CSV files."""
    draw: Callable[[Path], None]
    """Write the figures from them."""
    tables: Callable[..., str]
    frames: tuple[str, ...]
    """The CSV files that ``tables`` reads, without their extension."""


PARTS = {
    "length": Part(
        seeds=5,
        measure=_measure_length,
        draw=draw_length,
        tables=length_tables,
        frames=("length", "memory"),
    ),
    "distance": Part(
        seeds=20,
        measure=_measure_distance,
        draw=draw_distance,
        tables=distance_tables,
        frames=("distance", "gaps"),
    ),
    "optimum": Part(
        seeds=5,
        measure=_measure_optimum,
        draw=draw_optimum,
        tables=optimum_tables,
        frames=("optimum",),
    ),
    "modes": Part(
        seeds=5,
        measure=_measure_modes,
        draw=draw_modes,
        tables=modes_tables,
        frames=("modes",),
    ),
}


def run_part(part: str, out: Path, size: Size, *, command: str, done: Callable[[], None] = lambda: None) -> None:
    """Measure one of :data:`PARTS` into ``out``: data, figures, its block of README.md."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    # Before the measurement, which may take minutes in which the checkout changes.
    tags = provenance_tags()
    PARTS[part].measure(out, size, done)
    table = stored_tables(part, out)
    draw(part, out)

    libraries = ("torch", "numpy", "pandas", "matplotlib")
    versions = ", ".join(f"{library} {importlib.metadata.version(library)}" for library in libraries)
    commit = tags["git.commit"][:12]
    if tags["git.dirty"] == "true":
        commit += "+"
    source = (
        f"Made by `{command}` in {time.monotonic() - started:.0f} s on one core, at commit {commit} with Python "
        f"{platform.python_version()}, {versions}; float64."
    )
    verified = f"<!-- python research/scripts/stored_tables.py synthetic_{part} -->"
    update_page(out / "README.md", part, f"{verified}\n\n{table}\n\n{source}")


def stored_tables(part: str, out: Path) -> str:
    """The tables of a part, from the data in ``out``."""

    frames = [read_frame(out / f"{name}.parquet") for name in PARTS[part].frames]
    return PARTS[part].tables(*frames)


def draw(part: str, out: Path) -> None:
    """The figures of a part, from the data in ``out``."""
    PARTS[part].draw(out)
