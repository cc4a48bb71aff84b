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


def shake(model, seed=0, scale=0.1):
    """Move every trained parameter, as an optimizer would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += scale * torch.randn(p.shape, dtype=p.dtype, generator=g)


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


def test_the_frozen_reference_stays_where_the_run_began():
    model, (inputs, _) = llama(), batch()
    before, identity = logps(model, inputs), weights_hash(model)
    reference = make("initial", model)
    shake(model)
    assert not reference.moving
    assert torch.equal(reference.forward_pass(**inputs).logp_BT, before)
    assert reference.hash == identity != weights_hash(model)
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert all(p.requires_grad for p in model.parameters())
    for tied in (False, True):
        copied = make("initial", llama(tied=tied)).model
        assert (copied.lm_head.weight is copied.model.embed_tokens.weight) is tied


def test_the_lora_reference_is_the_base_model_before_and_during_training():
    base, (inputs, _) = llama(), batch()
    plain, identity = logps(base, inputs), weights_hash(base)
    model = add_lora(base, LoraConfig(rank=2))
    reference = make("initial", model)
    start = reference.forward_pass(**inputs)
    assert torch.equal(start.logp_BT, plain)
    assert reference.hash == identity
    fresh = token_pass(model, **inputs, **OPTIONS, reference=start, kl=True)
    assert fresh.kl_BT.count_nonzero() == 0, "a fresh adapter is the identity, bit by bit"
    shake(model)
    after = reference.forward_pass(**inputs)
    assert torch.equal(after.logp_BT, plain)
    assert weights_hash(model, base_only=True) == identity != weights_hash(model)
    moved = token_pass(model, **inputs, **OPTIONS, reference=after, kl=True)
    assert float(moved.kl_BT.detach().sum()) > 1e-3
    moved.kl_BT.sum().backward()
    graded = {name for name, p in model.named_parameters() if p.grad is not None}
    assert graded and all("lora_" in name for name in graded)


@pytest.mark.parametrize("lora", [False, True])
def test_ema_is_the_exponential_average(lora):
    model, (inputs, _) = llama(), batch()
    model = add_lora(model, LoraConfig(rank=2)) if lora else model
    expected = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    reference = make("ema", model, ema_decay=0.75)
    for step in range(1, 4):
        shake(model, seed=step)
        reference.update(model, step)
        now = dict(model.named_parameters())
        expected = {name: 0.75 * average + 0.25 * now[name].detach() for name, average in expected.items()}
    copied = dict(reference.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(copied[name], expected[name], atol=1e-12, rtol=1e-12)
        assert (parameter.data_ptr() == copied[name].data_ptr()) is (name not in expected), "the base is shared"
    twin = copy.deepcopy(model)
    twin.load_state_dict({**twin.state_dict(), **expected})
    torch.testing.assert_close(reference.forward_pass(**inputs).logp_BT, logps(twin, inputs), atol=1e-9, rtol=0)


def test_a_bfloat16_ema_moves_although_each_step_is_below_the_resolution():
    model = llama(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.fill_(1.0)
    reference = make("ema", model, ema_decay=0.999)
    with torch.no_grad():
        model.lm_head.weight.fill_(2.0)
    for step in range(1, 201):
        reference.update(model, step)
    assert float(reference.model.lm_head.weight.float().mean()) == pytest.approx(2 - 0.999**200, abs=0.005)


def test_periodic_jumps_at_multiples_only():
    model = llama()
    reference = make("periodic", model, period=3)
    hashes = [reference.hash]
    for step in range(1, 7):
        shake(model, seed=step)
        reference.update(model, step)
        hashes.append(reference.hash)
        assert (hashes[-1] == weights_hash(model)) is (step in (3, 6))
    assert len(set(hashes)) == 3 and hashes[0] == hashes[2] != hashes[3] == hashes[5] != hashes[6]


def test_periodic_also_jumps_where_the_kl_to_it_exceeds_its_bound():
    for period, jumps in ((None, [2, 5]), (3, [2, 3, 5])):
        model, moved = llama(), []
        reference = make("periodic", model, period=period, max_kl=0.1)
        for step, measured in enumerate([0.1, 0.2, 0.0, math.nan, 0.11], start=1):
            shake(model, seed=step)
            moved += [step] if reference.update(model, step, measured) else []
            assert (reference.hash == weights_hash(model)) is (step in jumps)
        assert moved == jumps


@pytest.mark.parametrize("kind", ["ema", "periodic"])
def test_a_moving_reference_resumes_from_its_checkpoint(kind):
    model, (inputs, _) = llama(torch.float32), batch()
    other = make(kind, model, period=2, ema_decay=0.9)
    reference = make(kind, model, period=2, ema_decay=0.9)
    for step in (1, 2, 3):
        shake(model, seed=step)
        reference.update(model, step)
    buffer = io.BytesIO()
    torch.save(reference.state_dict(), buffer)
    buffer.seek(0)
    assert other.hash != reference.hash
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert other.hash == reference.hash
    shake(model, seed=4)
    for resumed in (reference, other):
        resumed.update(model, 4)
    assert other.hash == reference.hash
    assert torch.equal(other.forward_pass(**inputs).logp_BT, reference.forward_pass(**inputs).logp_BT)


def test_another_model_and_unknown_kinds_are_refused():
    reference = make("ema", llama())
    state = reference.state_dict()
    state["weights"].pop("lm_head.weight")
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        reference.load_state_dict(state)
    with pytest.raises(UserError, match="did you mean 'initial'"):
        make("inital", llama())


def test_the_hash_depends_on_names_dtypes_shapes_and_values_only():
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}
    first = weights_hash(state)
    assert first == weights_hash(dict(reversed(state.items())))
    assert first == weights_hash({**state, "a": state["a"].t().contiguous().t()})
    for other in (
        {**state, "a": state["a"].view(3, 2)},
        {**state, "a": state["a"].double()},
        {**state, "b": torch.tensor([1.0, 1.0000001])},
        {"a": state["a"], "c": state["b"]},
    ):
        assert weights_hash(other) != first
    assert weights_hash({"s": torch.tensor(1.0), "e": torch.empty(0)}) != first
