"""Give cells to SLURM: arrays for training and evaluation, a job for the report, chained by dependencies."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.slurm import scheduler
from kl_comedy.slurm.journal import Submission, read_submissions, record_cancel, record_submission
from kl_comedy.slurm.manifest import Manifest, Sweep
from kl_comedy.slurm.profile import Profile
from kl_comedy.slurm.render import Array, array_ranges, arrays, script_path, scripts
from kl_comedy.slurm.status import MISSING, SweepStatus


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cells to train, and the trained cells still to be evaluated."""

    train: tuple[int, ...]
    evaluate: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.train or self.evaluate)


def missing_work(sweep: Sweep, status: SweepStatus) -> Work:
    """What is missing or failed. Cells that run, wait or are finished are left alone."""
    train = tuple(row.cell for row in status.rows if row.state in MISSING)
    evaluate = tuple(
        row.cell
        for row in status.rows
        if row.state == "FINISHED" and not row.evaluated and row.cell not in status.evaluating
    )
    return Work(train=train, evaluate=() if sweep.manifest.evaluate is None else evaluate)


def create_stores(manifest: Manifest) -> None:
    """Create every MLflow store and experiment once, here, before many jobs find it missing at the same time.

    Raises :class:`RunFailed` where a store cannot be reached: better now than in a thousand jobs.
    """
    from kl_comedy.errors import RunFailed
    from kl_comedy.tracking import store

    for uri, experiment in manifest.stores:
        if uri == store.NO_STORE:
            continue
        try:
            store.ensure_experiment(store.connect(uri), uri, experiment)
        except Exception as error:
            raise RunFailed(f"the results store cannot be created: {store.first_line(error)}") from error


def adopt_unrecorded_jobs(sweep: Sweep) -> list[Submission]:
    """Record jobs of this sweep that are in SLURM's queue and not in the folder; return them.

    Happens when sbatch timed out, or the submitter died before recording the job id. Without this the cells would be
    submitted again. Jobs are recognized by their comment.
    """
    if shutil.which("squeue") is None:
        return []
    recorded = {item.job for item in read_submissions(sweep)}
    mark = _comment_mark(sweep)
    indices: dict[tuple[str, str, int], list[int]] = {}
    for name, state in scheduler.queue(sweep.job_names).items():
        job, _, task = name.partition("_")
        job_mark, _, rest = state.comment.partition(":")
        if job_mark == mark and job not in recorded:
            stage, _, offset = rest.partition(":")
            indices.setdefault((job, stage, int(offset)), []).extend([int(task) + int(offset)] if task else [])
    adopted = [
        Submission(stage=stage, indices=tuple(sorted(numbers)), time=time.time(), job=job, offset=offset)
        for (job, stage, offset), numbers in indices.items()
    ]
    for submission in adopted:
        record_submission(sweep, submission)
    return adopted


def _comment_mark(sweep: Sweep) -> str:
    """Which manifest in which folder a job belongs to."""
    return f"{sweep.manifest.digest}-{hashlib.sha256(str(sweep.path).encode()).hexdigest()[:8]}"


def submit(sweep: Sweep, profile: Profile, profile_file: Path, work: Work) -> list[Submission]:
    """Write the scripts and submit ``work``; return the submissions, which are also recorded.

    Raises :class:`UserError`, before anything is submitted, for a cell that the profile has no shape for.
    """
    limit = _limit(sweep.manifest, profile)
    training, evaluating = (
        arrays([sweep.cell(index) for index in indices], profile, limit) for indices in (work.train, work.evaluate)
    )
    cells = [sweep.cell(index) for index in (*work.train, *work.evaluate)]
    for name, text in scripts(sweep, profile, cells).items():
        script_path(sweep, name).write_text(text)
    submissions: list[Submission] = []

    def submit_stage(stage: str, array: Array | None, dependency: str | None) -> str:
        job = scheduler.sbatch(_sbatch_words(sweep, stage, array, dependency))
        indices, offset = ((), 0) if array is None else (array.indices, array.offset)
        submission = Submission(
            stage=stage, indices=indices, time=time.time(), job=job, offset=offset, profile=str(profile_file)
        )
        record_submission(sweep, submission)
        submissions.append(submission)
        return job

    for array in training:
        job = submit_stage("train", array, None)
        if sweep.manifest.evaluate is not None:
            submit_stage("evaluate", array, f"aftercorr:{job}")
    for array in evaluating:
        submit_stage("evaluate", array, None)
    submit_stage("report", None, "afterany:" + ":".join(str(item.job) for item in submissions))
    return submissions


def planned_commands(sweep: Sweep, profile: Profile) -> list[str]:
    """The sbatch lines of a first submission, with words where job ids will be."""
    lines = []
    for array in arrays(sweep.manifest.cells, profile, _limit(sweep.manifest, profile)):
        lines.append(_sbatch_words(sweep, "train", array, None))
        if sweep.manifest.evaluate is not None:
            lines.append(_sbatch_words(sweep, "evaluate", array, "aftercorr:TRAIN_JOB"))
    last = "TRAIN" if sweep.manifest.evaluate is None else "EVALUATE"
    lines.append(_sbatch_words(sweep, "report", None, f"afterany:{last}_JOBS"))
    return [shlex.join(words) for words in lines]


def _sbatch_words(sweep: Sweep, stage: str, array: Array | None, dependency: str | None) -> list[str]:
    """sbatch's command line for a stage of an array; without an array, for the report."""
    offset = 0 if array is None else array.offset
    words = ["sbatch", "--parsable", f"--comment={_comment_mark(sweep)}:{stage}:{offset}"]
    if array is not None:
        ranges = array_ranges(index - offset for index in array.indices)
        words.append(f"--array={ranges}" + (f"%{array.share}" if array.share else ""))
    if dependency:
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    script = script_path(sweep, stage if array is None else array.script(stage))
    return [*words, str(script), *([] if array is None else [str(offset)])]


def cancel(sweep: Sweep, jobs: Sequence[str]) -> None:
    """Cancel ``jobs`` of the sweep, running or not, and record it."""
    record_cancel(sweep)
    scheduler.scancel(sorted({job.split("_")[0] for job in jobs}))


def active_jobs(sweep: Sweep) -> list[str]:
    """The jobs of the sweep that are not over, as SLURM says."""
    own = {item.job for item in read_submissions(sweep) if item.job is not None}
    if not own:
        return []
    queue = scheduler.queue(sweep.job_names)
    return [job for job, state in queue.items() if job.split("_")[0] in own and state.active]


def _limit(manifest: Manifest, profile: Profile) -> int | None:
    limits = [limit for limit in (manifest.max_parallel, profile.max_parallel) if limit is not None]
    return min(limits, default=None)
