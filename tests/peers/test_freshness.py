"""Which row is a reader's: updates per batch and the age of samples, by hand from each system's own formulas."""

import pytest

from kl_comedy.errors import UserError
from kl_comedy.peers.freshness import freshness_of
from kl_comedy.peers.launch_files import read_launch_file, read_launch_text
from kl_comedy.peers.systems import SYSTEMS, read


@pytest.mark.parametrize(
    ("text", "updates", "lag", "regime"),
    [
        ("trl:beta=0.04", 1, 0, "on_policy"),
        ("trl:beta=0.04,num_iterations=4", 4, 0, "off_policy"),
        ("trl:steps_per_generation=8,gradient_accumulation_steps=4", 2, 0, "off_policy"),
        ("trl:trainer=ppo", 4, 0, "off_policy"),
        ("trl:trainer=async_grpo", 1, 4, "off_policy"),
        ("trl:generation_batch_size=512", None, 0, None),
        ("verl:use_kl_loss=true", 4, 0, "off_policy"),
        ("verl:train_batch_size=256", 1, 0, "on_policy"),
        ("verl:train_batch_size=512,ppo_epochs=3", 6, 0, "off_policy"),
        ("verl:train_batch_size=256,one_step_off=true", 1, 1, "off_policy"),
        ("openrlhf:rollout_batch_size=128,n_samples_per_prompt=8,train_batch_size=1024", 1, 0, "on_policy"),
        ("openrlhf:train_batch_size=1024,async_enable=true", 1, 1, "off_policy"),
        ("nemo-rl:", 1, 0, "on_policy"),
        ("nemo-rl:num_prompts_per_step=64", 2, 0, "off_policy"),
        ("nemo-rl:async_grpo=true,in_flight_weight_updates=true", 1, 1, "mixed"),
        ("prime-rl:max_off_policy_steps=2", 1, 2, "mixed"),
        ("slime:num_steps_per_rollout=2", 2, 0, "off_policy"),
        ("slime:rollout_batch_size=32,n_samples_per_prompt=8,global_batch_size=256", 1, 0, "on_policy"),
        ("slime:", None, 0, None),
        ("areal:max_head_offpolicyness=2", 4, 2, "mixed"),
        ("roll:async_generation_ratio=1", None, 1, "off_policy"),
        ("pipelinerl:", 1, None, "mixed"),
    ],
)
def test_the_row_of_flags(text, updates, lag, regime):
    answer = freshness_of(read(text))
    assert (answer.updates, answer.lag, answer.regime) == (updates, lag, regime)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("trl:num_iterations=4", "4 updates per batch (num_iterations 4): the off-policy row holds."),
        (
            "trl:",
            "Not set here; the default of TRL 1.16.0 is 1 update per batch (num_iterations 1): the on-policy row "
            "holds.",
        ),
        (
            "trl:generation_batch_size=512",
            "The number of updates per batch depends on the number of GPUs (generation_batch_size 512 / "
            "(per_device_train_batch_size 8 by default x the number of GPUs)): the on-policy row holds where it is 1, "
            "else the off-policy row.",
        ),
    ],
)
def test_the_sentence_says_from_what(text, sentence):
    assert freshness_of(read(text)).sentence == sentence


def test_a_file_a_pasted_text_and_flags_have_one_answer(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=true \\\n data.train_batch_size=512\n"
    )
    of_file = freshness_of(read_launch_file(script).reading())
    assert of_file == freshness_of(read_launch_text(script.read_text()).reading())
    assert of_file == freshness_of(read("verl:use_kl_loss=true,train_batch_size=512"))
    assert of_file.updates == 2


OLD_RLOO = 'from trl import RLOOConfig\nRLOOConfig(output_dir="o", rloo_k=4)'
RLOO = "trl rloo --model_name_or_path m"
OPENRLHF = "python -m openrlhf.cli.train_ppo_ray --init_kl_coef 0.01"


