"""A user's mistake is refused before the trainer's packages are imported, which takes seconds."""

import subprocess
import sys

import pytest

from commands import run_here

RUN = """
import sys
sys.argv = ["kl-comedy", *sys.argv[1:]]
from kl_comedy.cli.main import run
try:
    run()
finally:
    print("imported lightning" if "lightning" in sys.modules else "no trainer")
"""
CONFIG = "configs/quickstart.yaml"
MISTAKES = {
    "audit nowhere.yaml": "no such config file",
    f"audit {CONFIG} kl.0.estimator=k33": "did you mean 'k3'",
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
@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_refused_before_the_trainer_is_imported(command):
    process = [sys.executable, "-c", RUN, *command.split()]
    done = subprocess.run(process, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert MISTAKES[command] in done.stderr
    assert done.stdout.strip() == "no trainer"


@pytest.mark.parametrize(("option", "value"), [("--k", "1,4"), ("--limit", "3")])
def test_an_option_of_suites_without_a_suite_is_refused(option, value):
    code, out, err = run_here("evaluate", CONFIG, option, value)
    assert code == 2
    assert out == ""
    assert option in err
    assert "--suite" in err
