"""The learned reward: scores of a small classifier by a slow reading of its weights, folders that are none, a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kl_comedy.config.schema import RewardConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models.pocket import VOCABULARY, build_tokenizer
from kl_comedy.records import Problem
from kl_comedy.registry import REWARDS
from kl_comedy.rewards import RewardSum, score
from training_runs import TINY, go, metrics_of

TEXTS = ["7", "3+4=7", "12+34=46;46+5=51", ";", "0" * 200, "3-"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier over the characters of the pocket policy, with weights that tell texts apart."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        num_labels=1,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.5,
    )
    folder = tmp_path_factory.mktemp("classifier")
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def slow_scores(folder: Path, texts: list[str]) -> list[float]:
    """One text at a time, without padding, through the body and the head apart."""
    from transformers import LlamaForSequenceClassification

    classifier = LlamaForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    values = []
    with torch.no_grad():
        for text in texts:
            # The last 128 characters, which are the tokens.
            ids = torch.tensor([[VOCABULARY.index(character) for character in text[-128:]]])
            hidden_1LD = classifier.model(ids).last_hidden_state
            values.append(float(classifier.score.weight[0] @ hidden_1LD[0, -1]))
    return values


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_a_score_is_that_of_the_text_alone_in_float32(folder: Path, batch_size: int) -> None:
    # In 16 bits, as inside a trainer of 16 bits, scores would differ in the third digit.
    with torch.autocast("cpu", torch.bfloat16):
        rewards = score(
            "model", completions=TEXTS, answers=["7"] * len(TEXTS), folder=str(folder), batch_size=batch_size
        )
    expected = slow_scores(folder, TEXTS)
    assert [reward.value for reward in rewards] == pytest.approx(expected, abs=1e-5)
    assert {reward.status for reward in rewards} == {"ok"}
    assert max(expected) - min(expected) > 0.1, "the texts have different scores"


def test_the_problem_stands_before_the_completion_and_neither_is_a_template(folder: Path) -> None:
    problem = Problem(id="a", text="3+4=", answer="7")
    for template, texts in (
        ("{problem}{completion}", ["3+4=7", "3+4={problem}"]),
        ("{completion}", ["7", "{problem}"]),
        ("{completion};{problem}", ["7;3+4=", "{problem};3+4="]),
    ):
        options = {"folder": str(folder), "template": template}
        rewards = RewardSum([RewardConfig(name="model", options=options)])
        readable, unreadable = rewards.rewards(["7", "{problem}"], [problem, problem])
        assert readable.value == pytest.approx(slow_scores(folder, texts[:1])[0], abs=1e-5)
        # The tokenizer has no such letters: that costs the text and not the run.
        assert (unreadable.value, unreadable.status) == (0.0, "refused")
        assert unreadable.parts["model/verifier_failed"] == 1.0


def test_a_text_without_tokens_has_no_score(folder: Path) -> None:
    rewards = score("model", completions=["", "7"], answers=["7", "7"], folder=str(folder))
    assert [reward.status for reward in rewards] == ["unparseable", "ok"]


def rewritten(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """The folder with other values in its config.json; None leaves a key out."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    return tmp_path


MISTAKES = {
    "another class": ({"architectures": ["LlamaForCausalLM"]}, "its model is LlamaForCausalLM"),
    "no class": ({"architectures": None}, "its model is of no known class"),
    "three labels": ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "it has 3 labels"),
    "labels of a config that names none": ({"id2label": None, "label2id": None}, "it has 2 labels"),
    "a list": ({"architectures": 7}, "its config.json cannot be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_folder_that_is_no_reward_ends_a_command_with_one_line(
    mistake: str, folder: Path, tmp_path: Path, kl_comedy: Any
) -> None:
    changes, reason = MISTAKES[mistake]
    bad = rewritten(folder, tmp_path, **changes)
    code, out, err = kl_comedy("check", TINY, f"rewards=[{{name: model, options: {{folder: '{bad}'}}}}]")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "rewards.0.options.folder" in line
    assert reason in line


@pytest.mark.parametrize("given", ["", "nowhere"])
def test_a_missing_folder_ends_a_command_with_one_line(given: str, kl_comedy: Any) -> None:
    code, out, err = kl_comedy("check", TINY, f"gold={{name: model, options: {{folder: '{given}'}}}}")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "gold.options.folder" in line
    assert "no config.json" in line


@pytest.mark.parametrize(
    ("file", "reason"), [("model.safetensors", "cannot be loaded"), ("tokenizer.json", "cannot be loaded")]
)
def test_damaged_files_are_a_users_mistake(folder: Path, tmp_path: Path, file: str, reason: str) -> None:
    bad = rewritten(folder, tmp_path)
    (bad / file).write_bytes(b"{")
    with pytest.raises(UserError, match=reason) as caught:
        score("model", completions=["7"], answers=["7"], folder=str(bad))
    assert "\n" not in str(caught.value)


def test_a_head_that_was_never_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    bad = rewritten(folder, tmp_path)
    weights = load_file(bad / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, bad / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the weights score\.weight"):
        score("model", completions=["7"], answers=["7"], folder=str(bad))


def test_a_batched_reward_is_contained_item_by_item() -> None:
    """A value that is no number costs its item; a function that raises ends the run."""

    def batched(completions: Any, problems: Any) -> list[float]:
        """Numbers in the completions."""
        assert len(completions) == len(problems)
        return [float(text) for text in completions]

    REWARDS.register("batched", source="the tests", batched=True, boxed=False)(batched)
    try:
        good, bad = score("batched", completions=["2", "nan"], answers=["1", "1"])
        assert (good.value, good.status) == (2.0, "ok")
        assert (bad.value, bad.status) == (0.0, "refused")
        with pytest.raises(ValueError, match="seven"):
            score("batched", completions=["2", "seven"], answers=["1", "1"])
        with pytest.raises(RunFailed, match="on every item of a batch, and on a gold answer"):
            score("batched", completions=["nan"], answers=["inf"])
    finally:
        del REWARDS._entries["batched"]


def test_a_run_trains_on_the_score_and_measures_gold(folder: Path, tmp_path: Path) -> None:
    reward = f"rewards=[{{name: model, options: {{folder: '{folder}'}}}}]"
    done = go(tmp_path, reward, "gold={name: exact_answer}", "train.steps=2", "train.eval_every=0")
    logged = metrics_of(done.run)
    assert logged[1, "train/reward"] == logged[1, "train/reward/model"]
    assert 0.0 <= logged[1, "train/gold"] <= 1.0
    assert done.summary["proxies"].keys() == done.summary["evaluations"].keys()
