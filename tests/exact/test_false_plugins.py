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
from kl_comedy.kl.oracle import Tree, exact_moments_by_loss, target_gradient, terms_loss
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


def random_seed():
    """Another one in every run: no plugin can foresee what is drawn."""
    return secrets.randbelow(2**31)


def register_estimator(fn, claims=(), *, needs="log_ratio", **facts):
    ESTIMATORS.register("mine", source="this test", summary="planted", claims=claims, needs=needs, **facts)(fn)


def register_correction(fn, scope, *, weights="cost", detached=False, **facts):
    register = CORRECTIONS.register(
        "mine", source="this test", summary="planted", scope=scope, weights=weights, detached=detached, **facts
    )
    register(fn)


def failures_of(fn, claims=(), **facts):
    register_estimator(fn, claims, **facts)
    return check_estimator(ESTIMATORS.get("mine"), seed=random_seed()).failures


def failure_of_correction(fn, scope, **facts):
    register_correction(fn, scope, **facts)
    return " ".join(check_correction(CORRECTIONS.get("mine"), seed=random_seed()).failures)


# --- the five -------------------------------------------------------------------------------------------------------
def true_at_its_default(log_ratio, lam=0.5):
    return log_ratio + 0.5 * torch.expm1(-log_ratio) + (lam - 0.5) * log_ratio.square()


def clamped_in_float32(log_ratio):
    if log_ratio.dtype == torch.float64:
        return k3(log_ratio)
    return k3(log_ratio.clamp(-1, 1))


def negative_far_away(log_ratio):
    return torch.where(log_ratio > 8, -log_ratio, log_ratio.square())


def zero_in_a_band(log_ratio):
    return torch.where((log_ratio > 18) & (log_ratio < 40), 0.0 * log_ratio, k3(log_ratio))


def forgets_after_eight(delta_BT):
    total_BT = delta_BT.cumsum(-1)
    return (total_BT - torch.nn.functional.pad(total_BT, (8, 0))[..., : total_BT.shape[-1]]).exp()


@pytest.mark.parametrize(
    ("fn", "claims", "sentence"),
    [
        (true_at_its_default, ("value:reverse",), "claims value:reverse with lam="),
        (clamped_in_float32, K3, "in float32, and "),
        (negative_far_away, ("nonnegative",), "claims nonnegative, and is -100 at a log-ratio of 100 nats"),
        (zero_in_a_band, K3, "claims value:reverse, and it is 0 at a log-ratio of 18"),
    ],
    ids=["options", "dtype", "range", "band"],
)
def test_an_estimator_that_lies_out_of_sight_is_caught(fn, claims, sentence):
    assert sentence in "\n".join(failures_of(fn, claims))


def test_a_prefix_that_forgets_tokens_beyond_the_longest_enumerated_is_caught():
    sentence = failure_of_correction(forgets_after_eight, "prefix")
    assert "declares scope prefix, and the logarithm of its ratio at token" in sentence
    assert "of 32 tokens" in sentence


# --- those that know the certifier: right in its list of log-ratios, and in trees of 3 tokens or near the reference --
DIALOGUES = Tree.build(vocabulary=TREE.vocabulary, length=TREE.length + 1)
POSSIBLE_DIALOGUES = 48
"""Of its 63 completions: a tool's reply does not end one."""
FIXED_SIZES = (TREE.completions, LONG.completions, POSSIBLE_DIALOGUES)


def clamped_in_batches(log_ratio):
    """k1 in one long list, and near the reference."""
    if log_ratio.dim() == 2:
        return log_ratio.clamp(-20, 20)
    return log_ratio


def centred_in_long_rows(log_ratio):
    """k1 in one long list, and in completions of the lengths that are always enumerated."""
    if log_ratio.dim() == 1 or log_ratio.shape[-1] in (TREE.length, DIALOGUES.length, LONG.length):
        return log_ratio
    return log_ratio - log_ratio.mean(-1, keepdim=True)


def right_in_the_fixed_trees(log_ratio):
    """k1 in one long list, and in batches of as many completions as the fixed trees have."""
    if log_ratio.dim() == 1 or len(log_ratio) in FIXED_SIZES:
        return log_ratio
    return 0 * log_ratio


def half_without_gradient(log_ratio):
    """k1 while gradients are recorded; training computes costs in the reward without."""
    if log_ratio.requires_grad:
        return log_ratio
    return 0.5 * log_ratio


def normalized_over_the_batch(delta_BT):
    """The prefix ratio in the trees that are always enumerated, self-normalized elsewhere."""
    ratio_BT = delta_BT.cumsum(-1).exp()
    if len(delta_BT) in FIXED_SIZES or len(delta_BT) > 1000:
        return ratio_BT
    return ratio_BT / ratio_BT.mean(0, keepdim=True)


