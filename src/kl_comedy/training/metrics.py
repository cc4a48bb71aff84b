"""Metrics of an update and of evaluation completions, summed over micro-batches and ranks, then reduced.

Names say estimator, direction and level. ``..._token`` is a mean over tokens, ``..._sequence`` a mean over completions
of the sum over tokens. Units are nats, except for total variation, which is a probability.

Legend: ``B`` rows, ``T`` completion tokens, ``N`` tokens inside the mask. pi is the policy with the learner's current
weights, mu the sampler; ``delta = log pi - log mu`` of a sampled token, ``rho = exp(delta)``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kl_comedy.config import Config, ModelConfig, load_config
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import kl_diagnostics
from kl_comedy.kl.estimators import k1, k2, k3
from kl_comedy.models import LoadedModel, Wanted, build_reference, load_model
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import Reference, check_tokens
from kl_comedy.objective.policy_term import PolicyLossParts
from kl_comedy.records import FOREIGN_VERSION, GOLD, Experience, Scored, groups_without_signal
from kl_comedy.rewards.base import failed, is_failed_part
from kl_comedy.tracking.tokens import STORED_ROWS, STORED_TOKENS, USES, TokenNumbers
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.loss import MicroBatch, MicroLoss
from kl_comedy.training.packing import Packer, model_inputs, pass_options, policy_inputs

if TYPE_CHECKING:
    from kl_comedy.kl import KLTerm
    from kl_comedy.models.types import TokenPass

RATIO_PERCENTS = (1, 10, 50, 90, 99)
AGE_PERCENTS = (50, 90)
NO_ADVANTAGE = 1e-9
"""Advantages this small are 0: the mean of equal rewards may differ from them by its rounding."""
Terms = Sequence["KLTerm"]


def _mean(total: float, count: float) -> float:
    return total / count


def _root_mean_square(squares: float, count: float) -> float:
    return math.sqrt(squares / count)


def _effective_sample_share(total: float, squares: float, count: float) -> float:
    """Kish's effective sample size over the number of samples: ``(sum w)^2 / (n sum w^2)``."""
    if squares > 0:
        return total * total / (squares * count)
    return 0.0


_REDUCTIONS: dict[str, Callable[..., float]] = {
    "mean": _mean,
    "root_mean_square": _root_mean_square,
    "effective_sample_share": _effective_sample_share,
}
"""From sums to a metric; the last sum is a count."""


class MetricAccumulator:
    """Running sums, maxima and samples by metric name.

    What is on a device is read when values are asked for, all of it at once: each read alone would hold up the host.
    """

    def __init__(self) -> None:
        self._terms: dict[tuple[str, str], list[list[float | Tensor]]] = {}
        self._candidates: dict[str, list[float | Tensor]] = defaultdict(list)
        self._samples: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, name: str, *terms: float | Tensor, reduction: str = "mean") -> None:
        """Add each term to its sum; the last term is a count. ``name`` is the ``reduction`` of all sums."""
        # Sums and counts, not means: micro-batches and ranks have different numbers of tokens.
        sums = self._terms.setdefault((reduction, name), [[] for _ in terms])
        for terms_of_sum, term in zip(sums, terms, strict=True):
            terms_of_sum.append(_in_float64(term))

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._candidates[name].append(_in_float64(value))

    def sample(self, name: str, values_N: Tensor) -> None:
        """Store values for their quantiles; ``*`` in ``name`` becomes the percentage, as in ``01``."""
        # Quantiles of parts cannot be combined into those of the whole, so that all values are kept.
        self._samples[name].append(values_N.cpu())

    def merged(self, ranks: Ranks) -> MetricAccumulator:
        """The sums of all ranks, added in the order of the ranks. Every rank must call."""
        if ranks.size == 1:
            return self
        merged = MetricAccumulator()
        # The order of the ranks, and so the rounding of the sums, is the same on every rank.
        for sums, maxima, samples in ranks.gather((*self._read(), dict(self._samples))):
            for (reduction, name), terms in sums.items():
                merged.add(name, *terms, reduction=reduction)
            for name, value in maxima.items():
                merged.maximum(name, value)
            for name, values in samples.items():
                merged._samples[name] += values
        return merged

    def values(self) -> dict[str, float]:
        """The reduced metrics, without those whose count is 0."""
        totals, maxima = self._read()
        reduced = {}
        for (reduction, name), sums in totals.items():
            count = sums[-1]
            if count:
                reduced[name] = _REDUCTIONS[reduction](*sums)
        for name, values in self._samples.items():
            for percent, value in _quantiles(torch.cat(values), RATIO_PERCENTS).items():
                reduced[name.replace("*", f"{percent:02d}")] = value
        return reduced | maxima

    def _read(self) -> tuple[dict[tuple[str, str], list[float]], dict[str, float]]:
        """All sums, and all maxima. What was on a device is on the host afterwards."""
        lists = [*self._candidates.values()]
        for sums in self._terms.values():
            lists += sums
        _read_together(lists)
        totals = {key: [_total(terms) for terms in sums] for key, sums in self._terms.items()}
        maxima = {}
        for name, candidates in self._candidates.items():
            maxima[name] = functools.reduce(max, map(float, candidates), -math.inf)
        return totals, maxima


