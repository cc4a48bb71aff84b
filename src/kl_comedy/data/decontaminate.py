"""Remove from the training problems what the evaluation sets also ask, and say how many.

Two problems are the same when their normal forms are equal. The normal form is letters and digits only
(NFKC, case folded), so that spacing, punctuation and LaTeX decoration do not hide a copy. That alone
would call ``4 - 1 =`` and ``4 + 1 =`` the same, so inside an arithmetic expression (at least two numbers
joined by an operator) operators, brackets, signs and decimal points are kept as well. Elsewhere signs are
dropped: a problem that differs from an evaluation problem in nothing but punctuation is removed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from kl_comedy.errors import UserError
from kl_comedy.records import Problem

_SAME_SIGN = str.maketrans({"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "÷": "/", "⁄": "/"})
_RUN = re.compile(r"[\d\s+\-*/^=<>%().,{}$]+")
_EXPRESSION = re.compile(r"\d[\s.)}$]*[+\-*/^=<>%][\s+\-({$]*\.?\d")
_DROPPED = re.compile(r"[\s{}$,]|(?<!\d)\.|\.(?!\d)")


def normalize(text: str) -> str:
    """The normal form of a problem's text.

    >>> normalize("What is $3 - 1$?"), normalize("Evaluate: 3 + 1 ="), normalize("In 2-3 words, a half-truth.")
    ('whatis3-1', 'evaluate3+1', 'in2-3wordsahalftruth')

    A text without a single letter or digit is its own normal form (stripped).
    """
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_SAME_SIGN)
    pieces, end = [], 0
    for run in _RUN.finditer(folded):
        if _EXPRESSION.search(run.group()):
            pieces += [_letters_and_digits(folded[end : run.start()]), _expression(run.group())]
            end = run.end()
    pieces.append(_letters_and_digits(folded[end:]))
    return "".join(pieces) or text.strip()


def _letters_and_digits(text: str) -> str:
    return "".join(char for char in text if unicodedata.category(char)[0] in "LNM")


def _expression(text: str) -> str:
    """The expression without spaces, grouping and what merely surrounds it (``= ?``, a full stop)."""
    return _DROPPED.sub("", text).rstrip("=.")


def _forms(problem: Problem) -> Iterator[str]:
    """The normal forms a problem is known by: its text, and its task's own question where it has one."""
    yield normalize(problem.text)
    entry = problem.meta.get("entry")
    if isinstance(entry, Mapping) and isinstance(entry.get("question"), str):
        yield normalize(entry["question"])


def decontaminate(
    train: Sequence[Problem], evals: Mapping[str, Sequence[Problem]]
) -> tuple[list[Problem], Mapping[str, int]]:
    """The training problems that are in no evaluation set, in order, and how many each set removed.

    A problem that is in two sets counts for both, so the counts may add up to more than was removed.
    Raises :class:`UserError` when nothing would be left to train on.
    """
    asked = {name: {form for problem in problems for form in _forms(problem)} for name, problems in evals.items()}
    counts = dict.fromkeys(evals, 0)
    kept = []
    for problem in train:
        forms = set(_forms(problem))
        hits = [name for name, known in asked.items() if not forms.isdisjoint(known)]
        for name in hits:
            counts[name] += 1
        if not hits:
            kept.append(problem)
    if train and not kept:
        raise UserError(
            f"data.train: each of the {len(train)} problems is also in an evaluation set ({_listed(counts)}); "
            f"choose other data or seeds, or set data.decontaminate=false if that is meant"
        )
    return kept, counts


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
