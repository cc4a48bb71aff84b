"""Conformance: what somebody's KL loss optimizes, by enumeration in float64, as a test for their CI.

    loss_fn + every completion of small policies -> expected gradient -> compared with targets -> Report

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary, ``D`` parameters, ``N`` prefixes; log-probs in nats.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.kl.claims import REGIMES, TARGET_MEANINGS, TARGETS
from kl_comedy.kl.oracle.certificate import BatteryInstance, battery, with_targets
from kl_comedy.kl.oracle.drawn import TOLERANCE, coverage, drawn_settings
from kl_comedy.kl.oracle.enumeration import Completions
from kl_comedy.kl.oracle.gradients import Moments, ScoreTables

ARGUMENTS = ("logp", "ref_logp", "behaviour_logp", "mask", "tokens", "logp_full", "ref_logp_full")
REDUCTIONS = ("sum", "token_mean")
TOLERANCE32 = 1e-3
"""Error up to which a loss that computes in float32 hits a target."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the loss optimizes in one regime.

    ``target``: whose gradient the expected gradient equals, times ``coefficient``, on every policy; ``near_target``: on
    those near the reference; None where there is none. ``nearest``: the target with the largest ``cosine``.
    ``reaches_policy``: whether any completion has a gradient. ``missed_in``: a policy that misses ``near_target``.
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

    def __str__(self) -> str:
        if not self.reaches_policy:
            words = "zero: no gradient reaches the policy (no_grad, or a detached value)"
        elif self.target is not None:
            times = "" if self.target == "zero" else f", times {self.coefficient:.4g}"
            words = f"{self.target}{times}: {TARGET_MEANINGS[self.target]}"
        elif self.near_target is not None:
            words = f"{self.near_target} near the reference only, missed with {self.missed_in}"
        elif self.cosine != self.cosine:
            words = "none: its expected gradient is not finite"
        else:
            words = f"none: nearest to {self.nearest}, cosine {self.cosine:.2f}"
        return f"{self.regime}: {words}" + (f" [claimed: {self.claimed}]" if self.claimed else "")


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of :func:`check`, and what they cover. ``problems``: what is wrong whatever the loss claims."""

    findings: tuple[Finding, ...]
    near_only: bool
    covered: str
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every claim holds and there is no problem."""
        return not self.problems and all(self._holds(each) for each in self.findings)

    def assert_ok(self) -> None:
        """Raise AssertionError with the report unless every claim holds."""
        if not self.ok:
            raise AssertionError(f"the KL loss does not optimize what it claims\n{self}")

    def _holds(self, finding: Finding) -> bool:
        target = finding.near_target if self.near_only else finding.target
        return finding.claimed in (None, target or "none")

    def __str__(self) -> str:
        rows = [f"{'ok    ' if self._holds(each) else 'FAILED'} {each}" for each in self.findings]
        rows += [f"FAILED {problem}" for problem in self.problems]
        return "\n".join([*rows, f"checked: {self.covered}"])


