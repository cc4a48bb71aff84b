"""Child processes: groups that are killed whole, children that end with their parent, frames that never block."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from kl_comedy.processes import FRAME_HEADER, BrokenChannel, ChildProcess, FrameChannel

PYTHON = [sys.executable, "-c"]
PARENT_WITH_CHILD = (
    "import subprocess as s, time; p = s.Popen(['sleep', '100']); print(p.pid, flush=True); time.sleep(100)"
)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture
def start_with_child(tmp_path):
    """Start a process that starts another; the process and the number of the other."""

    def start(ends_with_parent):
        log = tmp_path / "logs" / "child.log"
        child = ChildProcess([*PYTHON, PARENT_WITH_CHILD], log=log, ends_with_parent=ends_with_parent)
        wait_for(lambda: log.read_text().endswith("\n"))
        return child, int(log.read_text())

    return start


supervised_or_not = pytest.mark.parametrize("ends_with_parent", [False, True], ids=["alone", "supervised"])


@supervised_or_not
def test_a_running_process_has_no_status_and_a_session_of_its_own(start_with_child, ends_with_parent):
    child, grandchild = start_with_child(ends_with_parent)
    try:
        assert child.alive
        assert child.status is None
        assert not child.wait(0.01)
        assert runs(grandchild)
        assert os.getsid(grandchild) == child.pid
        assert child.pid != os.getsid(0)
    finally:
        child.kill()


@supervised_or_not
@pytest.mark.parametrize("end", [ChildProcess.kill, lambda child: child.terminate(5.0)], ids=["kill", "terminate"])
def test_ending_a_process_ends_its_whole_group(start_with_child, ends_with_parent, end):
    child, grandchild = start_with_child(ends_with_parent)
    assert end(child) < 0, "ended by a signal"
    assert not child.alive
    assert not runs(grandchild)


ON_TERMINATE = """
import signal, sys, time
def handle(*_):
    {handler}
signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
time.sleep(100)
"""


def start_ready(log, handler):
    """A process that does this when it is asked to end."""
    child = ChildProcess([*PYTHON, ON_TERMINATE.format(handler=handler)], log=log)
    wait_for(lambda: "ready" in log.read_text())
    return child


def test_terminate_gives_the_time_to_save(tmp_path):
    log = tmp_path / "child.log"
    # Half a second: without a wait it would be killed before it has saved.
    child = start_ready(log, "time.sleep(0.5); print('saved', flush=True); sys.exit(7)")
    assert child.terminate(20.0) == 7
    assert "saved" in log.read_text()


def test_terminate_kills_what_does_not_end_in_time(tmp_path):
    child = start_ready(tmp_path / "child.log", "print('no', flush=True)")
    assert child.terminate(0.3) == -signal.SIGKILL


def test_a_supervised_child_ends_when_its_parent_is_killed(tmp_path):
    log = tmp_path / "child.log"
    script = textwrap.dedent(
        f"""
        import pathlib, sys, time
        from kl_comedy.processes import ChildProcess
        child = ChildProcess([sys.executable, "-c", {PARENT_WITH_CHILD!r}], log=pathlib.Path({str(log)!r}),
                             ends_with_parent=True)
        time.sleep(100)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: not runs(grandchild))


def test_the_last_error_of_the_log_is_reported(tmp_path):
    child = ChildProcess([*PYTHON, "raise ValueError('no such model')"], log=tmp_path / "child.log")
    assert child.wait(20)
    assert child.status == 1
    assert child.last_error() == "ValueError: no such model"


# --- frames -------------------------------------------------------------------------------------------------------
MAX_BYTES = 1 << 24


class Pipes:
    """Two channels to each other in one process, with the descriptors that they are made of."""

    def __init__(self):
        self.read, self.their_write = os.pipe()
        self.their_read, self.write = os.pipe()
        self.ours = FrameChannel(self.read, self.write, max_bytes=MAX_BYTES)
        self.theirs = FrameChannel(self.their_read, self.their_write, max_bytes=MAX_BYTES)

    def close(self):
        for descriptor in (self.read, self.their_write, self.their_read, self.write):
            with contextlib.suppress(OSError):  # a test has closed it
                os.close(descriptor)


@pytest.fixture
def pipes():
    pipes = Pipes()
    yield pipes
    pipes.close()


def test_a_frame_larger_than_a_pipe_passes_whole_without_blocking(pipes):
    large = os.urandom(3_000_000)
    pipes.ours.send(large)
    assert pipes.ours.unsent, "more than a pipe holds must not block"
    received = None
    while received is None:
        pipes.ours.flush()
        received = pipes.theirs.receive()
    assert received == large
    assert not pipes.ours.unsent


def test_frames_pass_in_order(pipes):
    for body in (b"", b"one", b"two"):
        pipes.ours.send(body)
    assert [pipes.theirs.receive() for _ in range(4)] == [b"", b"one", b"two", None]


def test_a_frame_over_the_limit_breaks_the_channel(pipes):
    os.write(pipes.their_write, FRAME_HEADER.pack(MAX_BYTES + 1))
    with pytest.raises(BrokenChannel, match="bytes"):
        pipes.ours.receive()


def test_the_end_of_a_channel_breaks_it(pipes):
    os.close(pipes.write)
    with pytest.raises(BrokenChannel, match="end of file"):
        pipes.theirs.receive()
