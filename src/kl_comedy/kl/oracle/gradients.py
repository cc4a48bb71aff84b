"""The mean and the variance of a loss's gradient, exact or by Monte Carlo; losses of terms, and their targets.

A loss reaches the parameters through few numbers per token only: the policy's log-prob, the exact reverse and forward
KL of its prefix, and the next-token log-probs there. One backward pass through the loss gives its derivatives with
respect to them for every completion at once; the rest is linear algebra with the score tables. So a loss is never
differentiated per sample, and completions are walked in chunks.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters, ``B`` completions, ``C`` groups of ``G`` completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.beta import BetaState
from kl_comedy.kl.claims import TARGETS, WEIGHTED, own_targets
from kl_comedy.kl.estimators import certainty, jensen_shannon
from kl_comedy.kl.oracle.enumeration import Completions, Instance, Loss, Rows, log_probs
from kl_comedy.kl.surrogate import batch_baseline, kl_parts, kl_surrogate, own_baseline
from kl_comedy.kl.term import KLTerm

CHUNK = 8192
"""Completions in memory at once."""

TOLERANCE = 1e-9
"""Relative difference up to which an enumerated gradient equals a target."""

MAX_ELEMENTS = 2**24
"""Numbers of the gradients ``[B, D]`` in memory at once."""

MAX_GROUPS = 4_000_000
"""Groups that are still enumerated; beyond, ask for smaller groups or a smaller tree."""


class NotFinite(UserError):
    """A loss has a gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The expected gradient ``[D]``, the trace of its covariance for one completion, and the mean norm of a gradient.

    For groups, ``variance`` is that of the group's mean gradient times the group's size, so that losses
    compare at equal samples.
    """

    gradient_D: Tensor
    variance: float
    mean_norm: float

    def relative_bias(self, target_D: Tensor) -> float:
        """``|g - target| / |target|``; for a zero target, ``|g|``."""
        size = float(target_D.norm())
        return float((self.gradient_D - target_D).norm()) / (size if size > 0 else 1.0)

    def cosine(self, target_D: Tensor) -> float:
        """The cosine with a target; NaN where either is zero."""
        sizes = float(self.gradient_D.norm()) * float(target_D.norm())
        return float(self.gradient_D @ target_D) / sizes if sizes > 0 else float("nan")

    def strength(self, target_D: Tensor) -> float:
        """The multiple of a target that the gradient contains; 0 for a zero target."""
        square = float(target_D.square().sum())
        return float(self.gradient_D @ target_D) / square if square > 0 else 0.0

    def figures(self, target_D: Tensor) -> dict[str, float]:
        """Relative bias, cosine, strength, and the variance over the target's square (over 1 for a zero target)."""
        return {
            "relative_bias": self.relative_bias(target_D),
            "cosine": self.cosine(target_D),
            "strength": self.strength(target_D),
            "variance": self.variance / (float(target_D.square().sum()) or 1.0),
        }

    def error(self, target_D: Tensor) -> float:
        """The distance to a target over the size of what was summed up, with which rounding grows."""
        scale = float(target_D.norm()) + self.mean_norm
        return float((self.gradient_D - target_D).norm()) / max(scale, 1e-3)

    def equals(self, target_D: Tensor, tolerance: float = TOLERANCE) -> bool:
        """Whether the gradient is the target up to rounding."""
        return self.error(target_D) <= tolerance


def exact_moments(instance: Instance, loss: Loss, *, group_size: int = 1, chunk: int = CHUNK) -> Moments:
    """Sum over every completion (every group of ``group_size`` independent ones) the sampler can draw.

    Raises :class:`UserError` where there are more than :data:`MAX_GROUPS` groups, or a loss of a wrong shape.
    """
    return exact_moments_by_loss(instance, {"": loss}, group_size=group_size, chunk=chunk)[""]


