"""Small frames of runs to draw, and what a figure's legend says."""

from itertools import product

import pandas as pd

from kl_comedy.results.runs import with_derived

LABEL = "tags.kl.label"
FAMILY = "tags.kl.family"
BETA = "tags.kl.betas"
LR = "params.optimizer.lr"
FAMILIES = ("k1_reverse_token in loss", "k1_reverse_token in reward total", "k3_reverse_token in loss")


def study(families=FAMILIES, betas=("0.05", "0.1", "1.0"), rates=("0.0001", "0.0004"), free=True, seeds=2):
    """So many seeds of each family, beta and learning rate; with ``free`` also without KL for each rate."""
    labels = [f"{beta} {family}" for family, beta in product(families, betas)]
    if free:
        labels.append("no KL")
    rows = []
    for seed, rate, label in product(range(seeds), rates, labels):
        run = {"run_id": f"{label}|{rate}|{seed}", LABEL: label, LR: rate, "params.name": f"{label}-{rate}"}
        rows.append(run)
    return with_derived(pd.DataFrame(rows))


def curves(frame, value=lambda number, step: step / 10):
    """Two points of each run; ``value`` gives that of a run's number at a step."""
    points = []
    for number, run_id in enumerate(frame["run_id"]):
        for step in (0, 5):
            points.append((run_id, step, value(number, step)))
    return pd.DataFrame(points, columns=["run_id", "step", "value"])


def legend_texts(figure):
    (legend,) = figure.legends
    return legend.get_title().get_text(), [text.get_text() for text in legend.get_texts()]


def frontier_study():
    """Runs of two betas with a reward each, all with the same KL."""
    frame = study(betas=("0.1", "1.0"), rates=("0.1",))
    rewards = [0.4 + number / 100 for number in range(len(frame))]
    return frame.assign(**{"metrics.r": rewards, "metrics.kl": 2.0})
