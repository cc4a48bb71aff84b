"""What happened to a sweep, as lines appended to files: submissions, and attempts at each cell.

One line is one ``write``, so concurrent writers do not tear each other's; a line cut by a kill is skipped.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
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

    ``parent``: the process id of the process that started it, which is a local manager's.
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

    def is_of(self, submission: Submission, index: int) -> bool:
        """Whether this attempt belongs to ``submission``: by job or manager, since the clocks of nodes may differ."""
        if submission.local:
            return self.job is None and self.parent == submission.process.get("process.pid")
        return self.job == f"{submission.job}_{index - submission.offset}"


def record_submission(sweep: Sweep, submission: Submission) -> None:
    _append(sweep.path / "submissions.jsonl", asdict(submission))


def read_submissions(sweep: Sweep) -> list[Submission]:
    rows = [row for row in _read_lines(sweep.path / "submissions.jsonl") if "stage" in row]
    return [Submission(**{**row, "indices": tuple(row["indices"])}) for row in rows]


def latest_submissions(submissions: list[Submission], stage: str) -> dict[int, Submission]:
    """The newest submission of each cell."""
    return {index: item for item in submissions if item.stage == stage for index in item.indices}


def record_cancel(sweep: Sweep) -> None:
    _append(sweep.path / "submissions.jsonl", {"cancel": time.time()})


def cancelled_at(sweep: Sweep) -> float:
    """When the sweep was last cancelled (Unix seconds), 0 for never."""
    rows = _read_lines(sweep.path / "submissions.jsonl")
    return max((row["cancel"] for row in rows if "cancel" in row), default=0.0)


def is_main_process() -> bool:
    """Whether this is the one process of a job that records attempts (torch's rank, else SLURM's, is 0)."""
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0) == 0


def record_start(sweep: Sweep, index: int, stage: str, process: Mapping[str, str]) -> None:
    """Record that this process starts on a cell; SLURM's ids are taken from the environment."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    row = {
        "stage": stage,
        "started": time.time(),
        "process": dict(process),
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "job": f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "parent": str(os.getppid()),
    }
    _append(_cell_file(sweep, index), row)


def record_end(sweep: Sweep, index: int, pid: str, code: int, reason: str | None) -> None:
    """Record how the attempt of process ``pid`` ended; the last record counts. ``code`` below 0: minus a signal."""
    if code < 0 and reason is None:
        reason = f"killed by {signal.Signals(-code).name}"
    _append(_cell_file(sweep, index), {"pid": pid, "ended": time.time(), "code": code, "reason": reason})


def read_attempts(sweep: Sweep, index: int, stage: str = "train") -> list[Attempt]:
    """The attempts at a cell, oldest first, each with its end where there is one."""
    attempts: list[Attempt] = []
    for row in _read_lines(_cell_file(sweep, index)):
        if "started" in row:
            attempts.append(Attempt(**row))
            continue
        pid = row.pop("pid", None)
        for position in reversed(range(len(attempts))):
            if attempts[position].process.get("process.pid") == pid:
                attempts[position] = replace(attempts[position], **row)
                break
    return [attempt for attempt in attempts if attempt.stage == stage]


def _cell_file(sweep: Sweep, index: int) -> Path:
    return sweep.path / "cells" / f"{index:05d}.jsonl"


def _append(path: Path, row: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, (json.dumps(row) + "\n").encode())
    finally:
        os.close(descriptor)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
