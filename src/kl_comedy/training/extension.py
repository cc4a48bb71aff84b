"""Train a run to more updates than it was started for: ``resume=runs/RUN train.steps=200``.

The result is a run of its own, in a folder of its own: ``train.steps`` is part of the config hash. It begins with the
checkpoint and the metrics of the earlier run, which stays as it is, and is to the bit what a run of 200 updates would
have been. Where that does not hold, because updates so far depended on the number of updates, it is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.config import Config, plugins_of
from kl_comedy.config.load import differing_keys
from kl_comedy.config.schema import RESUME
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.io import read_json, write_json
from kl_comedy.registry import changed_names
from kl_comedy.training.run_folder import CONFIG, EXTENSION, RunDir, find_run, saved, step_of, stored_record


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an extended run begins with."""

    run: str
    """The name of the earlier run's folder."""
    update: int
    """The update of its checkpoint."""

    def tags(self) -> dict[str, str]:
        """Tags of the extended run."""
        return {"extends.run": self.run, "extends.update": str(self.update)}


def extension_of(run: RunDir) -> Extension | None:
    """What the run in this folder extends; None for a run that began at update 0."""
    file = run.path / EXTENSION
    if not file.is_file():
        return None
    content = read_json(file, "record of an extension", {"run": str}, root=run.path)
    return parse_record(Extension, content, origin=str(file))


def check_extension(config: Config) -> None:
    """Raise :class:`UserError` where ``resume`` names a run that cannot be trained to ``train.steps`` updates.

    Nothing is checked where the extended run exists already: it is resumed like any other.
    """
    if config.resume in RESUME or find_run(config) is not None:
        return
    earlier = RunDir(path=Path(config.resume))
    if not (earlier.path / CONFIG).is_file():
        raise _no_such_run(earlier.path)
    earlier_config = earlier.config_reader()([])
    _check_same_run(config, earlier_config, earlier)

    steps = config.train.steps
    earlier_steps = earlier_config.train.steps
    if steps <= earlier_steps:
        raise bad_value("train.steps", steps, f"more than the {earlier_steps} updates of {earlier.path}, to extend it")
    reason = _reason_against(config)
    if reason is not None:
        raise UserError(f"resume: {earlier.path} cannot be extended: {reason}")
    summary = earlier.summary() or {}
    last_update = summary.get("steps", earlier_steps)
    if summary.get("status") == "FINISHED" and last_update < earlier_steps:
        raise UserError(f"resume: {earlier.path} cannot be extended: {summary['reason']}, and would stop there again")
    if not saved(earlier.checkpoints):
        raise UserError(f"resume: {earlier.path} has no checkpoint to continue from (train.checkpoint_every)")


def _no_such_run(path: Path) -> UserError:
    others = [str(file.parent) for file in sorted(path.parent.glob(f"*/{CONFIG}"))]
    near = nearest(str(path), others)
    hint = ""
    if near:
        hint = f"; did you mean {near}?"
    return UserError(f"resume: {path} is not the folder of a run: it holds no {CONFIG}{hint}")


def _check_same_run(config: Config, earlier_config: Config, earlier: RunDir) -> None:
    """Raise :class:`UserError` where the runs differ in more than ``train.steps``, naming the keys."""
    keys = [key for key in differing_keys(config, earlier_config) if key != "train.steps"]
    if keys:
        raise UserError(
            f"resume: {earlier.path} was trained with another {', '.join(keys)}; to extend a run, only train.steps may "
            "change, and what its config hash leaves out"
        )
    # The hashes of both configs have the plugins that are loaded now.
    record = stored_record(earlier.path)
    stored_sources = {} if record is None else record.sources
    sources = plugins_of(config).hashes
    if stored_sources != sources:
        changed = changed_names(stored_sources, sources)
        raise UserError(f"resume: {earlier.path} was trained with other plugins: {changed} changed")


def _reason_against(config: Config) -> str | None:
    """Why the updates so far are not those that a run of more updates would have made."""
    schedule = config.optimizer.schedule
    if schedule != "constant":
        return f"optimizer.schedule {schedule} ends at train.steps, so that a longer run had other learning rates"
    if config.lag.mode == "replayed" and config.lag.steps > 0:
        # See DrawnHere: at its end a run draws no batch that it does not use.
        return f"the first batches after its end would have to be {config.lag.steps} updates old, and were not drawn"
    return None


def begin_extension(run: RunDir, config: Config) -> None:
    """Fill the folder of a new run with what the run that ``resume`` names had at its newest checkpoint.

    Does nothing for another value of ``resume``, and where the folder has a checkpoint already. The checkpoint comes
    last: a process that is killed here is repeated by the next one. Raises :class:`UserError` where the earlier run is
    being trained, or has no undamaged checkpoint.
    """
    from kl_comedy.tracking.logger import copy_record
    from kl_comedy.training.checkpoint import newest_checkpoint

    if config.resume in RESUME or run.checkpoint is not None:
        return
    earlier = RunDir(path=Path(config.resume))
    if earlier.path.resolve() == run.path.resolve():
        return
    earlier.check_links()
    with earlier.lock():
        checkpoint = newest_checkpoint(earlier.checkpoints, rename=False)
        if checkpoint is None:
            raise UserError(f"resume: {earlier.path} has no undamaged checkpoint to continue from")
        extension = Extension(run=earlier.path.resolve().name, update=step_of(checkpoint))
        copy_record(earlier.path, run.path, up_to=extension.update)
        recording = earlier.path / "rollouts"
        if recording.is_dir():
            shutil.copytree(recording, run.path / recording.name, dirs_exist_ok=True)
        write_json(run.path / EXTENSION, {"run": extension.run, "update": extension.update})
        # Not a name of a checkpoint until it is whole.
        partial = run.checkpoints / "extension"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial, copy_function=_link_or_copy)
        partial.rename(run.checkpoints / checkpoint.name)


def _link_or_copy(source: str, target: str) -> None:
    # A checkpoint of a large model is many gigabytes. Its files are never changed, only removed, so that two folders
    # may share them.
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
