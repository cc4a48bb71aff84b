"""Dialogues in the oracle: an environment writes a part of the tokens, and the targets have no part there.

The slow side walks every dialogue token by token, with Python's own loops, and differentiates what it sums up.
"""

import dataclasses
import itertools
import math

import pytest
import torch

import brute
from kl_comedy.conformance import check
from kl_comedy.kl import KLTerm, claimed_target
from kl_comedy.kl.oracle import InstanceSettings, Tree, exact_moments, target_gradient, terms_loss
from kl_comedy.kl.oracle.certificate import battery, certify, dialogue_on
from kl_comedy.kl.oracle.gradients import sampled_moments, sequence_kl
from kl_comedy.kl.oracle.policy_certificate import certify_policy, reward_gradient
from kl_comedy.objective import PolicyTerm
from multi_turn_losses import k2

REGIMES = ("on_policy", "off_policy", "mixed")
LAST = 2
"""The last token of the vocabulary of three: the tool's reply goes on after it."""


def dialogue(regime, parameters=6, length=3):
    settings = InstanceSettings(regime=regime, seed=4, parameters=parameters, distance=0.7, staleness=0.5)
    return dialogue_on(Tree.build(vocabulary=3, length=length), settings)


def is_tools(tokens):
    """For each token of a dialogue, whether the tool wrote it: after a call (1), and as long as it writes 2."""
    flags = []
    for token in range(len(tokens)):
        if token == 0:
            flags.append(False)
        elif flags[-1]:
            flags.append(tokens[token - 1] == LAST)
        else:
            flags.append(tokens[token - 1] == 1)
    return flags


class Slow:
    """Every dialogue of an instance: tokens, who wrote them, and log-probs as functions of the parameters."""

    def __init__(self, instance):
        self.instance = instance
        self.theta_D = instance.theta_D.clone().requires_grad_(True)
        self.number = {prefix: n for n, prefix in enumerate(brute.prefixes(instance.tree))}
        self.logp_NV = instance.policy_logp(self.theta_D)
        self.dialogues = [(tokens, is_tools(tokens)) for tokens in brute.completions(instance.tree)]

    def probability(self, table_NV, tokens):
        total = 0.0
        for t, (token, tools) in enumerate(zip(tokens, is_tools(tokens), strict=True)):
            whose_NV = self.instance.environment.logp_NV if tools else table_NV
            total = total + whose_NV[self.number[tokens[:t]], token]
        return total.exp()

    def gradient(self, value):
        return torch.autograd.grad(value, self.theta_D)[0]

    def target(self, name):
        """The KL over dialogues by its definition, or the exact KL at each prefix that sampled dialogues visit."""
        total = 0.0
        ref_NV = self.instance.ref_logp_NV
        for tokens, tools in self.dialogues:
            sampled = self.probability(self.instance.sampler_logp_NV, tokens).detach()
            drawn = self.probability(self.logp_NV, tokens)
            for t, token in enumerate(tokens):
                if tools[t]:
                    continue
                n = self.number[tokens[:t]]
                if name == "sequence_reverse":
                    total = total + drawn * (self.logp_NV[n, token] - ref_NV[n, token])
                elif name == "token_reverse":
                    total = total + sampled * (self.logp_NV[n].exp() * (self.logp_NV[n] - ref_NV[n])).sum()
                else:
                    assert name == "token_forward"
                    total = total + sampled * (ref_NV[n].exp() * (ref_NV[n] - self.logp_NV[n])).sum()
        return self.gradient(total)

    def mean_gradient(self, loss, group_size):
        """Over every group of dialogues, one autograd call for each."""
        mean_D = torch.zeros_like(self.theta_D)
        for members in itertools.product([tokens for tokens, _ in self.dialogues], repeat=group_size):
            weight = math.prod(float(self.probability(self.instance.sampler_logp_NV, member)) for member in members)
            if weight == 0:
                continue
            theta_D = self.instance.theta_D.clone().requires_grad_(True)
            rows = brute.rows_of(self.instance, members, theta_D)
            mask_BT = rows.mask_BT.clone()
            for row, member in enumerate(members):
                mask_BT[row, : len(member)] = ~torch.tensor(is_tools(member))
            value = loss(dataclasses.replace(rows, mask_BT=mask_BT)).sum() / group_size
            mean_D += weight * torch.autograd.grad(value, theta_D)[0]
        return mean_D


