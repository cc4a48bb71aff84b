"""Exact values on given completions against the dense float64 formulas, and the reference that evaluation names."""

import copy
import dataclasses
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.models import LoadedModel, build_reference, load_model, weights_hash
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.metrics import completion_metrics, load_eval_reference
from kl_comedy.training.packing import Packer
from small_llama import V, llama, naive_logits

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
TEMPERATURE = 0.7


def loaded(model):
    return LoadedModel(
        model=model, tokenizer=SimpleNamespace(pad_token_id=0), device=torch.device("cpu"), source="test"
    )


def completions(prompts=(3, 5, 1, 4), lengths=(4, 1, 6, 6), seed=0):
    """Scored completions of random tokens, and the same as pairs of tensors."""
    g = torch.Generator().manual_seed(seed)
    problem = Problem(id="a", text="a", answer="1")
    pairs = []
    rows = []
    for group, (prompt_length, length) in enumerate(zip(prompts, lengths, strict=True)):
        prompt_ids = torch.randint(1, V, (prompt_length,), generator=g)
        ids = torch.randint(1, V, (length,), generator=g)
        rollout = Rollout(
            prompt=Prompt(problem=problem, text="a", token_ids=tuple(prompt_ids.tolist())),
            group_id=group,
            completion_ids=tuple(ids.tolist()),
            logps=(-1.0,) * length,
            versions=(0,) * length,
            stop_reason="eos",
            text="1",
        )
        pairs.append((prompt_ids, ids))
        rows.append(Scored(rollout=rollout, reward=Reward(value=1.0)))
    return rows, pairs


def measure_of(policy, other, *, tokens=10**6, chunk=10**9, sampled=True):
    """The function that measures completions; ``other`` is the reference, None for none; not ``sampled``: greedy."""
    eval_temperature = TEMPERATURE if sampled else 0.0
    overrides = [
        f"train.microbatch_tokens={tokens}",
        f"model.head_chunk_elements={chunk}",
        f"rollout.temperature={TEMPERATURE}",
        f"eval.temperature={eval_temperature}",
    ]
    config = load_config(TINY, overrides)
    reference = None
    if other is not None:
        reference = build_reference("initial", loaded(other), config)
    return completion_metrics(config, loaded=loaded(policy), reference=reference)


def dense_values(policy, other, pairs):
    """Every name from unpadded float64 logits of the whole vocabulary, token by token."""
    with torch.no_grad():
        logp = naive_logits(policy, pairs, TEMPERATURE)
        logq = naive_logits(other, pairs, TEMPERATURE)
    # A list of one tensor [T] per completion, by name.
    columns = defaultdict(list)
    log_ratios = []
    for logp_TV, logq_TV, (_, ids) in zip(logp, logq, pairs, strict=True):
        p_TV = logp_TV.exp()
        q_TV = logq_TV.exp()
        exact_T = (p_TV * (logp_TV - logq_TV)).sum(-1)
        columns["kl/exact_reverse"].append(exact_T)
        columns["kl/exact_forward"].append((q_TV * (logq_TV - logp_TV)).sum(-1))
        columns["kl/total_variation"].append((p_TV - q_TV).abs().sum(-1) / 2)
        columns["policy/entropy"].append(-(p_TV * logp_TV).sum(-1))
        log_ratio_T = (logp_TV - logq_TV).gather(1, ids[:, None])[:, 0]
        estimates = {
            "k1": log_ratio_T,
            "k2": log_ratio_T * log_ratio_T / 2,
            "k3": torch.exp(-log_ratio_T) - 1 + log_ratio_T,
        }
        for name, estimate_T in estimates.items():
            columns[f"kl/{name}_reverse"].append(estimate_T)
            columns[f"kl_error/{name}_reverse"].append(estimate_T - exact_T)
        log_ratios.append(log_ratio_T)

    metrics = {"kl/log_ratio_max": float(torch.cat(log_ratios).abs().max())}
    for name, column in columns.items():
        tokens = torch.cat(column)
        totals = torch.stack([values_T.sum() for values_T in column])
        metrics[f"{name}_token"] = float(tokens.mean())
        metrics[f"{name}_sequence"] = float(totals.mean())
        if name.startswith("kl_error"):
            metrics[f"{name}_token_rms"] = float(tokens.square().mean().sqrt())
            metrics[f"{name}_sequence_rms"] = float(totals.square().mean().sqrt())
    # The one metric per token whose name does not say so: stored runs have it.
    metrics["policy/entropy"] = metrics.pop("policy/entropy_token")
    return metrics


