"""Score centring, enumerated in float64: what it takes out of the mean gradient of a cost, and what top-k leaves in.

Everything expected here is a sum over completions, prefixes and tokens that is written out and differentiated; the
sampler ``mu`` is held fixed. ``s(v)`` is the score of token v at a prefix, ``m`` the mean of the cost to go there:

    E_mu[sum_t F_t s_t] = E_mu[sum_t F_t (s_t - E_mu[s_t])] - sum_h mu(h) m(h) grad KL(mu_h, pi_h)
"""

import dataclasses

import pytest
import torch

import brute
from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, kl_surrogate
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.estimators import TopTokens
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments, expected_gradient, target_gradient
from kl_comedy.kl.surrogate import NotFinite, expected_score
from kl_comedy.kl.term import ALL_TOKENS

COSTS = {
    "k1 to go": KLTerm("k1"),
    "k1 total": KLTerm("k1", credit="total"),
    "k3 own": KLTerm("k3", credit="own"),
    "k3 to go, faded": KLTerm("k3", discount=0.7),
    "k2 of the completion": KLTerm("k2", level="sequence"),
    "k1 frozen": KLTerm("k1", anchor="behaviour"),
    "exact to go": KLTerm("exact"),
    "exact total": KLTerm("exact", credit="total"),
}


def centred(term, score_centring="exact"):
    return dataclasses.replace(term, score_centring=score_centring)


class Enumerated:
    """The terms of an instance's gradient, by loops; ``pi`` is differentiable in ``theta_D``."""

    def __init__(self, instance):
        self.theta_D = instance.theta_D.clone().requires_grad_(True)
        self.pi = instance.policy_logp(self.theta_D)
        self.ref = instance.ref_logp_NV
        self.mu = instance.sampler_logp_NV
        self.completions = brute.completions(instance.tree)
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(instance.tree))}
        self.vocabulary = range(instance.tree.vocabulary)

    def gradient(self, value):
        return torch.autograd.grad(value, self.theta_D, retain_graph=True)[0]

    def steps(self, tokens):
        """The number of the prefix, and the token, at each place."""
        return [(self.number[tokens[:t]], token) for t, token in enumerate(tokens)]

    def drawn(self, tokens):
        return torch.stack([self.mu[n, v] for n, v in self.steps(tokens)]).sum().exp()

    def estimates(self, term, tokens):
        at = self.mu if term.anchor == "behaviour" else self.pi
        ratios = [(at[n, v] - self.ref[n, v]).detach() for n, v in self.steps(tokens)]
        if term.level == "sequence":
            total = sum(ratios)
            return [0.5 * total * total / len(tokens)] * len(tokens)
        if term.estimator == "exact":
            return [self.kl(self.pi, self.ref, n).detach() for n, _ in self.steps(tokens)]
        formula = {"k1": lambda x: x, "k3": lambda x: torch.exp(-x) - 1 + x}[term.estimator]
        return [formula(ratio) for ratio in ratios]

    def costs(self, term, tokens):
        """``F_t``: what weights the score at each place. The own step of an exact cost is differentiated instead."""
        values = self.estimates(term, tokens)
        costs = []
        for t, own in enumerate(values):
            if term.credit == "own":
                cost = own
            elif term.credit == "total":
                cost = sum(values)
            else:
                cost = sum(term.discount ** (u - t) * values[u] for u in range(t, len(values)))
            if term.estimator == "exact":
                cost = cost - own
            costs.append(cost)
        return costs

    def kl(self, a, b, n):
        return sum(a[n, v].exp() * (a[n, v] - b[n, v]) for v in self.vocabulary)

    def pathwise(self, term):
        """The differentiated steps of an exact cost, over the sampler's completions."""
        if term.estimator != "exact":
            return 0.0 * self.pi.sum()
        return sum(
            self.drawn(y) * sum((self.kl(self.pi, self.ref, n) for n, _ in self.steps(y)), 0.0 * self.pi.sum())
            for y in self.completions
        )

    def weighted_scores(self, term, score):
        """``E_mu[sum_t F_t score(n, v)]`` with ``score`` a differentiable function of prefix and token."""
        total = 0.0 * self.pi.sum()
        for y in self.completions:
            costs = self.costs(term, y)
            for cost, (n, v) in zip(costs, self.steps(y), strict=True):
                total = total + self.drawn(y) * cost * score(n, v)
        return total


def instance_of(regime, *, vocabulary=3, seed=3, parameters=6):
    tree = Tree.build(vocabulary=vocabulary, length=3 if vocabulary < 4 else 2)
    settings = InstanceSettings(regime=regime, seed=seed, parameters=parameters, staleness=0.6)
    return Instance.random(tree, settings)


def close(gradient_D, expected_D):
    return float((gradient_D - expected_D).norm()) < 1e-12 * max(1.0, float(expected_D.norm()))


