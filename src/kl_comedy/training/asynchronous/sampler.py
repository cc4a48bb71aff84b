"""The sampler process as its learner uses it: a backend that another process runs, restarted where it dies or hangs,
and the stream's source that gives out requests, takes in rows and returns whole batches.

Requests are stored until they are answered, and sent again to the next process, so a lost sampler costs time and no
prompt. One that is lost several times in a row without an answer ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import torch

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.processes import describe_status, last_error_line
from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.rollouts import Sampling
from kl_comedy.training.asynchronous.buffer import BufferLimits, Group, RolloutBuffer
from kl_comedy.training.asynchronous.shared_weights import SharedWeights, WeightsLocked
from kl_comedy.training.experience import Batch, StreamShape, derive_seed, pack_scored, unpack_scored

log = logging.getLogger("kl_comedy")

CLOSE_LIMIT_S = 5.0
MAX_DEATHS = 3
"""Deaths in a row, without an answer between them, that end the run."""
STOP_LIMIT_S = 10.0
"""Seconds that a sampler has to end by itself."""
POLL_S = 0.2
MAX_GAP_S = 1.0
"""The most seconds that one check adds: checks are 0.2 s apart, and a longer gap is this process's own."""
STARTUP_S = 600.0
"""Until a new process's first heartbeat: importing takes a while on a busy machine."""


