"""A tiny Llama as a loaded policy, and a prompt, for the tests of engines and servers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kl_comedy.models import LoadedModel
from kl_comedy.models.pocket import VOCABULARY, build_tokenizer
from kl_comedy.records import Problem, Prompt

PROMPT = Prompt(problem=Problem(id="1", text="1+2=", answer="3"), text="1+2=", token_ids=(3, 12, 4, 14))


def llama(*, tied, layers=2):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        # The pocket tokenizer's: no first token, padding 0, end 1.
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def loaded(model):
    return LoadedModel(model=model, tokenizer=build_tokenizer(), device=torch.device("cpu"), source="test")
