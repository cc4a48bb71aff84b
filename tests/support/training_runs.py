"""Short runs of the tiny policy and what they left."""

import io
import json
from pathlib import Path

from rich.console import Console

from commands import assert_resumed, kill_after
from kl_comedy.config import load_config
from kl_comedy.models import weights_hash
from kl_comedy.training.run import train

TINY = Path(__file__).with_name("tiny.yaml")
ROOT = Path(__file__).parents[2]
SHORT = ["train.steps=2", "train.eval_every=0", "eval.at_start=false", "eval.at_end=false"]


def quiet():
    return Console(file=io.StringIO(), width=200)


def go(tmp_path, *overrides):
    config = load_config(TINY, [f"output={tmp_path}", *overrides])
    return train(config, console=quiet(), command="kl-comedy train tiny.yaml")


def metrics_of(run):
    """``(step, name)`` to value, without times and how full the sampler's queue was, which depends on time too."""
    metrics = {}
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") != "metrics":
            continue
        step = event["step"]
        for name, value in event["data"].items():
            depends_on_time = name.startswith("time/") or name == "stream/queue_depth"
            if depends_on_time:
                continue
            assert (step, name) not in metrics, f"{name} logged twice"
            metrics[step, name] = value
    return metrics


def sample_tables_of(run):
    """The rows of every table of samples, by update."""
    tables = {}
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "table" and event["data"]["name"] == "samples":
            assert event["step"] not in tables, "a table is logged twice"
            tables[event["step"]] = json.loads((run.path / event["data"]["path"]).read_text())
    return tables


def weights_of(run):
    from safetensors.torch import load_file

    return weights_hash(load_file(run.policy / "model.safetensors"))


def killed_then_resumed(tmp_path, overrides, *, at):
    """Train in a process of its own, kill -9 it once the checkpoint of update ``at`` is there, and resume."""
    words = ["resume=auto", *overrides]
    kill_after(at, "train", TINY, f"output={tmp_path}", *words, folder=tmp_path, pattern="tiny-*")
    resumed = go(tmp_path, *words)
    assert_resumed(tmp_path, at=at)
    return resumed
