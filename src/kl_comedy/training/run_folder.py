"""The folder of a run: what is in it, and who trains in it.

runs/NAME-N/  config.yaml  plugins/  checkpoints/  policy/  spool.jsonl  tables/  summary.json
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.config import Config
from kl_comedy.config.load import stored_reader
from kl_comedy.config.validate import Field, is_count, is_text, read_fields
from kl_comedy.errors import UserError
from kl_comedy.io import (
    LockHeld,
    check_tree,
    file_lock,
    inside,
    set_aside,
    write_json,
)

log = logging.getLogger("kl_comedy")

CONFIG = "config.yaml"
SUMMARY = "summary.json"
EXTENSION = "extends.json"
"""In the folder of a run that extends another (:mod:`kl_comedy.training.extension`)."""

# A folder may come from elsewhere, with links in these places that lead out of it.
RUN_FILES = (
    CONFIG,
    SUMMARY,
    "plugins.json",
    EXTENSION,
    "spool.jsonl",
    "tracking.json",
    "params.json",
    ".lock",
    "tracking.lock",
)
RUN_FOLDERS = (
    "checkpoints",
    "policy",
    "adapter",
    "plugins",
    "provenance",
    "tables",
    "files",
    "rollouts",
    "sampler",
    "csv",
    "tensorboard",
)
"""What a run writes and reads in its folder. W&B's folder is not here: its own links lead to the user's cache."""
SUMMARY_FIELDS = {
    **dict.fromkeys(("status", "name", "kl", "command", "evaluate_command", "mlflow_uri"), Field("a text", is_text)),
    "steps": Field("a count", is_count),
}


class RunDir:
    """A run's folder. ``adapter`` is there beside the merged ``policy`` of a LoRA run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.policy = path / "policy"
        self.adapter = path / "adapter"

    @property
    def label(self) -> str:
        """Its name among other runs: that of its folder. Those of a sweep's cells are all called ``run``."""
        path = self.path.resolve()
        is_of_cell = path.name == "run" and path.parent.parent.name == "cells"
        if is_of_cell:
            return f"{path.parents[2].name}-{path.parent.name}"
        return path.name

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that was renamed to its final name, or None."""
        return next(reversed(saved(self.checkpoints)), None)

    def check_links(self) -> None:
        """Raise :class:`UserError` for a link out of the folder, and for a pipe or a folder in a file's place.

        Called before anything of a folder that exists already is read or written: it may come from elsewhere.
        """
        check_tree(self.path, RUN_FILES, RUN_FOLDERS)
        inside(self.path / "wandb", self.path)

    def config_reader(self) -> Callable[[Sequence[str]], Config]:
        """Its config under overrides, as :func:`kl_comedy.config.load.stored_reader`.

        Raises :class:`UserError`, also as :meth:`check_links`.
        """
        self.check_links()
        return stored_reader(self.path / CONFIG)

    def stored_config(self) -> Config:
        """The config that the run was started with. Raises :class:`UserError` for a file that holds none."""
        return self.config_reader()([])

    def summary(self) -> dict[str, Any] | None:
        """What the run ended with, or None while it has not ended. Raises :class:`UserError` for a damaged file."""
        file = self.path / SUMMARY
        if not file.is_file():
            return None
        content: dict[str, Any] = read_fields(file, "summary of a run", SUMMARY_FIELDS, root=self.path)
        return content

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_json(self.path / SUMMARY, summary, private=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process. Raises :class:`UserError` where a live process has locked it."""
        try:
            # Without waiting: whoever starts a run twice wants to know it, not to train it again afterwards.
            with file_lock(self.path / ".lock", wait_s=0):
                yield
        except LockHeld as error:
            raise UserError(f"{self.path} is being trained by process {error.holder}; wait for it, or end it") from None


def saved(root: Path) -> list[Path]:
    """Checkpoints under their final names, oldest first; their files are not checked here. Other names are ignored."""
    return sorted((path for path in root.glob("step-*.ckpt") if _is_step(path)), key=step_of)


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"step-[0-9]{1,18}\.ckpt", path.name) is not None


def step_of(checkpoint: Path) -> int:
    """The update after which it was made."""
    return int(checkpoint.stem.split("-")[1])


def readable_summary(run: RunDir) -> dict[str, Any] | None:
    """The run's summary. A damaged one is renamed with a warning, and None: the run then resumes and writes it anew."""
    try:
        return run.summary()
    except UserError as error:
        _set_aside(run.path / SUMMARY, f"{error}; the run resumes from its newest checkpoint")
        return None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: its folder and the summary written there."""

    run: RunDir
    summary: dict[str, Any]
    already_finished: bool = False


def finished_outcome(run: RunDir) -> Outcome:
    """The outcome of a run that has finished earlier."""
    summary = run.summary()
    assert summary is not None
    return Outcome(run=run, summary=summary, already_finished=True)


def _set_aside(file: Path, message: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        log.warning("%s (it is now %s)", message, set_aside(file).name)
