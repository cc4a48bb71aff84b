"""CPU seconds of a forward and backward pass with and without a shared prompt.

    python bench/shared_prompt.py [MODEL_FOLDER]

It alternates both in one process on one thread, after a warm-up, and prints medians and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from kl_comedy.models import PassOptions, token_pass

PROMPT = 160
COMPLETION = 64
GROUP = 8
REPEATS = 3


def main(folder: str) -> None:
    """Measure both on the model in ``folder``."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(0)
    # Any: without the annotation, the values do not fit the other keywords of token_pass.
    batch: dict[str, Any] = {
        "prompt_ids_BP": torch.randint(5, 1000, (1, PROMPT), generator=generator).expand(GROUP, PROMPT),
        "prompt_mask_BP": torch.ones(GROUP, PROMPT, dtype=torch.bool),
        "ids_BT": torch.randint(5, 1000, (GROUP, COMPLETION), generator=generator),
        "mask_BT": torch.ones(GROUP, COMPLETION, dtype=torch.bool),
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    # In turns, so that a change of the machine's load is in both.
    for repeat in range(REPEATS + 1):
        for share, times in seconds.items():
            options = PassOptions(temperature=1.0, chunk_elements=2**24, share_prompt=share)
            start = time.process_time()
            output = token_pass(model, options, **batch)
            output.logp_BT.mean().backward()
            model.zero_grad()
            is_warm_up = repeat == 0
            if not is_warm_up:
                times.append(time.process_time() - start)
    shared = statistics.median(seconds[True])
    apart = statistics.median(seconds[False])
    ranges = {share: f"{min(times):.1f} to {max(times):.1f}" for share, times in seconds.items()}
    print(f"{GROUP} completions of {COMPLETION} tokens after a prompt of {PROMPT}; CPU s, forward and backward")
    print(f"shared {shared:.1f} ({ranges[True]}), apart {apart:.1f} ({ranges[False]}), ratio {apart / shared:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")
