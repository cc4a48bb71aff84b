"""Loading datasets: dispatch, limits, the refusal of test splits, hashes, the hub, procedural tasks."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data import data_hash, load_problems
from kl_comedy.data.load import eval_only_word, subset
from kl_comedy.errors import UserError
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS

FIXTURE = Path(__file__).parent.parent / "fixtures" / "gsm8k_32.jsonl"


def load(training=False, allow_test_split=False, **settings):
    config = DatasetConfig(**settings)
    return load_problems(config, key="data.train", training=training, allow_test_split=allow_test_split)


def problems(n):
    return [Problem(id=str(i), text=f"{i} + 1 =", answer=str(i + 1)) for i in range(n)]


def test_built_ins_are_registered():
    assert {"csv", "jsonl", "parquet", "saved", "hub", "reasoning_gym", "pocket"} <= set(DATASETS.names())


def test_a_misspelled_dataset_names_the_nearest():
    with pytest.raises(UserError, match=r"data\.train\.dataset: got 'jsnol'.*did you mean 'jsonl'"):
        load(dataset="jsnol")


def load_fixture(**settings):
    return load(dataset="jsonl", path=str(FIXTURE), **settings)


def test_a_limit_without_a_seed_takes_the_first_rows():
    assert load_fixture(limit=5) == load_fixture()[:5]


def test_a_limit_above_the_number_of_rows_takes_all():
    assert load_fixture(limit=100) == load_fixture()


def test_a_limit_with_a_seed_draws_a_subset():
    drawn = load_fixture(limit=5, seed=1)
    assert drawn == load_fixture(limit=5, seed=1)
    assert drawn != load_fixture()[:5]
    assert drawn != load_fixture(limit=5, seed=2)


@given(n=st.integers(1, 40), limit=st.integers(1, 50), seed=st.integers(0, 5))
def test_a_subset_keeps_the_order_and_repeats_nothing(n, limit, seed):
    chosen = [int(problem.id) for problem in subset(problems(n), limit, seed)]
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(n, limit)


# --- evaluation data in training ------------------------------------------------------------------------------
EVALUATION_NAMES = [
    "test",
    "gsm8k_test.jsonl",
    "test[:10%]",
    "train+test",
    "AIME24",
    "aime_2024",
    "amc23",
    "MATH-500",
    "math500",
    "math_test4500",
    "held_out",
    "heldout",
    "eval",
]
OTHER_NAMES = [
    "train",
    "latest.jsonl",
    "contest_math",
    "math_train7500",
    "gsm8k",
    "amcat",
    "testament",
    "main",
    "math",
]


@pytest.mark.parametrize("name", EVALUATION_NAMES)
def test_a_name_of_evaluation_data_is_known(name):
    assert eval_only_word(name) is not None


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_another_name_is_not_taken_for_one_of_evaluation_data(name):
    assert eval_only_word(name) is None


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("split", {"dataset": "pocket", "split": "heldout"}),
        ("split", {"dataset": "hub", "name": "openai/gsm8k", "split": "test"}),
        ("subset", {"dataset": "hub", "name": "a/b", "subset": "eval", "split": "train"}),
        ("name", {"dataset": "hub", "name": "HuggingFaceH4/MATH-500", "split": "train"}),
        ("path", {"dataset": "jsonl", "path": "somewhere/gsm8k_test.jsonl"}),
    ],
    ids=["pocket split", "hub split", "subset", "name", "path"],
)
def test_training_on_evaluation_data_is_refused(key, settings):
    with pytest.raises(UserError, match=rf"data\.train\.{key}: got .*data\.allow_test_split=true"):
        load(training=True, **settings)


@pytest.fixture
def evaluation_file(tmp_path):
    path = tmp_path / "test" / "gsm8k_test.jsonl"
    path.parent.mkdir()
    path.write_bytes(FIXTURE.read_bytes())
    return path


def test_evaluation_data_may_be_evaluated(evaluation_file):
    assert len(load(dataset="jsonl", path=str(evaluation_file))) == 32


def test_evaluation_data_may_be_trained_on_where_it_is_asked_for(evaluation_file):
    assert len(load(dataset="jsonl", path=str(evaluation_file), training=True, allow_test_split=True)) == 32


def test_the_name_of_a_folder_does_not_count(evaluation_file):
    renamed = evaluation_file.rename(evaluation_file.with_name("gsm8k.jsonl"))
    assert len(load(dataset="jsonl", path=str(renamed), training=True)) == 32


# --- hashes -----------------------------------------------------------------------------------------------------
THREE = problems(3)
OTHERS = {
    "reversed": THREE[::-1],
    "one fewer": THREE[:2],
    "none": [],
    "id": [Problem(id="x", text="0 + 1 =", answer="1"), *THREE[1:]],
    "text": [Problem(id="0", text="x", answer="1"), *THREE[1:]],
    "answer": [Problem(id="0", text="0 + 1 =", answer="x"), *THREE[1:]],
    "answer within the text": [Problem(id="0", text="0 + 1 =1", answer=""), *THREE[1:]],
}


def test_the_hash_is_that_of_stored_runs():
    assert data_hash(THREE) == "4922b8836a1f0dd31b6a4f745a8ad9591df8eeb3f4b388371378b0a671f61125"


def test_the_hash_depends_on_id_text_answer_and_order():
    hashes = {data_hash(THREE), *[data_hash(other) for other in OTHERS.values()]}
    assert len(hashes) == 1 + len(OTHERS)


def test_the_hash_does_not_depend_on_what_else_is_known_of_a_problem():
    with_level = Problem(id="0", text="0 + 1 =", answer="1", meta={"level": 3})
    assert data_hash([with_level, *THREE[1:]]) == data_hash(THREE)


# --- hub -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset_folder(tmp_path, monkeypatch):
    """A folder that the hub's library loads as a dataset, with a train split of three sums."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    folder.mkdir()
    rows = [{"question": f"{number} + 1?", "answer": f"because\n#### {number + 1}"} for number in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_dataset_folder_is_loaded_like_a_hub_dataset(dataset_folder):
    settings = {"dataset": "hub", "name": str(dataset_folder), "split": "train"}
    loaded = load(**settings, options={"answer_after": "####"}, training=True)
    assert [problem.answer for problem in loaded] == ["1", "2", "3"]
    assert loaded[2].id == f"{dataset_folder}[train]/3"


def test_a_malformed_row_of_a_hub_dataset_is_named(dataset_folder):
    with pytest.raises(UserError, match=r"sums\[train\] row 1: no field 'q' .*the row has: question, answer"):
        load(dataset="hub", name=str(dataset_folder), split="train", fields={"text": "q"})


def test_a_split_that_a_hub_dataset_does_not_have_is_named(dataset_folder):
    with pytest.raises(UserError, match=r"data\.train: could not load the hub dataset .*split=trian"):
        load(dataset="hub", name=str(dataset_folder), split="trian")


def test_the_hub_out_of_reach_is_one_clear_sentence(monkeypatch):
    import datasets

    asked = []

    def unreachable(*args, **kwargs):
        asked.append((args, kwargs))
        raise ConnectionError("Couldn't reach the Hub\nwith a second line")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError) as caught:
        load(dataset="hub", name="a/b", subset="main", split="train", options={"revision": "abc"})
    message = str(caught.value)
    assert "name=a/b, subset=main, split=train, revision=abc" in message
    assert "data.train.dataset=jsonl" in message
    assert "second line" not in message
    assert asked == [(("a/b", "main"), {"split": "train", "revision": "abc"})], "no trust_remote_code, nothing else"


