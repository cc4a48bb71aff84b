"""Conformance: what any trainer's KL loss optimizes, by enumeration in float64, as a test for its CI.

    loss_fn + every completion of small policies -> expected gradient -> compared with targets -> Report

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.conformance.arguments import ARGUMENTS, adapt, caller
from kl_comedy.conformance.causes import Slopes, cause_of
from kl_comedy.conformance.smallest import Measured, batch_lines, small_policy, smallest_miss
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.claims import REGIMES, TARGET_MEANINGS, TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance, battery, with_targets
from kl_comedy.kl.oracle.divergences import DIVERGENCE_MEANINGS, DIVERGENCES, divergence_gradient
from kl_comedy.kl.oracle.drawn import TOLERANCE, coverage, drawn_settings
from kl_comedy.kl.oracle.enumeration import Completions
from kl_comedy.kl.oracle.gradients import Moments, ScoreTables

__all__ = ["ARGUMENTS", "CLAIMS", "REDUCTIONS", "Finding", "Report", "adapt", "check"]

REDUCTIONS = ("sum", "token_mean")
CLAIMS = (*TARGETS, *DIVERGENCES, "none")
"""What a loss may be said to optimize."""
TOLERANCE32 = 1e-3
"""Error up to which a loss that computes in float32 hits a target."""
DRAWN_PARAMETERS = 6
"""Parameters of a drawn policy that would have one for each prefix and token. A loss for language models is tried on
policies that share parameters among prefixes, as a language model does."""


MEANINGS = {**TARGET_MEANINGS, **DIVERGENCE_MEANINGS}
COEFFICIENT_TOLERANCE = 1e-3
"""Relative difference between a coefficient and the beta that it must be: betas are written with few digits."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the loss optimizes in one regime.

    ``claimed``: the target that the loss is said to have, None without a claim.
    ``target``: the target whose gradient, times ``coefficient``, equals the expected gradient on every policy.
    ``near_target``: the same on the policies near the reference. Both are None where no target fits.
    ``nearest``: the target whose gradient has the largest absolute ``cosine`` with the expected gradient.
    ``reaches_policy``: whether any completion has a gradient.
    ``missed_in``: a policy on which ``near_target`` is missed, in words; empty where there is none.
    ``cause``: the mistake that explains a claim that fails; empty where no known mistake does.
    ``example``: the smallest batch on which the claim fails, as text.
    ``expected_coefficient``: the beta that ``coefficient`` must be; None where any is right.
    """

    regime: str
    claimed: str | None
    target: str | None
    near_target: str | None
    coefficient: float | None
    nearest: str
    cosine: float
    reaches_policy: bool
    missed_in: str
    cause: str = ""
    example: str = ""
    expected_coefficient: float | None = None

    def __str__(self) -> str:
        text = f"{self.regime}: {self._verdict()}"
        if self.cause:
            text += f"; {self.cause}"
        if self.claimed:
            text += f" [claimed: {self.claimed}]"
        return text

    @property
    def has_expected_coefficient(self) -> bool:
        """Whether the coefficient is the beta that was given to :func:`check`, or none was given."""
        if self.expected_coefficient is None or self.coefficient is None:
            return True
        return math.isclose(self.coefficient, self.expected_coefficient, rel_tol=COEFFICIENT_TOLERANCE)

    def _verdict(self) -> str:
        if not self.reaches_policy:
            return "zero: no gradient reaches the policy (no_grad, or a detached value)"
        if self.target == "zero":
            return f"zero: {TARGET_MEANINGS['zero']}"
        if self.target is not None:
            return f"{self.target}, times {self.coefficient:.4g}: {MEANINGS[self.target]}"
        if self.near_target in DIVERGENCES:
            # Its size decides whether arguments are exchanged or a formula is wrong: half a chi-square is k3's.
            return f"{self.near_target}, times {self.coefficient:.4g}: {MEANINGS[self.near_target]}"
        if self.near_target is not None:
            return f"{self.near_target} near the reference only, missed with {self.missed_in}"
        if math.isnan(self.cosine):
            return "none: its expected gradient is not finite"
        return f"none: nearest to {self.nearest}, cosine {self.cosine:.2f}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of :func:`check`, one per regime.

    ``near_only``: claims are about policies near the reference. ``covered``: the policies that were tried, in words.
    ``problems``: what is wrong whatever the loss claims. ``problem_example``: the smallest batch that shows the first.
    """

    findings: tuple[Finding, ...]
    near_only: bool
    covered: str
    problems: tuple[str, ...] = ()
    problem_example: str = ""

    @property
    def example(self) -> str:
        """The smallest batches that show the problems and the first claim that fails; empty where all is well."""
        examples = [self.problem_example]
        for finding in self.findings:
            if not self._holds(finding) and finding.example:
                examples.append(finding.example)
                break
        return "\n".join(example for example in examples if example)

    @property
    def ok(self) -> bool:
        """Whether every claim holds and there is no problem."""
        claims_hold = all(self._holds(finding) for finding in self.findings)
        return claims_hold and not self.problems

    def assert_ok(self) -> None:
        """Raise AssertionError with the report unless every claim holds."""
        if not self.ok:
            raise AssertionError(f"the KL loss does not optimize what it claims\n{self}")

    def _holds(self, finding: Finding) -> bool:
        if finding.claimed is None:
            return True
        target = finding.target
        if self.near_only:
            target = finding.near_target
        # Beside the targets of KL terms, whoever claims none means any other divergence too.
        if target is None or (target in DIVERGENCES and finding.claimed == "none"):
            target = "none"
        return finding.claimed == target and finding.has_expected_coefficient

    def __str__(self) -> str:
        lines = []
        for finding in self.findings:
            mark = "FAILED"
            if self._holds(finding):
                mark = "ok    "
            lines.append(f"{mark} {finding}")
        for problem in self.problems:
            lines.append(f"FAILED {problem}")
        if self.example:
            lines.append(self.example)
        lines.append(f"checked: {self.covered}")
        return "\n".join(lines)


