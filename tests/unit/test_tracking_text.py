"""Names, secrets, provenance, filters: what text becomes on its way into and out of the store."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.tracking import provenance, store
from kl_comedy.tracking import store as naming
from kl_comedy.tracking.runs import translate
from kl_comedy.tracking.store import redact


@settings(deadline=None)
@given(st.text(max_size=300))
def test_clean_names_are_names_mlflow_takes(name):
    from mlflow.utils.validation import _validate_metric_name

    clean = naming.clean_name(name)
    _validate_metric_name(clean)
    assert naming.clean_name(clean) == clean


@given(st.text(max_size=80))
def test_table_paths_stay_inside(name):
    path = naming.clean_path(name)
    assert path and not path.startswith("/") and ".." not in path.split("/")


@pytest.mark.parametrize("size", [10, 100, 101, 6001])
def test_shorten_keeps_the_limit_and_says_the_length(size):
    text = naming.shorten("x" * size, 100)
    assert len(text) <= 100
    assert (text == "x" * size) == (size <= 100)
    assert size <= 100 or str(size) in text


@pytest.mark.parametrize(
    ("key", "value", "hidden"),
    [
        ("model.options.token", "abc", True),
        ("HF_TOKEN", "abc", True),
        ("rollout.options.api_key", "abc", True),
        ("db.password", "abc", True),
        ("kl.0.level", "token", False),
        ("data.prompt.max_tokens", "512", False),
        ("model.tokenizer", "gpt2", False),
        ("train.microbatch_tokens", "16384", False),
    ],
)
def test_secrets_are_hidden_by_key(key, value, hidden):
    assert redact(value, key) == ("***" if hidden else value)
    assert (value in redact(f"{key}={value}").partition("=")[2]) is not hidden


def test_secrets_are_hidden_by_shape():
    assert redact("http://user:pw@host:5000/x") == "http://***@host:5000/x"
    assert "hf_" not in redact("--token hf_abcdefghijklmnopqrstuvwxyz")


def test_provenance_names_the_commit_and_no_secret(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("MY_PASSWORD", "hunter2")
    monkeypatch.setattr(sys, "argv", ["/bin/kl-comedy", "train", "model.options.token=hunter2", "x=a b"])
    tags = provenance.provenance_tags(tmp_path)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert tags["git.commit"] == head and tags["git.dirty"] == "false" and "git.diff" not in tags
    assert tags["slurm.job_id"] == "77" and tags["version.torch"] and float(tags["host.memory_gib"]) > 0
    assert tags["command"] == "kl-comedy train 'model.options.token=***' 'x=a b'"
    assert "hunter2" not in "".join(tags.values())
    (tmp_path / "file").write_text("2")
    dirty = provenance.provenance_tags(tmp_path)
    assert dirty["git.dirty"] == "true"
    (tmp_path / "file").write_text("3")
    assert provenance.provenance_tags(tmp_path)["git.diff"] != dirty["git.diff"]


def test_a_dirty_checkout_leaves_a_diff_that_applies_and_hides_secrets(tmp_path):
    repo, out = tmp_path / "repo", tmp_path / "out"
    (repo / "src" / "kl_comedy").mkdir(parents=True)
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (repo / "file").write_text("one\n")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "x"], check=True)
    (packages,) = provenance.provenance_files(out / "clean", repo)
    assert packages.name == "packages.txt" and "\ntorch==" in packages.read_text()
    (repo / "file").write_text("two\n")
    (repo / "src" / "kl_comedy" / "new.py").write_text("x = 1\n")
    (repo / "private.txt").write_text("not of the package\n")
    _, diff = provenance.provenance_files(out / "dirty", repo)
    assert "private" not in diff.read_text()
    subprocess.run([*git, "stash", "-q", "-u"], check=True)
    subprocess.run([*git, "apply", str(diff)], check=True)
    assert (repo / "file").read_text() == "two\n" and (repo / "src/kl_comedy/new.py").read_text() == "x = 1\n"
    (repo / "file").write_text("uri: postgresql://me:hunter2@host/db\n")
    assert "hunter2" not in provenance.provenance_files(out / "secret", repo)[1].read_text()


def test_provenance_outside_a_repository_says_unknown(tmp_path):
    assert provenance.provenance_tags(tmp_path)["git.commit"] == "unknown"


@pytest.mark.parametrize(
    ("short", "mlflow"),
    [
        ("seed = 0", "params.`seed` = '0'"),
        ("seed='0' and optimizer.lr = 1e-06", "params.`seed` = '0' AND params.`optimizer.lr` = '1e-06'"),
        ("train/reward > 0.5", "metrics.`train/reward` > 0.5"),
        ("metrics.kl_x >= 1", "metrics.`kl_x` >= 1"),
        ("tags.kl.label LIKE 'k3%'", "tags.`kl.label` LIKE 'k3%'"),
        ('tags.`kl.label` = "it\'s"', 'tags.`kl.label` = "it\'s"'),
        ("status = 'FINISHED'", "attributes.status = 'FINISHED'"),
        ("attributes.run_id IN ('a','b')", "attributes.run_id IN ('a', 'b')"),
        ("", ""),
    ],
)
def test_filters(short, mlflow):
    assert translate(short).text == mlflow


@pytest.mark.parametrize("where", ["seed = 0 OR seed = 1", "seed = 0; drop table", "seed = 'open", "= &"])
def test_filters_that_cannot_be_asked(where):
    with pytest.raises(UserError, match="--where"):
        translate(where)


def test_sqlite_addresses_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store.check_uri("sqlite:///a b/mlflow.db") == f"sqlite:///{tmp_path}/a b/mlflow.db"
    assert store.check_uri("http://host:5000") == "http://host:5000"
    assert store.check_uri("postgresql+psycopg://u:p@h/db") == "postgresql+psycopg://u:p@h/db"


def test_an_address_with_a_password_is_not_repeated():
    with pytest.raises(UserError) as caught:
        store.check_uri("ftp://me:pw@host")
    assert "pw" not in str(caught.value)
