"""A folder of built policies: checked by content on every read, written whole or not at all, locked while built.

What a pocket policy is made from: its recipe, its architecture and its character tokenizer.

The warm start of the pocket policy: next-character training on a careless teacher's demonstrations.

Shape legend: ``B`` sequences, ``L`` characters of prompt and completion, right-padded.

The pocket policy: a small Llama over characters that this project builds, warm-starts and caches itself.

No hub and no GPU: the first load trains it for about a minute, later loads read the cache. The cached
folder is an ordinary Hugging Face folder, so ``model.source=<that folder>`` works as well.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kl_comedy.data import pocket as problems
from kl_comedy.data.pocket import SPLITS, Family, draw, steps, write_steps
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import file_lock, sha256_file

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from kl_comedy.config.schema import ModelConfig


MANIFEST = "manifest.json"


def cache_root() -> Path:
    """``$KL_COMEDY_CACHE``, else ``~/.cache/kl_comedy``."""
    return Path(os.environ.get("KL_COMEDY_CACHE") or "~/.cache/kl_comedy").expanduser()


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``<cache>/<kind>/<key>``, made by ``build(empty folder)`` unless a sound one is there.

    ``build`` runs in a folder beside it that is renamed into place once its manifest is written, so a reader
    never sees half of it. Of several processes one builds and the others wait. A folder whose files differ
    from its manifest is said to be damaged, and built again. Raises UserError where the cache cannot be written.
    """
    folder = cache_root() / kind / key
    if damage(folder) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        waiting = f"another process is building {kind} {key}; waiting for it"
        with file_lock(folder.parent / f"{key}.lock", wait_s=math.inf, on_wait=lambda: _say(waiting)):
            why = damage(folder)
            if why is not None:
                if folder.exists():
                    _say(f"{kind} policy: the cached copy {folder} is damaged ({why}); building it again")
                _build_into(folder, build)
    except OSError as error:
        raise UserError(
            f"KL_COMEDY_CACHE: cannot write the {kind} policy to {folder}: {error}; set it to a writable folder"
        ) from error
    return folder


def damage(folder: Path) -> str | None:
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
    """Build beside ``folder``, write the manifest, and rename. Leftovers of killed builds go first."""
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover)
    fresh = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    fresh.mkdir()
    try:
        build(fresh)
        files = {path.name: sha256_file(path) for path in sorted(fresh.iterdir()) if path.is_file()}
        (fresh / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


Report = Callable[[int, int, float], None]
"""Called after every update with (updates done, updates in all, loss in nats per character)."""

SOURCES = tuple(Path(str(module)) for module in (problems.__file__, __file__, __file__))
"""The code that the warm-started weights are a result of."""

_IGNORED = -100
_IDS = {token: index for index, token in enumerate(VOCABULARY)}
_WARMUP = 50
_FINAL_LR_SHARE = 0.1


def careless_steps(text: str, *, slip: float, rng: random.Random) -> list[tuple[str, int]]:
    """The steps of ``text`` by a teacher who drops the carry (or borrow) out of the units with probability ``slip``.

    Each step goes on from what was written before it. With ``slip`` 0 these are the right steps.
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
    own = Family(terms=recipe.terms, digits=recipe.digits)
    others = [split.family for split in SPLITS.values() if split.family != own and not split.tunable]
    streams = {
        family: draw(family, count=None, seed=recipe.seed, held_out=False) for family in dict.fromkeys([own, *others])
    }
    while True:
        family = rng.choice(others) if rng.random() < recipe.mixture else own
        text = family.text(next(streams[family]))
        yield text, write_steps(careless_steps(text, slip=recipe.slip, rng=rng))


def collate(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Pairs of text and completion as ``ids_BL`` and ``targets_BL``; only the completion and its end are targets."""
    rows = [([_IDS[c] for c in text], [*(_IDS[c] for c in completion), _IDS[EOS]]) for text, completion in pairs]
    length = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    targets_BL = torch.full_like(ids_BL, _IGNORED)
    for row, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids_BL[row, :end] = torch.tensor(prompt + completion)
        targets_BL[row, len(prompt) : end] = torch.tensor(completion)
    return ids_BL, targets_BL


def warm_start(recipe: PocketRecipe, *, report: Report) -> LlamaForCausalLM:
    """Build and train the policy for exactly ``recipe.warmstart_steps`` updates, in float32 on the CPU.

    The result is a function of the recipe, down to how torch rounds on this machine with this many threads:
    no clock and no measured reward decides when to stop. The global RNG is left as it was.
    """
    model = build_model(recipe).train()
    total = recipe.warmstart_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / _WARMUP) * (1 - (1 - _FINAL_LR_SHARE) * step / max(total, 1))
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
        report(step, total, loss.item())
    return model.eval()


class ProgressLine:
    """Shows the warm start on stderr: a moving bar on a terminal, one plain line per fifth elsewhere."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._title = title
        self._console = Console(stderr=True, soft_wrap=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=None)

    def __enter__(self) -> ProgressLine:
        self._started = time.monotonic()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, step: int, total: int, loss: float) -> None:
        """Report one update; ``loss`` in nats per character."""
        self._bar.update(self._task, completed=step, total=total, description=f"{self._title} (loss {loss:.3f})")
        if not self._console.is_terminal and (step % max(1, total // 5) == 0 or step == total):
            seconds = time.monotonic() - self._started
            self._console.print(f"{self._title}: {step}/{total} updates, loss {loss:.3f} nats, {seconds:.0f} s")


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
    pass

    digest = hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def write_policy(recipe: PocketRecipe, folder: Path) -> None:
    """Train the recipe's policy and save it, its tokenizer and the recipe to ``folder``.

    The files are those of ``save_pretrained``, written one by one because that shows a progress bar of its own.
    """
    from safetensors.torch import save_file

    pass

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
