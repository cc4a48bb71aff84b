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
from kl_comedy.training.run import make_trainer
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
    """Of a weighted sum of log-probs, float32, on the CPU, by name."""
    inputs = batch(loaded.device)
    loaded.model.zero_grad()
    precision = torch.autocast(loaded.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False)
    with precision:
        passed = token_pass(loaded.model, **inputs, temperature=0.9, chunk_elements=chunk_elements)
        generator = torch.Generator().manual_seed(2)
        weight_BT = torch.randn(passed.logp_BT.shape, generator=generator).to(loaded.device)
        (weight_BT * passed.logp_BT).sum().backward()
    return {n: full_tensor(p.grad).cpu() for n, p in loaded.model.named_parameters() if p.grad is not None}


def assert_close_as_vectors(actual, expected, *, relative):
    """The difference of two gradients is at most ``relative`` of the second's norm."""
    assert actual.keys() == expected.keys()
    for name, theirs in expected.items():
        gap, size = float((actual[name] - theirs).norm()), float(theirs.norm())
        assert gap <= relative * size + 1e-7, f"{name}: {gap:.3g} of {size:.3g}"


# --- KL terms ---------------------------------------------------------------------------------------------------------


def every_term():
    """Of each recipe; and each estimator of a few with each correction, credit and placement that is possible."""
    for name in RECIPES.names():
        for number, term in enumerate(resolve_terms(name)):
            yield f"{name} {number}", term
    for correction, estimator, placement in itertools.product(
        CORRECTIONS.names(), ("k1", "k3", "exact"), ("loss", "reward")
    ):
        for credit in ("total", "to_go", "own") if placement == "reward" else (None,):
            with contextlib.suppress(UserError):
                words = {"estimator": estimator, "placement": placement, "correction": correction, "credit": credit}
                yield " ".join(filter(None, words.values())), KLTerm(**words)


TERMS = dict(every_term())


def surrogate_gradients(term, device):
    generator = torch.Generator().manual_seed(3)
    logp, reference, behaviour = (-2 * torch.rand(6, 70, generator=generator) for _ in range(3))
    lengths = torch.tensor([70, 3, 41, 1, 70, 9])
    mask_BT = (torch.arange(70)[None] < lengths[:, None]).to(device)
    group_B = torch.tensor([0, 0, 0, 1, 1, 1], device=device)
    policy_BT, behaviour_BT = logp.to(device).requires_grad_(True), (logp + 0.05 * behaviour).to(device)
    tensors = {
        "logp_BT": policy_BT,
        "ref_logp_BT": reference.to(device),
        "behaviour_logp_BT": behaviour_BT,
        "mask_BT": mask_BT,
    }
    if term.needs != "log_ratio":
        tensors["exact_kl_BT"] = policy_BT.square()
    baseline_BT = own_baseline(kl_parts(term, **tensors), mask_BT, group_B) if term.baseline == "own" else None
    surrogate_BT = kl_surrogate(term, **tensors, baseline_BT=baseline_BT)
    surrogate_BT.sum().backward()
    return {"value": surrogate_BT.detach().cpu(), "gradient": policy_BT.grad.cpu()}


@pytest.mark.parametrize("name", TERMS)
def test_every_kl_term_is_deterministic_and_has_the_gradient_of_the_cpu(name, device, deterministic):
    """Torch raises where an operation has no deterministic algorithm on the device."""
    ours, again = (surrogate_gradients(TERMS[name], device) for _ in range(2))
    assert all(torch.equal(again[key], value) for key, value in ours.items())
    assert_close_as_vectors(ours, surrogate_gradients(TERMS[name], torch.device("cpu")), relative=1e-4)


# --- the policy's pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True])
def test_gradients_are_those_of_the_cpu(qwen, deterministic, adapter):
    lora = LoraConfig(rank=4) if adapter else None
    ours, theirs = (gradients(policy(qwen, name, lora=lora)) for name in (DEVICE, "cpu"))
    assert_close_as_vectors(ours, theirs, relative=1e-4)


