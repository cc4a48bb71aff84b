"""The manifest is written once; the scripts are exactly the golden ones; profiles are checked."""

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from kl_comedy.errors import UserError
from kl_comedy.slurm import scheduler, submit
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.journal import Submission, read_attempts, record_end, record_start, record_submission
from kl_comedy.slurm.local import by_seed
from kl_comedy.slurm.manifest import STAGES, Sweep, plan, read_sweep, write_sweep
from kl_comedy.slurm.profile import Container, Profile, read_profile
from kl_comedy.slurm.render import array_ranges, render
from kl_comedy.slurm.status import read_status

GOLDEN = Path(__file__).parents[1] / "golden"
PROFILES = Path(__file__).parents[2] / "slurm" / "profiles"


@pytest.fixture
def made(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {options: {preset: tiny}}\n")
    (tmp_path / "grid.yaml").write_text(
        "base: base.yaml\ngrid: {optimizer.lr: {from: 0.001, to: 0.01, num: 10}}\nevaluate: {}\n"
    )
    manifest = plan(read_grid(tmp_path / "grid.yaml"), directory=tmp_path)
    return write_sweep(tmp_path / "sweeps" / "grid", manifest, "model: {options: {preset: tiny}}\n")


def test_writing_twice_changes_nothing_and_reading_gives_it_back(made):
    before = (made.path / "manifest.json").stat().st_mtime_ns
    again = write_sweep(made.path, made.manifest, "something else")
    assert (made.path / "manifest.json").stat().st_mtime_ns == before
    assert made.base.read_text() == "model: {options: {preset: tiny}}\n"
    assert read_sweep(made.path) == again == made


def test_on_this_machine_every_cell_gets_its_first_seed_before_any_gets_its_second(made, tmp_path):
    (tmp_path / "seeds.yaml").write_text("base: base.yaml\ngrid: {optimizer.lr: [0.001, 0.01]}\nseeds: [7, 3]\n")
    manifest = plan(read_grid(tmp_path / "seeds.yaml"), directory=tmp_path)
    sweep = write_sweep(tmp_path / "sweeps" / "seeds", manifest, "model: {options: {preset: tiny}}\n")
    cells = [sweep.cell(index) for index in by_seed(sweep, (3, 2, 1, 0))]
    order = [(cell.seed, cell.values["optimizer.lr"]) for cell in cells]
    assert order == [(3, "0.001"), (3, "0.01"), (7, "0.001"), (7, "0.01")]


def test_another_version_a_hand_edit_and_a_ruin_are_refused(made):
    file = made.path / "manifest.json"
    data = json.loads(file.read_text())
    for change, words in (
        ({"version": 2}, "another version of kl_comedy"),
        ({"name": "other"}, "changed by hand"),
        ({"cells": None}, "not a whole manifest"),
    ):
        file.write_text(json.dumps({**data, **change}))
        with pytest.raises(UserError, match=words):
            read_sweep(made.path)
    file.write_text("{")
    with pytest.raises(UserError, match="not a manifest"):
        read_sweep(made.path)


def test_a_sweep_that_is_not_there_names_the_nearest(made, monkeypatch):
    monkeypatch.chdir(made.path.parents[1])
    assert read_sweep(Path("grid")) == made
    with pytest.raises(UserError, match="no sweep at gird; did you mean 'grid'"):
        read_sweep(Path("gird"))


def test_another_manifest_in_the_folder_is_refused(made):
    fewer = replace(made.manifest, cells=made.manifest.cells[:3])
    with pytest.raises(UserError, match="10 cells there, 3 planned now"):
        write_sweep(made.path, fewer, "")


def _golden_sweep(made):
    manifest = replace(made.manifest, directory="/home/ada/work", name="beta")
    return Sweep(path=Path("/home/ada/work/sweeps/beta"), manifest=manifest)


@pytest.mark.parametrize("name", ["gpu", "gpu_container", "gpu_servers", "cpu_test", "pyxis"])
@pytest.mark.parametrize("stage", STAGES)
def test_scripts_are_the_golden_ones(made, name, stage):
    """KL_COMEDY_GOLDEN=write renews them; read the diff."""
    if name == "pyxis":
        container = Container(image="nvcr.io#site/kl:1", runtime="pyxis", mounts=["/data", "/a:/b"])
        profile = Profile(
            name=name,
            time="30",
            nodes=2,
            tasks_per_node=4,
            gpus_per_node=4,
            gpu_type="h100",
            container=container,
            python="python",
            extra=["--exclusive"],
            qos="high",
            environment={"A": 'say "hi" `x` $(y) $HOME'},
        )
    else:
        profile = read_profile(str(PROFILES / f"{name}.yaml"))
        if name in ("cpu_test", "gpu_servers"):
            profile = replace(profile, python="/home/ada/.venv/bin/python")
    text = render(_golden_sweep(made), profile, stage)
    file = GOLDEN / f"sweep_{name}_{stage}.sbatch"
    if os.environ.get("KL_COMEDY_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


PROFILE_MISTAKES = {
    "partition: gpu": "needs time",
    "time: 4:00:00": "quoted text",
    "time: '1'\npartitoin: gpu": "did you mean 'partition'",
    "time: '1'\nnodes: 0": "nodes: got 0; allowed: at least 1",
    "time: '1'\nsetup: source x": "setup: got 'source x'; allowed: a list",
    "time: '1'\npartition: \"a\\n#SBATCH --uid=0\"": "one line",
    "time: '1'\nenvironment: {'A B': 1}": "names of variables",
    "time: '1'\ncontainer: {image: x, runtime: docker}": "apptainer, pyxis",
    "time: '1'\ncontainer: {runtime: pyxis}": "container: needs image",
    "time: '1'\nservers: {count: 2}": "servers: needs command",
    "time: '1'\nservers: {command: 'x {port}', gpu: 1}": "did you mean 'gpus'",
    "time: '1'\nservers: {command: 'x {port}', count: 0}": "servers.count: got 0",
    "time: '1'\nservers: {command: vllm serve}": "with {port} in it",
    "time: '1'\nservers: {command: \"x ' {port}\"}": "No closing quotation",
    "time: '1'\nservers: {command: 'x {port}', ready: health}": "a path, as in /health",
    "time: '1'\nnodes: 2\nservers: {command: 'x {port}'}": "give the servers nodes of their own",
}


@pytest.mark.parametrize("text", PROFILE_MISTAKES)
def test_a_mistake_in_a_profile_is_one_clear_error(tmp_path, text):
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(UserError, match=PROFILE_MISTAKES[text]):
        read_profile(str(tmp_path / "p.yaml"))


def test_a_profile_that_is_not_there_names_the_nearest(monkeypatch):
    monkeypatch.chdir(PROFILES.parents[1])
    with pytest.raises(UserError, match="there are: cpu_test, gpu, gpu_container, gpu_servers; did you mean 'gpu'"):
        read_profile("gpuu")
    with pytest.raises(UserError, match="no such profile file"):
        read_profile("nowhere/x.yaml")


def test_submission_chains_arrays_and_cuts_them_where_the_site_bounds_indices(made, monkeypatch):
    slurm = FakeSlurm(monkeypatch)
    profile = Profile(name="p", time="1", max_array=4, max_parallel=6)
    submit.submit(made, profile, Path("p.yaml"), submit.Work(train=(0, 1, 3, 5, 9), evaluate=(2,)))
    shown = [" ".join(words[3:]).replace(str(made.path), "S") for words in slurm.calls]
    dep = "--kill-on-invalid-dep=yes"
    assert shown == [
        "--array=0-1,3%3 S/train.sbatch 0",
        f"--array=0-1,3%3 --dependency=aftercorr:1 {dep} S/evaluate.sbatch 0",
        "--array=1%1 S/train.sbatch 4",
        f"--array=1%1 --dependency=aftercorr:3 {dep} S/evaluate.sbatch 4",
        "--array=1%1 S/train.sbatch 8",
        f"--array=1%1 --dependency=aftercorr:5 {dep} S/evaluate.sbatch 8",
        "--array=2%6 S/evaluate.sbatch 0",
        f"--dependency=afterany:1:2:3:4:5:6:7 {dep} S/report.sbatch",
    ]


def test_states_from_queue_attempts_and_folders(made, monkeypatch):
    slurm = FakeSlurm(monkeypatch)
    submit.submit(made, Profile(name="p", time="1"), Path("p.yaml"), submit.Work(train=tuple(range(9)), evaluate=()))
    slurm.queue = (
        "\n".join(
            [
                "1|0|RUNNING|n1||None",
                "1|1|PENDING|||Resources",
                "1|2|FAILED|n2||NonZeroExitCode",
                "1|3|TIMEOUT|n2||TimeLimit",
                "1|4|OUT_OF_MEMORY|n2||OutOfMemory",
                "1|5|CANCELLED|n2||None",
                "1|6|PENDING|||BeginTime",
                "1|7|COMPLETED|n2||None",
            ]
        )
        + "\n"
    )
    for index, code, reason in ((2, 2, "no such file"), (3, None, ""), (4, None, ""), (6, 75, "saved"), (7, 0, None)):
        process = {"process.pid": str(index), "process.host": "n2"}
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        record_start(made, index, "train", process)
        if code is not None:
            record_end(made, index, process["process.pid"], code, reason)
    run = made.runs / f"{made.manifest.cells[7].name}-{made.manifest.cells[7].config_hash}-1"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"status": "FINISHED"}')
    (run / "spool.jsonl").write_text('{"kind": "metrics", "step": 5, "data": {"train/reward": 0.5}}\n{"kind": "met')
    seen = read_status(made)
    assert [(row.state, row.why) for row in seen.rows] == [
        ("RUNNING", ""),
        ("PENDING", "Resources"),
        ("FAILED", "no such file"),
        ("DIED", "ended without a message: TimeLimit"),
        ("DIED", "ended without a message: OutOfMemory"),
        ("CANCELLED", "CANCELLED"),
        ("PENDING", "started again at update 0 (BeginTime)"),
        ("FINISHED", ""),
        ("DIED", "job 1 left the queue before it began"),
        ("PLANNED", ""),
    ]
    assert (seen.rows[7].step, seen.rows[7].reward) == (5, 0.5)
    assert "accounting storage is disabled" in seen.notes[0]
    assert submit.missing_work(made, seen) == submit.Work(train=(2, 3, 4, 5, 8, 9), evaluate=(7,))


def test_an_attempt_belongs_to_its_job_whatever_the_clocks_say(made, monkeypatch):
    """A node whose clock is an hour behind began its cell before it was submitted, by the numbers alone."""
    slurm = FakeSlurm(monkeypatch)
    submit.submit(made, Profile(name="p", time="1"), Path("p.yaml"), submit.Work(train=(0, 1), evaluate=()))
    slurm.queue = "1|0|FAILED|n1||NonZeroExitCode\n1|1|FAILED|n1||NonZeroExitCode\n"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    for index, job in ((0, "1"), (1, "77")):
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", job)
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        process = {"process.pid": str(index), "process.host": "n1"}
        record_start(made, index, "train", process)
        record_end(made, index, process["process.pid"], 2, "no such file")
    assert [(row.state, row.why) for row in read_status(made).rows[:2]] == [
        ("FAILED", "no such file"),
        ("DIED", "NonZeroExitCode"),
    ]


def test_where_slurm_does_not_answer_nothing_is_taken_for_lost(made, monkeypatch):
    FakeSlurm(monkeypatch)
    submit.submit(made, Profile(name="p", time="1"), Path("p.yaml"), submit.Work(train=(0, 1), evaluate=()))
    record_start(made, 0, "train", {"process.pid": "1", "process.host": "elsewhere"})

    def absent(words):
        raise UserError("squeue: no such command here")

    monkeypatch.setattr(scheduler, "_call", absent)
    seen = read_status(made)
    assert [row.state for row in seen.rows[:3]] == ["RUNNING", "PENDING", "PLANNED"]
    assert 0 not in submit.missing_work(made, seen).train and "squeue" in seen.notes[0]


def test_a_job_whose_submitter_never_heard_of_it_is_found_and_not_submitted_again(made, monkeypatch):
    """sbatch was accepted, and its caller was killed before it could write down the id."""
    slurm = FakeSlurm(monkeypatch)
    work = submit.Work(train=(0, 1, 2), evaluate=())
    submit.submit(made, Profile(name="p", time="1"), Path("p.yaml"), work)
    (made.path / "submissions.jsonl").unlink()
    assert {row.state for row in read_status(made).rows} == {"PLANNED"}
    comment = next(word for word in slurm.calls[0] if word.startswith("--comment=")).removeprefix("--comment=")
    other = comment.replace("-", "-0", 1)
    slurm.queue = "".join(f"1|{n}|PENDING||{comment}|Resources\n9|{n}|PENDING||{other}|Resources\n" for n in range(3))
    monkeypatch.setattr(submit.shutil, "which", lambda name: f"/usr/bin/{name}")
    (found,) = submit.adopt_unrecorded_jobs(made)
    assert (found.job, found.stage, found.indices) == ("1", "train", (0, 1, 2))
    assert submit.adopt_unrecorded_jobs(made) == []
    assert submit.missing_work(made, read_status(made)).train == tuple(range(3, len(made.manifest.cells)))


def test_without_sbatch_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch: no such command here; .* --local N"):
        scheduler.sbatch(["sbatch", "x"])


def test_an_attempt_without_a_last_word_and_a_torn_line(made):
    process = {"process.pid": "5", "process.host": "n1"}
    record_start(made, 0, "train", process)
    with (made.path / "cells/00000.jsonl").open("a") as file:
        file.write('{"pid": "5", "en')
    assert [attempt.code for attempt in read_attempts(made, 0)] == [None]


def test_a_thousand_cells_are_submitted_and_looked_up_in_seconds(tmp_path, monkeypatch):

    (tmp_path / "base.yaml").write_text("model: {options: {preset: tiny}}\n")
    (tmp_path / "grid.yaml").write_text(
        "base: base.yaml\ngrid: {kl: {a: [{estimator: k1}], b: [{estimator: k3}]}, optimizer.lr: "
        "{from: 0.001, to: 0.01, num: 10}}\nseeds: 50\n"
    )
    start = time.process_time()
    manifest = plan(read_grid(tmp_path / "grid.yaml"), directory=tmp_path)
    made = write_sweep(tmp_path / "s", manifest, "")
    slurm = FakeSlurm(monkeypatch)
    submit.submit(made, Profile(name="p", time="1"), Path("p"), submit.Work(train=tuple(range(1000)), evaluate=()))
    slurm.queue = "".join(f"1|{index}|RUNNING|n1||None\n" for index in range(1000))
    for index in range(1000):
        record_start(made, index, "train", {"process.pid": str(index)})
    assert read_sweep(made.path) == made
    assert read_status(made).counts() == {"RUNNING": 1000}
    assert time.process_time() - start < 60
    assert [words[3] for words in slurm.calls[:1]] == ["--array=0-999"]


def test_ranges_cover_exactly_their_indices():
    from hypothesis import given
    from hypothesis import strategies as st

    @given(st.sets(st.integers(0, 300)))
    def check(indices):
        found = set()
        for part in filter(None, array_ranges(indices).split(",")):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
        assert found == indices

    check()


def test_a_local_submission_whose_manager_is_gone_is_planned_again(made):
    from kl_comedy.tracking.provenance import process_tags

    gone = {**process_tags(), "process.pid": "999999999"}
    record_submission(made, Submission(stage="train", indices=(0,), time=0.0, process=gone, workers=1))
    alive = Submission(stage="train", indices=(1,), time=0.0, process=process_tags(), workers=1)
    record_submission(made, alive)
    assert [row.state for row in read_status(made).rows[:3]] == ["PLANNED", "PENDING", "PLANNED"]
