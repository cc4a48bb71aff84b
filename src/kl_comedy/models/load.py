"""From a :class:`ModelConfig` to a policy and its tokenizer, ready to sample from and to train.

Sources: ``pocket`` (built by us), a local folder, a hub id, or either of the last two with a GGUF file. Loading
ends with a probe: our chunked log-probs must be the model's own, or it refuses to start.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.models.attention import adopt, build_line, line_hidden
from kl_comedy.models.gguf import FOLDER as SMOLLM2
from kl_comedy.models.gguf import load_gguf_model, load_gguf_tokenizer
from kl_comedy.models.in_place_gradients import adopt_embeddings
from kl_comedy.models.introspection import (
    call_as_forward,
    head_weights,
    refuse_scaled_logits,
    silence_dropout,
    unwrap,
)
from kl_comedy.models.logprobs import completion_hidden, token_pass
from kl_comedy.models.onednn_linear import adopt_products

if TYPE_CHECKING:
    from kl_comedy.config.schema import LoraConfig, ModelConfig

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
"""Options of transformers that our own keys decide, or that would load the model in a way we do not support."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A policy on its device: a causal LM of transformers, or the PEFT model around it, and its tokenizer.

    Dropout is off, so that train and eval mode give the same log-probs; the tokenizer pads on the left and
    always has a padding token, which may be the end token: padding is told by masks, never by ids.
    """

    model: Any
    tokenizer: Any
    device: torch.device
    source: str

    @property
    def causal(self) -> Any:
        """The causal LM under its wrappers; adapters are part of it."""
        return unwrap(self.model)


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the policy that ``config`` describes. Raises :class:`UserError` for whatever the user can mend."""
    device = pick_device(config.device)
    _dtype(config.dtype)
    tokenizer = load_tokenizer(config)
    model = load_base(config)
    prepare_tokenizer(tokenizer)
    refuse_scaled_logits(model.config)
    silence_dropout(model)
    model.to(device)
    if config.lora is not None:
        model = add_lora(model, config.lora)
    adopt_products(model)
    adopt_embeddings(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train(config.gradient_checkpointing)  # transformers recomputes in training mode only
    probe_head(model, share_prompt=config.share_prompt)
    return LoadedModel(model=model, tokenizer=tokenizer, device=device, source=config.source)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one. Raises :class:`UserError` for ``cuda`` without a GPU."""
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise bad_value("model.device", name, "auto, cpu", why="torch sees no GPU here")
    if name == "cpu" or (name == "auto" and not present):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise bad_value("model.dtype", name, DTYPES)
    return DTYPES[name]


def load_base(config: ModelConfig) -> Any:
    """The causal LM with its weights, on the CPU, without adapter."""
    dtype = _dtype(config.dtype)
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket

        return load_pocket(config)[0].to(dtype)
    return _load_weights(config, dtype)


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer named by ``tokenizer``, else that of the GGUF file, else that of the source."""
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket_tokenizer

        return load_pocket_tokenizer(config)
    from transformers import AutoTokenizer

    if config.gguf_file is not None and config.tokenizer is None:
        return load_gguf_tokenizer(_gguf_folder(config), config.gguf_file)
    name, key = (config.tokenizer, "model.tokenizer") if config.tokenizer else (config.source, "model.source")
    revision = None if config.tokenizer else config.revision
    return _from_pretrained(AutoTokenizer, name, key, revision=revision, trust_remote_code=config.trust_remote_code)


def _load_weights(config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    clash = next((key for key in config.options if key in RESERVED_OPTIONS), None)
    if clash is not None:
        raise UserError(f"model.options.{clash}: not allowed here; the other keys of model decide it")
    options = {**config.options, "attn_implementation": config.attention}
    if config.gguf_file is not None:
        return load_gguf_model(_gguf_folder(config), config.gguf_file, dtype=dtype, **options)
    return _from_pretrained(
        AutoModelForCausalLM,
        config.source,
        "model.source",
        dtype=dtype,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        **options,
    )


def _gguf_folder(config: ModelConfig) -> Path:
    """The folder that holds the GGUF file: the source itself, or the hub's snapshot of it."""
    folder = Path(config.source)
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config.source, config.gguf_file, revision=config.revision)).parent
    except Exception as error:  # the hub client raises many kinds; each means that the file cannot be had
        raise _unavailable("model.source", config.source, error) from error


def _from_pretrained(auto: Any, name: str, key: str, **options: Any) -> Any:
    """``auto.from_pretrained`` with the mistakes a user can make told in one line."""
    path = Path(name)
    if name.startswith(("/", ".", "~")) and not path.is_dir():
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
    """The error for a source that is not there, with the folder beside it that is closest in name."""
    why = f"it could not be loaded: {_first_line(error)}"
    path = Path(name)
    beside = sorted(p.name for p in path.parent.iterdir() if p.is_dir()) if path.parent.is_dir() else []
    near = nearest(path.name, [other for other in beside if other != path.name])
    if near:
        why += f"; did you mean {str(path.parent / near)!r}?"
    if path.name == SMOLLM2.name and not path.is_dir():
        why += "; `make smollm2` makes this folder"
    return bad_value(key, name, "pocket, an existing folder, or a hub id", why=why)


