"""Where a number comes from: commit, dirtiness, versions, machine, scheduler, command line. Never secrets."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import kl_comedy
from kl_comedy.tracking.redact import redact, redact_argument

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
MOST_DIFF_BYTES = 2_000_000
"""A longer change is cut, and says so; its hash is of the whole."""


def provenance_tags(repo: Path | None = None) -> dict[str, str]:
    """Tags ``git.*``, ``version.*``, ``host.*``, ``slurm.*`` and ``command``.

    ``repo`` is the checkout whose commit counts; by default the one this package is tracked in, if any (an
    installed package inside someone else's repository does not count).
    """
    host = {
        "host.python": platform.python_version(),
        "host.platform": platform.platform(),
        "host.cpus": str(os.cpu_count()),
        **_hardware(),
        **_gpus(),
    }
    slurm = {tag: os.environ[name] for name, tag in SLURM.items() if os.environ.get(name)}
    command = shlex.join([Path(sys.argv[0]).name, *map(redact_argument, sys.argv[1:])])
    return {**_git_tags(repo), **_versions(), **host, **slurm, "command": command}


def provenance_files(folder: Path, repo: Path | None = None) -> list[Path]:
    """Write what does not fit into tags: ``packages.txt`` (every installed one) and, where dirty, ``code.diff``.

    The diff is of tracked files against the commit, followed by untracked files of the package itself; what looks like
    a credential is hidden.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packages = sorted({f"{item.name}=={item.version}" for item in importlib.metadata.distributions()}, key=str.lower)
    files = {folder / "packages.txt": "\n".join(packages) + "\n"}
    root = repo if repo is not None else _own_checkout()
    change = _change(root) if root is not None else ""
    if change:
        cut = "" if len(change) <= MOST_DIFF_BYTES else f"\n(cut; {len(change)} characters)\n"
        files[folder / "code.diff"] = "\n".join(map(redact, change[:MOST_DIFF_BYTES].split("\n"))) + cut
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


def _git(root: Path, *words: str, strip: bool = True, codes: tuple[int, ...] = (0,)) -> str | None:
    """The output of a git command, or None where git or the repository is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, timeout=GIT_TIMEOUT_S,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode not in codes:
        return None
    text = done.stdout.decode("utf-8", "replace")
    return text.strip() if strip else text


def _versions() -> dict[str, str]:
    tags = {}
    for name in PACKAGES:
        try:
            tags[f"version.{name.replace('-', '_')}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return tags


def _hardware() -> dict[str, str]:
    """``host.cpu``: its model. ``host.memory_gib``: of the machine. Absent where the system does not say."""
    tags = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        tags["host.cpu"] = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        if platform.processor():
            tags["host.cpu"] = platform.processor()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        tags["host.memory_gib"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f}"
    return tags


def _gpus() -> dict[str, str]:
    """``host.gpus``: their names, where torch is loaded and sees any. torch is not imported for this."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"host.gpus": "none"}
    return {"host.gpus": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))}
