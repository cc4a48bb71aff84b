"""The synthetic study: measure, write data and figures, and put the tables into the page beside them.

Lines of figures are means over seeds (geometric ones of variances, medians of paths), bands span the least and the
greatest seed. Figures are drawn from the CSV files.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking import provenance_tags
from kl_comedy.tracking.figures import WITHOUT_KL, Look, legend_below, look, plain_ticks
from research.studies import bias_variance, optimum
from research.studies.bias_variance import CLAMPED, OPTIMIZED, RECOVERING, gap_table
from research.studies.optimum import Optimization
from research.studies.pages import Looks, figure, markdown, save_csv, three_digits, update_page

if TYPE_CHECKING:
    import pandas as pd


# --- tables -------------------------------------------------------------------------------------------------------
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
    parts.append("**Monte Carlo (first policy), against the exact values of the same policy**")
    return "\n\n".join([*parts, markdown(coverage(frame))])


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """By regime and configuration: at how many lengths the 95% interval holds the exact value; the noise floor."""
    keys = ["regime", "length", "seed", "configuration"]
    sampled = frame[frame.method == "monte_carlo"].set_index(keys)
    exact = frame[frame.method == "exact"].set_index(keys).loc[sampled.index]
    tiny = 1e-9
    bias = (exact.bias >= sampled.bias_low - tiny) & (exact.bias <= sampled.bias_high + tiny)
    columns = {
        "bias covered": bias,
        "covered by the mean error of rounds": exact.bias.between(sampled.naive_bias_low, sampled.naive_bias_high),
        "what that mean adds to the bias": sampled.naive_bias - exact.bias,
        "variance covered": exact.variance.between(sampled.variance_low, sampled.variance_high),
        "sampled / exact variance (least)": sampled.variance / exact.variance,
    }
    how = (_share, _share, "mean", _share, "min")
    joined = sampled.assign(**columns).groupby(["regime", "configuration"], sort=False)
    return joined.agg(**{name: (name, each) for name, each in zip(columns, how, strict=True)}).reset_index()


def _share(values: pd.Series[bool]) -> str:
    return f"{values.sum()}/{len(values)}"


def distance_tables(frame: pd.DataFrame, gaps: pd.DataFrame) -> str:
    """Bias, cosine and variance at some distances, and the replication's table."""
    here = frame[frame.distance.isin((0.01, 0.1, 0.5, 1.0, 2.0, 4.0))].assign(regime="on_policy")
    parts = [
        _by(here, "distance", value, f"{title} by logit distance: mean over seeds [least, greatest]")
        for value, title in (("bias", "Relative bias"), ("cosine", "Cosine"), ("variance", "Relative variance"))
    ]
    note = f"**Relative gaps that a replication reports, and ours ({gaps.seed.nunique()} tabular instances)**"
    return "\n\n".join([*parts, note, markdown(gap_table(gaps))])


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
        cells = _cells(group, ["configuration"], "rare", _recovery)
        what = "until a lost mode is back" if kind == "lost" else "until an invented mode is given up"
        where = "that the policy starts with" if kind == "lost" else "that the reference has"
        title = f"**{setting}: updates {what}, by the probability {where}**; in brackets its final probability"
        parts += [title, markdown(cells)]
    return "\n\n".join(parts)


def _cells(frame: pd.DataFrame, keys: list[str], column: str, text: Callable[[pd.DataFrame], str]) -> pd.DataFrame:
    """``keys`` down, ``column`` across, a text per group of rows; everything in the order of the rows."""
    import pandas as pd

    cells = {key: text(group) for key, group in frame.groupby([*keys, column], sort=False)}
    table = pd.Series(cells).unstack(sort=False)
    table.columns = [f"{value:g}" for value in table.columns]
    return table.rename_axis(keys).reset_index()


def _recovery(cell: pd.DataFrame) -> str:
    came = int(cell.step.notna().sum())
    share = "" if len(cell) == 1 else f" {came}/{len(cell)}"
    return f"{f'{cell.step.median():.0f}{share}' if came else 'never'} [{cell['mode'].mean():.2g}]"


def _counted(verdicts: Any) -> str:
    counts = verdicts.value_counts()
    return counts.index[0] if len(counts) == 1 else ", ".join(f"{name} {n}" for name, n in counts.items())


def _by(frame: pd.DataFrame, column: str, value: str, title: str) -> str:
    """Configurations down, ``column`` across; an entry is the mean over seeds with their range."""

    def text(cell: pd.DataFrame) -> str:
        middle = cell[value].mean()
        shown = [three_digits(number) for number in (middle, cell[value].min(), cell[value].max())]
        if middle != middle:
            return "-"
        return shown[0] if len(set(shown)) == 1 else f"{shown[0]} [{shown[1]}, {shown[2]}]"

    named = frame.assign(regime=frame.regime.str.replace("_", "-"))
    return f"**{title}**\n\n{markdown(_cells(named, ['regime', 'configuration'], column, text))}"


