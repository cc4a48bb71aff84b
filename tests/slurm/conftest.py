"""A throw-away SLURM for the tests of this folder, skipped with the reason where there can be none."""

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_cluster.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
ACCOUNTING = ("slurmdbd", "mariadbd", "sacct")


def need(programs):
    """Skip, or fail where KL_COMEDY_NEED_SLURM says that a cluster is expected here."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if os.getuid() != 0:
        reason = "a throw-away SLURM needs root (slurmd starts jobs as their users)"
    elif missing:
        reason = f"no {', '.join(missing)} on this machine; scripts/test_cluster.sh install"
    else:
        return
    if os.environ.get("KL_COMEDY_NEED_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


def port_block(held):
    """The first of a block of ports that nobody uses; the block is ours while the lock file in ``held`` is open."""
    for base in range(17000, 31000, 200):
        lock = open(Path(tempfile.gettempdir()) / f"kl_comedy_cluster_{base}.lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for offset in (*range(3), *range(11, 15)):
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", base + offset))
        except OSError:
            lock.close()
            continue
        held.append(lock)
        return base
    raise AssertionError("no free block of ports between 17000 and 31000")


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory):
    """A function that starts a cluster and returns the environment its commands need; all are stopped at the end."""
    started, held = [], []

    def start(*, accounting=False, nodes=2):
        need((*PROGRAMS, *(ACCOUNTING if accounting else ())))
        environment = {
            **os.environ,
            "CLUSTER_ROOT": str(tmp_path_factory.mktemp("cluster") / "c"),
            "PORT_BASE": str(port_block(held)),
            "NODES": str(nodes),
            "CPUS": "4",
            "ACCOUNTING": "1" if accounting else "0",
        }
        started.append(environment)
        up = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stderr
        return {**os.environ, "SLURM_CONF": f"{environment['CLUSTER_ROOT']}/slurm.conf"}

    yield start
    for environment in started:
        subprocess.run([SCRIPT, "down"], env=environment, capture_output=True, timeout=120)
    for lock in held:
        lock.close()


@pytest.fixture(scope="session")
def cluster(start_cluster):
    return start_cluster(nodes=3)
