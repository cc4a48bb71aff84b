"""The verifier worker: reads jobs from its standard input, judges them one by one, writes verdicts.

    trainer --frames--> worker (imports what rewards need, judges nothing) --fork--> judge (one at a time)

The judge reads the jobs and writes the verdicts itself. Where an answer has made its state doubtful the trainer kills
it, and the worker forks another within milliseconds; a new interpreter takes seconds to import sympy. Where the imports
of a reward have started threads or processes, which a fork would not have, the worker judges by itself.

It ends with its parent: an idle worker at the end of its input, a waiting one when the pipe closes, a busy one by the
kernel's limit on CPU time, which needs no Python to run and so stops ``9**9**9`` as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import json
import logging
import math
import os
import pickle
import resource
import secrets
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from kl_comedy.errors import UserError
from kl_comedy.processes import read_frame, write_frame
from kl_comedy.records import Problem
from kl_comedy.registry import ENVIRONMENTS, KINDS, REWARDS, load_plugin_file
from kl_comedy.rewards.base import JUDGE_ENDED, MAX_REPLY, BadGold, described, example_call, normalized
from kl_comedy.rewards.environments import checked_step

ORPHAN_MARGIN = 2.0
"""The kernel's limit is this multiple of an item's: the parent decides first, as long as it lives."""
FILE_BYTES = 16 << 20
"""The largest file that a worker may write."""
MORE_TASKS = 64
"""How many more threads and processes the worker's user may have than at its start: the limit of a fork bomb. The
kernel exempts root."""
REFUSED: dict[str, Any] = {"value": 0.0, "status": "refused", "parts": {}}
LIMITS_REACHED = (errno.EFBIG, errno.EAGAIN, errno.ENOMEM)
# Numbers of <linux/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
EXITED_BY_ITSELF = 64
"""The exit status of a judge that ends because the next message is for the worker. An answer's exit() gives others."""
MESSAGE_CHARS = 4_000
"""How many characters of a traceback's end are sent."""

_helpers = False
"""Whether the imports of a reward have started processes of their own, so that a child need not be an answer's."""
_cpu_before_fork_s = 0.0
"""In a judge: CPU seconds of the worker and of earlier judges, so that the trainer reads one clock that only rises."""


