"""The generated parts of docs/planning.md: the plan beside published times, and the papers' settings on eight GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from doc_tables.common import ROOT, code_span, table

from kl_comedy.config import load_config
from kl_comedy.planning.plan import splits
from kl_comedy.planning.sizes import GIB, GPUS, Device, Shape, shape_of
from kl_comedy.planning.timing import (
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
    # Between nodes, the eight GPUs of each node gather weights over the network; inside a node, over NVLink.
    ports = 8 if nodes > 1 else None
    return Rates.of(device, ASSUMED, bf16=True, bf16_head=True, ports=ports)


# --- NeMo-RL ----------------------------------------------------------------------------------------------------------

# The first four are those of examples/configs/recipes/llm/performance/grpo-llama3.1-8b-instruct-2n8g.yaml.
ROWS = 2048
GROUP = 32
UPDATES = 4
CONTEXT = 4096
PROMPT = 100
"""Tokens of a problem in the chat template; an estimate. The page names mean lengths of prompt and completion."""


def nemo_step_s(trainers: int, engines: int, mean: float, *, nodes: int, transfer: float, overlap: bool) -> float:
    """Seconds per step of Llama-3.1-8B GRPO: log-probs of policy and reference, four updates, engines in bf16.

    ``mean``: tokens per completion with its prompt; ``transfer``: seconds per byte of weights; ``overlap``: whether
    engines generate while the trainers learn; ``nodes``: those of the trainers.
    """
    llama = shape("meta-llama/Llama-3.1-8B-Instruct")
    drawing = Drawing(
        rows=ROWS / engines,
        group=GROUP,
        prompt=PROMPT,
        completion=mean - PROMPT,
        # An engine is busy until the longest of its completions ends, and one of many fills the context.
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
        sharded=False,  # Megatron's data parallel groups reduce gradients once per update
    )
    generate_s = sum(drawing_parts(llama, bf16_rates(H100), drawing).values())
    learn_s = UPDATES * sum(learning_parts(llama, bf16_rates(H100, nodes), learning).values())
    transfer_s = 2 * llama.parameters * transfer  # two bytes per weight
    overlapped_s = learn_s if overlap else 0.0
    return update_s(learn_s, generate_s + transfer_s, overlapped_s)


NEMO_ON_POLICY_TOKENS = 1060
"""Mean tokens per completion with its prompt, as NeMo-RL reports them."""
NEMO_ONE_STEP_OFF_TOKENS = 1129


def nemo_on_policy_s() -> float:
    return nemo_step_s(16, 16, NEMO_ON_POLICY_TOKENS, nodes=2, transfer=IPC, overlap=False)


def nemo_one_step_off_s() -> float:
    return nemo_step_s(8, 8, NEMO_ONE_STEP_OFF_TOKENS, nodes=1, transfer=NCCL, overlap=True)


def nemo_on_policy_tokens_per_s() -> float:
    """Tokens per second and GPU."""
    return ROWS * NEMO_ON_POLICY_TOKENS / 16 / nemo_on_policy_s()


def nemo_one_step_off_tokens_per_s() -> float:
    """Tokens per second and GPU."""
    return ROWS * NEMO_ONE_STEP_OFF_TOKENS / 16 / nemo_one_step_off_s()


# --- prime-rl ---------------------------------------------------------------------------------------------------------


def prime_tokens_per_s(device: Device, *, lora: bool = False) -> float:
    """Trainer throughput of Qwen3-4B, 16k context, 8 GPUs, 2 micro-batches, weights written after each step."""
    if lora:
        model = shape("Qwen/Qwen3-4B-Instruct-2507", "model.lora={rank: 16}")
        head_products = 2  # the head is frozen: no gradient of its weights
        write_s = 0.0  # an adapter is too small to count
    else:
        model = shape("Qwen/Qwen3-4B-Instruct-2507")
        head_products = 3
        write_s = 2 * model.parameters * TRANSPORT_COSTS["folder"].publish
    tokens = 2 * 16384
    learning = Learning(
        line=tokens,
        tokens=tokens,
        context=16384 / 2,
        ahead=0,
        head_products=head_products,
        recompute=True,
        lora=lora,
        micro_batches=2,
        ranks=8,
        sharded=True,
    )
    learn_s = sum(learning_parts(model, bf16_rates(device), learning).values())
    return 8 * tokens / (learn_s + write_s)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A published figure beside our prediction."""

    run: str
    unit: str
    value: float
    predict: Callable[[], float]
    source: str
    other: str = ""
    """Why the formulas do not cover this run; then the row is shown, and not tested."""

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predict() / self.value

    @property
    def notes(self) -> str:
        return f"{self.source} ({self.other})" if self.other else self.source


