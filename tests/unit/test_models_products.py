"""Products by another library: the same numbers to float32's rounding, everywhere else torch's own."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kl_comedy.config import ModelConfig
from kl_comedy.errors import UserError
from kl_comedy.models import load_model
from kl_comedy.models import onednn_linear as products
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.onednn_linear import Linear, add_product, adopt_products, processor_maker, rows_times, suits

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for weights of every size, whatever the processor."""
    monkeypatch.setenv(products.VARIABLE, "onednn")
    monkeypatch.setattr(products, "SMALLEST", 1)


def close(found, expected, terms):
    """Equal to the rounding of a sum of ``terms`` products of numbers about 1."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6 * max(terms, 1) ** 0.5)


@given(m=st.integers(1, 40), k=st.integers(1, 70), n=st.integers(1, 50), bias=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_value_and_gradients_are_those_of_a_linear_layer(m, k, n, bias, seed):
    torch.manual_seed(seed)
    plain = nn.Linear(k, n, bias=bias)
    ours = copy.deepcopy(plain)
    ours.__class__ = Linear
    rows, weights = torch.randn(2, m, k), torch.randn(2, m, n)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(products.VARIABLE, "onednn")
        patch.setattr(products, "SMALLEST", 1)
        for layer in (plain, ours):
            own = rows.clone().requires_grad_(True)
            out = layer(own)
            (out * weights).sum().backward()
            found.append([out.detach(), own.grad, *(p.grad for p in layer.parameters())])
    for ours_is, plain_is, terms in zip(*reversed(found), [k, n, 2 * m, 2 * m], strict=False):
        close(ours_is, plain_is, terms)


@pytest.mark.parametrize("rows", [1, 12, 40, 90])
@pytest.mark.parametrize(("outputs", "inputs"), [(130, 7), (7, 130), (130, 130), (90, 50)])
@pytest.mark.parametrize("bias", [True, False])
def test_large_sides_in_blocks_and_few_rows_turned_around(onednn, monkeypatch, rows, outputs, inputs, bias):
    """Sides from 100 on count as a vocabulary, in blocks of 32, the last one short."""
    monkeypatch.setattr(products, "MANY", 100)
    monkeypatch.setattr(products, "BLOCK", 32)
    own, weight = torch.randn(rows, inputs, requires_grad=True), torch.randn(outputs, inputs, requires_grad=True)
    added = torch.randn(outputs) if bias else None
    expected = torch.nn.functional.linear(own, weight, added)
    upstream = torch.randn(rows, outputs)
    wanted = torch.autograd.grad((expected * upstream).sum(), (own, weight))
    found = rows_times(own, weight, added)
    close(found, expected, inputs)
    for ours_is, plain_is, terms in zip(
        torch.autograd.grad((found * upstream).sum(), (own, weight)), wanted, (outputs, rows), strict=True
    ):
        close(ours_is, plain_is, terms)
    with torch.no_grad():
        close(rows_times(own, weight, added), expected, inputs)
        close(rows_times(own, weight.t().contiguous().t(), added), expected, inputs)
        start = torch.randn(outputs, inputs)
        into = start.clone()
        add_product(into, upstream.t(), own)
        close(into, start + upstream.t() @ own, rows)


def test_transposed_views_are_taken_as_they_are(onednn):
    rows, weight = torch.randn(30, 20), torch.randn(20, 40)
    close(rows_times(rows.t(), weight.t()[:, :20].t()[:, :30].contiguous()), rows.t() @ weight[:20, :30].t(), 30)
    close(rows_times(rows, weight.t()), rows @ weight, 20)


@pytest.mark.parametrize("lora", [None, {"rank": 2, "target_modules": ["q_proj"]}])
def test_a_models_log_probs_and_gradients_are_the_same(onednn, monkeypatch, lora):
    def loss_and_gradients():
        from kl_comedy.config.schema import LoraConfig

        torch.manual_seed(0)
        settings = ModelConfig(
            options={"preset": "tiny"}, device="cpu", lora=None if lora is None else LoraConfig(**lora)
        )
        model = load_model(settings).model
        kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
        ids = torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(1))
        seen = token_pass(
            model,
            prompt_ids_BP=ids[:, :3],
            prompt_mask_BP=torch.ones(3, 3, dtype=torch.bool),
            ids_BT=ids,
            mask_BT=torch.ones(3, 5, dtype=torch.bool),
            temperature=1.0,
            chunk_elements=64,
        )
        seen.logp_BT.sum().backward()
        return kinds, seen.logp_BT.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    kinds, logp, gradients = loss_and_gradients()
    monkeypatch.setenv(products.VARIABLE, "torch")
    plain_kinds, plain_logp, plain_gradients = loss_and_gradients()
    assert Linear in kinds and Linear not in plain_kinds
    close(logp, plain_logp, 64)
    assert gradients.keys() == plain_gradients.keys() and gradients
    for name, gradient in gradients.items():
        close(gradient, plain_gradients[name], 64)


def test_an_adopted_model_copies_pickles_and_keeps_its_names(onednn):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    names = list(model.state_dict())
    adopt_products(model)
    twins = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    rows = torch.randn(5, 4)
    for twin in twins:
        assert [type(twin[0]), type(twin[2])] == [Linear, Linear] and list(twin.state_dict()) == names
        assert torch.equal(twin(rows), model(rows))
    assert twins[1][0].weight is not model[0].weight


def test_everything_else_is_torchs_own(onednn):
    rows, weight = torch.randn(4, 8), torch.randn(6, 8)
    assert suits(rows, weight)
    assert not suits(rows.double(), weight.double()) and not suits(rows.bfloat16(), weight.bfloat16())
    assert not suits(rows.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not suits(rows, weight)
    assert torch.equal(rows_times(rows.double(), weight.double()), nn.functional.linear(rows.double(), weight.double()))


def test_small_weights_and_other_processors_stay_with_torch(monkeypatch, tmp_path):
    monkeypatch.setenv(products.VARIABLE, "onednn")
    assert not suits(torch.randn(4, 8), torch.randn(6, 8))
    assert suits(torch.randn(4, 400), torch.randn(400, 400))
    monkeypatch.setenv(products.VARIABLE, "torch")
    assert not suits(torch.randn(4, 400), torch.randn(400, 400))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    assert processor_maker(tmp_path / "none") == "GenuineIntel"
    monkeypatch.setattr(products.platform, "machine", lambda: "x86_64")
    assert processor_maker(cpuinfo) == "AuthenticAMD"
    monkeypatch.setattr(products.platform, "machine", lambda: "aarch64")
    assert processor_maker(cpuinfo) == "GenuineIntel"


def test_a_wrong_name_is_one_clear_error(monkeypatch):
    monkeypatch.setenv(products.VARIABLE, "onedn")
    with pytest.raises(UserError, match=r"KL_COMEDY_PRODUCTS.*'onedn'.*auto, torch, onednn"):
        products.library()