def exact_moments_by_loss(
    instance: Instance, losses: Mapping[str, Loss], *, group_size: int = 1, chunk: int = CHUNK
) -> dict[str, Moments]:
    """:func:`exact_moments` of each loss; completions and scores are looked up once for all of them."""
    mean_D = {name: torch.zeros_like(instance.theta_D) for name in losses}
    second, norm = dict.fromkeys(losses, 0.0), dict.fromkeys(losses, 0.0)
    chunk = max(1, min(chunk, MAX_ELEMENTS // len(instance.theta_D)))
    for completions, weight_C in _groups(instance, group_size, chunk):
        for name, gradient_BD in gradients_by_loss(instance, losses, completions, group_size):
            gradient_CD = gradient_BD.reshape(-1, group_size, gradient_BD.shape[-1]).mean(1)
            mean_D[name] += weight_C @ gradient_CD
            second[name] += float(weight_C @ gradient_CD.square().sum(-1))
            norm[name] += float(weight_C @ gradient_CD.norm(dim=-1))
    variance = {name: (second[name] - float(mean_D[name].square().sum())) * group_size for name in losses}
    return {
        name: Moments(gradient_D=mean_D[name], variance=max(variance[name], 0.0), mean_norm=norm[name])
        for name in losses
    }


def sampled_moments(
    instance: Instance, loss: Loss, *, samples: int, generator: torch.Generator, group_size: int = 1
) -> Moments:
    """The same from ``samples`` completions the sampler draws; the mean has variance ``variance / samples``."""
    groups = samples // group_size
    completions = instance.tree.sample(instance.sampler_logp_NV, groups * group_size, generator)
    ((_, gradient_BD),) = gradients_by_loss(instance, {"": loss}, completions, group_size)
    gradient_CD = gradient_BD.reshape(groups, group_size, -1).mean(1)
    mean_D = gradient_CD.mean(0)
    spread = float(gradient_CD.square().sum(-1).mean()) - float(mean_D.square().sum())
    variance = max(spread * groups / (groups - 1), 0.0) * group_size
    return Moments(gradient_D=mean_D, variance=variance, mean_norm=float(gradient_CD.norm(dim=-1).mean()))


def _groups(instance: Instance, group_size: int, chunk: int) -> Iterator[tuple[Completions, Tensor]]:
    """Every group of completions, flat, with its probability ``[C]``; completions of probability zero are left out."""
    tree = instance.tree
    if group_size == 1:
        for completions in tree.chunks(chunk):
            weight_C = instance.probability(completions)
            possible = weight_C > 0
            yield completions.select(possible), weight_C[possible]
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
        yield tree.all.select(member_CG[possible].flatten()), weight_C[possible]


def gradients_by_loss(
    instance: Instance, losses: Mapping[str, Loss], completions: Completions, group_size: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Each loss's gradient ``[B, D]`` of every completion. Raises :class:`UserError` for a loss of a wrong shape."""
    rows, gradient = instance.rows(completions, group_size), score_tables(instance).gradient_at(completions)
    assert rows.next_logp_BTV is not None
    leaves = (rows.logp_BT, rows.reverse_kl_BT, rows.forward_kl_BT, rows.next_logp_BTV)
    for name, loss in losses.items():
        value = loss(rows)
        if value.shape not in (shape := rows.mask_BT.shape, rows.group_B.shape):
            raise UserError(f"a loss must return [B, T] or [B] = {tuple(shape)}, and gave {tuple(value.shape)}")
        total = value.sum() + 0.0 * rows.logp_BT.sum()  # a loss without gradient has a zero one
        derivatives = torch.autograd.grad(total, leaves, allow_unused=True)
        if not all(each is None or bool(torch.isfinite(each[rows.mask_BT]).all()) for each in derivatives):
            raise NotFinite("the loss has a gradient that is not finite on some completion")
        yield name, gradient(*(None if each is None else _inside(each, rows.mask_BT) for each in derivatives))


def silent_shares(instance: Instance, losses: Mapping[str, Loss]) -> dict[str, float]:
    """Of each loss, the share of the tokens drawn by the sampler whose log-prob gets no gradient."""
    silent, tokens = dict.fromkeys(losses, 0.0), 0.0
    for completions, weight_C in _groups(instance, 1, CHUNK):
        rows = instance.rows(completions)
        tokens += float(weight_C @ rows.mask_BT.sum(-1).double())
        for name, loss in losses.items():
            (slope_BT,) = torch.autograd.grad(loss(rows).sum(), rows.logp_BT)
            silent[name] += float(weight_C @ ((slope_BT == 0) & rows.mask_BT).sum(-1).double())
    return {name: share / tokens for name, share in silent.items()}


def _inside(values: Tensor, mask_BT: Tensor) -> Tensor:
    """``[B, T]`` or ``[B, T, V]``, zero outside the mask."""
    return torch.where(mask_BT if values.ndim == 2 else mask_BT[..., None], values, 0.0)


Gradient = Callable[..., Tensor]
"""From derivatives by log-prob, exact reverse and exact forward KL ``[B, T]`` and by next-token log-probs ``[B, T, V]``
(None: zero; the log-prob's never is) to gradients ``[B, D]``."""


class ScoreTables:
    """The scores ``[N, V, D]`` of an instance with shared parameters, and the gradients of its exact KLs ``[N, D]``."""

    def __init__(self, instance: Instance, features_NVD: Tensor) -> None:
        logp_NV = instance.policy_logp()
        self.p_NV = logp_NV.exp()
        self.score_NVD = features_NVD - torch.einsum("nv,nvd->nd", self.p_NV, features_NVD)[:, None]
        ratio_NV = logp_NV - instance.ref_logp_NV
        self.reverse_ND = torch.einsum("nv,nvd->nd", self.p_NV * ratio_NV, self.score_NVD)
        self.forward_ND = -torch.einsum("nv,nvd->nd", instance.ref_logp_NV.exp(), self.score_NVD)

    def gradient_at(self, completions: Completions) -> Gradient:
        at_BT = completions.prefix_BT
        score_BTD = self.score_NVD[at_BT, completions.token_BT]

        def gradient(score_BT: Tensor, reverse_BT: Any, forward_BT: Any, next_BTV: Any) -> Tensor:
            gradient_BD = torch.einsum("bt,btd->bd", score_BT, score_BTD)
            for weight_BT, table_ND in ((reverse_BT, self.reverse_ND), (forward_BT, self.forward_ND)):
                if weight_BT is not None:
                    gradient_BD += torch.einsum("bt,btd->bd", weight_BT, table_ND[at_BT])
            if next_BTV is not None:
                gradient_BD += torch.einsum("btv,btvd->bd", next_BTV, self.score_NVD[at_BT])
            return gradient_BD

        return gradient


class TabularScores:
    """One logit per prefix and token: a completion's gradient is zero but on the prefixes it visits."""

    def __init__(self, instance: Instance) -> None:
        logp_NV = instance.policy_logp()
        self.p_NV = logp_NV.exp()
        reverse_N, _ = instance.kl_N
        self.reverse_NV = self.p_NV * (logp_NV - instance.ref_logp_NV - reverse_N[:, None])
        self.forward_NV = self.p_NV - instance.ref_logp_NV.exp()

    def gradient_at(self, completions: Completions) -> Gradient:
        at_BT, token_BT1 = completions.prefix_BT, completions.token_BT[..., None]

        def gradient(score_BT: Tensor, reverse_BT: Any, forward_BT: Any, next_BTV: Any) -> Tensor:
            block_BTV = -score_BT[..., None] * self.p_NV[at_BT]
            for weight_BT, table_NV in ((reverse_BT, self.reverse_NV), (forward_BT, self.forward_NV)):
                if weight_BT is not None:
                    block_BTV += weight_BT[..., None] * table_NV[at_BT]
            block_BTV = block_BTV.scatter_add(-1, token_BT1, score_BT[..., None])
            if next_BTV is not None:
                block_BTV += next_BTV - next_BTV.sum(-1, keepdim=True) * self.p_NV[at_BT]
            dense_BNV = block_BTV.new_zeros(len(at_BT), *self.p_NV.shape)
            dense_BNV.scatter_add_(1, at_BT[..., None].expand_as(block_BTV), block_BTV)
            return dense_BNV.flatten(1)

        return gradient


_TABLES: WeakKeyDictionary[Instance, ScoreTables | TabularScores] = WeakKeyDictionary()


def score_tables(instance: Instance) -> ScoreTables | TabularScores:
    """The score tables of an instance, made once."""
    if instance not in _TABLES:
        features_NVD = instance.features_NVD
        _TABLES[instance] = TabularScores(instance) if features_NVD is None else ScoreTables(instance, features_NVD)
    return _TABLES[instance]


def terms_loss(terms: Sequence[KLTerm]) -> Loss:
    """``sum_k beta_k surrogate_k``, per token; a schedule or a target counts with its first value."""

    def loss(rows: Rows, /) -> Tensor:
        total_BT = torch.zeros_like(rows.ref_logp_BT)
        for term in terms:
            if initial_beta(term):
                total_BT = total_BT + initial_beta(term) * term_surrogate(term, rows)
        return total_BT

    return loss


def term_surrogate(term: KLTerm, rows: Rows) -> Tensor:
    """:func:`kl_surrogate` on rows, with the baseline over each group (as a batch, for ``batch``) where it has one."""
    arguments = term_arguments(term, rows)
    if term.baseline not in ("own", "batch"):
        return kl_surrogate(term, **arguments)
    parts = kl_parts(term, **arguments)
    baseline = own_baseline if term.baseline == "own" else batch_baseline
    return kl_surrogate(term, **arguments, baseline_BT=baseline(parts, rows.mask_BT, rows.group_B))


def term_arguments(term: KLTerm, rows: Rows) -> dict[str, Any]:
    """What a term reads of rows."""
    exact_BT = rows.forward_kl_BT if term.needs == "exact_forward" else rows.reverse_kl_BT
    if term.mixture is not None:
        exact_BT = rows.mixture(term.mixture)
    return {
        **({} if term.top is None else {"top": rows.top(*term.top)}),
        **({} if term.weight == "none" else {"certainty_BT": rows.certainty(term.weight)}),
        "logp_BT": rows.logp_BT,
        "ref_logp_BT": rows.ref_logp_BT,
        "behaviour_logp_BT": rows.behaviour_logp_BT,
        "mask_BT": rows.mask_BT,
        "exact_kl_BT": exact_BT,
    }


def initial_beta(term: KLTerm) -> float:
    """The coefficient of a term at its first update."""
    return BetaState(term.beta).value


def expected_gradient(
    instance: Instance, terms: Sequence[KLTerm], *, group_size: int = 1, chunk: int = CHUNK
) -> Moments:
    """:func:`exact_moments` of :func:`terms_loss`; a group matters to terms with a baseline of their own only."""
    return exact_moments(instance, terms_loss(terms), group_size=group_size, chunk=chunk)


def target_gradient(instance: Instance, target: str, term: KLTerm | None = None) -> Tensor:
    """The gradient ``[D]`` of a target (see :mod:`kl_comedy.kl.claims`), or of one of ``term``'s own, at the policy.

    By the chain rule over prefixes, ``KL = sum_h P(h) KL_h``: no completion is enumerated. Prefixes are
    weighted by the visits of the policy (differentiated), the reference, or the sampler (constant).
    """
    allowed = (*TARGETS, *(own_targets(term) if term else ()))
    if target not in allowed:
        raise bad_value("target", target, allowed)
    theta_D = instance.theta_D.clone().requires_grad_(True)
    if target == "zero":
        return torch.zeros_like(theta_D)
    logp_NV = instance.policy_logp(theta_D)
    ratio_NV = logp_NV - instance.ref_logp_NV
    base = target.removesuffix(WEIGHTED)
    if term is not None and term.mixture is not None and base.endswith("mixture"):
        visiting_NV, kl_N = logp_NV, jensen_shannon(logp_NV, instance.ref_logp_NV, term.mixture)
    elif base.endswith("reverse"):
        visiting_NV, kl_N = logp_NV, (logp_NV.exp() * ratio_NV).sum(-1)
    else:
        visiting_NV, kl_N = instance.ref_logp_NV, -(instance.ref_logp_NV.exp() * ratio_NV).sum(-1)
    if target.startswith("token"):
        visiting_NV = instance.sampler_logp_NV
    if term is not None and base != target:
        weight_N = certainty(instance.policy_logp() if term.weight == "policy" else instance.ref_logp_NV)
        kl_N = weight_N.clamp(min=0.0) ** term.weight_power * kl_N
    return torch.autograd.grad(instance.tree.reach(visiting_NV) @ kl_N, theta_D)[0]


def sequence_kl(instance: Instance) -> float:
    """``KL(pi || ref)`` over completions, nats."""
    return float(instance.tree.reach(instance.policy_logp()) @ instance.kl_N[0])


def effective_sample_share(instance: Instance) -> float:
    """``1 / E_mu[(pi / mu)^2]`` over completions: Kish's effective sample size over the number of samples."""
    square, policy_NV = 0.0, instance.policy_logp()
    for completions in instance.tree.chunks(CHUNK):
        drawn_B = log_probs(completions, instance.sampler_logp_NV).sum(-1)
        policy_B = log_probs(completions, policy_NV).sum(-1)
        square += float(torch.where(drawn_B > -1e3, (2 * policy_B - drawn_B).exp(), 0.0).sum())
    return 1.0 / square


def against_the_sampler(instance: Instance) -> Instance:
    """The same instance with the sampler as the reference, for terms that pull towards it."""
    return dataclasses.replace(instance, ref_logp_NV=instance.recorded_logp_NV)
