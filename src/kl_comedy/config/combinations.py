"""Combinations of settings that cannot work together, each refused with its reason."""

from __future__ import annotations

import re

from kl_comedy.config.schema import Config, LagConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.records import Capabilities
from kl_comedy.registry import ADVANTAGES, ROLLOUTS


def check_lag(config: Config) -> None:
    """Raise :class:`UserError` for settings of ``lag`` that contradict each other or the rest of the run."""
    lag, per_batch = config.lag, updates_from_a_batch(config)
    _check_lag_mode(lag)
    if lag.mode == "replayed" and lag.steps % per_batch:
        raise bad_value(
            "lag.steps",
            lag.steps,
            f"a multiple of the {per_batch} updates made from one batch",
            "otherwise a batch cannot be exactly that many updates old",
        )
    if lag.policy == "drop" and lag.max_steps < per_batch:
        raise bad_value(
            "lag.max_steps",
            lag.max_steps,
            f"at least {per_batch} with lag.policy drop",
            f"{per_batch} updates are made from one batch, so all that is drawn meanwhile would be dropped; "
            "lag.policy=wait takes any bound",
        )
    if lag.in_flight and lag.max_steps == 0:
        raise bad_value("lag.in_flight", True, "false with lag.max_steps 0", "nothing is sampled while weights change")


def capabilities_of(backend: str) -> Capabilities:
    """What the registered ``backend`` declared that it can do."""
    return ROLLOUTS.get(backend, key="rollout.backend").facts.get("capabilities", Capabilities())  # type: ignore[no-any-return]


def check_backend(config: Config) -> None:
    """Raise :class:`UserError` where strategy, rollout backend, lag and algorithm cannot work together."""
    backend, lag, strategy = config.rollout.backend, config.lag, config.train.strategy
    can = capabilities_of(backend)
    if lag.mode == "async" and strategy != "single":
        why = "the sampler process takes its weights from one learner's memory"
        raise bad_value("train.strategy", strategy, "single with lag.mode async", why)
    if can.recorded and lag.mode != "on_policy":
        why = "recorded rollouts are as old as they are; nothing is sampled"
        raise bad_value("lag.mode", lag.mode, f"on_policy with rollout.backend {backend}", why)
    if lag.in_flight and not can.updates_between_tokens:
        why = "it takes new weights between batches only"
        raise bad_value("lag.in_flight", True, f"false with rollout.backend {backend}", why)
    if strategy != "single" and not can.draws_parts:
        able = [entry.name for entry in ROLLOUTS if capabilities_of(entry.name).draws_parts]
        raise bad_value("rollout.backend", backend, able, f"with train.strategy {strategy}")
    advantage = ADVANTAGES.get(config.algorithm.advantage, key="algorithm.advantage")
    if strategy != "single" and advantage.facts.get("critic"):
        allowed = f"single with a value head (algorithm.advantage: {advantage.name})"
        raise bad_value("train.strategy", strategy, allowed)


def updates_from_a_batch(config: Config) -> int:
    """Optimizer updates made from one batch of rollouts."""
    return config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch


def _check_lag_mode(lag: LagConfig) -> None:
    if lag.mode == "on_policy" and lag.steps:
        raise bad_value("lag.steps", lag.steps, "0", "lag.mode is on_policy; did you mean lag.mode=replayed?")
    if lag.mode == "async" and lag.steps:
        raise bad_value("lag.steps", lag.steps, "0 with lag.mode async", "did you mean lag.max_steps?")
    if lag.mode != "async":
        neutral = LagConfig()
        for name in ("max_steps", "policy", "in_flight", "silence_limit_s", "answer_limit_s"):
            value, off = getattr(lag, name), getattr(neutral, name)
            if value != off:
                raise bad_value(f"lag.{name}", value, f"{off} with lag.mode {lag.mode}", "it belongs to lag.mode=async")


def check_combinations(config: Config) -> None:
    """Raise :class:`UserError` for the first impossible combination."""
    _names(config)
    _batches(config)
    check_lag(config)
    check_backend(config)
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
            "model.lora.dropout",
            config.model.lora.dropout,
            "0",
            "dropout makes the policy that is differentiated another one than the policy that sampled",
        )


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
            "algorithm.updates_per_batch",
            algorithm.updates_per_batch,
            f"a divisor of rollout.prompts_per_batch ({rollout.prompts_per_batch})",
            "groups stay whole, and every update takes the same number of them",
        )
    if rollout.group_size < 2 and algorithm.advantage in ("rloo", "grpo"):
        raise bad_value(
            "rollout.group_size",
            rollout.group_size,
            "at least 2",
            f"{algorithm.advantage} compares completions of one prompt",
        )


def _processes(config: Config) -> None:
    train, prompts = config.train, config.rollout.prompts_per_batch
    world = train.devices * train.nodes
    if train.strategy == "single":
        for name, value in (("devices", train.devices), ("nodes", train.nodes)):
            if value != 1:
                raise bad_value(f"train.{name}", value, "1 with train.strategy: single", "the others take more")
        return
    if prompts % world:
        raise bad_value(
            "rollout.prompts_per_batch",
            prompts,
            f"a multiple of {world}",
            f"it counts the prompts of all {world} processes (train.devices x train.nodes), and each draws as many",
        )
    if config.audit.every:
        raise bad_value(
            "audit.every",
            config.audit.every,
            "0 with train.strategy ddp or fsdp",
            "an audit runs in one process: kl-comedy audit RUN_DIR train.strategy=single",
        )