# --- figures ------------------------------------------------------------------------------------------------------
FLOOR = 1e-10
"""Where KLs that are zero up to rounding are drawn (nats)."""

LOOKS: Looks = {
    "no KL": WITHOUT_KL,
    "k1 in reward": look(0),
    "k3 in loss": look(1),
    "k1 in loss": look(2),
    "k3 in reward": look(3),
    "k2 in loss": look(4),
    "k1 in reward, to go": look(5),
    "exact KL in loss (rb/token)": look(6),
    "exact KL to go (rb/full)": look(7),
    "k1 x sequence ratio": look(8),
    "k1 x prefix ratio (per decision)": look(31),
    "exact KL x prefix ratio (rb/per_decision)": look(21),
    "k3 in loss, clamped as in verl": look(11),
    "k2 in loss, clamped as in OpenRLHF": look(13),
    "k3 in loss, clamped at 1": look(14),
    "k3 in both": look(38),
    "exact forward KL in loss": look(61),
}
"""A configuration looks the same in every figure, and as in figures of runs; no figure has a marker twice."""

SHOWN = {
    "on_policy": list(LOOKS)[1:9],
    "off_policy": [*(list(LOOKS)[at] for at in (1, 2, 3, 5, 7)), *list(LOOKS)[9:12]],
    "clamped": ["k2 in loss", "k3 in loss", *CLAMPED],
    "optimum": [*list(LOOKS)[:6], *(list(LOOKS)[at] for at in (8, 9, 11))],
}
"""What the figures draw, at most nine lines; the tables have every configuration."""

TITLES = {"on_policy": "on-policy", "off_policy": "off-policy", "clamped": "clamped estimates"}
LABELS = {
    "bias": "relative bias |E g - G*| / |G*|",
    "cosine": "cosine with G*\n(undefined for k1 in loss)",
    "variance": "variance of one completion's\ngradient / |G*|²",
}
SPREAD = "mean over seeds (of variances geometric), from the least to the greatest"


def drawn(frame: pd.DataFrame, figure: str) -> Iterator[tuple[str, Look, pd.DataFrame]]:
    """Name, look and rows of each configuration that ``figure`` shows, in the order of the legend."""
    names = frame.configuration.str.replace(", bare", "").str.replace(", total", "")
    for name in SHOWN[figure]:
        yield name, LOOKS[name], frame[names == name]


def draw_length(out: Path) -> None:
    """Exact bias and variance against length, one row of panels per regime; the same sampled."""
    import pandas as pd

    frame = pd.read_csv(out / "length.csv")
    exact = frame[frame.method == "exact"]
    with figure(out / "length.svg", 2, 2, 2.6) as (drawing, panels):
        for line, regime in zip(panels, ("on_policy", "off_policy"), strict=True):
            for axes, value in zip(line, ("bias", "variance"), strict=True):
                curves(axes, exact[exact.regime == regime], regime, "length", value)
                label(axes, value, regime, xlabel="length (tokens)")
        legend_below(drawing, SPREAD)
    plot_monte_carlo(frame, out / "length_monte_carlo.svg")


def plot_monte_carlo(frame: pd.DataFrame, path: Path) -> None:
    """Rounds of sampling with intervals over the exact curves of the same policy, and the noise floor of rounds."""
    import numpy as np

    frame = frame[frame.seed == frame[frame.method == "monte_carlo"].seed.min()]
    columns = {"naive_bias": "mean |error|", "bias": "noise removed", "variance": ""}
    with figure(path, 2, 3, 2.4) as (drawing, panels):
        for line, regime in zip(panels, ("on_policy", "off_policy"), strict=True):
            for axes, (value, words) in zip(line, columns.items(), strict=True):
                for name, style, rows in drawn(frame[frame.regime == regime], regime):
                    curve, points = rows[rows.method == "exact"], rows[rows.method == "monte_carlo"]
                    axes.plot(curve.length, curve[value.removeprefix("naive_")], color=style["color"], alpha=0.7)
                    ends = [points[f"{value}_low"], points[f"{value}_high"]]
                    if value == "variance":  # of the logarithm, to first order
                        relative = (ends[1] - ends[0]) / 2 / points[value]
                        ends = [points[value] * np.exp(-relative), points[value] * np.exp(relative)]
                    off = [(points[value] - ends[0]).clip(lower=0), (ends[1] - points[value]).clip(lower=0)]
                    bars: dict[str, Any] = {"yerr": off, "elinewidth": 0.7}
                    mark = style | {"linestyle": "none", "markersize": 2.5}
                    axes.errorbar(points.length, points[value], label=name, **bars, **mark)
                label(axes, value.removeprefix("naive_"), regime, words, xlabel="length (tokens)")
            line[1].set_ylim(line[0].get_ylim())
        legend_below(
            drawing, "lines: exact; marks: sampled, with 95% intervals (of variances in logarithms); one policy"
        )


