"""A prompt computed once for all of its completions: rows with the same prompt become one tree.

    prompt a | completion 1 | completion 2 | ... | padding

Every completion attends to the prompt and to itself, at the positions it would have on its own, so hidden
states and gradients are those of separate rows. Nothing is padded inside a tree, and the last token of a
completion, which predicts nothing, is left out.

Legend: ``B`` rows, ``P`` prompt tokens (left-padded), ``T`` completion tokens (right-padded), ``R`` trees,
``L`` tokens of the longest tree, ``N`` completion tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.models.anatomy import decoder_body


@dataclass(frozen=True, kw_only=True)
class Trees:
    """Inputs of a body that takes a four-dimensional mask, and where the answers are.

    ``mask_R1LL`` is true where the row's position may attend to the column's. ``row_N`` and ``column_N``
    are the places of the hidden states before each completion token, row by row of the batch.
    """

    ids_RL: Tensor
    position_RL: Tensor
    mask_R1LL: Tensor
    row_N: Tensor
    column_N: Tensor


SHARES = ("sdpa", "eager")
"""Attention implementations that take a mask of any shape."""


def can_share(model: nn.Module) -> bool:
    """Whether every layer attends to all that came before it, under a mask we may choose."""
    settings = decoder_body(model).config
    kinds = set(getattr(settings, "layer_types", None) or ["full_attention"])
    return getattr(settings, "_attn_implementation", None) in SHARES and kinds == {"full_attention"}


def worth_sharing(model: nn.Module, prompt_mask_BP: Tensor, mask_BT: Tensor, groups: int) -> bool:
    """Whether trees take fewer operations than padded rows.

    Trees save tokens and pay in attention, which is computed over the whole tree: a long prompt with short
    completions is worth it, a short prompt with long ones is not.
    """
    if groups == len(mask_BT):
        return False
    settings = decoder_body(model).config
    hidden, layers = int(settings.hidden_size), int(settings.num_hidden_layers)
    inner = int(getattr(settings, "intermediate_size", 4 * hidden))
    linear = 2 * layers * (4 * hidden**2 + 3 * hidden * inner)
    attention = 4 * layers * hidden
    rows, width = len(mask_BT), prompt_mask_BP.shape[1] + mask_BT.shape[1]
    longest = prompt_mask_BP.shape[1] + int(mask_BT.sum()) // groups
    separate = rows * width * (linear + attention * width)
    shared = groups * longest * (linear + attention * longest)
    return shared < separate


def same_prompt(prompt_ids_BP: Tensor, prompt_mask_BP: Tensor) -> list[list[int]]:
    """Rows with the same prompt, in the order of their first."""
    found: dict[tuple[int, ...], list[int]] = {}
    ids, mask = prompt_ids_BP.tolist(), prompt_mask_BP.tolist()
    for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
        found.setdefault(tuple(token for token, is_real in zip(tokens, real, strict=True) if is_real), []).append(row)
    return list(found.values())


def trees_if_worth(
    model: nn.Module, prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor
) -> Trees | None:
    """Trees, or None where the model cannot take them or rows of their own are cheaper.

    The answer depends on the batch and the architecture only, so that a policy and its reference agree.
    """
    if len(mask_BT) < 2 or not can_share(model):
        return None
    families = same_prompt(prompt_ids_BP, prompt_mask_BP)
    if not worth_sharing(model, prompt_mask_BP, mask_BT, len(families)):
        return None
    return build_trees(prompt_ids_BP, prompt_mask_BP, ids_BT, mask_BT, families=families)


def tree_hidden(model: nn.Module, trees: Trees) -> Tensor:
    """Hidden state before each completion token, ``[N, H]``, rows of the batch in reading order."""
    body: Any = decoder_body(model)
    mask: Tensor = trees.mask_R1LL
    if body.config._attn_implementation == "eager":  # which adds its mask to the scores
        dtype = next(body.parameters()).dtype
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    out = body(input_ids=trees.ids_RL, attention_mask=mask, position_ids=trees.position_RL, use_cache=False)
    hidden_NH: Tensor = out.last_hidden_state[trees.row_N, trees.column_N]
    return hidden_NH


def build_trees(
    prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor, *, families: list[list[int]]
) -> Trees:
    """One tree per family of rows (:func:`same_prompt`); tensors are made once, on the batch's device."""
    sizes = mask_BT.bool().sum(-1).tolist()
    prompts = prompt_mask_BP.bool().sum(-1).tolist()
    prompt_ids, ids = prompt_ids_BP.tolist(), ids_BT.tolist()
    tokens: list[list[int]] = []
    positions: list[list[int]] = []
    segments: list[list[int]] = []
    place: dict[int, tuple[int, list[int]]] = {}
    for tree, rows in enumerate(families):
        length = prompts[rows[0]]
        line = prompt_ids[rows[0]][-length:]
        at, segment = list(range(length)), [0] * length
        for number, row in enumerate(rows, start=1):
            kept = max(sizes[row] - 1, 0)
            before = [length - 1, *range(len(line), len(line) + kept)]
            place[row] = (tree, before[: sizes[row]])
            line, at = line + ids[row][:kept], at + list(range(length, length + kept))
            segment += [number] * kept
        tokens.append(line)
        positions.append(at)
        segments.append(segment)
    return _tensors(tokens, positions, segments, place, device=ids_BT.device)


def _tensors(
    tokens: list[list[int]], positions: list[list[int]], segments: list[list[int]],
    place: dict[int, tuple[int, list[int]]], *, device: torch.device,
) -> Trees:  # fmt: skip
    longest = max(map(len, tokens))

    def padded(lines: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([line + [fill] * (longest - len(line)) for line in lines], device=device)

    segment_RL = padded(segments, -1)
    index_L = torch.arange(longest, device=device)
    earlier_LL = index_L[:, None] >= index_L[None, :]
    seen_RLL = (segment_RL[:, None, :] == 0) | (segment_RL[:, None, :] == segment_RL[:, :, None])
    itself_LL = index_L[:, None] == index_L[None, :]
    mask_RLL = (earlier_LL & seen_RLL & (segment_RL >= 0)[:, None, :]) | itself_LL
    ordered = [place[row] for row in range(len(place))]
    return Trees(
        ids_RL=padded(tokens, 0),
        position_RL=padded(positions, 0),
        mask_R1LL=mask_RLL[:, None],
        row_N=torch.tensor([tree for tree, before in ordered for _ in before], device=device),
        column_N=torch.tensor([column for _, before in ordered for column in before], device=device),
    )
