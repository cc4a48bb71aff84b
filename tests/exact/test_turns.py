"""Baselines of turns: each gradient of the table is summed again, token by token, over all pairs of dialogues.

The slow side has Python's loops over dialogues, turns and tokens, and one score per token by autograd.
"""

import itertools
import math
import statistics
import sys
from pathlib import Path

import pytest
import torch

import brute
from kl_comedy.kl.oracle import exact_moments
from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext, training_loss
from kl_comedy.kl.oracle.policy_certificate import reward_gradient
from kl_comedy.objective.advantages import EPSILON

sys.path.insert(0, str(Path(__file__).parents[2] / "research" / "scripts"))
from doc_tables.turn_baselines import CONVENTIONS, instance_of, turn_loss

UNBIASED = 4
"""The first lines of the table."""


class Slow:
    """Every dialogue that can be drawn: its turns, as lists of places, and what is paid from each turn on."""

    def __init__(self, instance):
        everything = instance.tree.all
        rows = instance.rows(everything)
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(instance.tree))}
        probability = instance.probability(everything).tolist()
        score_NVD = torch.autograd.functional.jacobian(instance.policy_logp, instance.theta_D)
        delta_BT = (rows.logp_BT - rows.behaviour_logp_BT).detach()
        self.dialogues = []
        for row, size in enumerate(everything.mask_BT.sum(-1).tolist()):
            if probability[row] == 0:
                continue
            tokens = tuple(everything.token_BT[row, :size].tolist())
            mask = rows.mask_BT[row].tolist()
            turns = []
            paid = []
            for place in range(size):
                if mask[place] and (place == 0 or not mask[place - 1]):
                    turns.append([])
                    paid.append(0.0)
                if mask[place]:
                    turns[-1].append(place)
                elif mask[place - 1]:
                    paid[-1] = float(instance.environment.paid_N[self.number[tokens[:place]]])
            final = float(instance.reward_N2[self.number[tokens[:-1]], int(0 not in tokens)])
            self.dialogues.append(
                {
                    "tokens": tokens,
                    "probability": probability[row],
                    "turns": turns,
                    "returns": [final + sum(paid[number:]) for number in range(len(turns))],
                    "ratio": math.exp(sum(float(delta_BT[row, place]) for place in range(size) if mask[place])),
                    "scores": [score_NVD[self.number[tokens[:place]], tokens[place]] for place in range(size)],
                }
            )

    def value(self, prefix):
        """What the sampler's dialogues that begin with a prefix earn from its turn on."""
        total = 0.0
        weight = 0.0
        for dialogue in self.dialogues:
            if dialogue["tokens"][: len(prefix)] != prefix or len(dialogue["tokens"]) == len(prefix):
                continue
            (turn,) = [number for number, places in enumerate(dialogue["turns"]) if len(prefix) in places]
            total += dialogue["probability"] * dialogue["returns"][turn]
            weight += dialogue["probability"]
        return total / weight

    def advantage(self, name, one, other, turn, place):
        own = one["returns"][turn]
        places = one["turns"][turn]
        is_alone = turn >= len(other["turns"])
        opposite = 0.0 if is_alone else other["returns"][turn]
        if name == "nothing":
            return own
        if name.startswith("the mean of the group's others"):
            return own - opposite
        if name.startswith("the value before"):
            before = place
            if "first" in name:
                before = places[0]
            if "last" in name:
                before = places[-1]
            return own - self.value(one["tokens"][:before])
        if name.startswith("the mean of the group at the same turn"):
            return own if is_alone else own - (own + opposite) / 2
        if name == "the same, over the deviation":
            if is_alone:
                return own
            return (own - (own + opposite) / 2) / (statistics.stdev([own, opposite]) + EPSILON)
        if name.endswith("0 where there is none"):
            return 0.0 if is_alone else own - opposite
        assert name == "the mean over all turns of the group"
        every = one["returns"] + other["returns"]
        return own - sum(every) / len(every)

    def gradient(self, name):
        total = 0.0
        for one, other in itertools.product(self.dialogues, repeat=2):
            # The other's part is that of the same pair in the other order.
            drawn = one["probability"] * other["probability"]
            for turn, places in enumerate(one["turns"]):
                for place in places:
                    factor = drawn * one["ratio"] * self.advantage(name, one, other, turn, place)
                    total = total - factor * one["scores"][place]
        return total


@pytest.fixture(scope="module")
def slow():
    instance = instance_of("off_policy", 1, length=3)
    summed = Slow(instance)
    assert max(len(dialogue["turns"]) for dialogue in summed.dialogues) >= 2
    assert any(float(paid) for paid in instance.environment.paid_N)
    return instance, summed


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_a_line_of_the_table_is_the_sum_over_all_pairs(slow, convention):
    instance, summed = slow
    moments = exact_moments(instance, turn_loss(convention, instance), group_size=2)
    torch.testing.assert_close(moments.gradient_D, summed.gradient(convention.name), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
def test_a_baseline_that_the_turn_itself_is_in_is_biased_and_the_others_are_not(regime):
    instance = instance_of(regime, 0)
    target_D = reward_gradient(instance)
    for number, convention in enumerate(CONVENTIONS):
        moments = exact_moments(instance, turn_loss(convention, instance), group_size=2)
        if number < UNBIASED:
            assert moments.error(target_D) < 1e-12, convention.name
        else:
            assert moments.cosine(target_D) < 0.999, convention.name


@pytest.mark.parametrize(
    ("advantage", "is_exact"), [("none", True), ("rloo", True), ("dr_grpo", False), ("grpo", False)]
)
@pytest.mark.parametrize("group_size", [2, 3])
def test_advantages_by_turn_around_the_terms(advantage, is_exact, group_size):
    """As `certify` has a config's algorithm, for groups whose turns have more than one other too."""
    instance = instance_of("off_policy", 2, length=2)
    context = AlgorithmContext(
        advantage=advantage, group_size=group_size, credit="turn", correction={"sequence": {}}, reward_scale=2.0
    )
    moments = exact_moments(instance, training_loss([], context), group_size=group_size)
    target_D = 2.0 * reward_gradient(instance)
    assert (moments.error(target_D) < 1e-12) == is_exact
    if not is_exact:
        assert moments.cosine(target_D) < 0.9999
