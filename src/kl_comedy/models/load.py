"""Load a policy and its tokenizer from a :class:`ModelConfig`, ready to sample from and to train.

Sources: ``pocket`` (built here), a local folder or a hub id, the last two also with a GGUF file; a folder with a PEFT
adapter alone is merged with its base model once. Loading ends with a check that the chunked log-probs equal those of
the model's own logits.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import logging
import os
import ssl
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.io import CHECKSUMS, find_damage, read_json, sha256_file
from kl_comedy.models.attention import pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.cache import cached_folder
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
from kl_comedy.models.types import LoadedModel, PassOptions

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

log = logging.getLogger("kl_comedy")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNSUPPORTED_OPTIONS = {"device_map", "quantization_config", "attn_implementation", "dtype", "torch_dtype", "gguf_file"}
UNSUPPORTED_OPTIONS |= {"revision", "trust_remote_code"}
"""Options of transformers that other keys of ``model`` set, or that would load the model in an unsupported way."""
MAX_LAYERS = 1000
MAX_SIZE = 2**20
"""Layers, and entries of a dimension, in a model's own config: several times those of the largest models. transformers
builds what the config says before it looks at the weights."""
HUB_SECONDS = 2.0
SMOLLM2_FOLDER = Path("models/SmolLM2-135M-Instruct")
"""Where research/scripts/fetch_smollm2.py (``make smollm2``) puts the converted model."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which PEFT recognises the folder of an adapter."""


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the policy that ``config`` describes. Raises :class:`UserError` for mistakes in the config."""
    config = whole_model(config)
    check_undamaged(config)
    if config.source != "pocket":
        check_model_config(config)
    device, tokenizer, model = pick_device(config.device), load_tokenizer(config), load_base(config)
    refuse_scaled_logits(model.config)
    disable_dropout(model)
    check_kernels(config, device)
    carry_options(model, config)
    place(model, device)
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


def check_undamaged(config: ModelConfig) -> None:
    """Raise :class:`UserError` where files of an exported policy are not as they were written."""
    folder = Path(config.source)
    if (folder / CHECKSUMS).is_file() and (damage := find_damage(folder)):
        remedy = f"export it again (kl-comedy export RUN_DIR), or remove {CHECKSUMS} where the change is yours"
        raise UserError(f"model.source: {folder} is damaged ({damage}); {remedy}")


def check_kernels(config: ModelConfig, device: torch.device) -> None:
    """Raise :class:`UserError` for an attention kernel that is not there; warn where prompts will not be shared."""
    if config.attention == "varlen":
        why = "" if device.type == "cuda" else f"its kernel needs a GPU, not {device.type}"
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            why = f"torch {torch.__version__} has no such kernel; 2.10 and later have it"
        if why:
            raise bad_value("model.attention", "varlen", ["sdpa", "eager"], why)
    if config.attention == "flash_attention_2" and config.share_prompt:
        log.warning(
            "model.attention=flash_attention_2 computes the prompt again for each completion, and samples by "
            "transformers' generate; model.attention=varlen shares it in training passes"
        )


def carry_options(causal: Any, config: ModelConfig) -> None:
    """Options of the pass that every copy of the policy must compute with."""
    causal._kl_comedy_head_dtype = None if config.head_dtype is None else DTYPES[config.head_dtype]
    causal._kl_comedy_varlen = config.attention == "varlen"


def place(model: Any, device: torch.device) -> None:
    """Move ``model`` to ``device``, with the linear layers that are fastest there."""
    use_fast_linears(model.to(device), device)


def use_fast_linears(model: Any, device: torch.device) -> None:
    """Replace the linear layers of ``model`` by those that are fastest on ``device``."""
    if device.type == "cpu" and linear_library() == "onednn":
        use_onednn_linears(model)


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one. Raises :class:`UserError` for ``cuda`` without a GPU."""
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise bad_value("model.device", name, "auto, cpu", why="torch sees no GPU here")
    return torch.device("cpu")


