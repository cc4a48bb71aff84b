"""Launch scripts and configs as people write them, each for a kind of fault: the system, the KL and the remarks.

The files of ``cases`` are our own words for public scripts; the right answers come from the source of each system.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kl_comedy.cli.main import app
from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.kl import resolve_terms
from kl_comedy.peers.launch_files import read_launch_file
from kl_comedy.peers.systems import config_of

CASES = Path(__file__).parent / "cases"
OUTSIDE = "in a form that no term of ours has"


@dataclass(frozen=True)
class Case:
    """A file, the system it is of, where its KL is, and a part of each remark that has to be there."""

    file: str
    system: str
    placement: str
    remarks: tuple[str, ...] = ()


READ = [
    Case("nemo_rl_launch.sh", "nemo-rl", "loss (k2, ratio token, beta 0.02)"),
    Case(
        "nemo_rl_recipe.yaml",
        "nemo-rl",
        "loss (k3, gradient of k2, ratio none, beta 0.01)",
        ("defaults: grpo_math_1B.yaml is not read",),
    ),
    Case("nemo_rl_recipe_loss.yaml", "nemo-rl", "none", ("defaults: ../grpo_base.yaml is not read",)),
    Case("nemo_rl_opd.yaml", "nemo-rl", "teacher, in the reward (k1, ratio none, beta 1)"),
    Case("areal_ref.yaml", "areal", "reward (k1, ratio token, beta 0.001)"),
    Case(
        "swift_opd.sh",
        "ms-swift",
        "teacher, in the reward (k1, ratio token, beta 0.5) and loss (k3, ratio none, beta 0.01)",
    ),
    Case("unsloth_grpo.py", "unsloth", "loss (k3, ratio none, beta 0.001)", ("beta is 0.001 by default",)),
    Case("unsloth_grpo_beta.py", "unsloth", "loss (k3, ratio none, beta 0.04)"),
    Case(
        "axolotl_rl_beta.yaml", "axolotl", "loss (k3, ratio none, beta 0.04)", ("false by default in the pinned TRL",)
    ),
    Case("trl_kwargs_dict.py", "trl", "loss (k3, ratio token, beta 0.04)", ("since TRL 1.10.0",)),
    Case(
        "trl_argparse.py", "trl", "loss (k3, ratio token, beta 0.02)", ("the default of beta, an option of the file",)
    ),
    Case("trl_constants.py", "trl", "loss (k3, ratio token, beta 0.03)"),
    Case("trl_attribute.py", "trl", "loss (k3, ratio token, beta 0.04)"),
    Case("trl_notebook.ipynb", "trl", "loss (k3, ratio token, beta 0.04)"),
    Case("trl_flags_in_variable.sh", "trl", "loss (k3, ratio token, beta 0.04)"),
    Case("trl_rloo.yaml", "trl", "none", ("nothing in the file names it; grpo is assumed",)),
    Case("trl_ppo.py", "trl", "reward (k3, ratio token, beta 0.05)", ("init_kl_coef = 0.2 by default",)),
    Case("trl_rloo_old.py", "trl", "reward (k1, ratio sequence, beta 0.03)"),
    Case("openrlhf_k3_switch.sh", "openrlhf", "loss (k3, ratio none, beta 0.002)"),
    Case("trl_ppo_old.py", "trl", "reward (k1, ratio token, beta 0.15)"),
    Case("verl_flags_in_variable.sh", "verl", "reward (k1, ratio token, beta 0.01)"),
    Case("verl_kl_args_branch.sh", "verl", "loss (k2, ratio none, beta 0.005)", ("set in a branch", "else")),
    Case("verl_branches.sh", "verl", "loss (k3, ratio none, beta 0.001)", ("use_kl_in_reward=True: set in a branch",)),
    Case("slime_conditional.sh", "slime", "none", ("kl_loss_coef=0.01: set in a branch",)),
    Case("verl_loop.sh", "verl", "loss (k3, ratio none, beta 0.001)", ("one of 0.001, 0.01, 0.1",)),
    Case("verl_last_wins.sh", "verl", "none", ("given more than once",)),
    Case("verl_bypass_kl_in_reward.sh", "verl", "reward (k1, ratio sequence, beta 0.01)"),
    Case("verl_k3plus.sh", "verl", "loss (k3, gradient of k2, ratio none, beta 0.001)"),
    Case("verl_kl_cov.sh", "verl", "none"),
    Case("verl_prime_recipe.sh", "verl", "none"),
    Case("verl_flowrl_recipe.sh", "verl", OUTSIDE),
    Case(
        "verl_gvpo_recipe.sh",
        "verl",
        "loss (k3, ratio none, beta 0.01)",
    ),
    Case(
        "verl_own_recipe.sh",
        "verl",
        "loss (k3, ratio none, beta 0.002)",
        ("recipe.mine.main_mine has a trainer of its own, which was not read",),
    ),
    Case("verl_experimental.sh", "verl", "reward (k1, ratio token, beta 0.003)"),
    Case(
        "verl_variable.sh",
        "verl",
        "loss (k3, ratio none, beta 0.001)",
        ("use_kl_loss: '${use_kl_loss}' is no literal: the file never sets this variable",),
    ),
    Case(
        "verl_variable_alone.sh",
        "verl",
        "none",
        ("use_kl_in_reward: '$USE_KL' is no literal: the file never sets this variable",),
    ),
    Case("verl_both_coefficients.sh", "verl", "loss (k3, ratio none, beta 0.002)"),
    Case("verl_kl_cov_old.sh", "verl", "none"),
    Case(
        "miles_adaptive.sh",
        "slime",
        "loss (k3, ratio none, beta 0.01)",
        ("kl_ctrl=adaptive is not a flag of slime", "kl_target=0.1 is not a flag of slime"),
    ),
    Case("trl_module_of_a_command.py", "trl", "loss (k3, ratio token, beta 0.04)"),
    Case("verl_before_0.4.sh", "verl", "reward (k1, ratio token, beta 0.001)", ("new in verl 0.4.0",)),
    Case("skyrl_custom_estimator.sh", "skyrl", "loss (k2, ratio none, beta 0.001)", ("registered elsewhere",)),
    Case("open_instruct_estimator.sh", "open-instruct", "loss (k1, ratio token, beta 0.001)"),
    Case("openrlhf_heredoc.sh", "openrlhf", "reward (k1, ratio token, beta 0.02)"),
    Case("open_instruct_ppo.sh", "open-instruct", "reward (k1, ratio token, beta 0.03)"),
    Case("open_instruct_ppo2.sh", "open-instruct", "loss (k1, ratio none, beta 0.03)"),
    Case("tinker_teacher.py", "tinker", "teacher, in the reward (k1, ratio token, beta 1)"),
    Case("miles_launcher.py", "miles", "loss (k3, ratio none, beta 0.01)"),
    Case("tinker_launch.sh", "tinker", OUTSIDE),
    Case("miles_launch.sh", "miles", "loss (k3, ratio none, beta 0.001)"),
    Case("rlinf_fsdp.yaml", "rlinf", OUTSIDE),
    Case("rllm_verl.sh", "rllm", "loss (k3, ratio none, beta 0.001)"),
    Case("tunix_grpo.sh", "tunix", "loss (k1, ratio none, beta 0.08)", ("new in Tunix 0.1.7",)),
    Case("molt_launch.sh", "molt", "none"),
    Case("torchtitan_rl.sh", "torchtitan-rl", "none"),
    Case(
        "verl_own_regularizer.yaml",
        "verl",
        "none",
        ("my_loss.reg_coef=0.02 is not a flag of verl", "my_loss.regularizer=kl is not a flag of verl"),
    ),
    Case(
        "prime_rl_trainer.toml",
        "prime-rl",
        "none",
        ("monitor.wandb.project is an option up to 0.1", "up to 0.4.0, it is 0 by default"),
    ),
    Case("areal_0.2.yaml", "areal", "reward (k1, ratio token, beta 0.02)"),
    Case("pipelinerl_conf.yaml", "pipelinerl", "none", ("defaults: words) may set it and is not read",)),
    Case("miles_spec.sh", "miles", "loss (k2, ratio none, beta 0.02)"),
    Case(
        "tunix_experimental.sh",
        "tunix",
        "loss (k1, ratio none, beta 0.04)",
        ("tunix.experimental.examples.words.main, which the file starts, is not read",),
    ),
    Case("rlinf_embodied.yaml", "rlinf", "none"),
    Case("prime_rl.toml", "prime-rl", "sampler, in the loss (k2, ratio none, beta 0.002)", ("since prime-rl 0.5.0",)),
    Case(
        "swift_unknown_kind_with_rewards.sh",
        "ms-swift",
        "loss (k3, ratio none, beta 0.02)",
        ("rlhf_type: '$RLHF_TYPE' is no literal: the file never sets this variable, which says which kind",),
    ),
    Case("openrlhf_message.py", "openrlhf", "reward (k1, ratio token, beta 0.01)"),
    Case("easyr1_launch.sh", "easyr1", "loss (k3, ratio none, beta 0.02)", ("examples/config.yaml is not read",)),
]

REFUSED = {
    "rllm_server.sh": "it is a server, a tool or an evaluation",
    "rllm_evaluation.py": "it is a server, a tool or an evaluation",
    "rllm_sft.sh": "it is supervised fine-tuning",
    "areal_sft.yaml": "it is supervised fine-tuning",
    "nemo_rl_sft.yaml": "it is supervised fine-tuning",
    "swift_sft.sh": "it is supervised training",
    "swift_dpo.sh": "it is preference training",
    "swift_gkd.sh": "it is distillation",
    "open_instruct_sft.sh": "it is supervised fine-tuning",
    "open_instruct_dpo.sh": "it is preference training",
    "openrlhf_sft.sh": "it is supervised fine-tuning",
    "axolotl_dpo.yaml": "it is preference training",
    "axolotl_ebft.yaml": "it is energy-based fine-tuning",
    "trl_gold.py": "it is distillation",
    "trl_own_distillation.py": "it is distillation with a loss of the file's own",
    "unsloth_sft.py": "it is supervised fine-tuning",
    "swift_which.sh": "it is supervised training",
    "molt_sft_arguments.sh": "it is supervised fine-tuning",
    "open_instruct_job.yaml": "it is supervised fine-tuning",
    "open_instruct_dpo.yaml": "it is preference training",
    "open_instruct_sft.yaml": "it is supervised fine-tuning",
    "open_instruct_olmo_sft.sh": "it is supervised fine-tuning",
    "oat_sft.sh": "it is supervised fine-tuning",
    "skyrl_sft.sh": "it is supervised fine-tuning",
    "prime_rl_sft.toml": "it is supervised fine-tuning",
    "trl_sft.yaml": "it is supervised fine-tuning",
    "trl_dpo.yaml": "it is preference training",
    "trl_online_dpo.py": "it is preference training",
    "roll_sft.yaml": "it is supervised fine-tuning",
    "roll_dpo.py": "it is preference training",
    "openrlhf_reward_server.sh": "it is a tool",
    "axolotl_merge.sh": "it is a tool",
    "skyrl_generate.sh": "it is a generation or an evaluation",
    "verl_generation_server.sh": "it is a data or model tool",
    "verl_generation.sh": "it is a data or model tool",
}


NOT_RECOGNISED = {
    "own_kl_config.yaml": "cannot tell from this file, as what update.kl_coef=0.03 does stands in the code",
    "own_config_without_kl.yaml": "no key of a KL is in the file",
    "own_runner.sh": "cannot tell from this file, as it starts my_runner.py, which is not read",
    "own_function.sh": "cannot tell from this file, as it starts own_package.cli, which is not read",
    "own_import.py": "cannot tell from this file, as it takes its training from own_campaign",
    "wrapper_named_like_nemo_rl.sh": "cannot tell from this file, as it starts ./examples/run_ppo.sh",
}

CONFIG_NOT_READ = {
    "verl_wrapper.sh": "run_small.sh, which it starts",
    "trl_kwargs_unknown.py": "GRPOConfig(**options)",
    "open_r1_launch.sh": "the config recipes/small/grpo/config_demo.yaml",
    "verl_config_name.sh": "the config my_ppo",
    # Forks change the values of the config that EasyR1 brings, and keep its name.
    "easyr1_own_config.sh": "the config examples/config.yaml",
}

STARTS_NOTHING = {
    "trl_trainer_module.py": "it defines classes and functions and starts nothing",
    "verl_worker_module.py": "it defines classes and functions and starts nothing",
    "verl_idle_trainer.py": "it makes RayPPOTrainer and never starts it",
    "openrlhf_unknown_command.sh": r"openrlhf\.cli\.\$X, which it starts, is named by a variable",
}
"""Files whose run is another program, or one that a variable of the caller names."""

OWN_LOSSES = {
    "slime_custom_loss.sh": "loss_type=custom_loss: the loss is a function of the author's own",
    "miles_custom_loss.sh": "loss_type=custom_loss: the loss is a function of the author's own",
    "skyrl_own_loss.sh": "use_words_loss=true is no flag of SkyRL: it puts a loss of the author's own",
}
"""A loss of the author's own decides what the KL is, and the file does not have it."""

