"""Where a number comes from: commit, dirtiness, versions, machine, scheduler, command line. Never secrets."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import kl_comedy
from kl_comedy.tracking.redact import redact_argument

PACKAGES = (
    "kl_comedy", "torch", "transformers", "lightning", "mlflow", "peft", "datasets", "math-verify", "omegaconf",
    "numpy", "vllm", "accelerate",
)  # fmt: skip

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


def provenance_tags(repo: Path | None = None) -> dict[str, str]:
    """Tags ``git.*``, ``version.*``, ``host.*``, ``slurm.*`` and ``command``.

    ``repo`` is the checkout whose commit counts; by default the one this package is tracked in, if any (an
    installed package inside someone else's repository does not count).
    """
    host = {
        "host.python": platform.python_version(),
        "host.platform": platform.platform(),
        "host.cpus": str(os.cpu_count()),
        **_gpus(),
    }
    slurm = {tag: os.environ[name] for name, tag in SLURM.items() if os.environ.get(name)}
    command = shlex.join([Path(sys.argv[0]).name, *map(redact_argument, sys.argv[1:])])
    return {**_git_tags(repo), **_versions(), **host, **slurm, "command": command}


def _git_tags(repo: Path | None) -> dict[str, str]:
    """``git.commit``, ``git.dirty`` (true, false) and, where dirty, ``git.diff``: a hash of the change."""
    root = repo if repo is not None else _own_checkout()
    commit = _git(root, "rev-parse", "HEAD") if root else None
    if root is None or commit is None:
        return {"git.commit": "unknown", "git.dirty": "unknown"}
    changes = _git(root, "status", "--porcelain") or ""
    tags = {"git.commit": commit, "git.dirty": "true" if changes else "false", "mlflow.source.git.commit": commit}
    if changes:
        diff = (_git(root, "diff", "HEAD") or "") + changes
        tags["git.diff"] = hashlib.sha256(diff.encode("utf-8", "replace")).hexdigest()[:12]
    return tags


def _own_checkout() -> Path | None:
    file = Path(kl_comedy.__file__ or "")
    return file.parent if _git(file.parent, "ls-files", "--error-unmatch", file.name) else None


def _git(root: Path, *words: str) -> str | None:
    """The output of a git command, or None where git or the repository is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, timeout=GIT_TIMEOUT_S, check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _versions() -> dict[str, str]:
    tags = {}
    for name in PACKAGES:
        try:
            tags[f"version.{name.replace('-', '_')}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return tags


def _gpus() -> dict[str, str]:
    """``host.gpus``: their names, where torch is loaded and sees any. torch is not imported for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"host.gpus": "none"}
    return {"host.gpus": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}
