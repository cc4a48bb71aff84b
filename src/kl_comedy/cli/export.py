"""``export``: a checkpoint as a Hugging Face folder. ``reproduce``: a stored run again, and its metrics compared."""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kl_comedy.cli.common import Plugins, TableOrJson, check_choice, load, load_plugins
from kl_comedy.cli.results_query import DEFAULT_URI, Uri
from kl_comedy.errors import RunFailed, UserError

if TYPE_CHECKING:
    from kl_comedy.config import Config


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(export)
    app.command()(reproduce)


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder")],
    checkpoint: Annotated[str, typer.Option(help="newest, best (by evaluation reward), or an update's number")] = (
        "newest"
    ),
    plugin: Plugins = None,
) -> None:
    """Write the policy of a checkpoint as safetensors that transformers and vLLM load.

    Example: `kl-comedy export runs/RUN policy-best --checkpoint best`
    """
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir} is not the folder of a run: it holds no config.yaml")
    from kl_comedy.training.export import export_policy
    from kl_comedy.training.run_folder import RunDir

    config = load(run_dir / "config.yaml", plugins=plugin)
    source = export_policy(RunDir(path=run_dir), config, out, which=checkpoint)
    print(f"{out}  from {source}")


def reproduce(
    run: Annotated[str, typer.Argument(help="A run's id, the beginning of one, or its name")],
    uri: Uri = DEFAULT_URI,
    output: Annotated[Path, typer.Option(help="Where the new run's folder goes")] = Path("runs/reproduced"),
    plugin: Plugins = None,
    near: Annotated[float, typer.Option(help="Relative difference up to which a metric is near")] = 1e-3,
    format: TableOrJson = "table",
) -> None:
    """Train a stored run again from its stored config and compare the final metrics: equal, near or different.

    First lists what differs in code, packages and machine. The new run is tracked in its folder only, because in the
    store it would count as a repeat. Exits 1 where a metric is different or absent.

    Example: `kl-comedy reproduce 3f2a --uri sqlite:///mlflow.db`
    """
    check_choice("--format", format)
    from kl_comedy.models.onednn_linear import linear_library
    from kl_comedy.tracking import provenance_tags
    from kl_comedy.tracking.verify import compare_metrics, environment_differences, final_metrics, find_run
    from kl_comedy.training.run import train as run_training

    console = Console(stderr=True)
    stored = find_run(uri, run)
    tags: dict[str, str] = dict(stored.data.tags)
    if stored.info.status != "FINISHED":
        raise UserError(
            f"run {stored.info.run_id} is {stored.info.status.lower()}; only finished runs have final metrics"
        )
    words = itertools.pairwise(shlex.split(tags.get("run.command", "")))
    files = [value for option, value in words if option == "--plugin"]
    if files and not plugin:
        raise UserError(f"--plugin: the run needs parts of {', '.join(files)}; name the file")
    load_plugins(plugin)
    config = _stored_config(uri, stored, output, console)
    for line in environment_differences(tags, {**provenance_tags(), "host.products": linear_library()}) or [
        "code, packages and machine are what they were"
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if tags.get("git.diff"):
        console.print("the run's code was changed after its commit; the change is its artifact provenance/code.diff")
    command = shlex.join(["kl-comedy", "reproduce", stored.info.run_id, "--uri", uri])
    outcome = run_training(config, console=console, command=command)
    comparisons = compare_metrics(dict(stored.data.metrics), final_metrics(outcome.run.path), near)
    _print_comparisons([asdict(item) for item in comparisons], format)
    counts = Counter(item.verdict for item in comparisons)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("equal", "near", "different", "absent", "new"))
    console.print(f"{len(comparisons)} final metrics: {summary}", highlight=False)
    if counts["different"] or counts["absent"]:
        raise RunFailed(
            f"run {stored.info.run_id} does not reproduce here: {summary}; the new one is {outcome.run.path}"
        )


def _stored_config(uri: str, stored: Any, output: Path, console: Console) -> Config:
    """The run's config, changed to start a new run in ``output`` without a store."""
    from kl_comedy.config import config_hash
    from kl_comedy.tracking.verify import stored_config

    with tempfile.TemporaryDirectory() as folder:
        file = stored_config(uri, stored, Path(folder))
        config = load(file, [f"output={output}", "resume=never", "tracking.uri=none"])
    stored_hash = stored.data.tags.get("config.hash")
    if stored_hash and config_hash(config) != stored_hash:
        console.print(
            f"the stored config is {config_hash(config)} to this code and was {stored_hash}: what a config means has "
            "changed",
            highlight=False,
            soft_wrap=True,
        )
    return config


def _print_comparisons(rows: list[dict[str, Any]], format: str) -> None:
    """All metrics as JSON; as a table those that are not equal."""
    import pandas as pd

    from kl_comedy.tracking.tables import render

    shown = rows if format == "json" else [row for row in rows if row["verdict"] != "equal"]
    if shown:
        typer.echo(render(pd.DataFrame(shown), "json" if format == "json" else "text"))
