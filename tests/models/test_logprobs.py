"""The chunked head against the plain formula on tiny random models, values and gradients."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PhiConfig, PhiForCausalLM

from kl_comedy.config.schema import LoraConfig
from kl_comedy.models.lora import add_lora
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from passes import QUANTITIES, head_columns, token_pass
from small_llama import V, batch, llama, naive_logits

EXACT = {"kl": True, "forward_kl": True, "entropy": True, "total_variation": True}
EXACT |= {"certainty": True, "reference_certainty": True}


def gpt2(dtype=torch.float64):
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4)
    return GPT2LMHeadModel(config).to(dtype).eval()


def phi(dtype=torch.float64, seed=0):
    """Its head has a bias, as GPT-J's."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = PhiConfig(vocab_size=V, **sizes, num_attention_heads=4, initializer_range=0.4)
    model = PhiForCausalLM(config).to(dtype).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def naive_logps(model, rows, temperature):
    pairs = zip(naive_logits(model, rows, temperature), rows, strict=True)
    return [logp.gather(1, completion[:, None])[:, 0] for logp, (_, completion) in pairs]


def assert_rows_equal(values_BT, expected, atol=1e-10, rtol=0):
    """Each row begins with the expected values and is zero after them."""
    for row_T, expected_T in zip(values_BT, expected, strict=True):
        torch.testing.assert_close(row_T[: len(expected_T)], expected_T, atol=atol, rtol=rtol)
        assert row_T[len(expected_T) :].count_nonzero() == 0


def pass_batch(model, inputs, *, temperature=0.7, chunk=7 * V, **more):
    return token_pass(model, **inputs, temperature=temperature, chunk_elements=chunk, **more)


def reference_pass(model, inputs, temperature=0.7, chunk=7 * V):
    options = PassOptions(temperature=temperature, chunk_elements=chunk)
    return Reference(model, options).forward_pass(**inputs)


@pytest.mark.parametrize(
    ("make", "temperature"),
    [(llama, 1.0), (llama, 0.7), (gpt2, 0.7), (lambda: llama(tied=True), 1.0), (phi, 0.7)],
    ids=["llama 1", "llama 0.7", "gpt2 0.7", "tied 1", "phi 0.7"],
)
def test_logps_are_those_of_the_unpadded_unbatched_model(make, temperature):
    model, (inputs, rows) = make(), batch()
    logp_BT = pass_batch(model, inputs, temperature=temperature).logp_BT
    assert_rows_equal(logp_BT, naive_logps(model, rows, temperature))
    assert logp_BT.dtype == torch.float64


@pytest.mark.parametrize("chunk", [1, V, 3 * V + 5, 10**9])
@pytest.mark.parametrize("make", [llama, phi], ids=["llama", "phi, a head with a bias"])
def test_values_and_gradients_do_not_depend_on_chunks(make, chunk):
    model, (inputs, _) = make(), batch()
    reference = reference_pass(make(seed=3), inputs)
    wanted = {"reference": reference, **EXACT}
    results = []
    for size in (10**9, chunk):
        model.zero_grad()
        passed = pass_batch(model, inputs, chunk=size, **wanted)
        (passed.logp_BT.sum() + (passed.kl_BT**2).sum() + passed.forward_kl_BT.sum()).backward()
        values = [passed.logp_BT, passed.kl_BT, passed.forward_kl_BT, passed.entropy_BT, passed.total_variation_BT]
        results.append([t.detach().clone() for t in [*values, *(p.grad for p in model.parameters())]])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-11, rtol=1e-11)


