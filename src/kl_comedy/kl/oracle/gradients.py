"""The mean and the variance of a loss's gradient, exact or by Monte Carlo; losses of terms, and their targets.

A loss reaches the parameters through few numbers per token only: the policy's log-prob, the exact reverse and forward
KL of its prefix, and the next-token log-probs there. One backward pass through the loss gives its derivatives with
respect to them for every completion at once; the rest is linear algebra with the score tables. So a loss is never
differentiated per sample, and completions are walked in chunks.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters, ``B`` completions, ``C`` groups of ``G`` completions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.beta import first_value
from kl_comedy.kl.claims import SAMPLER, SAMPLER_TARGETS, TARGETS, WEIGHTED, own_targets
from kl_comedy.kl.estimators import certainty, jensen_shannon
from kl_comedy.kl.oracle.enumeration import IMPOSSIBLE, Completions, Instance, Loss, Rows, log_probs
from kl_comedy.kl.surrogate import NotFinite, batch_baseline, kl_parts, kl_surrogate, own_baseline
from kl_comedy.kl.term import KLTerm

CHUNK = 8192
"""Completions in memory at once."""

TOLERANCE = 1e-9
"""Relative difference up to which an enumerated gradient equals a target."""

ROUNDING = 1e-12
"""The norm below which a target is rounding, as that of a KL to the sampler on fresh samples, and counts as zero."""

SMALLEST_SCALE = 1e-3
"""The least size that an error is measured against."""

MAX_ELEMENTS = 2**24
"""Numbers of the gradients ``[B, D]`` in memory at once."""

MAX_GROUPS = 4_000_000
"""Groups that are still enumerated; beyond, ask for smaller groups or a smaller tree."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The first two moments of a loss's gradient."""

    gradient_D: Tensor
    """The expected gradient."""
    variance: float
    """The trace of the covariance for one completion: for groups, that of the group's mean gradient times the group's
    size, so that losses are compared at equal numbers of samples."""
    mean_norm: float
    """The mean norm of a completion's (a group's) gradient."""

    def relative_bias(self, target_D: Tensor) -> float:
        """``|g - target| / |target|``; for a zero target, ``|g|``."""
        size = float(target_D.norm())
        if size < ROUNDING:
            size = 1.0
        return float((self.gradient_D - target_D).norm()) / size

    def cosine(self, target_D: Tensor) -> float:
        """The cosine with a target; NaN where either is zero."""
        sizes = float(self.gradient_D.norm()) * float(target_D.norm())
        if sizes == 0 or float(target_D.norm()) < ROUNDING:
            return math.nan
        return float(self.gradient_D @ target_D) / sizes

    def strength(self, target_D: Tensor) -> float:
        """The multiple of a target that the gradient contains; 0 for a zero target."""
        square = float(target_D.square().sum())
        if square < ROUNDING**2:
            return 0.0
        return float(self.gradient_D @ target_D) / square

    def figures(self, target_D: Tensor) -> dict[str, float]:
        """Relative bias, cosine, strength, and the variance over the target's square (over 1 for a zero target)."""
        square = float(target_D.square().sum())
        if square < ROUNDING**2:
            square = 1.0
        return {
            "relative_bias": self.relative_bias(target_D),
            "cosine": self.cosine(target_D),
            "strength": self.strength(target_D),
            "variance": self.variance / square,
        }

    def error(self, target_D: Tensor) -> float:
        """The distance to a target over the size of what was summed up, with which rounding grows."""
        scale = float(target_D.norm()) + self.mean_norm
        # Where all is nearly 0 (a policy beside its reference), a ratio of roundings says nothing.
        return float((self.gradient_D - target_D).norm()) / max(scale, SMALLEST_SCALE)

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
    mean_square = dict.fromkeys(losses, 0.0)
    mean_norm = dict.fromkeys(losses, 0.0)
    # A chunk has a gradient of D numbers per completion: fewer completions where there are many parameters.
    chunk = max(1, min(chunk, MAX_ELEMENTS // len(instance.theta_D)))
    for completions, weight_C in _groups(instance, group_size, chunk):
        for name, gradient_BD in gradients_by_loss(instance, losses, completions, group_size):
            gradient_CD = gradient_BD.reshape(-1, group_size, gradient_BD.shape[-1]).mean(1)
            mean_D[name] += weight_C @ gradient_CD
            mean_square[name] += float(weight_C @ gradient_CD.square().sum(-1))
            mean_norm[name] += float(weight_C @ gradient_CD.norm(dim=-1))
    moments = {}
    for name in losses:
        variance = (mean_square[name] - float(mean_D[name].square().sum())) * group_size
        # Rounding may put a variance of 0 below it.
        moments[name] = Moments(gradient_D=mean_D[name], variance=max(variance, 0.0), mean_norm=mean_norm[name])
    return moments


def sampled_moments(
    instance: Instance, loss: Loss, *, samples: int, generator: torch.Generator, group_size: int = 1
) -> Moments:
    """The same from ``samples`` completions that the sampler draws; the mean has variance ``variance / samples``.

    Whole groups are drawn; at least two, or the variance is not defined.
    """
    groups = samples // group_size
    completions = instance.tree.sample(instance.in_dialogue(instance.sampler_logp_NV), groups * group_size, generator)
    _, gradient_BD = next(gradients_by_loss(instance, {"": loss}, completions, group_size))
    gradient_CD = gradient_BD.reshape(groups, group_size, -1).mean(1)
    mean_D = gradient_CD.mean(0)
    spread = float(gradient_CD.square().sum(-1).mean()) - float(mean_D.square().sum())
    variance = max(spread * groups / (groups - 1), 0.0) * group_size  # unbiased over ``groups`` draws
    return Moments(gradient_D=mean_D, variance=variance, mean_norm=float(gradient_CD.norm(dim=-1).mean()))


def _groups(instance: Instance, group_size: int, chunk: int) -> Iterator[tuple[Completions, Tensor]]:
    """Every group of completions, flat, with its probability ``[C]``; completions of probability zero are left out."""
    tree = instance.tree
    if group_size == 1:
        # Groups of one need no list of all completions, so much larger trees can be walked.
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
    groups_per_chunk = max(1, chunk // group_size)
    for start in range(0, count, groups_per_chunk):
        number_C = torch.arange(start, min(start + groups_per_chunk, count))
        # The members of a group are the digits of its number in base ``tree.completions``, the first one lowest.
        members = [number_C // tree.completions**g % tree.completions for g in range(group_size)]
        member_CG = torch.stack(members, 1)
        weight_C = probability_B[member_CG].prod(-1)
        possible = weight_C > 0
        yield tree.all.select(member_CG[possible].flatten()), weight_C[possible]


def gradients_by_loss(
    instance: Instance, losses: Mapping[str, Loss], completions: Completions, group_size: int = 1
) -> Iterator[tuple[str, Tensor]]:
    """Each loss's gradient ``[B, D]`` of every completion.

    Raises :class:`UserError` for a loss of a wrong shape, :class:`NotFinite` for a gradient that is not finite.
    """
    rows = instance.rows(completions, group_size)
    gradient = score_tables(instance).gradient_at(completions)
    assert rows.next_logp_BTV is not None
    leaves = (rows.logp_BT, rows.reverse_kl_BT, rows.forward_kl_BT, rows.next_logp_BTV)
    for name, loss in losses.items():
        value = loss(rows)
        if value.shape not in (rows.mask_BT.shape, rows.group_B.shape):
            shape = tuple(rows.mask_BT.shape)
            raise UserError(f"a loss must return [B, T] or [B] = {shape}, and gave {tuple(value.shape)}")
        # A loss without gradient has a zero one: autograd refuses to differentiate a constant.
        total = value.sum() + 0.0 * rows.logp_BT.sum()
        slopes = torch.autograd.grad(total, leaves, allow_unused=True)
        inside = []
        for slope in slopes:
            if slope is None:
                inside.append(None)
                continue
            # At the tokens of an environment too: a loss that has a gradient there leaks, and must miss its target.
            if not bool(torch.isfinite(slope[completions.mask_BT]).all()):
                raise NotFinite("the loss has a gradient that is not finite on some completion")
            inside.append(_inside(slope, completions.mask_BT))
        score_BT, reverse_BT, forward_BT, next_BTV = inside
        assert score_BT is not None  # the total contains the log-probs
        yield name, gradient(score_BT, reverse_BT, forward_BT, next_BTV)


def silent_shares(instance: Instance, losses: Mapping[str, Loss]) -> dict[str, float]:
    """By loss, the share of the tokens drawn by the sampler whose log-prob gets no gradient."""
    silent = dict.fromkeys(losses, 0.0)
    tokens = 0.0
    for completions, weight_C in _groups(instance, 1, CHUNK):
        rows = instance.rows(completions)
        tokens += float(weight_C @ rows.mask_BT.sum(-1).double())
        for name, loss in losses.items():
            (slope_BT,) = torch.autograd.grad(loss(rows).sum(), rows.logp_BT)
            is_silent_BT = (slope_BT == 0) & rows.mask_BT
            silent[name] += float(weight_C @ is_silent_BT.sum(-1).double())
    return {name: silent_tokens / tokens for name, silent_tokens in silent.items()}


def _inside(values: Tensor, mask_BT: Tensor) -> Tensor:
    """``[B, T]`` or ``[B, T, V]``, zero outside the mask."""
    if values.ndim == 3:
        mask_BT = mask_BT[..., None]
    return torch.where(mask_BT, values, 0.0)


Gradient = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""From a loss's derivatives to its gradients ``[B, D]``.

The derivatives are those by the log-prob, by the exact reverse and by the exact forward KL ``[B, T]``, and by the
next-token log-probs ``[B, T, V]``; None for one that is zero.
"""


class ScoreTables:
    """The scores ``[N, V, D]`` of an instance with shared parameters, and the gradients of its exact KLs ``[N, D]``."""

    def __init__(self, instance: Instance, features_NVD: Tensor) -> None:
        logp_NV = instance.policy_logp()
        self.p_NV = logp_NV.exp()
        # d log p_v = f_v - sum_u p_u f_u, for logits that are linear in the parameters.
        mean_feature_ND = torch.einsum("nv,nvd->nd", self.p_NV, features_NVD)
        self.score_NVD = features_NVD - mean_feature_ND[:, None]
        # d KL(pi || ref) = sum_v p_v l_v d log p_v; the derivative of l itself has mean zero.
        log_ratio_NV = logp_NV - instance.ref_logp_NV
        self.reverse_ND = torch.einsum("nv,nvd->nd", self.p_NV * log_ratio_NV, self.score_NVD)
        # d KL(ref || pi) = -sum_v ref_v d log p_v
        self.forward_ND = -torch.einsum("nv,nvd->nd", instance.ref_kept_NV, self.score_NVD)

    def gradient_at(self, completions: Completions) -> Gradient:
        """The chain rule at the prefixes of some completions."""
        prefix_BT = completions.prefix_BT
        score_BTD = self.score_NVD[prefix_BT, completions.token_BT]

        def gradient(
            score_BT: Tensor, reverse_BT: Tensor | None, forward_BT: Tensor | None, next_BTV: Tensor | None
        ) -> Tensor:
            gradient_BD = torch.einsum("bt,btd->bd", score_BT, score_BTD)
            if reverse_BT is not None:
                gradient_BD += torch.einsum("bt,btd->bd", reverse_BT, self.reverse_ND[prefix_BT])
            if forward_BT is not None:
                gradient_BD += torch.einsum("bt,btd->bd", forward_BT, self.forward_ND[prefix_BT])
            if next_BTV is not None:
                gradient_BD += torch.einsum("btv,btvd->bd", next_BTV, self.score_NVD[prefix_BT])
            return gradient_BD

        return gradient


class TabularScores:
    """One logit per prefix and token: a completion's gradient is zero but on the prefixes it visits."""

    def __init__(self, instance: Instance) -> None:
        logp_NV = instance.policy_logp()
        self.p_NV = logp_NV.exp()
        reverse_N, _ = instance.kl_N
        # By the logit of v, d KL(pi || ref) = p_v (l_v - KL) and d KL(ref || pi) = p_v - ref_v.
        self.reverse_NV = self.p_NV * (logp_NV - instance.ref_logp_NV - reverse_N[:, None])
        self.forward_NV = self.p_NV - instance.ref_kept_NV
        if instance.kept_NV is not None:
            # The reference's mass on the kept tokens is below 1.
            self.forward_NV = instance.ref_kept_NV.sum(-1, keepdim=True) * self.p_NV - instance.ref_kept_NV

    def gradient_at(self, completions: Completions) -> Gradient:
        """The chain rule at the prefixes of some completions."""
        prefix_BT = completions.prefix_BT
        token_BT1 = completions.token_BT[..., None]

        def gradient(
            score_BT: Tensor, reverse_BT: Tensor | None, forward_BT: Tensor | None, next_BTV: Tensor | None
        ) -> Tensor:
            # By the logit of v, d log p_k = 1[v = k] - p_v: the product first, the sampled token k below.
            block_BTV = -score_BT[..., None] * self.p_NV[prefix_BT]
            if reverse_BT is not None:
                block_BTV += reverse_BT[..., None] * self.reverse_NV[prefix_BT]
            if forward_BT is not None:
                block_BTV += forward_BT[..., None] * self.forward_NV[prefix_BT]
            block_BTV = block_BTV.scatter_add(-1, token_BT1, score_BT[..., None])
            if next_BTV is not None:
                # sum_u g_u (1[v = u] - p_v)
                block_BTV += next_BTV - next_BTV.sum(-1, keepdim=True) * self.p_NV[prefix_BT]
            dense_BNV = block_BTV.new_zeros(len(prefix_BT), *self.p_NV.shape)
            dense_BNV.scatter_add_(1, prefix_BT[..., None].expand_as(block_BTV), block_BTV)
            return dense_BNV.flatten(1)

        return gradient


# Weak, so that tables go with their instance: a search draws thousands.
_TABLES: WeakKeyDictionary[Instance, ScoreTables | TabularScores] = WeakKeyDictionary()


def score_tables(instance: Instance) -> ScoreTables | TabularScores:
    """The score tables of an instance, made once."""
    if instance not in _TABLES:
        if instance.features_NVD is None:
            _TABLES[instance] = TabularScores(instance)
        else:
            _TABLES[instance] = ScoreTables(instance, instance.features_NVD)
    return _TABLES[instance]


def terms_loss(terms: Sequence[KLTerm]) -> Loss:
    """``sum_k beta_k surrogate_k``, per token; a schedule or a target counts with its first value."""

    def loss(rows: Rows, /) -> Tensor:
        # Like the reference's log-probs and not the policy's, so that no term at all is a loss without gradient.
        total_BT = torch.zeros_like(rows.ref_logp_BT)
        for term in terms:
            beta = initial_beta(term)
            if beta != 0:
                # A term with a beta of 0 is not evaluated: 0 times an infinite cost is not 0.
                total_BT = total_BT + beta * term_surrogate(term, rows)
        return total_BT

    return loss


def term_surrogate(term: KLTerm, rows: Rows) -> Tensor:
    """:func:`kl_surrogate` on rows, with the baseline over each group (as a batch, for ``batch``) where it has one."""
    arguments = term_arguments(term, rows)
    if term.baseline == "own":
        baseline_BT = own_baseline(kl_parts(term, **arguments), rows.mask_BT, rows.group_B)
    elif term.baseline == "batch":
        baseline_BT = batch_baseline(kl_parts(term, **arguments), rows.mask_BT, rows.group_B)
    else:
        return kl_surrogate(term, **arguments)
    return kl_surrogate(term, **arguments, baseline_BT=baseline_BT)


def term_arguments(term: KLTerm, rows: Rows) -> dict[str, Any]:
    """What a term reads of rows, as the arguments of :func:`kl_surrogate`."""
    if term.reads_past_policy:
        rows = rows.against_the_sampler()
    if term.mixture is not None:
        exact_BT = rows.mixture(term.mixture)
    elif term.needs == "exact_forward":
        exact_BT = rows.forward_kl_BT
    else:
        exact_BT = rows.reverse_kl_BT
    arguments: dict[str, Any] = {
        "logp_BT": rows.logp_BT,
        "ref_logp_BT": rows.ref_logp_BT,
        "behaviour_logp_BT": rows.behaviour_logp_BT,
        "mask_BT": rows.mask_BT,
        "exact_kl_BT": exact_BT,
    }
    if term.top is not None:
        k, tokens = term.top
        arguments["top"] = rows.top(k, tokens)
    if term.weight != "none":
        arguments["certainty_BT"] = rows.certainty(term.weight)
    if term.sampler_top is not None:
        arguments["sampler_top"] = rows.sampler_top(term.sampler_top[0])
    return arguments


def initial_beta(term: KLTerm) -> float:
    """The coefficient of a term at its first update."""
    return first_value(term.beta)


def expected_gradient(
    instance: Instance, terms: Sequence[KLTerm], *, group_size: int = 1, chunk: int = CHUNK
) -> Moments:
    """:func:`exact_moments` of :func:`terms_loss`; a group matters to terms with a baseline of their own only."""
    return exact_moments(instance, terms_loss(terms), group_size=group_size, chunk=chunk)


def target_gradient(instance: Instance, target: str, term: KLTerm | None = None) -> Tensor:
    """The gradient ``[D]`` of a target (see :mod:`kl_comedy.kl.claims`), or of one of ``term``'s own, at the policy.

    By the chain rule over prefixes, ``KL = sum_h P(h) KL_h``: no completion is enumerated. Prefixes are
    weighted by the visits of the policy (differentiated), the reference, or the sampler (constant). Raises
    :class:`UserError` for an unknown target.
    """
    allowed: tuple[str, ...] = (*TARGETS, *SAMPLER_TARGETS)
    if term is not None:
        allowed += own_targets(term)
    if target not in allowed:
        raise bad_value("target", target, allowed)
    if SAMPLER in target:
        instance = against_the_sampler(instance)
        target = target.replace(SAMPLER, "_")
    theta_D = instance.theta_D.clone().requires_grad_(True)
    if target == "zero":
        return torch.zeros_like(theta_D)
    logp_NV = instance.policy_logp(theta_D)
    log_ratio_NV = logp_NV - instance.ref_logp_NV
    divergence = target.removesuffix(WEIGHTED)

    if term is not None and term.mixture is not None and divergence.endswith("mixture"):
        visiting_NV = logp_NV
        kl_N = jensen_shannon(logp_NV, instance.ref_logp_NV, term.mixture)
    elif divergence.endswith("reverse"):
        visiting_NV = logp_NV
        kl_N = (logp_NV.exp() * log_ratio_NV).sum(-1)
    else:
        # KL(ref || pi) over completions weights a prefix by the visits of the reference.
        visiting_NV = instance.ref_logp_NV
        kl_N = -(instance.ref_kept_NV * log_ratio_NV).sum(-1)
    if target.startswith("token"):
        visiting_NV = instance.sampler_logp_NV

    if term is not None and target.endswith(WEIGHTED):
        weighing_NV = instance.ref_logp_NV
        if term.weight == "policy":
            weighing_NV = instance.policy_logp()  # at the instance's own parameters: a weight is not differentiated
        weight_N = certainty(weighing_NV).clamp(min=0.0) ** term.weight_power
        kl_N = weight_N * kl_N
    return torch.autograd.grad(instance.reach(visiting_NV) @ kl_N, theta_D)[0]


def sequence_kl(instance: Instance) -> float:
    """``KL(pi || ref)`` over completions, nats."""
    return float(instance.reach(instance.policy_logp()) @ instance.kl_N[0])


def effective_sample_share(instance: Instance) -> float:
    """``1 / E_mu[(pi / mu)^2]`` over completions: Kish's effective sample size over the number of samples.

    The sampler ``mu`` must be able to draw what the policy ``pi`` can, or the ratios do not have mean 1.
    """
    square = 0.0
    policy_NV = instance.in_dialogue(instance.policy_logp())
    sampler_NV = instance.in_dialogue(instance.sampler_logp_NV)
    for completions in instance.tree.chunks(CHUNK):
        drawn_B = log_probs(completions, sampler_NV).sum(-1)
        policy_B = log_probs(completions, policy_NV).sum(-1)
        # A token that the sampler never draws has IMPOSSIBLE; what it can draw is far above half of that.
        can_be_drawn_B = drawn_B > IMPOSSIBLE / 2
        # E_mu[(pi / mu)^2] = sum pi^2 / mu
        square += float(torch.where(can_be_drawn_B, (2 * policy_B - drawn_B).exp(), 0.0).sum())
    return 1.0 / square


def against_the_sampler(instance: Instance) -> Instance:
    """The same instance with the sampler as the reference, for terms that pull towards it."""
    return dataclasses.replace(instance, ref_logp_NV=instance.recorded_logp_NV)
