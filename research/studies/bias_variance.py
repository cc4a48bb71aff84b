"""Bias and variance of KL terms against the length of a completion and the distance to the reference.

``length_study`` enumerates and repeats the Monte Carlo protocol of 2512.21852, ``memory_study`` and ``distance_study``
enumerate on-policy, ``gap_study`` repeats the table of a replication. Bias is ``|E g - G*| / |G*|`` and variance the
trace variance of one completion's gradient over ``|G*|^2``, with ``G*`` the gradient of the sequence-level reverse KL.
The paper's rounds each report ``|g_r - G*|``, which noise alone keeps above zero; both that and an estimate without
this floor are given.

Legend: ``N`` prefixes, ``V`` tokens, ``D`` parameters, ``R`` rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm
from kl_comedy.kl.oracle import (
    Instance,
    InstanceSettings,
    Loss,
    Moments,
    Tree,
    effective_sample_share,
    exact_moments_by_loss,
    expected_gradient,
    gradients_by_loss,
    prefix_log_probs,
    sequence_kl,
    target_gradient,
    terms_loss,
)

if TYPE_CHECKING:
    import pandas as pd


PARAMETERS = 6
PERSISTENCE = 0.7
"""Correlation of a prefix's features with those of the prefix one token longer."""


def shared_setting(
    tree: Tree, *, seed: int, distance: float, staleness: float = 0.0, persistence: float = PERSISTENCE
) -> Instance:
    """Policy, reference and sampler as three parameter vectors over the same features of the prefix.

    Logits are ``features[h, v] @ theta``; the reference has ``theta + distance * u``, the sampler
    ``theta + staleness * w``, where ``theta``, ``u`` and ``w`` are random directions of norm ``sqrt(D)``.
    Features have variance ``1 / D``, so a logit of the policy has variance one, and one of the reference is
    ``distance`` away from it (standard deviation, nats). Along a completion features keep their variance and are
    correlated by ``persistence`` from one prefix to the next, so the KL per token is the same at every length, and
    later tokens depend on earlier ones. The same seed gives the same policy at every length, extended by longer trees,
    and distances scale one direction.
    """
    generator = torch.Generator().manual_seed(seed)
    normal_CD = torch.randn(3, PARAMETERS, generator=generator, dtype=torch.float64)
    size_C1 = torch.linalg.vector_norm(normal_CD, dim=1, keepdim=True)
    theta_D, away_D, stale_D = math.sqrt(PARAMETERS) * normal_CD / size_C1

    # A stationary walk down the tree: x' = c x + sqrt(1 - c^2) noise has the variance of x, and correlation c with it.
    # Level by level, so that a longer tree draws the same numbers first.
    levels: list[Tensor] = []
    for depth in range(tree.length):
        shape = (tree.width(depth), tree.vocabulary, PARAMETERS)
        features = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(PARAMETERS)
        if levels:
            inherited = levels[-1].repeat_interleave(tree.branching, 0)
            features = persistence * inherited + math.sqrt(1 - persistence**2) * features
        levels.append(features)
    features_NVD = torch.cat(levels)
    sampler_logp_NV = prefix_log_probs(features_NVD @ (theta_D + staleness * stale_D))
    return Instance(
        tree=tree,
        features_NVD=features_NVD,
        theta_D=theta_D,
        ref_logp_NV=prefix_log_probs(features_NVD @ (theta_D + distance * away_D)),
        sampler_logp_NV=sampler_logp_NV,
        recorded_logp_NV=sampler_logp_NV,
        reward_N2=torch.zeros(tree.prefixes, 2, dtype=torch.float64),
    )


Terms = tuple[KLTerm, ...]

