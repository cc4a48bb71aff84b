"""KL terms and checks in other trainers, without those trainers: stand-ins of what they pass."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.integrations import prime_rl
from kl_comedy.integrations.terms import HostTerms
from kl_comedy.kl import KLTerm, kl_surrogate


def batch(seed=0, rows=3, tokens=4):
    generator = torch.Generator().manual_seed(seed)
    names = ("logp_BT", "ref_logp_BT", "behaviour_logp_BT")
    tensors = {name: -torch.rand(rows, tokens, generator=generator) for name in names}
    return {**tensors, "mask_BT": torch.arange(tokens)[None] < torch.tensor([[4], [2], [0]])[:rows]}


def test_terms_sum_up_and_rows_without_tokens_are_zero():
    terms = HostTerms.parse([{"estimator": "k3", "placement": "loss", "beta": 0.5}, "openrlhf/default"], host="X")
    tensors = batch()
    alive = {name: tensor[:2] for name, tensor in tensors.items()}
    expected = sum(term.beta * kl_surrogate(term, **alive) for term in terms.loss)
    total_BT = terms.loss_BT(**tensors)
    assert torch.equal(total_BT[:2], expected) and float(total_BT[2].abs().sum()) == 0
    assert terms.reward == () and terms.needs_reference


def test_a_term_against_the_sampler_needs_no_reference():
    terms = HostTerms.parse([{"estimator": "k2", "placement": "loss", "reference": "sampler"}], host="X")
    assert not terms.needs_reference
    assert float(terms.loss_BT(**{**batch(), "ref_logp_BT": None}).sum()) > 0
    with pytest.raises(UserError, match="X has no reference log-probs"):
        HostTerms.parse("grpo", host="X").loss_BT(**{**batch(), "ref_logp_BT": None})


# --- prime-rl: the fields of LossInputs and LossOutputs as of 559b447 ------------------------------------------------


@dataclasses.dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclasses.dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def base(inputs, config):
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    loss = -config.adv_tau * (ratio * inputs.advantages)[inputs.loss_mask].sum()
    return LossOutputs(loss=loss, metrics={"ratio": ratio.mean()})


HERE = {"base": f"{__name__}.base", "base_config": "types.SimpleNamespace", "base_options": {"adv_tau": 2.0}}


@pytest.mark.parametrize("weighted", [False, True])
def test_prime_rls_loss_is_its_own_plus_the_terms(weighted):
    tensors = batch(rows=1)
    term = KLTerm("k3", placement="loss", correction="token", beta=0.3)
    logp_T = tensors["logp_BT"][0].clone().requires_grad_()
    mask_T = torch.tensor([False, True, True, False])
    weights_T = torch.tensor([1.0, 0.5, 2.0, 1.0]) if weighted else None
    inputs = LossInputs(
        logp_T, tensors["behaviour_logp_BT"][0], tensors["ref_logp_BT"][0], torch.ones(4), mask_T, weights_T
    )
    result = prime_rl.loss(inputs, kl=[term.to_mapping()], **HERE)
    kl_T = 0.3 * kl_surrogate(term, **{**tensors, "logp_BT": logp_T[None], "mask_BT": mask_T[None]})[0]
    expected = base(inputs, SimpleNamespace(adv_tau=2.0)).loss + (kl_T if weights_T is None else kl_T * weights_T).sum()
    assert torch.equal(result.loss, expected) and set(result.metrics) == {"ratio", "kl_comedy/kl_loss"}
    ours, theirs = (torch.autograd.grad(loss, logp_T, retain_graph=True)[0] for loss in (result.loss, expected))
    assert torch.equal(ours, theirs)


def test_prime_rl_without_a_reference_or_with_a_cost_before_the_baseline_is_refused():
    inputs = LossInputs(*(torch.zeros(2) for _ in range(2)), None, torch.ones(2), torch.tensor([True, True]))
    with pytest.raises(UserError, match="prime-rl has no reference log-probs"):
        prime_rl.loss(inputs, kl="grpo", **HERE)
    with pytest.raises(UserError, match="use baseline: after"):
        prime_rl.loss(inputs, kl="comedy/k1_in_reward", **HERE)


# --- checks ----------------------------------------------------------------------------------------------------------


class Trainer:
    """What the checks use of a transformers Trainer: a loss with a KL part, times ``beta``."""

    def __init__(self, kl):
        self.model = torch.nn.Linear(3, 1)
        self.kl, self.beta, self.state = kl, 0.01, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def compute_loss(self, model, inputs):
        value = model(inputs).mean()
        return value + self.beta * self.kl(value)

    def run(self, check, steps):
        self.state.global_step = 0
        check.on_train_begin(None, self.state, None)
        for self.state.global_step in range(steps):
            self.compute_loss(self.model, torch.ones(2, 3)).backward()
        check.on_train_end(None, self.state, None)


def gradient_check(trainer, **options):
    from kl_comedy.integrations.gradient_check import KLGradientCheck

    return KLGradientCheck(trainer, **options)


def test_a_kl_with_a_gradient_passes_once_and_is_audited_again_where_asked():
    trainer = Trainer(lambda value: 2 * value)
    check = gradient_check(trainer)
    trainer.run(check, 3)
    assert check.passed and len(check.records) == 1 and trainer.beta == 0.01
    assert check.records[0]["kl_norm"] == pytest.approx(2 * check.records[0]["task_norm"])
    assert check.records[0]["cosine"] == pytest.approx(1.0)
    again = gradient_check(trainer, every=2)
    trainer.run(again, 5)
    assert [record["step"] for record in again.records] == [0, 2, 4]


def test_two_checks_of_one_trainer_leave_it_as_it_was():
    trainer = Trainer(lambda value: 2 * value)
    original, checks = trainer.compute_loss, [gradient_check(trainer, every=1) for _ in range(2)]
    for check in checks:
        check.on_train_begin(None, trainer.state, None)
    trainer.compute_loss(trainer.model, torch.ones(2, 3))
    for check in checks:
        check.on_train_end(None, trainer.state, None)
    assert trainer.compute_loss == original and [len(check.records) for check in checks] == [1, 1]


def test_a_detached_kl_stops_the_run():
    trainer = Trainer(lambda value: value.detach() + 1)
    with pytest.raises(RunFailed, match="has no gradient"):
        trainer.run(gradient_check(trainer), 1)


def test_a_coefficient_without_effect_is_a_warning():
    trainer = Trainer(lambda value: 0 * value)
    with pytest.warns(UserWarning, match="changed nothing in the loss of 2 steps"):
        trainer.run(gradient_check(trainer, patience=2), 2)
    with pytest.raises(UserError, match="has no attribute 'kl_scale'"):
        gradient_check(trainer, coefficient="kl_scale")


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(5))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 5))


@pytest.mark.parametrize(("delay", "fails"), [(0, False), (1, False), (2, True)])
def test_the_probe_finds_the_version_that_the_engine_samples(delay, fails):
    from kl_comedy.integrations.sampler_probe import SamplerVersionProbe, policy_logps

    policy, ids, history = Policy(), [[0, 1, 2], [3, 4]], []
    probe = SamplerVersionProbe(lambda rows: [history[max(0, len(history) - 1 - delay)].tolist()], ids, tolerance=1e-4)
    history.append(policy_logps(policy, ids))
    probe.on_train_begin(None, SimpleNamespace(global_step=0), None, model=policy)

    def train():
        for step in (1, 2, 3):
            with torch.no_grad():
                policy.logits[step] += 0.5
            history.append(policy_logps(policy, ids))
            probe.on_step_end(None, SimpleNamespace(global_step=step), None, model=policy)

    if fails:
        with pytest.raises(RunFailed, match="after update 2 the engine's log-probs fit version 0"):
            train()
    else:
        train()
        assert [record["version"] for record in probe.records] == [step - delay for step in (1, 2, 3)]


def test_the_probe_knows_an_engine_with_other_weights_and_reads_trls_metric():
    from kl_comedy.integrations.sampler_probe import SamplerVersionProbe

    state = SimpleNamespace(global_step=1)
    probe = SamplerVersionProbe(lambda rows: [[-9.0, -9.0]], [[0, 1, 2]], tolerance=0.01)
    probe.on_train_begin(None, state, None, model=Policy())
    with pytest.raises(RunFailed, match="fit no kept version"):
        probe.on_step_end(None, SimpleNamespace(global_step=2), None, model=Policy())
    logged = SamplerVersionProbe(tolerance=0.05)
    logged.on_log(None, state, None, logs={"sampling/sampling_logp_difference/mean": 0.015})
    with pytest.raises(RunFailed, match="did not sample this policy"):
        logged.on_log(None, state, None, logs={"sampling/sampling_logp_difference/mean": 0.2})


# --- the audit -------------------------------------------------------------------------------------------------------
class Bigrams(torch.nn.Module):
    """A policy over 6 tokens that sees the last one."""

    def __init__(self, seed):
        super().__init__()
        self.table = torch.nn.Embedding(6, 6)
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))

    get_input_embeddings = get_output_embeddings = lambda self: self.table

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table(input_ids))


class TRLTrainer:
    """What the audit uses of TRL's trainers: batches of 256 sampled completions, and a KL of each token in the loss."""

    def __init__(self, kl, temperature=1.0, beta=0.05):
        self.model, self.ref_model, self.kl = Bigrams(0), Bigrams(1), kl
        self.beta, self.temperature, self.state = beta, temperature, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self._metrics = {"train": collections.defaultdict(list)}
        self._generator = torch.Generator().manual_seed(3)

    def logps(self, model, ids_BL):
        return (model(ids_BL, None).logits[:, :-1] / self.temperature).log_softmax(-1)

    def batch(self):
        ids_BL = torch.zeros(256, 1, dtype=torch.long)
        for _ in range(4):
            with torch.no_grad():
                last_BV = (self.model(ids_BL, None).logits[:, -1] / self.temperature).softmax(-1)
            ids_BL = torch.cat([ids_BL, torch.multinomial(last_BV, 1, generator=self._generator)], 1)
        mask_BT = torch.arange(4)[None] < torch.randint(1, 5, (256, 1), generator=self._generator)
        names = {"prompt_ids": ids_BL[:, :1], "prompt_mask": torch.ones_like(ids_BL[:, :1])}
        return names | {"completion_ids": ids_BL[:, 1:], "completion_mask": mask_BT.long(), "items": torch.tensor(9)}

    def compute_loss(self, model, inputs):
        ids_BL = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logp_BT, ref_BT = (
            self.logps(each, ids_BL).gather(-1, ids_BL[:, 1:, None])[..., 0] for each in (model, self.ref_model)
        )
        reward_BT = (inputs["completion_ids"] == 2).float() - 0.2
        loss_BT = self.beta * self.kl(logp_BT, ref_BT.detach(), inputs["completion_mask"]) - reward_BT * logp_BT
        return (loss_BT * inputs["completion_mask"]).sum(-1).mean()


