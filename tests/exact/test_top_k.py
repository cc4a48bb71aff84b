"""Top-k KL terms, by enumeration in float64: the sampled tail is exact in every regime, the other forms are biased."""

import math

import pytest
import torch

from kl_comedy.errors import UserError
from kl_comedy.kl import REGIMES, KLTerm, claimed_target, kl_surrogate
from kl_comedy.kl.estimators import TOP_K_FORMS, TopK, TopTokens
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.kl.oracle.certificate import certify
from kl_comedy.kl.oracle.part_claims import check_estimator
from kl_comedy.registry import ESTIMATORS

TREE = Tree.build(vocabulary=6, length=3)


def term(form="sampled_tail", k=2, tokens="policy", **fields):
    return KLTerm("top_k", options={"form": form, "k": k, "tokens": tokens}, **fields)


def bias(where, candidate, target):
    return expected_gradient(where, [candidate]).relative_bias(target_gradient(where, target))


INSTANCES = [
    InstanceSettings(regime=regime, seed=seed, parameters=parameters, distance=distance)
    for regime in REGIMES
    for seed, parameters, distance in ((0, None, 0.5), (1, 5, 4.0))
]


@pytest.fixture(scope="module", params=INSTANCES, ids=lambda settings: f"{settings.regime} at {settings.distance}")
def where(request):
    """An instance in each regime, near the reference and far from it."""
    return Instance.random(TREE, request.param)


@pytest.mark.parametrize("tokens", ["policy", "reference"])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("fields", "target"),
    [
        ({"placement": "loss"}, "token_reverse"),
        ({"placement": "loss", "correction": "prefix_previous"}, "sequence_reverse"),
        ({"correction": "prefix_previous"}, "sequence_reverse"),
    ],
    ids=["in loss", "per decision", "in reward"],
)
def test_the_sampled_tail_is_unbiased_for_any_k_and_any_choice_of_tokens(where, k, tokens, fields, target):
    assert bias(where, term(k=k, tokens=tokens, **fields), target) < 1e-10


@pytest.mark.parametrize(("regime", "target"), [("on_policy", "token_reverse"), ("off_policy", None), ("mixed", None)])
def test_a_tail_without_the_samplers_ratio_is_unbiased_on_policy_only(regime, target):
    (certificate,) = certify("x", [term("unweighted_tail", placement="loss")], regimes=[regime])
    assert certificate.target == target
    assert certificate.claimed == target


BIASED_FORMS = [form for form in TOP_K_FORMS if form not in ("sampled_tail", "unweighted_tail")]


@pytest.mark.parametrize("tokens", ["policy", "reference"])
@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize("form", BIASED_FORMS)
def test_every_other_form_is_biased_and_claims_nothing(form, regime, tokens):
    (certificate,) = certify("x", [term(form, tokens=tokens, placement="loss")], regimes=[regime])
    assert certificate.target is None
    assert certificate.claimed is None
    assert certificate.relative_bias["token_reverse"] > 0.1


class Categorical:
    """A policy p, a reference q and a sampler mu over 6 tokens, of which the first k are the top tokens."""

    logp_V, ref_V, mu_V = torch.randn(
        3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).log_softmax(-1)
    p_V = logp_V.exp()
    q_V = ref_V.exp()
    log_ratio_V = logp_V - ref_V
    # Sums over the two top tokens.
    head = (p_V * log_ratio_V)[:2].sum()
    mass_p = p_V[:2].sum()
    mass_q = q_V[:2].sum()

    @classmethod
    def value(cls, form, token, k=2):
        """The estimate where ``token`` was sampled."""
        top = TopTokens(cls.logp_V[None, None, :k], cls.ref_V[None, None, :k], torch.tensor([[token < k]]))
        surrogate_BT = kl_surrogate(
            term(form, k, placement="loss"),
            logp_BT=cls.logp_V[token].reshape(1, 1),
            ref_logp_BT=cls.ref_V[token].reshape(1, 1),
            behaviour_logp_BT=cls.mu_V[token].reshape(1, 1),
            mask_BT=torch.tensor([[True]]),
            top=top,
        )
        return float(surrogate_BT)


