"""Configs, batches and saved models for tests over several processes."""

import copy

import torch

from kl_comedy.config.schema import LoraConfig, ModelConfig
from kl_comedy.models import load_model
from small_llama import batch as padded_batch

OPTIONS = {"temperature": 0.7, "chunk_elements": 64}


def config_of(kind, folder=None):
    """``kind`` in words; a ``tied`` model is read from ``folder`` (:func:`save_tied`)."""
    config = ModelConfig(device="cpu", gradient_checkpointing="checkpointing" in kind)
    if "lora" in kind:
        config.lora = LoraConfig(rank=4)
    if "tied" in kind:
        config.source = str(folder / "tied")
    else:
        config.options = {"preset": "tiny"}
    return config


def save_tied(folder):
    """The pocket policy with three layers and its embedding for a head, as a Hugging Face folder."""
    loaded = load_model(config_of("plain"))
    settings = copy.deepcopy(loaded.model.config)
    settings.tie_word_embeddings = True
    settings.num_hidden_layers = 3
    torch.manual_seed(0)
    model = type(loaded.model)(settings)
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(folder / "tied")
    loaded.tokenizer.save_pretrained(folder / "tied")


def batch():
    """Two prompts of four tokens, completions of five and three, in the pocket policy's vocabulary of 16."""
    inputs, _ = padded_batch((4, 4), (5, 3))
    for name in ("prompt_ids_BP", "ids_BT"):
        inputs[name] = inputs[name] % 16
    return inputs
