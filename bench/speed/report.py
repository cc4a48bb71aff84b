"""The page of results: Markdown, generated from the repetitions alone. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speed.clock import PHASES
from speed.setup import PEERS
from speed.summary import METRICS, Spread, fastest, ratios, summarize, unequal_work

COLUMNS = ("wall", "cpu", "tokens_per_second", "peak_above_loaded")
"""Metrics of the main table; the JSON beside it has them all."""


def shown(value: Spread, digits: int = 3) -> str:
    """Median and range, or the value alone where there is but one.

    >>> shown(Spread(median=2.0, low=1.5, high=2.25, count=3)), shown(Spread(median=2.0, low=2.0, high=2.0, count=1))
    ('2.00 (1.50 to 2.25)', '2.00')
    """
    middle = figure(value.median, digits)
    return middle if value.count == 1 else f"{middle} ({figure(value.low, digits)} to {figure(value.high, digits)})"


def figure(value: float, digits: int = 3) -> str:
    """``digits`` significant digits, without exponent, and not more than ``digits`` decimals.

    >>> figure(123.456), figure(1.23456), figure(0.0123456), figure(0.0)
    ('123', '1.23', '0.012', '0.000')
    """
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(digits - whole, 0)}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Every variant: the metrics of :data:`COLUMNS`, and completion tokens trained per update."""
    summary = summarize(repetitions)
    head = ["variant", *(f"{METRICS[name].label}, {METRICS[name].unit}" for name in COLUMNS), "repetitions"]
    rows = [
        [variant, *(shown(found[name]) for name in COLUMNS), str(found["wall"].count)]
        for variant, found in summary.items()
    ]
    return table(head, rows)


def ratio_table(repetitions: Sequence[Mapping[str, Any]]) -> str | None:
    """Ours over each peer, in its defaults and in its fastest setting measured; None where a side is missing."""
    summary = summarize(repetitions)
    rows = []
    for ours in (name for name in summary if name.startswith("ours-")):
        for rival, tag in rivals(summary, ours.split("-")[1]).items():
            found = [ratios(repetitions, ours, rival, metric) for metric in COLUMNS]
            rows.append([f"{ours} / {rival}{tag}", *map(shown, found)])
    return table(["ours / peer", *(METRICS[name].label for name in COLUMNS)], rows) if rows else None


def rivals(measured: Mapping[str, Mapping[str, Spread]], algorithm: str) -> dict[str, str]:
    """By variant to compare with, what to say of it: every peer's defaults, and its fastest setting measured."""
    found: dict[str, str] = {}
    for peer in PEERS:
        default, best = f"{peer}-{algorithm}-default", fastest(measured, f"{peer}-{algorithm}-")
        found |= {name: "" for name in (default,) if name in measured}
        found |= {best: " (fastest measured)"} if best else {}
    return found


def phase_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Median seconds per update of each phase; phases exclude one another and add up to the wall time."""
    rows = [
        [variant, *(figure(found[f"phase/{name}"].median) for name in PHASES)]
        for variant, found in summarize(repetitions).items()
    ]
    return table(["s/update", *(name.replace("_", " ") for name in PHASES)], rows)


def work_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Tokens of the measured updates, repetition by repetition."""
    rows = []
    for repetition in repetitions:
        updates = repetition["updates"][1:]
        sums = [str(sum(u[key] for u in updates)) for key in ("prompt_tokens", "generated_tokens", "trained_tokens")]
        load = f"{repetition['load_average']:.2f}"
        rows.append([repetition["variant"], str(repetition["repetition"]), str(len(updates)), *sums, load])
    head = ["variant", "repetition", "updates", "prompt tokens", "generated", "trained", "load average before"]
    return table(head, rows)


def page(results: Mapping[str, Any]) -> str:
    """The whole page. ``results``: what run.py writes as JSON."""
    parts = ["# Speed and memory against TRL and TorchRL", _machine(results["machine"])]
    for task, found in results["tasks"].items():
        parts += _task(task, found)
    parts += ["## What was run", "\n".join(f"- `{name}`: {note}" for name, note in results["variants"].items())]
    parts += [_method(results)]
    return "\n\n".join(parts) + "\n"


def _task(task: str, found: Mapping[str, Any]) -> list[str]:
    repetitions = found["repetitions"]
    parts = [f"## {task}", f"{found['summary']}. Median over repetitions (smallest to largest)."]
    if repetitions:
        problems = unequal_work(repetitions)
        verdict = "Work was equal: same prompts in the same order, all that was generated was trained on, token counts "
        verdict += "within 5% of each other's median."
        parts += [main_table(repetitions), ratio_table(repetitions) or "Nothing to compare: one side alone was run."]
        parts += ["\n".join(["**Work was not equal:**", *(f"- {line}" for line in problems)]) if problems else verdict]
        parts += ["Where the time goes (medians):", phase_table(repetitions), work_table(repetitions)]
    if found["failures"]:
        parts += ["\n".join(["Failed:", *(f"- `{name}`: {why}" for name, why in found["failures"].items())])]
    return parts


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {machine['threads']} threads; "
        f"Python {machine['python']}; {versions}; commit {machine['commit']}."
    )


def _method(results: Mapping[str, Any]) -> str:
    return (
        f"Generated by `{results['command']}`. Each repetition is a process of its own: one warm-up update, then "
        "the measured ones; variants alternate within a repetition, in an order that rotates. Ours is the whole of "
        "`kl-comedy train`, MLflow tracking included; the peers report nowhere. Memory is resident size: the peak "
        "since the first update began, above what was resident then (policy, frozen reference and libraries loaded). "
        "CPU seconds are of all threads, and say more than wall seconds on a machine that others use too."
    )
