"""Default sizes of micro-batch and head chunk: they follow the device and the model; configured sizes win."""

import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from kl_comedy.models.introspection import GIB, activation_values, head_chunk, microbatch_tokens
from passes import token_pass

CPU = torch.device("cpu")
SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL = LlamaConfig(**SIZES, num_attention_heads=3, num_key_value_heads=1, attn_implementation="sdpa")


LARGE = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
FLOAT32_BYTES = 4


def test_configured_sizes_win():
    assert microbatch_tokens(77, LlamaForCausalLM(SMALL), CPU, checkpoints=False) == 77
    assert head_chunk(99, CPU) == 99


def test_a_gpu_has_a_larger_chunk_of_the_head():
    assert head_chunk(None, CPU) < head_chunk(None, torch.device("cuda"))


def test_a_small_model_has_room_for_the_largest_micro_batch():
    assert microbatch_tokens(None, LlamaForCausalLM(SMALL), CPU, checkpoints=False) == 2**16


def test_a_token_of_a_large_model_needs_more_than_ten_megabytes():
    assert FLOAT32_BYTES * activation_values(LARGE, checkpoints=False) > GIB / 100


def test_activation_checkpoints_save_nine_tenths():
    assert activation_values(LARGE, checkpoints=True) < activation_values(LARGE, checkpoints=False) / 10


def test_the_sizes_of_a_gpt2_are_found_under_their_other_names():
    assert activation_values(GPT2Config(), checkpoints=False) > 0


def test_the_estimate_is_near_the_bytes_autograd_saves():
    """Bytes of saved tensors, each storage once, of a real pass; the estimate is within a third of it."""
    model = LlamaForCausalLM(SMALL)
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    rows = 8
    prompt = 20
    length = 60
    ids = torch.randint(0, 64, (rows, length))
    prompts = {"prompt_ids_BP": ids[:1, :prompt].expand(rows, -1), "prompt_mask_BP": torch.ones(rows, prompt)}
    batch = {**prompts, "ids_BT": ids, "mask_BT": torch.ones(rows, length, dtype=torch.bool)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_pass(model, **batch, temperature=1.0, chunk_elements=2**16)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    measured = sum(size for pointer, size in saved.items() if pointer not in weights)
    # The rows share their prompt, and the last token of a completion predicts nothing.
    tokens = prompt + rows * (length - 1)
    expected = FLOAT32_BYTES * activation_values(SMALL, checkpoints=False) * tokens
    assert 0.67 < expected / measured < 1.5