# --- exact ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize("name", COSTS)
def test_exact_centring_takes_out_every_prefixs_mean_cost_times_its_repulsion(name, regime):
    term = COSTS[name]
    instance = instance_of(regime)
    slow = Enumerated(instance)

    def centred_score(n, v):
        return slow.pi[n, v] - sum(slow.mu[n, w].exp() * slow.pi[n, w] for w in slow.vocabulary)

    expected_D = slow.gradient(slow.weighted_scores(term, centred_score) + slow.pathwise(term))
    gradient_D = expected_gradient(instance, [centred(term)]).gradient_D
    assert close(gradient_D, expected_D)

    # What is gone: the mean cost at each prefix times k1 in the loss there, which is -KL(mu, pi).
    repulsion_D = slow.gradient(slow.weighted_scores(term, lambda n, v: -slow.kl(slow.mu, slow.pi, n)))
    plain_D = expected_gradient(instance, [term]).gradient_D
    assert close(plain_D - gradient_D, repulsion_D)
    assert float(repulsion_D.norm()) > 1e-3


@pytest.mark.parametrize("score_centring", ["exact", 1])
@pytest.mark.parametrize("name", COSTS)
def test_on_fresh_samples_no_completions_gradient_changes(name, score_centring):
    """Not only the mean: ``mu = pi`` makes every coefficient of the expected score zero."""
    instance = instance_of("on_policy")
    plain = expected_gradient(instance, [COSTS[name]])
    moments = expected_gradient(instance, [centred(COSTS[name], score_centring)])
    assert close(moments.gradient_D, plain.gradient_D)
    assert moments.variance == pytest.approx(plain.variance, rel=1e-12)
    assert plain.variance > 1e-3


def test_a_cost_that_depends_on_the_prefix_alone_has_no_force():
    """The score itself has mean zero; without centring it has that of the repulsion."""
    instance = instance_of("off_policy")

    def loss(is_centred):
        def of_rows(rows):
            scored_BT = rows.logp_BT
            if is_centred:
                scored_BT = scored_BT - expected_score(rows.sampler_top(ALL_TOKENS))
            return torch.where(rows.mask_BT, rows.reverse_kl_BT.detach() * scored_BT, 0.0)

        return of_rows

    assert float(exact_moments(instance, loss(True)).gradient_D.norm()) < 1e-13
    assert float(exact_moments(instance, loss(False)).gradient_D.norm()) > 1e-2


@pytest.mark.parametrize("regime", REGIMES)
def test_a_centred_term_hits_the_targets_that_it_claims_and_no_other(regime):
    instance = instance_of(regime)
    gradients = {name: target_gradient(instance, name) for name in TARGETS}
    wrong = []
    for term in all_terms(["k1", "k3", "exact"], ["none"]):
        has_score = term.placement == "reward" and not (term.estimator == "exact" and term.credit == "own")
        if not has_score:
            continue
        for score_centring in ("exact", 1):
            moments = expected_gradient(instance, [centred(term, score_centring)])
            hit = [name for name, gradient_D in gradients.items() if moments.relative_bias(gradient_D) < 1e-10]
            claimed = claimed_target(centred(term, score_centring), regime)
            if hit != ([claimed] if claimed else []):
                wrong.append(f"{centred(term, score_centring).label()}: hits {hit}, claims {claimed}")
    assert not wrong, "\n".join(wrong)


def test_a_baseline_changes_the_noise_of_a_centred_term_alone():
    instance = instance_of("off_policy")
    term = centred(KLTerm("exact"))
    plain = expected_gradient(instance, [term], group_size=2)
    with_baseline = expected_gradient(instance, [dataclasses.replace(term, baseline="own")], group_size=2)
    assert close(with_baseline.gradient_D, plain.gradient_D)
    assert with_baseline.variance != pytest.approx(plain.variance, rel=1e-3)


# --- top-k ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", ["k1 to go", "exact to go"])
def test_the_bias_of_top_k_is_what_the_tail_does_not_have_of_the_policys(name, k):
    """``sum_h mu(h) m(h) sum_{v outside H} (mu(v) - r pi(v)) s(v)``, with r the quotient of the two tails."""
    term = COSTS[name]
    instance = instance_of("off_policy", vocabulary=6)
    slow = Enumerated(instance)

    def missed(n, _):
        order = sorted(slow.vocabulary, key=lambda v: -float(slow.mu[n, v]))
        outside = order[k:]
        sampler_tail = sum(slow.mu[n, v].exp() for v in outside)
        policy_tail = sum(slow.pi[n, v].exp() for v in outside).detach()
        ratio = sampler_tail / policy_tail
        return sum((slow.mu[n, v].exp() - ratio * slow.pi[n, v].exp().detach()) * slow.pi[n, v] for v in outside)

    expected_D = slow.gradient(slow.weighted_scores(term, missed))
    exact_D = expected_gradient(instance, [centred(term)]).gradient_D
    top_k_D = expected_gradient(instance, [centred(term, k)]).gradient_D
    assert close(top_k_D - exact_D, expected_D)
    assert float(expected_D.norm()) > 1e-3


