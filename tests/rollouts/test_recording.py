"""Recordings on disk: what is written comes back, in whatever file; a broken one is told in one sentence."""

import json
import shutil
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.records import FOREIGN_VERSION, STATUSES, STOP_REASONS, Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.rollouts.recording import FORMATS, Recording, RecordingWriter, from_row, to_row
from kl_comedy.training.callbacks import RecordRollouts
from kl_comedy.training.distributed import SINGLE_PROCESS


def draw_row(draw, number):
    """A completion of prompt ``number`` and its reward."""
    ids = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
    logps = draw(st.lists(st.floats(-50, 0, allow_nan=False), min_size=len(ids), max_size=len(ids)))
    flags = st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)).filter(any)
    trained = tuple(draw(st.just([]) | flags))
    starts = draw(st.sets(st.integers(1, 4))) & set(range(len(ids)))
    contexts = st.lists(st.integers(0, 10**6), min_size=1, max_size=3).map(tuple)
    drawn = [end for end, own in enumerate(trained or (True,) * len(ids), 1) if own]
    turn_ends = (*sorted(draw(st.sets(st.sampled_from(drawn))) - {drawn[-1]}), drawn[-1])
    paid = st.lists(st.floats(-5, 5), min_size=len(turn_ends), max_size=len(turn_ends)).map(tuple)
    rollout = Rollout(
        prompt=Prompt(problem=Problem(id=f"p{number}", text="", answer=""), text="", token_ids=(1, number)),
        group_id=number,
        completion_ids=tuple(ids),
        logps=tuple(logps),
        versions=(3,) * len(ids),
        stop_reason=draw(st.sampled_from(STOP_REASONS)),
        text=draw(st.text(max_size=8)),
        trained=trained,
        restarts=tuple((start, draw(contexts)) for start in sorted(starts)),
        turn_ends=turn_ends,
        turn_parts=draw(st.dictionaries(st.text(max_size=5), paid, max_size=2)),
    )
    reward = Reward(
        value=draw(st.floats(-5, 5)),
        status=draw(st.sampled_from(STATUSES)),
        parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-5, 5), max_size=2)),
    )
    return Scored(rollout=rollout, reward=reward)


@st.composite
def batches(draw):
    """One to four batches of one to four rows."""
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        row_count = draw(st.integers(1, 4))
        drawn.append([draw_row(draw, number) for number in range(row_count)])
    return drawn


def write(folder, batches, format):
    writer = RecordingWriter(folder, format, temperature=0.7)
    for number, rows in enumerate(batches):
        writer.write(number, rows)
    return writer


@pytest.mark.parametrize(
    ("updates_made", "batches_kept"),
    [(0, []), (1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1]), (6, [0, 1, 2]), (7, [0, 1, 2, 3])],
)
def test_a_resumed_run_keeps_the_recording_of_the_batch_that_it_is_in(tmp_path, updates_made, batches_kept):
    """With two updates per batch, update 3 is within the second batch, whose rows are not drawn again."""
    algorithm = SimpleNamespace(updates_per_batch=2, epochs_per_batch=1)
    config = SimpleNamespace(algorithm=algorithm, rollout=SimpleNamespace(temperature=0.7))
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for number in range(4):
        (folder / f"batch-{number:08d}.jsonl").touch()
    module = SimpleNamespace(config=config, run_folder=tmp_path, version=updates_made, ranks=SINGLE_PROCESS)
    RecordRollouts().on_train_start(None, module)
    names = sorted(part.name for part in folder.iterdir())
    assert names == [f"batch-{number:08d}.jsonl" for number in batches_kept]


def opened(path):
    """The recording at ``path``, whose batches are checked by nothing else."""
    return Recording(path, check=lambda batch: None)


def one_file(folder, format, target):
    """All parts in one file; Parquet in row groups that do not respect batches."""
    parts = sorted(folder.glob(f"batch-*.{format}"))
    if format == "jsonl":
        target.write_bytes(b"".join(part.read_bytes() for part in parts))
        return
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.concat_tables([pyarrow.parquet.read_table(part) for part in parts])
    pyarrow.parquet.write_table(table, target, row_group_size=3)


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=batches())
def test_what_is_written_comes_back_from_parts_and_from_one_file(tmp_path, format, written):
    folder = tmp_path / "parts"
    # The folder of the example before: hypothesis calls this function again with the same tmp_path.
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, written, format)
    whole = tmp_path / f"all.{format}"
    one_file(folder, format, whole)
    for path in (folder, whole):
        recording = opened(path)
        assert len(recording) == len(written)
        # The last batch first: a file is read from any place.
        for number in reversed(range(len(written))):
            assert_same_batch(recording.read(number), written[number], number)


def assert_same_batch(rows, written_rows, number):
    """The rows read are those written, up to the versions, which mean nothing to another run."""
    assert rows == [to_row(number, row, temperature=0.7) for row in written_rows]
    for row, written in zip(rows, written_rows, strict=True):
        read = from_row(row, written.rollout.prompt)
        assert read.reward == written.reward
        assert read.rollout.completion_ids == written.rollout.completion_ids
        assert read.rollout.logps == written.rollout.logps
        assert read.rollout.trained == written.rollout.trained
        assert read.rollout.restarts == written.rollout.restarts
        assert set(read.rollout.versions) == {FOREIGN_VERSION}


