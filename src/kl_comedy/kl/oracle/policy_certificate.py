"""Certificates of policy terms: what is left of the reward gradient when samples are stale, by enumeration.

The target is the gradient of ``-E_pi[R]`` at the current policy. A term's advantage is the reward less the sampler's
expected reward, the limit of a group baseline over a large group. Figures are means over the near instances with shared
parameters, as for KL terms; a term is *exact* when it hits the target on every instance of the battery.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle.algorithm_context import policy_loss
from kl_comedy.kl.oracle.certificate import battery
from kl_comedy.kl.oracle.enumeration import REGIMES, Instance, Loss, Rows
from kl_comedy.kl.oracle.gradients import exact_moments, silent_shares
from kl_comedy.objective.policy_term import PolicyTerm
from kl_comedy.registry import POLICY_CORRECTIONS, POLICY_LOSSES

DECOUPLED = PolicyTerm(loss="ppo_clip", corrections={"tis": {"cap": 5.0}}, proximal="recomputed")
"""Decoupled PPO with AReaL's bound on the behaviour ratio."""
UPDATES = ("first", "later")
HALFWAY = 0.5
"""Where, at a later update, the proximal policy lies between sampler and policy: strictly between, so that the ratio to
the sampler and the ratio to the proximal policy are two, and each differs from one."""


@dataclass(frozen=True, kw_only=True)
class PolicyCertificate:
    """One policy term in one regime, with its :meth:`Moments.figures` against the reward gradient.

    ``exact``: whether the term hits it; ``claimed``: whether its parts claim that. ``update``: of the batch, the first
    or a later one, where a recomputed proximal policy is not the current one. ``missed_in``: the drawn setting
    that misses the reward gradient, empty if a fixed instance does. ``dropped_share``: of the sampler's tokens, those
    without gradient, by a mask, a bound or a clip.
    """

    name: str
    term: PolicyTerm
    regime: str
    exact: bool
    claimed: bool
    relative_bias: float
    cosine: float
    variance: float
    strength: float
    dropped_share: float
    update: str = "first"
    missed_in: str = ""

    @property
    def claim_holds(self) -> bool:
        return self.exact or not self.claimed

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.exact:
            return "the reward gradient of the current policy"
        along = f"cosine {self.cosine:.2f}, {self.strength:.2f} of its length along it"
        return f"biased: {self.relative_bias:.0%} off the reward gradient, {along}"

    def row(self) -> dict[str, Any]:
        """Plain data, in the shape of a KL term's certificate with ``reward`` as the one target."""
        return {
            "name": self.name,
            "terms": [_json(dataclasses.asdict(self.term))],
            "label": self.term.label(),
            "regime": self.regime,
            "update": self.update,
            "target": "reward" if self.exact else None,
            "claimed": "reward" if self.claimed else None,
            "kept": self.claim_holds,
            "relative_bias": {"reward": self.relative_bias},
            "cosine": {"reward": self.cosine if math.isfinite(self.cosine) else None},
            "variance": self.variance,
            "strength": self.strength,
            "dropped_share": self.dropped_share,
            "verdict": self.verdict,
        }


def named_policy_terms() -> Iterator[tuple[str, PolicyTerm]]:
    """Every registered policy loss, every correction on the plain score, and decoupled PPO."""
    for loss in POLICY_LOSSES:
        yield loss.name, PolicyTerm(loss=loss.name)
    for correction in POLICY_CORRECTIONS:
        if correction.name != "none":
            yield correction.name, PolicyTerm(corrections={correction.name: {}})
    yield "decoupled_ppo", DECOUPLED


