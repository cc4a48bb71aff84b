"""The sizes of a policy, read off its architecture on the meta device: no weights, no download of any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.models.sharding import decoder_layers, skeleton

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

_QWEN25 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 131072}
_LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 5e5,
}  # fmt: skip
_QWEN25_7B = {
    **_QWEN25, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "rope_theta": 5e6,
}  # fmt: skip
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 1e5,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN25, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN25, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B,
    "meta-llama/Llama-3.1-8B": _LLAMA31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA31_8B,
}  # fmt: skip
"""Of the config.json of models on the hub, what decides sizes: a plan for them needs no network."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Counts of parameters (tied ones once), and the dimensions that memory and time follow from.

    ``embedding`` is the input table's, ``head`` that of the output's own matrix (0 where it is tied); ``layer`` the
    largest decoder layer's. ``config`` is transformers' own.
    """

    source: str
    parameters: int
    trainable: int
    embedding: int
    head: int
    layer: int
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    config: Any

    @property
    def body(self) -> int:
        """Parameters of the layers and norms: what every token is multiplied with."""
        return self.parameters - self.embedding - self.head

    @property
    def root(self) -> int:
        """Parameters that FSDP gathers with the root: embedding, final norm, head."""
        return self.parameters - self.layers * self.layer

    @property
    def kv_width(self) -> int:
        """Values of a key, and of a value, in one layer."""
        return self.kv_heads * self.head_dim


def shape_of(config: ModelConfig) -> Shape:
    """The sizes of the policy of ``config``.

    Models of :data:`KNOWN` need no hub. Raises :class:`UserError` for a source that cannot be reached, and for a GGUF
    file.
    """
    if config.gguf_file is not None:
        raise UserError("model.gguf_file: a plan needs a config.json; name the model it was made from as model.source")
    known = config.source in KNOWN and not Path(config.source).is_dir()
    model = causal = known_model(config.source) if known else skeleton(config)
    causal.tie_weights()  # a skeleton's parameters are apart, tied or not
    if config.lora is not None:
        from kl_comedy.models.load import add_lora

        model = add_lora(causal, config.lora)
    found = causal.config.get_text_config() if hasattr(causal.config, "get_text_config") else causal.config
    heads = int(found.num_attention_heads)
    embedding, output = causal.get_input_embeddings().weight, causal.get_output_embeddings().weight
    layers = decoder_layers(causal)
    return Shape(
        source=config.source,
        parameters=_count(model, only_trained=False),
        trainable=_count(model, only_trained=True),
        embedding=embedding.numel(),
        head=0 if output is embedding else output.numel(),
        layer=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
        layers=len(layers),
        hidden=int(found.hidden_size),
        inner=int(getattr(found, "intermediate_size", None) or 4 * found.hidden_size),
        heads=heads,
        kv_heads=int(getattr(found, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(found, "head_dim", None) or found.hidden_size // heads),
        vocabulary=output.shape[0],
        config=found,
    )


def _count(model: Any, *, only_trained: bool) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not only_trained)


def known_model(source: str, **changes: Any) -> Any:
    """The architecture of a :data:`KNOWN` model on the meta device, with ``changes`` to its config."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(known_config(source, **changes), attn_implementation="sdpa")


def known_config(source: str, **changes: Any) -> Any:
    """transformers' config of a :data:`KNOWN` model, with ``changes``."""
    from transformers import AutoConfig

    facts = {**KNOWN[source], **changes}
    rope = {"rope_type": "default", "rope_theta": facts.pop("rope_theta")}
    return AutoConfig.for_model(facts.pop("model_type"), rope_parameters=rope, **facts)
