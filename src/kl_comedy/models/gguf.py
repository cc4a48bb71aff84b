"""GGUF files: dense weights, tied embeddings and the tokenizer that the file's metadata describes.

Three pitfalls of the conversion in transformers are handled here:

- Loaded plainly, the model keeps a quantizer and can then neither train nor be saved;
  ``GgufConfig(dequantize=True)`` gives an ordinary dense model.
- A tied checkpoint has no ``lm_head``; the head must be the embedding, not fresh random numbers.
- The converted tokenizer has a bare byte-level pre-tokenizer, whatever ``tokenizer.ggml.pre`` says. The
  ``smollm`` kind splits every digit first; without that, spaces before a digit become other tokens.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value

if TYPE_CHECKING:
    import torch

SMOLLM2_FOLDER = Path("models/SmolLM2-135M-Instruct")
"""Where scripts/fetch_smollm2.py (``make smollm2``) puts the converted model."""


def _gguf_file(folder: Path, name: str) -> Path:
    """The file ``folder / name``. Raises :class:`UserError` naming the GGUF files that are there."""
    path = folder / name
    if not path.is_file():
        present = sorted(file.name for file in folder.glob("*.gguf"))
        raise bad_value("model.gguf_file", name, present, why=f"no such file in {folder}")
    return path


def load_gguf_tokenizer(folder: Path, name: str) -> Any:
    """The file's tokenizer with the pre-tokenizer and the context length of its metadata.

    Raises :class:`UserError` for a missing or unreadable file.
    """
    import gguf
    from transformers import AutoTokenizer

    path = _gguf_file(folder, name)
    try:
        fields = gguf.GGUFReader(path).fields
    except Exception as error:  # the reader raises whatever its parsing trips over
        raise UserError(f"model.gguf_file: {path.name} is not a readable GGUF file: {error}") from error

    def metadata(key: str) -> Any:
        return fields[key].contents() if key in fields else None

    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=name)
    if metadata("tokenizer.ggml.model") == "gpt2":
        repair_pre_tokenizer(tokenizer, str(metadata("tokenizer.ggml.pre") or ""))
    context_length = metadata(f"{metadata('general.architecture')}.context_length")
    if context_length:
        tokenizer.model_max_length = int(context_length)
    return tokenizer


def repair_pre_tokenizer(tokenizer: Any, kind: str) -> None:
    """Set the pre-tokenizer for ``tokenizer.ggml.pre == kind``; warn where it is not known."""
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


def load_gguf_model(folder: Path, name: str, *, dtype: torch.dtype, **options: Any) -> Any:
    """The file's weights, dequantized, as an ordinary trainable model. Raises :class:`UserError` for a missing file."""
    from transformers import AutoModelForCausalLM, GgufConfig

    _gguf_file(folder, name)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=name, dtype=dtype, quantization_config=GgufConfig(dequantize=True), **options
    )
    check_tied(model)
    return model


def check_tied(model: Any) -> None:
    """Raise :class:`UserError` when the config says tied embeddings and the head has weights of its own."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False)
    if tied and head.weight.data_ptr() != embedding.weight.data_ptr():
        raise UserError("model.gguf_file: the embeddings should be tied, and the loaded head is not the embedding")
