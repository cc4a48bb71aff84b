"""One server of a run: its client, its process where it is ours, and how it is brought back when it fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.errors import RunFailed
from kl_comedy.rollouts.vllm import probe
from kl_comedy.rollouts.vllm.client import Client, Refused, ServerTrouble
from kl_comedy.rollouts.vllm.process import ServerProcess

log = logging.getLogger("kl_comedy")

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Published weights: the checkpoint folder, its version, and what the probe must find (None: no probe)."""

    folder: Path
    version: int
    reference: probe.ProbeReference | None
    temperature: float
    tolerance: float


class Member:
    """A server and its state. ``epoch`` counts how often it was brought back: who failed in an older epoch only has to
    ask again. ``start`` starts a process on a folder and returns it with its client; None for a server not ours."""

    def __init__(
        self, name: str, *, client: Client | None, start: Callable[[Path], tuple[ServerProcess, Client]] | None,
        start_timeout_s: float, retries: int,
    ) -> None:  # fmt: skip
        self.name = name
        self.process: ServerProcess | None = None
        self.epoch = 0
        self.lost: str | None = None
        self._client, self._start = client, start
        self._timeout, self._retries = start_timeout_s, retries
        self._lock = threading.RLock()
        self._weights: Weights | None = None
        self._failures = 0
        self._closed = False

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ServerTrouble("it is not running")
        return self._client

    def launch(self, folder: Path) -> None:
        """Start the process, where it is ours and does not run, without waiting for it."""
        with self._lock:
            if self._start is not None and self.process is None and not self._closed:
                self.process, self._client = self._start(folder)

    def new_round(self) -> None:
        """A batch or an update begins: it may fail ``retries`` times again, and a lost one is given a chance."""
        self._failures, self.lost = 0, None

    def take(self, weights: Weights) -> bool:
        """Have the server sample from ``weights``, bringing it back where needed; False when it was given up."""
        with self._lock:
            self._weights = weights
            epoch = self.epoch
            try:
                self.launch(weights.folder)
                self._settle(weights)
                return True
            except ServerTrouble as trouble:
                return self.recover(epoch, trouble)

    def recover(self, epoch: int, trouble: ServerTrouble) -> bool:
        """After a failure seen in ``epoch``: once per failure, however many requests met it. False: given up.

        A process of ours is killed and replaced; a server that is not ours is waited for. Both get the current
        weights. Raises :class:`RunFailed` where the server is there and has, or takes, other weights.
        """
        with self._lock:
            while epoch == self.epoch and self.lost is None and not self._closed:
                self._failures += 1
                if self._failures > self._retries:
                    self.lost = f"{trouble} (after {self._retries} attempts to bring it back)"
                    log.warning(f"{self.name} is given up: {self.lost}")
                    break
                log.warning(f"{self.name}: {trouble}; bringing it back")
                try:
                    self._bring_back()
                    self.epoch += 1
                except ServerTrouble as again:
                    trouble = again
            return self.lost is None and not self._closed

    def close(self) -> None:
        """Kill the process where it is ours."""
        self._closed = True
        process, client = self.process, self._client
        if process is not None:
            process.kill()
        if client is not None:
            client.close()

    def _bring_back(self) -> None:
        assert self._weights is not None
        if self._start is not None:
            if self.process is not None:
                self.process.kill()
                self.process = None
            self.launch(self._weights.folder)
        self._settle(self._weights)

    def _settle(self, weights: Weights) -> None:
        """Wait until the server answers, send the weights, probe."""
        self._wait_until_ready()
        try:
            self.client.take_weights(weights.folder, weights.version)
            if weights.reference is None:
                return
            answer = self.client.probe(weights.reference.ids, probe.fields(weights.temperature))
        except Refused as refusal:
            raise RunFailed(
                f"{self.name} did not take the weights of version {weights.version}: {refusal}"
            ) from refusal
        found = probe.gap(weights.reference, answer)
        if not found <= weights.tolerance:
            raise RunFailed(probe.message(self.name, weights.version, found, weights.tolerance))

    def _wait_until_ready(self) -> None:
        deadline, wait = time.monotonic() + self._timeout, FIRST_WAIT_S
        while not self.client.ready():
            if self._closed:
                raise ServerTrouble("it was closed")
            if self.process is not None and not self.process.alive:
                raise ServerTrouble(f"it ended: {self.process.last_words()} (log: {self.process.log})")
            if time.monotonic() > deadline:
                raise ServerTrouble(f"it does not answer within {self._timeout:g} s")
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)