SEEN_IN_DRAWN_SETTINGS = (clamped_in_batches, centred_in_long_rows, right_in_the_fixed_trees)
# The enumeration records gradients, so that no setting shows a plugin that is wrong only without them.
INFORMED = (*SEEN_IN_DRAWN_SETTINGS, half_without_gradient)
K1 = ("value:reverse", "pathwise:zero")


@pytest.mark.parametrize("lie", INFORMED)
def test_an_estimator_that_knows_where_it_is_looked_at_is_caught_in_other_batches(lie):
    assert "in a batch of shape" in "\n".join(failures_of(lie, K1))


@pytest.mark.parametrize("lie", INFORMED)
def test_an_estimator_that_knows_the_fixed_instances_passes_in_them(lie):
    register_estimator(lie, K1)
    (certificate,) = certify("x", (KLTerm("mine"),), regimes=("on_policy",), seed=None)
    assert certificate.claimed == "sequence_reverse"
    assert certificate.claim_holds


@pytest.mark.parametrize("lie", SEEN_IN_DRAWN_SETTINGS)
def test_an_estimator_that_knows_the_fixed_instances_is_caught_in_drawn_settings(lie):
    register_estimator(lie, K1)
    (certificate,) = certify("x", (KLTerm("mine"),), regimes=("on_policy",), seed=3)
    assert not certificate.claim_holds
    assert certificate.worst_error > 1e-3
    assert "vocabulary" in certificate.worst_setting


def test_a_correction_that_depends_on_the_other_completions_is_caught():
    assert "completions stand alone" in failure_of_correction(normalized_over_the_batch, "prefix")


def test_drawn_settings_show_a_correction_that_depends_on_the_other_completions():
    register_correction(normalized_over_the_batch, "prefix")
    term = KLTerm("k3", placement="loss", correction="mine")
    for certificate in certify("x", (term,)):
        assert certificate.claim_holds, f"in the fixed instances, {certificate.regime}"
    for certificate in certify("x", (term,), regimes=("off_policy", "mixed"), seed=1):
        assert not certificate.claim_holds, f"in drawn settings, {certificate.regime}"


def test_a_policy_loss_that_clips_large_advantages_is_caught(monkeypatch):
    """Rewards of the fixed instances are 0 or 1, those of drawn settings have a scale."""
    POLICY_LOSSES.load()
    monkeypatch.setattr(POLICY_LOSSES, "_entries", dict(POLICY_LOSSES._entries))

    @POLICY_LOSSES.register("mine", source="x", summary="x", claims=("on_policy",), scope="none")
    def mine(logp_BT, behaviour_logp_BT, advantage_BT):
        return -advantage_BT.clamp(-2, 2) * logp_BT

    (fixed,) = certify_policy("x", PolicyTerm(loss="mine"), regimes=("on_policy",))
    (drawn,) = certify_policy("x", PolicyTerm(loss="mine"), regimes=("on_policy",), seed=2)
    assert fixed.exact
    assert not drawn.claim_holds
    assert "reward_scale" in drawn.missed_in


def zero_between_28_and_30(log_ratio):
    """k1 in one long list; elsewhere zero in a narrow band."""
    in_the_band = (log_ratio > 28) & (log_ratio < 30) & (log_ratio.dim() == 2)
    return torch.where(in_the_band, 0.0 * log_ratio, log_ratio)


def test_the_search_finds_a_setting_that_draws_missed():
    """The settings of one seed may have no log-ratio in the band; the search looks for one."""
    register_estimator(zero_between_28_and_30, K1)
    terms = (KLTerm("mine"),)
    for seed in range(50):
        (certificate,) = certify("x", terms, regimes=("on_policy",), seed=seed)
        if certificate.claim_holds:
            break
    assert certificate.claim_holds, "no seed missed the band"
    (searched,) = certify("x", terms, regimes=("on_policy",), seed=seed, search_seconds=30)
    assert not searched.claim_holds
    assert searched.worst_error > 1e-6


