"""What a check found: one finding per regime, and what is wrong whatever the loss claims."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kl_comedy.errors import UserError
from kl_comedy.kl.claims import TARGET_MEANINGS
from kl_comedy.kl.oracle.divergences import DIVERGENCE_MEANINGS, DIVERGENCES

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
    ``reaches_policy``: whether any token of the mask has a gradient; ``reaches_masked``: whether a masked one has.
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
    reaches_masked: bool
    missed_in: str
    cause: str = ""
    example: str = ""
    expected_coefficient: float | None = None

    def __str__(self) -> str:
        text = f"{self.regime}: {self._verdict()}"
        if self.cause:
            text += f"; {self.cause}"
        if self.claimed is None:
            return f"{text} [nothing claimed]"
        return f"{text} [claimed: {self.claimed}]"

    @property
    def has_expected_coefficient(self) -> bool:
        """Whether the coefficient is the beta that was given to :func:`check`, or none was given."""
        if self.expected_coefficient is None or self.coefficient is None:
            return True
        return math.isclose(self.coefficient, self.expected_coefficient, rel_tol=COEFFICIENT_TOLERANCE)

    def _verdict(self) -> str:
        if not self.reaches_policy and self.reaches_masked:
            return "zero: masked tokens alone have a gradient (the mask is inverted)"
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The findings of :func:`check`, one per regime.

    Its truth is :attr:`ok`, so that ``assert check(...)`` fails where a claim does. Where nothing was claimed it has no
    truth, because an assertion about nothing would pass for a loss that is right.

    ``near_only``: claims are about policies near the reference. ``covered``: the policies that were tried, in words.
    ``reduction``: how a scalar is made of the losses of completions, in words; empty for other losses.
    ``problems``: what is wrong whatever the loss claims. ``problem_example``: the smallest batch that shows the first.
    """

    findings: tuple[Finding, ...]
    near_only: bool
    covered: str
    reduction: str = ""
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

    def __bool__(self) -> bool:
        claims = [finding.claimed for finding in self.findings if finding.claimed is not None]
        if not claims and self.ok:
            raise UserError("report: nothing was claimed, so it is neither true nor false; give claims, or read .ok")
        return self.ok

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
            if finding.claimed is None:
                mark = "-     "
            elif self._holds(finding):
                mark = "ok    "
            lines.append(f"{mark} {finding}")
        for problem in self.problems:
            lines.append(f"FAILED {problem}")
        if self.example:
            lines.append(self.example)
        if self.reduction:
            lines.append(f"the scalar is {self.reduction}")
        lines.append(f"checked: {self.covered}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        # What pytest shows for a failed `assert check(...)`, and a notebook for a report.
        return str(self)


def beta_cause(finding: Finding) -> str:
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
