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
GROUP = 4
PROMPT_OF_ROW = [prompt for prompt in PROMPTS for _ in range(GROUP)]
LENGTHS = (7, 3, 5, 6, 2, 4, 6, 1)
"""Of the completions."""
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


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The classes of TRL for one algorithm, ours for it, and what a test needs to know of it."""

    config: type
    trainer: type
    trainer_with_terms: type
    options: dict
    """With which TRL's loss is one of ours."""
    advantage: str
    reduction: str
    """Those of ours."""


@functools.cache
def algorithm_named(name):
    from kl_comedy.integrations import trl as ours

    if name == "grpo":
        return Algorithm(
            config=trl.GRPOConfig,
            trainer=trl.GRPOTrainer,
            trainer_with_terms=ours.KLGRPOTrainer,
            options={"loss_type": "grpo", "scale_rewards": "none"},
            advantage="dr_grpo",
            reduction="sequence_mean_token_mean",
        )
    return Algorithm(
        config=trl.RLOOConfig,
        trainer=trl.RLOOTrainer,
        trainer_with_terms=ours.KLRLOOTrainer,
        options={},
        advantage="rloo",
        reduction="sequence_sum",
    )


def rewards(completions, **_):
    return list(REWARDS[: len(completions)])


def build(folder, *, algorithm="grpo", kl=None, **options):
    """A trainer, with ``kl`` or TRL's own, whose sampler returns the fixed completions."""
    from datasets import Dataset

    classes = algorithm_named(algorithm)
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
        **classes.options,
        **options,
    }
    arguments = {
        "model": str(folder),
        "reward_funcs": rewards,
        "args": classes.config(**settings),
        "train_dataset": Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
        "processing_class": pocket.build_tokenizer(),
    }
    if kl is None:
        trainer = classes.trainer(**arguments)
    else:
        trainer = classes.trainer_with_terms(**arguments, kl=kl)
    perturb(trainer.model)

    def sample(*_, **__):
        if algorithm == "grpo":
            return completions(), None  # no log-probs of a sampler
        return completions()

    trainer._generate_single_turn = sample
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch_of(trainer):
    """The batch that the trainer makes of the completions."""
    return trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPT_OF_ROW])


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def step(trainer):
    """Loss and gradient of one batch through the trainer's own methods."""
    loss = trainer.compute_loss(trainer.model, batch_of(trainer))
    return loss.item(), gradient(trainer.model, loss)


def padded(rows, *, left):
    """Rows of token ids as a tensor, padded on one side, and the mask of the tokens."""
    pad = pocket.build_tokenizer().pad_token_id
    width = max(map(len, rows))
    ids = []
    mask = []
    for row in rows:
        missing = width - len(row)
        if left:
            ids.append([pad] * missing + row)
            mask.append([False] * missing + [True] * len(row))
        else:
            ids.append(row + [pad] * missing)
            mask.append([True] * len(row) + [False] * missing)
    return torch.tensor(ids), torch.tensor(mask)


