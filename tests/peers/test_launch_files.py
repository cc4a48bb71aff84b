"""Launch scripts and configs of other systems: what is read of them, what is refused; our own text in their syntax."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from commands import cpu_limit
from kl_comedy.cli.main import app
from kl_comedy.errors import UserError
from kl_comedy.io import MAX_FILE_BYTES
from kl_comedy.peers.launch_files import parse, read_launch_file
from kl_comedy.peers.systems import SYSTEMS, flag_key

VERL = r"""
#!/bin/bash
set -x
kl_coef=0.002            # a variable, no flag
EXTRA="$@"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    # algorithm.use_kl_in_reward=False \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    +algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=${kl_coef} \
    trainer.logger='["console"]' $EXTRA
"""
OPENRLHF = """
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --init_kl_coef 1e-3 --use_kl_loss --kl_estimator k3 \\
   --advantage_estimator group_norm --pretrain ${MODEL:-a/b}
"""
SLIME = """
GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-coef 0.01
   #--use-kl-loss
   --kl-loss-type low_var_kl
)
CKPT_ARGS=(--hf-checkpoint /m --ref-load /r)
ray job submit -- python3 train.py ${CKPT_ARGS[@]} ${GRPO_ARGS[@]}
"""
TRL = """
from trl import GRPOConfig, GRPOTrainer
BETA = 0.04
'''--beta 9 in a docstring is no setting'''
args = GRPOConfig(output_dir="x", beta=BETA, use_bias_correction_kl=False, loss_type="dr_grpo", learning_rate=lr())
other = DPOConfig(beta=7.0)
"""
TRL_YAML = (
    "model_name_or_path: a/b\nnum_generations: 8\nmax_completion_length: 256\nbeta: 0.001\nreward_funcs: [accuracy]\n"
)
PRIME = "[orchestrator]\nbatch_size = 8\n[trainer.loss]\nkl_tau = 0.01\n[inference]\n"
PRIME_SOURCES = """
[orchestrator.algo]
type = "grpo"
[[orchestrator.train.source]]
name = "a"
[[orchestrator.train.source]]
name = "b"
[orchestrator.train.source.algo]
type = "opd"
"""
DPPO = """
LOSS_MODE=${LOSS_MODE:-dppo_tv}
ACTOR=(
    actor_rollout_ref.actor.policy_loss.loss_mode=${LOSS_MODE}
    actor_rollout_ref.actor.clip_ratio=0.1
    actor_rollout_ref.actor.clip_ratio_c=10000.0
)
python3 -m verl.trainer.main_ppo "${ACTOR[@]}"
"""
NEMO = "loss_fn:\n  reference_policy_kl_penalty: 0.02\n  reference_policy_kl_type: k2\n  ratio_clip_min: 0.2\n"


@dataclass(frozen=True)
class Example:
    """A file and what is read from it."""

    file: str
    text: str
    system: str
    given: dict[str, Any]
    """The KL flags by our names for them; every other flag of the file is passed over."""
    remarks: tuple[str, ...] = ()
    """How the remarks begin."""


EXAMPLES = [
    Example(
        file="run.sh",
        text=VERL,
        system="verl",
        given={
            "adv_estimator": "grpo",
            "use_kl_loss": True,
            "kl_loss_type": "low_var_kl",
            "use_kl_in_reward": True,
            "kl_coef": 0.002,
        },
    ),
    Example(
        file="openrlhf.sh",
        text=OPENRLHF,
        system="openrlhf",
        given={"init_coef": 0.001, "use_loss": True, "kl_estimator": "k3", "advantage_estimator": "group_norm"},
    ),
    Example(
        file="slime.sh",
        text=SLIME,
        system="slime",
        given={"advantage_estimator": "grpo", "kl_coef": 0.01, "kl_loss_type": "low_var_kl"},
    ),
    Example(
        file="train.py",
        text=TRL,
        system="trl",
        given={"beta": 0.04, "use_bias_correction_kl": False, "loss_type": "dr_grpo"},
    ),
    Example(
        file="trl.yaml",
        text=TRL_YAML,
        system="trl",
        given={"beta": 0.001},
        remarks=("trainer: nothing in the file names it", "use_bias_correction_kl is true by default since TRL 1.10.0"),
    ),
    Example(file="rl.toml", text=PRIME, system="prime-rl", given={"kl_tau": 0.01}),
    Example(
        file="dppo.sh",
        text=DPPO,
        system="verl",
        given={"loss_mode": "dppo_tv", "clip_ratio": 0.1, "clip_ratio_c": 10000.0},
    ),
    Example(
        file="nemo.yaml",
        text=NEMO,
        system="nemo-rl",
        given={"reference_policy_kl_penalty": 0.02, "reference_policy_kl_type": "k2"},
        remarks=("the weight whose gradient is the score is new in NeMo-RL 0.7.0",),
    ),
]


def write(folder, name, content):
    """A file of the text or the bytes; its path."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
