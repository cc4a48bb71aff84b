"""Load a policy and its tokenizer from a :class:`ModelConfig`, ready to sample from and to train.

Sources: ``pocket`` (built here), a local folder or a hub id, the last two also with a GGUF file. Loading
ends with a check that the chunked log-probs equal those of the model's own logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.models.attention import pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.gguf import SMOLLM2_FOLDER, load_gguf_model, load_gguf_tokenizer
from kl_comedy.models.introspection import (
    disable_dropout,
    head_weights,
    refuse_scaled_logits,
    run_inside_fsdp_forward,
    unwrap,
)
from kl_comedy.models.logprobs import completion_hidden, token_pass
from kl_comedy.models.lora import add_lora
from kl_comedy.models.onednn_linear import linear_library, use_onednn_linears

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RESERVED_OPTIONS = (
    "attn_implementation",
    "device_map",
    "dtype",
    "gguf_file",
    "quantization_config",
    "revision",
    "torch_dtype",
    "trust_remote_code",
)
"""Options of transformers that other keys of ``model`` set, or that would load the model in an unsupported way."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A policy on its device (a causal LM of transformers, or the PEFT model around it) and its tokenizer.

    Dropout is off. The tokenizer pads on the left; its padding token may be the end token, so padding is always
    given by masks.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    source: str

    @property
    def causal(self) -> Any:
        """The causal LM under its wrappers, adapters included."""
        return unwrap(self.model)


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the policy that ``config`` describes. Raises :class:`UserError` for mistakes in the config."""
    device = pick_device(config.device)
    dtype = DTYPES.get(config.dtype)
    if dtype is None:
        raise bad_value("model.dtype", config.dtype, DTYPES)
    tokenizer = load_tokenizer(config)
    model = load_base(config)
    refuse_scaled_logits(model.config)
    disable_dropout(model)
    model.to(device)
    if device.type == "cpu" and linear_library() == "onednn":
        use_onednn_linears(model)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(config.gradient_checkpointing)  # transformers recomputes in training mode only
    check_log_probs(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one. Raises :class:`UserError` for ``cuda`` without a GPU."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise bad_value("model.device", name, "auto, cpu", why="torch sees no GPU here")
    if name == "cpu" or not has_gpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_base(config: ModelConfig) -> Any:
    """The causal LM with its weights, on the CPU, without adapter."""
    dtype = DTYPES[config.dtype]
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket

        return load_pocket(config)[0].to(dtype)
    from transformers import AutoModelForCausalLM

    reserved = next((key for key in config.options if key in RESERVED_OPTIONS), None)
    if reserved is not None:
        raise UserError(f"model.options.{reserved}: not allowed here; the other keys of model decide it")
    options = {**config.options, "attn_implementation": config.attention, "dtype": dtype}
    if config.gguf_file is not None:
        return load_gguf_model(_gguf_folder(config), config.gguf_file, **options)
    options |= {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    return _from_pretrained(AutoModelForCausalLM, config.source, "model.source", **options)


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer named by ``tokenizer``, else that of the GGUF file, else that of the source; it pads on the left.

    Raises :class:`UserError` for a tokenizer without padding and end token.
    """
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket_tokenizer

        return load_pocket_tokenizer(config)
    from transformers import AutoTokenizer

    options = {"trust_remote_code": config.trust_remote_code}
    if config.tokenizer is not None:
        tokenizer = _from_pretrained(AutoTokenizer, config.tokenizer, "model.tokenizer", **options)
    elif config.gguf_file is not None:
        tokenizer = load_gguf_tokenizer(_gguf_folder(config), config.gguf_file)
    else:
        tokenizer = _from_pretrained(AutoTokenizer, config.source, "model.source", revision=config.revision, **options)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError("model.tokenizer: it has neither a padding nor an end token; name another tokenizer")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _gguf_folder(config: ModelConfig) -> Path:
    """The folder that holds the GGUF file: the source itself, or the hub's snapshot of it."""
    folder = Path(config.source)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config.source, config.gguf_file, revision=config.revision)).parent
    except Exception as error:  # the hub client raises many kinds of errors
        raise _unavailable("model.source", config.source, error) from error


