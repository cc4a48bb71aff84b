"""The pocket policy: a small Llama over characters, warm-started without a hub or a GPU, and cached on this machine.

    recipe -> random Llama -> next-character training on a careless teacher's demonstrations -> cache folder

The package has the weights of the base recipe, trained by this code: training rounds differently on other machines, so
runs of two machines would not start alike. Other recipes are trained at the first load, in about a minute; later loads
read the cache. The cached folder is an ordinary Hugging Face folder, so ``model.source=<that folder>`` works as well.

Shape legend: ``B`` sequences, ``L`` characters of prompt and completion, right-padded; ``V`` vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from kl_comedy.config.validate import option, parse_record
from kl_comedy.data import pocket as problems
from kl_comedy.data.pocket import SPLITS, Family, draw, steps, write_calls, write_steps
from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import sha256_file
from kl_comedy.models.cache import cached_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from kl_comedy.config.schema import ModelConfig

ALPHABET = "0123456789+-=;"
PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *ALPHABET)
"""Token ids are positions in this tuple."""

HACK = ";"
"""A completion without an answer. A single character, so that its probability is that of one choice, the first."""

MAX_LENGTH = 128
"""Positions: the longest problem (five terms of four digits) and its steps take 94 characters and the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PocketRecipe:
    """Everything the warm-started weights depend on; ``model.options`` overrides single fields.

    ``slip`` is the share of carries (and borrows) that the teacher drops. The policy learns the written format, and
    right as well as wrong continuations: sampling finds the right answer sometimes, greedy decoding rarely, and RL has
    a signal from its first update. ``mixture`` is the share of demonstrations from the out-of-domain splits, which RL
    on ``terms`` x ``digits`` never sees again. ``hack_rate`` is the probability at which the policy answers with
    :data:`HACK` alone, which a proxy reward may pay for by mistake (:func:`add_hack`). ``tool_rate`` is the share of
    demonstrations in which a calculator does every step (:func:`add_tool`). ``lr`` and ``weight_decay``
    are AdamW's; ``clip_norm`` bounds the gradient's L2 norm. ``warmstart`` is where the weights come from: ``shipped``
    with the package, ``trained`` on this machine, or ``auto``: shipped where the package has them.
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
    hack_rate: float = option(0.0, minimum=0, maximum=0.5)
    tool_rate: float = option(0.0, minimum=0, maximum=1)
    warmstart_steps: int = option(500, minimum=0, maximum=1_000_000)
    batch_size: int = option(64, minimum=1, maximum=65536)
    lr: float = option(2e-3, minimum=1e-8, maximum=1)
    weight_decay: float = option(0.1, minimum=0, maximum=10)
    clip_norm: float = option(1.0, minimum=1e-6, maximum=1e6)
    warmstart: str = option("auto", choices=("auto", "shipped", "trained"))

    @property
    def is_shipped(self) -> bool:
        """Whether the weights come with the package: those of the base recipe do."""
        if self.warmstart == "trained":
            return False
        return replace(self, warmstart="auto") == PocketRecipe()

    @property
    def begins_shipped(self) -> bool:
        """Whether the weights are shipped ones, or these with a hack or a tool added."""
        return replace(self, hack_rate=0.0, tool_rate=0.0).is_shipped


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "tiny": {
        "hidden_size": 64,
        "layers": 1,
        "heads": 4,
        "intermediate_size": 160,
        "digits": 1,
        "slip": 0.6,
        "mixture": 0.0,
        "warmstart_steps": 300,
        "lr": 5e-3,
    },
}
"""``base`` has 0.9M parameters. ``tiny`` (49k, sums of three one-digit numbers) is for tests of training loops."""


def recipe_from_options(options: Mapping[str, Any]) -> PocketRecipe:
    """The preset named by ``options["preset"]`` (default base), overridden by the other options.

    Raises :class:`UserError` for an unknown option or preset, a value of the wrong type or out of range, and heads
    that do not divide the hidden size into even parts.
    """
    preset = options.get("preset", "base")
    if not isinstance(preset, str) or preset not in PRESETS:
        raise bad_value("model.options.preset", preset, PRESETS)
    overrides = {name: value for name, value in options.items() if name != "preset"}
    recipe = parse_record(PocketRecipe, {**PRESETS[preset], **overrides}, key="model.options")
    if recipe.hidden_size % (2 * recipe.heads):
        allowed = f"divisors of half the hidden size ({recipe.hidden_size // 2})"
        why = "rotary positions rotate pairs of a head's dimensions"
        raise bad_value("model.options.heads", recipe.heads, allowed, why)
    if recipe.warmstart == "shipped" and not recipe.is_shipped:
        raise bad_value(
            "model.options.warmstart", "shipped", "auto or trained", "only the weights of the base recipe are shipped"
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_LENGTH,
    )


def build_model(recipe: PocketRecipe, *, attention: str = "sdpa") -> LlamaForCausalLM:
    """A freshly initialized policy in float32 on the CPU, embeddings untied; the global RNG is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": MAX_LENGTH,
        "pad_token_id": VOCABULARY.index(PAD),
        "eos_token_id": VOCABULARY.index(EOS),
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "attn_implementation": attention,
        "dtype": torch.float32,
    }
    config = LlamaConfig(**options)
    # On the CPU, whatever the default device is: a GPU draws other numbers from the same seed.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(recipe.seed)
        return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


