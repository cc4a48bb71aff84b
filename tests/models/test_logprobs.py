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
from kl_comedy.kl.estimators import TopRequest
from kl_comedy.models import logprobs
from kl_comedy.models.lora import add_lora
from kl_comedy.models.reference import Reference
from kl_comedy.models.types import PassOptions
from passes import QUANTITIES, head_columns, token_pass
from small_llama import V, batch, llama, naive_logits

EXACT = {
    "kl": True,
    "forward_kl": True,
    "entropy": True,
    "total_variation": True,
    "certainty": True,
    "reference_certainty": True,
}


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
    logps = []
    for logp_TV, (_, completion_T) in zip(naive_logits(model, rows, temperature), rows, strict=True):
        logps.append(logp_TV.gather(1, completion_T[:, None])[:, 0])
    return logps


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
    model = make()
    inputs, rows = batch()
    logp_BT = pass_batch(model, inputs, temperature=temperature).logp_BT
    assert_rows_equal(logp_BT, naive_logps(model, rows, temperature))
    assert logp_BT.dtype == torch.float64


def values_and_gradients(model, inputs, reference, chunk):
    """The columns of a pass, and the gradients of a sum of them by every parameter."""
    model.zero_grad()
    columns = pass_batch(model, inputs, chunk=chunk, reference=reference, **EXACT)
    # Squared, so that the gradient of the KL depends on its value too.
    (columns.logp_BT.sum() + (columns.kl_BT**2).sum() + columns.forward_kl_BT.sum()).backward()
    results = {
        "logp": columns.logp_BT.detach(),
        "kl": columns.kl_BT.detach(),
        "forward_kl": columns.forward_kl_BT.detach(),
        "entropy": columns.entropy_BT.detach(),
        "total_variation": columns.total_variation_BT.detach(),
    }
    for name, parameter in model.named_parameters():
        results[f"gradient of {name}"] = parameter.grad.clone()
    return results


@pytest.mark.parametrize("chunk", [1, V, 3 * V + 5, 10**9])
@pytest.mark.parametrize("make", [llama, phi], ids=["llama", "phi, a head with a bias"])
def test_values_and_gradients_do_not_depend_on_chunks(make, chunk):
    model = make()
    inputs, _ = batch()
    reference = reference_pass(make(seed=3), inputs)
    whole = values_and_gradients(model, inputs, reference, chunk=10**9)
    chunked = values_and_gradients(model, inputs, reference, chunk)
    for name in whole:
        torch.testing.assert_close(whole[name], chunked[name], atol=1e-11, rtol=1e-11, msg=name)


# --- the sampler's top tokens -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_reference", [False, True])
@pytest.mark.parametrize("chunk", [V, 3 * V + 5, 10**9])
def test_the_samplers_tokens_have_the_policys_log_probs_and_gradient(chunk, with_reference):
    """Beside the same pass's own list of the reference; no reference is needed for the sampler's."""
    model = llama()
    inputs, rows = batch()
    generator = torch.Generator().manual_seed(4)
    shape = (*inputs["ids_BT"].shape, V)
    ids_BTK = torch.rand(shape, generator=generator).argsort(-1)[..., :5]
    logp_BTK = torch.randn(shape, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :5]
    more = {"top": [TopRequest(3, "sampler")]}
    if with_reference:
        more = {
            "top": [TopRequest(2, "reference"), TopRequest(3, "sampler")],
            "reference": reference_pass(llama(seed=3), inputs),
        }
    columns = pass_batch(model, inputs, chunk=chunk, sampler_top=(ids_BTK, logp_BTK), **more)
    top = columns.top[TopRequest(3, "sampler")]

    naive = naive_logits(model, rows, 0.7)
    expected = [logp_TV.gather(1, ids_TK[: len(logp_TV), :3]) for logp_TV, ids_TK in zip(naive, ids_BTK, strict=True)]
    assert_rows_equal(top.logp_BTK, expected)
    assert_rows_equal(top.ref_logp_BTK, [row[: len(logp_TV), :3] for logp_TV, row in zip(naive, logp_BTK, strict=True)])
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((top.logp_BTK**2).sum(), parameters)
    expected_gradients = torch.autograd.grad(sum((row**2).sum() for row in expected), parameters)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=1e-10, rtol=1e-10)


