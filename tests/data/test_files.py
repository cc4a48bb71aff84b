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
    content = b""
    for row in rows:
        if isinstance(row, bytes):
            content += row
        else:
            content += json.dumps(row).encode() + b"\n"
    path = folder / "rows.jsonl"
    path.write_bytes(content)
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
    assert len(problems) == 32
    first = problems[0]
    assert first.text.startswith("Natalia sold clips to 48")
    assert first.id == "gsm8k/train/0"
    assert first.answer == "72"
    assert first.meta == {}


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


# Rows that are bad behind a good one, and what is said of them.
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


@pytest.mark.parametrize(("row", "message"), MALFORMED, ids=[message[:40] for _, message in MALFORMED])
def test_a_malformed_row_names_its_file_and_line(tmp_path, row, message):
    path = write(tmp_path, GOOD, row)
    error = error_of(path)
    assert error.startswith(f"{path}:2: ")
    assert message in error


@pytest.mark.parametrize(("row", "message"), UNCLEAR, ids=[message for _, message in UNCLEAR])
def test_a_row_whose_fields_can_be_read_in_several_ways_or_none_is_refused(tmp_path, row, message):
    error = error_of(write(tmp_path, row))
    assert "rows.jsonl:1: cannot tell" in error
    assert message in error


@pytest.mark.parametrize("field", ["text", "answer", "choices"])
def test_a_value_is_refused_above_a_million_characters(tmp_path, field):
    longest = "x" * 1_000_000
    row = {"text": "y", "answer": "A"}
    if field == "choices":
        fits = row | {field: [longest, "2"]}
        exceeds = row | {field: [longest + "x", "2"]}
    else:
        fits = row | {field: longest}
        exceeds = row | {field: longest + "x"}
    error = error_of(write(tmp_path, fits, exceeds))
    assert error.endswith(f":2: field '{field}' has 1,000,001 characters; allowed: at most 1,000,000")


def test_a_misspelled_field_names_the_nearest(tmp_path):
    error = error_of(write(tmp_path, GOOD), fields={"text": "problm"})
    assert "no field 'problm'" in error
    assert "did you mean 'problem'" in error


# --- paths and options --------------------------------------------------------------------------------------------
def test_a_file_without_rows_is_refused(tmp_path):
    assert "has no rows" in error_of(write(tmp_path, b"\n"))


def test_blank_lines_at_the_end_are_no_rows(tmp_path):
    assert len(load(write(tmp_path, GOOD, b"\n \n"))) == 1


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path, GOOD)
    error = error_of(tmp_path / "row.jsonl")
    assert error.startswith("data.train.path: got ")
    assert "did you mean" in error
    assert "rows.jsonl" in error


def test_a_missing_folder_is_named(tmp_path):
    assert "there is no folder" in error_of(tmp_path / "nowhere" / "rows.jsonl")


def test_a_folder_is_no_file(tmp_path):
    assert "this is a folder" in error_of(tmp_path)


def test_a_path_is_needed():
    assert "data.train.path: the dataset 'jsonl' needs the path" in error_of("")


def test_a_split_that_a_loader_would_ignore_is_refused(tmp_path):
    assert "data.train.split: got 'train', but" in error_of(write(tmp_path, GOOD), split="train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answr_after": "####"}, "options.answr_after: no such key"),
        ({"answer_boxed": "yes"}, "options.answer_boxed: got 'yes'"),
        ({"answer_after": ""}, "options.answer_after: got ''"),
        ({"answer_after": "####", "answer_boxed": True}, "exclude each other"),
    ],
    ids=["no such key", "no boolean", "no marker", "both"],
)
def test_an_option_without_a_meaning_is_refused(tmp_path, options, message):
    assert message in error_of(write(tmp_path, GOOD), options=options)


# --- answers within a solution ------------------------------------------------------------------------------------
AFTER_MARKER = {"answer_after": "####"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("9 * 8 = <<9*8=72>>72\n#### 72", "72"),
        ("#### 3\n#### 1,234,567.5", "1234567.5"),
        ("#### (1,234)", "(1,234)"),
        ("#### 0,12", "0,12"),
    ],
    ids=["after steps", "the last marker, thousands", "a pair", "no thousands"],
)
def test_the_answer_stands_after_a_marker(tmp_path, answer, expected):
    (problem,) = load(write(tmp_path, {"question": "x", "answer": answer}), options=AFTER_MARKER)
    assert problem.answer == expected


