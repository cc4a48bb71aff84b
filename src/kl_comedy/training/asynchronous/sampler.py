"""Messages to the other process, sent from a thread: whoever posts one never waits for a reader that has stopped.

How long the learner waits for a sampler that does not answer: the two limits, and the clock they are counted with.

A stopped process (SIGSTOP, a debugger, memory swapped out) gives no sign of life; one whose engine hangs may give signs
of life for ever and no answer. The clock counts only what this process has seen pass: when learner and sampler are
stopped together and go on together, or the learner was busy elsewhere, nobody is blamed.

The sampler process as its learner sees it: a backend that another process runs, restarted where it dies or hangs.

What was asked and not answered is kept, and asked again of the next process. So a sampler that is killed costs time,
and no prompt. One that hangs is killed (:mod:`watchdog` says when). One that is lost again and again without answering
anything ends the run.

The stream's source while another process samples: gives out requests, takes in rows, hands on whole batches.
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
from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.rollouts import Sampling
from kl_comedy.training.asynchronous.buffer import BufferLimits, Group, RolloutBuffer
from kl_comedy.training.asynchronous.shared_weights import SharedWeights, WeightsLocked
from kl_comedy.training.experience import Batch, StreamShape, derive_seed, pack_scored, unpack_scored

CLOSE_LIMIT_S = 5.0


class MessageSender:
    """Sends what is posted, in order, over ``pipe``. What a dead process does not take is forgotten."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._queue: SimpleQueue[memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True, name="sender")
        self._thread.start()

    def post(self, message: Any) -> None:
        """Send ``message`` when it is its turn. It is pickled here and now, so what cannot be raises here."""
        self._queue.put(ForkingPickler.dumps(message))

    def close(self) -> None:
        """End the thread. Call when the reader is dead: only then is a send that it blocks sure to return."""
        self._queue.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _send(self) -> None:
        while (data := self._queue.get()) is not None:
            try:
                self._pipe.send_bytes(data)
            except OSError:
                return  # it died, as the listening thread hears once it has read all that it said


BEAT_S = 0.5
"""Between the sampler's signs of life."""
LONGEST_LOOK_S = 1.0
"""The most seconds that one look adds: looks are 0.2 s apart, and a longer gap is this process's own."""
STARTUP_S = 600.0
"""Until a new process's first sign of life: it imports before it can give one, on a busy machine for a while."""


