"""Child processes, ended with everything they started.

Run as a script (``python -P processes.py COMMAND ...``), this file runs the command until its standard input closes,
then kills the process group, so the command cannot outlive its parent however the parent ends
(``ChildProcess(ends_with_parent=True)``). Therefore only the standard library is imported at the top.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

LOOPBACK = "127.0.0.1"
GROUP_END_S = 20.0
"""How long :meth:`ChildProcess.kill` waits for the other processes of the group to disappear."""
LINE_LIMIT = 400
"""Characters of a log line that go into an error message."""


class ChildProcess:
    """A command in a session of its own: a Ctrl-C in the terminal does not reach it, and its group can be killed.

    Output goes to the end of the file ``log``, or is inherited. ``pipes`` makes ``stdin`` and ``stdout`` available
    (stderr is then inherited).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path | None = None,
        pipes: bool = False,
        ends_with_parent: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        self.log = log
        if ends_with_parent:
            # -P keeps this file's folder off the module path: its io.py and statistics.py are not Python's.
            command = [sys.executable, "-P", __file__, *command]
        stdin = subprocess.DEVNULL
        if pipes or ends_with_parent:
            # The supervisor reads it until it closes, which the kernel does when this process ends.
            stdin = subprocess.PIPE
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with open(log or os.devnull, "ab") as output:
            # None: inherited.
            stdout: BinaryIO | int | None = None
            stderr = None
            if log is not None:
                stdout = output
                stderr = subprocess.STDOUT
            if pipes:
                stdout = subprocess.PIPE
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout

    @property
    def pid(self) -> int:
        """The id of the command, or of its supervisor (``ends_with_parent``). It is also that of the process group."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, minus the number of the signal that ended it; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self.status is None

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within ``timeout_s`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return not self.alive

    def terminate(self, grace_s: float) -> int:
        """SIGTERM to the group, SIGKILL after ``grace_s`` seconds; the exit status."""
        self._signal(signal.SIGTERM)
        self.wait(grace_s)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL the group and descendants in other groups; the status of the process.

        Waits until the group is gone (at most :data:`GROUP_END_S`), and closes the pipes.
        """
        # Listed before the kill: the children of a process that is gone cannot be found.
        descendants = self._family()[1:]
        self._signal(signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(Exception):  # psutil's: it is gone
                process.kill()
        status = self._process.wait()
        deadline = time.monotonic() + GROUP_END_S
        while _group_exists(self.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._close_pipes()
        return status

    def abandon(self) -> None:
        """In a forked child: close the inherited pipe ends; the process itself belongs to the parent."""
        self._close_pipes()
        # Without it Popen warns that the process still runs.
        self._process.returncode = 0

    def cpu_seconds(self) -> float:
        """CPU seconds, user and system, of the process and of those that it started, also of those that have ended."""
        seconds = 0.0
        for process in self._family():
            with contextlib.suppress(Exception):  # psutil's: it is gone
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds

    def last_error(self) -> str:
        """What the log says went wrong; see :func:`last_error_line`."""
        if self.log is None:
            return "(it has no log)"
        return last_error_line(self.log.read_text(errors="replace").splitlines())

    def _family(self) -> list[Any]:
        """The process and its descendants, as psutil has them; empty where it is gone."""
        import psutil

        if not self.alive:
            # Its number may be another's by now.
            return []
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _signal(self, number: int) -> None:
        # PermissionError: what macOS says where all are zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def _close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def last_error_line(lines: Sequence[str]) -> str:
    """The last line of a log that names an error, else the last line that is not empty.

    >>> last_error_line(["ValueError: no such model", "goodbye", ""])
    'ValueError: no such model'
    """
    texts = [line.strip() for line in lines if line.strip()]
    errors = [line for line in texts if "Error:" in line and "Traceback" not in line]
    # vLLM ends with an error that refers to the cause, which stands above it.
    causes = [line for line in errors if "See root cause above" not in line and "initialization failed" not in line]
    for candidates in (causes, errors, texts):
        if candidates:
            return candidates[-1][-LINE_LIMIT:]
    return "(its log is empty)"


def free_port(host: str = LOOPBACK) -> int:
    """A port of ``host`` on which nothing listens at this moment."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])


def _group_exists(group: int) -> bool:
    """Whether a process of the group still runs; one that has ended and is not reaped yet does not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


FRAME_HEADER = struct.Struct(">Q")
"""A frame is its length in eight bytes, then its bytes."""
_CHUNK_BYTES = 1 << 16


class BrokenChannel(Exception):
    """The other end is gone, or what it sends is not a frame."""


class FrameChannel:
    """Frames to and from another process. No call blocks, so a stopped process cannot stop this one."""

    def __init__(self, read_fd: int, write_fd: int, *, max_bytes: int) -> None:
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._max_bytes = max_bytes
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()

    @property
    def unsent(self) -> bool:
        """Whether :meth:`flush` must be called again."""
        return bool(self._outgoing)

    def send(self, body: bytes) -> None:
        """Queue one frame (after the previous one has left) and write as much of it as the pipe takes."""
        self._outgoing = memoryview(FRAME_HEADER.pack(len(body)) + body)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes. Raises :class:`BrokenChannel`."""
        try:
            while self._outgoing:
                written = os.write(self.write_fd, self._outgoing[:_CHUNK_BYTES])
                self._outgoing = self._outgoing[written:]
        except BlockingIOError:
            # The pipe is full; the rest leaves at the next call.
            pass
        except OSError as error:
            raise BrokenChannel(str(error)) from error

    def receive(self) -> bytes | None:
        """The next whole frame, or None while it has not all arrived. Raises :class:`BrokenChannel`."""
        self._read_available()
        if len(self._incoming) < FRAME_HEADER.size:
            return None
        (size,) = FRAME_HEADER.unpack_from(self._incoming)
        if size > self._max_bytes:
            # A process that writes anything else to the pipe would seem to announce a huge frame.
            raise BrokenChannel(f"a frame of {size} bytes")
        end = FRAME_HEADER.size + size
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[FRAME_HEADER.size : end])
        del self._incoming[:end]
        return body

    def _read_available(self) -> None:
        """Take what the pipe holds now. Raises :class:`BrokenChannel` at its end."""
        try:
            while True:
                data = os.read(self.read_fd, _CHUNK_BYTES)
                if not data:
                    raise BrokenChannel("end of file")
                self._incoming += data
                # A short read has emptied the pipe. Without this return an end of file right behind the data would be
                # raised before the caller has seen the last frame.
                if len(data) < _CHUNK_BYTES:
                    return
        except BlockingIOError:
            # The pipe is empty, and the other end still open.
            return
        except OSError as error:
            raise BrokenChannel(str(error)) from error


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame of a blocking stream; None at its end."""
    header = stream.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    (size,) = FRAME_HEADER.unpack(header)
    body = stream.read(size)
    if len(body) < size:
        # The writer was killed within the frame.
        return None
    return body


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Write one frame to a blocking stream."""
    stream.write(FRAME_HEADER.pack(len(body)) + body)


def _supervise(command: Sequence[str]) -> None:
    """Run ``command`` in this process's group; kill the group when it ends or when standard input closes."""
    # The command decides what SIGTERM does. A handler and not SIG_IGN, which the command would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)

    def kill_when_input_closes() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os.killpg(0, signal.SIGKILL)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=kill_when_input_closes, daemon=True).start()
    child.wait()
    # Processes that the command left behind, and this one.
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _supervise(sys.argv[1:])
