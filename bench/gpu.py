"""Measure speed and memory on one GPU, in about ten minutes; writes results/gpu: python bench/gpu.py

    --parts learn-1.5b trl   run these parts only; the results of the others stay
    --device cpu --tiny      rehearse every part on a CPU, with small sizes; results go to a temporary folder
    --page                   measure nothing; write the page again

Models have the shapes of Qwen2.5 and random weights, and rows have random tokens: no network is needed. Each part runs
in a process of its own with a time limit, and its results are written when it ends. If it fails, the error is stored as
its result.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "gpu"
GIB = 2**30
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
"""Sizes of every model with ``--tiny``."""
GROUP = 8
"""Completions per prompt."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The work of a part: ``rows`` completions of ``length`` tokens after prompts of ``prompt`` tokens."""

    device: str
    tiny: bool
    """Whether this is a rehearsal; models are small then, too."""
    prompt: int = 128
    length: int = 1024
    rows: int = 64

    @classmethod
    def of(cls, device: str, tiny: bool) -> Sizes:
        """The full sizes, or those of a rehearsal."""
        if tiny:
            return cls(device=device, tiny=True, prompt=12, length=24, rows=16)
        return cls(device=device, tiny=False)


# --- models and rows --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shape_folder(name: str, sizes: Sizes) -> Iterator[Path]:
    """A folder with the config.json of Qwen/Qwen2.5-``name``, without weights."""
    from kl_comedy.planning.sizes import known_config

    changes = SMALL if sizes.tiny else {}
    config = known_config(f"Qwen/Qwen2.5-{name}", **changes)
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        config.save_pretrained(folder)
        yield Path(folder)


@contextlib.contextmanager
def random_weights(sizes: Sizes) -> Iterator[None]:
    """Inside, loading a policy gives random weights and the tokenizer of the pocket policy."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kl_comedy.models import load
    from kl_comedy.models.pocket import build_tokenizer

    def load_base(config: Any) -> Any:
        torch.manual_seed(0)
        # Made on the device: billions of random numbers on the CPU would take longer than the measurement.
        with torch.device(sizes.device):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config.source),
                dtype=getattr(torch, config.dtype),
                attn_implementation="sdpa",
            )

    def load_tokenizer(config: Any) -> Any:
        return build_tokenizer()

    with patch.object(load, "load_base", load_base), patch.object(load, "load_tokenizer", load_tokenizer):
        yield


def overrides(folder: Path, sizes: Sizes, *settings: str) -> list[str]:
    """The config of a run with bf16 autocast and one k3 term in the loss; the other fields have their defaults."""
    return [
        f"model={{source: {folder}, device: {sizes.device}, options: {{}}}}",
        "train.precision=bf16",
        "train.checkpoint_every=0",
        f"rollout.prompts_per_batch={sizes.rows // GROUP}",
        f"rollout.group_size={GROUP}",
        f"rollout.max_new_tokens={sizes.length}",
        f"data.prompt.max_tokens={sizes.prompt}",
        "rewards=[{name: zero}]",
        "kl=[{estimator: k3, placement: loss, beta: 0.01}]",
        "tracking.uri=none",
        *settings,
    ]


def prompts_of(sizes: Sizes) -> list[Any]:
    """One prompt of digits per group, all of the same length."""
    from kl_comedy.records import Problem, Prompt

    prompts = []
    for number in range(sizes.rows // GROUP):
        text = "1" * (sizes.prompt - 1) + str(number % 10)
        problem = Problem(id=str(number), text=text, answer="")
        # In the pocket vocabulary the digits follow two special tokens.
        token_ids = tuple(int(digit) + 2 for digit in text)
        prompts.append(Prompt(problem=problem, text=text, token_ids=token_ids))
    return prompts


def scored_rows(sizes: Sizes, vocabulary: int) -> list[Any]:
    """Completions of random tokens, all of the same length, with rewards that differ within groups."""
    import torch

    from kl_comedy.records import Reward, Rollout, Scored

    generator = torch.Generator().manual_seed(0)
    # The sampler's log-prob of each token, nats: random weights give a nearly uniform distribution.
    logp = -float(torch.tensor(float(vocabulary)).log())
    rows = []
    for group, prompt in enumerate(prompts_of(sizes)):
        for number in range(GROUP):
            # From 20 on, so that no special token (padding, end) is among them.
            ids = torch.randint(20, vocabulary, (sizes.length,), generator=generator).tolist()
            rollout = Rollout(
                prompt=prompt,
                group_id=group,
                completion_ids=tuple(ids),
                logps=(logp,) * sizes.length,
                versions=(0,) * sizes.length,
                stop_reason="length",
                text="",
            )
            # Equal rewards within a group would give advantages of 0.
            rows.append(Scored(rollout=rollout, reward=Reward(value=float(number % 2))))
    return rows


# --- what is measured -------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    """Wait for the GPU: its work is queued, so that a clock read without this would not include it."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str, *, repeats: int = 3) -> float:
    """Seconds of the shortest of ``repeats`` calls, after one call to warm up."""
    work()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def memory(device: str) -> dict[str, float]:
    """Peaks in GiB. ``process`` is what the driver reports as taken, CUDA's context included.

    On a CPU it is the peak resident size, and the only entry.
    """
    import resource

    import torch

    if device == "cpu":
        # ru_maxrss is in KiB on Linux.
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "process": (total - free) / GIB,
    }


