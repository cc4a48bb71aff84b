"""A run applies the coefficient of each update exactly once, and logs the one it applied."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kl_comedy.config import load_config
from kl_comedy.kl import BetaSchedule
from kl_comedy.training.run import train

TINY = Path(__file__).with_name("tiny.yaml")
STEPS = 4


def test_each_update_uses_and_logs_the_beta_of_its_step(tmp_path):
    schedule = BetaSchedule(start=0.4, end=0.0, steps=8)
    overrides = [
        # the second term moves the policy, so that the first has something to measure
        "kl=[{estimator: k2, placement: loss}, {estimator: k1, placement: loss}]",
        "kl.0.beta={start: 0.4, end: 0.0, steps: 8}",
        f"train.steps={STEPS}",
        "train.eval_every=0",
        "eval.at_start=false",
        "eval.at_end=false",
        "rollout.max_new_tokens=6",
        "model.options.warmstart_steps=5",
        f"output={tmp_path}",
    ]
    train(load_config(TINY, overrides), console=Console(file=io.StringIO()), command="train")
    (spool,) = tmp_path.glob("*/spool.jsonl")
    metrics = {}
    for line in map(json.loads, spool.read_text().splitlines()):
        if line.get("kind") == "metrics":
            metrics.setdefault(line["step"], {}).update(line["data"])
    updates = [metrics[step] for step in sorted(metrics) if "beta/0" in metrics[step]]
    assert [update["beta/0"] for update in updates] == [schedule.at(step) for step in range(STEPS)]
    for update in updates:
        kl_part = update["beta/0"] * update["kl/k2_reverse_token"]
        assert update["train/loss_kl_0"] == pytest.approx(kl_part, rel=1e-4, abs=1e-12)
    assert updates[-1]["kl/k2_reverse_token"] > 1e-6, "the policy moved"
