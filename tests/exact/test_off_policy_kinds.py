"""What a KL term is on samples of another policy: the gradient of a named function, or of none.

The functions are computed here by loops over prefixes and completions, in float64, and differentiated by autograd; the
gradients come from the oracle. The sampler ``mu`` is held fixed: it does not move with the policy.
"""

import dataclasses

import numpy
import pytest
import torch

import brute
from kl_comedy.kl import KLTerm
from kl_comedy.kl.claims import (
    KIND_WORDS,
    KINDS,
    NO_TARGET,
    all_terms,
    claimed_target,
    dropped_token_words,
    kind_in,
    kind_of_terms,
    off_policy_kind,
    term_warnings,
    verdict,
)
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments, exact_moments_by_loss, terms_loss
from kl_comedy.kl.oracle.divergences import divergence_gradient
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

BUILT_IN = [entry.name for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
BUILT_IN_CORRECTIONS = [entry.name for entry in CORRECTIONS if entry.origin.startswith("kl_comedy.")]
PLAIN_TERMS = all_terms(BUILT_IN, BUILT_IN_CORRECTIONS)


def has_a_score_to_centre(term):
    is_differentiated = term.needs != "log_ratio" and term.credit == "own"
    return term.placement == "reward" and term.correction == "none" and not is_differentiated


CENTRED_TERMS = [
    dataclasses.replace(term, score_centring="exact") for term in PLAIN_TERMS if has_a_score_to_centre(term)
]
TERMS = {term.label(): term for term in (*PLAIN_TERMS, *CENTRED_TERMS)}
WITH_KIND = {label: term for label, term in TERMS.items() if off_policy_kind(term) is not None}
SMALL = Tree.build(vocabulary=3, length=2, ends=False)


def test_every_built_in_term_has_a_target_or_a_kind():
    neither = [
        label for label, term in TERMS.items() if label not in WITH_KIND and claimed_target(term, "off_policy") is None
    ]
    assert neither == []
    assert len(WITH_KIND) > 250
    assert {off_policy_kind(term).kind for term in WITH_KIND.values()} == set(KINDS) == set(KIND_WORDS)


# --- every kind: is there a function, and where is it least? ----------------------------------------------------------
@pytest.fixture(scope="module")
def away():
    """A stale instance whose reference is one of the policies, and that policy's parameters."""
    settings = InstanceSettings(regime="off_policy", seed=5, parameters=4, staleness=0.6)
    instance = Instance.random(SMALL, settings)
    generator = torch.Generator().manual_seed(1)
    reference_D = instance.theta_D + 0.7 * torch.randn(4, generator=generator, dtype=torch.float64)
    return dataclasses.replace(instance, ref_logp_NV=instance.policy_logp(reference_D)), reference_D


def gradients_at(instance, theta_D, terms):
    losses = {label: terms_loss((term,)) for label, term in terms.items()}
    moments = exact_moments_by_loss(dataclasses.replace(instance, theta_D=theta_D), losses)
    return {label: item.gradient_D for label, item in moments.items()}


def test_a_kind_says_whether_there_is_a_function(away):
    """The Jacobian of a gradient is symmetric; with mu fixed it is not for ``no_function``."""
    instance, _ = away
    wrong = []
    for label, asymmetry in asymmetries(instance, WITH_KIND).items():
        is_a_gradient = asymmetry < 1e-6
        if is_a_gradient == (off_policy_kind(WITH_KIND[label]).kind == "no_function") or 1e-6 <= asymmetry < 1e-4:
            wrong.append(f"{label}: {asymmetry:.1e}")
    assert not wrong, "\n".join(wrong)


def asymmetries(instance, terms):
    """``u J v - v J u`` of each term's Jacobian J, over its size, for two drawn directions: 0 where J is symmetric."""
    step = 1e-4
    generator = torch.Generator().manual_seed(2)
    directions = torch.randn(2, len(instance.theta_D), generator=generator, dtype=torch.float64)
    slopes = []
    for direction_D in directions:
        above = gradients_at(instance, instance.theta_D + step * direction_D, terms)
        below = gradients_at(instance, instance.theta_D - step * direction_D, terms)
        slopes.append({label: (above[label] - below[label]) / (2 * step) for label in above})
    by_term = {}
    for label in terms:
        first_D, second_D = (slope[label] for slope in slopes)
        # Of these policies a centred score is a constant, and so is the gradient of a frozen cost times it: its
        # Jacobian is rounding.
        size = max(float(first_D.norm() + second_D.norm()), 1e-4)
        by_term[label] = abs(float(directions[1] @ first_D - directions[0] @ second_D)) / size
    return by_term


def test_a_proper_loss_is_least_at_the_reference_and_a_difference_is_not(away):
    """By the integral of the gradient along lines that leave the reference."""
    instance, reference_D = away
    terms = {label: term for label, term in WITH_KIND.items() if off_policy_kind(term).kind != "no_function"}
    at_reference = gradients_at(instance, reference_D, terms)
    generator = torch.Generator().manual_seed(3)
    lines = [size * torch.randn(4, generator=generator, dtype=torch.float64) for size in (1.0, -2.0, 6.0)]
    rises = rises_along(lines, instance, reference_D, terms)
    wrong = []
    for label, term in terms.items():
        slope = float(at_reference[label].norm())
        is_least = slope < 1e-12 and min(rises[label]) > 0
        if is_least != (off_policy_kind(term).kind == "proper_loss"):
            wrong.append(f"{label}: slope {slope:.1e}, rises {rises[label]}")
    assert not wrong, "\n".join(wrong)


def rises_along(lines, instance, start_D, terms):
    """By term, how far its function rises from ``start_D`` to the end of each line, by the integral of its gradient."""
    rises = {label: [] for label in terms}
    places, weights = numpy.polynomial.legendre.leggauss(5)
    for line_D in lines:
        rise = dict.fromkeys(terms, 0.0)
        for place, weight in zip(places, weights, strict=True):
            theta_D = start_D + (place + 1) / 2 * line_D
            for label, gradient_D in gradients_at(instance, theta_D, terms).items():
                rise[label] += weight / 2 * float(gradient_D @ line_D)
        for label, value in rise.items():
            rises[label].append(value)
    return rises


# --- the functions that have a formula --------------------------------------------------------------------------------
class Policies:
    """Probabilities of policy (at ``theta_D``), reference and sampler, by loops; of next tokens and of completions."""

    def __init__(self, instance, theta_D):
        logits_NV = theta_D.reshape(-1, instance.tree.vocabulary)
        if instance.features_NVD is not None:
            logits_NV = torch.einsum("nvd,d->nv", instance.features_NVD, theta_D)
        self.pi = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
        self.ref = instance.ref_logp_NV
        self.mu = instance.sampler_logp_NV
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(instance.tree))}
        self.completions = brute.completions(instance.tree)
        self.vocabulary = range(instance.tree.vocabulary)

    def logp(self, table, tokens):
        """The log-prob of tokens, from the first on."""
        return sum((table[self.number[tokens[:t]], token] for t, token in enumerate(tokens)), torch.zeros(()).double())

    def over_completions(self, table, f):
        """``sum_y table(y) f(y)``."""
        return sum(self.logp(table, y).exp() * f(y) for y in self.completions)

    def over_prefixes(self, table, f):
        """``sum_h table(h) f(h)``."""
        return sum(self.logp(table, h).exp() * f(self.number[h]) for h in self.number)

    def sum_of_tokens(self, y, f):
        return sum(f(self.number[y[:t]], token) for t, token in enumerate(y))

    def kl(self, a, b):
        """Of next tokens at prefix ``n``."""
        return lambda n: sum(a[n, v].exp() * (a[n, v] - b[n, v]) for v in self.vocabulary)

    def sequence_kl(self, a, b):
        return self.over_completions(a, lambda y: self.logp(a, y) - self.logp(b, y))

    def ratio(self, n, v):
        return self.pi[n, v] - self.ref[n, v]

    def sampled(self, table, f):
        """The mean over completions of ``table`` of the sum over tokens of ``f(l)``."""
        return self.over_completions(table, lambda y: self.sum_of_tokens(y, lambda n, v: f(self.ratio(n, v))))

    def of_completions(self, table, f):
        """The same of the log-ratio of the whole completion."""
        return self.over_completions(table, lambda y: f(self.logp(self.pi, y) - self.logp(self.ref, y)))

    def at_prefixes(self, visits, tokens, f):
        """``sum_h visits(h) sum_v tokens(v | h) f(l)``."""
        return self.over_prefixes(
            visits, lambda n: sum(tokens[n, v].exp() * f(self.ratio(n, v)) for v in self.vocabulary)
        )


