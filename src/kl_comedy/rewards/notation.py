r"""How answers write numbers and formulas, and the one form of each that the verifiers read.

math-verify reads ``2 2/3`` as 4/3, ``1\,000`` as 0 and the 52 of ``52_9`` as fifty-two, and does not read ``½`` or
``2³``. The functions here rewrite such forms before it sees them; docs/configuration.md lists every rule. They look at
characters only, each pass is linear in the text, and what they do not know they leave as it is.

Formulas (``$...$``, ``\(...\)``, ``\[...\]``, ``\boxed{...}``) and the prose around them are rewritten apart, because
math-verify reads LaTeX in the former and bare numbers in the latter, so that ``2√3`` in prose would be 2. Such a run of
prose becomes a formula.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

# --- characters --------------------------------------------------------------------------------------------------
_WIDE = [*range(0xFF01, 0xFF5F), *range(0x1D400, 0x1D800)]
"""Full-width forms, and letters and digits of mathematical alphabets."""
_SPACES = [0xA0, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000]
_INVISIBLE = [0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF]
"""Soft hyphens, joiners, marks of direction: a model may write them inside of a number."""
_CHARACTERS: dict[int, str] = {
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in _WIDE},
    **dict.fromkeys(_SPACES, " "),
    **dict.fromkeys(_INVISIBLE, ""),
    **dict.fromkeys(map(ord, "\u2212\ufe63\u2010\u2011"), "-"),
    **dict.fromkeys(map(ord, "×✕✖⨯·⋅∙"), "*"),
    **dict.fromkeys(map(ord, "÷∕\u2044"), "/"),
    # ① to ⑳.
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in range(0x2460, 0x2474)},
    # The decimal point and the separator of thousands between Arabic digits.
    0x66B: ".",
    0x66C: ",",
    # A full-width comma separates; without the space "１，２" would be a decimal number.
    0xFF0C: ", ",
}

_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")
_PLAIN_SUPERSCRIPTS = (0xB2, 0xB3, 0xB9, 0x2070, *range(0x2074, 0x207A))
_SUPERSCRIPTS = {
    **{code: unicodedata.normalize("NFKC", chr(code)) for code in _PLAIN_SUPERSCRIPTS},
    0x207A: "+",
    0x207B: "-",
    0x207D: "(",
    0x207E: ")",
    0x207F: "n",
    0x2071: "i",
}
_SUBSCRIPTS = {code: chr(ord("0") + code - 0x2080) for code in range(0x2080, 0x208A)}
_SUPER = "[" + "".join(map(chr, _SUPERSCRIPTS)) + "]"
_SUB = "[" + "".join(map(chr, _SUBSCRIPTS)) + "]"
_VULGAR = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SYMBOLS = {
    "∞": r"\infty ",
    "⟨": r"\langle ",
    "⟩": r"\rangle ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∖": r"\setminus ",
    "∅": r"\emptyset ",
    "⌀": r"\emptyset ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "⩽": r"\leq ",
    "⩾": r"\geq ",
    "≦": r"\leq ",
    "≧": r"\geq ",
    "≈": r"\approx ",
    "ℝ": r"\mathbb{R}",
    "°": r"^{\circ}",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
}
"""Symbols that math-verify does not read in a formula (it reads ≤, ≥, ≠, π and Greek letters)."""
_SYMBOL = re.compile("|".join(map(re.escape, _SYMBOLS)))


def plain_characters(text: str) -> str:
    """``text`` with ASCII digits, letters, signs and spaces for their look-alikes.

    >>> plain_characters("１２ − ５ × 𝟑")
    '12 - 5 * 3'
    """
    text = text.translate(_CHARACTERS)
    # Digits of other scripts, as Arabic ones.
    text = _FOREIGN_DIGIT.sub(lambda match: str(unicodedata.decimal(match.group())), text)
    # A dash before a number is a minus sign; between numbers it may be a range, and stays.
    return re.sub(r"(?<![\w)\]}])[\u2013\u2014](?=\d)", "-", text)


# --- numbers -----------------------------------------------------------------------------------------------------
# Every repetition below has a bound or is possessive (++, *+, {0,10}+): a text made for backtracking must not cost more
# than time linear in its length.
_THIN = r"(?:[~ ]|\\[ ,;:!]|\{,\}|\{\\,\})"
_GROUPED = re.compile(rf"(?<![\w.,\\])(\d{{1,3}})({_THIN})(\d{{3}}(?:\2\d{{3}}){{0,10}}+)(?!\2?\d)")
_GROUPED_DECIMALS = re.compile(rf"(?<=\d)(\.\d{{3}})({_THIN})((?:\d{{3}}\2){{0,10}}+\d{{1,3}})(?!\2?\d|/\d)")
_GROUPED_BY_POINTS = re.compile(r"(?<![\w.,\\])(\d{1,3}(?:\.\d{3}){2,10}+)(?![\d.]\d|\d)")
"""1.234.567: two points make it no decimal. With one point, as in 1.234, it is one."""
_GROUPED_BY_APOSTROPHES = re.compile(r"(?<![\w.,\\])(\d{1,3}(?:['\u2019]\d{3}){1,10}+)(?!['\u2019]?\d)")
_BEFORE_WHOLE = r"(?<![\w.^/)\]}!\\])(?<!\d[ ~])"
_WHOLE = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"
_GAP = r"(?:[ \t~]|\\[ ,;:])++"
_LATEX_FRACTION = r"\\[dtc]?frac ?\{ ?(\d{1,15}) ?\} ?\{ ?(\d{1,15}) ?\}"
_MIXED = re.compile(
    rf"{_BEFORE_WHOLE}{_WHOLE}(?:{_GAP}(\d{{1,15}})/(\d{{1,15}})(?![\d/^!]|[.,]\d)|(?:{_GAP})?{_LATEX_FRACTION})"
)
_MIXED_ACROSS = re.compile(rf"(?<![\w.,^/)\]}}!\\$])(?<!\d ){_WHOLE} ?\$ ?{_LATEX_FRACTION} ?\$")
_EXPONENT = re.compile(r"(?<![\w.\\])(\d{1,30}(?:\.\d{1,30})?|\.\d{1,30})[eE]([-+]?\d{1,6})(?![\w{]|\.\d)")
_TIMES_TEN = re.compile(r"(?<=\d) ?[xX] ?(?=10 ?(?:\^|[\u2070-\u207b\xb2\xb3\xb9]))")
_POWER_OF_TEN = re.compile(
    r"(?<![\w.^/])(?<!/ )(\d{1,30}(?:\.\d{1,30})?) ?(?:[*]|\\times|\\cdot) ?10 ?"
    rf"(?:\^ ?(?:\{{([-+]?\d{{1,3}})\}}|([-+]?\d{{1,3}}))|({_SUPER}{{1,4}}))(?!\.?\d|\^)"
)
_EXPANDED = 30
"""Powers of ten up to this are written out. A larger one stays a power: 1e999999 has a million digits."""


def joined_digits(text: str) -> str:
    r"""``text`` without the spaces, points or apostrophes between groups of three digits.

    >>> joined_digits(r"1\,234\,567 and 1 234.5"), joined_digits("12 34")
    ('1234567 and 1234.5', '12 34')
    >>> joined_digits("1.234.567, 1'234 and 1.234")
    '1234567, 1234 and 1.234'
    """
    text = _without_separators(text)

    def group(match: re.Match[str]) -> str:
        # 5 100/3 is a mixed number; with a thin space it is a fraction.
        if match[2] == " " and text.startswith("/", match.end()):
            return match.group()
        return match[1] + match[3].replace(match[2], "")

    text = _GROUPED.sub(group, text)
    return _GROUPED_DECIMALS.sub(lambda match: match[1] + match[3].replace(match[2], ""), text)


def _without_separators(text: str) -> str:
    """``text`` without points (two or more) and apostrophes between groups of three digits."""
    text = _GROUPED_BY_POINTS.sub(lambda match: match[1].replace(".", ""), text)
    return _GROUPED_BY_APOSTROPHES.sub(lambda match: re.sub(r"\D", "", match[1]), text)


def improper_fractions(text: str, form: str = "{}/{}") -> str:
    r"""``text`` with every mixed number as one fraction: a number, a space and a fraction are a sum.

    >>> improper_fractions("-2 2/3 and 4 10/3, not x^2 1/3")
    '-8/3 and 22/3, not x^2 1/3'
    """
    return _MIXED.sub(lambda match: _improper(match, form), _spaced_fractions(text))


def _improper(match: re.Match[str], form: str) -> str:
    """The mixed number of a match of ``_MIXED`` or ``_MIXED_ACROSS`` as one fraction; unchanged over zero."""
    # Each alternative of the patterns has groups of its own; those that did not take part are None.
    parts = [int(part.replace(",", "")) for part in match.groups() if part is not None]
    whole, top, bottom = parts
    if bottom == 0:
        return match.group()
    return form.format(whole * bottom + top, bottom)


def _spaced_fractions(text: str) -> str:
    """``text`` with ``½`` and ``³/₄`` as fractions, behind a space where they follow a number (``2½``)."""

    def fraction(match: re.Match[str]) -> str:
        whole, char, top, bottom = match.groups()
        if char:
            # NFKC of ½ is 1⁄2 with U+2044, the fraction slash.
            top, bottom = unicodedata.normalize("NFKC", char).split("\u2044")
        else:
            top = top.translate(_SUPERSCRIPTS)
            bottom = bottom.translate(_SUBSCRIPTS)
        if whole:
            return f"{whole} {top}/{bottom}"
        return f"\\frac{{{top}}}{{{bottom}}}"

    digits = "[⁰¹²³⁴-⁹]"
    return re.sub(rf"(?:(?<!\d)(\d{{1,15}}) ?)?(?:([{_VULGAR}])|({digits}{{1,15}})/({_SUB}{{1,15}}))", fraction, text)


def written_out(text: str) -> str:
    """``text`` with numbers like ``1.5e3`` and ``1.5*10^3`` as plain decimals, or as a product where they are long.

    >>> written_out("1.5e3, 2E-7, 1.5 x 10^3 and 1e400; not 0x1e3")
    '1500, 0.0000002, 1500 and 1*10^{400}; not 0x1e3'
    """

    def decimal(match: re.Match[str]) -> str:
        digits, *powers = match.groups()
        # One of the alternative groups has matched.
        power_text = next(power for power in powers if power)
        power = int(power_text.translate(_SUPERSCRIPTS))
        if abs(power) > _EXPANDED:
            return f"{digits}*10^{{{power}}}"
        # The default context rounds to 28 digits.
        exact = Context(prec=100)
        return f"{Decimal(digits).scaleb(power, exact):f}"

    text = _TIMES_TEN.sub("*", text)
    text = _EXPONENT.sub(decimal, text)
    return _POWER_OF_TEN.sub(decimal, text)


# --- recurring decimals ------------------------------------------------------------------------------------------
_PERIOD = (
    r"(?:(?P<dotted>\\dot ?(?:\d|\{\d\}) ?\d{0,28}\\dot ?(?:\d|\{\d\}))"
    # 0.5(3) = 1.5 is a product.
    r"|\((?P<bracketed>\d{1,30})\)(?! ?(?:[-+*/=(^A-Za-z]|\\(?:cdot|times|div)))"
    r"|\\(?:overline|bar|dot) ?\{ ?(?P<barred>\d{1,30}) ?\}|\\(?:overline|bar|dot) ?(?P<single>\d)(?![\d{]))"
)
_RECURRING = re.compile(
    rf"(?<![\w.,\\])(?P<whole>\d{{1,15}})\.(?P<before>\d{{0,30}}){_PERIOD}"
    r"(?!\d|\^| ?\\(?:overline|bar|dot)(?![A-Za-z]))"
)
_DOTTED_END = re.compile(
    r"(?<![\w.,\\])(?P<whole>\d{1,15})\.(?P<digits>\d{3,60})(?: ?\\[lc]?dots(?![A-Za-z])|\.\.\.|…)(?!\d)"
)
_REPEATED = re.compile(r"(\d{1,20}?)\1\1+\Z")
"""A period written three times. Twice is not enough: the decimals of e begin 718281828."""


def recurring_fractions(text: str, form: str = "{}/{}") -> str:
    r"""``text`` with every recurring decimal as the fraction that it is.

    The period stands under a bar or dots or in brackets. Before three dots it is written at least three times.

    >>> recurring_fractions(r"0.\overline{3}, 2.1(6), 0.\dot4\dot5, 0.333..., 3.14159...")
    '1/3, 13/6, 5/11, 1/3, 3.14159...'
    """

    def marked(match: re.Match[str]) -> str:
        period = match["barred"] or match["single"] or match["bracketed"]
        if period is None:
            period = re.sub(r"\D", "", match["dotted"])
        return _recurring(match["whole"], match["before"], period, form)

    def repeated(match: re.Match[str]) -> str:
        period = _REPEATED.search(match["digits"])
        if period is None:
            return match.group()
        return _recurring(match["whole"], match["digits"][: period.start()], period[1], form)

    return _DOTTED_END.sub(repeated, _RECURRING.sub(marked, text))


def _recurring(whole: str, before: str, period: str, form: str) -> str:
    """The number ``whole.before`` with ``period`` repeated for ever, as one fraction."""
    # x = 0.1666...: 100 x - 10 x = 16 - 1, so that x = (16 - 1) / 90.
    until_period = int(whole + before)
    with_period = int(whole + before + period)
    bottom = (10 ** len(period) - 1) * 10 ** len(before)
    value = Fraction(with_period - until_period, bottom)
    return form.format(value.numerator, value.denominator)


_BOX = re.compile(r"\\(?:f?box(?:ed)?|text\w{0,6}|mathrm|mathbf) ?\{")


def plain_numbers(text: str) -> str:
    r"""``text`` with its numbers in plain digits and without LaTeX around them, for rewards that read no formulas.

    >>> plain_numbers(r"\boxed{12}"), plain_numbers("1e3"), plain_numbers("2 1/2 and 3*10^4")
    (' 12 ', '1000', '5/2 and 30000')
    """
    text = text.replace("\\$", "$").replace("\\%", "%")
    text = _BOX.sub(" ", text)
    text = joined_digits(text)
    text = recurring_fractions(text)
    text = improper_fractions(text)
    text = re.sub(rf"(?<![\w}}]){_LATEX_FRACTION}", r"\1/\2", text)
    text = written_out(text)
    # The braces that the boxes left open.
    return re.sub(r"(?<=[\d%])\}++", " ", text)


# --- bases -------------------------------------------------------------------------------------------------------
_BASE_WORDS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "eleven": 11,
    "twelve": 12,
    "sixteen": 16,
}
_BASES = {**{str(number): number for number in range(2, 37)}, **_BASE_WORDS}
_DIGITS = r"(?<![\w.^\\}])(\(?)([0-9A-Z]{1,99}(?:\.[0-9A-Z]{1,99})?)(\)?)"
_TEXT = r"\\(?:text|textrm|mathrm|mbox)"
_BRACED = r"\{([^{}]{1,24}|[^{}]{0,9}\{[^{}]{1,24}\}[^{}]{0,9})\}"
_BASED = re.compile(
    rf"{_DIGITS}(?:_ ?(?:{_TEXT})?(?:(\d{{1,2}})(?!\d)|{_BRACED})"
    rf"|(?:[ ~]|\\[ ,])?{_TEXT} ?\{{([^{{}}]{{1,24}}\}} ?\d{{0,2}})|[ ~]+(\(?(?:in )?base[- ]\w{{1,9}}\)?))"
)
_PREFIXES = {"b": (2, "01"), "x": (16, "0123456789ABCDEF")}
_PREFIXED = re.compile(r"(?<![\w.\\])0([bx])([0-9A-Fa-f]{2,99})(?![\w.])")
_SMALL_HEXADECIMAL = re.compile(r"(?<![\w.^\\}])(\d[0-9a-f]{0,98})(?= ?_ ?(?:16(?!\d)|\{ ?16 ?\}))")
_NUMERAL_AS_TEXT = re.compile(rf"{_TEXT} ?\{{ ?([0-9][0-9A-F]{{0,98}}) ?\}}(?= ?_)")
_NOISE = re.compile(rf"{_TEXT}(?![A-Za-z])|[-{{}}() ~]+")
_BASE_BEHIND_BOX = re.compile(r"(\\boxed ?\{[-+]?[0-9A-Z.]{1,99})\}_ ?(\d{1,2}|\{[^{}]{1,24}\})")
_SUBSCRIPT = re.compile(rf"{_SUB}{{1,9}}")
_WRITTEN_BASE = re.compile(r"([-+]?)([0-9A-Z.]+)_\{(\d+)\}")


def numerals(text: str, form: str = "{}") -> str:
    r"""``text`` with every number that names its base as ``digits_{base}``.

    >>> numerals(r"52_9, 1011_{\text{two}}, (2A)_{16}, x_2 and 52 (base 9)")
    '52_{9}, 1011_{2}, 2A_{16}, x_2 and 52_{9}'
    >>> numerals("0b101, 0xFF, 1a_{16} and 0b12")
    '101_{2}, FF_{16}, 1A_{16} and 0b12'
    """

    def prefixed(match: re.Match[str]) -> str:
        base, allowed = _PREFIXES[match[1]]
        digits = match[2].upper()
        if not set(digits) <= set(allowed):
            return match.group()
        return form.format(f"{digits}_{{{base}}}")

    def numeral(match: re.Match[str]) -> str:
        opened, digits, closed, *base_texts = match.groups()
        # One of the alternative groups has matched.
        base_text = next(candidate for candidate in base_texts if candidate)
        words = _NOISE.sub(" ", base_text).split()
        has_subscript = bool(match[4] or match[5])
        if "base" not in words and not has_subscript:
            return match.group()
        names = [word for word in words if word not in ("in", "base")]
        if len(names) != 1 or names[0] not in _BASES:
            return match.group()
        base = _BASES[names[0]]
        if bool(opened) != bool(closed):
            return match.group()
        # A_{12} is a variable and 5C_2 a binomial coefficient: letters are digits beside others, in large bases.
        has_letters = not digits.replace(".", "").isdigit()
        if has_letters and (len(digits) == 1 or base <= 10):
            return match.group()
        return form.format(f"{digits}_{{{base}}}")

    text = _NUMERAL_AS_TEXT.sub(r"\1", text)
    text = _SMALL_HEXADECIMAL.sub(lambda match: match[1].upper(), text)
    text = _BASED.sub(numeral, text)
    return _PREFIXED.sub(prefixed, text)


def digits_and_base(formula: str) -> tuple[str, int] | None:
    """The digits (with sign, without leading zeros) and the base of a formula that is a number with a base."""
    match = _WRITTEN_BASE.fullmatch(formula.rpartition("=")[2].strip())
    if match is None:
        return None
    digits = match[2].lstrip("0") or "0"
    if match[1] == "-":
        digits = f"-{digits}"
    return digits, int(match[3])


def bases(formula: str) -> set[str]:
    """The bases that numbers in the last member of ``formula`` name."""
    return set(re.findall(r"[0-9]_\{?(\d+)", formula.rpartition("=")[2]))


# --- ratios and times ----------------------------------------------------------------------------------------------
_RATIO = re.compile(r"\$? ?\d{1,15} ?: ?\d{1,15} ?\$?")
_RATIO_IN_WORDS = re.compile(r"(?<![\w.])(\d{1,15}) to (\d{1,15})(?=[\s.*!]{0,6}\Z)")
_LONG_RATIO = re.compile(r"\d{1,15}(?: ?: ?\d{1,15}){2,5}")


def is_ratio(gold: str) -> bool:
    """Whether a gold is the ratio of two whole numbers, as ``3:4``."""
    return _RATIO.fullmatch(gold.strip()) is not None


def ratios_in_words(text: str) -> str:
    r"""``text`` with ``3 to 4`` at its end as a ratio; for golds that are one.

    >>> ratios_in_words("The ratio is 3 to 4.")
    'The ratio is \\(3:4\\).'
    """
    return _RATIO_IN_WORDS.sub(r"\(\1:\2\)", text)


def long_ratio(formula: str) -> tuple[Fraction, ...]:
    """The numbers of a ratio of three or more, in units of the first; empty for another formula.

    >>> long_ratio("2:4:6") == long_ratio("1 : 2 : 3"), long_ratio("1:2")
    (True, ())
    """
    if _LONG_RATIO.fullmatch(formula.strip()) is None:
        return ()
    numbers = [int(number) for number in formula.split(":")]
    unit = numbers[0] or 1
    return tuple(Fraction(number, unit) for number in numbers)


_TIME = re.compile(
    r"(?<![\d:.])(\d{1,2}) ?(?::|\{:\}) ?(\d\d)(?![\d:.]\d|\d)"
    r"(?:(?:[ ~]|\\[ ,;:]|\\(?:text|mathrm|textrm|mbox) ?\{){0,4}+([AaPp])\.? ?[Mm](?![A-Za-z]))?"
)


@dataclass(frozen=True, kw_only=True)
class ClockTime:
    """A time of day. ``half``: ``a`` or ``p`` for a.m. and p.m.; empty where it is not said."""

    hour: int
    minute: int
    half: str

    def agrees_with(self, gold: ClockTime) -> bool:
        """Whether it is the gold's time, on a clock of twelve hours or of twenty-four."""
        if self.minute != gold.minute:
            return False
        if self.half:
            return (self.hour, self.half) == (gold.hour, gold.half)
        # Without a half it is the gold's number, or that of twenty-four hours.
        of_day = gold.hour % 12 + (12 if gold.half == "p" else 0)
        return self.hour in (gold.hour, of_day)


