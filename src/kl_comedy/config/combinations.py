"""Combinations of settings that cannot work together, each refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kl_comedy.config.schema import SHARDED, Config, LagConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import MAX_NAME
from kl_comedy.registry import KINDS

Conflict = tuple[str, Any, str | list[str], str]
"""A key, its value, what is allowed beside the other settings, and why: the arguments of :func:`bad_value`."""


def check_combinations(config: Config) -> None:
    """Raise :class:`UserError` for the first impossible combination."""
    for conflicts in (_names, _batches, _lag):
        for conflict in conflicts(config):
            raise bad_value(*conflict)
    # What the sampler cannot serve, the table of samplers knows.
    KINDS["rollouts"].check(config, "rollout")
    for conflicts in (_processes, _precision, _optimizer):
        for conflict in conflicts(config):
            raise bad_value(*conflict)
    for conflict in _environment(config):
        raise bad_value(*conflict)
    if not config.rewards and not (config.environment and config.environment.weights):
        raise UserError("rewards: needs at least one reward, as in [{name: math_verify}]")
    if config.train.eval_every and not (config.data.eval or config.eval.suites):
        raise UserError(
            f"train.eval_every is {config.train.eval_every}, and neither data.eval nor eval.suites names problems to "
            "evaluate on"
        )


def updates_from_a_batch(config: Config) -> int:
    """Optimizer updates made from one batch of rollouts."""
    return config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch


def is_off_policy(config: Config) -> bool:
    """Whether any update uses samples of other weights than its own."""
    has_lag = config.lag.steps > 0 or config.lag.max_steps > 0
    reuses_batches = updates_from_a_batch(config) > 1
    is_recorded = config.rollout.backend == "replay"  # drawn by another run's policy
    return has_lag or reuses_batches or is_recorded


def _names(config: Config) -> Iterator[Conflict]:
    letters = "letters, digits, '.', '_' and '-'"
    for key, name in (("name", config.name), *(("data.eval", name) for name in config.data.eval)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            yield key, name, f"{letters}, since it names a folder" if key == "name" else f"set names of {letters}", ""
        elif len(name) > MAX_NAME:
            yield (
                key,
                name,
                f"at most {MAX_NAME} characters",
                "it is part of a folder's name of at most 255 bytes",
            )


def _batches(config: Config) -> Iterator[Conflict]:
    prompts = config.rollout.prompts_per_batch
    group_size = config.rollout.group_size
    algorithm = config.algorithm
    # A baseline compares the completions of one prompt, so that a group never spans two updates.
    if prompts % algorithm.updates_per_batch:
        allowed = f"a divisor of rollout.prompts_per_batch ({prompts})"
        why = "groups stay whole, and every update takes the same number of them"
        yield "algorithm.updates_per_batch", algorithm.updates_per_batch, allowed, why
    if group_size < 2 and algorithm.advantage in ("rloo", "grpo"):
        yield (
            "rollout.group_size",
            group_size,
            "at least 2",
            f"{algorithm.advantage} compares completions of one prompt",
        )


def _environment(config: Config) -> Iterator[Conflict]:
    environment = config.environment
    if environment is None:
        return
    longest = config.rollout.max_new_tokens
    if environment.turn_tokens is None and environment.turns > longest:
        allowed = f"at most rollout.max_new_tokens ({longest})"
        yield "environment.turns", environment.turns, allowed, "a turn has at least one token"
    if environment.turn_tokens is not None and environment.turn_tokens > longest:
        allowed = f"at most rollout.max_new_tokens ({longest})"
        yield "environment.turn_tokens", environment.turn_tokens, allowed, "which counts the whole dialogue"


def _lag(config: Config) -> Iterator[Conflict]:
    lag = config.lag
    per_batch = updates_from_a_batch(config)
    if lag.mode == "on_policy" and lag.steps:
        yield "lag.steps", lag.steps, "0", "lag.mode is on_policy; did you mean lag.mode=replayed?"
    if lag.mode == "async" and lag.steps:
        yield "lag.steps", lag.steps, "0 with lag.mode async", "did you mean lag.max_steps?"
    if lag.mode != "async":
        belongs_to_async = "it belongs to lag.mode=async"
        if lag.max_steps:
            yield "lag.max_steps", lag.max_steps, f"0 with lag.mode {lag.mode}", belongs_to_async
        for name in ("policy", "in_flight"):
            value = getattr(lag, name)
            default = getattr(LagConfig(), name)
            if value != default:
                yield f"lag.{name}", value, f"{default} with lag.mode {lag.mode}", belongs_to_async
    if lag.mode == "replayed" and lag.steps % per_batch:
        allowed = f"a multiple of the {per_batch} updates made from one batch"
        yield "lag.steps", lag.steps, allowed, "otherwise a batch cannot be exactly that many updates old"
    # The batch that is drawn while one is learned from is per_batch updates old when its turn comes.
    if lag.policy == "drop" and lag.max_steps < per_batch:
        why = (
            f"{per_batch} updates are made from one batch, so all that is drawn meanwhile would be dropped; "
            "lag.policy=wait takes any bound"
        )
        yield "lag.max_steps", lag.max_steps, f"at least {per_batch} with lag.policy drop", why
    if lag.in_flight and lag.max_steps == 0:
        yield "lag.in_flight", True, "false with lag.max_steps 0", "nothing is sampled while weights change"


def _processes(config: Config) -> Iterator[Conflict]:
    train = config.train
    prompts = config.rollout.prompts_per_batch
    processes = train.devices * train.nodes
    if train.strategy == "single":
        for name in ("devices", "nodes"):
            if getattr(train, name) != 1:
                yield f"train.{name}", getattr(train, name), "1 with train.strategy: single", "the others take more"
    elif prompts % processes:
        why = (
            f"it counts the prompts of all {processes} processes (train.devices x train.nodes), and each draws as many"
        )
        yield "rollout.prompts_per_batch", prompts, f"a multiple of {processes}", why


def _precision(config: Config) -> Iterator[Conflict]:
    """Attention and shards."""
    model = config.model
    train = config.train
    wide = model.dtype == "float32" and train.precision == "fp32"
    if model.attention == "varlen" and (wide or not model.share_prompt):
        why = "its kernel takes packed rows (model.share_prompt) in 16 bits (train.precision=bf16)"
        yield "model.attention", "varlen", ["sdpa", "eager"], why
    if train.shards != "all" and train.strategy not in SHARDED:
        yield (
            "train.shards",
            train.shards,
            f"all with train.strategy {train.strategy}",
            "it does not shard",
        )


def _optimizer(config: Config) -> Iterator[Conflict]:
    betas = config.optimizer.betas
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield "optimizer.betas", list(betas), "two numbers in [0, 1)", ""
    if warmup > steps:
        yield "optimizer.warmup_steps", warmup, f"at most train.steps ({steps})", ""
