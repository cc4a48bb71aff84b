"""Completions token by token: what a run stores of them, and what a report shows.

Training adds ``group`` and :data:`PER_TOKEN` to the first rows of each table of samples; :func:`viewer_of` reads them
back. Both are bounded: a run stays small on disk, and a page of a thousand runs stays a page. Stored texts and names
may come from anybody: rows are checked when they are read, and the page gets them as JSON without a ``<``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kl_comedy.tracking.runs import PER_TOKEN, Export, Runs
from kl_comedy.tracking.store import shorten

STORED_ROWS = 8
"""Completions of a table that are stored token by token: a group beside another, or most of one."""
STORED_TOKENS = 256
"""Tokens of such a completion: with five numbers each, a table stays below 0.2 MB."""
FLOAT32_DIGITS = 9
"""Significant digits that tell every float32 from its neighbours."""

USES = {
    "t": "trained on",
    "b": "trained on, where the policy loss's bound acted",
    "z": "advantage 0: only KL terms in the loss act on it",
    "m": "masked by a policy correction: only KL terms in the loss act on it",
    "o": "not trained on: its completion was left out of the loss",
    "e": "written by the environment (a tool's reply): attended to, never trained on",
}
"""What the loss did with a token, by the letter that is stored for it."""

SHOWN_RUNS = 24
"""Runs on a page, at most."""
LOOKED_AT_RUNS = 60
"""A report asks at most so many runs for tokens: in a store of thousands, most of the older ones have none."""
SHOWN_UPDATES = 4
"""Updates of a run on a page: the first and the last that it stored, and others evenly between them."""
SHOWN_BYTES = 2_500_000
"""The most that a page gets of tokens: a report of 1,000 runs has 1.3 MB without them and has to stay below 5 MB."""
SHOWN_DIGITS = 6
"""Significant digits of a number on a page."""
LONGEST_TEXT = 2000
"""Characters of a problem or an answer on a page."""

NONE_STORED = (
    "None of these runs has stored its tokens. Training stores them with each table of completions "
    "(train.samples_every above 0); runs of earlier versions have none."
)
NOT_EXPORTED = (
    "An export holds no tokens; a report from the MLflow store (--uri) shows them, where its runs stored them."
)


# --- what a run stores ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenNumbers:
    """The numbers of a completion's first tokens at one update, ``[T]`` each, in nats and at least float32."""

    k1_reverse: Sequence[float]
    """``log pi - log ref`` with the initial reference: the summand of the metric ``kl/k1_reverse_sequence``."""
    log_ratio: Sequence[float]
    """``log pi - log mu`` with the sampler mu: the logarithm of the ratio."""
    exact_reverse: Sequence[float] | None
    """KL(pi || ref) at the token's prefix; None at updates that do not measure it."""
    use: str
    """A letter of :data:`USES` for each token."""