def _first_line(error: Exception) -> str:
    return (str(error).strip().split("\n") or [""])[0][:300] or type(error).__name__


def prepare_tokenizer(tokenizer: Any) -> None:
    """Pad on the left, with the end token where no padding token exists. Raises :class:`UserError` without either."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError("model.tokenizer: it has neither a padding nor an end token; name another tokenizer")
        tokenizer.pad_token = tokenizer.eos_token


def add_lora(model: Any, config: LoraConfig) -> Any:
    """Put a LoRA adapter on ``model``; the base weights are frozen. The adapter starts as the identity.

    Raises :class:`UserError` for modules the model lacks, for the head, and for dropout: the log-probs that
    are differentiated must be those of the policy that sampled.
    """
    from peft import get_peft_model

    if config.dropout:
        raise bad_value(
            "model.lora.dropout",
            config.dropout,
            "0",
            why="dropout makes the trained policy another one than the sampler",
        )
    head = model.get_output_embeddings()
    linear = {
        name.rsplit(".", 1)[-1] for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    }
    for target in config.target_modules:
        if target not in linear:
            raise bad_value("model.lora.target_modules", target, sorted(linear))
    adapted = get_peft_model(model, adapter_settings(config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name and not parameter.is_meta:
                parameter.copy_(initial_adapter(name, tuple(parameter.shape)))
    return adapted


def adapter_settings(config: LoraConfig) -> Any:
    """``model.lora`` in PEFT's words."""
    from peft import LoraConfig as PeftLora
    from peft import TaskType

    return PeftLora(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=list(config.target_modules),
        task_type=TaskType.CAUSAL_LM,
    )


def initial_adapter(name: str, shape: tuple[int, ...]) -> Tensor:
    """What a LoRA factor begins with: ``B`` zero, ``A`` Kaiming-uniform as in PEFT, drawn from its name alone.

    So an adapter begins with the same numbers in every process, however the model is sharded.
    """
    found = torch.zeros(shape)
    if ".lora_A." in name:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        nn.init.kaiming_uniform_(found, a=math.sqrt(5), generator=torch.Generator().manual_seed(seed))
    return found


def probe_head(model: Any, *, share_prompt: bool = True) -> None:
    """Compare our log-probs with those of the model's own logits on a few tokens; raise where they differ.

    Tolerance: 1e-4 of the largest logit in float32, one unit in the last place or two in narrower types.
    """
    weight, _ = head_weights(model)
    vocabulary = weight.shape[0]
    ids = (torch.arange(24, device=weight.device) * 7919 % vocabulary).view(2, 12)
    ones = torch.ones_like(ids)

    def whole_pass() -> tuple[Tensor, ...]:
        return (model(input_ids=ids, attention_mask=ones, use_cache=False).logits.to(torch.float64),)

    with torch.no_grad():
        (logits,) = whole_pass()
        ours = token_pass(
            model,
            prompt_ids_BP=ids[:, :4],
            prompt_mask_BP=ones[:, :4],
            ids_BT=ids[:, 4:],
            mask_BT=ones[:, 4:],
            temperature=1.0,
            chunk_elements=5 * vocabulary,
        ).logp_BT
    if share_prompt:
        _check_sharing(model, ids, ones)
    theirs = logits[:, 3:-1].log_softmax(-1).gather(2, ids[:, 4:, None])[..., 0]
    gap = float((ours.to(torch.float64) - theirs).abs().max())
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    allowed = (2.0**-6 if narrow else 1e-4) * max(1.0, float(logits.abs().max()))
    if not gap <= allowed:
        raise UserError(
            f"model.source: log-probs from body and linear head differ from the model's own by {gap:.3g} nats "
            f"(at most {allowed:.2g} expected); the architecture does something more than a linear head"
        )


def _check_sharing(model: Any, ids_BS: Tensor, ones_BS: Tensor) -> None:
    """Compare hidden states of completions that share a prompt's computation with those of rows of their own."""
    if not adopt(model):
        return
    prompt_BP = ids_BS[:1, :4].expand_as(ids_BS[:, :4])
    batch = (prompt_BP, ones_BS[:, :4], ids_BS[:, 4:], ones_BS[:, 4:].bool())
    with torch.no_grad():
        (apart_NH,) = call_as_forward(model, lambda: (completion_hidden(model, *batch, share_prompt=False).double(),))
        (together_NH,) = call_as_forward(model, lambda: (line_hidden(model, build_line(*batch)).double(),))
    narrow = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    gap, size = float((apart_NH - together_NH).abs().max()), float(apart_NH.abs().max())
    if not gap <= (2.0**-4 if narrow else 1e-3) * max(1.0, size):
        raise UserError(
            f"model.share_prompt: completions that share a prompt get other hidden states than alone (off by {gap:.3g} "
            f"of {size:.3g}); set model.share_prompt=false for this architecture"
        )
