"""Checks what a correction declares: its ratio at each token is the product of the ratios in its scope.

Completions have up to 512 tokens, their log-ratios a nat in all plus up to 100 nats at one token, in float64 and
float32.

Legend: ``B`` completions, ``T`` tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl.oracle.estimator_calls import TOLERANCE
from kl_comedy.kl.oracle.log_ratio_checks import RANGE, ROUNDINGS, UNIT, log_ratio_grid
from kl_comedy.registry import Entry, plugin_line

SCOPES = ("none", "token", "prefix", "sequence")
LENGTHS = (1, 8, 32)
"""Tokens of the completions in which a correction is checked; a fourth length of up to :data:`LONGEST` is drawn."""
LONGEST = 512
WINDOW = 5
ROWS = 1024
"""Completions of more than one token in a batch."""
RANGE32 = 80.0
"""The largest log-ratio (nats) in float32, whose ratios overflow at 88.7 nats."""


@dataclass(frozen=True, kw_only=True)
class CorrectionCoverage:
    """With what a correction was checked: lengths of completions, windows, and the log-ratios (nats) in float32."""

    tokens: list[int]
    windows: list[int]
    float32: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class CorrectionCheck:
    """The declarations of a correction that are false, one sentence each, and with what it was checked."""

    failures: list[str]
    covered: CorrectionCoverage


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A correction with one window, on completions of one length, in one precision."""

    entry: Entry[Any]
    length: int
    window: int | None
    dtype: torch.dtype

    @property
    def in_float64(self) -> bool:
        return self.dtype == torch.float64

    @property
    def tolerance(self) -> float:
        """How far the logarithm of a ratio may be off, relative to what is added up: a sum rounds once per token."""
        if self.in_float64:
            return TOLERANCE
        return (ROUNDINGS + self.length) * UNIT

    @property
    def declares(self) -> str:
        text = f"correction {self.entry.name!r} declares scope {self.entry.facts['scope']}"
        if self.window is not None:
            text += f" (window {self.window})"
        return text

    @property
    def where(self) -> str:
        """As ``of 8 tokens in float32``."""
        text = f"of {self.length} tokens"
        if not self.in_float64:
            text += " in float32"
        return text

    def ratio(self, delta_BT: Tensor) -> Tensor:
        """What the correction returns, ``[B, T]``.

        Raises :class:`UserError` where it raises, changes its argument or returns another shape.
        """
        options = {}
        if self.window is not None:
            options["window"] = self.window
        # A change in place would also change what the policy loss reads afterwards.
        before_BT = delta_BT.detach().clone()
        try:
            ratio_BT = self.entry.fn(delta_BT, **options)
        except Exception as error:
            where = ""
            line = plugin_line(error)
            if line:
                where = f" ({line})"
            raise UserError(f"correction {self.entry.name!r} raised {type(error).__name__}: {error}{where}") from error
        if not torch.equal(delta_BT.detach(), before_BT):
            raise UserError(f"correction {self.entry.name!r} changes its argument in place; work on a copy")
        if isinstance(ratio_BT, Tensor) and ratio_BT.shape == delta_BT.shape:
            return ratio_BT
        returned: object = type(ratio_BT).__name__
        if isinstance(ratio_BT, Tensor):
            returned = tuple(ratio_BT.shape)
        raise UserError(f"correction {self.entry.name!r} must return a tensor of shape [B, T], and returned {returned}")


def check_correction(entry: Entry[Any], *, seed: int = 0) -> CorrectionCheck:
    """Check that the ratio at each token is the product of the ratios in the declared scope, and its derivative.

    Raises :class:`UserError` for a scope that does not exist and for a result of another shape.
    """
    scope = entry.facts.get("scope")
    if scope not in SCOPES:
        raise bad_value(f"correction {entry.name!r}: scope", scope, SCOPES)
    generator = torch.Generator().manual_seed(seed)
    drawn_length = int(torch.randint(LENGTHS[-1] + 1, LONGEST + 1, (1,), generator=generator))
    # The drawn length is one that no author of a correction can have tuned it to.
    lengths = [*LENGTHS, drawn_length]
    windows = []
    if scope == "prefix" and "window" in inspect.signature(entry.fn).parameters:
        windows.append(WINDOW)
    covered = CorrectionCoverage(tokens=lengths, windows=windows, float32=(-RANGE32, RANGE32))
    for length in lengths:
        for window in (None, *windows):
            for dtype in (torch.float64, torch.float32):
                failure = _failure_of(_Case(entry=entry, length=length, window=window, dtype=dtype), generator)
                if failure is not None:
                    # The first is enough: a wrong scope fails at every length, in nearly the same words.
                    return CorrectionCheck(failures=[failure], covered=covered)
    return CorrectionCheck(failures=[], covered=covered)