def main(memory_bytes: int) -> None:
    """Serve until the input ends, within ``memory_bytes`` of address space."""
    _limit_resources(memory_bytes)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # An answer that runs code writes to descriptors 0 to 2 first. The pipes move to numbers that it would have to
    # guess, and what a library prints must not look like a verdict.
    jobs = os.fdopen(_hidden(0), "rb")
    replies = os.fdopen(_hidden(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    threading.Thread(target=_exit_with_parent, args=(jobs.fileno(),), daemon=True).start()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    forks = False
    while (frame := read_frame(jobs)) is not None:
        # Unpickling is safe: the frame comes from the trainer, and the answer in it is a plain str.
        nonce, kind, *arguments = pickle.loads(frame)
        if kind == "judge" and forks:
            _fork_judge(frame, jobs, replies, nowhere)
            continue
        if kind == "judge":
            _silence(nowhere)
        reply = _reply(kind, *arguments)
        if kind == "warm":
            forks = _may_fork()
            reply = {**reply, "forks": forks}
        _send(replies, nonce, reply)
    # Nothing to clean up, and tearing sympy down takes half a second.
    os._exit(0)


def _limit_resources(memory_bytes: int) -> None:
    """What an answer may take from the machine. The hard limits are lowered too, so that no code can raise them."""
    if sys.platform != "darwin":
        # macOS refuses RLIMIT_AS.
        _limit(resource.RLIMIT_AS, memory_bytes)
    # A crash of 4 GB of address space would fill the disk with its core.
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_NPROC, _tasks() + MORE_TASKS)


def _fork_judge(frame: bytes, jobs: BinaryIO, replies: BinaryIO, nowhere: int) -> None:
    """Fork a judge for this job and those that follow; returns when it has ended and nothing of it is left unread."""
    global _cpu_before_fork_s
    _cpu_before_fork_s = _cpu_seconds()
    pid = os.fork()
    if pid == 0:
        try:
            _serve_as_judge(frame, jobs, replies, nowhere)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    # The worker's own clock counts ended children itself.
    _cpu_before_fork_s = 0.0
    if os.waitstatus_to_exitcode(status) == EXITED_BY_ITSELF:
        return
    # It was killed, or made to exit. The trainer sends nothing before it has the notice below, so what is in the pipe
    # belongs to an old job. Non-blocking, because a read from an empty pipe would wait for a trainer that waits for us.
    os.set_blocking(jobs.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while os.read(jobs.fileno(), 1 << 16):
            pass
    os.set_blocking(jobs.fileno(), True)
    write_frame(replies, JUDGE_ENDED)


def _serve_as_judge(frame: bytes, jobs: BinaryIO, replies: BinaryIO, nowhere: int) -> None:
    """Judge until the trainer asks for anything else; never returns."""
    # Dies with the worker, and adopts what an answer has daemonized, so that a kill finds it among the descendants.
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A fork has only the thread that called it.
    threading.Thread(target=_exit_with_parent, args=(jobs.fileno(),), daemon=True).start()
    _silence(nowhere)
    current: bytes | None = frame
    while current is not None:
        nonce, kind, *arguments = pickle.loads(current)
        if kind != "judge":
            # Imports are the worker's, so that later judges have them too.
            _send(replies, nonce, {"again": True})
            break
        _send(replies, nonce, _reply(kind, *arguments))
        current = read_frame(jobs)
    os._exit(EXITED_BY_ITSELF)


def _send(replies: BinaryIO, nonce: bytes, reply: dict[str, Any]) -> None:
    """Write one reply with the nonce of its question; a reply that the trainer would not read becomes a failure."""
    body = json.dumps({**reply, **_usage()}).encode()
    if len(body) > MAX_REPLY:
        failure = {**REFUSED, "failed": f"the verdict takes {len(body)} bytes, allowed are {MAX_REPLY}"}
        body = json.dumps({**failure, **_usage()}).encode()
    write_frame(replies, nonce + body)


def _silence(nowhere: int) -> None:
    """Drop whatever an answer makes this process print, which may be gigabytes or terminal escapes."""
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _may_fork() -> bool:
    """Whether a fork is whole: this process is only its main thread and the one of :func:`_exit_with_parent`."""
    try:
        tasks = len(os.listdir("/proc/self/task"))
    except OSError:
        # Not Linux: a fork after imports of system libraries is not safe on macOS.
        return False
    return tasks == 2 and not _helpers


def _prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux: adopt orphans of our children, or get a signal when the parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit(kind: int, value: int) -> None:
    """Set the soft and the hard limit to ``value``, or to today's hard limit where that is lower."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _tasks() -> int:
    """Threads of all processes of this user: what RLIMIT_NPROC counts."""
    tasks = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                tasks += process.num_threads()
    return tasks


def _hidden(fd: int) -> int:
    """A copy of ``fd`` under a number that nothing else knows; not inherited by other programs."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16 + secrets.randbelow(200))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _usage() -> dict[str, Any]:
    """CPU seconds of this process and of its children that have ended; resident bytes now; its process id outside.

    Not the peak of getrusage, which Linux hands on from the parent, a large trainer. In a process namespace /proc still
    shows the ids outside.
    """
    cpu_s = _cpu_before_fork_s + _cpu_seconds()
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss_bytes = pages * resource.getpagesize()
        pid = int(os.readlink("/proc/self"))
    except OSError:
        rss_bytes = int(psutil.Process().memory_info().rss)
        pid = os.getpid()
    return {"cpu_s": cpu_s, "rss_bytes": rss_bytes, "pid": pid}


def _reply(kind: str, table: str, name: str, *arguments: Any) -> dict[str, Any]:
    """The reply to one message. No error is raised; each is in a reply."""
    if kind == "ping":
        # The trainer has killed the judge and what it had started. Its orphans are now our zombies, to wait for.
        _children_left()
        return {}
    part = f"{table.removesuffix('s')} {name!r}"
    try:
        if kind == "warm":
            return _warm(table, name, *arguments)
        if table == ENVIRONMENTS.kind:
            return _answer(name, *arguments)
        return _judge(name, *arguments)
    except ModuleNotFoundError as error:
        return {"error": "user", "message": f"{part} needs the package {error.name!r}, which is not installed"}
    except UserError as error:
        return {"error": "user", "message": f"{part}: {str(error)[-MESSAGE_CHARS:]}"}
    except Exception:
        return {"error": "bug", "message": traceback.format_exc()[-MESSAGE_CHARS:]}


def _warm(table: str, name: str, origin: str, plugin: str | None) -> dict[str, Any]:
    """Import what defines ``name`` and what it needs, and run its examples once, off the clock."""
    importlib.import_module("kl_comedy.rewards")
    if plugin is not None:
        load_plugin_file(Path(plugin), check_names=False)
    elif name not in KINDS[table]:
        importlib.import_module(origin)
    entry = KINDS[table].get(name)
    for module in entry.facts.get("imports", ()):
        importlib.import_module(module)
    for example in entry.facts.get("examples", ()):
        entry.fn(*example_call(example), **example.get("options", {}))
    global _helpers
    _helpers = _helpers or _children_left()
    return {}


def _judge(
    name: str, completion: str, answer: str, meta: Mapping[str, Any], options: dict[str, Any], limit: float
) -> dict[str, Any]:
    """The verdict on one item."""

    def judge() -> dict[str, Any]:
        reward = normalized(REWARDS.get(name).fn(completion, answer, meta, **options), name=name)
        return {"value": reward.value, "status": reward.status, "parts": dict(reward.parts)}

    return _contained(judge, limit)


def _answer(
    name: str, problem: Problem, text: str, state: str | None, options: dict[str, Any], limit: float
) -> dict[str, Any]:
    """An environment's answer to one turn of the policy, in the fields of a verdict and of :class:`Step`."""

    def answer() -> dict[str, Any]:
        entry = ENVIRONMENTS.get(name)
        environment = entry.fn(**options)
        state_now = environment.reset(problem) if state is None else json.loads(state)
        step = checked_step(environment.step(state_now, text), entry)
        return {
            "value": 0.0,
            "status": "ok",
            "parts": dict(step.parts),
            "observation": step.observation,
            "done": step.done,
            "state": json.dumps(step.state),
        }

    return _contained(answer, limit)


def _contained(judge: Callable[[], dict[str, Any]], limit: float) -> dict[str, Any]:
    """What ``judge`` returns. ``suspect`` asks the trainer to replace this judge, whose state may be damaged.

    Whatever it raises is the verdict ``failed``: a text must not end the run. Only a :class:`UserError`, which says
    that options or meta cannot work, is raised.
    """
    # The kernel ends a judge whose parent is gone, also inside one long C call: SIGXCPU's default action is to end the
    # process. Only the soft limit is set, so that it can be raised again for the next item.
    soft = math.ceil(time.process_time() + ORPHAN_MARGIN * limit) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    try:
        reply = judge()
    except BadGold as error:
        return {**REFUSED, "bad_gold": str(error)[:MESSAGE_CHARS]}
    except UserError:
        raise
    except BaseException as error:
        # SystemExit and KeyboardInterrupt too: an answer may make the verifier raise anything.
        return {**REFUSED, "failed": described(error)[-MESSAGE_CHARS:], "suspect": _leaves_doubt(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    # A process that an answer has left behind would run beside the items that follow.
    if not _helpers and _children_left():
        return {**REFUSED, "suspect": True}
    return reply


def _leaves_doubt(error: BaseException) -> bool:
    """Whether the process may be unsound after ``error``: out of stack, memory, files, or made to exit.

    Cleanup may then have failed halfway (sympy switches evaluation off and on again, for example).
    """
    if isinstance(error, OSError):
        return error.errno in LIMITS_REACHED
    out_of_resources = isinstance(error, RecursionError | MemoryError | SystemError)
    made_to_exit = not isinstance(error, Exception)
    return out_of_resources or made_to_exit


def _children_left() -> bool:
    """Whether a child of this process still runs; those that have ended are waited for."""
    try:
        # waitpid returns pid 0 while children run, and raises where there is none.
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def _exit_with_parent(jobs: int) -> None:
    """End this process when its parent has ended, for functions that wait rather than compute."""
    closed = select.poll()
    # No events are asked for: POLLHUP is always reported.
    closed.register(jobs, 0)
    closed.poll()
    # An idle worker reads what is left and ends by itself.
    time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
