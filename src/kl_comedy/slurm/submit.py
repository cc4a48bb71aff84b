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
from kl_comedy.slurm.scripts import Array, array_ranges, arrays, scripts, share_out

TIMEOUT_S = 60
"""How long a command of SLURM may take to answer."""
ACTIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "SPECIAL_EXIT",
    }
)
"""States of a job that is not over (squeue's long names)."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """SLURM's state of one job or array task. Where SLURM says nothing, a field is empty."""

    state: str
    node: str = ""
    why: str = ""
    comment: str = ""
    """What sbatch was given as ``--comment``."""

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
"""Keys of a profile by words in sbatch's refusals, in small letters (SLURM 22.05)."""


def sbatch(words: Sequence[str]) -> str:
    """Submit and return the job's id. Raises :class:`RunFailed` with sbatch's message and the profile's keys in it."""
    try:
        answer = _call(list(words))
    except RunFailed as error:
        refusal = str(error).lower()
        keys = [key for text, key in KEYS_OF_REFUSALS.items() if text in refusal]
        if not keys:
            raise
        # A key once, though two words of the refusal may lead to it.
        named = ", ".join(dict.fromkeys(keys))
        raise RunFailed(f"{error} (in the profile: {named})") from None
    # --parsable prints JOB, or JOB;CLUSTER.
    return answer.strip().split(";")[0]