def traced_row(
    numbers: TokenNumbers, ids: Sequence[int], group: int, *, tokenizer: Any, special_ids: frozenset[int]
) -> dict[str, Any]:
    """What a row of a table of samples gets for its completion ``ids``: its group, and the columns of its tokens."""

    def decode(part: Sequence[int]) -> str:
        # As the completion's own text was decoded: the pieces make up that text.
        return str(tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    stored_ids = list(ids[:STORED_TOKENS])
    names = {}
    for position, token_id in enumerate(stored_ids):
        if token_id in special_ids:
            names[str(position)] = str(tokenizer.convert_ids_to_tokens(token_id))
    columns: dict[str, Any] = {
        "text": token_pieces(decode, stored_ids),
        "special": names,
        "k1_reverse": _rounded(numbers.k1_reverse, FLOAT32_DIGITS),
        "exact_reverse": None,
        "log_ratio": _rounded(numbers.log_ratio, FLOAT32_DIGITS),
        "use": numbers.use,
    }
    if numbers.exact_reverse is not None:
        columns["exact_reverse"] = _rounded(numbers.exact_reverse, FLOAT32_DIGITS)
    return {"group": group, PER_TOKEN: columns}


def token_pieces(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    r"""The part of the decoded text that each token adds; together they are ``decode(ids)``.

    Where several tokens make up one character, the last has it and the others are empty.

    >>> token_pieces(lambda ids: bytes(ids).decode("utf-8", "replace"), [97, 0xC3, 0xA9, 98])
    ['a', '', 'é', 'b']
    """
    whole = decode(ids)
    pieces = []
    before = ""
    for end in range(1, len(ids) + 1):
        # From the first token on, because a part of a text may decode otherwise than within the whole.
        text = decode(ids[:end])
        # A character that lacks bytes decodes to U+FFFD, which the whole text does not have there.
        if text.startswith(before) and whole.startswith(text):
            pieces.append(text[len(before) :])
            before = text
        else:
            pieces.append("")
    return pieces


def _rounded(values: Sequence[float], digits: int) -> list[float]:
    """The numbers with so many significant digits: a stored table holds the text of each."""
    return [float(f"{value:.{digits}g}") for value in values]


# --- what a page shows ----------------------------------------------------------------------------------------------


class ShownRun(NamedTuple):
    """A run that a page may show: its id in the store, its name, and that of its configuration."""

    run_id: str
    name: str
    configuration: str


class Viewer(NamedTuple):
    """The tokens of a page: ``data`` is JSON for a script element, or empty; ``lines`` say what is left out."""

    data: str
    runs: int
    lines: Sequence[str]


class _Update(NamedTuple):
    """An update of the run at position ``run``, as JSON."""

    run: int
    step: int
    content: str


def viewer_of(runs: Runs, candidates: Sequence[ShownRun], most_bytes: int = SHOWN_BYTES) -> Viewer:
    """The tokens of the first ``candidates`` that stored any, in at most ``most_bytes`` of JSON."""
    if isinstance(runs, Export):
        return Viewer("", 0, [NOT_EXPORTED])
    shown: list[ShownRun] = []
    updates_of: list[list[_Update]] = []
    for candidate in candidates[:LOOKED_AT_RUNS]:
        if len(shown) == SHOWN_RUNS:
            break
        updates = _stored_updates(runs, candidate.run_id, len(shown))
        if updates:
            shown.append(candidate)
            updates_of.append(updates)
    if not shown:
        return Viewer("", 0, [NONE_STORED])
    fitting, omitted = _fitting(updates_of, most_bytes)
    entries = []
    for position, run in enumerate(shown):
        # By run and step: the order of `_fitting` is another one.
        contents = [update.content for update in sorted(fitting) if update.run == position]
        if contents:
            entries.append(_run_json(run, contents))
    line = (
        f"{len(entries)} of {len(candidates)} runs, at most {SHOWN_UPDATES} updates of each and {STORED_ROWS} "
        f"completions of an update, with at most {STORED_TOKENS} tokens. "
        f"A report shows at most {SHOWN_RUNS} runs; --where chooses others."
    )
    lines = [line]
    if omitted:
        lines.append(f"{omitted} more updates are left out, to keep tokens below {most_bytes / 1e6:g} MB.")
    return Viewer(f"[{','.join(entries)}]", len(entries), lines)


def _run_json(run: ShownRun, updates: Sequence[str]) -> str:
    """A run with its updates, which are JSON already: :func:`_fitting` measured them as such."""
    head = _safe_json({"name": run.name, "configuration": run.configuration})
    opened = head.removesuffix("}")
    return f'{opened},"updates":[{",".join(updates)}]}}'


def _stored_updates(runs: Runs, run_id: str, position: int) -> list[_Update]:
    """The updates of a run that a page may show, in their order."""
    updates = []
    for step, rows in runs.sample_tables(run_id, SHOWN_UPDATES):
        completions = []
        for row in rows[:STORED_ROWS]:
            completion = _shown_completion(row)
            if completion is not None:
                completions.append(completion)
        if completions:
            updates.append(_Update(position, step, _safe_json({"update": step, "completions": completions})))
    return updates


def _fitting(updates_of: Sequence[Sequence[_Update]], most_bytes: int) -> tuple[list[_Update], int]:
    """The updates that fit in ``most_bytes``, and how many do not. First the last update of every run, and so on."""
    # By turns: otherwise the first runs would take all the space.
    turns: list[_Update] = []
    for turn in range(SHOWN_UPDATES):
        for updates in updates_of:
            if turn < len(updates):
                # The last (-1), then the first (0), then those between.
                turns.append(updates[turn - 1])
    fitting = []
    size = 0
    for update in turns:
        if size + len(update.content) <= most_bytes:
            fitting.append(update)
            size += len(update.content)
    return fitting, len(turns) - len(fitting)


def _shown_completion(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A stored row for the page, with numbers of :data:`SHOWN_DIGITS`; None where it has no tokens, or damaged ones."""
    stored = row.get(PER_TOKEN)
    if stored is None:
        return None
    try:
        columns = _checked_columns(stored)
        completion: dict[str, Any] = {
            "group": int(row["group"]),
            "tokens": int(row["tokens"]),
            "reward": _json_number(float(row["reward"])),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    for name in ("problem", "answer", "status", "stop_reason"):
        completion[name] = shorten(str(row.get(name, "")), LONGEST_TEXT)
    return completion | columns


def _checked_columns(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a completion's tokens. Raises one of what :func:`_shown_completion` catches."""
    pieces = [str(piece) for piece in stored["text"]]
    use = str(stored["use"])
    unknown_uses = set(use) - USES.keys()
    if len(use) != len(pieces) or unknown_uses:
        raise ValueError("each token has one use")
    columns: dict[str, Any] = {"text": pieces, "use": use, "special": {}}
    for name in ("k1_reverse", "log_ratio", "exact_reverse"):
        values = stored[name]
        if values is None and name == "exact_reverse":
            continue
        numbers = [_json_number(float(value)) for value in values]
        if len(numbers) != len(pieces):
            raise ValueError(f"each token has one {name}")
        columns[name] = numbers
    for position, special in stored["special"].items():
        columns["special"][int(position)] = str(special)
    return columns


def _json_number(value: float) -> float | str:
    """A number for JSON, which has no infinity; as text, as JavaScript's Number reads it."""
    if math.isfinite(value):
        return float(f"{value:.{SHOWN_DIGITS}g}")
    if math.isnan(value):
        return "NaN"
    if value > 0:
        return "Infinity"
    return "-Infinity"


def _safe_json(value: Any) -> str:
    """JSON in ASCII that cannot end the script element around it, nor open a comment in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
