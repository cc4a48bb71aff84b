"""SLURM's own commands, called and read: sbatch, squeue, sacct, scancel. Nothing else talks to SLURM."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from kl_comedy.errors import RunFailed, UserError

TIMEOUT_S = 60
ACTIVE = (
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


def sbatch(words: Sequence[str]) -> str:
    """Submit and return the job's id. Raises :class:`RunFailed` with sbatch's message."""
    return _call(list(words)).strip().split(";")[0]


def queue(job_names: Sequence[str]) -> dict[str, JobState]:
    """Jobs of these names in squeue, by ``JOB`` or ``ARRAY_TASK``; pending array tasks are listed singly."""
    words = ["squeue", "--noheader", "--array", "--states=all", f"--name={','.join(job_names)}"]
    jobs = {}
    for line in _call([*words, "--format=%F|%K|%T|%N|%k|%r"]).splitlines():
        job, task, state, node, comment, reason = (part.strip() for part in line.split("|", 5))
        key = f"{job}_{task}" if task and task != "N/A" else job
        why = "" if reason in ("None", "") else reason
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
