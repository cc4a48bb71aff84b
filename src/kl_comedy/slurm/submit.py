"""SLURM: its commands, called and read, and the jobs of a sweep.

Training and evaluation are arrays, the report is a job, chained by dependencies. Nothing else talks to SLURM.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.slurm.manifest import Manifest, Submission, Sweep
from kl_comedy.slurm.profile import Profile
from kl_comedy.slurm.scripts import Array, array_ranges, arrays, scripts

TIMEOUT_S = 60
ACTIVE = frozenset(
    {
        *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING"),
        *("SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "SPECIAL_EXIT"),
    }
)
"""States of a job that is not over (squeue's long names)."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """SLURM's state of one job or array task. ``node`` and ``why`` may be empty; ``comment`` is sbatch's."""

    state: str
    node: str = ""
    why: str = ""
    comment: str = ""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def reason(self) -> str:
        """Why it is in this state; the state itself where SLURM gives no reason."""
        return self.why or self.state


KEYS_OF_REFUSALS = {
    "job array specification": "max_array",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time limit": "time",
    "--time": "time",
    "--signal": "signal_seconds",
    "memory specification": "memory",
    "--mem": "memory",
    "feature specification": "constraint",
    "reservation": "reservation",
    "generic resource": "gpus_per_node, gpu_type",
    "node configuration": "nodes, tasks_per_node, cpus_per_task, gpus_per_node, memory",
    "node count": "nodes",
    "cpu count": "cpus_per_task",
}
"""Keys of a profile by words in sbatch's refusals (SLURM 22.05, without regard to case)."""


def sbatch(words: Sequence[str]) -> str:
    """Submit and return the job's id. Raises :class:`RunFailed` with sbatch's message and the profile's keys in it."""
    try:
        return _call(list(words)).strip().split(";")[0]
    except RunFailed as error:
        refusal = str(error).lower()
        keys = [key for text, key in KEYS_OF_REFUSALS.items() if text in refusal]
        if not keys:
            raise
        raise RunFailed(f"{error} (in the profile: {', '.join(dict.fromkeys(keys))})") from None


def queue(job_names: Sequence[str]) -> dict[str, JobState]:
    """Jobs of these names in squeue, by ``JOB`` or ``ARRAY_TASK``; pending array tasks are listed singly."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--name={','.join(job_names)}"]
    jobs = {}
    for line in _call([*words, "--format=%F|%K|%T|%N|%k|%r"]).splitlines():
        job, task, state, node, comment, reason = (part.strip() for part in line.split("|", 5))
        key = f"{job}_{task}" if task and task != "N/A" else job
        why = "" if reason == "None" else reason
        jobs[key] = JobState(state=state, node=node, why=why, comment="" if comment == "(null)" else comment)
    return jobs


def accounting(jobs: Sequence[str]) -> dict[str, JobState]:
    """States from the accounting database. Raises :class:`RunFailed` where accounting is off."""
    if not jobs:
        return {}
    words = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(jobs)}"]
    states = {}
    for line in _call([*words, "--format=JobID,State,ExitCode,NodeList"]).splitlines():
        job, state, code, node = line.split("|")[:4]
        why = state if code in ("0:0", "") else f"{state}, exit code {code}"
        states[job] = JobState(state=state.split()[0], node="" if node == "None assigned" else node, why=why)
    return states


def scancel(jobs: Sequence[str]) -> None:
    if jobs:
        _call(["scancel", *jobs])


def _call(words: list[str]) -> str:
    """Standard output of a command. Raises :class:`UserError` if it is missing, :class:`RunFailed` if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise UserError(
            f"{words[0]}: no such command here; run this on a login node of the cluster, or use --local N"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{words[0]} did not answer within {TIMEOUT_S} s; ask again when SLURM is less busy") from None
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise RunFailed(f"{words[0]}: {message or f'exit code {done.returncode}'}")
    return done.stdout


# --- jobs of a sweep -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cells to train, and the trained cells still to be evaluated."""

    train: tuple[int, ...]
    evaluate: tuple[int, ...]


def create_stores(manifest: Manifest) -> None:
    """Create every MLflow store and experiment once, here, before many jobs find it missing at the same time.

    Raises :class:`RunFailed` where a store cannot be reached: better now than in a thousand jobs.
    """
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
    recorded = {item.job for item in sweep.submissions()}
    indices: dict[tuple[str, str, int], list[int]] = {}
    for name, state in queue(sweep.job_names).items():
        job, _, task = name.partition("_")
        mark, _, rest = state.comment.partition(":")
        if mark == _comment_mark(sweep) and job not in recorded:
            stage, _, offset = rest.partition(":")
            indices.setdefault((job, stage, int(offset)), []).extend([int(task) + int(offset)] if task else [])
    adopted = [
        Submission(stage=stage, indices=tuple(sorted(numbers)), time=time.time(), job=job, offset=offset)
        for (job, stage, offset), numbers in indices.items()
    ]
    for submission in adopted:
        sweep.record_submission(submission)
    return adopted


def _comment_mark(sweep: Sweep) -> str:
    """Which manifest in which folder a job belongs to."""
    return f"{sweep.manifest.digest}-{hashlib.sha256(str(sweep.path).encode()).hexdigest()[:8]}"


def submit(sweep: Sweep, profile: Profile, profile_file: Path, work: Work) -> list[Submission]:
    """Write the scripts and submit ``work``; return the submissions, which are also recorded.

    Raises :class:`UserError`, before anything is submitted, for a cell that the profile has no shape for.
    """
    texts = scripts(sweep, profile, [sweep.cell(index) for index in (*work.train, *work.evaluate)])
    for name, text in texts.items():
        (sweep.path / f"{name}.sbatch").write_text(text)
    submissions = []
    for stage, array, job in _submit_jobs(sweep, profile, work, sbatch):
        submission = Submission(
            stage=stage,
            indices=() if array is None else array.indices,
            time=time.time(),
            job=job,
            offset=0 if array is None else array.offset,
            profile=str(profile_file),
        )
        sweep.record_submission(submission)
        submissions.append(submission)
    return submissions


def planned_commands(sweep: Sweep, profile: Profile) -> list[str]:
    """The sbatch lines of a first submission, with ``JOB_1``, ``JOB_2``, ... where job ids will be."""
    lines: list[str] = []

    def note(words: Sequence[str]) -> str:
        lines.append(shlex.join(words))
        return f"JOB_{len(lines)}"

    list(_submit_jobs(sweep, profile, Work(train=tuple(range(len(sweep.manifest.cells))), evaluate=()), note))
    return lines


def _submit_jobs(
    sweep: Sweep, profile: Profile, work: Work, submit_job: Callable[[Sequence[str]], str]
) -> Iterator[tuple[str, Array | None, str]]:
    """Call ``submit_job`` for one job after another; yield stage, array (None: the report) and id of each."""
    limits = [limit for limit in (sweep.manifest.max_parallel, profile.max_parallel) if limit is not None]
    training, evaluating = (
        arrays([sweep.cell(index) for index in indices], profile, min(limits, default=None))
        for indices in (work.train, work.evaluate)
    )
    stages = ("train",) if sweep.manifest.evaluate is None else ("train", "evaluate")
    chain = [(stage, array) for array in training for stage in stages] + [("evaluate", array) for array in evaluating]
    jobs: list[str] = []
    for stage, array in chain:
        dependency = f"aftercorr:{jobs[-1]}" if stage == "evaluate" and array in training else ""
        jobs.append(submit_job(_sbatch_words(sweep, stage, array, dependency)))
        yield stage, array, jobs[-1]
    yield "report", None, submit_job(_sbatch_words(sweep, "report", None, f"afterany:{':'.join(jobs)}"))


def _sbatch_words(sweep: Sweep, stage: str, array: Array | None, dependency: str) -> list[str]:
    """sbatch's command line for a stage of an array; without an array, for the report."""
    offset = 0 if array is None else array.offset
    words = ["sbatch", "--parsable", f"--comment={_comment_mark(sweep)}:{stage}:{offset}"]
    if array is not None:
        ranges = array_ranges(index - offset for index in array.indices)
        words.append(f"--array={ranges}" + (f"%{array.share}" if array.share else ""))
    if dependency:
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    script = f"{sweep.path}/{stage}{'' if array is None else array.suffix}.sbatch"
    return [*words, script, *([] if array is None else [str(offset)])]


def cancel(sweep: Sweep, jobs: Sequence[str]) -> None:
    """Cancel ``jobs`` of the sweep, running or not, and record it."""
    sweep.record_cancel()
    scancel(sorted({job.split("_")[0] for job in jobs}))


def active_jobs(sweep: Sweep) -> list[str]:
    """The jobs of the sweep that are not over, as SLURM says."""
    submitted = {item.job for item in sweep.submissions() if item.job is not None}
    jobs = queue(sweep.job_names) if submitted else {}
    return [job for job, state in jobs.items() if job.split("_")[0] in submitted and state.active]