def claims_exact(term: PolicyTerm, regime: str, update: str = "first") -> bool:
    """Whether the parts' claims make the term's expected gradient the reward gradient in ``regime``.

    On-policy every ratio is one, so it is enough that each part claims it. Off-policy the one ratio must be that of the
    whole completion, nothing may be dropped, and the loss must not bring a ratio of its own. At a later update of a
    recomputed proximal policy nothing is exact: the weight ends at that policy, and the rest of the ratio is per token.
    """
    if update == "later" and term.proximal == "recomputed":
        return False
    loss = POLICY_LOSSES.get(term.loss)
    parts = [loss, *(POLICY_CORRECTIONS.get(name) for name in term.corrections)]
    if regime == "on_policy":
        return all("on_policy" in part.claims for part in parts)
    if loss.facts.get("scope", "token") != "none" and term.proximal == "behaviour":
        return "off_policy" in loss.claims and all(part.facts.get("role") == "none" for part in parts[1:])
    ratios = [part for part in parts[1:] if part.facts.get("role", "ratio") == "ratio"]
    masks = [part for part in parts[1:] if part.facts.get("role") == "mask"]
    if masks or len(ratios) != 1:
        return False
    (ratio,) = ratios
    options = term.corrections[ratio.name] or {}
    unbounded = ratio.facts.get("unbounded", {}).items() <= dict(options).items()
    return "off_policy" in ratio.claims or ("off_policy_unbounded" in ratio.claims and unbounded)


def reward_gradient(instance: Instance) -> Tensor:
    """The gradient ``[D]`` of ``-E_pi[R]``, by the chain over prefixes: no completion is enumerated."""
    theta_D = instance.theta_D.clone().requires_grad_(True)
    scalar = -expected_reward(instance, instance.policy_logp(theta_D))
    return torch.autograd.grad(scalar, theta_D)[0]


def expected_reward(instance: Instance, logp_NV: Tensor) -> Tensor:
    """``E[R]`` over completions drawn from next-token log-probs; differentiable."""
    tree = instance.tree
    reach_N = tree.reach(logp_NV)
    last_N = tree.depth_N == tree.length - 1
    if not tree.ends:
        return (reach_N * instance.reward_N2[:, 0])[last_N].sum()
    ended = (reach_N * logp_NV[:, 0].exp()) @ instance.reward_N2[:, 0]
    cut = (reach_N * logp_NV[:, 1:].exp().sum(-1) * instance.reward_N2[:, 1])[last_N].sum()
    return ended + cut


def reward_loss(term: PolicyTerm, instance: Instance, *, baseline: float | None = None) -> Loss:
    """The policy term with the reward less ``baseline`` (None: the sampler's expected reward) as advantage."""
    baseline_value = float(expected_reward(instance, instance.sampler_logp_NV)) if baseline is None else baseline

    def loss(rows: Rows, /) -> Tensor:
        advantage_BT = torch.where(rows.mask_BT, (rows.reward_B - baseline_value)[:, None], 0.0)
        return policy_loss(term, rows, advantage_BT)

    return loss


def certify_policy(
    name: str,
    term: PolicyTerm,
    *,
    regimes: Sequence[str] = REGIMES,
    updates: Sequence[str] = ("first",),
    seed: int | None = None,
) -> list[PolicyCertificate]:
    """One certificate per regime and update of a batch; with ``seed``, in drawn settings too.

    Later updates say something new only off-policy and of a term whose proximal policy is recomputed; other terms have
    none. (On-policy the sampler is that policy: the term is then what it is off-policy with ``proximal: behaviour``.)
    """
    recomputed = term.proximal == "recomputed"
    return [
        _certificate(name, term, regime, update, seed)
        for regime in regimes
        for update in updates
        if update == "first" or (recomputed and regime != "on_policy")
    ]


def _certificate(name: str, term: PolicyTerm, regime: str, update: str, seed: int | None) -> PolicyCertificate:
    exact, missed_in, figures = True, "", list[dict[str, float]]()
    for each in battery(regime, seed=seed):
        target_D = reward_gradient(each.instance)
        instance = each.instance.at_a_later_update(HALFWAY) if update == "later" else each.instance
        loss = reward_loss(term, instance)
        moments = exact_moments(instance, loss)
        if exact and not moments.equals(target_D, each.tolerance):
            exact, missed_in = False, str(each.setting or "")
        if each.shown:
            figures.append(moments.figures(target_D) | {"dropped_share": silent_shares(instance, {"": loss})[""]})
    means = {name: sum(each[name] for each in figures) / len(figures) for name in figures[0]}
    claimed = claims_exact(term, regime, update)
    return PolicyCertificate(
        name=name, term=term, regime=regime, exact=exact, claimed=claimed, update=update, missed_in=missed_in, **means
    )


def _json(value: Any) -> Any:
    """An infinite bound as text, which JSON has no number for."""
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value
