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
    generator = torch.Generator().manual_seed(seed)
    completion_lengths = torch.randint(1, 8, (sum(groups),), generator=generator).tolist()
    prompt_lengths = []
    for length, count in zip(prompt, groups, strict=True):
        prompt_lengths.extend([length] * count)
    inputs, _ = padded_batch(prompt_lengths, completion_lengths, seed, pad, 2)
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


def gradient_of(model):
    """All gradients in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_same_as_separate_rows(model, inputs):
    with torch.no_grad():
        separate_NH = completion_hidden(model, *inputs.values(), share_prompt=False)
        torch.testing.assert_close(shared(model, inputs), separate_NH, atol=1e-11, rtol=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("make", [llama, qwen, gpt2], ids=lambda make: make.__name__)
def test_hidden_states_are_those_of_separate_rows(make, seed):
    assert_same_as_separate_rows(make(), batch(seed=seed))


def completions_of_one_token():
    inputs = batch(groups=(1, 1, 1), prompt=(1, 3, 2))
    inputs["mask_BT"][:, 1:] = False
    return inputs


def test_completions_of_one_token_are_those_of_separate_rows():
    assert_same_as_separate_rows(llama(), completions_of_one_token())


def test_completions_of_one_token_are_not_in_the_line():
    """The last token of a prompt predicts them, so that the line has the prompts' 1 + 3 + 2 tokens."""
    assert pack_batch(*completions_of_one_token().values()).ids_S.shape == (6,)


@pytest.mark.parametrize(("heads", "key_value_heads"), [(4, 4), (4, 1), (2, 2)])
def test_heads_that_share_keys_are_those_of_separate_rows(heads, key_value_heads):
    assert_same_as_separate_rows(llama(num_attention_heads=heads, num_key_value_heads=key_value_heads), batch())


def test_rows_of_a_prompt_that_are_apart_share_it():
    inputs = batch(groups=(2, 2), prompt=(9, 9))
    mixed = {name: tensor[[0, 2, 1, 3]] for name, tensor in inputs.items()}
    groups = group_by_prompt(mixed["prompt_ids_BP"], mixed["prompt_mask_BP"])
    assert list(groups.values()) == [[0, 2], [1, 3]]
    assert_same_as_separate_rows(llama(), mixed)


def gradient_of_a_column(make, inputs, column, *, chunk, share_prompt):
    """The gradient of a weighted sum of a column of the pass, with another weight for every token."""
    model = make()
    options = PassOptions(temperature=0.8, chunk_elements=chunk, share_prompt=share_prompt)
    reference = Reference(make(seed=7), options).forward_pass(**inputs)
    columns = token_pass(model, **inputs, **vars(options), reference=reference, kl=True, forward_kl=True)
    values_BT = getattr(columns, f"{column}_BT")
    weights_BT = torch.linspace(-1, 2, values_BT.numel(), dtype=torch.float64).view_as(values_BT)
    (weights_BT * values_BT).sum().backward()
    return gradient_of(model)


@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 1e-10), (llama, 1e-5)], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("column", "chunk"), [("logp", 3 * V), ("kl", 10**6), ("forward_kl", 3 * V)])
def test_gradients_are_those_of_separate_rows(make, tolerance, column, chunk):
    """Gradients of the log-probs and of both exact KLs, so of every placement built from them.

    Relative to the gradient's norm; a Llama's norms run in float32 whatever the dtype.
    """
    inputs = batch(groups=(5, 4), prompt=(30, 24))
    with_sharing = gradient_of_a_column(make, inputs, column, chunk=chunk, share_prompt=True)
    separate = gradient_of_a_column(make, inputs, column, chunk=chunk, share_prompt=False)
    assert use_layout_attention(make()), "the first pass did share"
    assert float((with_sharing - separate).norm()) < tolerance * float(separate.norm())


@pytest.mark.parametrize("pad", [0, 17, V - 1])
def test_padding_values_change_nothing(pad):
    model = llama()
    with torch.no_grad():
        assert torch.equal(shared(model, batch(pad=pad)), shared(model, batch(pad=3)))


def test_the_line_has_every_token_once():
    inputs = batch()
    line = pack_batch(*inputs.values())
    prompt_tokens = 20 + 5 + 11
    # Without the last token of each completion, which predicts nothing.
    completion_tokens = int(inputs["mask_BT"].sum()) - len(inputs["mask_BT"])
    size = prompt_tokens + completion_tokens
    assert line.ids_S.shape == (size,)
    assert line.position_S.shape == (size,)
    assert line.place_S.shape == (size,)
    assert len(set(line.place_S.tolist())) == size


def test_activation_checkpoints_change_nothing():
    inputs = batch()
    plain = llama().train()
    shared(plain, inputs).square().sum().backward()
    checkpointed = llama().train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    shared(checkpointed, inputs).square().sum().backward()
    assert torch.equal(gradient_of(plain), gradient_of(checkpointed))


# --- which models it is used for ----------------------------------------------------------------------------------
def test_a_sliding_window_is_left_alone():
    model = llama()
    model.config.layer_types = ["sliding_attention", "full_attention"]
    assert not use_layout_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_eager_attention_is_left_alone():
    assert not use_layout_attention(llama(attention="eager"))


