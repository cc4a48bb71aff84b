"""Groups whose rewards are all equal: kept, left out of the loss, or replaced by others, in every source of batches."""

from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config import AlgorithmConfig, load_config
from kl_comedy.data import PromptOrder
from kl_comedy.errors import UserError
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training.asynchronous import Producer
from kl_comedy.training.build import Lag
from kl_comedy.training.distributed import SINGLE_PROCESS
from kl_comedy.training.experience import DrawnHere, TrainingPrompts
from kl_comedy.training.loss import UpdateTensors, advantage_signal
from kl_comedy.training.sampling import BroadcastRollouts
from training_runs import TINY, go, metrics_of

COUNT = 24
PROMPTS = [
    Prompt(problem=Problem(id=str(number), text="", answer=""), text="", token_ids=(number + 1,))
    for number in range(COUNT)
]
REFILL = ["algorithm.groups_without_signal=refill", "rollout.group_size=2", "rollout.prompts_per_batch=4"]
NOTHING_WITH = (0, 1)
"""Remainders by 4 of the prompts whose completions have equal rewards always."""


def rollout_of(prompt, group):
    return Rollout(
        prompt=prompt, group_id=group, completion_ids=(1,), logps=(-0.5,), versions=(0,), stop_reason="eos", text=""
    )


def generate(prompts, *, group_size, sampling, seed):
    SEEDS.append(seed)
    return [rollout_of(prompt, group) for group, prompt in enumerate(prompts) for _ in range(group_size)]


SEEDS: list[int] = []


class Rewards:
    """The second completion of a prompt earns 1 more than the first, unless the prompt is without signal."""

    def score(self, rollouts):
        rows = []
        for number, rollout in enumerate(rollouts):
            differs = int(rollout.prompt.problem.id) % 4 not in NOTHING_WITH
            rows.append(Scored(rollout=rollout, reward=Reward(value=float(differs and number % 2))))
        return rows


def prompts_of(*overrides):
    config = load_config(TINY, [*REFILL, *overrides])
    return config, TrainingPrompts(config, PROMPTS, SINGLE_PROCESS)


def source_of(prompts, steps=4, lag=0):
    settings = Lag(mode="replayed", steps=lag, max_steps=0, in_flight=False, updates_per_batch=1)
    return DrawnHere(settings, steps, prompts, generate, Rewards())


def ids(batch):
    return [int(row.rollout.prompt.problem.id) for row in batch.rows[::2]]


def plain_batches(count, draws):
    """What each batch must be, and how many groups were replaced for it: place by place, in rounds."""
    order = PromptOrder(COUNT, 4, 0)
    stream = (index for batch in range(1000) for index in order.indices(batch))
    batches = []
    for _ in range(count):
        places = [next(stream) for _ in range(4)]
        replaced = 0
        for _ in range(draws - 1):
            for place, index in enumerate(places):
                if index % 4 in NOTHING_WITH:
                    places[place] = next(stream)
                    replaced += 1
        batches.append((places, replaced))
    return batches


@pytest.mark.parametrize("draws", [2, 3, 10])
@pytest.mark.parametrize("lag", [0, 2])
def test_the_next_prompts_take_the_places_of_groups_without_signal(draws, lag):
    _, prompts = prompts_of(f"algorithm.refill_draws={draws}")
    source = source_of(prompts, lag=lag)
    replaced = 0
    expected = plain_batches(4, draws)
    for iteration, (places, _) in enumerate(expected):
        batch = source.take(iteration)
        assert ids(batch) == places
        assert [row.rollout.group_id for row in batch.rows] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [row.reward.value for row in batch.rows[::2]] == [0.0] * 4, "rows stay in the order of their group"
        replaced += batch.metrics["stream/replaced_groups"]
    assert replaced == sum(count for _, count in expected) > 0
    bound_is_reached = any(index % 4 in NOTHING_WITH for places, _ in expected for index in places)
    assert bound_is_reached == (draws < 10), "so that both a full batch and a bound are here"


def test_every_draw_has_random_numbers_of_its_own():
    _, prompts = prompts_of()
    SEEDS.clear()
    source = source_of(prompts)
    for iteration in range(3):
        source.take(iteration)
    assert len(SEEDS) > 5
    assert len(set(SEEDS)) == len(SEEDS)


