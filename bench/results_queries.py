"""CPU seconds of queries and tables over a store of many runs: `python bench/results_queries.py [--runs 1000]`.

The store contains copies of one run (all params of a study run, provenance tags, 80 metrics, an eval curve, tables of
long completions with their tokens, which all copies share) as 34 configurations with seeds. The time of creating it is
not included. Each command runs twice on the same store: as it reads a database, and through MLflow's client, one run at
a time, as it reads a server.
"""

from __future__ import annotations

import argparse
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
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
    from kl_comedy.tracking.tokens import STORED_ROWS

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
        logger.log_table("samples", [long_completion(number) for number in range(STORED_ROWS)], step)
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


def long_completion(number: int) -> dict[str, object]:
    """A row of a table of samples with as many tokens as a run stores."""
    from kl_comedy.tracking.tokens import STORED_TOKENS

    values = [random.uniform(-1, 1) for _ in range(STORED_TOKENS)]
    words = [" token"] * STORED_TOKENS
    columns = {"text": words, "special": {}, "k1_reverse": values, "exact_reverse": values, "log_ratio": values}
    row = {"problem": "1+1=", "answer": "2", "completion": "".join(words), "reward": 1.0, "status": "ok"}
    tokens = {"tokens": 2 * STORED_TOKENS, "stop_reason": "length", "group": number // 4}
    return row | tokens | {"per_token": columns | {"use": "t" * STORED_TOKENS}}


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
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--store", type=Path, help="Create the store in this folder, or reuse it.")
    parser.add_argument("--once", action="store_true", help="Only as the commands read now, without the client.")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    parser.add_argument("--through-client", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.store or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.task:
            run_task(options.task, folder, through_client=options.through_client)
            return
        if not (folder / "mlflow.db").exists():
            make_store(folder, options.runs)
        measure(folder, both_ways=not options.once)


TASKS = {
    "table, one metric": ["table", "--group", "kl.beta", "--metric", EVAL],
    "table with a filter": ["table", "--where", "kl.beta = '0.5000'", "--group", "kl.beta", "--metric", EVAL],
    "table, best of each run": ["table", "--group", "kl.beta", "--metric", EVAL, "--of", "best"],
    "compare at equal KL": ["compare", "--metric", EVAL, "--at-kl", "0.25,0.5"],
    "plot of curves": ["plot", "--metric", EVAL, "--group", "kl.label", "--out", "{out}/plot.svg"],
    "export to Parquet": ["export", "--out", "{out}/export.parquet"],
    "report": ["report", "--metric", EVAL, "--out", "{out}/report.html"],
}


def run_task(name: str, folder: Path, *, through_client: bool) -> None:
    """Run one command in this process. ``through_client``: reading one run at a time, as from a server."""
    from kl_comedy.cli import main as cli
    from kl_comedy.results import database

    if through_client:
        database._backend = lambda client: None
    # Before a library is imported, as the entry point does it.
    cli._quiet_libraries()
    arguments = [word.format(out=folder) for word in TASKS[name]]
    sys.argv = ["kl-comedy", "results", *arguments, "--uri", f"sqlite:///{folder / 'mlflow.db'}"]
    cli.run()


def measure(folder: Path, *, both_ways: bool) -> None:
    """Print a Markdown table: CPU seconds of each command in a process of its own, imports included."""
    print(f"| command over {runs_of(folder):,} runs | at once, CPU s |", end="")
    print(" through the client, CPU s | ratio |" if both_ways else "")
    print("| --- | --- |" + (" --- | --- |" if both_ways else ""))
    for name in TASKS:
        at_once, output = cpu_seconds(name, folder)
        row = f"| {name} | {at_once:.1f} |"
        if both_ways:
            # Right after each other, so that both meet the same machine.
            through_client, same_output = cpu_seconds(name, folder, "--through-client")
            assert output == same_output, f"{name}: the two ways print different results"
            row += f" {through_client:.1f} | {through_client / at_once:.1f} |"
        print(row, flush=True)
    print(f"\nThe report has {(folder / 'report.html').stat().st_size / 1e6:.1f} MB.")


def cpu_seconds(name: str, folder: Path, *options: str) -> tuple[float, str]:
    """The CPU seconds of a task in a new process, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--store", str(folder), "--task", name, *options]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def runs_of(folder: Path) -> int:
    with sqlite3.connect(folder / "mlflow.db") as db:
        (count,) = db.execute("SELECT COUNT(*) FROM runs").fetchone()
    return int(count)


if __name__ == "__main__":
    main()
