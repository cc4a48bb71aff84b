"""Why a loss misses the target that it claims: each mistake has a repair, and where the repaired loss hits the target,
that mistake is the cause.

The repairs are tried on the policies near the reference, on the derivatives of the loss by the log-probs (the ratio of
a token, for instance, is multiplied in there), so that no source code is read.

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes; log-probs in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.conformance.masks import OF_THE_MASK
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance
from kl_comedy.kl.oracle.divergences import DIVERGENCES
from kl_comedy.kl.oracle.gradients import ScoreTables

LARGEST_NEGLIGIBLE = 1e-6
"""Share of a fitted coefficient that counts as zero: the equations hold to 1e-9 or not at all."""


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """The loss on one policy near the reference.

    ``slope_BTV``: derivatives by the log-probs, zero in the padding. ``value_BT``: the value per token, None where the
    loss does not return it. ``swapped_BTV``: the derivatives with ``logp`` and ``ref_logp`` exchanged, None where the
    loss cannot be called so. ``log_ratio_BT``: policy over sampler, ``ref_log_ratio_BT``: policy over reference, zero
    in the padding, as ``logp_BT`` is. ``reads_reference``: whether another reference gives other derivatives.
    ``parts_BT``: the parts of the mask by :data:`~kl_comedy.conformance.masks.OF_THE_MASK`. ``turn_length_BT``: tokens
    of the turn that a token is in. ``attended_B``: tokens of a completion, those of a tool included; ``span_B``: those
    up to the last one of the mask.
    """

    policy: BatteryInstance
    prefix_BT: Tensor
    token_BT: Tensor
    mask_BT: Tensor
    weight_B: Tensor
    slope_BTV: Tensor
    value_BT: Tensor | None
    swapped_BTV: Tensor | None
    log_ratio_BT: Tensor
    ref_log_ratio_BT: Tensor
    logp_BT: Tensor
    reads_reference: bool
    parts_BT: Mapping[str, Tensor]
    turn_length_BT: Tensor
    attended_B: Tensor
    span_B: Tensor
    tolerance: float

    @property
    def has_gradient_BT(self) -> Tensor:
        """The tokens of the mask whose log-probs have a derivative."""
        return (self.slope_BTV != 0).any(-1) & self.mask_BT

    @property
    def own_slope_BT(self) -> Tensor:
        """The derivatives by the log-probs of the drawn tokens."""
        return self.slope_BTV.gather(-1, self.token_BT[..., None])[..., 0]

    @property
    def score_BTVD(self) -> Tensor:
        """The derivatives of the log-probs by the parameters."""
        instance = self.policy.instance
        assert instance.features_NVD is not None
        return ScoreTables(instance, instance.features_NVD).score_NVD[self.prefix_BT]

    def gradient(self, slope_BTV: Tensor) -> Tensor:
        """The expected gradient ``[D]`` of other derivatives in the place of the loss's own."""
        gradient_BD = torch.einsum("btv,btvd->bd", slope_BTV, self.score_BTVD)
        return self.weight_B @ gradient_BD

    def of_own_token(self, value_BT: Tensor) -> Tensor:
        """Derivatives ``[B, T, V]`` that are ``value_BT`` at the drawn token and zero elsewhere."""
        zeros_BTV = torch.zeros_like(self.slope_BTV)
        return zeros_BTV.scatter(-1, self.token_BT[..., None], value_BT[..., None])


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A change of the derivatives that undoes one mistake. ``cause`` is that mistake, in words."""

    cause: str
    change: Callable[[Slopes], Tensor | None]


def _times(factor_of: Callable[[Slopes], Tensor]) -> Callable[[Slopes], Tensor]:
    """The derivatives of each token times a factor ``[B, T]``, which has no derivative of its own."""

    def changed(slopes: Slopes) -> Tensor:
        return slopes.slope_BTV * factor_of(slopes)[..., None]

    return changed


def _token_ratio(slopes: Slopes) -> Tensor:
    return slopes.log_ratio_BT.exp()


def _prefix_ratio(slopes: Slopes) -> Tensor:
    return slopes.log_ratio_BT.cumsum(-1).exp()


def _completion_ratio(slopes: Slopes) -> Tensor:
    total_B1 = slopes.log_ratio_BT.sum(-1, keepdim=True)
    return total_B1.exp().expand_as(slopes.log_ratio_BT)


def _token_for_completion_ratio(slopes: Slopes) -> Tensor:
    return _token_ratio(slopes) / _completion_ratio(slopes)


def _token_for_mean_ratio(slopes: Slopes) -> Tensor:
    tokens_B1 = slopes.mask_BT.sum(-1, keepdim=True)
    mean_B1 = slopes.log_ratio_BT.sum(-1, keepdim=True) / tokens_B1
    return _token_ratio(slopes) / mean_B1.exp()


def _completion_for_token_ratio(slopes: Slopes) -> Tensor:
    return _completion_ratio(slopes) / _token_ratio(slopes)


def _length(slopes: Slopes) -> Tensor:
    return slopes.mask_BT.sum(-1, keepdim=True).expand_as(slopes.mask_BT).double()


def _attended_length(slopes: Slopes) -> Tensor:
    return slopes.attended_B[:, None].expand_as(slopes.mask_BT).double()


def _span_length(slopes: Slopes) -> Tensor:
    return slopes.span_B[:, None].expand_as(slopes.mask_BT).double()


def _turn_length(slopes: Slopes) -> Tensor:
    return slopes.turn_length_BT.double()


def _with_differentiated_ratio(slopes: Slopes) -> Tensor | None:
    """The derivatives of ``ratio * value``: ``ratio * (slope + value * d log ratio)``."""
    if slopes.value_BT is None:
        return None
    score_BTV = slopes.of_own_token(slopes.value_BT)
    return _token_ratio(slopes)[..., None] * (slopes.slope_BTV + score_BTV)


def _with_gradient_of_the_ratio(slopes: Slopes) -> Tensor | None:
    """The derivatives of ``ratio * value`` where the value has its ratio already, detached."""
    if slopes.value_BT is None:
        return None
    return slopes.slope_BTV + slopes.of_own_token(slopes.value_BT)


def _token_ratio_removed(slopes: Slopes) -> Tensor:
    return (-slopes.log_ratio_BT).exp()


def _token_ratio_turned(slopes: Slopes) -> Tensor:
    return (2 * slopes.log_ratio_BT).exp()


def _with_turned_ratio(slopes: Slopes) -> Tensor | None:
    """The derivatives of ``ratio * value`` from those of ``value / ratio``, whose ratio is differentiated."""
    if slopes.value_BT is None:
        return None
    score_BTV = slopes.of_own_token(2 * slopes.value_BT)
    return _token_ratio_turned(slopes)[..., None] * (slopes.slope_BTV + score_BTV)


def _swapped(slopes: Slopes) -> Tensor | None:
    return slopes.swapped_BTV


def _negative(slopes: Slopes) -> Tensor:
    return -slopes.slope_BTV


# In this order: the first repair that hits the target is the cause. Simple mistakes stand before those whose repair
# is a special case of a later one (on-policy all detached ratios are one, and repair nothing).
REPAIRS = (
    Repair(cause="wrong sign: it drives the policy away from the reference", change=_negative),
    Repair(cause="logp and ref_logp are exchanged (the argument order of the call)", change=_swapped),
    Repair(
        cause="the gradient of the value is missing: multiply each token's value by its ratio "
        "exp(logp - behaviour_logp), not detached (on-policy the ratio is 1, its gradient is not 0)",
        change=_with_differentiated_ratio,
    ),
    Repair(
        cause="the ratio is detached: the gradient of ratio times value needs that of exp(logp - behaviour_logp) too",
        change=_with_gradient_of_the_ratio,
    ),
    Repair(
        cause="a ratio is missing: multiply each token by its own exp(logp - behaviour_logp)",
        change=_times(_token_ratio),
    ),
    Repair(
        cause="a ratio is missing: multiply each token by the ratio of its prefix, exp(cumsum(logp - behaviour_logp))",
        change=_times(_prefix_ratio),
    ),
    Repair(
        cause="a ratio is missing: multiply by the ratio of the whole completion, exp(sum(logp - behaviour_logp))",
        change=_times(_completion_ratio),
    ),
    Repair(
        cause="each token's ratio is applied twice, or squared",
        change=_times(_token_ratio_removed),
    ),
    Repair(
        cause="each token's ratio is upside down: exp(behaviour_logp - logp) for exp(logp - behaviour_logp)",
        change=_times(_token_ratio_turned),
    ),
    Repair(
        cause="each token's ratio is upside down: exp(behaviour_logp - logp) for exp(logp - behaviour_logp)",
        change=_with_turned_ratio,
    ),
    Repair(
        cause="the ratio of the whole completion stands where each token's own ratio is meant",
        change=_times(_token_for_completion_ratio),
    ),
    Repair(
        cause="the mean ratio of the whole completion (GSPO's) stands where each token's own ratio is meant",
        change=_times(_token_for_mean_ratio),
    ),
    Repair(
        cause="each token's own ratio stands where the ratio of the whole completion is meant",
        change=_times(_completion_for_token_ratio),
    ),
)
# What a loss may be divided by, whatever else is wrong with it.
DIVISORS = (
    Repair(
        cause="a mean over the wrong axis: each completion is divided by its number of tokens, so that tokens of short "
        "completions weigh more; sum the tokens, or divide by those of the whole batch",
        change=_times(_length),
    ),
    Repair(
        cause="a mean over the wrong axis: each completion is divided by its number of tokens in the attention mask, a "
        "tool's replies included; sum the tokens, or divide by those of the mask in the whole batch",
        change=_times(_attended_length),
    ),
    Repair(
        cause="a mean over the wrong axis: each completion is divided by its number of tokens up to the last one of "
        "the mask, a tool's replies included; sum the tokens, or divide by those of the mask in the whole batch",
        change=_times(_span_length),
    ),
    Repair(
        cause="a mean over the wrong axis: each turn is divided by its number of tokens, so that tokens of short turns "
        "weigh more; sum the tokens, or divide by those of the whole batch",
        change=_times(_turn_length),
    ),
)

WRONG_TARGETS = {
    ("token_reverse", "token_forward"): "wrong direction: the gradient is the forward KL's",
    ("sequence_reverse", "token_forward"): "wrong direction: the gradient is the forward KL's, token by token",
    ("sequence_reverse", "sequence_forward"): "wrong direction: the gradient is the forward KL's",
    ("token_forward", "token_reverse"): "wrong direction: the gradient is the reverse KL's",
    ("sequence_forward", "sequence_reverse"): "wrong direction: the gradient is the reverse KL's",
    ("sequence_reverse", "token_reverse"): "each token's cost reaches that token alone; earlier tokens, which lead to "
    "it, get no credit (put it into the reward, or use a ratio of the prefix)",
    ("token_reverse", "token_policy_square"): "the ratio on k2 has a gradient: detach exp(logp - behaviour_logp)",
    ("sequence_reverse", "sequence_k2_cost"): "k2 is a cost, where k1 has the gradient of the reverse KL",
    ("sequence_reverse", "sequence_k3_cost"): "k3 is a cost, where k1 has the gradient of the reverse KL",
    ("token_reverse", "sequence_reverse"): "a ratio or a cost of the whole completion stands where a token's is meant",
}
"""By the claimed target and the one that is hit."""


def cause_of(claimed: str, hit: str | None, measured: Sequence[Slopes]) -> str:
    """Why a loss that claims ``claimed`` optimizes ``hit`` (None: no target); empty where no known mistake fits.

    ``measured`` is the loss on each policy near the reference. Several causes are joined by a semicolon.
    """
    if claimed in ("none", "zero"):
        return ""
    # A gradient that is not finite fits no target, repaired or not; the report has it as a problem.
    for slopes in measured:
        if not bool(slopes.slope_BTV.isfinite().all()):
            return ""
    part = _part_of_the_mask(measured)
    if part:
        direction = _direction_within(claimed, measured)
        return "; ".join(cause for cause in (part, direction) if cause)
    causes = []
    if hit is not None and (claimed, hit) in WRONG_TARGETS:
        causes.append(WRONG_TARGETS[claimed, hit])
    exchanged = ""
    if hit in DIVERGENCES:
        exchanged = _exchanged(measured)
    if exchanged:
        causes.append(exchanged)
    else:
        # A divergence may come of another mistake too, as the square of k2 of a ratio that should be detached.
        causes.append(_repair(claimed, measured))
    if hit is None:
        causes.append(_missing_detach(claimed, measured))
        causes.append(_parts_of_top_k(measured))
    if not any(causes):
        causes.append(_without_gradient(measured) or _clipped_ratio(measured))
    return "; ".join(cause for cause in causes if cause)


def _repair(claimed: str, measured: Sequence[Slopes]) -> str:
    """The mistake whose repair makes the loss hit the claimed target; empty where none does."""
    for repair in (*REPAIRS, *DIVISORS):
        repaired = [repair.change(slopes) for slopes in measured]
        if _hits(claimed, repaired, measured):
            return repair.cause
    # Two mistakes: a wrong divisor, and without it another target than the claimed one.
    for divisor in DIVISORS:
        repaired = [divisor.change(slopes) for slopes in measured]
        for (meant, other), words in WRONG_TARGETS.items():
            if meant == claimed and other in TARGETS and _hits(other, repaired, measured):
                return f"{divisor.cause}; {words}"
    return ""


def _part_of_the_mask(measured: Sequence[Slopes]) -> str:
    """Which part of the mask alone has a gradient, in every completion of every policy; empty where none fits."""
    for words in OF_THE_MASK:
        parts_BT = [slopes.parts_BT[words] for slopes in measured]
        is_whole = all(torch.equal(part_BT, slopes.mask_BT) for part_BT, slopes in zip(parts_BT, measured, strict=True))
        is_empty = not any(bool(part_BT.any()) for part_BT in parts_BT)
        if is_whole or is_empty:
            continue
        # Where policy and reference agree on a token, its gradient is zero by right, but not in every completion.
        pairs = zip(parts_BT, measured, strict=True)
        if all(torch.equal(slopes.has_gradient_BT, part_BT) for part_BT, slopes in pairs):
            return words
    return ""


def _direction_within(claimed: str, measured: Sequence[Slopes]) -> str:
    """Whether the tokens that have a gradient have that of the KL in the other direction; empty where they do not."""
    other = {"token_reverse": "token_forward", "token_forward": "token_reverse"}.get(claimed)
    if other is None:
        return ""
    gradients = [slopes.gradient(slopes.slope_BTV) for slopes in measured]
    targets = []
    for slopes in measured:
        logp_BTV = slopes.policy.instance.policy_logp()[slopes.prefix_BT]
        ref_logp_BTV = slopes.policy.instance.ref_logp_NV[slopes.prefix_BT]
        slope_BTV = -ref_logp_BTV.exp()
        if other == "token_reverse":
            slope_BTV = logp_BTV.exp() * (logp_BTV - ref_logp_BTV)
        targets.append(slopes.gradient(torch.where(slopes.has_gradient_BT[..., None], slope_BTV, 0.0)))
    if common_coefficient(gradients, targets, measured[0].tolerance) is None:
        return ""
    return WRONG_TARGETS[claimed, other]


def _without_gradient(measured: Sequence[Slopes]) -> str:
    """What has no gradient, though every KL gives it one; empty where nothing lacks it."""
    if all(_is_detached_sum(slopes) for slopes in measured):
        return "the probabilities of the sum over the vocabulary are detached: their gradient is that of the KL"
    if not any(slopes.reads_reference for slopes in measured):
        return "the reference does not enter the gradient: with another ref_logp it is the same"
    return ""


def _is_detached_sum(slopes: Slopes) -> bool:
    """Whether the derivatives are the probabilities of the tokens, times one number."""
    logp_NV = slopes.policy.instance.policy_logp()
    p_BTV = torch.where(slopes.mask_BT[..., None], logp_NV[slopes.prefix_BT].exp(), 0.0)
    factor = slopes.slope_BTV.sum() / p_BTV.sum()
    difference = (slopes.slope_BTV - factor * p_BTV).norm()
    return bool(factor > 0) and bool(difference <= slopes.tolerance * slopes.slope_BTV.norm())


def _missing_detach(claimed: str, measured: Sequence[Slopes]) -> str:
    """Whether the gradient is the target's and that of the cost in ``cost * logp``, which should be detached.

    The cost's gradient at a token is ``beta`` times the log-probs of the tokens whose scores the cost multiplies.
    """
    target = torch.cat([slopes.policy.targets[claimed] for slopes in measured])
    gradient = torch.cat([slopes.gradient(slopes.slope_BTV) for slopes in measured])
    for logp_of in (_own_logp, _logp_so_far, _logp_of_completion):
        for weight_of in (torch.ones_like, torch.exp):
            extras = []
            for slopes in measured:
                weight_BT = weight_of(slopes.log_ratio_BT)
                extras.append(slopes.gradient(slopes.of_own_token(weight_BT * logp_of(slopes))))
            parts_2D = torch.stack([target, torch.cat(extras)])
            solution = torch.linalg.lstsq(parts_2D.T, gradient[:, None]).solution[:, 0]
            residual = float((solution @ parts_2D - gradient).norm())
            of_target, of_cost = solution.tolist()
            fits = residual <= measured[0].tolerance * float(gradient.norm())
            if fits and of_target > 0 and math.isclose(of_cost, of_target, rel_tol=1e-3):
                return "a detach is missing: the cost in cost * logp has a gradient of its own; detach it"
    return ""


def _own_logp(slopes: Slopes) -> Tensor:
    return slopes.logp_BT


def _logp_so_far(slopes: Slopes) -> Tensor:
    return slopes.logp_BT.cumsum(-1)


def _logp_of_completion(slopes: Slopes) -> Tensor:
    return slopes.logp_BT.sum(-1, keepdim=True).expand_as(slopes.logp_BT)


def _clipped_ratio(measured: Sequence[Slopes]) -> str:
    """Whether each token's derivative is its log-ratio to the reference times a clipped ratio to the sampler."""
    ratios = []
    factors = []
    for slopes in measured:
        is_shown_BT = slopes.mask_BT & (slopes.ref_log_ratio_BT.abs() > LARGEST_NEGLIGIBLE)
        ratios.append(slopes.log_ratio_BT[is_shown_BT].exp())
        factors.append((slopes.own_slope_BT / slopes.ref_log_ratio_BT)[is_shown_BT])
    ratio_N = torch.cat(ratios)
    factor_N = torch.cat(factors)
    # Most ratios are within the bounds, so that the median is beta.
    beta = (factor_N / ratio_N).median()
    if not bool(beta > 0):
        return ""
    low, high = (factor_N / beta).aminmax()
    tolerance = measured[0].tolerance
    is_clipped = torch.allclose(factor_N / beta, ratio_N.clamp(low, high), rtol=tolerance)
    changes = not torch.allclose(factor_N / beta, ratio_N, rtol=tolerance)
    if is_clipped and changes:
        return f"the ratio is clipped: it is {float(low):.3g} to {float(high):.3g} and not {_range(ratio_N)}"
    return ""