# The names below are columns of stored CSV files and of published tables: a form keeps its name.
NO_KL: Terms = ()
K1_REWARD: Terms = (KLTerm("k1", credit="total"),)
K3_REWARD: Terms = (KLTerm("k3", credit="total"),)
K1_LOSS: Terms = (KLTerm("k1", placement="loss"),)
K2_LOSS: Terms = (KLTerm("k2", placement="loss"),)
K3_LOSS: Terms = (KLTerm("k3", placement="loss"),)
RB_TOKEN: Terms = (KLTerm("exact", placement="loss"),)
RB_FULL: Terms = (KLTerm("exact", credit="to_go"),)
RB_PER_DECISION: Terms = (KLTerm("exact", placement="loss", correction="prefix_previous"),)
RATIO_K3: Terms = (KLTerm("k3", placement="loss", correction="token"),)

ON_POLICY: dict[str, Terms] = {
    "k1 in reward, total": K1_REWARD,
    "k1 in reward, to go": (KLTerm("k1", credit="to_go"),),
    "k1 in loss": K1_LOSS,
    "k2 in loss": K2_LOSS,
    "k3 in reward": K3_REWARD,
    "k3 in loss": K3_LOSS,
    "k1 in both": K1_REWARD + K1_LOSS,
    "k3 in both": K3_REWARD + K3_LOSS,
    "exact KL in loss (rb/token)": RB_TOKEN,
    "exact KL to go (rb/full)": RB_FULL,
}
"""On-policy: what the papers compare, and the exact forms."""

OFF_POLICY: dict[str, Terms] = {
    "k1 in reward, bare": K1_REWARD,
    "k3 in reward, bare": K3_REWARD,
    "k1 in loss, bare": K1_LOSS,
    "k2 in loss, bare": K2_LOSS,
    "k3 in loss, bare": K3_LOSS,
    "k1 in reward x token ratio": (KLTerm("k1", credit="total", correction="token"),),
    "k3 in loss x token ratio": RATIO_K3,
    "exact KL in loss (rb/token)": RB_TOKEN,
    "k1 x sequence ratio": (KLTerm("k1", credit="total", correction="sequence"),),
    "k1 x prefix ratio (per decision)": (KLTerm("k1", correction="prefix"),),
    "exact KL x prefix ratio (rb/per_decision)": RB_PER_DECISION,
}
"""Off-policy: bare forms, token ratios, and the unbiased ones."""

CLAMPED: dict[str, Terms] = {
    "k3 in loss, clamped as in verl": (KLTerm("k3", placement="loss", input_clamp=20.0, output_clamp=10.0),),
    "k2 in loss, clamped as in OpenRLHF": (KLTerm("k2", placement="loss", output_clamp=10.0),),
    "k3 in loss, clamped at 1": (KLTerm("k3", placement="loss", output_clamp=1.0),),
}
"""Estimates clamped at a bound, beyond which they have no gradient."""

HALF_OF_BOTH: Terms = (KLTerm("k3", credit="total", beta=0.5), KLTerm("k3", placement="loss", beta=0.5))

OPTIMIZED: dict[str, Terms] = {
    "no KL": NO_KL,
    **ON_POLICY,
    "k1 in reward, own token": (KLTerm("k1", credit="own"),),
    "k3 in both, half of beta each": HALF_OF_BOTH,
    "k3 in loss x token ratio": RATIO_K3,
    "k3 of the completion in loss": (KLTerm("k3", level="sequence", placement="loss"),),
    "k1 x sequence ratio": (KLTerm("k1", credit="total", correction="sequence"),),
    "k1 frozen at rollout x sequence ratio": (KLTerm("k1", credit="total", correction="sequence", anchor="behaviour"),),
    "exact KL x prefix ratio (rb/per_decision)": RB_PER_DECISION,
}
"""The forms that :mod:`research.studies.optimum` optimizes until they stop."""

RECOVERING: dict[str, Terms] = {
    "no KL": NO_KL,
    "k1 in reward": K1_REWARD,
    "k1 in loss": K1_LOSS,
    "k2 in loss": K2_LOSS,
    "k3 in reward": K3_REWARD,
    "k3 in loss": K3_LOSS,
    "k3 in both": K3_REWARD + K3_LOSS,
    "exact KL to go (rb/full)": RB_FULL,
    "exact forward KL in loss": (KLTerm("exact_forward", placement="loss"),),
}
"""The forms that are tested for bringing a lost mode back."""