# --- against torch.distributions --------------------------------------------------------------------------------------
class PassAndDistributions:
    """A pass over a batch, and the same columns row by row from ``torch.distributions``."""

    def __init__(self):
        self.model = llama()
        reference_model = llama(seed=3)
        inputs, rows = batch()
        reference = reference_pass(reference_model, inputs)
        self.columns = pass_batch(self.model, inputs, reference=reference, **EXACT, mixtures=[0.3])

        policies = [torch.distributions.Categorical(logits=x) for x in naive_logits(self.model, rows, 0.7)]
        with torch.no_grad():
            references = [torch.distributions.Categorical(logits=x) for x in naive_logits(reference_model, rows, 0.7)]
        divergence = torch.distributions.kl_divergence
        self.expected = {
            "logp": naive_logps(self.model, rows, 0.7),
            "kl": [],
            "forward_kl": [],
            "entropy": [],
            "total_variation": [],
            "certainty": [],
            "reference_certainty": [],
            "jsd": [],
        }
        for p, q in zip(policies, references, strict=True):
            mixture = torch.distributions.Categorical(probs=0.3 * q.probs + 0.7 * p.probs)
            self.expected["kl"].append(divergence(p, q))
            self.expected["forward_kl"].append(divergence(q, p))
            self.expected["entropy"].append(p.entropy())
            self.expected["total_variation"].append((p.probs - q.probs).clamp(min=0).sum(-1))
            self.expected["certainty"].append(1 - p.entropy() / math.log(V))
            self.expected["reference_certainty"].append(1 - q.entropy() / math.log(V))
            self.expected["jsd"].append(0.3 * divergence(q, mixture) + 0.7 * divergence(p, mixture))

    def column(self, name):
        if name == "jsd":
            return self.columns.mixture[0.3]
        return getattr(self.columns, f"{name}_BT")

    def gradients(self, scalar):
        return torch.autograd.grad(scalar, list(self.model.parameters()), retain_graph=True)


@pytest.fixture(scope="module")
def both():
    return PassAndDistributions()


@pytest.mark.parametrize("name", [*EXACT, "jsd"])
def test_exact_values_are_those_of_torch_distributions(both, name):
    assert_rows_equal(both.column(name), both.expected[name], rtol=1e-10)


@pytest.mark.parametrize("name", ["logp", "kl", "forward_kl", "jsd"])
def test_gradients_of_exact_values_are_those_of_torch_distributions(both, name):
    column_BT = both.column(name)
    # Other weights for every token, so that no error cancels in a sum.
    weights_BT = torch.randn(column_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    by_hand = 0.0
    for values_T, weights_T in zip(both.expected[name], weights_BT, strict=True):
        by_hand = by_hand + (values_T * weights_T[: len(values_T)]).sum()
    ours = both.gradients((column_BT * weights_BT).sum())
    theirs = both.gradients(by_hand)
    for gradient, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["entropy", "total_variation"])
def test_quantities_that_are_only_measured_have_no_gradient(both, name):
    assert not both.column(name).requires_grad


def test_the_total_variation_is_bounded_by_the_kl(both):
    """Pinsker's inequality: TV <= sqrt(KL / 2)."""
    columns = both.columns
    total_variation_BT = columns.total_variation_BT
    bound_BT = (columns.kl_BT.detach() / 2).sqrt()
    assert float(total_variation_BT.max()) < 1
    assert bool((total_variation_BT <= bound_BT + 1e-12).all())


# --- tokens with a bias of -inf -----------------------------------------------------------------------------------
def columns_of_a_head(hidden_NH, weight_VH, bias_V, reference, chunk):
    """Every quantity of the head, and the gradients by its arguments of a sum in which each has another weight."""
    leaves = [tensor.clone().requires_grad_(True) for tensor in (hidden_NH, weight_VH, bias_V)]
    columns = head_columns(
        leaves[0],
        (leaves[1], leaves[2]),
        torch.arange(len(hidden_NH)),
        temperature=0.7,
        chunk_elements=chunk,
        requested=QUANTITIES,
        mixtures=[0.3],
        top=[TopRequest(4, "policy")],
        reference=reference,
    )
    total = 0.0
    weight = 1
    for name, column in columns.items():
        # The padding is part of log V of a certainty, so that only the other columns can be compared.
        if column.requires_grad and "certainty" not in name:
            total = total + weight * column.sum()
            weight += 1
    return columns, torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("chunk", [5, 5 * V, 1 << 20], ids=["row by row", "some rows", "whole"])
