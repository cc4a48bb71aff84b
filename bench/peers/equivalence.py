"""Compare the derivative of a peer's loss by every log-prob with that of our terms, on random rows.

The expected gradient could agree by chance or by symmetry. Derivatives by every log-prob that agree on random rows mean
that the two are the same function.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Loss, Rows, terms_loss, training_loss
from peers.case import Case, kl_part, with_beta
from peers.measure import gradient

ROWS = 24
TOKENS = 7
CLOSE = 1e-6
"""Relative difference of derivatives that count as equal."""


def our_loss(case: Case) -> Loss | None:
    """The KL part of our terms in the case's algorithm, at a coefficient of 1; None without equivalent terms."""
    if case.ours is None:
        return None
    if case.context is None:
        return terms_loss(case.ours)
    context = case.context
    terms = with_beta(case.ours, case.beta)

    # As a difference quotient with the same beta as the peer's: within an algorithm that divides by a standard
    # deviation, the loss is not linear in beta.
    def loss_at(rows: Rows, beta: float) -> Tensor:
        return training_loss(terms, context, scale=beta / case.beta)(rows)

    return kl_part(loss_at, case.beta)


def difference(case: Case) -> float | None:
    """The largest difference of the derivatives, relative to the largest derivative; None without equivalent terms."""
    loss = our_loss(case)
    if loss is None:
        return None
    our_case = replace(case, loss=loss)
    largest = 0.0
    for regime in case.equal_in:
        for position, spread in enumerate(case.spreads):
            rows = random_rows(spread, seed=position, on_policy=regime == "on_policy")
            theirs_BT, _ = gradient(case, rows)
            ours_BT, _ = gradient(our_case, rows)
            size = max(float(theirs_BT.abs().max()), float(ours_BT.abs().max()))
            # Both are zero everywhere, and agree.
            if size == 0:
                continue
            difference_of_rows = float((theirs_BT - ours_BT).abs().max())
            largest = max(largest, difference_of_rows / size)
    return largest


def bound(case: Case) -> float:
    """The tolerance of equality: 1e-6, or the peer's rounding error, which the difference quotient divides by beta."""
    return max(CLOSE, case.tolerance / case.beta)


def random_rows(spread: float, *, seed: int, on_policy: bool) -> Rows:
    """Rows of 1 to ``TOKENS`` tokens whose log-ratios have standard deviation ``spread`` (nats)."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)

    length_B = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    # One row of full length, so that no column is masked in every row.
    length_B[0] = TOKENS
    mask_BT = torch.arange(TOKENS) < length_B[:, None]
    logp_BT = -normal().abs() - 0.1
    behaviour_BT = logp_BT
    if not on_policy:
        behaviour_BT = logp_BT + 0.4 * normal()
    zero_BT = torch.zeros(ROWS, TOKENS, dtype=torch.float64)

    # Rows are zero outside the mask, as those of the oracle.
    def masked(values_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, values_BT, zero_BT)

    return Rows(
        logp_BT=masked(logp_BT).requires_grad_(True),
        ref_logp_BT=masked(logp_BT + spread * normal()),
        behaviour_logp_BT=masked(behaviour_BT),
        mask_BT=mask_BT,
        reverse_kl_BT=zero_BT.clone().requires_grad_(True),
        forward_kl_BT=zero_BT.clone().requires_grad_(True),
        reward_B=torch.rand(ROWS, generator=generator, dtype=torch.float64).round(),
        group_B=torch.arange(ROWS),
        truncated_B=torch.zeros(ROWS, dtype=torch.bool),
    )