def clock_time(text: str) -> ClockTime | None:
    """The last time of day in ``text``, or in what follows its last box's start; None where there is none.

    >>> clock_time(r"from 2:15 to $3{:}30\\text{ p.m.}$")
    ClockTime(hour=3, minute=30, half='p')
    """
    matches = list(_TIME.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    boxed = _TIME.search(text, max(text.rfind("\\boxed"), 0))
    if "\\boxed" in text and boxed is not None:
        # What is said behind the box does not count.
        last = boxed
    return ClockTime(hour=int(last[1]), minute=int(last[2]), half=(last[3] or "").lower())


# --- formulas and prose ------------------------------------------------------------------------------------------
# Each alternative stops where another of its kind opens, so that unclosed ones are not searched again and again.
_OPENING = re.compile(
    r"(?<!\\)\$\$(?:[^$]|\$(?!\$))*+\$\$|(?<!\\)\$(?:\\\$|[^$\n])*+\$|(?<!\\)\\\((?:[^\\\n]|\\(?![()]))*+\\\)"
    r"|(?<!\\)\\\[(?:[^\\]|\\(?![\[\]]))*+\\\]|\\f?box(?:ed)?\s*+\{"
)
_UNITS = "|".join(
    (
        "dollars?|euros?|pounds?|pence|yen|yuan|rubles?|francs?|pesos?|bucks|USD|EUR|GBP",
        "weeks?|decades?|centur(?:y|ies)|times|ways|words?|pages?|points?|pieces?|degrees?|radians?",
        "(?:kilo|centi|milli|nano)met(?:er|re)s?|(?:kilo|milli)?grams?|millilit(?:er|re)s?|ounces?|tons?|tonnes?",
        "quarts?|pints?|cups?|ml|mL|mg|oz|lbs|kph",
        "people|persons?|children|kids|boys|girls|players?|members?|dogs?|cats?",
        "tickets?|books?|eggs?|cookies?|cars?|oranges?|bags?|boxes|balls?|marbles?|cards?|cubes?|votes?|games?",
    )
)
"""Units, besides those that math-verify knows, whose letters it would take for variables."""
_UNIT = re.compile(rf"(?<=\d)(?:[ ~]|\\[ ,;:])++(?:square |cubic )?(?:{_UNITS})(?=\.?\s*(?:[}}$]|\\[)\]]|\Z))")
_NUMBER = r"\d++(?:[.,]\d++)*+"
_COORDINATE = r"\d{1,15}(?:[./]\d{1,15})?"
_RADICAND = r"\d++(?:,\d{3}(?!\d))*+(?:\.\d++)?+"
_ATOM = (
    rf"(?:{_NUMBER}|[√∛∜π{_VULGAR}]|{_SUPER}|\\(?:sqrt|[dtc]?frac|pi)(?![A-Za-z]) ?|(?<![A-Za-z\\])sqrt ?(?=[\d(])"
    r"|[(){}^])"
)
_RUN = re.compile(
    rf"(?<![\w\\])(?:-|(?<== )- )?{_ATOM}++(?: ?(?:[-+*/]|\\cdot|\\times) ?{_ATOM}++)*+"
    rf"(?:(?<=[π)}}\d ])[A-Za-z]{{1,2}}(?![A-Za-z]))?"
)
_LAST_POINT = re.compile(rf"(?<![\w\\])(\( ?-?{_COORDINATE}(?: ?, ?-?{_COORDINATE}){{1,4}} ?\))(?=[\s.*!]{{0,6}}\Z)")
_LAST_INFINITY = re.compile(r"(?<![\w\\])([-+]?) ?∞(?=[\s.*!]{0,6}\Z)")
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]{1,300})(?<=\S)\*\*(?![\w(*])")
"""Bold type; of ``**1/2**`` math-verify would read the 1."""
_NEEDS_LATEX = re.compile(rf"[√∛∜π]|\\|sqrt|\^\{{|(?<=[\d)]){_SUPER}")
_SPACE = r"(?:[ ~]|\\[ ,;:!]|\\quad(?![A-Za-z]))"
_UNIT_TEXT = r"\\(?:text|mathrm|textrm|mbox) ?\{ ?([A-Za-z. ]{1,30}?) ?\}"
_WORD = r"\\(?:text|mathrm|textrm|mbox) ?\{ ?(?:and|or) ?\}"
_UNIT_POWER = r"(?: ?\^ ?(?:\d|\{\d\}))?"
_NUMBER_OR_FRACTION = rf"-? ?\d{{1,15}}(?:[./]\d{{1,15}})?|-? ?{_LATEX_FRACTION}"
_LATEX_FORMS = (
    # The name of a point before its coordinates would be a function of them. C(5,2) and N(0,1) are no points.
    (re.compile(r"(?<=[{$(\[=])( ?)[ADHKMOPQRSVW](?:'|_\{?\d\}?)? ?(?=(?:\\left ?)?\([^()=]{1,80},)"), r"\1"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    # Of a vector in angle brackets, as <1,2>, it would read 1.2, and of bold letters nothing.
    (
        re.compile(
            r"(?:\\left ?)?\\langle(?=[^$]{1,200}?,) ?((?:(?!\\[lr]angle)[^()<>$]){1,200}?)(?:\\right ?)?\\rangle"
        ),
        r"(\1)",
    ),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm) ?\{ ?([A-Za-z]) ?\}"), r" \1"),
    (re.compile(r"\\color ?\{[a-zA-Z]{1,20}\} ?|\\textcolor ?\{[a-zA-Z]{1,20}\}"), ""),
    # Of 5 = x the last side counts.
    (
        re.compile(rf"(?<=[{{$(\[])( ?)({_NUMBER_OR_FRACTION}) ?= ?([a-z]) ?(?=[}}$]|\\[)\]])"),
        r"\1\5=\2",
    ),
    # The distance after a line break would be a factor of the next entry.
    (re.compile(r"\\\\ ?\[[-\d.]{1,8} ?(?:pt|em|ex|mm|cm|in)\]"), r"\\\\"),
    # "1, 2, and 3": math-verify reads the word as a further comma.
    (re.compile(rf",{_SPACE}{{0,4}}+{_WORD}"), ","),
    # A set by its condition is the condition.
    (
        re.compile(
            rf"\\\{{{_SPACE}{{0,4}}+([a-z])(?: ?\\in ?\\(?:mathbb|mathbf) ?\{{?R\}}?)?"
            rf"{_SPACE}{{0,4}}+(?:\\mid|\\colon|[|:]){_SPACE}{{0,4}}+"
            r"((?=[^{}|]{0,80}\1)(?=[^{}|]{0,80}(?:[<>]|\\[lgn]e))[^{}|]{1,80}?)\\\}"
        ),
        r"\2",
    ),
    # Units that are a fraction of their own.
    (
        re.compile(
            rf"(?<=[\d}}]){_SPACE}{{0,4}}+\\[dt]?frac ?\{{ ?{_UNIT_TEXT}{_UNIT_POWER} ?\}}"
            rf" ?\{{ ?{_UNIT_TEXT}{_UNIT_POWER} ?\}}"
        ),
        "",
    ),
)
"""Forms of LaTeX that math-verify misreads, and what it reads for them."""
_PERCENT = r"(?:\\?%|\\(?:text|mathrm) ?\{ ?(?:percent|per cent) ?\})"
_PERCENT_SIGN = re.compile(rf"(?<=[\d}}]){_SPACE}{{0,4}}+{_PERCENT}")
_PROSE_PERCENT = re.compile(r"(?<![\w./])(\d{1,15})/(\d{1,15}) ?(?:%|percent\b|per cent\b)")
_FRACTION_OF_PERCENT = re.compile(rf"{_LATEX_FRACTION}\\%")
_QUANTITY = r"(-? ?\d{1,15}(?:\.\d{1,15})?)"
_TWO_QUANTITIES = re.compile(
    rf"(?<=[{{$(\[])( ?){_QUANTITY}{_SPACE}{{0,4}}+(?!{_WORD}){_UNIT_TEXT}{_SPACE}{{0,4}}+"
    rf"(?:\\text ?\{{ ?and ?\}}{_SPACE}{{0,4}}+|\+ ?|(?=-))?"
    rf"{_QUANTITY}{_SPACE}{{0,4}}+{_UNIT_TEXT}(?=\.? ?(?:[}}$]|\\[)\]]))"
)
_SAME_UNIT = re.compile(
    rf"{_SPACE}{{0,4}}+{_UNIT_TEXT}(?= ?[-+] ?[^{{}}$]{{1,40}}\\(?:text|mathrm|textrm|mbox) ?\{{ ?\1 ?\}})"
)
_ASSIGNMENT = rf"{_SPACE}{{0,4}}+[a-z] ?= ?(?:[^=,;{{}}$]|\{{[^{{}}$]{{0,30}}\}}){{1,40}}"
_ASSIGNMENTS = re.compile(rf"(?<=[{{$(\[])(?:{_ASSIGNMENT}[,;]){{1,4}}+{_ASSIGNMENT}(?=[}}$]|\\[)\]])")
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}


