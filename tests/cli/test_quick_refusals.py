"""A user's mistake is refused before the trainer's packages are imported, which takes seconds."""

import importlib.util
import json
import subprocess
import sys

import pytest

from commands import run_here
from kl_comedy.errors import UserError
from kl_comedy.io import check_writable

RUN = """
import contextlib, io, json, sys
from kl_comedy.cli.main import run
for command in sys.argv[1:]:
    sys.argv = ["kl-comedy", *command.split()]
    errors = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(errors):
        try:
            run()
        except SystemExit as end:
            code = end.code
    print(json.dumps([command, code, errors.getvalue(), "lightning" in sys.modules]))
"""
"""One process for all: what the first command imports would be there in the next ones too."""
CONFIG = "configs/quickstart.yaml"
MISTAKES = {
    "audit nowhere.yaml": "no such config file",
    f"audit {CONFIG} kl.0.estimator=k33": "did you mean 'k3'",
    f"audit {CONFIG} --terms own,grpoo": "did you mean 'grpo'",
    f"check {CONFIG} optimizer.lr=-1": "optimizer.lr",
    "evaluate nowhere.yaml": "no such config file",
    f"evaluate {CONFIG} --suite gsm8kk": "did you mean 'gsm8k'",
    f"evaluate {CONFIG} --suite gsm8k --k x": "--k",
    f"evaluate {CONFIG} --suite gsm8k --shard 3": "--shard",
    f"evaluate {CONFIG} --suite gsm8k --data nothing": "--data",
    f"evaluate {CONFIG} train.stepss=3": "train.stepss",
    "evaluate nobody/nothing train.stepss=3": "train.stepss",
    "results verify nowhere.csv": "TABLE",
    "reproduce nothing --uri nowhere.parquet": "nowhere.parquet",
    f"train {CONFIG} kl.0.estimator=k33": "did you mean 'k3'",
}


@pytest.mark.slow
def test_a_mistake_is_refused_before_the_trainer_is_imported():
    process = [sys.executable, "-c", RUN, *MISTAKES]
    done = subprocess.run(process, capture_output=True, text=True, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [command for command, *_ in answers] == list(MISTAKES), done.stderr
    for command, code, errors, has_trainer in answers:
        assert code == 2, (command, errors)
        assert "Traceback" not in errors, (command, errors)
        assert MISTAKES[command] in errors, (command, errors)
        assert not has_trainer, command


HEAVY = ("torch", "transformers", "lightning", "mlflow", "pandas", "vllm")
TYPED = """
import sys
from kl_comedy.cli.main import run
for command in sys.argv[1:]:
    sys.argv = ["kl-comedy", *command.split()]
    try:
        run()
    except SystemExit as end:
        print(end.code, *(name for name in HEAVY if name in sys.modules))
"""
TYPOS = {
    f"check {CONFIG} trainer.nope=1": "trainer.nope: no such key",
    f"train {CONFIG} trainer.devices=1": "trainer.devices: got 1; train.devices sets this argument",
    f"train {CONFIG} train.stepss=3": "train.stepss: no such key",
    f"train {CONFIG} optimizer.beta=1": "optimizer.beta: no such key",
    f"sweep {CONFIG} trainer.nope=1 seed=0,1 --local 1": "trainer.nope: no such key",
    f"sweep {CONFIG} reward.0.nam=1 seed=0,1 --dry-run": "reward: no such key",
    f"evaluate {CONFIG} trainer.nope=1": "trainer.nope: no such key",
    f"evaluate {CONFIG} eval.nope=1": "eval.nope: no such key",
}


def test_a_typo_in_a_key_is_refused_before_any_heavy_package_is_imported():
    program = TYPED.replace("HEAVY", repr(HEAVY))
    # One process for all: what the first command imports would be there in the next ones too.
    done = subprocess.run([sys.executable, "-c", program, *TYPOS], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == ["2"] * len(TYPOS), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for error, message in zip(errors, TYPOS.values(), strict=True):
        assert message in error


def test_an_unknown_key_is_named_before_a_wrong_value_that_stands_above_it():
    _, _, err = run_here("check", CONFIG, "rollout.backend=nope", "train.stepss=3")
    assert err.startswith("error: train.stepss: no such key")


@pytest.mark.parametrize(("option", "value"), [("--k", "1,4"), ("--limit", "3")])
def test_an_option_of_suites_without_a_suite_is_refused(option, value):
    code, out, err = run_here("evaluate", CONFIG, option, value)
    assert code == 2
    assert out == ""
    assert option in err
    assert "--suite" in err


OUTPUTS = {
    "results table --format csv --out {place}.csv": "--out",
    "results table --format parquet --out {place}.parquet": "--out",
    "results plot --metric train/reward --out {place}.svg": "--out",
    "results report --out {place}.html": "--out",
    "results export --out {place}.parquet": "--out",
    "results compare --metric train/reward --out {place}.csv": "--out",
    "results aggregate --metric train/reward --out {place}.csv": "--out",
    "certify none --plot {place}.svg": "--plot",
    "audit quickstart --out {place}": "--out",
    "train quickstart output={place}": "output",
}
"""A command for each option that names what is written, and that option. There is no store to read."""


@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "new" / "x"
    code, out, err = run_here(*command.format(place=place).split(), cwd=tmp_path)
    assert code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"error: {OUTPUTS[command]}: cannot write {place}")
    assert line.endswith("Not a directory")


def test_an_export_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    code, _, err = run_here("export", tmp_path, tmp_path / "config.yaml" / "out")
    assert code == 2
    assert err.startswith("error: OUT: cannot write")


def test_the_check_of_an_output_leaves_nothing_behind(tmp_path):
    old = tmp_path / "old.csv"
    old.write_text("1")
    check_writable(old, "--out")
    check_writable(tmp_path / "a" / "b" / "new.csv", "--out")
    check_writable(tmp_path / "a", "--out", is_folder=True)
    assert [file.name for file in tmp_path.iterdir()] == ["old.csv"]
    assert old.read_text() == "1"
    with pytest.raises(UserError, match="this is a folder"):
        check_writable(tmp_path, "--out")


@pytest.mark.parametrize("backend", ["vllm", "vllm_server"])
def test_a_run_without_its_engine_is_refused_before_the_model_is_loaded(backend, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    code, _, err = run_here("train", "quickstart", f"rollout.backend={backend}")
    assert code == 2
    assert err.startswith(f"error: rollout.backend: {backend} needs vLLM")
    # A server that already runs is no matter of this machine.
    code, _, err = run_here(
        "check", "quickstart", f"rollout.backend={backend}", "--no-memory", "--gpus", 2, "model.device=cuda"
    )
    assert "needs vLLM" not in err


INTERRUPTED = """
import sys

class CtrlC:
    def find_spec(self, name, *rest):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from kl_comedy.cli import run
run()
"""


def test_ctrl_c_while_the_command_is_imported_has_no_traceback():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 130
    assert done.stderr == ""
