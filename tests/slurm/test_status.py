"""What is submitted to SLURM, by whom it is recorded, and the state of every cell afterwards."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fake_slurm import FakeSlurm, plan_sweep
from kl_comedy.cli.sweep import evaluation_state
from kl_comedy.cli.sweep_job import recorded_attempt
from kl_comedy.errors import RunFailed, RunInterrupted, RunStopped, UserError
from kl_comedy.slurm import local, submit
from kl_comedy.slurm.manifest import Attempt, Submission, read_sweep
from kl_comedy.slurm.profile import Profile, read_profile
from kl_comedy.slurm.scripts import scripts
from kl_comedy.slurm.status import (
    RULES,
    STATES,
    UNKNOWN,
    cell_facts,
    cell_metrics,
    cell_state,
    missing_work,
    read_status,
)
from kl_comedy.tracking.provenance import process_tags

SITE = Profile(name="p", time="10")


@pytest.fixture
def slurm(monkeypatch):
    return FakeSlurm(monkeypatch)


@pytest.fixture
def sweep(tmp_path):
    return plan_sweep(
        tmp_path,
        "grid: {optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01]}\nevaluate: {}\n",
    )


def submit_cells(sweep, *train, profile=SITE, evaluate=()):
    submit.submit(sweep, profile, Path("p.yaml"), submit.Work(train=train, evaluate=evaluate))


def record(sweep, monkeypatch, index, job="1", code=None, reason=None):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", job)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
    sweep.record_start(index, "train", {"process.pid": str(index), "process.host": "n2"})
    if code is not None:
        sweep.record_end(index, str(index), code, reason)


def shown(slurm, sweep):
    """The commands to SLURM without what all of them have."""
    lines = []
    for words in slurm.calls:
        line = " ".join(words[3:])
        lines.append(line.replace(f"{sweep.path}/", "").replace(" --kill-on-invalid-dep=yes", ""))
    return lines


def test_arrays_are_cut_where_the_site_bounds_indices_and_chained(sweep, slurm):
    # Indices up to 3 are allowed, so that cell 5 is task 1 of an array from cell 4 on.
    profile = Profile(name="p", time="10", max_array=4, max_parallel=6)
    submit_cells(sweep, 0, 1, 3, 5, 9, profile=profile, evaluate=(2,))
    assert shown(slurm, sweep) == [
        "--array=0-1,3%3 train.sbatch 0",
        "--array=0-1,3%3 --dependency=aftercorr:1,afterany:1 evaluate.sbatch 0",
        "--array=1%1 train.sbatch 4",
        "--array=1%1 --dependency=aftercorr:3,afterany:3 evaluate.sbatch 4",
        "--array=1%1 train.sbatch 8",
        "--array=1%1 --dependency=aftercorr:5,afterany:5 evaluate.sbatch 8",
        "--array=2%1 evaluate.sbatch 0",
        "--dependency=afterany:1:2:3:4:5:6:7 report.sbatch",
    ]


def test_planned_commands_name_jobs_that_have_no_id_yet(sweep):
    planned = submit.planned_commands(sweep, SITE)
    assert [line.split()[3] for line in planned] == ["--array=0-9", "--array=0-9", "--dependency=afterany:JOB_1:JOB_2"]
    assert "--dependency=aftercorr:JOB_1" in planned[1]


SIZES = """
grid: {optimizer.lr: [0.001, 0.01, 0.1]}
rows:
  shards: {seed: 1, train.strategy: fsdp, train.nodes: 2, train.devices: 4}
  copies: {seed: 2, train.strategy: ddp, train.devices: 2}
evaluate: {}
"""
SHAPES = """
time: "60"
memory: 8G
max_parallel: 4
python: python
shapes:
  - {nodes: 2, tasks_per_node: 4, memory: 64G, partition: wide}
  - {tasks_per_node: 2}
