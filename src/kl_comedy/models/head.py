"""From hidden states to log-probs, exact KLs, entropy and total variation, without ever holding ``[N, V]``.

Also the log-probs of the ``k`` likeliest tokens of either policy at each position, where a top-k KL asks for them.

The backward pass is written by hand: with the log-probs of a chunk at hand (kept where everything fits one
chunk, else computed again), the gradient of every column with respect to the logits is one expression in the
probabilities, built in place. Autograd would hold several tensors ``[n, V]`` for it.

    d logp_i / d logits       = 1_i - p
    d KL(p || q) / d logits   = p (log p - log q - KL)
    d KL(q || p) / d logits   = p - q
    d JS_b(p, q) / d logits   = (1 - b) p (log p - log m - KL(p || m)),  m = b q + (1 - b) p

Where a sampler truncated (``kept``), p is the policy renormalized over the tokens that it kept: 0 at all others, where
its log-prob is -inf. The formulas hold as they are, because the set is held fixed. q is the whole reference.

Legend: ``N`` positions, ``n`` rows of one chunk, ``H`` hidden width, ``V`` vocabulary, ``K`` top tokens. The matrix
product runs in the dtype of the weights, as it does in a sampler, or on factors rounded to ``factor_dtype`` with sums
in float32 (``model.head_dtype``); temperature, softmax and sums in float32 or wider, whatever autocast is in force.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_comedy.cuda import wide_product
from kl_comedy.kl.estimators import above_mixture, certainty, jensen_shannon
from kl_comedy.models.introspection import Head
from kl_comedy.models.onednn_linear import product
from kl_comedy.models.types import Wanted
from kl_comedy.records import KeptSets

TOP_COLUMNS = ("logp", "ref_logp", "ids")
"""What a list of top tokens has: log-probs of the policy, of the reference, and the ids; ``[N, K]`` each."""
FINITE_NEVER = -1e4
"""Nats; stands for the log-prob -inf in formulas of two policies. Its exponential is 0 in float32 and float64."""

ReferenceHead = tuple[Tensor, Head]
"""The reference policy's hidden states ``[N, H]`` and head."""


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """How the head is computed.

    At most ``chunk_elements`` logits are held at a time. ``factor_dtype``: the dtype of the factors of the products,
    whose sums are float32; None is the dtype of the weights.
    """

    temperature: float
    chunk_elements: int
    factor_dtype: torch.dtype | None = None


