"""What the critic learns, by the definition of GAE in a loop: the lambda return, whatever is done to the advantages."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kl_comedy.config import load_config
from kl_comedy.training.loss import advantage_signal

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
REWARDS = [[0.0, 0.5, 1.0], [-1.0, 2.0, 0.0]]
"""Of each token; the second completion has two tokens."""
VALUES = [[0.3, -0.2, 0.6], [0.1, 0.4, 0.0]]
LENGTHS = [3, 2]
LAST = [0.7, 0.0]
"""The value after the last token."""


def lambda_returns(gamma, lam):
    """``A_t + V_t`` with ``A_t = r_t + gamma V_{t+1} - V_t + gamma lam A_{t+1}``."""
    targets = []
    for rewards, values, length, last in zip(REWARDS, VALUES, LENGTHS, LAST, strict=True):
        advantage, value_after = 0.0, last
        row = [0.0] * 3
        for t in reversed(range(length)):
            advantage = rewards[t] + gamma * value_after - values[t] + gamma * lam * advantage
            value_after = values[t]
            row[t] = advantage + values[t]
        targets.append(row)
    return targets


@pytest.mark.parametrize("normalize", ["true", "false"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5)])
def test_the_target_is_the_lambda_return_of_the_rewards(normalize, gamma, lam):
    value = f"algorithm.value={{normalize: {normalize}, gamma: {gamma}, lam: {lam}}}"
    algorithm = load_config(TINY, ["algorithm.advantage=gae", value]).algorithm
    mask = torch.tensor([[True, True, True], [True, True, False]])
    # The loss hands over undiscounted sums of what is still to come.
    returns = (torch.tensor(REWARDS) * mask).flip(-1).cumsum(-1).flip(-1)
    rows = [SimpleNamespace(rollout=SimpleNamespace(stop_reason="eos", group_id=0)) for _ in LENGTHS]
    old = []
    for values, length, last in zip(VALUES, LENGTHS, LAST, strict=True):
        old.append({"value": torch.tensor(values[:length]), "last": last})
    update = SimpleNamespace(mask_BT=mask, group_B=torch.tensor([0, 0]))
    signal = advantage_signal(rows, update, returns, algorithm, old)
    expected = torch.tensor(lambda_returns(gamma, lam))
    assert torch.allclose(signal.value_target_BT[mask], expected[mask].float(), atol=1e-6)
    whitened = signal.advantage_BT[mask]
    if normalize == "true":
        assert float(whitened.mean()) == pytest.approx(0, abs=1e-5)
    else:
        assert torch.allclose(whitened, (expected - torch.tensor(VALUES))[mask].float(), atol=1e-6)