def queue(job_names: Sequence[str]) -> dict[str, JobState]:
    """Jobs of these names in squeue, by ``JOB`` or ``ARRAY_TASK``; pending array tasks are listed singly."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--name={','.join(job_names)}"]
    jobs = {}
    for line in _call([*words, "--format=%F|%K|%T|%N|%k|%r"]).splitlines():
        # The reason comes last: a | within it does not split it.
        job, task, state, node, comment, why = (part.strip() for part in line.split("|", 5))
        name = job
        if task and task != "N/A":
            name = f"{job}_{task}"
        if comment == "(null)":
            comment = ""
        if why == "None":
            why = ""
        jobs[name] = JobState(state=state, node=node, why=why, comment=comment)
    return jobs


def accounting(jobs: Sequence[str]) -> dict[str, JobState]:
    """States from the accounting database. Raises :class:`RunFailed` where accounting is off."""
    if not jobs:
        return {}
    words = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(jobs)}"]
    states = {}
    for line in _call([*words, "--format=JobID,State,ExitCode,NodeList"]).splitlines():
        job, state, code, node = line.split("|")[:4]
        why = state
        if code not in ("0:0", ""):
            why = f"{state}, exit code {code}"
        if node == "None assigned":
            node = ""
        # The first word: a cancelled job's state is "CANCELLED by UID".
        states[job] = JobState(state=state.split()[0], node=node, why=why)
    return states


def scancel(jobs: Sequence[str]) -> None:
    """Cancel the arrays of ``jobs``, waiting or running."""
    if jobs:
        _call(["scancel", *sorted({job.split("_")[0] for job in jobs})])


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
        message = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise RunFailed(f"{words[0]}: {message}")
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
            # MLflow passes on what a database or a server raises.
            raise RunFailed(f"the results store cannot be created: {store.first_line(error)}") from error


def adopt_unrecorded_jobs(sweep: Sweep) -> list[Submission]:
    """Record waiting and running jobs of this sweep that are in SLURM's queue and not in the folder; return them.

    Happens when sbatch timed out, or the submitter died before recording the job id. Without this the cells would be
    submitted again. Jobs are recognized by their comment.
    """
    if shutil.which("squeue") is None:
        return []
    mark = _comment_mark(sweep)
    recorded = {item.job for item in sweep.submissions()}
    # By job, stage and offset.
    indices: dict[tuple[str, str, int], list[int]] = {}
    for name, state in queue(sweep.job_names).items():
        job, _, task = name.partition("_")
        job_mark, _, rest = state.comment.partition(":")
        # A job that is over can submit nothing twice; what it trained is in the cells.
        if job_mark != mark or job in recorded or not state.active:
            continue
        stage, _, offset = rest.partition(":")
        cells = indices.setdefault((job, stage, int(offset)), [])
        # The report is no array, and has no task.
        if task:
            cells.append(int(task) + int(offset))

    adopted = []
    for (job, stage, first), cells in indices.items():
        submission = Submission(stage=stage, indices=tuple(sorted(cells)), time=time.time(), job=job, offset=first)
        sweep.record_submission(submission)
        adopted.append(submission)
    return adopted


def _comment_mark(sweep: Sweep) -> str:
    """Which manifest in which folder a job belongs to."""
    return f"{sweep.manifest.digest}-{hashlib.sha256(str(sweep.path).encode()).hexdigest()[:8]}"


def submit(sweep: Sweep, profile: Profile, profile_file: Path, work: Work) -> list[Submission]:
    """Write the scripts and submit ``work``; return the submissions, which are also recorded.

    Raises :class:`UserError`, before anything is submitted, for a cell that the profile has no shape for.
    """
    cells = [sweep.cell(index) for index in (*work.train, *work.evaluate)]
    for name, text in scripts(sweep, profile, cells).items():
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
        # Before the next job is submitted: what a killed submitter did not record must be adopted later.
        sweep.record_submission(submission)
        submissions.append(submission)
    return submissions


def planned_commands(sweep: Sweep, profile: Profile) -> list[str]:
    """The sbatch lines of a first submission, with ``JOB_1``, ``JOB_2``, ... where job ids will be."""
    lines: list[str] = []

    def note(words: Sequence[str]) -> str:
        lines.append(shlex.join(words))
        return f"JOB_{len(lines)}"

    work = Work(train=tuple(range(len(sweep.manifest.cells))), evaluate=())
    list(_submit_jobs(sweep, profile, work, note))
    return lines


def _submit_jobs(
    sweep: Sweep, profile: Profile, work: Work, submit_job: Callable[[Sequence[str]], str]
) -> Iterator[tuple[str, Array | None, str]]:
    """Call ``submit_job`` for one job after another; yield stage, array (None: the report) and id of each."""
    limits = [limit for limit in (sweep.manifest.max_parallel, profile.max_parallel) if limit is not None]
    limit = min(limits, default=None)
    # Before the first job: an error is raised for a cell that the profile has no shape for.
    training = arrays([sweep.cell(index) for index in work.train], profile)
    evaluation = arrays([sweep.cell(index) for index in work.evaluate], profile)
    # Together: cells that were trained earlier are evaluated beside the cells that are trained now.
    shares = share_out(limit, [len(array.indices) for array in (*training, *evaluation)])
    jobs: list[str] = []
    for array, share in zip(training, shares, strict=False):
        train_job = submit_job(_sbatch_words(sweep, "train", array, share, ""))
        jobs.append(train_job)
        yield "train", array, train_job
        if sweep.manifest.evaluate is not None:
            # aftercorr: each cell is evaluated as soon as it is trained, and never where its training failed.
            dependency = f"aftercorr:{train_job}"
            if share is not None:
                # afterany: and not before the whole array has ended, whose share of the limit it then takes over.
                # Beside it, twice as many tasks as max_parallel would run.
                dependency += f",afterany:{train_job}"
            job = submit_job(_sbatch_words(sweep, "evaluate", array, share, dependency))
            jobs.append(job)
            yield "evaluate", array, job
    for array, share in zip(evaluation, shares[len(training) :], strict=True):
        job = submit_job(_sbatch_words(sweep, "evaluate", array, share, ""))
        jobs.append(job)
        yield "evaluate", array, job
    # afterany: the report shows failed cells too.
    yield "report", None, submit_job(_sbatch_words(sweep, "report", None, None, f"afterany:{':'.join(jobs)}"))


def _sbatch_words(sweep: Sweep, stage: str, array: Array | None, share: int | None, dependency: str) -> list[str]:
    """sbatch's command line for a stage of an array, of which ``share`` tasks may run at a time (None: all).

    Without an array, that of the report.
    """
    offset = 0
    suffix = ""
    if array is not None:
        offset = array.offset
        suffix = array.suffix
    words = ["sbatch", "--parsable", f"--comment={_comment_mark(sweep)}:{stage}:{offset}"]
    if array is not None:
        option = f"--array={array_ranges(index - offset for index in array.indices)}"
        if share is not None:
            option += f"%{share}"
        words.append(option)
    if dependency:
        # Without the second a job whose dependency cannot come true would stay in the queue for ever.
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    words.append(f"{sweep.path}/{stage}{suffix}.sbatch")
    if array is not None:
        # The script adds it to the array's own index.
        words.append(str(offset))
    return words


def active_jobs(sweep: Sweep) -> list[str]:
    """The jobs of the sweep that are not over, as SLURM says."""
    submitted = {item.job for item in sweep.submissions() if item.job is not None}
    if not submitted:
        return []
    active = []
    for job, state in queue(sweep.job_names).items():
        # Another sweep may have the same name: by the id of the array.
        if state.active and job.split("_")[0] in submitted:
            active.append(job)
    return active
