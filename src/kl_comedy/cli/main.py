"""``kl-comedy``: one command per thing a user does. Exit codes: 0 done, 1 failed, 2 misuse, 75 saved, run again."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console

import kl_comedy
from kl_comedy.cli import (
    audit,
    catalog,
    certify,
    check,
    conformance,
    evaluate,
    explain,
    export,
    init,
    plan,
    results,
    sweep,
    sweep_job,
)
from kl_comedy.cli.common import ConfigArgument, Overrides, Plugins, command_line, load, process_rank, stderr_console
from kl_comedy.cli.usage import usage_line
from kl_comedy.cuda import set_variables
from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, RunStopped, UserError
from kl_comedy.extras import named_extras, require
from kl_comedy.redaction import one_line, printable, redact_source
from kl_comedy.registry import plugin_line

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="The reference laboratory for KL regularization in RL of language models.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kl_comedy {kl_comedy.__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Options before the command."""
    # A command without its packages still explains itself.
    if "--help" not in sys.argv:
        require(context.invoked_subcommand)


def train(
    config: ConfigArgument,
    overrides: Overrides = None,
    fast_dev_run: Annotated[
        bool, typer.Option("--fast-dev-run", help="Try one update and one small evaluation; nothing is kept or tracked")
    ] = False,
    plugin: Plugins = None,
) -> None:
    """Train a policy under the KL configuration of CONFIG.

    `resume=auto` continues a run of the same name and config, or trains it to more updates where `train.steps` grew.
    summary.json in the folder of a run has its results, and the commands that repeat, resume and evaluate it;
    `kl-comedy results plot` draws runs, and `kl-comedy results link` leads to their pages in a browser.

    Example: `kl-comedy train quickstart kl.0.beta=0.05 seed=1 resume=auto`

    Example: `kl-comedy train my_run.yaml --fast-dev-run`
    """
    loaded = load(config, overrides, plugin)
    from kl_comedy.cli.summary import train_and_show, try_and_show

    if fast_dev_run:
        try_and_show(config, overrides or [], loaded, stderr_console())
        return
    train_and_show(loaded, stderr_console(), command_line())


# The help shows commands by what a user wants to do, and in each panel in the order in which they are used.
PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Ask": {
        "certify": certify.certify,
        "conformance": conformance.conformance,
        "explain": explain.explain,
        "check": check.check,
        "plan": plan.plan,
        "audit": audit.audit,
        "list": catalog.list_parts,
        "doctor": catalog.doctor,
    },
    "Train": {
        "init": init.init,
        "train": train,
        "evaluate": evaluate.evaluate,
        "export": export.export,
    },
    "Sweep": {
        "sweep": sweep.sweep,
        "status": sweep.status,
        "resubmit": sweep.resubmit,
        "cancel": sweep.cancel,
    },
    "Results": {
        "reproduce": export.reproduce,
    },
}
for panel, commands in PANELS.items():
    for name, command in commands.items():
        # A command pasted for `explain` has options of its own.
        settings = {"ignore_unknown_options": name == "explain"}
        app.command(name, rich_help_panel=panel, context_settings=settings)(command)
app.add_typer(results.app, name="results", rich_help_panel="Results")
# A sweep's jobs run these two. Nobody types them, so that the help leaves them out.
app.command("cell", hidden=True)(sweep_job.cell)
app.command("sweep-report", hidden=True)(sweep_job.sweep_report)


def _quiet_libraries() -> None:
    """Set what libraries read when they are imported, and keep their log records from the terminal."""
    # How often a waiting OpenMP thread spins before it sleeps: long spins stall a run beside other busy processes, none
    # slow a quiet machine down (bench/openmp.py, bench/NOTES.md). Set before torch is imported; your own value stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    set_variables()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Redacted("%(message)s"))
    # All ranks would log the same lines; an error may be of one rank only.
    own_level = logging.INFO if process_rank() == 0 else logging.ERROR
    logging.getLogger("kl_comedy").setLevel(own_level)
    # What these warn of is either reported by our own errors or no matter of the user's.
    for name in ("lightning.pytorch", "lightning.fabric", "mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run() -> None:
    """The console script: a user's mistake is one line and exit 2, a failed run one line and exit 1.

    Processes that a run started itself exit 0 after a failure: rank 0 reports it, and its launcher would kill it for
    another exit code before it could.
    """
    _quiet_libraries()
    if sys.argv[1:2] == ["conformance"] and "--help" not in sys.argv:
        conformance.run_in_a_child()
    rank = process_rank()
    code: str | int | None = 0
    try:
        with named_extras():
            # It returns the code of an exit that a command asked for, and what a command returned: nothing.
            code = app(standalone_mode=False)
    except SystemExit as end:
        code = end.code
    except typer.TyperException as error:
        line = usage_line(error)
        code = 2
        # It is empty for a group of commands without one: typer printed the help.
        if line:
            _print_error(stderr_console(), f"error: {one_line(line)}", code)
    except typer.Abort:
        code = 1
    except UserError as error:
        code = _print_error(stderr_console(), f"error: {one_line(_with_plugin_line(error))}", 2)
    except RunStopped as error:
        code = _print_error(stderr_console(), f"stopped: {error}", REQUEUE_EXIT_CODE)
    except RunFailed as error:
        # Every rank prints: a failure of one process alone is reported by no other.
        who = f"rank {rank} " if rank else ""
        code = _print_error(Console(stderr=True), f"{who}failed: {error}", 1)
    except BrokenPipeError:
        code = 1
    except Exception as error:
        # A bug of ours needs its traceback; one in a plugin is the user's, who wants its line.
        place = plugin_line(error)
        text = traceback.format_exc()
        if place is not None:
            text = f"failed: {type(error).__name__}: {error} (plugin {place})"
        code = _print_error(Console(stderr=True), text, 1)

    launched_by_a_run = "KL_COMEDY_LAUNCHED" in os.environ  # kl_comedy.training.distributed.LAUNCHED
    if launched_by_a_run and rank != 0 and code in (1, 2, REQUEUE_EXIT_CODE):
        code = 0
    sys.exit(code)


def _with_plugin_line(error: UserError) -> str:
    """The message, with the line of the plugin that caused the error, where it does not name it already."""
    line = plugin_line(error.__cause__)
    if not line or line in str(error):
        return str(error)
    return f"{error} (plugin {line})"


class _Redacted(logging.Formatter):
    """Log records without secrets and terminal escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_source(printable(super().format(record)))


def _print_error(console: Console, text: str, code: int) -> int:
    """Print the text without secrets, in red unless the run only stopped; return the exit code."""
    style = None if code == REQUEUE_EXIT_CODE else "red"
    console.print(redact_source(printable(text)), style=style, markup=False, soft_wrap=True, highlight=False)
    return code
