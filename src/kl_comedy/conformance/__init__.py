"""Conformance: what any trainer's KL loss optimizes, by enumeration in float64, as a test for its CI.

    loss_fn + every completion of small policies -> expected gradient -> compared with targets -> Report

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kl_comedy.conformance.arguments import ARGUMENTS, adapt, caller
from kl_comedy.conformance.batches import MASKED_TOKENS, Batch, Loss, slope_of, token_columns
from kl_comedy.conformance.causes import Slopes, cause_of, clamp_cause
from kl_comedy.conformance.masks import OF_THE_MASK, turn_lengths
from kl_comedy.conformance.problems import example_of_problems, problems_of
from kl_comedy.conformance.report import Finding, Report, beta_cause
from kl_comedy.conformance.results import Result, Results, result_of
from kl_comedy.conformance.smallest import Measured, smallest_miss
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.claims import REGIMES, TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance, battery, with_targets
from kl_comedy.kl.oracle.divergences import DIVERGENCES
from kl_comedy.kl.oracle.drawn import coverage, drawn_settings

__all__ = ["ARGUMENTS", "CLAIMS", "MASKED_TOKENS", "Finding", "Report", "adapt", "check"]

CLAIMS = (*TARGETS, *DIVERGENCES, "none")
"""What a loss may be said to optimize."""
DRAWN_PARAMETERS = 6
"""Parameters of a drawn policy that would have one for each prefix and token. A loss for language models is tried on
policies that share parameters among prefixes, as a language model does."""


def check(
    loss_fn: Callable[..., Tensor],
    *,
    claims: str | Mapping[str, str],
    masked_tokens: str = "zero",
    near_only: bool = False,
    regimes: Sequence[str] = REGIMES,
    seed: int = 0,
    beta: float | None = None,
) -> Report:
    """What ``loss_fn`` optimizes on-policy, off-policy and with mixed policy versions, against what it claims.

    ``loss_fn`` (a function or a module) is called with those of these tensors that its parameters name: ``logp``,
    ``ref_logp``, ``behaviour_logp`` (log-probs of the tokens in nats, ``[B, T]``, zero in the padding), ``mask`` (bool
    ``[B, T]``), ``tokens`` (ids ``[B, T]``), ``logp_full``, ``ref_logp_full`` (``[B, T, V]``), ``logits``,
    ``ref_logits`` (those plus any number for each token), ``labels`` (ids, -100 outside the mask), ``attention_mask``
    (true at masked tokens within a completion, false in the padding). It returns what is to be minimized: ``[B, T]``,
    ``[B]`` or a scalar. How a scalar is made of several completions is measured, and the report names it: their sum,
    their mean, or the mean over the tokens (or turns) of the batch. (A mean per completion weights a completion by
    1 / length, which no KL does, and a mean over the tokens of another mask is a problem.)

    ``masked_tokens``: masked tokens stand within completions, as a tool's reply does, and must not enter the loss:
    ``"zero"``, it is zero there; ``"left_out"``, whoever sums a loss ``[B, T]`` leaves them out; ``"absent"``, there
    are none, as in training with one turn.

    Names that trainers use (``ref_per_token_logps``, ``response_mask``, ``tool_mask``, beside which ``completion_mask``
    is the attention mask) are known, and a parameter ``batch`` gets all in one dictionary; for other names,
    dictionaries and results see :func:`adapt`.

    ``claims``: a target (:data:`CLAIMS`) on-policy, or one per regime. A claim holds where the expected gradient is
    that of the target times one positive coefficient (your beta). ``near_only``: losses that clamp claim it near the
    reference only. ``seed``: of the policies drawn beside the fixed ones. ``beta``: what the coefficient must be, so
    that a beta that is applied twice, or not at all, is found.

    A value or gradient that is not finite, and masked tokens that enter the loss, are problems of the report.

    Raises :class:`UserError` for a wrong name, parameter or shape, and for a loss that raises, mixes completions,
    changes its arguments or from call to call, or depends on the padding.
    """
    claim_by_regime = _checked_claims(claims, regimes, masked_tokens)
    loss = Loss(caller(loss_fn), leaves_masked_out=masked_tokens == "left_out")
    holes_seed = seed if masked_tokens != "absent" else None

    findings: list[Finding] = []
    # A dict, so that a problem of two regimes is reported once and the order stays.
    problems = dict[str, bool]()
    policies: list[BatteryInstance] = []
    for regime in dict.fromkeys((*regimes, *claim_by_regime)):
        policies = _policies(regime, seed, dialogues=masked_tokens != "absent")
        batches = [Batch.of(policy, holes_seed, number=number) for number, policy in enumerate(policies)]
        if loss.reduction is None:
            loss.measure_reduction([batch for batch, policy in zip(batches, policies, strict=True) if policy.near])
        results = [result_of(loss, batch, policy) for batch, policy in zip(batches, policies, strict=True)]
        # A loss that clamps may overflow far from the reference, where it claims nothing.
        claimed_here = [result for result in results if result.policy.near or not near_only]
        problems |= problems_of(
            loss, claimed_here, seed, has_problems=bool(problems), is_first=not findings, near_only=near_only
        )
        finding = Results(results).finding(regime, claim_by_regime.get(regime), beta)
        findings.append(_explained(finding, loss, results, holes_seed, near_only=near_only))
    problem_example = ""
    if problems:
        # The batch of the first problem, unless that one needs a prompt and another does not.
        problem_example = example_of_problems(loss, holes_seed, has_prompt=all(problems.values()))
    return Report(
        findings=tuple(findings),
        near_only=near_only,
        covered=_covered(policies, seed, holes=holes_seed is not None),
        reduction=loss.reduction.words if loss.reduction is not None else "",
        problems=tuple(problems),
        problem_example=problem_example,
    )


def _checked_claims(claims: str | Mapping[str, str], regimes: Sequence[str], masked_tokens: str) -> Mapping[str, str]:
    """The claim by regime. Raises :class:`UserError` for a wrong name, before the enumeration takes its seconds."""
    if isinstance(claims, str):
        claims = {"on_policy": claims}
    _check_names("regimes", (*claims, *regimes), REGIMES)
    _check_names("claims", claims.values(), CLAIMS)
    _check_names("masked_tokens", (masked_tokens,), MASKED_TOKENS)
    return claims


def _check_names(key: str, names: Iterable[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            raise bad_value(key, name, allowed)


def _policies(regime: str, seed: int, *, dialogues: bool) -> list[BatteryInstance]:
    """The fixed policies that share parameters among prefixes, then those that the seed draws.

    ``dialogues``: also those in which an environment writes a part of the tokens.
    """
    policies = []
    for policy in battery(regime):
        is_dialogue = policy.instance.environment is not None
        if policy.instance.features_NVD is not None and (dialogues or not is_dialogue):
            policies.append(policy)
    for setting in drawn_settings(seed):
        sharing = dataclasses.replace(setting, parameters=setting.parameters or DRAWN_PARAMETERS)
        policies.append(with_targets(sharing.instance(regime), setting=sharing))
    return policies


def _covered(policies: Sequence[BatteryInstance], seed: int, *, holes: bool) -> str:
    """What was tried, in words: the last line of a report. The policies of one regime stand for those of all."""
    span = coverage(policy.instance for policy in policies)
    covered = (
        f"every completion of {len(policies)} policies per regime, some drawn (seed {seed}); vocabulary "
        f"{span['vocabulary'][0]:g} to {span['vocabulary'][1]:g}, up to {span['steps'][1]:g} tokens, log-ratios from "
        f"{span['log_ratios'][0]:.3g} nats to those of tokens that are impossible under the reference"
    )
    if holes:
        covered += "; masked tokens within the completions, and dialogues in which a tool replies to the policy"
    return covered


def _explained(
    finding: Finding, loss: Loss, results: Sequence[Result], holes_seed: int | None, *, near_only: bool
) -> Finding:
    """The finding with the cause of its failure and the smallest batch that shows it, where its claim fails."""
    if finding.claimed is None or finding.claimed == "none":
        return finding
    target = finding.target
    if near_only:
        target = finding.near_target
    if target == finding.claimed:
        # The direction is right; the size may still not be the beta that was given.
        return dataclasses.replace(finding, cause=beta_cause(finding))
    return dataclasses.replace(
        finding,
        cause=_cause_of_miss(finding, finding.claimed, loss, results),
        example=_example_of_miss(finding.regime, finding.claimed, loss, holes_seed, near_only=near_only),
    )


def _cause_of_miss(finding: Finding, claimed: str, loss: Loss, results: Sequence[Result]) -> str:
    """The mistake that explains why the claimed target is missed; empty where none is known."""
    # Without any gradient there is nothing to repair, and the verdict says why.
    if not finding.reaches_policy:
        return ""
    # A target that is hit near the reference is missed because of a clamp.
    if finding.near_target == claimed:
        return clamp_cause([_slopes_and_ratios(result) for result in results])
    slopes_near = [_slopes(loss, result) for result in results if result.policy.near]
    return cause_of(claimed, finding.near_target, slopes_near)


def _slopes_and_ratios(result: Result) -> tuple[Tensor, Tensor]:
    """The derivatives by the log-probs of the drawn tokens, and the log-ratios to the reference, ``[B, T]``."""
    rows = result.batch.rows
    columns = token_columns(result.batch.step_T)
    tensors = result.batch.tensors
    log_ratio_BT = (tensors["logp"] - tensors["ref_logp"]).detach()[:, columns]
    # A token of an environment has no gradient by right, as the padding.
    log_ratio_BT = torch.where(result.batch.trained_BT, log_ratio_BT, 0.0)
    slope_BT = result.slope_BTV.gather(-1, rows.token_BT[..., None])[..., 0]
    return slope_BT, log_ratio_BT


def _example_of_miss(regime: str, claimed: str, loss: Loss, holes_seed: int | None, *, near_only: bool) -> str:
    """The smallest batch on which the claimed target is missed, as text; empty where no small policy shows it.

    It has masked tokens within completions only where the loss is right without.
    """
    # `smallest_miss` looks for a multiple of the target's gradient: zero has none, and a divergence is no target of
    # the small policies.
    if claimed not in TARGETS or claimed == "zero":
        return ""

    for seed_or_none in dict.fromkeys((None, holes_seed)):

        def measure(policy: BatteryInstance, holes_seed: int | None = seed_or_none) -> Measured:
            result = result_of(loss, Batch.of(policy, holes_seed), policy)
            return Measured(
                tensors=result.batch.tensors,
                weight_B=result.batch.weight_B,
                value=result.returned.detach(),
                gradient_D=result.moments.gradient_D,
                tolerance=result.tolerance,
            )

        try:
            example = smallest_miss(measure, regime, claimed, near_only=near_only)
        except UserError:
            # The loss takes no vocabulary of two tokens, as a top-k of three does not; the report has the failure.
            return ""
        if example:
            return example
    return ""


def _slopes(loss: Loss, result: Result) -> Slopes:
    """The loss on one policy as the search for a cause reads it: without the columns of holes."""
    batch = result.batch
    columns = token_columns(batch.step_T)
    mask_BT = batch.trained_BT
    all_mask_BT = batch.tensors["mask"]
    attention_BT = batch.tensors["attention_mask"]
    logp_BT = batch.tensors["logp"].detach()[:, columns]
    ratio_BT = logp_BT - batch.tensors["behaviour_logp"][:, columns]
    ref_ratio_BT = logp_BT - batch.tensors["ref_logp"][:, columns]
    value_BT = loss.value_of_tokens(batch, result.returned.detach())
    if value_BT is not None:
        value_BT = torch.where(mask_BT, value_BT.double()[:, columns], 0.0)
    swapped_BTV = None
    swapped_B = loss.with_swapped_arguments(batch)
    if swapped_B is not None:
        swapped_BTV = torch.where(mask_BT[..., None], slope_of(swapped_B, batch)[:, columns], 0.0)
    reads_reference = True
    other_reference_B = loss.with_other_reference(batch)
    if other_reference_B is not None:
        other_slope_BTV = slope_of(other_reference_B, batch)[:, columns]
        reads_reference = not torch.equal(torch.where(mask_BT[..., None], other_slope_BTV, 0.0), result.slope_BTV)
    return Slopes(
        policy=result.policy,
        prefix_BT=batch.rows.prefix_BT,
        token_BT=batch.rows.token_BT,
        mask_BT=mask_BT,
        weight_B=batch.weight_B,
        slope_BTV=result.slope_BTV,
        value_BT=value_BT,
        swapped_BTV=swapped_BTV,
        log_ratio_BT=torch.where(mask_BT, ratio_BT, 0.0),
        ref_log_ratio_BT=torch.where(mask_BT, ref_ratio_BT, 0.0),
        logp_BT=torch.where(mask_BT, logp_BT, 0.0),
        reads_reference=reads_reference,
        parts_BT={words: part(all_mask_BT, attention_BT)[:, columns] for words, part in OF_THE_MASK.items()},
        turn_length_BT=turn_lengths(all_mask_BT)[:, columns],
        attended_B=attention_BT.sum(-1),
        span_B=(all_mask_BT * torch.arange(1, all_mask_BT.shape[1] + 1)).amax(-1),
        tolerance=result.tolerance,
    )