INSIDE = 1  # one of the two top tokens
OUTSIDE = 4
C = Categorical


@pytest.mark.parametrize("token", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("truncated", C.head),
        ("generalized", C.head - C.mass_p + C.mass_q),
        ("renormalized", C.head / C.mass_p - (C.mass_p / C.mass_q).log()),
        ("bucket", C.head + (1 - C.mass_p) * ((1 - C.mass_p) / (1 - C.mass_q)).log()),
    ],
    ids=["truncated", "generalized", "renormalized", "bucket"],
)
def test_a_form_without_a_sampled_tail_is_its_formula_whatever_was_sampled(form, expected, token):
    assert C.value(form, token) == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("form", "inside", "tail"),
    [
        ("naive_tail", C.head, C.log_ratio_V[OUTSIDE]),
        (
            "sampled_tail",
            C.head - C.mass_p + C.mass_q,
            (C.p_V * C.log_ratio_V - C.p_V + C.q_V)[OUTSIDE] / C.mu_V.exp()[OUTSIDE],
        ),
    ],
    ids=["naive_tail", "sampled_tail"],
)
def test_a_form_with_a_sampled_tail_adds_it_where_the_token_is_outside(form, inside, tail):
    assert C.value(form, INSIDE) == pytest.approx(float(inside))
    assert C.value(form, OUTSIDE) == pytest.approx(float(inside + tail))


@pytest.mark.parametrize("form", ["truncated", "generalized", "renormalized", "sampled_tail"])
def test_over_the_whole_vocabulary_a_form_is_the_exact_kl(form):
    assert C.value(form, INSIDE, k=6) == pytest.approx(float((C.p_V * C.log_ratio_V).sum()))


def test_false_claims_of_a_top_k_estimator_are_found():
    """The options reach a form whose tail has not the sampler's ratio."""
    fn = ESTIMATORS.get("top_k").fn
    options = ESTIMATORS.get("top_k").facts["options"]
    register = ESTIMATORS.register(
        "mine",
        source="a test",
        summary="planted",
        claims=("value:reverse", "pathwise:token_reverse"),
        needs="top_k",
        options=options,
    )
    try:
        register(lambda at, k=4, tokens="policy", form="sampled_tail": fn(at, k=k, tokens=tokens, form=form))
        value, slope = check_estimator(ESTIMATORS.get("mine")).failures
        assert "claims value:reverse with form=unweighted_tail, and off-policy its mean is not the reverse KL" in value
        assert "the mean of its gradient is not that of token_reverse" in slope
    finally:
        ESTIMATORS._entries.pop("mine", None)


@pytest.mark.parametrize(
    ("one", "other"),
    [(-0.1, -200.0), (-1.0, -1.0), (-1.0, -1.0001), (-1.0, -1.0000001)],
    ids=["200 nats apart", "equal", "1e-4 apart", "1e-7 apart"],
)
@pytest.mark.parametrize("policy_is", ["one", "other"])
def test_float32_neither_overflows_nor_loses_small_ratios(one, other, policy_is):
    if policy_is == "one":
        policy, reference = one, other
    else:
        policy, reference = other, one
    logp_BT = torch.tensor([[policy]], requires_grad=True)
    ref_BT = torch.tensor([[reference]])
    argument = TopK(
        top=TopTokens(logp_BT[..., None], ref_BT[..., None], torch.tensor([[True]])),
        logp_BT=logp_BT,
        ref_logp_BT=ref_BT,
        behaviour_logp_BT=ref_BT,
    )
    value_BT = ESTIMATORS.get("top_k").fn(argument, k=1)
    (slope_BT,) = torch.autograd.grad(value_BT.sum(), logp_BT)
    assert torch.isfinite(value_BT).all()
    assert float(value_BT.detach()) >= 0
    # d/d log p of p (log p - log q) - p + q
    wanted_BT = logp_BT.detach().exp() * (logp_BT.detach() - ref_BT)
    assert float(slope_BT) == pytest.approx(float(wanted_BT), rel=1e-3, abs=1e-7)


