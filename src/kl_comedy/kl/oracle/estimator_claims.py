"""Checks the claims of an estimator on categorical distributions near the reference and far from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.registry import Entry

DRAWS = tuple((seed, spread) for spread in (1.0, 30.0) for seed in (0, 1, 2))
"""Seeds and standard deviations of logits: log-ratios of a nat, and of up to a hundred, where a clamp inside acts."""
TOKENS = 5
TOLERANCE = 1e-10
"""Relative to the size of what is summed, and absolute below 1."""
VALUES = ("value:reverse", "value:forward")
PATHWISE = ("pathwise:zero", "pathwise:token_reverse", "pathwise:token_forward")
CLAIMS = (*VALUES, *PATHWISE, "nonnegative")


def broken_claims(entry: Entry[Any]) -> list[str]:
    """One sentence per claim of an estimator that does not hold; empty where all do.

    Raises :class:`UserError` for a claim that is not one of :data:`CLAIMS`, and for an estimator that
    does not return a finite tensor of its argument's shape.
    """
    for claim in entry.claims:
        if claim not in CLAIMS:
            raise UserError(f"estimator {entry.name!r} claims {claim!r}; allowed: {', '.join(CLAIMS)}")
    _estimate(entry, *_draw_detached(*DRAWS[0]))
    failures = [_value(entry, claim) for claim in entry.claims if claim in VALUES]
    failures += [_pathwise(entry, claim) for claim in entry.claims if claim in PATHWISE]
    failures += [_nonnegative(entry)] if "nonnegative" in entry.claims else []
    return [f"estimator {entry.name!r} claims {failure}" for failure in failures if failure]


def _single(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    """Logits of a policy (a leaf) and the log-probs of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits_2V = spread * torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return logits_2V[0].requires_grad_(True), logits_2V[1].log_softmax(-1)


def _draw_detached(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    logits_V, ref_V = _single(seed, spread)
    return logits_V.detach().log_softmax(-1), ref_V


def _kl(claim: str, logp_V: Tensor, ref_V: Tensor) -> Tensor:
    if claim.endswith("forward"):
        return (ref_V.exp() * (ref_V - logp_V)).sum()
    return (logp_V.exp() * (logp_V - ref_V)).sum() if claim.endswith("reverse") else 0.0 * logp_V.sum()


def _estimate(entry: Entry[Any], logp_V: Tensor, ref_V: Tensor) -> Tensor:
    needs = entry.facts.get("needs", "log_ratio")
    exact = needs != "log_ratio"
    argument_V = _kl(str(needs), logp_V, ref_V).expand_as(logp_V) if exact else logp_V - ref_V
    value_V = entry.fn(argument_V)
    if not isinstance(value_V, Tensor) or value_V.shape != argument_V.shape:
        got = tuple(value_V.shape) if isinstance(value_V, Tensor) else type(value_V).__name__
        raise UserError(
            f"estimator {entry.name!r} must return a tensor of the shape of its argument "
            f"{tuple(argument_V.shape)}, and returned {got}"
        )
    bad_V = ~torch.isfinite(value_V.detach())
    if bool(bad_V.any()):
        raise UserError(
            f"estimator {entry.name!r} is {float(value_V[bad_V][0])} at "
            f"{'an exact KL' if exact else 'a log-ratio'} of {float(argument_V[bad_V][0]):.4g} nats"
        )
    return value_V


def _far(log_ratio_V: Tensor) -> str:
    """How far the draw was, where it was far."""
    largest = float(log_ratio_V.detach().abs().max())
    return f", at log-ratios of up to {largest:.0f} nats" if largest > 10 else ""


def _value(entry: Entry[Any], claim: str) -> str | None:
    for seed, spread in DRAWS:
        logits_V, ref_V = _single(seed, spread)
        logp_V = logits_V.detach().log_softmax(-1)
        summed_V = logp_V.exp() * _estimate(entry, logp_V, ref_V)
        mean, kl = float(summed_V.sum()), float(_kl(claim, logp_V, ref_V))
        if not abs(mean - kl) < TOLERANCE * max(1.0, float(summed_V.abs().sum())):
            return f"{claim}, and its mean is {mean:.6g} nats where the KL is {kl:.6g}{_far(logp_V - ref_V)}"
    return None


def _pathwise(entry: Entry[Any], claim: str) -> str | None:
    for seed, spread in DRAWS:
        logits_V, ref_V = _single(seed, spread)
        logp_V = logits_V.log_softmax(-1)
        summed_V = logp_V.detach().exp() * _estimate(entry, logp_V, ref_V)
        mean = summed_V.sum() + 0.0 * logp_V.sum()
        got_V = torch.autograd.grad(mean, logits_V, retain_graph=True)[0]
        target_V = torch.autograd.grad(_kl(claim, logp_V, ref_V), logits_V)[0]
        gap = float((got_V - target_V).norm())
        if not gap < TOLERANCE * max(1.0, float(target_V.norm()), float(summed_V.detach().abs().sum())):
            return (
                f"{claim}, and the mean of its own gradient is off by {gap:.3g} "
                f"(norm {float(target_V.norm()):.3g}){_far(logp_V - ref_V)}"
            )
    return None


def _nonnegative(entry: Entry[Any]) -> str | None:
    low = -8.0 if entry.facts.get("needs", "log_ratio") == "log_ratio" else 0.0
    grid = torch.linspace(low, 8.0, 4001, dtype=torch.float64)
    values = entry.fn(grid)
    worst = int(values.argmin())
    if float(values[worst]) < -1e-12:
        return f"nonnegative, and is {float(values[worst]):.3g} at a log-ratio of {float(grid[worst]):.3g}"
    return None
