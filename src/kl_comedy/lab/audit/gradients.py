"""Gradients of the policy loss and of KL terms on one block of completions, by layer group, sketched.

    rows -> micro-batches -> one pass of the policy -> per loss: gradient of log-probs and exact KLs -> of parameters

The losses are written with :func:`kl_surrogate` and the policy loss directly, not through the training step, so that
the check of beta compares two independent implementations. Nothing is left in ``.grad``, no random number is drawn.

With several processes each passes and differentiates its micro-batches. Sketches are linear, so those of all ranks add
up to the sketch of the whole gradient: of whole gradients of a rank's micro-batches (DDP), or of a rank's shard of the
gradient of all (FSDP, one backward pass for each loss).

Legend: ``B`` sequences, ``T`` completion tokens, ``C`` losses, ``w`` the width of a sketch.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
    from kl_comedy.models.logprobs import TokenPass
    from kl_comedy.models.reference import ReferencePass

MAX_RUNS_OF_BLOCKS = 6
"""Deep models are audited by at most so many runs of blocks, so that the table stays readable."""


class Sketch:
    """A linear sketch of a long vector that keeps inner products, so that many gradients fit in memory.

    Coordinate i is added, with a random sign, to one of ``size`` buckets (Charikar et al. 2002, Count Sketch). For
    fixed vectors the sketched inner product is unbiased over the signs, with a standard deviation of at most
    ``|x| |y| sqrt(2 / size)``: 0.6% of ``|x| |y|`` at the default. Sums of sketches are the sketch of the sum.

    The identity where ``dimension <= size`` or ``size`` is 0; else blocks of ``size`` coordinates are signed, rotated
    by a random shift each, and summed. The map depends on ``(dimension, size, generator)`` only.
    """

    def __init__(self, dimension: int, size: int, generator: torch.Generator) -> None:
        self.exact = size == 0 or dimension <= size
        self.width = dimension if self.exact else size
        if not self.exact:
            signs = torch.randint(0, 2, (dimension,), generator=generator, dtype=torch.int8)
            self._signs = signs * 2 - 1
            self._shifts = torch.randint(0, size, (-(-dimension // size),), generator=generator).tolist()

    def add(self, folded: Tensor, part: Tensor, start: int) -> None:
        """Add coordinates ``start`` to ``start + len(part)`` of a vector to its sketch ``folded [width]``, in place."""
        if self.exact:
            folded[start : start + len(part)] += part
            return
        self._signs = self._signs.to(part.device)
        signed = part * self._signs[start : start + len(part)]
        while len(signed):
            block, offset = divmod(start, self.width)
            of_block, signed = signed[: self.width - offset], signed[self.width - offset :]
            place = (offset + self._shifts[block]) % self.width
            before_end = of_block[: self.width - place]
            folded[place : place + len(before_end)] += before_end
            folded[: len(of_block) - len(before_end)] += of_block[len(before_end) :]
            start += len(of_block)


def layer_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The trainable parameters by layer group, in the model's order.

    The block of a parameter is the first whole number in its name. A head that shares its weight with the embeddings
    is counted there.
    """
    embedding = unwrap(model).get_input_embeddings().weight
    tied = embedding is unwrap(model).get_output_embeddings().weight
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    block_of = {name: int(match[1]) for name, _ in trained if (match := re.search(r"\.(\d+)\.", name))}
    blocks = sorted(set(block_of.values()))
    size = -(-len(blocks) // MAX_RUNS_OF_BLOCKS) or 1
    labels: dict[int, str] = {}
    for start in range(0, len(blocks), size):
        run = blocks[start : start + size]
        labels |= dict.fromkeys(run, f"block {run[0]}" if len(run) == 1 else f"blocks {run[0]}-{run[-1]}")
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in trained:
        if name in block_of:
            label = labels[block_of[name]]
        elif parameter is embedding:
            label = "embeddings and head" if tied else "embeddings"
        else:
            label = "final norm" if tied else "head"
        groups.setdefault(label, []).append(parameter)
    return groups


class GradientSketch:
    """A sketch of ``size`` numbers (0: exact) per layer group, the same for the same model every time."""

    def __init__(self, groups: Mapping[str, Sequence[nn.Parameter]], size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.names = list(groups)
        self.parameters = [parameter for group in groups.values() for parameter in group]
        self._counts = [len(group) for group in groups.values()]
        self._sketches = [Sketch(sum(p.numel() for p in group), size, generator) for group in groups.values()]

    def fold(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Per-parameter gradients (None is zero) to one sketch per group, to be added up over the ranks."""
        pairs = zip(self.parameters, gradients, strict=True)
        sketches: list[Tensor] = []
        for sketch, count in zip(self._sketches, self._counts, strict=True):
            folded = torch.zeros(sketch.width, device=self.parameters[0].device)
            start = 0
            for parameter, gradient in islice(pairs, count):
                if gradient is not None:
                    part, first = _local_part(gradient)
                    sketch.add(folded, part, start + first)
                start += parameter.numel()
            sketches.append(folded)
        return sketches


def _local_part(gradient: Any) -> tuple[Tensor, int]:
    """This rank's part of a gradient, flat and in float32, and its first coordinate in the whole.

    FSDP2 shards rows in equal chunks. Its reduction takes the mean over all ranks; times the number of shards, the
    parts of all ranks add up to the sum, also where there are several copies of each shard.
    """
    if not hasattr(gradient, "to_local"):
        return gradient.detach().float().flatten(), 0
    mesh, last = gradient.device_mesh, gradient.device_mesh.ndim - 1
    chunk = -(-gradient.shape[0] // mesh.size(last))
    first = min(chunk * mesh.get_local_rank(last), gradient.shape[0]) * math.prod(gradient.shape[1:])
    return gradient.to_local().detach().float().flatten() * mesh.size(last), first


def differentiate(
    outputs: Sequence[Tensor],
    weights: Sequence[Tensor] | None,
    parameters: Sequence[nn.Parameter],
    *,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """Gradients of ``outputs`` in the parameters; under FSDP reduced, in shards, and every rank must call.

    By a backward pass, for ``torch.autograd.grad`` does not run FSDP's reduction.
    """
    torch.autograd.backward(outputs, weights, retain_graph=retain_graph)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def reference_term(reference: str, *, on_policy: bool, group_size: int) -> KLTerm:
    """The term whose gradient others are measured against: unbiased for the sequence KL, low in variance.

    The exact KL of each prefix with future credit (2506.09477), off-policy times the ratio of the tokens before,
    less the leave-one-out mean over the group where there is a group.
    """
    correction, baseline = "none" if on_policy else "prefix_previous", "own" if group_size > 1 else "after"
    settings = {"credit": "to_go", "correction": correction, "baseline": baseline, "reference": reference}
    return KLTerm("exact", placement="reward", **settings)


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


def loss_of(
    item: AuditedTerm,
    micro: MicroBatch,
    with_term: MicroBatch | None,
    passes: Mapping[str, TokenPass],
    algorithm: AlgorithmConfig,
) -> Tensor:
    """The loss over one micro-batch. ``with_term`` is the same micro-batch, prepared with the term alone."""
    logp_BT, term = passes["initial"].logp_BT, item.term
    if term is None:
        loss_BT = policy_parts(micro, logp_BT, algorithm).loss_BT
    else:
        if not _has_reference(micro, term):
            raise UserError(
                f"audit: {term.label()} is measured against the {term.reference} reference, which this config does "
                "not keep; give the config a term that names it"
            )
        exact = passes["initial" if term.reference == "sampler" else term.reference]
        arguments: dict[str, Any] = _log_probs(micro, term, logp_BT)
        arguments["exact_kl_BT"] = exact_divergence(term, exact)
        arguments |= {} if term.weight == "none" else {"certainty_BT": certainty_of(term, exact)}
        arguments |= {} if term.top is None else {"top": exact.top[term.top]}
        if term.baseline == "before":
            assert with_term is not None
            with_BT, without_BT = (policy_parts(each, logp_BT, algorithm).loss_BT for each in (with_term, micro))
            loss_BT = (with_BT - without_BT) / item.unit + kl_parts(term, **arguments).pathwise_BT
        else:
            baseline_BT = None if with_term is None else with_term.baselines.get(item.key)
            loss_BT = kl_surrogate(term, **arguments, baseline_BT=baseline_BT)
    inside_BT = torch.where(micro.experience.mask_BT, loss_BT, 0.0)
    return (micro.experience.weight_B * inside_BT.sum(-1)).sum()


def _has_reference(micro: MicroBatch, term: KLTerm) -> bool:
    return term.reference in ("sampler", *micro.references)


def _log_probs(micro: MicroBatch, term: KLTerm, logp_BT: Tensor) -> dict[str, Any]:
    behaviour_BT, mask_BT = micro.experience.behaviour_logp_BT, micro.experience.mask_BT
    reference_BT = micro.reference_of(term).logp_BT
    return {"logp_BT": logp_BT, "ref_logp_BT": reference_BT, "behaviour_logp_BT": behaviour_BT, "mask_BT": mask_BT}


class _ComputedOnce:
    """``compute(name, *arguments)`` of each micro-batch of a fixed order, made once; while no weights move.

    The n-th call of a name since :meth:`restart` is of the n-th micro-batch. Calls are not told apart by their inputs:
    micro-batches with equal rows on one rank only would leave it out of step with the others.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self._compute = compute
        self._results: dict[str, list[Any]] = defaultdict(list)
        self.restart()

    def restart(self) -> None:
        self._calls: dict[str, int] = defaultdict(int)

    def __call__(self, name: str, *arguments: Any) -> Any:
        n, results = self._calls[name], self._results[name]
        self._calls[name] += 1
        if n == len(results):
            results.append(self._compute(name, *arguments))
        return results[n]


def block_gradients(
    module: PolicyModule,
    rows: Sequence[Scored],
    audited: Sequence[AuditedTerm],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> tuple[list[Tensor], float]:
    """Gradients over ``rows`` (whole groups) as means over completions: ``[C, w]`` per layer group.

    Also the sum of the sequence weights that they were divided by. ``metrics`` counts the tokens of this rank that each
    loss leaves without gradient, and the values of exact KL. All ranks must call.
    """
    # A cost before the baseline, and a baseline of the term itself, need all rows.
    alone = {item.key: item for item in audited if item.term is not None and item.term.needs_update}
    pass_reference = _ComputedOnce(lambda name, inputs: module.references[name].forward_pass(**inputs))
    references: dict[str, Any] = {
        name: SimpleNamespace(forward_pass=lambda name=name, **inputs: pass_reference(name, inputs))
        for name in module.references
    }

    def pass_with_exact_kl(name: str, inputs: Mapping[str, Tensor], reference: ReferencePass | None) -> TokenPass:
        """The policy's pass with whatever any of the terms against the same reference needs."""
        alike = [item.term for item in alone.values() if item.term is not None and item.term.reference == name]
        return module.policy_pass(inputs, reference, alike)

    pass_policy = _ComputedOnce(pass_with_exact_kl)

    def policy_pass(inputs: Mapping[str, Tensor], reference: ReferencePass | None, terms: Sequence[KLTerm]) -> Any:
        return pass_policy(terms[0].reference if terms else "", inputs, reference)

    def prepared(item: AuditedTerm | None) -> list[MicroBatch]:
        """The rows prepared without any KL term, or with one alone."""
        terms = {} if item is None or item.term is None else {item.key: item.term}
        pass_reference.restart()
        pass_policy.restart()
        return prepare(
            rows,
            dataclasses.replace(module.plan, terms=terms),
            betas={item.key: item.unit} if item else {},
            references=references,
            policy_pass=policy_pass,
            old_policy=module.record(rows),
        )

    micros = prepared(None)
    with_terms = {key: prepared(item) for key, item in alone.items()}
    weight = float(module.ranks.sum(torch.stack([micro.experience.weight_B.double().sum() for micro in micros]).sum()))
    total: list[list[Tensor]] = []
    for n, micro in enumerate(micros):
        with_term = {key: batches[n] for key, batches in with_terms.items()}
        gradients = _micro_gradients(module, micro, with_term, audited, sketch, metrics)
        if total:
            gradients = [[a + b for a, b in zip(t, g, strict=True)] for t, g in zip(total, gradients, strict=True)]
        total = gradients
    scale = 1.0 / weight if weight > 0 else 0.0
    return [module.ranks.sum(torch.stack(of_group)) * scale for of_group in zip(*total, strict=True)], weight


def _micro_gradients(
    module: PolicyModule,
    micro: MicroBatch,
    with_term: Mapping[str, MicroBatch],
    audited: Sequence[AuditedTerm],
    sketch: GradientSketch,
    metrics: MetricAccumulator,
) -> list[list[Tensor]]:
    """Per loss, per layer group, this rank's part of the sketch of one micro-batch's gradient."""
    algorithm, mask_BT = module.config.algorithm, micro.experience.mask_BT
    passes = module.passes(micro, terms=[item.term for item in audited if item.term is not None])
    if not micro.empty:
        _count_values(metrics, micro, passes["initial"], audited, algorithm)
    # Each loss is differentiated in leaves that stand for the passes' outputs, then the outputs in the parameters.
    outputs: list[Tensor] = []
    leaves: list[Tensor] = []
    detached: dict[str, TokenPass] = {}
    for name, policy_pass in passes.items():
        values = {field: getattr(policy_pass, field) for field in ("logp_BT", "kl_BT", "forward_kl_BT")}
        values = {field: value for field, value in values.items() if value is not None and value.requires_grad}
        replaced = {field: value.detach().requires_grad_() for field, value in values.items()}
        tops = {request: top.logp_BTK.detach().requires_grad_() for request, top in policy_pass.top.items()}
        outputs += [*values.values(), *(top.logp_BTK for top in policy_pass.top.values())]
        mixture = {share: value.detach().requires_grad_() for share, value in policy_pass.mixture.items()}
        outputs += policy_pass.mixture.values()
        leaves += [*replaced.values(), *tops.values(), *mixture.values()]
        top = {request: policy_pass.top[request]._replace(logp_BTK=leaf) for request, leaf in tops.items()}
        detached[name] = dataclasses.replace(policy_pass, **replaced, mixture=mixture, top=top)
    derivatives: list[Sequence[Tensor | None]] = []
    for item in audited:
        value = loss_of(item, micro, with_term.get(item.key), detached, algorithm)
        by_leaf = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else ()
        derivatives.append(by_leaf or (None,) * len(leaves))
        # Clamped, capped, clipped, or of no cost: all derivatives of the token's log-prob and exact KLs are zero.
        silent_BT = mask_BT.clone()
        for derivative in by_leaf:
            if derivative is not None:
                silent_BT &= (derivative == 0).reshape(*mask_BT.shape, -1).all(-1)
        if not micro.empty:
            metrics.add(f"silent/{item.key}", silent_BT.sum(), float(mask_BT.sum()))
    gradients = []
    for n, by_leaf in enumerate(derivatives):
        used = [(output, weight) for output, weight in zip(outputs, by_leaf, strict=True) if weight is not None]
        of_parameters: Sequence[Tensor | None] = [None] * len(sketch.parameters)
        if used:
            used_outputs, weights = zip(*used, strict=True)
            retain_graph = n + 1 < len(derivatives)
            of_parameters = differentiate(used_outputs, weights, sketch.parameters, retain_graph=retain_graph)
        gradients.append(sketch.fold(of_parameters))
    return gradients


def _count_values(
    metrics: MetricAccumulator,
    micro: MicroBatch,
    policy_pass: TokenPass,
    audited: Sequence[AuditedTerm],
    algorithm: AlgorithmConfig,
) -> None:
    """Count lengths, exact KL, and the tokens that clamps, caps and the policy loss's clip changed."""
    mask_BT, logp_BT = micro.experience.mask_BT, policy_pass.logp_BT.detach()
    tokens, rows = float(mask_BT.sum()), float(len(mask_BT))
    assert policy_pass.kl_BT is not None
    exact_kl = policy_pass.kl_BT.detach().double().sum()
    metrics.add("exact_kl_token", exact_kl, tokens)
    metrics.add("exact_kl_sequence", exact_kl, rows)
    metrics.add("length", tokens, rows)
    for item in audited:
        if item.term is not None and _has_reference(micro, item.term):
            shares = kl_diagnostics(item.term, **_log_probs(micro, item.term, logp_BT))
            for name in ("clamped", "capped"):
                if f"{name}_share" in shares:
                    metrics.add(f"{name}/{item.key}", shares[f"{name}_share"] * tokens, tokens)
    clipped_BT = policy_parts(micro, logp_BT, algorithm).clipped_BT
    if clipped_BT is not None:
        metrics.add("clipped", clipped_BT.sum(), tokens)
