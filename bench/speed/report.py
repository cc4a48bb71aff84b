"""The Markdown page of results/speed, as pure functions of the repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from speed.phase_timer import PHASES
from speed.setup import PEERS
from speed.summary import METRICS, Spread, fastest, ratios, summarize, unequal_work

COLUMNS = ("wall", "cpu", "tokens_per_second", "peak_above_loaded")
"""Metrics of the main table. The JSON file has all metrics."""


def median_and_range(value: Spread, digits: int = 3) -> str:
    """Median and range, or the value alone if there is only one.

    >>> median_and_range(Spread(median=2.0, low=1.5, high=2.25, count=3))
    '2.00 (1.50 to 2.25)'
    >>> median_and_range(Spread(median=2.0, low=2.0, high=2.0, count=1))
    '2.00'
    """
    middle = format_number(value.median, digits)
    return (
        middle
        if value.count == 1
        else f"{middle} ({format_number(value.low, digits)} to {format_number(value.high, digits)})"
    )


def format_number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without exponent, at most ``digits`` decimals.

    >>> format_number(123.456), format_number(1.23456), format_number(0.0123456), format_number(0.0)
    ('123', '1.23', '0.012', '0.000')
    """
    integer_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(digits - integer_digits, 0)}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Every variant: the metrics of :data:`COLUMNS`, and completion tokens trained per update."""
    summary = summarize(repetitions)
    head = ["variant", *(f"{METRICS[name].label}, {METRICS[name].unit}" for name in COLUMNS), "repetitions"]
    rows = [
        [variant, *(median_and_range(spreads[name]) for name in COLUMNS), str(spreads["wall"].count)]
        for variant, spreads in summary.items()
    ]
    return table(head, rows)


def ratio_table(repetitions: Sequence[Mapping[str, Any]]) -> str | None:
    """Ours over each peer, at its defaults and at its fastest measured setting; None if either side is missing."""
    summary = summarize(repetitions)
    rows = []
    for ours in (name for name in summary if name.startswith("ours-")):
        for peer_variant, tag in peer_variants(summary, ours.split("-")[1]).items():
            spreads = [ratios(repetitions, ours, peer_variant, metric) for metric in COLUMNS]
            rows.append([f"{ours} / {peer_variant}{tag}", *map(median_and_range, spreads)])
    return table(["ours / peer", *(METRICS[name].label for name in COLUMNS)], rows) if rows else None


def peer_variants(measured: Mapping[str, Mapping[str, Spread]], algorithm: str) -> dict[str, str]:
    """Peer variants to compare with (defaults and fastest measured), each with a note for the table."""
    notes: dict[str, str] = {}
    for peer in PEERS:
        default, best = f"{peer}-{algorithm}-default", fastest(measured, f"{peer}-{algorithm}-")
        notes |= {name: "" for name in (default,) if name in measured}
        notes |= {best: " (fastest measured)"} if best else {}
    return notes


def phase_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Median seconds per update of each phase; phases are exclusive and add up to the wall time."""
    rows = [
        [variant, *(format_number(spreads[f"phase/{name}"].median) for name in PHASES)]
        for variant, spreads in summarize(repetitions).items()
    ]
    return table(["s/update", *(name.replace("_", " ") for name in PHASES)], rows)


def work_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Tokens of the measured updates, one row per repetition."""
    rows = []
    for repetition in repetitions:
        updates = repetition["updates"][1:]
        sums = [str(sum(u[key] for u in updates)) for key in ("prompt_tokens", "generated_tokens", "trained_tokens")]
        load = f"{repetition['load_average']:.2f}"
        rows.append([repetition["variant"], str(repetition["repetition"]), str(len(updates)), *sums, load])
    head = ["variant", "repetition", "updates", "prompt tokens", "generated", "trained", "load average before"]
    return table(head, rows)


def page(results: Mapping[str, Any]) -> str:
    """The whole page. ``results``: the content of speed.json."""
    parts = ["# Speed and memory against TRL and TorchRL", _machine(results["machine"])]
    for task, result in results["tasks"].items():
        parts += _task(task, result)
    parts += ["## Variants", "\n".join(f"- `{name}`: {note}" for name, note in results["variants"].items())]
    parts += [_method(results)]
    return "\n\n".join(parts) + "\n"


def _task(task: str, result: Mapping[str, Any]) -> list[str]:
    repetitions = result["repetitions"]
    parts = [f"## {task}", f"{result['summary']}. Median over repetitions (smallest to largest)."]
    if repetitions:
        problems = unequal_work(repetitions)
        verdict = "Work was equal: same prompts in the same order, all generated tokens were trained on, token counts "
        verdict += "within 5% of the median."
        parts += [
            main_table(repetitions),
            ratio_table(repetitions) or "No ratios: kl_comedy or the peers were not run.",
        ]
        parts += ["\n".join(["**Work was not equal:**", *(f"- {line}" for line in problems)]) if problems else verdict]
        parts += ["Time per phase (medians):", phase_table(repetitions), work_table(repetitions)]
    if result["failures"]:
        parts += ["\n".join(["Failed:", *(f"- `{name}`: {why}" for name, why in result["failures"].items())])]
    return parts


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {machine['threads']} threads; "
        f"Python {machine['python']}; {versions}; commit {machine['commit']}."
    )


def _method(results: Mapping[str, Any]) -> str:
    return (
        f"Generated by `{results['command']}`. Each repetition runs in its own process: one warm-up update, then the "
        "measured updates. Variants alternate within a repetition, in rotating order. `ours` is `kl-comedy train` with "
        "MLflow tracking; the peers run without tracking. Memory is resident size: the peak from the first update on, "
        "minus the resident size before it (policy, frozen reference and libraries loaded). CPU seconds are of all "
        "threads; on a shared machine they are more reliable than wall seconds."
    )
