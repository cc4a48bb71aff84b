"""KL terms and checks in other trainers, without those trainers: stand-ins of what they pass."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.errors import RunFailed, UserError, first_refusal
from kl_comedy.integrations import prime_rl
from kl_comedy.integrations.terms import RULES, HostTerms, TermInHost
from kl_comedy.kl import KLTerm, kl_surrogate


def batch(rows=3):
    """Log-probs of up to three completions of 4, 2 and 0 tokens."""
    generator = torch.Generator().manual_seed(0)
    names = ("logp_BT", "ref_logp_BT", "behaviour_logp_BT")
    tensors = {name: -torch.rand(rows, 4, generator=generator) for name in names}
    sizes_B1 = torch.tensor([[4], [2], [0]])[:rows]
    return {**tensors, "mask_BT": torch.arange(4)[None] < sizes_B1}


@pytest.fixture
def two_terms():
    return HostTerms.parse([{"estimator": "k3", "placement": "loss", "beta": 0.5}, "openrlhf/default"], host="X")


def test_terms_sum_up_and_rows_without_tokens_are_zero(two_terms):
    tensors = batch()
    total_BT = two_terms.loss_BT(**tensors)
    with_tokens = {name: tensor[:2] for name, tensor in tensors.items()}
    expected = sum(term.beta * kl_surrogate(term, **with_tokens) for term in two_terms.loss)
    assert torch.equal(total_BT[:2], expected)
    assert float(total_BT[2].abs().sum()) == 0


def test_terms_know_their_place_and_what_they_need(two_terms):
    assert two_terms.reward == ()
    assert two_terms.needs_reference


def test_a_term_against_the_sampler_needs_no_reference():
    terms = HostTerms.parse([{"estimator": "k2", "placement": "loss", "reference": "sampler"}], host="X")
    assert not terms.needs_reference
    assert float(terms.loss_BT(**{**batch(), "ref_logp_BT": None}).sum()) > 0


def test_a_term_without_its_reference_is_refused():
    with pytest.raises(UserError, match="X has no reference log-probs"):
        HostTerms.parse("grpo", host="X").loss_BT(**{**batch(), "ref_logp_BT": None})


# By the name of each rule, the fields of a term that breaks it first in a trainer that allows what `allows` says.
REFUSED = {
    "reads_other_tokens": ({"estimator": "exact"}, {}),
    "moves_its_reference": ({"reference": "ema"}, {}),
    "needs_a_group": ({"baseline": "own"}, {}),
    "needs_the_batch": ({"baseline": "batch", "credit": "own"}, {}),
    "has_a_target": ({"beta": {"target": 1.0}}, {}),
    "has_a_schedule_without_steps": ({"beta": {"start": 1.0, "end": 0.0, "steps": 2}}, {}),
    "changes_a_fixed_reward": ({"baseline": "before", "credit": "total"}, {"in_reward": False}),
    "has_a_cost_per_token": ({"baseline": "before"}, {"steps": True}),
}


def test_every_rule_of_a_host_has_a_term_that_breaks_it():
    assert list(REFUSED) == [rule.__name__ for rule in RULES]


@pytest.mark.parametrize("name", REFUSED)
def test_a_term_that_a_host_cannot_compute_is_refused_with_the_reason(name):
    fields, allows = REFUSED[name]
    term = KLTerm(**{"estimator": "k1", **fields})
    asked = TermInHost(term=term, host="X", **{"in_reward": True, "steps": False, **allows})
    (rule,) = [rule for rule in RULES if rule.__name__ == name]
    reason = rule(asked)
    assert reason is not None
    assert first_refusal(RULES, asked) == reason
    with pytest.raises(UserError) as error:
        HostTerms.parse([term], host="X", **allows)
    assert str(error.value) == f"kl.0 ({term.label()}): {reason}"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"estimator": "exact"}, "exact"),
        ({"baseline": "exact"}, "baseline exact"),
        ({"score_centring": "exact"}, "score_centring exact"),
        ({"weight": "policy"}, "weight policy"),
    ],
)
def test_the_part_of_a_term_that_reads_other_tokens_is_named(fields, part):
    with pytest.raises(UserError, match=f"and {part} reads other tokens too"):
        HostTerms.parse([{"estimator": "k1", **fields}], host="X")


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
"""What a user gives prime-rl: the loss of its own that the terms are added to."""


@pytest.mark.parametrize("weights_T", [None, torch.tensor([1.0, 0.5, 2.0, 1.0])], ids=["unweighted", "weighted"])
def test_prime_rls_loss_is_its_own_plus_the_terms(weights_T):
    tensors = batch(rows=1)
    term = KLTerm("k3", placement="loss", correction="token", beta=0.3)
    logp_T = tensors["logp_BT"][0].clone().requires_grad_()
    mask_T = torch.tensor([False, True, True, False])
    inputs = LossInputs(
        trainer_logprobs=logp_T,
        inference_logprobs=tensors["behaviour_logp_BT"][0],
        ref_logprobs=tensors["ref_logp_BT"][0],
        advantages=torch.ones(4),
        loss_mask=mask_T,
        loss_weights=weights_T,
    )
    result = prime_rl.loss(inputs, kl=[term.to_mapping()], **HERE)

    kl_T = 0.3 * kl_surrogate(term, **{**tensors, "logp_BT": logp_T[None], "mask_BT": mask_T[None]})[0]
    if weights_T is not None:
        kl_T = kl_T * weights_T
    expected = base(inputs, SimpleNamespace(adv_tau=2.0)).loss + kl_T.sum()
    assert torch.equal(result.loss, expected)
    assert set(result.metrics) == {"ratio", "kl_comedy/kl_loss"}

    (gradient_T,) = torch.autograd.grad(result.loss, logp_T, retain_graph=True)
    (expected_T,) = torch.autograd.grad(expected, logp_T)
    assert torch.equal(gradient_T, expected_T)


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        pytest.param("grpo", "prime-rl has no reference log-probs", id="a term with a reference"),
        pytest.param("comedy/k1_in_reward", "use baseline: after", id="a cost before the baseline"),
    ],
)
def test_prime_rl_without_a_reference_or_with_a_cost_before_the_baseline_is_refused(kl, message):
    inputs = LossInputs(
        trainer_logprobs=torch.zeros(2),
        inference_logprobs=torch.zeros(2),
        ref_logprobs=None,
        advantages=torch.ones(2),
        loss_mask=torch.tensor([True, True]),
    )
    with pytest.raises(UserError, match=message):
        prime_rl.loss(inputs, kl=kl, **HERE)


# --- checks ----------------------------------------------------------------------------------------------------------


class Trainer:
    """What the checks use of a transformers Trainer: a loss with a KL part, times ``beta``."""

    def __init__(self, kl):
        self.model = torch.nn.Linear(3, 1)
        self.kl = kl
        self.beta = 0.01
        self.state = SimpleNamespace(global_step=0)
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


def twice(value):
    return 2 * value


def test_a_kl_with_a_gradient_passes_and_is_measured_once():
    trainer = Trainer(twice)
    check = gradient_check(trainer)
    trainer.run(check, 3)
    assert check.passed
    assert trainer.beta == 0.01, "it is changed for the check only"
    (record,) = check.records
    assert record["kl_norm"] == pytest.approx(2 * record["task_norm"])
    assert record["cosine"] == pytest.approx(1.0)


def test_a_kl_is_measured_again_where_asked():
    trainer = Trainer(twice)
    check = gradient_check(trainer, every=2)
    trainer.run(check, 5)
    assert [record["step"] for record in check.records] == [0, 2, 4]


def test_two_checks_of_one_trainer_leave_it_as_it_was():
    trainer = Trainer(twice)
    original = trainer.compute_loss
    checks = [gradient_check(trainer, every=1), gradient_check(trainer, every=1)]
    for check in checks:
        check.on_train_begin(None, trainer.state, None)
    trainer.compute_loss(trainer.model, torch.ones(2, 3))
    # In the order of their start: each has wrapped what it found.
    for check in checks:
        check.on_train_end(None, trainer.state, None)
    assert trainer.compute_loss == original
    assert [len(check.records) for check in checks] == [1, 1]


def test_a_detached_kl_stops_the_run():
    trainer = Trainer(lambda value: value.detach() + 1)
    with pytest.raises(RunFailed, match="has no gradient"):
        trainer.run(gradient_check(trainer), 1)


def test_a_coefficient_without_effect_is_a_warning():
    trainer = Trainer(lambda value: 0 * value)
    with pytest.warns(UserWarning, match="changed nothing in the loss of 2 steps"):
        trainer.run(gradient_check(trainer, patience=2), 2)


def test_a_coefficient_that_the_trainer_does_not_have_is_refused():
    with pytest.raises(UserError, match="has no attribute 'kl_scale'"):
        gradient_check(Trainer(twice), coefficient="kl_scale")


# --- the probe of what the engine samples --------------------------------------------------------------------------
class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(5))

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 5))


class Engine:
    """An engine that samples the policy of ``delay`` updates ago, and a probe that watches it."""

    def __init__(self, delay):
        from kl_comedy.integrations.sampler_probe import SamplerVersionProbe

        self.delay = delay
        self.policy = Policy()
        self.ids = [[0, 1, 2], [3, 4]]
        self.versions = []
        self.keep_version()
        self.probe = SamplerVersionProbe(self.logps, self.ids, tolerance=1e-4)
        self.probe.on_train_begin(None, SimpleNamespace(global_step=0), None, model=self.policy)

    def keep_version(self):
        from kl_comedy.integrations.sampler_probe import policy_logps

        self.versions.append(policy_logps(self.policy, self.ids))

    def logps(self, rows):
        newest = len(self.versions) - 1
        return [self.versions[max(0, newest - self.delay)].tolist()]

    def train(self, steps):
        for step in range(1, steps + 1):
            with torch.no_grad():
                self.policy.logits[step] += 0.5
            self.keep_version()
            self.probe.on_step_end(None, SimpleNamespace(global_step=step), None, model=self.policy)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_probe_finds_the_version_that_the_engine_samples(delay):
    engine = Engine(delay)
    engine.train(3)
    assert [record["version"] for record in engine.probe.records] == [1 - delay, 2 - delay, 3 - delay]


def test_the_probe_stops_a_run_whose_engine_is_two_versions_behind():
    with pytest.raises(RunFailed, match="after update 2 the engine's log-probs fit version 0"):
        Engine(delay=2).train(3)


def test_the_probe_knows_an_engine_with_other_weights():
    from kl_comedy.integrations.sampler_probe import SamplerVersionProbe

    probe = SamplerVersionProbe(lambda rows: [[-9.0, -9.0]], [[0, 1, 2]], tolerance=0.01)
    probe.on_train_begin(None, SimpleNamespace(global_step=1), None, model=Policy())
    with pytest.raises(RunFailed, match="fit no kept version"):
        probe.on_step_end(None, SimpleNamespace(global_step=2), None, model=Policy())


def test_the_probe_reads_trls_metric():
    from kl_comedy.integrations.sampler_probe import SamplerVersionProbe

    state = SimpleNamespace(global_step=1)
    probe = SamplerVersionProbe(tolerance=0.05)
    probe.on_log(None, state, None, logs={"sampling/sampling_logp_difference/mean": 0.015})
    with pytest.raises(RunFailed, match="did not sample this policy"):
        probe.on_log(None, state, None, logs={"sampling/sampling_logp_difference/mean": 0.2})


# --- the audit -------------------------------------------------------------------------------------------------------
class Bigrams(torch.nn.Module):
    """A policy over 6 tokens that sees the last one."""

    def __init__(self, seed):
        super().__init__()
        self.table = torch.nn.Embedding(6, 6)
        with torch.no_grad():
            self.table.weight.copy_(torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)))

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.table

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(logits=self.table(input_ids))


class TRLTrainer:
    """What the audit uses of TRL's trainers: batches of 256 sampled completions, and a KL of each token in the loss."""

    def __init__(self, kl, temperature=1.0, beta=0.05):
        self.model = Bigrams(0)
        self.ref_model = Bigrams(1)
        self.kl = kl
        self.beta = beta
        self.temperature = temperature
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self._metrics = {"train": collections.defaultdict(list)}
        self._generator = torch.Generator().manual_seed(3)

    def logps(self, model, ids_BL):
        """The log-prob [B, T] of each token but the first."""
        logp_BTV = (model(ids_BL, None).logits[:, :-1] / self.temperature).log_softmax(-1)
        return logp_BTV.gather(-1, ids_BL[:, 1:, None])[..., 0]

    def batch(self):
        ids_BL = torch.zeros(256, 1, dtype=torch.long)
        for _ in range(4):
            with torch.no_grad():
                last_BV = (self.model(ids_BL, None).logits[:, -1] / self.temperature).softmax(-1)
            ids_BL = torch.cat([ids_BL, torch.multinomial(last_BV, 1, generator=self._generator)], 1)
        mask_BT = torch.arange(4)[None] < torch.randint(1, 5, (256, 1), generator=self._generator)
        return {
            "prompt_ids": ids_BL[:, :1],
            "prompt_mask": torch.ones_like(ids_BL[:, :1]),
            "completion_ids": ids_BL[:, 1:],
            "completion_mask": mask_BT.long(),
            "items": torch.tensor(9),  # no row of the batch, as TRL has some
        }

    def compute_loss(self, model, inputs):
        ids_BL = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        logp_BT = self.logps(model, ids_BL)
        ref_BT = self.logps(self.ref_model, ids_BL)
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
    assert torch.equal(trainer.model.table.weight.grad, torch.ones(6, 6)), "the trainer's gradient is left alone"
    assert trainer.beta == 0.05
    (record,) = audit.records
    assert trainer._metrics["train"]["kl_audit/strength"] == [record["strength"]]
    return record


