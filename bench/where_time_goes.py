"""Profile of an update by kind of operation: python bench/where_time_goes.py [MODEL] [OUT]

It profiles one batch of sampling, and one forward and backward pass of a quarter of the batch, with torch's profiler,
in seconds of the calling thread. The workload is that of results/speed with random tokens: 4 prompts of about 100
tokens, and 8 completions of 64 tokens each. Writes results/speed/profile.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPTS = 4
GROUP = 8
PROMPT = 100
LENGTH = 64
# In this order: "aten::add" is a part of "aten::addmm", and a product must not count as elementwise.
KINDS = {
    "weight matmuls": ("aten::addmm", "aten::mm", "aten::linear"),
    "attention matmuls": ("aten::bmm", "scaled_dot_product", "aten::baddbmm"),
    "softmax, exponentials, sums": ("softmax", "aten::exp", "aten::cumsum", "aten::sum", "searchsorted", "aten::log"),
    "copies, gathers, allocations": (
        "copy",
        "aten::cat",
        "index",
        "gather",
        "scatter",
        "empty",
        "zero",
        "fill",
        "clone",
        "aten::to",
    ),
    "elementwise": (
        "aten::mul",
        "aten::add",
        "aten::sub",
        "aten::div",
        "silu",
        "aten::neg",
        "pow",
        "rsqrt",
        "aten::mean",
    ),
}
"""Kinds of operations by substrings of their names; the first match counts."""
OUT = Path(__file__).parents[1] / "results" / "speed" / "profile.md"


def kind_of(name: str) -> str:
    """The kind of an operation."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"


def profile_seconds(work: Callable[[], Any]) -> Counter[str]:
    """Seconds of each kind in one call, after a warm-up call."""
    from torch.profiler import ProfilerActivity, profile

    work()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    seconds: Counter[str] = Counter()
    for event in profiler.key_averages():
        # Self time, in microseconds: operations are nested, and their own times add up to the whole.
        seconds[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return seconds


def workloads(model_name: str, folder: str) -> dict[str, Callable[[], Any]]:
    """A function that samples one batch, and one that learns from one group, by name."""
    from kl_comedy.config import load_config
    from kl_comedy.models import PassOptions, token_pass
    from kl_comedy.models.load import load_model
    from kl_comedy.records import Problem, Prompt
    from kl_comedy.rollouts import Sampling
    from kl_comedy.rollouts.hf import HFRollouts

    # The model of a config, so that its kernels are those of a run.
    loaded = load_model(load_config(None, [f"model.source={model_name}", f"output={folder}"]).model)
    ids = torch.randint(10, 4000, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    prompts = []
    for number, row in enumerate(ids.tolist()):
        problem = Problem(id=str(number), text="", answer="")
        prompts.append(Prompt(problem=problem, text="", token_ids=tuple(row)))
    sampler = HFRollouts(loaded, batch_sequences=PROMPTS * GROUP)
    sampling = Sampling(temperature=1.0, max_new_tokens=LENGTH)
    # One group of the batch: learning is done in micro-batches.
    batch: dict[str, Any] = {
        "prompt_ids_BP": ids[:1].expand(GROUP, -1),
        "prompt_mask_BP": torch.ones(GROUP, PROMPT),
        "ids_BT": torch.randint(10, 4000, (GROUP, LENGTH)),
        "mask_BT": torch.ones(GROUP, LENGTH),
    }

    def learn() -> None:
        output = token_pass(loaded.model, PassOptions(temperature=1.0, chunk_elements=2**22), **batch)
        output.logp_BT.sum().backward()
        loaded.model.zero_grad()

    def sample() -> None:
        sampler.generate(prompts, group_size=GROUP, sampling=sampling, seed=1)

    return {"sampling": sample, "learning": learn}


def main(model_name: str, out: Path) -> None:
    """Profile the model, print the page and write it to ``out``."""
    columns: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, work in workloads(model_name, folder).items():
            columns[name] = profile_seconds(work)
            print(f"{name}: {columns[name].total():.2f} s", flush=True)
    lines = [
        "# Where the time goes",
        "",
        f"`python bench/where_time_goes.py {model_name}`, {torch.get_num_threads()} threads; seconds of the calling "
        "thread, profiler on. Learning is one group of four.",
        "",
        "<!-- unchecked: measured -->",
        "",
        "| operations | " + " | ".join(columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for kind in (*KINDS, "other"):
        lines.append(f"| {kind} | " + " | ".join(f"{column[kind]:.2f}" for column in columns.values()) + " |")
    lines.append("| sum | " + " | ".join(f"{column.total():.2f}" for column in columns.values()) + " |")
    print("\n".join(lines))
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    model_argument = sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct"
    out_argument = Path(sys.argv[2]) if len(sys.argv) > 2 else OUT
    main(model_argument, out_argument)
