"""Combinations of settings that cannot work together, each refused with its reason.

A rule returns the error, or None (:func:`kl_comedy.errors.first_refusal`). Here are the rules that read nothing but the
config: sampling, batches, age of samples and processes. Those that read KL terms too are in
:mod:`kl_comedy.training.rules`, those of what a sampler can do in :mod:`kl_comedy.rollouts.sampler`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from kl_comedy.config.schema import SHARDED, AlgorithmConfig, Config, LagConfig
from kl_comedy.errors import UserError, bad_value, first_refusal
from kl_comedy.io import MAX_NAME
from kl_comedy.registry import ADVANTAGES, KINDS


def check_combinations(config: Config) -> None:
    """Raise :class:`UserError` for the first impossible combination."""
    error = first_refusal(RULES, config)
    if error is not None:
        raise error
    # What the sampler cannot serve, the table of samplers knows: nothing above config/ is imported here.
    KINDS["rollouts"].check(config, "rollout")


def updates_from_a_batch(config: Config) -> int:
    """Optimizer updates made from one batch of rollouts."""
    return config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch


def versions_of_samples(config: Config) -> int:
    """How many versions of the weights the samples of an update may be of: its own, and those before it."""
    # A batch is learned from at that age for the first time, and from update to update it is one older.
    age_at_first_update = max(config.lag.steps, config.lag.max_steps)
    return age_at_first_update + updates_from_a_batch(config)


def is_off_policy(config: Config) -> bool:
    """Whether any update uses samples of other weights than its own."""
    has_lag = config.lag.steps > 0 or config.lag.max_steps > 0
    reuses_batches = updates_from_a_batch(config) > 1
    is_recorded = config.rollout.backend == "replay"  # drawn by another run's policy
    return has_lag or reuses_batches or is_recorded


# --- names ------------------------------------------------------------------------------------------------------------


def name_that_no_folder_has(config: Config) -> UserError | None:
    letters = "letters, digits, '.', '_' and '-'"
    for key, name in (("name", config.name), *(("data.eval", name) for name in config.data.eval)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            allowed = f"{letters}, since it names a folder" if key == "name" else f"set names of {letters}"
            return bad_value(key, name, allowed)
        if len(name) > MAX_NAME:
            reason = "it is part of a folder's name of at most 255 bytes"
            return bad_value(key, name, f"at most {MAX_NAME} characters", reason)
    return None


# --- batches ----------------------------------------------------------------------------------------------------------


def batch_in_unequal_parts(config: Config) -> UserError | None:
    prompts = config.rollout.prompts_per_batch
    updates = config.algorithm.updates_per_batch
    # A baseline compares the completions of one prompt, so that a group never spans two updates.
    if prompts % updates == 0:
        return None
    reason = "groups stay whole, and every update takes the same number of them"
    allowed = f"a divisor of rollout.prompts_per_batch ({prompts})"
    return bad_value("algorithm.updates_per_batch", updates, allowed, reason)


def group_without_comparison(config: Config) -> UserError | None:
    group_size = config.rollout.group_size
    advantage = config.algorithm.advantage
    if group_size < 2 and advantage in ("rloo", "grpo"):
        reason = f"{advantage} compares completions of one prompt"
        return bad_value("rollout.group_size", group_size, "at least 2", reason)
    return None


# --- age of samples ---------------------------------------------------------------------------------------------------


def lag_of_fresh_samples(config: Config) -> UserError | None:
    lag = config.lag
    if lag.mode == "on_policy" and lag.steps:
        return bad_value("lag.steps", lag.steps, "0", "lag.mode is on_policy; did you mean lag.mode=replayed?")
    return None


def exact_lag_of_async(config: Config) -> UserError | None:
    lag = config.lag
    if lag.mode == "async" and lag.steps:
        return bad_value("lag.steps", lag.steps, "0 with lag.mode async", "did you mean lag.max_steps?")
    return None


def async_settings_without_async(config: Config) -> UserError | None:
    lag = config.lag
    if lag.mode == "async":
        return None
    for name in ("max_steps", "policy", "in_flight"):
        value = getattr(lag, name)
        default = getattr(LagConfig(), name)
        if value != default:
            return bad_value(
                f"lag.{name}", value, f"{default} with lag.mode {lag.mode}", "it belongs to lag.mode=async"
            )
    return None


def lag_of_a_part_of_a_batch(config: Config) -> UserError | None:
    lag = config.lag
    per_batch = updates_from_a_batch(config)
    if lag.mode == "replayed" and lag.steps % per_batch:
        allowed = f"a multiple of the {per_batch} updates made from one batch"
        return bad_value("lag.steps", lag.steps, allowed, "otherwise a batch cannot be exactly that many updates old")
    return None


def everything_dropped(config: Config) -> UserError | None:
    lag = config.lag
    # The batch that is drawn while one is learned from is per_batch updates old when its turn comes.
    per_batch = updates_from_a_batch(config)
    if lag.policy != "drop" or lag.max_steps >= per_batch:
        return None
    reason = (
        f"{per_batch} updates are made from one batch, so all that is drawn meanwhile would be dropped; "
        "lag.policy=wait takes any bound"
    )
    return bad_value("lag.max_steps", lag.max_steps, f"at least {per_batch} with lag.policy drop", reason)


def in_flight_without_lag(config: Config) -> UserError | None:
    if config.lag.in_flight and config.lag.max_steps == 0:
        reason = "nothing is sampled while weights change"
        return bad_value("lag.in_flight", True, "false with lag.max_steps 0", reason)
    return None


# --- processes, precision, optimizer ----------------------------------------------------------------------------------


def several_processes_of_single(config: Config) -> UserError | None:
    train = config.train
    if train.strategy != "single":
        return None
    for name in ("devices", "nodes"):
        value = getattr(train, name)
        if value != 1:
            return bad_value(f"train.{name}", value, "1 with train.strategy: single", "the others take more")
    return None


def batch_that_processes_cannot_share(config: Config) -> UserError | None:
    train = config.train
    prompts = config.rollout.prompts_per_batch
    processes = train.devices * train.nodes
    if prompts % processes == 0:
        return None
    reason = f"it counts the prompts of all {processes} processes (train.devices x train.nodes), and each draws as many"
    return bad_value("rollout.prompts_per_batch", prompts, f"a multiple of {processes}", reason)


def varlen_without_packed_rows(config: Config) -> UserError | None:
    model = config.model
    is_wide = model.dtype == "float32" and config.train.precision == "fp32"
    if model.attention == "varlen" and (is_wide or not model.share_prompt):
        reason = "its kernel takes packed rows (model.share_prompt) in 16 bits (train.precision=bf16)"
        return bad_value("model.attention", "varlen", ["sdpa", "eager"], reason)
    return None


def shards_of_whole_copies(config: Config) -> UserError | None:
    train = config.train
    if train.shards != "all" and train.strategy not in SHARDED:
        return bad_value("train.shards", train.shards, f"all with train.strategy {train.strategy}", "it does not shard")
    return None


def betas_out_of_range(config: Config) -> UserError | None:
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        return bad_value("optimizer.betas", list(betas), "two numbers in [0, 1)")
    return None


def warmup_beyond_the_run(config: Config) -> UserError | None:
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if warmup > steps:
        return bad_value("optimizer.warmup_steps", warmup, f"at most train.steps ({steps})")
    return None


# --- groups without signal --------------------------------------------------------------------------------------------


def draws_without_refill(config: Config) -> UserError | None:
    algorithm = config.algorithm
    default = AlgorithmConfig().refill_draws
    if algorithm.groups_without_signal == "refill" or algorithm.refill_draws == default:
        return None
    allowed = f"{default} with algorithm.groups_without_signal {algorithm.groups_without_signal}"
    return bad_value("algorithm.refill_draws", algorithm.refill_draws, allowed, "it bounds refill")


def groups_that_no_reward_selects(config: Config) -> UserError | None:
    algorithm = config.algorithm
    choice = algorithm.groups_without_signal
    if choice == "keep":
        return None
    key = "algorithm.groups_without_signal"
    if config.rollout.group_size < 2:
        return bad_value(key, choice, "keep with rollout.group_size 1", "a group of one has one reward")
    if algorithm.reward_weight == 0:
        reason = "the reward is not trained, and would choose what the KL terms see"
        return bad_value(key, choice, "keep with algorithm.reward_weight 0", reason)
    if config.environment is not None and config.environment.credit == "turn":
        reason = "dialogues of one reward may have earned it at different turns, which is a signal"
        return bad_value(key, choice, "keep with environment.credit turn", reason)
    if algorithm.dpo is not None and choice == "shrink":
        return bad_value(key, choice, "keep or refill with algorithm.dpo", "such a group has no pair anyway")
    return None


# --- dialogues, rewards, evaluation -----------------------------------------------------------------------------------


def more_turns_than_tokens(config: Config) -> UserError | None:
    environment = config.environment
    longest = config.rollout.max_new_tokens
    if environment is None or environment.turn_tokens is not None or environment.turns <= longest:
        return None
    allowed = f"at most rollout.max_new_tokens ({longest})"
    return bad_value("environment.turns", environment.turns, allowed, "a turn has at least one token")


def turn_longer_than_the_dialogue(config: Config) -> UserError | None:
    environment = config.environment
    longest = config.rollout.max_new_tokens
    if environment is None or environment.turn_tokens is None or environment.turn_tokens <= longest:
        return None
    allowed = f"at most rollout.max_new_tokens ({longest})"
    return bad_value("environment.turn_tokens", environment.turn_tokens, allowed, "which counts the whole dialogue")


def turns_compared_over_the_batch(config: Config) -> UserError | None:
    environment = config.environment
    if environment is None or environment.credit != "turn":
        return None
    advantage = config.algorithm.advantage
    # Such a mean, or deviation, is over all turns: a turn's own later ones are in it.
    if not ADVANTAGES.get(advantage, key="algorithm.advantage").facts.get("batch"):
        return None
    allowed = "dialogue, or an advantage that compares turns of one prompt (rloo, dr_grpo, grpo), none or gae"
    return bad_value("environment.credit", environment.credit, allowed, f"{advantage} normalizes over the batch")


def no_reward(config: Config) -> UserError | None:
    if config.rewards or (config.environment and config.environment.weights):
        return None
    return UserError("rewards: needs at least one reward, as in [{name: math_verify}]")


def evaluation_without_problems(config: Config) -> UserError | None:
    every = config.train.eval_every
    if every and not (config.data.eval or config.eval.suites):
        return UserError(
            f"train.eval_every is {every}, and neither data.eval nor eval.suites names problems to evaluate on"
        )
    return None


RULES: tuple[Callable[[Config], UserError | None], ...] = (
    name_that_no_folder_has,
    batch_in_unequal_parts,
    group_without_comparison,
    lag_of_fresh_samples,
    exact_lag_of_async,
    async_settings_without_async,
    lag_of_a_part_of_a_batch,
    everything_dropped,
    in_flight_without_lag,
    several_processes_of_single,
    batch_that_processes_cannot_share,
    varlen_without_packed_rows,
    shards_of_whole_copies,
    betas_out_of_range,
    warmup_beyond_the_run,
    draws_without_refill,
    groups_that_no_reward_selects,
    more_turns_than_tokens,
    turn_longer_than_the_dialogue,
    turns_compared_over_the_batch,
    no_reward,
    evaluation_without_problems,
)
"""In the order in which they are asked."""
