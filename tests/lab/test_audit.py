"""The audit on the tiny pocket policy: it finds what theory says, catches no-ops, and leaves runs alone."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from kl_comedy.cli.audit import audit
from kl_comedy.cli.main import app
from kl_comedy.config import config_hash, load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.lab.audit.run import run_audit
from kl_comedy.lab.audit.source import AuditSource
from kl_comedy.models import weights_hash
from kl_comedy.training.run import train

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def audited(*overrides, names=("own", "panel"), samples=1024, updates=8, path=TINY, blocks=16):
    """The report on the tiny config, and its terms by label."""
    source = AuditSource.read(path, list(overrides))
    report = run_audit(source, names, updates=updates, samples=samples, blocks=blocks, sketch=0)
    return report, {term.label: term for term in report.terms}


@pytest.fixture(scope="module")
def on_policy():
    return audited("kl=[{estimator: k3, placement: loss, beta: 0.05}, {estimator: k1, placement: reward, beta: 0.05}]")


def near(estimate, truth):
    """Within 3.7 standard errors: a true value is missed once in 500 seeds, not once in 20."""
    return abs(estimate.value - truth) < 1.75 * estimate.half_width


def test_the_panel_is_what_theory_says(on_policy):
    """On-policy: k1 in loss delivers nothing, k1 in reward and exact with future credit everything, k3 in loss less."""
    report, terms = on_policy
    assert report.regime == "on_policy" and report.completions == 1024 and report.blocks == 16
    nothing = terms["k1_reverse_token in loss"]
    assert near(nothing.delivered, 0.0) and nothing.delivered.half_width < 0.1
    assert nothing.cosine is None or nothing.cosine.low < 0.3
    full = terms["exact_reverse_token in reward to_go"]
    assert near(full.delivered, 1.0) and full.cosine.value > 0.98 and full.p_unbiased > 0.001
    for label in ("kl.1: k1_reverse_token in reward to_go", "k1_reverse_token in reward total"):
        assert near(terms[label].delivered, 1.0) and terms[label].p_unbiased > 0.001
        assert terms[label].variance > full.variance
    half = terms["k2_reverse_token in loss"]
    assert half.cosine.value > 0.95
    less = terms["kl.0: k3_reverse_token in loss"]
    assert less.p_unbiased < 0.05 and less.delivered.high < 0.8 and less.bias.low > 0.2


def test_the_training_step_follows_the_gradient_of_the_terms_and_layers_add_up(on_policy):
    """Products add over disjoint parameters, so what is delivered is a weighted mean of the layers' shares."""
    report, terms = on_policy
    assert report.failures == []
    for term in terms.values():
        if term.position is None:
            assert term.check is None
        else:
            assert term.check.change > 1e-3 and term.check.disagreement < 1e-3
        shares = [layer["delivered"] for layer in term.layers.values()]
        assert list(term.layers) == ["embeddings", "block 0", "head"]
        assert min(shares) - 1e-6 <= term.delivered.value <= max(shares) + 1e-6


def test_terms_that_do_nothing_are_found_and_others_are_not():
    """Four no-ops, each silent in training: a mask, a clamp, a cost a group baseline removes; and a live neighbour."""
    report, terms = audited(
        "kl=[{estimator: k3, placement: loss, correction: token, cap: 1e-9, cap_mode: mask, beta: 0.1},"
        "{estimator: k2, placement: loss, input_clamp: 1e-9, beta: 0.1},"
        "{estimator: k1, placement: reward, output_clamp: 1e-9, beta: 0.1},"
        "{estimator: k2, placement: loss, beta: 0.1}]",
        names=("own",),
        samples=64,
        blocks=4,
    )
    mask, clamp, cost, live = sorted(terms.values(), key=lambda term: term.position)
    assert [term.check.inert for term in (mask, clamp, cost, live)] == [True, True, True, False]
    assert mask.silent_share == mask.capped_share == 1.0
    assert clamp.silent_share > 0.95 and clamp.clamped_share > 0.95
    assert live.silent_share < 0.5 and live.clamped_share is None
    assert len(report.failures) == 3 and all("INERT" in line for line in report.failures)