def test_the_flags_of_a_file_are_read(tmp_path, example):
    launch = read_launch_file(write(tmp_path, example.file, example.text))
    assert launch.system.name == example.system
    assert launch.given == example.given
    assert len(launch.remarks) == len(example.remarks)
    for remark, beginning in zip(launch.remarks, example.remarks, strict=True):
        assert remark.startswith(beginning)


# --- what explain says of a file ----------------------------------------------------------------------------------
def explained(*arguments):
    """The answer of ``kl-comedy explain`` as JSON."""
    result = CliRunner().invoke(app, ["explain", *map(str, arguments), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def explained_lines(path):
    """The whole answer of ``kl-comedy explain``, line by line."""
    return CliRunner().invoke(app, ["explain", str(path), "--full"]).stdout.splitlines()


def test_a_kl_in_reward_and_loss_is_counted_twice(tmp_path):
    answer = explained(write(tmp_path, "run.sh", VERL))
    assert answer["placement"] == "reward (k1, ratio token, beta 0.002) and loss (k3, ratio none, beta 0.001)"
    assert answer["version"] == "0.9.1"
    assert any(trap.startswith("counted twice: the KL enters twice") for trap in answer["traps"])


def test_a_coefficient_that_no_code_reads_is_a_trap(tmp_path):
    answer = explained(write(tmp_path, "slime.sh", SLIME))
    assert answer["placement"] == "none"
    assert answer["traps"][0].startswith("does nothing: kl_coef with advantage_estimator")


def test_k1_in_the_loss_is_a_trap(tmp_path):
    answer = explained(write(tmp_path, "openrlhf.sh", OPENRLHF.replace("k3", "k1")))
    assert answer["traps"][0].startswith("wrong gradient on-policy: zero expected gradient")


def test_a_kl_to_the_sampler_is_named(tmp_path):
    answer = explained(write(tmp_path, "rl.toml", PRIME))
    assert answer["placement"] == "sampler, in the loss (k2, ratio none, beta 0.02)"


def test_explain_prints_the_system_the_placement_and_our_terms(tmp_path):
    lines = explained_lines(write(tmp_path, "t.py", TRL))
    assert any(line.endswith("t.py: TRL, read with the flags and defaults of version 1.16.0") for line in lines)
    assert "KL is on: loss (k3, ratio none, beta 0.04)" in lines
    assert any("wrong gradient on-policy: optimizes the forward KL" in line for line in lines)
    older = explained_lines(write(tmp_path, "u.py", TRL.replace("use_bias_correction_kl=False", "max_prompt_length=9")))
    release = "u.py: TRL, read with the flags of version 1.16.0 and defaults before 1.10.0"
    assert any(line.endswith(release) for line in older)
    assert "kl:" in lines
    assert any("docs/decision.md" in line for line in lines)


def test_explain_names_the_policy_correction_and_a_bound_that_does_nothing(tmp_path):
    answer = explained(write(tmp_path, "dppo.sh", DPPO))
    assert answer["corrections"] == {"tis": {"cap": 10000.0}, "dppo_tv": {"threshold": 0.2}}
    assert answer["traps"] == ["does nothing: clip_ratio=0.1: clip_ratio_low=0.2, clip_ratio_high=0.2 replace it"]


def test_explain_prints_the_policy_correction_as_a_config_has_it(tmp_path):
    lines = explained_lines(write(tmp_path, "dppo.sh", DPPO))
    assert "The policy loss has: {tis: {cap: 10000}, dppo_tv: {threshold: 0.2}}" in lines
    assert lines.count("  correction: {tis: {cap: 10000}, dppo_tv: {threshold: 0.2}}") == 1


def test_a_bound_that_nothing_replaces_is_no_trap(tmp_path):
    path = write(tmp_path, "dppo.sh", DPPO)
    assert not explained(path, "clip_ratio_low=none", "clip_ratio_high=none")["traps"]


def test_a_teacher_is_no_second_kl_to_the_reference(tmp_path):
    distillation = "--use-opd --opd-kl-coef 0.5 --kl-loss-coef 0.01"
    script = SLIME.replace("--kl-coef 0.01", distillation).replace("#--use", "--use")
    answer = explained(write(tmp_path, "slime.sh", script))
    teacher = "teacher, in the reward (k1, ratio token, beta 0.5)"
    assert answer["placement"] == f"{teacher} and loss (k3, ratio none, beta 0.01)"
    for trap in answer["traps"]:
        assert "counted twice" not in trap


# --- values that depend on more than one line ---------------------------------------------------------------------
def test_a_source_of_a_list_may_have_its_own_algorithm(tmp_path):
    launch = read_launch_file(write(tmp_path, "rl.toml", PRIME_SOURCES))
    assert launch.given == {"algo": "opd"}
    assert "orchestrator.train.source.algo.type: given more" in launch.remarks[0]


@pytest.mark.parametrize(
    ("file", "text", "given"),
    [
        ("a.py", "from trl import RLOOConfig\nRLOOConfig(beta=0.1)\n", {"trainer": "rloo", "beta": 0.1}),
        (
            "b.py",
            "from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\nAsyncGRPOConfig(epsilon=0.1)\n",
            {"trainer": "async_grpo"},
        ),
        ("a.sh", "trl rloo --beta 0.1 --num_generations 4\n", {"trainer": "rloo", "beta": 0.1}),
    ],
    ids=["a config class", "an experimental class", "a command"],
)
def test_the_class_or_command_chooses_the_trainer_of_trl(tmp_path, file, text, given):
    assert read_launch_file(write(tmp_path, file, text)).given == given


def test_what_is_no_literal_is_reported_and_can_be_given(tmp_path):
    path = write(tmp_path, "run.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef=$1\n")
    launch = read_launch_file(path)
    assert launch.given == {}
    assert "kl_loss_coef: '$1' is not a literal; its default is taken" in launch.remarks[0]

    completed = read_launch_file(path, overrides=["kl_loss_coef=0.5"])
    assert completed.given == {"kl_loss_coef": 0.5}
    assert completed.remarks == ()


def test_what_is_no_literal_of_python_is_reported(tmp_path):
    code = "from trl import GRPOConfig\nGRPOConfig(beta=compute(x), **more)\n"
    assert "is not a literal" in read_launch_file(write(tmp_path, "a.py", code)).remarks[0]


def test_of_a_flag_that_is_given_twice_the_last_counts_and_it_is_reported(tmp_path):
    text = "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True algorithm.use_kl_in_reward=False\n"
    launch = read_launch_file(write(tmp_path, "run.sh", text))
    assert launch.given == {"use_kl_in_reward": False}
    assert "given more than once" in launch.remarks[0]


# --- what is refused ----------------------------------------------------------------------------------------------
def aliases_of_aliases():
    """Each key stands for three of the one before it, so that eleven lines stand for 3^11 values."""
    lines = ["a: &a {x: 1, y: 1, z: 1}\n"]
    for previous, name in itertools.pairwise("abcdefghijk"):
        lines.append(f"{name}: &{name} {{x: *{previous}, y: *{previous}, z: *{previous}}}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        pytest.param(
            "run.sh",
            "python train.py --lr 1\n",
            "no system recognised: cannot tell from this file, .*; name it with --system, one of trl, verl, ",
            id="no system",
        ),
        pytest.param(
            "run.sh",
            "python -m verl.trainer.main_ppo\npython -m openrlhf.cli.train_ppo_ray\n",
            "verl|openrlhf",
            id="two systems",
        ),
        pytest.param(
            "run.sh",
            "python -m verl.x actor_rollout_ref.actor.kl_loss_type=k9\n",
            "kl_loss_type: got 'k9'; did you mean 'kl'",
            id="an unknown choice",
        ),
        pytest.param(
            "a.py",
            "from trl import DPOConfig, DPOTrainer\nDPOConfig(beta=0.1)\n",
            "DPOConfig has none of the KL flags of TRL that explain knows: it is preference training",
            id="a trainer without a KL",
        ),
        pytest.param(
            "run.sh",
            "python -m openrlhf.cli.train_sft --lr 1\n",
            "train_sft has none of the KL flags of OpenRLHF",
            id="a command without a KL",
        ),
        pytest.param("a.py", "def broken(:\n", "cannot be read: invalid syntax", id="broken Python"),
        pytest.param("a.py", "(" * 5000, "cannot be read", id="Python nested too deeply"),
        pytest.param("a.py", "-" * 100_000 + "1", "cannot be read", id="Python with too many signs"),
        pytest.param("a.toml", "a = ", "cannot be read", id="broken TOML"),
        pytest.param("a.yaml", "a: [b\n", "cannot be read", id="broken YAML"),
        pytest.param("a.yaml", "[" * 3000, "nested more than", id="YAML nested too deeply"),
        pytest.param("a.yaml", "a: !!python/object/apply:os.system [ls]\n", "cannot be read", id="YAML that runs code"),
        pytest.param("a.yaml", b"\xff\xfe\x00", "cannot be read", id="bytes that are no text"),
        pytest.param("a.sh", "#" * (MAX_FILE_BYTES + 1), "larger than 1,000,000 bytes", id="a file too large"),
        pytest.param("a.yaml", aliases_of_aliases(), "more than 10,000 keys and values", id="aliases of aliases"),
    ],
)
def test_hostile_and_unknown_files_are_refused_in_one_line(tmp_path, file, content, message):
    with pytest.raises(UserError, match=message) as error:
        read_launch_file(write(tmp_path, file, content))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(tmp_path)), "the message begins with the file"


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("deepspeed openrlhf/cli/train_sft_dev.py --zero_stage 3", "supervised"),
        ("python -m verl.our_own.long-context-sft data.train_files=a", "supervised"),
        ("torchrun roll/our_dpo_v2.py --lr 1", "preference"),
        ("python slime/tools/train_reward_model.py --lr 1", "reward model"),
    ],
)
def test_a_script_by_the_name_of_another_run_is_no_run_with_the_defaults_of_a_system(tmp_path, command, run):
    """Authors copy and rename the scripts of a system, whose exact names are therefore not enough."""
    with pytest.raises(UserError, match=f"by its name it is .*{run}"):
        read_launch_file(write(tmp_path, "run.sh", f"{command}\n"))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("python openrlhf/cli/train_sft_dev.py --kl_estimator k3", id="with a flag of the KL"),
        pytest.param("python openrlhf/sft_dev.py\npython openrlhf/our_grpo.py", id="before a script of RL"),
        pytest.param("python openrlhf/sft_then_rl.py", id="RL in the name too"),
    ],
)
def test_a_script_that_may_train_with_a_kl_is_read(tmp_path, command):
    assert read_launch_file(write(tmp_path, "run.sh", f"{command}\n")).system.name == "openrlhf"


