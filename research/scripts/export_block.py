"""Export the runs of a store beside those exported before, and store the hours of each block.

python research/scripts/export_block.py sqlite:///evidence12.db

Writes export.parquet, its curves and hours.csv in results/evidence_2026_12: a row for each sweep, from the durations
of its exported runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pandas as pd

OUT = Path(__file__).parents[2] / "results" / "evidence_2026_12"
# They differ between machines, or no number of the page is computed from them.
WITHOUT = "run.*,output,tracking.*,metrics.time/*,*kl_error*,tags.data.*,tags.process.*,tags.mlflow.*,tags.command"


def hours(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs, finished runs and hours (wall time, added over runs that failed too) of each sweep."""
    blocks = runs.assign(finished=runs["status"] == "FINISHED").groupby("tags.sweep", as_index=False)
    table = blocks.agg(runs=("status", "size"), finished=("finished", "sum"), hours=("duration_s", "sum"))
    table["hours"] = (table["hours"] / 3600).round(2)
    return table.rename(columns={"tags.sweep": "block"})


def export(uri: str, out: Path) -> None:
    """Write the three files into ``out``; runs that an earlier export has stay."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "export.parquet"
    command = [sys.executable, "-m", "kl_comedy.cli", "results", "export", "--uri", uri, "--append", "--out", str(file)]
    subprocess.run([*command, "--without", WITHOUT], check=True)
    hours(pd.read_parquet(file)).to_csv(out / "hours.csv", index=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uri", help="store of the runs")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write")
    arguments = parser.parse_args()
    export(arguments.uri, arguments.out)