class MessageSender:
    """Sends messages in order over ``pipe`` from a thread, so that posting never waits for a stopped reader."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="message sender")
        self._thread.start()

    def post(self, message: Any) -> None:
        """Send ``message`` later. It is pickled now, so a failure to pickle is raised here."""
        self._queue.put(ForkingPickler.dumps(message))

    def close(self) -> None:
        """End the thread. Call when the reader is dead: a blocked send returns only then."""
        self._queue.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _send(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:
                return  # the reader died; the listening thread notices


class Watchdog:
    """Seconds without a heartbeat (``silence_s``) and without an answer (``answer_s``), against their limits.

    Only time in which the learner waits counts, at most :data:`MAX_GAP_S` a check: a sampler is not blamed where the
    learner was busy, or both processes were stopped.
    """

    def __init__(self, *, silence_s: float, answer_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._answer_s, self._now = silence_s, answer_s, now
        self.restarted()

    def restarted(self) -> None:
        """A new process has started; it has not sent a heartbeat yet."""
        self._silent = self._unanswered = 0.0
        self._beats: int | None = None
        self._alive = False
        self._last = self._now()

    def answered(self) -> None:
        """An answer came."""
        self._silent = self._unanswered = 0.0

    def start_waiting(self) -> None:
        """The time since the last check was not waiting."""
        self._last = self._now()

    def check(self, beats: int, *, asked: bool) -> str | None:
        """What the sampler did wrong, or None. ``beats``: heartbeats so far; ``asked``: an answer is awaited."""
        now = self._now()
        passed = min(now - self._last, MAX_GAP_S)
        self._last = now
        if self._beats is not None and beats != self._beats:
            self._silent, self._alive = 0.0, True
        else:
            self._silent += passed
        self._beats = beats
        self._unanswered = self._unanswered + passed if asked else 0.0
        silence_s = self._silence_s if self._alive else max(self._silence_s, STARTUP_S)
        if self._silent > silence_s:
            return f"gave no sign of life for {silence_s:g} s (lag.silence_limit_s)"
        if self._unanswered > self._answer_s:
            return f"lived and finished nothing for {self._answer_s:g} s (lag.answer_limit_s)"
        return None


class SamplerProcess:
    """A :class:`RolloutBackend` in a process of its own, which also draws and scores batches ahead.

    ``changed`` locks everything that the listening thread touches. ``on_drawn`` and ``on_version`` are set by the
    source and called with the lock held.
    """

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        self.version = 0
        self.restarts = 0
        self.changed = threading.Condition()
        self.on_drawn: Callable[[int, Sequence[Scored], dict[str, float]], None] = lambda number, rows, stats: None
        self.on_version: Callable[[int], None] = lambda version: None
        self._config, self._loaded = config, loaded
        self._weights = SharedWeights(loaded.model)
        self._requests: dict[Any, tuple[Any, ...]] = {}
        self._answers: dict[Any, list[Rollout]] = {}
        self._evaluations = self._deaths = 0
        self._ready = self._lost = False
        self._failure: Exception | None = None
        self._watchdog = Watchdog(silence_s=config.lag.silence_limit_s, answer_s=config.lag.answer_limit_s)
        self._kill_reason: str | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        try:
            self._weights.publish(loaded.model, 0)
            self._start()
            self.wait_for(lambda: self._ready)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the current process."""
        return self._process.pid

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`. The process draws these before other requests, from the newest weights."""
        arguments = {"group_size": group_size, "sampling": sampling, "seed": seed}
        with self.changed:
            self._evaluations += 1
            key = ("evaluate", self._evaluations)
            self.ask(key, ("evaluate", key, list(prompts), arguments))
        self.wait_for(lambda: key in self._answers)
        return self._answers.pop(key)

    def work_in(self, folder: Path) -> None:
        """See :class:`WorksInFolder`; what the process's own backend keeps, it keeps there."""
        with self.changed:
            self.ask("work_in", ("work_in", folder))

    def update_weights(self, version: int) -> None:
        """Publish the learner's weights; the sampler loads them before its next batch, or token."""
        try:
            self._weights.publish(self._loaded.model, version, limit_s=self._config.lag.silence_limit_s)
        except WeightsLocked as error:
            with self.changed:
                self._kill(f"hung ({error})")
            self._weights.publish(self._loaded.model, version)  # the lock ended with the process
        with self.changed:
            self.version = version
            self._restart_if_lost()
            self.on_version(version)

    def ask(self, key: Any, message: tuple[Any, ...]) -> None:
        """Send a request and keep it until its answer has come. Call with the lock held."""
        self._requests[key] = message
        self._sender.post(message)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, called with the lock held; signals are handled meanwhile.

        Raises :class:`RunFailed` where the sampler failed or does not stay alive, and :class:`UserError` where it
        refused its config.
        """
        self._watchdog.start_waiting()
        while True:
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                if condition():
                    return
                self._restart_if_lost()
                self.changed.wait(timeout=POLL_S)
                fault = self._watchdog.check(self._weights.beats(), asked=bool(self._requests) or not self._ready)
                if fault is not None and not self._lost:
                    self._kill(fault)

    def close(self) -> None:
        """End the process, within :data:`STOP_LIMIT_S`, and free the shared weights."""
        process = getattr(self, "_process", None)
        if process is not None:
            self._sender.post(("stop",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            self._reap()
        self._stderr.close()
        self._weights.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kl_comedy.training.asynchronous.worker",
                    str(theirs.fileno()),
                    str(self._weights.fd),
                ],
                pass_fds=(theirs.fileno(), self._weights.fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path},
            )
        self._pipe = Connection(ours.detach())
        self._sender = MessageSender(self._pipe)
        self._ready = self._lost = False
        self._kill_reason = None
        self._watchdog.restarted()
        self._sender.post((self._config, torch.get_num_threads(), _plugin_files()))
        for message in self._requests.values():
            self._sender.post(message)
        threading.Thread(target=self._listen, args=(self._pipe,), daemon=True).start()

    def _listen(self, pipe: Connection) -> None:
        while True:
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                with self.changed:
                    self._lost = self._lost or pipe is self._pipe
                    self.changed.notify_all()
                return
            with self.changed:
                self._handle(*message)
                self.changed.notify_all()

    def _handle(self, kind: str, *rest: Any) -> None:
        self._watchdog.answered()
        if kind == "ready":
            self._ready = True
        elif kind == "refused":
            self._failure = UserError(rest[0])
        elif kind == "failed":
            self._failure = RunFailed(f"the sampler failed: {rest[0]}")
        elif kind == "evaluated":
            key, rollouts = rest
            self._deaths = 0
            del self._requests[key]
            self._answers[key] = rollouts
        else:
            number, rows, stats = rest
            self._deaths = 0
            del self._requests[number]
            self.on_drawn(number, rows, stats)

    def _kill(self, why: str) -> None:
        """End a process that hangs; the listening thread notices, and :meth:`_restart_if_lost` starts another."""
        self._kill_reason = f"{why} and was killed"
        self._process.kill()
        self._process.wait()

    def _restart_if_lost(self) -> None:
        """Start another process where this one was lost; it is sent the requests that are not answered."""
        if not self._lost or self._failure is not None:
            return
        status = self._reap()
        how = self._kill_reason or describe_status(status)
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise RunFailed(
                f"the sampler process {how}, {self._deaths} times in a row without finishing anything"
                f"; it said: {self._last_error()}"
            )
        self.restarts += 1
        log.warning(f"the sampler process {how}; another takes its place, and is asked again what was not answered")
        self._start()

    def _reap(self) -> int:
        """Kill the process where it still runs; its exit status."""
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        self._sender.close()
        self._pipe.close()
        return status

    def _last_error(self) -> str:
        self._stderr.seek(0)
        return last_error_line(self._stderr.read().decode(errors="replace").splitlines())


def _plugin_files() -> tuple[str, ...]:
    """Files given as ``--plugin``, which the other process must load too."""
    plugins = (module for name, module in sys.modules.items() if name.startswith("kl_comedy_plugin_"))
    return tuple(str(module.__file__) for module in plugins)


class Asynchronous:
    """See :class:`kl_comedy.training.experience.Source`. The learner's version at iteration n is n updates a batch."""

    def __init__(
        self,
        config: Config,
        shape: StreamShape,
        *,
        prompts: Sequence[Prompt],
        indices: Callable[[int], list[int]],
        sampler: SamplerProcess,
    ) -> None:
        self._shape, self._prompts, self._sampler = shape, prompts, sampler
        self._positions = {prompt.problem.id: n for n, prompt in enumerate(prompts)}
        self.buffer = RolloutBuffer(
            BufferLimits(
                prompts_per_batch=config.rollout.prompts_per_batch,
                updates=shape.per_iteration,
                iterations=shape.iterations,
                max_steps=config.lag.max_steps,
                drop=config.lag.policy == "drop",
            ),
            indices,
        )
        self._sent: set[int] = set()
        self._seconds: dict[str, float] = defaultdict(float)
        self._dropped_reported = 0
        self._started = False
        sampler.on_drawn = self._drawn
        sampler.on_version = self._published

    def take(self, iteration: int) -> Batch:
        """One batch no older than allowed; waits for it."""
        version = iteration * self._shape.per_iteration
        start = time.perf_counter()
        depth = None
        groups: list[Group] = []

        def batch_ready() -> bool:
            nonlocal depth
            self._started = True
            self._send_requests(version)
            if depth is None:
                depth = len(self.buffer.ready) / self.buffer.terms.prompts_per_batch
            groups.extend(self.buffer.take(version) or ())
            self._send_requests(version)
            return bool(groups)

        self._sampler.wait_for(batch_ready)
        rows = [
            replace(row, rollout=replace(row.rollout, group_id=position))
            for position, group in enumerate(groups)
            for row in group.rows
        ]
        with self._sampler.changed:
            return self._batch(rows, wait_s=time.perf_counter() - start, depth=depth or 0.0)

    def _batch(self, rows: Sequence[Scored], *, wait_s: float, depth: float) -> Batch:
        seconds, self._seconds = self._seconds, defaultdict(float)
        dropped, self._dropped_reported = self.buffer.dropped - self._dropped_reported, self.buffer.dropped
        notes = {
            "stream/queue_depth": depth,
            "stream/dropped_groups": float(dropped),
            "stream/sampler_restarts": float(self._sampler.restarts),
        }
        busy_s = seconds["generate_s"] + seconds["score_s"]
        if busy_s > 0:
            notes["time/sampler_idle_share"] = seconds["idle_s"] / (seconds["idle_s"] + busy_s)
            notes["time/sampler_cpu"] = seconds["cpu_s"]
        return Batch(
            rows=rows, generate_s=seconds["generate_s"], score_s=seconds["score_s"], wait_s=wait_s, notes=notes
        )

    def _send_requests(self, version: int) -> None:
        """Send the requests that are due and, after a restore, those that were pending. Needs the sampler's lock."""
        if not self._started:
            return
        self.buffer.due(version)
        for number, request in self.buffer.pending.items():
            if number not in self._sent:
                self._sent.add(number)
                prompts = [self._prompts[n] for n in request.indices]
                self._sampler.ask(number, ("draw", number, prompts, derive_seed(self._shape.seed, "rollout", number)))

    def _published(self, version: int) -> None:
        self._started = True
        self._send_requests(version)

    def _drawn(self, number: int, rows: Sequence[Scored], stats: Mapping[str, float]) -> None:
        self._sent.discard(number)
        self.buffer.arrive(number, rows)
        for name, value in stats.items():
            self._seconds[name] += value
        self._send_requests(self._sampler.version)

    def snapshot(self) -> dict[str, Any]:
        """See :class:`Source`. Requests without an answer are sent again after a resume."""
        with self._sampler.changed:
            return self.buffer.snapshot(lambda rows: pack_scored(rows, self._positions))

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Source`."""
        with self._sampler.changed:
            self.buffer.restore(state, lambda rows: unpack_scored(rows, self._prompts))
            self._dropped_reported = self.buffer.dropped
