"""The state of every cell: from its run's summary, squeue, its exit record and sacct; and the sweep's report."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config.validate import Field, is_text, read_fields
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import atomic_write, open_file, read_file
from kl_comedy.records import RUN_SCORES
from kl_comedy.slurm import submit
from kl_comedy.slurm.manifest import Attempt, Cell, Submission, Sweep
from kl_comedy.slurm.submit import JobState, Work
from kl_comedy.tracking.provenance import is_dead
from kl_comedy.tracking.spool import UNREADABLE, decode_event

if TYPE_CHECKING:
    import pandas as pd

STATES = ("FINISHED", "RUNNING", "PENDING", "PLANNED", "STOPPED", "FAILED")
MISSING = ("PLANNED", "STOPPED", "FAILED")
"""The states that ``resubmit`` runs again."""
TAIL_BYTES = 1 << 16
"""Enough of a spool's end to hold its last metrics."""
UNKNOWN = JobState(state="UNKNOWN", why="SLURM cannot be asked")
"""The state of a job while SLURM does not answer. It may be running, so it does not count as lost."""


@dataclass(frozen=True, kw_only=True)
class CellStatus:
    """A row of ``kl-comedy status``. ``reward`` is that of the last logged update; ``run`` is the run's folder."""

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


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """What decides the state of a cell (:data:`RULES`)."""

    finished: bool = False
    """Whether its run's summary says so."""
    job: JobState | None = None
    """Of its newest submission: squeue's row, else sacct's. For a local manager, and where SLURM does not answer, what
    follows from the attempt (:func:`_presumed_job`). None where nobody knows of a job."""
    attempt: Attempt | None = None
    """The newest attempt of the newest submission, with its exit record."""
    submitted: str = ""
    """What its newest submission was given to, as "job 12_3"; empty before the first."""
    log: str = ""
    """The file that the job or the worker writes to, in the sweep's folder."""

    @property
    def code(self) -> int | None:
        """The exit code of the attempt; None where none is recorded."""
        return None if self.attempt is None else self.attempt.code


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A line of the table of states."""

    state: str
    meaning: str
    applies: Callable[[CellFacts], bool]
    why: Callable[[CellFacts], str] = lambda cell: ""


def _message(cell: CellFacts) -> str:
    """What the attempt said when it ended; empty where it said nothing."""
    if cell.attempt is None or cell.attempt.reason is None:
        return ""
    return cell.attempt.reason


def _end_without_message(cell: CellFacts) -> str:
    """Killed by a signal, or the node is gone: nobody was left to write a message."""
    if cell.job is not None:
        reason = cell.job.reason
    else:
        reason = "the process is gone"
        if cell.attempt is not None:
            reason = f"the process is gone from {cell.attempt.node}"
    return f"ended without a message: {reason} (log: {cell.log})"


RULES = (
    Rule(
        state="FINISHED",
        meaning="trained to the end, by its summary",
        applies=lambda cell: cell.finished,
    ),
    # SLURM's word about a live job: the files of a killed node are out of date.
    Rule(
        state="PENDING",
        meaning="waits, by SLURM or a live local manager",
        applies=lambda cell: cell.job is not None and cell.job.state == "PENDING",
        why=lambda cell: "" if cell.job is None else cell.job.why,
    ),
    Rule(
        state="RUNNING",
        meaning="runs, by SLURM or a live local manager",
        applies=lambda cell: cell.job is not None and cell.job.active,
    ),
    # The exit record before SLURM's word about a dead job: it knows the reason.
    Rule(
        state="STOPPED",
        meaning="saved after a signal or Ctrl-C",
        applies=lambda cell: cell.attempt is not None and (cell.attempt.resumable or cell.attempt.interrupted),
        why=_message,
    ),
    Rule(
        state="FAILED",
        meaning="ended with a reason: config, data, NaN, a signal that kills",
        applies=lambda cell: cell.code is not None and cell.code != 0,
        why=lambda cell: _message(cell) or f"exit code {cell.code}",
    ),
    Rule(
        state="STOPPED",
        meaning="cancelled, and ended without an exit record",
        applies=lambda cell: cell.job is not None and cell.job.state == "CANCELLED",
        why=lambda cell: "cancelled",
    ),
    Rule(
        state="FAILED",
        meaning="ended without an exit record: out of memory, time limit, node failure, a line of the profile",
        applies=lambda cell: cell.job is not None or cell.attempt is not None,
        why=_end_without_message,
    ),
    Rule(
        state="PLANNED",
        meaning="never began",
        applies=lambda cell: True,
        why=lambda cell: f"{cell.submitted} ended before it began" if cell.submitted else "",
    ),
)
"""The state of a cell is that of the first rule that applies."""


def cell_state(cell: CellFacts) -> tuple[str, str]:
    """The state of a cell, and why."""
    rule = next(rule for rule in RULES if rule.applies(cell))
    return rule.state, rule.why(cell)


@dataclass(frozen=True, kw_only=True)
class _CellFiles:
    """What the files of a cell's run and evaluation say."""

    run: Path | None
    """The run's folder; None before it is there."""
    step: int = 0
    """The last update in the spool; 0 before the first."""
    reward: float | None = None
    """The reward of that update."""
    summary: dict[str, Any]
    """The run's summary; empty before it has one."""
    evaluated: bool
    damage: tuple[str, ...]
    """A message for each file that cannot be read."""

    @property
    def finished(self) -> bool:
        """Whether the summary says that the run has finished."""
        return self.summary.get("status") == "FINISHED"


