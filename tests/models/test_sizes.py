"""Default sizes of micro-batch and head chunk: they follow the device and the model; configured sizes win."""

import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from kl_comedy.models.introspection import GIB, activation_values, head_chunk, microbatch_tokens
from passes import token_pass

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL = LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1, attn_implementation="sdpa")


def test_configured_sizes_win():
    model = LlamaForCausalLM(SMALL)
    assert microbatch_tokens(77, model, CPU, checkpoints=False) == 77 and head_chunk(99, CPU) == 99
    assert head_chunk(None, CPU) < head_chunk(None, torch.device("cuda"))
    assert microbatch_tokens(None, model, CPU, checkpoints=False) == 2**16, "a small model has room for all"
    large = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
    assert 4 * activation_values(large, checkpoints=False) > GIB / 100
    assert activation_values(large, checkpoints=True) < activation_values(large, checkpoints=False) / 10
    assert activation_values(GPT2Config(), checkpoints=False) > 0


def test_the_estimate_is_near_the_bytes_autograd_saves():
    """Bytes of saved tensors, each storage once, of a real pass; the estimate is within a third of it."""
    model = LlamaForCausalLM(SMALL)
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows, prompt, length = 8, 20, 60
    ids = torch.randint(0, 64, (rows, length))
    prompts = {"prompt_ids_BP": ids[:1, :prompt].expand(rows, -1), "prompt_mask_BP": torch.ones(rows, prompt)}
    batch = {**prompts, "ids_BT": ids, "mask_BT": torch.ones(rows, length, dtype=torch.bool)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_pass(model, **batch, temperature=1.0, chunk_elements=2**16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    measured = sum(size for pointer, size in saved.items() if pointer not in weights)
    expected = 4 * activation_values(SMALL, checkpoints=False) * (prompt + rows * (length - 1))
    assert 0.67 < expected / measured < 1.5, expected / measured
