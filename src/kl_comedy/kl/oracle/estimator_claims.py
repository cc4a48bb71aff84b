"""What an estimator claims about itself, on one categorical distribution: held or broken, with the figures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError
from kl_comedy.registry import Entry

SEEDS = (0, 1, 2)
TOKENS = 5
TOLERANCE = 1e-10
VALUES = ("value:reverse", "value:forward")
PATHWISE = ("pathwise:zero", "pathwise:token_reverse", "pathwise:token_forward")
CLAIMS = (*VALUES, *PATHWISE, "nonnegative")


def broken_claims(entry: Entry[Any]) -> list[str]:
    """One sentence per claim of an estimator that does not hold; empty where all do.

    Raises :class:`UserError` for a claim that is not one of :data:`CLAIMS`, and for an estimator that
    does not return a tensor of its argument's shape.
    """
    for claim in entry.claims:
        if claim not in CLAIMS:
            raise UserError(f"estimator {entry.name!r} claims {claim!r}; allowed: {', '.join(CLAIMS)}")
    said = [_value(entry, claim) for claim in entry.claims if claim in VALUES]
    said += [_pathwise(entry, claim) for claim in entry.claims if claim in PATHWISE]
    said += [_nonnegative(entry)] if "nonnegative" in entry.claims else []
    return [f"estimator {entry.name!r} claims {sentence}" for sentence in said if sentence]


def _single(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of a policy (a leaf) and the log-probs of a reference."""
    generator = torch.Generator().manual_seed(seed)
    logits_V = torch.randn(TOKENS, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits_V, torch.randn(TOKENS, generator=generator, dtype=torch.float64).log_softmax(-1)


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
    return value_V


def _value(entry: Entry[Any], claim: str) -> str | None:
    for seed in SEEDS:
        logits_V, ref_V = _single(seed)
        logp_V = logits_V.detach().log_softmax(-1)
        mean = float((logp_V.exp() * _estimate(entry, logp_V, ref_V)).sum())
        kl = float(_kl(claim, logp_V, ref_V))
        if not abs(mean - kl) < TOLERANCE:
            return f"{claim}, and its mean is {mean:.6g} nats where the KL is {kl:.6g}"
    return None


def _pathwise(entry: Entry[Any], claim: str) -> str | None:
    for seed in SEEDS:
        logits_V, ref_V = _single(seed)
        logp_V = logits_V.log_softmax(-1)
        mean = (logp_V.detach().exp() * _estimate(entry, logp_V, ref_V)).sum()
        if not mean.requires_grad:
            mean = mean + 0.0 * logp_V.sum()
        got_V = torch.autograd.grad(mean, logits_V, retain_graph=True)[0]
        target_V = torch.autograd.grad(_kl(claim, logp_V, ref_V), logits_V)[0]
        gap = float((got_V - target_V).norm())
        if not gap < TOLERANCE:
            return f"{claim}, and the mean of its own gradient is off by {gap:.3g} (norm {float(target_V.norm()):.3g})"
    return None


def _nonnegative(entry: Entry[Any]) -> str | None:
    low = -8.0 if entry.facts.get("needs", "log_ratio") == "log_ratio" else 0.0
    grid = torch.linspace(low, 8.0, 4001, dtype=torch.float64)
    values = entry.fn(grid)
    worst = int(values.argmin())
    if float(values[worst]) < -1e-12:
        return f"nonnegative, and is {float(values[worst]):.3g} at a log-ratio of {float(grid[worst]):.3g}"
    return None
