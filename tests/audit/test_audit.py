"""The audit on the tiny pocket policy: it finds what theory says, catches no-ops, and leaves runs alone."""

import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from dialogues import DIALOGUES
from kl_comedy.audit import run as audit_run
from kl_comedy.audit.run import run_audit
from kl_comedy.audit.source import AuditSource
from kl_comedy.cli.audit import audit
from kl_comedy.cli.main import app
from kl_comedy.config import config_hash, load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import weights_hash
from kl_comedy.training.run import train

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
MASKED_TO_NOTHING = "{estimator: k3, placement: loss, correction: token, cap: 1e-9, cap_mode: mask, beta: 0.1}"
"""A term without effect: the mask drops every token whose ratio is above 1e-9, which is every token."""


def audit_of(*overrides, names=("own", "panel"), samples=1024, updates=8, path=TINY, blocks=16):
    """The report on the tiny config, and its terms by label."""
    source = AuditSource.read(path, list(overrides))
    # A sketch of 0 keeps whole gradients, so that nothing here depends on random projections.
    report = run_audit(source, names, updates=updates, samples=samples, blocks=blocks, sketch=0)
    return report, {term.label: term for term in report.terms}


def agrees(estimate, truth):
    """Whether the truth is within 3.7 standard errors: it is missed once in 500 seeds, not once in 20."""
    # A half width is 2.13 standard errors, Student's t of 16 blocks.
    return abs(estimate.value - truth) < 1.75 * estimate.half_width


@pytest.fixture(scope="module")
def on_policy():
    return audit_of(
        "kl=[{estimator: k3, placement: loss, beta: 0.05},"
        "{estimator: k1, placement: reward, beta: 0.05},"
        "{estimator: exact_forward, placement: loss, beta: 0.05}]"
    )


# --- what is delivered on-policy ----------------------------------------------------------------------------------
def test_a_report_says_what_it_is_of(on_policy):
    report, _ = on_policy
    assert report.regime == "on_policy"
    assert report.completions == 1024
    assert report.blocks == 16


@pytest.mark.slow
def test_of_a_dialogue_only_the_policys_tokens_count(monkeypatch):
    """Whatever numbers stand at an environment's tokens, the report is the same, and none of them is silent."""
    draw = audit_run.draw_completions
    settings = [*DIALOGUES, "kl=[{estimator: k3, placement: loss, beta: 0.05}]"]

    def audited():
        report, terms = audit_of(*settings, names=("own",), samples=64, updates=3, blocks=8)
        return dataclasses.replace(report, seconds=0.0), terms

    as_drawn, terms = audited()
    changed = 0

    def draw_with_other_numbers(*arguments):
        nonlocal changed
        rows = []
        for row in draw(*arguments):
            rollout = row.rollout
            logps = tuple(
                logp if is_own else -7.0 for logp, is_own in zip(rollout.logps, rollout.trained_mask, strict=True)
            )
            changed += logps != rollout.logps
            rows.append(dataclasses.replace(row, rollout=dataclasses.replace(rollout, logps=logps)))
        return rows

    monkeypatch.setattr(audit_run, "draw_completions", draw_with_other_numbers)
    assert repr(audited()[0]) == repr(as_drawn)
    assert changed > 10, "dialogues with an answer"
    (term,) = terms.values()
    assert term.silent_share == 0


def test_k1_in_the_loss_delivers_nothing(on_policy):
    _, terms = on_policy
    term = terms["k1_reverse_token in loss"]
    assert agrees(term.delivered, 0.0)
    # The cosine is not asked for: that of pure noise is anything, once in some 25 seeds 1.0 with a short interval.
    assert term.delivered.half_width < 0.1


def test_exact_with_future_credit_delivers_everything(on_policy):
    _, terms = on_policy
    term = terms["exact_reverse_token in reward to_go"]
    assert agrees(term.delivered, 1.0)
    assert term.cosine.value > 0.98
    assert term.p_unbiased > 0.001


@pytest.mark.parametrize("label", ["kl.1: k1_reverse_token in reward to_go", "k1_reverse_token in reward total"])
def test_k1_in_the_reward_delivers_everything_with_more_variance_than_exact(on_policy, label):
    _, terms = on_policy
    exact = terms["exact_reverse_token in reward to_go"]
    assert agrees(terms[label].delivered, 1.0)
    assert terms[label].p_unbiased > 0.001
    assert terms[label].variance > exact.variance


