"""An empty PostgreSQL database, and MLflow servers over any store, for the length of a ``with`` block.

PostgreSQL is skipped where it is missing (Debian: apt-get install postgresql) or psycopg2 is (psycopg2-binary).
"""

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kl_comedy.processes import free_port


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


@contextlib.contextmanager
def empty_postgres():
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


@contextlib.contextmanager
def mlflow_server(store, folder, *options):
    """The address of an MLflow server over ``store``, which logs to ``folder``; ``options`` are more of its command."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # another process may take the port before the server does
            port = free_port()
            uri = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, *options]
            command += ["--host", "127.0.0.1", "--port", str(port)]
            with (folder / "server.log").open("wb") as log:
                process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(_kill_group, process.pid)
            if _answers(uri, process):
                break
        else:
            pytest.fail((folder / "server.log").read_text())
        yield uri


def _kill_group(leader):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _answers(uri, process, seconds=400):
    """Wait until the server is healthy; False where it has ended."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{uri}/health", timeout=60).status == 200:
                return True
        time.sleep(0.2)
    return False
