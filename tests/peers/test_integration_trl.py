"""The TRL mixin on TRL's released wheel: its gradient is ours on the same batch, and TRL's own where TRL has the term.

The wheel is fetched by ``make test-integrations`` (or ``python bench/peers/fetch.py trl``).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
import torch

from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_parts
from kl_comedy.models import pocket
from kl_comedy.models.types import ReferencePass
from kl_comedy.objective import returns_with_costs, sequence_weights
from kl_comedy.records import Experience
from kl_comedy.registry import ADVANTAGES
from kl_comedy.training.loss import MicroBatch, kl_arguments, micro_loss, named_terms
from passes import token_pass

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from peers.wheels import pins

if pins()["trl"].fetched:
    sys.path.append(str(pins()["trl"].folder))
trl = pytest.importorskip("trl", reason="TRL's wheel is not fetched: make test-integrations")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["12+34=", "5+6="]
LENGTHS = (7, 3, 5, 6, 2, 4, 6, 1)
GROUP = 4
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.25)
K1_BEFORE = KLTerm("k1", placement="reward", credit="total", baseline="before", beta=0.05)
K1_TO_GO = KLTerm("k1", placement="reward", beta=0.05)
K3 = KLTerm("k3", placement="loss", beta=0.04)
TOLERANCE = 2e-5
"""Relative, in float32; passes in other batches and paddings round otherwise."""


def perturb(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


@functools.cache
def completions():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(2, 12, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    pocket.build_model(pocket.recipe_from_options({"preset": "tiny"})).save_pretrained(path)
    pocket.build_tokenizer().save_pretrained(path)
    return path


def build(folder, *, algorithm="grpo", kl=None, **options):
    """A trainer, with ``kl`` or TRL's own, whose sampler returns the fixed completions."""
    from datasets import Dataset

    from kl_comedy.integrations import trl as ours

    config = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig}[algorithm]
    kinds = {"grpo": ours.KLGRPOTrainer, "rloo": ours.KLRLOOTrainer}
    plain = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}
    settings = {
        "output_dir": str(folder / "out"),
        "beta": 0.04,
        "num_generations": GROUP,
        "per_device_train_batch_size": len(LENGTHS),
        "max_completion_length": 8,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_steps": 2,
        **({"loss_type": "grpo", "scale_rewards": "none"} if algorithm == "grpo" else {}),
        **options,
    }
    trainer = (plain if kl is None else kinds)[algorithm](
        model=str(folder),
        reward_funcs=lambda completions, **_: list(REWARDS[: len(completions)]),
        args=config(**settings),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        processing_class=pocket.build_tokenizer(),
        **({} if kl is None else {"kl": kl}),
    )
    perturb(trainer.model)
    fixed = completions()
    trainer._generate_single_turn = lambda *_, **__: (fixed, None) if algorithm == "grpo" else fixed
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch_of(trainer):
    return trainer._generate_and_score_completions([{"prompt": p} for p in PROMPTS for _ in range(GROUP)])


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def step(trainer):
    """Loss and gradient of one batch through the trainer's own methods."""
    loss = trainer.compute_loss(trainer.model, batch_of(trainer))
    return loss.item(), gradient(trainer.model, loss)


def our_gradient(folder, terms, *, advantage, reduction):
    """The same batch through kl_comedy's passes, advantages and loss."""
    from transformers import AutoModelForCausalLM

    reference, policy = (AutoModelForCausalLM.from_pretrained(folder).float() for _ in range(2))
    perturb(policy)
    tokenizer = pocket.build_tokenizer()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(GROUP)]
    pad = tokenizer.pad_token_id
    wide, width = max(map(len, prompts)), max(LENGTHS)
    tensors = {
        "prompt_ids_BP": torch.tensor([[pad] * (wide - len(ids)) + ids for ids in prompts]),
        "prompt_mask_BP": torch.tensor([[0] * (wide - len(ids)) + [1] * len(ids) for ids in prompts]).bool(),
        "ids_BT": torch.tensor([ids + [pad] * (width - len(ids)) for ids in completions()]),
        "mask_BT": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in completions()]).bool(),
    }
    mask_BT, group_B = tensors["mask_BT"], torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
    policy_pass, ref_pass = (
        token_pass(model, **tensors, temperature=1.0, chunk_elements=1 << 20) for model in (policy, reference)
    )
    reward_B = torch.tensor(REWARDS)
    experience = Experience(
        **tensors,
        behaviour_logp_BT=policy_pass.logp_BT.detach(),
        ref_logp_BT=ref_pass.logp_BT.detach(),
        advantage_BT=torch.zeros(mask_BT.shape),
        reward_B=reward_B,
        weight_B=sequence_weights(reduction, mask_BT),
        policy_version_BT=torch.zeros(mask_BT.shape, dtype=torch.long),
        group_B=group_B,
    )
    costs_BT = torch.zeros(mask_BT.shape)
    for term in terms:
        if term.baseline == "before":
            arguments = kl_arguments(term, experience, policy_pass.logp_BT, experience.ref_logp_BT, policy_pass)
            costs_BT = costs_BT + term.beta * kl_parts(term, **arguments).cost_BT
    returns_BT = returns_with_costs(reward_B.double(), costs_BT.double(), width)
    advantage_BT = ADVANTAGES.get(advantage).fn(returns_BT, mask_BT, group_B).float() * mask_BT
    ref = ReferencePass(logp_BT=experience.ref_logp_BT, hidden_NH=None, head=None, temperature=1.0)
    micro = MicroBatch(
        experience=dataclasses.replace(experience, advantage_BT=advantage_BT), references={"initial": ref}, baselines={}
    )
    algorithm = AlgorithmConfig(advantage=advantage, reduction=reduction)
    named = named_terms(terms)
    betas = {name: term.beta for name, term in named.items()}
    result = micro_loss(micro, {"initial": policy_pass}, terms=named, betas=betas, algorithm=algorithm)
    return gradient(policy, result.loss)