@pytest.mark.parametrize("changes", [{}, *({name: value} for name, value in KERNELS.items())], ids=str)
def test_gradients_in_bf16_point_where_those_in_float32_do(qwen, deterministic, changes):
    narrow, wide = (
        torch.cat([gradient.flatten() for gradient in gradients(policy(qwen, **words), autocast=autocast).values()])
        for words, autocast in ((changes, True), ({}, False))
    )
    assert float(torch.nn.functional.cosine_similarity(narrow.double(), wide.double(), dim=0)) > 0.999


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("requested", [(), QUANTITIES])
def test_the_heads_gradients_do_not_depend_on_ambient_autocast(device, deterministic, rows, requested):
    """In one chunk, where the log-probs of the forward pass are kept, and in several."""
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(50, 96, generator=generator), torch.randn(300, 96, generator=generator) / 10
    shifted, ids_N = weight + 0.02 * torch.randn(300, 96, generator=generator), torch.arange(50, device=device) * 5
    reference = (hidden.to(device), (shifted.to(device), None)) if requested else None

    def run(autocast):
        leaves = [tensor.to(device, copy=True).requires_grad_(True) for tensor in (hidden, weight)]
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            columns = head_columns(
                leaves[0],
                (leaves[1], None),
                ids_N,
                temperature=0.8,
                chunk_elements=rows * 300,
                requested=requested,
                reference=reference,
            )
            sum(columns[name].sum() for name in ("logp", *{"kl", "forward_kl"} & columns.keys())).backward()
        return {**{name: column.detach() for name, column in columns.items()}, "h": leaves[0].grad, "w": leaves[1].grad}

    inside, outside = run(True), run(False)
    assert all(torch.equal(inside[name], value) for name, value in outside.items())


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {}, KERNELS], ids=str)
def test_the_samplers_log_probs_are_the_learners_in_bf16(qwen, deterministic, changes):
    loaded = policy(qwen, **changes)
    whole = changes.get("dtype") == "bfloat16"
    autocast = torch.autocast(loaded.device.type, torch.bfloat16, enabled=not whole, cache_enabled=False)
    problem = Problem(id="", text="", answer="")
    prompts = [Prompt(problem=problem, text="", token_ids=tuple(range(2, 2 + n))) for n in (5, 12, 30)]
    with autocast:
        rows = build_hf(RolloutConfig(batch_sequences=16), loaded=loaded).generate(
            prompts, group_size=5, sampling=Sampling(temperature=1.0, max_new_tokens=64), seed=0
        )
    gaps = []
    for row in rows:
        ids = {"prompt_ids_BP": row.prompt.token_ids, "ids_BT": row.completion_ids}
        tensors = {name: torch.tensor([tokens], device=loaded.device) for name, tokens in ids.items()}
        masks = {name.replace("ids", "mask"): torch.ones_like(ids, dtype=torch.bool) for name, ids in tensors.items()}
        with torch.no_grad(), autocast:
            passed = token_pass(loaded.model, **tensors, **masks, temperature=1.0, chunk_elements=2**20)
        gaps.append((passed.logp_BT[0].cpu() - torch.tensor(row.logps)).abs())
    assert len(torch.cat(gaps)) > 100
    assert float(torch.cat(gaps).mean()) < 0.01


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
    trained = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    assert trained and [name for name, p in trained.items() if p.grad is None] == []
    gathered = [full_tensor(p.grad) for p in trained.values()]
    assert sum(float(gradient.norm()) > 0 for gradient in gathered) > len(gathered) // 3


def test_gradients_in_shards_are_those_of_one_process(qwen, one_process, deterministic):
    assert_close_as_vectors(gradients(sharded(qwen)), gradients(policy(qwen)), relative=1e-4)


def test_completions_end_at_the_same_tokens_in_shards(qwen, one_process):
    whole, shards = policy(qwen), sharded(qwen)
    assert end_tokens(whole.causal, whole.tokenizer) == end_tokens(shards.causal, shards.tokenizer) == ENDS