def check(
    loss_fn: Callable[..., Tensor],
    *,
    claims: str | Mapping[str, str],
    reduction: str = "sum",
    near_only: bool = False,
    regimes: Sequence[str] = REGIMES,
    seed: int = 0,
    holes: bool = True,
    beta: float | None = None,
) -> Report:
    """What ``loss_fn`` optimizes on-policy, off-policy and with mixed policy versions, against what it claims.

    ``loss_fn`` (a function or a module) is called with those of these tensors that its parameters name: ``logp``,
    ``ref_logp``, ``behaviour_logp`` (log-probs of the tokens in nats, ``[B, T]``, zero in the padding), ``mask`` (bool
    ``[B, T]``), ``tokens`` (ids ``[B, T]``), ``logp_full``, ``ref_logp_full`` (``[B, T, V]``). It returns what is to be
    minimized: ``[B, T]`` or ``[B]``, summed over the mask, or a scalar, for which it is called once per completion.
    With ``reduction="token_mean"`` the scalar is a mean over the mask, which is undone. (A mean per completion weights
    a completion by 1 / length, which no KL does.)

    With ``holes``, masked tokens stand within a completion, as a tool's reply does: they have log-probs, which must not
    enter the loss.

    Names that trainers use (``ref_per_token_logps``, ``response_mask``) are known, and a parameter ``batch`` gets all
    in one dictionary; for other names, dictionaries and results see :func:`adapt`.

    ``claims``: a target (:data:`CLAIMS`) on-policy, or one per regime. A claim holds
    where the expected gradient is that of the target times one positive coefficient (your beta). ``near_only``: losses
    that clamp claim it near the reference only. ``seed``: of the policies drawn beside the fixed ones. ``beta``: what
    the coefficient must be, so that a beta that is applied twice, or not at all, is found.

    A value or gradient that is not finite, and masked tokens that enter the loss, are problems of the report.

    Raises :class:`UserError` for a wrong name, parameter or shape, and for a loss that raises, mixes completions,
    changes its arguments or from call to call, or depends on the padding.
    """
    if isinstance(claims, str):
        claims = {"on_policy": claims}
    # All names first: the enumeration takes seconds.
    _check_names("regimes", (*claims, *regimes), REGIMES)
    _check_names("claims", claims.values(), CLAIMS)
    _check_names("reduction", (reduction,), REDUCTIONS)
    loss = _Loss(caller(loss_fn), reduction)
    holes_seed = None
    if holes:
        holes_seed = seed

    findings: list[Finding] = []
    # A dict, so that a problem of two regimes is reported once and the order stays.
    problems = dict[str, None]()
    policies: list[BatteryInstance] = []
    for regime in dict.fromkeys((*regimes, *claims)):
        policies = _policies(regime, seed)
        results = [_result(loss, _Batch.of(policy, holes_seed), policy) for policy in policies]
        # A loss that clamps may overflow far from the reference, where it claims nothing.
        claimed_here = [result for result in results if result.policy.near or not near_only]
        problems |= _problems(loss, claimed_here, seed, has_problems=bool(problems), is_first=not findings)
        finding = _Results(results).finding(regime, claims.get(regime))
        finding = dataclasses.replace(finding, expected_coefficient=beta)
        findings.append(_explained(finding, loss, results, near_only=near_only))
    problem_example = ""
    if problems:
        problem_example = _problem_example(loss, holes_seed)
    return Report(
        findings=tuple(findings),
        near_only=near_only,
        covered=_covered(policies, seed, holes=holes),
        problems=tuple(problems),
        problem_example=problem_example,
    )


