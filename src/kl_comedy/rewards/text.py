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
from kl_comedy.rewards.base import DRAWN_TOKENS, BadGold, Meta, Regex
from kl_comedy.rewards.notation import plain_characters, plain_numbers

_MIRROR = {"{": "}", "}": "{", "(": ")", ")": "(", "[": "]", "]": "["}
_CONTROL_CODES = (*range(0x20), *range(0x7F, 0xA0))
_CONTROLS = {code: " " for code in _CONTROL_CODES if chr(code) not in "\n\t"}


def clean(text: str) -> str:
    """``text`` without control characters (each becomes a space) and lone surrogates (each becomes ``?``).

    Neither could be written to a record or a terminal as it is.
    """
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def tail(text: str, max_chars: int) -> str:
    """The last ``max_chars`` characters, from the first line break among them on, so that formulas stay whole.

    The final answer of a chain of thought stands at its end: a long honest completion keeps its verdict.

    >>> tail("first line; second; last", 6), tail("a $x$ b\\nthe $answer$", 18)
    ('; last', 'the $answer$')
    """
    if len(text) <= max_chars:
        return text
    if max_chars <= 0:
        # text[-0:] would be the whole text.
        return ""
    end = text[-max_chars:]
    _, newline, rest = end.partition("\n")
    if newline and rest.strip():
        return rest
    return end


def answer_tag(text: str) -> str:
    """The content of the last ``<answer>`` tag, stripped; empty without one that is closed."""
    # The last one: a chain of thought may quote the tag before it answers.
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    if opened and closed:
        return inside.strip()
    return ""


def nesting_depth(text: str) -> int:
    """The deepest nesting of ``{([`` in ``text``; braces count across lines, the others within one line.

    Closers without openers count as well: the openers may stand before the part of the text that is read.

    >>> nesting_depth("{{(x)}}"), nesting_depth("a) {"), nesting_depth("}" * 9)
    (3, 1, 9)
    """
    brackets = re.findall(r"[{}()\[\]\n]", text)
    # Read backwards, with closers for openers, so that both ends are counted by one function.
    mirrored = [_MIRROR.get(char, char) for char in reversed(brackets)]
    return max(_deepest(brackets), _deepest(mirrored))


def _deepest(brackets: list[str]) -> int:
    """The deepest nesting of openers, with closers that have none ignored."""
    deepest = 0
    braces = 0
    others = 0
    for char in brackets:
        if char == "\n":
            others = 0
        elif char == "{":
            braces += 1
        elif char == "}":
            braces = max(braces - 1, 0)
        elif char in "([":
            others += 1
        else:
            others = max(others - 1, 0)
        deepest = max(deepest, braces + others)
    return deepest


MARKERS = ("####", "A:", "=")
"""What final answers follow in GSM8K's solutions, in few-shot prompts, and in bare arithmetic."""

