"""Token log-probs, exact KL, total variation and entropy in one pass that never holds ``[B, T, V]``.

    prompt [B, P] + completion [B, T] -> body -> hidden of the N = mask.sum() positions -> head, row chunks -> [B, T]

Shape legend: ``B`` sequences, ``P`` prompt tokens (left-padded), ``T`` completion tokens (right-padded), ``N``
completion tokens inside the mask, ``H`` hidden width, ``V`` vocabulary, ``K`` top tokens. All values are in nats (total
variation: a probability) at the sampling temperature, in float32 (float64 for a float64 model), and exactly zero
outside the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.kl.estimators import TopTokens
from kl_comedy.models.attention import pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.head import AGAINST_REFERENCE, TOP_COLUMNS, ReferenceHead, TopRequest, head_columns
from kl_comedy.models.introspection import decoder_body, head_dtype, head_weights, run_inside_fsdp_forward
from kl_comedy.models.weights import full_tensor

if TYPE_CHECKING:
    from kl_comedy.models.reference import ReferencePass


@dataclass(frozen=True, kw_only=True)
class TokenPass:
    """Result of one pass of a policy over completions; a quantity that was not requested is None.

    ``logp_BT`` log-prob of each completion token; differentiable.
    ``kl_BT`` exact ``KL(pi || ref)`` of the next-token distributions at the prefix of each token;
    ``forward_kl_BT`` exact ``KL(ref || pi)``; both differentiable in the policy only.
    ``mixture`` by the reference's share: exact Jensen-Shannon divergences, differentiable in the policy only.
    ``entropy_BT`` entropy of the next-token distribution; detached: it is a metric here.
    ``total_variation_BT`` total variation ``sum |pi - ref| / 2`` of the next-token distributions, in [0, 1]; detached.
    ``certainty_BT``, ``reference_certainty_BT``: ``1 - H / log V`` of the next-token distribution; detached.
    ``hidden_NH`` hidden state before each masked token, row by row; detached unless ``detach_hidden=False``.
    ``top`` by request (``k``, and whose likeliest tokens): the :class:`TopTokens` of each prefix.
    """

    logp_BT: Tensor
    kl_BT: Tensor | None
    forward_kl_BT: Tensor | None
    entropy_BT: Tensor | None
    total_variation_BT: Tensor | None
    hidden_NH: Tensor | None
    certainty_BT: Tensor | None = None
    reference_certainty_BT: Tensor | None = None
    mixture: Mapping[float, Tensor] = field(default_factory=dict)
    top: Mapping[TopRequest, TopTokens] = field(default_factory=dict)


def token_pass(
    model: nn.Module,
    *,
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    ids_BT: Tensor,
    mask_BT: Tensor,
    temperature: float,
    chunk_elements: int,
    reference: ReferencePass | None = None,
    kl: bool = False,
    forward_kl: bool = False,
    entropy: bool = False,
    total_variation: bool = False,
    certainty: bool = False,
    reference_certainty: bool = False,
    mixtures: Sequence[float] = (),
    top: Sequence[TopRequest] = (),
    keep_hidden: bool = False,
    detach_hidden: bool = True,
    share_prompt: bool = True,
) -> TokenPass:
    """Pass ``model`` over prompts and completions; see :class:`TokenPass` for the result.

    ``share_prompt`` lets rows with the same prompt share its computation; the reference's pass must agree.
    ``chunk_elements`` bounds the logits in memory (at least one row). ``kl``, ``forward_kl``, ``total_variation``,
    ``mixtures`` and ``top`` need a ``reference`` pass of the same batch and temperature. With equal weights all but the
    last are exactly 0.0, because both sides run the same operations. Raises :class:`ValueError` on shapes, padding
    sides or a reference that does not fit.
    """
    flags = {"kl": kl, "forward_kl": forward_kl, "entropy": entropy, "total_variation": total_variation}
    flags |= {"certainty": certainty, "reference_certainty": reference_certainty}
    requested = [name for name, wanted in flags.items() if wanted]
    mask_BT = check_batch(prompt_ids_BP, prompt_mask_BP, ids_BT, mask_BT, temperature=temperature)
    asked = mixtures or not AGAINST_REFERENCE.isdisjoint(requested)
    compared = reference if asked or (top and (reference is None or reference.top is None)) else None

    def run() -> tuple[Tensor, ...]:
        hidden_NH = completion_hidden(model, prompt_ids_BP, prompt_mask_BP, ids_BT, mask_BT, share_prompt=share_prompt)
        columns = head_columns(
            hidden_NH,
            head_weights(model),
            ids_BT[mask_BT],
            temperature=temperature,
            chunk_elements=chunk_elements,
            requested=requested,
            mixtures=mixtures,
            top=top,
            reference=None if compared is None else _reference_head(compared, len(hidden_NH), temperature),
            given=None if reference is None else reference.top,
            factor_dtype=head_dtype(model),
        )
        return (hidden_NH.detach() if detach_hidden else hidden_NH, *columns.values())

    hidden_NH, *columns = run_inside_fsdp_forward(model, run)
    names = ["logp", *requested, *(f"mixture{n}" for n in range(len(mixtures)))]
    names += [f"top{n}_{column}" for n in range(len(top)) for column in TOP_COLUMNS]
    columns_BT = {name: _rows_of(column, mask_BT) for name, column in zip(names, columns, strict=True)}
    return TokenPass(
        logp_BT=columns_BT["logp"],
        **{f"{name}_BT": columns_BT.get(name) for name in flags},
        hidden_NH=hidden_NH if keep_hidden else None,
        mixture={share: columns_BT[f"mixture{n}"] for n, share in enumerate(mixtures)},
        top={
            request: TopTokens(
                logp_BTK=columns_BT[f"top{n}_logp"],
                ref_logp_BTK=columns_BT[f"top{n}_ref_logp"],
                inside_BT=(columns_BT[f"top{n}_ids"] == ids_BT[..., None]).any(-1) & mask_BT,
            )
            for n, request in enumerate(top)
        },
    )


def _rows_of(column: Tensor, mask_BT: Tensor) -> Tensor:
    """A column ``[N, ...]`` at its places ``[B, T, ...]``, zero outside the mask."""
    rows = column.new_zeros(*mask_BT.shape, *column.shape[1:])
    return rows.masked_scatter(mask_BT.reshape(*mask_BT.shape, *[1] * (column.ndim - 1)), column)


def _reference_head(reference: ReferencePass, rows: int, temperature: float) -> ReferenceHead:
    """The reference's hidden states and its whole head (a sharded reference keeps its head in shards)."""
    if reference.temperature != temperature:
        raise ValueError(f"the reference pass is at temperature {reference.temperature}, the policy at {temperature}")
    if reference.hidden_NH is None or reference.head is None:
        raise ValueError("a teacher behind a server gives log-probs of its likeliest tokens, not of the vocabulary")
    if len(reference.hidden_NH) != rows:
        raise ValueError(f"the reference pass has {len(reference.hidden_NH)} tokens, the batch {rows}")
    weight, bias = reference.head
    return reference.hidden_NH, (full_tensor(weight), None if bias is None else full_tensor(bias))


