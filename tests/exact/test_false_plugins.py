"""False plugins: each is wrong where an enumeration near the reference does not look, and is found all the same.

Every sentence must hold for any seed: nothing is drawn that a plugin could foresee.
"""

import secrets

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm, claimed_target, term_warnings
from kl_comedy.kl.claims import all_terms
from kl_comedy.kl.estimators import k1, k3
from kl_comedy.kl.oracle import exact_moments_by_loss, target_gradient, terms_loss
from kl_comedy.kl.oracle.certificate import LONG, TREE, certify, with_targets
from kl_comedy.kl.oracle.correction_checks import check_correction
from kl_comedy.kl.oracle.drawn import drawn_settings
from kl_comedy.kl.oracle.part_claims import check_estimator, check_parts
from kl_comedy.kl.oracle.policy_certificate import certify_policy, named_policy_terms
from kl_comedy.objective import PolicyTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, POLICY_LOSSES

K3 = ("value:reverse", "pathwise:token_forward", "nonnegative")


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Registrations of a test end with it."""
    for registry in (ESTIMATORS, CORRECTIONS):
        registry.load()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def failures_of(fn, claims=(), *, needs="log_ratio", **facts):
    ESTIMATORS.register("mine", source="this test", summary="planted", claims=claims, needs=needs, **facts)(fn)
    try:
        return check_estimator(ESTIMATORS.get("mine"), seed=secrets.randbelow(2**31)).failures
    finally:
        ESTIMATORS._entries.pop("mine")


def failure_of_correction(fn, scope, **facts):
    facts = {"weights": "cost", "detached": False, **facts}
    CORRECTIONS.register("mine", source="this test", summary="planted", scope=scope, **facts)(fn)
    try:
        return " ".join(check_correction(CORRECTIONS.get("mine"), seed=secrets.randbelow(2**31)).failures)
    finally:
        CORRECTIONS._entries.pop("mine")


# --- the five -------------------------------------------------------------------------------------------------------
def true_at_its_default(log_ratio, lam=0.5):
    return log_ratio + 0.5 * torch.expm1(-log_ratio) + (lam - 0.5) * log_ratio.square()


def clamped_in_float32(log_ratio):
    return k3(log_ratio if log_ratio.dtype == torch.float64 else log_ratio.clamp(-1, 1))


def negative_far_away(log_ratio):
    return torch.where(log_ratio > 8, -log_ratio, log_ratio.square())


def zero_in_a_band(log_ratio):
    return torch.where((log_ratio > 18) & (log_ratio < 40), 0.0 * log_ratio, k3(log_ratio))


def forgets_after_eight(delta_BT):
    total_BT = delta_BT.cumsum(-1)
    return (total_BT - torch.nn.functional.pad(total_BT, (8, 0))[..., : total_BT.shape[-1]]).exp()


FIVE = {
    "options": (true_at_its_default, ("value:reverse",), "claims value:reverse with lam="),
    "dtype": (clamped_in_float32, K3, "in float32, and "),
    "range": (negative_far_away, ("nonnegative",), "claims nonnegative, and is -100 at a log-ratio of 100 nats"),
    "band": (zero_in_a_band, K3, "claims value:reverse, and it is 0 at a log-ratio of 18"),
}


@pytest.mark.parametrize("lie", FIVE)
def test_an_estimator_that_lies_out_of_sight_is_caught(lie):
    fn, claims, sentence = FIVE[lie]
    assert any(sentence in failure for failure in failures_of(fn, claims)), failures_of(fn, claims)


def test_a_prefix_that_forgets_tokens_beyond_the_longest_enumerated_is_caught():
    sentence = failure_of_correction(forgets_after_eight, "prefix")
    assert "declares scope prefix, and the logarithm of its ratio at token" in sentence and "of 32 tokens" in sentence


# --- three that know the certifier: right in its list of log-ratios, and in trees of 3 tokens or near the reference --
def clamped_in_batches(log_ratio):
    """k1 in one long list, and near the reference."""
    return log_ratio.clamp(-20, 20) if log_ratio.dim() == 2 else log_ratio


def centred_in_long_rows(log_ratio):
    """k1 in one long list, and in completions of the lengths that are always enumerated."""
    enumerated = log_ratio.dim() == 1 or log_ratio.shape[-1] in (4, 8)
    return log_ratio if enumerated else log_ratio - log_ratio.mean(-1, keepdim=True)


def right_in_the_fixed_trees(log_ratio):
    """k1 in one long list, and in batches of as many completions as the fixed trees have."""
    return (
        log_ratio if log_ratio.dim() == 1 or len(log_ratio) in (TREE.completions, LONG.completions) else 0 * log_ratio
    )


def half_without_gradient(log_ratio):
    """k1 while gradients are recorded; training computes costs in the reward without."""
    return log_ratio if log_ratio.requires_grad else 0.5 * log_ratio


def normalized_over_the_batch(delta_BT):
    """The prefix ratio in the trees that are always enumerated, self-normalized elsewhere."""
    ratio_BT = delta_BT.cumsum(-1).exp()
    enumerated = len(delta_BT) in (TREE.completions, LONG.completions) or len(delta_BT) > 1000
    return ratio_BT if enumerated else ratio_BT / ratio_BT.mean(0, keepdim=True)


INFORMED = (clamped_in_batches, centred_in_long_rows, right_in_the_fixed_trees, half_without_gradient)
K1 = ("value:reverse", "pathwise:zero")


@pytest.mark.parametrize("lie", INFORMED)
def test_an_estimator_that_knows_where_it_is_looked_at_is_caught(lie):
    """Each of these passes in the fixed instances; batches of other shapes and the drawn settings show it."""
    assert any("in a batch of shape" in failure for failure in failures_of(lie, K1)), lie
    ESTIMATORS.register("mine", source="x", summary="x", claims=K1, needs="log_ratio")(lie)
    terms = (KLTerm("mine"),)
    (fixed,), (drawn,) = (certify("x", terms, regimes=("on_policy",), seed=each) for each in (None, 3))
    assert fixed.claim_holds and fixed.claimed == "sequence_reverse"
    if lie is not half_without_gradient:  # the enumeration records gradients
        assert not drawn.claim_holds and drawn.worst_error > 1e-3 and "vocabulary" in drawn.worst_setting


def test_a_correction_that_depends_on_the_other_completions_is_caught():
    assert "completions stand alone" in failure_of_correction(normalized_over_the_batch, "prefix")
    facts = {"scope": "prefix", "weights": "cost", "detached": False}
    CORRECTIONS.register("mine", source="x", summary="x", **facts)(normalized_over_the_batch)
    term = KLTerm("k3", placement="loss", correction="mine")
    assert all(certificate.claim_holds for certificate in certify("x", (term,)))
    assert not any(c.claim_holds for c in certify("x", (term,), regimes=("off_policy", "mixed"), seed=1))


def test_a_policy_loss_that_clips_large_advantages_is_caught(monkeypatch):
    """Rewards of the fixed instances are 0 or 1."""
    POLICY_LOSSES.load()
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))

    @POLICY_LOSSES.register("mine", source="x", summary="x", claims=("on_policy",), scope="none")
    def mine(logp_BT, behaviour_logp_BT, advantage_BT):
        return -advantage_BT.clamp(-2, 2) * logp_BT

    (fixed,) = certify_policy("x", PolicyTerm(loss="mine"), regimes=("on_policy",))
    (drawn,) = certify_policy("x", PolicyTerm(loss="mine"), regimes=("on_policy",), seed=2)
    assert fixed.exact and not drawn.claim_holds and "reward_scale" in drawn.missed_in


def test_the_search_finds_a_setting_that_draws_missed():
    """k1 that is wrong between 28 and 30 nats: the settings of one seed may have no such log-ratio."""
    lie = lambda x: torch.where((x > 28) & (x < 30) & (x.dim() == 2), 0.0 * x, x)  # noqa: E731
    ESTIMATORS.register("mine", source="x", summary="x", claims=K1, needs="log_ratio")(lie)
    terms = (KLTerm("mine"),)
    seed = next(n for n in range(50) if certify("x", terms, regimes=("on_policy",), seed=n)[0].claim_holds)
    (certificate,) = certify("x", terms, regimes=("on_policy",), seed=seed, search_seconds=30)
    assert not certificate.claim_holds and certificate.worst_error > 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_claims_of_built_in_terms_hold_in_drawn_settings(seed):
    built_in = [[e.name for e in kind if e.origin.startswith("kl_comedy.")] for kind in (ESTIMATORS, CORRECTIONS)]
    terms = all_terms(*built_in)
    for regime in REGIMES:
        claimed = {term: target for term in terms if (target := claimed_target(term, regime))}
        for setting in drawn_settings(seed):
            each = with_targets(setting.instance(regime), setting=setting)
            moments = exact_moments_by_loss(each.instance, {term.label(): terms_loss((term,)) for term in claimed})
            targets = {
                t: each.targets[name] if name in each.targets else target_gradient(each.instance, name, t)
                for t, name in claimed.items()
            }
            wrong = [t.label() for t, target_D in targets.items() if moments[t.label()].error(target_D) > 1e-6]
            assert wrong == [], (regime, setting)
    for name, term in named_policy_terms():
        assert all(c.claim_holds for c in certify_policy(name, term, seed=seed)), name


# --- more of their kind ---------------------------------------------------------------------------------------------
def slope_in_a_band(log_ratio):
    """The value of k3 everywhere; in a band without a gradient."""
    value = k3(log_ratio)
    return torch.where((log_ratio > 18) & (log_ratio < 40), value.detach(), value)


def test_a_value_whose_gradient_is_not_its_own_is_caught():
    for claims in (("value:reverse",), ("pathwise:token_forward",)):
        (sentence,) = failures_of(slope_in_a_band, claims)
        assert f"claims {claims[0]}, and it has the gradient 0 at a log-ratio of 18" in sentence


def test_a_target_that_a_plugin_does_not_claim_is_not_denied():
    register = ESTIMATORS.register("mine", source="x", summary="x", needs="log_ratio", claims=("value:reverse",))
    register(lambda log_ratio: 1.0 * log_ratio)
    (line,) = term_warnings(KLTerm("mine"), off_policy=False)
    assert line.endswith("its target on-policy is not claimed: kl-comedy certify computes what it optimizes")


def test_a_penalty_of_the_wrong_sign_points_away():
    ESTIMATORS.register("mine", source="this test", summary="planted", needs="log_ratio")(lambda x: -x)
    (certificate,) = certify("mine", (KLTerm("mine"),), regimes=("on_policy",))
    assert certificate.strength == pytest.approx(-1) and certificate.verdict.startswith("points away")


def test_what_is_wrong_where_the_policy_never_goes_is_wrong():
    """At -30 nats k1 weighs 1e-13 in a mean over the policy; a stale sampler may draw it."""
    (sentence,) = failures_of(lambda x: torch.where((x < -25) & (x > -30), 0.0 * x, x), ("value:reverse",))
    assert "at a log-ratio of -25" in sentence


def test_equal_claims_of_other_formulas_hold():
    """Constants in slopes, another factor of the control variate, unstable but right formulas, forward KL."""
    assert failures_of(lambda x, shift=0.3: 0.5 * (x - shift).square(), ("pathwise:token_reverse", "nonnegative")) == []
    assert failures_of(lambda x: (-x).exp() - 1 + x, ("value:reverse", "pathwise:token_forward")) == []
    assert failures_of(lambda x: -x * (-x).exp(), ("value:forward",)) == []
    assert failures_of(lambda x, lam=2.0: k1(x) - lam * torch.expm1(-x), ("value:reverse",)) == []
    assert failures_of(lambda kl: 1.0 * kl, ("value:forward", "nonnegative"), needs="exact_forward") == []
    assert failures_of(lambda kl: kl.detach(), ("pathwise:zero",), needs="exact_reverse") == []


def test_an_exact_estimator_is_held_to_its_direction_and_its_slope():
    (sentence,) = failures_of(lambda kl: kl, ("value:forward",), needs="exact_reverse")
    assert sentence.endswith("claims value:forward, and it reads the exact reverse KL")
    (sentence,) = failures_of(lambda kl: 0.5 * kl, ("pathwise:token_reverse",), needs="exact_reverse")
    assert "it has the gradient 0.5 at an exact KL of" in sentence and "the claim needs 1" in sentence


def test_an_option_is_checked_in_the_range_it_declares_and_no_other_value_is_taken():
    def width(log_ratio, width=1.0):
        return (log_ratio / width).square()

    with pytest.raises(UserError, match=r"'mine' with width=0 is inf at .* declare what the option may be"):
        failures_of(width, ("nonnegative",))
    ESTIMATORS._entries.pop("mine", None)
    assert failures_of(width, ("nonnegative",), options={"width": {"above": 0}}) == []
    declare = ESTIMATORS.register("mine", source="x", summary="x", needs="log_ratio", options={"width": {"above": 0}})
    declare(width)
    with pytest.raises(UserError, match=r"options.width: got 0.0; allowed: above 0"):
        KLTerm("mine", options={"width": 0.0})
    assert KLTerm("mine", options={"width": 0.5}).options == {"width": 0.5}
    failures, covered = check_parts({"mine": [{"width": 0.25}], "k3": []}, ["prefix"], seed=3)
    widths = covered.estimators["mine"].options["width"]
    assert failures == [] and {0.25, 0.1, 1.0, 10.0} <= set(widths) and min(widths) > 0 and covered.seed == 3
    assert covered.estimators["k3"].float32 == (pytest.approx(-88.72, abs=0.05), 100.0)
    assert covered.corrections["prefix"].tokens[:3] == [1, 8, 32]


@pytest.mark.parametrize(
    ("options", "fn", "message"),
    [
        ({"wdth": {}}, lambda x, width=1.0: x, "options.wdth: no such key .* did you mean 'width'"),
        ({"width": {"min": 0}}, lambda x, width=1.0: x, "options.width.min: no such key .* minimum"),
        ({}, lambda x, width: x, "options.width: got .* allowed: a number as the default"),
    ],
)
def test_a_declaration_of_options_that_is_none_is_refused(options, fn, message):
    with pytest.raises(UserError, match=message):
        failures_of(fn, options=options)


def test_an_estimator_that_raises_is_named():
    with pytest.raises(UserError, match="estimator 'mine' raised KeyError: 'no'"):
        failures_of(lambda x: {}["no"])


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda delta: {}["no"], "correction 'mine' raised KeyError: 'no'"),
        (lambda delta: delta.data.clamp_(-1, 1).exp(), "correction 'mine' changes its argument in place"),
    ],
)
def test_a_correction_that_raises_or_changes_its_argument_is_named(fn, message):
    with pytest.raises(UserError, match=message):
        failure_of_correction(fn, "token")


@pytest.mark.parametrize(("needs", "options"), [("top_k", "k"), ("exact_mixture", "share")])
def test_an_estimator_without_the_options_that_make_its_argument_is_refused(needs, options):
    with pytest.raises(UserError, match=f"needs='{needs}' is for an estimator with the options .*'{options}'"):
        failures_of(lambda argument: argument, needs=needs)


def test_claims_need_names_regimes_and_options_that_exist():
    for need, message in (
        ({"onpolicy": {"form": (1,)}}, "claims_need.onpolicy: no such key .* did you mean 'on_policy'"),
        ({"on_policy": {"from": (1,)}}, "claims_need.on_policy.from: no such key .* did you mean 'form'"),
    ):
        with pytest.raises(UserError, match=message):
            failures_of(lambda x, form=1.0: x, ("value:reverse",), claims_need=need)
        ESTIMATORS._entries.pop("mine", None)


def masked_in_float32(delta_BT):
    ratio_BT = delta_BT.exp()
    return ratio_BT if delta_BT.dtype == torch.float64 else ratio_BT.clamp(max=10.0)


def forgets_the_gradient(delta_BT):
    """The whole prefix in its value, the last 8 tokens in its gradient."""
    recent_BT = forgets_after_eight(delta_BT).log()
    return (recent_BT + (delta_BT.cumsum(-1) - recent_BT).detach()).exp()


CORRECTIONS_THAT_LIE = {
    "capped far away": (lambda delta: delta.exp().clamp(max=1e9), "token", {}, "the logarithm of its ratio at token"),
    "capped in float32": (masked_in_float32, "token", {}, "in float32"),
    "forgets the gradient": (forgets_the_gradient, "prefix", {}, "has the derivative 0 by the log-ratio of token"),
    "detached after all": (lambda delta: delta.detach().exp(), "token", {}, "has the derivative 0"),
    "not detached": (torch.exp, "token", {"detached": True}, "has the derivative 1"),
    "its own ratio too": (lambda delta: delta.cumsum(-1).exp(), "prefix", {"own": False}, "the logarithm of its ratio"),
    "ignores the window": (lambda delta, window=None: delta.cumsum(-1).exp(), "prefix", {}, "scope prefix (window 5)"),
}


@pytest.mark.parametrize("lie", CORRECTIONS_THAT_LIE)
def test_a_correction_that_is_not_the_ratio_it_declares_is_caught(lie):
    fn, scope, facts, sentence = CORRECTIONS_THAT_LIE[lie]
    assert sentence in failure_of_correction(fn, scope, **facts)


def test_a_correction_without_a_scope_or_of_another_shape_is_refused():
    with pytest.raises(UserError, match="'mine': scope: got 'prefx'; allowed: none, token, prefix, sequence; did you"):
        failure_of_correction(torch.exp, "prefx")
    CORRECTIONS._entries.pop("mine", None)
    with pytest.raises(UserError, match="correction 'mine' must return a tensor of shape"):
        failure_of_correction(lambda delta: delta.sum(), "token")


def test_built_in_parts_keep_what_they_declare_for_any_seed():
    estimators = {e.name: [] for e in ESTIMATORS if e.origin.startswith("kl_comedy.")}
    corrections = [e.name for e in CORRECTIONS if e.origin.startswith("kl_comedy.")]
    assert check_parts(estimators, corrections, seed=secrets.randbelow(2**31))[0] == []
