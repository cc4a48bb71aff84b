"""Write results/shipped_configs/runs.csv: one row per finished run of the given MLflow stores.

python research/scripts/collect_results.py sqlite:///mlflow.db [more stores ...]
"""

import sys
from pathlib import Path

import pandas as pd

from kl_comedy.results.runs import runs_frame, short

COLUMNS = (
    "run_id",
    "params.name",
    "params.seed",
    "tags.kl.label",
    "tags.kl.regime",
    "tags.kl.0.verdict",
    "tags.config.hash",
    "tags.git.commit",
    "tags.git.dirty",
    "tags.reference.hash",
    "tags.data.hash.train",
    "params.train.steps",
    "duration_s",
    "metrics.eval/heldout/reward",
    "metrics.train/reward",
    "metrics.kl/k1_reverse_sequence",
    "metrics.kl/exact_reverse_sequence",
    "metrics.policy/behaviour_gap_max",
)
"""Written under their short names, which `kl-comedy results verify` reads."""


def main(uris: list[str]) -> None:
    frames = [runs_frame(uri) for uri in uris]
    runs = pd.concat(frames, ignore_index=True)
    runs = runs[runs["status"] == "FINISHED"].sort_values(["params.name", "params.seed"])
    # A metric that no run recorded has no column.
    columns = [name for name in COLUMNS if name in runs]
    target = Path(__file__).parents[2] / "results" / "shipped_configs" / "runs.csv"
    runs[columns].rename(columns=short).to_csv(target, index=False)
    print(f"{len(runs)} runs in {target}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["sqlite:///mlflow.db"])