def test_a_resumed_source_draws_what_the_other_would_have_drawn():
    _, prompts = prompts_of()
    source = source_of(prompts, lag=1)
    for iteration in range(2):
        source.take(iteration)
    resumed = source_of(prompts, lag=1)
    resumed.restore(source.snapshot())
    for iteration in (2, 3):
        assert ids(resumed.take(iteration)) == ids(source.take(iteration))


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_a_producer_replaces_them_too(policy):
    engines = SimpleNamespace(
        restarts=0,
        publish=lambda version: None,
        load=lambda: 0,
        generate=generate,
        cpu_seconds=lambda: 0.0,
        close=lambda: None,
    )
    config, prompts = prompts_of("lag.mode=async", "lag.max_steps=2", f"lag.policy={policy}", "train.steps=3")
    producer = Producer(
        config, BroadcastRollouts(engines, SINGLE_PROCESS, asynchronous=True), prompts, Rewards(), SINGLE_PROCESS
    )
    try:
        batch = producer.take(0)
    finally:
        producer.close()
    expected, replaced = plain_batches(1, 10)[0]
    assert ids(batch) == expected
    assert batch.metrics["stream/replaced_groups"] >= replaced > 0


def scored(group, *rewards, tokens=1):
    rows = []
    for reward in rewards:
        rollout = Rollout(
            prompt=PROMPTS[group],
            group_id=group,
            completion_ids=(2,) * tokens,
            logps=(-1.0,) * tokens,
            versions=(0,) * tokens,
            stop_reason="eos",
            text="",
        )
        rows.append(Scored(rollout=rollout, reward=Reward(value=reward)))
    return rows


def signal_of(rows, **settings):
    update = UpdateTensors.of(rows, torch.device("cpu"))
    returns_BT = update.reward_B[:, None].expand(-1, update.length)
    return advantage_signal(rows, update, returns_BT, AlgorithmConfig(**settings), None)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "sequence_sum"])
def test_shrink_is_the_update_of_the_other_groups(reduction):
    with_signal = scored(0, 1.0, 0.0, tokens=3)
    rows = with_signal + scored(1, 1.0, 1.0, tokens=2) + scored(2, 0.0, 0.0)
    shrunk = signal_of(rows, reduction=reduction, groups_without_signal="shrink")
    alone = signal_of(with_signal, reduction=reduction)
    assert torch.equal(shrunk.weight_B[:2], alone.weight_B)
    assert torch.equal(shrunk.weight_B[2:], torch.zeros(4))
    assert torch.equal(shrunk.advantage_BT[:2], alone.advantage_BT)
    kept = signal_of(rows, reduction=reduction)
    assert bool((kept.weight_B[2:] > 0).all()), "their KL terms count"


@pytest.mark.parametrize("choice", ["shrink", "refill"])
def test_a_run_with_a_reward_that_says_nothing_ends_and_counts(tmp_path, choice):
    """The bound of refill, and an update whose groups are all left out."""
    options = [f"algorithm.groups_without_signal={choice}", "rewards=[{name: zero}]", "train.steps=2"]
    if choice == "refill":
        options.append("algorithm.refill_draws=3")
    off = ["train.eval_every=0", "eval.at_start=false", "eval.at_end=false", "optimizer.weight_decay=0"]
    metrics = metrics_of(go(tmp_path, *options, *off).run)
    assert metrics[2, "train/groups_without_signal"] == 1.0
    if choice == "refill":
        assert metrics[2, "stream/replaced_groups"] == 8.0
    else:
        assert metrics[1, "train/loss"] == metrics[1, "grad/norm"] == 0.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["groups_without_signal=drop"], "groups_without_signal: got 'drop'; allowed: keep, shrink, refill"),
        (["groups_without_signal=refill", "refill_draws=1"], "refill_draws: got 1; .*2"),
        (["refill_draws=4"], "refill_draws: got 4; allowed: 10 with algorithm.groups_without_signal keep"),
    ],
)
def test_a_mistake_is_one_line_with_key_value_and_what_is_allowed(overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load_config(TINY, [f"algorithm.{text}" for text in overrides])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "algorithm.advantage=none"],
        ["environment={name: calculator, turns: 2, credit: turn}"],
        ["algorithm.dpo={beta: 0.1}", "kl=[]"],
    ],
)
def test_a_choice_that_means_nothing_is_refused(overrides):
    with pytest.raises(UserError, match=r"algorithm\.groups_without_signal: got 'shrink'; allowed: keep"):
        load_config(TINY, ["algorithm.groups_without_signal=shrink", *overrides])
