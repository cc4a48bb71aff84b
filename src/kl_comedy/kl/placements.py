"""Where the estimate enters: as a detached cost on the score function, or differentiated.

Shapes: ``[B, T]`` over completion tokens, nats, zero outside the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TermParts:
    """A term taken apart: ``surrogate = weight * cost * logp + pathwise``.

    ``cost_BT`` and the weights are detached; ``pathwise_BT`` is differentiable. A cost that enters
    before the baseline is taken from here into the return, and only ``pathwise_BT`` stays a loss.
    ``baseline_weight_BT`` is what a baseline of the cost is weighted by: the ratio up to the token.
    """

    cost_BT: Tensor
    weight_BT: Tensor
    baseline_weight_BT: Tensor
    pathwise_BT: Tensor


def credit_costs(cost_BT: Tensor, credit: str) -> Tensor:
    """The cost that weights the score of each token.

    ``total``: the sum over the completion; ``to_go``: the sum over u >= t (2506.09477; past costs have
    zero mean); ``own``: the token's own.

    >>> credit_costs(torch.tensor([[1.0, 2.0, 3.0]]), "to_go")
    tensor([[6., 5., 3.]])
    """
    if credit == "total":
        return cost_BT.sum(-1, keepdim=True).expand_as(cost_BT)
    if credit == "to_go":
        return cost_BT.flip(-1).cumsum(-1).flip(-1)
    return cost_BT


def future_costs(cost_BT: Tensor, credit: str) -> Tensor:
    """Like :func:`credit_costs` without the token's own cost, which an exact term differentiates instead."""
    return credit_costs(cost_BT, credit) - cost_BT


def in_reward(value_BT: Tensor, ratio_BT: Tensor, up_to_BT: Tensor, *, credit: str, per_decision: bool) -> TermParts:
    """A sampled estimate as a cost. ``ratio_BT`` weights the score (or each cost, ``per_decision``).

    ``up_to_BT`` is the ratio up to and including each token.
    """
    value_BT, ratio_BT = value_BT.detach(), ratio_BT.detach()
    cost_BT = credit_costs(ratio_BT * value_BT if per_decision else value_BT, credit)
    return TermParts(
        cost_BT=cost_BT,
        weight_BT=torch.ones_like(ratio_BT) if per_decision else ratio_BT,
        baseline_weight_BT=up_to_BT.detach() if per_decision else ratio_BT,
        pathwise_BT=torch.zeros_like(value_BT),
    )


def exact_in_reward(
    exact_kl_BT: Tensor, ratio_BT: Tensor, up_to_BT: Tensor, *, credit: str, per_decision: bool, own_ratio: bool
) -> TermParts:
    """An exact KL as a cost: the future weights the score, the own step is differentiated.

    Unbiased for the sequence KL on-policy: ``sum_t s_t sum_{u>t} KL_u + grad KL_t`` (chain rule, 2506.09477).
    ``own_ratio`` says whether the own step carries the ratio: not for a token ratio, whose mean given
    the prefix is one.
    """
    ratio_BT = ratio_BT.detach()
    value_BT = exact_kl_BT.detach()
    cost_BT = future_costs(ratio_BT * value_BT if per_decision else value_BT, credit)
    return TermParts(
        cost_BT=cost_BT,
        weight_BT=torch.ones_like(ratio_BT) if per_decision else ratio_BT,
        baseline_weight_BT=up_to_BT.detach() if per_decision else ratio_BT,
        pathwise_BT=ratio_BT * exact_kl_BT if own_ratio else exact_kl_BT,
    )


def in_loss(value_BT: Tensor, ratio_BT: Tensor) -> TermParts:
    """A differentiated estimate, times its (differentiable or detached) ratio."""
    zeros_BT = torch.zeros_like(value_BT)
    return TermParts(cost_BT=zeros_BT, weight_BT=zeros_BT, baseline_weight_BT=zeros_BT, pathwise_BT=ratio_BT * value_BT)