@pytest.mark.parametrize(
    ("tokens", "chunk"),
    [(1, 10**9), (22, 3 * V), (10**6, 1)],
    ids=["a row at a time", "some rows, chunks of three tokens", "all rows, chunks of one token"],
)
def test_values_are_the_dense_ones_whatever_the_micro_batches_and_chunks(tokens, chunk):
    policy = llama()
    other = llama(seed=3)
    rows, pairs = completions()
    values = measure_of(policy, other, tokens=tokens, chunk=chunk)(rows)
    assert values == pytest.approx(dense_values(policy, other, pairs), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_a_pass_that_only_keeps_step_counts_nowhere(monkeypatch, place):
    """A rank without rows of its own passes over rows of another rank, which are counted there."""
    rows, pairs = completions()
    policy = llama()
    other = llama(seed=3)
    pack = Packer.micro_batches

    def with_empty_packs(packer, rows):
        packs = list(pack(packer, rows))
        assert len(packs) > 1
        empty = dataclasses.replace(packs[0], empty=True)
        position = {"first": 0, "last": len(packs), "between": 1}[place]
        return [*packs[:position], empty, *packs[position:]]

    monkeypatch.setattr(Packer, "micro_batches", with_empty_packs)
    measured = measure_of(policy, other, tokens=12)(rows)
    for name, value in dense_values(policy, other, pairs).items():
        assert measured[name] == pytest.approx(value, abs=1e-5), name


def test_a_policy_measured_against_itself_differs_in_nothing():
    policy = llama(torch.float32)
    rows, _ = completions()
    values = measure_of(policy, policy, tokens=22, chunk=3 * V)(rows)
    assert {name for name, value in values.items() if value != 0} == {"policy/entropy", "policy/entropy_sequence"}
    for parameter in policy.parameters():
        assert parameter.grad is None


def test_a_greedy_evaluation_has_exact_values_and_no_estimates():
    policy = llama()
    rows, _ = completions()
    sampled = measure_of(policy, llama(seed=3))(rows)
    greedy = measure_of(policy, llama(seed=3), sampled=False)(rows)
    exact = [name for name in sampled if name.split("/")[1].startswith(("exact", "total", "entropy"))]
    assert greedy == {name: sampled[name] for name in exact}


def test_without_a_reference_the_entropies_are_left():
    policy = llama()
    rows, _ = completions()
    full = measure_of(policy, llama(seed=3))(rows)
    alone = measure_of(policy, None)(rows)
    assert alone == {name: full[name] for name in ("policy/entropy", "policy/entropy_sequence")}


def test_nothing_is_measured_without_eval_kl():
    assert completion_metrics(load_config(TINY, ["eval.kl=false"]), loaded=loaded(llama()), reference=None) is None


QUICK = "model.options={preset: tiny, warmstart_steps: 5}"


@pytest.fixture(scope="module")
def pocket():
    return load_model(load_config(TINY, [QUICK]).model)


def test_a_config_or_a_folder_names_a_model_without_adapter(pocket, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {options: {preset: tiny, warmstart_steps: 5}, lora: {rank: 2}, dtype: bfloat16}")
    config = load_config(TINY, [QUICK, f"eval.reference={file}"])
    reference = load_eval_reference(config, pocket)
    assert reference.hash == weights_hash(pocket.model), "in the dtype of what is evaluated"
    folder = tmp_path / "model"
    pocket.model.save_pretrained(folder)
    pocket.tokenizer.save_pretrained(folder)
    assert load_eval_reference(load_config(TINY, [f"eval.reference={folder}"]), pocket).hash == reference.hash
    assert load_eval_reference(load_config(TINY, [f"eval.reference={file}", "eval.kl=false"]), pocket) is None


def test_without_a_name_there_is_no_reference(pocket):
    assert load_eval_reference(load_config(TINY, [QUICK]), pocket) is None


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere.yaml", "no such config file"), ("/nowhere/gone", "no such folder")]
)
def test_a_reference_that_does_not_exist_is_refused_by_its_key(pocket, name, message):
    with pytest.raises(UserError, match=rf"^eval\.reference: .*{message}"):
        load_eval_reference(load_config(TINY, [f"eval.reference={name}"]), pocket)


def test_a_reference_with_other_tokens_is_refused_by_its_key(pocket, tmp_path):
    other = copy.deepcopy(pocket.tokenizer)
    other.add_tokens(["new"])
    pocket.model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"eval\.reference: .*allowed: a model with the 16 tokens of"):
        load_eval_reference(load_config(TINY, [f"eval.reference={tmp_path}"]), pocket)
