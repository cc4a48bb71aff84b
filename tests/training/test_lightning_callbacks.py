"""Lightning's own callbacks in a run: those that do what their documentation says, and those that are refused."""

import json
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from safetensors.torch import load_file

from kl_comedy.config import load_config
from kl_comedy.errors import RunInterrupted, RunStopped, UserError
from kl_comedy.models import weights_hash
from kl_comedy.registry import CALLBACKS, load_plugin_file
from kl_comedy.training.build import check_run
from kl_comedy.training.callback_rules import RULES, reason_against, unknown_monitor
from kl_comedy.training.export import export_policy
from kl_comedy.training.run_record import RunRecord
from rank_runs import over
from training_runs import TINY, go, metrics_of

PLUGIN = Path(__file__).parents[1] / "support" / "lightning_callbacks.py"
RUN = [
    "train.steps=8",
    "train.eval_every=2",
    "train.keep_checkpoints=8",
    "train.exact_kl_every=2",
    "optimizer.schedule=linear",
    "data.eval.heldout.limit=4",
]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    load_plugin_file(PLUGIN)


def callbacks_of(folder, signal_at=0):
    """Nothing improves a reward by 1, so that the second evaluation, at update 4, exhausts the patience of 1."""
    stopping = "{name: early_stopping, options: {monitor: eval/heldout/reward, mode: max, patience: 1, min_delta: 1.0}}"
    saving = f"{{name: model_checkpoint, options: {{monitor: train/reward, mode: max, dirpath: {folder / 'best'}}}}}"
    stranger = f"{{name: stranger, options: {{path: {folder / 'seen'}, signal_at: {signal_at}}}}}"
    timer = "{name: timer, options: {duration: {hours: 100}}}"
    return f"callbacks=[{stopping}, {saving}, {{name: lr_monitor}}, {timer}, {stranger}]"


def check(folder, run, summary):
    """What each callback has done, by what is known without them."""
    assert summary["status"] == "FINISHED"
    assert summary["steps"] == 4
    assert summary["reason"].startswith(
        "stopped at update 4 of 8 by EarlyStopping: Monitored metric eval/heldout/reward"
    )
    assert "\n" not in summary["reason"]
    assert (run.policy / "model.safetensors").is_file()
    assert "| update | 4 |" in (run.policy / "README.md").read_text()

    metrics = metrics_of(run)  # fails where one is logged twice
    assert max(step for step, _ in metrics) == 4
    assert [int(update) for update in summary["evaluations"]["heldout"]] == [0, 2, 4]

    # ModelCheckpoint: the higher training reward at the two evaluations, the first of equals.
    best = 2 if metrics[2, "train/reward"] >= metrics[4, "train/reward"] else 4
    (checkpoint,) = (folder / "best").iterdir()
    assert checkpoint.name == f"epoch=0-step={best}.ckpt"
    exported = {}
    for name, which in {"ours": str(best), "lightnings": str(checkpoint)}.items():
        export_policy(run, run.config_reader()([]), folder / name, which=which)
        exported[name] = load_file(folder / name / "model.safetensors")
        assert f"| update | {best} |" in (folder / name / "README.md").read_text()
    assert weights_hash(exported["ours"]) == weights_hash(exported["lightnings"])

    # LearningRateMonitor logs before the update, whose step Lightning counts from 0.
    rates = {step: value for (step, name), value in metrics.items() if name == "lr-AdamW"}
    assert rates == pytest.approx({step: 1e-3 * (1 - step / 8) for step in range(4)})
    assert [metrics[step + 1, "train/lr"] for step in range(4)] == pytest.approx(list(rates.values()))

    seen = [json.loads(line) for line in (folder / "seen").read_text().splitlines()]
    for rank in {row["rank"] for row in seen}:
        rows = [row for row in seen if row["rank"] == rank]
        assert [(row["sanity"], row["version"]) for row in rows] == [(True, 0), (False, 2), (False, 4)]
    config = load_config(TINY)
    for row in seen:
        for name in row["metrics"]:
            monitoring = EarlyStopping(monitor=name)
            assert unknown_monitor(monitoring, config, [monitoring, LearningRateMonitor()]) is None, name
        for name in ("eval/heldout/reward", "train/reward", "grad/norm"):
            if not row["sanity"] or name.startswith("eval/"):
                # Lightning's tensors have 32 bits.
                assert row["metrics"][name] == pytest.approx(metrics[row["version"], name], rel=1e-6)
        if not row["sanity"]:
            # Measured at every second update; a run that was resumed in between knows the last value too.
            name = "kl/exact_reverse_sequence"
            assert row["metrics"].keys() >= {
                "eval/heldout/kl/exact_reverse_token",
                "train/reward/exact_answer",
                "beta/0",
            }
            assert (row["version"], name) not in metrics
            assert row["metrics"][name] == pytest.approx(metrics[row["version"] - 1, name], rel=1e-6)
    return metrics


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    outcome = go(folder / "runs", *RUN, callbacks_of(folder))
    return check(folder, outcome.run, outcome.summary)


