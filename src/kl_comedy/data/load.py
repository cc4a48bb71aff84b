"""The door of the room: a :class:`DatasetConfig` -> checked problems, and the hash that identifies them."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data.splits import refuse_test_split
from kl_comedy.errors import UserError
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS


def load_problems(config: DatasetConfig, *, key: str, training: bool, allow_test_split: bool) -> list[Problem]:
    """Load the problems ``config`` describes through its registered loader, at most ``config.limit``.

    ``key`` is the config path used in messages (``data.train``). With ``limit``, ``seed: 0`` takes the first
    rows and any other seed a random subset, in the source's order; a procedural dataset reads ``limit`` as
    how many to make and ``seed`` as the generator's. In training a split that is meant for evaluation
    raises :class:`UserError` unless ``allow_test_split``.
    """
    entry = DATASETS.get(config.dataset, key=f"{key}.dataset")
    if training and not allow_test_split:
        refuse_test_split(config, key=key)
    if config.limit is not None and config.limit < 1:
        raise UserError(f"{key}.limit: got {config.limit}; allowed: at least 1")
    problems: list[Problem] = entry.fn(config, key=key)
    if not problems:
        raise UserError(f"{key}: the dataset {config.dataset!r} gave no problems")
    seen: set[str] = set()
    for problem in problems:
        if problem.id in seen:
            raise UserError(f"{key}: the dataset {config.dataset!r} gave the id {problem.id!r} twice")
        seen.add(problem.id)
    return problems if config.limit is None else subset(problems, config.limit, config.seed)


def subset(problems: Sequence[Problem], limit: int, seed: int) -> list[Problem]:
    """At most ``limit`` problems in their order: the first ones for seed 0, else a seeded random choice."""
    if limit >= len(problems):
        return list(problems)
    if seed == 0:
        return list(problems[:limit])
    chosen = random.Random(f"subset:{seed}").sample(range(len(problems)), limit)
    return [problems[index] for index in sorted(chosen)]


def data_hash(problems: Iterable[Problem]) -> str:
    """SHA-256 (hex) over id, text and answer of each problem as one line of canonical JSON, in order."""
    digest = hashlib.sha256()
    for problem in problems:
        line = json.dumps([problem.id, problem.text, problem.answer], ensure_ascii=True, separators=(",", ":"))
        digest.update(line.encode("ascii") + b"\n")
    return digest.hexdigest()