def _range(values: Tensor) -> str:
    low, high = values.aminmax()
    return f"{float(low):.3g} to {float(high):.3g}"


def clamp_cause(slopes_BT: Sequence[tuple[Tensor, Tensor]]) -> str:
    """From which log-ratio on tokens have no gradient, as where it is clamped; empty where no such bound fits.

    ``slopes_BT``: for each policy the derivatives by the drawn tokens' log-probs, and their log-ratios to the
    reference, which are zero in the padding.
    """
    slope_N = torch.cat([slope_BT[ratio_BT != 0] for slope_BT, ratio_BT in slopes_BT])
    ratio_N = torch.cat([ratio_BT[ratio_BT != 0] for _, ratio_BT in slopes_BT])
    bounds = []
    for is_side_N, words in ((ratio_N > 0, "above"), (ratio_N < 0, "below")):
        with_gradient = ratio_N[is_side_N & (slope_N != 0)].abs()
        without = ratio_N[is_side_N & (slope_N == 0)].abs()
        if len(with_gradient) == 0 or len(without) == 0 or with_gradient.max() > without.min():
            continue
        sign = "-" if words == "below" else ""
        bounds.append(f"{words} {sign}{float(with_gradient.max()):.3g}")
    if not bounds:
        return ""
    return f"clamped: a token has no gradient where logp - ref_logp is {' or '.join(bounds)}"


