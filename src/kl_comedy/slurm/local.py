"""The same manifest on this machine: so many workers, each the very command an array task runs."""

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
from kl_comedy.slurm.manifest import Sweep
from kl_comedy.slurm.render import stage_command
from kl_comedy.slurm.status import Submission, attempts, record_death, record_submission, submissions
from kl_comedy.slurm.submit import Todo

POLL_S = 0.2
GRACE_S = 60.0
"""How long workers may take to finish an update and save when this process is told to stop."""

WANTS_TO_GO_ON = (REQUEUE_EXIT_CODE, -signal.SIGUSR1)
"""Saved and asks to go on; or asked to make room before it could listen, when there was nothing to save."""

Say = Callable[[str], None]


def enlist(sweep: Sweep, work: Todo, workers: int) -> None:
    """Record that this process is about to run ``work``, so that nobody else does."""
    from kl_comedy.tracking.provenance import process_tags

    process = process_tags()
    for stage, indices in (("train", work.train), ("evaluate", work.train + work.evaluate)):
        if indices and (stage == "train" or sweep.manifest.evaluate is not None):
            record_submission(
                sweep, Submission(stage=stage, indices=indices, time=time.time(), process=process, workers=workers)
            )


def run_local(sweep: Sweep, work: Todo, workers: int, say: Say) -> None:
    """Train, then evaluate what was trained, then report; ``workers`` at a time. Told to stop, it stops its workers.

    A cell that fails is recorded and said, and does not end the others. Raises KeyboardInterrupt when stopped.
    """
    with _stop_on_term():
        done = _run_stage(sweep, "train", work.train, workers, say)
        if sweep.manifest.evaluate is not None:
            _run_stage(sweep, "evaluate", (*work.evaluate, *done), workers, say)
        _run_report(sweep)


def local_managers(sweep: Sweep) -> list[int]:
    """Process ids of the managers of this sweep that live on this machine."""
    from kl_comedy.tracking.provenance import is_dead

    alive = {
        int(one.process["process.pid"]) for one in submissions(sweep) if one.local and is_dead(one.process) is False
    }
    return sorted(alive)


def stop_local(sweep: Sweep) -> list[int]:
    """Tell the managers on this machine to stop; they stop their workers, which finish their update and save."""
    pids = local_managers(sweep)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    return pids


def _run_stage(sweep: Sweep, stage: str, indices: tuple[int, ...], workers: int, say: Say) -> tuple[int, ...]:
    """Run a stage over ``indices``, the first seed of all before the second of any; those that ended well, in order.

    So a sweep that is stopped half-way leaves every configuration with as many seeds.
    """
    waiting = deque(by_seed(sweep, indices))
    running: dict[int, subprocess.Popen[bytes]] = {}
    good = []
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
                if process.returncode in WANTS_TO_GO_ON:
                    waiting.append(index)
                elif process.returncode == 0:
                    good.append(index)
                say(_word(sweep, stage, index, process))
    except BaseException:
        _stop(running)
        raise
    return tuple(sorted(good))


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


def _word(sweep: Sweep, stage: str, index: int, process: subprocess.Popen[bytes]) -> str:
    """One line about a worker that ended; a death by signal is recorded for it."""
    code = process.returncode
    if code < 0:
        record_death(sweep, index, process.pid, -code)
    tries = attempts(sweep, index, stage)
    reason = tries[-1].reason if tries and tries[-1].process.get("process.pid") == str(process.pid) else None
    cell = sweep.cell(index)
    what = {0: "done", **dict.fromkeys(WANTS_TO_GO_ON, "stopped, goes on later")}.get(
        code, f"failed: {reason or f'exit code {code}'}"
    )
    return f"{stage} cell {index} {cell.name} seed {cell.seed}: {what}"


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
    """TERM for everyone, then KILL for whoever does not end in time."""
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
def _stop_on_term() -> Iterator[None]:
    """SIGTERM as Ctrl-C, while cells run."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
