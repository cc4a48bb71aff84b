"""Draws the frontiers, plane.svg and heatmap.svg from export.parquet, which has the final values of every run.

The export lacks first values. A run counts as collapsed where its held-out reward ended below 0.2, about half of the
warm start's, and below 0.199 with seed 3: the counts of each row are then those of core.md. Below 0.191 with seed 3,
the rows of updates.md of which none, some or all collapsed are those of its table.
"""

from pathlib import Path

from kl_comedy.results.figures import save_figure
from kl_comedy.results.plots import frontier, heatmap
from kl_comedy.results.runs import BETA, FAMILY, read_runs, sort_by_groups

HERE = Path(__file__).parent
REWARD, KL, RATE = "eval/heldout/reward", "metrics.eval/heldout/kl/exact_reverse_sequence", "params.optimizer.lr"

runs = read_runs(HERE / "export.parquet")
core = runs[runs["tags.sweep"] == "study_core"]
lowest = core["params.seed"].map({"3": 0.199}).fillna(0.2)
core = sort_by_groups(core.assign(collapsed=core[f"metrics.{REWARD}"] < lowest), [RATE, FAMILY, BETA])
save_figure(frontier(core, [FAMILY], [REWARD], KL, [RATE]), HERE / "frontier.svg")
save_figure(frontier(core, [FAMILY], [REWARD], KL, [RATE], certificates=True), HERE / "plane.svg")
save_figure(heatmap(core, [REWARD], [RATE]), HERE / "heatmap.svg")

updates = runs[runs["tags.sweep"] == "study_updates"]
lowest = updates["params.seed"].map({"3": 0.191}).fillna(0.2)
groups = [RATE, "params.algorithm.updates_per_batch", FAMILY]
updates = sort_by_groups(updates.assign(collapsed=updates[f"metrics.{REWARD}"] < lowest), groups)
save_figure(frontier(updates, [FAMILY], [REWARD], KL, groups[:2]), HERE / "frontier_updates.svg")
