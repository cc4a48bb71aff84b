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


def test_built_ins_are_registered_and_a_miss_names_them():
    assert {"jsonl", "parquet", "hub", "reasoning_gym", "pocket"} <= set(DATASETS.names())
    with pytest.raises(UserError, match=r"data\.train\.dataset: got 'jsnol'.*did you mean 'jsonl'"):
        load(dataset="jsnol")


def test_limit_takes_the_first_rows_or_a_seeded_subset():
    whole = load(dataset="jsonl", path=str(FIXTURE))
    assert load(dataset="jsonl", path=str(FIXTURE), limit=5) == whole[:5]
    assert load(dataset="jsonl", path=str(FIXTURE), limit=100) == whole
    drawn = load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=1)
    assert drawn == load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=1)
    assert drawn != whole[:5]
    assert drawn != load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=2)


@given(n=st.integers(1, 40), limit=st.integers(1, 50), seed=st.integers(0, 5))
def test_a_subset_keeps_the_order_and_repeats_nothing(n, limit, seed):
    chosen = [int(problem.id) for problem in subset(problems(n), limit, seed)]
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(n, limit)


EVALUATION_NAMES = (
    "test gsm8k_test.jsonl test[:10%] train+test AIME24 aime_2024 amc23 MATH-500 math500 math_test4500 held_out "
    "heldout eval"
)
OTHER_NAMES = "train latest.jsonl contest_math math_train7500 gsm8k amcat testament main math"


def test_training_on_evaluation_data_is_refused_unless_asked_for(tmp_path):
    assert all(eval_only_word(name) is not None for name in EVALUATION_NAMES.split())
    assert all(eval_only_word(name) is None for name in OTHER_NAMES.split())
    for setting, settings in (
        ("split", {"dataset": "pocket", "split": "heldout"}),
        ("split", {"dataset": "hub", "name": "openai/gsm8k", "split": "test"}),
        ("subset", {"dataset": "hub", "name": "a/b", "subset": "eval", "split": "train"}),
        ("name", {"dataset": "hub", "name": "HuggingFaceH4/MATH-500", "split": "train"}),
        ("path", {"dataset": "jsonl", "path": "somewhere/gsm8k_test.jsonl"}),
    ):
        with pytest.raises(UserError, match=rf"data\.train\.{setting}: got .*data\.allow_test_split=true"):
            load(training=True, **settings)
    path = tmp_path / "test" / "gsm8k_test.jsonl"
    path.parent.mkdir()
    path.write_bytes(FIXTURE.read_bytes())
    assert len(load(dataset="jsonl", path=str(path))) == 32
    assert len(load(dataset="jsonl", path=str(path), training=True, allow_test_split=True)) == 32
    renamed = path.rename(path.with_name("gsm8k.jsonl"))
    assert len(load(dataset="jsonl", path=str(renamed), training=True)) == 32, "a folder's name does not count"


def test_the_hash_depends_on_id_text_answer_and_order():
    base = problems(3)
    assert data_hash(base) == "4922b8836a1f0dd31b6a4f745a8ad9591df8eeb3f4b388371378b0a671f61125"
    hashes = {data_hash(base), data_hash(base[::-1]), data_hash(base[:2]), data_hash([])}
    for change in ({"id": "x"}, {"text": "x"}, {"answer": "x"}):
        fields = {"id": "0", "text": "0 + 1 =", "answer": "1"} | change
        hashes.add(data_hash([Problem(**fields), *base[1:]]))
    hashes.add(data_hash([Problem(id="0", text="0 + 1 =1", answer=""), *base[1:]]))
    assert len(hashes) == 8
    assert data_hash([Problem(id="0", text="0 + 1 =", answer="1", meta={"level": 3}), *base[1:]]) == data_hash(base)


# --- hub -------------------------------------------------------------------------------------------------------


def test_a_dataset_folder_is_loaded_like_a_hub_dataset(tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "sums"
    folder.mkdir()
    rows = [{"question": f"{n} + 1?", "answer": f"because\n#### {n + 1}"} for n in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    loaded = load(dataset="hub", name=str(folder), split="train", options={"answer_after": "####"}, training=True)
    assert [p.answer for p in loaded] == ["1", "2", "3"]
    assert loaded[2].id == f"{folder}[train]/3"
    with pytest.raises(UserError, match=r"sums\[train\] row 1: no field 'q' .*the row has: question, answer"):
        load(dataset="hub", name=str(folder), split="train", fields={"text": "q"})
    with pytest.raises(UserError, match=r"data\.train: could not load the hub dataset .*split=trian"):
        load(dataset="hub", name=str(folder), split="trian")


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


def test_the_hub_needs_a_name_and_a_split():
    for missing, settings in (("name", {"split": "train"}), ("split", {"name": "a/b"})):
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


def test_text_field_size_seed_and_limit():
    assert gym(options=SUMS | {"text_field": "expression"}, limit=1, seed=1)[0].text == "4 - 1"
    assert len(gym(options=SUMS | {"size": 7})) == 7
    assert len(gym(options=SUMS, limit=600)) == 600, "beyond the task's default size of 500"
    assert len(gym(options=SUMS | {"size": 7}, limit=3)) == 3
    assert gym(options=SUMS | {"seed": 5}, limit=3) == gym(options=SUMS, seed=5, limit=3)


def test_neighbouring_seeds_overlap_as_documented():
    first, second = gym(options=SUMS, seed=10, limit=20), gym(options=SUMS, seed=11, limit=20)
    assert [p.text for p in first[1:]] == [p.text for p in second[:-1]]


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


def test_mistakes_in_a_task_are_named():
    for settings, message in MISTAKES:
        with pytest.raises(UserError, match=rf"data\.train.*{message}"):
            gym(**({"limit": 2} | settings))


def test_a_task_without_an_oracle_has_an_empty_answer_and_none_prints_to_stdout(capsys):
    """``bf`` prints a dot for every item it makes."""
    assert gym(name="graph_color", limit=1)[0].answer == ""
    assert gym(name="bf", limit=1) and gym(name="rush_hour", limit=1)
    assert capsys.readouterr().out == ""


def test_no_task_hides_our_own_options_and_none_looks_like_a_test_split():
    factory = pytest.importorskip("reasoning_gym.factory")
    from kl_comedy.data.sources import TEXT_OPTIONS

    for name, (_, settings) in factory.DATASETS.items():
        assert not set(TEXT_OPTIONS) & set(settings.__dataclass_fields__)
        assert eval_only_word(name) is None
