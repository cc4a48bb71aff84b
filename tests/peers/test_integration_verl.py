"""The verl plugin in verl's released modules. Fetched by ``make test-integrations``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "bench"))

from peers.adapters.verl import PEER  # noqa: E402

pytestmark = pytest.mark.slow
MISSING = [pin.dist for pin in PEER.pins if not pin.fetched]


@pytest.fixture(scope="module")
def result():
    """What the plugin did in verl's own modules, in a process of its own."""
    if MISSING:
        pytest.skip(f"not fetched: {', '.join(MISSING)}: make test-integrations")
    command = [sys.executable, str(HERE / "verl_plugin.py")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_verl_has_a_version_that_is_supported(result):
    assert result["version"].startswith("0.9.")


def test_terms_that_verl_would_not_compute_are_refused(result):
    reward, loss = result["refused"]
    assert "algorithm.use_kl_in_reward: got False; allowed: true" in reward
    assert "actor_rollout_ref.actor.use_kl_loss: got False; allowed: true" in loss


def test_verls_loss_and_reward_take_our_terms(result):
    differences = []
    for name, value in result.items():
        if name in ("version", "refused"):
            continue
        if isinstance(value, list):  # of the loss, and of its gradient
            differences += value
        else:
            differences.append(value)
    assert len(differences) == 8
    assert max(differences) < 1e-6, result


def test_verl_finds_the_plugin_by_its_entry_point():
    entries = [entry for entry in entry_points(group="verl.plugins") if entry.name == "kl_comedy"]
    if not entries:
        pytest.skip("kl_comedy is not installed, or was before it had the entry point")
    assert entries[0].value == "kl_comedy.integrations.verl"


def test_a_mistake_in_the_variable_ends_the_process(monkeypatch):
    """verl logs the exceptions of plugins at level debug and would train on without the terms."""
    monkeypatch.setenv("KL_COMEDY_VERL_KL", '[{"estimator": "exact", "placement": "loss"}]')
    code = "import importlib.metadata as m; m.version = lambda name: '0.9.1'; import kl_comedy.integrations.verl"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 1
    assert "exact reads other tokens too" in process.stderr
