"""The tiny policy and the smallest config of the comparison."""

import functools
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kl_comedy.models.pocket import EOS, PAD, VOCABULARY, build_tokenizer


@functools.cache
def policy_folder(seed=3):
    """A random Llama over the pocket policy's characters, in float64."""
    folder = Path(tempfile.mkdtemp(prefix="twin-"))
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).double()
        # Norms are not all one, so that a wrong one shows.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def base_config():
    return {
        "name": "twin",
        "model": {"source": str(policy_folder())},
        "data": {"train": {"dataset": "pocket", "split": "train", "limit": 5, "options": {"digits": 1}}},
        "rollout": {"prompts_per_batch": 2, "group_size": 3, "max_new_tokens": 5},
        "rewards": [{"name": "twin_letters"}],
        "optimizer": {"lr": 0.01},
        "train": {"steps": 3, "checkpoint_every": 0, "samples_every": 0, "threads": 1},
        "eval": {"at_start": False, "at_end": False},
        "tracking": {"uri": "none"},
    }
