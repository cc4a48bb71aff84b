"""Certificates: what they say of known recipes, that their yardsticks are the best there is, and that planted bugs
are caught."""

import math
from dataclasses import replace

import pytest
import torch

from claim_tree import TREE
from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, recipe, resolve_terms
from kl_comedy.kl import surrogate as surrogate_module
from kl_comedy.kl.claims import SAMPLER_TARGETS, all_terms, target_words
from kl_comedy.kl.oracle import (
    Instance,
    InstanceSettings,
    exact_moments,
    expected_gradient,
    log_probs,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.oracle.certificate import YARDSTICKS, _least_variance, battery, certify
from kl_comedy.kl.oracle.certificate_record import BATTERY_WORDS
from kl_comedy.kl.oracle.part_claims import check_estimator
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

BUILT_IN = [entry.name for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
RATIOS = [entry.name for entry in CORRECTIONS if entry.origin.startswith("kl_comedy.")]


@pytest.fixture
def registries(monkeypatch):
    """Registrations of a test end with it."""
    for registry in (ESTIMATORS, CORRECTIONS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def register(name, claims, needs="log_ratio"):
    return ESTIMATORS.register(name, source="this test", summary="planted", claims=claims, needs=needs)


def certificate_of(terms, regime="on_policy"):
    (certificate,) = certify("x", terms, regimes=(regime,))
    return certificate


# --- known recipes ------------------------------------------------------------------------------------------------
# What each optimizes on-policy, off-policy and on a mixture of both.
KNOWN = {
    "comedy/k1_in_reward": ("sequence_reverse", None, None),
    "comedy/k1_in_loss": ("zero", None, None),
    "comedy/k3_in_loss": ("token_forward", None, None),
    "comedy/k3_in_reward": (None, None, None),
    "comedy/k3_both": ("sequence_reverse", None, None),
    "trl/default": ("token_reverse", "token_reverse", "token_reverse"),
    "verl/k3+": ("token_reverse", None, None),
    "openrlhf/default": ("sequence_reverse", None, None),
    "liu/corrected": ("token_reverse", "token_reverse", "token_reverse"),
    "liu/clipped": ("token_reverse", None, None),
    "rb/per_decision": ("sequence_reverse", "sequence_reverse", "sequence_reverse"),
    "rb/baselined": ("sequence_reverse", "sequence_reverse", "sequence_reverse"),
    "is/sequence_total": ("sequence_reverse", "sequence_reverse", "sequence_reverse"),
    "is/k3_sequence": ("sequence_reverse", "sequence_reverse", "sequence_reverse"),
    "is/per_decision": ("sequence_reverse", "sequence_reverse", "sequence_reverse"),
    "none": ("zero", "zero", "zero"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_targets_of_known_recipes(name):
    certificates = certify(name, recipe(name))
    assert tuple(certificate.target for certificate in certificates) == KNOWN[name]
    for certificate in certificates:
        assert certificate.claim_holds, certificate.regime
        assert certificate.name == name
        assert certificate.terms == recipe(name)
        assert set(certificate.relative_bias) == set(TARGETS)
        assert set(certificate.cosine) == set(TARGETS)
        if certificate.target is not None:
            assert certificate.relative_bias[certificate.target] < 1e-9, certificate.regime


@pytest.mark.parametrize(
    ("terms", "regime", "words"),
    [
        (recipe("comedy/k1_in_loss"), "on_policy", "zero expected gradient"),
        (recipe("rb/per_decision"), "off_policy", "what the objective states"),
        (recipe("rb/baselined"), "on_policy", "its own baseline"),
    ],
    ids=["k1 in loss", "rb/per_decision", "rb/baselined"],
)
def test_a_verdict_says_what_a_user_must_know(terms, regime, words):
    assert words in certificate_of(terms, regime).verdict


def test_the_verdict_of_a_biased_term_begins_with_its_bias():
    # A clamped cost has no name.
    verdict = certificate_of([KLTerm("k3", input_clamp=5.0)]).verdict
    assert verdict.startswith("biased: 91% off the sequence-level reverse KL")


def test_the_verdict_on_no_term_says_that_nothing_holds_the_policy():
    assert certificate_of(()).verdict == "no KL term: nothing holds the policy to the reference"


def test_a_squared_log_ratio_to_the_sampler_is_certified_against_the_sampler():
    """The errors of a certificate, by gradients of divergences from the sampler that are written out here."""
    certificate = certificate_of([KLTerm("k2", placement="loss", reference="sampler")], "off_policy")
    assert certificate.verdict.startswith("a loss with its minimum at the sampler: the mean of k2 over the samples; ")
    assert certificate.pull == "above the sampler linear, below it linear"
    errors = {"sequence_sampler_reverse": [], "sequence_sampler_forward": []}
    for case in battery("off_policy", targets=SAMPLER_TARGETS):
        if not case.shown:
            continue
        where = case.instance
        theta_D = where.theta_D.clone().requires_grad_(True)
        logp_B = log_probs(where.tree, where.policy_logp(theta_D)).sum(-1)
        sampler_logp_B = log_probs(where.tree, where.sampler_logp_NV).sum(-1)
        divergences = {
            "sequence_sampler_reverse": (logp_B.exp() * (logp_B - sampler_logp_B)).sum(),
            "sequence_sampler_forward": (sampler_logp_B.exp() * (sampler_logp_B - logp_B)).sum(),
        }
        squares_BT = (
            log_probs(where.tree, where.policy_logp(theta_D)) - log_probs(where.tree, where.sampler_logp_NV)
        ) ** 2
        half_square = (sampler_logp_B.exp() * squares_BT.sum(-1)).sum() / 2
        (actual_D,) = torch.autograd.grad(half_square, theta_D, retain_graph=True)
        for name, divergence in divergences.items():
            (target_D,) = torch.autograd.grad(divergence, theta_D, retain_graph=True)
            errors[name].append(float((actual_D - target_D).norm() / target_D.norm()))
    for name, values in errors.items():
        assert certificate.relative_bias[name] == pytest.approx(sum(values) / len(values), rel=1e-9)


TO_SAMPLER = {
    "exact in loss": (KLTerm("exact", placement="loss", reference="sampler"), "token_sampler_reverse"),
    "exact_forward in loss": (
        KLTerm("exact_forward", placement="loss", reference="sampler"),
        "sequence_sampler_forward",
    ),
    "exact in reward": (KLTerm("exact", correction="prefix_previous", reference="sampler"), "sequence_sampler_reverse"),
    "k1 with its exact baseline": (
        KLTerm("k1", correction="prefix", baseline="exact", reference="sampler"),
        "sequence_sampler_reverse",
    ),
}


@pytest.mark.parametrize("regime", ["off_policy", "mixed"])
@pytest.mark.parametrize(("term", "target"), TO_SAMPLER.values(), ids=TO_SAMPLER)
def test_an_exact_trust_region_has_the_gradient_of_the_kl_to_the_sampler(term, target, regime):
    """Of what it has to the initial policy, where that is the sampler; the gradient is by tables of prefixes."""
    where = Instance.random(TREE, InstanceSettings(regime=regime, seed=4, parameters=5, staleness=0.7))
    to_sampler_D = target_gradient(replace(where, ref_logp_NV=where.recorded_logp_NV), target.replace("_sampler_", "_"))
    actual_D = expected_gradient(where, [term]).gradient_D
    assert float((actual_D - to_sampler_D).norm()) < 1e-10 * float(to_sampler_D.norm())
    certificate = certificate_of([term], regime)
    assert certificate.target == certificate.claimed == target
    assert f"optimizes {target_words(target)}" in certificate.verdict


def test_figures_do_not_depend_on_beta():
    beta_1 = certificate_of([KLTerm("k3", placement="loss", beta=1.0)])
    beta_10 = certificate_of([KLTerm("k3", placement="loss", beta=10.0)])
    for figure in ("variance", "strength", "variance_ratio"):
        assert getattr(beta_1, figure) == pytest.approx(getattr(beta_10, figure), rel=1e-12), figure
    assert beta_1.relative_bias == pytest.approx(beta_10.relative_bias)
    assert beta_1.verdict == beta_10.verdict


@pytest.mark.parametrize(
    ("terms", "strength"),
    [
        (recipe("rb/full"), 1),
        (recipe("comedy/k3_both"), 1),
        ([KLTerm("k1"), KLTerm("k1")], 2),
    ],
    ids=["rb/full", "comedy/k3_both", "k1 twice"],
)
def test_strength_is_the_effective_beta(terms, strength):
    assert certificate_of(terms).strength == pytest.approx(strength, abs=1e-9)


def test_a_term_without_a_gradient_has_no_strength():
    assert abs(certificate_of(recipe("comedy/k1_in_loss")).strength) < 1e-9


def test_a_row_has_the_fixed_keys_and_plain_values():
    row = certificate_of(recipe("comedy/k1_in_loss")).row()
    assert {"name", "terms", "regime", "target", "relative_bias", "cosine", "variance", "verdict"} <= set(row)
    assert row["cosine"] == dict.fromkeys(TARGETS), "a gradient of zero has no direction"
    for target, bias in row["relative_bias"].items():
        assert bias is None or math.isfinite(bias), target
    assert list(resolve_terms(row["terms"])) == list(recipe("comedy/k1_in_loss"))


# A cap, a clamp, a window: what holds while they do not act is not what holds.
def test_a_cap_that_acts_far_from_the_reference_only_is_told_apart():
    term = KLTerm("k3", placement="loss", gradient="k2", correction="token_detached", cap=10.0)
    certificate = certificate_of([term], "off_policy")
    assert certificate.target is None
    assert certificate.near_target == "token_reverse"
    assert certificate.claim_holds


def test_a_clamp_that_acts_far_from_the_reference_only_is_told_apart():
    certificate = certificate_of([KLTerm("k3", placement="loss", output_clamp=10.0)])
    assert certificate.target is None
    assert certificate.near_target == "token_forward"
    assert "while no bound acts, biased beyond" in certificate.verdict


def test_a_window_that_acts_on_long_completions_only_is_told_apart():
    certificate = certificate_of([KLTerm("exact", correction="prefix_previous", window=4)], "off_policy")
    assert certificate.target is None
    assert certificate.near_target == "sequence_reverse"


# --- the yardsticks -------------------------------------------------------------------------------------------------
def mean_variance(term, settings, stated="sequence_reverse"):
    """Mean over settings of the variance relative to the sequence-level reverse KL."""
    total = 0.0
    for setting in settings:
        moments = exact_moments(setting.instance, terms_loss([term]))
        total += moments.figures(setting.targets[stated])["variance"]
    return total / len(settings)


@pytest.mark.parametrize("regime", REGIMES)
def test_yardsticks_are_the_least_noisy_unbiased_terms_of_all(regime):
    """Over every term that claims a target (test_claims proves the claims) the least variance is the yardstick's."""
    shown = [setting for setting in battery(regime) if setting.shown]
    variances = {target: [] for target in YARDSTICKS}
    for term in all_terms(BUILT_IN, RATIOS):
        target = claimed_target(term, regime)
        if target in YARDSTICKS:
            variances[target].append(mean_variance(term, shown))
    for target in YARDSTICKS:
        yardstick = _least_variance(target, regime, TREE)
        if variances[target]:
            assert yardstick == pytest.approx(min(variances[target]), rel=1e-9), target
        else:
            assert yardstick is None, target


def test_yardsticks_to_the_sampler_are_the_least_noisy_terms_of_all():
    shown = [setting for setting in battery("off_policy", targets=SAMPLER_TARGETS) if setting.shown]
    variances = {target: [] for target in SAMPLER_TARGETS if target != "zero"}
    for to_reference in all_terms(BUILT_IN, RATIOS):
        if to_reference.anchor == "behaviour":
            continue  # the log-ratio of the sampler to itself
        term = replace(to_reference, reference="sampler")
        target = claimed_target(term, "off_policy")
        if target in variances:
            variances[target].append(mean_variance(term, shown, SAMPLER_TARGETS[0]))
    for target, of_terms in variances.items():
        assert _least_variance(target, "off_policy", TREE) == pytest.approx(min(of_terms), rel=1e-9), target


@pytest.mark.parametrize("regime", REGIMES)
def test_the_variance_ratio_compares_with_the_yardstick(regime):
    best = certificate_of(recipe("rb/per_decision"), regime)
    noisier = certificate_of(recipe("is/per_decision"), regime)
    assert best.variance_ratio == pytest.approx(1.0, rel=1e-9)
    assert noisier.variance_ratio > 1


# --- planted bugs ---------------------------------------------------------------------------------------------------
def test_a_detached_log_ratio_is_caught(registries):
    @register("detached_k2", ("pathwise:token_reverse", "nonnegative"))
    def detached_k2(log_ratio):
        return 0.5 * log_ratio.detach().square()

    (sentence,) = check_estimator(ESTIMATORS.get("detached_k2")).failures
    assert "claims pathwise:token_reverse, and it has the gradient 0 at a log-ratio of" in sentence
    certificate = certificate_of([KLTerm("detached_k2", placement="loss")])
    assert not certificate.claim_holds
    assert certificate.target == "zero"
    assert certificate.claimed == "token_reverse"


NO_CLAMP = 1e9


@pytest.mark.parametrize(
    ("inside", "outside"),
    [(5, NO_CLAMP), (20, NO_CLAMP), (40, NO_CLAMP), (NO_CLAMP, 10)],
    ids=["input 5", "input 20", "input 40", "output 10"],
)
def test_a_clamp_inside_an_estimator_is_caught(inside, outside, registries):
    """On the input as verl (20) and open-instruct (40) have it, or on the output; near clamps by certificates too."""

    @register("clamped", ("value:reverse", "pathwise:token_forward", "nonnegative"))
    def clamped(log_ratio):
        log_ratio = log_ratio.clamp(-inside, inside)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(-outside, outside)

    of_value, of_gradient = check_estimator(ESTIMATORS.get("clamped")).failures
    assert "claims value:reverse," in of_value
    assert "claims pathwise:token_forward," in of_gradient
    certificate = certificate_of([KLTerm("clamped", placement="loss")])
    # The instances of a certificate have no log-ratio that reaches 20.
    if min(inside, outside) <= 10:
        assert not certificate.claim_holds
        assert certificate.near_target == "token_forward"
        assert certificate.target != "token_forward"


@pytest.mark.parametrize(
    ("estimator", "placement"), [("k1", "reward"), ("exact", "reward"), ("exact", "loss"), ("k3", "loss")]
)
def test_a_prefix_ratio_that_forgets_the_prefix_is_caught(estimator, placement, registries):
    @CORRECTIONS.register("forgetful", source="this test", weights="cost", detached=False, scope="prefix")
    def forgetful(delta_BT, window=None):
        """The token's own ratio."""
        return delta_BT.exp()

    term = KLTerm(estimator, placement=placement, correction="forgetful")
    for regime in ("off_policy", "mixed"):
        certificate = certificate_of([term], regime)
        assert certificate.claimed == "sequence_reverse", regime
        assert not certificate.claim_holds, regime
    # In a reward the ratio is not differentiated, and on-policy it is one.
    assert certificate_of([term], "on_policy").claim_holds == (placement == "reward")


def test_claims_of_a_registered_correction_follow_from_its_facts(registries):
    """The same functions as the built-in ones under other names have the same claims in every cell."""
    for name in RATIOS:
        entry = CORRECTIONS.get(name)
        CORRECTIONS.register(f"my_{name}", source="this test", summary="same", **entry.facts)(entry.fn)
    for term in all_terms(BUILT_IN, [name for name in RATIOS if name != "none"]):
        try:
            twin = replace(term, correction=f"my_{term.correction}")
        except UserError:
            # Level sequence knows the built-in names only.
            assert term.level == "sequence", term.label()
            continue
        for regime in REGIMES:
            assert claimed_target(twin, regime) == claimed_target(term, regime), (term.label(), regime)


@pytest.mark.parametrize(
    ("fn", "claims", "message"),
    [
        (lambda log_ratio: log_ratio.sqrt(), (), r"estimator 'mine' is nan at a log-ratio of -"),
        (lambda log_ratio: log_ratio.sum(), (), "estimator 'mine' must return a tensor of the shape"),
        (
            lambda log_ratio: log_ratio,
            ("value:everything",),
            "claims 'value:everything'; allowed: value:reverse",
        ),
    ],
    ids=["not finite", "wrong shape", "unknown claim"],
)
def test_an_estimator_that_is_none_is_refused_by_name(fn, claims, message, registries):
    register("mine", claims)(fn)
    with pytest.raises(UserError, match=message):
        check_estimator(ESTIMATORS.get("mine"))


# --- mutations: would the matrix notice? ------------------------------------------------------------------------------
def broken_terms(regime):
    """Built-in terms whose claim does not hold, as test_claims would report them."""
    setting = Instance.random(TREE, InstanceSettings(regime=regime, seed=11, parameters=5))
    common_targets = {target: target_gradient(setting, target) for target in TARGETS}
    broken = []
    for term in all_terms(BUILT_IN, RATIOS):
        claimed = claimed_target(term, regime)
        if claimed is None:
            continue
        if claimed in common_targets:
            target_D = common_targets[claimed]
        else:
            target_D = target_gradient(setting, claimed, term)
        if expected_gradient(setting, [term]).relative_bias(target_D) >= 1e-10:
            broken.append(term.label())
    return broken


def with_second_argument(change):
    """A mutation of a function: its second argument is changed."""

    def mutate(original):
        def mutated(first, second, *rest, **options):
            return original(first, change(second), *rest, **options)

        return mutated

    return mutate


def with_past_credit(original):
    """A token pays for what came before it."""

    def in_reward(value_BT, ratio_BT, up_to_BT, **options):
        # An exact KL has a differentiated step of its own; only sampled costs are flipped.
        if options["pathwise_BT"] is not None:
            return original(value_BT, ratio_BT, up_to_BT, **options)
        flipped = original(value_BT.flip(-1), ratio_BT.flip(-1), up_to_BT, **options)
        return type(flipped)(**{name: tensor.flip(-1) for name, tensor in flipped.__dict__.items()})

    return in_reward


@pytest.mark.parametrize(
    ("name", "mutate", "regime"),
    [
        ("_sampled_value", with_second_argument(torch.detach), "on_policy"),
        ("_sampled_value", with_second_argument(torch.neg), "on_policy"),
        ("weights_of", with_second_argument(torch.detach), "off_policy"),
        ("weights_of", with_second_argument(torch.zeros_like), "off_policy"),
        ("in_reward", with_second_argument(torch.ones_like), "off_policy"),
        ("in_reward", with_past_credit, "on_policy"),
    ],
    ids=[
        "the log-ratio is detached",
        "the log-ratio has the wrong sign",
        "the ratio is detached",
        "the ratio is lost",
        "a cost in reward loses its ratio",
        "credit runs backwards",
    ],
)
def test_the_matrix_fails_for_a_mutated_surrogate(name, mutate, regime, monkeypatch):
    assert broken_terms(regime) == []
    monkeypatch.setattr(surrogate_module, name, mutate(getattr(surrogate_module, name)))
    assert len(broken_terms(regime)) >= 3


def test_a_gradient_that_is_zero_near_the_reference_has_no_direction():
    """There a clamp does nothing, and what is left are rounding errors, whose cosine differs from run to run."""
    (certificate,) = certify("", (KLTerm("k1", placement="loss", output_clamp=10.0),), regimes=("on_policy",))
    assert (certificate.target, certificate.near_target) == (None, "zero")
    assert all(math.isnan(cosine) for cosine in certificate.cosine.values())


@pytest.mark.parametrize("regime", REGIMES)
def test_the_words_below_a_table_are_those_of_the_policies_that_it_is_about(regime):
    distances = []
    for case in battery(regime):
        if not case.shown:
            continue
        assert (case.instance.tree.vocabulary, case.instance.tree.length) == (3, 4)
        logp_NV = case.instance.policy_logp()
        kl_N = (logp_NV.exp() * (logp_NV - case.instance.ref_logp_NV)).sum(-1)
        distances.append(float(kl_N.mean()))
    words = f"3 tokens and up to 4 steps, {min(distances):.2f} to {max(distances):.2f} nats of KL per prefix"
    assert words in BATTERY_WORDS
