"""Bias, cosine and variance against the distance between policy and reference, enumerated, on-policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.kl.oracle import Setting, Tree, expected_gradient, sequence_kl, target_gradient, terms_loss
from kl_comedy.laboratory.configurations import CLAMPED, K2_LOSS, K3_LOSS, ON_POLICY, Terms
from kl_comedy.laboratory.many_losses import Tables, enumerated
from kl_comedy.laboratory.policies import shared_setting

if TYPE_CHECKING:
    import pandas as pd

DISTANCES = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
TREE = Tree.build(vocabulary=3, length=6, ends=False)
VANISHING = 1e-12
"""A gradient this small against the target is rounding, and has no direction."""

REPORTED_DISTANCES = (0.01, 0.1, 0.3, 1.0, 2.0)
REPORTED_GAPS: dict[str, tuple[float, ...]] = {
    "k2 in loss against the sequence reverse KL": (0.1, 1.3, 4.3, 31.0, 182.0),
    "k3 in loss against the sequence forward KL": (0.2, 2.1, 6.6, 26.0, 46.0),
}
"""Percent, as an independent replication of 2506.09477 reports them over 27 sequences, one instance each."""
_GAPS: dict[str, tuple[Terms, str]] = {
    "k2 in loss against the sequence reverse KL": (K2_LOSS, "sequence_reverse"),
    "k3 in loss against the sequence forward KL": (K3_LOSS, "sequence_forward"),
}


def distance_study(
    *, distances: Sequence[float] = DISTANCES, seeds: int = 20, done: Callable[[], None] = lambda: None
) -> pd.DataFrame:
    """One row per configuration, distance and seed; biases and variances relative to ``G*`` (see ``length``).

    ``cosine`` is NaN where the expected gradient is zero. ``done`` is called after each distance.
    """
    import pandas as pd

    losses = {name: terms_loss(terms) for name, terms in {**ON_POLICY, **CLAMPED}.items()}
    rows: list[dict[str, Any]] = []
    for distance in distances:
        for seed in range(seeds):
            setting = shared_setting(TREE, seed=seed, distance=distance)
            target_D = target_gradient(setting, "sequence_reverse")
            size = float(target_D.square().sum())
            about = {"distance": distance, "seed": seed, "kl": sequence_kl(setting)}
            for name, moments in enumerated(Tables(setting), losses).items():
                vanishes = float(moments.gradient_D.norm()) < VANISHING * size**0.5
                rows.append({
                    **about, "configuration": name, "bias": moments.relative_bias(target_D),
                    "cosine": float("nan") if vanishes else moments.cosine(target_D),
                    "variance": moments.variance / size,
                })  # fmt: skip
        done()
    return pd.DataFrame(rows)


def gap_study(*, distances: Sequence[float] = REPORTED_DISTANCES, seeds: int = 100) -> pd.DataFrame:
    """The replication's table: tabular policies, three tokens, three steps, 27 sequences; gaps in percent.

    The reported numbers are one instance; ours are ``seeds`` of them, so that they can be placed in a range.
    """
    import pandas as pd

    tree = Tree.build(vocabulary=3, length=3, ends=False)
    rows = []
    for distance in distances:
        for seed in range(seeds):
            setting = Setting.random(tree, regime="on_policy", seed=seed, distance=distance)
            for name, (terms, target) in _GAPS.items():
                bias = expected_gradient(setting, terms).relative_bias(target_gradient(setting, target))
                rows.append({"gap": name, "distance": distance, "seed": seed, "percent": 100 * bias})
    return pd.DataFrame(rows)


def gap_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Ours beside theirs: median and the range of 90% of the instances."""
    import pandas as pd

    rows = []
    for (name, distance), group in frame.groupby(["gap", "distance"], sort=False):
        reported = REPORTED_GAPS[str(name)][REPORTED_DISTANCES.index(float(str(distance)))]
        low, middle, high = group.percent.quantile([0.05, 0.5, 0.95])
        rows.append({
            "gap": name, "logit distance": distance, "reported, %": reported, "ours (median), %": middle,
            "ours, 5% to 95%": f"{low:.2g} to {high:.3g}",
            "instances at or above the reported, %": 100 * float((group.percent >= reported).mean()),
        })  # fmt: skip
    return pd.DataFrame(rows)
