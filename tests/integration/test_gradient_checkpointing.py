"""``model.gradient_checkpointing`` in a whole run: layers are passed again in every backward; nothing else changes."""

import pytest
import torch
from test_training import go, metrics_of, weights_of

from kl_comedy.training.module import PolicyModule


@pytest.mark.parametrize("adapter", [[], ["model.lora={rank: 4}"]], ids=["whole", "adapter"])
def test_layers_are_passed_twice_and_the_bits_are_the_same(tmp_path, monkeypatch, adapter):
    passes = []
    accumulate = PolicyModule._accumulate

    def counted(self, *arguments, **options):
        norm = next(module for name, module in self.policy.named_modules() if name.endswith("layers.0.input_layernorm"))
        seen = []
        hook = norm.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
        found = accumulate(self, *arguments, **options)
        hook.remove()
        passes.append(len(seen))
        return found

    monkeypatch.setattr(PolicyModule, "_accumulate", counted)
    settings = ["train.steps=2", "train.eval_every=0", "tracking.uri=none", *adapter]
    plain = go(tmp_path / "plain", *settings).run
    assert set(passes) == {1}
    passes.clear()
    lean = go(tmp_path / "lean", *settings, "model.gradient_checkpointing=true").run
    assert set(passes) == {2}
    assert metrics_of(lean) == metrics_of(plain)
    assert weights_of(lean) == weights_of(plain)
