"""kl_surrogate: the per-token loss of a KL term, whose expected gradient is what the term optimizes.

    term + log-probs -> estimate per token -> a cost on the score function (reward), or differentiated (loss)

Legend: ``B`` sequences, ``T`` completion tokens; ``[B, T]`` over completion tokens, zero outside the mask. Log-probs
in nats; promoted to float32 at least.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kl_comedy.cuda import running_sum
from kl_comedy.errors import UserError
from kl_comedy.kl.corrections import clipped, weights_of
from kl_comedy.kl.estimators import TopK, TopTokens, estimate, k2
from kl_comedy.kl.term import KLTerm
from kl_comedy.objective.groups import group_sums
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

LEAST_TAIL = 1e-6
"""The least probability that the policy's tail is taken to have, as in the paper's code."""


class NotFinite(UserError):
    """An estimate, a ratio or a gradient is infinite, or not a number, on some token."""


@dataclass(frozen=True, kw_only=True)
class TermParts:
    """A term taken apart: ``surrogate = weight * cost * logp + pathwise``.

    A cost that enters before the baseline is taken from here into the return, and only ``pathwise_BT`` stays a loss.
    """

    cost_BT: Tensor
    """What weights the score of each token (nats); detached."""
    weight_BT: Tensor
    """The ratio that the score is weighted by as well; detached."""
    baseline_weight_BT: Tensor
    """What a baseline of the cost is weighted by: the ratio up to and including the token; detached."""
    pathwise_BT: Tensor
    """What is differentiated by itself (nats)."""
    cost_after_B: Tensor
    """The cost of a token after the end of its completion (nats): with credit ``total`` the total, else 0."""


def own_baseline(parts: TermParts, mask_BT: Tensor, group_B: Tensor) -> Tensor:
    """``b_t = sum_j W_t^j F_t^j / sum_j W_t^j`` over the other completions of the group that reach t, ``[B, T]``.

    ``F`` is the KL return (nats) that weights the score at t, ``W_t`` the product of ratios up to t (1 on-policy). As
    ``E_mu[W_t s_t b] = 0`` for any ``b`` that does not depend on the completion itself, a baseline weighted by ``W_t``
    leaves an unbiased term unbiased off-policy too; a baseline inside the advantage does not. 0 where no other
    completion of the group reaches t. Detached.
    """
    mask_BT = mask_BT.bool()
    weighted_BT = torch.where(mask_BT, parts.weight_BT * parts.cost_BT, 0.0)
    weight_BT = torch.where(mask_BT, parts.baseline_weight_BT, 0.0)
    # sum_j W_t^j F_t^j over sum_j W_t^j, both without the completion itself.
    numerator_BT = _sum_of_others(weighted_BT, group_B)
    denominator_BT = _sum_of_others(weight_BT, group_B)
    # A sum of ratios may be 0 where a completion reaches t, so whether one does is counted by itself (half a row is
    # room for rounding).
    has_others_BT = _sum_of_others(mask_BT.to(weight_BT.dtype), group_B) > 0.5
    defined_BT = has_others_BT & (denominator_BT > 0) & mask_BT
    safe_BT = torch.where(denominator_BT > 0, denominator_BT, 1.0)
    return torch.where(defined_BT, numerator_BT / safe_BT, 0.0).detach()


def batch_baseline(parts: TermParts, mask_BT: Tensor, group_B: Tensor | None = None) -> Tensor:
    """The mean cost (nats) over the tokens of all rows, or of each group's, ``[B, T]``; detached.

    It contains the token's own completion: with ``N`` tokens in the batch, whatever is drawn, the expected gradient of
    ``sum_t s_t (l_t - mean)`` is that without it less ``1 / N`` of the gradient of the sequence-level KL.
    """
    cost_BT = torch.where(mask_BT.bool(), parts.weight_BT * parts.cost_BT, 0.0)
    if group_B is None:
        group_B = mask_BT.new_zeros(len(mask_BT))  # all rows are one group
    cost_and_tokens_B2 = torch.stack([cost_BT.sum(-1), mask_BT.sum(-1).to(cost_BT.dtype)], -1)
    sums_B2, _ = group_sums(cost_and_tokens_B2, group_B)
    mean_B1 = sums_B2[:, :1] / sums_B2[:, 1:]
    return mean_B1.expand_as(cost_BT).detach()


def expected_score(sampler_top: TopTokens) -> Tensor:
    """``C_t``, ``[B, T]``, whose gradient is ``E_mu[grad log pi]`` at the prefix of token t (2609.20807).

    The sampler's likeliest tokens H are known; outside H it is taken to be ``r pi``, with ``r`` the quotient of the two
    tails' probabilities (the paper's equations 9 and 12):

        C = sum_{v in H} c_v log pi(v),  c_v = mu(v) - r pi(v), constant

    The tail needs no sum of its own, as ``sum_v pi(v) grad log pi(v) = 0``. Exact where H leaves out at most one token.
    """
    policy_BTK = sampler_top.logp_BTK.detach().exp()
    sampler_BTK = sampler_top.ref_logp_BTK.exp()
    # Both sums are 1 up to rounding where the list is the whole vocabulary: their quotient then means nothing, and
    # weights a gradient that is 0. The bound keeps it finite.
    policy_tail_BT = (1 - policy_BTK.sum(-1)).clamp(min=LEAST_TAIL)
    sampler_tail_BT = (1 - sampler_BTK.sum(-1)).clamp(min=0)
    share_BT1 = (sampler_tail_BT / policy_tail_BT)[..., None]
    coefficient_BTK = sampler_BTK - share_BT1 * policy_BTK
    # A token that the policy never draws has the log-prob -inf and no gradient; 0 * -inf would be NaN.
    safe_logp_BTK = torch.where(torch.isneginf(sampler_top.logp_BTK), 0.0, sampler_top.logp_BTK)
    return (coefficient_BTK * safe_logp_BTK).sum(-1)


def _sum_of_others(values_BT: Tensor, group_B: Tensor) -> Tensor:
    """The sum over the other rows of the group, ``[B, T]``."""
    sums_BT, _ = group_sums(values_BT, group_B)
    return sums_BT - values_BT


def credit_costs(cost_BT: Tensor, credit: str, discount: float = 1.0, mask_BT: Tensor | None = None) -> Tensor:
    """The cost that weights the score of each token.

    ``total``: the sum over the completion; ``to_go``: the sum over u >= t (2506.09477; past costs have
    zero mean), each times ``discount^(u - t)``; ``own``: the token's own. A discount counts the tokens of the mask
    (None: all): credit must not depend on how much a tool prints between two of them. Costs are zero outside the mask.

    >>> credit_costs(torch.tensor([[1.0, 2.0, 3.0]]), "to_go")
    tensor([[6., 5., 3.]])
    >>> credit_costs(torch.tensor([[1.0, 0.0, 4.0]]), "to_go", 0.5, torch.tensor([[True, False, True]]))
    tensor([[3., 4., 4.]])
    """
    if credit == "total":
        return cost_BT.sum(-1, keepdim=True).expand_as(cost_BT)
    if credit == "own":
        return cost_BT
    if discount == 1:
        return running_sum(cost_BT.flip(-1)).flip(-1)
    # C_t = c_t + discount * C_{t+1}, from the end: a running sum over powers of 1 / discount overflows on long rows.
    factor_BT = torch.full_like(cost_BT, discount)
    if mask_BT is not None:
        factor_BT = torch.where(mask_BT, factor_BT, 1.0)
    costs = list(cost_BT.unbind(-1))
    for t in reversed(range(len(costs) - 1)):
        costs[t] = costs[t] + factor_BT[:, t] * costs[t + 1]
    return torch.stack(costs, -1)


def in_reward(
    value_BT: Tensor,
    ratio_BT: Tensor,
    up_to_BT: Tensor,
    *,
    mask_BT: Tensor,
    credit: str,
    discount: float = 1.0,
    per_decision: bool,
    pathwise_BT: Tensor | None = None,
) -> TermParts:
    """An estimate as a cost. ``ratio_BT`` weights the score, or each cost where ``per_decision``.

    ``up_to_BT`` is the ratio up to and including each token. ``pathwise_BT`` is the differentiated own step of an exact
    KL, which is then left out of the cost: unbiased for the sequence KL on-policy,
    ``sum_t s_t sum_{u>t} KL_u + grad KL_t`` (chain rule, 2506.09477).
    """
    value_BT = value_BT.detach()
    ratio_BT = ratio_BT.detach()
    if per_decision:
        # W_u k_u: each cost has the ratio of its own prefix, and the score has none.
        step_BT = ratio_BT * value_BT
        weight_BT = torch.ones_like(ratio_BT)
        baseline_weight_BT = up_to_BT.detach()
    else:
        # rho_t s_t sum_u k_u: the score has the ratio, and the costs have none.
        step_BT = value_BT
        weight_BT = ratio_BT
        baseline_weight_BT = ratio_BT
    cost_BT = credit_costs(step_BT, credit, discount, mask_BT)
    # Not the last column of the cost: a token after the end has no step of its own to be left out of the total.
    total_B = step_BT.sum(-1)
    cost_after_B = torch.zeros_like(total_B)
    if credit == "total":
        cost_after_B = total_B
    if pathwise_BT is None:
        pathwise_BT = torch.zeros_like(value_BT)
    else:
        # The own step is differentiated instead: grad KL_t replaces s_t KL_t.
        cost_BT = cost_BT - step_BT
    return TermParts(
        cost_BT=cost_BT,
        weight_BT=weight_BT,
        baseline_weight_BT=baseline_weight_BT,
        pathwise_BT=pathwise_BT,
        cost_after_B=cost_after_B,
    )


def in_loss(value_BT: Tensor, ratio_BT: Tensor) -> TermParts:
    """A differentiated estimate, times its (differentiable or detached) ratio."""
    # All zero: a term in loss has no cost, so neither a score nor a baseline is weighted by it.
    zeros_BT = torch.zeros_like(value_BT)
    return TermParts(
        cost_BT=zeros_BT,
        weight_BT=zeros_BT,
        baseline_weight_BT=zeros_BT,
        pathwise_BT=ratio_BT * value_BT,
        cost_after_B=zeros_BT[:, 0],
    )


def kl_surrogate(
    term: KLTerm,
    *,
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    mask_BT: Tensor,
    exact_kl_BT: Tensor | None = None,
    top: TopTokens | None = None,
    certainty_BT: Tensor | None = None,
    baseline_BT: Tensor | None = None,
    sampler_top: TopTokens | None = None,
) -> Tensor:
    """The surrogate of a term, per token, unreduced, at beta = 1, zero outside the mask. ``[B, T]``.

    Over sequences drawn from the behaviour policy, the expectation of ``grad sum_t surrogate[b, t]`` is
    the term's contribution to the gradient of the objective to be *minimized*. Gradients flow into ``logp_BT``,
    ``exact_kl_BT``, ``top.logp_BTK`` and ``sampler_top.logp_BTK`` only. The algorithm's baseline does not change that
    expectation and is not applied here; a term with ``reference: sampler`` is measured against ``behaviour_logp_BT``.

    Args:
        term: the KL term.
        logp_BT: the policy's log-probs of the sampled tokens, with gradient.
        ref_logp_BT: the reference's.
        behaviour_logp_BT: the sampler's, as recorded when the token was drawn.
        mask_BT: true on completion tokens. A row without any has a surrogate of 0.
        exact_kl_BT: for ``exact`` (``exact_forward``): the exact reverse (forward) KL of the next-token
            distributions at the prefix of token t, differentiable.
        top: for ``top_k``: the top tokens that its options ask for.
        certainty_BT: for ``weight``: ``1 - H / log V`` of policy or reference at the prefix of token t.
        baseline_BT: for ``baseline: own`` (``batch``): :func:`own_baseline` (:func:`batch_baseline`) of the update's
            rows; None is no baseline.
        sampler_top: for ``score_centring``: the sampler's likeliest tokens, its log-probs in the reference's place.

    Raises:
        UserError: shapes that differ, a log-prob that is not finite, an exact estimator without ``exact_kl_BT``, an
            estimator that returns another shape.
        NotFinite: an estimate or a ratio that overflows, as ``exp`` does beyond 88.7 nats in float32 and beyond 709 in
            float64. It is a UserError too.

    >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> kl_surrogate(KLTerm("k2", placement="loss"), logp_BT=logp, ref_logp_BT=torch.tensor([[-2.0, -2.0]]),
    ...     behaviour_logp_BT=logp.detach(), mask_BT=torch.tensor([[True, True]])).detach()
    tensor([[0.5000, 0.0000]])
    """
    given = _Batch(
        logp_BT=logp_BT,
        ref_logp_BT=ref_logp_BT,
        behaviour_logp_BT=behaviour_logp_BT,
        mask_BT=mask_BT,
        exact_kl_BT=exact_kl_BT,
        top=top,
        certainty_BT=certainty_BT,
        sampler_top=sampler_top,
    )
    batch = _checked(term, given)
    parts = _finite_parts(term, batch)
    credited_BT = parts.weight_BT * parts.cost_BT
    if term.baseline == "exact" and batch.exact_kl_BT is not None:
        baseline_BT = _weighted(term, batch, batch.exact_kl_BT)
    # A baseline is weighted as the score is, by the ratio up to the token: then its mean is zero off-policy too.
    if baseline_BT is not None and term.baseline in ("own", "exact", "batch"):
        credited_BT = credited_BT - parts.baseline_weight_BT * baseline_BT.detach()
    # grad (cost * logp) = cost * score, as the cost is detached; what is differentiated by itself is added.
    scored_BT = batch.logp_BT
    if term.score_centring is not None and batch.sampler_top is not None:
        scored_BT = scored_BT - expected_score(batch.sampler_top)
    surrogate_BT = credited_BT * scored_BT + parts.pathwise_BT
    return torch.where(batch.mask_BT, surrogate_BT, 0.0)


def kl_parts(term: KLTerm, **tensors_BT: Any) -> TermParts:
    """The term taken apart, for a cost that enters before the baseline; the arguments are :func:`kl_surrogate`'s."""
    return _finite_parts(term, _checked(term, _Batch(**tensors_BT)))


