"""reasoning-gym's scorers: oracle answers count, parts of answers do not, and no answer is run as code."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.rewards import RewardPool, gym, score
from kl_comedy.rewards.gym import evaluates, is_expression, is_plain

factory = pytest.importorskip("reasoning_gym.factory")
TASKS = ["chain_sum", "products", "gcd", "letter_counting", "basic_arithmetic", "spell_backward", "number_sorting"]
EVALUATING = [
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24"),
    *("simple_integration", "spiral_matrix", "string_insertion"),
]
TUPLES = ["arc_agi", "rearc"]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(workers=1) as pool:
        yield pool


def entries(task: str, size: int) -> list[dict[str, Any]]:
    build, settings = factory.DATASETS[task]
    return [dict(entry) for entry in build(config=settings(seed=5, size=size))]


def judge(pool: RewardPool, task: str, completions: list[str], items: list[Any], **options: Any) -> Any:
    metas = [{"task": task, "entry": entry} for entry in items]
    answers = [str(entry["answer"]) for entry in items]
    rewards = score("reasoning_gym", completions=completions, answers=answers, metas=metas, pool=pool, **options)
    return [(reward.value, reward.status) for reward in rewards]


@pytest.mark.parametrize("task", [*TASKS, *EVALUATING, *TUPLES])
def test_oracle_answers_are_right_and_empty_ones_unparseable(pool: RewardPool, task: str) -> None:
    items = entries(task, 3)
    assert judge(pool, task, [f" {entry['answer']}\n" for entry in items], items) == [(1.0, "ok")] * 3
    assert judge(pool, task, ["", " ", "\n"], items) == [(0.0, "unparseable")] * 3


def test_a_partial_score_counts_only_when_asked_for(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    with pytest.raises(UserError, match="did you mean 'chain_sum'"):
        judge(pool, "chain_sums", ["3"], items)
    with pytest.raises(UserError, match="needs problems of the dataset reasoning_gym"):
        score("reasoning_gym", completions=["3"], answers=["3"], pool=pool)
    text = f"I believe the result is {items[0]['answer']}"
    assert judge(pool, "chain_sum", [text], items) == [(0.0, "ok")]
    ((partial, _),) = judge(pool, "chain_sum", [text], items, partial=True)
    assert 0.0 < partial < 0.99
    assert judge(pool, "chain_sum", [text], items, solved_at=partial) == [(1.0, "ok")]


def test_the_part_that_counts_is_an_option(pool: RewardPool) -> None:
    items = entries("chain_sum", 1)
    answer = items[0]["answer"]
    for part, text in (
        ("first_line", f"{answer}\n4 - 1 = 3"),
        ("last_line", f"Let me see.\n{answer}"),
        ("answer_tag", f"<answer>1</answer> no, <answer> {answer} </answer>"),
    ):
        assert judge(pool, "chain_sum", [text], items) == [(0.0, "ok")]
        assert judge(pool, "chain_sum", [text], items, part=part) == [(1.0, "ok")]
    assert judge(pool, "chain_sum", [answer], items, part="answer_tag") == [(0.0, "unparseable")]


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
    *(
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
    ),
    *("0.2[1]", "5!", "5!!", "open!", "x.y", "x. y", "1 .real", "[1][0]", "x if x else x", "not open", "open and open"),
    *("lambda: 0", "lambda x: x", "await x", "yield 1", "*x", "**x", "x = 1", "x: int", "1; 2", "True", "None", "exp"),
    *(
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
    ),
    *("...", "S", "exp=open", "x == 1", "1 < 2", "x @ x", "~1", "1 | 2", "1 << 99", "__name__", "x__y", "\u0661+1"),
    *("-" * 5_000 + "1", "(" * 5_000 + "1" + ")" * 5_000, "[" * 5_000 + "]" * 5_000, "1+" * 9_000 + "1", "9" * 9_000),
    *("\x00", "1\x00", "\ud800", "\\", "#", "1#", "`1`", "$x$", "?", "<b>", "a\tb", "1\n2", "print ('x')"),
]


@pytest.mark.parametrize("task", EVALUATING)
def test_answers_are_never_run_as_code(pool: RewardPool, task: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    attacks = code(str(mark))
    (item,) = entries(task, 1)
    outcomes = judge(pool, task, [*attacks, *ODD, str(item["answer"])], [item] * (len(attacks) + len(ODD) + 1))
    assert not mark.exists()
    assert outcomes[-1] == (1.0, "ok")
    odd = zip([*attacks, *ODD], outcomes, strict=False)
    assert [text for text, outcome in odd if outcome not in ((0.0, "refused"), (0.0, "ok"))] == []
    assert all(status == "refused" for _, status in outcomes[:20])
    assert not any(map(is_expression, attacks))


def test_the_attacks_are_attacks(tmp_path: Path) -> None:
    """Most of them do make the file when they are evaluated, so that the tests above can fail."""
    working = 0
    for number, attack in enumerate(code(str(tmp_path / "mark"))):
        script = tmp_path / f"{number}.py"
        script.write_text(f"eval({attack!r})")
    for script in tmp_path.glob("*.py"):
        (tmp_path / "mark").unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            exec(compile(script.read_text(), str(script), "exec"), {"exp": None, "sin": None, "abs": abs, "sqrt": None})
        working += (tmp_path / "mark").exists()
    assert working >= 20


def test_a_scorer_that_evaluates_runs_in_a_process_of_its_own(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does to its process is gone; what it does to the pool is a verdict."""
    (item,) = entries("countdown", 1)
    meta = {"task": "countdown", "entry": item}
    pids = []

    def scorer(given: str, entry: object) -> float:
        if given == "1+1":
            sys.modules["kl_comedy.rewards.gym"].CALLABLE = ()
        if given == "2+2":
            os._exit(7)
        if given == "3+3":
            raise SystemExit
        if given == "4+4":
            raise MemoryError
        return float(os.getpid() != pids[0])

    monkeypatch.setattr(type(gym._task("countdown")), "score_answer", lambda self, *words: scorer(*words))
    pids.append(os.getpid())
    assert gym.reasoning_gym("1+1", "", meta).value == 1.0 and gym.CALLABLE
    for text in ("2+2", "3+3"):
        with pytest.raises(RunFailed, match="the process that scored the answer ended"):
            gym.reasoning_gym(text, "", meta)
    with pytest.raises(MemoryError):
        gym.reasoning_gym("4+4", "", meta)