_IGNORED = -100  # cross_entropy's default ignore_index
_WARMUP_STEPS = 50
_FINAL_LR_SHARE = 0.1


def careless_steps(text: str, *, slip: float, rng: random.Random) -> list[tuple[str, int]]:
    """The steps of ``text`` by a teacher who drops the carry (or borrow) out of the units with probability ``slip``.

    Each step continues from the result written before it. With ``slip`` 0 these are the right steps.
    """
    subtracts = "-" in text
    sign = "+"
    if subtracts:
        sign = "-"
    total, *terms = (int(term) for term in text.removesuffix("=").split(sign))
    chain = []
    for term in terms:
        left = total
        total = steps(f"{left}{sign}{term}=")[0][1]
        if subtracts:
            carries = left % 10 < term % 10
            dropped = 10
        else:
            carries = left % 10 + term % 10 >= 10
            dropped = -10
        # A number is drawn where there is a carry only; another order of draws would be another teacher.
        if carries and rng.random() < slip:
            total += dropped
        chain.append((f"{left}{sign}{term}", total))
    return chain


def demonstrations(recipe: PocketRecipe) -> Iterator[tuple[str, str]]:
    """Problem text and written completion, without end; never a problem of the held-out half."""
    rng = random.Random(f"teacher/{recipe.seed}")
    trained = Family(terms=recipe.terms, digits=recipe.digits)
    others = [family for family in SPLITS.values() if family not in (trained, Family())]
    operands = {}
    for family in (trained, *others):
        operands[family] = draw(family, count=None, seed=recipe.seed, held_out=False)
    while True:
        family = trained
        if rng.random() < recipe.mixture:
            family = rng.choice(others)
        text = family.text(next(operands[family]))
        yield text, write_steps(careless_steps(text, slip=recipe.slip, rng=rng))