class Watchdog:
    """Seconds of silence and seconds without an answer, against their limits. Counted while somebody waits.

    ``silence_s``: without a sign of life. ``answer_s``: with requests open and none answered.
    """

    def __init__(self, *, silence_s: float, answer_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._silence_s, self._answer_s, self._now = silence_s, answer_s, now
        self.restarted()

    def restarted(self) -> None:
        """Another process begins: it has not beaten yet."""
        self._silent = self._unanswered = 0.0
        self._beats: int | None = None
        self._beaten = False
        self._last = self._now()

    def answered(self) -> None:
        """An answer came."""
        self._silent = self._unanswered = 0.0

    def begin(self) -> None:
        """Somebody begins to wait: what passed since the last look was not waiting."""
        self._last = self._now()

    def look(self, beats: int, *, asked: bool) -> str | None:
        """Take in the count of signs of life and whether an answer is owed; what the sampler did wrong, or None."""
        now = self._now()
        passed = min(now - self._last, LONGEST_LOOK_S)
        self._last = now
        if self._beats is not None and beats != self._beats:
            self._silent, self._beaten = 0.0, True
        else:
            self._silent += passed
        self._beats = beats
        self._unanswered = self._unanswered + passed if asked else 0.0
        silence_s = self._silence_s if self._beaten else max(self._silence_s, STARTUP_S)
        if self._silent > silence_s:
            return f"gave no sign of life for {silence_s:g} s (lag.silence_limit_s)"
        if self._unanswered > self._answer_s:
            return f"lived and finished nothing for {self._answer_s:g} s (lag.answer_limit_s)"
        return None


def start_heartbeat(beat: Callable[[], None]) -> None:
    """Give a sign of life every :data:`BEAT_S`, from a thread that ends with the process."""

    def run() -> None:
        while True:
            beat()
            time.sleep(BEAT_S)

    threading.Thread(target=run, daemon=True, name="signs of life").start()


log = logging.getLogger("kl_comedy")

MAX_DEATHS = 3
"""Deaths in a row, without an answer between them, that end the run."""
STOP_LIMIT_S = 10.0
"""Wall seconds that a sampler has to end by itself; what it is drawing then is not needed any more."""
POLL_S = 0.2
LAST_WORDS = 300

Drawn = Callable[[int, Sequence[Scored], dict[str, float]], None]


class SamplerProcess:
    """A :class:`RolloutBackend` in a process of its own, which also draws and scores batches ahead.

    ``changed`` is the lock of everything that its listening thread touches. ``on_drawn`` and ``on_version`` are set by
    whoever asks for batches, and called with the lock held. Main thread only, but for those.
    """

    def __init__(self, config: Config, loaded: LoadedModel) -> None:
        self.version = 0
        self.restarts = 0
        self.changed = threading.Condition()
        self.on_drawn: Drawn = lambda number, rows, stats: None
        self.on_version: Callable[[int], None] = lambda version: None
        self._config, self._loaded = config, loaded
        self._block = SharedWeights(loaded.model)
        self._open: dict[Any, tuple[Any, ...]] = {}
        self._answers: dict[Any, list[Rollout]] = {}
        self._tickets = self._deaths = 0
        self._ready = self._lost = False
        self._failure: Exception | None = None
        self._watchdog = Watchdog(silence_s=config.lag.silence_limit_s, answer_s=config.lag.answer_limit_s)
        self._killed_since: str | None = None
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (until close)
        try:
            self._block.publish(loaded.model, 0)
            self._start()
            self.wait_for(lambda: self._ready)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process that samples now."""
        return self._process.pid

    def generate(self, prompts: Sequence[Prompt], *, group_size: int, sampling: Sampling, seed: int) -> list[Rollout]:
        """See :class:`RolloutBackend`: the process draws them next, from the newest weights."""
        arguments = {"group_size": group_size, "sampling": sampling, "seed": seed}
        with self.changed:
            self._tickets += 1
            key = ("evaluate", self._tickets)
            self.ask(key, ("evaluate", key, list(prompts), arguments))
        self.wait_for(lambda: key in self._answers)
        return self._answers.pop(key)

    def work_in(self, folder: Path) -> None:
        """See :class:`WorksInFolder`; what the process's own backend keeps, it keeps there."""
        with self.changed:
            self.ask("work_in", ("work_in", folder))

    def update_weights(self, version: int) -> None:
        """Publish the learner's weights; the sampler takes them before its next batch, or token."""
        try:
            self._block.publish(self._loaded.model, version, limit_s=self._config.lag.silence_limit_s)
        except WeightsLocked as held:
            with self.changed:
                self._kill(f"hung ({held})")
            self._block.publish(self._loaded.model, version)  # the lock went with its holder
        with self.changed:
            self.version = version
            self._mend()
            self.on_version(version)

    def ask(self, key: Any, message: tuple[Any, ...]) -> None:
        """Send a request and keep it until its answer has come. Call with the lock held."""
        self._open[key] = message
        self._sender.post(message)

    def wait_for(self, there: Callable[[], bool]) -> None:
        """Until ``there()``, looked at with the lock held; signals are heard meanwhile.

        Raises :class:`RunFailed` for what the sampler failed on, or when it does not stay alive; :class:`UserError`
        for what it refused to begin with.
        """
        self._watchdog.begin()
        while True:
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                if there():
                    return
                self._mend()
                self.changed.wait(timeout=POLL_S)
                fault = self._watchdog.look(self._block.beats(), asked=bool(self._open) or not self._ready)
                if fault is not None and not self._lost:
                    self._kill(fault)

    def close(self) -> None:
        """End the process, within :data:`STOP_LIMIT_S`, and free the shared weights."""
        process = getattr(self, "_process", None)
        if process is not None:
            self._sender.post(("stop",))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)
            self._bury()
        self._words.close()
        self._block.close()

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
                    str(self._block.fd),
                ],
                pass_fds=(theirs.fileno(), self._block.fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path},
            )
        self._pipe = Connection(ours.detach())
        self._sender = MessageSender(self._pipe)
        self._ready = self._lost = False
        self._killed_since = None
        self._watchdog.restarted()
        self._sender.post((self._config, torch.get_num_threads(), _plugin_files()))
        for message in self._open.values():
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
                self._hear(*message)
                self.changed.notify_all()

    def _hear(self, kind: str, *rest: Any) -> None:
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
            del self._open[key]
            self._answers[key] = rollouts
        else:
            number, rows, stats = rest
            self._deaths = 0
            del self._open[number]
            self.on_drawn(number, rows, stats)

    def _kill(self, why: str) -> None:
        """End a process that hangs; the listening thread hears of it, and :meth:`_mend` starts another."""
        self._killed_since = f"{why} and was killed"
        self._process.kill()
        self._process.wait()

    def _mend(self) -> None:
        """Where the process was lost, say so and start another; what it had not answered is asked again."""
        if not self._lost or self._failure is not None:
            return
        ended = _how_it_ended(self._bury())
        how = self._killed_since or ended
        self._deaths += 1
        if self._deaths > MAX_DEATHS:
            raise RunFailed(
                f"the sampler process {how}, {self._deaths} times in a row without finishing anything"
                f"{self._last_words()}"
            )
        self.restarts += 1
        log.warning(f"the sampler process {how}; another takes its place, and is asked again what was not answered")
        self._start()

    def _bury(self) -> int:
        """Make sure that it is dead; its exit status."""
        if self._process.poll() is None:
            self._process.kill()
        status = self._process.wait()
        self._sender.close()
        self._pipe.close()
        return status

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]
        return f"; it said: {lines[-1][:LAST_WORDS]}" if lines else ""


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was killed by signal {-status}" + (" (out of memory?)" if status == -9 else "")
    return f"ended with status {status}"


