"""What a run prints at its end: scores that say no more than was measured, and commands that work as printed."""

import io
import json
import shlex
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from commands import run_here
from kl_comedy.cli.summary import show_outcome
from kl_comedy.training.run_folder import Outcome, RunDir

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
SHORT = ("train.steps=2", "train.eval_every=0", "data.eval.heldout.limit=8")
PLUGIN = """
from kl_comedy.registry import ESTIMATORS, REWARDS


@ESTIMATORS.register("my_k1", source="test", needs="log_ratio")
def my_k1(log_ratio):
    "The log-ratio."
    return log_ratio


@REWARDS.register("my_reward", source="test")
def my_reward(completion, answer, meta):
    "One for a 1."
    return float("1" in completion)
"""


def kl_comedy(*words, cwd, code=0):
    """Its messages, as they stand on the terminal."""
    exit_code, _, errors = run_here(*words, cwd=cwd)
    assert exit_code == code, errors
    return errors


def printed_commands(messages):
    """The commands of the closing lines, as words after ``kl-comedy``."""
    return [shlex.split(line)[1:] for line in messages.splitlines() if line.startswith("kl-comedy ")]


def held_out(messages):
    """What the line about how the run ended says of the held-out reward; None where it says nothing."""
    (line,) = [line for line in messages.splitlines() if line.startswith("tiny seed 0: finished in ")]
    if ";" not in line:
        return None
    return line.partition("; heldout reward ")[2]


def test_one_evaluation_is_a_score_and_no_change(tmp_path):
    store = "tracking.uri=none"
    once = kl_comedy("train", TINY, *SHORT, store, "eval.at_start=false", cwd=tmp_path)
    assert held_out(once).endswith(" at update 2")
    assert "->" not in held_out(once)
    start = kl_comedy("train", TINY, *SHORT, store, "eval.at_end=false", cwd=tmp_path)
    assert held_out(start).endswith(" at update 0")
    twice = kl_comedy("train", TINY, *SHORT, store, cwd=tmp_path)
    assert "->" in held_out(twice)
    never = kl_comedy("train", TINY, *SHORT, store, "eval.at_start=false", "eval.at_end=false", cwd=tmp_path)
    assert held_out(never) is None


@pytest.mark.slow
def test_every_closing_command_of_a_run_with_a_plugin_works_as_printed(tmp_path):
    (tmp_path / "my parts.py").write_text(PLUGIN)
    parts = ("rewards.0.name=my_reward", "kl=[{estimator: my_k1, placement: reward, beta: 0.05}]")
    store = "tracking.uri=sqlite:///my store.db"
    words = ("train", TINY, *SHORT, *parts, store, "output=my runs (ä)", "--plugin", "my parts.py")
    commands = printed_commands(kl_comedy(*words, cwd=tmp_path))
    assert [command[:2] for command in commands] == [["results", "table"]]
    (file,) = (tmp_path / "my runs (ä)").glob("*/summary.json")
    summary = json.loads(file.read_text())
    commands += [shlex.split(summary[name])[1:] for name in ("command", "resume_command", "evaluate_command")]
    for command in commands:
        kl_comedy(*command, cwd=tmp_path)


def closing_lines(summary, folder):
    """What a run with this summary prints at its end."""
    outcome = Outcome(run=RunDir(folder), summary=summary)
    console = Console(file=io.StringIO(), width=80)
    show_outcome(outcome, console)
    return console.file.getvalue().splitlines()


FINISHED = {
    "status": "FINISHED",
    "name": "tiny",
    "seed": 3,
    "steps": 10,
    "seconds": 12.6,
    "kl": "none",
    "command": "kl-comedy train tiny.yaml",
    "evaluate_command": "kl-comedy evaluate runs/tiny/config.yaml",
    "evaluations": {"heldout": {"0": 0.25, "9": 0.375, "10": 0.5}, "ood": {"0": 0.5, "10": 0.25}},
    "metrics": {"train/reward": 0.5},
}
RESULT = "tiny seed 3: finished in 13 s; heldout reward 0.250 -> 0.500 (+0.250); ood reward 0.500 -> 0.250 (-0.250)"


@pytest.mark.parametrize(
    ("uri", "run_id", "place", "next_command"),
    [
        ("http://tracking:5000", "0a1b", "run 0a1b in", "kl-comedy results table --uri http://tracking:5000"),
        ("sqlite:///my store.db", "0a1b", "run 0a1b in", "kl-comedy results table --uri 'sqlite:///my store.db'"),
        (
            "http://down:5000",
            None,
            "run (MLflow not reached; metrics are in the folder) in",
            "kl-comedy results sync 'runs (ä)/[1]'",
        ),
        ("none", None, "run in", "kl-comedy evaluate runs/tiny/config.yaml"),
    ],
)
def test_a_run_ends_in_three_lines(uri, run_id, place, next_command):
    folder = Path("runs (ä)/[1]")
    lines = closing_lines({**FINISHED, "mlflow_uri": uri, "run_id": run_id}, folder)
    assert lines == [RESULT, f"{place} {folder}", next_command]


def test_a_run_that_did_not_reach_mlflow_is_uploaded_by_the_command_that_it_prints(tmp_path):
    # A file where the store's folder should be: the store cannot be opened, as a server that is down.
    (tmp_path / "store").touch()
    messages = kl_comedy("train", TINY, *SHORT, "tracking.uri=sqlite:///store/mlflow.db", cwd=tmp_path)
    assert "MLflow not reached" in messages
    commands = printed_commands(messages)
    assert [command[:2] for command in commands] == [["results", "sync"]], "no table of a store that is not there"
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    kl_comedy(*commands[0], cwd=tmp_path)
    kl_comedy("results", "table", "--uri", "sqlite:///store/mlflow.db", cwd=tmp_path)


def test_a_run_without_anything_to_evaluate_on_prints_no_command_that_would_fail(tmp_path):
    config = yaml.safe_load(TINY.read_text())
    del config["data"]["eval"]
    (tmp_path / "no_eval.yaml").write_text(yaml.safe_dump(config))
    commands = printed_commands(kl_comedy("train", "no_eval.yaml", *SHORT[:2], cwd=tmp_path))
    assert commands == []
