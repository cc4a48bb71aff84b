"""Write results/runs.csv: one row per finished run of the given MLflow stores, with what it was and what it gave.

python scripts/collect_results.py sqlite:///mlflow.db [more stores ...]
"""

import sys
from pathlib import Path

import pandas as pd

from kl_comedy.tracking.queries import runs_frame

COLUMNS = {
    "run_id": "run_id",
    "params.name": "name",
    "params.seed": "seed",
    "tags.kl.label": "kl",
    "tags.kl.regime": "regime",
    "tags.kl.0.verdict": "verdict",
    "tags.config.hash": "config_hash",
    "tags.git.commit": "commit",
    "tags.git.dirty": "dirty",
    "tags.reference.hash": "reference_hash",
    "tags.data.hash.train": "data_hash",
    "params.train.steps": "updates",
    "duration_s": "seconds",
    "metrics.eval/heldout/reward": "heldout_reward",
    "metrics.train/reward": "train_reward",
    "metrics.kl/k1_reverse_sequence": "k1_reverse_sequence",
    "metrics.kl/exact_reverse_sequence": "exact_reverse_sequence",
    "metrics.policy/behaviour_gap_max": "behaviour_gap_max",
}


def main(uris: list[str]) -> None:
    frames = [runs_frame(uri) for uri in uris]
    runs = pd.concat(frames, ignore_index=True)
    runs = runs[runs["status"] == "FINISHED"].sort_values(["params.name", "params.seed"])
    found = {key: name for key, name in COLUMNS.items() if key in runs}
    target = Path(__file__).parents[1] / "results" / "runs.csv"
    runs[list(found)].rename(columns=found).to_csv(target, index=False)
    print(f"{len(runs)} runs in {target}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["sqlite:///mlflow.db"])
