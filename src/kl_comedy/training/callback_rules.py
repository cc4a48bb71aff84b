"""Which of Lightning's callbacks cannot do in a run what their documentation says, and why; which metrics they know.

docs/configuration.md has the same table. A callback that is not here gets every hook of a Trainer with manual
optimization and one epoch, whose batches are the updates and whose validation is the evaluation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)

from kl_comedy.config import Config
from kl_comedy.errors import nearest, shown
from kl_comedy.evaluation.suites import get_suite
from kl_comedy.results.metric_labels import LABELS


def _always(callback: Any, config: Config) -> bool:
    return True


def _is_never_evaluated(callback: Any, config: Config) -> bool:
    # Without problems to evaluate on, every other number is refused (config/combinations.py).
    return config.train.eval_every == 0


def _saves_at_evaluations_alone(callback: Any, config: Config) -> bool:
    at_epoch_end = callback._save_on_train_epoch_end
    return callback.every_n_epochs == 1 and not at_epoch_end and _is_never_evaluated(callback, config)


@dataclass(frozen=True)
class Rule:
    """A class of callbacks, when one of them is refused, and the reason for the user."""

    of: type[Callback]
    reason: str
    applies: Callable[[Any, Config], bool] = _always


# Settings of callbacks are private attributes: Lightning has no other way to read them.
RULES = (
    Rule(
        EarlyStopping,
        "check_on_train_epoch_end: a run is one epoch, and ends with it; without it, every evaluation is a check",
        lambda callback, config: bool(callback._check_on_train_epoch_end),
    ),
    Rule(
        EarlyStopping,
        "it checks its metric at evaluations, and there are none (train.eval_every, data.eval)",
        _is_never_evaluated,
    ),
    Rule(
        Timer,
        "interval=epoch: a run is one epoch, and ends with it",
        lambda callback, config: callback._duration is not None and callback._interval == "epoch",
    ),
    Rule(
        ModelCheckpoint,
        "every_n_epochs: a run is one epoch, so that it would never save; 1 saves after every evaluation",
        lambda callback, config: callback.every_n_epochs > 1,
    ),
    Rule(
        ModelCheckpoint,
        "train_time_interval: Lightning ignores it under manual optimization; use every_n_train_steps",
        lambda callback, config: callback._train_time_interval is not None,
    ),
    Rule(
        ModelCheckpoint,
        "save_on_exception: an update that failed leaves no whole state; train.checkpoint_every saves those before it",
        lambda callback, config: bool(callback.save_on_exception),
    ),
    Rule(
        ModelCheckpoint,
        "it saves after evaluations, and there are none (train.eval_every, data.eval); use every_n_train_steps",
        _saves_at_evaluations_alone,
    ),
    Rule(
        OnExceptionCheckpoint,
        "an update that failed leaves no whole state; train.checkpoint_every saves those before it",
    ),
    Rule(
        ProgressBar,
        "Lightning takes one progress bar, and a run has its own",
    ),
    Rule(
        BatchSizeFinder,
        "it tries sizes on batches of a fixed dataset; train.microbatch_tokens bounds the memory of an update",
    ),
    Rule(
        LearningRateFinder,
        "it needs automatic optimization, and an update is optimized manually; set optimizer.lr",
    ),
    Rule(
        GradientAccumulationScheduler,
        "an update accumulates the gradients of its micro-batches itself (train.microbatch_tokens)",
    ),
    Rule(
        StochasticWeightAveraging,
        "it averages from epoch to epoch, and a run is one epoch",
    ),
    Rule(
        WeightAveraging,
        "it copies the whole module, sampler and references too; the reference `ema` is an average of the policy",
    ),
    Rule(
        BaseFinetuning,
        "it unfreezes layers in later epochs, and a run is one epoch; model.lora trains a part of the weights",
    ),
    Rule(
        ModelPruning,
        "it replaces the parameters of the policy, which the sampler and checkpoints know by name",
    ),
    Rule(
        BasePredictionWriter,
        "a run predicts nothing; train.record_rollouts writes completions",
    ),
)


def reason_against(callback: Callback, config: Config) -> str | None:
    """Why this callback cannot work in a run of ``config``, with the name of its class; None where it can."""
    for rule in RULES:
        if isinstance(callback, rule.of) and rule.applies(callback, config):
            return f"{type(callback).__name__}: {rule.reason}"
    return None


# --- metrics that a callback monitors ---------------------------------------------------------------------------------
VALUES: Mapping[str, Sequence[str]] = {
    "level": ("token", "sequence"),
    "k": ("k1", "k2", "k3"),
    "q": ("01", "10", "50", "90", "99"),
    "status": ("unparseable", "timeout", "refused", "failed"),
}
"""What stands for ``<x>`` in the names of :data:`LABELS`; for what is not here, anything does."""
OF_EVALUATE = re.compile(r"eval/<set>/(pass_at|maj_at|<status>|tokens|<score>_(se|low|high))")
"""Scores of ``kl-comedy evaluate`` alone: no run logs them."""
OF_GOLD = re.compile(r"train/gold.*|eval/<set>/proxy.*")
"""Metrics of a config with ``gold``."""
OF_EVALUATION_TOO = re.compile(r"(kl|kl_error)/.+|policy/entropy.*")
"""Metrics of training that an evaluation with ``eval.kl`` measures too, as ``eval/<set>/NAME``."""
LOG_NOTHING = (EarlyStopping, ModelCheckpoint, Timer)
"""Callbacks that add no metric of their own; LearningRateMonitor has ``lr-AdamW``, and a stranger's may have any."""


