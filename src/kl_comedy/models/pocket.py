"""The pocket policy: a small Llama over characters that is built, warm-started and cached on this machine.

    recipe -> random Llama -> next-character training on a careless teacher's demonstrations -> cache folder

No hub and no GPU: the first load trains it for about a minute, later loads read the cache. The cached
folder is an ordinary Hugging Face folder, so ``model.source=<that folder>`` works as well.

Shape legend: ``B`` sequences, ``L`` characters of prompt and completion, right-padded; ``V`` vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kl_comedy.config.validate import option, parse_record
from kl_comedy.data import pocket as problems
from kl_comedy.data.pocket import SPLITS, Family, draw, steps, write_steps
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import file_lock, sha256_file

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from kl_comedy.config.schema import ModelConfig

ALPHABET = "0123456789+-=;"
PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *ALPHABET)
"""Token ids are positions in this tuple."""

MAX_LENGTH = 128
"""Positions: the longest problem (five terms of four digits) and its steps take 94 characters and the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketRecipe:
    """Everything the warm-started weights depend on; ``model.options`` overrides single fields.

    ``slip`` is the share of carries (and borrows) that the teacher drops: the policy learns the written format, and
    right as well as wrong continuations, so sampling finds the right answer now and then, greedy decoding rarely,
    and RL has a signal from its first update. ``mixture`` is the share of demonstrations from the out-of-domain
    splits, which RL on ``terms`` x ``digits`` never sees again. Learning rates are AdamW's; ``clip_norm`` bounds the
    gradient's L2 norm.
    """

    seed: int = option(0, minimum=0, maximum=2**31 - 1)
    hidden_size: int = option(192, minimum=8, maximum=4096)
    layers: int = option(2, minimum=1, maximum=64)
    heads: int = option(6, minimum=1, maximum=64)
    intermediate_size: int = option(512, minimum=8, maximum=16384)
    terms: int = option(3, minimum=2, maximum=5)
    digits: int = option(2, minimum=1, maximum=4)
    slip: float = option(0.7, minimum=0, maximum=1)
    mixture: float = option(0.3, minimum=0, maximum=1)
    warmstart_steps: int = option(500, minimum=0, maximum=1_000_000)
    batch_size: int = option(64, minimum=1, maximum=65536)
    lr: float = option(2e-3, minimum=1e-8, maximum=1)
    weight_decay: float = option(0.1, minimum=0, maximum=10)
    clip_norm: float = option(1.0, minimum=1e-6, maximum=1e6)


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


def recipe_from_options(options: Mapping[str, Any]) -> PocketRecipe:
    """The preset named by ``options["preset"]`` (default base), overridden by the other options.

    Raises :class:`UserError` for an unknown option or preset, a value of the wrong type or out of range, and heads
    that do not divide the hidden size into even parts.
    """
    preset = options.get("preset", "base")
    if preset not in PRESETS:
        raise bad_value("model.options.preset", preset, PRESETS)
    overrides = {name: value for name, value in options.items() if name != "preset"}
    recipe = parse_record(PocketRecipe, {**asdict(PRESETS[preset]), **overrides}, key="model.options")
    if recipe.hidden_size % (2 * recipe.heads):
        raise bad_value(
            "model.options.heads",
            recipe.heads,
            f"divisors of half the hidden size ({recipe.hidden_size // 2})",
            why="rotary positions rotate pairs of a head's dimensions",
        )
    return recipe


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of :data:`ALPHABET`, no beginning token; decoding gives the same text back.

    A character outside the alphabet raises, because there is no unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: PocketRecipe, *, attention: str = "sdpa") -> LlamaForCausalLM:
    """A freshly initialized policy in float32 on the CPU, embeddings untied; the global RNG is left as it was."""
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


_TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}
_IGNORED = -100  # cross_entropy's default ignore_index
_WARMUP_STEPS = 50
_FINAL_LR_SHARE = 0.1


def careless_steps(text: str, *, slip: float, rng: random.Random) -> list[tuple[str, int]]:
    """The steps of ``text`` by a teacher who drops the carry (or borrow) out of the units with probability ``slip``.

    Each step continues from the result written before it. With ``slip`` 0 these are the right steps.
    """
    sign = "-" if "-" in text else "+"
    first, *rest = (int(term) for term in text.removesuffix("=").split(sign))
    total, chain = first, []
    for term in rest:
        carries = total % 10 + term % 10 >= 10 if sign == "+" else total % 10 < term % 10
        right = steps(f"{total}{sign}{term}=")[0][1]
        slipped = right - 10 if sign == "+" else right + 10
        result = slipped if carries and rng.random() < slip else right
        chain.append((f"{total}{sign}{term}", result))
        total = result
    return chain


def demonstrations(recipe: PocketRecipe) -> Iterator[tuple[str, str]]:
    """Problem text and written completion, without end; never a problem of the held-out half."""
    rng = random.Random(f"teacher/{recipe.seed}")
    trained = Family(terms=recipe.terms, digits=recipe.digits)
    others = [split.family for split in SPLITS.values() if split.family != trained and not split.tunable]
    operands = {
        family: draw(family, count=None, seed=recipe.seed, held_out=False)
        for family in dict.fromkeys([trained, *others])
    }
    while True:
        family = rng.choice(others) if rng.random() < recipe.mixture else trained
        text = family.text(next(operands[family]))
        yield text, write_steps(careless_steps(text, slip=recipe.slip, rng=rng))