@pytest.mark.parametrize(("missing", "settings"), [("name", {"split": "train"}), ("split", {"name": "a/b"})])
def test_the_hub_needs_a_name_and_a_split(missing, settings):
    with pytest.raises(UserError, match=rf"data\.train\.{missing}: .*needs it, for example"):
        load(dataset="hub", **settings)


# --- reasoning-gym ---------------------------------------------------------------------------------------------

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(**settings):
    pytest.importorskip("reasoning_gym")
    return load(dataset="reasoning_gym", **({"name": "chain_sum"} | settings))


def test_chain_sum_as_a_bare_expression_scores_with_its_own_scorer():
    loaded = gym(options=SUMS | {"text_after": "problem: "}, limit=20, seed=1)
    assert loaded[0].text == "4 - 1 ="
    assert loaded[0].answer == "3"
    assert loaded[0].id == "chain_sum/1/0"
    assert len(loaded) == 20
    from reasoning_gym.factory import create_dataset

    task = create_dataset(loaded[0].meta["task"], size=1, seed=0)
    for problem in loaded:
        entry = json.loads(json.dumps(problem.meta["entry"]))
        assert task.score_answer(problem.answer, entry) == 1.0
        assert task.score_answer(problem.answer + "1", entry) < 1.0


def test_the_text_of_a_task_may_be_one_of_its_fields():
    (problem,) = gym(options=SUMS | {"text_field": "expression"}, limit=1, seed=1)
    assert problem.text == "4 - 1"


