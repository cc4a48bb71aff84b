"""The LightningDataModule of a run: problems, sampler and rewards; its loader yields one batch per optimizer update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from kl_comedy.config import Config
from kl_comedy.errors import RunFailed, bad_value
from kl_comedy.evaluation.records import check_golds
from kl_comedy.kl.term import top_logps_of
from kl_comedy.plugins import changed_names
from kl_comedy.records import Prompt, Rollout
from kl_comedy.rewards import RewardSum, Scorer
from kl_comedy.rollouts import ReplayRollouts, RolloutBackend
from kl_comedy.training.asynchronous import Producer
from kl_comedy.training.build import Lag
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.experience import (
    DrawnHere,
    ExperienceStream,
    Recorded,
    Source,
    TrainingPrompts,
)
from kl_comedy.training.module import PolicyModule
from kl_comedy.training.problems import ProblemSets, PromptSets, load_problem_sets, render_prompts
from kl_comedy.training.sampling import ShardedScorer, build_backend, build_engines, with_environment


class ExperienceModule(lightning.LightningDataModule):
    """``prompts``, ``backend``, ``scorer`` and ``stream`` are there after :meth:`setup` (or :meth:`build`).

    ``on_connected`` is called on all ranks when they can exchange something, before the policy is loaded.
    """

    prompts: PromptSets
    backend: RolloutBackend
    scorer: Scorer
    stream: ExperienceStream

    def __init__(
        self,
        config: Config,
        problems: ProblemSets | None = None,
        on_connected: Callable[[Ranks], None] | None = None,
    ) -> None:
        super().__init__()
        self._on_connected = on_connected
        self.config = config
        self._problems = problems
        self._to_close = contextlib.ExitStack()

    def load_problems(self) -> ProblemSets:
        """Load every problem, once. Raises :class:`UserError` for a mistake in ``data``."""
        if self._problems is None:
            self._problems = load_problem_sets(self.config)
        return self._problems

    def setup(self, stage: str) -> None:
        """Here the processes are connected. Prompts need the policy's tokenizer, so the policy is loaded here too."""
        trainer: Any = self.trainer
        if self._on_connected is not None:
            self._on_connected(trainer.strategy.ranks)
        self.build(trainer.lightning_module, trainer.strategy.ranks)

    def build(self, module: PolicyModule, ranks: Ranks = SINGLE_PROCESS) -> None:
        """Load the policy of ``module`` and build everything that draws and judges its completions; all ranks call.

        Raises :class:`UserError` on all ranks for a mistake in the config.
        """
        config = self.config
        problems = ranks.raise_on_all_ranks(self.load_problems)
        # Rewards before the policy: a verifier that rejects the answers is found before a model is loaded.
        rewards = RewardSum(config.rewards, gold=config.gold, environment=config.environment)
        self._to_close.callback(rewards.close)
        # On one rank: the answers are the same on all, and verifying them may take minutes.
        for dataset in (problems.train, *problems.evals.values()):
            ranks.on_rank_zero(partial(check_golds, rewards, dataset))
        # After everything that can be refused without a model.
        module.load(ranks)
        self.prompts = ranks.raise_on_all_ranks(
            lambda: render_prompts(config, problems, module.loaded, pool=rewards.pool, ranks=ranks)
        )
        if ranks.size > 1 and len(self.prompts.train) < config.rollout.prompts_per_batch:
            # A prompt that is twice in a batch would be drawn with the same random numbers.
            raise bad_value(
                "rollout.prompts_per_batch",
                config.rollout.prompts_per_batch,
                f"at most the {len(self.prompts.train)} training prompts with more than one process",
            )
        self.scorer = rewards
        if ranks.size > 1:
            self.scorer = ShardedScorer(rewards, ranks)
        self._build_stream(module, rewards, ranks)
        module.backend = self.backend

    def _build_stream(self, module: PolicyModule, rewards: RewardSum, ranks: Ranks) -> None:
        """The sampler, and where batches come from, as ``lag`` and ``rollout.backend`` say."""
        config = self.config
        lag = module.run.lag
        loaded = module.loaded
        prompts = TrainingPrompts(config, self.prompts.train, ranks, top_logps=top_logps_of(module.run.terms.values()))
        sampler = module.run.sampler
        source: Source
        if lag.mode == "async":
            engines = build_engines(sampler, config, loaded, ranks, rewards.pool)
            self.backend = engines
            # It draws in a thread of its own, while this one learns.
            source = Producer(config, engines, prompts, rewards, ranks, self._precision)
            self._to_close.callback(source.close)  # closes the engines too
        elif sampler.beside:
            self.backend = build_engines(sampler, config, loaded, ranks, rewards.pool)
            self._to_close.callback(self.backend.close)
            source = DrawnHere(lag, config.train.steps, prompts, self._generate, self.scorer)
        else:
            built = build_backend(sampler, config, loaded, ranks)
            self._to_close.callback(built.shared.close)
            self.backend = ranks.raise_on_all_ranks(
                lambda: with_environment(built.shared, config, loaded, rewards.pool, ranks)
            )
            if sampler.capabilities.recorded:
                source = self._recorded_source(built.own, lag, prompts, rewards, ranks)
            else:
                source = DrawnHere(lag, config.train.steps, prompts, self._generate, self.scorer)
        self.stream = ExperienceStream(config, prompts, source)

    def _recorded_source(
        self, recording: ReplayRollouts, lag: Lag, prompts: TrainingPrompts, rewards: RewardSum, ranks: Ranks
    ) -> Recorded:
        """Batches of a recording, once it was checked against this run's prompts and rewards."""
        # Recorded rewards are sums under weights; with others they would be another reward.
        ranks.on_rank_zero(
            lambda: recording.bind(
                self.prompts.train,
                weights=rewards.weights,
                has_gold=self.config.gold is not None,
                updates=self.config.train.steps,
                per_batch=lag.updates_per_batch,
            )
        )
        return Recorded(recording, prompts, self.scorer, ranks)

    def _generate(self, prompts: list[Prompt], **settings: Any) -> list[Rollout]:
        # Autocast belongs to the thread: a sampler that is called elsewhere has to enter it again.
        with self._precision():
            return self.backend.generate(prompts, **settings)

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """The trainer's precision: the sampler computes as the learner does."""
        if self.trainer is None:  # built without a Trainer, by build_in_process
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = self.trainer.precision_plugin.forward_context()
        return context

    def train_dataloader(self) -> ExperienceStream:
        return self.stream

    def val_dataloader(self) -> DataLoader[Any]:
        """The sets that are evaluated, each as one batch."""
        sets: Any = [*self.prompts.evals, *self.prompts.choice_sets]
        # With a generator of its own: it would draw a seed from torch's, whose state is part of the run.
        return DataLoader(sets, batch_size=None, generator=torch.Generator())

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Rows are text and ids; tensors are made on the device when they are packed."""
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {**self.stream.snapshot(), "data": dict(self.prompts.hashes)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a stored state. Raises :class:`RunFailed` where a set of problems is another one now.

        The config names a file and not what is in it, so that its hash does not see an edit.
        """
        # Checkpoints of earlier versions have no hashes of the data.
        stored_hashes = state_dict.get("data", self.prompts.hashes)
        changed = changed_names(stored_hashes, self.prompts.hashes)
        if changed:
            raise RunFailed(
                f"the problems of {changed} (id, text or answer) are not those this run began with; a resumed run must "
                "keep them: put the older data back, or start a new run without resume"
            )
        self.stream.restore(state_dict)

    def close(self) -> None:
        """Stop the sampler, then the worker processes of the rewards."""
        self._to_close.close()


def build_in_process(config: Config) -> tuple[PolicyModule, ExperienceModule]:
    """A run's module and data, built in this process without a Trainer. Close the data when done."""
    module = PolicyModule(config)
    data = ExperienceModule(config)
    data.build(module)
    return module, data
