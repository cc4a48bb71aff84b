"""The rollout buffer: no prompt is lost or used twice, and nothing older than allowed is used."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.data import PromptOrder
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.asynchronous import BufferLimits, RolloutBuffer

GROUP = 2


def scored(index, versions):
    prompt = Prompt(problem=Problem(id=str(index), text="", answer=""), text="", token_ids=(1,))
    rollout = Rollout(
        prompt=prompt,
        group_id=0,
        completion_ids=(1,) * len(versions),
        logps=(0.0,) * len(versions),
        versions=tuple(versions),
        stop_reason="eos",
        text="",
    )
    return Scored(rollout=rollout, reward=Reward(value=0.0))


def plain(rows):
    """What a checkpoint keeps of scored completions; :func:`rich` makes them again."""
    return [(row.rollout.prompt.problem.id, row.rollout.versions) for row in rows]


def rich(packed):
    return [scored(int(index), versions) for index, versions in packed]


def order_prefix(order, count, batch_size):
    """The first ``count`` prompts of the order, which comes in batches."""
    n_batches = math.ceil(count / batch_size)
    indices = []
    for n in range(n_batches):
        indices += order.indices(n)
    return Counter(indices[:count])


class Simulation:
    """A learner and a sampler that take turns as a sequence of choices says; the sampler is first in, first out."""

    def __init__(self, limits, n_prompts, seed, in_flight):
        self.limits = limits
        self.in_flight = in_flight
        self.order = PromptOrder(n_prompts, limits.prompts_per_batch, seed)
        self.buffer = RolloutBuffer(limits, self.order.indices)
        self.iteration = 0
        self.version = 0
        self.drawing = None
        """The request that the sampler is at, and the version at which it began; None where it is idle."""
        self.used = []
        self.ages = []

    def begin(self):
        """The sampler asks for a request, unless it has one."""
        if self.drawing is not None:
            return
        request = self.buffer.next_request(self.version)
        if request:
            self.drawing = (request, self.version)

    def finish(self):
        """The sampler answers its request; the newest weights have reached it where they change in flight."""
        if self.drawing is None:
            return
        request, first_version = self.drawing
        self.drawing = None
        last_version = self.version if self.in_flight else first_version
        rows = []
        for index in request.indices:
            for _ in range(GROUP):
                rows.append(scored(index, (first_version, last_version)))
        self.buffer.arrive(request.number, rows, request.indices)

    def learn(self):
        """One update; a batch is taken where the last one is used up. Whether anything happened."""
        if self.iteration == self.limits.iterations:
            return False
        if self.version % self.limits.updates == 0:
            groups = self.buffer.take(self.version)
            if groups is None:
                return False
            assert len(groups) == self.limits.prompts_per_batch
            for group in groups:
                assert {row.rollout.prompt.problem.id for row in group.rows} == {str(group.index)}
                oldest = min(min(row.rollout.versions) for row in group.rows)
                self.ages.append(self.version - oldest)
                self.used.append(group.index)
        self.version += 1
        self.iteration = self.version // self.limits.updates
        return True

    def resume(self):
        """Kill everything; begin again from the buffer's state."""
        state = self.buffer.snapshot(plain)
        self.buffer = RolloutBuffer(self.limits, self.order.indices)
        self.buffer.restore(state, rich)
        self.drawing = None

    def assert_every_prompt_is_in_one_place(self):
        """Each prompt that was taken from the order is used, returned, ready or pending, and only one of these."""
        places = Counter(self.used)
        places.update(self.buffer.returned)
        places.update(group.index for group in self.buffer.ready)
        for request in self.buffer.pending.values():
            places.update(request.indices)
        n_requested = self.buffer.snapshot(plain)["asked_in_order"]
        assert places == order_prefix(self.order, n_requested, self.limits.prompts_per_batch)


@st.composite
def simulations(draw, drop):
    updates = draw(st.integers(1, 3))
    # With policy drop a batch must live for its own updates.
    smallest_lag = updates if drop else 0
    limits = BufferLimits(
        prompts_per_batch=draw(st.integers(1, 4)),
        updates=updates,
        iterations=draw(st.integers(1, 6)),
        max_steps=draw(st.integers(smallest_lag, 7)),
        drop=drop,
    )
    return Simulation(limits, draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.booleans()))


MOVE = st.sampled_from(["begin", "finish", "learn", "learn", "resume"])
"""Methods of :class:`Simulation`; it learns twice as often as the rest."""
# Lists are short by themselves, and in few moves no group gets too old.
MOVES = st.lists(MOVE, max_size=60) | st.lists(MOVE, min_size=30, max_size=60)


def run_to_the_end(simulation, moves):
    """Make the moves, yielding after each; then alternate until the last update, which must come."""
    for move in moves:
        getattr(simulation, move)()
        simulation.assert_every_prompt_is_in_one_place()
        yield
    for _ in range(400):
        if simulation.iteration == simulation.limits.iterations:
            break
        if not simulation.learn():
            simulation.begin()
            simulation.finish()
    assert simulation.iteration == simulation.limits.iterations, "learner and sampler wait for each other"
    simulation.assert_every_prompt_is_in_one_place()
    assert max(simulation.ages) <= simulation.limits.max_steps


