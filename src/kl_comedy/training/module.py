"""The LightningModule: one training step is one optimizer update over one :class:`UpdateBatch`.

The rows of an update are prepared (reference pass, advantages, weights), split by token budget, and
each micro-batch is passed, differentiated and forgotten. Optimization is manual because the number of
micro-batches varies from update to update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import lightning
import torch
from torch import Tensor

from kl_comedy.config import Config, OptimizerConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.kl import BetaState, KLTerm, kl_diagnostics
from kl_comedy.models import LoadedModel
from kl_comedy.models.in_place_gradients import in_place
from kl_comedy.models.introspection import head_chunk, microbatch_tokens, release
from kl_comedy.models.logprobs import TokenPass, token_pass
from kl_comedy.models.reference import Reference, ReferencePass
from kl_comedy.records import Scored
from kl_comedy.rollouts import RolloutBackend
from kl_comedy.training.critic import critic_metrics, uses_critic, value_head_for, value_part
from kl_comedy.training.distributed import ALONE, World
from kl_comedy.training.experience import ExperienceStream, UpdateBatch
from kl_comedy.training.loss import micro_loss
from kl_comedy.training.metrics import (
    MetricAccumulator,
    VersionTimes,
    accumulate_policy,
    accumulate_tokens,
    row_metrics,
    staleness_metrics,
)
from kl_comedy.training.packing import OldPolicyValues, from_plain, record_old_policy, to_plain
from kl_comedy.training.prepare import MicroBatch, Preparation, prepare
from kl_comedy.training.strategies import clip_gradients, sum_gradients

if TYPE_CHECKING:
    from kl_comedy.models.logprobs import TokenPass


def lr_factor(settings: OptimizerConfig, step: int, steps: int) -> float:
    """The factor at update ``step`` of ``steps``: linear warm-up, then constant, linear or cosine to zero.

    >>> lr_factor(OptimizerConfig(schedule="linear", warmup_steps=0), 5, 10)
    0.5
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min((step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1), 1.0)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


KL_AT_START_TOLERANCE = 1e-5
"""Exact KL (nats a token) tolerated before the first update; bitwise zero is expected and reported."""


