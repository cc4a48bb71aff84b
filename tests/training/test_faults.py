"""Faults injected for real into a training run: a full disk, a store's server killed, a clock that jumps.

The rows of docs/faults.md name these tests. What is lost must be nothing: the weights and the metric points of a run
that was hurt and went on are those of a run nobody hurt.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from itertools import pairwise

import pytest

import training_runs
from commands import Command, assert_resumed
from kl_comedy.errors import RunFailed
from kl_comedy.processes import free_port
from kl_comedy.tracking import logger as logger_module
from kl_comedy.training.callbacks import CheckpointCallback
from training_runs import metrics_of

STEPS = 6
SETTINGS = [f"train.steps={STEPS}", "train.eval_every=0", "train.threads=1", "train.keep_checkpoints=3", "resume=auto"]


def go(folder, *overrides):
    return training_runs.go(folder, *SETTINGS, *overrides)


def bits(done):
    return (done.run.policy / "model.safetensors").read_bytes()


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """What a run leaves that nobody hurt."""

    bits: bytes
    metrics: dict


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    done = go(tmp_path_factory.mktemp("undisturbed"))
    return Undisturbed(bits(done), metrics_of(done.run))


def assert_undisturbed(done, undisturbed):
    assert bits(done) == undisturbed.bits
    assert metrics_of(done.run) == undisturbed.metrics


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MB: room for the three checkpoints that are kept and a policy, until something fills it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on_when_there_is_room(small_disk, monkeypatch, undisturbed):
    save = CheckpointCallback.save

    def filled_at_five(self, trainer, version):
        if version == 5:
            with open(small_disk / "somebody_elses", "wb") as file:
                free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
                file.write(b"\0" * (free - 100_000))
        save(self, trainer, version)

    monkeypatch.setattr(CheckpointCallback, "save", filled_at_five)
    message = r"checkpoint of update 5 cannot be written \(No space left on device\); .* update 4"
    with pytest.raises(RunFailed, match=message):
        go(small_disk)
    (folder,) = small_disk.glob("tiny-*")
    assert json.loads((folder / "summary.json").read_text())["status"] == "FAILED"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000002.ckpt", "step-00000003.ckpt", "step-00000004.ckpt"]
    monkeypatch.undo()
    (small_disk / "somebody_elses").unlink()
    done = go(small_disk)
    assert_resumed(small_disk, at=4)
    assert_undisturbed(done, undisturbed)


def test_a_clock_that_jumps_back_changes_no_weight_and_loses_no_point(tmp_path, monkeypatch, undisturbed):
    from kl_comedy.tracking.store import connect

    uri = f"sqlite:///{tmp_path}/store.db"
    clocks = {"time": time.time, "time_ns": time.time_ns}
    calls = []

    def jumping(name, back):
        """The clock ``name``, which jumps back after the 20th look at any clock."""

        def read():
            calls.append(name)
            now = clocks[name]()
            if len(calls) > 20:
                return now - back
            return now

        return read

    monkeypatch.setattr(time, "time", jumping("time", 3600))
    monkeypatch.setattr(time, "time_ns", jumping("time_ns", 3600 * 10**9))
    done = go(tmp_path, f"tracking.uri={uri}")
    monkeypatch.undo()
    assert len(calls) > 30
    assert done.summary["seconds"] > 0
    assert_undisturbed(done, undisturbed)
    times_ms = [json.loads(line)["time"] for line in (done.run.path / "spool.jsonl").read_text().splitlines()]
    largest_jump_ms = min(later - earlier for earlier, later in pairwise(times_ms))
    assert largest_jump_ms < -3_000_000, "it did not jump by an hour less some minutes"
    assert points(connect(uri), done.summary["run_id"]) == undisturbed.metrics


def points(client, run_id):
    """The metric points in a store, as :func:`metrics_of` gives those of a run."""
    stored = {}
    for name in client.get_run(run_id).data.metrics:
        if name.startswith("time/"):
            continue
        for point in client.get_metric_history(run_id, name):
            stored[point.step, name] = point.value
    return stored


KILLS = 10


def ended_within(process, seconds):
    """Whether the command ends by itself in this time."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.poll() is not None


