"""The curves of docs/pull.svg, against derivatives of each divergence by the probability of a rare token."""

import math

import pytest
import torch
from research.scripts.pull_figure import in_the_mean, terms_of

# Per draw at the policy's rate, as the token's log-ratio is x. Of a sum over the vocabulary it is the derivative by the
# token's probability, less that by the others', which are at the reference; of a cost it is the cost itself.
BY_POLICY = {
    ("loss", "k1"): lambda x: 0.0,
    ("loss", "k2"): lambda x: x,
    ("loss", "k3"): lambda x: 1 - math.exp(-x),
    ("loss", "abs"): lambda x: math.copysign(2.0, x),
    ("loss", "k_lambda with lam 0.5"): lambda x: (1 - math.exp(-x)) / 2,
    ("loss", "exact"): lambda x: x,
    ("loss", "top_k"): lambda x: x,
    ("loss", "exact_forward"): lambda x: 1 - math.exp(-x),
    # d/dp of (q log(q / m) + p log(p / m)) / 2 with m = (p + q) / 2.
    ("loss", "exact_jsd"): lambda x: -math.log((1 + math.exp(-x)) / 2) / 2,
    ("loss", "k3 × token ratio"): lambda x: x,
    ("loss", "k3 clamped as in verl"): lambda x: 1 - math.exp(-x) if -2.6 < x < 10.9 else 0.0,
    ("reward", "k1"): lambda x: x,
    ("reward", "k2"): lambda x: x * x / 2,
    ("reward", "k3"): lambda x: math.exp(-x) - 1 + x,
    ("reward", "abs"): abs,
    ("reward", "k_lambda with lam 0.5"): lambda x: x + (math.exp(-x) - 1) / 2,
    ("reward", "exact"): lambda x: x,
    ("reward", "top_k"): lambda x: x,
    ("reward", "exact_forward"): lambda x: 1 - math.exp(-x),
    ("reward", "exact_jsd"): lambda x: -math.log((1 + math.exp(-x)) / 2) / 2,
}
DISTANCES = (-5.0, -1.0, 0.5, 4.0, 11.5)


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_every_curve_of_the_mean_is_a_derivative_that_is_known(placement):
    terms = terms_of(placement)
    assert {(placement, name) for name in terms} == {key for key in BY_POLICY if key[0] == placement}
    for name, term in terms.items():
        curve = in_the_mean(term, torch.tensor(DISTANCES, dtype=torch.float64)).tolist()
        per_draw = BY_POLICY[placement, name]
        expected = [per_draw(x) * math.exp(min(x, 0.0)) for x in DISTANCES]
        assert curve == pytest.approx(expected, rel=1e-3, abs=1e-3), name
