"""Gradients of the policy loss and of KL terms on one block of completions, by layer group, sketched.

    rows -> micro-batches -> one pass of the policy -> per loss: gradient of log-probs and exact KLs -> of parameters

The losses are written with :func:`kl_surrogate` and the policy loss directly, not through the training step, so that
the check of beta compares two independent implementations. Nothing is left in ``.grad``, no random number is drawn.

With several processes, each passes and differentiates its micro-batches. Sketches are linear, so those of all ranks
add up to the sketch of the whole gradient: sketches of whole gradients of each rank's micro-batches (DDP), or of each
rank's shard of the gradient of all (FSDP, one backward pass for each loss).

Legend: ``B`` sequences, ``T`` completion tokens, ``C`` losses, ``w`` the width of a sketch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_diagnostics, kl_parts, kl_surrogate
from kl_comedy.models.introspection import unwrap
from kl_comedy.records import Scored
from kl_comedy.training.loss import MicroBatch, certainty_of, exact_divergence, policy_parts, prepare
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from kl_comedy.models.reference import PastPolicies, Reference
    from kl_comedy.models.types import ReferencePass, TokenPass

Value = TypeVar("Value")

MAX_RUNS_OF_BLOCKS = 6
"""A deep model's blocks are audited in at most so many runs, so that the table stays readable."""

SKETCH = 65536
"""Numbers of a gradient's random projection: products of whole gradients would need all blocks in memory at once."""


class Sketch:
    """A linear sketch of a long vector that keeps inner products, so that many gradients fit in memory.

    Coordinate i is added, with a random sign, to one of ``size`` buckets (Charikar et al. 2002, Count Sketch). For
    fixed vectors the sketched inner product is unbiased over the signs, with a standard deviation of at most
    ``|x| |y| sqrt(2 / size)``: 0.6% of ``|x| |y|`` at the default. Sums of sketches are the sketch of the sum.

    The sketch is the identity where ``dimension <= size`` or ``size`` is 0. Otherwise each block of ``size``
    coordinates is signed and rotated by a random shift, and the blocks are summed. The map depends on
    ``(dimension, size, generator)`` only.
    """

    def __init__(self, dimension: int, size: int, generator: torch.Generator) -> None:
        self.exact = size == 0 or dimension <= size
        if self.exact:
            self.width = dimension
            return
        self.width = size
        # The order of these two draws is part of the map: sketches of one model must be comparable between audits.
        signs = torch.randint(0, 2, (dimension,), generator=generator, dtype=torch.int8)
        self._signs = signs * 2 - 1
        block_count = math.ceil(dimension / size)
        self._shifts = torch.randint(0, size, (block_count,), generator=generator).tolist()

    def add(self, folded: Tensor, part: Tensor, start: int) -> None:
        """Add coordinates ``start`` to ``start + len(part)`` of a vector to its sketch ``folded [width]``, in place."""
        if self.exact:
            # Small enough to be kept as it is: the audit of a small model is exact.
            folded[start : start + len(part)] += part
            return
        self._signs = self._signs.to(part.device)
        signed = part * self._signs[start : start + len(part)]
        # A part may begin and end anywhere in a block: a parameter, or one rank's shard of it.
        while len(signed):
            block, offset = divmod(start, self.width)
            piece = signed[: self.width - offset]
            place = (offset + self._shifts[block]) % self.width
            before_end = piece[: self.width - place]
            after_wrap = piece[len(before_end) :]
            folded[place : place + len(before_end)] += before_end
            folded[: len(after_wrap)] += after_wrap
            signed = signed[len(piece) :]
            start += len(piece)


