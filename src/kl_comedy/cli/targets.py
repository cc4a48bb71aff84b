"""What ``kl-comedy evaluate`` is pointed at: a config, a run, one of its checkpoints, a model by folder or name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.training.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Target:
    """The config whose ``model`` is evaluated, what to call it, and of which run and update its weights are."""

    config: Config
    label: str
    run: str | None = None
    step: int = 0

    def tags(self) -> dict[str, str]:
        """What an evaluation says about its subject."""
        tags = {"evaluated.model": self.config.model.source if self.run is None else self.label}
        return tags if self.run is None else {**tags, "evaluated.run": self.run, "evaluated.step": str(self.step)}


@contextlib.contextmanager
def resolved(target: str, overrides: Sequence[str]) -> Iterator[Target]:
    """The target, its weights on disk as long as the context lasts (a checkpoint's are written out for it).

    Raises :class:`~kl_comedy.errors.UserError` for a target that is none of these, and for mistaken overrides.
    """
    from kl_comedy.config import load_config
    from kl_comedy.training.rundir import RunDir

    path = Path(target)
    if path.suffix in (".yaml", ".yml"):
        config = load_config(path, overrides)
        yield Target(config=config, label=config.name)
    elif (path / "config.yaml").is_file():
        with _of_run(RunDir(path=path), None, overrides) as found:
            yield found
    elif path.suffix == ".ckpt" and (path.parent.parent / "config.yaml").is_file():
        with _of_run(RunDir(path=path.parent.parent), path, overrides) as found:
            yield found
    else:
        config = load_config(None, [f"model.source={target}", *overrides])
        yield Target(config=config, label=path.name or target)


@contextlib.contextmanager
def _of_run(run: RunDir, checkpoint: Path | None, overrides: Sequence[str]) -> Iterator[Target]:
    """RUN/policy of a finished run; else a checkpoint (the newest whole one, where none is named), written out."""
    from kl_comedy.config import load_config
    from kl_comedy.training.export import export_policy
    from kl_comedy.training.rundir import step_of

    own = load_config(run.path / "config.yaml")
    trained = ["model.options={}", "model.lora=null", "model.gguf_file=null", "model.revision=null"]
    if own.rollout.backend == "replay":
        trained += ["rollout.backend=hf", "rollout.options={}"]
    with tempfile.TemporaryDirectory(prefix="kl_comedy_policy_") as folder:
        source, step = run.policy, own.train.steps
        if checkpoint is not None or not run.policy.is_dir():
            source = Path(folder) / "policy"
            step = step_of(
                export_policy(run, own, source, which="newest" if checkpoint is None else str(step_of(checkpoint)))
            )
        config = load_config(run.path / "config.yaml", [f"model.source={source}", *trained, *overrides])
        yield Target(config=config, label=f"{run.path.name}-{step}", run=run.path.name, step=step)