def check_batch(
    prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BT: Tensor, mask_BT: Tensor, *, temperature: float
) -> Tensor:
    """Check shapes, padding sides and temperature; return the completion mask as bool."""
    if prompt_ids_BP.ndim != 2 or prompt_ids_BP.shape != prompt_mask_BP.shape:
        raise ValueError(f"prompt ids {tuple(prompt_ids_BP.shape)} and mask {tuple(prompt_mask_BP.shape)} differ")
    if ids_BT.ndim != 2 or ids_BT.shape != mask_BT.shape or len(ids_BT) != len(prompt_ids_BP):
        raise ValueError(f"completion ids {tuple(ids_BT.shape)} and mask {tuple(mask_BT.shape)} do not fit")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to have log-probs, got {temperature}")
    mask, prompt = mask_BT.bool(), prompt_mask_BP.bool()
    if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        raise ValueError("mask_BT must be right-padded: ones, then zeros")
    if prompt.shape[1] == 0 or bool((prompt[:, :-1] & ~prompt[:, 1:]).any()) or not bool(prompt[:, -1].all()):
        raise ValueError("prompt_mask_BP must be left-padded, with at least one token in every prompt")
    return mask


def completion_hidden(
    model: nn.Module,
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    ids_BT: Tensor,
    mask_BT: Tensor,
    *,
    share_prompt: bool = True,
) -> Tensor:
    """Hidden state before each masked completion token, ``[N, H]``, rows in reading order.

    Positions count real tokens, so that padding changes nothing. Rows with the same prompt share its
    computation where the attention allows it (:mod:`kl_comedy.models.attention`), unless ``share_prompt`` is off.
    """
    if share_prompt and use_layout_attention(model):
        return packed_hidden(model, pack_batch(prompt_ids_BP, prompt_mask_BP, ids_BT, mask_BT))
    ids_BS = torch.cat([prompt_ids_BP, ids_BT], dim=1)
    real_BS = torch.cat([prompt_mask_BP.bool(), mask_BT.bool()], dim=1)
    position_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
    body: Any = decoder_body(model)
    out = body(input_ids=ids_BS, attention_mask=real_BS.long(), position_ids=position_BS, use_cache=False)
    hidden_BSH: Tensor = out.last_hidden_state
    start = prompt_ids_BP.shape[1] - 1
    return hidden_BSH[:, start : start + ids_BT.shape[1]][mask_BT.bool()]
