"""Completions that share a prompt's computation: the numbers and gradients of rows of their own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kl_comedy.models.attention import ATTENTION_NAME, group_by_prompt, pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.logprobs import completion_hidden, token_pass
from kl_comedy.models.reference import FrozenReference, PassOptions

V = 31
SMALL = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(seed=0, attention="sdpa", **settings):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **settings}, attn_implementation=attention)).double().eval()


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
    assert use_layout_attention(model)
    return packed_hidden(model, pack_batch(*inputs.values()))


def assert_same_as_separate_rows(model, inputs):
    with torch.no_grad():
        separate_NH = completion_hidden(model, *inputs.values(), share_prompt=False)
        torch.testing.assert_close(shared(model, inputs), separate_NH, atol=1e-11, rtol=0)


@pytest.mark.parametrize("make", [llama, qwen, gpt2], ids=lambda make: make.__name__)
def test_hidden_states_are_those_of_separate_rows(make):
    for seed in range(3):
        assert_same_as_separate_rows(make(), batch(seed=seed))


def test_completions_of_one_token_are_not_in_the_line():
    inputs = batch(groups=(1, 1, 1), prompt=(1, 3, 2))
    inputs["mask_BT"][:, 1:] = False
    assert_same_as_separate_rows(llama(), inputs)
    assert pack_batch(*inputs.values()).ids_S.shape == (6,)


def test_query_heads_share_keys_as_the_model_says():
    for heads, kv_heads in ((4, 4), (4, 1), (2, 2)):
        assert_same_as_separate_rows(llama(num_attention_heads=heads, num_key_value_heads=kv_heads), batch())


def test_rows_of_a_prompt_need_not_be_neighbours():
    inputs = batch(groups=(2, 2), prompt=(9, 9))
    mixed = {name: tensor[[0, 2, 1, 3]] for name, tensor in inputs.items()}
    assert group_by_prompt(mixed["prompt_ids_BP"], mixed["prompt_mask_BP"]) == [[0, 2], [1, 3]]
    assert_same_as_separate_rows(llama(), mixed)


@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-10), (llama, 1e-5)], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("needs", "chunk"), [("logp", 3 * V), ("kl", 10**6), ("forward_kl", 3 * V)])
def test_gradients_are_those_of_separate_rows(make, tolerance, needs, chunk):
    """Gradients of the log-probs and of both exact KLs, so of every placement built from them.

    Relative to the gradient's norm; a Llama's norms run in float32 whatever the dtype.
    """
    inputs = batch(groups=(5, 4), prompt=(30, 24))
    gradients = []
    for share in (True, False):
        model = make()
        options = PassOptions(temperature=0.8, chunk_elements=chunk, share_prompt=share)
        reference = FrozenReference(make(seed=7), options).forward_pass(**inputs)
        seen = token_pass(
            model,
            **inputs,
            temperature=0.8,
            chunk_elements=chunk,
            reference=reference,
            kl=True,
            forward_kl=True,
            share_prompt=share,
        )
        values_BT = {"logp": seen.logp_BT, "kl": seen.kl_BT, "forward_kl": seen.forward_kl_BT}[needs]
        weights_BT = torch.linspace(-1, 2, values_BT.numel(), dtype=torch.float64).view_as(values_BT)
        (weights_BT * values_BT).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert use_layout_attention(make()), "the first pass did share"
    assert float((gradients[0] - gradients[1]).norm()) < tolerance * float(gradients[1].norm())


def test_padding_values_change_nothing_and_the_line_has_every_token_once():
    model = llama()
    with torch.no_grad():
        for pad in (0, 17, V - 1):
            assert torch.equal(shared(model, batch(pad=pad)), shared(model, batch(pad=3)))
    inputs = batch()
    line = pack_batch(*inputs.values())
    size = 20 + 5 + 11 + int(inputs["mask_BT"].sum()) - len(inputs["mask_BT"])
    assert line.ids_S.shape == line.position_S.shape == line.layout.line_index_S.shape == (size,)
    assert len(set(line.layout.line_index_S.tolist())) == size


def test_activation_checkpoints_change_nothing():
    inputs, gradients = batch(), []
    for checkpoints in (False, True):
        model = llama().train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shared(model, inputs).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_other_attention_is_left_alone():
    model = llama()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    assert not use_layout_attention(model) and model.config._attn_implementation == "sdpa"
    assert not use_layout_attention(llama(attention="eager"))
    model.config.layer_types = None
    assert (
        use_layout_attention(model)
        and use_layout_attention(model)
        and model.config._attn_implementation == ATTENTION_NAME
    )


def test_the_attention_name_is_not_saved(tmp_path):
    model = llama().float()
    ids = torch.randint(1, V, (2, 9))
    before = model(input_ids=ids).logits
    assert use_layout_attention(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()


def test_attention_that_does_more_than_a_layout_can_is_refused():
    model = llama()
    assert use_layout_attention(model)
    line = pack_batch(*batch().values())
    model.model.layers[1].self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(ValueError, match="dropout"):
        packed_hidden(model, line)