@pytest.mark.parametrize("answer", ["72", "72 ####", "72 #### "], ids=["no marker", "nothing after it", "a space"])
def test_a_row_without_an_answer_after_the_marker_is_refused(tmp_path, answer):
    error = error_of(write(tmp_path, {"question": "x", "answer": answer}), options=AFTER_MARKER)
    assert "rows.jsonl:1: field 'answer' " in error
    assert "marker '####'" in error


BOXED = {"fields": {"answer": "solution"}, "options": {"answer_boxed": True}}


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (r"so \boxed{1} and $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"our answer is $\boxed 9$.", "9"),
        (r"\boxed {x_{1}}", "x_{1}"),
        (r"\boxed{\text{(E)}}", r"\text{(E)}"),
    ],
)
def test_the_answer_stands_in_the_last_box(tmp_path, solution, expected):
    (problem,) = load(write(tmp_path, {"problem": "x", "solution": solution}), **BOXED)
    assert problem.answer == expected


@pytest.mark.parametrize(
    "solution", [" 9 without a box", "{9}", r"\boxed{1", r"\boxed{}", r"\boxed", r"\boxed{1} \boxed{2"]
)
def test_a_row_without_a_whole_box_is_refused(tmp_path, solution):
    path = write(tmp_path, {"problem": "x", "solution": solution})
    assert "rows.jsonl:1: field 'solution'" in error_of(path, **BOXED)


# --- choices ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer", ["B", "b", 1])
def test_choices_become_lettered_lines(tmp_path, answer):
    path = write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", 3], "answer": answer})
    (problem,) = load(path)
    assert problem.text == "1 + 1?\n(A) 1\n(B) 2\n(C) 3"
    assert problem.answer == "B"
    assert problem.meta == {"choices": ("1", "2", "3"), "question": "1 + 1?"}
    (without_lines,) = load(path, options={"render_choices": False})
    assert without_lines.text == "1 + 1?"


@pytest.mark.parametrize("answer", ["D", "2", 3, -1, True, "AB", "", None, 1.0], ids=repr)
def test_an_answer_that_is_no_choice_is_refused(tmp_path, answer):
    error = error_of(write(tmp_path, {"problem": "1 + 1?", "choices": ["1", "2", "3"], "answer": answer}))
    assert "rows.jsonl:1: field 'answer' is " in error
    assert " with 3 choices" in error


@pytest.mark.parametrize(
    "choices",
    ["AB", ["1"], ["1"] * 27, ["1", ""], ["1", None], {"text": ["1", "2"]}],
    ids=["text", "one", "more than letters", "an empty one", "null", "an object"],
)
def test_choices_that_are_none_are_refused(tmp_path, choices):
    error = error_of(write(tmp_path, {"problem": "1 + 1?", "choices": choices, "answer": "A"}))
    assert "rows.jsonl:1: field 'choices'" in error


# --- Parquet ------------------------------------------------------------------------------------------------------
def test_parquet_reads_what_jsonl_reads(tmp_path):
    """More rows than are read at once."""
    rows = [{"question": f"{number} + 1?", "answer": number + 1, "id": f"q{number}"} for number in range(2500)]
    problems = load(write_parquet(tmp_path, rows), "parquet")
    assert problems == load(write(tmp_path, *rows))
    assert problems[2499] == Problem(id="q2499", text="2499 + 1?", answer="2500")


def test_a_malformed_row_of_a_parquet_file_is_named(tmp_path):
    path = write_parquet(tmp_path, [GOOD, GOOD | {"id": "b", "answer": None}])
    assert error_of(path, "parquet").startswith(f"{path} row 2: field 'answer'")


def test_another_file_is_no_parquet_file(tmp_path):
    assert "is not a readable Parquet file" in error_of(write(tmp_path, GOOD), "parquet")


def test_a_field_that_does_not_fit_into_json_is_refused_where_it_is_asked_for(tmp_path):
    path = write_parquet(tmp_path, [GOOD | {"raw": b"\x00"}])
    (problem,) = load(path, "parquet")
    assert problem.meta == {}
    assert "row 1: field 'raw' does not fit into JSON" in error_of(path, "parquet", fields={"raw": "raw"})


