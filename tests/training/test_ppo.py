"""PPO with a value head and decoupled PPO, end to end on the tiny pocket policy."""

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm
from kl_comedy.training import loss as loss_module
from kl_comedy.training import module as policy_module
from kl_comedy.training.experience_module import build_in_process
from kl_comedy.training.packing import model_inputs
from kl_comedy.training.run import train
from training_runs import TINY, go, killed_then_resumed, metrics_of, quiet, weights_of

GAE = ["algorithm.advantage=gae", "algorithm.policy_loss=ppo_clip", "kl.0.baseline=before"]
DECOUPLED = [
    "algorithm.policy_loss=ppo_clip",
    "algorithm.proximal=recomputed",
    "algorithm.correction={tis: {cap: 5.0}, opsm: {}}",
    "algorithm.updates_per_batch=2",
    "algorithm.epochs_per_batch=2",
    "lag.mode=replayed",
    "lag.steps=4",
]


@pytest.fixture
def module_of(tmp_path):
    opened = []

    def make(*overrides):
        config = load_config(TINY, [f"output={tmp_path}", *overrides])
        module, data = build_in_process(config)
        opened.append(data)
        module.stream = data.stream
        return module

    yield make
    for data in opened:
        data.close()


@pytest.mark.slow
def test_a_critic_learns_the_values_of_repeated_prompts(tmp_path):
    """The policy hardly moves (lr 1e-9), so the values of four prompts can be learned."""
    settings = [
        "train.steps=24",
        "train.eval_every=0",
        "algorithm.value.lr=0.02",
        "algorithm.value.lam=1",
        "optimizer.lr=1e-9",
        "data.train.limit=4",
        "data.decontaminate=false",
        "rollout.group_size=16",
    ]
    metrics = metrics_of(go(tmp_path, *GAE, *settings).run)
    assert metrics[1, "value/mean"] == 0.0
    assert metrics[1, "value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    explained = [metrics[n, "value/explained_variance"] for n in range(13, 25)]
    assert sum(explained) / len(explained) > 0.01, explained  # rewards are rare here, so little can be explained
    assert metrics[24, "value/mean"] == pytest.approx(metrics[24, "value/target_mean"], abs=0.3)
    assert metrics[24, "grad/value_norm"] > 0


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_in_the_middle_of_a_batch(tmp_path):
    """Update 3 is inside a batch, of two epochs: the old policy is in the checkpoint.

    With a value head, a moving reference and a beta that adapts: ``all_state`` in test_run.py.
    """
    whole = go(tmp_path / "whole", *DECOUPLED)
    resumed = killed_then_resumed(tmp_path / "killed", DECOUPLED, at=3)
    assert weights_of(resumed.run) == weights_of(whole.run)
    assert metrics_of(resumed.run) == metrics_of(whole.run)


def counted(monkeypatch, module, name):
    """The calls of ``module.name``, as a list that grows."""
    calls = []
    original = getattr(module, name)

    def call(*arguments, **options):
        calls.append(name)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, call)
    return calls


def test_corrections_are_counted_and_the_policy_term_is_computed_once_per_micro_batch(tmp_path, monkeypatch):
    terms = counted(monkeypatch, loss_module, "policy_term")
    micro_batches = counted(monkeypatch, policy_module, "micro_loss")
    metrics = metrics_of(go(tmp_path, *DECOUPLED, "optimizer.lr=0.01").run)
    assert metrics[1, "policy/correction/tis/weight_mean"] == pytest.approx(1.0, abs=1e-4)
    # The samples of updates 5 to 8 are four updates old.
    stale_weights = [metrics[step, "policy/correction/tis/weight_mean"] for step in range(5, 9)]
    assert max(abs(weight - 1) for weight in stale_weights) > 0.01
    assert 0 <= metrics[8, "policy/correction/opsm/masked_share"] <= 1
    # The first update of a batch is at the proximal policy, so nothing can be clipped; the later ones have moved.
    assert metrics[1, "policy/clip_fraction"] == 0.0
    assert metrics[5, "policy/clip_fraction"] == 0.0
    assert max(metrics[n, "policy/clip_fraction"] for n in (2, 3, 4)) > 0
    assert len(terms) == len(micro_batches)
    assert len(micro_batches) > 0