def readable(text: str) -> str:
    r"""``text`` in the forms that math-verify reads.

    >>> readable("so 2 2/3 or $2³$, \\boxed{1\\,000 dollars}, 2√3")
    'so 8/3 or $2^{3}$, \\boxed{1000}, \\(2\\sqrt{3}\\)'
    """
    text = plain_characters(text)
    if not _OPENING.search(text):
        words = _LAST_WORDS.search(text)
        last_line = text[text.rfind("\n") + 1 :]
        # An answer in words. Beside digits a word may be no number: "so it is 12, and 7 is one".
        if words is not None and _number_of_words(words[1]) and not re.search(r"\d", last_line):
            text = f"{text[: words.start(1)]}\\({_number_of_words(words[1])}\\)"
        # Of the point (2, -1) in prose math-verify would read the -1. Formulas have their own rules, and go first.
        text = _LAST_POINT.sub(r"\\(\1\\)", text)
    text = _MIXED_ACROSS.sub(lambda match: _improper(match, r"$\frac{{{}}}{{{}}}$"), text)
    text = _BASE_BEHIND_BOX.sub(r"\1_\2}", text)
    text = re.sub(rf"([√∛∜]) ?([{_VULGAR}])", r"\1(\2)", text)
    text = _single_braces(text)
    # All braces are paired in one pass: a search per box would be quadratic on a text of many open boxes.
    closing_braces = _closing(text, "{", "}")
    pieces = []
    end = 0
    while (opening := _OPENING.search(text, end)) is not None:
        start = opening.start()
        stop = opening.end()
        if opening.group().endswith("{"):
            # A box that never closes reaches to the end of the text.
            brace = opening.end() - 1
            stop = closing_braces.get(brace, len(text) - 1) + 1
        pieces.append(_prose(text[end:start]))
        pieces.append(_formula(text[start:stop]))
        end = stop
    pieces.append(_prose(text[end:]))
    return "".join(pieces)


