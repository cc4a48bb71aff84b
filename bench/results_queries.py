"""CPU seconds of queries and tables over a store of many runs: `python bench/results_queries.py [--runs 10000]`.

The store contains copies of one run (all params of a study run, provenance tags, 80 metrics, an eval curve) as 34
configurations with seeds. The time of creating it is not included.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sqlite3
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]
METRICS = 80
CONFIGURATIONS = 34
CURVE_STEPS = (0, 20, 40, 60, 80)
EVAL = "eval/heldout/reward"
KL = "kl/exact_reverse_sequence"
TABLES = ("params", "tags", "latest_metrics", "metrics", "runs")


def make_store(folder: Path, runs: int) -> str:
    """Log one run and copy it ``runs`` times with different beta, seed, reward and KL. Returns the store's URI."""
    from kl_comedy.config import flatten, load_config, to_plain
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.tracking.logger import RunLogger

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    config = load_config(ROOT / "configs/study/base/pocket.yaml", ["kl={recipe: comedy/k1_in_reward, beta: 0.1}"])
    logger = RunLogger(
        SimpleNamespace(uri=uri, experiment="bench", tags={}),
        run_dir=folder / "run",
        params=flatten(to_plain(config)),
        tags={**provenance_tags(), "kl.label": "0.1 k1_reverse_token in reward total before baseline"},
    )
    metrics = {EVAL: 0.4, KL: 0.0}
    for number in range(METRICS - len(metrics)):
        metrics[f"train/metric_{number}"] = float(number)
    for step in CURVE_STEPS:
        logger.log_metrics(metrics, step)
    logger.finish()

    # Copied in the database: writing 10,000 runs through MLflow's client would take long.
    random.seed(0)
    with sqlite3.connect(folder / "mlflow.db") as db:
        db.row_factory = sqlite3.Row
        for table in TABLES:
            rows = [dict(row) for row in db.execute(f"SELECT * FROM {table} WHERE run_uuid = ?", [logger.run_id])]
            if table == "metrics":
                # Curves of the two metrics that the commands read; latest_metrics has the last values of all.
                rows = [row for row in rows if row["key"] in (EVAL, KL)]
            names = ", ".join(f":{name}" for name in rows[0])
            copies = (row_of_copy(row, number) for number in range(runs) for row in rows)
            db.executemany(f"INSERT INTO {table} VALUES ({names})", copies)
    return uri


def row_of_copy(row: dict[str, object], number: int) -> dict[str, object]:
    """A row of any table, changed for run ``number``."""
    copy = {**row, "run_uuid": f"{number:032x}"}
    beta = f"{number % CONFIGURATIONS / CONFIGURATIONS:.4f}"
    values: dict[str, object] = {
        "seed": str(number // CONFIGURATIONS),
        "kl.beta": beta,
        "kl.label": f"{beta} k1_reverse_token in reward total before baseline",
        EVAL: random.random(),
        KL: random.random(),
    }
    # Params, tags and metrics have a key and a value; the table of runs has neither.
    key = row.get("key")
    if key in values:
        copy["value"] = values[str(key)]
    return copy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--store", type=Path, help="Create the store in this folder, or reuse it.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.store or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "mlflow.db").exists():
            make_store(folder, options.runs)
        measure(f"sqlite:///{folder / 'mlflow.db'}")


def measure(uri: str) -> None:
    """Print the CPU seconds and the name of each task. The first includes the imports of mlflow and pandas."""
    from kl_comedy.cli import main as cli

    # Before a library is imported, as the entry point does it.
    cli._quiet_libraries()
    tasks = {
        "table, one metric": ["table", "--group", "kl.beta", "--metric", EVAL],
        "table with a filter": ["table", "--where", "kl.beta = '0.5000'", "--group", "kl.beta", "--metric", EVAL],
        "table, best of each run": ["table", "--group", "kl.beta", "--metric", EVAL, "--of", "best"],
        "compare at equal KL": ["compare", "--metric", EVAL, "--at-kl", "0.25,0.5"],
        "export to Parquet": ["export", "--out", str(Path(tempfile.gettempdir()) / "results_queries.parquet")],
    }
    for name, arguments in tasks.items():
        sys.argv = ["kl-comedy", "results", *arguments, "--uri", uri]
        start = time.process_time()
        # The command exits, as it does in a shell.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            cli.run()
        print(f"{time.process_time() - start:8.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
