"""One server of a run, restarted where it fails, and one batch of requests spread over all servers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from kl_comedy.errors import RunFailed, UserError, bad_value
from kl_comedy.processes import ChildProcess
from kl_comedy.rollouts.engines.client import ANOTHER_RUN, Client, Refused, ServerTrouble
from kl_comedy.rollouts.engines.options import ServerOptions
from kl_comedy.rollouts.engines.transports import Transport
from kl_comedy.rollouts.engines.weights import ProbeLimit, StagedWeights, checksum_complaint

FIRST_POLL_S, LONGEST_POLL_S = 0.2, 1.0
T = TypeVar("T")

log = logging.getLogger("kl_comedy")


class Server:
    """A server and its state. ``failure`` says why it was given up.

    ``restarts`` tells a request that failed before the last restart from one that failed since. ``start`` starts a
    process on a folder and returns it with its client; None for a server that is not ours, which is waited for instead.
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
        self.name, self.restarts = name, 0
        self.process: ChildProcess | None = None
        self.failure: str | None = None
        self._options, self._transport, self._limit = options, transport, limit
        self._client, self._start = client, start
        self._weights: StagedWeights | None = None
        self._failures, self._answered, self._closed = 0, False, False
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
        self._failures, self.failure = 0, None

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
        return (UserError if refusal.status == ANOTHER_RUN else RunFailed)(f"{self.name} {what}: {refusal}")

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
            if self._start is None:  # one of ours is killed
                self.client.abandon_transfer()
            if not isinstance(error, Refused):
                raise
            raise self.refused(f"did not take the weights of version {weights.version}", error) from None
        if complaint is not None:
            what = f"does not have the trainer's weights after the update to version {weights.version}"
            raise RunFailed(f"{self.name} {what}: {complaint}")

    def _wait(self) -> None:
        loads = self._start is None or not self._answered  # a process of ours that has answered before hangs
        limit_s = self._options.start_timeout_s if loads else self._options.request_timeout_s
        deadline, poll_s = time.monotonic() + limit_s, FIRST_POLL_S
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
    pending: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    events: queue.SimpleQueue[tuple[int, T] | BaseException | None] = queue.SimpleQueue()
    """An answer with the number of its task, what a thread raised, or None where a thread ended."""

    def work(server: Server) -> None:
        server_is_left = True
        try:
            while server_is_left and (task := pending.get()) is not None:
                restarts = server.restarts
                try:
                    events.put((task, ask(server, tasks[task])))
                except ServerTrouble as trouble:
                    pending.put(task)
                    server_is_left = server.recover(restarts, trouble)
                except Refused as refusal:
                    raise server.refused("refuses to sample", refusal) from None
        except BaseException as error:  # raised again by the thread that waits below
            events.put(error)
        events.put(None)

    for server in servers:
        server.allow_restarts()
    for number in range(len(tasks)):
        pending.put(number)
    running = 0
    for slot in range(min(slots, len(tasks))):
        for server in servers:
            threading.Thread(target=work, args=(server,), daemon=True, name=f"{server.name} {slot}").start()
            running += 1
    answers: dict[int, T] = {}
    threads = running
    try:
        while len(answers) < len(tasks):
            if not running:
                raise RunFailed(f"no inference server is left to sample from. {failures(servers)}")
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                running -= 1
            else:
                answers[event[0]] = event[1]
    finally:
        for _ in range(threads):
            pending.put(None)
    return [answers[number] for number in range(len(tasks))]
