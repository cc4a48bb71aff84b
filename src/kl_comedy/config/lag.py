"""Which settings of ``lag`` go together, and with which backend; each other combination is refused with its reason."""

from __future__ import annotations

from kl_comedy.config.schema import Config, LagConfig
from kl_comedy.errors import bad_value


def check_lag(config: Config) -> None:
    """Raise :class:`UserError` for settings of ``lag`` that contradict each other or the rest of the run."""
    lag, per_batch = config.lag, updates_from_a_batch(config)
    _only_where_it_means_something(lag)
    if lag.mode == "replayed" and lag.steps % per_batch:
        raise bad_value(
            "lag.steps", lag.steps, f"a multiple of the {per_batch} updates made from one batch",
            "otherwise a batch cannot be exactly that many updates old",
        )  # fmt: skip
    if lag.policy == "drop" and lag.max_steps < per_batch:
        raise bad_value(
            "lag.max_steps", lag.max_steps, f"at least {per_batch} with lag.policy drop",
            f"{per_batch} updates are made from one batch, so all that is drawn meanwhile would be dropped; "
            "lag.policy=wait takes any bound",
        )  # fmt: skip
    if lag.in_flight and lag.max_steps == 0:
        raise bad_value("lag.in_flight", True, "false with lag.max_steps 0", "nothing is sampled while weights change")
    if lag.mode == "async" and config.train.strategy != "single":
        raise bad_value(
            "train.strategy", config.train.strategy, "single with lag.mode async",
            "the sampler process takes its weights from one learner's memory",
        )  # fmt: skip
    if config.rollout.backend == "replay" and lag.mode != "on_policy":
        raise bad_value(
            "lag.mode", lag.mode, "on_policy with rollout.backend replay",
            "recorded rollouts are as old as they are; nothing is sampled",
        )  # fmt: skip


def updates_from_a_batch(config: Config) -> int:
    """Optimizer updates made from one batch of rollouts."""
    return config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch


def _only_where_it_means_something(lag: LagConfig) -> None:
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
