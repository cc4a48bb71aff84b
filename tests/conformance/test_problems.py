"""What is wrong with a loss whatever it claims: masks that are shifted, prompts, precision, overflow, logits."""

import pytest
import torch

from kl_comedy.conformance import check
from kl_comedy.errors import UserError

ON = {"claims": "token_reverse", "regimes": ("on_policy",)}


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def shifted(mask, by):
    moved = torch.zeros_like(mask)
    if by < 0:
        moved[:, :by] = mask[:, -by:]
    else:
        moved[:, by:] = mask[:, :-by]
    return moved


def mask_shifted_to_the_left(logp, ref_logp, mask):
    return k2(logp, ref_logp, shifted(mask, -1)).sum(-1)


def mask_shifted_to_the_right(logp, ref_logp, mask):
    return k2(logp, ref_logp, shifted(mask, 1)).sum(-1)


def token_of_the_prompt(logp, ref_logp, mask):
    """Where the first token is BOS, or a prompt's last one."""
    with_first = mask.clone()
    with_first[:, 0] = True
    return k2(logp, ref_logp, with_first).sum(-1)


def summed_in_float16(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).half().sum(-1)


def computed_in_bfloat16(logp, ref_logp, mask):
    return k2(logp.bfloat16(), ref_logp.bfloat16(), mask).double()


def overflows_far_from_the_reference(logp, ref_logp, mask):
    """k3's value by way of the ratio's square, which float32 cannot hold at 80 nats."""
    ratio = (ref_logp - logp).exp()
    return (ratio * ratio / ratio - (ref_logp - logp) - 1) * mask


def without_softmax(logits, ref_logits, mask):
    return (logits.exp() * (logits - ref_logits)).sum(-1) * mask


PROBLEMS = {
    mask_shifted_to_the_left: r"mask: tokens 3, 5, masked as a tool's reply .* shifted by one token to the left",
    mask_shifted_to_the_right: r"mask: tokens 2, 5, masked as a tool's reply .* shifted by one token to the right",
    token_of_the_prompt: r"mask: token 1, masked as a prompt is \(mask 0 1 1 1 1\), change the loss: multiply",
    summed_in_float16: "dtype: it computes in float16",
    computed_in_bfloat16: "dtype: it computes in bfloat16",
    overflows_far_from_the_reference: "finite: in float32 .* where logp - ref_logp is about -80",
    without_softmax: "logits: a constant .* log_softmax is missing",
}


@pytest.mark.parametrize("loss", PROBLEMS, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("claim", ["token_reverse", "none"])
def test_a_problem_is_named_whatever_is_claimed(loss, claim):
    report = check(loss, claims=claim, regimes=("on_policy",))
    with pytest.raises(AssertionError, match=f"FAILED {PROBLEMS[loss]}"):
        report.assert_ok()
    assert len(report.problems) == 1


def test_the_batch_of_a_prompt_is_shown_with_it():
    example = check(token_of_the_prompt, **ON).problem_example
    assert "mask [0 1 1]" in example
    assert "mask [1" not in example


@pytest.mark.parametrize(
    "loss",
    [
        lambda logp, ref_logp, mask: k2(logp.float(), ref_logp.float(), mask),
        # A mask within the padding alone is no shift.
        lambda logp, ref_logp, mask: k2(logp, ref_logp, mask | (mask.flip(-1).cumsum(-1).flip(-1) == 0)),
    ],
    ids=["float32", "padding"],
)
def test_what_is_no_problem(loss):
    check(loss, **ON).assert_ok()


def test_near_the_reference_a_loss_may_overflow_far_from_it():
    report = check(overflows_far_from_the_reference, claims="none", regimes=("on_policy",), near_only=True)
    assert report.problems == ()


def test_a_loss_that_changes_rarely_is_not_taken_for_one_that_mixes_completions():
    calls = []

    def rarely(logp, ref_logp, mask):
        calls.append(1)
        return k2(logp, ref_logp, mask) * (1 + (len(calls) % 7 == 3))

    with pytest.raises(UserError, match="the loss changes from call to call"):
        check(rarely, **ON)


def with_the_completion_before(logp, ref_logp, mask):
    """The first of a batch has none before it."""
    kl = k2(logp, ref_logp, mask)
    return torch.cat([kl[:1], kl[1:] + 0.1 * kl[:-1]])


def centred_in_its_group(logp, ref_logp, mask):
    """Alone, a completion is its own mean."""
    cost = ((logp - ref_logp) * mask).sum(-1).detach()
    return k2(logp, ref_logp, mask).sum() + ((cost - cost.mean()) * (logp * mask).sum(-1)).sum()


def largest_of_the_batch(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum(-1).max()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (with_the_completion_before, "changes with the others in its batch"),
        (centred_in_its_group, "neither the sum nor a mean of those of each alone"),
        (largest_of_the_batch, "neither the sum nor a mean of those of each alone"),
        (lambda logp, mask: logp * (1 - mask), r"it raised RuntimeError: .* \(the mask is a bool tensor"),
    ],
)
def test_a_loss_that_mixes_completions_is_refused(loss, message):
    with pytest.raises(UserError, match=message):
        check(loss, **ON)


@pytest.mark.parametrize("normalize", [lambda kl, mask: kl.sum(), lambda kl, mask: kl.sum(-1).mean()])
def test_sums_and_means_of_completions_do_not_mix_them(normalize):
    check(lambda logp, ref_logp, mask: normalize(k2(logp, ref_logp, mask), mask), **ON).assert_ok()


def test_a_mean_of_tokens_does_not_mix_completions():
    def loss(logp, ref_logp, mask):
        return k2(logp, ref_logp, mask).sum() / mask.sum()

    report = check(loss, **ON)
    report.assert_ok()
    assert report.reduction == "the mean over the tokens of the batch"
