"""conformance.check: right losses pass, planted bugs fail with a sentence that names them."""

from pathlib import Path

import pytest
import torch

from kl_comedy.conformance import check
from kl_comedy.errors import UserError


# The example of docs/conformance.md: ten lines in the tests of any trainer.
def my_kl_loss(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def test_my_kl_loss_optimizes_the_reverse_kl():
    check(my_kl_loss, claims="token_reverse").assert_ok()


def test_the_example_of_the_page_runs_as_printed():
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    names = {}
    exec(example, names)
    names["test_my_kl_loss_optimizes_the_reverse_kl"]()


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


@pytest.mark.parametrize(
    ("loss", "verdict", "cause"),
    [
        (k2_with_the_gradient_of_k1, "zero: zero expected gradient", "only noise"),
        (without_gradient, "zero: no gradient reaches the policy", "no_grad"),
        (detached_top_k_in_the_advantage, "zero: zero expected gradient", "only noise"),
    ],
    ids=["k2 with the gradient of k1", "no_grad", "detached top-k"],
)
def test_planted_bugs_fail_and_are_named(loss, verdict, cause):
    report = check(loss, claims="token_reverse", regimes=("on_policy",))
    with pytest.raises(AssertionError, match="does not optimize what it claims") as error:
        report.assert_ok()
    # The first line of the message says what is wrong in general, the second names the regime.
    line = str(error.value).splitlines()[1]
    assert line.startswith("FAILED on_policy")
    assert verdict in line
    assert cause in line
    assert line.endswith("[claimed: token_reverse]")
    assert report.findings[0].target == "zero"


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


TOKEN_REVERSE_EVERYWHERE = {"on_policy": "token_reverse", "off_policy": "token_reverse", "mixed": "token_reverse"}
SEQUENCE_REVERSE_EVERYWHERE = dict.fromkeys(TOKEN_REVERSE_EVERYWHERE, "sequence_reverse")


def test_a_corrected_loss_holds_in_every_regime_with_its_coefficient():
    report = check(k3_with_the_token_ratio, claims=TOKEN_REVERSE_EVERYWHERE)
    report.assert_ok()
    assert [finding.coefficient for finding in report.findings] == pytest.approx([0.04, 0.04, 0.04])


def test_the_exact_kl_holds_in_every_regime():
    check(exact_reverse, claims=TOKEN_REVERSE_EVERYWHERE).assert_ok()


def test_a_loss_that_is_right_on_policy_only_says_so():
    report = check(k1_in_reward, claims={"on_policy": "sequence_reverse", "off_policy": "none"})
    report.assert_ok()
    assert [finding.target for finding in report.findings] == ["sequence_reverse", None, None]
    assert "off_policy: none: nearest to " in str(report)
    assert "vocabulary 2 to " in str(report)


def test_a_loss_that_is_right_on_policy_only_fails_a_claim_off_policy():
    report = check(k1_in_reward, claims={"off_policy": "sequence_reverse"})
    with pytest.raises(AssertionError, match="FAILED off_policy"):
        report.assert_ok()


def test_a_mean_over_the_tokens_of_the_batch_is_known_by_its_behaviour():
    report = check(mean_of_k2, claims="token_reverse", regimes=("on_policy",))
    report.assert_ok()
    assert report.findings[0].coefficient == pytest.approx(1)
    assert "the scalar is the mean over the tokens of the batch" in str(report)


def test_a_mean_of_each_completion_hits_no_target():
    """It weights a completion by 1 / length, alone and as the mean over a batch of such means."""

    def mean_of_means(logp, ref_logp, mask):
        return ((0.5 * (logp - ref_logp) ** 2 * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()

    assert check(mean_of_means, claims="none", regimes=("on_policy",)).ok


def test_a_claim_near_the_reference_is_told_from_one_everywhere():
    report = check(clamped_k2, claims="token_reverse", regimes=("on_policy",))
    assert not report.ok
    assert "near the reference only, missed with" in str(report)
    check(clamped_k2, claims="token_reverse", regimes=("on_policy",), near_only=True).assert_ok()


def test_a_loss_in_float32_holds():
    check(k3_in_float32, claims="token_forward", regimes=("on_policy",)).assert_ok()


def test_a_negative_coefficient_hits_no_target():
    def away_from_the_reference(logp, ref_logp, mask):
        return -my_kl_loss(logp, ref_logp, mask)

    assert check(away_from_the_reference, claims="none", regimes=("on_policy",)).ok


# --- what trainers bring ----------------------------------------------------------------------------------------------
class KLLoss(torch.nn.Module):
    def forward(self, logp, ref_logp, *, mask, beta=0.1):
        return beta * 0.5 * (logp - ref_logp) ** 2 * mask


def test_a_module_is_called_and_not_its_forward_alone():
    """So that its hooks run."""
    module = KLLoss()
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    report = check(module, claims="token_reverse", regimes=("on_policy",))
    report.assert_ok()
    assert report.findings[0].coefficient == pytest.approx(0.1), "the default of the module's beta"
    assert calls, "the hook never ran"


@pytest.mark.parametrize(
    "loss",
    [
        lambda **batch: my_kl_loss(batch["logp"], batch["ref_logp"], batch["mask"]),
        lambda logp, /, ref_logp, *, mask: my_kl_loss(logp, ref_logp, mask),
        lambda *, logp, ref_logp, mask, **unused: my_kl_loss(logp, ref_logp, mask),
    ],
    ids=["packed", "positional and keyword", "keywords and the rest"],
)
def test_keywords_and_packed_arguments_are_taken(loss):
    check(loss, claims="token_reverse", regimes=("on_policy",)).assert_ok()


def writes_into_ref_logp(logp, ref_logp, mask):
    ref_logp -= logp
    return 0.5 * ref_logp**2 * mask


def writes_into_logp(logp, ref_logp, mask):
    logp -= ref_logp
    return 0.5 * logp**2 * mask


def mean_over_columns(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).mean()


# --- values that are not finite ---------------------------------------------------------------------------------------
def infinite_in_the_padding(logp, ref_logp, mask):
    return torch.where(mask, 0.5 * (logp - ref_logp) ** 2, torch.inf) * mask


def summed_after_infinity(logp, ref_logp, mask):
    return infinite_in_the_padding(logp, ref_logp, mask).sum()


def infinite_slope_in_the_padding(logp, ref_logp, mask):
    return torch.where(mask, 0.5 * (logp - ref_logp) ** 2, torch.sqrt((logp - ref_logp).abs() * mask))


def nan_for_short_completions(logp, ref_logp, mask):
    """The standard deviation of one token is nan."""
    value = 0.5 * ((logp - ref_logp) ** 2 * mask).sum(-1)
    return torch.where(mask.sum(-1) == 1, torch.nan, value)


def mean_of_each_completion(logp, ref_logp, mask):
    return (0.5 * (logp - ref_logp) ** 2 * mask).sum(-1) / mask.sum(-1)


NOT_FINITE = {
    infinite_in_the_padding: "the value is not finite at tokens? .*, which the mask leaves out",
    summed_after_infinity: "the value is not finite",
    infinite_slope_in_the_padding: "the gradient is not finite at tokens? .*, which the mask leaves out",
    nan_for_short_completions: "the value is not finite, with the mask 1 0 0 0 0 0 0",
    mean_of_each_completion: "where every token of a completion is masked",
}


@pytest.mark.parametrize("loss", NOT_FINITE, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("claim", ["token_reverse", "none"])
def test_a_loss_that_is_not_finite_fails_and_says_where(loss, claim):
    report = check(loss, claims=claim, regimes=("on_policy",))
    assert not report.ok
    assert "nearest to sequence_reverse, cosine nan" not in str(report)
    with pytest.raises(AssertionError, match=NOT_FINITE[loss]):
        report.assert_ok()


# --- masked tokens within a completion, as a tool's replies -----------------------------------------------------------
def to_go(value):
    return value.flip(-1).cumsum(-1).flip(-1)


def to_go_over_tool_tokens(logp, ref_logp, mask):
    """miles' REINFORCE++ (PR 1383): the sum to go of what is not masked."""
    return to_go((logp - ref_logp).detach()) * logp * mask


def to_go_masked(logp, ref_logp, mask):
    return to_go(((logp - ref_logp) * mask).detach()) * logp * mask


def total_over_tool_tokens(logp, ref_logp, mask):
    return (logp - ref_logp).sum(-1).detach() * (logp * mask).sum(-1)


def prefix_ratio_over_tool_tokens(logp, ref_logp, behaviour_logp, mask):
    ratio = (logp - behaviour_logp).cumsum(-1).exp()
    return (ratio * (logp - ref_logp) * mask).sum(-1)


def prefix_ratio_masked(logp, ref_logp, behaviour_logp, mask):
    ratio = ((logp - behaviour_logp) * mask).cumsum(-1).exp()
    return (ratio * (logp - ref_logp) * mask).sum(-1)


def without_a_mask(logp, ref_logp):
    return (0.5 * (logp - ref_logp) ** 2).sum(-1)


def exact_over_tool_tokens(logp_full, ref_logp_full):
    return (logp_full.exp() * (logp_full - ref_logp_full)).sum((-1, -2))


LEAKS = (to_go_over_tool_tokens, total_over_tool_tokens, without_a_mask)
# The two that multiply by a mask let a masked token into the gradient of another one; the third has no mask at all.
LEAKS_INTO_OTHER_TOKENS = (to_go_over_tool_tokens, total_over_tool_tokens)


@pytest.mark.parametrize("loss", LEAKS, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_masked_tokens_that_enter_the_loss_are_named(loss, seed):
    report = check(loss, claims="none", regimes=("on_policy",), seed=seed)
    assert not report.ok
    (problem,) = report.problems
    assert "tokens 2, 3, 5, masked as a tool's reply is (mask 1 0 0 1 0 1 1)" in problem
    assert ("the gradient of token" in problem) == (loss in LEAKS_INTO_OTHER_TOKENS)
    without_holes = check(loss, claims="none", regimes=("on_policy",), seed=seed, masked_tokens="absent")
    assert without_holes.problems == ()


def test_a_ratio_over_masked_tokens_is_found_off_policy():
    report = check(prefix_ratio_over_tool_tokens, claims={"off_policy": "sequence_reverse"})
    assert any("mask: tokens 2, 3, 5" in problem for problem in report.problems)


def test_masked_costs_to_go_hold_with_tool_tokens():
    check(to_go_masked, claims="sequence_reverse").assert_ok()


def test_a_masked_ratio_holds_with_tool_tokens():
    report = check(prefix_ratio_masked, claims=SEQUENCE_REVERSE_EVERYWHERE)
    report.assert_ok()
    assert "masked tokens within the completions" in str(report)


@pytest.mark.parametrize(
    ("loss", "arguments", "message"),
    [
        (my_kl_loss, {"claims": "token_revers"}, "claims: got 'token_revers'; did you mean 'token_reverse'"),
        (my_kl_loss, {"claims": {"offpolicy": "zero"}}, "regimes: got 'offpolicy'; did you mean 'off_policy'"),
        (
            my_kl_loss,
            {"claims": "zero", "masked_tokens": "left"},
            "masked_tokens: got 'left'; did you mean 'left_out'",
        ),
        (lambda logp, ref: logp, {"claims": "zero"}, "loss_fn.ref: no tensor has this name.* ref_logp"),
        (lambda logp: logp.sum(0), {"claims": "zero"}, r"loss_fn: got \(7,\); allowed: a tensor \[B, T\], \[B\], or a"),
        (lambda logp: 1.0, {"claims": "zero"}, "loss_fn: got 'float'"),
        (lambda logp: logp - logp.mean(), {"claims": "zero"}, "changes with the others in its batch"),
        (writes_into_ref_logp, {"claims": "zero"}, "changes its argument ref_logp in place"),
        (writes_into_logp, {"claims": "zero"}, "changes its argument logp in place"),
        (torch.nn.Dropout(0.5), {"claims": "zero"}, "loss_fn.input: no tensor has this name"),
        (KLLoss, {"claims": "zero"}, "KLLoss is a class; give an instance"),
        (lambda *tensors: tensors[0], {"claims": "zero"}, r"it takes \*args; wrap it in a function with parameters"),
        (lambda logp: {}["kl"], {"claims": "zero"}, "it raised KeyError: 'kl'"),
        (lambda logp: logp + torch.randn_like(logp), {"claims": "zero"}, "changes from call to call"),
        (mean_over_columns, {"claims": "zero"}, "depends on the padding: .* divide by its tokens"),
        (exact_over_tool_tokens, {"claims": "zero"}, "depends on the padding: .* multiply by the mask"),
    ],
)
def test_misuse_is_refused_in_one_line(loss, arguments, message):
    with pytest.raises(UserError, match=message):
        check(loss, **arguments)
