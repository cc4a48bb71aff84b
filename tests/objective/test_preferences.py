"""DPO's weights against autograd of its closed form, with every completion of a small policy enumerated."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.objective.preferences import preferences

V = 3
T = 3
COMPLETIONS = torch.tensor(list(itertools.product(range(V), repeat=T)))


def sequence_logp(logits):
    """Log-prob of every completion under a policy with a table of logits per previous token. ``[V**T]``"""
    logp = logits.log_softmax(-1)
    before = torch.cat([torch.full((len(COMPLETIONS), 1), V), COMPLETIONS[:, :-1]], 1)
    return logp[before, COMPLETIONS].sum(-1)


def closed_form(h, reward, group, judged, beta):
    """The loss as the paper writes it, a loop over prompts and pairs; None without a pair.

    ``h`` are log-ratios of completions to the reference. A pair is a completion and a worse one of the same prompt.
    """
    losses_of_prompts = []
    for number in sorted(set(group.tolist())):
        rows = [row for row in range(len(h)) if group[row] == number and judged[row]]
        losses = []
        for better, worse in itertools.permutations(rows, 2):
            if reward[better] > reward[worse]:
                losses.append(-torch.nn.functional.logsigmoid(beta * (h[better] - h[worse])))
        if losses:
            losses_of_prompts.append(torch.stack(losses).mean())
    if not losses_of_prompts:
        return None
    return torch.stack(losses_of_prompts).mean()


@pytest.mark.parametrize("beta", [0.05, 0.3, 2.0])
def test_the_gradient_over_all_completions_is_that_of_the_closed_form(beta):
    """All 27 completions of two prompts: the pairs that any sample could hold, in one update."""
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(2, V + 1, V, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(2, V + 1, V, generator=generator, dtype=torch.float64)
    reward = torch.randint(0, 3, (2 * len(COMPLETIONS),), generator=generator).double()
    group = torch.arange(2).repeat_interleave(len(COMPLETIONS))
    judged = torch.rand(len(reward), generator=generator) > 0.1
    logp = torch.cat([sequence_logp(policy[0]), sequence_logp(policy[1])])
    ref_logp = torch.cat([sequence_logp(reference[0]), sequence_logp(reference[1])])
    h = logp - ref_logp
    loss = closed_form(h, reward, group, judged, beta)
    (expected,) = torch.autograd.grad(loss, policy, retain_graph=True)
    result = preferences(h.detach(), reward, group, judged, beta=beta)
    (gradient,) = torch.autograd.grad(-(result.coefficient_B * logp).sum(), policy)
    assert float(expected.norm()) > 1e-4, "the comparison is not one of zeros"
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch_has_the_closed_forms_gradient(data):
    n = data.draw(st.integers(1, 12))
    numbers = st.lists(st.floats(-20, 20, allow_nan=False), min_size=n, max_size=n)
    h = torch.tensor(data.draw(numbers), dtype=torch.float64, requires_grad=True)
    reward = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n, max_size=n)))
    group = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    judged = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    beta = data.draw(st.sampled_from([0.1, 1.0]))
    loss = closed_form(h, reward, group, judged, beta)
    result = preferences(h.detach(), reward, group, judged, beta=beta)
    if loss is None:
        assert result.pairs == 0
        assert result.prompts == 0
        assert result.loss == 0.0
        assert not result.coefficient_B.any()
        return
    (expected_B,) = torch.autograd.grad(loss, h)
    torch.testing.assert_close(-result.coefficient_B, expected_B, rtol=1e-10, atol=1e-14)
    assert result.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    assert abs(float(result.coefficient_B.sum())) < 1e-12, "what a pair gives one completion it takes from the other"


def test_numbers_that_can_be_checked_by_hand():
    result = preferences(
        torch.tensor([2.0, 1.0, 0.0]),
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([5, 5, 5]),
        torch.tensor([True, True, True]),
        beta=1.0,
    )
    assert result.pairs == 2
    assert result.prompts == 1
    assert result.accuracy == 1.0
    assert result.margin == pytest.approx(1.5), "the mean of 2 - 1 and 2 - 0"
    # sigmoid(-margin) of each pair, over two pairs.
    first = 1 / (1 + torch.e) / 2
    second = 1 / (1 + torch.e**2) / 2
    assert result.coefficient_B.tolist() == pytest.approx([first + second, -first, -second])
