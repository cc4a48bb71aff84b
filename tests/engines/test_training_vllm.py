"""Short runs on the pocket policy with vLLM as sampler: on-policy from the first update on, and after a resume."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from commands import assert_resumed
from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed
from kl_comedy.training.callbacks import CheckpointCallback
from kl_comedy.training.run import train

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
BACKENDS = ["vllm", pytest.param("vllm_server", marks=pytest.mark.slow)]
"""Servers are started twice here, most of a minute each; without this test test_servers.py has them anyway."""
GAP = 1e-4
"""Nats: the largest |trainer - sampler| log-prob of a token drawn with the weights it is used on."""


SHORT = [
    "model.options={preset: tiny, heads: 2}",
    "train.steps=3",
    "train.eval_every=0",
    "eval.at_start=false",
    "data.eval.heldout.limit=4",
    "optimizer.lr=0.01",
    "rollout.batch_sequences=16",
    "kl.0.reference=initial",
]


def run(tmp_path, backend, *overrides):
    config = load_config(TINY, [f"output={tmp_path}", f"rollout.backend={backend}", *SHORT, *overrides])
    return train(config, console=Console(file=io.StringIO(), width=200), command="kl-comedy train tiny.yaml")


def updates(folder):
    """The metrics of each update, by its number; not those of evaluations."""
    metrics = {}
    for line in (folder / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        is_update = event.get("kind") == "metrics" and "policy/behaviour_gap_max" in event["data"]
        if is_update:
            metrics[event["step"]] = event["data"]
    return metrics


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_is_on_policy_and_goes_on_where_it_was_stopped(tmp_path, backend, monkeypatch):
    save = CheckpointCallback.save

    def save_and_stop(self, trainer, version):
        save(self, trainer, version)
        if version == 2:
            raise KeyboardInterrupt

    # As by Ctrl-C, right after the checkpoint of update 2.
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCallback, "save", save_and_stop)
        with pytest.raises(RunFailed, match="interrupted at update 2"):
            run(tmp_path, backend)
    outcome = run(tmp_path, backend, "resume=auto")
    assert outcome.summary["status"] == "FINISHED"
    assert_resumed(tmp_path, at=2)
    metrics = updates(outcome.run.path)
    assert sorted(metrics) == [1, 2, 3]
    assert metrics[1]["kl/exact_reverse_token"] == 0.0
    assert metrics[3]["kl/exact_reverse_token"] > 1e-4, "the policy moved, so an engine left behind would show"
    for step in metrics.values():
        assert step["policy/behaviour_gap_max"] < GAP
        assert step["policy/staleness"] == 0.0


@pytest.mark.slow  # as test_weight_transfer.py has it, over two ranks
def test_asynchronous_sampling_takes_a_server_beside_the_learner(tmp_path):
    """It takes each published version, and stays within the bound.

    Samples of equal weights have equal log-probs; older ones, with this learning rate, do not.
    """
    outcome = run(tmp_path, "vllm", "lag.mode=async", "lag.max_steps=1", "train.steps=5")
    assert outcome.summary["status"] == "FINISHED"
    metrics = updates(outcome.run.path)
    assert sorted(metrics) == [1, 2, 3, 4, 5]
    assert metrics[1]["policy/staleness"] == 0.0
    assert metrics[1]["policy/behaviour_gap_max"] < GAP
    for update, values in metrics.items():
        is_on_policy = values["policy/staleness"] == 0.0
        assert (values["policy/behaviour_gap_max"] < GAP) == is_on_policy, update
    oldest = max(values["policy/staleness"] for values in metrics.values())
    assert oldest <= 1
    assert oldest > 0, "nothing was drawn ahead"
