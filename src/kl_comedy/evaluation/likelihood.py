"""Log-probs of given continuations: how likely a model finds each choice after its question.

    prompts x choices -> tokens -> batches by length, choices of a prompt together -> one pass each -> sums in nats

Legend: ``B`` rows of a batch (one choice each), ``P`` prompt tokens (left-padded), ``T`` tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.data.prompts import continuation_ids
from kl_comedy.models.introspection import head_chunk, microbatch_tokens
from kl_comedy.models.logprobs import token_pass
from kl_comedy.records import Prompt
from kl_comedy.rollouts import Sampling
from kl_comedy.rollouts.hf import check_lengths

if TYPE_CHECKING:
    from kl_comedy.models import LoadedModel

T = TypeVar("T")


class Ranks(Protocol):
    """Processes that part the passes, as a run's world does."""

    def split(self, items: Sequence[T]) -> list[T | None]:
        """This process's part, filled up with None: equally many on all."""
        ...

    def gather(self, item: T) -> list[T]:
        """What every process gave, on every process."""
        ...


class Alone:
    """One process, which does everything."""

    def split(self, items: Sequence[T]) -> list[T | None]:
        return list(items)

    def gather(self, item: T) -> list[T]:
        return [item]


ALONE = Alone()


@dataclass(frozen=True, kw_only=True)
class Spelled:
    """Choices as tokens: ``rows`` has one choice each, the position of its prompt and the ids that it adds to it."""

    prompts: Sequence[Prompt]
    rows: Sequence[tuple[int, tuple[int, ...]]]

    def size(self, position: int) -> int:
        """Tokens of a row with its prompt."""
        return self.before(position) + len(self.rows[position][1])

    def before(self, position: int) -> int:
        """Tokens of a row's prompt."""
        return len(self.prompts[self.rows[position][0]].token_ids)

    def padded(self, batch: Sequence[int]) -> int:
        """Tokens of a pass over the rows ``batch``."""
        return len(batch) * max(map(self.size, batch))

    def batches(self, budget: int, chunk: int | None = None) -> list[list[int]]:
        """Positions of rows in passes of at most ``budget`` padded tokens, and one row at least.

        Only rows of the same ``chunk`` prompts meet, so a pass is the same whatever stands in the other chunks.
        """
        chunks: dict[int, list[int]] = {}
        for position, (index, _) in enumerate(self.rows):
            chunks.setdefault(index // (chunk or len(self.prompts)), []).append(position)
        return [batch for positions in chunks.values() for batch in _batches(self, positions, budget)]


def spell(
    loaded: LoadedModel, prompts: Sequence[Prompt], choices: Sequence[Sequence[str]], *, special: bool
) -> Spelled:
    """The ``choices`` of each prompt, spelled together with it as text.

    ``special``: the tokenizer's own special tokens stand in front (plain prompts; chat templates write theirs).
    Raises :class:`~kl_comedy.errors.UserError` for a choice without tokens of its own, and for what exceeds the model's
    context.
    """
    rows = [
        (index, continuation_ids(prompt, text, loaded.tokenizer, special=special))
        for index, (prompt, texts) in enumerate(zip(prompts, choices, strict=True))
        for text in texts
    ]
    longest = Sampling(temperature=0.0, max_new_tokens=max(len(ids) for _, ids in rows))
    check_lengths(loaded, prompts, longest)
    return Spelled(prompts=prompts, rows=rows)


@dataclass(frozen=True, kw_only=True)
class ChoicePasses:
    """How choices go through a model; draws nothing.

    ``budget`` bounds the padded tokens of a pass, ``chunk_elements`` the logits held at once. ``ranks`` part the
    passes, and all make equally many, as a model in shards needs.
    """

    loaded: LoadedModel
    budget: int
    chunk_elements: int
    share_prompt: bool = True
    ranks: Ranks = ALONE

    def __call__(self, spelled: Spelled, *, chunk: int | None = None) -> list[list[float]]:
        """For each prompt the log-prob (nats, at temperature 1) of each of its choices, summed over its tokens."""
        batches = spelled.batches(self.budget, chunk)
        own: dict[int, float] = {}
        for batch in self.ranks.split(batches):
            sums = self._sums(spelled, min(batches, key=spelled.padded) if batch is None else batch)
            own |= {} if batch is None else dict(zip(batch, sums, strict=True))
        found: list[list[float]] = [[] for _ in spelled.prompts]
        merged = {position: logp for part in self.ranks.gather(own) for position, logp in part.items()}
        for position, (index, _) in enumerate(spelled.rows):
            found[index].append(merged[position])
        return found

    @torch.no_grad()
    def _sums(self, spelled: Spelled, batch: Sequence[int]) -> list[float]:
        """The log-probs of a batch's rows, added up in float64."""
        before = [spelled.prompts[spelled.rows[position][0]].token_ids for position in batch]
        after = [spelled.rows[position][1] for position in batch]
        p, t = max(map(len, before)), max(map(len, after))
        pad = int(self.loaded.tokenizer.pad_token_id)

        def tensor(rows: list[list[int]] | list[list[bool]]) -> Tensor:
            return torch.tensor(rows, device=self.loaded.device)

        seen = token_pass(
            self.loaded.model,
            prompt_ids_BP=tensor([[pad] * (p - len(ids)) + list(ids) for ids in before]),
            prompt_mask_BP=tensor([[False] * (p - len(ids)) + [True] * len(ids) for ids in before]),
            ids_BT=tensor([list(ids) + [pad] * (t - len(ids)) for ids in after]),
            mask_BT=tensor([[True] * len(ids) + [False] * (t - len(ids)) for ids in after]),
            temperature=1.0,
            chunk_elements=self.chunk_elements,
            share_prompt=self.share_prompt,
        )
        return [float(value) for value in seen.logp_BT.double().sum(-1)]


def choice_passes(config: Config, loaded: LoadedModel, ranks: Ranks = ALONE) -> ChoicePasses:
    """Passes within the memory that ``config`` gives them."""
    return ChoicePasses(
        loaded=loaded,
        budget=microbatch_tokens(config.train.microbatch_tokens, loaded.model, loaded.device, checkpoints=False),
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        share_prompt=config.model.share_prompt,
        ranks=ranks,
    )


def _batches(spelled: Spelled, positions: Sequence[int], budget: int) -> list[list[int]]:
    """Longest prompts first, choices of one prompt together; at least one row in each."""
    order = sorted(positions, key=lambda position: (-spelled.before(position), position))
    batches: list[list[int]] = []
    widest = 0
    for position in order:
        widest_then = max(widest, spelled.size(position))
        if batches and widest_then * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(position)
            widest = widest_then
        else:
            batches.append([position])
            widest = spelled.size(position)
    return batches
