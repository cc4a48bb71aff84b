"""Where a run comes from: commit, changes, versions, machine, scheduler, command line; and whether its process lives.

Secrets are never recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import kl_comedy
from kl_comedy.tracking.store import redact

HOST, PID, START, NAMESPACE = "process.host", "process.pid", "process.start", "process.namespace"
START_TOLERANCE_S = 5.0
"""How far two readings of one process's start may differ; a pid is not reused this fast."""

PACKAGES = (
    *("kl_comedy", "torch", "transformers", "lightning", "mlflow", "peft", "datasets", "math-verify", "omegaconf"),
    *("numpy", "vllm", "accelerate"),
)

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
    start = psutil.Process().create_time()
    return {HOST: socket.gethostname(), PID: str(os.getpid()), START: f"{start:.2f}", NAMESPACE: _pid_namespace()}


def is_dead(tags: Mapping[str, str]) -> bool | None:
    """Whether the process that ``tags`` names is gone; None where this host cannot tell (another host or container)."""
    if tags.get(HOST) != socket.gethostname() or tags.get(NAMESPACE, "") != _pid_namespace():
        return None
    try:
        pid = int(tags[PID])
    except (KeyError, ValueError):
        return None
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return bool(tags.get(START)) and abs(process.create_time() - float(tags[START])) > START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, ValueError):
        return False


def mark_dead_runs(client: Any, experiment: str | None = None) -> list[str]:
    """Mark RUNNING runs of this host whose process is gone as FAILED, with the tag ``failure.reason``.

    ``client`` is an ``MlflowClient``; ``experiment`` a name, or None for every experiment of the store. Runs of
    other hosts are left alone. Returns the ids marked.
    """
    ids = [item.experiment_id for item in client.search_experiments() if experiment in (None, item.name)]
    host = socket.gethostname().replace("'", "")
    where = f"attributes.status = 'RUNNING' AND tags.`{HOST}` = '{host}'"
    dead = [run for run in search_runs(client, ids, where) if is_dead(run.data.tags)]
    for run in dead:
        client.set_tag(run.info.run_id, "failure.reason", f"process died (pid {run.data.tags[PID]})")
        client.set_terminated(run.info.run_id, status="FAILED")
    return [run.info.run_id for run in dead]


def search_runs(client: Any, experiment_ids: list[str], where: str = "") -> list[Any]:
    """All active runs of the experiments that match MLflow's filter, through every page, newest first."""
    if not experiment_ids:
        return []
    page = client.search_runs(experiment_ids, where, max_results=1000)
    runs = list(page)
    while page.token:
        page = client.search_runs(experiment_ids, where, max_results=1000, page_token=page.token)
        runs += page
    return runs


def _pid_namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def provenance_tags(repo: Path | None = None) -> dict[str, str]:
    """Tags ``git.*``, ``version.*``, ``host.*``, ``slurm.*`` and ``command``.

    ``repo`` is the checkout whose commit counts; by default the one this package is tracked in, if any (an
    installed package inside someone else's repository does not count).
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
    arguments = [argument.partition("=") for argument in sys.argv[1:]]
    words = [f"{key}={redact(value, key)}" if equals else redact(key) for key, equals, value in arguments]
    command = shlex.join([Path(sys.argv[0]).name, *words])
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[f"version.{name.replace('-', '_')}"] = importlib.metadata.version(name)
    return {**_git_tags(repo), **versions, **host, **slurm, "command": command}


def provenance_files(folder: Path, repo: Path | None = None) -> list[Path]:
    """Write what does not fit into tags: ``packages.txt`` (every installed one) and, where dirty, ``code.diff``.

    The diff is of tracked files against the commit, followed by untracked files of the package itself; what looks like
    a credential is hidden.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packages = sorted({f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}, key=str.lower)
    files = {folder / "packages.txt": "\n".join(packages) + "\n"}
    root = repo if repo is not None else _package_checkout()
    change = _change(root) if root is not None else ""
    if change:
        cut = "" if len(change) <= MAX_DIFF_CHARACTERS else f"\n(cut; {len(change)} characters)\n"
        files[folder / "code.diff"] = "\n".join(map(redact, change[:MAX_DIFF_CHARACTERS].split("\n"))) + cut
    for file, text in files.items():
        file.write_text(text, encoding="utf-8", errors="replace")
    return list(files)


def _change(root: Path) -> str:
    """What ``git apply`` needs to come from the commit to this code."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None:
        return ""
    parts = [_git(Path(top), "diff", "HEAD", strip=False) or ""]
    package = "src/kl_comedy" if (Path(top) / "src" / "kl_comedy").is_dir() else "."
    for name in (_git(Path(top), "ls-files", "--others", "--exclude-standard", "--", package) or "").splitlines():
        parts.append(_git(Path(top), "diff", "--no-index", "--", "/dev/null", name, strip=False, codes=(0, 1)) or "")
    return "".join(parts)


def _git_tags(repo: Path | None) -> dict[str, str]:
    """``git.commit``, ``git.dirty`` (true, false) and, where dirty, ``git.diff``: a hash of the change."""
    root = repo if repo is not None else _package_checkout()
    commit = _git(root, "rev-parse", "HEAD") if root else None
    if root is None or commit is None:
        return {"git.commit": "unknown", "git.dirty": "unknown"}
    changes = _git(root, "status", "--porcelain") or ""
    tags = {"git.commit": commit, "git.dirty": "true" if changes else "false", "mlflow.source.git.commit": commit}
    if changes:
        diff = (_git(root, "diff", "HEAD") or "") + changes
        tags["git.diff"] = hashlib.sha256(diff.encode("utf-8", "replace")).hexdigest()[:12]
    return tags


def _package_checkout() -> Path | None:
    file = Path(kl_comedy.__file__ or "")
    return file.parent if _git(file.parent, "ls-files", "--error-unmatch", file.name) else None


def _git(root: Path, *arguments: str, strip: bool = True, codes: tuple[int, ...] = (0,)) -> str | None:
    """The output of a git command, or None where git or the repository is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            timeout=GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode not in codes:
        return None
    text = done.stdout.decode("utf-8", "replace")
    return text.strip() if strip else text


def _cpu_model() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def _gpu_names() -> str:
    """Names of the GPUs, where torch is loaded and sees any. torch is not imported for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
