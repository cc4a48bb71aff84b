"""A run applies the coefficient of each update exactly once, and logs the one it applied."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kl_comedy.kl import BetaSchedule

TINY = Path(__file__).with_name("tiny.yaml")
STEPS = 4


def test_each_update_uses_and_logs_the_beta_of_its_step(tmp_path):
    schedule = BetaSchedule(start=0.4, end=0.0, steps=8)
    overrides = [
        "kl=[{estimator: k2, placement: loss, beta: {start: 0.4, end: 0.0, steps: 8}}]",
        f"train.steps={STEPS}",
        "train.eval_every=0",
        "eval.at_start=false",
        "eval.at_end=false",
        "rollout.max_new_tokens=6",
        "model.options.warmstart_steps=5",
        f"output={tmp_path}",
    ]
    command = [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", "train", TINY, *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    (spool,) = tmp_path.glob("*/spool.jsonl")
    metrics = {}
    for line in map(json.loads, spool.read_text().splitlines()):
        if line.get("kind") == "metrics":
            metrics.setdefault(line["step"], {}).update(line["data"])
    for step in range(STEPS):
        beta, kl = metrics[step]["beta/0"], metrics[step]["kl/k2_reverse_token"]
        assert beta == schedule.at(step)
        assert metrics[step]["train/loss_kl_0"] == pytest.approx(beta * kl, rel=1e-4, abs=1e-12), step
    assert metrics[STEPS - 1]["kl/k2_reverse_token"] > 1e-6, "the policy moved"
