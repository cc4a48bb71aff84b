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
from torch import Tensor, nn

from kl_comedy.config import Config, OptimizerConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.kl import BetaState
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import release_free_memory
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import MovingReference, Reference, build_reference
from kl_comedy.models.types import ReferencePass, TokenPass, Wanted
from kl_comedy.objective import value_loss
from kl_comedy.records import Scored
from kl_comedy.rollouts import RolloutBackend
from kl_comedy.training.build import check_training
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, connect_teacher, load_policy, load_teacher
from kl_comedy.training.experience import UpdateBatch
from kl_comedy.training.loss import (
    MicroBatch,
    OldPolicyRow,
    Preparation,
    micro_loss,
    prepare,
    uses_critic,
    weighted_sum,
)
from kl_comedy.training.metrics import (
    MetricAccumulator,
    Terms,
    accumulate_micro_batch,
    accumulate_reference,
    critic_metrics,
    measured_kl,
    row_metrics,
    staleness_metrics,
    time_metrics,
)
from kl_comedy.training.packing import Packer, model_inputs, pass_options
from kl_comedy.training.strategies import clip_gradients, sum_gradients

KL_AT_START_TOLERANCE, KL_AT_START_TOLERANCE_16_BIT = 1e-5, 1e-3
"""Exact KL (nats a token) accepted before the first update; bitwise zero is expected and reported. A GPU may take other
kernels for a pass with gradient than for one without, whose rounding in 16 bits shows."""

VERSIONS_REMEMBERED = 1024
"""Versions whose replacement time is stored: more than any useful lag."""


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


