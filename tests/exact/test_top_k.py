"""Top-k KL terms, by enumeration in float64: the sampled tail is exact in every regime, the other forms are biased."""

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


@pytest.mark.parametrize("regime", REGIMES)
def test_the_sampled_tail_is_unbiased_for_any_k_and_any_choice_of_tokens(regime):
    for seed, parameters, distance in ((0, None, 0.5), (1, 5, 4.0)):
        where = Instance.random(
            TREE, InstanceSettings(regime=regime, seed=seed, parameters=parameters, distance=distance)
        )
        for k in (1, 2, 3):
            for tokens in ("policy", "reference"):
                in_loss = term(k=k, tokens=tokens, placement="loss")
                per_decision = term(k=k, tokens=tokens, placement="loss", correction="prefix_previous")
                in_reward = term(k=k, tokens=tokens, correction="prefix_previous")
                assert bias(where, in_loss, "token_reverse") < 1e-10
                assert bias(where, per_decision, "sequence_reverse") < 1e-10
                assert bias(where, in_reward, "sequence_reverse") < 1e-10


def test_a_tail_without_the_samplers_ratio_is_unbiased_on_policy_only():
    for regime in REGIMES:
        (certificate,) = certify("x", [term("unweighted_tail", placement="loss")], regimes=[regime])
        assert certificate.target == certificate.claimed == ("token_reverse" if regime == "on_policy" else None)


@pytest.mark.parametrize("form", [form for form in TOP_K_FORMS if form not in ("sampled_tail", "unweighted_tail")])
def test_every_other_form_is_biased_and_claims_nothing(form):
    for regime in ("on_policy", "off_policy"):
        for tokens in ("policy", "reference"):
            (certificate,) = certify("x", [term(form, tokens=tokens, placement="loss")], regimes=[regime])
            assert certificate.target is certificate.claimed is None
            assert certificate.relative_bias["token_reverse"] > 0.1


def test_forms_on_one_categorical_distribution():
    """Each formula written down again, with p, q over 6 tokens and S = {0, 1}; the whole vocabulary is the exact KL."""
    generator = torch.Generator().manual_seed(0)
    logp_V, ref_V, mu_V = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    p, q, mu, log_ratio = logp_V.exp(), ref_V.exp(), mu_V.exp(), logp_V - ref_V
    head, mass_p, mass_q = (p * log_ratio)[:2].sum(), p[:2].sum(), q[:2].sum()

    def value(form, token, k=2):
        arguments = {"logp_BT": logp_V, "ref_logp_BT": ref_V, "behaviour_logp_BT": mu_V}
        top = TopTokens(logp_V[None, None, :k], ref_V[None, None, :k], torch.tensor([[token < k]]))
        arguments = {name: tensor[token].reshape(1, 1) for name, tensor in arguments.items()}
        surrogate = kl_surrogate(term(form, k, placement="loss"), **arguments, mask_BT=torch.tensor([[True]]), top=top)
        return float(surrogate)

    inside, outside = 1, 4
    expected = {
        "truncated": [head] * 2,
        "generalized": [head - mass_p + mass_q] * 2,
        "renormalized": [head / mass_p - (mass_p / mass_q).log()] * 2,
        "bucket": [head + (1 - mass_p) * ((1 - mass_p) / (1 - mass_q)).log()] * 2,
        "naive_tail": [head, head + log_ratio[outside]],
        "sampled_tail": [head - mass_p + mass_q] * 2,
    }
    expected["sampled_tail"][1] = expected["sampled_tail"][0] + (p * log_ratio - p + q)[outside] / mu[outside]
    for form, values in expected.items():
        assert [value(form, inside), value(form, outside)] == pytest.approx([float(each) for each in values]), form
    for form in ("truncated", "generalized", "renormalized", "sampled_tail"):
        assert value(form, inside, k=6) == pytest.approx(float((p * log_ratio).sum())), form


def test_false_claims_of_a_top_k_estimator_are_found():
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


def test_float32_neither_overflows_nor_loses_small_ratios():
    top = ESTIMATORS.get("top_k").fn
    for ref in (-200.0, -1.0, -1.0001, -1.0000001):
        logp = torch.tensor([[-1.0 if ref > -100 else -0.1]], requires_grad=True)
        ref_BT = torch.tensor([[ref]])
        for a, b in ((logp, ref_BT), (ref_BT.clone().requires_grad_(), logp.detach())):
            at = TopK(
                top=TopTokens(a[..., None], b[..., None], torch.tensor([[True]])),
                logp_BT=a,
                ref_logp_BT=b,
                behaviour_logp_BT=b,
            )
            value = top(at, k=1)
            (slope,) = torch.autograd.grad(value.sum(), a)
            p = a.detach().exp()
            assert torch.isfinite(value).all() and float(value.detach()) >= 0
            assert float(slope) == pytest.approx(float(p * (a.detach() - b)), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("form", TOP_K_FORMS)
@pytest.mark.parametrize("tail", [1e-2, 1e-5, 2.5e-7, 1.2e-7])
def test_every_form_in_float32_is_what_the_same_numbers_are_in_float64(form, tail):
    """Also where little is outside the top tokens: a tail that is 1 less a sum in float32 is off by half of itself."""
    rest = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logp_K, ref_K = ((1 - mass) * rest.roll(shift) for mass, shift in ((tail, 0), (3 * tail, 1)))
    inside = torch.tensor([[False]])
    results = []
    for dtype in (torch.float64, torch.float32):
        logp_BTK, ref_BTK = (values.log().float().to(dtype)[None, None] for values in (logp_K, ref_K))
        drawn_BT = torch.tensor([[tail]]).log().to(dtype)
        leaves = [logp_BTK.clone().requires_grad_(True), drawn_BT.clone().requires_grad_(True)]
        at = TopK(
            top=TopTokens(leaves[0], ref_BTK, inside),
            logp_BT=leaves[1],
            ref_logp_BT=drawn_BT + 0.5,
            behaviour_logp_BT=drawn_BT - 0.2,
        )
        value = ESTIMATORS.get("top_k").fn(at, k=3, form=form)
        assert value.dtype == dtype
        gradients = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        results.append([value.detach(), *(grad for grad in gradients if grad is not None)])
    for wide, narrow in zip(*results, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-6 * float(wide.abs().max()))


def test_impossible_and_misspelled_top_k_terms_name_the_reason():
    for correction in ("token", "token_detached", "prefix", "sequence"):
        with pytest.raises(UserError, match="has the ratio of its own token in its tail; use none or prefix_previous"):
            term(correction=correction)
    with pytest.raises(UserError, match=r"options.form: got 'sampled'; allowed: .*did you mean 'sampled_tail'"):
        term("sampled")
    for k, allowed in ((0, "at least 1"), (2.5, "a whole number"), ("many", "a number")):
        with pytest.raises(UserError, match=f"options.k: got .*allowed: {allowed}"):
            term(k=k)
    assert claimed_target(KLTerm("top_k", placement="loss"), "mixed") == "token_reverse"