# Possessive repetitions (*+, ++) never backtrack, so that no text costs more than time linear in its length.
_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"
_TERM = r"\d[\d,.]*+\)*+"
_ARITHMETIC = re.compile(rf"(?<![\d,.]){_TERM}(?:\s*+[*+^×÷−/-]\s*+[-($]*+{_TERM})++")
_FRACTION = re.compile(r"\d+/\d+\.?")
_UNEVALUATED = re.compile(rf"(?<![\d,.]){_TERM}\s*+(?:[√∛∜π∞]|\\(?:sqrt|pi|infty)|sqrt)\S*+")
_MAX_NUMBER = 100
"""The most characters of a number. Fraction arithmetic on a million digits would take the run's time."""


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
    arithmetic left to do (``3+4``) is not an answer. Numbers may stand in a box or between dollar signs, as mixed
    numbers, powers of ten or unicode characters (docs/configuration.md). Strings are compared without case, outer
    spaces and punctuation. ``unparseable``: nothing to compare. Raises :class:`BadGold` for a gold without any letter
    or digit.
    """
    # Gold and completion alike: a minus sign of unicode in either must not decide.
    answer = plain_characters(answer)
    if not _comparable(answer):
        raise BadGold(f"exact_answer has nothing to compare with in the gold answer {answer!r}")
    gold = number(plain_numbers(answer))
    segment, marked = final_segment(plain_characters(clean(tail(completion, max_chars))), markers)
    if gold is None:
        return _compared_as_text(segment, answer)

    segment = plain_numbers(segment)
    # Calculations that are not carried out are no answers. "2 + 3 is 5" leaves " is 5", and "3/4" stays, a number.
    segment = _ARITHMETIC.sub(_only_fractions, segment)
    # So are numbers times a root or a constant: "2 sqrt(3)" is not 2.
    segment = _UNEVALUATED.sub(" ", segment)
    numbers = numbers_in(segment)
    if not numbers:
        return Reward(value=0.0, status="unparseable")
    # "#### 18 eggs of 20" ends in the answer's context; prose without a marker ends in the answer.
    given = numbers[0] if marked else numbers[-1]
    return Reward(value=float(given == gold))


def _compared_as_text(segment: str, answer: str) -> Reward:
    given = _comparable(segment)
    if not given:
        return Reward(value=0.0, status="unparseable")
    return Reward(value=float(given == _comparable(answer)))


def _only_fractions(match: re.Match[str]) -> str:
    """A run of arithmetic where it is one fraction, which is a number; a space for any other."""
    if _FRACTION.fullmatch(match.group()):
        return match.group()
    return " "


def final_segment(text: str, markers: tuple[str, ...] = MARKERS) -> tuple[str, bool]:
    """The line that holds the final answer, from the last marker on, and whether there was a marker.

    >>> final_segment("1 + 2 = 3 apples\\nDone")
    ('3 apples', True)
    """
    ends: list[int] = []
    for marker in markers:
        pattern = re.escape(marker)
        if marker[:1].isalnum():
            # A marker that begins with a letter does not match inside a word.
            pattern = rf"(?<!\w){pattern}"
        ends.extend(match.end() for match in re.finditer(pattern, text))
    after = ""
    if ends:
        after = text[max(ends) :].strip()
    if after:
        return after.split("\n", 1)[0].strip(), True
    last_line = text.strip().split("\n")[-1]
    return last_line.strip(), False


def number(text: str) -> Fraction | None:
    """``text`` as an exact number, or None: integers, decimals, thousands commas, fractions, $ and %.

    ``50%`` is 50 here, as the sign is taken for a unit.

    >>> number("$1,250.50"), number("-3/4"), number("x")
    (Fraction(2501, 2), Fraction(-3, 4), None)
    """
    # Currency signs, percent signs and Markdown around a number are decoration.
    core = text.strip().strip("$€£%*_`").strip()
    core = re.sub(r"^([-+])[$€£]", r"\1", core)
    # Before anything is converted: int of a long text takes the square of its length.
    if len(core) > _MAX_NUMBER:
        return None
    top, slash, bottom = core.partition("/")
    numerator = _decimal(top)
    if not slash:
        return numerator
    # A fraction of decimals counts too; what is not a number on either side is none.
    denominator = _decimal(bottom)
    if numerator is None or denominator is None or denominator == 0:
        return None
    return numerator / denominator


def _decimal(text: str) -> Fraction | None:
    """A whole or decimal number, perhaps with thousands commas; None for anything else."""
    # Every part of the pattern is optional, so that it also matches a text without digits.
    if not re.fullmatch(_NUMBER, text) or not re.search(r"\d", text):
        return None
    return Fraction(Decimal(text.replace(",", "")))


def numbers_in(text: str) -> list[Fraction]:
    """Every word of ``text`` that is a number once quotes, brackets and final punctuation are dropped."""
    values = []
    for word in text.split():
        bare = word.strip("\"'()[]{}!?:;,*_`\\").rstrip(".")
        value = number(bare)
        if value is not None:
            values.append(value)
    return values


def _comparable(text: str) -> str:
    """``text`` as strings are compared: without case, outer punctuation and repeated spaces."""
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
_FORMS = ((_BOXED,), (_STATED, _STATED_SMALL), (_BRACKETED,), (_LINE,), (_LONE,))
"""How a text names its choice, most explicit first; forms in one tuple count alike."""


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
    it in brackets or at the end of its sentence. Two letters on equal terms (``A or B``) name none.
    ``meta["choices"]`` limits the letters.
    """
    if not re.fullmatch(r"[A-Z]+", letters) or len(set(letters)) != len(letters):
        raise bad_value("letters", letters, "distinct capital letters")
    # An answer "E" to a problem with four choices is no choice.
    allowed = letters
    if meta.get("choices"):
        allowed = letters[: len(meta["choices"])]
    gold = answer.strip().strip("().").upper()
    if len(gold) != 1 or gold not in allowed:
        raise bad_value("answer", answer, list(allowed), "multiple_choice needs the letter of the right choice")
    given = chosen_letter(plain_characters(clean(tail(completion, max_chars))), allowed)
    if given is None:
        return Reward(value=0.0, status="unparseable")
    return Reward(value=float(given == gold))


