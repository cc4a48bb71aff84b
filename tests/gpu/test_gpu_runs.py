"""Whole runs on the device: determinism, zero KL at the start, kill and resume, both devices, an engine beside."""

import itertools

import pytest
import torch

from commands import WAITS, assert_resumed, waits
from machine_runs import DEVICE, KERNELS, Training, digest_of, metrics_of, shorn, together, weights_of

TWO = ["train.steps=2", "train.checkpoint_every=0"]
MIXED = (
    "kl=[{estimator: exact, placement: loss, beta: 0.02}, rb/robust, {estimator: k1, placement: reward, beta: 0.05}]"
)
"""Terms with a prefix ratio, a baseline over the group, a sum over what follows, and exact KL."""
NARROW = ["train.precision=bf16"] + [f"model.{name}={value}" for name, value in KERNELS.items()]
SETTINGS = {
    "default precision": [],
    "bf16": ["train.precision=bf16"],
    "bf16, checkpointing, fsdp of one": [
        "train.precision=bf16",
        "model.gradient_checkpointing=true",
        "train.strategy=fsdp",
    ],
    "fast kernels": NARROW,
    "stale samples": ["lag.mode=replayed", "lag.steps=1", "algorithm.correction={tis: {cap: 2}}"],
    "value head": ["train.precision=bf16", "algorithm.advantage=gae", "algorithm.policy_loss=ppo_clip"],
}


@pytest.fixture(scope="module")
def of_qwen(qwen):
    """Overrides for the policy of Qwen2.5's shape; a reward that its random weights meet now and then."""
    return [f"model.source={qwen}", "model.options={}", "rewards=[{name: format, options: {pattern: '[0-9]'}}]"]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts a training in a folder of its own; all are killed at the end."""
    started = []

    def begin(*words, **options):
        training = Training(tmp_path_factory.mktemp("run"), *words, **options)
        started.append(training)
        return training

    yield begin
    for training in started:
        training.kill()


def test_the_default_config_trains_two_updates_deterministically(tmp_path, start):
    """Only the reward and the length of the warm start are not the defaults: the default reward wants math_verify."""
    config = tmp_path / "default.yaml"
    config.write_text("rewards: [{name: length, options: {full: 64}}]\nmodel: {options: {warmstart_steps: 60}}\n")
    first, second = together([start(*TWO, "tracking.uri=none", config=config) for _ in range(2)])
    assert_same_bits(first, second)
    metrics = metrics_of(first)
    assert metrics[1, "kl/exact_reverse_token"] == 0.0, "the policy is its reference before the first update"
    assert metrics[2, "grad/norm"] > 0


def assert_same_bits(run, expected):
    assert metrics_of(run) == metrics_of(expected)
    assert digest_of(run) == digest_of(expected)


@pytest.fixture(scope="module")
def pairs(start, of_qwen):
    """Each of the settings twice, all started together: starting takes longer than the two updates."""
    pairs = {}
    for name, words in SETTINGS.items():
        pairs[name] = [start(*of_qwen, *TWO, *words, MIXED) for _ in range(2)]
    return pairs


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_run_twice_ends_in_the_same_bits(pairs, name):
    first, second = together(pairs[name])
    assert_same_bits(first, second)
    assert metrics_of(first)[2, "grad/norm"] > 0


def test_exact_kl_is_zero_before_the_first_update(start, of_qwen):
    """In bf16, over activation checkpointing, LoRA, FSDP of one process, and kernels."""
    options = [
        ("train.strategy=single", "train.strategy=fsdp"),
        ("model.lora=null", "model.lora={rank: 4}"),
        ("model.gradient_checkpointing=false", "model.gradient_checkpointing=true"),
    ]
    cells = list(itertools.product(*options))
    for strategy in options[0]:
        cells.append((strategy, *NARROW))
    common = [*of_qwen, "train.precision=bf16", "train.steps=1", "train.checkpoint_every=0"]
    trainings = [start(*common, *cell) for cell in cells]
    metrics = {cell: metrics_of(run) for cell, run in zip(cells, together(trainings), strict=True)}
    # One comparison for all cells: a failure shows every cell whose KL is not 0.
    start_kl = {cell: metrics[cell][1, "kl/exact_reverse_token"] for cell in cells}
    assert start_kl == dict.fromkeys(cells, 0.0)
    for cell in cells:
        assert metrics[cell][1, "grad/norm"] > 0, cell


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, of_qwen, strategy):
    words = [*of_qwen, f"train.strategy={strategy}", "train.precision=bf16", "train.steps=12", "resume=auto"]
    whole = Training(tmp_path / "whole", *words)
    killed = Training(tmp_path / "killed", *words, *WAITS, env=waits(3))
    try:
        killed.wait_for_checkpoint(3)
    finally:
        killed.kill()
    assert not list((tmp_path / "killed").glob("*/summary.json"))
    resumed = Training(tmp_path / "killed", *words, *WAITS)
    whole_run, resumed_run = together([whole, resumed])
    assert_resumed(tmp_path / "killed", at=3)
    assert_same_bits(resumed_run, whole_run)


def test_a_checkpoint_of_one_device_resumes_on_the_other(tmp_path, of_qwen):
    """Products round differently, and a token drawn may differ.

    The last update moves no weight by more than a few times the learning rate, and measures the same reference.
    """
    words = [*of_qwen, "train.steps=4", "optimizer.lr=1.0e-4", "resume=auto"]
    devices = {"cpu": DEVICE, DEVICE: "cpu"}
    written = together([Training(tmp_path / f"from {device}", *words, device=device) for device in devices])
    trainings = []
    for run, other in zip(written, devices.values(), strict=True):
        shorn(run, tmp_path / f"to {other}")
        trainings.append(Training(tmp_path / f"to {other}", *words, device=other))
    for run, resumed, training in zip(written, together(trainings), trainings, strict=True):
        assert_resumed(training.folder, at=3)
        resumed_weights = weights_of(resumed)
        for name, weight in weights_of(run).items():
            assert float((resumed_weights[name] - weight).abs().max()) < 5e-4, name
        last_kl = metrics_of(run)[4, "kl/exact_reverse_token"]
        assert metrics_of(resumed)[4, "kl/exact_reverse_token"] == pytest.approx(last_kl, rel=0.05, abs=1e-6)


TRANSPORTS = ("auto", "folder", "gloo")


@pytest.fixture(scope="module")
def engines(start, of_qwen):
    """Three updates with the sampler in the trainer, and beside it by each transport; all started together."""
    words = [*of_qwen, "train.steps=3", "train.checkpoint_every=0"]
    trainings = {"inside": start(*words)}
    for transport in TRANSPORTS:
        trainings[transport] = start(*words, "rollout.backend=hf_server", f"rollout.options={{transport: {transport}}}")
    return trainings


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_beside_the_trainer_draws_what_the_trainer_draws(engines, transport):
    """The run fails where a checksum of the engine's weights is not the trainer's.

    Equal weights and seeds give equal completions, so the weights after three updates are those of the run that samples
    in the trainer.
    """
    expected = weights_of(engines["inside"].wait())
    for name, weight in weights_of(engines[transport].wait()).items():
        torch.testing.assert_close(
            weight, expected[name], atol=2e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