def known_device() -> Any:
    """The entry of this GPU among those that ``kl-comedy plan`` knows.

    It is the H100's for an unknown GPU, and this machine's without a GPU.
    """
    import torch

    from kl_comedy.planning.sizes import GPUS, device_named

    if not torch.cuda.is_available():
        return device_named("cpu")
    device_name = torch.cuda.get_device_name().upper()
    for key, gpu in GPUS.items():
        # A key is a model and its memory, such as h100-80; the driver's name has the model only.
        model = key.split("-")[0].upper()
        if model in device_name:
            return gpu
    return GPUS["h100-80"]


def useful_flops(shape: Any, sizes: Sizes, *, lora: bool) -> float:
    """FLOPs of an update per completion token: 2 per parameter and pass, and the scores of attention.

    Passes: the reference's forward, the policy's forward and its backward (twice a forward; once with frozen weights).
    Not counted: recomputation, and the second product of the reference's head that exact KL takes.
    """
    # A backward computes the gradients of inputs and of weights; LoRA needs only the first of a frozen weight.
    backward_passes = 1 if lora else 2
    forward_passes = 2
    mean_context = sizes.prompt + sizes.length / 2
    products = 2 * (shape.body + shape.vocabulary * shape.hidden)
    # Scores and their product with the values: 2 FLOPs each per element of a head and per position.
    attention = 4 * shape.layers * shape.heads * shape.head_dim * mean_context
    flops: float = (forward_passes + backward_passes) * (products + attention)
    return flops


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How an update is computed."""

    precision: str
    """Of float32 products, as torch names it. Under bf16 autocast these are the head's alone."""
    deterministic: bool


ADAPTER = ("model.dtype=bfloat16", "model.lora={rank: 16}")
NARROW_HEAD = "model.head_dtype=bfloat16"
DEFAULT = "as configured"
MODES = {
    DEFAULT: Mode(precision="highest", deterministic=True),
    "TF32": Mode(precision="high", deterministic=True),
    "not deterministic": Mode(precision="highest", deterministic=False),
}
WARM_UP = "warm-up"
UPDATES_PER_MODE = 2


