"""The Markdown page of results/speed, as pure functions of the repetitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speed.phase_timer import PHASES
from speed.setup import PEERS
from speed.summary import METRICS, Spread, fastest, measured, ratios, summarize, unequal_work

COLUMNS = ("wall", "cpu", "tokens_per_second", "peak_above_loaded")
"""Metrics of the main table. The JSON file has all metrics."""


def median_and_range(value: Spread, digits: int = 3) -> str:
    """Median and range, or the value alone if there is only one.

    >>> median_and_range(Spread(median=2.0, low=1.5, high=2.25, count=3))
    '2.00 (1.50 to 2.25)'
    >>> median_and_range(Spread(median=2.0, low=2.0, high=2.0, count=1))
    '2.00'
    """
    # The range of one repetition would look like a measured one.
    median = format_number(value.median, digits)
    if value.count == 1:
        return median
    low = format_number(value.low, digits)
    high = format_number(value.high, digits)
    return f"{median} ({low} to {high})"


def format_number(value: float, digits: int = 3) -> str:
    """``digits`` significant digits without exponent, at most ``digits`` decimals.

    >>> format_number(123.456), format_number(1.23456), format_number(0.0123456), format_number(0.0)
    ('123', '1.23', '0.012', '0.000')
    """
    integer_digits = 0
    if abs(value) >= 1:
        integer_digits = len(str(int(abs(value))))
    # Numbers below 1 have `digits` decimals: leading zeros count as digits.
    decimals = max(digits - integer_digits, 0)
    return f"{value:.{decimals}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Every variant: the metrics of :data:`COLUMNS`, and the number of repetitions."""
    titles = [f"{METRICS[name].label}, {METRICS[name].unit}" for name in COLUMNS]
    rows = []
    for variant, spreads in summarize(repetitions).items():
        cells = [median_and_range(spreads[name]) for name in COLUMNS]
        rows.append([variant, *cells, str(spreads["wall"].count)])
    return table(["variant", *titles, "repetitions"], rows)


def ratio_table(repetitions: Sequence[Mapping[str, Any]]) -> str | None:
    """Ours over each peer, at its defaults and at its fastest measured setting; None if either side is missing."""
    rows = []
    for variant, peer_variant, note in compared_pairs(repetitions):
        cells = []
        for metric in COLUMNS:
            ratio = ratios(repetitions, variant, peer_variant, metric)
            cells.append(median_and_range(ratio))
        rows.append([f"{variant} / {peer_variant}{note}", *cells])
    if not rows:
        return None
    labels = [METRICS[name].label for name in COLUMNS]
    return table(["ours / peer", *labels], rows)


def compared_pairs(repetitions: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Our variant, a peer's, and a note on the peer's: the rows of the table of ratios."""
    summary = summarize(repetitions)
    pairs = []
    for variant in summary:
        system, algorithm, _ = variant.split("-")
        if system != "ours":
            continue
        # Algorithms differ in cost, so that only equal ones are compared.
        for peer_variant, note in peer_variants(summary, algorithm).items():
            pairs.append((variant, peer_variant, note))
    return pairs


def range_over_trl(tasks: Mapping[str, Mapping[str, Any]]) -> str | None:
    """One sentence: the least and the largest of our throughputs over TRL's; None without such a pair.

    The least and the largest ratio of any task, setting and repetition, because a single ratio is that of one hour of
    one machine.
    """
    lows = []
    highs = []
    for task in tasks.values():
        repetitions = task["repetitions"]
        for variant, peer_variant, _ in compared_pairs(repetitions):
            if peer_variant.startswith("trl-"):
                ratio = ratios(repetitions, variant, peer_variant, "tokens_per_second")
                lows.append(ratio.low)
                highs.append(ratio.high)
    if not lows:
        return None
    return (
        f"**kl_comedy trains {min(lows):.1f} to {max(highs):.1f} times as many tokens per second as TRL**: the range "
        "over all tasks, settings and repetitions below, each against TRL's defaults and its fastest setting."
    )


def peer_variants(summary: Mapping[str, Mapping[str, Spread]], algorithm: str) -> dict[str, str]:
    """Peer variants to compare with (defaults and fastest measured), each with a note for the table."""
    notes: dict[str, str] = {}
    for peer in PEERS:
        default = f"{peer}-{algorithm}-default"
        best = fastest(summary, f"{peer}-{algorithm}-")
        if default in summary:
            notes[default] = ""
        # May be the default again: it then has one line, with this note.
        if best is not None:
            notes[best] = " (fastest measured)"
    return notes


def phase_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Median seconds per update of each phase; phases are exclusive and add up to the wall time."""
    rows = []
    for variant, spreads in summarize(repetitions).items():
        medians = [format_number(spreads[f"phase/{name}"].median) for name in PHASES]
        rows.append([variant, *medians])
    titles = [name.replace("_", " ") for name in PHASES]
    return table(["s/update", *titles], rows)


def work_table(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Tokens of the measured updates, one row per repetition."""
    rows = []
    for repetition in repetitions:
        # Without the warm-up, as in the other tables.
        updates = measured(repetition)
        row = [repetition["variant"], str(repetition["repetition"]), str(len(updates))]
        for key in ("prompt_tokens", "generated_tokens", "trained_tokens"):
            row.append(str(sum(update[key] for update in updates)))
        row.append(f"{repetition['load_average']:.2f}")
        rows.append(row)
    head = ["variant", "repetition", "updates", "prompt tokens", "generated", "trained", "load average before"]
    return table(head, rows)


# The text of the page is that of the stored pages: `kl-comedy results verify` compares their tables with the data.
def page(results: Mapping[str, Any]) -> str:
    """The whole page. ``results``: the content of speed.json."""
    parts = ["# Speed and memory against TRL and TorchRL"]
    headline = range_over_trl(results["tasks"])
    if headline is not None:
        parts.append(headline)
    parts.append(machine_line(results["machine"]))
    for task, result in results["tasks"].items():
        parts += _task(task, result)
    parts += ["## Variants", _bullets(f"`{name}`: {note}" for name, note in results["variants"].items())]
    parts.append(_method(results))
    return "\n\n".join(parts) + "\n"


def _bullets(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _task(task: str, result: Mapping[str, Any]) -> list[str]:
    repetitions = result["repetitions"]
    parts = [f"## {task}", f"{result['summary']}. Median over repetitions (smallest to largest)."]
    if repetitions:
        parts.append(main_table(repetitions))
        parts.append(ratio_table(repetitions) or "No ratios: kl_comedy or the peers were not run.")
        parts.append(work_verdict(repetitions))
        parts += ["Time per phase (medians):", phase_table(repetitions), work_table(repetitions)]
    if result["failures"]:
        failures = _bullets(f"`{name}`: {reason}" for name, reason in result["failures"].items())
        parts.append("Failed:\n" + failures)
    return parts


def work_verdict(repetitions: Sequence[Mapping[str, Any]]) -> str:
    """Whether the compared variants did the same work: without it the ratios mean nothing."""
    differences = unequal_work(repetitions)
    if differences:
        return "**Work was not equal:**\n" + _bullets(differences)
    return (
        "Work was equal: same prompts in the same order, all generated tokens were trained on, token counts "
        "within 5% of the median."
    )


def machine_line(machine: Mapping[str, Any]) -> str:
    """Hardware, versions and commit. ``machine``: the result of :func:`speed.machine.describe`."""
    threads = f"{machine['threads']} threads"
    if machine["threads"] == 1:
        threads = "1 thread"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB; {threads}; "
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