def our_gradient(folder, terms, *, advantage, reduction):
    """The same batch through kl_comedy's passes, advantages and loss."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder).float()
    policy = AutoModelForCausalLM.from_pretrained(folder).float()
    perturb(policy)
    tokenizer = pocket.build_tokenizer()
    prompt_ids_BP, prompt_mask_BP = padded([tokenizer(prompt)["input_ids"] for prompt in PROMPT_OF_ROW], left=True)
    ids_BT, mask_BT = padded(completions(), left=False)
    tensors = {
        "prompt_ids_BP": prompt_ids_BP,
        "prompt_mask_BP": prompt_mask_BP,
        "ids_BT": ids_BT,
        "mask_BT": mask_BT,
        "real_BT": mask_BT,
    }
    policy_pass = token_pass(policy, **tensors, temperature=1.0, chunk_elements=1 << 20)
    ref_pass = token_pass(reference, **tensors, temperature=1.0, chunk_elements=1 << 20)

    group_B = torch.arange(len(PROMPTS)).repeat_interleave(GROUP)
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
    returns_BT = returns_with_costs(reward_B.double(), costs_BT.double(), mask_BT.shape[1])
    advantage_BT = ADVANTAGES.get(advantage).fn(returns_BT, mask_BT, group_B).float() * mask_BT

    named = named_terms(terms)
    ref = ReferencePass(logp_BT=experience.ref_logp_BT, hidden_NH=None, head=None, temperature=1.0)
    result = micro_loss(
        MicroBatch(
            experience=dataclasses.replace(experience, advantage_BT=advantage_BT),
            references={"initial": ref},
            baselines={},
        ),
        {"initial": policy_pass},
        terms=named,
        betas={name: term.beta for name, term in named.items()},
        algorithm=AlgorithmConfig(advantage=advantage, reduction=reduction),
    )
    return gradient(policy, result.loss)


def distance(ours, theirs):
    return float((ours - theirs).norm() / ours.norm())


both_algorithms = pytest.mark.parametrize("algorithm", ["grpo", "rloo"])


@pytest.mark.parametrize(
    "terms",
    [(K1_BEFORE,), (K1_TO_GO,), (K3,), (K1_BEFORE, K3)],
    ids=["k1 before the baseline", "k1 to go", "k3 in loss", "k1 and k3"],
)
@both_algorithms
def test_the_gradient_of_a_batch_is_that_of_our_own_loss(folder, terms, algorithm):
    classes = algorithm_named(algorithm)
    ours = our_gradient(folder, terms, advantage=classes.advantage, reduction=classes.reduction)
    _, theirs = step(build(folder, algorithm=algorithm, kl=terms))
    assert distance(ours, theirs) < TOLERANCE
    _, without = step(build(folder, algorithm=algorithm, kl="none"))
    assert distance(ours, without) > 100 * TOLERANCE, "the terms must matter"


LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")


def stale_step(trainer):
    """Loss and gradient off-policy, in a window of two accumulated batches."""
    batch = batch_of(trainer)
    ref_logp_BT = batch["ref_per_token_logps"]
    noise_BT = torch.randn(ref_logp_BT.shape, generator=torch.Generator().manual_seed(3))
    batch["old_per_token_logps"] = ref_logp_BT + 0.1 * noise_BT
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer.compute_loss(trainer.model, batch)
    return loss.item(), gradient(trainer.model, loss)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_trls_own_kl_is_the_recipe_trl_default_for_every_loss_type(folder, loss_type):
    """TRL's beta is not counted beside the terms."""
    their_loss, their_gradient = stale_step(build(folder, loss_type=loss_type))
    recipe = {"recipe": "trl/default", "beta": 0.04}
    our_loss, ours = stale_step(build(folder, kl=recipe, loss_type=loss_type))
    assert our_loss == pytest.approx(their_loss, rel=1e-5)
    assert distance(ours, their_gradient) < TOLERANCE


def make_stale(batch):
    """Put old log-probs into the batch, and return those of a sampler: NaN where it recorded none, as TRL pads them."""
    generator = torch.Generator().manual_seed(3)
    ref_logp_BT = batch["ref_per_token_logps"]
    batch["old_per_token_logps"] = ref_logp_BT + 0.1 * torch.randn(ref_logp_BT.shape, generator=generator)
    sampler_logp_BT = ref_logp_BT + 0.4 * torch.randn(ref_logp_BT.shape, generator=generator)
    unrecorded_BT = torch.rand(ref_logp_BT.shape, generator=generator) < 0.2
    return torch.where(unrecorded_BT, torch.nan, sampler_logp_BT)


def record_the_samplers(batch):
    batch["sampling_per_token_logps"] = make_stale(batch)


def take_the_samplers_for_the_trainers(batch):
    """The trainer's old log-probs are those of the sampler wherever it recorded any."""
    sampler_logp_BT = make_stale(batch)
    old_logp_BT = batch["old_per_token_logps"]
    batch["old_per_token_logps"] = torch.where(sampler_logp_BT.isnan(), old_logp_BT, sampler_logp_BT)


def gradient_of_a_correction(folder, change):
    """The gradient of a corrected term alone, after the change of the batch: with it, minus without it."""
    corrected = [KLTerm("k3", placement="loss", correction="token_detached", beta=0.5)]
    gradients = []
    for kl in (corrected, "none"):
        trainer = build(folder, kl=kl)
        batch = batch_of(trainer)
        change(batch)
        gradients.append(gradient(trainer.model, trainer.compute_loss(trainer.model, batch)))
    return gradients[0] - gradients[1]


def test_a_correction_is_to_the_samplers_log_probs_where_vllm_recorded_them(folder):
    """Not to the trainer's own: the engine's differ."""
    recorded = gradient_of_a_correction(folder, record_the_samplers)
    expected = gradient_of_a_correction(folder, take_the_samplers_for_the_trainers)
    unrecorded = gradient_of_a_correction(folder, make_stale)
    assert distance(expected, recorded) < 10 * TOLERANCE
    assert distance(unrecorded, recorded) > 0.01, "the sampler's log-probs matter"