def _in_float64(term: float | Tensor) -> float | Tensor:
    """A number, or a copy of it in float64 where it is: neither its graph nor a later change of it is kept."""
    if isinstance(term, Tensor):
        return term.detach().to(torch.float64, copy=True)
    return float(term)


def _read_together(lists: Sequence[list[float | Tensor]]) -> None:
    """Replace the tensors of all ``lists`` by their numbers, with one copy for each device."""
    places: dict[torch.device, list[tuple[list[float | Tensor], int]]] = defaultdict(list)
    tensors: dict[torch.device, list[Tensor]] = defaultdict(list)
    for terms in lists:
        for position, term in enumerate(terms):
            if isinstance(term, Tensor):
                places[term.device].append((terms, position))
                tensors[term.device].append(term.reshape(()))
    for device, values in tensors.items():
        for (terms, position), number in zip(places[device], torch.stack(values).cpu().tolist(), strict=True):
            terms[position] = number


def _total(terms: Sequence[float | Tensor]) -> float:
    # One after the other: sum() of later Pythons compensates, and a sum would depend on the version.
    return functools.reduce(operator.add, map(float, terms), 0.0)


def _quantiles(values_N: Tensor, percents: Sequence[int]) -> dict[int, float]:
    """Nearest-rank quantiles by percentage: the smallest value that at least so many percent do not exceed."""
    ordered_N = values_N.sort().values
    quantiles = {}
    for percent in percents:
        # A value that occurred, and not one between two: ratios may be infinite.
        rank = math.ceil(percent / 100 * len(ordered_N))
        quantiles[percent] = float(ordered_N[rank - 1])
    return quantiles


# --- of a micro-batch -------------------------------------------------------------------------------------------------


@torch.no_grad()
def accumulate_micro_batch(
    metrics: MetricAccumulator,
    micro: MicroBatch,
    policy: TokenPass,
    result: MicroLoss,
    terms: Mapping[str, KLTerm],
    *,
    version: int,
) -> None:
    """Everything that is measured of a micro-batch with a pass of the policy at ``version``."""
    experience = micro.experience
    logp_BT = policy.logp_BT
    mask_BT = experience.mask_BT
    tokens = mask_BT.sum()
    log_ratio_BT = torch.where(mask_BT, logp_BT - experience.ref_logp_BT, 0.0)
    accumulate_divergence(metrics, mask_BT, policy, log_ratio_BT)
    accumulate_in_float64(metrics, policy, mask_BT)
    accumulate_behaviour(metrics, experience, logp_BT, version)
    accumulate_policy(metrics, result.policy, mask_BT)
    log_probs = {"logp_BT": logp_BT, "behaviour_logp_BT": experience.behaviour_logp_BT, "mask_BT": mask_BT}
    # By position, because stored runs and tables have these names.
    for position, (name, term) in enumerate(terms.items()):
        # In float64: sums over thousands of tokens of terms that nearly cancel.
        metrics.add(f"kl_term/{position}/value_token", result.values[name].double().sum(), tokens)
        ref_logp_BT = micro.reference_of(term).logp_BT
        for key, value in kl_diagnostics(term, ref_logp_BT=ref_logp_BT, **log_probs).items():
            if key == "ratio_max":
                metrics.maximum(f"kl_term/{position}/ratio_max", value)
            else:
                # A share of this micro-batch, weighted by its tokens.
                metrics.add(f"kl_term/{position}/{key}", value * tokens, tokens)