def half_square(x):
    return x * x / 2


def cubic_free(x):
    """``exp(-x) - 1 + x``."""
    return (-x).exp() - 1 + x


def half_variance(p):
    """Of the log-ratio over the sampler's tokens at prefix n."""

    def at(n):
        mean = sum(p.mu[n, v].exp() * p.ratio(n, v) for v in p.vocabulary)
        return sum(p.mu[n, v].exp() * half_square(p.ratio(n, v) - mean) for v in p.vocabulary)

    return at


def covariance_with_frozen_k3(p):
    """Of k3 at the sampler's log-probs and the policy's log-prob, over the sampler's tokens at prefix n."""

    def at(n):
        mean = sum(p.mu[n, v].exp() * cubic_free(p.mu[n, v] - p.ref[n, v]) for v in p.vocabulary)
        return sum(p.mu[n, v].exp() * (cubic_free(p.mu[n, v] - p.ref[n, v]) - mean) * p.pi[n, v] for v in p.vocabulary)

    return at


def loss(estimator, **fields):
    return KLTerm(estimator, placement="loss", **fields)


FROZEN = {"anchor": "behaviour"}
FUNCTIONS = {
    "k1 in loss": (loss("k1"), lambda p: -p.sequence_kl(p.mu, p.pi)),
    "k1 of completions in loss": (loss("k1", level="sequence"), lambda p: -p.sequence_kl(p.mu, p.pi)),
    "k2 in loss": (loss("k2"), lambda p: p.sampled(p.mu, half_square)),
    "k3 in loss": (loss("k3"), lambda p: p.sampled(p.mu, cubic_free)),
    "abs in loss": (loss("abs"), lambda p: p.sampled(p.mu, torch.abs)),
    "k1 with the gradient of k2": (loss("k1", gradient="k2"), lambda p: p.sampled(p.mu, half_square)),
    "k3 of completions in loss": (loss("k3", level="sequence"), lambda p: p.of_completions(p.mu, cubic_free)),
    "k3 clamped in loss": (
        loss("k3", input_clamp=0.3),
        lambda p: p.sampled(p.mu, lambda x: cubic_free(x.clamp(-0.3, 0.3))),
    ),
    "k3 clamped behind in loss": (
        loss("k3", output_clamp=0.05),
        lambda p: p.sampled(p.mu, lambda x: cubic_free(x).clamp(max=0.05)),
    ),
    "k1 clamped in loss": (loss("k1", input_clamp=0.3), lambda p: p.sampled(p.mu, lambda x: x.clamp(-0.3, 0.3))),
    "k_lambda in loss": (
        loss("k_lambda", options={"lam": 0.3}),
        lambda p: 0.3 * p.sampled(p.mu, cubic_free) - 0.7 * p.sequence_kl(p.mu, p.pi),
    ),
    "k2 x token ratio in loss": (loss("k2", correction="token"), lambda p: p.at_prefixes(p.mu, p.pi, half_square)),
    "k2 x prefix ratio in loss": (loss("k2", correction="prefix"), lambda p: p.sampled(p.pi, half_square)),
    "k3 x ratio before the token": (
        loss("k3", correction="prefix_previous"),
        lambda p: p.at_prefixes(p.pi, p.mu, cubic_free),
    ),
    "k1 x ratio before the token": (
        loss("k1", correction="prefix_previous"),
        lambda p: p.over_prefixes(p.pi, lambda n: p.kl(p.mu, p.ref)(n) - p.kl(p.mu, p.pi)(n)),
    ),
    "abs x detached token ratio": (
        loss("abs", correction="token_detached"),
        lambda p: p.over_prefixes(
            p.mu, lambda n: sum((p.pi[n, v].exp() - p.ref[n, v].exp()).abs() for v in p.vocabulary)
        ),
    ),
    "k3 with the gradient of k2 x token ratio": (
        loss("k3", gradient="k2", correction="token"),
        lambda p: p.over_prefixes(p.mu, lambda n: 2 * p.kl(p.pi, p.ref)(n) - p.kl(p.ref, p.pi)(n)),
    ),
    "exact_forward x prefix ratio": (
        loss("exact_forward", correction="prefix_previous"),
        lambda p: p.over_prefixes(p.pi, p.kl(p.ref, p.pi)),
    ),
    "k1 in reward, own": (KLTerm("k1", credit="own"), lambda p: p.sampled(p.mu, half_square)),
    "k1 in reward, total": (KLTerm("k1", credit="total"), lambda p: p.of_completions(p.mu, half_square)),
    "k3 in reward, own": (
        KLTerm("k3", credit="own"),
        lambda p: p.sampled(p.mu, lambda x: half_square(x) - cubic_free(x)),
    ),
    "k3 in reward, own, x token ratio": (
        KLTerm("k3", credit="own", correction="token"),
        lambda p: p.over_prefixes(p.mu, lambda n: p.kl(p.pi, p.ref)(n) - p.kl(p.ref, p.pi)(n)),
    ),
    "k1 in reward x completion ratio, frozen": (
        KLTerm("k1", credit="total", correction="sequence", **FROZEN),
        lambda p: p.sequence_kl(p.pi, p.ref) - p.sequence_kl(p.pi, p.mu),
    ),
    "k1 in reward x prefix ratio, frozen": (
        KLTerm("k1", correction="prefix", **FROZEN),
        lambda p: p.sequence_kl(p.pi, p.ref) - p.sequence_kl(p.pi, p.mu),
    ),
    "k1 in reward, own, x token ratio, frozen": (
        KLTerm("k1", credit="own", correction="token", **FROZEN),
        lambda p: p.over_prefixes(p.mu, lambda n: p.kl(p.pi, p.ref)(n) - p.kl(p.pi, p.mu)(n)),
    ),
    "k1 in reward, own, score centred": (
        KLTerm("k1", credit="own", score_centring="exact"),
        lambda p: p.over_prefixes(p.mu, half_variance(p)),
    ),
    "k3 in reward, own, frozen, score centred": (
        KLTerm("k3", credit="own", score_centring="exact", **FROZEN),
        lambda p: p.over_prefixes(p.mu, covariance_with_frozen_k3(p)),
    ),
    "k1 in reward, total, frozen": (
        KLTerm("k1", credit="total", **FROZEN),
        lambda p: p.over_completions(p.mu, lambda y: (p.logp(p.mu, y) - p.logp(p.ref, y)) * p.logp(p.pi, y)),
    ),
}
CASES = {
    # With the policy as its own sampler a gradient is that of the same function, the samples held fixed.
    "fresh": ("on_policy", 0, False),
    "stale": ("off_policy", 1, False),
    "several versions": ("mixed", 2, False),
    "another reference": ("off_policy", 3, True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_expected_gradient_is_that_of_the_named_function(case, name):
    regime, seed, other_reference = CASES[case]
    instance = drawn(regime, seed, other_reference)
    term, function = FUNCTIONS[name]
    theta_D = instance.theta_D.clone().requires_grad_(True)
    (expected_D,) = torch.autograd.grad(function(Policies(instance, theta_D)), theta_D)
    gradient_D = exact_moments(instance, terms_loss((term,))).gradient_D
    assert float((gradient_D - expected_D).norm()) < 1e-12 * max(1.0, float(expected_D.norm()))
    assert float(expected_D.norm()) > 1e-3 or case == "fresh"
    assert off_policy_kind(term).kind != "no_function"


def drawn(regime, seed, other_reference):
    """A small tree that ``seed`` decides, without shared parameters."""
    tree = Tree.build(vocabulary=2 + seed % 2, length=2 + (seed + 1) % 2, ends=seed < 2)
    instance = Instance.random(tree, InstanceSettings(regime=regime, seed=seed, staleness=0.5))
    if other_reference:
        generator = torch.Generator().manual_seed(100 + seed)
        logits_NV = torch.randn(instance.ref_logp_NV.shape, generator=generator, dtype=torch.float64)
        instance = dataclasses.replace(instance, ref_logp_NV=logits_NV.log_softmax(-1))
    return instance


# --- a cost on fresh samples ------------------------------------------------------------------------------------------
def total_variation(a, b):
    return lambda n: sum((a[n, v].exp() - b[n, v].exp()).abs() for v in range(a.shape[1])) / 2


ESTIMATES = {
    "k2": ({}, half_square, 0.0, "the policy's mean of k2", "KL(policy, reference)"),
    "k3": ({}, cubic_free, 1.0, "KL(policy, reference)", "KL(reference, policy)"),
    "abs": ({}, torch.abs, None, "the policy's mean of abs", "2 total variations"),
    "k_lambda": (
        {"lam": 0.25},
        lambda x: x + 0.25 * (cubic_free(x) - x),
        0.25,
        "KL(policy, reference)",
        "0.25 KL(reference, policy)",
    ),
}


def own_gradient_of(estimator, share, p, fixed, *, is_of_completions):
    """The function whose gradient is that of the estimate differentiated, at prefixes that are held fixed."""
    if is_of_completions:
        if estimator == "abs":
            return p.over_completions(p.pi, lambda y: (1 - (p.logp(p.ref, y) - p.logp(p.pi, y)).exp()).abs())
        if estimator == "k2":
            return p.sequence_kl(p.pi, p.ref)
        return share * p.sequence_kl(p.ref, p.pi)
    if estimator == "abs":
        return 2 * p.over_prefixes(fixed.pi, total_variation(p.pi, p.ref))
    if estimator == "k2":
        return p.over_prefixes(fixed.pi, p.kl(p.pi, p.ref))
    return share * p.over_prefixes(fixed.pi, p.kl(p.ref, p.pi))


@pytest.mark.parametrize("credit", ["to_go", "total", "own", "sequence"])
@pytest.mark.parametrize("estimator", ESTIMATES)
def test_a_cost_on_fresh_samples_has_the_gradient_of_its_mean_less_its_own(estimator, credit):
    options, f, share, mean_words, less_words = ESTIMATES[estimator]
    if credit == "sequence":
        term = KLTerm(estimator, options=options, level="sequence", credit="total")
    else:
        term = KLTerm(estimator, options=options, credit=credit)
    instance = drawn("on_policy", 1, True)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    p = Policies(instance, theta_D)
    fixed = Policies(instance, instance.theta_D)

    if credit == "sequence":
        mean = p.of_completions(p.pi, f)
    elif credit == "own":
        mean = p.at_prefixes(fixed.pi, p.pi, f)
    else:
        mean = p.sampled(p.pi, f)

    less = own_gradient_of(estimator, share, p, fixed, is_of_completions=credit == "sequence")
    (expected_D,) = torch.autograd.grad(mean - less, theta_D)
    gradient_D = exact_moments(instance, terms_loss((term,))).gradient_D
    assert float((gradient_D - expected_D).norm()) < 1e-12 * max(1.0, float(expected_D.norm()))
    assert float(expected_D.norm()) > 1e-3
    if credit in ("to_go", "total") and estimator in ("k2", "k3"):
        # What conformance calls a loss of this form.
        named_D = divergence_gradient(instance, f"sequence_{estimator}_cost")
        assert float((named_D - expected_D).norm()) < 1e-12 * float(expected_D.norm())
    places = {"own": "of each visited prefix", "sequence": "of completions"}
    kind = kind_in(term, "on_policy")
    assert kind.kind == "difference"
    if credit in places:
        assert kind.function == f"{mean_words} - {less_words} {places[credit]}"
    else:
        assert kind.function == f"{mean_words} of completions - {less_words} of each visited prefix"


def test_every_built_in_term_has_a_target_or_a_kind_on_fresh_samples():
    labels = [label for label, term in TERMS.items() if claimed_target(term, "on_policy") is None]
    assert [label for label in labels if kind_in(TERMS[label], "on_policy") is None] == []
    assert len(labels) > 80
    # A cap below one masks every token of fresh samples, whose ratios are one; a clamp ends the estimate's gradient.
    bounds = ({"correction": "token", "cap": 0.9, "cap_mode": "mask"}, {"input_clamp": 5.0}, {"discount": 0.9})
    assert [kind_in(KLTerm("k3", **bound), "on_policy") for bound in bounds] == [None, None, None]
    # Where a target is hit, the kind says nothing.
    assert kind_in(KLTerm("k1"), "on_policy") is None


BIASED_TOP_K = ("naive_tail", "generalized", "bucket", "truncated", "renormalized")


@pytest.mark.parametrize("place", [{"credit": "to_go"}, {"credit": "own"}, {"placement": "loss"}], ids=str)
@pytest.mark.parametrize("form", BIASED_TOP_K)
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_a_biased_form_of_top_k_has_no_name(regime, form, place):
    """The sum over some tokens may be negative, and need not be least at the reference."""
    assert kind_in(KLTerm("top_k", options={"k": 2, "form": form}, **place), regime) is None


@pytest.mark.parametrize("credit", ["to_go", "total"])
@pytest.mark.parametrize("correction", BUILT_IN_CORRECTIONS)
def test_the_exact_forward_kl_as_a_cost_has_the_gradient_of_its_mean_on_fresh_samples(correction, credit):
    instance = drawn("on_policy", 0, True)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    p = Policies(instance, theta_D)
    (expected_D,) = torch.autograd.grad(p.over_prefixes(p.pi, p.kl(p.ref, p.pi)), theta_D)
    term = KLTerm("exact_forward", credit=credit, correction=correction)
    gradient_D = exact_moments(instance, terms_loss((term,))).gradient_D
    assert float((gradient_D - expected_D).norm()) < 1e-12 * float(expected_D.norm())
    assert kind_in(term, "on_policy").function == "the mean of exact_forward over the policy's completions"


# --- the centring identity --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("estimator", ["k1", "k3", "abs"])
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_a_cost_is_a_centred_part_and_its_mean_times_a_repulsion(regime, estimator):
    """``E_mu[c s] = E_mu[(c - cbar) s] - cbar grad KL(mu || pi)``; a baseline leaves the first part."""
    tree = Tree.build(vocabulary=2, length=3, ends=False)
    instance = Instance.random(tree, InstanceSettings(regime=regime, seed=7, staleness=0.5))
    theta_D = instance.theta_D.clone().requires_grad_(True)
    policies = Policies(instance, theta_D)
    estimate = {"k1": lambda x: x, "k3": cubic_free, "abs": torch.abs}[estimator]

    def cost(y):
        return policies.sum_of_tokens(y, lambda n, v: estimate(policies.ratio(n, v))).detach()

    mean_cost = policies.over_completions(policies.mu, cost)
    centred = policies.over_completions(policies.mu, lambda y: (cost(y) - mean_cost) * policies.logp(policies.pi, y))
    kl = policies.sequence_kl(policies.mu, policies.pi)
    (centred_D,) = torch.autograd.grad(centred, theta_D, retain_graph=True)
    (kl_D,) = torch.autograd.grad(kl, theta_D, retain_graph=True)

    plain = exact_moments(instance, terms_loss((KLTerm(estimator, credit="total"),)))
    assert float((plain.gradient_D - (centred_D - mean_cost * kl_D)).norm()) < 1e-12
    # The other completion of a group of two is the baseline.
    own = KLTerm(estimator, credit="total", baseline="own")
    with_baseline = exact_moments(instance, terms_loss((own,)), group_size=2)
    assert float((with_baseline.gradient_D - centred_D).norm()) < 1e-12
    if regime == "off_policy":
        assert float((mean_cost * kl_D).norm()) > 1e-3
    if estimator == "k1":
        # Centred, half the mean square of a completion's log-ratio is half its variance.
        square = policies.of_completions(policies.mu, half_square)
        mean = policies.of_completions(policies.mu, lambda x: x)
        (variance_D,) = torch.autograd.grad(square - half_square(mean), theta_D)
        assert float((with_baseline.gradient_D - variance_D).norm()) < 1e-12


# --- where the sampler is the reference -------------------------------------------------------------------------------
TO_SAMPLER = {
    label: dataclasses.replace(term, reference="sampler") for label, term in TERMS.items() if term.anchor == "current"
}


def jensen_shannon(p, n):
    """Half of KL(pi, m) and half of KL(mu, m), with m their mean, of next tokens at prefix ``n``."""
    total = 0.0
    for v in p.vocabulary:
        mean = ((p.pi[n, v].exp() + p.mu[n, v].exp()) / 2).log()
        total = total + p.pi[n, v].exp() * (p.pi[n, v] - mean) / 2 + p.mu[n, v].exp() * (p.mu[n, v] - mean) / 2
    return total


# Each by its definition, in loops; prefixes of the sampler are held fixed.
DIVERGENCES_FROM_SAMPLER = {
    "sequence_sampler_reverse": lambda p: p.sequence_kl(p.pi, p.mu),
    "token_sampler_reverse": lambda p: p.over_prefixes(p.mu, p.kl(p.pi, p.mu)),
    "sequence_sampler_forward": lambda p: p.sequence_kl(p.mu, p.pi),
    "sequence_sampler_mixture": lambda p: p.over_prefixes(p.pi, lambda n: jensen_shannon(p, n)),
    "token_sampler_mixture": lambda p: p.over_prefixes(p.mu, lambda n: jensen_shannon(p, n)),
    "zero": lambda p: 0.0 * p.pi.sum(),
}


@pytest.mark.parametrize("regime", ["on_policy", "off_policy", "mixed"])
def test_every_term_to_the_sampler_hits_exactly_the_target_it_claims(regime):
    """Fails where a claim does not hold, and where a target is hit that nothing claims."""
    instance = Instance.random(SMALL, InstanceSettings(regime=regime, seed=11, staleness=0.5))
    theta_D = instance.theta_D.clone().requires_grad_(True)
    policies = Policies(instance, theta_D)
    targets = {}
    for name, divergence in DIVERGENCES_FROM_SAMPLER.items():
        (targets[name],) = torch.autograd.grad(divergence(policies), theta_D, retain_graph=True)
    wrong = []
    for label, gradient_D in gradients_at(instance, instance.theta_D, TO_SAMPLER).items():
        hit = {name for name, target_D in targets.items() if float((gradient_D - target_D).norm()) < 1e-12}
        claimed = claimed_target(TO_SAMPLER[label], regime)
        # Fresh samples are those of the policy: every divergence is least there, and has the gradient zero.
        expected = set(targets) if regime == "on_policy" else {claimed} - {None}
        if hit != expected or (regime == "on_policy" and claimed != "zero"):
            wrong.append(f"{label}: hits {sorted(hit)}, claims {claimed}")
    assert not wrong, "\n".join(wrong)


def test_where_the_sampler_is_the_reference_a_kind_is_what_it_is_against_any(away):
    """A function is one against any reference, and a proper loss is least at any; the other two could be more here."""
    instance, sampler_D = away
    sampler_logp_NV = instance.ref_logp_NV
    instance = dataclasses.replace(instance, sampler_logp_NV=sampler_logp_NV, recorded_logp_NV=sampler_logp_NV)
    by_kind = {kind: {} for kind in KINDS}
    for label, term in TO_SAMPLER.items():
        kind = off_policy_kind(term)
        if kind is not None:
            assert kind.kind == off_policy_kind(dataclasses.replace(term, reference="initial")).kind
            by_kind[kind.kind][label] = term
    asymmetric = asymmetries(instance, by_kind["no_function"])
    assert {label for label, asymmetry in asymmetric.items() if asymmetry < 1e-6} == set()
    assert len(asymmetric) > 50
    not_least = by_kind["difference"] | by_kind["repulsion"]
    generator = torch.Generator().manual_seed(3)
    direction_D = torch.randn(4, generator=generator, dtype=torch.float64)
    # Near and both ways: k_lambda with lam = 0.5 is flat at the sampler up to the third order. Far: the forward KL that
    # a difference takes away grows without bound, and the reverse KL does not.
    lines = [size * direction_D for size in (0.2, -0.2, 8.0)]
    rises = rises_along(lines, instance, sampler_D, not_least)
    assert {label for label, values in rises.items() if min(values) > 0} == set()
    assert len(rises) > 20


def is_kept(p, n, v, cap):
    return float((p.pi[n, v] - p.mu[n, v]).detach().exp()) <= cap


def kept_parts(p, f, cap):
    """The sum over kept tokens of ``f(log p_v, l_v)`` at the sampler's prefixes."""

    def at(n):
        kept = [v for v in p.vocabulary if is_kept(p, n, v, cap)]
        return sum(f(p.pi[n, v], p.pi[n, v] - p.mu[n, v]) for v in kept) + 0.0 * p.pi[n, 0]

    return p.over_prefixes(p.mu, at)


MASKED = {"reference": "sampler", "cap": 1.1, "cap_mode": "mask"}
TO_SAMPLER_FUNCTIONS = {
    # prime-rl's kl_tau: (log-ratio)^2 of every trained token, kept by the policy loss or not.
    "twice k2 in loss": (
        loss("k2", beta=2.0, reference="sampler"),
        lambda p: p.over_prefixes(
            p.mu, lambda n: sum(p.mu[n, v].exp() * (p.pi[n, v] - p.mu[n, v]) ** 2 for v in p.vocabulary)
        ),
    ),
    "k1 in loss": (loss("k1", reference="sampler"), lambda p: -p.sequence_kl(p.mu, p.pi)),
    "k1 before the token": (
        loss("k1", correction="prefix_previous", reference="sampler"),
        lambda p: -p.over_prefixes(p.pi, p.kl(p.mu, p.pi)),
    ),
    # p l, with its slope l + 1; the ones do not add up to zero over the kept tokens.
    "k1 masked": (
        loss("k1", correction="token", **MASKED),
        lambda p: kept_parts(p, lambda logp, ratio: logp.exp() * ratio, 1.1),
    ),
    # p l - p + mu, with the slope l.
    "k3 masked": (
        loss("k3", correction="token", **MASKED),
        lambda p: kept_parts(p, lambda logp, ratio: logp.exp() * (ratio - 1), 1.1),
    ),
    "k2 masked": (
        loss("k2", correction="token_detached", **MASKED),
        lambda p: kept_parts(p, lambda logp, ratio: logp.exp() * (ratio - 1), 1.1),
    ),
    "k1 in the reward masked": (
        KLTerm("k1", credit="own", correction="token", **MASKED),
        lambda p: kept_parts(p, lambda logp, ratio: logp.exp() * (ratio - 1), 1.1),
    ),
}


@pytest.mark.parametrize("name", TO_SAMPLER_FUNCTIONS)
def test_a_term_to_the_sampler_has_the_gradient_of_its_function(name):
    term, function = TO_SAMPLER_FUNCTIONS[name]
    instance = drawn("off_policy", 1, False)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    (expected_D,) = torch.autograd.grad(function(Policies(instance, theta_D)), theta_D)
    gradient_D = exact_moments(instance, terms_loss((term,))).gradient_D
    assert float((gradient_D - expected_D).norm()) < 1e-12 * max(1.0, float(expected_D.norm()))
    assert float(expected_D.norm()) > 1e-2


def test_k1_in_loss_pushes_a_dropped_token_up_by_its_own_probability():
    """Beside k3, whose kept tokens pull the same and leave the dropped ones alone."""
    instance = drawn("off_policy", 1, False)
    gradients = [
        exact_moments(instance, terms_loss((loss(name, correction="token", **MASKED),))).gradient_D
        for name in ("k1", "k3")
    ]
    theta_D = instance.theta_D.clone().requires_grad_(True)
    p = Policies(instance, theta_D)

    def dropped(n):
        above = [v for v in p.vocabulary if not is_kept(p, n, v, MASKED["cap"])]
        return sum((p.pi[n, v].exp() for v in above), 0.0 * p.pi[n, 0])

    (probability_D,) = torch.autograd.grad(p.over_prefixes(p.mu, dropped), theta_D)
    torch.testing.assert_close(gradients[0], gradients[1] - probability_D, rtol=1e-12, atol=1e-12)
    words = "at a ratio above 1.1 a token is dropped, and nothing pulls it back"
    assert dropped_token_words(loss("k3", correction="token", **MASKED)) == words
    pushed = f"{words}: the kept tokens push it up by its own probability"
    assert dropped_token_words(loss("k1", correction="token", **MASKED)) == pushed
    assert dropped_token_words(loss("k2", reference="sampler")) == ""


# --- words ------------------------------------------------------------------------------------------------------------
def test_a_verdict_says_the_kind():
    assert verdict(loss("k3"), "off_policy") == (
        "a loss with its minimum at the reference: the mean of k3 over the samples"
    )
    assert verdict(loss("k1"), "mixed") == "a repulsion from the samples: -KL(sampler, policy)"
    assert verdict(KLTerm("k3"), "off_policy") == "the gradient of no function"
    assert verdict(KLTerm("k3"), "on_policy") == (
        "a function whose minimum is not at the reference: "
        "KL(policy, reference) of completions - KL(reference, policy) of each visited prefix"
    )
    assert verdict(KLTerm("k3", input_clamp=5.0), "on_policy") == NO_TARGET
    assert off_policy_kind(loss("k3", correction="token")) is None
    assert off_policy_kind(loss("k2", input_clamp=5.0)).function == "the mean of k2 over the samples, as clamped"


def test_a_verdict_names_the_sampler_where_it_is_the_reference():
    squared = loss("k2", reference="sampler")
    assert off_policy_kind(squared).words == "a loss with its minimum at the sampler: the mean of k2 over the samples"
    assert verdict(loss("k1", reference="sampler"), "off_policy") == (
        "a repulsion from the samples: -KL(sampler, policy)"
    )
    before = loss("k1", correction="prefix_previous", reference="sampler")
    assert off_policy_kind(before).function == "-KL(sampler, policy) of each prefix that the policy visits"
    assert verdict(KLTerm("k1", correction="prefix", reference="sampler"), "off_policy") == (
        "sequence_sampler_reverse: a trust region, optimizes the reverse KL of completions to the sampler"
    )
    assert verdict(squared, "on_policy") == "zero: zero expected gradient, as the policy is the sampler"


def test_warnings_of_a_term_to_the_sampler():
    """None where it holds the policy to the sampler on stale samples; on fresh ones it does nothing."""
    for estimator in ("k2", "k3", "exact_forward"):
        assert term_warnings(loss(estimator, reference="sampler"), off_policy=True) == []
    (warning,) = term_warnings(loss("k1", reference="sampler"), off_policy=True)
    assert "a repulsion from the samples" in warning
    (warning,) = term_warnings(loss("k2", reference="sampler"), off_policy=False)
    assert "as the policy is the sampler" in warning


@pytest.mark.parametrize(("lam", "name"), [(0.0, "k1"), (1.0, "k3")])
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_the_ends_of_k_lambda_claim_what_k1_and_k3_do(regime, lam, name):
    for term in PLAIN_TERMS:
        if term.estimator == "k_lambda":
            end = dataclasses.replace(term, options={"lam": lam})
            plain = dataclasses.replace(term, estimator=name, options={})
            assert claimed_target(end, regime) == claimed_target(plain, regime)
            assert kind_in(end, regime) == kind_in(plain, regime)


def test_terms_together_are_a_proper_loss_where_each_is_one():
    assert kind_of_terms((loss("k3"), loss("exact")), "off_policy").kind == "proper_loss"
    assert kind_of_terms((loss("k3"), loss("k1")), "off_policy") is None
    assert kind_of_terms((loss("k3"), loss("k2", beta=-0.5)), "off_policy") is None
    assert kind_of_terms((), "off_policy") is None
    # The reverse KL of completions and the forward KL of each prefix are both least at the reference.
    assert kind_of_terms((KLTerm("k1"), loss("k3")), "on_policy").kind == "proper_loss"
    assert kind_of_terms((KLTerm("k3"), loss("k2")), "on_policy") is None
