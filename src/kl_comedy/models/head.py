"""From hidden states to log-probs, exact KLs, entropy and total variation, without ever holding ``[N, V]``.

Also the log-probs of the ``k`` likeliest tokens of either policy at each position, where a top-k KL asks for them.

The backward pass is written by hand: with the log-probs of a chunk at hand (kept where everything fits one
chunk, else computed again), the gradient of every column with respect to the logits is one expression in the
probabilities, built in place. Autograd would hold several tensors ``[n, V]`` for it.

    d logp_i / d logits       = 1_i - p
    d KL(p || q) / d logits   = p (log p - log q - KL)
    d KL(q || p) / d logits   = p - q
    d JS_b(p, q) / d logits   = (1 - b) p (log p - log m - KL(p || m)),  m = b q + (1 - b) p

Legend: ``N`` positions, ``n`` rows of one chunk, ``H`` hidden width, ``V`` vocabulary, ``K`` top tokens. The matrix
product runs in the dtype of the weights, as it does in a sampler, or on factors rounded to ``factor_dtype`` with sums
in float32 (``model.head_dtype``); temperature, softmax and sums in float32 or wider, whatever autocast is in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_comedy.cuda import wide_product
from kl_comedy.kl.estimators import above_mixture, certainty, jensen_shannon
from kl_comedy.models.introspection import Head
from kl_comedy.models.onednn_linear import product

QUANTITIES = ("kl", "forward_kl", "entropy", "total_variation", "certainty", "reference_certainty")
"""What can be requested beside the log-prob; all but the KLs carry no gradient."""
AGAINST_REFERENCE = {"kl", "forward_kl", "total_variation", "reference_certainty"}

TopRequest = tuple[int, str]
"""``k``, and whose likeliest tokens: ``policy`` or ``reference``."""

TOP_COLUMNS = ("logp", "ref_logp", "ids")
FINITE_NEVER = -1e4
"""Nats; stands for the log-prob -inf in formulas of two policies. Its exponential is 0 in float32 and float64."""

ReferenceHead = tuple[Tensor, Head]
"""The reference policy's hidden states ``[N, H]`` and head."""


