"""The score of explain on the drawn launch files: each rule of the script's docstring, on labels of our own."""

import hashlib
import json
import subprocess

import pytest
from research.scripts.score_launch_files import (
    DRAWS,
    LABELS,
    MARK_END,
    MARK_START,
    RESULTS,
    SCORE,
    UNANSWERED,
    Answer,
    _term_row,
    counts,
    explain_alone,
    fields_left_open,
    find_sources,
    names_in,
    read_labels,
    row_of,
    tables,
    verdict,
    with_tables,
)
from research.scripts.table_comments import with_unchecked_comments

from kl_comedy.kl import KLTerm

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


NO_KL = label(kl="none", estimators=[], betas=[])
BASE = label(
    kl="loss",
    estimators=[{"name": "k3", "placement": "loss", "from": "base config"}],
    betas=[{"value": 0.01, "placement": "loss", "from": "base config"}],
)
SAMPLER = label(
    anchor="sampler",
    estimators=[{"name": "squared log-ratio", "placement": "loss", "from": "default"}],
    betas=[{"value": 0.001, "placement": "loss", "from": "default"}],
)


def test_a_term_is_right_where_every_field_is():
    assert outcome(label(), answer(term())) == "right"


@pytest.mark.parametrize(
    "changes",
    [{"place": "reward"}, {"estimator": "k1"}, {"beta": 0.02}, {"reference": "sampler"}, {"ratio": "some"}],
)
def test_one_field_that_differs_is_wrong(changes):
    assert outcome(label(), answer(term(**changes))) == "wrong"


def test_a_term_without_strength_and_one_to_a_teacher_are_not_compared():
    assert outcome(NO_KL, answer(term(beta=0.0), term(reference="teacher"))) == "right"
    assert outcome(NO_KL, answer(term())) == "wrong"


def test_the_squared_log_ratio_is_k2_with_twice_the_beta():
    assert outcome(SAMPLER, answer(term(estimator="k2", beta=0.002, reference="sampler"))) == "right"
    assert outcome(SAMPLER, answer(term(estimator="k2", beta=0.001, reference="sampler"))) == "wrong"


def test_a_ratio_is_wanted_where_the_label_has_a_correction():
    assert outcome(label(correction="score term"), answer(term())) == "wrong"
    assert outcome(label(correction="score term"), answer(term(ratio="some"))) == "right"


def test_another_system_is_wrong_and_one_of_two_named_is_right():
    assert outcome(label(), answer(term(), system="trl")) == "wrong"
    assert names_in("own config (unsloth and trl)", SYSTEMS) == {"unsloth", "trl"}
    assert names_in("tinker-cookbook", SYSTEMS) == {"tinker"}
    assert names_in("verl (own copy)", SYSTEMS) == {"verl"}
    assert names_in("llamafactory", SYSTEMS) == set()


def test_a_value_of_a_base_config_is_right_only_with_the_base_value_or_a_remark():
    assert outcome(BASE, answer(term())) == "right"
    assert outcome(BASE, answer()) == "wrong"
    defaults = "no flag of the KL is set in the file: the answer is the defaults of verl"
    assert outcome(BASE, answer(remarks=(defaults,))) == "wrong"
    assert outcome(BASE, answer(remarks=("the config base.yaml is not read",))) == "right in a remark"
    assert outcome(label(), answer(remarks=("the config base.yaml is not read",))) == "wrong"


def test_a_remark_on_another_version_is_right_where_it_names_the_value():
    in_reward = label(
        kl="reward",
        estimators=[{"name": "k1", "placement": "reward", "from": "default"}],
        betas=[{"value": 0.001, "placement": "reward", "from": "file"}],
    )
    remark = "before 0.4.0 the KL is a cost in the reward: k1"
    assert outcome(in_reward, answer(given={"kl_coef": 0.001}, remarks=(remark,))) == "right in a remark"
    assert outcome(in_reward, answer(given={"kl_coef": 0.002}, remarks=(remark,))) == "wrong"
    assert outcome(in_reward, answer(given={"kl_coef": 0.001}, remarks=("the KL is in the reward: k1",))) == "wrong"


def test_what_an_unknown_leaves_open():
    assert fields_left_open(label()) == set()
    assert fields_left_open(label(unknown=["the version of prime-rl"])) == set()
    assert fields_left_open(label(unknown=["the estimator stands in the base config"])) == {"estimator", "ratio"}
    everything = {"placement", "estimator", "beta", "ratio"}
    assert fields_left_open(label(unknown=["all settings stand in config.yaml"])) == everything
    assert fields_left_open(label(unknown=["options on the command line"])) == everything