LENGTHS = tuple(range(5, 21))
DISTANCE = 0.5
STALENESS = 0.4
# The protocol of 2512.21852 Sec. 3.3.
ROUNDS = 200
SAMPLES = 1000

# Form and staleness of each regime; on-policy the sampler is the policy.
REGIMES: dict[str, tuple[Mapping[str, Terms], float]] = {
    "on_policy": (ON_POLICY, 0.0),
    "off_policy": (OFF_POLICY, STALENESS),
}


def length_study(
    *,
    lengths: Sequence[int] = LENGTHS,
    seeds: int = 3,
    sampled_seeds: int = 1,
    rounds: int = ROUNDS,
    samples: int = SAMPLES,
    done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:
    """One row per regime, configuration, length, seed and method (``exact``, ``monte_carlo``).

    The first ``sampled_seeds`` policies are sampled too. ``done`` is called after each policy and length.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for length, seed in itertools.product(lengths, range(seeds)):
        for regime, (configurations, staleness) in REGIMES.items():
            tree = Tree.build(vocabulary=2, length=length, ends=False)
            setting = shared_setting(tree, seed=seed, distance=DISTANCE, staleness=staleness)
            facts = {"regime": regime, "length": length, "seed": seed}
            is_sampled = seed < sampled_seeds
            protocol = (rounds, samples) if is_sampled else None
            rows += one_policy(setting, configurations, facts, protocol=protocol)
        done()
    return pd.DataFrame(rows)


MEMORY_LENGTHS = (5, 8, 11, 14)
PERSISTENCES = (0.0, 0.5, 0.7, 0.9, 0.97)


def memory_study(
    *, lengths: Sequence[int] = MEMORY_LENGTHS, persistences: Sequence[float] = PERSISTENCES, seeds: int = 5
) -> pd.DataFrame:
    """Exact on-policy bias of the token-level forms, by length and by correlation of features along a completion.

    These forms leave out how early tokens change the KL still to come, which is nothing where tokens are independent.
    """
    import pandas as pd

    configurations = {name: ON_POLICY[name] for name in ("k2 in loss", "k3 in loss")}
    rows: list[dict[str, Any]] = []
    for persistence, length, seed in itertools.product(persistences, lengths, range(seeds)):
        tree = Tree.build(vocabulary=2, length=length, ends=False)
        setting = shared_setting(tree, seed=seed, distance=DISTANCE, persistence=persistence)
        facts = {"regime": "on_policy", "persistence": persistence, "length": length, "seed": seed}
        rows += one_policy(setting, configurations, facts, protocol=None)
    return pd.DataFrame(rows)


def one_policy(
    setting: Instance,
    configurations: Mapping[str, Terms],
    facts: Mapping[str, Any],
    *,
    protocol: tuple[int, int] | None,
) -> list[dict[str, Any]]:
    """The rows of one setting: enumerated, and sampled by ``protocol`` (rounds, samples) where given."""
    target_D = target_gradient(setting, "sequence_reverse")
    losses = {name: terms_loss(terms) for name, terms in configurations.items()}
    facts = {**facts, "kl": sequence_kl(setting), "ess": effective_sample_share(setting)}
    rows: list[dict[str, Any]] = []
    for name, moments in exact_moments_by_loss(setting, losses).items():
        rows.append({**facts, "configuration": name, "method": "exact", **relative_figures(moments, target_D)})
    if protocol is None:
        return rows

    rounds, samples = protocol
    # Apart from the seeds of policies, so that the completions are independent of the policy.
    generator = torch.Generator().manual_seed(10_000 + setting.tree.length)
    sampled = sampled_in_rounds(setting, losses, rounds=rounds, samples=samples, generator=generator)
    target_square = float(target_D.square().sum())
    target_norm = math.sqrt(target_square)
    for name, (gradient_RD, variance_R) in sampled.items():
        error_RD = gradient_RD - target_D
        rows.append(
            {
                **facts,
                "configuration": name,
                "method": "monte_carlo",
                **_with_interval("bias", debiased_norm(error_RD), target_norm),
                # The paper's: the mean of norms, which noise raises.
                **_with_interval("naive_bias", mean_interval(error_RD.norm(dim=1)), target_norm),
                **_with_interval("variance", mean_interval(variance_R), target_square),
            }
        )
    return rows


def _with_interval(name: str, interval: tuple[float, float, float], scale: float) -> dict[str, float]:
    """Three columns: the value and the ends of its interval, over ``scale``."""
    middle, low, high = interval
    return {name: middle / scale, f"{name}_low": low / scale, f"{name}_high": high / scale}


COMPLETIONS_AT_ONCE = 2**14
"""Completions whose gradients are in memory at once."""


def sampled_in_rounds(
    setting: Instance, losses: Mapping[str, Loss], *, rounds: int, samples: int, generator: torch.Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """``rounds`` independent batches of ``samples`` completions; all losses see the same completions.

    Returns by loss the mean gradient of each round ``[R, D]``, and the unbiased trace variance of one completion's
    gradient within it ``[R]``.
    """
    # Whole rounds, because a round's variance needs all of its completions.
    rounds_at_once = max(1, COMPLETIONS_AT_ONCE // samples)
    means: dict[str, list[Tensor]] = {name: [] for name in losses}
    variances: dict[str, list[Tensor]] = {name: [] for name in losses}
    for start in range(0, rounds, rounds_at_once):
        count = min(rounds_at_once, rounds - start)
        completions = setting.tree.sample(setting.sampler_logp_NV, count * samples, generator)
        for name, gradient_BD in gradients_by_loss(setting, losses, completions):
            gradient_RSD = gradient_BD.reshape(count, samples, -1)  # S: the completions of a round
            means[name].append(gradient_RSD.mean(1))
            variances[name].append(gradient_RSD.var(1).sum(-1))
    return {name: (torch.cat(means[name]), torch.cat(variances[name])) for name in losses}


def relative_figures(moments: Moments, target_D: Tensor) -> dict[str, float]:
    """Bias and cosine against a target, and the variance of one completion's gradient, over the target's square."""
    return {
        "bias": moments.relative_bias(target_D),
        "variance": moments.variance / float(target_D.square().sum()),
        "cosine": moments.cosine(target_D),
    }


def mean_interval(values_R: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean over rounds with Student's interval: middle, low, high."""
    count = len(values_R)
    middle = float(values_R.mean())
    half = t_quantile(count, confidence) * float(values_R.std()) / math.sqrt(count)
    return middle, middle - half, middle + half


def debiased_norm(off_RD: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """The norm of the mean of independent rows, without the part that their noise adds: middle, low, high.

    The squared norm is the mean inner product of different rows, which noise leaves unbiased; the interval
    is Student's over its jackknife. Negative squares are shown as zero.
    """
    count = len(off_RD)
    total_D = off_RD.sum(0)
    squares_R = off_RD.square().sum(1)
    # |sum_r x_r|^2 - sum_r |x_r|^2 is the sum over pairs of different rows.
    whole = float(total_D.square().sum() - squares_R.sum()) / (count * (count - 1))

    # The same without row r, for each r.
    without_RD = total_D - off_RD
    without_R = (without_RD.square().sum(1) - (squares_R.sum() - squares_R)) / ((count - 1) * (count - 2))
    spread = math.sqrt(float((without_R - without_R.mean()).square().sum()) * (count - 1) / count)
    half = t_quantile(count, confidence) * spread
    return _root(whole), _root(whole - half), _root(whole + half)


def _root(square: float) -> float:
    return math.sqrt(max(square, 0.0))


def t_quantile(count: int, confidence: float) -> float:
    """Student's two-sided quantile for ``count`` values."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, count - 1))


DISTANCES = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
TREE = Tree.build(vocabulary=3, length=6, ends=False)
VANISHING = 1e-12
"""A gradient this small against the target is rounding, and has no direction."""


def distance_study(
    *, distances: Sequence[float] = DISTANCES, seeds: int = 20, done: Callable[[], None] = lambda: None
) -> pd.DataFrame:
    """One row per configuration, distance and seed; biases and variances relative to ``G*``.

    ``cosine`` is NaN where the expected gradient is zero. ``done`` is called after each distance.
    """
    import pandas as pd

    losses = {name: terms_loss(terms) for name, terms in {**ON_POLICY, **CLAMPED}.items()}
    rows: list[dict[str, Any]] = []
    for distance in distances:
        for seed in range(seeds):
            setting = shared_setting(TREE, seed=seed, distance=distance)
            target_D = target_gradient(setting, "sequence_reverse")
            facts = {"distance": distance, "seed": seed, "kl": sequence_kl(setting)}
            for name, moments in exact_moments_by_loss(setting, losses).items():
                row = {**facts, "configuration": name, **relative_figures(moments, target_D)}
                target_norm = float(target_D.square().sum()) ** 0.5
                if float(moments.gradient_D.norm()) < VANISHING * target_norm:
                    row["cosine"] = math.nan
                rows.append(row)
        done()
    return pd.DataFrame(rows, columns=["distance", "seed", "kl", "configuration", "bias", "cosine", "variance"])


REPORTED_DISTANCES = (0.01, 0.1, 0.3, 1.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class ReportedGap:
    """A row of the replication's table: terms, the target, and percent at each of :data:`REPORTED_DISTANCES`."""

    terms: Terms
    target: str
    percent: tuple[float, ...]


REPORTED_GAPS = {
    "k2 in loss against the sequence reverse KL": ReportedGap(
        terms=K2_LOSS, target="sequence_reverse", percent=(0.1, 1.3, 4.3, 31.0, 182.0)
    ),
    "k3 in loss against the sequence forward KL": ReportedGap(
        terms=K3_LOSS, target="sequence_forward", percent=(0.2, 2.1, 6.6, 26.0, 46.0)
    ),
}
"""As an independent replication of 2506.09477 reports them over 27 sequences, one instance each."""


def gap_study(*, distances: Sequence[float] = REPORTED_DISTANCES, seeds: int = 100) -> pd.DataFrame:
    """The replication's table: tabular policies, three tokens, three steps, 27 sequences; gaps in percent.

    The reported numbers are one instance; ours are ``seeds`` of them, so that they can be placed in a range.
    """
    import pandas as pd

    # As the replication has it: tabular, and not the shared features of the other studies.
    tree = Tree.build(vocabulary=3, length=3, ends=False)
    rows = []
    for distance, seed in itertools.product(distances, range(seeds)):
        setting = Instance.random(tree, InstanceSettings(regime="on_policy", seed=seed, distance=distance))
        for name, gap in REPORTED_GAPS.items():
            bias = expected_gradient(setting, gap.terms).relative_bias(target_gradient(setting, gap.target))
            rows.append({"gap": name, "distance": distance, "seed": seed, "percent": 100 * bias})
    return pd.DataFrame(rows)


def gap_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Our gaps beside the reported ones: median and the range of 90% of the instances."""
    import pandas as pd

    rows = []
    for (name, distance), group in frame.groupby(["gap", "distance"], sort=False):
        # pandas types a key of groupby as a scalar of any kind.
        column = REPORTED_DISTANCES.index(float(str(distance)))
        reported = REPORTED_GAPS[str(name)].percent[column]
        low, middle, high = group.percent.quantile([0.05, 0.5, 0.95])
        rows.append(
            {
                "gap": name,
                "logit distance": distance,
                "reported, %": reported,
                "ours (median), %": middle,
                "ours, 5% to 95%": f"{low:.2g} to {high:.3g}",
                "instances at or above the reported, %": 100 * float((group.percent >= reported).mean()),
            }
        )
    return pd.DataFrame(rows)
