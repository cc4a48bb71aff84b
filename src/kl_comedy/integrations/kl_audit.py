"""For TRL's trainers: the gradient of the KL part of the loss beside the exact gradient of a KL, on the run's batches.

trainer.add_callback(KLAudit(trainer, every=100, batches=4))

Legend: ``B`` completions, ``T`` their tokens, ``L`` tokens of prompt and completion, ``V`` the vocabulary, ``K``
blocks, ``w`` numbers of a sketch; ``g`` the gradient of the KL part at coefficient 1, ``p`` that of the loss at
coefficient 0, ``r`` the reference gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kl_comedy.audit.gradients import SKETCH, GradientSketch, layer_groups
from kl_comedy.audit.grams import cosine, delivered, estimate, mean_product, noise, p_of_zero_mean
from kl_comedy.audit.measure import MINIMUM_BLOCKS
from kl_comedy.audit.report import UNDEFINED
from kl_comedy.errors import UserError, bad_value
from kl_comedy.integrations.gradient_check import LossCallback
from kl_comedy.kl import KLTerm, kl_surrogate

TARGETS = {
    "sequence_reverse": KLTerm("exact", placement="reward", credit="to_go"),
    "token_reverse": KLTerm("exact", placement="loss"),
}
"""The exact KL of each prefix, with its effect on later prefixes and without (2506.09477)."""

NEEDED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
"""What a batch of TRL's GRPO and RLOO trainers has."""
WARN_BELOW = 0.5
"""A cosine whose whole interval is below this is worth a warning."""