def test_early_stopping_model_checkpoint_lr_monitor_and_a_strangers_hook(stopped):
    assert stopped


def test_an_interrupted_run_ends_at_the_same_update(tmp_path, monkeypatch, stopped):
    """Interrupted before the update that stops it, and once more between its last checkpoint and its summary."""
    words = ["resume=auto", *RUN, callbacks_of(tmp_path, signal_at=3)]
    with pytest.raises(RunStopped, match="update 3 of 8"):
        go(tmp_path / "runs", *words)
    save_policy = RunRecord.save_policy

    def interrupted(record, module):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunRecord, "save_policy", interrupted)
    with pytest.raises(RunInterrupted, match="update 4 of 8"):
        go(tmp_path / "runs", *words)
    monkeypatch.setattr(RunRecord, "save_policy", save_policy)
    outcome = go(tmp_path / "runs", *words)
    metrics = check(tmp_path, outcome.run, outcome.summary)
    assert metrics == stopped


def test_a_timer_ends_the_run_evaluated_and_saved(tmp_path):
    timer = "callbacks=[{name: timer, options: {duration: {microseconds: 1}}}]"
    words = ["train.steps=3", "train.eval_every=0", "train.checkpoint_every=2", "data.eval.heldout.limit=4", timer]
    outcome = go(tmp_path, *words)
    assert outcome.summary["reason"] == "stopped at update 1 of 3 by Timer: its duration has passed"
    assert list(outcome.summary["evaluations"]["heldout"]) == [0, 1]
    assert [path.name for path in outcome.run.checkpoints.iterdir()] == ["step-00000001.ckpt"]
    assert (outcome.run.policy / "model.safetensors").is_file()
    with pytest.raises(UserError, match="cannot be extended: stopped at update 1 of 3 by Timer"):
        go(tmp_path, *words, "train.steps=5", f"resume={outcome.run.path}")


REFUSED = {
    "early_stopping": [
        ("{monitor: train/reward, check_on_train_epoch_end: true}", (), "check_on_train_epoch_end"),
        ("{monitor: train/reward}", ("train.eval_every=0",), "train.eval_every"),
        ("{monitor: train/reward, mode: up}", (), "`mode` can be"),
        ("{monitor: eval/heldout/rewrad}", (), "did you mean 'eval/heldout/reward'? "),
        ("{monitor: eval/held_out/reward}", (), "did you mean 'eval/heldout/reward'? "),
        ("{monitor: kl/exact_revers_token}", (), "did you mean 'kl/exact_reverse_token'? "),
        ("{monitor: kl/k3_reverse_tokens}", (), "did you mean 'kl/k3_reverse_token'? "),
        ("{monitor: eval/heldout/pass_at_4}", (), "allowed: a metric that the run logs (docs/metrics.md)"),
        ("{monitor: eval/heldout/policy/entropy}", ("eval.kl=false",), "got 'eval/heldout/policy/entropy'; "),
        ("{monitor: eval/heldout/proxy}", (), "got 'eval/heldout/proxy'; "),
        ("{monitor: lr-AdamW}", (), "allowed: a metric that the run logs"),
    ],
    "timer": [("{duration: {hours: 1}, interval: epoch}", (), "interval=epoch")],
    "model_checkpoint": [
        ("{every_n_epochs: 2}", (), "every_n_epochs"),
        ("{train_time_interval: 5}", (), "train_time_interval"),
        ("{every_n_train_steps: 1, save_on_exception: true}", (), "save_on_exception"),
        ("{monitor: train/reward}", ("train.eval_every=0",), "every_n_train_steps"),
        (
            "{monitor: train/rewards}",
            (),
            "callbacks.0.options.monitor: got 'train/rewards'; did you mean 'train/reward'? ",
        ),
    ],
    "on_exception": [("{dirpath: x}", (), "train.checkpoint_every")],
    "progress_bar": [("{}", (), "one progress bar")],
    "batch_size_finder": [("{}", (), "train.microbatch_tokens")],
    "lr_finder": [("{}", (), "optimizer.lr")],
    "accumulation": [("{scheduling: {0: 2}}", (), "train.microbatch_tokens")],
    "swa": [("{swa_lrs: 0.1}", (), "one epoch")],
    "ema": [("{}", (), "reference `ema`")],
    "finetuning": [("{}", (), "model.lora")],
    "pruning": [("{pruning_fn: l1_unstructured}", (), "parameters of the policy")],
    "prediction_writer": [("{}", (), "train.record_rollouts")],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "options", "words", "reason"), CASES)
