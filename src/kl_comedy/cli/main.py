"""``kl-comedy``: one command per thing a user does. Exit codes: 0 done, 1 failed, 2 misuse, 75 saved, go on."""

from __future__ import annotations

import logging
import os
import shlex
import sys

import typer
from rich.console import Console

from kl_comedy.cli import audit, catalog, certify, evaluate, explain, export, plan, results, studies, sweep, sweep_job
from kl_comedy.cli.common import ConfigArgument, Overrides, Plugins, load, process_rank, stderr_console
from kl_comedy.errors import REQUEUE_EXIT_CODE, RunFailed, RunStopped, UserError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    help="The reference laboratory for KL regularization in RL of language models.",
)
for module in (audit, catalog, certify, evaluate, explain, export, plan, results, studies, sweep, sweep_job):
    module.mount(app)


@app.command()
def train(config: ConfigArgument, overrides: Overrides = None, plugin: Plugins = None) -> None:
    """Train a policy under the KL configuration of CONFIG.

    Example: `kl-comedy train configs/quickstart.yaml kl.0.beta=0.05 seed=1 resume=auto`
    """
    console = stderr_console()
    loaded = load(config, overrides, plugin)
    from kl_comedy.cli.summary import show_outcome
    from kl_comedy.training.run import train as run_training

    outcome = run_training(loaded, console=console, command=_command_line())
    show_outcome(outcome, console)


LAUNCHED = "KL_COMEDY_LAUNCHED"


def _command_line() -> str:
    return shlex.join(["kl-comedy", *sys.argv[1:]])


def _quiet_libraries() -> None:
    # How often a waiting OpenMP thread spins before it sleeps: long spins stall a run beside other busy processes, none
    # slow a quiet machine down (bench/openmp.py, bench/NOTES.md). Set before torch is imported; your own value stays.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("kl_comedy").setLevel(logging.INFO if process_rank() == 0 else logging.ERROR)
    for name in ("lightning.pytorch", "lightning.fabric", "mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)


def run() -> None:
    """The console script: a user's mistake is one line and exit 2, a failed run one line and exit 1.

    Processes that a run started itself end with 0 after a failure that all of them share: the first tells it, and its
    launcher would kill it for another code before it could.
    """
    _quiet_libraries()
    helper = process_rank() != 0 and LAUNCHED in os.environ
    try:
        _run()
    except SystemExit as end:
        if helper and end.code in (1, 2, REQUEUE_EXIT_CODE):
            sys.exit(0)
        raise


def _run() -> None:
    try:
        app()
    except UserError as error:
        stderr_console().print(f"error: {error}", style="red", markup=False, soft_wrap=True, highlight=False)
        sys.exit(2)
    except RunStopped as error:
        stderr_console().print(f"stopped: {error}", markup=False, soft_wrap=True, highlight=False)
        sys.exit(REQUEUE_EXIT_CODE)
    except RunFailed as error:
        rank = process_rank()
        where = f"rank {rank} " if rank else ""  # what one process alone fell over is told by no other
        Console(stderr=True).print(
            f"{where}failed: {error}", style="red", markup=False, soft_wrap=True, highlight=False
        )
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)
