"""Tables of the lag study, from finished and unfinished runs: Markdown over seeds to stdout, one row per run to
results/lags/runs.csv.

python research/scripts/lag_table.py sweeps/lags [MORE ...]

Uses the standard library only. Means are over the last 20 updates of a run. A run has collapsed if its latest held-out
reward is below half of its first.
"""

import csv
import itertools
import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[2] / "results" / "lags" / "runs.csv"
KINDS = ("none", "k1-reward", "k1-loss", "k3-reward", "k3-loss", "k3-token", "k1-prefix", "rb-prefix")
"""The KL terms in the order of the table: the end of a run's name."""
MEANS = {
    "train_reward_last20": "train/reward",
    "exact_kl_last20": "kl/exact_reverse_sequence",
    "ess_last20": "policy/ess",
    "grad_norm_last20": "grad/norm",
}
HELD_OUT_REWARD = "eval/heldout/reward"
HELD_OUT_KL = "eval/heldout/kl/exact_reverse_sequence"
UPDATES = 60
"""The last update of a finished run, which ends with an evaluation."""


def read_run(folder: Path) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Settings and tags of a run, and its metrics by step, in order.

    If an update was repeated after a restart, its last record counts.
    """
    facts: dict[str, str] = {}
    points: dict[int, dict[str, float]] = {}
    for line in (folder / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in ("params", "tags"):
            facts |= event["data"]
        elif event["kind"] == "metrics":
            points.setdefault(event["step"], {}).update(event["data"])
    return facts, [{"step": step, **points[step]} for step in sorted(points)]


def summary(folder: Path) -> dict[str, Any]:
    """Settings and results of one run: a row of runs.csv."""
    facts, points = read_run(folder)
    updates = [point for point in points if "train/reward" in point]
    evaluations = [point for point in points if HELD_OUT_REWARD in point]
    first = evaluations[0]
    latest = evaluations[-1]
    return {
        "name": facts["name"],
        "seed": int(facts["seed"]),
        "lag": int(facts["lag.steps"]),
        "kl": facts["kl.label"],
        "updates": len(updates),
        "heldout_update": latest["step"],
        "heldout_reward": latest[HELD_OUT_REWARD],
        "heldout_exact_kl": latest[HELD_OUT_KL],
        **{name: mean(updates[-20:], metric) for name, metric in MEANS.items()},
        "largest_exact_kl": max(update["kl/exact_reverse_sequence"] for update in updates),
        "largest_grad_norm": max(update["grad/norm"] for update in updates),
        "least_train_reward": min(update["train/reward"] for update in updates),
        "collapsed": latest[HELD_OUT_REWARD] < 0.5 * first[HELD_OUT_REWARD],
        "config_hash": facts["config.hash"],
        "commit": facts["git.commit"],
        "dirty": facts["git.dirty"],
    }


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows) / len(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each lag and KL, from rows in the order of runs.csv."""
    texts = ("lag", "KL")
    numbers = (
        "seeds",
        "collapsed",
        "held-out reward",
        "held-out exact KL",
        "training reward",
        "exact KL",
        "ESS",
        "gradient norm",
        "largest exact KL",
        "largest gradient norm",
        "least training reward",
    )
    lines = ["| " + " | ".join(texts + numbers) + " |", "|---:|---|" + "---:|" * len(numbers)]
    for _, group in itertools.groupby(rows, key=lambda row: (row["lag"], row["name"])):
        lines.append(table_row(list(group)))
    return "\n".join(lines)


def table_row(rows: list[dict[str, Any]]) -> str:
    """One table row for all seeds of one lag and KL: means, ranges and extremes."""
    cells = [
        rows[0]["lag"],
        rows[0]["kl"],
        len(rows),
        sum(row["collapsed"] for row in rows),
        spread(rows, "heldout_reward", ".3f"),
        spread(rows, "heldout_exact_kl", ".3g"),
        f"{mean(rows, 'train_reward_last20'):.2f}",
        f"{mean(rows, 'exact_kl_last20'):.3g}",
        f"{mean(rows, 'ess_last20'):.2f}",
        f"{mean(rows, 'grad_norm_last20'):.3g}",
        f"{max(row['largest_exact_kl'] for row in rows):.3g}",
        f"{max(row['largest_grad_norm'] for row in rows):.3g}",
        f"{min(row['least_train_reward'] for row in rows):.2f}",
    ]
    line = "| " + " | ".join(map(str, cells)) + " |"
    unfinished = [f"seed {row['seed']}: {row['updates']}" for row in rows if row["heldout_update"] != UPDATES]
    # `updates` in runs.csv says the same per run.
    if unfinished:
        # Beside the table, which a page may not contain before all runs are finished.
        line += f" updates so far: {unfinished}"
    return line


def spread(rows: list[dict[str, Any]], name: str, digits: str) -> str:
    """The mean over seeds, and the range."""
    values = [row[name] for row in rows]
    return f"{mean(rows, name):{digits}} ({min(values):{digits}} to {max(values):{digits}})"


def six_digits(value: Any) -> Any:
    """Floats as text of six digits: the rest of a mean depends on the machine."""
    return f"{value:.6g}" if isinstance(value, float) else value


def order(row: dict[str, Any]) -> tuple[int, int, int]:
    # A run is named `lag-LAG-KIND`; the kind itself has a hyphen.
    kind = row["name"].split("-", 2)[2]
    return row["lag"], KINDS.index(kind), row["seed"]


def main(*sweeps: Path) -> None:
    rows = []
    for sweep in sweeps:
        for spool in sorted(sweep.glob("cells/*/run/spool.jsonl")):
            rows.append(summary(spool.parent))
    # The order of the file is that of the table, which groups neighbours (`table`).
    rows.sort(key=order)

    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: six_digits(value) for name, value in row.items()})
    print(table(rows))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
