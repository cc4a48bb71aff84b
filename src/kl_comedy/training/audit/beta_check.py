"""Whether beta changes the gradient at all, through the training step's own preparation and loss.

A term can be written down, logged and without effect: a mask that is never open, a clamp that is always shut, a cost
that the baseline takes away again. The whole gradient is taken at 0 and at twice the term's beta.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kl_comedy.records import Scored
from kl_comedy.training.audit.gradients import BlockGradients, Layout
from kl_comedy.training.audit.panel import Audited
from kl_comedy.training.audit.report import BetaCheck, TermFinding
from kl_comedy.training.losses import micro_loss
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.prepare import prepare

ROUNDING = 1e-6
"""A change of the gradient by less than this share of it is rounding, in float32."""

DISAGREEMENT = 0.05
"""Relative distance beyond which the difference quotient is not the term's gradient. In float32 it is near 1e-5 where
the KL part is as large as the policy's, and grows as that share shrinks; bfloat16 takes most of the rest."""


def training_gradient(
    module: PolicyModule, rows: Sequence[Scored], betas: Sequence[float], layout: Layout
) -> list[Tensor]:
    """The gradient that the training step would give the optimizer for ``rows``, sketched per layer group."""
    micros = prepare(
        rows, module.plan, betas=betas, references=module.references, policy_pass=module.policy_pass,
        first_use=module.record(rows),
    )  # fmt: skip
    total: list[Tensor] = []
    for micro in micros:
        loss, _ = micro_loss(
            micro, module.passes(micro), terms=module.terms, betas=betas, algorithm=module.config.algorithm
        )
        found = layout.fold(torch.autograd.grad(loss, layout.parameters, allow_unused=True))
        total = [t + f for t, f in zip(total, found, strict=True)] if total else found
    return total


def check_beta(
    module: PolicyModule, rows: Sequence[Scored], finding: TermFinding, item: Audited, block: BlockGradients,
    names: Sequence[str], layout: Layout,
) -> TermFinding:  # fmt: skip
    """``finding`` with the check of its beta. ``block`` holds the term's own gradient on the same ``rows``."""
    betas = [beta.value for beta in module.betas]
    assert item.position is not None
    high = 2.0 * item.beta or 1.0
    at: list[Tensor] = []
    for value in (0.0, high):
        changed = [value if n == item.position else beta for n, beta in enumerate(betas)]
        at.append(torch.cat(training_gradient(module, rows, changed, layout)).double())
    change = at[1] - at[0]
    scale = float(at[0].norm() + at[1].norm())
    own = torch.cat([vectors[names.index(item.key)] for vectors in block.vectors]).double() * block.weight
    share = float(change.norm()) / scale if scale > 0 else 0.0
    inert = share <= ROUNDING
    size = float(own.norm())
    disagreement = float((change / high - own).norm()) / size if size > 0 else math.nan
    linear = item.term.baseline != "before"
    check = BetaCheck(
        change=share, disagreement=disagreement, inert=inert,
        wrong=not inert and linear and not disagreement <= DISAGREEMENT + ROUNDING * scale / max(high * size, 1e-300),
    )  # fmt: skip
    return dataclasses.replace(finding, check=check)
