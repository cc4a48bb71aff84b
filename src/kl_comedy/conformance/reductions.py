"""How a scalar is made of the losses of several completions: their sum, or a mean, over which count.

Each completion's share in the gradient of several is compared with the gradient of that completion alone. In a sum it
is all of it, in a mean that part of it which the completion's count is of the counts of all. No source code is read.

Legend: ``B`` completions, ``T`` tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.conformance.masks import COUNTED, Part, turn_numbers
from kl_comedy.errors import UserError

TOLERANCE = 1e-3
"""Relative difference up to which shares agree: losses compute in float32, and divide by a count plus 1e-8."""
OTHER_MEAN = (
    "loss_fn: the loss of several completions is a mean over neither completions, turns nor tokens of the mask; divide "
    "by the mask's tokens, or return the loss unreduced"
)


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """A sum or mean. ``words``: its name in a report. ``problem``: why no loss should use it; empty where it may.

    ``counts``: what each completion adds to the denominator of a mean, from mask and attention mask; ones for a sum.
    """

    words: str
    counts: Callable[[Tensor, Tensor], Tensor]
    is_sum: bool = False
    problem: str = ""


def _ones(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return torch.ones(len(mask_BT), dtype=torch.long)


def _tokens(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return mask_BT.sum(-1)


def _turns(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
    return turn_numbers(mask_BT).amax(-1)


def _of_wrong_mask(name: str, part: Part) -> Reduction:
    def counts(mask_BT: Tensor, attention_BT: Tensor) -> Tensor:
        return part(mask_BT, attention_BT).sum(-1)

    problem = f"reduction: the mean divides by the tokens of {name} and not by those of the mask"
    if name == "the attention mask":
        problem += ": it counts a tool's replies, and the more a tool writes, the weaker the KL"
    return Reduction(words=f"the mean over the tokens of {name}", counts=counts, problem=problem)


SUM = Reduction(words="the sum over completions", counts=_ones, is_sum=True)
# In this order: where several fit, as with completions of one token, the first is meant.
REDUCTIONS = (
    SUM,
    Reduction(words="the mean over completions", counts=_ones),
    Reduction(words="the mean over the tokens of the batch", counts=_tokens),
    Reduction(words="the mean over the turns of the batch", counts=_turns),
    *(_of_wrong_mask(name, part) for name, part in COUNTED.items()),
)

Measure = Callable[[list[int]], Tensor]
"""From the rows of a batch, perhaps some of them twice, to the derivatives ``[B, T, V]`` of their scalar."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """The part of each completion's own derivative that is in the scalar of several, by row."""

    rows: list[int]
    share_by_row: dict[int, float]


def reductions_of(measure: Measure, mask_BT: Tensor, attention_BT: Tensor) -> list[Reduction] | None:
    """Those of :data:`REDUCTIONS` that a scalar may be; none where completions are mixed, None without a gradient.

    Raises :class:`UserError` for a mean that weights completions by a count which is none of :data:`REDUCTIONS`.
    """
    rows = _rows_of_all_lengths(mask_BT)
    alone = {row: measure([row]) for row in rows}
    if not any(bool((slope_BTV != 0).any()) for slope_BTV in alone.values()):
        return None
    # The first and the last differ most in length; the last twice, because a mean is no mean of different ones.
    sets = [rows, [rows[0], rows[-1], rows[-1]], *([first, second] for first, second in itertools.pairwise(rows))]
    measured = []
    for chosen in sets:
        shares = _shares(chosen, measure(chosen), alone)
        if shares is None:
            return []
        measured.append(shares)
    fitting = [candidate for candidate in REDUCTIONS if _fits(candidate, measured, mask_BT, attention_BT)]
    if not fitting:
        _refuse_other_mean(measured, mask_BT)
    return fitting


def _rows_of_all_lengths(mask_BT: Tensor) -> list[int]:
    """A row of each length, from the shortest completion to the longest; two where all have one length."""
    length_B = mask_BT.sum(-1)
    lengths = sorted(set(length_B.tolist()))
    rows = [int((length_B == length).nonzero()[0][0]) for length in lengths]
    if len(rows) == 1 and len(mask_BT) > 1:
        rows.append(len(mask_BT) - 1)
    return rows


def _shares(rows: list[int], slope_BTV: Tensor, alone: dict[int, Tensor]) -> Shares | None:
    """The share of each completion; None where a completion's derivative is not a multiple of that of it alone."""
    share_by_row = {}
    for row in dict.fromkeys(rows):
        own_TV = alone[row][row]
        together_TV = slope_BTV[row]
        square = float(own_TV.square().sum())
        # 0 / 0 where nothing of a completion is counted; what is not finite is a problem of its own.
        is_finite = bool(own_TV.isfinite().all()) and bool(together_TV.isfinite().all())
        if not is_finite:
            continue
        if square == 0:
            if float(together_TV.norm()) > TOLERANCE:
                return None
            continue
        share = float((together_TV * own_TV).sum()) / square
        if float((together_TV - share * own_TV).norm()) > TOLERANCE * square**0.5:
            return None
        share_by_row[row] = share / rows.count(row)
    return Shares(rows=rows, share_by_row=share_by_row)


def _fits(candidate: Reduction, measured: Sequence[Shares], mask_BT: Tensor, attention_BT: Tensor) -> bool:
    count_B = candidate.counts(mask_BT, attention_BT).double()
    for shares in measured:
        total = 1.0
        if not candidate.is_sum:
            total = float(count_B[shares.rows].sum())
        # A mean of completions of which none is counted is 0 / 0, or anything by a clamp.
        if total == 0:
            continue
        for row, share in shares.share_by_row.items():
            expected = [float(count_B[row]) / total]
            if expected == [0.0]:
                # Alone such a completion is divided by a clamped count, and here by that of the others.
                expected.append(1 / total)
            if all(abs(share - value) > TOLERANCE for value in expected):
                return False
    return True


def _refuse_other_mean(measured: Sequence[Shares], mask_BT: Tensor) -> None:
    """Raise :class:`UserError` for a mean with other weights: the shares in all sets are those of one weight a row."""
    largest = max(measured, key=lambda shares: len(shares.share_by_row))
    weight_by_row = largest.share_by_row
    smallest = min(weight_by_row.values(), default=0.0)
    if not smallest > 0:
        return
    for shares in measured:
        if not set(shares.rows) <= set(weight_by_row):
            return
        total = sum(weight_by_row[row] for row in shares.rows)
        for row, share in shares.share_by_row.items():
            if abs(share - weight_by_row[row] / total) > TOLERANCE:
                return
    weights = ", ".join(f"{weight / smallest:.3g}" for weight in weight_by_row.values())
    lengths = ", ".join(str(int(mask_BT[row].sum())) for row in weight_by_row)
    raise UserError(f"{OTHER_MEAN} (completions of {lengths} tokens in the mask weigh {weights})")