def test_exact_values_are_those_of_torch_distributions_with_their_gradients():
    model, other, (inputs, rows) = llama(), llama(seed=3), batch()
    passed = pass_batch(model, inputs, reference=reference_pass(other, inputs), **EXACT, mixtures=[0.3])
    weights = torch.randn(passed.kl_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    policies = [torch.distributions.Categorical(logits=x) for x in naive_logits(model, rows, 0.7)]
    with torch.no_grad():
        references = [torch.distributions.Categorical(logits=x) for x in naive_logits(other, rows, 0.7)]
    divergence = torch.distributions.kl_divergence
    pairs = list(zip(policies, references, strict=True))
    expected = {
        "kl_BT": [divergence(p, q) for p, q in pairs],
        "forward_kl_BT": [divergence(q, p) for p, q in pairs],
        "entropy_BT": [p.entropy() for p in policies],
        "total_variation_BT": [(p.probs - q.probs).clamp(min=0).sum(-1) for p, q in pairs],
    }
    expected["certainty_BT"] = [1 - p.entropy() / math.log(V) for p in policies]
    expected["reference_certainty_BT"] = [1 - q.entropy() / math.log(V) for q in references]
    mixed = [torch.distributions.Categorical(probs=0.3 * q.probs + 0.7 * p.probs) for p, q in pairs]
    jsd = [0.3 * divergence(q, m) + 0.7 * divergence(p, m) for (p, q), m in zip(pairs, mixed, strict=True)]
    for name, columns in expected.items():
        assert_rows_equal(getattr(passed, name), columns, rtol=1e-10)
    assert_rows_equal(passed.mixture[0.3], jsd, rtol=1e-10)
    parameters = list(model.parameters())
    expected |= {"logp_BT": naive_logps(model, rows, 0.7), "jsd": jsd}
    for name in ("logp_BT", "kl_BT", "forward_kl_BT", "jsd"):
        column_BT = passed.mixture[0.3] if name == "jsd" else getattr(passed, name)
        ours = torch.autograd.grad((column_BT * weights).sum(), parameters, retain_graph=True)
        plain = sum((c * w[: len(c)]).sum() for c, w in zip(expected[name], weights, strict=True))
        theirs = torch.autograd.grad(plain, parameters, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert not passed.entropy_BT.requires_grad and not passed.total_variation_BT.requires_grad
    gaps, bounds = passed.total_variation_BT, (passed.kl_BT.detach() / 2).sqrt()
    assert float(gaps.max()) < 1 and bool((gaps <= bounds + 1e-12).all()), "Pinsker's inequality"


@pytest.mark.parametrize("chunk", [5, 5 * V, 1 << 20], ids=["row by row", "some rows", "whole"])
def test_tokens_that_neither_policy_draws_change_nothing(chunk):
    """A vocabulary padded with a bias of -inf: values and gradients are those of the vocabulary without the padding."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    reference_NH = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    weight_VH, other_VH = torch.randn(2, V, 4, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64)
    padded_bias = torch.cat([bias_V, torch.full((3,), -math.inf, dtype=torch.float64)])
    padding_VH = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    results = []
    for padding, bias in ((None, bias_V), (padding_VH, padded_bias)):
        weight = weight_VH if padding is None else torch.cat([weight_VH, padding])
        other = other_VH if padding is None else torch.cat([other_VH, padding])
        leaves = [each.clone().requires_grad_(True) for each in (hidden_NH, weight, bias)]
        columns = head_columns(
            leaves[0],
            (leaves[1], leaves[2]),
            torch.arange(6),
            temperature=0.7,
            chunk_elements=chunk,
            requested=QUANTITIES,
            mixtures=[0.3],
            top=[(4, "policy")],
            reference=(reference_NH, (other, bias)),
        )
        # log V of a certainty counts the padding.
        certain = [columns.pop("certainty"), columns.pop("reference_certainty")]
        assert all(torch.isfinite(each).all() for each in certain)
        differentiable = [each for each in columns.values() if each.requires_grad]
        gradients = torch.autograd.grad(sum((n + 1) * each.sum() for n, each in enumerate(differentiable)), leaves)
        results.append([*columns.values(), gradients[0], gradients[1][:V], gradients[2][:V]])
        assert all(torch.isfinite(each).all() for each in gradients)
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(plain, padded, atol=1e-12, rtol=1e-12)


def test_a_divergence_is_infinite_only_where_the_other_policy_never_draws_the_token():
    hidden, weight = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    free, padded = torch.zeros(3, dtype=torch.float64), torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    options = {
        "temperature": 1.0,
        "chunk_elements": 100,
        "requested": ("kl", "forward_kl", "entropy"),
        "mixtures": [0.3],
    }
    columns = head_columns(
        hidden, (weight, padded), torch.zeros(3, dtype=torch.long), reference=(hidden, (weight, free)), **options
    )
    assert torch.isfinite(columns["kl"]).all() and torch.isfinite(columns["entropy"]).all()
    assert torch.isposinf(columns["forward_kl"]).all() and torch.isfinite(columns["mixture0"]).all()
    columns = head_columns(
        hidden, (weight, free), torch.zeros(3, dtype=torch.long), reference=(hidden, (weight, padded)), **options
    )
    assert torch.isposinf(columns["kl"]).all() and torch.isfinite(columns["forward_kl"]).all()
    assert torch.isfinite(columns["mixture0"]).all()


def test_a_quantity_requested_alone_equals_that_requested_with_others():
    """Columns travel in a fixed order; none may end up under another's name, and what is not requested is None."""
    model, (inputs, _) = llama(), batch()
    reference = reference_pass(llama(seed=3), inputs)
    together = pass_batch(model, inputs, reference=reference, **EXACT)
    for name in EXACT:
        alone = pass_batch(model, inputs, reference=reference, **{name: True})
        assert torch.equal(getattr(alone, f"{name}_BT"), getattr(together, f"{name}_BT"))
        assert all(getattr(alone, f"{other}_BT") is None for other in EXACT if other != name)


MODEL = llama()
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS.filter(lambda rows: any(t for _, t in rows)), pad=st.integers(0, V - 1), extra=st.integers(0, 3))
def test_padding_changes_nothing(lengths, pad, extra):
    inputs, rows = batch(*zip(*lengths, strict=True), pad=pad, extra=extra)
    logp_BT = pass_batch(MODEL, inputs).logp_BT
    gradient = torch.autograd.grad(logp_BT.sum(), list(MODEL.parameters()))
    assert all(bool(torch.isfinite(g).all()) for g in gradient)
    assert_rows_equal(logp_BT, naive_logps(MODEL, rows, 0.7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_kl_to_itself_is_exactly_zero_and_logps_equal(dtype):
    model, (inputs, _) = llama(dtype), batch()
    reference = reference_pass(model, inputs, chunk=2 * V)
    passed = pass_batch(model, inputs, chunk=2 * V, reference=reference, **EXACT, mixtures=[0.3])
    assert passed.mixture[0.3].count_nonzero() == 0
    assert passed.total_variation_BT.count_nonzero() == 0
    assert passed.kl_BT.count_nonzero() == 0
    assert passed.forward_kl_BT.count_nonzero() == 0
    assert torch.equal(passed.logp_BT, reference.logp_BT)
    assert passed.logp_BT.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_float32_is_close_to_float64_and_autocast_leaves_the_head_alone():
    wide, (inputs, _) = llama(), batch()
    narrow = copy.deepcopy(wide).float()
    exact = pass_batch(wide, inputs).logp_BT
    torch.testing.assert_close(pass_batch(narrow, inputs).logp_BT.double(), exact, atol=1e-4, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        passed = pass_batch(narrow, inputs, entropy=True)
    assert passed.logp_BT.dtype == passed.entropy_BT.dtype == torch.float32
    torch.testing.assert_close(passed.logp_BT.double(), exact, atol=0.5, rtol=0)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation produced, in elements."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else [out]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_forward_and_backward_never_hold_all_logits():
    """The vocabulary is made the largest dimension by far, so that only logits can be large."""
    vocab = 4001
    model, (inputs, _) = llama(torch.float32, vocab=vocab), batch((2, 2, 2, 2), (12, 12, 9, 12))
    reference = reference_pass(model, inputs, chunk=5 * vocab)
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        passed = pass_batch(model, inputs, chunk=5 * vocab, reference=reference, **EXACT)
        between = len(saved)
        (passed.logp_BT + passed.kl_BT + passed.forward_kl_BT).sum().backward()
    head = model.lm_head.weight.numel()  # 16 * V, the only larger tensor: the weight and its gradient
    assert largest.numel <= head < 45 * vocab
    assert max(n for n in saved[:between] if n != head) < vocab, "no logits are kept for the backward pass"
    assert max(n for n in saved if n != head) <= 5 * vocab
    with _Largest() as naive:
        pass_batch(model, inputs, chunk=10**9)
    assert naive.numel == 45 * vocab


def test_a_batch_without_completion_tokens_has_zero_loss_and_zero_gradient():
    model, (inputs, _) = llama(), batch()
    inputs["mask_BT"] = torch.zeros_like(inputs["mask_BT"])
    passed = pass_batch(model, inputs)
    passed.logp_BT.sum().backward()
    assert passed.logp_BT.count_nonzero() == 0
    assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in model.parameters())


def test_the_adapter_of_a_lora_model_is_used():
    base, (inputs, rows) = llama(), batch()
    model = add_lora(base, LoraConfig(rank=2))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    logp_BT = pass_batch(model, inputs).logp_BT
    assert_rows_equal(logp_BT, naive_logps(model, rows, 0.7), atol=1e-9)
    with model.disable_adapter():
        assert not torch.allclose(pass_batch(model, inputs).logp_BT, logp_BT)


def test_a_batch_that_does_not_fit_is_refused():
    model, (inputs, _) = llama(), batch()
    holes = inputs["mask_BT"].clone()
    holes[0, 1] = False
    right = inputs["prompt_mask_BP"].flip(1)
    for changes, message in [
        ({"mask_BT": holes}, "right-padded"),
        ({"prompt_mask_BP": right}, "left-padded"),
        ({"prompt_mask_BP": torch.zeros_like(right)}, "left-padded"),
        ({"ids_BT": inputs["ids_BT"][:, 1:]}, "do not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            pass_batch(model, {**inputs, **changes})
    with pytest.raises(ValueError, match="temperature"):
        pass_batch(model, inputs, temperature=0.0)
    with pytest.raises(ValueError, match="needs a reference"):
        pass_batch(model, inputs, kl=True)
    with pytest.raises(ValueError, match="needs a reference"):
        pass_batch(model, inputs, total_variation=True)
    with pytest.raises(ValueError, match="temperature"):
        pass_batch(model, inputs, kl=True, reference=reference_pass(model, inputs, temperature=1.0))
    smaller, _ = batch((3,), (4,))
    with pytest.raises(ValueError, match="has 4 tokens"):
        pass_batch(model, inputs, kl=True, reference=reference_pass(model, smaller))
