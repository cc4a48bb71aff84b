"""Problems from reasoning-gym's procedural tasks.

Each problem carries ``meta["task"]`` and ``meta["entry"]``: the task's own entry, which its own scorer
needs. The entry can be written as JSON; note that the scorers of ``arc_agi`` and ``rearc`` compare tuples
and give a perfect answer 0.05 after a round trip through JSON, which turns tuples into lists.

Item ``i`` of most tasks is drawn from ``random.Random(seed + i)``: two splits of sizes ``n`` whose seeds
differ by less than ``n`` share problems. Choose seeds far apart; decontamination counts what still meets.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import fields
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data.checks import unused
from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS

OWN_OPTIONS = ("text_field", "text_after")


@DATASETS.register("reasoning_gym", source="open-thought/reasoning-gym (Apache-2.0)")
def reasoning_gym(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A reasoning-gym task: name = the task, options = its settings (size, seed, min_terms, ...).

    ``size`` defaults to ``limit`` and ``seed`` to ``config.seed``. The text is the task's question; with
    ``text_field`` a string of its metadata (``expression``), with ``text_after`` what follows a marker in
    the question (``"problem: "`` leaves ``4 - 1 =`` of chain_sum). The few tasks without an oracle answer
    (several solutions are right) have the answer ``""``: only their own scorer can judge them.
    """
    unused(config, "path", "subset", "split", "fields", key=key)
    task = _build(config, key=key)
    problems = []
    for index in range(task.size if config.limit is None else min(task.size, config.limit)):
        entry = _entry(task, index, key=key)
        problems.append(
            Problem(
                id=f"{config.name}/{task.seed}/{index}",
                text=_text(entry, config, key=key),
                answer="" if entry["answer"] is None else str(entry["answer"]),
                meta={"task": config.name, "entry": entry},
            )
        )
    return problems


def _build(config: DatasetConfig, *, key: str) -> Any:
    """The task's dataset. Raises :class:`UserError` for an unknown task or option, or settings it rejects."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            from reasoning_gym.factory import DATASETS as TASKS
    except ImportError as error:
        raise UserError(f"{key}.dataset: reasoning_gym is not installed; pip install 'kl_comedy[gym]'") from error
    names = sorted(name for name in TASKS if name != "composite")
    if config.name not in names:
        raise bad_value(f"{key}.name", config.name, names)
    build, settings_type = TASKS[config.name]
    allowed = [field.name for field in fields(settings_type) if field.init]
    settings = {name: value for name, value in config.options.items() if name not in OWN_OPTIONS}
    for name in settings:
        if name not in allowed:
            raise bad_value(f"{key}.options", name, [*allowed, *OWN_OPTIONS])
    if config.seed and settings.get("seed", config.seed) != config.seed:
        raise UserError(
            f"{key}: seed={config.seed} and options.seed={settings['seed']} contradict each other; keep one"
        )
    settings.setdefault("seed", config.seed)
    if config.limit is not None:
        settings.setdefault("size", config.limit)
    try:
        chosen = settings_type(**settings)
        chosen.validate()
        return build(config=chosen)
    except Exception as error:
        raise UserError(
            f"{key}.options: the task {config.name!r} rejects {settings}: {str(error) or type(error).__name__}"
        ) from error


def _entry(task: Any, index: int, *, key: str) -> dict[str, Any]:
    """Item ``index`` of the task; some tasks print while they generate, which is kept off stdout."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            entry = dict(task[index])
        json.dumps(entry)
    except Exception as error:
        raise UserError(
            f"{key}: the task could not make item {index} with these options: {type(error).__name__}: {error}"
        ) from error
    return entry


def _text(entry: dict[str, Any], config: DatasetConfig, *, key: str) -> str:
    field, marker = config.options.get("text_field"), config.options.get("text_after")
    if field is not None and marker is not None:
        raise UserError(f"{key}.options: text_field and text_after exclude each other; keep one")
    if field is not None:
        strings = [name for name, value in entry["metadata"].items() if isinstance(value, str)]
        if field not in strings:
            raise bad_value(f"{key}.options.text_field", field, strings, f"metadata strings of {config.name}")
        return str(entry["metadata"][field])
    if marker is None:
        return str(entry["question"])
    _, found, tail = entry["question"].rpartition(marker) if isinstance(marker, str) and marker else ("", "", "")
    if not found or not tail.strip():
        raise bad_value(
            f"{key}.options.text_after", marker, "a marker with text after it", f"question: {entry['question']!r}"
        )
    return str(tail.strip())
