"""The state of every cell: from the run folders, then the attempts, then SLURM; and the sweep's report.

FINISHED · RUNNING · PENDING (in the queue) · PLANNED (never submitted) · STOPPED (saved, asks to resume)
· FAILED (with its own message) · DIED (without a message) · CANCELLED
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, UserError
from kl_comedy.io import atomic_write, open_file, read_file, read_json
from kl_comedy.slurm import submit
from kl_comedy.slurm.manifest import Attempt, Cell, Submission, Sweep
from kl_comedy.slurm.submit import JobState, Work
from kl_comedy.tracking.provenance import is_dead
from kl_comedy.tracking.spool import UNREADABLE, decode_event

STATES = ("FINISHED", "RUNNING", "PENDING", "PLANNED", "STOPPED", "FAILED", "DIED", "CANCELLED")
MISSING = STATES[3:]
"""The states that ``resubmit`` runs again."""
TAIL_BYTES = 1 << 16
"""Enough of a spool's end to hold its last metrics."""
UNKNOWN = JobState(state="UNKNOWN", why="SLURM cannot be asked")
"""Of a job while SLURM does not answer: it may be running, so it does not count as lost."""


@dataclass(frozen=True, kw_only=True)
class CellStatus:
    """A row of ``kl-comedy status``. ``reward`` is that of the last logged update; ``run`` the run's folder."""

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
class SweepStatus:
    """Every cell's state, the cells whose evaluation is under way, and notes on what could not be asked."""

    rows: tuple[CellStatus, ...]
    evaluating: frozenset[int]
    notes: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        counts = Counter(row.state for row in self.rows)
        return {state: counts[state] for state in STATES if state in counts}

    def summary(self) -> str:
        """The counts as text: ``3 finished, 1 failed``."""
        return ", ".join(f"{number} {state.lower()}" for state, number in self.counts().items())


def read_status(sweep: Sweep) -> SweepStatus:
    """The state of every cell now."""
    train, evaluate = (
        {index: item for item in sweep.submissions() if item.stage == stage for index in item.indices}
        for stage in ("train", "evaluate")
    )
    jobs, notes = _ask_slurm(
        sweep, {item.task(n) for stage in (train, evaluate) for n, item in stage.items() if item.job}
    )
    cancelled, runs = sweep.cancelled_at(), newest_runs(sweep)
    rows, damaged = [], list[str]()
    for cell in sweep.manifest.cells:
        submission, run = train.get(cell.index), runs.get(cell.run_stem)
        job = jobs.get(submission.task(cell.index)) if submission else None
        rows.append(_cell_status(sweep, cell, run, submission, job, cancelled, damaged))
    evaluating = set()
    for index, submission in evaluate.items():
        job = jobs.get(submission.task(index))
        active = not is_dead(submission.process) if submission.local else job and (job.active or job is UNKNOWN)
        if active and not sweep.evaluation(index).exists():
            evaluating.add(index)
    damaged += [f"{count} lines of {file} cannot be read" for file, count in sweep.unreadable.items() if count]
    return SweepStatus(rows=tuple(rows), evaluating=frozenset(evaluating), notes=(*notes, *damaged))


def missing_work(sweep: Sweep, status: SweepStatus) -> Work:
    """What is missing or failed. Cells that run, wait or are finished are left alone."""
    trained = [row.cell for row in status.rows if row.state == "FINISHED" and not row.evaluated]
    evaluate = [] if sweep.manifest.evaluate is None else [cell for cell in trained if cell not in status.evaluating]
    return Work(train=tuple(row.cell for row in status.rows if row.state in MISSING), evaluate=tuple(evaluate))


def _ask_slurm(sweep: Sweep, tasks: set[str]) -> tuple[dict[str, JobState], tuple[str, ...]]:
    """States from squeue, from sacct for ``tasks`` that left the queue; and notes."""
    if not tasks:
        return {}, ()
    try:
        jobs = submit.queue(sweep.job_names)
    except (UserError, RunFailed) as error:
        note = f"the queue cannot be asked, states are from the run folders alone: {error}"
        return dict.fromkeys(tasks, UNKNOWN), (note,)
    try:
        return {**submit.accounting(sorted(tasks - jobs.keys())), **jobs}, ()
    except (UserError, RunFailed) as error:
        return jobs, (f"jobs that left the queue cannot be looked up: {error}",)


