"""The learner's weights as vLLM wants them: every tensor under its checkpoint name, one at a time.

Three silent corruptions are ruled out here: a partial update (everything is sent, always), an adapter left out
(LoRA is merged on the way, tensor by tensor), a stale tied head (it is sent under its own name, too).

The probe: after every update the engine must give a few tokens the log-probs that the trainer gives them.

    fixed tokens -> engine: their log-probs (untempered), and a few draws of the next token at the run's temperature
                 -> trainer: the same, from its own logits -> the largest gap in nats

The fixed tokens spread over the vocabulary, so a stale head shows on them; the sampled ones go the way that rollouts
go, so log-probs taken before the temperature show on them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_comedy.rollouts.base import Policy

SHARD_BYTES = 2**30
"""Weights are written in files of about this size, so that little more than one is held in host memory."""

_ADAPTER_PARTS = (".lora_", ".modules_to_save.")


def full_weights(loaded: Policy, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the policy with its adapter merged, in checkpoint format; detached, in ``dtype`` if given.

    A tied head is yielded under its own name as well (a state dict lists it so), since vLLM keeps a packed copy of it.
    A sharded tensor is gathered when it is reached, so all ranks must iterate.
    """
    causal = loaded.causal
    for name, tensor in causal.state_dict().items():
        if any(part in name for part in _ADAPTER_PARTS):
            continue
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        module_name, base, leaf = name.rpartition(".base_layer.")
        if base:
            whole = _merged(causal.get_submodule(module_name), whole, leaf)
            name = f"{module_name}.{leaf}"
        yield name, _as(whole.detach(), dtype)


@torch.no_grad()
def _merged(layer: Any, base: Tensor, leaf: str) -> Tensor:
    """The base weight plus what each active adapter adds to it."""
    if leaf != "weight":
        return base
    merged = base.detach().clone()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            merged += layer.get_delta_weight(adapter).to(merged.dtype)
    return merged


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def write_config(loaded: Policy, folder: Path) -> None:
    """The model's config and tokenizer, as a folder that vLLM can be started on (without weights)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = type(loaded.causal.config).from_dict(loaded.causal.config.to_dict())
    config.architectures = [type(loaded.causal).__name__]
    config.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def write_weights(loaded: Policy, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """A whole checkpoint folder: config, tokenizer, and every weight in safetensors shards.

    Written beside ``folder`` and renamed, so that a reader sees all of it or nothing.
    """
    from safetensors.torch import save_file

    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    write_config(loaded, temporary)
    for number, shard in enumerate(_shards(full_weights(loaded, dtype=dtype))):
        save_file(shard, temporary / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Host copies of the weights, gathered up to :data:`SHARD_BYTES`; tensors of one shard share no memory."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        shard[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.numel() * tensor.element_size()
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


LENGTH = 12
DRAWS = 4
TOLERANCE = {"float32": 1e-2, "float16": 0.05, "bfloat16": 0.3}
"""Nats. float32: ten times the largest gap measured between equal weights (SmolLM2-135M on CPU: 4e-5 with AVX2,
1.03e-3 with AVX-512); the corruptions this looks for begin above 1.
The narrow types round logits of some tens at 2^-11 and 2^-8 of their size."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """Engine's log-probs (nats) of the probe's tokens but the first, and of what it drew as the next token."""

    fixed: tuple[float, ...]
    sampled_ids: tuple[int, ...]
    sampled: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ProbeReference:
    """The trainer's side: ``ids`` of the probe, log-probs of all but the first ``[S]``, of the next token ``[V]``."""

    ids: tuple[int, ...]
    fixed_S: Tensor
    next_V: Tensor


def probe_ids(vocabulary: int) -> list[int]:
    """The probe's tokens: the same for every engine, spread over the vocabulary.

    >>> probe_ids(16)[:4]
    [1, 0, 15, 14]
    """
    return [(1 + n * 7919) % vocabulary for n in range(LENGTH)]


def tolerance(dtype: str, given: float | None) -> float:
    """What gap is tolerated for an engine in ``dtype``, in nats."""
    return TOLERANCE[dtype] if given is None else given


@torch.no_grad()
def probe_reference(loaded: Policy, *, temperature: float) -> ProbeReference:
    """The trainer's log-probs of the probe with its weights as they are now, outside of any autocast."""
    ids = probe_ids(int(loaded.causal.get_output_embeddings().weight.shape[0]))
    whole = torch.tensor([ids], device=loaded.device)
    was_training = loaded.model.training
    loaded.model.eval()
    try:
        with torch.autocast(loaded.device.type, enabled=False):
            logits_SV = loaded.causal(input_ids=whole, use_cache=False).logits[0].to(torch.float64).cpu()
    finally:
        loaded.model.train(was_training)
    fixed_S = logits_SV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ProbeReference(ids=tuple(ids), fixed_S=fixed_S, next_V=(logits_SV[-1] / temperature).log_softmax(-1))


def gap(reference: ProbeReference, answer: ProbeAnswer) -> float:
    """Largest difference (nats) of the engine's log-probs to the trainer's; infinite where one is not finite."""
    trainer = torch.cat([reference.fixed_S, reference.next_V[list(answer.sampled_ids)]])
    engine = torch.tensor([*answer.fixed, *answer.sampled], dtype=torch.float64)
    return float((trainer - engine).abs().nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def fields(temperature: float) -> dict[str, object]:
    """``SamplingParams`` of the probe: log-probs of the prompt, and a few draws of the next token."""
    return {
        "n": DRAWS,
        "temperature": temperature,
        "max_tokens": 1,
        "seed": 0,
        "logprobs": 0,
        "prompt_logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
    }


def message(who: str, version: int, found: float, allowed: float) -> str:
    """What a failed probe says."""
    return (
        f"{who} does not have the trainer's weights after the update to version {version}: log-probs of the probe "
        f"differ by up to {found:.3g} nats, at most {allowed:.3g} are tolerated (rollout.options.probe_tolerance)"
    )