def squared(logp_BT, ref_BT, mask_BT):
    return 0.5 * (logp_BT - ref_BT) ** 2


def to_go(logp_BT, ref_BT, mask_BT):
    costs_BT = (logp_BT - ref_BT).detach() * mask_BT
    return logp_BT * costs_BT.flip(-1).cumsum(-1).flip(-1)


def half_squared(logp_BT, ref_BT, mask_BT):
    return 0.5 * squared(logp_BT, ref_BT, mask_BT)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_audit_finds_a_kl_right(temperature):
    record = audited(squared, temperature=temperature)
    assert record["blocks"] == 16
    assert record["p_no_mean"] < 0.01
    assert record["cosine"] > 0.98
    assert record["strength_low"] < 1 < record["strength_high"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_audit_finds_half_a_kl_half_as_strong(temperature):
    whole = audited(squared, temperature=temperature)
    half = audited(half_squared, temperature=temperature)
    assert half["strength"] == pytest.approx(0.5 * whole["strength"], rel=1e-4)
    assert half["kl_to_policy"] == pytest.approx(0.5 * whole["kl_to_policy"], rel=1e-4)


def test_the_audit_sees_future_credit():
    without = audited(squared, target="sequence_reverse")
    with_future = audited(to_go, target="sequence_reverse")
    assert without["cosine"] < with_future["cosine"]
    assert with_future["strength_low"] < 1 < with_future["strength_high"]


def test_the_audit_sees_noise():
    """k1 in the loss: its gradient is zero on average."""
    assert audited(lambda logp_BT, ref_BT, mask_BT: logp_BT - ref_BT)["p_no_mean"] > 0.01


def test_the_audit_sees_a_wrong_sign():
    with pytest.warns(UserWarning, match="cosine of -"):
        record = audited(lambda *logps: -squared(*logps))
    assert record["strength"] < 0


def test_the_audit_leaves_a_tools_tokens_out_of_its_target():
    """They are in TRL's completion_mask, and not in its tool_mask."""
    from kl_comedy.integrations.kl_audit import KLAudit

    trainer = TRLTrainer(squared)
    audit = KLAudit(trainer, target="token_reverse")
    table = trainer.model.table.weight
    row = {name: value[:1] for name, value in trainer.batch().items() if value.ndim}
    row["completion_mask"] = torch.ones(1, 4, dtype=torch.long)
    gradients = []
    for tool_mask in ([1, 1, 1, 1], [1, 0, 0, 1]):
        masked = {**row, "tool_mask": torch.tensor([tool_mask])}
        (gradient,) = torch.autograd.grad(audit._exact(trainer.model, masked), table)
        gradients.append(gradient)
    by_token = []
    for token in range(4):
        alone = {**row, "tool_mask": torch.eye(4, dtype=torch.long)[token : token + 1]}
        (gradient,) = torch.autograd.grad(audit._exact(trainer.model, alone), table)
        by_token.append(gradient)
    # The exact KL of each visited prefix: its gradient is a sum over tokens.
    torch.testing.assert_close(gradients[0], sum(by_token))
    torch.testing.assert_close(gradients[1], by_token[0] + by_token[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"target": "reverse"}, "target: got 'reverse'"), ({"blocks": 2}, "at least 3 blocks")],
    ids=["an unknown target", "too few blocks"],
)
def test_the_audit_refuses_options_that_it_cannot_use(options, message):
    from kl_comedy.integrations.kl_audit import KLAudit

    with pytest.raises(UserError, match=message):
        KLAudit(TRLTrainer(squared), **options)


@pytest.fixture
def watched_trainer():
    """A trainer with an audit that has begun, and the audit."""
    from kl_comedy.integrations.kl_audit import KLAudit

    trainer = TRLTrainer(squared)
    audit = KLAudit(trainer)
    audit.on_train_begin(None, trainer.state, None)
    return trainer, audit


def test_the_audit_refuses_a_batch_that_is_none_of_trls(watched_trainer):
    trainer, _ = watched_trainer
    with pytest.raises(UserError, match="a batch has no 'prompt_ids'"):
        trainer.compute_loss(trainer.model, {})


def test_the_audit_refuses_a_trainer_without_a_reference(watched_trainer):
    trainer, audit = watched_trainer
    trainer.ref_model = None
    audit._original = lambda model, inputs: model.table.weight.sum() * 0.0  # the trainer's own needs the reference
    with pytest.raises(UserError, match="no ref_model; give reference="):
        trainer.compute_loss(trainer.model, TRLTrainer(squared).batch())
