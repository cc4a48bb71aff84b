"""The oracle's numbers the slow way: completions written out by hand, one autograd call for each of them.

Nothing here uses the algebra of :mod:`kl_comedy.kl.oracle.gradients` or the numbering of its trees beyond the
documented order of prefixes (by depth, then by digits).
"""

import itertools

import torch

from kl_comedy.kl.oracle import Moments, Rows


def prefixes(tree):
    """Every prefix as a tuple of tokens, in the documented order."""
    # Token 0 ends a completion where the tree has ends: no prefix holds it.
    first_token = 1 if tree.ends else 0
    continuing = range(first_token, tree.vocabulary)
    every_prefix = []
    for depth in range(tree.length):
        every_prefix.extend(itertools.product(continuing, repeat=depth))
    return every_prefix


def completions(tree):
    """Every completion as a tuple of tokens, found among all token strings, cut after the first end token."""
    strings = itertools.product(range(tree.vocabulary), repeat=tree.length)
    if not tree.ends:
        return sorted(strings)
    cut_strings = set()
    for string in strings:
        if 0 in string:
            cut_strings.add(string[: string.index(0) + 1])
        else:
            cut_strings.add(string)
    return sorted(cut_strings)


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
        """``[B, T]``: ``pick(number of the prefix, token)`` of every token, 0 after the end of a completion."""
        zero = torch.zeros((), dtype=torch.float64)
        rows = []
        for tokens in members:
            row = [pick(number[tokens[:t]], token) for t, token in enumerate(tokens)]
            padding = [zero] * (tree.length - len(tokens))
            rows.append(torch.stack(row + padding))
        return torch.stack(rows)

    lengths = [len(tokens) for tokens in members]
    # In a tree with ends, a completion without the end token was cut at the tree's depth.
    truncated = [tree.ends and 0 not in tokens for tokens in members]
    rewards = []
    for tokens, is_truncated in zip(members, truncated, strict=True):
        rewards.append(setting.reward_N2[number[tokens[:-1]], int(is_truncated)])
    return Rows(
        logp_BT=table(lambda n, v: logp_NV[n, v]),
        ref_logp_BT=table(lambda n, v: setting.ref_logp_NV[n, v]),
        behaviour_logp_BT=table(lambda n, v: setting.recorded_logp_NV[n, v]),
        mask_BT=torch.arange(tree.length)[None] < torch.tensor(lengths)[:, None],
        reverse_kl_BT=table(lambda n, v: kl_N[n]),
        forward_kl_BT=table(lambda n, v: forward_N[n]),
        reward_B=torch.stack(rewards),
        group_B=torch.zeros(len(members), dtype=torch.long),
        truncated_B=torch.tensor(truncated),
    )


def moments(setting, loss, *, group_size=1):
    """Mean and trace variance over every group, one autograd call for each."""
    mean_gradient_D = torch.zeros_like(setting.theta_D)
    mean_square = 0.0
    mean_norm = 0.0
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
        mean_gradient_D += weight * gradient_D
        mean_square += weight * float(gradient_D.square().sum())
        mean_norm += weight * float(gradient_D.norm())
    # Times the group's size: the variance per completion, so that groups of different sizes compare.
    variance = (mean_square - float(mean_gradient_D.square().sum())) * group_size
    return Moments(gradient_D=mean_gradient_D, variance=variance, mean_norm=mean_norm)
