"""The comparison itself can fail: terms that are near misses are told apart, by the rows that were drawn for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import terms_loss

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from peers.adapters import SYSTEMS, adapter
from peers.case import Case, batch_by_batch, groups_of
from peers.equivalence import bound, difference, random_rows
from peers.measure import measure

VERL_K3 = KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0)


def case_of(theirs: KLTerm, ours: KLTerm) -> Case:
    return Case(
        system="none",
        version="0",
        name="none:planted",
        flags="",
        kind="kl function",
        placement=theirs.placement,
        loss=terms_loss((theirs,)),
        module="",
        function="",
        loaded=dict,
        ours=(ours,),
    )


@pytest.mark.parametrize(
    "near_miss",
    [
        replace(VERL_K3, output_clamp=None),
        replace(VERL_K3, output_clamp=11.0),
        replace(VERL_K3, correction="token"),
        replace(VERL_K3, gradient="k2"),
        KLTerm("k2", placement="loss"),
    ],
    ids=lambda term: term.label(),
)
def test_a_near_miss_is_not_equal(near_miss: KLTerm) -> None:
    missed = case_of(VERL_K3, near_miss)
    assert difference(missed) > 1e3 * bound(missed)


def test_a_term_is_equal_to_itself() -> None:
    assert difference(case_of(VERL_K3, VERL_K3)) == 0.0


def test_a_correction_is_told_apart_off_policy_only() -> None:
    missed = case_of(VERL_K3, replace(VERL_K3, correction="token_detached"))
    assert difference(replace(missed, equal_in=("on_policy",))) == pytest.approx(0.0, abs=1e-12)
    assert difference(missed) > 0.01


# --- what a row of measurements says ------------------------------------------------------------------------------
def test_the_oracle_names_what_a_case_optimizes() -> None:
    row = measure(case_of(KLTerm("k2", placement="loss"), VERL_K3), "on_policy")
    assert row["target"] == "token_reverse"
    assert row["bias_token_reverse"] < 1e-9
    assert row["bias_sequence_reverse"] > 1e-9
    assert not row["silent_no_op"]
    assert row["dead_share_far"] == 0.0, "no clamp"


def test_the_oracle_names_the_nearest_target_of_a_clamped_case() -> None:
    row = measure(case_of(VERL_K3, VERL_K3), "on_policy")
    assert row["target"] is None
    assert row["near_target"] == "token_forward"
    assert row["dead_share_far"] > 0


def test_a_loss_without_any_gradient_is_a_silent_no_op() -> None:
    dead = replace(case_of(VERL_K3, VERL_K3), loss=lambda rows: 0.0 * rows.logp_BT)
    row = measure(dead, "off_policy")
    assert row["silent_no_op"]
    assert row["target"] == "zero"
    assert row["dead_share_far"] == 1.0


def test_a_loss_whose_gradient_is_noise_is_not_silent() -> None:
    row = measure(case_of(KLTerm("k1", placement="loss"), VERL_K3), "on_policy")
    assert row["target"] == "zero"
    assert not row["silent_no_op"]
    assert row["variance"] > 1.0


def test_groups_are_batches_of_their_own() -> None:
    rows = random_rows(1.0, seed=3, on_policy=False)
    pieces = groups_of(rows, 4)
    assert len(pieces) * 4 == len(rows.group_B)
    assert torch.equal(torch.cat([piece.logp_BT for piece in pieces]), rows.logp_BT)


def test_a_loss_may_be_computed_group_by_group() -> None:
    rows = random_rows(1.0, seed=3, on_policy=False)
    sizes = []

    def loss(piece):
        sizes.append(len(piece.group_B))
        return piece.logp_BT.sum(-1)

    assert torch.equal(batch_by_batch(loss, 4)(rows), rows.logp_BT.sum(-1))
    assert sizes == [4] * (len(rows.group_B) // 4)


def test_names_are_unique() -> None:
    names = [case.name for system in SYSTEMS for case in adapter(system).cases]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("system", SYSTEMS)
def test_names_say_their_system(system: str) -> None:
    for case in adapter(system).cases:
        assert case.name.startswith(f"{system}:")
