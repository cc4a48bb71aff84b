"""Each rule about a config's combinations, by its name: settings that break it, and no rule before it."""

import pytest

from kl_comedy.config import load_config
from kl_comedy.config.combinations import RULES
from kl_comedy.errors import UserError
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.sampler import RULES as SAMPLER_RULES

DIALOGUE = "environment={name: calculator, turns: 2}"
REPLAY = ["rollout.backend=replay", "rollout.options={path: a}"]
BROKEN = {
    "name_that_no_folder_has": ["name=../etc"],
    "batch_in_unequal_parts": ["rollout.prompts_per_batch=5", "algorithm.updates_per_batch=2"],
    "group_without_comparison": ["rollout.group_size=1"],
    "lag_of_fresh_samples": ["lag.steps=2"],
    "exact_lag_of_async": ["lag.mode=async", "lag.steps=2"],
    "async_settings_without_async": ["lag.mode=replayed", "lag.max_steps=1"],
    "lag_of_a_part_of_a_batch": ["lag.mode=replayed", "lag.steps=3", "algorithm.updates_per_batch=2"],
    "everything_dropped": ["lag.mode=async", "lag.policy=drop"],
    "in_flight_without_lag": ["lag.mode=async", "lag.in_flight=true"],
    "several_processes_of_single": ["train.devices=2"],
    "batch_that_processes_cannot_share": ["train.strategy=ddp", "train.devices=3"],
    "varlen_without_packed_rows": ["model.attention=varlen"],
    "shards_of_whole_copies": ["train.shards=node"],
    "betas_out_of_range": ["optimizer.betas=[0.9]"],
    "warmup_beyond_the_run": ["optimizer.warmup_steps=100000"],
    "draws_without_refill": ["algorithm.refill_draws=5"],
    "groups_that_no_reward_selects": ["algorithm.groups_without_signal=refill", "algorithm.reward_weight=0"],
    "more_turns_than_tokens": [DIALOGUE, "rollout.max_new_tokens=1"],
    "turn_longer_than_the_dialogue": [DIALOGUE, "environment.turn_tokens=5", "rollout.max_new_tokens=4"],
    "turns_compared_over_the_batch": [DIALOGUE, "environment.credit=turn", "algorithm.advantage=batch_mean"],
    "no_reward": ["rewards=[]"],
    "evaluation_without_problems": ["train.eval_every=1"],
    "lag_of_recorded_rollouts": [*REPLAY, "lag.mode=replayed"],
    "refill_of_recorded_rollouts": [*REPLAY, "algorithm.groups_without_signal=refill"],
    "async_in_the_ranks": ["rollout.backend=in_the_ranks", "lag.mode=async"],
    "in_flight_between_batches": [
        "lag.mode=async",
        "lag.in_flight=true",
        "lag.max_steps=1",
        "rollout.options={loop: library}",
    ],
    "whole_batches_for_several_ranks": ["rollout.backend=vllm", "train.strategy=ddp", "train.devices=2"],
}


@pytest.fixture(autouse=True)
def a_backend_without_an_engine_of_its_kind(monkeypatch):
    monkeypatch.setattr(ROLLOUTS, "_entries", dict(ROLLOUTS._entries))
    ROLLOUTS.register("in_the_ranks", source="this test", summary="Never built.")(lambda config, loaded: None)


def test_every_rule_has_settings_that_break_it():
    assert [rule.__name__ for rule in (*RULES, *SAMPLER_RULES)] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_is_broken_by_its_settings_and_refuses_the_config(name, monkeypatch):
    with pytest.raises(UserError) as refused:
        load_config(None, BROKEN[name])
    # Without the rules the config can be read, and each of them asked.
    monkeypatch.setattr("kl_comedy.config.combinations.RULES", ())
    monkeypatch.setattr("kl_comedy.rollouts.sampler.RULES", ())
    config = load_config(None, BROKEN[name])
    refusals = {rule.__name__: rule(config) for rule in (*RULES, *SAMPLER_RULES)}
    broken = [rule for rule, error in refusals.items() if error is not None]
    assert broken[:1] == [name]
    assert str(refused.value) == str(refusals[name])