def test_a_dialogue_is_drawn_from_policy_and_tool_in_turn():
    instance = dialogue("off_policy", length=4)
    slow = Slow(instance)
    rows = instance.tree.all
    by_tokens = {}
    probability_B = instance.probability(rows)
    mask_BT = instance.rows(rows).mask_BT
    for row, size in enumerate(rows.mask_BT.sum(-1).tolist()):
        tokens = tuple(rows.token_BT[row, :size].tolist())
        by_tokens[tokens] = (float(probability_B[row]), mask_BT[row, :size].tolist())
    for tokens, tools in slow.dialogues:
        probability, trained = by_tokens[tokens]
        assert probability == pytest.approx(float(slow.probability(instance.sampler_logp_NV, tokens)), abs=1e-12)
        assert trained == [not flag for flag in tools]
    assert float(probability_B.sum()) == pytest.approx(1.0)
    # A reply of two tokens with a turn of the policy behind it, and a reply that is cut.
    possible = [tools for tokens, tools in slow.dialogues if by_tokens[tokens][0] > 0]
    shapes = {"".join("T" if flag else "p" for flag in tools) for tools in possible}
    assert {"pTTpp", "pTpTp", "pTTTT"} <= shapes


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", ["sequence_reverse", "token_reverse", "token_forward"])
def test_a_target_is_summed_over_the_policys_tokens(regime, name):
    instance = dialogue(regime)
    torch.testing.assert_close(target_gradient(instance, name), Slow(instance).target(name), atol=1e-12, rtol=1e-10)


def test_the_kl_of_dialogues_has_no_part_of_the_tools():
    """A tool is the same under both policies, whatever they say of its tokens."""
    instance = dialogue("on_policy")
    slow = Slow(instance)
    total = 0.0
    for tokens, _ in slow.dialogues:
        policy = slow.probability(slow.logp_NV.detach(), tokens)
        if float(policy) > 0:
            total += float(policy * (policy / slow.probability(instance.ref_logp_NV, tokens)).log())
    assert sequence_kl(instance) == pytest.approx(total, abs=1e-12)


TERMS = [
    KLTerm("k1"),
    KLTerm("k1", discount=0.7),
    KLTerm("k1", correction="sequence", credit="total"),
    KLTerm("k2", placement="loss"),
    KLTerm("k3", placement="loss", correction="token"),
    KLTerm("k2", placement="loss", level="sequence"),
    KLTerm("exact", placement="loss", correction="prefix_previous", window=2),
    KLTerm("exact", correction="prefix_previous"),
    KLTerm("exact_forward", placement="loss"),
]
"""What reads a sum over tokens, a discount, a window, a ratio of a prefix or of a completion, or a length."""
OWN = [
    KLTerm("k1", baseline="own"),
    KLTerm("exact", correction="prefix_previous", baseline="own"),
    KLTerm("k1", credit="own", baseline="batch"),
]


@pytest.mark.parametrize("regime", ["on_policy", "off_policy"])
@pytest.mark.parametrize(
    ("term", "group_size"),
    [*((term, 1) for term in TERMS), *((term, 2) for term in OWN)],
    ids=lambda value: value.label() if isinstance(value, KLTerm) else str(value),
)
def test_a_terms_gradient_is_that_of_every_dialogue_and_hits_what_it_claims(regime, term, group_size):
    instance = dialogue(regime, length=2 if group_size == 2 else 3)
    slow = Slow(instance)
    loss = terms_loss([term])
    moments = exact_moments(instance, loss, group_size=group_size)
    torch.testing.assert_close(moments.gradient_D, slow.mean_gradient(loss, group_size), atol=1e-10, rtol=1e-8)
    target = claimed_target(term, regime)
    # A mean over the batch contains the completion itself: its bias is known, and no claim is about it.
    if target in ("sequence_reverse", "token_reverse", "token_forward") and term.baseline != "batch":
        assert moments.error(slow.target(target)) < 1e-10


def test_samples_are_of_the_same_dialogues():
    instance = dialogue("off_policy")
    loss = terms_loss([KLTerm("k2", placement="loss")])
    exact = exact_moments(instance, loss)
    sampled = sampled_moments(instance, loss, samples=4000, generator=torch.Generator().manual_seed(0))
    distance = float((sampled.gradient_D - exact.gradient_D).norm())
    assert distance < 4 * (exact.variance / 4000) ** 0.5

    def infinite_where_a_tool_ends_a_dialogue(rows):
        is_tools_end_BT = (rows.token_BT == 0) & ~rows.mask_BT & (rows.logp_BT != 0)
        slope_BT = torch.where(is_tools_end_BT, torch.inf, 1.0)
        return slope_BT * rows.logp_BT

    # It never does: were its tokens drawn from the policy, some dialogue would end there.
    sampled_moments(
        instance, infinite_where_a_tool_ends_a_dialogue, samples=4000, generator=torch.Generator().manual_seed(0)
    )


def leaking_to_go(rows):
    """A cost to go that adds up a tool's tokens too; the score has the mask."""
    costs_BT = (rows.logp_BT - rows.ref_logp_BT).detach()
    return torch.where(rows.mask_BT, costs_BT.flip(-1).cumsum(-1).flip(-1) * rows.logp_BT, 0.0)


