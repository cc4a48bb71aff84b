"""Whether a completion has the asked form, whatever it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from kl_comedy.errors import UserError
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.contract import Regex

STYLES = {
    "boxed": r"\\boxed\s*\{\s*[^\s{}]",
    "gsm8k": r"(?:\A|\n)####[ \t]*[^\s#][^\n]*\s*\Z",
    "answer_line": r"(?:\A|\n)A:[ \t]*[^\s][^\n]*\s*\Z",
    "answer_tag": r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*\Z",
    "think_answer": (
        r"\A\s*<think>(?:(?!</?think>|</?answer>).)*</think>\s*<answer>(?:(?!</?think>|</?answer>).)+</answer>\s*\Z"
    ),
    "number": r"\A\s*[-+]?\d[\d,]*(?:\.\d+)?\s*\Z",
}
"""Named forms. The tag forms want each tag exactly once, in order, and nothing after the last."""

Style = Literal["boxed", "gsm8k", "answer_line", "answer_tag", "think_answer", "number"]


@REWARDS.register(
    "format",
    source="format reward of DeepSeek-R1, 2501.12948 Sec. 2.2.2",
    claims=("binary",),
    isolated=True,
    examples=(
        {"completion": "so \\boxed{4}", "answer": "", "value": 1.0},
        {"completion": "4", "answer": "", "value": 0.0},
        {
            "completion": "<think>2+2</think><answer>4</answer>",
            "answer": "",
            "value": 1.0,
            "options": {"style": "think_answer"},
        },
        {"completion": "ab", "answer": "", "value": 0.0, "options": {"pattern": "a", "whole": True}},
    ),
)
def format_(
    completion: str,
    answer: str,
    meta: Mapping[str, Any],
    *,
    style: Style | None = None,
    pattern: Regex | None = None,
    whole: bool = False,
    max_chars: int = 1_000_000,
) -> Reward:
    """1 where the completion matches a named ``style`` (default ``boxed``) or the regular expression ``pattern``.

    ``.`` matches line breaks. ``whole`` asks the pattern to match the whole completion. It runs in the
    worker pool, since a pattern can backtrack for ever on a text made for it. ``refused``: more than
    ``max_chars`` characters (a part of the text cannot show the form of the whole).
    """
    if style is not None and pattern is not None:
        raise UserError(f"style={style!r} and pattern={pattern!r} exclude each other; keep one")
    if len(completion) > max_chars:
        return Reward(value=0.0, status="refused")
    compiled = re.compile(pattern if pattern is not None else STYLES[style or "boxed"], re.DOTALL)
    matched = compiled.fullmatch(completion) if whole else compiled.search(completion)
    return Reward(value=float(matched is not None))
