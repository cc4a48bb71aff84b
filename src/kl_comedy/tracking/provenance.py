"""Where a run comes from: commit, changes, versions, machine, scheduler, command line; and whether its process lives.

Secrets are never recorded.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import hashlib
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import kl_comedy
from kl_comedy.io import atomic_write
from kl_comedy.plugins import PLUGIN_FILES, PluginSet
from kl_comedy.redaction import redact_command, redact_source

HOST = "process.host"
PID = "process.pid"
START = "process.start"
NAMESPACE = "process.namespace"
FOLDER = "run_folder"
"""The name of the run's folder, by which commands find a run: names of runs are not unique."""
NOTE = "mlflow.note.content"
"""The run's description in MLflow's pages, in Markdown."""
START_TOLERANCE_S = 5.0
"""How far two readings of one process's start may differ; a pid is not reused this fast."""

PACKAGES = (
    "kl_comedy",
    "torch",
    "transformers",
    "lightning",
    "mlflow",
    "peft",
    "datasets",
    "math-verify",
    "omegaconf",
    "numpy",
    "vllm",
    "accelerate",
)
"""Packages whose versions are tags of a run."""

SLURM = {
    "SLURM_JOB_ID": "slurm.job_id",
    "SLURM_ARRAY_JOB_ID": "slurm.array_job_id",
    "SLURM_ARRAY_TASK_ID": "slurm.array_task_id",
    "SLURM_RESTART_COUNT": "slurm.restart_count",
    "SLURM_JOB_NODELIST": "slurm.nodes",
    "SLURM_NTASKS": "slurm.tasks",
}
"""The only environment variables that are read."""

GIT_TIMEOUT_S = 10
MAX_DIFF_CHARACTERS = 2_000_000
"""A longer diff is cut, with a note; its hash is of the whole."""


def process_tags() -> dict[str, str]:
    """The tags that identify this process: host, pid, start (Unix seconds) and pid namespace (containers)."""
    # Linux alone has /proc and namespaces of pids; elsewhere the tag is empty.
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    start = psutil.Process().create_time()
    return {HOST: socket.gethostname(), PID: str(os.getpid()), START: f"{start:.2f}", NAMESPACE: namespace}