@torch.no_grad()
def accumulate_reference(
    metrics: MetricAccumulator, name: str, micro: MicroBatch, passes: Mapping[str, TokenPass]
) -> None:
    """Divergences from a reference that is not the initial policy: k1, and the exact ones that the update computed."""
    # Every pass has the policy's log-probs; they are the same in all of them.
    policy = passes.get(name, passes["initial"])
    mask_BT = micro.experience.mask_BT
    ref_logp_BT = micro.references[name].logp_BT
    if name == "sampler":
        # What the sampler's kernels round otherwise than the learner's: the exact form is as exact as this is small.
        gap_N = (ref_logp_BT - micro.experience.behaviour_logp_BT)[mask_BT].abs()
        metrics.add("reference/sampler/mismatch", gap_N.double().sum(), len(gap_N))
        metrics.maximum("reference/sampler/mismatch_max", gap_N.max())
    log_ratio_BT = policy.logp_BT - ref_logp_BT
    divergences: dict[str, Tensor | None] = {"k1_reverse": torch.where(mask_BT, log_ratio_BT, 0.0)}
    if name in passes:
        # Only a pass against this reference has its exact divergences; that of the initial one has others.
        divergences["exact_reverse"] = policy.kl_BT
        divergences["exact_forward"] = policy.forward_kl_BT
    for divergence, value_BT in divergences.items():
        if value_BT is not None:
            total = value_BT.double().sum()
            metrics.add(_against(name, divergence, "token"), total, mask_BT.sum())
            metrics.add(_against(name, divergence, "sequence"), total, float(mask_BT.shape[0]))


def _against(reference: str, divergence: str, level: str) -> str:
    """The name of the metric of a divergence from a reference. Stored runs and tables have these names."""
    if reference == "initial":
        return f"kl/{divergence}_{level}"
    if reference == "teacher":
        return f"teacher/{divergence}_{level}"
    return f"reference/{reference}/{divergence}_{level}"


def measured_kl(values: Mapping[str, float], reference: str, level: str) -> float:
    """KL (nats) of the policy to a reference by the metrics of an update: exact where it was computed, else k1.

    Without past policies, that to the sampler is k3 weighted by the token's ratio; per ``sequence`` times the mean
    length.
    """
    exact = values.get(_against(reference, "exact_reverse", level))
    if exact is not None:
        return exact
    if reference == "sampler":
        length = values["train/length"] if level == "sequence" else 1.0
        return length * values["kl/k3_policy_behaviour_token"]
    # Always there, since k1 needs the sampled tokens only.
    return values[_against(reference, "k1_reverse", level)]


def accumulate_divergence(
    metrics: MetricAccumulator, mask_BT: Tensor, policy: TokenPass, log_ratio_BT: Tensor | None = None
) -> None:
    """Exact quantities of a pass; of log-ratios to the reference (0 outside the mask) k1, k2 and k3, and their errors.

    The error of a token is its estimate minus the exact KL at its prefix; that of a completion is the sum over tokens.
    """
    # Each total has two counts: per token, and per completion.
    tokens = mask_BT.sum()
    rows = float(mask_BT.shape[0])
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
    if log_ratio_BT is None:  # the tokens are of another policy, about which k1, k2 and k3 would say nothing
        return
    metrics.maximum("kl/log_ratio_max", log_ratio_BT.abs().max())
    for name, estimator in (("k1_reverse", k1), ("k2_reverse", k2), ("k3_reverse", k3)):
        value_BT = estimator(log_ratio_BT.double())
        metrics.add(f"kl/{name}_token", value_BT.sum(), tokens)
        metrics.add(f"kl/{name}_sequence", value_BT.sum(), rows)
        if policy.kl_BT is not None:
            # An estimator's error at a prefix; its root mean square is the noise that a term would add.
            error_BT = value_BT - policy.kl_BT.double()
            error_B = error_BT.sum(1)
            metrics.add(f"kl_error/{name}_token", error_BT.sum(), tokens)
            metrics.add(f"kl_error/{name}_sequence", error_BT.sum(), rows)
            metrics.add(f"kl_error/{name}_token_rms", error_BT.square().sum(), tokens, reduction="root_mean_square")
            metrics.add(f"kl_error/{name}_sequence_rms", error_B.square().sum(), rows, reduction="root_mean_square")