def _problems(
    loss: _Loss, results: Sequence[_Result], seed: int, *, has_problems: bool, is_first: bool
) -> dict[str, None]:
    """What is wrong in a regime whatever the loss claims. ``has_problems``: an earlier regime had some.

    ``is_first``: the regime is the first; dtypes are tried in that one alone.
    """
    problems = dict[str, None]()
    for result in results:
        # One place is enough: where one value is not finite, many are.
        if not has_problems and not problems:
            problems |= dict.fromkeys(_not_finite(loss, result.batch))
    # One policy is enough for the others: they are mistakes of the loss's code, and show on any log-probs.
    first = results[0]
    if is_first and not problems:
        problems |= dict.fromkeys(_dtype_problems(loss, first.batch))
    problems |= dict.fromkeys(_leaks(loss, first.batch, first.policy, seed))
    return problems


def _check_names(key: str, names: Iterable[str], allowed: Sequence[str]) -> None:
    for name in names:
        if name not in allowed:
            raise bad_value(key, name, allowed)


def _policies(regime: str, seed: int) -> list[BatteryInstance]:
    """The fixed policies that share parameters among prefixes, then those that the seed draws."""
    policies = [policy for policy in battery(regime) if policy.instance.features_NVD is not None]
    for setting in drawn_settings(seed):
        sharing = dataclasses.replace(setting, parameters=setting.parameters or DRAWN_PARAMETERS)
        policies.append(with_targets(sharing.instance(regime), setting=sharing))
    return policies


