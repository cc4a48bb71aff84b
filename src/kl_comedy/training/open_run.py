"""Which folder a run trains in, by the configs that earlier runs of its name hold.

    runs/NAME-1/config.yaml  runs/NAME-2/config.yaml  ...

:func:`open_run` compares and writes nothing; :func:`create_run` makes the folder when the run begins.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kl_comedy.config import Config, stored_text
from kl_comedy.config.load import differing_keys
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.io import atomic_write
from kl_comedy.training.extension import begin_extension, extension_of, reason_against
from kl_comedy.training.run_folder import CONFIG, RunDir, readable_summary, saved
from kl_comedy.training.run_plugins import differing_plugins, plugins_of, write_plugins

STEPS = "train.steps"
SEED = "seed"

Kind = Literal["new", "resumed", "finished", "extended"]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The answer of :func:`open_run`."""

    kind: Kind
    """``extended``: it begins with what another run had, which stays as it is."""
    folder: Path
    """Where it trains, or has trained. The folder of a new run and of one that extends another is still to be made."""
    reason: str | None = None
    """Why it is new although there are runs of its name, in a line to print."""
    extends: Path | None = None
    """The folder of the run that it extends."""

    @property
    def is_new_folder(self) -> bool:
        return self.kind in ("new", "extended")


def open_run(config: Config, folder: Path | None = None) -> Opened:
    """Which run ``config`` is, as its ``resume`` says: a new one, or one with a folder.

    ``folder``: where the run belongs to a sweep, which says where it is; ``resume`` is then not asked.

    Raises :class:`UserError` where ``resume`` or ``folder`` names a run that this is not, and as
    :meth:`RunDir.check_links`.
    """
    if folder is not None:
        return _open_given(config, RunDir(path=folder))
    earlier = _runs_named(config)
    # After the largest number and not the count: runs may have been deleted.
    number = 1
    if earlier:
        number = _number(earlier[-1]) + 1
    new_folder = Path(config.output) / f"{config.name}-{number}"
    if config.resume == "never":
        return Opened(kind="new", folder=new_folder)
    if config.resume == "auto":
        return _open_newest(config, earlier, new_folder)
    return _open_named(config, RunDir(path=Path(config.resume)), earlier, new_folder)


def _open_newest(config: Config, earlier: list[Path], new_folder: Path) -> Opened:
    """The newest run that differs in nothing, else the newest that has fewer updates and can be extended."""
    shorter: RunDir | None = None
    reason = None
    for path in reversed(earlier):
        run = RunDir(path=path)
        # Not passed over: a folder with links out of it came from elsewhere, and its owner should know.
        run.check_links()
        try:
            stored = run.stored_config()
            keys = _differences(run, stored, config)
        except UserError as error:
            reason = reason or f"a new run: {path} is passed over: {error}"
            continue
        if not keys:
            return _open_existing(run)
        if keys == [STEPS] and stored.train.steps < config.train.steps:
            shorter = shorter or run
        elif keys != [SEED]:  # seeds of one config are no mistake
            reason = reason or f"a new run: {path} differs in {', '.join(keys)}"
    if shorter is not None:
        against = _reason_against_extending(shorter, config)
        if against is None:
            return Opened(kind="extended", folder=new_folder, extends=shorter.path)
        reason = f"a new run: {against}"
    return Opened(kind="new", folder=new_folder, reason=reason)


def _open_named(config: Config, run: RunDir, earlier: list[Path], new_folder: Path) -> Opened:
    """The run that ``resume`` names, or one that extends it."""
    if not (run.path / CONFIG).is_file():
        raise _no_such_run(run.path)
    stored = run.stored_config()
    keys = _differences(run, stored, config)
    if not keys:
        return _open_existing(run)
    if keys != [STEPS]:
        others = ", ".join(key for key in keys if key != STEPS)
        raise UserError(
            f"resume: {run.path} was trained with another {others}; of what makes a run, only {STEPS} may grow"
        )
    if config.train.steps < stored.train.steps:
        allowed = f"at least the {stored.train.steps} updates of {run.path}, to resume it"
        raise bad_value(STEPS, config.train.steps, allowed)
    # The same command again, after the extended run was stopped.
    for path in reversed(earlier):
        extended = RunDir(path=path)
        extension = extension_of(extended)
        is_of_run = extension is not None and extension.run == run.path.resolve().name
        if is_of_run and not _differences(extended, extended.stored_config(), config):
            return _open_existing(extended)
    against = _reason_against_extending(run, config)
    if against is not None:
        raise UserError(f"resume: {against}")
    return Opened(kind="extended", folder=new_folder, extends=run.path)


