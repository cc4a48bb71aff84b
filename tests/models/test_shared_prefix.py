"""Completions that share a prompt's computation: the numbers and gradients of rows of their own."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kl_comedy.errors import UserError
from kl_comedy.models.attention import (
    ATTENTION_NAME,
    VariableLengths,
    group_by_prompt,
    pack_batch,
    packed_hidden,
    use_layout_attention,
)
from kl_comedy.models.load import check_log_probs
from kl_comedy.models.logprobs import completion_hidden
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from passes import token_pass
from small_llama import batch as padded_batch

V = 31
SIZES = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SMALL = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


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
    lengths = torch.randint(1, 8, (sum(groups),), generator=g).tolist()
    inputs, _ = padded_batch([p for p, n in zip(prompt, groups, strict=True) for _ in range(n)], lengths, seed, pad, 2)
    first = 0
    for count in groups:  # the rows of a group share the first one's prompt
        inputs["prompt_ids_BP"][first : first + count] = inputs["prompt_ids_BP"][first].clone()
        first += count
    inputs["ids_BT"] = torch.where(inputs["mask_BT"], inputs["ids_BT"] % (V - 1) + 1, pad)
    real = inputs["prompt_mask_BP"].bool()
    inputs["prompt_ids_BP"] = torch.where(real, inputs["prompt_ids_BP"] % (V - 1) + 1, pad)
    return inputs


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


def test_short_completions_shared_heads_and_rows_apart():
    inputs = batch(groups=(1, 1, 1), prompt=(1, 3, 2))
    inputs["mask_BT"][:, 1:] = False
    assert_same_as_separate_rows(llama(), inputs)
    assert pack_batch(*inputs.values()).ids_S.shape == (6,), "completions of one token are not in the line"
    for heads, kv_heads in ((4, 4), (4, 1), (2, 2)):
        assert_same_as_separate_rows(llama(num_attention_heads=heads, num_key_value_heads=kv_heads), batch())
    inputs = batch(groups=(2, 2), prompt=(9, 9))
    mixed = {name: tensor[[0, 2, 1, 3]] for name, tensor in inputs.items()}
    assert list(group_by_prompt(mixed["prompt_ids_BP"], mixed["prompt_mask_BP"]).values()) == [[0, 2], [1, 3]]
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
        reference = Reference(make(seed=7), options).forward_pass(**inputs)
        exact = {"reference": reference, "kl": True, "forward_kl": True}
        values = token_pass(model, **inputs, **vars(options), **exact)
        values_BT = getattr(values, f"{needs}_BT")
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
    assert line.ids_S.shape == line.position_S.shape == line.place_S.shape == (size,)
    assert len(set(line.place_S.tolist())) == size


def test_activation_checkpoints_change_nothing():
    inputs, gradients = batch(), []
    for checkpoints in (False, True):
        model = llama().train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        shared(model, inputs).square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


def test_other_attention_is_left_alone_and_dropout_refused(tmp_path):
    model = llama()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    assert not use_layout_attention(model) and model.config._attn_implementation == "sdpa"
    assert not use_layout_attention(llama(attention="eager"))
    model.config.layer_types = None
    ids = torch.randint(1, V, (2, 9))
    before = model(input_ids=ids).logits
    for _ in range(2):
        assert use_layout_attention(model) and model.config._attn_implementation == ATTENTION_NAME
    assert torch.equal(model(input_ids=ids).logits, before)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout"):
        shared(model.train(), batch())


def varlen_attn(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa):
    """Torch's kernel of 2.13 in plain operations: the last query of a sequence is aligned with its last key."""
    assert window_size == (-1, 0) and enable_gqa and query_ends.dtype == key_ends.dtype == torch.int32
    assert query.dtype == key.dtype == value.dtype != torch.float32
    sizes = [ends.diff().tolist() for ends in (query_ends, key_ends)]
    assert (max(sizes[0]), max(sizes[1])) == (most_queries, most_keys) and min(sizes[0]) > 0
    rows = []
    for q, k, v in zip(query.split(sizes[0]), key.split(sizes[1]), value.split(sizes[1]), strict=True):
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(rows)


def varlen_attn_2_11(query, key, value, *lengths, return_aux=None, scale=None, window_size=(-1, -1)):
    assert query.shape[1] == key.shape[1] == value.shape[1]
    return varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, enable_gqa=True)


def varlen_attn_2_10(query, key, value, *lengths, is_causal=False, return_aux=None):
    scale, window = query.shape[2] ** -0.5, (-1, 0) if is_causal else (-1, -1)
    return varlen_attn_2_11(query, key, value, *lengths, scale=scale, window_size=window)


KERNELS = [varlen_attn, varlen_attn_2_11, varlen_attn_2_10]


def scaled():
    """A Llama whose attention has a scale of its own."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9
    return model


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("make", [scaled, gpt2], ids=lambda make: make.__name__)
def test_variable_lengths_give_the_hidden_states_and_gradients_of_the_masked_rows(make, kernel, monkeypatch):
    """The kernel itself needs a GPU; what is handed to it, and what is made of its answer, does not."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    single = batch(groups=(1, 1, 1), prompt=(1, 3, 2))
    single["mask_BT"][:, 1:] = False
    for inputs in (batch(), batch(groups=(4, 1, 3), seed=2), single):
        results = []
        for varlen in (False, True):
            model = make()
            model._kl_comedy_varlen = varlen
            hidden_NH = shared(model, inputs)
            hidden_NH.square().sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            results.append((hidden_NH.detach(), gradient))
        (masked_NH, masked), (varlen_NH, varlen) = results
        torch.testing.assert_close(varlen_NH, masked_NH, atol=1e-11, rtol=0)
        assert float((varlen - masked).norm()) < 1e-5 * float(masked.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_takes_what_it_is_given(monkeypatch, dtype):
    """Torch's own operator on ``meta`` tensors: names, shapes and types of its arguments."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # it does not know meta
    line = pack_batch(*batch().values())
    layout, size = VariableLengths(line), len(line.ids_S)
    query, key = (torch.empty(size, *heads, 8, device="meta", dtype=dtype) for heads in ((2, 3), (2,)))
    out = layout.attend(0, query, key, key, 0.5)
    assert (out.shape, out.dtype) == (query.shape, dtype)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_at_load_compares_in_the_precision_of_the_kernel(kernel, dtype, monkeypatch):
    """Outside autocast, as a policy is loaded; a kernel that is wrong by more than rounding is refused."""
    model = llama().to(dtype)
    model._kl_comedy_varlen = True
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    check_log_probs(model)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda *args, scale, **options: 0 * args[0])
    with pytest.raises(UserError, match=r"model\.(share_prompt|source)"):
        check_log_probs(model)


def test_padding_of_rows_names_no_token_often():
    """On a GPU the gradients of equal indices are added one after the other."""
    line = pack_batch(*batch(groups=(8, 8), prompt=(20, 5)).values())
    for rows in (line.prompts, line.completions):
        counts = rows.index_BT[~rows.real_BT].bincount()
        assert not len(counts) or int(counts.max()) <= len(rows.index_BT)
    assert int(line.completions.index_BT.max()) < len(line.ids_S)
