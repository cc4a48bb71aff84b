"""Where the files of a model come from: local folders, folders of a PEFT adapter, and the Hugging Face hub.

All checks run before anything is loaded, so that a mistake is reported within seconds.
"""

from __future__ import annotations

import functools
import json
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.io import CHECKSUMS, find_damage, read_json

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

MAX_LAYERS = 1000
MAX_SIZE = 2**20
"""Layers, and entries of a dimension, in a model's own config: several times those of the largest models. transformers
builds what the config says before it looks at the weights, so that larger numbers would fill the memory."""
SIZE_ENDINGS = ("_size", "_heads", "_dim", "n_embd", "n_head", "n_inner", "d_model", "_count")
"""How the names of sizes end, in the configs of transformers and the headers of GGUF files."""
HUB_SECONDS = 2.0
SMOLLM2_FOLDER = Path("models/SmolLM2-135M-Instruct")
"""Where research/scripts/fetch_smollm2.py (``make smollm2``) puts the converted model."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files of which the tokenizer of a model has one at least."""
KEYS_OF_MODEL = ("gguf_file", "revision", "trust_remote_code")
"""Arguments of transformers that are keys of ``model``, beside ``model.options``."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file by which PEFT recognises the folder of an adapter."""


def check_source(config: ModelConfig) -> None:
    """Raise :class:`UserError` within seconds where the source or the tokenizer cannot be had on this machine."""
    if config.source != "pocket":
        check_available("model.source", config.source, config.revision)
    if config.tokenizer not in (None, "pocket"):
        check_available("model.tokenizer", config.tokenizer)
    if is_adapter_folder(config.source):
        check_source(base_of_adapter(config))
    elif config.source != "pocket":
        check_files(config)
        check_model_config(config)


def check_files(config: ModelConfig) -> None:
    """Raise :class:`UserError` for a folder without a model's config, or without a tokenizer where it has to have one.

    transformers would report the missing config of a model as that of its tokenizer.
    """
    folder = Path(config.source)
    # A GGUF file holds both.
    if not folder.is_dir() or config.gguf_file is not None:
        return
    if not (folder / "config.json").is_file():
        raise bad_value("model.source", config.source, "the folder of a model", "it holds no config.json")
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    if config.tokenizer is None and not has_tokenizer:
        why = f"it holds none of {', '.join(TOKENIZER_FILES)}; model.tokenizer names another folder or hub id"
        raise bad_value("model.source", config.source, "a folder with a tokenizer", why)


def check_undamaged(config: ModelConfig) -> None:
    """Raise :class:`UserError` where files of an exported policy are not as they were written."""
    folder = Path(config.source)
    # Only folders that this package wrote have checksums.
    if not (folder / CHECKSUMS).is_file():
        return
    damage = find_damage(folder)
    if damage:
        remedy = f"export it again (kl-comedy export RUN_DIR), or remove {CHECKSUMS} where the change is yours"
        raise UserError(f"model.source: {folder} is damaged ({damage}); {remedy}")


def check_model_config(config: ModelConfig) -> None:
    """Raise :class:`UserError` for numbers in a model's files with which building it would not end.

    Token ids that are not numbers are refused as well: they would fail only when the first completion ends.
    """
    for file in ("config.json", "generation_config.json"):
        check_numbers(_model_json(config, file), f"model.source: {config.source!r} has in {file} {{}}")


def check_numbers(content: Mapping[str, Any], place: str) -> None:
    """Raise :class:`UserError` for sizes and token ids in ``content`` that no model has.

    ``place`` is the start of the message, with ``{}`` for the name of the entry.
    """
    for name, value in content.items():
        entry = place.format(name)
        if isinstance(value, Mapping):
            check_numbers(value, f"{entry}.{{}}")
        elif name.endswith("_token_id"):
            _check_token_ids(entry, value)
        elif type(value) is int:  # not isinstance: True is an int
            _check_size(name, entry, value)


def _check_token_ids(entry: str, value: object) -> None:
    ids = [value]
    if isinstance(value, list):
        ids = value
    for token_id in ids:
        if token_id is not None and type(token_id) is not int:
            raise bad_value(entry, value, "a whole number, a list of them, or null")


def _check_size(name: str, entry: str, value: int) -> None:
    counts_layers = "layers" in name or name in ("n_layer", "block_count")
    if counts_layers and not 0 <= value <= MAX_LAYERS:
        raise bad_value(entry, value, f"at most {MAX_LAYERS} layers")
    if name.endswith(SIZE_ENDINGS) and value > MAX_SIZE:
        raise bad_value(entry, value, f"at most {MAX_SIZE}")


