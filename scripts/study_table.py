"""The short study as one table, from its runs' records, finished or not: Markdown to stdout, results/study/runs.csv.

python scripts/study_table.py sweeps/study_short

Standard library only, so it can be asked while the sweep runs. Means are over a run's last 10 updates so far.
"""

import csv
import json
import sys
from pathlib import Path
from typing import Any

from lag_table import summary

TARGET = Path(__file__).parents[1] / "results" / "study" / "runs.csv"
TAIL = 10
HEAD = ("learning rate", "KL", "seed", "updates", "held-out reward", "held-out exact KL", "training reward", "exact KL",
        "largest exact KL", "largest gradient norm")  # fmt: skip


def row(folder: Path) -> dict[str, Any]:
    """What :func:`lag_table.summary` says of a run, its learning rate, and means over the last ``TAIL`` updates."""
    updates: dict[int, dict[str, float]] = {}
    params: dict[str, Any] = {}
    for event in map(json.loads, (folder / "spool.jsonl").read_text().splitlines()):
        params |= event["data"] if event["kind"] == "params" else {}
        if event["kind"] == "metrics" and "train/reward" in event["data"]:
            updates[event["step"]] = event["data"]
    tail = [updates[step] for step in sorted(updates)][-TAIL:]
    means = {
        f"{name}_last{TAIL}": sum(each[metric] for each in tail) / len(tail)
        for name, metric in (("train_reward", "train/reward"), ("exact_kl", "kl/exact_reverse_sequence"))
    }
    found = {key: value for key, value in summary(folder).items() if key != "lag" and not key.endswith("_last20")}
    if not found["heldout_update"]:  # only the warm start was evaluated so far
        found |= {"heldout_reward": "", "heldout_exact_kl": "", "collapsed": ""}
    return {"lr": float(params["optimizer.lr"])} | found | means


def shown(found: dict[str, Any]) -> str:
    held = ("-", "-")
    if found["heldout_update"]:
        held = (f"{found['heldout_reward']:.3f}", f"{found['heldout_exact_kl']:.3g}")
    cells = (
        f"{found['lr']:g}", found["kl"], found["seed"], found["updates"], *held,
        f"{found[f'train_reward_last{TAIL}']:.2f}", f"{found[f'exact_kl_last{TAIL}']:.3g}",
        f"{found['largest_exact_kl']:.3g}", f"{found['largest_grad_norm']:.3g}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main(sweep: Path) -> None:
    rows = [row(file.parent) for file in sorted(sweep.glob("runs/*/spool.jsonl"))]
    rows.sort(key=lambda found: (found["lr"], found["name"], found["seed"]))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in found.items()} for found in rows)
    print("| " + " | ".join(HEAD) + " |", "|---:|---|" + "---:|" * 8, *map(shown, rows), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
