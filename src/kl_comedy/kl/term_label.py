"""The short name of a KL term: estimator, direction, level and placement, then whatever differs from the defaults.

Labels stand in stored certificates, results tables and pictures. A changed word would make one configuration look like
two, so the words here are frozen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kl_comedy.kl.term import KLTerm

NAMED_UNLESS_DEFAULT = (("gradient", "natural"), ("anchor", "current"), ("reference", "initial"))
"""Fields that are written as ``field=value``, and the value at which they are left out."""


def term_label(term: KLTerm) -> str:
    """The label of ``term``; :meth:`KLTerm.label` has an example. ``beta`` is not part of it."""
    # Runs are stored with their label: a new part must be absent from the labels of older terms.
    parts = [f"{term.estimator}_{term.direction}_{term.level} in {term.placement}"]
    # At level sequence there is one cost per completion, and so no credit to tell apart.
    if term.placement == "reward" and term.level == "token":
        parts.append(_credit(term))
    if term.options:
        parts.append(_options(term.options))
    if term.correction != "none":
        parts.append(_correction(term))
    if term.input_clamp is not None:
        parts.append(f"input clamped at {term.input_clamp:g}")
    if term.output_clamp is not None:
        parts.append(f"output clamped at {term.output_clamp:g}")
    if term.weight != "none":
        parts.append(_weight(term))
    for name, default in NAMED_UNLESS_DEFAULT:
        value = getattr(term, name)
        if value != default:
            parts.append(f"{name}={value}")
    if term.baseline not in (None, "after"):
        parts.append(f"{term.baseline} baseline")
    if term.score_centring is not None:
        parts.append(_score_centring(term))
    return " ".join(parts)


def _credit(term: KLTerm) -> str:
    """As ``to_go`` or ``to_go x 0.9^n``."""
    if term.discount == 1:
        return str(term.credit)
    return f"{term.credit} x {term.discount:g}^n"


def _options(options: Mapping[str, float | str]) -> str:
    """As ``form=bucket,k=16``, in alphabetical order: the order in a config must not matter."""
    texts = []
    for name, value in sorted(options.items()):
        if isinstance(value, str):
            texts.append(f"{name}={value}")
        else:
            texts.append(f"{name}={value:g}")
    return ",".join(texts)


def _correction(term: KLTerm) -> str:
    """As ``x prefix last 4<=8 truncate``: the ratio, its window and its cap."""
    text = f"x {term.correction}"
    if term.window is not None:
        text += f" last {term.window}"
    if term.cap is not None:
        text += f"<={term.cap:g} {term.cap_mode}"
    return text


def _score_centring(term: KLTerm) -> str:
    """As ``score centred`` or ``score centred top 16``."""
    if term.score_centring == "exact":
        return "score centred"
    return f"score centred top {term.score_centring}"


def _weight(term: KLTerm) -> str:
    """As ``x policy certainty^2``."""
    text = f"x {term.weight} certainty"
    if term.weight_power != 1:
        text += f"^{term.weight_power:g}"
    return text
