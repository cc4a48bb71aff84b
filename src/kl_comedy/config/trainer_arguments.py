"""The key ``trainer``: which arguments of Lightning's Trainer it may name. Lightning itself is not imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, unknown_key

TRAINER_ARGUMENTS = {
    "accelerator": "model.device",
    "accumulate_grad_batches": "train.microbatch_tokens",
    "callbacks": "callbacks",
    "check_val_every_n_epoch": "train.eval_every",
    "default_root_dir": "output",
    "deterministic": "train.deterministic",
    "devices": "train.devices",
    "enable_checkpointing": "train.checkpoint_every",
    "fast_dev_run": "train.steps",
    "gradient_clip_algorithm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "limit_train_batches": "train.steps",
    "limit_val_batches": "data.eval",
    "logger": "tracking",
    "max_epochs": "train.steps",
    "max_steps": "train.steps",
    "min_epochs": "train.steps",
    "min_steps": "train.steps",
    "num_nodes": "train.nodes",
    "num_sanity_val_steps": "eval.at_start",
    "overfit_batches": "data.train",
    "precision": "train.precision",
    "reload_dataloaders_every_n_epochs": "rollout",
    "strategy": "train.strategy",
    "use_distributed_sampler": "train.strategy",
    "val_check_interval": "train.eval_every",
}
"""Arguments of Lightning's Trainer that ``trainer`` may not name, and the config key that sets each."""


def check_trainer_arguments(trainer: Mapping[str, Any], key: str = "trainer") -> None:
    """Raise :class:`UserError` for a name in ``trainer`` that Lightning does not take, or that a config key sets.

    Without Lightning nothing is known of its arguments, and nothing can train either.
    """
    if not trainer:
        return
    for name, value in trainer.items():
        if name in TRAINER_ARGUMENTS:
            raise UserError(f"{key}.{name}: got {value!r}; {TRAINER_ARGUMENTS[name]} sets this argument")
    parameters = _trainer_parameters()
    if parameters is None:
        return
    allowed = sorted(parameters - set(TRAINER_ARGUMENTS))
    for name, value in trainer.items():
        if name not in allowed:
            raise unknown_key(f"{key}.{name}", value, allowed, "an argument of lightning.Trainer")


def _trainer_parameters() -> set[str] | None:
    """The keyword parameters of Lightning's Trainer, read in its source because its import takes some seconds."""
    spec = importlib.util.find_spec("lightning")
    if spec is None or spec.submodule_search_locations is None:
        return None
    (package,) = spec.submodule_search_locations
    source = Path(package, "pytorch", "trainer", "trainer.py").read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            names |= {argument.arg for argument in node.args.kwonlyargs}
    return names
