"""A throw-away SLURM for the tests of this folder, skipped with the reason where there can be none."""

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "research" / "scripts" / "test_cluster.sh"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
ACCOUNTING = ("slurmdbd", "mariadbd", "sacct")
NODES = 3


def missing(programs):
    return [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


def why_there_is_no_cluster(programs):
    """None where there can be one."""
    if os.getuid() != 0:
        return "a throw-away SLURM needs root (slurmd starts jobs as their users)"
    if missing(programs):
        return f"no {', '.join(missing(programs))} on this machine; research/scripts/test_cluster.sh install"
    return None


def need(programs):
    """Skip, or fail where KL_COMEDY_NEED_SLURM says that a cluster is expected here."""
    reason = why_there_is_no_cluster(programs)
    if reason is None:
        return
    if os.environ.get("KL_COMEDY_NEED_SLURM"):
        pytest.fail(reason)
    pytest.skip(reason)


def port_block(locks):
    """The first of a block of ports that nobody uses; the block is ours while the lock file in ``locks`` is open."""
    offsets = [0, 1, 2, 11, 12, 13, 14]  # the controller, accounting and its database; the nodes
    for base in range(17000, 31000, 200):
        lock = open(Path(tempfile.gettempdir()) / f"kl_comedy_cluster_{base}.lock", "w")  # noqa: SIM115
        try:
            # Another suite that starts at the same time sees the same ports free.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for offset in offsets:
                with socket.socket() as probe:
                    probe.bind(("0.0.0.0", base + offset))
        except OSError:
            lock.close()
            continue
        locks.append(lock)
        return base
    raise AssertionError("no free block of ports between 17000 and 31000")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """The environment that the commands of a cluster of three nodes need; with accounting where its programs are."""
    need(PROGRAMS)
    locks = []
    accounting = "0" if missing(ACCOUNTING) else "1"
    environment = os.environ | {
        "CLUSTER_ROOT": str(tmp_path_factory.mktemp("cluster") / "c"),
        "PORT_BASE": str(port_block(locks)),
        "NODES": str(NODES),
        "CPUS": "4",
        "ACCOUNTING": accounting,
    }
    up = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True, timeout=120)
    if up.returncode == 0:
        commands_environment = os.environ | {"SLURM_CONF": f"{environment['CLUSTER_ROOT']}/slurm.conf"}
        # A cell imports in seconds only where the ones before have left their bytecode.
        commands_environment.pop("PYTHONDONTWRITEBYTECODE", None)
        yield commands_environment
    subprocess.run([SCRIPT, "down"], env=environment, capture_output=True, timeout=120)
    locks[0].close()
    assert up.returncode == 0, up.stderr


@pytest.fixture(scope="session")
def revive(cluster):
    """Bring back a node of the cluster whose daemon was killed: later tests need all three."""

    def start_again(node):
        environment = cluster | {"CLUSTER_ROOT": str(Path(cluster["SLURM_CONF"]).parent), "NODES": str(NODES)}
        done = subprocess.run([SCRIPT, "revive", node], env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    return start_again


@pytest.fixture
def accounting(cluster):
    need(ACCOUNTING)
