"""How many tasks of a sweep run at once, and what is taken for lost: against a slow scheduler, and by enumeration."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fake_slurm import FakeSlurm, plan_sweep
from kl_comedy.errors import RunFailed
from kl_comedy.slurm import submit
from kl_comedy.slurm.local import record_local_submission
from kl_comedy.slurm.manifest import Attempt, Submission
from kl_comedy.slurm.profile import JobShape, Profile
from kl_comedy.slurm.status import (
    MISSING,
    UNKNOWN,
    cell_facts,
    cell_state,
    missing_work,
    read_status,
)
from kl_comedy.tracking.provenance import process_tags

CELLS = 9
SIZES = """
rows:
  a: {seed: 1, train.strategy: ddp, train.devices: 2}
  b: {seed: 2, train.strategy: ddp, train.devices: 2}
grid: {optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007]}
"""


# --- a scheduler -----------------------------------------------------------------------------------------------------


class Scheduler:
    """An array scheduler of few lines: it takes sbatch's command lines, and starts whatever may start.

    ``fails``: cells whose training fails. ``order`` chooses which of the running tasks ends next.
    """

    def __init__(self, fails, order):
        self.fails = fails
        self.order = order
        self.jobs = {}
        self.most_at_once = 0
        self.ended = []

    def __call__(self, words):
        program, *options, script = words if words[-1].endswith(".sbatch") else words[:-1]
        offset = 0 if words[-1].endswith(".sbatch") else int(words[-1])
        assert program == "sbatch"
        assert options.pop(0) == "--parsable"
        given_options = dict(option.split("=", 1) for option in options)
        assert given_options.pop("--kill-on-invalid-dep", None) == ("yes" if "--dependency" in given_options else None)
        stage = Path(script).name.removesuffix(".sbatch").partition("-")[0]
        _, comment_stage, comment_offset = given_options.pop("--comment").split(":")
        assert (comment_stage, int(comment_offset)) == (stage, offset)
        ranges, _, limit = given_options.pop("--array", "0").partition("%")
        tasks = []
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            tasks += range(int(first), int(last or first) + 1)
        waits_for = []
        for dependency in given_options.pop("--dependency", "").split(","):
            kind, *others = dependency.split(":")
            waits_for += [(kind, other) for other in others]
        assert given_options == {}, "options that this scheduler does not know"
        job = str(len(self.jobs) + 1)
        states = dict.fromkeys(tasks, "PENDING")
        self.jobs[job] = {"stage": stage, "offset": offset, "states": states, "waits_for": waits_for}
        self.jobs[job]["limit"] = int(limit) if limit else len(tasks)
        return f"{job}\n"

    def _may_start(self, job, task):
        """True, False for later, None for never."""
        answers = []
        for kind, other in job["waits_for"]:
            states = self.jobs[other]["states"]
            over = [state in ("DONE", "FAILED", "KILLED") for state in states.values()]
            if kind == "afterany":
                answers.append(all(over))
            else:
                assert kind == "aftercorr"
                if states[task] in ("FAILED", "KILLED"):
                    return None
                answers.append(states[task] == "DONE")
        return all(answers)

    def _start_all(self):
        for job in self.jobs.values():
            for task, state in job["states"].items():
                if state != "PENDING":
                    continue
                running = list(job["states"].values()).count("RUNNING")
                may_start = self._may_start(job, task)
                if may_start is None:
                    job["states"][task] = "KILLED"
                elif may_start and running < job["limit"]:
                    job["states"][task] = "RUNNING"

    def run(self):
        while True:
            self._start_all()
            running = []
            for job in self.jobs.values():
                running += [(job, task) for task, state in job["states"].items() if state == "RUNNING"]
            cells = [job["stage"] for job, _ in running if job["stage"] != "report"]
            self.most_at_once = max(self.most_at_once, len(cells))
            if not running:
                return
            job, task = running[self.order.randrange(len(running))]
            cell = task + job["offset"]
            failed = job["stage"] == "train" and cell in self.fails
            job["states"][task] = "FAILED" if failed else "DONE"
            self.ended.append((job["stage"], cell))

    def cells(self, stage):
        return sorted(cell for ended, cell in self.ended if ended == stage)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    planned = plan_sweep(tmp_path_factory.mktemp("limits"), f"{SIZES}evaluate: {{}}\n")
    assert len(planned.manifest.cells) == CELLS
    return planned


@pytest.mark.parametrize("drawn", range(40))
def test_no_more_tasks_run_at_once_than_max_parallel(sweep, drawn):
    draw = random.Random(drawn)
    of_sweep = draw.choice([None, 1, 2, 3, 5, 8])
    of_profile = draw.choice([None, 1, 2, 3, 5, 8])
    evaluated = draw.random() < 0.8
    stage_of_cell = [draw.choice(["train", "train", "evaluate", "neither"]) for _ in range(CELLS)]
    fails = {cell for cell in range(CELLS) if draw.random() < 0.2}

    train = tuple(cell for cell, stage in enumerate(stage_of_cell) if stage == "train")
    evaluate = ()
    if evaluated:
        evaluate = tuple(cell for cell, stage in enumerate(stage_of_cell) if stage == "evaluate")
    manifest = replace(sweep.manifest, max_parallel=of_sweep, evaluate=() if evaluated else None)
    shape = JobShape(time="10", tasks_per_node=2)
    max_array = draw.choice([4, 1000])
    profile = Profile(name="p", time="10", max_parallel=of_profile, max_array=max_array, shapes=[shape])
    scheduler = Scheduler(fails, draw)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "_call", scheduler)
        work = submit.Work(train=train, evaluate=evaluate)
        submit.submit(replace(sweep, manifest=manifest), profile, Path("p.yaml"), work)
    scheduler.run()

    limits = [limit for limit in (of_sweep, of_profile) if limit is not None]
    # An array runs one task at least, and arrays do not know of each other; evaluation takes its training's place.
    arrays = sum(job["stage"] == "train" for job in scheduler.jobs.values())
    arrays += sum(job["stage"] == "evaluate" and not job["waits_for"] for job in scheduler.jobs.values())
    assert scheduler.most_at_once <= max(min(limits, default=2 * CELLS), arrays)
    assert scheduler.cells("train") == list(train)
    trained = [cell for cell in train if cell not in fails]
    expected = sorted([*trained, *evaluate]) if evaluated else []
    assert scheduler.cells("evaluate") == expected
    assert scheduler.ended[-1] == ("report", 0)
    assert len(scheduler.cells("report")) == 1


def test_the_smaller_limit_is_used_whole_by_training_and_then_by_evaluation(sweep):
    class InOrder:
        def randrange(self, size):
            return 0

    for of_sweep, of_profile in ((3, 8), (8, 3), (3, None), (None, 3)):
        scheduler = Scheduler((), InOrder())
        manifest = replace(sweep.manifest, max_parallel=of_sweep)
        profile = Profile(name="p", time="10", max_parallel=of_profile)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(submit, "_call", scheduler)
            one_size = submit.Work(train=tuple(range(7)), evaluate=())
            submit.submit(replace(sweep, manifest=manifest), profile, Path("p.yaml"), one_size)
        scheduler.run()
        assert scheduler.most_at_once == 3, (of_sweep, of_profile)
        stages = [stage for stage, _ in scheduler.ended]
        assert stages == ["train"] * 7 + ["evaluate"] * 7 + ["report"]


def test_without_a_limit_a_cell_is_evaluated_while_others_train(sweep):
    class InOrder:
        def randrange(self, size):
            return size - 1

    scheduler = Scheduler((), InOrder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "_call", scheduler)
        submit.submit(sweep, Profile(name="p", time="10"), Path("p.yaml"), submit.Work(train=(0, 1, 2), evaluate=()))
    scheduler.run()
    assert [stage for stage, _ in scheduler.ended] == ["train", "evaluate"] * 3 + ["report"]


# --- what is taken for lost ------------------------------------------------------------------------------------------

ALIVE = process_tags()
GONE = ALIVE | {"process.pid": "999999999"}
QUEUED = Submission(stage="train", indices=(3,), time=100.0, job="2")
HERE = Submission(stage="train", indices=(3,), time=100.0, process=ALIVE, workers=1)
LOST_MANAGER = Submission(stage="train", indices=(3,), time=100.0, process=GONE, workers=1)


def attempt(code, *, job="2_3", reason=None, interrupted=False):
    return Attempt(
        stage="train",
        started=101.0 if job == "2_3" else 1.0,
        process=GONE,
        node="n1",
        job=job,
        code=code,
        reason=reason,
        interrupted=interrupted,
    )


EARLIER = {code: attempt(code, job="1_3") for code in (None, 0, 2, 75, -9)}
NOW = {code: attempt(code) for code in (None, 0, 2, 75, -9)}
JOBS = [None, UNKNOWN, *(submit.JobState(state=state) for state in ("PENDING", "RUNNING", "FAILED", "CANCELLED"))]


def every_cell():
    """Every combination of what SLURM and the journal of the cell may say of a submitted cell."""
    attempts = [None, *EARLIER.values(), *NOW.values()]
    for job, newest in itertools.product(JOBS, attempts):
        yield job, newest, cell_facts(3, finished=False, submission=QUEUED, job=job, newest=newest)


def test_a_cell_that_may_still_run_never_counts_as_missing():
    """Else `resubmit` would start it a second time, in the same folder."""
    checked = 0
    for job, newest, facts in every_cell():
        state, _ = cell_state(facts)
        ended = newest is not None and newest.job == "2_3" and newest.code not in (None, 75)
        says_alive = job is not None and job.state in ("PENDING", "RUNNING")
        nothing_says_it_ended = job is UNKNOWN and not ended
        if says_alive or nothing_says_it_ended:
            checked += 1
            assert state not in MISSING, facts
        else:
            # Where SLURM answers and does not know it, or says that it is over, or the cell itself recorded its end.
            assert state in MISSING, facts
    assert checked == 2 * 11 + 8


ANSWERS = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
OVER = ANSWERS[5:]


def finish(sweep, index, *, scores=False):
    run = sweep.run(index)
    run.mkdir()
    (run / "summary.json").write_text('{"status": "FINISHED", "steps": 1}')
    if scores:
        sweep.evaluation(index).write_text("[]")


def finished_sweep(folder):
    """Trained cells. Of 0 to 8 the evaluation was submitted to SLURM, of 9 to 11 otherwise; 11 and 12 have scores."""
    rates = [number / 1000 for number in range(1, 15)]
    sweep = plan_sweep(folder, f"grid: {{optimizer.lr: {rates}}}\nevaluate: {{}}\n")
    for index in range(14):
        finish(sweep, index, scores=index in (11, 12))
    queued = Submission(stage="evaluate", indices=(*range(9), 11), time=1.0, job="5")
    here = Submission(stage="evaluate", indices=(9,), time=1.0, process=ALIVE, workers=1)
    lost = Submission(stage="evaluate", indices=(10,), time=1.0, process=GONE, workers=1)
    for submission in (queued, here, lost):
        sweep.record_submission(submission)
    return sweep


def test_evaluations_under_way_by_what_slurm_answers(tmp_path, monkeypatch):
    sweep = finished_sweep(tmp_path)
    slurm = FakeSlurm(monkeypatch)
    slurm.queue = "".join(f"5|{task}|{state}|n1||None\n" for task, state in enumerate(ANSWERS))
    status = read_status(sweep)
    running = {number for number, state in enumerate(ANSWERS) if state not in OVER}
    assert status.evaluating == running | {9}
    assert missing_work(sweep, status).evaluate == (5, 6, 7, 8, 10, 13)


def test_a_silent_slurm_loses_no_evaluation(tmp_path, monkeypatch):
    sweep = finished_sweep(tmp_path)

    def silent(words):
        raise RunFailed(f"{words[0]} did not answer within 60 s")

    monkeypatch.setattr(submit, "_call", silent)
    status = read_status(sweep)
    # Cell 10's manager is gone, whatever SLURM says; cell 11 has its scores; nobody began to evaluate cell 13.
    assert status.evaluating == {*range(9), 9}
    assert missing_work(sweep, status) == submit.Work(train=(), evaluate=(10, 13))


def test_a_local_manager_evaluates_what_it_trains_and_nobody_else_does(tmp_path):
    sweep = plan_sweep(tmp_path, "grid: {optimizer.lr: [0.1, 0.01, 0.001, 0.0001]}\nevaluate: {}\n")
    for index in range(4):
        finish(sweep, index)
    record_local_submission(sweep, submit.Work(train=(0, 2), evaluate=(3,)), workers=2)
    status = read_status(sweep)
    assert status.evaluating == {0, 2, 3}
    assert missing_work(sweep, status) == submit.Work(train=(), evaluate=(1,))


# --- whole questions -------------------------------------------------------------------------------------------------


def test_every_question_to_slurm_word_by_word(tmp_path, monkeypatch):
    sweep = plan_sweep(tmp_path, "grid: {optimizer.lr: [0.1, 0.01]}\nevaluate: {}\n")
    slurm = FakeSlurm(monkeypatch)
    profile = Profile(name="p", time="10", max_parallel=2)
    submit.submit(sweep, profile, Path("p.yaml"), submit.Work(train=(0, 1), evaluate=()))
    mark = slurm.calls[0][2].removeprefix("--comment=").partition(":")[0]
    folder, digest = sweep.path, sweep.manifest.digest
    assert mark.startswith(f"{digest}-")
    assert slurm.calls == [
        ["sbatch", "--parsable", f"--comment={mark}:train:0", "--array=0-1%2", f"{folder}/train.sbatch", "0"],
        [
            "sbatch",
            "--parsable",
            f"--comment={mark}:evaluate:0",
            "--array=0-1%2",
            "--dependency=aftercorr:1,afterany:1",
            "--kill-on-invalid-dep=yes",
            f"{folder}/evaluate.sbatch",
            "0",
        ],
        [
            "sbatch",
            "--parsable",
            f"--comment={mark}:report:0",
            "--dependency=afterany:1:2",
            "--kill-on-invalid-dep=yes",
            f"{folder}/report.sbatch",
        ],
    ]
    slurm.calls.clear()
    slurm.queue = "1|0|RUNNING|n1||None\n"
    read_status(sweep)
    names = "grid-train,grid-evaluate,grid-report"
    assert slurm.calls == [
        ["squeue", "--noheader", "--array", "--states=all", f"--name={names}", "--format=%F|%K|%T|%N|%k|%r"],
        [
            "sacct",
            "--noheader",
            "--allocations",
            "--parsable2",
            "--jobs=1_1,2_0,2_1",
            "--format=JobID,State,ExitCode,NodeList",
        ],
    ]
    slurm.calls.clear()
    submit.scancel(["1_0", "1_1", "2_0", "3"])
    assert slurm.calls == [["scancel", "1", "2", "3"]]
