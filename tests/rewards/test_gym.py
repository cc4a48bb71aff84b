"""reasoning-gym's scorers: oracle answers count, parts of answers do not, and no answer is run as code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rewards import RewardPool, gym, score
from kl_comedy.rewards.gym import evaluates, is_expression, is_plain

factory = pytest.importorskip("reasoning_gym.factory")
PLAIN_TASKS = [
    "chain_sum",
    "products",
    "gcd",
    "letter_counting",
    "basic_arithmetic",
    "spell_backward",
    "number_sorting",
]
EVALUATING_TASKS = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]
"""Tasks whose scorers evaluate the answer."""
TUPLE_TASKS = ["arc_agi", "rearc"]
"""Tasks whose entries have tuples, which JSON does not keep."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=1) as pool:
        yield pool


def entries(task: str, size: int) -> list[dict[str, Any]]:
    build, settings = factory.DATASETS[task]
    return [dict(entry) for entry in build(config=settings(seed=5, size=size))]


def judge(pool: RewardPool, task: str, completions: list[str], items: list[Any], **options: Any) -> Any:
    """The value and the status of each completion, one per item."""
    metas = [{"task": task, "entry": entry} for entry in items]
    answers = [str(entry["answer"]) for entry in items]
    rewards = score("reasoning_gym", completions=completions, answers=answers, metas=metas, pool=pool, **options)
    return [(reward.value, reward.status) for reward in rewards]


some_tasks = pytest.mark.parametrize("task", [*PLAIN_TASKS, *EVALUATING_TASKS, *TUPLE_TASKS])


@some_tasks
def test_oracle_answers_are_right(pool: RewardPool, task: str) -> None:
    items = entries(task, 3)
    assert judge(pool, task, [f" {entry['answer']}\n" for entry in items], items) == [(1.0, "ok")] * 3


@some_tasks
def test_empty_answers_are_unparseable(pool: RewardPool, task: str) -> None:
    assert judge(pool, task, ["", " ", "\n"], entries(task, 3)) == [(0.0, "unparseable")] * 3


def test_an_unknown_task_is_refused_with_the_nearest(pool: RewardPool) -> None:
    with pytest.raises(UserError, match="did you mean 'chain_sum'"):
        judge(pool, "chain_sums", ["3"], entries("chain_sum", 1))


def test_problems_of_another_dataset_are_refused(pool: RewardPool) -> None:
    with pytest.raises(UserError, match="needs problems of the dataset reasoning_gym"):
        score("reasoning_gym", completions=["3"], answers=["3"], pool=pool)


