"""The machine and the versions a figure belongs to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from speed.setup import PEERS, folder, installed, pins

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "mlflow", "datasets")


def cpu_model(cpuinfo: str) -> str:
    """The model name in /proc/cpuinfo, or the architecture where it names none.

    >>> cpu_model("processor : 0\\nmodel name : Some CPU @ 3 GHz\\n")
    'Some CPU @ 3 GHz'
    """
    names = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe(threads: int) -> dict[str, Any]:
    """Hardware, versions and commit; no host name and no path."""
    from kl_comedy.tracking import provenance_tags

    tags = provenance_tags()
    dirty = ", with changes" if tags["git.dirty"] == "true" else ""
    peers = {peer: found.version for peer in PEERS if (found := installed(pins(peer)[0], folder(peer))) is not None}
    return {
        "cpu": cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "threads": threads,
        "python": platform.python_version(),
        "versions": {**{name: metadata.version(name) for name in PACKAGES}, **peers},
        "commit": tags["git.commit"][:12] + dirty,
    }
