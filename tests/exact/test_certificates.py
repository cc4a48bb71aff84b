"""Certificates: what they say of known recipes, that their yardsticks are the best there is, and that planted bugs
are caught."""

import math

import pytest
import torch
from test_claims import TREE

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, TARGETS, KLTerm, claimed_target, recipe, resolve_terms
from kl_comedy.kl import surrogate as surrogate_module
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.oracle import Instance, exact_moments, expected_gradient, target_gradient, terms_loss
from kl_comedy.kl.oracle.certificate import YARDSTICKS, _least_variance, battery, certify
from kl_comedy.kl.oracle.estimator_claims import broken_claims
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


def test_figures_do_not_depend_on_beta():
    one, ten = (of([KLTerm("k3", placement="loss", beta=beta)]) for beta in (1.0, 10.0))
    for figure in ("variance", "strength", "variance_ratio"):
        assert getattr(one, figure) == pytest.approx(getattr(ten, figure), rel=1e-12)
    assert one.relative_bias == pytest.approx(ten.relative_bias) and one.verdict == ten.verdict


def test_the_sign_of_beta_is_kept():
    pushed = of([KLTerm("k1", placement="reward", beta=-0.1)])
    assert pushed.strength == pytest.approx(-1) and pushed.cosine["sequence_reverse"] == pytest.approx(-1)
    assert pushed.verdict.startswith("points away")


def test_strength_is_the_beta_one_gets():
    assert of(recipe("rb/full")).strength == pytest.approx(1.0, abs=1e-9)
    assert of(recipe("comedy/k3_both")).strength == pytest.approx(1.0, abs=1e-9)
    assert of([KLTerm("k1"), KLTerm("k1")]).strength == pytest.approx(2.0, abs=1e-9), (
        "twice the same term is twice beta"
    )
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


def test_battery_has_near_far_and_long_instances_of_both_kinds():
    for regime in REGIMES:
        instances = battery(regime)
        assert {i.instance.features_NVD is None for i in instances if i.near} == {True, False}
        assert any(not i.near for i in instances) and any(i.instance.tree.length == 8 for i in instances)
        assert all(i.instance.features_NVD is not None for i in instances if i.shown)


# --- the yardsticks -------------------------------------------------------------------------------------------------
def test_yardsticks_are_the_least_noisy_unbiased_terms_of_all():
    """Over every term that claims a target (test_claims proves the claims) the least variance is the yardstick's."""
    for regime in REGIMES:
        shown = [each for each in battery(regime) if each.shown]
        variances = {target: [] for target in YARDSTICKS}
        for term in all_terms(BUILT_IN, RATIOS):
            target = claimed_target(term, regime)
            if target in YARDSTICKS:
                noise = [
                    exact_moments(each.instance, terms_loss([term])).variance
                    / float(each.targets["sequence_reverse"].square().sum())
                    for each in shown
                ]
                variances[target].append(sum(noise) / len(noise))
        for target in YARDSTICKS:
            least = min(variances[target], default=None)
            assert _least_variance(target, regime) == (least if least is None else pytest.approx(least, rel=1e-9))
        assert of(recipe("rb/per_decision"), regime).variance_ratio == pytest.approx(1.0, rel=1e-9)
        assert of(recipe("is/per_decision"), regime).variance_ratio > 1


# --- planted bugs ---------------------------------------------------------------------------------------------------
def test_a_detached_log_ratio_is_caught(registries):
    @register("detached_k2", ("pathwise:token_reverse", "nonnegative"))
    def detached_k2(log_ratio):
        return 0.5 * log_ratio.detach().square()

    (said,) = broken_claims(ESTIMATORS.get("detached_k2"))
    assert "pathwise:token_reverse, and the mean of its own gradient is off by" in said
    certificate = of([KLTerm("detached_k2", placement="loss")])
    assert not certificate.claim_holds and certificate.target == "zero" and certificate.claimed == "token_reverse"


CLAMPS = {
    "input at 5": lambda log_ratio: torch.expm1(-log_ratio.clamp(-5, 5)) + log_ratio.clamp(-5, 5),
    "input at 20, as verl": lambda log_ratio: torch.expm1(-log_ratio.clamp(-20, 20)) + log_ratio.clamp(-20, 20),
    "input at 40, as open-instruct": lambda log_ratio: (
        torch.expm1(-log_ratio.clamp(-40, 40)) + log_ratio.clamp(-40, 40)
    ),
    "output at 10, as most": lambda log_ratio: (torch.expm1(-log_ratio) + log_ratio).clamp(-10, 10),
}