def load_base(config: ModelConfig) -> Any:
    """The causal LM with its weights, on the CPU, without a new adapter."""
    config = whole_model(config)
    dtype = DTYPES[config.dtype]
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket

        return load_pocket(replace(config, attention=config.library_attention)).to(dtype)
    from transformers import AutoModelForCausalLM

    check_model_config(config)
    for option in config.options:
        if option in UNSUPPORTED_OPTIONS:
            raise UserError(f"model.options.{option}: not allowed here; the other keys of model decide it")
    options = {**config.options, "attn_implementation": config.library_attention, "dtype": dtype}
    if config.gguf_file is not None:
        return load_gguf_model(_gguf_path(config), **options)
    options |= {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    model, loading = from_pretrained(
        AutoModelForCausalLM, config.source, "model.source", output_loading_info=True, **options
    )
    if missing := sorted(loading["missing_keys"]):
        raise UserError(f"model.source: {config.source!r} lacks {len(missing)} weights, as {missing[0]}")
    return model


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer named by ``tokenizer``, else that of the GGUF file, else of the source; it pads on the left."""
    if config.source == "pocket":
        from kl_comedy.models.pocket import load_pocket_tokenizer

        return load_pocket_tokenizer(config)
    from transformers import AutoTokenizer

    if config.tokenizer is not None:
        trust = config.trust_remote_code
        tokenizer = from_pretrained(AutoTokenizer, config.tokenizer, "model.tokenizer", trust_remote_code=trust)
    elif config.gguf_file is not None:
        tokenizer = load_gguf_tokenizer(_gguf_path(config))
    else:
        tokenizer = _pretrained_tokenizer(whole_model(config))
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


def _pretrained_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of the source."""
    from transformers import AutoTokenizer

    options = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    return from_pretrained(AutoTokenizer, config.source, "model.source", **options)


def from_pretrained(auto: Any, name: str, key: str, **options: Any) -> Any:
    """``auto.from_pretrained``, with a one-line :class:`UserError` for the mistakes a user can make."""
    if not check_available(key, name, options.get("revision")):
        options["local_files_only"] = True
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ImportError) as error:
        raise _unavailable(key, name, error) from error
    except TypeError as error:  # an option that the architecture's constructor does not know
        raise UserError(f"model.options: {name!r} does not take them: {first_line(error)}") from error
    except UserError:
        raise
    except Exception as error:  # damaged files: parsers in Python and Rust raise what they trip over
        raise UserError(f"{key}: {name!r} cannot be loaded: {first_line(error)}") from error


def check_source(config: ModelConfig) -> None:
    """Raise :class:`UserError` within seconds where the source or the tokenizer cannot be had on this machine."""
    for key, name in (("model.source", config.source), ("model.tokenizer", config.tokenizer)):
        if name not in (None, "pocket"):
            check_available(key, name, config.revision if key == "model.source" else None)
    if is_adapter_folder(config.source):
        check_source(base_of_adapter(config))
    elif config.source != "pocket":
        check_model_config(config)


def check_model_config(config: ModelConfig) -> None:
    """Raise :class:`UserError` for numbers in the files of a model with which building it would not end.

    Ids of tokens that are no numbers are refused too: they would fail when the first completion ends.
    """
    for file in ("config.json", "generation_config.json"):
        _check_numbers(_model_json(config, file), f"model.source: {config.source!r} has in {file} {{}}")


def _check_numbers(content: Mapping[str, Any], where: str) -> None:
    for name, value in content.items():
        place = where.format(name)
        if isinstance(value, Mapping):
            _check_numbers(value, f"{place}.{{}}")
        elif name.endswith("_token_id"):
            ids = value if isinstance(value, list) else [value]
            if not all(each is None or type(each) is int for each in ids):
                raise bad_value(place, value, "a whole number, a list of them, or null")
        elif type(value) is int:
            is_layers = "layers" in name or name in ("n_layer", "block_count")
            is_size = name.endswith(("_size", "_heads", "_dim", "n_embd", "n_head", "n_inner", "d_model", "_count"))
            if is_layers and not 0 <= value <= MAX_LAYERS:
                raise bad_value(place, value, f"at most {MAX_LAYERS} layers")
            if is_size and value > MAX_SIZE:
                raise bad_value(place, value, f"at most {MAX_SIZE}")


