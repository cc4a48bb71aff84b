"""Runs whose sampler truncates: the learner renormalizes over the tokens that it kept."""

import math

import pytest
import torch

import memory_engines
from dialogues import DIALOGUES
from kl_comedy.config import load_config
from kl_comedy.config.schema import RolloutConfig
from kl_comedy.models import load_model
from kl_comedy.records import Problem, Prompt, Reward, Scored
from kl_comedy.rollouts import Sampling, build_hf, sampling_from
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.experience import TrainingPrompts
from kl_comedy.training.packing import Packer, policy_inputs
from passes import token_pass
from training_runs import SHORT, TINY, go, killed_then_resumed, metrics_of, weights_of

assert memory_engines, "the backend of tests that is registered by its import"

TOP_P = ["rollout.truncation={top_p: 0.8, top_k: 6}", "rollout.temperature=1.5"]
VARIANTS = {
    "own loop": [],
    "library's loop": ["rollout.options={loop: library}"],
    "a prompt computed for each row": ["model.share_prompt=false"],
    "exact KL in the loss": ["kl=[{estimator: exact, placement: loss, beta: 0.1}]"],
    "to the sampler": ["kl=[{estimator: k3, placement: loss, reference: sampler}]"],
    "to a moving average": ["kl=[{estimator: exact, placement: reward, reference: ema, baseline: own}]"],
    "recomputed old policy": [
        "algorithm.policy_loss=ppo_clip",
        "algorithm.proximal=recomputed",
        "algorithm.updates_per_batch=2",
    ],
    "critic": ["algorithm.advantage=gae"],
    "dialogues": DIALOGUES,
    "LoRA": ["model.lora={rank: 2}"],
    "engines beside the trainer": ["lag.mode=async", "rollout.backend=memory"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_ratios_of_fresh_samples_are_one(tmp_path, name):
    metrics = metrics_of(go(tmp_path, *SHORT, *TOP_P, *VARIANTS[name]).run)
    assert metrics[1, "policy/mismatch_max"] < 2e-6
    assert metrics[1, "policy/ess"] == pytest.approx(1.0, abs=1e-6)
    assert 0.8 < metrics[1, "policy/kept_mass"] < 0.999
    # Policy and reference are one: what is left is the mass that the truncation takes from the reference.
    assert metrics[1, "kl/exact_reverse_token"] == pytest.approx(metrics[1, "kl/truncation_token"], abs=1e-6)
    assert metrics[1, "kl/truncation_token"] > 0.01
    assert (1, "kl/exact_forward_token") not in metrics, "infinite"
    assert all(math.isfinite(value) for value in metrics.values())


def test_without_truncation_nothing_is_said_of_it(tmp_path):
    names = {name for _, name in metrics_of(go(tmp_path, *SHORT).run)}
    assert "kl/exact_forward_token" in names
    assert not names & {"policy/kept_mass", "kl/truncation_token"}


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_sets_in_its_queue(tmp_path):
    settings = [*SHORT, *TOP_P, "lag.mode=replayed", "lag.steps=2", "train.steps=5"]
    whole = go(tmp_path / "whole", *settings).run
    resumed = killed_then_resumed(tmp_path / "killed", settings, at=2).run
    assert weights_of(resumed) == weights_of(whole)


@pytest.fixture(scope="module")
def drawn():
    """The tiny policy, and completions that it drew from its likeliest tokens."""
    config = load_config(TINY, TOP_P)
    loaded = load_model(config.model)
    prompts = []
    for text in ("1+2=", "3+45="):
        ids = tuple(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
        prompts.append(Prompt(problem=Problem(id=text, text=text, answer=""), text=text, token_ids=ids))
    sampling = sampling_from(config.rollout)
    rollouts = build_hf(RolloutConfig(), loaded=loaded).generate(prompts, group_size=5, sampling=sampling, seed=1)
    return config, loaded, prompts, [Scored(rollout=rollout, reward=Reward(value=0.0)) for rollout in rollouts]


def packed(loaded, rows, **changes):
    packer = Packer(budget=10**6, pad_id=loaded.tokenizer.pad_token_id, device=loaded.device)
    return packer.pack(rows, range(len(rows)), **changes)


def test_a_learner_that_does_not_renormalize_has_the_kept_mass_as_its_ratio(drawn):
    """At every token, so that over a completion the masses multiply."""
    _, loaded, _, rows = drawn
    inputs = policy_inputs(packed(loaded, rows))
    sets = inputs.pop("kept")
    inputs.pop("sampler_top")
    behaviour_logp_BT = packed(loaded, rows).behaviour_logp_BT
    with torch.no_grad():
        whole = token_pass(loaded.model, **inputs, temperature=1.5, chunk_elements=1000)
        replayed = token_pass(loaded.model, **inputs, kept=sets, log_kept=True, temperature=1.5, chunk_elements=1000)
    mask_BT = inputs["mask_BT"]
    log_ratio_N = (whole.logp_BT - behaviour_logp_BT)[mask_BT]
    assert log_ratio_N.min() < -0.1
    torch.testing.assert_close(log_ratio_N, replayed.log_kept_BT[mask_BT], atol=1e-5, rtol=0)
    torch.testing.assert_close(replayed.logp_BT[mask_BT], behaviour_logp_BT[mask_BT], atol=1e-5, rtol=0)


def test_rows_come_back_from_plain_data_with_their_sets(drawn):
    config, _, prompts, rows = drawn
    store = TrainingPrompts(config, prompts, SINGLE_PROCESS)
    state = store.pack(rows)
    assert all(type(row["kept"]) is tuple for row in state), "a checkpoint is read without our classes"
    for row, unpacked in zip(rows, store.unpack(state), strict=True):
        for before, after in zip(row.rollout.kept, unpacked.rollout.kept, strict=True):
            assert torch.equal(before, after)


def test_rows_of_which_some_have_no_sets_are_no_batch(drawn):
    _, loaded, prompts, rows = drawn
    sampling = Sampling(temperature=1.0, max_new_tokens=3)
    (whole, *_) = build_hf(RolloutConfig(), loaded=loaded).generate(prompts, group_size=1, sampling=sampling, seed=0)
    mixed = [*rows, Scored(rollout=whole, reward=Reward(value=0.0))]
    with pytest.raises(ValueError, match="10 of 11 rollouts have the sets that truncated sampling kept"):
        packed(loaded, mixed)
