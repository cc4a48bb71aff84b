"""From scored rollouts to padded tensors: an update's rows as micro-batches by token budget, divided over the ranks.

Legend: ``B`` rollouts, ``R`` rows that the model reads, ``P`` longest prompt (left-padded), ``T`` longest completion
(right-padded).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kl_comedy.config import Config
from kl_comedy.models import LoadedModel, PassOptions
from kl_comedy.models.introspection import head_chunk, microbatch_tokens
from kl_comedy.records import Experience, KeptSets, ModelRows, Rollout, Scored
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of one micro-batch as tensors on the learner's device; ``positions`` are those among all rows.

    ``real_BT`` are the tokens of the completions, ``mask_BT`` those of them that the policy drew: the model attends to
    the former, the loss reads the latter. They are the same tensor where no environment wrote a token.

    ``empty``: these rows count on another rank. The pass keeps this rank in step with ranks that have more rows.
    """

    positions: Sequence[int]
    empty: bool = False
    prompt_ids_BP: Tensor
    prompt_mask_BP: Tensor
    ids_BT: Tensor
    real_BT: Tensor
    mask_BT: Tensor
    behaviour_logp_BT: Tensor
    policy_version_BT: Tensor
    sampler_top: tuple[Tensor, Tensor] | None = None
    """Ids and log-probs ``[B, T, K]`` of the sampler's likeliest tokens; None where no term reads them."""
    kept: KeptSets | None = None
    """The sets that truncated sampling kept, of the tokens of ``mask_BT`` in reading order; None where it did not
    truncate."""
    rows: ModelRows | None = None
    """What the model reads where a rollout has several rows, all of which are here; None where none has."""


def model_inputs(batch: Packed | Experience) -> dict[str, Any]:
    """The arguments of a forward pass over the rows of a batch."""
    names = ("prompt_ids_BP", "prompt_mask_BP", "ids_BT", "real_BT", "mask_BT", "rows")
    return {name: getattr(batch, name) for name in names}