def audited(kl, *, target="token_reverse", temperature=1.0, **options):
    from kl_comedy.integrations.kl_audit import KLAudit

    trainer = TRLTrainer(kl, temperature)
    audit = KLAudit(trainer, every=10, blocks=8, batches=2, target=target, **options)
    audit.on_train_begin(None, trainer.state, None)
    trainer.model.table.weight.grad = torch.ones(6, 6)
    for _ in range(4):
        trainer.compute_loss(trainer.model, trainer.batch())
    audit.on_train_end(None, trainer.state, None)
    assert torch.equal(trainer.model.table.weight.grad, torch.ones(6, 6)) and trainer.beta == 0.05
    (record,) = audit.records
    assert trainer._metrics["train"]["kl_audit/strength"] == [record["strength"]]
    return record


def squared(logp_BT, ref_BT, mask_BT):
    return 0.5 * (logp_BT - ref_BT) ** 2


def to_go(logp_BT, ref_BT, mask_BT):
    costs_BT = (logp_BT - ref_BT).detach() * mask_BT
    return logp_BT * costs_BT.flip(-1).cumsum(-1).flip(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_audit_finds_a_kl_right(temperature):
    record = audited(squared, temperature=temperature)
    assert record["blocks"] == 16 and record["p_no_mean"] < 0.01
    assert record["cosine"] > 0.98 and record["strength_low"] < 1 < record["strength_high"]
    half = audited(lambda *logps: 0.5 * squared(*logps), temperature=temperature)
    assert half["strength"] == pytest.approx(0.5 * record["strength"], rel=1e-4)
    assert half["kl_to_policy"] == pytest.approx(0.5 * record["kl_to_policy"], rel=1e-4)


def test_the_audit_sees_future_credit_noise_and_a_wrong_sign():
    own, future = (audited(kl, target="sequence_reverse") for kl in (squared, to_go))
    assert own["cosine"] < future["cosine"] and future["strength_low"] < 1 < future["strength_high"]
    assert audited(lambda logp, ref, mask: logp - ref)["p_no_mean"] > 0.01
    with pytest.warns(UserWarning, match="cosine of -"):
        assert audited(lambda *logps: -squared(*logps))["strength"] < 0


def test_the_audit_refuses_what_it_cannot_measure():
    from kl_comedy.integrations.kl_audit import KLAudit

    with pytest.raises(UserError, match="target: got 'reverse'"):
        KLAudit(TRLTrainer(squared), target="reverse")
    with pytest.raises(UserError, match="at least 3 blocks"):
        KLAudit(TRLTrainer(squared), blocks=2)
    trainer = TRLTrainer(squared)
    audit = KLAudit(trainer)
    audit.on_train_begin(None, trainer.state, None)
    with pytest.raises(UserError, match="a batch has no 'prompt_ids'"):
        trainer.compute_loss(trainer.model, {})
    trainer.ref_model = None
    batch_of_policy = TRLTrainer(squared).batch()
    audit._original = lambda model, inputs: model.table.weight.sum() * 0.0
    with pytest.raises(UserError, match="no ref_model; give reference="):
        trainer.compute_loss(trainer.model, batch_of_policy)