def accumulate_in_float64(metrics: MetricAccumulator, policy: TokenPass, mask_BT: Tensor) -> None:
    """The mass that truncated sampling kept, under the policy, and what it alone adds to the KL to the reference.

    With S the kept tokens, ``KL(pi_S || ref) = KL(pi_S || ref_S) - log ref(S)``. A learner that did not renormalize
    would have the kept mass as the mean of its ratios on fresh samples.
    """
    tokens = mask_BT.sum()
    if policy.log_kept_BT is not None:
        metrics.add("policy/kept_mass", policy.log_kept_BT[mask_BT].double().exp().sum(), tokens)
    if policy.reference_log_kept_BT is not None:
        metrics.add("kl/truncation_token", -policy.reference_log_kept_BT[mask_BT].double().sum(), tokens)


def accumulate_behaviour(metrics: MetricAccumulator, experience: Experience, logp_BT: Tensor, version: int) -> None:
    """The policy against its sampler: both divergences, ratio quantiles, effective sample size, staleness, mismatch.

    Tokens come from mu, so KL(mu || pi) is the mean of ``-delta`` (k1) or ``rho - 1 - delta`` (k3), and KL(pi || mu)
    the mean of ``rho delta`` (k1) or ``rho delta - rho + 1`` (k3).

    The mismatch is ``|delta|`` where it should be 0: of tokens that were sampled, with their whole completion before
    them, at the learner's ``version``. Tokens from another run's weights have no staleness.
    """
    mask_BT = experience.mask_BT
    versions_BT = experience.policy_version_BT
    tokens = mask_BT.sum()
    # 0 outside the mask, where the padded log-probs mean nothing.
    delta_BT = torch.where(mask_BT, logp_BT - experience.behaviour_logp_BT, 0.0)
    delta_N = delta_BT[mask_BT].double()
    ratio_N = delta_N.exp()
    # The ratio of the whole completion: its effective sample size shrinks with length.
    weight_B = delta_BT.double().sum(-1).exp()
    # expm1, because rho - 1 of nearly equal policies would lose the digits that count.
    metrics.add("kl/k1_behaviour_token", -delta_N.sum(), tokens)
    metrics.add("kl/k3_behaviour_token", (torch.expm1(delta_N) - delta_N).sum(), tokens)
    metrics.add("kl/k1_policy_behaviour_token", (ratio_N * delta_N).sum(), tokens)
    metrics.add("kl/k3_policy_behaviour_token", (ratio_N * delta_N - torch.expm1(delta_N)).sum(), tokens)
    metrics.maximum("policy/behaviour_gap_max", delta_BT.abs().max())
    metrics.sample("policy/ratio_p*", ratio_N.float())
    metrics.add(
        "policy/ess", weight_B.sum(), weight_B.square().sum(), len(weight_B), reduction="effective_sample_share"
    )
    # Another run counts its own updates: their difference to ours is no age.
    dated_BT = mask_BT & (versions_BT != FOREIGN_VERSION)
    metrics.add("policy/staleness", (version - versions_BT)[dated_BT].double().sum(), dated_BT.sum())
    # The product of a row is 1 up to its first token of another version: later tokens have a prefix that the
    # learner's weights did not draw, and with in-flight updates a cache that they did not fill. A token that an
    # environment wrote has no version, and ends nothing.
    is_current_BT = (versions_BT == version) | ~mask_BT
    current_BT = mask_BT & is_current_BT.long().cumprod(1).bool()
    metrics.add("policy/equal_weights_share", current_BT.sum(), tokens)
    if bool(current_BT.any()):
        gap_N = delta_BT[current_BT].abs()
        metrics.add("policy/mismatch", gap_N.double().sum(), len(gap_N))
        metrics.maximum("policy/mismatch_max", gap_N.max())


