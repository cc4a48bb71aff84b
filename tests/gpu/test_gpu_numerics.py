"""Forward and backward on the device: deterministic, equal to the CPU's, sampler and learner alike."""

import contextlib
import itertools

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.config.schema import LoraConfig, ModelConfig, RolloutConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts, kl_surrogate, own_baseline, resolve_terms
from kl_comedy.models import load_model
from kl_comedy.models.sharding import load_sharded
from kl_comedy.models.weights import full_tensor
from kl_comedy.records import Problem, Prompt
from kl_comedy.registry import CORRECTIONS, RECIPES
from kl_comedy.rollouts import Sampling, build_hf
from kl_comedy.rollouts.hf import end_tokens
from kl_comedy.training.fit import make_trainer
from machine_runs import DEVICE, ENDS, KERNELS, TINY
from passes import head_columns, token_pass

QUANTITIES = ("kl", "forward_kl", "entropy", "total_variation")
VOCABULARY = 512


def policy(folder, device_name=DEVICE, **changes):
    return load_model(ModelConfig(source=str(folder), device=device_name, **changes))


def batch(device, *, prompt=9, length=40, rows=6):
    """Two prompts, three completions each, of different lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCABULARY, (2, prompt), generator=generator).repeat_interleave(rows // 2, 0)
    lengths = torch.tensor([length, 7, length - 3, 1, 20, length])[:rows]
    inputs = {
        "prompt_ids_BP": prompts,
        "prompt_mask_BP": torch.ones_like(prompts, dtype=torch.bool),
        "ids_BT": torch.randint(2, VOCABULARY, (rows, length), generator=generator),
        "mask_BT": torch.arange(length)[None] < lengths[:, None],
    }
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def gradients(loaded, *, autocast=False, chunk_elements=2**20):
    """The gradients of a weighted sum of log-probs, float32, on the CPU, by name."""
    inputs = batch(loaded.device)
    loaded.model.zero_grad()
    precision = torch.autocast(loaded.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False)
    with precision:
        passed = token_pass(loaded.model, **inputs, temperature=0.9, chunk_elements=chunk_elements)
        # Drawn on the CPU, so that each device has the same.
        generator = torch.Generator().manual_seed(2)
        weight_BT = torch.randn(passed.logp_BT.shape, generator=generator).to(loaded.device)
        (weight_BT * passed.logp_BT).sum().backward()
    gradients = {}
    for name, parameter in loaded.model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = full_tensor(parameter.grad).cpu()
    return gradients


def assert_close_as_vectors(actual, expected, *, relative):
    """The difference of two gradients is at most ``relative`` of the second's norm."""
    assert actual.keys() == expected.keys()
    for name, expected_gradient in expected.items():
        gap = float((actual[name] - expected_gradient).norm())
        size = float(expected_gradient.norm())
        assert gap <= relative * size + 1e-7, f"{name}: {gap:.3g} of {size:.3g}"


# --- KL terms ---------------------------------------------------------------------------------------------------------


CREDITS = {"loss": (None,), "reward": ("total", "to_go", "own")}
"""Which credits each placement has."""


def every_term():
    """The terms of each recipe; three estimators with each correction, credit and placement that is possible."""
    terms = {}
    for name in RECIPES.names():
        for number, term in enumerate(resolve_terms(name)):
            terms[f"{name} {number}"] = term
    for correction, estimator, placement in itertools.product(CORRECTIONS.names(), ("k1", "k3", "exact"), CREDITS):
        for credit in CREDITS[placement]:
            fields = {"estimator": estimator, "placement": placement, "correction": correction, "credit": credit}
            name = " ".join(value for value in fields.values() if value)
            with contextlib.suppress(UserError):  # an impossible combination
                terms[name] = KLTerm(**fields)
    return terms


TERMS = every_term()