@pytest.mark.parametrize("option", ["grpo_config.kl_weight", "kl_penalty_coef", "critic_type", "ppo_config.beta"])
def test_one_option_that_anybody_may_have_tells_no_system(tmp_path, option):
    with pytest.raises(UserError, match="no system recognised"):
        read_launch_file(write(tmp_path, "run.sh", f"python training.py --{option} 0.1\n"))


def merges_of_merges():
    """Each key merges the one before it nine times, so that ten keys stand for 9^9 values."""
    lines = ["a0: &a0 {x: 1}\n"]
    for level in range(1, 10):
        aliases = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level}\n  <<: [{aliases}]\n")
    return "".join(lines)


START = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef="
DOUBLED_VARIABLE = "a=xx\n" + "a=$a$a\n" * 40 + START + "$a\n"
COPIED_VARIABLE = "a=" + "x" * 9000 + "\n" + "".join(f"b{n}=$a\n" for n in range(90_000))
MANY_ARGUMENTS = "f(" + ",".join(f"a{n}=1" for n in range(30_000)) + ")"
LONG_COMMAND = "a command of more than 20,000 characters"
MANY_KEYS = "more than 10,000 keys"
LONG_NUMBER = "a number of more than 100 characters"
LARGE_INTEGER = "a number of more than 4,300 digits"

