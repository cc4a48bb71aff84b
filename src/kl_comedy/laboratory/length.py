"""Bias and variance against the length of a completion: enumerated, and by the Monte Carlo protocol of 2512.21852.

Bias is ``|E g - G*| / |G*|`` and variance the trace variance of one completion's gradient over ``|G*|^2``,
with ``G*`` the gradient of the sequence-level reverse KL. The paper's rounds each report ``|g_r - G*|``,
which noise alone keeps above zero; both that and an estimate without this floor are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.kl.oracle import Moments, Setting, Tree, effective_sample_share, sequence_kl, target_gradient, terms_loss
from kl_comedy.laboratory.configurations import OFF_POLICY, ON_POLICY, Terms
from kl_comedy.laboratory.many_losses import Rounds, Tables, enumerated, sampled_in_rounds
from kl_comedy.laboratory.policies import shared_setting

if TYPE_CHECKING:
    import pandas as pd

LENGTHS = tuple(range(5, 21))
DISTANCE = 0.5
STALENESS = 0.4
ROUNDS, SAMPLES = 200, 1000
"""The protocol of 2512.21852 Sec. 3.3."""
REGIMES: dict[str, tuple[Mapping[str, Terms], float]] = {
    "on_policy": (ON_POLICY, 0.0),
    "off_policy": (OFF_POLICY, STALENESS),
}


def length_study(
    *, lengths: Sequence[int] = LENGTHS, seeds: int = 3, sampled_seeds: int = 1,
    rounds: int = ROUNDS, samples: int = SAMPLES, done: Callable[[], None] = lambda: None,
) -> pd.DataFrame:  # fmt: skip
    """One row per regime, configuration, length, seed and method (``exact``, ``monte_carlo``).

    The first ``sampled_seeds`` policies are sampled too. ``done`` is called after each policy and length.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for length in lengths:
        for seed in range(seeds):
            for regime, (configurations, staleness) in REGIMES.items():
                tree = Tree.build(vocabulary=2, length=length, ends=False)
                setting = shared_setting(tree, seed=seed, distance=DISTANCE, staleness=staleness)
                facts = {"regime": regime, "length": length, "seed": seed}
                protocol = (rounds, samples) if seed < sampled_seeds else None
                rows += one_policy(setting, configurations, facts, protocol=protocol)
            done()
    return pd.DataFrame(rows)


MEMORY_LENGTHS = (5, 8, 11, 14)
PERSISTENCES = (0.0, 0.5, 0.7, 0.9, 0.97)


def memory_study(
    *, lengths: Sequence[int] = MEMORY_LENGTHS, persistences: Sequence[float] = PERSISTENCES, seeds: int = 5
) -> pd.DataFrame:
    """Exact bias on-policy of the token-level forms, by length and by how long the policy remembers.

    What they leave out is how early tokens change the KL still to come: nothing where it cannot be changed.
    """
    import pandas as pd

    configurations = {name: ON_POLICY[name] for name in ("k2 in loss", "k3 in loss")}
    rows: list[dict[str, Any]] = []
    for persistence in persistences:
        for length in lengths:
            for seed in range(seeds):
                tree = Tree.build(vocabulary=2, length=length, ends=False)
                setting = shared_setting(tree, seed=seed, distance=DISTANCE, persistence=persistence)
                facts = {"regime": "on_policy", "persistence": persistence, "length": length, "seed": seed}
                rows += one_policy(setting, configurations, facts, protocol=None)
    return pd.DataFrame(rows)


def one_policy(
    setting: Setting, configurations: Mapping[str, Terms], facts: Mapping[str, Any], *,
    protocol: tuple[int, int] | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The rows of one setting: enumerated, and sampled by ``protocol`` (rounds, samples) where given."""
    target_D = target_gradient(setting, "sequence_reverse")
    losses = {name: terms_loss(terms) for name, terms in configurations.items()}
    tables = Tables(setting)
    about = {**facts, "kl": sequence_kl(setting), "ess": effective_sample_share(setting)}
    exact = enumerated(tables, losses)
    rows = [{**about, "configuration": n, "method": "exact", **_exact(m, target_D)} for n, m in exact.items()]
    if protocol is not None:
        generator = torch.Generator().manual_seed(10_000 + setting.tree.length)
        found = sampled_in_rounds(tables, losses, rounds=protocol[0], samples=protocol[1], generator=generator)
        rows += [
            {**about, "configuration": n, "method": "monte_carlo", **_sampled(r, target_D)} for n, r in found.items()
        ]
    return rows


def _exact(moments: Moments, target_D: Tensor) -> dict[str, float]:
    return {
        "bias": moments.relative_bias(target_D),
        "variance": moments.variance / float(target_D.square().sum()),
        "cosine": moments.cosine(target_D),
    }


def _sampled(rounds: Rounds, target_D: Tensor) -> dict[str, float]:
    size = float(target_D.square().sum())
    off_RD = rounds.gradient_RD - target_D
    bias = debiased_norm(off_RD)
    naive = mean_interval(off_RD.norm(dim=1))
    variance = mean_interval(rounds.variance_R)
    scale = math.sqrt(size)
    return {
        "bias": bias[0] / scale, "bias_low": bias[1] / scale, "bias_high": bias[2] / scale,
        "naive_bias": naive[0] / scale, "naive_bias_low": naive[1] / scale, "naive_bias_high": naive[2] / scale,
        "variance": variance[0] / size, "variance_low": variance[1] / size, "variance_high": variance[2] / size,
    }  # fmt: skip


def mean_interval(values_R: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean over rounds with Student's interval."""
    middle = float(values_R.mean())
    half = t_quantile(len(values_R), confidence) * float(values_R.std()) / math.sqrt(len(values_R))
    return middle, middle - half, middle + half


def debiased_norm(off_RD: Tensor, confidence: float = 0.95) -> tuple[float, float, float]:
    """The norm of the mean of independent rows, without the part that their noise adds, with an interval.

    The squared norm is the mean inner product of different rows, which noise leaves unbiased; the interval
    is Student's over its jackknife. Negative squares are shown as zero.
    """
    count = len(off_RD)
    total_D = off_RD.sum(0)
    squares_R = off_RD.square().sum(1)

    whole = float(total_D.square().sum() - squares_R.sum()) / (count * (count - 1))
    left_RD = total_D - off_RD
    left_R = (left_RD.square().sum(1) - (squares_R.sum() - squares_R)) / ((count - 1) * (count - 2))
    spread = math.sqrt(float((left_R - left_R.mean()).square().sum()) * (count - 1) / count)
    half = t_quantile(count, confidence) * spread
    middle, low, high = (math.sqrt(max(value, 0.0)) for value in (whole, whole - half, whole + half))
    return middle, low, high


def t_quantile(count: int, confidence: float) -> float:
    """Student's two-sided quantile for ``count`` values."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, count - 1))
