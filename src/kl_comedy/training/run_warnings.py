"""Warnings while a run trains: a table of named rules over the metrics of its updates.

Each rule warns once per process, in one line that says what to do. A rule reads metrics that are logged anyway (see
``docs/metrics.md``) and changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.callbacks import Callback

from kl_comedy.config import Config
from kl_comedy.records import Scored
from kl_comedy.redaction import redact

log = logging.getLogger("kl_comedy")

SILENT_UPDATES = 10
"""Updates without a signal before a warning: fewer happen by chance where rewards start near 0 or 1."""

SHOWN_CHARACTERS = 200
"""Characters of a completion and of an answer in a warning."""

LIMITING_SHARES = ("capped_share", "clamped_share", "truncated_share", "masked_share")
"""Last parts of the names of metrics that say on which share of the tokens a KL term or a correction was limited."""

MOST_LIMITED = 0.5
"""Share of the tokens: where more of them are limited, most of the gradient is that of the limit."""

FEWEST_EFFECTIVE = 2.0
"""Effective completions. Kish's size is 1 at least, and near 1 a single completion has nearly all the weight."""

ENOUGH_COMPLETIONS = 8
"""Fewer completions in an update have a small effective number by themselves."""

# No run of the stored studies that ended beyond one of these two had a held-out reward above 0.1
# (tests/training/test_run_warnings.py). SmolLM2 learns well at up to 1.5 nats per token without a KL term.
LEAST_ENTROPY = 0.01
"""Nats per token: with less, all completions of a prompt are the same and there is no signal left."""
MOST_KL = 2.0
"""Nats per token: the reference gives the policy's tokens a seventh of the policy's probability, or less."""

ENTROPY_RISE = 3.0
"""Entropy over that of the first update, where it also gained :data:`ENTROPY_GAIN`: the text dissolves."""
ENTROPY_GAIN = 0.5
"""Nats per token. A policy that begins nearly certain may triple its entropy and still be nearly certain."""

