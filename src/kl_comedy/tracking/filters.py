"""``--where``: MLflow's filter language with short names for our own keys.

``seed = 0 and algorithm.advantage = 'rloo' and eval/pocket/reward > 0.5`` becomes what MLflow reads:
``params.`seed` = '0' AND ...``. A name with a slash is a metric, a field of a run (status, start_time, ...) is an
attribute, every other bare name is a param; ``params.``, ``tags.``, ``metrics.`` and ``attributes.`` say it outright.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kl_comedy.errors import UserError

ENTITIES = {
    "params": "params", "param": "params", "parameters": "params", "tags": "tags", "tag": "tags",
    "metrics": "metrics", "metric": "metrics",
    "attributes": "attributes", "attribute": "attributes", "run": "attributes",
}  # fmt: skip
ATTRIBUTES = ("status", "start_time", "end_time", "run_id", "run_name", "user_id", "artifact_uri", "created")
WORDS = ("AND", "LIKE", "ILIKE", "RLIKE", "IN", "NOT", "IS", "NULL")

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>'[^']*'|"[^"]*")
    |(?P<operator>!=|<=|>=|=|<|>)
    |(?P<mark>[(),])
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./]))
    |(?P<name>(?:\w+\.)?`[^`]+`|(?:\w+\.)?"[^"]+"|[A-Za-z_][\w.\-/@:]*)""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """``text`` for MLflow; ``keys`` are the columns it asks about (``params.seed``, ...), for messages."""

    text: str
    keys: tuple[str, ...]


def translate(where: str | None) -> Filter:
    """Short names -> MLflow. Raises :class:`UserError` for what MLflow cannot ask (OR, stray characters).

    >>> translate("seed = 0 and train/reward > 0.5").text
    "params.`seed` = '0' AND metrics.`train/reward` > 0.5"
    """
    words: list[str] = []
    keys: list[str] = []
    entity = ""
    for kind, token in _tokens(where or ""):
        upper = token.upper()
        if kind == "name" and upper == "OR":
            raise UserError(f"--where: got {where!r}; MLflow filters know AND but not OR: ask twice, or group instead")
        if kind == "name" and upper in WORDS:
            words.append(upper)
        elif kind == "name":
            entity, key = _resolve(token)
            keys.append(f"{entity}.{key}")
            words.append(f"attributes.{key}" if entity == "attributes" else f"{entity}.`{key}`")
        elif kind == "number" and entity in ("params", "tags"):
            words.append(f"'{token}'")
        else:
            words.append(token)
    return Filter(text=" ".join(words).replace("( ", "(").replace(" )", ")").replace(" ,", ","), keys=tuple(keys))


def _tokens(where: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(where):
        match = _TOKEN.match(where, at)
        if match is None:
            raise UserError(
                f"--where: cannot read {where!r} at {where[at:]!r}; example: seed = 0 and algorithm.advantage = 'rloo'"
            )
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _resolve(name: str) -> tuple[str, str]:
    """A name as (entity, key): explicit prefix, then attribute, then slash = metric, else param."""
    head, dot, rest = name.partition(".")
    if dot and head.lower() in ENTITIES:
        return ENTITIES[head.lower()], rest.strip('`"')
    bare = name.strip('`"')
    if bare in ATTRIBUTES:
        return "attributes", bare
    return ("metrics" if "/" in bare else "params"), bare