def _covered(policies: Sequence[BatteryInstance], seed: int, *, holes: bool) -> str:
    span = coverage(policy.instance for policy in policies)
    covered = (
        f"every completion of {len(policies)} policies per regime, some drawn (seed {seed}); vocabulary "
        f"{span['vocabulary'][0]:g} to {span['vocabulary'][1]:g}, up to {span['steps'][1]:g} tokens, log-ratios from "
        f"{span['log_ratios'][0]:.3g} nats to those of tokens that are impossible under the reference"
    )
    if holes:
        covered += "; masked tokens within the completions"
    return covered


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The expected gradient of the loss for one policy, and the tolerance of its comparison with a target.

    ``slope_BTV``: the derivatives of the losses by the log-probs of the completions' tokens, without those of holes.
    """

    policy: BatteryInstance
    batch: _Batch
    returned: Tensor
    slope_BTV: Tensor
    moments: Moments
    tolerance: float

    def target(self, name: str) -> Tensor:
        """The gradient ``[D]`` of a target."""
        if name in DIVERGENCES:
            return divergence_gradient(self.policy.instance, name)
        return self.policy.targets[name]


def _explained(finding: Finding, loss: _Loss, results: Sequence[_Result], *, near_only: bool) -> Finding:
    """The finding with the cause of its failure and the smallest batch that shows it, where its claim fails."""
    hit = finding.target
    if near_only:
        hit = finding.near_target
    if finding.claimed is None or finding.claimed == "none":
        return finding
    if finding.claimed == hit:
        return dataclasses.replace(finding, cause=_beta_cause(finding))
    measured = [_slopes(loss, result) for result in results if result.policy.near]
    cause = ""
    # A target that is hit near the reference is missed because of a clamp, and the verdict says where.
    if finding.near_target != finding.claimed and finding.reaches_policy:
        cause = cause_of(finding.claimed, finding.near_target, measured)

    def measure(policy: BatteryInstance) -> Measured:
        result = _result(loss, _Batch.of(policy, None), policy)
        return Measured(
            tensors=result.batch.tensors,
            weight_B=result.batch.weight_B,
            value=result.returned.detach(),
            gradient_D=result.moments.gradient_D,
            tolerance=result.tolerance,
        )

    example = ""
    if finding.claimed in TARGETS and finding.claimed != "zero":
        try:
            example = smallest_miss(measure, finding.regime, finding.claimed)
        except UserError:
            example = ""  # it takes no vocabulary of two tokens; the failure itself is in the report
    return dataclasses.replace(finding, cause=cause, example=example)


def _beta_cause(finding: Finding) -> str:
    """Why the coefficient is not the beta that was given; empty where it is."""
    if finding.has_expected_coefficient:
        return ""
    beta = finding.expected_coefficient
    coefficient = finding.coefficient
    assert beta is not None and coefficient is not None  # otherwise the coefficient is as expected
    if math.isclose(coefficient, beta**2, rel_tol=COEFFICIENT_TOLERANCE):
        return f"beta is applied twice: the coefficient is {coefficient:.4g} and not {beta:.4g}"
    if math.isclose(coefficient, 1.0, rel_tol=COEFFICIENT_TOLERANCE):
        return f"beta is not applied: the coefficient is 1 and not {beta:.4g}"
    return f"the coefficient is {coefficient:.4g} and not beta, {beta:.4g} ({coefficient / beta:.4g} times)"


def _slopes(loss: _Loss, result: _Result) -> Slopes:
    """What the search for a cause reads."""
    batch = result.batch
    columns = _token_columns(batch.step_T)
    mask_BT = result.batch.rows.mask_BT
    ratio_BT = (batch.tensors["logp"] - batch.tensors["behaviour_logp"]).detach()[:, columns]
    value_BT = loss.value_of_tokens(batch, result.returned.detach())
    if value_BT is not None:
        value_BT = torch.where(mask_BT, value_BT.double()[:, columns], 0.0)
    swapped_BTV = None
    swapped_B = loss.with_swapped_arguments(batch)
    if swapped_B is not None:
        swapped_BTV = torch.where(mask_BT[..., None], _slope(swapped_B, batch)[:, columns], 0.0)
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
        tolerance=result.tolerance,
    )


def _problem_example(loss: _Loss, holes_seed: int | None) -> str:
    """The completions of two tokens, as a loss with a problem saw them."""
    policy = small_policy("on_policy", 2, 2)
    batch = _Batch.of(policy, holes_seed)
    try:
        _, returned = loss(batch)
    except UserError:
        return ""  # it takes no vocabulary of two tokens; the problem itself is in the report
    lines = ["smallest batch with masked tokens (on_policy, completions of at most 2 tokens):"]
    if holes_seed is None:
        lines = ["smallest batch (on_policy, completions of at most 2 tokens):"]
    lines += batch_lines(batch.tensors, returned.detach())
    return "\n".join(lines)


class _Results:
    """The results of one regime: which targets they are the gradient of."""

    def __init__(self, results: Sequence[_Result]) -> None:
        self._results = results
        self._near = [result for result in results if result.policy.near]
        # One coefficient for all policies: a loss that needs another one for each optimizes no target.
        first = self._near[0]
        self._coefficients = {name: first.moments.strength(first.target(name)) for name in (*TARGETS, *DIVERGENCES)}

    def finding(self, regime: str, claimed: str | None) -> Finding:
        target = self._target(claimed, self._results)
        near_target = self._target(claimed, self._near)
        coefficient = None
        if near_target is not None:
            coefficient = self._coefficients[near_target]
        if target is not None:
            coefficient = self._coefficients[target]
        missed_in = ""
        if near_target is not None:
            missed_in = self._first_miss(near_target)
        # The zero target has no direction.
        cosines = {name: self._mean_cosine(name) for name in TARGETS if name != "zero"}
        nearest = max(cosines, key=lambda name: abs(cosines[name]))
        return Finding(
            regime=regime,
            claimed=claimed,
            target=target,
            near_target=near_target,
            coefficient=coefficient,
            nearest=nearest,
            cosine=cosines[nearest],
            reaches_policy=any(result.moments.mean_norm != 0 for result in self._results),
            missed_in=missed_in,
        )

    def _target(self, claimed: str | None, results: Sequence[_Result]) -> str | None:
        """The target that all ``results`` hit; the claimed one where several do. None where none does."""
        # Zero first: where it is hit, a positive coefficient of another target is rounding. A negative coefficient
        # would be a loss that drives the policy away from the reference.
        candidates = ["zero"]
        candidates += [name for name in (*TARGETS, *DIVERGENCES) if self._coefficients[name] > 0]
        hit_by_all = [name for name in candidates if all(self._hits(name, result) for result in results)]
        if not hit_by_all:
            return None
        # Several targets may have the same gradient in a regime; the claim then decides how it is called.
        if claimed in hit_by_all and "zero" not in hit_by_all:
            return claimed
        return hit_by_all[0]

    def _hits(self, target: str, result: _Result) -> bool:
        return result.moments.equals(self._coefficients[target] * result.target(target), result.tolerance)

    def _first_miss(self, target: str) -> str:
        for result in self._results:
            if not self._hits(target, result):
                return str(result.policy.setting or "log-ratios of several nats, or 8 tokens")
        return ""

    def _mean_cosine(self, target: str) -> float:
        """Over the policies near the reference, where losses that clamp are themselves."""
        cosines = [result.moments.cosine(result.policy.targets[target]) for result in self._near]
        return sum(cosines) / len(cosines)


HOLES = {1: 2, 2: 1}
"""After how many tokens of a completion, how many masked ones stand, where the completion continues."""
REDRAWN_SEED = 500
"""Added to a column's seed for other log-probs in the same hole; larger than any number of columns."""
DTYPES = (torch.float32, torch.bfloat16)
"""What log-probs are in training."""
LARGEST_RATIO = 500.0
"""Log-ratios (nats) up to which values must be finite; those of impossible tokens are beyond."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The tensors for a loss: every completion that the sampler can draw, with its probability ``weight_B``.

    ``T`` counts the masked tokens within a completion too. ``step_T``: which token of the completion a column holds,
    -1 in a hole. ``full_BTV`` is the leaf that gradients are taken by: the policy's log-probs.
    """

    rows: Completions
    weight_B: Tensor
    step_T: list[int]
    full_BTV: Tensor
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, policy: BatteryInstance, holes_seed: int | None, redrawn: int | None = None) -> _Batch:
        """Every completion. ``holes_seed``: of the log-probs in the holes; None for a batch without holes.

        ``redrawn``: a column in a hole that gets other log-probs than the seed alone would give.
        """
        instance = policy.instance
        tree = instance.tree
        weight_B = instance.probability(tree.all)
        rows = tree.all.select(weight_B > 0)
        weight_B = weight_B[weight_B > 0]

        step_T: list[int] = []
        for step in range(tree.length):
            if holes_seed is not None:
                step_T += [-1] * HOLES.get(step, 0)
            step_T.append(step)
        columns = _token_columns(step_T)

        shape = (len(weight_B), len(step_T))
        inside_BT = torch.zeros(shape, dtype=torch.bool)
        inside_BT[:, columns] = rows.mask_BT
        token_BT = torch.zeros(shape, dtype=torch.long)
        token_BT[:, columns] = rows.token_BT
        # Policy, reference and what the sampler recorded.
        logp_3BTV = torch.zeros(3, *shape, tree.vocabulary, dtype=torch.float64)
        tables = (instance.policy_logp(), instance.ref_logp_NV, instance.recorded_logp_NV)
        for number, table_NV in enumerate(tables):
            logp_3BTV[number][:, columns] = table_NV[rows.prefix_BT]

        has_logp_BT = inside_BT.clone()
        for column, step in enumerate(step_T):
            if step >= 0 or holes_seed is None:
                continue
            # A hole stands within a completion; behind the end of a completion is padding.
            continues_B = inside_BT[:, column:].any(-1)
            column_seed = holes_seed * 1000 + column
            if column == redrawn:
                column_seed += REDRAWN_SEED
            drawn_3BV = _drawn_logp(column_seed, completions=len(rows.mask_BT), vocabulary=tree.vocabulary)
            logp_3BTV[:, continues_B, column] = drawn_3BV[:, continues_B]
            has_logp_BT[:, column] = continues_B

        def of_tokens(logp_BTV: Tensor) -> Tensor:
            token_logp_BT = logp_BTV.gather(-1, token_BT[..., None])[..., 0]
            return torch.where(has_logp_BT, token_logp_BT, 0.0)

        full_BTV = logp_3BTV[0].clone().requires_grad_(True)
        # Not a leaf, as in a trainer: torch refuses to change a leaf in place, and would hide that the loss tries to.
        policy_BTV = full_BTV * 1.0
        tensors = {
            "logp": of_tokens(policy_BTV),
            "ref_logp": of_tokens(logp_3BTV[1]),
            "behaviour_logp": of_tokens(logp_3BTV[2]),
            "mask": inside_BT,
            "tokens": token_BT,
            "logp_full": policy_BTV,
            "ref_logp_full": logp_3BTV[1],
        }
        return cls(rows=rows, weight_B=weight_B, step_T=step_T, full_BTV=full_BTV, tensors=tensors)


