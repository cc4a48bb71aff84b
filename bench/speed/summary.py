"""Statistics of repetitions: medians, ranges, ratios and the check for equal work. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speed.phase_timer import PHASES

GIB = 2.0**30
TOKEN_TOLERANCE = 0.05
"""Token counts may differ by this share between variants, because completions are sampled and may end early."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Label and unit of a table column."""

    label: str
    unit: str


METRICS = {
    "wall": Metric(label="wall", unit="s/update"),
    "cpu": Metric(label="CPU", unit="s/update"),
    "tokens_per_second": Metric(label="throughput", unit="trained tokens/s"),
    "sampled_per_second": Metric(label="sampling", unit="generated tokens/s of generation"),
    "peak_above_loaded": Metric(label="peak above loaded", unit="GiB"),
    "peak": Metric(label="peak", unit="GiB"),
}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, minimum, maximum and number of repetitions."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    """The spread of values. Raises :class:`ValueError` if there are none."""
    sample = list(values)
    # statistics.median raises an error of its own, which does not say what is missing.
    if not sample:
        raise ValueError("no repetition to summarize")
    return Spread(median=statistics.median(sample), low=min(sample), high=max(sample), count=len(sample))


def measured(repetition: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All updates except the first, which warms up caches, allocator and optimizer state."""
    return list(repetition["updates"][1:])


def figures(repetition: Mapping[str, Any]) -> dict[str, float]:
    """One value per metric of :data:`METRICS`, and ``phase/NAME`` in seconds per update."""
    updates = measured(repetition)
    count = len(updates)
    wall = sum(update["wall_s"] for update in updates)
    generating = sum(update["phases"]["generate"] for update in updates)
    # Sums over sums, not means of ratios: a longer update has a larger weight, as it has in a run.
    values = {
        "wall": wall / count,
        "cpu": sum(update["cpu_s"] for update in updates) / count,
        "tokens_per_second": sum(update["trained_tokens"] for update in updates) / wall,
        "sampled_per_second": sum(update["generated_tokens"] for update in updates) / generating,
        "peak_above_loaded": (repetition["rss_peak"] - repetition["rss_loaded"]) / GIB,
        "peak": repetition["rss_peak"] / GIB,
    }
    for name in PHASES:
        values[f"phase/{name}"] = sum(update["phases"][name] for update in updates) / count
    return values


def summarize(repetitions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Spread]]:
    """By variant (in order of appearance), the spread of every figure."""
    grouped: dict[str, list[dict[str, float]]] = {}
    for repetition in repetitions:
        grouped.setdefault(repetition["variant"], []).append(figures(repetition))
    summary = {}
    for variant, rows in grouped.items():
        summary[variant] = {name: spread(row[name] for row in rows) for name in rows[0]}
    return summary


def ratios(repetitions: Sequence[Mapping[str, Any]], over: str, under: str, metric: str) -> Spread:
    """``over / under`` of a metric: the ratio of medians, and the range of ratios paired by repetition.

    Raises :class:`ValueError` if no repetition has both variants.
    """
    numerators: dict[int, float] = {}
    denominators: dict[int, float] = {}
    for repetition in repetitions:
        if repetition["variant"] == over:
            numerators[repetition["repetition"]] = figures(repetition)[metric]
        if repetition["variant"] == under:
            denominators[repetition["repetition"]] = figures(repetition)[metric]

    # Paired by repetition: number n has the same seed in every variant, and variants alternate, so that a slow hour of
    # the machine is in both.
    numbers = sorted(numerators.keys() & denominators.keys())
    paired = spread(numerators[n] / denominators[n] for n in numbers)
    median = statistics.median(numerators[n] for n in numbers) / statistics.median(denominators[n] for n in numbers)
    return Spread(median=median, low=paired.low, high=paired.high, count=paired.count)


def fastest(summary: Mapping[str, Mapping[str, Spread]], prefix: str) -> str | None:
    """The variant with the smallest median wall time whose name starts with ``prefix``, or None."""
    candidates = [name for name in summary if name.startswith(prefix)]
    return min(candidates, key=lambda name: summary[name]["wall"].median, default=None)


def unequal_work(repetitions: Sequence[Mapping[str, Any]], *, tolerance: float = TOKEN_TOLERANCE) -> list[str]:
    """Reasons why the work was not equal, one sentence each; empty if it was equal.

    Checked per repetition across variants: the same prompts in the same order, the same number of updates and
    threads, measured completion tokens within ``tolerance`` of the median. In every update, the number of trained
    tokens must equal the number of generated tokens.
    """
    problems = []
    for repetition in repetitions:
        for number, update in enumerate(repetition["updates"]):
            generated = update["generated_tokens"]
            trained = update["trained_tokens"]
            if generated != trained:
                problems.append(
                    f"{_name(repetition)}, update {number}: {generated} tokens generated, {trained} trained"
                )
    # Repetition n has the same seed in every variant, and so the same prompts.
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for repetition in repetitions:
        rounds.setdefault(repetition["repetition"], []).append(repetition)
    for number, repetitions_of_round in sorted(rounds.items()):
        problems += _unequal_round(number, repetitions_of_round, tolerance)
    return problems


def _name(repetition: Mapping[str, Any]) -> str:
    return f"{repetition['variant']}, repetition {repetition['repetition']}"


def _unequal_round(number: int, repetitions: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """What differs between the variants of one repetition, one sentence each."""
    distinct_values = {
        "prompts": {repetition["prompts"] for repetition in repetitions},
        "threads": {repetition["threads"] for repetition in repetitions},
        "updates": {len(repetition["updates"]) for repetition in repetitions},
    }
    problems = []
    for name, values in distinct_values.items():
        if len(values) > 1:
            problems.append(f"repetition {number}: {name} differ between variants ({', '.join(map(str, values))})")

    # Completions are sampled, by samplers that draw differently: their lengths agree only roughly.
    tokens = [sum(update["trained_tokens"] for update in measured(repetition)) for repetition in repetitions]
    median_tokens = statistics.median(tokens)
    for repetition, count in zip(repetitions, tokens, strict=True):
        if abs(count - median_tokens) > tolerance * median_tokens:
            problems.append(
                f"{_name(repetition)}: {count} trained tokens, {count / median_tokens - 1:+.1%} of the median"
            )
    return problems
