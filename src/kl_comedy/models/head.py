"""From hidden states to log-probs, exact KLs, entropy and total variation, without ever holding ``[N, V]``.

The backward pass is written by hand: with the log-probs of a chunk at hand (kept where everything fits one
chunk, else computed again), the gradient of every column with respect to the logits is one expression in the
probabilities, built in place. Autograd would hold several tensors ``[n, V]`` for it.

    d logp_i / d logits       = 1_i - p
    d KL(p || q) / d logits   = p (log p - log q - KL)
    d KL(q || p) / d logits   = p - q

Legend: ``N`` positions, ``n`` rows of one chunk, ``H`` hidden width, ``V`` vocabulary. The matrix product runs in the
dtype of the weights, as it does in a sampler; temperature, softmax and sums in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_comedy.models.introspection import Head
from kl_comedy.models.onednn_linear import product


@dataclass(frozen=True, kw_only=True)
class RequestedQuantities:
    """The columns after the log-prob, in this order; entropy and total variation carry no gradient."""

    kl: bool = False
    forward_kl: bool = False
    entropy: bool = False
    total_variation: bool = False

    @property
    def need_reference(self) -> bool:
        return self.kl or self.forward_kl or self.total_variation


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """The reference policy's hidden states ``[N, H]`` and head."""

    hidden_NH: Tensor
    head: Head