def test_k2_in_the_loss_has_the_direction_of_the_gradient(on_policy):
    _, terms = on_policy
    assert terms["k2_reverse_token in loss"].cosine.value > 0.95


def test_the_forward_kl_in_the_loss_delivers_less(on_policy):
    _, terms = on_policy
    term = terms["kl.2: exact_forward_forward_token in loss"]
    assert term.p_unbiased < 0.05
    assert term.delivered.high < 0.8
    assert term.bias.low > 0.2


def test_k3_in_the_loss_delivers_less(on_policy):
    """Its mean is that of the forward KL, whose gradient it samples.

    A rare token that the reference prefers has a large ratio, so that the interval's upper end can reach 1 or more.
    """
    _, terms = on_policy
    assert terms["kl.0: k3_reverse_token in loss"].delivered.low < 0.8


def test_the_training_step_follows_the_gradient_of_the_terms(on_policy):
    report, terms = on_policy
    assert report.failures == []
    for label, term in terms.items():
        if term.position is None:
            assert term.check is None, f"{label} is not in the config, so that training does not have it"
        else:
            assert term.check.change > 1e-3, label
            assert term.check.disagreement < 1e-3, label


def test_what_is_delivered_is_a_weighted_mean_of_the_layers_shares(on_policy):
    """Products add over disjoint parameters, so that the mean is between the least and the largest share."""
    _, terms = on_policy
    for label, term in terms.items():
        assert list(term.layers) == ["embeddings", "block 0", "head"], label
        shares = [layer["delivered"] for layer in term.layers.values()]
        assert min(shares) - 1e-6 <= term.delivered.value <= max(shares) + 1e-6, label


# --- terms without effect -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def three_no_ops():
    """Three terms without effect, each silent in training, and a live neighbour; the report and its terms in order."""
    report, terms = audit_of(
        f"kl=[{MASKED_TO_NOTHING},"
        "{estimator: k2, placement: loss, input_clamp: 1e-9, beta: 0.1},"
        "{estimator: k1, placement: reward, output_clamp: 1e-9, beta: 0.1},"
        "{estimator: k2, placement: loss, beta: 0.1}]",
        names=("own",),
        samples=64,
        blocks=4,
    )
    return report, sorted(terms.values(), key=lambda term: term.position)


def test_terms_that_do_nothing_are_found_and_others_are_not(three_no_ops):
    report, terms = three_no_ops
    assert [term.check.inert for term in terms] == [True, True, True, False]
    assert len(report.failures) == 3
    for line in report.failures:
        assert "INERT" in line


def test_a_mask_of_every_token_is_counted_as_silent(three_no_ops):
    _, (mask, _, _, _) = three_no_ops
    assert mask.silent_share == 1.0
    assert mask.capped_share == 1.0


def test_a_clamp_of_every_log_ratio_is_counted(three_no_ops):
    _, (_, clamp, _, _) = three_no_ops
    assert clamp.silent_share > 0.95
    assert clamp.clamped_share > 0.95


def test_a_live_term_is_not_silent(three_no_ops):
    _, (_, _, _, live) = three_no_ops
    assert live.silent_share < 0.5
    assert live.clamped_share is None, "it has no clamp"


# --- off-policy ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def off_policy():
    report, _ = audit_of(
        "optimizer.lr=5e-5",
        "lag.mode=replayed",
        "lag.steps=2",
        "algorithm.advantage=rloo",
        "algorithm.policy_loss=ppo_clip",
        "kl=[{estimator: k1, placement: reward, credit: to_go, baseline: before, beta: 0.05},"
        "{estimator: exact, placement: loss, reference: ema, beta: 0.05},"
        "{estimator: k2, placement: loss, reference: sampler, beta: 0.05}]",
        names=("own", "rb/per_decision"),
        samples=512,
        updates=6,
    )
    return report


def test_stale_samples_are_compared_off_policy(off_policy):
    assert off_policy.regime == "off_policy"
    assert "prefix_previous" in off_policy.reference_term
    assert off_policy.clip_share is not None
    assert off_policy.failures == []


