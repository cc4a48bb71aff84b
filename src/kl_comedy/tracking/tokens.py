"""Completions token by token: what a run stores of them.

Training adds ``group`` and :data:`PER_TOKEN` to the first rows of each table of samples;
:mod:`kl_comedy.results.token_view` shows them. What is stored is bounded: a run stays small on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PER_TOKEN = "per_token"
"""Column of a table of samples: the numbers of a completion's tokens."""

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