def check(
    loss_fn: Callable[..., Tensor],
    *,
    claims: str | Mapping[str, str],
    reduction: str = "sum",
    near_only: bool = False,
    regimes: Sequence[str] = REGIMES,
    seed: int = 0,
    holes: bool = True,
) -> Report:
    """What ``loss_fn`` optimizes on-policy, off-policy and with mixed policy versions, against what it claims.

    ``loss_fn`` (a function or a module) is called with those of these tensors that its parameters name: ``logp``,
    ``ref_logp``, ``behaviour_logp`` (log-probs of the tokens, ``[B, T]``, zero in the padding), ``mask`` (bool),
    ``tokens`` (ids), ``logp_full``, ``ref_logp_full`` (``[B, T, V]``). With ``holes``, masked tokens stand within a
    completion, as a tool's reply does: they have log-probs, which must not enter the loss. It returns what is to be
    minimized: ``[B, T]`` or ``[B]``, summed over the mask, or a scalar, for which it is called once per completion;
    ``reduction="token_mean"``: the scalar is a mean over the mask, which is undone. (A mean per completion weights by
    1 / length, which no KL does.)

    ``claims``: a target (:data:`kl_comedy.kl.claims.TARGETS`, or ``none``) on-policy, or one per regime. A claim holds
    where the gradient is that of the target times one positive coefficient (your beta). ``near_only``: losses that
    clamp claim it near the reference only. ``seed``: of the settings drawn beside the fixed policies.

    A value or gradient that is not finite, and masked tokens that enter the loss, are problems of the report.

    Raises :class:`UserError` for a wrong name, parameter or shape, and for a loss that raises, mixes completions,
    changes its arguments or from call to call, or depends on the padding.
    """
    by_regime = {"on_policy": claims} if isinstance(claims, str) else dict(claims)
    values = {"claims": (tuple(by_regime.values()), (*TARGETS, "none")), "reduction": ((reduction,), REDUCTIONS)}
    for key, (given, allowed) in {"regimes": ((*by_regime, *regimes), REGIMES), **values}.items():
        for value in given:
            if value not in allowed:
                raise bad_value(key, value, allowed)
    call = _caller(loss_fn)
    findings, policies, problems = [], list[BatteryInstance](), dict[str, None]()
    for regime in dict.fromkeys((*regimes, *by_regime)):
        shared = [each for each in battery(regime) if each.instance.features_NVD is not None]
        settings = [dataclasses.replace(each, parameters=each.parameters or 6) for each in drawn_settings(seed)]
        policies = [*shared, *(with_targets(each.instance(regime), setting=each) for each in settings)]
        pairs = []
        for each in policies:
            batch = _Batch.of(each, seed if holes else None)
            loss = _Loss(call, reduction)
            pairs.append((each, *_moments(loss, batch, each)))
            # One place is enough: where one value is not finite, many are.
            if not problems and (each.near or not near_only):
                problems |= dict.fromkeys(_not_finite(loss, batch, each))
        first = _Batch.of(policies[0], seed if holes else None)
        problems |= dict.fromkeys(_leaks(_Loss(call, reduction), first, policies[0], seed))
        findings.append(_finding(regime, by_regime.get(regime), pairs))
    span = coverage(each.instance for each in policies)
    covered = (
        f"every completion of {len(policies)} policies per regime, some drawn (seed {seed}); vocabulary "
        f"{span['vocabulary'][0]:g} to {span['vocabulary'][1]:g}, up to {span['steps'][1]:g} tokens, log-ratios from "
        f"{span['log_ratios'][0]:.3g} nats to those of tokens that are impossible under the reference"
    )
    if holes:
        covered += "; masked tokens within the completions"
    return Report(findings=tuple(findings), near_only=near_only, covered=covered, problems=tuple(problems))


def _finding(regime: str, claimed: str | None, results: list[tuple[BatteryInstance, Moments, float]]) -> Finding:
    near = [(each.targets, moments) for each, moments, _ in results if each.near]
    coefficients = {name: near[0][1].strength(near[0][0][name]) for name in TARGETS}

    def misses(target: str, only_near: bool) -> list[str]:
        """The policies in which the gradient is not that of the target times the coefficient."""
        return [
            str(each.setting or "log-ratios of several nats, or 8 tokens")
            for each, moments, tolerance in results
            if (each.near or not only_near)
            and not moments.equals(coefficients[target] * each.targets[target], tolerance)
        ]

    def hit(only_near: bool) -> str | None:
        """Zero first: beside it a positive coefficient is rounding."""
        names = ["zero", *(name for name in TARGETS if coefficients[name] > 0)]
        names = [name for name in names if not misses(name, only_near)]
        return claimed if claimed in names and "zero" not in names else next(iter(names), None)

    near_target, target = hit(True), hit(False)
    cosines = {name: sum(moments.cosine(targets[name]) for targets, moments in near) / len(near) for name in TARGETS}
    nearest = max((name for name in TARGETS if name != "zero"), key=lambda name: abs(cosines[name]))
    return Finding(
        regime=regime,
        claimed=claimed,
        target=target,
        near_target=near_target,
        coefficient=coefficients[target] if target else None,
        nearest=nearest,
        cosine=cosines[nearest],
        reaches_policy=any(moments.mean_norm != 0 for _, moments, _ in results),
        missed_in=next(iter(misses(near_target, False)), "") if near_target else "",
    )


