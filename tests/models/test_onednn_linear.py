"""oneDNN's products equal torch's to float32 rounding, with their gradients; the parameters stay the same objects."""

import copy

import pytest
import torch
from torch import nn

from kl_comedy.errors import UserError
from kl_comedy.models import onednn_linear
from kl_comedy.models.onednn_linear import OnednnLinear, linear_library, processor_vendor, product, use_onednn_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN for weights of every size, whatever the processor; sides from 100 on are computed in blocks of 32."""
    monkeypatch.setenv(onednn_linear.VARIABLE, "onednn")
    for name, value in {"MIN_ELEMENTS": 1, "LARGE_SIDE": 100, "BLOCK": 32}.items():
        monkeypatch.setattr(onednn_linear, name, value)


@pytest.mark.parametrize("rows", [1, 12, 90])
@pytest.mark.parametrize(("outputs", "inputs"), [(130, 7), (7, 130), (90, 50)])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_torchs(onednn, rows, outputs, inputs, bias):
    torch.manual_seed(0)
    rows_MK, weight_NK = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    bias_N, upstream_MN = torch.randn(outputs) if bias else None, torch.randn(rows, outputs)
    results = []
    for function in (product, torch.nn.functional.linear):
        inputs_ = [t.clone().requires_grad_() for t in (rows_MK, weight_NK, bias_N) if t is not None]
        out_MN = function(*inputs_)
        results.append([out_MN.detach(), *torch.autograd.grad((out_MN * upstream_MN).sum(), inputs_)])
    for ours, torchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-4)


def test_replaced_layers_share_parameters_and_are_left_out_of_nothing(onednn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Sequential(nn.ReLU(), nn.Linear(20, 5, bias=False)))
    plain, parameters = copy.deepcopy(model), dict(model.named_parameters())
    use_onednn_linears(model)
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [OnednnLinear, OnednnLinear]
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    rows = torch.randn(3, 4, 12)
    torch.testing.assert_close(model(rows), plain(rows), rtol=1e-5, atol=1e-5)
    assert torch.equal(copy.deepcopy(model)(rows), model(rows))


def test_the_library_follows_the_variable_and_the_processor(monkeypatch, tmp_path):
    monkeypatch.setenv(onednn_linear.VARIABLE, "mkl")
    with pytest.raises(UserError, match="KL_COMEDY_LINEAR: got 'mkl'; allowed: auto, torch, onednn"):
        linear_library()
    monkeypatch.setenv(onednn_linear.VARIABLE, "torch")
    assert linear_library() == "torch"
    (tmp_path / "cpuinfo").write_text("processor : 0\nvendor_id\t: AuthenticAMD\n")
    assert processor_vendor(tmp_path / "cpuinfo") in ("AuthenticAMD", "GenuineIntel")
    assert processor_vendor(tmp_path / "missing") == "GenuineIntel"
