"""Cost of the online gradient audit in a training run: python bench/audit_cost.py [CONFIG] [key=value ...] [--every 20]

It runs complete training (sampling, scoring, tracking to a local database) with an audit every ``--every`` updates. The
CPU seconds of updates and audits come from the same run, so that other load on the machine hardly changes their ratio.
The reported share is the median audit divided by ``every`` median updates without audit. Writes audit_cost.json and
audit_cost.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "speed"
LIMIT = 0.05
"""Largest allowed share of an audit every 20 updates."""

TERMS = {"own terms": "[own]", "the panel": "[own, panel]"}


def timed_run(config: Any) -> tuple[list[float], list[float]]:
    """Train and return the CPU seconds of each update, without its audit, and of each audit.

    An update lasts from one request for a batch to the next.
    """
    import torch
    from rich.console import Console

    from kl_comedy.audit.run import AuditCallback
    from kl_comedy.training.experience import ExperienceStream
    from kl_comedy.training.run import train

    request_times: list[float] = []
    audit_seconds: dict[int, float] = {}
    original_audit = AuditCallback._audit
    original_next = ExperienceStream.__next__

    def timed_audit(self: Any, module: Any, rows: Any) -> Any:
        start = time.process_time()
        result = original_audit(self, module, rows)
        current_update = len(request_times) - 1
        audit_seconds[current_update] = time.process_time() - start
        return result

    def timed_next(self: Any) -> Any:
        request_times.append(time.process_time())
        return original_next(self)

    # CPU seconds of one thread add up; those of several include the time in which they wait for each other.
    torch.set_num_threads(1)
    with patch.object(AuditCallback, "_audit", timed_audit), patch.object(ExperienceStream, "__next__", timed_next):
        train(config, console=Console(file=sys.stderr), command="bench/audit_cost")

    update_seconds = []
    for number, (start, end) in enumerate(itertools.pairwise(request_times)):
        update_seconds.append(end - start - audit_seconds.get(number, 0.0))
    return update_seconds, [audit_seconds[number] for number in sorted(audit_seconds)]


def measure(path: str, overrides: list[str], terms: str, every: int, audits: int) -> dict[str, Any]:
    """Measure ``audits`` audits of one run. The first update and the first audit (it also checks beta) are warm-up."""
    from kl_comedy.config import load_config

    with tempfile.TemporaryDirectory(prefix="audit_cost_") as folder:
        config = load_config(
            path,
            [
                f"audit.every={every}",
                f"audit.terms={terms}",
                # The first audit is not measured, and the last update has no request after it.
                f"train.steps={(audits + 1) * every + 2}",
                # Whatever else happens between two requests for a batch would count as an update.
                "train.checkpoint_every=0",
                "eval.at_start=false",
                "eval.at_end=false",
                "train.eval_every=0",
                "train.samples_every=0",
                f"output={folder}",
                f"tracking.uri=sqlite:///{folder}/mlflow.db",
                *overrides,
            ],
        )
        update_seconds, audit_seconds = timed_run(config)
    update_s = statistics.median(update_seconds[1:])
    audit_s = statistics.median(audit_seconds[1:])
    return {
        "update_cpu_s": update_s,
        "audit_cpu_s": audit_s,
        "first_audit_cpu_s": audit_seconds[0],
        "every": every,
        "audits": len(audit_seconds) - 1,
        "updates": len(update_seconds) - 1,
        "share": audit_s / (every * update_s),
        "completions": config.rollout.prompts_per_batch * config.rollout.group_size,
        "samples": config.audit.samples,
    }


def page(command: str, path: str, measurements: dict[str, dict[str, Any]]) -> str:
    """The Markdown table."""
    lines = [
        "# What the online gradient audit costs",
        "",
        "<!-- python research/scripts/stored_tables.py audit_cost -->",
        "",
        f"`{path}`, CPU seconds of one thread, medians of one run.",
        "",
    ]
    lines.append("| audited | update, s | audit, s | audit / update | an audit every | costs |")
    lines.append("|---|---:|---:|---:|---:|---:|")
    for name, row in measurements.items():
        lines.append(
            f"| {name} | {row['update_cpu_s']:.3f} | {row['audit_cpu_s']:.3f} | "
            f"{row['audit_cpu_s'] / row['update_cpu_s']:.2f} | {row['every']} updates | {row['share']:.1%} |"
        )
    return "\n".join([*lines, "", f"Generated by `{command}`."]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--audits", type=int, default=3, help="measured audits per run")
    parser.add_argument("--terms", nargs="+", choices=TERMS, default=list(TERMS))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    measurements = {}
    for name in options.terms:
        measurements[name] = measure(options.config, options.overrides, TERMS[name], options.every, options.audits)

    words = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python bench/audit_cost.py", *words])
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"command": command, "config": options.config, "measurements": measurements}
    (options.out / "audit_cost.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = page(command, options.config, measurements)
    (options.out / "audit_cost.md").write_text(text, encoding="utf-8")
    print(text)

    # The limit is for the usual interval; a shorter one, to measure faster, costs more per update.
    if "own terms" not in measurements or options.every < 20:
        return 0
    too_expensive = measurements["own terms"]["share"] >= LIMIT
    return 1 if too_expensive else 0


if __name__ == "__main__":
    sys.exit(main())
