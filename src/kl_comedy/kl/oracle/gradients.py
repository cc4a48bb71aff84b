"""The mean and the variance of a loss's gradient: exact, or by Monte Carlo with what it knows of its error.

A loss reaches the parameters through three numbers per token only: the policy's log-prob, and the exact
reverse and forward KL of its prefix. One backward pass through the loss gives its derivatives with
respect to them for every completion at once; the rest is linear algebra with the score tables. So a
loss is never differentiated per sample, and completions are walked in chunks.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters, ``B`` completions, ``C`` groups of ``G`` completions.

What a list of terms optimizes, and what it is compared with, at one instance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.beta import BetaState
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle.enumeration import Completions, Instance, Loss, Rows
from kl_comedy.kl.surrogate import kl_parts, kl_surrogate, own_baseline
from kl_comedy.kl.term import KLTerm

CHUNK = 8192
"""Completions in memory at once."""

TOLERANCE = 1e-9
"""Relative difference up to which an enumerated gradient equals a target."""

MAX_GROUPS = 4_000_000
"""Groups that are still enumerated; beyond, ask for smaller groups or a smaller tree."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The expected gradient ``[D]`` and the trace of its covariance for one completion.

    For groups, ``variance`` is that of the group's mean gradient times the group's size, so that losses
    compare at equal samples.
    """

    gradient_D: Tensor
    variance: float

    def relative_bias(self, target_D: Tensor) -> float:
        """``|g - target| / |target|``; for a zero target, ``|g|``."""
        size = float(target_D.norm())
        return float((self.gradient_D - target_D).norm()) / (size if size > 0 else 1.0)

    def cosine(self, target_D: Tensor) -> float:
        """The cosine with a target; NaN where either is zero."""
        sizes = float(self.gradient_D.norm()) * float(target_D.norm())
        return float(self.gradient_D @ target_D) / sizes if sizes > 0 else float("nan")

    def equals(self, target_D: Tensor) -> bool:
        """Whether the gradient is the target up to rounding, which grows with the noise that was summed over."""
        scale = float(target_D.norm()) + math.sqrt(self.variance) + float(self.gradient_D.norm())
        return float((self.gradient_D - target_D).norm()) <= TOLERANCE * max(scale, 1e-3)


def exact_moments(instance: Instance, loss: Loss, *, group_size: int = 1, chunk: int = CHUNK) -> Moments:
    """Sum over every completion (every group of ``group_size`` independent ones) the sampler can draw.

    Raises :class:`UserError` where there are more than :data:`MAX_GROUPS` groups, or a loss of a wrong shape.
    """
    scores = _scores(instance)
    gradient_D = torch.zeros_like(instance.theta_D)
    second = 0.0
    for completions, weight_C in _groups(instance, group_size, chunk):
        gradients = scores.of(completions, *_derivatives(instance, loss, completions, group_size), group_size)
        gradient_D += gradients.mean(weight_C)
        second += gradients.square(weight_C)
    variance = (second - float(gradient_D.square().sum())) * group_size
    return Moments(gradient_D=gradient_D, variance=max(variance, 0.0))


def sampled_moments(
    instance: Instance, loss: Loss, *, samples: int, generator: torch.Generator, group_size: int = 1
) -> Moments:
    """The same from ``samples`` completions the sampler draws; the mean has variance ``variance / samples``."""
    scores = _scores(instance)
    groups = samples // group_size
    completions = instance.tree.sample(instance.sampler_logp_NV, groups * group_size, generator)
    gradients = scores.of(completions, *_derivatives(instance, loss, completions, group_size), group_size)
    weight_C = torch.full((groups,), 1.0 / groups, dtype=torch.float64)
    gradient_D = gradients.mean(weight_C)
    spread = gradients.square(weight_C) - float(gradient_D.square().sum())
    return Moments(gradient_D=gradient_D, variance=max(spread * groups / (groups - 1), 0.0) * group_size)


def _groups(instance: Instance, group_size: int, chunk: int) -> Iterator[tuple[Completions, Tensor]]:
    """Every group of completions, flat, with its probability ``[C]``; completions of probability zero are left out."""
    tree = instance.tree
    if group_size == 1:
        for completions in tree.chunks(chunk):
            weight_C = instance.probability(completions)
            possible = weight_C > 0
            if bool(possible.all()):
                yield completions, weight_C
            else:
                yield _rows_of(completions, possible), weight_C[possible]
        return
    count = int(tree.completions**group_size)
    if count > MAX_GROUPS:
        raise UserError(
            f"{tree.completions} completions make {count} groups of {group_size}; at most {MAX_GROUPS} are enumerated "
            "(use a smaller group, vocabulary or length)"
        )
    probability_B = instance.probability(tree.all)
    per = max(1, chunk // group_size)
    for start in range(0, count, per):
        number_C = torch.arange(start, min(start + per, count))
        member_CG = torch.stack([number_C // tree.completions**g % tree.completions for g in range(group_size)], 1)
        weight_C = probability_B[member_CG].prod(-1)
        possible = weight_C > 0
        yield _rows_of(tree.all, member_CG[possible].flatten()), weight_C[possible]


def _rows_of(completions: Completions, index: Tensor) -> Completions:
    return Completions(
        prefix_BT=completions.prefix_BT[index],
        token_BT=completions.token_BT[index],
        mask_BT=completions.mask_BT[index],
        truncated_B=completions.truncated_B[index],
    )


def _derivatives(
    instance: Instance, loss: Loss, completions: Completions, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives ``[B, T]`` of the summed loss by log-prob, exact reverse KL and exact forward KL."""
    rows = instance.rows(completions)
    if group_size > 1:
        groups = torch.arange(len(rows.group_B)) // group_size
        rows = Rows(**{**rows.__dict__, "group_B": groups})
    value = loss(rows)
    if value.shape not in (rows.mask_BT.shape, rows.group_B.shape):
        raise UserError(
            f"a loss must return [B, T] or [B] = {tuple(rows.mask_BT.shape)}, and gave {tuple(value.shape)}"
        )
    leaves = (rows.logp_BT, rows.reverse_kl_BT, rows.forward_kl_BT)
    if not value.requires_grad:
        return torch.zeros_like(leaves[0]), torch.zeros_like(leaves[1]), torch.zeros_like(leaves[2])
    gradients = torch.autograd.grad(value.sum(), leaves, materialize_grads=True)
    score_BT, reverse_BT, forward_BT = (torch.where(rows.mask_BT, gradient, 0.0) for gradient in gradients)
    if not all(bool(torch.isfinite(gradient).all()) for gradient in (score_BT, reverse_BT, forward_BT)):
        raise UserError("the loss has a gradient that is not finite on some completion")
    return score_BT, reverse_BT, forward_BT