@dataclass(frozen=True, kw_only=True)
class _SpoolEnd:
    """The last update in a spool, its reward, and the number of lines after it that cannot be read."""

    step: int = 0
    reward: float | None = None
    unreadable_lines: int = 0


def read_status(sweep: Sweep) -> SweepStatus:
    """The state of every cell now."""
    files = {cell.index: _read_cell_files(sweep, cell) for cell in sweep.manifest.cells}
    submissions = sweep.submissions()
    training = _newest_submissions(submissions, "train")
    evaluation = _newest_submissions(submissions, "evaluate")
    # SLURM is asked once for all cells, since a sweep may have thousands, and not about what is done.
    unfinished = {index: item for index, item in training.items() if not files[index].finished}
    unevaluated = {index: item for index, item in evaluation.items() if not files[index].evaluated}
    jobs, notes = _ask_slurm(sweep, _slurm_tasks(unfinished) | _slurm_tasks(unevaluated))

    rows = []
    damage: list[str] = []
    for cell in sweep.manifest.cells:
        damage.extend(files[cell.index].damage)
        submission = training.get(cell.index)
        job = None
        if submission is not None:
            job = jobs.get(submission.task(cell.index))
        rows.append(_cell_status(sweep, cell, files[cell.index], submission, job))

    evaluating = set()
    for index, submission in unevaluated.items():
        if _is_under_way(submission, jobs.get(submission.task(index))):
            evaluating.add(index)

    # The journals were read above, and each reading counts its own damaged lines.
    for file, count in sweep.unreadable.items():
        if count:
            damage.append(f"{count} lines of {file} cannot be read")
    return SweepStatus(rows=tuple(rows), evaluating=frozenset(evaluating), notes=(*notes, *damage))


def _newest_submissions(submissions: Sequence[Submission], stage: str) -> dict[int, Submission]:
    """The newest submission of ``stage`` for each cell that has one, by the cell's index."""
    newest = {}
    for submission in submissions:
        if submission.stage != stage:
            continue
        # Oldest first, so that the newest submission of a cell is the one that stays.
        for index in submission.indices:
            newest[index] = submission
    return newest


def _slurm_tasks(submissions: Mapping[int, Submission]) -> set[str]:
    """SLURM's names of the tasks of these cells, without the cells of local managers."""
    return {submission.task(index) for index, submission in submissions.items() if submission.job}


def _is_under_way(submission: Submission, job: JobState | None) -> bool:
    """Whether a submission's task may be waiting or running. What cannot be asked counts, or it would start twice."""
    if submission.local:
        return not is_dead(submission.process)
    if job is None:
        return False
    return job.active or job is UNKNOWN


