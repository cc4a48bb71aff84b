"""Log-probs of given continuations: how likely a model finds each choice after its question.

    prompts x choices -> tokens -> batches by length, choices of a prompt together -> one pass each -> sums in nats

Legend: ``B`` rows of a batch (one choice each), ``P`` prompt tokens (left-padded), ``T`` tokens of a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kl_comedy.data.prompts import continuation_ids
from kl_comedy.models.logprobs import token_pass
from kl_comedy.records import Prompt
from kl_comedy.rollouts import Sampling
from kl_comedy.rollouts.hf import check_lengths

if TYPE_CHECKING:
    from kl_comedy.models import LoadedModel


def choice_logps(
    loaded: LoadedModel, prompts: Sequence[Prompt], choices: Sequence[Sequence[str]], *, special: bool, budget: int,
    chunk_elements: int, share_prompt: bool = True,
) -> list[list[float]]:  # fmt: skip
    """For each prompt the log-prob (nats, at temperature 1) of each of its ``choices``, summed over its tokens.

    A choice is spelled together with its prompt, as text. ``special``: the tokenizer's own special tokens stand in
    front (plain prompts; chat templates write theirs). ``budget`` bounds the padded tokens of a pass,
    ``chunk_elements`` the logits held at once.

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
    found: list[list[float]] = [[] for _ in prompts]
    sums: dict[int, float] = {}
    for batch in _batches(rows, prompts, budget):
        sums |= dict(zip(batch, _pass(loaded, rows, prompts, batch, chunk_elements, share_prompt), strict=True))
    for position, (index, _) in enumerate(rows):
        found[index].append(sums[position])
    return found


def _batches(rows: Sequence[tuple[int, tuple[int, ...]]], prompts: Sequence[Prompt], budget: int) -> list[list[int]]:
    """Positions of rows, longest prompts first, choices of one prompt together; at least one row in each."""

    def size(position: int) -> int:
        index, ids = rows[position]
        return len(prompts[index].token_ids) + len(ids)

    order = sorted(range(len(rows)), key=lambda position: (-len(prompts[rows[position][0]].token_ids), position))
    batches: list[list[int]] = []
    widest = 0
    for position in order:
        widest_then = max(widest, size(position))
        if batches and widest_then * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(position)
            widest = widest_then
        else:
            batches.append([position])
            widest = size(position)
    return batches


@torch.no_grad()
def _pass(
    loaded: Any, rows: Sequence[tuple[int, tuple[int, ...]]], prompts: Sequence[Prompt], batch: Sequence[int],
    chunk_elements: int, share_prompt: bool,
) -> list[float]:  # fmt: skip
    """The sums of a batch's rows, added up in float64."""
    before = [prompts[rows[position][0]].token_ids for position in batch]
    after = [rows[position][1] for position in batch]
    p, t = max(map(len, before)), max(map(len, after))
    pad, device = loaded.tokenizer.pad_token_id, loaded.device
    seen = token_pass(
        loaded.model,
        prompt_ids_BP=torch.tensor([[pad] * (p - len(ids)) + list(ids) for ids in before], device=device),
        prompt_mask_BP=torch.tensor([[False] * (p - len(ids)) + [True] * len(ids) for ids in before], device=device),
        ids_BT=torch.tensor([list(ids) + [pad] * (t - len(ids)) for ids in after], device=device),
        mask_BT=torch.tensor([[True] * len(ids) + [False] * (t - len(ids)) for ids in after], device=device),
        temperature=1.0, chunk_elements=chunk_elements, share_prompt=share_prompt,
    )  # fmt: skip
    return [float(value) for value in seen.logp_BT.double().sum(-1)]
