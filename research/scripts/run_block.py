"""Train the cells of a grid that no export has, and export them.

python research/scripts/run_block.py configs/hack/tune.yaml [--workers 2] [--minutes 60]

As `kl-comedy sweep GRID --local 2 --finished-in EXPORT`, but a cell's process is forked from one that has imported the
trainer: imports are a quarter of a run of half a minute. Runs are stored in evidence.db in this folder, and go into
results/evidence_2026_12 when all have ended, after ``--minutes``, at SIGTERM and at Ctrl-C: export.parquet, its curves
and hours.csv, a row for each grid. The next call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pandas as pd

from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.local import by_seed
from kl_comedy.slurm.manifest import Sweep, plan, write_sweep
from kl_comedy.slurm.status import missing_work, read_status

OUT = Path(__file__).parents[2] / "results" / "evidence_2026_12"
EXPORT = OUT / "export.parquet"
STORE = "sqlite:///evidence.db"
# They differ between machines, or no number of the page is computed from them.
WITHOUT = "run.*,output,tracking.*,metrics.time/*,*kl_error*,tags.data.*,tags.process.*,tags.mlflow.*,tags.command"
CURVES = "train/reward,train/gold,kl/exact_reverse_sequence,policy/ess,eval/heldout/reward"
PRELOADED = ["kl_comedy.cli.sweep_job", "kl_comedy.cli.summary", "kl_comedy.training.fit", "kl_comedy.tracking"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value for every cell")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time")
    parser.add_argument("--minutes", type=float, default=600, help="when to stop")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sweep = planned_sweep(given.grid, given.overrides)
    waiting = unfinished(sweep)
    print(f"{len(waiting)} of {len(sweep.manifest.cells)} cells to train", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        train(sweep, waiting, given.workers, end)
    export()


def planned_sweep(grid: Path, overrides: list[str]) -> Sweep:
    """The sweep of ``grid``, written into sweeps/NAME unless it is there."""
    made = plan(read_grid(grid), directory=Path.cwd(), extra=[f"tracking.uri={STORE}", *overrides])
    return write_sweep(Path("sweeps") / made.manifest.name, made)


def unfinished(sweep: Sweep) -> list[int]:
    """The cells, by seed, that are neither finished here nor in the export."""
    exported = set()
    if EXPORT.is_file():
        runs = pd.read_parquet(EXPORT, columns=["tags.sweep", "params.name", "params.seed", "status"])
        runs = runs[(runs["tags.sweep"] == sweep.manifest.name) & (runs["status"] == "FINISHED")]
        exported = set(zip(runs["params.name"], runs["params.seed"].astype(int), strict=True))
    missing = missing_work(sweep, read_status(sweep)).train
    return by_seed(sweep, tuple(i for i in missing if (sweep.cell(i).name, sweep.cell(i).seed) not in exported))


def train(sweep: Sweep, waiting: list[int], workers: int, end: float) -> None:
    """Train ``waiting``, ``workers`` at a time, until ``end`` on the monotonic clock."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    start = time.monotonic()
    running: list[ForkServerProcess] = []
    done = 0
    try:
        while (waiting or running) and time.monotonic() < end:
            while waiting and len(running) < workers:
                cell = context.Process(target=train_cell, args=(sweep.path, waiting.pop(0)))
                cell.start()
                running.append(cell)
            time.sleep(0.2)
            for cell in [cell for cell in running if not cell.is_alive()]:
                running.remove(cell)
                done += 1
                each = (time.monotonic() - start) / done
                left = each * (len(waiting) + len(running)) / 60
                print(f"{done} done, exit code {cell.exitcode}, {left:.0f} minutes left", flush=True)
    finally:
        # They finish their update and save.
        for cell in running:
            cell.terminate()
        for cell in running:
            cell.join(60)


def train_cell(sweep: Path, index: int) -> None:
    """`kl-comedy cell SWEEP INDEX` in this process, its output in the sweep's logs."""
    from kl_comedy.cli.sweep_job import cell

    os.setsid()
    with open(sweep / "logs" / f"train-local_{index}.out", "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    cell(sweep, index)


def export() -> None:
    """Add the runs of the store to those exported before, and write the hours of each block."""
    OUT.mkdir(parents=True, exist_ok=True)
    words = ["results", "export", "--uri", STORE, "--append", "--out", str(EXPORT)]
    words += ["--without", WITHOUT, "--curves", CURVES]
    subprocess.run([sys.executable, "-m", "kl_comedy.cli", *words], check=True)
    hours(pd.read_parquet(EXPORT)).to_csv(OUT / "hours.csv", index=False)


def hours(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs, finished runs and hours (wall time, added over runs that failed too) of each sweep."""
    blocks = runs.assign(finished=runs["status"] == "FINISHED").groupby("tags.sweep", as_index=False)
    table = blocks.agg(runs=("status", "size"), finished=("finished", "sum"), hours=("duration_s", "sum"))
    table["hours"] = (table["hours"] / 3600).round(2)
    return table.rename(columns={"tags.sweep": "block"})


if __name__ == "__main__":
    main()