def fixed_rows(config: Any, sizes: Sizes) -> Any:
    """A data module that gives the same rows to every update, in place of sampling."""
    import lightning

    from kl_comedy.training.experience import Batch, ExperienceStream

    class Sampler:
        """Takes the new weights of each update and does nothing with them."""

        version = 0

        def update_weights(self, version: int) -> None:
            self.version = version

    class Source:
        """The source of every update's rows."""

        def __init__(self, rows: list[Any]) -> None:
            self.rows = rows

        def take(self, iteration: int) -> Batch:
            no_times = dict.fromkeys(("time/generate", "time/score", "time/wait"), 0.0)
            return Batch(rows=self.rows, metrics=no_times)

    class FixedRows(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            module: Any = self.trainer.lightning_module
            # First, because the rows need the size of the policy's vocabulary.
            module.load()
            module.backend = Sampler()
            rows = scored_rows(sizes, module.loaded.causal.config.vocab_size)
            # Any: a source also saves its state for checkpoints, and nothing is saved here.
            source: Any = Source(rows)
            self.stream = ExperienceStream(config, None, source)

        def train_dataloader(self) -> Any:
            return self.stream

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            # Rows are records of Python numbers: Lightning finds no tensor to move.
            return batch

    return FixedRows()


def update_timer(labels: Sequence[str], device: str, updates: dict[str, list[float]]) -> Any:
    """A callback that sets the mode of each update and appends its seconds to ``updates``, by label.

    ``labels`` has one entry per update: :data:`WARM_UP`, which has the default mode, or a name of :data:`MODES`.
    """
    import lightning
    import torch

    class UpdateTimer(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            label = labels[index]
            mode = MODES[DEFAULT] if label == WARM_UP else MODES[label]
            torch.set_float32_matmul_precision(mode.precision)
            torch.use_deterministic_algorithms(mode.deterministic)
            synchronize(device)
            self.start = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            synchronize(device)
            updates.setdefault(labels[index], []).append(time.perf_counter() - self.start)

    return UpdateTimer()


def learn(name: str, sizes: Sizes, *settings: str, modes: Sequence[str] = (DEFAULT,)) -> dict[str, Any]:
    """Updates of fixed rows through Lightning's Trainer: seconds and tokens/s, and memory next to the plan's."""
    from kl_comedy.config import load_config
    from kl_comedy.planning.plan import PHASES, Plan
    from kl_comedy.training.fit import make_trainer
    from kl_comedy.training.module import PolicyModule

    labels = [WARM_UP]
    for mode in modes:
        labels += [mode] * UPDATES_PER_MODE
    updates: dict[str, list[float]] = {}

    with shape_folder(name, sizes) as folder, random_weights(sizes):
        config = load_config(None, overrides(folder, sizes, f"train.steps={len(labels)}", *settings))
        planned = Plan(config, known_device())
        trainer = make_trainer(config, [update_timer(labels, sizes.device, updates)])
        module = PolicyModule(config)
        trainer.fit(module, datamodule=fixed_rows(config, sizes))
        # A check on the work: two runs that computed the same have the same values.
        metrics = {key: module.last_metrics[key] for key in ("kl/exact_reverse_token", "grad/norm", "policy/entropy")}

    tokens = sizes.rows * sizes.length
    flops_per_token = useful_flops(planned.shape, sizes, lora=config.model.lora is not None)
    rates = {}
    for mode in modes:
        update_s = min(updates[mode])
        rates[mode] = {
            "update_s": update_s,
            "tokens_per_s": tokens / update_s,
            "mfu": flops_per_token * tokens / update_s / planned.device.bf16_flops,
        }

    planned_gib = {}
    for phase in PHASES:
        planned_gib[phase] = sum(item.bytes for item in planned.components if item.phase == phase) / GIB
    # Nothing is sampled here, so that the plan's memory of that phase does not count.
    expected = planned_gib["always"] + planned_gib["learning"]
    components = {item.name: item.bytes / GIB for item in planned.components if item.phase != "sampling"}
    measured = memory(sizes.device)
    return {
        "words": settings,
        "parameters": planned.shape.parameters,
        "trainable": planned.shape.trainable,
        "tokens": tokens,
        "warm_up_s": updates[WARM_UP][0],
        "rates": rates,
        "useful_flops_per_token": flops_per_token,
        "peak_flops": planned.device.bf16_flops,
        "memory_gib": measured,
        "planned_gib": expected,
        "planned_over_measured": expected / measured["process"],
        "components_gib": components,
        "planned_learn_s": planned.timing.learn_s,
        "last_metrics": metrics,
    }


def machine(sizes: Sizes) -> dict[str, Any]:
    """The most that this device does: matrix products of random numbers, copies in its memory."""
    import torch

    width = 256 if sizes.tiny else 8192
    rates = {}
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("float32", torch.float32, "highest"),
        ("tf32", torch.float32, "high"),
    ):
        torch.set_float32_matmul_precision(precision)
        rates[name] = product_rate(width, dtype, sizes.device)

    # 8 GiB: far more than the caches hold.
    block_bytes = 2**24 if sizes.tiny else 8 * GIB
    block = torch.ones(block_bytes // 4, device=sizes.device)
    copy_s = seconds(block.clone, sizes.device)
    # Every byte is read once and written once.
    return {"products_tflops": rates, "copy_gb_per_s": 2 * block.nbytes / copy_s / 1e9}


def product_rate(width: int, dtype: Any, device: str) -> float:
    """TFLOP/s of a product of two random square matrices."""
    import torch

    left = torch.randn(width, width, device=device, dtype=dtype)
    right = torch.randn(width, width, device=device, dtype=dtype)
    product_s = seconds(lambda: left @ right, device, repeats=10)
    return 2 * width**3 / product_s / 1e12


def head(sizes: Sizes) -> dict[str, Any]:
    """The head's log-probs and exact KL, forward and backward, by the type of its product; and products alone."""
    import torch

    from kl_comedy.models.head import HeadSettings, head_columns
    from kl_comedy.models.introspection import head_chunk
    from kl_comedy.models.types import Wanted

    if sizes.tiny:
        tokens, width, vocabulary = 64, 64, 512
    else:
        tokens, width, vocabulary = 8192, 1536, 151_936  # of a 1.5B policy
    device = torch.device(sizes.device)
    hidden = torch.randn(tokens, width, device=device)
    weight = 0.02 * torch.randn(vocabulary, width, device=device)
    ids = torch.randint(vocabulary, (tokens,), device=device)
    results: dict[str, Any] = {}

    def forward_backward(dtype: torch.dtype) -> None:
        leaf_hidden = hidden.detach().requires_grad_(True)
        leaf_weight = weight.to(dtype).requires_grad_(True)
        columns = head_columns(
            leaf_hidden,
            (leaf_weight, None),
            ids,
            HeadSettings(temperature=1.0, chunk_elements=head_chunk(None, device)),
            Wanted(kl=True, entropy=True),
            reference=(hidden, (leaf_weight.detach(), None)),
        )
        (columns["logp"] + columns["kl"]).sum().backward()

    for name, dtype, precision in (
        ("float32", torch.float32, "highest"),
        ("TF32", torch.float32, "high"),
        ("bfloat16 weights", torch.bfloat16, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        work = functools.partial(forward_backward, dtype)
        results[name] = {"forward_backward_s": seconds(work, sizes.device)}

    torch.set_float32_matmul_precision("highest")
    for name, measured in product_accuracy(hidden[:1024], weight, sizes.device).items():
        results[f"product {name}"] = measured
    return {"tokens": tokens, "variants": results}


def product_accuracy(hidden: Any, weight: Any, device: str) -> dict[str, Any]:
    """TFLOP/s of the head's product by type, and its largest error against float64."""
    import torch

    rows = hidden.bfloat16()
    columns = weight.bfloat16().t()
    products = {
        "float32": lambda: hidden @ weight.t(),
        "bfloat16": lambda: rows @ columns,
        "bfloat16 to float32": lambda: torch.mm(rows, columns, out_dtype=torch.float32),
    }
    flops = 2 * len(rows) * hidden.shape[1] * len(weight)
    results: dict[str, Any] = {}
    for name, product in products.items():
        # out_dtype does not exist on every device.
        with guarded(results, name):
            exact = hidden.double() @ weight.t().double()
            result = product().double()
            results[name] = {
                "tflops": flops / seconds(product, device) / 1e12,
                "largest_error": float((result - exact).abs().max()),
            }
            # More than a gigabyte each: free them before the next product makes its own.
            del exact, result
    return results


@contextlib.contextmanager
def guarded(results: dict[str, Any], name: str) -> Iterator[None]:
    """Store an error as the result of ``name``: other variants are still measured."""
    try:
        yield
    except Exception as error:
        results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def attention(sizes: Sizes) -> dict[str, Any]:
    """One attention layer of a 1.5B policy in bf16, forward and backward, on the rows of an update: milliseconds."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kl_comedy.models.attention import pack_batch

    if sizes.tiny:
        heads, key_heads, width = 4, 2, 16
    else:
        heads, key_heads, width = 12, 2, 128
    device = torch.device(sizes.device)
    rows = min(sizes.rows, 32)
    results: dict[str, Any] = {}

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def measure(name: str, forward: Callable[[], Any]) -> None:
        def forward_backward() -> None:
            forward().sum().backward()

        with guarded(results, name):
            results[name] = {"ms": 1e3 * seconds(forward_backward, sizes.device)}

    # Rows of a group share their prompt: the policy reads it once, and a mask says what each token sees.
    groups = torch.arange(rows // GROUP, device=device)
    prompt_BP = groups.repeat_interleave(GROUP)[:, None].expand(-1, sizes.prompt)
    ids_BT = torch.ones(rows, sizes.length, dtype=torch.long, device=device)
    packed = pack_batch(prompt_BP, torch.ones_like(prompt_BP), ids_BT, torch.ones_like(ids_BT))
    packed_length = len(packed.ids_S)
    query = random(packed_length, key_heads, heads // key_heads, width)
    key = random(packed_length, key_heads, width)
    value = random(packed_length, key_heads, width)
    measure("shared prompts, mask", lambda: packed.attend(0, query, key, value, width**-0.5))

    # The same rows, each with its own prompt.
    row_length = sizes.prompt + sizes.length
    query_BHSD, key_BHSD, value_BHSD = [random(rows, heads, row_length, width) for _ in range(3)]
    measure(
        "rows apart, causal flag",
        lambda: scaled_dot_product_attention(query_BHSD, key_BHSD, value_BHSD, is_causal=True),
    )

    query_SHD, key_SHD, value_SHD = [random(rows * row_length, heads, width) for _ in range(3)]

    def varlen() -> Any:
        # Imported here, so that a torch without it fails in this variant alone.
        from torch.nn.attention.varlen import varlen_attn

        starts = torch.arange(0, (rows + 1) * row_length, row_length, dtype=torch.int32, device=device)
        # Versions of torch say "causal" in two ways.
        causal: dict[str, Any] = {"window_size": (-1, 0)}
        if "is_causal" in inspect.signature(varlen_attn).parameters:
            causal = {"is_causal": True}
        return varlen_attn(query_SHD, key_SHD, value_SHD, starts, starts, row_length, row_length, **causal)

    measure("rows apart, variable lengths", varlen)
    return {"rows": rows, "line": packed_length, "variants": results}


def decode(sizes: Sizes) -> dict[str, Any]:
    """The ``hf`` sampler with a 1.5B policy: milliseconds per step of all rows."""
    steps = min(sizes.length, 128)
    results = {
        "bf16 autocast": sampler_speed(sizes, steps, autocast=True),
        "bf16 weights": sampler_speed(sizes, steps, *ADAPTER, autocast=False),
    }
    return {"rows": sizes.rows, "steps": steps, "variants": results}


def sampler_speed(sizes: Sizes, steps: int, *settings: str, autocast: bool) -> dict[str, float]:
    """Speed of the steps after the first, and seconds of reading the prompts and drawing one token."""
    import torch

    from kl_comedy.config import load_config
    from kl_comedy.models import load_model
    from kl_comedy.rollouts import Sampling, build_hf

    with shape_folder("1.5B", sizes) as folder, random_weights(sizes):
        config = load_config(None, overrides(folder, sizes, *settings))
        loaded = load_model(config.model)
    backend = build_hf(config.rollout, loaded=loaded)

    def sample(new_tokens: int) -> Any:
        with torch.autocast(sizes.device, torch.bfloat16, enabled=autocast, cache_enabled=False):
            sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens)
            return backend.generate(prompts_of(sizes), group_size=GROUP, sampling=sampling, seed=0)

    one_token_s = seconds(lambda: sample(1), sizes.device, repeats=1)
    all_tokens_s = seconds(lambda: sample(steps), sizes.device, repeats=1)
    step_s = (all_tokens_s - one_token_s) / (steps - 1)
    return {"ms_per_step": 1e3 * step_s, "tokens_per_s": sizes.rows / step_s, "prompts_s": one_token_s}


def transfer(sizes: Sizes) -> dict[str, Any]:
    """The weights of a 7B policy in bf16: from the device to host memory, hashed, to a file."""
    import torch
    from safetensors.torch import save_file

    from kl_comedy.models.weights import Checksums

    pieces = 60
    piece_bytes = 2**18 if sizes.tiny else 254 * 10**6
    numbers = piece_bytes // 2
    weights = {}
    for n in range(pieces):
        weights[f"w{n}"] = torch.full((numbers,), float(n), dtype=torch.bfloat16, device=sizes.device)
    total = sum(weight.nbytes for weight in weights.values())
    times: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        synchronize(sizes.device)
        start = time.perf_counter()
        result = work()
        synchronize(sizes.device)
        times[name] = time.perf_counter() - start
        return result

    def to_pageable() -> dict[str, Any]:
        return {name: weight.to("cpu", copy=True) for name, weight in weights.items()}

    copies = timed("to pageable memory", to_pageable)

    if sizes.device == "cuda":
        buffer = torch.empty(numbers, dtype=torch.bfloat16, pin_memory=True)

        def to_pinned() -> None:
            for weight in weights.values():
                buffer.copy_(weight, non_blocking=True)

        timed("to pinned memory", to_pinned)

    checksums = Checksums()

    def hash_a_tenth() -> None:
        for name in list(copies)[: pieces // 10]:
            checksums.add(name, copies[name])

    timed("SHA-256 of a tenth", hash_a_tenth)

    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        names = list(copies)

        def write() -> None:
            # Four tensors per file: about a gigabyte.
            for number, first in enumerate(range(0, pieces, 4)):
                part = {name: copies[name] for name in names[first : first + 4]}
                save_file(part, Path(folder) / f"{number}.safetensors")

        timed("safetensors to a file", write)
    return {"gb": total / 1e9, "seconds": times}


TRL_ROWS_PER_BACKWARD = 8


def trl(sizes: Sizes) -> dict[str, Any]:
    """GRPO of TRL on the rows of ``learn-0.5b``: its Trainer, with fixed completions in place of generation."""
    # Where bench/speed/setup.py puts it; at the end, so that an installed TRL comes first.
    sys.path.append(str(ROOT / "bench" / "speed" / ".trl"))
    try:
        import trl
        from datasets import Dataset  # TRL imports it late; without it TRL is not installed either
        from transformers import TrainerCallback
    except ImportError as error:
        return {"skipped": f"not installed here: {error}"}
    import torch

    ends: list[float] = []

    class Meter(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(sizes.device)
            ends.append(time.perf_counter())

    with shape_folder("0.5B", sizes) as folder, tempfile.TemporaryDirectory(prefix="bench_gpu_") as model:
        vocabulary = save_random_model(folder, sizes, Path(model))
        dataset = Dataset.from_list([{"prompt": prompt.text} for prompt in prompts_of(sizes)])
        trainer = trl_trainer(model, folder, sizes, dataset, Meter())
        completions = [list(row.rollout.completion_ids) for row in scored_rows(sizes, vocabulary)]
        trainer._generate_single_turn = lambda *_, **__: (completions, None)
        if sizes.device == "cuda":
            # What building the models needed is not the trainer's.
            torch.cuda.reset_peak_memory_stats()
        trainer.train()

    # From the end of the first update on: that one warms up.
    update_s = min(later - earlier for earlier, later in itertools.pairwise(ends[1:]))
    tokens = sizes.rows * sizes.length
    return {
        "version": trl.__version__,
        "rows_per_backward": TRL_ROWS_PER_BACKWARD,
        "tokens": tokens,
        "update_s": update_s,
        "tokens_per_s": tokens / update_s,
        "memory_gib": memory(sizes.device),
    }


def save_random_model(shape: Path, sizes: Sizes, folder: Path) -> int:
    """Save a policy of random weights and its tokenizer for transformers. Returns the size of its vocabulary."""
    from kl_comedy.config import load_config
    from kl_comedy.models import load
    from kl_comedy.models.pocket import build_tokenizer

    with random_weights(sizes):
        base = load.load_base(load_config(None, overrides(shape, sizes)).model)
    base.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    vocabulary: int = base.config.vocab_size
    return vocabulary


def trl_trainer(model: str, folder: Path, sizes: Sizes, dataset: Any, callback: Any) -> Any:
    """TRL's GRPO trainer with the settings of ``learn-0.5b``, for three updates."""
    import trl

    from kl_comedy.models.pocket import build_tokenizer

    def rewards(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(number % 2) for number in range(len(completions))]

    settings = trl.GRPOConfig(
        output_dir=str(folder),
        max_steps=3,
        learning_rate=1e-6,
        beta=0.01,
        num_generations=GROUP,
        max_completion_length=sizes.length,
        per_device_train_batch_size=TRL_ROWS_PER_BACKWARD,
        gradient_accumulation_steps=sizes.rows // TRL_ROWS_PER_BACKWARD,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        bf16=sizes.device == "cuda",
        use_cpu=sizes.device == "cpu",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=settings,
        train_dataset=dataset,
        processing_class=build_tokenizer(),
        callbacks=[callback],
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measurement, in a process of its own."""

    limit_s: int
    """Seconds after which the process is killed."""
    work: Callable[[Sizes], dict[str, Any]]


PARTS = {
    "machine": Part(limit_s=60, work=machine),
    "learn-1.5b": Part(limit_s=120, work=lambda sizes: learn("1.5B", sizes, modes=tuple(MODES))),
    "learn-1.5b-bf16-head": Part(limit_s=90, work=lambda sizes: learn("1.5B", sizes, NARROW_HEAD)),
    "learn-1.5b-varlen": Part(
        limit_s=90, work=lambda sizes: learn("1.5B", sizes, NARROW_HEAD, "model.attention=varlen")
    ),
    "learn-0.5b": Part(limit_s=90, work=lambda sizes: learn("0.5B", sizes)),
    "learn-7b-lora": Part(limit_s=150, work=lambda sizes: learn("7B", sizes, *ADAPTER)),
    "decode": Part(limit_s=90, work=decode),
    "head": Part(limit_s=60, work=head),
    "attention": Part(limit_s=60, work=attention),
    "transfer": Part(limit_s=90, work=transfer),
    "trl": Part(limit_s=90, work=trl),
}


# --- processes and results --------------------------------------------------------------------------------------------


def environment(sizes: Sizes) -> dict[str, Any]:
    """What the numbers were measured with, without host name or paths."""
    import torch

    from kl_comedy.tracking import provenance_tags

    tags = provenance_tags()
    commit = tags["git.commit"][:12]
    if tags["git.dirty"] == "true":
        commit += ", with changes"
    on_gpu = sizes.device == "cuda"
    versions = {}
    for name in ("torch", "transformers", "lightning", "peft", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "rehearsal": sizes.tiny or not on_gpu,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def run_part(name: str, sizes: Sizes, file: Path) -> None:
    """Measure one part in this process and write its results."""
    import warnings

    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    results = PARTS[name].work(sizes)
    about = {"part": name, "environment": environment(sizes), "seconds": time.perf_counter() - start}
    file.write_text(json.dumps({**about, **results}, indent=1) + "\n")


def run_parts(names: Sequence[str], sizes: Sizes, out: Path, minutes: float) -> bool:
    """Run each part in its process, one after another. Returns whether none failed."""
    end = time.monotonic() + 60 * minutes
    # A rehearsal's sizes are small, and a CPU is slow.
    limit_factor = 10 if sizes.tiny else 1
    all_done = True
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        file = out / f"{name}.json"
        limit_s = min(limit_factor * PARTS[name].limit_s, end - time.monotonic())
        # An older result must not stand in for a part that fails now.
        file.unlink(missing_ok=True)
        if limit_s > 5:
            error = run_process(name, sizes, file, limit_s)
        else:
            error = "no time was left for it"
        if error is not None:
            all_done = False
            failure = {"part": name, "environment": environment(sizes), "error": error}
            file.write_text(json.dumps(failure, indent=1) + "\n")
        # After each part, so that a run that is cut short leaves a page of what it measured.
        write_page(out)
        print(f"{name}: {error or 'done'}", flush=True)
    return all_done


def run_process(name: str, sizes: Sizes, file: Path, limit_s: float) -> str | None:
    """Run one part in a process of its own. Returns its error, or None if it wrote its results."""
    command = [sys.executable, str(Path(__file__).resolve())]
    command += ["--part", name, "--device", sizes.device, "--out", str(file)]
    if sizes.tiny:
        command.append("--tiny")

    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # cuBLAS is not deterministic without it, and torch then raises an error.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    if sizes.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""

    # A file and not a pipe: a full pipe would block a child that nobody reads.
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        code: int | None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        # The whole session: what the part has started would keep the GPU's memory.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        lines = [line.rstrip()[:300] for line in log if line.strip()]

    if code == 0 and file.exists():
        return None
    print("\n".join(lines[-25:]), flush=True)
    if code is None:
        return f"not done in {limit_s:.0f} s"
    last_line = lines[-1] if lines else "no output"
    return f"exit code {code}: {last_line}"


# --- the page ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """# On one GPU

    make gpu                 # the tests of tests/gpu, then the bench; about fifteen minutes
    python bench/gpu.py      # the bench alone

It needs a GPU, torch, transformers, lightning, peft, accelerate, omegaconf, rich, typer, psutil and pytest, and no
network. Models have the shapes of Qwen2.5 and random weights; rows are groups of 8 completions of 1,024 random tokens
after prompts of 128. `bench/gpu.py` says what each part does; the JSON files here hold everything that it measured.
"""
NOTHING = "\nNothing was measured yet: no GPU was at hand. The tests and the bench were rehearsed on a CPU.\n"


def write_page(out: Path) -> None:
    (out / "README.md").write_text(page(out))


def page(out: Path) -> str:
    """The page of the results in ``out``."""
    results = {}
    for name in PARTS:
        file = out / f"{name}.json"
        if file.exists():
            results[name] = json.loads(file.read_text())
    if not results:
        return INTRODUCTION + NOTHING

    lines = [INTRODUCTION]
    # Parts may come from several machines or commits; the order is fixed by the text.
    environments = {json.dumps(result["environment"], sort_keys=True) for result in results.values()}
    for text in sorted(environments):
        lines.append(_environment_line(json.loads(text)))
    for name, result in results.items():
        lines += [f"## {name}", ""]
        if "error" in result:
            lines.append(result["error"])
        elif "skipped" in result:
            lines.append(result["skipped"])
        else:
            lines += _part_lines(name, result)
        lines.append("")
    return "\n".join(lines)


def _environment_line(measured_with: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in measured_with["versions"].items())
    rehearsal = "A rehearsal, no measurement: " if measured_with["rehearsal"] else ""
    return (
        f"{rehearsal}{measured_with['device']}, CUDA {measured_with['cuda']}, {measured_with['cores']} cores, "
        f"Python {measured_with['python']}, {versions}; commit {measured_with['commit']}, {measured_with['date']}.\n"
    )


def _part_lines(name: str, result: dict[str, Any]) -> list[str]:
    """The Markdown lines of one part's results."""
    if name.startswith("learn"):
        return _learn_lines(result)
    if name == "machine":
        rates = ", ".join(f"{kind} {rate:,.1f}" for kind, rate in result["products_tflops"].items())
        return [
            f"Matrix products, TFLOP/s: {rates}.",
            f"A copy in its memory: {result['copy_gb_per_s']:,.0f} GB/s, read and written.",
        ]
    if name == "transfer":
        lines = [f"{result['gb']:.2f} GB in bf16.", "", "| step | seconds |", "|---|---:|"]
        for step, step_s in result["seconds"].items():
            lines.append(f"| {step} | {step_s:.2f} |")
        return lines
    if name == "trl":
        return [
            f"TRL {result['version']} GRPO on the rows of learn-0.5b, {result['rows_per_backward']} rows a backward: "
            f"{result['update_s']:.2f} s an update, {result['tokens_per_s']:,.0f} tokens/s, "
            f"{result['memory_gib']['process']:.1f} GiB."
        ]
    return _variant_lines(result)


def _learn_lines(result: dict[str, Any]) -> list[str]:
    settings = f" ({', '.join(result['words'])})" if result["words"] else ""
    lines = [
        f"{result['parameters'] / 1e9:.2f} B parameters, {result['trainable'] / 1e9:.3f} B trained{settings}, "
        f"{result['tokens']:,} completion tokens an update, reference pass, exact KL and entropy included.",
        "",
        "| | update, s | tokens/s | MFU |",
        "|---|---:|---:|---:|",
    ]
    for mode, rate in result["rates"].items():
        lines.append(f"| {mode} | {rate['update_s']:.2f} | {rate['tokens_per_s']:,.0f} | {rate['mfu']:.1%} |")
    peaks = ", ".join(f"{kind} {value:.1f}" for kind, value in result["memory_gib"].items())
    lines += [
        "",
        f"Memory, GiB: {peaks}; planned {result['planned_gib']:.1f}, {result['planned_over_measured']:.2f} of the "
        f"process's. Planned seconds of learning: {result['planned_learn_s']:.2f}. MFU: useful products "
        f"({result['useful_flops_per_token'] / 1e9:.1f} GFLOP a token) over {result['peak_flops'] / 1e12:,.1f}.",
    ]
    return lines


def _variant_lines(result: dict[str, Any]) -> list[str]:
    """The table of a part that compares variants: decode, head or attention."""
    counts = [f"{key}: {result[key]:,}" for key in ("rows", "steps", "tokens", "line") if key in result]
    lines = [", ".join(counts) + ".", "", "| variant | measured |", "|---|---|"]
    for variant, measured in result["variants"].items():
        cells = []
        for quantity, value in measured.items():
            # A variant that failed has its error, a text, in place of numbers.
            if isinstance(value, str):
                cells.append(value)
            else:
                cells.append(f"{quantity.replace('_', ' ')} {value:.4g}")
        lines.append(f"| {variant} | {', '.join(cells)} |")
    return lines


def output_folder(options: argparse.Namespace) -> Path:
    """``--out``, or else results/gpu; a rehearsal writes to a temporary folder, because its numbers are no results."""
    if options.out is not None:
        return Path(options.out)
    rehearsal = options.tiny or options.device == "cpu"
    if rehearsal and not options.page:
        return Path(tempfile.mkdtemp(prefix="bench_gpu_"))
    return OUT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--minutes", type=float, help="for all parts together; default: 10, with --tiny 60")
    parser.add_argument("--out", type=Path, help="folder of the results and the page")
    parser.add_argument("--page", action="store_true", help="write the page again, measure nothing")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = Sizes.of(options.device, options.tiny)
    if options.part:
        run_part(options.part, sizes, options.out)
        return 0
    out = output_folder(options)
    if options.page:
        write_page(out)
        return 0

    # The package need not be installed on a machine that is lent for this.
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing is measured")
        return 0
    minutes = options.minutes or (60 if options.tiny else 10)
    all_done = run_parts(options.parts, sizes, out, minutes)
    print((out / "README.md").read_text())
    print(f"written to {out}")
    return 0 if all_done else 1


if __name__ == "__main__":
    sys.exit(main())
