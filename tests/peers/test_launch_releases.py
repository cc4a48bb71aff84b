"""The release that a launch file is for, and the values of flags that follow from it."""

import pytest

from kl_comedy.peers.launch_files import read_launch_file
from kl_comedy.peers.launch_releases import release_of
from kl_comedy.peers.systems import find_system

TRL = find_system("trl")


def bounds_of(keys=(), words=()):
    """The numbers of the first and the last release of TRL that fit; None for an open end."""
    release = release_of(TRL, keys, words)
    return tuple(evidence.numbers if evidence else None for evidence in (release.first, release.last))


@pytest.mark.parametrize(
    ("word", "bounds"),
    [
        ("trl==0.18.2", ((0, 18, 2), (0, 18, 2))),
        ("trl[vllm]>=0.14,<0.16", ((0, 14, 0), (0, 15, 9999))),
        ("trl~=0.19.1", ((0, 19, 1), (0, 19, 9999))),
        ("trl<=0.24", (None, (0, 24, 9999))),
        ("trl<1.0", (None, (0, 9999, 9999))),
        ("trlx==0.7", (None, None)),
        ("nltk==3.9", (None, None)),
        ("trl", (None, None)),
    ],
)
def test_a_pinned_version_bounds_the_release(word, bounds):
    assert bounds_of(words=["install", word]) == bounds


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        (["vllm_device"], (None, (0, 17, 9999))),
        (["max_prompt_length", "vllm_device"], (None, (0, 17, 9999))),
        (["vllm_mode", "importance_sampling_level"], ((0, 20, 0), None)),
        (["vllm_mode", "max_prompt_length"], ((0, 18, 0), (0, 28, 9999))),
        (["vllm_device", "importance_sampling_level"], (None, None)),
        (["beta"], (None, None)),
    ],
    ids=["dropped", "the first that drops one", "added", "both", "a contradiction", "neither"],
)
def test_options_that_releases_drop_or_add_bound_the_release(keys, bounds):
    assert bounds_of(keys=keys) == bounds


def test_a_pin_counts_and_not_the_options():
    assert bounds_of(keys=["max_prompt_length"], words=["trl==1.16.0"]) == ((1, 16, 0), (1, 16, 0))


def explained(folder, name, text):
    path = folder / name
    path.write_text(text)
    return read_launch_file(path)


GRPO = "from trl import GRPOConfig\nargs = GRPOConfig(num_generations=8{})\n"


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (", beta=0.04, max_prompt_length=512", {"beta": 0.04, "use_bias_correction_kl": False}),
        (", vllm_device='cuda:1'", {"beta": 0.04, "use_bias_correction_kl": False}),
        (", max_prompt_length=512", {"beta": 0.04, "use_bias_correction_kl": False}),
        (", max_prompt_length=512, vllm_mode='colocate'", {}),
        ("", {}),
        (", beta=0.04, entropy_target=1", {"beta": 0.04}),
        (", beta=0.0, max_prompt_length=512", {"beta": 0.0}),
        (
            ", beta=0.04, max_prompt_length=512, use_bias_correction_kl=True",
            {"beta": 0.04, "use_bias_correction_kl": True},
        ),
    ],
    ids=["before 1.10", "before 0.19", "old", "old, but not before 0.18", "open", "since 1.8", "no KL", "given"],
)
def test_a_file_for_an_earlier_release_has_the_defaults_of_that(tmp_path, options, given):
    assert explained(tmp_path, "a.py", GRPO.format(options)).given == given


def test_a_class_that_releases_drop_tells_them_too(tmp_path):
    text = (
        "from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer\n"
        "model = AutoModelForCausalLMWithValueHead.from_pretrained('small')\n"
        "PPOTrainer(PPOConfig(batch_size=8), model)\n"
    )
    assert explained(tmp_path, "a.py", text).given == {"trainer": "ppo", "kl_coef": 0.2}


def test_a_remark_says_by_what_the_release_is_told(tmp_path):
    launch = explained(tmp_path, "a.py", GRPO.format(", beta=0.04, max_prompt_length=512"))
    assert launch.remarks[-1].startswith(
        "max_prompt_length is an option up to 0.28, so the file is for a release before 1.10.0"
    )


def test_the_first_release_whose_default_is_not_taken_is_named(tmp_path):
    one = explained(tmp_path, "a.py", GRPO.format(", beta=0.04, max_prompt_length=512"))
    assert one.defaults_before == "1.10.0"
    several = explained(tmp_path, "b.sh", "pip install trl==0.17.0\ntrl grpo --model small\n")
    assert several.defaults_before == "0.19.0"
    assert explained(tmp_path, "c.py", GRPO.format(", beta=0.04")).defaults_before == ""


def test_an_option_of_the_authors_own_class_tells_no_release(tmp_path):
    text = "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    max_prompt_length: int = 512\n"
    assert explained(tmp_path, "a.py", text + GRPO.format(", beta=0.04")).given == {"beta": 0.04}


def test_nothing_is_said_of_a_default_that_the_release_has(tmp_path):
    assert (
        explained(tmp_path, "a.py", GRPO.format(", beta=0.04, vllm_mode='colocate'")).remarks[-1].startswith("use_bias")
    )
    launch = explained(tmp_path, "a.py", GRPO.format(", importance_sampling_level='token'"))
    assert not any("0.19.0" in remark for remark in launch.remarks)


PINNED = {
    "notebook.ipynb": '{"cells": [{"cell_type": "code", "source": "!pip install -q trl==0.17.0"}, '
    '{"cell_type": "code", "source": "from trl import GRPOConfig\\nGRPOConfig(num_generations=8)"}]}',
    "uv.py": "# /// script\n# dependencies = ['trl==0.17.0']\n# ///\n" + GRPO.format(""),
    "cluster.py": "image = Image().pip_install('vllm', 'trl==0.17.0')\n" + GRPO.format(""),
    "run.sh": "pip install 'trl[vllm]==0.17.0' peft\ntrl grpo --num_generations 8\n",
    "job.yaml": "setup: |\n  pip install trl==0.17.0\nrun: |\n  trl grpo --num_generations 8\n",
}


@pytest.mark.parametrize("name", PINNED)
def test_a_pin_is_read_wherever_a_file_installs_the_package(tmp_path, name):
    given = explained(tmp_path, name, PINNED[name]).given
    assert given["beta"] == 0.04
    assert given["use_bias_correction_kl"] is False


VERL = "python -m verl.trainer.main_ppo algorithm.kl_ctrl.kl_coef=0.002 {}\n"


@pytest.mark.parametrize(
    ("overrides", "in_reward"),
    [
        ("", True),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=False", True),
        ("algorithm.use_kl_in_reward=False", False),
        ("actor_rollout_ref.actor.use_kl_loss=True", None),
        ("actor_rollout_ref.rollout.mode=async", None),
        ("trainer.val_before_train=False", None),
        ("+trainer.val_before_train=False", True),
    ],
)
def test_a_verl_file_with_a_coefficient_and_no_switch_is_for_a_release_without_one(tmp_path, overrides, in_reward):
    assert explained(tmp_path, "a.sh", VERL.format(overrides)).given.get("use_kl_in_reward") is in_reward


def test_a_pinned_verl_has_no_kl_without_its_switch(tmp_path):
    text = "pip install verl==0.5.0\n" + VERL.format("")
    assert "use_kl_in_reward" not in explained(tmp_path, "a.sh", text).given