def _exchanged(measured: Sequence[Slopes]) -> str:
    """Which KL the loss would optimize with policy and reference exchanged; empty for none."""
    swapped = [slopes.swapped_BTV for slopes in measured]
    for target in ("token_reverse", "token_forward", "sequence_reverse"):
        if _hits(target, swapped, measured):
            return f"logp and ref_logp are exchanged: in the other order it is {target}"
    return ""


def _hits(target: str, changed: Sequence[Tensor | None], measured: Sequence[Slopes]) -> bool:
    """Whether a target's gradient is hit with ``changed`` derivatives ``[B, T, V]``, one for each policy.

    False where the loss has none of this kind: what one policy lacks, all lack, so that nothing could be compared.
    """
    gradients = []
    targets = []
    for slopes, slope_BTV in zip(measured, changed, strict=True):
        if slope_BTV is None:
            return False
        gradients.append(slopes.gradient(slope_BTV))
        targets.append(slopes.policy.targets[target])
    return common_coefficient(gradients, targets, measured[0].tolerance) is not None


def common_coefficient(gradients: Sequence[Tensor], targets: Sequence[Tensor], tolerance: float) -> float | None:
    """The positive number by which all targets must be multiplied to be the gradients; None where there is none."""
    square = float(targets[0].square().sum())
    if square == 0 or not math.isfinite(square):
        return None
    coefficient = float(gradients[0] @ targets[0]) / square
    if not coefficient > 0:
        return None
    for gradient_D, target_D in zip(gradients, targets, strict=True):
        error = float((gradient_D - coefficient * target_D).norm())
        if not error <= tolerance * float(gradient_D.norm() + coefficient * target_D.norm()):
            return None
    return coefficient