def _failure_of(case: _Case, generator: torch.Generator) -> str | None:
    """What is false of a correction in one case; None if nothing is."""
    delta_BT, jump_at_B = _log_ratios(case, generator)
    given_BT = delta_BT * 1.0  # not a leaf, as in training, where a change in place raises nothing
    ratio_BT = case.ratio(given_BT)

    # A correction sees a whole batch, and may not let one completion change another.
    some = int(torch.randint(1, 100, (1,), generator=generator))
    with torch.no_grad():
        alone_BT = case.ratio(delta_BT[:some].clone())
    relative = 1e-5
    if case.in_float64:
        relative = 1e-12
    # Not equal to the bit: a sum over fewer rows may be added up in another order.
    if not torch.allclose(alone_BT, ratio_BT.detach()[:some], rtol=relative, atol=0):
        return (
            f"correction {case.entry.name!r} declares scope {case.entry.facts['scope']}, and its ratios of "
            f"{case.length} tokens change when {some} of {len(delta_BT)} completions stand alone, without gradients "
            "recorded"
        )
    log_BT = ratio_BT.log()
    failure = _wrong_product(case, log_BT.detach().double(), delta_BT.detach().double(), jump_at_B)
    if failure is not None:
        return failure
    # One token per completion is differentiated: all of them would be a matrix [T, T] per completion.
    read_B = torch.randint(case.length, (len(delta_BT),), generator=generator)
    return _wrong_derivative(case, log_BT, delta_BT, read_B)


def _log_ratios(case: _Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Log-ratios ``[B, T]`` of about a nat in all plus one of the grid at a random token; and that token ``[B]``.

    With one token there is a completion for each point of the grid, and the point is its log-ratio.
    """
    jump_B = log_ratio_grid(-RANGE, generator)
    if not case.in_float64:
        # Within what float32 can exponentiate; beyond it a ratio is infinite, which is no mistake.
        jump_B = jump_B * (RANGE32 / RANGE)
    noise = 0.0
    if case.length > 1:
        jump_B = jump_B[torch.randperm(len(jump_B), generator=generator)[:ROWS]]
        # The sum over a completion stays of the size of a nat, at any length.
        noise = 1 / case.length
    delta_BT = torch.randn(len(jump_B), case.length, generator=generator, dtype=torch.float64) * noise
    jump_at_B = torch.randint(case.length, (len(jump_B),), generator=generator)
    # One large log-ratio per completion: where it enters, and where it must not, shows at any length.
    delta_BT[torch.arange(len(jump_B)), jump_at_B] += jump_B
    return delta_BT.to(case.dtype).requires_grad_(True), jump_at_B


def _wrong_product(case: _Case, log_BT: Tensor, delta_BT: Tensor, jump_at_B: Tensor) -> str | None:
    """Whether a ratio is not the product of those in scope: its logarithm is their sum."""
    scope_TT = _scope(case.entry.facts, case.length, case.window).to(case.dtype)
    expected_BT = delta_BT @ scope_TT.double().T
    # Rounding grows with what is added up, not with the result: large ratios may cancel.
    size_B1 = 1.0 + delta_BT.abs().sum(-1, keepdim=True)
    wrong_BT = ~((log_BT - expected_BT).abs() <= case.tolerance * size_B1)  # NaN counts as wrong
    if not bool(wrong_BT.any()):
        return None
    row, t = (int(position) for position in wrong_BT.nonzero()[0])
    return (
        f"{case.declares}, and the logarithm of its ratio at token {t + 1} {case.where} "
        f"is {float(log_BT[row, t]):.4g}, "
        f"where the log-ratios in scope add up to {float(expected_BT[row, t]):.4g} nats "
        f"(most of it at token {int(jump_at_B[row]) + 1})"
    )


def _wrong_derivative(case: _Case, log_BT: Tensor, delta_BT: Tensor, read_B: Tensor) -> str | None:
    """Whether the logarithm at token ``read_B`` has not the derivative 1 by each log-ratio in scope (0 if detached)."""
    slope_BT = torch.zeros_like(delta_BT)
    # A detached ratio has no graph at all, which is a derivative of 0.
    if log_BT.requires_grad:
        picked = log_BT[torch.arange(len(read_B)), read_B].sum()
        (slope_BT,) = torch.autograd.grad(picked, delta_BT, allow_unused=True, materialize_grads=True)
    if case.entry.facts.get("detached"):
        declared_BT = torch.zeros_like(slope_BT)
    else:
        declared_BT = _scope(case.entry.facts, case.length, case.window).to(case.dtype)[read_B]
    wrong_BT = ~((slope_BT - declared_BT).abs() <= case.tolerance)
    if not bool(wrong_BT.any()):
        return None
    row, u = (int(position) for position in wrong_BT.nonzero()[0])
    return (
        f"{case.declares}, and the logarithm of its ratio at token {int(read_B[row]) + 1} {case.where} "
        f"has the derivative {float(slope_BT[row, u]):.4g} by the log-ratio of token {u + 1}, "
        f"not {float(declared_BT[row, u]):.4g}"
    )


def _scope(facts: Mapping[str, Any], length: int, window: int | None) -> Tensor:
    """1 at ``[t, u]`` where the ratio of token u enters that at token t, ``[T, T]``."""
    ones_TT = torch.ones(length, length, dtype=torch.float64)
    if facts["scope"] == "none":
        return 0.0 * ones_TT
    if facts["scope"] == "token":
        return torch.eye(length).double()
    if facts["scope"] == "sequence":
        return ones_TT
    # Without its own token, a ratio at t ends with the token before.
    last_diagonal = -1
    if facts.get("own", True):
        last_diagonal = 0
    prefix_TT = ones_TT.tril(last_diagonal)
    if window is None:
        return prefix_TT
    return prefix_TT - ones_TT.tril(last_diagonal - window)