def test_the_proximal_policy_is_the_policy_before_the_first_update_of_a_batch(module_of):
    module = module_of(*DECOUPLED, "lag.mode=on_policy", "lag.steps=0")
    batch = next(iter(module.stream))
    recorded = module.record(batch.batch)
    assert len(batch.batch) == 2 * len(batch.rows), "two updates"
    assert batch.offset == 0, "the first of them"
    assert len(recorded) == len(batch.batch)
    for record, row in zip(recorded, batch.batch, strict=True):
        assert torch.allclose(record["logp"], torch.tensor(row.rollout.logps), atol=1e-4)


@pytest.mark.parametrize("trunk", [False, True])
def test_the_value_gradient_reaches_the_trunk_only_when_asked(module_of, trunk):
    module = module_of(*GAE[:2], f"algorithm.value.trunk={str(trunk).lower()}", "kl=none")
    batch = next(iter(module.stream))
    torch.nn.init.normal_(module.value_head.linear.weight)
    inputs = model_inputs(module.plan.packer.pack(batch.rows, range(len(batch.rows))))
    scored = module.policy_pass(inputs, None, ())
    value_BT = module.value_head(scored.hidden_NH, inputs["mask_BT"])
    trunk_parameters = [p for p in module.policy.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value_BT.square().sum(), trunk_parameters, allow_unused=True)
    reaches_trunk = any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    assert reaches_trunk == trunk


def test_values_after_the_last_token_are_those_of_the_longer_prefix(module_of):
    """Bootstrapping reads the value after a truncated completion: that before one token more; others end at 0."""
    module = module_of(*GAE, "algorithm.value.bootstrap_truncated=true", "rollout.max_new_tokens=3")
    torch.nn.init.normal_(module.value_head.linear.weight)
    batch = next(iter(module.stream))
    recorded = module.record(batch.batch)
    truncated = [n for n, row in enumerate(batch.batch) if row.rollout.stop_reason == "length"]
    assert truncated
    rollout = batch.batch[truncated[0]].rollout
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.completion_ids]])
    with torch.no_grad():
        hidden = module.policy(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        expected = float(module.value_head.linear(hidden))
    assert recorded[truncated[0]]["last"] == pytest.approx(expected, abs=1e-4)
    assert expected != 0
    for n, record in enumerate(recorded):
        if n not in truncated:
            assert record["last"] == 0.0, n


@pytest.mark.slow
def test_a_lora_policy_trains_with_a_critic(tmp_path):
    metrics = metrics_of(go(tmp_path, *GAE, "model.lora={rank: 2}", "train.steps=4", "train.eval_every=0").run)
    assert metrics[4, "value/mean"] != 0.0
    assert metrics[4, "kl/exact_reverse_token"] > 0


def test_value_settings_without_a_critic_are_refused_before_a_run_folder_exists(tmp_path):
    config = load_config(TINY, [f"output={tmp_path}", "algorithm.value.lam=0.5"])
    with pytest.raises(UserError, match=r"algorithm\.value: rloo"):
        train(config, console=quiet(), command="")
    assert not list(tmp_path.iterdir())


def test_the_audit_uses_the_policy_term_of_the_run(module_of):
    from kl_comedy.audit.gradients import AuditedTerm, loss_of
    from kl_comedy.training.loss import prepare

    module = module_of(*GAE, "algorithm.proximal=recomputed", "algorithm.correction={tis: {}}")
    batch = next(iter(module.stream))
    micros = prepare(
        batch.rows,
        module.plan,
        betas={"kl_0": 0.05},
        references=module.references,
        policy_pass=module.policy_pass,
        old_policy=module.record(batch.rows),
    )
    passes = module.passes(micros[0], terms=[KLTerm("k1", placement="reward")])
    loss = loss_of(AuditedTerm(key="policy", term=None), micros[0], None, passes, module.config.algorithm)
    assert torch.isfinite(loss)
    assert loss.requires_grad
