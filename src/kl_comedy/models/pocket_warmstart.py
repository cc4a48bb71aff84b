"""The warm start of the pocket policy: next-character training on a careless teacher's demonstrations.

Shape legend: ``B`` sequences, ``L`` characters of prompt and completion, right-padded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from kl_comedy.data import pocket as problems
from kl_comedy.data.pocket import SPLITS, Family, draw, steps, write_steps
from kl_comedy.models import pocket_recipe
from kl_comedy.models.pocket_recipe import EOS, VOCABULARY, PocketRecipe, build_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

Report = Callable[[int, int, float], None]
"""Called after every update with (updates done, updates in all, loss in nats per character)."""

SOURCES = tuple(Path(str(module)) for module in (problems.__file__, pocket_recipe.__file__, __file__))
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
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(), console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
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
