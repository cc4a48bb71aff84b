"""Planted forms get the name, the number and the leak that they have."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from peers.case import in_the_sequence
from register import by_hand
from register.calls import HELPERS
from register.measure import FRESH, STALE, holes, loss_of, verdict
from register.run import _loss


def loss(expression):
    return _loss(expression, None)


@pytest.mark.parametrize(
    ("expression", "target", "coefficient"),
    [
        ("k2(logp, ref_logp)", "token_reverse", 1.0),
        ("3 * k2(logp, ref_logp).float()", "token_reverse", 3.0),
        ("k3(logp, ref_logp)", "token_forward", 1.0),
        ("k3(ref_logp, logp)", "token_chi_square", 0.5),
        ("(logp - ref_logp).abs()", "token_total_variation", 2.0),
        ("score(logp) * k2(logp, ref_logp)", "token_policy_square", 1.0),
        ("(ref_logp - logp).exp() * (ref_logp - logp) - (ref_logp - logp).exp()", "token_reference_square", 1.0),
        ("in_reward(k1(old_logp, ref_logp), logp, old_logp, mask)", "sequence_reverse", 1.0),
        ("k1(logp, ref_logp)", "zero", None),
        ("-k2(logp, ref_logp)", "none", None),
        ("k2(logp, ref_logp) / mask.sum(-1, keepdim=True)", "none", None),
    ],
)
def test_a_form_gets_the_name_of_what_it_optimizes(expression, target, coefficient):
    outcome = verdict(loss(expression), FRESH, intended="token_reverse")
    assert (outcome.target, outcome.near) == (target, False)
    assert outcome.coefficient == (coefficient and pytest.approx(coefficient, rel=1e-4))


def test_noise_of_zero_mean_is_told_from_no_gradient_at_all():
    noise = verdict(loss("k1(logp, ref_logp)"), FRESH, intended="token_reverse")
    nothing = verdict(loss("0.0 * logp"), FRESH, intended="token_reverse")
    assert (noise.target, noise.silent) == ("zero", False)
    assert (nothing.target, nothing.silent) == ("zero", True)


def test_a_clamp_leaves_the_name_near_the_reference_alone():
    outcome = verdict(loss("clamped_k3(logp, ref_logp)"), FRESH, intended="token_reverse")
    assert (outcome.target, outcome.near) == ("token_forward", True)


def test_the_error_is_that_of_the_intended_kl_and_staleness_shows():
    form = loss("k2(logp, ref_logp)")
    assert verdict(form, FRESH, intended="token_reverse").error == pytest.approx(0, abs=1e-9)
    assert verdict(form, FRESH, intended="token_forward").error > 0.1
    stale = verdict(form, STALE, intended="token_reverse")
    assert stale.target == "none"
    assert stale.error > 0.05
    corrected = loss("ratio(logp, old_logp) * k2(logp, ref_logp).detach() + 0 * logp")
    assert verdict(corrected, STALE, intended="token_reverse").target != "token_reverse"
    assert verdict(loss("ratio(logp, old_logp) * k3(logp, ref_logp)"), STALE, intended="token_reverse").target == (
        "token_reverse"
    )


@pytest.mark.parametrize(
    ("expression", "leaks", "reached"),
    [
        ("k2(logp, ref_logp)", False, False),
        ("in_reward(k1(old_logp, ref_logp), logp, old_logp, mask)", False, False),
        # The mask forgotten in the sum of later costs; a reply's cost depends on the token before it.
        ("with_returns(-k1(old_logp, ref_logp).flip(-1).cumsum(-1).flip(-1), logp, old_logp)", True, False),
        ("k2(logp, ref_logp).sum(-1)", False, True),
    ],
)
def test_masked_tokens_that_enter_a_loss_are_seen(expression, leaks, reached):
    effect = holes(loss(expression), intended="sequence_reverse")
    assert (effect.change > 0.05, effect.reached) == (leaks, reached)


def test_a_small_leak_has_its_size():
    leak = "with_returns(-k1(old_logp, ref_logp).flip(-1).cumsum(-1).flip(-1), logp, old_logp)"
    whole = holes(loss(leak), intended="sequence_reverse").change
    tenth = holes(loss(f"0.1 * {leak}"), intended="sequence_reverse").change
    assert 0 < tenth == pytest.approx(whole / 10)


def test_code_that_computes_in_float32_gets_its_name():
    in_float32 = verdict(loss("k3(logp.float(), ref_logp.float())"), FRESH, intended="token_reverse")
    assert (in_float32.target, in_float32.near) == ("token_forward", False)
    assert in_float32.coefficient == pytest.approx(1, rel=1e-4)


def test_a_masked_token_that_gets_a_gradient_once_is_seen():
    """In one policy of several, the first."""
    calls = []

    def call(given):
        calls.append(given)
        value_BT = (given["logp"] - given["ref_logp"]) ** 2
        has_hole = bool((~given["mask"][:, 1]).all())
        if has_hole and sum(bool((~one["mask"][:, 1]).all()) for one in calls) == 1:
            return value_BT.sum(-1)
        return torch.where(given["mask"], value_BT, 0.0).sum(-1)

    assert holes(loss_of(call), intended="token_reverse").reached


def test_a_masked_token_after_the_end_of_a_completion_does_not_count():
    """A completion of one token has padding behind it, whose log-probs are 0."""
    calls = []

    def call(given):
        calls.append((given["mask"], given["old_logp"]))
        return given["logp"] * 0

    holes(loss_of(call), intended="token_reverse")
    for mask_BT, old_logp_BT in calls:
        ended_B = mask_BT.sum(-1) == 1
        assert bool((old_logp_BT[ended_B][:, 1:] == 0).all())


def test_the_checks_by_hand_agree_with_what_the_rows_say():
    swapped, top_k, returns = by_hand.checks()
    for check in (swapped, top_k, returns):
        assert check["from_named"] < 1e-6
        assert check["from_kl"] > 0.1
    assert [swapped["id"], top_k["id"], returns["id"]] == ["rlinf-fsdp", "ema-pg-reverse", "miles-plus-plus"]


def test_the_swapped_form_is_half_a_chi_square_in_the_oracle_and_by_hand():
    """Two enumerations with nothing in common: the policies of the oracle, and four tokens in plain Python."""
    swapped = by_hand.swapped_arguments()
    outcome = verdict(loss("k3(ref_logp, logp)"), FRESH, intended="token_reverse")
    assert (outcome.target, outcome.coefficient) == ("token_chi_square", pytest.approx(0.5))
    assert swapped["from_named"] < 1e-6 < swapped["from_kl"]


def test_every_formula_takes_tensors():
    logp = torch.log_softmax(torch.arange(6.0).reshape(2, 3), -1)
    for name in ("k1", "k2", "k3", "clamped_k3", "ratio"):
        assert HELPERS[name](logp, logp).shape == logp.shape


def test_a_clamped_formula_is_clamped_in_its_input_and_in_its_value():
    logp = torch.tensor([-30.0, -15.0, 0.0, 30.0])
    value = HELPERS["clamped_k3"](logp, torch.zeros(4))
    assert value.tolist() == pytest.approx([10.0, 10.0, 0.0, 10.0])


def test_the_score_of_the_tail_has_no_value_and_the_gradient_of_tokens_outside_the_likeliest():
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    chooser = torch.tensor([[[-0.1, -3.0], [-0.1, -3.0]]])
    value = HELPERS["tail_score"](logp, chooser, torch.tensor([[0, 1]]))
    value.sum().backward()
    assert value.tolist() == [[0.0, 0.0]]
    assert logp.grad.tolist() == [[0.0, 1.0]]


def test_the_checks_by_hand_are_those_that_are_stored():
    stored = Path(__file__).resolve().parents[2] / "results" / "register" / "by_hand.json"
    for check, before in zip(by_hand.checks(), json.loads(stored.read_text()), strict=True):
        assert check["says"] == before["says"]
        assert check["from_kl"] == pytest.approx(before["from_kl"], rel=1e-6)


def test_errors_of_groups_stand_beside_those_of_rows_without_groups():
    """A loss that its group does not enter has one error, whatever the size of the groups."""
    form = loss("k2(logp, ref_logp)")
    alone = verdict(form, STALE, intended="token_reverse")
    in_pairs = verdict(form, STALE, intended="token_reverse", group_size=2)
    assert in_pairs.error == pytest.approx(alone.error)
    assert in_pairs.cosine == pytest.approx(alone.cosine)


def test_a_leak_of_groups_is_seen():
    """The mask forgotten in the cost of a completion, from which the mean of its pair is subtracted."""

    def leak_of(cost):
        mean = f"({cost}).reshape(-1, 2).mean(1).repeat_interleave(2)"
        form = loss(f"with_returns(({mean} - {cost})[:, None].expand_as(logp), logp, old_logp)")
        return holes(form, intended="sequence_reverse", group_size=2)

    forgotten = leak_of("k1(old_logp, ref_logp).sum(-1)")
    masked = leak_of("(k1(old_logp, ref_logp) * mask).sum(-1)")
    assert forgotten.change > 0.05
    assert masked.change == 0.0


def test_a_masked_token_is_inside_the_sequence_and_padding_is_not():
    mask_BT = torch.tensor([[True, False, True, False], [True, True, False, False]])
    assert in_the_sequence(mask_BT).tolist() == [[True, True, True, False], [True, True, False, False]]
    contiguous_BT = torch.tensor([[True, True, False], [True, False, False]])
    assert bool((in_the_sequence(contiguous_BT) == contiguous_BT).all())
