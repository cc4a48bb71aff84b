"""kl_surrogate: the per-token loss of a KL term, whose expected gradient is what the term descends.

Legend: ``B`` sequences, ``T`` completion tokens. All log-probs in nats; promoted to float32 at least.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.kl.corrections import weights_of
from kl_comedy.kl.estimators.log_ratio import k2
from kl_comedy.kl.placements import TermParts, exact_in_reward, in_loss, in_reward
from kl_comedy.kl.term import KLTerm
from kl_comedy.registry import CORRECTIONS, ESTIMATORS


def kl_surrogate(
    term: KLTerm,
    *,
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    mask_BT: Tensor,
    exact_kl_BT: Tensor | None = None,
    baseline_BT: Tensor | None = None,
) -> Tensor:
    """The surrogate of a term, per token, unreduced, at beta = 1, zero outside the mask. ``[B, T]``.

    Over sequences drawn from the behaviour policy, the expectation of ``grad sum_t surrogate[b, t]`` is
    the term's contribution to the gradient of the objective to be *minimized*. Gradients flow into
    ``logp_BT`` and ``exact_kl_BT`` only. The algorithm's baseline does not change that expectation and is
    not applied here; a term with ``reference: sampler`` is measured against ``behaviour_logp_BT``.

    Args:
        term: the KL term.
        logp_BT: the policy's log-probs of the sampled tokens, with gradient.
        ref_logp_BT: the reference's.
        behaviour_logp_BT: the sampler's, as recorded when the token was drawn.
        mask_BT: true on completion tokens; each row has at least one.
        exact_kl_BT: for ``exact`` (``exact_forward``): the exact reverse (forward) KL of the next-token
            distributions at the prefix of token t, differentiable.
        baseline_BT: for ``baseline: own``: :func:`~kl_comedy.kl.baseline.own_baseline` of the update's
            rows; None is no baseline (a group of one).

    Raises:
        UserError: shapes that differ, a row without tokens, a log-prob that is not finite, an exact
            estimator without ``exact_kl_BT``, an estimator that returns another shape.

    >>> logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    >>> kl_surrogate(KLTerm("k2", placement="loss"), logp_BT=logp, ref_logp_BT=torch.tensor([[-2.0, -2.0]]),
    ...     behaviour_logp_BT=logp.detach(), mask_BT=torch.tensor([[True, True]])).detach()
    tensor([[0.5000, 0.0000]])
    """
    logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT, exact_kl_BT = _enter(
        term, logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT, exact_kl_BT
    )
    parts = _parts(term, logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT, exact_kl_BT)
    credited_BT = parts.weight_BT * parts.cost_BT
    if baseline_BT is not None and term.baseline == "own":
        credited_BT = credited_BT - parts.baseline_weight_BT * baseline_BT.detach()
    surrogate_BT = credited_BT * logp_BT + parts.pathwise_BT
    return torch.where(mask_BT, surrogate_BT, torch.zeros_like(surrogate_BT))


def kl_parts(
    term: KLTerm,
    *,
    logp_BT: Tensor,
    ref_logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    mask_BT: Tensor,
    exact_kl_BT: Tensor | None = None,
) -> TermParts:
    """The same term taken apart (see :class:`TermParts`), for a cost that enters before the baseline."""
    return _parts(term, *_enter(term, logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT, exact_kl_BT))


def kl_diagnostics(
    term: KLTerm, *, logp_BT: Tensor, ref_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor
) -> dict[str, float]:
    """What the options of a term did to this batch: ``ratio_max``, the share of ratios beyond the cap
    (``capped_share``) and the share of tokens whose estimate is clamped, so without gradient
    (``clamped_share``). Empty for a term without correction and clamps.
    """
    found: dict[str, float] = {}
    with torch.no_grad():
        if term.correction != "none":
            delta_BT = torch.where(mask_BT, _wide(logp_BT) - _wide(behaviour_logp_BT), 0.0)
            ratio_BT = weights_of(term.correction, delta_BT, window=term.window)
            beyond_BT = (delta_BT.exp() if term.cap_mode == "each" else ratio_BT) > (term.cap or math.inf)
            found["ratio_max"] = float(ratio_BT[mask_BT].max())
            found["capped_share"] = float(beyond_BT[mask_BT].double().mean())
        if term.input_clamp is not None or term.output_clamp is not None:
            found["clamped_share"] = float(_clamped(term, logp_BT, ref_logp_BT, behaviour_logp_BT, mask_BT))
    return found


def _clamped(term: KLTerm, logp_BT: Tensor, ref_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The share of tokens (of completions, at level sequence) beyond a clamp; exact estimators have none here."""
    if term.needs != "log_ratio":
        return torch.zeros(())
    against_BT = behaviour_logp_BT if term.reference == "sampler" else ref_logp_BT
    log_ratio_BT = torch.where(mask_BT, _wide(logp_BT) - _wide(against_BT), 0.0)
    if term.level == "sequence":
        log_ratio_BT, mask_BT = log_ratio_BT.sum(-1, keepdim=True), mask_BT.any(-1, keepdim=True)
    beyond_BT = log_ratio_BT.abs() > (term.input_clamp or math.inf)
    free = dataclasses.replace(term, input_clamp=None, output_clamp=None)
    beyond_BT = beyond_BT | (_evaluate(free, log_ratio_BT).abs() > (term.output_clamp or math.inf))
    return beyond_BT[mask_BT].double().mean()