def test_rloos_own_kl_is_the_recipe_trl_rloo(folder):
    their_loss, their_gradient = step(build(folder, algorithm="rloo", beta=0.05))
    our_loss, ours = step(build(folder, algorithm="rloo", beta=0.05, kl="trl/rloo"))
    assert their_loss == pytest.approx(our_loss, rel=1e-5)
    assert distance(their_gradient, ours) < TOLERANCE


def test_a_cost_in_the_reward_is_a_cost_in_trls_advantages_per_token(folder):
    _, with_term = step(build(folder, kl=[K1_TO_GO]))

    # The same by hand: each token's advantage less the costs from there on.
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
    by_hand = gradient(plain.model, plain.compute_loss(plain.model, batch))
    assert distance(by_hand, with_term) < TOLERANCE


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


@both_algorithms
def test_training_with_a_schedule_and_the_gradient_check(folder, algorithm):
    from kl_comedy.integrations.gradient_check import KLGradientCheck

    schedule = {"start": 0.2, "end": 0.1, "steps": 2}
    kl = [{"estimator": "k3", "placement": "loss", "beta": schedule}, K1_BEFORE]
    trainer = build(folder, algorithm=algorithm, kl=kl, logging_steps=1)
    check = KLGradientCheck(trainer, coefficient="kl_scale", every=1)
    trainer.add_callback(check)
    trainer.train()
    assert check.passed
    assert [record["step"] for record in check.records] == [0, 1]
    logged = [entry for entry in trainer.state.log_history if "kl/loss" in entry]
    assert len(logged) == 2
    for entry in logged:
        assert entry["kl/k1"] != 0
        assert "rewards/kl_cost/mean" in entry


def exact_kl_gradient(model, ref_model, temperature):
    """The gradient of the exact KL of completions one by one, without padding, in the order of the layer groups."""
    from kl_comedy.audit.gradients import layer_groups

    tokenizer = pocket.build_tokenizer()
    total = 0.0
    for prompt, ids in zip(PROMPT_OF_ROW, completions(), strict=True):
        whole = torch.tensor([tokenizer(prompt)["input_ids"] + ids])
        # The logits before each token of the completion.
        places = slice(whole.shape[1] - len(ids) - 1, -1)
        logp_TV = (model(whole).logits[0, places] / temperature).log_softmax(-1)
        ref_logp_TV = (ref_model(whole).logits[0, places] / temperature).log_softmax(-1).detach()
        total = total + (logp_TV.exp() * (logp_TV - ref_logp_TV)).sum() / len(LENGTHS)
    parameters = [parameter for group in layer_groups(model).values() for parameter in group]
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, parameters)])


@both_algorithms
def test_the_audits_reference_gradient_is_that_of_the_exact_kl(folder, algorithm):
    from kl_comedy.audit.gradients import GradientSketch, layer_groups
    from kl_comedy.integrations.kl_audit import KLAudit

    trainer = build(folder, algorithm=algorithm, kl=[K3], temperature=0.8)
    audit = KLAudit(trainer, every=1, blocks=4, target="token_reverse", coefficient="kl_scale")
    audit._original = trainer.compute_loss
    audit._sketch = GradientSketch(layer_groups(trainer.model), 0)  # whole gradients
    _, _, measured, *_ = audit._block(trainer.model, batch_of(trainer))
    expected = exact_kl_gradient(trainer.model, trainer.ref_model, 0.8)
    assert distance(expected, measured) < TOLERANCE


@both_algorithms
def test_the_audit_runs_in_training_and_trl_logs_it(folder, algorithm):
    from kl_comedy.integrations.kl_audit import KLAudit

    trainer = build(folder, algorithm=algorithm, kl=[K3], logging_steps=1, temperature=0.8)
    audit = KLAudit(trainer, every=1, blocks=4, target="token_reverse", coefficient="kl_scale")
    trainer.add_callback(audit)
    trainer.train()
    assert [record["step"] for record in audit.records] == [0, 1]
    for record in audit.records:
        assert 0 < record["cosine"] <= 1
    logged = [entry for entry in trainer.state.log_history if "kl_audit/cosine" in entry]
    assert len(logged) == 2


def test_the_gradient_check_on_plain_trl(folder):
    from kl_comedy.integrations.gradient_check import KLGradientCheck

    trainer = build(folder, logging_steps=1)
    check = KLGradientCheck(trainer)
    trainer.add_callback(check)
    trainer.train()
    assert check.passed
    assert trainer.beta == 0.04, "it is changed for the check only"
