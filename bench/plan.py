"""The plan's memory beside a run's: whole runs on this machine's CPU, one process each; tables into results/plan.

    python bench/plan.py                   all cells (some minutes)
    python bench/plan.py --cells pocket    some of them; their rows are replaced, the others stay
    python bench/plan.py --replan          no run: the plan of today beside what was measured

What is compared is what an update adds to a loaded run: the resident peak over two updates, above what was resident
when the first began, against the plan's peak without policy, reference and libraries.
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
sys.path = [str(HERE), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from speed import memory  # noqa: E402

ROOT = HERE.parent
OUT = ROOT / "results" / "plan"
FILE = OUT / "plan.json"
GIB = 2**30
UPDATES = 2
LOADED = ("parameters", "reference", "runtime")
"""Components that are there when the first update begins."""

SMALL_POCKET = {"hidden_size": 256, "layers": 4, "heads": 8, "intermediate_size": 1024, "warmstart_steps": 0}
BIG_POCKET = {"hidden_size": 512, "layers": 8, "heads": 8, "intermediate_size": 2048, "warmstart_steps": 0}
COMMON = [
    "data.train={dataset: pocket, split: train, limit: 64, options: {digits: 1}}",
    "rewards=[{name: exact_answer}]",
    "kl=[{estimator: k3, placement: loss, beta: 0.01}]",
    f"train.steps={UPDATES}",
    "train.threads=1",
    "train.checkpoint_every=0",
    "train.samples_every=0",
    "tracking.uri=none",
    "eval.at_start=false",
    "eval.at_end=false",
]
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
"""Freed memory goes back at once: what is resident is what is held."""


def measure(name: str) -> dict[str, Any]:
    """Train a cell in this process; bytes above loaded, and the mean lengths that were seen."""
    from rich.console import Console

    from kl_comedy.config import load_config
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.training.experience import ExperienceStream
    from kl_comedy.training.module import PolicyModule
    from kl_comedy.training.run import train

    seen = {"loaded": 0, "peak": 0, "rows": 0, "prompt": 0, "completion": 0}
    draw = ExperienceStream.__next__

    def watched(self: Any) -> Any:
        if not seen["loaded"]:
            memory.reset_peak()
            seen["loaded"] = memory.resident()
        batch = draw(self)
        seen["rows"] += len(batch.rows)
        seen["prompt"] += sum(len(row.rollout.prompt.token_ids) for row in batch.rows)
        seen["completion"] += sum(len(row.rollout.completion_ids) for row in batch.rows)
        return batch

    def ended(self: Any) -> None:
        seen["peak"] = memory.peak()

    with (
        tempfile.TemporaryDirectory(prefix="plan_") as folder,
        patch.object(ExperienceStream, "__next__", watched),
        patch.object(PolicyModule, "on_train_end", ended),
    ):
        config = load_config(None, [*CELLS[name], f"output={folder}"])
        train(config, console=Console(quiet=True), command="bench/plan.py")
    prompt, completion = (round(seen[name] / seen["rows"]) for name in ("prompt", "completion"))
    return {
        "cell": name,
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "measured_bytes": seen["peak"] - seen["loaded"],
        "commit": provenance_tags()["git.commit"][:12] + (", with changes" if changed() else ""),
    }


def changed() -> bool:
    """Whether anything but the results of this bench differs from the commit."""
    words = ["git", "status", "--porcelain", "--", ".", f":(exclude){OUT.relative_to(ROOT)}"]
    return bool(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def planned(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the plan for its cell and lengths."""
    from kl_comedy.config import load_config
    from kl_comedy.lab.planning import GPUS, Lengths, plan_run

    config = load_config(None, CELLS[row["cell"]])
    lengths = Lengths(prompt=row["prompt_tokens"], completion=row["completion_tokens"])
    here = dataclasses.replace(GPUS["h100-80"], name="cpu", kind="cpu")  # memory does not depend on rates
    found = plan_run(config, here, lengths=lengths)
    added = found.peak_bytes - sum(item.bytes for item in found.components if item.name in LOADED)
    return {
        **row,
        "microbatch_tokens": found.load.micro_tokens,
        "planned_bytes": added,
        "planned_over_measured": added / row["measured_bytes"],
        "components": {f"{item.name}, {item.phase}": item.bytes for item in found.components},
    }


def in_child(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name],
        env={**os.environ, **ENVIRONMENT},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def page(rows: list[dict[str, Any]]) -> str:
    """results/plan/README.md."""
    from speed.machine import describe

    machine = describe(threads=1)
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers", "lightning"))
    lines = [
        "# The plan's memory beside measured runs",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; 1 thread; {versions}; the commit of each row is in plan.json.",
        "",
        "    python bench/plan.py",
        "",
        "Each row is a whole run of two updates in a process of its own: the resident peak above what was resident "
        "when the first update began, and the plan's peak (`kl-comedy plan --gpu cpu`, for prompts and completions "
        "of the mean lengths that were seen) without policy, reference and libraries. SmolLM2-135M, and a pocket "
        "policy of 33M parameters (pocket-tiny: 4M) with random weights; freed memory is given back at once "
        "(MALLOC_MMAP_THRESHOLD_). No GPU was at hand: on GPUs the plan has not been compared with anything.",
        "",
        "| cell | prompt | completion | tokens of a micro-batch | measured, GiB | planned, GiB | planned / measured |",
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
    parser.add_argument("--replan", action="store_true", help="measure nothing; plan again what was measured")
    parser.add_argument("--measure", choices=CELLS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    kept = {row["cell"]: row for row in json.loads(FILE.read_text())} if FILE.exists() else {}
    for name in () if given.replan else given.cells or CELLS:
        kept[name] = in_child(name)
        write([planned(kept[name]) for name in CELLS if name in kept])
    write([planned(kept[name]) for name in CELLS if name in kept])


def write(rows: list[dict[str, Any]]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    (OUT / "README.md").write_text(page(rows))
    for row in rows:
        print(f"{row['cell']}: planned / measured = {row['planned_over_measured']:.2f}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
