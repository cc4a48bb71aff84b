"""The parts of a check alone: what a loss is called with, and what is read from its value."""

import pytest
import torch

from kl_comedy.conformance.arguments import BatchOfTensors, caller
from kl_comedy.conformance.batches import HOLES, Batch, Loss, slope_of
from kl_comedy.conformance.smallest import batch_lines, small_policy
from kl_comedy.errors import UserError


def batch_of(regime="on_policy", *, holes_seed=None, vocabulary=3, length=3):
    return Batch.of(small_policy(regime, vocabulary, length), holes_seed)


def loss_of(function):
    return Loss(caller(function))


def k2(logp, ref_logp, mask):
    return 0.5 * (logp - ref_logp) ** 2 * mask


def k2_of_completions(logp, ref_logp, mask):
    return k2(logp, ref_logp, mask).sum(-1)


def square_of_the_sum(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1) ** 2


def reverse_over_the_vocabulary(logp_full, ref_logp_full, mask):
    return (logp_full.exp() * (logp_full - ref_logp_full)).sum(-1) * mask


def forward_over_the_vocabulary(logp_full, ref_logp_full, mask):
    return (ref_logp_full.exp() * (ref_logp_full - logp_full)).sum(-1) * mask


# --- the value of each token ----------------------------------------------------------------------------------------
def test_the_value_of_a_token_is_found_where_only_sums_are_returned():
    batch = batch_of()
    _, by_token = loss_of(k2)(batch)
    loss = loss_of(k2_of_completions)
    _, by_completion = loss(batch)
    torch.testing.assert_close(loss.value_of_tokens(batch, by_completion.detach()), by_token.detach())


def test_a_loss_that_is_no_sum_over_tokens_has_no_value_of_a_token():
    batch = batch_of()
    loss = loss_of(square_of_the_sum)
    _, returned = loss(batch)
    assert loss.value_of_tokens(batch, returned.detach()) is None


# --- exchanged arguments --------------------------------------------------------------------------------------------
def k3(logp, ref_logp, mask):
    return ((ref_logp - logp).exp() - 1 - (ref_logp - logp)) * mask


def k3_exchanged(logp, ref_logp, mask):
    return k3(ref_logp, logp, mask)


@pytest.mark.parametrize(
    ("function", "exchanged"),
    [
        (k3, k3_exchanged),
        (forward_over_the_vocabulary, reverse_over_the_vocabulary),
    ],
    ids=["of tokens", "over the vocabulary"],
)
def test_arguments_are_exchanged_in_all_their_forms(function, exchanged):
    batch = batch_of()
    swapped_B = loss_of(function).with_swapped_arguments(batch)
    expected_B, _ = loss_of(exchanged)(batch)
    torch.testing.assert_close(swapped_B.detach(), expected_B.detach())


def test_a_loss_that_cannot_be_called_with_exchanged_arguments_has_none():
    def of_the_policy(logp, mask):
        assert logp.requires_grad, "the reference has no gradient"
        return logp * mask

    loss = loss_of(of_the_policy)
    loss(batch_of())
    assert loss.with_swapped_arguments(batch_of()) is None


# --- holes and padding ----------------------------------------------------------------------------------------------
def test_holes_stand_within_completions_and_have_log_probs():
    batch = batch_of(holes_seed=0)
    mask_BT = batch.tensors["mask"]
    holes = [column for column, step in enumerate(batch.step_T) if step < 0]
    assert len(holes) == sum(HOLES[0].get(step, 0) for step in range(3))
    for column in holes:
        assert not bool(mask_BT[:, column].any())
        continues_B = mask_BT[:, column:].any(-1)
        for name in ("logp", "ref_logp", "behaviour_logp"):
            in_hole_B = batch.tensors[name][:, column] != 0
            assert torch.equal(in_hole_B, continues_B), (name, column)


def test_another_seed_and_a_redrawn_column_have_other_log_probs_in_the_holes_alone():
    first = batch_of(holes_seed=0)
    column = first.step_T.index(-1)
    policy = small_policy("on_policy", 3, 3)
    for other in (Batch.of(policy, 1), Batch.of(policy, 0, redrawn=column)):
        changed_BT = first.tensors["logp"] != other.tensors["logp"]
        assert bool(changed_BT[:, column].any())
        assert not bool((changed_BT & first.tensors["mask"]).any())


def test_the_padding_is_what_stands_behind_the_last_token_and_not_a_hole():
    """A loss that reads the holes of a completion is no loss that depends on the padding."""

    def reads_holes(logp, ref_logp, behaviour_logp, mask):
        return ((logp - ref_logp) * (behaviour_logp != 0)).sum(-1)

    loss_of(reads_holes)(batch_of(holes_seed=0))


def test_a_completion_is_given_what_the_sampler_recorded():
    batch = batch_of("off_policy")
    assert not torch.equal(batch.tensors["logp"].detach(), batch.tensors["behaviour_logp"])
    assert not torch.equal(batch.tensors["ref_logp"], batch.tensors["behaviour_logp"])


# --- names -----------------------------------------------------------------------------------------------------------
def test_a_batch_gives_the_default_for_what_it_has_not():
    tensors = BatchOfTensors(logp=1)
    assert tensors.get("per_token_logps") == 1
    assert tensors.get("ref_logp", 2) == tensors.get("ref_log_prob", 2) == tensors.get("no such name", 2) == 2


def test_a_batch_that_may_be_left_out_is_left_out():
    def loss(logp, ref_logp, mask, batch=None):
        assert batch is None
        return k2(logp, ref_logp, mask)

    loss_of(loss)(batch_of())


def test_an_example_shows_eight_completions_and_counts_the_others():
    batch = batch_of(vocabulary=3, length=3)
    _, returned = loss_of(k2)(batch)
    *shown, last = batch_lines(batch.tensors, returned.detach())
    assert len(shown) == 8
    assert last == f"  ... {len(batch.weight_B) - 8} more"


# --- precision ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_in_another_order_are_no_mistake_in_low_precision(dtype):
    """The sum of one completion is taken in another order than that of all; in bfloat16 that moves the third digit."""

    def with_noise_of_its_precision(logp, ref_logp, mask):
        value_BT = k2(logp, ref_logp, mask).to(dtype)
        # As another order of the sum does: by the rounding of the dtype.
        return value_BT * (1 + (len(mask) > 1) * torch.finfo(dtype).eps)

    loss_of(with_noise_of_its_precision)(batch_of())


def test_the_gradient_by_a_log_prob_that_the_loss_does_not_read_is_zero():
    batch = batch_of()
    constant_B = torch.zeros(len(batch.weight_B), dtype=torch.float64)
    assert torch.equal(slope_of(constant_B, batch), torch.zeros_like(batch.full_BTV))


def test_a_loss_may_not_write_into_what_later_calls_are_given():
    batch = batch_of()

    def writes(logp, ref_logp, mask):
        value = k2(logp, ref_logp, mask)
        ref_logp += 1
        return value

    with pytest.raises(UserError, match="changes its argument ref_logp in place"):
        loss_of(writes)(batch)
