"""The rollout buffer: no prompt is lost or used twice, and nothing older than allowed is used."""

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
    return [(row.rollout.prompt.problem.id, row.rollout.versions) for row in rows]


def rich(packed):
    return [scored(int(index), versions) for index, versions in packed]


def order_prefix(order, count, batch):
    indices = []
    for n in range(-(-count // batch)):
        indices += order.indices(n)
    return Counter(indices[:count])


class Simulation:
    """A learner and a sampler that take turns as a sequence of choices says; the sampler is first in, first out."""

    def __init__(self, terms, n_prompts, seed, in_flight):
        self.terms, self.in_flight = terms, in_flight
        self.order = PromptOrder(n_prompts, terms.prompts_per_batch, seed)
        self.buffer = RolloutBuffer(terms, self.order.indices)
        self.iteration = self.version = 0
        self.begun, self.used, self.ages = None, [], []

    def begin(self):
        if self.begun is None and (request := self.buffer.next_request(self.version)):
            self.begun = (request, self.version)

    def finish(self):
        if self.begun is None:
            return
        request, began = self.begun
        self.begun = None
        end = self.version if self.in_flight else began
        rows = [scored(index, (began, end)) for index in request.indices for _ in range(GROUP)]
        self.buffer.arrive(request.number, rows)

    def learn(self):
        """One update; a batch is taken where the last one is used up. Whether anything happened."""
        if self.iteration == self.terms.iterations:
            return False
        if self.version % self.terms.updates == 0:
            groups = self.buffer.take(self.version)
            if groups is None:
                return False
            assert len(groups) == self.terms.prompts_per_batch
            for group in groups:
                assert {row.rollout.prompt.problem.id for row in group.rows} == {str(group.index)}
                self.ages.append(self.version - min(min(row.rollout.versions) for row in group.rows))
                self.used.append(group.index)
        self.version += 1
        self.iteration = self.version // self.terms.updates
        return True

    def resume(self):
        """Kill everything; begin again from the buffer's state."""
        state = self.buffer.snapshot(plain)
        self.buffer = RolloutBuffer(self.terms, self.order.indices)
        self.buffer.restore(state, rich)
        self.begun = None

    def accounted(self):
        """Each prompt that was taken from the order is in exactly one place."""
        buffer = self.buffer
        places = Counter(self.used) + Counter(buffer.returned) + Counter(group.index for group in buffer.ready)
        places += Counter(index for request in buffer.pending.values() for index in request.indices)
        return places, order_prefix(self.order, buffer.snapshot(plain)["asked_in_order"], self.terms.prompts_per_batch)


@st.composite
def simulations(draw, drop):
    updates = draw(st.integers(1, 3))
    terms = BufferLimits(
        prompts_per_batch=draw(st.integers(1, 4)),
        updates=updates,
        iterations=draw(st.integers(1, 6)),
        max_steps=draw(st.integers(updates if drop else 0, 7)),
        drop=drop,
    )
    return Simulation(terms, draw(st.integers(1, 9)), draw(st.integers(0, 3)), draw(st.booleans()))


MOVES = st.lists(st.sampled_from(["begin", "finish", "learn", "learn", "resume"]), max_size=60)


def run_to_the_end(simulation, moves):
    for move in moves:
        getattr(simulation, move)()
        places, asked = simulation.accounted()
        assert places == asked
        yield
    for _ in range(400):
        if simulation.iteration == simulation.terms.iterations:
            break
        if not simulation.learn():
            simulation.begin()
            simulation.finish()
    assert simulation.iteration == simulation.terms.iterations, "learner and sampler wait for each other"
    places, asked = simulation.accounted()
    assert places == asked
    assert max(simulation.ages) <= simulation.terms.max_steps


@settings(max_examples=80, deadline=None)
@given(simulations(drop=False), MOVES)
def test_waiting_uses_every_prompt_in_order(simulation, moves):
    for _ in run_to_the_end(simulation, moves):
        ahead = len(simulation.buffer.pending) + len(simulation.buffer.ready) // simulation.terms.prompts_per_batch
        assert ahead <= 1 + simulation.terms.max_steps // simulation.terms.updates
    assert simulation.buffer.dropped == 0 and not simulation.buffer.returned
    assert simulation.used == [
        index for n in range(simulation.terms.iterations) for index in simulation.order.indices(n)
    ]


@settings(max_examples=80, deadline=None)
@given(simulations(drop=True), MOVES)
def test_dropping_returns_prompts_and_bounds_the_buffer(simulation, moves):
    for _ in run_to_the_end(simulation, moves):
        assert len(simulation.buffer.pending) <= 1
        assert len(simulation.buffer.ready) <= simulation.terms.ready_groups


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
    if request is not None:
        buffer.arrive(request.number, [scored(index, [version]) for index in request.indices])
    return request and request.indices


def test_a_dropped_prompt_is_requested_before_new_ones():
    terms = BufferLimits(prompts_per_batch=2, updates=1, iterations=4, max_steps=1, drop=True)
    buffer = RolloutBuffer(terms, lambda n: [2 * n, 2 * n + 1])
    first = buffer.next_request(0)
    assert first.indices == (0, 1) and buffer.next_request(0) is first, "it is pending"
    buffer.arrive(first.number, [scored(0, [0]), scored(1, [2])])
    assert buffer.take(2) is None, "prompt 0 is two updates old"
    assert (buffer.dropped, list(buffer.returned)) == (1, [0])
    assert drawn(buffer, 2) == (0, 2)
    buffer.returned.extend([5, 5, 6])
    assert drawn(buffer, 2) == (5, 6), "a prompt is at most once in a request"
    assert drawn(buffer, 2) == (5, 1), "1 was dropped: more were ready than can be used in time"


def test_waiting_with_no_lag_is_on_policy():
    limits = BufferLimits(prompts_per_batch=1, updates=2, iterations=3, max_steps=0, drop=False)
    buffer = RolloutBuffer(limits, lambda n: [n])
    assert [drawn(buffer, version) for version in (0, 0, 1, 2, 3, 4, 9)] == [(0,), None, None, (1,), None, (2,), None]


@pytest.mark.parametrize("max_steps", [0, 5])
def test_a_group_that_is_too_old_raises_with_policy_wait(max_steps):
    limits = BufferLimits(prompts_per_batch=1, updates=1, iterations=9, max_steps=max_steps, drop=False)
    buffer = RolloutBuffer(limits, lambda n: [n])
    drawn(buffer, 0)
    with pytest.raises(AssertionError, match="older than"):
        buffer.take(max_steps + 1)
