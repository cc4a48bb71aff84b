"""Combinations of settings that cannot work together, each refused with its reason."""

from __future__ import annotations

import re

from kl_comedy.config.lag import check_lag
from kl_comedy.config.schema import Config
from kl_comedy.errors import UserError, bad_value


def check_combinations(config: Config) -> None:
    """Raise :class:`UserError` for the first impossible combination found."""
    _names(config)
    _batches(config)
    check_lag(config)
    _processes(config)
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise bad_value("optimizer.betas", list(config.optimizer.betas), "two numbers in [0, 1)")
    if config.optimizer.warmup_steps > config.train.steps:
        raise bad_value(
            "optimizer.warmup_steps", config.optimizer.warmup_steps, f"at most train.steps ({config.train.steps})"
        )
    if not config.rewards:
        raise UserError("rewards: needs at least one reward, as in [{name: math_verify}]")
    if config.train.eval_every and not (config.data.eval or config.eval.suites):
        raise UserError(
            f"train.eval_every is {config.train.eval_every}, and neither data.eval nor eval.suites names problems to "
            "evaluate on"
        )
    if config.model.lora and config.model.lora.dropout > 0:
        raise bad_value(
            "model.lora.dropout", config.model.lora.dropout, "0",
            "dropout makes the policy that is differentiated another one than the policy that sampled",
        )  # fmt: skip


def _names(config: Config) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        raise bad_value("name", config.name, "letters, digits, '.', '_' and '-', since it names a folder")
    for name in config.data.eval:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise bad_value("data.eval", name, "set names of letters, digits, '.', '_' and '-'")


def _batches(config: Config) -> None:
    rollout, algorithm = config.rollout, config.algorithm
    if rollout.prompts_per_batch % algorithm.updates_per_batch:
        raise bad_value(
            "algorithm.updates_per_batch", algorithm.updates_per_batch,
            f"a divisor of rollout.prompts_per_batch ({rollout.prompts_per_batch})",
            "groups stay whole, and every update takes the same number of them",
        )  # fmt: skip
    if rollout.group_size < 2 and algorithm.advantage in ("rloo", "grpo"):
        raise bad_value(
            "rollout.group_size", rollout.group_size, "at least 2",
            f"{algorithm.advantage} compares completions of one prompt",
        )  # fmt: skip


def _processes(config: Config) -> None:
    train, prompts = config.train, config.rollout.prompts_per_batch
    world = train.devices * train.nodes
    if train.strategy == "single":
        for name, value in (("devices", train.devices), ("nodes", train.nodes)):
            if value != 1:
                raise bad_value(f"train.{name}", value, "1 with train.strategy: single", "the others take more")
        return
    if train.strategy == "fsdp1" and world == 1:
        raise bad_value("train.devices", 1, "2 or more processes with train.strategy: fsdp1", "alone it shards nothing")
    if prompts % world:
        raise bad_value(
            "rollout.prompts_per_batch", prompts, f"a multiple of {world}",
            f"it counts the prompts of all {world} processes (train.devices x train.nodes), and each draws as many",
        )  # fmt: skip
    if config.audit.every:
        raise bad_value("audit.every", config.audit.every, "0 with train.strategy ddp, fsdp or fsdp1",
                        "an audit runs in one process: kl-comedy audit RUN_DIR train.strategy=single")  # fmt: skip
