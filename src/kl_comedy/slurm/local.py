"""Run a sweep on this machine: N workers at a time, each the same command that an array task runs."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kl_comedy.processes import ChildProcess
from kl_comedy.slurm.manifest import RESUMABLE_EXIT_CODES, Submission, Sweep
from kl_comedy.slurm.scripts import stage_command
from kl_comedy.slurm.submit import Work
from kl_comedy.tracking.provenance import is_dead, process_tags

POLL_S = 0.2
GRACE_S = 60.0
"""How long workers may take to finish an update and save when this process is asked to stop."""
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StageState:
    """How far a stage is. ``failures`` are among the cells that ``ended``; one that will resume has not ended."""

    stage: str
    cells: tuple[int, ...]
    running: tuple[int, ...]
    ended: frozenset[int]
    failures: frozenset[int]

    @property
    def failed(self) -> int:
        """The number of cells that failed."""
        return len(self.failures)


Watch = Callable[[StageState], None]
"""Called several times per second while cells run."""


def _watch_nothing(state: StageState) -> None:
    """The default :data:`Watch`."""


def record_local_submission(sweep: Sweep, work: Work, workers: int) -> None:
    """Record that this process is about to run ``work``, so that no other process does."""
    evaluate: tuple[int, ...] = ()
    if sweep.manifest.evaluate is not None:
        # Every cell is evaluated after its training.
        evaluate = work.train + work.evaluate
    for stage, indices in (("train", work.train), ("evaluate", evaluate)):
        if indices:
            submission = Submission(
                stage=stage, indices=indices, time=time.time(), process=process_tags(), workers=workers
            )
            sweep.record_submission(submission)


def run_local(sweep: Sweep, work: Work, workers: int, report: Report, watch: Watch = _watch_nothing) -> None:
    """Train, then evaluate what was trained, then write the report; ``workers`` cells at a time, or ``max_parallel``.

    A cell of several processes counts once. A cell that fails is recorded and reported, and does not stop the others.
    SIGTERM and Ctrl-C stop the workers and raise KeyboardInterrupt.
    """
    limit = sweep.manifest.max_parallel
    if limit is not None and limit < workers:
        report(f"{limit} cells at a time, by the grid's max_parallel")
        workers = limit
    # SIGTERM then raises KeyboardInterrupt, as Ctrl-C does, and the workers are stopped on the way out.
    handler_before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        trained = _run_stage(sweep, "train", work.train, workers, report, watch)
        if sweep.manifest.evaluate is not None:
            _run_stage(sweep, "evaluate", (*work.evaluate, *trained), workers, report, watch)
        watch(StageState(stage="report", cells=(), running=(), ended=frozenset(), failures=frozenset()))
        # In a process of its own, as on a cluster: the report imports pandas, and its memory goes with it.
        writer = _start(sweep, "report", None, 1)
        try:
            writer.wait(math.inf)
        finally:
            writer.kill()
    finally:
        signal.signal(signal.SIGTERM, handler_before)


def local_managers(sweep: Sweep) -> list[int]:
    """Process ids of the managers of this sweep that are alive on this machine.

    At SIGTERM they stop their workers, which finish their update and save.
    """
    pids = set()
    for submission in sweep.submissions():
        # None, which is not False: a manager of another host, which cannot be signalled from here.
        if submission.local and is_dead(submission.process) is False:
            pids.add(int(submission.process["process.pid"]))
    return sorted(pids)


def by_seed(sweep: Sweep, indices: tuple[int, ...]) -> list[int]:
    """``indices`` in the order of their seeds, and cells of one seed in the order of the grid.

    A stopped sweep then leaves every configuration with as many seeds.
    """
    return sorted(indices, key=lambda index: (sweep.cell(index).seed, index))


def _run_stage(
    sweep: Sweep, stage: str, indices: tuple[int, ...], workers: int, report: Report, watch: Watch
) -> list[int]:
    """Run a stage over ``indices``, ``workers`` at a time; return those that succeeded, in order.

    One thread that polls, and not a pool of threads: one of those could start a cell after Ctrl-C has stopped the rest.
    """
    # A worker that saved and asks to resume goes to the end, behind those that have not started.
    waiting = deque(by_seed(sweep, indices))
    running: dict[int, ChildProcess] = {}
    succeeded: set[int] = set()
    failed: set[int] = set()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                index = waiting.popleft()
                running[index] = _start(sweep, stage, index, workers)
            # Polled, because os.wait would also take the ends of processes that are not workers.
            time.sleep(POLL_S)
            for index in [index for index, worker in running.items() if not worker.alive]:
                worker = running.pop(index)
                # It has ended; this ends what it left behind, and returns its exit code.
                code = worker.kill()
                if code < 0:
                    # Its death by a signal, which it could not record itself.
                    sweep.record_end(index, str(worker.pid), code, None)
                if code in RESUMABLE_EXIT_CODES:
                    waiting.append(index)
                    outcome = "stopped, resumes later"
                elif code == 0:
                    succeeded.add(index)
                    outcome = "done"
                else:
                    failed.add(index)
                    outcome = f"failed: {_reason_of(sweep, stage, index, worker.pid) or f'exit code {code}'}"
                cell = sweep.cell(index)
                report(f"{stage} cell {index} {cell.name} seed {cell.seed}: {outcome}")
            state = StageState(
                stage=stage,
                cells=indices,
                running=tuple(sorted(running)),
                ended=frozenset(succeeded | failed),
                failures=frozenset(failed),
            )
            watch(state)
    except BaseException:
        # KeyboardInterrupt too: workers are in sessions of their own, and a Ctrl-C does not reach them.
        _stop(running.values())
        raise
    return sorted(succeeded)


def _start(sweep: Sweep, stage: str, index: int | None, workers: int) -> ChildProcess:
    """Start one of ``workers`` at a time on a cell, or the process that writes the report."""
    name = f"{stage}-local"
    processes = workers
    if index is not None:
        name = f"{name}_{index}"
        if stage == "train":
            processes = workers * sweep.cell(index).devices
    # Processes share the cores. A number that the user has set wins.
    threads = max(1, (os.cpu_count() or 1) // processes)
    return ChildProcess(
        [sys.executable, *stage_command(sweep, stage, index)],
        log=sweep.logs / f"{name}.out",
        env={"OMP_NUM_THREADS": str(threads), **os.environ},
        cwd=sweep.manifest.directory,
    )


def _reason_of(sweep: Sweep, stage: str, index: int, pid: int) -> str | None:
    """What the attempt of process ``pid``, the newest if it recorded any, gave as the reason of its end."""
    attempts = sweep.attempts(index, stage)
    if not attempts or attempts[-1].process["process.pid"] != str(pid):
        return None
    return attempts[-1].reason


def _stop(workers: Collection[ChildProcess]) -> None:
    """SIGTERM to all, then SIGKILL to those that do not end in time."""
    for worker in workers:
        if worker.alive:
            os.kill(worker.pid, signal.SIGTERM)
    # One deadline for all: they save at the same time.
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        worker.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()
