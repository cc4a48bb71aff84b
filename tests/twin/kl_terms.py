"""KL terms, token by token, from their equations. Log-probs in nats.

With ``l_t = log pi - log ref`` and ``rho_t = pi / mu`` of token t of a completion y, ``mu`` the sampler:

    in loss:    ratio_t k_t, differentiated
    in reward:  sg(weight_t) sg(F_t) log pi(y_t),  F_t = sum of the costs that the credit gives to token t
    centred:    sg(F_t) (log pi(y_t) - sum_v sg(q_v) log pi(v)),  q the sampler, or what its likeliest tokens say of it

An exact divergence of a prefix depends on no token after it: its own step is differentiated and not a cost.
"""

import math
from dataclasses import dataclass, field

import torch

ZERO = torch.zeros((), dtype=torch.float64)
TAIL_FLOOR = 1e-7
CENTRING_TAIL_FLOOR = 1e-6


def number(value):
    """A tensor of one element, with or without gradient, as a number."""
    return float(value.detach())


@dataclass
class Row:
    """What a term reads of one completion, by token: log-probs of the sampled tokens, and whole distributions."""

    ids: list
    logp: list
    mu: list
    policy: list
    """The policy's log-probs over the vocabulary, differentiable, or at least these numbers."""
    references: dict = field(default_factory=dict)
    """By the reference's name: its log-probs over the vocabulary."""
    sampler: list = field(default_factory=list)
    """The sampler's log-probs over the vocabulary, where a score is centred."""
    columns: list = field(default_factory=list)
    """Where in the completion each token stands: between them are those of an environment, which a term never reads."""

    def __len__(self):
        return len(self.ids)


# --- divergences of two next-token distributions ----------------------------------------------------------------------


def kl(p_logs, q_logs):
    """``KL(p || q) = sum_v p log(p / q)``."""
    return (p_logs.exp() * (p_logs - q_logs)).sum()


def jensen_shannon(p_logs, q_logs, share):
    """``b KL(q || m) + (1 - b) KL(p || m)`` with ``m = b q + (1 - b) p``; ``b`` is the reference's share."""
    m_logs = torch.log(share * q_logs.exp() + (1 - share) * p_logs.exp())
    return share * kl(q_logs, m_logs) + (1 - share) * kl(p_logs, m_logs)


def certainty(logs):
    """``1 - H / log V``."""
    entropy = -(logs.exp() * logs).sum()
    return 1 - entropy / math.log(len(logs))


# --- estimators -------------------------------------------------------------------------------------------------------


def k1(log_ratio):
    return log_ratio


def k2(log_ratio):
    return log_ratio * log_ratio / 2


def k3(log_ratio):
    return torch.exp(-log_ratio) - 1 + log_ratio


def absolute(log_ratio):
    return log_ratio.abs()


def k_lambda(log_ratio, lam=0.5):
    return log_ratio + lam * (torch.exp(-log_ratio) - 1)


SAMPLED = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k_lambda": k_lambda}
EXACT = {
    "exact": lambda policy, reference: kl(policy, reference),
    "exact_forward": lambda policy, reference: kl(reference, policy),
    "exact_jsd": lambda policy, reference, share=0.5: jensen_shannon(policy, reference, share),
}
TOP_K = ("top_k",)


def general(p, q):
    """``p log(p / q) - p + q``: at least 0 for any two numbers, and a KL where they are summed over a vocabulary."""
    return p * torch.log(p / q) - p + q


def tail_kl(p_rest, q_rest):
    """All tokens outside of S as one, none of its masses below the floor."""
    p_rest = p_rest.clamp(min=TAIL_FLOOR)
    q_rest = q_rest.clamp(min=TAIL_FLOOR)
    return p_rest * torch.log(p_rest / q_rest)


def top_k(row, t, reference, k=16, tokens="policy", form="sampled_tail"):
    """The ``k`` likeliest tokens S of policy or reference one by one, and the others as the form says."""
    policy = row.policy[t]
    chosen = policy if tokens == "policy" else reference
    order = sorted(range(len(chosen)), key=lambda v: -number(chosen[v]))
    inside = order[: int(k)]
    p = policy.exp()
    q = reference.exp()
    y = row.ids[t]
    if form == "renormalized":
        p_all = sum((p[v] for v in inside), ZERO)
        q_all = sum((q[v] for v in inside), ZERO)
        return sum((p[v] / p_all * torch.log(p[v] / p_all / (q[v] / q_all)) for v in inside), ZERO)
    plain = sum((p[v] * torch.log(p[v] / q[v]) for v in inside), ZERO)
    generalized = sum((general(p[v], q[v]) for v in inside), ZERO)
    if form == "truncated":
        return plain
    if form == "generalized":
        return generalized
    if form == "bucket":
        p_rest = 1 - sum((p[v] for v in inside), ZERO)
        q_rest = 1 - sum((q[v] for v in inside), ZERO)
        return plain + tail_kl(p_rest, q_rest)
    if form == "naive_tail":
        return plain if y in inside else plain + torch.log(p[y] / q[y])
    if y in inside:
        return generalized
    if form == "sampled_tail":
        return generalized + general(p[y], q[y]) / math.exp(row.mu[t])
    assert form == "unweighted_tail", form
    return generalized + general(p[y], q[y]) / p[y].detach()


