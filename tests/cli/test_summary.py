"""What a run prints at its end: scores that say no more than was measured, and commands that work as printed."""

import io
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


def row(messages, name):
    (line,) = [line for line in messages.splitlines() if line.startswith(name)]
    return line.removeprefix(name).strip()


def test_one_evaluation_is_a_score_and_no_change(tmp_path):
    store = "tracking.uri=none"
    once = kl_comedy("train", TINY, *SHORT, store, "eval.at_start=false", cwd=tmp_path)
    assert row(once, "heldout reward").endswith(" at update 2")
    assert "->" not in row(once, "heldout reward")
    start = kl_comedy("train", TINY, *SHORT, store, "eval.at_end=false", cwd=tmp_path)
    assert row(start, "heldout reward").endswith(" at update 0")
    twice = kl_comedy("train", TINY, *SHORT, store, cwd=tmp_path)
    assert "->" in row(twice, "heldout reward")
    never = kl_comedy("train", TINY, *SHORT, store, "eval.at_start=false", "eval.at_end=false", cwd=tmp_path)
    assert "heldout reward" not in never


@pytest.mark.slow
def test_every_closing_command_of_a_run_with_a_plugin_works_as_printed(tmp_path):
    (tmp_path / "my parts.py").write_text(PLUGIN)
    parts = ("rewards.0.name=my_reward", "kl=[{estimator: my_k1, placement: reward, beta: 0.05}]")
    store = "tracking.uri=sqlite:///my store.db"
    words = ("train", TINY, *SHORT, *parts, store, "output=my runs (ä)", "--plugin", "my parts.py")
    commands = printed_commands(kl_comedy(*words, cwd=tmp_path))
    assert [command[:2] for command in commands[2:]] == [["results", "table"], ["results", "plot"]]
    assert [command[0] for command in commands[:2]] == ["train", "evaluate"]
    for command in commands:
        kl_comedy(*command, cwd=tmp_path)
    assert (tmp_path / "reward.svg").is_file()


def closing_lines(summary, folder):
    """What a run with this summary prints at its end."""
    outcome = Outcome(run=RunDir(folder), summary=summary)
    console = Console(file=io.StringIO(), width=80)
    show_outcome(outcome, console)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("http://tracking:5000/", ["http://tracking:5000/#/runs/0a1b"]),
        (
            "sqlite:///my store.db",
            [
                "mlflow server --backend-store-uri 'sqlite:///my store.db' --host 127.0.0.1",
                "http://127.0.0.1:5000/#/runs/0a1b",
            ],
        ),
        (
            "postgresql://db/kl",
            [
                "mlflow server --backend-store-uri postgresql://db/kl --host 127.0.0.1",
                "http://127.0.0.1:5000/#/runs/0a1b",
            ],
        ),
        ("databricks", []),
        ("none", []),
    ],
)
def test_the_last_lines_say_where_a_browser_shows_the_run(tmp_path, uri, expected):
    summary = {
        "status": "FINISHED",
        "name": "tiny",
        "seed": 0,
        "kl": "none",
        "command": "kl-comedy train tiny.yaml",
        "evaluate_command": "kl-comedy evaluate runs/tiny/config.yaml",
        "mlflow_uri": uri,
        "run_id": None if uri == "none" else "0a1b",
    }
    lines = closing_lines(summary, tmp_path)
    headings = [number for number, line in enumerate(lines) if line.startswith("to see it in a browser")]
    if expected:
        (number,) = headings
        assert lines[number + 1 :] == expected
    else:
        assert headings == []
    # A run that the store has not got has no page there.
    away = closing_lines({**summary, "run_id": None}, tmp_path)
    assert not any("/#/runs/" in line for line in away)


def test_a_run_that_did_not_reach_mlflow_is_uploaded_by_the_command_that_it_prints(tmp_path):
    # A file where the store's folder should be: the store cannot be opened, as a server that is down.
    (tmp_path / "store").touch()
    messages = kl_comedy("train", TINY, *SHORT, "tracking.uri=sqlite:///store/mlflow.db", cwd=tmp_path)
    assert "MLflow not reached" in messages
    commands = printed_commands(messages)
    assert [command[:2] for command in commands[2:]] == [["results", "sync"]], "no table of a store that is not there"
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    for command in commands[1:]:
        kl_comedy(*command, cwd=tmp_path)
    kl_comedy("results", "table", "--uri", "sqlite:///store/mlflow.db", cwd=tmp_path)


def test_a_run_without_anything_to_evaluate_on_prints_no_command_that_would_fail(tmp_path):
    config = yaml.safe_load(TINY.read_text())
    del config["data"]["eval"]
    (tmp_path / "no_eval.yaml").write_text(yaml.safe_dump(config))
    commands = printed_commands(kl_comedy("train", "no_eval.yaml", *SHORT[:2], cwd=tmp_path))
    assert [command[0] for command in commands] == ["train"]
