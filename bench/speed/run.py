"""Compare kl_comedy, TRL and TorchRL in alternating processes; writes tables to results/speed.

python bench/speed/setup.py                        once: installs TRL and TorchRL
python bench/speed/run.py                          GSM8K and chain sums on SmolLM2-135M, 3 repetitions of 3 updates
python bench/speed/run.py --quick                  a smoke test on the pocket model, into runs/speed_quick
python bench/speed/run.py --tasks gsm8k --variants ours-grpo-default trl-grpo-whole --repetitions 1 --updates 1
python bench/speed/run.py --add ...                adds repetitions or variants to the tables
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path = [str(HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != HERE)]

from speed.machine import describe  # noqa: E402
from speed.report import page  # noqa: E402
from speed.setup import PEERS, absent  # noqa: E402
from speed.variants import VARIANTS  # noqa: E402
from speed.workload import ROOT, SMOLLM2, TASKS, missing, save_pocket  # noqa: E402

OUT, QUICK_OUT = ROOT / "results" / "speed", ROOT / "runs" / "speed_quick"
USUAL = [name for name in VARIANTS if not name.endswith("-continuous")]
QUICK = ["ours-grpo-default", "trl-grpo-default", "torchrl-grpo-default", "ours-rloo-lean", "trl-rloo-whole"]
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
    quick = options.quick
    options.tasks = options.tasks or (["pocket"] if quick else ["gsm8k", "chain_sum"])
    options.variants = options.variants or (QUICK if quick else USUAL)
    options.repetitions = options.repetitions or (1 if quick else 3)
    options.updates = options.updates or (2 if quick else 3)
    options.out = options.out or (QUICK_OUT if quick else OUT)
    return options


def rotated(names: list[str], by: int) -> list[str]:
    """Rotate the order, so that a different variant runs first in each repetition."""
    return names[by % len(names) :] + names[: by % len(names)]


def run_repetition(job: dict[str, Any], *, threads: int, timeout: float) -> dict[str, Any] | str:
    """Run one child process. Returns its result, or the reason of its failure in one line."""
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
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
        if completed.returncode or not result_file.exists():
            lines = [line for line in completed.stderr.strip().splitlines() if line.strip()]
            return (lines or [f"exit status {completed.returncode}, no error message"])[-1][:300]
        return {**json.loads(result_file.read_text()), "load_average": load, "model": Path(job["model"]).name}


def run_task(task: str, options: argparse.Namespace, model: Path, previous: dict[str, Any], save: Any) -> None:
    """Run every repetition of every variant and append them to those of ``previous``. Calls ``save`` after each."""
    repetitions: list[dict[str, Any]] = list(previous.get("repetitions", ()))
    failures: dict[str, str] = dict(previous.get("failures", {}))
    first_numbers = {name: sum(row["variant"] == name for row in repetitions) for name in options.variants}
    for round_number in range(options.repetitions):
        for name in rotated(options.variants, round_number):
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
                print(f"{task} {name}, repetition {number}: failed: {result}", file=sys.stderr, flush=True)
            else:
                repetitions.append(result)
                seconds = ", ".join(f"{update['wall_s']:.1f}" for update in result["updates"])
                print(f"{task} {name}, repetition {number}: {seconds} s", file=sys.stderr, flush=True)
            order = {variant: place for place, variant in enumerate(VARIANTS)}
            rows = sorted(repetitions, key=lambda row: (order[row["variant"]], row["repetition"]))
            save(task, {"summary": TASKS[task].summary, "repetitions": rows, "failures": failures})


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    problems = [problem for task in options.tasks if (problem := missing(task))]
    systems = {VARIANTS[name].system for name in options.variants}
    problems += [
        f"{peer} is not installed; run python bench/speed/setup.py"
        for peer in PEERS
        if peer in systems and absent(peer)
    ]
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "speed.json"
    previous = json.loads(file.read_text(encoding="utf-8")) if options.add and file.exists() else {}
    command = "python bench/speed/run.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    results: dict[str, Any] = {
        "command": f"{previous['command']}`, then `{command}" if previous else command,
        "machine": describe(options.threads),
        "variants": {**previous.get("variants", {}), **{name: VARIANTS[name].note for name in options.variants}},
        "tasks": dict(previous.get("tasks", {})),
    }

    def save(task: str, result: dict[str, Any]) -> None:
        results["tasks"][task] = result
        (options.out / "speed.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (options.out / "README.md").write_text(page(results), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="speed_model_") as folder:
        if any(TASKS[task].pocket for task in options.tasks):
            save_pocket(Path(folder))
        for task in options.tasks:
            result = results["tasks"].get(task, {})
            run_task(task, options, Path(folder) if TASKS[task].pocket else SMOLLM2, result, save)
    print(page(results))
    return 1 if any(result["failures"] for result in results["tasks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