def clamped(value, bound):
    """Between ``-bound`` and ``bound``, without a gradient beyond them."""
    if bound is None or abs(number(value)) <= bound:
        return value
    return torch.full_like(value.detach(), math.copysign(bound, number(value)))


# --- ratios -----------------------------------------------------------------------------------------------------------


def product(ratios):
    total = ZERO + 1
    for ratio in ratios:
        total = total * ratio
    return total


def token_ratios(row):
    return [torch.exp(logp - mu) for logp, mu in zip(row.logp, row.mu, strict=True)]


def none_ratio(ratios, t, window):
    return ZERO + 1


def token_ratio(ratios, t, window):
    return ratios[t]


def token_detached_ratio(ratios, t, window):
    return ratios[t].detach()


def prefix_ratio(ratios, t, window):
    """Up to and including t, of the last ``window`` tokens."""
    first = 0 if window is None else max(0, t + 1 - window)
    return product(ratios[first : t + 1])


def prefix_previous_ratio(ratios, t, window):
    """Before t, of the last ``window`` of these tokens."""
    first = 0 if window is None else max(0, t - window)
    return product(ratios[first:t])


def sequence_ratio(ratios, t, window):
    return product(ratios)


CORRECTIONS = {
    "none": none_ratio,
    "token": token_ratio,
    "token_detached": token_detached_ratio,
    "prefix": prefix_ratio,
    "prefix_previous": prefix_previous_ratio,
    "sequence": sequence_ratio,
}
PER_DECISION = ("prefix", "prefix_previous")
"""Corrections that weight each cost at its own token; the others weight the score."""
OF_ONE_TOKEN = ("token", "token_detached")


def bounded_ratio(term, name, row, t):
    """The ratio of the correction ``name`` at token t with the term's bound."""
    ratios = token_ratios(row)
    if term.cap is not None and term.cap_mode == "each":
        ratios = [ratio if number(ratio) <= term.cap else ZERO + term.cap for ratio in ratios]
    ratio = CORRECTIONS[name](ratios, t, term.window)
    if term.cap is None or number(ratio) <= term.cap:
        return ratio
    if term.cap_mode == "truncate":
        return ZERO + term.cap
    if term.cap_mode == "mask":
        return ZERO
    return ratio


# --- a term's estimate per token --------------------------------------------------------------------------------------


def reference_logp(term, row, t):
    if term.reference == "sampler":
        return row.mu[t]
    return row.references[term.reference][t][row.ids[t]]


def log_ratio(term, row, t):
    at = row.mu[t] if term.anchor == "behaviour" else row.logp[t]
    return ZERO + at - reference_logp(term, row, t)


def sampled_estimate(term, ratio):
    """The estimator at a log-ratio between the term's clamps, with the gradient that the term asks for."""
    value = SAMPLED[term.estimator](clamped(ratio, term.input_clamp), **term.options)
    value = clamped(value, term.output_clamp)
    if term.gradient == "k2":
        straight = k2(ratio)
        value = value.detach() + straight - straight.detach()
    return value


def token_weight(term, row, t):
    """The detached weight of a token: a certainty to a power."""
    if term.weight == "none":
        return 1.0
    logs = row.policy[t] if term.weight == "policy" else row.references[term.reference][t]
    return max(number(certainty(logs)), 0.0) ** term.weight_power


def unweighted_values(term, row):
    if term.estimator in SAMPLED:
        ratios = [log_ratio(term, row, t) for t in range(len(row))]
        if term.level == "sequence":
            value = sampled_estimate(term, sum(ratios, ZERO))
            return [value / len(row) for _ in range(len(row))]
        return [sampled_estimate(term, ratio) for ratio in ratios]
    values = []
    for t in range(len(row)):
        reference = row.references[term.reference][t]
        if term.estimator in TOP_K:
            value = top_k(row, t, reference, **term.options)
        else:
            value = EXACT[term.estimator](row.policy[t], reference, **term.options)
        values.append(clamped(value, term.output_clamp))
    return values


def values_of(term, row):
    return [token_weight(term, row, t) * value for t, value in enumerate(unweighted_values(term, row))]


# --- centred scores ---------------------------------------------------------------------------------------------------


def expected_log_prob(term, row, t):
    """``sum_v q_v log pi(v)`` with q the sampler; outside of its k likeliest tokens q is in proportion to pi.

    The engine leaves out ``r sum_v pi(v) log pi(v)``, with r the proportion, which has no gradient where pi is a
    constant weight: only the number of a loss shows it.
    """
    policy = row.policy[t]
    p = policy.detach().exp()
    q = row.sampler[t].exp()
    if term.score_centring == "exact":
        return (q * policy).sum()
    order = sorted(range(len(q)), key=lambda v: -number(q[v]))
    outside = order[term.score_centring :]
    p_rest = max(sum(number(p[v]) for v in outside), CENTRING_TAIL_FLOOR)
    q_rest = sum(number(q[v]) for v in outside)
    ratio = q_rest / p_rest
    q = q.clone()
    for v in outside:
        q[v] = ratio * p[v]
    return (q * policy).sum() - number(ratio * (p * policy).sum())


