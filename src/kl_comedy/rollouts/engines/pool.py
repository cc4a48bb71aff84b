"""One server of a run, restarted where it fails, and one batch of requests spread over all servers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.phases import phase
from kl_comedy.processes import ChildProcess
from kl_comedy.rollouts.engines.client import ANOTHER_RUN, Client, Refused, ServerTrouble
from kl_comedy.rollouts.engines.options import ServerOptions
from kl_comedy.rollouts.engines.transports import Transport
from kl_comedy.rollouts.engines.weights import ProbeLimit, StagedWeights, checksum_complaint

FIRST_POLL_S = 0.2
LONGEST_POLL_S = 1.0
T = TypeVar("T")

log = logging.getLogger("kl_comedy")


class Server:
    """A server and its state. ``failure`` says why it was given up.

    ``restarts`` distinguishes requests that failed before the last restart from later failures. ``start`` starts a
    process on a folder and returns it with its client. It is None for a server that is not ours: that one cannot be
    restarted, so the run waits until it answers again.
    """

    def __init__(
        self,
        name: str,
        options: ServerOptions,
        transport: Transport,
        limit: ProbeLimit,
        *,
        client: Client | None = None,
        start: Callable[[Path], tuple[ChildProcess, Client]] | None = None,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.process: ChildProcess | None = None
        self.failure: str | None = None
        self._options = options
        self._transport = transport
        self._limit = limit
        self._client = client
        self._start = start
        self._weights: StagedWeights | None = None
        self._failures = 0
        self._answered = False
        self._closed = False
        # Held while the process or its weights are replaced: an update and the threads of a batch do both. An RLock,
        # because load and recover launch the process with it held. close does not take it, since a load may hold it
        # for minutes: it sets _closed, which the waits below read.
        self._lock = threading.RLock()

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ServerTrouble("it is not running")
        return self._client

    def launch(self, folder: Path) -> None:
        """Start the process, where it is ours and does not run, without waiting for it."""
        with self._lock:
            if self._start is not None and self.process is None and not self._closed:
                self._answered = False
                self.process, self._client = self._start(folder)

    def allow_restarts(self) -> None:
        """Call when a batch or an update begins: the server may fail ``retries`` times again, also if given up."""
        self._failures = 0
        self.failure = None

    def load(self, weights: StagedWeights) -> bool:
        """Make the server sample from ``weights``, restarting it where needed; False when it was given up."""
        with self._lock:
            self.allow_restarts()
            self._weights = weights
            restarts = self.restarts
            try:
                self._take(weights)
                return True
            except ServerTrouble as trouble:
                return self.recover(restarts, trouble)

    def recover(self, restarts: int, trouble: ServerTrouble) -> bool:
        """After a failure that began when there were ``restarts``: restart once, however many requests met it.

        A process of ours is killed and replaced; a server that is not ours is waited for. Both get the current
        weights. False: given up. Raises :class:`RunFailed` where the server answers and has, or takes, other weights,
        or what :meth:`refused` makes of a refusal.
        """
        with self._lock:
            # Requests that met the same failure wait here for the lock, then find that ``restarts`` has grown.
            while restarts == self.restarts and self.failure is None and not self._closed:
                self._failures += 1
                if self._failures > self._options.retries:
                    self.failure = f"{trouble} (after {self._options.retries} restarts)"
                    log.warning(f"{self.name} is given up: {self.failure}")
                    break
                log.warning(f"{self.name}: {trouble}; restarting it")
                try:
                    if self._start is not None and self.process is not None:
                        self.process.kill()
                        self.process = None
                    assert self._weights is not None
                    self._take(self._weights)
                    self.restarts += 1
                except ServerTrouble as again:
                    trouble = again
            return self.failure is None and not self._closed

    def refused(self, what: str, refusal: Refused) -> Exception:
        """What the run ends with: which servers that are not ours it uses, and who uses ours, is the user's choice."""
        if self._start is None:
            allowed = "a server of the model that is trained, for this run alone"
            return bad_value("rollout.options.urls", self.client.url, allowed, f"it {what}: {refusal}")
        message = f"{self.name} {what}: {refusal}"
        if refusal.status == ANOTHER_RUN:
            return UserError(message)
        return RunFailed(message)

    def close(self) -> None:
        """Kill the process where it is ours."""
        self._closed = True
        if self.process is not None:
            self.process.kill()
        if self._client is not None:
            self._client.close()

    def _take(self, weights: StagedWeights) -> None:
        """Start the server if needed, wait until it answers, send the weights, compare checksums, probe."""
        self.launch(weights.folder)
        self._wait()
        complaint = None
        try:
            self.client.take_weights(weights, self._transport)
            checksums = self._transport.checksums(self.client)
            complaint = checksum_complaint(checksums, weights.checksums, weights.vocabulary)
            if complaint is None and weights.probe is not None:
                complaint = self._limit.complaint(self.client.probe_gap(weights.probe))
        except BaseException as error:
            if self._start is None:
                # It was paused for the transfer, and would answer nobody. One of ours is killed instead.
                self.client.abandon_transfer()
            if not isinstance(error, Refused):
                raise
            raise self.refused(f"did not take the weights of version {weights.version}", error) from None
        if complaint is not None:
            what = f"does not have the trainer's weights after the update to version {weights.version}"
            raise RunFailed(f"{self.name} {what}: {complaint}")

    def _wait(self) -> None:
        # A process of ours that has answered before does not load a model any more: it hangs.
        if self._start is not None and self._answered:
            limit_s = self._options.request_timeout_s
        else:
            limit_s = self._options.start_timeout_s
        deadline = time.monotonic() + limit_s
        poll_s = FIRST_POLL_S
        while not self.client.ready():
            if self._closed:
                raise ServerTrouble("it was closed")
            if self.process is not None and not self.process.alive:
                raise ServerTrouble(f"it ended: {self.process.last_error()} (log: {self.process.log})")
            if time.monotonic() > deadline:
                raise ServerTrouble(f"it does not answer within {limit_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
        self._answered = True


def failures(servers: Sequence[Server]) -> str:
    """Why each was given up."""
    return "; ".join(f"{server.name}: {server.failure}" for server in servers)


def dispatch(
    tasks: Sequence[Sequence[int]], ask: Callable[[Server, Sequence[int]], T], servers: Sequence[Server], *, slots: int
) -> list[T]:
    """The answers to ``tasks``, in order: each is answered once, whichever servers fail on the way.

    A server has ``slots`` tasks at a time. Returns as soon as all answers are there, though a failed server may still
    be restarting. Raises :class:`RunFailed` when the last server is given up, else what the first thread that failed
    raised.
    """
    for server in servers:
        server.allow_restarts()
    batch = _Batch(tasks, ask)
    threads = 0
    try:
        for slot in range(min(slots, len(tasks))):
            for server in servers:
                name = f"{server.name} {slot}"
                # A daemon: a request to a server that hangs must not keep the process from ending.
                threading.Thread(target=batch.work, args=(server,), daemon=True, name=name).start()
                threads += 1
        return batch.collect(threads, servers)
    finally:
        batch.dismiss(threads)


class _Batch(Generic[T]):
    """The tasks of one :func:`dispatch`, and what its threads report.

    Two queues are all that the threads share, so no lock is needed: a task is in ``_pending`` or with one thread.
    """

    def __init__(self, tasks: Sequence[Sequence[int]], ask: Callable[[Server, Sequence[int]], T]) -> None:
        self._tasks = tasks
        self._ask = ask
        self._pending: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Numbers of tasks; None sends one thread home."""
        self._events: queue.SimpleQueue[tuple[int, T] | BaseException | None] = queue.SimpleQueue()
        """An answer with the number of its task, what a thread raised, or None where a thread ended."""
        for number in range(len(tasks)):
            self._pending.put(number)

    def work(self, server: Server) -> None:
        """Answer tasks by ``server`` until :meth:`dismiss`, or until the server is given up. Runs in a thread."""
        try:
            self._answer_tasks(server)
        except BaseException as error:
            # An exception would end this thread unseen, and collect would wait for ever; collect raises it again.
            self._events.put(error)
        self._events.put(None)

    def _answer_tasks(self, server: Server) -> None:
        while True:
            # Waits also while no task is left: a task comes back when the server that has it fails.
            number = self._pending.get()
            if number is None:
                return
            # Before the request: recover restarts a server once for all the requests that one failure ends.
            restarts = server.restarts
            try:
                answer = self._ask(server, self._tasks[number])
            except ServerTrouble as trouble:
                # Before the restart, so that another server can answer it meanwhile.
                self._pending.put(number)
                if not server.recover(restarts, trouble):
                    return
            except Refused as refusal:
                raise server.refused("refuses to sample", refusal) from None
            else:
                self._events.put((number, answer))

    def collect(self, threads: int, servers: Sequence[Server]) -> list[T]:
        """Wait for the answers of ``threads`` threads. Raises as :func:`dispatch`."""
        answers: dict[int, T] = {}
        answered = 0
        total = sum(map(len, self._tasks))
        running = threads
        while len(answers) < len(self._tasks):
            # Each thread puts None when it ends, so that this wait ends too when no thread is left to answer.
            if running == 0:
                raise RunFailed(f"no inference server is left to sample from. {failures(servers)}")
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
                continue
            number, answer = event
            answers[number] = answer
            answered += len(self._tasks[number])
            phase("sampling", answered, total)
        return [answers[number] for number in range(len(self._tasks))]

    def dismiss(self, threads: int) -> None:
        """Let ``threads`` threads end, which would wait for tasks for ever."""
        for _ in range(threads):
            self._pending.put(None)
