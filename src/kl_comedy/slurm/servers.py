"""Inference servers beside a trainer, in one allocation: each task of a step starts one and publishes its address.

    servers' step:  python -m kl_comedy.slurm.servers --cell SWEEP 3    ->  DIR/0.url, DIR/1.url
    trainer's step: kl-comedy cell SWEEP 3                              <-  KL_COMEDY_SERVER_URLS

Each server writes its output to a file beside the job's log.

DIR is KL_COMEDY_SERVERS_DIR, on a shared file system. When the trainer ends, the file DIR/done ends the servers. With
``--cell`` the command comes from the cell's config; ``-- COMMAND --port {port}`` starts a command of your own.
srun starts and places them; how weights reach them is the rollout backend's concern.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import atomic_write
from kl_comedy.processes import LOOPBACK, ChildProcess, free_port, last_error_line

DIRECTORY = "KL_COMEDY_SERVERS_DIR"
"""The folder in which the two steps of a job see each other's files."""
COUNT = "KL_COMEDY_SERVERS_COUNT"
URLS = "KL_COMEDY_SERVER_URLS"
"""The addresses of the servers, with commas; the rollout backend reads it."""
WAIT_S = "KL_COMEDY_SERVERS_WAIT_S"
"""Seconds that a server may take to answer (the profile's ``servers.wait_seconds``)."""
JOB_LOG = "KL_COMEDY_JOB_LOG"
"""The output of the whole job. A server writes to a file of its own beside it."""
DEFAULT_WAIT_S = 600.0
STEP_START_S = 120.0
"""How long the other step of the job may take to start, beyond :data:`WAIT_S`: srun and the imports on a busy shared
file system. Without a limit a job of which one step never starts would hold its GPUs idle until its time is up."""
TRAINER = "trainer"
"""The file that says that the trainer's step has started."""
DONE = "done"
"""The file that says that it has ended; the batch script writes it."""
KEY = "VLLM_API_KEY"
"""Holds the servers' key, in their environment and in the trainer's."""
POLL_S = 0.25
GRACE_S = 5.0
"""How long a server may take to end by itself after SIGTERM."""

Environment = Mapping[str, str] | None
Command = Callable[[int], tuple[Sequence[str], Environment]]
"""Given a port, the words and the environment (None: this one) of a server on it. May raise :class:`UserError`."""


@dataclass(frozen=True, kw_only=True)
class ServerTask:
    """One task of the servers' step: which server it runs, and where and how soon that must answer."""

    folder: Path
    """The folder of :data:`DIRECTORY`."""
    index: int
    host: str
    ready: str
    """The path that answers when the server is up."""
    wait_s: float
    """Seconds that the server may take until then."""

    @property
    def log(self) -> Path:
        return log_file(self.folder, self.index)

    @property
    def trainer_has_started(self) -> bool:
        return (self.folder / TRAINER).exists()

    @property
    def trainer_has_ended(self) -> bool:
        return (self.folder / DONE).exists()

    def publish(self, url: str) -> None:
        """Tell the trainer the address."""
        # Whole or not at all: the trainer reads the file as soon as it exists.
        atomic_write(_url_file(self.folder, self.index), url + "\n", private=True)

    def fail(self, reason: str) -> None:
        """Tell the trainer why there is no server; its run ends with this message."""
        atomic_write(self.folder / f"{self.index}.failed", f"{reason}\n")


def _url_file(folder: Path, index: int) -> Path:
    return folder / f"{index}.url"


