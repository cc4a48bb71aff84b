"""Procedural arithmetic with written steps: the problems of the pocket policy.

A problem is a chain of additions (or subtractions) such as ``37+45+28=``; its answer is ``110`` and its
demonstration ``37+45=82;82+28=110``, one step after the other. A completion has 8 to 40 characters, and the answer is
the number after its last ``=``.

Whether a problem is held out is a property of its text alone: a tenth of all problems (by hash) is. Training draws from
the other nine tenths, whatever the seed, so the two parts cannot overlap.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kl_comedy.config.validate import option, parse_record
from kl_comedy.data.sources import refuse_unused
from kl_comedy.errors import bad_value
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS

if TYPE_CHECKING:
    from kl_comedy.config.schema import DatasetConfig

HELD_OUT_ONE_IN = 10

TRAIN_LIMIT = 4096
EVAL_LIMIT = 256
"""How many problems a split gives where the config sets no ``limit``."""

_ENUMERATE_BELOW = 20
"""A part with fewer operand tuples than this many per requested problem is enumerated rather than sampled: draws would
repeat the same tuples, and would never end where there are too few."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One kind of problem: ``terms`` operands of ``digits`` digits each, joined by ``sign``."""

    terms: int = 3
    digits: int = 2
    sign: str = "+"

    @property
    def operands(self) -> range:
        """The values an operand takes: no leading zero."""
        return range(10 ** (self.digits - 1), 10**self.digits)

    def text(self, operands: tuple[int, ...]) -> str:
        return self.sign.join(map(str, operands)) + "="

    def admits(self, operands: tuple[int, ...]) -> bool:
        """Subtractions stay at zero or above, so that no answer carries a sign."""
        return self.sign == "+" or operands[0] >= sum(operands[1:])


SPLITS: Mapping[str, Family] = {
    "train": Family(),
    "heldout": Family(),
    "two_terms": Family(terms=2),
    "four_terms": Family(terms=4),
    "three_digits": Family(digits=3),
    "subtraction": Family(sign="-"),
}
"""``train`` and ``heldout`` share a family, which takes options; the others are out of domain. All but ``train`` are
drawn from the held-out half."""


@dataclass
class PocketOptions:
    """Options of the tunable splits."""

    terms: int = option(3, minimum=2, maximum=5)
    digits: int = option(2, minimum=1, maximum=4)


def is_held_out(text: str) -> bool:
    """Whether the problem with this text belongs to the held-out part; a pure function of the text."""
    # blake2b and not hash(), which differs from process to process. Changing it mixes training and held-out problems of
    # stored runs.
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"pocket split").digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def draw(family: Family, *, count: int | None, seed: int, held_out: bool) -> Iterator[tuple[int, ...]]:
    """Yield ``count`` distinct operand tuples of one part (without end and with repeats when None).

    The order depends on the arguments only. Raises ValueError when the part holds fewer than ``count``.
    """
    # The seed holds repr(family): renaming the class or a field would draw other problems for stored configs.
    rng = random.Random(f"{seed}/{family}/{held_out}")
    if count is None:
        # The warm start of the pocket policy draws as long as it trains.
        while True:
            operands = _random_operands(family, rng)
            if _is_wanted(family, operands, held_out):
                yield operands

    # Only one random tuple in ten is held out.
    share = 1
    if held_out:
        share = HELD_OUT_ONE_IN
    if len(family.operands) ** family.terms < _ENUMERATE_BELOW * share * count:
        everything = []
        for operands in itertools.product(family.operands, repeat=family.terms):
            if _is_wanted(family, operands, held_out):
                everything.append(operands)
        if len(everything) < count:
            raise ValueError(f"only {len(everything)} such problems exist")
        yield from rng.sample(everything, count)
        return

    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < count:
        operands = _random_operands(family, rng)
        if operands not in drawn and _is_wanted(family, operands, held_out):
            drawn.add(operands)
            yield operands


