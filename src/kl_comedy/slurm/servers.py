"""Inference servers beside a trainer, in one allocation: each task of a step starts one and says where it answers.

    servers' step:  python -m kl_comedy.slurm.servers -- vllm serve MODEL --port {port}   ->  DIR/0.url, DIR/1.url
    trainer's step: kl-comedy cell SWEEP 3                                      <-  KL_COMEDY_SERVER_URLS

DIR is KL_COMEDY_SERVERS_DIR, on a file system that both see. The trainer's end, the file DIR/done, ends the servers.
Starting and placing is srun's work; what the servers compute and how weights reach them is the rollout backend's.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from kl_comedy.errors import RunFailed

DIRECTORY, COUNT, URLS = "KL_COMEDY_SERVERS_DIR", "KL_COMEDY_SERVERS_COUNT", "KL_COMEDY_SERVER_URLS"
KEY = "VLLM_API_KEY"
"""Holds the servers' key, in their environment and in the trainer's."""
POLL_S = 0.25
GRACE_S = 10.0
"""How long a server may take to end by itself when the trainer has."""


def await_servers() -> list[str]:
    """In the trainer: wait until every server of the job answers, and put their addresses into the environment.

    Without servers in this job, an empty list at once. Raises :class:`RunFailed` when one gave up; each gives up by
    itself when its time is over, so this needs no clock of its own.
    """
    if DIRECTORY not in os.environ:
        return []
    folder, count = Path(os.environ[DIRECTORY]), int(os.environ[COUNT])
    while True:
        for file in sorted(folder.glob("*.failed")):
            raise RunFailed(f"server {file.stem} of this job {file.read_text().strip()}; the job's log says more")
        found = [folder / f"{index}.url" for index in range(count)]
        if all(file.exists() for file in found):
            urls = [file.read_text().strip() for file in found]
            os.environ[URLS] = ",".join(urls)
            return urls
        time.sleep(POLL_S)


def serve(words: Sequence[str], *, folder: Path, index: int, host: str, ready: str, wait_s: float) -> int:
    """Run one server until the trainer is done; its address is in ``folder`` once ``ready`` answers.

    SIGUSR1, by which SLURM tells a whole job that its time is nearly over, is ignored here and in the server: the
    trainer still needs it for the update at hand. Returns 0 when the trainer ended first, else the server's code.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    port = _free_port(host)
    url = f"http://{host}:{port}"
    known = {"{port}": str(port), "{host}": host, "{index}": str(index)}
    server = subprocess.Popen([_filled(word, known) for word in words], stdin=subprocess.DEVNULL)
    try:
        told = False
        deadline = time.monotonic() + wait_s
        while not (folder / "done").exists():
            if server.poll() is not None:
                _say(folder, index, "failed", f"ended with code {server.returncode}")
                return server.returncode or 1
            if not told and _answers(url + ready):
                _say(folder, index, "url", url)
                told = True
            if not told and time.monotonic() > deadline:
                _say(folder, index, "failed", f"did not answer {ready} within {wait_s:g} s")
                return 1
            time.sleep(POLL_S)
        return 0
    finally:
        _end(server)


def _filled(word: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        word = word.replace(name, value)
    return word


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {os.environ.get(KEY, '')}"})
    try:
        with urllib.request.urlopen(asked, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _say(folder: Path, index: int, what: str, text: str) -> None:
    draft = folder / f".{index}.{what}.tmp"
    draft.write_text(text + "\n")
    draft.replace(folder / f"{index}.{what}")


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main(arguments: Sequence[str]) -> int:
    """The servers' step: one call is one server, numbered by SLURM_PROCID."""
    parser = argparse.ArgumentParser(prog="python -m kl_comedy.slurm.servers", description=main.__doc__)
    parser.add_argument("--reachable", action="store_true", help="bind to this host's address, for other nodes")
    parser.add_argument("--ready", default="/health", help="the path that answers when the server is up")
    parser.add_argument("--wait", type=float, default=600, help="seconds it may take")
    parser.add_argument("words", nargs="+", help="the server's command")
    given = parser.parse_args(arguments)
    return serve(
        given.words,
        folder=Path(os.environ[DIRECTORY]),
        index=int(os.environ.get("SLURM_PROCID", "0")),
        host=socket.gethostname() if given.reachable else "127.0.0.1",
        ready=given.ready,
        wait_s=given.wait,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
