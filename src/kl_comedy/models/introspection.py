"""Where the parts of a causal language model are, under whatever it is wrapped in.

``policy -> (DDP, compile, PEFT) -> causal LM = decoder body -> hidden [B, S, H] -> linear head -> logits [B, S, V]``

Calling parts of a model that FSDP holds in shards: its weights exist only inside what FSDP takes for a forward.

How much is held at once: sizes that a config leaves open are chosen by what a device has room for.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.errors import UserError

Head = tuple[Tensor, Tensor | None]
"""Weight ``[V, H]`` and bias ``[V]`` (or None) of the linear head."""

SCALED_LOGITS = (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0))
"""Config keys of architectures that do something to the logits after the head, and the harmless value."""


def unwrap(model: nn.Module) -> Any:
    """The causal LM inside DDP, ``torch.compile`` and PEFT wrappers (adapters stay in place and active)."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        elif hasattr(inner, "peft_config") and hasattr(inner, "get_base_model"):
            return inner.get_base_model()
        else:
            return inner


def is_peft(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model (an adapter that can be switched off)."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def decoder_body(model: nn.Module) -> nn.Module:
    """The part of the causal LM that ends in hidden states. Raises :class:`UserError` where there is none."""
    causal = unwrap(model)
    body = getattr(causal, "base_model", causal)
    if body is causal or not isinstance(body, nn.Module):
        raise UserError(f"model.source: {type(causal).__name__} has no decoder body apart from its head")
    return body


def head_weights(model: nn.Module) -> Head:
    """Weight ``[V, H]`` and bias of the model's head; the tensors themselves, not copies.

    Raises :class:`UserError` when the head is not one plain linear layer (an adapter on the head, a scaled
    head, a multi-token head): our log-probs would not be the model's.
    """
    causal = unwrap(model)
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"model.source: the head of {type(causal).__name__} is {type(head).__name__}; only a plain linear head is "
            "supported (leave the head out of model.lora.target_modules)"
        )
    return head.weight, head.bias


def refuse_scaled_logits(config: Any) -> None:
    """Raise :class:`UserError` when the config names a transformation of the logits after the head."""
    for key, harmless in SCALED_LOGITS:
        value = getattr(config, key, harmless)
        if value is not None and value != harmless:
            raise UserError(
                f"model.source: this architecture sets {key} = {value}, which changes the logits after its linear "
                "head; its log-probs would be computed wrongly, so it is not supported"
            )


def silence_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero, so that the log-probs do not depend on train or eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)


_METHOD = "_kl_comedy_pass"
_TWIN = "_kl_comedy_twin"


def call_as_forward(model: nn.Module, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``run()``, inside a forward of ``model`` when FSDP shards it, so that head and body are gathered.

    For any other model this is just ``run()``.
    """
    if not is_sharded(model):
        return run()
    from torch.distributed.fsdp import register_fsdp_forward_method

    sharded: Any = model
    if _METHOD not in vars(sharded):
        setattr(sharded, _METHOD, types.MethodType(lambda self, inner: inner(), sharded))
        register_fsdp_forward_method(sharded, _METHOD)
    result: tuple[Tensor, ...] = getattr(sharded, _METHOD)(run)
    return result


def remember_twin(model: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Note how another model like this one is made, sharded alike and unfilled: FSDP cannot be deep-copied."""
    setattr(model, _TWIN, make)


def twin(model: nn.Module) -> nn.Module:
    """A sharded model with the same weights, made of its own memory; all processes must call."""
    make: Callable[[], nn.Module] = vars(model)[_TWIN]
    other = make()
    with torch.no_grad():
        for ours, theirs in zip(_held(other), _held(model), strict=True):
            ours.copy_(theirs)
    return other


def _held(model: nn.Module) -> list[Tensor]:
    """What this process holds of the weights: its shards, and buffers."""
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards ``model``."""
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:  # a build of torch without distributed
        return False
    return isinstance(model, FSDPModule)


GIB = 2**30
ACTIVATIONS = {"cpu": 1 * GIB, "cuda": 16 * GIB}
"""Bytes that the activations of one backward pass may take where ``train.microbatch_tokens`` is open."""

CHUNK = {"cpu": 2**22, "cuda": 2**27}
"""Logits held at once where ``model.head_chunk_elements`` is open: 16 MiB and 512 MiB in float32. From 32 MiB on
glibc takes pages from the system for every tensor and gives them back."""

MOST_TOKENS = 2**16


def head_chunk(asked: int | None, device: torch.device) -> int:
    """``asked``, or what suits the device."""
    return asked or CHUNK.get(device.type, CHUNK["cuda"])


def microbatch_tokens(asked: int | None, model: Any, device: torch.device, *, checkpoints: bool) -> int:
    """``asked``, or as many tokens as the device's share for activations holds, by :func:`activation_bytes`."""
    if asked:
        return asked
    return open_microbatch_tokens(
        model.config, next(model.parameters()).element_size(), device.type, checkpoints=checkpoints
    )


def open_microbatch_tokens(config: Any, element_bytes: int, kind: str, *, checkpoints: bool) -> int:
    """Tokens whose activations fit the share of a device of this ``kind`` that is theirs."""
    room = ACTIVATIONS.get(kind, ACTIVATIONS["cuda"])
    return min(MOST_TOKENS, max(1, room // (element_bytes * activation_values(config, checkpoints=checkpoints))))


def activation_values(config: Any, *, checkpoints: bool) -> int:
    """Values that autograd keeps per token of a gated decoder: norms, projections, attention, the gated product.

    With ``checkpoints`` only the inputs of the layers, and one layer's values while it is passed again.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = int(config.hidden_size), int(config.num_hidden_layers)
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(getattr(config, "num_attention_heads", 1))
    shared = 2 * hidden * int(getattr(config, "num_key_value_heads", None) or heads) // heads
    layer = 9 * hidden + 2 * shared + 4 * inner
    return layers * hidden + layer if checkpoints else layers * layer


def release() -> None:
    """Give free pages of the C library's allocator back to the system, where it knows how (glibc's ``malloc_trim``).

    What recomputation frees lies between what is kept, and would otherwise stay resident.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
