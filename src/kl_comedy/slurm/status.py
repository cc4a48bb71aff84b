"""What happened to a sweep, as lines appended to files: submissions, and attempts at each cell.

One line is one ``write``, so concurrent writers do not tear each other's; a torn line of a killed one is skipped.

The state of every cell: what the run folders say, what the attempts say, what SLURM says; in that order.

FINISHED · RUNNING · PENDING (in the queue) · PLANNED (never submitted) · STOPPED (saved, wants to go on)
· FAILED (with its own words) · DIED (without a word) · CANCELLED

The report of a sweep, from its folder alone: every cell, and mean and interval over seeds.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, UserError
from kl_comedy.io import atomic_write
from kl_comedy.slurm import scheduler
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.scheduler import JobState

if TYPE_CHECKING:
    import pandas as pd


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
        "stage": stage,
        "started": time.time(),
        "process": dict(process),
        "node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        "job": f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        "parent": str(os.getppid()),
    }
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
        index
        for index, one in evaluate.items()
        if not sweep.evaluation(index).exists() and _under_way(one, slurm.of(one, index)[1])
    )
    return Board(rows=rows, evaluating=evaluating, notes=slurm.notes)


def _under_way(given: Submission, queued: JobState | None) -> bool:
    from kl_comedy.tracking.provenance import is_dead

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
        cell=cell.index,
        name=cell.name,
        seed=cell.seed,
        state=state,
        step=step,
        steps=cell.steps,
        reward=reward,
        evaluated=evaluated,
        node=node,
        job=job or (last.job or "" if last else ""),
        attempts=len(tries),
        why=why,
        run=None if run is None else str(run),
    )


def _why_not_evaluated(sweep: Sweep, index: int) -> str:
    tries = attempts(sweep, index, "evaluate")
    return f"evaluation: {tries[-1].reason}" if tries and tries[-1].reason else ""


def _state(
    index: int,
    summary: Mapping[str, Any] | None,
    last: Attempt | None,
    given: Submission | None,
    queued: JobState | None,
    cancelled: float,
) -> tuple[str, str]:
    """The state and why."""
    from kl_comedy.tracking.provenance import is_dead

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
    from kl_comedy.tracking.provenance import is_dead

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
        for stage in ("train", "evaluate")
        for index, one in latest(given, stage).items()
        if not one.local
    ]
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


LAST_METRICS = ("train/reward", "kl/exact_reverse_sequence", "policy/entropy")
"""Of a run's last update, where it was measured."""


def write_report(sweep: Sweep, seen: Board) -> Path:
    """Write report/{cells.csv, cells.json, table.csv, report.md}; the page's path."""
    import pandas as pd

    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.tables import readable, render

    folder = sweep.path / "report"
    folder.mkdir(exist_ok=True)
    cells = [{**asdict(row), **_measured(sweep, row)} for row in seen.rows]
    frame = pd.DataFrame(cells)
    metrics = [name for name in frame.columns if "/" in name]
    counted = frame.assign(status=frame["state"].replace({"DIED": "FAILED", "CANCELLED": "KILLED"}))
    summary = summarize(counted, ["name"], metrics)
    columns = ["cell", "name", "seed", "state", "step", "why", *metrics]
    atomic_write(folder / "cells.csv", render(frame, "csv") + "\n")
    atomic_write(folder / "cells.json", json.dumps(cells, indent=1) + "\n")
    atomic_write(folder / "table.csv", render(summary, "csv") + "\n")
    table = render(readable(summary, ["name"]), "markdown") if metrics else "No cell has finished."
    atomic_write(folder / "report.md", _page(sweep, seen, table, render(_rounded(frame[columns]), "markdown")) + "\n")
    return folder / "report.md"


def _page(sweep: Sweep, seen: Board, table: str, cells: str) -> str:
    counts = ", ".join(f"{number} {state.lower()}" for state, number in seen.counts().items())
    return "\n".join(
        [
            f"# Sweep {sweep.manifest.name}",
            "",
            f"{len(seen.rows)} cells: {counts}. Manifest {sweep.manifest.digest}, kl_comedy "
            f"{sweep.manifest.package_version}.",
            "",
            "## Over seeds",
            "",
            "Mean and 95% interval (Student) of finished cells.",
            "",
            table,
            "",
            "## Cells",
            "",
            cells,
        ]
    )


def _measured(sweep: Sweep, row: CellStatus) -> dict[str, float]:
    """The last update's metrics, the run's own last evaluations, and those of the evaluation job."""
    found: dict[str, float] = {}
    summary = _read(Path(row.run) / "summary.json") if row.run else None
    if summary is not None and row.state == "FINISHED":
        last = summary.get("metrics", {})
        found |= {name: float(last[name]) for name in LAST_METRICS if name in last}
        for kept, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
            for name, history in summary.get(kept, {}).items():
                found[f"eval/{name}/{score}"] = float(history[max(history, key=int)])
    for item in _read(sweep.evaluation(row.cell)) or []:
        found |= _scores(item)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _scores(item: dict[str, Any]) -> dict[str, float]:
    """An evaluation's row: the reward of a set, or every score of a suite that has an interval."""
    if "set" in item:
        return {f"evaluate/{item['set']}/reward": float(item["reward"])}
    return {f"evaluate/{item['suite']}/{name}": float(item[name]) for name in item if f"{name}_low" in item}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _rounded(frame: pd.DataFrame) -> pd.DataFrame:
    numbers = frame.select_dtypes("float").columns
    return frame.assign(**{str(name): frame[name].map(lambda value: f"{value:.4g}") for name in numbers})
