"""Local files: what a good row becomes, and what every kind of bad row says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data import load_problems
from kl_comedy.errors import UserError
from kl_comedy.records import Problem

FIXTURE = Path(__file__).parent.parent / "fixtures" / "gsm8k_32.jsonl"
GOOD: dict[str, Any] = {"id": "a", "problem": "1 + 1 = ?", "answer": "2"}


def load(path: Path, dataset: str = "jsonl", **settings: Any) -> list[Problem]:
    config = DatasetConfig(dataset=dataset, path=str(path), **settings)
    return load_problems(config, key="data.train", training=False, allow_test_split=False)


def write(tmp_path: Path, *rows: Any) -> Path:
    """A JSONL file; bytes are written as they are."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return path


def write_parquet(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_fixture_rows_arrive_whole() -> None:
    problems = load(FIXTURE)
    assert len(problems) == 32
    assert problems[0].id == "gsm8k/train/0"
    assert problems[0].text.startswith("Natalia sold clips to 48")
    assert problems[0].answer == "72"
    assert problems[0].meta == {}


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {
                "problem": st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip),
                "answer": st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip),
                "level": st.none() | st.integers() | st.lists(st.booleans(), max_size=2),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_survives_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool, end: str
) -> None:
    path = tmp_path_factory.mktemp("roundtrip") / "rows.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode())
    problems = load(path, fields={"level": "level"})
    assert [(p.text, p.answer, p.meta["level"]) for p in problems] == [
        (row["problem"], row["answer"], row["level"]) for row in rows
    ]
    assert [p.id for p in problems] == [f"rows/{n}" for n in range(1, len(rows) + 1)]


def test_fields_are_mapped_and_reach_into_objects(tmp_path: Path) -> None:
    path = write(tmp_path, {"q": "why?", "gold": {"value": 7, "a.b": 1}, "uid": 12, "lvl": None})
    fields = {"text": "q", "answer": "gold.value", "id": "uid", "level": "lvl"}
    assert load(path, fields=fields) == [Problem(id="12", text="why?", answer="7", meta={"level": None})]


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (b'{"id": "b", "problem": "x", \n', "malformed JSON"),
        (b'{"id": "b", "problem": "x", "answer": NaN}\n', "NaN is not a JSON number"),
        (b'{"id": "b", "problem": "x", "problem": "y", "answer": "1"}\n', "'problem' is there twice"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b'{"id": "b", "problem": "\xff", "answer": "1"}\n', "not UTF-8 (byte 25 of the line"),
        (b'["b", "x", "1"]\n', "a row must be a JSON object, got list"),
        (b"\n" + json.dumps(GOOD | {"id": "b"}).encode(), "blank line"),
        ({"id": "b", "answer": "1"}, "no field 'problem' (data.train.fields.text); the row has: id, answer"),
        ({"id": "b", "problem": "x"}, "no field 'answer' (data.train.fields.answer); the row has: id, problem"),
        ({"problem": "x", "answer": "1"}, "no field 'id'"),
        ({"id": "b", "problem": 3, "answer": "1"}, "'problem' must be a string, got int: 3"),
        ({"id": "b", "problem": " ", "answer": "1"}, "'problem' is empty"),
        ({"id": "b", "problem": "\ud800", "answer": "1"}, "half of a surrogate pair"),
        ({"id": "b", "problem": "x", "answer": None}, "'answer' must be a string or a number, got NoneType"),
        ({"id": "b", "problem": "x", "answer": True}, "'answer' must be a string or a number, got bool"),
        ({"id": "b", "problem": "x", "answer": ["1"]}, "'answer' must be a string or a number, got list"),
        ({"id": "b", "problem": "x", "answer": ""}, "'answer' is empty"),
        (b'{"id": "b", "problem": "x", "answer": 1e999}\n', "'answer' is inf, not a finite number"),
        (GOOD, "the id 'a' was already used at"),
    ],
)
def test_a_malformed_row_names_its_file_and_line(tmp_path: Path, second: Any, says: str) -> None:
    path = write(tmp_path, GOOD, second)
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"problem": "x", "question": "y", "answer": "1"}, "several of problem, question"),
        ({"prompt": "x", "answer": "1"}, "none of problem, question, text"),
        ({"problem": "x", "solution": "1"}, "data.train.options.answer_boxed=true"),
        ({"problem": "x", "gold": "1"}, "fields.answer=FIELD (fields: problem, gold)"),
    ],
)
def test_defaults_hold_only_where_they_are_unambiguous(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=r"rows\.jsonl:1: cannot tell") as caught:
        load(write(tmp_path, row))
    assert says in str(caught.value)


def test_a_misspelt_mapping_names_the_nearest_field(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no field 'problm'.*did you mean 'problem'"):
        load(write(tmp_path, GOOD), fields={"text": "problm"})


def test_an_empty_file_and_blank_lines_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no rows"):
        load(write(tmp_path, b"\n"))
    assert len(load(write(tmp_path, GOOD, b"\n \n"))) == 1


def test_a_missing_path_names_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"data\.train\.path: got .*did you mean .*rows\.jsonl"):
        load(tmp_path / "row.jsonl")
    with pytest.raises(UserError, match="there is no folder"):
        load(tmp_path / "nowhere" / "rows.jsonl")
    with pytest.raises(UserError, match="this is a folder"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"data\.train\.path: .*needs the path"):
        load_problems(DatasetConfig(dataset="jsonl"), key="data.train", training=False, allow_test_split=False)


