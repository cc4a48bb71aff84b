"""The score of explain on the drawn launch files: each rule of the script's docstring, on labels of our own."""

import hashlib
import subprocess

import pytest
from research.scripts.score_launch_files import (
    Answer,
    explain_alone,
    fields_left_open,
    find_sources,
    names_in,
    row_of,
    verdict,
)

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
