"""A sampler that truncates, and a policy that is renormalized over what it kept: what each KL term then optimizes.

The policy is ``pi_S``: its distribution over the kept tokens S of each prefix, which the sampler chose and no gradient
moves. The reference is whole.
"""

import dataclasses
import math

import pytest
import torch

import brute
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, term_warnings
from kl_comedy.kl.claims import SAMPLER_TARGETS, all_terms, verdict
from kl_comedy.kl.estimators import k1, k3
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, exact_moments, expected_gradient, target_gradient
from kl_comedy.kl.oracle.gradients import exact_moments_by_loss, terms_loss
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

TREE = Tree.build(vocabulary=4, length=3)
ESTIMATORS_PROVED = [entry.name for entry in ESTIMATORS if "claims_truncated" in entry.facts]
BUILT_IN_CORRECTIONS = [entry.name for entry in CORRECTIONS if entry.origin.startswith("kl_comedy.")]
TERMS = all_terms(ESTIMATORS_PROVED, BUILT_IN_CORRECTIONS)


def instance(regime, parameters=None, *, seed=3, renormalized=True):
    settings = InstanceSettings(
        regime=regime, seed=seed, parameters=parameters, top_p=0.8, distance=0.7, renormalized=renormalized
    )
    return Instance.random(TREE, settings)


def test_the_instance_leaves_out_tokens_at_most_prefixes_and_keeps_several_at_most():
    kept_NV = instance("on_policy").kept_NV
    sizes = kept_NV.sum(-1)
    assert (sizes < TREE.vocabulary).float().mean() > 0.7
    assert (sizes > 1).float().mean() > 0.7


@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
@pytest.mark.parametrize("regime", REGIMES)
def test_every_term_hits_exactly_the_target_that_it_claims_of_a_truncated_sampler(regime, parameters):
    """Fails where a claim does not hold, and where a target is hit that nothing claims."""
    where = instance(regime, parameters)
    targets = {name: target_gradient(where, name) for name in TARGETS}
    wrong = []
    claimed = 0
    for term in TERMS:
        gradient = expected_gradient(where, [term])
        hit = [name for name, target_D in targets.items() if gradient.relative_bias(target_D) < 1e-10]
        claim = claimed_target(term, regime, truncated=True)
        claimed += claim is not None
        if hit != [name for name in (claim,) if name is not None]:
            wrong.append(f"{term.label()}: hits {hit}, claims {claim}")
    assert not wrong, "\n".join(wrong)
    assert claimed > 20


@pytest.mark.parametrize("regime", REGIMES)
def test_a_truncated_sampler_as_the_reference_gives_every_kept_token_mass(regime):
    """So the claims of a sampler that keeps all tokens hold, k3 as a cost to go included."""
    where = instance(regime)
    targets = {name: target_gradient(where, name) for name in SAMPLER_TARGETS}
    terms = [dataclasses.replace(term, reference="sampler") for term in TERMS if term.anchor == "current"]
    moments = exact_moments_by_loss(where, {term.label(): terms_loss((term,)) for term in terms})
    wrong = []
    for term in terms:
        # On fresh samples the policy is the sampler, and every target is zero.
        hit = {name for name, target_D in targets.items() if moments[term.label()].equals(target_D, 1e-10)}
        claim = claimed_target(term, regime, truncated=True)
        expected = set(targets) if regime == "on_policy" else {claim} - {None}
        if hit != expected:
            wrong.append(f"{term.label()}: hits {sorted(hit)}, claims {claim}")
    assert not wrong, "\n".join(wrong)