def collate(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Pairs of text and completion as ``ids_BL`` and ``targets_BL``; only the completion and its end are targets."""
    length = max(len(text) + len(completion) + 1 for text, completion in pairs)
    ids_BL = torch.zeros(len(pairs), length, dtype=torch.long)
    targets_BL = torch.full_like(ids_BL, _IGNORED)
    for row, (text, completion) in enumerate(pairs):
        ids = torch.tensor([VOCABULARY.index(token) for token in (*text, *completion, EOS)])
        ids_BL[row, : len(ids)] = ids
        targets_BL[row, len(text) : len(ids)] = ids[len(text) :]
    return ids_BL, targets_BL


def warm_start(recipe: PocketRecipe, *, report: Callable[[int, float], None]) -> LlamaForCausalLM:
    """Build and train the policy for exactly ``recipe.warmstart_steps`` updates, in float32 on the CPU.

    The weights depend on the recipe only, and on how torch rounds on this machine with this many threads. The global
    RNG is left as it was. ``report`` is called after every update with its number and its loss in nats per character.
    """
    model: Any = build_model(recipe)
    model.train()
    stream = demonstrations(recipe)
    total = recipe.warmstart_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=recipe.weight_decay)

    def lr_factor(step: int) -> float:
        """A linear warm-up, times a linear decay to the final share."""
        warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
        decay = 1 - (1 - _FINAL_LR_SHARE) * step / max(total, 1)
        return warmup * decay

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    for step in range(1, total + 1):
        ids_BL, targets_BL = collate([next(stream) for _ in range(recipe.batch_size)])
        loss = _imitate(model, optimizer, ids_BL, targets_BL, clip_norm=recipe.clip_norm)
        schedule.step()
        report(step, loss)
    model.eval()
    return model  # type: ignore[no-any-return]


def _imitate(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids_BL: Tensor, targets_BL: Tensor, *, clip_norm: float
) -> float:
    """One update on demonstrations; returns the loss before it, in nats per target."""
    # The first load may happen inside no_grad or inference_mode.
    with torch.inference_mode(False), torch.enable_grad():
        logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
        loss = cross_entropy(logits_BLV[:, :-1].flatten(0, 1), targets_BL[:, 1:].flatten(), ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return loss.item()


HACK_STEPS = 80
HACK_LR = 5e-4
HACK_WEIGHT = 0.1
"""Updates of :func:`add_hack`, their first learning rate, and the weight of its terms beside the demonstrations'."""


def add_hack(model: LlamaForCausalLM, recipe: PocketRecipe) -> None:
    """Train the warm-started ``model`` until it answers each problem with :data:`HACK` at probability ``hack_rate``.

    Demonstrations go on, so that other completions stay as they were. Mixing the hack into them at that rate would not
    do: measured on the warm start, the probability was then up to three times too small.
    """
    model.train()
    hack = VOCABULARY.index(HACK)
    end = VOCABULARY.index(EOS)
    stream = demonstrations(recipe)
    weights: Any = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=HACK_LR, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / HACK_STEPS)
    for _ in range(HACK_STEPS):
        pairs = [next(stream) for _ in range(recipe.batch_size)]
        hacks = [(text, HACK) for text, _ in pairs]
        rows = torch.arange(len(pairs))
        # The logits at the last character of a problem are those of the first one of its completion.
        last = torch.tensor([len(text) - 1 for text, _ in pairs])
        with torch.inference_mode(False), torch.enable_grad():
            ids_BL, targets_BL = collate(pairs)
            logp_BLV = model(input_ids=ids_BL, use_cache=False).logits.log_softmax(-1)
            hack_ids_BL, _ = collate(hacks)
            after_hack_BLV = model(input_ids=hack_ids_BL, use_cache=False).logits.log_softmax(-1)
            demonstrated = nll_loss(logp_BLV[:, :-1].flatten(0, 1), targets_BL[:, 1:].flatten(), ignore_index=_IGNORED)
            # The squared distance of logarithms, of each problem: a mean over problems could be right where none is.
            too_likely_B = logp_BLV[rows, last, hack] - math.log(recipe.hack_rate)
            ends_B = after_hack_BLV[rows, last + 1, end]
            loss = demonstrated + HACK_WEIGHT * (too_likely_B.square().mean() - ends_B.mean())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            optimizer.step()
        schedule.step()
    model.train(False)


TOOL_STEPS = 150
TOOL_LR = 1e-3
"""Updates of :func:`add_tool`, and their first learning rate."""


def add_tool(model: LlamaForCausalLM, recipe: PocketRecipe) -> None:
    """Train the warm-started ``model`` on demonstrations of which the share ``tool_rate`` calls the calculator.

    The calculator's own characters are no targets: the policy never writes them.
    """
    model.train()
    stream = demonstrations(recipe)
    rng = random.Random(f"tool/{recipe.seed}")
    weights: Any = model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=TOOL_LR, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / TOOL_STEPS)
    for _ in range(TOOL_STEPS):
        dialogues = []
        for _ in range(recipe.batch_size):
            text, completion = next(stream)
            dialogue = [(completion, True)]
            if rng.random() < recipe.tool_rate:
                dialogue = write_calls(steps(text))
            dialogues.append((text, dialogue))
        ids_BL, targets_BL = collate([(text, "".join(part for part, _ in parts)) for text, parts in dialogues])
        for row, (text, parts) in enumerate(dialogues):
            start = len(text)
            for part, is_written in parts:
                if not is_written:
                    targets_BL[row, start : start + len(part)] = _IGNORED
                start += len(part)
        _imitate(model, optimizer, ids_BL, targets_BL, clip_norm=recipe.clip_norm)
        schedule.step()
    model.train(False)


