"""Run a sweep on this machine: N workers at a time, each the same command that an array task runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kl_comedy.errors import REQUEUE_EXIT_CODE
from kl_comedy.slurm.journal import Submission, read_attempts, read_submissions, record_end, record_submission
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.render import stage_command
from kl_comedy.slurm.submit import Work

POLL_S = 0.2
GRACE_S = 60.0
"""How long workers may take to finish an update and save when this process is told to stop."""

RESUMABLE_EXIT_CODES = (REQUEUE_EXIT_CODE, -signal.SIGUSR1)
"""Saved and asks to resume; or signalled before it had a handler, when there was nothing to save."""

Report = Callable[[str], None]


def record_local_submission(sweep: Sweep, work: Work, workers: int) -> None:
    """Record that this process is about to run ``work``, so that no other process does."""
    from kl_comedy.tracking.provenance import process_tags

    process = process_tags()
    for stage, indices in (("train", work.train), ("evaluate", work.train + work.evaluate)):
        if indices and (stage == "train" or sweep.manifest.evaluate is not None):
            record_submission(
                sweep, Submission(stage=stage, indices=indices, time=time.time(), process=process, workers=workers)
            )


def run_local(sweep: Sweep, work: Work, workers: int, report: Report) -> None:
    """Train, then evaluate what was trained, then write the report; ``workers`` cells at a time.

    A cell that fails is recorded and reported, and does not stop the others. SIGTERM and Ctrl-C stop the workers and
    raise KeyboardInterrupt.
    """
    with _sigterm_as_interrupt():
        trained = _run_stage(sweep, "train", work.train, workers, report)
        if sweep.manifest.evaluate is not None:
            _run_stage(sweep, "evaluate", (*work.evaluate, *trained), workers, report)
        _run_report(sweep)


def local_managers(sweep: Sweep) -> list[int]:
    """Process ids of the managers of this sweep that are alive on this machine."""
    from kl_comedy.tracking.provenance import is_dead

    alive = {
        int(item.process["process.pid"])
        for item in read_submissions(sweep)
        if item.local and is_dead(item.process) is False
    }
    return sorted(alive)


def stop_local(sweep: Sweep) -> list[int]:
    """Tell the managers on this machine to stop; they stop their workers, which finish their update and save."""
    pids = local_managers(sweep)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    return pids


def _run_stage(sweep: Sweep, stage: str, indices: tuple[int, ...], workers: int, report: Report) -> tuple[int, ...]:
    """Run a stage over ``indices`` seed by seed, so that a stopped sweep leaves every configuration with as many seeds.

    Returns the indices that succeeded, in order.
    """
    waiting = deque(by_seed(sweep, indices))
    running: dict[int, subprocess.Popen[bytes]] = {}
    succeeded = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                index = waiting.popleft()
                running[index] = _start(sweep, stage, index, workers)
            time.sleep(POLL_S)
            for index, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[index]
                if process.returncode in RESUMABLE_EXIT_CODES:
                    waiting.append(index)
                elif process.returncode == 0:
                    succeeded.append(index)
                report(_outcome(sweep, stage, index, process))
    except BaseException:
        _stop(running)
        raise
    return tuple(sorted(succeeded))


def by_seed(sweep: Sweep, indices: tuple[int, ...]) -> list[int]:
    """``indices`` in the order of their seeds, and cells of one seed in the order of the grid."""
    return sorted(indices, key=lambda index: (sweep.cell(index).seed, index))


def _start(sweep: Sweep, stage: str, index: int, workers: int) -> subprocess.Popen[bytes]:
    """One worker, in a session of its own, so that a Ctrl-C reaches it once: from its manager."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    with (sweep.logs / f"{stage}-local_{index}.out").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *stage_command(sweep, stage, index)],
            cwd=sweep.manifest.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _outcome(sweep: Sweep, stage: str, index: int, process: subprocess.Popen[bytes]) -> str:
    """One line about a worker that ended; its death by a signal is recorded, which it could not do itself."""
    code = process.returncode
    if code < 0:
        record_end(sweep, index, str(process.pid), code, None)
    attempts = read_attempts(sweep, index, stage)
    reason = attempts[-1].reason if attempts and attempts[-1].process.get("process.pid") == str(process.pid) else None
    cell = sweep.cell(index)
    outcome = f"failed: {reason or f'exit code {code}'}"
    if code == 0 or code in RESUMABLE_EXIT_CODES:
        outcome = "done" if code == 0 else "stopped, resumes later"
    return f"{stage} cell {index} {cell.name} seed {cell.seed}: {outcome}"


def _run_report(sweep: Sweep) -> None:
    with (sweep.logs / "report-local.out").open("ab") as log:
        subprocess.run(
            [sys.executable, *stage_command(sweep, "report")],
            cwd=sweep.manifest.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _stop(running: dict[int, subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all, then SIGKILL to those that do not end in time."""
    for process in running.values():
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in running.values():
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt inside."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