def surrogate_gradients(term, device):
    """The surrogate of six completions of 1 to 70 tokens, and its gradient in their log-probs, on the CPU."""
    generator = torch.Generator().manual_seed(3)
    logp = -2 * torch.rand(6, 70, generator=generator)
    reference = -2 * torch.rand(6, 70, generator=generator)
    behaviour = -2 * torch.rand(6, 70, generator=generator)
    lengths = torch.tensor([70, 3, 41, 1, 70, 9])
    mask_BT = (torch.arange(70)[None] < lengths[:, None]).to(device)
    group_B = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    logp_BT = logp.to(device).requires_grad_(True)
    tensors = {
        "logp_BT": logp_BT,
        "ref_logp_BT": reference.to(device),
        "behaviour_logp_BT": (logp + 0.05 * behaviour).to(device),
        "mask_BT": mask_BT,
    }
    if term.needs != "log_ratio":
        tensors["exact_kl_BT"] = logp_BT.square()
    baseline_BT = None
    if term.baseline == "own":
        baseline_BT = own_baseline(kl_parts(term, **tensors), mask_BT, group_B)
    surrogate_BT = kl_surrogate(term, **tensors, baseline_BT=baseline_BT)
    surrogate_BT.sum().backward()
    return {"value": surrogate_BT.detach().cpu(), "gradient": logp_BT.grad.cpu()}


@pytest.mark.parametrize("name", TERMS)
def test_every_kl_term_is_deterministic_and_has_the_gradient_of_the_cpu(name, device, deterministic):
    """Torch raises where an operation has no deterministic algorithm on the device."""
    first = surrogate_gradients(TERMS[name], device)
    second = surrogate_gradients(TERMS[name], device)
    assert torch.equal(second["value"], first["value"])
    assert torch.equal(second["gradient"], first["gradient"])
    assert_close_as_vectors(first, surrogate_gradients(TERMS[name], torch.device("cpu")), relative=1e-4)


# --- the policy's pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_gradients_are_those_of_the_cpu(qwen, deterministic, adapter):
    lora = LoraConfig(rank=4) if adapter else None
    on_device = gradients(policy(qwen, DEVICE, lora=lora))
    on_cpu = gradients(policy(qwen, "cpu", lora=lora))
    assert_close_as_vectors(on_device, on_cpu, relative=1e-4)


def flat(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()]).double()


EACH_KERNEL = [{}] + [{name: value} for name, value in KERNELS.items()]


