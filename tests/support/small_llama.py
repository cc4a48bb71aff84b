"""A tiny Llama, a padded batch, and log-probs from whole logits."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

V = 61
PROMPTS = (3, 5, 1)
"""Lengths of the prompts of a batch, in tokens."""
COMPLETIONS = (4, 1, 6)
"""Lengths of its completions."""


def llama(dtype=torch.float64, seed=0, tied=False, vocab=V):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab, **sizes, **heads, tie_word_embeddings=tied, initializer_range=0.4)
    return LlamaForCausalLM(config).to(dtype).eval()


def batch(prompts=PROMPTS, completions=COMPLETIONS, seed=0, pad=0, extra=0):
    """A padded batch with ``extra`` padding tokens ``pad``, and the rows without padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for prompt_length, completion_length in zip(prompts, completions, strict=True):
        prompt = torch.randint(1, V, (prompt_length,), generator=generator)
        completion = torch.randint(1, V, (completion_length,), generator=generator)
        rows.append((prompt, completion))
    B = len(rows)
    P = max(prompts) + extra
    T = max(completions) + extra
    padded = {
        "prompt_ids_BP": torch.full((B, P), pad),
        "prompt_mask_BP": torch.zeros(B, P, dtype=torch.long),
        "ids_BT": torch.full((B, T), pad),
        "mask_BT": torch.zeros(B, T, dtype=torch.bool),
    }
    # Prompts are padded on the left and completions on the right, so that the two meet.
    for row, (prompt, completion) in enumerate(rows):
        padded["prompt_ids_BP"][row, P - len(prompt) :] = prompt
        padded["prompt_mask_BP"][row, P - len(prompt) :] = 1
        padded["ids_BT"][row, : len(completion)] = completion
        padded["mask_BT"][row, : len(completion)] = True
    return padded, rows


def naive_logits(model, rows, temperature):
    """Per row, without padding: the log-softmax of the model's own logits in the model's dtype, ``[T, V]``."""
    logps = []
    for prompt, completion in rows:
        ids = torch.cat([prompt, completion])
        # The logits at position n are those of token n + 1.
        logits_TV = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        logps.append((logits_TV / temperature).log_softmax(-1))
    return logps
