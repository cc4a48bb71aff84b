"""One worker process as its parent sees it: start, frames in and out, CPU time used, kill.

The worker is an interpreter of its own (``python -m kl_comedy.rewards.worker``), not a fork: it inherits
no locks or threads, works from any thread of the parent, and does not import the parent's ``__main__``.
Frames to the worker are pickles (the parent is trusted); frames from it are JSON (what a hostile answer
may have touched is not), each after its length in eight bytes. All writes and reads are non-blocking, so
that a stopped worker cannot stop its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import time
from typing import Any

import psutil

from kl_comedy.errors import RunFailed

HEADER = struct.Struct(">Q")
MAX_REPLY = 1 << 20
"""Bytes. A verdict is a few hundred; a longer frame is a broken worker."""

_CHUNK = 1 << 16


class WorkerLost(Exception):
    """The worker has died, or what it says is no frame of ours."""


class WorkerProcess:
    """A worker and its two pipes. ``warmed`` names the rewards whose imports it has done."""

    def __init__(self, *, memory_bytes: int) -> None:
        if not sys.executable:
            raise RunFailed("rewards: cannot start verifier workers, since sys.executable is unknown")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        single = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kl_comedy.rewards.worker", str(memory_bytes), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path, **single},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin_fd, self.stdout_fd = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.stdin_fd, False)
        os.set_blocking(self.stdout_fd, False)
        self.warmed: set[str] = set()
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, message: Any) -> None:
        """Queue one message; :meth:`flush` writes as much as the pipe takes. Raises :class:`WorkerLost`."""
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._outgoing = memoryview(HEADER.pack(len(body)) + body)
        self.flush()

    @property
    def unsent(self) -> bool:
        return len(self._outgoing) > 0

    def flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self.stdin_fd, self._outgoing[:_CHUNK]) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise WorkerLost(str(error)) from error

    def receive(self) -> dict[str, Any] | None:
        """The next whole frame, or None when it has not all arrived. Raises :class:`WorkerLost`."""
        try:
            while data := os.read(self.stdout_fd, _CHUNK):
                self._incoming += data
                if len(data) < _CHUNK:
                    break
            else:
                raise WorkerLost("end of file")
        except BlockingIOError:
            pass
        except OSError as error:
            raise WorkerLost(str(error)) from error
        return self._frame()

    def _frame(self) -> dict[str, Any] | None:
        if len(self._incoming) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._incoming)
        if size > MAX_REPLY:
            raise WorkerLost(f"a reply of {size} bytes")
        if len(self._incoming) < HEADER.size + size:
            return None
        body = bytes(self._incoming[HEADER.size : HEADER.size + size])
        del self._incoming[: HEADER.size + size]
        try:
            reply = json.loads(body)
        except ValueError as error:
            raise WorkerLost("a reply that is not JSON") from error
        if not isinstance(reply, dict):
            raise WorkerLost("a reply that is not an object")
        return reply

    def cpu_seconds(self) -> float:
        """CPU time (user and system) this process has used; infinite for a process that is gone."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return float("inf")
        return float(times.user + times.system)

    def kill(self) -> int | None:
        """End it now, reap it, close the pipes; its exit status (minus the signal's number)."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return self._reap()

    def close(self, *, grace_s: float = 1.0) -> None:
        """Let an idle worker leave at the end of its input; kill it where it does not within ``grace_s``."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        deadline = time.monotonic() + grace_s
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()

    def forget(self) -> None:
        """In a forked child: close the inherited pipe ends and leave the parent's worker alone."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.returncode = 0

    def _reap(self) -> int | None:
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return status
