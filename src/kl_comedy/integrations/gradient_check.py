"""For any transformers Trainer (TRL's too): has the KL term a gradient, and how large is it?

trainer.add_callback(KLGradientCheck(trainer))
"""

from __future__ import annotations

import abc
import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from kl_comedy.errors import RunFailed, UserError

EPSILON = 1e-6
"""Relative size below which a difference of two float32 losses or gradients is rounding."""


class _ExaminedLoss:
    """A trainer's ``compute_loss`` that shows batches to callbacks first."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.original = trainer, trainer.compute_loss
        self.callbacks: list[LossCallback] = []

    def __call__(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        step = self.trainer.state.global_step
        for callback in self.callbacks if model.training else ():
            if callback.next_step is not None and step >= callback.next_step:
                callback.next_step = callback.examine(step, self.trainer.accelerator.unwrap_model(model), inputs)
        return self.original(model, inputs, *args, **options)


class LossCallback(TrainerCallback, abc.ABC):
    """Calls :meth:`examine` before the loss of a step, with a loss that can be computed at any KL coefficient.

    Raises :class:`UserError` for a trainer without the attribute ``coefficient``, and for FSDP and DeepSpeed, whose
    parameters are in shards.
    """

    def __init__(self, trainer: Any, coefficient: str) -> None:
        if not hasattr(trainer, coefficient):
            raise UserError(f"coefficient: {type(trainer).__name__} has no attribute {coefficient!r}")
        self.trainer, self.coefficient = trainer, coefficient
        self.records: list[dict[str, float]] = []
        self.next_step: int | None = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wrap the trainer's ``compute_loss``, once for all callbacks of this kind."""
        trainer = self.trainer
        if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
            raise UserError(f"{type(self).__name__}: needs whole parameters, and FSDP and DeepSpeed keep shards")
        if not isinstance(trainer.compute_loss, _ExaminedLoss):
            trainer.compute_loss = _ExaminedLoss(trainer)
        self._original = trainer.compute_loss.original
        trainer.compute_loss.callbacks.append(self)
        self.next_step = state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Unwrap it with the last callback."""
        examined = self.trainer.compute_loss
        examined.callbacks.remove(self)
        if not examined.callbacks:
            self.trainer.compute_loss = examined.original

    @abc.abstractmethod
    def examine(self, step: int, model: Any, inputs: Any) -> int | None:
        """Look at a batch; the step of the next one, None for no more."""

    def loss(self, model: Any, inputs: Any, coefficient: float) -> Tensor:
        """The loss at a coefficient; random numbers and logged metrics are left as they were."""
        trainer, name = self.trainer, self.coefficient
        before, metrics = getattr(trainer, name), copy.deepcopy(getattr(trainer, "_metrics", None))
        try:
            setattr(trainer, name, coefficient)
            with torch.random.fork_rng():
                return self._original(model, inputs)
        finally:
            setattr(trainer, name, before)
            if metrics is not None:
                trainer._metrics = metrics


class KLGradientCheck(LossCallback):
    """Compare the gradient with and without the KL part of the loss; raise :class:`RunFailed` where it makes none.

    The loss of a batch is computed with ``trainer.<coefficient>`` (``beta``; ``kl_scale`` of our TRL trainers) at 1
    and at 0. A KL part with a value and without gradient was computed under ``no_grad`` or detached. A policy equal to
    its reference has neither, so steps are tried until one has; after ``patience`` steps a warning says that the
    coefficient changes nothing (as in RLOO, where the KL is part of the reward). ``every``: check again each so many
    steps. ``records`` has, per checked step, ``kl_loss`` at coefficient 1, the norms ``kl_norm`` and ``task_norm``
    of both gradients, and their ``cosine``.

    Costs two more passes forward and backward of a checked micro-batch, and three gradients in memory.
    """

    def __init__(self, trainer: Any, *, coefficient: str = "beta", every: int = 0, patience: int = 5) -> None:
        super().__init__(trainer, coefficient)
        self.every, self.patience, self.passed = every, patience, False

    def examine(self, step: int, model: Any, inputs: Any) -> int | None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        with_kl, without_kl = (self.loss(model, inputs, at) for at in (1.0, 0.0))
        kl_loss = with_kl - without_kl
        task = _gradient(without_kl, weights)
        kl = _gradient(kl_loss, weights)
        kl_norm, task_norm = float(kl.norm()), float(task.norm())
        cosine = float(kl @ task) / max(kl_norm * task_norm, 1e-30)
        record = {"kl_loss": float(kl_loss.detach()), "kl_norm": kl_norm, "task_norm": task_norm, "cosine": cosine}
        self.records.append({"step": step, **record})
        if kl_norm > EPSILON * task_norm:
            self.passed = True
        elif abs(record["kl_loss"]) > EPSILON * max(1.0, abs(float(without_kl.detach()))):
            raise RunFailed(
                f"step {step}: the KL part of the loss is {record['kl_loss']:.3g} and has no gradient "
                f"(norm {kl_norm:.3g}, task {task_norm:.3g}): it was detached, or computed under no_grad"
            )
        elif len(self.records) == self.patience and not self.passed:
            name = self.coefficient
            warnings.warn(f"KLGradientCheck: {name} changed nothing in the loss of {self.patience} steps", stacklevel=2)
        if not self.passed:
            return step + 1
        return step + self.every if self.every else None


def _gradient(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient as one float32 vector; zeros where the loss does not depend on a weight."""
    if not loss.requires_grad:
        return torch.zeros(sum(weight.numel() for weight in weights))
    parts = torch.autograd.grad(loss, list(weights), retain_graph=True, allow_unused=True)
    pairs = zip(parts, weights, strict=True)
    return torch.cat([(torch.zeros_like(w) if g is None else g).flatten().float() for g, w in pairs])
