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
    """The items of so many batches, one after the other."""
    items = []
    for number in range(batches):
        items.extend(order.indices(number))
    return items


@given(sizes=sizes, seed=st.integers(0, 3), epochs=st.integers(1, 6))
def test_every_epoch_holds_every_item_once(sizes, seed, epochs):
    n, batch = sizes
    indices = stream(PromptOrder(n, batch, seed), -(-n * epochs // batch))
    for epoch in range(epochs):
        assert sorted(indices[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(sizes=sizes, seed=st.integers(0, 3), i=st.integers(0, 200))
def test_no_batch_repeats_an_item(sizes, seed, i):
    items = max(sizes)
    batch = min(sizes)
    indices = PromptOrder(items, batch, seed).indices(i)
    assert len(indices) == batch
    assert len(set(indices)) == batch


@given(sizes=sizes, seed=st.integers(0, 3), calls=st.lists(st.integers(0, 60), max_size=8))
def test_a_batch_does_not_depend_on_earlier_calls(sizes, seed, calls):
    order = PromptOrder(*sizes, seed)
    for i in calls:
        assert order.indices(i) == PromptOrder(*sizes, seed).indices(i)


@pytest.mark.parametrize("items", range(1, 10))
def test_all_small_cases(items):
    """Both rules for every batch size up to the number of items, over 40 batches."""
    for batch in range(1, items + 1):
        order = PromptOrder(items, batch, 0)
        for number in range(40):
            assert len(set(order.indices(number))) == batch, (batch, number)
        indices = stream(order, 40)
        for start in range(0, len(indices) - items + 1, items):
            assert sorted(indices[start : start + items]) == list(range(items)), (batch, start)


def test_the_order_changes_with_the_epoch():
    indices = stream(PromptOrder(50, 10, 0), 10)
    first_epoch = indices[:50]
    assert first_epoch != indices[50:]
    assert first_epoch != list(range(50))


def test_the_order_changes_with_the_seed():
    assert stream(PromptOrder(50, 10, 0), 10) != stream(PromptOrder(50, 10, 1), 10)


def test_the_order_is_that_of_earlier_versions():
    """A run that is resumed has the same order."""
    assert PromptOrder(10, 4, 0).indices(2) == [4, 7, 5, 8]


def test_the_order_is_that_of_other_processes():
    code = "from kl_comedy.data import PromptOrder; print(PromptOrder(10, 4, 0).indices(2))"
    environment = os.environ | {"PYTHONHASHSEED": "123"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[4, 7, 5, 8]"


def test_items_are_spread_evenly_over_the_places_of_a_batch():
    """The swaps at an epoch's seam favour no item: chi-square of the place behind a seam, 4000 seeds."""
    items = 5
    seeds = 4000
    counts = [0] * items
    for seed in range(seeds):
        # Batches of 3 of 5 items: the third item of the second batch is the first of the next epoch.
        counts[PromptOrder(items, 3, seed).indices(1)[2]] += 1
    expected = seeds / items
    chi_square = sum((count - expected) ** 2 / expected for count in counts)
    # 4 degrees of freedom: larger with a probability of 1e-4.
    assert chi_square < 23.5, counts


@pytest.mark.parametrize(("items", "batch"), [(0, 1), (1, 0), (-1, 2)])
def test_impossible_orders_are_refused(items, batch):
    with pytest.raises(UserError, match="at least one item"):
        PromptOrder(items, batch, 0)


def test_a_batch_before_the_first_is_refused():
    with pytest.raises(ValueError, match="counted from 0"):
        PromptOrder(3, 1, 0).indices(-1)
