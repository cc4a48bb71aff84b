"""The sampler process as its learner sees it: a backend that another process runs, restarted where it dies or hangs.

What was asked and not answered is kept, and asked again of the next process. So a sampler that is killed costs time,
and no prompt. One that hangs is killed (:mod:`patience` says when). One that is lost again and again without answering
anything ends the run.
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel
from kl_comedy.records import Prompt, Rollout, Scored
from kl_comedy.rollouts import Sampling
from kl_comedy.training.asynchronous.block import BlockHeld, WeightBlock
from kl_comedy.training.asynchronous.outbox import Outbox
from kl_comedy.training.asynchronous.patience import Patience

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
        self._block = WeightBlock(loaded.model)
        self._open: dict[Any, tuple[Any, ...]] = {}
        self._answers: dict[Any, list[Rollout]] = {}
        self._tickets = self._deaths = 0
        self._ready = self._lost = False
        self._failure: Exception | None = None
        self._patience = Patience(silence_s=config.lag.silence_limit_s, answer_s=config.lag.answer_limit_s)
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
        except BlockHeld as held:
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
        self._outbox.post(message)

    def wait_for(self, there: Callable[[], bool]) -> None:
        """Until ``there()``, looked at with the lock held; signals are heard meanwhile.

        Raises :class:`RunFailed` for what the sampler failed on, or when it does not stay alive; :class:`UserError`
        for what it refused to begin with.
        """
        self._patience.begin()
        while True:
            with self.changed:
                if self._failure is not None:
                    raise self._failure
                if there():
                    return
                self._mend()
                self.changed.wait(timeout=POLL_S)
                fault = self._patience.look(self._block.beats(), asked=bool(self._open) or not self._ready)
                if fault is not None and not self._lost:
                    self._kill(fault)

    def close(self) -> None:
        """End the process, within :data:`STOP_LIMIT_S`, and free the shared weights."""
        process = getattr(self, "_process", None)
        if process is not None:
            self._outbox.post(("stop",))
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
                [sys.executable, "-P", "-m", "kl_comedy.training.asynchronous.worker", str(theirs.fileno()),
                 str(self._block.fd)],
                pass_fds=(theirs.fileno(), self._block.fd), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=self._words, env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        self._pipe = Connection(ours.detach())
        self._outbox = Outbox(self._pipe)
        self._ready = self._lost = False
        self._killed_since = None
        self._patience.restarted()
        self._outbox.post((self._config, torch.get_num_threads(), _plugin_files()))
        for message in self._open.values():
            self._outbox.post(message)
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
        self._patience.answered()
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
        self._outbox.close()
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
