"""KL terms inside another trainer: from its per-token log-probs to a loss, or to a cost in the reward.

Legend: ``B`` completions, ``T`` tokens; ``[B, T]`` over tokens. Log-probs in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, first_refusal
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
        in_loss = []
        in_rewards = []
        for position, term in enumerate(terms):
            reason = first_refusal(RULES, TermInHost(term=term, host=host, in_reward=in_reward, steps=steps))
            if reason is not None:
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
class TermInHost:
    """What the rules read: a term, and what the trainer allows."""

    term: KLTerm
    host: str
    """The name of the trainer."""
    in_reward: bool
    """Whether the reward may be changed."""
    steps: bool
    """Whether the trainer counts updates."""


def reads_other_tokens(asked: TermInHost) -> str | None:
    term = asked.term
    if term.reads == {"log_ratio"}:
        return None
    if term.needs != "log_ratio":
        part = term.estimator
    elif term.baseline == "exact":
        part = f"baseline {term.baseline}"
    elif term.score_centring is not None:
        part = f"score_centring {term.score_centring}"
    else:
        part = f"weight {term.weight}"
    return f"{asked.host} provides log-probs of sampled tokens only, and {part} reads other tokens too"


def moves_its_reference(asked: TermInHost) -> str | None:
    if asked.term.reference in ("ema", "periodic", "old"):
        return f"{asked.host} keeps its own reference; use reference: initial for it, or reference: sampler"
    return None


def needs_a_group(asked: TermInHost) -> str | None:
    if asked.term.baseline == "own":
        return (
            "baseline own needs all completions of a group at once, and "
            f"{asked.host} splits groups; use after or before"
        )
    return None


def needs_the_batch(asked: TermInHost) -> str | None:
    if asked.term.baseline == "batch":
        return (
            "baseline batch needs all completions of a batch at once, and "
            f"{asked.host} splits batches; use after or before"
        )
    return None


def has_a_target(asked: TermInHost) -> str | None:
    if isinstance(asked.term.beta, BetaTarget):
        return "a beta with a target needs the measured KL of every update; use a number"
    return None


def has_a_schedule_without_steps(asked: TermInHost) -> str | None:
    if isinstance(asked.term.beta, BetaSchedule) and not asked.steps:
        return f"a schedule of beta needs the count of updates, which {asked.host} does not pass; use a number"
    return None


def changes_a_fixed_reward(asked: TermInHost) -> str | None:
    if asked.term.baseline == "before" and not asked.in_reward:
        return f"{asked.host} computes advantages elsewhere; use baseline: after"
    return None


def has_a_cost_per_token(asked: TermInHost) -> str | None:
    term = asked.term
    is_plain_total = term.credit == "total" and term.correction == "none"
    if term.baseline == "before" and not is_plain_total:
        return f"the reward of {asked.host} is one number per completion; use credit: total and correction: none"
    return None


RULES = (
    reads_other_tokens,
    moves_its_reference,
    needs_a_group,
    needs_the_batch,
    has_a_target,
    has_a_schedule_without_steps,
    changes_a_fixed_reward,
    has_a_cost_per_token,
)
"""In the order in which they are asked (:func:`kl_comedy.errors.first_refusal`)."""
