"""What happens around an update, in this order: metrics, samples, evaluation, checkpoint, display."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from signal import SIGTERM
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from kl_comedy.errors import RunFailed
from kl_comedy.evaluation import EvalSet, Result, evaluate
from kl_comedy.evaluation.comparing import ChoiceSet, compare
from kl_comedy.evaluation.likelihood import choice_passes
from kl_comedy.records import Scored
from kl_comedy.tracking import Tracker
from kl_comedy.training.build import Parts, eval_sampling
from kl_comedy.training.checkpoints import SaveFailed, Vault
from kl_comedy.training.held_out import completion_measure
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.rundir import saved, step_of
from kl_comedy.training.seeds import derive_seed
from kl_comedy.training.stopping import StopRequest

log = logging.getLogger("kl_comedy")

SAMPLE_ROWS = 16
"""Completions kept per samples table: enough to see a group beside another."""


def sample_rows(rows: tuple[Scored, ...]) -> list[dict[str, Any]]:
    """Completions as table rows, hostile text included as it is (the table is JSON)."""
    return [
        {
            "problem": row.rollout.prompt.problem.text,
            "answer": row.rollout.prompt.problem.answer,
            "completion": row.rollout.text,
            "reward": row.reward.value,
            "status": row.reward.status,
            "tokens": len(row.rollout.completion_ids),
            "stop_reason": row.rollout.stop_reason,
            "version": row.rollout.versions[0] if row.rollout.versions else None,
        }
        for row in rows[:SAMPLE_ROWS]
    ]


class MetricsCallback(Callback):
    """Every update's metrics, and a table of sampled completions every ``samples_every`` updates."""

    def __init__(self, tracker: Tracker, samples_every: int) -> None:
        self._tracker, self._every = tracker, samples_every

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PolicyModule)
        self._tracker.log(pl_module.last_metrics, step=pl_module.version)
        if self._every and (pl_module.version == 1 or pl_module.version % self._every == 0):
            self._tracker.table("samples", sample_rows(batch.rows), step=pl_module.version)


class EvaluationCallback(Callback):
    """Evaluation on every set at the start, every ``eval_every`` updates, and at the end.

    ``history``: mean rewards by set and update; ``accuracies``: those of suites by log-prob, which have no reward.
    """

    def __init__(self, parts: Parts, tracker: Tracker, show: Callable[[Result, int], None]) -> None:
        self._parts, self._tracker, self._show = parts, tracker, show
        self._measure = completion_measure(
            parts.config, loaded=parts.loaded, reference=parts.references["initial"], world=parts.world
        )
        self._passes = choice_passes(parts.config, parts.loaded, parts.world)
        self.history: dict[str, dict[int, float]] = {}
        self.accuracies: dict[str, dict[int, float]] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if self._parts.config.eval.at_start and pl_module.version == 0:
            self.run(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every, version = self._parts.config.train.eval_every, pl_module.version
        last = version == self._parts.config.train.steps
        if (every and version % every == 0) or (last and self._parts.config.eval.at_end):
            self.run(trainer, pl_module)

    def run(self, trainer: lightning.Trainer, module: PolicyModule) -> None:
        for held_out in self._parts.problems.evals:
            with trainer.precision_plugin.forward_context():
                self._draw(held_out, module.version)
        for asked in self._parts.problems.compared:
            with trainer.precision_plugin.forward_context():
                self._compare(asked, module.version)

    def _draw(self, held_out: EvalSet, version: int) -> None:
        config = self._parts.config
        result = evaluate(
            self._parts.backend, self._parts.scorer, held_out, samples=config.eval.samples,
            sampling=eval_sampling(config), seed=derive_seed(config.seed, f"eval/{held_out.name}", 0),
            measure=self._measure,
        )  # fmt: skip
        self._keep(result, version, result.reward, self.history)
        self._tracker.table(f"eval/{result.name}", sample_rows(result.rows), step=version)

    def _compare(self, asked: ChoiceSet, version: int) -> None:
        result = compare(self._passes, asked)
        self._keep(result, version, result.accuracy, self.accuracies)
        self._tracker.table(f"choices/{result.name}", list(result.rows[:SAMPLE_ROWS]), step=version)

    def _keep(self, result: Result, version: int, value: float, history: dict[str, dict[int, float]]) -> None:
        self._tracker.log(result.metrics(), step=version)
        history.setdefault(result.name, {})[version] = value
        self._show(result, version)

    def reward_at(self, version: int) -> float | None:
        """The mean reward over the sets evaluated at ``version``, suites by log-prob aside; None where none was."""
        found = [values[version] for values in self.history.values() if version in values]
        return sum(found) / len(found) if found else None

    def state_dict(self) -> dict[str, Any]:
        return {"history": _copied(self.history), "accuracies": _copied(self.accuracies)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = _copied(state_dict["history"])
        self.accuracies = _copied(state_dict.get("accuracies", {}))  # none in checkpoints of earlier versions


def _copied(history: Mapping[str, Mapping[int, float]]) -> dict[str, dict[int, float]]:
    return {name: dict(values) for name, values in history.items()}


class CheckpointCallback(Callback):
    """A whole checkpoint every ``every`` updates and at the end. Committing tells the tracker that it is final.

    One that cannot be written (full disk, quota, read-only) ends the run on every process; the one before stays.
    """

    def __init__(
        self, vault: Vault, tracker: Tracker, *, every: int, steps: int, reward_at: Callable[[int], float | None]
    ) -> None:
        self._vault, self._tracker, self._reward_at = vault, tracker, reward_at
        self._every, self._steps = every, steps
        self._saved: int | None = None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        version = pl_module.version
        if self._every and (version % self._every == 0 or version == self._steps):
            self.save(trainer, version)

    def ensure(self, trainer: lightning.Trainer, version: int) -> None:
        """Save unless the checkpoint of this update is already there."""
        if self._saved != version:
            self.save(trainer, version)

    def save(self, trainer: lightning.Trainer, version: int) -> None:
        try:
            self._vault.save(version, trainer.save_checkpoint, reward=self._reward_at(version))
        except SaveFailed as error:  # a full disk, a quota, a file system that went away
            there = saved(self._vault.root)
            raise RunFailed(
                f"the checkpoint of update {version} cannot be written ({error}); the run goes on from "
                f"update {step_of(there[-1]) if there else 0} when {self._vault.root} can be written again"
            ) from error
        self._saved = version
        self._tracker.commit(version)


class StopCallback(Callback):
    """When a signal asked for it: save what this update made, if that is not done, and end the training.

    Every process of a run stops at the same update, whichever of them heard the signal.
    """

    def __init__(self, request: StopRequest, checkpoints: CheckpointCallback, steps: int) -> None:
        self._request, self._checkpoints, self._steps = request, checkpoints, steps

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        heard = {signal for signal in pl_module.world.gather(self._request.signal) if signal is not None}
        if heard and pl_module.version < self._steps:
            self._request.signal = SIGTERM if SIGTERM in heard else heard.pop()
            self._checkpoints.ensure(trainer, pl_module.version)
            trainer.should_stop = True
