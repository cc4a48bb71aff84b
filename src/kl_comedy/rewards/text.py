"""Rewards that read text by plain rules (final answer, chosen letter, length, form), and cheap checks on hostile text.

All but ``format`` are linear in the text and run in process. The checks do not decide how long an item may take (the
pool's clock does); they make common attacks cost microseconds instead of the whole limit.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Reward
from kl_comedy.registry import REWARDS
from kl_comedy.rewards.base import BadGold, Meta, Regex
from kl_comedy.rewards.notation import plain_characters, plain_numbers

_MIRROR = {"{": "}", "}": "{", "(": ")", ")": "(", "[": "]", "]": "["}
_CONTROLS = {code: " " for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """``text`` without control characters (each becomes a space) and lone surrogates (each becomes ``?``)."""
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def tail(text: str, max_chars: int) -> str:
    """The last ``max_chars`` characters, from the first line break among them on, so that formulas stay whole.

    The final answer of a reasoning stands at its end: a long honest completion keeps its verdict.

    >>> tail("first line; second; last", 6), tail("a $x$ b\\nthe $answer$", 18)
    ('; last', 'the $answer$')
    """
    if len(text) <= max_chars:
        return text
    end = text[-max_chars:] if max_chars > 0 else ""
    _, newline, rest = end.partition("\n")
    return rest if newline and rest.strip() else end


def answer_tag(text: str) -> str:
    """The content of the last ``<answer>`` tag, stripped; empty without one that is closed."""
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if opened and closed else ""


def nesting_depth(text: str) -> int:
    """The deepest nesting of ``{([`` in ``text``; braces count across lines, the others within one line.

    Closers without openers count as well: the openers may stand before the part of the text that is read.

    >>> nesting_depth("{{(x)}}"), nesting_depth("a) {"), nesting_depth("}" * 9)
    (3, 1, 9)
    """
    brackets = re.findall(r"[{}()\[\]\n]", text)
    deepest = 0
    for direction in (brackets, [_MIRROR.get(char, char) for char in reversed(brackets)]):
        braces = others = 0
        for char in direction:
            if char == "\n":
                others = 0
            elif char in "{}":
                braces = max(braces + (1 if char == "{" else -1), 0)
            else:
                others = max(others + (1 if char in "([" else -1), 0)
            deepest = max(deepest, braces + others)
    return deepest


MARKERS = ("####", "A:", "=")
"""What final answers follow in GSM8K's solutions, in few-shot prompts, and in bare arithmetic."""

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_TERM = r"\d[\d,.]*+\)*+"
_ARITHMETIC = re.compile(rf"(?<![\d,.]){_TERM}(?:\s*+[*+^×÷−/-]\s*+[-($]*+{_TERM})++")
_FRACTION = re.compile(r"\d+/\d+\.?")
_UNEVALUATED = re.compile(rf"(?<![\d,.]){_TERM}\s*+(?:[√∛∜π∞]|\\(?:sqrt|pi|infty)|sqrt)\S*+")
_MAX_NUMBER = 100


@REWARDS.register(
    "exact_answer",
    source="answer formats of GSM8K (2110.14168) and few-shot prompts",
    claims=("binary",),
    examples=(
        {"completion": "16 - 3 - 4 = 9\n9 * 2 = 18\n#### 18", "answer": "18", "value": 1.0},
        {"completion": "It costs $1,000.00.", "answer": "1000", "value": 1.0},
        {"completion": " 7", "answer": "7", "value": 1.0},
        {"completion": "3+4", "answer": "7", "value": 0.0, "status": "unparseable"},
        {"completion": "A: Paris.", "answer": "paris", "value": 1.0},
    ),
)
def exact_answer(
    completion: str, answer: str, meta: Meta, *, markers: tuple[str, ...] = MARKERS, max_chars: int = 16_384
) -> Reward:
    """1 where the text after the last marker (or the last line) is the gold, as a number or a string.

    With a numeric gold the first number after the marker counts, or without a marker the last number of the last line;
    arithmetic left to do (``3+4``) is no answer. Numbers may stand in a box or between dollar signs, as mixed numbers,
    powers of ten or unicode characters (docs/configuration.md). Strings are compared without case, outer spaces and
    punctuation. ``unparseable``: nothing to compare. Raises :class:`BadGold` for a gold without any letter or digit.
    """
    answer = plain_characters(answer)
    if not _plain(answer):
        raise BadGold(f"exact_answer has nothing to compare with in the gold answer {answer!r}")
    gold = number(plain_numbers(answer))
    segment, marked = final_segment(plain_characters(clean(tail(completion, max_chars))), markers)
    if gold is None:
        given = _plain(segment)
        return Reward(value=float(given == _plain(answer)), status="ok" if given else "unparseable")
    segment = plain_numbers(segment)
    # Calculations that are not carried out are no answers: "2 + 3 is 5" leaves " is 5".
    segment = _ARITHMETIC.sub(lambda match: match.group() if _FRACTION.fullmatch(match.group()) else " ", segment)
    segment = _UNEVALUATED.sub(" ", segment)
    numbers = numbers_in(segment)
    if not numbers:
        return Reward(value=0.0, status="unparseable")
    return Reward(value=float(numbers[0 if marked else -1] == gold))


def final_segment(text: str, markers: tuple[str, ...] = MARKERS) -> tuple[str, bool]:
    """The line that holds the final answer, from the last marker on, and whether there was a marker.

    >>> final_segment("1 + 2 = 3 apples\\nDone")
    ('3 apples', True)
    """
    # A marker that begins with a letter does not match inside a word.
    patterns = [(r"(?<!\w)" if marker[:1].isalnum() else "") + re.escape(marker) for marker in markers]
    ends = [match.end() for pattern in patterns for match in re.finditer(pattern, text)]
    after = text[max(ends) :].strip() if ends else ""
    if after:
        return after.split("\n", 1)[0].strip(), True
    return text.strip().split("\n")[-1].strip(), False


def number(text: str) -> Fraction | None:
    """``text`` as an exact number, or None: integers, decimals, thousands commas, fractions, $ and %.

    ``50%`` is 50 here, as the sign is taken for a unit.

    >>> number("$1,250.50"), number("-3/4"), number("x")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    core = text.strip().strip("$€£%*_`").strip()
    core = re.sub(r"^([-+])[$€£]", r"\1", core)
    top, slash, bottom = core.partition("/")
    parts = [top, bottom] if slash else [top]
    if len(core) > _MAX_NUMBER or not all(re.fullmatch(_NUMBER, p) and re.search(r"\d", p) for p in parts):
        return None
    values = [Fraction(Decimal(part.replace(",", ""))) for part in parts]
    return values[0] if not slash else (values[0] / values[1] if values[1] else None)


def numbers_in(text: str) -> list[Fraction]:
    """Every word of ``text`` that is a number once quotes, brackets and final punctuation are dropped."""
    words = (word.strip("\"'()[]{}!?:;,*_`\\").rstrip(".") for word in text.split())
    return [value for word in words if (value := number(word)) is not None]


def _plain(text: str) -> str:
    return " ".join(text.split()).strip(" .,;:!?\"'()[]{}*_`$").casefold()


_STATED = (
    r"(?i:(?:answer|option|choice)\s*(?:is|:|=)?\s*(?:option|choice)?\s*:?\s*)"
    r"[*_`\"'$(\[]{{0,4}}([{letters}])(?![\w'])"
)
# A small letter must be set off: "the answer is a matter of taste", "the answer is a" (cut) choose nothing.
_STATED_SMALL = (
    r"(?i:(?:answer|option|choice)\s*(?:is|:|=)\s*(?:option|choice)?\s*:?\s*)[*_`\"'$]{{0,3}}"
    r"(?:[(\[]([{small}])[)\]]|([{small}])[*_`\"'$]{{0,3}}(?:\)|\.(?:\s|$))|((?![ai])[{small}])[*_`\"'$]{{0,3}}$)"
)
_BOXED = r"\\boxed\s*\{{\s*(?:\\text\w*\s*\{{)?\s*\(?([{letters}{small}])(?:\)|\s*[.:}}])"
_BRACKETED = r"[(\[]([{letters}])[)\]]"
_LINE = r"^[ *_`\"'(\[]*([{letters}])(?:[ *_`\"')\].:]*$|[).:] )"
_LONE = r"(?<![\w'-])([{letters}])(?![\w'-])(?!\s+[a-z])"


@REWARDS.register(
    "multiple_choice",
    source="answer forms of MMLU (2009.03300) and its chat-style prompts",
    claims=("binary",),
    examples=(
        {"completion": "Since 2 is prime, the answer is (B).", "answer": "B", "value": 1.0},
        {"completion": "A and C fail, so \\boxed{\\text{D}}", "answer": "D", "value": 1.0},
        {"completion": "C", "answer": "B", "value": 0.0},
        {"completion": "A train leaves.", "answer": "A", "value": 0.0, "status": "unparseable"},
    ),
)
def multiple_choice(
    completion: str, answer: str, meta: Meta, *, letters: str = "ABCDEFGHIJ", max_chars: int = 16_384
) -> Reward:
    """1 where the letter the completion settles on is the gold letter.

    The last of the most explicit form wins: a boxed letter, "answer is (B)", "(B)", a letter alone at the start of its
    line, a lone capital not followed by a lower-case word. A small letter counts in a box, and where "answer is" states
    it in brackets or at the end of its sentence. ``meta["choices"]`` limits the letters.
    """
    if not re.fullmatch(r"[A-Z]+", letters) or len(set(letters)) != len(letters):
        raise bad_value("letters", letters, "distinct capital letters")
    allowed = letters[: len(meta["choices"])] if meta.get("choices") else letters
    gold = answer.strip().strip("().").upper()
    if len(gold) != 1 or gold not in allowed:
        raise bad_value("answer", answer, list(allowed), "multiple_choice needs the letter of the right choice")
    given = chosen_letter(plain_characters(clean(tail(completion, max_chars))), allowed)
    return Reward(value=float(given == gold), status="ok" if given else "unparseable")


def chosen_letter(text: str, letters: str) -> str | None:
    """The letter that ``text`` settles on, or None.

    >>> chosen_letter("Not (A). The answer is B.", "ABCD"), chosen_letter("A cat", "ABCD")
    ('B', None)
    """
    text = "\n".join(" ".join(line.split()) for line in text.split("\n") if line.strip())  # keeps the patterns linear
    for forms in ((_BOXED,), (_STATED, _STATED_SMALL), (_BRACKETED,), (_LINE,), (_LONE,)):
        patterns = (form.format(letters=letters, small=letters.lower()) for form in forms)
        matches = [match for pattern in patterns for match in re.finditer(pattern, text, re.MULTILINE)]
        if matches:
            last = max(matches, key=re.Match.start)
            return str(last[last.lastindex or 0]).upper()
    return None


@REWARDS.register(
    "zero",
    source="the neutral element of a weighted sum",
    claims=("constant",),
    examples=({"completion": "anything", "answer": "", "value": 0.0},),
)
def zero(completion: str, answer: str, meta: Meta) -> float:
    """Always 0: a run whose only objective is its KL terms."""
    return 0.0


@REWARDS.register(
    "length",
    source="length penalties as in 2503.14476 Sec. 3.4, in characters; weight it below 0 to charge for length",
    claims=("unit_interval",),
    examples=(
        {"completion": "x" * 50, "answer": "", "value": 0.5, "options": {"full": 100}},
        {"completion": "", "answer": "", "value": 0.0},
    ),
)
def length(completion: str, answer: str, meta: Meta, *, free: int = 0, full: int = 4_096) -> float:
    """How far the completion's length in characters is from ``free`` (0) to ``full`` (1), clipped."""
    if not 0 <= free < full:
        raise UserError(f"length: needs 0 <= free < full; got free={free}, full={full}")
    return min(max((len(completion) - free) / (full - free), 0.0), 1.0)


_NO_TAG = "(?:(?!</?(?:think|answer)>).)"
STYLES = {
    "boxed": r"\\boxed\s*\{\s*[^\s{}]",
    "gsm8k": r"(?:\A|\n)####[ \t]*[^\s#][^\n]*\s*\Z",
    "answer_line": r"(?:\A|\n)A:[ \t]*[^\s][^\n]*\s*\Z",
    "answer_tag": r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*\Z",
    "think_answer": rf"\A\s*<think>{_NO_TAG}*</think>\s*<answer>{_NO_TAG}+</answer>\s*\Z",
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
        {"completion": "ab", "answer": "", "value": 0.0, "options": {"pattern": "a", "whole": True}},
    ),
)
def format_(
    completion: str,
    answer: str,
    meta: Meta,
    *,
    style: Style | None = None,
    pattern: Regex | None = None,
    whole: bool = False,
    max_chars: int = 1_000_000,
) -> Reward:
    """1 where the completion matches a named ``style`` (default ``boxed``) or the regular expression ``pattern``.

    ``.`` matches line breaks; ``whole``: the whole completion must match. Isolated, since a pattern can backtrack for
    ever on a text made for it. ``refused``: more than ``max_chars`` characters.
    """
    if style is not None and pattern is not None:
        raise UserError(f"style={style!r} and pattern={pattern!r} exclude each other; keep one")
    if len(completion) > max_chars:
        return Reward(value=0.0, status="refused")
    compiled = re.compile(pattern if pattern is not None else STYLES[style or "boxed"], re.DOTALL)
    matched = compiled.fullmatch(completion) if whole else compiled.search(completion)
    return Reward(value=float(matched is not None))