@torch.no_grad()
def kl_value(term: KLTerm, **tensors_BT: Any) -> Tensor:
    """The estimate per token (nats), ``[B, T]``, zero outside the mask; the arguments are :func:`kl_surrogate`'s.

    Nothing is checked: where a log-prob is not finite, the estimate is not either.
    """
    return _value(term, _Batch(**tensors_BT).widened())


def kl_diagnostics(
    term: KLTerm, *, logp_BT: Tensor, ref_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor
) -> dict[str, float]:
    """What the options of a term did to this batch.

    ``ratio_max``: the largest ratio, before the cap; ``capped_share``: the share of ratios beyond the cap;
    ``clamped_share``: the share of tokens whose estimate is clamped, so without its own gradient. Empty for a term
    without correction and clamps, and for a batch without tokens, where neither a maximum nor a share exists.
    """
    diagnostics: dict[str, float] = {}
    mask_BT = mask_BT.bool()
    if not bool(mask_BT.any()):
        return diagnostics
    batch = _Batch(logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT).widened()
    with torch.no_grad():
        if term.correction != "none":
            ratio_BT, beyond_BT = _ratios_beyond_the_cap(term, batch)
            diagnostics["ratio_max"] = float(ratio_BT[mask_BT].max())
            diagnostics["capped_share"] = float(beyond_BT[mask_BT].double().mean())
        if term.input_clamp is not None or term.output_clamp is not None:
            log_ratio_BT = torch.where(mask_BT, batch.logp_BT - batch.reference_of(term), 0.0)
            diagnostics["clamped_share"] = _clamped_share(term, log_ratio_BT, mask_BT)
    return diagnostics


