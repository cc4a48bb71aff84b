"""The verifier worker: reads jobs from its standard input, judges them one by one, writes verdicts.

Run by :mod:`kl_comedy.rewards.pool`. It ends with its parent: an idle worker at the end of its input, a
busy one by the kernel's own CPU timer, which needs no Python to run and so stops ``9**9**9`` as well.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pickle
import resource
import signal
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
"""The kernel's timer fires at this multiple of the limit: the parent decides first, while there is one."""


def main(memory_bytes: int, parent: int) -> None:
    """Serve until the input ends, within ``memory_bytes`` of address space, as long as process ``parent`` lives."""
    if sys.platform != "darwin":  # which refuses RLIMIT_AS
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)  # what a library prints must not look like a verdict
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    while (frame := read_frame(jobs)) is not None:
        kind, *arguments = pickle.loads(frame)
        reply = _warm(*arguments) if kind == "warm" else _judge(*arguments)
        # Resident bytes now, not the peak of getrusage: Linux hands the parent's peak on to its children, so a worker
        # of a trainer with gigabytes in memory would look too large from the start.
        usage = {"cpu_s": time.process_time(), "rss_bytes": int(psutil.Process().memory_info().rss)}
        write_frame(replies, json.dumps({**reply, **usage}).encode())
    os._exit(0)  # nothing to clean up, and tearing sympy down takes half a second


def _warm(name: str, origin: str, plugin: str | None) -> dict[str, Any]:
    """Import what defines ``name`` and what it needs, and run its examples once, off the clock."""
    try:
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
    except ModuleNotFoundError as error:
        return {"error": "user", "message": f"reward {name!r} needs the package {error.name!r}, which is not installed"}
    except UserError as error:
        return {"error": "user", "message": str(error)}
    except Exception:
        return {"error": "bug", "message": traceback.format_exc()}
    return {"warmed": name}


def _judge(
    name: str, completion: str, answer: str, meta: Mapping[str, Any], options: dict[str, Any], limit: float
) -> dict[str, Any]:
    """The verdict on one item. After running out of memory the parent replaces this worker: its heap is suspect."""
    signal.setitimer(signal.ITIMER_PROF, ORPHAN_MARGIN * limit + 1.0)  # SIGPROF's default action is to terminate
    try:
        reward = normalized(REWARDS.get(name).fn(completion, answer, meta, **options), name=name)
    except MemoryError:
        return {"value": 0.0, "status": "refused", "parts": {}, "out_of_memory": True}
    except BadGold as error:
        return {"value": 0.0, "status": "refused", "parts": {}, "bad_gold": str(error)}
    except UserError as error:
        return {"error": "user", "message": f"reward {name!r}: {error}"}
    except Exception:
        return {"error": "bug", "message": traceback.format_exc()}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return {"value": reward.value, "status": reward.status, "parts": dict(reward.parts)}


def _exit_with_parent(parent: int) -> None:
    """End this process soon after its parent has ended, for functions that wait rather than compute."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