# Each of these once took more than twenty seconds, or gigabytes, or ended in a traceback.
LARGE = {
    "shell: a long value": ("a.sh", START + "x" * 900_000, LONG_COMMAND),
    "shell: nested defaults": ("a.sh", START + "${a:-" * 150_000, LONG_COMMAND),
    "shell: a long path": ("a.sh", ("a." * 2000 + "b=1\n") * 200, "has more than 30 parts"),
    "shell: many keys": ("a.sh", "".join(f"a.b.c{n}=1\n" for n in range(50_000)), MANY_KEYS),
    "shell: a variable doubled": (
        "a.sh",
        DOUBLED_VARIABLE,
        "its variables stand for more than 1,000,000 characters",
    ),
    "shell: a variable copied": ("a.sh", COPIED_VARIABLE, "its variables stand for more"),
    "shell: a long number": ("a.sh", START + "1" * 10_000, r"kl_loss_coef: got '1+\.\.\. \(10,002 characters\)"),
    "python: many arguments": ("a.py", MANY_ARGUMENTS, MANY_KEYS),
    "python: a large integer": ("a.py", "GRPOConfig(beta=0x" + "f" * 400_000 + ")", LARGE_INTEGER),
    "python: a long string": (
        "a.py",
        "GRPOConfig(beta='" + "x" * 900_000 + "')",
        r"beta: got 'x+\.\.\. \(900,002 characters\)",
    ),
    "yaml: merges of merges": ("a.yaml", merges_of_merges(), "with aliases and merge keys written out"),
    "yaml: a long time": ("a.yaml", "beta: 1" + ":1" * 100_000, LONG_NUMBER),
    "yaml: a long number": ("a.yaml", "beta: " + "1" * 100_000, LONG_NUMBER),
    "yaml: a long number below a long text": (
        "a.yaml",
        "a: " + "x" * 100_000 + "\nbeta: 0x" + "f" * 100_000,
        LONG_NUMBER + " .line 2",
    ),
    "yaml: a long list": ("a.yaml", "beta: [" + "1, " * 300_000 + "]", "more than 10,000 keys and values"),
    "toml: a long key": ("a.toml", "a." * 100_000 + "b = 1", "line 1 has more than 200 dots"),
    "toml: a long table": (
        "a.toml",
        "x = 1\n[" + '"a "."b ". ' * 50_000 + "b]",
        "line 2 has more than 200 dots",
    ),
    "toml: a key of numbers": ("a.toml", "1." * 200_000 + "1 = 1", "line 1 has more than 200 dots"),
    "toml: a large integer": ("a.toml", "kl_tau = 0x" + "f" * 400_000, LARGE_INTEGER),
}