class Slow:
    """Every completion, walked with Python's own loops; log-probs of the renormalized policy from its definition."""

    def __init__(self, where):
        self.where = where
        self.theta_D = where.theta_D.clone().requires_grad_(True)
        logits_NV = self.theta_D.reshape(where.tree.prefixes, -1)
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(where.tree))}
        # By the probability of the sampler, and not by the set that the instance has.
        self.kept = [[v for v, p in enumerate(row.exp().tolist()) if p > 0] for row in where.sampler_logp_NV]
        self.logp = []
        for logits_V, kept in zip(logits_NV, self.kept, strict=True):
            mass = sum(logits_V[v].exp() for v in kept)
            self.logp.append({v: (logits_V[v].exp() / mass).log() for v in kept})

    def completions(self):
        """Tokens of every completion that can be drawn, and its probability under policy and sampler."""
        for tokens in brute.completions(self.where.tree):
            steps = [(self.number[tokens[:t]], token) for t, token in enumerate(tokens)]
            if all(token in self.logp[n] for n, token in steps):
                drawn = sum(self.logp[n][token] for n, token in steps).exp()
                sampled = sum(self.where.sampler_logp_NV[n, token] for n, token in steps).exp()
                yield steps, drawn, sampled

    def kl(self, n):
        """``KL(pi_S || ref)`` of the next token."""
        ref_V = self.where.ref_logp_NV[n]
        return sum(logp.exp() * (logp - ref_V[v]) for v, logp in self.logp[n].items())

    def forward_over_kept(self, n):
        """The kept tokens' part of ``KL(ref || pi_S)``."""
        ref_V = self.where.ref_logp_NV[n]
        return sum(ref_V[v].exp() * (ref_V[v] - logp) for v, logp in self.logp[n].items())

    def ref_mass(self, n):
        return sum(float(self.where.ref_logp_NV[n, v].exp()) for v in self.kept[n])

    def gradient(self, value):
        return torch.autograd.grad(value, self.theta_D, retain_graph=True)[0]


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_the_targets_are_those_of_a_walk_over_every_completion(regime):
    where = instance(regime)
    slow = Slow(where)
    sequence = token = forward = 0.0
    for steps, drawn, sampled in slow.completions():
        for n, v in steps:
            sequence = sequence + drawn * (slow.logp[n][v] - where.ref_logp_NV[n, v])
            token = token + sampled * slow.kl(n)
            forward = forward + sampled * slow.forward_over_kept(n)
    for name, value in (("sequence_reverse", sequence), ("token_reverse", token), ("token_forward", forward)):
        torch.testing.assert_close(target_gradient(where, name), slow.gradient(value), atol=1e-11, rtol=1e-9)


