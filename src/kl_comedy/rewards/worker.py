"""The verifier worker: reads jobs from its standard input, judges them one by one, writes verdicts.

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
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from kl_comedy.errors import UserError
from kl_comedy.processes import read_frame, write_frame
from kl_comedy.registry import REWARDS, load_plugin_file
from kl_comedy.rewards.base import BadGold, example_call, normalized

ORPHAN_MARGIN = 2.0
"""The kernel's limit is this multiple of an item's: the parent decides first, while there is one."""
FILE_BYTES = 16 << 20
"""No file of a worker may be larger."""
MORE_TASKS = 64
"""How many threads and processes beyond those it starts with a worker's user may have (root is exempt)."""
LIMITS_REACHED = (errno.EFBIG, errno.EAGAIN, errno.ENOMEM)
PR_SET_CHILD_SUBREAPER = 36

_helpers = False
"""Whether what defines a reward has started processes of its own, so that one that is there need not be an answer's."""


def main(memory_bytes: int) -> None:
    """Serve until the input ends, within ``memory_bytes`` of address space."""
    if sys.platform != "darwin":  # which refuses RLIMIT_AS
        _limit(resource.RLIMIT_AS, memory_bytes)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
    _limit(resource.RLIMIT_NPROC, _tasks() + MORE_TASKS)
    with contextlib.suppress(OSError, AttributeError):  # Linux: orphans of our children become ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    jobs, replies = os.fdopen(_hidden(0), "rb"), os.fdopen(_hidden(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)  # what a library prints must not look like a verdict
    threading.Thread(target=_exit_with_parent, args=(jobs.fileno(),), daemon=True).start()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    while (frame := read_frame(jobs)) is not None:
        nonce, kind, *arguments = pickle.loads(frame)
        if kind == "judge":  # nothing that an answer makes us print is shown
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
        reply = _reply(kind, *arguments)
        write_frame(replies, nonce + json.dumps({**reply, **_usage()}).encode())
    os._exit(0)  # nothing to clean up, and tearing sympy down takes half a second


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


def _usage() -> dict[str, Any]:
    """CPU seconds of this process and of its children that have ended; resident bytes now; its number outside.

    Not the peak of getrusage, which Linux hands on from the parent, a large trainer. In a namespace of processes /proc
    still shows the numbers outside.
    """
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    usage = {"cpu_s": time.process_time() + children.ru_utime + children.ru_stime}
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {**usage, "rss_bytes": pages * resource.getpagesize(), "pid": int(os.readlink("/proc/self"))}
    except OSError:
        return {**usage, "rss_bytes": int(psutil.Process().memory_info().rss), "pid": os.getpid()}


def _reply(kind: str, name: str, *arguments: Any) -> dict[str, Any]:
    """The reply to one message; an error is told, not raised."""
    try:
        return _warm(name, *arguments) if kind == "warm" else _judge(name, *arguments)
    except ModuleNotFoundError as error:
        return {"error": "user", "message": f"reward {name!r} needs the package {error.name!r}, which is not installed"}
    except UserError as error:
        return {"error": "user", "message": f"reward {name!r}: {error}"}
    except Exception:
        return {"error": "bug", "message": traceback.format_exc()}


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
    """The verdict on one item. Where it is ``suspect``, the parent replaces this worker: its memory or files are."""
    soft = math.ceil(_usage()["cpu_s"] + ORPHAN_MARGIN * limit) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))  # SIGXCPU's default action is to terminate
    refused = {"value": 0.0, "status": "refused", "parts": {}}
    try:
        reward = normalized(REWARDS.get(name).fn(completion, answer, meta, **options), name=name)
    except MemoryError:
        return {**refused, "suspect": True}
    except OSError as error:
        if error.errno in LIMITS_REACHED:
            return {**refused, "suspect": True}
        raise
    except BadGold as error:
        return {**refused, "bad_gold": str(error)}
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
    if not _helpers and _children_left():
        return {**refused, "suspect": True}
    return {"value": reward.value, "status": reward.status, "parts": dict(reward.parts)}


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
