"""conformance.check: right losses pass, planted bugs fail with a sentence that names them."""

import pytest
import torch

from kl_comedy.conformance import check
from kl_comedy.errors import UserError


# The example of docs/conformance.md, ten lines in a test of any trainer.
def my_kl_loss(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def test_my_kl_loss_optimizes_the_reverse_kl():
    check(my_kl_loss, claims="token_reverse").assert_ok()


# --- planted bugs ---------------------------------------------------------------------------------------------------
def k2_with_the_gradient_of_k1(logp, ref_logp, mask):
    log_ratio = logp - ref_logp
    return ((0.5 * log_ratio**2).detach() + log_ratio - log_ratio.detach()) * mask


def without_gradient(logp, ref_logp, mask):
    with torch.no_grad():
        kl = 0.5 * (logp - ref_logp) ** 2
    return kl * mask


def detached_top_k_in_the_advantage(logp, logp_full, ref_logp_full, mask):
    """miles #2362: the KL of the top-k tokens at each prefix, detached, subtracted from the advantage."""
    top, index = logp_full.topk(2, -1)
    kl = (top.exp() * (top - ref_logp_full.gather(-1, index))).sum(-1).detach()
    return kl * logp * mask


BUGS = {
    "k2 with the gradient of k1": (k2_with_the_gradient_of_k1, "zero: zero expected gradient", "only noise"),
    "no_grad": (without_gradient, "zero: no gradient reaches the policy", "no_grad"),
    "detached top-k": (detached_top_k_in_the_advantage, "zero: zero expected gradient", "only noise"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_fail_and_are_named(bug):
    loss, *words = BUGS[bug]
    report = check(loss, claims="token_reverse", regimes=("on_policy",))
    with pytest.raises(AssertionError, match="does not optimize what it claims") as error:
        report.assert_ok()
    line = str(error.value).splitlines()[1]
    assert line.startswith("FAILED on_policy") and all(word in line for word in words), line
    assert report.findings[0].target == "zero" and line.endswith("[claimed: token_reverse]")


# --- right losses, and their coefficients -----------------------------------------------------------------------------
def k3_with_the_token_ratio(logp, ref_logp, behaviour_logp, mask):
    log_ratio = logp - ref_logp
    return 0.04 * (logp - behaviour_logp).exp() * ((-log_ratio).exp() - 1 + log_ratio) * mask


def exact_reverse(logp_full, ref_logp_full, mask):
    return ((logp_full.exp() * (logp_full - ref_logp_full)).sum(-1) * mask).sum(-1)


def k1_in_reward(logp, ref_logp, mask):
    return (((logp - ref_logp) * mask).sum(-1).detach() * (logp * mask).sum(-1)).sum()


def mean_of_k2(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum() / mask.sum()


def clamped_k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp).clamp(-3, 3) ** 2 * mask


def k3_in_float32(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp).float()
    return ((-log_ratio).exp() - 1 + log_ratio) * mask


def test_a_corrected_loss_holds_in_every_regime():
    everywhere = dict.fromkeys(("on_policy", "off_policy", "mixed"), "token_reverse")
    report = check(k3_with_the_token_ratio, claims=everywhere)
    report.assert_ok()
    assert [each.coefficient for each in report.findings] == pytest.approx([0.04] * 3)
    check(exact_reverse, claims=everywhere).assert_ok()


def test_a_loss_that_is_right_on_policy_only_says_so():
    report = check(k1_in_reward, claims={"on_policy": "sequence_reverse", "off_policy": "none"})
    report.assert_ok()
    assert [each.target for each in report.findings] == ["sequence_reverse", None, None]
    assert "off_policy: none: nearest to " in str(report) and "vocabulary 2 to " in str(report)
    with pytest.raises(AssertionError, match="FAILED off_policy"):
        check(k1_in_reward, claims={"off_policy": "sequence_reverse"}).assert_ok()


def test_a_mean_over_tokens_is_undone_where_it_is_declared():
    check(mean_of_k2, claims="token_reverse", reduction="token_mean", regimes=("on_policy",)).assert_ok()
    assert check(mean_of_k2, claims="none", regimes=("on_policy",)).ok  # a mean per completion weights by 1 / length


def test_a_claim_near_the_reference_is_told_from_one_everywhere():
    report = check(clamped_k2, claims="token_reverse", regimes=("on_policy",))
    assert not report.ok and "near the reference only, missed with" in str(report)
    check(clamped_k2, claims="token_reverse", regimes=("on_policy",), near_only=True).assert_ok()


def test_float32_and_a_negative_coefficient():
    check(k3_in_float32, claims="token_forward", regimes=("on_policy",)).assert_ok()
    away = check(lambda logp, ref_logp, mask: -my_kl_loss(logp, ref_logp, mask), claims="none", regimes=("on_policy",))
    assert away.ok


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (my_kl_loss, {"claims": "token_revers"}, "claims: got 'token_revers'; .* did you mean 'token_reverse'"),
        (my_kl_loss, {"claims": {"offpolicy": "zero"}}, "regimes: got 'offpolicy'; .* did you mean 'off_policy'"),
        (my_kl_loss, {"claims": "zero", "reduction": "mean"}, "reduction: got 'mean'; allowed: sum, token_mean"),
        (lambda logp, ref: logp, {"claims": "zero"}, "loss_fn.ref: no such key .* ref_logp"),
        (lambda logp: logp.sum(0), {"claims": "zero"}, r"loss_fn: got \(4,\); allowed: a tensor \[B, T\], \[B\], or a"),
        (lambda logp: 1.0, {"claims": "zero"}, "loss_fn: got 'float'"),
        (lambda logp: logp - logp.mean(), {"claims": "zero"}, "changes with the others in its batch"),
    ],
)
def test_misuse_is_refused_in_one_line(loss, arguments, message):
    with pytest.raises(UserError, match=message):
        check(loss, **arguments)
