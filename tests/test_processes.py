"""Child processes: groups that are killed whole, children that end with their parent, frames that never block."""

import os
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


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_ending_a_process_ends_its_whole_group(tmp_path, supervised, how):
    log = tmp_path / "logs" / "child.log"
    child = ChildProcess([*PYTHON, PARENT_WITH_CHILD], log=log, ends_with_parent=supervised)
    wait_for(lambda: log.read_text().endswith("\n"))
    grandchild = int(log.read_text())
    assert child.alive and child.status is None and not child.wait(0.01) and runs(grandchild)
    assert os.getsid(grandchild) == child.pid != os.getsid(0)
    status = child.kill() if how == "kill" else child.terminate(5.0)
    assert status < 0 and not child.alive and not runs(grandchild)


def test_terminate_gives_the_time_to_save_and_then_kills(tmp_path):
    trap = "import signal, sys, time; signal.signal(15, lambda *_: {}); print('ready', flush=True); time.sleep(100)"
    saves = trap.format("(print('saved', flush=True), sys.exit(7))")
    for code, grace_s, status in ((saves, 20.0, 7), (trap.format("print('no', flush=True)"), 0.3, -9)):
        log = tmp_path / f"{status}.log"
        child = ChildProcess([*PYTHON, code], log=log)
        wait_for(lambda log=log: "ready" in log.read_text())
        assert child.terminate(grace_s) == status
    assert "saved" in (tmp_path / "7.log").read_text()


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
    assert child.wait(20) and child.status == 1
    assert child.last_error() == "ValueError: no such model"


def test_frames_pass_whole_and_in_order_without_blocking():
    (read, their_write), (their_read, write) = os.pipe(), os.pipe()
    ours, theirs = (
        FrameChannel(read, write, max_bytes=1 << 24),
        FrameChannel(their_read, their_write, max_bytes=1 << 24),
    )
    large = os.urandom(3_000_000)
    ours.send(large)
    assert ours.unsent, "more than a pipe holds must not block"
    received = None
    while received is None:
        ours.flush()
        received = theirs.receive()
    assert received == large and not ours.unsent
    for body in (b"", b"one", b"two"):
        ours.send(body)
    assert [theirs.receive() for _ in range(4)] == [b"", b"one", b"two", None]
    os.write(their_write, FRAME_HEADER.pack((1 << 24) + 1))
    with pytest.raises(BrokenChannel, match="bytes"):
        ours.receive()
    os.close(write)
    with pytest.raises(BrokenChannel, match="end of file"):
        theirs.receive()
    os.close(their_read)
    for fd in (read, their_write):
        os.close(fd)
