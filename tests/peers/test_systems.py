"""Flags of other systems as users paste them: what is read, what is refused, what goes back to text."""

import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import cpu_limit
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, resolve_terms
from kl_comedy.peers.systems import (
    EFFECTS,
    GOALS,
    SENTENCES,
    SYSTEMS,
    Flag,
    find_system,
    is_peer,
    read,
    read_flags,
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


@pytest.mark.parametrize(
    ("text", "given"),
    [
        (
            "openrlhf:--algo.kl.estimator k2 --algo.advantage.estimator rloo --algo.kl.init_coef 1e-3",
            {"kl_estimator": "k2", "advantage_estimator": "rloo", "init_coef": 0.001},
        ),
        ("openrlhf:use_kl_loss=true", {"use_loss": True}),
    ],
    ids=["whole paths", "a former name"],
)
def test_dotted_paths_tell_flags_of_one_name_apart(text, given):
    assert read(text).given == given


def test_a_flag_with_a_common_name_is_found_by_its_path():
    flags = read("verl:algorithm.kl_ctrl.kl_coef=0.1,algorithm.kl_ctrl.type=adaptive").flags
    assert flags["kl_ctrl_type"] == "adaptive"


@pytest.mark.parametrize("name", ["nemo-rl", "NeMo_RL", "nemo_rl:", " nemo-rl "])
def test_systems_match_whatever_their_case_and_dashes(name):
    assert find_system(name).name == "nemo-rl"


@pytest.mark.parametrize(
    ("text", "parts"),
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
def test_wrong_flags_are_refused_in_one_line(text, parts):
    with pytest.raises(UserError) as error:
        read(text)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("start", ["", "verl:", "openrlhf:--"])
@settings(max_examples=20, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_never_a_crash(start, text):
    try:
        read(start + text)
    except UserError as error:
        assert str(error)


# --- the data of each system --------------------------------------------------------------------------------------
every_system = pytest.mark.parametrize("name", SYSTEMS)


def texts_of(flag):
    """Texts that ``flag`` accepts: every one of them where there is a list, examples otherwise."""
    texts = list(flag.choices)
    if flag.is_switch:
        texts += ["true", "false"]
    if texts:
        return texts
    texts = ["0", "0.5"]
    if flag.nullable:
        texts.append("none")
    return texts


@every_system
def test_a_flag_is_read_at_its_own_path(name):
    system = SYSTEMS[name]
    for flag in system.flags:
        for text in texts_of(flag):
            given = resolve(system, [(flag.where.replace("-", "_"), text)])
            assert given == {flag.name: flag.parse(text, "key")}, flag


@every_system
def test_the_default_of_a_flag_is_a_value_that_it_accepts(name):
    for flag in SYSTEMS[name].flags:
        if flag.default is None:
            assert flag.nullable, flag
        elif flag.choices:
            assert flag.default in flag.choices, flag
        else:
            assert isinstance(flag.default, bool | float), flag


@every_system
def test_a_flag_says_what_it_means_and_where_it_is(name):
    for flag in SYSTEMS[name].flags:
        assert flag.meaning, flag
        assert flag.row()["flag"] == flag.where


@every_system
def test_no_name_and_no_path_belongs_to_two_flags(name):
    flags = SYSTEMS[name].flags
    names = []
    for flag in flags:
        names += [flag.name, *flag.aliases]
    assert len(names) == len(set(names))
    assert len({flag.where for flag in flags}) == len(flags)


@every_system
def test_a_system_has_advice_for_every_goal(name):
    assert set(SYSTEMS[name].advice) == set(GOALS)


@every_system
def test_rules_set_no_flag(name):
    """A variable of the rules with the name of a flag would hide what the user gave."""
    system = SYSTEMS[name]
    assert not variables(system.rules) & {flag.name for flag in system.flags}


def check_rules(rules, names):
    """Rules have known keys, and their conditions and sentences use only ``names``."""
    for rule in rules:
        assert set(rule) <= {"when", "stop", *EFFECTS}, rule
        assert set(rule.get("when", {})) <= names, rule
        own_part = {**rule, "rules": ()}
        assert set(re.findall(r"\$(\w+)", str(own_part))) <= names, rule
        check_rules(rule.get("rules", ()), names)


@every_system
def test_rules_use_only_names_that_exist(name):
    system = SYSTEMS[name]
    flags = {flag.name for flag in system.flags}
    check_rules(system.rules, flags | variables(system.rules) | set(SENTENCES) | {"terms"})


# --- every reading ------------------------------------------------------------------------------------------------
def every_setting(name):
    """One text per choice of each flag, alone, and with the KL switched on."""
    system = SYSTEMS[name]
    default = read(f"{name}:")
    with_kl = switched_on(default) or default
    for flag in system.flags:
        if flag.choices:
            choices = flag.choices
        elif isinstance(flag.default, bool):
            choices = ("true", "false")
        else:
            choices = ("0", "0.7")
        for choice in choices:
            value = flag.parse(choice, flag.name)
            yield render(system, {flag.name: value})
            yield render(system, {**with_kl.given, flag.name: value})


def check_reading(reading, text):
    """Terms that a config can hold, or words instead of them; no empty note."""
    assert read(reading.text) == reading, "its text reads back to the same"
    assert (reading.terms is None) == bool(reading.instead), text
    assert all(reading.notes), text
    assert all(reading.no_ops), text
    assert reading.version
    assert reading.source
    if reading.terms:
        assert resolve_terms([term.to_mapping() for term in reading.terms]) == reading.terms
        assert not reading.switch_on, "the KL is on"
    other = switched_on(reading)
    assert other is None or other.terms or other.instead, text


@every_system
def test_every_reading_is_consistent(name):
    for text in every_setting(name):
        try:
            reading = read(text)
        except UserError as error:
            # Two flags that exclude each other, one that needs another, a recipe that is no RL, and a loss that is SFT
            # or the user's own: the only reasons to refuse a choice.
            assert re.search(r"both|needs beta|(SPIN|GKD) recipe|loss_type=(custom|sft)_loss", str(error)), text
        else:
            check_reading(reading, text)


@pytest.mark.parametrize(
    ("text", "reason"),
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
def test_flags_that_do_nothing_are_named(text, reason):
    no_ops = read(text).no_ops
    assert any(reason in line for line in no_ops), no_ops


@pytest.mark.parametrize(
    ("text", "pitfall"),
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
        ("skyrl:use_kl_in_reward=true,use_kl_loss=false,advantage_estimator=reinforce++", "set to 0 at a reply"),
        ("skyrl:use_kl_in_reward=true,use_kl_loss=false,advantage_estimator=gae", "values at a tool's tokens"),
        ("slime:kl_coef=0.1,advantage_estimator=ppo", "the KL of a tool's tokens is a cost too"),
        ("slime:kl_coef=0.1,advantage_estimator=ppo", "values at a tool's tokens"),
        ("roll:add_token_level_kl=true", "values at a tool's tokens"),
    ],
)
def test_notes_name_the_pitfalls(text, pitfall):
    notes = read(text).notes
    assert any(pitfall in line for line in notes), notes


def test_the_switched_on_reading_keeps_what_was_given():
    with_kl = switched_on(read("trl:use_bias_correction_kl=false"))
    assert with_kl is not None
    assert with_kl.given == {"use_bias_correction_kl": False, "beta": 0.04}


def values_of(flag):
    if flag.choices:
        return flag.choices
    if flag.is_switch:
        return (False, True)
    return (0.0, 0.01)


@pytest.mark.parametrize("name", SYSTEMS)
def test_flags_that_are_read_with_the_kl_off_are_not_refused_with_it_on(name):
    """For any three flags: a rule that refuses them stands before the one that ends the reading without a KL.

    Of a system with many flags some threes are drawn: verl's thirty have a hundred times as many as any other's.
    """
    system = SYSTEMS[name]
    threes = list(itertools.combinations(system.flags, 3))
    if len(threes) > 200:
        threes = random.Random(0).sample(threes, 200)
    for flags in threes:
        for values in itertools.product(*[values_of(flag) for flag in flags]):
            given = {flag.name: value for flag, value in zip(flags, values, strict=True)}
            try:
                reading = read_flags(system, given)
            except UserError:
                continue
            switched_on(reading)


def test_a_kl_that_is_on_is_not_switched_on():
    assert switched_on(read("skyrl:")) is None


# --- text into keys and values ------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["verl:x=1", "TRL", "nope:"])
def test_a_colon_or_a_bare_name_means_another_system(text):
    assert is_peer(text)


def test_the_name_of_a_recipe_means_no_other_system():
    assert not is_peer("grpo")


def test_a_lone_key_takes_the_next_word_unless_it_starts_with_a_dash():
    assert split("x:--a --b 2 c=3 --d") == ("x", [("a", None), ("b", "2"), ("c", "3"), ("d", None)])


def test_a_switch_that_stands_alone_is_on():
    assert Flag(name="a", meaning="m", default=False).parse(None, "k") is True


def repeated(start, unit, characters):
    """A text of about so many characters: the start, then the unit again and again."""
    return start + unit * (characters // len(unit))


LONG_TEXTS = [
    *[repeated("verl:", unit, 120_000) for unit in (" ", "x", "=", "a.", "a=1,", "--a ")],
    *[repeated("verl:use_kl_loss=true", unit, 15_000) for unit in (" ", "x", "=", ".a", ",a", " --a")],
    *[repeated("verl:kl_loss_coef=", digit, 15_000) for digit in ("1", "9", "x")],
    "x" * 120_000 + ":",
]


@pytest.mark.parametrize("text", LONG_TEXTS, ids=lambda text: f"{text[:8]}...{text[-5:]}")
def test_long_flags_are_read_or_refused_in_one_line(text):
    with cpu_limit(10):
        try:
            read(text)
        except UserError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 3000