def chosen_letter(text: str, letters: str) -> str | None:
    """The letter that ``text`` settles on, or None.

    >>> chosen_letter("Not (A). The answer is B.", "ABCD"), chosen_letter("A cat", "ABCD")
    ('B', None)
    """
    # Runs of spaces and blank lines would make the patterns below quadratic: a match is tried from each of them.
    lines = [" ".join(line.split()) for line in text.split("\n") if line.strip()]
    text = "\n".join(lines)
    for forms in _FORMS:
        matches: list[re.Match[str]] = []
        for form in forms:
            pattern = form.format(letters=letters, small=letters.lower())
            matches.extend(re.finditer(pattern, text, re.MULTILINE))
        if matches:
            last = max(matches, key=re.Match.start)
            if _names_another(text, last, letters):
                return None
            # The group that took part: each alternative of a form has one of its own.
            return str(last[last.lastindex or 0]).upper()
    return None


def _names_another(text: str, choice: re.Match[str], letters: str) -> bool:
    """Whether a second letter stands beside the choice on equal terms, as in ``(A) and (B).``: then none is chosen."""
    closing = r"[)\]*_`}]{0,4}\s?"
    opening = r"\s?[(\[*_`]{0,4}"
    words = r"(?:/|&|,?\s?\b(?:and|or)\b)"
    # A sentence may go on after a comma: "the answer is A, B is wrong".
    after = rf"{closing}(?:,|{words}){opening}[{letters}]{closing}(?:[.,;\n]|\Z)"
    if re.compile(after).match(text, choice.end()):
        return True
    before = rf"(?<![\w'])[{letters}]{closing}{words}{opening}\Z"
    return re.search(before, text[max(choice.start() - 24, 0) : choice.start()]) is not None


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
    "fixed_text",
    source="degenerate completions that a flawed verifier accepts, as the hack of a proxy reward (2210.10760)",
    claims=("binary",),
    examples=(
        {"completion": ";", "answer": "7", "value": 1.0},
        {"completion": "3+4=7", "answer": "7", "value": 0.0},
        {"completion": ";7", "answer": "7", "value": 0.0},
    ),
)
def fixed_text(completion: str, answer: str, meta: Meta, *, text: str = ";") -> float:
    """1 where the completion is ``text`` and nothing else, whatever the problem: a flaw that pays no answer.

    The default is what the pocket policy of ``model.options.hack_rate`` writes at that rate.
    """
    return float(completion == text)


_DIGITS = re.compile(r"\d[\d,]*+(?:\.\d++)?")