def layer_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters by layer group, in the model's order.

    The block of a parameter is the first whole number in its name. A head that shares its weight with the embeddings
    is counted there.
    """
    embedding = unwrap(model).get_input_embeddings().weight
    # Tied: the embeddings' gradient then has a part of the head's.
    if embedding is unwrap(model).get_output_embeddings().weight:
        embedding_label = "embeddings and head"
        last_label = "final norm"
    else:
        embedding_label = "embeddings"
        last_label = "head"  # with the final norm, which is too small for a group of its own
    trained = {}
    block_of: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        trained[name] = parameter
        block = re.search(r"\.(\d+)\.", name)
        if block is not None:
            block_of[name] = int(block[1])

    block_labels = _block_labels(sorted(set(block_of.values())))
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        if name in block_of:
            label = block_labels[block_of[name]]
        elif parameter is embedding:
            label = embedding_label
        else:
            label = last_label
        groups.setdefault(label, []).append(parameter)
    return groups


def _block_labels(blocks: Sequence[int]) -> dict[int, str]:
    """The label of the run that each block belongs to; all runs but the last are of equal length."""
    # At least 1, for a model without numbered blocks.
    run_length = max(math.ceil(len(blocks) / MAX_RUNS_OF_BLOCKS), 1)
    labels = {}
    for start in range(0, len(blocks), run_length):
        run = blocks[start : start + run_length]
        label = f"block {run[0]}" if len(run) == 1 else f"blocks {run[0]}-{run[-1]}"
        for block in run:
            labels[block] = label
    return labels


class GradientSketch:
    """A sketch of ``size`` numbers (0: exact) per layer group, the same for the same model every time."""

    def __init__(self, groups: Mapping[str, Sequence[nn.Parameter]], size: int) -> None:
        # Always the same seed: sketches of two audits, or of two ranks, can only be compared under one map.
        generator = torch.Generator().manual_seed(0)
        self.names = list(groups)
        self.parameters: list[nn.Parameter] = []
        self._counts: list[int] = []
        self._sketches: list[Sketch] = []
        for group in groups.values():
            dimension = sum(parameter.numel() for parameter in group)
            self.parameters += group
            self._counts.append(len(group))
            self._sketches.append(Sketch(dimension, size, generator))

    def fold(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Per-parameter gradients (None is zero) to one sketch per group, to be added up over the ranks."""
        pairs = zip(self.parameters, gradients, strict=True)
        sketches: list[Tensor] = []
        for sketch, count in zip(self._sketches, self._counts, strict=True):
            # Every rank has a whole sketch, with its own coordinates only: their sum is the sketch of the whole.
            folded = torch.zeros(sketch.width, device=self.parameters[0].device)
            start = 0
            for parameter, gradient in islice(pairs, count):
                if gradient is not None:
                    part, first = _local_part(gradient)
                    sketch.add(folded, part, start + first)
                start += parameter.numel()
            sketches.append(folded)
        return sketches


