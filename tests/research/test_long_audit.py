"""The audit at length: its gradients are those that autograd takes of the same terms through the model's own head."""

from types import SimpleNamespace

import pytest
import torch
from research.studies import long_audit

from kl_comedy.config import load_config
from kl_comedy.kl import kl_surrogate
from kl_comedy.models import load_model
from kl_comedy.models.introspection import head_weights
from kl_comedy.models.logprobs import completion_hidden
from passes import head_columns

PROMPT = (3, 4, 5)
COMPLETIONS = ((5, 6, 7, 8), (6, 2))


@pytest.fixture(scope="module")
def models():
    """A reference, and a policy that differs from it."""
    config = load_config("configs/quickstart.yaml", [])
    policy = load_model(config.model).model
    reference = load_model(config.model).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy, reference


@pytest.fixture(scope="module")
def rows(models):
    """What the audit keeps of a pass: columns of the rows, and the hidden states before the head."""
    prompt = SimpleNamespace(token_ids=PROMPT)
    rollouts = [SimpleNamespace(prompt=prompt, completion_ids=ids, logps=[-1.0] * len(ids)) for ids in COMPLETIONS]
    return long_audit.group_pass(*models, rollouts, 1.0)


@pytest.fixture
def by_autograd(models, rows):
    """The weights of the policy's head as a leaf, and the log-probs and exact KLs that depend on it."""
    policy, reference = models
    mask_BT = rows["mask"]
    ids_N = torch.tensor([token for ids in COMPLETIONS for token in ids])
    ids_BT = torch.zeros(mask_BT.shape, dtype=torch.long).masked_scatter(mask_BT, ids_N)
    prompt_BP = torch.tensor([PROMPT] * len(mask_BT))
    with torch.no_grad():
        ref_hidden_NH = completion_hidden(reference, prompt_BP, torch.ones_like(prompt_BP), ids_BT, mask_BT)
    head_VH = head_weights(policy)[0].detach().clone().requires_grad_()
    columns = head_columns(
        rows["h"],
        (head_VH, None),
        ids_N,
        temperature=1.0,
        chunk_elements=1 << 20,
        requested=["kl"],
        reference=(ref_hidden_NH, (head_weights(reference)[0].detach(), None)),
    )
    logp_BT = torch.zeros(mask_BT.shape).masked_scatter(mask_BT, columns["logp"])
    kl_BT = torch.zeros(mask_BT.shape).masked_scatter(mask_BT, columns["kl"])
    return head_VH, logp_BT, kl_BT


@pytest.mark.parametrize("name", ["k3 in loss", "k1 x prefix", "exact x prefix (rb/per_decision)"])
def test_a_gradient_is_autograds(rows, by_autograd, name):
    term = long_audit.TERMS[name]
    head_VH, logp_BT, kl_BT = by_autograd
    surrogate_BT = kl_surrogate(
        term,
        logp_BT=logp_BT,
        exact_kl_BT=kl_BT,
        ref_logp_BT=rows["ref_logp"],
        behaviour_logp_BT=rows["behaviour_logp"],
        mask_BT=rows["mask"],
    )
    (surrogate_BT.sum() / len(COMPLETIONS)).backward()
    expected = torch.nn.functional.pad(head_VH.grad, (0, 0, 0, long_audit.SKETCH - len(head_VH)))

    # In two bins of places, whose gradients add up.
    coefficients = long_audit.coefficients(term, rows)
    late_BT = torch.arange(rows["mask"].shape[1]).expand(rows["mask"].shape) >= 2
    late = long_audit.gradient(coefficients, rows, late_BT)
    early = long_audit.gradient(coefficients, rows, ~late_BT)
    # The sketch of a small vocabulary is the vector itself but for signs.
    scale = float(expected.abs().max())
    assert torch.allclose((early + late).reshape(expected.shape).abs(), expected.abs(), atol=1e-4 * scale)
