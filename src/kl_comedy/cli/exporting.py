"""``kl-comedy export``: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(export)


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder")],
    checkpoint: Annotated[str, typer.Option(help="newest, best (by evaluation reward), or an update's number")] = (
        "newest"
    ),
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """Write the policy of a checkpoint as safetensors that transformers and vLLM load.

    Example: `kl-comedy export runs/RUN policy-best --checkpoint best`
    """
    from kl_comedy.errors import UserError

    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir} is not the folder of a run: it holds no config.yaml")
    import kl_comedy.training.rooms  # noqa: F401  (fills the registries)
    from kl_comedy.config import load_config
    from kl_comedy.registry import load_plugin_file
    from kl_comedy.training.export import export_policy
    from kl_comedy.training.rundir import RunDir

    for file in plugin or []:
        load_plugin_file(file)
    config = load_config(run_dir / "config.yaml")
    made = export_policy(RunDir(path=run_dir), config, out, which=checkpoint)
    print(f"{out}  from {made}")
