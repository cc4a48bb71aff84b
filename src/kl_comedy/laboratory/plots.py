"""The synthetic study's figures from its frames; nothing here computes a gradient.

Lines are means over seeds (geometric ones on logarithmic axes), bands span the least and the greatest seed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.laboratory.configurations import CLAMPED, OFF_POLICY, ON_POLICY

if TYPE_CHECKING:
    import pandas as pd

REGIME_NAMES = {"on_policy": "on-policy", "off_policy": "off-policy"}
FLOOR = 1e-10
"""Where KLs that are zero up to rounding are drawn (nats)."""
_DASHES = ("-", "--", "-.", ":")


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its grid of panels ``[rows, columns]``, saved to ``path`` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    try:
        yield made, panels
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, dpi=110)
    finally:
        plt.close(made)


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
                        points.length, points[value], yerr=[o.clip(lower=0) for o in off], fmt="o", markersize=3,
                        color=style["color"], capsize=2, label=name,
                    )  # fmt: skip
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
    """KL to the closed-form optimum along descent, one panel per setting, at the smallest beta."""
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
    kept = frame[frame.configuration.isin(list(first))]
    order = pd.Categorical(kept.configuration, categories=list(first), ordered=True)
    kept = kept.assign(order=order).sort_values(["order", x])
    return kept.assign(configuration=kept.configuration.map(first))


def plot_modes(frame: pd.DataFrame, path: Path) -> None:
    """Updates until a lost mode is back, by how lost it was; what never came back is drawn at the top."""
    settings = list(frame.setting.unique())
    lost = frame[frame.kind == "lost"]
    with figure(path, 1, len(settings), (5.2 * len(settings), 6.2), sharey=True) as (made, panels):
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
            axes.text(0.02, ceiling * 1.12, f"never within {int(here.steps.max())} updates", fontsize=8,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_ylim(8, ceiling * 2)
            axes.set_xlabel("probability the policy starts with on the mode's first token")
            axes.set_title(setting, fontsize=10)
            axes.grid(alpha=0.3)
        panels[0, 0].set_ylabel("updates until the mode has half of its optimal probability")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)


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
