"""The command line in processes that begin with everything imported: importing takes longer than a tiny run."""

import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from unittest import mock

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "fastapi",
        "kl_comedy.cli.main",
        "kl_comedy.training.run",
        "lightning",
        "matplotlib.backends.backend_svg",
        # With its store: three seconds in every command that tracks, or reads results.
        "mlflow.store.tracking.sqlalchemy_store",
        "pandas",
        "peft",
        "pyarrow.parquet",
        "scipy.stats",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "uvicorn",
    ]
)
DEADLINE_S = 400
WAITS = ("--plugin", str(Path(__file__).with_name("waits.py")))
"""Words of a command that waits as :func:`waits` says.

A run with another plugin is another run: the command that resumes it needs these words too.
Where that is ``train()`` in this process, the command that waits is ``Command(..., modules=["waits"])``.
"""


def waits(at, file="a file that never comes"):
    """The environment of a run that waits after ``at`` updates for ``file`` or a signal: a test that kills it cannot be
    too late."""
    return {"KL_TEST_WAITS_AT": str(at), "KL_TEST_WAITS_FOR": str(file)}


@contextlib.contextmanager
def cpu_limit(seconds):
    """Raise TimeoutError in what takes more CPU time of this process: other work on the machine does not count."""

    def stop(*_):
        raise TimeoutError(f"took more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def kill_after(update, *words, folder, pattern):
    """Run ``kl-comedy *words`` in ``folder`` and kill -9 it when it has saved ``update``: it waits there.

    ``pattern`` finds the run's folder. The config that resumes it is that of ``words``, without a plugin.
    """
    folder.mkdir(exist_ok=True)
    process = Command(*words, cwd=folder, env=waits(update), modules=["waits"])
    process.wait_for(folder, f"{pattern}/checkpoints/step-{update:08d}.ckpt")
    process.kill()
    assert not list(folder.glob(f"{pattern}/summary.json")), "it was not killed in time"


def resumed_at(run):
    """The updates from which the run in the folder ``run`` was resumed, by what it recorded.

    Fails where it never was, where one of them is 0, and where the update after a resume is not the next one.
    """
    updates = []
    next_update = None
    for line in (Path(run) / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        is_resume = event.get("kind") == "tags" and "resume.count" in event["data"]
        is_update = event.get("kind") == "metrics" and "train/loss" in event["data"]
        if is_resume:
            assert int(event["data"]["resume.count"]) == len(updates) + 1
            step = event["data"]["resume.step"]
            if step.isdigit():
                updates.append(int(step))
            else:
                # "None", where no checkpoint could be read: the run began again.
                updates.append(0)
            next_update = updates[-1] + 1
        elif is_update and next_update is not None:
            assert event["step"] == next_update, f"resumed from update {updates[-1]}, then logged {event['step']}"
            next_update = None
    assert updates, f"{run} was never resumed"
    assert min(updates) > 0, f"{run} was resumed from updates {updates}"
    return updates


def assert_resumed(folder, *, at=None):
    """Fails where the one run in ``folder`` was not resumed after an update, or not from update ``at``.

    A test whose "resumed" run is a new one passes whatever a checkpoint leaves out: it ends in the same bits.
    """
    runs = [config.parent for config in Path(folder).glob("*/config.yaml")]
    assert len(runs) == 1, f"a run was resumed as another one: {sorted(run.name for run in runs)}"
    updates = resumed_at(runs[0])
    if at is not None:
        assert updates[-1] == at, f"{runs[0]} was resumed from updates {updates}, not {at}"


def run_here(*words, cwd=".", env=None):
    """``kl-comedy *words`` in this process, under ``env`` alone if given: exit code, stdout, stderr."""
    from kl_comedy.cli import main

    code = 0
    out = io.StringIO()
    err = io.StringIO()
    with (
        contextlib.chdir(cwd),
        mock.patch.dict(os.environ, env or {}, clear=env is not None),
        mock.patch.object(sys, "argv", ["kl-comedy", *map(str, words)]),
        mock.patch.object(main, "_quiet_libraries"),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main.run()
        except SystemExit as end:
            code = end.code or 0
    return code, out.getvalue(), err.getvalue()


class Command:
    """``kl-comedy *words`` in a session of its own, started in ``cwd``; used like a ``subprocess.Popen``.

    If the first word is a Python file, that is run instead. ``modules`` are imported first. What the command prints
    goes to a file in ``cwd``; :attr:`output` reads it.
    """

    def __init__(self, *words, cwd, env=None, modules=()):
        self._log = Path(cwd) / f".output-{time.monotonic_ns()}.txt"
        words = [str(word) for word in words]
        environment = os.environ | (env or {})
        self._process = FORKS.Process(target=_main, args=(words, str(cwd), environment, modules, self._log))
        self._process.start()
        self.pid = self._process.pid

    @property
    def output(self):
        if not self._log.exists():
            return ""
        return self._log.read_text()

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=DEADLINE_S):
        """The exit code; fails, and kills the command with what it started, if it does not end in time.

        The output then ends with the stacks of its threads.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            # faulthandler, which is on in every command, writes the stacks of all threads when it is aborted.
            self.send_signal(signal.SIGABRT)
            self._process.join(10)
            self.kill()
            raise TimeoutError(f"not ended after {timeout} s:\n{self.output}")
        return self._process.exitcode

    def send_signal(self, number):
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self):
        """Kill the command and every process that it started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # gone, or not in its own session yet
            self._process.kill()
        self._process.join()

    def finish(self):
        """Wait for the end; the output. Fails where the exit code is not 0."""
        assert self.wait() == 0, self.output[-3000:]
        return self.output

    def wait_for(self, folder, pattern):
        """Wait until ``folder`` holds a file by ``pattern``."""
        deadline = time.monotonic() + DEADLINE_S
        while not list(Path(folder).glob(pattern)):
            assert self.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.005)


def ranks_environment(rank, world, port, nodes=1):
    """The environment that torchrun gives to a process."""
    devices = world // nodes
    return {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": str(rank // devices),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % devices),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(devices),
    }


def _main(words, cwd, env, modules, log):
    # A session of its own: kill() reaches every process that the command starts, and none of the tests.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    os.chdir(cwd)
    os.environ.clear()  # the server of forks may have been started within a run
    os.environ.update(env)
    program = Path(sys.executable).with_name("kl-comedy")  # which starts the further processes of a run
    sys.argv = [str(program), *words]
    for module in modules:
        __import__(module)
    if words[0].endswith(".py"):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        from kl_comedy.cli.main import run

        run()
