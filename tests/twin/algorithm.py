"""Advantages, policy losses and their corrections, by completion and token, from the equations of docs/algorithms.md.

``returns[b][t]`` is what the score of token t earns; it exists up to the longest completion of the update, past the end
of shorter ones too. ``A`` advantage, ``rho`` ratio of the current policy to an older one.
"""

import math

import torch
from tests.twin.kl_terms import number

EPSILON = 1e-6


def mean(numbers):
    return sum(numbers) / len(numbers)


# --- advantages: (returns, columns, groups) -> advantages; `columns` has those of the policy's own tokens -------------


def members(groups, b):
    return [j for j in range(len(groups)) if groups[j] == groups[b]]


def each(returns, change):
    """``change(b, t)`` at every place."""
    return [[change(b, t) for t in range(len(row))] for b, row in enumerate(returns)]


def no_advantage(returns, columns, groups):
    return returns


def batch_mean(returns, columns, groups):
    return each(returns, lambda b, t: returns[b][t] - mean([row[t] for row in returns]))


def rloo(returns, columns, groups):
    def change(b, t):
        others = [returns[j][t] for j in members(groups, b) if j != b]
        return returns[b][t] - mean(others)

    return each(returns, change)


def dr_grpo(returns, columns, groups):
    return each(returns, lambda b, t: returns[b][t] - mean([returns[j][t] for j in members(groups, b)]))


def grpo(returns, columns, groups):
    def change(b, t):
        group = [returns[j][t] for j in members(groups, b)]
        centre = mean(group)
        variance = sum((value - centre) ** 2 for value in group) / (len(group) - 1)
        return (returns[b][t] - centre) / (math.sqrt(variance) + EPSILON)

    return each(returns, change)


def whiten(values, columns):
    """Less the mean, over the standard deviation, of all tokens that the policy drew."""
    inside = [values[b][t] for b, own in enumerate(columns) for t in own]
    centre = mean(inside)
    deviation = math.sqrt(mean([(value - centre) ** 2 for value in inside]))
    return each(values, lambda b, t: (values[b][t] - centre) / (deviation + EPSILON))


def reinforce_pp(returns, columns, groups):
    return whiten(returns, columns)


def reinforce_pp_baseline(returns, columns, groups):
    return whiten(dr_grpo(returns, columns, groups), columns)


def gae(returns, columns, values, last_values, turns, *, gamma, lam):
    """``A_t = sum_u (gamma lam)^n delta_u`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, over the policy's own tokens.

    ``r_t`` is what the return loses from t to t + 1; at the last token it is the whole return. n counts the tokens from
    t to u; with ``turns``, the number of each token's turn, the ends of turns between them, and gamma is 1 within one.
    """
    advantages = []
    for b, own in enumerate(columns):
        earned = [returns[b][column] for column in own]
        last = len(own) - 1
        ends = [turns is None or t == last or turns[b][t + 1] != turns[b][t] for t in range(len(own))]
        deltas = []
        for t in range(len(own)):
            reward = earned[t] if t == last else earned[t] - earned[t + 1]
            following = last_values[b] if t == last else values[b][t + 1]
            deltas.append(reward + (gamma if ends[t] else 1.0) * following - values[b][t])
        row = []
        for t in range(len(own)):
            row.append(sum((gamma * lam) ** sum(ends[t:u]) * deltas[u] for u in range(t, len(own))))
        advantages.append(row)
    return advantages


ADVANTAGES = {
    "none": no_advantage,
    "batch_mean": batch_mean,
    "rloo": rloo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": None,
}
"""``gae`` has a signature of its own: it needs values."""


def sequence_weights(reduction, lengths, kept, constant):
    """The share of each completion in the loss."""
    sequences = max(sum(kept), 1)
    tokens = max(sum(length for length, is_kept in zip(lengths, kept, strict=True) if is_kept), 1)
    weights = []
    for length, is_kept in zip(lengths, kept, strict=True):
        if not is_kept:
            weights.append(0.0)
        elif reduction == "token_mean":
            weights.append(1 / tokens)
        elif reduction == "sequence_mean_token_mean":
            weights.append(1 / (sequences * length))
        else:
            weights.append(1 / (sequences * constant))
    return weights


# --- policy losses of one completion: (log pi, log old, A) -> loss per token ------------------------------------------


def between(value, low, high):
    return min(max(value, low), high)


def clipped_gain(ratio, advantage, low, high):
    """``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)``; the clipped side is constant."""
    bounded = between(number(ratio), 1 - low, 1 + high)
    if number(ratio) * advantage <= bounded * advantage:
        return -ratio * advantage
    return -torch.tensor(bounded * advantage, dtype=torch.float64)


def reinforce(logp, old, advantage):
    return [-a * log for log, a in zip(logp, advantage, strict=True)]


def ppo_clip(logp, old, advantage, clip_low=0.2, clip_high=0.2):
    losses = []
    for log, old_log, a in zip(logp, old, advantage, strict=True):
        losses.append(clipped_gain(torch.exp(log - old_log), a, clip_low, clip_high))
    return losses


def gspo(logp, old, advantage, clip_low=3e-4, clip_high=4e-4):
    mean_log_ratio = mean([number(log) - old_log for log, old_log in zip(logp, old, strict=True)])
    losses = []
    for log, a in zip(logp, advantage, strict=True):
        ratio = math.exp(mean_log_ratio) * torch.exp(log - log.detach())
        losses.append(clipped_gain(ratio, a, clip_low, clip_high))
    return losses


def cispo(logp, old, advantage, clip_low=1.0, clip_high=4.0):
    losses = []
    for log, old_log, a in zip(logp, old, advantage, strict=True):
        losses.append(-between(math.exp(number(log) - old_log), 1 - clip_low, 1 + clip_high) * a * log)
    return losses


