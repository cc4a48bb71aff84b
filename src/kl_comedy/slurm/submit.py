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
from kl_comedy.slurm.manifest import Manifest, Sweep
from kl_comedy.slurm.profile import Profile
from kl_comedy.slurm.render import STAGES, Array, array_ranges, arrays, script_path, scripts
from kl_comedy.slurm.status import MISSING, Board, Submission, record_cancel, record_submission, submissions


@dataclass(frozen=True, kw_only=True)
class Todo:
    """The cells to train, and those that are trained and still to be evaluated."""

    train: tuple[int, ...]
    evaluate: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.train or self.evaluate)


def todo(sweep: Sweep, seen: Board) -> Todo:
    """What is missing or failed. Cells that run, wait or are finished are left alone."""
    train = tuple(row.cell for row in seen.rows if row.state in MISSING)
    evaluate = tuple(
        row.cell
        for row in seen.rows
        if row.state == "FINISHED" and not row.evaluated and row.cell not in seen.evaluating
    )
    return Todo(train=train, evaluate=evaluate if sweep.manifest.evaluate is not None else ())


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


def adopt(sweep: Sweep) -> list[Submission]:
    """Record the jobs of this sweep that SLURM has and the folder does not know of.

    So it is when sbatch was too slow to answer, or its caller was killed before it could take a note. The comment says
    whose they are; without this they would be submitted again.
    """
    if shutil.which("squeue") is None:
        return []
    known = {one.job for one in submissions(sweep)}
    mark = _mark(sweep)
    found: dict[tuple[str, str, int], list[int]] = {}
    for name, state in scheduler.queue([f"{sweep.manifest.name}-{stage}" for stage in STAGES]).items():
        job, _, task = name.partition("_")
        whose, _, rest = state.comment.partition(":")
        if whose == mark and job not in known:
            stage, _, offset = rest.partition(":")
            found.setdefault((job, stage, int(offset)), []).extend([int(task) + int(offset)] if task else [])
    made = [
        Submission(stage=stage, indices=tuple(sorted(indices)), time=time.time(), job=job, offset=offset)
        for (job, stage, offset), indices in found.items()
    ]
    for one in made:
        record_submission(sweep, one)
    return made


def _mark(sweep: Sweep) -> str:
    """Which manifest in which folder a job belongs to."""
    return f"{sweep.manifest.digest}-{hashlib.sha256(str(sweep.path).encode()).hexdigest()[:8]}"


def submit(sweep: Sweep, profile: Profile, profile_file: Path, work: Todo) -> list[Submission]:
    """Write the scripts and submit what is to be done; the submissions, which are also recorded.

    Raises :class:`UserError`, before anything is submitted, for a cell that the profile has no shape for.
    """
    limit = _limit(sweep.manifest, profile)
    training, evaluating = (
        arrays([sweep.cell(index) for index in indices], profile, limit) for indices in (work.train, work.evaluate)
    )
    cells = [sweep.cell(index) for index in (*work.train, *work.evaluate)]
    for name, text in scripts(sweep, profile, cells).items():
        script_path(sweep, name).write_text(text)
    made: list[Submission] = []

    def give(stage: str, array: Array | None, dependency: str | None) -> Submission:
        job = scheduler.sbatch(_words(sweep, stage, array, dependency))
        indices, offset = ((), 0) if array is None else (array.indices, array.offset)
        one = Submission(
            stage=stage, indices=indices, time=time.time(), job=job, offset=offset, profile=str(profile_file)
        )
        record_submission(sweep, one)
        made.append(one)
        return one

    for array in training:
        trained = give("train", array, None)
        if sweep.manifest.evaluate is not None:
            give("evaluate", array, f"aftercorr:{trained.job}")
    for array in evaluating:
        give("evaluate", array, None)
    give("report", None, "afterany:" + ":".join(str(one.job) for one in made))
    return made


def planned_commands(sweep: Sweep, profile: Profile) -> list[str]:
    """The sbatch lines of a first submission, with words where job ids will be."""
    last, lines = "train", []
    for array in arrays(sweep.manifest.cells, profile, _limit(sweep.manifest, profile)):
        lines.append(_words(sweep, "train", array, None))
        if sweep.manifest.evaluate is not None:
            last = "evaluate"
            lines.append(_words(sweep, "evaluate", array, "aftercorr:TRAIN_JOB"))
    lines.append(_words(sweep, "report", None, f"afterany:{last.upper()}_JOBS"))
    return [shlex.join(words) for words in lines]


def _words(sweep: Sweep, stage: str, array: Array | None, dependency: str | None) -> list[str]:
    """sbatch's command line for a stage of an array; without one, for the report."""
    if array is None:
        return scheduler.sbatch_words(
            str(script_path(sweep, stage)), array="", comment=f"{_mark(sweep)}:{stage}:0", dependency=dependency
        )
    ranges = array_ranges(index - array.offset for index in array.indices)
    return scheduler.sbatch_words(
        str(script_path(sweep, array.script(stage))),
        array=ranges + (f"%{array.share}" if array.share else ""),
        comment=f"{_mark(sweep)}:{stage}:{array.offset}",
        dependency=dependency,
        offset=array.offset,
    )


def cancel(sweep: Sweep, active: Sequence[str]) -> None:
    """Take every job of the sweep out of the queue, running or not, and remember it."""
    record_cancel(sweep)
    scheduler.scancel(sorted({job.split("_")[0] for job in active}))


def active_jobs(sweep: Sweep) -> list[str]:
    """The jobs of the sweep that are not over, as SLURM says."""
    mine = {one.job for one in submissions(sweep) if one.job is not None}
    if not mine:
        return []
    found = scheduler.queue([f"{sweep.manifest.name}-{stage}" for stage in STAGES])
    return [job for job, state in found.items() if job.split("_")[0] in mine and state.active]


def _limit(manifest: Manifest, profile: Profile) -> int | None:
    limits = [limit for limit in (manifest.max_parallel, profile.max_parallel) if limit is not None]
    return min(limits) if limits else None