def _local_part(gradient: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a gradient, flat and in float32, and its first coordinate in the whole."""
    if not hasattr(gradient, "to_local"):
        return gradient.detach().float().flatten(), 0
    sharded = cast("DTensor", gradient)
    mesh = sharded.device_mesh
    shard_dim = mesh.ndim - 1
    shards = mesh.size(shard_dim)
    rows = sharded.shape[0]
    # FSDP2 shards rows in equal chunks, so the last ranks may have fewer rows or none.
    rows_per_shard = math.ceil(rows / shards)
    first_row = min(rows_per_shard * mesh.get_local_rank(shard_dim), rows)
    first = first_row * math.prod(sharded.shape[1:])
    # FSDP2's reduction takes the mean over all ranks. Times the number of shards, the parts of all ranks add up to the
    # sum, also where there are several copies of each shard.
    return sharded.to_local().detach().float().flatten() * shards, first


def differentiate(
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    parameters: Sequence[nn.Parameter],
    *,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """Gradients of ``outputs`` in the parameters; under FSDP reduced, in shards, and every rank must call.

    This runs a backward pass, because ``torch.autograd.grad`` does not run FSDP's reduction.
    """
    torch.autograd.backward(outputs, weights, retain_graph=retain_graph)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # or the next update of the run would train on it
    return gradients


def reference_term(reference: str, *, on_policy: bool, group_size: int) -> KLTerm:
    """The term whose gradient others are measured against: unbiased for the sequence KL, low in variance.

    The exact KL of each prefix with future credit (2506.09477), off-policy times the ratio of the tokens before,
    less the leave-one-out mean over the group where there is a group.
    """
    # The ratio of the tokens before a prefix is what makes an exact KL at that prefix unbiased off-policy.
    correction = "none" if on_policy else "prefix_previous"
    baseline = "own" if group_size > 1 else "after"
    return KLTerm(
        "exact", placement="reward", credit="to_go", correction=correction, baseline=baseline, reference=reference
    )


@dataclass(frozen=True, kw_only=True)
class AuditedTerm:
    """One gradient: the policy loss where ``term`` is None, else the term at beta = 1.

    ``key`` names it in metrics: a config term by position, others by recipe or label. ``beta`` is the coefficient in
    force; ``position`` is that among the config's terms, None for others.

    A term before the baseline exists only through the advantage: its loss is the policy loss with the cost, less the
    policy loss without, over ``beta`` (for advantages are not linear in it).
    """

    key: str
    label: str = ""
    term: KLTerm | None
    beta: float = 1.0
    position: int | None = None

    @property
    def unit(self) -> float:
        """The coefficient that the gradient is taken at."""
        return self.beta or 1.0


# --- losses ---------------------------------------------------------------------------------------------------------
def loss_of(
    item: AuditedTerm,
    micro: MicroBatch,
    with_term: MicroBatch | None,
    passes: Mapping[str, TokenPass],
    algorithm: AlgorithmConfig,
) -> Tensor:
    """The loss over one micro-batch, a scalar in nats. ``with_term`` is the same micro-batch, prepared with the term
    alone. Raises :class:`UserError` where the config does not keep the reference of the term."""
    logp_BT = passes["initial"].logp_BT
    if item.term is None:
        loss_BT = policy_parts(micro, logp_BT, algorithm).loss_BT
    else:
        arguments = _term_arguments(item.term, micro, passes)
        if item.term.baseline == "before":
            assert with_term is not None
            # d(policy loss) at advantage A(r - beta c), less that at A(r), over beta. The path-wise part is added: the
            # advantage is a constant of the loss, and holds the cost's value but not its own derivative.
            policy_with_cost_BT = policy_parts(with_term, logp_BT, algorithm).loss_BT
            policy_BT = policy_parts(micro, logp_BT, algorithm).loss_BT
            loss_BT = (policy_with_cost_BT - policy_BT) / item.unit + kl_parts(item.term, **arguments).pathwise_BT
        else:
            baseline_BT = None
            if with_term is not None:
                baseline_BT = with_term.baselines.get(item.key)
            loss_BT = kl_surrogate(item.term, **arguments, baseline_BT=baseline_BT)
    # torch.where and not a product: outside the mask a ratio may be infinite, and 0 x inf is NaN.
    inside_BT = torch.where(micro.experience.mask_BT, loss_BT, 0.0)
    return (micro.experience.weight_B * inside_BT.sum(-1)).sum()


def _term_arguments(term: KLTerm, micro: MicroBatch, passes: Mapping[str, TokenPass]) -> dict[str, Any]:
    """The tensors that a term is computed from, ``[B, T]``; those it does not read are left out or None."""
    if not _has_reference(micro, term):
        raise UserError(
            f"audit: {term.label()} is measured against the {term.reference} reference, which this config does "
            "not keep; give the config a term that names it"
        )
    # Without past policies terms against the sampler are sampled ones, which the initial reference's pass serves.
    pass_name = term.reference
    if pass_name not in passes and term.reference == "sampler":
        pass_name = "initial"
    exact = passes[pass_name]
    arguments: dict[str, Any] = _log_probs(micro, term, passes["initial"].logp_BT)
    arguments["exact_kl_BT"] = exact_divergence(term, exact)
    if term.weight != "none":
        arguments["certainty_BT"] = certainty_of(term, exact)
    if term.top is not None:
        arguments["top"] = exact.top[term.top]
    if term.sampler_top is not None:
        arguments["sampler_top"] = exact.top[term.sampler_top]
    return arguments


def _has_reference(micro: MicroBatch, term: KLTerm) -> bool:
    # What other terms against the sampler read of it comes with the rollouts.
    comes_with_rollouts = term.reference == "sampler" and not term.reads_past_policy
    return comes_with_rollouts or term.reference in micro.references


def _log_probs(micro: MicroBatch, term: KLTerm, logp_BT: Tensor) -> dict[str, Tensor]:
    return {
        "logp_BT": logp_BT,
        "ref_logp_BT": micro.reference_of(term).logp_BT,
        "behaviour_logp_BT": micro.experience.behaviour_logp_BT,
        "mask_BT": micro.experience.mask_BT,
    }


# --- passes that are computed once ----------------------------------------------------------------------------------
class _Replay(Generic[Value]):
    """Results for the micro-batches of a fixed order: computed in the first round, repeated in later ones.

    :func:`prepare` is called once without KL terms and once for each term that needs all rows, and every time passes
    the same micro-batches in the same order. The n-th call since :meth:`restart` is for the n-th micro-batch. Calls are
    counted and not compared by their inputs: a micro-batch with the rows of an earlier one, on one rank only, would
    otherwise skip a pass there, and the other ranks would wait for it forever in a collective. No weights may move
    between rounds.
    """

    def __init__(self) -> None:
        self._results: list[Value] = []
        self._position = 0

    def restart(self) -> None:
        self._position = 0

    def next(self, compute: Callable[[], Value]) -> Value:
        """The result for the next micro-batch."""
        if self._position == len(self._results):
            self._results.append(compute())
        self._position += 1
        return self._results[self._position - 1]


class _ReplayedReference:
    """A reference that passes each micro-batch once."""

    def __init__(self, reference: Reference | PastPolicies) -> None:
        self._reference = reference
        self.replay: _Replay[ReferencePass] = _Replay()

    def forward_pass(self, **inputs: Any) -> ReferencePass:
        return self.replay.next(lambda: self._reference.forward_pass(**inputs))


class _ReplayedPolicy:
    """The policy, which passes each micro-batch once per reference, with what all of ``terms`` need of that."""

    def __init__(self, module: PolicyModule, terms: Sequence[KLTerm]) -> None:
        self._module = module
        self._terms = terms
        self._replays: dict[str, _Replay[TokenPass]] = {}

    def restart(self) -> None:
        for replay in self._replays.values():
            replay.restart()

    def policy_pass(
        self, inputs: Mapping[str, Tensor], reference: ReferencePass | None, terms: Sequence[KLTerm]
    ) -> TokenPass:
        """As ``PolicyModule.policy_pass``; ``terms`` have one reference, and are empty for DPO, which needs none."""
        name = terms[0].reference if terms else ""
        terms_of_reference = [term for term in self._terms if term.reference == name]
        replay = self._replays.setdefault(name, _Replay())
        return replay.next(lambda: self._module.policy_pass(inputs, reference, terms_of_reference))


# --- gradients ------------------------------------------------------------------------------------------------------
class BlockGradients(NamedTuple):
    """The gradients of a block as means over completions, and the sum of the sequence weights they were divided by."""

    by_layer: list[Tensor]
    """Sketched, ``[C, w]`` per layer group."""
    weight: float


def block_gradients(
    module: PolicyModule,
    rows: Sequence[Scored],
    audited: Sequence[AuditedTerm],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> BlockGradients:
    """The gradients over ``rows`` (whole groups) of the ``C`` losses ``audited``. All ranks must call.

    ``metrics`` counts this rank's tokens that each loss leaves without gradient, and the values of exact KL.
    """
    # A cost before the baseline, and a baseline of the term itself, are functions of all rows of the block; every
    # other loss is one of its micro-batch.
    need_all_rows = [item for item in audited if item.term is not None and item.term.needs_update]
    micros, with_terms = _prepare_all(module, rows, need_all_rows)
    # In float64: with thousands of rows, the order of the micro-batches would show in the last digits.
    weights = torch.stack([micro.experience.weight_B.double().sum() for micro in micros])
    weight = float(module.ranks.sum(weights.sum()))

    totals: list[list[Tensor]] = []
    for n, micro in enumerate(micros):
        with_term = {key: term_micros[n] for key, term_micros in with_terms.items()}
        gradients = _micro_gradients(module, micro, with_term, audited, sketch, metrics)
        if not totals:
            totals = gradients
            continue
        for total_by_layer, by_layer in zip(totals, gradients, strict=True):
            for layer, gradient in enumerate(by_layer):
                total_by_layer[layer] = total_by_layer[layer] + gradient

    # The weights of a run's update may sum to anything (`algorithm.reduction_constant`); means can be compared.
    scale = 1.0 / weight if weight > 0 else 0.0
    by_layer = []
    for layer in range(len(sketch.names)):
        of_all_losses = torch.stack([total_by_layer[layer] for total_by_layer in totals])
        by_layer.append(module.ranks.sum(of_all_losses) * scale)
    return BlockGradients(by_layer=by_layer, weight=weight)


def _prepare_all(
    module: PolicyModule, rows: Sequence[Scored], items: Sequence[AuditedTerm]
) -> tuple[list[MicroBatch], dict[str, list[MicroBatch]]]:
    """The micro-batches prepared without any KL term, and by key of each item with its term alone."""
    references = {name: _ReplayedReference(reference) for name, reference in module.references.items()}
    policy = _ReplayedPolicy(module, [item.term for item in items if item.term is not None])

    def prepare_with(terms: Mapping[str, KLTerm], betas: Mapping[str, float]) -> list[MicroBatch]:
        policy.restart()
        for reference in references.values():
            reference.replay.restart()
        return prepare(
            rows,
            dataclasses.replace(module.plan, terms=terms),
            betas=betas,
            references=cast("Mapping[str, Reference]", references),
            policy_pass=policy.policy_pass,
            old_policy=module.record(rows),
        )

    without_terms = prepare_with({}, {})
    with_terms = {}
    for item in items:
        assert item.term is not None
        with_terms[item.key] = prepare_with({item.key: item.term}, {item.key: item.unit})
    return without_terms, with_terms


class _DetachedPasses(NamedTuple):
    """Passes whose tensors are leaves: ``leaves[n]`` of ``passes`` has the value of ``outputs[n]`` of the model."""

    passes: dict[str, TokenPass]
    outputs: list[Tensor]
    leaves: list[Tensor]


def _micro_gradients(
    module: PolicyModule,
    micro: MicroBatch,
    with_term: Mapping[str, MicroBatch],
    audited: Sequence[AuditedTerm],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> list[list[Tensor]]:
    """Per loss, per layer group, this rank's part of the sketch of one micro-batch's gradient.

    The chain rule is applied in two steps: each loss is differentiated in leaves that stand for the passes' outputs,
    then the outputs in the parameters. All losses so share one pass of the model, and the first step tells which
    tokens have no gradient.
    """
    algorithm = module.config.algorithm
    mask_BT = micro.experience.mask_BT
    passes = module.passes(micro, terms=[item.term for item in audited if item.term is not None])
    if not micro.empty:
        _count_values(metrics, micro, passes["initial"], audited, algorithm)

    detached = _detach(passes)
    leaf_gradients: list[Sequence[Tensor | None]] = []
    for item in audited:
        loss = loss_of(item, micro, with_term.get(item.key), detached.passes, algorithm)
        by_leaf: Sequence[Tensor | None] = [None] * len(detached.leaves)
        if loss.requires_grad:
            by_leaf = torch.autograd.grad(loss, detached.leaves, allow_unused=True)
        leaf_gradients.append(by_leaf)
        if not micro.empty:
            metrics.add(f"silent/{item.key}", _silent_tokens(by_leaf, mask_BT).sum(), float(mask_BT.sum()))

    sketches = []
    for n, by_leaf in enumerate(leaf_gradients):
        outputs = []
        weights = []
        for output, weight in zip(detached.outputs, by_leaf, strict=True):
            if weight is not None:
                outputs.append(output)
                weights.append(weight)
        gradients: Sequence[Tensor | None] = [None] * len(sketch.parameters)
        # Whether a loss reads an output at all follows from its formula and not from the rows, so that under FSDP
        # either every rank calls `differentiate` or none does.
        if outputs:
            is_last = n + 1 == len(leaf_gradients)
            gradients = differentiate(outputs, weights, sketch.parameters, retain_graph=not is_last)
        sketches.append(sketch.fold(gradients))
    return sketches


def _detach(passes: Mapping[str, TokenPass]) -> _DetachedPasses:
    outputs: list[Tensor] = []
    leaves: list[Tensor] = []

    def leaf_of(output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        outputs.append(output)
        leaves.append(leaf)
        return leaf

    detached = {}
    for name, policy_pass in passes.items():
        columns = {}
        for column_name in ("logp_BT", "kl_BT", "forward_kl_BT"):
            column_BT = getattr(policy_pass, column_name)
            # What is only measured (a KL that no term reads, an entropy) is detached already.
            if column_BT is not None and column_BT.requires_grad:
                columns[column_name] = leaf_of(column_BT)
        top = {}
        for request, tokens in policy_pass.top.items():
            top[request] = tokens._replace(logp_BTK=leaf_of(tokens.logp_BTK))
        mixture = {share: leaf_of(divergence_BT) for share, divergence_BT in policy_pass.mixture.items()}
        detached[name] = dataclasses.replace(policy_pass, **columns, top=top, mixture=mixture)
    return _DetachedPasses(passes=detached, outputs=outputs, leaves=leaves)


def _silent_tokens(by_leaf: Sequence[Tensor | None], mask_BT: Tensor) -> Tensor:
    """The tokens ``[B, T]`` without gradient: clamped, capped, clipped, or without a cost.

    All derivatives of a loss with respect to such a token's log-prob and exact KLs are zero.
    """
    silent_BT = mask_BT.clone()
    for derivative in by_leaf:
        if derivative is not None:
            is_zero = derivative == 0
            # Top tokens have K log-probs per position, other outputs one.
            silent_BT &= is_zero.reshape(*mask_BT.shape, -1).all(-1)
    return silent_BT


def _count_values(
    metrics: MetricAccumulator,
    micro: MicroBatch,
    policy_pass: TokenPass,
    audited: Sequence[AuditedTerm],
    algorithm: AlgorithmConfig,
) -> None:
    """Count lengths, exact KL (nats), and the tokens that clamps, caps and the policy loss's clip changed."""
    mask_BT = micro.experience.mask_BT
    logp_BT = policy_pass.logp_BT.detach()
    tokens = float(mask_BT.sum())
    rows = float(len(mask_BT))
    assert policy_pass.kl_BT is not None
    exact_kl = policy_pass.kl_BT.detach().double().sum()
    metrics.add("exact_kl_token", exact_kl, tokens)
    metrics.add("exact_kl_sequence", exact_kl, rows)
    metrics.add("length", tokens, rows)
    for item in audited:
        if item.term is None or not _has_reference(micro, item.term):
            continue
        shares = kl_diagnostics(item.term, **_log_probs(micro, item.term, logp_BT))
        for change in ("clamped", "capped"):
            share = shares.get(f"{change}_share")
            if share is not None:
                metrics.add(f"{change}/{item.key}", share * tokens, tokens)
    clipped_BT = policy_parts(micro, logp_BT, algorithm).clipped_BT
    if clipped_BT is not None:
        metrics.add("clipped", clipped_BT.sum(), tokens)
