"""Gradients of the policy loss and of KL terms on one block of completions, by layer group, sketched.

    rows -> micro-batches -> one pass of the policy -> per loss: gradient of log-probs and exact KLs -> of parameters

The losses are written with :func:`kl_surrogate` and the policy loss directly, not through the training step, so that
the check of beta compares two independent implementations. Gradients of the log-probs and exact KLs are elementwise
and cheap, and tell which tokens get no gradient at all; one backward pass through the model per loss follows. Nothing
is left in ``.grad``, and no random number is drawn.

Legend: ``B`` sequences, ``T`` completion tokens, ``C`` losses, ``G`` layer groups, ``w`` the width of a sketch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kl_comedy.config import AlgorithmConfig
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, kl_diagnostics, kl_parts, kl_surrogate
from kl_comedy.models.introspection import unwrap
from kl_comedy.models.logprobs import TokenPass
from kl_comedy.records import Scored
from kl_comedy.training.loss import policy_parts
from kl_comedy.training.metrics import MetricAccumulator
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.prepare import MicroBatch, prepare

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass
    from kl_comedy.models.reference import Reference, ReferencePass


class Sketch:
    """A linear sketch of a long vector that keeps inner products, so that many gradients fit in memory.

    Coordinate i is added, with a random sign, to one of ``size`` buckets (Charikar et al. 2002, Count Sketch). For
    fixed vectors the sketched inner product is unbiased over the signs, with a standard deviation of at most
    ``|x| |y| sqrt(2 / size)``: 0.6% of ``|x| |y|`` at the default. Sums of sketches are the sketch of the sum.

    The identity where ``dimension <= size`` or ``size`` is 0; else blocks of ``size`` coordinates are signed, rotated
    by a random shift each, and summed. The map depends on ``(dimension, size, generator)`` only.
    """

    def __init__(self, dimension: int, size: int, generator: torch.Generator) -> None:
        self.dimension = dimension
        self.exact = size == 0 or dimension <= size
        self.width = dimension if self.exact else size
        self._signs: Tensor | None = None
        self._shifts: list[int] = []
        if not self.exact:
            blocks = -(-dimension // size)
            signs = torch.randint(0, 2, (dimension,), generator=generator, dtype=torch.int8)
            self._signs = signs * 2 - 1
            self._shifts = torch.randint(0, size, (blocks,), generator=generator).tolist()

    def __call__(self, vector: Tensor) -> Tensor:
        """``[dimension]`` to ``[width]``, float32, on the vector's device."""
        if vector.shape != (self.dimension,):
            raise ValueError(f"a vector of {self.dimension} numbers was promised, got {tuple(vector.shape)}")
        vector = vector.float()
        if self._signs is None:
            return vector
        self._signs = self._signs.to(vector.device)
        folded = vector.new_zeros(self.width)
        for block, shift in enumerate(self._shifts):
            part = slice(block * self.width, (block + 1) * self.width)
            signed = vector[part] * self._signs[part]
            split = min(self.width - shift, len(signed))
            folded[shift : shift + split] += signed[:split]
            folded[: len(signed) - split] += signed[split:]
        return folded


RUNS_OF_BLOCKS = 6
"""Deep models are audited by at most so many runs of blocks: a table that can be read."""

_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """A name and the trainable parameters under it, in the model's order."""

    name: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)