def test_tokens_that_neither_policy_draws_change_nothing(chunk):
    """A vocabulary padded with a bias of -inf: values and gradients are those of the vocabulary without the padding."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    reference_NH = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    weight_VH, reference_weight_VH = torch.randn(2, V, 4, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64)
    padding_VH = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    padded_bias_V = torch.cat([bias_V, torch.full((3,), -math.inf, dtype=torch.float64)])
    plain, plain_gradients = columns_of_a_head(
        hidden_NH, weight_VH, bias_V, (reference_NH, (reference_weight_VH, bias_V)), chunk
    )
    padded, padded_gradients = columns_of_a_head(
        hidden_NH,
        torch.cat([weight_VH, padding_VH]),
        padded_bias_V,
        (reference_NH, (torch.cat([reference_weight_VH, padding_VH]), padded_bias_V)),
        chunk,
    )

    assert set(padded) == set(plain)
    for name in plain:
        if "certainty" in name:
            assert torch.isfinite(plain[name]).all(), name
            assert torch.isfinite(padded[name]).all(), name
        else:
            torch.testing.assert_close(plain[name], padded[name], atol=1e-12, rtol=1e-12, msg=name)
    for argument, gradient, padded_gradient in zip(
        ("hidden", "weight", "bias"), plain_gradients, padded_gradients, strict=True
    ):
        assert torch.isfinite(gradient).all(), argument
        assert torch.isfinite(padded_gradient).all(), argument
        if argument != "hidden":
            padded_gradient = padded_gradient[:V]
        torch.testing.assert_close(gradient, padded_gradient, atol=1e-12, rtol=1e-12, msg=argument)


FREE_BIAS = torch.zeros(3, dtype=torch.float64)
IMPOSSIBLE_LAST = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)


def divergences(policy_bias_V, reference_bias_V):
    hidden_NH, weight_VH = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return head_columns(
        hidden_NH,
        (weight_VH, policy_bias_V),
        torch.zeros(3, dtype=torch.long),
        reference=(hidden_NH, (weight_VH, reference_bias_V)),
        temperature=1.0,
        chunk_elements=100,
        requested=("kl", "forward_kl", "entropy"),
        mixtures=[0.3],
    )


def test_only_the_forward_kl_is_infinite_where_the_policy_never_draws_a_token():
    columns = divergences(IMPOSSIBLE_LAST, FREE_BIAS)
    assert torch.isposinf(columns["forward_kl"]).all()
    assert torch.isfinite(columns["kl"]).all()
    assert torch.isfinite(columns["entropy"]).all()
    assert torch.isfinite(columns["mixture0"]).all()


def test_only_the_reverse_kl_is_infinite_where_the_reference_never_draws_a_token():
    columns = divergences(FREE_BIAS, IMPOSSIBLE_LAST)
    assert torch.isposinf(columns["kl"]).all()
    assert torch.isfinite(columns["forward_kl"]).all()
    assert torch.isfinite(columns["mixture0"]).all()


@pytest.mark.parametrize("name", EXACT)
def test_a_quantity_requested_alone_equals_that_requested_with_others(name):
    """Columns travel in a fixed order; none may end up under another's name, and what is not requested is None."""
    model = llama()
    inputs, _ = batch()
    reference = reference_pass(llama(seed=3), inputs)
    together = pass_batch(model, inputs, reference=reference, **EXACT)
    alone = pass_batch(model, inputs, reference=reference, **{name: True})
    assert torch.equal(getattr(alone, f"{name}_BT"), getattr(together, f"{name}_BT"))
    for other in EXACT:
        if other != name:
            assert getattr(alone, f"{other}_BT") is None, other


MODEL = llama()
# (tokens of the prompt, tokens of the completion) for each row, at least one completion token among them.
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=4).filter(
    lambda rows: any(completion_length for _, completion_length in rows)
)


@settings(max_examples=15, deadline=None)
@given(lengths=LENGTHS, pad=st.integers(0, V - 1), extra=st.integers(0, 3))
def test_padding_changes_nothing(lengths, pad, extra):
    inputs, rows = batch(*zip(*lengths, strict=True), pad=pad, extra=extra)
    logp_BT = pass_batch(MODEL, inputs).logp_BT
    assert_rows_equal(logp_BT, naive_logps(MODEL, rows, 0.7))
    for gradient in torch.autograd.grad(logp_BT.sum(), list(MODEL.parameters())):
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize(
    ("dtype", "dtype_of_the_head"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),  # the head of a narrow model computes in float32
    ],
    ids=["float64", "float32", "bfloat16"],
)
def test_kl_to_itself_is_exactly_zero_and_logps_equal(dtype, dtype_of_the_head):
    model = llama(dtype)
    inputs, _ = batch()
    reference = reference_pass(model, inputs, chunk=2 * V)
    passed = pass_batch(model, inputs, chunk=2 * V, reference=reference, **EXACT, mixtures=[0.3])
    assert passed.mixture[0.3].count_nonzero() == 0
    assert passed.total_variation_BT.count_nonzero() == 0
    assert passed.kl_BT.count_nonzero() == 0
    assert passed.forward_kl_BT.count_nonzero() == 0
    assert torch.equal(passed.logp_BT, reference.logp_BT)
    assert passed.logp_BT.dtype == dtype_of_the_head


