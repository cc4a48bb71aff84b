"""The learner's weights for engines: as a checkpoint folder, and what shows that an engine has them.

    full_weights -> cast, gather, hash -> staged and sent by a transport -> checksums, probe

The checksums say whether an engine has the trainer's weights. The probe says whether it computes the trainer's
log-probs with them: a few fixed tokens, spread over the vocabulary so that a stale head shows, and a few draws of the
next token, which show log-probs that were taken before the temperature was applied.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import layers_in_bf16
from kl_comedy.models.weights import Checksums
from kl_comedy.rollouts.hf import end_tokens

SHARD_BYTES = 2**30
"""Weights are written in files of about this size, so that little more than one is in host memory."""
VLLM_VOCABULARY_MULTIPLE = 64
NO_BYTES = hashlib.sha256().hexdigest()
PROBE_LENGTH, PROBE_DRAWS = 12, 4
FACTOR = 10.0
"""The probe tolerates this many times the gap that was measured when an engine got its first weights."""
BOUNDS = {"float32": (5e-5, 1e-3), "float16": (5e-3, 0.05), "bfloat16": (0.03, 0.2)}
"""The tolerance is at least the first, at most the second (:meth:`Probe.gap`). Single tokens of SmolLM2-135M were off
by 7e-5 (vLLM in float32 on a CPU with AVX-512), and in bfloat16 against float32 by 0.16, 0.02 on average. Log-probs
before a temperature of 0.7 are off by 0.36."""

Weights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights that engines can take, and what shows that an engine has them.

    ``folder`` is one that an engine can be started on; ``tensors`` are those that travel from memory.
    """

    folder: Path
    version: int
    tensors: Mapping[str, Tensor]
    checksums: Mapping[str, str]
    vocabulary: int
    probe: Probe | None


def hashed(weights: Weights, checksums: Checksums) -> Weights:
    """The same weights; adds each to ``checksums`` as it passes."""
    for name, tensor in weights:
        checksums.add(name, tensor)
        yield name, tensor


def write_config(loaded: LoadedModel, folder: Path) -> None:
    """Config, end tokens and tokenizer: a folder that an engine can be started on (without weights)."""
    from torch.distributed.fsdp import FSDPModule
    from transformers import GenerationConfig

    causal: Any = loaded.causal
    folder.mkdir(parents=True, exist_ok=True)
    config = type(causal.config).from_dict(causal.config.to_dict())
    classes = (cls.__name__ for cls in type(causal).__mro__ if not issubclass(cls, FSDPModule))
    config.architectures = [next(classes)]  # FSDP2 makes a subclass of the class, named FSDP...
    config.save_pretrained(folder)
    settings: Any = GenerationConfig
    settings(eos_token_id=end_tokens(causal, loaded.tokenizer)).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def write_weights(loaded: LoadedModel, weights: Weights, folder: Path) -> None:
    """A whole checkpoint folder: config, tokenizer, and every weight (a copy in host memory) in safetensors files.

    Written beside ``folder`` and renamed, so that a reader sees all of it or nothing.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_config(loaded, temporary)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(_shards(weights)):
        file = f"model-{number:05d}.safetensors"
        file_of |= dict.fromkeys(shard, file)
        save_file(shard, temporary / file, metadata={"format": "pt"})
    (temporary / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _shards(weights: Weights) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        shard[name] = tensor.clone() if any(tensor is each for each in shard.values()) else tensor  # tied
        if sum(t.nbytes for t in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def checksum_complaint(engine: Mapping[str, str], trainer: Mapping[str, str], vocabulary: int) -> str | None:
    """Which weights of an engine are not the trainer's, as far as both have them in the same form; None: all are.

    vLLM names its checksums ``dp0:pp0:pcp0:tp0:NAME``. It pads the vocabulary, splits matrices over tensor-parallel
    GPUs, and on a CPU packs them and leaves nothing in their place: these are not compared. With an adapter its names
    have ``base_layer`` in them.
    """
    split = any(":tp" in name and ":tp0:" not in name for name in engine)
    compared, different = 0, []
    for prefixed, digest in engine.items():
        name = prefixed.rpartition(":")[2].replace(".base_layer.", ".")
        padded = name.startswith(("model.embed_tokens.", "lm_head.")) and vocabulary % VLLM_VOCABULARY_MULTIPLE
        in_vllm = ":" in prefixed
        if name not in trainer or digest == NO_BYTES or (in_vllm and (padded or (split and "norm" not in name))):
            continue
        compared += 1
        if digest != trainer[name]:
            different.append(name)
    if different or not compared:
        return f"{len(different)} of {compared} checksums differ: {', '.join(sorted(different)[:3])}"
    return None


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The trainer's side: ``ids`` of the probe, log-probs of all but the first ``[S]``, of the next token ``[V]``."""

    ids: tuple[int, ...]
    fixed_S: Tensor
    next_V: Tensor
    temperature: float

    def sampling_fields(self) -> dict[str, object]:
        """``SamplingParams`` of the probe: log-probs of the prompt, and a few draws of the next token."""
        fields = {"n": PROBE_DRAWS, "temperature": self.temperature, "max_tokens": 1, "seed": 0}
        return {**fields, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}

    def gap(self, fixed: Sequence[float], drawn: Sequence[tuple[int, float]]) -> float:
        """How far an engine's log-probs are from the trainer's: nats, or a share of the log-prob where it is below -1,
        since rounding grows with the logits. ``fixed``: of all tokens but the first; ``drawn``: next tokens and theirs.
        The mean over either, whichever is larger; infinite where one is not finite."""
        draws_N = self.next_V[[token for token, _ in drawn]]
        gaps = []
        for trainer_N, engine in ((self.fixed_S, fixed), (draws_N, [logp for _, logp in drawn])):
            gap_N = (trainer_N - torch.tensor(engine, dtype=torch.float64)).abs() / trainer_N.abs().clamp(min=1.0)
            gaps.append(float(gap_N.nan_to_num(nan=float("inf"), posinf=float("inf")).mean()))
        return max(gaps)


