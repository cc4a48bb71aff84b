"""``kl-comedy export``: a checkpoint as a Hugging Face folder.

``kl-comedy reproduce``: a stored run again, from its own config, and whether it ends where it ended.
"""

from __future__ import annotations

import itertools
import shlex
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kl_comedy.cli.results_query import DEFAULT_URI, Uri, check
from kl_comedy.errors import RunFailed, UserError


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
    from kl_comedy.config import load_config
    from kl_comedy.registry import load_plugin_file
    from kl_comedy.training.export import export_policy
    from kl_comedy.training.run_folder import RunDir

    for file in plugin or []:
        load_plugin_file(file)
    config = load_config(run_dir / "config.yaml")
    made = export_policy(RunDir(path=run_dir), config, out, which=checkpoint)
    print(f"{out}  from {made}")


def reproduce(
    run: Annotated[str, typer.Argument(help="A run's id, the beginning of one, or its name")],
    uri: Uri = DEFAULT_URI,
    output: Annotated[Path, typer.Option(help="Where the new run's folder goes")] = Path("runs/reproduced"),
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
    near: Annotated[float, typer.Option(help="Relative difference up to which a metric is near")] = 1e-3,
    format: Annotated[str, typer.Option(help="table or json")] = "table",
) -> None:
    """Train a stored run again from its stored config and compare the final metrics: equal, near or different.

    Says first where code, packages and machine are not what they were. The new run is kept in files, not in the store,
    where it would count as a repeat. Exits 1 where a metric is different or absent.

    Example: `kl-comedy reproduce 3f2a --uri sqlite:///mlflow.db`
    """
    check("--format", format, ("table", "json"))
    from kl_comedy.tracking.verify import compare_metrics, final_metrics, find_run, place_differences

    console = Console(stderr=True)
    stored = find_run(uri, run)
    tags: dict[str, str] = dict(stored.data.tags)
    _check_repeatable(stored, tags, plugin)
    config = _config(uri, stored, output, plugin)
    from kl_comedy.training.run import place_tags

    for line in place_differences(tags, place_tags()) or ["code, packages and machine are what they were"]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if tags.get("git.diff"):
        console.print("the run's code was changed after its commit; the change is its artifact provenance/code.diff")
    from kl_comedy.training.run import train

    words = ["kl-comedy", "reproduce", stored.info.run_id, "--uri", uri]
    outcome = train(config, console=console, command=shlex.join(words))
    found = compare_metrics(dict(stored.data.metrics), final_metrics(outcome.run.path), near)
    _show([asdict(item) for item in found], format)
    counts = Counter(item.verdict for item in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("equal", "near", "different", "absent", "new"))
    console.print(f"{len(found)} final metrics: {said}", highlight=False)
    if counts["different"] or counts["absent"]:
        raise RunFailed(f"run {stored.info.run_id} does not reproduce here: {said}; the new one is {outcome.run.path}")


def _check_repeatable(stored: Any, tags: dict[str, str], plugin: list[Path] | None) -> None:
    if stored.info.status != "FINISHED":
        raise UserError(
            f"run {stored.info.run_id} is {stored.info.status.lower()}; only finished runs have final metrics"
        )
    words = itertools.pairwise(shlex.split(tags.get("run.command", "")))
    needed = [after for word, after in words if word == "--plugin"]
    if needed and not plugin:
        raise UserError(f"--plugin: the run needs parts of {', '.join(needed)}; name the file")


def _config(uri: str, stored: Any, output: Path, plugins: list[Path] | None) -> Any:
    """The run's config, but that it starts anew in ``output`` and is kept in files."""
    from kl_comedy.config import config_hash, load_config
    from kl_comedy.registry import load_plugin_file
    from kl_comedy.tracking.verify import stored_config

    for file in plugins or []:
        load_plugin_file(file)
    with tempfile.TemporaryDirectory() as folder:
        file = stored_config(uri, stored, Path(folder))
        config = load_config(file, [f"output={output}", "resume=never", "tracking.uri=none"])
    was = stored.data.tags.get("config.hash")
    if was and config_hash(config) != was:
        Console(stderr=True).print(
            f"the stored config is {config_hash(config)} to this code and was {was}: what a config means has changed",
            highlight=False,
            soft_wrap=True,
        )
    return config


def _show(rows: list[dict[str, Any]], format: str) -> None:
    """All metrics as JSON; as a table those that are not equal."""
    import pandas as pd

    from kl_comedy.tracking.tables import render

    shown = rows if format == "json" else [row for row in rows if row["verdict"] != "equal"]
    if shown:
        typer.echo(render(pd.DataFrame(shown), "json" if format == "json" else "text"))


def mount(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command()(export)
    app.command()(reproduce)
