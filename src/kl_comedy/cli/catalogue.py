"""``list``, ``explain`` and ``doctor``: what there is, what it does, what is missing here."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.errors import bad_value

FORMATS = ("table", "json")
FormatOption = Annotated[str, typer.Option(help="table or json")]


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command("list")(list_parts)
    app.command()(explain)
    app.command()(doctor)


def list_parts(
    kind: Annotated[str, typer.Argument(help="estimators, corrections, advantages, rewards, ...")],
    format: FormatOption = "table",
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """List the registered parts of KIND with their claims and sources.

    Example: `kl-comedy list estimators --format json`
    """
    from kl_comedy.registry import KINDS, load_plugin_file

    if kind not in KINDS:
        raise bad_value("KIND", kind, KINDS)
    _check_format(format)
    import kl_comedy.training.rooms  # noqa: F401  (fills the registries)

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


def explain(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (kl-comedy list recipes)")],
    format: FormatOption = "table",
) -> None:
    """Say what a recipe descends, on- and off-policy.

    Example: `kl-comedy explain grpo`
    """
    from kl_comedy.kl import recipe as terms_of
    from kl_comedy.kl import verdict

    _check_format(format)
    rows = [
        {"term": term.label(), "beta": str(term.beta), **{r: verdict(term, r) for r in ("on_policy", "off_policy")}}
        for term in terms_of(recipe, key="RECIPE")
    ]
    if format == "json":
        print(json.dumps(rows, indent=1))
        return
    table = Table("term", "beta", "on-policy it has", "off-policy it has", title=recipe)
    for row in rows:
        table.add_row(*row.values())
    Console().print(table if rows else f"{recipe}: no KL term")


def doctor() -> None:
    """Say what is installed, what is missing, and what for.

    Example: `kl-comedy doctor`
    """
    needs = {
        "torch": "everything", "lightning": "training", "transformers": "models",
        "mlflow": "tracking (else files only)",
        "math-verify": "reward math_verify", "datasets": "datasets by hub name", "peft": "model.lora",
        "gguf": "model.gguf_file", "reasoning-gym": "dataset and reward reasoning_gym (extra gym)",
        "vllm": "rollout backend vllm (extra vllm)",
    }  # fmt: skip
    table = Table("what", "version", "needed for")
    for name, purpose in needs.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        table.add_row(name, version, purpose)
    table.add_row("sbatch", shutil.which("sbatch") or "missing", "SLURM")
    import torch

    gpus = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
    table.add_row("GPU", gpus or "none (CPU works)", "speed")
    Console().print(table)


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
