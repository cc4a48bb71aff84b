"""Inference servers beside a trainer, in one allocation: each task of a step starts one and publishes its address.

    servers' step:  python -m kl_comedy.slurm.servers -- vllm serve MODEL --port {port}   ->  DIR/0.url, DIR/1.url
    trainer's step: kl-comedy cell SWEEP 3                                      <-  KL_COMEDY_SERVER_URLS

DIR is KL_COMEDY_SERVERS_DIR, on a shared file system. When the trainer ends, the file DIR/done ends the servers.
srun starts and places them; how weights reach them is the rollout backend's concern.
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
from kl_comedy.io import atomic_write

DIRECTORY, COUNT, URLS = "KL_COMEDY_SERVERS_DIR", "KL_COMEDY_SERVERS_COUNT", "KL_COMEDY_SERVER_URLS"
KEY = "VLLM_API_KEY"
"""Holds the servers' key, in their environment and in the trainer's."""
POLL_S = 0.25
GRACE_S = 10.0
"""How long a server may take to end by itself after SIGTERM."""


def await_servers() -> list[str]:
    """In the trainer: wait until every server of the job answers, and put their addresses into the environment.

    Without servers in this job, an empty list at once. Raises :class:`RunFailed` when one failed; each fails by
    itself when its time is over, so this needs no timeout of its own.
    """
    if DIRECTORY not in os.environ:
        return []
    folder, count = Path(os.environ[DIRECTORY]), int(os.environ[COUNT])
    while True:
        for file in sorted(folder.glob("*.failed")):
            raise RunFailed(f"server {file.stem} of this job {file.read_text().strip()}; the job's log says more")
        files = [folder / f"{index}.url" for index in range(count)]
        if all(file.exists() for file in files):
            urls = [file.read_text().strip() for file in files]
            os.environ[URLS] = ",".join(urls)
            return urls
        time.sleep(POLL_S)


def serve(words: Sequence[str], *, folder: Path, index: int, host: str, ready: str, wait_s: float) -> int:
    """Run one server until the trainer is done; its address is in ``folder`` once ``ready`` answers.

    SIGUSR1, which SLURM sends to the whole job before its time limit, is ignored here and in the server: the
    trainer still needs it for the current update. Returns 0 when the trainer ended first, else the server's code.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    port = _free_port(host)
    url = f"http://{host}:{port}"
    server = subprocess.Popen(
        [word.replace("{port}", str(port)).replace("{host}", host).replace("{index}", str(index)) for word in words],
        stdin=subprocess.DEVNULL,
    )
    try:
        published = False
        deadline = time.monotonic() + wait_s
        while not (folder / "done").exists():
            if server.poll() is not None:
                atomic_write(folder / f"{index}.failed", f"ended with code {server.returncode}\n")
                return server.returncode or 1
            if not published and _answers(url + ready):
                atomic_write(folder / f"{index}.url", url + "\n")
                published = True
            if not published and time.monotonic() > deadline:
                atomic_write(folder / f"{index}.failed", f"did not answer {ready} within {wait_s:g} s\n")
                return 1
            time.sleep(POLL_S)
        return 0
    finally:
        _end(server)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _answers(url: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {os.environ.get(KEY, '')}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
        try:
            server.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main(arguments: Sequence[str]) -> int:
    """Run one server of the step, numbered by SLURM_PROCID."""
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