@pytest.mark.parametrize(("file", "text", "message"), LARGE.values(), ids=LARGE)
def test_a_file_over_a_limit_is_refused_with_the_limit_in_one_line(tmp_path, file, text, message):
    """It takes two seconds on an idle core; ten are allowed here."""
    path = write(tmp_path, file, text)
    system = "trl"
    if file == "a.sh":
        system = "verl"
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        read_launch_file(path, system=system)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700, "a long value is cut in the message"


# --- what is large, but within the limits -------------------------------------------------------------------------
def notebook(code, output=""):
    """A notebook of one cell."""
    outputs = [{"output_type": "display_data", "data": {"image/png": output}}]
    return json.dumps({"cells": [{"cell_type": "code", "source": code, "outputs": outputs}]})


def test_a_notebook_with_large_pictures_is_read(tmp_path):
    code = "from trl import GRPOConfig\nGRPOConfig(beta=0.25)"
    launch = read_launch_file(write(tmp_path, "a.ipynb", notebook(code, output="x" * 1_500_000)))
    assert launch.given["beta"] == 0.25


def test_the_code_of_a_notebook_has_the_limit_of_a_script(tmp_path):
    path = write(tmp_path, "a.ipynb", notebook("# " + "x" * 1_000_000))
    with pytest.raises(UserError, match="has more than 1,000,000 characters of code"):
        read_launch_file(path, system="trl")


def test_a_script_with_many_keys_and_a_long_comment_is_read(tmp_path):
    keys = "".join(f"x.y{n}=1\n" for n in range(5000))
    comment = "# " + "x" * 100_000 + "\n"
    launch = read_launch_file(write(tmp_path, "a.sh", keys + comment + START + "0.5"))
    assert launch.given == {"kl_loss_coef": 0.5}


def test_toml_with_many_numbers_is_read(tmp_path):
    text = "x = [" + "0.25, " * 1000 + "]\n[trainer.loss]\nkl_tau = 0.5\n"
    launch = read_launch_file(write(tmp_path, "a.toml", text), system="prime-rl")
    assert launch.given == {"kl_tau": 0.5}


def test_yaml_with_an_alias_and_a_long_text_is_read(tmp_path):
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nprompt: " + "word " * 20_000 + "\nbeta: 0.5\n"
    launch = read_launch_file(write(tmp_path, "a.yaml", text), system="trl")
    assert launch.given == {"beta": 0.5}


