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
    # The page is public: of the provenance only what explains a measurement.
    commit = tags["git.commit"][:12]
    if tags["git.dirty"] == "true":
        commit += ", with changes"
    return {
        "cpu": tags["host.cpu"],
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "threads": threads,
        "python": platform.python_version(),
        "versions": _versions(),
        "commit": commit,
    }


def _versions() -> dict[str, str]:
    """Versions of the environment's packages, and of the peers that are installed."""
    versions = {name: metadata.version(name) for name in PACKAGES}
    for peer in PEERS:
        # The first pin of a peer is the peer itself; the others are its requirements.
        distribution = installed(pins(peer)[0], folder(peer))
        if distribution is not None:
            versions[peer] = distribution.version
    return versions
