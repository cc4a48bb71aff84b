"""What ``kl-comedy certify`` prints: rows of its tables, and the sentence that says what was checked."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.kl.claims import KIND_WORDS, KINDS, NO_TARGET
from kl_comedy.kl.oracle.certificate_record import BATTERY_WORDS
from kl_comedy.redaction import one_line

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.certificate_record import Certificate
    from kl_comedy.kl.oracle.part_claims import PartsCoverage
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.kl.oracle.ranges import Ranges, Span

TERM_LEGEND = (
    "bias, cosine: of the expected gradient, against that of the sequence-level reverse KL (to the sampler where that "
    "is the reference); noise: the variance of one completion's gradient over "
    f"that of the least noisy unbiased term. Means over {BATTERY_WORDS}"
)
BRIEF_LEGEND = (
    "optimizes -: the gradient of no KL; the verdict of a row as a sentence: --term with its mapping, or --format json"
)
KIND_LEGEND = "where no target is hit: " + "; ".join(f"{kind}: {KIND_WORDS[kind]}" for kind in KINDS)
STRENGTH_LEGEND = (
    "strength: how much of the sequence-level reverse-KL gradient is left, the beta one gets for a beta of 1"
)
POLICY_LEGEND = (
    "bias, cosine: of the expected gradient, against the gradient of the reward; strength: how much of that is "
    "left; variance: of one completion's gradient, over its square; dropped: share of tokens without gradient"
)
MOST_PULLS = 4
"""Configurations up to which the pull of each has a line."""
LONG_CELLS = ("verdict", "around")
"""Columns that hold sentences: on a narrow terminal they are printed below their row."""

ROUNDING = 1e-9
"""A float64 gradient that should be zero is below this."""


# --- what was checked -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DrawnSettings:
    """How many settings are drawn per regime, and the smallest and largest value of each of their properties."""

    number: int
    spans: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a call checked. ``worst_error``: the largest error of a target that a term hits."""

    parts: PartsCoverage
    enumerated_tokens: tuple[int, int]
    drawn: DrawnSettings
    search_seconds: float
    worst_error: float

    def row(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **asdict(self.parts),
            "enumerated_tokens": self.enumerated_tokens,
            "drawn_settings": self.drawn.number,
            "drawn": self.drawn.spans,
            "search_seconds": self.search_seconds,
            "worst_error": self.worst_error,
        }


