"""The policy term of an objective: a policy loss, the policy its ratio is against, and corrections for stale samples.

    loss_t = prod_c weight_c,t * policy_loss(log pi, log old)_t

``old`` is the sampler (``proximal: behaviour``) or the policy at the batch's first use (``recomputed``, decoupled PPO);
the weights compare the sampler with the current policy or, where it is recomputed, with the proximal one. So no ratio
is ever applied twice. Legend: ``B`` sequences, ``T`` completion tokens; log-probs in nats.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.objective.policy_corrections import Weights
from kl_comedy.registry import POLICY_CORRECTIONS, POLICY_LOSSES, Entry

if TYPE_CHECKING:
    from kl_comedy.config import AlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class PolicyTerm:
    """A policy term as data; ``corrections`` maps names to options. The defaults are plain REINFORCE."""

    loss: str = "reinforce"
    options: Mapping[str, Any] = field(default_factory=dict)
    corrections: Mapping[str, Any] = field(default_factory=dict)
    proximal: str = "behaviour"

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> PolicyTerm:
        """The policy term of a config."""
        return cls(
            loss=algorithm.policy_loss,
            options=algorithm.policy_loss_options,
            corrections=algorithm.correction,
            proximal=algorithm.proximal,
        )

    def label(self) -> str:
        """A short name.

        >>> PolicyTerm(loss="ppo_clip", corrections={"tis": {"cap": 5.0}}, proximal="recomputed").label()
        'ppo_clip against the recomputed policy x tis(cap=5)'
        """
        words = [_call(self.loss, self.options)]
        if self.proximal == "recomputed":
            words.append("against the recomputed policy")
        return " ".join([*words, *(f"x {_call(name, options or {})}" for name, options in self.corrections.items())])


@dataclass(frozen=True, kw_only=True)
class PolicyLossParts:
    """The loss ``[B, T]``, where the loss's own bound acted (None: it has none), and each correction's weights."""

    loss_BT: Tensor
    clipped_BT: Tensor | None
    weights: Mapping[str, Weights]


def policy_term(
    term: PolicyTerm,
    *,
    logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    proximal_logp_BT: Tensor | None = None,
) -> PolicyLossParts:
    """The policy loss per token, unreduced, zero outside the mask; gradient into ``logp_BT`` only.

    ``proximal_logp_BT``: with ``proximal: recomputed``, the log-probs of the policy at the batch's first use.
    Raises :class:`UserError` where that is missing.
    """
    old_BT = proximal_logp_BT if term.proximal == "recomputed" else behaviour_logp_BT
    if old_BT is None:
        raise UserError("algorithm.proximal: recomputed needs the log-probs of the policy at the batch's first use")
    old_BT = torch.where(mask_BT, old_BT, logp_BT).detach()
    entry = POLICY_LOSSES.get(term.loss)
    options = {**term.options, **({"mask_BT": mask_BT} if entry.facts.get("scope") == "sequence" else {})}
    loss_BT = torch.where(mask_BT, entry.fn(logp_BT, old_BT, advantage_BT, **options), 0.0)
    bounded = entry.facts.get("bounded")
    with torch.no_grad():
        anchor_BT = old_BT if term.proximal == "recomputed" else logp_BT
        delta_BT = torch.where(mask_BT, anchor_BT - behaviour_logp_BT, 0.0).detach()
        weights: dict[str, Weights] = {}
        for name, given in term.corrections.items():
            correction = POLICY_CORRECTIONS.get(name)
            more = dict(given or {})
            if correction.facts.get("probabilities"):
                more["behaviour_logp_BT"] = torch.where(mask_BT, behaviour_logp_BT, 0.0)
            weights[name] = correction.fn(delta_BT, advantage_BT, mask_BT, **more)
        clipped_BT = None if bounded is None else bounded(logp_BT, old_BT, advantage_BT, **options) & mask_BT
    for each in weights.values():
        loss_BT = each.weight_BT.detach() * loss_BT
    return PolicyLossParts(loss_BT=loss_BT, clipped_BT=clipped_BT, weights=weights)


def check_policy_term(term: PolicyTerm) -> None:
    """Raise :class:`UserError` naming the config key of the first name, option or combination that cannot work."""
    loss = POLICY_LOSSES.get(term.loss, key="algorithm.policy_loss")
    _check_options("algorithm.policy_loss_options", loss, term.options)
    ratios = []
    for name, options in term.corrections.items():
        entry = POLICY_CORRECTIONS.get(name, key="algorithm.correction")
        if not isinstance(options, Mapping | None):
            raise bad_value(f"algorithm.correction.{name}", options, "a mapping of its options, as {}")
        _check_options(f"algorithm.correction.{name}", entry, options or {})
        ratios += [name] if entry.facts.get("role", "ratio") == "ratio" else []
    if len(ratios) > 1:
        raise UserError(
            f"algorithm.correction: {' and '.join(ratios)} are both importance ratios, and together would weight the "
            "loss twice; keep one (masks may join it)"
        )
    has_ratio = loss.facts.get("scope", "token") != "none"
    if ratios and has_ratio and term.proximal == "behaviour":
        raise UserError(
            f"algorithm.correction: {ratios[0]} would weight the loss a second time, {term.loss} holds the ratio to "
            "the sampler already; set algorithm.proximal=recomputed (decoupled PPO) or algorithm.policy_loss=reinforce"
        )
    if term.proximal == "recomputed" and not has_ratio and not term.corrections:
        raise UserError(
            f"algorithm.proximal: recomputed changes nothing here: {term.loss} has no ratio and algorithm.correction "
            "is empty"
        )


def _check_options(key: str, entry: Entry[Any], options: Mapping[str, Any]) -> None:
    allowed = [name for name in list(inspect.signature(entry.fn).parameters)[3:] if not name.endswith("_BT")]
    for name, value in options.items():
        if name not in allowed:
            raise unknown_key(f"{key}.{name}", value, allowed, f"{entry.name} takes no such option")
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < 0:
            raise bad_value(f"{key}.{name}", value, "a number of at least 0")
        if name in ("cap", "high") and value == 0:
            raise bad_value(f"{key}.{name}", value, "a number above 0")
    if "low" in options and "high" in options and options["low"] > options["high"]:
        raise bad_value(f"{key}.low", options["low"], f"at most {key}.high ({options['high']})")


def _call(name: str, options: Mapping[str, Any]) -> str:
    inside = ",".join(f"{key}={value:g}" for key, value in sorted(options.items()))
    return f"{name}({inside})" if inside else name
