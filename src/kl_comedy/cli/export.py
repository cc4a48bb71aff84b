"""``export`` writes a checkpoint as a Hugging Face folder; ``reproduce`` trains a stored run again and compares it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kl_comedy.cli.common import Plugins, TableOrJson, load_plugins, load_run_plugins, message, print_rows
from kl_comedy.cli.results_options import DEFAULT_URI, Uri
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import check_writable
from kl_comedy.redaction import one_line


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder")],
    checkpoint: Annotated[
        str, typer.Option(help="newest, best (by evaluation reward), an update's number, or a ModelCheckpoint's folder")
    ] = "newest",
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="NAME", help="Upload it too, as the model NAME or OWNER/NAME of the hub")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A new model of the hub is public")] = False,
    plugin: Plugins = None,
) -> None:
    """Write the policy of a checkpoint as safetensors that transformers and vLLM load, with a model card.

    Example: `kl-comedy export runs/RUN policy-best --checkpoint best`

    Example: `kl-comedy export runs/RUN policy-best --push-to-hub my-policy`
    """
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{run_dir} is not the folder of a run: it holds no config.yaml")
    check_writable(out, "OUT", is_folder=True)
    from kl_comedy.training.export import check_hub, export_policy, upload_to_hub
    from kl_comedy.training.run_folder import RunDir

    load_plugins(plugin)
    load_run_plugins(run_dir, given=plugin)
    if push_to_hub is not None:
        check_hub("--push-to-hub", push_to_hub)  # before the export, which may take minutes
    elif public:
        raise UserError("--public: nothing is uploaded; name the model with --push-to-hub NAME")
    run = RunDir(path=run_dir)
    source = export_policy(run, run.config_reader()([]), out, which=checkpoint)
    print(one_line(f"{out}  from {source}"))
    if push_to_hub is not None:
        print(upload_to_hub(out, push_to_hub, public=public))


def reproduce(
    run: Annotated[str, typer.Argument(help="A run's id, the beginning of one, or its name")],
    uri: Uri = DEFAULT_URI,
    output: Annotated[Path, typer.Option(help="Where the new run's folder goes")] = Path("runs/reproduced"),
    plugin: Plugins = None,
    tolerance: Annotated[
        str,
        typer.Option(
            help="Largest relative difference of a metric that is near; or absolute ones as METRIC=DIFFERENCE, "
            "comma-separated: only these metrics are then compared (* matches anything)"
        ),
    ] = "1e-3",
    format: TableOrJson = "table",
) -> None:
    """Train a run of a store or an export again from its config and compare the final metrics.

    A metric is equal, near or different. Prints the commands: the run's own, with its commit, and the one that runs
    now. Lists what differs in code, packages and machine, and says whether training starts from other weights.
    The new run is tracked in its folder only, because in the store it would count as a repeat. Exits 1 where a metric
    is different or absent.

    Example: `kl-comedy reproduce k3-loss-94e1 --uri results/study/export.parquet --tolerance 'eval/*/reward=0.1'`
    """
    from kl_comedy.results.verify import parse_tolerance
    from kl_comedy.training import reproduction

    console = Console(stderr=True)
    allowed = parse_tolerance(tolerance)  # a mistake in it should not cost a training
    original = reproduction.find_original(uri, run)
    folder = reproduction.make_inputs_folder(original, output)

    given = plugin or []
    stored = reproduction.fetch_plugins(original, folder, given=given)
    # Files given with --plugin take the place of the stored ones, so that they are loaded first.
    load_plugins(given)
    for line in reproduction.load_plugins(stored, given=given):
        message(line)

    planned = reproduction.plan_reproduction(original, folder, output, given or stored.files)
    # Before the training, which may take hours: who sees a wrong commit here can stop.
    for note in planned.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    outcome = reproduction.train_again(original, planned, console)
    changed_start = reproduction.changed_start(original, outcome.run.path)
    if changed_start is not None:
        console.print(changed_start, highlight=False, soft_wrap=True)

    comparison = reproduction.compare(original, outcome.run.path, allowed)
    # A program gets every metric; a reader those that are worth a look.
    rows = comparison.rows if format == "json" else comparison.unequal
    if rows:
        print_rows(rows, format)
    counted = f"{len(comparison.rows)} final metrics (tolerance {tolerance}): {comparison.summary}"
    console.print(counted, highlight=False, soft_wrap=True)
    if not comparison.reproduces:
        raise RunFailed(
            f"run {original.run_id} does not reproduce here: {comparison.summary}; the new one is {outcome.run.path}"
        )
