"""Compare OpenMP wait policies on the arithmetic of one update, on a quiet machine and next to a busy process.

    python bench/openmp.py [--rounds N] [--out FILE]

Threads of libgomp spin before they sleep. Spinning is fast on a quiet machine, but on a busy machine a spinning thread
occupies the core that the thread it waits for needs. Each setting runs in its own process, alternating, `--rounds`
times: token-by-token decoding, and forward and backward passes, of a Llama of SmolLM2-135M's shape with random weights.
`busy` adds one process that computes all the time; on two cores, 2 / 1.5 of the quiet time is then the best possible.
It prints median seconds and the ratio to the fastest setting of the column. `kl_comedy.cli.main` sets the fastest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 5000": {"GOMP_SPINCOUNT": "5000"},
    "spin 20000": {"GOMP_SPINCOUNT": "20000"},
}
LOADS = ("quiet", "busy")
BUSY = "while True: pass"


def work() -> float:
    """Wall seconds of 24 token steps of 32 rows and of two forward and backward passes of 600 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    # The arithmetic depends on the shapes only, so that no weights need to be loaded.
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 49152, (8, 75))

    def decode_and_learn(steps: int, passes: int) -> None:
        with torch.no_grad():
            cache = None
            token = ids[:, :1].repeat(4, 1)
            for _ in range(steps):
                output = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                token = output.logits[:, -1:].argmax(-1)
        for _ in range(passes):
            model(input_ids=ids, labels=ids).loss.backward()

    # Warm-up: the first call starts the threads and fills the allocator.
    decode_and_learn(2, 1)
    start = time.perf_counter()
    decode_and_learn(24, 2)
    return time.perf_counter() - start


def timed(setting: dict[str, str], *, busy: bool) -> float:
    """Seconds of :func:`work` in a process with ``setting``, beside a busy process or not."""
    # The caller's own settings would be those of "default".
    environment = dict(os.environ)
    environment.pop("OMP_WAIT_POLICY", None)
    environment.pop("GOMP_SPINCOUNT", None)
    competitor = None
    if busy:
        competitor = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        command = [sys.executable, __file__, "--work"]
        completed = subprocess.run(command, env=environment | setting, capture_output=True, text=True, check=True)
        return float(completed.stdout)
    finally:
        # It never ends by itself.
        if competitor is not None:
            competitor.kill()
            competitor.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(work())
        return

    seconds: dict[str, dict[str, list[float]]] = {name: {load: [] for load in LOADS} for name in SETTINGS}
    # In turns: a change of the machine's load is in all settings.
    for _ in range(options.rounds):
        for name, setting in SETTINGS.items():
            for load in LOADS:
                seconds[name][load].append(timed(setting, busy=load == "busy"))

    medians: dict[str, dict[str, float]] = {}
    for name, times_by_load in seconds.items():
        medians[name] = {load: statistics.median(times) for load, times in times_by_load.items()}
    fastest = {load: min(medians[name][load] for name in SETTINGS) for load in LOADS}
    print("| setting | quiet, s | of the fastest | busy, s | of the fastest |")
    print("|---|---:|---:|---:|---:|")
    for name in SETTINGS:
        cells = [name]
        for load in LOADS:
            median = medians[name][load]
            cells += [f"{median:.1f}", f"{median / fastest[load]:.2f}"]
        print(f"| {' | '.join(cells)} |")
    if options.out is not None:
        options.out.write_text(json.dumps(seconds, indent=1) + "\n")


if __name__ == "__main__":
    main()
