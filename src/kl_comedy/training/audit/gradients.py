"""The gradient of every channel on one block of completions, by layer group, sketched.

The policy is passed once a micro-batch. Each channel is differentiated with respect to the log-probs and the exact
KLs first, which is elementwise and cheap and says which tokens get no gradient at all; one backward pass per
channel through the model follows. Nothing is left in ``.grad``, and no random number is drawn.

Legend: ``C`` channels, ``G`` layer groups, ``w`` the width of a group's sketch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kl_comedy.kl import KLTerm, kl_diagnostics
from kl_comedy.models.logprobs import TokenPass
from kl_comedy.records import Scored
from kl_comedy.training.audit.channels import Channel, channel_loss
from kl_comedy.training.audit.layers import LayerGroup
from kl_comedy.training.audit.passes import PolicyOnce, ReferenceOnce
from kl_comedy.training.audit.sketch import Sketch
from kl_comedy.training.losses import policy_parts
from kl_comedy.training.measure import Tally
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.prepare import MicroBatch, prepare


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where gradients go: the layer groups and the sketch of each, in the same order."""

    groups: Sequence[LayerGroup]
    sketches: Sequence[Sketch]

    @classmethod
    def of(cls, groups: Sequence[LayerGroup], size: int) -> Layout:
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
    module: PolicyModule, rows: Sequence[Scored], channels: Sequence[Channel], layout: Layout, tally: Tally
) -> BlockGradients:
    """Gradients of the channels over ``rows`` (whole groups), as means over completions.

    ``tally`` counts the tokens that each channel leaves without gradient, and the values of exact KL.
    """
    seeing = [channel for channel in channels if channel.sees_the_update]
    once = _Once(
        references={name: ReferenceOnce(reference) for name, reference in module.references.items()},
        policy_pass=PolicyOnce(module.policy_pass, [channel.term for channel in seeing if channel.term is not None]),
    )
    micros = _prepared(module, rows, None, once)
    alone = {channel.name: _prepared(module, rows, channel, once) for channel in seeing}
    weight = float(sum(micro.experience.weight_B.double().sum() for micro in micros))
    total: list[list[Tensor]] = []
    for n, micro in enumerate(micros):
        with_term = {name: prepared[n] for name, prepared in alone.items()}
        gradients = _micro_gradients(module, micro, with_term, channels, layout, tally)
        total = [_sum(t, g) for t, g in zip(total, gradients, strict=True)] if total else gradients
    scale = 1.0 / weight if weight > 0 else 0.0
    vectors = [torch.stack([channel[g] for channel in total]) * scale for g in range(len(layout.groups))]
    return BlockGradients(vectors=vectors, weight=weight)