def drawn_settings(regimes: Sequence[str], seed: int) -> DrawnSettings:
    """The settings that ``seed`` draws; as many for each regime."""
    from kl_comedy.kl.oracle.certificate import battery
    from kl_comedy.kl.oracle.drawn import coverage

    instances = []
    for regime in regimes:
        # The fixed instances have no setting.
        instances += [trial.instance for trial in battery(regime, seed=seed) if trial.setting]
    return DrawnSettings(number=len(instances) // len(regimes), spans=coverage(instances))


def checked_sentence(checked: Checked) -> str:
    """What the call checked, and with which seed."""
    sentences = [*_estimators_checked(checked.parts), *_corrections_checked(checked.parts)]
    sentences.append(
        f"gradients enumerated in float64 over {_listed(checked.enumerated_tokens)} tokens, "
        f"{drawn_sentence(checked.drawn)}: largest error of a target that is hit {checked.worst_error:.1g}"
    )
    if checked.search_seconds:
        sentences.append(f"searched for {checked.search_seconds:g} s")
    return f"checked (seed {checked.parts.seed}): " + "; ".join(sentences)


def drawn_sentence(drawn: DrawnSettings) -> str:
    """The drawn settings and what they cover."""
    texts = {name: f"{low:g} to {high:g}" for name, (low, high) in drawn.spans.items()}
    return (
        f"and in {drawn.number} drawn settings per regime (vocabulary {texts['vocabulary']}, {texts['steps']} steps, "
        f"log-ratios {texts['log_ratios']} nats, token log-probs from {drawn.spans['log_probs'][0]:.3g}; 1e4 nats "
        "stand for a token that is impossible under the reference)"
    )


def _estimators_checked(parts: PartsCoverage) -> list[str]:
    """The log-ratios, the distributions of top-k estimators, and the options."""
    low, high = parts.log_ratios
    sentences = []
    # Others read whole distributions, and are listed below.
    of_log_ratios = {name: covered.float32 for name, covered in parts.estimators.items() if covered.float32 is not None}
    if of_log_ratios:
        dtypes = " and ".join(parts.dtypes)
        sentence = f"estimators at {parts.points:,} log-ratios from {low:g} to {high:g} nats in {dtypes}"
        sentences.append(sentence + _overflows(of_log_ratios, low, high))
    for name, covered in parts.estimators.items():
        if covered.distributions:
            sentences.append(f"{name} on {covered.distributions} distributions of {covered.vocabulary} tokens")
        for option, values in covered.options.items():
            texts = [_option_value(value) for value in values]
            sentences.append(f"{name} with {option} = {', '.join(texts)}")
    return sentences


def _overflows(checked_in_float32: Mapping[str, tuple[float, float]], low: float, high: float) -> str:
    """The estimators that overflow in float32 before the largest log-ratios (nats), and where."""
    names_by_place: dict[str, list[str]] = {}
    for name, (smallest, largest) in checked_in_float32.items():
        # An exact KL is never negative: it was checked from 0 on, and that is no overflow.
        if smallest not in (low, 0.0):
            names_by_place.setdefault(f"below {smallest:.1f}", []).append(name)
        # Checked up to where its value is a float32 at all.
        if largest != high:
            names_by_place.setdefault(f"above {largest:.1f}", []).append(name)
    if not names_by_place:
        return ""
    places = [f"{place}: {', '.join(names)}" for place, names in names_by_place.items()]
    return f" (float32 overflows {', '.join(places)})"


def _option_value(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3g}"


def _corrections_checked(parts: PartsCoverage) -> list[str]:
    """The lengths of the completions in which corrections were checked."""
    lengths: dict[int, None] = {}
    for covered in parts.corrections.values():
        lengths |= dict.fromkeys(covered.tokens)
    if not lengths:
        return []
    largest = max(covered.float32[1] for covered in parts.corrections.values())
    return [f"corrections over {_listed(lengths)} tokens (in float32 up to {largest:g} nats)"]


def _listed(items: Iterable[object]) -> str:
    """Items as a sentence lists them.

    >>> _listed([2, 3, 8]), _listed([2])
    ('2, 3 and 8', '2')
    """
    *others, last = map(str, items)
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


# --- rows -----------------------------------------------------------------------------------------------------------
def term_csv_row(certificate: Certificate) -> dict[str, Any]:
    """A certificate with one column for each target's bias and cosine."""
    row = certificate.row()
    # One value per target: a CSV cell cannot hold a mapping.
    for measure in ("relative_bias", "cosine"):
        for target, value in row.pop(measure).items():
            row[f"{measure}_{target}"] = value
    return {**row, "terms": json.dumps(row["terms"])}


def term_table_row(certificate: Certificate) -> dict[str, Any]:
    """A certificate as a row to read, against its :attr:`~Certificate.stated` target."""
    noise = "-"
    if certificate.variance_ratio is not None:
        noise = f"{certificate.variance_ratio:.3g}x"
    return {
        "name": certificate.name,
        "regime": certificate.regime,
        "optimizes": certificate.optimizes,
        "bias": three_digits(certificate.relative_bias[certificate.stated]),
        "cosine": cosine_text(certificate.cosine[certificate.stated]),
        "noise": noise,
        "verdict": certificate.verdict,
    }


def term_brief_row(certificate: Certificate) -> dict[str, Any]:
    """A certificate as one line: without the sentence, which says of every row what the columns say."""
    row = term_table_row(certificate)
    del row["verdict"]
    # "The gradient of no KL" in most rows would be the widest column.
    optimizes = certificate.optimizes
    if optimizes == NO_TARGET:
        optimizes = "-"
    return {**row, "optimizes": optimizes}


def range_table_row(certificate: Certificate, ranges: Ranges) -> dict[str, Any]:
    """A certificate as one line, with ranges in place of the figures of its own few policies."""
    noise = "-"
    if ranges.noise is not None:
        noise = _span_text(ranges.noise, "x")
    regime = certificate.regime
    if ranges.age is not None:
        regime = f"{ranges.age} old"
    return {
        "name": certificate.name,
        "regime": regime,
        "optimizes": certificate.optimizes,
        "error": _span_text(ranges.error),
        "strength": _span_text(ranges.strength),
        "noise": noise,
    }


def range_csv_cells(ranges: Ranges) -> dict[str, float | str]:
    """The age of the sampler, and the least, the median and the largest of each figure, one column each."""
    age = ""
    if ranges.age is not None:
        age = str(ranges.age)  # as text: with an empty cell, a column of numbers would read 1.0
    cells: dict[str, float | str] = {"range_age": age}
    for name in ("kl_per_prefix", "error", "strength", "noise"):
        span = getattr(ranges, name) or (math.nan, math.nan, math.nan)
        for part, value in zip(("least", "median", "largest"), span, strict=True):
            cells[f"range_{name}_{part}"] = value
    return cells


def range_legend(by_row: Iterable[Sequence[Ranges]]) -> str:
    """What the ranges are of: the policies, their vocabularies, their distance and the age of their sampler."""
    every = [ranges for row in by_row for ranges in row]
    drawn = [ranges for ranges in every if ranges.age is None]
    trained = [ranges for ranges in every if ranges.age is not None]
    first = drawn[0]
    legend = (
        "median [least, largest]; error: of the expected gradient, against that of the sequence-level reverse KL; "
        "strength: the multiple of that gradient in it, the pull at these distances; noise: the variance of one "
        "completion's gradient over that of the least noisy unbiased term. "
        f"Of {first.policies} drawn policies of {_listed(first.vocabulary)} tokens and up to {first.steps} steps, "
        f"{_distances(drawn)}"
    )
    if trained:
        legend += (
            ". N old: of as many policies after some updates of Adam on their reward, drawn from as they were N "
            f"updates before, {_distances(trained)}"
        )
    return legend


def _distances(every: Sequence[Ranges]) -> str:
    least = min(ranges.kl_per_prefix[0] for ranges in every)
    largest = max(ranges.kl_per_prefix[2] for ranges in every)
    return f"{least:.2g} to {largest:.2g} nats of KL per prefix from the reference"


def _span_text(span: Span, unit: str = "") -> str:
    """A range as its median, with the least and the largest in brackets.

    >>> _span_text((0.02, 0.5, 31.2), "x")
    '0.5x [0.02, 31]'
    """
    least, middle, largest = map(_two_digits, span)
    return f"{middle}{unit} [{least}, {largest}]"


def _two_digits(value: float) -> str:
    if abs(value) < ROUNDING:
        return "0"
    # With two digits 120 would be "1.2e+02".
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2g}"