def test_gradients_of_losses_are_those_of_the_mean_over_every_completion():
    """On fresh samples: k1 with its costs to go, the exact KL differentiated, and k3 differentiated."""
    where = instance("on_policy")
    slow = Slow(where)
    to_go = exact = pathwise = 0.0
    for steps, drawn, _ in slow.completions():
        probability = drawn.detach()
        costs = [float(slow.logp[n][v].detach() - where.ref_logp_NV[n, v]) for n, v in steps]
        for t, (n, v) in enumerate(steps):
            to_go = to_go + probability * sum(costs[t:]) * slow.logp[n][v]
            exact = exact + probability * slow.kl(n)
            pathwise = pathwise + probability * k3(slow.logp[n][v] - where.ref_logp_NV[n, v])
    for term, value in (
        (KLTerm("k1", placement="reward"), to_go),
        (KLTerm("exact", placement="loss"), exact),
        (KLTerm("k3", placement="loss"), pathwise),
    ):
        gradient_D = expected_gradient(where, [term]).gradient_D
        torch.testing.assert_close(gradient_D, slow.gradient(value), atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_values_of_k1_and_k3_estimate_at_a_prefix(seed):
    """``k1``: KL(pi_S || ref) = KL(pi_S || ref_S) - log ref(S). ``k3``: that less 1 - ref(S)."""
    where = instance("on_policy", seed=seed)
    slow = Slow(where)
    differ = 0
    for n, logp in enumerate(slow.logp):
        p = {v: float(value.detach().exp()) for v, value in logp.items()}
        log_ratio = {v: (logp[v] - where.ref_logp_NV[n, v]).detach() for v in logp}
        mass = slow.ref_mass(n)
        renormalized = {v: float(where.ref_logp_NV[n, v].exp()) / mass for v in logp}
        kl_to_renormalized = sum(p[v] * math.log(p[v] / renormalized[v]) for v in logp)
        mean_of_k1 = sum(p[v] * float(k1(log_ratio[v])) for v in logp)
        mean_of_k3 = sum(p[v] * float(k3(log_ratio[v])) for v in logp)
        assert mean_of_k1 == pytest.approx(float(slow.kl(n).detach()), abs=1e-12)
        assert mean_of_k1 == pytest.approx(kl_to_renormalized - math.log(mass), abs=1e-12)
        assert mean_of_k3 == pytest.approx(mean_of_k1 - (1 - mass), abs=1e-12)
        differ += mass < 0.99
        # k3 differentiated is the forward KL from the renormalized reference, times the reference's mass.
        forward_to_renormalized = sum(renormalized[v] * (math.log(renormalized[v]) - logp[v]) for v in logp)
        torch.testing.assert_close(
            slow.gradient(slow.forward_over_kept(n)), mass * slow.gradient(forward_to_renormalized)
        )
    assert differ > len(slow.logp) / 2


def test_a_policy_that_is_not_renormalized_misses_every_target_of_the_reverse_kl():
    """The same sampler, whose sets are not replayed."""
    whole = instance("on_policy", renormalized=False)
    for name in ("sequence_reverse", "token_reverse"):
        for where in (whole, instance("on_policy")):
            term = KLTerm("k1", placement="reward", correction="sequence", credit="total")
            moments = expected_gradient(whole, [term])
            assert moments.relative_bias(target_gradient(where, name)) > 1e-3


def test_the_policy_has_no_gradient_at_a_token_that_was_left_out():
    where = instance("on_policy")
    loss = terms_loss([KLTerm("exact", placement="loss"), KLTerm("k1", placement="reward")])
    gradient_NV = exact_moments(where, loss).gradient_D.reshape(where.kept_NV.shape)
    assert gradient_NV[~where.kept_NV].count_nonzero() == 0
    assert gradient_NV[where.kept_NV].count_nonzero() > 0


def test_k3_that_credits_earlier_tokens_is_no_reverse_kl_where_a_sampler_truncates():
    """Its shift depends on the prefix, and a token is credited with the shifts behind it."""
    term = KLTerm("k3", placement="loss", correction="prefix")
    assert claimed_target(term, "on_policy") == "sequence_reverse"
    assert claimed_target(term, "on_policy", truncated=True) is None
    assert term_warnings(term, off_policy=False) == []
    (warning,) = term_warnings(term, off_policy=False, truncated=True)
    assert "no divergence that is proved of a truncated sampler" in warning
    assert verdict(KLTerm("k1"), "on_policy", truncated=True) == verdict(KLTerm("k1"), "on_policy")


@pytest.mark.parametrize("parameters", [None, 5], ids=["tabular", "shared"])
def test_the_oracles_forward_kl_is_its_part_over_the_kept_tokens(parameters):
    where = instance("off_policy", parameters)
    moments = expected_gradient(where, [KLTerm("exact_forward", placement="loss")])
    assert moments.relative_bias(target_gradient(where, "token_forward")) < 1e-10


def test_kept_masses_are_the_mean_ratio_and_the_rest_of_a_kl_over_all_completions():
    """Over every token of every completion that the truncated sampler draws; the ratio is that of the whole policy."""
    whole = instance("on_policy", 5, renormalized=False)
    whole = dataclasses.replace(whole, sampler_logp_NV=whole.policy_logp(), recorded_logp_NV=whole.policy_logp())

    def two_likeliest(logp_NV):
        second_N1 = logp_NV.topk(2).values[:, 1:]
        return torch.where(logp_NV >= second_N1, logp_NV, -torch.inf)

    cut = whole.truncated(two_likeliest)
    everything = TREE.all
    tokens = ratios = missing = 0.0
    for row, probability in enumerate(cut.probability(everything).tolist()):
        for prefix, token, inside in zip(
            everything.prefix_BT[row].tolist(),
            everything.token_BT[row].tolist(),
            everything.mask_BT[row].tolist(),
            strict=True,
        ):
            if not inside or probability == 0:
                continue
            kept = sorted(range(TREE.vocabulary), key=lambda v: -float(whole.policy_logp()[prefix, v]))[:2]
            assert token in kept
            recorded = cut.recorded_logp_NV[prefix, token]
            tokens += probability
            ratios += probability * math.exp(float(whole.policy_logp()[prefix, token] - recorded))
            missing -= probability * math.log(sum(math.exp(float(whole.ref_logp_NV[prefix, v])) for v in kept))
    assert cut.kept_masses() == pytest.approx((ratios / tokens, missing / tokens), rel=1e-12)
    assert cut.kept_masses()[0] < 0.95
    torch.testing.assert_close(cut.policy_logp()[cut.kept_NV], cut.sampler_logp_NV[cut.kept_NV])
    assert whole.kept_masses() == (1.0, 0.0)
