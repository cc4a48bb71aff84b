"""The producer of asynchronous batches beside evaluations: one at a time in the engines, groups of their own."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kl_comedy.config import load_config
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.rollouts import Sampling
from kl_comedy.training.asynchronous import Group, Producer
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.experience import TrainingPrompts
from kl_comedy.training.sampling import BroadcastRollouts

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
PROMPTS = [
    Prompt(problem=Problem(id=str(n), text=str(n), answer=""), text=str(n), token_ids=(1, 2 + n)) for n in range(6)
]
SETTINGS = ["rollout.prompts_per_batch=2", "rollout.group_size=2", "lag.mode=async", "train.steps=4"]


def unrewarded(rollouts):
    return [Scored(rollout=rollout, reward=Reward(value=0.0)) for rollout in rollouts]


def rollout_of(prompt, group, version):
    tokens = {"completion_ids": (1,), "logps": (-1.0,), "versions": (version,)}
    return Rollout(prompt=prompt, group_id=group, **tokens, stop_reason="eos", text="")


class WatchedEngines:
    """Engines that count who draws in them at a time, and whose second draw waits for another to come in beside it."""

    restarts = 0

    def __init__(self):
        self.version = -1
        self.inside = 0
        self.most_inside = 0
        self.calls = 0
        self.changed_while_drawing = False
        self.second_draw = threading.Event()
        self.another = threading.Event()
        self._lock = threading.Lock()

    def publish(self, version):
        self._staged = version

    def load(self):
        self.version = self._staged
        return self.version

    def generate(self, prompts, *, group_size, sampling, seed):
        with self._lock:
            self.calls += 1
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
            if self.inside > 1:
                self.another.set()
            number = self.calls
            before = self.version
        if number == 2:
            self.second_draw.set()
            self.another.wait(0.3)  # in vain, where draws take turns
        with self._lock:
            self.changed_while_drawing |= self.version != before
            self.inside -= 1
        rollouts = []
        for group, prompt in enumerate(prompts):
            rollouts += [rollout_of(prompt, group, before)] * group_size
        return rollouts

    def cpu_seconds(self):
        return 0.0

    def close(self):
        pass


@pytest.fixture
def producer_of():
    """A producer and its sampler over ``engines``, closed at the end."""
    made = []

    def make(engines, *overrides):
        config = load_config(TINY, [*SETTINGS, *overrides])
        sampler = BroadcastRollouts(engines, SINGLE_PROCESS, asynchronous=True)
        scorer = SimpleNamespace(score=unrewarded)
        prompts = TrainingPrompts(config, PROMPTS, SINGLE_PROCESS)
        producer = Producer(config, sampler, prompts, scorer, SINGLE_PROCESS)
        made.append(producer)
        return producer, sampler

    yield make
    for producer in made:
        producer.close()


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_batch_and_an_evaluation_take_turns_in_the_engines(producer_of, policy):
    """The evaluation is asked for, with new weights, while the second batch is drawn."""
    engines = WatchedEngines()
    producer, sampler = producer_of(engines, "lag.max_steps=2", f"lag.policy={policy}")
    producer.take(0)
    assert engines.second_draw.wait(60)
    sampler.update_weights(1)
    rows = sampler.generate(PROMPTS[:1], group_size=1, sampling=Sampling(temperature=1.0, max_new_tokens=1), seed=0)
    assert engines.most_inside == 1, "nothing is drawn beside another"
    assert not engines.changed_while_drawing, "weights change between draws only"
    assert {row.versions for row in rows} == {(1,)}, "an evaluation is of the newest weights"


# Two updates per batch: 5 updates need a third batch, of which one is made.
@pytest.mark.parametrize(("steps", "batches"), [(4, 2), (5, 3), (1, 1)])
def test_the_last_batch_is_drawn_also_where_not_all_its_updates_are_made(producer_of, steps, batches):
    two_updates = "algorithm.updates_per_batch=2"
    producer, _ = producer_of(WatchedEngines(), two_updates, "lag.max_steps=2", f"train.steps={steps}")
    assert producer.buffer.limits.iterations == batches


def test_the_idle_share_is_of_the_whole_time(producer_of):
    producer, sampler = producer_of(WatchedEngines(), "lag.max_steps=2")
    sampler.publish(0)
    rows = tuple(unrewarded([rollout_of(PROMPTS[0], 0, 0)] * 2))
    producer.buffer.ready.extend([Group(0, 0, rows), Group(1, 0, rows)])
    # So long that the threads' own seconds vanish. Three of four parts are idle.
    producer._seconds.update(idle=3e6, generate=0.75e6, score=0.25e6)
    assert producer.take(0).metrics["time/sampler_idle_share"] == pytest.approx(0.75, rel=1e-3)


def test_groups_of_several_requests_are_groups_of_their_own(producer_of):
    """One group is left of each of two requests, both the first of its request; one baseline must not be over both."""
    producer, sampler = producer_of(WatchedEngines(), "lag.max_steps=2", "lag.policy=drop")
    sampler.publish(0)
    for number in (0, 1):
        rows = unrewarded([rollout_of(PROMPTS[number], 0, 0)] * 2)
        producer.buffer.ready.append(Group(number, number, tuple(rows)))
    rows = producer.take(0).rows
    groups_of_prompts = {(row.rollout.prompt.problem.id, row.rollout.group_id) for row in rows}
    group_ids = {group_id for _, group_id in groups_of_prompts}
    assert len(rows) == 4
    assert len(groups_of_prompts) == 2, "each prompt is in one group"
    assert len(group_ids) == 2, "no two prompts share a group"