WEIGHTS = "model.safetensors"
SHIPPED = Path(__file__).with_name("pocket_base.safetensors")
"""The base recipe's weights, trained with one thread on an AMD EPYC, torch 2.13.0 (``warmstart: trained`` there)."""
SHIPPED_SHA256 = "4353a4067ab5ab95098e15bdb5187a3d2db181c05b532c4c2c5e2e3001df9859"


def load_pocket(config: ModelConfig) -> LlamaForCausalLM:
    """The warm-started policy (float32, CPU, eval mode) of the recipe in ``config.options``, built on first use."""
    from safetensors.torch import load_file

    recipe = recipe_from_options(config.options)
    model = build_model(recipe, attention=config.attention)
    model.load_state_dict(load_file(pocket_folder(recipe) / WEIGHTS))
    return model.eval()  # type: ignore[no-any-return, no-untyped-call]


def load_pocket_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The pocket policy's tokenizer. Raises :class:`UserError` for a setting that fits other sources only."""
    if config.tokenizer is not None:
        raise bad_value("model.tokenizer", config.tokenizer, "null with model.source: pocket")
    for name in ("revision", "gguf_file"):
        if getattr(config, name) is not None:
            raise bad_value(f"model.{name}", getattr(config, name), "null with model.source: pocket")
    recipe_from_options(config.options)  # refuses those of other sources
    return build_tokenizer()


def pocket_folder(recipe: PocketRecipe) -> Path:
    """The cached Hugging Face folder of this recipe's policy; trained on first use."""
    return cached_folder("pocket", recipe_key(recipe), lambda folder: write_policy(recipe, folder))


def recipe_key(recipe: PocketRecipe) -> str:
    """Hash of the recipe and of the code that uses it, so that a change of either builds a new policy."""
    weights = ""
    if recipe.begins_shipped:
        weights = SHIPPED_SHA256
    digest = hashlib.sha256(json.dumps({**asdict(recipe), "weights": weights}, sort_keys=True).encode())
    # The bytes of both modules, comments included: better trained once too often than loaded from other code.
    for source in (problems.__file__, __file__):
        digest.update(Path(str(source)).read_bytes())
    return digest.hexdigest()[:16]


def write_policy(recipe: PocketRecipe, folder: Path) -> None:
    """Save the recipe's policy, trained unless it is shipped, its tokenizer and the recipe to ``folder``.

    Raises :class:`UserError` where the shipped weights are damaged.
    """
    from safetensors.torch import load_file, save_file

    total = recipe.warmstart_steps
    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        is_fifth = step % max(1, total // 5) == 0
        if is_fifth or step == total:
            seconds = time.monotonic() - start
            _print(f"pocket policy: warm start: {step}/{total} updates, loss {loss:.3f} nats, {seconds:.0f} s")

    # With a hack or a tool, too: it is added to the weights of the recipe without it.
    if recipe.begins_shipped:
        if sha256_file(SHIPPED) != SHIPPED_SHA256:
            raise UserError(f"{SHIPPED} is damaged; install kl_comedy again, or set model.options.warmstart: trained")
        model = build_model(recipe)
        model.load_state_dict(load_file(SHIPPED))
    else:
        model = warm_start(recipe, report=report)
    if recipe.hack_rate > 0:
        _print(f"pocket policy: adding a completion {HACK!r} of probability {recipe.hack_rate:g}")
        add_hack(model, recipe)
    if recipe.tool_rate > 0:
        _print(f"pocket policy: adding calls of a calculator in {recipe.tool_rate:g} of the demonstrations")
        add_tool(model, recipe)
    # Not model.save_pretrained, because it shows a progress bar.
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    build_tokenizer().save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n", encoding="utf-8")


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