def head_columns(
    hidden_NH: Tensor,
    head: Head,
    ids_N: Tensor,
    settings: HeadSettings,
    wanted: Wanted,
    *,
    reference: ReferenceHead | None = None,
    likeliest: tuple[Tensor, Tensor] | None = None,
    sampler_top: tuple[Tensor, Tensor] | None = None,
    kept: KeptSets | None = None,
) -> dict[str, Tensor]:
    """Columns ``[N]``: ``logp`` of ``ids_N`` and the quantities that are ``wanted``.

    Mixture number n (the reference's share) has the column ``mixture<n>``: the Jensen-Shannon divergence.
    The ``top`` request number n has the columns ``[N, K]`` ``top<n>_logp`` of the policy, ``top<n>_ref_logp`` of the
    reference, and ``top<n>_ids``; K is at most the vocabulary. ``likeliest``: ids and log-probs ``[N, K]`` of the
    reference's likeliest tokens, where nothing else is known of it. ``sampler_top``: the same of the sampler.
    ``kept``: the tokens over which the policy is renormalized at each position; None for the whole vocabulary.
    Log-probs and KLs are differentiable in ``hidden_NH`` and ``head``; a column without a gradient costs nothing in the
    backward pass. A chunk is whole rows, so every sum over the vocabulary is one reduction whatever the chunk size.
    Raises :class:`ValueError` for a missing ``reference``.
    """
    vocabulary = head[0].shape[0]
    if likeliest is not None:
        _check_likeliest(likeliest, wanted, vocabulary=vocabulary)
    if kept is None and (wanted.log_kept or wanted.reference_log_kept):
        raise ValueError("the mass of kept sets was asked for without the sets")
    if kept is not None and len(kept.sizes_N) != len(ids_N):
        raise ValueError(f"{len(kept.sizes_N)} kept sets for {len(ids_N)} positions")
    # Where the reference's likeliest tokens are given, lists of top tokens need nothing else of it.
    compares = wanted.compares_vocabularies or (wanted.compares_top and likeliest is None)
    if compares and reference is None:
        raise ValueError("an exact value needs a reference pass that kept its hidden states")
    reference_never_V = None
    if reference is not None:
        reference_NH, (reference_VH, reference_bias_V) = reference
        # Here and not for every chunk: rounding the head is a copy of [V, H].
        reference = (reference_NH, (factor(reference_VH, settings), reference_bias_V))
        reference_never_V = never_drawn(reference_bias_V)
    plan = _Plan(
        ids_N=ids_N,
        settings=settings,
        wanted=wanted,
        chunk_rows=max(1, settings.chunk_elements // vocabulary),
        vocabulary=vocabulary,
        reference=reference,
        likeliest=likeliest,
        sampler_top=sampler_top,
        kept=kept,
        never_V=never_drawn(head[1]),
        reference_never_V=reference_never_V,
    )
    columns: Sequence[Tensor] = _HeadColumns.apply(hidden_NH, *head, plan)  # type: ignore[no-untyped-call]
    return dict(zip(column_names(wanted), columns, strict=True))


def column_names(wanted: Wanted) -> list[str]:
    """The names of the columns of :func:`head_columns`, in order."""
    tops = [f"top{n}_{column}" for n in range(len(wanted.top)) for column in TOP_COLUMNS]
    return [*_names_before_tops(wanted), *tops]


def _names_before_tops(wanted: Wanted) -> list[str]:
    mixtures = [f"mixture{n}" for n in range(len(wanted.mixtures))]
    return ["logp", *wanted.quantities, *mixtures]


def _has_gradient(name: str) -> bool:
    """Whether a column before those of top tokens is differentiable; the others are metrics."""
    return name in ("logp", "kl", "forward_kl") or name.startswith("mixture")


def _check_likeliest(likeliest: tuple[Tensor, Tensor], wanted: Wanted, *, vocabulary: int) -> None:
    """Raise :class:`ValueError` where a request needs more than the reference's likeliest tokens."""
    known = likeliest[0].shape[1]
    for k, tokens in wanted.top:
        if tokens == "sampler":
            continue
        if tokens != "reference" or min(k, vocabulary) > known:
            raise ValueError(f"of this reference only its {known} likeliest tokens are known")


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What forward and backward pass share; :func:`head_columns` has the meaning of the fields."""

    ids_N: Tensor
    settings: HeadSettings
    wanted: Wanted
    chunk_rows: int
    vocabulary: int
    reference: ReferenceHead | None
    likeliest: tuple[Tensor, Tensor] | None
    sampler_top: tuple[Tensor, Tensor] | None
    kept: KeptSets | None
    never_V: Tensor | None
    """Tokens that the policy never draws, because their bias is -inf (a padded vocabulary); None without any."""
    reference_never_V: Tensor | None
    """The same of the reference."""

    @property
    def columns(self) -> list[str]:
        """The columns before those of top tokens."""
        return _names_before_tops(self.wanted)

    @property
    def is_one_chunk(self) -> bool:
        """Whether the log-probs of all rows are held at once, so that the backward pass need not compute them again."""
        return len(self.ids_N) <= self.chunk_rows

    def chunks(self) -> Iterator[slice]:
        """Rows that are computed together; without rows, one empty chunk, so that all columns exist."""
        # A batch whose masks are empty has columns too, of length 0.
        for start in range(0, max(len(self.ids_N), 1), self.chunk_rows):
            yield slice(start, start + self.chunk_rows)

    def log_softmax(self, hidden_nH: Tensor, factor_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        return log_softmax(hidden_nH, factor_VH, bias_V, self.settings.temperature, self.settings.factor_dtype)

    def policy(self, hidden_NH: Tensor, factor_VH: Tensor, bias_V: Tensor | None, part: slice) -> _Policy:
        """The policy's distributions at the rows ``part``."""
        logp_nV = self.log_softmax(hidden_NH[part], factor_VH, bias_V)
        left_out_nV = self._left_out(part)
        if left_out_nV is None:
            return _Policy(logp_nV=logp_nV, never=self.never_V, log_kept_n=None)
        logp_nV = logp_nV.masked_fill_(left_out_nV, -torch.inf)
        log_kept_n = logp_nV.logsumexp(1)
        if self.never_V is not None:
            left_out_nV |= self.never_V
        return _Policy(logp_nV=logp_nV.sub_(log_kept_n[:, None]), never=left_out_nV, log_kept_n=log_kept_n)

    def reference_logp(self, part: slice) -> Any:
        """The reference's log-probs ``[n, V]``; None without a reference."""
        if self.reference is None:
            return None
        hidden_NH, head = self.reference
        return self.log_softmax(hidden_NH[part], *head)

    def _left_out(self, part: slice) -> Tensor | None:
        """The tokens that truncated sampling left out, ``[n, V]``; None where it did not truncate."""
        if self.kept is None:
            return None
        sizes_n = self.kept.sizes_N[part]
        before = int(self.kept.sizes_N[: part.start].sum())
        ids_m = self.kept.ids_M[before : before + int(sizes_n.sum())]
        rows_m = torch.arange(len(sizes_n), device=ids_m.device).repeat_interleave(sizes_n)
        left_out_nV = torch.ones(len(sizes_n), self.vocabulary, dtype=torch.bool, device=ids_m.device)
        left_out_nV[rows_m, ids_m] = False
        return left_out_nV


@dataclass(frozen=True, kw_only=True)
class _Policy:
    """The policy's distributions of one chunk of rows.

    ``never``: the tokens of probability 0, ``[V]`` or ``[n, V]``; None without any. ``log_kept_n``: the log of the mass
    that the whole distribution has on the kept tokens; None where none is left out.
    """

    logp_nV: Tensor
    never: Tensor | None
    log_kept_n: Tensor | None


def factor(weight_VH: Tensor, settings: HeadSettings) -> Tensor:
    """The weight as a factor of products: rounded once, not for every chunk."""
    if settings.factor_dtype is None:
        return weight_VH
    return weight_VH.to(settings.factor_dtype)


def never_drawn(bias_V: Tensor | None) -> Tensor | None:
    """Where the head's bias is -inf; None where it is nowhere."""
    if bias_V is None:
        return None
    never_V = torch.isneginf(bias_V.detach())
    if not bool(never_V.any()):
        return None
    return never_V


def _zero_where(terms_nV: Tensor, never: Tensor | None) -> Tensor:
    """``terms_nV`` with zeros for tokens of probability 0, where 0 * -inf and -inf + inf are NaN."""
    if never is None:
        return terms_nV
    return terms_nV.masked_fill_(never, 0.0)


def _finite_where(logp_nV: Any, never: Tensor | None) -> Any:
    """``logp_nV`` with a finite log-prob whose exponential is 0 for tokens of probability 0."""
    if never is None:
        return logp_nV
    return logp_nV.masked_fill(never, FINITE_NEVER)


class _HeadColumns(torch.autograd.Function):
    """See :func:`head_columns`."""

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, plan: _Plan) -> Any:
        pieces: list[list[Tensor]] = []
        policy = logq_nV = None
        factor_VH = factor(weight_VH, plan.settings)
        for part in plan.chunks():
            policy = plan.policy(hidden_NH, factor_VH, bias_V, part)
            logq_nV = plan.reference_logp(part)
            pieces.append(
                [
                    *_columns(policy, logq_nV, part, plan),
                    *_mixture_columns(policy, logq_nV, plan),
                    *_top_columns(policy.logp_nV, logq_nV, part, plan),
                ]
            )
        # Joined at the end: all columns together are small beside the logits of one chunk.
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]

        # Top lists follow the named columns, three columns each (TOP_COLUMNS).
        top_columns = columns[len(plan.columns) :]
        constant = [column for name, column in zip(plan.columns, columns, strict=False) if not _has_gradient(name)]
        constant += top_columns[1::3]
        constant += top_columns[2::3]
        ctx.mark_non_differentiable(*constant)
        # Gradients that are not there stay None: a column that no loss reads costs nothing in the backward pass.
        ctx.set_materialize_grads(False)

        kl_N = None
        if plan.wanted.kl:
            kl_N = columns[plan.columns.index("kl")]
        # With several chunks they are computed again: to keep them all would be [N, V] after all.
        stored_logp_nV = stored_logq_nV = stored_never = None
        if plan.is_one_chunk and policy is not None:
            stored_logp_nV = policy.logp_nV
            stored_never = policy.never
            if plan.wanted.kl or plan.wanted.forward_kl or plan.wanted.mixtures:
                stored_logq_nV = logq_nV
        ctx.plan = plan
        top_ids = top_columns[2::3]
        ctx.save_for_backward(
            hidden_NH, weight_VH, bias_V, kl_N, stored_logp_nV, stored_logq_nV, stored_never, *top_ids
        )
        return tuple(columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        device = ctx.saved_tensors[0].device
        with torch.autocast(device_type=device.type, enabled=False):  # a training step's is in force
            return _HeadColumns._backward(ctx, *gradients)

    @staticmethod
    def _backward(ctx: Any, *gradients: Tensor | None) -> Any:
        hidden_NH, weight_VH, bias_V, kl_N, logp_nV, logq_nV, never, *top_ids = ctx.saved_tensors
        plan: _Plan = ctx.plan
        column_gradients = {}
        for name, gradient_N in zip(plan.columns, gradients, strict=False):
            if gradient_N is not None:
                column_gradients[name] = gradient_N
        top_gradients = []
        for ids_NK, gradient_NK in zip(top_ids, gradients[len(plan.columns) :: 3], strict=True):
            if gradient_NK is not None:
                top_gradients.append((ids_NK, gradient_NK))
        if not column_gradients and not top_gradients:
            return None, None, None, None
        # The log-prob of the sampled token has a gradient by p alone.
        reads_reference = any(name != "logp" for name in column_gradients)
        chunk_was_stored = logp_nV is not None

        sums = _GradientSums(
            hidden_NH,
            weight_VH,
            bias_V,
            plan.settings,
            needed=ctx.needs_input_grad,
        )
        for part in plan.chunks():
            if not chunk_was_stored:
                policy = plan.policy(hidden_NH, sums.factor_VH, bias_V, part)
                logp_nV = policy.logp_nV
                never = policy.never
                logq_nV = None
                if reads_reference:
                    logq_nV = plan.reference_logp(part)
            kl_n = None
            if kl_N is not None:
                kl_n = kl_N[part]
            chunk = _Chunk(logp_nV=logp_nV, never=never, logq_nV=logq_nV, kl_n=kl_n, ids_n=plan.ids_N[part])
            grad_nV = _logits_gradient(
                chunk,
                plan,
                {name: gradient_N[part] for name, gradient_N in column_gradients.items()},
                [(ids_NK[part], gradient_NK[part]) for ids_NK, gradient_NK in top_gradients],
            )
            sums.add(part, grad_nV)
        return (*sums.narrowed(), None)


class _GradientSums:
    """The gradients of hidden states, weight and bias, added up over the chunks.

    Sums over rows are float32 or wider, whatever the dtype of the weights; a gradient that nobody needs is None.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        settings: HeadSettings,
        *,
        needed: Sequence[bool],
    ) -> None:
        self._settings = settings
        self._hidden_NH = hidden_NH
        self._dtype = weight_VH.dtype
        # A sum over thousands of rows in bfloat16 would stop growing.
        self._wide = torch.promote_types(weight_VH.dtype, torch.float32)
        self.factor_VH = factor(weight_VH, settings)
        self._hidden_gradient: Tensor | None = None
        self._weight_gradient: Tensor | None = None
        self._bias_gradient: Tensor | None = None
        if needed[0]:
            self._hidden_gradient = torch.empty_like(hidden_NH)
        if needed[1]:
            self._weight_gradient = torch.zeros_like(weight_VH, dtype=self._wide)
        if needed[2] and bias_V is not None:
            self._bias_gradient = torch.zeros_like(bias_V, dtype=self._wide)

    def add(self, part: slice, grad_nV: Tensor) -> None:
        """Add a chunk's gradient of the logits."""
        # d loss / d hidden = g W,  d loss / d W = g^T hidden,  d loss / d bias = sum of g over the rows.
        # The products run in the dtype of their factors, as in the forward pass.
        narrow_nV = grad_nV.to(self.factor_VH.dtype)
        if self._hidden_gradient is not None:
            self._hidden_gradient[part] = head_product(narrow_nV, self.factor_VH.t(), None, self._settings.factor_dtype)
        if self._weight_gradient is not None:
            rows_nH = self._hidden_NH[part].to(self.factor_VH.dtype)
            if self._wide == self.factor_VH.dtype:
                self._weight_gradient.addmm_(narrow_nV.t(), rows_nH)  # no second tensor [V, H]
            elif self._settings.factor_dtype is not None:
                self._weight_gradient += wide_product(narrow_nV.t(), rows_nH)
            else:
                self._weight_gradient += narrow_nV.t() @ rows_nH
        if self._bias_gradient is not None:
            self._bias_gradient += grad_nV.sum(0)

    def narrowed(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients in the dtypes of what they are gradients of."""
        weight_gradient = self._weight_gradient
        if weight_gradient is not None:
            weight_gradient = weight_gradient.to(self._dtype)
        bias_gradient = self._bias_gradient
        if bias_gradient is not None:
            bias_gradient = bias_gradient.to(self._dtype)
        return self._hidden_gradient, weight_gradient, bias_gradient


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """The distributions of one chunk of rows. ``logq_nV`` and ``kl_n`` are needed where a KL has a gradient."""

    logp_nV: Tensor
    never: Tensor | None
    logq_nV: Any
    kl_n: Any
    ids_n: Tensor


def _logits_gradient(
    chunk: _Chunk,
    plan: _Plan,
    gradients: Mapping[str, Tensor],
    tops: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The gradient ``[n, V]`` of the loss by the logits, before they were divided by the temperature.

    ``gradients``: the loss's gradients ``[n]`` of the columns, by name; ``tops``: ids and gradients ``[n, K]`` of each
    list of top tokens. With g for the gradient of a column, the formulas at the top of this module are

        log-prob of token k:      g 1_k - g p
        KL(p || q):               g p (log p - log q) - g KL p
        KL(q || p):               g p - g q
        Jensen-Shannon, share b:  g (1 - b) p (log p - log m - KL(p || m))

    Nearly every term is p times one number for each row. These numbers are added up before anything ``[n, V]`` is made:
    two buffers of that size are enough, where the formulas as they stand need one for each term.
    """
    logp_nV = chunk.logp_nV
    logq_nV = chunk.logq_nV
    logp_grad_n = gradients.get("logp")
    kl_grad_n = gradients.get("kl")
    forward_grad_n = gradients.get("forward_kl")

    # The sampled token is a list of one.
    token_lists = list(tops)
    if logp_grad_n is not None:
        token_lists.insert(0, (chunk.ids_n[:, None], logp_grad_n[:, None]))

    # p times its number, and with KL(p || q) + g p (log p - log q), which differs from token to token.
    p_factor_n = _p_factor(chunk, token_lists, kl_grad_n, forward_grad_n)
    grad_nV = logp_nV.exp()
    if kl_grad_n is None:
        grad_nV *= p_factor_n[:, None]
    else:
        grad_nV *= (logp_nV - logq_nV).mul_(kl_grad_n[:, None]).add_(p_factor_n[:, None])
        grad_nV = _zero_where(grad_nV, chunk.never)

    # - g q of KL(q || p).
    if forward_grad_n is not None:
        grad_nV -= logq_nV.exp().mul_(forward_grad_n[:, None])

    # g (1 - b) p (log p - log m - KL(p || m)) of each mixture m.
    for position, reference_share in enumerate(plan.wanted.mixtures):
        mixture_grad_n = gradients.get(f"mixture{position}")
        if mixture_grad_n is None:
            continue
        scale_n = (1 - reference_share) * mixture_grad_n
        grad_nV += _p_above_mixture(chunk, plan, reference_share).mul_(scale_n[:, None])

    # + g 1_k of the listed tokens.
    for ids_nK, grad_nK in token_lists:
        grad_nV.scatter_add_(1, ids_nK, grad_nK)

    # The logits were divided by the temperature before the softmax.
    if plan.settings.temperature != 1:
        grad_nV.div_(plan.settings.temperature)
    return grad_nV


def _p_factor(
    chunk: _Chunk,
    token_lists: Sequence[tuple[Tensor, Tensor]],
    kl_grad_n: Tensor | None,
    forward_grad_n: Tensor | None,
) -> Tensor:
    """The number ``[n]`` that multiplies p: - g of each listed token, - g KL of KL(p || q), + g of KL(q || p)."""
    p_factor_n = chunk.logp_nV.new_zeros(len(chunk.ids_n))
    for _, grad_nK in token_lists:
        p_factor_n = p_factor_n - grad_nK.sum(1)
    if kl_grad_n is not None:
        p_factor_n = p_factor_n - kl_grad_n * chunk.kl_n
    if forward_grad_n is not None:
        p_factor_n = p_factor_n + forward_grad_n
    return p_factor_n


def _p_above_mixture(chunk: _Chunk, plan: _Plan, reference_share: float) -> Tensor:
    """``p (log p - log m - KL(p || m))`` ``[n, V]`` for the mixture m that has ``reference_share`` of q."""
    p_nV = chunk.logp_nV.exp()
    # 0 times -inf would be NaN where a token has probability 0.
    finite_logp_nV = _finite_where(chunk.logp_nV, chunk.never)
    finite_logq_nV = _finite_where(chunk.logq_nV, plan.reference_never_V)
    above_nV = above_mixture(finite_logp_nV, finite_logq_nV, reference_share)
    # KL(p || m) is the mean under p of log p - log m.
    above_nV -= (p_nV * above_nV).sum(1, keepdim=True)
    return p_nV.mul_(above_nV)


def _columns(policy: _Policy, logq_nV: Any, part: slice, plan: _Plan) -> list[Tensor]:
    """Columns ``[n]`` of one chunk. A KL is zero bit by bit where both distributions are the same."""
    wanted = plan.wanted
    logp_nV = policy.logp_nV
    columns = [logp_nV.gather(1, plan.ids_N[part, None])[:, 0]]
    if wanted.kl:
        # sum of p (log p - log q)
        terms_nV = logp_nV.exp().mul_(logp_nV - logq_nV)
        columns.append(_zero_where(terms_nV, policy.never).sum(1))
    if wanted.forward_kl:
        # sum of q (log q - log p); + 0.0 because minus a sum of zeros is -0.0
        terms_nV = logq_nV.exp().mul_(logp_nV - logq_nV)
        columns.append(-_zero_where(terms_nV, plan.reference_never_V).sum(1) + 0.0)
    if wanted.entropy:
        # - sum of p log p
        terms_nV = logp_nV.exp().mul_(logp_nV)
        columns.append(-_zero_where(terms_nV, policy.never).sum(1))
    if wanted.total_variation:
        # sum of |p - q| / 2
        columns.append(0.5 * logp_nV.exp().sub_(logq_nV.exp()).abs_().sum(1))
    if wanted.certainty:
        columns.append(certainty(_finite_where(logp_nV, policy.never)))
    if wanted.reference_certainty:
        columns.append(certainty(_finite_where(logq_nV, plan.reference_never_V)))
    if wanted.log_kept and policy.log_kept_n is not None:
        columns.append(policy.log_kept_n)
    if wanted.reference_log_kept:
        columns.append(logq_nV.masked_fill(policy.never, -torch.inf).logsumexp(1))
    return columns


def _mixture_columns(policy: _Policy, logq_nV: Any, plan: _Plan) -> list[Tensor]:
    """The Jensen-Shannon divergences ``[n]`` of one chunk, one for each share of the reference."""
    if not plan.wanted.mixtures:
        return []
    finite_logp_nV = _finite_where(policy.logp_nV, policy.never)
    finite_logq_nV = _finite_where(logq_nV, plan.reference_never_V)
    return [jensen_shannon(finite_logp_nV, finite_logq_nV, share) for share in plan.wanted.mixtures]


def _top_columns(logp_nV: Tensor, logq_nV: Any, part: slice, plan: _Plan) -> list[Tensor]:
    """:data:`TOP_COLUMNS` ``[n, K]`` of one chunk, for each request."""
    columns: list[Tensor] = []
    for k, tokens in plan.wanted.top:
        given = plan.likeliest
        if tokens == "sampler":
            given = plan.sampler_top
        if given is not None:
            given_ids_NK, given_logq_NK = given
            ids_nK = given_ids_NK[part, :k]
            logq_nK = given_logq_NK[part, :k].to(logp_nV.dtype)
        else:
            chosen_nV = logq_nV
            if tokens == "policy":
                chosen_nV = logp_nV
            ids_nK = chosen_nV.topk(min(k, chosen_nV.shape[1]), dim=1).indices
            logq_nK = logq_nV.gather(1, ids_nK)
        columns += [logp_nV.gather(1, ids_nK), logq_nK, ids_nK]
    return columns


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
        if temperature != 1:
            logits_nV = logits_nV.div_(temperature)
        return logits_nV.log_softmax(-1)


def head_product(rows_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, factor_dtype: torch.dtype | None) -> Tensor:
    """``rows @ weight.T + bias`` ``[M, N]`` in the dtype of the weight; in float32 of factors in ``factor_dtype``."""
    if factor_dtype is None:
        return product(rows_MK.to(weight_NK.dtype), weight_NK, bias_N)
    out_MN = wide_product(rows_MK.to(factor_dtype), weight_NK.to(factor_dtype).t())
    if bias_N is None:
        return out_MN
    return out_MN + bias_N
