"""What evaluation measures besides reward: the policy against its reference on the completions it was judged by.

    completions -> micro-batches -> reference pass, policy pass (no gradient) -> sums -> means

Both distributions are taken at the temperature of training, ``rollout.temperature``, whatever evaluation drew its
completions at: one name means one thing in both. So k1, k2 and k3, which only say something about the policy that
drew the tokens, are there only where both temperatures are the same.

``eval.suites`` of a run: suites as evaluation sets, each with its own prompts, verifier and length.

How many samples are drawn and at which temperature is the run's (``eval.samples``, ``eval.temperature``). A suite by
log-prob draws none: its choices are spelled here, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kl_comedy.config import Config, ModelConfig, load_config
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import UserError, bad_value
from kl_comedy.evaluation import EvalSet, get_suite
from kl_comedy.evaluation.evaluate import GOLDS_CHECKED, ChoiceSet, ask
from kl_comedy.evaluation.suites import chosen_template, suite_problems, suite_prompts
from kl_comedy.models import LoadedModel, build_reference, load_model
from kl_comedy.models.introspection import head_chunk, head_weights, microbatch_tokens
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import Reference
from kl_comedy.records import Problem, Prompt, Scored
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rollouts import Sampling
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, ShardedScorer
from kl_comedy.training.metrics import MetricAccumulator, accumulate_estimates, accumulate_exact
from kl_comedy.training.packing import Packed, by_token_budget, pack, shortest


@dataclass(frozen=True, kw_only=True)
class CompletionMeasure:
    """Means of KL, total variation and entropy over given completions; see :meth:`__call__`.

    ``temperature``: of both distributions. ``sampled``: whether the completions are drawn from the policy at that
    temperature. ``microbatch_tokens`` and ``chunk_elements`` bound the memory, as in training.
    """

    loaded: LoadedModel
    reference: Reference | None
    temperature: float
    sampled: bool
    chunk_elements: int
    microbatch_tokens: int
    share_prompt: bool
    ranks: Ranks = SINGLE_PROCESS

    def __call__(self, rows: Sequence[Scored]) -> dict[str, float]:
        """``kl/...``, ``kl_error/...`` and ``policy/entropy...`` of the rows; without a reference entropy only."""
        metrics = MetricAccumulator()
        where: Any = {"pad_id": int(self.loaded.tokenizer.pad_token_id), "device": self.loaded.device}
        for split in self.ranks.split(by_token_budget(rows, self.microbatch_tokens)):
            self._add(
                metrics if split else MetricAccumulator(), pack([rows[n] for n in split or shortest(rows)], **where)
            )
        return metrics.merged(self.ranks).values()

    @torch.no_grad()
    def _add(self, metrics: MetricAccumulator, packed: Packed) -> None:
        inputs = packed.model_inputs()
        against = None if self.reference is None else self.reference.forward_pass(**inputs)
        seen = token_pass(
            self.loaded.model,
            **inputs,
            temperature=self.temperature,
            chunk_elements=self.chunk_elements,
            share_prompt=self.share_prompt,
            reference=against,
            kl=against is not None,
            forward_kl=against is not None,
            entropy=True,
            total_variation=against is not None,
        )
        accumulate_exact(metrics, packed.mask_BT, seen)
        if against is not None and self.sampled:
            accumulate_estimates(metrics, packed.mask_BT, seen.logp_BT - against.logp_BT, seen.kl_BT)


def completion_measure(
    config: Config, *, loaded: LoadedModel, reference: Reference | None, ranks: Ranks = SINGLE_PROCESS
) -> CompletionMeasure | None:
    """The measure that ``config`` asks for, or None where ``eval.kl`` is off."""
    if not config.eval.kl:
        return None
    return CompletionMeasure(
        loaded=loaded,
        reference=reference,
        temperature=config.rollout.temperature,
        sampled=config.eval.temperature == config.rollout.temperature,
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        microbatch_tokens=microbatch_tokens(
            config.train.microbatch_tokens, loaded.model, loaded.device, checkpoints=config.model.gradient_checkpointing
        ),
        share_prompt=config.model.share_prompt,
        ranks=ranks,
    )


def load_eval_reference(config: Config, loaded: LoadedModel) -> Reference | None:
    """The model that ``eval.reference`` names, in the evaluated model's dtype and on its device; None without one.

    Raises :class:`UserError` where it cannot be loaded, or where its tokens are not those of ``loaded``.
    """
    named = config.eval.reference
    if named is None or not config.eval.kl:
        return None
    try:
        other = load_model(_reference_model(config.model, named))
    except UserError as error:
        raise UserError(f"eval.reference: {error}") from error
    same_head = head_weights(other.model)[0].shape[0] == head_weights(loaded.model)[0].shape[0]
    if not same_head or other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise bad_value(
            "eval.reference",
            named,
            "a model with the tokens of model.source",
            f"{config.model.source} has {len(loaded.tokenizer)} tokens, it has {len(other.tokenizer)}, or others",
        )
    other.model.requires_grad_(False)
    return build_reference(
        "initial",
        other,
        config.reference,
        temperature=config.rollout.temperature,
        chunk_elements=head_chunk(config.model.head_chunk_elements, loaded.device),
        share_prompt=config.model.share_prompt,
    )


def _reference_model(evaluated: ModelConfig, named: str) -> ModelConfig:
    """What to load: the ``model`` of a config where a YAML file is named, else a source.

    What could make KL compare two computations rather than two policies is the evaluated model's in both cases. An
    adapter is left out: it begins as the identity.
    """
    own = load_config(named).model if named.endswith((".yaml", ".yml")) else ModelConfig(source=named)
    return dataclasses.replace(
        own,
        dtype=evaluated.dtype,
        device=evaluated.device,
        attention=evaluated.attention,
        trust_remote_code=evaluated.trust_remote_code,
        gradient_checkpointing=False,
        lora=None,
    )


@dataclass(frozen=True, kw_only=True)
class RunSuite:
    """A suite and its problems as they are asked."""

    suite: SuiteConfig
    problems: Sequence[Problem]

    def unrendered(self) -> list[Problem]:
        """The problems with their bare text, as training problems are compared with."""
        return [replace(problem, text=problem.meta.get("question", problem.text)) for problem in self.problems]


def load_suites(config: Config) -> list[RunSuite]:
    """The suites that ``config`` names, with their problems.

    Raises :class:`~kl_comedy.errors.UserError` for a suite that is called as a set of ``data.eval`` is, and for
    whatever is wrong with its data.
    """
    found = []
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        if suite.name in config.data.eval or suite.name in [other.suite.name for other in found]:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        found.append(RunSuite(suite=suite, problems=suite_problems(suite, root=root)))
    return found


@dataclass(frozen=True, kw_only=True)
class SuiteSets:
    """Suites as a run evaluates them; what was kept and left out, and the data's hashes, as of its own sets."""

    drawn: Sequence[EvalSet]
    compared: Sequence[ChoiceSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]