def _from_pretrained(auto: Any, name: str, key: str, **options: Any) -> Any:
    """``auto.from_pretrained``, with a one-line :class:`UserError` for the mistakes a user can make."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise _unavailable(key, name, FileNotFoundError("no such folder"))
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ImportError) as error:
        raise _unavailable(key, name, error) from error
    except TypeError as error:  # an option that the architecture's constructor does not know
        raise UserError(f"model.options: {name!r} does not take them: {_first_line(error)}") from error
    except ValueError as error:
        raise UserError(f"{key}: {name!r} cannot be loaded: {_first_line(error)}") from error


def _unavailable(key: str, name: str, error: Exception) -> UserError:
    """The error for a missing source; it suggests the sibling folder with the nearest name."""
    why = f"it could not be loaded: {_first_line(error)}"
    path = Path(name)
    siblings = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    suggestion = nearest(path.name, [sibling for sibling in siblings if sibling != path.name])
    if suggestion:
        why += f"; did you mean {str(path.parent / suggestion)!r}?"
    if path.name == SMOLLM2_FOLDER.name and not path.is_dir():
        why += "; `make smollm2` makes this folder"
    return bad_value(key, name, "pocket, an existing folder, or a hub id", why=why)


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0][:300] or type(error).__name__


def check_log_probs(model: Any, *, share_prompt: bool = True) -> None:
    """Raise :class:`UserError` where our log-probs of a few tokens differ from those of the model's own logits.

    Tolerance: 1e-4 of the largest logit in float32, one unit in the last place or two in narrower types.
    """
    weight, _ = head_weights(model)
    vocabulary = weight.shape[0]
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    ids = (torch.arange(24, device=weight.device) * 7919 % vocabulary).view(2, 12)
    ones = torch.ones_like(ids)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=ones, use_cache=False).logits.to(torch.float64)
        logp_BT = token_pass(
            model,
            prompt_ids_BP=ids[:, :4],
            prompt_mask_BP=ones[:, :4],
            ids_BT=ids[:, 4:],
            mask_BT=ones[:, 4:],
            temperature=1.0,
            chunk_elements=5 * vocabulary,
        ).logp_BT
    if share_prompt and use_layout_attention(model):
        _check_shared_prompt(model, ids, ones, tolerance=2.0**-4 if narrow else 1e-3)
    expected_BT = logits[:, 3:-1].log_softmax(-1).gather(2, ids[:, 4:, None])[..., 0]
    gap = float((logp_BT.to(torch.float64) - expected_BT).abs().max())
    allowed = (2.0**-6 if narrow else 1e-4) * max(1.0, float(logits.abs().max()))
    if not gap <= allowed:
        raise UserError(
            f"model.source: log-probs from body and linear head differ from the model's own by {gap:.3g} nats "
            f"(at most {allowed:.2g} expected); the architecture does something more than a linear head"
        )


@torch.no_grad()
def _check_shared_prompt(model: Any, ids_BS: Tensor, ones_BS: Tensor, *, tolerance: float) -> None:
    """Compare hidden states of completions that share a prompt's computation with those of separate rows."""
    prompt_BP = ids_BS[:1, :4].expand_as(ids_BS[:, :4])
    batch = (prompt_BP, ones_BS[:, :4], ids_BS[:, 4:], ones_BS[:, 4:].bool())
    (separate_NH,) = run_inside_fsdp_forward(
        model, lambda: (completion_hidden(model, *batch, share_prompt=False).double(),)
    )
    (shared_NH,) = run_inside_fsdp_forward(model, lambda: (packed_hidden(model, pack_batch(*batch)).double(),))
    gap, size = float((separate_NH - shared_NH).abs().max()), float(separate_NH.abs().max())
    if not gap <= tolerance * max(1.0, size):
        raise UserError(
            f"model.share_prompt: completions that share a prompt get other hidden states than alone (off by {gap:.3g} "
            f"of {size:.3g}); set model.share_prompt=false for this architecture"
        )