# --- CSV ----------------------------------------------------------------------------------------------------------
def write_csv(folder, content, name="rows.csv"):
    path = folder / name
    path.write_bytes(content)
    return path


def test_csv_reads_what_jsonl_reads(tmp_path):
    """Commas, quotes and line ends within a field; a byte order mark and line ends as spreadsheets write them."""
    rows = [
        {"id": "a", "question": 'He said "2, 3".\nHow many?', "answer": "2"},
        {"id": "b", "question": "1 + 1 = ?", "answer": "2"},
    ]
    content = b'\xef\xbb\xbfid,question,answer\r\na,"He said ""2, 3"".\nHow many?",2\r\nb,1 + 1 = ?,2\r\n\r\n'
    assert load(write_csv(tmp_path, content), "csv") == load(write(tmp_path, *rows))


def test_rows_of_a_csv_file_without_ids_are_numbered(tmp_path):
    problems = load(write_csv(tmp_path, b"question,answer,level\nx,1,hard\ny,2,\n"), "csv", fields={"level": "level"})
    assert [problem.id for problem in problems] == ["rows/1", "rows/2"]
    assert [problem.meta["level"] for problem in problems] == ["hard", ""]


def test_another_delimiter_is_an_option(tmp_path):
    path = write_csv(tmp_path, b"question\tanswer\n1, 2 or 3?\t2\n", "rows.tsv")
    (problem,) = load(path, "csv", options={"delimiter": "\t"})
    assert problem.text == "1, 2 or 3?"