def await_servers() -> list[str]:
    """In the trainer: wait until every server of the job answers, and put their addresses into the environment.

    Without servers in this job, an empty list at once. Raises :class:`RunFailed` with the reason when one failed, and
    when one is not there after its own limit and :data:`STEP_START_S`.
    """
    if DIRECTORY not in os.environ:
        return []
    folder = Path(os.environ[DIRECTORY])
    # The servers' step may hold what the trainer's step needs to start, and gives up when it does not see this file.
    (folder / TRAINER).touch()
    files = [_url_file(folder, index) for index in range(int(os.environ[COUNT]))]
    # The servers give up first, after WAIT_S, and say why; this is for those that cannot say anything.
    limit_s = float(os.environ.get(WAIT_S, DEFAULT_WAIT_S)) + STEP_START_S
    deadline = time.monotonic() + limit_s
    while True:
        missing = [index for index, file in enumerate(files) if not file.exists()]
        if not missing:
            break
        # One failure is enough: the trainer needs all servers, and waiting would only hold their GPUs.
        for file in sorted(folder.glob("*.failed")):
            raise RunFailed(f"server {file.stem} of this job {file.read_text().strip()}")
        if time.monotonic() > deadline:
            raise RunFailed(f"server {missing[0]} of this job {_why_missing(folder, missing[0], limit_s)}")
        time.sleep(POLL_S)
    urls = [file.read_text().strip() for file in files]
    os.environ[URLS] = ",".join(urls)
    return urls


def _why_missing(folder: Path, index: int, limit_s: float) -> str:
    """What is known about a server that neither published its address nor reported a failure."""
    log = log_file(folder, index)
    if log.exists():
        return f"did not answer within {limit_s:g} s: {_log_says(log)}"
    return f"was not started within {limit_s:g} s; {_srun_says()}"


def _srun_says() -> str:
    return f"what srun waits for is in {os.environ.get(JOB_LOG, 'the log of the job')}"


def log_file(folder: Path, index: int) -> Path:
    """Where a server writes: beside the log of its job, or in ``folder`` where no job's script names one.

    Each start of a job has a file of its own, so that an error of an earlier one is not taken for the reason.
    """
    if JOB_LOG not in os.environ:
        return folder / f"{index}.log"
    job_log = Path(os.environ[JOB_LOG])
    number = str(index)
    # A requeued job has the same id, and its log the same name.
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if restart > 0:
        number = f"{index}.restart-{restart}"
    return job_log.with_name(f"{job_log.stem}.server-{number}.log")


def _log_says(log: Path) -> str:
    return f"{last_error_line(log.read_text(errors='replace').splitlines())} (log: {log})"


def serve(command: Command, task: ServerTask, prepare: Callable[[str], None] | None = None) -> int:
    """Run one server until the trainer is done; publish its address once it answers and ``prepare(url)`` has returned.

    A server that ends afterwards is started again on the same port; the trainer waits for it and sends its weights.
    SIGUSR1 and SIGTERM, which SLURM sends to every process of a job before its time limit or its preemption, are
    ignored here and by a server without a handler of its own (vLLM ends at SIGTERM): the trainer still needs it for
    the current update. Returns 0 when the trainer ended first, else the server's code, or 1 or 2 for what is reported
    in the task's folder.
    """
    # The server inherits it.
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # On the node itself, where other jobs may use any port that a file could name.
    port = free_port(task.host)
    url = f"http://{task.host}:{port}"
    try:
        words, environment = command(port)
    except UserError as error:
        task.fail(f"cannot be started: {error}")
        return 2

    deadline = time.monotonic() + task.wait_s
    log = task.log
    server = ChildProcess(words, env=environment, log=log)
    try:
        code = _publish_when_ready(server, url, task, deadline, prepare)
        if code is not None:
            return code
        while not task.trainer_has_ended:
            if not server.alive:
                # It has ended; this ends the workers that it left behind, which still hold the GPU.
                code = server.kill()
                print(f"server {task.index} ended with code {code}; starting it again", file=sys.stderr, flush=True)
                server = ChildProcess(words, env=environment, log=log)
            trainer_is_late = time.monotonic() > deadline + STEP_START_S
            if trainer_is_late and not task.trainer_has_started:
                # The trainer's srun may wait for what this step holds. When this step has ended it starts, and reports.
                task.fail(f"was ended, because the trainer did not start; {_srun_says()}")
                return 1
            time.sleep(POLL_S)
        return 0
    finally:
        server.terminate(GRACE_S)


