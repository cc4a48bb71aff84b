"""Certificates of policy terms: what is left of the reward gradient when samples are stale, by enumeration.

The target is the gradient of ``-E_pi[R]`` at the current policy. A term's advantage is the reward less the sampler's
expected reward, the limit of a group baseline over a large group. Figures are means over the near instances with shared
parameters, as for KL terms; a term is *exact* when it hits the target on every instance of the battery.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle.algorithm_context import policy_loss
from kl_comedy.kl.oracle.certificate import battery
from kl_comedy.kl.oracle.enumeration import REGIMES, Instance, Loss, Rows
from kl_comedy.kl.oracle.gradients import exact_moments, silent_shares
from kl_comedy.objective.policy_term import PolicyTerm
from kl_comedy.registry import POLICY_CORRECTIONS, POLICY_LOSSES, Entry

DECOUPLED = PolicyTerm(loss="ppo_clip", corrections={"tis": {"cap": 5.0}}, proximal="recomputed")
"""Decoupled PPO with AReaL's bound on the behaviour ratio."""
UPDATES = ("first", "later")
HALFWAY = 0.5
"""Where, at a later update, the proximal policy lies between sampler and policy: strictly between, so that the ratio to
the sampler and the ratio to the proximal policy are two, and each differs from one."""


@dataclass(frozen=True, kw_only=True)
class PolicyCertificate:
    """One policy term in one regime, with its :meth:`Moments.figures` against the reward gradient."""

    name: str
    term: PolicyTerm
    regime: str
    exact: bool
    """Whether the term hits the reward gradient on every instance."""
    claimed: bool
    """Whether its parts claim that."""
    relative_bias: float
    cosine: float
    variance: float
    strength: float
    dropped_share: float
    """The share of the sampler's tokens that a mask, a bound or a clip leaves without gradient."""
    update: str = "first"
    """The first update of a batch, or a later one, where a recomputed proximal policy is not the current one."""
    missed_in: str = ""
    """The drawn setting that misses the reward gradient; empty if a fixed instance does."""

    @property
    def claim_holds(self) -> bool:
        """Whether the term hits the reward gradient, or its parts do not claim it."""
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
        target = None
        if self.exact:
            target = "reward"
        claimed = None
        if self.claimed:
            claimed = "reward"
        cosine = None
        if math.isfinite(self.cosine):
            cosine = self.cosine
        return {
            "name": self.name,
            "terms": [_json(dataclasses.asdict(self.term))],
            "label": self.term.label(),
            "regime": self.regime,
            "update": self.update,
            "target": target,
            "claimed": claimed,
            "kept": self.claim_holds,
            "relative_bias": {"reward": self.relative_bias},
            "cosine": {"reward": cosine},
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
    # The one combination of a loss and a correction that papers give a name.
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
    corrections = [POLICY_CORRECTIONS.get(name) for name in term.corrections]
    if regime == "on_policy":
        # Every ratio is one, whatever its scope.
        return all("on_policy" in part.claims for part in (loss, *corrections))

    loss_has_a_ratio = loss.facts.get("scope", "token") != "none" and term.proximal == "behaviour"
    if loss_has_a_ratio:
        # The loss's own ratio is all that is needed, and a second one would count it twice.
        corrects_nothing = all(correction.facts.get("role") == "none" for correction in corrections)
        return "off_policy" in loss.claims and corrects_nothing
    # A correction that says nothing of its role is taken for a ratio.
    ratios = [correction for correction in corrections if correction.facts.get("role", "ratio") == "ratio"]
    has_a_mask = any(correction.facts.get("role") == "mask" for correction in corrections)
    if has_a_mask or len(ratios) != 1:
        return False
    return _claims_whole_ratio(ratios[0], term.corrections[ratios[0].name] or {})


def _claims_whole_ratio(ratio: Entry[Any], options: Mapping[str, Any]) -> bool:
    """Whether a correction claims the ratio of the whole completion, with these options."""
    if "off_policy" in ratio.claims:
        return True
    if "off_policy_unbounded" not in ratio.claims:
        return False
    # The fact ``unbounded`` names the options, with their values, under which no bound acts.
    unbounded = ratio.facts.get("unbounded", {})
    return bool(unbounded.items() <= dict(options).items())


def reward_gradient(instance: Instance) -> Tensor:
    """The gradient ``[D]`` of ``-E_pi[R]``, by the chain rule over prefixes: no completion is enumerated."""
    theta_D = instance.theta_D.clone().requires_grad_(True)
    # The sign is that of a loss, as in the gradients that it is compared with.
    negative_reward = -expected_reward(instance, instance.policy_logp(theta_D))
    return torch.autograd.grad(negative_reward, theta_D)[0]


def expected_reward(instance: Instance, logp_NV: Tensor) -> Tensor:
    """``E[R]`` over completions drawn from next-token log-probs; differentiable."""
    tree = instance.tree
    logp_NV = instance.in_dialogue(logp_NV)
    # By prefixes: a completion's reward is weighted by the probability of reaching its last one.
    reach_N = tree.reach(logp_NV)
    paid: Tensor | float = 0.0
    if instance.environment is not None:
        paid = reach_N @ instance.environment.paid_N
    is_last_N = tree.depth_N == tree.length - 1
    ended_reward_N = instance.reward_N2[:, 0]
    truncated_reward_N = instance.reward_N2[:, 1]
    if not tree.ends:
        # Every completion has full length, and the reward of its last prefix whatever its last token is.
        return (reach_N * ended_reward_N)[is_last_N].sum() + paid
    ends_N = logp_NV[:, 0].exp()
    is_cut_N = logp_NV[:, 1:].exp().sum(-1)
    ended = (reach_N * ends_N) @ ended_reward_N
    truncated = (reach_N * is_cut_N * truncated_reward_N)[is_last_N].sum()
    return ended + truncated + paid


def reward_loss(term: PolicyTerm, instance: Instance, *, baseline: float | None = None) -> Loss:
    """The policy term with the reward less ``baseline`` (None: the sampler's expected reward) as advantage."""
    if baseline is None:
        # It changes the variance and not the mean; the sampler's is what a batch would subtract.
        baseline = float(expected_reward(instance, instance.sampler_logp_NV))
    subtracted = baseline

    def loss(rows: Rows, /) -> Tensor:
        advantage_BT = torch.where(rows.mask_BT, (rows.reward_B - subtracted)[:, None], 0.0)
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
    certificates = []
    for regime in regimes:
        for update in updates:
            says_something_new = term.proximal == "recomputed" and regime != "on_policy"
            if update == "first" or says_something_new:
                certificates.append(_certificate(name, term, regime, update, seed))
    return certificates


def _certificate(name: str, term: PolicyTerm, regime: str, update: str, seed: int | None) -> PolicyCertificate:
    """The certificate of one regime and update, by enumeration on the instances of the battery."""
    exact = True
    missed_in = ""
    figures = []
    for case in battery(regime, seed=seed):
        target_D = reward_gradient(case.instance)
        instance = case.instance
        if update == "later":
            # The target stays that of the current policy: only sampler and proximal policy are older.
            instance = instance.at_a_later_update(HALFWAY)
        loss = reward_loss(term, instance)
        moments = exact_moments(instance, loss)
        # The first miss is the one that is named; later ones would be other words for it.
        if exact and not moments.equals(target_D, case.tolerance):
            exact = False
            if case.setting is not None:
                missed_in = str(case.setting)
        if case.shown:
            # A token without gradient was dropped by a mask, a bound or a clip; the score itself is never 0.
            dropped_share = silent_shares(instance, {"": loss})[""]
            figures.append({**moments.figures(target_D), "dropped_share": dropped_share})
    means = {}
    # Means over the fixed instances, as in the certificates of KL terms.
    for name_of_figure in figures[0]:
        means[name_of_figure] = sum(by_instance[name_of_figure] for by_instance in figures) / len(figures)
    return PolicyCertificate(
        name=name,
        term=term,
        regime=regime,
        exact=exact,
        claimed=claims_exact(term, regime, update),
        update=update,
        missed_in=missed_in,
        **means,
    )


def _json(value: Any) -> Any:
    """Plain data with infinite bounds as text, because JSON has no number for them."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value
