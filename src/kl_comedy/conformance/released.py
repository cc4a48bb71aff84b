"""The KL losses of trainers that are installed in this environment, as losses for ``check``.

Each is the trainer's own code, with the settings that select it; nothing of it is written again here.
"""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.conformance.arguments import described_error
from kl_comedy.errors import UserError, bad_value


@dataclass(frozen=True, kw_only=True)
class Released:
    """One KL loss of an installed trainer, at a coefficient of 1. ``settings``: the flags that select it."""

    function: str
    settings: str
    loss: Callable[..., Any]


def released(system: str) -> tuple[str, list[Released]]:
    """The installed version of a trainer, and its KL losses.

    Raises :class:`UserError` where it is not installed or cannot be imported.
    """
    if system not in SYSTEMS:
        raise bad_value("system", system, SYSTEMS)
    try:
        version = metadata.version(system)
    except metadata.PackageNotFoundError:
        raise UserError(f"{system}: it is not installed in this environment (pip install {system})") from None
    try:
        return version, SYSTEMS[system]()
    except Exception as error:
        # A package that it needs is missing, or this version has its functions elsewhere, or calls them otherwise.
        raise UserError(f"{system} {version}: it cannot be used here: {described_error(error)}") from error


# --- verl -------------------------------------------------------------------------------------------------------------
VERL_KINDS = ("k1", "k2", "low_var_kl", "abs", "k3+")


def _verl_losses() -> list[Released]:
    """``kl_penalty`` with each estimator, as the actor's loss calls it."""
    kl_penalty = importlib.import_module("verl.trainer.ppo.core_algos").kl_penalty
    losses = []
    for kind in VERL_KINDS:
        losses.append(
            Released(
                function="verl.trainer.ppo.core_algos.kl_penalty",
                settings=f"use_kl_loss=True kl_loss_type={kind}",
                loss=functools.partial(_verl_loss, kl_penalty, kind),
            )
        )
    return losses


def _verl_loss(kl_penalty: Callable[..., Tensor], kind: str, /, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """The penalty per token; verl's ``agg_loss`` then leaves masked tokens out."""
    return torch.where(mask, kl_penalty(logp, ref_logp, kind), 0.0)


# --- TRL --------------------------------------------------------------------------------------------------------------
def _trl_losses() -> list[Released]:
    """``GRPOTrainer._compute_loss`` with and without the ratio on the KL, where the version has that setting."""
    trainer_class = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    options = importlib.import_module("trl.trainer.grpo_config").GRPOConfig.__dataclass_fields__
    returns = _log_probs_returned(trainer_class)
    losses = []
    for bias_correction, level in ((True, "token"), (False, "token"), (True, "sequence")):
        settings = f"importance_sampling_level={level}"
        if "use_bias_correction_kl" in options:
            settings = f"use_bias_correction_kl={bias_correction} {settings}"
        elif bias_correction:
            continue
        losses.append(
            Released(
                function="trl.GRPOTrainer._compute_loss",
                settings=settings,
                loss=functools.partial(_trl_loss, trainer_class, returns, bias_correction, level),
            )
        )
    return losses


def _log_probs_returned(trainer_class: Any) -> int:
    """How many tensors ``_compute_loss`` takes from ``_get_per_token_logps_and_entropies``: three in newer versions.

    Raises what ``_compute_loss`` raises, where it can be called with neither number.
    """
    zeros_BT = torch.zeros(1, 1)
    for returns in (3, 2):
        try:
            _trl_loss(trainer_class, returns, True, "token", zeros_BT, zeros_BT, zeros_BT, zeros_BT == 0)
        except ValueError:
            if returns == 2:
                raise
        else:
            return returns
    raise AssertionError("the last number returns or raises")


def _trl_loss(
    trainer_class: Any,
    returns: int,
    bias_correction: bool,
    level: str,
    /,
    logp: Tensor,
    ref_logp: Tensor,
    behaviour_logp: Tensor,
    mask: Tensor,
) -> Tensor:
    """The loss with a beta of 1 and advantages of 0, which leave nothing of the policy loss, summed over the tokens."""
    trainer = _trl_trainer(trainer_class, logp, returns, bias_correction, level)
    ones_B1 = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ones_B1,
        "prompt_mask": ones_B1,
        "completion_ids": mask.long(),
        "completion_mask": mask.long(),
        "advantages": torch.zeros(len(mask), dtype=logp.dtype),
        "old_per_token_logps": behaviour_logp,
        "ref_per_token_logps": ref_logp,
        # loss_type "dapo" divides the sum over tokens by this number.
        "num_items_in_batch": torch.ones((), dtype=logp.dtype),
    }
    value: Tensor = trainer._compute_loss(trainer.model, inputs)
    return value


def _trl_trainer(trainer_class: Any, logp: Tensor, returns: int, bias_correction: bool, level: str) -> Any:
    """A trainer without a model: it is made without its constructor, with what ``_compute_loss`` reads."""
    trainer = object.__new__(trainer_class)
    zeros_BT = torch.zeros_like(logp)

    def log_probs_of_the_batch(*arguments: Any, **options: Any) -> Any:
        return (logp, zeros_BT, None)[:returns]

    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        sync_gradients=True,
        gather=lambda tensor: tensor,
        gather_for_metrics=lambda tensor: tensor,
        reduce=lambda tensor, reduction="sum": tensor,
    )
    attributes: dict[str, Any] = {
        "accelerator": accelerator,
        "args": SimpleNamespace(use_bias_correction_kl=bias_correction, delta=None, steps_per_generation=1),
        "aux_loss_enabled": False,
        "beta": 1.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_high": 0.2,
        "epsilon_low": 0.2,
        "importance_sampling_level": level,
        "loss_type": "dapo",
        "max_completion_length": logp.shape[1],
        "model": SimpleNamespace(training=True),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_entropy_bonus_enabled": False,
        "_get_per_token_logps_and_entropies": log_probs_of_the_batch,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
    }
    for name, value in attributes.items():
        # Past the trainer's own __setattr__, which would register a model's modules.
        object.__setattr__(trainer, name, value)
    return trainer


SYSTEMS: dict[str, Callable[[], list[Released]]] = {"trl": _trl_losses, "verl": _verl_losses}
