"""Speed and memory on one GPU, in about ten minutes; writes results/gpu: python bench/gpu.py

    --parts learn-1.5b trl   these only; the results of the others stay
    --device cpu --tiny      rehearse every part on a CPU, with small sizes; results go to a temporary folder
    --page                   measure nothing; write the page again

Models have the shapes of Qwen2.5 and random weights, rows have random tokens: no network is needed. Each part is a
process of its own with a time limit, and its results are written when it ends; where it fails, the error is its result.
"""

from __future__ import annotations

import argparse
import contextlib
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


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a part: ``rows`` completions of ``length`` tokens after prompts of ``prompt``; ``tiny`` divides them all."""

    device: str
    tiny: bool
    prompt: int = 128
    length: int = 1024
    rows: int = 64

    @classmethod
    def of(cls, device: str, tiny: bool) -> Sizes:
        return cls(device=device, tiny=tiny, **({"prompt": 12, "length": 24, "rows": 16} if tiny else {}))


# --- models and rows --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shape_folder(name: str, sizes: Sizes) -> Iterator[Path]:
    """A folder with the config.json of Qwen/Qwen2.5-``name``, without weights."""
    from kl_comedy.lab.planning.sizes import known_config

    config = known_config(f"Qwen/Qwen2.5-{name}", **(SMALL if sizes.tiny else {}))
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        config.save_pretrained(folder)
        yield Path(folder)


@contextlib.contextmanager
def random_weights(sizes: Sizes) -> Iterator[None]:
    """Loading a policy gives random weights, made on the device, and the tokenizer of the pocket policy."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kl_comedy.models import load
    from kl_comedy.models.pocket import build_tokenizer

    def load_base(config: Any) -> Any:
        torch.manual_seed(0)
        with torch.device(sizes.device):
            return AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(config.source),
                dtype=getattr(torch, config.dtype),
                attn_implementation="sdpa",
            )

    with (
        patch.object(load, "load_base", load_base),
        patch.object(load, "load_tokenizer", lambda config: build_tokenizer()),
    ):
        yield


def overrides(folder: Path, sizes: Sizes, *words: str) -> list[str]:
    """Of a run with bf16 autocast and one k3 term in the loss, and the package's defaults otherwise."""
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
        *words,
    ]


def prompts_of(sizes: Sizes) -> list[Any]:
    from kl_comedy.records import Problem, Prompt

    texts = ["1" * (sizes.prompt - 1) + str(number % 10) for number in range(sizes.rows // GROUP)]
    return [
        Prompt(problem=Problem(id=str(n), text=text, answer=""), text=text, token_ids=tuple(int(c) + 2 for c in text))
        for n, text in enumerate(texts)
    ]


def scored_rows(sizes: Sizes, vocabulary: int) -> list[Any]:
    """Completions of random tokens, all of the same length, with rewards that differ within groups."""
    import torch

    from kl_comedy.records import Reward, Rollout, Scored

    generator = torch.Generator().manual_seed(0)
    logp = -float(torch.tensor(float(vocabulary)).log())
    rows = []
    for group, prompt in enumerate(prompts_of(sizes)):
        for number in range(GROUP):
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
            rows.append(Scored(rollout=rollout, reward=Reward(value=float(number % 2))))
    return rows


# --- what is measured -------------------------------------------------------------------------------------------------


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], device: str, *, repeats: int = 3) -> float:
    """The shortest of some calls, after one to warm up."""
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
    """Peaks in GiB. ``process``: what the driver says is taken, CUDA's context included; on a CPU the resident size."""
    import resource

    import torch

    if device == "cpu":
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "process": (total - free) / GIB,
    }


def known_device() -> Any:
    """The row of this GPU among those that ``kl-comedy plan`` knows; the H100's on another, this machine on a CPU."""
    import torch

    from kl_comedy.lab.planning.sizes import GPUS, device_named

    if not torch.cuda.is_available():
        return device_named("cpu")
    name = torch.cuda.get_device_name().upper()
    return next((gpu for key, gpu in GPUS.items() if key.split("-")[0].upper() in name), GPUS["h100-80"])