def _publish_when_ready(
    server: ChildProcess, url: str, task: ServerTask, deadline: float, prepare: Callable[[str], None] | None
) -> int | None:
    """Wait until the server answers, then publish its address. The exit code of the task where that cannot be."""
    while not task.trainer_has_ended:
        if not server.alive:
            task.fail(f"ended with code {server.status}: {_log_says(task.log)}")
            # A server that ends before it answers has failed, whatever code it ends with.
            return server.status or 1
        if _answers(url + task.ready):
            try:
                if prepare is not None:
                    prepare(url)
            except Exception as error:
                # It answers, and is not one of our servers.
                task.fail(f"answers, and takes no weights: {error} (log: {task.log})")
                return 1
            task.publish(url)
            return None
        if time.monotonic() > deadline:
            task.fail(f"did not answer {task.ready} within {task.wait_s:g} s: {_log_says(task.log)}")
            return 1
        time.sleep(POLL_S)
    return 0


def _answers(url: str) -> bool:
    # The guard of RequireKey is on every route, the one that reports health too.
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {os.environ.get(KEY, '')}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def filled_in(words: Sequence[str], host: str, index: int, port: int) -> tuple[Sequence[str], Environment]:
    """``words`` with port, host and index in their places.

    >>> filled_in(["vllm", "serve", "--port", "{port}"], "localhost", 0, 8000)[0]
    ['vllm', 'serve', '--port', '8000']
    """
    # Replaced and not formatted: a command may hold other braces, such as JSON.
    values = {"{port}": str(port), "{host}": host, "{index}": str(index)}
    for placeholder, value in values.items():
        words = [word.replace(placeholder, value) for word in words]
    return words, None


def cell_command(sweep: Path, cell: int, folder: Path, host: str, port: int) -> tuple[Sequence[str], Environment]:
    """The command of a server for a cell, by its config. Raises :class:`UserError` where its run uses no server."""
    from kl_comedy.registry import load_plugin_file
    from kl_comedy.rollouts.engines.jobs import job_server
    from kl_comedy.slurm.manifest import read_sweep

    loaded = read_sweep(sweep)
    # The config may name parts that the plugins register, and loading it checks every name.
    for plugin in loaded.manifest.plugins:
        load_plugin_file(Path(plugin))
    config = loaded.read_config(loaded.cell(cell).index)
    words, environment = job_server(config, folder, host=host, port=port)
    return [sys.executable, *words], environment


def _expect_weights(url: str) -> None:
    from kl_comedy.rollouts.engines.jobs import expect_weights

    expect_weights(url, os.environ.get(KEY))


def main(arguments: Sequence[str]) -> int:
    """Run one server of the step, numbered by SLURM_PROCID."""
    parser = argparse.ArgumentParser(prog="python -m kl_comedy.slurm.servers", description=main.__doc__)
    parser.add_argument("--reachable", action="store_true", help="bind to this host's address, for other nodes")
    parser.add_argument("--ready", default="/health", help="the path that answers when the server is up")
    parser.add_argument("--wait", type=float, default=DEFAULT_WAIT_S, help="seconds it may take")
    parser.add_argument("--cell", nargs=2, metavar=("SWEEP", "INDEX"), help="start what this cell's config asks for")
    parser.add_argument("words", nargs="*", help="the server's command, without --cell")
    given = parser.parse_args(arguments)
    # Servers beside the trainer answer this node alone: nobody else should reach the routes that take weights.
    host = LOOPBACK
    if given.reachable:
        host = socket.gethostname()
    index = int(os.environ.get("SLURM_PROCID", "0"))
    folder = Path(os.environ[DIRECTORY])
    task = ServerTask(folder=folder, index=index, host=host, ready=given.ready, wait_s=given.wait)
    if given.cell is None:
        return serve(partial(filled_in, given.words, host, index), task)
    sweep, cell = given.cell
    command = partial(cell_command, Path(sweep), int(cell), folder / f"{index}.model", host)
    return serve(command, task, prepare=_expect_weights)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
