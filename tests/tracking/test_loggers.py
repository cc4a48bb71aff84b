"""TensorBoard and W&B hold an on-policy run and one on older samples side by side: the same metrics, and the config."""

import json
from pathlib import Path

import pytest

import wandb_files
from commands import run_here

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SHORT = ("train.steps=3", "train.eval_every=0", "data.eval.heldout.limit=4", "optimizer.lr=0.003")
LAGS = {"fresh": ("lag.mode=on_policy", "lag.steps=0"), "stale": ("lag.mode=replayed", "lag.steps=1")}


def train_pair(logger, folder):
    """The folders of two runs with a logger, which differ in the age of their samples alone."""
    folders = {}
    for name, lag in LAGS.items():
        words = ("train", TINY, *SHORT, *lag, f"name={name}", f"tracking.loggers=[{logger}]")
        code, _, errors = run_here(*words, cwd=folder)
        assert code == 0, errors
        (folders[name],) = folder.glob(f"runs/{name}-*")
    return folders


def recorded(run, metric):
    """The values of a metric by update, from the run's own record."""
    values = {}
    for line in (run / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "metrics" and metric in event["data"]:
            values[event["step"]] = event["data"][metric]
    return values


def check_pair(configs, curves, folders):
    """The two runs have the same metrics and the same keys of the config, whose values differ in name and lag."""
    assert curves["fresh"].keys() == curves["stale"].keys()
    assert {"train/reward", "eval/heldout/reward", "kl/exact_reverse_sequence"} <= curves["fresh"].keys()
    for name, run in folders.items():
        for metric in ("train/reward", "policy/staleness", "eval/heldout/reward"):
            assert curves[name][metric] == pytest.approx(recorded(run, metric)), (name, metric)
    assert configs["fresh"].keys() == configs["stale"].keys()
    differing = {key for key, value in configs["fresh"].items() if configs["stale"][key] != value}
    assert {"name", "lag.mode", "lag.steps", "tags.kl.regime"} <= differing
    assert not any(key.startswith(("kl.", "optimizer.", "model.")) for key in differing)
    assert [configs[name]["lag.steps"] for name in LAGS] == [0, 1], "numbers, by which a table can be sorted"
    assert [configs[name]["tags.kl.regime"] for name in LAGS] == ["on_policy", "off_policy"]
    assert configs["fresh"]["optimizer.lr"] == 0.003


def test_tensorboard_compares_an_on_policy_run_with_one_on_older_samples(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    folders = train_pair("{name: tensorboard}", tmp_path)
    configs = {}
    curves = {}
    for name, run in folders.items():
        events = EventAccumulator(str(run / "tensorboard")).Reload()
        curves[name] = {}
        for tag in events.Tags()["scalars"]:
            curves[name][tag] = {event.step: event.value for event in events.Scalars(tag)}
        written = events.PluginTagToContent(metadata.PLUGIN_NAME)
        assert metadata.EXPERIMENT_TAG not in written, "the columns of one run would be those of the whole table"
        start = metadata.parse_session_start_info_plugin_data(written[metadata.SESSION_START_INFO_TAG])
        configs[name] = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    check_pair(configs, curves, folders)


@pytest.mark.slow
def test_wandb_compares_them_offline(tmp_path):
    pytest.importorskip("wandb")
    folders = train_pair("{name: wandb, options: {offline: true, group: lags}}", tmp_path)
    configs = {}
    curves = {}
    for name, run in folders.items():
        (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
        configs[name], curves[name] = wandb_files.read(file)
        # W&B's own entry: versions, and times.
        del configs[name]["_wandb"]
    check_pair(configs, curves, folders)
