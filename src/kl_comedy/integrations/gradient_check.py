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
        self.trainer = trainer
        self.original = trainer.compute_loss
        self.callbacks: list[LossCallback] = []

    def __call__(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        # Batches of an evaluation are not the objective's.
        if model.training:
            self._examine(model, inputs)
        return self.original(model, inputs, *args, **options)

    def _examine(self, model: Any, inputs: Any) -> None:
        step = self.trainer.state.global_step
        for callback in self.callbacks:
            is_due = callback.next_step is not None and step >= callback.next_step
            if is_due:
                unwrapped = self.trainer.accelerator.unwrap_model(model)
                callback.next_step = callback.examine(step, unwrapped, inputs)


class LossCallback(TrainerCallback, abc.ABC):
    """Calls :meth:`examine` before the loss of a step, with a loss that can be computed at any KL coefficient.

    Raises :class:`UserError` for a trainer without the attribute ``coefficient``, and for FSDP and DeepSpeed, which
    keep parameters in shards.
    """

    def __init__(self, trainer: Any, coefficient: str) -> None:
        if not hasattr(trainer, coefficient):
            raise UserError(f"coefficient: {type(trainer).__name__} has no attribute {coefficient!r}")
        self.trainer = trainer
        self.coefficient = coefficient
        self.records: list[dict[str, float]] = []
        self.next_step: int | None = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wrap the trainer's ``compute_loss``, once for all callbacks of this kind."""
        trainer = self.trainer
        for switch in ("is_fsdp_enabled", "is_deepspeed_enabled"):
            if getattr(trainer, switch, False):
                raise UserError(f"{type(self).__name__}: needs whole parameters, and FSDP and DeepSpeed keep shards")
        # Wrapped twice, a batch would be shown twice, and the inner wrapper measured by the outer one.
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
        """Measure a batch; returns the step at which to measure the next one, None for no more."""

    def loss(self, model: Any, inputs: Any, coefficient: float) -> Tensor:
        """The loss at a coefficient; random numbers and logged metrics are left as they were."""
        trainer = self.trainer
        own_coefficient = getattr(trainer, self.coefficient)
        # TRL logs from within its loss: two more losses would count twice in its means.
        own_metrics = copy.deepcopy(getattr(trainer, "_metrics", None))
        try:
            setattr(trainer, self.coefficient, coefficient)
            # The dropout of the trainer's own pass must be what it would be without this callback.
            with torch.random.fork_rng():
                loss: Tensor = self._original(model, inputs)
            return loss
        finally:
            setattr(trainer, self.coefficient, own_coefficient)
            if own_metrics is not None:
                trainer._metrics = own_metrics


class KLGradientCheck(LossCallback):
    """Compare the loss's gradient with and without its KL part; raise :class:`RunFailed` where the KL part has none.

    The loss of a batch is computed with ``trainer.<coefficient>`` (``beta``; ``kl_scale`` of our TRL trainers) at 1
    and at 0. A KL part with a value and without gradient was computed under ``no_grad`` or detached. A policy equal to
    its reference has neither, so steps are tried until one has; after ``patience`` steps a warning says that the
    coefficient changes nothing (as in RLOO, where the KL is part of the reward). ``every``: check again after that many
    steps; 0 for once. ``records`` has, per checked step, ``kl_loss`` at coefficient 1, the norms ``kl_norm`` and
    ``task_norm`` of both gradients, and their ``cosine``.

    Costs two more forward and backward passes per checked micro-batch, and three gradients in memory.
    """

    def __init__(self, trainer: Any, *, coefficient: str = "beta", every: int = 0, patience: int = 5) -> None:
        super().__init__(trainer, coefficient)
        self.every = every
        self.patience = patience
        self.passed = False

    def examine(self, step: int, model: Any, inputs: Any) -> int | None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        with_kl = self.loss(model, inputs, 1.0)
        without_kl = self.loss(model, inputs, 0.0)
        # The loss is linear in the coefficient, so the difference is the KL part alone.
        kl_loss = with_kl - without_kl
        task_gradient = _gradient(without_kl, weights)
        kl_gradient = _gradient(kl_loss, weights)
        task_norm = float(task_gradient.norm())
        kl_norm = float(kl_gradient.norm())
        cosine = float(kl_gradient @ task_gradient) / max(kl_norm * task_norm, 1e-30)
        kl_value = float(kl_loss.detach())
        self.records.append(
            {"step": step, "kl_loss": kl_value, "kl_norm": kl_norm, "task_norm": task_norm, "cosine": cosine}
        )

        # Relative to the task: the difference of two losses has the rounding of both.
        has_gradient = kl_norm > EPSILON * task_norm
        has_value = abs(kl_value) > EPSILON * max(1.0, abs(float(without_kl.detach())))
        if has_gradient:
            self.passed = True
        elif has_value:
            raise RunFailed(
                f"step {step}: the KL part of the loss is {kl_value:.3g} and has no gradient "
                f"(norm {kl_norm:.3g}, task {task_norm:.3g}): it was detached, or computed under no_grad"
            )
        elif len(self.records) == self.patience and not self.passed:
            name = self.coefficient
            warnings.warn(f"KLGradientCheck: {name} changed nothing in the loss of {self.patience} steps", stacklevel=2)
        return self._next_step(step)

    def _next_step(self, step: int) -> int | None:
        # Tried again at the next step: the policy may still equal its reference.
        if not self.passed:
            return step + 1
        if self.every:
            return step + self.every
        return None


def _gradient(loss: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The gradient as one float32 vector; zeros where the loss does not depend on a weight."""
    if not loss.requires_grad:
        return torch.zeros(sum(weight.numel() for weight in weights))
    # The graph is kept: the difference of two losses holds the graph of the second, which is differentiated first.
    gradients = torch.autograd.grad(loss, list(weights), retain_graph=True, allow_unused=True)
    parts = []
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(weight)
        parts.append(gradient.flatten().float())
    return torch.cat(parts)
