"""Losses of multi-turn training: right ones pass, and a wrong mask is named and nothing else is."""

import re

import pytest
import torch

import mask_mistakes
from kl_comedy.conformance import check
from kl_comedy.conformance.masks import turn_lengths, turn_numbers
from kl_comedy.errors import UserError
from multi_turn_losses import RIGHT, WRONG

ON = {"claims": "token_reverse", "regimes": ("on_policy",)}
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]
MISDIAGNOSED = (122, 219)
"""Draws of which the checker once said that completions are mixed."""
DRAWS = [
    pytest.param(seed, marks=() if seed in (0, 1, *MISDIAGNOSED) else pytest.mark.slow)
    for seed in (*range(30), *MISDIAGNOSED)
]


def said_of(loss, **asked):
    """Whether a loss passes, and the report, or the error that refuses the loss."""
    try:
        report = check(loss, **asked)
    except UserError as error:
        return False, str(error)
    return report.ok, str(report)


# --- losses of released trainers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("labelled", RIGHT, ids=lambda labelled: labelled.name)
def test_a_right_loss_of_a_trainer_passes(labelled, seed):
    check(labelled.loss, seed=seed, **labelled.options).assert_ok()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("labelled", WRONG, ids=lambda labelled: labelled.name)
def test_a_wrong_loss_of_a_trainer_fails_and_its_mistake_is_named(labelled, seed):
    passes, text = said_of(labelled.loss, seed=seed, **labelled.options)
    assert not passes
    assert re.search(labelled.cause, text, re.DOTALL), text


# --- drawn mistakes ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", DRAWS)
def test_a_drawn_mistake_fails_and_no_other_one_is_named(seed):
    drawn = mask_mistakes.drawn(seed)
    passes, text = said_of(drawn.loss, claims=drawn.claim, regimes=("on_policy",), seed=seed)
    assert passes == (not drawn.faults), text
    if not passes:
        assert mask_mistakes.names_in(text) <= drawn.allowed, text


def test_the_draws_have_right_losses_and_each_mask():
    draws = [mask_mistakes.drawn(seed) for seed in range(300)]
    assert sum(not drawn.faults for drawn in draws) > 50
    assert {drawn.numerator for drawn in draws} == {drawn.denominator for drawn in draws} == set(mask_mistakes.MASKS)


# --- whose sum --------------------------------------------------------------------------------------------------------
def k2(logp, ref_logp):
    return 0.5 * (logp - ref_logp) ** 2


def k2_attended(logp, ref_logp, attention_mask):
    return k2(logp, ref_logp) * attention_mask


def k2_constant_at_masked_tokens(logp, ref_logp, mask):
    return torch.where(mask, k2(logp, ref_logp), 1.0)


def k2_with_a_constant_in_the_padding(logp, ref_logp, mask, attention_mask):
    return torch.where(attention_mask, k2(logp, ref_logp) * mask, 1.0)


NOT_ZERO = {
    k2_attended: "the loss is not zero at tokens 2, 3, 5, .*: the attention mask stands where the mask is meant",
    k2: r"the loss is not zero at tokens 2, 3, 5, .*: no mask is applied \(take an argument mask\)",
    k2_constant_at_masked_tokens: "the loss is not zero at tokens 2, 3, 5",
    k2_with_a_constant_in_the_padding: "the loss is not zero in the padding",
}


@pytest.mark.parametrize("loss", NOT_ZERO, ids=lambda loss: loss.__name__)
def test_a_loss_by_token_must_be_zero_where_the_mask_is_false_unless_the_sum_leaves_it_out(loss):
    report = check(loss, **ON)
    with pytest.raises(AssertionError, match=f"FAILED mask: {NOT_ZERO[loss]}.*right only if YOUR sum over tokens uses"):
        report.assert_ok()
    assert "smallest batch with masked tokens" in report.example
    check(loss, masked_tokens="left_out", **ON).assert_ok()


def test_what_masked_tokens_do_to_others_fails_whoever_sums():
    def cumulated(logp, ref_logp, mask):
        return ((logp - ref_logp).detach().flip(-1).cumsum(-1).flip(-1) * logp) * mask

    for masked_tokens in ("zero", "left_out"):
        report = check(cumulated, claims="none", regimes=("on_policy",), masked_tokens=masked_tokens)
        assert "change the loss, and the gradient of tokens 1, 4" in str(report)


def shifted_to_the_left(logp, ref_logp, mask):
    return k2(logp, ref_logp) * torch.nn.functional.pad(mask[:, 1:], (0, 1))


def shifted_to_the_right(logp, ref_logp, mask):
    return k2(logp, ref_logp) * torch.nn.functional.pad(mask[:, :-1], (1, 0))


@pytest.mark.parametrize(
    ("loss", "direction"), [(shifted_to_the_left, "left"), (shifted_to_the_right, "right")], ids=["left", "right"]
)
@pytest.mark.parametrize("masked_tokens", ["zero", "left_out"])
def test_a_shifted_mask_is_named_whoever_sums(loss, direction, masked_tokens):
    report = check(loss, masked_tokens=masked_tokens, **ON)
    assert not report.ok
    assert f"the mask is shifted by one token to the {direction}" in str(report)


# --- two mistakes -----------------------------------------------------------------------------------------------------
def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 - (ref_logp - logp)


def k3_attended_mean(logp, ref_logp, attention_mask):
    return (k3(logp, ref_logp) * attention_mask).sum() / attention_mask.sum()


def k3_attended_mean_of_each(logp, ref_logp, attention_mask):
    return (k3(logp, ref_logp) * attention_mask).sum(-1) / attention_mask.sum(-1).clamp(min=1)


def k3_in_the_first_turn(logp, ref_logp, mask):
    return k3(logp, ref_logp) * (mask & ((~mask).cumsum(-1) == 0))


@pytest.mark.parametrize(
    ("loss", "mask"),
    [
        (
            k3_attended_mean,
            r"divides by the tokens of the attention mask(.|\n)*the attention mask stands where",
        ),
        (k3_attended_mean_of_each, "each completion is divided by its number of tokens in the attention mask"),
        (k3_in_the_first_turn, "only the first turn of a completion has a gradient"),
    ],
)
def test_a_wrong_mask_and_a_wrong_direction_are_both_named(loss, mask):
    report = check(loss, **ON)
    assert re.search(mask, str(report))
    assert "wrong direction: the gradient is the forward KL's" in str(report)
    assert "smallest failing batch" in str(report)


def test_a_part_of_the_mask_alone_is_shown_with_masked_tokens():
    """Without them the first turn is the whole completion, and the loss is right."""

    def first_turn(logp, ref_logp, mask):
        return k2(logp, ref_logp) * (mask & ((~mask).cumsum(-1) == 0))

    report = check(first_turn, **ON)
    assert "wrong direction" not in str(report)
    assert "mask [1 0 0 1]" in report.findings[0].example
    check(first_turn, masked_tokens="absent", **ON).assert_ok()


# --- turns ------------------------------------------------------------------------------------------------------------
def test_turns_are_runs_of_the_mask():
    mask_BT = torch.tensor([[1, 1, 0, 1, 0, 0, 1], [0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    assert turn_numbers(mask_BT).tolist() == [[1, 1, 0, 2, 0, 0, 3], [0, 1, 1, 1, 0, 0, 0], [0] * 7]
    assert turn_lengths(mask_BT).tolist() == [[2, 2, 0, 1, 0, 0, 1], [0, 3, 3, 3, 0, 0, 0], [0] * 7]