def policy_csv_row(certificate: PolicyCertificate) -> dict[str, Any]:
    """A policy term's certificate with the numbers that JSON leaves out where they are undefined."""
    row = certificate.row()
    numbers = {"relative_bias": certificate.relative_bias, "cosine": certificate.cosine}
    return {**row, "terms": json.dumps(row["terms"]), **numbers}


def policy_table_row(certificate: PolicyCertificate) -> dict[str, Any]:
    """A policy term's certificate as a row to read."""
    return {
        "name": certificate.name,
        "regime": certificate.regime,
        "update": certificate.update,
        "exact": "yes" if certificate.exact else "no",
        "bias": three_digits(certificate.relative_bias),
        "cosine": f"{certificate.cosine:.2f}",
        "strength": f"{certificate.strength:.2f}",
        "variance": f"{certificate.variance:.3g}",
        "dropped": f"{certificate.dropped_share:.0%}",
        "verdict": certificate.verdict,
    }


def rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its floats as texts of three digits."""
    texts = dict(row)
    for name, value in row.items():
        if isinstance(value, float):
            texts[name] = three_digits(value)
    return texts


def three_digits(value: float) -> str:
    """Three digits; 0 for what is zero up to rounding.

    >>> three_digits(0.33333), three_digits(-2e-16)
    ('0.333', '0')
    """
    return "0" if abs(value) < ROUNDING else f"{value:.3g}"


def cosine_text(cosine: float) -> str:
    """Two digits; ``-`` for the cosine with a gradient that is zero, which is NaN."""
    return "-" if math.isnan(cosine) else f"{cosine:.2f}"


def pull_notes(certificates: Sequence[Certificate]) -> list[str]:
    """A line on the pull of each configuration that has one, where there are few of them."""
    regimes_by_pull: dict[str, dict[str, list[str]]] = {}
    for certificate in certificates:
        by_pull = regimes_by_pull.setdefault(certificate.name, {})
        if certificate.pull:
            by_pull.setdefault(certificate.pull, []).append(certificate.regime)
    if len(regimes_by_pull) > MOST_PULLS:
        return []
    notes = []
    for name, by_pull in regimes_by_pull.items():
        texts = [f"{', '.join(regimes)}: {pull}" for pull, regimes in by_pull.items()]
        if texts:
            notes.append(f"pull of {name} (force on a token by its log-ratio), {'; '.join(texts)}")
    return notes


# --- printing -------------------------------------------------------------------------------------------------------
def print_table(rows: Sequence[Mapping[str, Any]], format: str, notes: Sequence[str] = ()) -> None:
    """Print rows and notes; as text no line is wider than the terminal, and long cells follow below their row."""
    import pandas as pd

    from kl_comedy.results.tables import render

    # Formats that programs read are never wrapped.
    if format in ("csv", "latex", "markdown"):
        print(render(pd.DataFrame(rows), format, notes))
        return
    # The name of a config is a stranger's text, in cells and in notes.
    rows = [{key: one_line(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]
    width = shutil.get_terminal_size((0, 0)).columns  # 0 where stdout is no terminal: nothing is wrapped then
    lines = render(pd.DataFrame(rows), format).splitlines()
    if width and max(map(len, lines)) > width:
        lines = _narrow(rows, width)
    for note in map(one_line, notes):
        text = textwrap.fill(note, width) if width else note
        lines.append(f"\n{text}")
    print("\n".join(lines))


def _narrow(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The rows as text of at most ``width`` columns: names wrapped, sentences below their row."""
    import pandas as pd

    from kl_comedy.results.tables import render

    beneath = [name for name in rows[0] if name in LONG_CELLS]
    short_rows = [{name: value for name, value in row.items() if name not in beneath} for row in rows]

    # What the other columns leave for the name, in a table without names.
    nameless = render(pd.DataFrame([{**row, "name": ""} for row in short_rows]), "table").splitlines()
    # At least 16, where the other columns alone are as wide as the terminal.
    name_width = max(16, width - max(map(len, nameless)) + len("name"))
    wrapped_names = [textwrap.wrap(str(row["name"]), name_width) for row in short_rows]

    first_lines = []
    for row, name_lines in zip(short_rows, wrapped_names, strict=True):
        first_line = name_lines[0]
        if len(name_lines) > 1:
            # Padded, so that the column is as wide as the lines that follow below it.
            first_line = first_line.ljust(name_width)
        first_lines.append({**row, "name": first_line})
    head, rule, *lines = render(pd.DataFrame(first_lines), "table").splitlines()

    printed = [head, rule]
    for line, name_lines, whole_row in zip(lines, wrapped_names, rows, strict=True):
        printed += [line, *name_lines[1:]]
        for column in beneath:
            printed += textwrap.wrap(str(whole_row[column]), width, initial_indent="    ", subsequent_indent="    ")
    return printed