@pytest.mark.parametrize("name", CLAMPS)
def test_a_clamp_inside_an_estimator_is_caught(name, registries):
    register("clamped", ("value:reverse", "pathwise:token_forward", "nonnegative"))(CLAMPS[name])
    said = broken_claims(ESTIMATORS.get("clamped"))
    assert [line.split("claims ")[1].split(",")[0] for line in said] == ["value:reverse", "pathwise:token_forward"]


@pytest.mark.parametrize("name", ["input at 5", "output at 10, as most"])
def test_a_certificate_sees_a_clamp_by_its_far_instance(name, registries):
    register("clamped", ("value:reverse", "pathwise:token_forward", "nonnegative"))(CLAMPS[name])
    certificate = of([KLTerm("clamped", placement="loss")])
    assert not certificate.claim_holds and certificate.near_target == "token_forward" and certificate.target is None


def test_built_in_estimators_keep_their_claims():
    assert {name: broken_claims(ESTIMATORS.get(name)) for name in BUILT_IN} == {name: [] for name in BUILT_IN}


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
        broken_claims(ESTIMATORS.get("broken"))
    register("summed", ())(lambda log_ratio: log_ratio.sum())
    with pytest.raises(UserError, match="estimator 'summed' must return a tensor of the shape"):
        broken_claims(ESTIMATORS.get("summed"))
    register("boastful", ("value:everything",))(lambda log_ratio: log_ratio)
    with pytest.raises(UserError, match="claims 'value:everything'; allowed: value:reverse"):
        broken_claims(ESTIMATORS.get("boastful"))


# --- mutations: would the matrix notice? ------------------------------------------------------------------------------
def broken_terms(regime="off_policy"):
    """Built-in terms whose claim does not hold, as test_claims would report them."""
    setting = Instance.random(TREE, regime=regime, seed=11, parameters=5)
    targets = {target: target_gradient(setting, target) for target in TARGETS}
    found = []
    for cell in all_terms(BUILT_IN, RATIOS):
        claimed = claimed_target(cell, regime)
        if claimed and expected_gradient(setting, [cell]).relative_bias(targets[claimed]) >= 1e-10:
            found.append(cell.label())
    return found


def test_nothing_is_broken_before_a_mutation():
    assert broken_terms() == [] == broken_terms("on_policy")


def _detached_log_ratio(original):
    return lambda term, log_ratio_BT, mask_BT: original(term, log_ratio_BT.detach(), mask_BT)


def _detached_ratio(original):
    return lambda name, delta_BT, **options: original(name, delta_BT.detach(), **options)


def _no_ratio(original):
    return lambda name, delta_BT, **options: original(name, torch.zeros_like(delta_BT), **options)


def _reversed(original):
    return lambda term, log_ratio_BT, mask_BT: original(term, -log_ratio_BT, mask_BT)


def _without_weight(original):
    def in_reward(value_BT, ratio_BT, up_to_BT, **options):
        return original(value_BT, torch.ones_like(ratio_BT), up_to_BT, **options)

    return in_reward


def _past_credit(original):
    def in_reward(value_BT, ratio_BT, up_to_BT, *, credit, per_decision):
        flipped = original(value_BT.flip(-1), ratio_BT.flip(-1), up_to_BT, credit=credit, per_decision=per_decision)
        return type(flipped)(**{name: tensor.flip(-1) for name, tensor in flipped.__dict__.items()})

    return in_reward


MUTATIONS = {
    "the log-ratio is detached": ("_sampled_value", _detached_log_ratio, "on_policy"),
    "the log-ratio has the wrong sign": ("_sampled_value", _reversed, "on_policy"),
    "the ratio is detached": ("weights_of", _detached_ratio, "off_policy"),
    "the ratio is lost": ("weights_of", _no_ratio, "off_policy"),
    "a cost in reward loses its ratio": ("in_reward", _without_weight, "off_policy"),
    "credit runs backwards": ("in_reward", _past_credit, "on_policy"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_matrix_fails_for_a_mutated_surrogate(mutation, monkeypatch):
    name, mutate, regime = MUTATIONS[mutation]
    monkeypatch.setattr(surrogate_module, name, mutate(getattr(surrogate_module, name)))
    assert len(broken_terms(regime)) >= 3
