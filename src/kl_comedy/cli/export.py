"""``export``: a checkpoint as a Hugging Face folder. ``reproduce``: a stored run again, and its metrics compared."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kl_comedy.cli.common import Plugins, TableOrJson, load, load_plugins, load_run_plugins, message, print_rows
from kl_comedy.cli.results import DEFAULT_URI, Uri
from kl_comedy.errors import RunFailed, UserError


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

    load_plugins(plugin)
    load_run_plugins(run_dir, given=plugin)
    run = RunDir(path=run_dir)
    source = export_policy(run, run.config_reader()([]), out, which=checkpoint)
    print(f"{out}  from {source}")


def reproduce(
    run: Annotated[str, typer.Argument(help="A run's id, the beginning of one, or its name")],
    uri: Uri = DEFAULT_URI,
    output: Annotated[Path, typer.Option(help="Where the new run's folder goes")] = Path("runs/reproduced"),
    plugin: Plugins = None,
    tolerance: Annotated[
        str,
        typer.Option(
            help="Relative difference up to which a metric is near; or METRIC=DIFFERENCE, comma-separated, absolute: "
            "only these metrics are then compared (* matches anything)"
        ),
    ] = "1e-3",
    format: TableOrJson = "table",
) -> None:
    """Train a run of a store or an export again from its config and compare the final metrics.

    A metric is equal, near or different. Prints the commands: the run's own, with its commit, and the one that runs
    now. Lists what differs in code, packages and machine, and says where the weights that training starts from differ.
    The new run is tracked in its folder only, because in the store it would count as a repeat. Exits 1 where a metric
    is different or absent.

    Example: `kl-comedy reproduce k3-loss-94e1 --uri results/study/export.parquet --tolerance 'eval/*/reward=0.1'`
    """
    from kl_comedy.config import config_hash, plugins_of
    from kl_comedy.models.onednn_linear import linear_library
    from kl_comedy.tracking import provenance_tags, verify
    from kl_comedy.tracking.runs import open_runs
    from kl_comedy.tracking.store import clean_path

    console = Console(stderr=True)
    allowed = verify.parse_tolerance(tolerance)
    row = verify.find_run(uri, run)
    # After the store has the run: these imports take seconds.
    from kl_comedy.training.run import train as run_training
    from kl_comedy.training.run_folder import PLUGIN_FOLDER, PluginRecord, load_stored_plugins, stored_record

    tags = {str(name).removeprefix("tags."): str(tag) for name, tag in row.items() if str(name).startswith("tags.")}
    run_id, status = str(row["run_id"]), str(row["status"]).lower()
    if status != "finished":
        raise UserError(f"run {run_id} is {status}; only finished runs have final metrics")
    folder = output / f"{clean_path(str(row.get('run_name', run_id)))}.inputs"
    folder.mkdir(parents=True, exist_ok=True)
    words = itertools.pairwise(shlex.split(tags.get("run.command", "")))
    files = [value for option, value in words if option == "--plugin"]
    names = [Path(file).name for file in files] or [
        item.split()[0] for item in tags.get("plugins", "").split(", ") if item
    ]
    stored = open_runs(uri).plugins(run_id, folder)
    record = stored_record(folder)
    if record is None:  # a run of an earlier version, whose plugins were files
        stored_names = tuple(name for name in names if folder / PLUGIN_FOLDER / name in stored)
        record = PluginRecord(sources={}, files=stored_names)
        if names and not plugin and not record.files:
            raise UserError(f"--plugin: the run needs parts of {', '.join(files or names)}; name the file")
    load_plugins(plugin)
    if stored:
        for line in load_stored_plugins(folder, record, files=not plugin):
            message(line)
    plugin = plugin or [folder / PLUGIN_FOLDER / name for name in record.files or ()]
    file = open_runs(uri).config(run_id, folder)
    overrides = [f"output={output}", "resume=never", "tracking.uri=none"]
    config = load(file, overrides)
    here = {**provenance_tags(plugins=plugins_of(config)), "host.products": linear_library()}
    notes = verify.environment_differences(tags, here) or ["code, packages and machine are what they were"]
    before, now = tags.get("config.hash"), config_hash(config)
    if before not in (None, now) and tags.get("plugins") == here.get("plugins"):
        notes.insert(0, f"the stored config is {now} to this code and was {before}: what a config means has changed")
    if tags.get("git.diff"):
        notes.append("the run's code was changed after its commit; the change is its artifact provenance/code.diff")
    commands = [f"git checkout {tags.get('git.commit', 'unknown')}", tags.get("run.command", "")]
    again = [word for path in plugin for word in ("--plugin", str(path))]
    notes.append(f"the run was made by: {' && '.join(filter(None, commands))}")
    notes.append(f"runs now: {shlex.join(['kl-comedy', 'train', str(file), *overrides, *again])}")
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    command = shlex.join(["kl-comedy", "reproduce", run_id, "--uri", uri])
    outcome = run_training(config, console=console, command=command)
    started = verify.final_tags(outcome.run.path).get("reference.hash")
    if started != tags.get("reference.hash", started):
        console.print(
            f"training started from other weights: {started}, and then {tags['reference.hash']}; expect other numbers",
            highlight=False,
            soft_wrap=True,
        )
    metrics = {str(name)[8:]: float(value) for name, value in row.items() if str(name).startswith("metrics.")}
    rows = verify.compare_metrics(metrics, verify.final_metrics(outcome.run.path), allowed)
    shown = rows if format == "json" else [row for row in rows if row["verdict"] != "equal"]
    if shown:
        print_rows(shown, format)
    counts = Counter(row["verdict"] for row in rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("equal", "near", "different", "absent", "new"))
    console.print(f"{len(rows)} final metrics (tolerance {tolerance}): {summary}", highlight=False, soft_wrap=True)
    if counts["different"] or counts["absent"] or not rows:
        raise RunFailed(f"run {run_id} does not reproduce here: {summary}; the new one is {outcome.run.path}")