def _sum(total: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(total, more, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Once:
    """What preparing a block passes, remembered for as long as the block is at hand."""

    references: Mapping[str, ReferenceOnce]
    policy_pass: PolicyOnce


def _prepared(module: PolicyModule, rows: Sequence[Scored], channel: Channel | None, once: _Once) -> list[MicroBatch]:
    """The rows prepared without any KL term, or with the term of one channel alone."""
    terms: tuple[KLTerm, ...] = () if channel is None or channel.term is None else (channel.term,)
    return prepare(
        rows, dataclasses.replace(module.plan, terms=terms), betas=[channel.beta] * len(terms) if channel else [],
        references=once.references, policy_pass=once.policy_pass, first_use=module.record(rows),
    )  # fmt: skip


def _micro_gradients(
    module: PolicyModule, micro: MicroBatch, with_term: Mapping[str, MicroBatch], channels: Sequence[Channel],
    layout: Layout, tally: Tally,
) -> list[list[Tensor]]:  # fmt: skip
    """Per channel, per layer group, the sketch of one micro-batch's gradient."""
    passes = module.passes(micro, terms=[c.term for c in channels if c.term is not None])
    _tally_values(tally, micro, passes["initial"])
    _tally_options(tally, module, micro, passes["initial"], channels)
    tensors, leaves = _leaves(passes)
    cotangents = []
    for channel in channels:
        loss = channel_loss(channel, micro, with_term.get(channel.name), leaves.passes, module.config.algorithm)
        found = torch.autograd.grad(loss, leaves.tensors, allow_unused=True) if loss.requires_grad else ()
        cotangents.append(found or (None,) * len(tensors))
        _tally_silent(tally, micro, channel, cotangents[-1])
    gradients = []
    for n, cotangent in enumerate(cotangents):
        chosen = [(t, c) for t, c in zip(tensors, cotangent, strict=True) if c is not None]
        if not chosen:
            gradients.append(layout.fold([None] * len(layout.parameters)))
            continue
        outputs, weights = zip(*chosen, strict=True)
        gradients.append(
            layout.fold(
                torch.autograd.grad(
                    outputs, layout.parameters, grad_outputs=weights, retain_graph=n + 1 < len(cotangents),
                    allow_unused=True,
                )
            )
        )  # fmt: skip
    return gradients


@dataclass(frozen=True, kw_only=True)
class _Leaves:
    tensors: list[Tensor]
    passes: Mapping[str, TokenPass]


def _leaves(passes: Mapping[str, TokenPass]) -> tuple[list[Tensor], _Leaves]:
    """The differentiable outputs of the passes, and the same passes with detached leaves in their place."""
    outputs: list[Tensor] = []
    tensors: list[Tensor] = []
    replaced: dict[str, TokenPass] = {}
    for name, seen in passes.items():
        fresh: dict[str, Tensor] = {}
        for field in ("logp_BT", "kl_BT", "forward_kl_BT"):
            output = getattr(seen, field)
            if output is not None and output.requires_grad:
                fresh[field] = output.detach().requires_grad_()
                outputs.append(output)
                tensors.append(fresh[field])
        replaced[name] = dataclasses.replace(seen, **fresh)
    return outputs, _Leaves(tensors=tensors, passes=replaced)


def _tally_values(tally: Tally, micro: MicroBatch, seen: TokenPass) -> None:
    experience = micro.experience
    tokens, rows = float(experience.mask_BT.sum()), float(len(experience.mask_BT))
    assert seen.kl_BT is not None
    tally.add("exact_kl_token", seen.kl_BT.detach().double().sum(), tokens)
    tally.add("exact_kl_sequence", seen.kl_BT.detach().double().sum(), rows)
    tally.add("length", tokens, rows)


def _tally_options(
    tally: Tally, module: PolicyModule, micro: MicroBatch, seen: TokenPass, channels: Sequence[Channel]
) -> None:
    """Count what clamps, caps and the policy loss's clip did."""
    experience, algorithm = micro.experience, module.config.algorithm
    logp_BT, behaviour_BT, tokens = seen.logp_BT.detach(), experience.behaviour_logp_BT, float(experience.mask_BT.sum())
    for channel in channels:
        if channel.term is not None and channel.term.reference in ("sampler", *micro.references):
            shares = kl_diagnostics(
                channel.term, logp_BT=logp_BT, ref_logp_BT=micro.reference_of(channel.term).logp_BT,
                behaviour_logp_BT=behaviour_BT, mask_BT=experience.mask_BT,
            )  # fmt: skip
            for name in ("clamped", "capped"):
                if f"{name}_share" in shares:
                    tally.add(f"{name}/{channel.name}", shares[f"{name}_share"] * tokens, tokens)
    clipped_BT = policy_parts(micro, logp_BT, algorithm).clipped_BT
    if clipped_BT is not None:
        tally.add("clipped", clipped_BT.sum(), tokens)


def _tally_silent(tally: Tally, micro: MicroBatch, channel: Channel, cotangent: Sequence[Tensor | None]) -> None:
    """Count tokens whose log-prob and exact KLs all have gradient zero: clamped, capped, clipped, or of no cost."""
    mask_BT = micro.experience.mask_BT
    loud_BT = torch.zeros_like(mask_BT)
    for part in cotangent:
        if part is not None:
            loud_BT = loud_BT | (part != 0)
    tally.add(f"silent/{channel.name}", (mask_BT & ~loud_BT).sum(), float(mask_BT.sum()))
