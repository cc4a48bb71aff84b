"""Certificates: what they say of known recipes, that their yardsticks are the best there is, and that planted bugs
are caught."""

import math

import pytest
import torch

from claim_tree import TREE
from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, recipe, resolve_terms
from kl_comedy.kl import surrogate as surrogate_module
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle import (
    Instance,
    InstanceSettings,
    exact_moments,
    expected_gradient,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.oracle.certificate import YARDSTICKS, _least_variance, battery, certify
from kl_comedy.kl.oracle.part_claims import check_estimator
from kl_comedy.registry import CORRECTIONS, ESTIMATORS

BUILT_IN = [e.name for e in ESTIMATORS if e.origin.startswith("kl_comedy.")]
RATIOS = [e.name for e in CORRECTIONS if e.origin.startswith("kl_comedy.")]


@pytest.fixture
def registries(monkeypatch):
    """Registrations of a test end with it."""
    for registry in (ESTIMATORS, CORRECTIONS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def register(name, claims, needs="log_ratio"):
    return ESTIMATORS.register(name, source="this test", summary="planted", claims=claims, needs=needs)


def of(terms, regime="on_policy", name="x"):
    return certify(name, terms, regimes=(regime,))[0]


# --- known recipes ------------------------------------------------------------------------------------------------
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
    "rb/per_decision": ("sequence_reverse",) * 3,
    "rb/baselined": ("sequence_reverse",) * 3,
    "is/sequence_total": ("sequence_reverse",) * 3,
    "is/k3_sequence": ("sequence_reverse",) * 3,
    "is/per_decision": ("sequence_reverse",) * 3,
    "none": ("zero", "zero", "zero"),
}


def test_targets_of_known_recipes():
    certificates = {name: certify(name, recipe(name)) for name in KNOWN}
    assert {name: tuple(c.target for c in each) for name, each in certificates.items()} == KNOWN
    for name, c in ((name, c) for name, each in certificates.items() for c in each):
        assert c.claim_holds and c.name == name and c.terms == recipe(name)
        assert set(c.relative_bias) == set(c.cosine) == set(TARGETS)
        if c.target is not None:
            assert c.relative_bias[c.target] < 1e-9


def test_the_words_say_what_a_user_must_know():
    assert "zero expected gradient" in of(recipe("comedy/k1_in_loss")).verdict
    assert of(recipe("comedy/k3_in_reward")).verdict.startswith("biased: 91% off the sequence-level reverse KL")
    assert "what the objective states" in of(recipe("rb/per_decision"), "off_policy").verdict
    assert of(()).verdict == "no KL term: nothing holds the policy to the reference"
    trust = of([KLTerm("k2", placement="loss", reference="sampler")], "off_policy")
    assert trust.verdict.startswith("a trust region: pulls towards the sampler") and trust.variance_ratio is None
    assert "its own baseline" in of(recipe("rb/baselined")).verdict


def test_figures_do_not_depend_on_beta_and_strength_is_the_effective_beta():
    one, ten = (of([KLTerm("k3", placement="loss", beta=beta)]) for beta in (1.0, 10.0))
    for figure in ("variance", "strength", "variance_ratio"):
        assert getattr(one, figure) == pytest.approx(getattr(ten, figure), rel=1e-12)
    assert one.relative_bias == pytest.approx(ten.relative_bias) and one.verdict == ten.verdict
    twice = [KLTerm("k1"), KLTerm("k1")]
    for terms, beta in ((recipe("rb/full"), 1), (recipe("comedy/k3_both"), 1), (twice, 2)):
        assert of(terms).strength == pytest.approx(beta, abs=1e-9)
    assert abs(of(recipe("comedy/k1_in_loss")).strength) < 1e-9


def test_a_row_has_the_fixed_keys_and_plain_values():
    row = of(recipe("comedy/k1_in_loss")).row()
    assert {"name", "terms", "regime", "target", "relative_bias", "cosine", "variance", "verdict"} <= set(row)
    assert row["cosine"] == dict.fromkeys(TARGETS), "nothing has no direction"
    assert all(value is None or math.isfinite(value) for value in row["relative_bias"].values())
    assert list(resolve_terms(row["terms"])) == list(recipe("comedy/k1_in_loss"))


def test_bounds_that_act_far_from_the_reference_only_are_told_apart():
    """A cap, a clamp, a window: what holds while they do not act is not what holds."""
    capped = of([KLTerm("k3", placement="loss", gradient="k2", correction="token_detached", cap=10.0)], "off_policy")
    assert (capped.target, capped.near_target) == (None, "token_reverse") and capped.claim_holds
    clamped = of([KLTerm("k3", placement="loss", output_clamp=10.0)])
    assert (clamped.target, clamped.near_target) == (None, "token_forward")
    assert "while no bound acts, biased beyond" in clamped.verdict
    windowed = of([KLTerm("exact", correction="prefix_previous", window=4)], "off_policy")
    assert windowed.target is None and windowed.near_target == "sequence_reverse"


# --- the yardsticks -------------------------------------------------------------------------------------------------
def test_yardsticks_are_the_least_noisy_unbiased_terms_of_all():
    """Over every term that claims a target (test_claims proves the claims) the least variance is the yardstick's."""
    for regime in REGIMES:
        shown = [each for each in battery(regime) if each.shown]
        variances = {target: [] for target in YARDSTICKS}
        for term in all_terms(BUILT_IN, RATIOS):
            target = claimed_target(term, regime)
            if target in YARDSTICKS:
                moments = [exact_moments(each.instance, terms_loss([term])) for each in shown]
                pairs = zip(moments, shown, strict=True)
                noise = [each.figures(where.targets["sequence_reverse"])["variance"] for each, where in pairs]
                variances[target].append(sum(noise) / len(noise))
        for target in YARDSTICKS:
            least = min(variances[target], default=None)
            assert _least_variance(target, regime, TREE) == (least if least is None else pytest.approx(least, rel=1e-9))
        assert of(recipe("rb/per_decision"), regime).variance_ratio == pytest.approx(1.0, rel=1e-9)
        assert of(recipe("is/per_decision"), regime).variance_ratio > 1


# --- planted bugs ---------------------------------------------------------------------------------------------------
def test_a_detached_log_ratio_is_caught(registries):
    @register("detached_k2", ("pathwise:token_reverse", "nonnegative"))
    def detached_k2(log_ratio):
        return 0.5 * log_ratio.detach().square()

    (sentence,) = check_estimator(ESTIMATORS.get("detached_k2")).failures
    assert "claims pathwise:token_reverse, and it has the gradient 0 at a log-ratio of" in sentence
    certificate = of([KLTerm("detached_k2", placement="loss")])
    assert not certificate.claim_holds and certificate.target == "zero" and certificate.claimed == "token_reverse"


@pytest.mark.parametrize(("inside", "outside"), [(5, 1e9), (20, 1e9), (40, 1e9), (1e9, 10)], ids=str)
def test_a_clamp_inside_an_estimator_is_caught(inside, outside, registries):
    """On the input as verl (20) and open-instruct (40) have it, or on the output; near clamps by certificates too."""

    @register("clamped", ("value:reverse", "pathwise:token_forward", "nonnegative"))
    def clamped(log_ratio):
        log_ratio = log_ratio.clamp(-inside, inside)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(-outside, outside)

    sentences = check_estimator(ESTIMATORS.get("clamped")).failures
    assert [s.split("claims ")[1].split(",")[0] for s in sentences] == ["value:reverse", "pathwise:token_forward"]
    certificate = of([KLTerm("clamped", placement="loss")])
    if min(inside, outside) <= 10:
        assert not certificate.claim_holds and certificate.near_target == "token_forward" != certificate.target


@pytest.mark.parametrize("term", [("k1", "reward"), ("exact", "reward"), ("exact", "loss"), ("k3", "loss")], ids=str)
def test_a_prefix_ratio_that_forgets_the_prefix_is_caught(term, registries):
    @CORRECTIONS.register("forgetful", source="this test", weights="cost", detached=False, scope="prefix")
    def forgetful(delta_BT, window=None):
        """The token's own ratio."""
        return delta_BT.exp()

    estimator, placement = term
    for regime in ("off_policy", "mixed"):
        certificate = of([KLTerm(estimator, placement=placement, correction="forgetful")], regime)
        assert certificate.claimed == "sequence_reverse" and not certificate.claim_holds
    on_policy = of([KLTerm(estimator, placement=placement, correction="forgetful")])
    assert on_policy.claim_holds == (placement == "reward"), "in reward, on-policy ratios are one"


def test_claims_of_a_registered_correction_follow_from_its_facts(registries):
    """The same functions as the built-in ones under other names have the same claims in every cell."""
    for name in RATIOS:
        entry = CORRECTIONS.get(name)
        CORRECTIONS.register(f"my_{name}", source="this test", summary="same", **entry.facts)(entry.fn)
    for cell in all_terms(BUILT_IN, [name for name in RATIOS if name != "none"]):
        mine = f"my_{cell.correction}"
        try:
            twin = KLTerm(**{**{f: getattr(cell, f) for f in KLTerm.__dataclass_fields__}, "correction": mine})
        except UserError:
            assert cell.level == "sequence", "level sequence knows the built-in names only"
            continue
        for regime in REGIMES:
            assert claimed_target(twin, regime) == claimed_target(cell, regime), (cell.label(), regime)


def test_an_estimator_that_is_not_finite_or_of_a_wrong_shape_is_named(registries):
    register("broken", ())(lambda log_ratio: log_ratio.sqrt())
    with pytest.raises(UserError, match=r"estimator 'broken' is nan at a log-ratio of -"):
        check_estimator(ESTIMATORS.get("broken"))
    register("summed", ())(lambda log_ratio: log_ratio.sum())
    with pytest.raises(UserError, match="estimator 'summed' must return a tensor of the shape"):
        check_estimator(ESTIMATORS.get("summed"))
    register("boastful", ("value:everything",))(lambda log_ratio: log_ratio)
    with pytest.raises(UserError, match="claims 'value:everything'; allowed: value:reverse"):
        check_estimator(ESTIMATORS.get("boastful"))


# --- mutations: would the matrix notice? ------------------------------------------------------------------------------
def broken_terms(regime="off_policy"):
    """Built-in terms whose claim does not hold, as test_claims would report them."""
    setting = Instance.random(TREE, InstanceSettings(regime=regime, seed=11, parameters=5))
    targets = {target: target_gradient(setting, target) for target in TARGETS}
    broken = []
    for cell in all_terms(BUILT_IN, RATIOS):
        claimed = claimed_target(cell, regime)
        target_D = targets.get(claimed) if claimed in (None, *targets) else target_gradient(setting, claimed, cell)
        if claimed and expected_gradient(setting, [cell]).relative_bias(target_D) >= 1e-10:
            broken.append(cell.label())
    return broken


def changed(change):
    """A mutation of the second argument."""
    return lambda original: lambda first, second, *rest, **options: original(first, change(second), *rest, **options)


def _past_credit(original):
    def in_reward(value_BT, ratio_BT, up_to_BT, **options):
        if options["pathwise_BT"] is not None:
            return original(value_BT, ratio_BT, up_to_BT, **options)
        flipped = original(value_BT.flip(-1), ratio_BT.flip(-1), up_to_BT, **options)
        return type(flipped)(**{name: tensor.flip(-1) for name, tensor in flipped.__dict__.items()})

    return in_reward


MUTATIONS = {
    "the log-ratio is detached": ("_sampled_value", changed(torch.detach), "on_policy"),
    "the log-ratio has the wrong sign": ("_sampled_value", changed(torch.neg), "on_policy"),
    "the ratio is detached": ("weights_of", changed(torch.detach), "off_policy"),
    "the ratio is lost": ("weights_of", changed(torch.zeros_like), "off_policy"),
    "a cost in reward loses its ratio": ("in_reward", changed(torch.ones_like), "off_policy"),
    "credit runs backwards": ("in_reward", _past_credit, "on_policy"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_matrix_fails_for_a_mutated_surrogate(mutation, monkeypatch):
    name, mutate, regime = MUTATIONS[mutation]
    assert broken_terms(regime) == []
    monkeypatch.setattr(surrogate_module, name, mutate(getattr(surrogate_module, name)))
    assert len(broken_terms(regime)) >= 3
