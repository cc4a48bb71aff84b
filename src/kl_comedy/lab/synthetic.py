"""The synthetic study: measure, write data and figures, and put the tables into the page beside them.

Lines of figures are means over seeds (geometric ones on logarithmic axes), bands span the least and the greatest seed.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import bad_value
from kl_comedy.lab import bias_variance, optimum
from kl_comedy.lab.bias_variance import CLAMPED, OFF_POLICY, ON_POLICY, OPTIMIZED, RECOVERING, gap_table
from kl_comedy.lab.optimum import Optimization
from kl_comedy.lab.pages import figure, legend_below, markdown, save_csv, three_digits

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
    return "\n\n".join(
        [
            *parts,
            "**Monte Carlo (first policy), against the exact values of the same policy**",
            markdown(coverage(frame)),
        ]
    )


def coverage(frame: pd.DataFrame) -> pd.DataFrame:
    """By regime and configuration: at how many lengths the 95% interval holds the exact value; the noise floor."""
    import pandas as pd

    keys = ["regime", "length", "seed", "configuration"]
    sampled = frame[frame.method == "monte_carlo"].set_index(keys)
    exact = frame[frame.method == "exact"].set_index(keys).loc[sampled.index]
    tiny = 1e-9
    joined = pd.DataFrame(
        {
            "bias": (exact.bias >= sampled.bias_low - tiny) & (exact.bias <= sampled.bias_high + tiny),
            "naive": (exact.bias >= sampled.naive_bias_low) & (exact.bias <= sampled.naive_bias_high),
            "variance": (exact.variance >= sampled.variance_low) & (exact.variance <= sampled.variance_high),
            "floor": sampled.naive_bias - exact.bias,
            "ratio": sampled.variance / exact.variance,
        }
    )
    grouped = joined.groupby(["regime", "configuration"], sort=False)
    rows = []
    for (regime, name), group in grouped:
        count = len(group)
        rows.append(
            {
                "regime": regime,
                "configuration": name,
                "bias covered": f"{group.bias.sum()}/{count}",
                "covered by the mean error of rounds": f"{group.naive.sum()}/{count}",
                "what that mean adds to the bias": float(group.floor.mean()),
                "variance covered": f"{group.variance.sum()}/{count}",
                "sampled / exact variance (least)": float(group.ratio.min()),
            }
        )
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
        parts += [
            f"**{setting}, beta = {beta:g}** (nats; means over {group.seed.nunique()} games)",
            markdown(rows.reset_index()),
        ]
    return "\n\n".join(parts)


def modes_tables(frame: pd.DataFrame) -> str:
    """Updates until a mode is back or given up, and what it has at the end."""
    import pandas as pd

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
        parts += [
            f"**{setting}: updates {what}, by the probability {where}**; in brackets its final probability",
            markdown(pd.DataFrame(rows)),
        ]
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
    """Configurations down, ``column`` across; an entry is the mean over seeds with their range."""
    import pandas as pd

    rows = []
    for (regime, name), group in frame.groupby(["regime", "configuration"], sort=False):
        row: dict[str, Any] = {"regime": str(regime).replace("_", "-"), "configuration": name}
        for at, cell in group.groupby(column)[value]:
            row[f"{at:g}"] = _range(cell.mean(), cell.min(), cell.max())
        rows.append(row)
    return f"**{title}**\n\n{markdown(pd.DataFrame(rows))}"


def _range(middle: float, low: float, high: float) -> str:
    if middle != middle:
        return "-"
    shown = [three_digits(v) for v in (middle, low, high)]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} [{shown[1]}, {shown[2]}]"


REGIME_NAMES = {"on_policy": "on-policy", "off_policy": "off-policy"}
FLOOR = 1e-10
"""Where KLs that are zero up to rounding are drawn (nats)."""
_DASHES = ("-", "--", "-.", ":")


def plot_length(frame: pd.DataFrame, path: Path) -> None:
    """Exact bias and variance against length, one row of panels per regime."""
    exact = frame[frame.method == "exact"]
    with figure(path, 2, 2, (14, 11)) as (_, panels):
        for line, (regime, names) in zip(panels, _REGIMES, strict=True):
            here = exact[exact.regime == regime]
            for axes, value, logarithmic in ((line[0], "bias", False), (line[1], "variance", True)):
                curves(axes, here, "length", value, names, logarithmic=logarithmic)
                axes.set_xlabel("length (tokens)")
            _bias_axis(line[0], REGIME_NAMES[regime])
            _variance_axis(line[1], REGIME_NAMES[regime])
            line[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot_monte_carlo(frame: pd.DataFrame, path: Path) -> None:
    """Rounds of sampling with intervals over the exact curves of the same policy, and the noise floor of rounds."""
    sampled = frame[frame.method == "monte_carlo"]
    seed = sampled.seed.min()
    with figure(path, 2, 3, (19, 11)) as (_, panels):
        for line, (regime, names) in zip(panels, _REGIMES, strict=True):
            exact = frame[(frame.method == "exact") & (frame.regime == regime) & (frame.seed == seed)]
            here = sampled[(sampled.regime == regime) & (sampled.seed == seed)]
            for axes, value, truth in zip(
                line, ("naive_bias", "bias", "variance"), ("bias", "bias", "variance"), strict=True
            ):
                for style, name in zip(styles(), names, strict=False):
                    curve, points = exact[exact.configuration == name], here[here.configuration == name]
                    axes.plot(curve.length, curve[truth], color=style["color"], linewidth=1, alpha=0.7)
                    off = [points[value] - points[f"{value}_low"], points[f"{value}_high"] - points[value]]
                    axes.errorbar(
                        points.length,
                        points[value],
                        yerr=[o.clip(lower=0) for o in off],
                        fmt="o",
                        markersize=3,
                        color=style["color"],
                        capsize=2,
                        label=name,
                    )
                axes.set_xlabel("length (tokens)")
                axes.grid(alpha=0.3)
            _bias_axis(line[0], f"{REGIME_NAMES[regime]}: mean of the rounds' |error|")
            _bias_axis(line[1], f"{REGIME_NAMES[regime]}: without the noise floor")
            line[1].set_ylim(line[0].get_ylim())
            _variance_axis(line[2], REGIME_NAMES[regime])
            line[2].set_yscale("log")
            line[2].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot_distance(frame: pd.DataFrame, path: Path) -> None:
    """Bias, cosine and variance against the logit distance; clamped forms in a row of their own."""
    clamped = ["k2 in loss", "k3 in loss", *CLAMPED]
    with figure(path, 2, 3, (19, 11)) as (_, panels):
        for line, names, title in zip(
            panels, (list(ON_POLICY), clamped), ("on-policy", "clamped estimates"), strict=True
        ):
            for axes, value in zip(line, ("bias", "cosine", "variance"), strict=True):
                curves(axes, frame, "distance", value, names, logarithmic=value == "variance")
                axes.set_xscale("log")
                axes.set_xlabel("logit distance of policy and reference (nats)")
            _bias_axis(line[0], title)
            line[1].set_title("Cosine with the sequence-level reverse-KL gradient")
            line[1].set_ylabel("cosine (undefined for k1 in loss)")
            _variance_axis(line[2], title)
            line[2].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot_optimum(paths: pd.DataFrame, path: Path) -> None:
    """KL to the closed-form optimum during optimization, one panel per setting, at the smallest beta."""
    beta = paths.beta.min()
    settings = list(paths.setting.unique())
    with figure(path, len(settings), 1, (14, 5 * len(settings))) as (_, panels):
        for axes, setting in zip(panels.flat, settings, strict=True):
            here = paths[(paths.setting == setting) & (paths.beta == beta)].assign(
                step=lambda f: f.step + 1, to_optimum=lambda f: f.to_optimum.clip(lower=FLOOR)
            )
            here = merged(here, "step", "to_optimum", list(paths.configuration.unique()))
            curves(axes, here, "step", "to_optimum", list(here.configuration.unique()), logarithmic=True)
            axes.set_xscale("log")
            axes.set_ylim(FLOOR / 2, 20)
            axes.set_title(f"{setting}, beta = {beta:g}")
            axes.set_xlabel("update")
            axes.set_ylabel(f"KL(policy || optimum), nats (floor {FLOOR:g})")
            axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def merged(frame: pd.DataFrame, x: str, y: str, names: Sequence[str]) -> pd.DataFrame:
    """Configurations whose means agree to two digits everywhere become one, with all their names."""
    import pandas as pd

    alike: dict[tuple[float, ...], list[str]] = {}
    for name in names:
        means = frame[frame.configuration == name].groupby(x)[y].mean()
        alike.setdefault(tuple(float(f"{value:.1e}") for value in means), []).append(name)
    first = {group[0]: textwrap.fill(" = ".join(group), 52) for group in alike.values()}
    rows = frame[frame.configuration.isin(list(first))]
    order = pd.Categorical(rows.configuration, categories=list(first), ordered=True)
    rows = rows.assign(order=order).sort_values(["order", x])
    return rows.assign(configuration=rows.configuration.map(first))


def plot_modes(frame: pd.DataFrame, path: Path) -> None:
    """Updates until a lost mode is back, by how lost it was; what never came back is drawn at the top."""
    settings = list(frame.setting.unique())
    lost = frame[frame.kind == "lost"]
    with figure(path, 1, len(settings), (5.2 * len(settings), 6.2), sharey=True) as (drawing, panels):
        ceiling = 3 * frame.steps.max()
        for axes, setting in zip(panels.flat, settings, strict=True):
            here = lost[lost.setting == setting]
            drawn = here.assign(step=(here.step + 1).fillna(ceiling))
            names = list(lost.configuration.unique())
            for position, (style, name) in enumerate(zip(styles(), names, strict=False)):
                group = drawn[drawn.configuration == name].groupby("rare").step
                shifted = [rare * 1.09 ** (position - len(names) / 2) for rare in group.median().index]
                axes.plot(shifted, group.median(), marker="o", markersize=4, label=name, **style)
                axes.vlines(shifted, group.min(), group.max(), color=style["color"], alpha=0.4)
            axes.axhline(ceiling, color="black", linewidth=0.7)
            axes.text(
                0.02,
                ceiling * 1.12,
                f"never within {int(here.steps.max())} updates",
                fontsize=8,
                transform=axes.get_yaxis_transform(),
            )
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylim(8, ceiling * 2)
            axes.set_xlabel("probability the policy starts with on the mode's first token")
            axes.set_title(setting, fontsize=10)
            axes.grid(alpha=0.3)
        panels[0, 0].set_ylabel("updates until the mode has half of its optimal probability")
        legend_below(drawing, panels[0, 0], 5)


_REGIMES = (("on_policy", list(ON_POLICY)), ("off_policy", list(OFF_POLICY)))


def curves(axes: Any, frame: pd.DataFrame, x: str, y: str, names: Sequence[str], *, logarithmic: bool) -> None:
    """One line per configuration against ``x``: mean over seeds, band from the least to the greatest."""
    import numpy as np

    for style, name in zip(styles(), names, strict=False):
        here = frame[frame.configuration == name]
        group = here.groupby(x)[y]
        middle = np.exp(np.log(here[y]).groupby(here[x]).mean()) if logarithmic else group.mean()
        axes.plot(middle.index, middle, label=name, **style)
        axes.fill_between(group.min().index, group.min(), group.max(), color=style["color"], alpha=0.08)
    if logarithmic:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)


def styles() -> Iterator[dict[str, Any]]:
    """Color and dash, different for every line of a figure; equal curves stay visible through the dashes."""
    import matplotlib

    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    position = 0
    while True:
        yield {"color": colors[(position * 2) % 20 + (position // 10) % 2], "linestyle": _DASHES[position % 4]}
        position += 1


def _bias_axis(axes: Any, title: str) -> None:
    axes.set_ylabel("relative bias |E g - G*| / |G*|")
    axes.set_title(f"Bias, {title}")
    axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    axes.set_ylim(-0.05, min(max(axes.get_ylim()[1], 1.2), 3.0))
    axes.grid(alpha=0.3)


def _variance_axis(axes: Any, title: str) -> None:
    axes.set_ylabel("trace variance of one completion's gradient / |G*|²")
    axes.set_title(f"Variance, {title}")
    axes.grid(alpha=0.3)


PARTS = ("length", "distance", "optimum", "modes")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
SEEDS = {"length": 5, "distance": 20, "optimum": 5, "modes": 5}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a part is measured; ``quick`` shrinks every axis. ``seeds`` overrides the part's own number."""

    quick: bool = False
    seeds: int | None = None

    def of(self, part: str) -> int:
        return self.seeds if self.seeds is not None else (2 if self.quick else SEEDS[part])

    def steps(self, part: str) -> int:
        """How many times a part reports progress."""
        if part == "length":
            return len(self.lengths) * self.of(part)
        if part == "distance":
            return len(bias_variance.DISTANCES)
        if part == "optimum":
            return len(self.settings(optimum.SETTINGS)) * len(OPTIMIZED)
        return len(self.settings(optimum.MODE_SETTINGS)) * len(optimum.KINDS) * len(RECOVERING)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (5, 7, 9) if self.quick else bias_variance.LENGTHS

    def settings(self, settings: dict[str, Optimization]) -> dict[str, Optimization]:
        """With a tenth of the steps where quick."""
        if not self.quick:
            return settings
        return {name: dataclasses.replace(item, steps=item.steps // 10) for name, item in settings.items()}


def run_part(part: str, out: Path, size: Size, *, command: str, done: Callable[[], None] = lambda: None) -> None:
    """Measure one part into ``out``: CSV, PNG, its block of README.md. Raises :class:`UserError` for another name."""
    if part not in PARTS:
        raise bad_value("part", part, (*PARTS, "all"))
    out.mkdir(parents=True, exist_ok=True)
    began, commit = time.monotonic(), _commit()
    table = {"length": _length, "distance": _distance, "optimum": _optimum, "modes": _modes}[part](out, size, done)
    source = provenance(command, time.monotonic() - began, commit)
    update_page(out / "README.md", part, f"{table}\n\n{source}")


def _length(out: Path, size: Size, done: Callable[[], None]) -> str:
    rounds, samples = (20, 200) if size.quick else (bias_variance.ROUNDS, bias_variance.SAMPLES)
    frame = bias_variance.length_study(
        lengths=size.lengths, seeds=size.of("length"), rounds=rounds, samples=samples, done=done
    )
    memory = bias_variance.memory_study(
        lengths=size.lengths if size.quick else bias_variance.MEMORY_LENGTHS, seeds=size.of("length")
    )
    save_csv(frame, out / "length.csv")
    save_csv(memory, out / "memory.csv")
    plot_length(frame, out / "length.png")
    plot_monte_carlo(frame, out / "length_monte_carlo.png")
    return length_tables(frame, memory)


def _distance(out: Path, size: Size, done: Callable[[], None]) -> str:
    frame = bias_variance.distance_study(seeds=size.of("distance"), done=done)
    gaps = bias_variance.gap_study(seeds=10 if size.quick else 100)
    save_csv(frame, out / "distance.csv")
    save_csv(gaps, out / "gaps.csv")
    plot_distance(frame, out / "distance.png")
    return distance_tables(frame, gaps)


def _optimum(out: Path, size: Size, done: Callable[[], None]) -> str:
    ends, paths = optimum.optimum_study(seeds=size.of("optimum"), settings=size.settings(optimum.SETTINGS), done=done)
    save_csv(ends, out / "optimum.csv")
    keys = ["setting", "configuration", "beta", "step"]  # over games, whose ends are in the other table
    by_step = paths.groupby(keys, sort=False).to_optimum.agg(["median", "min", "max"]).reset_index()
    save_csv(by_step, out / "optimum_paths.csv")
    plot_optimum(paths, out / "optimum.png")
    return optimum_tables(ends)


def _modes(out: Path, size: Size, done: Callable[[], None]) -> str:
    frame = optimum.mode_study(seeds=size.of("modes"), settings=size.settings(optimum.MODE_SETTINGS), done=done)
    save_csv(frame, out / "modes.csv")
    plot_modes(frame, out / "modes.png")
    return modes_tables(frame)


def provenance(command: str, seconds: float, commit: str) -> str:
    """What made a block: command, time, versions, commit."""
    names = ("torch", "numpy", "pandas", "matplotlib")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        f"Made by `{command}` in {seconds:.0f} s on one core, at commit {commit} with Python "
        f"{platform.python_version()}, {versions}; float64."
    )


def _commit() -> str:
    """The commit of the checkout the package lies in, ``+`` where its sources differ from it, or ``unknown``."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        packages = [str(here / name) for name in ("lab", "kl", "objective")]
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", *packages) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def update_page(path: Path, part: str, text: str) -> None:
    """Replace the generated block of ``part``, or append one; text around it stays."""
    begin, end = (mark.replace("generated", f"generated {part}") for mark in (BEGIN, END))
    page = path.read_text() if path.exists() else "# The synthetic study\n"
    block = f"{begin}\n\n{text}\n\n{end}"
    before, mark, rest = page.partition(begin)
    if not mark:
        page = f"{page.rstrip()}\n\n## {part.capitalize()}\n\n{block}\n"
    else:
        page = before + block + rest.partition(end)[2]
    path.write_text(page)
