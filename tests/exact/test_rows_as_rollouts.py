"""The table of conventions for rollouts of several rows: each gradient is summed again, token by token, over all pairs.

The slow side has Python's loops over dialogues, rows and tokens, and one score per token by autograd.
"""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from kl_comedy.kl.oracle import InstanceSettings, Tree, exact_moments, target_gradient
from kl_comedy.kl.oracle.certificate import dialogue_on
from kl_comedy.kl.oracle.policy_certificate import reward_gradient

sys.path.insert(0, str(Path(__file__).parents[2] / "research" / "scripts"))
from doc_tables.rollout_rows import CONVENTIONS, PARTS_OF_A_LOSS

ROLLOUTS = CONVENTIONS[0]


def dialogue(regime, seed=1, length=3):
    settings = InstanceSettings(regime=regime, seed=seed, parameters=6, distance=0.7, staleness=0.5)
    return dialogue_on(Tree.build(vocabulary=3, length=length), settings)


class Slow:
    """Every dialogue that can be drawn: its rows, as lists of places, and what stands at each place."""

    def __init__(self, instance):
        everything = instance.tree.all
        rows = instance.rows(everything)
        self.probability = instance.probability(everything).tolist()
        self.score_NVD = torch.autograd.functional.jacobian(instance.policy_logp, instance.theta_D)
        self.scores_BTD = self.score_NVD[everything.prefix_BT, everything.token_BT]
        self.reward = rows.reward_B.tolist()
        self.k1 = (rows.logp_BT - rows.ref_logp_BT).tolist()
        self.delta = (rows.logp_BT - rows.behaviour_logp_BT).tolist()
        self.rows = []
        for mask in rows.mask_BT.tolist():
            turns = []
            for place, own in enumerate(mask):
                if own and (place == 0 or not mask[place - 1]):
                    turns.append([])
                if own:
                    turns[-1].append(place)
            self.rows.append(turns)

    def tokens(self, one):
        return [place for row in self.rows[one] for place in row]

    def weight(self, convention, one, other, row):
        """The factor of a token of a row, beside the mean over the two dialogues."""
        factor = 1.0
        if convention.mean:
            factor *= 2 / (len(self.rows[one]) + len(self.rows[other]))
        if convention.tokens == "row":
            factor /= len(row)
        if convention.tokens == "rollout":
            factor /= len(self.tokens(one))
        if convention.tokens == "update":
            factor *= 2 / (len(self.tokens(one)) + len(self.tokens(other)))
        return factor

    def reward_part(self, convention, one, other):
        """``[D]``: what dialogue ``one`` adds beside ``other``."""
        others = [self.reward[other]]
        if convention.group:
            others = [self.reward[other]] * len(self.rows[other]) + [self.reward[one]] * (len(self.rows[one]) - 1)
        baseline = sum(others) / len(others)
        total = 0.0
        for row in self.rows[one]:
            in_ratio = row if convention.ratio else self.tokens(one)
            ratio = math.exp(sum(self.delta[one][place] for place in in_ratio))
            reward = self.reward[one] if not convention.last or row is self.rows[one][-1] else 0.0
            for place in row:
                factor = self.weight(convention, one, other, row) * ratio * (reward - baseline)
                total = total - factor * self.scores_BTD[one, place]
        return total

    def kl_part(self, convention, one, other):
        total = 0.0
        for row in self.rows[one]:
            along = row if convention.kl else self.tokens(one)
            for place in row:
                to_go = 0.0
                for later in along[along.index(place) :]:
                    up_to = along[: along.index(later) + 1]
                    to_go += math.exp(sum(self.delta[one][u] for u in up_to)) * self.k1[one][later]
                total = total + self.weight(convention, one, other, row) * to_go * self.scores_BTD[one, place]
        return total

    def gradient(self, part, convention):
        of = {"reward": self.reward_part, "KL": self.kl_part}[part]
        possible = [number for number, probability in enumerate(self.probability) if probability > 0]
        total = 0.0
        for one, other in itertools.product(possible, repeat=2):
            drawn = self.probability[one] * self.probability[other]
            total = total + drawn * (of(convention, one, other) + of(convention, other, one)) / 2
        return total


@pytest.fixture(scope="module")
def slow():
    instance = dialogue("off_policy")
    assert max(len(rows) for rows in Slow(instance).rows) >= 2
    return instance, Slow(instance)


@pytest.mark.parametrize("part", PARTS_OF_A_LOSS)
@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_a_line_of_the_table_is_the_sum_over_all_pairs(slow, part, convention):
    instance, summed = slow
    moments = exact_moments(instance, PARTS_OF_A_LOSS[part](convention), group_size=2)
    torch.testing.assert_close(moments.gradient_D, summed.gradient(part, convention), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize("part", PARTS_OF_A_LOSS)
def test_what_belongs_to_the_rollout_is_unbiased(part, regime):
    """The first line, in its length too; every other line but those of one column has a bias."""
    instance = dialogue(regime)
    target_D = reward_gradient(instance) if part == "reward" else target_gradient(instance, "sequence_reverse")
    assert exact_moments(instance, PARTS_OF_A_LOSS[part](ROLLOUTS), group_size=2).error(target_D) < 1e-12
    biased = [
        convention.name
        for convention in CONVENTIONS
        if exact_moments(instance, PARTS_OF_A_LOSS[part](convention), group_size=2).relative_bias(target_D) > 1e-3
    ]
    assert len(biased) >= len(CONVENTIONS) - 5