def _ratios_beyond_the_cap(term: KLTerm, batch: _Batch) -> tuple[Tensor, Tensor]:
    """The ratios without a cap, and where the term's cap changes them."""
    delta_BT = batch.log_ratio_to_behaviour()
    ratio_BT = weights_of(term.correction, delta_BT, window=term.window, mask_BT=batch.mask_BT)
    if term.cap is None:
        return ratio_BT, torch.zeros_like(batch.mask_BT)
    if term.cap_mode == "clip":
        # As PPO clips: only where the ratio exceeds the cap and the estimate would push it further.
        return ratio_BT, clipped(ratio_BT, _value(term, batch), term.cap)
    if term.cap_mode == "each":
        return ratio_BT, delta_BT.exp() > term.cap  # each token's ratio is capped before their product
    return ratio_BT, ratio_BT > term.cap


def _clamped_share(term: KLTerm, log_ratio_BT: Tensor, mask_BT: Tensor) -> float:
    """The share of tokens (of completions, at level sequence) beyond a clamp; exact estimators have none here."""
    if term.needs != "log_ratio":
        return 0.0
    if term.level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True)
        mask_BT = mask_BT.any(-1, keepdim=True)
    beyond_BT = torch.zeros_like(mask_BT)
    if term.input_clamp is not None:
        beyond_BT = beyond_BT | (log_ratio_BT.abs() > term.input_clamp)
    if term.output_clamp is not None:
        unclamped = dataclasses.replace(term, input_clamp=None, output_clamp=None)
        beyond_BT = beyond_BT | (_evaluate(unclamped, log_ratio_BT).abs() > term.output_clamp)
    return float(beyond_BT[mask_BT].double().mean())