def test_errors_about_a_run_with_rl():
    sft = Answer(error="run.sh: sft has none of the KL flags of verl that explain knows: it is SFT. --system verl ...")
    nothing = Answer(error="run.sh: no system of trl, verl recognised; name it with --system")
    elsewhere = Answer(error="run.sh: cannot tell from this file: train.py, which it starts, is not read")
    assert outcome(label(), sft) == "wrong"
    assert outcome(label(), nothing) == "refused"
    assert outcome(label(system="own"), nothing) == "right"
    assert outcome(label(), elsewhere) == "refused"
    assert outcome(label(unknown=["all settings stand in train.py"]), elsewhere) == "right"
    assert outcome(label(), Answer(error="KeyError: 1", is_traceback=True)) == "wrong"


def test_other_kinds_are_right_where_they_are_refused_by_name():
    sft = label(kind="sft")
    named = Answer(error="run.sh: sft has none of the KL flags of verl that explain knows: it is SFT. --system verl")
    of_trl = Answer(error="run.sh: sft has none of the KL flags of TRL that explain knows: it is SFT. --system trl")
    nothing = Answer(error="run.sh: no system of trl, verl recognised; name it with --system")
    assert outcome(sft, named) == "right"
    assert outcome(sft, of_trl) == "wrong"
    assert outcome(label(kind="dpo"), named) == "wrong"
    assert outcome(sft, nothing) == "refused"
    assert outcome(label(kind="sft", system="llamafactory"), nothing) == "right"
    assert outcome(sft, answer(term())) == "wrong"
    assert outcome(label(kind="distillation"), answer(term(reference="teacher"))) == "right"
    assert outcome({"kind": "not a training"}, nothing) == "right"
    assert outcome({"kind": "not a training"}, answer()) == "wrong"


def test_an_answer_in_words_has_to_name_estimator_and_beta():
    words = "k3 of each token, times 0.01 and an own weight"
    assert outcome(label(), answer(instead=words)) == "right"
    assert outcome(label(), answer(instead="a form of its own")) == "refused"
    assert outcome(NO_KL, answer(instead=words)) == "wrong"


def test_the_place_of_the_kl_is_that_of_the_label():
    both = label(kl="both")
    assert outcome(both, answer(term(), term(place="reward"))) == "right"
    assert outcome(both, answer(term())) == "wrong"
    in_the_advantage = label(kl="advantage")
    assert outcome(in_the_advantage, answer(term(place="reward"))) == "right"
    assert outcome(in_the_advantage, answer(term())) == "wrong"


def test_a_ratio_counts_in_the_loss_alone():
    in_reward = label(kl="reward")
    assert outcome(in_reward, answer(term(place="reward", ratio="some"))) == "right"
    assert outcome(label(kl="reward", correction="ratio of each token"), answer(term(place="reward"))) == "right"
    assert outcome(label(kl="both"), answer(term(ratio="some"), term(place="reward"))) == "wrong"


def test_betas_are_compared_to_all_their_digits_and_one_kl_may_be_two_terms():
    assert outcome(label(), answer(term(), term(estimator="k3"))) == "right"
    assert outcome(label(), answer(term(), term(beta=0.02))) == "wrong"
    assert outcome(label(), answer(term(beta=0.0101))) == "wrong"
    assert outcome(label(), answer(term(beta=0.01 * (1 + 1e-9)))) == "right"


def test_a_value_of_the_file_may_stand_in_a_remark():
    said = "kl_loss_coef is given more than once (0.01)"
    assert outcome(label(), answer(term(beta=0.02), remarks=(said,))) == "right in a remark"
    assert outcome(label(), answer(term(beta=0.02), remarks=("kl_loss_coef is given more than once",))) == "wrong"


def test_a_remark_on_versions_may_say_that_there_is_no_kl():
    default = answer(term(), remarks=("before 1.0 there is no KL",))
    assert outcome(NO_KL, default) == "right in a remark"
    assert outcome(NO_KL, answer(term(), remarks=("before 1.0 it is k1",))) == "wrong"


def test_a_beta_elsewhere_may_be_no_kl():
    in_the_base = label(unknown=["the beta stands in the base config"])
    assert fields_left_open(in_the_base) == {"beta", "placement"}
    assert outcome(in_the_base, answer(remarks=("the config base.yaml is not read",))) == "wrong", "the estimator"
    unread = answer(term(beta=0.5), remarks=("the config base.yaml is not read",))
    assert outcome(in_the_base, unread) == "right in a remark"


