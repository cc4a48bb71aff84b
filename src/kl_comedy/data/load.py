"""Load problems, refuse evaluation data as training data, and remove training problems that evaluation sets contain.

Two problems are the same when their normal forms are equal. The normal form is letters and digits only
(NFKC, case folded), so that spacing, punctuation and LaTeX decoration do not hide a copy. That alone
would call ``4 - 1 =`` and ``4 + 1 =`` the same, so inside an arithmetic expression (at least two numbers
joined by an operator) operators, brackets, signs and decimal points count as well. Elsewhere signs are
dropped: a problem that differs from an evaluation problem in nothing but punctuation is removed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.config.validate import check_record
from kl_comedy.errors import UserError
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS

EVAL_ONLY = frozenset(
    {
        "test",
        "tests",
        "testset",
        "heldout",
        "holdout",
        "eval",
        "evals",
        "evaluation",
        "benchmark",
        "aime",
        "amc",
        "hmmt",
        "math500",
        "minerva",
        "olympiadbench",
        "gpqa",
        "humaneval",
    }
)
"""Words that mark data as being for evaluation only; a year or count may follow (``aime24``, ``test4500``)."""


def eval_only_word(name: str) -> str | None:
    """The word of ``name`` that marks it as evaluation data, or None.

    Words are runs of letters and digits, compared without case; trailing digits may be dropped and two
    neighbours joined, so that ``MATH-500``, ``held_out`` and ``aime24`` match and ``contest`` does not.

    >>> eval_only_word("gsm8k_test.jsonl"), eval_only_word("latest_contest.jsonl"), eval_only_word("MATH-500")
    ('test', None, 'math500')
    """
    words: list[str] = re.findall(r"[a-z0-9]+", name.lower())
    # held_out and MATH-500 are two words each.
    joined = [first + second for first, second in pairwise(words)]
    for word in [*words, *joined]:
        if word in EVAL_ONLY:
            return word
        without_count = word.rstrip("0123456789")
        if without_count in EVAL_ONLY:
            return without_count
    return None


def refuse_test_split(config: DatasetConfig, *, key: str) -> None:
    """Raise :class:`UserError` where the split, the subset, the file's or the dataset's own name is eval-only.

    The folder of a file and the owner of a hub dataset are ignored.
    """
    for setting in ("split", "subset", "path", "name"):
        value = getattr(config, setting) or ""
        own_name = value
        if setting in ("path", "name"):
            # A folder called tests/ or an owner called openai-evals says nothing about the data.
            own_name = Path(value).name
        word = eval_only_word(own_name)
        if word is not None:
            raise UserError(
                f"{key}.{setting}: got {value!r}, which contains {word!r}: training on data meant for evaluation is "
                "refused; if you mean it, set data.allow_test_split=true"
            )


# Stored data hashes and the counts of decontamination depend on the four patterns below and on normalize().
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
    # NFKC first: it turns ² and full-width digits into plain ones, which the patterns below look for.
    folded = unicodedata.normalize("NFKC", text).casefold().translate(_SAME_SIGN)
    pieces = []
    end = 0
    for run in _RUN.finditer(folded):
        if _EXPRESSION.search(run.group()):
            pieces.append(_letters_and_digits(folded[end : run.start()]))
            expression = _DROPPED.sub("", run.group())
            pieces.append(expression.rstrip("=."))
            end = run.end()
    pieces.append(_letters_and_digits(folded[end:]))
    return "".join(pieces) or text.strip()


def _letters_and_digits(text: str) -> str:
    # Marks (M) are parts of letters in many scripts.
    return "".join(char for char in text if unicodedata.category(char)[0] in "LNM")


def _normal_forms(problem: Problem) -> set[str]:
    """The normal forms of the problem's text, and of its question where that is another text.

    The text of a problem with choices may have them below the question, in another order than another source. That of a
    reasoning-gym problem may be a part of the question (``text_after``).
    """
    forms = {normalize(problem.text)}
    question = problem.meta.get("question")
    if "choices" in problem.meta and isinstance(question, str):
        forms.add(normalize(question))
    entry = problem.meta.get("entry")
    if isinstance(entry, Mapping) and isinstance(entry.get("question"), str):
        forms.add(normalize(entry["question"]))
    return forms


def decontaminate(
    train: Sequence[Problem], evals: Mapping[str, Sequence[Problem]]
) -> tuple[list[Problem], Mapping[str, int]]:
    """The training problems that are in no evaluation set, in order, and how many each set removed.

    A problem that is in two sets counts for both. Raises :class:`UserError` where no training problem is left.
    """
    eval_forms: dict[str, set[str]] = {}
    for name, problems in evals.items():
        eval_forms[name] = set()
        for problem in problems:
            eval_forms[name] |= _normal_forms(problem)

    clean = []
    counts = dict.fromkeys(evals, 0)
    for problem in train:
        # A problem may have two forms; one that it shares is enough to know its answer.
        forms = _normal_forms(problem)
        overlaps = [name for name, others in eval_forms.items() if forms & others]
        for name in overlaps:
            counts[name] += 1
        if not overlaps:
            clean.append(problem)

    # Better than a run whose first batch has no prompts.
    if train and not clean:
        listed = ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
        raise UserError(
            f"data.train: each of the {len(train)} problems is also in an evaluation set ({listed}); "
            f"choose other data or seeds, or set data.decontaminate=false if that is meant"
        )
    return clean, counts


def check_dataset(config: DatasetConfig, *, key: str, training: bool, allow_test_split: bool) -> None:
    """Raise :class:`UserError` for settings that no machine could load, as :func:`load_problems`; nothing is read.

    A loader may declare ``check``, a function of the config and its ``key`` that refuses what the loader cannot use.
    """
    entry = DATASETS.get(config.dataset, key=f"{key}.dataset")
    if training and not allow_test_split:
        refuse_test_split(config, key=key)
    check_record(config, key)
    check = entry.facts.get("check")
    if check is not None:
        check(config, key=key)


def is_on_this_machine(config: DatasetConfig) -> bool:
    """Whether the problems are made or read here: not those of the hub, nor of a plugin, which may download too."""
    entry = DATASETS.get(config.dataset)
    return config.dataset != "hub" and not entry.modules


def load_problems(config: DatasetConfig, *, key: str, training: bool, allow_test_split: bool) -> list[Problem]:
    """The problems of a registered dataset, at most ``config.limit`` of them.

    ``key`` is the config key in messages (``data.train``). Rows are limited by :func:`subset`; a procedural dataset
    generates ``limit`` problems from ``seed``. Raises :class:`UserError` for training on a split that is meant for
    evaluation, unless ``allow_test_split``; for no problems, and for an id that occurs twice.
    """
    # Before anything is read: a mistake costs no download.
    check_dataset(config, key=key, training=training, allow_test_split=allow_test_split)
    problems: list[Problem] = DATASETS.get(config.dataset).fn(config, key=key)
    if not problems:
        raise UserError(f"{key}: the dataset {config.dataset!r} gave no problems")
    # Records and random seeds are looked up by id.
    most_used_id, uses = Counter(problem.id for problem in problems).most_common(1)[0]
    if uses > 1:
        raise UserError(f"{key}: the dataset {config.dataset!r} gave the id {most_used_id!r} twice")
    if config.limit is None:
        return problems
    return subset(problems, config.limit, config.seed)


def subset(problems: Sequence[Problem], limit: int, seed: int) -> list[Problem]:
    """At most ``limit`` problems in their order: the first ones for seed 0, else a seeded random choice."""
    if limit >= len(problems):
        return list(problems)
    if seed == 0:
        return list(problems[:limit])
    # The text is the seed: changing it changes which problems a stored config names.
    chosen = random.Random(f"subset:{seed}").sample(range(len(problems)), limit)
    # In the order of the source, so that a subset of a subset keeps it.
    return [problems[index] for index in sorted(chosen)]


def data_hash(problems: Iterable[Problem]) -> str:
    """SHA-256 (hex) over id, text and answer of each problem as one line of canonical JSON, in order.

    Runs store it as the identity of their data, so the bytes below are frozen.
    """
    digest = hashlib.sha256()
    for problem in problems:
        line = json.dumps([problem.id, problem.text, problem.answer], ensure_ascii=True, separators=(",", ":"))
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()
