"""The verifier worker: reads jobs from its standard input, judges them one by one, writes verdicts.

    trainer --frames--> worker (imports what rewards need, judges nothing) --fork--> judge (one at a time)

The judge reads the jobs and writes the verdicts itself. Where an answer has made its state doubtful the trainer kills
it, and the worker forks another within milliseconds: a new interpreter takes seconds to import sympy. Where what a
reward imports has started threads or processes, which a fork would not have, the worker judges by itself.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from kl_comedy.errors import UserError
from kl_comedy.processes import read_frame, write_frame
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards.base import JUDGE_ENDED, MAX_REPLY, BadGold, described, example_call, normalized

ORPHAN_MARGIN = 2.0
"""The kernel's limit is this multiple of an item's: the parent decides first, while there is one."""
FILE_BYTES = 16 << 20
"""No file of a worker may be larger."""
MORE_TASKS = 64
"""How many threads and processes beyond those it starts with a worker's user may have (root is exempt)."""
REFUSED = {"value": 0.0, "status": "refused", "parts": {}}
LIMITS_REACHED = (errno.EFBIG, errno.EAGAIN, errno.ENOMEM)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LEFT = 64
"""The exit status of a judge that leaves by itself."""
MESSAGE_CHARS = 4_000
"""Of a traceback, its end."""

_helpers = False
"""Whether what defines a reward has started processes of its own, so that one that is there need not be an answer's."""
_cpu_before_fork_s = 0.0
"""In a judge: CPU seconds of the worker and of earlier judges, so that the trainer reads one clock that only rises."""


