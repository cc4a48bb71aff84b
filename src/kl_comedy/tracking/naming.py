"""Names and values as MLflow accepts them. Applied on the way into the spool, so that both hold the same names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kl_comedy.tracking.redact import redact_pair

PARAM_VALUE_LIMIT = 6000
TAG_VALUE_LIMIT = 8000
KEY_LIMIT = 250
PARAMS_PER_BATCH = 100
METRICS_PER_BATCH = 1000
"""Limits of MLflow 3: mlflow/utils/validation.py."""

_FOREIGN = re.compile(r"[^\w.\- :/]")
_FOREIGN_IN_PATH = re.compile(r"[^\w.\-]")


def clean_name(name: str) -> str:
    """A metric, param or tag name with ``@`` spelled out and other foreign characters replaced.

    >>> clean_name("eval/gsm8k/pass@4"), clean_name("a//b/../c")
    ('eval/gsm8k/pass_at_4', 'a/b/c')
    """
    text = _FOREIGN.sub("_", str(name).replace("@", "_at_"))
    parts = [part for part in text.split("/") if part.strip(". ")]
    return ("/".join(parts) or "_")[:KEY_LIMIT]


def clean_path(name: str) -> str:
    """A table's name as a relative folder that stays inside its root.

    >>> clean_path("../eval/my suite")
    'eval/my_suite'
    """
    parts = [_FOREIGN_IN_PATH.sub("_", part) for part in str(name).split("/") if part.strip(". ")]
    return "/".join(parts) or "_"


def param_text(value: Any) -> str:
    """A config value as text: strings as they are, everything else as JSON (``null``, ``true``, ``1e-06``).

    >>> param_text(None), param_text(True), param_text(1e-6), param_text("k3"), param_text([1, "a"])
    ('null', 'true', '1e-06', 'k3', '[1, "a"]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)


def param_texts(params: Mapping[str, Any]) -> dict[str, str]:
    """Flattened config -> texts by clean name, secrets hidden, uncut (see :func:`shorten`)."""
    return {clean_name(key): redact_pair(key, param_text(value)) for key, value in params.items()}


def shorten(text: str, limit: int) -> str:
    """``text`` within ``limit`` characters; a cut says how long the whole was."""
    if len(text) <= limit:
        return text
    note = f" ... (cut; {len(text)} characters)"
    return text[: limit - len(note)] + note