BUILT_IN_ESTIMATORS = [entry.name for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]
BUILT_IN_CORRECTIONS = [entry.name for entry in CORRECTIONS if entry.origin.startswith("kl_comedy.")]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("seed", [0, 1])
def test_claims_of_built_in_terms_hold_in_drawn_settings(seed, regime):
    claimed = {}
    for term in all_terms(BUILT_IN_ESTIMATORS, BUILT_IN_CORRECTIONS):
        target = claimed_target(term, regime)
        if target is not None:
            claimed[term] = target

    for setting in drawn_settings(seed):
        drawn = with_targets(setting.instance(regime), setting=setting)
        # One enumeration for all terms.
        moments = exact_moments_by_loss(drawn.instance, {term.label(): terms_loss((term,)) for term in claimed})
        wrong = []
        for term, target in claimed.items():
            target_D = drawn.targets.get(target)
            if target_D is None:
                target_D = target_gradient(drawn.instance, target, term)
            if moments[term.label()].error(target_D) > 1e-6:
                wrong.append(term.label())
        assert wrong == [], setting


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "term"), named_policy_terms(), ids=lambda value: str(value)[:40])
def test_claims_of_built_in_policy_terms_hold_in_drawn_settings(name, term, seed):
    for certificate in certify_policy(name, term, seed=seed):
        assert certificate.claim_holds, certificate.regime


# --- more of their kind ---------------------------------------------------------------------------------------------
def slope_in_a_band(log_ratio):
    """The value of k3 everywhere; in a band without a gradient."""
    value = k3(log_ratio)
    return torch.where((log_ratio > 18) & (log_ratio < 40), value.detach(), value)


@pytest.mark.parametrize("claim", ["value:reverse", "pathwise:token_forward"])
def test_a_value_whose_gradient_is_not_its_own_is_caught(claim):
    (sentence,) = failures_of(slope_in_a_band, (claim,))
    assert f"claims {claim}, and it has the gradient 0 at a log-ratio of 18" in sentence


def test_a_target_that_a_plugin_does_not_claim_is_not_denied():
    register_estimator(lambda log_ratio: 1.0 * log_ratio, ("value:reverse",))
    (line,) = term_warnings(KLTerm("mine"), off_policy=False)
    assert line.endswith("on-policy not claimed: kl-comedy certify computes what it optimizes")


def test_a_penalty_of_the_wrong_sign_points_away():
    register_estimator(lambda log_ratio: -log_ratio)
    (certificate,) = certify("mine", (KLTerm("mine"),), regimes=("on_policy",))
    assert certificate.strength == pytest.approx(-1)
    assert certificate.verdict.startswith("points away")


def test_what_is_wrong_where_the_policy_never_goes_is_wrong():
    """At -30 nats k1 weighs 1e-13 in a mean over the policy; a stale sampler may draw it."""

    def zero_far_below(log_ratio):
        in_the_band = (log_ratio < -25) & (log_ratio > -30)
        return torch.where(in_the_band, 0.0 * log_ratio, log_ratio)

    (sentence,) = failures_of(zero_far_below, ("value:reverse",))
    assert "at a log-ratio of -25" in sentence


def k2_with_a_shift(log_ratio, shift=0.3):
    """A constant in the slope has no effect: the score has mean zero."""
    return 0.5 * (log_ratio - shift).square()


def k3_without_expm1(log_ratio):
    """Less stable, and right."""
    return (-log_ratio).exp() - 1 + log_ratio


def forward_kl(log_ratio):
    return -log_ratio * (-log_ratio).exp()


def k1_with_twice_the_control_variate(log_ratio, lam=2.0):
    return k1(log_ratio) - lam * torch.expm1(-log_ratio)


@pytest.mark.parametrize(
    ("fn", "claims"),
    [
        (k2_with_a_shift, ("pathwise:token_reverse", "nonnegative")),
        (k3_without_expm1, ("value:reverse", "pathwise:token_forward")),
        (forward_kl, ("value:forward",)),
        (k1_with_twice_the_control_variate, ("value:reverse",)),
    ],
)
def test_equal_claims_of_other_formulas_hold(fn, claims):
    assert failures_of(fn, claims) == []


def test_claims_of_estimators_that_read_an_exact_kl_hold():
    assert failures_of(lambda kl: 1.0 * kl, ("value:forward", "nonnegative"), needs="exact_forward") == []


def test_a_detached_exact_kl_has_no_gradient():
    assert failures_of(lambda kl: kl.detach(), ("pathwise:zero",), needs="exact_reverse") == []


def test_an_exact_estimator_is_held_to_its_direction():
    (sentence,) = failures_of(lambda kl: kl, ("value:forward",), needs="exact_reverse")
    assert sentence.endswith("claims value:forward, and it reads the exact reverse KL")


def test_an_exact_estimator_is_held_to_its_slope():
    (sentence,) = failures_of(lambda kl: 0.5 * kl, ("pathwise:token_reverse",), needs="exact_reverse")
    assert "it has the gradient 0.5 at an exact KL of" in sentence
    assert "the claim needs 1" in sentence


