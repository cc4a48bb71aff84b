"""Flags of other systems as users paste them: what is read, what is refused, what goes back to text."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import cpu_limit
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, resolve_terms
from kl_comedy.lab.peers import (
    EFFECTS,
    GOALS,
    SENTENCES,
    SYSTEMS,
    Flag,
    find_system,
    is_peer,
    read,
    render,
    resolve,
    split,
    switched_on,
    variables,
)


@pytest.mark.parametrize(
    "text",
    [
        "verl:use_kl_loss=true,kl_loss_type=k3",
        "verl: use_kl_loss = True, kl_loss_type = 'K3' ",
        "VERL:use_kl_loss=1 kl_loss_type=k3",
        "verl:actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3",
        "verl:actor.use_kl_loss=on,actor.kl_loss_type=k3",
        "verl:+actor_rollout_ref.actor.use_kl_loss=yes,++kl_loss_type=k3",
        "verl:--use-kl-loss --kl-loss-type k3",
        "verl:--kl_loss_type=k3 --use_kl_loss",
    ],
)
def test_one_setting_written_in_many_ways(text):
    reading = read(text)
    assert reading.given == {"use_kl_loss": True, "kl_loss_type": "k3"}
    assert reading.terms == (KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0, beta=0.001),)


def test_dotted_paths_tell_flags_of_one_name_apart():
    reading = read("openrlhf:--algo.kl.estimator k2 --algo.advantage.estimator rloo --algo.kl.init_coef 1e-3")
    assert reading.given == {"kl_estimator": "k2", "advantage_estimator": "rloo", "init_coef": 0.001}
    assert (
        read("verl:algorithm.kl_ctrl.kl_coef=0.1,algorithm.kl_ctrl.type=adaptive").flags["kl_ctrl_type"] == "adaptive"
    )
    assert read("openrlhf:use_kl_loss=true").given == {"use_loss": True}


@pytest.mark.parametrize("name", ["nemo-rl", "NeMo_RL", "nemo_rl:", " nemo-rl "])
def test_systems_match_whatever_their_case_and_dashes(name):
    assert find_system(name).name == "nemo-rl"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("verll:", ["'verll'", "did you mean 'verl'", "openrlhf"]),
        ("verl:kl_loss_typ=k3", ["verl.kl_loss_typ", "no such key", "'k3'", "did you mean 'kl_loss_type'"]),
        ("verl:kl_loss_type=k9", ["verl.kl_loss_type", "'k9'", "low_var_kl", "k3+"]),
        ("verl:kl_loss_type=low_var_k", ["did you mean 'low_var_kl'"]),
        ("verl:use_kl_loss=maybe", ["verl.use_kl_loss", "'maybe'", "true, false"]),
        ("verl:kl_loss_coef=big", ["verl.kl_loss_coef", "'big'", "number"]),
        ("verl:kl_loss_coef=-0.1", ["'-0.1'", "at least 0"]),
        ("verl:kl_loss_coef=nan", ["'nan'", "number"]),
        ("verl:kl_loss_coef=inf", ["'inf'", "number"]),
        ("verl:kl_loss_coef=none", ["'none'", "number"]),
        ("verl:--kl_loss_coef --use_kl_loss", ["verl.kl_loss_coef", "only a switch may stand alone"]),
        ("verl:algorithm.use_kl_loss=true", ["the flag is at actor_rollout_ref.actor.use_kl_loss"]),
        ("verl:use_kl_loss", ["'use_kl_loss'", "key=value"]),
        ("verl:use_kl_loss=true,actor.use_kl_loss=false", ["given twice"]),
        ("openrlhf:estimator=k3", ["algo.kl.estimator", "algo.advantage.estimator", "several"]),
        ("slime:kl_coef=1,kl_loss_coef=1", ["kl_coef", "kl_loss_coef", "both"]),
        ("skyrl:use_kl_in_reward=true", ["use_kl_loss", "use_kl_in_reward", "both"]),
        ("open-instruct:load_ref_policy=false", ["load_ref_policy", "beta"]),
        (":", ["system"]),
        (":kl=1", ["system"]),
    ],
)
def test_wrong_flags_are_refused_in_one_line(text, says):
    with pytest.raises(UserError) as error:
        read(text)
    message = str(error.value)
    assert "\n" not in message
    for word in says:
        assert word in message, message


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_never_a_crash(text):
    for start in ("", "verl:", "openrlhf:--"):
        try:
            read(start + text)
        except UserError as error:
            assert str(error)


def check_flag(system, flag):
    """A flag reads its own default and choices, at its own path."""
    texts = [*flag.choices, *(["true", "false"] if flag.is_switch else [])]
    for text in texts or ["0", "0.5", *(["none"] if flag.nullable else [])]:
        given = resolve(system, [(flag.where.replace("-", "_"), text)])
        assert given.keys() == {flag.name}
        assert given[flag.name] == flag.parse(text, "key")
    assert flag.nullable or flag.default is not None
    assert flag.default is None or not flag.choices or flag.default in flag.choices
    assert flag.choices or flag.default is None or isinstance(flag.default, bool | float)
    assert flag.meaning and flag.row()["flag"] == flag.where


def check_rules(system, rules, names):
    """Rules know their keys, and conditions and sentences name flags, variables or sentences."""
    for rule in rules:
        assert set(rule) <= {"when", "stop", *EFFECTS}, rule
        assert set(rule.get("when", {})) <= names, rule
        used = re.findall(r"\$(\w+)", str({**rule, "rules": ()}))
        assert set(used) <= names, rule
        check_rules(system, rule.get("rules", ()), names)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_data_of_a_system_is_consistent(name):
    system = SYSTEMS[name]
    words = [word for flag in system.flags for word in (flag.name, *flag.aliases)]
    assert len(words) == len(set(words)) and len({flag.where for flag in system.flags}) == len(system.flags)
    assert set(system.advice) == set(GOALS)
    set_by_rules = variables(system.rules)
    assert not set_by_rules & {flag.name for flag in system.flags}
    check_rules(system, system.rules, {flag.name for flag in system.flags} | set_by_rules | set(SENTENCES) | {"terms"})
    for flag in system.flags:
        check_flag(system, flag)


def every_setting(system: str):
    """One text per choice of each flag, alone, and with the KL switched on."""
    on = (switched_on(read(f"{system}:")) or read(f"{system}:")).given
    for flag in SYSTEMS[system].flags:
        choices = flag.choices or (("true", "false") if isinstance(flag.default, bool) else ("0", "0.7"))
        for choice in choices:
            value = flag.parse(choice, flag.name)
            yield render(SYSTEMS[system], {flag.name: value})
            yield render(SYSTEMS[system], {**on, flag.name: value})


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_reading_is_consistent(name):
    """Terms a config can hold, or words; text that reads back to the same; no empty note."""
    for text in every_setting(name):
        try:
            reading = read(text)
        except UserError as error:
            assert re.search(r"both|needs beta", str(error)), text
            continue
        assert read(reading.text) == reading
        assert (reading.terms is None) == bool(reading.instead), text
        assert all(reading.notes) and all(reading.no_ops)
        assert bool(reading.version) and bool(reading.source)
        if reading.terms:
            assert resolve_terms([term.to_mapping() for term in reading.terms]) == reading.terms
            assert not reading.switch_on
        other = switched_on(reading)
        assert other is None or other.terms or other.instead, text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slime:kl_coef=0.1", "kl_coef with advantage_estimator=grpo"),
        ("slime:kl_coef=0.1,advantage_estimator=gspo", "kl_coef with advantage_estimator=gspo"),
        ("slime:use_kl_loss=true", "kl_loss_coef is 0"),
        ("slime:kl_loss_coef=0.1", "use_kl_loss is off"),
        ("pipelinerl:kl_coef=0.1,policy_loss=gspo", "policy_loss=gspo"),
        ("pipelinerl:reward_minus_kl_coef=0.1", "read nowhere"),
        ("verl:use_kl_in_reward=true,adv_estimator=gdpo", "adv_estimator=gdpo"),
        ("verl:use_kl_in_reward=true,kl_penalty=k3+", "kl_penalty=k3+"),
        ("nemo-rl:use_kl_in_reward=true", "adv_estimator=grpo"),
        ("openrlhf:unbiased_gradient=true", "use_loss is off"),
        ("roll:", "add_token_level_kl is off"),
        ("trinity:algorithm_type=grpo,kl_penalty_fn=k1", "algorithm_type=grpo"),
        ("ms-swift:advantage_estimator=rloo,scale_rewards=gdpo", "gdpo"),
    ],
)
def test_flags_that_do_nothing_are_named(text, says):
    assert any(says in line for line in read(text).no_ops), read(text).no_ops


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("verl:use_kl_in_reward=true,adv_estimator=grpo", "divided by the group's standard deviation"),
        ("verl:use_kl_in_reward=true,adv_estimator=grpo", "(1 - 1/n)"),
        ("verl:use_kl_in_reward=true,use_kl_loss=true", "enters twice"),
        ("verl:use_kl_loss=true", "no ratio"),
        ("openrlhf:", "old log-probs"),
        ("openrlhf:use_loss=true,kl_estimator=k1", "score"),
        ("nemo-rl:", "no gradient at all"),
        ("trl:beta=0.1,sync_ref_model=true", "every 512 steps the reference becomes 0.6"),
        ("verl:use_kl_in_reward=true,loss_mode=dro", "loss_mode=dro weights the cost"),
    ],
)
def test_notes_name_the_pitfalls(text, says):
    assert any(says in line for line in read(text).notes), read(text).notes


def test_the_switched_on_reading_keeps_what_was_given():
    other = switched_on(read("trl:use_bias_correction_kl=false"))
    assert other is not None and other.given == {"use_bias_correction_kl": False, "beta": 0.04}
    assert switched_on(read("skyrl:")) is None


def test_a_colon_or_a_bare_name_means_another_system():
    assert is_peer("verl:x=1") and is_peer("TRL") and is_peer("nope:") and not is_peer("grpo")


def test_a_lone_key_takes_the_next_word_unless_it_starts_with_a_dash():
    assert split("x:--a --b 2 c=3 --d") == ("x", [("a", None), ("b", "2"), ("c", "3"), ("d", None)])
    assert Flag(name="a", meaning="m", default=False).parse(None, "k") is True


@pytest.mark.parametrize(
    "text",
    [
        *("verl:" + unit * (120_000 // len(unit)) for unit in (" ", "x", "=", "a.", "a=1,", "--a ")),
        *("verl:use_kl_loss=true" + unit * (15_000 // len(unit)) for unit in (" ", "x", "=", ".a", ",a", " --a")),
        *("verl:kl_loss_coef=" + digit * 15_000 for digit in "19x"),
        "x" * 120_000 + ":",
    ],
    ids=lambda text: f"{text[:8]}...{text[-5:]}",
)
def test_long_flags_are_read_or_refused_in_one_line(text):
    with cpu_limit(10):
        try:
            read(text)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 3000