def test_every_task_that_can_evaluate_is_known() -> None:
    """With another version of reasoning_gym: read the scorer, and add the task where it belongs."""
    tasks = {name for name, (build, _) in factory.DATASETS.items() if evaluates(build)}
    assert tasks == {*gym.LISTS, *gym.EXPRESSIONS, *gym.OWN_TEXT}
    assert set(EVALUATING) == {*gym.LISTS, *gym.EXPRESSIONS}


def test_a_scorer_that_only_looks_as_if_it_evaluated_is_not_held_to_the_grammar() -> None:
    class Task:
        def score_answer(self, answer: str, entry: object) -> float:
            return float(re.compile(answer).match("eval") is not None and self.eval(answer))

        def eval(self, answer: str) -> bool:
            return len(answer) > 2

    class Evaluating(Task):
        def eval(self, answer: str) -> bool:
            return [eval(part) for part in answer]

    assert not evaluates(Task) and evaluates(Evaluating)
    assert not evaluates(factory.DATASETS["codeio"][0]) and not evaluates(factory.DATASETS["advanced_geometry"][0])
    assert evaluates(factory.DATASETS["n_queens"][0]) and evaluates(factory.DATASETS["puzzle24"][0])


def test_lists_are_parsed_and_compared(pool: RewardPool) -> None:
    """The scorers give part of the score to the right list written as Python writes it."""
    for task, partial in (("binary_matrix", 0.1), ("n_queens", 0.5), ("spiral_matrix", 0.1), ("string_insertion", 0.1)):
        (item,) = entries(task, 1)
        answer = str(item["answer"])
        text = repr(list(answer)) if task == "string_insertion" else repr([row.split() for row in answer.splitlines()])
        text = repr(answer.split()) if task == "spiral_matrix" else text
        assert judge(pool, task, [text], [item], partial=True) == [(partial, "ok")], task


def test_words_are_wrong_and_not_refused(pool: RewardPool) -> None:
    """Refused answers are left out of preferences, so an answer in words must not be one."""
    for task, worth in (("countdown", 0.01), ("puzzle24", 0.01), ("simple_integration", 0.0), ("n_queens", 0.0)):
        items = entries(task, 1) * 4
        words = ["I do not know", "The answer is 24!", "3 + 4 = 7", "7, 8 and 9"]
        assert judge(pool, task, words, items, partial=True) == [(worth, "ok")] * 4, task


PLAIN = ["x**2 + 3*x*(y - 1)", "-cos(2*x)/2 + C", "[[1, 2], [3, 4]]", "[['Q', '_']]", "Q _ _\n_ _ Q", "1.5*(2 + 3)"]
CODE = ["open('x')", "cosopen('x')", "x.y", "x. y", "3*(open)('x')", "[open][0]('x')", "open\\\n('x')", "print ('x')"]
CODE += ["f'{open(1)}'", "[*open]", "{open:1}", "'a'*10**10", "(x := 1)", "[x for x in [1]]", "=(open)"]
EXPRESSION = [
    "x**2 + 3*x*(y - 1)",
    "-cos(2*x)/2 + C",
    "1.5*(2 + 3)",
    "2*x^3/sqrt(pi)",
    "exp(-x)*log(x)",
    "Rational(1, 3)",
]
NO_EXPRESSION = [*CODE, *ODD, "[[1, 2]]", "Q _ _", "exp (open)", "12*2 = 24", "sin", "sin(cos)", "Integer(1)", "f(x)"]


def test_the_grammar_of_evaluated_answers() -> None:
    assert [text for text in [*PLAIN, *CODE] if is_plain(text)] == PLAIN
    assert [text for text in [*EXPRESSION, *NO_EXPRESSION] if is_expression(text)] == EXPRESSION


ANSWERED = sorted(name for name in factory.DATASETS if name not in ("composite", *TASKS, *EVALUATING, *TUPLES))
WITHOUT_ANSWERS = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Tasks whose entries have no right answer to compare with."""


def check_own_answers(pool: RewardPool, tasks: list[str], size: int) -> None:
    for task in tasks:
        items = [item for item in entries(task, size) if item["answer"] is not None]
        assert items or task in WITHOUT_ANSWERS, task
        outcomes = judge(pool, task, [str(item["answer"]) for item in items], items, timeout_s=20)
        assert outcomes == [(1.0, "ok")] * len(items), task


def test_the_own_answers_of_other_tasks_are_right(pool: RewardPool) -> None:
    check_own_answers(pool, ["advanced_geometry", "codeio", "polynomial_equations", "bitwise_arithmetic"], 3)


@pytest.mark.slow
def test_the_own_answers_of_every_task_are_right(pool: RewardPool) -> None:
    check_own_answers(pool, [*ANSWERED, *TASKS, *EVALUATING, *TUPLES], 12)