def unknown_monitor(callback: Callback, config: Config, callbacks: Sequence[Callback]) -> str | None:
    """What is wrong with the metric that a callback monitors: no update and no evaluation of ``config`` logs it.

    None where one does, where nothing is monitored, and where another of ``callbacks`` may log it.
    """
    monitor = getattr(callback, "monitor", None)
    # Lightning's checkpoints know the last two without a metric.
    if not isinstance(callback, EarlyStopping | ModelCheckpoint) or monitor in (None, "step", "epoch"):
        return None
    templates = _templates(config)
    if any(re.fullmatch(_pattern(template), monitor) for template in templates):
        return None
    groups = {template.partition("/")[0] for template in templates}
    has_strangers = not all(type(item) in LOG_NOTHING for item in callbacks)
    if has_strangers and monitor.partition("/")[0] not in groups:
        return None
    meant = nearest(monitor, itertools.chain.from_iterable(map(_examples, templates)))
    hint = f"did you mean {meant!r}? " if meant else ""
    return f"got {shown(monitor)}; {hint}allowed: a metric that the run logs (docs/metrics.md)"


def _templates(config: Config) -> list[str]:
    """The names of the metrics of a run; ``<x>`` stands for what varies."""
    sets = [*config.data.eval, *(get_suite(name, key="eval.suites").name for name in config.eval.suites)]
    templates = []
    for name in LABELS:
        if name.startswith("audit/") or OF_EVALUATE.match(name):
            continue
        if config.gold is None and OF_GOLD.fullmatch(name):
            continue
        if not name.startswith("eval/"):
            templates.append(name)
        for eval_set in sets:
            if name.startswith("eval/"):
                templates.append(name.replace("<set>", eval_set))
            elif config.eval.kl and OF_EVALUATION_TOO.fullmatch(name):
                templates.append(f"eval/{eval_set}/{name}")
    return templates


def _pattern(template: str) -> str:
    """The names of a template as a regular expression."""
    pattern = ""
    for part in re.split(r"(<\w+>)", template):
        if part.startswith("<"):
            values = VALUES.get(part[1:-1])
            pattern += f"({'|'.join(values)})" if values else ".+"
        else:
            pattern += re.escape(part)
    return pattern


def _examples(template: str) -> list[str]:
    """The names of a template; none where anything may stand in it."""
    placeholders = re.findall(r"<(\w+)>", template)
    if not all(name in VALUES for name in placeholders):
        return []
    examples = []
    for values in itertools.product(*(VALUES[name] for name in placeholders)):
        example = template
        for name, value in zip(placeholders, values, strict=True):
            example = example.replace(f"<{name}>", value)
        examples.append(example)
    return examples