@pytest.mark.parametrize(
    ("text", "updates", "release"),
    [
        (OLD_RLOO, 4, "TRL before 0.22.0"),
        (f"pip install trl==0.21.0\n{RLOO}", 4, "TRL before 0.22.0"),
        (f"pip install 'trl<0.22'\n{RLOO}", 4, "TRL before 0.22.0"),
        (f"pip install trl==0.22.0\n{RLOO}", 1, "TRL 1.16.0"),
        (RLOO, 1, "TRL 1.16.0"),
        ("pip install trl==0.17.0\ntrl grpo --beta 0.04", 1, "TRL 1.16.0"),
        (f"pip install openrlhf==0.3.5\n{OPENRLHF}", 4, "OpenRLHF before 0.3.6"),
        (f"pip install openrlhf==0.3.6\n{OPENRLHF}", 8, "OpenRLHF 0.11.2"),
        (OPENRLHF, 8, "OpenRLHF 0.11.2"),
    ],
)
def test_the_default_is_that_of_the_release_of_the_file(text, updates, release):
    """By the defaults in the systems' git tags: num_ppo_epochs 4 x num_mini_batches 1, and 512 / 128 samples."""
    answer = freshness_of(read_launch_text(text).reading())
    assert answer.updates == updates
    assert answer.regime == ("on_policy" if updates == 1 else "off_policy")
    assert f"the default of {release} is" in answer.sentence


def test_what_a_file_gives_is_taken_whatever_its_release():
    reading = read_launch_text(f"pip install trl==0.21.0\n{RLOO} --num_ppo_epochs 1").reading()
    assert (freshness_of(reading).updates, "default" in freshness_of(reading).sentence) == (1, False)
    reading = read_launch_text(f"pip install openrlhf==0.3.5\n{OPENRLHF} --rollout_batch_size 128").reading()
    assert freshness_of(reading).updates == 1


def test_the_sentence_says_why_a_release_was_taken_or_what_another_one_does():
    assert (
        "such a release: rloo_k is an option up to 0.24." in freshness_of(read_launch_text(OLD_RLOO).reading()).sentence
    )
    open_sentence = freshness_of(read("trl:trainer=rloo")).sentence
    assert open_sentence.endswith("RLOO of TRL before 0.22.0 makes 4 updates per batch by default (num_ppo_epochs).")
    told = freshness_of(read_launch_text(f"pip install trl==1.0.0\n{RLOO}").reading()).sentence
    assert "before" not in told


def test_a_variable_is_named():
    reading = read_launch_text("python -m verl.trainer.main_ppo data.train_batch_size=$SIZE").reading()
    answer = freshness_of(reading)
    assert answer.regime is None
    assert "train_batch_size $SIZE" in answer.sentence


def test_a_pasted_call_is_read():
    launch = read_launch_text('GRPOConfig(beta=0.04, loss_type="dr_grpo", num_iterations=4)')
    assert launch.given == {"beta": 0.04, "loss_type": "dr_grpo"}
    assert launch.sampling.given == {"num_iterations": 4.0}


def test_a_known_option_is_no_unknown_key_and_a_misspelled_flag_is():
    assert read("trl:beta=0.04,num_generations=8").sampling.unused == ("num_generations",)
    with pytest.raises(UserError, match="no such key"):
        read("skyrl:trainer.algorithm.kl_estimatr_type=k2")


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=lambda system: system.name)
def test_every_system_says_where_its_facts_are_from_and_names_its_own_options(system):
    rules = system.freshness
    names = {option.name for option in rules.options}
    assert rules.source
    assert rules.updates
    assert names.isdisjoint({flag.name for flag in system.flags})
    for case in (*rules.updates, *rules.lag):
        used = {*case.get("times", ()), *case.get("over", ()), *case.get("given", ())}
        if isinstance(case.get("versions"), str):
            used.add(case["versions"])
        assert used <= names
