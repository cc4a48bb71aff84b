"""CPU seconds of queries and tables over a store of many runs: `python bench/results_queries.py [--runs 10000]`.

The store contains copies of one run (all params of a study run, provenance tags, 80 metrics, an eval curve) as 34
configurations with seeds. Creating it is not timed.
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
CURVE_STEPS = (0, 20, 40, 60, 80)
EVAL, KL = "eval/heldout/reward", "kl/exact_reverse_sequence"
TABLES = ("params", "tags", "latest_metrics", "metrics", "runs")


def make_store(folder: Path, runs: int) -> str:
    """Log one run and copy it ``runs`` times with different beta, seed, reward and KL. Returns the store's URI."""
    from kl_comedy.config import flatten, load_config, to_plain
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.tracking.logger import RunLogger

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    config = load_config(ROOT / "configs/study/base/pocket.yaml", ["kl={recipe: comedy/k1_in_reward, beta: 0.1}"])
    logger = RunLogger(
        SimpleNamespace(uri=uri, experiment="bench", flush_every=10, tags={}),
        run_dir=folder / "run",
        params=flatten(to_plain(config)),
        tags={**provenance_tags(), "kl.label": "0.1 k1_reverse_token in reward total before baseline"},
    )
    for step in CURVE_STEPS:
        logger.log_metrics({EVAL: 0.4, KL: 0.0, **{f"train/metric_{n}": float(n) for n in range(METRICS - 2)}}, step)
    logger.finish()
    random.seed(0)
    with sqlite3.connect(folder / "mlflow.db") as db:
        db.row_factory = sqlite3.Row
        for table in TABLES:
            rows = [dict(row) for row in db.execute(f"SELECT * FROM {table} WHERE run_uuid = ?", [logger.run_id])]
            if table == "metrics":
                rows = [row for row in rows if row["key"] in (EVAL, KL)]
            names = ", ".join(f":{name}" for name in rows[0])
            copies = (row_of_copy(row, number) for number in range(runs) for row in rows)
            db.executemany(f"INSERT INTO {table} VALUES ({names})", copies)
    return uri


def row_of_copy(row: dict[str, object], number: int) -> dict[str, object]:
    """``row`` of any table, changed for run ``number``."""
    row = {**row, "run_uuid": f"{number:032x}"}
    beta = f"{number % 34 / 34:.4f}"
    values = {
        "seed": str(number // 34),
        "kl.beta": beta,
        "kl.label": f"{beta} k1_reverse_token in reward total before baseline",
        EVAL: random.random(),
        KL: random.random(),
    }
    return {**row, "value": values[str(row["key"])]} if row.get("key") in values else row


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
    """Print CPU seconds and name of each task."""
    from kl_comedy.cli import main as cli

    cli._quiet_libraries()
    tasks = {
        "table, one metric": ["table", "--group", "kl.beta", "--metric", EVAL],
        "table with a filter": ["table", "--where", "kl.beta = '0.5000'", "--group", "kl.beta", "--metric", EVAL],
        "table, best of each run": ["table", "--group", "kl.beta", "--metric", EVAL, "--of", "best"],
        "compare at equal KL": ["compare", "--metric", EVAL, "--at-kl", "0.25,0.5"],
        "export to Parquet": ["export", "--out", str(Path(tempfile.gettempdir()) / "results_queries.parquet")],
    }
    for name, arguments in tasks.items():
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            sys.argv = ["kl-comedy", "results", *arguments, "--uri", uri]
            with contextlib.suppress(SystemExit):
                cli.run()
        print(f"{time.process_time() - start:8.1f}  {name}", flush=True)


if __name__ == "__main__":
    main()
