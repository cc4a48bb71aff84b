"""``list`` and ``doctor``: what there is, what is missing here."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_comedy.errors import bad_value

FORMATS = ("table", "json")
PEERS = "peers"
FormatOption = Annotated[str, typer.Option(help="table or json")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("list")(list_parts)
    app.command()(doctor)


def list_parts(
    kind: Annotated[str, typer.Argument(help="estimators, corrections, recipes, rewards, ..., or peers")],
    format: FormatOption = "table",
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """List the registered parts of KIND with their claims and sources; peers: the systems and flags `explain` reads.

    Example: `kl-comedy list estimators --format json`
    """
    from kl_comedy.registry import KINDS, load_plugin_file

    if kind not in (*KINDS, PEERS):
        raise bad_value("KIND", kind, (*KINDS, PEERS))
    check_format(format)
    if kind == PEERS:
        _list_peers(format)
        return

    for file in plugin or []:
        load_plugin_file(file)
    rows = [entry.row() for entry in KINDS[kind]]
    if format == "json":
        print(json.dumps(rows, indent=1, default=str))
        return
    table = Table("name", "summary", "claims", "source", title=kind)
    for row in rows:
        claims = row.get("terms") or ", ".join(row["claims"])
        table.add_row(row["name"], row["summary"], str(claims), row["source"])
    Console().print(table)


def _list_peers(format: str) -> None:
    from kl_comedy.cli.explain import peer_rows

    rows = peer_rows()
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    table = Table("system", "flag", "allowed", "default", "meaning", title=PEERS)
    last = ""
    for row in rows:
        first = row["system"] != last
        last = row["system"]
        name = f"{last} {row['version']}" if first else ""
        table.add_row(name, row["flag"], row["allowed"], row["default"], row["meaning"])
    Console().print(table)


def doctor() -> None:
    """Say what is installed, what is missing, and what for.

    Example: `kl-comedy doctor`
    """
    needs = {
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
    table = Table("what", "version", "needed for")
    for name, purpose in needs.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        table.add_row(name, version, purpose)
    for backend in ("vllm", "vllm_server"):
        table.add_row(f"rollout {backend}", *_vllm_row(backend))
    table.add_row("sbatch", shutil.which("sbatch") or "missing", "SLURM")
    import torch

    gpus = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    table.add_row("GPU", gpus or "none (CPU works)", "speed")
    Console().print(table)


def _vllm_row(backend: str) -> tuple[str, str]:
    from kl_comedy.rollouts.vllm.options import missing, vllm_version

    state = "; ".join(missing(backend)) or "ready"
    return vllm_version() or "missing", escape(f"rollout.backend: {backend}; {state}")


def check_format(format: str) -> None:
    """Refuse a format that is neither a table nor json."""
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