def test_stale_samples_are_compared_off_policy_and_costs_before_the_baseline_through_the_advantage():
    report, _ = audited(
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
    assert report.regime == "off_policy" and "prefix_previous" in report.reference_term
    assert report.clip_share is not None and report.failures == []
    before, ema, sampler, exact = report.terms
    assert near(before.delivered, 1.0)
    assert ema.cosine.value > 0.9
    assert sampler.cosine is None and sampler.verdict == "no reference gradient to compare with"
    assert sampler.check.change > 0
    assert exact.cosine.value > 0.98 and exact.p_unbiased > 0.001


def test_a_policy_that_is_its_reference_has_nothing_to_audit(tmp_path):
    with pytest.raises(UserError, match="still identical to its initial reference, so every KL gradient is zero"):
        audited("optimizer.lr=1e-30", samples=64, updates=1)
    with pytest.raises(UserError, match=r"--updates: got 2; .* 4 updates old, so at least 5"):
        audited("lag.mode=replayed", "lag.steps=4", updates=2)
    with pytest.raises(UserError, match="at least 3 blocks of whole groups, got 2"):
        audited(samples=8, updates=1)


# --- in a run -----------------------------------------------------------------------------------------------------
def run_training(folder, *overrides):
    config = load_config(TINY, [f"output={folder}", "train.eval_every=0", *overrides])
    done = train(config, console=Console(file=io.StringIO()), command="x")
    metrics = {}
    for line in (done.run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "metrics":
            for name, value in event["data"].items():
                assert (event["step"], name) not in metrics
                metrics[event["step"], name] = value
    return done, metrics


SEVEN_UPDATES = (
    "train.steps=7",
    "kl=[{estimator: k1, placement: reward, beta: 0.05}, {estimator: exact, placement: loss, reference: ema}]",
)


@pytest.fixture(scope="module")
def run_with_audit(tmp_path_factory):
    options = ("audit.every=3", "audit.samples=4096", "audit.terms=[own, grpo]")
    return run_training(tmp_path_factory.mktemp("audited"), *options, *SEVEN_UPDATES)


def test_an_audit_leaves_a_run_to_the_bit(run_with_audit, tmp_path):
    audited_run, metrics = run_with_audit
    plain, plain_metrics = run_training(tmp_path, *SEVEN_UPDATES)
    both = [done.run for done in (audited_run, plain)]
    policies = [weights_hash(load_file(run.policy / "model.safetensors")) for run in both]
    states = [torch.load(run.checkpoint / "rank-0.pt", weights_only=True)["torch_rng"] for run in both]
    assert policies[0] == policies[1] and torch.equal(*states)
    unchanged = {key: value for key, value in metrics.items() if not key[1].startswith(("audit/", "time/"))}
    assert unchanged == {key: value for key, value in plain_metrics.items() if not key[1].startswith("time/")}
    assert config_hash(load_config(TINY, ["audit.every=3"])) == config_hash(load_config(TINY))


def test_an_audit_in_a_run_is_logged_with_its_update(run_with_audit):
    _, metrics = run_with_audit
    steps = {step for step, name in metrics if name.startswith("audit/")}
    assert steps == {4, 7} == {step for step, name in metrics if name == "time/audit"}
    for key in ("kl_0", "kl_1", "grpo"):
        assert metrics[4, f"audit/{key}/kl_to_policy_norm"] > 0
        assert metrics[4, f"audit/{key}/silent_share"] < 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["audit.terms=[k3]"], r"audit\.terms: got 'k3'; allowed: own, panel"),
        (["rollout.prompts_per_batch=2"], r"audit\.every: got 1; allowed: 0 where .* fewer than 3 groups"),
        (["audit.samples=8"], r"audit\.every: .*leave 2"),
    ],
)
def test_an_audit_that_cannot_run_is_refused_before_training(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run_training(tmp_path, "audit.every=1", *overrides)
    assert not list(tmp_path.iterdir())


def test_a_no_op_is_warned_about_in_a_run(tmp_path, caplog):
    run_training(
        tmp_path,
        "audit.every=1",
        "train.steps=3",
        "kl=[{estimator: k3, placement: loss, correction: token, cap: 1e-9, cap_mode: mask, beta: 0.1}]",
    )
    lines = [record.message for record in caplog.records if "INERT" in record.message]
    assert len(lines) == 1 and lines[0].startswith("audit at update 2: kl.0: k3_reverse_token in loss")


# --- the command --------------------------------------------------------------------------------------------------
def test_the_folder_of_a_run_is_audited_at_its_checkpoint(run_with_audit, capsys):
    folder = run_with_audit[0].run.path
    audit(folder, terms="own,liu/k2_loss", samples=64, blocks=16, sketch=65536, format="csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["term"].split(":")[0] for row in rows] == ["kl.0", "kl.1", "liu/k2_loss"]
    (file,) = folder.glob("audit-tiny-*-7.json")
    whole = json.loads(file.read_text())
    assert whole["version"] == 7 and whole["checkpoint"].endswith("step-00000007.ckpt")
    assert whole["terms"][0]["check"]["inert"] is False and whole["config_hash"] in file.name
    with pytest.raises(UserError, match="audit other terms with --terms"):
        AuditSource.read(folder, ["kl.0.beta=1"])


def test_a_stale_run_is_trained_on_from_its_checkpoint(tmp_path):
    """A run whose samples are old is audited that many updates later, on samples of the checkpoint."""
    folder = run_training(tmp_path, "train.steps=3", "algorithm.updates_per_batch=2")[0].run.path
    report, _ = audited(path=folder, names=("own",), samples=64)
    assert report.version == 4 and report.regime == "off_policy"


def test_a_no_op_ends_the_command_with_1(tmp_path):
    term = "kl=[{estimator: k3, placement: loss, correction: token, cap: 1e-9, cap_mode: mask, beta: 0.1}]"
    words = ["audit", str(TINY), term, f"output={tmp_path}", "--samples", "32", "--updates", "3", "--format", "json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and isinstance(done.exception, RunFailed)
    assert "INERT: beta does not change the gradient" in str(done.exception)
    assert json.loads(done.stdout)["terms"][0]["verdict"].startswith("INERT")
    assert len(list(tmp_path.glob("audit-tiny-*.json"))) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"terms": "gpro"}, "did you mean 'grpo'"),
        ({"config": "."}, "a folder without config.yaml"),
        ({"config": "nowhere.yaml"}, "no such config file"),
    ],
)
def test_misuse_of_the_command(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    plain = {"config": TINY, "terms": "own", "format": "table", "overrides": ["output=here"]}
    with pytest.raises(UserError, match=message):
        audit(**{**plain, **options, "config": Path(options.get("config", TINY))})
    assert not list(tmp_path.iterdir())