@pytest.mark.parametrize(
    ("options", "settings", "count"),
    [
        (SUMS | {"size": 7}, {}, 7),
        (SUMS, {"limit": 600}, 600),  # beyond the task's default size of 500
        (SUMS | {"size": 7}, {"limit": 3}, 3),
    ],
    ids=["size", "limit", "limit below the size"],
)
def test_size_and_limit_of_a_task(options, settings, count):
    assert len(gym(options=options, **settings)) == count


def test_the_seed_of_a_task_may_stand_among_its_options():
    assert gym(options=SUMS | {"seed": 5}, limit=3) == gym(options=SUMS, seed=5, limit=3)


def test_neighbouring_seeds_overlap_as_documented():
    first = gym(options=SUMS, seed=10, limit=20)
    second = gym(options=SUMS, seed=11, limit=20)
    assert [problem.text for problem in first[1:]] == [problem.text for problem in second[:-1]]


MISTAKES = [
    ({"name": "chainsum"}, "name: got 'chainsum'.*did you mean 'chain_sum'"),
    ({"name": "composite"}, "name: got 'composite'"),
    ({"options": {"min_term": 2}}, "options: got 'min_term'.*did you mean 'min_terms'"),
    ({"options": {"min_terms": 9, "max_terms": 2}}, "rejects .*max_terms must be >= min_terms"),
    ({"options": {"min_terms": "two"}}, "the task 'chain_sum' rejects"),
    ({"options": {"text_after": "nowhere: "}}, "text_after: got 'nowhere: '"),
    ({"options": SUMS | {"text_field": "expresion"}}, r"text_field: got 'expresion'.*did you mean 'expression'"),
    ({"options": {"text_after": "=", "text_field": "expression"}}, "exclude each other"),
    ({"options": {"seed": 5}, "seed": 4}, r"seed=4 and options\.seed=5 contradict"),
    ({"split": "train"}, "split: got 'train'.*does not use it"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES, ids=[str(settings) for settings, _ in MISTAKES])
def test_mistakes_in_a_task_are_named(settings, message):
    with pytest.raises(UserError, match=rf"data\.train.*{message}"):
        gym(**({"limit": 2} | settings))


def test_a_task_without_an_oracle_has_an_empty_answer():
    (problem,) = gym(name="graph_color", limit=1)
    assert problem.answer == ""


@pytest.mark.parametrize("name", ["graph_color", "bf", "rush_hour"])
def test_no_task_prints_to_stdout(name, capsys):
    """``bf`` prints a dot for every item it makes."""
    assert gym(name=name, limit=1)
    assert capsys.readouterr().out == ""


def test_no_task_hides_our_own_options():
    factory = pytest.importorskip("reasoning_gym.factory")
    from kl_comedy.data.sources import TEXT_OPTIONS

    for name, (_, settings) in factory.DATASETS.items():
        assert set(TEXT_OPTIONS) & set(settings.__dataclass_fields__) == set(), name


def test_no_task_looks_like_a_test_split():
    factory = pytest.importorskip("reasoning_gym.factory")
    assert [name for name in factory.DATASETS if eval_only_word(name) is not None] == []