def main(memory_bytes: int) -> None:
    """Serve until the input ends, within ``memory_bytes`` of address space."""
    if sys.platform != "darwin":  # which refuses RLIMIT_AS
        _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_NPROC, _tasks() + MORE_TASKS)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    jobs, replies = os.fdopen(_hidden(0), "rb"), os.fdopen(_hidden(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # what a library prints must not look like a verdict
    threading.Thread(target=_exit_with_parent, args=(jobs.fileno(),), daemon=True).start()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    forks = False
    while (frame := read_frame(jobs)) is not None:
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
    os._exit(0)  # nothing to clean up, and tearing sympy down takes half a second


def _fork_judge(frame: bytes, jobs: BinaryIO, replies: Any, nowhere: int) -> None:
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
    _cpu_before_fork_s = 0.0
    if os.waitstatus_to_exitcode(status) == LEFT:
        return
    # It was killed, or made to exit. The trainer sends nothing before it has the notice below, so what is in the pipe
    # belongs to an old job.
    os.set_blocking(jobs.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        while os.read(jobs.fileno(), 1 << 16):
            pass
    os.set_blocking(jobs.fileno(), True)
    write_frame(replies, JUDGE_ENDED)


def _serve_as_judge(frame: bytes, jobs: BinaryIO, replies: Any, nowhere: int) -> None:
    """Judge until the trainer asks for anything else; never returns."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    threading.Thread(target=_exit_with_parent, args=(jobs.fileno(),), daemon=True).start()
    _silence(nowhere)
    current: bytes | None = frame
    while current is not None:
        nonce, kind, *arguments = pickle.loads(current)
        if kind != "judge":  # imports are the worker's, so that later judges have them too
            _send(replies, nonce, {"again": True})
            break
        _send(replies, nonce, _reply(kind, *arguments))
        current = read_frame(jobs)
    os._exit(LEFT)


def _send(replies: Any, nonce: bytes, reply: dict[str, Any]) -> None:
    body = json.dumps({**reply, **_usage()}).encode()
    if len(body) > MAX_REPLY:
        failure = {**REFUSED, "failed": f"the verdict takes {len(body)} bytes, allowed are {MAX_REPLY}"}
        body = json.dumps({**failure, **_usage()}).encode()
    write_frame(replies, nonce + body)


def _silence(nowhere: int) -> None:
    """Nothing that an answer makes this process print is shown."""
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _may_fork() -> bool:
    """Whether a fork is whole: this process is only its main thread and the one of :func:`_exit_with_parent`."""
    try:
        tasks = len(os.listdir("/proc/self/task"))
    except OSError:  # no Linux: a fork after imports of system libraries is not safe on macOS
        return False
    return tasks == 2 and not _helpers


def _prctl(option: int, value: int) -> None:
    """On Linux: of orphans of our children become ours, or a signal when the parent ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _tasks() -> int:
    """Threads of all processes of this user: what RLIMIT_NPROC counts."""
    tasks = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            tasks += process.num_threads() if process.uids().real == os.getuid() else 0
    return tasks


def _hidden(fd: int) -> int:
    """A copy of ``fd`` under a number that nothing else knows; not inherited by other programs."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16 + secrets.randbelow(200))


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _usage() -> dict[str, Any]:
    """CPU seconds of this process and of its children that have ended; resident bytes now; its number outside.

    Not the peak of getrusage, which Linux hands on from the parent, a large trainer. In a namespace of processes /proc
    still shows the numbers outside.
    """
    usage: dict[str, Any] = {"cpu_s": _cpu_before_fork_s + _cpu_seconds()}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {**usage, "rss_bytes": pages * resource.getpagesize(), "pid": int(os.readlink("/proc/self"))}
    except OSError:
        return {**usage, "rss_bytes": int(psutil.Process().memory_info().rss), "pid": os.getpid()}


def _reply(kind: str, name: str, *arguments: Any) -> dict[str, Any]:
    """The reply to one message; no error is raised, none is lost."""
    if kind == "ping":  # the trainer has killed the judge and what it had started, which is now ours to wait for
        _children_left()
        return {}
    try:
        return _warm(name, *arguments) if kind == "warm" else _judge(name, *arguments)
    except ModuleNotFoundError as error:
        return {"error": "user", "message": f"reward {name!r} needs the package {error.name!r}, which is not installed"}
    except UserError as error:
        return {"error": "user", "message": f"reward {name!r}: {str(error)[-MESSAGE_CHARS:]}"}
    except Exception:
        return {"error": "bug", "message": traceback.format_exc()[-MESSAGE_CHARS:]}


def _warm(name: str, origin: str, plugin: str | None) -> dict[str, Any]:
    """Import what defines ``name`` and what it needs, and run its examples once, off the clock."""
    importlib.import_module("kl_comedy.rewards")
    if plugin is not None:
        load_plugin_file(Path(plugin), check_names=False)
    elif name not in REWARDS:
        importlib.import_module(origin)
    entry = REWARDS.get(name)
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
    """The verdict on one item. Where it is ``suspect``, the trainer replaces this judge: its memory or files are.

    Whatever the reward raises is the verdict ``failed``: a text must not end the run. Only a :class:`UserError`, which
    says that options or meta cannot work, is raised.
    """
    soft = math.ceil(time.process_time() + ORPHAN_MARGIN * limit) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))  # SIGXCPU's default action is to terminate
    try:
        reward = normalized(REWARDS.get(name).fn(completion, answer, meta, **options), name=name)
    except BadGold as error:
        return {**REFUSED, "bad_gold": str(error)[:MESSAGE_CHARS]}
    except UserError:
        raise
    except BaseException as error:
        return {**REFUSED, "failed": described(error)[-MESSAGE_CHARS:], "suspect": _leaves_doubt(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    if not _helpers and _children_left():
        return {**REFUSED, "suspect": True}
    return {"value": reward.value, "status": reward.status, "parts": dict(reward.parts)}


def _leaves_doubt(error: BaseException) -> bool:
    """Whether the process may be unsound after ``error``: out of stack, memory, files, or made to exit.

    Cleanup may then have failed halfway (sympy switches evaluation off and on again, for example).
    """
    if isinstance(error, OSError):
        return error.errno in LIMITS_REACHED
    return isinstance(error, RecursionError | MemoryError | SystemError) or not isinstance(error, Exception)


def _children_left() -> bool:
    """Whether a child of this process still runs; those that have ended are waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _exit_with_parent(jobs: int) -> None:
    """End this process when its parent has ended, for functions that wait rather than compute."""
    closed = select.poll()
    closed.register(jobs, 0)  # POLLHUP is always reported
    closed.poll()
    time.sleep(1.0)  # an idle worker reads what is left and ends by itself
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