class _Tabular:
    """One logit per prefix and token: a completion's gradient lives on the prefixes it visits."""

    def __init__(self, instance: Instance) -> None:
        logp_NV = instance.policy_logp()
        self.p_NV = logp_NV.exp()
        ratio_NV = logp_NV - instance.ref_logp_NV
        reverse_N, _ = instance.kl_N
        self.reverse_NV = self.p_NV * (ratio_NV - reverse_N[:, None])
        self.forward_NV = self.p_NV - instance.ref_logp_NV.exp()
        self.prefixes = instance.tree.prefixes

    def of(
        self, completions: Completions, score_BT: Tensor, reverse_BT: Tensor, forward_BT: Tensor, group_size: int
    ) -> _TabularGradients:
        at = completions.prefix_BT
        block_BTV = -score_BT[..., None] * self.p_NV[at]
        block_BTV += reverse_BT[..., None] * self.reverse_NV[at] + forward_BT[..., None] * self.forward_NV[at]
        block_BTV.scatter_add_(-1, completions.token_BT[..., None], score_BT[..., None])
        return _TabularGradients(at, block_BTV / group_size, self.prefixes, group_size)


class _TabularGradients:
    def __init__(self, prefix_BT: Tensor, block_BTV: Tensor, prefixes: int, group_size: int) -> None:
        self.prefix_BT, self.block_BTV, self.prefixes, self.group_size = prefix_BT, block_BTV, prefixes, group_size

    def mean(self, weight_C: Tensor) -> Tensor:
        weight_B = weight_C.repeat_interleave(self.group_size)
        total_NV = self.block_BTV.new_zeros(self.prefixes, self.block_BTV.shape[-1])
        weighted_BTV = weight_B[:, None, None] * self.block_BTV
        total_NV.index_add_(0, self.prefix_BT.flatten(), weighted_BTV.flatten(0, 1))
        return total_NV.flatten()

    def square(self, weight_C: Tensor) -> float:
        """The weighted mean of squared norms; the members of a group meet on shared prefixes."""
        if self.group_size == 1:
            return float(weight_C @ self.block_BTV.square().sum((1, 2)))
        count = len(weight_C)
        dense_CNV = self.block_BTV.new_zeros(count * self.prefixes, self.block_BTV.shape[-1])
        group_B1 = torch.arange(count).repeat_interleave(self.group_size)[:, None]
        dense_CNV.index_add_(0, (group_B1 * self.prefixes + self.prefix_BT).flatten(), self.block_BTV.flatten(0, 1))
        return float(weight_C @ dense_CNV.reshape(count, -1).square().sum(-1))


