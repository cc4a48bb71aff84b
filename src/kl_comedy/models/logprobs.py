"""Token log-probs, exact KL, total variation and entropy in one pass that never holds ``[B, T, V]``.

    prompt [B, P] + completion [B, T] -> body -> hidden of the N = mask.sum() positions -> head, row chunks -> [B, T]

The body attends to ``real_BT``, the tokens of a completion. The head sees ``mask_BT`` alone, the trained ones: what an
environment wrote has no log-prob, no exact KL and no entropy, and costs no logits. Where a rollout has several rows,
the body reads these (:class:`~kl_comedy.records.ModelRows`), and everything after it is of the rollout.

Shape legend: ``B`` sequences, ``P`` prompt tokens (left-padded), ``T`` completion tokens (right-padded), ``N``
completion tokens inside the mask, ``H`` hidden width, ``V`` vocabulary, ``K`` top tokens. All values are in nats (total
variation: a probability) at the sampling temperature, in float32 (float64 for a float64 model), and exactly zero
outside the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kl_comedy.kl.estimators import TopTokens
from kl_comedy.models.attention import pack_batch, packed_hidden, use_layout_attention
from kl_comedy.models.head import HeadSettings, ReferenceHead, column_names, head_columns
from kl_comedy.models.introspection import decoder_body, head_dtype, head_weights, run_inside_fsdp_forward
from kl_comedy.models.types import PassOptions, ReferencePass, TokenPass, Wanted
from kl_comedy.models.weights import full_tensor
from kl_comedy.records import KeptSets, ModelRows

LOGP_ALONE = Wanted()
"""What a pass computes where nothing but log-probs is needed."""


def token_pass(
    model: nn.Module,
    options: PassOptions,
    wanted: Wanted = LOGP_ALONE,
    *,
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    ids_BT: Tensor,
    mask_BT: Tensor,
    real_BT: Tensor | None = None,
    rows: ModelRows | None = None,
    reference: ReferencePass | None = None,
    sampler_top: tuple[Tensor, Tensor] | None = None,
    kept: KeptSets | None = None,
) -> TokenPass:
    """Pass ``model`` over prompts and completions; see :class:`TokenPass` for the result.

    ``real_BT``: the tokens that are attended to; None for ``mask_BT``, all of which are then trained. ``rows``: what
    the model reads in the place of prompts and completions; it has the tokens of ``mask_BT``, in the same order.
    What is ``wanted`` against a reference needs its ``reference`` pass over the same batch, at the same temperature and
    with the same ``share_prompt``. With equal weights every divergence is then exactly 0.0, because both sides run the
    same operations. ``sampler_top``: ids and log-probs ``[B, T, K]`` of the sampler's likeliest tokens, for requests of
    them; its log-probs are then in the place of the reference's. ``kept``: the tokens over which the policy is
    renormalized, for each of ``mask_BT`` in reading order. Raises :class:`ValueError` on shapes, padding sides, or a
    reference or kept sets that do not fit.
    """
    if real_BT is None:
        real_BT = mask_BT
    check_batch(prompt_ids_BP, prompt_mask_BP, ids_BT, mask_BT, real_BT, temperature=options.temperature)
    mask_BT = mask_BT.bool()
    if rows is None:
        rows = ModelRows(
            prompt_ids_RP=prompt_ids_BP, prompt_mask_RP=prompt_mask_BP, ids_RT=ids_BT, real_RT=real_BT, mask_RT=mask_BT
        )
    else:
        check_rows(rows, ids_BT, mask_BT, temperature=options.temperature)
    likeliest = None
    if reference is not None:
        likeliest = reference.top
    # A teacher behind a server has no head, and a term of its top tokens needs none.
    needs_reference_head = wanted.compares_vocabularies or (wanted.compares_top and likeliest is None)
    sampler_top_NK = None
    if sampler_top is not None:
        sampler_top_NK = (sampler_top[0][mask_BT], sampler_top[1][mask_BT])

    def run() -> tuple[Tensor, ...]:
        hidden_NH = completion_hidden(
            model,
            rows.prompt_ids_RP,
            rows.prompt_mask_RP,
            rows.ids_RT,
            rows.real_RT,
            rows.mask_RT,
            share_prompt=options.share_prompt,
        )
        reference_head = None
        if needs_reference_head and reference is not None:
            reference_head = _reference_head(reference, len(hidden_NH), options.temperature)
        columns = head_columns(
            hidden_NH,
            head_weights(model),
            ids_BT[mask_BT],
            HeadSettings(
                temperature=options.temperature,
                chunk_elements=options.chunk_elements,
                factor_dtype=head_dtype(model),
            ),
            wanted,
            reference=reference_head,
            likeliest=likeliest,
            sampler_top=sampler_top_NK,
            kept=kept,
        )
        # A gradient that nobody reads would keep the graph of the whole body alive.
        if not wanted.hidden_gradient:
            hidden_NH = hidden_NH.detach()
        return (hidden_NH, *columns.values())

    # Inside the forward of the root FSDP unit, which gathers the head's weights; it takes and returns tensors alone.
    hidden_NH, *columns = run_inside_fsdp_forward(model, run)
    columns_BT = {name: _rows_of(column, mask_BT) for name, column in zip(column_names(wanted), columns, strict=True)}
    kept_hidden_NH = None
    if wanted.hidden:
        kept_hidden_NH = hidden_NH
    return _token_pass_of(columns_BT, wanted, ids_BT, mask_BT, hidden_NH=kept_hidden_NH)


def _token_pass_of(
    columns_BT: dict[str, Tensor], wanted: Wanted, ids_BT: Tensor, mask_BT: Tensor, *, hidden_NH: Tensor | None
) -> TokenPass:
    """The head's columns by the names of their fields; mixtures and lists of top tokens by what asked for them."""
    mixture = {share: columns_BT[f"mixture{n}"] for n, share in enumerate(wanted.mixtures)}
    top = {}
    for n, request in enumerate(wanted.top):
        is_listed_BT = (columns_BT[f"top{n}_ids"] == ids_BT[..., None]).any(-1)
        top[request] = TopTokens(
            logp_BTK=columns_BT[f"top{n}_logp"],
            ref_logp_BTK=columns_BT[f"top{n}_ref_logp"],
            inside_BT=is_listed_BT & mask_BT,
        )
    return TokenPass(
        logp_BT=columns_BT["logp"],
        kl_BT=columns_BT.get("kl"),
        forward_kl_BT=columns_BT.get("forward_kl"),
        entropy_BT=columns_BT.get("entropy"),
        total_variation_BT=columns_BT.get("total_variation"),
        certainty_BT=columns_BT.get("certainty"),
        reference_certainty_BT=columns_BT.get("reference_certainty"),
        log_kept_BT=columns_BT.get("log_kept"),
        reference_log_kept_BT=columns_BT.get("reference_log_kept"),
        hidden_NH=hidden_NH,
        mixture=mixture,
        top=top,
    )


