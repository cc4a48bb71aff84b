"""``kl-comedy list`` prints the registered parts, ``kl-comedy doctor`` what is missing on this machine."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Annotated, Any

import typer

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load_plugins, message, print_columns
from kl_comedy.config.shipped import shipped_files

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

OTHER_KINDS = {
    "peers": "the flags of other systems that `explain` reads",
    "configs": "the configs, grids and SLURM profiles that come with the package",
}
"""What `list` prints beside the registered parts."""


def list_parts(
    kind: Annotated[
        str | None, typer.Argument(help="estimators, corrections, recipes, rewards, ..., peers or configs")
    ] = None,
    format: TableOrJson = "table",
    plugin: Plugins = None,
) -> None:
    """List the registered parts of KIND with their claims and sources; without KIND the kinds.

    KIND `peers`: the systems and flags that `explain` reads. KIND `configs`: the configs, grids and SLURM profiles
    that come with the package.

    In a pipe: one line per part, its columns separated by tabs.

    Example: `kl-comedy list estimators --format json`

    Example: `kl-comedy list configs`
    """
    from kl_comedy.registry import KINDS

    # Before plugins are imported, which runs their code.
    if kind is not None:
        check_choice("KIND", kind, (*KINDS, *OTHER_KINDS))
    load_plugins(plugin)
    if kind is None:
        _list_kinds(format)
        return
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

    lines: list[list[str]] = []
    if kind == "peers":
        columns = ["system", "flag", "allowed", "default", "meaning"]
        for row in rows:
            system = f"{row['system']} {row['version']}"
            lines.append([system, *(str(row[column]) for column in columns[1:])])
    elif kind == "configs":
        columns = ["name", "kind", "summary"]
        for row in rows:
            lines.append([str(row[column]) for column in columns])
    else:
        columns = ["name", "summary", "claims", "source"]
        for row in rows:
            # A recipe claims nothing itself: its terms stand there.
            claims = row.get("terms") or ", ".join(row["claims"])
            lines.append([str(row["name"]), str(row["summary"]), str(claims), str(row["source"])])
    print_columns(columns, lines, title=kind)


def _list_kinds(format: str) -> None:
    """Print one row per kind, with the names of its entries, or with what they are."""
    from kl_comedy.registry import KINDS

    rows = []
    for kind, table in KINDS.items():
        rows.append({"kind": kind, "entries": ", ".join(entry.name for entry in table)})
    for kind, meaning in OTHER_KINDS.items():
        rows.append({"kind": kind, "entries": meaning})
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    print_columns(["kind", "entries"], [[row["kind"], row["entries"]] for row in rows])
    message("next: kl-comedy list KIND")


def _peer_rows() -> list[dict[str, Any]]:
    """One row per flag of each system that ``explain`` reads."""
    from kl_comedy.peers.systems import SYSTEMS

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

    lines: list[list[str]] = []
    for name, purpose in PACKAGES.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        lines.append([name, version, purpose])
    # Packages may be installed and not fit together, which only their own check tells.
    for backend in ("vllm", "vllm_server"):
        state = "; ".join(missing(backend)) or "ready"
        lines.append([f"rollout {backend}", vllm_version() or "missing", f"rollout.backend: {backend}; {state}"])
    lines.append(["sbatch", shutil.which("sbatch") or "missing", "SLURM"])
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    lines.append(["GPU", ", ".join(gpus) or "none (CPU works)", "speed"])
    print_columns(["what", "version", "needed for"], lines)
