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


@pytest.mark.skipif(bool(MISSING), reason=f"not fetched: {', '.join(MISSING)}: make test-integrations")
def test_verls_loss_and_reward_take_our_terms():
    command = [sys.executable, str(HERE / "verl_plugin.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("version").startswith("0.9.")
    reward, loss = result.pop("refused")
    assert "algorithm.use_kl_in_reward: got False; allowed: true" in reward
    assert "actor_rollout_ref.actor.use_kl_loss: got False; allowed: true" in loss
    differences = [value for item in result.values() for value in (item if isinstance(item, list) else [item])]
    assert len(differences) == 8 and max(differences) < 1e-6, result


def test_verl_finds_the_plugin_by_its_entry_point():
    entries = [entry for entry in entry_points(group="verl.plugins") if entry.name == "kl_comedy"]
    if not entries:
        pytest.skip("kl_comedy is not installed, or was before it had the entry point")
    assert entries[0].value == "kl_comedy.integrations.verl"


def test_a_mistake_in_the_variable_ends_the_process(monkeypatch):
    """verl logs the exceptions of plugins at level debug and would train on without the terms."""
    monkeypatch.setenv("KL_COMEDY_VERL_KL", '[{"estimator": "exact", "placement": "loss"}]')
    code = "import importlib.metadata as m; m.version = lambda name: '0.9.1'; import kl_comedy.integrations.verl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "exact reads other tokens too" in done.stderr
