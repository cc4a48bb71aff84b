"""KL terms inside another trainer: from its per-token log-probs to a loss, or to a cost of the reward.

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
    """The terms of a trainer that hands out log-probs of sampled tokens, against one reference.

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
            kl = [item.to_mapping() if isinstance(item, KLTerm) else item for item in kl]
        terms = resolve_terms(kl)
        for position, term in enumerate(terms):
            if reason := _why_not(term, host, in_reward, steps):
                raise UserError(f"kl.{position} ({term.label()}): {reason}")
        before = [term.baseline == "before" for term in terms]
        return cls(
            host=host,
            loss=tuple(term for term, inside in zip(terms, before, strict=True) if not inside),
            reward=tuple(term for term, inside in zip(terms, before, strict=True) if inside),
        )

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
        """The sum of beta times the cost (nats) of each completion over the terms in ``reward``; takes the same."""
        return self._sum(self.reward, step, batch, lambda term, tensors: kl_parts(term, **tensors).cost_BT)[:, 0]

    def _sum(self, terms: Sequence[KLTerm], step: int, batch: dict[str, Any], value: Callable[..., Tensor]) -> Tensor:
        mask_BT = batch["mask_BT"].bool()
        if batch["ref_logp_BT"] is None:
            if self.needs_reference:
                raise UserError(f"kl: {self.host} has no reference log-probs in this batch, and a term needs them")
            batch["ref_logp_BT"] = torch.zeros_like(batch["logp_BT"])
        alive_B = mask_BT.any(-1)
        tensors = {name: tensor[alive_B] for name, tensor in {**batch, "mask_BT": mask_BT}.items()}
        total_BT = torch.zeros_like(batch["logp_BT"], dtype=torch.promote_types(batch["logp_BT"].dtype, torch.float32))
        for term in terms if bool(alive_B.any()) else ():
            beta = term.beta.at(step) if isinstance(term.beta, BetaSchedule) else term.beta
            total_BT = total_BT.index_add(0, alive_B.nonzero().flatten(), beta * value(term, tensors))
        return total_BT


def _why_not(term: KLTerm, host: str, in_reward: bool, steps: bool) -> str | None:
    """The reason why a term cannot be computed from log-probs of sampled tokens and one reference, or None."""
    if term.reads != {"log_ratio"}:
        what = f"baseline {term.baseline}" if term.baseline == "exact" else f"weight {term.weight}"
        what = what if term.needs == "log_ratio" else term.estimator
        return f"{host} hands out log-probs of sampled tokens only, and {what} reads other tokens too"
    if term.reference in ("ema", "periodic"):
        return f"{host} keeps its own reference; use reference: initial for it, or reference: sampler"
    if term.baseline in ("own", "batch"):
        what, splits = ("a group", "groups") if term.baseline == "own" else ("a batch", "batches")
        why = f"needs all completions of {what} at once, and {host} splits {splits}"
        return f"baseline {term.baseline} {why}; use after or before"
    if isinstance(term.beta, BetaTarget):
        return "a beta with a target needs the measured KL of every update; use a number"
    if isinstance(term.beta, BetaSchedule) and not steps:
        return f"a schedule of beta needs the count of updates, which {host} does not pass; use a number"
    if term.baseline != "before":
        return None
    if not in_reward:
        return f"{host} computes advantages elsewhere; use baseline: after"
    if term.credit != "total" or term.correction != "none":
        return f"the reward of {host} is one number a completion; use credit: total and correction: none"
    return None