def _model_json(config: ModelConfig, name: str) -> dict[str, Any]:
    """A JSON file of the model, local or of the hub; {} where there is none, or one that transformers will refuse."""
    from transformers.utils import cached_file

    local_only = not check_available("model.source", config.source, config.revision)
    try:
        path = cached_file(config.source, name, revision=config.revision, local_files_only=local_only)
        content = json.loads(Path(str(path)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_available(key: str, name: str, revision: str | None = None) -> bool:
    """Whether the hub may be asked for ``name``: it is a folder, or the hub answers. False: it is in the hub's cache.

    Raises :class:`UserError` where it is nowhere; the hub's client would repeat its requests for half a minute.
    """
    if Path(name).is_dir():
        return True
    if name.startswith(("/", ".", "~")):
        raise _unavailable(key, name, FileNotFoundError("no such folder"))
    if hub_answers():
        return True
    from huggingface_hub import constants

    if any(Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots").glob("*/*")):
        return False
    why = f"no such folder, not in the hub's cache ({constants.HF_HUB_CACHE}), and {hub_address()} does not answer"
    raise _unavailable(key, name, ConnectionError(why))


def hub_address() -> str:
    """The address of the Hugging Face hub, or of what stands in for it."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@functools.cache
def hub_answers() -> bool:
    """Whether the hub answers within two seconds; asked once in a process. ``HF_HUB_OFFLINE`` says that it does not."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    reached = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(hub_address(), method="HEAD"), timeout=HUB_SECONDS).close()
        except urllib.error.HTTPError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # the client may know other certificates
                return
        except OSError:
            return
        reached.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)  # a resolver may take longer than any timeout
    return reached.is_set()


def _unavailable(key: str, name: str, error: Exception) -> UserError:
    """The error for a missing source; it suggests the folder in models/, or the sibling, with the nearest name."""
    path, why = Path(name), f"it could not be loaded: {first_line(error)}"
    siblings = sorted(p.name for p in path.parent.glob("*/") if p != path)
    if (local := Path("models") / path.name).is_dir() and local != path:
        why += f"; did you mean {str(local)!r}?"
    elif suggestion := nearest(path.name, siblings):
        why += f"; did you mean {str(path.parent / suggestion)!r}?"
    if path.name == SMOLLM2_FOLDER.name and not path.is_dir():
        why += "; `make smollm2` makes this folder"
    return bad_value(key, name, "pocket, an existing folder, or a hub id", why=why)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def _gguf_path(config: ModelConfig) -> Path:
    """The GGUF file in the folder ``source``, or in the hub's snapshot of it."""
    name = str(config.gguf_file)
    folder = source_folder(config, [name])
    if not (folder / name).is_file():
        present = sorted(file.name for file in folder.glob("*.gguf"))
        raise bad_value("model.gguf_file", name, present, why=f"no such file in {folder}")
    return folder / name


def is_adapter_folder(source: str) -> bool:
    """Whether ``source`` is a folder with a PEFT adapter alone, as PEFT and TRL save it after fine-tuning."""
    folder = Path(source)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def base_of_adapter(config: ModelConfig) -> ModelConfig:
    """``config`` with the model that the adapter folder ``config.source`` was trained on as its source.

    Raises :class:`UserError` for an adapter that names none, or that is not LoRA: others cannot be merged into weights.
    """
    folder = Path(config.source)
    settings = read_json(folder / ADAPTER_CONFIG, "PEFT adapter")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise bad_value("model.source", config.source, "a LoRA adapter", f"{ADAPTER_CONFIG} has peft_type {kind!r}")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise bad_value("model.source", config.source, "an adapter that names its base", f"{ADAPTER_CONFIG} has none")
    if not Path(base).is_dir() and (folder / base).is_dir():
        base = str(folder / base)
    return replace(config, source=base, revision=settings.get("revision"))


def whole_model(config: ModelConfig) -> ModelConfig:
    """``config`` itself, or for an adapter folder with the folder of base and adapter, merged, as its source.

    The merged model is an ordinary model from here on: it is trained whole or under a new adapter, sharded, served by
    vLLM; and the frozen reference is a copy of it, so that the reference is the adapter's start and not the base. It is
    written once, to the cache. Raises :class:`UserError` where base and adapter do not fit.
    """
    if config.source == "pocket" or not is_adapter_folder(config.source):
        return config
    check_undamaged(config)
    base = whole_model(base_of_adapter(config))
    check_source(base)
    key = _merged_key(config, base)
    folder = cached_folder("merged", key, lambda draft: _write_merged(config, base, draft))
    return replace(config, source=str(folder), revision=None)


def _merged_key(config: ModelConfig, base: ModelConfig) -> str:
    """A hash of what the merged weights depend on."""
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
    """Write base and adapter as one model to ``folder``.

    Merged in float32: in 16 bits the sum would be rounded twice.
    """
    from peft import PeftModel

    model = load_base(replace(base, dtype="float32", lora=None, options={}))
    try:
        adapted = PeftModel.from_pretrained(model, config.source)
        merged = adapted.merge_and_unload(safe_merge=True)
    except Exception as error:  # PEFT and torch raise what they trip over
        why = f"the adapter does not fit its base {base.source!r}: {first_line(error)}"
        raise UserError(f"model.source: {config.source!r}: {why}") from error
    merged.to(DTYPES[config.dtype]).save_pretrained(folder)
    from_adapter = any(Path(config.source).glob("tokenizer*"))
    tokenizer = replace(config if from_adapter else base, tokenizer=None)
    _pretrained_tokenizer(tokenizer).save_pretrained(folder)


def source_folder(config: ModelConfig, patterns: list[str]) -> Path:
    """The local folder ``source``, or the hub's snapshot of it with the files that match ``patterns``."""
    if Path(config.source).is_dir():
        return Path(config.source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds of errors
        raise _unavailable("model.source", config.source, error) from error


def load_gguf_model(path: Path, *, dtype: torch.dtype, **options: Any) -> Any:
    """The weights of a GGUF file, dequantized, as an ordinary trainable model."""
    from transformers import AutoModelForCausalLM, GgufConfig

    read_gguf_metadata(path)
    # Loaded plainly the model would keep a quantizer, and could then neither train nor be saved.
    options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model = from_pretrained(AutoModelForCausalLM, str(path.parent), "model.gguf_file", dtype=dtype, **options)
    check_tied(model)
    return model


def check_tied(model: Any) -> None:
    """Raise :class:`UserError` for a model with tied embeddings whose head was left with fresh random numbers."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight.data_ptr() != embedding.weight.data_ptr():
        raise UserError("model.gguf_file: the embeddings should be tied, and the loaded head is not the embedding")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The numbers and texts in the header of a GGUF file; lists, as those of tokens, are left out.

    Raises :class:`UserError` for a file that is none, and for sizes with which building the model would not end.
    """
    import gguf

    metadata: dict[str, Any] = {}
    try:
        for name, field in gguf.GGUFReader(path).fields.items():
            if field.types[:1] != [gguf.GGUFValueType.ARRAY]:
                metadata[name] = field.contents()
    except Exception as error:  # the reader raises whatever its parsing trips over
        raise UserError(f"model.gguf_file: {path.name} is not a readable GGUF file: {first_line(error)}") from error
    architecture = metadata.get("general.architecture")
    sizes = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.") and not name.endswith("context_length")
    }
    for name, value in sizes.items():
        if name.endswith("_length") and type(value) is int and value > MAX_SIZE:
            raise bad_value(f"model.gguf_file: {path.name} has {name}", value, f"at most {MAX_SIZE}")
    _check_numbers(sizes, f"model.gguf_file: {path.name} has {{}}")
    return metadata


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file with the pre-tokenizer and the context length of its metadata."""
    from transformers import AutoTokenizer

    metadata = read_gguf_metadata(path)
    kind = metadata.get("tokenizer.ggml.model")
    pre = str(metadata.get("tokenizer.ggml.pre") or "")
    context_length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    tokenizer = from_pretrained(AutoTokenizer, str(path.parent), "model.gguf_file", gguf_file=path.name)
    if kind == "gpt2":
        repair_pre_tokenizer(tokenizer, pre)
    if isinstance(context_length, int) and context_length:
        tokenizer.model_max_length = context_length
    return tokenizer


def repair_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """Set the pre-tokenizer for ``tokenizer.ggml.pre == kind``; warn where it is not known.

    The conversion in transformers sets a bare byte-level one. The ``smollm`` kind splits every digit first; without
    that, spaces before a digit become other tokens.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if kind == "smollm":
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    elif kind not in ("default", "gpt-2", "gpt2", ""):  # these are byte-level already
        warnings.warn(
            f"the GGUF file asks for the pre-tokenizer {kind!r}, which its conversion may not reproduce; "
            "name the original tokenizer in model.tokenizer",
            stacklevel=2,
        )


@torch.no_grad()
def check_log_probs(model: Any, *, share_prompt: bool = True) -> None:
    """Raise :class:`UserError` where our log-probs of a few tokens differ from those of the model's own logits.

    Tolerance: 1e-4 of the largest logit in float32, one unit in the last place or two in narrower types. The kernel
    ``varlen`` takes 16 bits, so both sides are then computed as training computes them, under autocast.
    """
    if uses_varlen(model) and not torch.is_autocast_enabled(model.device.type):
        with torch.autocast(model.device.type, torch.bfloat16, cache_enabled=False):
            return check_log_probs(model, share_prompt=share_prompt)
    weight, _ = head_weights(model)
    vocabulary = weight.shape[0]
    narrow = weight.dtype in (torch.bfloat16, torch.float16) or head_dtype(model) is not None
    narrow = narrow or layers_in_bf16(model) or uses_varlen(model)
    ids = (torch.arange(24, device=weight.device) * 7919 % vocabulary).view(2, 12)
    ones = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=ones, use_cache=False).logits.to(torch.float64)
    rows = {"prompt_ids_BP": ids[:, :4], "prompt_mask_BP": ones[:, :4], "ids_BT": ids[:, 4:], "mask_BT": ones[:, 4:]}
    logp_BT = token_pass(model, PassOptions(temperature=1.0, chunk_elements=5 * vocabulary), **rows).logp_BT
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


def _check_shared_prompt(model: Any, ids_BS: Tensor, ones_BS: Tensor, *, tolerance: float) -> None:
    """Compare hidden states of completions that share a prompt's computation with those of separate rows."""
    batch = (ids_BS[:1, :4].expand(2, -1), ones_BS[:, :4], ids_BS[:, 4:], ones_BS[:, 4:].bool())

    def run() -> tuple[Tensor, Tensor]:
        return completion_hidden(model, *batch, share_prompt=False), packed_hidden(model, pack_batch(*batch))

    separate_NH, shared_NH = (hidden_NH.double() for hidden_NH in run_inside_fsdp_forward(model, run))
    gap, size = float((separate_NH - shared_NH).abs().max()), float(separate_NH.abs().max())
    if not gap <= tolerance * max(1.0, size):
        raise UserError(
            f"model.share_prompt: completions that share a prompt get other hidden states than alone (off by {gap:.3g} "
            f"of {size:.3g}); set model.share_prompt=false for this architecture"
        )
