"""A tiny Llama, a padded batch, and log-probs from whole logits."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

V = 61
PROMPTS, COMPLETIONS = (3, 5, 1), (4, 1, 6)


def llama(dtype=torch.float64, seed=0, tied=False, vocab=V):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocab, **sizes, **heads, tie_word_embeddings=tied, initializer_range=0.4)
    return LlamaForCausalLM(config).to(dtype).eval()


def batch(prompts=PROMPTS, completions=COMPLETIONS, seed=0, pad=0, extra=0):
    """A padded batch with ``extra`` padding tokens ``pad``, and the rows without padding."""
    g = torch.Generator().manual_seed(seed)
    rows = [
        (torch.randint(1, V, (p,), generator=g), torch.randint(1, V, (t,), generator=g))
        for p, t in zip(prompts, completions, strict=True)
    ]
    P, T = max(prompts) + extra, max(completions) + extra
    out = {
        "prompt_ids_BP": torch.full((len(rows), P), pad),
        "prompt_mask_BP": torch.zeros(len(rows), P, dtype=torch.long),
        "ids_BT": torch.full((len(rows), T), pad),
        "mask_BT": torch.zeros(len(rows), T, dtype=torch.bool),
    }
    for n, (prompt, completion) in enumerate(rows):
        out["prompt_ids_BP"][n, P - len(prompt) :] = prompt
        out["prompt_mask_BP"][n, P - len(prompt) :] = 1
        out["ids_BT"][n, : len(completion)] = completion
        out["mask_BT"][n, : len(completion)] = True
    return out, rows


def naive_logits(model, rows, temperature):
    """Per row, without padding: float64-or-model log-softmax of the model's own logits, ``[T, V]``."""
    logits = [model(torch.cat(row)[None]).logits[0, len(row[0]) - 1 : -1] for row in rows]
    return [(logits_TV / temperature).log_softmax(-1) for logits_TV in logits]
