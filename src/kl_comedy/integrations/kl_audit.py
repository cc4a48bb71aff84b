"""For TRL's trainers: the gradient of the KL part of the loss beside the exact gradient of a KL, on the run's batches.

trainer.add_callback(KLAudit(trainer, every=100, batches=4))

Legend: ``B`` completions, ``T`` their tokens, ``V`` the vocabulary, ``K`` blocks; ``g`` the gradient of the KL part at
coefficient 1, ``p`` that of the loss at coefficient 0, ``r`` the reference gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kl_comedy.errors import UserError, bad_value
from kl_comedy.integrations.gradient_check import LossCallback
from kl_comedy.kl import KLTerm, kl_surrogate
from kl_comedy.lab.audit.gradients import GradientSketch, layer_groups
from kl_comedy.lab.audit.grams import cosine, delivered, estimate, mean_product, noise, p_of_zero_mean
from kl_comedy.lab.audit.measure import MINIMUM_BLOCKS

TARGETS = {
    "sequence_reverse": KLTerm("exact", placement="reward", credit="to_go"),
    "token_reverse": KLTerm("exact", placement="loss"),
}
"""The exact KL of each prefix, with its effect on later prefixes and without (2506.09477)."""

NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
WARN_BELOW = 0.5
SKETCH = 65536


class KLAudit(LossCallback):
    """Measure, every so many steps, whether the KL part of the loss points along the gradient of the reverse KL.

    ``batches`` batches of the trainer are each split into ``blocks`` equal blocks of completions; products of gradients
    of different blocks are free of noise's bias. ``target``: ``sequence_reverse`` (of whole completions) or
    ``token_reverse`` (of each visited prefix). On samples of an older policy, ``r`` has the ratio of the tokens before.
    ``reference(input_ids, attention_mask)`` gives logits; default: the trainer's ``ref_model``, or the adapter off.

    ``records`` has, per audit: ``cosine`` of ``E g`` and ``E r`` and ``strength`` ``<E g, E r> / |E r|^2``, each with
    its 95% interval (``_low``, ``_high``; NaN where noise hides a gradient: more batches); ``p_no_mean`` of "the KL
    part has no mean gradient"; ``variance``, that of ``g`` over that of ``r``; ``kl_to_policy``, the norm of a block's
    ``g`` times the coefficient over that of ``p``. ``r`` is a mean over completions of a sum over tokens, so the
    strength has the host's reduction in it. TRL logs ``kl_audit/*``. A cosine whose interval ends below 0.5 is warned
    of.

    With several processes each audits, and records, its own batches. Costs per completion four passes forward and
    three backward, and a row's ``[T, V]`` logits twice. Raises :class:`UserError` for FSDP and DeepSpeed, fewer than
    three blocks in all, batches without completions, and a trainer whose reference is not found.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 100,
        blocks: int = 4,
        batches: int = 1,
        target: str = "sequence_reverse",
        coefficient: str = "beta",
        reference: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(trainer, coefficient)
        if target not in TARGETS:
            raise bad_value("target", target, list(TARGETS))
        if blocks * batches < MINIMUM_BLOCKS:
            raise bad_value("blocks", blocks, f"at least {MINIMUM_BLOCKS} blocks in all batches")
        self.every, self.blocks, self.batches, self.target = every, blocks, batches, target
        self._reference = reference
        self._gradients: list[Tensor] = []
        self._sketch: GradientSketch | None = None

    def examine(self, step: int, model: Any, inputs: Any) -> int:
        missing = [name for name in NEEDED if name not in inputs]
        if missing:
            raise UserError(f"KLAudit: a batch has no {missing[0]!r}, as TRL's of GRPO and RLOO have")
        rows = len(inputs["completion_ids"])
        if rows < self.blocks:
            raise bad_value("blocks", self.blocks, f"at most {rows}, the completions of a batch")
        self._sketch = self._sketch or GradientSketch(layer_groups(model), SKETCH)
        for part in torch.arange(rows - rows % self.blocks).chunk(self.blocks):
            self._gradients.append(self._block(model, _rows_of(inputs, part, rows)))
        if len(self._gradients) < self.blocks * self.batches:
            return step
        gradients_KCw, self._gradients = torch.stack(self._gradients).double(), []
        if float(gradients_KCw[:, 2].norm()) == 0.0:
            return step + 1  # the policy is its reference still
        self._record(step, torch.einsum("jcw,kdw->cdjk", gradients_KCw, gradients_KCw))
        return step + self.every

    def _block(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """``g``, ``p`` and ``r`` of a block, sketched: ``[3, w]``."""
        sketch = self._sketch
        assert sketch is not None

        def gradient(loss: Tensor) -> Tensor:
            depends = loss.requires_grad
            found = torch.autograd.grad(loss, sketch.parameters, allow_unused=True) if depends else ()
            return torch.cat(sketch.fold(found or [None] * len(sketch.parameters)))

        with_kl_w, policy_w = (gradient(self.loss(model, inputs, at)) for at in (1.0, 0.0))
        reference_w, count = torch.zeros_like(policy_w), len(inputs["completion_ids"])
        for n in range(count):  # one by one, for [T, V] logits
            row = _rows_of(inputs, torch.tensor([n]), count)
            if row["completion_mask"].any():
                reference_w += gradient(self._exact(model, row) / count)
        return torch.stack([with_kl_w - policy_w, policy_w, reference_w])

    def _exact(self, model: Any, row: Mapping[str, Any]) -> Tensor:
        """The surrogate of the target of one completion, summed over its tokens."""
        ids_BL = torch.cat([row["prompt_ids"], row["completion_ids"]], 1)
        mask_BL = torch.cat([row["prompt_mask"], row["completion_mask"]], 1)
        ids_BT, mask_BT = row["completion_ids"], row["completion_mask"].bool()
        width, temperature = ids_BT.shape[1], getattr(self.trainer, "temperature", 1.0)

        def log_probs(logits_BLV: Tensor) -> Tensor:
            return (logits_BLV[:, -width - 1 : -1].float() / temperature).log_softmax(-1)

        logp_BTV = log_probs(model(input_ids=ids_BL, attention_mask=mask_BL).logits)
        with torch.no_grad():
            ref_logp_BTV = log_probs(self._reference_logits(model, ids_BL, mask_BL))
        logp_BT, ref_logp_BT = (each.gather(-1, ids_BT[..., None])[..., 0] for each in (logp_BTV, ref_logp_BTV))
        recorded_BT = row.get("sampling_per_token_logps", row.get("old_per_token_logps"))
        behaviour_BT = logp_BT.detach() if recorded_BT is None else recorded_BT
        correction = "none" if recorded_BT is None or self.target == "token_reverse" else "prefix_previous"
        surrogate_BT = kl_surrogate(
            dataclasses.replace(TARGETS[self.target], correction=correction),
            logp_BT=logp_BT,
            ref_logp_BT=ref_logp_BT,
            behaviour_logp_BT=torch.where(torch.isnan(behaviour_BT), logp_BT.detach(), behaviour_BT),
            mask_BT=mask_BT,
            exact_kl_BT=(logp_BTV.exp() * (logp_BTV - ref_logp_BTV)).sum(-1),
        )
        return surrogate_BT.sum()

    def _reference_logits(self, model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        if self._reference is not None:
            return self._reference(ids_BL, mask_BL)
        other, context = getattr(self.trainer, "ref_model", None), contextlib.nullcontext
        if other is None and not hasattr(model, "disable_adapter"):
            why = "give reference=, a function of ids and mask to logits"
            raise UserError(f"KLAudit: the trainer has no ref_model; {why}")
        if other is None:
            other, context = model, model.disable_adapter
        with context():
            logits: Tensor = other(input_ids=ids_BL, attention_mask=mask_BL).logits
        return logits

    def _record(self, step: int, gram: Tensor) -> None:
        kl_KK, policy_KK, with_KK, reference_KK = gram[0, 0], gram[1, 1], gram[0, 2], gram[2, 2]
        record: dict[str, float] = {"step": step, "blocks": len(kl_KK)}
        hidden = float(mean_product(reference_KK)) <= 0
        for name, value in (
            ("cosine", estimate(cosine, kl_KK, with_KK, reference_KK)),
            ("strength", estimate(delivered, with_KK, reference_KK)),
        ):
            figures = (value.value, value.low, value.high)
            pairs = zip((name, f"{name}_low", f"{name}_high"), figures, strict=True)
            record |= {key: math.nan if hidden else figure for key, figure in pairs}
        record["p_no_mean"] = p_of_zero_mean(kl_KK, torch.Generator().manual_seed(0))
        record["variance"] = float(noise(kl_KK)) / max(float(noise(reference_KK)), 1e-30)
        sizes = [float(each.diagonal().mean()) ** 0.5 for each in (kl_KK, policy_KK)]
        record["kl_to_policy"] = abs(getattr(self.trainer, self.coefficient)) * sizes[0] / max(sizes[1], 1e-30)
        self.records.append(record)
        for name in ("cosine", "strength", "kl_to_policy"):
            self.trainer._metrics["train"][f"kl_audit/{name}"].append(record[name])
        if record["cosine_high"] < WARN_BELOW:
            warnings.warn(
                f"KLAudit: step {step}: the KL part of the loss has a cosine of {record['cosine']:.2f} "
                f"[{record['cosine_low']:.2f}, {record['cosine_high']:.2f}] with the gradient of {self.target}",
                stacklevel=2,
            )


def _rows_of(inputs: Mapping[str, Any], part: Tensor, rows: int) -> dict[str, Any]:
    """Those rows of every tensor that has one for each completion."""
    per_row = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.ndim}
    return {**inputs, **{name: each[part.to(each.device)] for name, each in per_row.items() if len(each) == rows}}
