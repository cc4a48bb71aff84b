"""Each rule of a run's warnings by its name: what it warns of, what it leaves alone, and what healthy runs print."""

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from kl_comedy.config import load_config
from kl_comedy.records import Problem, Prompt, Reward, Rollout, Scored
from kl_comedy.training import run_warnings
from kl_comedy.training.metrics import row_metrics
from kl_comedy.training.run import train
from kl_comedy.training.run_warnings import RULES, SHOWN_CHARACTERS, SILENT_UPDATES, RunWarnings

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "support" / "tiny.yaml"
HEALTHY = {
    "policy/ess": 0.8,
    "policy/entropy": 0.2,
    "kl/k1_reverse_token": 0.05,
    "kl/exact_reverse_token": 0.06,
    "kl_term/0/capped_share": 0.1,
    "kl_term/0/clamped_share": 0.05,
    "kl_term/0/ratio_max": 3.0,
    "policy/correction/tis/truncated_share": 0.2,
    "reference/ema/k1_reverse_token": 0.02,
    "reference/ema/moved": 1.0,
}
SIGNAL = [[0.0, 1.0], [0.0, 0.0]] * 4
SILENT = [[0.0, 0.0], [1.0, 1.0]]
ZERO = [[0.0, 0.0], [0.0, 0.0]]


def scored(value, group, *, text="no idea", stop_reason="eos"):
    prompt = Prompt(problem=Problem(id="a", text="1+1", answer="2"), text="1+1", token_ids=(1,))
    tokens = {"completion_ids": (1, 2), "logps": (-1.0, -1.0), "versions": (0, 0), "text": text}
    rollout = Rollout(prompt=prompt, group_id=group, **tokens, stop_reason=stop_reason)
    return Scored(rollout=rollout, reward=Reward(value=value, status="unparseable"))


def rows_of(groups, **fields):
    rows = []
    for group, values in enumerate(groups):
        rows += [scored(value, group, **fields) for value in values]
    return rows


class Watched:
    """Updates that the callback sees, and what it logs."""

    def __init__(self, caplog, overrides=()):
        self.watch = RunWarnings(load_config(TINY, list(overrides)))
        self.version = 0
        self.caplog = caplog

    def update(self, groups=SIGNAL, *, times=1, without=(), metrics=None, **fields):
        """``times`` updates with these rewards; their metrics are healthy but for ``metrics`` and those ``without``."""
        rows = rows_of(groups, **fields)
        values = row_metrics(rows) | HEALTHY | (metrics or {})
        values = {name: value for name, value in values.items() if name not in without}
        for _ in range(times):
            self.version += 1
            module = SimpleNamespace(version=self.version, last_metrics=values, last_batch=SimpleNamespace(rows=rows))
            with self.caplog.at_level(logging.WARNING, logger="kl_comedy"):
                self.watch.on_train_batch_end(None, module, None, None, 0)
        return self.lines()

    def lines(self):
        return [record.getMessage() for record in self.caplog.records]


@pytest.fixture
def watched(caplog):
    return Watched(caplog)


def rule(name):
    (rule_of_name,) = [rule for rule in RULES if rule.name == name]
    return rule_of_name