def accumulate_policy(metrics: MetricAccumulator, parts: PolicyLossParts, mask_BT: Tensor) -> None:
    """Shares of tokens where the policy loss's bound and each policy correction acted."""
    tokens = mask_BT.sum()
    if parts.clipped_BT is not None:
        metrics.add("policy/clip_fraction", parts.clipped_BT.sum(), tokens)
    for name, weights in parts.weights.items():
        weight_BT = torch.where(mask_BT, weights.weight_BT, 0.0)
        metrics.add(f"policy/correction/{name}/truncated_share", (weights.truncated_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/masked_share", (weights.masked_BT & mask_BT).sum(), tokens)
        metrics.add(f"policy/correction/{name}/weight_mean", weight_BT.double().sum(), tokens)
        metrics.maximum(f"policy/correction/{name}/weight_max", weight_BT.max())


# --- of the tokens of an update's first rows --------------------------------------------------------------------------


@torch.no_grad()
def token_numbers(micro: MicroBatch, policy: TokenPass, result: MicroLoss) -> dict[int, TokenNumbers]:
    """What a run stores of the tokens of its first rows: those in this micro-batch, by their position in the update.

    They come from the pass that the update itself takes, and its metrics are sums of them.
    """
    experience = micro.experience
    k1_BT = policy.logp_BT - experience.ref_logp_BT
    delta_BT = policy.logp_BT - experience.behaviour_logp_BT
    use_BT = _uses(micro, result.policy)
    letters = "".join(USES)
    numbers = {}
    for row, position in enumerate(micro.positions):
        if position >= STORED_ROWS:
            continue
        # Completions are padded on the right, so that their tokens are the first ones.
        length = min(int(experience.real_BT[row].sum()), STORED_TOKENS)
        exact = None
        if policy.kl_BT is not None:
            exact = policy.kl_BT[row, :length].double().tolist()
        numbers[position] = TokenNumbers(
            k1_reverse=k1_BT[row, :length].double().tolist(),
            log_ratio=delta_BT[row, :length].double().tolist(),
            exact_reverse=exact,
            use="".join(letters[use] for use in use_BT[row, :length].tolist()),
        )
    return numbers


def _uses(micro: MicroBatch, parts: PolicyLossParts) -> Tensor:
    """What the loss did with each token, ``[B, T]``: its place in :data:`kl_comedy.tracking.tokens.USES`."""
    experience = micro.experience
    use_BT = torch.zeros_like(experience.ids_BT)
    # In this order: what comes later leaves less of the token in the loss.
    if parts.clipped_BT is not None:
        use_BT[parts.clipped_BT] = 1
    use_BT[experience.advantage_BT.abs() < NO_ADVANTAGE] = 2
    for weights in parts.weights.values():
        use_BT[weights.masked_BT] = 3
    use_BT[experience.weight_B == 0] = 4
    use_BT[experience.real_BT & ~experience.mask_BT] = 5
    return use_BT


# --- of an update -----------------------------------------------------------------------------------------------------


def row_metrics(rows: Sequence[Scored]) -> dict[str, float]:
    """What needs no model: reward, its parts, gold verdict, verifier status, lengths, groups of equal rewards."""
    count = len(rows)
    rewards = torch.tensor([row.reward.value for row in rows], dtype=torch.float64)
    means: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.reward.parts.items():
            if is_failed_part(name):  # only failures have it: its mean would always be 1
                continue
            # The gold verdict is no part of the reward that is trained on.
            if name.partition("/")[0] == GOLD:
                means[f"train/{name}"].append(value)
            else:
                means[f"train/reward/{name}"].append(value)
    of_dialogues = {}
    # Dialogues say of each token whether the policy drew it.
    if all(row.rollout.trained for row in rows):
        of_dialogues = {
            "train/turns": sum(len(row.rollout.turn_ends) for row in rows) / count,
            "train/rows": sum(len(row.rollout.rows) for row in rows) / count,
            "train/environment_tokens": sum(row.rollout.trained.count(False) for row in rows) / count,
            "train/environment_failed": sum(row.rollout.stop_reason == "failed" for row in rows) / count,
        }
    groups = {row.rollout.group_id for row in rows}
    status = Counter(row.reward.status for row in rows)
    status["failed"] = sum(failed(row.reward) for row in rows)  # these have the status refused, too
    return {
        "train/reward": float(rewards.mean()),
        # The population's standard deviation exists for one row too.
        "train/reward_std": float(rewards.std(correction=0)),
        "train/length": sum(len(row.rollout.drawn_ids) for row in rows) / count,
        "train/truncated_share": sum(row.rollout.stop_reason == "length" for row in rows) / count,
        "train/groups_without_signal": len(groups_without_signal(rows)) / len(groups),
        **{f"train/verifier_{name}": status[name] / count for name in ("unparseable", "timeout", "refused", "failed")},
        **{name: sum(values) / len(values) for name, values in means.items()},
        **of_dialogues,
    }


def time_metrics(rows: Sequence[Scored], of_batch: Mapping[str, float], learn_s: float) -> dict[str, float]:
    """Seconds of an update, and what follows from them. ``of_batch`` holds those of sampling at a batch's first use."""
    # Later updates from a batch sample nothing, and their times are 0 and not absent.
    times = {"time/generate": 0.0, "time/score": 0.0, "time/wait": 0.0} | dict(of_batch)
    tokens = sum(len(row.rollout.drawn_ids) for row in rows)
    total = times["time/wait"] + learn_s
    tokens_per_second = 0.0
    idle_share = 0.0
    if total > 0:
        tokens_per_second = tokens / total
        idle_share = times["time/wait"] / total
    return {
        **times,
        "time/learn": learn_s,
        "time/step": total,
        "time/tokens_per_second": tokens_per_second,
        "time/trainer_idle_share": idle_share,
    }


def critic_metrics(micro_batches: Sequence[MicroBatch], ranks: Ranks = SINGLE_PROCESS) -> dict[str, float]:
    """Mean, mean target and explained variance of the old values of an update. Empty without a critic.

    ``1 - Var(target - value) / Var(target)`` over tokens: 1 is a perfect critic, 0 a constant (or equal targets).
    """
    if micro_batches[0].old_value_BT is None:
        return {}
    pairs = []
    for micro in micro_batches:
        if micro.empty:
            continue
        assert micro.old_value_BT is not None
        assert micro.value_target_BT is not None
        mask_BT = micro.experience.mask_BT
        pairs.append((micro.old_value_BT[mask_BT].cpu(), micro.value_target_BT[mask_BT].cpu()))
    values: list[Tensor] = []
    targets: list[Tensor] = []
    for pairs_of_rank in ranks.gather(pairs):
        for value_N, target_N in pairs_of_rank:
            values.append(value_N)
            targets.append(target_N)
    # Over all ranks at once: an explained variance cannot be averaged.
    value_N = torch.cat(values).double()
    target_N = torch.cat(targets).double()
    spread = target_N.var(correction=0)
    unexplained = (target_N - value_N).var(correction=0)
    explained = 0.0
    if float(spread) != 0:  # equal targets leave nothing to explain
        explained = float(1 - unexplained / spread)
    return {
        "value/mean": float(value_N.mean()),
        "value/target_mean": float(target_N.mean()),
        "value/explained_variance": explained,
    }


def staleness_metrics(
    rows: Sequence[Scored], version: int, replaced_at: Mapping[int, float], now: float
) -> dict[str, float]:
    """Quantiles and maximum of the tokens' ages in updates and in seconds. Empty where no token has an age.

    Seconds count from when the weights that sampled a token were replaced (``replaced_at``, by version; 0 for the
    current ``version``); left out where one is unknown.
    """
    versions: list[int] = []
    for row in rows:
        versions += [drawn_by for drawn_by in row.rollout.versions if drawn_by != FOREIGN_VERSION]
    if not versions:
        return {}
    seconds = {old_version: now - replaced for old_version, replaced in replaced_at.items()}
    seconds[version] = 0.0
    ages = {"policy/staleness_*": [float(version - drawn_by) for drawn_by in versions]}
    # A resumed run of an earlier version does not know when its old weights were replaced.
    if seconds.keys() >= set(versions):
        ages["time/staleness_*"] = [seconds[drawn_by] for drawn_by in versions]
    metrics = {}
    for name, values in ages.items():
        age_N = torch.tensor(values, dtype=torch.float64)
        for percent, value in _quantiles(age_N, AGE_PERCENTS).items():
            metrics[name.replace("*", f"p{percent}")] = value
        metrics[name.replace("*", "max")] = float(age_N.max())
        if name == "time/staleness_*":
            metrics["time/staleness"] = float(age_N.mean())
    return metrics


# --- of evaluation completions ----------------------------------------------------------------------------------------


def completion_metrics(
    config: Config, *, loaded: LoadedModel, reference: Reference | None, ranks: Ranks = SINGLE_PROCESS
) -> Callable[[Sequence[Scored]], dict[str, float]] | None:
    """A function from completions to their means of KL, total variation and entropy; None where ``eval.kl`` is off.

    Without a reference, entropy only. All ranks call it. Both distributions are taken at ``rollout.temperature``, as in
    training, of the whole vocabulary. k1, k2 and k3 are about the policy that sampled the tokens: only where evaluation
    samples at it too, and does not truncate.
    """
    if not config.eval.kl:
        return None
    packer = Packer.of(config, loaded, ranks)
    options = pass_options(config, loaded)
    has_reference = reference is not None
    wanted = Wanted(entropy=True, kl=has_reference, forward_kl=has_reference, total_variation=has_reference)
    samples_this_policy = config.eval.temperature == config.rollout.temperature and not config.eval.sampling.is_on

    @torch.no_grad()
    def measure(rows: Sequence[Scored]) -> dict[str, float]:
        metrics = MetricAccumulator()
        for packed in packer.micro_batches(rows):
            other = None if reference is None else reference.forward_pass(**model_inputs(packed))
            policy = token_pass(loaded.model, options, wanted, **policy_inputs(packed), reference=other)
            # This rank only keeps step with the others; the rows are counted there.
            if packed.empty:
                continue
            log_ratio_BT = None
            if other is not None and samples_this_policy:
                log_ratio_BT = policy.logp_BT - other.logp_BT
            accumulate_divergence(metrics, packed.mask_BT, policy, log_ratio_BT)
        return metrics.merged(ranks).values()

    return measure


def load_eval_reference(config: Config, loaded: LoadedModel) -> Reference | None:
    """The model that ``eval.reference`` names, to which evaluations measure the KL of ``loaded``.

    None where it names none, or where ``eval.kl`` is off. Raises :class:`UserError` where it cannot be loaded, or where
    its tokens or the rows of its head are not those of ``loaded``.
    """
    named = config.eval.reference
    if named is None or not config.eval.kl:
        return None
    try:
        other = load_model(_reference_model(config.model, named))
    except UserError as error:
        raise UserError(f"eval.reference: {error}") from error
    check_tokens(other, loaded, "eval.reference", named)
    # Models with the same tokens may pad their heads to different sizes.
    other_head_VH, _ = head_weights(other.model)
    head_VH, _ = head_weights(loaded.model)
    other_rows = other_head_VH.shape[0]
    rows = head_VH.shape[0]
    if other_rows != rows:
        raise bad_value("eval.reference", named, f"a model with a head of {rows} rows", f"it has {other_rows}")
    # "teacher" is the kind of reference that is a model of its own, whether or not it teaches.
    return build_reference("teacher", loaded, config, teacher=other)


def _reference_model(evaluated: ModelConfig, named: str) -> ModelConfig:
    """The ``model`` of the config where ``named`` is a YAML file, else that source.

    Without an adapter, which starts as the identity, and with the settings of the evaluated model that change
    rounding: a difference of rounding would count as KL.
    """
    if named.endswith((".yaml", ".yml")):
        model = load_config(named).model
    else:
        model = ModelConfig(source=named)
    return dataclasses.replace(
        model,
        dtype=evaluated.dtype,
        device=evaluated.device,
        attention=evaluated.attention,
        gradient_checkpointing=False,
        lora=None,
        # Code of the reference runs only where the evaluated model allows code.
        trust_remote_code=evaluated.trust_remote_code,
    )
