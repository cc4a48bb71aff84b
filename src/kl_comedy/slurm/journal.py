"""What happened to a sweep, as lines appended to files: submissions, and attempts at each cell.

One line is one ``write``, so concurrent writers do not tear each other's; a torn line of a killed one is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.slurm.manifest import Sweep


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Cells given to SLURM (``job``, indices minus ``offset`` being its array) or to a local manager (``process``)."""

    stage: str
    indices: tuple[int, ...]
    time: float
    job: str | None = None
    offset: int = 0
    profile: str | None = None
    process: Mapping[str, str] = field(default_factory=dict)
    workers: int | None = None

    @property
    def local(self) -> bool:
        return self.job is None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process that worked on a cell. ``code``: its exit code, minus the signal's number, None while unknown.

    ``parent``: the process id of who started it; a local manager's.
    """

    stage: str
    started: float
    process: Mapping[str, str]
    node: str
    job: str | None = None
    restart: int = 0
    parent: str | None = None
    ended: float | None = None
    code: int | None = None
    reason: str | None = None


def record_submission(sweep: Sweep, submission: Submission) -> None:
    _append(sweep.path / "submissions.jsonl", asdict(submission))


def submissions(sweep: Sweep) -> list[Submission]:
    rows = [row for row in _rows(sweep.path / "submissions.jsonl") if "stage" in row]
    return [Submission(**{**row, "indices": tuple(row["indices"])}) for row in rows]


def record_cancel(sweep: Sweep) -> None:
    _append(sweep.path / "submissions.jsonl", {"cancel": time.time()})


def cancelled_at(sweep: Sweep) -> float:
    """When the sweep was last cancelled (Unix seconds), 0 for never."""
    return max((row["cancel"] for row in _rows(sweep.path / "submissions.jsonl") if "cancel" in row), default=0.0)


def main_process() -> bool:
    """Whether this is the one process of a job that keeps the journal (torch's rank, else SLURM's, 0)."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0


def record_start(sweep: Sweep, index: int, stage: str, process: Mapping[str, str]) -> None:
    """Say that this process begins with a cell; SLURM's ids are taken from the environment."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    row = {
        "stage": stage, "started": time.time(), "process": dict(process),
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "job": f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0), "parent": str(os.getppid()),
    }  # fmt: skip
    _append(_cell_file(sweep, index), row)


def record_end(sweep: Sweep, index: int, process: Mapping[str, str], code: int, reason: str | None) -> None:
    """Say how the attempt of ``process`` ended; the last word counts."""
    row = {"pid": process["process.pid"], "ended": time.time(), "code": code, "reason": reason}
    _append(_cell_file(sweep, index), row)


def record_death(sweep: Sweep, index: int, pid: int, number: int) -> None:
    """Say for a process that could not that a signal ended it."""
    reason = f"killed by {signal.Signals(number).name}"
    _append(_cell_file(sweep, index), {"pid": str(pid), "ended": time.time(), "code": -number, "reason": reason})


def attempts(sweep: Sweep, index: int, stage: str = "train") -> list[Attempt]:
    """The attempts at a cell, oldest first, each with its end where there is one."""
    found: list[Attempt] = []
    for row in _rows(_cell_file(sweep, index)):
        if "started" in row:
            found.append(Attempt(**row))
            continue
        for position in reversed(range(len(found))):
            if found[position].process.get("process.pid") == row["pid"]:
                ended = {key: row[key] for key in ("ended", "code", "reason")}
                found[position] = Attempt(**{**asdict(found[position]), **ended})
                break
    return [attempt for attempt in found if attempt.stage == stage]


def belongs(attempt: Attempt, given: Submission, index: int) -> bool:
    """Whether an attempt is one of a submission: by job or manager, since the clocks of nodes may differ."""
    if given.local:
        return attempt.job is None and attempt.parent == given.process.get("process.pid")
    return attempt.job == f"{given.job}_{index - given.offset}"


def latest(found: Sequence[Submission], stage: str) -> dict[int, Submission]:
    """The newest submission of each cell."""
    return {index: one for one in found if one.stage == stage for index in one.indices}


def _cell_file(sweep: Sweep, index: int) -> Path:
    return sweep.path / "cells" / f"{index:05d}.jsonl"


def _append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(row) + "\n").encode())
    finally:
        os.close(descriptor)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
