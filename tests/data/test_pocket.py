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
    draw,
    is_held_out,
    make_problem,
    pocket_problems,
    steps,
    write_steps,
)
from kl_comedy.errors import UserError
from kl_comedy.registry import DATASETS
from kl_comedy.rewards import score


def load(split=None, **fields):
    return pocket_problems(DatasetConfig(split=split, **fields), key="data.x")


@given(st.lists(st.integers(1, 9999), min_size=2, max_size=5), st.sampled_from("+-"))
def test_the_steps_chain_to_the_answer(values, sign):
    chain = steps(sign.join(map(str, values)) + "=")
    assert chain[-1][1] == (sum(values) if sign == "+" else 2 * values[0] - sum(values))
    assert chain[0][0].startswith(str(values[0]))
    for (_, before), (left, _) in itertools.pairwise(chain):
        assert left.startswith(str(before)), "a step begins with the result before it"


def test_what_is_no_problem_has_no_steps():
    for text in ("", "=", "12=", "1+2", "1*2=", "1+2=3", "1+-2=", "１+2=x", "__import__('os')="):
        with pytest.raises(ValueError, match="not a pocket problem"):
            steps(text)


def test_every_split_gives_its_count_of_distinct_verifiable_problems():
    assert set(DATASETS.get("pocket").row()["splits"]) == set(SPLITS)
    for split in SPLITS:
        problems = load(split)
        assert len(problems) == (TRAIN_LIMIT if split == "train" else EVAL_LIMIT)
        assert len({p.id for p in problems}) == len({p.text for p in problems}) == len(problems)
        texts, golds = [write_steps(steps(p.text)) for p in problems], [p.answer for p in problems]
        for problem, text in zip(problems, texts, strict=True):
            assert 8 <= len(text) <= 40 and problem.answer.isdigit() and text.endswith(f"={problem.answer}")
            assert is_held_out(problem.text) == (split != "train")
        right = score("exact_answer", completions=texts[:20], answers=golds[:20])
        wrong = score("exact_answer", completions=[text + "1" for text in texts[:20]], answers=golds[:20])
        assert {(r.value, r.status) for r in right} == {(1.0, "ok")}
        assert {(r.value, r.status) for r in wrong} == {(0.0, "ok")}


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from("+-"), st.integers(0, 10**9), st.integers(0, 10**9))
def test_halves_are_disjoint_whatever_the_seeds(terms, digits, sign, seed, other_seed):
    family = Family(terms=terms, digits=digits, sign=sign)
    if len(family.operands) ** terms < 5000:
        return
    train = set(draw(family, count=60, seed=seed, held_out=False))
    held_out = set(draw(family, count=3, seed=other_seed, held_out=True))
    assert len(train) == 60 and len(held_out) == 3 and not train & held_out


def test_the_two_halves_together_are_all_problems():
    family, pairs = Family(terms=2, digits=1), set(itertools.product(range(1, 10), repeat=2))
    count = sum(is_held_out(family.text(pair)) for pair in pairs)
    halves = [set(draw(family, count=n, seed=0, held_out=h)) for n, h in ((81 - count, False), (count, True))]
    assert halves[0] | halves[1] == pairs and 0.05 < count / 81 < 0.2
    for count, held_out in ((500, True), (50, False), (5, True), (750, False)):  # listed or sampled
        drawn = list(draw(Family(terms=2), count=count, seed=3, held_out=held_out))
        assert len(set(drawn)) == len(drawn) == count
        assert all(10 <= value <= 99 for values in drawn for value in values)


def test_the_seed_alone_decides_the_draw():
    assert load(limit=50, seed=1) == load(limit=50, seed=1) != load(limit=50, seed=2)
    code = (
        "from kl_comedy.config.schema import DatasetConfig as D\n"
        "from kl_comedy.data.pocket import pocket_problems as p\n"
        "print([x.text for s in ('train', 'subtraction') for x in p(D(split=s, limit=5), key='k')])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str([p.text for s in ("train", "subtraction") for p in load(s, limit=5)])


def test_options_change_the_family_of_tunable_splits():
    problems = load("heldout", limit=9, options={"terms": 4, "digits": 1})
    assert all(len(p.text) == 8 and p.text.count("+") == 3 for p in problems)
    assert make_problem(Family(terms=4, digits=1), (1, 2, 3, 4)).answer == "10"


MISTAKES = [
    ({"split": "held_out"}, ["data.x.split", "'held_out'", "did you mean 'heldout'"]),
    ({"split": "test"}, ["data.x.split", "'test'", "train, heldout"]),
    ({"split": "four_terms", "options": {"terms": 2}}, ["data.x.options", "four_terms is fixed"]),
    ({"options": {"term": 2}}, ["data.x.options.term", "terms, digits"]),
    ({"options": {"terms": 9}}, ["data.x.options.terms", "9", "at most 5"]),
    ({"options": {"digits": True}}, ["data.x.options.digits", "True"]),
    ({"split": "heldout", "limit": 5000, "options": {"terms": 2}}, ["data.x.limit", "5000", "exist"]),
    ({"path": "a.jsonl"}, ["data.x.path", "'a.jsonl'", "does not use it"]),
    ({"fields": {"text": "q"}}, ["data.x.fields", "does not use it"]),
]


def test_a_mistake_is_named():
    for fields, words in MISTAKES:
        with pytest.raises(UserError) as caught:
            load(**fields)
        assert all(word in str(caught.value) for word in words), str(caught.value)
