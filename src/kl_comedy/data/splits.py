"""Training on test data is refused: a split, a file or a dataset that says it is a test is believed."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.errors import UserError

EVAL_ONLY = frozenset(
    {
        *("test", "tests", "testset", "heldout", "holdout", "eval", "evals", "evaluation", "benchmark"),
        *("aime", "amc", "hmmt", "math500", "minerva", "olympiadbench", "gpqa", "humaneval"),
    }
)
"""Words that mark data as being for evaluation only; a year or count may follow (``aime24``, ``test4500``)."""


def eval_only_word(name: str) -> str | None:
    """The word of ``name`` that marks it as evaluation data, or None.

    Words are runs of letters and digits, compared without case; trailing digits may be dropped and two
    neighbours joined, so that ``MATH-500``, ``held_out`` and ``aime24`` are found and ``contest`` is not.

    >>> eval_only_word("gsm8k_test.jsonl"), eval_only_word("latest_contest.jsonl"), eval_only_word("MATH-500")
    ('test', None, 'math500')
    """
    words: list[str] = re.findall(r"[a-z0-9]+", name.lower())
    pairs = [first + second for first, second in pairwise(words)]
    for word in words + pairs:
        for form in (word, word.rstrip("0123456789")):
            if form in EVAL_ONLY:
                return form
    return None


def refuse_test_split(config: DatasetConfig, *, key: str) -> None:
    """Raise :class:`UserError` where the split, the subset, the file's or the dataset's own name is eval-only.

    The folder of a file and the owner of a hub dataset are not looked at.
    """
    named = {
        "split": config.split,
        "subset": config.subset,
        "path": Path(config.path).name if config.path else None,
        "name": config.name.rstrip("/").rpartition("/")[2] if config.name else None,
    }
    for setting, value in named.items():
        word = eval_only_word(value) if value else None
        if word is not None:
            raise UserError(
                f"{key}.{setting}: got {getattr(config, setting)!r}, which says {word!r}: training on data meant for "
                f"evaluation is refused; if you mean it, set data.allow_test_split=true"
            )
