"""The pocket problems: right answers, disjoint halves, the same draw everywhere, one clear error per mistake."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data.pocket import (
    EVAL_LIMIT,
    SPLITS,
    TRAIN_LIMIT,
    Family,
    demonstration,
    draw,
    is_held_out,
    make_problem,
    pocket_problems,
    steps,
)
from kl_comedy.errors import UserError
from kl_comedy.registry import DATASETS


def load(split=None, **fields):
    return pocket_problems(DatasetConfig(split=split, **fields), key="data.x")


operands = st.lists(st.integers(1, 9999), min_size=2, max_size=5)


@given(operands, st.sampled_from("+-"))
def test_the_steps_chain_to_the_answer(values, sign):
    text = sign.join(map(str, values)) + "="
    expected = values[0] + sum(values[1:]) if sign == "+" else values[0] - sum(values[1:])
    chain = steps(text)
    assert [right for _, right in chain][-1] == expected
    assert chain[0][0].startswith(str(values[0]))
    for (_, before), (left, _) in itertools.pairwise(chain):
        assert left.startswith(str(before)), "a step goes on from the result before it"


@pytest.mark.parametrize("text", ["", "=", "12=", "1+2", "1*2=", "1+2=3", "1+-2=", "１+2=x", "__import__('os')="])
def test_what_is_no_problem_has_no_steps(text):
    with pytest.raises(ValueError, match="not a pocket problem"):
        steps(text)


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_gives_its_count_of_distinct_verifiable_problems(split):
    problems = load(split)
    assert len(problems) == (TRAIN_LIMIT if split == "train" else EVAL_LIMIT)
    assert len({p.id for p in problems}) == len({p.text for p in problems}) == len(problems)
    for problem in problems:
        left, sep, right = demonstration(problem).rpartition("=")
        assert (right, sep) == (problem.answer, "=") and left
        assert 8 <= len(demonstration(problem)) <= 40
        assert problem.answer.isdigit()
        assert is_held_out(problem.text) == (split != "train")


def test_demonstrations_are_verified_by_the_reward_they_are_meant_for():
    from kl_comedy.rewards import score

    problems = [problem for split in SPLITS for problem in load(split, limit=20)]
    right = score(
        "exact_answer", completions=[demonstration(p) for p in problems], answers=[p.answer for p in problems]
    )
    assert {(reward.value, reward.status) for reward in right} == {(1.0, "ok")}
    wrong = score(
        "exact_answer", completions=[demonstration(p) + "1" for p in problems], answers=[p.answer for p in problems]
    )
    assert {(reward.value, reward.status) for reward in wrong} == {(0.0, "ok")}


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from("+-"), st.integers(0, 10**9), st.integers(0, 10**9))
def test_halves_are_disjoint_whatever_the_seeds(terms, digits, sign, seed, other_seed):
    family = Family(terms=terms, digits=digits, sign=sign)
    if family.size < 5000:
        return
    train = set(draw(family, count=60, seed=seed, held_out=False))
    held = set(draw(family, count=3, seed=other_seed, held_out=True))
    assert len(train) == 60 and len(held) == 3 and not train & held


def test_the_two_halves_together_are_all_problems():
    family = Family(terms=2, digits=1)
    held = sum(is_held_out(family.text((a, b))) for a in range(1, 10) for b in range(1, 10))
    halves = [set(draw(family, count=n, seed=0, held_out=h)) for n, h in ((81 - held, False), (held, True))]
    assert halves[0] | halves[1] == {(a, b) for a in range(1, 10) for b in range(1, 10)}
    assert 0.05 < held / 81 < 0.2


@pytest.mark.parametrize(("count", "held_out"), [(2000, True), (200, False), (20, True), (3000, False)])
def test_listing_and_sampling_agree_on_what_a_draw_is(count, held_out):
    drawn = list(draw(Family(terms=2), count=count // 4, seed=3, held_out=held_out))
    assert len(set(drawn)) == len(drawn) == count // 4
    assert all(10 <= value <= 99 for values in drawn for value in values)


def test_the_seed_decides_the_draw():
    assert load(limit=50, seed=1) == load(limit=50, seed=1)
    assert load(limit=50, seed=1) != load(limit=50, seed=2)


def test_the_draw_does_not_depend_on_the_hash_seed():
    code = (
        "from kl_comedy.config.schema import DatasetConfig as D\n"
        "from kl_comedy.data.pocket import pocket_problems as p\n"
        "print([x.text for s in ('train', 'subtraction') for x in p(D(split=s, limit=5), key='k')])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {str([x.text for s in ("train", "subtraction") for x in load(s, limit=5)]).encode() + b"\n"}


def test_options_change_the_family_of_tunable_splits():
    problems = load("heldout", limit=9, options={"terms": 4, "digits": 1})
    assert all(len(p.text) == 8 and p.text.count("+") == 3 for p in problems)
    assert make_problem(Family(terms=4, digits=1), (1, 2, 3, 4)).answer == "10"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"split": "held_out"}, ["data.x.split", "'held_out'", "did you mean 'heldout'"]),
        ({"split": "test"}, ["data.x.split", "'test'", "train, heldout"]),
        ({"split": "four_terms", "options": {"terms": 2}}, ["data.x.options", "four_terms is fixed"]),
        ({"options": {"term": 2}}, ["data.x.options.term", "terms, digits"]),
        ({"options": {"terms": 9}}, ["data.x.options.terms", "9", "at most 5"]),
        ({"options": {"digits": "2"}}, ["data.x.options.digits", "'2'", "a whole number"]),
        ({"options": {"digits": True}}, ["data.x.options.digits", "True"]),
        ({"split": "heldout", "limit": 5000, "options": {"terms": 2}}, ["data.x.limit", "5000", "exist"]),
        ({"path": "a.jsonl"}, ["data.x.path", "'a.jsonl'", "procedural"]),
        ({"fields": {"text": "q"}}, ["data.x.fields", "procedural"]),
    ],
)
def test_a_mistake_is_named(fields, words):
    with pytest.raises(UserError) as caught:
        load(**fields)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_registered():
    assert DATASETS.get("pocket").fn is pocket_problems
    assert set(DATASETS.get("pocket").row()["splits"]) == set(SPLITS)