MALFORMED_CSV = [
    (b"question,answer\nx,1\ny,2,3\n", "rows.csv:3: 3 fields, but the first line names 2 columns"),
    (b"question,answer\nx\n", "rows.csv:2: 1 fields, but"),
    (b'question,answer\n"x\ny",1\nz\n', "rows.csv:4: 1 fields, but"),
    (b'question,answer\n"x,1\n', "rows.csv:2: malformed CSV: unexpected end of data"),
    (b'question,answer\n"x"y,1\n', "rows.csv:2: malformed CSV: "),
    (b"question,answer\nx,1\n\ny,2\n", "rows.csv:3: blank line between rows"),
    (b"question,answer\nx,1\n\xff,2\n", "rows.csv:3: not UTF-8 (byte 1 of the line"),
    (b"question,answer,answer\nx,1,2\n", "rows.csv:1: the column 'answer' occurs twice"),
    (b"question,,answer\nx,1,2\n", "rows.csv:1: column 2 has no name"),
    (b"question,answer\nx,\n", "rows.csv:2: field 'answer' is empty"),
    (b"prompt,answer\nx,1\n", "fields: prompt, answer"),
    (b"question,answer\n", "has no rows"),
    (b"", "has no rows"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED_CSV, ids=[message for _, message in MALFORMED_CSV])
def test_a_malformed_row_of_a_csv_file_names_its_line(tmp_path, content, message):
    assert message in error_of(write_csv(tmp_path, content), "csv")


@pytest.mark.parametrize("delimiter", ["", ";;", '"', "\n", 1], ids=repr)
def test_a_delimiter_is_one_character(tmp_path, delimiter):
    path = write_csv(tmp_path, b"question,answer\nx,1\n")
    error = error_of(path, "csv", options={"delimiter": delimiter})
    assert error.startswith("data.train.options.delimiter: got ")


# --- saved datasets -----------------------------------------------------------------------------------------------
SAVED_ROWS = [{"question": "1 + 1?", "answer": 2}, {"question": "2 + 1?", "answer": 3}]


def saved_dataset():
    import datasets

    return datasets.Dataset.from_list(SAVED_ROWS)


def test_a_saved_dataset_is_read(tmp_path):
    saved_dataset().save_to_disk(tmp_path / "sums")
    problems = load(tmp_path / "sums", "saved")
    assert problems[1] == Problem(id="sums/2", text="2 + 1?", answer="3")


def test_a_split_of_a_saved_dataset_is_read(tmp_path):
    import datasets

    datasets.DatasetDict({"train": saved_dataset(), "test": saved_dataset()}).save_to_disk(tmp_path / "sums")
    assert len(load(tmp_path / "sums", "saved", split="train")) == 2
    assert error_of(tmp_path / "sums", "saved", split="tran").startswith(
        "data.train.split: got 'tran'; did you mean 'train'"
    )
    assert "data.train.split: got None" in error_of(tmp_path / "sums", "saved")


def test_a_saved_dataset_without_splits_has_none(tmp_path):
    saved_dataset().save_to_disk(tmp_path / "sums")
    assert "data.train.split: got 'train', but" in error_of(tmp_path / "sums", "saved", split="train")


def test_another_folder_is_no_saved_dataset(tmp_path):
    assert "a folder that save_to_disk wrote" in error_of(tmp_path, "saved")


def test_a_saved_dataset_whose_data_are_gone_is_one_line(tmp_path):
    saved_dataset().save_to_disk(tmp_path / "sums")
    for file in (tmp_path / "sums").glob("*.arrow"):
        file.unlink()
    assert f"{tmp_path / 'sums'} cannot be read" in error_of(tmp_path / "sums", "saved")


def test_a_saved_dataset_is_not_on_the_hub(tmp_path):
    saved_dataset().save_to_disk(tmp_path / "sums")
    config = DatasetConfig(dataset="hub", name=str(tmp_path / "sums"), split="train")
    with pytest.raises(UserError, match=r"set data\.train\.dataset=saved data\.train\.path="):
        load_problems(config, key="data.train", training=False, allow_test_split=False)


# --- hostile files ------------------------------------------------------------------------------------------------
HUNDRED_THOUSAND_FIELDS = ", ".join(f'"f{number}": 1' for number in range(100_000))


def test_a_hundred_thousand_fields_with_one_doubled_are_refused_at_once(tmp_path):
    """A comparison of each with each would take minutes."""
    path = write(tmp_path, f'{{{HUNDRED_THOUSAND_FIELDS}, "f99999": 2}}\n'.encode())
    with cpu_limit(10):
        assert "the field 'f99999' occurs twice" in error_of(path)


@pytest.mark.parametrize(
    ("more", "fields"),
    [("", {}), (', "text": "x", "answer": "1"', {"answer": "f100000"})],
    ids=["no known field", "a missing field"],
)
def test_a_message_about_a_row_of_a_hundred_thousand_fields_is_short(tmp_path, more, fields):
    path = write(tmp_path, f"{{{HUNDRED_THOUSAND_FIELDS}{more}}}\n".encode())
    with cpu_limit(10):
        assert len(error_of(path, fields=fields)) < 2000


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


@pytest.mark.parametrize(("characters", "rows"), [(10_000_000, 2000), (10, 3_000_000)], ids=["long texts", "many rows"])
def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch, characters, rows):
    """A file of 20 GB, and one whose rows take more than their values. The limit is lowered to spare this machine."""
    monkeypatch.setattr(sources, "MAX_UNPACKED", 2**26)
    path = parquet_of_one_text(tmp_path, characters, rows)
    assert path.stat().st_size < 40_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with cpu_limit(20):
        assert "unpacks to more than 0.0625 GiB, from" in error_of(path, "parquet")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 600_000


def test_a_parquet_file_that_unpacks_to_a_little_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_UNPACKED", 2**26)
    assert len(load(parquet_of_one_text(tmp_path, characters=1000, rows=5000), "parquet")) == 5000


def test_the_footer_of_a_parquet_file_is_looked_at_before_its_rows(tmp_path, monkeypatch):
    path = write_parquet(tmp_path, [GOOD | {"id": str(n), "more": "x" * 1000 * n} for n in range(10)])
    monkeypatch.setattr(sources, "MAX_UNPACKED", 100)
    monkeypatch.setattr(sources, "MAX_RATIO", 1)
    assert "unpacks to more than" in error_of(path, "parquet")


def test_a_file_that_unpacks_to_too_much_is_refused_before_a_row_is_used(tmp_path, monkeypatch):
    """What is made of a row may take a hundred times what it takes to unpack it."""
    monkeypatch.setattr(sources, "MAX_UNPACKED", 2**26)
    path = parquet_of_one_text(tmp_path, characters=10_000, rows=10_000)
    with pytest.raises(UserError, match="unpacks to more than"):
        next(iter(sources._parquet_rows(path, "data.train")))
