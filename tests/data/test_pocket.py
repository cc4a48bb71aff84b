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
    first, *others = values
    if sign == "+":
        answer = first + sum(others)
    else:
        answer = first - sum(others)
    chain = steps(sign.join(map(str, values)) + "=")
    _, last_result = chain[-1]
    assert last_result == answer
    first_left, _ = chain[0]
    assert first_left.startswith(str(first))
    for (_, result_before), (left, _) in itertools.pairwise(chain):
        assert left.startswith(str(result_before)), "a step begins with the result before it"


@pytest.mark.parametrize("text", ["", "=", "12=", "1+2", "1*2=", "1+2=3", "1+-2=", "１+2=x", "__import__('os')="])
def test_what_is_no_problem_has_no_steps(text):
    with pytest.raises(ValueError, match="not a pocket problem"):
        steps(text)


def test_the_registry_lists_the_splits():
    assert set(DATASETS.get("pocket").row()["splits"]) == set(SPLITS)


@pytest.fixture(scope="module", params=SPLITS)
def split_and_problems(request):
    return request.param, load(request.param)


def test_a_split_gives_its_count_of_distinct_problems(split_and_problems):
    split, problems = split_and_problems
    count = EVAL_LIMIT
    if split == "train":
        count = TRAIN_LIMIT
    assert len(problems) == count
    assert len({problem.id for problem in problems}) == count
    assert len({problem.text for problem in problems}) == count


def test_the_written_steps_of_a_problem_end_with_its_answer(split_and_problems):
    _, problems = split_and_problems
    for problem in problems:
        written = write_steps(steps(problem.text))
        assert 8 <= len(written) <= 40, problem.text
        assert problem.answer.isdigit(), problem.text
        assert written.endswith(f"={problem.answer}"), problem.text


def test_only_problems_of_the_train_split_are_not_held_out(split_and_problems):
    split, problems = split_and_problems
    for problem in problems:
        assert is_held_out(problem.text) == (split != "train"), problem.text


@pytest.mark.parametrize(("appended", "value"), [("", 1.0), ("1", 0.0)], ids=["right", "wrong"])
def test_the_problems_are_verifiable(split_and_problems, appended, value):
    _, problems = split_and_problems
    completions = [write_steps(steps(problem.text)) + appended for problem in problems[:20]]
    answers = [problem.answer for problem in problems[:20]]
    rewards = score("exact_answer", completions=completions, answers=answers)
    assert {reward.value for reward in rewards} == {value}
    assert {reward.status for reward in rewards} == {"ok"}


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(1, 3), st.sampled_from("+-"), st.integers(0, 10**9), st.integers(0, 10**9))
def test_halves_are_disjoint_whatever_the_seeds(terms, digits, sign, seed, other_seed):
    family = Family(terms=terms, digits=digits, sign=sign)
    if len(family.operands) ** terms < 5000:
        return  # too few problems for 60 of them
    train = set(draw(family, count=60, seed=seed, held_out=False))
    held_out = set(draw(family, count=3, seed=other_seed, held_out=True))
    assert len(train) == 60
    assert len(held_out) == 3
    assert train & held_out == set()


def test_the_two_halves_together_are_all_problems():
    family = Family(terms=2, digits=1)
    pairs = set(itertools.product(range(1, 10), repeat=2))
    held_out_count = sum(is_held_out(family.text(pair)) for pair in pairs)
    train = set(draw(family, count=81 - held_out_count, seed=0, held_out=False))
    held_out = set(draw(family, count=held_out_count, seed=0, held_out=True))
    assert train | held_out == pairs
    assert 0.05 < held_out_count / 81 < 0.2, "about a tenth"


@pytest.mark.parametrize(("count", "held_out"), [(500, True), (50, False), (5, True), (750, False)])
def test_a_draw_repeats_nothing_whether_it_is_listed_or_sampled(count, held_out):
    """Many of few problems are taken from a list of all, few of many are sampled."""
    drawn = list(draw(Family(terms=2), count=count, seed=3, held_out=held_out))
    assert len(drawn) == count
    assert len(set(drawn)) == count
    for values in drawn:
        assert min(values) >= 10, "two digits"
        assert max(values) <= 99


def test_the_seed_decides_the_draw():
    assert load(limit=50, seed=1) == load(limit=50, seed=1)
    assert load(limit=50, seed=1) != load(limit=50, seed=2)


@pytest.mark.parametrize("split", ["train", "subtraction"])
def test_another_process_with_other_hashes_draws_the_same(split):
    code = (
        "from kl_comedy.config.schema import DatasetConfig\n"
        "from kl_comedy.data.pocket import pocket_problems\n"
        f"problems = pocket_problems(DatasetConfig(split={split!r}, limit=5), key='data')\n"
        "print([problem.text for problem in problems])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert output.stdout.strip() == str([problem.text for problem in load(split, limit=5)])


def test_options_change_the_family_of_tunable_splits():
    """Four terms of one digit, as 1+2+3+4=."""
    for problem in load("heldout", limit=9, options={"terms": 4, "digits": 1}):
        assert len(problem.text) == 8
        assert problem.text.count("+") == 3


def test_the_answer_of_a_problem_is_its_sum():
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


@pytest.mark.parametrize(("fields", "words"), MISTAKES, ids=[str(fields) for fields, _ in MISTAKES])
def test_a_mistake_is_named(fields, words):
    with pytest.raises(UserError) as error:
        load(**fields)
    for word in words:
        assert word in str(error.value)
