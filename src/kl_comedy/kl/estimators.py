"""Estimators of the log-ratio ``l = log pi - log ref`` of the sampled token (or of the completion), and exact ones.

Names follow Schulman's note (2020): k1 = l, k2 = l^2 / 2, k3 = exp(-l) - 1 + l. An exact (Rao-Blackwellized) estimator
is given a divergence of the next-token distributions over the whole vocabulary (``exact_kl_BT``) instead of a
log-ratio, a top-k estimator (:class:`TopK`) the log-probs of the k likeliest tokens and of the sampled one. All are in
nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kl_comedy.errors import UserError
from kl_comedy.lazy import LazyModule
from kl_comedy.registry import ESTIMATORS, Entry

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    # The registry of these functions is read by commands that compute nothing.
    torch = LazyModule("torch")


class Estimator(Protocol):
    """A function from a log-ratio (``needs="exact_*"``: an exact KL; ``"top_k"``: a :class:`TopK`) to nats."""

    def __call__(self, log_ratio: Tensor, /, **options: float) -> Tensor:
        """Map ``log_ratio`` (any shape, nats, ``log pi - log ref``) to an estimate of the same shape.

        An estimator is pure and elementwise: it has no mask, reduction, coefficient or clamp, and the estimate is
        differentiable in ``log_ratio``. Its keyword arguments become ``KLTerm.options``. The fact ``options`` says
        which values they may have, as ``{"width": {"above": 0}}`` (the rules of
        :func:`kl_comedy.config.validate.option`); without it, any number. The fact ``claims_need`` maps ``on_policy``
        and ``off_policy`` to the options without which the claims do not hold, as
        ``{"on_policy": {"form": ("sampled_tail",)}}``.
        """
        ...


class TopRequest(NamedTuple):
    """The ``k`` likeliest tokens at each prefix, and of whom."""

    k: int
    whose: str
    """``policy``, ``reference``, or ``sampler``, whose come with the rollouts."""


class TopTokens(NamedTuple):
    """The k likeliest tokens S of policy or reference at each prefix."""

    logp_BTK: Tensor
    """The policy's log-probs (nats); differentiable."""
    ref_logp_BTK: Tensor
    """The reference's log-probs (nats) of the same tokens."""
    inside_BT: Tensor
    """Whether the sampled token is in S."""


@dataclass(frozen=True, kw_only=True)
class TopK:
    """What a top-k estimator reads: the top tokens, and log-probs (nats) of the sampled token.

    ``logp_BT`` and ``top.logp_BTK`` are differentiable; ``behaviour_logp_BT`` is what the sampler recorded.
    """

    top: TopTokens
    logp_BT: Tensor
    ref_logp_BT: Tensor
    behaviour_logp_BT: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the estimate, ``[B, T]``."""
        return self.logp_BT.shape


def estimate(entry: Entry[Any], argument: Tensor | TopK, **options: Any) -> Tensor:
    """The value (nats) of a registered estimator. Raises :class:`UserError` if it is not of the argument's shape."""
    value = entry.fn(argument, **options)
    if isinstance(value, torch.Tensor) and value.shape == argument.shape:
        return value
    if isinstance(value, torch.Tensor):
        returned = str(tuple(value.shape))
    else:
        returned = type(value).__name__
    raise UserError(
        f"estimator {entry.name!r} must return a tensor of the shape of its argument "
        f"{tuple(argument.shape)}, and returned {returned}"
    )


