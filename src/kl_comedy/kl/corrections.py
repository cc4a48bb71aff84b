"""Importance ratios between the policy and the behaviour policy, applied to the KL part.

``delta_BT = logp - behaviour_logp`` (nats, zero outside the mask). Each function returns the
uncapped, differentiable ratio ``[B, T]``; :func:`weights_of` bounds it where a term asks.

An entry declares these facts: ``weights`` ("score": the ratio weights the score of its own token; "cost": it weights
each cost at its own position, per decision), ``detached`` (never differentiated, even in the loss), ``scope`` (the
tokens whose ratios are multiplied) and, for a prefix, ``own`` (whether the token's own ratio is; true by default).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from kl_comedy.cuda import running_sum
from kl_comedy.lazy import LazyModule
from kl_comedy.registry import CORRECTIONS

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    # The registry of these functions is read by commands that compute nothing.
    torch = LazyModule("torch")


class Correction(Protocol):
    """A function from per-token log-ratios to the behaviour policy to weights."""

    def __call__(self, delta_BT: Tensor, /) -> Tensor:
        """Map ``delta_BT`` ``[B, T]`` (``log pi - log mu``, nats, zero outside the mask) to ratios ``[B, T]``.

        An entry of scope ``prefix`` also takes ``window: int | None``, the number of ratios it multiplies.
        """
        ...


@CORRECTIONS.register("none", source="every on-policy paper", weights="score", detached=False, scope="none")
def none(delta_BT: Tensor) -> Tensor:
    """No ratio: weight one everywhere (the neutral element)."""
    return torch.ones_like(delta_BT)


@CORRECTIONS.register("token", source="2512.02556 (DeepSeek-V3.2)", weights="score", detached=False, scope="token")
def token(delta_BT: Tensor) -> Tensor:
    """``rho_t = pi/mu`` of the token itself."""
    return delta_BT.exp()


@CORRECTIONS.register(
    "token_detached", source="2510.01555; OpenRLHF unbiased_gradient", weights="score", detached=True, scope="token"
)
def token_detached(delta_BT: Tensor) -> Tensor:
    """``rho_t`` of the token itself, never differentiated."""
    # Differentiated, the ratio would add a score term: credit of the estimate's value.
    return delta_BT.detach().exp()


@CORRECTIONS.register(
    "prefix",
    source="per-decision importance sampling, Precup et al. 2000",
    weights="cost",
    detached=False,
    scope="prefix",
)
def prefix(delta_BT: Tensor, window: int | None = None) -> Tensor:
    """``W_t``: the product of ratios up to and including the token (of the last ``window`` ones)."""
    return _running_sum(delta_BT, window).exp()


@CORRECTIONS.register(
    "prefix_previous",
    source="Rao-Blackwellized per-decision form",
    weights="cost",
    detached=False,
    scope="prefix",
    own=False,
)
def prefix_previous(delta_BT: Tensor, window: int | None = None) -> Tensor:
    """``W_{t-1}``: the product of ratios before the token; enough where the cost depends on the prefix only."""
    # The token's own ratio has mean one given the prefix, so leaving it out changes no mean and saves its noise.
    return _running_sum(_shifted(delta_BT, 1), window).exp()


@CORRECTIONS.register(
    "sequence", source="2512.21852 Sec. 3 (open problem)", weights="score", detached=False, scope="sequence"
)
def sequence(delta_BT: Tensor) -> Tensor:
    """``omega``: the ratio of the whole completion, at every token."""
    # The log-ratios are zero outside the mask, so a sum over a padded row is one over the completion.
    return delta_BT.sum(-1, keepdim=True).exp().expand_as(delta_BT)


def _shifted(delta_BT: Tensor, by: int) -> Tensor:
    """Each row moved right by ``by`` tokens, zeros first: what was the sum up to t is now that before t."""
    return torch.nn.functional.pad(delta_BT, (by, 0))[..., : delta_BT.shape[-1]]


def _running_sum(delta_BT: Tensor, window: int | None) -> Tensor:
    """The sum up to each token, of the last ``window`` tokens where it is given."""
    total_BT = running_sum(delta_BT)
    if window is None:
        return total_BT
    return total_BT - _shifted(total_BT, window)


def weights_of(
    name: str,
    delta_BT: Tensor,
    *,
    cap: float | None = None,
    cap_mode: str = "truncate",
    window: int | None = None,
    mask_BT: Tensor | None = None,
) -> Tensor:
    """The ratios of a registered correction with its bounds, ``[B, T]``.

    ``truncate`` is ``min(ratio, cap)``, ``mask`` replaces a ratio above the cap by zero, ``each`` truncates every
    token's ratio before the product, ``clip`` depends on the cost (:func:`clipped`) and bounds nothing here. All
    introduce bias, so they are options of a term and its diagnostics count them. ``window`` is for corrections of
    scope prefix; it counts the tokens of ``mask_BT`` (None: all).

    >>> weights_of("prefix", torch.tensor([[0.0, 1.0, 2.0]]), window=1).log().round(decimals=3)
    tensor([[0., 1., 2.]])
    """
    if cap is not None and cap_mode == "each":
        # A product of ratios is a sum of log-ratios, so the bound of each ratio is one of each log-ratio (V-trace).
        delta_BT = delta_BT.clamp(max=math.log(cap))
        cap = None
    correction = CORRECTIONS.get(name).fn
    ratio_BT: Tensor
    if window is None:
        # Most corrections take no window at all, so the argument is given only where there is one.
        ratio_BT = correction(delta_BT)
    elif mask_BT is None:
        ratio_BT = correction(delta_BT, window=window)
    else:
        # The tokens of the mask side by side, in their order: a window must not be filled by what a tool printed.
        order_BT = (~mask_BT).byte().argsort(dim=-1, stable=True)
        compact_BT = correction(delta_BT.gather(-1, order_BT), window=window)
        ratio_BT = torch.zeros_like(compact_BT).scatter(-1, order_BT, compact_BT)
    if cap is None or cap_mode == "clip":
        return ratio_BT
    if cap_mode == "truncate":
        return ratio_BT.clamp(max=cap)
    return torch.where(ratio_BT <= cap, ratio_BT, torch.zeros_like(ratio_BT))


def clipped(ratio_BT: Tensor, cost_BT: Tensor, cap: float) -> Tensor:
    """Where PPO's clip of a cost, ``max(r c, clip(r, 2 - cap, cap) c)``, has no gradient, ``[B, T]`` (2510.01555).

    >>> clipped(torch.tensor([[0.5, 0.5, 1.5, 1.5]]), torch.tensor([[1.0, -1.0, 1.0, -1.0]]), 1.2)
    tensor([[ True, False, False,  True]])
    """
    # A cost pushes the ratio down, a negative one up; the gradient ends where the ratio has left the range that way.
    beyond_BT = torch.where(cost_BT > 0, ratio_BT < 2 - cap, ratio_BT > cap)
    return beyond_BT & (cost_BT != 0)
