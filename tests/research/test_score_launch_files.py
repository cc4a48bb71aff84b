"""The score of explain on the drawn launch files: what is right and wrong, and the stored score."""

import json

import pytest
from research.scripts.score_launch_files import (
    DRAWS,
    LABELS,
    RESULTS,
    SCORE,
    Answer,
    explain_alone,
    read_labels,
    row_of,
    tables,
    verdict,
    with_tables,
)
from research.scripts.table_comments import with_unchecked_comments

SYSTEMS = {"trl": "TRL", "verl": "verl", "unsloth": "Unsloth", "tinker": "Tinker", "nemo-rl": "NeMo-RL"}


def label(**changes):
    fields = {
        "repo": "user/one",
        "path": "run.sh",
        "commit": "0" * 40,
        "sha256": "0" * 64,
        "kind": "rl",
        "system": "verl (own copy)",
        "algorithm": "grpo",
        "kl": "loss",
        "anchor": "reference",
        "estimators": [{"name": "k3", "placement": "loss", "from": "file"}],
        "betas": [{"value": 0.01, "placement": "loss", "from": "file"}],
        "correction": None,
        "unknown": [],
    }
    return {**fields, **changes}


def term(**changes):
    return {"place": "loss", "estimator": "k3", "beta": 0.01, "reference": "initial", "ratio": "none", **changes}


def answer(*terms, **changes):
    return Answer(**{"system": "verl", "terms": terms, **changes})


def outcome(given_label, given_answer):
    return verdict(given_label, given_answer, SYSTEMS).outcome


def test_a_term_is_right_where_every_field_is():
    assert outcome(label(), answer(term())) == "right"


@pytest.mark.parametrize(
    "changes",
    [{"place": "reward"}, {"estimator": "k1"}, {"beta": 0.02}, {"reference": "sampler"}, {"ratio": "some"}],
)
def test_one_field_that_differs_is_wrong(changes):
    assert outcome(label(), answer(term(**changes))) == "wrong"


def test_the_stored_score_is_of_every_labelled_file_and_the_page_is_its_tables():
    rows = json.loads(SCORE.read_text())
    labels = read_labels()
    assert {path.name for path in LABELS.glob("drawn_launch_files*.jsonl")} == set(DRAWS)
    assert {draw: [row["sha256"] for row in scored] for draw, scored in rows.items()} == {
        draw: [label["sha256"] for label in labels_of_draw] for draw, labels_of_draw in labels.items()
    }
    assert [path.name for path in RESULTS.glob("*.json")] == [SCORE.name], "one score"
    page = (RESULTS / "README.md").read_text()
    assert with_tables(page, with_unchecked_comments(tables(rows))) == page


def test_the_installed_reader_answers_for_a_file_alone():
    script = b"python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True algorithm.adv_estimator=grpo\n"
    stored = row_of(
        label(betas=[{"value": 0.001, "placement": "loss", "from": "default"}]), explain_alone("r.sh", script), SYSTEMS
    )
    assert stored["outcome"] == "right"
    assert stored["recognised"] == stored["labelled"] == "verl"