class _Batch(NamedTuple):
    """The tensors of :func:`kl_surrogate`."""

    logp_BT: Tensor
    ref_logp_BT: Tensor
    behaviour_logp_BT: Tensor
    mask_BT: Tensor
    exact_kl_BT: Tensor | None = None
    top: TopTokens | None = None
    certainty_BT: Tensor | None = None
    sampler_top: TopTokens | None = None

    def widened(self) -> _Batch:
        """At least float32, the mask boolean; what must not be differentiated is detached."""
        exact_kl_BT = self.exact_kl_BT
        if exact_kl_BT is not None:
            exact_kl_BT = _wide(exact_kl_BT)
        certainty_BT = self.certainty_BT
        if certainty_BT is not None:
            certainty_BT = _wide(certainty_BT).detach()
        return _Batch(
            logp_BT=_wide(self.logp_BT),
            ref_logp_BT=_wide(self.ref_logp_BT).detach(),
            behaviour_logp_BT=_wide(self.behaviour_logp_BT).detach(),
            mask_BT=self.mask_BT.bool(),
            exact_kl_BT=exact_kl_BT,
            top=_wide_tokens(self.top),
            certainty_BT=certainty_BT,
            sampler_top=_wide_tokens(self.sampler_top),
        )

    def reference_of(self, term: KLTerm) -> Tensor:
        """The log-probs that a sampled estimate of ``term`` compares with."""
        if term.reference == "sampler":
            return self.behaviour_logp_BT
        return self.ref_logp_BT

    def log_ratio_to_behaviour(self) -> Tensor:
        """``log pi - log mu`` per token (nats), 0 outside the mask, where a log-prob may be anything."""
        return torch.where(self.mask_BT, self.logp_BT - self.behaviour_logp_BT, 0.0)


