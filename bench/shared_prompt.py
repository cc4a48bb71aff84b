"""CPU seconds of a forward and backward pass with and without a shared prompt.

    python bench/shared_prompt.py [MODEL_FOLDER]

Alternates both in one process on one thread, after a warm-up. Prints medians and their ratio.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from kl_comedy.models import PassOptions, token_pass

PROMPT, COMPLETION, GROUP, REPEATS = 160, 64, 8, 3


def main(folder: str) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(0)
    batch = {
        "prompt_ids_BP": torch.randint(5, 1000, (1, PROMPT), generator=generator).expand(GROUP, PROMPT),
        "prompt_mask_BP": torch.ones(GROUP, PROMPT, dtype=torch.bool),
        "ids_BT": torch.randint(5, 1000, (GROUP, COMPLETION), generator=generator),
        "mask_BT": torch.ones(GROUP, COMPLETION, dtype=torch.bool),
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repeat in range(REPEATS + 1):
        for share, times in seconds.items():
            start = time.process_time()
            options = PassOptions(temperature=1.0, chunk_elements=2**24, share_prompt=share)
            output = token_pass(model, options, **batch)
            output.logp_BT.mean().backward()
            model.zero_grad()
            if repeat:
                times.append(time.process_time() - start)
    shared, apart = (statistics.median(seconds[share]) for share in (True, False))
    spread = {share: f"{min(times):.1f} to {max(times):.1f}" for share, times in seconds.items()}
    print(f"{GROUP} completions of {COMPLETION} tokens after a prompt of {PROMPT}; CPU s, forward and backward")
    print(f"shared {shared:.1f} ({spread[True]}), apart {apart:.1f} ({spread[False]}), ratio {apart / shared:.2f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")
