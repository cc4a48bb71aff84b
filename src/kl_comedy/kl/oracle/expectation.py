"""What a list of terms descends, and what it is compared with, at one setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from kl_comedy.errors import bad_value
from kl_comedy.kl.baseline import own_baseline
from kl_comedy.kl.beta import BetaState
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle.moments import CHUNK, Moments, exact_moments
from kl_comedy.kl.oracle.rows import Loss, Rows
from kl_comedy.kl.oracle.setting import Setting
from kl_comedy.kl.surrogate import kl_parts, kl_surrogate
from kl_comedy.kl.term import KLTerm


def terms_loss(terms: Sequence[KLTerm]) -> Loss:
    """``sum_k beta_k surrogate_k``, per token; a schedule or a target counts with its first value."""

    def loss(rows: Rows, /) -> Tensor:
        total_BT = torch.zeros_like(rows.ref_logp_BT)
        for term in terms:
            total_BT = total_BT + number(term) * term_surrogate(term, rows)
        return total_BT

    return loss


def term_surrogate(term: KLTerm, rows: Rows) -> Tensor:
    """:func:`kl_surrogate` on rows, with the term's own baseline over each group where it has one."""
    arguments = term_arguments(term, rows)
    if term.baseline != "own":
        return kl_surrogate(term, **arguments)
    parts = kl_parts(term, **{name: tensor.detach() for name, tensor in arguments.items()})
    return kl_surrogate(term, **arguments, baseline_BT=own_baseline(parts, rows.mask_BT, rows.group_B))


def term_arguments(term: KLTerm, rows: Rows) -> dict[str, Tensor]:
    """What a term reads of rows."""
    return {
        "logp_BT": rows.logp_BT,
        "ref_logp_BT": rows.ref_logp_BT,
        "behaviour_logp_BT": rows.behaviour_logp_BT,
        "mask_BT": rows.mask_BT,
        "exact_kl_BT": rows.forward_kl_BT if term.needs == "exact_forward" else rows.reverse_kl_BT,
    }


def number(term: KLTerm) -> float:
    """The coefficient of a term as a number."""
    return BetaState(term.beta).value


def expected_gradient(setting: Setting, terms: Sequence[KLTerm], *, group_size: int = 1, chunk: int = CHUNK) -> Moments:
    """The exact mean and variance of the gradient of ``sum_k beta_k surrogate_k`` over the sampler's completions.

    A group matters to terms with a baseline of their own only.
    """
    return exact_moments(setting, terms_loss(terms), group_size=group_size, chunk=chunk)


def target_gradient(setting: Setting, target: str) -> Tensor:
    """The gradient ``[D]`` of a target (see :mod:`kl_comedy.kl.claims`) at the setting's policy.

    By the chain rule over prefixes, ``KL = sum_h P(h) KL_h``: no completion is enumerated. Prefixes are
    weighted by the policy's own visits (differentiated), the reference's, or the sampler's (held fixed).
    """
    theta_D = setting.theta_D.clone().requires_grad_(True)
    logp_NV = setting.policy_logp(theta_D)
    ratio_NV = logp_NV - setting.ref_logp_NV
    reverse_N = (logp_NV.exp() * ratio_NV).sum(-1)
    forward_N = -(setting.ref_logp_NV.exp() * ratio_NV).sum(-1)
    reach = setting.tree.reach
    if target == "zero":
        return torch.zeros_like(theta_D)
    if target == "sequence_reverse":
        scalar = reach(logp_NV) @ reverse_N
    elif target == "sequence_forward":
        scalar = reach(setting.ref_logp_NV) @ forward_N
    elif target == "token_reverse":
        scalar = reach(setting.sampler_logp_NV) @ reverse_N
    elif target == "token_forward":
        scalar = reach(setting.sampler_logp_NV) @ forward_N
    else:
        raise bad_value("target", target, TARGETS)
    return torch.autograd.grad(scalar, theta_D)[0]


def sequence_kl(setting: Setting) -> float:
    """``KL(pi || ref)`` over completions, nats."""
    return float(setting.tree.reach(setting.policy_logp()) @ setting.kl_N[0])


def effective_sample_share(setting: Setting) -> float:
    """``1 / E_mu[(pi / mu)^2]`` over completions: Kish's effective sample size over the number of samples."""
    square = 0.0
    policy_NV = setting.policy_logp()
    for completions in setting.tree.chunks(CHUNK):
        at, token = completions.prefix_BT, completions.token_BT
        drawn_BT = torch.where(completions.mask_BT, setting.sampler_logp_NV[at, token], 0.0)
        own_BT = torch.where(completions.mask_BT, policy_NV[at, token], 0.0)
        drawn_B = drawn_BT.sum(-1)
        square += float(torch.where(drawn_B > -1e3, (2 * own_BT.sum(-1) - drawn_B).exp(), 0.0).sum())
    return 1.0 / square


def against_the_sampler(setting: Setting) -> Setting:
    """The same setting with the sampler as the reference, for terms that pull towards it."""
    return dataclasses.replace(setting, ref_logp_NV=setting.recorded_logp_NV)
