"""The facts an estimator declares about itself, on one categorical distribution, both ways: what is claimed
holds, and what holds is claimed."""

import pytest
import torch

import kl_comedy.kl.estimators  # noqa: F401  (registers the built-ins)
from kl_comedy.registry import ESTIMATORS

BUILT_IN = [entry for entry in ESTIMATORS if entry.origin.startswith("kl_comedy.")]


@pytest.fixture(params=[0, 1, 2])
def single(request):
    """Logits of a policy over 5 tokens (leaf) and the log-probs of a reference, float64."""
    generator = torch.Generator().manual_seed(request.param)
    logits_V = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    return logits_V, torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)


def argument(entry, logp_V, ref_V):
    """What the estimator reads, per token: the log-ratio, or an exact KL that is the same for each."""
    needs = entry.facts["needs"]
    if needs == "log_ratio":
        return logp_V - ref_V
    kl = {"exact_reverse": (logp_V.exp() * (logp_V - ref_V)), "exact_forward": (ref_V.exp() * (ref_V - logp_V))}[needs]
    return kl.sum().expand_as(logp_V)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_value_claims(entry, single):
    logits_V, ref_V = single
    logp_V = logits_V.detach().log_softmax(-1)
    mean = float((logp_V.exp() * entry.fn(argument(entry, logp_V, ref_V))).sum())
    kls = {
        "value:reverse": float((logp_V.exp() * (logp_V - ref_V)).sum()),
        "value:forward": float((ref_V.exp() * (ref_V - logp_V)).sum()),
    }
    assert {name for name, kl in kls.items() if abs(mean - kl) < 1e-10} == {
        claim for claim in entry.claims if claim.startswith("value:")
    }


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_pathwise_claims(entry, single):
    logits_V, ref_V = single
    logp_V = logits_V.log_softmax(-1)
    mean = (logp_V.detach().exp() * entry.fn(argument(entry, logp_V, ref_V))).sum()
    targets = {
        "pathwise:token_reverse": (logp_V.exp() * (logp_V - ref_V)).sum(),
        "pathwise:token_forward": (ref_V.exp() * (ref_V - logp_V)).sum(),
        "pathwise:zero": 0.0 * logp_V.sum(),
    }
    got = torch.autograd.grad(mean, logits_V, retain_graph=True)[0]
    hit = {
        name
        for name, target in targets.items()
        if float((got - torch.autograd.grad(target, logits_V, retain_graph=True)[0]).norm()) < 1e-10
    }
    assert hit == {claim for claim in entry.claims if claim.startswith("pathwise:")}


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: entry.name)
def test_nonnegativity(entry):
    low = 0.0 if entry.facts["needs"] != "log_ratio" else -8.0
    grid = torch.linspace(low, 8.0, 4001, dtype=torch.float64)
    assert bool((entry.fn(grid) >= -1e-12).all()) == ("nonnegative" in entry.claims)
    assert float(entry.fn(torch.zeros(1, dtype=torch.float64))) == 0.0
