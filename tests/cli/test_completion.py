"""Shell completion, as bash and zsh ask for it: by variables of the environment."""

import contextlib
import io

import pytest

from kl_comedy.cli.main import app


def completed(monkeypatch, **variables):
    """What the shell is told under these variables."""
    out = io.StringIO()
    with monkeypatch.context() as patch, contextlib.redirect_stdout(out):
        for name, value in variables.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            app(prog_name="kl-comedy")
    assert end.value.code == 0
    return out.getvalue().split()


@pytest.fixture
def in_bash(monkeypatch):
    """What bash is told behind the words, of which it has split those with a `=`."""

    def complete(*words):
        words = ["kl-comedy", *words]
        return completed(
            monkeypatch,
            COMP_WORDS="\n".join(words),
            COMP_CWORD=str(len(words) - 1),
            _KL_COMEDY_COMPLETE="complete_bash",
        )

    return complete


def test_names_of_configs_and_files(in_bash, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiet.yaml").write_text("seed: 1\n")
    assert in_bash("train", "qui") == ["quickstart", "quiet.yaml"]
    assert "pocket_beta" in in_bash("sweep", "pock")


def test_a_key_begun(in_bash):
    assert in_bash("train", "quickstart", "optimizer.s") == [
        "optimizer.schedule=",
        "optimizer.schedule=constant",
        "optimizer.schedule=linear",
        "optimizer.schedule=cosine",
    ]
    assert "rollout.group_size=" in in_bash("check", "quickstart", "rollout.")


def test_a_key_without_a_choice_shows_its_default(in_bash):
    assert in_bash("train", "quickstart", "optimizer.clip") == ["optimizer.clip_norm=", "optimizer.clip_norm=1.0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("optimizer.schedule", "="), ["constant", "linear", "cosine"]),
        (("optimizer.schedule", "=", "co"), ["constant", "cosine"]),
        (("seed", "=", "1", "train.precision", "=", "b"), ["bf16"]),
        (("model.share_prompt", "=", ""), ["true", "false"]),
        (("kl.0.placement", "=", "l"), ["loss"]),
        (("resume", "=", "a"), ["auto"]),
        (("optimizer.scedule", "=", ""), []),
    ],
    ids=["choices", "begun", "second override", "boolean", "field of a term", "resume", "unknown key"],
)
def test_the_values_of_a_key(in_bash, words, expected):
    assert in_bash("train", "quickstart", *words) == expected


def test_registered_names(in_bash):
    assert {"k1", "k2", "k3"} <= set(in_bash("train", "quickstart", "kl.0.estimator", "=", "k"))
    assert "exact_answer" in in_bash("train", "quickstart", "rewards.0.name", "=", "exact")
    assert "grpo" in in_bash("train", "quickstart", "kl", "=", "gr")


def test_zsh_keeps_the_key_before_its_value(monkeypatch):
    line = "kl-comedy train quickstart optimizer.schedule=co"
    out = " ".join(completed(monkeypatch, _TYPER_COMPLETE_ARGS=line, _KL_COMEDY_COMPLETE="complete_zsh"))
    assert "optimizer.schedule=constant" in out
    assert "optimizer.schedule=cosine" in out
    assert "linear" not in out
