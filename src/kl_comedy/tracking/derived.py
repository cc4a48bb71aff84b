"""Columns that follow from others: the KL family and its beta, and the code a run ran on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

LABEL, FAMILY, BETA, CODE = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "tags.code"
NO_KL = "no KL"

_TERM = re.compile(r"^(?P<beta>\S+) (?P<name>.*)$")


def family_of(label: str) -> tuple[str, str]:
    """A label without its coefficients, and the coefficients.

    >>> family_of("0.1 k1_reverse_token in reward total + 0.05 k1_reverse_token in loss")
    ('k1_reverse_token in reward total + k1_reverse_token in loss', '0.1 + 0.05')
    >>> family_of("0.1 k3_reverse_token in reward total + 0.1 k3_reverse_token in loss")
    ('k3_reverse_token in reward total + k3_reverse_token in loss', '0.1')
    >>> family_of("no KL")
    ('no KL', '0')
    """
    if label == NO_KL:
        return NO_KL, "0"
    parts = [_TERM.match(part) for part in label.split(" + ")]
    if any(part is None for part in parts):
        return label, ""
    betas = [part["beta"] for part in parts if part]
    shown = betas[:1] if len(set(betas)) == 1 else betas
    return " + ".join(part["name"] for part in parts if part), " + ".join(shown)


def code_of(commit: str, dirty: str, diff: str) -> str:
    """Commit, and the hash of the change where there was one.

    >>> code_of("0123456789abcdef", "true", "beef"), code_of("0123456789abcdef", "false", "")
    ('0123456789ab+beef', '0123456789ab')
    """
    changed = f"+{diff or 'dirty'}" if dirty == "true" else ""
    return f"{commit[:12]}{changed}"


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``kl.family``, ``kl.betas`` and ``code`` where what they follow from is there."""
    import pandas as pd

    added: dict[str, pd.Series] = {}
    if LABEL in frame:
        labels = frame[LABEL].fillna("").astype(str)
        known = {label: family_of(label) for label in labels.unique()}
        added[FAMILY] = labels.map({label: found[0] for label, found in known.items()})
        added[BETA] = labels.map({label: found[1] for label, found in known.items()})
    if "tags.git.commit" in frame:
        parts = [_texts(frame, name) for name in ("tags.git.commit", "tags.git.dirty", "tags.git.diff")]
        added[CODE] = pd.Series([code_of(*row) for row in zip(*parts, strict=True)], index=frame.index)
    return pd.concat([frame, pd.DataFrame(added, index=frame.index)], axis=1) if added else frame


def mixed_code(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """``code`` and ``version.*`` tags that differ between runs of one group (package versions, Python)."""
    names = [name for name in frame.columns if name in (CODE, "tags.host.python") or name.startswith("tags.version.")]
    names = [name for name in names if name not in groups]
    if frame.empty or not names:
        return []
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = frame[names].fillna("").groupby(keys).nunique()
    return [name for name in names if (counts[name] > 1).any()]


def _texts(frame: pd.DataFrame, name: str) -> list[str]:
    return list(frame[name].fillna("").astype(str)) if name in frame else [""] * len(frame)
