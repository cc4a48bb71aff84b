"""The engine against its slow twin: what each update computes, and every tensor's change, in drawn configs."""

from unittest import mock

import pytest
from tests.twin import algorithm, kl_terms
from tests.twin.base import base_config
from tests.twin.compare import compare
from tests.twin.draw import covered, draw, needed
from tests.twin.shrink import report

from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, POLICY_CORRECTIONS, POLICY_LOSSES

DEFAULT_SEEDS = [
    *range(23),
    *(73, 179, 217, 236, 259, 335, 345, 772, 830, 1129, 1305, 1330, 1442),
]
"""Together they cover :func:`tests.twin.draw.needed`: `python -m tests.twin cover` finds such a list."""
SLOW_SEEDS = range(10_000, 10_300)
SLOWLY = {
    "estimators": (ESTIMATORS, kl_terms.SAMPLED.keys() | kl_terms.EXACT.keys() | set(kl_terms.TOP_K)),
    "corrections": (CORRECTIONS, kl_terms.CORRECTIONS.keys()),
    "advantages": (ADVANTAGES, algorithm.ADVANTAGES.keys()),
    "policy_losses": (POLICY_LOSSES, algorithm.POLICY_LOSSES.keys()),
    "policy_corrections": (POLICY_CORRECTIONS, algorithm.POLICY_CORRECTIONS.keys()),
}


def check(seed):
    mapping, kill_at, _ = draw(seed)
    difference = compare(mapping, kill_at=kill_at)
    assert difference is None, f"seed {seed}: {report(mapping, kill_at, difference)}"


@pytest.mark.parametrize("kind", SLOWLY)
def test_every_registered_part_has_a_slow_formula(kind):
    table, formulas = SLOWLY[kind]
    # Plugins that other tests load are of no run.
    built_in = {name for name in table.names() if table.get(name).fn.__module__.startswith("kl_comedy.")}
    missing = built_in - formulas
    assert not missing, f"{kind} without a slow formula: {sorted(missing)}; see CONTRIBUTING.md, the slow twin"


def test_the_default_seeds_cover_everything():
    names = set()
    for seed in DEFAULT_SEEDS:
        mapping, kill_at, _ = draw(seed)
        names |= covered(mapping, kill_at)
    missing = needed() - names
    assert not missing, f"no default seed has {sorted(missing)}; `python -m tests.twin cover` finds seeds that have"


def test_few_draws_are_refused():
    refused = [draw(seed)[2] for seed in range(60)]
    assert sum(refused) < len(refused)


@pytest.mark.parametrize("seed", DEFAULT_SEEDS)
def test_a_drawn_config_trains_as_the_twin_says(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_further_configs_train_as_the_twin_says(seed):
    check(seed)


def test_a_difference_is_named_with_the_smallest_config():
    mapping = base_config()
    mapping["train"]["steps"] = 2
    mapping["optimizer"]["options"] = {"weight_decay": 0.1}
    mapping["kl"] = [
        {"estimator": "k2", "placement": "loss", "beta": 0.1},
        {"estimator": "k3", "placement": "loss", "beta": 0.2, "correction": "token"},
    ]
    with mock.patch.dict(kl_terms.SAMPLED, {"k3": lambda log_ratio: log_ratio}):
        difference = compare(mapping)
        assert difference.quantity == "gradient of lm_head.weight"
        text = report(mapping, None, difference)
    assert "update 0: gradient of lm_head.weight" in text
    assert "estimator: k3" in text
    assert "k2" not in text
    assert "weight_decay" not in text