SLOW_BEFORE = {
    "functions and their calls": ("a.py", "def f(a=1): 0\n" * 20_000 + "f(1)\n" * 50_000),
    "a comment of one word": ("a.py", "#" + "a" * 900_000 + "\n"),
    "lines without a command": ("a.py", "x = ['', '''" + "\n" * 300_000 + "''']\n"),
    "arms that are not taken": ("a.sh", "".join(f"a{n}=1\n" for n in range(4000)) + "[ a = b ] && x=1\n" * 7000),
    "here-documents": ("a.sh", "".join(f"a{n}=1\n" for n in range(9000)) + "python <<E\nE\n" * 9000),
}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "text"), SLOW_BEFORE.values(), ids=SLOW_BEFORE)
def test_many_of_one_thing_take_time_by_their_number_and_not_by_its_square(tmp_path, file, text):
    path = write(tmp_path, file, text)
    with cpu_limit(10):
        assert read_launch_file(path, system="verl").given == {}


# --- the command's arguments --------------------------------------------------------------------------------------
UNRECOGNIZED = "python train.py --use-kl-loss --kl-loss-coef 0.1\n"
"""Flags that several systems have, in a script that names none."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.sh"], "no such file"),
        (["grpo", "--system", "trl"], "--system needs a file"),
        (["{folder}/run.sh", "--system", "slim"], "did you mean 'slime'"),
        (["{folder}/run.sh", "kl_los=1", "--system", "slime"], "override: got 'kl_los=1'"),
    ],
    ids=["no such file", "a recipe with a system", "an unknown system", "an unknown flag"],
)
def test_misuse_of_the_command(tmp_path, arguments, message):
    write(tmp_path, "run.sh", UNRECOGNIZED)
    result = CliRunner().invoke(app, ["explain", *[argument.format(folder=tmp_path) for argument in arguments]])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_flags_longer_than_a_file_name_are_not_taken_for_a_file():
    flags = "verl:use_kl_loss=true," + ",".join(f"loss_agg_mode=token-mean{n}" for n in range(100))
    assert "loss_agg_mode" in str(CliRunner().invoke(app, ["explain", flags]).exception)


def test_a_script_that_names_no_system_is_read_with_the_one_that_is_given(tmp_path):
    path = write(tmp_path, "run.sh", UNRECOGNIZED)
    assert read_launch_file(path, system="slime").given == {"use_kl_loss": True, "kl_loss_coef": 0.1}


# --- any text, every flag -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("system", [None, "verl"])
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["sh", "py", "yaml", "toml", "json"]))
def test_any_text_is_read_or_refused_never_a_crash(tmp_path_factory, system, text, suffix):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_text(text, encoding="utf-8", errors="replace")
    try:
        read_launch_file(path, system=system)
    except UserError as error:
        assert str(error)


def value_of(flag):
    """A text that ``flag`` accepts."""
    if flag.choices:
        return flag.choices[0]
    if flag.is_switch:
        return "true"
    return "0.5"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("form", ["x --{flag} {value}", "x {flag}={value}"], ids=["an option", "an override"])
def test_every_flag_is_found_at_its_own_path_in_a_shell_script(tmp_path, name, form):
    for flag in SYSTEMS[name].flags:
        line = form.format(flag=flag.where, value=value_of(flag))
        launch = read_launch_file(write(tmp_path, "a.sh", line), system=name)
        # A flag that only an earlier release reads so also gives what stands for that release.
        of_a_release = {other for change in SYSTEMS[name].versions for other in change.before} - {flag.name}
        given = {other: value for other, value in launch.given.items() if other not in of_a_release}
        assert given == {flag.name: flag.parse(value_of(flag), "")}, line


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_marks_by_which_its_files_are_recognised(name):
    assert SYSTEMS[name].marks


def test_an_empty_script_has_no_settings(tmp_path):
    assert len(parse(write(tmp_path, "b.sh", "")).settings) == 0


def test_dashes_of_a_flag_are_underscores_of_a_key():
    assert flag_key("--a-b") == "a_b"


def test_fields_of_an_authors_own_class_are_no_hint_of_a_system(tmp_path):
    """A trainer of one's own has options of the same names."""
    fields = "class Config(Base):\n    init_kl_coef: float = 0.0\n    use_kl_loss: bool = True\n"
    with pytest.raises(UserError, match="no system recognised"):
        read_launch_file(write(tmp_path, "a.py", f"{fields}    n_samples_per_prompt: int = 8\n"))
