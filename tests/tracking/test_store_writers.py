"""Twenty runs that log into one store at the same time lose nothing: SQLite, and PostgreSQL behind an MLflow server.

PostgreSQL is skipped where it is missing (Debian: apt-get install postgresql) or psycopg2 is (psycopg2-binary).
"""

import contextlib
import importlib.util
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kl_comedy.errors import RunFailed
from kl_comedy.processes import free_port
from kl_comedy.slurm.manifest import Manifest
from kl_comedy.slurm.submit import create_stores
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.runs import history, runs_frame

WRITERS = 20
STEPS = 40
METRICS = 5


def manifest(folder, *stores):
    return Manifest(
        name="many",
        directory=str(folder),
        stores=stores,
        base="",
        base_sha256="",
        package_version="",
        plugins=(),
        evaluate=None,
        max_parallel=None,
        cells=(),
    )


def write_runs(uri, folder):
    """Log twenty runs from twenty processes at once."""
    create_stores(manifest(folder, (uri, "many"), ("none", "many")))
    create_stores(manifest(folder, (uri, "many")))  # a second time changes nothing

    def write(name):
        config = SimpleNamespace(uri=uri, experiment="many", tags={"sweep": "many"})
        logger = RunLogger(config, run_dir=folder / name, params={"seed": name}, tags={})
        for step in range(1, STEPS + 1):
            logger.log_metrics({f"train/m{n}": float(step * n) for n in range(METRICS)}, step)
            if step % 5 == 0:
                logger.commit(step)
        logger.finish()
        assert logger._uploader._retry_at == 0.0, "the store never failed"

    children = [multiprocessing.get_context("fork").Process(target=write, args=(str(n),)) for n in range(WRITERS)]
    for child in children:
        child.start()
    for child in children:
        child.join(550)
    assert [child.exitcode for child in children] == [0] * WRITERS
    frame = runs_frame(uri, "many")
    assert sorted(frame["params.seed"], key=int) == [str(n) for n in range(WRITERS)]
    for n in range(METRICS):
        curves = history(uri, frame["run_id"], f"train/m{n}")
        assert curves["step"].tolist() == list(range(1, STEPS + 1)) * WRITERS
        assert (curves["value"] == curves["step"] * n).all()


@pytest.mark.slow
def test_twenty_writers_on_sqlite_lose_no_metric(tmp_path):
    write_runs(f"sqlite:///{tmp_path}/store.db", tmp_path)


def test_a_store_that_cannot_be_created_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    sweep = manifest(tmp_path, (f"sqlite:///{tmp_path}/file/store.db", "many"))
    with pytest.raises(RunFailed, match="the results store cannot be created"):
        create_stores(sweep)
    create_stores(replace(sweep, stores=()))


def program(name):
    """A PostgreSQL program; Debian keeps them off the PATH, by version."""
    paths = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if paths:
        return str(paths[-1])
    return shutil.which(name)


def as_postgres(*command):
    """PostgreSQL refuses to run as root."""
    if os.getuid() == 0:
        return ["runuser", "-u", "postgres", "--", *command]
    return list(command)


@pytest.fixture
def database():
    """The address of an empty PostgreSQL database, by password, on a socket in a folder of its own: no port to lose."""
    if program("initdb") is None:
        pytest.skip("no PostgreSQL on this machine; apt-get install postgresql")
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip("no psycopg2 here; pip install psycopg2-binary")
    if os.getuid() == 0 and "postgres" not in [user.pw_name for user in pwd.getpwall()]:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    scratch = subprocess.run(as_postgres("mktemp", "-d"), capture_output=True, text=True, check=True).stdout
    folder = Path(scratch.strip())
    data = str(folder / "data")
    secret = folder / "password"
    log = str(folder / "log")
    subprocess.run(as_postgres("sh", "-c", f"umask 077; echo not-a-secret > {secret}"), check=True)
    options = ["-U", "mlflow", "-A", "scram-sha-256", f"--pwfile={secret}"]
    subprocess.run(as_postgres(program("initdb"), "-D", data, *options), check=True, capture_output=True)
    control = as_postgres(program("pg_ctl"), "-D", data, "-w", "-t", "300")
    subprocess.run([*control, "-l", log, "-o", f"-h '' -k {folder}", "start"], check=True)
    try:
        address = "postgresql://mlflow:not-a-secret@/{}?host=" + str(folder)
        subprocess.run([program("createdb"), f"--maintenance-db={address.format('postgres')}", "kl_comedy"], check=True)
        yield address.format("kl_comedy").replace("postgresql:", "postgresql+psycopg2:")
    finally:
        subprocess.run([*control, "-m", "fast", "stop"], check=True)  # waits for no client, and for every process
        shutil.rmtree(folder)


@pytest.fixture
def server(database, tmp_path):
    """The address of an MLflow server over the database, as docs/clusters.md starts it."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # another process may take the port before the server does
            port = free_port()
            uri = f"http://127.0.0.1:{port}"
            options = [
                "--backend-store-uri",
                database,
                "--artifacts-destination",
                str(tmp_path / "artifacts"),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--workers",
                "2",
            ]
            with (tmp_path / "server.log").open("wb") as log:
                command = [sys.executable, "-m", "mlflow", "server", *options]
                process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(kill_group, process.pid)
            if answers(uri, process):
                break
        else:
            pytest.fail((tmp_path / "server.log").read_text())
        yield uri


def kill_group(leader):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def answers(uri, process, seconds=400):
    """Wait until the server is healthy; False where it has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{uri}/health", timeout=60).status == 200:
                return True
        time.sleep(0.2)
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_writers_through_a_server_on_postgres_lose_no_metric(server, tmp_path, monkeypatch):
    """A run gives a server ten seconds and a second try, then spools for a minute; twenty at once on a busy machine may
    wait longer, and the test is about what arrives."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "300")
    write_runs(server, tmp_path)
