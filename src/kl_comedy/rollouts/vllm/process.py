"""A vLLM server of our own: on loopback, with a key, its output in a file; killed with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.rollouts.vllm.auth import KEY_VARIABLE
from kl_comedy.rollouts.vllm.options import ServerOptions

HOST = "127.0.0.1"
MODEL_NAME = "policy"
SUPERVISOR = Path(__file__).with_name("supervise.py")
DEFAULT_GPU_SHARE = 0.9
END_TIMEOUT_S = 20.0


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
        found = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--served-model-name",
            MODEL_NAME,
            "--host",
            HOST,
            "--port",
            str(port),
            "--dtype",
            self.dtype,
            "--seed",
            "0",
            "--max-num-seqs",
            str(self.max_num_seqs),
            "--logprobs-mode",
            "processed_logprobs",
            "--generation-config",
            "vllm",
            "--tensor-parallel-size",
            str(options.tensor_parallel_size),
            "--gpu-memory-utilization",
            str(options.gpu_memory_utilization or DEFAULT_GPU_SHARE),
            "--enable-scale-out",
            "--middleware",
            "kl_comedy.rollouts.vllm.auth.RequireKey",
            "--uvicorn-log-level",
            "warning",
            "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching",
        ]
        if self.context is not None:
            found += ["--max-model-len", str(self.context)]
        if kv_gib is not None:
            found += ["--kv-cache-memory-bytes", str(int(kv_gib * 2**30))]
        return [*found, "--enforce-eager"] if eager else found

    def environment(self, key: str, gpus: str | None) -> dict[str, str]:
        """The environment of the server. The key travels here, since arguments can be seen by other users."""
        import kl_comedy

        ours = str(Path(kl_comedy.__file__).parents[1])
        inherited = os.environ.get("PYTHONPATH")
        found = {
            **os.environ,
            "PYTHONPATH": f"{ours}{os.pathsep}{inherited}" if inherited else ours,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            KEY_VARIABLE: key,
        }
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_API_KEY"):  # of an engine in process; of servers not ours
            found.pop(name, None)
        if gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = gpus
        if not self.on_gpu:
            found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            found.setdefault("TORCH_COMPILE_DISABLE", "1")
        return found


class ServerProcess:
    """A started server. It ends when :meth:`kill` is called, and when this process ends in whatever way."""

    def __init__(self, launch: Launch, folder: Path, *, key: str, gpus: str | None, log: Path) -> None:
        self.port = free_port()
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *launch.arguments(folder, self.port)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=launch.environment(key, gpus),
            )

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the supervisor, which is the leader of the server's process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the server and all it started, and wait until their memory is free (at most :data:`END_TIMEOUT_S`)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + END_TIMEOUT_S
        while running_in(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def last_words(self) -> str:
        """What the log says went wrong: its last line that names an error, else its last line."""
        return last_error(self.log.read_text(errors="replace").splitlines())


def last_error(lines: Sequence[str]) -> str:
    """The last line of a log that names an error, else the last one that says anything.

    >>> last_error(["ValueError: no such model", "goodbye", ""])
    'ValueError: no such model'
    """
    spoken = [line.strip() for line in lines if line.strip()]
    errors = [line for line in spoken if "Error:" in line and "Traceback" not in line]
    root = [line for line in errors if "See root cause above" not in line and "initialization failed" not in line]
    return (root or errors or spoken or ["(its log is empty)"])[-1][-400:]


def running_in(group: int) -> list[int]:
    """Processes of a group that still run; one that is dead and not yet reaped does not."""
    import psutil  # type: ignore[import-untyped]

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