SETTINGS_ELSEWHERE = ("rllm_hydra.py", "areal_command_line.py", "roll_compose.py", "slime_entry.py")
"""Programs of a known system that take every setting from a config of their caller."""


def explained(file, *options):
    result = CliRunner().invoke(app, ["explain", str(CASES / file), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("case", READ, ids=lambda case: case.file)
def test_a_file_is_read_with_what_it_leaves_open(case):
    from kl_comedy.cli.explain import placement_of

    launch = read_launch_file(CASES / case.file)
    assert launch.system.name == case.system
    assert placement_of(launch.reading()) == case.placement
    for part in case.remarks:
        assert any(part in remark for remark in launch.remarks), launch.remarks


@pytest.mark.parametrize("file", REFUSED)
def test_a_run_of_another_kind_is_refused_and_named(file):
    with pytest.raises(UserError, match=REFUSED[file]) as error:
        read_launch_file(CASES / file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", NOT_RECOGNISED)
def test_a_file_of_no_known_system_is_said_to_leave_its_kl_to_others(file):
    with pytest.raises(UserError, match=NOT_RECOGNISED[file]) as error:
        read_launch_file(CASES / file)
    assert "no system recognised" in str(error.value)


@pytest.mark.parametrize("file", SETTINGS_ELSEWHERE)
def test_a_program_that_takes_a_config_of_its_caller_is_answered_with_what_is_assumed_of_it(file):
    launch = read_launch_file(CASES / file)
    assert launch.given == {}
    assert launch.assumed == launch.remarks[0]
    assert launch.assumed.startswith(
        "the KL does not stand in this file: the config or command line of the program's caller may set it"
    )


@pytest.mark.parametrize("file", CONFIG_NOT_READ)
def test_without_a_flag_and_without_the_config_that_may_hold_them_the_answer_says_what_it_assumes(file):
    launch = read_launch_file(CASES / file)
    assert not [flag for flag in launch.system.flags if flag.is_of_kl and flag.name in launch.given]
    assert launch.assumed.startswith("the KL does not stand in this file: ")
    assert f"{CONFIG_NOT_READ[file]} may set it and is not read" in launch.assumed.replace(", may", " may")
    lines = explained(file).splitlines()
    assert lines[0].startswith("The KL does not stand in this file: "), "above what follows from it"
    told = " ".join(lines[: lines.index("")])
    assert f"The answer is what {launch.system.title} does where none of " in told
    assert " is set there." in told
    # What to set is not known where what is set is not.
    assert not [line for line in lines if line.startswith(("To change", "Stale samples"))]


@pytest.mark.parametrize("file", STARTS_NOTHING)
def test_a_file_that_starts_nothing_has_no_answer_unless_the_system_is_named(file):
    with pytest.raises(UserError, match=STARTS_NOTHING[file]) as error:
        read_launch_file(CASES / file)
    system = str(error.value).partition("--system ")[2].partition(" ")[0]
    assert read_launch_file(CASES / file, system=system).given == {}


@pytest.mark.parametrize("file", OWN_LOSSES)
def test_where_a_loss_of_the_author_decides_the_answer_is_the_reason(file):
    with pytest.raises(UserError, match=OWN_LOSSES[file]):
        read_launch_file(CASES / file).reading()


def test_a_part_of_the_systems_loss_that_is_switched_on_is_no_loss_of_the_author(tmp_path):
    script = tmp_path / "run.sh"
    text = (CASES / "skyrl_own_loss.sh").read_text()
    for part in ("use_entropy_loss=true", "use_words_loss=false"):
        script.write_text(text.replace("use_words_loss=true", part))
        assert read_launch_file(script).given["use_kl_loss"] is False


def test_a_key_that_says_which_kind_of_run_it_is_cannot_be_a_variable(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text('swift rlhf --rlhf_type "$RLHF_TYPE" --model small-base --beta 0.1\n')
    with pytest.raises(UserError, match=r"rlhf_type is '\$RLHF_TYPE', a variable that the file never sets"):
        read_launch_file(script)
    assert read_launch_file(script, system="ms-swift").given == {"beta": 0.1}


def test_a_negative_coefficient_is_refused_with_what_it_would_do(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("torchrun src/open_r1/grpo.py --output_dir out --beta -0.01 --max_completion_length 512\n")
    with pytest.raises(UserError, match=r"beta: got '-0\.01'.*pays for leaving the reference"):
        read_launch_file(script)


@pytest.mark.parametrize(
    ("key", "is_of_a_divergence"),
    [
        ("jsd_alpha", True),
        ("opsd_weight", True),
        ("words_beta", True),
        ("distill_coef", True),
        ("reg_loss_scale", True),
        ("ema_beta", False),
        ("adamw_beta", False),
        ("distill_folder", False),
        ("words_scale", False),
    ],
)
def test_keys_of_other_divergences_are_named_as_not_read(key, is_of_a_divergence, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True algorithm.{key}=0.5\n"
    )
    remarks = read_launch_file(script).remarks
    assert any(f"algorithm.{key}=0.5 is not a flag of verl" in remark for remark in remarks) is is_of_a_divergence


@pytest.mark.parametrize(
    ("last_line", "is_started"),
    [
        ("    trainer.fit()", True),
        ("    submit(trainer)", True),
        ("    submit(trainer.fit)", True),
        ("    trainer.validate()", False),
    ],
)
def test_a_trainer_that_is_passed_on_may_be_started_out_of_sight(last_line, is_started, tmp_path):
    program = tmp_path / "run.py"
    text = (CASES / "verl_idle_trainer.py").read_text()
    program.write_text(text.replace("    trainer.world_size = 8", last_line))
    if is_started:
        assert read_launch_file(program).system.name == "verl"
    else:
        with pytest.raises(UserError, match="never starts it"):
            read_launch_file(program)


def test_recipes_that_train_by_preferences_or_from_a_teacher_are_refused(tmp_path):
    for recipe, reason in (("spin", "by preferences"), ("gkd", "distillation from a teacher")):
        script = tmp_path / f"{recipe}.sh"
        script.write_text(f"python3 -m recipe.{recipe}.main_{recipe} actor_rollout_ref.actor.use_kl_loss=True\n")
        with pytest.raises(UserError, match=reason):
            read_launch_file(script).reading()


def test_what_a_recipe_does_instead_is_said():
    assert "never applies the KL" in explained("verl_prime_recipe.sh")
    assert "FlowRL squares log Z" in explained("verl_flowrl_recipe.sh")
    assert "a pull to the old policy" in " ".join(explained("verl_gvpo_recipe.sh").split())


def test_the_coefficient_of_a_kl_that_is_off_is_said_to_do_nothing():
    (no_op,) = read_launch_file(CASES / "verl_both_coefficients.sh").reading().no_ops
    assert no_op.startswith("algorithm.kl_ctrl.kl_coef=0.005: it acts with algorithm.use_kl_in_reward=true only")


def test_a_switch_before_a_variable_of_more_arguments_still_stands_alone(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 train.py --advantage-estimator grpo --eps-clip 0.2 --use-kl-loss $MORE --sglang-a 1\n")
    assert read_launch_file(script, system="slime").given["use_kl_loss"] is True


def test_the_old_keys_of_kl_cov_are_its_flags():
    assert "kl_cov adds 0.7 |log policy/old|" in explained("verl_kl_cov_old.sh")


def test_flags_of_another_part_of_the_objective_do_not_say_where_the_kl_is(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo --config-name=mine algorithm.adv_estimator=grpo\n")
    assert "the config mine may set it and is not read" in read_launch_file(script).assumed


def test_a_config_of_the_system_itself_has_its_defaults(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml'\n"
    )
    assert read_launch_file(script).given == {}


def test_a_value_that_only_a_fork_has_is_a_remark_where_it_does_not_say_what_the_kl_is(tmp_path):
    script = tmp_path / "run.sh"
    command = "torchrun src/open_r1/grpo.py --use_vllm true --num_generations 8 --beta 0.02 --loss_type {}\n"
    script.write_text(command.format("own_grpo"))
    launch = read_launch_file(script, system="trl")
    assert launch.given["beta"] == 0.02
    (remark,) = [remark for remark in launch.remarks if "own_grpo" in remark]
    assert remark.startswith("loss_type: got 'own_grpo'; did you mean 'grpo'?")
    assert remark.endswith("code that is not in this file may read it; dapo is taken")
    # Of a KL it decides what it is.
    script.write_text("python -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_type=own\n")
    with pytest.raises(UserError, match="kl_loss_type: got 'own'"):
        read_launch_file(script)


def test_a_module_that_sets_other_flags_only_starts_nothing_either(tmp_path):
    module = tmp_path / "own_trainer.py"
    text = (
        "from verl import DataProto\n\nclass Trainer:\n    def fit(self, batch):\n"
        "        advantage(norm_adv_by_std_in_grpo=True{})\n"
    )
    module.write_text(text.format(""))
    with pytest.raises(UserError, match="it defines classes and functions and starts nothing"):
        read_launch_file(module)
    # A command that a function of a module would start, and a script that its help names, start nothing here.
    module.write_text(text.format("") + '        subprocess.run(["python", "train.py"])\n')
    with pytest.raises(UserError, match="it defines classes and functions and starts nothing"):
        read_launch_file(module)
    module.write_text(text.format(", use_kl_loss=True"))
    assert read_launch_file(module).given["use_kl_loss"] is True


def test_a_loop_of_the_files_own_is_no_training_of_another_kind(tmp_path):
    program = tmp_path / "train_reinforce.py"
    text = (
        "from unsloth import FastLanguageModel\nmodel, _ = FastLanguageModel.from_pretrained('m')\nmodel.generate()\n"
    )
    program.write_text(text)
    with pytest.raises(UserError, match="it is training without RL or inference"):
        read_launch_file(program)
    program.write_text(text + "loss = policy_loss(model)\nloss.backward()\n")
    with pytest.raises(UserError, match="it computes its loss and calls backward itself"):
        read_launch_file(program)


def test_lists_of_a_sweep_of_the_authors_own_are_taken_by_their_first_values(tmp_path):
    config = tmp_path / "sweep.yaml"
    text = "init_kl_coef: 0.01\nsweep:\n- init_kl_coef: {}\n  advantage_estimator: ['gae']\n"
    for values, coefficient in (("[0.02, 0.001, 0.1]", 0.02), ("[0.03]", 0.03), ("0.04", 0.04)):
        config.write_text(text.format(values))
        launch = read_launch_file(config, system="openrlhf")
        assert launch.given["init_coef"] == coefficient
        swept = [remark for remark in launch.remarks if "which of them runs is not in this file" in remark]
        assert len(swept) == ("," in values)


BASES = {
    "verl": "hydra: {searchpath: [file://verl/trainer/config]}\ndefaults: [ppo_trainer, _self_]\n",
    "nemo-rl": "defaults: own_base.yaml\ngrpo:\n  reward_shaping: {enabled: true, max_response_length: 7680}\n",
}


@pytest.mark.parametrize("system", BASES)
def test_a_config_over_a_base_that_is_not_read_is_recognised_and_says_so(tmp_path, system):
    config = tmp_path / "own.yaml"
    config.write_text(BASES[system])
    launch = read_launch_file(config)
    assert launch.system.name == system
    assert any(re.search("defaults: .*is not read", remark) for remark in launch.remarks)
    # A base of the system itself has its defaults.
    assert launch.assumed.startswith("the KL does not stand in this file: its base (defaults: ") == (system != "verl")


def test_every_file_of_the_cases_has_an_answer_here():
    answered = {case.file for case in READ} | {*REFUSED, *NOT_RECOGNISED, *SETTINGS_ELSEWHERE, *CONFIG_NOT_READ}
    answered |= {*STARTS_NOTHING, *OWN_LOSSES}
    assert {path.name for path in CASES.iterdir()} == answered


def test_flags_that_set_the_kl_make_a_started_script_no_remark(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("source helpers.sh\npython -m verl.trainer.main_ppo actor_rollout_ref.actor.use_kl_loss=True\n")
    assert not any("helpers.sh" in remark for remark in read_launch_file(script).remarks)


def test_what_another_actor_does_not_read_does_nothing():
    assert "kl_beta: the embodied actor does not read it" in explained("rlinf_embodied.yaml")


def test_a_score_term_is_said_to_be_new():
    launch = read_launch_file(CASES / "nemo_rl_recipe.yaml")
    assert any("up to 0.6.0, the KL in the loss has no score term" in remark for remark in launch.remarks)


def test_a_pull_to_the_sampler_and_a_ratio_of_the_completion_are_notes():
    assert "kl_cov adds 1 |log policy/old|" in explained("verl_kl_cov.sh")
    assert "nothing is clipped" in explained("verl_bypass_kl_in_reward.sh", "--full")


def test_the_terms_are_in_json_field_by_field():
    rows = json.loads(explained("verl_k3plus.sh", "--format", "json"))["kl"]
    assert rows == [
        {
            "placement": "loss",
            "estimator": "k3",
            "gradient": "k2",
            "ratio": "none",
            "beta": 0.001,
            "reference": "initial",
        }
    ]


def test_a_base_config_beside_the_file_is_read(tmp_path):
    (tmp_path / "grpo_base.yaml").write_text("loss_fn: {reference_policy_kl_penalty: 0.3}\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("defaults: grpo_base.yaml\ngrpo: {num_prompts_per_step: 8}\n")
    launch = read_launch_file(recipe)
    assert launch.given == {"reference_policy_kl_penalty": 0.3}
    assert not any("is not read" in remark for remark in launch.remarks)


def test_a_config_that_a_command_names_is_read_where_it_lies_beside_the_script(tmp_path):
    (tmp_path / "run.yaml").write_text("beta: 0.3\nuse_bias_correction_kl: false\n")
    script = tmp_path / "run.sh"
    script.write_text("trl grpo --config run.yaml\n")
    assert read_launch_file(script).given == {"beta": 0.3, "use_bias_correction_kl": False}


def test_a_config_that_hydra_names_is_read_where_it_lies_in_the_folder_of_configs(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "own.yaml").write_text(
        "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.3}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text("python -m verl.trainer.main_ppo --config-name=own\n")
    launch = read_launch_file(script)
    assert launch.given == {"use_kl_loss": True, "kl_loss_coef": 0.3}
    assert launch.remarks == ()


def test_a_command_in_a_condition_is_read(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("if python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True; then echo done; fi\n")
    assert read_launch_file(script).given == {"use_kl_in_reward": True}


def test_a_trainer_that_is_given_is_not_said_to_be_assumed():
    launch = read_launch_file(CASES / "trl_rloo.yaml", overrides=["trainer=rloo"])
    assert launch.given == {"trainer": "rloo"}
    assert launch.remarks == ()


# --- --as-config --------------------------------------------------------------------------------------------------
WITH_A_CONFIG = [case.file for case in READ if case.placement != OUTSIDE and "teacher" not in case.placement]


@pytest.mark.parametrize("file", WITH_A_CONFIG)
def test_the_config_of_a_file_is_a_config_of_ours_with_the_same_terms(file, tmp_path):
    reading = read_launch_file(CASES / file).reading()
    path = tmp_path / "same_kl.yaml"
    path.write_text(f"{explained(file, '--as-config')}\nmodel: {{source: pocket}}\n")
    config = load_config(path)
    assert resolve_terms(config.kl) == reading.terms


def test_a_config_has_the_ratio_that_the_policy_loss_gives_a_cost():
    reading = read_launch_file(CASES / "verl_bypass_kl_in_reward.sh").reading()
    assert config_of(reading)["algorithm"] == {"policy_loss": "reinforce", "correction": {"sequence": {}}}


def test_without_an_equivalent_term_there_is_no_config():
    result = CliRunner().invoke(app, ["explain", str(CASES / "rlinf_fsdp.yaml"), "--as-config"])
    assert isinstance(result.exception, UserError)
    assert "no config of ours trains this KL" in str(result.exception)


def test_a_recipe_has_no_launch_file_to_make_a_config_of():
    result = CliRunner().invoke(app, ["explain", "grpo", "--as-config"])
    assert "--as-config needs a launch script or config" in str(result.exception)
