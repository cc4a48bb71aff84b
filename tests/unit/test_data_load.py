"""The door of the data room: dispatch, limits, the refusal of test splits, hashes, the hub, procedural tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def load(training: bool = False, allow_test_split: bool = False, **settings: Any) -> list[Problem]:
    config = DatasetConfig(**settings)
    return load_problems(config, key="data.train", training=training, allow_test_split=allow_test_split)


def problems(n: int) -> list[Problem]:
    return [Problem(id=str(i), text=f"{i} + 1 =", answer=str(i + 1)) for i in range(n)]


def test_built_ins_are_registered_and_a_miss_names_them() -> None:
    assert {"jsonl", "parquet", "hub", "reasoning_gym", "pocket"} <= set(DATASETS.names())
    with pytest.raises(UserError, match=r"data\.train\.dataset: got 'jsnol'.*did you mean 'jsonl'"):
        load(dataset="jsnol")


def test_importing_the_room_is_light() -> None:
    heavy = ("torch", "transformers", "datasets", "pyarrow", "pandas", "reasoning_gym", "mlflow", "lightning")
    code = f"import kl_comedy.data, sys; print([m for m in {heavy!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_limit_takes_the_first_rows_or_a_seeded_subset() -> None:
    whole = load(dataset="jsonl", path=str(FIXTURE))
    assert load(dataset="jsonl", path=str(FIXTURE), limit=5) == whole[:5]
    assert load(dataset="jsonl", path=str(FIXTURE), limit=100) == whole
    drawn = load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=1)
    assert drawn == load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=1)
    assert drawn != whole[:5]
    assert drawn != load(dataset="jsonl", path=str(FIXTURE), limit=5, seed=2)


@given(n=st.integers(1, 40), limit=st.integers(1, 50), seed=st.integers(0, 5))
def test_a_subset_keeps_the_order_and_repeats_nothing(n: int, limit: int, seed: int) -> None:
    chosen = [int(problem.id) for problem in subset(problems(n), limit, seed)]
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(n, limit)


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_names_of_evaluation_data(name: str) -> None:
    assert eval_only_word(name) is not None


@pytest.mark.parametrize(
    "name", ["train", "latest.jsonl", "contest_math", "math_train7500", "gsm8k", "amcat", "testament", "main", "math"]
)
def test_names_that_only_look_alike(name: str) -> None:
    assert eval_only_word(name) is None


@pytest.mark.parametrize(
    ("setting", "settings"),
    [
        ("split", {"dataset": "pocket", "split": "heldout"}),
        ("split", {"dataset": "hub", "name": "openai/gsm8k", "split": "test"}),
        ("name", {"dataset": "hub", "name": "HuggingFaceH4/MATH-500", "split": "train"}),
        ("path", {"dataset": "jsonl", "path": "somewhere/gsm8k_test.jsonl"}),
    ],
)
def test_training_on_a_test_split_is_refused(setting: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"data\.train\.{setting}: got .*data\.allow_test_split=true"):
        load(training=True, **settings)


def test_a_test_split_may_be_evaluated_or_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "test" / "gsm8k_test.jsonl"
    path.parent.mkdir()
    path.write_bytes(FIXTURE.read_bytes())
    assert len(load(dataset="jsonl", path=str(path))) == 32
    assert len(load(dataset="jsonl", path=str(path), training=True, allow_test_split=True)) == 32
    renamed = path.rename(path.with_name("gsm8k.jsonl"))
    assert len(load(dataset="jsonl", path=str(renamed), training=True)) == 32, "a folder's name does not count"


def test_the_hash_sees_id_text_answer_and_order() -> None:
    base = problems(3)
    assert data_hash(base) == "4922b8836a1f0dd31b6a4f745a8ad9591df8eeb3f4b388371378b0a671f61125"
    seen = {data_hash(base), data_hash(base[::-1]), data_hash(base[:2]), data_hash([])}
    for change in ({"id": "x"}, {"text": "x"}, {"answer": "x"}):
        fields = {"id": "0", "text": "0 + 1 =", "answer": "1"} | change
        seen.add(data_hash([Problem(**fields), *base[1:]]))
    seen.add(data_hash([Problem(id="0", text="0 + 1 =1", answer=""), *base[1:]]))
    assert len(seen) == 8
    assert data_hash([Problem(id="0", text="0 + 1 =", answer="1", meta={"level": 3}), *base[1:]]) == data_hash(base)


# --- hub -------------------------------------------------------------------------------------------------------


def test_a_dataset_folder_is_loaded_like_a_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_hub_out_of_reach_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def unreachable(*args: Any, **kwargs: Any) -> None:
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
def test_the_hub_needs_a_name_and_a_split(missing: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"data\.train\.{missing}: .*needs it, for example"):
        load(dataset="hub", **settings)


# --- reasoning-gym ---------------------------------------------------------------------------------------------

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def gym(**settings: Any) -> list[Problem]:
    pytest.importorskip("reasoning_gym")
    return load(dataset="reasoning_gym", **({"name": "chain_sum"} | settings))


def test_chain_sum_as_a_bare_expression_scores_with_its_own_scorer() -> None:
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


def test_text_field_takes_a_string_of_the_metadata() -> None:
    assert gym(options=SUMS | {"text_field": "expression"}, limit=1, seed=1)[0].text == "4 - 1"
    with pytest.raises(UserError, match=r"text_field: got 'expresion'.*did you mean 'expression'"):
        gym(options=SUMS | {"text_field": "expresion"}, limit=1)


def test_size_seed_and_limit() -> None:
    assert len(gym(options=SUMS | {"size": 7})) == 7
    assert len(gym(options=SUMS, limit=600)) == 600, "beyond the task's default size of 500"
    assert len(gym(options=SUMS | {"size": 7}, limit=3)) == 3
    assert gym(options=SUMS | {"seed": 5}, limit=3) == gym(options=SUMS, seed=5, limit=3)
    with pytest.raises(UserError, match=r"seed=4 and options\.seed=5 contradict"):
        gym(options=SUMS | {"seed": 5}, seed=4, limit=3)


def test_neighbouring_seeds_overlap_as_documented() -> None:
    first, second = gym(options=SUMS, seed=10, limit=20), gym(options=SUMS, seed=11, limit=20)
    assert [p.text for p in first[1:]] == [p.text for p in second[:-1]]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": "chainsum"}, "name: got 'chainsum'.*did you mean 'chain_sum'"),
        ({"name": "composite"}, "name: got 'composite'"),
        ({"options": {"min_term": 2}}, "options: got 'min_term'.*did you mean 'min_terms'"),
        ({"options": {"min_terms": 9, "max_terms": 2}}, "rejects .*max_terms must be >= min_terms"),
        ({"options": {"min_terms": "two"}}, "the task 'chain_sum' rejects"),
        ({"options": {"text_after": "nowhere: "}}, "text_after: got 'nowhere: '"),
        ({"options": {"text_after": "=", "text_field": "expression"}}, "exclude each other"),
        ({"split": "train"}, "split: got 'train'.*does not use it"),
    ],
)
def test_mistakes_in_a_task_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"data\.train.*{says}"):
        gym(**({"limit": 2} | settings))


def test_a_task_without_an_oracle_has_an_empty_answer() -> None:
    assert gym(name="graph_color", limit=1)[0].answer == ""


def test_nothing_a_task_prints_reaches_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """``bf`` prints a dot for every item it makes."""
    for name in ("bf", "rush_hour"):
        assert gym(name=name, limit=1)
    assert capsys.readouterr().out == ""


def test_no_task_hides_our_own_options_and_none_looks_like_a_test_split() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    from kl_comedy.data.sources import TEXT_OPTIONS

    for name, (_, settings) in factory.DATASETS.items():
        assert not set(TEXT_OPTIONS) & set(settings.__dataclass_fields__)
        assert eval_only_word(name) is None