class KLAudit(LossCallback):
    """Measure every ``every`` steps whether the KL part of the loss points along the gradient of the reverse KL.

    ``batches`` batches of the trainer are each split into ``blocks`` equal blocks of completions; a product of the
    gradients of two different blocks has no bias from noise. ``target``: ``sequence_reverse`` (of whole completions) or
    ``token_reverse`` (of each visited prefix). On samples of an older policy, ``r`` has the ratio of the tokens before.
    ``reference(input_ids, attention_mask)`` gives logits; default: the trainer's ``ref_model``, or the adapter off.

    ``records`` has, per audit: ``cosine`` of ``E g`` and ``E r`` and ``strength`` ``<E g, E r> / |E r|^2``, each with
    its 95% interval (``_low``, ``_high``; NaN where noise hides a gradient: more batches); ``p_no_mean`` of "the KL
    part has no mean gradient"; ``variance``, that of ``g`` over that of ``r``; ``kl_to_policy``, the norm of a block's
    ``g`` times the coefficient over that of ``p``. ``r`` is a mean over completions of a sum over tokens, so the
    strength contains the host's reduction. TRL logs ``kl_audit/*``. A cosine whose interval ends below 0.5 gives a
    warning.

    With several processes, each audits and records its own batches. Costs per completion four forward and three
    backward passes, and a row's ``[T, V]`` logits twice. Raises :class:`UserError` for FSDP and DeepSpeed, fewer than
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
        self.every = every
        self.blocks = blocks
        self.batches = batches
        self.target = target
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
        if self._sketch is None:
            self._sketch = GradientSketch(layer_groups(model), SKETCH)
        # Equal blocks: the last completions of a batch that does not divide are left out.
        used_rows = torch.arange(rows - rows % self.blocks)
        for block_rows in used_rows.chunk(self.blocks):
            self._gradients.append(self._block(model, _rows_of(inputs, block_rows, rows)))
        if len(self._gradients) < self.blocks * self.batches:
            # The same step again: more batches are needed.
            return step
        gradients_KCw = torch.stack(self._gradients).double()
        self._gradients = []
        if float(gradients_KCw[:, 2].norm()) == 0.0:
            # The policy still equals its reference, and r is zero.
            return step + 1
        self._record(step, torch.einsum("jcw,kdw->cdjk", gradients_KCw, gradients_KCw))
        return step + self.every

    def _block(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """``g``, ``p`` and ``r`` of a block, sketched: ``[3, w]``."""
        sketch = self._sketch
        assert sketch is not None

        def gradient_w(loss: Tensor) -> Tensor:
            gradients: Sequence[Tensor | None] = [None] * len(sketch.parameters)
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, sketch.parameters, allow_unused=True)
            return torch.cat(sketch.fold(gradients))

        with_kl_w = gradient_w(self.loss(model, inputs, 1.0))
        policy_w = gradient_w(self.loss(model, inputs, 0.0))
        reference_w = torch.zeros_like(policy_w)
        count = len(inputs["completion_ids"])
        # One completion at a time: [T, V] logits of a whole block would not fit.
        for n in range(count):
            row = _rows_of(inputs, torch.tensor([n]), count)
            if row["completion_mask"].any():
                reference_w += gradient_w(self._exact(model, row) / count)
        return torch.stack([with_kl_w - policy_w, policy_w, reference_w])

    def _exact(self, model: Any, row: Mapping[str, Any]) -> Tensor:
        """The surrogate of the target of one completion, summed over its tokens."""
        ids_BL = torch.cat([row["prompt_ids"], row["completion_ids"]], 1)
        mask_BL = torch.cat([row["prompt_mask"], row["completion_mask"]], 1)
        ids_BT = row["completion_ids"]
        mask_BT = row["completion_mask"].bool()
        if "tool_mask" in row:
            # The model attends to a tool's reply, but the policy did not draw it: it is no part of the KL.
            mask_BT = mask_BT & row["tool_mask"].bool()
        width = ids_BT.shape[1]
        # The KL of what was sampled: at the trainer's temperature, as TRL's own log-probs.
        temperature = getattr(self.trainer, "temperature", 1.0)

        def log_probs(logits_BLV: Tensor) -> Tensor:
            # Logits at a position are of the next token, so those of the completion begin one before it.
            return (logits_BLV[:, -width - 1 : -1].float() / temperature).log_softmax(-1)

        logp_BTV = log_probs(model(input_ids=ids_BL, attention_mask=mask_BL).logits)
        with torch.no_grad():
            ref_logp_BTV = log_probs(self._reference_logits(model, ids_BL, mask_BL))
        logp_BT = logp_BTV.gather(-1, ids_BT[..., None])[..., 0]
        ref_logp_BT = ref_logp_BTV.gather(-1, ids_BT[..., None])[..., 0]

        recorded_BT = row.get("sampling_per_token_logps", row.get("old_per_token_logps"))
        if recorded_BT is None:
            # TRL records none where the batch is sampled by the current policy.
            behaviour_logp_BT = logp_BT.detach()
            correction = "none"
        else:
            # NaN where vLLM recorded no log-prob.
            behaviour_logp_BT = torch.where(torch.isnan(recorded_BT), logp_BT.detach(), recorded_BT)
            correction = "prefix_previous"
        if self.target == "token_reverse":
            # The exact KL of each visited prefix needs no ratio of its own token.
            correction = "none"
        surrogate_BT = kl_surrogate(
            dataclasses.replace(TARGETS[self.target], correction=correction),
            logp_BT=logp_BT,
            ref_logp_BT=ref_logp_BT,
            behaviour_logp_BT=behaviour_logp_BT,
            mask_BT=mask_BT,
            exact_kl_BT=(logp_BTV.exp() * (logp_BTV - ref_logp_BTV)).sum(-1),
        )
        return surrogate_BT.sum()

    def _reference_logits(self, model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """The reference's logits: of the user's function, the trainer's model, or the policy without its adapter."""
        if self._reference is not None:
            return self._reference(ids_BL, mask_BL)
        ref_model = getattr(self.trainer, "ref_model", None)
        context: Any = contextlib.nullcontext
        if ref_model is None:
            if not hasattr(model, "disable_adapter"):
                raise UserError(
                    "KLAudit: the trainer has no ref_model; give reference=, a function of ids and mask to logits"
                )
            ref_model = model
            context = model.disable_adapter
        with context():
            logits: Tensor = ref_model(input_ids=ids_BL, attention_mask=mask_BL).logits
        return logits

    def _record(self, step: int, gram_CCKK: Tensor) -> None:
        """Record the figures of an audit from the products of g, p and r (``C``, in this order) of all blocks."""
        kl_KK = gram_CCKK[0, 0]
        policy_KK = gram_CCKK[1, 1]
        kl_reference_KK = gram_CCKK[0, 2]
        reference_KK = gram_CCKK[2, 2]
        record: dict[str, float] = {"step": step, "blocks": len(kl_KK)}
        # An estimate of |E r|^2 that is not positive: noise hides r, and a ratio to it means nothing.
        is_hidden = float(mean_product(reference_KK)) <= 0
        for name, interval in (
            ("cosine", estimate(cosine, kl_KK, kl_reference_KK, reference_KK)),
            ("strength", estimate(delivered, kl_reference_KK, reference_KK)),
        ):
            if is_hidden:
                interval = UNDEFINED
            record[name] = interval.value
            record[f"{name}_low"] = interval.low
            record[f"{name}_high"] = interval.high
        # A generator of its own, so that an audit does not move the run's random numbers.
        record["p_no_mean"] = p_of_zero_mean(kl_KK, torch.Generator().manual_seed(0))
        record["variance"] = float(noise(kl_KK)) / max(float(noise(reference_KK)), 1e-30)
        kl_size = float(kl_KK.diagonal().mean()) ** 0.5
        policy_size = float(policy_KK.diagonal().mean()) ** 0.5
        record["kl_to_policy"] = abs(getattr(self.trainer, self.coefficient)) * kl_size / max(policy_size, 1e-30)
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
    """``inputs`` with the rows ``part`` of every tensor that has one row per completion."""
    selected = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.ndim and len(value) == rows:
            selected[name] = value[part.to(value.device)]
    return selected
