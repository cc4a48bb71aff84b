"""A peer's KL code as a loss over rows, with the equivalent terms of kl_comedy.

Every loss is the KL part only, at a coefficient of 1. If the peer's code adds it to a policy loss, the KL part is
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
"""Relative tolerance for a peer that computes in the precision of its input, here float64."""
FLOAT32 = 2e-5
"""Relative tolerance for a peer that converts to float32."""


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
    """Distribute a peer's loss over the batch evenly to ``[B]``.

    The oracle and the comparison read only the sum over rows, and a peer's loss is one number.
    """
    count = len(rows.group_B)
    return value.reshape(1).expand(count) / count


def in_the_sequence(mask_BT: Tensor) -> Tensor:
    """What a model reads: true up to the last token of the mask, at masked tokens inside too."""
    return mask_BT.flip(-1).long().cummax(-1).values.flip(-1).bool()


def groups_of(rows: Rows, size: int) -> list[Rows]:
    """Each group of ``size`` adjacent rows as a separate batch, for code that normalizes over its batch."""
    pieces: dict[str, tuple[Tensor, ...]] = {}
    for name in rows.__dataclass_fields__:
        column = getattr(rows, name)
        if column is not None:
            pieces[name] = torch.split(column, size)
    groups = []
    for number in range(len(rows.group_B) // size):
        columns: dict[str, Any] = {name: column_pieces[number] for name, column_pieces in pieces.items()}
        groups.append(Rows(**columns))
    return groups


def batch_by_batch(loss: Loss, size: int) -> Loss:
    """The loss called once per group, as a batch of one prompt."""

    def loss_per_group(rows: Rows, /) -> Tensor:
        # Groups are adjacent, so that the parts stand in the order of the rows.
        return torch.cat([loss(group) for group in groups_of(rows, size)])

    return loss_per_group


def kl_part(loss_at: Callable[[Rows, float], Tensor], beta: float = 1.0) -> Loss:
    """``(loss(beta) - loss(0)) / beta``: the KL part of a loss with other parts."""

    # Exact where the loss is linear in beta. Where it is not (advantages that are divided by a standard deviation), it
    # is the change that this beta makes.
    def loss(rows: Rows, /) -> Tensor:
        return (loss_at(rows, beta) - loss_at(rows, 0.0)) / beta

    return loss


def with_beta(terms: Sequence[KLTerm], beta: float) -> tuple[KLTerm, ...]:
    """The terms with another coefficient."""
    return tuple(replace(term, beta=beta) for term in terms)
