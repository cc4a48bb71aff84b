"""The pocket policy: a small Llama over characters that this project builds, warm-starts and caches itself.

No hub and no GPU: the first load trains it for about a minute, later loads read the cache. The cached
folder is an ordinary Hugging Face folder, so ``model.source=<that folder>`` works as well.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.errors import bad_value
from kl_comedy.models.pocket_cache import cached_folder
from kl_comedy.models.pocket_recipe import PocketRecipe, build_model, build_tokenizer, recipe_from_options

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from kl_comedy.config.schema import ModelConfig

WEIGHTS = "model.safetensors"


def load_pocket(config: ModelConfig) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The warm-started policy (float32, CPU, eval mode) and its tokenizer, built on first use and then cached.

    ``config.options`` overrides fields of :class:`PocketRecipe`, or names a ``preset``: base or tiny.
    Raises UserError for an unknown option, a value out of range, a setting that fits other sources only, or
    a cache that cannot be written.
    """
    tokenizer = load_pocket_tokenizer(config)
    recipe = recipe_from_options(config.options)
    return read_policy(recipe, pocket_folder(recipe), attention=config.attention), tokenizer


def load_pocket_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The pocket policy's tokenizer. Raises UserError for a setting that fits other sources only."""
    for name in ("revision", "tokenizer", "gguf_file"):
        if getattr(config, name) is not None:
            raise bad_value(f"model.{name}", getattr(config, name), "null with model.source: pocket")
    return build_tokenizer()


def pocket_folder(recipe: PocketRecipe) -> Path:
    """The cached Hugging Face folder of this recipe's policy; trains it where it is not there yet."""
    return cached_folder("pocket", recipe_key(recipe), lambda folder: write_policy(recipe, folder))


def recipe_key(recipe: PocketRecipe) -> str:
    """Hash of the recipe and of the code that carries it out: an edit of either builds a new policy."""
    from kl_comedy.models.pocket_warmstart import SOURCES

    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def write_policy(recipe: PocketRecipe, folder: Path) -> None:
    """Train the recipe's policy and save it, its tokenizer and the recipe to ``folder``.

    The files are those of ``save_pretrained``, written one by one because that shows a progress bar of its own.
    """
    from safetensors.torch import save_file

    from kl_comedy.models.pocket_warmstart import ProgressLine, warm_start

    with ProgressLine("pocket policy: warm start") as progress:
        model = warm_start(recipe, report=progress)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def read_policy(recipe: PocketRecipe, folder: Path, *, attention: str) -> LlamaForCausalLM:
    """Read what :func:`write_policy` wrote. Every weight must be there under its name."""
    from safetensors.torch import load_file

    model = build_model(recipe, attention=attention)
    model.load_state_dict(load_file(folder / WEIGHTS), strict=True)
    return model.eval()