class ProbeLimit:
    """The gap that one engine is allowed: ``tolerance``, else :data:`FACTOR` times the first one within the bounds."""

    def __init__(self, dtype: str, tolerance: float | None) -> None:
        self._bounds, self.tolerance = BOUNDS[dtype], tolerance

    def complaint(self, gap: float) -> str | None:
        """What is wrong with an engine of this ``gap``; None where nothing is."""
        least, most = self._bounds
        tolerance = most if self.tolerance is None else self.tolerance
        if not gap <= tolerance:
            return (
                f"log-probs of the probe differ by {gap:.3g} of their size, at most {tolerance:.3g} is tolerated "
                "(rollout.options.probe_tolerance)"
            )
        if self.tolerance is None:
            self.tolerance = min(most, max(least, FACTOR * gap))
        return None


def dtype_of(loaded: LoadedModel) -> str:
    return str(loaded.causal.dtype).removeprefix("torch.")


def probe_dtype(loaded: LoadedModel, engine: str) -> str:
    """The dtype whose rounding the probe tolerates: the engine's, or that of the trainer's layers."""
    return "bfloat16" if layers_in_bf16(loaded.model) else engine


def vocabulary_of(loaded: LoadedModel) -> int:
    """Rows of the head."""
    return int(loaded.causal.get_output_embeddings().weight.shape[0])


@torch.no_grad()
def make_probe(loaded: LoadedModel, *, temperature: float) -> Probe:
    """The trainer's log-probs of the probe with its weights as they are now, outside of any autocast.

    Of a sharded policy every process must call.
    """
    ids = [(1 + n * 7919) % vocabulary_of(loaded) for n in range(PROBE_LENGTH)]  # spread over the vocabulary
    modes = [(module, module.training) for module in loaded.model.modules()]
    loaded.model.eval()
    try:
        with torch.autocast(loaded.device.type, enabled=False):
            logits_BSV = loaded.model(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False).logits
    finally:
        for module, training in modes:
            module.training = training
    logits_SV = logits_BSV[0].to(torch.float64).cpu()
    fixed_S = logits_SV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    next_V = (logits_SV[-1] / temperature).log_softmax(-1)
    return Probe(ids=tuple(ids), fixed_S=fixed_S, next_V=next_V, temperature=temperature)