def head_columns(
    hidden_NH: Tensor,
    head: Head,
    ids_N: Tensor,
    *,
    temperature: float,
    chunk_elements: int,
    requested: Sequence[str] = (),
    mixtures: Sequence[float] = (),
    top: Sequence[TopRequest] = (),
    reference: ReferenceHead | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    factor_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Columns ``[N]``: ``logp`` of ``ids_N`` and the ``requested`` :data:`QUANTITIES`.

    Of mixture number n (the reference's share), column ``mixture<n>``: the Jensen-Shannon divergence.
    Of the ``top`` request number n, columns ``[N, K]`` of the top tokens: ``top<n>_logp`` of the policy,
    ``top<n>_ref_logp`` of the reference, ``top<n>_ids``; K is at most the vocabulary. ``given``: ids and
    log-probs ``[N, K]`` of the reference's likeliest tokens where nothing else is known of it.
    At most ``chunk_elements`` logits are held at a time. Log-probs and KLs are differentiable in ``hidden_NH`` and
    ``head``; a column without a gradient costs nothing in the backward pass. A chunk is whole rows, so every sum over
    the vocabulary is one reduction whatever the chunk size. Raises :class:`ValueError` for a missing ``reference``.
    """
    names = [name for name in QUANTITIES if name in requested]
    if given is not None:
        widest = max((min(k, head[0].shape[0]) for k, _ in top), default=0)
        if widest > given[0].shape[1] or any(tokens != "reference" for _, tokens in top):
            raise ValueError(f"of this reference only its {given[0].shape[1]} likeliest tokens are known")
    asked = mixtures or not AGAINST_REFERENCE.isdisjoint(names) or (top and given is None)
    if asked and reference is None:
        raise ValueError("an exact value needs a reference pass that kept its hidden states")
    rows = max(1, chunk_elements // head[0].shape[0])
    plan = _Plan(
        ids_N=ids_N,
        temperature=temperature,
        rows=rows,
        names=names,
        mixtures=mixtures,
        top=top,
        given=given,
        factor_dtype=factor_dtype,
        never_V=never_drawn(head[1]),
    )
    if reference is not None:
        hidden, (weight, bias) = reference
        plan = replace(plan, reference=(hidden, (plan.factor(weight), bias)), reference_never_V=never_drawn(bias))
    columns: Sequence[Tensor] = _HeadColumns.apply(hidden_NH, *head, plan)  # type: ignore[no-untyped-call]
    tops = [f"top{n}_{column}" for n in range(len(top)) for column in TOP_COLUMNS]
    return dict(zip((*plan.columns, *tops), columns, strict=True))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    ids_N: Tensor
    temperature: float
    rows: int
    names: list[str]
    mixtures: Sequence[float]
    top: Sequence[TopRequest]
    given: tuple[Tensor, Tensor] | None
    factor_dtype: torch.dtype | None
    reference: ReferenceHead | None = None
    never_V: Tensor | None = None
    """Tokens that the policy never draws, because their bias is -inf (a padded vocabulary); None without any."""
    reference_never_V: Tensor | None = None
    """The same of the reference."""

    @property
    def columns(self) -> list[str]:
        """The columns before those of top tokens."""
        return ["logp", *self.names, *(f"mixture{n}" for n in range(len(self.mixtures)))]

    def factor(self, weight_VH: Tensor) -> Tensor:
        """The weight as a factor of products: rounded once, not for every chunk."""
        return weight_VH if self.factor_dtype is None else weight_VH.to(self.factor_dtype)

    def log_softmax(self, hidden_nH: Tensor, factor_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        return log_softmax(hidden_nH, factor_VH, bias_V, self.temperature, self.factor_dtype)

    def chunks(self) -> Iterator[slice]:
        for start in range(0, max(len(self.ids_N), 1), self.rows):
            yield slice(start, start + self.rows)

    def reference_logp(self, part: slice) -> Any:
        """The reference's log-probs ``[n, V]``; None without a reference."""
        if self.reference is None:
            return None
        hidden_NH, head = self.reference
        return self.log_softmax(hidden_NH[part], *head)


def never_drawn(bias_V: Tensor | None) -> Tensor | None:
    """Where the head's bias is -inf; None where it is nowhere."""
    if bias_V is None:
        return None
    never_V = torch.isneginf(bias_V.detach())
    return never_V if bool(never_V.any()) else None


def _zero_where(terms_nV: Tensor, never_V: Tensor | None) -> Tensor:
    """``terms_nV`` with zeros for tokens of probability 0, where 0 * -inf and -inf + inf are no numbers."""
    return terms_nV if never_V is None else terms_nV.masked_fill_(never_V, 0.0)


def _finite_where(logp_nV: Any, never_V: Tensor | None) -> Any:
    """``logp_nV`` with a finite log-prob whose exponential is 0 for tokens of probability 0."""
    return logp_nV if never_V is None else logp_nV.masked_fill(never_V, FINITE_NEVER)


class _HeadColumns(torch.autograd.Function):
    """See :func:`head_columns`."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> Any:
        pieces: list[list[Tensor]] = []
        logp_nV = logq_nV = None
        factor_VH = plan.factor(weight_VH)
        for part in plan.chunks():
            logp_nV = plan.log_softmax(hidden_NH[part], factor_VH, bias_V)
            logq_nV = plan.reference_logp(part)
            given = plan.given and (plan.given[0][part], plan.given[1][part])
            tops = [column for request in plan.top for column in _top_columns(logp_nV, logq_nV, given, *request)]
            finite_logp_nV = _finite_where(logp_nV, plan.never_V)
            finite_logq_nV = _finite_where(logq_nV, plan.reference_never_V)
            mixtures = [jensen_shannon(finite_logp_nV, finite_logq_nV, share) for share in plan.mixtures]
            pieces.append([*_columns(logp_nV, logq_nV, part, plan), *mixtures, *tops])
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        kls = [name for name in plan.names if name in ("kl", "forward_kl")]
        first = len(plan.columns)
        reference_columns = [column for n, column in enumerate(columns[first:]) if n % 3]
        ctx.mark_non_differentiable(*columns[1 + len(kls) : 1 + len(plan.names)], *reference_columns)
        ctx.set_materialize_grads(False)
        ctx.plan = plan
        single = len(plan.ids_N) <= plan.rows
        chunk_logps = (logp_nV, logq_nV if kls or plan.mixtures else None) if single else (None, None)
        saved = (columns[1] if "kl" in kls else None, *chunk_logps, *columns[first + 2 :: 3])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, *saved)
        return tuple(columns)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        device = ctx.saved_tensors[0].device
        with torch.autocast(device_type=device.type, enabled=False):  # a training step's is in force
            return _HeadColumns._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, kl_N, logp_nV, logq_nV, *top_ids = ctx.saved_tensors
        plan: _Plan = ctx.plan
        first = len(plan.columns)
        columns = dict(zip(plan.columns, gradients, strict=False))
        given = {name: grad for name, grad in columns.items() if grad is not None}
        tops = [(ids, grad) for ids, grad in zip(top_ids, gradients[first::3], strict=True) if grad is not None]
        if not given and not tops:
            return None, None, None, None
        needs_reference = any(name in ("kl", "forward_kl") or name.startswith("mixture") for name in given)
        saved_chunk = logp_nV is not None
        hidden_grad = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        weight_grad = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        bias_grad = torch.zeros_like(bias_V, dtype=wide) if bias_V is not None and ctx.needs_input_grad[2] else None
        factor_VH = plan.factor(weight_VH)
        for part in plan.chunks():
            if not saved_chunk:
                logp_nV = plan.log_softmax(hidden_NH[part], factor_VH, bias_V)
                logq_nV = plan.reference_logp(part) if needs_reference else None
            kl_n = None if kl_N is None else kl_N[part]
            grad_nV = _logits_gradient(
                logp_nV,
                logq_nV,
                plan,
                plan.ids_N[part],
                {name: grad[part] for name, grad in given.items()},
                kl_n,
                [(ids_NK[part], grad_NK[part]) for ids_NK, grad_NK in tops],
            )
            narrow_nV = grad_nV.to(factor_VH.dtype)
            if hidden_grad is not None:
                hidden_grad[part] = head_product(narrow_nV, factor_VH.t(), None, plan.factor_dtype)
            if weight_grad is not None:
                rows_nH = hidden_NH[part].to(factor_VH.dtype)
                if wide == factor_VH.dtype:
                    weight_grad.addmm_(narrow_nV.t(), rows_nH)
                elif plan.factor_dtype is not None:
                    weight_grad += wide_product(narrow_nV.t(), rows_nH)
                else:
                    weight_grad += narrow_nV.t() @ rows_nH
            if bias_grad is not None:
                bias_grad += grad_nV.sum(0)
        narrow = [None if grad is None else grad.to(weight_VH.dtype) for grad in (weight_grad, bias_grad)]
        return (hidden_grad, *narrow, None)


def _logits_gradient(
    logp_nV: Tensor,
    logq_nV: Any,
    plan: _Plan,
    ids_n: Tensor,
    gradients: dict[str, Tensor],
    kl_n: Any,
    tops: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The gradient ``[n, V]`` of the logits; ``gradients`` are those of the columns, ``tops`` ids and gradients."""
    logp_grad_n, kl_grad_n, forward_grad_n = (gradients.get(name) for name in ("logp", "kl", "forward_kl"))
    if logp_grad_n is not None:
        tops = [(ids_n[:, None], logp_grad_n[:, None]), *tops]
    share_n = logp_nV.new_zeros(len(ids_n))
    for _, top_grad_nK in tops:
        share_n = share_n - top_grad_nK.sum(1)
    if kl_grad_n is not None:
        share_n = share_n - kl_grad_n * kl_n
    if forward_grad_n is not None:
        share_n = share_n + forward_grad_n
    grad_nV = logp_nV.exp()
    if kl_grad_n is not None:
        grad_nV *= (logp_nV - logq_nV).mul_(kl_grad_n[:, None]).add_(share_n[:, None])
        grad_nV = _zero_where(grad_nV, plan.never_V)
    else:
        grad_nV *= share_n[:, None]
    if forward_grad_n is not None:
        grad_nV -= logq_nV.exp().mul_(forward_grad_n[:, None])
    for n, share in enumerate(plan.mixtures):
        if (mixture_grad_n := gradients.get(f"mixture{n}")) is not None:
            finite_logp_nV = _finite_where(logp_nV, plan.never_V)
            finite_logq_nV = _finite_where(logq_nV, plan.reference_never_V)
            from_mixture_nV, p_nV = above_mixture(finite_logp_nV, finite_logq_nV, share), logp_nV.exp()
            from_mixture_nV -= (p_nV * from_mixture_nV).sum(1, keepdim=True)
            grad_nV += p_nV.mul_(from_mixture_nV).mul_((1 - share) * mixture_grad_n[:, None])
    for top_ids_nK, top_grad_nK in tops:
        grad_nV.scatter_add_(1, top_ids_nK, top_grad_nK)
    return grad_nV if plan.temperature == 1 else grad_nV.div_(plan.temperature)


def _columns(logp_nV: Tensor, logq_nV: Any, part: slice, plan: _Plan) -> list[Tensor]:
    """Columns ``[n]`` of one chunk. A KL is zero bit by bit where both distributions are the same."""
    names = plan.names
    columns = [logp_nV.gather(1, plan.ids_N[part, None])[:, 0]]
    if "kl" in names:
        terms_nV = logp_nV.exp().mul_(logp_nV - logq_nV)
        columns.append(_zero_where(terms_nV, plan.never_V).sum(1))
    if "forward_kl" in names:
        terms_nV = logq_nV.exp().mul_(logp_nV - logq_nV)
        columns.append(-_zero_where(terms_nV, plan.reference_never_V).sum(1) + 0.0)
    if "entropy" in names:
        terms_nV = logp_nV.exp().mul_(logp_nV)
        columns.append(-_zero_where(terms_nV, plan.never_V).sum(1))
    if "total_variation" in names:
        columns.append(0.5 * logp_nV.exp().sub_(logq_nV.exp()).abs_().sum(1))
    if "certainty" in names:
        columns.append(certainty(_finite_where(logp_nV, plan.never_V)))
    if "reference_certainty" in names:
        columns.append(certainty(_finite_where(logq_nV, plan.reference_never_V)))
    return columns


def _top_columns(
    logp_nV: Tensor, logq_nV: Any, given: tuple[Tensor, Tensor] | None, k: int, tokens: str
) -> tuple[Tensor, ...]:
    """:data:`TOP_COLUMNS` ``[n, K]`` of one chunk."""
    if given is not None:
        ids_nK, logq_nK = given[0][:, :k], given[1][:, :k]
        return logp_nV.gather(1, ids_nK), logq_nK.to(logp_nV.dtype), ids_nK
    chosen_nV = logp_nV if tokens == "policy" else logq_nV
    ids_nK = chosen_nV.topk(min(k, chosen_nV.shape[1]), dim=1).indices
    return logp_nV.gather(1, ids_nK), logq_nV.gather(1, ids_nK), ids_nK


def log_softmax(
    hidden_nH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    temperature: float,
    factor_dtype: torch.dtype | None = None,
) -> Tensor:
    """``log_softmax(head(hidden) / temperature)`` in float32 or wider, whatever autocast is in force."""
    with torch.autocast(device_type=hidden_nH.device.type, enabled=False):
        logits_nV = head_product(hidden_nH, weight_VH, bias_V, factor_dtype)
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return (logits_nV if temperature == 1 else logits_nV.div_(temperature)).log_softmax(-1)


def head_product(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, factor_dtype: torch.dtype | None) -> Tensor:
    """``rows @ weight.T + bias`` ``[M, N]`` in the dtype of the weight; in float32 of factors in ``factor_dtype``."""
    if factor_dtype is None:
        return product(rows_MK.to(weight_NK.dtype), weight_NK, bias_N)
    out_MN = wide_product(rows_MK.to(factor_dtype), weight_NK.to(factor_dtype).t())
    return out_MN if bias_N is None else out_MN + bias_N
