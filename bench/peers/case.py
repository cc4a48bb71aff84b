"""What an adapter offers: a peer's code as a loss over rows, and our terms that should be the same.

Every loss is the KL part alone, at a coefficient of 1: ``(loss(beta) - loss(0)) / beta`` where the peer's code
mixes it with a policy loss.
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
"""Relative tolerance of a hit, and of an equivalence, where the peer computes in that precision."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setting of one peer.

    ``name`` is ``system:flags`` and names its row. ``kind`` is ``kl function`` (an estimator alone) or
    ``loss path`` (the method training calls). ``reduction`` says what became of the peer's mean over tokens.
    ``ours`` are the terms whose derivatives it should have, inside ``around`` where the algorithm has a part
    in it, in the regimes ``equal_in``; None where our space has no such point. ``group_size`` completions
    are enumerated together where rows of a group meet. ``tolerance`` follows the precision of their code;
    ``spreads`` are the standard deviations (nats) of the log-ratios it is compared with ours at: near, where
    output clamps act, where input clamps act.
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
    around: AlgorithmContext | None = None
    equal_in: tuple[str, ...] = ("on_policy", "off_policy")
    beta: float = 1.0
    group_size: int = 1
    tolerance: float = FLOAT64
    spreads: tuple[float, ...] = (0.3, 3.0, 14.0)
    reduction: str = "token sum"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """What was not run, and the honest reason."""

    system: str
    version: str
    what: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A system's cases, the wheels they need, and what is known beforehand not to run."""

    system: str
    version: str
    cases: tuple[Case, ...]
    needs: tuple[Pin, ...]
    skipped: tuple[Skipped, ...] = field(default=())


def spread(value: Tensor, rows: Rows) -> Tensor:
    """A sum over the batch as ``[B]``: only the sum counts, and rows (groups) do not meet in it."""
    count = len(rows.group_B)
    return value.reshape(1).expand(count) / count


def groups_of(rows: Rows, size: int) -> list[Rows]:
    """Each group of ``size`` adjacent rows as a batch of its own, for code that normalizes over its batch."""
    given = {name: column for name in rows.__dataclass_fields__ if (column := getattr(rows, name)) is not None}
    columns = {name: torch.split(column, size) for name, column in given.items()}
    count = len(rows.group_B) // size
    return [Rows(**{name: pieces[i] for name, pieces in columns.items()}) for i in range(count)]


def batch_by_batch(loss: Loss, size: int) -> Loss:
    """The loss called on each group alone, as a batch of one prompt."""

    def one_by_one(rows: Rows, /) -> Tensor:
        return torch.cat([loss(piece) for piece in groups_of(rows, size)])

    return one_by_one


def kl_part(loss_at: Callable[[Rows, float], Tensor], beta: float = 1.0) -> Loss:
    """``(loss(beta) - loss(0)) / beta`` of a loss that has other parts."""

    def loss(rows: Rows, /) -> Tensor:
        return (loss_at(rows, beta) - loss_at(rows, 0.0)) / beta

    return loss


def with_beta(terms: Sequence[KLTerm], beta: float) -> tuple[KLTerm, ...]:
    return tuple(replace(term, beta=beta) for term in terms)
