"""The LightningDataModule of a run: problems, sampler and rewards; its loader yields one batch per optimizer update."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning
import torch

from kl_comedy.config import Config
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.data import PromptOrder
from kl_comedy.errors import bad_value
from kl_comedy.records import Prompt, Rollout
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import RolloutBackend, sampling_from
from kl_comedy.training.asynchronous.sampler import Asynchronous, SamplerProcess
from kl_comedy.training.build import ProblemSets, PromptSets, check_answers, load_problem_sets, render_prompts
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, ShardedScorer, build_backend
from kl_comedy.training.eval_metrics import suite_sets
from kl_comedy.training.experience import (
    DrawnHere,
    ExperienceStream,
    Recorded,
    Scorer,
    Source,
    StreamShape,
    UpdateBatch,
)
from kl_comedy.training.module import PolicyModule


class ExperienceModule(lightning.LightningDataModule):
    """``prompts``, ``backend``, ``scorer`` and ``stream`` are there after :meth:`setup` (or :meth:`build`)."""

    prompts: PromptSets
    backend: RolloutBackend
    scorer: Scorer
    stream: ExperienceStream

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self._rewards: RewardSum | None = None
        self._problems: ProblemSets | None = None

    def load_problems(self) -> ProblemSets:
        """Load every problem, once. Raises :class:`UserError` for a mistake in ``data``."""
        if self._problems is None:
            self._problems = load_problem_sets(self.config)
        return self._problems

    def setup(self, stage: str) -> None:
        """Here the processes are connected. Prompts need the policy's tokenizer, so the policy is loaded here too."""
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        strategy: Any = self.trainer.strategy
        self.build(module, strategy.ranks)

    def build(self, module: PolicyModule, ranks: Ranks = SINGLE_PROCESS) -> None:
        """Load the policy of ``module`` and build everything that draws and judges its completions; all ranks call.

        Raises :class:`UserError` on all ranks for a mistake in the config.
        """
        config = self.config
        problems = ranks.raise_on_all_ranks(self.load_problems)
        self._rewards = rewards = RewardSum(config.rewards)
        ranks.on_rank_zero(lambda: check_answers(rewards, problems))
        module.load(ranks)
        loaded = module.loaded
        prompts = ranks.raise_on_all_ranks(lambda: render_prompts(config, problems, loaded))
        suites = ranks.raise_on_all_ranks(
            lambda: suite_sets(config, problems.suites, loaded, pool=rewards.pool, ranks=ranks)
        )
        self.prompts = replace(
            prompts,
            evals=[*prompts.evals, *suites.eval_sets],
            choice_sets=suites.choice_sets,
            counts={**prompts.counts, **suites.counts},
            hashes={**prompts.hashes, **suites.hashes},
        )
        if ranks.size > 1 and len(prompts.train) < config.rollout.prompts_per_batch:
            raise bad_value(  # a prompt that is twice in a batch would be drawn with the same random numbers
                "rollout.prompts_per_batch",
                config.rollout.prompts_per_batch,
                f"at most the {len(prompts.train)} training prompts with more than one process",
            )
        is_async = config.lag.mode == "async"
        self.backend = SamplerProcess(config, loaded) if is_async else build_backend(config, loaded, ranks)
        module.backend = self.backend
        self.scorer = rewards if ranks.size == 1 else ShardedScorer(rewards, ranks)
        shape = StreamShape(
            updates=config.train.steps,
            updates_per_batch=config.algorithm.updates_per_batch,
            epochs_per_batch=config.algorithm.epochs_per_batch,
            seed=config.seed,
        )
        self.stream = ExperienceStream(shape, prompts=prompts.train, source=self._source(shape, rewards))

    def _source(self, shape: StreamShape, rewards: RewardSum) -> Source:
        """Where batches come from, as ``lag`` and ``rollout.backend`` say."""
        config, backend, prompts = self.config, self.backend, self.prompts.train
        indices = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed).indices
        if isinstance(backend, SamplerProcess):
            return Asynchronous(config, shape, prompts=prompts, indices=indices, sampler=backend)
        if capabilities_of(config.rollout.backend).recorded:
            recording: Any = backend
            weights = {part.label: part.weight for part in rewards.parts}
            recording.bind(prompts, weights=weights, updates=shape.updates, per_batch=shape.per_iteration)
            return Recorded(recording, self.scorer)
        sampling, group_size = sampling_from(config.rollout), config.rollout.group_size

        def generate(prompts: Sequence[Prompt], *, seed: int) -> list[Rollout]:
            # The trainer's precision: the sampler computes as the learner does.
            precision = self.trainer.precision_plugin.forward_context() if self.trainer else contextlib.nullcontext()
            with precision:
                return backend.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)

        return DrawnHere(
            shape,
            lag=config.lag.steps // shape.per_iteration,
            prompts=prompts,
            indices=indices,
            generate=generate,
            scorer=self.scorer,
        )

    def train_dataloader(self) -> ExperienceStream:
        return self.stream

    def transfer_batch_to_device(self, batch: UpdateBatch, device: torch.device, dataloader_idx: int) -> UpdateBatch:
        """Rows are text and ids; tensors are made on the device when they are packed."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self.stream.snapshot()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.restore(state_dict)

    def close(self) -> None:
        """Stop worker processes and the sampler."""
        if self._rewards is not None:
            self._rewards.close()
        if hasattr(self, "backend"):
            self.backend.close()


def build_in_process(config: Config) -> tuple[PolicyModule, ExperienceModule]:
    """A run's module and data, built in this process without a Trainer. Close the data when done."""
    module, data = PolicyModule(config), ExperienceModule(config)
    data.build(module)
    return module, data
