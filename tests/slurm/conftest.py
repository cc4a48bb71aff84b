"""A throw-away SLURM for the tests of this folder, skipped with the reason where there can be none."""

import os
import shutil
import subprocess
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


@pytest.fixture(scope="session")
def start_cluster(tmp_path_factory):
    """A function that starts a cluster and returns the environment its commands need; all are stopped at the end."""
    started = []

    def start(*, port, accounting=False, nodes=2):
        need((*PROGRAMS, *(ACCOUNTING if accounting else ())))
        environment = {
            **os.environ, "CLUSTER_ROOT": str(tmp_path_factory.mktemp("cluster") / "c"), "PORT_BASE": str(port),
            "NODES": str(nodes), "ACCOUNTING": "1" if accounting else "0",
        }  # fmt: skip
        started.append(environment)
        up = subprocess.run([SCRIPT, "up"], env=environment, capture_output=True, text=True, timeout=120)
        assert up.returncode == 0, up.stderr
        return {**os.environ, "SLURM_CONF": f"{environment['CLUSTER_ROOT']}/slurm.conf"}

    yield start
    for environment in started:
        subprocess.run([SCRIPT, "down"], env=environment, capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def cluster(start_cluster):
    return start_cluster(port=17600)
