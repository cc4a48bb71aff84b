"""The oracle's numbers the slow way: completions written out by hand, one autograd call for each of them.

Nothing here uses the algebra of :mod:`kl_comedy.kl.oracle.gradients` or the numbering of its trees beyond the
documented order of prefixes (by depth, then by digits).
"""

import itertools

import torch

from kl_comedy.kl.oracle import Moments, Rows


def prefixes(tree):
    """Every prefix as a tuple of tokens, in the documented order."""
    going = range(1, tree.vocabulary) if tree.ends else range(tree.vocabulary)
    return [p for depth in range(tree.length) for p in itertools.product(going, repeat=depth)]


def completions(tree):
    """Every completion as a tuple of tokens, found among all token strings, cut after the first end token."""
    whole = itertools.product(range(tree.vocabulary), repeat=tree.length)
    if not tree.ends:
        return sorted(whole)
    return sorted({w[: w.index(0) + 1] if 0 in w else w for w in whole})


def probability(setting, tokens):
    """The probability with which the sampler draws these tokens."""
    number = {p: n for n, p in enumerate(prefixes(setting.tree))}
    logps = [float(setting.sampler_logp_NV[number[tokens[:t]], token]) for t, token in enumerate(tokens)]
    return float(torch.tensor(logps, dtype=torch.float64).sum().exp())


def rows_of(setting, members, theta_D):
    """What a loss sees of a group of completions, as functions of ``theta_D``."""
    tree = setting.tree
    number = {p: n for n, p in enumerate(prefixes(tree))}
    if setting.features_NVD is None:
        logits_NV = theta_D.reshape(len(number), tree.vocabulary)
    else:
        logits_NV = torch.einsum("nvd,d->nv", setting.features_NVD, theta_D)
    logp_NV = torch.log_softmax(logits_NV, -1)
    kl_N = (logp_NV.exp() * (logp_NV - setting.ref_logp_NV)).sum(-1)
    forward_N = (setting.ref_logp_NV.exp() * (setting.ref_logp_NV - logp_NV)).sum(-1)

    def table(pick):
        zero = torch.zeros((), dtype=torch.float64)
        lines = [[pick(number[m[:t]], m[t]) if t < len(m) else zero for t in range(tree.length)] for m in members]
        return torch.stack([torch.stack(line) for line in lines])

    truncated = [tree.ends and 0 not in m for m in members]
    return Rows(
        logp_BT=table(lambda n, v: logp_NV[n, v]),
        ref_logp_BT=table(lambda n, v: setting.ref_logp_NV[n, v]),
        behaviour_logp_BT=table(lambda n, v: setting.recorded_logp_NV[n, v]),
        mask_BT=torch.tensor([[t < len(m) for t in range(tree.length)] for m in members]),
        reverse_kl_BT=table(lambda n, v: kl_N[n]),
        forward_kl_BT=table(lambda n, v: forward_N[n]),
        reward_B=torch.stack(
            [setting.reward_N2[number[m[:-1]], int(t)] for m, t in zip(members, truncated, strict=True)]
        ),
        group_B=torch.zeros(len(members), dtype=torch.long),
        truncated_B=torch.tensor(truncated),
    )


def moments(setting, loss, *, group_size=1):
    """Mean and trace variance over every group, one autograd call for each."""
    weighted, second, norm = torch.zeros_like(setting.theta_D), 0.0, 0.0
    for members in itertools.product(completions(setting.tree), repeat=group_size):
        theta_D = setting.theta_D.clone().requires_grad_(True)
        rows = rows_of(setting, members, theta_D)
        value = loss(rows).sum() / group_size
        gradient_D = torch.zeros_like(theta_D)
        if value.requires_grad:
            (gradient_D,) = torch.autograd.grad(value, theta_D, allow_unused=True, materialize_grads=True)
        weight = 1.0
        for member in members:
            weight *= probability(setting, member)
        weighted += weight * gradient_D
        second += weight * float(gradient_D.square().sum())
        norm += weight * float(gradient_D.norm())
    variance = (second - float(weighted.square().sum())) * group_size
    return Moments(gradient_D=weighted, variance=variance, mean_norm=norm)