def _parts(
    term: KLTerm, logp_BT: Tensor, ref_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor,
    exact_kl_BT: Tensor | None,
) -> TermParts:  # fmt: skip
    correction = CORRECTIONS.get(term.correction)
    delta_BT = torch.where(mask_BT, logp_BT - behaviour_logp_BT, torch.zeros_like(logp_BT))
    ratio_BT = weights_of(term.correction, delta_BT, cap=term.cap, cap_mode=term.cap_mode, window=term.window)
    per_decision = correction.facts.get("weights") == "cost"
    up_to_BT = ratio_BT
    if per_decision and term.placement == "reward":
        up_to_BT = weights_of("prefix", delta_BT, cap=term.cap, cap_mode=term.cap_mode, window=term.window)
    if exact_kl_BT is not None and term.needs != "log_ratio":
        value_BT = _evaluate(term, torch.where(mask_BT, exact_kl_BT, torch.zeros_like(exact_kl_BT)))
        if term.placement == "loss":
            return in_loss(value_BT, ratio_BT)
        own_ratio = correction.facts.get("scope") != "token"
        return exact_in_reward(
            value_BT, ratio_BT, up_to_BT, credit=str(term.credit), per_decision=per_decision, own_ratio=own_ratio
        )
    at_BT = behaviour_logp_BT if term.anchor == "behaviour" else logp_BT
    against_BT = behaviour_logp_BT if term.reference == "sampler" else ref_logp_BT
    log_ratio_BT = torch.where(mask_BT, at_BT - against_BT, torch.zeros_like(at_BT))
    value_BT = _sampled_value(term, log_ratio_BT, mask_BT)
    if term.placement == "loss":
        return in_loss(value_BT, ratio_BT)
    return in_reward(value_BT, ratio_BT, up_to_BT, credit=str(term.credit), per_decision=per_decision)


def _sampled_value(term: KLTerm, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The estimate per token; at level sequence it is spread evenly over the tokens, so that it sums up."""
    if term.level == "sequence":
        log_ratio_BT = log_ratio_BT.sum(-1, keepdim=True)
    value_BT = _evaluate(term, log_ratio_BT)
    if term.gradient == "k2":
        half_square_BT = k2(log_ratio_BT)
        value_BT = half_square_BT + (value_BT - half_square_BT).detach()
    if term.level == "sequence":
        value_BT = value_BT * mask_BT / mask_BT.sum(-1, keepdim=True)
    return torch.where(mask_BT, value_BT, torch.zeros_like(value_BT))


def _evaluate(term: KLTerm, argument_BT: Tensor) -> Tensor:
    if term.input_clamp is not None:
        argument_BT = argument_BT.clamp(-term.input_clamp, term.input_clamp)
    value_BT = ESTIMATORS.get(term.estimator).fn(argument_BT, **term.options)
    if not isinstance(value_BT, Tensor) or value_BT.shape != argument_BT.shape:
        got = tuple(value_BT.shape) if isinstance(value_BT, Tensor) else type(value_BT).__name__
        raise UserError(
            f"estimator {term.estimator!r} must return a tensor of the shape of its argument "
            f"{tuple(argument_BT.shape)}, and returned {got}"
        )
    if term.output_clamp is not None:
        value_BT = value_BT.clamp(-term.output_clamp, term.output_clamp)
    return value_BT


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _enter(
    term: KLTerm, logp_BT: Tensor, ref_logp_BT: Tensor, behaviour_logp_BT: Tensor, mask_BT: Tensor,
    exact_kl_BT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Check ranks, shapes and values at the door; detach what must not be differentiated."""
    tensors = {"logp_BT": logp_BT, "ref_logp_BT": ref_logp_BT, "behaviour_logp_BT": behaviour_logp_BT}
    if term.needs != "log_ratio":
        if exact_kl_BT is None:
            raise UserError(f"estimator {term.estimator!r} needs exact_kl_BT: the {term.direction} KL at each prefix")
        tensors["exact_kl_BT"] = exact_kl_BT
    if logp_BT.dim() != 2:
        raise UserError(f"logp_BT must be [B, T], got shape {tuple(logp_BT.shape)}")
    for name, tensor in {**tensors, "mask_BT": mask_BT}.items():
        if tensor.shape != logp_BT.shape:
            raise UserError(f"{name} has shape {tuple(tensor.shape)}, and logp_BT {tuple(logp_BT.shape)}")
    mask_BT = mask_BT.bool()
    empty = (~mask_BT.any(-1)).nonzero().flatten().tolist()
    if empty:
        raise UserError(f"mask_BT: no completion token in row(s) {empty[:8]}; drop such rows, or weight them zero")
    for name, tensor in tensors.items():
        bad = ~torch.isfinite(tensor.detach()) & mask_BT
        if bool(bad.any()):
            row, column = (int(i) for i in bad.nonzero()[0])
            raise UserError(
                f"{name} is not finite at [{row}, {column}] ({float(tensor[row, column].detach())}), "
                f"{int(bad.sum())} such value(s) in all"
            )
    return (
        _wide(logp_BT),
        _wide(ref_logp_BT).detach(),
        _wide(behaviour_logp_BT).detach(),
        mask_BT,
        None if exact_kl_BT is None else _wide(exact_kl_BT),
    )