def draw_distance(out: Path) -> None:
    """Bias, cosine and variance against the logit distance; clamped forms in a row of their own."""
    import pandas as pd

    frame = pd.read_csv(out / "distance.csv")
    with figure(out / "distance.svg", 2, 3, 2.4) as (drawing, panels):
        for line, group in zip(panels, ("on_policy", "clamped"), strict=True):
            for axes, value in zip(line, ("bias", "cosine", "variance"), strict=True):
                curves(axes, frame, group, "distance", value)
                label(axes, value, group, xlabel="logit distance of policy\nand reference (nats)", xscale="log")
                plain_ticks(axes.xaxis)
        legend_below(drawing, SPREAD)


def draw_optimum(out: Path) -> None:
    """KL to the closed-form optimum during optimization, one panel per setting, at the smallest beta."""
    import pandas as pd

    frame = pd.read_csv(out / "optimum_paths.csv")
    beta, settings = frame.beta.min(), list(frame.setting.unique())
    with figure(out / "optimum.svg", -(-len(settings) // 2), 2, 2.6, sharey=True) as (drawing, panels):
        for axes, setting in zip(panels.flat, settings, strict=False):
            here = frame[(frame.setting == setting) & (frame.beta == beta)]
            for at, (name, style, rows) in enumerate(drawn(here, "optimum")):
                ends = rows[["min", "median", "max"]].clip(lower=FLOOR)
                every = max(1, len(rows) // 6)
                axes.plot(rows.step + 1, ends["median"], label=name, markevery=(at % every, every), **style)
                colour = {"color": style["color"], "alpha": 0.08, "linewidth": 0}
                axes.fill_between(rows.step + 1, ends["min"], ends["max"], **colour)
            axes.set(xscale="log", yscale="log", ylim=(FLOOR / 2, 20), title=setting, xlabel="update")
            plain_ticks(axes.xaxis)
        for axes in panels[:, 0]:
            axes.set_ylabel(f"KL(policy‖optimum)\n(nats, at least {FLOOR:g})")
        legend_below(drawing, f"beta {beta:g}; median over games, from the least to the greatest")


def draw_modes(out: Path) -> None:
    """Updates until a lost mode is back, by how lost it was; what never came back is drawn at the top."""
    import pandas as pd

    frame = pd.read_csv(out / "modes.csv")
    lost, settings = frame[frame.kind == "lost"], list(frame.setting.unique())
    names, ceiling = list(lost.configuration.unique()), 3 * frame.steps.max()
    with figure(out / "modes.svg", -(-len(settings) // 2), 2, 2.6, sharex=True, sharey=True) as (drawing, panels):
        for axes, setting in zip(panels.flat, settings, strict=False):
            here = lost[lost.setting == setting]
            steps = here.assign(step=(here.step + 1).fillna(ceiling))
            for position, name in enumerate(names):
                group = steps[steps.configuration == name].groupby("rare").step
                shifted = [rare * 1.12 ** (position - len(names) / 2) for rare in group.median().index]
                axes.plot(shifted, group.median(), label=name, **LOOKS[name])
                axes.vlines(shifted, group.min(), group.max(), color=LOOKS[name]["color"], alpha=0.4, linewidth=0.8)
            axes.axhline(ceiling, color="black", linewidth=0.6)
            never = f"never within {int(here.steps.max())} updates"
            axes.text(0.98, ceiling * 1.25, never, fontsize=7, ha="right", transform=axes.get_yaxis_transform())
            axes.set(xscale="log", yscale="log", ylim=(8, ceiling * 3), title=setting)
        for axes in panels[-1]:
            axes.set_xlabel("initial probability of the mode's first token")
        for axes in panels[:, 0]:
            axes.set_ylabel("updates until the mode has half\nof its optimal probability")
            plain_ticks(axes.yaxis)
        legend_below(
            drawing, "median over seeds, from the least to the greatest; marks are shifted so that all are seen"
        )


def curves(axes: Any, frame: pd.DataFrame, group: str, x: str, y: str) -> None:
    """One line per configuration of ``group`` against ``x``: mean over seeds, band from the least to the greatest."""
    import numpy as np

    for at, (name, style, rows) in enumerate(drawn(frame, group)):
        seeds = rows.groupby(x)[y]
        middle = np.exp(np.log(rows[y]).groupby(rows[x]).mean()) if y == "variance" else seeds.mean()
        every = max(1, len(middle) // 6)
        axes.plot(middle.index, middle, label=name, markevery=(at % every, every), **style)
        axes.fill_between(seeds.min().index, seeds.min(), seeds.max(), color=style["color"], alpha=0.08, linewidth=0)


def label(axes: Any, value: str, group: str, words: str = "", **settings: Any) -> None:
    """Title, labels and scale of a panel of ``value``."""
    axes.set(title=f"{TITLES[group]}{': ' if words else ''}{words}", ylabel=LABELS[value], **settings)
    if value == "bias":
        axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
        axes.set_ylim(-0.05, min(max(axes.get_ylim()[1], 1.2), 3.0))
    if value == "variance":
        axes.set_yscale("log")
        plain_ticks(axes.yaxis)


# --- parts --------------------------------------------------------------------------------------------------------
SEEDS = {"length": 5, "distance": 20, "optimum": 5, "modes": 5}
PARTS = tuple(SEEDS)


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a part is measured; ``quick`` shrinks every axis. ``seeds`` overrides the part's default number."""

    quick: bool = False
    seeds: int | None = None

    def of(self, part: str) -> int:
        return self.seeds if self.seeds is not None else (2 if self.quick else SEEDS[part])

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

    def settings(self, settings: dict[str, Optimization]) -> dict[str, Optimization]:
        """With a tenth of the steps where quick."""
        if not self.quick:
            return settings
        return {name: dataclasses.replace(item, steps=item.steps // 10) for name, item in settings.items()}


def run_part(part: str, out: Path, size: Size, *, command: str, done: Callable[[], None] = lambda: None) -> None:
    """Measure one of :data:`PARTS` into ``out``: CSV, figures, its block of README.md."""
    out.mkdir(parents=True, exist_ok=True)
    began, tags = time.monotonic(), provenance_tags()
    {"length": _length, "distance": _distance, "optimum": _optimum, "modes": _modes}[part](out, size, done)
    table = stored_tables(part, out)
    draw(part, out)
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "numpy", "pandas", "matplotlib"))
    commit = tags["git.commit"][:12] + ("+" if tags["git.dirty"] == "true" else "")
    source = (
        f"Made by `{command}` in {time.monotonic() - began:.0f} s on one core, at commit {commit} with Python "
        f"{platform.python_version()}, {versions}; float64."
    )
    verified = f"<!-- python research/scripts/stored_tables.py synthetic_{part} -->"
    update_page(out / "README.md", part, f"{verified}\n\n{table}\n\n{source}")


def stored_tables(part: str, out: Path) -> str:
    """The tables of a part, from the data in ``out``."""
    import pandas as pd

    functions: dict[str, tuple[Callable[..., str], list[str]]] = {
        "length": (length_tables, ["length", "memory"]),
        "distance": (distance_tables, ["distance", "gaps"]),
        "optimum": (optimum_tables, ["optimum"]),
        "modes": (modes_tables, ["modes"]),
    }
    function, names = functions[part]
    return function(*(pd.read_csv(out / f"{name}.csv") for name in names))


def draw(part: str, out: Path) -> None:
    """The figures of a part, from the data in ``out``."""
    {"length": draw_length, "distance": draw_distance, "optimum": draw_optimum, "modes": draw_modes}[part](out)


def _length(out: Path, size: Size, done: Callable[[], None]) -> None:
    rounds, samples = (20, 200) if size.quick else (bias_variance.ROUNDS, bias_variance.SAMPLES)
    seeds, memory_lengths = size.of("length"), size.lengths if size.quick else bias_variance.MEMORY_LENGTHS
    frame = bias_variance.length_study(lengths=size.lengths, seeds=seeds, rounds=rounds, samples=samples, done=done)
    memory = bias_variance.memory_study(lengths=memory_lengths, seeds=seeds)
    save_csv(frame, out / "length.csv")
    save_csv(memory, out / "memory.csv")


def _distance(out: Path, size: Size, done: Callable[[], None]) -> None:
    frame = bias_variance.distance_study(seeds=size.of("distance"), done=done)
    gaps = bias_variance.gap_study(seeds=10 if size.quick else 100)
    save_csv(frame, out / "distance.csv")
    save_csv(gaps, out / "gaps.csv")


def _optimum(out: Path, size: Size, done: Callable[[], None]) -> None:
    ends, paths = optimum.optimum_study(seeds=size.of("optimum"), settings=size.settings(optimum.SETTINGS), done=done)
    save_csv(ends, out / "optimum.csv")
    keys = ["setting", "configuration", "beta", "step"]  # over games, whose ends are in the other table
    by_step = paths.groupby(keys, sort=False).to_optimum.agg(["median", "min", "max"]).reset_index()
    save_csv(by_step, out / "optimum_paths.csv")


def _modes(out: Path, size: Size, done: Callable[[], None]) -> None:
    frame = optimum.mode_study(seeds=size.of("modes"), settings=size.settings(optimum.MODE_SETTINGS), done=done)
    save_csv(frame, out / "modes.csv")
