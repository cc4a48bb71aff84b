"""Metrics of an update: sums over micro-batches with their own denominators, reduced once at the end.

Names say estimator, direction and level. ``..._token`` is a mean over tokens, ``..._sequence`` a mean
over completions of the sum over tokens; in nats, but for total variation, which is a probability.

The policy against the weights that drew its samples: divergence, ratios, age, and the mismatch at equal weights.

Legend: ``B`` rows, ``T`` completion tokens. ``delta = log pi - log mu`` of a drawn token: pi the learner's weights now,
mu the sampler's log-prob when it drew the token. Nats.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl.estimators import k1, k2, k3
from kl_comedy.objective.policy_term import PolicyLossParts
from kl_comedy.records import FOREIGN_VERSION, Scored
from kl_comedy.training.distributed import World
from kl_comedy.training.prepare import MicroBatch

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass


PERCENTS = (1, 10, 50, 90, 99)
_SAMPLED = {"k1_reverse": k1, "k2_reverse": k2, "k3_reverse": k3}


class MetricAccumulator:
    """Running sums, sums of squares, maxima and samples; :meth:`values` divides each sum by its own count, then takes
    roots, and quantiles of the samples."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._squares: dict[str, float] = defaultdict(float)
        self._counts: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}
        self._samples: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, total: float | Tensor, count: float) -> None:
        self._sums[name] += float(total)
        self._counts[name] += count

    def add_squares(self, name: str, total: float | Tensor, count: float) -> None:
        """``total`` is a sum of squares; what comes out under ``name`` is their root mean square."""
        self._squares[name] += float(total)
        self._counts[name] += count

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._maxima[name] = max(self._maxima.get(name, float("-inf")), float(value))

    def sample(self, name: str, values_N: Tensor) -> None:
        """Keep values for their quantiles; ``*`` in ``name`` becomes the percentage, as in ``01``."""
        self._samples[name].append(values_N.cpu())

    def merged(self, world: World) -> MetricAccumulator:
        """The metrics of all ranks together, on every rank; sums are taken in the order of the ranks."""
        if world.size == 1:
            return self
        whole = MetricAccumulator()
        own = (self._sums, self._squares, self._counts, self._maxima, dict(self._samples))
        for sums, squares, counts, maxima, samples in world.gather(own):
            for mine, theirs in ((whole._sums, sums), (whole._squares, squares), (whole._counts, counts)):
                for name, value in theirs.items():
                    mine[name] += value
            for name, value in maxima.items():
                whole.maximum(name, value)
            for name, kept in samples.items():
                whole._samples[name] += kept
        return whole

    def count(self, name: str) -> float:
        return self._counts[name]

    def values(self) -> dict[str, float]:
        means = {name: total / self._counts[name] for name, total in self._sums.items() if self._counts[name]}
        roots = {name: (x / self._counts[name]) ** 0.5 for name, x in self._squares.items() if self._counts[name]}
        quantiles = {
            name.replace("*", f"{percent:02d}"): value
            for name, kept in self._samples.items()
            for percent, value in _quantiles(torch.cat(kept)).items()
        }
        return {**means, **roots, **self._maxima, **quantiles}


def _quantiles(values_N: Tensor) -> dict[int, float]:
    """Nearest-rank quantiles: each is a value that occurs, and that so large a share does not exceed."""
    ordered_N, n = values_N.sort().values, len(values_N)
    return {percent: float(ordered_N[math.ceil(percent / 100 * n) - 1]) for percent in PERCENTS}


def accumulate_tokens(metrics: MetricAccumulator, micro: MicroBatch, seen: TokenPass, *, version: int) -> None:
    """Divergence from the initial reference, entropy, and the policy against its sampler."""
    experience = micro.experience
    mask_BT = experience.mask_BT
    with torch.no_grad():
        logp_BT = seen.logp_BT.detach()
        log_ratio_BT = torch.where(mask_BT, logp_BT - experience.ref_logp_BT, 0.0)
        accumulate_exact(metrics, mask_BT, seen)
        accumulate_estimates(metrics, mask_BT, log_ratio_BT, seen.kl_BT)
    accumulate_behaviour(
        metrics,
        logp_BT=logp_BT,
        behaviour_logp_BT=experience.behaviour_logp_BT,
        versions_BT=experience.policy_version_BT,
        mask_BT=mask_BT,
        version=version,
    )