def _open_given(config: Config, run: RunDir) -> Opened:
    """The run of a sweep's cell, which is in this folder and nowhere else."""
    if not run.path.exists():
        return Opened(kind="new", folder=run.path)
    if not (run.path / CONFIG).is_file():
        raise UserError(f"{run.path} is not the folder of a run: it holds no {CONFIG}; move it away to train anew")
    keys = _differences(run, run.stored_config(), config)
    if keys:
        raise UserError(f"{run.path} was trained with another {', '.join(keys)}; move it away to train anew")
    return _open_existing(run)


def _open_existing(run: RunDir) -> Opened:
    run.check_links()
    summary = readable_summary(run)
    # A failed run has a summary too; it is resumed.
    if summary is not None and summary["status"] == "FINISHED":
        return Opened(kind="finished", folder=run.path)
    return Opened(kind="resumed", folder=run.path)


def _differences(run: RunDir, stored: Config, given: Config) -> list[str]:
    """The keys in which the stored run is another one than ``given``; a plugin that changed is ``plugins.NAME``."""
    keys = differing_keys(stored, given)
    return [*keys, *(f"plugins.{name}" for name in differing_plugins(run.path, plugins_of(given)))]


def _reason_against_extending(run: RunDir, config: Config) -> str | None:
    """Why the run cannot be trained to more updates, in one line; None where it can."""
    reason = reason_against(config)
    if reason is not None:
        return f"{run.path} cannot be extended: {reason}"
    summary = readable_summary(run)
    if summary is not None and _ended_early(run, summary):
        return f"{run.path} cannot be extended: {summary['reason']}, and would stop there again"
    if not saved(run.checkpoints):
        return f"{run.path} has no checkpoint to continue from (train.checkpoint_every)"
    return None


def _ended_early(run: RunDir, summary: dict[str, Any]) -> bool:
    steps: int = summary["steps"]
    return summary["status"] == "FINISHED" and steps < run.stored_config().train.steps


def _no_such_run(path: Path) -> UserError:
    others = [str(file.parent) for file in sorted(path.parent.glob(f"*/{CONFIG}"))]
    near = nearest(str(path), others)
    hint = ""
    if near:
        hint = f"; did you mean {near}?"
    return UserError(f"resume: {path} is not the folder of a run: it holds no {CONFIG}{hint}")


def _runs_named(config: Config) -> list[Path]:
    """The folders of runs of this name in ``output``, oldest first."""
    folder = Path(config.output)
    if not folder.is_dir():
        return []
    named = re.compile(rf"{re.escape(config.name)}-[0-9]{{1,9}}")
    return sorted((path for path in folder.iterdir() if named.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])


def create_run(opened: Opened, config: Config, folder: Path | None = None) -> Opened:
    """Make the folder of a run that has none yet, with its config and plugins and what it extends.

    It appears under its name when all of this is in it: a start that is killed leaves no half of a run, and of two
    starts at the same moment one makes it. The other then asks again, and the answer is returned.

    Raises :class:`UserError` where the folder cannot be made, and where another start has just begun this run.
    """
    parent = opened.folder.parent
    unnamed = RunDir(path=parent / f".{opened.folder.name}.{uuid.uuid4().hex[:8]}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        unnamed.path.mkdir()
        try:
            _write_files(unnamed, config)
            if opened.extends is not None:
                begin_extension(unnamed, RunDir(path=opened.extends))
            if not os.path.lexists(opened.folder):
                # Raises where another start was faster since: a rename does not replace a folder that holds files.
                unnamed.path.rename(opened.folder)
                return opened
        finally:
            shutil.rmtree(unnamed.path, ignore_errors=True)
    except OSError as error:
        if not opened.folder.is_dir():
            raise UserError(f"output: cannot create {opened.folder}: {error.strerror}") from None
    again = open_run(config, folder)
    if again.is_new_folder:
        return create_run(again, config, folder)
    raise UserError(f"{again.folder} was begun at the same moment by another start of this run; wait for it, or end it")


def _write_files(run: RunDir, config: Config) -> None:
    run.checkpoints.mkdir()
    atomic_write(run.path / CONFIG, stored_text(config), private=True)
    write_plugins(run.path, plugins_of(config))
