"""Growth of FLOPs, CPU seconds and activation memory with one size at a time: python bench/growth.py [OUT]

A small Llama on one thread. Each point is one forward and backward pass over groups that share a prompt, or one batch
of sampling. FLOPs are counted, CPU seconds are medians of repeats, and memory is the size of the storages that autograd
saves.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

BASE = {"prompts": 2, "group": 8, "prompt": 96, "length": 48, "vocabulary": 4096, "hidden": 128, "layers": 4}
"""Sizes at every point of the curves, except the one that grows; lengths in tokens."""
CURVES: dict[str, list[int]] = {
    "prompts": [1, 2, 4, 8],
    "group": [2, 4, 8, 16, 32],
    "prompt": [48, 96, 192, 384, 768],
    "length": [24, 48, 96, 192, 384],
    "vocabulary": [1024, 4096, 16384, 65536],
    "hidden": [64, 128, 256, 512],
    "layers": [2, 4, 8, 16],
}
REPEATS = 3


def model_of(size: dict[str, int]) -> Any:
    """A Llama of these sizes with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["hidden"],
        intermediate_size=3 * size["hidden"],
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # No completion may end early: the cost at a length would depend on what is drawn.
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def batch_of(size: dict[str, int]) -> dict[str, Any]:
    """Prompts and completions of random tokens, none padded. B rows, P prompt tokens, T completion tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = size["prompts"] * size["group"]
    prompt_ids = torch.randint(0, size["vocabulary"], (size["prompts"], size["prompt"]), generator=generator)
    return {
        "prompt_ids_BP": prompt_ids.repeat_interleave(size["group"], 0),
        "prompt_mask_BP": torch.ones(rows, size["prompt"], dtype=torch.bool),
        "ids_BT": torch.randint(0, size["vocabulary"], (rows, size["length"]), generator=generator),
        "mask_BT": torch.ones(rows, size["length"], dtype=torch.bool),
    }


def learner(size: dict[str, int]) -> Callable[[], None]:
    """A function that does one forward and backward pass."""
    from kl_comedy.models import PassOptions, token_pass

    model = model_of(size)
    batch = batch_of(size)
    options = PassOptions(temperature=1.0, chunk_elements=2**22)

    def work() -> None:
        model.zero_grad()
        token_pass(model, options, **batch).logp_BT.mean().backward()

    return work


def sampler(size: dict[str, int]) -> Callable[[], None]:
    """A function that samples one batch of completions."""
    from kl_comedy.models.attention import use_layout_attention
    from kl_comedy.records import Problem, Prompt
    from kl_comedy.rollouts import Sampling
    from kl_comedy.rollouts.decoding import Draws, StopStrings, decode

    model = model_of(size).eval()
    # kl_comedy's own attention, as its sampler selects it.
    use_layout_attention(model)
    # The first row of each group: the decoder reads a prompt once for all completions.
    prompt_rows = batch_of(size)["prompt_ids_BP"][:: size["group"]].tolist()
    problem = Problem(id="", text="", answer="")
    prompts = [Prompt(problem=problem, text="", token_ids=tuple(row)) for row in prompt_rows]
    prompt_of_row = [row // size["group"] for row in range(size["prompts"] * size["group"])]
    sampling = Sampling(temperature=1.0, max_new_tokens=size["length"])
    uniform_BT = torch.rand(len(prompt_of_row), size["length"], dtype=torch.float64)

    @torch.no_grad()
    def work() -> None:
        draws = Draws(sampling=sampling, uniform_BT=uniform_BT, ends=(), stops=StopStrings(None, ()))
        decode(model, prompts, prompt_of_row, draws, version=lambda: 0)

    return work


def seconds(work: Callable[[], None]) -> float:
    """Median CPU seconds of a call, after a warm-up call."""
    work()
    repeats = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        repeats.append(time.process_time() - start)
    return statistics.median(repeats)


def operations(work: Callable[[], None]) -> int:
    """Floating-point operations of one call."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def bytes_saved(work: Callable[[], None]) -> int:
    """Bytes of the storages that autograd saves for the backward pass."""
    # By address: several saved tensors may be views of one storage, which is kept once.
    storage_bytes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return sum(storage_bytes.values())


def points() -> Iterator[dict[str, Any]]:
    """One row per point of each curve."""
    for axis, values in CURVES.items():
        for value in values:
            size = {**BASE, axis: value}
            learn = learner(size)
            sample = sampler(size)
            yield {
                "axis": axis,
                "value": value,
                "learn_mflop": operations(learn) / 1e6,
                "learn_s": seconds(learn),
                "learn_kept_mib": bytes_saved(learn) / 2**20,
                "sample_mflop": operations(sample) / 1e6,
                "sample_s": seconds(sample),
            }


def table(rows: list[dict[str, Any]]) -> str:
    """For each size, the growth of every cost from the smallest value to the largest."""
    lines = [
        "| size | from | to | times | learner FLOPs | learner CPU s | bytes saved for backward | sampler FLOPs | "
        "sampler CPU s |",
        "|---|" + "---:|" * 8,
    ]
    for axis in CURVES:
        axis_rows = [row for row in rows if row["axis"] == axis]
        # Costs at the two ends: what grows with the size shows in their ratio.
        first = axis_rows[0]
        last = axis_rows[-1]
        size_ratio = last["value"] / first["value"]
        cells = [axis, str(first["value"]), str(last["value"]), f"{size_ratio:.0f}x"]
        for name in ("learn_mflop", "learn_s", "learn_kept_mib", "sample_mflop", "sample_s"):
            cells.append(f"{last[name] / first[name]:.1f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def four_digits(value: Any) -> Any:
    """A number as it is stored: measurements with four significant digits, sizes and names unchanged."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value


def main(out: Path) -> None:
    # With several threads, CPU seconds would include their waiting for each other.
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in points():
        rows.append(row)
        print(f"{row['axis']} {row['value']}: learn {row['learn_s']:.2f} s, sample {row['sample_s']:.2f} s", flush=True)
    with (out / "growth.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({name: four_digits(value) for name, value in row.items()})
    text = (
        "# How cost grows\n\n<!-- python research/scripts/stored_tables.py growth -->\n\n"
        "`OMP_NUM_THREADS=1 python bench/growth.py`: one size at a time, the others as in "
        f"{BASE}. Cost at the largest size over cost at the smallest.\n\n{table(rows)}\n"
    )
    (out / "growth.md").write_text(text)
    print(table(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("results/speed"))