def layer_groups(model: nn.Module) -> list[LayerGroup]:
    """Split the trainable parameters. The block of a parameter is the first whole number in its name.

    A head that shares its weight with the embeddings is counted there.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = sorted({block for name, _ in named if (block := _block_of(name)) is not None})
    labels = _labels(blocks)
    embedding = unwrap(model).get_input_embeddings().weight
    tied = embedding is unwrap(model).get_output_embeddings().weight
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        block = _block_of(name)
        if block is not None:
            label = labels[block]
        elif parameter is embedding:
            label = "embeddings and head" if tied else "embeddings"
        else:
            label = "final norm" if tied else "head"
        groups.setdefault(label, []).append(parameter)
    return [LayerGroup(name=name, parameters=tuple(parameters)) for name, parameters in groups.items()]


def _block_of(name: str) -> int | None:
    match = _BLOCK.search(name)
    return None if match is None else int(match.group(1))


def _labels(blocks: Sequence[int]) -> Mapping[int, str]:
    """A label per block: its own where there are few, else that of its run."""
    size = -(-len(blocks) // RUNS_OF_BLOCKS) if blocks else 1
    labels = {}
    for start in range(0, len(blocks), size):
        run = blocks[start : start + size]
        label = f"block {run[0]}" if len(run) == 1 else f"blocks {run[0]}-{run[-1]}"
        labels.update(dict.fromkeys(run, label))
    return labels


def reference_term(reference: str, *, on_policy: bool, group_size: int) -> KLTerm:
    """The term whose gradient others are measured against: unbiased for the sequence KL, low in variance.

    The exact KL of each prefix with future credit (2506.09477), off-policy times the ratio of the tokens before,
    less the leave-one-out mean over the group where there is a group.
    """
    return KLTerm(
        "exact",
        placement="reward",
        credit="to_go",
        reference=reference,
        correction="none" if on_policy else "prefix_previous",
        baseline="own" if group_size > 1 else "after",
    )


@dataclass(frozen=True, kw_only=True)
class AuditedLoss:
    """One gradient: the policy loss where ``term`` is None, else the term at beta = 1.

    A term before the baseline exists only through the advantage: its loss is the policy loss with the cost, less the
    policy loss without, over ``beta`` (at the coefficient in force, for advantages are not linear in it).
    """

    name: str
    term: KLTerm | None
    beta: float = 1.0

    @property
    def needs_all_rows(self) -> bool:
        """Whether the term is prepared over all rows: a cost before the baseline, or a baseline of its own."""
        return self.term is not None and self.term.baseline in ("before", "own")


def loss_of(
    loss: AuditedLoss,
    micro: MicroBatch,
    with_term: MicroBatch | None,
    passes: Mapping[str, TokenPass],
    algorithm: AlgorithmConfig,
) -> Tensor:
    """The loss over one micro-batch. ``with_term`` is the same micro-batch, prepared with the loss's term alone."""
    experience = micro.experience
    if loss.term is None:
        return _weighted(_policy_loss(micro, passes, algorithm), micro)
    term = loss.term
    if term.reference not in ("sampler", *micro.references):
        raise UserError(
            f"audit: {term.label()} is measured against the {term.reference} reference, which this config does not "
            "keep; give the config a term that names it"
        )
    policy_pass = passes["initial" if term.reference == "sampler" else term.reference]
    arguments: dict[str, Any] = {
        "logp_BT": passes["initial"].logp_BT,
        "ref_logp_BT": micro.reference_of(term).logp_BT,
        "behaviour_logp_BT": experience.behaviour_logp_BT,
        "mask_BT": experience.mask_BT,
        "exact_kl_BT": policy_pass.forward_kl_BT if term.needs == "exact_forward" else policy_pass.kl_BT,
    }
    if term.baseline != "before":
        baseline_BT = None if with_term is None else with_term.baselines.get(0)
        return _weighted(kl_surrogate(term, **arguments, baseline_BT=baseline_BT), micro)
    assert with_term is not None
    change_BT = _policy_loss(with_term, passes, algorithm) - _policy_loss(micro, passes, algorithm)
    return _weighted(change_BT / loss.beta + kl_parts(term, **arguments).pathwise_BT, micro)


def _policy_loss(micro: MicroBatch, passes: Mapping[str, TokenPass], algorithm: AlgorithmConfig) -> Tensor:
    return policy_parts(micro, passes["initial"].logp_BT, algorithm).loss_BT


def _weighted(loss_BT: Tensor, micro: MicroBatch) -> Tensor:
    inside_BT = torch.where(micro.experience.mask_BT, loss_BT, 0.0)
    return (micro.experience.weight_B * inside_BT.sum(-1)).sum()