def _rows_of(column: Tensor, mask_BT: Tensor) -> Tensor:
    """A column ``[N, ...]`` at its places ``[B, T, ...]``, zero outside the mask."""
    rows = column.new_zeros(*mask_BT.shape, *column.shape[1:])
    further_axes = [1] * (column.ndim - 1)
    return rows.masked_scatter(mask_BT.reshape(*mask_BT.shape, *further_axes), column)


def _reference_head(reference: ReferencePass, rows: int, temperature: float) -> ReferenceHead:
    """The reference's hidden states and its whole head (a sharded reference keeps its head in shards)."""
    if reference.temperature != temperature:
        raise ValueError(f"the reference pass is at temperature {reference.temperature}, the policy at {temperature}")
    if reference.hidden_NH is None or reference.head is None:
        raise ValueError("a teacher behind a server gives log-probs of its likeliest tokens, not of the vocabulary")
    if len(reference.hidden_NH) != rows:
        raise ValueError(f"the reference pass has {len(reference.hidden_NH)} tokens, the batch {rows}")
    weight, bias = reference.head
    if bias is not None:
        bias = full_tensor(bias)
    return reference.hidden_NH, (full_tensor(weight), bias)


def check_batch(
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    ids_BT: Tensor,
    mask_BT: Tensor,
    real_BT: Tensor,
    *,
    temperature: float,
) -> None:
    """Raise :class:`ValueError` for shapes, padding sides, a mask or a temperature that do not fit."""
    if prompt_ids_BP.ndim != 2 or prompt_ids_BP.shape != prompt_mask_BP.shape:
        raise ValueError(f"prompt ids {tuple(prompt_ids_BP.shape)} and mask {tuple(prompt_mask_BP.shape)} differ")
    if ids_BT.ndim != 2 or ids_BT.shape != mask_BT.shape or len(ids_BT) != len(prompt_ids_BP):
        raise ValueError(f"completion ids {tuple(ids_BT.shape)} and mask {tuple(mask_BT.shape)} do not fit")
    if real_BT.shape != mask_BT.shape:
        raise ValueError(f"real_BT {tuple(real_BT.shape)} and mask_BT {tuple(mask_BT.shape)} differ")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive to have log-probs, got {temperature}")
    prompt_BP = prompt_mask_BP.bool()
    attended_BT = real_BT.bool()
    token_after_padding_BT = attended_BT[:, 1:] & ~attended_BT[:, :-1]
    if bool(token_after_padding_BT.any()):
        name = "mask_BT" if real_BT is mask_BT else "real_BT"
        raise ValueError(f"{name} must be right-padded: ones, then zeros")
    if real_BT is not mask_BT:
        outside_BT = mask_BT.bool() & ~attended_BT
        if bool(outside_BT.any()):
            row, column = (int(position) for position in outside_BT.nonzero()[0])
            raise ValueError(f"mask_BT has a trained token at [{row}, {column}], where real_BT has padding")
    has_tokens = prompt_BP.shape[1] > 0 and bool(prompt_BP[:, -1].all())
    padding_after_token_BP = prompt_BP[:, :-1] & ~prompt_BP[:, 1:]
    if not has_tokens or bool(padding_after_token_BP.any()):
        raise ValueError("prompt_mask_BP must be left-padded, with at least one token in every prompt")