def _random_operands(family: Family, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(family.operands) for _ in range(family.terms))


def _is_wanted(family: Family, operands: tuple[int, ...], held_out: bool) -> bool:
    return family.admits(operands) and is_held_out(family.text(operands)) == held_out


def make_problem(family: Family, operands: tuple[int, ...]) -> Problem:
    """The problem that asks for ``operands`` to be chained."""
    text = family.text(operands)
    answer = steps(text)[-1][1]
    meta = {"terms": family.terms, "digits": family.digits, "sign": family.sign}
    return Problem(id=f"pocket/{text[:-1]}", text=text, answer=str(answer), meta=meta)


def steps(text: str) -> list[tuple[str, int]]:
    """The chain of ``text`` as (left side, result) pairs, from left to right.

    >>> steps("37+45+28=")
    [('37+45', 82), ('82+28', 110)]
    """
    # Anything else would give a wrong chain and no error.
    if not re.fullmatch(r"[0-9]+([+-][0-9]+)+=", text):
        raise ValueError(f"not a pocket problem: {text!r}")
    terms = re.findall(r"[+-]?\d+", text)
    total = int(terms[0])
    chain = []
    for term in terms[1:]:
        left = f"{total}{term}"
        total += int(term)
        chain.append((left, total))
    return chain


def write_steps(chain: list[tuple[str, int]]) -> str:
    """A chain as the characters of a completion.

    >>> write_steps([("37+45", 82), ("82+28", 110)])
    '37+45=82;82+28=110'
    """
    return ";".join(f"{left}={result}" for left, result in chain)


def write_calls(chain: list[tuple[str, int]]) -> list[tuple[str, bool]]:
    """A chain as a dialogue with the environment ``calculator``: text, and whether the policy writes it.

    >>> write_calls([("37+45", 82), ("82+28", 110)])
    [('37+45==', True), ('82;', False), ('82+28==', True), ('110;', False), ('110', True)]
    """
    dialogue = []
    result = chain[0][1]
    for left, result in chain:
        dialogue.append((f"{left}==", True))
        dialogue.append((f"{result};", False))
    dialogue.append((str(result), True))
    return dialogue


def _check_settings(config: DatasetConfig, *, key: str) -> None:
    refuse_unused(config, "name", "path", "subset", "fields", key=key)


@DATASETS.register("pocket", source="procedural; kl_comedy.data.pocket", splits=tuple(SPLITS), check=_check_settings)
def pocket_problems(config: DatasetConfig, *, key: str) -> list[Problem]:
    """Chains of additions or subtractions with two-digit terms; out-of-domain splits are harder.

    ``split`` is one of :data:`SPLITS` (default train), ``limit`` the count (default 4096 for train, else
    256), ``seed`` the draw. Options for train and heldout: ``terms`` (2 to 5), ``digits`` (1 to 4).
    Raises UserError for an unknown split or option, a value out of range, or a limit beyond what exists.
    """
    _check_settings(config, key=key)
    name = "train" if config.split is None else config.split
    if name not in SPLITS:
        raise bad_value(f"{key}.split", name, SPLITS)
    family = SPLITS[name]
    held_out = name != "train"
    if name in ("train", "heldout"):
        tuned = parse_record(PocketOptions, config.options, key=f"{key}.options")
        family = replace(family, terms=tuned.terms, digits=tuned.digits)
    elif config.options:
        raise bad_value(f"{key}.options", config.options, "nothing", why=f"split {name} is fixed")
    count = config.limit
    if count is None:
        count = EVAL_LIMIT if held_out else TRAIN_LIMIT
    try:
        drawn = list(draw(family, count=count, seed=config.seed, held_out=held_out))
    except ValueError as error:
        raise bad_value(f"{key}.limit", count, "a smaller count", why=str(error)) from None
    return [make_problem(family, operands) for operands in drawn]
