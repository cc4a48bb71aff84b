"""CPU seconds of querying and tabulating a store of many runs: `python bench/results_queries.py [--runs 10000]`.

The store is made of copies of one run (all params of a study cell, its provenance tags, 80 metrics), 34 configurations
with seeds; each copy has the eval curve that collapse and best-of rules read. Making it is not measured.
"""

from __future__ import annotations

import argparse
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


def make_store(folder: Path, runs: int) -> str:
    """One tracked run, copied ``runs`` times with another beta, seed, reward and KL each. Returns the store's uri."""
    from kl_comedy.config import flatten, load_config, to_plain
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.tracking.logger import RunLogger

    uri = f"sqlite:///{folder / 'mlflow.db'}"
    config = load_config(ROOT / "configs/study/base/pocket.yaml", ["kl={recipe: comedy/k1_in_reward, beta: 0.1}"])
    logger = RunLogger.start(
        SimpleNamespace(uri=uri, experiment="bench", flush_every=10, tags={}),
        run_dir=folder / "run",
        run_name="bench",
        params=flatten(to_plain(config)),
        tags={**provenance_tags(), "kl.label": "0.1 k1_reverse_token in reward total before baseline"},
    )
    for step in CURVE_STEPS:
        logger.log_metrics({EVAL: 0.4, KL: 0.0, **{f"train/metric_{n}": float(n) for n in range(METRICS - 2)}}, step)
    logger.finish()
    assert logger.run_id
    _copy(folder / "mlflow.db", logger.run_id, runs)
    return uri


def _copy(file: Path, template: str, runs: int) -> None:
    random.seed(0)
    with sqlite3.connect(file) as db:
        names = {table: [row[1] for row in db.execute(f"PRAGMA table_info({table})")] for table in TABLES}
        rows = {
            table: db.execute(f"SELECT * FROM {table} WHERE run_uuid = ?", [template]).fetchall() for table in TABLES
        }
        for table in TABLES:
            at, key, value = names[table].index("run_uuid"), names[table].index("key"), names[table].index("value")
            kept = [row for row in rows[table] if table != "metrics" or row[key] in (EVAL, KL)]
            marks = ",".join("?" * len(names[table]))
            for first in range(0, runs, 500):
                copies = []
                for number in range(first, min(first + 500, runs)):
                    for row in kept:
                        new = list(row)
                        new[at] = f"{number:032x}"
                        new[value] = _value(row[key], row[value], number)
                        copies.append(new)
                db.executemany(f"INSERT INTO {table} VALUES ({marks})", copies)
        names_run = [row[1] for row in db.execute("PRAGMA table_info(runs)")]
        (row,) = db.execute("SELECT * FROM runs WHERE run_uuid = ?", [template]).fetchall()
        marks = ",".join("?" * len(names_run))
        copies = [
            [f"{n:032x}" if c == "run_uuid" else v for c, v in zip(names_run, row, strict=True)] for n in range(runs)
        ]
        db.executemany(f"INSERT INTO runs VALUES ({marks})", copies)


TABLES = ("params", "tags", "latest_metrics", "metrics")


def _value(key: str, value: object, number: int) -> object:
    beta, seed = number % 34 / 34, number // 34
    if key == "seed":
        return str(seed)
    if key == "kl.beta":
        return f"{beta:.4f}"
    if key == "kl.label":
        return f"{beta:.4f} k1_reverse_token in reward total before baseline"
    if key in (EVAL, KL):
        return random.random()
    return value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--store", type=Path, help="Keep the store in this folder and use it again.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.store or Path(scratch)
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        if not (folder / "mlflow.db").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make_store(folder, given.runs)
        measure(uri)


def measure(uri: str) -> None:
    """Each line: CPU seconds of this process and its children, and what was done."""
    from kl_comedy.cli import main as cli

    cli._quiet_libraries()
    tasks = {
        "table, one metric": ["table", "--group", "kl.beta", "--metric", EVAL],
        "table with a filter": ["table", "--where", "kl.beta = '0.5000'", "--group", "kl.beta", "--metric", EVAL],
        "table, best of each run": ["table", "--group", "kl.beta", "--metric", EVAL, "--of", "best"],
        "compare at equal KL": ["compare", "--metric", EVAL, "--at-kl", "0.25,0.5"],
        "export to Parquet": ["export", "--out", str(Path(tempfile.gettempdir()) / "results_queries.parquet")],
    }
    import contextlib
    import io

    for name, words in tasks.items():
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            sys.argv = ["kl-comedy", "results", *words, "--uri", uri]
            with contextlib.suppress(SystemExit):
                cli.run()
        print(f"{time.process_time() - began:8.1f}  {name}")


if __name__ == "__main__":
    main()