def _parts(term: KLTerm, batch: _Batch) -> TermParts:
    """The estimate of a checked batch as a cost (reward) or differentiated (loss), with its ratios."""
    delta_BT = batch.log_ratio_to_behaviour()
    # Differentiable where the correction is: in loss its score term is part of the gradient, in reward it is detached.
    bounds: dict[str, Any] = {"cap": term.cap, "cap_mode": term.cap_mode, "window": term.window}
    ratio_BT = weights_of(term.correction, delta_BT, mask_BT=batch.mask_BT, **bounds)
    value_BT = _weighted(term, batch, _value(term, batch))
    if term.placement == "loss":
        return in_loss(value_BT, ratio_BT)
    if term.cap_mode == "clip" and term.cap is not None:
        # PPO's clip depends on the cost, so it comes after the value: a clipped token has no gradient at all.
        ratio_BT = torch.where(clipped(ratio_BT, value_BT, term.cap), 0.0, ratio_BT)
    facts = CORRECTIONS.get(term.correction).facts
    per_decision = facts.get("weights") == "cost"
    up_to_BT = ratio_BT
    if per_decision:
        # prefix_previous leaves out the token's own ratio, which a baseline of the score at t needs.
        up_to_BT = weights_of("prefix", delta_BT, mask_BT=batch.mask_BT, **bounds)
    # An exact KL depends on the prefix alone, so its own step is differentiated: grad KL_t, and not s_t KL_t.
    pathwise_BT = None
    exact = term.needs != "log_ratio"
    if exact and facts.get("scope") == "token":
        # A token's ratio has mean one given the prefix: without it the mean is the same, and the noise less.
        pathwise_BT = value_BT
    elif exact:
        pathwise_BT = ratio_BT.detach() * value_BT
    return in_reward(
        value_BT,
        ratio_BT,
        up_to_BT,
        mask_BT=batch.mask_BT,
        credit=str(term.credit),
        discount=term.discount,
        per_decision=per_decision,
        pathwise_BT=pathwise_BT,
    )


