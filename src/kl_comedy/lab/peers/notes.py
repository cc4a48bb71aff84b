"""Sentences about KL in other systems that several of them share."""

from __future__ import annotations

BOTH = "the KL enters twice, in the reward and in the loss: the two pull together, so the strengths add up"
OLD_LOG_PROBS = (
    "the cost is computed once, from the log-probs of the policy that sampled (old log-probs): after the first "
    "optimizer step on a batch, or on a stale one, it is the KL of that policy, not of the current one"
)
CLIPPED = (
    "the policy loss clips its ratio: a token beyond the clip gets no gradient from this cost either "
    "(certificates leave the clip out)"
)
FORWARD = (
    "k3 differentiated has the gradient of the forward KL of each prefix (coefficient 1 - r, r = ref/policy), "
    "though its value estimates the reverse one"
)
NOISE = (
    "k1 differentiated has the score as its gradient: on-policy zero in the mean whatever the reference is, and "
    "off-policy a push away from the sampled tokens"
)
GROUP_STD = "the cost is inside the reward that the group normalizes: beta is divided by the group's standard deviation"
GROUP_MEAN = "the group's mean includes the completion itself: in a group of n the strength is (1 - 1/n) of beta"
WHITENED = (
    "advantages are whitened over the batch, cost included: beta is divided by that standard deviation (the larger the "
    "batch, the less else changes)"
)
OWN_COST = "each token carries its own cost only, not the later ones: a per-token KL, not that of the completion"
K3_CLAMPED = (
    "k3 is clamped (log-ratio at 20, value at 10): beyond, at log-ratios below about -2.6 nats, it "
    "has no gradient, so "
    "the penalty vanishes where the policy is furthest from the reference"
)
OVERFLOWS = "nothing is clamped: exp(ref - policy) can overflow"