def useful_flops(shape: Any, sizes: Sizes, *, lora: bool) -> float:
    """Of an update, per completion token: 2 a parameter and pass, and the scores of attention.

    Passes: the reference's forward, the policy's forward and its backward (twice a forward; once with frozen weights).
    Not counted: what is computed again, and the second product of the reference's head that exact KL takes.
    """
    passes = 2 + (1 if lora else 2)
    context = sizes.prompt + sizes.length / 2
    products = 2 * (shape.body + shape.vocabulary * shape.hidden)
    return passes * (products + 4 * shape.layers * shape.heads * shape.head_dim * context)


DEFAULT = "as configured"
MODES = {DEFAULT: ("highest", True), "TF32": ("high", True), "not deterministic": ("highest", False)}
"""How float32 products are computed (under bf16 autocast the head's alone); whether algorithms are deterministic."""


def learn(name: str, sizes: Sizes, *words: str, modes: Sequence[str] = (DEFAULT,)) -> dict[str, Any]:
    """Updates of fixed rows through Lightning's Trainer: seconds and tokens/s, memory beside the plan."""
    import lightning
    import torch

    from kl_comedy.config import load_config
    from kl_comedy.lab.planning.plan import PHASES, Plan
    from kl_comedy.training.experience import Batch, ExperienceStream
    from kl_comedy.training.module import PolicyModule
    from kl_comedy.training.run import make_trainer

    order = [("warm-up", DEFAULT), *((mode, mode) for mode in modes for _ in range(2))]
    updates: dict[str, list[float]] = {}

    class Sampler:
        version = 0

        def update_weights(self, version: int) -> None:
            self.version = version

    class Fixed:
        """The source of every update's rows."""

        def __init__(self, rows: list[Any]) -> None:
            self.rows = rows

        def take(self, iteration: int) -> Batch:
            return Batch(rows=self.rows, metrics=dict.fromkeys(("time/generate", "time/score", "time/wait"), 0.0))

    class Rows(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            module: Any = self.trainer.lightning_module
            module.load()
            module.backend = Sampler()
            self.stream = ExperienceStream(
                config, None, Fixed(scored_rows(sizes, module.loaded.causal.config.vocab_size))
            )

        def train_dataloader(self) -> Any:
            return self.stream

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

    class Meter(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            precision, deterministic = MODES[order[index][1]]
            torch.set_float32_matmul_precision(precision)
            torch.use_deterministic_algorithms(deterministic)
            synchronize(sizes.device)
            self.start = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            synchronize(sizes.device)
            updates.setdefault(order[index][0], []).append(time.perf_counter() - self.start)

    with shape_folder(name, sizes) as folder, random_weights(sizes):
        config = load_config(None, overrides(folder, sizes, f"train.steps={len(order)}", *words))
        planned = Plan(config, known_device())
        trainer = make_trainer(config, [Meter()])
        module = PolicyModule(config)
        trainer.fit(module, datamodule=Rows())
        metrics = {key: module.last_metrics[key] for key in ("kl/exact_reverse_token", "grad/norm", "policy/entropy")}
    tokens = sizes.rows * sizes.length
    flops = useful_flops(planned.shape, sizes, lora=config.model.lora is not None)
    of_phase = {phase: sum(i.bytes for i in planned.components if i.phase == phase) / GIB for phase in PHASES}
    rates = {
        mode: {
            "update_s": min(updates[mode]),
            "tokens_per_s": tokens / min(updates[mode]),
            "mfu": flops * tokens / min(updates[mode]) / planned.device.bf16_flops,
        }
        for mode in modes
    }
    measured = memory(sizes.device)
    expected = of_phase["always"] + of_phase["learning"]
    return {
        "words": words,
        "parameters": planned.shape.parameters,
        "trainable": planned.shape.trainable,
        "tokens": tokens,
        "warm_up_s": updates["warm-up"][0],
        "rates": rates,
        "useful_flops_per_token": flops,
        "peak_flops": planned.device.bf16_flops,
        "memory_gib": measured,
        "planned_gib": expected,
        "planned_over_measured": expected / measured["process"],
        "components_gib": {item.name: item.bytes / GIB for item in planned.components if item.phase != "sampling"},
        "planned_learn_s": planned.timing.learn_s,
        "last_metrics": metrics,
    }


def machine(sizes: Sizes) -> dict[str, Any]:
    """What this device does at most: matrix products of random numbers, copies in its memory."""
    import torch

    width = 256 if sizes.tiny else 8192
    rates = {}
    for dtype, precision in (("bfloat16", "highest"), ("float32", "highest"), ("float32", "high")):
        torch.set_float32_matmul_precision(precision)
        left, right = (torch.randn(width, width, device=sizes.device, dtype=getattr(torch, dtype)) for _ in range(2))
        taken = seconds(lambda a=left, b=right: a @ b, sizes.device, repeats=10)
        rates["tf32" if precision == "high" else dtype] = 2 * width**3 / taken / 1e12
    block = torch.ones((2**24 if sizes.tiny else 8 * GIB) // 4, device=sizes.device)
    copied = seconds(block.clone, sizes.device)
    return {"products_tflops": rates, "copy_gb_per_s": 2 * block.nbytes / copied / 1e9}


def head(sizes: Sizes) -> dict[str, Any]:
    """The head's log-probs and exact KL, forward and backward, by the type of its product; products alone."""
    import torch

    from kl_comedy.models.head import HeadSettings, head_columns
    from kl_comedy.models.introspection import head_chunk
    from kl_comedy.models.types import Wanted

    count, width, vocabulary = (64, 64, 512) if sizes.tiny else (8192, 1536, 151_936)
    device = torch.device(sizes.device)
    hidden = torch.randn(count, width, device=device)
    weight = 0.02 * torch.randn(vocabulary, width, device=device)
    ids = torch.randint(vocabulary, (count,), device=device)
    results: dict[str, Any] = {}

    def both(dtype: torch.dtype) -> None:
        leaf_hidden, leaf_weight = hidden.detach().requires_grad_(True), weight.to(dtype).requires_grad_(True)
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
        results[name] = {"forward_backward_s": seconds(lambda dtype=dtype: both(dtype), sizes.device)}
    torch.set_float32_matmul_precision("highest")
    rows, columns = hidden[:1024].bfloat16(), weight.bfloat16().t()
    products = {
        "float32": lambda: hidden[:1024] @ weight.t(),
        "bfloat16": lambda: rows @ columns,
        "bfloat16 to float32": lambda: torch.mm(rows, columns, out_dtype=torch.float32),
    }
    for name, product in products.items():
        with guarded(results, f"product {name}"):
            exact, result = hidden[:1024].double() @ weight.t().double(), product().double()
            results[f"product {name}"] = {
                "tflops": 2 * len(rows) * width * vocabulary / seconds(product, sizes.device) / 1e12,
                "largest_error": float((result - exact).abs().max()),
            }
            del exact, result
    return {"tokens": count, "variants": results}


@contextlib.contextmanager
def guarded(results: dict[str, Any], name: str) -> Iterator[None]:
    """An error inside is the result."""
    try:
        yield
    except Exception as error:
        results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def attention(sizes: Sizes) -> dict[str, Any]:
    """One layer of a 1.5B policy, bf16, forward and backward, on the rows of an update: milliseconds."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kl_comedy.models.attention import pack_batch

    heads, keys, width = (4, 2, 16) if sizes.tiny else (12, 2, 128)
    device, rows = torch.device(sizes.device), min(sizes.rows, 32)
    prompt_BP = torch.arange(rows // GROUP, device=device).repeat_interleave(GROUP)[:, None].expand(-1, sizes.prompt)
    ids_BT = torch.ones(rows, sizes.length, dtype=torch.long, device=device)
    packed = pack_batch(prompt_BP, torch.ones_like(prompt_BP), ids_BT, torch.ones_like(ids_BT))
    narrow = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    results: dict[str, Any] = {}

    def measure(name: str, forward: Callable[[], Any]) -> None:
        with guarded(results, name):
            results[name] = {"ms": 1e3 * seconds(lambda: forward().sum().backward(), sizes.device)}

    line = len(packed.ids_S)
    query, key, value = (torch.randn(line, keys, *more, width, **narrow) for more in ((heads // keys,), (), ()))
    measure("shared prompts, mask", lambda: packed.attend(0, query, key, value, width**-0.5))
    whole = sizes.prompt + sizes.length
    query_BHSD, key_BHSD, value_BHSD = (torch.randn(rows, heads, whole, width, **narrow) for _ in range(3))
    measure(
        "rows apart, causal flag",
        lambda: scaled_dot_product_attention(query_BHSD, key_BHSD, value_BHSD, is_causal=True),
    )

    flat = [torch.randn(rows * whole, heads, width, **narrow) for _ in range(3)]

    def varlen() -> Any:
        from torch.nn.attention.varlen import varlen_attn

        starts = torch.arange(0, (rows + 1) * whole, whole, dtype=torch.int32, device=device)
        causal: dict[str, Any] = {"window_size": (-1, 0)}
        if "is_causal" in inspect.signature(varlen_attn).parameters:
            causal = {"is_causal": True}
        return varlen_attn(*flat, starts, starts, whole, whole, **causal)

    measure("rows apart, variable lengths", varlen)
    return {"rows": rows, "line": line, "variants": results}


def decode(sizes: Sizes) -> dict[str, Any]:
    """The ``hf`` sampler with a 1.5B policy: milliseconds a step of all rows."""
    import torch

    from kl_comedy.config import load_config
    from kl_comedy.models import load_model
    from kl_comedy.rollouts import Sampling, build_hf

    steps, results = min(sizes.length, 128), {}
    for name, words, autocast in (
        ("bf16 autocast", [], True),
        ("bf16 weights", ["model.dtype=bfloat16", "model.lora={rank: 16}"], False),
    ):
        with shape_folder("1.5B", sizes) as folder, random_weights(sizes):
            config = load_config(None, overrides(folder, sizes, *words))
            loaded = load_model(config.model)
        backend = build_hf(config.rollout, loaded=loaded)

        def draw(count: int, backend: Any = backend, autocast: bool = autocast) -> Any:
            with torch.autocast(sizes.device, torch.bfloat16, enabled=autocast, cache_enabled=False):
                sampling = Sampling(temperature=1.0, max_new_tokens=count)
                return backend.generate(prompts_of(sizes), group_size=GROUP, sampling=sampling, seed=0)

        start = seconds(lambda draw=draw: draw(1), sizes.device, repeats=1)
        whole = seconds(lambda draw=draw: draw(steps), sizes.device, repeats=1)
        step = (whole - start) / (steps - 1)
        results[name] = {"ms_per_step": 1e3 * step, "tokens_per_s": sizes.rows / step, "prompts_s": start}
        del loaded, backend, draw
    return {"rows": sizes.rows, "steps": steps, "variants": results}


def transfer(sizes: Sizes) -> dict[str, Any]:
    """The weights of a 7B policy in bf16: from the device to host memory, hashed, to a file."""
    import torch
    from safetensors.torch import save_file

    from kl_comedy.models.weights import Checksums

    pieces, size = 60, 2**18 if sizes.tiny else 254 * 10**6
    weights = {
        f"w{n}": torch.full((size // 2,), float(n), dtype=torch.bfloat16, device=sizes.device) for n in range(pieces)
    }
    total = sum(weight.nbytes for weight in weights.values())
    times: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        synchronize(sizes.device)
        start = time.perf_counter()
        result = work()
        synchronize(sizes.device)
        times[name] = time.perf_counter() - start
        return result

    copies = timed("to pageable memory", lambda: {n: w.to("cpu", copy=True) for n, w in weights.items()})
    if sizes.device == "cuda":
        buffer = torch.empty(size // 2, dtype=torch.bfloat16, pin_memory=True)
        timed("to pinned memory", lambda: [buffer.copy_(w, non_blocking=True) for w in weights.values()])
    sums = Checksums()
    timed("SHA-256 of a tenth", lambda: [sums.add(n, copies[n]) for n in list(copies)[: pieces // 10]])
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        names = list(copies)
        parts = [names[start : start + 4] for start in range(0, pieces, 4)]

        def write() -> None:
            for number, part in enumerate(parts):
                save_file({name: copies[name] for name in part}, Path(folder) / f"{number}.safetensors")

        timed("safetensors to a file", write)
    return {"gb": total / 1e9, "seconds": times}


def trl(sizes: Sizes) -> dict[str, Any]:
    """GRPO of TRL on the rows of ``learn-0.5b``: its Trainer, with fixed completions in place of generation."""
    sys.path.append(str(ROOT / "bench" / "speed" / ".trl"))
    try:
        import trl
        from datasets import Dataset
    except ImportError as error:
        return {"skipped": f"not installed here: {error}"}
    import torch
    from transformers import TrainerCallback

    from kl_comedy.config import load_config
    from kl_comedy.models import load
    from kl_comedy.models.pocket import build_tokenizer

    ends: list[float] = []

    class Meter(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(sizes.device)
            ends.append(time.perf_counter())

    each = 8
    with shape_folder("0.5B", sizes) as folder, tempfile.TemporaryDirectory(prefix="bench_gpu_") as model:
        with random_weights(sizes):
            base = load.load_base(load_config(None, overrides(folder, sizes)).model)
        rows = scored_rows(sizes, base.config.vocab_size)
        base.save_pretrained(model)
        build_tokenizer().save_pretrained(model)
        del base
        settings = trl.GRPOConfig(
            output_dir=str(folder),
            max_steps=3,
            learning_rate=1e-6,
            beta=0.01,
            num_generations=GROUP,
            max_completion_length=sizes.length,
            per_device_train_batch_size=each,
            gradient_accumulation_steps=sizes.rows // each,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            bf16=sizes.device == "cuda",
            use_cpu=sizes.device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [float(n % 2) for n in range(len(completions))],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts_of(sizes)]),
            processing_class=build_tokenizer(),
            callbacks=[Meter()],
        )
        completions = [list(row.rollout.completion_ids) for row in rows]
        trainer._generate_single_turn = lambda *_, **__: (completions, None)
        if sizes.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
    best = min(later - earlier for earlier, later in itertools.pairwise(ends[1:]))  # the first update warms up
    tokens = sizes.rows * sizes.length
    return {
        "version": trl.__version__,
        "rows_per_backward": each,
        "tokens": tokens,
        "update_s": best,
        "tokens_per_s": tokens / best,
        "memory_gib": memory(sizes.device),
    }


@dataclass(frozen=True, kw_only=True)
class Part:
    """``limit_s``: at most so long; ``work`` gives the results."""

    limit_s: int
    work: Callable[[Sizes], dict[str, Any]]


ADAPTER = ("model.dtype=bfloat16", "model.lora={rank: 16}")
NARROW_HEAD = "model.head_dtype=bfloat16"
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

    tags, on_gpu = provenance_tags(), sizes.device == "cuda"
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
        "commit": tags["git.commit"][:12] + (", with changes" if tags["git.dirty"] == "true" else ""),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def run_part(name: str, sizes: Sizes, file: Path) -> None:
    """In a process of its own."""
    import warnings

    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    results = PARTS[name].work(sizes)
    results = {"part": name, "environment": environment(sizes), "seconds": time.perf_counter() - start, **results}
    file.write_text(json.dumps(results, indent=1) + "\n")


def run_parts(names: Sequence[str], sizes: Sizes, out: Path, minutes: float) -> bool:
    """Each part in its process, one after another; whether none failed."""
    end, fine, slower = time.monotonic() + 60 * minutes, True, 10 if sizes.tiny else 1
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        file, limit = out / f"{name}.json", min(slower * PARTS[name].limit_s, end - time.monotonic())
        file.unlink(missing_ok=True)
        error = run_process(name, sizes, file, limit) if limit > 5 else "no time was left for it"
        if error is not None:
            fine = False
            file.write_text(
                json.dumps({"part": name, "environment": environment(sizes), "error": error}, indent=1) + "\n"
            )
        write_page(out)
        print(f"{name}: {error or 'done'}", flush=True)
    return fine


def run_process(name: str, sizes: Sizes, file: Path, limit_s: float) -> str | None:
    """The error of a part; None where it wrote its results."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--part",
        name,
        "--device",
        sizes.device,
        "--out",
        str(file),
    ]
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **({"CUDA_VISIBLE_DEVICES": ""} if sizes.device == "cpu" else {}),
    }
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *(["--tiny"] if sizes.tiny else [])],
            env={**os.environ, **variables},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        lines = [line.rstrip()[:300] for line in log if line.strip()]
    if code == 0 and file.exists():
        return None
    print("\n".join(lines[-25:]), flush=True)
    return f"not done in {limit_s:.0f} s" if code is None else f"exit code {code}: {(lines or ['no output'])[-1]}"


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
    results = {
        name: json.loads((out / f"{name}.json").read_text()) for name in PARTS if (out / f"{name}.json").exists()
    }
    if not results:
        return INTRODUCTION + NOTHING
    environments = {json.dumps(result["environment"], sort_keys=True) for result in results.values()}
    lines = [INTRODUCTION]
    for text in sorted(environments):
        known = json.loads(text)
        versions = ", ".join(f"{name} {version}" for name, version in known["versions"].items())
        rehearsal = "A rehearsal, no measurement: " if known["rehearsal"] else ""
        lines.append(
            f"{rehearsal}{known['device']}, CUDA {known['cuda']}, {known['cores']} cores, Python {known['python']}, "
            f"{versions}; commit {known['commit']}, {known['date']}.\n"
        )
    for name, result in results.items():
        lines += [f"## {name}", ""]
        if "error" in result or "skipped" in result:
            lines += [result.get("error") or result["skipped"], ""]
        else:
            lines += [*_table(name, result), ""]
    return "\n".join(lines)


