"""References: identity, what they measure, how the moving ones move and come back from a checkpoint."""

import copy
import io
import math

import pytest
import torch

from kl_comedy.config.schema import Config, LoraConfig, ModelConfig, ReferenceConfig, RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.models import LoadedModel, build_reference, weights_hash
from kl_comedy.models.lora import add_lora
from passes import token_pass
from small_llama import V, batch, llama

OPTIONS = {"temperature": 0.7, "chunk_elements": 4 * V}


def move_weights(model, seed=0, scale=0.1):
    """Move every trained parameter, as an optimizer would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


@torch.no_grad()
def logps(model, inputs):
    return token_pass(model, **inputs, **OPTIONS).logp_BT


def make(kind, model, **settings):
    config = Config(
        reference=ReferenceConfig(**settings),
        rollout=RolloutConfig(temperature=0.7),
        model=ModelConfig(head_chunk_elements=4 * V),
    )
    loaded = LoadedModel(model=model, tokenizer=None, device=torch.device("cpu"), source="test")
    return build_reference(kind, loaded, config)


# --- the initial reference --------------------------------------------------------------------------------------------
def test_the_frozen_reference_stays_where_the_run_began():
    model = llama()
    inputs, _ = batch()
    logps_before = logps(model, inputs)
    hash_before = weights_hash(model)
    reference = make("initial", model)
    move_weights(model)
    assert not reference.moving
    assert torch.equal(reference.forward_pass(**inputs).logp_BT, logps_before)
    assert reference.hash == hash_before
    assert weights_hash(model) != hash_before


def test_the_frozen_reference_has_no_gradients_and_leaves_those_of_the_policy():
    model = llama()
    reference = make("initial", model)
    assert [name for name, parameter in reference.model.named_parameters() if parameter.requires_grad] == []
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == []


@pytest.mark.parametrize("tied", [False, True])
def test_the_copy_of_a_model_is_tied_as_the_model(tied):
    copied = make("initial", llama(tied=tied)).model
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) is tied


class AdaptedRun:
    """A base model, its log-probs and hash before the adapter, and a reference built with the adapter."""

    def __init__(self):
        base = llama()
        self.inputs, _ = batch()
        self.base_logps = logps(base, self.inputs)
        self.base_hash = weights_hash(base)
        self.model = add_lora(base, LoraConfig(rank=2))
        self.reference = make("initial", self.model)

    def kl_to_the_reference(self):
        reference = self.reference.forward_pass(**self.inputs)
        return token_pass(self.model, **self.inputs, **OPTIONS, reference=reference, kl=True).kl_BT


def test_the_reference_of_a_fresh_adapter_is_the_base_model():
    run = AdaptedRun()
    assert torch.equal(run.reference.forward_pass(**run.inputs).logp_BT, run.base_logps)
    assert run.reference.hash == run.base_hash
    assert run.kl_to_the_reference().count_nonzero() == 0, "a fresh adapter is the identity, bit by bit"


def test_the_reference_of_a_trained_adapter_is_still_the_base_model():
    run = AdaptedRun()
    move_weights(run.model)
    assert torch.equal(run.reference.forward_pass(**run.inputs).logp_BT, run.base_logps)
    assert weights_hash(run.model, base_only=True) == run.base_hash
    assert weights_hash(run.model) != run.base_hash
    assert float(run.kl_to_the_reference().detach().sum()) > 1e-3


def test_a_kl_to_the_base_model_has_gradients_of_the_adapter_only():
    run = AdaptedRun()
    move_weights(run.model)
    run.kl_to_the_reference().sum().backward()
    with_gradient = [name for name, parameter in run.model.named_parameters() if parameter.grad is not None]
    assert with_gradient
    assert [name for name in with_gradient if "lora_" not in name] == []


# --- ema ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lora", [False, True], ids=["whole model", "adapter"])
def test_ema_is_the_exponential_average(lora):
    model = llama()
    inputs, _ = batch()
    if lora:
        model = add_lora(model, LoraConfig(rank=2))
    averages = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    reference = make("ema", model, ema_decay=0.75)
    for step in (1, 2, 3):
        move_weights(model, seed=step)
        reference.update(model, step)
        weights = dict(model.named_parameters())
        for name, average in averages.items():
            averages[name] = 0.75 * average + 0.25 * weights[name].detach()

    of_reference = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        shares_memory = parameter.data_ptr() == of_reference[name].data_ptr()
        if name in averages:
            torch.testing.assert_close(of_reference[name], averages[name], atol=1e-12, rtol=1e-12)
            assert not shares_memory, name
        else:
            assert shares_memory, f"{name}: the base of an adapter is not copied"

    averaged_model = copy.deepcopy(model)
    averaged_model.load_state_dict({**averaged_model.state_dict(), **averages})
    actual_BT = reference.forward_pass(**inputs).logp_BT
    torch.testing.assert_close(actual_BT, logps(averaged_model, inputs), atol=1e-9, rtol=0)


def test_a_bfloat16_ema_moves_although_each_step_is_below_the_resolution():
    """A step of 0.001 from 1 is lost in bfloat16, whose next number is 1.0078."""
    model = llama(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    reference = make("ema", model, ema_decay=0.999)
    with torch.no_grad():
        model.lm_head.weight.fill_(2.0)
    for step in range(1, 201):
        reference.update(model, step)
    assert float(reference.model.lm_head.weight.float().mean()) == pytest.approx(2 - 0.999**200, abs=0.005)


# --- periodic -----------------------------------------------------------------------------------------------------
def test_periodic_jumps_at_multiples_only():
    model = llama()
    reference = make("periodic", model, period=3)
    hash_before = reference.hash
    hashes = {hash_before}
    jumps = []
    for step in range(1, 7):
        move_weights(model, seed=step)
        reference.update(model, step)
        is_the_policy = reference.hash == weights_hash(model)
        has_moved = reference.hash != hash_before
        assert is_the_policy == has_moved, "it moves to the policy, or not at all"
        if has_moved:
            jumps.append(step)
        hash_before = reference.hash
        hashes.add(hash_before)
    assert jumps == [3, 6]
    assert len(hashes) == 3, "the start and two jumps, each somewhere else"


@pytest.mark.parametrize(("period", "expected"), [(None, [2, 5]), (3, [2, 3, 5])], ids=["bound", "bound and period"])
def test_periodic_also_jumps_where_the_kl_to_it_exceeds_its_bound(period, expected):
    """A KL of exactly the bound and one that was not measured do not count."""
    model = llama()
    reference = make("periodic", model, period=period, max_kl=0.1)
    jumps = []
    for step, measured_kl in enumerate([0.1, 0.2, 0.0, math.nan, 0.11], start=1):
        move_weights(model, seed=step)
        if reference.update(model, step, measured_kl):
            jumps.append(step)
        assert (reference.hash == weights_hash(model)) is (step in expected), f"step {step}"
    assert jumps == expected


# --- checkpoints --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["ema", "periodic"])
def test_a_moving_reference_resumes_from_its_checkpoint(kind):
    model = llama(torch.float32)
    inputs, _ = batch()
    resumed = make(kind, model, period=2, ema_decay=0.9)
    original = make(kind, model, period=2, ema_decay=0.9)
    for step in (1, 2, 3):
        move_weights(model, seed=step)
        original.update(model, step)
    assert resumed.hash != original.hash

    checkpoint = io.BytesIO()
    torch.save(original.state_dict(), checkpoint)
    checkpoint.seek(0)
    resumed.load_state_dict(torch.load(checkpoint, weights_only=True))
    assert resumed.hash == original.hash

    # The next update is the same for both.
    move_weights(model, seed=4)
    original.update(model, 4)
    resumed.update(model, 4)
    assert resumed.hash == original.hash
    assert torch.equal(resumed.forward_pass(**inputs).logp_BT, original.forward_pass(**inputs).logp_BT)


def test_the_checkpoint_of_another_model_is_refused():
    reference = make("ema", llama())
    state = reference.state_dict()
    state["weights"].pop("lm_head.weight")
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        reference.load_state_dict(state)


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'initial'"):
        make("inital", llama())


# --- hashes -------------------------------------------------------------------------------------------------------
STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}


@pytest.mark.parametrize(
    "same",
    [dict(reversed(STATE.items())), {**STATE, "a": STATE["a"].t().contiguous().t()}],
    ids=["another order", "another layout in memory"],
)
def test_the_hash_depends_on_nothing_else(same):
    assert weights_hash(same) == weights_hash(STATE)


@pytest.mark.parametrize(
    "other",
    [
        {**STATE, "a": STATE["a"].view(3, 2)},
        {**STATE, "a": STATE["a"].double()},
        {**STATE, "b": torch.tensor([1.0, 1.0000001])},
        {"a": STATE["a"], "c": STATE["b"]},
        {"s": torch.tensor(1.0), "e": torch.empty(0)},
    ],
    ids=["shape", "dtype", "value", "name", "a scalar and nothing"],
)
def test_the_hash_depends_on_names_dtypes_shapes_and_values(other):
    assert weights_hash(other) != weights_hash(STATE)