def missing_work(sweep: Sweep, status: SweepStatus) -> Work:
    """What is missing or failed. Cells that run, wait or are finished are left alone."""
    train = []
    evaluate = []
    for row in status.rows:
        if row.state in MISSING:
            train.append(row.cell)
        elif row.state == "FINISHED" and not row.evaluated and row.cell not in status.evaluating:
            evaluate.append(row.cell)
    if sweep.manifest.evaluate is None:
        evaluate = []
    return Work(train=tuple(train), evaluate=tuple(evaluate))


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
        ended_jobs = submit.accounting(sorted(tasks - jobs.keys()))
    except (UserError, RunFailed) as error:
        # A site may have no accounting database; squeue's answer counts all the same.
        return jobs, (f"jobs that left the queue cannot be looked up: {error}",)
    # squeue's answer wins: accounting may lag behind, or still know the run before a requeue.
    return {**ended_jobs, **jobs}, ()


def _read_cell_files(sweep: Sweep, cell: Cell) -> _CellFiles:
    """Read the end of the spool, the summary and the scores. A damaged file is a message, and not an error."""
    damage = []
    run = None
    spool = _SpoolEnd()
    summary: dict[str, Any] = {}
    if sweep.run(cell.index).is_dir():
        run = sweep.run(cell.index)
        spool = _read_spool_end(run)
        if spool.unreadable_lines:
            damage.append(f"{spool.unreadable_lines} of the last lines of {run}/spool.jsonl cannot be read")
        try:
            summary = read_summary(run)
        except UserError as error:
            damage.append(f"{error}; resubmit finishes its cell from the checkpoint")
    evaluated = False
    try:
        evaluated = read_scores(sweep, cell.index) is not None
    except UserError as error:
        damage.append(f"{error}; resubmit evaluates its cell again")
    return _CellFiles(
        run=run,
        step=spool.step,
        reward=spool.reward,
        summary=summary,
        evaluated=evaluated,
        damage=tuple(damage),
    )


def _cell_status(
    sweep: Sweep, cell: Cell, files: _CellFiles, submission: Submission | None, job: JobState | None
) -> CellStatus:
    """The row of a cell in ``kl-comedy status``. ``job``: what SLURM says about its submission."""
    attempts = sweep.attempts(cell.index)
    newest = attempts[-1] if attempts else None
    facts = cell_facts(cell.index, finished=files.finished, submission=submission, job=job, newest=newest)
    state, why = cell_state(facts)
    step = files.step
    reward = files.reward
    if state == "FINISHED":
        # Only the last TAIL_BYTES of the spool were read, and they need not hold the last update.
        step = files.summary.get("steps", step)
        reward = files.summary.get("metrics", {}).get("train/reward", reward)
        why = _why_not_evaluated(sweep, cell, files)
    if state == "PENDING" and newest is not None:
        why = f"started again at update {step}" + (f" ({why})" if why else "")

    # Where the cell runs, else where it ran last.
    node = ""
    task = ""
    if newest is not None:
        node = newest.node
        task = newest.job or ""
    if job is not None and job.state == "RUNNING" and job.node:
        node = job.node
    if submission is not None and not submission.local:
        task = submission.task(cell.index)
    return CellStatus(
        cell=cell.index,
        name=cell.name,
        seed=cell.seed,
        state=state,
        step=step,
        steps=cell.steps,
        reward=reward,
        evaluated=files.evaluated,
        node=node,
        job=task,
        attempts=len(attempts),
        why=why,
        run=None if files.run is None else str(files.run),
    )