UNHEALTHY = {
    "zero_rewards": {"groups": ZERO},
    "no_signal": {"groups": SILENT},
    "all_truncated": {"stop_reason": "length"},
    "limited_tokens": {"metrics": {"policy/correction/tis/truncated_share": 0.6}},
    "few_effective_completions": {"metrics": {"policy/ess": 1.5 / 16}},
    "entropy_gone": {"metrics": {"policy/entropy": 0.004}},
    "entropy_rises": {"metrics": {"policy/entropy": 0.9}},
    "kl_runs_away": {"metrics": {"kl/exact_reverse_token": 2.5}},
    "reference_strayed": {"metrics": {"reference/ema/k1_reverse_token": 0.08}},
}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_rule_warns_once_after_its_number_of_updates(name, watched):
    updates = rule(name).updates
    watched.update()
    assert watched.update(**UNHEALTHY[name], times=updates - 1) == [], "not before"
    (line,) = watched.update(**UNHEALTHY[name])
    assert line.startswith(f"warning {name} ({updates} updates in a row): ")
    assert "\n" not in line
    watched.update()
    assert watched.update(**UNHEALTHY[name], times=3 * updates) == [line], "once in a run"


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_healthy_update_in_between_begins_the_count_again(name, watched):
    for _ in range(4):
        watched.update()
        watched.update(**UNHEALTHY[name], times=rule(name).updates - 1)
    assert watched.lines() == []


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_the_page_explains_the_rule(name):
    page = (ROOT / "docs" / "metrics.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    assert f"| {rule(name).updates} |" in line


def test_healthy_updates_are_silent(watched):
    assert watched.update(times=200) == []


def test_the_warning_of_no_signal_shows_a_completion_and_its_answer(watched):
    (line,) = watched.update(SILENT, times=SILENT_UPDATES)
    assert "mean 0.500" in line
    assert "'no idea'" in line
    assert "'2'" in line
    assert f"update {SILENT_UPDATES} " in line
    assert "status unparseable" in line


def test_a_hostile_completion_is_escaped_redacted_and_cut(watched):
    text = "\x1b[2J\u202epay\n[red]hf_abcdefghijklmnopqrstuvwx " + "x" * 500
    (line,) = watched.update(ZERO, times=SILENT_UPDATES, text=text)
    assert "\x1b" not in line
    assert "\u202e" not in line
    assert "\n" not in line
    assert "abcdefghijk" not in line
    assert "***" in line
    assert len(line) < 700


def test_a_secret_that_the_cut_would_halve_is_redacted(watched):
    before = "x" * (SHOWN_CHARACTERS - 10) + " "
    (line,) = watched.update(ZERO, times=SILENT_UPDATES, text=f"{before}hf_abcdefghijklmnopqrstuvwx")
    assert "hf_abc" not in line
    assert "xxx ***" in line


def test_zero_rewards_are_not_warned_of_twice(watched):
    (line,) = watched.update(ZERO, times=5 * SILENT_UPDATES)
    assert "zero_rewards" in line


def test_with_one_completion_per_prompt_the_whole_batch_must_be_equal(watched):
    assert watched.update([[1.0], [2.0], [1.0]], times=3 * SILENT_UPDATES) == []
    (line,) = watched.update([[1.0], [1.0]], times=SILENT_UPDATES)
    assert "no_signal" in line


def test_a_reward_that_is_only_measured_is_no_signal_that_fails(caplog):
    watched = Watched(caplog, ["algorithm.reward_weight=0"])
    assert watched.update(ZERO, times=3 * SILENT_UPDATES) == []


def test_updates_that_do_not_measure_entropy_do_not_interrupt(watched):
    watched.update()
    for _ in range(2):
        watched.update(metrics={"policy/entropy": 0.004})
        watched.update(without=["policy/entropy"], times=9)
    (line,) = watched.lines()
    assert "from 0.200 to 0.0040" in line


@pytest.mark.parametrize(
    ("first", "later"),
    [(0.005, 0.001), (0.05, 0.3), (2.0, 5.0)],
    ids=["certain from the start", "six times a small entropy", "less than three times"],
)
def test_an_entropy_that_changes_little_is_left_alone(first, later, watched):
    watched.update(metrics={"policy/entropy": first})
    assert watched.update(metrics={"policy/entropy": later}, times=10) == []


def test_few_completions_and_absent_weights_are_no_small_effective_number(watched):
    assert watched.update(SIGNAL[:2], metrics={"policy/ess": 0.3}, times=10) == [], "4 completions"
    assert watched.update(SIGNAL, without=["policy/ess"], times=10) == []


@pytest.mark.parametrize("metric", ["policy/ess", "kl/exact_reverse_token"])
def test_what_is_not_a_number_counts_as_wrong(metric, watched):
    (line,) = watched.update(SIGNAL, metrics={metric: math.nan}, times=5)
    assert "nan" in line


def test_limits_are_named_with_their_share(watched):
    metrics = {"kl_term/0/clamped_share": 0.75, "policy/correction/tis/masked_share": 0.5, "kl_term/0/ratio_max": 9.0}
    (line,) = watched.update(metrics=metrics, times=10)
    assert "(kl_term/0/clamped_share 75% at update 10)" in line


def test_a_reference_that_strays_by_the_noise_of_sampling_is_left_alone(watched):
    assert watched.update(metrics={"reference/ema/k1_reverse_token": 0.059}, times=30) == []


EXPORTS = ("study", "evidence", "trust_regions", "smollm2", "distillation")


def test_runs_beyond_the_bounds_on_kl_and_entropy_learned_nothing():
    """Of the stored studies: the last KL and entropy of a run beside its last held-out reward."""
    beyond = 0
    for study in EXPORTS:
        metrics = ["kl/exact_reverse_token", "policy/entropy", "eval/heldout/reward"]
        runs = pd.read_parquet(
            ROOT / f"results/{study}/export.parquet", columns=[f"metrics.{name}" for name in metrics]
        )
        far = runs["metrics.kl/exact_reverse_token"] > run_warnings.MOST_KL
        certain = runs["metrics.policy/entropy"] < run_warnings.LEAST_ENTROPY
        rewards = runs["metrics.eval/heldout/reward"][far | certain]
        beyond += len(rewards)
        assert (rewards <= 0.1).all(), study
    assert beyond > 100


def test_a_run_that_learns_prints_no_warning(tmp_path, caplog):
    config = load_config(TINY, [f"output={tmp_path}", "train.steps=12", "train.eval_every=0", "tracking.uri=none"])
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        train(config, console=Console(quiet=True), command="kl-comedy train tiny.yaml")
    assert [record.getMessage() for record in caplog.records if "warning " in record.getMessage()] == []


@pytest.mark.slow
def test_the_quickstart_prints_no_warning(tmp_path, caplog):
    quickstart = ROOT / "configs" / "quickstart.yaml"
    # 11 of its 100 updates: a rule needs 10 in a row at most.
    config = load_config(quickstart, [f"output={tmp_path}", "data.eval={}", "tracking.uri=none", "train.steps=11"])
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        train(config, console=Console(quiet=True), command="kl-comedy train quickstart.yaml")
    assert [record.getMessage() for record in caplog.records if "warning " in record.getMessage()] == []


def test_a_run_whose_reward_reads_nothing_warns(tmp_path, caplog):
    overrides = [f"output={tmp_path}", "train.steps=10", "train.eval_every=0", "tracking.uri=none", "data.eval={}"]
    config = load_config(TINY, [*overrides, "rollout.max_new_tokens=2"])
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        train(config, console=Console(quiet=True), command="kl-comedy train tiny.yaml")
    names = [record.getMessage().split()[1] for record in caplog.records if "warning " in record.getMessage()]
    # Where the tiny policy is nearly certain from the start, its entropy is gone too.
    assert [name for name in names if name != "entropy_gone"] == ["all_truncated", "zero_rewards"]