def _table(name: str, result: dict[str, Any]) -> Iterator[str]:
    if name.startswith("learn"):
        settings = f" ({', '.join(result['words'])})" if result["words"] else ""
        yield (
            f"{result['parameters'] / 1e9:.2f} B parameters, {result['trainable'] / 1e9:.3f} B trained{settings}, "
            f"{result['tokens']:,} completion tokens an update, reference pass, exact KL and entropy included."
        )
        yield from ("", "| | update, s | tokens/s | MFU |", "|---|---:|---:|---:|")
        for mode, rate in result["rates"].items():
            yield f"| {mode} | {rate['update_s']:.2f} | {rate['tokens_per_s']:,.0f} | {rate['mfu']:.1%} |"
        peaks = ", ".join(f"{kind} {value:.1f}" for kind, value in result["memory_gib"].items())
        yield ""
        yield (
            f"Memory, GiB: {peaks}; planned {result['planned_gib']:.1f}, {result['planned_over_measured']:.2f} of the "
            f"process's. Planned seconds of learning: {result['planned_learn_s']:.2f}. MFU: useful products "
            f"({result['useful_flops_per_token'] / 1e9:.1f} GFLOP a token) over {result['peak_flops'] / 1e12:,.1f}."
        )
        return
    if name == "machine":
        rates = ", ".join(f"{kind} {rate:,.1f}" for kind, rate in result["products_tflops"].items())
        yield f"Matrix products, TFLOP/s: {rates}."
        yield f"A copy in its memory: {result['copy_gb_per_s']:,.0f} GB/s, read and written."
        return
    if name == "transfer":
        yield f"{result['gb']:.2f} GB in bf16."
        yield from ("", "| step | seconds |", "|---|---:|")
        yield from (f"| {step} | {taken:.2f} |" for step, taken in result["seconds"].items())
        return
    if name == "trl":
        yield (
            f"TRL {result['version']} GRPO on the rows of learn-0.5b, {result['rows_per_backward']} rows a backward: "
            f"{result['update_s']:.2f} s an update, {result['tokens_per_s']:,.0f} tokens/s, "
            f"{result['memory_gib']['process']:.1f} GiB."
        )
        return
    about = {key: result[key] for key in ("rows", "steps", "tokens", "line") if key in result}
    yield ", ".join(f"{key}: {value:,}" for key, value in about.items()) + "."
    yield from ("", "| variant | measured |", "|---|---|")
    for variant, measured in result["variants"].items():
        numbers = (v if isinstance(v, str) else f"{k.replace('_', ' ')} {v:.4g}" for k, v in measured.items())
        yield f"| {variant} | {', '.join(numbers)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--minutes", type=float, help="for all parts together; default: 10, with --tiny 60")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = Sizes.of(given.device, given.tiny)
    if given.part:
        run_part(given.part, sizes, given.out)
        return 0
    rehearsal = given.tiny or given.device == "cpu"
    out = given.out or (Path(tempfile.mkdtemp(prefix="bench_gpu_")) if rehearsal and not given.page else OUT)
    if given.page:
        write_page(out)
        return 0
    sys.path.insert(0, str(ROOT / "src"))
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here: nothing is measured")
        return 0
    fine = run_parts(given.parts, sizes, out, given.minutes or (60 if given.tiny else 10))
    print((out / "README.md").read_text())
    print(f"written to {out}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