def check_whole(folder, undisturbed):
    """The run of ``folder`` has the undisturbed one's bits, and each of its points once, also in a usable store."""
    from kl_comedy.results.runs import runs_frame
    from kl_comedy.tracking.store import connect

    done = go(folder, f"tracking.uri=sqlite:///{folder}/store.db")
    assert done.already_finished
    assert_undisturbed(done, undisturbed)
    uri = done.summary["mlflow_uri"]
    run_id = done.summary["run_id"]
    client = connect(uri)
    assert points(client, run_id) == undisturbed.metrics
    for name in client.get_run(run_id).data.metrics:
        steps = [point.step for point in client.get_metric_history(run_id, name)]
        assert len(steps) == len(set(steps)), f"{name} has a point twice"
    frame = runs_frame(uri)
    assert frame["run_id"].tolist() == [run_id]
    assert frame["status"].tolist() == ["FINISHED"]
    client.log_metric(run_id, "another", 1.0)  # it can be written to
    assert not list(folder.glob("*half-made*"))
    assert len(list(folder.glob("tiny-*"))) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a dozen starts and as many stores
def test_ten_kills_at_random_moments_cost_no_bit_no_point_and_no_store(tmp_path, undisturbed):
    """Each start is killed within the time that a whole run takes: while it loads, creates the store, trains, uploads.

    Runs that end before they are killed are checked, and the next one begins in a new folder with a new store.
    """

    def start(folder):
        folder.mkdir(exist_ok=True)
        settings = [f"output={folder}", f"tracking.uri=sqlite:///{folder}/store.db", *SETTINGS]
        return Command("train", training_runs.TINY, *settings, cwd=folder)

    # The server of forks starts with the first command, and its imports are no part of a run.
    Command("--version", cwd=tmp_path).finish()
    began = time.monotonic()
    start(tmp_path / "whole").finish()
    whole_s = time.monotonic() - began
    check_whole(tmp_path / "whole", undisturbed)
    chance = random.Random(0)
    kills = 0
    number = 0
    while kills < KILLS:  # a run that is killed over and over comes further each time, so folders are few
        folder = tmp_path / f"killed-{number}"
        began = time.monotonic()
        process = start(folder)
        if ended_within(process, chance.uniform(0, whole_s)):
            process.finish()
            # The machine may have been busier before: with longer times few runs would be killed.
            whole_s = min(whole_s, time.monotonic() - began)
            check_whole(folder, undisturbed)
            number += 1
        else:
            process.kill()
            kills += 1
    start(folder).finish()
    check_whole(folder, undisturbed)


SERVER = """
import os, sys
from mlflow import server
os.environ[server.BACKEND_STORE_URI_ENV_VAR] = sys.argv[1]
os.environ[server.ARTIFACT_ROOT_ENV_VAR] = "artifacts"
server.app.run(host="127.0.0.1", port=int(sys.argv[2]), threaded=True)
"""
"""What `mlflow server` serves, without its launcher: one process and one import instead of three."""


class Server:
    """An MLflow server over a SQLite file, in a process of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [sys.executable, "-c", SERVER, f"sqlite:///{self.folder}/store.db", str(self.port)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 180
        while not self._up():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.2)

    def _up(self):
        """Whether it answers; the first answer creates the tables."""
        url = f"{self.uri}/api/2.0/mlflow/experiments/search"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=b'{"max_results": 1}', headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=120).status == 200
        except OSError:
            return False

    def kill(self):
        """The server, the only process of its session."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
def test_a_killed_mlflow_server_costs_no_update_and_no_point(tmp_path, monkeypatch, undisturbed, caplog):
    from kl_comedy.tracking import sync
    from kl_comedy.tracking.store import connect

    server = Server(tmp_path)
    server.start()
    save = CheckpointCallback.save

    def killed_at_four(self, trainer, version):
        if version == 4:
            server.kill()
        save(self, trainer, version)

    monkeypatch.setattr(CheckpointCallback, "save", killed_at_four)
    monkeypatch.setattr(logger_module, "FLUSH_EVERY", 1)
    try:
        done = go(tmp_path, f"tracking.uri={server.uri}")
        monkeypatch.undo()
        assert_undisturbed(done, undisturbed)
        warnings = [record for record in caplog.records if "results sync" in record.getMessage()]
        assert len(warnings) == 1
        server.start()
        points_before = points(connect(server.uri), done.summary["run_id"])
        assert max(step for step, _ in points_before) == 3, "what came after the kill is not there yet"
        sync(done.run.path)
        assert points(connect(server.uri), done.summary["run_id"]) == undisturbed.metrics
    finally:
        server.kill()
