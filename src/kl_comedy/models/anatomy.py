"""Where the parts of a causal language model are, under whatever it is wrapped in.

``policy -> (DDP, compile, PEFT) -> causal LM = decoder body -> hidden [B, S, H] -> linear head -> logits [B, S, V]``
"""

from __future__ import annotations

from typing import Any

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