def test_top_k_is_exact_where_the_two_tails_are_in_proportion():
    instance = instance_of("off_policy", vocabulary=6)
    policy_NV = instance.policy_logp().detach()
    sampler_NV = policy_NV.clone()
    # The likeliest token becomes likelier, and all others lose the same share.
    first_N1 = policy_NV.argmax(-1, keepdim=True)
    sampler_NV.scatter_add_(1, first_N1, torch.full_like(first_N1, 1.0, dtype=torch.float64))
    sampler_NV = sampler_NV.log_softmax(-1)
    instance = dataclasses.replace(instance, sampler_logp_NV=sampler_NV, recorded_logp_NV=sampler_NV)
    exact_D = expected_gradient(instance, [centred(KLTerm("k1"))]).gradient_D
    assert close(expected_gradient(instance, [centred(KLTerm("k1"), 1)]).gradient_D, exact_D)
    assert not close(expected_gradient(instance, [KLTerm("k1")]).gradient_D, exact_D)


def listed(policy_V, sampler_V, k):
    """The sampler's k likeliest tokens, as a term reads them."""
    ids_K = sampler_V.topk(k).indices
    inside_BT = torch.zeros(1, 1, dtype=torch.bool)
    return TopTokens(policy_V[ids_K][None, None], sampler_V[ids_K][None, None], inside_BT)


def score_gradient(logits_V, sampler_V, k):
    """The gradient of the expected score in the policy's logits."""
    leaf_V = logits_V.clone().requires_grad_(True)
    expected_score(listed(leaf_V.log_softmax(-1), sampler_V, k)).sum().backward()
    return leaf_V.grad


@pytest.mark.parametrize("seed", range(5))
def test_a_list_without_one_token_is_as_good_as_the_whole_vocabulary(seed):
    """By the logits ``sum_v mu(v) s(v)`` is ``mu - pi``."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(7, generator=generator, dtype=torch.float64)
    sampler_V = (logits_V + torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(-1)
    expected_V = sampler_V.exp() - logits_V.softmax(-1)
    for k in (6, 7):
        assert torch.allclose(score_gradient(logits_V, sampler_V, k), expected_V, rtol=0, atol=1e-14)
    assert not torch.allclose(score_gradient(logits_V, sampler_V, 2), expected_V, rtol=0, atol=1e-3), "k = 2"


@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_float32_is_enough_over_a_large_vocabulary(sharpness):
    generator = torch.Generator().manual_seed(1)
    logits_V = sharpness * torch.randn(50_000, generator=generator)
    sampler_V = (logits_V + torch.randn(50_000, generator=generator)).log_softmax(-1)
    expected_V = sampler_V.double().exp() - logits_V.double().softmax(-1)
    gradient_V = score_gradient(logits_V, sampler_V, 50_000)
    assert gradient_V.dtype == torch.float32
    assert float((gradient_V - expected_V).norm()) < 1e-4 * float(expected_V.norm())


def test_tokens_that_are_never_drawn_have_no_gradient():
    """A padded vocabulary has log-probs of -inf in both policies."""
    logits_V = torch.tensor([0.3, -1.0, 0.5, -torch.inf], dtype=torch.float64)
    sampler_V = torch.tensor([0.1, 0.2, -0.4, -torch.inf], dtype=torch.float64).log_softmax(-1)
    assert bool(expected_score(listed(logits_V.log_softmax(-1), sampler_V, 4)).isfinite().all())
    gradient_V = score_gradient(logits_V, sampler_V, 4)
    expected_V = sampler_V.exp() - logits_V.softmax(-1)
    assert torch.allclose(gradient_V, expected_V, rtol=0, atol=1e-15)


# --- what a term needs ------------------------------------------------------------------------------------------------
ROW = {
    "logp_BT": torch.tensor([[-1.0, -2.0]]),
    "ref_logp_BT": torch.tensor([[-2.0, -1.0]]),
    "behaviour_logp_BT": torch.tensor([[-1.5, -1.5]]),
    "mask_BT": torch.tensor([[True, True]]),
}


def test_a_centred_term_without_the_samplers_tokens_names_what_it_needs():
    with pytest.raises(UserError, match="needs sampler_top: the sampler's likeliest tokens"):
        kl_surrogate(centred(KLTerm("k1")), **ROW)


def test_a_log_prob_of_the_list_that_is_not_a_number_is_named():
    logp_BTK = torch.full((1, 2, 3), -1.0)
    logp_BTK[0, 1, 2] = torch.nan
    top = TopTokens(torch.full((1, 2, 3), -1.0), logp_BTK, torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(NotFinite, match=r"sampler_top.ref_logp_BTK is not finite at \[0, 1\]"):
        kl_surrogate(centred(KLTerm("k1")), **ROW, sampler_top=top)