def distance(ours, theirs):
    return float((ours - theirs).norm() / ours.norm())


@pytest.mark.parametrize("terms", [(K1_BEFORE,), (K1_TO_GO,), (K3,), (K1_BEFORE, K3)], ids=lambda t: t[-1].label())
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_gradient_of_a_batch_is_that_of_our_own_loss(folder, terms, algorithm):
    advantage, reduction = {
        "grpo": ("dr_grpo", "sequence_mean_token_mean"),
        "rloo": ("rloo", "sequence_sum"),
    }[algorithm]
    ours = our_gradient(folder, terms, advantage=advantage, reduction=reduction)
    _, theirs = step(build(folder, algorithm=algorithm, kl=terms))
    assert distance(ours, theirs) < TOLERANCE
    _, without = step(build(folder, algorithm=algorithm, kl="none"))
    assert distance(ours, without) > 100 * TOLERANCE, "the terms must matter"


LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_trls_own_kl_is_the_recipe_trl_default_for_every_loss_type(folder, loss_type):
    """Off-policy, in a window of two accumulated batches; TRL's beta is not counted beside the terms."""
    losses, gradients = [], []
    for kl in (None, {"recipe": "trl/default", "beta": 0.04}):
        trainer = build(folder, kl=kl, loss_type=loss_type)
        batch = batch_of(trainer)
        stale = torch.Generator().manual_seed(3)
        shape = batch["ref_per_token_logps"].shape
        batch["old_per_token_logps"] = batch["ref_per_token_logps"] + 0.1 * torch.randn(shape, generator=stale)
        trainer.current_gradient_accumulation_steps = 2
        loss = trainer.compute_loss(trainer.model, batch)
        losses.append(loss.item())
        gradients.append(gradient(trainer.model, loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert distance(*gradients) < TOLERANCE


def test_a_correction_is_to_the_samplers_log_probs_where_vllm_recorded_them(folder):
    """Not to the trainer's own: the engine's differ. NaN where it recorded none, as TRL pads them."""
    corrected = [KLTerm("k3", placement="loss", correction="token_detached", beta=0.5)]

    def part_of_kl(spoil):
        """The gradient of the terms alone."""
        gradients = []
        for kl in (corrected, "none"):
            trainer = build(folder, kl=kl)
            batch = batch_of(trainer)
            spoil(batch)
            gradients.append(gradient(trainer.model, trainer.compute_loss(trainer.model, batch)))
        return gradients[0] - gradients[1]

    def stale(batch):
        generator = torch.Generator().manual_seed(3)
        reference_BT = batch["ref_per_token_logps"]
        batch["old_per_token_logps"] = reference_BT + 0.1 * torch.randn(reference_BT.shape, generator=generator)
        sampler_BT = reference_BT + 0.4 * torch.randn(reference_BT.shape, generator=generator)
        return torch.where(torch.rand(reference_BT.shape, generator=generator) < 0.2, torch.nan, sampler_BT)

    def recorded(batch):
        batch["sampling_per_token_logps"] = stale(batch)

    def as_trainers(batch):
        sampler_BT = stale(batch)
        batch["old_per_token_logps"] = torch.where(sampler_BT.isnan(), batch["old_per_token_logps"], sampler_BT)

    ours = part_of_kl(recorded)
    assert distance(part_of_kl(as_trainers), ours) < 10 * TOLERANCE
    assert distance(part_of_kl(stale), ours) > 0.01, "the sampler's log-probs matter"


def test_rloos_own_kl_is_the_recipe_trl_rloo(folder):
    plain, own = (step(build(folder, algorithm="rloo", beta=0.05, kl=kl)) for kl in (None, "trl/rloo"))
    assert plain[0] == pytest.approx(own[0], rel=1e-5)
    assert distance(plain[1], own[1]) < TOLERANCE


def test_a_cost_in_the_reward_is_a_cost_in_trls_advantages_per_token(folder):
    own = build(folder, kl=[K1_TO_GO])
    _, with_term = step(own)
    plain = build(folder)
    batch = batch_of(plain)
    mask_BT = batch["completion_mask"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], mask_BT], 1)
    with torch.no_grad():
        logp_BT = plain._get_per_token_logps_and_entropies(plain.model, ids, attention, mask_BT.shape[1])[0]
    k1_BT = (logp_BT - batch["ref_per_token_logps"]) * mask_BT
    batch["advantages"] = batch["advantages"][:, None] - 0.05 * k1_BT.flip(-1).cumsum(-1).flip(-1)
    plain.beta = 0.0
    assert distance(gradient(plain.model, plain.compute_loss(plain.model, batch)), with_term) < TOLERANCE