@settings(max_examples=80, deadline=None)
@given(simulations(drop=False), MOVES)
def test_waiting_uses_every_prompt_in_order(simulation, moves):
    limits = simulation.limits
    for _ in run_to_the_end(simulation, moves):
        ready_batches = len(simulation.buffer.ready) // limits.prompts_per_batch
        batches_ahead = len(simulation.buffer.pending) + ready_batches
        assert batches_ahead <= 1 + limits.max_steps // limits.updates
    assert simulation.buffer.dropped == 0
    assert not simulation.buffer.returned
    in_order = []
    for n in range(limits.iterations):
        in_order += simulation.order.indices(n)
    assert simulation.used == in_order


@settings(max_examples=80, deadline=None)
@given(simulations(drop=True), MOVES)
def test_dropping_returns_prompts_and_bounds_the_buffer(simulation, moves):
    for _ in run_to_the_end(simulation, moves):
        assert len(simulation.buffer.pending) <= 1
        assert len(simulation.buffer.ready) <= simulation.limits.ready_groups


def test_a_restored_buffer_has_all_that_the_old_one_had():
    """With a prompt in each of the four places, and each of the counters above zero."""
    limits = BufferLimits(prompts_per_batch=2, updates=1, iterations=9, max_steps=1, drop=True)
    order = PromptOrder(20, 2, 0)
    buffer = RolloutBuffer(limits, order.indices)
    for version in (0, 4, 4):
        drawn(buffer, version)
    assert buffer.take(4) is not None, "the first batch is too old, the second is taken, the third is ready"
    buffer.next_request(4)  # asks for the first batch's prompts again
    buffer.returned.append(19)  # a prompt that is dropped while they are drawn
    state = buffer.snapshot(plain)
    assert all(state.values()), f"a place is empty: {state}"
    restored = RolloutBuffer(limits, order.indices)
    restored.restore(state, rich)
    assert restored.snapshot(plain) == state


def drawn(buffer, version):
    """The next request, answered at ``version``; its prompts, or None where there is none."""
    request = buffer.next_request(version)
    if request is None:
        return None
    buffer.arrive(request.number, [scored(index, [version]) for index in request.indices], request.indices)
    return request.indices


def test_a_dropped_prompt_is_requested_before_new_ones():
    limits = BufferLimits(prompts_per_batch=2, updates=1, iterations=4, max_steps=1, drop=True)
    buffer = RolloutBuffer(limits, lambda n: [2 * n, 2 * n + 1])
    first = buffer.next_request(0)
    assert first.indices == (0, 1)
    assert buffer.next_request(0) is first, "it is pending"
    buffer.arrive(first.number, [scored(0, [0]), scored(1, [2])], first.indices)
    assert buffer.take(2) is None, "prompt 0 is two updates old"
    assert buffer.dropped == 1
    assert list(buffer.returned) == [0]
    assert drawn(buffer, 2) == (0, 2)
    buffer.returned.extend([5, 5, 6])
    assert drawn(buffer, 2) == (5, 6), "a prompt is at most once in a request"
    assert drawn(buffer, 2) == (5, 1), "1 was dropped: more were ready than can be used in time"


def test_waiting_with_no_lag_is_on_policy():
    limits = BufferLimits(prompts_per_batch=1, updates=2, iterations=3, max_steps=0, drop=False)
    buffer = RolloutBuffer(limits, lambda n: [n])
    assert drawn(buffer, 0) == (0,)
    # Both updates of batch 0 come first.
    assert drawn(buffer, 0) is None
    assert drawn(buffer, 1) is None
    assert drawn(buffer, 2) == (1,)
    assert drawn(buffer, 3) is None
    assert drawn(buffer, 4) == (2,)
    assert drawn(buffer, 9) is None, "batch 2 is the last"


@pytest.mark.parametrize("max_steps", [0, 5])
def test_a_group_that_is_too_old_raises_with_policy_wait(max_steps):
    limits = BufferLimits(prompts_per_batch=1, updates=1, iterations=9, max_steps=max_steps, drop=False)
    buffer = RolloutBuffer(limits, lambda n: [n])
    drawn(buffer, 0)
    with pytest.raises(AssertionError, match="older than"):
        buffer.take(max_steps + 1)


def test_prompts_that_stood_in_for_others_are_drawn_after_a_resume():
    """A request that is stopped is drawn again whole; what it drew beside its own prompts is not skipped."""
    limits = BufferLimits(prompts_per_batch=3, updates=1, iterations=9, max_steps=5, drop=False)
    order = PromptOrder(30, 3, seed=0)
    expected = [index for batch in range(4) for index in order.indices(batch)]

    def restored(buffer):
        copy = RolloutBuffer(limits, order.indices)
        copy.restore(buffer.snapshot(plain), rich)
        return copy

    buffer = RolloutBuffer(limits, order.indices)
    request = buffer.next_request(0)
    assert buffer.substitutes(2) == expected[3:5]
    buffer = restored(buffer)
    assert buffer.next_request(0) == request
    # This time one prompt has no signal.
    assert buffer.substitutes(1) == expected[5:6]
    indices = [*request.indices[:2], expected[5]]
    buffer.arrive(request.number, [scored(index, [0]) for index in indices for _ in range(GROUP)], indices)
    # What arrived is not drawn again.
    buffer = restored(restored(buffer))
    assert list(buffer.next_request(0).indices) == [*expected[3:5], expected[6]]