def test_a_partial_score_counts_only_when_asked_for(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    completion = f"I believe the result is {items[0]['answer']}"
    assert judge(pool, "chain_sum", [completion], items) == [(0.0, "ok")]

    ((partial, _),) = judge(pool, "chain_sum", [completion], items, partial=True)
    assert 0.0 < partial < 0.99
    assert judge(pool, "chain_sum", [completion], items, solved_at=partial) == [(1.0, "ok")]


@pytest.mark.parametrize(
    ("part", "form"),
    [
        ("first_line", "{answer}\n4 - 1 = 3"),
        ("last_line", "Let me see.\n{answer}"),
        ("answer_tag", "<answer>1</answer> no, <answer> {answer} </answer>"),
    ],
)
def test_the_part_that_counts_is_an_option(pool: RewardPool, part: str, form: str) -> None:
    items = entries("chain_sum", 1)
    completion = form.format(answer=items[0]["answer"])
    assert judge(pool, "chain_sum", [completion], items) == [(0.0, "ok")]
    assert judge(pool, "chain_sum", [completion], items, part=part) == [(1.0, "ok")]


def test_without_the_tag_that_counts_an_answer_is_unparseable(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    assert judge(pool, "chain_sum", [items[0]["answer"]], items, part="answer_tag") == [(0.0, "unparseable")]


# --- answers that are code ----------------------------------------------------------------------------------------
def code(mark: str) -> list[str]:
    """Answers that run code where they are evaluated: each would make the file ``mark``."""
    make = f"{mark!r}, 'w'"
    return [
        f"open({make})",
        f"[open({make})]",
        f"__import__('pathlib').Path({mark!r}).touch()",
        f"exec('open({mark!r}, chr(119))')",
        f"(open#\n({make}))",
        f"(lambda: open({make}))()",
        f"(open)({make})",
        f"\uff4fpen({make})",
        f"S('open({mark!r}, 1)')",
        # A name that may be called, bound to something else.
        f"[exp({make}) for exp in [open]]",
        f"{{exp({make}) for exp in [open]}}",
        f"{{1: exp({make}) for exp in [open]}}",
        f"list(exp({make}) for exp in [open])",
        f"[sin for cos in [[open]] for sin in [cos[0]] if sin({make})]",
        f"(exp:=open, exp({make}))",
        f"[(exp:=open), exp({make})]",
        f"[0, (sin := open)({make})]",
        f"sin({make}) if (sin := open) else 0",
        f"[abs({make}) for abs in (open,)][0]",
        f"(lambda exp=open: exp({make}))()",
        # Other ways to call.
        f"[*map(open, [{mark!r}], 'w')]",
        f"[open][0]({make})",
        f"[*open]({make})",
        f"=(open)({make})",
        f"exp (open)({make})",
        f"{{open: 1}}({make})",
        f"(open)\n({make})",
        f"abs(open({make}))",
        f"sqrt(*[open({make})])",
        f"sin(x=open({make}))",
        f"f'{{open({make})}}'",
        f"open({make})!",
        f"2 ** open({make})",
        f"1 if open({make}) else 2",
        f"[1, 2][open({make})]",
        f"'{{0.__class__}}'.format(open({make}))",
        f"Function('open')({make})",
        f"sympify('open({mark!r}, 1)')",
        f"N('open({mark!r}, 1)')",
        f"sqrt('open({mark!r}, 1)')",
        f"exp(\"__import__('os').mknod({mark!r})\")",
        f"Rational('open({mark!r}, 1)')",
    ]


ODD = [
    "[*open]",
    "=(open)",
    "exp (open)",
    "{open:1}",
    "'a'*10**10",
    "10**10**10",
    "[0]*10**10",
    "1e999999999",
    "1j",
    "...",
    "0.2[1]",
    "5!",
    "5!!",
    "open!",
    "x.y",
    "x. y",
    "1 .real",
    "[1][0]",
    "x if x else x",
    "not open",
    "open and open",
    "lambda: 0",
    "lambda x: x",
    "await x",
    "yield 1",
    "*x",
    "**x",
    "x = 1",
    "x: int",
    "1; 2",
    "True",
    "None",
    "exp",
    "f'{x}'",
    "b'x'",
    "'x'",
    '"x',
    "exp(exp(exp(9)))",
    "factorial(10**9)",
    "2**2**40",
    "((9**9)**999)**999",
    "N",
    "S",
    "...",
    "S",
    "exp=open",
    "x == 1",
    "1 < 2",
    "x @ x",
    "~1",
    "1 | 2",
    "1 << 99",
    "__name__",
    "x__y",
    "\u0661+1",
    "-" * 5_000 + "1",
    "(" * 5_000 + "1" + ")" * 5_000,
    "[" * 5_000 + "]" * 5_000,
    "1+" * 9_000 + "1",
    "9" * 9_000,
    "\u0000",
    "1\u0000",
    "\ud800",
    "\\",
    "#",
    "1#",
    "`1`",
    "$x$",
    "?",
    "<b>",
    "a\tb",
    "1\n2",
    "print ('x')",
]
"""Answers at the edges of Python's syntax, large numbers, deep nesting, odd characters."""


@pytest.mark.parametrize("task", EVALUATING_TASKS)
def test_answers_are_never_run_as_code(pool: RewardPool, task: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attacks = code(str(mark))
    hostile = [*attacks, *ODD]
    (item,) = entries(task, 1)
    completions = [*hostile, str(item["answer"])]
    *outcomes, outcome_of_the_answer = judge(pool, task, completions, [item] * len(completions))
    assert not mark.exists()
    assert outcome_of_the_answer == (1.0, "ok")
    for completion, outcome in zip(hostile, outcomes, strict=True):
        assert outcome in ((0.0, "refused"), (0.0, "ok")), completion
    # The first twenty are code under every grammar; some of the others may be read as formulas that are wrong.
    for completion, (_, status) in zip(hostile[:20], outcomes[:20], strict=True):
        assert status == "refused", completion


def test_no_attack_is_an_expression_of_the_grammar(tmp_path: Path) -> None:
    for attack in code(str(tmp_path / "mark")):
        assert not is_expression(attack), attack


def test_the_attacks_are_attacks(tmp_path: Path) -> None:
    """Most of them do make the file when they are evaluated, so that the tests above can fail."""
    mark = tmp_path / "mark"
    working = 0
    for attack in code(str(mark)):
        mark.unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            eval(attack, {"exp": None, "sin": None, "abs": abs, "sqrt": None})
        working += mark.exists()
    assert working >= 20


COUNTDOWN = "countdown"


@pytest.fixture
def countdown_meta(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A problem of countdown, whose scorer does to its process what the answer says."""
    parent = os.getpid()

    def scorer(self: object, answer: str, entry: object) -> float:
        if answer == "1+1":
            sys.modules["kl_comedy.rewards.gym"].CALLABLE = ()
        if answer == "2+2":
            os._exit(7)
        if answer == "3+3":
            raise SystemExit
        if answer == "4+4":
            raise MemoryError
        return float(os.getpid() != parent)

    monkeypatch.setattr(type(gym._task(COUNTDOWN)), "score_answer", scorer)
    (item,) = entries(COUNTDOWN, 1)
    return {"task": COUNTDOWN, "entry": item}


def test_a_scorer_that_evaluates_runs_in_a_process_of_its_own(countdown_meta: dict[str, Any]) -> None:
    assert gym.reasoning_gym("1+1", "", countdown_meta).value == 1.0
    assert gym.CALLABLE, "what the scorer did to its process is gone"


@pytest.mark.parametrize("answer", ["2+2", "3+3"], ids=["it exits", "it raises SystemExit"])
def test_a_scorer_that_ends_its_process_is_reported(countdown_meta: dict[str, Any], answer: str) -> None:
    with pytest.raises(RunFailed, match="the process that scored the answer ended"):
        gym.reasoning_gym(answer, "", countdown_meta)


def test_a_scorer_without_memory_is_reported_to_the_pool(countdown_meta: dict[str, Any]) -> None:
    with pytest.raises(MemoryError):
        gym.reasoning_gym("4+4", "", countdown_meta)


# --- which tasks evaluate -----------------------------------------------------------------------------------------
def test_every_task_that_can_evaluate_is_known() -> None:
    """With another version of reasoning_gym: read the scorer, and add the task where it belongs."""
    tasks = {name for name, (build, _) in factory.DATASETS.items() if evaluates(build)}
    assert tasks == {*gym.LISTS, *gym.EXPRESSIONS, *gym.OWN_TEXT}


def test_the_tasks_that_evaluate_an_answer_are_tested() -> None:
    assert set(EVALUATING_TASKS) == {*gym.LISTS, *gym.EXPRESSIONS}


def task_id(task: Any) -> str:
    return task if isinstance(task, str) else task.__name__


class NotEvaluating:
    """A scorer with the word "eval" in it."""

    def score_answer(self, answer: str, entry: object) -> float:
        return float(re.compile(answer).match("eval") is not None and self.eval(answer))

    def eval(self, answer: str) -> bool:
        return len(answer) > 2


class Evaluating(NotEvaluating):
    def eval(self, answer: str) -> bool:
        return [eval(part) for part in answer]


@pytest.mark.parametrize("task", [NotEvaluating, "codeio", "advanced_geometry"], ids=task_id)
def test_a_scorer_that_only_looks_as_if_it_evaluated_is_not_held_to_the_grammar(task: Any) -> None:
    if isinstance(task, str):
        task, _ = factory.DATASETS[task]
    assert not evaluates(task)


@pytest.mark.parametrize("task", [Evaluating, "n_queens", "puzzle24"], ids=task_id)
def test_a_scorer_that_evaluates_is_found(task: Any) -> None:
    if isinstance(task, str):
        task, _ = factory.DATASETS[task]
    assert evaluates(task)


# --- lists and words ----------------------------------------------------------------------------------------------
def rows_of(answer: str) -> str:
    return repr([row.split() for row in answer.splitlines()])


def words_of(answer: str) -> str:
    return repr(answer.split())


def letters_of(answer: str) -> str:
    return repr(list(answer))


@pytest.mark.parametrize(
    ("task", "as_list", "partial"),
    [
        ("binary_matrix", rows_of, 0.1),
        ("n_queens", rows_of, 0.5),
        ("spiral_matrix", words_of, 0.1),
        ("string_insertion", letters_of, 0.1),
    ],
)
def test_lists_are_parsed_and_compared(
    pool: RewardPool, task: str, as_list: Callable[[str], str], partial: float
) -> None:
    """The scorers give part of the score to the right list written as Python writes it."""
    (item,) = entries(task, 1)
    assert judge(pool, task, [as_list(str(item["answer"]))], [item], partial=True) == [(partial, "ok")]


@pytest.mark.parametrize(
    ("task", "value"), [("countdown", 0.01), ("puzzle24", 0.01), ("simple_integration", 0.0), ("n_queens", 0.0)]
)
def test_words_are_wrong_and_not_refused(pool: RewardPool, task: str, value: float) -> None:
    """Refused answers are left out of preferences, so an answer in words must not be one."""
    texts = ["I do not know", "The answer is 24!", "3 + 4 = 7", "7, 8 and 9"]
    assert judge(pool, task, texts, entries(task, 1) * 4, partial=True) == [(value, "ok")] * 4


# --- the grammar --------------------------------------------------------------------------------------------------
PLAIN = ["x**2 + 3*x*(y - 1)", "-cos(2*x)/2 + C", "[[1, 2], [3, 4]]", "[['Q', '_']]", "Q _ _\n_ _ Q", "1.5*(2 + 3)"]
CODE = [
    "open('x')",
    "cosopen('x')",
    "x.y",
    "x. y",
    "3*(open)('x')",
    "[open][0]('x')",
    "open\\\n('x')",
    "print ('x')",
    "f'{open(1)}'",
    "[*open]",
    "{open:1}",
    "'a'*10**10",
    "(x := 1)",
    "[x for x in [1]]",
    "=(open)",
]
EXPRESSION = [
    "x**2 + 3*x*(y - 1)",
    "-cos(2*x)/2 + C",
    "1.5*(2 + 3)",
    "2*x^3/sqrt(pi)",
    "exp(-x)*log(x)",
    "Rational(1, 3)",
]
NO_EXPRESSION = [*CODE, *ODD, "[[1, 2]]", "Q _ _", "exp (open)", "12*2 = 24", "sin", "sin(cos)", "Integer(1)", "f(x)"]


def test_plain_text_is_told_from_code() -> None:
    assert [text for text in [*PLAIN, *CODE] if is_plain(text)] == PLAIN


def test_expressions_are_told_from_other_text() -> None:
    assert [text for text in [*EXPRESSION, *NO_EXPRESSION] if is_expression(text)] == EXPRESSION


# --- every task ---------------------------------------------------------------------------------------------------
COMPOSED = ["composite"]
"""It has no problems of its own."""
ALL_TASKS = sorted(set(factory.DATASETS).difference(COMPOSED))
WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose entries have no right answer to compare with."""


def check_own_answers(pool: RewardPool, task: str, size: int) -> None:
    items = [item for item in entries(task, size) if item["answer"] is not None]
    assert items or task in WITHOUT_ANSWERS
    outcomes = judge(pool, task, [str(item["answer"]) for item in items], items, timeout_s=20)
    assert outcomes == [(1.0, "ok")] * len(items)


@pytest.mark.parametrize("task", ["advanced_geometry", "codeio", "polynomial_equations", "bitwise_arithmetic"])
def test_the_own_answers_of_other_tasks_are_right(pool: RewardPool, task: str) -> None:
    check_own_answers(pool, task, 3)


@pytest.mark.slow
@pytest.mark.parametrize("task", ALL_TASKS)
def test_the_own_answers_of_every_task_are_right(pool: RewardPool, task: str) -> None:
    check_own_answers(pool, task, 5)