def _cell_status(
    sweep: Sweep,
    cell: Cell,
    run: Path | None,
    submission: Submission | None,
    job: JobState | None,
    cancelled: float,
    damaged: list[str],
) -> CellStatus:
    """A row; what cannot be read is added to ``damaged``."""
    attempts = sweep.attempts(cell.index)
    last = attempts[-1] if attempts else None
    step, reward, summary, evaluated = 0, None, dict[str, Any](), False
    if run is not None:
        step, reward, unreadable = _progress(run)
        if unreadable:
            damaged.append(f"{unreadable} of the last lines of {run}/spool.jsonl cannot be read")
        try:
            summary = read_summary(run)
        except UserError as error:
            damaged.append(f"{error}; resubmit finishes its cell from the checkpoint")
    try:
        evaluated = read_scores(sweep, cell.index) is not None
    except UserError as error:
        damaged.append(f"{error}; resubmit evaluates its cell again")
    if summary.get("status") == "FINISHED":
        step, reward = summary.get("steps", step), summary.get("metrics", {}).get("train/reward", reward)
        failed = [] if evaluated else sweep.attempts(cell.index, "evaluate")
        state, why = "FINISHED", f"evaluation: {failed[-1].reason}" if failed and failed[-1].reason else ""
    else:
        state, why = _unfinished_state(cell.index, last, submission, job, cancelled)
    if state == "PENDING" and last:
        why = f"started again at update {step}" + (f" ({why})" if why else "")
    submitted = submission is not None and not submission.local
    return CellStatus(
        cell=cell.index,
        name=cell.name,
        seed=cell.seed,
        state=state,
        step=step,
        steps=cell.steps,
        reward=reward,
        evaluated=evaluated,
        node=(job.node if job and job.state == "RUNNING" else "") or (last.node if last else ""),
        job=submission.task(cell.index) if submission and submitted else (last and last.job) or "",
        attempts=len(attempts),
        why=why,
        run=None if run is None else str(run),
    )


def _unfinished_state(
    index: int, last: Attempt | None, submission: Submission | None, job: JobState | None, cancelled: float
) -> tuple[str, str]:
    """The state of a cell whose run is not finished, and why."""
    if job is not None and job.active:
        return ("PENDING", job.why) if job.state == "PENDING" else ("RUNNING", "")
    if job is UNKNOWN and (last is None or last.code is None):
        return "PENDING" if last is None else "RUNNING", UNKNOWN.why
    was_cancelled = submission is not None and cancelled > submission.time
    if submission is not None and (last is None or not last.is_of(submission, index)):
        if was_cancelled:
            return "CANCELLED", "cancelled before it began"
        if submission.local:
            return ("PLANNED", "its manager ended") if is_dead(submission.process) else ("PENDING", "")
        if job is None:
            return "DIED", f"job {submission.job} left the queue before it began"
        return "CANCELLED" if job.state == "CANCELLED" else "DIED", job.why or job.state
    if last is None:
        return "PLANNED", ""
    if last.code is None and submission is not None and submission.local and not is_dead(last.process):
        return "RUNNING", ""
    if was_cancelled or (job is not None and job.state == "CANCELLED"):
        return "CANCELLED", last.reason or "cancelled"
    if last.code == REQUEUE_EXIT_CODE:
        return "STOPPED", last.reason or ""
    if last.code is not None and (last.code > 0 or last.reason):
        return "FAILED" if last.code > 0 else "DIED", last.reason or f"exit code {last.code}"
    reason = job.why or job.state if job else f"the process is gone from {last.node}"
    return "DIED", f"ended without a message: {reason}"


def newest_runs(sweep: Sweep) -> dict[str, Path]:
    """The newest run folder of each cell that began, by the cell's ``run_stem``."""
    numbers: dict[str, int] = {}
    for name in os.listdir(sweep.runs) if sweep.runs.is_dir() else ():
        stem, _, number = name.rpartition("-")
        if number.isdigit():
            numbers[stem] = max(int(number), numbers.get(stem, 0))
    return {stem: sweep.runs / f"{stem}-{number}" for stem, number in numbers.items()}


