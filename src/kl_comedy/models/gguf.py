"""Models and tokenizers in GGUF files, the format of llama.cpp, as ordinary trainable models of transformers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.errors import UserError, bad_value
from kl_comedy.models.sources import MAX_SIZE, check_numbers, first_line, from_pretrained, source_folder

if TYPE_CHECKING:
    from kl_comedy.config.schema import ModelConfig

BYTE_LEVEL = ("default", "gpt-2", "gpt2", "")
"""Kinds of pre-tokenizers for which the byte-level one that transformers sets is right."""


def gguf_path(config: ModelConfig) -> Path:
    """The GGUF file in the folder ``source``, or in the hub's snapshot of it."""
    name = str(config.gguf_file)
    folder = source_folder(config, [name])
    if not (folder / name).is_file():
        present = sorted(file.name for file in folder.glob("*.gguf"))
        raise bad_value("model.gguf_file", name, present, why=f"no such file in {folder}")
    return folder / name


def load_gguf_model(path: Path, *, dtype: torch.dtype, **options: Any) -> Any:
    """The weights of a GGUF file, dequantized, as an ordinary trainable model.

    Raises :class:`UserError` for a file that cannot be read or whose tied head was not loaded.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    read_gguf_metadata(path)
    # Without dequantize=True the model would keep a quantizer, and could then neither train nor be saved.
    options |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    model = from_pretrained(AutoModelForCausalLM, str(path.parent), "model.gguf_file", dtype=dtype, **options)
    check_tied(model)
    return model


def check_tied(model: Any) -> None:
    """Raise :class:`UserError` for a model with tied embeddings whose head was left with fresh random numbers."""
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    # By address: an untied copy of equal values would train apart from its embedding.
    if model.config.tie_word_embeddings and head.weight.data_ptr() != embedding.weight.data_ptr():
        raise UserError("model.gguf_file: the embeddings should be tied, and the loaded head is not the embedding")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The numbers and texts in the header of a GGUF file; lists, such as the tokens, are left out.

    Raises :class:`UserError` for another kind of file, and for sizes with which building the model would not end.
    """
    import gguf

    metadata: dict[str, Any] = {}
    try:
        # Lists are left out: the tokens alone are most of a header's size.
        for name, field in gguf.GGUFReader(path).fields.items():
            if field.types[:1] != [gguf.GGUFValueType.ARRAY]:
                metadata[name] = field.contents()
    except Exception as error:  # the reader does not check what it reads, and raises errors of many types
        raise UserError(f"model.gguf_file: {path.name} is not a readable GGUF file: {first_line(error)}") from error
    _check_sizes(metadata, path.name)
    return metadata


def _check_sizes(metadata: dict[str, Any], file: str) -> None:
    """Raise :class:`UserError` for sizes of the architecture, such as ``llama.embedding_length``, that no model has."""
    prefix = f"{metadata.get('general.architecture')}."
    sizes = {}
    for name, value in metadata.items():
        # Nothing is built in the size of the context length.
        if name.startswith(prefix) and not name.endswith("context_length"):
            sizes[name.removeprefix(prefix)] = value
    for name, value in sizes.items():
        if name.endswith("_length") and type(value) is int and value > MAX_SIZE:
            raise bad_value(f"model.gguf_file: {file} has {name}", value, f"at most {MAX_SIZE}")
    check_numbers(sizes, f"model.gguf_file: {file} has {{}}")


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file with the pre-tokenizer and the context length of its metadata."""
    from transformers import AutoTokenizer

    metadata = read_gguf_metadata(path)
    tokenizer = from_pretrained(AutoTokenizer, str(path.parent), "model.gguf_file", gguf_file=path.name)
    # Byte-level BPE. Other kinds, such as SentencePiece, have no pre-tokenizer to repair.
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        repair_pre_tokenizer(tokenizer, str(metadata.get("tokenizer.ggml.pre") or ""))
    context_length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(context_length, int) and context_length:
        tokenizer.model_max_length = context_length
    return tokenizer


def repair_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """Set the pre-tokenizer for ``tokenizer.ggml.pre == kind``; warn where the kind is not known.

    The conversion in transformers always sets a byte-level one. The ``smollm`` kind splits every digit first; without
    that, spaces before a digit become other tokens.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if kind == "smollm":
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    elif kind not in BYTE_LEVEL:
        warnings.warn(
            f"the GGUF file asks for the pre-tokenizer {kind!r}, which its conversion may not reproduce; "
            "name the original tokenizer in model.tokenizer",
            stacklevel=2,
        )
