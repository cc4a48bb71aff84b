"""Gradients added in place are the gradients that autograd would have carried."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from kl_comedy.models import in_place_gradients as room
from kl_comedy.models.in_place_gradients import adds_in_place, adopt_embeddings, in_place
from kl_comedy.models.logprobs import token_pass

VOCABULARY, PADDING = 300, 7


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch):
    monkeypatch.setattr(room, "LARGE", 100)


def model(*, tied=True, dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        pad_token_id=PADDING,
        attn_implementation="sdpa",
    )
    made = LlamaForCausalLM(config).to(dtype)
    adopt_embeddings(made)
    return made


def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (4, 9), generator=generator)
    ids[:, 2] = PADDING
    return {
        "prompt_ids_BP": ids[:, :4],
        "prompt_mask_BP": torch.ones(4, 4),
        "ids_BT": ids[:, 4:],
        "mask_BT": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]),
    }


def loss_of(made, *, on, chunk=700, share=True):
    with in_place(on):
        passed = token_pass(made, **batch(), temperature=1.0, chunk_elements=chunk, share_prompt=share)
    return (passed.logp_BT * torch.linspace(-1, 2, 20).view(4, 5)).sum()


def gradients(made):
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("chunk", [1, 700, 10**6])
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_those_of_autograd(tied, chunk, share):
    made = model(tied=tied)
    ours, plain = copy.deepcopy(made), made
    for _ in range(2):  # a second micro-batch adds to the first
        loss_of(ours, on=True, chunk=chunk, share=share).backward()
        loss_of(plain, on=False, chunk=chunk, share=share).backward()
    want = gradients(plain)
    for name, found in gradients(ours).items():
        torch.testing.assert_close(found, want[name], rtol=1e-5, atol=1e-6, msg=name)


def test_autograd_carries_nothing_for_the_matrix():
    made = model()
    weight = made.get_input_embeddings().weight
    seen = []
    weight.register_hook(lambda grad: seen.append(grad is not None))
    loss_of(made, on=True).backward()
    assert weight.grad is not None and not any(seen)
    loss_of(made, on=False).backward()
    assert seen[-1]


class Made(TorchDispatchMode):
    """Counts tensors of one shape as they are made."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view and not str(func).endswith("_.default"):
            self.count += out.shape == self.shape
        return out


def test_a_backward_pass_makes_no_second_matrix():
    made = model()
    weight = made.get_input_embeddings().weight
    counts = {}
    for on in (True, False):
        weight.grad = torch.zeros_like(weight)
        loss = loss_of(made, on=on)
        with Made(weight.shape) as seen:
            loss.backward()
        counts[on] = seen.count
    assert counts[True] == 0 < counts[False]


def test_outside_of_it_gradients_can_be_asked_for():
    made = model()
    weight = made.get_input_embeddings().weight
    (found,) = torch.autograd.grad(loss_of(made, on=False), weight)
    assert weight.grad is None and found.abs().sum() > 0


def test_a_frozen_matrix_gets_no_gradient():
    made = model()
    weight = made.get_input_embeddings().weight
    weight.requires_grad_(False)
    loss_of(made, on=True).backward()
    assert weight.grad is None


def test_bfloat16_is_left_to_autograd():
    with in_place():
        assert not adds_in_place(nn.Parameter(torch.zeros(300, 16, dtype=torch.bfloat16)))
        assert adds_in_place(nn.Parameter(torch.zeros(300, 16)))
        assert not adds_in_place(torch.zeros(300, 16, requires_grad=True))
    assert not adds_in_place(nn.Parameter(torch.zeros(300, 16)))


def test_small_matrices_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(room, "LARGE", 2**22)
    assert type(model().get_input_embeddings()) is nn.Embedding
