"""Hardware and package versions of a measurement."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from speed.setup import PEERS, folder, installed, pins

PACKAGES = ("torch", "transformers", "accelerate", "lightning", "mlflow", "datasets")


def describe(threads: int) -> dict[str, Any]:
    """Hardware, versions and commit, without host name or paths."""
    from kl_comedy.tracking import provenance_tags

    tags = provenance_tags()
    dirty = ", with changes" if tags["git.dirty"] == "true" else ""
    peers = {
        peer: distribution.version
        for peer in PEERS
        if (distribution := installed(pins(peer)[0], folder(peer))) is not None
    }
    return {
        "cpu": tags["host.cpu"],
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "threads": threads,
        "python": platform.python_version(),
        "versions": {**{name: metadata.version(name) for name in PACKAGES}, **peers},
        "commit": tags["git.commit"][:12] + dirty,
    }
