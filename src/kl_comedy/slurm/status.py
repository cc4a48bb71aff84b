"""The state of every cell: from the run folders, then the attempts, then SLURM; and the sweep's report.

FINISHED · RUNNING · PENDING (in the queue) · PLANNED (never submitted) · STOPPED (saved, asks to resume)
· FAILED (with its own message) · DIED (without a message) · CANCELLED
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, UserError
from kl_comedy.io import atomic_write
from kl_comedy.slurm import scheduler
from kl_comedy.slurm.journal import (
    Attempt,
    Submission,
    cancelled_at,
    latest_submissions,
    read_attempts,
    read_submissions,
)
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.scheduler import JobState

if TYPE_CHECKING:
    import pandas as pd

STATES = ("FINISHED", "RUNNING", "PENDING", "PLANNED", "STOPPED", "FAILED", "DIED", "CANCELLED")
MISSING = ("PLANNED", "STOPPED", "FAILED", "DIED", "CANCELLED")
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
        counts = {state: sum(row.state == state for row in self.rows) for state in STATES}
        return {state: number for state, number in counts.items() if number}

    def summary(self) -> str:
        """The counts as text: ``3 finished, 1 failed``."""
        return ", ".join(f"{number} {state.lower()}" for state, number in self.counts().items())


def read_status(sweep: Sweep) -> SweepStatus:
    """The state of every cell now."""
    submissions = read_submissions(sweep)
    train, evaluate = (latest_submissions(submissions, stage) for stage in ("train", "evaluate"))
    runs = _newest_runs(sweep)
    jobs, notes = _ask_slurm(sweep, submissions)
    cancelled = cancelled_at(sweep)
    rows = []
    for cell in sweep.manifest.cells:
        submission = train.get(cell.index)
        job = _job_state(jobs, submission, cell.index)
        rows.append(_cell_status(sweep, cell, runs.get(cell.run_stem), submission, job, cancelled))
    evaluating = {
        index
        for index, submission in evaluate.items()
        if not sweep.evaluation(index).exists() and _is_active(submission, _job_state(jobs, submission, index))
    }
    return SweepStatus(rows=tuple(rows), evaluating=frozenset(evaluating), notes=notes)


def _ask_slurm(sweep: Sweep, submissions: list[Submission]) -> tuple[dict[str, JobState] | None, tuple[str, ...]]:
    """States by job id from squeue, from sacct for jobs that left the queue; None where squeue does not answer."""
    own = {item.job for item in submissions if item.job is not None}
    if not own:
        return {}, ()
    try:
        queue = scheduler.queue(sweep.job_names)
    except (UserError, RunFailed) as error:
        return None, (f"the queue cannot be asked, states are from the run folders alone: {error}",)
    jobs = {job: state for job, state in queue.items() if job.split("_")[0] in own}
    gone = {
        str(item.job)
        for stage in ("train", "evaluate")
        for index, item in latest_submissions(submissions, stage).items()
        if not item.local and f"{item.job}_{index - item.offset}" not in jobs
    }
    try:
        return {**scheduler.accounting(sorted(gone)), **jobs}, ()
    except (UserError, RunFailed) as error:
        return jobs, (f"jobs that left the queue cannot be looked up: {error}",)


def _job_state(jobs: Mapping[str, JobState] | None, submission: Submission | None, index: int) -> JobState | None:
    if submission is None or submission.local:
        return None
    return UNKNOWN if jobs is None else jobs.get(f"{submission.job}_{index - submission.offset}")


def _is_active(submission: Submission, job: JobState | None) -> bool:
    from kl_comedy.tracking.provenance import is_dead

    if submission.local:
        return not is_dead(submission.process)
    return job is not None and (job.active or job is UNKNOWN)


def _cell_status(
    sweep: Sweep, cell: Cell, run: Path | None, submission: Submission | None, job: JobState | None, cancelled: float
) -> CellStatus:
    attempts = read_attempts(sweep, cell.index)
    last = attempts[-1] if attempts else None
    summary = None if run is None else _read_json(run / "summary.json")
    if isinstance(summary, dict) and summary.get("status") == "FINISHED":
        state, why = "FINISHED", ""
    else:
        state, why = _unfinished_state(cell.index, last, submission, job, cancelled)
    step, reward = _progress(run)
    if state == "PENDING" and attempts:
        why = f"started again at update {step}" + (f" ({why})" if why else "")
    evaluated = sweep.evaluation(cell.index).exists()
    if state == "FINISHED" and not evaluated:
        reason = next((item.reason for item in reversed(read_attempts(sweep, cell.index, "evaluate"))), None)
        why = f"evaluation: {reason}" if reason else ""
    job_id = (last.job if last else None) or ""
    if submission is not None and not submission.local:
        job_id = f"{submission.job}_{cell.index - submission.offset}"
    return CellStatus(
        cell=cell.index,
        name=cell.name,
        seed=cell.seed,
        state=state,
        step=step,
        steps=cell.steps,
        reward=reward,
        evaluated=evaluated,
        node=job.node if job and job.state == "RUNNING" and job.node else last.node if last else "",
        job=job_id,
        attempts=len(attempts),
        why=why,
        run=None if run is None else str(run),
    )


def _unfinished_state(
    index: int, last: Attempt | None, submission: Submission | None, job: JobState | None, cancelled: float
) -> tuple[str, str]:
    """The state of a cell whose run is not finished, and why."""
    from kl_comedy.tracking.provenance import is_dead

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


def newest_run(sweep: Sweep, cell: Cell) -> Path | None:
    """The folder of a cell's run, or None before it began."""
    return _newest_runs(sweep).get(cell.run_stem)