def suite_sets(
    config: Config, suites: Sequence[RunSuite], loaded: LoadedModel, *, pool: RewardPool, ranks: Ranks
) -> SuiteSets:
    """The suites with their prompts, in the order of ``suites`` among those that generate and those that compare.

    Raises :class:`~kl_comedy.errors.UserError` where a suite's verifier cannot judge its answers, and where the
    tokenizer cannot spell its choices.
    """
    drawn, compared, counts = [], [], {}
    for found in suites:
        suite, name = found.suite, f"eval.{found.suite.name}"
        prompts, report = suite_prompts(suite, found.problems, loaded.tokenizer)
        counts |= {
            f"{name}.kept": report.kept,
            f"{name}.too_long": report.too_long,
            f"{name}.control_tokens": report.control_tokens,
        }
        if suite.kind == "likelihood":
            compared.append(ask(suite, prompts, loaded, template=chosen_template(suite, loaded.tokenizer)))
        else:
            drawn.append(_drawn(config, found, prompts, pool=pool, ranks=ranks))
    hashes = {f"eval.{found.suite.name}": data_hash(found.problems) for found in suites}
    return SuiteSets(drawn=drawn, compared=compared, counts=counts, hashes=hashes)


def _drawn(config: Config, found: RunSuite, prompts: Sequence[Prompt], *, pool: RewardPool, ranks: Ranks) -> EvalSet:
    """The set of a suite that generates, with its own verifier, its answers tried."""
    suite = found.suite
    scorer = RewardSum([suite.reward], pool=pool)
    if ranks.is_rank_zero:
        scorer.check(found.problems[:: max(len(found.problems) // GOLDS_CHECKED, 1)])
    sampling = Sampling(
        temperature=config.eval.temperature,
        stop=tuple(suite.stop),
        max_new_tokens=config.eval.max_new_tokens or suite.max_new_tokens,
    )
    divided = scorer if ranks.size == 1 else ShardedScorer(scorer, ranks)
    return EvalSet(name=suite.name, prompts=prompts, scorer=divided, sampling=sampling)