def _model_json(config: ModelConfig, name: str) -> dict[str, Any]:
    """A JSON file of the model, local or from the hub; {} where it is missing or will be refused by transformers."""
    from transformers.utils.hub import cached_file

    # Asked first, or a machine without network would wait for the client's retries.
    hub_may_be_asked = check_available("model.source", config.source, config.revision)
    try:
        path = cached_file(config.source, name, revision=config.revision, local_files_only=not hub_may_be_asked)
        content = json.loads(Path(str(path)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content


def is_adapter_folder(source: str) -> bool:
    """Whether ``source`` is a folder with a PEFT adapter alone, as PEFT and TRL save it after fine-tuning."""
    folder = Path(source)
    has_adapter = (folder / ADAPTER_CONFIG).is_file()
    has_whole_model = (folder / "config.json").is_file()
    return has_adapter and not has_whole_model


def base_of_adapter(config: ModelConfig) -> ModelConfig:
    """``config`` with the model that the adapter folder ``config.source`` was trained on as its source.

    Raises :class:`UserError` for an adapter that names no base, or that is not LoRA: others cannot be merged into
    weights.
    """
    folder = Path(config.source)
    settings = read_json(folder / ADAPTER_CONFIG, "PEFT adapter")
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise bad_value("model.source", config.source, "a LoRA adapter", f"{ADAPTER_CONFIG} has peft_type {kind!r}")
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise bad_value("model.source", config.source, "an adapter that names its base", f"{ADAPTER_CONFIG} has none")
    # A relative path may be meant from the adapter's folder, where the two were copied together.
    if not Path(base).is_dir() and (folder / base).is_dir():
        base = str(folder / base)
    return replace(config, source=base, revision=settings.get("revision"))


def check_available(key: str, name: str, revision: str | None = None) -> bool:
    """Whether the hub may be asked for ``name``: it is a folder, or the hub answers. False: it is in the hub's cache.

    Raises :class:`UserError` where it is in none of them; the hub's client would repeat its requests for half a minute.
    """
    if Path(name).is_dir():
        return True
    # The hub would answer a path with an error about the form of its names.
    looks_like_path = name.startswith(("/", ".", "~"))
    if looks_like_path:
        raise unavailable(key, name, FileNotFoundError("no such folder"))
    if hub_answers():
        return True
    from huggingface_hub import constants

    snapshots = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    # Some files are enough: which of them are missing is reported when they are loaded.
    if any(snapshots.glob("*/*")):
        return False
    why = f"no such folder, not in the hub's cache ({constants.HF_HUB_CACHE}), and {hub_address()} does not answer"
    raise unavailable(key, name, ConnectionError(why))


def hub_address() -> str:
    """The address of the Hugging Face hub, or of its mirror."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@functools.cache
def hub_answers() -> bool:
    """Whether the hub answers within two seconds; asked once per process. With ``HF_HUB_OFFLINE`` it is not asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    reached = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(hub_address(), method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=HUB_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # an error is an answer
        except urllib.error.URLError as error:
            # A certificate that is not known here came from a server, and the hub's client may know it.
            if not isinstance(error.reason, ssl.SSLError):
                return
        except OSError:
            return
        reached.set()

    # In a thread, because a name resolver takes longer than any timeout of urlopen.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return reached.is_set()


def from_pretrained(auto: Any, name: str, key: str, **options: Any) -> Any:
    """``auto.from_pretrained``, with a one-line :class:`UserError` for the mistakes a user can make."""
    if not check_available(key, name, options.get("revision")):
        options["local_files_only"] = True
    try:
        return auto.from_pretrained(name, **options)
    except (OSError, ImportError) as error:
        raise unavailable(key, name, error) from error
    except TypeError as error:  # an option that the architecture's constructor does not know
        raise UserError(f"model.options: {name!r} does not take them: {first_line(error)}") from error
    except UserError:
        raise
    except Exception as error:  # damaged files: the parsers, in Python and Rust, raise errors of many types
        raise UserError(f"{key}: {name!r} cannot be loaded: {first_line(error)}") from error


def loading_arguments(config: ModelConfig) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for the model's config and weights. Raises :class:`UserError`."""
    for name in config.options:
        if name in KEYS_OF_MODEL:
            raise UserError(f"model.options.{name}: not allowed here; it is a key beside options")
    arguments = dict(config.options)
    if config.revision is not None:
        arguments["revision"] = config.revision
    if config.trust_remote_code:
        arguments["trust_remote_code"] = True
    return arguments


def source_folder(config: ModelConfig, patterns: list[str]) -> Path:
    """The local folder ``source``, or the hub's snapshot of it with the files that match ``patterns``."""
    if Path(config.source).is_dir():
        return Path(config.source)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(config.source, revision=config.revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of many types
        raise unavailable("model.source", config.source, error) from error


def unavailable(key: str, name: str, error: Exception) -> UserError:
    """The error for a missing source; it suggests a folder of this name in models/, or a sibling of a similar name."""
    path = Path(name)
    why = f"it could not be loaded: {first_line(error)}"
    # A config may name a model without the folder that the project keeps it in.
    in_models = Path("models") / path.name
    if in_models.is_dir() and in_models != path:
        why += f"; did you mean {str(in_models)!r}?"
    else:
        siblings = sorted(sibling.name for sibling in path.parent.glob("*/") if sibling != path)
        similar = nearest(path.name, siblings)
        if similar:
            why += f"; did you mean {str(path.parent / similar)!r}?"
    if path.name == SMOLLM2_FOLDER.name and not path.is_dir():
        why += "; `make smollm2` makes this folder"
    return bad_value(key, name, "pocket, an existing folder, or a hub id", why=why)


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 300 characters, or its type where it has no message.

    Where that line only announces the next ones, with a colon, they follow it.
    """
    first, *others = str(error).strip().split("\n")
    if first.endswith(":"):
        first = " ".join([first, *(line.strip() for line in others)])
    return first[:300] or type(error).__name__
