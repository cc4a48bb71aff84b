"""Released code is read from a git folder at a commit: functions as they are, without what they are wrapped in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from register.fetch import NOT_FETCHED, fetch
from register.run import at_newest
from register.sources import Code, Source, SourceMissing, newest

TEXT = """
import heavy_package
from heavy_package import compiled

LIMIT = 2.0


@compiled(dynamic=True)
def estimate(logp: heavy_package.Tensor, ref: "heavy_package.Tensor") -> heavy_package.Tensor:
    return (logp - ref).clamp(max=LIMIT)


@dataclass
class Outputs:
    loss: heavy_package.Tensor


class Trainer:
    def step(self, new, ref):
        if self.beta > 0:
            log_ratio = ref - new
            kl = torch.expm1(log_ratio) - log_ratio
            self.log(kl)
        kl = 0.0
"""


@pytest.fixture
def folder(tmp_path):
    """A folder of clones with one repository, and the commit that has the text."""
    clone = tmp_path / "owner" / "name"
    clone.mkdir(parents=True)
    (clone / "code.py").write_text(TEXT)
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "code"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    # What lies in the folder now is not what the commit has.
    (clone / "code.py").write_text("raise SystemExit\n")
    return tmp_path, commit


def source(commit, **fields):
    return Source(repository="owner/name", commit=commit, path="code.py", **fields)


def test_a_function_runs_without_its_decorator_and_the_packages_of_its_annotations(folder):
    path, commit = folder
    wanted = source(commit, objects=("LIMIT", "estimate"))
    code = Code(wanted.text(path), wanted)
    value = code.estimate(torch.tensor([5.0, 1.0]), torch.tensor([0.0, 0.0]))
    assert value.tolist() == [2.0, 1.0]


def test_a_dataclass_keeps_the_decorator_that_makes_its_constructor(folder):
    path, commit = folder
    wanted = source(commit, objects=("Outputs",))
    assert Code(wanted.text(path), wanted).Outputs(loss=3).loss == 3


def test_statements_within_a_method_run_with_given_names(folder):
    """The first assignment to a name counts, though a later one stands less deep."""
    path, commit = folder
    wanted = source(commit, within="Trainer.step", statements=("log_ratio", "kl"))
    value = Code(wanted.text(path), wanted).run("kl", new=torch.tensor(0.0), ref=torch.tensor(1.0))
    assert float(value) == pytest.approx(torch.e - 2)


def test_a_name_that_is_asked_for_twice_gives_its_second_assignment(folder):
    path, commit = folder
    wanted = source(commit, within="Trainer.step", statements=("log_ratio", "kl", "kl"))
    value = Code(wanted.text(path), wanted).run("kl", new=torch.tensor(0.0), ref=torch.tensor(1.0))
    assert value == 0.0


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"objects": ("absent",)}, "the source has no absent"),
        ({"within": "Trainer.absent", "statements": ("kl",)}, "the source has no Trainer.absent"),
        ({"within": "Trainer.step", "statements": ("absent",)}, "step has no assignment to absent"),
    ],
)
def test_what_is_not_in_the_file_is_named(folder, fields, says):
    path, commit = folder
    wanted = source(commit, **fields)
    with pytest.raises(SourceMissing, match=says):
        Code(wanted.text(path), wanted)


def test_a_clone_or_a_commit_that_is_not_there_is_named(folder):
    path, commit = folder
    with pytest.raises(SourceMissing, match="no clone of owner/name"):
        source(commit, objects=("estimate",)).text(path / "elsewhere")
    with pytest.raises(SourceMissing, match=r"has no code\.py at 0000000"):
        source("0" * 40, objects=("estimate",)).text(path)


def test_the_newest_commit_of_a_clone_takes_the_place_of_the_pinned_one(folder):
    path, commit = folder
    newest_commit, date = newest(path, "owner/name")
    assert newest_commit == commit
    assert len(date) == len("2026-11-26")
    row = {"repository": "owner/name", "commit": "0" * 40, "dated": "1999-01-01", "id": "a"}
    assert at_newest(row, path) == {"repository": "owner/name", "commit": commit, "dated": date, "id": "a"}
    # Without a clone the row stays, and then says that it was not rebuilt.
    assert at_newest({**row, "repository": "no/clone"}, path)["commit"] == "0" * 40
    assert at_newest({"case": "verl:k1"}, path) == {"case": "verl:k1"}


def test_a_pinned_commit_is_fetched_once_into_a_clone_that_rows_can_read(folder, tmp_path):
    path, commit = folder
    remote = f"file://{path}/{{}}"
    target = tmp_path / "sources"
    assert fetch(target, "owner/name", commit, remote) == f"owner/name@{commit[:7]}: fetched"
    assert fetch(target, "owner/name", commit, "file:///nowhere/{}") == f"owner/name@{commit[:7]}: already fetched"
    assert source(commit, objects=("estimate",)).text(target) == TEXT
    assert NOT_FETCHED in fetch(target, "owner/name", "1" * 40, remote)
