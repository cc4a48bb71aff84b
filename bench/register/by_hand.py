"""Three rows checked without the oracle, without torch and without the released code: sums over few tokens.

Every derivative here is a central difference of a sum over all outcomes, in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

LOGITS = (0.3, -0.8, 0.5, 0.1)
"""Of the policy, one for each token."""
REF_LOGITS = (-0.4, 0.2, 0.9, -0.3)
STEP = 1e-5
"""Of a central difference: its error is about the square of the step, and rounding adds 1e-16 / STEP."""
LARGEST_ROUNDING = 1e-6
"""Relative distance of two gradients that central differences do not tell from 0."""
TOP = 2
"""Likeliest tokens of the top-k KL."""


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities."""
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def gradient(value: Callable[[Sequence[float]], float], logits: Sequence[float]) -> list[float]:
    """The derivatives of a value by each logit, by central differences."""
    slopes = []
    for number in range(len(logits)):
        up = list(logits)
        down = list(logits)
        up[number] += STEP
        down[number] -= STEP
        slopes.append((value(up) - value(down)) / (2 * STEP))
    return slopes


def distance(slopes: Sequence[float], expected: Sequence[float]) -> float:
    """The distance of two gradients, relative to the size of the expected one."""
    return math.dist(slopes, expected) / math.hypot(*expected)


def reverse_kl(logits: Sequence[float]) -> float:
    """``sum p log p/q``."""
    pairs = zip(softmax(logits), softmax(REF_LOGITS), strict=True)
    return sum(p * math.log(p / q) for p, q in pairs)


def expected_slope(estimate: Callable[[float, float], float]) -> list[float]:
    """The expectation of the gradient of an estimate by log-prob and reference log-prob: the samples are held fixed."""
    fixed = softmax(LOGITS)

    def value(logits: Sequence[float]) -> float:
        pairs = zip(fixed, softmax(logits), softmax(REF_LOGITS), strict=True)
        return sum(weight * estimate(math.log(p), math.log(q)) for weight, p, q in pairs)

    return gradient(value, LOGITS)


def swapped_arguments() -> dict[str, Any]:
    """RLinf's FSDP actor: k3 with policy and reference exchanged."""

    def half_chi_square(logits: Sequence[float]) -> float:
        pairs = zip(softmax(logits), softmax(REF_LOGITS), strict=True)
        return 0.5 * sum(p * p / q for p, q in pairs)

    def swapped_k3(logp: float, ref_logp: float) -> float:
        return math.exp(logp - ref_logp) - 1 - (logp - ref_logp)

    slopes = expected_slope(swapped_k3)
    from_chi_square = distance(slopes, gradient(half_chi_square, LOGITS))
    from_kl = distance(slopes, gradient(reverse_kl, LOGITS))
    words = f"{_percent(from_chi_square)} from half the chi-square, {_percent(from_kl)} from the reverse KL"
    return {"id": "rlinf-fsdp", "from_named": from_chi_square, "from_kl": from_kl, "says": f"4 tokens: {words}"}


def top_k() -> dict[str, Any]:
    """EMA-PG's top-k reverse KL: the head is differentiated as a whole, the tail through its score alone."""
    fixed = softmax(LOGITS)
    top = sorted(range(len(LOGITS)), key=lambda token: -fixed[token])[:TOP]
    ref = softmax(REF_LOGITS)

    def slope(with_fix: bool) -> list[float]:
        def value(logits: Sequence[float]) -> float:
            policy = softmax(logits)
            head = sum(policy[token] * math.log(policy[token] / ref[token]) for token in top)
            tail = 0.0
            for token in range(len(LOGITS)):
                if token in top:
                    continue
                cost = math.log(fixed[token] / ref[token])
                # The score's own value is 1 at the fixed policy; its derivative is that of the log-prob.
                tail += fixed[token] * cost * (policy[token] / fixed[token])
                if with_fix:
                    tail += fixed[token] * math.log(policy[token] / fixed[token])
            return head + tail

        return gradient(value, LOGITS)

    kl = gradient(reverse_kl, LOGITS)
    from_kl = distance(slope(with_fix=False), kl)
    with_fix = distance(slope(with_fix=True), kl)
    words = f"{_percent(from_kl)} from the reverse KL, {_percent(with_fix)} with the fix"
    return {"id": "ema-pg-reverse", "from_named": with_fix, "from_kl": from_kl, "says": f"4 tokens, top {TOP}: {words}"}


def masked_returns() -> dict[str, Any]:
    """miles' REINFORCE++ returns: a token, a tool's reply whose log-ratio depends on it, and a second token."""
    policy = softmax(LOGITS)
    ref = softmax(REF_LOGITS)
    reply_log_ratio = [0.8 - 0.8 * token for token in range(len(LOGITS))]

    def slope(with_mask: bool) -> list[float]:
        # The expectation of the return of each token times its score; both tokens have the same policy.
        total = [0.0] * len(LOGITS)
        for first, p_first in enumerate(policy):
            reply_cost = reply_log_ratio[first]
            if with_mask:
                reply_cost = 0.0
            first_cost = math.log(p_first / ref[first])
            for second, p_second in enumerate(policy):
                second_cost = math.log(p_second / ref[second])
                # A token's return is the sum of the costs from it on, so that the reply's reaches the first alone.
                first_return = first_cost + reply_cost + second_cost
                for logit in range(len(LOGITS)):
                    first_score = (logit == first) - policy[logit]
                    second_score = (logit == second) - policy[logit]
                    weighted = first_return * first_score + second_cost * second_score
                    total[logit] += p_first * p_second * weighted
        return total

    # Two tokens of the same policy and reference have twice the KL of one.
    kl = [2 * slope_of_logit for slope_of_logit in gradient(reverse_kl, LOGITS)]
    from_kl = distance(slope(with_mask=False), kl)
    with_mask = distance(slope(with_mask=True), kl)
    words = f"{_percent(from_kl)} from the reverse KL, {_percent(with_mask)} with the mask"
    return {
        "id": "miles-plus-plus",
        "from_named": with_mask,
        "from_kl": from_kl,
        "says": f"2 tokens and a reply: {words}",
    }


def _percent(share: float) -> str:
    if share < LARGEST_ROUNDING:
        return "0 %"
    return f"{100 * share:.3g} %"


def checks() -> list[dict[str, Any]]:
    """The three checks. Each has the row's ``id``, what it ``says``, and two relative distances of gradients.

    ``from_kl``: of the released form from the reverse KL. ``from_named``: 0 up to rounding; of the released form from
    the divergence that the row names, or of the fixed form from the reverse KL.
    """
    return [swapped_arguments(), top_k(), masked_returns()]