def _plugin_files() -> tuple[str, ...]:
    """Files given as ``--plugin``, which the other process must load too."""
    found = (module for name, module in sys.modules.items() if name.startswith("kl_comedy_plugin_"))
    return tuple(str(module.__file__) for module in found)


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
        self._given: set[int] = set()
        self._spent: dict[str, float] = defaultdict(float)
        self._dropped_before = 0
        self._begun = False
        sampler.on_drawn = self._drawn
        sampler.on_version = self._published

    def take(self, iteration: int) -> Batch:
        """One batch no older than allowed; waits for it, and hears signals meanwhile."""
        version = iteration * self._shape.per_iteration
        start = time.perf_counter()
        depth = None
        found: list[Group] = []

        def there() -> bool:
            nonlocal depth
            self._begun = True
            self._give(version)
            if depth is None:
                depth = len(self.buffer.ready) / self.buffer.terms.prompts_per_batch
            found.extend(self.buffer.take(version) or ())
            self._give(version)
            return bool(found)

        self._sampler.wait_for(there)
        rows = [
            row if row.rollout.group_id == place else replace(row, rollout=replace(row.rollout, group_id=place))
            for place, group in enumerate(found)
            for row in group.rows
        ]
        with self._sampler.changed:
            return self._batch(rows, wait_s=time.perf_counter() - start, depth=depth or 0.0)

    def _batch(self, rows: Sequence[Scored], *, wait_s: float, depth: float) -> Batch:
        spent, self._spent = self._spent, defaultdict(float)
        dropped, self._dropped_before = self.buffer.dropped - self._dropped_before, self.buffer.dropped
        notes = {
            "stream/queue_depth": depth,
            "stream/dropped_groups": float(dropped),
            "stream/sampler_restarts": float(self._sampler.restarts),
        }
        busy_s = spent["generate_s"] + spent["score_s"]
        if busy_s > 0:
            notes["time/sampler_idle_share"] = spent["idle_s"] / (spent["idle_s"] + busy_s)
            notes["time/sampler_cpu"] = spent["cpu_s"]
        return Batch(rows=rows, generate_s=spent["generate_s"], score_s=spent["score_s"], wait_s=wait_s, notes=notes)

    def _give(self, version: int) -> None:
        """Give out what is due, and after a restore what was pending. Called with the sampler's lock held."""
        if not self._begun:
            return
        self.buffer.due(version)
        for number, request in self.buffer.pending.items():
            if number not in self._given:
                self._given.add(number)
                prompts = [self._prompts[n] for n in request.indices]
                self._sampler.ask(number, ("draw", number, prompts, derive_seed(self._shape.seed, "rollout", number)))

    def _published(self, version: int) -> None:
        self._begun = True
        self._give(version)

    def _drawn(self, number: int, rows: Sequence[Scored], stats: Mapping[str, float]) -> None:
        self._given.discard(number)
        self.buffer.arrive(number, rows)
        for name, value in stats.items():
            self._spent[name] += value
        self._give(self._sampler.version)

    def snapshot(self) -> dict[str, Any]:
        """See :class:`Source`. What is being drawn is asked again after a resume."""
        with self._sampler.changed:
            return self.buffer.snapshot(lambda rows: pack_scored(rows, self._positions))

    def restore(self, state: Mapping[str, Any]) -> None:
        """See :class:`Source`."""
        with self._sampler.changed:
            self.buffer.restore(state, lambda rows: unpack_scored(rows, self._prompts))
            self._dropped_before = self.buffer.dropped