def policy_inputs(batch: Packed | Experience) -> dict[str, Any]:
    """The arguments of a policy's pass: those of a reference's, and what the sampler says of its distributions."""
    return {**model_inputs(batch), "sampler_top": batch.sampler_top, "kept": batch.kept}


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
        # The position breaks ties, so that every rank takes the same row.
        shortest = min(range(len(rows)), key=lambda position: (_tokens(rows, [position]), position))
        packs = []
        for positions in self.ranks.split(by_token_budget(rows, self.budget)):
            if positions is None:
                # Others have one micro-batch more. This rank must pass something too, because a sharded policy
                # exchanges weights in every pass; the shortest row costs least.
                packs.append(self.pack(rows, [shortest], empty=True))
            else:
                packs.append(self.pack(rows, positions))
        return packs

    def pack(self, rows: Sequence[Scored], positions: Sequence[int], *, empty: bool = False) -> Packed:
        """Pad the rows at ``positions``. The masks say which tokens count, so ``pad_id`` may equal the end token."""
        # Lists first, and one tensor of each kind at the end: a copy to the device per row would be slow.
        rollouts = [rows[position].rollout for position in positions]
        prompts = [rollout.prompt.token_ids for rollout in rollouts]
        completions = [rollout.completion_ids for rollout in rollouts]
        width_P = max(len(prompt) for prompt in prompts)
        width_T = max(len(completion) for completion in completions)
        real_BT = self._padded_right([[True] * len(ids) for ids in completions], width_T, False)
        mask_BT = real_BT
        # The same tensor without an environment, so that a pass has no hidden states to select (a copy of them all).
        if any(rollout.trained for rollout in rollouts):
            mask_BT = self._padded_right([rollout.trained_mask for rollout in rollouts], width_T, False)
        # Prompts on the left and completions on the right, so that every first completion token is in the same column.
        return Packed(
            positions=positions,
            empty=empty,
            prompt_ids_BP=self._padded_left(prompts, width_P, self.pad_id),
            prompt_mask_BP=self._padded_left([[True] * len(prompt) for prompt in prompts], width_P, False),
            ids_BT=self._padded_right(completions, width_T, self.pad_id),
            real_BT=real_BT,
            mask_BT=mask_BT,
            behaviour_logp_BT=self._padded_right([rollout.logps for rollout in rollouts], width_T, 0.0).float(),
            policy_version_BT=self._padded_right([rollout.versions for rollout in rollouts], width_T, 0),
            sampler_top=self._sampler_top(rollouts),
            kept=self._kept(rollouts),
            rows=self._model_rows(rollouts),
        )

    def _model_rows(self, rollouts: Sequence[Rollout]) -> ModelRows | None:
        """What the model reads of ``rollouts``; None where each is its prompt and its tokens."""
        if not any(rollout.restarts for rollout in rollouts):
            return None
        contexts = []
        ids = []
        masks = []
        for rollout in rollouts:
            for row in rollout.rows:
                contexts.append(row.context)
                ids.append(rollout.completion_ids[row.start : row.end])
                masks.append(rollout.trained_mask[row.start : row.end])
        width_P = max(len(context) for context in contexts)
        width_T = max(len(ids_of_row) for ids_of_row in ids)
        return ModelRows(
            prompt_ids_RP=self._padded_left(contexts, width_P, self.pad_id),
            prompt_mask_RP=self._padded_left([[True] * len(context) for context in contexts], width_P, False),
            ids_RT=self._padded_right(ids, width_T, self.pad_id),
            real_RT=self._padded_right([[True] * len(ids_of_row) for ids_of_row in ids], width_T, False),
            mask_RT=self._padded_right(masks, width_T, False),
        )

    def _sampler_top(self, rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor] | None:
        ids = []
        logps = []
        for rollout in rollouts:
            if rollout.sampler_top is None:
                return None
            ids.append(rollout.sampler_top[0].long())
            logps.append(rollout.sampler_top[1].float())
        ids_BTK = pad_sequence(ids, batch_first=True)
        logp_BTK = pad_sequence(logps, batch_first=True)
        return ids_BTK.to(self.device), logp_BTK.to(self.device)

    def _kept(self, rollouts: Sequence[Rollout]) -> KeptSets | None:
        kept = [rollout.kept for rollout in rollouts if rollout.kept is not None]
        if not kept:
            return None
        if len(kept) < len(rollouts):
            raise ValueError(f"{len(kept)} of {len(rollouts)} rollouts have the sets that truncated sampling kept")
        sizes_N, ids_M = (torch.cat(parts).to(self.device).long() for parts in zip(*kept, strict=True))
        return KeptSets(sizes_N, ids_M)

    def _padded_left(self, rows: Sequence[Sequence[Any]], width: int, fill: Any) -> Tensor:
        return torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=self.device)

    def _padded_right(self, rows: Sequence[Sequence[Any]], width: int, fill: Any) -> Tensor:
        return torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], device=self.device)


def by_token_budget(rows: Sequence[Scored], budget: int) -> list[list[int]]:
    """Split row positions into micro-batches of at most ``budget`` padded tokens. Deterministic.

    Completions of one prompt stay together, because they may share its computation, and count it once; prompts of
    similar size are combined. A prompt's completions that exceed the budget are split, and a row that exceeds it is a
    micro-batch by itself.
    """
    # By the ids and not by the group, so that a prompt that is in two groups is computed once too.
    by_prompt: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        by_prompt[tuple(row.rollout.prompt.token_ids)].append(position)
    groups: list[list[int]] = []
    for positions in by_prompt.values():
        group: list[int] = []
        groups.append(group)
        for position in positions:
            if group and _tokens(rows, [*group, position]) > budget:
                group = []
                groups.append(group)
            group.append(position)
    # In ascending order the group that is added last is the widest of its micro-batch, and all are padded to it.
    groups.sort(key=lambda group: (_tokens(rows, group), group[0]))
    batches: list[list[list[int]]] = []
    for group in groups:
        is_full = bool(batches) and _tokens(rows, group) * (len(batches[-1]) + 1) > budget
        if is_full or not batches:
            batches.append([])
        batches[-1].append(group)
    return [list(chain.from_iterable(batch)) for batch in batches]


def _tokens(rows: Sequence[Scored], group: Sequence[int]) -> int:
    """Tokens that a model reads: of a prompt, and of its completions at the positions ``group``."""
    tokens = len(rows[group[0]].rollout.prompt.token_ids)
    for position in group:
        rollout = rows[position].rollout
        tokens += len(rollout.completion_ids) + sum(len(context) for _, context in rollout.restarts)
    return tokens