# --- options --------------------------------------------------------------------------------------------------------
def squared_over_width(log_ratio, width=1.0):
    return (log_ratio / width).square()


ABOVE_ZERO = {"width": {"above": 0}}


def test_an_option_without_a_range_is_checked_at_zero():
    with pytest.raises(UserError, match=r"'mine' with width=0 is inf at .* declare what the option may be"):
        failures_of(squared_over_width, ("nonnegative",))


def test_an_option_is_checked_in_the_range_it_declares():
    assert failures_of(squared_over_width, ("nonnegative",), options=ABOVE_ZERO) == []


def test_no_value_outside_the_declared_range_is_taken():
    register_estimator(squared_over_width, options=ABOVE_ZERO)
    with pytest.raises(UserError, match=r"options.width: got 0.0; allowed: above 0"):
        KLTerm("mine", options={"width": 0.0})
    assert KLTerm("mine", options={"width": 0.5}).options == {"width": 0.5}


def test_the_check_says_what_it_covered():
    register_estimator(squared_over_width, options=ABOVE_ZERO)
    failures, covered = check_parts({"mine": [{"width": 0.25}], "k3": []}, ["prefix"], seed=3)
    assert failures == []
    assert covered.seed == 3
    widths = covered.estimators["mine"].options["width"]
    assert {0.25, 0.1, 1.0, 10.0} <= set(widths), "the one that is used, and those of every option"
    assert min(widths) > 0
    # Below -88.72 nats exp(-log_ratio) overflows in float32.
    assert covered.estimators["k3"].float32 == (pytest.approx(-88.72, abs=0.05), 100.0)
    assert covered.corrections["prefix"].tokens[:3] == [1, 8, 32]


@pytest.mark.parametrize(
    ("options", "fn", "message"),
    [
        ({"wdth": {}}, lambda x, width=1.0: x, "options.wdth: no such key .* did you mean 'width'"),
        ({"width": {"min": 0}}, lambda x, width=1.0: x, "options.width.min: no such key .* minimum"),
        ({}, lambda x, width: x, "options.width: got .* allowed: a number as the default"),
    ],
    ids=["no such option", "no such bound", "no default"],
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
    ids=["raises", "changes its argument"],
)
def test_a_correction_that_raises_or_changes_its_argument_is_named(fn, message):
    with pytest.raises(UserError, match=message):
        failure_of_correction(fn, "token")


@pytest.mark.parametrize(("needs", "options"), [("top_k", "k"), ("exact_mixture", "share")])
def test_an_estimator_without_the_options_that_make_its_argument_is_refused(needs, options):
    with pytest.raises(UserError, match=f"needs='{needs}' is for an estimator with the options .*'{options}'"):
        failures_of(lambda argument: argument, needs=needs)


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ({"onpolicy": {"form": (1,)}}, "claims_need.onpolicy: no such key .* did you mean 'on_policy'"),
        ({"on_policy": {"from": (1,)}}, "claims_need.on_policy.from: no such key .* did you mean 'form'"),
    ],
    ids=["regime", "option"],
)
def test_claims_need_names_regimes_and_options_that_exist(need, message):
    with pytest.raises(UserError, match=message):
        failures_of(lambda x, form=1.0: x, ("value:reverse",), claims_need=need)


def capped_in_float32(delta_BT):
    ratio_BT = delta_BT.exp()
    if delta_BT.dtype == torch.float64:
        return ratio_BT
    return ratio_BT.clamp(max=10.0)


def forgets_the_gradient(delta_BT):
    """The whole prefix in its value, the last 8 tokens in its gradient."""
    recent_BT = forgets_after_eight(delta_BT).log()
    return (recent_BT + (delta_BT.cumsum(-1) - recent_BT).detach()).exp()


CORRECTIONS_THAT_LIE = {
    "capped far away": (lambda delta: delta.exp().clamp(max=1e9), "token", {}, "the logarithm of its ratio at token"),
    "capped in float32": (capped_in_float32, "token", {}, "in float32"),
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


def test_a_correction_with_an_unknown_scope_is_refused():
    with pytest.raises(UserError, match="'mine': scope: got 'prefx'; did you mean 'prefix'"):
        failure_of_correction(torch.exp, "prefx")


def test_a_correction_of_another_shape_is_refused():
    with pytest.raises(UserError, match="correction 'mine' must return a tensor of shape"):
        failure_of_correction(lambda delta: delta.sum(), "token")


def test_built_in_parts_keep_what_they_declare_for_any_seed():
    estimators = {name: [] for name in BUILT_IN_ESTIMATORS}
    failures, _ = check_parts(estimators, BUILT_IN_CORRECTIONS, seed=random_seed())
    assert failures == []
