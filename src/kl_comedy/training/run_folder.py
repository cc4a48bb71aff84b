"""The folder of a run: where it is, who holds it, what to resume.

runs/<name>-<config hash>-<n>/  config.yaml  checkpoints/  policy/  spool.jsonl  tables/  summary.json
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.config import Config, config_hash, to_yaml
from kl_comedy.errors import UserError
from kl_comedy.io import LockHeld, atomic_write, file_lock


@dataclass(frozen=True, kw_only=True)
class RunDir:
    """A run's folder. ``checkpoint`` is the newest checkpoint that took its place, or None."""

    path: Path

    @property
    def adapter(self) -> Path:
        """Where the adapter of a LoRA run is kept beside the merged policy."""
        return self.path / "adapter"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.path / "policy"

    @property
    def checkpoint(self) -> Path | None:
        found = saved(self.checkpoints)
        return found[-1] if found else None

    @property
    def checkpoint_step(self) -> int | None:
        found = self.checkpoint
        return None if found is None else step_of(found)

    def summary(self) -> dict[str, Any] | None:
        """What the run ended with, or None while it has not ended."""
        file = self.path / "summary.json"
        if not file.is_file():
            return None
        data: dict[str, Any] = json.loads(file.read_text())
        return data

    def write_summary(self, summary: dict[str, Any]) -> None:
        atomic_write(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder for this process; another live holder is an error, a dead one is not."""
        try:
            with file_lock(self.path / ".lock", wait_s=0):
                yield
        except LockHeld as error:
            raise UserError(f"{self.path} is being trained by process {error.holder}; wait for it, or end it") from None


def saved(root: Path) -> list[Path]:
    """Checkpoints that took their place, oldest first; whether they are whole is another question."""
    return sorted(root.glob("step-*.ckpt"))


def step_of(checkpoint: Path) -> int:
    """The update after which it was made."""
    return int(checkpoint.stem.split("-")[1])


def find_run(config: Config) -> RunDir | None:
    """With ``resume=auto``, the newest folder of a run of the same config, finished or not; else None."""
    if config.resume != "auto":
        return None
    earlier = _earlier(config)
    return RunDir(path=earlier[-1]) if earlier else None


def create_run(config: Config) -> RunDir:
    """A new folder, numbered after those of the same config, with the resolved config in it."""
    earlier = _earlier(config)
    number = _number(earlier[-1]) + 1 if earlier else 1
    while True:
        path = Path(config.output) / f"{_stem(config)}-{number}"
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise UserError(f"output: cannot create {path}: {error.strerror}") from None
    run = RunDir(path=path)
    run.checkpoints.mkdir()
    (path / "config.yaml").write_text(to_yaml(config))
    return run


def _stem(config: Config) -> str:
    return f"{config.name}-{config_hash(config)}"


def _number(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])


def _earlier(config: Config) -> list[Path]:
    return sorted(Path(config.output).glob(f"{_stem(config)}-[0-9]*"), key=_number)