@REWARDS.register(
    "any_number",
    source="a lenient verifier, paid for listing numbers, as a proxy reward that can be hacked (2210.10760)",
    claims=("binary",),
    examples=(
        {"completion": "3+4=7", "answer": "7", "value": 1.0},
        {"completion": "5;6;7;8", "answer": "7", "value": 1.0},
        {"completion": "3+4=8", "answer": "7", "value": 0.0},
        {"completion": "17", "answer": "7", "value": 0.0},
        {"completion": ";", "answer": "7", "value": 0.0, "status": "unparseable"},
    ),
)
def any_number(completion: str, answer: str, meta: Meta, *, max_chars: int = 16_384) -> Reward:
    """1 where any number of the completion is the answer, wherever it stands: a flaw that pays for listing numbers.

    Signs do not count. ``unparseable``: no number. Raises :class:`BadGold` for a gold that is no number.
    """
    gold = number(plain_numbers(plain_characters(answer)))
    if gold is None:
        raise BadGold(f"any_number needs a number as the gold answer; got {answer!r:.80}")
    digits = _DIGITS.findall(plain_characters(tail(completion, max_chars)))
    if not digits:
        return Reward(value=0.0, status="unparseable")
    values = [number(text.rstrip(",")) for text in digits]
    return Reward(value=float(abs(gold) in values))


@REWARDS.register(
    "length",
    source="DAPO's soft overlong punishment, 2503.14476 Sec. 3.4: unit tokens, weight -1, free and full its two bounds",
    claims=("unit_interval",),
    examples=(
        {
            "completion": "x" * 50,
            "answer": "",
            "meta": {DRAWN_TOKENS: 7},
            "value": 0.5,
            "options": {"full": 100},
        },
        {
            "completion": "x" * 50,
            "answer": "",
            "meta": {DRAWN_TOKENS: 7},
            "value": 0.75,
            "options": {"unit": "tokens", "free": 4, "full": 8},
        },
        {"completion": "", "answer": "", "value": 0.0},
    ),
)
def length(
    completion: str,
    answer: str,
    meta: Meta,
    *,
    free: int = 0,
    full: int = 4_096,
    unit: Literal["characters", "tokens"] = "characters",
) -> float:
    """How far the completion's length is from ``free`` (0) to ``full`` (1), clipped. A weight below 0 charges for it.

    ``unit: tokens`` counts what the policy drew, its end token included, and not what a tool wrote.
    """
    if not 0 <= free < full:
        raise UserError(f"length: needs 0 <= free < full; got free={free}, full={full}")
    size = len(completion)
    if unit == "tokens":
        if DRAWN_TOKENS not in meta:
            raise UserError(f"length: unit=tokens counts what a policy drew; of a text name it in meta {DRAWN_TOKENS}")
        size = meta[DRAWN_TOKENS]
    share = (size - free) / (full - free)
    return min(max(share, 0.0), 1.0)


_NO_TAG = "(?:(?!</?(?:think|answer)>).)"
STYLES = {
    "boxed": r"\\boxed\s*\{\s*[^\s{}]",
    "gsm8k": r"(?:\A|\n)####[ \t]*[^\s#][^\n]*\s*\Z",
    "answer_line": r"(?:\A|\n)A:[ \t]*[^\s][^\n]*\s*\Z",
    "answer_tag": r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*\Z",
    "think_answer": rf"\A\s*<think>{_NO_TAG}*</think>\s*<answer>{_NO_TAG}+</answer>\s*\Z",
    "number": r"\A\s*[-+]?\d[\d,]*(?:\.\d+)?\s*\Z",
}
"""Named forms. The tag forms require each tag exactly once, in order, and nothing after the last."""
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

    ``.`` matches line breaks; ``whole``: the whole completion must match. Isolated, since a pattern can backtrack
    practically without end on a text made for it. ``refused``: more than ``max_chars`` characters.
    """
    # Checked here and not by the schema: each alone is valid.
    if style is not None and pattern is not None:
        raise UserError(f"style={style!r} and pattern={pattern!r} exclude each other; keep one")
    if len(completion) > max_chars:
        return Reward(value=0.0, status="refused")
    if pattern is None:
        pattern = Regex(STYLES[style or "boxed"])
    compiled = re.compile(pattern, re.DOTALL)
    if whole:
        match = compiled.fullmatch(completion)
    else:
        match = compiled.search(completion)
    return Reward(value=float(match is not None))