"""


@pytest.fixture
def sizes(tmp_path):
    """Three cells of one process, one of 2 nodes with 4 processes each, and one of 2 processes on a node."""
    return plan_sweep(tmp_path, SIZES)


@pytest.fixture
def shapes(tmp_path):
    """The profile of a site that takes all three sizes."""
    (tmp_path / "site.yaml").write_text(SHAPES)
    return read_profile(str(tmp_path / "site.yaml"))


def test_sizes_are_read_back(sizes):
    assert read_sweep(sizes.path) == sizes
    assert sizes.cell(3).size == (2, 4)


def test_a_size_that_the_site_does_not_take_is_refused(slurm, sizes, shapes):
    narrow = Profile(name="p", time="10", shapes=shapes.shapes[:1])
    message = r"cell 4 \(copies\): .* is 1 x 2, .* 1 x 1, 2 x 4 only; add shapes: \[\{nodes: 1, tasks_per_node: 2"
    with pytest.raises(UserError, match=message):
        submit_cells(sizes, 0, 4, profile=narrow)
    assert slurm.calls == [], "nothing is submitted"
    assert not list(sizes.path.glob("*.sbatch")), "nothing is written"


def test_each_size_is_an_array_of_its_own_and_the_report_waits_for_all(slurm, sizes, shapes):
    submit_cells(sizes, 0, 1, 2, 3, 4, profile=shapes)
    assert shown(slurm, sizes) == [
        "--array=0-2%2 train.sbatch 0",
        "--array=0-2%2 --dependency=aftercorr:1,afterany:1 evaluate.sbatch 0",
        "--array=3%1 train-2x4.sbatch 0",
        "--array=3%1 --dependency=aftercorr:3,afterany:3 evaluate-2x4.sbatch 0",
        "--array=4%1 train-1x2.sbatch 0",
        "--array=4%1 --dependency=aftercorr:5,afterany:5 evaluate-1x2.sbatch 0",
        "--dependency=afterany:1:2:3:4:5:6 report.sbatch",
    ]


SCRIPTS_OF_SIZES = {
    "train-2x4": {"nodes=2", "ntasks-per-node=4", "mem=64G", "partition=wide"},
    "train-1x2": {"nodes=1", "ntasks-per-node=2", "mem=8G"},
    "train": {"nodes=1", "ntasks-per-node=1", "mem=8G"},
    "evaluate-2x4": {"nodes=1", "ntasks-per-node=1", "mem=64G"},
}


def test_each_size_has_a_script_of_its_own(slurm, sizes, shapes):
    submit_cells(sizes, 0, 1, 2, 3, 4, profile=shapes)
    for name, options in SCRIPTS_OF_SIZES.items():
        lines = set((sizes.path / f"{name}.sbatch").read_text().splitlines())
        assert {f"#SBATCH --{option}" for option in options} <= lines, name


def test_scripts_are_those_of_the_cells_that_are_submitted(sizes, shapes):
    texts = scripts(sizes, shapes, sizes.manifest.cells[3:])
    assert list(texts) == ["train-1x2", "train-2x4", "evaluate-1x2", "evaluate-2x4", "report"]
    for text in texts.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_tasks_of_all_sizes_are_found_and_cancelled(slurm, sizes, shapes):
    submit_cells(sizes, 0, 1, 2, 3, 4, profile=shapes)
    jobs = ["1_0", "1_1", "1_2", "3_3", "5_4"]
    slurm.queue = "".join(f"{job.replace('_', '|')}|RUNNING|n1||None\n" for job in jobs)
    status = read_status(sizes)
    assert [row.job for row in status.rows] == jobs
    assert submit.active_jobs(sizes) == jobs
    assert status.counts() == {"RUNNING": 5}
    assert missing_work(sizes, status) == submit.Work(train=(), evaluate=())
    submit.scancel(submit.active_jobs(sizes))
    assert slurm.calls[-1] == ["scancel", "1", "3", "5"]
    slurm.queue = slurm.queue.replace("RUNNING", "CANCELLED")
    assert read_status(sizes).counts() == {"STOPPED": 5}


QUEUE = """1|0|RUNNING|n1||None
1|1|PENDING|||Resources
1|2|FAILED|n2||NonZeroExitCode
1|3|TIMEOUT|n2||TimeLimit
1|4|OUT_OF_MEMORY|n2||OutOfMemory
1|5|CANCELLED|n2||None
1|6|PENDING|||BeginTime
1|7|COMPLETED|n2||None
"""


def test_states_from_queue_attempts_and_folders(sweep, slurm, monkeypatch):
    submit_cells(sweep, *range(9))
    slurm.queue = QUEUE
    record(sweep, monkeypatch, 2, code=2, reason="no such file")
    record(sweep, monkeypatch, 3)
    record(sweep, monkeypatch, 4)
    record(sweep, monkeypatch, 6, code=75, reason="saved")
    record(sweep, monkeypatch, 7, code=0)
    with (sweep.folder(3) / "attempts.jsonl").open("a") as file:
        file.write('{"pid": "3", "en')
    assert [attempt.code for attempt in sweep.attempts(3)] == [None], "a torn line is skipped"
    # Cell 7 has finished; the last line of its spool is torn too.
    run = sweep.run(7)
    run.mkdir()
    (run / "summary.json").write_text(
        '{"status": "FINISHED", "evaluations": {"a": {"0": 0.5, "100": 0.7}, "early": {"50": 1.0}}}'
    )
    (run / "spool.jsonl").write_text('{"kind": "metrics", "step": 5, "data": {"train/reward": 0.5}}\n{"kind": "met')
    status = read_status(sweep)
    assert [(row.state, row.why) for row in status.rows] == [
        ("RUNNING", ""),
        ("PENDING", "Resources"),
        ("FAILED", "no such file"),
        ("FAILED", "ended without a message: TimeLimit (log: logs/train-1_3.out)"),
        ("FAILED", "ended without a message: OutOfMemory (log: logs/train-1_4.out)"),
        ("STOPPED", "cancelled"),
        ("PENDING", "started again at update 0 (BeginTime)"),
        ("FINISHED", ""),
        ("PLANNED", "job 1_8 ended before it began"),
        ("PLANNED", ""),
    ]
    assert status.rows[7].step == 5
    assert status.rows[7].reward == 0.5
    assert cell_metrics(sweep, status.rows[7]) == {"eval/a/reward": 0.7}, "those after the last update alone"
    assert "accounting storage is disabled" in status.notes[0]
    assert missing_work(sweep, status) == submit.Work(train=(2, 3, 4, 5, 8, 9), evaluate=(7,))


ALIVE = process_tags()
GONE = ALIVE | {"process.pid": "999999999"}
ELSEWHERE = {**ALIVE, "process.host": "n1", "process.namespace": "another"}
BY_SLURM = Submission(stage="train", indices=(3,), time=100.0, job="1")
BY_A_MANAGER = Submission(stage="train", indices=(3,), time=100.0, process=ALIVE, workers=1)
BY_A_LOST_MANAGER = Submission(stage="train", indices=(3,), time=100.0, process=GONE, workers=1)


def attempt(code=None, reason=None, *, job="1_3", process=GONE, parent=None, interrupted=False):
    return Attempt(
        stage="train",
        started=101.0,
        process=process,
        node="n1",
        job=job,
        parent=parent,
        code=code,
        reason=reason,
        interrupted=interrupted,
    )


def here(code=None, reason=None, **options):
    """An attempt of a worker of this process."""
    return attempt(code, reason, job=None, parent=ALIVE["process.pid"], **options)


def job(state, why=""):
    return submit.JobState(state=state, why=why)


LOG = " (log: logs/train-1_3.out)"
CELLS = [
    # submission          squeue or sacct               the newest attempt                      state and reason
    (None, None, None, ("PLANNED", "")),
    (BY_SLURM, job("PENDING", "Priority"), None, ("PENDING", "Priority")),
    (BY_SLURM, job("PENDING", "BeginTime"), attempt(75, "saved"), ("PENDING", "BeginTime")),
    (BY_SLURM, job("COMPLETING"), attempt(2, "no such file"), ("RUNNING", "")),
    (BY_SLURM, job("RUNNING"), None, ("RUNNING", "")),
    (BY_SLURM, job("RUNNING"), attempt(), ("RUNNING", "")),
    # SLURM does not answer.
    (BY_SLURM, UNKNOWN, None, ("PENDING", UNKNOWN.why)),
    (BY_SLURM, UNKNOWN, attempt(), ("RUNNING", "")),
    (BY_SLURM, UNKNOWN, attempt(75, "saved"), ("PENDING", UNKNOWN.why)),
    (BY_SLURM, UNKNOWN, attempt(2, "typo"), ("FAILED", "typo")),
    (BY_SLURM, UNKNOWN, attempt(2, "typo", job="0_3"), ("PENDING", UNKNOWN.why)),
    # It has ended, with an exit record.
    (BY_SLURM, None, attempt(75, "saved"), ("STOPPED", "saved")),
    (BY_SLURM, job("CANCELLED"), attempt(75, "saved"), ("STOPPED", "saved")),
    (BY_SLURM, job("CANCELLED"), attempt(1, "stopped by SIGTERM", interrupted=True), ("STOPPED", "stopped by SIGTERM")),
    (BY_SLURM, job("FAILED"), attempt(2, "typo"), ("FAILED", "typo")),
    (BY_SLURM, job("CANCELLED"), attempt(2, "typo"), ("FAILED", "typo")),
    (BY_SLURM, None, attempt(2), ("FAILED", "exit code 2")),
    # It has ended, without.
    (BY_SLURM, job("CANCELLED"), None, ("STOPPED", "cancelled")),
    (BY_SLURM, job("CANCELLED"), attempt(), ("STOPPED", "cancelled")),
    (BY_SLURM, job("NODE_FAIL"), attempt(), ("FAILED", f"ended without a message: NODE_FAIL{LOG}")),
    (BY_SLURM, job("FAILED", "NonZeroExitCode"), None, ("FAILED", f"ended without a message: NonZeroExitCode{LOG}")),
    (BY_SLURM, None, attempt(), ("FAILED", f"ended without a message: the process is gone from n1{LOG}")),
    (
        BY_SLURM,
        None,
        attempt(process=ELSEWHERE),
        ("FAILED", f"ended without a message: the process is gone from n1{LOG}"),
    ),
    (BY_SLURM, None, None, ("PLANNED", "job 1_3 ended before it began")),
    (BY_SLURM, None, attempt(2, "typo", job="0_3"), ("PLANNED", "job 1_3 ended before it began")),
    # On this machine.
    (BY_A_MANAGER, None, None, ("PENDING", "")),
    (BY_A_MANAGER, None, here(), ("RUNNING", "")),
    (BY_A_MANAGER, None, here(75, "saved"), ("PENDING", "")),
    (BY_A_MANAGER, None, here(-10, "killed by SIGUSR1"), ("PENDING", "")),
    (BY_A_MANAGER, None, here(2, "typo"), ("FAILED", "typo")),
    (BY_A_MANAGER, None, here(-9, "killed by SIGKILL"), ("FAILED", "killed by SIGKILL")),
    (BY_A_MANAGER, None, attempt(2, "typo"), ("PENDING", "")),
    (BY_A_LOST_MANAGER, None, None, ("PLANNED", "its local manager ended before it began")),
    (BY_A_LOST_MANAGER, None, attempt(job=None, parent="999999999", process=ALIVE), ("RUNNING", "")),
    (
        BY_A_LOST_MANAGER,
        None,
        attempt(job=None, parent="999999999"),
        ("FAILED", "ended without a message: the process is gone from n1 (log: logs/train-local_3.out)"),
    ),
    # By hand, with `kl-comedy cell`.
    (None, None, attempt(job=None, process=ALIVE), ("RUNNING", "")),
    (BY_SLURM, None, attempt(job=None, process=ALIVE), ("RUNNING", "")),
    (None, None, attempt(2, "typo", job=None), ("FAILED", "typo")),
]
"""What is known of cell 3, and its state with the reason."""


@pytest.mark.parametrize(("submission", "job", "newest", "expected"), CELLS)
def test_the_state_of_a_cell(submission, job, newest, expected):
    facts = cell_facts(3, finished=False, submission=submission, job=job, newest=newest)
    assert cell_state(facts) == expected
    finished = cell_facts(3, finished=True, submission=submission, job=job, newest=newest)
    assert cell_state(finished) == ("FINISHED", "")


def test_every_rule_decides_a_cell():
    """No rule is covered by those above it."""
    deciding = set()
    for submission, answer, newest, _ in CELLS:
        for finished in (False, True):
            facts = cell_facts(3, finished=finished, submission=submission, job=answer, newest=newest)
            deciding.add(next(rule.meaning for rule in RULES if rule.applies(facts)))
    assert deciding == {rule.meaning for rule in RULES}
    assert {rule.state for rule in RULES} == set(STATES)


def test_the_page_has_the_table_of_states():
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    lines = [
        line.split(" | ")[:2] for line in page.splitlines() if line.startswith(tuple(f"| {state}" for state in STATES))
    ]
    assert lines == [[f"| {rule.state}", rule.meaning] for rule in RULES]


def test_an_attempt_belongs_to_its_job_whatever_the_clocks_say(sweep, slurm, monkeypatch):
    """A node whose clock is an hour behind began its cell before it was submitted, by the numbers alone."""
    submit_cells(sweep, 0, 1)
    slurm.queue = "1|0|FAILED|n1||NonZeroExitCode\n1|1|FAILED|n1||NonZeroExitCode\n"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    record(sweep, monkeypatch, 0, "1", 2, "no such file")
    record(sweep, monkeypatch, 1, "77", 2, "no such file")
    states = [(row.state, row.why) for row in read_status(sweep).rows[:2]]
    assert states == [
        ("FAILED", "no such file"),
        ("FAILED", "ended without a message: NonZeroExitCode (log: logs/train-1_1.out)"),
    ]


def test_where_slurm_does_not_answer_nothing_is_taken_for_lost(sweep, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        FakeSlurm(patch)
        submit_cells(sweep, 0, 1)
    record(sweep, monkeypatch, 0)
    # From here on there is no squeue and no sbatch.
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"sbatch: no such command here; .* --local N"):
        submit.sbatch(["sbatch", "x"])
    status = read_status(sweep)
    assert [row.state for row in status.rows[:3]] == ["RUNNING", "PENDING", "PLANNED"]
    assert 0 not in missing_work(sweep, status).train
    assert "squeue" in status.notes[0]


def comment_of(words):
    """What a submission says about itself: its sweep, stage and first cell."""
    (option,) = [word for word in words if word.startswith("--comment=")]
    return option.removeprefix("--comment=")


@pytest.fixture
def squeue_exists(monkeypatch):
    """Jobs are looked for only where SLURM's programs are."""
    monkeypatch.setattr(submit.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_a_job_that_its_submitter_did_not_record_is_adopted_and_not_submitted_again(sweep, slurm, squeue_exists):
    """sbatch was accepted, and its caller was killed before it could write down the id."""
    submit_cells(sweep, 0, 1, 2)
    (sweep.path / "submissions.jsonl").unlink()
    assert {row.state for row in read_status(sweep).rows} == {"PLANNED"}
    comment = comment_of(slurm.calls[0])
    of_another_sweep = comment.replace("-", "-0", 1)
    for task in range(3):
        slurm.queue += f"1|{task}|PENDING||{comment}|Resources\n9|{task}|PENDING||{of_another_sweep}|Resources\n"
        # A job that is over, which squeue lists for some minutes, as of a folder that was deleted and planned again.
        slurm.queue += f"3|{task}|CANCELLED||{comment}|None\n"
    (adopted,) = submit.adopt_unrecorded_jobs(sweep)
    assert adopted.job == "1"
    assert adopted.stage == "train"
    assert adopted.indices == (0, 1, 2)
    assert submit.adopt_unrecorded_jobs(sweep) == [], "only once"
    assert missing_work(sweep, read_status(sweep)).train == (3, 4, 5, 6, 7, 8, 9)


def test_an_unrecorded_array_beyond_the_sites_bound_is_adopted_with_its_own_cells(sweep, slurm, squeue_exists):
    """SLURM numbers the tasks of each array from 0; the job's comment has the number of its first cell."""
    profile = Profile(name="p", time="10", max_array=4)
    submit_cells(sweep, *range(10), profile=profile)
    (sweep.path / "submissions.jsonl").unlink()
    submitted = [words for words in slurm.calls if words[0] == "sbatch" and "train.sbatch" in words[-2]]
    assert len(submitted) == 3
    for job, words, tasks in zip((1, 2, 3), submitted, (4, 4, 2), strict=True):
        for task in range(tasks):
            slurm.queue += f"{job}|{task}|RUNNING|n1|{comment_of(words)}|None\n"
    adopted = submit.adopt_unrecorded_jobs(sweep)
    assert [(submission.job, submission.offset, submission.indices) for submission in adopted] == [
        ("1", 0, (0, 1, 2, 3)),
        ("2", 4, (4, 5, 6, 7)),
        ("3", 8, (8, 9)),
    ]
    status = read_status(sweep)
    assert [row.state for row in status.rows] == ["RUNNING"] * 10
    assert missing_work(sweep, status).train == ()
    assert [row.job for row in status.rows[4:9]] == ["2_0", "2_1", "2_2", "2_3", "3_0"]


@pytest.mark.parametrize(
    ("refusal", "keys"),
    [
        ("Batch job submission failed: Invalid job array specification", "max_array"),
        ("invalid partition specified: gpus", "partition"),
        ("Batch job submission failed: Invalid feature specification", "constraint"),
        ("Invalid generic resource (gres) specification", "gpus_per_node, gpu_type"),
        ("Batch job submission failed: Invalid account or account/partition combination", "partition, account"),
    ],
)
def test_sbatchs_refusal_names_the_keys_of_the_profile(monkeypatch, refusal, keys):
    def refuse(words):
        raise RunFailed(f"sbatch: {refusal}")

    monkeypatch.setattr(submit, "_call", refuse)
    with pytest.raises(RunFailed) as caught:
        submit.sbatch(["sbatch", "x"])
    assert str(caught.value) == f"sbatch: {refusal} (in the profile: {keys})"


def test_a_thousand_cells_are_submitted_and_looked_up_in_seconds(tmp_path, slurm):
    start = time.process_time()
    sweep = plan_sweep(
        tmp_path,
        "grid: {optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01]}\nseeds: 100\n",
    )
    submit_cells(sweep, *range(1000))
    slurm.queue = "".join(f"1|{index}|RUNNING|n1||None\n" for index in range(1000))
    for index in range(1000):
        sweep.record_start(index, "train", {"process.pid": str(index)})
    assert read_sweep(sweep.path) == sweep
    assert read_status(sweep).counts() == {"RUNNING": 1000}
    # CPU time, which other work on the machine does not change.
    assert time.process_time() - start < 60
    assert slurm.calls[0][3] == "--array=0-999"


def test_a_start_that_cannot_be_read_is_counted_whatever_is_read_after_it(sweep):
    sweep.record_start(0, "train", {"process.pid": "1"})
    journal = sweep.folder(0) / "attempts.jsonl"
    journal.write_text(journal.read_text()[:20] + "\n")
    assert sweep.attempts(0) == []
    assert sweep.attempts(0, "evaluate") == []
    assert sum(sweep.unreadable.values()) == 1


def test_a_local_submission_whose_manager_is_gone_is_planned_again(sweep):
    gone = process_tags() | {"process.pid": "999999999"}
    sweep.record_submission(Submission(stage="train", indices=(0,), time=0.0, process=gone, workers=1))
    sweep.record_submission(Submission(stage="train", indices=(1,), time=0.0, process=process_tags(), workers=1))
    assert [row.state for row in read_status(sweep).rows[:3]] == ["PLANNED", "PENDING", "PLANNED"]
    assert local.local_managers(sweep) == [os.getpid()]


ENDS = {
    "stopped": (RunInterrupted("stopped by SIGTERM at update 1; resume with: x"), 1, "stopped by SIGTERM at update 1"),
    "Ctrl-C while the model is loaded": (KeyboardInterrupt(), 1, "interrupted"),
    "asked to come back": (RunStopped("saved"), 75, "saved"),
    "failed": (RunFailed("NaN"), 1, "NaN"),
    "misuse": (UserError("typo"), 2, "typo"),
    "a bug": (ValueError("x"), 1, "ValueError: x"),
}
"""What a cell's process raises; its exit code and the reason that it records."""


@pytest.mark.parametrize("name", ENDS)
def test_how_an_attempt_ended_is_recorded(name, sweep):
    error, code, reason = ENDS[name]
    with pytest.raises(type(error)), recorded_attempt(sweep, sweep.cell(0), "train"):
        raise error
    (attempt,) = sweep.attempts(0)
    assert (attempt.code, attempt.reason) == (code, reason)
    assert attempt.interrupted == (name in ("stopped", "Ctrl-C while the model is loaded"))


def test_an_attempt_that_succeeded_was_not_interrupted(sweep):
    with recorded_attempt(sweep, sweep.cell(0), "train"):
        pass
    (attempt,) = sweep.attempts(0)
    assert (attempt.code, attempt.reason, attempt.interrupted) == (0, None, False)


def test_the_evaluation_of_a_cell_that_still_trains_waits(sweep, slurm, monkeypatch):
    submit_cells(sweep, 0, 1)
    slurm.queue = "1|0|RUNNING|n1||\n2|0|PENDING|||Dependency\n"
    status = read_status(sweep)
    assert evaluation_state(status.rows[0], status) == "waits"
    assert evaluation_state(status.rows[5], status) == "no"
    finished = replace(status.rows[0], state="FINISHED")
    assert evaluation_state(finished, status) == "under way"
    assert evaluation_state(replace(finished, evaluated=True), status) == "yes"