def test_costs_before_the_baseline_are_compared_through_the_advantage(off_policy):
    before, _, _, _ = off_policy.terms
    assert agrees(before.delivered, 1.0)


def test_a_term_to_an_ema_is_compared_with_the_gradient_to_the_ema(off_policy):
    _, ema, _, _ = off_policy.terms
    assert ema.cosine.value > 0.9


def test_a_term_to_the_sampler_has_no_reference_gradient(off_policy):
    _, _, sampler, _ = off_policy.terms
    assert sampler.cosine is None
    assert sampler.verdict == "no reference gradient to compare with"
    assert sampler.check.change > 0


def test_ratios_of_each_decision_are_unbiased_off_policy(off_policy):
    _, _, _, per_decision = off_policy.terms
    assert per_decision.cosine.value > 0.98
    assert per_decision.p_unbiased > 0.001


# --- what cannot be audited ---------------------------------------------------------------------------------------
def test_a_policy_that_is_its_reference_has_nothing_to_audit():
    with pytest.raises(UserError, match="still identical to its initial reference, so every KL gradient is zero"):
        audit_of("optimizer.lr=1e-30", samples=64, updates=1)


def test_too_few_updates_for_the_lag_are_refused():
    with pytest.raises(UserError, match=r"--updates: got 2; .* 4 updates old, so at least 5"):
        audit_of("lag.mode=replayed", "lag.steps=4", updates=2)


def test_too_few_blocks_for_an_interval_are_refused():
    with pytest.raises(UserError, match="at least 3 blocks of whole groups, got 2"):
        audit_of(samples=8, updates=1)


# --- in a run -----------------------------------------------------------------------------------------------------
def run_training(folder, *overrides):
    """A run of the tiny config: its result, and its metrics by step and name."""
    config = load_config(TINY, [f"output={folder}", "train.eval_every=0", *overrides])
    result = train(config, console=Console(file=io.StringIO()), command="x")
    metrics = {}
    for line in (result.run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") != "metrics":
            continue
        for name, value in event["data"].items():
            assert (event["step"], name) not in metrics, "a metric is logged once per step"
            metrics[event["step"], name] = value
    return result, metrics


SEVEN_UPDATES = (
    "train.steps=7",
    "kl=[{estimator: k1, placement: reward, beta: 0.05}, {estimator: exact, placement: loss, reference: ema}]",
)


@pytest.fixture(scope="module")
def run_with_audit(tmp_path_factory):
    options = ("audit.every=3", "audit.samples=4096", "audit.terms=[own, grpo]")
    return run_training(tmp_path_factory.mktemp("audited"), *options, *SEVEN_UPDATES)


@pytest.fixture(scope="module")
def run_without_audit(tmp_path_factory):
    return run_training(tmp_path_factory.mktemp("plain"), *SEVEN_UPDATES)


def final_weights(result):
    return weights_hash(load_file(result.run.policy / "model.safetensors"))


def random_state(result):
    return torch.load(result.run.checkpoint / "rank-0.pt", weights_only=True)["torch_rng"]


def test_an_audit_leaves_the_weights_of_a_run_to_the_bit(run_with_audit, run_without_audit):
    with_audit, _ = run_with_audit
    without, _ = run_without_audit
    assert final_weights(with_audit) == final_weights(without)
    assert torch.equal(random_state(with_audit), random_state(without))


def test_an_audit_leaves_the_metrics_of_a_run(run_with_audit, run_without_audit):
    _, with_audit = run_with_audit
    _, without = run_without_audit
    # Times differ from run to run, and the audit's own metrics are what was added.
    unchanged = {key: value for key, value in with_audit.items() if not key[1].startswith(("audit/", "time/"))}
    assert unchanged == {key: value for key, value in without.items() if not key[1].startswith("time/")}


def test_an_audit_leaves_the_config_hash():
    """Or a run would not be found again after its audit was switched on."""
    assert config_hash(load_config(TINY, ["audit.every=3"])) == config_hash(load_config(TINY))


def test_an_audit_in_a_run_is_logged_with_its_update(run_with_audit):
    _, metrics = run_with_audit
    # Every third update after the first, which finds the policy equal to its reference.
    assert {step for step, name in metrics if name.startswith("audit/")} == {4, 7}
    assert {step for step, name in metrics if name == "time/audit"} == {4, 7}


@pytest.mark.parametrize("key", ["kl_0", "kl_1", "grpo"])
def test_an_audit_in_a_run_logs_every_term(run_with_audit, key):
    _, metrics = run_with_audit
    assert metrics[4, f"audit/{key}/kl_to_policy_norm"] > 0
    assert metrics[4, f"audit/{key}/silent_share"] < 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["audit.terms=[k3]"], r"audit\.terms: got 'k3'; allowed: own, panel"),
        (["rollout.prompts_per_batch=2"], r"audit\.every: got 1; allowed: 0 where .* fewer than 3 groups"),
        (["audit.samples=8"], r"audit\.every: .*leave 2"),
        (["callbacks=[{name: audit, options: {every: 1, blocks: 2}}]"], r"blocks: got 2; allowed: at least 3"),
    ],
    ids=["an unknown term", "too few groups in a batch", "too few samples", "too few blocks"],
)
def test_an_audit_that_cannot_run_is_refused_before_training(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run_training(tmp_path, "audit.every=1", *overrides)
    assert not list(tmp_path.iterdir()), "no run was begun"


def test_a_no_op_is_warned_about_in_a_run(tmp_path, caplog):
    run_training(tmp_path, "audit.every=1", "train.steps=3", f"kl=[{MASKED_TO_NOTHING}]")
    warnings = [record.message for record in caplog.records if "INERT" in record.message]
    assert len(warnings) == 1, "once, though two updates were audited"
    assert warnings[0].startswith("audit at update 2: kl.0: k3_reverse_token in loss")


# --- the command --------------------------------------------------------------------------------------------------
def test_the_folder_of_a_run_is_audited_at_its_checkpoint(run_with_audit, capsys):
    folder = run_with_audit[0].run.path
    audit(config=folder, terms="own,liu/k2_loss", samples=64, blocks=16, sketch=65536, format="csv")

    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["term"].split(":")[0] for row in rows] == ["kl.0", "kl.1", "liu/k2_loss"]

    (file,) = folder.glob("audit-tiny-*-7.json")
    report = json.loads(file.read_text())
    assert report["version"] == 7
    assert report["checkpoint"].endswith("step-00000007.ckpt")
    assert report["terms"][0]["check"]["inert"] is False
    assert report["config_hash"] in file.name


