"""The engine in this process, on the pocket policy: its draws are the learner's policy, before and after updates."""

import copy
import itertools
import random

import numpy
import pytest
import torch

from kl_comedy.config.schema import RolloutConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rollouts import Sampling, build_hf, build_vllm
from small_policies import POCKET, PROMPTS, largest_gap, perturb, pocket, versions_of

TOLERANCE = 5e-5
"""Nats, float32; see docs/rollouts.md for what was measured."""


def draw(backend, prompts=PROMPTS, *, group_size=3, seed=0, **changes):
    settings = {"temperature": 1.0, "max_new_tokens": 20} | changes
    return backend.generate(prompts, group_size=group_size, sampling=Sampling(**settings), seed=seed)


def content(rollouts):
    """What is drawn, without log-probs."""
    fields = ("group_id", "completion_ids", "versions", "stop_reason", "text")
    return [tuple(getattr(rollout, field) for field in fields) for rollout in rollouts]


@pytest.fixture(scope="module")
def policy():
    return pocket()


@pytest.fixture(scope="module")
def engine(policy):
    """One engine for the module: it takes seconds to start. Tests that change weights restore them.

    Starting it changes no state of random numbers and no function of torch, as vLLM by itself does.
    """
    python_state = random.getstate()
    numpy_state = numpy.random.get_state()[1].tolist()
    torch_state = torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    backend = build_vllm(RolloutConfig(backend="vllm", batch_sequences=32, temperature=0.7), loaded=policy)
    assert random.getstate() == python_state
    assert numpy.random.get_state()[1].tolist() == numpy_state
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.set_num_threads is set_num_threads
    yield backend
    backend.close()


seeds = itertools.count()


@pytest.fixture
def moved(policy, engine):
    """The policy after something like an update; afterwards it, and the engine, are as before.

    Each time it moves elsewhere: a layer that is not sent is filled from freed memory, in which the weights of an
    earlier test may lie.
    """
    original = copy.deepcopy(policy.model.state_dict())
    perturb(policy.model, seed=next(seeds))
    yield policy
    policy.model.load_state_dict(original)
    engine.update_weights(0)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_the_learners_at_the_sampling_temperature(policy, engine, temperature):
    rollouts = draw(engine, temperature=temperature)
    assert len(rollouts) == 12
    assert largest_gap(policy, rollouts, temperature) < TOLERANCE
    # Otherwise the assertion above would hold for any temperature.
    if temperature != 1.0:
        assert largest_gap(policy, rollouts, 1.0) > 0.01


@pytest.mark.parametrize("changes", [{}, {"stop": ("=",)}, {"stop": (";4", "+")}, {"max_new_tokens": 3}])
def test_greedy_rollouts_are_those_of_the_hf_backend(policy, engine, changes):
    rollouts = draw(engine, temperature=0.0, **changes)
    expected_rollouts = draw(build_hf(RolloutConfig(), loaded=policy), temperature=0.0, **changes)
    assert content(rollouts) == content(expected_rollouts)
    for rollout, expected in zip(rollouts, expected_rollouts, strict=True):
        assert rollout.prompt == expected.prompt
        assert rollout.logps == pytest.approx(expected.logps, abs=TOLERANCE)


def test_every_way_to_end_is_seen(engine):
    rollouts = []
    reasons = set()
    for seed in range(20):  # draws differ between processors: repeat until every ending has occurred
        rollouts += draw(engine, group_size=16, max_new_tokens=11, stop=("8",), temperature=1.2, seed=seed)
        reasons = {rollout.stop_reason for rollout in rollouts}
        if reasons == {"eos", "stop", "length"}:
            break
    assert reasons == {"eos", "stop", "length"}
    for rollout in rollouts:
        assert len(rollout.logps) == len(rollout.completion_ids)
        assert len(rollout.versions) == len(rollout.completion_ids)
        assert rollout.text.endswith("8") == (rollout.stop_reason == "stop")
        assert "8" not in rollout.text[:-1]
        if rollout.stop_reason == "length":
            assert len(rollout.completion_ids) == 11


def test_seeds_decide_and_nothing_global_does(engine):
    torch.manual_seed(1)
    first = draw(engine, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert content(draw(engine, seed=5)) == content(first)
    assert content(draw(engine, seed=6)) != content(first)
    assert not torch.equal(state, torch.get_rng_state()), "the draws did not put the first seed back"
    of_one_prompt = {rollout.completion_ids for rollout in first if rollout.prompt.text == "1+2+3="}
    assert len(of_one_prompt) > 1


def test_after_an_update_the_engine_has_the_learners_weights(engine, moved):
    assert largest_gap(moved, draw(engine)) > 0.05, "the weights moved and the engine should not have noticed yet"
    engine.update_weights(3)
    rollouts = draw(engine)
    assert largest_gap(moved, rollouts) < TOLERANCE
    assert versions_of(rollouts) == {3}


@pytest.mark.parametrize("lost", ["q_proj.weight", "up_proj.weight", "lm_head.weight", "embed_tokens.weight"])
def test_a_partial_update_is_caught_by_the_probe(engine, moved, monkeypatch, lost):
    """Each of these leaves vLLM with other weights and raises no error there; only the probe notices."""
    from kl_comedy.rollouts.engines import vllm as module

    full_weights = module.full_weights

    def without_one(*arguments):
        return ((name, weight) for name, weight in full_weights(*arguments) if not name.endswith(lost))

    monkeypatch.setattr(module, "full_weights", without_one)
    with pytest.raises(RunFailed, match=r"version 4: log-probs of the probe differ by"):
        engine.update_weights(4)


def test_prompts_that_do_not_fit_are_refused(engine):
    with pytest.raises(UserError, match="max_new_tokens: got 127; allowed: up to 122"):
        draw(engine, max_new_tokens=127)


def test_what_vllm_cannot_serve_is_one_clear_error():
    from kl_comedy.config.schema import ModelConfig
    from kl_comedy.models import load_model

    narrow = load_model(ModelConfig(source="pocket", options=POCKET | {"heads": 4}))
    with pytest.raises((UserError, RunFailed), match="Unsupported CPU attention"):
        build_vllm(RolloutConfig(backend="vllm"), loaded=narrow)