@pytest.mark.parametrize("changes", EACH_KERNEL, ids=str)
def test_gradients_in_bf16_point_where_those_in_float32_do(qwen, deterministic, changes):
    in_bf16 = flat(gradients(policy(qwen, **changes), autocast=True))
    in_float32 = flat(gradients(policy(qwen)))
    assert float(torch.nn.functional.cosine_similarity(in_bf16, in_float32, dim=0)) > 0.999


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("requested", [(), QUANTITIES])
def test_the_heads_gradients_do_not_depend_on_ambient_autocast(device, deterministic, rows, requested):
    """In one chunk, where the log-probs of the forward pass are kept, and in several."""
    generator = torch.Generator().manual_seed(4)
    hidden_NH = torch.randn(50, 96, generator=generator)
    weight_VH = torch.randn(300, 96, generator=generator) / 10
    reference_weight_VH = weight_VH + 0.02 * torch.randn(300, 96, generator=generator)
    ids_N = torch.arange(50, device=device) * 5
    reference = None
    if requested:
        reference = (hidden_NH.to(device), (reference_weight_VH.to(device), None))

    def columns_and_gradients(autocast):
        hidden = hidden_NH.to(device, copy=True).requires_grad_(True)
        weight = weight_VH.to(device, copy=True).requires_grad_(True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            columns = head_columns(
                hidden,
                (weight, None),
                ids_N,
                temperature=0.8,
                chunk_elements=rows * 300,
                requested=requested,
                reference=reference,
            )
            differentiable = [columns[name] for name in ("logp", "kl", "forward_kl") if name in columns]
            sum(column.sum() for column in differentiable).backward()
        results = {name: column.detach() for name, column in columns.items()}
        results["hidden's gradient"] = hidden.grad
        results["weight's gradient"] = weight.grad
        return results

    inside = columns_and_gradients(autocast=True)
    outside = columns_and_gradients(autocast=False)
    for name, expected in outside.items():
        assert torch.equal(inside[name], expected), name


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {}, KERNELS], ids=str)
def test_the_samplers_log_probs_are_the_learners_in_bf16(qwen, deterministic, changes):
    loaded = policy(qwen, **changes)
    weights_are_bf16 = changes.get("dtype") == "bfloat16"
    autocast = torch.autocast(loaded.device.type, torch.bfloat16, enabled=not weights_are_bf16, cache_enabled=False)
    problem = Problem(id="", text="", answer="")
    prompts = []
    for length in (5, 12, 30):
        prompts.append(Prompt(problem=problem, text="", token_ids=tuple(range(2, 2 + length))))
    sampling = Sampling(temperature=1.0, max_new_tokens=64)
    backend = build_hf(RolloutConfig(batch_sequences=16), loaded=loaded)
    with autocast:
        rollouts = backend.generate(prompts, group_size=5, sampling=sampling, seed=0)
    gaps = []
    for rollout in rollouts:
        prompt_ids_BP = torch.tensor([rollout.prompt.token_ids], device=loaded.device)
        ids_BT = torch.tensor([rollout.completion_ids], device=loaded.device)
        with torch.no_grad(), autocast:
            passed = token_pass(
                loaded.model,
                prompt_ids_BP=prompt_ids_BP,
                prompt_mask_BP=torch.ones_like(prompt_ids_BP, dtype=torch.bool),
                ids_BT=ids_BT,
                mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
                temperature=1.0,
                chunk_elements=2**20,
            )
        gaps.append((passed.logp_BT[0].cpu() - torch.tensor(rollout.logps)).abs())
    gaps = torch.cat(gaps)
    assert len(gaps) > 100, "too few tokens for a mean"
    # A mean: in bf16 single tokens differ by more, since batches of other shapes round differently.
    assert float(gaps.mean()) < 0.01


# --- FSDP2 of one process ---------------------------------------------------------------------------------------------


def sharded(folder, **changes):
    return load_sharded(ModelConfig(source=str(folder), device=DEVICE, **changes), limit_bytes=2**30)


def trainers_precision():
    """The context in which a run with ``train.precision: bf16`` computes."""
    words = ["train.precision=bf16", "tracking.uri=none", f"model.device={DEVICE}"]
    return make_trainer(load_config(TINY, words), []).precision_plugin.forward_context()


@pytest.mark.parametrize("changes", [{}, {"lora": LoraConfig(rank=4)}, {"gradient_checkpointing": True}], ids=str)
def test_every_weight_gets_a_gradient_after_a_pass_without_gradient(qwen, one_process, changes):
    """With autocast's cache on, a pass without gradient before would leave most of FSDP2's gradients None."""
    loaded = sharded(qwen, **changes)
    options = {"temperature": 1.0, "chunk_elements": 2**20}
    with trainers_precision():
        with torch.no_grad():
            token_pass(loaded.model, **batch(loaded.device), **options)
        passed = token_pass(loaded.model, **batch(loaded.device), **options)
        passed.logp_BT[passed.logp_BT != 0].sum().backward()
    trained = {name: weight for name, weight in loaded.model.named_parameters() if weight.requires_grad}
    assert trained
    without_gradient = [name for name, weight in trained.items() if weight.grad is None]
    assert without_gradient == []
    norms = [float(full_tensor(weight.grad).norm()) for weight in trained.values()]
    # The A factors of an adapter have a gradient of 0 at the start, where B is 0.
    assert sum(norm > 0 for norm in norms) > len(norms) // 3


def test_gradients_in_shards_are_those_of_one_process(qwen, one_process, deterministic):
    assert_close_as_vectors(gradients(sharded(qwen)), gradients(policy(qwen)), relative=1e-4)


def test_completions_end_at_the_same_tokens_in_shards(qwen, one_process):
    whole = policy(qwen)
    shards = sharded(qwen)
    assert end_tokens(whole.causal, whole.tokenizer) == ENDS
    assert end_tokens(shards.causal, shards.tokenizer) == ENDS
