"""Ours, TRL and TorchRL, alternating, one process a repetition; tables into results/speed.

python bench/speed/setup.py                        once: TRL and TorchRL beside the environment
python bench/speed/run.py                          GSM8K and chain sums on SmolLM2-135M, 3 repetitions of 3 updates
python bench/speed/run.py --quick                  a smoke on the pocket model, into runs/speed_quick
python bench/speed/run.py --tasks gsm8k --variants ours-grpo-default trl-grpo-whole --repetitions 1 --updates 1
python bench/speed/run.py --add ...                further repetitions or variants into the same tables
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
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="OMP_NUM_THREADS of all; default all cores")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a repetition may take")
    parser.add_argument("--add", action="store_true", help="add to the speed.json that is there, instead of a new one")
    parser.add_argument("--out", type=Path, help="folder for speed.json and README.md")
    given = parser.parse_args(arguments)
    quick = given.quick
    given.tasks = given.tasks or (["pocket"] if quick else ["gsm8k", "chain_sum"])
    given.variants = given.variants or (QUICK if quick else USUAL)
    given.repetitions = given.repetitions or (1 if quick else 3)
    given.updates = given.updates or (2 if quick else 3)
    given.out = given.out or (QUICK_OUT if quick else OUT)
    return given


def rotated(names: list[str], by: int) -> list[str]:
    """Another variant goes first in every repetition."""
    return names[by % len(names) :] + names[: by % len(names)]


def one_repetition(job: dict[str, Any], *, threads: int, timeout: float) -> dict[str, Any] | str:
    """Run a child; what it found, or why it failed in one line."""
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="speed_") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "child.py"), str(path)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=ROOT, timeout=timeout, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not done in {timeout:.0f} s"
        found = path.with_suffix(".found")
        if done.returncode or not found.exists():
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            return (lines or [f"exit status {done.returncode}, no reason given"])[-1][:300]
        return {**json.loads(found.read_text()), "load_average": load, "model": Path(job["model"]).name}


def run_task(task: str, given: argparse.Namespace, model: Path, before: dict[str, Any], save: Any) -> None:
    """Every repetition of every variant, after those of ``before``; ``save`` is called with all after each."""
    repetitions: list[dict[str, Any]] = list(before.get("repetitions", ()))
    failures: dict[str, str] = dict(before.get("failures", {}))
    first = {name: sum(row["variant"] == name for row in repetitions) for name in given.variants}
    for turn in range(given.repetitions):
        for name in rotated(given.variants, turn):
            if name in failures:
                continue
            number = first[name] + turn
            job = {
                "task": task,
                "variant": name,
                "repetition": number,
                "seed": number,
                "updates": given.updates,
                "model": str(model),
            }
            found = one_repetition(job, threads=given.threads, timeout=given.timeout)
            if isinstance(found, str):
                failures[name] = found
                print(f"{task} {name}, repetition {number}: failed: {found}", file=sys.stderr, flush=True)
            else:
                repetitions.append(found)
                seconds = ", ".join(f"{update['wall_s']:.1f}" for update in found["updates"])
                print(f"{task} {name}, repetition {number}: {seconds} s", file=sys.stderr, flush=True)
            order = {variant: place for place, variant in enumerate(VARIANTS)}
            rows = sorted(repetitions, key=lambda row: (order[row["variant"]], row["repetition"]))
            save(task, {"summary": TASKS[task].summary, "repetitions": rows, "failures": failures})


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    wanted = [why for task in given.tasks if (why := missing(task))]
    needed = {VARIANTS[name].system for name in given.variants}
    wanted += [
        f"{peer} is not there; python bench/speed/setup.py fetches it"
        for peer in PEERS
        if peer in needed and absent(peer)
    ]
    if wanted:
        print("\n".join(wanted), file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    there = given.out / "speed.json"
    before = json.loads(there.read_text(encoding="utf-8")) if given.add and there.exists() else {}
    command = "python bench/speed/run.py " + " ".join(sys.argv[1:] if arguments is None else arguments)
    results: dict[str, Any] = {
        "command": f"{before['command']}`, then `{command}" if before else command,
        "machine": describe(given.threads),
        "variants": {**before.get("variants", {}), **{name: VARIANTS[name].note for name in given.variants}},
        "tasks": dict(before.get("tasks", {})),
    }

    def save(task: str, found: dict[str, Any]) -> None:
        results["tasks"][task] = found
        (given.out / "speed.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (given.out / "README.md").write_text(page(results), encoding="utf-8")

    with tempfile.TemporaryDirectory(prefix="speed_model_") as folder:
        if any(TASKS[task].pocket for task in given.tasks):
            save_pocket(Path(folder))
        for task in given.tasks:
            found = results["tasks"].get(task, {})
            run_task(task, given, Path(folder) if TASKS[task].pocket else SMOLLM2, found, save)
    print(page(results))
    return 1 if any(found["failures"] for found in results["tasks"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
