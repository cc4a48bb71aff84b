"""``kl-comedy export --push-to-hub``: what it refuses, and what it sends to the hub."""

from pathlib import Path

import huggingface_hub
import pytest

from commands import run_here
from kl_comedy.training import export
from training_runs import SHORT, go


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run; for reading."""
    return go(tmp_path_factory.mktemp("runs"), *SHORT).run.path


class Hub:
    """A stand-in for huggingface_hub's client: it records what it is asked."""

    def __init__(self):
        self.calls = []
        self.error = None

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private, exist_ok))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/somebody/{name.rpartition('/')[2]}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        if self.error is not None:
            raise self.error
        names = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append(("upload", repo_id, names))


@pytest.fixture
def hub(monkeypatch):
    """A hub that answers, with a token."""
    stand_in = Hub()
    monkeypatch.setattr(export, "hub_answers", lambda: True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: stand_in)
    return stand_in


def test_the_exported_folder_is_uploaded_as_a_private_model(run, hub, tmp_path):
    code, out, err = run_here("export", run, tmp_path / "policy", "--push-to-hub", "my-policy")
    assert code == 0, err
    assert out.splitlines()[-1] == "https://huggingface.co/somebody/my-policy"
    created, uploaded = hub.calls
    assert created == ("create", "my-policy", True, True)
    assert uploaded[1] == "somebody/my-policy"
    assert {"README.md", "config.json", "model.safetensors"} <= set(uploaded[2])


def test_a_public_model_is_asked_for(run, hub, tmp_path):
    code, _, err = run_here("export", run, tmp_path / "policy", "--push-to-hub", "me/my-policy", "--public")
    assert code == 0, err
    assert hub.calls[0] == ("create", "me/my-policy", False, True)


def test_what_the_hub_refuses_leaves_the_folder(run, hub, tmp_path):
    hub.error = OSError("403 Forbidden: no rights\nand more")
    code, _, err = run_here("export", run, tmp_path / "policy", "--push-to-hub", "my-policy")
    assert code == 1
    assert err.strip() == (
        f"failed: {tmp_path}/policy is written, but could not be uploaded as my-policy: 403 Forbidden: no rights"
    )
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_offline_it_is_refused_in_one_line_before_the_export(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "hub_answers", lambda: False)
    code, _, err = run_here("export", run, tmp_path / "policy", "--push-to-hub", "my-policy")
    assert code == 2
    assert err.startswith("error: --push-to-hub: https://huggingface.co does not answer, or HF_HUB_OFFLINE is set")
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "policy").exists()


def test_without_a_token_it_is_refused(run, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    code, _, err = run_here("export", run, tmp_path / "policy", "--push-to-hub", "my-policy")
    assert code == 2
    assert "there is no token for https://huggingface.co: run `hf auth login`, or set HF_TOKEN" in err
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--push-to-hub", "a/b/c"), "--push-to-hub: got 'a/b/c'; allowed: NAME or OWNER/NAME"),
        (("--public",), "--public: nothing is uploaded; name the model with --push-to-hub NAME"),
    ],
)
def test_a_wrong_name_and_an_option_without_effect(run, hub, tmp_path, words, message):
    code, _, err = run_here("export", run, tmp_path / "policy", *words)
    assert code == 2
    assert message in err
    assert hub.calls == []
