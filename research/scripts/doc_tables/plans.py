"""The generated parts of docs/planning.md: the plan beside published times, and the papers' settings on eight GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from doc_tables.common import ROOT, table

from kl_comedy.config import load_config
from kl_comedy.lab.planning.plan import splits
from kl_comedy.lab.planning.sizes import GIB, GPUS, Device, Shape, shape_of
from kl_comedy.lab.planning.timing import (
    IPC,
    NCCL,
    TRANSPORT_COSTS,
    Assumed,
    Drawing,
    Learning,
    Rates,
    drawing_parts,
    learning_parts,
    update_s,
)

ASSUMED = Assumed()
H100 = GPUS["h100-80"]


@cache
def shape(source: str, *overrides: str) -> Shape:
    return shape_of(load_config(None, [f"model.source={source}", *overrides]).model)


def bf16_rates(device: Device, nodes: int = 1) -> Rates:
    return Rates.of(device, ASSUMED, bf16=True, bf16_head=True, ports=8 if nodes > 1 else None)


# --- NeMo-RL ----------------------------------------------------------------------------------------------------------

ROWS, GROUP, UPDATES, CONTEXT = 2048, 32, 4, 4096
"""Of examples/configs/recipes/llm/performance/grpo-llama3.1-8b-instruct-2n8g.yaml."""
PROMPT = 100
"""Tokens of a problem in the chat template; an estimate. The page names mean lengths of prompt and completion."""


def nemo_step_s(trainers: int, engines: int, mean: float, *, nodes: int, transfer: float, overlap: bool) -> float:
    """Seconds of a step of Llama-3.1-8B GRPO: log-probs of policy and reference, four updates, engines in bf16."""
    llama = shape("meta-llama/Llama-3.1-8B-Instruct")
    drawing = Drawing(
        rows=ROWS / engines,
        group=GROUP,
        prompt=PROMPT,
        completion=mean - PROMPT,
        steps=CONTEXT - PROMPT,
        launch_s=llama.layers * ASSUMED.engine_layer_s,
        host_s=ASSUMED.engine_step_s,
    )
    tokens = ROWS * mean / trainers / UPDATES
    learning = Learning(
        line=tokens,
        tokens=tokens,
        context=mean / 2,
        ahead=2,
        head_products=2 + 3,
        recompute=True,
        lora=False,
        micro_batches=1,
        ranks=trainers,
        sharded=False,  # Megatron's data parallel groups reduce gradients once an update
    )
    engine = sum(drawing_parts(llama, bf16_rates(H100), drawing).values())
    rank = UPDATES * sum(learning_parts(llama, bf16_rates(H100, nodes), learning).values())
    load = 2 * llama.parameters * transfer
    return update_s(rank, engine + load, rank if overlap else 0.0)


def nemo_on_policy_s() -> float:
    return nemo_step_s(16, 16, 1060, nodes=2, transfer=IPC, overlap=False)


def nemo_one_step_off_s() -> float:
    return nemo_step_s(8, 8, 1129, nodes=1, transfer=NCCL, overlap=True)


# --- prime-rl ---------------------------------------------------------------------------------------------------------


def prime_tokens_per_s(device: Device, *, lora: bool = False) -> float:
    """Trainer throughput of Qwen3-4B, 16k context, 8 GPUs, 2 micro-batches, weights written after each step."""
    model = shape("Qwen/Qwen3-4B-Instruct-2507", *(["model.lora={rank: 16}"] if lora else []))
    tokens = 2 * 16384
    learning = Learning(
        line=tokens,
        tokens=tokens,
        context=16384 / 2,
        ahead=0,
        head_products=2 if lora else 3,
        recompute=True,
        lora=lora,
        micro_batches=2,
        ranks=8,
        sharded=True,
    )
    written = 0.0 if lora else 2 * model.parameters * TRANSPORT_COSTS["folder"].publish
    return 8 * tokens / (sum(learning_parts(model, bf16_rates(device), learning).values()) + written)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A published figure. ``other``: why the formulas are not of this case; it is shown and not tested."""

    what: str
    unit: str
    value: float
    predict: Callable[[], float]
    source: str
    other: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predict() / self.value


NEMO_4 = "NeMo-RL v0.4, docs/about/performance-summary.md"
NEMO_5 = "NeMo-RL v0.5, docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html"
PRIME = "-Qwen--Qwen3-4B-Instruct-2507-rl-full-8gpu-Recompute-flash_attention_3-16384-cp1-ep1.json"
PRIME_H100, PRIME_H200 = (f"prime-rl, benchmarks/baselines/benchmark-8x{gpu}{PRIME}" for gpu in ("h100", "h200"))
LORA_H100, FOUR_ADAPTERS = PRIME_H100.replace("rl-full", "rl-16"), "it computes four adapters at once"
NEMO_RUN, NEMO_OFF = "Llama-3.1-8B GRPO, 16 H100, on-policy", "the same, one step off, 8 + 8"
PRIME_RUN = "Qwen3-4B trainer, 16k context, 8"
PRIME_LORA = "Qwen3-4B trainer, LoRA of rank 16, 16k context, 8 H100"
PER_GPU, PER_S = "tokens/s a GPU", "tokens/s"
PUBLISHED = [
    Published(NEMO_RUN, "s a step", 97.7, nemo_on_policy_s, NEMO_4),
    Published(NEMO_OFF, "s a step", 74.6, nemo_one_step_off_s, NEMO_4),
    Published(NEMO_RUN, PER_GPU, 1581, lambda: ROWS * 1060 / 16 / nemo_on_policy_s(), NEMO_5),
    Published(NEMO_OFF, PER_GPU, 2478, lambda: ROWS * 1129 / 16 / nemo_one_step_off_s(), NEMO_5),
    Published(f"{PRIME_RUN} H100", PER_S, 26026, lambda: prime_tokens_per_s(H100), PRIME_H100),
    Published(f"{PRIME_RUN} H200", PER_S, 27437, lambda: prime_tokens_per_s(GPUS["h200-141"]), PRIME_H200),
    Published(PRIME_LORA, PER_S, 48002, lambda: prime_tokens_per_s(H100, lora=True), LORA_H100, FOUR_ADAPTERS),
]


def published() -> str:
    rows = [
        (item.what, item.unit, f"{item.value:,g}", f"{item.predict():,.3g}", f"{item.ratio:.2f}", _notes(item))
        for item in PUBLISHED
    ]
    return table(("run", "unit", "published", "predicted", "predicted / published", "source"), rows)


def _notes(item: Published) -> str:
    return f"{item.source} ({item.other})" if item.other else item.source


def papers() -> str:
    """Hours and memory of configs/paper on eight H100, in the fastest division that fits."""
    rows = [
        (
            f"`{path.stem}`",
            f"{split.ranks} + {split.engines}",
            *(f"{seconds:.3g}" for seconds in (split.generate_s, split.transfer_s, split.learn_s, split.update_s)),
            f"{split.trainer_idle:.0%}, {split.engine_idle:.0%}",
            f"{split.run_hours:.0f}",
            f"{split.peak_bytes / GIB:.1f}" + ("" if split.fits else ", does not fit"),
        )
        for path in sorted((ROOT / "configs" / "paper").glob("*.yaml"))
        for split in splits(load_config(path, []), H100, 8)[:1]
    ]
    head = (
        "config",
        "ranks + engines",
        "generate, s",
        "transfer, s",
        "learn, s",
        "update, s",
        "idle",
        "run, h",
        "GiB a rank",
    )
    return table(head, rows)


PARTS = {"published": published, "papers": papers}