HOLES = ((1, 2), (2, 1))
"""After how many tokens of a completion how many masked ones stand, where the completion goes on."""
LARGEST_RATIO = 500.0
"""Log-ratios (nats) up to which values must be finite; those of impossible tokens are beyond."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The tensors for a loss; ``T`` counts the masked tokens within a completion too.

    ``step_T``: which token of the completion a column holds, -1 in a hole. ``full_BTV`` is the leaf of all log-probs.
    """

    rows: Completions
    weight_B: Tensor
    step_T: list[int]
    full_BTV: Tensor
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, policy: BatteryInstance, holes_seed: int | None, redrawn: int | None = None) -> _Batch:
        """Every completion that the sampler can draw. ``holes_seed``: of the log-probs in the holes, None without any.

        ``redrawn``: the column whose hole has other log-probs.
        """
        instance, tree = policy.instance, policy.instance.tree
        weight_B = instance.probability(tree.all)
        rows, weight_B = tree.all.select(weight_B > 0), weight_B[weight_B > 0]
        step_T: list[int] = []
        holes = dict(HOLES) if holes_seed is not None else {}
        for step in range(tree.length):
            step_T += [-1] * holes.get(step, 0) + [step]
        columns = [step_T.index(step) for step in range(tree.length)]
        shape = (len(weight_B), len(step_T))
        inside_BT = torch.zeros(shape, dtype=torch.bool)
        inside_BT[:, columns] = rows.mask_BT
        token_BT = torch.zeros(shape, dtype=torch.long)
        token_BT[:, columns] = rows.token_BT
        logp_3BTV = torch.zeros(3, *shape, tree.vocabulary, dtype=torch.float64)
        tables = (instance.policy_logp(), instance.ref_logp_NV, instance.recorded_logp_NV)
        for number, table_NV in enumerate(tables):
            logp_3BTV[number][:, columns] = table_NV[rows.prefix_BT]
        shown_BT = inside_BT.clone()
        for column, step in enumerate(step_T):
            if step >= 0:
                continue
            # Where the completion goes on after it; behind its end is padding.
            goes_on_B = inside_BT[:, column:].any(-1)
            drawn_seed = (holes_seed or 0) * 1000 + column + (500 if column == redrawn else 0)
            generator = torch.Generator().manual_seed(drawn_seed)
            logits_3BV = torch.randn(3, shape[0], tree.vocabulary, generator=generator, dtype=torch.float64)
            logp_3BTV[:, goes_on_B, column] = (1.5 * logits_3BV).log_softmax(-1)[:, goes_on_B]
            shown_BT[:, column] = goes_on_B
        full_BTV = logp_3BTV[0].clone().requires_grad_(True)

        def of_tokens(logp_BTV: Tensor) -> Tensor:
            return torch.where(shown_BT, logp_BTV.gather(-1, token_BT[..., None])[..., 0], 0.0)

        given_BTV = full_BTV * 1.0  # no leaf, as in a trainer, where a change in place raises nothing
        tensors = {
            "logp": of_tokens(given_BTV),
            "ref_logp": of_tokens(logp_3BTV[1]),
            "behaviour_logp": of_tokens(logp_3BTV[2]),
            "mask": inside_BT,
            "tokens": token_BT,
            "logp_full": given_BTV,
            "ref_logp_full": logp_3BTV[1],
        }
        return cls(rows=rows, weight_B=weight_B, step_T=step_T, full_BTV=full_BTV, tensors=tensors)


