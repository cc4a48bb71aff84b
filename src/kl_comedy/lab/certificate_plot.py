"""Certificates as a picture: bias and variance in each regime, and bias against length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.oracle.gradients import initial_beta
from kl_comedy.tracking.figures import (
    COLUMN,
    PAGE,
    Look,
    check_suffix,
    legend_below,
    look,
    new_figure,
    paper_style,
    plain_ticks,
    save_figure,
)

if TYPE_CHECKING:
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate import Certificate

REGIMES = {"on_policy": "on-policy", "off_policy": "off-policy", "mixed": "several policies in a completion"}
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9)
FLOOR = 1e-3
"""Where an exactly unbiased configuration is drawn on the logarithmic bias axis."""


@paper_style()
def plot_certificates(certificates: Sequence[Certificate], path: Path) -> None:
    """Write the picture; configurations that agree in all of it are one.

    Raises :class:`UserError` where the file cannot be written or its kind is unknown.
    """
    check_suffix(path, "--plot")
    curves = _biases_by_length({c.name: c.terms for c in certificates if c.terms})
    groups: dict[tuple[object, ...], list[list[Certificate]]] = {}
    for name, curve in curves.items():
        of_name = [certificate for certificate in certificates if certificate.name == name]
        spots = ((c.regime, f"{_bias(c):.2g}", f"{c.variance:.2g}") for c in of_name)
        groups.setdefault((*spots, *(f"{value:.3f}" for value in curve)), []).append(of_name)
    regimes = [regime for regime in REGIMES if any(c.regime == regime for c in certificates)]
    columns = min(2, len(regimes) + 1)
    figure = new_figure(PAGE if columns > 1 else COLUMN, 2.7 * -(-(len(regimes) + 1) // columns))
    panels = list(figure.subplots(-(-(len(regimes) + 1) // columns), columns, squeeze=False).flat)
    for axes in panels[len(regimes) + 1 :]:
        axes.set_axis_off()
    for at, members in enumerate(groups.values()):
        names, style = [of_name[0].name for of_name in members], look(at)
        label = ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
        panels[len(regimes)].plot(LENGTHS, curves[names[0]], label=label, **style)
        for axes, regime in zip(panels, regimes, strict=False):
            points = [(max(_bias(c), FLOOR), c.variance) for c in members[0] if c.regime == regime]
            axes.plot(*zip(*points, strict=True), **_mark(style))
    for axes, regime in zip(panels, regimes, strict=False):
        axes.set(xscale="log", yscale="log", title=f"Bias and variance, {REGIMES[regime]}")
        axes.set_xlim(FLOOR / 1.5, max(2.0, axes.get_xlim()[1]))
        axes.set_xlabel(f"relative bias to the sequence-level reverse KL\n(left edge: at most {FLOOR:g})")
        axes.set_ylabel("variance of one completion's gradient\n/ |G*|²")
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
    panels[len(regimes)].set(title="Bias by length, on-policy, binary policies", ylabel="relative bias")
    panels[len(regimes)].set_xlabel("length of the completion (tokens)")
    legend_below(figure, "all by exact enumeration")
    try:
        save_figure(figure, path)
    except OSError as error:
        raise UserError(f"--plot {path}: {error}") from None


def _bias(certificate: Certificate) -> float:
    return certificate.relative_bias["sequence_reverse"]


def _mark(style: Look) -> dict[str, Any]:
    """Only the marker of a look, large enough to stand alone."""
    return style | {"linestyle": "none", "markersize": 4.5, "alpha": 0.85}


def _biases_by_length(configurations: Mapping[str, Sequence[KLTerm]]) -> dict[str, list[float]]:
    """Relative bias on-policy at each of :data:`LENGTHS`, by configuration; binary policies, exact."""
    biases: dict[str, list[float]] = {name: [] for name in configurations}
    for length in LENGTHS:
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        setting = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0, parameters=6, distance=0.5))
        target_D = target_gradient(setting, "sequence_reverse")
        for name, terms in configurations.items():
            scale = max(initial_beta(term) for term in terms) or 1.0
            gradient_D = expected_gradient(setting, terms).gradient_D / scale
            biases[name].append(float((gradient_D - target_D).norm() / target_D.norm()))
    return biases