def test_what_a_loader_would_ignore_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with pytest.raises(UserError, match=r"data\.train\.split: got 'train'.*does not use it"):
        load(path, split="train")
    with pytest.raises(UserError, match=r"options\.answr_after: no such key.*did you mean 'answer_after'"):
        load(path, options={"answr_after": "####"})
    with pytest.raises(UserError, match=r"options\.answer_boxed: got 'yes'"):
        load(path, options={"answer_boxed": "yes"})
    with pytest.raises(UserError, match=r"options\.answer_after: got ''"):
        load(path, options={"answer_after": ""})
    with pytest.raises(UserError, match="exclude each other"):
        load(path, options={"answer_after": "####", "answer_boxed": True})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("9 * 8 = <<9*8=72>>72\n#### 72", "72"),
        ("#### 3\n#### 1,234,567.5", "1234567.5"),
        ("#### (1,234)", "(1,234)"),
        ("#### 0,12", "0,12"),
    ],
)
def test_answer_after_a_marker(tmp_path: Path, answer: str, expected: str) -> None:
    path = write(tmp_path, {"question": "x", "answer": answer})
    assert load(path, options={"answer_after": "####"})[0].answer == expected


@pytest.mark.parametrize("answer", ["72", "72 ####", "72 #### "])
def test_a_missing_marker_is_an_error(tmp_path: Path, answer: str) -> None:
    path = write(tmp_path, {"question": "x", "answer": answer})
    with pytest.raises(UserError, match=r"rows\.jsonl:1: field 'answer' .*marker '####'"):
        load(path, options={"answer_after": "####"})


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (r"so \boxed{1} and $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"our answer is $\boxed 9$.", "9"),
        (r"\boxed {x_{1}}", "x_{1}"),
        (r"\boxed{\text{(E)}}", r"\text{(E)}"),
    ],
)
def test_answer_boxed(tmp_path: Path, solution: str, expected: str) -> None:
    path = write(tmp_path, {"problem": "x", "solution": solution})
    assert load(path, fields={"answer": "solution"}, options={"answer_boxed": True})[0].answer == expected


@pytest.mark.parametrize("solution", [" 9 without a box", "{9}", r"\boxed{1", r"\boxed{}", r"\boxed"])
def test_a_missing_box_is_an_error(tmp_path: Path, solution: str) -> None:
    path = write(tmp_path, {"problem": "x", "solution": solution})
    with pytest.raises(UserError, match=r"rows\.jsonl:1: field 'solution'"):
        load(path, fields={"answer": "solution"}, options={"answer_boxed": True})


@pytest.mark.parametrize("answer", ["B", "b", 1])
def test_choices_become_lettered_lines(tmp_path: Path, answer: Any) -> None:
    path = write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", 3], "answer": answer})
    problem = load(path)[0]
    assert problem.text == "1 + 1?\n(A) 1\n(B) 2\n(C) 3"
    assert problem.answer == "B"
    assert problem.meta == {"choices": ("1", "2", "3"), "question": "1 + 1?"}
    assert load(path, options={"render_choices": False})[0].text == "1 + 1?"


@pytest.mark.parametrize("answer", ["D", "2", 3, -1, True, "AB", "", None, 1.0])
def test_an_answer_that_is_no_choice_is_an_error(tmp_path: Path, answer: Any) -> None:
    path = write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", "3"], "answer": answer})
    with pytest.raises(UserError, match=r"rows\.jsonl:1: field 'answer' is .* with 3 choices"):
        load(path)


@pytest.mark.parametrize("choices", ["AB", ["1"], ["1"] * 27, ["1", ""], ["1", None], {"text": ["1", "2"]}])
def test_malformed_choices(tmp_path: Path, choices: Any) -> None:
    path = write(tmp_path, {"problem": "1 + 1?", "choices": choices, "answer": "A"})
    with pytest.raises(UserError, match=r"rows\.jsonl:1: field 'choices'"):
        load(path)


def test_parquet_reads_what_jsonl_reads(tmp_path: Path) -> None:
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "id": f"q{n}"} for n in range(2500)]
    problems = load(write_parquet(tmp_path, rows), "parquet")
    assert problems == load(write(tmp_path, *rows))
    assert problems[2499] == Problem(id="q2499", text="2499 + 1?", answer="2500")


def test_a_malformed_parquet_row_names_its_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [GOOD, GOOD | {"id": "b", "answer": None}])
    with pytest.raises(UserError) as caught:
        load(path, "parquet")
    assert str(caught.value).startswith(f"{path} row 2: field 'answer'")


def test_what_is_no_parquet_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train\.path: .* is not a readable Parquet file"):
        load(write(tmp_path, GOOD), "parquet")


def test_extras_must_fit_into_json(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [GOOD | {"raw": b"\x00"}])
    assert load(path, "parquet")[0].meta == {}
    with pytest.raises(UserError, match="row 1: field 'raw' does not fit into JSON"):
        load(path, "parquet", fields={"raw": "raw"})
