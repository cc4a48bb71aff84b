"""The beginning of a run: what needs neither the model nor Lightning, whose import takes seconds, comes first."""

from __future__ import annotations

from rich.console import Console

from kl_comedy.config import Config
from kl_comedy.training.build import check_before_loading
from kl_comedy.training.extension import check_extension
from kl_comedy.training.run_folder import Outcome, finished_run


def train_unless_finished(config: Config, console: Console, command: str) -> Outcome:
    """The finished run of ``config`` where ``resume`` finds one, else a new or resumed one, trained to its end.

    Raises :class:`UserError` for every mistake that shows without the model, before anything is loaded; else as
    :func:`kl_comedy.training.run.train`.
    """
    outcome = finished_run(config)
    if outcome is not None:
        return outcome
    check_extension(config)
    run = check_before_loading(config)
    from kl_comedy.training.run import train  # imports Lightning

    return train(config, console=console, command=command, run=run)