def check_rows(rows: ModelRows, ids_BT: Tensor, mask_BT: Tensor, *, temperature: float) -> None:
    """Raise :class:`ValueError` for rows that do not fit each other, or have other trained tokens than the batch."""
    check_batch(
        rows.prompt_ids_RP,
        rows.prompt_mask_RP,
        rows.ids_RT,
        rows.mask_RT,
        rows.real_RT,
        temperature=temperature,
    )
    if not torch.equal(rows.ids_RT[rows.mask_RT.bool()], ids_BT[mask_BT]):
        raise ValueError("rows have other trained tokens than ids_BT, or in another order")


def completion_hidden(
    model: nn.Module,
    prompt_ids_BP: Tensor,
    prompt_mask_BP: Tensor,
    ids_BT: Tensor,
    real_BT: Tensor,
    mask_BT: Tensor | None = None,
    *,
    share_prompt: bool = True,
) -> Tensor:
    """Hidden state before each token of ``mask_BT`` (None: of ``real_BT``), ``[N, H]``, rows in reading order.

    Positions count real tokens, so that padding changes nothing. Rows with the same prompt share its
    computation where the attention allows it (:mod:`kl_comedy.models.attention`), unless ``share_prompt`` is off.
    """
    if share_prompt and use_layout_attention(model):
        hidden_NH = packed_hidden(model, pack_batch(prompt_ids_BP, prompt_mask_BP, ids_BT, real_BT))
        if mask_BT is None or mask_BT is real_BT:
            return hidden_NH
        return hidden_NH[mask_BT.bool()[real_BT.bool()]]
    ids_BS = torch.cat([prompt_ids_BP, ids_BT], dim=1)
    real_BS = torch.cat([prompt_mask_BP.bool(), real_BT.bool()], dim=1)
    # By real tokens: the padding on the left must not move the positions of a prompt.
    position_BS = (real_BS.long().cumsum(1) - 1).clamp(min=0)
    body: Any = decoder_body(model)
    out = body(input_ids=ids_BS, attention_mask=real_BS.long(), position_ids=position_BS, use_cache=False)
    hidden_BSH: Tensor = out.last_hidden_state
    start = prompt_ids_BP.shape[1] - 1  # the last token of the prompt predicts the first of the completion
    selected_BT = real_BT if mask_BT is None else mask_BT
    return hidden_BSH[:, start : start + ids_BT.shape[1]][selected_BT.bool()]
