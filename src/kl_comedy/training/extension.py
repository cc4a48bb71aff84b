"""Train a run to more updates than it was started for: ``resume=auto train.steps=200``.

The result is a run of its own, in a folder of its own. It begins with the checkpoint and the metrics of the earlier
run, which stays as it is, and is to the bit what a run of 200 updates would have been. Where that does not hold,
because updates so far depended on the number of updates, no run is extended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass

from kl_comedy.config import Config
from kl_comedy.config.validate import parse_record
from kl_comedy.errors import UserError
from kl_comedy.io import read_json, write_json
from kl_comedy.training.run_folder import EXTENSION, RunDir, step_of


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
    content = read_json(file, "record of an extension", root=run.path)
    return parse_record(Extension, content, origin=str(file))


def reason_against(config: Config) -> str | None:
    """Why the updates so far are not those that a run of more updates would have made."""
    schedule = config.optimizer.schedule
    if schedule != "constant":
        return f"optimizer.schedule {schedule} ends at train.steps, so that a longer run had other learning rates"
    if config.lag.mode == "replayed" and config.lag.steps > 0:
        # See DrawnHere: at its end a run draws no batch that it does not use.
        return f"the first batches after its end would have to be {config.lag.steps} updates old, and were not drawn"
    return None


def begin_extension(run: RunDir, earlier: RunDir) -> None:
    """Fill the folder of a new run with what the ``earlier`` run had at its newest checkpoint.

    Raises :class:`UserError` where the earlier run is being trained, or has no undamaged checkpoint.
    """
    from kl_comedy.tracking.logger import copy_record
    from kl_comedy.training.checkpoint import newest_checkpoint

    earlier.check_links()
    with earlier.lock():
        checkpoint = newest_checkpoint(earlier.checkpoints, rename=False)
        if checkpoint is None:
            raise UserError(f"resume: {earlier.path} has no undamaged checkpoint to continue from")
        extension = Extension(run=earlier.path.resolve().name, update=step_of(checkpoint))
        copy_record(earlier.path, run.path, up_to=extension.update)
        recording = earlier.path / "rollouts"
        if recording.is_dir():
            shutil.copytree(recording, run.path / recording.name)
        write_json(run.path / EXTENSION, {"run": extension.run, "update": extension.update})
        shutil.copytree(checkpoint, run.checkpoints / checkpoint.name, copy_function=_link_or_copy)


def _link_or_copy(source: str, target: str) -> None:
    # A checkpoint of a large model is many gigabytes. Its files are never changed, only removed, so that two folders
    # may share them.
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)