def test_float32_is_close_to_float64():
    in_float64 = llama()
    in_float32 = copy.deepcopy(in_float64).float()
    inputs, _ = batch()
    exact_BT = pass_batch(in_float64, inputs).logp_BT
    torch.testing.assert_close(pass_batch(in_float32, inputs).logp_BT.double(), exact_BT, atol=1e-4, rtol=0)


def test_autocast_leaves_the_head_alone():
    """The layers below compute in bfloat16, hence the wide tolerance; the head stays in float32."""
    in_float64 = llama()
    in_float32 = copy.deepcopy(in_float64).float()
    inputs, _ = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        columns = pass_batch(in_float32, inputs, entropy=True)
    assert columns.logp_BT.dtype == torch.float32
    assert columns.entropy_BT.dtype == torch.float32
    torch.testing.assert_close(columns.logp_BT.double(), pass_batch(in_float64, inputs).logp_BT, atol=0.5, rtol=0)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation produced, in elements."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        outputs = [result]
        if isinstance(result, tuple | list):
            outputs = result
        for output in outputs:
            if isinstance(output, torch.Tensor):
                self.numel = max(self.numel, output.numel())
        return result


# The vocabulary is made the largest dimension by far, so that only logits can be large.
LARGE_VOCABULARY = 4001
TOKENS = 12 + 12 + 9 + 12
ROWS_PER_CHUNK = 5


@pytest.fixture(scope="module")
def large_head():
    model = llama(torch.float32, vocab=LARGE_VOCABULARY)
    inputs, _ = batch((2, 2, 2, 2), (12, 12, 9, 12))
    return model, inputs


def test_forward_and_backward_never_hold_all_logits(large_head):
    model, inputs = large_head
    chunk = ROWS_PER_CHUNK * LARGE_VOCABULARY
    reference = reference_pass(model, inputs, chunk=chunk)
    saved_sizes = []

    def remember(tensor):
        saved_sizes.append(tensor.numel())
        return tensor

    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        columns = pass_batch(model, inputs, chunk=chunk, reference=reference, **EXACT)
        saved_in_forward = len(saved_sizes)
        (columns.logp_BT + columns.kl_BT + columns.forward_kl_BT).sum().backward()

    # 16 hidden units times the vocabulary. Only the weight and its gradient may be larger than a chunk of logits.
    head_size = model.lm_head.weight.numel()
    assert head_size < TOKENS * LARGE_VOCABULARY
    assert largest.numel <= head_size
    sizes_in_forward = [size for size in saved_sizes[:saved_in_forward] if size != head_size]
    assert max(sizes_in_forward) < LARGE_VOCABULARY, "no logits are kept for the backward pass"
    assert max(size for size in saved_sizes if size != head_size) <= chunk


def test_a_chunk_as_large_as_the_batch_holds_all_logits(large_head):
    """So that the test above would see them."""
    model, inputs = large_head
    with _Largest() as largest:
        pass_batch(model, inputs, chunk=10**9)
    assert largest.numel == TOKENS * LARGE_VOCABULARY


def test_a_batch_without_completion_tokens_has_zero_loss_and_zero_gradient():
    model = llama()
    inputs, _ = batch()
    inputs["mask_BT"] = torch.zeros_like(inputs["mask_BT"])
    columns = pass_batch(model, inputs)
    columns.logp_BT.sum().backward()
    assert columns.logp_BT.count_nonzero() == 0
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.count_nonzero() == 0, name


def test_the_adapter_of_a_lora_model_is_used():
    inputs, rows = batch()
    model = add_lora(llama(), LoraConfig(rank=2))
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    logp_BT = pass_batch(model, inputs).logp_BT
    assert_rows_equal(logp_BT, naive_logps(model, rows, 0.7), atol=1e-9)
    with model.disable_adapter():
        assert not torch.allclose(pass_batch(model, inputs).logp_BT, logp_BT)


