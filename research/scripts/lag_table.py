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
MEANS = {
    "train_reward_last20": "train/reward",
    "exact_kl_last20": "kl/exact_reverse_sequence",
    "ess_last20": "policy/ess",
    "grad_norm_last20": "grad/norm",
}
HELD_OUT = ("eval/heldout/reward", "eval/heldout/kl/exact_reverse_sequence")


def summary(folder: Path) -> dict[str, Any]:
    """Settings and results of one run. If an update was repeated after a restart, its last record counts."""
    facts: dict[str, str] = {}
    points: dict[int, dict[str, float]] = {}
    for line in (folder / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] in ("params", "tags"):
            facts |= event["data"]
        elif event["kind"] == "metrics":
            points.setdefault(event["step"], {}).update(event["data"])
    updates = [points[step] for step in sorted(points) if "train/reward" in points[step]]
    held_out = [
        (step, *(points[step][name] for name in HELD_OUT)) for step in sorted(points) if HELD_OUT[0] in points[step]
    ]
    last_updates = updates[-20:]
    step, reward, exact_kl = held_out[-1]
    return {
        "name": facts["name"],
        "seed": int(facts["seed"]),
        "lag": int(facts["lag.steps"]),
        "kl": facts["kl.label"],
        "updates": len(updates),
        "heldout_update": step,
        "heldout_reward": reward,
        "heldout_exact_kl": exact_kl,
        **{name: sum(update[metric] for update in last_updates) / len(last_updates) for name, metric in MEANS.items()},
        "largest_exact_kl": max(update["kl/exact_reverse_sequence"] for update in updates),
        "largest_grad_norm": max(update["grad/norm"] for update in updates),
        "least_train_reward": min(update["train/reward"] for update in updates),
        "collapsed": reward < 0.5 * held_out[0][1],
        "config_hash": facts["config.hash"],
        "commit": facts["git.commit"],
        "dirty": facts["git.dirty"],
    }


def table_row(rows: list[dict[str, Any]]) -> str:
    """One table row for all seeds of one lag and KL: means, ranges and extremes."""
    first = rows[0]

    def spread(name: str, digits: str) -> str:
        values = [row[name] for row in rows]
        return f"{sum(values) / len(values):{digits}} ({min(values):{digits}} to {max(values):{digits}})"

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    cells = [
        first["lag"],
        first["kl"],
        len(rows),
        sum(row["collapsed"] for row in rows),
        spread("heldout_reward", ".3f"),
        spread("heldout_exact_kl", ".3g"),
        f"{mean('train_reward_last20'):.2f}",
        f"{mean('exact_kl_last20'):.3g}",
        f"{mean('ess_last20'):.2f}",
        f"{mean('grad_norm_last20'):.3g}",
        f"{max(row['largest_exact_kl'] for row in rows):.3g}",
        f"{max(row['largest_grad_norm'] for row in rows):.3g}",
        f"{min(row['least_train_reward'] for row in rows):.2f}",
    ]
    unfinished = [f"seed {row['seed']}: {row['updates']}" for row in rows if row["heldout_update"] != 60]
    return "| " + " | ".join(map(str, cells)) + " |" + (f" updates so far: {unfinished}" if unfinished else "")


def main(*sweeps: Path) -> None:
    rows = [summary(file.parent) for sweep in sweeps for file in sorted(sweep.glob("runs/*/spool.jsonl"))]
    rows.sort(key=lambda row: (row["lag"], KINDS.index(row["name"].split("-", 2)[2]), row["seed"]))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """A row for each lag and KL, from rows in the order of runs.csv."""
    head = "| lag | KL | seeds | collapsed | held-out reward | held-out exact KL | training reward | exact KL | ESS | "
    head += (
        "gradient norm | largest exact KL | largest gradient norm | least training reward |\n|---:|---|" + "---:|" * 11
    )
    groups = itertools.groupby(rows, key=lambda row: (row["lag"], row["name"]))
    return "\n".join([head, *(table_row(list(same)) for _, same in groups)])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
