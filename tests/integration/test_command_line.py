"""The commands a user types, one after the other, in processes of their own: train, table, plot, export, evaluate."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TINY = Path(__file__).with_name("tiny.yaml")


def kl_comedy(*arguments, cwd, fails=None):
    command = [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == (fails or 0), done.stderr
    assert "Traceback" not in done.stderr
    return done


def metrics_of(spool, *, step):
    events = [json.loads(line) for line in spool.read_text().splitlines()]
    found = {}
    for event in events:
        if event.get("kind") == "metrics" and event["step"] == step:
            found |= event["data"]
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds of the tiny config, tracked in a real store."""
    folder = tmp_path_factory.mktemp("work")
    said = [
        kl_comedy(
            "train",
            TINY,
            f"seed={seed}",
            "train.steps=2",
            "train.eval_every=0",
            "tracking.uri=sqlite:///mlflow.db",
            cwd=folder,
        ).stderr
        for seed in (0, 1)
    ]
    return folder, said


def test_a_run_ends_with_its_row_and_the_commands_to_go_on(trained):
    _, said = trained
    for word in ("heldout", "train reward", "evaluate", "results table", "results plot"):
        assert word in said[0]
    assert "update 2/2" in said[0]


def test_the_table_has_one_row_for_both_seeds(trained):
    folder, _ = trained
    rows = json.loads(kl_comedy("results", "table", "--format", "json", cwd=folder).stdout)
    assert len(rows) > 0 and {row["n"] for row in rows} == {2}
    text = kl_comedy("results", "table", "--format", "markdown", cwd=folder).stdout
    assert "0.05 k1_reverse_token in reward to_go" in text


def test_a_row_says_what_the_run_was(trained):
    folder, _ = trained
    rows = json.loads(kl_comedy("results", "export", "--format", "json", cwd=folder).stdout)
    for row in rows:
        assert row["tags.kl.0.verdict"].startswith("sequence_reverse")
        for tag in ("config.hash", "reference.hash", "data.hash.train", "run.command"):
            assert row[f"tags.{tag}"]
    assert rows[0]["tags.config.hash_without_seed"] == rows[1]["tags.config.hash_without_seed"]
    assert rows[0]["tags.config.hash"] != rows[1]["tags.config.hash"]


def test_the_plot_is_written(trained):
    folder, _ = trained
    kl_comedy("results", "plot", "--metric", "train/reward", "--out", "reward.svg", cwd=folder)
    assert (folder / "reward.svg").read_text().lstrip().startswith("<?xml")


def test_the_trained_policy_evaluates_to_what_the_run_said(trained):
    folder, _ = trained
    run = next((folder / "runs").glob("tiny-*-1"))
    summary = json.loads((run / "summary.json").read_text())
    words = shlex.split(summary["evaluate_command"])[1:]
    refused = kl_comedy(*words, "model.options={preset: tiny}", cwd=folder, fails=2)
    assert "model.options" in refused.stderr
    rows = json.loads(kl_comedy(*words, "--format", "json", cwd=folder).stdout)
    assert rows[0]["reward"] == pytest.approx(summary["evaluations"]["heldout"]["2"])
    logged = {
        name.removeprefix("eval/heldout/"): value
        for name, value in metrics_of(run / "spool.jsonl", step=2).items()
        if name.startswith(("eval/heldout/kl/", "eval/heldout/kl_error/", "eval/heldout/policy/"))
    }
    assert len(logged) == 6 + 6 + 1 + 12 + 2 and logged["kl/exact_reverse_token"] > 0
    assert {name: rows[0][name] for name in logged} == pytest.approx(logged, rel=1e-3, abs=1e-7)