def test_what_cannot_work_is_refused_by_check_and_by_train(tmp_path, name, options, words, reason):
    words = [f"callbacks=[{{name: {name}, options: {options}}}]", *words]
    config = load_config(TINY, [f"output={tmp_path}", *words])
    with pytest.raises(UserError, match=r"callbacks\.0") as by_check:
        check_run(config, here=False)
    with pytest.raises(UserError) as by_train:
        go(tmp_path, *words)
    message = str(by_check.value)
    assert message == str(by_train.value)
    assert reason in message
    assert "\n" not in message
    assert not list(tmp_path.iterdir())


def test_every_rule_has_a_case_above():
    refused = [CALLBACKS.get(name).fn for name in REFUSED]
    for rule in RULES:
        assert any(issubclass(callback, rule.of) for callback in refused), rule
    assert reason_against(LearningRateMonitor(), load_config(TINY)) is None


MONITORED = [
    "train/loss_kl_0",
    "policy/ratio_p90",
    "train/reward/math_verify/verifier_failed",
    "eval/heldout/kl/k1_reverse_sequence",
    "eval/heldout/reward_half_width",
    "reference/ema/moved",
    "policy/correction/tis/weight_max",
]


@pytest.mark.parametrize("metric", MONITORED)
def test_metrics_whose_names_depend_on_the_config_may_be_monitored(metric):
    monitoring = EarlyStopping(monitor=metric)
    assert unknown_monitor(monitoring, load_config(TINY), [monitoring]) is None


def test_a_metric_of_another_callback_may_be_monitored():
    config = load_config(TINY)
    stopping = EarlyStopping(monitor="lr-AdamW")
    assert unknown_monitor(stopping, config, [stopping, LearningRateMonitor()]) is None
    assert unknown_monitor(stopping, config, [stopping, Callback()]) is None
    # Of our own groups another callback has none.
    proxy = EarlyStopping(monitor="eval/heldout/proxy")
    assert unknown_monitor(proxy, load_config(TINY, ["gold={name: exact_answer}"]), [proxy]) is None
    misspelt = EarlyStopping(monitor="train/rewards")
    assert "'train/reward'?" in unknown_monitor(misspelt, config, [misspelt, Callback()])
    assert unknown_monitor(ModelCheckpoint(monitor="step"), config, []) is None
    assert unknown_monitor(ModelCheckpoint(every_n_train_steps=2), config, []) is None


@pytest.mark.slow
def test_over_two_ranks(tmp_path):
    run = over(tmp_path / "runs", "fsdp", *RUN, callbacks_of(tmp_path), "--plugin", str(PLUGIN))
    check(tmp_path, run, run.summary())


@pytest.mark.slow
def test_a_timer_over_two_ranks(tmp_path):
    timer = (
        "callbacks=[{name: timer, options: {duration: {microseconds: 1}}}, {name: device_stats}, {name: throughput}]"
    )
    run = over(tmp_path / "runs", "ddp", "train.steps=3", "eval.at_start=false", timer, "--plugin", str(PLUGIN))
    assert run.summary()["reason"] == "stopped at update 1 of 3 by Timer: its duration has passed"
    names = {name for _, name in metrics_of(run)}
    assert {"train/samples", "DeviceStatsMonitor.on_train_batch_end/cpu_percent"} <= names
