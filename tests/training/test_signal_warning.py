"""A run whose rewards say nothing is warned of once, with a completion to look at."""

import logging
from types import SimpleNamespace

import pytest

from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.callbacks import SILENT_UPDATES, SignalWarning
from kl_comedy.training.metrics import row_metrics


def scored(value, group):
    prompt = Prompt(problem=Problem(id="a", text="1+1", answer="2"), text="1+1", token_ids=(1,))
    tokens = {"completion_ids": (1, 2), "logps": (-1.0, -1.0), "versions": (0, 0), "text": "no idea"}
    rollout = Rollout(prompt=prompt, group_id=group, **tokens, stop_reason="eos")
    return Scored(rollout=rollout, reward=Reward(value=value, status="unparseable"))


def warnings_after(batches, caplog):
    """The lines that the callback logs over updates with these rewards, groups of equal size."""
    watch = SignalWarning()
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        for version, groups in enumerate(batches, 1):
            rows = []
            for group, values in enumerate(groups):
                rows += [scored(value, group) for value in values]
            module = SimpleNamespace(
                version=version, last_metrics=row_metrics(rows), last_batch=SimpleNamespace(rows=rows)
            )
            watch.on_train_batch_end(None, module, None, None, 0)
    return [record.getMessage() for record in caplog.records]


def test_equal_rewards_in_every_group_are_said_once_with_a_completion(caplog):
    equal_in_groups = [[0.0, 0.0], [1.0, 1.0]]
    (line,) = warnings_after([equal_in_groups] * (2 * SILENT_UPDATES), caplog)
    assert "mean 0.500" in line
    assert "'no idea'" in line
    assert "'2'" in line
    assert f"update {SILENT_UPDATES}:" in line


NEARLY_SILENT = [[[0.0, 0.0], [0.0, 0.0]]] * (SILENT_UPDATES - 1)
"""Updates whose rewards say nothing, one fewer than are warned of."""
WITH_SIGNAL = [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "batches",
    [
        NEARLY_SILENT,
        [*NEARLY_SILENT, WITH_SIGNAL] * 3,
        [[[0.0], [1.0], [0.0]]] * (2 * SILENT_UPDATES),
    ],
    ids=["too few updates", "a signal now and then", "one completion per prompt, rewards differ"],
)
def test_a_run_with_a_signal_is_not_warned_of(batches, caplog):
    assert warnings_after(batches, caplog) == []


def test_with_one_completion_per_prompt_the_whole_batch_must_be_equal(caplog):
    assert len(warnings_after([[[0.0], [0.0]]] * SILENT_UPDATES, caplog)) == 1
