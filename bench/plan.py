"""Compare the planned memory with the measured memory of runs on the CPU; writes tables to results/plan.

    python bench/plan.py                   run all cells (some minutes)
    python bench/plan.py --cells pocket    run these cells only and replace their rows
    python bench/plan.py --replan          run nothing; compare the current plan with the recorded measurements

Each cell runs in its own process. Measured: the peak resident memory over two updates minus the resident memory before
the first. Planned: the plan's peak without policy, reference and libraries.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
# First on the path, and only once, however this file was started: `speed` and `pocket_run` are folders and files here.
sys.path = [str(HERE), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from pocket_run import SETTINGS  # noqa: E402
from speed import memory  # noqa: E402

ROOT = HERE.parent
OUT = ROOT / "results" / "plan"
FILE = OUT / "plan.json"
GIB = 2**30
UPDATES = 2
LOADED = ("parameters", "reference", "runtime")
"""Components in memory before the first update."""

SMALL_POCKET = {"hidden_size": 256, "layers": 4, "heads": 8, "intermediate_size": 1024, "warmstart_steps": 0}
BIG_POCKET = {"hidden_size": 512, "layers": 8, "heads": 8, "intermediate_size": 2048, "warmstart_steps": 0}
COMMON = [*SETTINGS, f"train.steps={UPDATES}"]
BATCH = ["rollout.prompts_per_batch=8", "rollout.group_size=8", "rollout.max_new_tokens=100"]
POCKET = [*COMMON, *BATCH, f"model.options={json.dumps(BIG_POCKET)}"]
SMOLLM2 = [
    *COMMON,
    "model.source=models/SmolLM2-135M-Instruct",
    "rollout.prompts_per_batch=4",
    "rollout.group_size=4",
    f"data.prompt.prefix={'Work this out step by step. ' * 8}",
]
CELLS: dict[str, list[str]] = {
    "pocket-tiny": [*COMMON, *BATCH, f"model.options={json.dumps(SMALL_POCKET)}"],
    "pocket": POCKET,
    "pocket-small-microbatch": [*POCKET, "train.microbatch_tokens=1024"],
    "pocket-checkpointing": [*POCKET, "model.gradient_checkpointing=true"],
    "pocket-bf16": [*POCKET, "train.precision=bf16"],
    "smollm2": [*SMOLLM2, "rollout.max_new_tokens=64"],
    "smollm2-small-microbatch": [*SMOLLM2, "rollout.max_new_tokens=64", "train.microbatch_tokens=256"],
    "smollm2-checkpointing": [*SMOLLM2, "rollout.max_new_tokens=64", "model.gradient_checkpointing=true"],
    "smollm2-lora": [*SMOLLM2, "rollout.max_new_tokens=64", "model.lora={rank: 8}"],
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""With these thresholds, malloc returns freed memory at once, so resident memory is allocated memory."""


def measure(name: str) -> dict[str, Any]:
    """Train a cell in this process. Returns peak bytes above the loaded run and mean token lengths."""
    from rich.console import Console

    from kl_comedy.config import load_config
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.training.experience import ExperienceStream
    from kl_comedy.training.module import PolicyModule
    from kl_comedy.training.run import train

    totals = {"loaded": 0, "peak": 0, "rows": 0, "prompt": 0, "completion": 0}
    original_next = ExperienceStream.__next__

    def counted_next(self: Any) -> Any:
        # The first batch is requested when all models are loaded and nothing has been computed.
        if totals["loaded"] == 0:
            memory.reset_peak()
            totals["loaded"] = memory.resident()
        batch = original_next(self)
        totals["rows"] += len(batch.rows)
        for row in batch.rows:
            totals["prompt"] += len(row.rollout.prompt.token_ids)
            totals["completion"] += len(row.rollout.completion_ids)
        return batch

    def record_peak(self: Any) -> None:
        # Here and not after train(): what closes the run is not planned.
        totals["peak"] = memory.peak()

    with (
        tempfile.TemporaryDirectory(prefix="plan_") as folder,
        patch.object(ExperienceStream, "__next__", counted_next),
        patch.object(PolicyModule, "on_train_end", record_peak),
    ):
        config = load_config(None, [*CELLS[name], f"output={folder}"])
        train(config, console=Console(quiet=True), command="bench/plan.py")
    commit = provenance_tags()["git.commit"][:12]
    if has_changes():
        commit += ", with changes"
    return {
        "cell": name,
        "prompt_tokens": round(totals["prompt"] / totals["rows"]),
        "completion_tokens": round(totals["completion"] / totals["rows"]),
        "measured_bytes": totals["peak"] - totals["loaded"],
        "commit": commit,
    }


