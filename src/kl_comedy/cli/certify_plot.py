"""Certificates as a picture: bias and variance in each regime, and bias against length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.oracle.certificate_record import stated_target
from kl_comedy.kl.oracle.gradients import initial_beta
from kl_comedy.results.figures import (
    COLUMN,
    PAGE,
    check_suffix,
    legend_below,
    new_figure,
    paper_style,
    plain_ticks,
    save_figure,
)
from kl_comedy.results.looks import Line, LineLook, line_looks

if TYPE_CHECKING:
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate_record import Certificate

REGIMES = {"on_policy": "on-policy", "off_policy": "off-policy", "mixed": "several policies in a completion"}
LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9)
FLOOR = 1e-3
"""Where an exactly unbiased configuration is drawn on the logarithmic bias axis."""
PANEL_HEIGHT = 2.7
"""Inches of one row of panels."""


@paper_style()
def plot_certificates(certificates: Sequence[Certificate], path: Path) -> None:
    """Draw bias against variance in each regime, and bias against length; write the picture to ``path``.

    Configurations whose numbers agree everywhere in the picture share one mark. Raises :class:`UserError` where the
    file cannot be written or its kind is unknown.
    """
    check_suffix(path, "--plot")
    curves = _biases_by_length({c.name: c.terms for c in certificates if c.terms})
    groups = _configurations_that_look_equal(certificates, curves)
    regimes = [regime for regime in REGIMES if any(c.regime == regime for c in certificates)]

    # One panel per regime, then the panel of lengths.
    panel_count = len(regimes) + 1
    columns = min(2, panel_count)
    rows = math.ceil(panel_count / columns)
    width = PAGE if columns > 1 else COLUMN
    figure = new_figure(width, PANEL_HEIGHT * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    regime_panels = dict(zip(regimes, panels, strict=False))
    length_panel = panels[len(regimes)]
    for unused in panels[panel_count:]:
        unused.set_axis_off()

    for group, style in zip(groups, _looks(groups), strict=True):
        first = group[0]
        length_panel.plot(LENGTHS, curves[first.name], label=_label(group), **style.of_line())
        for regime, axes in regime_panels.items():
            points = [(max(_bias(c), FLOOR), c.variance) for c in first.certificates if c.regime == regime]
            axes.plot(*zip(*points, strict=True), **_mark(style))

    for regime, axes in regime_panels.items():
        axes.set(xscale="log", yscale="log", title=f"Bias and variance, {REGIMES[regime]}")
        # To 2 at least: a relative bias of 1 is no gradient at all, which a reader looks for.
        axes.set_xlim(FLOOR / 1.5, max(2.0, axes.get_xlim()[1]))
        axes.set_xlabel(f"relative bias to the sequence-level reverse KL\n(log axis; left edge: at most {FLOOR:g})")
        axes.set_ylabel("variance of one completion's gradient\n/ |G*|² (log axis)")
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
    length_panel.set(title="Bias by length, on-policy, binary policies", ylabel="relative bias")
    length_panel.set_xlabel("length of the completion (tokens)")
    legend_below(figure, "all by exact enumeration")
    try:
        save_figure(figure, path)
    except OSError as error:
        raise UserError(f"--plot {path}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class _Configuration:
    """A configuration of KL terms, and its certificates in every regime."""

    name: str
    certificates: Sequence[Certificate]


def _configurations_that_look_equal(
    certificates: Sequence[Certificate], curves: Mapping[str, Sequence[float]]
) -> list[list[_Configuration]]:
    """Groups of configurations whose marks and curves would lie on top of each other, in the order of ``curves``."""
    groups: dict[tuple[object, ...], list[_Configuration]] = {}
    for name, curve in curves.items():
        own_certificates = [certificate for certificate in certificates if certificate.name == name]
        # Rounded as far as an eye can tell marks apart: equal gradients differ in their last digits.
        appearance: list[object] = [(c.regime, f"{_bias(c):.2g}", f"{c.variance:.2g}") for c in own_certificates]
        appearance += [f"{bias:.3f}" for bias in curve]
        groups.setdefault(tuple(appearance), []).append(_Configuration(name=name, certificates=own_certificates))
    return list(groups.values())


def _looks(groups: Sequence[Sequence[_Configuration]]) -> list[LineLook]:
    """The look of each group: colour and marker are those of the KL family of its first configuration in every figure.

    Configurations of one family, as those whose terms have other betas, differ in line style.
    """
    lines: dict[Line, dict[str, str]] = {}
    for group in groups:
        first = group[0]
        # A term's label has no beta, and so is its family.
        family = " + ".join(term.label() for term in first.certificates[0].terms)
        # The number of the group: names sort otherwise, and the first group of a family has the family's plain look.
        lines[Line(label=first.name, family=family)] = {"group": str(len(lines))}
    return list(line_looks(lines).values())


def _label(group: Sequence[_Configuration]) -> str:
    """The first two names of a group, and how many more there are."""
    label = ", ".join(configuration.name for configuration in group[:2])
    if len(group) <= 2:
        return label
    return f"{label} +{len(group) - 2}"


def _bias(certificate: Certificate) -> float:
    return certificate.relative_bias[certificate.stated]


def _mark(style: LineLook) -> dict[str, Any]:
    """Only the marker of a look, large enough to stand alone; filled ones in front of open ones."""
    zorder = 3.0
    if style.fill != "full":
        zorder = 2.5
    return style.of_line() | {"linestyle": "none", "markersize": 4.5, "alpha": 0.85, "zorder": zorder}


def _biases_by_length(configurations: Mapping[str, Sequence[KLTerm]]) -> dict[str, list[float]]:
    """Relative bias on-policy at each of :data:`LENGTHS`, by configuration; binary policies, exact."""
    biases: dict[str, list[float]] = {name: [] for name in configurations}
    for length in LENGTHS:
        # Binary and without an end token: the tree has 2^length leaves, which must stay enumerable at the longest.
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0, parameters=6, distance=0.5))
        for name, terms in configurations.items():
            # Terms may be weighed against each other; their common scale is no bias.
            scale = max(initial_beta(term) for term in terms) or 1.0
            target_D = target_gradient(instance, stated_target(terms))
            # A KL to the sampler is 0 on fresh samples, and so is its gradient: the error is then the gradient's norm.
            size = float(target_D.norm()) or 1.0
            gradient_D = expected_gradient(instance, terms).gradient_D / scale
            biases[name].append(float((gradient_D - target_D).norm()) / size)
    return biases