def test_the_config_of_a_run_that_exists_cannot_be_overridden(run_with_audit):
    with pytest.raises(UserError, match="audit other terms with --terms"):
        AuditSource.read(run_with_audit[0].run.path, ["kl.0.beta=1"])


def test_a_stale_run_is_trained_on_from_its_checkpoint(tmp_path):
    """A run whose samples are old is audited that many updates later, on samples of the checkpoint."""
    folder = run_training(tmp_path, "train.steps=3", "algorithm.updates_per_batch=2")[0].run.path
    report, _ = audit_of(path=folder, names=("own",), samples=64)
    assert report.version == 4
    assert report.regime == "off_policy"


def test_a_no_op_ends_the_command_with_1(tmp_path):
    options = ["--samples", "32", "--updates", "3", "--format", "json"]
    command = ["audit", str(TINY), f"kl=[{MASKED_TO_NOTHING}]", f"output={tmp_path}", *options]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert isinstance(result.exception, RunFailed)
    assert "INERT: beta does not change the gradient" in str(result.exception)
    assert json.loads(result.stdout)["terms"][0]["verdict"].startswith("INERT"), "the report is printed all the same"
    assert len(list(tmp_path.glob("audit-tiny-*.json"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"terms": "gpro"}, "did you mean 'grpo'"),
        ({"config": Path(".")}, "a folder without config.yaml"),
        ({"config": Path("nowhere.yaml")}, "no such config file"),
    ],
    ids=["an unknown term", "a folder without a run", "no such file"],
)
def test_misuse_of_the_command_writes_nothing(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    correct = {"config": TINY, "terms": "own", "format": "table", "overrides": ["output=here"]}
    with pytest.raises(UserError, match=message):
        audit(**{**correct, **options})
    assert not list(tmp_path.iterdir())