def cell_facts(
    index: int, *, finished: bool, submission: Submission | None, job: JobState | None, newest: Attempt | None
) -> CellFacts:
    """What decides the state of a cell.

    ``job``: what SLURM says about its newest ``submission``; ``newest``: its newest attempt, of whichever submission.
    """
    attempt = newest
    submitted = ""
    log = f"train-local_{index}"
    if submission is not None:
        if newest is not None and not newest.is_of(submission, index):
            # It belongs to an earlier submission, and says nothing about this one.
            attempt = None
        if submission.local:
            submitted = "its local manager"
            may_run = not is_dead(submission.process)
        else:
            submitted = f"job {submission.task(index)}"
            log = f"train-{submission.task(index)}"
            may_run = job is UNKNOWN
        if may_run:
            job = _presumed_job(attempt, job)
    if newest is not None and newest.code is None and is_dead(newest.process) is False:
        # Its process is alive on this machine, whoever started it, and whether that one is alive.
        job = JobState(state="RUNNING")
    return CellFacts(finished=finished, job=job, attempt=attempt, submitted=submitted, log=f"logs/{log}.out")


def _presumed_job(attempt: Attempt | None, job: JobState | None) -> JobState | None:
    """The job of a live local manager, or of a SLURM that does not answer: what may run must not start twice."""
    why = "" if job is None else job.why
    if attempt is None or attempt.resumable:
        return JobState(state="PENDING", why=why)
    if attempt.code is None:
        return JobState(state="RUNNING", why=why)
    return None


def _why_not_evaluated(sweep: Sweep, cell: Cell, files: _CellFiles) -> str:
    """Why the newest evaluation of a finished cell has no scores; empty where it has, or was not tried."""
    if files.evaluated:
        return ""
    attempts = sweep.attempts(cell.index, "evaluate")
    if not attempts or not attempts[-1].reason:
        return ""
    return f"evaluation: {attempts[-1].reason}"


def last_update(run: Path) -> int:
    """The last update in the spool of a run's folder; 0 before the first."""
    return _read_spool_end(run).step


