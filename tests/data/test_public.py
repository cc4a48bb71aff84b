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


def test_every_row_loads_with_the_defaults():
    for name, rows in ROWS.items():
        problems = load(name)
        assert len(problems) == rows and all(problem.answer for problem in problems)
        if name == "mmlu_stem_test":
            for problem in problems:
                assert problem.answer in "ABCD" and problem.text.count("\n(") >= 4
                assert len(problem.meta["choices"]) == 4


def test_the_fixture_is_the_head_of_the_train_split():
    fixture = DatasetConfig(dataset="jsonl", path=str(ROOT / "tests" / "fixtures" / "gsm8k_32.jsonl"))
    problems = load_problems(fixture, key="x", training=True, allow_test_split=False)
    assert data_hash(problems) == data_hash(load("gsm8k_train", limit=32))


def test_boxed_answers_agree_with_the_answers_given():
    """Two solutions have an empty box (the loader refuses them); eight more answers were cleaned by hand."""
    given = {problem.id: problem.answer for problem in load("math_train7500")}
    with pytest.raises(UserError, match=r"math_train7500\.jsonl:5530: field 'solution' is empty"):
        load("math_train7500", fields={"answer": "solution"}, options={"answer_boxed": True})
    boxed = load("math500", fields={"answer": "solution"}, options={"answer_boxed": True})
    plain = load("math500")
    assert sum(a.answer != b.answer for a, b in zip(boxed, plain, strict=True)) <= 20
    assert len(given) == 7500


def test_known_overlaps_and_their_absence():
    names = ("gsm8k_test", "math500", "aime24", "amc23", "mmlu_stem_test")
    evals = {name: load(name) for name in names}
    assert set(decontaminate(load("gsm8k_train"), evals)[1].values()) == {0}
    assert set(decontaminate(load("mmlu_stem_dev"), evals)[1].values()) == {0}
    clean, counts = decontaminate(load("math_train7500"), evals)
    assert counts == {name: int(name == "math500") for name in names}
    assert len(clean) == 7499


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