def _finite_parts(term: KLTerm, batch: _Batch) -> TermParts:
    """:func:`_parts`, all finite inside the mask. Raises :class:`NotFinite` that names the token which overflows.

    Log-probs are finite, so an infinite part is an ``exp`` of one token (its estimate, or a ratio) that float32 or
    float64 cannot hold; its gradient would be infinite too, or not a number.
    """
    parts = _parts(term, batch)
    finite_BT = torch.ones_like(batch.mask_BT)
    for part_BT in (parts.cost_BT, parts.weight_BT, parts.baseline_weight_BT, parts.pathwise_BT):
        finite_BT = finite_BT & torch.isfinite(part_BT.detach())
    bad_BT = ~finite_BT & batch.mask_BT
    if not bool(bad_BT.any()):
        return parts
    dtype = str(batch.logp_BT.dtype).removeprefix("torch.")
    largest = math.log(torch.finfo(batch.logp_BT.dtype).max)
    limit = f"{dtype} holds exp up to {largest:.1f} nats"
    with torch.no_grad():
        # A cost to go carries the overflow to the tokens before it: the token's own estimate says where it began.
        value_bad_BT = ~torch.isfinite(_value(term, batch)) & batch.mask_BT
    if bool(value_bad_BT.any()):
        row, column = (int(position) for position in value_bad_BT.nonzero()[0])
        if term.needs != "log_ratio":
            raise NotFinite(f"{term.estimator} is not finite at [{row}, {column}]")
        evaluated_at_BT = batch.behaviour_logp_BT if term.anchor == "behaviour" else batch.logp_BT
        log_ratio_BT = (evaluated_at_BT - batch.reference_of(term)).detach()
        raise NotFinite(
            f"{term.estimator} overflows at [{row}, {column}], where the log-ratio to the reference is "
            f"{float(log_ratio_BT[row, column]):g} nats ({limit}); a term with input_clamp bounds it"
        )
    # The sum of the log-ratios to the sampler, of which a ratio of several tokens is the exp, is largest somewhere.
    delta_BT = torch.where(bad_BT, batch.log_ratio_to_behaviour().detach(), -math.inf)
    place = int(delta_BT.argmax())
    row, column = divmod(place, delta_BT.shape[1])
    raise NotFinite(
        f"{term.label()} overflows in row {row}, where the log-ratio to the sampler is "
        f"{float(delta_BT[row, column]):g} nats at [{row}, {column}] ({limit}); a cap of the correction bounds it"
    )


