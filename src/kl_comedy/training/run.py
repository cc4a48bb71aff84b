"""One training run, from config to summary."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kl_comedy.config import Config
from kl_comedy.cuda import set_variables
from kl_comedy.training.build import check_before_loading
from kl_comedy.training.open_run import open_run
from kl_comedy.training.run_folder import Outcome, RunDir, finished_outcome


def train(config: Config, *, console: Console, command: str, folder: Path | None = None) -> Outcome:
    """Train as ``config`` says, or return the outcome of the finished run that it is.

    ``command`` is what reproduces the run; ``folder`` is the run's folder where it belongs to a sweep.

    Raises :class:`UserError` for every mistake that shows without the model, before anything is loaded, and
    :class:`RunFailed` for a run that began and could not finish; the run is then marked failed with the reason. SIGTERM
    and SIGUSR1 end it after the current update, saved; the latter raises :class:`RunStopped`, which asks to be started
    again.
    """
    set_variables()
    opened = None
    if not _others_were_started(config):
        opened = open_run(config, folder)
        if opened.kind == "finished":
            return finished_outcome(RunDir(path=opened.folder))
    run = check_before_loading(config)
    from kl_comedy.training.fit import fit  # imports Lightning, which takes seconds

    return fit(run, opened, console, command, folder=folder)


def _others_were_started(config: Config) -> bool:
    """Whether other processes of this run exist already, as srun, torchrun and our launcher start them.

    Each of them would ask for itself, and on a shared disk they may see different folders: then rank 0 asks for all,
    as soon as they are connected.
    """
    if config.train.devices * config.train.nodes == 1:
        return False
    from kl_comedy.training.distributed import cluster_environment

    return config.train.nodes > 1 or cluster_environment(config).creates_processes_externally
