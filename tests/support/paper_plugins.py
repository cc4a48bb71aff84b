# ruff: noqa: E741
"""Plugins as people would write them from papers and trainers: honest ones, and false ones.

Each is a registered part as in a plugin file: a function and what it declares. ``HONEST``: every sentence it declares
is true, in float64 and float32, with every option it allows. ``FALSE``: at least one is not.

``l`` is ``log pi - log ref`` (nats) of the sampled token and ``r = exp(-l) = ref / pi``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Plugin:
    fn: Callable[..., Any]
    source: str
    facts: dict[str, Any]
    kind: str = "estimator"
    claims: tuple[str, ...] = field(default=())


def estimator(fn, source, *claims, needs="log_ratio", **facts):
    return Plugin(fn=fn, source=source, claims=claims, facts={"needs": needs, **facts})


def correction(fn, source, scope, *, detached=False, **facts):
    facts = {"scope": scope, "weights": "cost", "detached": detached, **facts}
    return Plugin(fn=fn, source=source, facts=facts, kind="correction")


TOP_K = {"k": {"minimum": 1, "whole": True}, "tokens": {"choices": ("policy", "reference")}}
REVERSE = "value:reverse"
FORWARD = "value:forward"
ZERO = "pathwise:zero"
TOKEN_REVERSE = "pathwise:token_reverse"
TOKEN_FORWARD = "pathwise:token_forward"


# --- honest: sampled ------------------------------------------------------------------------------------------------
def k3_bounded(l, bound=5.0):
    d = torch.clamp(-l, -bound, bound)
    return torch.expm1(d) - d


def k3_in_grpos_words(l):
    return torch.exp(-l) - (-l) - 1


def rapo(l):
    return -l * torch.exp(-l) - torch.expm1(-l)


def huber(l, delta=1.0):
    return functional.huber_loss(l, torch.zeros_like(l), delta=delta, reduction="none")


def control_variate(l, lam=1.0):
    return l + lam * (torch.exp(-l) - 1)


def k3_plus(l):
    value = torch.expm1(-l) + l
    carrier = 0.5 * l.square()
    return value.detach() + carrier - carrier.detach()


def alpha_divergence(l, alpha=0.5):
    return (torch.expm1(-alpha * l) - alpha * torch.expm1(-l)) / (alpha * (alpha - 1))


def half_chi_square(l):
    return 0.5 * torch.expm1(-l).square()


def sampled_jensen_shannon(l):
    r = torch.exp(-l)
    return 0.5 * (-l * r - (1 + r) * (functional.softplus(-l) - math.log(2)))


def squared_hellinger(l):
    return 2 * torch.expm1(-0.5 * l).square()


def shifted_square(l, shift=-1.0):
    return 0.5 * (l - shift).square()


def tempered(l, temperature=0.5):
    return torch.expm1(-temperature * l) / temperature + l


def smooth_absolute(l, eps=0.1):
    return torch.sqrt(l.square() + eps**2) - eps


def log_cosh(l):
    return functional.softplus(2 * l) - l - math.log(2)


def coefficient_of_k2(l):
    return l.detach() * l


def coefficient_of_k3(l):
    return -torch.expm1(-l.detach()) * l


def linear_beyond(l, start=10.0):
    inside = torch.clamp(l, min=-start)
    beyond = torch.clamp(-l - start, min=0.0)
    return torch.expm1(-inside) + inside + beyond * math.expm1(start)


def one_of_three(l, form="k3"):
    if form == "k1":
        return 1.0 * l
    if form == "k2":
        return 0.5 * l.square()
    return torch.expm1(-l) + l


def through_the_ratio(l):
    """The ratio first, as where the trainer has probabilities, and its logarithm from it."""
    r = torch.exp(-l)
    return r - 1 - torch.log(r)


# --- honest: exact and top-k ----------------------------------------------------------------------------------------
def exact_scaled(kl, scale=1.0):
    return scale * kl


def exact_square_root(kl):
    return torch.sqrt(2 * kl + 1e-12)


def top_k_with_weighted_tail(at, k=8, tokens="policy"):
    """The head exactly, and the sampled token outside it by its ratio, both differentiated."""
    logp, ref_logp, inside = at.top
    head = (logp.exp() * (logp - ref_logp)).sum(-1)
    log_weight = torch.where(inside, 0.0, at.logp_BT - at.behaviour_logp_BT)
    return head + torch.where(inside, 0.0, log_weight.exp() * (at.logp_BT - at.ref_logp_BT))


def top_k_forward(at, k=8, tokens="reference"):
    logp, ref_logp, inside = at.top
    head = (ref_logp.exp() * (ref_logp - logp)).sum(-1)
    log_weight = torch.where(inside, 0.0, at.ref_logp_BT - at.behaviour_logp_BT)
    return head + torch.where(inside, 0.0, log_weight.exp() * (at.ref_logp_BT - at.logp_BT))


def top_k_bucket(at, k=8, tokens="policy"):
    logp, ref_logp, _ = at.top
    rest = (1 - logp.double().exp().sum(-1)).clamp(min=1e-7)
    ref_rest = (1 - ref_logp.double().exp().sum(-1)).clamp(min=1e-7)
    head = (logp.exp() * (logp - ref_logp)).sum(-1)
    return head + (rest * (rest / ref_rest).log()).to(head.dtype) + 2e-7


# --- honest: corrections --------------------------------------------------------------------------------------------
def running_product(delta):
    return delta.cumsum(-1).exp()


def whole_sequence(delta):
    return delta.detach().sum(-1, keepdim=True).exp().expand_as(delta)


HONEST = {
    "k3, bounded": estimator(k3_bounded, "verl issue 751", "nonnegative", options={"bound": {"above": 0}}),
    "k3 of GRPO": estimator(k3_in_grpos_words, "2402.03300 Eq. 4", REVERSE, TOKEN_FORWARD, "nonnegative"),
    "RAPO": estimator(rapo, "2510.03865", FORWARD, "nonnegative"),
    "Huber": estimator(huber, "a bounded slope", "nonnegative", options={"delta": {"above": 0}}),
    "control variate": estimator(control_variate, "Schulman 2020", REVERSE),
    "k3+": estimator(k3_plus, "verl k3+", TOKEN_REVERSE, "nonnegative"),
    "alpha": estimator(
        alpha_divergence, "2509.07430", "nonnegative", options={"alpha": {"minimum": 0.05, "maximum": 0.95}}
    ),
    "chi-square": estimator(half_chi_square, "2509.07430", "nonnegative"),
    "Jensen-Shannon": estimator(sampled_jensen_shannon, "2512.05962", "nonnegative"),
    "Hellinger": estimator(squared_hellinger, "2602.05946", "nonnegative"),
    "shifted square": estimator(shifted_square, "four estimators, 2026-02-01", TOKEN_REVERSE, "nonnegative"),
    "tempered": estimator(
        tempered, "a discount of the exponent", "nonnegative", options={"temperature": {"above": 0, "maximum": 1}}
    ),
    "smooth absolute": estimator(smooth_absolute, "verl abs", "nonnegative", options={"eps": {"above": 0}}),
    "log-cosh": estimator(log_cosh, "a bounded slope", "nonnegative"),
    "coefficient of k2": estimator(coefficient_of_k2, "2510.01555", TOKEN_REVERSE, "nonnegative"),
    "coefficient of k3": estimator(coefficient_of_k3, "2510.01555", TOKEN_FORWARD, "nonnegative"),
    "linear beyond": estimator(
        linear_beyond, "a bounded slope", "nonnegative", options={"start": {"above": 0, "maximum": 40}}
    ),
    "one of three": estimator(
        one_of_three,
        "verl kl_penalty",
        REVERSE,
        options={"form": {"choices": ("k1", "k2", "k3")}},
        claims_need={"on_policy": {"form": ("k1", "k3")}, "off_policy": {"form": ("k1", "k3")}},
    ),
    "through the ratio": estimator(through_the_ratio, "2402.03300 code", REVERSE, TOKEN_FORWARD, "nonnegative"),
    "exact, scaled": estimator(
        exact_scaled, "2506.09477", "nonnegative", needs="exact_reverse", options={"scale": {"minimum": 0}}
    ),
    "exact, square root": estimator(exact_square_root, "Pinsker", "nonnegative", needs="exact_reverse"),
    "top-k, weighted tail": estimator(
        top_k_with_weighted_tail, "2602.04417", REVERSE, TOKEN_REVERSE, needs="top_k", options=TOP_K
    ),
    "top-k, forward": estimator(top_k_forward, "2602.04417", FORWARD, TOKEN_FORWARD, needs="top_k", options=TOP_K),
    "top-k, bucket": estimator(top_k_bucket, "2601.19897", "nonnegative", needs="top_k", options=TOP_K),
    "running product": correction(running_product, "per-decision weights", "prefix"),
    "whole sequence": correction(whole_sequence, "sequence weights", "sequence", detached=True),
}


# --- false: sampled -------------------------------------------------------------------------------------------------
def wrong_sign(l):
    return -l


def square_without_half(l):
    return l.square()


def arguments_swapped(l):
    return torch.expm1(l) - l


def right_at_its_default(l, power=2.0):
    return 0.5 * l.abs().pow(power)


def taylor_of_k3(l):
    return l.square() / 2 - l.pow(3) / 6 + l.pow(4) / 24


def ratio_detached(l):
    return torch.expm1(-l).detach() + l


def whitened(l):
    value = torch.expm1(-l) + l
    return value / value.mean().detach().clamp(min=1e-8)


def centred(l):
    return l - l.mean(-1, keepdim=True)


def overflow_replaced(l):
    return torch.nan_to_num(torch.expm1(-l) + l, posinf=0.0)


def squared_on_the_way(l):
    return torch.exp(-2 * l).sqrt() - 1 + l


def minus_infinity(l):
    """In float32 the overflow is turned round, a reward without end."""
    value = torch.expm1(-l) + l
    return torch.where(torch.isinf(value), -value, value)


def a_little_chi_square(l):
    return torch.expm1(-l) + l + 1e-3 * torch.expm1(-l).square()


def clamped_as_in_verl(l):
    return torch.clamp(torch.expm1(-torch.clamp(l, -20, 20)) + torch.clamp(l, -20, 20), -10, 10)


def forward_in_name(l):
    return torch.expm1(-l) + l


def noisy(l):
    return l + 1e-3 * torch.randn_like(l)


CALLS = {"warms up": 0}


def warms_up(l):
    """The first three hundred calls are k3; then half of it."""
    CALLS["warms up"] += 1
    k3 = torch.expm1(-l) + l
    if CALLS["warms up"] % 400 < 300:
        return 1.0 * k3
    return 0.5 * k3


MEAN = {"value": 0.0}


def running_mean(l):
    MEAN["value"] = 0.99 * MEAN["value"] + 0.01 * float(l.detach().mean())
    return l - MEAN["value"]


def clamps_in_place(l):
    l.data.clamp_(-10, 10)
    return torch.expm1(-l) + l


def rounded_in_bfloat16(l):
    return l + (l.detach().bfloat16().to(l.dtype) - l.detach()) * (l.dtype == torch.float32)


def both_options(l, a=1.0, b=1.0):
    return torch.expm1(-l) + l + (a - 1) * (b - 1) * l.square()


def control_variate_at_two(l, lam=1.0):
    return l + lam * torch.expm1(-l)


def promises_nothing(l, form="k2"):
    return 0.5 * l.square()


def dead_beyond(l):
    return torch.where(l.abs() > 50, 0.0 * l, 0.5 * l.square())


# --- false: exact, top-k, corrections -------------------------------------------------------------------------------
def half_exact(kl):
    return 0.5 * kl


def exact_without_gradient(kl):
    return kl.detach()


def tail_by_the_policy(at, k=8, tokens="policy"):
    """Right on-policy: the ratio to the sampler is missing."""
    logp, ref_logp, inside = at.top
    head = (logp.exp() * (logp - ref_logp)).sum(-1)
    log_ratio = at.logp_BT - at.ref_logp_BT
    tail = log_ratio.detach() + (1 + log_ratio.detach()) * (at.logp_BT - at.logp_BT.detach())
    return head + torch.where(inside, 0.0, tail)


def ema_pg_as_released(at, k=8, tokens="policy"):
    """The head differentiated whole, the tail by its log-ratio only."""
    logp, ref_logp, inside = at.top
    head = (logp.exp() * (logp - ref_logp)).sum(-1)
    log_ratio = at.logp_BT - at.ref_logp_BT
    weight = torch.where(inside, 0.0, at.logp_BT - at.behaviour_logp_BT).exp().detach()
    tail = weight * (log_ratio.detach() * (1 + at.logp_BT - at.logp_BT.detach()))
    return head + torch.where(inside, 0.0, tail)


def bucket_swapped(at, k=8, tokens="policy"):
    logp, ref_logp, _ = at.top
    rest = (1 - logp.exp().sum(-1)).clamp(min=1e-7)
    ref_rest = (1 - ref_logp.exp().sum(-1)).clamp(min=1e-7)
    return (logp.exp() * (logp - ref_logp)).sum(-1) + rest * (ref_rest / rest).log()


def truncated_for_few(at, k=16, tokens="policy"):
    """Exact beyond the top tokens from k = 8 on; below, the tail is left out."""
    if k >= 8:
        return top_k_with_weighted_tail(at, k, tokens)
    logp, ref_logp, _ = at.top
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def top_k_in_place(at, k=8, tokens="policy"):
    with torch.no_grad():
        at.ref_logp_BT.clamp_(min=-10)
    return top_k_with_weighted_tail(at, k, tokens)


def top_k_normalized(at, k=8, tokens="policy"):
    value = top_k_with_weighted_tail(at, k, tokens)
    return value - value.mean().detach() + value.detach().mean() * (value.shape[0] > 8)


def first_order_ratio(delta):
    return 1 + delta


def geometric_mean(delta):
    return delta.mean(-1, keepdim=True).exp().expand_as(delta)


def prefix_of_sixteen(delta):
    total = delta.cumsum(-1)
    return (total - functional.pad(total, (16, 0))[..., : total.shape[-1]]).exp()


def self_normalized(delta):
    ratio = delta.sum(-1, keepdim=True).exp()
    return (ratio / ratio.mean(0, keepdim=True)).expand_as(delta)


FALSE = {
    "wrong sign": estimator(wrong_sign, "SkyRL", REVERSE),
    "square without half": estimator(square_without_half, "libraries' k2", TOKEN_REVERSE),
    "arguments swapped": estimator(arguments_swapped, "RLinf 0.3.0", REVERSE, "nonnegative"),
    "swapped, forward": estimator(arguments_swapped, "RLinf 0.3.0", TOKEN_FORWARD),
    "right at its default": estimator(
        right_at_its_default, "k2 with a power", TOKEN_REVERSE, options={"power": {"minimum": 1, "maximum": 4}}
    ),
    "Taylor": estimator(taylor_of_k3, "2510.01555 Thm 5.1", TOKEN_FORWARD, "nonnegative"),
    "ratio detached": estimator(ratio_detached, "2402.03300", REVERSE, TOKEN_FORWARD),
    "whitened": estimator(whitened, "REINFORCE++", "nonnegative"),
    "centred": estimator(centred, "REINFORCE++", REVERSE),
    "overflow replaced": estimator(overflow_replaced, "torchforge 664", "nonnegative"),
    "squared on the way": estimator(squared_on_the_way, "a shortcut", REVERSE),
    "minus infinity": estimator(minus_infinity, "an overflow", "nonnegative"),
    "a little chi-square": estimator(a_little_chi_square, "RLinf", REVERSE),
    "clamped": estimator(clamped_as_in_verl, "verl low_var_kl", REVERSE, TOKEN_FORWARD, "nonnegative"),
    "forward in name": estimator(forward_in_name, "2510.03865", FORWARD),
    "noisy": estimator(noisy, "exploration", REVERSE),
    "warms up": estimator(warms_up, "a schedule inside", REVERSE, TOKEN_FORWARD),
    "running mean": estimator(running_mean, "a baseline inside", REVERSE),
    "clamps in place": estimator(clamps_in_place, "verl", "nonnegative"),
    "rounded": estimator(rounded_in_bfloat16, "mixed precision", REVERSE),
    "both options": estimator(both_options, "two coefficients", REVERSE),
    "at two": estimator(
        control_variate_at_two, "Schulman 2020", REVERSE, "nonnegative", options={"lam": {"minimum": 0, "maximum": 1}}
    ),
    "promises nothing": estimator(
        promises_nothing,
        "a loophole",
        REVERSE,
        options={"form": {"choices": ("k2",)}},
        claims_need={regime: {"form": ("k3",)} for regime in ("on_policy", "off_policy")},
    ),
    "dead beyond": estimator(dead_beyond, "a mask of outliers", TOKEN_REVERSE),
    "half exact": estimator(half_exact, "kl-rb", TOKEN_REVERSE, needs="exact_reverse"),
    "exact without gradient": estimator(exact_without_gradient, "tba-prime", REVERSE, needs="exact_reverse"),
    "reverse called forward": estimator(exact_scaled, "a flag", FORWARD, needs="exact_reverse"),
    "tail by the policy": estimator(
        tail_by_the_policy, "NeMo-RL 3608", REVERSE, TOKEN_REVERSE, needs="top_k", options=TOP_K
    ),
    "EMA-PG as released": estimator(
        ema_pg_as_released, "2602.04417 code", REVERSE, TOKEN_REVERSE, needs="top_k", options=TOP_K
    ),
    "bucket swapped": estimator(bucket_swapped, "2601.19897", "nonnegative", needs="top_k", options=TOP_K),
    "truncated for few": estimator(truncated_for_few, "2606.30406", REVERSE, needs="top_k", options=TOP_K),
    "top-k in place": estimator(top_k_in_place, "a clamp", REVERSE, needs="top_k", options=TOP_K),
    "top-k normalized": estimator(top_k_normalized, "a batch's mean", REVERSE, needs="top_k", options=TOP_K),
    "first-order ratio": correction(first_order_ratio, "a Taylor series", "token"),
    "geometric mean": correction(geometric_mean, "GSPO; TRL 6586", "sequence"),
    "prefix of sixteen": correction(prefix_of_sixteen, "a window", "prefix"),
    "self-normalized": correction(self_normalized, "weighted importance sampling", "sequence", detached=False),
}
