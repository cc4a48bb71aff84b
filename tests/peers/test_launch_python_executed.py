"""The values that are read from a Python program are those that it has when it runs."""

import random

import pytest

from kl_comedy.peers.launch_python import python
from kl_comedy.peers.launch_settings import Parsed
from kl_comedy.peers.launch_syntax import READERS

CALL = "GRPOConfig(**options)"
PROGRAMS = {
    "a literal": 'options = {"beta": 0.1, "lr": 2}',
    "update with a dictionary": 'options = {"beta": 0.1, "lr": 2}\noptions.update({"beta": 0.2})',
    "update with keywords": 'options = {"beta": 0.1, "lr": 2}\noptions.update(beta=0.2)',
    "several updates": 'options = {"beta": 0.1}\noptions.update(beta=0.2)\noptions.update({"lr": 3, "beta": 0.3})',
    "an item": 'options = {"beta": 0.1, "lr": 2}\noptions["beta"] = 0.2\noptions["lr"] = 4',
    "augmented": 'options = {"beta": 0.1, "lr": 2}\noptions |= {"beta": 0.2}\noptions["lr"] = 7',
    "dict of keywords": "options = dict(beta=0.1, lr=2)\noptions.update(lr=3)",
    "dict of another": 'base = {"beta": 0.1, "lr": 2}\noptions = dict(**base, eps=3)',
    "dict over another": 'base = {"beta": 0.1, "lr": 2}\noptions = {**base, "beta": 0.2}',
    "another over dict": 'base = {"beta": 0.1, "lr": 2}\noptions = {"beta": 0.2, **base}',
    "another that was updated": 'base = {"beta": 0.1}\nbase.update(beta=0.2, lr=1)\noptions = {**base}',
}
SUBSCRIPTS = {
    "after an update": 'C = {"beta": 0.1, "lr": 2}\nC.update({"beta": 0.2})',
    "after two updates": 'C = {"beta": 0.1, "lr": 2}\nC.update(beta=0.2)\nC.update(beta=0.3)',
    "after an item": 'C = {"beta": 0.1, "lr": 2}\nC["beta"] = 0.2',
    "after an augmented assignment": 'C = {"beta": 0.1, "lr": 2}\nC |= {"beta": 0.2, "lr": 5}',
    "of keywords": "C = dict(beta=0.1, lr=2)\nC.update(lr=9)",
    "written twice in one dictionary": 'C = {"beta": 0.1, "lr": 2, "beta": 0.2}',
    "of another dictionary": 'B = {"beta": 0.1, "lr": 2}\nC = {**B, "beta": 0.2}',
}


def executed(program):
    """The keyword arguments that the program gives to ``GRPOConfig``."""
    calls = []
    exec(program, {"GRPOConfig": lambda **options: calls.append(options)})
    (options,) = calls
    return options


def read(program):
    """The settings of ``GRPOConfig`` as texts; the last of a key that is set twice, None where it is unknown."""
    parsed = Parsed(readers=READERS)
    python(program, parsed)
    values = {}
    for setting in parsed.settings:
        if setting.scope == "GRPOConfig":
            values[setting.key] = setting.text if setting.literal else None
    return values, bool(parsed.unread)


def same(program):
    values, _ = read(program)
    assert values == {key: str(value) for key, value in executed(program).items()}, program


@pytest.mark.parametrize("name", PROGRAMS)
def test_options_of_a_call(name):
    same(f"{PROGRAMS[name]}\n{CALL}\n")


@pytest.mark.parametrize("name", SUBSCRIPTS)
def test_items_of_a_dictionary(name):
    same(f'{SUBSCRIPTS[name]}\nGRPOConfig(beta=C["beta"], lr=C["lr"])\n')


def test_items_of_a_dictionary_within_another():
    program = 'C = {"rl": {"beta": 0.1, "lr": 2}, "x": 1}\nC.update({"rl": {"beta": 0.2, "lr": 3}})\n'
    same(f'{program}GRPOConfig(beta=C["rl"]["beta"], **{{"lr": C["rl"]["lr"]}})\n')


def drawn(number):
    """A program that builds a dictionary from others and changes it a few times before it is used."""
    draw = random.Random(number)
    keys = ["beta", "lr", "eps"]

    def items():
        return {key: draw.randrange(100) / 4 for key in draw.sample(keys, draw.randint(1, 3))}

    def words():
        return ", ".join(f"{key}={value}" for key, value in items().items())

    lines = [f"base = {items()}"]
    if draw.random() < 0.4:
        lines.append(f"base.update({words()})")
    makers = [lambda: f"{{**base, **{items()}}}", lambda: f"dict({words()})", lambda: f"dict({words()}, **{{'x': 1}})"]
    makers += [lambda: f"{{'x': 2, **base, 'lr': {draw.randrange(9)}}}", lambda: str(items())]
    lines.append(f"options = {draw.choice(makers)()}")
    changes = [
        lambda: f"options.update({words()})",
        lambda: f"options.update({items()})",
        lambda: f"options |= {items()}",
    ]
    changes += [lambda: f"options['{draw.choice(keys)}'] = {draw.randrange(9)}"]
    for _ in range(draw.randint(0, 4)):
        lines.append(draw.choice(changes)())
    lines.append(CALL)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("number", range(60))
def test_drawn_programs(number):
    same(drawn(number))


UNKNOWN = {
    "an item that is added to": 'options = {"beta": 0.1}\noptions["beta"] += 0.1',
    "an update from elsewhere": 'import os\noptions = {"beta": 0.1}\noptions.update(dict(zip(["beta"], [0.5])))',
    "a number that is added to": 'beta = 0.1\nbeta += 0.4\noptions = {"beta": beta}',
    "a text that is added to": 'name = "a"\nname += "b"\noptions = {"beta": name}',
    "a multiplied number": 'beta = 0.1\nbeta *= 4\noptions = {"beta": beta}',
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_read_is_unknown_or_remarked_and_never_another_value(name):
    program = f"{UNKNOWN[name]}\n{CALL}\n"
    values, remarked = read(program)
    real = executed(program)
    assert remarked or values.get("beta") in (None, str(real["beta"])), values
