"""A new estimator from outside the package by the commands of CONTRIBUTING: certified, trained, in the table."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # trains twice; tests/docs/test_snippets.py runs the guides' code

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
SMALL = [
    "train.steps=2",
    "train.eval_every=0",
    "data.eval={}",
    "model.options.warmstart_steps=5",
    "rollout.max_new_tokens=4",
    "tracking.uri=sqlite:///mlflow.db",
]


COMMANDS = """
import json, os, sys
import kl_comedy.kl.oracle.certificate, kl_comedy.training.run
from kl_comedy.cli.main import run
for number, words in enumerate(json.loads(sys.argv[1])):
    if (pid := os.fork()) == 0:
        os.dup2(os.open(f"{number}.out", os.O_WRONLY | os.O_CREAT), 1)
        sys.argv = ["kl-comedy", *words]
        run()
    assert os.waitpid(pid, 0)[1] == 0, words
"""
"""Each command in a fork of one process, since importing torch takes longer than most of them."""


def kl_comedy(*commands, cwd, path=None):
    """What each command prints."""
    command = [sys.executable, "-c", COMMANDS, json.dumps([[str(word) for word in words] for words in commands])]
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": f"{path}:{ROOT / 'src'}"}), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(cwd / f"{number}.out").read_text() for number in range(len(commands))]


def guide():
    """The first Python block of "Add an estimator", and its commands."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Add an estimator")[1].split("\n## ")[0]
    code = re.search(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert code is not None
    return code.group(1), [shlex.split(line)[1:] for line in re.findall(r"^    (kl-comedy .*)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Every command of the guide in its order, in one folder: its words and what it printed."""
    folder = tmp_path_factory.mktemp("walk")
    code, commands = guide()
    (folder / "my_parts.py").write_text(code)
    small = {"configs/quickstart.yaml": str(TINY)}
    lines = [
        [*(small.get(word, word) for word in words), *(SMALL if words[0] == "train" else ["--format", "json"])]
        for words in commands
    ]
    return folder, list(zip(lines, kl_comedy(*lines, cwd=folder), strict=True))


def test_the_guide_lists_certifies_trains_and_shows(walked):
    _, printed = walked
    assert [words[0] for words, _ in printed] == ["list", "certify", "certify", "train", "results"]


def test_it_is_listed(walked):
    (row,) = [row for row in json.loads(walked[1][0][1]) if row["name"] == "log_cosh"]
    assert row["claims"] == ["nonnegative"] and row["origin"].startswith("kl_comedy_plugin_")


def test_every_cell_is_certified_and_a_single_term(walked):
    rows, single = (json.loads(printed) for _, printed in walked[1][1:3])
    assert len(rows) > 60 and all(row["kept"] for row in rows)
    assert {term["estimator"] for row in rows for term in row["terms"]} == {"log_cosh"}
    straight = [row for row in rows if row["terms"][0].get("gradient") == "k2" and row["target"] == "token_reverse"]
    assert straight, "its value with the gradient of k2 optimizes the reverse KL of each prefix"
    assert [row["regime"] for row in single] == ["on_policy", "off_policy", "mixed"]
    assert single[0]["terms"][0]["options"] == {"width": 0.5} and single[0]["target"] is None


def test_it_trains_and_is_a_row_of_the_results(walked):
    folder, printed = walked
    rows = json.loads(printed[-1][1])
    labels = {(row["kl.label"], row["kl.target"], row["runs"]) for row in rows}
    assert labels == {("0.02 log_cosh_reverse_token in loss", "none", 1)}
    (summary,) = folder.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["status"] == "FINISHED"


def test_an_installed_package_joins_by_its_entry_point(tmp_path):
    """No --plugin: a distribution on the path whose entry point names the module."""
    code, _ = guide()
    (tmp_path / "site" / "my_package").mkdir(parents=True)
    (tmp_path / "site" / "my_package" / "__init__.py").write_text("")
    (tmp_path / "site" / "my_package" / "my_parts.py").write_text(code)
    info = tmp_path / "site" / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kl_comedy.estimators]\nmy_parts = my_package.my_parts\n")
    listed, _ = kl_comedy(
        ["list", "estimators", "--format", "json"],
        ["train", TINY, "kl=[{estimator: log_cosh, placement: loss, beta: 0.02}]", *SMALL[:-1]],
        cwd=tmp_path,
        path=tmp_path / "site",
    )
    origins = [row["origin"] for row in json.loads(listed) if row["name"] == "log_cosh"]
    assert origins == ["my_package.my_parts"]
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["kl"] == "0.02 log_cosh_reverse_token in loss"
