"""What evaluation measures besides reward: the policy against its reference on the evaluation completions.

Both distributions are taken at ``rollout.temperature``, whatever temperature evaluation sampled at, so that a metric
means the same in training and in evaluation. k1, k2 and k3 estimate something about the policy that sampled the
tokens; they are computed only where both temperatures are equal.

Also ``eval.suites`` of a run: suites as evaluation sets, each with its own prompts, verifier and length. Samples and
temperature are the run's (``eval.samples``, ``eval.temperature``). A suite by log-prob samples nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kl_comedy.config import Config, ModelConfig, load_config
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import UserError, bad_value
from kl_comedy.evaluation import EvalSet, get_suite
from kl_comedy.evaluation.likelihood import ChoiceSet, tokenize_choices
from kl_comedy.evaluation.records import check_golds
from kl_comedy.evaluation.suites import resolve_template, suite_problems, suite_prompts
from kl_comedy.models import LoadedModel, build_reference, load_model
from kl_comedy.models.introspection import head_chunk, head_weights, microbatch_tokens
from kl_comedy.models.logprobs import token_pass
from kl_comedy.models.reference import Reference
from kl_comedy.records import Problem, Scored
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rollouts import Sampling
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks, ShardedScorer
from kl_comedy.training.metrics import MetricAccumulator, accumulate_estimates, accumulate_exact
from kl_comedy.training.packing import Packed, by_token_budget, pack, shortest


@dataclass(frozen=True, kw_only=True)
class CompletionMetrics:
    """Means of KL, total variation and entropy over completions.

    ``temperature``: of both distributions. ``sampled``: the completions were sampled from the policy at it.
    ``microbatch_tokens`` and ``chunk_elements`` bound the memory, as in training.
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
        """``kl/...``, ``kl_error/...`` and ``policy/entropy...``; without a reference, entropy only. All ranks call."""
        metrics = MetricAccumulator()
        pad_id, device = int(self.loaded.tokenizer.pad_token_id), self.loaded.device
        for split in self.ranks.split(by_token_budget(rows, self.microbatch_tokens)):
            packed = pack([rows[n] for n in split or shortest(rows)], pad_id=pad_id, device=device)
            self._accumulate(metrics if split else MetricAccumulator(), packed)
        return metrics.merged(self.ranks).values()

    @torch.no_grad()
    def _accumulate(self, metrics: MetricAccumulator, packed: Packed) -> None:
        inputs = packed.model_inputs()
        reference = None if self.reference is None else self.reference.forward_pass(**inputs)
        policy = token_pass(
            self.loaded.model,
            **inputs,
            temperature=self.temperature,
            chunk_elements=self.chunk_elements,
            share_prompt=self.share_prompt,
            reference=reference,
            kl=reference is not None,
            forward_kl=reference is not None,
            entropy=True,
            total_variation=reference is not None,
        )
        accumulate_exact(metrics, packed.mask_BT, policy)
        if reference is not None and self.sampled:
            accumulate_estimates(metrics, packed.mask_BT, policy.logp_BT - reference.logp_BT, policy.kl_BT)


def completion_metrics(
    config: Config, *, loaded: LoadedModel, reference: Reference | None, ranks: Ranks = SINGLE_PROCESS
) -> CompletionMetrics | None:
    """The :class:`CompletionMetrics` of a config; None where ``eval.kl`` is off."""
    if not config.eval.kl:
        return None
    return CompletionMetrics(
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
    """The ``model`` of the config where ``named`` is a YAML file, else that source.

    Settings that change rounding are the evaluated model's, so that KL compares policies and not computations. An
    adapter is left out, because it is the identity at its start.
    """
    model = load_config(named).model if named.endswith((".yaml", ".yml")) else ModelConfig(source=named)
    return dataclasses.replace(
        model,
        dtype=evaluated.dtype,
        device=evaluated.device,
        attention=evaluated.attention,
        trust_remote_code=evaluated.trust_remote_code,
        gradient_checkpointing=False,
        lora=None,
    )


@dataclass(frozen=True, kw_only=True)
class RunSuite:
    """A suite and its problems, with their text as it is given to the model."""

    suite: SuiteConfig
    problems: Sequence[Problem]

    def unrendered(self) -> list[Problem]:
        """The problems with the question alone, for the comparison with training problems."""
        return [
            dataclasses.replace(problem, text=problem.meta.get("question", problem.text)) for problem in self.problems
        ]


def load_suites(config: Config) -> list[RunSuite]:
    """The suites in ``eval.suites``, with their problems.

    Raises :class:`UserError` for a name that ``data.eval`` or another suite has, and for errors in their data.
    """
    suites: dict[str, RunSuite] = {}
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        if suite.name in config.data.eval or suite.name in suites:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        suites[suite.name] = RunSuite(suite=suite, problems=suite_problems(suite, root=root))
    return list(suites.values())


@dataclass(frozen=True, kw_only=True)
class SuiteSets:
    """The suites of a run as evaluation sets, with counts of their problems and the hashes of their data."""

    eval_sets: Sequence[EvalSet]
    choice_sets: Sequence[ChoiceSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]


def suite_sets(
    config: Config, suites: Sequence[RunSuite], loaded: LoadedModel, *, pool: RewardPool, ranks: Ranks
) -> SuiteSets:
    """Render the prompts of ``suites``, in order: those that generate, those by log-prob.

    Raises :class:`UserError` where a suite's verifier rejects its answers, or the tokenizer cannot encode its choices.
    """
    eval_sets: list[EvalSet] = []
    choice_sets: list[ChoiceSet] = []
    counts: dict[str, int] = {}
    for run_suite in suites:
        suite, problems = run_suite.suite, run_suite.problems
        prompts, report = suite_prompts(suite, problems, loaded.tokenizer)
        for key in ("kept", "too_long", "control_tokens"):
            counts[f"eval.{suite.name}.{key}"] = getattr(report, key)
        if suite.kind == "likelihood":
            template = resolve_template(suite, loaded.tokenizer)
            choice_sets.append(tokenize_choices(suite, prompts, loaded, template=template))
            continue
        rewards = RewardSum([suite.reward], pool=pool)
        if ranks.is_rank_zero:
            check_golds(rewards, problems)
        sampling = Sampling(
            temperature=config.eval.temperature,
            stop=tuple(suite.stop),
            max_new_tokens=config.eval.max_new_tokens or suite.max_new_tokens,
        )
        scorer = rewards if ranks.size == 1 else ShardedScorer(rewards, ranks)
        eval_sets.append(EvalSet(name=suite.name, prompts=prompts, scorer=scorer, sampling=sampling))
    hashes = {f"eval.{run_suite.suite.name}": data_hash(run_suite.problems) for run_suite in suites}
    return SuiteSets(eval_sets=eval_sets, choice_sets=choice_sets, counts=counts, hashes=hashes)