def _weighted(term: KLTerm, batch: _Batch, value_BT: Tensor) -> Tensor:
    """A value per token times the token's weight, ``certainty ** weight_power``."""
    if term.weight == "none" or batch.certainty_BT is None:
        return value_BT
    # Rounding may put 1 - H / log V below 0, where a power is not defined.
    certainty_BT = torch.where(batch.mask_BT, batch.certainty_BT, 0.0).clamp(min=0.0)
    return certainty_BT**term.weight_power * value_BT


def _value(term: KLTerm, batch: _Batch) -> Tensor:
    """The estimate per token, differentiable, zero outside the mask."""
    mask_BT = batch.mask_BT
    if term.needs == "top_k" and batch.top is not None:
        top_k = TopK(
            top=batch.top,
            logp_BT=torch.where(mask_BT, batch.logp_BT, 0.0),
            ref_logp_BT=torch.where(mask_BT, batch.ref_logp_BT, 0.0),
            behaviour_logp_BT=torch.where(mask_BT, batch.behaviour_logp_BT, 0.0),
        )
        return torch.where(mask_BT, _evaluate(term, top_k), 0.0)
    if term.needs != "log_ratio" and batch.exact_kl_BT is not None:
        return _evaluate(term, torch.where(mask_BT, batch.exact_kl_BT, 0.0))
    evaluated_at_BT = batch.logp_BT
    if term.anchor == "behaviour":
        evaluated_at_BT = batch.behaviour_logp_BT
    log_ratio_BT = torch.where(mask_BT, evaluated_at_BT - batch.reference_of(term), 0.0)
    return _sampled_value(term, log_ratio_BT, mask_BT)


