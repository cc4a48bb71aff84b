"""How a scalar is summed is read off the shares of completions in its gradient."""

import pytest
import torch

from kl_comedy.conformance import check
from kl_comedy.errors import UserError

ON = {"claims": "token_reverse", "regimes": ("on_policy",)}


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def turns(mask):
    return (mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))).sum()


RIGHT = {
    "the sum over completions": lambda value, mask: value.sum(),
    "the mean over completions": lambda value, mask: value.sum(-1).mean(),
    "the mean over the tokens of the batch": lambda value, mask: value.sum() / (mask.sum() + 1e-8),
    "the mean over the turns of the batch": lambda value, mask: value.sum() / turns(mask),
}


@pytest.mark.parametrize("words", RIGHT)
def test_a_sum_or_a_mean_of_the_batch_is_right_and_named(words):
    report = check(lambda logp, ref_logp, mask: RIGHT[words](k2(logp, ref_logp, mask), mask), **ON)
    report.assert_ok()
    assert report.reduction == words
    assert report.findings[0].coefficient == pytest.approx(1)


def test_a_division_by_a_constant_is_a_part_of_the_coefficient():
    report = check(lambda logp, ref_logp, mask: k2(logp, ref_logp, mask).sum() / (len(mask) * 512), **ON)
    report.assert_ok()
    assert report.findings[0].coefficient == pytest.approx(1 / 512)


def test_a_loss_whose_value_is_zero_is_read_by_its_gradient():
    """As surrogates are that are made for the gradient alone."""

    def surrogate(logp, ref_logp, mask):
        value = k2(logp, ref_logp, mask)
        return (value - value.detach()).sum() / mask.sum()

    report = check(surrogate, **ON)
    report.assert_ok()
    assert report.reduction == "the mean over the tokens of the batch"


def test_a_loss_that_returns_no_scalar_has_no_reduction():
    report = check(k2, **ON)
    assert report.reduction == ""
    assert "the scalar is" not in str(report)


def test_a_mean_over_a_count_of_its_own_is_not_taken_for_a_mix():
    def by_the_square(logp, ref_logp, mask):
        return k2(logp, ref_logp, mask).sum() / (mask.sum(-1) ** 2).sum()

    with pytest.raises(UserError, match=r"over neither completions, turns nor tokens of the mask.* weigh 1, 4, 9, 16"):
        check(by_the_square, **ON)


def test_a_loss_of_which_each_batch_is_another_one_is_refused():
    def largest(logp, ref_logp, mask):
        return k2(logp, ref_logp, mask).sum(-1).max()

    with pytest.raises(UserError, match="completions are mixed"):
        check(largest, **ON)
