"""Compare kl_comedy, TRL and TorchRL in alternating processes; writes tables to results/speed.

python bench/speed/setup.py                        once: installs TRL and TorchRL
python bench/speed/run.py                          GSM8K and chain sums on SmolLM2-135M, 3 repetitions of 3 updates
python bench/speed/run.py --quick                  a smoke test on the pocket model, into runs/speed_quick
python bench/speed/run.py --tasks gsm8k --variants ours-grpo-default trl-grpo-whole --repetitions 1 --updates 1
python bench/speed/run.py --add ...                adds repetitions or variants to the tables
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Not this folder itself, which Python puts there: its `setup` and `memory` would hide modules of other packages.
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from speed.machine import describe  # noqa: E402
from speed.report import page  # noqa: E402
from speed.setup import PEERS, absent  # noqa: E402
from speed.variants import VARIANTS  # noqa: E402
from speed.workload import ROOT, SMOLLM2, TASKS, missing, save_pocket  # noqa: E402


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What is run where the command line does not say it; the fields have the names of the options."""

    tasks: list[str]
    variants: list[str]
    repetitions: int
    updates: int
    out: Path


FULL = Defaults(
    tasks=["gsm8k", "chain_sum"],
    # On a CPU continuous batching is slower than TRL's default; --variants runs it.
    variants=[name for name in VARIANTS if not name.endswith("-continuous")],
    repetitions=3,
    updates=3,
    out=ROOT / "results" / "speed",
)
QUICK = Defaults(
    tasks=["pocket"],
    # Each system, each algorithm, and a setting that is not the default.
    variants=["ours-grpo-default", "trl-grpo-default", "torchrl-grpo-default", "ours-rloo-lean", "trl-rloo-whole"],
    repetitions=1,
    updates=2,
    out=ROOT / "runs" / "speed_quick",
)

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "TQDM_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 updates, 1 repetition, pocket model")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="default: gsm8k chain_sum")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"from {', '.join(VARIANTS)}"
    )
    parser.add_argument("--repetitions", type=int, help="default 3")
    parser.add_argument("--updates", type=int, help="measured updates after the warm-up; default 3")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS; default: all cores")
    parser.add_argument("--timeout", type=float, default=3600.0, help="time limit of a repetition in seconds")
    parser.add_argument("--add", action="store_true", help="add to the existing speed.json instead of replacing it")
    parser.add_argument("--out", type=Path, help="output folder of speed.json and README.md")
    options = parser.parse_args(arguments)
    defaults = QUICK if options.quick else FULL
    for field in dataclasses.fields(defaults):
        if not getattr(options, field.name):
            setattr(options, field.name, getattr(defaults, field.name))
    return options


def rotated(names: list[str], by: int) -> list[str]:
    """Rotate the order, so that a different variant runs first in each repetition."""
    start = by % len(names)
    return names[start:] + names[:start]


def run_repetition(job: dict[str, Any], *, threads: int, timeout: float) -> dict[str, Any] | str:
    """Run one child process.

    Returns its result, or the reason of its failure in one line.
    """
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT / "src")}
    # Before the child adds to it: what else ran on the machine.
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "child.py"), str(path)]
        try:
            completed = subprocess.run(
                command, env=environment, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return f"timed out after {timeout:.0f} s"
        result_file = path.with_suffix(".result")
        if completed.returncode != 0 or not result_file.exists():
            return _reason_of_failure(completed)
        result: dict[str, Any] = json.loads(result_file.read_text())

    result["load_average"] = load
    # The page says which model, not in which folder of this machine it is.
    result["model"] = Path(job["model"]).name
    return result


def _reason_of_failure(completed: subprocess.CompletedProcess[str]) -> str:
    """The last line that a child wrote to stderr: Python puts the error after the traceback."""
    lines = [line for line in completed.stderr.strip().splitlines() if line.strip()]
    if not lines:
        return f"exit status {completed.returncode}, no error message"
    return lines[-1][:300]


def run_task(
    task: str,
    options: argparse.Namespace,
    model: Path,
    previous: Mapping[str, Any],
    save: Callable[[str, dict[str, Any]], None],
) -> None:
    """Run every repetition of every variant and append them to those of ``previous``. Calls ``save`` after each."""
    repetitions: list[dict[str, Any]] = list(previous.get("repetitions", ()))
    failures: dict[str, str] = dict(previous.get("failures", {}))
    # With --add the numbers continue: a number is the seed of its repetition, and a pair in the ratios.
    first_numbers = {name: 0 for name in options.variants}
    for row in repetitions:
        if row["variant"] in first_numbers:
            first_numbers[row["variant"]] += 1

    for round_number in range(options.repetitions):
        for name in rotated(options.variants, round_number):
            # A variant that failed would fail again, after a time limit of its own.
            if name in failures:
                continue
            number = first_numbers[name] + round_number
            job = {
                "task": task,
                "variant": name,
                "repetition": number,
                "seed": number,
                "updates": options.updates,
                "model": str(model),
            }
            result = run_repetition(job, threads=options.threads, timeout=options.timeout)
            if isinstance(result, str):
                failures[name] = result
                message = f"failed: {result}"
            else:
                repetitions.append(result)
                seconds = ", ".join(f"{update['wall_s']:.1f}" for update in result["updates"])
                message = f"{seconds} s"
            print(f"{task} {name}, repetition {number}: {message}", file=sys.stderr, flush=True)
            # After each repetition, so that a run that is cut short keeps what it measured.
            save(task, {"summary": TASKS[task].summary, "repetitions": in_order(repetitions), "failures": failures})


def in_order(repetitions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Repetitions in the order of :data:`VARIANTS`, which is the order of the tables."""
    positions = {variant: position for position, variant in enumerate(VARIANTS)}
    return sorted(repetitions, key=lambda row: (positions[row["variant"]], row["repetition"]))


def reasons_not_to_run(tasks: Sequence[str], variants: Sequence[str]) -> list[str]:
    """What is missing on this machine, one message each."""
    reasons = []
    for task in tasks:
        missing_files = missing(task)
        if missing_files is not None:
            reasons.append(missing_files)
    systems = {VARIANTS[name].system for name in variants}
    for peer in PEERS:
        if peer in systems and absent(peer):
            reasons.append(f"{peer} is not installed; run python bench/speed/setup.py")
    return reasons


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    reasons = reasons_not_to_run(options.tasks, options.variants)
    if reasons:
        print("\n".join(reasons), file=sys.stderr)
        return 2

    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "speed.json"
    command = "python bench/speed/run.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    previous: dict[str, Any] = {}
    if options.add and file.exists():
        previous = json.loads(file.read_text(encoding="utf-8"))
        # The page names every command that its rows come from.
        command = f"{previous['command']}`, then `{command}"
    notes = {name: VARIANTS[name].note for name in options.variants}
    results: dict[str, Any] = {
        "command": command,
        "machine": describe(options.threads),
        "variants": {**previous.get("variants", {}), **notes},
        "tasks": dict(previous.get("tasks", {})),
    }

    def save(task: str, result: dict[str, Any]) -> None:
        results["tasks"][task] = result
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (options.out / "README.md").write_text(page(results), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="speed_model_") as folder:
        if any(TASKS[task].pocket for task in options.tasks):
            save_pocket(Path(folder))
        for task in options.tasks:
            model = Path(folder) if TASKS[task].pocket else SMOLLM2
            run_task(task, options, model, results["tasks"].get(task, {}), save)
    print(page(results))
    any_failed = any(result["failures"] for result in results["tasks"].values())
    return 1 if any_failed else 0


if __name__ == "__main__":
    sys.exit(main())