def trained_on_tools(rows):
    """k2 without the mask: a gradient at a tool's tokens."""
    return 0.5 * (rows.logp_BT - rows.ref_logp_BT) ** 2


@pytest.mark.parametrize(("loss", "target"), [(leaking_to_go, "sequence_reverse"), (trained_on_tools, "token_reverse")])
def test_a_loss_that_reads_a_tools_tokens_misses_in_dialogues_alone(loss, target):
    errors = {True: [], False: []}
    for case in battery("on_policy"):
        is_dialogue = case.instance.environment is not None
        errors[is_dialogue].append(exact_moments(case.instance, loss).error(case.targets[target]))
    assert max(errors[False]) < 1e-9
    assert len(errors[True]) == 2
    assert min(errors[True]) > 1e-2


@pytest.mark.parametrize("regime", REGIMES)
def test_certificates_are_of_dialogues_by_default(regime, monkeypatch):
    """A term whose mask were forgotten has no certificate: the battery itself shows it."""
    term = KLTerm("exact", placement="loss", correction="prefix_previous")
    (certificate,) = certify("t", [term], regimes=[regime])
    assert certificate.target == "sequence_reverse"
    monkeypatch.setattr("kl_comedy.kl.oracle.certificate.terms_loss", lambda terms: trained_on_tools)
    (certificate,) = certify("t", [KLTerm("k2", placement="loss")], regimes=[regime])
    assert certificate.target is None


@pytest.mark.parametrize("regime", REGIMES)
def test_the_gradient_of_a_reward_of_dialogues(regime):
    """The reward of a whole dialogue, by the score of the policy's tokens alone."""
    instance = dialogue(regime)
    slow = Slow(instance)
    total = 0.0
    paid_in = 0
    for tokens, tools in slow.dialogues:
        is_cut = int(0 not in tokens)
        reward = float(instance.reward_N2[slow.number[tokens[:-1]], is_cut])
        for t in range(1, len(tokens)):
            # A turn is paid for where the tool begins to write.
            if tools[t] and not tools[t - 1]:
                paid = float(instance.environment.paid_N[slow.number[tokens[:t]]])
                paid_in += paid != 0
                reward += paid
        total = total - slow.probability(slow.logp_NV, tokens) * reward
    assert paid_in > 0
    torch.testing.assert_close(reward_gradient(instance), slow.gradient(total), atol=1e-12, rtol=1e-10)
    (certificate,) = certify_policy("t", PolicyTerm(corrections={"sequence": {}}), regimes=[regime])
    assert certificate.exact


# --- a user's own loss ----------------------------------------------------------------------------------------------
def agentic(logp, ref_logp, completion_mask, tool_mask):
    """As TRL's: the completion's mask has a tool's replies, and the mask of the loss is the product."""
    mask = completion_mask * tool_mask
    return k2(logp, ref_logp) * mask


def agentic_without_tool_mask(logp, ref_logp, completion_mask, tool_mask):
    return k2(logp, ref_logp) * completion_mask


def agentic_length(logp, ref_logp, completion_mask, tool_mask):
    """Divided by the tokens of the batch, a tool's replies included."""
    return (k2(logp, ref_logp) * completion_mask * tool_mask).sum() / completion_mask.sum()


def agentic_to_go(logp, ref_logp, mask):
    costs = (logp - ref_logp).detach()
    return costs.flip(-1).cumsum(-1).flip(-1) * logp * mask


def masked_to_go(logp, ref_logp, mask):
    costs = (logp - ref_logp).detach() * mask
    return costs.flip(-1).cumsum(-1).flip(-1) * logp * mask


ON = {"regimes": ("on_policy",)}


@pytest.mark.parametrize(("loss", "claims"), [(agentic, "token_reverse"), (masked_to_go, "sequence_reverse")])
def test_an_agentic_loss_passes(loss, claims):
    report = check(loss, claims=claims, **ON)
    report.assert_ok()
    assert "dialogues in which a tool replies" in str(report)


@pytest.mark.parametrize(
    ("loss", "claims", "words"),
    [
        (agentic_without_tool_mask, "token_reverse", "the attention mask stands where the mask is meant"),
        (agentic_length, "token_reverse", "divides by the tokens of the attention mask"),
        (agentic_to_go, "sequence_reverse", "change the loss, and the gradient of"),
    ],
)
def test_an_agentic_loss_that_leaks_is_named(loss, claims, words):
    report = check(loss, claims=claims, **ON)
    assert not report.ok
    assert words in str(report)


def test_without_masked_tokens_there_are_no_dialogues():
    check(agentic_to_go, claims="sequence_reverse", masked_tokens="absent", **ON).assert_ok()