NEMO_4 = "NeMo-RL v0.4, docs/about/performance-summary.md"
NEMO_5 = "NeMo-RL v0.5, docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html"
NEMO_RUN = "Llama-3.1-8B GRPO, 16 H100, on-policy"
NEMO_OFF = "the same, one step off, 8 + 8"

PRIME_FOLDER = "prime-rl, benchmarks/baselines"
PRIME_MODEL = "Qwen--Qwen3-4B-Instruct-2507"
PRIME_SETTINGS = "8gpu-Recompute-flash_attention_3-16384-cp1-ep1"
PRIME_H100 = f"{PRIME_FOLDER}/benchmark-8xh100-{PRIME_MODEL}-rl-full-{PRIME_SETTINGS}.json"
PRIME_H200 = f"{PRIME_FOLDER}/benchmark-8xh200-{PRIME_MODEL}-rl-full-{PRIME_SETTINGS}.json"
LORA_H100 = f"{PRIME_FOLDER}/benchmark-8xh100-{PRIME_MODEL}-rl-16-{PRIME_SETTINGS}.json"
PRIME_RUN = "Qwen3-4B trainer, 16k context, 8"
PRIME_LORA = "Qwen3-4B trainer, LoRA of rank 16, 16k context, 8 H100"
FOUR_ADAPTERS = "it computes four adapters at once"

PER_STEP = "s per step"
PER_GPU = "tokens/s per GPU"
PER_S = "tokens/s"
PUBLISHED = [
    Published(NEMO_RUN, PER_STEP, 97.7, nemo_on_policy_s, NEMO_4),
    Published(NEMO_OFF, PER_STEP, 74.6, nemo_one_step_off_s, NEMO_4),
    Published(NEMO_RUN, PER_GPU, 1581, nemo_on_policy_tokens_per_s, NEMO_5),
    Published(NEMO_OFF, PER_GPU, 2478, nemo_one_step_off_tokens_per_s, NEMO_5),
    Published(f"{PRIME_RUN} H100", PER_S, 26026, partial(prime_tokens_per_s, H100), PRIME_H100),
    Published(f"{PRIME_RUN} H200", PER_S, 27437, partial(prime_tokens_per_s, GPUS["h200-141"]), PRIME_H200),
    Published(PRIME_LORA, PER_S, 48002, partial(prime_tokens_per_s, H100, lora=True), LORA_H100, FOUR_ADAPTERS),
]


def published() -> str:
    """Published times and throughputs beside those that the plan predicts."""
    rows = []
    for item in PUBLISHED:
        figures = (f"{item.value:,g}", f"{item.predict():,.3g}", f"{item.ratio:.2f}")
        rows.append((item.run, item.unit, *figures, item.notes))
    return table(("run", "unit", "published", "predicted", "predicted / published", "source"), rows)


def papers() -> str:
    """Hours and memory of configs/paper on eight H100, in the fastest division that fits."""
    rows = []
    for path in sorted((ROOT / "configs" / "paper").glob("*.yaml")):
        # The splits are sorted: those that fit first, then by time.
        split = splits(load_config(path, []), H100, 8)[0]
        memory = f"{split.peak_bytes / GIB:.1f}"
        if not split.fits:
            memory += ", does not fit"
        rows.append(
            (
                code_span(path.stem),
                f"{split.ranks} + {split.engines}",
                f"{split.generate_s:.3g}",
                f"{split.transfer_s:.3g}",
                f"{split.learn_s:.3g}",
                f"{split.update_s:.3g}",
                f"{split.trainer_idle:.0%}, {split.engine_idle:.0%}",
                f"{split.run_hours:.0f}",
                memory,
            )
        )
    head = (
        "config",
        "ranks + engines",
        "generate, s",
        "transfer, s",
        "learn, s",
        "update, s",
        "idle",
        "run, h",
        "GiB per rank",
    )
    return table(head, rows)


PARTS = {"published": published, "papers": papers}
