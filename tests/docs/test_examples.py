"""The examples run, say what they promise, and agree with the package."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command
from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.records import Problem
from kl_comedy.rewards import score
from training_runs import TINY

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mini():
    return load("mini")


def test_mini_is_short():
    assert len((EXAMPLES / "mini.py").read_text().splitlines()) <= 300


def test_mini_prints_a_row_for_each_configuration(mini, tmp_path):
    output = Command(EXAMPLES / "mini.py", "--steps", 3, "--warm", 20, cwd=tmp_path).finish()
    head, *rows = output.splitlines()
    assert "exact KL" in head
    assert [row.split("  ")[0].strip() for row in rows] == list(mini.CONFIGURATIONS)
    for row in rows:
        reward_before, reward_after, kl = map(float, re.findall(r"-?\d+\.\d+", row))
        assert 0 <= reward_before <= 1, row
        assert 0 <= reward_after <= 1, row
        assert 0 <= kl < 1, row


@pytest.fixture(scope="module")
def mini_start(mini):
    return mini.warm_start(seed=0, steps=2)


def kls_of_mini(mini, start):
    """The exact KL before the first and after the last of two updates."""
    result = mini.train(start, [mini.KLTerm("k2", placement="loss")], steps=2, seed=0)
    return result["kl_first"], result["kl_last"]


def test_mini_stays_at_the_reference_where_there_is_no_reward(mini, mini_start, monkeypatch):
    monkeypatch.setattr(mini, "score", lambda ids_T, answer: 0.0)
    first, last = kls_of_mini(mini, mini_start)
    assert abs(first) < 1e-6
    assert abs(last) < 1e-6


def test_mini_begins_at_the_reference_and_leaves_it_where_there_is_a_reward(mini, mini_start, monkeypatch):
    monkeypatch.setattr(mini, "score", lambda ids_T, answer: float(ids_T[0] % 2))
    first, last = kls_of_mini(mini, mini_start)
    assert abs(first) < 1e-6
    assert last > 1e-5


def test_a_reward_model_is_fitted_and_scores(tmp_path):
    arguments = [TINY, "train.threads=1", "--samples", 100, "--epochs", 2, "--out", tmp_path / "proxy"]
    output = Command(EXAMPLES / "fit_reward_model.py", *arguments, cwd=tmp_path).finish()
    samples = [int(number) for number in re.findall(r": (\d+) samples", output)]
    assert samples == [80, 20]
    rewards = score("model", completions=["1+2=3", "1+2=4"], answers=["3", "3"], folder=str(tmp_path / "proxy"))
    assert rewards[0].value != rewards[1].value


@pytest.fixture(scope="module")
def own_trainer_lines(tmp_path_factory):
    """What the loop of one's own prints in few updates."""
    folder = tmp_path_factory.mktemp("own_trainer")
    return Command(EXAMPLES / "own_trainer.py", "--steps", 60, cwd=folder).finish().splitlines()


def test_the_loop_of_ones_own_proves_its_loss(own_trainer_lines):
    proofs = [line for line in own_trainer_lines if "per-prefix" in line or "of each visited prefix" in line]
    assert proofs, own_trainer_lines


def test_the_loop_of_ones_own_learns(own_trainer_lines):
    """The reward, the share of wanted tokens, rises, and the policy has left the reference."""
    updates = [line for line in own_trainer_lines if line.startswith("update")]
    rewards = [float(re.search(r"reward ([\d.]+)", line)[1]) for line in updates]
    kls = [float(re.search(r"exact KL ([\d.]+)", line)[1]) for line in updates]
    assert rewards[-1] > rewards[0] + 0.05
    assert kls[-1] > kls[0]


SHARED = []
"""Terms that mini and the package both have."""
for estimator in ("k1", "k2", "k3"):
    for credit in ("total", "to_go", "own"):
        SHARED.append({"estimator": estimator, "placement": "reward", "credit": credit})
    SHARED.append({"estimator": estimator, "placement": "loss", "credit": None})


@pytest.mark.parametrize("fields", SHARED, ids=lambda fields: " ".join(map(str, fields.values())))
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), length=st.integers(1, 6))
def test_mini_has_the_surrogate_of_the_package(mini, fields, seed, rows, length):
    generator = torch.Generator().manual_seed(seed)
    logp_BT, ref_logp_BT = -3 * torch.rand(2, rows, length, generator=generator, dtype=torch.float64)
    logp_BT.requires_grad_(True)
    sizes_B1 = torch.randint(1, length + 1, (rows, 1), generator=generator)
    batch = {"logp_BT": logp_BT, "ref_logp_BT": ref_logp_BT, "mask_BT": torch.arange(length) < sizes_B1}

    # In mini a term in the loss has a credit too, which it does not read.
    mini_fields = {**fields, "credit": fields["credit"] or "to_go"}
    small_BT = mini.kl_surrogate(mini.KLTerm(**mini_fields), **batch)
    whole_BT = kl_surrogate(KLTerm(**fields), behaviour_logp_BT=logp_BT.detach(), **batch)
    assert torch.allclose(small_BT, whole_BT, rtol=1e-12, atol=1e-12)

    (small_grad_BT,) = torch.autograd.grad(small_BT.sum(), logp_BT)
    (whole_grad_BT,) = torch.autograd.grad(whole_BT.sum(), logp_BT)
    assert torch.allclose(small_grad_BT, whole_grad_BT, rtol=1e-12, atol=1e-12)


def test_the_environment_gives_a_second_try():
    environment = load("second_try").SecondTry(wrong="no")
    state = environment.reset(Problem(id="a", text="3+4=", answer="7"))
    first = environment.step(state, "3+4=8")
    assert (first.observation, first.done) == ("no", False)
    second = environment.step(json.loads(json.dumps(first.state)), "7")
    assert (second.done, second.parts) == (True, {"solved": 0.5})
    assert environment.step(state, "3+4=7").parts == {"solved": 1.0}


@pytest.fixture(scope="module")
def new_estimator_output(tmp_path_factory):
    return Command(EXAMPLES / "register_estimator.py", cwd=tmp_path_factory.mktemp("estimator")).finish()


def test_the_new_estimator_optimizes_what_it_claims(new_estimator_output):
    targets = {}
    for line in new_estimator_output.splitlines():
        if "_policy" not in line:
            continue
        # A row: the term, the regime with its numbers, the target.
        label, regime, *_, target = re.split(r" {2,}| (?=o\w+_policy)", line.strip())
        term = re.sub(r"k2_shift_reverse_token | shift=\S+", "", label)
        targets[term, regime.split()[0]] = target
    assert targets == {
        ("in reward own", "on_policy"): "none",
        ("in reward own", "off_policy"): "none",
        ("in reward to_go", "on_policy"): "none",
        ("in reward to_go", "off_policy"): "none",
        ("in loss", "on_policy"): "token_reverse",
        ("in loss", "off_policy"): "none",
        ("in loss x token_detached", "on_policy"): "token_reverse",
        ("in loss x token_detached", "off_policy"): "token_reverse",
    }


def test_a_shift_makes_the_new_estimator_more_accurate(new_estimator_output):
    numbers = re.search(r"([\d.]+) at shift 0 \(k2\), ([\d.]+) at shift (-?[\d.]+)", new_estimator_output)
    error_of_k2 = float(numbers[1])
    least_error = float(numbers[2])
    assert 0 < least_error <= error_of_k2