def test_a_fault_of_the_reader_is_wrong_whatever_the_file_is():
    fault = Answer(error="KeyError: 1", is_traceback=True)
    assert outcome({"kind": "not a training"}, fault) == "wrong"
    assert outcome(label(kind="sft"), fault) == "wrong"


def test_ppo_that_is_refused_by_name_is_a_refusal_of_ppo_alone():
    ppo = Answer(error="run.sh: ppo has none of the KL flags of TRL that explain knows: it is PPO. --system trl reads")
    assert outcome(label(algorithm="ppo"), ppo) == "refused"
    assert outcome(label(algorithm="grpo"), ppo) == "wrong"


def test_a_kind_without_a_name_of_its_own_is_told_by_the_note():
    preference = "run.sh: kto has none of the KL flags of verl that explain knows: it is preference. --system verl"
    assert outcome(label(kind="other", note="KTO"), Answer(error=preference)) == "right"
    assert outcome(label(kind="other", note="pretraining"), Answer(error=preference)) == "wrong"


def test_the_row_of_a_file_that_could_be_of_two_systems_says_several():
    stored = row_of(label(), Answer(error="run.sh: could be trl or verl; name it with --system"), SYSTEMS)
    assert (stored["recognised"], stored["labelled"]) == ("several", "verl")
    none = row_of(label(), Answer(error="run.sh: no system recognised; name it with --system"), SYSTEMS)
    assert none["recognised"] == "none"


@pytest.mark.parametrize(
    ("changes", "ratio"),
    [({}, "none"), ({"correction": "token"}, "some"), ({"gradient": "k2"}, "some")],
)
def test_a_term_has_a_ratio_by_its_correction_or_its_gradient(changes, ratio):
    assert _term_row(KLTerm(estimator="k3", placement="loss", beta=0.1, **changes))["ratio"] == ratio


def stored_row(kind, given_outcome, **changes):
    fields = {"repo": "a/b", "path": "run.sh", "labelled": "verl", "recognised": "verl", "is_answered": True}
    return {**fields, "kind": kind, "outcome": given_outcome, "faults": ["beta: 1, not 2"], **changes}


ROWS = [
    stored_row("rl", "right"),
    stored_row("rl", "right"),
    stored_row("rl", "right", recognised="none", is_answered=False),
    stored_row("rl", "wrong", recognised="trl"),
    stored_row("sft", "refused"),
    stored_row("not a training", "wrong", labelled="none"),
]


def test_the_counts_are_those_of_the_rows():
    groups = counts(ROWS)
    assert groups["rl"] == {"right": 3, "wrong": 1, UNANSWERED: 1}
    assert groups["other kinds"] == {"refused": 1}
    assert groups["not a training"] == {"wrong": 1}


def test_the_tables_have_the_shares_and_every_file_that_is_not_right():
    lines = tables({"drawn": ROWS}).splitlines()
    assert "| drawn | rl | 3 (75%) | 1 | 0 (0%) | 0 (0%) | 1 (25%) | 4 |" in lines
    assert "| verl | 3 | none 1, trl 1 |" in lines
    assert "- a/b `run.sh` (rl, verl): beta: 1, not 2" in lines
    assert len([line for line in lines if line.startswith("- a/b")]) == 2
    assert "None." in lines


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


def test_only_what_stands_between_the_marks_is_replaced():
    page = f"before\n{MARK_START}\nold\n{MARK_END}\nafter\n"
    assert with_tables(page, "new") == f"before\n{MARK_START}\nnew\n{MARK_END}\nafter\n"


def test_sources_are_found_by_their_bytes_in_clones_and_beside(tmp_path):
    clone = tmp_path / "clones" / "one"
    clone.mkdir(parents=True)
    (clone / "run.sh").write_text("of the commit\n")
    git = ["git", "-C", str(clone), "-c", "user.name=n", "-c", "user.email=e"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *arguments], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (clone / "run.sh").write_text("of today\n")
    (tmp_path / "saved_under_another_name").write_text("a saved file\n")

    def digest(text):
        return hashlib.sha256(text.encode()).hexdigest()

    in_the_clone = label(commit=commit, sha256=digest("of the commit\n"))
    saved = label(sha256=digest("a saved file\n"))
    assert set(find_sources(tmp_path, [in_the_clone, saved])) == {in_the_clone["sha256"], saved["sha256"]}


def test_the_installed_reader_answers_for_a_file_alone():
    script = b"python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True algorithm.adv_estimator=grpo\n"
    stored = row_of(
        label(betas=[{"value": 0.001, "placement": "loss", "from": "default"}]), explain_alone("r.sh", script), SYSTEMS
    )
    assert stored["outcome"] == "right"
    assert stored["recognised"] == stored["labelled"] == "verl"
