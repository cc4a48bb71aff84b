"""The LightningModule: one training step is one optimizer update over one :class:`UpdateBatch`.

The rows of an update are prepared (reference pass, advantages, weights) and split by token budget; each micro-batch is
passed, differentiated and freed. Optimization is manual because the number of micro-batches varies.

    UpdateBatch -> prepare -> micro-batches -> forward, loss, backward -> gradients, metrics: sum over ranks
                -> clip -> optimizer step -> publish the weights -> metrics of the update -> next coefficients
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor

from kl_comedy.config import Config, OptimizerConfig
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.evaluation import EvalResult, EvalSet, EvalSettings, evaluate
from kl_comedy.evaluation.evaluate import evaluate_choices
from kl_comedy.evaluation.likelihood import ChoiceSet, choice_scorer
from kl_comedy.kl import BetaState
from kl_comedy.kl.estimators import TopRequest
from kl_comedy.kl.surrogate import NotFinite
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import release_free_memory
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import MovingReference, PastPolicies, Reference
from kl_comedy.models.types import ReferencePass, TokenPass, Wanted
from kl_comedy.objective import value_loss
from kl_comedy.phases import phase, within
from kl_comedy.records import Scored
from kl_comedy.rollouts import RolloutBackend
from kl_comedy.tracking.tokens import TokenNumbers
from kl_comedy.training.build import Run, build_run
from kl_comedy.training.costs import Machine, cost_metrics, peak_memory
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.experience import UpdateBatch, derive_seed
from kl_comedy.training.loss import (
    MicroBatch,
    OldPolicyRow,
    Preparation,
    micro_loss,
    prepare,
    weighted_sum,
)
from kl_comedy.training.metrics import (
    MetricAccumulator,
    Terms,
    accumulate_micro_batch,
    accumulate_reference,
    completion_metrics,
    critic_metrics,
    measured_kl,
    row_metrics,
    staleness_metrics,
    time_metrics,
    token_numbers,
)
from kl_comedy.training.models import ValueHead, load_models
from kl_comedy.training.old_policy import record_old_policy
from kl_comedy.training.packing import Packer, pass_options, policy_inputs
from kl_comedy.training.problems import eval_sampling
from kl_comedy.training.strategies import clip_gradients, sum_gradients

KL_AT_START_TOLERANCE = 1e-5
"""Exact KL (nats per token) accepted before the first update. Bitwise zero is expected, and reported."""

KL_AT_START_TOLERANCE_16_BIT = 1e-3
"""The same in 16 bits: a GPU may take other kernels for a pass with gradient than for one without, whose rounding
shows."""

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
    # A run that is all warm-up has no steps after it; the division must not fail at its end.
    steps_after_warmup = max(steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / steps_after_warmup, 1.0)
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def is_sampled(version: int, every: int) -> bool:
    """Whether a table of samples is written after update ``version``: the first, and every ``every``-th.

    >>> [version for version in range(1, 9) if is_sampled(version, 4)], is_sampled(1, 0)
    ([1, 4, 8], False)
    """
    if every == 0:
        return False
    return version == 1 or version % every == 0


def ess_factor(scaling: str, share: float) -> float:
    """The factor of the learning rate at an effective sample size of ``share`` of the completions (VCPO, 2602.17616).

    >>> ess_factor("sqrt", 0.25), ess_factor("linear", 0.25), ess_factor("none", 0.25)
    (0.5, 0.25, 1.0)
    """
    return {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[scaling]


class PolicyModule(lightning.LightningModule):
    """Owns the policy and its optimizer. Sampler and frozen references are not part of its state.

    ``terms`` and ``betas`` go by the term's name (:func:`~kl_comedy.training.loss.named_terms`). ``version`` counts
    optimizer updates; ``last_metrics`` are those of the last update. ``last_tokens`` are the numbers of the tokens of
    its first rows, by the row, where a table of samples follows. The policy is there after :meth:`load`, which
    :class:`ExperienceModule` calls once the processes are connected. Raises :class:`UserError` for KL terms and
    algorithms that cannot train.
    """

    loaded: LoadedModel
    value_head: ValueHead | None
    references: dict[str, Reference | PastPolicies]
    plan: Preparation
    backend: RolloutBackend
    run_folder: Path

    def __init__(self, config: Config, run: Run | None = None) -> None:
        """``run``: what was built of ``config`` already."""
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        if run is None:
            run = build_run(config)
        self.run = run
        self.terms = self.run.terms
        self.betas = {name: BetaState(term.beta) for name, term in self.terms.items()}
        self.ranks = SINGLE_PROCESS
        self.version = 0
        self.replaced_at: dict[int, float] = {}  # when each version of the weights was replaced by the next
        self.last_metrics: dict[str, float] = {}
        self.last_batch: UpdateBatch | None = None
        self.machine: Machine | None = None  # measured where training starts
        self.last_tokens: dict[int, TokenNumbers] = {}
        self.old_policy: list[OldPolicyRow] | None = None
        self._log_probs_are_finite = True  # of this rank's micro-batches of the current update
        self._overflow = ""  # what overflowed in them: the token and its log-ratio

    @property
    def beta_values(self) -> dict[str, float]:
        """The current coefficient of each KL term."""
        return {name: state.value for name, state in self.betas.items()}

    @property
    def moving_references(self) -> dict[str, MovingReference | PastPolicies]:
        """The references that follow the policy: part of the run's state, unlike the frozen ones."""
        following = (MovingReference, PastPolicies)
        return {name: ref for name, ref in self.references.items() if isinstance(ref, following)}

    @property
    def frozen_references(self) -> dict[str, Reference]:
        """The references that stay as they are; a run checks their hashes."""
        frozen = {}
        for name, reference in self.references.items():
            if not isinstance(reference, PastPolicies) and not reference.moving:
                frozen[name] = reference
        return frozen

    # --- before the first update ---

    def load(self, ranks: Ranks = SINGLE_PROCESS) -> None:
        """Load the policy, its value head and its references; all ranks call. Raises :class:`UserError` on all."""
        self.ranks = ranks
        models = load_models(self.config, self.terms.values(), ranks)
        self.loaded = models.policy
        self.policy = models.policy.model
        self.value_head = models.value_head
        self.references = models.references
        self._pass_options = pass_options(self.config, self.loaded)
        packer = Packer.of(self.config, self.loaded, ranks)
        turn_weights = None
        if self.config.environment is not None:
            turn_weights = self.config.environment.turn_weights
        self.plan = Preparation(
            terms=self.terms, algorithm=self.config.algorithm, packer=packer, turn_weights=turn_weights
        )

    def configure_model(self) -> None:
        """Lightning's FSDP2 strategy asks for this hook; :meth:`load` sharded the policy while it was loaded."""

    def on_train_start(self) -> None:
        """The weights of a resumed run are restored by now; they were not when its checkpoint was read."""
        self.machine = Machine.of(self.config, self.loaded, self.run.sampler, self.ranks)
        if self.version != self.backend.version:
            self.backend.update_weights(self.version)

    def configure_optimizers(self) -> Any:
        """AdamW over what the policy trains, and over the value head with a learning rate of its own."""
        settings = self.config.optimizer
        steps = self.config.train.steps
        groups: list[dict[str, Any]] = [{"params": [p for p in self.policy.parameters() if p.requires_grad]}]
        if self.value_head is not None:
            rate = self.config.algorithm.value.lr or settings.lr
            groups.append({"params": list(self.value_head.parameters()), "lr": rate})
        first, second = settings.betas
        optimizer = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(first, second),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(settings, step, steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # --- one update ---

    def training_step(self, batch: UpdateBatch, batch_idx: int) -> dict[str, Tensor]:
        """One optimizer update; its loss. Raises :class:`RunFailed` where a loss, log-prob or norm is not finite."""
        start = time.perf_counter()
        step = self.version
        self.last_batch = batch
        phase("learning")
        betas = self.beta_values
        metrics = MetricAccumulator()
        try:
            micro_batches, losses = self._differentiate(batch, metrics, betas)
        except UserError as error:
            raise RunFailed(f"update {step}: {error}") from error
        # Ages are taken before the ranks wait for each other, or the wait would count as age.
        ages = staleness_metrics(batch.rows, step, self.replaced_at, time.monotonic())
        metrics, losses = self._sum_over_ranks(metrics, losses)
        norms = self._clip_gradients()
        # Metrics of rows need no exchange: every rank has the rows of all.
        measured = {**row_metrics(batch.rows), **metrics.values()}
        rate = self._optimize(measured, losses, norms)
        moved = self._publish(measured)
        self.last_metrics = {
            **measured,
            **moved,
            **{f"train/loss_{name}": value for name, value in losses.items()},
            # Stored runs have the coefficients by position, without the prefix of the name.
            **{f"beta/{position}": beta for position, beta in enumerate(betas.values())},
            "train/loss": sum(losses.values()),
            **norms,
            **critic_metrics(micro_batches, self.ranks),
            **ages,
            **micro_batches[0].notes,
            "train/lr": rate,
            **self._costs(batch, time.perf_counter() - start),
        }
        if step == 0:
            self._check_kl_at_start()
        # After the update: the coefficient of one update depends on what earlier ones measured, and a resumed run
        # continues with the same.
        for name, state in self.betas.items():
            state.advance(step + 1, measured_kl(measured, self.terms[name].reference, "sequence"))
        # For the callbacks that monitor a metric. MetricsCallback writes them to the loggers.
        self.log_dict(self.last_metrics, logger=False)
        return {"loss": torch.tensor(self.last_metrics["train/loss"])}

    def _costs(self, batch: UpdateBatch, learn_s: float) -> dict[str, float]:
        """The times of an update, and what follows from them."""
        times = time_metrics(batch.rows, batch.metrics, learn_s)
        times["time/peak_memory"] = peak_memory(self.loaded.device)
        if self.machine is not None:
            times |= cost_metrics(batch.rows, self.machine, step_s=times["time/step"], learn_s=learn_s)
        return times

    def _differentiate(
        self, batch: UpdateBatch, metrics: MetricAccumulator, betas: Mapping[str, float]
    ) -> tuple[list[MicroBatch], dict[str, float]]:
        """Gradients of this rank's micro-batches; these, and the sum of each part of their losses, by its name."""
        self._log_probs_are_finite = True
        self._overflow = ""
        self.last_tokens = {}
        if batch.first:
            self.old_policy = self.record(batch.batch)
        old_policy = None
        # A batch is recorded whole at its first update, and an update reads the part of its own rows.
        if self.old_policy is not None:
            old_policy = self.old_policy[batch.offset : batch.offset + len(batch.rows)]
        micro_batches = prepare(
            batch.rows,
            self.plan,
            betas=betas,
            references=self.references,
            policy_pass=self.policy_pass,
            old_policy=old_policy,
        )
        losses = defaultdict[str, float](float)
        for number, micro in enumerate(micro_batches, start=1):
            phase("learning", number, len(micro_batches))
            for name, value in self._accumulate(micro, metrics, betas).items():
                losses[name] += float(value)
        return micro_batches, losses

    def _accumulate(
        self, micro: MicroBatch, metrics: MetricAccumulator, betas: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Pass, loss and backward of one micro-batch; the detached parts of its loss."""
        config = self.config
        # Whoever checkpoints on a CPU has little memory: freed pages go back to the system at the price of time.
        lean = config.model.gradient_checkpointing and self.loaded.device.type == "cpu"
        passes = self.passes(micro, measure=self._measures_exact_kl())
        if lean:
            release_free_memory()
        policy = passes["initial"]
        if not bool(torch.isfinite(policy.logp_BT).all()):
            # Raised after the update's exchanges: a rank that left them now would leave the others waiting.
            self._log_probs_are_finite = False
        losses_of = partial(micro_loss, micro, passes, terms=self.terms, algorithm=config.algorithm)
        try:
            result = losses_of(betas=betas)
        except NotFinite as error:
            # Raised after the update's exchanges, as above: until then the terms count as nothing.
            self._overflow = self._overflow or str(error)
            result = losses_of(betas=dict.fromkeys(betas, 0.0))
        loss = result.loss
        parts = result.parts
        if self.value_head is not None:
            critic_loss = self._critic_loss(micro, policy, self.value_head, metrics)
            parts["value"] = critic_loss.detach()
            loss = loss + critic_loss
        self.manual_backward(loss * self._loss_factor)
        if lean:
            release_free_memory()
        if not micro.empty:
            accumulate_micro_batch(metrics, micro, policy, result, self.terms, version=self.version)
            for name in sorted(micro.references.keys() - {"initial"}):
                accumulate_reference(metrics, name, micro, passes)
            if is_sampled(self.version + 1, config.train.samples_every):
                self.last_tokens |= token_numbers(micro, policy, result)
        return parts

    def _measures_exact_kl(self) -> bool:
        """Whether this update measures exact divergences, which cost a pass over the whole vocabulary."""
        if self.version in (0, self.config.train.steps - 1):
            return True  # the check of the first update needs it, and tables show the last value
        every = self.config.train.exact_kl_every
        return every > 0 and self.version % every == 0

    def _critic_loss(
        self, micro: MicroBatch, policy: TokenPass, value_head: ValueHead, metrics: MetricAccumulator
    ) -> Tensor:
        """The value loss of a micro-batch, times its coefficient."""
        mask_BT = micro.experience.mask_BT
        settings = self.config.algorithm.value
        value_BT = value_head(policy.hidden_NH, mask_BT)
        assert micro.old_value_BT is not None
        assert micro.value_target_BT is not None
        loss_BT, clipped_BT = value_loss(value_BT, micro.old_value_BT, micro.value_target_BT, settings.clip)
        if settings.clip is not None and not micro.empty:
            metrics.add("value/clip_fraction", (clipped_BT & mask_BT).sum(), mask_BT.sum())
        return settings.coefficient * weighted_sum(loss_BT, micro.experience)

    @property
    def _loss_factor(self) -> int:
        """FSDP's reduction takes the mean over ranks; a micro-batch is this rank's part of a sum."""
        return self.ranks.size if self.ranks.sharded else 1

    def _sum_over_ranks(
        self, metrics: MetricAccumulator, losses: Mapping[str, float]
    ) -> tuple[MetricAccumulator, dict[str, float]]:
        """Sum gradients, metrics and losses. Raises :class:`RunFailed` on all ranks where one has a bad log-prob."""
        gathered = self.ranks.gather((dict(losses), self._log_probs_are_finite, self._overflow))
        if not all(is_finite for _, is_finite, _ in gathered):
            raise RunFailed(f"update {self.version}: the policy's log-probs are not finite")
        overflows = [overflow for *_, overflow in gathered if overflow]
        if overflows:
            raise RunFailed(f"update {self.version}: {overflows[0]}")
        if self.ranks.size > 1:
            if not self.ranks.sharded:
                sum_gradients(self.policy.parameters(), self.ranks)
            if self.value_head is not None:
                # It is whole on every rank under any strategy, and its loss was multiplied for FSDP's mean.
                sum_gradients(self.value_head.parameters(), self.ranks, divisor=self._loss_factor)
        if self.ranks.size > 1 and is_sampled(self.version + 1, self.config.train.samples_every):
            # Rank 0 writes the table; each rank has passed some of its rows.
            for tokens_of_rank in self.ranks.gather(self.last_tokens):
                self.last_tokens |= tokens_of_rank
        summed = {name: sum(of_rank[name] for of_rank, *_ in gathered) for name in losses}
        return metrics.merged(self.ranks), summed

    def _clip_gradients(self) -> dict[str, float]:
        """Clip the gradients of policy and value head, each by its own norm; the norms before, as metrics."""
        bound = self.config.optimizer.clip_norm or float("inf")
        norms = {"grad/norm": clip_gradients(self.policy.parameters(), bound)}
        if self.value_head is not None:
            norms["grad/value_norm"] = clip_gradients(self.value_head.parameters(), bound)
        return norms

    def _optimize(
        self, measured: Mapping[str, float], losses: Mapping[str, float], norms: Mapping[str, float]
    ) -> float:
        """The optimizer's step; the learning rate that it took. Raises :class:`RunFailed` for what is not finite."""
        optimizer: Any = self.optimizers()
        schedule: Any = self.lr_schedulers()
        rate = optimizer.param_groups[0]["lr"] * ess_factor(self.config.optimizer.ess_scaling, measured["policy/ess"])
        # Before the step: weights of a failed update stay those of the last good one.
        for name, value in {**losses, **norms, "train/lr": rate}.items():
            if not math.isfinite(value):
                raise RunFailed(f"update {self.version}: {name} is {value}")
        optimizer.param_groups[0]["lr"] = rate  # until the schedule sets the next
        optimizer.step()
        optimizer.zero_grad()  # whoever samples next gets the memory of the gradients
        schedule.step()
        return float(rate)

    def _publish(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Publish the new weights to the sampler under the next version; moving references follow the policy.

        Returns ``time/transfer``, and ``reference/NAME/moved`` for each of these: 1.0 where it moved.
        """
        self.replaced_at[self.version] = time.monotonic()
        self.replaced_at.pop(self.version - VERSIONS_REMEMBERED, None)
        self.version += 1
        phase("publishing the weights")
        start = time.perf_counter()
        self.backend.update_weights(self.version)
        moved = {"time/transfer": time.perf_counter() - start}
        for name, reference in self.moving_references.items():
            has_moved = reference.update(self.policy, self.version, measured_kl(measured, name, "token"))
            moved[f"reference/{name}/moved"] = float(has_moved)
        return moved

    def _check_kl_at_start(self) -> None:
        """Raise :class:`RunFailed` where the initial reference is not the policy before its first update."""
        kl_at_start = self.last_metrics.get("kl/exact_reverse_token", 0.0)
        # What is left of the KL where the whole distributions are equal.
        kl_at_start -= self.last_metrics.get("kl/truncation_token", 0.0)
        in_16_bit = self.config.train.precision == "bf16" or self.config.model.dtype != "float32"
        tolerance = KL_AT_START_TOLERANCE_16_BIT if in_16_bit else KL_AT_START_TOLERANCE
        if abs(kl_at_start) > tolerance:
            raise RunFailed(
                f"exact KL to the reference before the first update is {kl_at_start:.3g} nats per token, and must be "
                "0: the reference is not the policy's starting point"
            )

    # --- evaluation ---

    def validation_step(  # type: ignore[override]  # Lightning returns it as it is, to on_validation_batch_end
        self, batch: EvalSet | ChoiceSet, batch_idx: int
    ) -> EvalResult:
        """Evaluate one set. Returns its result; EvaluationCallback writes it to the loggers."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(batch, ChoiceSet):
            phase(f"evaluating {batch.name}")
            result = evaluate_choices(choice_scorer(self.config, self.loaded, self.ranks), batch)
        else:
            with within(f"evaluating {batch.name}"):
                result = self._evaluate(batch, data)
        self.log_dict(result.metrics(), logger=False, batch_size=1)
        return result

    def _evaluate(self, eval_set: EvalSet, data: Any) -> EvalResult:
        config = self.config
        reference = self.frozen_references["initial"]
        measure = completion_metrics(config, loaded=self.loaded, reference=reference, ranks=self.ranks)
        settings = EvalSettings(samples=config.eval.samples, sampling=eval_sampling(config), measure=measure)
        # The same seed at every evaluation: scores of a run differ by the policy, not by the draw.
        seed = derive_seed(config.seed, f"eval/{eval_set.name}", 0)
        return evaluate(data.backend, data.scorer, eval_set, settings, seed=seed)

    # --- passes of the policy ---

    def record(self, rows: Sequence[Scored]) -> list[OldPolicyRow] | None:
        """Log-probs and values of a batch before its first update; see :func:`record_old_policy`."""
        return record_old_policy(
            rows,
            algorithm=self.config.algorithm,
            packer=self.plan.packer,
            policy_pass=self.policy_pass,
            value_head=self.value_head,
        )

    def passes(self, micro: MicroBatch, *, terms: Terms | None = None, measure: bool = False) -> dict[str, TokenPass]:
        """The policy pass per reference, by its name; without those that no term needs.

        ``terms``: those of the run by default. ``measure`` adds exact KL and entropy for the metrics, which are those
        against the initial policy.
        """
        if terms is None:
            terms = list(self.terms.values())
        inputs = policy_inputs(micro.experience)
        passes: dict[str, TokenPass] = {}
        for name, reference in micro.references.items():
            served = {name}
            if name == "initial" and "sampler" not in micro.references:
                # Without past policies, what terms against the sampler read of a policy pass is in this one.
                served.add("sampler")
            terms_of_reference = [term for term in terms if term.reference in served]
            if name == "initial":
                # Always: the log-probs of the policy loss and of every log-ratio come from this pass.
                passes[name] = self.policy_pass(inputs, reference, terms_of_reference, measure=measure)
                continue
            # A log-ratio is a difference of two passes that are there already; exact KLs and top tokens need both
            # distributions at once.
            needs_pass = any(term.reads != {"log_ratio"} for term in terms_of_reference)
            if needs_pass:
                passes[name] = self.policy_pass(inputs, reference, terms_of_reference)
        return passes

    def policy_pass(
        self, inputs: Mapping[str, Any], reference: ReferencePass | None, terms: Terms, *, measure: bool = False
    ) -> TokenPass:
        """The policy pass, with the exact KLs that ``terms`` (or the metrics) need."""
        needs = {name for term in terms for name in term.reads}
        is_truncated = inputs.get("kept") is not None
        wanted = Wanted(
            kl=measure or "exact_reverse" in needs,
            # Infinite where the policy leaves out tokens that the reference draws.
            forward_kl=(measure and not is_truncated) or "exact_forward" in needs,
            log_kept=is_truncated,
            reference_log_kept=measure and is_truncated,
            certainty=any(term.weight == "policy" for term in terms),
            reference_certainty=any(term.weight == "reference" for term in terms),
            mixtures=tuple(sorted({term.mixture for term in terms if term.mixture is not None})),
            top=_top_requests(terms),
            entropy=measure,
            total_variation=measure,
            hidden=self.value_head is not None,
            hidden_gradient=self.config.algorithm.value.trunk,
        )
        return token_pass(self.policy, self._pass_options, wanted, **inputs, reference=reference)

    # --- checkpoints ---

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the module's state beside the weights. Stored runs are read by these keys."""
        now = time.monotonic()
        checkpoint["kl_comedy"] = {
            "version": self.version,
            # A list in the order of the config, as in the checkpoints of every earlier version.
            "betas": list(self.beta_values.values()),
            # Ages and not times, because a monotonic clock starts anew with the machine.
            "version_ages": {version: now - replaced for version, replaced in self.replaced_at.items()},
            "references": {name: ref.hash for name, ref in self.frozen_references.items()},
            "moving": {name: reference.state_dict() for name, reference in self.moving_references.items()},
            "torch_rng": torch.get_rng_state(),
            "first_use": self.old_policy,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a stored state. Raises :class:`RunFailed` where a frozen reference is another one now."""
        state = checkpoint.get("kl_comedy")
        if state is None:  # there was no checkpoint to resume from
            return
        for name, stored_hash in state["references"].items():
            current_hash = self.frozen_references[name].hash
            if current_hash != stored_hash:
                hashes = f"its weights hash to {current_hash[:16]}, the checkpoint says {stored_hash[:16]}"
                raise RunFailed(
                    f"the {name} reference is not the one this run began with: {hashes}; a resumed run must keep it"
                )
        for name, moving in state["moving"].items():
            self.moving_references[name].load_state_dict(moving)
        self.version = int(state["version"])
        for beta, value in zip(self.betas.values(), state["betas"], strict=True):
            beta.value = float(value)
        now = time.monotonic()  # the time between a checkpoint and its resume does not count
        self.replaced_at = {int(version): now - age for version, age in state.get("version_ages", {}).items()}
        self.old_policy = state.get("first_use")
        torch.set_rng_state(state["torch_rng"])


def _top_requests(terms: Terms) -> tuple[TopRequest, ...]:
    """The lists of top tokens that ``terms`` read, in an order that is the same on every rank."""
    requests = {request for term in terms for request in (term.top, term.sampler_top) if request is not None}
    return tuple(sorted(requests))