class _Loss:
    """The loss of each completion of a batch, and of each masked token what the loss returned there."""

    def __init__(self, call: Callable[[dict[str, Tensor]], Any], reduction: str) -> None:
        self.call = call
        self.reduction = reduction

    def __call__(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Losses ``[B]``, and what was returned, unreduced. Raises :class:`UserError`; see :func:`check`."""
        mask_BT = batch.tensors["mask"]
        count = len(mask_BT)
        first = self._value(batch, slice(0, 1))
        again = self._value(batch, slice(0, 1))
        if not torch.equal(first.nan_to_num(), again.nan_to_num()):
            raise UserError(
                "loss_fn: the loss changes from call to call (dropout, noise, a running mean); switch it off"
            )
        if first.dim() == 0:
            self._check_padding(batch)
            values = [self._value(batch, slice(row, row + 1)) for row in range(count)]
            loss_B = torch.stack(values)
            if self.reduction == "token_mean":
                loss_B = loss_B * mask_BT.sum(-1)
            return loss_B, loss_B
        returned = self._value(batch, slice(0, count))
        together_B = self._summed(returned, mask_BT)
        first_B = self._summed(first, mask_BT[:1])
        if not torch.allclose(first_B, together_B[:1], rtol=1e-4, atol=1e-6, equal_nan=True):
            raise UserError(
                "loss_fn: the loss of a completion changes with the others in its batch; return it unreduced"
            )
        self._check_padding(batch)
        return together_B, returned

    def with_all_masked(self, batch: _Batch) -> Tensor:
        """What is returned for two completions, of which the first has no token in the mask."""
        mask_BT = batch.tensors["mask"].clone()
        mask_BT[0] = False
        masked = dataclasses.replace(batch, tensors={**batch.tensors, "mask": mask_BT})
        return self._value(masked, slice(0, 2)).detach()

    def _value(self, batch: _Batch, rows: slice, columns: slice = slice(None)) -> Tensor:
        given = {name: tensor[rows, columns] for name, tensor in batch.tensors.items()}
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        value = self.call(given)
        for name, tensor in given.items():
            if not torch.equal(tensor.detach(), before[name]):
                raise UserError(f"loss_fn: it changes its argument {name} in place; work on a copy")
        shape = given["mask"].shape
        if not isinstance(value, Tensor) or value.shape not in ((), shape[:1], shape):
            returned = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise bad_value("loss_fn", returned, "a tensor [B, T], [B], or a scalar", "what it returns")
        return value

    @staticmethod
    def _summed(value: Tensor, mask_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, value, 0.0).sum(-1) if value.dim() == 2 else value

    def _check_padding(self, batch: _Batch) -> None:
        """That a completion has the same loss with and without the padding behind it."""
        mask_BT = batch.tensors["mask"]
        length_B = (mask_BT * torch.arange(1, mask_BT.shape[1] + 1)).amax(-1)
        row = int(length_B.argmin())
        length = int(length_B[row])
        alone, rows = slice(0, length), slice(row, row + 1)
        long = self._summed(self._value(batch, rows), mask_BT[rows]).detach().reshape(-1)
        short = self._summed(self._value(batch, rows, alone), mask_BT[rows, alone]).detach().reshape(-1)
        if not torch.allclose(short, long, rtol=1e-4, atol=1e-6, equal_nan=True) and bool(long.isfinite().all()):
            raise UserError(
                f"loss_fn: the loss depends on the padding: with {length} tokens it is {float(short):.4g} in {length} "
                f"columns and {float(long):.4g} in {mask_BT.shape[1]}; multiply by the mask, and divide by its tokens"
            )


def _slope(loss_B: Tensor, batch: _Batch) -> Tensor:
    """The derivative of the losses by all log-probs, ``[B, T, V]``."""
    if not loss_B.requires_grad:
        return torch.zeros_like(batch.full_BTV)
    total = loss_B.double().sum()
    (slope_BTV,) = torch.autograd.grad(
        total, batch.full_BTV, allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return slope_BTV


def _moments(loss: _Loss, batch: _Batch, policy: BatteryInstance) -> tuple[Moments, float]:
    """The expected gradient over all completions, and the tolerance of its comparison (float32 has a wider one)."""
    instance, rows = policy.instance, batch.rows
    loss_B, _ = loss(batch)
    columns = [batch.step_T.index(step) for step in range(instance.tree.length)]
    slope_BTV = _slope(loss_B, batch)[:, columns]
    assert instance.features_NVD is not None
    score_BTVD = ScoreTables(instance, instance.features_NVD).score_NVD[rows.prefix_BT]
    gradient_BD = torch.einsum("btv,btvd->bd", torch.where(rows.mask_BT[..., None], slope_BTV, 0.0), score_BTVD)
    tolerance = TOLERANCE if loss_B.dtype == torch.float64 else TOLERANCE32
    norm = float(batch.weight_B @ gradient_BD.norm(dim=-1))
    return Moments(gradient_D=batch.weight_B @ gradient_BD, variance=0.0, mean_norm=norm), tolerance


def _not_finite(loss: _Loss, batch: _Batch, policy: BatteryInstance) -> list[str]:
    """Where value or gradient are not finite, padding and masked tokens included."""
    mask_BT = batch.tensors["mask"]
    ratio_BT = (batch.tensors["logp"] - batch.tensors["ref_logp"]).detach().abs()
    usual_B = (ratio_BT <= LARGEST_RATIO).all(-1)
    if not bool(usual_B.any()):
        return []
    loss_B, returned = loss(batch)
    slope_BT = _slope(loss_B, batch).sum(-1)
    subjects = {"value": returned.detach(), "gradient": slope_BT}
    problems = []
    for what, figure in subjects.items():
        bad = ~torch.isfinite(figure)
        bad &= usual_B if bad.dim() == 1 else usual_B[:, None]
        if not bool(bad.any()):
            continue
        row = int(bad.nonzero()[0][0])
        shown = " ".join(str(int(each)) for each in mask_BT[row])
        where = ""
        if bad.dim() == 2:
            columns = [int(column) + 1 for column in bad[row].nonzero()[:, 0]]
            where = f" at {_tokens(columns)}"
            where += "" if bool((bad & mask_BT).any()) else ", which the mask leaves out (inf * 0 is nan: use where)"
        problems.append(f"finite: the {what} is not finite{where}, with the mask {shown}")
        break
    # A scalar of a completion alone is 0 / 0 where it is a mean: a second completion is needed.
    if not problems and len(mask_BT) > 1 and not bool(loss.with_all_masked(batch).isfinite().all()):
        problems.append("finite: the value is not finite where every token of a completion is masked")
    return problems


def _leaks(loss: _Loss, batch: _Batch, policy: BatteryInstance, seed: int) -> list[str]:
    """Masked tokens within completions that enter the loss: other log-probs there change value or gradient."""
    holes = [column for column, step in enumerate(batch.step_T) if step < 0]
    if not holes:
        return []
    loss_B, _ = loss(batch)
    slope_BTV = _slope(loss_B, batch)
    mask_BT = batch.tensors["mask"]
    leaking, reached = [], set[int]()
    for column in holes:
        other = _Batch.of(policy, seed, redrawn=column)
        other_B, _ = loss(other)
        moved_BT = (_slope(other_B, other) - slope_BTV).abs().amax(-1) * mask_BT
        tolerance = 1e-9 if loss_B.dtype == torch.float64 else 1e-4
        reaches = bool((slope_BTV[:, column].abs() > 0).any())
        if reaches or bool((moved_BT > tolerance).any()) or bool(((other_B - loss_B).abs() > tolerance).any()):
            leaking.append(column + 1)
            reached |= {int(each) + 1 for each in (moved_BT > tolerance).any(0).nonzero()[:, 0]}
    if not leaking:
        return []
    row = int(mask_BT.sum(-1).argmax())
    shown = " ".join(str(int(each)) for each in mask_BT[row])
    touched = f", and the gradient of {_tokens(sorted(reached))}" if reached else ""
    return [
        f"mask: {_tokens(leaking)}, masked as a tool's reply is (mask {shown}), change the loss{touched}: multiply by "
        "the mask before every sum over tokens (take an argument mask if there is none)"
    ]


def _tokens(columns: Sequence[int]) -> str:
    return f"token{'s' if len(columns) > 1 else ''} {', '.join(map(str, columns))}"


def _caller(loss_fn: Callable[..., Any]) -> Callable[[dict[str, Tensor]], Any]:
    """A function that gives the loss those tensors that its parameters name; a module's are those of its forward.

    Raises :class:`UserError` for parameters that are none of the tensors.
    """
    if isinstance(loss_fn, type):
        raise UserError(f"loss_fn: {loss_fn.__name__} is a class; give an instance of it")
    described = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(described).parameters.values())
    except (TypeError, ValueError):
        raise UserError("loss_fn: its parameters cannot be read; wrap it in a function that names them") from None
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        raise UserError(f"loss_fn: it takes *args; wrap it in a function with parameters among {', '.join(ARGUMENTS)}")
    for each in parameters:
        if each.kind not in packed and each.default is each.empty and each.name not in ARGUMENTS:
            raise unknown_key(f"loss_fn.{each.name}", "a parameter", ARGUMENTS, "it is called with tensors by name")
    by_position = [each.name for each in parameters if each.kind == each.POSITIONAL_ONLY and each.name in ARGUMENTS]
    names = [each.name for each in parameters if each.name in ARGUMENTS and each.name not in by_position]
    if not names and not by_position and any(each.kind == each.VAR_KEYWORD for each in parameters):
        names = list(ARGUMENTS)

    def call(tensors: dict[str, Tensor]) -> Any:
        try:
            return loss_fn(*(tensors[name] for name in by_position), **{name: tensors[name] for name in names})
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"loss_fn: it raised {type(error).__name__}: {error}") from error

    return call
