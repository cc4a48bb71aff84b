"""``list`` and ``doctor``: the registered parts, and what is missing on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load_plugins

PACKAGES = {
    "torch": "everything",
    "lightning": "training",
    "transformers": "models",
    "mlflow": "tracking (else files only)",
    "math-verify": "reward math_verify",
    "datasets": "datasets by hub name",
    "peft": "model.lora",
    "gguf": "model.gguf_file",
    "reasoning-gym": "dataset and reward reasoning_gym (extra gym)",
}


def list_parts(
    kind: Annotated[str, typer.Argument(help="estimators, corrections, recipes, rewards, ..., or peers")],
    format: TableOrJson = "table",
    plugin: Plugins = None,
) -> None:
    """List the registered parts of KIND with their claims and sources; peers: the systems and flags `explain` reads.

    Example: `kl-comedy list estimators --format json`
    """
    from kl_comedy.registry import KINDS

    check_choice("KIND", kind, (*KINDS, "peers"))
    load_plugins(plugin)
    rows = _peer_rows() if kind == "peers" else [entry.row() for entry in KINDS[kind]]
    if format == "json":
        print(json.dumps(rows, indent=1, default=str))
        return
    if kind == "peers":
        columns: tuple[str, ...] = ("system", "flag", "allowed", "default", "meaning")
        rows = [{**row, "system": f"{row['system']} {row['version']}"} for row in rows]
    else:
        columns = ("name", "summary", "claims", "source")
        rows = [{**row, "claims": row.get("terms") or ", ".join(row["claims"])} for row in rows]
    table = Table(*columns, title=kind)
    for row in rows:
        table.add_row(*(str(row[column]) for column in columns))
    Console().print(table)


def _peer_rows() -> list[dict[str, str]]:
    from kl_comedy.lab.peers import SYSTEMS

    return [
        {"system": system.name, "version": system.version, **flag.row()}
        for system in SYSTEMS.values()
        for flag in system.flags
    ]


def doctor() -> None:
    """Say what is installed, what is missing, and what for.

    Example: `kl-comedy doctor`
    """
    import torch

    from kl_comedy.rollouts.engines.options import missing, vllm_version

    table = Table("what", "version", "needed for")
    for name, purpose in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        table.add_row(name, version, purpose)
    for backend in ("vllm", "vllm_server"):
        state = "; ".join(missing(backend)) or "ready"
        table.add_row(f"rollout {backend}", vllm_version() or "missing", escape(f"rollout.backend: {backend}; {state}"))
    table.add_row("sbatch", shutil.which("sbatch") or "missing", "SLURM")
    gpus = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    table.add_row("GPU", gpus or "none (CPU works)", "speed")
    Console().print(table)