class CachedReference:
    """A reference that passes equal inputs once. For as long as it does not move."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._passes: dict[Any, ReferencePass] = {}
        self.moving = reference.moving

    @property
    def hash(self) -> str:
        return self._reference.hash

    def forward_pass(self, **inputs: Tensor) -> ReferencePass:
        key = _key(inputs)
        if key not in self._passes:
            self._passes[key] = self._reference.forward_pass(**inputs)
        return self._passes[key]


class CachedPolicy:
    """The policy's pass over equal inputs and one reference, once, with whatever any of its ``terms`` needs."""

    def __init__(self, policy_pass: Callable[..., TokenPass], terms: Sequence[KLTerm]) -> None:
        self._policy_pass, self._terms = policy_pass, list(terms)
        # The reference's pass is kept beside the policy's, so that its id stays its own.
        self._passes: dict[Any, tuple[TokenPass, ReferencePass]] = {}

    def __call__(self, inputs: Mapping[str, Tensor], reference: ReferencePass, terms: Sequence[KLTerm]) -> TokenPass:
        names = frozenset(term.reference for term in terms)
        key = (_key(inputs), id(reference), names)
        if key not in self._passes:
            alike = [term for term in self._terms if term.reference in names]
            self._passes[key] = self._policy_pass(inputs, reference, alike), reference
        return self._passes[key][0]


def _key(inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, inputs[name].shape, inputs[name].cpu().numpy().tobytes()) for name in sorted(inputs))


