"""From scored rollouts to padded tensors: an update's rows as micro-batches by token budget, divided over the ranks.

Legend: ``B`` rows, ``P`` longest prompt (left-padded), ``T`` longest completion (right-padded).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kl_comedy.config import Config
from kl_comedy.models import LoadedModel, PassOptions
from kl_comedy.models.introspection import head_chunk, microbatch_tokens
from kl_comedy.records import Experience, Scored
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of one micro-batch as tensors on the learner's device; ``positions`` are those among all rows.

    ``empty``: these rows count on another rank. The pass keeps this rank in step with ranks that have more rows.
    """

    positions: Sequence[int]
    empty: bool = False
    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    ids_BT: Tensor
    mask_BT: Tensor
    behaviour_logp_BT: Tensor
    policy_version_BT: Tensor


def model_inputs(batch: Packed | Experience) -> dict[str, Tensor]:
    """The arguments of a forward pass over the rows of a batch."""
    return {name: getattr(batch, name) for name in ("prompt_ids_BP", "prompt_mask_BP", "ids_BT", "mask_BT")}


def pass_options(config: Config, loaded: LoadedModel) -> PassOptions:
    """The settings of every pass of a policy or a reference."""
    return PassOptions(
        temperature=config.rollout.temperature,
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        share_prompt=config.model.share_prompt,
    )


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Packs rows into micro-batches of at most ``budget`` padded tokens."""

    budget: int
    pad_id: int
    device: torch.device
    ranks: Ranks = SINGLE_PROCESS

    @classmethod
    def of(cls, config: Config, loaded: LoadedModel, ranks: Ranks) -> Packer:
        """The packer of a run; ``train.microbatch_tokens: auto`` is resolved here."""
        checkpoints = config.model.gradient_checkpointing
        tokens = microbatch_tokens(config.train.microbatch_tokens, loaded.model, loaded.device, checkpoints=checkpoints)
        return cls(budget=tokens, pad_id=int(loaded.tokenizer.pad_token_id), device=loaded.device, ranks=ranks)

    def micro_batches(self, rows: Sequence[Scored]) -> list[Packed]:
        """This rank's micro-batches of ``rows``, as many as on every other rank."""
        splits = self.ranks.split(by_token_budget(rows, self.budget))
        shortest = [min(range(len(rows)), key=lambda position: (_tokens(rows, [position]), position))]
        return [self.pack(rows, split or shortest, empty=not split) for split in splits]

    def pack(self, rows: Sequence[Scored], positions: Sequence[int], *, empty: bool = False) -> Packed:
        """Pad the rows at ``positions``. The masks say which tokens count, so ``pad_id`` may equal the end token."""
        rollouts = [rows[position].rollout for position in positions]
        prompts = [rollout.prompt.token_ids for rollout in rollouts]
        p, t = max(map(len, prompts)), max(len(rollout.completion_ids) for rollout in rollouts)

        def padded(columns: Iterable[Sequence[Any]], fill: Any) -> Tensor:
            return torch.tensor([[*column, *[fill] * (t - len(column))] for column in columns], device=self.device)

        return Packed(
            positions=positions,
            empty=empty,
            prompt_ids_BP=torch.tensor([[*[self.pad_id] * (p - len(x)), *x] for x in prompts], device=self.device),
            prompt_mask_BP=torch.tensor([[n >= p - len(x) for n in range(p)] for x in prompts], device=self.device),
            ids_BT=padded((rollout.completion_ids for rollout in rollouts), self.pad_id),
            mask_BT=padded(([True] * len(rollout.completion_ids) for rollout in rollouts), False),
            behaviour_logp_BT=padded((rollout.logps for rollout in rollouts), 0.0).float(),
            policy_version_BT=padded((rollout.versions for rollout in rollouts), 0),
        )


def by_token_budget(rows: Sequence[Scored], budget: int) -> list[list[int]]:
    """Split row positions into micro-batches of at most ``budget`` padded tokens. Deterministic.

    Completions of one prompt stay together, because they may share its computation, and count it once; prompts of
    similar size are combined. A prompt's completions that exceed the budget are split, and a row that exceeds it is a
    micro-batch by itself.
    """
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        by_prompt[tuple(row.rollout.prompt.token_ids)].append(position)
    groups: list[list[int]] = []
    for positions in by_prompt.values():
        groups.append([])
        for position in positions:
            if groups[-1] and _tokens(rows, [*groups[-1], position]) > budget:
                groups.append([])
            groups[-1].append(position)
    groups.sort(key=lambda group: (_tokens(rows, group), group[0]))
    batches: list[list[list[int]]] = []
    for group in groups:  # in ascending order, so the last group of a micro-batch is its widest
        if not batches or _tokens(rows, group) * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(group)
    return [[position for group in batch for position in group] for batch in batches]


def _tokens(rows: Sequence[Scored], group: Sequence[int]) -> int:
    """Tokens of a prompt and of its completions at the positions ``group``."""
    prompt = len(rows[group[0]].rollout.prompt.token_ids)
    return prompt + sum(len(rows[position].rollout.completion_ids) for position in group)
