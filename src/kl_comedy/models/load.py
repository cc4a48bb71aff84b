"""Load a policy and its tokenizer from a :class:`ModelConfig`, ready to sample from and to train.

    config -> whole model (an adapter is merged with its base) -> weights -> device -> new LoRA adapter -> check

Sources: ``pocket`` (built here), a local folder or a hub id, the last two also with a GGUF file; a folder that has only
a PEFT adapter is merged with its base model once. Loading ends with a check that the chunked log-probs equal those of
the model's own logits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import sha256_file
from kl_comedy.models.attention import pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.cache import cached_folder
from kl_comedy.models.gguf import gguf_path, load_gguf_model, load_gguf_tokenizer
from kl_comedy.models.introspection import (
    disable_dropout,
    head_dtype,
    head_weights,
    layers_in_bf16,
    refuse_scaled_logits,
    run_inside_fsdp_forward,
    uses_varlen,
)
from kl_comedy.models.logprobs import completion_hidden, token_pass
from kl_comedy.models.lora import add_lora
from kl_comedy.models.onednn_linear import linear_library, use_onednn_linears
from kl_comedy.models.sources import (
    base_of_adapter,
    check_model_config,
    check_source,
    check_undamaged,
    first_line,
    from_pretrained,
    is_adapter_folder,
    loading_arguments,
)
from kl_comedy.models.types import LoadedModel, PassOptions

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

log = logging.getLogger("kl_comedy")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNSUPPORTED_OPTIONS = {
    "device_map",
    "quantization_config",
    "attn_implementation",
    "dtype",
    "torch_dtype",
}
"""Options of transformers that other keys of ``model`` set, or that would load the model in an unsupported way."""


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the policy that ``config`` describes. Raises :class:`UserError` for mistakes in the config."""
    config = whole_model(config)
    check_undamaged(config)
    if config.source != "pocket":
        check_model_config(config)
    device = pick_device(config.device)
    tokenizer = load_tokenizer(config)
    model = load_base(config)
    refuse_scaled_logits(model.config)
    disable_dropout(model)
    check_kernels(config, device)
    carry_options(model, config)
    place(model, device)
    # After place, so that the adapter is put around the linear layers that are used.
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(config.gradient_checkpointing)  # transformers recomputes in training mode only
    try:
        check_log_probs(model, share_prompt=config.share_prompt)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # sizes in its config that do not fit its weights
        raise UserError(f"model.source: {config.source!r} cannot compute a pass: {first_line(error)}") from error
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def check_kernels(config: ModelConfig, device: torch.device) -> None:
    """Raise :class:`UserError` for a missing attention kernel; warn where prompts will not be shared."""
    if config.attention == "varlen":
        others = ["sdpa", "eager"]
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            why = f"torch {torch.__version__} has no such kernel; 2.10 and later have it"
            raise bad_value("model.attention", "varlen", others, why)
        if device.type != "cuda":
            raise bad_value("model.attention", "varlen", others, f"its kernel needs a GPU, not {device.type}")
    if config.attention == "flash_attention_2" and config.share_prompt:
        log.warning(
            "model.attention=flash_attention_2 computes the prompt again for each completion, and samples by "
            "transformers' generate; model.attention=varlen shares it in training passes"
        )


def carry_options(causal: Any, config: ModelConfig) -> None:
    """Write options of the pass into the model, so that every copy of the policy computes in the same way."""
    causal._kl_comedy_head_dtype = None
    if config.head_dtype is not None:
        causal._kl_comedy_head_dtype = DTYPES[config.head_dtype]
    causal._kl_comedy_varlen = config.attention == "varlen"


def place(model: Any, device: torch.device) -> None:
    """Move ``model`` to ``device``, with the linear layers that are fastest there."""
    use_fast_linears(model.to(device), device)


def use_fast_linears(model: Any, device: torch.device) -> None:
    """Replace the linear layers of ``model`` by those that are fastest on ``device``."""
    if device.type == "cpu" and linear_library() == "onednn":
        use_onednn_linears(model)


def pick_device(name: str) -> torch.device:
    """The device: ``auto`` is the GPU where there is one. Raises :class:`UserError` for ``cuda`` without a GPU."""
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise bad_value("model.device", name, "auto, cpu", why="torch sees no GPU here")
    return torch.device("cpu")


