"""Groups without signal: each gradient of the table is summed again over the groups that an update can have.

The slow side has Python's loops over prompts, pairs of completions and draws, and one score per token by autograd.
"""

import itertools
import math
import sys
from pathlib import Path

import pytest
import torch

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext, kl_effect, signal_share

sys.path.insert(0, str(Path(__file__).parents[2] / "research" / "scripts"))
from doc_tables.groups_without_signal import CONVENTIONS, prompts_of, selected, targets_of

DRAWS = 4000
"""So many that what no draw has filled is nothing."""


class Slow:
    """Every pair of completions of one prompt: its probability, its gradients, and whether its rewards differ."""

    def __init__(self, instance, advantage):
        everything = instance.tree.all
        rows = instance.rows(everything)
        score_NVD = torch.autograd.functional.jacobian(instance.policy_logp, instance.theta_D)
        completions = []
        for row, probability in enumerate(instance.probability(everything).tolist()):
            if probability == 0:
                continue
            places = [place for place, inside in enumerate(rows.mask_BT[row].tolist()) if inside]
            ratios = [float((rows.logp_BT - rows.behaviour_logp_BT)[row, place].detach()) for place in places]
            k1 = [float((rows.logp_BT - rows.ref_logp_BT)[row, place].detach()) for place in places]
            scores = [score_NVD[everything.prefix_BT[row, place], everything.token_BT[row, place]] for place in places]
            costs = [math.exp(sum(ratios[: place + 1])) * k1[place] for place in range(len(places))]
            kl_D = sum(sum(costs[place:]) * score_D for place, score_D in enumerate(scores))
            weighted_D = math.exp(sum(ratios)) * sum(scores)
            completions.append((probability, float(rows.reward_B[row]), weighted_D, kl_D))
        self.groups = []
        for one, other in itertools.product(completions, repeat=2):
            gradients = {"reward": 0.0, "KL": (one[3] + other[3]) / 2}
            for mine, yours in ((one, other), (other, one)):
                baseline = yours[1] if advantage == "rloo" else 0.0
                gradients["reward"] = gradients["reward"] - (mine[1] - baseline) * mine[2] / 2
            self.groups.append((one[0] * other[0], one[1] != other[1], gradients))

    def mean(self, part, with_signal=False):
        return sum(p * gradients[part] for p, differs, gradients in self.groups if differs or not with_signal)

    @property
    def silent(self):
        return sum(probability for probability, differs, _ in self.groups if not differs)


def kept(part, prompts):
    return sum(prompt.mean(part) for prompt in prompts) / len(prompts)


def drawn_again(part, prompts):
    """A place of an update, draw by draw, each of a prompt at random."""
    total = 0.0
    nothing_yet = 1.0
    for _ in range(DRAWS):
        total = total + nothing_yet * sum(prompt.mean(part, with_signal=True) for prompt in prompts) / len(prompts)
        nothing_yet *= sum(prompt.silent for prompt in prompts) / len(prompts)
    return total


def of_two_groups(part, one, other):
    """The mean over the groups of an update that have a signal, over all pairs of groups."""
    total = 0.0
    for first, second in itertools.product(one.groups, other.groups):
        learned = [gradients[part] for _, differs, gradients in (first, second) if differs]
        if learned:
            total = total + first[0] * second[0] * sum(learned) / len(learned)
    return total


def left_out_at_random(part, prompts):
    return sum(of_two_groups(part, *pair) for pair in itertools.product(prompts, repeat=2)) / 4


def left_out_of_each(part, prompts):
    return of_two_groups(part, *prompts)


def again_of_the_same(part, prompts):
    return sum(drawn_again(part, [prompt]) for prompt in prompts) / len(prompts)


PLAIN = (kept, drawn_again, left_out_at_random, left_out_of_each, again_of_the_same, drawn_again)


@pytest.fixture(scope="module", params=["on_policy", "off_policy"])
def prompts(request):
    pair = prompts_of(request.param, 0, length=2)
    shares = [signal_share(prompt, 2) for prompt in pair]
    assert min(shares) > 0.02
    assert shares[0] != shares[1]
    return pair


@pytest.mark.parametrize(("convention", "plain"), zip(CONVENTIONS, PLAIN, strict=True), ids=range(len(PLAIN)))
def test_a_line_of_the_table_is_the_sum_over_all_updates(prompts, convention, plain):
    slow = [Slow(prompt, convention.advantage) for prompt in prompts]
    for part, gradient_D in selected(convention, prompts).items():
        plain_D = plain(part, slow)
        # An update that has no group left has no gradient: that of the others is smaller by a factor.
        factor = float(plain_D @ gradient_D / gradient_D.square().sum())
        torch.testing.assert_close(plain_D, factor * gradient_D, rtol=1e-9, atol=1e-12)
        if plain is not left_out_at_random:
            assert factor == pytest.approx(1.0, rel=1e-9)


def test_which_selections_leave_the_direction_of_the_reward_and_none_that_of_the_kl(prompts):
    targets = targets_of(prompts)
    off = {}
    for convention in CONVENTIONS:
        for part, gradient_D in selected(convention, prompts).items():
            off[convention.name, part] = 1 - float(torch.cosine_similarity(gradient_D, targets[part], dim=0))
    names = [convention.name for convention in CONVENTIONS]
    assert [name for name in names if off[name, "reward"] < 1e-12] == names[:3]
    assert [name for name in names if off[name, "KL"] < 1e-12] == names[:1]


def test_certify_has_the_groups_with_signal_of_a_config(prompts):
    """The KL part that a config's certificate shows, with its variance, against the loops over pairs."""
    term = KLTerm("k1", credit="to_go", correction="prefix")
    instance = prompts[0]
    context = AlgorithmContext(advantage="rloo", group_size=2, correction={"sequence": {}}, signal_only=True)
    moments = kl_effect(instance, [term], context)
    slow = Slow(instance, "rloo")
    share = 1 - slow.silent
    expected_D = slow.mean("KL", with_signal=True) / share
    torch.testing.assert_close(moments.gradient_D, expected_D, rtol=1e-9, atol=1e-12)
    whole_D = (slow.mean("KL", with_signal=True) + slow.mean("reward", with_signal=True)) / share
    spread = sum(
        probability / share * float((gradients["KL"] + gradients["reward"] - whole_D).square().sum())
        for probability, differs, gradients in slow.groups
        if differs
    )
    assert moments.variance == pytest.approx(2 * spread, rel=1e-9)
