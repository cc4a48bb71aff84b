"""The engine against its slow twin: what each update computes, and every tensor's change, in drawn configs.

The twin (update.py) computes a run as loops over the tokens of one unpadded sequence at a time, in float64: prompts,
draws, rewards, costs, advantages, losses, gradient, AdamW, references, coefficients, export. It is written from the
equations and the docs. Of the package it uses records, the parsed config and what a KL term's fields are called, and
nothing that computes; of the engine it takes the tokens of a completion, and draws its own to compare. Of a dialogue
it takes what the environment wrote, and what each row read.

Configs are drawn (draw.py) and trained by the engine in float64 (engine.py, a patch of torch for tests alone). Each
quantity of an update, and the change of each tensor, must agree to 1e-6 of its norm (compare.py). A failure prints the
first quantity that differs and a config made small (shrink.py). `make twin COUNT=1000 SEED=0` draws more.

For a new estimator, correction, advantage, policy loss or policy correction of this package:

1. its formula, for one token or one completion, in the table of kl_terms.py or algorithm.py;
2. its options in draw.py, at values that act on some tokens within a few updates;
3. a seed that draws it in DEFAULT_SEEDS: ``python -m tests.twin cover``.
"""

from unittest import mock

import pytest
from tests.twin import algorithm, kl_terms
from tests.twin.base import base_config
from tests.twin.compare import compare
from tests.twin.draw import built_in, covered, draw, draw_dialogues, draw_for_two, needed, needed_of_dialogues
from tests.twin.ranks import compare_two_ranks
from tests.twin.shrink import report

from kl_comedy.registry import ADVANTAGES, CORRECTIONS, ESTIMATORS, POLICY_CORRECTIONS, POLICY_LOSSES

DEFAULT_SEEDS = [
    *(5, 6, 8, 10, 21, 22, 23, 27, 32, 34, 52, 73, 75, 86, 98, 156, 162, 170, 175, 214, 235, 238, 244, 254, 270),
    *(277, 288, 301, 322, 337, 342, 345, 376, 396, 410, 433, 447, 460, 469, 482, 490, 493, 494, 509, 612, 660, 669),
    *(731, 779, 785, 801, 823, 865, 890, 900, 905, 959, 986),
]
"""Together they cover :func:`tests.twin.draw.needed`: `python -m tests.twin cover` finds such a list."""
DIALOGUE_SEEDS = (1, 2, 6, 7, 13, 16, 19, 29)
"""Together they cover :func:`tests.twin.draw.needed_of_dialogues`."""
SLOW_SEEDS = range(10_000, 10_040)
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
    missing = set(built_in(table)) - formulas
    assert not missing, f"{kind} without a slow formula: {sorted(missing)}; see CONTRIBUTING.md, the slow twin"


def test_the_default_seeds_cover_everything():
    names = set()
    for seed in DEFAULT_SEEDS:
        mapping, kill_at, _ = draw(seed)
        names |= covered(mapping, kill_at)
    missing = needed() - names
    assert not missing, f"no default seed has {sorted(missing)}; `python -m tests.twin cover` finds seeds that have"


def test_few_draws_are_refused():
    refused = [draw(seed)[2] for seed in range(25)]
    assert sum(refused) < len(refused)


@pytest.mark.parametrize("seed", DEFAULT_SEEDS)
def test_a_drawn_config_trains_as_the_twin_says(seed):
    check(seed)


def test_the_seeds_of_dialogues_cover_everything():
    names = set()
    for seed in DIALOGUE_SEEDS:
        mapping, kill_at, _ = draw_dialogues(seed)
        names |= covered(mapping, kill_at)
    missing = needed_of_dialogues() - names
    assert not missing, f"no seed of dialogues has {sorted(missing)}"


@pytest.mark.parametrize("seed", DIALOGUE_SEEDS)
def test_dialogues_train_as_the_twin_says(seed):
    """A tool writes between the policy's turns, and some rollouts go on in a row of another context."""
    mapping, _, _ = draw_dialogues(seed)
    difference = compare(mapping)
    assert difference is None, f"seed {seed}: {report(mapping, None, difference)}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_further_configs_train_as_the_twin_says(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("seed", range(3))
def test_two_processes_train_as_the_twin_says(seed, strategy):
    mapping, kill_at, _ = draw_for_two(seed, strategy)
    difference = compare_two_ranks(mapping, kill_at=kill_at)
    # Not made smaller: that takes minutes with two processes.
    assert difference is None, f"seed {seed}, interrupted before {kill_at}: {difference}\n{mapping}"


def test_a_difference_is_named_with_the_smallest_config():
    mapping = base_config()
    mapping["train"]["steps"] = 2
    mapping["optimizer"]["weight_decay"] = 0.1
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