class PolicyModule(lightning.LightningModule):
    """Owns the policy and its optimizer; calls the rooms. References and sampler stay outside its state."""

    def __init__(
        self,
        config: Config,
        *,
        loaded: LoadedModel,
        references: Mapping[str, Reference],
        terms: Sequence[KLTerm],
        stream: ExperienceStream,
        backend: RolloutBackend,
        world: World = ALONE,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy = loaded.model
        self.value_head = value_head_for(loaded) if uses_critic(config.algorithm) else None
        self.config = config
        self.terms = tuple(terms)
        self.betas = [BetaState(term.beta) for term in self.terms]
        self.version = 0
        self.clock = VersionTimes()
        self.last_metrics: dict[str, float] = {}
        self.last_batch: UpdateBatch | None = None
        self.old_policy: list[OldPolicyValues] | None = None
        # None of these is an nn.Module, so none of them enters the module's state.
        self.references = dict(references)
        self.stream = stream
        self.backend = backend
        self.world = world
        self.plan = Preparation(
            terms=self.terms,
            algorithm=config.algorithm,
            microbatch_tokens=microbatch_tokens(
                config.train.microbatch_tokens,
                loaded.model,
                loaded.device,
                checkpoints=config.model.gradient_checkpointing,
            ),
            pad_id=int(loaded.tokenizer.pad_token_id),
            device=loaded.device,
            world=world,
        )

    def configure_model(self) -> None:
        """The policy was sharded, where it is to be, when it was loaded."""

    def train_dataloader(self) -> ExperienceStream:
        return self.stream

    def on_train_start(self) -> None:
        """Here the weights of a resumed run are restored; when its checkpoint was read they were not yet."""
        if self.version:
            self.backend.update_weights(self.version)

    def transfer_batch_to_device(self, batch: UpdateBatch, device: torch.device, dataloader_idx: int) -> UpdateBatch:
        """Rows are text and ids; tensors are made on the device when they are packed."""
        return batch

    def configure_optimizers(self) -> Any:
        settings = self.config.optimizer
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trainable}]
        if self.value_head is not None:
            rate = self.config.algorithm.value.lr or settings.lr
            groups.append({"params": list(self.value_head.parameters()), "lr": rate})
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.betas[0], settings.betas[1]),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: lr_factor(settings, step, self.config.train.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: UpdateBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        self.last_batch = batch
        step = self.version
        betas = [beta.value for beta in self.betas]
        try:
            if batch.first:
                self.old_policy = self.record(batch.batch)
            micro_batches = prepare(
                batch.rows,
                self.plan,
                betas=betas,
                references=self.references,
                policy_pass=self.policy_pass,
                old_policy=self.old_policy and self.old_policy[batch.offset : batch.offset + len(batch.rows)],
            )
            metrics, parts = MetricAccumulator(), {}
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self._finite = True
            for micro in micro_batches:
                for name, value in self._accumulate(micro, metrics, betas, exact=self._measures_exactly(step)).items():
                    parts[name] = parts.get(name, 0.0) + float(value)
        except UserError as error:
            raise RunFailed(f"update {step}: {error}") from error
        ages = staleness_metrics(batch.rows, step, self.clock)
        metrics, parts = self._over_all_ranks(metrics, parts, step)
        norms = self._clip()
        for name, value in {**parts, **norms}.items():
            if not torch.isfinite(torch.tensor(value)):
                raise RunFailed(f"update {step}: {name} is {value}")
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.lr_schedulers().step()
        self._publish()
        self.last_metrics = {
            **row_metrics(batch.rows),
            **metrics.values(),
            **{f"train/loss_{name}": value for name, value in parts.items()},
            **{f"beta/{position}": beta for position, beta in enumerate(betas)},
            "train/loss": sum(parts.values()),
            **norms,
            **critic_metrics(micro_batches),
            **ages,
            **batch.notes,
            **micro_batches[0].notes,
            "train/lr": rate,
            **self._times(batch, time.perf_counter() - start),
        }
        if step == 0:
            self._check_start()
        self._advance(step)

    def _accumulate(
        self, micro: MicroBatch, metrics: MetricAccumulator, betas: Sequence[float], *, exact: bool
    ) -> dict[str, Tensor]:
        """Pass, loss and backward of one micro-batch."""
        with in_place(not self.world.sharded):
            passes = self.passes(micro, measure=exact)
        self._release()
        seen = passes["initial"]
        self._finite = self._finite and bool(torch.isfinite(seen.logp_BT).all())
        result = micro_loss(micro, passes, terms=self.terms, betas=betas, algorithm=self.config.algorithm)
        loss, parts = result.loss, result.parts
        if self.value_head is not None:
            parts["value"], loss = self._value(micro, seen, metrics, loss)
        # FSDP's reduction takes the mean over ranks; a micro-batch is this rank's part of a sum.
        self.manual_backward(loss * self.world.size if self.world.sharded else loss)
        self._release()
        if not micro.empty:
            accumulate_tokens(metrics, micro, seen, version=self.version)
            self._tally_options(metrics, micro, seen)
            accumulate_policy(metrics, result.policy, micro.experience.mask_BT)
        return parts

    def _release(self) -> None:
        """Where memory counts more than time, a CPU's free pages go back at once."""
        if self.config.model.gradient_checkpointing and self.plan.device.type == "cpu":
            release()

    def _value(
        self, micro: MicroBatch, seen: TokenPass, metrics: MetricAccumulator, loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The detached value loss of a micro-batch, and ``loss`` with it."""
        assert self.value_head is not None and seen.hidden_NH is not None and micro.values is not None
        mask_BT, settings = micro.experience.mask_BT, self.config.algorithm.value
        value_BT = self.value_head(seen.hidden_NH, mask_BT)
        part, clipped_BT = value_part(settings, value_BT, micro.values, mask_BT, micro.experience.weight_B)
        if settings.clip is not None and not micro.empty:
            metrics.add("value/clip_fraction", clipped_BT.sum(), float(mask_BT.sum()))
        return part.detach(), loss + part

    def _over_all_ranks(
        self, metrics: MetricAccumulator, parts: Mapping[str, float], step: int
    ) -> tuple[MetricAccumulator, dict[str, float]]:
        """Gradients, tallies and the parts of the loss, summed; raise on every rank what happened on one."""
        world = self.world
        found = world.gather((dict(parts), self._finite))
        if not all(finite for _, finite in found):
            raise RunFailed(f"update {step}: the policy's log-probs are not finite")
        if world.size > 1 and not world.sharded:
            sum_gradients(self.policy.parameters(), world)
        return metrics.merged(world), {name: sum(own[name] for own, _ in found) for name in parts}

    def record(self, rows: Sequence[Scored]) -> list[OldPolicyValues] | None:
        """What is kept of a batch at its first use, where the algorithm has a critic or a recomputed policy."""
        algorithm = self.config.algorithm
        if self.value_head is None and algorithm.proximal != "recomputed":
            return None

        def measure(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            seen = self.policy_pass(inputs, None, ())
            if self.value_head is None:
                return seen.logp_BT, torch.zeros_like(seen.logp_BT)
            assert seen.hidden_NH is not None
            return seen.logp_BT, self.value_head(seen.hidden_NH, inputs["mask_BT"])

        return record_old_policy(
            rows,
            measure,
            microbatch_tokens=self.plan.microbatch_tokens,
            pad_id=self.plan.pad_id,
            device=self.plan.device,
            bootstrap_truncated=self.value_head is not None and algorithm.value.bootstrap_truncated,
        )

    def passes(
        self, micro: MicroBatch, *, terms: Sequence[KLTerm] | None = None, measure: bool = False
    ) -> dict[str, TokenPass]:
        """The policy pass per reference: the initial one always, others where one of ``terms`` needs their exact KL."""
        inputs = {name: getattr(micro.experience, name) for name in _INPUTS}
        found: dict[str, TokenPass] = {}
        for name, reference in micro.references.items():
            wanted = [term for term in (self.terms if terms is None else terms) if term.reference == name]
            if name == "initial" or any(term.needs != "log_ratio" for term in wanted):
                found[name] = self.policy_pass(inputs, reference, wanted, measure=measure and name == "initial")
        return found

    def policy_pass(
        self,
        inputs: Mapping[str, Tensor],
        reference: ReferencePass | None,
        terms: Sequence[KLTerm],
        *,
        measure: bool = False,
    ) -> TokenPass:
        """The policy pass, with the exact KLs that ``terms`` (or the metrics) need."""
        needs = {term.needs for term in terms}
        return token_pass(
            self.policy,
            **inputs,
            temperature=self.config.rollout.temperature,
            chunk_elements=head_chunk(self.config.model.head_chunk_elements, self.plan.device),
            share_prompt=self.config.model.share_prompt,
            reference=reference,
            kl=measure or "exact_reverse" in needs,
            forward_kl=measure or "exact_forward" in needs,
            entropy=measure,
            total_variation=measure,
            keep_hidden=self.value_head is not None,
            detach_hidden=not self.config.algorithm.value.trunk,
        )

    def _tally_options(self, metrics: MetricAccumulator, micro: MicroBatch, seen: TokenPass) -> None:
        """Count what options did: capped ratios, clipped tokens. Nothing is bounded silently."""
        experience = micro.experience
        arguments = {"logp_BT": seen.logp_BT.detach(), "behaviour_logp_BT": experience.behaviour_logp_BT}
        tokens = float(experience.mask_BT.sum())
        for position, term in enumerate(self.terms):
            ref_logp_BT = micro.reference_of(term).logp_BT
            found = kl_diagnostics(term, mask_BT=experience.mask_BT, ref_logp_BT=ref_logp_BT, **arguments)
            if "ratio_max" in found:
                metrics.maximum(f"kl_term/{position}/ratio_max", found.pop("ratio_max"))
            for name, share in found.items():
                metrics.add(f"kl_term/{position}/{name}", share * tokens, tokens)

    def _measures_exactly(self, step: int) -> bool:
        every = self.config.train.exact_kl_every
        return step == 0 or (every > 0 and step % every == 0)

    def _clip(self) -> dict[str, float]:
        """Clip the gradient where asked, the value head's on its own; the norms before clipping."""
        bound = self.config.optimizer.clip_norm or float("inf")
        parts = {"grad/norm": [p for p in self.policy.parameters() if p.requires_grad]}
        if self.value_head is not None:
            parts["grad/value_norm"] = list(self.value_head.parameters())
        return {name: clip_gradients(chosen, bound, self.world) for name, chosen in parts.items()}

    def _publish(self) -> None:
        """New weights: the version counts optimizer updates; moving references follow."""
        self.clock.replaced(self.version)
        self.version += 1
        self.backend.update_weights(self.version)
        for reference in self.references.values():
            if reference.moving:
                reference.update(self.policy, self.version)

    def _check_start(self) -> None:
        """Before the first update the policy is the reference, so every KL is zero."""
        measured = self.last_metrics.get("kl/exact_reverse_token", 0.0)
        if abs(measured) > KL_AT_START_TOLERANCE:
            raise RunFailed(
                f"exact KL to the reference before the first update is {measured:.3g} nats a token, and must be 0: "
                "the reference is not the policy's starting point"
            )

    def _advance(self, step: int) -> None:
        measured = self.last_metrics.get("kl/exact_reverse_sequence", self.last_metrics["kl/k1_reverse_sequence"])
        for beta in self.betas:
            beta.advance(step + 1, measured)

    def _times(self, batch: UpdateBatch, learn_s: float) -> dict[str, float]:
        total = batch.wait_s + learn_s
        tokens = sum(len(row.rollout.completion_ids) for row in batch.rows)
        return {
            "time/generate": batch.generate_s,
            "time/score": batch.score_s,
            "time/wait": batch.wait_s,
            "time/learn": learn_s,
            "time/step": total,
            "time/tokens_per_second": tokens / total if total > 0 else 0.0,
            "time/trainer_idle_share": batch.wait_s / total if total > 0 else 0.0,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kl_comedy"] = {
            "version": self.version,
            "betas": [beta.value for beta in self.betas],
            "stream": self.stream.snapshot(),
            "version_ages": self.clock.ages(),
            "references": {name: ref.hash for name, ref in self.references.items() if not ref.moving},
            "moving": {name: ref.state_dict() for name, ref in self.references.items() if ref.moving},
            "torch_rng": torch.get_rng_state(),
            "first_use": None if self.old_policy is None else to_plain(self.old_policy),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["kl_comedy"]
        for name, kept in state["references"].items():
            now = self.references[name].hash
            if now != kept:
                raise RunFailed(
                    f"the {name} reference is not the one this run began with: its weights hash to {now[:16]}, the "
                    f"checkpoint says {kept[:16]}; a resumed run must keep its reference"
                )
        for name, moving in state["moving"].items():
            self.references[name].load_state_dict(moving)
        self.version = int(state["version"])
        for beta, value in zip(self.betas, state["betas"], strict=True):
            beta.value = float(value)
        self.stream.restore(state["stream"])
        self.clock.restore(state.get("version_ages", {}))
        self.old_policy = None if state.get("first_use") is None else from_plain(state["first_use"])
        torch.set_rng_state(state["torch_rng"])


_INPUTS = ("prompt_ids_BP", "prompt_mask_BP", "ids_BT", "mask_BT")
