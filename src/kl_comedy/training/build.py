"""What is decided about a run before a model is loaded; every mistake that needs no model is raised here."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kl_comedy.config import Config
from kl_comedy.config.combinations import is_off_policy, updates_from_a_batch
from kl_comedy.config.schema import GoldConfig, RewardConfig
from kl_comedy.config.trainer_arguments import check_trainer_arguments
from kl_comedy.errors import first_refusal
from kl_comedy.io import check_writable
from kl_comedy.kl import KLTerm, resolve_terms, term_warnings
from kl_comedy.kl.pull import idle_terms
from kl_comedy.models.load import pick_device
from kl_comedy.models.sources import check_source
from kl_comedy.objective import PolicyTerm, check_policy_term
from kl_comedy.rewards import check_options
from kl_comedy.rewards.environments import check_environment
from kl_comedy.rollouts import Sampler
from kl_comedy.tracking.loggers import check_loggers
from kl_comedy.tracking.store import check_uri
from kl_comedy.training.loss import named_terms
from kl_comedy.training.models import teacher_errors
from kl_comedy.training.problems import ProblemSets, check_problem_sets, load_problem_sets
from kl_comedy.training.rules import RULES, TrainingSettings

log = logging.getLogger("kl_comedy")

LORA_LR = (1e-5, 1e-3)
"""The usual learning rates of an adapter, which starts at zero and moves little at the rates of all weights."""


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How old samples may be when the policy trains on them, in optimizer updates."""

    mode: str
    """``on_policy``, ``replayed`` or ``async``."""
    steps: int
    """``replayed``: the age of a batch at its first update."""
    max_steps: int
    """``async``: the largest age of a batch at its first update."""
    in_flight: bool
    """``async``: whether weights change inside completions."""
    updates_per_batch: int
    """Updates made from one batch, epochs included: the last of them is so many updates minus one older."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is decided about a run before anything is loaded. Built once, by :func:`build_run`."""

    config: Config
    terms: Mapping[str, KLTerm]
    """By name, in the order of the config (:func:`~kl_comedy.training.loss.named_terms`)."""
    lag: Lag
    sampler: Sampler
    problems: ProblemSets | None = None
    """Training and evaluation problems; None where they are not loaded yet, or each of several processes loads them."""


def build_run(config: Config) -> Run:
    """The run of ``config``: terms, lag and sampler are resolved here, once, and passed on.

    Raises :class:`UserError` for settings of terms, sampling and algorithm that cannot train
    (:data:`kl_comedy.training.rules.RULES`), and for an option that the sampler does not take.
    """
    terms = resolve_terms(config.kl)
    check_policy_term(PolicyTerm.of(config.algorithm))
    # The rules come last: they read terms that are valid by themselves.
    error = first_refusal(RULES, TrainingSettings(config=config, terms=terms))
    if error is not None:
        raise error
    lag = Lag(
        mode=config.lag.mode,
        steps=config.lag.steps,
        max_steps=config.lag.max_steps,
        in_flight=config.lag.in_flight,
        updates_per_batch=updates_from_a_batch(config),
    )
    return Run(config=config, terms=named_terms(terms), lag=lag, sampler=Sampler.of(config))


def check_before_loading(config: Config) -> Run:
    """The run of ``config``, with its problems unless several processes train.

    Raises :class:`UserError` for every mistake that shows without the model, on the machine that would train. Commands
    call this before the imports that take seconds. Warnings come later, with :func:`warn_about`: a mistake is read
    alone.
    """
    process_count = config.train.devices * config.train.nodes
    if process_count > 1:
        return check_run(config)  # each of the processes, which do not exist yet, loads its problems
    run = _checked_run(config, here=True)
    return replace(run, problems=load_problem_sets(config))


def check_run(config: Config, *, here: bool = True) -> Run:
    """The run of ``config``; nothing is kept in memory, and nothing is downloaded.

    Raises :class:`UserError` for what :func:`check_before_loading` refuses; what this machine has (vLLM, a GPU, files)
    counts where the run would be ``here``.
    """
    run = _checked_run(config, here=here)
    check_problem_sets(config, here=here)
    return run


def _checked_run(config: Config, *, here: bool) -> Run:
    """The run of ``config``, of which all but the data is checked."""
    run = build_run(config)
    check_parts(config, here=here)
    check_trainer_arguments(config.trainer)
    if config.callbacks and importlib.util.find_spec("lightning") is not None:
        # Imported here, because Lightning takes seconds, and a machine that only checks may not have it.
        from kl_comedy.training.callbacks import configured_callbacks

        configured_callbacks(config)
    if not here:
        return run
    run.sampler.check_installed()
    check_writable(Path(config.output), "output", is_folder=True)
    # With `auto` a machine without GPU trains on its CPU; `cuda` asks for one.
    if config.model.device == "cuda":
        pick_device("cuda")
    check_source(config.model)
    if config.reference.teacher is not None:
        with teacher_errors():
            check_source(config.reference.teacher.model(config.model))
    return run


def check_parts(config: Config, *, here: bool = True) -> None:
    """Raise :class:`UserError` for options of rewards and environment, and for an address of the store.

    Files that a reward reads count where the run would be ``here``.
    """
    rewards: dict[str, RewardConfig | GoldConfig] = {f"rewards.{n}": reward for n, reward in enumerate(config.rewards)}
    if config.gold is not None:
        rewards["gold"] = config.gold
    for key, reward in rewards.items():
        entry, options = check_options(reward.name, reward.options, key=key)
        check_files = entry.facts.get("check")
        if here and check_files is not None:
            check_files(options, f"{key}.options")
    if config.environment is not None:
        check_environment(config.environment)
    check_uri(config.tracking.uri)
    check_loggers(config.tracking.loggers)


def check_training(config: Config) -> tuple[KLTerm, ...]:
    """The KL terms of a run that can train. Warns as :func:`warn_about` and raises as :func:`build_run`."""
    run = build_run(config)
    warn_about(run)
    return tuple(run.terms.values())


def warn_about(run: Run) -> None:
    """Warn where a KL term optimizes something else than its value suggests, and of a lag that does nothing."""
    off_policy = is_off_policy(run.config)
    warnings: list[str] = []
    for term in run.terms.values():
        warnings += term_warnings(term, off_policy=off_policy, truncated=run.config.rollout.truncation.is_on)
    if run.terms and all(term.beta == 0 for term in run.terms.values()):
        warnings = ["no KL of this run acts: every beta is 0, so that it is measured only"]
    elif idle_terms(run.terms.values(), off_policy=off_policy):
        warnings = [f"no KL of this run acts: {'; '.join(warnings)}"]
    for warning in warnings:
        log.warning(warning)
    if run.lag.mode == "async" and run.lag.max_steps == 0:
        log.warning("lag.max_steps is 0: with lag.mode=async the sampler waits for every update; 1 or more overlaps")
    if run.lag.mode == "replayed" and run.lag.steps == 0:
        per_batch = run.lag.updates_per_batch
        log.warning(
            "lag.steps is 0: with lag.mode=replayed the samples are fresh; it is their age in updates, "
            f"a multiple of the {per_batch} made from one batch, as lag.steps={per_batch}"
        )
    lr = run.config.optimizer.lr
    if run.config.model.lora is not None and lr < LORA_LR[0]:
        low, high = LORA_LR
        log.warning(
            f"optimizer.lr is {lr:g}: low for a LoRA adapter (model.lora), which usually takes {low:g} to {high:g}"
        )
