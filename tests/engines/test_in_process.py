"""The engine in this process, on the pocket policy: its draws are the learner's policy, before and after updates."""

import copy
import random

import numpy
import pytest
import torch

from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rollouts import Sampling, build_hf, build_vllm
from small_policies import POCKET, PROMPTS, largest_gap, perturb, pocket

TOLERANCE = 5e-5
"""Nats, float32; see docs/rollouts.md for what was measured."""


def sampling(**changes):
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 20, **changes})


def draw(backend, prompts=PROMPTS, *, group_size=3, seed=0, **changes):
    return backend.generate(prompts, group_size=group_size, sampling=sampling(**changes), seed=seed)


def content(rollouts):
    return [(r.group_id, r.completion_ids, r.versions, r.stop_reason, r.text) for r in rollouts]


@pytest.fixture(scope="module")
def policy():
    return pocket()


@pytest.fixture(scope="module")
def engine(policy):
    """One engine for the module: it takes seconds to start. Tests that change weights restore them."""
    before = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state(), torch.set_num_threads)
    backend = build_vllm(RolloutConfig(backend="vllm", batch_sequences=32, temperature=0.7), loaded=policy)
    assert random.getstate() == before[0]
    assert numpy.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.set_num_threads is before[3]
    yield backend
    backend.close()


@pytest.fixture
def moved(policy, engine):
    """The policy after something like an update; afterwards it, and the engine, are as before."""
    original = copy.deepcopy(policy.model.state_dict())
    perturb(policy.model)
    yield policy
    policy.model.load_state_dict(original)
    engine.update_weights(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_the_learners_at_the_sampling_temperature(policy, engine, temperature):
    rollouts = draw(engine, temperature=temperature)
    assert len(rollouts) == 12
    assert largest_gap(policy, rollouts, temperature) < TOLERANCE
    if temperature != 1.0:
        assert largest_gap(policy, rollouts, 1.0) > 0.01


@pytest.mark.parametrize("changes", [{}, {"stop": ("=",)}, {"stop": (";4", "+")}, {"max_new_tokens": 3}])
def test_greedy_rollouts_are_those_of_the_hf_backend(policy, engine, changes):
    ours = draw(engine, temperature=0.0, **changes)
    theirs = draw(build_hf(RolloutConfig(), loaded=policy), temperature=0.0, **changes)
    assert content(ours) == content(theirs)
    assert [r.prompt for r in ours] == [r.prompt for r in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.logps == pytest.approx(other.logps, abs=TOLERANCE)


def test_every_way_to_end_is_seen(engine):
    rollouts = []
    for seed in range(20):  # draws differ between processors: repeat until every ending has occurred
        rollouts += draw(engine, group_size=16, max_new_tokens=11, stop=("8",), temperature=1.2, seed=seed)
        if {r.stop_reason for r in rollouts} == {"eos", "stop", "length"}:
            break
    assert {r.stop_reason for r in rollouts} == {"eos", "stop", "length"}
    for r in rollouts:
        assert len(r.completion_ids) == len(r.logps) == len(r.versions)
        assert r.text.endswith("8") == (r.stop_reason == "stop")
        assert (len(r.completion_ids) == 11) or r.stop_reason != "length"
        assert "8" not in r.text[:-1]


def test_seeds_decide_and_nothing_global_does(engine):
    torch.manual_seed(1)
    first = draw(engine, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert content(draw(engine, seed=5)) == content(first)
    assert content(draw(engine, seed=6)) != content(first)
    assert not torch.equal(state, torch.get_rng_state())
    same_prompt = [r.completion_ids for r in first if r.prompt.text == "1+2+3="]
    assert len(set(same_prompt)) > 1


def test_after_an_update_the_engine_has_the_learners_weights(engine, moved):
    assert largest_gap(moved, draw(engine)) > 0.05, "the weights moved and the engine should not have noticed yet"
    engine.update_weights(3)
    rollouts = draw(engine)
    assert largest_gap(moved, rollouts) < TOLERANCE
    assert {version for r in rollouts for version in r.versions} == {3}


@pytest.mark.parametrize("lost", ["q_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight"])
def test_a_partial_update_is_caught_by_the_probe(engine, moved, monkeypatch, lost):
    """Each of these leaves vLLM with other weights without a word of its own; only the probe tells."""
    from kl_comedy.rollouts.engines import vllm as module

    def partial(*arguments):
        return ((name, weight) for name, weight in whole(*arguments) if not name.endswith(lost))

    whole = module.full_weights
    monkeypatch.setattr(module, "full_weights", partial)
    with pytest.raises(RunFailed, match=r"version 4: log-probs of the probe differ by"):
        engine.update_weights(4)


def test_prompts_that_do_not_fit_are_refused(engine):
    with pytest.raises(UserError, match="max_new_tokens: got 127; allowed: up to 122"):
        draw(engine, max_new_tokens=127)


def test_what_vllm_cannot_serve_is_one_clear_error():
    from kl_comedy.config.schema import ModelConfig
    from kl_comedy.models import load_model

    narrow = load_model(ModelConfig(source="pocket", options={**POCKET, "heads": 4}))
    with pytest.raises((UserError, RunFailed), match="Unsupported CPU attention"):
        build_vllm(RolloutConfig(backend="vllm"), loaded=narrow)
