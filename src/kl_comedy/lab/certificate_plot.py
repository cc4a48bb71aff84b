"""Certificates as a picture: the bias-variance plane, and bias against length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.kl.oracle import Instance, Tree, expected_gradient, target_gradient
from kl_comedy.lab.pages import figure

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.certificate import Certificate


LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9)
FLOOR = 1e-3
"""Where an exactly unbiased configuration is drawn on the logarithmic bias axis."""
MOST_CURVES = 12


def plot_certificates(certificates: Sequence[Certificate], path: Path) -> None:
    """Write the picture. Raises :class:`UserError` where the file cannot be written or its kind is unknown."""
    try:
        with figure(path, 1, 2, (15, 6.5), dpi=140) as (_, panels):
            _plane(panels[0][0], certificates)
            _curves(panels[0][1], certificates)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from None


_MARKERS = {"on_policy": "o", "off_policy": "^", "mixed": "s"}


def _plane(axes: Any, certificates: Sequence[Certificate]) -> None:
    """Relative bias against variance, one point per configuration and regime; equal points share a label."""
    labels: dict[tuple[float, float], list[str]] = {}
    for regime, marker in _MARKERS.items():
        points = [c for c in certificates if c.regime == regime and c.terms]
        xs = [max(c.relative_bias["sequence_reverse"], FLOOR) for c in points]
        ys = [c.variance for c in points]
        if points:
            axes.scatter(xs, ys, marker=marker, label=regime.replace("_", "-"), alpha=0.75, s=42)
        for c, x, y in zip(points, xs, ys, strict=True):
            spot = (round(x, 3 if x > FLOOR else 6), round(y, 2))
            named = labels.setdefault(spot, [])
            if c.name not in named:
                named.append(c.name)
    if len(labels) <= 40:
        for (x, y), names in labels.items():
            text = names[0] if len(names) == 1 else f"{names[0]} +{len(names) - 1}"
            axes.annotate(text, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=6.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.axvspan(FLOOR * 0.8, FLOOR * 1.25, color="tab:green", alpha=0.12)
    axes.set_xlabel(f"relative bias to the sequence-level reverse KL (unbiased drawn at {FLOOR:g})")
    axes.set_ylabel("trace variance of one completion's gradient / |G*|²")
    axes.set_title("Bias and variance at equal samples (exact enumeration)")
    axes.legend(loc="best", fontsize=8)
    axes.grid(alpha=0.3)


def _curves(axes: Any, certificates: Sequence[Certificate]) -> None:
    """Relative bias on-policy against the length of the completion, binary policies, exact."""
    terms_of = {c.name: c.terms for c in certificates if c.terms}
    settings = [
        Instance.random(
            Tree.build(vocabulary=2, length=length, ends=False), regime="on_policy", seed=0, parameters=6, distance=0.5
        )
        for length in LENGTHS
    ]
    targets = [target_gradient(setting, "sequence_reverse") for setting in settings]
    drawn: dict[tuple[float, ...], list[str]] = {}
    for name, terms in terms_of.items():
        unit = [expected_gradient(setting, terms) for setting in settings]
        scale = max(abs(_beta(term)) for term in terms) or 1.0
        biases = [
            float((m.gradient_D / scale - target_D).norm() / target_D.norm())
            for m, target_D in zip(unit, targets, strict=True)
        ]
        drawn.setdefault(tuple(round(b, 6) for b in biases), []).append(name)
    for biases, names in list(drawn.items())[:MOST_CURVES]:
        label = ", ".join(names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
        axes.plot(LENGTHS, biases, marker=".", label=label)
    axes.set_xlabel("length of the completion (tokens)")
    axes.set_ylabel("relative bias, on-policy")
    axes.set_title("Bias against length (binary policies, exact)")
    axes.legend(fontsize=7, loc="best")
    axes.grid(alpha=0.3)


def _beta(term: Any) -> float:
    from kl_comedy.kl.oracle.gradients import initial_beta

    return initial_beta(term)