def test_the_attention_is_put_in_place_once_and_changes_no_ordinary_pass():
    model = llama()
    ids = torch.randint(1, V, (2, 9))
    logits_before = model(input_ids=ids).logits
    for _ in range(2):
        assert use_layout_attention(model)
        assert model.config._attn_implementation == ATTENTION_NAME
    assert torch.equal(model(input_ids=ids).logits, logits_before)


def test_a_saved_model_does_not_name_the_attention(tmp_path):
    """Nobody else knows it."""
    model = llama()
    assert use_layout_attention(model)
    model.save_pretrained(tmp_path)
    assert ATTENTION_NAME not in (tmp_path / "config.json").read_text()


def test_dropout_of_attention_is_refused():
    model = llama().train()
    model.model.layers[1].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout"):
        shared(model, batch())


# --- the kernel for sequences of several lengths --------------------------------------------------------------------
def varlen_attn(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size, enable_gqa):
    """Torch's kernel of 2.13 in plain operations: the last query of a sequence is aligned with its last key."""
    assert window_size == (-1, 0), "causal"
    assert enable_gqa
    assert query_ends.dtype == torch.int32
    assert key_ends.dtype == torch.int32
    assert query.dtype != torch.float32, "the kernel knows narrow types only; float64 stands for them here"
    assert key.dtype == query.dtype
    assert value.dtype == query.dtype
    query_sizes = query_ends.diff().tolist()
    key_sizes = key_ends.diff().tolist()
    assert max(query_sizes) == most_queries
    assert max(key_sizes) == most_keys
    assert min(query_sizes) > 0
    rows = []
    sequences = zip(query.split(query_sizes), key.split(key_sizes), value.split(key_sizes), strict=True)
    for query_QHD, key_KGD, value_KGD in sequences:
        queries = len(query_QHD)
        keys = len(key_KGD)
        future_QK = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        heads_per_group = query_QHD.shape[1] // key_KGD.shape[1]
        key_KHD = key_KGD.repeat_interleave(heads_per_group, 1)
        value_KHD = value_KGD.repeat_interleave(heads_per_group, 1)
        scores_HQK = torch.einsum("qhd,khd->hqk", query_QHD, key_KHD) * scale
        weights_HQK = scores_HQK.masked_fill(future_QK, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khd->qhd", weights_HQK, value_KHD))
    return torch.cat(rows)


def varlen_attn_2_11(query, key, value, *lengths, return_aux=None, scale=None, window_size=(-1, -1)):
    """The kernel of torch 2.11 has no grouped heads."""
    assert key.shape[1] == query.shape[1]
    assert value.shape[1] == query.shape[1]
    return varlen_attn(query, key, value, *lengths, scale=scale, window_size=window_size, enable_gqa=True)


def varlen_attn_2_10(query, key, value, *lengths, is_causal=False, return_aux=None):
    """The kernel of torch 2.10 has no scale of its own and no window."""
    window = (-1, -1)
    if is_causal:
        window = (-1, 0)
    return varlen_attn_2_11(query, key, value, *lengths, scale=query.shape[2] ** -0.5, window_size=window)


KERNELS = [varlen_attn, varlen_attn_2_11, varlen_attn_2_10]


def scaled():
    """A Llama whose attention has a scale of its own."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.9
    return model


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
@pytest.mark.parametrize("make", [scaled, gpt2], ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "inputs",
    [batch(), batch(groups=(4, 1, 3), seed=2), completions_of_one_token()],
    ids=["groups", "other groups", "one token each"],
)
def test_variable_lengths_give_the_hidden_states_and_gradients_of_the_masked_rows(make, kernel, inputs, monkeypatch):
    """The kernel itself needs a GPU; what is handed to it, and what is made of its answer, does not."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    masked = make()
    masked._kl_comedy_varlen = False
    masked_NH = shared(masked, inputs)
    masked_NH.square().sum().backward()
    by_kernel = make()
    by_kernel._kl_comedy_varlen = True
    by_kernel_NH = shared(by_kernel, inputs)
    by_kernel_NH.square().sum().backward()
    torch.testing.assert_close(by_kernel_NH.detach(), masked_NH.detach(), atol=1e-11, rtol=0)
    masked_gradient = gradient_of(masked)
    assert float((gradient_of(by_kernel) - masked_gradient).norm()) < 1e-5 * float(masked_gradient.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_takes_what_it_is_given(monkeypatch, dtype):
    """Torch's own operator on ``meta`` tensors: names, shapes and types of its arguments."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # it does not know meta
    line = pack_batch(*batch().values())
    size = len(line.ids_S)
    query = torch.empty(size, 2, 3, 8, device="meta", dtype=dtype)
    key = torch.empty(size, 2, 8, device="meta", dtype=dtype)
    attended = VariableLengths(line).attend(0, query, key, key, 0.5)
    assert attended.shape == query.shape
    assert attended.dtype == dtype


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
        padding = rows.index_BT[~rows.real_BT]
        if len(padding) > 0:
            assert int(padding.bincount().max()) <= len(rows.index_BT)
    assert int(line.completions.index_BT.max()) < len(line.ids_S)