def _progress(run: Path) -> tuple[int, float | None, int]:
    """The last update in the spool, its reward, and the number of lines after it that cannot be read."""
    try:
        with open(open_file(run / "spool.jsonl", root=run), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except UserError:
        return 0, None, 1
    except OSError:
        return 0, None, 0
    unreadable = 0
    for line in reversed(lines[1 if start else 0 : -1]):  # whole ones
        event = decode_event(line)
        unreadable += event.kind == UNREADABLE
        if event.kind == "metrics" and "train/reward" in event.data:
            return event.step or 0, event.data["train/reward"], unreadable
    return 0, None, unreadable


def read_summary(run: Path) -> dict[str, Any]:
    """A run's summary; empty before it has one. Raises :class:`UserError` for a damaged file."""
    file = run / "summary.json"
    return read_json(file, "summary of a run", {"status": str}, root=run) if file.is_file() else {}


def read_scores(sweep: Sweep, index: int) -> list[dict[str, Any]] | None:
    """The scores of a cell's evaluation; None before it has any. Raises :class:`UserError` for a damaged file."""
    file = sweep.evaluation(index)
    if not file.exists():
        return None
    try:
        rows = json.loads(read_file(file, root=sweep.path))
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
        reason = "it holds no list of rows"
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error)
    raise UserError(f"{file} is no readable list of scores ({reason})")


# --- report ----------------------------------------------------------------------------------------------------------

LAST_METRICS = ("train/reward", "kl/exact_reverse_sequence", "policy/entropy")
"""Of a run's last update, where it was measured."""


def write_report(sweep: Sweep, status: SweepStatus) -> Path:
    """Write report/{cells.csv, cells.json, table.csv, report.md}; return the path of report.md."""
    import pandas as pd

    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.tables import readable, render

    cells = [{**asdict(row), **cell_metrics(sweep, row)} for row in status.rows]
    frame = pd.DataFrame(cells)
    metrics = [name for name in frame.columns if "/" in name]
    counted = frame.assign(status=frame["state"].replace({"DIED": "FAILED", "CANCELLED": "KILLED"}))
    summary = summarize(counted, ["name"], metrics)
    rounded = frame[["cell", "name", "seed", "state", "step", "why", *metrics]]
    for name in rounded.select_dtypes("float").columns:
        rounded = rounded.assign(**{str(name): rounded[name].map("{:.4g}".format)})
    page = f"""# Sweep {sweep.manifest.name}

{len(status.rows)} cells: {status.summary()}.
Manifest {sweep.manifest.digest}, kl_comedy {sweep.manifest.package_version}.

## Over seeds

Mean and 95% interval (Student) of finished cells.

{render(readable(summary, ["name"]), "markdown") if metrics else "No cell has finished."}

## Cells

{render(rounded, "markdown")}
"""
    folder = sweep.path / "report"
    atomic_write(folder / "cells.csv", render(frame, "csv") + "\n")
    atomic_write(folder / "cells.json", json.dumps(cells, indent=1) + "\n")
    atomic_write(folder / "table.csv", render(summary, "csv") + "\n")
    atomic_write(folder / "report.md", page)
    return folder / "report.md"


def cell_metrics(sweep: Sweep, row: CellStatus) -> dict[str, float]:
    """The last update's metrics, the run's own evaluations after it, and those of the evaluation job."""
    metrics: dict[str, float] = {}
    if row.run and row.state == "FINISHED":
        summary = read_summary(Path(row.run))  # FINISHED, so it is readable
        last = summary.get("metrics", {})
        metrics |= {name: float(last[name]) for name in LAST_METRICS if name in last}
        for key, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
            for name, history in summary.get(key, {}).items():
                if str(row.steps) in history:  # an earlier evaluation is not of the trained policy
                    metrics[f"eval/{name}/{score}"] = float(history[str(row.steps)])
    for item in (read_scores(sweep, row.cell) or ()) if row.evaluated else ():
        # of a suite every score that has an interval
        scores = ["reward"] if "set" in item else [name for name in item if f"{name}_low" in item]
        for name in scores:
            metrics[f"evaluate/{item.get('set', item.get('suite'))}/{name}"] = float(item[name])
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
