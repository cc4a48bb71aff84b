"""GGUF files: dense weights, tied embeddings and the tokenizer the file really means.

Three traps, each handled here and nowhere else:

- Loaded plainly, transformers keeps a quantizer on the model, which can then neither train nor be saved;
  ``GgufConfig(dequantize=True)`` yields an ordinary dense model.
- A tied checkpoint has no ``lm_head``; the head must be the embedding, not fresh random numbers.
- The converted tokenizer ends in a bare byte-level pre-tokenizer, whatever ``tokenizer.ggml.pre`` says. The
  ``smollm`` kind splits every digit first, so that spaces before a digit would come out as other tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    import torch

PLAIN_BYTE_LEVEL = ("default", "gpt-2", "gpt2", "")
"""Values of ``tokenizer.ggml.pre`` for which the converted byte-level pre-tokenizer is already right."""

DIGITS_FIRST = ("smollm",)
"""Values of ``tokenizer.ggml.pre`` that split individual digits before the byte-level step."""


def find_gguf(folder: Path, name: str, *, key: str = "model.gguf_file") -> Path:
    """The file ``folder / name``. Raises :class:`UserError` naming the GGUF files that are there."""
    path = folder / name
    if path.is_file():
        return path
    present = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    raise bad_value(key, name, present, why=f"no such file in {folder}")


def read_fields(path: Path, *names: str) -> dict[str, Any]:
    """The metadata ``names`` of a GGUF file; names it lacks are left out. Raises :class:`UserError` if unreadable."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever its parsing trips over
        raise UserError(f"model.gguf_file: {path.name} is not a readable GGUF file: {error}") from error
    return {name: field.contents() for name in names if (field := reader.fields.get(name)) is not None}


def load_gguf_tokenizer(folder: Path, name: str) -> Any:
    """The file's tokenizer with the pre-tokenizer its metadata asks for and the true context length."""
    from transformers import AutoTokenizer

    path = find_gguf(folder, name)
    found = read_fields(path, "general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.model")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=name)
    if found.get("tokenizer.ggml.model") == "gpt2":
        repair_pre_tokenizer(tokenizer, str(found.get("tokenizer.ggml.pre", "")))
    length_key = f"{found.get('general.architecture')}.context_length"
    length = read_fields(path, length_key).get(length_key)
    if length:
        tokenizer.model_max_length = int(length)
    return tokenizer


def repair_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """Set the pre-tokenizer that ``tokenizer.ggml.pre == kind`` stands for; warn when we do not know it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if kind in DIGITS_FIRST:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)
    elif kind not in PLAIN_BYTE_LEVEL:
        warnings.warn(
            f"the GGUF file asks for the pre-tokenizer {kind!r}, which its conversion may not reproduce; "
            "name the original tokenizer in model.tokenizer",
            stacklevel=2,
        )


def load_gguf_model(folder: Path, name: str, *, dtype: torch.dtype, **options: Any) -> Any:
    """The file's weights, dequantized, as an ordinary trainable model whose tied head is the embedding."""
    from transformers import AutoModelForCausalLM, GgufConfig

    find_gguf(folder, name)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=name, dtype=dtype, quantization_config=GgufConfig(dequantize=True), **options
    )
    check_tied(model)
    return model


def check_tied(model: Any) -> None:
    """Raise :class:`UserError` when the config says tied embeddings and the head holds other storage."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        raise UserError("model.gguf_file: the embeddings should be tied, and the loaded head is not the embedding")
