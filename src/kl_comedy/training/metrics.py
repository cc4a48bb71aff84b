"""Metrics of an update: sums over micro-batches and ranks, each with its own denominator, reduced once at the end.

Names say estimator, direction and level. ``..._token`` is a mean over tokens, ``..._sequence`` a mean over completions
of the sum over tokens. Units are nats, except for total variation, which is a probability.

Legend: ``B`` rows, ``T`` completion tokens, ``N`` tokens inside the mask. pi is the policy with the learner's current
weights, mu the sampler; ``delta = log pi - log mu`` of a sampled token, ``rho = exp(delta)``.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.kl.estimators import k1, k2, k3
from kl_comedy.objective.policy_term import PolicyLossParts
from kl_comedy.records import FOREIGN_VERSION, Scored
from kl_comedy.training.distributed import Ranks
from kl_comedy.training.prepare import MicroBatch

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass

RATIO_PERCENTS = (1, 10, 50, 90, 99)
AGE_PERCENTS = (50, 90)
VERSIONS_REMEMBERED = 1024
"""Versions whose replacement time is stored: far more than any useful lag."""

_REDUCTIONS = {
    "mean": lambda total, count: total / count,
    "root_mean_square": lambda squares, count: math.sqrt(squares / count),
    "effective_sample_share": lambda total, squares, count: total * total / (squares * count) if squares > 0 else 0.0,
}


class MetricAccumulator:
    """Running sums, maxima and samples by metric name."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = {}
        self._maxima: dict[str, float] = {}
        self._samples: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, total: float | Tensor, count: float) -> None:
        """``name`` is the sum of all totals over the sum of all counts."""
        self._add("mean", name, total, count)

    def add_squares(self, name: str, squares: float | Tensor, count: float) -> None:
        """``name`` is the root mean square, from sums of squares."""
        self._add("root_mean_square", name, squares, count)

    def add_weights(self, name: str, weight_B: Tensor) -> None:
        """``name`` is Kish's effective sample size of all weights over their number: ``(sum w)^2 / (n sum w^2)``."""
        self._add("effective_sample_share", name, weight_B.sum(), weight_B.square().sum(), len(weight_B))

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._maxima[name] = max(self._maxima.get(name, -math.inf), float(value))

    def sample(self, name: str, values_N: Tensor) -> None:
        """Store values for their quantiles; ``*`` in ``name`` becomes the percentage, as in ``01``."""
        self._samples[name].append(values_N.cpu())

    def merged(self, ranks: Ranks) -> MetricAccumulator:
        """The sums of all ranks, added in the order of the ranks. Every rank must call."""
        if ranks.size == 1:
            return self
        merged = MetricAccumulator()
        for sums, maxima, samples in ranks.gather((self._sums, self._maxima, dict(self._samples))):
            for (reduction, name), terms in sums.items():
                merged._add(reduction, name, *terms)
            for name, value in maxima.items():
                merged.maximum(name, value)
            for name, values in samples.items():
                merged._samples[name] += values
        return merged

    def values(self) -> dict[str, float]:
        """The reduced metrics, without those whose count is 0."""
        return {
            **{name: _REDUCTIONS[kind](*terms) for (kind, name), terms in self._sums.items() if terms[-1]},
            **self._maxima,
            **{
                name.replace("*", f"{percent:02d}"): value
                for name, values in self._samples.items()
                for percent, value in _quantiles(torch.cat(values), RATIO_PERCENTS).items()
            },
        }

    def _add(self, reduction: str, name: str, *terms: float | Tensor) -> None:
        sums = self._sums.setdefault((reduction, name), [0.0] * len(terms))
        for position, term in enumerate(terms):
            sums[position] += float(term)


def _quantiles(values_N: Tensor, percents: Sequence[int]) -> dict[int, float]:
    """Nearest-rank quantiles by percentage: the smallest value that at least so many percent do not exceed."""
    ordered_N, n = values_N.sort().values, len(values_N)
    return {percent: float(ordered_N[math.ceil(percent / 100 * n) - 1]) for percent in percents}


