"""Runs with an environment: what they learn from, store, replay and resume."""

import dataclasses
from pathlib import Path

import pytest
import torch

import hostile_environments
import memory_engines
from dialogues import DIALOGUES
from kl_comedy.config import AlgorithmConfig, load_config
from kl_comedy.errors import UserError
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training import sampling
from kl_comedy.training.build import check_run
from kl_comedy.training.loss import UpdateTensors, advantage_signal
from training_runs import TINY, go, killed_then_resumed, metrics_of, sample_tables_of, weights_of

assert hostile_environments and memory_engines, "register parts"
ROOT = Path(__file__).parents[2]
TWO = [*DIALOGUES, "environment.credit=turn", "train.steps=2", "train.eval_every=2", "train.samples_every=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return go(tmp_path_factory.mktemp("dialogues"), *TWO, "train.record_rollouts=parquet").run


def test_a_run_has_dialogues_and_their_metrics(run):
    metrics = metrics_of(run)
    assert 1.2 < metrics[2, "train/turns"] <= 3
    assert metrics[2, "train/environment_tokens"] > 0
    assert metrics[2, "train/environment_failed"] == 0
    # Each call is a turn that another follows, but where the last allowed turn calls too.
    assert metrics[2, "train/reward/calls"] >= metrics[2, "train/turns"] - 1
    assert metrics[1, "policy/mismatch_max"] < 1e-4, "the learner computes the log-probs of the dialogue that was drawn"
    assert metrics[1, "policy/equal_weights_share"] == 1.0


def test_tokens_of_the_environment_stand_apart_in_the_tables(run):
    rows = [row for row in sample_tables_of(run)[1] if "per_token" in row]
    written = ["".join(letter for letter in row["per_token"]["use"]) for row in rows]
    assert any("e" in use for use in written)
    for row, use in zip(rows, written, strict=True):
        for position, letter in enumerate(use):
            if letter == "e":
                assert row["per_token"]["k1_reverse"][position] == 0
                assert position > 0
                assert use[position - 1] == "e" or row["per_token"]["text"][position - 1] == "="


@pytest.mark.parametrize("rewards", ["recorded", pytest.param("again", marks=pytest.mark.slow)])
def test_recorded_dialogues_are_replayed_to_the_same_policy(run, tmp_path, rewards):
    options = f"rollout.options={{path: {run.path / 'rollouts'}, rewards: {rewards}}}"
    replayed = go(tmp_path, *TWO, "rollout.backend=replay", options).run
    assert weights_of(replayed) == weights_of(run), "parts of the environment are in the recording"


def test_engines_draw_the_dialogues_that_the_trainer_draws(run, tmp_path):
    assert weights_of(go(tmp_path, *TWO, "rollout.backend=memory").run) == weights_of(run)


@pytest.mark.slow
def test_weights_change_within_dialogues(tmp_path):
    in_flight = ["lag.mode=async", "lag.max_steps=2", "lag.in_flight=true", "rollout.backend=memory"]
    run = go(tmp_path, *TWO, *in_flight, "train.steps=6").run
    metrics = metrics_of(run)
    assert metrics[6, "train/turns"] > 1
    assert max(value for (_, name), value in metrics.items() if name == "policy/staleness_max") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("lag", [[], ["lag.mode=replayed", "lag.steps=2"]], ids=["on_policy", "replayed"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, lag):
    settings = [*DIALOGUES, *lag, "train.steps=5"]
    whole = go(tmp_path / "whole", *settings).run
    resumed = killed_then_resumed(tmp_path / "killed", settings, at=2).run
    assert weights_of(resumed) == weights_of(whole)


class Compaction:
    """In the place of a chat template that renders earlier turns anew: of them the last answer is left."""

    def __init__(self, config, tokenizer, *, role):
        self._tokenizer = tokenizer

    def control_token(self, text):
        return None

    def prompts(self, dialogues):
        texts = [problem.text + exchanges[-1][1] for problem, exchanges in dialogues]
        return [tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


# Every dialogue calls in each turn, and earns the same: less a baseline nothing would be learned.
ROWS = [*TWO, "environment.rerendered=split", "train.steps=3", "algorithm.advantage=none"]


@pytest.fixture
def forgets_turns(monkeypatch):
    monkeypatch.setattr(sampling, "turn_frame", lambda *args, **kwargs: None)
    monkeypatch.setattr(sampling, "TurnRenderer", Compaction)


def test_a_run_of_rollouts_with_several_rows(forgets_turns, tmp_path):
    """It is trained on what was sampled, and replayed to the same bits."""
    whole = go(tmp_path / "whole", *ROWS, "train.record_rollouts=jsonl").run
    metrics = metrics_of(whole)
    assert metrics[1, "train/rows"] == metrics[1, "train/turns"] > 1.2
    assert metrics[1, "train/environment_tokens"] == 0
    assert metrics[1, "grad/norm"] > 0
    assert metrics[1, "policy/mismatch_max"] < 1e-4
    options = f"rollout.options={{path: {whole.path / 'rollouts'}}}"
    replayed = go(tmp_path / "replayed", *ROWS, "rollout.backend=replay", options).run
    assert weights_of(replayed) == weights_of(whole)


def test_a_template_that_renders_turns_anew_is_refused_unless_rows_are_asked_for(forgets_turns, tmp_path):
    with pytest.raises(UserError, match=r"environment\.rerendered: got 'refuse'; .*split") as caught:
        go(tmp_path, *TWO)
    assert "\n" not in str(caught.value)


def rows(*stop_reasons):
    prompt = Prompt(problem=Problem(id="p", text="", answer=""), text="", token_ids=(1,))
    scored = []
    for number, stop_reason in enumerate(stop_reasons):
        tokens = number + 1
        rollout = Rollout(
            prompt=prompt,
            group_id=0,
            completion_ids=(2,) * tokens,
            logps=(-1.0,) * tokens,
            versions=(0,) * tokens,
            stop_reason=stop_reason,
            text="",
            trained=(True,) * tokens,
        )
        scored.append(Scored(rollout=rollout, reward=Reward(value=float(number))))
    return scored


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean_token_mean", "sequence_sum"])
def test_a_failed_dialogue_has_no_weight_and_no_place_in_the_denominator(reduction):
    algorithm = AlgorithmConfig(reduction=reduction)

    def weights(*stop_reasons):
        scored = rows(*stop_reasons)
        update = UpdateTensors.of(scored, torch.device("cpu"))
        returns_BT = update.reward_B[:, None].expand(-1, update.length)
        return advantage_signal(scored, update, returns_BT, algorithm, None).weight_B

    assert torch.equal(weights("eos", "length", "failed")[:2], weights("eos", "length"))
    assert float(weights("eos", "length", "failed")[2]) == 0.0


def test_failures_are_counted_and_cost_their_dialogues_alone(tmp_path, caplog):
    """Some turns raise; the run goes on."""
    environment = "environment={name: moody, turns: 2, turn_tokens: 8}"
    run = go(tmp_path, "rollout.stop=['=']", environment, "train.steps=2").run
    metrics = metrics_of(run)
    assert 0 < metrics[1, "train/environment_failed"] < 1
    warnings = [record.getMessage() for record in caplog.records if "environment moody failed" in record.getMessage()]
    assert len(warnings) == 1, "the first of each kind"


MISTAKES = {
    "environment.turns: got 0": ["environment.turns=0"],
    "environment.turns: got 30": ["environment.turn_tokens=null", "environment.turns=30"],
    "environment.turn_tokens: got 25": ["environment.turn_tokens=25"],
    "environment.name: got 'calculatr'; did you mean 'calculator'?": ["environment.name=calculatr"],
    "environment.options.cal: no such key": ["environment.options={cal: '='}"],
    "environment.weights: got 'call'; did you mean 'calls'?": ["environment.weights={call: 1.0}"],
    "rewards: needs at least one reward": ["rewards=[]", "environment.weights={}"],
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_loaded(words):
    with pytest.raises(UserError) as caught:
        check_run(load_config(TINY, [*DIALOGUES, *MISTAKES[words]]))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_config_is_one_that_can_run():
    config = load_config(ROOT / "configs" / "tool_pocket.yaml", [])
    check_run(config, here=False)
    assert dataclasses.asdict(config)["environment"]["name"] == "calculator"