def _formula(text: str) -> str:
    """A formula in the forms that math-verify reads. The order matters: each pass reads what those before it wrote."""
    text = re.sub(r"~(?!=)", " ", text)
    text = joined_digits(text)
    text = re.sub(r"(\\[dtc]?frac) ?(\d) ?(\d)(?!\d)", r"\1{\2}{\3}", text)
    text = recurring_fractions(text, r"\frac{{{}}}{{{}}}")
    text = improper_fractions(text, r"\frac{{{}}}{{{}}}")
    text = _fractions_of_percent(text)
    text = written_out(text)
    text = _plain_subscripts(text)
    text = numerals(text)
    text = _roots(text)
    text = re.sub(rf"{_SUPER}++", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _SYMBOL.sub(lambda match: _SYMBOLS[match.group()], text)
    # Without braces 10^-3 would be read as 10.
    text = re.sub(r"\^ ?([-+]\d{1,30}|[-+][A-Za-z])", r"^{\1}", text)
    # The full stop of a sentence that ends inside its box.
    text = re.sub(r"(?<!\\right)(?<!\.)\.(?=\s?\})", "", text)
    text = _UNIT.sub("", text)
    text = _quantities(text)
    text = _WORDS_AS_ANSWER.sub(lambda match: _number_of_words(match[1]) or match.group(), text)
    text = _turned_chains(text)
    for pattern, replacement in _LATEX_FORMS:
        text = pattern.sub(replacement, text)
    return _sorted_assignments(text)


def _fractions_of_percent(text: str) -> str:
    r"""``text`` with percent signs directly behind their numbers, and fractions of percent as fractions of one.

    >>> _fractions_of_percent(r"37.5\,\% and \frac{25}{2}\text{ percent}")
    '37.5\\% and \\frac{25}{200}'
    """
    text = _PERCENT_SIGN.sub(r"\\%", text)
    return _FRACTION_OF_PERCENT.sub(lambda match: rf"\frac{{{match[1]}}}{{{match[2]}00}}", text)


def _quantities(text: str) -> str:
    r"""``text`` with ``3\text{ hours }20\text{ minutes}`` as a pair, and sums of one unit without the unit.

    math-verify drops whatever follows the first unit.
    """

    def pair(match: re.Match[str]) -> str:
        before, first, first_unit, second, second_unit = match.groups()
        first_unit = first_unit.removesuffix(" and")
        # 3 cm and 5 cm are two answers, 3 hours and 20 minutes are one.
        if first_unit == second_unit:
            return f"{before}{first},{second}"
        return f"{before}({first},{second})"

    text = _SAME_UNIT.sub("", text)
    return _TWO_QUANTITIES.sub(pair, text)


_UNDER_TWENTY = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = {
    "twenty": 20,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
}
_NUMBER_WORDS = {**{name: number for number, name in enumerate(_UNDER_TWENTY)}, **_TENS, "hundred": 100}
_WORDS_AS_ANSWER = re.compile(
    r"(?<=[{$])\\(?:text|mathrm|textrm|mbox) ?\{ ?([A-Za-z]{3,9}(?:[- ][a-z]{3,5})?) ?\.?\}(?= ?(?:[}$]|\\[)\]]))"
)
_LAST_WORDS = re.compile(r"(?:\bis|\bare|=|:) ?\**([A-Za-z]{3,9}(?:-[a-z]{3,5})?)\**[.!\s]{0,4}\Z")


def _number_of_words(words: str) -> str:
    """The number that one or two words name, up to a hundred, in digits; empty for other words.

    >>> _number_of_words("twelve"), _number_of_words("Forty-two"), _number_of_words("two three")
    ('12', '42', '')
    """
    first, _, second = words.lower().replace("-", " ").partition(" ")
    if first not in _NUMBER_WORDS:
        return ""
    if not second:
        return str(_NUMBER_WORDS[first])
    # Of two words the first is a ten and the second a digit.
    ones = _NUMBER_WORDS.get(second, 0)
    if first not in _TENS or not 1 <= ones <= 9:
        return ""
    return str(_TENS[first] + ones)


_DECREASING = re.compile(
    r"(?<=[{$\[(])( ?[^<>={}$,;&]{1,40}?) ?(>|\\geq?(?:slant)?(?![A-Za-z])|≥) ?([a-z]) ?"
    r"(>|\\geq?(?:slant)?(?![A-Za-z])|≥) ?([^<>={}$,;&\\]{1,40}?) ?(?=[}$]|\\[)\]])"
)


def _turned_chains(text: str) -> str:
    r"""``text`` with ``3>x\ge1`` as ``1\le x<3``: math-verify compares chains in the order of writing.

    >>> _turned_chains(r"$3>x\ge1$")
    '$1\\le x<3$'
    """

    def turned(match: re.Match[str]) -> str:
        high, first, name, second, low = match.groups()
        signs = ["<" if sign == ">" else r"\le " for sign in (second, first)]
        return f"{low.strip()}{signs[0]}{name}{signs[1]}{high.strip()}"

    return _DECREASING.sub(turned, text)


def _sorted_assignments(text: str) -> str:
    """``text`` with ``y=1, x=2`` as ``x=2, y=1``: math-verify compares them with a point in the order of writing."""

    def in_order(match: re.Match[str]) -> str:
        names = re.findall(r"([a-z]) ?=", match.group())
        if names == sorted(names):
            return match.group()
        parts = [re.sub(rf"^{_SPACE}+|{_SPACE}+$", "", part) for part in re.split(r"(?<!\\)[,;]", match.group())]
        return ", ".join(sorted(parts, key=lambda part: part[0]))

    return _ASSIGNMENTS.sub(in_order, text)


def _prose(text: str) -> str:
    """A text between formulas in the forms that math-verify reads; runs that only LaTeX can express become formulas."""
    text = _BOLD.sub(r"\1", text)
    text = _without_separators(text)
    text = recurring_fractions(text)
    text = improper_fractions(text)
    text = _PROSE_PERCENT.sub(r"\1/\g<2>00", text)
    text = written_out(text)
    text = _plain_subscripts(text)
    text = numerals(text, r"\({}\)")
    text = _LAST_INFINITY.sub(r"\(\1\\infty\)", text)
    return _RUN.sub(lambda match: _as_formula(match.group()), text)


def _plain_subscripts(text: str) -> str:
    return _SUBSCRIPT.sub(lambda match: f"_{{{match.group().translate(_SUBSCRIPTS)}}}", text)


def _as_formula(run: str) -> str:
    """A run of prose as a formula, where math-verify would read only its first number."""
    if not _NEEDS_LATEX.search(run):
        return run
    before, inner, after = _without_foreign_brackets(run)
    balanced = inner.count("(") == inner.count(")") and inner.count("{") == inner.count("}")
    if not balanced:
        return run
    return f"{before}\\({_formula(inner.strip())}\\){after}"


def _without_foreign_brackets(run: str) -> tuple[str, str, str]:
    """``run`` without brackets at its ends that have no partner in it, and what was cut off before and after.

    ``(2√3 or so)`` begins with a bracket that closes outside of the run.
    """
    unclosed = run.count("(") - run.count(")")
    leading = len(run) - len(run.lstrip("("))
    cut = min(max(unclosed, 0), leading)
    before = run[:cut]
    run = run[cut:]

    unclosed -= cut
    ending = "(" if unclosed > 0 else ")"
    trailing = len(run) - len(run.rstrip(ending))
    end = len(run) - min(abs(unclosed), trailing)
    return before, run[:end], run[end:]


def _roots(text: str) -> str:
    r"""``text`` with ``√x``, ``√(x)``, ``\sqrt(x)`` and ``sqrt(x)`` as ``\sqrt{x}``."""
    # A comma behind a root separates: \sqrt2,1-\sqrt2 are two numbers.
    text = re.sub(rf"([√∛∜]) ?({_RADICAND}|[A-Za-zπ])", lambda m: f"{_ROOTS[m[1]]}{{{m[2]}}}", text)
    text = re.sub(r"[√∛∜] ?", lambda match: _ROOTS[match.group()[0]], text)
    text = re.sub(rf"(?<![A-Za-z\\])sqrt ?(?={_RADICAND}|\()", r"\\sqrt", text)
    text = re.sub(rf"(?<=\\sqrt)({_RADICAND})", r"{\1}", text)
    characters = list(text)
    closing = _closing(text, "(", ")")
    for match in re.finditer(r"\\sqrt(?:\[\d+\])? ?((?:\\left)?)\(", text):
        first = match.end() - 1
        last = closing.get(first)
        if last is None:
            continue
        characters[first] = "{"
        characters[last] = "}"
        # \left and \right belong to the brackets. Emptied and not removed, so that positions stay those of `text`.
        if match[1]:
            characters[match.start(1) : first] = [""] * (first - match.start(1))
        if text.endswith("\\right", 0, last):
            characters[last - len("\\right") : last] = [""] * len("\\right")
    return "".join(characters)


def _single_braces(text: str) -> str:
    r"""``text`` with one pair of braces for several directly around the same text.

    math-verify's time doubles with every further pair.

    >>> _single_braces(r"\boxed{{{12}}} and \{{1}, {2}\}")
    '\\boxed{12} and \\{{1}, {2}\\}'
    """
    closing = _closing(text, "{", "}")
    superfluous = set[int]()
    for start, end in closing.items():
        # The outer pair may be a set's, whose braces have a backslash.
        is_escaped = text.endswith("\\", 0, start)
        if not is_escaped and closing.get(start + 1) == end - 1:
            superfluous |= {start + 1, end - 1}
    if not superfluous:
        return text
    return "".join(character for position, character in enumerate(text) if position not in superfluous)


def _closing(text: str, opener: str, closer: str) -> dict[int, int]:
    """The position of the closing bracket by that of its opening one, in one pass over ``text``."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(f"[{re.escape(opener + closer)}]", text):
        if match.group() == opener:
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing
