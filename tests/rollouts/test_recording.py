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


@st.composite
def batches(draw):
    finite = st.floats(-50, 0, allow_nan=False)
    made = []
    for _ in range(draw(st.integers(1, 4))):
        rows = []
        for n in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
            text = draw(st.text(max_size=8))
            prompt = Prompt(problem=Problem(id=f"p{n}", text="", answer=""), text="", token_ids=(1, n))
            rollout = Rollout(
                prompt=prompt,
                group_id=n,
                completion_ids=tuple(ids),
                logps=tuple(draw(st.lists(finite, min_size=len(ids), max_size=len(ids)))),
                versions=(3,) * len(ids),
                stop_reason=draw(st.sampled_from(STOP_REASONS)),
                text=text,
            )
            reward = Reward(
                value=draw(st.floats(-5, 5)),
                status=draw(st.sampled_from(STATUSES)),
                parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-5, 5), max_size=2)),
            )
            rows.append(Scored(rollout=rollout, reward=reward))
        made.append(rows)
    return made


def write(folder, batches, format):
    writer = RecordingWriter(folder, format, temperature=0.7)
    for number, rows in enumerate(batches):
        writer.write(number, rows)
    return writer


def test_a_resumed_run_keeps_the_recording_of_the_batch_that_it_is_in(tmp_path):
    """Update 3 of two a batch is within the second batch, whose rows are not drawn again."""
    algorithm = SimpleNamespace(updates_per_batch=2, epochs_per_batch=1)
    config = SimpleNamespace(algorithm=algorithm, rollout=SimpleNamespace(temperature=0.7))
    for version, kept in ((0, []), (1, [0]), (2, [0]), (3, [0, 1]), (4, [0, 1]), (6, [0, 1, 2]), (7, [0, 1, 2, 3])):
        for number in range(4):
            (tmp_path / "rollouts").mkdir(exist_ok=True)
            (tmp_path / "rollouts" / f"batch-{number:08d}.jsonl").touch()
        module = SimpleNamespace(config=config, run_folder=tmp_path, version=version, ranks=SINGLE_PROCESS)
        RecordRollouts().on_train_start(None, module)
        names = sorted(part.name for part in (tmp_path / "rollouts").iterdir())
        assert names == [f"batch-{number:08d}.jsonl" for number in kept], version


def opened(path, check=lambda batch: None):
    return Recording(path, check=check)


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
@given(made=batches())
def test_what_is_written_comes_back_from_parts_and_from_one_file(tmp_path, format, made):
    folder, whole = tmp_path / "parts", tmp_path / f"all.{format}"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, made, format)
    one_file(folder, format, whole)
    for path in (folder, whole):
        recording = opened(path)
        assert len(recording) == len(made)
        for number in reversed(range(len(made))):
            rows = recording.read(number)
            assert rows == [to_row(number, row, temperature=0.7) for row in made[number]]
            back = [from_row(row, was.rollout.prompt) for row, was in zip(rows, made[number], strict=True)]
            for now, was in zip(back, made[number], strict=True):
                assert now.reward == was.reward
                assert (now.rollout.completion_ids, now.rollout.logps) == (
                    was.rollout.completion_ids,
                    was.rollout.logps,
                )
                assert set(now.rollout.versions) == {FOREIGN_VERSION}


def plain_batches(count=3):
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
    writer = write(tmp_path / "r", plain_batches(4), "jsonl")
    writer.write(1, plain_batches()[0] * 2)
    assert [len(opened(tmp_path / "r").read(n)) for n in range(4)] == [1, 2, 1, 1]
    writer.remove_from(2)
    assert len(opened(tmp_path / "r")) == 2 and len(list((tmp_path / "r").iterdir())) == 2


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
    "an unknown status": (lambda row: row.update(status="fine"), "row 2: status is not"),
    "a missing batch": (lambda row: row.update(batch=3), "batch 3 comes after batch 0; a recording holds every batch"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_row_is_named_with_its_fault(tmp_path, fault):
    rows = [to_row(n, batch[0], temperature=1.0) for n, batch in enumerate(plain_batches())]
    change, message = BROKEN[fault]
    change(rows[1])
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=rf"rollout\.options\.path: .*{message}"):
        opened(file)


def test_files_that_are_no_recording_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        opened(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"holds no batch-\*\.jsonl"):
        opened(tmp_path)
    (tmp_path / "a.csv").write_text("a")
    with pytest.raises(UserError, match=r"allowed: a folder of parts, a \.jsonl or a \.parquet"):
        opened(tmp_path / "a.csv")
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(UserError, match="row 1: no readable row"):
        opened(tmp_path / "a.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no rollouts"):
        opened(tmp_path / "empty.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        opened(tmp_path / "a.parquet")
    both = tmp_path / "both"
    for format in FORMATS:
        write(both, plain_batches(1), format)
    with pytest.raises(UserError, match="both JSONL and Parquet"):
        opened(both)


def test_a_recording_that_changes_during_a_run_ends_it(tmp_path):
    write(tmp_path / "r", plain_batches(), "jsonl")
    recording = opened(tmp_path / "r")
    part = tmp_path / "r" / "batch-00000001.jsonl"
    for content, message in (("", "has changed since this run began"), ("{}", "batch 1 .* cannot be read any more")):
        part.write_text(content)
        with pytest.raises(RunFailed, match=message):
            recording.read(1)
