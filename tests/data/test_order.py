"""The order of prompts: whole epochs, no repeats in a batch, no state."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))


def stream(order, batches):
    return [index for i in range(batches) for index in order.indices(i)]


@given(sizes=sizes, seed=st.integers(0, 3), epochs=st.integers(1, 6))
def test_every_epoch_holds_every_item_once(sizes, seed, epochs):
    n, batch = sizes
    indices = stream(PromptOrder(n, batch, seed), -(-n * epochs // batch))
    for epoch in range(epochs):
        assert sorted(indices[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(sizes=sizes, seed=st.integers(0, 3), i=st.integers(0, 200))
def test_no_batch_repeats_an_item(sizes, seed, i):
    n, batch = max(sizes), min(sizes)
    indices = PromptOrder(n, batch, seed).indices(i)
    assert len(indices) == len(set(indices)) == batch


@given(sizes=sizes, seed=st.integers(0, 3), calls=st.lists(st.integers(0, 60), max_size=8))
def test_a_batch_does_not_depend_on_earlier_calls(sizes, seed, calls):
    order = PromptOrder(*sizes, seed)
    for i in calls:
        assert order.indices(i) == PromptOrder(*sizes, seed).indices(i)


def test_all_small_cases():
    """Both rules for every batch size up to n, over 40 batches."""
    for n in range(1, 10):
        for batch in range(1, n + 1):
            batches = [PromptOrder(n, batch, 0).indices(i) for i in range(40)]
            assert all(len(set(indices)) == batch for indices in batches)
            indices = stream(PromptOrder(n, batch, 0), 40)
            for start in range(0, len(indices) - n + 1, n):
                assert sorted(indices[start : start + n]) == list(range(n))


def test_seed_and_epoch_change_the_order_and_the_process_does_not():
    indices = stream(PromptOrder(50, 10, 0), 10)
    assert indices[:50] not in (indices[50:], list(range(50)))
    assert indices != stream(PromptOrder(50, 10, 1), 10)
    assert PromptOrder(10, 4, 0).indices(2) == [4, 7, 5, 8], "pinned: a resumed run has the same order"
    code = "from kl_comedy.data import PromptOrder; print(PromptOrder(10, 4, 0).indices(2))"
    environment = os.environ | {"PYTHONHASHSEED": "123"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[4, 7, 5, 8]"


def test_items_are_spread_evenly_over_the_places_of_a_batch():
    """The swaps at an epoch's seam favour no item: chi-square of the place behind a seam, 4000 seeds."""
    n, seeds = 5, 4000
    counts = [0] * n
    for seed in range(seeds):
        counts[PromptOrder(n, 3, seed).indices(1)[2]] += 1
    chi_square = sum((count - seeds / n) ** 2 / (seeds / n) for count in counts)
    assert chi_square < 23.5, counts  # the 1e-4 quantile of 4 degrees of freedom


def test_impossible_orders_are_refused():
    for n, batch in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(UserError, match="at least one item"):
            PromptOrder(n, batch, 0)
    with pytest.raises(ValueError, match="counted from 0"):
        PromptOrder(3, 1, 0).indices(-1)
