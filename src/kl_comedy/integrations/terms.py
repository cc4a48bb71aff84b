"""KL terms inside another trainer: from its per-token log-probs to a loss, or to a cost in the reward.

Legend: ``B`` completions, ``T`` tokens; ``[B, T]`` over tokens. Log-probs in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl import BetaSchedule, BetaTarget, KLTerm, kl_parts, kl_surrogate, resolve_terms


@dataclass(frozen=True, kw_only=True)
class HostTerms:
    """The terms of a trainer that provides log-probs of sampled tokens, against one reference.

    ``loss``: terms whose surrogate is added to the loss per token. ``reward``: terms with ``baseline: before``, whose
    cost is subtracted from the reward of the completion.
    """

    host: str
    loss: tuple[KLTerm, ...]
    reward: tuple[KLTerm, ...]

    @classmethod
    def parse(cls, kl: Any, *, host: str, in_reward: bool = True, steps: bool = False) -> HostTerms:
        """Read ``kl`` as in a config: a recipe's name, or a list of terms (mappings, recipes or :class:`KLTerm`).

        ``in_reward``: the trainer lets the reward be changed. ``steps``: it counts updates, so ``beta`` may follow a
        schedule. Raises :class:`UserError` for a term that the trainer cannot compute, with the reason.
        """
        if isinstance(kl, Sequence) and not isinstance(kl, str):
            # The reader of configs takes plain data.
            kl = [item.to_mapping() if isinstance(item, KLTerm) else item for item in kl]
        # As a config's `kl`, so that a term means the same in every trainer.
        terms = resolve_terms(kl)
        trainer = _Host(name=host, in_reward=in_reward, steps=steps)
        in_loss = []
        in_rewards = []
        for position, term in enumerate(terms):
            for rule in RULES:
                if rule.applies(term, trainer):
                    reason = rule.message.format(term=term, host=host, reads=_reads(term))
                    raise UserError(f"kl.{position} ({term.label()}): {reason}")
            if term.baseline == "before":
                in_rewards.append(term)
            else:
                in_loss.append(term)
        return cls(host=host, loss=tuple(in_loss), reward=tuple(in_rewards))

    @property
    def needs_reference(self) -> bool:
        """Whether a term is measured against the reference, not the sampler."""
        return any(term.reference == "initial" for term in (*self.loss, *self.reward))

    def loss_BT(self, *, step: int = 0, **batch: Any) -> Tensor:
        """The sum of beta times the surrogate of each term in ``loss``, differentiable, zero outside the mask.

        ``batch``: ``logp_BT``, ``ref_logp_BT`` (or None), ``behaviour_logp_BT`` and ``mask_BT``. Rows without tokens
        are zero. ``step`` counts updates.
        """
        return self._sum(self.loss, step, batch, lambda term, tensors: kl_surrogate(term, **tensors))

    def cost_B(self, *, step: int = 0, **batch: Any) -> Tensor:
        """The sum of beta times the cost (nats) of each completion over the terms in ``reward``.

        ``batch`` and ``step`` as in :meth:`loss_BT`.
        """
        cost_BT = self._sum(self.reward, step, batch, lambda term, tensors: kl_parts(term, **tensors).cost_BT)
        # With credit: total every token has the cost of the whole completion.
        return cost_BT[:, 0]

    def _sum(self, terms: Sequence[KLTerm], step: int, batch: dict[str, Any], value: Callable[..., Tensor]) -> Tensor:
        mask_BT = batch["mask_BT"].bool()
        if batch["ref_logp_BT"] is None:
            if self.needs_reference:
                raise UserError(f"kl: {self.host} has no reference log-probs in this batch, and a term needs them")
            # No term reads it: all are against the sampler.
            batch["ref_logp_BT"] = torch.zeros_like(batch["logp_BT"])
        # A term is defined for completions with tokens; hosts pad batches with rows that have none.
        alive_B = mask_BT.any(-1)
        # Rows of padding only would give 0 / 0 in means over tokens.
        tensors = {name: tensor[alive_B] for name, tensor in {**batch, "mask_BT": mask_BT}.items()}
        logp_BT = batch["logp_BT"]
        # At least float32: a sum over terms in bfloat16 would lose the smaller ones.
        total_BT = torch.zeros_like(logp_BT, dtype=torch.promote_types(logp_BT.dtype, torch.float32))
        if not bool(alive_B.any()):
            return total_BT
        for term in terms:
            beta = term.beta
            if isinstance(beta, BetaSchedule):
                beta = beta.at(step)
            # RULES refuses a controller: it needs the measured KL, which hosts do not hand over.
            assert not isinstance(beta, BetaTarget)
            total_BT = total_BT.index_add(0, alive_B.nonzero().flatten(), beta * value(term, tensors))
        return total_BT


@dataclass(frozen=True, kw_only=True)
class _Host:
    """What a trainer allows: its name, whether the reward may be changed, and whether it counts updates."""

    name: str
    in_reward: bool
    steps: bool


@dataclass(frozen=True)
class Rule:
    """A reason why a trainer cannot compute a term from log-probs of sampled tokens and one reference.

    ``message`` is a format string of ``{term}``, ``{host}`` and ``{reads}``, what of the term reads other tokens.
    """

    name: str
    applies: Callable[[KLTerm, _Host], bool]
    message: str


def _reads(term: KLTerm) -> str:
    """The part of the term that reads more than sampled tokens."""
    if term.needs != "log_ratio":
        return term.estimator
    if term.baseline == "exact":
        return f"baseline {term.baseline}"
    if term.score_centring is not None:
        return f"score_centring {term.score_centring}"
    return f"weight {term.weight}"


def _reads_other_tokens(term: KLTerm, host: _Host) -> bool:
    return term.reads != {"log_ratio"}


def _moves_its_reference(term: KLTerm, host: _Host) -> bool:
    return term.reference in ("ema", "periodic")


def _needs_a_group(term: KLTerm, host: _Host) -> bool:
    return term.baseline == "own"


def _needs_the_batch(term: KLTerm, host: _Host) -> bool:
    return term.baseline == "batch"


def _has_a_target(term: KLTerm, host: _Host) -> bool:
    return isinstance(term.beta, BetaTarget)


def _has_a_schedule_without_steps(term: KLTerm, host: _Host) -> bool:
    return isinstance(term.beta, BetaSchedule) and not host.steps


def _changes_a_fixed_reward(term: KLTerm, host: _Host) -> bool:
    return term.baseline == "before" and not host.in_reward


def _has_a_cost_per_token(term: KLTerm, host: _Host) -> bool:
    if term.baseline != "before":
        return False
    return term.credit != "total" or term.correction != "none"


RULES = (
    Rule(
        "reads_other_tokens",
        _reads_other_tokens,
        "{host} provides log-probs of sampled tokens only, and {reads} reads other tokens too",
    ),
    Rule(
        "moves_its_reference",
        _moves_its_reference,
        "{host} keeps its own reference; use reference: initial for it, or reference: sampler",
    ),
    Rule(
        "needs_a_group",
        _needs_a_group,
        "baseline own needs all completions of a group at once, and {host} splits groups; use after or before",
    ),
    Rule(
        "needs_the_batch",
        _needs_the_batch,
        "baseline batch needs all completions of a batch at once, and {host} splits batches; use after or before",
    ),
    Rule(
        "has_a_target",
        _has_a_target,
        "a beta with a target needs the measured KL of every update; use a number",
    ),
    Rule(
        "has_a_schedule_without_steps",
        _has_a_schedule_without_steps,
        "a schedule of beta needs the count of updates, which {host} does not pass; use a number",
    ),
    Rule(
        "changes_a_fixed_reward",
        _changes_a_fixed_reward,
        "{host} computes advantages elsewhere; use baseline: after",
    ),
    Rule(
        "has_a_cost_per_token",
        _has_a_cost_per_token,
        "the reward of {host} is one number per completion; use credit: total and correction: none",
    ),
)
"""Checked in this order; the first that applies is reported."""
