"""Twenty runs that log into one store at the same time lose nothing: SQLite, and PostgreSQL behind an MLflow server.

PostgreSQL is skipped where it is missing (Debian: apt-get install postgresql) or psycopg2 is (psycopg2-binary).
"""

import importlib.util
import multiprocessing
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kl_comedy.errors import RunFailed
from kl_comedy.slurm.manifest import Manifest
from kl_comedy.slurm.submit import create_stores
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.runs import history, runs_frame

WRITERS, STEPS, METRICS = 20, 40, 5


def manifest(folder, *stores):
    texts = dict.fromkeys(("base", "base_sha256", "package_version"), "")
    return Manifest(
        name="many",
        directory=str(folder),
        plugins=(),
        evaluate=None,
        max_parallel=None,
        stores=stores,
        cells=(),
        **texts,
    )


def write_runs(uri, folder):
    """Log twenty runs from twenty processes at once."""
    create_stores(manifest(folder, (uri, "many"), ("none", "many")))
    create_stores(manifest(folder, (uri, "many")))  # a second time changes nothing

    def write(name):
        config = SimpleNamespace(uri=uri, experiment="many", flush_every=5, tags={"sweep": "many"})
        logger = RunLogger.start(config, run_dir=folder / name, run_name=name, params={"seed": name}, tags={})
        for step in range(1, STEPS + 1):
            logger.log_metrics({f"train/m{n}": float(step * n) for n in range(METRICS)}, step)
            if step % 5 == 0:
                logger.commit(step)
        logger.finish()
        assert not logger._warned

    children = [multiprocessing.get_context("fork").Process(target=write, args=(str(n),)) for n in range(WRITERS)]
    for child in children:
        child.start()
    for child in children:
        child.join(550)
    assert [child.exitcode for child in children] == [0] * WRITERS


@pytest.mark.slow
def test_twenty_writers_on_sqlite_lose_no_metric(tmp_path):
    uri = f"sqlite:///{tmp_path}/store.db"
    write_runs(uri, tmp_path)
    frame = runs_frame(uri, "many")
    assert sorted(frame["params.seed"], key=int) == [str(n) for n in range(WRITERS)]
    for n in range(METRICS):
        curves = history(uri, frame["run_id"], f"train/m{n}")
        assert curves["step"].tolist() == list(range(1, STEPS + 1)) * WRITERS
        assert (curves["value"] == curves["step"] * n).all()


def test_a_store_that_cannot_be_created_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    sweep = manifest(tmp_path, (f"sqlite:///{tmp_path}/file/store.db", "many"))
    with pytest.raises(RunFailed, match="the results store cannot be created"):
        create_stores(sweep)
    create_stores(replace(sweep, stores=()))


def program(name):
    """A PostgreSQL program; Debian keeps them off the PATH, by version."""
    paths = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(paths[-1]) if paths else shutil.which(name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_postgres(*words):
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "postgres", "--", *words] if os.getuid() == 0 else list(words)


def wait_for(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    """A database of its own on loopback, by password; its address."""
    if program("initdb") is None:
        pytest.skip("no PostgreSQL on this machine; apt-get install postgresql")
    if importlib.util.find_spec("psycopg2") is None:
        pytest.skip("no psycopg2 here; pip install psycopg2-binary")
    if os.getuid() == 0 and "postgres" not in [user.pw_name for user in pwd.getpwall()]:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    folder = Path(
        subprocess.run(as_postgres("mktemp", "-d"), capture_output=True, text=True, check=True).stdout.strip()
    )
    data, port = folder / "data", free_port()
    secret = folder / "password"
    subprocess.run(as_postgres("sh", "-c", f"umask 077; echo not-a-secret > {secret}"), check=True)
    subprocess.run(
        as_postgres(program("initdb"), "-D", str(data), "-U", "mlflow", "-A", "scram-sha-256", f"--pwfile={secret}"),
        check=True,
        capture_output=True,
    )
    server = subprocess.Popen(
        as_postgres(program("postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder)),
        stderr=(tmp_path_factory.mktemp("pg") / "log").open("wb"),
    )
    address = f"postgresql://mlflow:not-a-secret@127.0.0.1:{port}"
    try:
        ready = [program("pg_isready"), "-h", "127.0.0.1", "-p", str(port)]
        wait_for(lambda: subprocess.run(ready, capture_output=True).returncode == 0, 60)
        subprocess.run([program("createdb"), "--maintenance-db", f"{address}/postgres", "kl_comedy"], check=True)
        yield f"{address}/kl_comedy"
    finally:
        server.terminate()
        server.wait(timeout=60)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tracking(postgres, tmp_path_factory):
    """An MLflow server over it, as docs/clusters.md starts it."""
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    store = postgres.replace("postgresql:", "postgresql+psycopg2:")
    options = f"--backend-store-uri {store} --host 127.0.0.1 --port {port} --workers 2 --artifacts-destination"
    command = [sys.executable, "-m", "mlflow", "server", *options.split(), str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    uri = f"http://127.0.0.1:{port}"

    def up():
        assert server.poll() is None, (folder / "log").read_text()
        try:
            return urllib.request.urlopen(f"{uri}/health", timeout=2).status == 200
        except OSError:
            return False

    try:
        wait_for(up, 180)
        yield uri
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_writers_through_a_server_on_postgres_lose_no_metric(tracking, postgres, tmp_path):
    write_runs(tracking, tmp_path)
    import psycopg2

    with psycopg2.connect(postgres) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*), count(distinct run_uuid) from metrics where key like 'train/m%'")
        assert cursor.fetchone() == (WRITERS * STEPS * METRICS, WRITERS)
        cursor.execute(
            "select count(*) from metrics m join params p using (run_uuid) where p.key = 'seed'"
            " and m.key like 'train/m%' and m.value = m.step * substr(m.key, 8)::int"
        )
        assert cursor.fetchone() == (WRITERS * STEPS * METRICS,)
