"""The state of every cell: what the run folders say, what the attempts say, what SLURM says; in that order.

FINISHED · RUNNING · PENDING (in the queue) · PLANNED (never submitted) · STOPPED (saved, wants to go on)
· FAILED (with its own words) · DIED (without a word) · CANCELLED
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, UserError
from kl_comedy.slurm import scheduler
from kl_comedy.slurm.journal import Attempt, Submission, attempts, belongs, cancelled_at, latest, submissions
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.scheduler import JobState

STATES = ("FINISHED", "RUNNING", "PENDING", "PLANNED", "STOPPED", "FAILED", "DIED", "CANCELLED")
MISSING = ("PLANNED", "STOPPED", "FAILED", "DIED", "CANCELLED")
"""The states that ``resubmit`` mends."""
TAIL_BYTES = 1 << 16
"""Enough of a spool's end to hold its last metrics."""


@dataclass(frozen=True, kw_only=True)
class CellStatus:
    """A row of ``kl-comedy status``. ``reward`` is that of the last update seen; ``run`` the run's folder."""

    cell: int
    name: str
    seed: int
    state: str
    step: int
    steps: int
    reward: float | None
    evaluated: bool
    node: str
    job: str
    attempts: int
    why: str
    run: str | None


@dataclass(frozen=True, kw_only=True)
class Board:
    """Every cell's state, the evaluations that are under way, and what could not be asked."""

    rows: tuple[CellStatus, ...]
    evaluating: frozenset[int]
    notes: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        found = {state: sum(row.state == state for row in self.rows) for state in STATES}
        return {state: number for state, number in found.items() if number}


@dataclass(frozen=True, kw_only=True)
class _Slurm:
    """What SLURM said of this sweep's jobs, by job id."""

    jobs: Mapping[str, JobState]
    notes: tuple[str, ...] = ()
    answers: bool = True

    def of(self, submission: Submission | None, index: int) -> tuple[str, JobState | None]:
        if submission is None or submission.local:
            return "", None
        job = f"{submission.job}_{index - submission.offset}"
        return job, self.jobs.get(job) if self.answers else UNKNOWN


UNKNOWN = JobState(state="UNKNOWN", why="SLURM cannot be asked")
"""Of a job while SLURM does not answer: it may be running, so it is not taken for lost."""


def board(sweep: Sweep) -> Board:
    """Look at everything once."""
    given = submissions(sweep)
    train, evaluate = latest(given, "train"), latest(given, "evaluate")
    runs = _runs(sweep)
    slurm = _ask(sweep, given)
    cancelled = cancelled_at(sweep)
    rows = tuple(
        _status(sweep, cell, runs.get(f"{cell.name}-{cell.config_hash}"), train.get(cell.index), slurm, cancelled)
        for cell in sweep.manifest.cells
    )
    evaluating = frozenset(
        index for index, one in evaluate.items()
        if not sweep.evaluation(index).exists() and _under_way(one, slurm.of(one, index)[1])
    )  # fmt: skip
    return Board(rows=rows, evaluating=evaluating, notes=slurm.notes)


def _under_way(given: Submission, queued: JobState | None) -> bool:
    from kl_comedy.tracking.process import is_dead

    return not is_dead(given.process) if given.local else queued is not None and (queued.active or queued is UNKNOWN)


def _status(
    sweep: Sweep, cell: Cell, run: Path | None, given: Submission | None, slurm: _Slurm, cancelled: float
) -> CellStatus:
    tries = attempts(sweep, cell.index)
    last = tries[-1] if tries else None
    summary = _summary(run)
    job, queued = slurm.of(given, cell.index)
    state, why = _state(cell.index, summary, last, given, queued, cancelled)
    step, reward = _progress(run)
    if state == "PENDING" and tries:
        why = f"started again at update {step}" + (f" ({why})" if why else "")
    evaluated = sweep.evaluation(cell.index).exists()
    if state == "FINISHED" and not evaluated:
        why = _why_not_evaluated(sweep, cell.index)
    node = (queued.node if queued and queued.state == "RUNNING" else "") or (last.node if last else "")
    return CellStatus(
        cell=cell.index, name=cell.name, seed=cell.seed, state=state, step=step, steps=cell.steps, reward=reward,
        evaluated=evaluated, node=node, job=job or (last.job or "" if last else ""),
        attempts=len(tries), why=why, run=None if run is None else str(run),
    )  # fmt: skip


