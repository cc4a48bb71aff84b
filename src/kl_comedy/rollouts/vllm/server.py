"""One vLLM server of a run: how ours are started, its client, and how it is restarted when it fails.

A server of ours listens on loopback, wants a key, writes its output to a file, and is killed with all it started,
also when the run dies.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.errors import RunFailed
from kl_comedy.processes import LOOPBACK, ChildProcess, RestartLimit, free_port
from kl_comedy.rollouts.vllm.auth import KEY_VARIABLE
from kl_comedy.rollouts.vllm.client import Client, Refused, ServerTrouble
from kl_comedy.rollouts.vllm.options import ServerOptions
from kl_comedy.rollouts.vllm.probe import Probe

MODEL_NAME = "policy"
DEFAULT_GPU_SHARE = 0.9
FIRST_POLL_S, LONGEST_POLL_S = 0.2, 5.0

log = logging.getLogger("kl_comedy")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server is started, but for its weights. ``dtype`` and ``context`` are the policy's or the options'."""

    options: ServerOptions
    dtype: str
    context: int | None
    max_num_seqs: int
    on_gpu: bool

    def arguments(self, folder: Path, port: int) -> list[str]:
        """The command line of the server on the checkpoint ``folder``."""
        options = self.options
        eager = not self.on_gpu if options.enforce_eager is None else options.enforce_eager
        kv_gib = options.kv_cache_gib or (None if self.on_gpu else 1.0)
        valued: dict[str, object] = {
            "model": folder,
            "served-model-name": MODEL_NAME,
            "host": LOOPBACK,
            "port": port,
            "dtype": self.dtype,
            "seed": 0,
            "max-num-seqs": self.max_num_seqs,
            "max-model-len": self.context,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "tensor-parallel-size": options.tensor_parallel_size,
            "gpu-memory-utilization": options.gpu_memory_utilization or DEFAULT_GPU_SHARE,
            "kv-cache-memory-bytes": None if kv_gib is None else int(kv_gib * 2**30),
            "middleware": "kl_comedy.rollouts.vllm.auth.RequireKey",
            "uvicorn-log-level": "warning",
        }
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out"]
        for name, value in valued.items():
            if value is not None:
                words += [f"--{name}", str(value)]
        words.append("--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching")
        return [*words, "--enforce-eager"] if eager else words

    def environment(self, key: str, gpus: str | None) -> dict[str, str]:
        """The environment of the server. The key travels here, since arguments can be seen by other users."""
        import kl_comedy

        package_root = str(Path(kl_comedy.__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH")
        variables = {
            **os.environ,
            "PYTHONPATH": f"{package_root}{os.pathsep}{inherited}" if inherited else package_root,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            KEY_VARIABLE: key,
        }
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"):  # for the engine in process; for other servers
            variables.pop(name, None)
        if gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpus
        if not self.on_gpu:
            variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            variables.setdefault("TORCH_COMPILE_DISABLE", "1")
        return variables

    def start(self, folder: Path, *, key: str, gpus: str | None, log: Path) -> tuple[ChildProcess, Client]:
        """Start a server on the checkpoint ``folder``, without waiting for it."""
        port = free_port()
        process = ChildProcess(
            self.arguments(folder, port), log=log, ends_with_parent=True, env=self.environment(key, gpus)
        )
        client = Client(f"http://{LOOPBACK}:{port}", key=key, timeout_s=self.options.request_timeout_s)
        return process, client


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Published weights: the checkpoint folder, its version, and the probe that checks them (None: no probe)."""

    folder: Path
    version: int
    probe: Probe | None


class Server:
    """A server and its state.

    ``generation`` counts its restarts: a request that failed before the last restart is simply retried. ``failure``
    says why it was given up. ``start`` starts a process on a folder and returns it with its client; None for a server
    that is not ours, which is waited for instead.
    """

    def __init__(
        self,
        name: str,
        *,
        client: Client | None = None,
        start: Callable[[Path], tuple[ChildProcess, Client]] | None = None,
        start_timeout_s: float,
        retries: int,
    ) -> None:
        self.name = name
        self.process: ChildProcess | None = None
        self.generation = 0
        self.failure: str | None = None
        self._client, self._start = client, start
        self._start_timeout_s, self._restarts = start_timeout_s, RestartLimit(retries)
        self._lock = threading.RLock()
        self._weights: Weights | None = None
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

    def allow_restarts(self) -> None:
        """Call when a batch or an update begins: the server may fail ``retries`` times again, also if given up."""
        self._restarts.reset()
        self.failure = None

    def load(self, weights: Weights) -> bool:
        """Make the server sample from ``weights``, restarting it where needed; False when it was given up."""
        with self._lock:
            self._weights = weights
            generation = self.generation
            try:
                self.launch(weights.folder)
                self._send(weights)
                return True
            except ServerTrouble as trouble:
                return self.recover(generation, trouble)

    def recover(self, generation: int, trouble: ServerTrouble) -> bool:
        """After a failure in ``generation``: restart once per failure, however many requests met it. False: given up.

        A process of ours is killed and replaced; a server that is not ours is waited for. Both get the current
        weights. Raises :class:`RunFailed` where the server answers and has, or takes, other weights.
        """
        with self._lock:
            while generation == self.generation and self.failure is None and not self._closed:
                if not self._restarts.fail():
                    self.failure = f"{trouble} (after {self._restarts.limit} restarts)"
                    log.warning(f"{self.name} is given up: {self.failure}")
                    break
                log.warning(f"{self.name}: {trouble}; restarting it")
                try:
                    self._restart()
                    self.generation += 1
                except ServerTrouble as again:
                    trouble = again
            return self.failure is None and not self._closed

    def close(self) -> None:
        """Kill the process where it is ours."""
        self._closed = True
        if self.process is not None:
            self.process.kill()
        if self._client is not None:
            self._client.close()

    def _restart(self) -> None:
        assert self._weights is not None
        if self._start is not None:
            if self.process is not None:
                self.process.kill()
                self.process = None
            self.launch(self._weights.folder)
        self._send(self._weights)

    def _send(self, weights: Weights) -> None:
        """Wait until the server answers, send the weights, probe."""
        deadline, poll_s = time.monotonic() + self._start_timeout_s, FIRST_POLL_S
        while not self.client.ready():
            if self._closed:
                raise ServerTrouble("it was closed")
            if self.process is not None and not self.process.alive:
                raise ServerTrouble(f"it ended: {self.process.last_error()} (log: {self.process.log})")
            if time.monotonic() > deadline:
                raise ServerTrouble(f"it does not answer within {self._start_timeout_s:g} s")
            time.sleep(poll_s)
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
        try:
            self.client.take_weights(weights.folder, weights.version)
            answer = None if weights.probe is None else self.client.answer(weights.probe)
        except Refused as refusal:
            raise RunFailed(
                f"{self.name} did not take the weights of version {weights.version}: {refusal}"
            ) from refusal
        if weights.probe is not None and answer is not None:
            weights.probe.check(answer, self.name, weights.version)
