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
    monkeypatch.setattr(onednn_linear, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(onednn_linear, "LARGE_SIDE", 100)
    monkeypatch.setattr(onednn_linear, "BLOCK", 32)


def value_and_gradients(function, arguments, upstream_MN):
    """The value of ``function(*arguments)``, and the gradients of its arguments for a gradient from above."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    value_MN = function(*leaves)
    return [value_MN.detach(), *torch.autograd.grad((value_MN * upstream_MN).sum(), leaves)]


@pytest.mark.parametrize("rows", [1, 12, 90])
@pytest.mark.parametrize(("outputs", "inputs"), [(130, 7), (7, 130), (90, 50)])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_value_and_gradients_are_torchs(onednn, rows, outputs, inputs, bias):
    torch.manual_seed(0)
    arguments = [torch.randn(rows, inputs), torch.randn(outputs, inputs)]
    if bias:
        arguments.append(torch.randn(outputs))
    upstream_MN = torch.randn(rows, outputs)
    ours = value_and_gradients(product, arguments, upstream_MN)
    torchs = value_and_gradients(torch.nn.functional.linear, arguments, upstream_MN)
    for actual, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.fixture
def nested_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.Sequential(nn.ReLU(), nn.Linear(20, 5, bias=False)))


def test_every_linear_layer_is_replaced_and_shares_its_parameters(onednn, nested_model):
    """An optimizer that was built before the replacement holds the same objects."""
    parameters_before = dict(nested_model.named_parameters())
    use_onednn_linears(nested_model)
    linear_layers = [module for module in nested_model.modules() if isinstance(module, nn.Linear)]
    assert [type(layer) for layer in linear_layers] == [OnednnLinear, OnednnLinear]
    parameters = dict(nested_model.named_parameters())
    for name, parameter in parameters_before.items():
        assert parameters[name] is parameter, name


def test_a_model_with_replaced_layers_computes_the_same(onednn, nested_model):
    plain = copy.deepcopy(nested_model)
    use_onednn_linears(nested_model)
    rows = torch.randn(3, 4, 12)
    torch.testing.assert_close(nested_model(rows), plain(rows), rtol=1e-5, atol=1e-5)
    assert torch.equal(copy.deepcopy(nested_model)(rows), nested_model(rows)), "a copy is replaced too"


def test_an_unknown_library_is_refused(monkeypatch):
    monkeypatch.setenv(onednn_linear.VARIABLE, "mkl")
    with pytest.raises(UserError, match="KL_COMEDY_LINEAR: got 'mkl'; allowed: auto, torch, onednn"):
        linear_library()


def test_the_library_follows_the_variable(monkeypatch):
    monkeypatch.setenv(onednn_linear.VARIABLE, "torch")
    assert linear_library() == "torch"


def test_the_vendor_of_the_processor_is_read_from_the_system(tmp_path):
    """On another architecture than x86 the file is not read."""
    (tmp_path / "cpuinfo").write_text("processor : 0\nvendor_id\t: AuthenticAMD\n")
    assert processor_vendor(tmp_path / "cpuinfo") in ("AuthenticAMD", "GenuineIntel")


def test_the_vendor_is_intel_where_the_system_does_not_say(tmp_path):
    assert processor_vendor(tmp_path / "missing") == "GenuineIntel"