# --- in the reward ----------------------------------------------------------------------------------------------------


@dataclass
class Costs:
    """A term in the reward, of one completion, by token. All but ``pathwise`` are numbers."""

    cost: list
    """F_t, what weights the score at t."""
    weight: list
    """What F_t and the score are multiplied with."""
    baseline_weight: list
    """What a baseline is multiplied with: the ratio up to and including t."""
    pathwise: list
    """What is differentiated by itself."""
    before_it: list
    """F of a column of an environment whose next own token is this one: what is still to come, or all, or nothing."""
    after: float
    """F of a token after the end: all costs with credit total, else none."""
    columns: list


def credited(term, steps, t):
    """The costs that the credit gives to the score of token t."""
    if term.credit == "own":
        return steps[t]
    if term.credit == "total":
        return sum(steps)
    return sum(term.discount ** (u - t) * steps[u] for u in range(t, len(steps)))


def costs_of(term, row):
    values = values_of(term, row)
    ratios = [number(bounded_ratio(term, term.correction, row, t)) for t in range(len(row))]
    if term.cap_mode == "clip" and term.cap is not None:
        for t, value in enumerate(values):
            # PPO's clip of a cost: no gradient where the ratio has left the range towards less cost.
            too_low = number(value) > 0 and ratios[t] < 2 - term.cap
            too_high = number(value) < 0 and ratios[t] > term.cap
            if too_low or too_high:
                ratios[t] = 0.0
    per_decision = term.correction in PER_DECISION
    if per_decision:
        steps = [ratio * number(value) for ratio, value in zip(ratios, values, strict=True)]
        weight = [1.0] * len(row)
        baseline_weight = [number(bounded_ratio(term, "prefix", row, t)) for t in range(len(row))]
    else:
        steps = [number(value) for value in values]
        weight = ratios
        baseline_weight = ratios
    cost = [credited(term, steps, t) for t in range(len(row))]
    before_it = [0.0 if term.credit == "own" else one for one in cost]
    pathwise = [ZERO] * len(row)
    if term.estimator not in SAMPLED:
        cost = [all_costs - own for all_costs, own in zip(cost, steps, strict=True)]
        if term.correction in OF_ONE_TOKEN:
            pathwise = values
        else:
            pathwise = [ratio * value for ratio, value in zip(ratios, values, strict=True)]
    after = sum(steps) if term.credit == "total" else 0.0
    return Costs(cost, weight, baseline_weight, pathwise, before_it, after, row.columns)


def cost_at(costs, column):
    """F at a column of the completion, of whoever's token stands there."""
    for t, own in enumerate(costs.columns):
        if column == own:
            return costs.cost[t]
        if column < own:
            return costs.before_it[t]
    return costs.after


def own_baseline(all_costs, groups, b, t):
    """``sum_j W^j F^j / sum_j W^j`` over the other completions of the group with a token of their own in the column."""
    column = all_costs[b].columns[t]
    above = 0.0
    below = 0.0
    for j, costs in enumerate(all_costs):
        if j != b and groups[j] == groups[b] and column in costs.columns:
            other = costs.columns.index(column)
            above += costs.weight[other] * costs.cost[other]
            below += costs.baseline_weight[other]
    if below <= 0:
        return 0.0
    return above / below


def batch_baseline(all_costs):
    """The mean cost of the tokens of the update."""
    total = 0.0
    tokens = 0
    for costs in all_costs:
        for weight, cost in zip(costs.weight, costs.cost, strict=True):
            total += weight * cost
            tokens += 1
    return total / tokens


def surrogates(term, rows, groups):
    """The loss of a term at beta 1, by completion and token; of a cost ``before`` the baseline its pathwise part."""
    if term.placement == "loss":
        surrogate = []
        for row in rows:
            values = values_of(term, row)
            surrogate.append([bounded_ratio(term, term.correction, row, t) * values[t] for t in range(len(row))])
        return surrogate
    all_costs = [costs_of(term, row) for row in rows]
    if term.baseline == "before":
        return [costs.pathwise for costs in all_costs]
    surrogate = []
    for b, (row, costs) in enumerate(zip(rows, all_costs, strict=True)):
        tokens = []
        for t in range(len(row)):
            baseline = 0.0
            if term.baseline == "own":
                baseline = own_baseline(all_costs, groups, b, t)
            elif term.baseline == "batch":
                baseline = batch_baseline(all_costs)
            elif term.baseline == "exact":
                exact = number(kl(row.policy[t], row.references[term.reference][t]))
                baseline = token_weight(term, row, t) * exact
            credit = costs.weight[t] * costs.cost[t] - costs.baseline_weight[t] * baseline
            scored = row.logp[t]
            if term.score_centring is not None:
                scored = scored - expected_log_prob(term, row, t)
            tokens.append(credit * scored + costs.pathwise[t])
        surrogate.append(tokens)
    return surrogate
