"""Servers and cells in forked processes: they begin with everything imported, which takes longer than a tiny run."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

from commands import FORKS
from kl_comedy.cli import main
from kl_comedy.processes import ChildProcess
from kl_comedy.rollouts.engines import hf_server, servers
from kl_comedy.rollouts.engines.options import KEY_VARIABLE
from kl_comedy.slurm import local


class ForkedChild(ChildProcess):
    """In place of a command: ``target(*args)`` in a fork with the same log, process group and signals."""

    def __init__(self, target, args, log):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self.stdin = None
        self.stdout = None
        self._process = self
        # A process of these tests is a fork already and has everything imported: it forks once more.
        context = multiprocessing.get_context("fork") if in_a_fork() else FORKS
        ready, child_end = context.Pipe()
        self._fork = context.Process(target=run, args=(target, args, log, child_end), daemon=True)
        self._fork.start()
        self.returncode = None
        # Until it leads a group of its own: a signal sent to the group earlier would end the tests.
        ready.recv()

    @property
    def pid(self):
        return self._fork.pid

    def poll(self):
        return self._fork.exitcode

    def wait(self, timeout=None):
        if timeout == math.inf:
            timeout = None
        self._fork.join(timeout)
        if self._fork.exitcode is None:
            raise subprocess.TimeoutExpired("child", timeout)
        return self._fork.exitcode


class ForkedServer(ForkedChild):
    """In place of the process that ``hf_server`` starts."""

    def __init__(self, command, *, log, env, ends_with_parent):
        settings = json.loads(command[-1])
        settings["threads"] = 1  # OpenMP's threads do not survive a fork
        parent = None
        if ends_with_parent and in_a_fork():
            parent = os.getpid()
        super().__init__(serve, (settings, env[KEY_VARIABLE], parent), log)


class ForkedCell(ForkedChild):
    """In place of the process that a local sweep starts for a cell, an evaluation or a report."""

    def __init__(self, command, *, log, env, cwd):
        program = command.index("kl_comedy.cli")
        words = command[program + 1 :]
        super().__init__(command_line, (words, cwd), log)


def in_a_fork():
    """Whether this process was forked by a test, and is not the tests' own."""
    return multiprocessing.parent_process() is not None


def serve(settings, key, parent):
    if parent is not None:
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    hf_server.serve(settings, key)


def end_with(parent):
    """As the supervisor of a real server does: kill the group when the rank that started it is gone."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)


def command_line(words, cwd):
    os.chdir(cwd)
    sys.argv = ["kl-comedy", *words]
    main.run()


def run(target, args, log, ready):
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    ready.send(None)
    target(*args)


def install():
    """Start children this way from now on, in this process."""
    servers.ChildProcess = ForkedServer
    local.ChildProcess = ForkedCell


if in_a_fork():  # a rank or a command of a test
    install()
