"""Local files: what a good row becomes, and the message of every kind of bad row."""

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import cpu_limit
from kl_comedy.config.schema import DatasetConfig
from kl_comedy.data import load_problems, sources
from kl_comedy.errors import UserError
from kl_comedy.records import Problem

FIXTURE = Path(__file__).parent.parent / "fixtures" / "gsm8k_32.jsonl"
GOOD = {"id": "a", "problem": "1 + 1 = ?", "answer": "2"}


def load(path, dataset="jsonl", **settings):
    config = DatasetConfig(dataset=dataset, path=str(path), **settings)
    return load_problems(config, key="data.train", training=False, allow_test_split=False)


def write(folder, *rows):
    """A JSONL file; bytes are written as they are."""
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in rows))
    return path


def write_parquet(folder, rows):
    import pyarrow
    import pyarrow.parquet

    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def error_of(path, *arguments, **settings):
    with pytest.raises(UserError) as caught:
        load(path, *arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fixture_rows_arrive_whole():
    problems = load(FIXTURE)
    assert len(problems) == 32 and problems[0].text.startswith("Natalia sold clips to 48")
    assert (problems[0].id, problems[0].answer, problems[0].meta) == ("gsm8k/train/0", "72", {})


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)
LEVEL = st.none() | st.integers() | st.lists(st.booleans(), max_size=2)
ROWS = st.lists(st.fixed_dictionaries({"problem": TEXT, "answer": TEXT, "level": LEVEL}), min_size=1, max_size=6)