def aipo(logp, old, advantage, cap=4.0):
    losses = []
    for log, old_log, a in zip(logp, old, advantage, strict=True):
        losses.append(-min(math.exp(number(log) - old_log), cap) * a * log)
    return losses


POLICY_LOSSES = {"reinforce": reinforce, "ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "aipo": aipo}


# --- corrections of one completion: (log anchor, log mu, A) -> weight per token ---------------------------------------


def omega(anchor, mu):
    return math.exp(sum(a - m for a, m in zip(anchor, mu, strict=True)))


def geometric(anchor, mu):
    return omega(anchor, mu) ** (1 / len(mu))


def for_each_token(weight):
    """A correction whose weight is a function of the token's own ratio."""

    def correction(anchor, mu, advantage, **options):
        return [weight(math.exp(a - m), **options) for a, m in zip(anchor, mu, strict=True)]

    return correction


def for_the_completion(ratio_of, weight):
    """A correction with one weight, a function of the completion's ratio, at every token."""

    def correction(anchor, mu, advantage, **options):
        return [weight(ratio_of(anchor, mu), **options)] * len(mu)

    return correction


def unbounded(ratio):
    return ratio


def truncated(ratio, cap=2.0):
    return min(ratio, cap)


def icepop(ratio, low=0.5, high=5.0):
    return ratio if low <= ratio <= high else 0.0


def masked(ratio, low=0.0, high=2.0):
    return ratio if low <= ratio <= high else 0.0


def kept_inside(ratio, low=0.99, high=1.01):
    return 1.0 if low <= ratio <= high else 0.0


def opsm(anchor, mu, advantage, threshold=0.5):
    drift = mean([m - a for a, m in zip(anchor, mu, strict=True)])
    dropped = mean(advantage) < 0 and drift > threshold
    return [0.0 if dropped else 1.0] * len(mu)


def dropped_where(is_far, anchor, mu, advantage):
    """0 where ``A (pi - mu) > 0`` and ``is_far(t)``."""
    weights = []
    for t in range(len(mu)):
        moves_away = advantage[t] * (math.exp(anchor[t]) - math.exp(mu[t])) > 0
        weights.append(0.0 if moves_away and is_far(t) else 1.0)
    return weights


def total_variation(anchor, mu, t):
    return abs(math.exp(anchor[t]) - math.exp(mu[t]))


def dppo_tv(anchor, mu, advantage, threshold=0.15):
    return dropped_where(lambda t: total_variation(anchor, mu, t) > threshold, anchor, mu, advantage)


def binary_kl(anchor_log, mu_log):
    """``KL(mu || pi)`` of the outcomes "this token" and "any other"."""
    pi = math.exp(anchor_log)
    mu = math.exp(mu_log)
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def dppo_kl(anchor, mu, advantage, threshold=0.05):
    return dropped_where(lambda t: binary_kl(anchor[t], mu[t]) > threshold, anchor, mu, advantage)


def cppo(anchor, mu, advantage, threshold=0.15, budget=0.015, floor=0.8):
    length = len(mu)

    def weight(t):
        return 1 - (1 - floor) * t / (length - 1) if length > 1 else 1.0

    def is_far(t):
        saved = sum(weight(u) * (budget - total_variation(anchor, mu, u)) for u in range(t))
        return weight(t) * total_variation(anchor, mu, t) > min(threshold, threshold + saved)

    return dropped_where(is_far, anchor, mu, advantage)


def k3_of_sampler(anchor, mu, t):
    ratio = math.exp(anchor[t] - mu[t])
    return ratio - 1 - math.log(ratio)


def trm(anchor, mu, advantage, threshold=0.05):
    dropped = any(k3_of_sampler(anchor, mu, t) > threshold for t in range(len(mu)))
    return [0.0 if dropped else 1.0] * len(mu)


def prefix_budget(anchor, mu, advantage, budget=1.0):
    weights = []
    for t in range(len(mu)):
        spent = sum(k3_of_sampler(anchor, mu, u) for u in range(t))
        weights.append(0.0 if spent > budget else 1.0)
    return weights


POLICY_CORRECTIONS = {
    "none": for_each_token(lambda ratio: 1.0),
    "token": for_each_token(unbounded),
    "tis": for_each_token(truncated),
    "icepop": for_each_token(icepop),
    "sequence": for_the_completion(omega, unbounded),
    "sequence_tis": for_the_completion(omega, truncated),
    "sequence_mis": for_the_completion(omega, masked),
    "geometric_tis": for_the_completion(geometric, truncated),
    "geometric_mask": for_the_completion(geometric, kept_inside),
    "opsm": opsm,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "cppo": cppo,
    "trm": trm,
    "prefix_budget": prefix_budget,
}


# --- pairs ------------------------------------------------------------------------------------------------------------


def dpo_coefficients(log_ratios, rewards, groups, usable, beta):
    """The weight of each completion's score in DPO: the mean over prompts of the mean over their pairs."""
    prompts = []
    for group in sorted(set(groups)):
        pairs = []
        for i, group_i in enumerate(groups):
            for j, group_j in enumerate(groups):
                both = group_i == group and group_j == group and usable[i] and usable[j]
                if both and rewards[i] > rewards[j]:
                    pairs.append((i, j))
        if pairs:
            prompts.append(pairs)
    coefficients = [0.0] * len(groups)
    for pairs in prompts:
        for i, j in pairs:
            margin = beta * (log_ratios[i] - log_ratios[j])
            pull = beta / (1 + math.exp(margin)) / len(pairs) / len(prompts)
            coefficients[i] += pull
            coefficients[j] -= pull
    return coefficients
