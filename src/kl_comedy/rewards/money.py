r"""Amounts of money as plain numbers: ``$1,234.50``, ``1 234,50 EUR``, ``£3.5 million``, ``12 dollars and 50 cents``.

An amount has a value in whole units of its currency; of ``50 cents`` the number that is written is another, 50.
Currencies are not compared, as other units are not. Each pass is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SHORT_SCALES = {"k": 3, "m": 6, "mn": 6, "mio": 6, "b": 9, "bn": 9}
"""Directly behind an amount with a mark, as in ``$2.5k``."""
_GAP = r"(?:[ ~]|\\[ ,;:]){0,3}+"
_NAMES = r"dollars?|bucks|euros?|pounds?|yen|yuan|rupees?|rubles?|francs?|pesos?"
_CODES = r"USD|EUR|GBP|JPY|INR|CNY|RMB|CHF|CAD|AUD|Rs\.?"
_SIGNS = r"[£€¥₹₩₽]|\\pounds|\\euro"
_MARK = rf"(?:(?<![A-Za-z])(?:US|AU?|CA?|NZ|HK|S)?\\?\$|{_SIGNS}|(?<![A-Za-z])(?:{_CODES}))"
# Groups of three behind one separator, or digits alone; then a decimal part.
_NUMERAL = (
    r"(?:\d{1,3}(?:(?:,|\{,\})\d{3}){1,6}+(?:\.\d{1,9})?|\d{1,3}(?:[ .']\d{3}){1,6}+,\d{1,2}"
    r"|\d{1,3}(?: \d{3}){1,6}+(?:\.\d{1,9})?|\d{1,18}[.,]\d{1,9}|\d{1,18}|\.\d{1,9})"
)
_TEXT = r"\\(?:text|mathrm|textrm|mbox) ?"
_AMOUNT = re.compile(
    rf"(?:(?<![\w.)\]}}$])(?P<minus>-) ?)?(?:(?P<mark>{_MARK}){_GAP}(?P<inner_minus>-)?|(?<![\w.,\\/^$_-]))"
    rf"(?P<number>{_NUMERAL})(?![\d^_]|[.,]\d)"
    rf"(?P<dash>,-+(?!\d)|\.-+(?!\d)|/-)?"
    rf"(?:(?P<short>(?:k|K|[Mm]n?|[Mm]io|B|bn)(?![A-Za-z]))"
    rf"|{_GAP}(?P<scale>thousand|million|billion|trillion)(?![A-Za-z]))?"
    rf"(?:{_GAP}(?:(?P<unit>(?:US )?(?:{_NAMES})|{_CODES})(?![A-Za-z])|(?P<sign>{_SIGNS}|\\\$)"
    rf"|(?P<cent>(?:cents?|pence|ct)(?![A-Za-z])|¢)))?"
)
_CENTS = re.compile(
    rf",?{_GAP}(?:and|{_TEXT}\{{ ?and ?\}})?{_GAP}(\d{{1,2}}){_GAP}"
    rf"(?:cents?|pence|ct|¢)(?![A-Za-z])"
)
"""The second part of ``12 dollars and 50 cents``."""
_WORD = rf"(?:{'|'.join(_SCALES)}|{_NAMES}|{_CODES}|cents?|pence)"
_WORDS_AS_TEXT = re.compile(rf"(?<=\d){_GAP}{_TEXT}\{{ ?({_WORD}(?: {_WORD})?(?: and)?) ?\}}")
"""Units that LaTeX sets as text."""


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """A text with its amounts of money as plain numbers."""

    values: str
    """Each as its value in whole units of the currency."""
    written: str
    """The same, and of ``50 cents`` the 50."""
    named: bool
    """Whether the last number of the text, or of its last box, is an amount."""


def amounts(text: str) -> Amounts:
    r"""``text`` with its amounts as plain numbers.

    >>> amounts("She pays $1,234.50 and 50 cents").values
    'She pays 1234.50 and 0.50'
    >>> amounts("£3.5 million, 12 dollars and 5 cents, -$5, 1.234,50 €, $2.5k, Rs. 500/-").values
    '3500000, 12.05, -5, 1234.50, 2500, 500'
    >>> amounts("50 cents and $x+1$ of $5$").written
    '50 and $x+1$ of $5$'
    """
    text = _WORDS_AS_TEXT.sub(r" \1", text)
    values = []
    written = []
    end = 0
    last_number_is_amount = False
    for start, stop, value, number in _found_amounts(text):
        between = text[end:start]
        values += [between, value]
        written += [between, number]
        end = stop
        last_number_is_amount = True
    rest = text[end:]
    box = text.rfind("\\boxed")
    if box > end or re.search(r"\d", rest.partition("}")[0] if box >= 0 else rest):
        last_number_is_amount = False
    return Amounts(values="".join([*values, rest]), written="".join([*written, rest]), named=last_number_is_amount)


def _found_amounts(text: str) -> Iterator[tuple[int, int, str, str]]:
    """The start and end of every amount, its value and the number that is written."""
    end = 0
    while (match := _AMOUNT.search(text, end)) is not None:
        end = match.end()
        has_mark = match["mark"] is not None
        has_unit = any(match[name] for name in ("unit", "sign", "cent", "scale"))
        if not (has_mark or has_unit):
            continue
        if match["short"] and not has_mark:
            continue
        if has_mark and match["mark"].endswith("$") and not match["mark"].endswith("\\$"):
            dollar = match.end("mark") - 1
            closing = text.find("$", dollar + 1)
            if not _is_currency(text, dollar, closing):
                # A formula, which ends at its closing sign.
                end = max(closing + 1, dollar + 1)
                continue
        power = _SCALES.get(match["scale"] or "", 0)
        if match["short"]:
            power = _SHORT_SCALES[match["short"].lower()]
        numeral = _plain(match["number"])
        if match["minus"] or match["inner_minus"]:
            numeral = f"-{numeral}"
        numeral = value = f"{Decimal(numeral).scaleb(power):f}"
        if match["cent"] and not has_mark:
            value = f"{Decimal(numeral).scaleb(-2):f}"
        cents = None
        if not match["cent"] and (has_mark or match["unit"] or match["sign"]) and "." not in value:
            cents = _CENTS.match(text, match.end())
        if cents is not None:
            end = cents.end()
            numeral = value = f"{value}.{int(cents[1]):02d}"
        yield match.start(), end, value, numeral


def _plain(number: str) -> str:
    """The number with a decimal point and without separators: the last separator is the decimal one, unless three
    digits follow a comma or a space.
    """
    number = number.replace("{,}", ",")
    tail = re.search(r"[.,](\d+)$", number)
    if tail is None:
        return re.sub(r"\D", "", number)
    whole = re.sub(r"\D", "", number[: tail.start()]) or "0"
    is_decimal = tail[0][0] == "." or len(tail[1]) != 3
    if is_decimal:
        return f"{whole}.{tail[1]}"
    return whole + tail[1]


def _is_currency(text: str, dollar: int, closing: int) -> bool:
    """Whether the ``$`` at ``dollar`` stands before an amount, and does not open a formula.

    Pandoc's rule: a formula begins behind its first sign without a space, and its last sign has no space before it and
    no digit behind it.
    """
    if closing < 0 or "\n" in text[dollar:closing]:
        return True
    if text[dollar + 1].isspace():
        return False
    return text[closing - 1].isspace() or text[closing + 1 : closing + 2].isdigit()
