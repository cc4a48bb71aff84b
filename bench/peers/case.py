"""A peer's KL code as a loss over rows, with the equivalent terms of kl_comedy.

Every loss is the KL part alone at a coefficient of 1. If the peer's code adds it to a policy loss, the KL part is
``(loss(beta) - loss(0)) / beta``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import AlgorithmContext, Loss, Rows
from peers.wheels import Pin

FLOAT64 = 1e-9
FLOAT32 = 2e-5
"""Relative tolerances for a peer that computes in that precision."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of one peer.

    ``name``: ``system:flags``, the name of the row.
    ``kind``: ``kl function`` (an estimator alone) or ``loss path`` (the method that training calls).
    ``ours``: the terms that should have the same derivatives, within the algorithm ``context`` and in the regimes
    ``equal_in``; None if kl_comedy has no equivalent.
    ``group_size``: completions that are enumerated together because the peer's code compares them.
    ``tolerance``: relative, by the precision of the peer's code.
    ``spreads``: standard deviations (nats) of the log-ratios of the comparison: small, large enough for output clamps,
    large enough for input clamps.
    ``reduction``: how the peer's mean over tokens is handled.
    """

    system: str
    version: str
    name: str
    flags: str
    kind: str
    placement: str
    loss: Loss
    module: str
    function: str
    loaded: Callable[[], dict[str, Any]]
    ours: tuple[KLTerm, ...] | None
    context: AlgorithmContext | None = None
    equal_in: tuple[str, ...] = ("on_policy", "off_policy")
    beta: float = 1.0
    group_size: int = 1
    tolerance: float = FLOAT64
    spreads: tuple[float, ...] = (0.3, 3.0, 14.0)
    reduction: str = "token sum"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """Code that was not run, and the reason."""

    system: str
    version: str
    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A system's cases, the wheels they need, and the code that cannot be run."""

    system: str
    version: str
    cases: tuple[Case, ...]
    needs: tuple[Pin, ...]
    skipped: tuple[Skipped, ...] = field(default=())


def spread(value: Tensor, rows: Rows) -> Tensor:
    """Distribute a sum over the batch evenly to ``[B]``; only the sum matters."""
    count = len(rows.group_B)
    return value.reshape(1).expand(count) / count


def groups_of(rows: Rows, size: int) -> list[Rows]:
    """Each group of ``size`` adjacent rows as a separate batch, for code that normalizes over its batch."""
    tensors = {name: column for name in rows.__dataclass_fields__ if (column := getattr(rows, name)) is not None}
    groups_by_name = {name: torch.split(column, size) for name, column in tensors.items()}
    count = len(rows.group_B) // size
    return [Rows(**{name: groups[i] for name, groups in groups_by_name.items()}) for i in range(count)]


def batch_by_batch(loss: Loss, size: int) -> Loss:
    """The loss called once per group, as a batch of one prompt."""

    def loss_per_group(rows: Rows, /) -> Tensor:
        return torch.cat([loss(group) for group in groups_of(rows, size)])

    return loss_per_group


def kl_part(loss_at: Callable[[Rows, float], Tensor], beta: float = 1.0) -> Loss:
    """``(loss(beta) - loss(0)) / beta``: the KL part of a loss with other parts."""

    def loss(rows: Rows, /) -> Tensor:
        return (loss_at(rows, beta) - loss_at(rows, 0.0)) / beta

    return loss


def with_beta(terms: Sequence[KLTerm], beta: float) -> tuple[KLTerm, ...]:
    return tuple(replace(term, beta=beta) for term in terms)
