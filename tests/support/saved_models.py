"""Small models written to folders as transformers and llama.cpp write them."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kl_comedy.config.schema import ModelConfig
from kl_comedy.models import load_model

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **settings)).eval()


def tokenizer(eos="<e>"):
    vocab = {token: n for n, token in enumerate(["<e>", *"abcdefghijklmnopqrstuvwxyz0123456789+= "])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)


def save(folder, model, **kwargs):
    model.save_pretrained(folder)
    tokenizer(**kwargs).save_pretrained(folder)
    return str(folder)


def load(folder, **settings):
    settings = {"source": str(folder), "device": "cpu"} | settings
    return load_model(ModelConfig(**settings))


def write_gguf(path, pre):
    """A two-layer tied Llama of random weights with a byte-level tokenizer, as llama.cpp would write it."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    tokens = ["<e>", "x", "Ġ", "ĠĠ", "7", *"abcdefghijk"]
    writer = gguf.GGUFWriter(path, "llama")
    fields = {
        "context_length": 64,
        "embedding_length": 32,
        "block_count": 2,
        "feed_forward_length": 32,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
        "vocab_size": len(tokens),
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "token_list": tokens,
        "token_types": [3] + [1] * (len(tokens) - 1),  # a control token, then normal ones
        "token_merges": ["Ġ Ġ"],
    }
    for name, value in fields.items():
        add = getattr(writer, f"add_{name}")
        add(value)
    layer_shapes = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "attn_q": (32, 32),
        "attn_output": (32, 32),
        "ffn_gate": (32, 32),
        "ffn_up": (32, 32),
        "ffn_down": (32, 32),
        "attn_k": (16, 32),
        "attn_v": (16, 32),
    }
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)}
    for layer in range(2):
        for name, shape in layer_shapes.items():
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32)
        if len(shape) == 2:  # quantized, so that loading has something to unpack
            packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
