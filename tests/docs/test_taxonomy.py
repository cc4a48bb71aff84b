"""Where the paths of docs/taxonomy.svg lead, by what each term's function says; its place is computed here apart."""

import pytest
import torch
from research.scripts.taxonomy_figure import CORNERS_32, REFERENCE, SAMPLER, TERMS, path

NEAR_THE_TOP = torch.tensor([1, 1, 5], dtype=torch.float64) / 7


def end_of(name, start_3=NEAR_THE_TOP):
    return path(TERMS[name], start_3)[-1]


def place(probabilities):
    return torch.tensor(probabilities, dtype=torch.float64) @ CORNERS_32


def test_a_proper_loss_leads_to_the_reference():
    assert float((end_of("k3 in the loss") - place(REFERENCE)).norm()) < 0.02


def test_a_repulsion_leads_to_where_the_samples_are_not():
    assert float((end_of("k1 in the loss") - CORNERS_32[2]).norm()) < 0.05


def test_a_difference_leads_to_the_token_that_the_reference_favours_most():
    favours = [ref / mu for ref, mu in zip(REFERENCE, SAMPLER, strict=True)]
    corner = CORNERS_32[favours.index(max(favours))]
    end = end_of("k1 frozen at the sampler × completion ratio", torch.tensor([3, 2, 2], dtype=torch.float64) / 7)
    assert float((end - corner).norm()) < 0.05


@pytest.mark.parametrize(("start", "returns"), [([1, 1, 5], False), ([3, 2, 2], True)])
def test_costs_that_are_never_negative_push_the_far_away_and_pull_the_near(start, returns):
    end = end_of("exact KL in the reward, no baseline", torch.tensor(start, dtype=torch.float64) / 7)
    assert (float((end - place(REFERENCE)).norm()) < 0.02) == returns