# --- what is refused --------------------------------------------------------------------------------------------------
def with_hole(mask_BT):
    """Without the second token of the first row."""
    mask_BT = mask_BT.clone()
    mask_BT[0, 1] = False
    return mask_BT


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mask_BT", with_hole, "right-padded"),
        ("prompt_mask_BP", lambda mask_BP: mask_BP.flip(1), "left-padded"),
        ("prompt_mask_BP", torch.zeros_like, "left-padded"),
        ("ids_BT", lambda ids_BT: ids_BT[:, 1:], "do not fit"),
    ],
    ids=["hole in a completion", "prompts padded on the right", "no prompt", "fewer ids"],
)
def test_a_batch_of_another_layout_is_refused(name, change, message):
    inputs, _ = batch()
    with pytest.raises(ValueError, match=message):
        pass_batch(MODEL, {**inputs, name: change(inputs[name])})


def with_environment(inputs):
    """The batch, whose tokens are all attended to, with a mask that leaves one token out where there are two."""
    mask_BT = inputs["mask_BT"].clone()
    mask_BT[:, 0] &= ~inputs["mask_BT"][:, 1]
    assert bool(mask_BT.sum() < inputs["mask_BT"].sum())
    return {**inputs, "real_BT": inputs["mask_BT"], "mask_BT": mask_BT}


@pytest.mark.parametrize("share", [True, False], ids=["shared prompt", "own prompts"])
def test_an_environments_tokens_are_attended_to_and_cost_no_logits(share, monkeypatch):
    """Elsewhere every column is that of the pass which trains all tokens; at these tokens it is zero."""
    inputs, _ = batch()
    part = with_environment(inputs)
    heads = []
    head = logprobs.head_columns

    def counted(hidden_NH, *arguments, **options):
        heads.append(len(hidden_NH))
        return head(hidden_NH, *arguments, **options)

    monkeypatch.setattr(logprobs, "head_columns", counted)
    columns = []
    for tensors in (inputs, part):
        options = PassOptions(temperature=0.7, chunk_elements=7 * V, share_prompt=share)
        reference = Reference(llama(seed=3), options).forward_pass(**tensors)
        columns.append(pass_batch(MODEL, tensors, share_prompt=share, reference=reference, **EXACT))
    whole, trained = columns
    for name in ("logp_BT", "kl_BT", "forward_kl_BT", "entropy_BT", "total_variation_BT", "certainty_BT"):
        expected_BT = torch.where(part["mask_BT"], getattr(whole, name), 0.0)
        torch.testing.assert_close(getattr(trained, name), expected_BT, atol=1e-12, rtol=0, msg=name)
    tokens = int(inputs["mask_BT"].sum())
    trained_tokens = int(part["mask_BT"].sum())
    assert heads == [tokens, tokens, trained_tokens, trained_tokens]


def test_a_trained_token_that_is_not_attended_to_is_refused():
    inputs, _ = batch()
    real_BT = inputs["mask_BT"].clone()
    row = int(real_BT.sum(-1).argmax())
    real_BT[row, -1] = False
    with pytest.raises(ValueError, match=rf"trained token at \[{row}, {real_BT.shape[1] - 1}\], where real_BT"):
        pass_batch(MODEL, {**inputs, "real_BT": real_BT})
    with pytest.raises(ValueError, match=r"real_BT .* and mask_BT .* differ"):
        pass_batch(MODEL, {**inputs, "real_BT": real_BT[:, 1:]})
    with pytest.raises(ValueError, match="real_BT must be right-padded"):
        pass_batch(MODEL, {**inputs, "real_BT": with_hole(inputs["mask_BT"])})


def test_a_temperature_of_zero_is_refused():
    inputs, _ = batch()
    with pytest.raises(ValueError, match="temperature"):
        pass_batch(MODEL, inputs, temperature=0.0)


@pytest.mark.parametrize("name", ["kl", "total_variation"])
def test_a_divergence_needs_a_reference(name):
    inputs, _ = batch()
    with pytest.raises(ValueError, match="needs a reference"):
        pass_batch(MODEL, inputs, **{name: True})


def test_a_reference_at_another_temperature_is_refused():
    inputs, _ = batch()
    with pytest.raises(ValueError, match="temperature"):
        pass_batch(MODEL, inputs, kl=True, reference=reference_pass(MODEL, inputs, temperature=1.0))


def test_a_reference_of_another_batch_is_refused():
    inputs, _ = batch()
    other_inputs, _ = batch((3,), (4,))
    with pytest.raises(ValueError, match="has 4 tokens"):
        pass_batch(MODEL, inputs, kl=True, reference=reference_pass(MODEL, other_inputs))
