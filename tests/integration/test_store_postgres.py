"""The documented store of a cluster: PostgreSQL behind an MLflow server; twenty writers at once lose nothing.

Skipped where there is no PostgreSQL (Debian: apt-get install postgresql) or no psycopg2 (pip install psycopg2-binary).
"""

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from test_sweep_store import METRICS, STEPS, WRITER, WRITERS

from kl_comedy.slurm.manifest import Manifest
from kl_comedy.slurm.submit import create_stores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def program(name):
    """A PostgreSQL program; Debian keeps them off the PATH, by version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def as_postgres(*words):
    """PostgreSQL refuses to run as root."""
    return ["runuser", "-u", "postgres", "--", *words] if os.getuid() == 0 else list(words)


def wait_for(what, seconds):
    deadline = time.monotonic() + seconds
    while not what():
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
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "2",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
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


def test_twenty_writers_through_a_server_on_postgres_lose_no_metric(tracking, postgres, tmp_path):
    planned = Manifest(
        name="many",
        directory=str(tmp_path),
        base="",
        base_sha256="",
        plugins=(),
        evaluate=None,
        max_parallel=None,
        stores=((tracking, "many"),),
        package_version="",
        cells=(),
    )
    create_stores(planned)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, tracking, str(tmp_path / str(n)), str(n), str(STEPS), str(METRICS)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(WRITERS)
    ]
    said = [child.communicate(timeout=800)[1] for child in children]
    assert [child.returncode for child in children] == [0] * WRITERS, said
    assert said == [""] * WRITERS
    import psycopg2

    with psycopg2.connect(postgres) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*), count(distinct run_uuid) from metrics where key like 'train/m%'")
        assert cursor.fetchone() == (WRITERS * STEPS * METRICS, WRITERS)
        cursor.execute(
            "select count(*) from metrics m join params p using (run_uuid) where p.key = 'seed'"
            " and m.key like 'train/m%' and m.value = m.step * substr(m.key, 8)::int"
        )
        assert cursor.fetchone() == (WRITERS * STEPS * METRICS,)
