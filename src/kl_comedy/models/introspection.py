"""Parts of a causal language model under its PEFT wrapper, calls inside FSDP2, and default sizes per device.

policy -> (PEFT) -> causal LM = decoder body -> hidden [B, S, H] -> linear head -> logits [B, S, V]
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

LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Config keys of architectures that transform the logits after the head, and the value that does nothing."""


def unwrap(model: nn.Module) -> Any:
    """The causal LM inside a PEFT wrapper (adapters stay in place and active)."""
    wrapped: Any = model
    if is_peft(model):
        return wrapped.get_base_model()
    return wrapped


def is_peft(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model (an adapter that can be switched off)."""
    # By its attributes: importing PEFT takes seconds, and a policy without an adapter does not need it.
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def decoder_body(model: nn.Module) -> nn.Module:
    """The part of the causal LM that ends in hidden states. Raises :class:`UserError` where there is none."""
    causal = unwrap(model)
    # base_model of transformers is the model itself where its architecture names no body.
    body = getattr(causal, "base_model", causal)
    if body is causal or not isinstance(body, nn.Module):
        raise UserError(f"model.source: {type(causal).__name__} has no decoder body apart from its head")
    return body


def head_weights(model: nn.Module) -> Head:
    """Weight ``[V, H]`` and bias of the model's head; the tensors themselves, not copies.

    Raises :class:`UserError` when the head is not one plain linear layer (an adapter on it, several heads).
    """
    causal = unwrap(model)
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"model.source: the head of {type(causal).__name__} is {type(head).__name__}; only a plain linear head is "
            "supported (leave the head out of model.lora.target_modules)"
        )
    return head.weight, head.bias


def head_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that the factors of the head's product are rounded to (``model.head_dtype``); None: no rounding.

    The policy carries it, so that its copies and samplers compute log-probs as the learner does.
    """
    # On the causal LM, which a PEFT wrapper added later does not hide.
    dtype: torch.dtype | None = getattr(unwrap(model), "_kl_comedy_head_dtype", None)
    return dtype


def layers_in_bf16(model: nn.Module) -> bool:
    """Whether the decoder layers compute in bfloat16 even outside autocast (``kl_comedy.models.sharding``)."""
    return bool(getattr(unwrap(model), "_kl_comedy_layers_in_bf16", False))


def uses_varlen(model: nn.Module) -> bool:
    """Whether torch's kernel for sequences of different lengths, in 16 bits, computes the attention of packed rows."""
    return bool(getattr(unwrap(model), "_kl_comedy_varlen", False))


def refuse_scaled_logits(config: Any) -> None:
    """Raise :class:`UserError` when the config names a transformation of the logits after the head."""
    for key, neutral in LOGIT_TRANSFORMS.items():
        value = getattr(config, key, None)
        # A config may name the neutral value: then there is nothing to refuse.
        changes_logits = value not in (None, neutral)
        if changes_logits:
            raise UserError(
                f"model.source: this architecture sets {key} = {value}, which changes the logits after its linear "
                "head; its log-probs would be computed wrongly, so it is not supported"
            )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to zero, so that log-probs are the same in train and eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            # Set to zero, and not eval(): a policy in train mode must compute what the sampler computed.
            module.p = 0.0
        # Attention keeps its probability as a number, such as attention_dropout, that it passes to a function.
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float) and value:
                setattr(module, name, 0.0)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 shards ``model``."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    # FSDP2 changes the class of the module that it shards.
    return isinstance(model, FSDPModule)


def run_inside_fsdp_forward(model: nn.Module, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """``run()`` as a forward method of a sharded ``model``, so that FSDP gathers head and body; else ``run()``."""
    if not is_sharded(model):
        return run()
    from torch.distributed.fsdp import register_fsdp_forward_method

    sharded: Any = model
    # Once per model: registering a method wraps it, and a second time would wrap the wrapper.
    if "_kl_comedy_forward" not in vars(sharded):
        sharded._kl_comedy_forward = types.MethodType(lambda self, inner: inner(), sharded)
        register_fsdp_forward_method(sharded, "_kl_comedy_forward")
    # The root (embedding, norms, head) is needed first in a backward pass, which follows at once: it is not gathered
    # again for that. A pass without gradient leaves nothing behind.
    sharded.set_reshard_after_forward(not torch.is_grad_enabled(), recurse=False)
    result: tuple[Tensor, ...] = sharded._kl_comedy_forward(run)
    return result


GIB = 2**30
ACTIVATION_BYTES = {"cpu": 1 * GIB, "cuda": 16 * GIB}
"""Bytes for the activations of one backward pass where ``train.microbatch_tokens`` is not set."""

CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}
"""Logits in memory where ``model.head_chunk_elements`` is not set: 16 MiB and 512 MiB in float32. From 32 MiB on
glibc maps and unmaps pages for every tensor."""

MAX_MICROBATCH_TOKENS = 2**16


def head_chunk(configured: int | None, device: torch.device) -> int:
    """``configured``, or the default of the device."""
    return configured or CHUNK_ELEMENTS[device.type]


def microbatch_tokens(configured: int | None, model: Any, device: torch.device, *, checkpoints: bool) -> int:
    """``configured``, or :func:`default_microbatch_tokens`."""
    if configured:
        return configured
    # Activations are as wide as the weights, unless autocast narrows them: an upper bound.
    element_bytes = next(model.parameters()).element_size()
    return default_microbatch_tokens(model.config, element_bytes, device.type, checkpoints=checkpoints)


def default_microbatch_tokens(config: Any, element_bytes: int, device_type: str, *, checkpoints: bool) -> int:
    """Tokens whose activations fit :data:`ACTIVATION_BYTES` of the device."""
    bytes_per_token = element_bytes * activation_values(config, checkpoints=checkpoints)
    fitting_tokens = ACTIVATION_BYTES[device_type] // bytes_per_token
    # At least one, or a large model on a small device would have no micro-batches at all.
    return min(MAX_MICROBATCH_TOKENS, max(1, fitting_tokens))


def activation_values(config: Any, *, checkpoints: bool) -> int:
    """Values that autograd keeps per token of a gated decoder: norms, projections, attention, the gated product.

    With ``checkpoints`` autograd keeps the inputs of the layers, and the values of one layer while it is recomputed.
    """
    config = config.get_text_config()
    hidden = int(config.hidden_size)
    layers = int(config.num_hidden_layers)
    # Architectures without these entries have the default of their family.
    inner = int(getattr(config, "intermediate_size", None) or 4 * hidden)
    heads = int(getattr(config, "num_attention_heads", 1))
    key_value_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    key_value = 2 * hidden * key_value_heads // heads
    # Counted from the graph of a Llama layer; tests/planning/test_planning.py compares it with what autograd saves.
    layer = 9 * hidden + 2 * key_value + 4 * inner
    if checkpoints:
        return layers * hidden + layer
    return layers * layer


def release_free_memory() -> None:
    """Return free pages to the system (glibc's ``malloc_trim``): what activation checkpointing frees would stay."""
    # Other C libraries and systems have no such function.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