def accumulate_tokens(metrics: MetricAccumulator, micro: MicroBatch, policy: TokenPass, *, version: int) -> None:
    """Divergence from the initial reference, entropy, and the policy against its sampler."""
    experience = micro.experience
    mask_BT, logp_BT = experience.mask_BT, policy.logp_BT.detach()
    accumulate_exact(metrics, mask_BT, policy)
    accumulate_estimates(metrics, mask_BT, torch.where(mask_BT, logp_BT - experience.ref_logp_BT, 0.0), policy.kl_BT)
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
    """Shares of tokens where the policy loss's bound and each policy correction acted."""
    tokens = float(mask_BT.sum())
    if parts.clipped_BT is not None:
        metrics.add("policy/clip_fraction", parts.clipped_BT.sum(), tokens)
    for name, weights in parts.weights.items():
        weight_BT = torch.where(mask_BT, weights.weight_BT, 0.0)
        metrics.add(f"policy/correction/{name}/truncated_share", (weights.truncated_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/masked_share", (weights.masked_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/weight_mean", weight_BT.double().sum(), tokens)
        metrics.maximum(f"policy/correction/{name}/weight_max", weight_BT.max())


@torch.no_grad()
def accumulate_exact(metrics: MetricAccumulator, mask_BT: Tensor, policy: TokenPass) -> None:
    """What a pass computed from full distributions, per token and per completion."""
    tokens, rows = float(mask_BT.sum()), float(mask_BT.shape[0])
    for token_name, sequence_name, value_BT in (
        ("kl/exact_reverse_token", "kl/exact_reverse_sequence", policy.kl_BT),
        ("kl/exact_forward_token", "kl/exact_forward_sequence", policy.forward_kl_BT),
        ("kl/total_variation_token", "kl/total_variation_sequence", policy.total_variation_BT),
        ("policy/entropy", "policy/entropy_sequence", policy.entropy_BT),
    ):
        if value_BT is not None:
            total = value_BT.double().sum()
            metrics.add(token_name, total, tokens)
            metrics.add(sequence_name, total, rows)


@torch.no_grad()
def accumulate_estimates(
    metrics: MetricAccumulator, mask_BT: Tensor, log_ratio_BT: Tensor, exact_BT: Tensor | None
) -> None:
    """k1, k2 and k3 of log-ratios that are 0 outside the mask and, where the exact reverse KL is given, their errors.

    The error of a token is its estimate minus the exact KL at its prefix; that of a completion is the sum over tokens.
    """
    tokens, rows = float(mask_BT.sum()), float(mask_BT.shape[0])
    metrics.maximum("kl/log_ratio_max", log_ratio_BT.abs().max())
    for name, estimator in (("k1_reverse", k1), ("k2_reverse", k2), ("k3_reverse", k3)):
        value_BT = estimator(log_ratio_BT.double())
        metrics.add(f"kl/{name}_token", value_BT.sum(), tokens)
        metrics.add(f"kl/{name}_sequence", value_BT.sum(), rows)
        if exact_BT is not None:
            error_BT = value_BT - exact_BT.double()
            metrics.add(f"kl_error/{name}_token", error_BT.sum(), tokens)
            metrics.add(f"kl_error/{name}_sequence", error_BT.sum(), rows)
            metrics.add_squares(f"kl_error/{name}_token_rms", error_BT.square().sum(), tokens)
            metrics.add_squares(f"kl_error/{name}_sequence_rms", error_BT.sum(1).square().sum(), rows)


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
    """The policy against its sampler: both divergences, ratio quantiles, effective sample size, staleness, mismatch.

    Tokens come from mu, so KL(mu || pi) is the mean of ``-delta`` (k1) or ``rho - 1 - delta`` (k3), and KL(pi || mu)
    the mean of ``rho delta`` (k1) or ``rho delta - rho + 1`` (k3).

    The mismatch is ``|delta|`` where it should be 0: of tokens that were sampled, with their whole completion before
    them, at the learner's ``version``. Tokens from another run's weights have no staleness.
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
    metrics.add_weights("policy/ess", delta_BT.double().sum(-1).exp())
    dated_BT = mask_BT & (versions_BT != FOREIGN_VERSION)
    metrics.add("policy/staleness", (version - versions_BT)[dated_BT].double().sum(), float(dated_BT.sum()))
    current_BT = mask_BT & (versions_BT == version).long().cumprod(1).bool()
    metrics.add("policy/equal_weights_share", current_BT.sum(), tokens)
    if bool(current_BT.any()):
        gap_N = delta_BT[current_BT].abs()
        metrics.add("policy/mismatch", gap_N.double().sum(), float(current_BT.sum()))
        metrics.maximum("policy/mismatch_max", gap_N.max())


def row_metrics(rows: Sequence[Scored]) -> dict[str, float]:
    """What needs no model: reward and its parts, verifier status, lengths, groups whose rewards are all equal."""
    rewards = torch.tensor([row.reward.value for row in rows], dtype=torch.float64)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        groups[row.rollout.group_id].add(row.reward.value)
        for name, value in row.reward.parts.items():
            parts[name].append(value)
    n = len(rows)
    status = Counter(row.reward.status for row in rows)
    return {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std(correction=0)),
        "train/length": sum(len(row.rollout.completion_ids) for row in rows) / n,
        "train/truncated_share": sum(row.rollout.stop_reason == "length" for row in rows) / n,
        "train/groups_without_signal": sum(len(values) == 1 for values in groups.values()) / len(groups),
        **{f"train/verifier_{name}": status[name] / n for name in ("unparseable", "timeout", "refused")},
        **{f"train/reward/{name}": sum(values) / len(values) for name, values in parts.items()},
    }


class VersionTimes:
    """When each version of the weights was replaced by the next."""

    def __init__(self) -> None:
        self._replaced: dict[int, float] = {}

    def replaced(self, version: int) -> None:
        """``version`` is out of date from now on."""
        self._replaced[version] = time.monotonic()
        self._replaced.pop(version - VERSIONS_REMEMBERED, None)

    def ages(self) -> dict[int, float]:
        """Seconds since each version was replaced."""
        now = time.monotonic()
        return {version: now - replaced for version, replaced in self._replaced.items()}

    def restore(self, ages: Mapping[int, float]) -> None:
        """The inverse of :meth:`ages`; time between a checkpoint and its resume does not count."""
        now = time.monotonic()
        self._replaced = {int(version): now - age for version, age in ages.items()}


def staleness_metrics(rows: Sequence[Scored], version: int, times: VersionTimes) -> dict[str, float]:
    """Quantiles and maximum of the tokens' ages in updates and in seconds. Empty where no token has an age.

    Seconds count from the replacement of the weights that sampled a token; they are 0 for the current ``version``,
    and left out where a replacement time is unknown.
    """
    tokens = Counter(chain.from_iterable(row.rollout.versions for row in rows))
    tokens.pop(FOREIGN_VERSION, None)
    if not tokens:
        return {}
    updates_N = torch.tensor([version - sampled for sampled in tokens.elements()], dtype=torch.float64)
    metrics = _age_statistics(updates_N, "policy/staleness_*")
    ages = {**times.ages(), version: 0.0}
    if ages.keys() >= tokens.keys():
        seconds_N = torch.tensor([ages[sampled] for sampled in tokens.elements()], dtype=torch.float64)
        metrics |= {"time/staleness": float(seconds_N.mean()), **_age_statistics(seconds_N, "time/staleness_*")}
    return metrics


def _age_statistics(age_N: Tensor, name: str) -> dict[str, float]:
    quantiles = {f"p{percent}": value for percent, value in _quantiles(age_N, AGE_PERCENTS).items()}
    return {name.replace("*", key): value for key, value in {**quantiles, "max": float(age_N.max())}.items()}