@dataclass(frozen=True, kw_only=True)
class GradientSketch:
    """Where gradients go: the layer groups and the sketch of each, in the same order."""

    groups: Sequence[LayerGroup]
    sketches: Sequence[Sketch]

    @classmethod
    def of(cls, groups: Sequence[LayerGroup], size: int) -> GradientSketch:
        """Sketches of ``size`` (0: exact), the same for the same model every time."""
        generator = torch.Generator().manual_seed(0)
        return cls(groups=groups, sketches=[Sketch(group.size, size, generator) for group in groups])

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.groups for p in group.parameters]

    def fold(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Per-parameter gradients (None is zero) to one sketch per group."""
        flat = [
            (torch.zeros_like(p) if g is None else g).detach().float().flatten()
            for p, g in zip(self.parameters, gradients, strict=True)
        ]
        folded, start = [], 0
        for group, sketch in zip(self.groups, self.sketches, strict=True):
            stop = start + len(group.parameters)
            folded.append(sketch(torch.cat(flat[start:stop])))
            start = stop
        return folded


@dataclass(frozen=True, kw_only=True)
class BlockGradients:
    """One block: ``vectors[g]`` is ``[C, w_g]``; ``weight`` the sum of sequence weights they were divided by."""

    vectors: Sequence[Tensor]
    weight: float


def block_gradients(
    module: PolicyModule,
    rows: Sequence[Scored],
    losses: Sequence[AuditedLoss],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> BlockGradients:
    """Gradients of the losses over ``rows`` (whole groups), as means over completions.

    ``metrics`` counts the tokens that each loss leaves without gradient, and the values of exact KL.
    """
    prepared_alone = [loss for loss in losses if loss.needs_all_rows]
    references = {name: CachedReference(reference) for name, reference in module.references.items()}
    policy_pass = CachedPolicy(module.policy_pass, [loss.term for loss in prepared_alone if loss.term is not None])

    def prepared(loss: AuditedLoss | None) -> list[MicroBatch]:
        """The rows prepared without any KL term, or with the term of one loss alone."""
        terms = () if loss is None or loss.term is None else (loss.term,)
        return prepare(
            rows,
            dataclasses.replace(module.plan, terms=terms),
            betas=[loss.beta] * len(terms) if loss else [],
            references=references,
            policy_pass=policy_pass,
            old_policy=module.record(rows),
        )

    micros = prepared(None)
    alone = {loss.name: prepared(loss) for loss in prepared_alone}
    weight = float(sum(micro.experience.weight_B.double().sum() for micro in micros))
    total: list[list[Tensor]] = []
    for n, micro in enumerate(micros):
        with_term = {name: batches[n] for name, batches in alone.items()}
        gradients = _micro_gradients(module, micro, with_term, losses, sketch, metrics)
        if total:
            gradients = [[a + b for a, b in zip(t, g, strict=True)] for t, g in zip(total, gradients, strict=True)]
        total = gradients
    scale = 1.0 / weight if weight > 0 else 0.0
    vectors = [torch.stack([of_loss[g] for of_loss in total]) * scale for g in range(len(sketch.groups))]
    return BlockGradients(vectors=vectors, weight=weight)


def _micro_gradients(
    module: PolicyModule,
    micro: MicroBatch,
    with_term: Mapping[str, MicroBatch],
    losses: Sequence[AuditedLoss],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> list[list[Tensor]]:
    """Per loss, per layer group, the sketch of one micro-batch's gradient."""
    passes = module.passes(micro, terms=[loss.term for loss in losses if loss.term is not None])
    _count_values(metrics, micro, passes["initial"])
    _count_bounds(metrics, module, micro, passes["initial"], losses)
    outputs, leaves, detached = _detached(passes)
    partials = []
    for loss in losses:
        value = loss_of(loss, micro, with_term.get(loss.name), detached, module.config.algorithm)
        partial = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
        partials.append(partial or (None,) * len(outputs))
        _count_silent(metrics, micro, loss, partials[-1])
    gradients = []
    for n, partial in enumerate(partials):
        used = [(output, weight) for output, weight in zip(outputs, partial, strict=True) if weight is not None]
        if not used:
            gradients.append(sketch.fold([None] * len(sketch.parameters)))
            continue
        last = n + 1 == len(partials)
        of_parameters = torch.autograd.grad(
            [output for output, _ in used],
            sketch.parameters,
            grad_outputs=[weight for _, weight in used],
            retain_graph=not last,
            allow_unused=True,
        )
        gradients.append(sketch.fold(of_parameters))
    return gradients


def _detached(passes: Mapping[str, TokenPass]) -> tuple[list[Tensor], list[Tensor], dict[str, TokenPass]]:
    """The differentiable outputs of the passes, detached leaves of them, and the passes with the leaves in place."""
    outputs: list[Tensor] = []
    leaves: list[Tensor] = []
    replaced: dict[str, TokenPass] = {}
    for name, policy_pass in passes.items():
        fields: dict[str, Tensor] = {}
        for field in ("logp_BT", "kl_BT", "forward_kl_BT"):
            output = getattr(policy_pass, field)
            if output is not None and output.requires_grad:
                fields[field] = output.detach().requires_grad_()
                outputs.append(output)
                leaves.append(fields[field])
        replaced[name] = dataclasses.replace(policy_pass, **fields)
    return outputs, leaves, replaced


def _count_values(metrics: MetricAccumulator, micro: MicroBatch, policy_pass: TokenPass) -> None:
    experience = micro.experience
    tokens, rows = float(experience.mask_BT.sum()), float(len(experience.mask_BT))
    assert policy_pass.kl_BT is not None
    metrics.add("exact_kl_token", policy_pass.kl_BT.detach().double().sum(), tokens)
    metrics.add("exact_kl_sequence", policy_pass.kl_BT.detach().double().sum(), rows)
    metrics.add("length", tokens, rows)


def _count_bounds(
    metrics: MetricAccumulator,
    module: PolicyModule,
    micro: MicroBatch,
    policy_pass: TokenPass,
    losses: Sequence[AuditedLoss],
) -> None:
    """Count the tokens that clamps, caps and the policy loss's clip changed."""
    experience = micro.experience
    logp_BT, tokens = policy_pass.logp_BT.detach(), float(experience.mask_BT.sum())
    for loss in losses:
        if loss.term is not None and loss.term.reference in ("sampler", *micro.references):
            shares = kl_diagnostics(
                loss.term,
                logp_BT=logp_BT,
                ref_logp_BT=micro.reference_of(loss.term).logp_BT,
                behaviour_logp_BT=experience.behaviour_logp_BT,
                mask_BT=experience.mask_BT,
            )
            for name in ("clamped", "capped"):
                if f"{name}_share" in shares:
                    metrics.add(f"{name}/{loss.name}", shares[f"{name}_share"] * tokens, tokens)
    clipped_BT = policy_parts(micro, logp_BT, module.config.algorithm).clipped_BT
    if clipped_BT is not None:
        metrics.add("clipped", clipped_BT.sum(), tokens)


def _count_silent(
    metrics: MetricAccumulator, micro: MicroBatch, loss: AuditedLoss, partial: Sequence[Tensor | None]
) -> None:
    """Count tokens whose log-prob and exact KLs all have gradient zero: clamped, capped, clipped, or of no cost."""
    mask_BT = micro.experience.mask_BT
    has_gradient_BT = torch.zeros_like(mask_BT)
    for part in partial:
        if part is not None:
            has_gradient_BT = has_gradient_BT | (part != 0)
    metrics.add(f"silent/{loss.name}", (mask_BT & ~has_gradient_BT).sum(), float(mask_BT.sum()))
