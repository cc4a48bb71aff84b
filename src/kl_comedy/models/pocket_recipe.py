"""What a pocket policy is made from: its recipe, its architecture and its character tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.errors import bad_value

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ALPHABET = "0123456789+-=;"
PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *ALPHABET)
"""Token ids are positions in this tuple. Padding and end differ, so that either can be told by its id."""

MAX_LENGTH = 128
"""Positions: the longest problem (five terms of four digits) and its steps take 94 characters and the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketRecipe:
    """Everything the warm-started weights depend on; ``model.options`` overrides single fields.

    The teacher of the warm start is careless: ``slip`` is the share of carries (and borrows) it drops. The
    policy learns the written format and both ways to go on, so sampling finds the right answer now and then,
    greedy decoding rarely, and RL has a signal from its first update. ``mixture`` is the share of
    demonstrations from the out-of-domain splits, which RL on ``terms`` x ``digits`` never sees again.
    Learning rates are AdamW's; ``clip_norm`` bounds the gradient's L2 norm.
    """

    seed: int = 0
    hidden_size: int = 192
    layers: int = 2
    heads: int = 6
    intermediate_size: int = 512
    terms: int = 3
    digits: int = 2
    slip: float = 0.7
    mixture: float = 0.3
    warmstart_steps: int = 500
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0


PRESETS: Mapping[str, PocketRecipe] = {
    "base": PocketRecipe(),
    "tiny": PocketRecipe(
        hidden_size=64,
        layers=1,
        heads=4,
        intermediate_size=160,
        digits=1,
        slip=0.6,
        mixture=0.0,
        warmstart_steps=300,
        lr=5e-3,
    ),
}
"""``base`` has 0.9M parameters. ``tiny`` (49k, sums of three one-digit numbers) is for tests of training loops."""

_RANGES: Mapping[str, tuple[float, float]] = {
    "seed": (0, 2**31 - 1),
    "hidden_size": (8, 4096),
    "layers": (1, 64),
    "heads": (1, 64),
    "intermediate_size": (8, 16384),
    "terms": (2, 5),
    "digits": (1, 4),
    "slip": (0.0, 1.0),
    "mixture": (0.0, 1.0),
    "warmstart_steps": (0, 1_000_000),
    "batch_size": (1, 65536),
    "lr": (1e-8, 1.0),
    "weight_decay": (0.0, 10.0),
    "clip_norm": (1e-6, 1e6),
}


def recipe_from_options(options: Mapping[str, Any], *, key: str = "model.options") -> PocketRecipe:
    """The preset named by ``options["preset"]`` (default base) with the other options put over it.

    Raises UserError for an unknown option or preset, a value of the wrong type or out of range, and heads
    that do not divide the hidden size into even parts.
    """
    preset = options.get("preset", "base")
    if preset not in PRESETS:
        raise bad_value(f"{key}.preset", preset, PRESETS)
    values = asdict(PRESETS[preset])
    kinds = {field.name: str(field.type) for field in fields(PocketRecipe)}
    for name, value in options.items():
        if name == "preset":
            continue
        if name not in kinds:
            raise bad_value(key, name, ["preset", *kinds])
        values[name] = _checked(f"{key}.{name}", value, kinds[name], *_RANGES[name])
    if values["hidden_size"] % (2 * values["heads"]):
        raise bad_value(
            f"{key}.heads",
            values["heads"],
            f"divisors of half the hidden size ({values['hidden_size'] // 2})",
            why="rotary positions turn pairs of a head's dimensions",
        )
    return PocketRecipe(**values)


def _checked(key: str, value: Any, kind: str, low: float, high: float) -> int | float:
    """``value`` as the field's kind, within its range. A whole number fits where a float is wanted."""
    fits = (int,) if kind == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, fits) or not low <= value <= high:
        noun = "a whole number" if kind == "int" else "a number"
        raise bad_value(key, value, f"{noun} from {low:g} to {high:g}")
    return int(value) if kind == "int" else float(value)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of :data:`ALPHABET`, no beginning token; decoding gives the same text back.

    A character outside the alphabet raises: there is no unknown token to hide it behind.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    table = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    table.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    table.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=table,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: PocketRecipe, *, attention: str = "sdpa") -> LlamaForCausalLM:
    """A freshly initialized policy in float32 on the CPU; the global RNG is left as it was.

    Embeddings are untied: with sixteen tokens a second table costs nothing, and reading a digit and
    predicting one are different jobs.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=VOCABULARY.index(EOS),
        attn_implementation=attention,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)
