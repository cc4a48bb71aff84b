"""The learner's weights for engines: a checkpoint folder, and checksums and a probe to compare the two sides.

    full_weights -> cast, gather, hash -> staged and sent by a transport -> checksums, probe

The checksums say whether an engine has the trainer's weights. The probe says whether it computes the trainer's
log-probs with them. It compares a few fixed tokens, spread over the vocabulary so that an old head shows, and a few
draws of the next token, which show log-probs that were taken before the temperature was applied.
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
from kl_comedy.rollouts.decoding import generation_config
from kl_comedy.rollouts.hf import end_tokens

SHARD_BYTES = 2**30
"""Weights are written in files of about this size, so that little more than one file's are in host memory."""
VLLM_VOCABULARY_MULTIPLE = 64
"""vLLM pads embeddings and head to a multiple of this many rows."""
NO_BYTES = hashlib.sha256().hexdigest()
"""The checksum of a weight that vLLM on a CPU has packed and left empty."""
PROBE_LENGTH = 12
PROBE_STRIDE = 7919
"""A prime: the ids of the probe are its multiples modulo the vocabulary."""
PROBE_DRAWS = 4
FACTOR = 10.0
"""The probe tolerates this many times the gap that was measured when an engine got its first weights."""
BOUNDS = {"float32": (5e-5, 1e-3), "float16": (5e-3, 0.05), "bfloat16": (0.03, 0.2)}
"""Least and largest tolerance by dtype, in the unit of :meth:`Probe.gap`.

Measured on SmolLM2-135M: single tokens differ by 7e-5 (vLLM in float32 on a CPU with AVX-512), and in bfloat16 against
float32 by 0.16, 0.02 on average. Log-probs before a temperature of 0.7 differ by 0.36."""

Weights = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class StagedWeights:
    """Weights that engines can take, and what an engine that has them is compared with."""

    folder: Path
    """An engine can be started on it."""
    version: int
    tensors: Mapping[str, Tensor]
    """Those that travel from memory, by name; empty where they travel on disk."""
    checksums: Mapping[str, str]
    """SHA-256 of every weight, by name."""
    vocabulary: int
    probe: Probe | None
    """None where ``rollout.options.probe`` is off."""


def hashed(weights: Weights, checksums: Checksums) -> Weights:
    """The same weights; adds each to ``checksums`` when it is reached."""
    for name, tensor in weights:
        checksums.add(name, tensor)
        yield name, tensor


def write_config(loaded: LoadedModel, folder: Path) -> None:
    """Write config, end tokens and tokenizer: an engine that gets its weights later can be started on ``folder``."""
    from torch.distributed.fsdp import FSDPModule

    causal: Any = loaded.causal
    folder.mkdir(parents=True, exist_ok=True)
    # A copy, since architectures changes below.
    config = type(causal.config).from_dict(causal.config.to_dict())
    # FSDP2 replaces the model's class by a subclass named FSDP..., which no engine knows.
    model_classes = [cls.__name__ for cls in type(causal).__mro__ if not issubclass(cls, FSDPModule)]
    config.architectures = [model_classes[0]]
    config.save_pretrained(folder)
    generation_config(eos_token_id=end_tokens(causal, loaded.tokenizer)).save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def write_weights(loaded: LoadedModel, weights: Weights, folder: Path) -> None:
    """Write a whole checkpoint folder: config, tokenizer, and every weight in safetensors files.

    ``weights`` are in host memory. The folder is written under another name and renamed, so that a reader sees all of
    it or nothing.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}.tmp")
    # What a killed run left behind.
    shutil.rmtree(temporary, ignore_errors=True)
    write_config(loaded, temporary)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(_shards(weights)):
        file = f"model-{number:05d}.safetensors"
        for name in shard:
            file_of[name] = file
        save_file(shard, temporary / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": file_of}
    (temporary / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _shards(weights: Weights) -> Iterator[dict[str, Tensor]]:
    """``weights`` in parts of at least :data:`SHARD_BYTES`, except for the last."""
    shard: dict[str, Tensor] = {}
    shard_bytes = 0
    for name, tensor in weights:
        # safetensors refuses tensors that share memory, as tied weights do.
        is_tied = any(tensor is other for other in shard.values())
        shard[name] = tensor.clone() if is_tied else tensor
        shard_bytes += tensor.nbytes
        if shard_bytes >= SHARD_BYTES:
            yield shard
            shard = {}
            shard_bytes = 0
    if shard:
        yield shard


def checksum_complaint(engine: Mapping[str, str], trainer: Mapping[str, str], vocabulary: int) -> str | None:
    """Which weights of an engine are not the trainer's; None where all that can be compared are equal.

    vLLM names its checksums ``dp0:pp0:pcp0:tp0:NAME``, and with an adapter has ``base_layer`` in NAME. Not compared is
    what it holds in another form than the trainer: padded, split over GPUs or packed.
    """
    # Where vLLM splits the model over GPUs, its names say which rank a part is on.
    is_split = any(":tp" in name and ":tp0:" not in name for name in engine)
    compared = 0
    different = []
    for engine_name, digest in engine.items():
        name = engine_name.rpartition(":")[2].replace(".base_layer.", ".")
        # vLLM joins some weights, such as q, k and v, under names that the trainer does not have.
        if name not in trainer or digest == NO_BYTES:
            continue
        # Our own server hashes the tensors as the trainer sends them.
        is_vllm = ":" in engine_name
        if is_vllm and _has_another_form(name, vocabulary, is_split=is_split):
            continue
        compared += 1
        if digest != trainer[name]:
            different.append(name)
    # Where nothing could be compared, the engine has another model, or its names have changed.
    if different or compared == 0:
        return f"{len(different)} of {compared} checksums differ: {', '.join(sorted(different)[:3])}"
    return None


def _has_another_form(name: str, vocabulary: int, *, is_split: bool) -> bool:
    """Whether vLLM pads the weight ``name``, or splits it over tensor-parallel GPUs (all but norms)."""
    is_over_vocabulary = name.startswith(("model.embed_tokens.", "lm_head."))
    # With a whole number of blocks there is no padding, and the weight can be compared.
    is_padded = is_over_vocabulary and vocabulary % VLLM_VOCABULARY_MULTIPLE != 0
    return is_padded or (is_split and "norm" not in name)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """The trainer's log-probs (nats, float64) of a few fixed tokens and of the token after them."""

    ids: tuple[int, ...]
    """The fixed tokens: a prompt of S + 1 tokens."""
    fixed_S: Tensor
    """The log-prob of each but the first, at temperature 1."""
    next_V: Tensor
    """The log-prob of each token of the vocabulary after them, at ``temperature``."""
    temperature: float

    def sampling_fields(self) -> dict[str, object]:
        """``SamplingParams`` of the probe: log-probs of the prompt, and a few draws of the next token."""
        return {
            "n": PROBE_DRAWS,
            "temperature": self.temperature,
            "max_tokens": 1,
            "seed": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "detokenize": False,
        }

    def gap(self, fixed: Sequence[float], drawn: Sequence[tuple[int, float]]) -> float:
        """How far an engine's log-probs are from the trainer's.

        ``fixed``: the engine's log-probs of all fixed tokens but the first. ``drawn``: the tokens that it drew after
        them, and their log-probs. A difference is in nats, and where the log-prob is below -1 a share of it, since
        rounding grows with the logits. Returns the mean over the fixed tokens or over the drawn ones, whichever is
        larger; infinite where a difference is not finite.
        """
        drawn_tokens = [token for token, _ in drawn]
        drawn_logps = [logp for _, logp in drawn]
        return max(_mean_gap(self.fixed_S, fixed), _mean_gap(self.next_V[drawn_tokens], drawn_logps))


