"""What a report says, and whether it is true."""

import pytest

from kl_comedy.conformance import check
from kl_comedy.errors import UserError

ON = {"regimes": ("on_policy",)}


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def k2_without_a_mask(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def test_an_assertion_of_a_report_fails_where_a_claim_does():
    assert check(k2, claims="token_reverse", **ON)
    with pytest.raises(AssertionError):
        assert check(k2, claims="token_forward", **ON)


def test_an_assertion_of_a_report_without_claims_is_refused():
    """It would pass for a loss that optimizes anything."""
    report = check(k2, claims={}, **ON)
    assert report.ok
    with pytest.raises(UserError, match="nothing was claimed, so it is neither true nor false"):
        assert report


def test_a_report_with_a_problem_is_false_without_claims_too():
    assert not check(k2_without_a_mask, claims={}, **ON)


def test_a_regime_without_a_claim_is_neither_right_nor_wrong():
    report = check(k2, claims="token_reverse", regimes=("on_policy", "off_policy"))
    on_policy, off_policy = str(report).splitlines()[:2]
    assert on_policy.startswith("ok     on_policy: token_reverse")
    assert off_policy.startswith("-      off_policy: none: nearest to token_reverse")
    assert off_policy.endswith("[nothing claimed]")
    assert report


def test_a_report_is_shown_as_it_is_printed():
    """By pytest under a failed assertion, and at the end of a notebook's cell."""
    report = check(k2, claims="token_reverse", **ON)
    assert repr(report) == str(report)
