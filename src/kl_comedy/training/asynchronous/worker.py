"""The sampler process: its own model and backend, requests in, scored rollouts out. ``python -m`` this module.

    config, threads, plugins -> load the model -> shared weights -> backend -> ready
    draw  -> (newer weights) -> generate -> score -> drawn
    evaluate -> (newer weights) -> generate -> evaluated            before any draw that has not begun

It ends with its learner, whose end closes the pipe. It ignores signals that a terminal or a scheduler sends to a whole
process group: the learner handles them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from kl_comedy.config import Config
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models import LoadedModel, load_model
from kl_comedy.registry import ROLLOUTS, load_plugin_file
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import RolloutBackend, sampling_from
from kl_comedy.training.asynchronous.shared_weights import SharedWeights, load_from, start_heartbeat

POLL_S = 0.02
"""Between looks for newer weights, for a backend that takes them from another thread."""


class RequestQueue:
    """Requests from the learner, received in a thread so that the learner never waits to send one."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._messages: deque[Any] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Any:
        """The next message; an evaluation before any draw, as the learner waits for it."""
        with self._changed:
            while not self._messages:
                self._changed.wait()
            for message in self._messages:
                if message[0] != "draw":
                    self._messages.remove(message)
                    return message
            return self._messages.popleft()

    def _listen(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(0)  # the learner is gone
            with self._changed:
                self._messages.append(message)
                self._changed.notify()


class Sampler:
    """The model, its backend and the rewards of the process."""

    def __init__(self, config: Config, fd: int) -> None:
        self.config = config
        self.loaded: LoadedModel = load_model(config.model)
        self.weights = SharedWeights(self.loaded.model, fd)
        version = load_from(self.weights, self.loaded.model, everything=True)
        self.backend: RolloutBackend = ROLLOUTS.get(config.rollout.backend).fn(config.rollout, loaded=self.loaded)
        self.backend.update_weights(version)
        self.capabilities = capabilities_of(config.rollout.backend)
        if config.lag.in_flight and self.capabilities.in_trainer_ranks:
            self.backend.call_before_each_pass(self.refresh)  # type: ignore[attr-defined]
        self.scorer = RewardSum(config.rewards)

    def refresh(self) -> None:
        """Load newer weights where there are some."""
        if self.weights.version() != self.backend.version:
            self.backend.update_weights(load_from(self.weights, self.loaded.model, everything=False))

    def draw(self, prompts: Any, seed: int) -> tuple[Any, dict[str, float]]:
        """Rows of one batch, and the seconds that drawing and scoring took."""
        start, cpu = time.perf_counter(), time.process_time()
        self.refresh()
        with self.precision(), self.updating():
            rollouts = self.backend.generate(
                prompts,
                group_size=self.config.rollout.group_size,
                sampling=sampling_from(self.config.rollout),
                seed=seed,
            )
        middle = time.perf_counter()
        rows = self.scorer.score(rollouts)
        end = time.perf_counter()
        return rows, {"generate_s": middle - start, "score_s": end - middle, "cpu_s": time.process_time() - cpu}

    def evaluate(self, prompts: Any, arguments: Any) -> Any:
        """Completions from the newest weights, as evaluation asks for them."""
        self.refresh()
        return self.backend.generate(prompts, **arguments)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the learner's passes."""
        if self.config.train.precision == "bf16":
            return torch.autocast(self.loaded.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, a thread loads newer weights into completions in flight, with ``lag.in_flight``."""
        if not self.config.lag.in_flight or self.capabilities.in_trainer_ranks:  # there the backend calls refresh
            yield
            return
        done = threading.Event()
        failed: list[RunFailed] = []

        def follow() -> None:
            try:
                while not done.wait(POLL_S):
                    self.refresh()
            except RunFailed as error:
                failed.append(error)

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if failed:
            raise failed[0]

    def close(self) -> None:
        self.scorer.close()
        self.backend.close()


def main() -> None:
    """Serve requests from the inherited pipe until it closes or says stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    pipe, fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    start_heartbeat(fd)
    config, threads, plugins = pipe.recv()
    requests = RequestQueue(pipe)
    try:
        for file in plugins:
            load_plugin_file(file)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(config.train.deterministic)
        sampler = Sampler(config, fd)
    except UserError as error:
        pipe.send(("refused", str(error)))
        return
    except BaseException as error:
        _fail(pipe, error)
        return
    pipe.send(("ready",))
    try:
        _serve(pipe, requests, sampler)
    except BaseException as error:
        _fail(pipe, error)
    finally:
        sampler.close()


def _serve(pipe: Connection, requests: RequestQueue, sampler: Sampler) -> None:
    since = time.perf_counter()
    idle_s = 0.0
    while True:
        kind, *rest = requests.next()
        idle_s += time.perf_counter() - since
        if kind == "stop":
            return
        if kind == "work_in":
            if sampler.capabilities.needs_folder:
                sampler.backend.work_in(*rest)
        elif kind == "evaluate":
            ticket, prompts, arguments = rest
            pipe.send(("evaluated", ticket, sampler.evaluate(prompts, arguments)))
        else:
            number, prompts, seed = rest
            rows, stats = sampler.draw(prompts, seed)
            pipe.send(("drawn", number, rows, {**stats, "idle_s": idle_s}))
            idle_s = 0.0
        since = time.perf_counter()


def _fail(pipe: Connection, error: BaseException) -> None:
    if not isinstance(error, (UserError, RunFailed)):
        traceback.print_exception(error)
    message = str(error) if isinstance(error, (UserError, RunFailed)) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):
        pipe.send(("failed", message))


if __name__ == "__main__":
    main()