@pytest.mark.parametrize(
    ("kl", "options", "message"),
    [
        ([K3], {"beta": 0.0}, "beta: got 0.0; allowed: any other number"),
        ([{"estimator": "exact", "placement": "loss"}], {}, "exact reads other tokens too"),
        ([{"estimator": "k1", "baseline": "exact", "credit": "own"}], {}, "baseline exact reads other tokens too"),
        ([{"estimator": "k1", "baseline": "own"}], {}, "TRL splits groups"),
        ([{"estimator": "k1", "baseline": "before"}], {}, "use credit: total"),
        ([{"estimator": "k1", "beta": {"target": 1.0}}], {}, "use a number"),
        ([K1_BEFORE], {"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
    ],
)
def test_a_setting_that_does_not_fit_is_one_clear_error(folder, kl, options, message):
    with pytest.raises(UserError, match=message):
        build(folder, kl=kl, **options)


def test_another_version_of_trl_is_refused(folder, monkeypatch):
    from kl_comedy.integrations import trl as ours

    monkeypatch.setattr(ours, "SUPPORTED", "1.17.")
    with pytest.raises(UserError, match=r"trl: got '1\.16\.0'"):
        build(folder, kl="none")


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_training_with_a_schedule_and_the_gradient_check(folder, algorithm):
    from kl_comedy.integrations.gradient_check import KLGradientCheck

    schedule = {"start": 0.2, "end": 0.1, "steps": 2}
    kl = [{"estimator": "k3", "placement": "loss", "beta": schedule}, K1_BEFORE]
    trainer = build(folder, algorithm=algorithm, kl=kl, logging_steps=1)
    check = KLGradientCheck(trainer, coefficient="kl_scale", every=1)
    trainer.add_callback(check)
    trainer.train()
    assert check.passed and [record["step"] for record in check.records] == [0, 1]
    logged = [entry for entry in trainer.state.log_history if "kl/loss" in entry]
    assert len(logged) == 2 and all(entry["kl/k1"] != 0 and "rewards/kl_cost/mean" in entry for entry in logged)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_audits_reference_gradient_is_that_of_the_exact_kl(folder, algorithm):
    """Of completions one by one, without padding; then through training, where TRL logs it."""
    from kl_comedy.integrations.kl_audit import KLAudit
    from kl_comedy.lab.audit.gradients import GradientSketch, layer_groups

    trainer = build(folder, algorithm=algorithm, kl=[K3], logging_steps=1, temperature=0.8)
    audit = KLAudit(trainer, every=1, blocks=4, target="token_reverse", coefficient="kl_scale")
    audit._original, model, ref_model = trainer.compute_loss, trainer.model, trainer.ref_model
    audit._sketch = GradientSketch(layer_groups(model), 0)
    measured = audit._block(model, batch_of(trainer))[2]
    tokenizer, total = pocket.build_tokenizer(), 0.0
    for prompt, ids in zip([p for p in PROMPTS for _ in range(GROUP)], completions(), strict=True):
        whole = torch.tensor([tokenizer(prompt)["input_ids"] + ids])
        at = slice(whole.shape[1] - len(ids) - 1, -1)
        logp_TV, ref_TV = ((each(whole).logits[0, at] / 0.8).log_softmax(-1) for each in (model, ref_model))
        total = total + (logp_TV.exp() * (logp_TV - ref_TV.detach())).sum() / len(LENGTHS)
    names = [parameter for group in layer_groups(model).values() for parameter in group]
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, names)])
    assert distance(expected, measured) < TOLERANCE
    audit._sketch = None
    trainer.add_callback(audit)
    trainer.train()
    assert [record["step"] for record in audit.records] == [0, 1]
    assert all(0 < record["cosine"] <= 1 for record in audit.records)
    assert sum("kl_audit/cosine" in entry for entry in trainer.state.log_history) == 2


def test_the_gradient_check_on_plain_trl(folder):
    from kl_comedy.integrations.gradient_check import KLGradientCheck

    trainer = build(folder, logging_steps=1)
    check = KLGradientCheck(trainer)
    trainer.add_callback(check)
    trainer.train()
    assert check.passed and trainer.beta == 0.04
