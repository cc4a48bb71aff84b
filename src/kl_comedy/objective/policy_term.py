"""The policy term of an objective: a policy loss, the policy its ratio is against, and corrections for stale samples.

    loss_t = prod_c weight_c,t * policy_loss(log pi, log old)_t

``old`` is the policy that sampled (``proximal: behaviour``) or the policy at the batch's first use (``recomputed``,
decoupled PPO, 2110.00641). The weights compare the policy that sampled with the current policy or, where it is
recomputed, with the proximal one. So no ratio is ever applied twice.

Legend: ``B`` sequences, ``T`` completion tokens; log-probs in nats.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
        # Certificates and tables are stored under this label.
        parts = [_call(self.loss, self.options)]
        if self.proximal == "recomputed":
            parts.append("against the recomputed policy")
        for name, options in self.corrections.items():
            parts.append(f"x {_call(name, options or {})}")
        return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class PolicyLossParts:
    """The policy loss of a batch, and what bounds and corrections did to it."""

    loss_BT: Tensor
    clipped_BT: Tensor | None
    """Where the loss's own bound acted (bool); None where it has none."""
    weights: Mapping[str, Weights]
    """The weights of each correction, by name."""


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
    # Where the policy is recomputed, corrections compare the sampler with it; else with the current policy.
    if term.proximal == "recomputed":
        if proximal_logp_BT is None:
            raise UserError("algorithm.proximal: recomputed needs the log-probs of the policy at the batch's first use")
        # Outside the mask: the policy's own, so that no ratio there is infinite and none gives a NaN gradient.
        old_BT = torch.where(mask_BT, proximal_logp_BT, logp_BT).detach()
        anchor_BT = old_BT
    else:
        old_BT = torch.where(mask_BT, behaviour_logp_BT, logp_BT).detach()
        anchor_BT = logp_BT.detach()

    entry = POLICY_LOSSES.get(term.loss)
    options = dict(term.options)
    if entry.facts.get("scope") == "sequence":
        options["mask_BT"] = mask_BT
    loss_BT = torch.where(mask_BT, entry.fn(logp_BT, old_BT, advantage_BT, **options), 0.0)

    clipped_BT = None
    weights: dict[str, Weights] = {}
    with torch.no_grad():
        # By the loss's own function, so that a metric cannot say something else than the loss does.
        bounded = entry.facts.get("bounded")
        if bounded is not None:
            clipped_BT = bounded(logp_BT, old_BT, advantage_BT, **options) & mask_BT
        delta_BT = torch.where(mask_BT, anchor_BT - behaviour_logp_BT, 0.0)
        for name, correction_options in term.corrections.items():
            correction = POLICY_CORRECTIONS.get(name)
            arguments = dict(correction_options or {})
            if correction.facts.get("probabilities"):
                arguments["behaviour_logp_BT"] = torch.where(mask_BT, behaviour_logp_BT, 0.0)
            weights[name] = correction.fn(delta_BT, advantage_BT, mask_BT, **arguments)
    for correction_weights in weights.values():
        # Detached: a weight corrects the distribution, and is not itself optimized.
        loss_BT = correction_weights.weight_BT.detach() * loss_BT
    return PolicyLossParts(loss_BT=loss_BT, clipped_BT=clipped_BT, weights=weights)


def check_policy_term(term: PolicyTerm) -> None:
    """Raise :class:`UserError` with the config key of the first name, option or combination that has no meaning."""
    loss = POLICY_LOSSES.get(term.loss, key="algorithm.policy_loss")
    _check_options("algorithm.policy_loss_options", loss, term.options)
    ratios = []
    for name, options in term.corrections.items():
        key = f"algorithm.correction.{name}"
        correction = POLICY_CORRECTIONS.get(name, key="algorithm.correction")
        if options is not None and not isinstance(options, Mapping):
            raise bad_value(key, options, "a mapping of its options, as {}")
        _check_options(key, correction, options or {})
        if correction.facts.get("role", "ratio") == "ratio":
            ratios.append(name)
    _check_ratios(term, ratios, loss_has_ratio=loss.facts.get("scope", "token") != "none")


def _check_ratios(term: PolicyTerm, ratios: Sequence[str], *, loss_has_ratio: bool) -> None:
    """Raise :class:`UserError` where a ratio would weight the loss twice, or the recomputed policy is not used."""
    if len(ratios) > 1:
        raise UserError(
            f"algorithm.correction: {' and '.join(ratios)} are both importance ratios, and together would weight the "
            "loss twice; keep one (masks may join it)"
        )
    if ratios and loss_has_ratio and term.proximal == "behaviour":
        raise UserError(
            f"algorithm.correction: {ratios[0]} would weight the loss a second time, because {term.loss} already has "
            "the ratio to the sampler; set algorithm.proximal=recomputed (decoupled PPO) or "
            "algorithm.policy_loss=reinforce"
        )
    # A pass over the whole batch is its price; without a use it would be paid for nothing.
    uses_proximal_policy = loss_has_ratio or bool(term.corrections)
    if term.proximal == "recomputed" and not uses_proximal_policy:
        raise UserError(
            f"algorithm.proximal: recomputed changes nothing here: {term.loss} has no ratio and algorithm.correction "
            "is empty"
        )


def _check_options(key: str, entry: Entry[Any], options: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` for an option that the entry does not take, or with a value that it cannot have."""
    # The first three parameters are tensors in all entries, and so are those of entries that declare to need more.
    # From the signature: an entry declares its options by having them.
    parameters = list(inspect.signature(entry.fn).parameters)
    allowed = [name for name in parameters[3:] if not name.endswith("_BT")]
    for name, value in options.items():
        if name not in allowed:
            raise unknown_key(f"{key}.{name}", value, allowed, f"{entry.name} takes no such option")
        if not _is_number_from_zero(value):
            raise bad_value(f"{key}.{name}", value, "a number of at least 0")
        # A ratio is never at most 0, so that such a bound would drop everything.
        if name in ("cap", "high") and value == 0:
            raise bad_value(f"{key}.{name}", value, "a number above 0")
    if "low" in options and "high" in options and options["low"] > options["high"]:
        raise bad_value(f"{key}.low", options["low"], f"at most {key}.high ({options['high']})")


def _is_number_from_zero(value: object) -> bool:
    # bool is an int in Python, and YAML reads "yes" as one.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 0  # False for NaN


def _call(name: str, options: Mapping[str, Any]) -> str:
    """``name(option=value,...)``, or the name alone without options."""
    if not options:
        return name
    arguments = ",".join(f"{key}={value:g}" for key, value in sorted(options.items()))
    return f"{name}({arguments})"
