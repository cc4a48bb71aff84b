"""How far the forward KL's gradient is from the reverse KL's: the numbers that the texts of issues state."""

import math

import pytest
import torch


@pytest.mark.parametrize("vocabulary", [1_000, 32_000])
@pytest.mark.parametrize(("kl", "share"), [(0.0002, 0.014), (0.001, 0.03), (0.05, 0.20)])
def test_the_error_of_forward_against_reverse_is_about_the_root_of_the_kl(vocabulary, kl, share):
    """Derivatives by the logits, in closed form: ``p (l - KL)`` of the reverse KL, ``p - q`` of the forward KL."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    distances = []
    for _ in range(40):
        logits = 1.5 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        shift = math.sqrt(2 * kl) * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        policy = logits.softmax(-1)
        reference = (logits - shift).softmax(-1)
        log_ratio = (policy / reference).log()
        distance = (policy * log_ratio).sum()
        reverse = policy * (log_ratio - distance)
        forward = policy - reference
        errors.append(float((forward - reverse).norm() / reverse.norm()))
        distances.append(float(distance))
    error = sum(errors) / len(errors)
    assert error == pytest.approx(share, rel=0.17)
    assert error == pytest.approx(math.sqrt(sum(distances) / len(distances)), rel=0.12)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_error_of_a_baseline_with_its_own_cost_falls_as_one_over_the_batch(size):
    """Enumeration of every batch of one-token completions; the row tinker-discount-0 scales its share by this."""
    policy = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    costs = (policy / reference).log()
    scores = torch.eye(3, dtype=torch.float64) - policy
    exact = (policy * costs) @ scores
    batches = torch.cartesian_prod(*[torch.arange(3)] * size)
    weights = policy[batches].prod(-1)
    centred = costs[batches] - costs[batches].mean(-1, keepdim=True)
    gradient = (weights[:, None, None] * centred[:, :, None] * scores[batches]).sum((0, 1)) / size
    # What is missing is 1 / size of the gradient.
    torch.testing.assert_close(gradient, (1 - 1 / size) * exact)
