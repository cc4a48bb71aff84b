"""Completions that share a prompt's computation: the numbers and gradients of rows of their own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kl_comedy.models.logprobs import completion_hidden, token_pass
from kl_comedy.models.reference import FrozenReference, PassOptions
from kl_comedy.models.shared_prefix import build_trees, can_share, same_prompt, tree_hidden, worth_sharing

V = 31
SMALL = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


def llama(seed=0, attention="sdpa"):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention)).double().eval()


def qwen():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SMALL)).double().eval()


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_positions=128, initializer_range=0.4)
    return GPT2LMHeadModel(config).double().eval()


def batch(groups=(3, 1, 2), prompt=(20, 5, 11), seed=0, pad=0):
    """Rows of several prompts, interleaved lengths, left- and right-padded with ``pad``."""
    g = torch.Generator().manual_seed(seed)
    rows = [n for n, size in enumerate(groups) for _ in range(size)]
    prompts = [torch.randint(1, V, (size,), generator=g) for size in prompt]
    lengths = torch.randint(1, 8, (len(rows),), generator=g).tolist()
    P, T = max(prompt) + 2, max(lengths) + 2
    out = {
        "prompt_ids_BP": torch.full((len(rows), P), pad),
        "prompt_mask_BP": torch.zeros(len(rows), P, dtype=torch.long),
        "ids_BT": torch.full((len(rows), T), pad),
        "mask_BT": torch.zeros(len(rows), T, dtype=torch.bool),
    }
    for row, (n, length) in enumerate(zip(rows, lengths, strict=True)):
        out["prompt_ids_BP"][row, P - prompt[n] :] = prompts[n]
        out["prompt_mask_BP"][row, P - prompt[n] :] = 1
        out["ids_BT"][row, :length] = torch.randint(1, V, (length,), generator=g)
        out["mask_BT"][row, :length] = True
    return out


def shared(model, inputs):
    families = same_prompt(inputs["prompt_ids_BP"], inputs["prompt_mask_BP"])
    return tree_hidden(model, build_trees(*inputs.values(), families=families))


@pytest.mark.parametrize("make", [llama, qwen, gpt2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("seed", range(3))
def test_hidden_states_are_those_of_separate_rows(make, seed):
    model, inputs = make(), batch(seed=seed)
    with torch.no_grad():
        torch.testing.assert_close(
            shared(model, inputs), completion_hidden(model, *inputs.values(), share_prompt=False), atol=1e-11, rtol=0
        )


def test_eager_attention_takes_the_same_trees():
    """Against sdpa: transformers' own eager mask overflows to NaN in float64 where rows are left-padded.

    Its softmax is in float32.
    """
    inputs = batch()
    with torch.no_grad():
        torch.testing.assert_close(shared(llama(attention="eager"), inputs), shared(llama(), inputs), atol=1e-5, rtol=0)


def test_rows_of_a_prompt_need_not_be_neighbours():
    model, inputs = llama(), batch(groups=(2, 2), prompt=(9, 9))
    mixed = {name: tensor[[0, 2, 1, 3]] for name, tensor in inputs.items()}
    assert same_prompt(mixed["prompt_ids_BP"], mixed["prompt_mask_BP"]) == [[0, 2], [1, 3]]
    with torch.no_grad():
        torch.testing.assert_close(
            shared(model, mixed), completion_hidden(model, *mixed.values(), share_prompt=False), atol=1e-11, rtol=0
        )


@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-10), (llama, 1e-5)], ids=["gpt2", "llama"])
@pytest.mark.parametrize("needs", ["logp", "kl", "forward_kl"])
@pytest.mark.parametrize("chunk", [3 * V, 10**6])
def test_gradients_are_those_of_separate_rows(make, tolerance, needs, chunk):
    """Of the log-probs and of both exact KLs, so of every placement built from them.

    Relative to the gradient's norm; a Llama's norms run in float32 whatever the dtype.
    """
    inputs = batch(groups=(5, 4), prompt=(30, 24))
    gradients = []
    for share in (True, False):
        model = make()
        options = PassOptions(temperature=0.8, chunk_elements=chunk, share_prompt=share)
        reference = FrozenReference(make(seed=7), options).forward_pass(**inputs)
        seen = token_pass(
            model, **inputs, temperature=0.8, chunk_elements=chunk, reference=reference, kl=True, forward_kl=True,
            share_prompt=share,
        )  # fmt: skip
        values_BT = {"logp": seen.logp_BT, "kl": seen.kl_BT, "forward_kl": seen.forward_kl_BT}[needs]
        weights_BT = torch.linspace(-1, 2, values_BT.numel(), dtype=torch.float64).view_as(values_BT)
        (weights_BT * values_BT).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert worth_sharing(make(), inputs["prompt_mask_BP"], inputs["mask_BT"], 2), "the first pass did share"
    assert float((gradients[0] - gradients[1]).norm()) < tolerance * float(gradients[1].norm())


@pytest.mark.parametrize("pad", [0, 17, V - 1])
def test_what_fills_the_padding_changes_nothing(pad):
    model = llama()
    with torch.no_grad():
        assert torch.equal(shared(model, batch(pad=pad)), shared(model, batch(pad=3)))


def test_sharing_pays_for_long_prompts_and_short_completions_only():
    model = llama()

    def worth(prompt, completion, group):
        prompt_mask_BP = torch.ones(2 * group, prompt, dtype=torch.long)
        mask_BT = torch.ones(2 * group, completion, dtype=torch.bool)
        return worth_sharing(model, prompt_mask_BP, mask_BT, 2)

    assert worth(160, 64, 8) and not worth(4, 1000, 8)
    assert not worth_sharing(model, torch.ones(4, 50), torch.ones(4, 5, dtype=torch.bool), 4), "nothing is shared"


def test_architectures_with_other_attention_are_left_alone():
    model = llama()
    assert can_share(model)
    model.config.layer_types = ["sliding_attention", "full_attention"]
    assert not can_share(model)
    model.config.layer_types, model.config._attn_implementation = None, "flash_attention_2"
    assert not can_share(model)