def ess_factor(scaling: str, share: float) -> float:
    """The factor of the learning rate at an effective sample size of ``share`` of the completions (VCPO, 2602.17616).

    >>> ess_factor("sqrt", 0.25), ess_factor("linear", 0.25), ess_factor("none", 0.25)
    (0.5, 0.25, 1.0)
    """
    return {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[scaling]


class ValueHead(nn.Module):
    """PPO's value ``V = w . hidden + b`` in float32, zero at the start: the first advantages are the returns to go."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor, mask_BT: Tensor) -> Tensor:
        """The value of the prefix before each completion token, ``[B, T]``, zero outside the mask."""
        with torch.autocast(device_type=hidden_NH.device.type, enabled=False):
            value_N = self.linear(hidden_NH.float())[:, 0]
        return torch.zeros(mask_BT.shape, dtype=value_N.dtype, device=value_N.device).masked_scatter(mask_BT, value_N)


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
        self.replaced_at: dict[int, float] = {}  # when each version of the weights was replaced by the next
        self.last_metrics: dict[str, float] = {}
        self.last_batch: UpdateBatch | None = None
        self.old_policy: list[OldPolicyRow] | None = None

    def load(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        """Load the policy, its value head and its references; all ranks call. Raises :class:`UserError` on all."""
        config, self.ranks = self.config, ranks
        self.loaded = loaded = load_policy(config, ranks)
        self.policy = loaded.model
        self.value_head = None
        if uses_critic(config.algorithm):
            settings: Any = loaded.model.config
            self.value_head = ValueHead(int(settings.get_text_config().hidden_size), loaded.device)
        # The initial reference always: KL is reported against it. Moving ones where a term names them.
        names = ["initial", *sorted({term.reference for term in self.terms} - {"initial", "sampler"})]
        served = config.reference.teacher is not None and config.reference.teacher.url is not None
        teacher = load_teacher(config, loaded, ranks) if "teacher" in names and not served else None
        self.references = {
            name: connect_teacher(config, loaded, self.terms, ranks)
            if name == "teacher" and served
            else build_reference(name, loaded, config, teacher=teacher)
            for name in names
        }
        self._pass_options = pass_options(config, loaded)
        packer = Packer.of(config, loaded, ranks)
        self.plan = Preparation(terms=self.terms, algorithm=config.algorithm, packer=packer)

    def configure_model(self) -> None:
        """Lightning's FSDP2 strategy asks for this hook; :meth:`load` sharded the policy while it was loaded."""

    def on_train_start(self) -> None:
        """The weights of a resumed run are restored by now; they were not when its checkpoint was read."""
        if self.version != self.backend.version:
            self.backend.update_weights(self.version)

    def configure_optimizers(self) -> Any:
        settings, steps = self.config.optimizer, self.config.train.steps
        groups: list[dict[str, Any]] = [{"params": [p for p in self.policy.parameters() if p.requires_grad]}]
        if self.value_head is not None:
            rate = self.config.algorithm.value.lr or settings.lr
            groups.append({"params": list(self.value_head.parameters()), "lr": rate})
        first, second = settings.betas
        options: dict[str, Any] = {"eps": settings.eps, "weight_decay": settings.weight_decay, "fused": True}
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(first, second), **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(settings, step, steps))
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def training_step(self, batch: UpdateBatch, batch_idx: int) -> None:
        """One optimizer update. Raises :class:`RunFailed` where a loss, a log-prob or a gradient is not finite."""
        start, step, optimizer = time.perf_counter(), self.version, self.optimizers()
        self.last_batch, self._finite = batch, True
        betas = [beta.value for beta in self.betas]
        metrics, losses = MetricAccumulator(), defaultdict[str, float](float)
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
            for micro in micro_batches:
                for name, value in self._accumulate(micro, metrics, betas).items():
                    losses[name] += float(value)
        except UserError as error:
            raise RunFailed(f"update {step}: {error}") from error
        ages = staleness_metrics(batch.rows, step, self.replaced_at, time.monotonic())
        metrics, losses = self._sum_over_ranks(metrics, losses)
        bound = self.config.optimizer.clip_norm or float("inf")
        norms = {"grad/norm": clip_gradients(self.policy.parameters(), bound)}
        if self.value_head is not None:
            norms["grad/value_norm"] = clip_gradients(self.value_head.parameters(), bound)
        measured = {**row_metrics(batch.rows), **metrics.values()}
        rate = optimizer.param_groups[0]["lr"] * ess_factor(self.config.optimizer.ess_scaling, measured["policy/ess"])
        for name, value in {**losses, **norms, "train/lr": rate}.items():
            if not math.isfinite(value):
                raise RunFailed(f"update {step}: {name} is {value}")
        optimizer.param_groups[0]["lr"] = rate  # until the schedule sets the next
        optimizer.step()
        optimizer.zero_grad()  # whoever samples next gets the memory of the gradients
        self.lr_schedulers().step()
        moved = self._publish(measured)
        self.last_metrics = {
            **measured,
            **moved,
            **{f"train/loss_{name}": value for name, value in losses.items()},
            **{f"beta/{position}": beta for position, beta in enumerate(betas)},
            "train/loss": sum(losses.values()),
            **norms,
            **critic_metrics(micro_batches, self.ranks),
            **ages,
            **micro_batches[0].notes,
            "train/lr": rate,
            **time_metrics(batch.rows, batch.metrics, time.perf_counter() - start),
        }
        at_start = self.last_metrics.get("kl/exact_reverse_token", 0.0)
        narrow = self.config.train.precision == "bf16" or self.config.model.dtype != "float32"
        if step == 0 and abs(at_start) > (KL_AT_START_TOLERANCE_16_BIT if narrow else KL_AT_START_TOLERANCE):
            reason = f"is {at_start:.3g} nats a token, and must be 0: the reference is not the policy's starting point"
            raise RunFailed(f"exact KL to the reference before the first update {reason}")
        for term, state in zip(self.terms, self.betas, strict=True):
            state.advance(step + 1, measured_kl(measured, term.reference, "sequence"))

    def _accumulate(self, micro: MicroBatch, metrics: MetricAccumulator, betas: Sequence[float]) -> dict[str, Tensor]:
        """Pass, loss and backward of one micro-batch; the detached parts of its loss."""
        config = self.config
        every = config.train.exact_kl_every
        at_ends = self.version in (0, config.train.steps - 1)  # a run's first value, and the one that tables show
        measure = at_ends or (every > 0 and self.version % every == 0)
        lean = config.model.gradient_checkpointing and self.loaded.device.type == "cpu"  # memory counts more than time
        passes = self.passes(micro, measure=measure)
        if lean:
            release_free_memory()
        policy = passes["initial"]
        self._finite = self._finite and bool(torch.isfinite(policy.logp_BT).all())
        result = micro_loss(micro, passes, terms=self.terms, betas=betas, algorithm=config.algorithm)
        loss, parts = result.loss, result.parts
        if self.value_head is not None:
            mask_BT, settings = micro.experience.mask_BT, config.algorithm.value
            value_BT = self.value_head(policy.hidden_NH, mask_BT)
            loss_BT, clipped_BT = value_loss(value_BT, micro.old_value_BT, micro.value_target_BT, settings.clip)
            if settings.clip is not None and not micro.empty:
                metrics.add("value/clip_fraction", (clipped_BT & mask_BT).sum(), mask_BT.sum())
            value = settings.coefficient * weighted_sum(loss_BT, micro.experience)
            parts["value"], loss = value.detach(), loss + value
        self.manual_backward(loss * self._loss_factor)
        if lean:
            release_free_memory()
        if not micro.empty:
            accumulate_micro_batch(metrics, micro, policy, result, self.terms, version=self.version)
            for name in sorted(micro.references.keys() - {"initial"}):
                accumulate_reference(metrics, name, micro, passes)
        return parts

    @property
    def _loss_factor(self) -> int:
        """FSDP's reduction takes the mean over ranks; a micro-batch is this rank's part of a sum."""
        return self.ranks.size if self.ranks.sharded else 1

    def _sum_over_ranks(self, metrics: MetricAccumulator, losses: Mapping[str, float]) -> tuple[Any, dict[str, float]]:
        """Gradients, metrics and losses, summed. Raises :class:`RunFailed` on all ranks for a log-prob of any."""
        gathered = self.ranks.gather((dict(losses), self._finite))
        if not all(finite for _, finite in gathered):
            raise RunFailed(f"update {self.version}: the policy's log-probs are not finite")
        if self.ranks.size > 1:
            if not self.ranks.sharded:
                sum_gradients(self.policy.parameters(), self.ranks)
            if self.value_head is not None:  # whole on every rank under any strategy
                sum_gradients(self.value_head.parameters(), self.ranks, divisor=self._loss_factor)
        return metrics.merged(self.ranks), {name: sum(each[name] for each, _ in gathered) for name in losses}

    def _publish(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Hand the new weights to the sampler under the next version; moving references follow. Which of them moved."""
        self.replaced_at[self.version] = time.monotonic()
        self.replaced_at.pop(self.version - VERSIONS_REMEMBERED, None)
        self.version += 1
        self.backend.update_weights(self.version)
        return {
            f"reference/{name}/moved": float(
                reference.update(self.policy, self.version, measured_kl(measured, name, "token"))
            )
            for name, reference in self.references.items()
            if isinstance(reference, MovingReference)
        }

    @torch.no_grad()
    def record(self, rows: Sequence[Scored]) -> list[OldPolicyRow] | None:
        """Log-probs and values of a batch before its first update; None where the algorithm needs neither.

        With ``algorithm.value.bootstrap_truncated`` a completion cut at the limit gets the value after its last token;
        every other's is 0.
        """
        algorithm, packer = self.config.algorithm, self.plan.packer
        if self.value_head is None and algorithm.proximal != "recomputed":
            return None
        bootstrap = self.value_head is not None and algorithm.value.bootstrap_truncated
        recorded: dict[int, OldPolicyRow] = {}
        for packed in packer.micro_batches(rows):
            inputs = model_inputs(packed)
            if bootstrap:  # with one token more, the value before it is the one after the last real token
                inputs["mask_BT"] = nn.functional.pad(inputs["mask_BT"], (1, 0), value=True)
                inputs["ids_BT"] = nn.functional.pad(inputs["ids_BT"], (0, 1), value=packer.pad_id)
            policy = self.policy_pass(inputs, None, ())
            logp_BT = policy.logp_BT.float().cpu()
            value_BT = torch.zeros_like(logp_BT)
            if self.value_head is not None:
                value_BT = self.value_head(policy.hidden_NH, inputs["mask_BT"]).cpu()
            for position, n in enumerate(() if packed.empty else packed.positions):
                size = len(rows[n].rollout.completion_ids)
                truncated = bootstrap and rows[n].rollout.stop_reason == "length"
                recorded[n] = {
                    "logp": logp_BT[position, :size].clone(),
                    "value": value_BT[position, :size].clone(),
                    "last": float(value_BT[position, size]) if truncated else 0.0,
                }
        everywhere = {n: row for of_rank in packer.ranks.gather(recorded) for n, row in of_rank.items()}
        return [everywhere[n] for n in range(len(rows))]

    def passes(self, micro: MicroBatch, *, terms: Terms | None = None, measure: bool = False) -> dict[str, TokenPass]:
        """The policy pass per reference: the initial one always, others where one of ``terms`` needs their exact KL."""
        inputs = model_inputs(micro.experience)
        passes: dict[str, TokenPass] = {}
        for name, reference in micro.references.items():
            wanted = [term for term in (self.terms if terms is None else terms) if term.reference == name]
            if name == "initial" or any(term.reads != {"log_ratio"} for term in wanted):
                passes[name] = self.policy_pass(inputs, reference, wanted, measure=measure and name == "initial")
        return passes

    def policy_pass(
        self, inputs: Mapping[str, Tensor], reference: ReferencePass | None, terms: Terms, *, measure: bool = False
    ) -> TokenPass:
        """The policy pass, with the exact KLs that ``terms`` (or the metrics) need."""
        needs = {name for term in terms for name in term.reads}
        wanted = Wanted(
            kl=measure or "exact_reverse" in needs,
            forward_kl=measure or "exact_forward" in needs,
            certainty=any(term.weight == "policy" for term in terms),
            reference_certainty=any(term.weight == "reference" for term in terms),
            mixtures=tuple(sorted({term.mixture for term in terms if term.mixture is not None})),
            top=tuple(sorted({term.top for term in terms if term.top is not None})),
            entropy=measure,
            total_variation=measure,
            hidden=self.value_head is not None,
            hidden_gradient=self.config.algorithm.value.trunk,
        )
        return token_pass(self.policy, self._pass_options, wanted, **inputs, reference=reference)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        now = time.monotonic()
        checkpoint["kl_comedy"] = {
            "version": self.version,
            "betas": [beta.value for beta in self.betas],
            "version_ages": {version: now - replaced for version, replaced in self.replaced_at.items()},
            "references": {name: ref.hash for name, ref in self.references.items() if not ref.moving},
            "moving": {name: ref.state_dict() for name, ref in self.references.items() if ref.moving},
            "torch_rng": torch.get_rng_state(),
            "first_use": self.old_policy,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get("kl_comedy")
        if state is None:  # there was no checkpoint to resume from
            return
        for name, saved in state["references"].items():
            current = self.references[name].hash
            if current != saved:
                hashes = f"its weights hash to {current[:16]}, the checkpoint says {saved[:16]}"
                raise RunFailed(
                    f"the {name} reference is not the one this run began with: {hashes}; a resumed run must keep it"
                )
        for name, moving in state["moving"].items():
            self.references[name].load_state_dict(moving)
        self.version = int(state["version"])
        for beta, value in zip(self.betas, state["betas"], strict=True):
            beta.value = float(value)
        now = time.monotonic()  # the time between a checkpoint and its resume does not count
        self.replaced_at = {int(version): now - age for version, age in state.get("version_ages", {}).items()}
        self.old_policy = state.get("first_use")
        torch.set_rng_state(state["torch_rng"])
        if "stream" in state:  # checkpoints of version 0.1.0 hold the state of the data module here
            checkpoint["ExperienceModule"] = state["stream"]