def page_tags() -> dict[str, str]:
    """The tags from which MLflow's pages fill the columns Source and Created by."""
    program = Path(sys.argv[0]).name
    # As a module, the program's file is named __main__.py.
    if program == "__main__.py":
        program = "kl-comedy"
    # Python that runs the text after -c, or lines as they are typed, has no file.
    if program in ("-c", ""):
        program = "python"
    source = program
    if program == "kl-comedy" and len(sys.argv) > 1:
        source = f"kl-comedy {redact_command(sys.argv[1:2])}"
    tags = {"mlflow.source.name": source, "mlflow.source.type": "LOCAL"}
    # A container may run as a user without a name.
    with contextlib.suppress(OSError, KeyError, ImportError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


def is_dead(tags: Mapping[str, str]) -> bool | None:
    """Whether the process that ``tags`` names is gone; None where this host cannot tell (another host or container)."""
    here = process_tags()
    if tags.get(HOST) != here[HOST]:
        return None
    # The pids of another container mean other processes.
    if tags.get(NAMESPACE, "") != here[NAMESPACE]:
        return None
    if not tags.get(PID, "").isdigit():
        return None
    try:
        process = psutil.Process(int(tags[PID]))
        # A zombie has ended; its parent has not asked for its exit code yet.
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        if not tags.get(START):
            return False
        # A process that started at another time has the pid again.
        return bool(abs(process.create_time() - float(tags[START])) > START_TOLERANCE_S)
    except psutil.NoSuchProcess:
        return True
    # Not allowed to ask: a run that may be alive is not marked as dead.
    except (psutil.Error, ValueError):
        return False


def mark_dead_runs(client: Any, experiment: str | None = None) -> list[str]:
    """Mark RUNNING runs of this host whose process is gone as FAILED, with the tag ``failure.reason``; their ids.

    ``client`` is an ``MlflowClient``; ``experiment`` a name, or None for every experiment of the store. Runs of
    other hosts are left alone.
    """
    experiments = client.search_experiments()
    if experiment is not None:
        experiments = [item for item in experiments if item.name == experiment]
    ids = [item.experiment_id for item in experiments]
    # A quote would end the text in MLflow's filter.
    host = socket.gethostname().replace("'", "")
    where = f"attributes.status = 'RUNNING' AND tags.`{HOST}` = '{host}'"
    marked = []
    for run in search_runs(client, ids, where):
        if not is_dead(run.data.tags):
            continue
        # Between the search and that look the run may have ended itself, or another process may have resumed it. Its
        # own process is gone and writes no more, so that what the store says now is what it left.
        now = client.get_run(run.info.run_id)
        if now.info.status == "RUNNING" and now.data.tags.get(PID) == run.data.tags[PID]:
            client.set_tag(run.info.run_id, "failure.reason", f"process died (pid {run.data.tags[PID]})")
            client.set_terminated(run.info.run_id, status="FAILED")
            marked.append(run.info.run_id)
    return marked


def search_runs(client: Any, experiment_ids: list[str], where: str = "") -> list[Any]:
    """All active runs of the experiments that match MLflow's filter, through every page, newest first."""
    runs: list[Any] = []
    if not experiment_ids:
        return runs
    token = None
    while True:
        page = client.search_runs(experiment_ids, where, max_results=1000, page_token=token)
        runs += page
        token = page.token or None
        if token is None:
            return runs


def provenance_tags(repo: Path | None = None, *, plugins: PluginSet | None = None) -> dict[str, str]:
    """Tags ``git.*``, ``code.package``, ``plugins``, ``version.*``, ``host.*``, ``slurm.*`` and ``command``.

    ``git.dirty`` is true or false; where true, ``git.diff`` is a hash of the change: the diff of tracked files and
    untracked files of the package. ``repo`` is the checkout whose commit counts; by default the one this package is
    tracked in, if any (an installed package inside someone else's repository does not count). ``code.package`` is a
    hash of the package's files; ``plugins`` has name and hash of each plugin in the argument of that name
    (by default the files that this process loaded), and is absent without any.
    """
    host = {
        "host.python": platform.python_version(),
        "host.platform": platform.platform(),
        "host.cpus": str(os.cpu_count()),
        "host.cpu": _cpu_model(),
        "host.memory_gib": f"{psutil.virtual_memory().total / 2**30:.1f}",
        "host.gpus": _gpu_names(),
    }
    slurm = {tag: os.environ[name] for name, tag in SLURM.items() if os.environ.get(name)}
    # Without the program's folder, which differs from machine to machine.
    command = redact_command([Path(sys.argv[0]).name, *sys.argv[1:]])
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[f"version.{name.replace('-', '_')}"] = importlib.metadata.version(name)
    if plugins is None:
        plugins = PluginSet(files=PLUGIN_FILES)
    git = _git_tags(repo or _package_checkout())
    code = {"code.package": _package_hash(), **plugins.tags()}
    return {**git, **code, **versions, **host, **slurm, "command": command}


def _git_tags(root: Path | None) -> dict[str, str]:
    """The commit of a checkout, whether it was changed, and a hash of the change."""
    commit = _git(root, "rev-parse", "HEAD").strip()
    if not commit:
        return {"git.commit": "unknown", "git.dirty": "unknown"}
    # The last tag has MLflow's own name: its pages show it as the version of the run's code.
    tags = {"git.commit": commit, "git.dirty": "false", "mlflow.source.git.commit": commit}
    change = _local_change(root)
    if change:
        tags["git.dirty"] = "true"
        # Runs are compared by this hash (mixed_code), so it must stay the hash of the whole change, uncut.
        tags["git.diff"] = hashlib.sha256(change.encode("utf-8", "replace")).hexdigest()[:12]
    return tags


def provenance_files(folder: Path, repo: Path | None = None) -> list[Path]:
    """Write what does not fit into tags: ``packages.txt`` (every installed one) and, where dirty, ``code.diff``.

    The diff is of tracked files against the commit, followed by untracked files of the package itself; ``git apply``
    takes it. What looks like a credential is hidden.
    """
    files = {folder / "packages.txt": "\n".join(_installed_packages()) + "\n"}
    change = _local_change(repo or _package_checkout())
    if change:
        diff = redact_source(change[:MAX_DIFF_CHARACTERS])
        if len(change) > MAX_DIFF_CHARACTERS:
            diff += f"\n(cut; {len(change)} characters)\n"
        files[folder / "code.diff"] = diff
    for file, text in files.items():
        atomic_write(file, text.encode("utf-8", "replace"))
    return list(files)


# Both are of what this process imported, so that the first answer is also the right one later.
@functools.cache
def _installed_packages() -> list[str]:
    """Every installed package as NAME==VERSION."""
    packages = {f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}
    return sorted(packages, key=str.lower)


@functools.cache
def _package_hash() -> str:
    """sha256 (first 12 hex digits) of the names and contents of the files of the package."""
    # Runs are compared by this hash (mixed_code): another order or separator would make all code look changed.
    folder = Path(kl_comedy.__file__ or "").parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _local_change(repo: Path | None) -> str:
    """The diff of tracked files against the commit, followed by untracked files of the package."""
    top = _git(repo, "rev-parse", "--show-toplevel").strip()
    if not top:
        return ""
    # Other untracked files of a checkout, such as runs and data, do not change what the code does.
    package = "src/kl_comedy"
    if not (Path(top) / package).is_dir():
        package = "."
    untracked = _git(top, "ls-files", "--others", "--exclude-standard", "--", package).splitlines()
    # git diff --no-index exits with 1 where files differ, and a new file always does.
    additions = [_git(top, "diff", "--no-index", "--", "/dev/null", name, code=1) for name in untracked]
    return "".join([_git(top, "diff", "HEAD"), *additions])


def _package_checkout() -> Path | None:
    """The folder of the package where git tracks it; None for an installed package inside somebody else's checkout."""
    file = Path(kl_comedy.__file__ or "")
    is_tracked = _git(file.parent, "ls-files", "--error-unmatch", file.name) != ""
    if not is_tracked:
        return None
    return file.parent


def _git(root: Path | str | None, *arguments: str, code: int = 0) -> str:
    """The output of a git command that exits with ``code``; empty where git or the repository is missing."""
    if root is None:
        return ""
    command = ["git", "-C", str(root), *arguments]
    # Reading must not take the index lock, which would make somebody's commit in this checkout fail.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_TIMEOUT_S, env=env)
    except (OSError, subprocess.SubprocessError):
        return ""
    if done.returncode != code:
        return ""
    # A diff may hold bytes of any encoding.
    return done.stdout.decode("utf-8", "replace")


def _cpu_model() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def _gpu_names() -> str:
    """Names of the GPUs, where torch is loaded and sees any. torch is not imported for this."""
    # An import takes seconds, and a command that does not use torch has no GPU to name.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
