"""The public sets, where they are at hand: KL_COMEDY_DATA, or a shared/data folder beside the checkout."""

import os
from pathlib import Path

import pytest

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data import data_hash, decontaminate, load_problems
from kl_comedy.errors import UserError

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("KL_COMEDY_DATA") or ROOT.parent / "shared" / "data")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public data files are not here (KL_COMEDY_DATA)")


ROWS = {
    "gsm8k_train": 7473,
    "gsm8k_test": 1319,
    "math_train7500": 7500,
    "math500": 500,
    "aime24": 30,
    "amc23": 40,
    "mmlu_stem_test": 3018,
    "mmlu_stem_dev": 90,
}


def load(name, **settings):
    path = DATA / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not there")
    config = DatasetConfig(dataset="jsonl", path=str(path), **settings)
    return load_problems(config, key="data.train", training=False, allow_test_split=False)


@pytest.mark.parametrize(("name", "rows"), ROWS.items(), ids=ROWS)
def test_every_row_loads_with_the_defaults(name, rows):
    problems = load(name)
    assert len(problems) == rows
    assert [problem.id for problem in problems if not problem.answer] == []


def test_every_row_of_mmlu_has_four_lettered_choices():
    for problem in load("mmlu_stem_test"):
        assert problem.answer in "ABCD", problem.id
        assert problem.text.count("\n(") >= 4, problem.id
        assert len(problem.meta["choices"]) == 4, problem.id


def test_the_fixture_is_the_head_of_the_train_split():
    fixture = DatasetConfig(dataset="jsonl", path=str(ROOT / "tests" / "fixtures" / "gsm8k_32.jsonl"))
    problems = load_problems(fixture, key="x", training=True, allow_test_split=False)
    assert data_hash(problems) == data_hash(load("gsm8k_train", limit=32))


BOXED = {"fields": {"answer": "solution"}, "options": {"answer_boxed": True}}


def test_ids_of_math_are_distinct():
    assert len({problem.id for problem in load("math_train7500")}) == 7500


def test_a_solution_of_math_with_an_empty_box_is_refused():
    """Two solutions have one."""
    with pytest.raises(UserError, match=r"math_train7500\.jsonl:5530: field 'solution' is empty"):
        load("math_train7500", **BOXED)


def test_boxed_answers_agree_with_the_answers_given():
    """But for a few answers that were cleaned by hand."""
    differ = 0
    for boxed, given in zip(load("math500", **BOXED), load("math500"), strict=True):
        differ += boxed.answer != given.answer
    assert differ <= 20


@pytest.fixture(scope="module")
def evaluation_sets():
    return {name: load(name) for name in ("gsm8k_test", "math500", "aime24", "amc23", "mmlu_stem_test")}


def test_a_set_without_an_overlap(evaluation_sets):
    _, counts = decontaminate(load("gsm8k_train"), evaluation_sets)
    assert set(counts.values()) == {0}


def test_questions_with_choices_that_differ_in_punctuation_alone_are_removed(evaluation_sets):
    """`"abc"[::-1]` and `"abc"[-1]`: signs are dropped outside arithmetic, and the choices are not compared.

    Another one is a problem of MATH-500 with choices below it.
    """
    _, counts = decontaminate(load("mmlu_stem_dev"), evaluation_sets)
    assert {name: count for name, count in counts.items() if count} == {"math500": 1, "mmlu_stem_test": 1}


def test_the_overlap_of_math(evaluation_sets):
    """75 questions of MMLU are problems of MATH, with choices put below them."""
    clean, counts = decontaminate(load("math_train7500"), evaluation_sets)
    assert counts == {"gsm8k_test": 0, "math500": 1, "aime24": 0, "amc23": 0, "mmlu_stem_test": 75}
    assert len(clean) == 7424


def test_suites_take_the_files_they_name():
    from kl_comedy.evaluation import get_suite
    from kl_comedy.evaluation.suites import suite_problems
    from kl_comedy.registry import SUITES

    taken = []
    for name in SUITES.names():
        suite = get_suite(name)
        if suite.file is not None and suite.file.sha256 and (DATA / suite.file.path).is_file():
            assert len(suite_problems(suite, root=DATA)) == suite.items
            taken.append(name)
    assert taken or not list(DATA.glob("gsm8k_test.jsonl"))