def _mean_gap(trainer_N: Tensor, engine: Sequence[float]) -> float:
    """|trainer - engine| / max(1, |trainer|), averaged."""
    engine_N = torch.tensor(engine, dtype=torch.float64)
    # Clamped at 1, or a log-prob near 0 would make a tiny difference a large share.
    gap_N = (trainer_N - engine_N).abs() / trainer_N.abs().clamp(min=1.0)
    return float(gap_N.nan_to_num(nan=float("inf"), posinf=float("inf")).mean())


class ProbeLimit:
    """The largest gap that one engine may have (:meth:`Probe.gap`).

    It is ``tolerance``; where that is None, :data:`FACTOR` times the first gap that is seen, within :data:`BOUNDS`.
    """

    def __init__(self, dtype: str, tolerance: float | None) -> None:
        self._bounds = BOUNDS[dtype]
        self.tolerance = tolerance

    def complaint(self, gap: float) -> str | None:
        """What is wrong with an engine that has this ``gap``; None where nothing is."""
        least, most = self._bounds
        tolerance = most if self.tolerance is None else self.tolerance
        # Not `gap > tolerance`, which a NaN would pass.
        if not gap <= tolerance:
            return (
                f"log-probs of the probe differ by {gap:.3g} of their size, at most {tolerance:.3g} is tolerated "
                "(rollout.options.probe_tolerance)"
            )
        if self.tolerance is None:
            self.tolerance = min(most, max(least, FACTOR * gap))
        return None


def dtype_of(loaded: LoadedModel) -> str:
    """The name of the dtype of the policy's weights, as ``float32``."""
    return str(loaded.causal.dtype).removeprefix("torch.")


def probe_dtype(loaded: LoadedModel, engine: str) -> str:
    """The dtype whose rounding the probe tolerates: ``engine``'s, or bfloat16 where the trainer's layers have it."""
    return "bfloat16" if layers_in_bf16(loaded.model) else engine


def vocabulary_of(loaded: LoadedModel) -> int:
    """The number of rows of the head."""
    return int(loaded.causal.get_output_embeddings().weight.shape[0])


@torch.no_grad()
def make_probe(loaded: LoadedModel, *, temperature: float) -> Probe:
    """The trainer's log-probs of the probe with its current weights, without autocast.

    Where the policy is sharded, every rank must call: the forward pass is collective.
    """
    vocabulary = vocabulary_of(loaded)
    # Spread over the vocabulary: a mistake in a part of the embedding should show.
    ids = [(1 + n * PROBE_STRIDE) % vocabulary for n in range(PROBE_LENGTH)]
    # By module: a caller may have parts of the model in eval mode.
    modes = [(module, module.training) for module in loaded.model.modules()]
    loaded.model.eval()
    try:
        # As an engine computes: it has no autocast of the trainer's.
        with torch.autocast(loaded.device.type, enabled=False):
            logits_BSV = loaded.model(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False).logits
    finally:
        for module, training in modes:
            module.training = training
    # float64, so that a difference is that of the two models and not of the softmax.
    logits_SV = logits_BSV[0].to(torch.float64).cpu()
    fixed_S = logits_SV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    next_V = (logits_SV[-1] / temperature).log_softmax(-1)
    return Probe(ids=tuple(ids), fixed_S=fixed_S, next_V=next_V, temperature=temperature)