REFERENCE_MARGIN = 0.01
"""Nats per token that a moving reference must be further away than the initial one: less is the noise of sampling."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the rules read: an update's number, metrics and completions, the config, the first value of each metric."""

    version: int
    metrics: Mapping[str, float]
    rows: Sequence[Scored]
    config: Config
    first: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that ``holds`` at ``updates`` updates in a row, and the ``message`` of the last of them.

    ``holds`` is None at updates that did not measure what it reads; these neither count nor interrupt. ``includes``:
    rules about the same fault that say less, and do not warn after this one.
    """

    name: str
    updates: int
    holds: Callable[[Update], bool | None]
    message: Callable[[Update], str]
    includes: tuple[str, ...] = ()


# --- rewards ----------------------------------------------------------------------------------------------------------


def _learns_from_rewards(update: Update) -> bool:
    # Distillation measures a reward and does not train on it.
    return update.config.algorithm.reward_weight != 0


def _has_no_signal(update: Update) -> bool:
    if not _learns_from_rewards(update):
        return False
    # With one completion per prompt every group's rewards are equal, which says nothing: the baseline is the batch's.
    has_groups = len({row.rollout.group_id for row in update.rows}) < len(update.rows)
    if has_groups:
        return update.metrics["train/groups_without_signal"] == 1.0
    return update.metrics["train/reward_std"] == 0.0


def _all_zero(update: Update) -> bool:
    if not _learns_from_rewards(update):
        return False
    return all(row.reward.value == 0 for row in update.rows)


def _quoted(text: str) -> str:
    """Text of a model or of data, which may be hostile: without secrets, escaped, on one line."""
    # Redacted before it is cut: half a token would not be recognized.
    return repr(redact(text)[:SHOWN_CHARACTERS])


def _first_completion(update: Update) -> str:
    """The first completion with its answer: most often the reward cannot read it, which is seen at a glance."""
    first = update.rows[0]
    answer = first.rollout.prompt.problem.answer
    return (
        f"the first completion of update {update.version} (status {first.reward.status}): "
        f"{_quoted(first.rollout.text)}; its answer: {_quoted(answer)}"
    )


def _no_signal_message(update: Update) -> str:
    return (
        f"in each group all completions had the same reward (mean "
        f"{update.metrics['train/reward']:.3f}), so that only a KL term moves the policy; take problems that are "
        f"neither always nor never solved, or a larger rollout.group_size; {_first_completion(update)}"
    )


def _zero_message(update: Update) -> str:
    return (
        "every reward was 0: check that the reward reads these answers, else take easier problems or a "
        f"better model; {_first_completion(update)}"
    )


# --- completions ------------------------------------------------------------------------------------------------------


def _all_truncated(update: Update) -> bool:
    return update.metrics["train/truncated_share"] == 1.0


def _truncated_message(update: Update) -> str:
    rollout = update.config.rollout
    environment = update.config.environment
    if environment is not None:
        return (
            f"every dialogue was cut at a limit (environment.turns={environment.turns}, "
            f"environment.turn_tokens={environment.turn_tokens}, rollout.max_new_tokens={rollout.max_new_tokens}): "
            f"raise it, or check that the environment says when a dialogue is done; {_first_completion(update)}"
        )
    return (
        f"every completion was cut at rollout.max_new_tokens={rollout.max_new_tokens}: raise it, or check "
        f"that the model ends its answers (its end token, rollout.stop); {_first_completion(update)}"
    )


# --- limits and weights -----------------------------------------------------------------------------------------------


def _limited_shares(update: Update) -> dict[str, float]:
    """The metrics of limits that act on more than :data:`MOST_LIMITED` of the tokens."""
    limited = {}
    for name, value in update.metrics.items():
        section, _, last = name.rpartition("/")
        # Of KL terms and of policy corrections; the completions that are cut have a share of this name too.
        is_limit = section.partition("/")[0] in ("kl_term", "policy") and last in LIMITING_SHARES
        if is_limit and value > MOST_LIMITED:
            limited[name] = value
    return limited


def _is_limited(update: Update) -> bool:
    return bool(_limited_shares(update))


def _limited_message(update: Update) -> str:
    shares = ", ".join(f"{name} {value:.0%}" for name, value in _limited_shares(update).items())
    return (
        f"a limit acts on most tokens ({shares} at update {update.version}): the gradient is that of "
        "the limit; make the samples fresher (lag, algorithm.updates_per_batch), lower optimizer.lr, or widen the cap "
        "or clamp"
    )


def _effective_completions(update: Update) -> float:
    return update.metrics["policy/ess"] * len(update.rows)


def _few_effective(update: Update) -> bool | None:
    if "policy/ess" not in update.metrics or len(update.rows) < ENOUGH_COMPLETIONS:
        return None
    effective = _effective_completions(update)
    # Weights that overflow give NaN.
    return math.isnan(effective) or effective < FEWEST_EFFECTIVE


def _few_effective_message(update: Update) -> str:
    return (
        f"the importance weights leave {_effective_completions(update):.1f} effective completions of "
        f"{len(update.rows)} (policy/ess): one completion outweighs the others; make the samples fresher (lag, "
        "algorithm.updates_per_batch), lower optimizer.lr, or correct per token (algorithm.correction)"
    )


# --- entropy, KL, references ------------------------------------------------------------------------------------------


def _entropy_is_gone(update: Update) -> bool | None:
    entropy = update.metrics.get("policy/entropy")
    if entropy is None:
        return None
    # A policy that begins so certain has lost nothing.
    return entropy < LEAST_ENTROPY <= update.first["policy/entropy"]


def _entropy_gone_message(update: Update) -> str:
    return (
        f"the policy's entropy fell from {update.first['policy/entropy']:.3f} to "
        f"{update.metrics['policy/entropy']:.4f} nats per token: its completions are all the same; go back to an "
        "earlier checkpoint with a lower optimizer.lr or a larger beta"
    )


def _entropy_rises(update: Update) -> bool | None:
    entropy = update.metrics.get("policy/entropy")
    if entropy is None:
        return None
    first = update.first["policy/entropy"]
    return entropy > ENTROPY_RISE * first and entropy > first + ENTROPY_GAIN


def _entropy_rises_message(update: Update) -> str:
    return (
        f"the policy's entropy rose from {update.first['policy/entropy']:.3f} to "
        f"{update.metrics['policy/entropy']:.3f} nats per token: its text dissolves; go back to an earlier checkpoint "
        f"with a lower optimizer.lr or a larger beta; {_first_completion(update)}"
    )


def _kl_per_token(update: Update) -> float:
    # Exact at the updates that measure it, else of the sampled tokens.
    sampled = update.metrics["kl/k1_reverse_token"]
    return update.metrics.get("kl/exact_reverse_token", sampled)


def _kl_runs_away(update: Update) -> bool | None:
    if "kl/k1_reverse_token" not in update.metrics:
        return None
    kl = _kl_per_token(update)
    # NaN is no small number.
    return not kl <= MOST_KL


def _kl_message(update: Update) -> str:
    return (
        f"the KL to the initial policy is {_kl_per_token(update):.2f} nats per token, above {MOST_KL:g}: "
        "the policy has left what the reference can say; go back to an earlier checkpoint with a larger beta or a "
        f"lower optimizer.lr; {_first_completion(update)}"
    )


def _strayed_references(update: Update) -> dict[str, float]:
    """Moving references that are further from the policy than the initial one is, with their KL per token."""
    to_initial = update.metrics.get("kl/k1_reverse_token")
    if to_initial is None:
        return {}
    strayed = {}
    for name, value in update.metrics.items():
        # k1 of both: the same tokens, so that most of the noise is the same.
        is_moving = name.startswith("reference/") and name.endswith("/k1_reverse_token")
        if is_moving and value > to_initial + REFERENCE_MARGIN:
            strayed[name.split("/")[1]] = value
    return strayed


def _reference_strayed(update: Update) -> bool:
    return bool(_strayed_references(update))


def _reference_message(update: Update) -> str:
    distances = ", ".join(f"{name} {value:.3f}" for name, value in _strayed_references(update).items())
    return (
        f"a moving reference moved more than the policy: the policy was further from it ({distances} "
        f"nats per token at update {update.version}) than from its start "
        f"({update.metrics['kl/k1_reverse_token']:.3f}); let it follow more slowly (reference: ema_decay, "
        "period), or use reference: initial"
    )


RULES = (
    # Before no_signal, which says less about the same updates.
    Rule(
        name="zero_rewards",
        updates=SILENT_UPDATES,
        holds=_all_zero,
        message=_zero_message,
        includes=("no_signal",),
    ),
    Rule(name="no_signal", updates=SILENT_UPDATES, holds=_has_no_signal, message=_no_signal_message),
    Rule(name="all_truncated", updates=5, holds=_all_truncated, message=_truncated_message),
    Rule(name="limited_tokens", updates=10, holds=_is_limited, message=_limited_message),
    Rule(name="few_effective_completions", updates=3, holds=_few_effective, message=_few_effective_message),
    # Entropy is measured at some updates only: at each train.exact_kl_every.
    Rule(name="entropy_gone", updates=2, holds=_entropy_is_gone, message=_entropy_gone_message),
    Rule(name="entropy_rises", updates=2, holds=_entropy_rises, message=_entropy_rises_message),
    Rule(name="kl_runs_away", updates=5, holds=_kl_runs_away, message=_kl_message),
    Rule(name="reference_strayed", updates=10, holds=_reference_strayed, message=_reference_message),
)
"""In the order in which they are asked after each update."""


class RunWarnings(Callback):
    """Asks the :data:`RULES` after each update, and logs the message of each at most once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._first: dict[str, float] = {}
        self._updates_in_a_row = dict.fromkeys((rule.name for rule in RULES), 0)
        self._silent: set[str] = set()
        """Rules that have warned, and those that they include."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        metrics = pl_module.last_metrics
        # The first value of each: a metric may be measured at some updates only.
        self._first = {**metrics, **self._first}
        update = Update(
            version=pl_module.version,
            metrics=metrics,
            rows=pl_module.last_batch.rows,
            config=self._config,
            first=self._first,
        )
        for rule in RULES:
            if rule.name not in self._silent and self._is_due(rule, update):
                log.warning(f"warning {rule.name} ({rule.updates} updates in a row): {rule.message(update)}")
                self._silent |= {rule.name, *rule.includes}

    def _is_due(self, rule: Rule, update: Update) -> bool:
        holds = rule.holds(update)
        if holds is None:
            return False
        if not holds:
            self._updates_in_a_row[rule.name] = 0
            return False
        self._updates_in_a_row[rule.name] += 1
        return self._updates_in_a_row[rule.name] >= rule.updates
