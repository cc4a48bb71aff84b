"""``kl-comedy list`` prints the registered parts, ``kl-comedy doctor`` what is missing on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load_plugins
from kl_comedy.config.shipped import shipped_files

PACKAGES = {
    "torch": "everything",
    "lightning": "training",
    "transformers": "models",
    "mlflow": "tracking (else files only)",
    "math-verify": "reward math_verify",
    "datasets": "datasets by hub name",
    "peft": "model.lora",
    "gguf": "model.options.gguf_file",
    "reasoning-gym": "dataset and reward reasoning_gym (extra gym)",
}

OTHER_KINDS = ("peers", "configs")
"""What `list` prints beside the registered parts."""


def list_parts(
    kind: Annotated[str, typer.Argument(help="estimators, corrections, recipes, rewards, ..., peers or configs")],
    format: TableOrJson = "table",
    plugin: Plugins = None,
) -> None:
    """List the registered parts of KIND with their claims and sources.

    KIND `peers`: the systems and flags that `explain` reads. KIND `configs`: the configs, grids and SLURM profiles
    that come with the package.

    Example: `kl-comedy list estimators --format json`

    Example: `kl-comedy list configs`
    """
    from kl_comedy.registry import KINDS

    # Before plugins are imported, which runs their code.
    check_choice("KIND", kind, (*KINDS, *OTHER_KINDS))
    load_plugins(plugin)
    rows: list[dict[str, Any]]
    if kind == "peers":
        rows = _peer_rows()
    elif kind == "configs":
        rows = [file.row() for file in shipped_files()]
    else:
        rows = [entry.row() for entry in KINDS[kind]]
    if format == "json":
        # default=str: a plugin may declare any object as a fact.
        print(json.dumps(rows, indent=1, default=str))
        return

    if kind == "peers":
        table = Table("system", "flag", "allowed", "default", "meaning", title=kind)
        for row in rows:
            system = f"{row['system']} {row['version']}"
            table.add_row(system, *(str(row[column]) for column in ("flag", "allowed", "default", "meaning")))
    elif kind == "configs":
        table = Table("name", "kind", "summary", title=kind)
        for row in rows:
            table.add_row(row["name"], row["kind"], escape(row["summary"]))
    else:
        table = Table("name", "summary", "claims", "source", title=kind)
        for row in rows:
            # A recipe claims nothing itself: its terms stand there.
            claims = row.get("terms") or ", ".join(row["claims"])
            table.add_row(str(row["name"]), str(row["summary"]), str(claims), str(row["source"]))
    Console().print(table)


def _peer_rows() -> list[dict[str, Any]]:
    """One row per flag of each system that ``explain`` reads."""
    from kl_comedy.lab.peers import SYSTEMS

    rows = []
    for system in SYSTEMS.values():
        for flag in system.flags:
            rows.append({"system": system.name, "version": system.version, **flag.row()})
    return rows


def doctor() -> None:
    """List the packages, engines and devices that are installed or missing, and what needs them.

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
    # Packages may be installed and not fit together, which only their own check tells.
    for backend in ("vllm", "vllm_server"):
        state = "; ".join(missing(backend)) or "ready"
        table.add_row(f"rollout {backend}", vllm_version() or "missing", escape(f"rollout.backend: {backend}; {state}"))
    table.add_row("sbatch", shutil.which("sbatch") or "missing", "SLURM")
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    table.add_row("GPU", ", ".join(gpus) or "none (CPU works)", "speed")
    Console().print(table)
