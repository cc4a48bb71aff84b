"""One module per system. The peer is imported when a loss is called, not when the adapter is built."""

from __future__ import annotations

import importlib

from peers.case import Adapter

SYSTEMS = ("trl", "verl", "openrlhf", "skyrl", "trinity", "swift", "areal", "tinker", "polgrad", "tunix")


def adapter(system: str) -> Adapter:
    """The adapter of a system by name."""
    module = importlib.import_module(f"peers.adapters.{system}")
    built: Adapter = module.build()
    return built