def _parts_of_top_k(measured: Sequence[Slopes]) -> str:
    """Whether the gradient is that of a top-k KL without its tail, or with a part of its tail's derivative.

    The gradient of the whole reverse KL of a prefix is ``head + tail`` with ``head = sum_{v in S} p_v l_v s_v``. A
    top-k loss whose head is differentiated as it stands has ``mass = sum_{v in S} p_v s_v`` too, which only the
    derivative of the sampled tail takes away again.
    """
    # One equation system for all policies: the coefficients of the parts are those of the loss, not of a policy.
    gradient = torch.cat([slopes.gradient(slopes.slope_BTV) for slopes in measured])
    largest_residual = measured[0].tolerance * float(gradient.norm())
    vocabulary = measured[0].slope_BTV.shape[-1]
    for whose in ("policy", "reference"):
        for k in range(1, vocabulary):
            parts_KD = torch.cat([_head_tail_mass(slopes, k, whose) for slopes in measured], -1)
            solution = torch.linalg.lstsq(parts_KD.T, gradient[:, None]).solution[:, 0]
            residual = float((solution @ parts_KD - gradient).norm())
            if residual > largest_residual:
                continue
            head, tail, mass = solution.tolist()
            cause = _missing_part(head, tail, mass, k=k, whose=whose)
            if cause:
                return cause
    return ""


