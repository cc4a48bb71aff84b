"""A PEFT adapter folder as ``model.source``: base and adapter are one model; the reference is the adapter's start."""

import json
import logging
import shutil

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model
from transformers import MistralConfig, MistralForCausalLM

from kl_comedy.config.schema import LoraConfig, ModelConfig
from kl_comedy.errors import UserError
from kl_comedy.models import load_model
from kl_comedy.models.load import load_tokenizer
from kl_comedy.models.sources import check_source
from kl_comedy.planning.sizes import shape_of
from saved_models import llama, load, save, tokenizer


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The folder of an adapter that changes the model much, beside its base."""
    monkeypatch.setenv("KL_COMEDY_CACHE", str(tmp_path / "cache"))
    base = llama()
    save(tmp_path / "base", base)
    base.name_or_path = str(tmp_path / "base")
    adapted = get_peft_model(base, PeftLora(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change_settings(adapter, changes):
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, **changes}))


def logits_of(model):
    return model(input_ids=torch.arange(12).view(1, -1)).logits


def expected_logits(adapter):
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base", dtype=torch.float32)
    return logits_of(PeftModel.from_pretrained(base, adapter).eval())


def test_base_and_adapter_are_loaded_as_one_model_that_trains(adapter):
    loaded = load(adapter)
    torch.testing.assert_close(logits_of(loaded.model), expected_logits(adapter), atol=1e-5, rtol=1e-5)
    without_gradient = [name for name, weight in loaded.model.named_parameters() if not weight.requires_grad]
    assert without_gradient == []


def test_the_adapter_changes_the_base(adapter):
    """So that the comparisons of logits in this file tell the two apart."""
    base_logits = logits_of(load(adapter.parent / "base").model)
    assert (logits_of(load(adapter).model) - base_logits).abs().max() > 0.05


def test_the_tokenizer_is_that_of_the_base(adapter):
    """The adapter's folder has none."""
    assert load(adapter).tokenizer.eos_token == "<e>"


def test_a_new_adapter_starts_at_the_old_one_and_its_reference_is_that_start(adapter):
    """The initial reference of a LoRA run is the model with the adapter switched off."""
    loaded = load(adapter, lora=LoraConfig(target_modules=["q_proj"]))
    expected = expected_logits(adapter)
    torch.testing.assert_close(logits_of(loaded.model), expected, atol=1e-5, rtol=1e-5)
    with loaded.model.disable_adapter():
        torch.testing.assert_close(logits_of(loaded.model), expected, atol=1e-5, rtol=1e-5)


def test_the_merged_model_follows_changes_of_adapter_and_base(adapter):
    before = load(adapter).source
    assert load(adapter).source == before
    change_settings(adapter, {"lora_alpha": 64})
    other_adapter = load(adapter)
    assert other_adapter.source != before
    torch.testing.assert_close(logits_of(other_adapter.model), expected_logits(adapter), atol=1e-5, rtol=1e-5)
    save(adapter.parent / "base", llama(initializer_range=0.1))
    other_base = load(adapter)
    assert other_base.source != before
    assert other_base.source != other_adapter.source


def test_check_and_plan_know_the_base_without_loading_it(adapter):
    config = ModelConfig(source=str(adapter))
    check_source(config)
    assert shape_of(config).layers == 2
    assert not (adapter.parent / "cache").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model_name_or_path": "/nowhere"}, "/nowhere"),
        ({"base_model_name_or_path": None}, "names its base"),
        ({"peft_type": "PROMPT_TUNING"}, "peft_type 'PROMPT_TUNING'"),
        ({"target_modules": ["no_such_module"]}, "does not fit its base"),
    ],
    ids=["base is not there", "no base", "no LoRA", "another model"],
)
def test_an_adapter_that_cannot_be_loaded_is_one_line(adapter, change, message):
    change_settings(adapter, change)
    with pytest.raises(UserError, match=r"^model\.source") as error:
        load(adapter)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_with_a_whole_model_and_an_adapter_config_is_the_whole_model(adapter):
    shutil.copytree(adapter.parent / "base", adapter, dirs_exist_ok=True)
    assert load(adapter).source == str(adapter)


def test_a_model_with_a_sliding_window_and_no_layer_types_loads(tmp_path):
    """Mistral's default configuration. Its layers ask for the window, which our shared-prompt attention does not do."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=4, sliding_window=5)
    assert getattr(config, "layer_types", None) is None
    torch.manual_seed(0)
    source = save(tmp_path, MistralForCausalLM(config).eval())
    load_model(ModelConfig(source=source, device="cpu"))


def test_a_tokenizer_without_an_end_token_is_logged_with_the_way_out(tmp_path, caplog):
    plain = tokenizer(eos=None)
    plain.pad_token = "="
    plain.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="kl_comedy"):
        load_tokenizer(ModelConfig(source=str(tmp_path)))
    assert "no end token" in caplog.text
    assert "rollout.stop" in caplog.text
