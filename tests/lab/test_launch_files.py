"""Launch scripts and configs of other systems: what is read of them, what is refused; our own text in their syntax."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from commands import cpu_limit
from kl_comedy.cli.main import app
from kl_comedy.errors import UserError
from kl_comedy.io import MAX_FILE_BYTES
from kl_comedy.lab.launch_files import parse, read_launch_file
from kl_comedy.lab.peers import SYSTEMS, flag_key

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

FILES = {
    "run.sh": (
        VERL,
        "verl",
        {
            "adv_estimator": "grpo",
            "use_kl_loss": True,
            "kl_loss_type": "low_var_kl",
            "use_kl_in_reward": True,
            "kl_coef": 0.002,
        },
    ),
    "openrlhf.sh": (
        OPENRLHF,
        "openrlhf",
        {"init_coef": 0.001, "use_loss": True, "kl_estimator": "k3", "advantage_estimator": "group_norm"},
    ),
    "slime.sh": (SLIME, "slime", {"advantage_estimator": "grpo", "kl_coef": 0.01, "kl_loss_type": "low_var_kl"}),
    "train.py": (TRL, "trl", {"beta": 0.04, "use_bias_correction_kl": False, "loss_type": "dr_grpo"}),
    "trl.yaml": (TRL_YAML, "trl", {"beta": 0.001}),
    "rl.toml": (PRIME, "prime-rl", {"kl_tau": 0.01}),
    "dppo.sh": (DPPO, "verl", {"loss_mode": "dppo_tv", "clip_ratio": 0.1, "clip_ratio_c": 10000.0}),
    "nemo.yaml": (NEMO, "nemo-rl", {"reference_policy_kl_penalty": 0.02, "reference_policy_kl_type": "k2"}),
}


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("name", FILES)
def test_the_flags_of_a_file_are_read(tmp_path, name):
    text, system, expected = FILES[name]
    launch = read_launch_file(write(tmp_path, name, text))
    assert (launch.system.name, launch.given, launch.remarks) == (system, expected, ())


def explained(*arguments):
    result = CliRunner().invoke(app, ["explain", *map(str, arguments), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_explain_says_where_the_kl_is_and_names_the_traps(tmp_path):
    verl = explained(write(tmp_path, "run.sh", VERL))
    assert verl["placement"] == "reward (k1, 0.002) and loss (k3, 0.001)" and verl["version"] == "0.9.1"
    assert any(trap.startswith("counted twice: the KL enters twice") for trap in verl["traps"])
    slime = explained(write(tmp_path, "slime.sh", SLIME))
    assert slime["placement"] == "none" and slime["traps"][0].startswith(
        "does nothing: kl_coef with advantage_estimator"
    )
    k1 = OPENRLHF.replace("k3", "k1")
    traps = explained(write(tmp_path, "openrlhf.sh", k1))["traps"]
    assert traps[0].startswith("wrong gradient on-policy: zero expected gradient")
    prime = explained(write(tmp_path, "rl.toml", PRIME))
    assert prime["placement"] == "sampler, in the loss (k2, 0.02)"
    result = CliRunner().invoke(app, ["explain", str(write(tmp_path, "t.py", TRL))])
    lines = result.stdout.splitlines()
    assert lines[0].endswith("t.py: TRL, read with the flags and defaults of version 1.16.0")
    assert lines[1] == "KL is on: loss (k3, 0.04)" and "wrong gradient on-policy: optimizes the forward KL" in lines[3]
    assert "kl:" in lines and "docs/decision.md" in lines[-1]


def test_explain_names_the_policy_correction_and_a_bound_that_does_nothing(tmp_path):
    path = write(tmp_path, "dppo.sh", DPPO)
    dppo = explained(path)
    assert dppo["corrections"] == {"tis": {"cap": 10000.0}, "dppo_tv": {"threshold": 0.2}}
    assert dppo["traps"] == ["does nothing: clip_ratio=0.1: clip_ratio_low=0.2, clip_ratio_high=0.2 replace it"]
    lines = CliRunner().invoke(app, ["explain", str(path)]).stdout.splitlines()
    assert lines[2] == "The policy loss has: {tis: {cap: 10000}, dppo_tv: {threshold: 0.2}}"
    assert lines.count("  correction: {tis: {cap: 10000}, dppo_tv: {threshold: 0.2}}") == 1
    assert not explained(path, "clip_ratio_low=none", "clip_ratio_high=none")["traps"]


def test_a_source_of_a_list_may_have_its_own_algorithm(tmp_path):
    launch = read_launch_file(write(tmp_path, "rl.toml", PRIME_SOURCES))
    assert launch.given == {"algo": "opd"} and "orchestrator.train.source.algo.type: given more" in launch.remarks[0]


def test_a_teacher_is_no_second_kl_to_the_reference(tmp_path):
    opd = SLIME.replace("--kl-coef 0.01", "--use-opd --opd-kl-coef 0.5 --kl-loss-coef 0.01").replace("#--use", "--use")
    answer = explained(write(tmp_path, "slime.sh", opd))
    assert answer["placement"] == "teacher, in the reward (k1, 0.5) and loss (k3, 0.01)"
    assert not any("counted twice" in trap for trap in answer["traps"])


def test_the_class_or_command_chooses_the_trainer_of_trl(tmp_path):
    rloo = read_launch_file(write(tmp_path, "a.py", "from trl import RLOOConfig\nRLOOConfig(beta=0.1)\n"))
    assert rloo.given == {"trainer": "rloo", "beta": 0.1}
    asynchronous = (
        "from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer\nAsyncGRPOConfig(epsilon=0.1)\n"
    )
    assert read_launch_file(write(tmp_path, "b.py", asynchronous)).given == {"trainer": "async_grpo"}
    shell = read_launch_file(write(tmp_path, "a.sh", "trl rloo --beta 0.1 --num_generations 4\n"))
    assert shell.given == {"trainer": "rloo", "beta": 0.1}


def test_what_is_no_literal_is_reported_and_can_be_given(tmp_path):
    path = write(tmp_path, "run.sh", "python -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef=$1\n")
    launch = read_launch_file(path)
    assert launch.given == {} and "kl_loss_coef: '$1' is not a literal; its default is taken" in launch.remarks[0]
    completed = read_launch_file(path, overrides=["kl_loss_coef=0.5"])
    assert completed.given == {"kl_loss_coef": 0.5} and completed.remarks == ()
    twice = "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True algorithm.use_kl_in_reward=False\n"
    launch = read_launch_file(write(tmp_path, "run.sh", twice))
    assert launch.given == {"use_kl_in_reward": False} and "given more than once" in launch.remarks[0]
    code = "from trl import GRPOConfig\nGRPOConfig(beta=float('nan') if x else 1, **more)\n"
    assert "is not a literal" in read_launch_file(write(tmp_path, "a.py", code)).remarks[0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "python train.py --lr 1\n", "no system of trl, verl, .* recognised; name it with --system"),
        ("run.sh", "python -m verl.trainer.main_ppo\npython -m openrlhf.cli.train_ppo_ray\n", "verl|openrlhf"),
        ("run.sh", "python -m verl.x actor_rollout_ref.actor.kl_loss_type=k9\n", "kl_loss_type: got 'k9'; allowed: kl"),
        (
            "a.py",
            "from trl import DPOConfig, DPOTrainer\nDPOConfig(beta=0.1)\n",
            "DPOTrainer has none of the KL flags of TRL",
        ),
        (
            "run.sh",
            "python -m openrlhf.cli.train_sft --lr 1\n",
            "train_sft has none of the KL flags of OpenRLHF",
        ),
        ("a.py", "def broken(:\n", "cannot be read: invalid syntax"),
        ("a.py", "(" * 5000, "cannot be read"),
        ("a.py", "-" * 100_000 + "1", "cannot be read"),
        ("a.toml", "a = ", "cannot be read"),
        ("a.yaml", "a: [b\n", "cannot be read"),
        ("a.yaml", "[" * 3000, "nested more than"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]\n", "cannot be read"),
        ("a.yaml", b"\xff\xfe\x00", "cannot be read"),
        ("a.sh", "#" * (MAX_FILE_BYTES + 1), "larger than 1,000,000 bytes"),
        (
            "a.yaml",
            "a: &a {x: 1, y: 1, z: 1}\n"
            + "".join(f"{b}: &{b} {{x: *{a}, y: *{a}, z: *{a}}}\n" for a, b in itertools.pairwise("abcdefghijk")),
            "more than 10,000 keys and values",
        ),
    ],
)
def test_hostile_and_unknown_files_are_refused_in_one_line(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message) as error:
        read_launch_file(write(tmp_path, name, text))
    assert "\n" not in str(error.value) and str(error.value).startswith(str(tmp_path))


START = "python -m verl.trainer.main_ppo actor_rollout_ref.actor.kl_loss_coef="
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
LARGE = [  # each of these took more than twenty seconds, gigabytes, or a traceback
    ("a.sh", START + "x" * 900_000, "a command of more than 20,000 characters"),
    ("a.sh", START + "${a:-" * 150_000, "a command of more than 20,000 characters"),
    ("a.sh", ("a." * 2000 + "b=1\n") * 200, "has more than 30 parts"),
    ("a.sh", "".join(f"a.b.c{n}=1\n" for n in range(50_000)), "more than 10,000 keys"),
    ("a.sh", "a=xx\n" + "a=$a$a\n" * 40 + START + "$a\n", "its variables stand for more than 1,000,000 characters"),
    ("a.sh", "a=" + "x" * 9000 + "\n" + "".join(f"b{n}=$a\n" for n in range(90_000)), "its variables stand for more"),
    ("a.sh", START + "1" * 10_000, r"kl_loss_coef: got '1+\.\.\. \(10,002 characters\)"),
    ("a.py", "f(" + ",".join(f"a{n}=1" for n in range(30_000)) + ")", "more than 10,000 keys"),
    ("a.py", "GRPOConfig(beta=0x" + "f" * 400_000 + ")", "a number of more than 4,300 digits"),
    ("a.py", "GRPOConfig(beta='" + "x" * 900_000 + "')", r"beta: got 'x+\.\.\. \(900,002 characters\)"),
    ("a.yaml", MERGES, "with aliases and merge keys written out"),
    ("a.yaml", "beta: 1" + ":1" * 100_000, "a number of more than 100 characters"),
    ("a.yaml", "beta: " + "1" * 100_000, "a number of more than 100 characters"),
    ("a.yaml", "a: " + "x" * 100_000 + "\nbeta: 0x" + "f" * 100_000, "a number of more than 100 characters .line 2"),
    ("a.yaml", "beta: [" + "1, " * 300_000 + "]", "more than 10,000 keys and values"),
    ("a.toml", "a." * 100_000 + "b = 1", "line 1 has more than 200 dots"),
    ("a.toml", "x = 1\n[" + '"a "."b ". ' * 50_000 + "b]", "line 2 has more than 200 dots"),
    ("a.toml", "1." * 200_000 + "1 = 1", "line 1 has more than 200 dots"),
    ("a.toml", "kl_tau = 0x" + "f" * 400_000, "a number of more than 4,300 digits"),
]


@pytest.mark.parametrize(("name", "text", "message"), LARGE, ids=range(len(LARGE)))
def test_a_file_over_a_limit_is_refused_with_the_limit_in_one_line(tmp_path, name, text, message):
    """Within two seconds on an idle core; ten are allowed here."""
    path = write(tmp_path, name, text)
    with cpu_limit(10), pytest.raises(UserError, match=message) as error:
        read_launch_file(path, system="trl" if name != "a.sh" else "verl")
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def test_what_stays_within_the_limits_is_read(tmp_path):
    lines = "".join(f"x.y{n}=1\n" for n in range(5000)) + "# " + "x" * 100_000 + "\n"
    assert read_launch_file(write(tmp_path, "a.sh", lines + START + "0.5")).given == {"kl_loss_coef": 0.5}
    numbers = "x = [" + "0.25, " * 1000 + "]\n[trainer.loss]\nkl_tau = 0.5\n"
    assert read_launch_file(write(tmp_path, "a.toml", numbers), system="prime-rl").given == {"kl_tau": 0.5}
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nprompt: " + "word " * 20_000 + "\nbeta: 0.5\n"
    assert read_launch_file(write(tmp_path, "a.yaml", text), system="trl").given == {"beta": 0.5}


def test_misuse_of_the_command(tmp_path):
    runner, path = CliRunner(), write(tmp_path, "run.sh", "python train.py --use-kl-loss --kl-loss-coef 0.1\n")
    for arguments, message in (
        ([tmp_path / "none.sh"], "no such file"),
        (["grpo", "--system", "trl"], "--system needs a file"),
        ([path, "--system", "slim"], "did you mean 'slime'"),
        ([path, "kl_los=1", "--system", "slime"], "override: got 'kl_los=1'"),
    ):
        result = runner.invoke(app, ["explain", *map(str, arguments)])
        assert isinstance(result.exception, UserError) and message in str(result.exception)
    long = "verl:use_kl_loss=true," + ",".join(f"loss_agg_mode=token-mean{n}" for n in range(100))
    assert "loss_agg_mode" in str(runner.invoke(app, ["explain", long]).exception)
    assert read_launch_file(path, system="slime").given == {"use_kl_loss": True, "kl_loss_coef": 0.1}


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["sh", "py", "yaml", "toml", "json"]))
def test_any_text_is_read_or_refused_never_a_crash(tmp_path_factory, text, suffix):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    path.write_text(text, encoding="utf-8", errors="replace")
    for system in (None, "verl"):
        try:
            read_launch_file(path, system=system)
        except UserError as error:
            assert str(error)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_flag_is_found_at_its_own_path_in_a_shell_script(tmp_path, name):
    system = SYSTEMS[name]
    for flag in system.flags:
        value = flag.choices[0] if flag.choices else "true" if flag.is_switch else "0.5"
        for line in (f"x --{flag.where} {value}", f"x {flag.where}={value}"):
            launch = read_launch_file(write(tmp_path, "a.sh", line), system=name)
            assert launch.given == {flag.name: flag.parse(value, "")}, line
    assert system.marks and len(parse(write(tmp_path, "b.sh", "")).settings) == 0 and flag_key("--a-b") == "a_b"