def _why_not_evaluated(sweep: Sweep, index: int) -> str:
    tries = attempts(sweep, index, "evaluate")
    return f"evaluation: {tries[-1].reason}" if tries and tries[-1].reason else ""


def _state(
    index: int, summary: Mapping[str, Any] | None, last: Attempt | None, given: Submission | None,
    queued: JobState | None, cancelled: float,
) -> tuple[str, str]:  # fmt: skip
    """The state and why."""
    from kl_comedy.tracking.process import is_dead

    if summary is not None and summary["status"] == "FINISHED":
        return "FINISHED", ""
    if queued is not None and queued.active:
        return ("PENDING", queued.why) if queued.state == "PENDING" else ("RUNNING", "")
    if queued is UNKNOWN and (last is None or last.code is None):
        return ("PENDING" if last is None else "RUNNING"), UNKNOWN.why
    if given is not None and (last is None or not belongs(last, given, index)):
        return _never_began(given, queued, cancelled)
    if last is None:
        return "PLANNED", ""
    if last.code is None and given is not None and given.local and not is_dead(last.process):
        return "RUNNING", ""
    if given is not None and (cancelled > given.time or (queued is not None and queued.state == "CANCELLED")):
        return "CANCELLED", last.reason or "cancelled"
    if last.code == REQUEUE_EXIT_CODE:
        return "STOPPED", last.reason or ""
    if last.code is not None and (last.code > 0 or last.reason):
        return "FAILED" if last.code > 0 else "DIED", last.reason or f"exit code {last.code}"
    told = queued.why or queued.state if queued else f"the process is gone from {last.node}"
    return "DIED", f"ended without a word: {told}"


def _never_began(given: Submission, queued: JobState | None, cancelled: float) -> tuple[str, str]:
    from kl_comedy.tracking.process import is_dead

    if cancelled > given.time:
        return "CANCELLED", "cancelled before it began"
    if given.local:
        return ("PLANNED", "its manager ended") if is_dead(given.process) else ("PENDING", "")
    if queued is None:
        return "DIED", f"job {given.job} left the queue before it began"
    return ("CANCELLED" if queued.state == "CANCELLED" else "DIED"), queued.why or queued.state


def _ask(sweep: Sweep, given: list[Submission]) -> _Slurm:
    """squeue for what it remembers, sacct for the rest; where one cannot answer, a note says so."""
    mine = {one.job for one in given if one.job is not None}
    if not mine:
        return _Slurm(jobs={})
    notes: list[str] = []
    try:
        found = scheduler.queue([f"{sweep.manifest.name}-{stage}" for stage in ("train", "evaluate", "report")])
    except (UserError, RunFailed) as error:
        note = f"the queue cannot be asked, states are from the run folders alone: {error}"
        return _Slurm(jobs={}, notes=(note,), answers=False)
    found = {job: state for job, state in found.items() if job.split("_")[0] in mine}
    wanted = [
        f"{one.job}_{index - one.offset}"
        for stage in ("train", "evaluate") for index, one in latest(given, stage).items() if not one.local
    ]  # fmt: skip
    gone = sorted({job.split("_")[0] for job in wanted if job not in found})
    if gone:
        try:
            found = {**scheduler.accounting(gone), **found}
        except (UserError, RunFailed) as error:
            notes.append(f"jobs that left the queue cannot be looked up: {error}")
    return _Slurm(jobs=found, notes=tuple(notes))


def newest_run(sweep: Sweep, cell: Cell) -> Path | None:
    """The folder of a cell's run, or None before it began."""
    return _runs(sweep).get(f"{cell.name}-{cell.config_hash}")


def _runs(sweep: Sweep) -> dict[str, Path]:
    """The newest run folder of each name and hash, in one listing."""
    found: dict[str, tuple[int, Path]] = {}
    if not sweep.runs.is_dir():
        return {}
    for entry in os.scandir(sweep.runs):
        stem, _, number = entry.name.rpartition("-")
        if number.isdigit() and int(number) > found.get(stem, (0, None))[0]:
            found[stem] = (int(number), Path(entry.path))
    return {stem: path for stem, (_, path) in found.items()}


def _summary(run: Path | None) -> dict[str, Any] | None:
    if run is None:
        return None
    try:
        data: dict[str, Any] = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return data


def _progress(run: Path | None) -> tuple[int, float | None]:
    """The last update in the spool and its reward."""
    if run is None:
        return 0, None
    try:
        with (run / "spool.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("kind") == "metrics" and "train/reward" in row["data"]:
            return int(row["step"]), float(row["data"]["train/reward"])
    return 0, None