def _missing_part(head: float, tail: float, mass: float, *, k: int, whose: str) -> str:
    """What a gradient of these parts (:func:`_parts_of_top_k`) lacks; empty where it lacks nothing that we know."""
    if head <= 0:
        return ""
    negligible = LARGEST_NEGLIGIBLE * head
    if abs(tail) < negligible:
        return f"the tail is missing: only the {k} likeliest tokens of the {whose} have a gradient"
    is_whole = math.isclose(head, tail, rel_tol=LARGEST_NEGLIGIBLE)
    if is_whole and abs(mass) > negligible:
        return (
            f"the gradient of the tail is missing in part: that of the mass of the {whose}'s {k} likeliest tokens is "
            f"left over, {mass / head:.3g} times (the sampled tail needs its own derivative, + logp - logp.detach())"
        )
    return ""


def _head_tail_mass(slopes: Slopes, k: int, whose: str) -> Tensor:
    """Gradients ``[3, D]`` of the parts of a top-k reverse KL at the visited prefixes."""
    instance = slopes.policy.instance
    assert instance.features_NVD is not None
    logp_NV = instance.policy_logp()
    chooser_NV = logp_NV
    if whose == "reference":
        chooser_NV = instance.ref_logp_NV
    inside_NV = torch.zeros_like(logp_NV).scatter(-1, chooser_NV.topk(k, -1).indices, 1.0)
    p_NV = logp_NV.exp()
    cost_NV = p_NV * (logp_NV - instance.ref_logp_NV)
    weights = torch.stack([inside_NV * cost_NV, (1 - inside_NV) * cost_NV, inside_NV * p_NV])
    score_NVD = ScoreTables(instance, instance.features_NVD).score_NVD
    visits_N = instance.reach(instance.sampler_logp_NV)
    return torch.einsum("n,knv,nvd->kd", visits_N, weights, score_NVD)