def collate(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Pairs of text and completion as ``ids_BL`` and ``targets_BL``; only the completion and its end are targets."""
    length = max(len(text) + len(completion) + 1 for text, completion in pairs)
    ids_BL = torch.zeros(len(pairs), length, dtype=torch.long)
    targets_BL = torch.full_like(ids_BL, _IGNORED)
    for row, (text, completion) in enumerate(pairs):
        ids = torch.tensor([_TOKEN_IDS[token] for token in (*text, *completion, EOS)])
        ids_BL[row, : len(ids)] = ids
        targets_BL[row, len(text) : len(ids)] = ids[len(text) :]
    return ids_BL, targets_BL


def warm_start(recipe: PocketRecipe, *, report: Callable[[int, float], None]) -> LlamaForCausalLM:
    """Build and train the policy for exactly ``recipe.warmstart_steps`` updates, in float32 on the CPU.

    The weights depend on the recipe only, and on how torch rounds on this machine with this many threads. The global
    RNG is left as it was. ``report`` is called after every update with its number and its loss in nats per character.
    """
    model = build_model(recipe).train()
    total = recipe.warmstart_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / _WARMUP_STEPS) * (1 - (1 - _FINAL_LR_SHARE) * step / max(total, 1)),
    )
    stream = demonstrations(recipe)
    for step in range(1, total + 1):
        ids_BL, targets_BL = collate([next(stream) for _ in range(recipe.batch_size)])
        with torch.inference_mode(False), torch.enable_grad():
            logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
            loss = cross_entropy(logits_BLV[:, :-1].flatten(0, 1), targets_BL[:, 1:].flatten(), ignore_index=_IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
        schedule.step()
        report(step, loss.item())
    return model.eval()


MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"


def load_pocket(config: ModelConfig) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The warm-started policy (float32, CPU, eval mode) and its tokenizer, built on first use and then cached.

    ``config.options`` overrides fields of :class:`PocketRecipe`, or names a ``preset``: base or tiny. Raises
    :class:`UserError` for an unknown option, a value out of range, a setting that fits other sources only, or
    a cache that cannot be written.
    """
    from safetensors.torch import load_file

    tokenizer = load_pocket_tokenizer(config)
    recipe = recipe_from_options(config.options)
    weights = load_file(pocket_folder(recipe) / WEIGHTS)
    model = build_model(recipe, attention=config.attention)
    model.load_state_dict(weights, strict=True)
    return model.eval(), tokenizer


def load_pocket_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The pocket policy's tokenizer. Raises :class:`UserError` for a setting that fits other sources only."""
    for name in ("revision", "tokenizer", "gguf_file"):
        if getattr(config, name) is not None:
            raise bad_value(f"model.{name}", getattr(config, name), "null with model.source: pocket")
    return build_tokenizer()


def pocket_folder(recipe: PocketRecipe) -> Path:
    """The cached Hugging Face folder of this recipe's policy; trained on first use."""
    return cached_folder("pocket", recipe_key(recipe), lambda folder: write_policy(recipe, folder))


def recipe_key(recipe: PocketRecipe) -> str:
    """Hash of the recipe and of the code that uses it, so that a change of either builds a new policy."""
    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for source in (problems.__file__, __file__):
        digest.update(Path(str(source)).read_bytes())
    return digest.hexdigest()[:16]


def write_policy(recipe: PocketRecipe, folder: Path) -> None:
    """Train the recipe's policy and save it, its tokenizer and the recipe to ``folder``."""
    from safetensors.torch import save_file

    total, start = recipe.warmstart_steps, time.monotonic()

    def report(step: int, loss: float) -> None:
        if step % max(1, total // 5) == 0 or step == total:
            seconds = time.monotonic() - start
            _print(f"pocket policy: warm start: {step}/{total} updates, loss {loss:.3f} nats, {seconds:.0f} s")

    model = warm_start(recipe, report=report)
    # Not model.save_pretrained, because it shows a progress bar.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def cache_root() -> Path:
    """``$KL_COMEDY_CACHE``, else ``~/.cache/kl_comedy``."""
    return Path(os.environ.get("KL_COMEDY_CACHE") or "~/.cache/kl_comedy").expanduser()


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``<cache>/<kind>/<key>``, made by ``build(empty folder)`` unless an undamaged one exists.

    ``build`` runs in a folder beside it that is renamed once its manifest is written, so a reader never sees a part.
    Of several processes one builds and the others wait. A folder whose files differ from its manifest is built again.
    Raises :class:`UserError` where the cache cannot be written.
    """
    folder = cache_root() / kind / key
    if find_damage(folder) is None:
        return folder
    try:
        waiting = f"another process is building {kind} {key}; waiting for it"
        with file_lock(folder.parent / f"{key}.lock", wait_s=math.inf, on_wait=lambda: _print(waiting)):
            damage = find_damage(folder)
            if damage is not None:
                if folder.exists():
                    _print(f"{kind} policy: the cached copy {folder} is damaged ({damage}); building it again")
                _build_into(folder, build)
    except OSError as error:
        raise UserError(
            f"KL_COMEDY_CACHE: cannot write the {kind} policy to {folder}: {error}; set it to a writable folder"
        ) from error
    return folder


def find_damage(folder: Path) -> str | None:
    """What is wrong with a cached folder, or None when every file of its manifest is there unchanged."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, digest in files.items():
            if sha256_file(folder / name) != digest:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None if files else f"{MANIFEST} names no files"


def _build_into(folder: Path, build: Callable[[Path], None]) -> None:
    """Build beside ``folder``, write the manifest, and rename. Leftovers of killed builds are removed first."""
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        build(temporary)
        files = {path.name: sha256_file(path) for path in sorted(temporary.iterdir()) if path.is_file()}
        (temporary / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