def _read_spool_end(run: Path) -> _SpoolEnd:
    """The last update in a run's spool. A spool that does not exist yet has none."""
    try:
        with open(open_file(run / "spool.jsonl", root=run), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")
    except UserError:
        return _SpoolEnd(unreadable_lines=1)
    except OSError:
        return _SpoolEnd()

    # What follows the last line break is empty, or a line that the run is writing now.
    lines = lines[:-1]
    if start > 0:
        # The window begins within a line.
        lines = lines[1:]
    unreadable = 0
    for line in reversed(lines):
        event = decode_event(line)
        if event.kind == UNREADABLE:
            unreadable += 1
        # From the end: the first such event is that of the last update. Evaluations log metrics too.
        if event.kind == "metrics" and "train/reward" in event.data:
            return _SpoolEnd(step=event.step or 0, reward=event.data["train/reward"], unreadable_lines=unreadable)
    return _SpoolEnd(unreadable_lines=unreadable)


def read_summary(run: Path) -> dict[str, Any]:
    """A run's summary; empty before it has one. Raises :class:`UserError` for a damaged file."""
    file = run / "summary.json"
    if not file.is_file():
        return {}
    return read_fields(file, "summary of a run", {"status": Field("a text", is_text)}, root=run)


def read_scores(sweep: Sweep, index: int) -> list[dict[str, Any]] | None:
    """The scores of a cell's evaluation; None before it has any. Raises :class:`UserError` for a damaged file."""
    file = sweep.evaluation(index)
    if not file.exists():
        return None
    try:
        rows = json.loads(read_file(file, root=sweep.path))
    except (OSError, ValueError, RecursionError) as error:
        # RecursionError: a damaged file may consist of thousands of brackets.
        raise UserError(f"{file} is not a readable list of scores ({error})") from None
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return rows
    raise UserError(f"{file} is not a readable list of scores (it holds no list of rows)")


# --- report ----------------------------------------------------------------------------------------------------------

LAST_METRICS = ("train/reward", "train/gold", "kl/exact_reverse_sequence", "policy/entropy")
"""Metrics of a run's last update that the report shows, where the run measured them."""


def seeds_table(sweep: Sweep, status: SweepStatus) -> pd.DataFrame | None:
    """Mean and interval over seeds of each metric of the finished cells, a row per configuration; None without any."""
    import pandas as pd

    from kl_comedy.results.tables import readable

    summary, metrics = _summary(pd.DataFrame(_cells_with_metrics(sweep, status)))
    if not metrics:
        return None
    return readable(summary, ["name"])


def _cells_with_metrics(sweep: Sweep, status: SweepStatus) -> list[dict[str, Any]]:
    return [{**asdict(row), **cell_metrics(sweep, row)} for row in status.rows]


def _summary(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Statistics of the metrics of cells over seeds, and these metrics."""
    from kl_comedy.results.compare import summarize

    # Metrics have a slash in their names, and the columns of CellStatus have none.
    metrics = [str(name) for name in frame.columns if "/" in name]
    # summarize counts runs by MLflow's statuses.
    by_run_status = frame.assign(status=frame["state"].replace({"STOPPED": "KILLED"}))
    return summarize(by_run_status, ["name"], metrics), metrics


def write_report(sweep: Sweep, status: SweepStatus) -> Path:
    """Write report/{cells.csv, cells.json, table.csv, report.md}; return the path of report.md."""
    import pandas as pd

    from kl_comedy.results.tables import readable, render

    cells = _cells_with_metrics(sweep, status)
    frame = pd.DataFrame(cells)
    summary, metrics = _summary(frame)
    table = "No cell has finished."
    if metrics:
        table = render(readable(summary, ["name"]), "markdown")

    # The page is read by people; the csv and json beside it have every digit.
    rounded = frame[["cell", "name", "seed", "state", "step", "why", *metrics]]
    for name in rounded.select_dtypes("float").columns:
        rounded = rounded.assign(**{str(name): rounded[name].map("{:.4g}".format)})

    page = f"""# Sweep {sweep.manifest.name}

{len(status.rows)} cells: {status.summary()}.
Manifest {sweep.manifest.digest}, kl_comedy {sweep.manifest.package_version}.

## Over seeds

Mean and 95% interval (Student) of finished cells.

{table}

## Cells

{render(rounded, "markdown")}
"""
    # report.md last: who finds it finds the tables that it was made of.
    folder = sweep.path / "report"
    atomic_write(folder / "cells.csv", render(frame, "csv") + "\n")
    atomic_write(folder / "cells.json", json.dumps(cells, indent=1) + "\n")
    atomic_write(folder / "table.csv", render(summary, "csv") + "\n")
    atomic_write(folder / "report.md", page)
    return folder / "report.md"


def cell_metrics(sweep: Sweep, row: CellStatus) -> dict[str, float]:
    """The last update's metrics, the run's own evaluations after it, and those of the evaluation job.

    Values that are not finite are left out.
    """
    metrics: dict[str, float] = {}
    if row.run and row.state == "FINISHED":
        # A cell counts as FINISHED only after its summary was read.
        summary = read_summary(Path(row.run))
        metrics |= _run_metrics(summary, summary.get("steps", row.steps))
    if row.evaluated:
        metrics |= _evaluation_metrics(read_scores(sweep, row.cell) or [])
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _run_metrics(summary: Mapping[str, Any], steps: int) -> dict[str, float]:
    metrics = {}
    last_update = summary.get("metrics", {})
    for name in LAST_METRICS:
        if name in last_update:
            metrics[name] = float(last_update[name])
    for key, score in RUN_SCORES.items():
        for name, value_by_step in summary.get(key, {}).items():
            # An earlier evaluation is not one of the trained policy.
            if str(steps) in value_by_step:
                metrics[f"eval/{name}/{score}"] = float(value_by_step[str(steps)])
    return metrics


def _evaluation_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The reward of each prompt set, and each score of a suite that has an interval."""
    metrics = {}
    for row in rows:
        # A prompt set has one score, its reward; a suite has one for each of its scores.
        if "set" in row:
            scores = [name for name in ("reward", "proxy") if name in row]
        else:
            scores = [name for name in row if f"{name}_low" in row]
        source = row.get("set", row.get("suite"))
        for name in scores:
            metrics[f"evaluate/{source}/{name}"] = float(row[name])
    return metrics