@torch.no_grad()
def accumulate_policy(metrics: MetricAccumulator, parts: PolicyLossParts, mask_BT: Tensor) -> None:
    """What the policy loss's bound and each policy correction did, as shares of tokens: nothing is bounded silently."""
    tokens = float(mask_BT.sum())
    if parts.clipped_BT is not None:
        metrics.add("policy/clip_fraction", parts.clipped_BT.sum(), tokens)
    for name, found in parts.weights.items():
        weight_BT = torch.where(mask_BT, found.weight_BT, 0.0)
        metrics.add(f"policy/correction/{name}/truncated_share", (found.truncated_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/masked_share", (found.masked_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/weight_mean", weight_BT.double().sum(), tokens)
        metrics.maximum(f"policy/correction/{name}/weight_max", weight_BT.max())


@torch.no_grad()
def accumulate_exact(metrics: MetricAccumulator, mask_BT: Tensor, seen: TokenPass) -> None:
    """Means of what a pass has from full distributions, per token and per completion."""
    tokens, rows = float(mask_BT.sum()), float(mask_BT.shape[0])
    for name, exact_BT in (
        ("exact_reverse", seen.kl_BT),
        ("exact_forward", seen.forward_kl_BT),
        ("total_variation", seen.total_variation_BT),
    ):
        if exact_BT is not None:
            total = exact_BT.double().sum()
            metrics.add(f"kl/{name}_token", total, tokens)
            metrics.add(f"kl/{name}_sequence", total, rows)
    if seen.entropy_BT is not None:
        total = seen.entropy_BT.double().sum()
        metrics.add("policy/entropy", total, tokens)
        metrics.add("policy/entropy_sequence", total, rows)


@torch.no_grad()
def accumulate_estimates(
    metrics: MetricAccumulator, mask_BT: Tensor, log_ratio_BT: Tensor, exact_BT: Tensor | None
) -> None:
    """k1, k2, k3 of the log-ratios, zero outside the mask; with the exact reverse KL, also what they miss it by.

    The error of a token is its estimate less the exact KL at its prefix; that of a completion is the sum.
    """
    tokens, rows = float(mask_BT.sum()), float(mask_BT.shape[0])
    metrics.maximum("kl/log_ratio_max", log_ratio_BT.abs().max())
    for name, estimator in _SAMPLED.items():
        value_BT = estimator(log_ratio_BT.double())
        metrics.add(f"kl/{name}_token", value_BT.sum(), tokens)
        metrics.add(f"kl/{name}_sequence", value_BT.sum(), rows)
        if exact_BT is not None:
            error_BT = value_BT - exact_BT.double()
            metrics.add(f"kl_error/{name}_token", error_BT.sum(), tokens)
            metrics.add(f"kl_error/{name}_sequence", error_BT.sum(), rows)
            metrics.add_squares(f"kl_error/{name}_token_rms", error_BT.square().sum(), tokens)
            metrics.add_squares(f"kl_error/{name}_sequence_rms", error_BT.sum(1).square().sum(), rows)


def effective_sample_share(values: dict[str, float], rows: int, micro_batches: int) -> dict[str, float]:
    """Fold the ratio sums into ``policy/ess``: Kish's effective sample size over the number of rows."""
    total = values.pop("_omega") * micro_batches
    squares = values.pop("_omega_square") * micro_batches
    return {**values, "policy/ess": total * total / (squares * rows) if squares > 0 else 0.0}


def row_metrics(rows: Sequence[Scored]) -> dict[str, float]:
    """What is known before any pass: reward, its parts, verifier status, lengths, groups without signal."""
    values = torch.tensor([row.reward.value for row in rows], dtype=torch.float64)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.rollout.group_id].add(row.reward.value)
        for name, value in row.reward.parts.items():
            parts[name].append(value)
    n = len(rows)
    metrics = {
        "train/reward": float(values.mean()),
        "train/reward_std": float(values.std(correction=0)),
        "train/length": sum(len(row.rollout.completion_ids) for row in rows) / n,
        "train/truncated_share": sum(row.rollout.stop_reason == "length" for row in rows) / n,
        "train/groups_without_signal": sum(len(seen) == 1 for seen in groups.values()) / len(groups),
    }
    for status in ("unparseable", "timeout", "refused"):
        metrics[f"train/verifier_{status}"] = sum(row.reward.status == status for row in rows) / n
    for name, seen in parts.items():
        metrics[f"train/reward/{name}"] = sum(seen) / len(seen)
    return metrics


AGE_QUANTILES = (0.5, 0.9)
VERSIONS_REMEMBERED = 1024
"""Versions whose replacement is dated: far more than any lag worth having."""


@torch.no_grad()
def accumulate_behaviour(
    metrics: MetricAccumulator,
    *,
    logp_BT: Tensor,
    behaviour_logp_BT: Tensor,
    versions_BT: Tensor,
    mask_BT: Tensor,
    version: int,
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
    metrics.add("kl/k1_behaviour_token", -delta_N.sum(), tokens)
    metrics.add("kl/k3_behaviour_token", (torch.expm1(delta_N) - delta_N).sum(), tokens)
    metrics.add("kl/k1_policy_behaviour_token", (ratio_N * delta_N).sum(), tokens)
    metrics.add("kl/k3_policy_behaviour_token", (ratio_N * delta_N - torch.expm1(delta_N)).sum(), tokens)
    metrics.maximum("policy/behaviour_gap_max", delta_BT.abs().max())
    metrics.sample("policy/ratio_p*", ratio_N.float())
    omega_B = delta_BT.double().sum(-1).exp()
    metrics.add("_omega", omega_B.sum(), 1.0)
    metrics.add("_omega_square", omega_B.square().sum(), 1.0)
    dated_BT = mask_BT & (versions_BT != FOREIGN_VERSION)
    metrics.add("policy/staleness", (version - versions_BT)[dated_BT].double().sum(), float(dated_BT.sum()))
    equal_BT = mask_BT & (versions_BT == version).long().cumprod(1).bool()
    metrics.add("policy/equal_weights_share", equal_BT.sum(), tokens)
    if bool(equal_BT.any()):
        gap_N = delta_BT[equal_BT].abs()
        metrics.add("policy/mismatch", gap_N.double().sum(), float(equal_BT.sum()))
        metrics.maximum("policy/mismatch_max", gap_N.max())


class VersionTimes:
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


def staleness_metrics(rows: Sequence[Scored], version: int, clock: VersionTimes) -> dict[str, float]:
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
