"""Train the cells of a grid that no export has, and export them.

python research/scripts/run_block.py configs/hack/tune.yaml [--workers 2] [--minutes 60]

This is `kl-comedy sweep GRID --local 2 --finished-in EXPORT`, and `kl-comedy results export` when it has ended, after
``--minutes``, at SIGTERM and at Ctrl-C. Runs are stored in evidence.db in this folder, and go into
results/evidence_2026_12: export.parquet, its curves and hours.csv, a row for each grid. The next call goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd

OUT = Path(__file__).parents[2] / "results" / "evidence_2026_12"
EXPORT = OUT / "export.parquet"
STORE = "sqlite:///evidence.db"
# They differ between machines, or no number of the page is computed from them.
WITHOUT = "run.*,output,tracking.*,metrics.time/*,*kl_error*,tags.data.*,tags.process.*,tags.mlflow.*,tags.command"
CURVES = "train/reward,train/gold,kl/exact_reverse_sequence,policy/ess,eval/heldout/reward"
COMMAND = [sys.executable, "-m", "kl_comedy.cli"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value for every cell")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time")
    parser.add_argument("--minutes", type=float, default=600, help="when to stop")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    words = [str(given.grid), *given.overrides, f"tracking.uri={STORE}", "--local", str(given.workers)]
    if EXPORT.is_file():
        words += ["--finished-in", str(EXPORT)]
    # In a session of its own: a Ctrl-C in the terminal would stop it too, and the signal below a second time.
    sweep = subprocess.Popen([*COMMAND, "sweep", *words], start_new_session=True)
    with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        sweep.wait(60 * given.minutes)
    # Its cells finish their update and save. A sweep that has ended takes no signal.
    sweep.terminate()
    sweep.wait()
    export()


def export() -> None:
    """Add the runs of the store to those exported before, and write the hours of each block."""
    OUT.mkdir(parents=True, exist_ok=True)
    words = ["results", "export", "--uri", STORE, "--append", "--out", str(EXPORT)]
    words += ["--without", WITHOUT, "--curves", CURVES]
    subprocess.run([*COMMAND, *words], check=True)
    hours(pd.read_parquet(EXPORT)).to_csv(OUT / "hours.csv", index=False)


def hours(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs, finished runs and hours (wall time, added over runs that failed too) of each sweep."""
    blocks = runs.assign(finished=runs["status"] == "FINISHED").groupby("tags.sweep", as_index=False)
    table = blocks.agg(runs=("status", "size"), finished=("finished", "sum"), hours=("duration_s", "sum"))
    table["hours"] = (table["hours"] / 3600).round(2)
    return table.rename(columns={"tags.sweep": "block"})


if __name__ == "__main__":
    main()
