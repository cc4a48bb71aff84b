"""What is audited: a config, or the newest checkpoint of a run. Read without Lightning, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.config import Config, load_config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.registry import OWN_PART, RECIPES
from kl_comedy.training.checkpoint import newest_checkpoint
from kl_comedy.training.run_folder import RunDir, step_of


@dataclass(frozen=True, kw_only=True)
class AuditSource:
    """A config and, where it was read from a run's folder, that run's newest checkpoint.

    ``step`` is the number of updates before the checkpoint; 0 without one.
    """

    config: Config
    checkpoint: Path | None
    step: int

    @classmethod
    def read(cls, path: Path, overrides: list[str]) -> AuditSource:
        """Read a YAML config or a run's folder.

        Raises :class:`UserError` for a folder without a checkpoint, and for overrides of what it was trained with.
        """
        if not path.is_dir():
            return cls(config=load_config(path, overrides), checkpoint=None, step=0)
        run = RunDir(path=path)
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path} is a folder without config.yaml; give a YAML config, or the folder of a run")
        # The run may still be training: its damaged checkpoints are not ours to rename.
        checkpoint = newest_checkpoint(run.checkpoints, rename=False)
        if checkpoint is None:
            raise UserError(
                f"{path} holds no checkpoint (train.checkpoint_every, train.keep_checkpoints); audit its config.yaml "
                "instead, which trains some updates first"
            )
        if any(text.startswith(("kl=", "kl.", "model.")) for text in overrides):
            raise UserError(
                "audit: kl and model of a run are what its checkpoint was trained with; audit other terms with --terms"
            )
        config = run.config_reader()(overrides)
        return cls(config=config, checkpoint=checkpoint, step=step_of(checkpoint))


def check_term_names(names: Sequence[str], key: str) -> None:
    """Raise :class:`UserError` under ``key`` for a name that is neither ``own``, ``panel`` nor a recipe."""
    for name in names:
        if name not in ("own", "panel") and name not in RECIPES:
            raise bad_value(key, name, ["own", "panel", *RECIPES.names()], OWN_PART)
