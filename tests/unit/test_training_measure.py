"""Metrics of an update: exact values against dense float64 formulas, and micro-batches against the whole batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kl_comedy.models.logprobs import TokenPass
from kl_comedy.training.metrics import MetricAccumulator, accumulate_estimates, accumulate_exact

B, T, V = 5, 4, 7


def dense(seed):
    """Log-probs of a policy and a reference at every prefix, sampled tokens, and a right-padded mask. All float64."""
    g = torch.Generator().manual_seed(seed)
    logp_BTV, logq_BTV = torch.randn(2, B, T, V, generator=g, dtype=torch.float64).log_softmax(-1)
    ids_BT = torch.multinomial(logp_BTV.exp().view(-1, V), 1, generator=g).view(B, T)
    length_B = torch.randint(1, T + 1, (B,), generator=g)
    return logp_BTV, logq_BTV, ids_BT, torch.arange(T)[None] < length_B[:, None]


def passed(logp_BTV, logq_BTV, ids_BT, mask_BT):
    """The pass and log-ratios that the loop would see, from the dense formulas."""
    p, q = logp_BTV.exp(), logq_BTV.exp()
    ratio_BTV = logp_BTV - logq_BTV

    def inside(values):
        return torch.where(mask_BT, values, 0.0)

    def picked(values):
        return inside(values.gather(2, ids_BT[..., None])[..., 0])

    seen = TokenPass(
        logp_BT=picked(logp_BTV),
        kl_BT=inside((p * ratio_BTV).sum(-1)),
        forward_kl_BT=inside(-(q * ratio_BTV).sum(-1)),
        entropy_BT=inside(-(p * logp_BTV).sum(-1)),
        total_variation_BT=inside((p - q).abs().sum(-1) / 2),
        hidden_NH=None,
    )
    return seen, picked(ratio_BTV)


def tallied(pieces):
    metrics = MetricAccumulator()
    for dense_piece in pieces:
        seen, log_ratio_BT = passed(*dense_piece)
        accumulate_exact(metrics, dense_piece[3], seen)
        accumulate_estimates(metrics, dense_piece[3], log_ratio_BT, seen.kl_BT)
    return metrics.values()


LEVELS = ("token", "sequence")
NAMES = {
    *(f"kl/{n}_{level}" for n in ("exact_reverse", "exact_forward", "total_variation") for level in LEVELS),
    *(f"kl/{k}_reverse_{level}" for k in ("k1", "k2", "k3") for level in LEVELS),
    *(f"kl_error/{k}_reverse_{level}" for k in ("k1", "k2", "k3") for level in LEVELS),
    *(f"kl_error/{k}_reverse_{level}_rms" for k in ("k1", "k2", "k3") for level in LEVELS),
    "policy/entropy",
    "policy/entropy_sequence",
    "kl/log_ratio_max",
}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(1, 10**6), cut=st.sets(st.integers(1, B - 1)))
def test_micro_batches_add_up_to_the_batch(seed, cut):
    """Means, root mean squares and maxima alike, however the rows are split."""
    whole = dense(seed)
    edges = [0, *sorted(cut), B]
    pieces = [tuple(part[a:b] for part in whole) for a, b in pairwise(edges)]
    once = tallied([whole])
    assert set(once) == NAMES
    assert tallied(pieces) == pytest.approx(once, rel=1e-12, abs=1e-14)


def test_values_are_those_of_lists_and_loops():
    """Every name once more from its sentence on the metrics page, token by token."""
    whole = dense(3)
    got, (seen, log_ratio_BT) = tallied([whole]), passed(*whole)
    mask_BT = whole[3]
    formulas = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.exp(-x) - 1 + x}
    for name, formula in formulas.items():
        errors = [(formula(log_ratio_BT[b]) - seen.kl_BT[b])[mask_BT[b]] for b in range(B)]
        tokens, totals = torch.cat(errors), torch.stack([e.sum() for e in errors])
        assert got[f"kl_error/{name}_reverse_token"] == pytest.approx(float(tokens.mean()))
        assert got[f"kl_error/{name}_reverse_token_rms"] == pytest.approx(float(tokens.square().mean().sqrt()))
        assert got[f"kl_error/{name}_reverse_sequence"] == pytest.approx(float(totals.mean()))
        assert got[f"kl_error/{name}_reverse_sequence_rms"] == pytest.approx(float(totals.square().mean().sqrt()))
        difference = got[f"kl/{name}_reverse_token"] - got["kl/exact_reverse_token"]
        assert got[f"kl_error/{name}_reverse_token"] == pytest.approx(difference)
    gaps = torch.cat([seen.total_variation_BT[b][mask_BT[b]] for b in range(B)])
    assert got["kl/total_variation_token"] == pytest.approx(float(gaps.mean()))
    assert got["kl/total_variation_sequence"] == pytest.approx(float(gaps.sum()) / B)
    assert got["policy/entropy_sequence"] == pytest.approx(float(seen.entropy_BT.sum()) / B)


def test_the_means_of_the_errors_are_the_biases_that_the_estimators_have():
    """Averaged over every next token with its probability, k1 and k3 miss nothing, and k2 misses something."""
    logp_V, logq_V = torch.randn(2, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    bias = dict.fromkeys(("k1", "k2", "k3"), 0.0)
    for token in range(V):
        one = (logp_V.expand(1, 1, V), logq_V.expand(1, 1, V), torch.tensor([[token]]), torch.tensor([[True]]))
        for name in bias:
            bias[name] += float(logp_V[token].exp()) * tallied([one])[f"kl_error/{name}_reverse_token"]
    assert abs(bias["k1"]) < 1e-12 and abs(bias["k3"]) < 1e-12
    assert abs(bias["k2"]) > 1e-3


def test_equal_policies_differ_in_nothing_and_err_in_nothing():
    logp_BTV, _, ids_BT, mask_BT = dense(4)
    got = tallied([(logp_BTV, logp_BTV, ids_BT, mask_BT)])
    entropies = {name: got.pop(name) for name in ("policy/entropy", "policy/entropy_sequence")}
    assert set(got.values()) == {0.0}
    assert all(value > 0 for value in entropies.values())


def test_without_exact_values_there_are_no_errors():
    whole = dense(5)
    metrics = MetricAccumulator()
    accumulate_estimates(metrics, whole[3], passed(*whole)[1], None)
    assert not [name for name in metrics.values() if name.startswith("kl_error/")]