def _drawn_logp(seed: int, *, completions: int, vocabulary: int) -> Tensor:
    """Log-probs ``[3, B, V]`` of policy, reference and sampler that are as far apart as policies in training."""
    generator = torch.Generator().manual_seed(seed)
    logits_3BV = torch.randn(3, completions, vocabulary, generator=generator, dtype=torch.float64)
    return (1.5 * logits_3BV).log_softmax(-1)


def _token_columns(step_T: Sequence[int]) -> list[int]:
    """The columns that hold tokens of completions, in the order of the tokens."""
    return [column for column, step in enumerate(step_T) if step >= 0]


class _Loss:
    """The loss of each completion of a batch, with checks that it is deterministic and of that completion alone."""

    def __init__(self, call: Callable[[Mapping[str, Tensor]], Any], reduction: str) -> None:
        self.call = call
        self.reduction = reduction

    def __call__(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[B]``, and what was returned, unreduced. Raises :class:`UserError`; see :func:`check`."""
        mask_BT = batch.tensors["mask"]
        count = len(mask_BT)
        first = self._value(batch, slice(0, 1))
        again = self._value(batch, slice(0, 1))
        # nan_to_num, because NaN differs from itself; a NaN is reported as a problem, not as a random loss.
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise UserError(
                "loss_fn: the loss changes from call to call (dropout, noise, a running mean); switch it off"
            )
        if first.dim() == 0:
            self._check_padding(batch)
            # A scalar does not say which completion it is of: each is computed alone.
            values = [self._value(batch, slice(row, row + 1)) for row in range(count)]
            loss_B = torch.stack(values)
            if self.reduction == "token_mean":
                loss_B = loss_B * mask_BT.sum(-1)
            return loss_B, loss_B
        returned = self._value(batch, slice(0, count))
        together_B = self._summed(returned, mask_BT)
        relative, absolute = _rounding_of(together_B)
        first_B = self._summed(first, mask_BT[:1])
        if not torch.allclose(first_B, together_B[:1], rtol=relative, atol=absolute, equal_nan=True):
            raise UserError(
                "loss_fn: the loss of a completion changes with the others in its batch; return it unreduced"
            )
        self._check_padding(batch)
        return together_B, returned

    def with_all_masked(self, batch: _Batch) -> Tensor:
        """The value for two completions, of which the first has no token in the mask."""
        mask_BT = batch.tensors["mask"].clone()
        mask_BT[0] = False
        masked = dataclasses.replace(batch, tensors={**batch.tensors, "mask": mask_BT})
        return self._value(masked, slice(0, 2)).detach()

    def value_of_tokens(self, batch: _Batch, returned: Tensor) -> Tensor | None:
        """The value of each token ``[B, T]``; None where the loss of a completion is not a sum over its tokens.

        A loss that does not return it is called with a mask of one token at a time.
        """
        if returned.dim() == 2:
            return returned
        mask_BT = batch.tensors["mask"]
        value_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
        for column in _token_columns(batch.step_T):
            alone_BT = torch.zeros_like(mask_BT)
            alone_BT[:, column] = mask_BT[:, column]
            one_token = dataclasses.replace(batch, tensors={**batch.tensors, "mask": alone_BT})
            for row in alone_BT[:, column].nonzero()[:, 0].tolist():
                value = self._value(one_token, slice(row, row + 1))
                value_BT[row, column] = float(self._summed(value.detach(), alone_BT[row : row + 1]))
        if not torch.allclose(value_BT.sum(-1), returned.double(), rtol=1e-4, atol=1e-6):
            return None
        return value_BT

    def with_swapped_arguments(self, batch: _Batch) -> Tensor | None:
        """The losses ``[B]`` with policy and reference exchanged; None where the loss cannot be called so."""
        tensors = dict(batch.tensors)
        for policy_name, ref_name in (("logp", "ref_logp"), ("logp_full", "ref_logp_full")):
            tensors[policy_name] = batch.tensors[ref_name]
            tensors[ref_name] = batch.tensors[policy_name]
        try:
            swapped_B, _ = self(dataclasses.replace(batch, tensors=tensors))
        except UserError:
            return None
        return swapped_B

    def _value(self, batch: _Batch, rows: slice, columns: slice = slice(None)) -> Tensor:
        given = {name: tensor[rows, columns] for name, tensor in batch.tensors.items()}
        # A loss that writes into its arguments would change what the later calls of this check are given.
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        value = self.call(given)
        for name, tensor in given.items():
            if not torch.equal(tensor.detach(), before[name]):
                raise UserError(f"loss_fn: it changes its argument {name} in place; work on a copy")
        allowed = "a tensor [B, T], [B], or a scalar"
        if not isinstance(value, Tensor):
            raise bad_value("loss_fn", type(value).__name__, allowed, "what it returns")
        shape_BT = given["mask"].shape
        if value.shape not in ((), shape_BT[:1], shape_BT):
            raise bad_value("loss_fn", tuple(value.shape), allowed, "what it returns")
        return value

    @staticmethod
    def _summed(value: Tensor, mask_BT: Tensor) -> Tensor:
        """A value ``[B, T]`` summed over the mask; others as they are."""
        if value.dim() != 2:
            return value
        # Not a product with the mask: inf * 0 would be NaN.
        return torch.where(mask_BT, value, 0.0).sum(-1)

    def _check_padding(self, batch: _Batch) -> None:
        """Raise :class:`UserError` where the padding behind a completion changes its loss."""
        mask_BT = batch.tensors["mask"]
        # The last column of the mask counts, not the number of tokens: holes stand in between.
        length_B = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).amax(-1)
        row = int(length_B.argmin())
        length = int(length_B[row])
        rows = slice(row, row + 1)
        columns = slice(0, length)
        padded = self._summed(self._value(batch, rows), mask_BT[rows]).detach().reshape(-1)
        cut_off = self._summed(self._value(batch, rows, columns), mask_BT[rows, columns]).detach().reshape(-1)
        relative, absolute = _rounding_of(padded)
        agree = torch.allclose(cut_off, padded, rtol=relative, atol=absolute, equal_nan=True)
        # A value that is not finite is a problem of its own, which the report names.
        if not agree and bool(padded.isfinite().all()):
            raise UserError(
                f"loss_fn: the loss depends on the padding: with {length} tokens it is {float(cut_off):.4g} in "
                f"{length} columns and {float(padded):.4g} in {mask_BT.shape[1]}; multiply by the mask, and divide by "
                "its tokens"
            )


def _rounding_of(value: Tensor) -> tuple[float, float]:
    """The relative and the absolute difference that sums in another order may have, by the dtype."""
    if value.dtype in (torch.bfloat16, torch.float16):
        return 0.1, 0.05
    return 1e-4, 1e-6


def _slope(loss_B: Tensor, batch: _Batch) -> Tensor:
    """The derivative of the losses by all log-probs, ``[B, T, V]``."""
    if not loss_B.requires_grad:
        return torch.zeros_like(batch.full_BTV)
    # A completion's loss reads its own log-probs alone, so the gradient of the sum holds that of each.
    total = loss_B.double().sum()
    (slope_BTV,) = torch.autograd.grad(
        total, batch.full_BTV, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return slope_BTV


def _result(loss: _Loss, batch: _Batch, policy: BatteryInstance) -> _Result:
    """The expected gradient over all completions; a loss in float32 has the wider tolerance."""
    instance = policy.instance
    rows = batch.rows
    assert instance.features_NVD is not None
    loss_B, returned = loss(batch)
    # Gradients in holes do not count here; _leaks reports them.
    slope_BTV = _slope(loss_B, batch)[:, _token_columns(batch.step_T)]
    slope_BTV = torch.where(rows.mask_BT[..., None], slope_BTV, 0.0)
    # d loss / d parameters = sum over tokens and vocabulary of d loss / d log-prob times the log-prob's score.
    score_BTVD = ScoreTables(instance, instance.features_NVD).score_NVD[rows.prefix_BT]
    gradient_BD = torch.einsum("btv,btvd->bd", slope_BTV, score_BTVD)
    moments = Moments(
        gradient_D=batch.weight_B @ gradient_BD,
        variance=0.0,  # nothing here reads it
        mean_norm=float(batch.weight_B @ gradient_BD.norm(dim=-1)),
    )
    tolerance = TOLERANCE32
    if loss_B.dtype == torch.float64:
        tolerance = TOLERANCE
    return _Result(
        policy=policy,
        batch=batch,
        returned=returned,
        slope_BTV=slope_BTV,
        moments=moments,
        tolerance=tolerance,
    )


def _dtype_problems(loss: _Loss, batch: _Batch) -> list[str]:
    """What a loss does in the dtypes of training that it does not do in float64, near the reference."""
    loss_B, _ = loss(batch)
    slope_BTV = _slope(loss_B, batch)
    problems = []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        tensors = {}
        for key, tensor in batch.tensors.items():
            tensors[key] = tensor
            if tensor.is_floating_point():
                tensors[key] = tensor.to(dtype)
        try:
            rounded_B, _ = loss(dataclasses.replace(batch, tensors=tensors))
            rounded_slope_BTV = _slope(rounded_B, batch)
        except UserError as error:
            problems.append(f"dtype: in {name}: {error}")
            continue
        if not bool(rounded_B.isfinite().all() and rounded_slope_BTV.isfinite().all()):
            problems.append(f"dtype: in {name} the value or the gradient is not finite, though it is in float64")
            continue
        difference = float((rounded_slope_BTV - slope_BTV).norm())
        # bfloat16 has three digits, and a difference of nearly equal numbers has none: only float32 is compared.
        if dtype == torch.float32 and difference > TOLERANCE32 * float(slope_BTV.norm()):
            problems.append(f"dtype: in {name} the gradient differs from that in float64 by {difference:.2g}")
    return problems


def _not_finite(loss: _Loss, batch: _Batch) -> list[str]:
    """Where value or gradient are not finite, padding and masked tokens included."""
    mask_BT = batch.tensors["mask"]
    ratio_BT = (batch.tensors["logp"] - batch.tensors["ref_logp"]).detach().abs()
    usual_B = (ratio_BT <= LARGEST_RATIO).all(-1)
    if not bool(usual_B.any()):
        return []
    loss_B, returned = loss(batch)
    # Summed over the vocabulary: one number that is not finite makes its token's sum so.
    slope_BT = _slope(loss_B, batch).sum(-1)
    for name, tensor in (("value", returned.detach()), ("gradient", slope_BT)):
        problem = _describe_not_finite(name, tensor, usual_B, mask_BT)
        if problem is not None:
            return [problem]
    # A mean over the mask of one completion that has no token is 0 / 0 by right; a second completion gives it tokens.
    if len(mask_BT) > 1 and not bool(loss.with_all_masked(batch).isfinite().all()):
        return ["finite: the value is not finite where every token of a completion is masked"]
    return []


def _describe_not_finite(name: str, tensor: Tensor, usual_B: Tensor, mask_BT: Tensor) -> str | None:
    """The first completion in which ``tensor`` (``[B]`` or ``[B, T]``) is not finite; None where it is everywhere."""
    bad = ~torch.isfinite(tensor)
    if bad.dim() == 1:
        bad &= usual_B
    else:
        bad &= usual_B[:, None]
    if not bool(bad.any()):
        return None
    row = int(bad.nonzero()[0][0])
    place = ""
    if bad.dim() == 2:
        columns = [int(column) + 1 for column in bad[row].nonzero()[:, 0]]
        place = f" at {_tokens(columns)}"
        if not bool((bad & mask_BT).any()):
            place += ", which the mask leaves out (inf * 0 is nan: use where)"
    return f"finite: the {name} is not finite{place}, with the mask {_mask_text(mask_BT[row])}"


def _leaks(loss: _Loss, batch: _Batch, policy: BatteryInstance, seed: int) -> list[str]:
    """Masked tokens within completions that enter the loss: other log-probs there change value or gradient."""
    holes = [column for column, step in enumerate(batch.step_T) if step < 0]
    if not holes:
        return []
    loss_B, _ = loss(batch)
    slope_BTV = _slope(loss_B, batch)
    mask_BT = batch.tensors["mask"]
    # A loss that does not read the hole gives the same value up to the rounding of its own precision.
    tolerance = 1e-4
    if loss_B.dtype == torch.float64:
        tolerance = 1e-9
    leaking = []
    # Tokens inside the mask whose gradient changes with a masked one.
    touched = set[int]()
    for column in holes:
        redrawn = _Batch.of(policy, seed, redrawn=column)
        redrawn_B, _ = loss(redrawn)
        moved_BT = (_slope(redrawn_B, redrawn) - slope_BTV).abs().amax(-1) * mask_BT
        has_gradient = bool((slope_BTV[:, column].abs() > 0).any())
        moves_gradient = bool((moved_BT > tolerance).any())
        moves_value = bool(((redrawn_B - loss_B).abs() > tolerance).any())
        if has_gradient or moves_gradient or moves_value:
            leaking.append(column + 1)
            touched |= {int(token) + 1 for token in (moved_BT > tolerance).any(0).nonzero()[:, 0]}
    if not leaking:
        return []
    row = int(mask_BT.sum(-1).argmax())
    effect = "change the loss"
    if touched:
        effect += f", and the gradient of {_tokens(sorted(touched))}"
    return [
        f"mask: {_tokens(leaking)}, masked as a tool's reply is (mask {_mask_text(mask_BT[row])}), {effect}: multiply "
        "by the mask before every sum over tokens (take an argument mask if there is none)"
    ]


def _mask_text(mask_T: Tensor) -> str:
    return " ".join(str(int(inside)) for inside in mask_T)


def _tokens(columns: Sequence[int]) -> str:
    numbers = ", ".join(str(column) for column in columns)
    if len(columns) > 1:
        return f"tokens {numbers}"
    return f"token {numbers}"
