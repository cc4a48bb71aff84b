"""Run a command in a process group that lives no longer than whoever holds the other end of our standard input.

    python supervise.py COMMAND ...

A run that dies, by whatever signal, closes its end; then the whole group is killed (a server has children of its
own). Standard library only: this file is started as a script, not imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    os.setsid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_holder, daemon=True).start()
    child.wait()
    os.killpg(0, signal.SIGKILL)  # what the command left behind, and this process


def _end_with_the_holder() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
