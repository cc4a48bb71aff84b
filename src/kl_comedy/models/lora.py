"""LoRA: adding an adapter to a policy, its initial values, its scaling, merging it into the base, saving it alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    from kl_comedy.config.schema import LoraConfig, ModelConfig


def add_lora(model: Any, config: LoraConfig) -> Any:
    """``model`` as a PEFT model with frozen base weights and an adapter that starts as the identity.

    The adapter has no dropout, which would make the trained policy differ from the sampler. Raises
    :class:`UserError` for modules that the model lacks, and for the head.
    """
    from peft import get_peft_model

    allowed = _adaptable_modules(model)
    if not allowed:
        # As GPT-2, whose layers are of a class of its own.
        raise UserError(
            f"model.lora: {type(model).__name__} has no linear layer (torch.nn.Linear) that an adapter could go to; "
            "take another model, or train all weights (model.lora=null)"
        )
    # PEFT itself would leave an unknown name out without a word, if another one fits.
    for target in config.target_modules:
        if target not in allowed:
            raise bad_value("model.lora.target_modules", target, allowed)
    adapted = get_peft_model(model, _peft_config(config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            # Factors on the meta device have no memory yet; sharding fills them later with the same values.
            if is_lora_factor(name) and not parameter.is_meta:
                parameter.copy_(initial_factor(name, tuple(parameter.shape)))
    return adapted


def _adaptable_modules(model: Any) -> list[str]:
    """The last parts of the names of linear layers, the head excepted: exact KL needs it as one plain layer."""
    head = model.get_output_embeddings()
    names = set()
    for name, module in model.named_modules():
        # PEFT matches the last part of a name, which is the same in every layer.
        if isinstance(module, nn.Linear) and module is not head:
            names.add(name.rsplit(".", 1)[-1])
    return sorted(names)


def _peft_config(config: LoraConfig) -> Any:
    import peft

    alpha: Any = config.alpha  # PEFT types it as an int, and computes alpha / r with any number
    return peft.LoraConfig(
        r=config.rank, lora_alpha=alpha, target_modules=list(config.target_modules), task_type="CAUSAL_LM"
    )


def initial_factor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial value of a LoRA factor: ``B`` is zero, ``A`` Kaiming-uniform as in PEFT, seeded by its name.

    ``name`` is that of the parameter in the PEFT model, and ``shape`` that of the whole factor. An adapter therefore
    starts with the same numbers in every process, however the model is sharded.
    """
    # The seed is a hash of the name: stored runs begin with these numbers, so the bytes hashed must stay.
    factor = torch.zeros(shape)
    if ".lora_A." in name:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        nn.init.kaiming_uniform_(factor, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    return factor


def is_lora_factor(name: str) -> bool:
    """Whether the weight ``name`` of a PEFT model belongs to its adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name a weight had before an adapter was put around it.

    >>> base_name("base_model.model.model.layers.0.q_proj.base_layer.weight")
    'model.layers.0.q_proj.weight'
    """
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def lora_scaling(config: LoraConfig) -> float:
    """The factor of ``B A`` in the adapted weight ``W + scaling * B A`` (Hu et al. 2106.09685)."""
    return config.alpha / config.rank


def peft_scaling(model: Any) -> float:
    """:func:`lora_scaling` of a PEFT model."""
    settings = model.peft_config["default"]
    return float(settings.lora_alpha / settings.r)


_MERGED_PARTS = (".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight")
"""How the names of ``W``, ``A`` and ``B`` end in a PEFT model."""


def merge_adapter(weights: Iterable[tuple[str, Tensor]], scaling: float) -> Iterator[tuple[str, Tensor]]:
    """Base names and weights of a LoRA model with its adapter merged: ``W + scaling * B A``, computed in float32.

    A module's factors may come before or after its weight. Weights without an adapter are yielded unchanged. The sum is
    rounded to the weight's dtype, so log-probs agree to that precision only. Raises :class:`ValueError` for missing
    factors.
    """
    # Parts of a module until all three are there: at most one module's weights wait, as its parts follow each other.
    incomplete: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights:
        part = _merged_part(name)
        if part is None:
            yield base_name(name), tensor
            continue
        module = name.removesuffix(part)
        parts = incomplete.setdefault(module, {})
        parts[part] = tensor
        if len(parts) < len(_MERGED_PARTS):
            continue
        weight, a, b = (parts[part] for part in _MERGED_PARTS)
        del incomplete[module]
        # Rounded once, at the end: W, A and B in 16 bits would lose most of a small change.
        merged = weight.float() + scaling * (b.float() @ a.float())
        yield f"{base_name(module)}.weight", merged.to(weight.dtype)
    if incomplete:
        raise ValueError(f"an adapter's factors are missing: {', '.join(sorted(incomplete)[:3])}")


def _merged_part(name: str) -> str | None:
    """Which part of an adapted weight ``name`` is; None for a weight without an adapter."""
    for part in _MERGED_PARTS:
        if name.endswith(part):
            return part
    return None


def save_adapter(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Write the adapter among ``weights`` to ``folder`` as PEFT reads it, on the base model ``config.source``."""
    from safetensors.torch import save_file

    assert config.lora is not None
    settings = _peft_config(config.lora)
    settings.base_model_name_or_path = config.source
    # As PEFT itself writes an adapter: whoever loads it gets frozen factors by default.
    settings.inference_mode = True
    settings.save_pretrained(folder)
    # PEFT leaves the adapter's name ("default") out of a file.
    factors = {
        name.replace(".default.", "."): tensor.contiguous() for name, tensor in weights.items() if is_lora_factor(name)
    }
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
