"""The examples run, say what they promise, and agree with the package."""

import importlib.util
import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import Command
from kl_comedy.kl import KLTerm, kl_surrogate

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


def test_mini_prints_a_row_for_each_configuration(mini, tmp_path):
    assert len((EXAMPLES / "mini.py").read_text().splitlines()) <= 300
    head, *rows = Command(EXAMPLES / "mini.py", "--steps", 3, "--warm", 20, cwd=tmp_path).finish().splitlines()
    assert "exact KL" in head
    assert [row.split("  ")[0].strip() for row in rows] == list(mini.CONFIGURATIONS)
    for row in rows:
        before, after, kl = map(float, re.findall(r"-?\d+\.\d+", row))
        assert 0 <= before <= 1 and 0 <= after <= 1 and 0 <= kl < 1


def test_mini_begins_at_the_reference_and_leaves_it_where_there_is_a_reward(mini, monkeypatch):
    start, terms = mini.warm_start(seed=0, steps=2), [mini.KLTerm("k2", placement="loss")]
    monkeypatch.setattr(mini, "score", lambda ids_T, answer: 0.0)
    still = mini.train(start, terms, steps=2, seed=0)
    assert abs(still["kl_first"]) < 1e-6 and abs(still["kl_last"]) < 1e-6
    monkeypatch.setattr(mini, "score", lambda ids_T, answer: float(ids_T[0] % 2))
    moved = mini.train(start, terms, steps=2, seed=0)
    assert abs(moved["kl_first"]) < 1e-6 < 1e-5 < moved["kl_last"]


def test_the_loop_of_ones_own_proves_its_loss_and_learns(tmp_path):
    """Few updates: the reward, the share of wanted tokens, rises, and the policy has left the reference."""
    lines = Command(EXAMPLES / "own_trainer.py", "--steps", 60, cwd=tmp_path).finish().splitlines()
    assert any("per-prefix" in line or "of each visited prefix" in line for line in lines), lines
    updates = [line for line in lines if line.startswith("update")]
    rewards = [float(re.search(r"reward ([\d.]+)", line)[1]) for line in updates]
    kls = [float(re.search(r"exact KL ([\d.]+)", line)[1]) for line in updates]
    assert rewards[-1] > rewards[0] + 0.05 and kls[0] < kls[-1]


SHARED = [
    {"estimator": estimator, "placement": placement, "credit": credit}
    for estimator, (placement, credit) in itertools.product(
        ("k1", "k2", "k3"), [("reward", "total"), ("reward", "to_go"), ("reward", "own"), ("loss", None)]
    )
]


@pytest.mark.parametrize("fields", SHARED, ids=lambda fields: " ".join(map(str, fields.values())))
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 4), length=st.integers(1, 6))
def test_mini_has_the_surrogate_of_the_package(mini, fields, seed, rows, length):
    generator = torch.Generator().manual_seed(seed)
    logp_BT, ref_logp_BT = -3 * torch.rand(2, rows, length, generator=generator, dtype=torch.float64)
    logp_BT.requires_grad_(True)
    sizes_B = torch.randint(1, length + 1, (rows, 1), generator=generator)
    shared = {"logp_BT": logp_BT, "ref_logp_BT": ref_logp_BT, "mask_BT": torch.arange(length) < sizes_B}
    small_BT = mini.kl_surrogate(mini.KLTerm(**{**fields, "credit": fields["credit"] or "to_go"}), **shared)
    whole_BT = kl_surrogate(KLTerm(**fields), behaviour_logp_BT=logp_BT.detach(), **shared)
    gradients = [torch.autograd.grad(x.sum(), logp_BT)[0] for x in (small_BT, whole_BT)]
    assert torch.allclose(small_BT, whole_BT, rtol=1e-12, atol=1e-12)
    assert torch.allclose(*gradients, rtol=1e-12, atol=1e-12)


def test_the_new_estimator_optimizes_what_it_claims(tmp_path):
    printed = Command(EXAMPLES / "register_estimator.py", cwd=tmp_path).finish()
    rows = [re.split(r" {2,}| (?=o\w+_policy)", line.strip()) for line in printed.splitlines() if "_policy" in line]
    hits = {(re.sub(r"k2_shift_reverse_token | shift=\S+", "", row[0]), row[1].split()[0]): row[-1] for row in rows}
    assert hits == {
        ("in reward own", "on_policy"): "none",
        ("in reward own", "off_policy"): "none",
        ("in reward to_go", "on_policy"): "none",
        ("in reward to_go", "off_policy"): "none",
        ("in loss", "on_policy"): "token_reverse",
        ("in loss", "off_policy"): "none",
        ("in loss x token_detached", "on_policy"): "token_reverse",
        ("in loss x token_detached", "off_policy"): "token_reverse",
    }
    at_0, least, _ = map(
        float, re.search(r"([\d.]+) at shift 0 \(k2\), ([\d.]+) at shift (-?[\d.]+)", printed).groups()
    )
    assert 0 < least <= at_0
