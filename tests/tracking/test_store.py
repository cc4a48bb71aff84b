"""What is recorded of a run's origin; names, secrets and addresses; whether a process is dead."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.redaction import redact
from kl_comedy.tracking import provenance, store
from kl_comedy.tracking.provenance import HOST, NAMESPACE, PID, START, is_dead, process_tags


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=300))
def test_clean_names_are_names_mlflow_accepts(name):
    from mlflow.utils.validation import _validate_metric_name

    clean = store.clean_name(name)
    _validate_metric_name(clean)
    assert store.clean_name(clean) == clean
    path = store.clean_path(name)
    assert path
    assert not path.startswith("/")
    assert ".." not in path.split("/")


@pytest.mark.parametrize("size", [10, 100, 101, 6001])
def test_a_shortened_text_keeps_the_limit_and_names_its_length(size):
    whole = "x" * size
    text = store.shorten(whole, 100)
    assert len(text) <= 100
    if size <= 100:
        assert text == whole
    else:
        assert text != whole
        assert str(size) in text


@pytest.mark.parametrize("key", ["model.options.token", "HF_TOKEN", "rollout.options.api_key", "db.password"])
def test_a_secret_is_hidden_by_its_key(key):
    assert redact("abc", key) == "***"
    assert "abc" not in redact(f"{key}=abc")


@pytest.mark.parametrize(
    ("key", "value"), [("kl.0.level", "token"), ("data.max_tokens", "512"), ("model.tokenizer", "gpt2")]
)
def test_what_only_looks_like_the_key_of_a_secret_is_shown(key, value):
    assert redact(value, key) == value
    assert redact(f"{key}={value}") == f"{key}={value}"


def test_a_secret_is_hidden_by_its_shape():
    assert redact("http://user:pw@host:5000/x") == "http://***@host:5000/x"
    assert "hf_" not in redact("--token hf_abcdefghijklmnopqrstuvwxyz")


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.check_uri("sqlite:///a b/mlflow.db") == f"sqlite:///{tmp_path}/a b/mlflow.db"
    assert store.check_uri("http://host:5000") == "http://host:5000"
    assert store.check_uri("postgresql+psycopg://h/db") == "postgresql+psycopg://h/db"


@pytest.mark.parametrize(
    "uri",
    ["http://u:p@w/x@h", "postgresql+psycopg://u:pw@h/db", "https://u@h", "postgresql://h/db?password=pw"],
)
def test_an_address_with_a_password_is_refused_without_showing_it(uri):
    with pytest.raises(UserError, match=r"^tracking\.uri: .*MLFLOW_TRACKING_USERNAME and") as refused:
        store.check_uri(uri)
    assert uri not in str(refused.value)
    assert "pw" not in str(refused.value)


def git(folder, *arguments):
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_provenance_names_the_commit_and_no_secret(tmp_path, monkeypatch):
    assert provenance.provenance_tags(tmp_path)["git.commit"] == "unknown"
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "x")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    arguments = ["train", "model.options.token=hunter2 2", "x=a b", "https://me:hunter2@host"]
    monkeypatch.setattr(sys, "argv", ["/bin/kl-comedy", *arguments])
    tags = provenance.provenance_tags(tmp_path)
    assert tags["git.commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert tags["git.dirty"] == "false"
    assert "git.diff" not in tags
    assert tags["slurm.job_id"] == "77"
    assert tags["version.torch"]
    assert float(tags["host.memory_gib"]) > 0
    assert tags["command"] == "kl-comedy train 'model.options.token=***' 'x=a b' 'https://***@host'"
    assert "hunter2" not in "".join(tags.values())
    (tmp_path / "file").write_text("2")
    dirty = provenance.provenance_tags(tmp_path)
    assert dirty["git.dirty"] == "true"
    (tmp_path / "file").write_text("3")
    assert provenance.provenance_tags(tmp_path)["git.diff"] != dirty["git.diff"]


def test_untracked_files_outside_the_package_are_not_another_code(tmp_path):
    (tmp_path / "src" / "kl_comedy").mkdir(parents=True)
    (tmp_path / "src" / "kl_comedy" / "a.py").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "x")
    before = provenance.provenance_tags(tmp_path)
    (tmp_path / "report.html").write_text("x")
    assert provenance.provenance_tags(tmp_path) == before
    assert before["git.dirty"] == "false"
    (tmp_path / "src" / "kl_comedy" / "b.py").write_text("1")
    first = provenance.provenance_tags(tmp_path)["git.diff"]
    (tmp_path / "src" / "kl_comedy" / "b.py").write_text("2")
    assert provenance.provenance_tags(tmp_path)["git.diff"] != first


def test_a_dirty_checkout_leaves_a_diff_that_applies_and_hides_secrets(tmp_path):
    repo = tmp_path / "repo"
    out = tmp_path / "out"
    (repo / "src" / "kl_comedy").mkdir(parents=True)
    git(repo, "init", "-q")
    (repo / "file").write_text("one\n")
    git(repo, "add", "file")
    git(repo, "commit", "-q", "-m", "x")
    (packages,) = provenance.provenance_files(out / "clean", repo)
    assert packages.name == "packages.txt"
    assert "\ntorch==" in packages.read_text()
    (repo / "file").write_text("two\n")
    (repo / "src" / "kl_comedy" / "new.py").write_text("x = 1\n")
    (repo / "private.txt").write_text("not of the package\n")
    _, diff = provenance.provenance_files(out / "dirty", repo)
    assert "private" not in diff.read_text()
    git(repo, "stash", "-q", "-u")
    git(repo, "apply", str(diff))
    assert (repo / "file").read_text() == "two\n"
    assert (repo / "src/kl_comedy/new.py").read_text() == "x = 1\n"
    (repo / "file").write_text("uri: postgresql://me:hunter2@host/db\n")
    assert "hunter2" not in provenance.provenance_files(out / "secret", repo)[1].read_text()


def test_which_processes_are_dead():
    tags = process_tags()
    assert is_dead(tags) is False
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead({**tags, PID: str(child.pid), START: ""}) is True, "a zombie"
    child.wait()
    assert is_dead({**tags, PID: str(child.pid)}) is True
    assert is_dead({**tags, START: str(float(tags[START]) - 100)}) is True, "its process id was used again"
    assert is_dead({**tags, START: ""}) is False
    assert is_dead({**tags, PID: "999999999"}) is True


@pytest.mark.parametrize(
    "tags",
    [
        {**process_tags(), PID: "999999999", HOST: "elsewhere"},
        {**process_tags(), PID: "999999999", NAMESPACE: "pid:[1]"},
        {**process_tags(), PID: "?"},
        {},
    ],
    ids=["another host", "another container", "no number", "not recorded"],
)
def test_whether_a_process_is_dead_is_not_known(tags):
    assert is_dead(tags) is None