def head_columns(
    hidden_NH: Tensor,
    head: Head,
    ids_N: Tensor,
    *,
    temperature: float,
    chunk_elements: int,
    requested: RequestedQuantities,
    reference: ReferenceHead | None = None,
) -> list[Tensor]:
    """Columns ``[N]``: log-prob of ``ids_N``, then the ``requested`` ones, at most ``chunk_elements`` logits at a time.

    Log-prob and KLs are differentiable in ``hidden_NH`` and ``head``. A chunk is whole rows, so every sum over the
    vocabulary is one reduction whatever the chunk size. Raises :class:`ValueError` for a missing ``reference``.
    """
    if requested.need_reference and reference is None:
        raise ValueError("an exact value needs a reference pass that kept its hidden states")
    rows = max(1, chunk_elements // head[0].shape[0])
    plan = _Plan(ids_N=ids_N, temperature=temperature, rows=rows, requested=requested, reference=reference)
    columns: Sequence[Tensor] = _HeadColumns.apply(hidden_NH, *head, plan)  # type: ignore[no-untyped-call]
    return list(columns)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    ids_N: Tensor
    temperature: float
    rows: int
    requested: RequestedQuantities
    reference: ReferenceHead | None

    def chunks(self) -> Iterator[slice]:
        for start in range(0, max(len(self.ids_N), 1), self.rows):
            yield slice(start, start + self.rows)

    @property
    def single(self) -> bool:
        return len(self.ids_N) <= self.rows

    @property
    def differentiates_kl(self) -> bool:
        return self.requested.kl or self.requested.forward_kl

    def reference_logp(self, part: slice) -> Tensor | None:
        """The reference's log-probs ``[n, V]``."""
        if self.reference is None or not self.requested.need_reference:
            return None
        return log_softmax(self.reference.hidden_NH[part], *self.reference.head, self.temperature)


class _HeadColumns(torch.autograd.Function):
    """See :func:`head_columns`."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> Any:
        pieces: list[list[Tensor]] = []
        logp_nV = logq_nV = None
        for part in plan.chunks():
            logp_nV = log_softmax(hidden_NH[part], weight_VH, bias_V, plan.temperature)
            logq_nV = plan.reference_logp(part)
            pieces.append(_columns(logp_nV, logq_nV, plan.ids_N[part], plan.requested))
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        differentiable = 1 + plan.requested.kl + plan.requested.forward_kl
        ctx.mark_non_differentiable(*columns[differentiable:])
        ctx.plan = plan
        chunk_logps = (logp_nV, logq_nV if plan.differentiates_kl else None) if plan.single else (None, None)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, columns[1] if plan.requested.kl else None, *chunk_logps)
        return tuple(columns)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_NH, weight_VH, bias_V, kl_N, *chunk_logps = ctx.saved_tensors
        plan: _Plan = ctx.plan
        hidden_grad = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        for part in plan.chunks():
            logp_nV, logq_nV = chunk_logps
            if logp_nV is None:
                logp_nV = log_softmax(hidden_NH[part], weight_VH, bias_V, plan.temperature)
                logq_nV = plan.reference_logp(part) if plan.differentiates_kl else None
            kl_n = None if kl_N is None else kl_N[part]
            grad_nV = _logits_gradient(logp_nV, logq_nV, plan, part, [grad[part] for grad in gradients], kl_n)
            narrow_nV = grad_nV.to(weight_VH.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = product(narrow_nV, weight_VH.t()).to(hidden_grad.dtype)
            if weight_grad is not None:
                rows_nH = hidden_NH[part].to(weight_VH.dtype)
                if wide == weight_VH.dtype:
                    weight_grad.addmm_(narrow_nV.t(), rows_nH)
                else:
                    weight_grad += narrow_nV.t() @ rows_nH
            if bias_grad is not None:
                bias_grad += grad_nV.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight_VH.dtype),
            None if bias_grad is None else bias_grad.to(bias_V.dtype),
            None,
        )


def _logits_gradient(
    logp_nV: Tensor,
    logq_nV: Tensor | None,
    plan: _Plan,
    part: slice,
    gradients: Sequence[Tensor],
    kl_n: Tensor | None,
) -> Tensor:
    """The gradient ``[n, V]`` of the logits; ``gradients`` are those of the columns."""
    column_gradients = iter(gradients)
    logp_grad_n = next(column_gradients)
    kl_grad_n = next(column_gradients) if plan.requested.kl else None
    forward_grad_n = next(column_gradients) if plan.requested.forward_kl else None
    share_n = -logp_grad_n
    if kl_grad_n is not None:
        share_n = share_n - kl_grad_n * kl_n
    if forward_grad_n is not None:
        share_n = share_n + forward_grad_n
    grad_nV = logp_nV.exp()
    if kl_grad_n is not None and logq_nV is not None:
        grad_nV *= (logp_nV - logq_nV).mul_(kl_grad_n[:, None]).add_(share_n[:, None])
    else:
        grad_nV *= share_n[:, None]
    if forward_grad_n is not None and logq_nV is not None:
        grad_nV -= logq_nV.exp().mul_(forward_grad_n[:, None])
    grad_nV.scatter_add_(1, plan.ids_N[part][:, None], logp_grad_n[:, None])
    return grad_nV if plan.temperature == 1 else grad_nV.div_(plan.temperature)


def _columns(logp_nV: Tensor, logq_nV: Tensor | None, ids_n: Tensor, requested: RequestedQuantities) -> list[Tensor]:
    """Columns ``[n]`` of one chunk. A KL is zero bit by bit where both distributions are the same."""
    columns = [logp_nV.gather(1, ids_n[:, None])[:, 0]]
    if requested.kl and logq_nV is not None:
        columns.append((logp_nV.exp().mul_(logp_nV - logq_nV)).sum(1))
    if requested.forward_kl and logq_nV is not None:
        columns.append(-(logq_nV.exp().mul_(logp_nV - logq_nV)).sum(1) + 0.0)
    if requested.entropy:
        columns.append(-(logp_nV.exp().mul_(logp_nV)).sum(1))
    if requested.total_variation and logq_nV is not None:
        columns.append(0.5 * logp_nV.exp().sub_(logq_nV.exp()).abs_().sum(1))
    return columns


def log_softmax(hidden_nH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """``log_softmax(head(hidden) / temperature)`` in float32 or wider, whatever autocast is in force."""
    with torch.autocast(device_type=hidden_nH.device.type, enabled=False):
        logits_nV = product(hidden_nH.to(weight_VH.dtype), weight_VH, bias_V)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return (logits_nV if temperature == 1 else logits_nV.div_(temperature)).log_softmax(-1)
