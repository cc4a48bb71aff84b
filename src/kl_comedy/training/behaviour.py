"""The policy against the weights that drew its samples: divergence, ratios, age, and the mismatch at equal weights.

Legend: ``B`` rows, ``T`` completion tokens. ``delta = log pi - log mu`` of a drawn token: pi the learner's weights now,
mu the sampler's log-prob when it drew the token. Nats.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.records import FOREIGN_VERSION, Scored

if TYPE_CHECKING:
    from kl_comedy.training.measure import Tally

AGE_QUANTILES = (0.5, 0.9)
VERSIONS_REMEMBERED = 1024
"""Versions whose replacement is dated: far more than any lag worth having."""


@torch.no_grad()
def tally_behaviour(
    tally: Tally, *, logp_BT: Tensor, behaviour_logp_BT: Tensor, versions_BT: Tensor, mask_BT: Tensor, version: int
) -> None:
    """Both divergences from drawn tokens, ratio quantiles, effective sample size, staleness, mismatch.

    Tokens come from mu, so KL(mu || pi) is a plain mean of ``-delta`` (k1) or ``exp(delta) - 1 - delta`` (k3), and
    KL(pi || mu) weights each token by ``rho = exp(delta)``: ``rho delta`` (k1), ``rho delta - rho + 1`` (k3).

    The mismatch is the gap where mu should be pi: on tokens all of whose prefix and themselves were drawn with the
    version that the learner holds. Tokens of another run's weights have no age.
    """
    tokens = float(mask_BT.sum())
    delta_BT = torch.where(mask_BT, logp_BT - behaviour_logp_BT, 0.0)
    delta_N = delta_BT[mask_BT].double()
    ratio_N = delta_N.exp()
    tally.add("kl/k1_behaviour_token", -delta_N.sum(), tokens)
    tally.add("kl/k3_behaviour_token", (torch.expm1(delta_N) - delta_N).sum(), tokens)
    tally.add("kl/k1_policy_behaviour_token", (ratio_N * delta_N).sum(), tokens)
    tally.add("kl/k3_policy_behaviour_token", (ratio_N * delta_N - torch.expm1(delta_N)).sum(), tokens)
    tally.maximum("policy/behaviour_gap_max", delta_BT.abs().max())
    tally.sample("policy/ratio_p*", ratio_N.float())
    omega_B = delta_BT.double().sum(-1).exp()
    tally.add("_omega", omega_B.sum(), 1.0)
    tally.add("_omega_square", omega_B.square().sum(), 1.0)
    dated_BT = mask_BT & (versions_BT != FOREIGN_VERSION)
    tally.add("policy/staleness", (version - versions_BT)[dated_BT].double().sum(), float(dated_BT.sum()))
    equal_BT = mask_BT & (versions_BT == version).long().cumprod(1).bool()
    tally.add("policy/equal_weights_share", equal_BT.sum(), tokens)
    if bool(equal_BT.any()):
        gap_N = delta_BT[equal_BT].abs()
        tally.add("policy/mismatch", gap_N.double().sum(), float(equal_BT.sum()))
        tally.maximum("policy/mismatch_max", gap_N.max())


class VersionClock:
    """When each version of the weights was replaced by the next."""

    def __init__(self) -> None:
        self._replaced: dict[int, float] = {}

    def replaced(self, version: int) -> None:
        """``version`` is out of date from now on."""
        self._replaced[version] = time.monotonic()
        self._replaced.pop(version - VERSIONS_REMEMBERED, None)

    def ages(self, now: float | None = None) -> dict[int, float]:
        """Seconds since each version was replaced."""
        now = time.monotonic() if now is None else now
        return {version: now - at for version, at in self._replaced.items()}

    def restore(self, ages: Mapping[int, float]) -> None:
        """Go on from :meth:`ages`; the time between a checkpoint and its resume does not count."""
        now = time.monotonic()
        self._replaced = {int(version): now - age for version, age in ages.items()}


def age_metrics(rows: Sequence[Scored], version: int, clock: VersionClock) -> dict[str, float]:
    """The histogram of token ages as quantiles and maximum, in updates and in seconds out of date.

    Seconds count from when the weights that drew a token were replaced: 0 while they are the learner's own. Empty where
    no token has an age.
    """
    drawn = Counter(chain.from_iterable(row.rollout.versions for row in rows))
    drawn.pop(FOREIGN_VERSION, None)
    if not drawn:
        return {}
    updates = Counter({version - own: count for own, count in drawn.items()})
    found = _histogram(updates, "policy/staleness_*")
    replaced = clock.ages()
    if all(own == version or own in replaced for own in drawn):
        seconds: Counter[Any] = Counter()
        for own, count in drawn.items():
            seconds[0.0 if own == version else replaced[own]] += count
        total = sum(age * count for age, count in seconds.items())
        found |= {"time/staleness": total / seconds.total(), **_histogram(seconds, "time/staleness_*")}
    return found


def _histogram(counts: Counter[Any], name: str) -> dict[str, float]:
    """Quantiles (the smallest age that so many tokens do not exceed) and maximum, in the place of the ``*``."""
    found = {}
    for share in AGE_QUANTILES:
        needed, seen = math.ceil(share * counts.total()), 0
        for age in sorted(counts):
            seen += counts[age]
            if seen >= needed:
                found[name.replace("*", f"p{round(100 * share)}")] = float(age)
                break
    return {**found, name.replace("*", "max"): float(max(counts))}