def load_base(config: ModelConfig) -> Any:
    """The causal LM with its weights, on the CPU, without a new adapter.

    Raises :class:`UserError` for options that are not allowed, and for missing weights.
    """
    config = whole_model(config)
    dtype = DTYPES[config.dtype]
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket

        pocket: Any = load_pocket(replace(config, attention=config.library_attention))
        return pocket.to(dtype)
    from transformers import AutoModelForCausalLM

    check_model_config(config)
    for option in config.options:
        if option in UNSUPPORTED_OPTIONS:
            raise UserError(f"model.options.{option}: not allowed here; the other keys of model decide it")
    options = {**loading_arguments(config), "attn_implementation": config.library_attention, "dtype": dtype}
    if config.gguf_file is not None:
        return load_gguf_model(gguf_path(config), **options)
    model, loading = from_pretrained(
        AutoModelForCausalLM, config.source, "model.source", output_loading_info=True, **options
    )
    # transformers only warns, and would leave random numbers in their place.
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UserError(f"model.source: {config.source!r} lacks {len(missing)} weights, as {missing[0]}")
    return model


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer named by ``tokenizer``, else that of the GGUF file, else of the source; it pads on the left."""
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket_tokenizer

        return load_pocket_tokenizer(config)
    from transformers import AutoTokenizer

    if config.tokenizer is not None:
        tokenizer = from_pretrained(
            AutoTokenizer, config.tokenizer, "model.tokenizer", trust_remote_code=config.trust_remote_code
        )
    elif config.gguf_file is not None:
        tokenizer = load_gguf_tokenizer(gguf_path(config))
    else:
        tokenizer = _tokenizer_of_source(whole_model(config))
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError("model.tokenizer: it has neither a padding nor an end token; name another tokenizer")
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token_id is None:
        log.warning(
            "model.tokenizer: it has no end token, so that no completion ends by itself: each runs to "
            "rollout.max_new_tokens, or to a text of rollout.stop"
        )
    return tokenizer


def _tokenizer_of_source(config: ModelConfig) -> Any:
    from transformers import AutoTokenizer

    options = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    return from_pretrained(AutoTokenizer, config.source, "model.source", **options)


def whole_model(config: ModelConfig) -> ModelConfig:
    """``config`` itself; for an adapter folder, ``config`` with the merged base and adapter as its source.

    The merged model is an ordinary model from here on: it is trained whole or under a new adapter, sharded, served by
    vLLM. The frozen reference is a copy of it, so that the reference is the adapter's start and not the base. The model
    is written once, to the cache. Raises :class:`UserError` where base and adapter do not fit.
    """
    if config.source == "pocket" or not is_adapter_folder(config.source):
        return config
    check_undamaged(config)
    # The base may itself be an adapter folder.
    base = whole_model(base_of_adapter(config))
    check_source(base)
    key = _merged_key(config, base)
    folder = cached_folder("merged", key, lambda draft: _write_merged(config, base, draft))
    return replace(config, source=str(folder), revision=None)


def _merged_key(config: ModelConfig, base: ModelConfig) -> str:
    """A hash of everything that the merged weights depend on. A change of its bytes merges all adapters again."""
    digest = hashlib.sha256(f"{config.dtype} {base.source} {base.revision}".encode())
    for file in sorted(Path(config.source).iterdir()):
        if file.is_file():
            digest.update(f"{file.name} {sha256_file(file)}".encode())
    # A base of several GB is not read again at every start: its files are known by size and time.
    if Path(base.source).is_dir():
        for file in sorted(Path(base.source).iterdir()):
            digest.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _write_merged(config: ModelConfig, base: ModelConfig, folder: Path) -> None:
    """Write base and adapter as one model to ``folder``."""
    from peft import PeftModel

    # Merged in float32: in 16 bits the sum would be rounded twice.
    model = load_base(replace(base, dtype="float32", lora=None, options={}))
    try:
        adapted = PeftModel.from_pretrained(model, config.source)
        merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT and torch raise errors of many types for shapes and names that do not fit
        why = f"the adapter does not fit its base {base.source!r}: {first_line(error)}"
        raise UserError(f"model.source: {config.source!r}: {why}") from error
    merged.to(DTYPES[config.dtype]).save_pretrained(folder)
    # Fine-tuning may have changed the tokenizer, in which case it was saved beside the adapter.
    has_tokenizer = any(Path(config.source).glob("tokenizer*"))
    tokenizer_config = base
    if has_tokenizer:
        tokenizer_config = config
    _tokenizer_of_source(replace(tokenizer_config, tokenizer=None)).save_pretrained(folder)


@torch.no_grad()
def check_log_probs(model: Any, *, share_prompt: bool = True) -> None:
    """Raise :class:`UserError` where our log-probs of a few tokens differ from those of the model's own logits.

    Tolerance: 1e-4 of the largest logit in float32, one unit in the last place or two in narrower types.
    """
    # The kernel takes 16 bits, so both sides are computed as training computes them, under autocast.
    if uses_varlen(model) and not torch.is_autocast_enabled(model.device.type):
        with torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False):
            check_log_probs(model, share_prompt=share_prompt)
        return
    weight, _ = head_weights(model)
    vocabulary = weight.shape[0]
    rounds_products = head_dtype(model) is not None or layers_in_bf16(model) or uses_varlen(model)
    is_narrow = rounds_products or weight.dtype in (torch.bfloat16, torch.float16)
    tolerance = 1e-4
    hidden_tolerance = 1e-3
    if is_narrow:
        tolerance = 2.0**-6
        hidden_tolerance = 2.0**-4

    # Two rows of a prompt of 4 and a completion of 8 tokens; steps of a prime go all over the vocabulary.
    ids_BS = (torch.arange(24, device=weight.device) * 7919 % vocabulary).view(2, 12)
    ones_BS = torch.ones_like(ids_BS)
    logits_BSV = model(input_ids=ids_BS, attention_mask=ones_BS, use_cache=False).logits.to(torch.float64)
    # Five rows per chunk, so that chunks of several and of fewer rows are computed.
    options = PassOptions(temperature=1.0, chunk_elements=5 * vocabulary)
    logp_BT = token_pass(
        model,
        options,
        prompt_ids_BP=ids_BS[:, :4],
        prompt_mask_BP=ones_BS[:, :4],
        ids_BT=ids_BS[:, 4:],
        mask_BT=ones_BS[:, 4:],
    ).logp_BT
    if share_prompt and use_layout_attention(model):
        _check_shared_prompt(model, ids_BS, ones_BS, tolerance=hidden_tolerance)
    # The logits of a position are those of the next token.
    expected_BT = logits_BSV[:, 3:-1].log_softmax(-1).gather(2, ids_BS[:, 4:, None])[..., 0]
    gap = float((logp_BT.to(torch.float64) - expected_BT).abs().max())
    allowed = tolerance * max(1.0, float(logits_BSV.abs().max()))
    # Not gap > allowed, which is False for NaN.
    if not gap <= allowed:
        raise UserError(
            f"model.source: log-probs from body and linear head differ from the model's own by {gap:.3g} nats "
            f"(at most {allowed:.2g} expected); the architecture does something more than a linear head"
        )


def _check_shared_prompt(model: Any, ids_BS: Tensor, ones_BS: Tensor, *, tolerance: float) -> None:
    """Compare hidden states of completions that share a prompt's computation with those of separate rows."""
    batch = (ids_BS[:1, :4].expand(2, -1), ones_BS[:, :4], ids_BS[:, 4:], ones_BS[:, 4:].bool())

    def run() -> tuple[Tensor, Tensor]:
        separate_NH = completion_hidden(model, *batch, share_prompt=False)
        shared_NH = packed_hidden(model, pack_batch(*batch))
        return separate_NH, shared_NH

    separate_NH, shared_NH = run_inside_fsdp_forward(model, run)
    gap = float((separate_NH.double() - shared_NH.double()).abs().max())
    size = float(separate_NH.double().abs().max())
    if not gap <= tolerance * max(1.0, size):
        raise UserError(
            f"model.share_prompt: completions that share a prompt get other hidden states than alone (off by {gap:.3g} "
            f"of {size:.3g}); set model.share_prompt=false for this architecture"
        )