def value_and_gradients(form, tail, dtype):
    """Of the same float32 numbers in ``dtype``: 3 top tokens, and a token outside them that was sampled.

    ``tail`` is the policy's probability outside the top tokens; the reference's is three times that.
    """
    shares_K = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    policy_K = (1 - tail) * shares_K
    reference_K = (1 - 3 * tail) * shares_K.roll(1)
    # Rounded to float32 first, so that both dtypes start from the same numbers.
    logp_BTK = policy_K.log().float().to(dtype)[None, None].requires_grad_(True)
    ref_BTK = reference_K.log().float().to(dtype)[None, None]
    logp_BT = torch.tensor([[tail]]).log().to(dtype).requires_grad_(True)
    argument = TopK(
        top=TopTokens(logp_BTK, ref_BTK, torch.tensor([[False]])),
        logp_BT=logp_BT,
        ref_logp_BT=logp_BT.detach() + 0.5,
        behaviour_logp_BT=logp_BT.detach() - 0.2,
    )
    value_BT = ESTIMATORS.get("top_k").fn(argument, k=3, form=form)
    assert value_BT.dtype == dtype
    gradients = torch.autograd.grad(value_BT.sum(), [logp_BTK, logp_BT], allow_unused=True)
    # Forms without a sampled tail do not read the sampled token's log-prob.
    return [value_BT.detach(), *[gradient for gradient in gradients if gradient is not None]]


@pytest.mark.parametrize("form", TOP_K_FORMS)
@pytest.mark.parametrize("tail", [1e-2, 1e-5, 2.5e-7, 1.2e-7])
def test_every_form_in_float32_is_what_the_same_numbers_are_in_float64(form, tail):
    """Also where little is outside the top tokens: a tail that is 1 less a sum in float32 is off by half of itself."""
    in_float64 = value_and_gradients(form, tail, torch.float64)
    in_float32 = value_and_gradients(form, tail, torch.float32)
    for wide, narrow in zip(in_float64, in_float32, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-6 * float(wide.abs().max()))


@pytest.mark.parametrize("correction", ["token", "token_detached", "prefix", "sequence"])
def test_a_ratio_of_the_own_token_is_refused(correction):
    with pytest.raises(UserError, match="has the ratio of its own token in its tail; use none or prefix_previous"):
        term(correction=correction)


def test_a_misspelled_form_names_the_nearest():
    with pytest.raises(UserError, match=r"options.form: got 'sampled'; did you mean 'sampled_tail'"):
        term("sampled")


@pytest.mark.parametrize(("k", "allowed"), [(0, "at least 1"), (2.5, "a whole number"), ("many", "a number")])
def test_an_impossible_number_of_tokens_is_refused(k, allowed):
    with pytest.raises(UserError, match=f"options.k: got .*allowed: {allowed}"):
        term(k=k)


def test_the_defaults_of_top_k_claim_a_target_on_a_mixture():
    assert claimed_target(KLTerm("top_k", placement="loss"), "mixed") == "token_reverse"


@pytest.mark.parametrize("rest_p", [1e-3, 2e-7, 1e-7, 3e-8, 1e-10])
@pytest.mark.parametrize("rest_q", [1e-3, 2e-6, 2e-7, 1e-7, 3e-8, 1e-10])
def test_a_bucket_below_a_ten_millionth_counts_as_one(rest_p, rest_q):
    """Two tokens in S; the mass of all others is counted as it is down to 1e-7, and below as 1e-7."""
    p = [0.75 * (1 - rest_p), 0.25 * (1 - rest_p)]
    q = [0.5 * (1 - rest_q), 0.5 * (1 - rest_q)]
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected += max(rest_p, 1e-7) * math.log(max(rest_p, 1e-7) / max(rest_q, 1e-7))
    logp = torch.tensor([[p]], dtype=torch.float64).log()
    ref_logp = torch.tensor([[q]], dtype=torch.float64).log()
    top = TopTokens(logp, ref_logp, torch.ones(1, 1, dtype=torch.bool))
    argument = TopK(top=top, logp_BT=logp[..., 0], ref_logp_BT=ref_logp[..., 0], behaviour_logp_BT=logp[..., 0])
    value = ESTIMATORS.get("top_k").fn(argument, form="bucket")
    assert float(value) == pytest.approx(expected, rel=1e-9, abs=1e-13)