def _newest_runs(sweep: Sweep) -> dict[str, Path]:
    """The newest run folder of each name and hash, in one listing."""
    numbers: dict[str, int] = {}
    for entry in os.scandir(sweep.runs) if sweep.runs.is_dir() else ():
        stem, _, number = entry.name.rpartition("-")
        if number.isdigit():
            numbers[stem] = max(int(number), numbers.get(stem, 0))
    return {stem: sweep.runs / f"{stem}-{number}" for stem, number in numbers.items()}


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


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# --- report ----------------------------------------------------------------------------------------------------------

LAST_METRICS = ("train/reward", "kl/exact_reverse_sequence", "policy/entropy")
"""Of a run's last update, where it was measured."""


def write_report(sweep: Sweep, status: SweepStatus) -> Path:
    """Write report/{cells.csv, cells.json, table.csv, report.md}; return the path of report.md."""
    import pandas as pd

    from kl_comedy.tracking.compare import summarize
    from kl_comedy.tracking.tables import readable, render

    folder = sweep.path / "report"
    cells = [{**asdict(row), **cell_metrics(sweep, row)} for row in status.rows]
    frame = pd.DataFrame(cells)
    metrics = [name for name in frame.columns if "/" in name]
    counted = frame.assign(status=frame["state"].replace({"DIED": "FAILED", "CANCELLED": "KILLED"}))
    summary = summarize(counted, ["name"], metrics)
    columns = ["cell", "name", "seed", "state", "step", "why", *metrics]
    table = render(readable(summary, ["name"]), "markdown") if metrics else "No cell has finished."
    page = f"""# Sweep {sweep.manifest.name}

{len(status.rows)} cells: {status.summary()}.
Manifest {sweep.manifest.digest}, kl_comedy {sweep.manifest.package_version}.

## Over seeds

Mean and 95% interval (Student) of finished cells.

{table}

## Cells

{render(_rounded(frame[columns]), "markdown")}
"""
    for name, text in {
        "cells.csv": render(frame, "csv") + "\n",
        "cells.json": json.dumps(cells, indent=1) + "\n",
        "table.csv": render(summary, "csv") + "\n",
        "report.md": page,
    }.items():
        atomic_write(folder / name, text)
    return folder / "report.md"


def cell_metrics(sweep: Sweep, row: CellStatus) -> dict[str, float]:
    """The last update's metrics, the run's own last evaluations, and those of the evaluation job."""
    metrics: dict[str, float] = {}
    summary = _read_json(Path(row.run) / "summary.json") if row.run else None
    if isinstance(summary, dict) and row.state == "FINISHED":
        last = summary.get("metrics", {})
        metrics |= {name: float(last[name]) for name in LAST_METRICS if name in last}
        for key, score in (("evaluations", "reward"), ("accuracies", "accuracy")):
            for name, history in summary.get(key, {}).items():
                metrics[f"eval/{name}/{score}"] = float(history[max(history, key=int)])
    for item in _read_json(sweep.evaluation(row.cell)) or []:
        if "set" in item:
            metrics[f"evaluate/{item['set']}/reward"] = float(item["reward"])
        else:  # a suite: every score that has an interval
            scores = [name for name in item if f"{name}_low" in item]
            metrics |= {f"evaluate/{item['suite']}/{name}": float(item[name]) for name in scores}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _rounded(frame: pd.DataFrame) -> pd.DataFrame:
    numbers = frame.select_dtypes("float").columns
    return frame.assign(**{str(name): frame[name].map(lambda value: f"{value:.4g}") for name in numbers})
