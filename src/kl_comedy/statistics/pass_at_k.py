"""What several samples of one problem say: pass@k without bias, and the majority answer with its ties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kl_comedy.errors import UserError


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples is right, from ``correct`` right ones among ``samples``.

    ``1 - C(n-c, k) / C(n, k)``, the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1), as a product of
    exact fractions. Raises :class:`UserError` where ``k`` is more than there are samples.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 0, 4), pass_at_k(4, 2, 3)
    (0.25, 0.5, 0.0, 1.0)
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} right of {samples} samples")
    check_k(k, samples)
    if samples - correct < k:
        return 1.0
    none_right = Fraction(1)
    for n in range(samples - correct + 1, samples + 1):
        none_right *= 1 - Fraction(k, n)
    return float(1 - none_right)


def check_k(k: int, samples: int, *, key: str = "k") -> None:
    """Raise :class:`UserError` unless ``1 <= k <= samples``."""
    if not 1 <= k <= samples:
        raise UserError(
            f"{key}: got {k}; allowed: 1 to {samples}, the samples drawn of each problem (eval.samples={samples})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Majority:
    """The vote over samples of one problem.

    ``correct``: the chance that the most frequent answer is right, ties broken by lot (a share, not always 0 or 1).
    ``tied``: several answers have the most votes. ``votes``: samples that have an answer; none of them: not correct.
    """

    correct: float
    tied: bool
    votes: int


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Majority:
    """Vote over canonical ``answers``; None abstains. A winning answer is as right as its samples were judged.

    >>> majority(["7", "7", "8"], [True, True, False])
    Majority(correct=1.0, tied=False, votes=3)
    >>> majority(["7", "8", None], [True, False, False])
    Majority(correct=0.5, tied=True, votes=2)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Majority(correct=0.0, tied=False, votes=0)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = [
        sum(judged for answer, judged in zip(answers, correct, strict=True) if answer == winner) / most
        for winner in winners
    ]
    return Majority(correct=sum(right) / len(winners), tied=len(winners) > 1, votes=sum(votes.values()))


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> Majority:
    """maj@k from the ``n // k`` disjoint runs of ``k`` samples, in order: their mean; ``tied`` where any was.

    Samples are exchangeable, so this has no bias for the vote of k of them; what ``n % k`` leaves over is not used.
    """
    check_k(k, len(answers))
    blocks = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    found = [majority(answers[block], correct[block]) for block in blocks]
    return Majority(
        correct=sum(one.correct for one in found) / len(found),
        tied=any(one.tied for one in found),
        votes=sum(one.votes for one in found),
    )