def _sampled_value(term: KLTerm, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The estimate per token; at level sequence it is spread evenly over the tokens, so that it sums up."""
    if term.level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True)
    value_BT = _evaluate(term, log_ratio_BT)
    if term.gradient == "k2":
        # The value of the estimator, the gradient of k2: what is added and subtracted differs in its gradient alone.
        half_square_BT = k2(log_ratio_BT)
        value_BT = half_square_BT + (value_BT - half_square_BT).detach()
    if term.level == "sequence":
        # Where it stands does not matter to a sum over the completion; evenly, a mean over tokens is right as well.
        value_BT = value_BT * mask_BT / mask_BT.sum(-1, keepdim=True)
    # ``where`` and not a product: the value of a row without tokens is 0 / 0 above, and NaN times 0 is NaN.
    return torch.where(mask_BT, value_BT, 0.0)


def _evaluate(term: KLTerm, argument_BT: Tensor | TopK) -> Tensor:
    """The estimator's value (nats) between the term's clamps, of the shape of its argument."""
    # A clamp has no gradient beyond its bounds, as in the libraries whose recipes have one; the gradient of k2, which
    # `gradient: k2` puts in its place, reads the log-ratio itself.
    if term.input_clamp is not None and isinstance(argument_BT, Tensor):
        argument_BT = argument_BT.clamp(-term.input_clamp, term.input_clamp)
    value_BT = estimate(ESTIMATORS.get(term.estimator), argument_BT, **term.options)
    if term.output_clamp is None:
        return value_BT
    if isinstance(argument_BT, Tensor) and bool(torch.isinf(value_BT).any()):
        # Evaluated again away from the overflow: beyond its bound a clamp has the gradient 0, and 0 times the infinite
        # slope of the estimate would be NaN.
        limit_BT = value_BT.detach().clamp(-term.output_clamp, term.output_clamp)
        is_infinite_BT = torch.isinf(value_BT)
        safe_BT = torch.where(is_infinite_BT, 0.0, argument_BT)
        safe_value_BT = estimate(ESTIMATORS.get(term.estimator), safe_BT, **term.options)
        value_BT = torch.where(is_infinite_BT, limit_BT, safe_value_BT)
    return value_BT.clamp(-term.output_clamp, term.output_clamp)


def _wide(tensor: Tensor) -> Tensor:
    """At least float32: in 16 bits a log-ratio of 0.01 nats is rounding."""
    if tensor.dtype == torch.float64:
        return tensor
    return tensor.float()


def _wide_tokens(top: TopTokens | None) -> TopTokens | None:
    """Their log-probs, of which the reference's are constants; the policy's may ask for gradient."""
    if top is None:
        return None
    return TopTokens(_wide(top.logp_BTK), _wide(top.ref_logp_BTK).detach(), top.inside_BT.bool())


def _checked(term: KLTerm, batch: _Batch) -> _Batch:
    """Check ranks, shapes and values; then :meth:`_Batch.widened`. Raises :class:`UserError`."""
    logp_BT = batch.logp_BT
    tensors = _tensors_read(term, batch)
    # Shapes must be equal, not broadcastable: a column [B, 1] for [B, T] would be a silent mistake.
    if logp_BT.dim() != 2:
        raise UserError(f"logp_BT must be [B, T], got shape {tuple(logp_BT.shape)}")
    for name, tensor in {**tensors, "mask_BT": batch.mask_BT}.items():
        if tensor.shape != logp_BT.shape:
            raise UserError(f"{name} has shape {tuple(tensor.shape)}, and logp_BT {tuple(logp_BT.shape)}")
    mask_BT = batch.mask_BT.bool()
    for name, tensor in tensors.items():
        bad_BT = ~torch.isfinite(tensor.detach()) & mask_BT
        if bool(bad_BT.any()):
            row, column = (int(position) for position in bad_BT.nonzero()[0])
            raise NotFinite(
                f"{name} is not finite at [{row}, {column}] ({float(tensor[row, column].detach())}), "
                f"{int(bad_BT.sum())} such value(s) in all"
            )
    return batch.widened()


def _tensors_read(term: KLTerm, batch: _Batch) -> dict[str, Tensor]:
    """What the term reads by its name, ``[B, T]`` each. Raises :class:`UserError` where one is not given."""
    tensors = {
        "logp_BT": batch.logp_BT,
        "ref_logp_BT": batch.ref_logp_BT,
        "behaviour_logp_BT": batch.behaviour_logp_BT,
    }
    if term.needs == "top_k":
        top = batch.top
        if top is None:
            raise UserError(f"estimator {term.estimator!r} needs top: the log-probs of the top tokens at each prefix")
        tensors["top.inside_BT"] = top.inside_BT
        # Summed over the tokens: one that is not finite makes the sum so.
        tensors["top.logp_BTK"] = top.logp_BTK.sum(-1)
        tensors["top.ref_logp_BTK"] = top.ref_logp_BTK.sum(-1)
    elif term.reads - {"log_ratio", "certainty", "sampler_top"}:
        if batch.exact_kl_BT is None:
            raise UserError(f"{term.label()} needs exact_kl_BT: the {term.direction} KL at each prefix")
        tensors["exact_kl_BT"] = batch.exact_kl_BT
    if term.weight != "none":
        if batch.certainty_BT is None:
            raise UserError(f"{term.label()} needs certainty_BT: 1 - H / log V of the {term.weight} at each prefix")
        tensors["certainty_BT"] = batch.certainty_BT
    if term.score_centring is not None:
        if batch.sampler_top is None:
            raise UserError(f"{term.label()} needs sampler_top: the sampler's likeliest tokens at each prefix")
        # A token that one of them never draws has the log-prob -inf, which is allowed here.
        tensors["sampler_top.logp_BTK"] = batch.sampler_top.logp_BTK.exp().sum(-1)
        tensors["sampler_top.ref_logp_BTK"] = batch.sampler_top.ref_logp_BTK.exp().sum(-1)
    return tensors