@ESTIMATORS.register(
    "k1",
    source="Schulman 2020; 2512.21852 'naive'; 2506.09477 'vanilla'",
    claims=("value:reverse", "pathwise:zero"),
    claims_truncated=("value:reverse", "pathwise:zero"),
    needs="log_ratio",
)
def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio itself, ``l``: unbiased value, may be negative, its own gradient is pure noise.

    >>> k1(torch.tensor([0.5, -0.5]))
    tensor([ 0.5000, -0.5000])
    """
    # d k1 = grad log pi, whose mean is zero: pathwise:zero.
    return log_ratio


@ESTIMATORS.register(
    "k2",
    source="Schulman 2020; 2506.09477 'squared'; 2510.01555",
    claims=("pathwise:token_reverse", "nonnegative"),
    claims_truncated=("pathwise:token_reverse",),
    needs="log_ratio",
)
def k2(log_ratio: Tensor) -> Tensor:
    """Half the squared log-ratio, ``l^2 / 2``: biased value, its gradient is that of the reverse KL.

    The factor 1/2 belongs to the estimator here; libraries that call ``l^2`` "k2" double the coefficient.

    >>> k2(torch.tensor([2.0]))
    tensor([2.])
    """
    # d k2 = l grad log pi, whose mean is the gradient of KL(pi || ref).
    return 0.5 * log_ratio.square()


@ESTIMATORS.register(
    "k3",
    source="Schulman 2020; DeepSeekMath 2402.03300 (GRPO); 2506.09477 'var-reduced'",
    claims=("value:reverse", "pathwise:token_forward", "nonnegative"),
    claims_truncated=("value:shifted_reverse", "pathwise:token_forward"),
    needs="log_ratio",
)
def k3(log_ratio: Tensor) -> Tensor:
    """``exp(-l) - 1 + l``: unbiased value, never negative, its own gradient is that of the forward KL.

    Grows like ``exp(-l)`` where the reference is far likelier than the policy; nothing is clamped, so float32
    overflows below -88.7 nats.

    >>> k3(torch.tensor([0.0]))
    tensor([0.])
    """
    # d k3 = (1 - exp(-l)) grad log pi, whose mean is -E_ref[grad log pi], the gradient of KL(ref || pi).
    # expm1, because exp(-l) - 1 has no digits left where policy and reference nearly agree.
    return torch.expm1(-log_ratio) + log_ratio


@ESTIMATORS.register("abs", source="verl kl_penalty 'abs'", claims=("nonnegative",), needs="log_ratio")
def absolute(log_ratio: Tensor) -> Tensor:
    """The absolute log-ratio, ``|l|``: neither its value nor its gradient is that of a KL.

    >>> absolute(torch.tensor([-0.25]))
    tensor([0.2500])
    """
    return log_ratio.abs()


@ESTIMATORS.register(
    "k_lambda",
    source="control-variate family between k1 (lam=0) and k3 (lam=1); Schulman 2020",
    claims=("value:reverse",),
    claims_truncated=("value:shifted_reverse",),
    needs="log_ratio",
)
def k_lambda(log_ratio: Tensor, lam: float = 0.5) -> Tensor:
    """``l + lam * (exp(-l) - 1)``: unbiased value for every ``lam``; its gradient is ``lam`` x forward KL.

    Float32 overflows as in k3.

    >>> k_lambda(torch.tensor([0.3]), lam=0.0)
    tensor([0.3000])
    """
    # E[exp(-l) - 1] = 0, so any multiple of it may be added to k1 (a control variate).
    return log_ratio + lam * torch.expm1(-log_ratio)


@ESTIMATORS.register(
    "exact",
    source="2506.09477 Sec. 4; Amini et al., Rao-Blackwellized KL estimation",
    claims=("value:reverse", "pathwise:token_reverse", "nonnegative"),
    claims_truncated=("value:reverse", "pathwise:token_reverse"),
    needs="exact_reverse",
)
def exact(exact_kl: Tensor) -> Tensor:
    """``KL(pi(.|h) || ref(.|h))`` summed over the vocabulary at the prefix of the token: no sampling noise."""
    # The sum over the vocabulary is taken by the model's head, which has the distributions.
    return exact_kl


@ESTIMATORS.register(
    "exact_forward",
    source="full-vocabulary counterpart of k3 in loss (DeepSeekMath 2402.03300)",
    claims=("value:forward", "pathwise:token_forward", "nonnegative"),
    needs="exact_forward",
)
def exact_forward(exact_kl: Tensor) -> Tensor:
    """``KL(ref(.|h) || pi(.|h))`` summed over the vocabulary at the prefix of the token."""
    return exact_kl


@ESTIMATORS.register(
    "exact_jsd",
    source="GKD 2306.13649 Eq. 1; TRL 1.16 DistillationTrainer (share is its beta, without its cases 0 and 1)",
    claims=("value:mixture", "pathwise:token_mixture", "nonnegative"),
    needs="exact_mixture",
    options={"share": {"minimum": 0.01, "maximum": 0.99}},
)
def exact_jsd(divergence: Tensor, share: float = 0.5) -> Tensor:
    """Jensen-Shannon divergence ``b KL(ref || m) + (1 - b) KL(pi || m)`` at the prefix, ``m = b ref + (1 - b) pi``.

    ``b`` is ``share``, the reference's share of the mixture; summed over the vocabulary, below ``log 2`` nats whatever
    the distributions are. Its gradient is ``(1 - b) sum_v log(pi / m) dpi``: divided by ``b`` it tends to that of
    ``KL(ref || pi)`` as ``b`` goes to 0, and divided by ``1 - b`` to that of ``KL(pi || ref)`` as ``b`` goes to 1.
    """
    return divergence


def above_mixture(logp: Tensor, ref_logp: Tensor, share: float) -> Tensor:
    """``log pi - log m`` (nats) with ``m = share ref + (1 - share) pi``; zero bit by bit where both are equal."""
    # With r = log ref - log pi:  log pi - log m  =  -log(1 + share (exp(r) - 1))
    #                                              =  -r - log(1 + (1 - share) (exp(-r) - 1)).
    # Each element takes the form whose exponent is not above 0. The other may overflow, and although ``where`` drops
    # its value, its gradient would be 0 x inf: so its exponent is set to 0 first.
    log_ratio = ref_logp - logp
    ref_is_likelier = log_ratio > 0
    if_policy_is = -torch.log1p(share * torch.expm1(torch.where(ref_is_likelier, 0.0, log_ratio)))
    if_ref_is = -log_ratio - torch.log1p((1 - share) * torch.expm1(torch.where(ref_is_likelier, -log_ratio, 0.0)))
    return torch.where(ref_is_likelier, if_ref_is, if_policy_is)


def jensen_shannon(logp_V: Tensor, ref_logp_V: Tensor, share: float) -> Tensor:
    """:func:`exact_jsd` of next-token log-probs (nats), summed over the last dimension; differentiable in both."""
    # log ref - log m = (log ref - log pi) + (log pi - log m)
    from_mixture_V = above_mixture(logp_V, ref_logp_V, share)
    ref_V = ref_logp_V.exp() * (ref_logp_V - logp_V + from_mixture_V)
    return (share * ref_V + (1 - share) * logp_V.exp() * from_mixture_V).sum(-1)


def certainty(logp_V: Tensor) -> Tensor:
    """``1 - H / log V`` of next-token log-probs (nats) along the last dimension: 0 if uniform, 1 if one is sure."""
    return 1 + (logp_V.exp() * logp_V).sum(-1) / math.log(logp_V.shape[-1])


TOP_K_FORMS = (
    "sampled_tail",
    "unweighted_tail",
    "naive_tail",
    "generalized",
    "bucket",
    "truncated",
    "renormalized",
)
TAIL_FLOOR = 1e-7
"""The least probability outside S in form ``bucket``: what float32 resolves beside 1."""


@ESTIMATORS.register(
    "top_k",
    source="2606.30406 Eq. 5 (generalized); NeMo-RL #3608 (tail); 2601.19897 (bucket); 2604.13016 (renormalized)",
    claims=("value:reverse", "pathwise:token_reverse", "nonnegative"),
    claims_need={
        "on_policy": {"form": ("sampled_tail", "unweighted_tail")},
        "off_policy": {"form": ("sampled_tail",)},
    },
    needs="top_k",
    options={
        "k": {"minimum": 1, "whole": True},
        "tokens": {"choices": ("policy", "reference")},
        "form": {"choices": TOP_K_FORMS},
    },
)
def top_k(inputs: TopK, k: float = 16, tokens: str = "policy", form: str = "sampled_tail") -> Tensor:
    """``sum_S g_v + 1[y not in S] g_y / mu_y``, ``g = p l - p + q``: k tokens exactly, the rest by the sampled token y.

    S holds the ``k`` likeliest tokens of policy or reference (``tokens``); ``p``, ``q`` and ``mu`` are probabilities
    under policy, reference and sampler. Forms: ``sampled_tail`` (above: unbiased, stale samples or not),
    ``unweighted_tail`` (divided by the policy's own p, so biased on stale samples), ``generalized`` (no tail),
    ``bucket`` (``sum_S p l`` plus ``(1 - P) log((1 - P) / (1 - Q))``, masses outside S below 1e-7 counted as 1e-7),
    ``renormalized`` (``KL(p_S || q_S)``), and the naive ones: ``truncated`` (``sum_S p l``), ``naive_tail`` (that plus
    ``1[y not in S] l_y``).

    Proof for ``sampled_tail``: at a prefix ``E_mu[1[y not in S] g_y / mu_y]`` is the sum of ``g_v`` over v outside S,
    for any S and any mu that does not depend on the parameters and reaches every such v. With ``sum_S g_v`` that is the
    sum of ``p l - p + q`` over the vocabulary, the KL, as a function of the parameters: the mean of the value is the KL
    and the mean of the gradient, ``sum_S l dp + 1[y not in S] l_y dp_y / mu_y``, is its gradient. No ``g`` is below 0.
    """
    # ``k`` and ``tokens`` are read by the caller, which chooses S.
    logp_BTK, ref_logp_BTK, inside_BT = inputs.top
    if form == "renormalized":
        logp_BTK = logp_BTK.log_softmax(-1)
        ref_logp_BTK = ref_logp_BTK.log_softmax(-1)
    if form in ("sampled_tail", "unweighted_tail", "generalized"):
        # sum_S p l - p + q: without the last two, the sum over a part of the vocabulary may be negative.
        head_BT = _generalized(logp_BTK, ref_logp_BTK).sum(-1)
    else:
        # sum_S p l
        head_BT = (logp_BTK.exp() * (logp_BTK - ref_logp_BTK)).sum(-1)

    if form == "bucket":
        return head_BT + _kl_of_the_rest(logp_BTK, ref_logp_BTK)
    if form == "naive_tail":
        return head_BT + torch.where(inside_BT, 0.0, inputs.logp_BT - inputs.ref_logp_BT)
    if form == "sampled_tail":
        return head_BT + _sampled_tail(inputs, inputs.behaviour_logp_BT)
    if form == "unweighted_tail":
        return head_BT + _sampled_tail(inputs, inputs.logp_BT.detach())
    return head_BT


def _kl_of_the_rest(logp_BTK: Tensor, ref_logp_BTK: Tensor) -> Tensor:
    """``(1 - P) log((1 - P) / (1 - Q))`` (nats): all tokens outside S as one, ``[B, T]``."""
    rest_p_BT = _mass_outside(logp_BTK)
    rest_q_BT = _mass_outside(ref_logp_BTK)
    return (rest_p_BT * (rest_p_BT / rest_q_BT).log()).to(logp_BTK.dtype)


def _mass_outside(logp_BTK: Tensor) -> Tensor:
    """The probability outside S, ``[B, T]``, in float64: it may be a small difference of numbers near 1."""
    return (1.0 - logp_BTK.double().exp().sum(-1)).clamp(min=TAIL_FLOOR)


def _sampled_tail(inputs: TopK, drawn_logp_BT: Tensor) -> Tensor:
    """``1[y not in S] g_y / mu_y`` of the sampled token y (nats), ``[B, T]``, with ``log mu_y = drawn_logp_BT``.

    ``g_y = p l - p + q`` is of first degree in ``p`` and ``q``, so dividing both by ``mu_y`` divides it.
    """

    def log_ratio_to_drawn(logp_BT: Tensor) -> Tensor:
        # Masked before the exponential: a ratio that overflows inside S would make the gradient 0 x inf.
        return torch.where(inputs.top.inside_BT, 0.0, logp_BT - drawn_logp_BT)

    # Inside S both logarithms are 0, and _generalized(0, 0) = 0.
    return _generalized(log_ratio_to_drawn(inputs.logp_BT), log_ratio_to_drawn(inputs.ref_logp_BT))


def _generalized(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """``p l - p + q`` of logarithms of any common scale: at least 0, with the derivative ``l`` by p."""
    log_ratio = logp - ref_logp
    policy_is_likelier = log_ratio > 0
    # q - p = p (exp(-l) - 1) = -q (exp(l) - 1). By the larger of the two, which neither overflows nor cancels. The
    # exponent that is not used is set to 0, or its gradient would be 0 x inf.
    by_p = logp.exp() * torch.expm1(-torch.where(policy_is_likelier, log_ratio, 0.0))
    by_q = ref_logp.exp() * torch.expm1(torch.where(policy_is_likelier, 0.0, log_ratio))
    difference = torch.where(policy_is_likelier, by_p, -by_q)
    return logp.exp() * log_ratio + difference
