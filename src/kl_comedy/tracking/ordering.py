"""The order of rows and lines: by what the groups say, not by when their first run happened to end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kl_comedy.tracking.derived import FAMILY, LABEL, NO_KL, family_of

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[tuple[int, float, str], ...]


def in_order(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """``frame`` sorted by its group columns, the first one first; runs of one group keep their order.

    Numbers are ordered as numbers, KL labels by family and then by beta, and what has no KL stands first.
    """
    if frame.empty or not groups:
        return frame
    keyed = {name: frame[name].fillna("").astype(str) for name in groups}
    orders = {name: {text: rank(name, text) for text in set(texts)} for name, texts in keyed.items()}
    keys = [tuple(orders[name][texts.iloc[at]] for name, texts in keyed.items()) for at in range(len(frame))]
    return frame.iloc[sorted(range(len(frame)), key=keys.__getitem__)]


def rank(name: str, text: str) -> Key:
    """What a group's value is sorted by.

    >>> sorted(["10", "9", "1e-3"], key=lambda text: rank("params.train.steps", text))
    ['1e-3', '9', '10']
    >>> sorted(["0.3 k3 in loss", "1.0 k1 in loss", "no KL", "0.05 k3 in loss"], key=lambda t: rank("tags.kl.label", t))
    ['no KL', '1.0 k1 in loss', '0.05 k3 in loss', '0.3 k3 in loss']
    """
    if name == LABEL:
        family, betas = family_of(text)
        return (*rank(FAMILY, family), *_words(betas))
    return ((0 if text == NO_KL else 1, 0.0, ""), *_words(text))


def _words(text: str) -> Key:
    """Runs of digits as numbers, the rest as text; a text that is a number is one."""
    number = _number(text)
    if number is not None:
        return ((0, number, ""),)
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((1, float(part), "") if at % 2 else (2, 0.0, part) for at, part in enumerate(parts) if part)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None
