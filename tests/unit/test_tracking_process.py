"""Which processes count as dead."""

import os
import subprocess
import sys

from kl_comedy.tracking import provenance as process


def test_this_process_lives():
    assert process.is_dead(process.process_tags()) is False


def test_a_process_that_ended_is_dead():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process.is_dead({**process.process_tags(), process.PID: str(child.pid)}) is True


def test_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.is_dead({**process.process_tags(), process.PID: str(child.pid)}) is True
    child.wait()


def test_a_reused_pid_is_dead():
    tags = process.process_tags()
    assert process.is_dead({**tags, process.START: str(float(tags[process.START]) - 100)}) is True


def test_another_host_or_container_cannot_be_judged():
    tags = {**process.process_tags(), process.PID: "999999999"}
    assert process.is_dead(tags) is True
    assert process.is_dead({**tags, process.HOST: "elsewhere"}) is None
    assert process.is_dead({**tags, process.NAMESPACE: "pid:[1]"}) is None
    assert process.is_dead({}) is None
    assert process.is_dead({**tags, process.PID: "?"}) is None