def has_changes() -> bool:
    """Whether any file differs from the commit; the results of this benchmark do not count, as it writes them."""
    command = ["git", "status", "--porcelain", "--", ".", f":(exclude){OUT.relative_to(ROOT)}"]
    return bool(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def planned(row: dict[str, Any]) -> dict[str, Any]:
    """The row, with the memory that is planned for its cell and its measured lengths."""
    from kl_comedy.config import load_config
    from kl_comedy.planning.plan import Lengths, Plan
    from kl_comedy.planning.sizes import GPUS

    # Planned for the lengths that were measured: how long completions get is no question of memory.
    config = load_config(None, CELLS[row["cell"]])
    # Memory does not depend on a device's rates, so that any device serves: timing this machine would take long.
    cpu = dataclasses.replace(GPUS["h100-80"], name="cpu", kind="cpu")
    plan = Plan(config, cpu, Lengths(prompt=row["prompt_tokens"], completion=row["completion_tokens"]))
    loaded_bytes = sum(item.bytes for item in plan.components if item.name in LOADED)
    planned_bytes = plan.peak_bytes - loaded_bytes
    return {
        **row,
        "microbatch_tokens": plan.load.micro_tokens,
        "planned_bytes": planned_bytes,
        "planned_over_measured": planned_bytes / row["measured_bytes"],
        "components": {f"{item.name}, {item.phase}": item.bytes for item in plan.components},
    }


def measure_in_subprocess(name: str) -> dict[str, Any]:
    """Measure a cell in a new process: one that has trained before has memory of its allocator left."""
    completed = subprocess.run(
        [sys.executable, __file__, "--measure", name],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # Libraries may print before it.
    measurement: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return measurement


def page(rows: list[dict[str, Any]]) -> str:
    """The content of results/plan/README.md."""
    from speed.machine import describe

    machine = describe(threads=1)
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers", "lightning"))
    lines = [
        "# Planned and measured memory",
        "",
        "<!-- python research/scripts/stored_tables.py plan -->",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; 1 thread; {versions}; the commit of each row is in plan.json.",
        "",
        "    python bench/plan.py",
        "",
        "Each row is a run of two updates in its own process. Measured: the peak resident memory minus the resident "
        "memory before the first update. Planned: the peak of `kl-comedy plan --gpu cpu` for prompts and completions "
        "of the measured mean lengths, without policy, reference and libraries. Models: SmolLM2-135M, and a pocket "
        "policy of 33M parameters (pocket-tiny: 4M) with random weights. malloc returns freed memory at once "
        "(MALLOC_MMAP_THRESHOLD_). The plan has not been compared with GPU measurements.",
        "",
        "| cell | prompt | completion | tokens per micro-batch | measured, GiB | planned, GiB | planned / measured |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['cell']} | {row['prompt_tokens']} | {row['completion_tokens']} | {row['microbatch_tokens']} | "
            f"{row['measured_bytes'] / GIB:.3f} | {row['planned_bytes'] / GIB:.3f} | "
            f"{row['planned_over_measured']:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, help="default: all")
    parser.add_argument("--replan", action="store_true", help="run nothing; update the plan of the recorded rows")
    parser.add_argument("--measure", choices=CELLS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return

    rows_by_cell: dict[str, dict[str, Any]] = {}
    if FILE.exists():
        for row in json.loads(FILE.read_text()):
            rows_by_cell[row["cell"]] = row
    if not options.replan:
        for name in options.cells or CELLS:
            rows_by_cell[name] = measure_in_subprocess(name)
            # After each cell, so that an interrupted run keeps what it measured.
            write(rows_by_cell)
    write(rows_by_cell)


def write(rows_by_cell: dict[str, dict[str, Any]]) -> None:
    """Plan every recorded cell and write the JSON file and the page, in the order of :data:`CELLS`."""
    rows = [planned(rows_by_cell[name]) for name in CELLS if name in rows_by_cell]
    OUT.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    (OUT / "README.md").write_text(page(rows))
    for row in rows:
        print(f"{row['cell']}: planned / measured = {row['planned_over_measured']:.2f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
