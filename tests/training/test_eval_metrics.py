"""Exact values on given completions against the dense float64 formulas, and the reference that evaluation names."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.models import LoadedModel, build_reference, load_model, weights_hash
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.metrics import completion_metrics, load_eval_reference
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
    pairs = [
        (torch.randint(1, V, (p,), generator=g), torch.randint(1, V, (t,), generator=g))
        for p, t in zip(prompts, lengths, strict=True)
    ]
    rows = [
        Scored(
            rollout=Rollout(
                prompt=Prompt(
                    problem=Problem(id="a", text="a", answer="1"), text="a", token_ids=tuple(prompt.tolist())
                ),
                group_id=group,
                completion_ids=tuple(ids.tolist()),
                logps=(-1.0,) * len(ids),
                versions=(0,) * len(ids),
                stop_reason="eos",
                text="1",
            ),
            reward=Reward(value=1.0),
        )
        for group, (prompt, ids) in enumerate(pairs)
    ]
    return rows, pairs


def measure_of(policy, other, *, tokens=10**6, chunk=10**9, sampled=True):
    overrides = [f"train.microbatch_tokens={tokens}", f"model.head_chunk_elements={chunk}"]
    overrides += [f"rollout.temperature={TEMPERATURE}", f"eval.temperature={TEMPERATURE if sampled else 0.0}"]
    config = load_config(TINY, overrides)
    reference = None
    if other is not None:
        reference = build_reference("initial", loaded(other), config)
    return completion_metrics(config, loaded=loaded(policy), reference=reference)


def dense_values(policy, other, pairs):
    """Every name from unpadded float64 logits of the whole vocabulary, token by token."""
    with torch.no_grad():
        logp, logq = naive_logits(policy, pairs, TEMPERATURE), naive_logits(other, pairs, TEMPERATURE)
    columns = {
        "kl/exact_reverse": [(p.exp() * (p - q)).sum(-1) for p, q in zip(logp, logq, strict=True)],
        "kl/exact_forward": [(q.exp() * (q - p)).sum(-1) for p, q in zip(logp, logq, strict=True)],
        "kl/total_variation": [(p.exp() - q.exp()).abs().sum(-1) / 2 for p, q in zip(logp, logq, strict=True)],
        "policy/entropy": [-(p.exp() * p).sum(-1) for p in logp],
    }
    ratio = [(p - q).gather(1, ids[:, None])[:, 0] for p, q, (_, ids) in zip(logp, logq, pairs, strict=True)]
    formulas = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.exp(-x) - 1 + x}
    for name, formula in formulas.items():
        columns[f"kl/{name}_reverse"] = [formula(x) for x in ratio]
        exact = columns["kl/exact_reverse"]
        columns[f"kl_error/{name}_reverse"] = [formula(x) - e for x, e in zip(ratio, exact, strict=True)]
    metrics = {"kl/log_ratio_max": float(torch.cat(ratio).abs().max())}
    for name, column in columns.items():
        tokens, totals = torch.cat(column), torch.stack([x.sum() for x in column])
        metrics["policy/entropy" if name == "policy/entropy" else f"{name}_token"] = float(tokens.mean())
        metrics[f"{name}_sequence"] = float(totals.mean())
        if name.startswith("kl_error"):
            metrics[f"{name}_token_rms"] = float(tokens.square().mean().sqrt())
            metrics[f"{name}_sequence_rms"] = float(totals.square().mean().sqrt())
    return metrics


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 10**9), (22, 3 * V), (10**6, 1)])
def test_values_are_the_dense_ones_whatever_the_micro_batches_and_chunks(tokens, chunk):
    policy, other, (rows, pairs) = llama(), llama(seed=3), completions()
    got = measure_of(policy, other, tokens=tokens, chunk=chunk)(rows)
    assert got == pytest.approx(dense_values(policy, other, pairs), rel=1e-9, abs=1e-12)


def test_a_policy_measured_against_itself_differs_in_nothing():
    policy, (rows, _) = llama(torch.float32), completions()
    got = measure_of(policy, policy, tokens=22, chunk=3 * V)(rows)
    assert {name for name, value in got.items() if value != 0} == {"policy/entropy", "policy/entropy_sequence"}
    assert all(p.grad is None for p in policy.parameters())


def test_estimates_need_samples_and_kl_needs_a_reference():
    policy, (rows, _) = llama(), completions()
    full = measure_of(policy, llama(seed=3))(rows)
    unsampled = measure_of(policy, llama(seed=3), sampled=False)(rows)
    exact = {name for name in full if name.split("/")[1].startswith(("exact", "total", "entropy"))}
    assert unsampled == {name: full[name] for name in exact}
    assert completion_metrics(load_config(TINY, ["eval.kl=false"]), loaded=loaded(policy), reference=None) is None
    alone = measure_of(policy, None)(rows)
    assert alone == {name: full[name] for name in ("policy/entropy", "policy/entropy_sequence")}


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
    assert load_eval_reference(load_config(TINY, [QUICK]), pocket) is None
    assert load_eval_reference(load_config(TINY, [f"eval.reference={file}", "eval.kl=false"]), pocket) is None


def test_what_cannot_be_the_reference_is_refused_by_its_key(pocket, tmp_path):
    with pytest.raises(UserError, match=r"^eval\.reference: .*no such config file"):
        load_eval_reference(load_config(TINY, ["eval.reference=nowhere.yaml"]), pocket)
    with pytest.raises(UserError, match=r"^eval\.reference: .*no such folder"):
        load_eval_reference(load_config(TINY, [f"eval.reference={tmp_path / 'gone'}"]), pocket)
    other = copy.deepcopy(pocket.tokenizer)
    other.add_tokens(["new"])
    pocket.model.save_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"eval\.reference: .*allowed: a model with the 16 tokens of"):
        load_eval_reference(load_config(TINY, [f"eval.reference={tmp_path}"]), pocket)
