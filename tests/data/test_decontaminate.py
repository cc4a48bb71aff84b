"""Decontamination: what counts as the same problem, and what is reported."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kl_comedy.data import decontaminate, normalize
from kl_comedy.errors import UserError
from kl_comedy.records import Problem


def problem(text, **meta):
    return Problem(id=text, text=text, answer="0", meta=meta)


SAME = [
    ("What is $x$, if $x^2 = 4$?", "what is x if  x^{2}=4"),
    ("4 - 1 =", "4-1= ?"),
    ("Calculate $4 - 1$.", "Calculate 4 \N{MINUS SIGN} 1"),
    ("1,000 + 2 =", "1000+2="),
    ("2^{10} + 1", "2^10 + 1"),
    ("a half-truth, told twice", "A half truth told twice."),
    ("3 \N{MULTIPLICATION SIGN} 4", "3 * 4"),
    ("\N{LATIN SMALL LIGATURE FI}ve cats", "five cats"),
    (
        "roots of $z^4 - z^2 + 1 = 0$",
        "roots of $z^4 + z^2 + 1 = 0$",
    ),  # outside arithmetic signs are dropped
]
DIFFERENT = [
    ("4 - 1 =", "4 + 1 ="),
    (
        "The answer to the following arithmetic problem: 4 - 1 =",
        "The answer to the following arithmetic problem: 4 + 1 =",
    ),
    ("-4 + 1 =", "4 + 1 ="),
    ("2 - -1", "2 - 1"),
    ("3.5 + 1", "35 + 1"),
    ("88 / (4 / 2)", "88 / 4 / 2"),
    ("12 + 3 =", "1 + 23 ="),
    ("37+45+28=", "37+45-28="),
    ("2 < 3", "2 > 3"),
    ("两个苹果", "三个苹果"),
    ("?!", "!?"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_decoration_does_not_hide_a_copy(one, other):
    assert normalize(one) == normalize(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_problems_stay_different(one, other):
    assert normalize(one) != normalize(other)


@given(st.text(max_size=60))
def test_normalizing_ignores_case_of_ascii_and_outer_space(text):
    assert normalize(f"  {text}\n") == normalize(text)
    letters = "".join(char for char in text if char.isascii())
    assert normalize(letters.upper()) == normalize(letters.lower())


CHAIN = st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(0, 999)), min_size=1, max_size=4)


@given(CHAIN, CHAIN)
def test_arithmetic_is_the_same_only_when_written_the_same(one, other):
    def write(chain, space):
        return "7" + "".join(f"{space}{sign}{space}{n}" for sign, n in chain)

    assert normalize(write(one, " ") + " =") == normalize(write(one, "") + "=?")
    assume(one != other)
    assert normalize(write(one, " ")) != normalize(write(other, " "))


TRAIN = [problem(text) for text in ("4 - 1 =", "4 + 1 =", "2 + 2 =", "9 - 9 =")]
EVALS = {"a": [problem("4-1=")], "b": [problem("4 -1"), problem("9-9")], "none": [problem("1+1")]}


def test_counts_are_per_evaluation_set_and_order_is_kept():
    clean, counts = decontaminate(TRAIN, EVALS)
    assert [kept.text for kept in clean] == ["4 + 1 =", "2 + 2 ="]
    assert counts == {"a": 1, "b": 2, "none": 0}


def test_without_evaluation_sets_nothing_is_taken_away():
    assert decontaminate(TRAIN, {}) == (TRAIN, {})


def test_no_problems_stay_none():
    assert decontaminate([], EVALS) == ([], {"a": 0, "b": 0, "none": 0})


def test_taking_every_problem_away_is_refused():
    with pytest.raises(UserError, match=r"each of the 1 problems .*held: 1.*data\.decontaminate=false"):
        decontaminate([problem("1 + 1")], {"held": [problem("1+1")], "other": []})


def test_a_task_is_recognised_by_its_own_question_however_it_is_asked():
    entry = {"question": "State the final answer to the following arithmetic problem: 4 - 1 =", "answer": "3"}
    train = [problem("4 - 1 =", entry=entry), problem("5 - 1 =")]
    clean, counts = decontaminate(train, {"gym": [problem(entry["question"], entry=entry)]})
    assert [kept.text for kept in clean] == ["5 - 1 ="]
    assert counts == {"gym": 1}
