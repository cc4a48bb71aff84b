"""Configs, batches and saved models for tests over several processes."""

import copy

import torch

from kl_comedy.config.schema import LoraConfig, ModelConfig
from kl_comedy.models import load_model
from small_llama import batch as padded_batch

OPTIONS = {"temperature": 0.7, "chunk_elements": 64}


def config_of(kind, folder=None):
    """``kind`` in words; a ``tied`` model is read from ``folder`` (:func:`save_tied`)."""
    lora = LoraConfig(rank=4) if "lora" in kind else None
    source = {"source": str(folder / "tied"), "options": {}} if "tied" in kind else {"options": {"preset": "tiny"}}
    return ModelConfig(device="cpu", lora=lora, gradient_checkpointing="checkpointing" in kind, **source)


def save_tied(folder):
    """The pocket policy with three layers and its embedding for a head, as a Hugging Face folder."""
    loaded = load_model(config_of("plain"))
    settings = copy.deepcopy(loaded.model.config)
    settings.tie_word_embeddings, settings.num_hidden_layers = True, 3
    torch.manual_seed(0)
    model = type(loaded.model)(settings)
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(folder / "tied")
    loaded.tokenizer.save_pretrained(folder / "tied")


def batch():
    inputs, _ = padded_batch((4, 4), (5, 3))
    return {name: ids % 16 if "ids" in name else ids for name, ids in inputs.items()}