class _Shared:
    """Logits linear in shared parameters: score tables ``[N, V, D]``."""

    def __init__(self, instance: Instance) -> None:
        assert instance.features_NVD is not None
        logp_NV = instance.policy_logp()
        p_NV = logp_NV.exp()
        features_NVD = instance.features_NVD
        self.score_NVD = features_NVD - torch.einsum("nv,nvd->nd", p_NV, features_NVD)[:, None]
        ratio_NV = logp_NV - instance.ref_logp_NV
        self.reverse_ND = torch.einsum("nv,nvd->nd", p_NV * ratio_NV, self.score_NVD)
        self.forward_ND = -torch.einsum("nv,nvd->nd", instance.ref_logp_NV.exp(), self.score_NVD)

    def of(
        self, completions: Completions, score_BT: Tensor, reverse_BT: Tensor, forward_BT: Tensor, group_size: int
    ) -> _DenseGradients:
        at = completions.prefix_BT
        gradient_BD = torch.einsum("bt,btd->bd", score_BT, self.score_NVD[at, completions.token_BT])
        for weight_BT, table_ND in ((reverse_BT, self.reverse_ND), (forward_BT, self.forward_ND)):
            if bool(weight_BT.any()):
                gradient_BD += torch.einsum("bt,btd->bd", weight_BT, table_ND[at])
        return _DenseGradients(gradient_BD.reshape(-1, group_size, gradient_BD.shape[-1]).mean(1))


class _DenseGradients:
    def __init__(self, gradient_CD: Tensor) -> None:
        self.gradient_CD = gradient_CD

    def mean(self, weight_C: Tensor) -> Tensor:
        return weight_C @ self.gradient_CD

    def square(self, weight_C: Tensor) -> float:
        return float(weight_C @ self.gradient_CD.square().sum(-1))


_TABLES: WeakKeyDictionary[Instance, _Tabular | _Shared] = WeakKeyDictionary()


def _scores(instance: Instance) -> _Tabular | _Shared:
    """The score tables of an instance, made once."""
    if instance not in _TABLES:
        _TABLES[instance] = _Tabular(instance) if instance.features_NVD is None else _Shared(instance)
    return _TABLES[instance]


def terms_loss(terms: Sequence[KLTerm]) -> Loss:
    """``sum_k beta_k surrogate_k``, per token; a schedule or a target counts with its first value."""

    def loss(rows: Rows, /) -> Tensor:
        total_BT = torch.zeros_like(rows.ref_logp_BT)
        for term in terms:
            total_BT = total_BT + initial_beta(term) * term_surrogate(term, rows)
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


def initial_beta(term: KLTerm) -> float:
    """The coefficient of a term at its first update."""
    return BetaState(term.beta).value


def expected_gradient(
    instance: Instance, terms: Sequence[KLTerm], *, group_size: int = 1, chunk: int = CHUNK
) -> Moments:
    """The exact mean and variance of the gradient of ``sum_k beta_k surrogate_k`` over the sampler's completions.

    A group matters to terms with a baseline of their own only.
    """
    return exact_moments(instance, terms_loss(terms), group_size=group_size, chunk=chunk)


def target_gradient(instance: Instance, target: str) -> Tensor:
    """The gradient ``[D]`` of a target (see :mod:`kl_comedy.kl.claims`) at the instance's policy.

    By the chain rule over prefixes, ``KL = sum_h P(h) KL_h``: no completion is enumerated. Prefixes are
    weighted by the visits of the policy (differentiated), the reference, or the sampler (constant).
    """
    theta_D = instance.theta_D.clone().requires_grad_(True)
    logp_NV = instance.policy_logp(theta_D)
    ratio_NV = logp_NV - instance.ref_logp_NV
    reverse_N = (logp_NV.exp() * ratio_NV).sum(-1)
    forward_N = -(instance.ref_logp_NV.exp() * ratio_NV).sum(-1)
    reach = instance.tree.reach
    if target == "zero":
        return torch.zeros_like(theta_D)
    if target == "sequence_reverse":
        scalar = reach(logp_NV) @ reverse_N
    elif target == "sequence_forward":
        scalar = reach(instance.ref_logp_NV) @ forward_N
    elif target == "token_reverse":
        scalar = reach(instance.sampler_logp_NV) @ reverse_N
    elif target == "token_forward":
        scalar = reach(instance.sampler_logp_NV) @ forward_N
    else:
        raise bad_value("target", target, TARGETS)
    return torch.autograd.grad(scalar, theta_D)[0]


def sequence_kl(instance: Instance) -> float:
    """``KL(pi || ref)`` over completions, nats."""
    return float(instance.tree.reach(instance.policy_logp()) @ instance.kl_N[0])


def effective_sample_share(instance: Instance) -> float:
    """``1 / E_mu[(pi / mu)^2]`` over completions: Kish's effective sample size over the number of samples."""
    square = 0.0
    policy_NV = instance.policy_logp()
    for completions in instance.tree.chunks(CHUNK):
        at, token = completions.prefix_BT, completions.token_BT
        drawn_BT = torch.where(completions.mask_BT, instance.sampler_logp_NV[at, token], 0.0)
        policy_BT = torch.where(completions.mask_BT, policy_NV[at, token], 0.0)
        drawn_B = drawn_BT.sum(-1)
        square += float(torch.where(drawn_B > -1e3, (2 * policy_BT.sum(-1) - drawn_B).exp(), 0.0).sum())
    return 1.0 / square


def against_the_sampler(instance: Instance) -> Instance:
    """The same instance with the sampler as the reference, for terms that pull towards it."""
    return dataclasses.replace(instance, ref_logp_NV=instance.recorded_logp_NV)