@given(rows=ROWS, ascii_only=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
def test_any_text_survives_a_round_trip(tmp_path_factory, rows, ascii_only, end):
    path = tmp_path_factory.mktemp("roundtrip") / "rows.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows).encode())
    problems = load(path, fields={"level": "level"})
    assert [{"problem": p.text, "answer": p.answer, "level": p.meta["level"]} for p in problems] == rows
    assert [p.id for p in problems] == [f"rows/{n}" for n in range(1, len(rows) + 1)]


def test_fields_are_mapped_and_reach_into_objects(tmp_path):
    path = write(tmp_path, {"q": "why?", "gold": {"value": 7, "a.b": 1}, "uid": 12, "lvl": None})
    fields = {"text": "q", "answer": "gold.value", "id": "uid", "level": "lvl"}
    assert load(path, fields=fields) == [Problem(id="12", text="why?", answer="7", meta={"level": None})]


MALFORMED = [
    (b'{"id": "b", "problem": "x", \n', "malformed JSON"),
    (b'{"id": "b", "problem": "x", "answer": NaN}\n', "NaN is not a JSON number"),
    (b'{"id": "b", "problem": "x", "problem": "y", "answer": "1"}\n', "'problem' occurs twice"),
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
]
UNCLEAR = [
    ({"problem": "x", "question": "y", "answer": "1"}, "several of problem, question"),
    ({"prompt": "x", "answer": "1"}, "none of problem, question, text"),
    ({"problem": "x", "solution": "1"}, "data.train.options.answer_boxed=true"),
    ({"problem": "x", "gold": "1"}, "fields.answer=FIELD (fields: problem, gold)"),
]


def test_a_malformed_row_names_its_file_and_line(tmp_path):
    for row, message in MALFORMED:
        path = write(tmp_path, GOOD, row)
        error = error_of(path)
        assert error.startswith(f"{path}:2: ") and message in error, error
    for row, message in UNCLEAR:
        error = error_of(write(tmp_path, row))
        assert "rows.jsonl:1: cannot tell" in error and message in error, error
    error = error_of(write(tmp_path, GOOD), fields={"text": "problm"})
    assert "no field 'problm'" in error and "did you mean 'problem'" in error


def test_an_empty_file_blank_lines_at_the_end_and_a_missing_path(tmp_path):
    assert "has no rows" in error_of(write(tmp_path, b"\n"))
    path = write(tmp_path, GOOD, b"\n \n")
    assert len(load(path)) == 1
    error = error_of(tmp_path / "row.jsonl")
    assert error.startswith("data.train.path: got ") and "did you mean" in error and "rows.jsonl" in error
    assert "there is no folder" in error_of(tmp_path / "nowhere" / "rows.jsonl")
    assert "this is a folder" in error_of(tmp_path)
    assert "data.train.path: the dataset 'jsonl' needs the path" in error_of("")


def test_what_a_loader_would_ignore_is_refused(tmp_path):
    path = write(tmp_path, GOOD)
    assert "data.train.split: got 'train', but" in error_of(path, split="train")
    for options, message in (
        ({"answr_after": "####"}, "options.answr_after: no such key"),
        ({"answer_boxed": "yes"}, "options.answer_boxed: got 'yes'"),
        ({"answer_after": ""}, "options.answer_after: got ''"),
        ({"answer_after": "####", "answer_boxed": True}, "exclude each other"),
    ):
        assert message in error_of(path, options=options)


def test_answer_after_a_marker(tmp_path):
    options = {"answer_after": "####"}
    for answer, expected in (
        ("9 * 8 = <<9*8=72>>72\n#### 72", "72"),
        ("#### 3\n#### 1,234,567.5", "1234567.5"),
        ("#### (1,234)", "(1,234)"),
        ("#### 0,12", "0,12"),
    ):
        assert load(write(tmp_path, {"question": "x", "answer": answer}), options=options)[0].answer == expected
    for answer in ("72", "72 ####", "72 #### "):
        error = error_of(write(tmp_path, {"question": "x", "answer": answer}), options=options)
        assert "rows.jsonl:1: field 'answer' " in error and "marker '####'" in error


def test_answer_boxed(tmp_path):
    settings = {"fields": {"answer": "solution"}, "options": {"answer_boxed": True}}
    for solution, expected in (
        (r"so \boxed{1} and $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"our answer is $\boxed 9$.", "9"),
        (r"\boxed {x_{1}}", "x_{1}"),
        (r"\boxed{\text{(E)}}", r"\text{(E)}"),
    ):
        assert load(write(tmp_path, {"problem": "x", "solution": solution}), **settings)[0].answer == expected
    for solution in (" 9 without a box", "{9}", r"\boxed{1", r"\boxed{}", r"\boxed", r"\boxed{1} \boxed{2"):
        path = write(tmp_path, {"problem": "x", "solution": solution})
        assert "rows.jsonl:1: field 'solution'" in error_of(path, **settings)


def test_choices_become_lettered_lines(tmp_path):
    for answer in ("B", "b", 1):
        path = write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", 3], "answer": answer})
        problem = load(path)[0]
        assert (problem.text, problem.answer) == ("1 + 1?\n(A) 1\n(B) 2\n(C) 3", "B")
        assert problem.meta == {"choices": ("1", "2", "3"), "question": "1 + 1?"}
        assert load(path, options={"render_choices": False})[0].text == "1 + 1?"
    for answer in ("D", "2", 3, -1, True, "AB", "", None, 1.0):
        error = error_of(write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", "3"], "answer": answer}))
        assert "rows.jsonl:1: field 'answer' is " in error and " with 3 choices" in error
    for choices in ("AB", ["1"], ["1"] * 27, ["1", ""], ["1", None], {"text": ["1", "2"]}):
        error = error_of(write(tmp_path, {"problem": "1 + 1?", "choices": choices, "answer": "A"}))
        assert "rows.jsonl:1: field 'choices'" in error


def test_parquet_reads_what_jsonl_reads(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": n + 1, "id": f"q{n}"} for n in range(2500)]
    problems = load(write_parquet(tmp_path, rows), "parquet")
    assert problems == load(write(tmp_path, *rows))
    assert problems[2499] == Problem(id="q2499", text="2499 + 1?", answer="2500")
    path = write_parquet(tmp_path, [GOOD, GOOD | {"id": "b", "answer": None}])
    assert error_of(path, "parquet").startswith(f"{path} row 2: field 'answer'")
    assert "is not a readable Parquet file" in error_of(write(tmp_path, GOOD), "parquet")
    path = write_parquet(tmp_path, [GOOD | {"raw": b"\x00"}])
    assert load(path, "parquet")[0].meta == {}
    assert "row 1: field 'raw' does not fit into JSON" in error_of(path, "parquet", fields={"raw": "raw"})


def test_a_hundred_thousand_fields_with_one_doubled_are_refused_at_once(tmp_path):
    fields = ", ".join(f'"f{n}": 1' for n in range(100_000))
    path = write(tmp_path, f'{{{fields}, "f99999": 2}}\n'.encode())
    with cpu_limit(10):
        assert "the field 'f99999' occurs twice" in error_of(path)
        assert len(error_of(write(tmp_path, f"{{{fields}}}\n".encode()))) < 2000
        path = write(tmp_path, f'{{{fields}, "text": "x", "answer": "1"}}\n'.encode())
        assert len(error_of(path, fields={"answer": "f100000"})) < 2000


def parquet_of_one_text(folder, characters, rows):
    """Each row has the same text: the file holds it once."""
    import pyarrow
    import pyarrow.parquet

    path = folder / "rows.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), ["x" * characters])
    answers = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), ["1"])
    table = pyarrow.table({"text": text, "answer": answers})
    pyarrow.parquet.write_table(table.replace_schema_metadata(None), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize(("characters", "rows"), [(10_000_000, 2000), (10, 3_000_000)])
def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch, characters, rows):
    """Of 20 GB, and of rows that take more than their values. The limit is lowered, for the sake of this machine."""
    monkeypatch.setattr(sources, "MAX_UNPACKED", 2**26)
    path = parquet_of_one_text(tmp_path, characters, rows)
    assert path.stat().st_size < 40_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with cpu_limit(20):
        assert "unpacks to more than 0.0625 GiB, from" in error_of(path, "parquet")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # KiB
    assert len(load(parquet_of_one_text(tmp_path, 1000, 5000), "parquet")) == 5000


def test_the_footer_of_a_parquet_file_is_looked_at_before_its_rows(tmp_path, monkeypatch):
    path = write_parquet(tmp_path, [GOOD | {"id": str(n), "more": "x" * 1000 * n} for n in range(10)])
    monkeypatch.setattr(sources, "MAX_UNPACKED", 100)
    monkeypatch.setattr(sources, "MAX_RATIO", 1)
    assert "unpacks to more than" in error_of(path, "parquet")
