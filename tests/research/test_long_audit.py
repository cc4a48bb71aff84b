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

PROMPT, COMPLETIONS = (3, 4, 5), ((5, 6, 7, 8), (6, 2))


@pytest.fixture(scope="module")
def models():
    config = load_config("configs/quickstart.yaml", [])
    policy, reference = load_model(config.model).model, load_model(config.model).model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy, reference


@pytest.fixture(scope="module")
def rows(models):
    prompt = SimpleNamespace(token_ids=PROMPT)
    rollouts = [SimpleNamespace(prompt=prompt, completion_ids=ids, logps=[-1.0] * len(ids)) for ids in COMPLETIONS]
    return long_audit.group_pass(*models, rollouts, 1.0)


def test_the_config_of_the_study_loads():
    assert load_config(long_audit.CONFIG, []).train.steps == long_audit.UPDATES


@pytest.mark.parametrize("name", ["k3 in loss", "k1 x prefix", "exact x prefix (rb/per_decision)"])
def test_a_gradient_is_autograds(models, rows, name):
    mask_BT, ids_N = rows["mask"], torch.tensor([token for ids in COMPLETIONS for token in ids])
    ids_BT = torch.zeros(mask_BT.shape, dtype=torch.long).masked_scatter(mask_BT, ids_N)
    prompt_BP = torch.tensor([PROMPT] * len(mask_BT))
    with torch.no_grad():
        other_NH = completion_hidden(models[1], prompt_BP, torch.ones_like(prompt_BP), ids_BT, mask_BT)
    leaf_VH = head_weights(models[0])[0].detach().clone().requires_grad_()
    against = other_NH, (head_weights(models[1])[0].detach(), None)
    settings = {"temperature": 1.0, "chunk_elements": 1 << 20, "requested": ["kl"], "reference": against}
    columns = head_columns(rows["h"], (leaf_VH, None), ids_N, **settings)
    logp_BT, kl_BT = (torch.zeros(mask_BT.shape).masked_scatter(mask_BT, columns[each]) for each in ("logp", "kl"))
    assert torch.allclose(logp_BT, rows["logp"], atol=1e-5) and torch.allclose(kl_BT, rows["exact_kl"], atol=1e-5)
    others = {"ref_logp_BT": rows["ref_logp"], "behaviour_logp_BT": rows["behaviour_logp"], "mask_BT": mask_BT}
    term = long_audit.TERMS[name]
    (kl_surrogate(term, logp_BT=logp_BT, exact_kl_BT=kl_BT, **others).sum() / len(mask_BT)).backward()
    wanted = torch.nn.functional.pad(leaf_VH.grad, (0, 0, 0, long_audit.SKETCH - len(leaf_VH)))

    coefficients = long_audit.coefficients(term, rows)
    late_BT = torch.arange(mask_BT.shape[1]).expand(mask_BT.shape) >= 2
    got = sum(long_audit.gradient(coefficients, rows, bin_BT) for bin_BT in (late_BT, ~late_BT))
    # The sketch of a small vocabulary is the vector itself but for signs.
    scale = float(wanted.abs().max())
    assert torch.allclose(got.reshape(wanted.shape).abs(), wanted.abs(), atol=1e-4 * scale)


def test_a_sketch_keeps_inner_products():
    values = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    values[1] += values[0]
    product = float(long_audit.sketch(values).prod(0).sum())
    assert product == pytest.approx(float(values.prod(0).sum()), rel=0.2)