def plain_batches(count=3):
    # Valid in every respect: the tests below spoil one thing each.
    prompt = Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=(1,))
    rollout = Rollout(
        prompt=prompt,
        group_id=0,
        completion_ids=(1, 2),
        logps=(-0.5, -1.0),
        versions=(0, 0),
        stop_reason="eos",
        text="1",
    )
    return [[Scored(rollout=rollout, reward=Reward(value=1.0, parts={"zero": 1.0}))] for _ in range(count)]


def test_a_batch_written_again_is_replaced_and_later_ones_can_be_forgotten(tmp_path):
    folder = tmp_path / "r"
    writer = write(folder, plain_batches(4), "jsonl")
    two_rows = plain_batches()[0] * 2
    writer.write(1, two_rows)
    recording = opened(folder)
    assert [len(recording.read(number)) for number in range(4)] == [1, 2, 1, 1]
    writer.remove_from(2)
    assert len(opened(folder)) == 2
    assert len(list(folder.iterdir())) == 2


def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kl_comedy.rollouts.recording.atomic_write", refuse)
    with pytest.raises(RunFailed, match=r"the rollouts of batch 0 cannot be written to .*No space left"):
        write(tmp_path / "r", plain_batches(1), "jsonl")


BROKEN = {
    "no logps": (lambda row: row.pop("logps"), r"row 2: logps is missing .*train\.record_rollouts"),
    "null logps": (lambda row: row.update(logps=None), "row 2: logps is missing"),
    "a log-prob above 0": (lambda row: row.update(logps=[-1.0, 0.5]), "row 2: logps is not the sampler's log-prob"),
    "an infinite log-prob": (lambda row: row.update(logps=[-1.0, float("-inf")]), "row 2: logps is not"),
    "too few logps": (lambda row: row.update(logps=[-1.0]), "row 2: logps has 1 numbers for the 2 tokens"),
    "no tokens": (lambda row: row.update(completion_ids=[], logps=[], versions=[]), "completion_ids is not token ids"),
    "text for ids": (lambda row: row.update(prompt_ids="ab"), "prompt_ids is not token ids of the prompt"),
    "trained of another length": (lambda row: row.update(trained=[True]), "row 2: trained has 1 entries for the 2"),
    "trained that is no flag": (
        lambda row: row.update(trained=[1, 0]),
        "row 2: trained is not whether the policy",
    ),
    "no token of the policy": (lambda row: row.update(trained=[False, False]), "trained is false for every token"),
    "a row without context": (lambda row: row.update(restarts=[[1]]), "row 2: restarts is not for each row after"),
    "a row that is no list": (lambda row: row.update(restarts=[1, 2]), "row 2: restarts is not for each row after"),
    "a row behind the end": (lambda row: row.update(restarts=[[2, 7]]), r"row 2: restarts begins rows at \[2\]"),
    "rows in another order": (lambda row: row.update(restarts=[[1, 7], [1, 8]]), r"begins rows at \[1, 1\]; expected"),
    "a dialogue without turns": (lambda row: row.update(trained=[False, True]), "row 2: turn_ends is missing"),
    "a turn that ends with a tool's token": (
        lambda row: row.update(trained=[False, True], turn_ends=[1, 2]),
        r"row 2: turns that end at \[1, 2\]: not each with a token of the policy",
    ),
    "tokens behind the last turn": (lambda row: row.update(turn_ends=[1]), r"row 2: turns that end at \[1\]"),
    "a part of one turn of two": (
        lambda row: row.update(turn_ends=[1, 2], turn_parts={"solved": [1.0]}),
        "row 2: parts of the reward that are not one for each of its 2 turns",
    ),
    "an unknown status": (lambda row: row.update(status="fine"), "row 2: status is not"),
    "a missing batch": (lambda row: row.update(batch=3), "batch 3 comes after batch 0; a recording holds every batch"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_row_is_named_with_its_fault(tmp_path, change, message):
    rows = [to_row(number, batch[0], temperature=1.0) for number, batch in enumerate(plain_batches())]
    change(rows[1])
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"rollout\.options\.path: .*{message}"):
        opened(file)


def test_a_path_that_does_not_exist_is_no_recording(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        opened(tmp_path / "nothing")


def test_a_folder_without_parts_is_no_recording(tmp_path):
    with pytest.raises(UserError, match=r"holds no batch-\*\.jsonl"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a", r"allowed: a folder of parts, a \.jsonl or a \.parquet"),
        ("a.jsonl", b"{", "row 1: no readable row"),
        ("empty.jsonl", b"", "holds no rollouts"),
        ("a.parquet", b"PAR1 and no more", "not a readable Parquet file"),
    ],
    ids=["another kind of file", "cut JSON", "empty", "cut Parquet"],
)
def test_files_that_are_no_recording_are_told_apart(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / name)


def test_a_folder_of_two_formats_is_no_recording(tmp_path):
    for format in FORMATS:
        write(tmp_path, plain_batches(1), format)
    with pytest.raises(UserError, match="both JSONL and Parquet"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "has changed since this run began"), ("{}", "batch 1 .* cannot be read any more")],
    ids=["emptied", "other rows"],
)
def test_a_recording_that_changes_during_a_run_ends_it(tmp_path, content, message):
    write(tmp_path / "r", plain_batches(), "jsonl")
    recording = opened(tmp_path / "r")
    (tmp_path / "r" / "batch-00000001.jsonl").write_text(content)
    with pytest.raises(RunFailed, match=message):
        recording.read(1)
