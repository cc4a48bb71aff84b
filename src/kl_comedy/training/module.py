"""The LightningModule: one training step is one optimizer update over one :class:`UpdateBatch`.

The rows of an update are prepared (reference pass, advantages, weights) and split by token budget; each micro-batch is
passed, differentiated and freed. Optimization is manual because the number of micro-batches varies.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor

from kl_comedy.config import Config, OptimizerConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.kl import BetaState, KLTerm, kl_diagnostics
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import head_chunk, microbatch_tokens, release_free_memory
from kl_comedy.models.logprobs import TokenPass, token_pass
from kl_comedy.models.reference import Reference, ReferencePass, build_reference
from kl_comedy.records import Scored
from kl_comedy.rollouts import RolloutBackend
from kl_comedy.training.build import check_training
from kl_comedy.training.critic import critic_metrics, uses_critic, value_head_for, value_part
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, load_policy
from kl_comedy.training.experience import UpdateBatch
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

KL_AT_START_TOLERANCE = 1e-5
"""Exact KL (nats a token) tolerated before the first update; bitwise zero is expected and reported."""

_INPUTS = ("prompt_ids_BP", "prompt_mask_BP", "ids_BT", "mask_BT")


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


class PolicyModule(lightning.LightningModule):
    """Owns the policy and its optimizer. Sampler and frozen references are not part of its state.

    ``version`` counts optimizer updates; ``last_metrics`` are those of the last update. The policy is there after
    :meth:`load`, which :class:`ExperienceModule` calls once the processes are connected. Raises :class:`UserError` for
    KL terms and algorithms that cannot train.
    """

    loaded: LoadedModel
    references: dict[str, Reference]
    plan: Preparation
    backend: RolloutBackend

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        self.terms = check_training(config)
        self.betas = [BetaState(term.beta) for term in self.terms]
        self.ranks = SINGLE_PROCESS
        self.version = 0
        self.clock = VersionTimes()
        self.last_metrics: dict[str, float] = {}
        self.last_batch: UpdateBatch | None = None
        self.old_policy: list[OldPolicyValues] | None = None
        self._finite = True

    def load(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        """Load the policy, its value head and its references; all ranks call. Raises :class:`UserError` on all."""
        config, self.ranks = self.config, ranks
        self.loaded = loaded = load_policy(config, ranks)
        self.policy = loaded.model
        self.value_head = value_head_for(loaded) if uses_critic(config.algorithm) else None
        # The initial reference always: KL is reported against it. Moving ones where a term names them.
        names = ["initial", *sorted({term.reference for term in self.terms} - {"initial", "sampler"})]
        self.references = {
            name: build_reference(
                name,
                loaded,
                config.reference,
                temperature=config.rollout.temperature,
                chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
                keep_hidden=True,
                share_prompt=config.model.share_prompt,
            )
            for name in names
        }
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
            ranks=ranks,
        )

    def configure_model(self) -> None:
        """Lightning's FSDP2 strategy asks for this hook; :meth:`load` sharded the policy while it was loaded."""

    def on_train_start(self) -> None:
        """The weights of a resumed run are restored by now; they were not when its checkpoint was read."""
        if self.version:
            self.backend.update_weights(self.version)

    def configure_optimizers(self) -> Any:
        settings = self.config.optimizer
        groups: list[dict[str, Any]] = [{"params": self._trainable()}]
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
        """One optimizer update. Raises :class:`RunFailed` where a loss, a log-prob or a gradient is not finite."""
        start, step, optimizer = time.perf_counter(), self.version, self.optimizers()
        self.last_batch, self._finite = batch, True
        betas = [beta.value for beta in self.betas]
        metrics, losses = MetricAccumulator(), defaultdict[str, float](float)
        optimizer.zero_grad()
        try:
            micro_batches = self._prepare(batch, betas)
            for micro in micro_batches:
                for name, value in self._accumulate(micro, metrics, betas).items():
                    losses[name] += float(value)
        except UserError as error:
            raise RunFailed(f"update {step}: {error}") from error
        ages = staleness_metrics(batch.rows, step, self.clock)
        metrics, losses = self._sum_over_ranks(metrics, losses)
        norms = self._clip_gradients()
        for name, value in {**losses, **norms}.items():
            if not math.isfinite(value):
                raise RunFailed(f"update {step}: {name} is {value}")
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        self.lr_schedulers().step()
        self._publish()
        self.last_metrics = {
            **row_metrics(batch.rows),
            **metrics.values(),
            **{f"train/loss_{name}": value for name, value in losses.items()},
            **{f"beta/{position}": beta for position, beta in enumerate(betas)},
            "train/loss": sum(losses.values()),
            **norms,
            **critic_metrics(micro_batches),
            **ages,
            **batch.notes,
            **micro_batches[0].notes,
            "train/lr": rate,
            **_times(batch, time.perf_counter() - start),
        }
        if step == 0:
            self._check_start()
        measured = self.last_metrics.get("kl/exact_reverse_sequence", self.last_metrics["kl/k1_reverse_sequence"])
        for state in self.betas:
            state.advance(step + 1, measured)

    def _prepare(self, batch: UpdateBatch, betas: Sequence[float]) -> list[MicroBatch]:
        """This rank's micro-batches of an update."""
        if batch.first:
            self.old_policy = self.record(batch.batch)
        return prepare(
            batch.rows,
            self.plan,
            betas=betas,
            references=self.references,
            policy_pass=self.policy_pass,
            old_policy=self.old_policy and self.old_policy[batch.offset : batch.offset + len(batch.rows)],
        )

    def _accumulate(self, micro: MicroBatch, metrics: MetricAccumulator, betas: Sequence[float]) -> dict[str, Tensor]:
        """Pass, loss and backward of one micro-batch; the detached parts of its loss."""
        every = self.config.train.exact_kl_every
        measure = self.version == 0 or (every > 0 and self.version % every == 0)
        passes = self.passes(micro, measure=measure)
        self._release_memory()
        policy = passes["initial"]
        self._finite = self._finite and bool(torch.isfinite(policy.logp_BT).all())
        result = micro_loss(micro, passes, terms=self.terms, betas=betas, algorithm=self.config.algorithm)
        loss, parts = result.loss, result.parts
        if self.value_head is not None:
            value_loss = self._value_loss(micro, policy, metrics)
            parts["value"], loss = value_loss.detach(), loss + value_loss
        # FSDP's reduction takes the mean over ranks; a micro-batch is this rank's part of a sum.
        self.manual_backward(loss * self.ranks.size if self.ranks.sharded else loss)
        self._release_memory()
        if not micro.empty:
            accumulate_tokens(metrics, micro, policy, version=self.version)
            self._accumulate_ratio_caps(metrics, micro, policy.logp_BT.detach())
            accumulate_policy(metrics, result.policy, micro.experience.mask_BT)
        return parts

    def _release_memory(self) -> None:
        """With activation checkpointing memory counts more than time: a CPU's free pages are returned at once."""
        if self.config.model.gradient_checkpointing and self.plan.device.type == "cpu":
            release_free_memory()

    def _value_loss(self, micro: MicroBatch, policy: TokenPass, metrics: MetricAccumulator) -> Tensor:
        """The micro-batch's share of the value loss."""
        assert self.value_head is not None and policy.hidden_NH is not None and micro.values is not None
        mask_BT, settings = micro.experience.mask_BT, self.config.algorithm.value
        value_BT = self.value_head(policy.hidden_NH, mask_BT)
        loss, clipped_BT = value_part(settings, value_BT, micro.values, mask_BT, micro.experience.weight_B)
        if settings.clip is not None and not micro.empty:
            metrics.add("value/clip_fraction", clipped_BT.sum(), float(mask_BT.sum()))
        return loss

    def _sum_over_ranks(
        self, metrics: MetricAccumulator, losses: Mapping[str, float]
    ) -> tuple[MetricAccumulator, dict[str, float]]:
        """Gradients, tallies and losses, summed. Raises :class:`RunFailed` on all ranks for a log-prob of any."""
        gathered = self.ranks.gather((dict(losses), self._finite))
        if not all(finite for _, finite in gathered):
            raise RunFailed(f"update {self.version}: the policy's log-probs are not finite")
        if self.ranks.size > 1 and not self.ranks.sharded:
            sum_gradients(self.policy.parameters(), self.ranks)
        return metrics.merged(self.ranks), {name: sum(each[name] for each, _ in gathered) for name in losses}

    def record(self, rows: Sequence[Scored]) -> list[OldPolicyValues] | None:
        """Log-probs and values of a batch before its first update; None where the algorithm needs neither."""
        algorithm = self.config.algorithm
        if self.value_head is None and algorithm.proximal != "recomputed":
            return None

        def measure(inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            policy = self.policy_pass(inputs, None, ())
            if self.value_head is None:
                return policy.logp_BT, torch.zeros_like(policy.logp_BT)
            assert policy.hidden_NH is not None
            return policy.logp_BT, self.value_head(policy.hidden_NH, inputs["mask_BT"])

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
        passes: dict[str, TokenPass] = {}
        for name, reference in micro.references.items():
            wanted = [term for term in (self.terms if terms is None else terms) if term.reference == name]
            if name == "initial" or any(term.needs != "log_ratio" for term in wanted):
                passes[name] = self.policy_pass(inputs, reference, wanted, measure=measure and name == "initial")
        return passes

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

    def _accumulate_ratio_caps(self, metrics: MetricAccumulator, micro: MicroBatch, logp_BT: Tensor) -> None:
        """The largest ratio of each KL term and the share of tokens whose ratio was capped."""
        experience = micro.experience
        arguments = {"logp_BT": logp_BT, "behaviour_logp_BT": experience.behaviour_logp_BT}
        tokens = float(experience.mask_BT.sum())
        for position, term in enumerate(self.terms):
            ref_logp_BT = micro.reference_of(term).logp_BT
            shares = kl_diagnostics(term, mask_BT=experience.mask_BT, ref_logp_BT=ref_logp_BT, **arguments)
            if "ratio_max" in shares:
                metrics.maximum(f"kl_term/{position}/ratio_max", shares.pop("ratio_max"))
            for name, share in shares.items():
                metrics.add(f"kl_term/{position}/{name}", share * tokens, tokens)

    def _trainable(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]

    def _clip_gradients(self) -> dict[str, float]:
        """Clip to ``optimizer.clip_norm``, the value head's gradient apart; the norms before clipping."""
        bound = self.config.optimizer.clip_norm or float("inf")
        norms = {"grad/norm": clip_gradients(self._trainable(), bound)}
        if self.value_head is not None:
            norms["grad/value_norm"] = clip_gradients(self.value_head.parameters(), bound)
        return norms

    def _publish(self) -> None:
        """Hand the new weights to the sampler; moving references follow."""
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

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kl_comedy"] = {
            "version": self.version,
            "betas": [beta.value for beta in self.betas],
            "version_ages": self.clock.ages(),
            "references": {name: ref.hash for name, ref in self.references.items() if not ref.moving},
            "moving": {name: ref.state_dict() for name, ref in self.references.items() if ref.moving},
            "torch_rng": torch.get_rng_state(),
            "first_use": None if self.old_policy is None else to_plain(self.old_policy),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("kl_comedy")
        if state is None:  # there was no checkpoint to resume from
            return
        for name, saved in state["references"].items():
            now = self.references[name].hash
            if now != saved:
                raise RunFailed(
                    f"the {name} reference is not the one this run began with: its weights hash to {now[:16]}, the "
                    f"checkpoint says {saved[:16]}; a resumed run must keep its reference"
                )
        for name, moving in state["moving"].items():
            self.references[name].load_state_dict(moving)
        self.version = int(state["version"])
        for beta, value in zip(self.betas, state["betas"], strict=True):
            beta.value = float(value)
        self.clock.restore(state.get("version_ages", {}))
        self.old_policy = None if state.get("first_use") is None else from_plain(state["first_use"])
        torch.set_rng_state(state["torch_rng"])
        if "stream" in state:  # checkpoints of version 0.1.0 hold the state of the data module here
            checkpoint["ExperienceModule"] = state["stream"]


def _times(batch: UpdateBatch, learn_s: float) -> dict[str, float]:
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
