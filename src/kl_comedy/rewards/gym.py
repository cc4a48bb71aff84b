"""reasoning-gym's own scorers, on the entry that the problem carries.

Nine of its scorers evaluate the answer as Python (``eval``, ``sympy.parse_expr``), which would run what a
model writes. Answers to tasks whose module can evaluate text are therefore held to a grammar in which no
name can be called but a short list of mathematical functions, and nothing can be looked up.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from functools import lru_cache
from typing import Any, Literal

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import Meta
from kl_comedy.rewards.text import answer_tag

CALLABLE = (
    *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "Abs", "abs", "factorial", "Rational"),
)
"""The functions an evaluated answer may call."""

_ENTRY = {"question": "State the final answer: 4 - 1 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}


@REWARDS.register(
    "reasoning_gym",
    source="open-thought/reasoning-gym (Apache-2.0), dataset.score_answer",
    claims=("unit_interval",),
    isolated=True,
    boxed=False,
    imports=("reasoning_gym",),
    examples=(
        {"completion": " 3\n", "answer": "3", "value": 1.0, "meta": {"task": "chain_sum", "entry": _ENTRY}},
        {"completion": "4", "answer": "3", "value": 0.0, "meta": {"task": "chain_sum", "entry": _ENTRY}},
    ),
)
def reasoning_gym(
    completion: str,
    answer: str,
    meta: Meta,
    *,
    solved_at: float = 0.99,
    partial: bool = False,
    part: Literal["whole", "first_line", "last_line", "answer_tag"] = "whole",
    max_chars: int = 100_000,
) -> Reward:
    """The task's own score of the answer: 1 from ``solved_at`` on, else 0; the score itself with ``partial``.

    Reads ``meta["task"]`` and ``meta["entry"]``. ``part`` is what counts as the answer, stripped. ``refused``: longer
    than ``max_chars``, or code in an answer that the task's scorer would evaluate. The part ``score`` is the raw score.
    """
    if "task" not in meta or "entry" not in meta:
        raise UserError("the reward reasoning_gym needs problems of the dataset reasoning_gym (meta task and entry)")
    if len(completion) > max_chars:
        return Reward(value=0.0, status="refused")
    given = _answer_part(completion, part)
    if not given:
        return Reward(value=0.0, status="unparseable")
    task = _task(str(meta["task"]))
    if _evaluates(type(task).__module__) and not is_plain(given):
        return Reward(value=0.0, status="refused")
    score = _score(task, given, dict(meta["entry"]))
    return Reward(value=score if partial else float(score >= solved_at), parts={"score": score})


def _answer_part(completion: str, part: str) -> str:
    text = completion.strip()
    if part == "answer_tag":
        return answer_tag(text)
    if part == "whole" or not text:
        return text
    lines = text.split("\n")
    return lines[0 if part == "first_line" else -1].strip()


def _score(task: Any, given: str, entry: dict[str, Any]) -> float:
    """The task's score; a scorer that fails on the answer's text has not accepted it."""
    try:
        return float(task.score_answer(given, entry))
    except MemoryError:
        raise
    except Exception:
        try:
            task.score_answer(entry["answer"], entry)
        except Exception as fault:
            raise UserError(f"the task's scorer cannot score its own entry {entry!r:.200}: {fault}") from fault
        return 0.0


@lru_cache(maxsize=128)
def _task(name: str) -> Any:
    """One dataset object of the task, for its scorer (what the scorer needs to know lies in the entry)."""
    with contextlib.redirect_stdout(sys.stderr):
        from reasoning_gym.factory import DATASETS as TASKS
    if name not in TASKS:
        raise bad_value("meta.task", name, sorted(TASKS))
    build, settings_type = TASKS[name]
    return build(config=settings_type(seed=0, size=1))


@lru_cache(maxsize=256)
def _evaluates(module: str) -> bool:
    """Whether the task's module can evaluate text, judged by its source."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not os.path.isfile(file):
        return True
    with open(file, encoding="utf-8") as source:
        return re.search(r"\b(?:eval|exec|parse_expr|sympify)\(|\bimport sympy|\bfrom sympy", source.read()) is not None


def is_plain(text: str) -> bool:
    """Whether ``text``, taken for Python, can neither call anything but mathematics nor look anything up.

    >>> is_plain("2*x + sin(x)"), is_plain("open('x')"), is_plain("x.__class__"), is_plain("[['Q', '_']]")
    (True, False, False, True)
    """
    if re.search(r"__|[#\\`@;]|\blambda\b|\.\s*[^\W\d]", text) or not text.isascii():
        return False
    for opening in re.finditer(r"\(", text):
        before = text[: opening.start()].rstrip()
        name = re.search(r"[A-Za-z_]\w*$", before)
        called = name is not None and name.group() in CALLABLE
        if before and not called and before[-1] not in "+-*/^%(,[=<>:":
            return False
    return True
