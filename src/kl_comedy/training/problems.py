"""The problems of a run: loaded, decontaminated, and rendered as prompts of the policy's tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kl_comedy.config import Config
from kl_comedy.config.schema import DatasetConfig, SuiteConfig
from kl_comedy.data import (
    RenderReport,
    check_dataset,
    data_hash,
    decontaminate,
    is_on_this_machine,
    load_problems,
    render,
)
from kl_comedy.errors import bad_value
from kl_comedy.evaluation import EvalSet, get_suite
from kl_comedy.evaluation.likelihood import ChoiceSet, tokenize_choices
from kl_comedy.evaluation.records import check_golds
from kl_comedy.evaluation.suites import asked, published_problems, resolve_template, suite_prompts
from kl_comedy.models import LoadedModel
from kl_comedy.records import Problem, Prompt
from kl_comedy.rewards import RewardPool, RewardSum, Scorer
from kl_comedy.rollouts import Sampling
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.sampling import ShardedScorer


@dataclass(frozen=True, kw_only=True)
class ProblemSets:
    """Problems before the tokenizer, decontaminated, with counts of what was removed; ``suites`` in training only."""

    train: Sequence[Problem]
    evals: Mapping[str, Sequence[Problem]]
    suites: Sequence[tuple[SuiteConfig, Sequence[Problem]]] = ()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """Training prompts and evaluation sets (``choice_sets``: by log-prob), counts of dropped problems, and hashes."""

    train: Sequence[Prompt]
    evals: Sequence[EvalSet]
    choice_sets: Sequence[ChoiceSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]


def load_problem_sets(config: Config, *, train: bool = True) -> ProblemSets:
    """Load every set, and remove from training the problems that an evaluation set has too.

    ``train=False``: only the sets of ``data.eval``, for an evaluation. Raises :class:`UserError` for errors in the
    data, and for a suite named like a set or another suite.
    """
    data = config.data
    evals: dict[str, Sequence[Problem]] = {}
    # An evaluation set may be a test split; a training set only where the config allows it.
    for name, dataset in data.eval.items():
        evals[name] = load_problems(dataset, key=f"data.eval.{name}", training=False, allow_test_split=True)
    if not train:
        return ProblemSets(train=[], evals=evals)

    published = _load_suites(config, taken_names=set(evals))
    suites = [(suite, [asked(problem, suite) for problem in problems]) for suite, problems in published]
    problems = load_problems(data.train, key="data.train", training=True, allow_test_split=data.allow_test_split)
    counts: dict[str, int] = {}
    # After the suites are loaded, because what they ask is removed from training too.
    if data.decontaminate:
        # As they were published: a suite may wrap the question in instructions, and what training must not contain is
        # the question itself.
        held_out = {**evals, **{suite.name: questions for suite, questions in published}}
        problems, removed = decontaminate(problems, held_out)
        counts = {f"decontaminated.{name}": count for name, count in removed.items()}
    return ProblemSets(train=problems, evals=evals, suites=suites, counts=counts)


def check_problem_sets(config: Config, *, here: bool) -> None:
    """Raise :class:`UserError` for data that :func:`load_problem_sets` would refuse; nothing is downloaded.

    ``here``: this machine would load them, so that what is on it is read. What a plugin or the hub holds is not.
    """
    data = config.data
    sets: dict[str, DatasetConfig] = {f"data.eval.{name}": dataset for name, dataset in data.eval.items()}
    sets["data.train"] = data.train
    for key, dataset in sets.items():
        training = key == "data.train"
        check_dataset(dataset, key=key, training=training, allow_test_split=not training or data.allow_test_split)
    for name in config.eval.suites:
        get_suite(name, key="eval.suites")
    if not here:
        return
    are_here = {key: is_on_this_machine(dataset) for key, dataset in sets.items()}
    if all(are_here.values()) and not config.eval.suites:
        load_problem_sets(config)
        return
    for key, dataset in sets.items():
        if are_here[key]:
            load_problems(dataset, key=key, training=False, allow_test_split=True)


def _load_suites(config: Config, taken_names: set[str]) -> list[tuple[SuiteConfig, Sequence[Problem]]]:
    """The suites of the config and their problems, as these were published."""
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    suites: list[tuple[SuiteConfig, Sequence[Problem]]] = []
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        # Metrics are eval/NAME/..., so that two of one name would overwrite each other.
        if suite.name in taken_names:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        taken_names.add(suite.name)
        # Now, before a model is loaded: files may be missing or of another version.
        suites.append((suite, published_problems(suite, root=root)))
    return suites


def render_prompts(
    config: Config,
    problems: ProblemSets,
    loaded: LoadedModel,
    *,
    pool: RewardPool | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> PromptSets:
    """Problems to prompts, filtered by length; counts and hashes of each set. The suites' verifiers run in ``pool``.

    Raises :class:`UserError` where a suite's verifier rejects its answers, or the tokenizer cannot encode its choices.
    """
    counts = dict(problems.counts)
    hashes: dict[str, str] = {}

    evals: list[EvalSet] = []
    for name, dataset in problems.evals.items():
        prompts, report = render(dataset, config.data.prompt, loaded.tokenizer)
        evals.append(EvalSet(name=name, prompts=prompts))
        counts |= _render_counts(f"eval.{name}", report)
        hashes[f"eval.{name}"] = data_hash(dataset)

    train: Sequence[Prompt] = ()
    if problems.train:
        train, report = render(problems.train, config.data.prompt, loaded.tokenizer)
        counts |= _render_counts("train", report)
        # The problems are hashed and not the prompts: a template is part of the config, the data is not.
        hashes["train"] = data_hash(problems.train)

    choice_sets: list[ChoiceSet] = []
    for suite, suite_problems in problems.suites:
        prompts, report = suite_prompts(suite, suite_problems, loaded.tokenizer)
        counts |= _render_counts(f"eval.{suite.name}", report)
        hashes[f"eval.{suite.name}"] = data_hash(suite_problems)
        if suite.kind == "likelihood":
            template = resolve_template(suite, loaded.tokenizer)
            # Scored by likelihood, without sampling.
            choice_sets.append(tokenize_choices(suite, prompts, loaded, template=template))
        else:
            scorer = _suite_scorer(suite, suite_problems, pool, ranks)
            sampling = eval_sampling(config, suite)
            evals.append(EvalSet(name=suite.name, prompts=prompts, scorer=scorer, sampling=sampling))
    return PromptSets(train=train, evals=evals, choice_sets=choice_sets, counts=counts, hashes=hashes)


def _render_counts(name: str, report: RenderReport) -> dict[str, int]:
    """Tags of stored runs have these names."""
    return {
        f"{name}.kept": report.rendered,
        f"{name}.too_long": report.too_long,
        f"{name}.control_tokens": report.control_tokens,
    }


def _suite_scorer(suite: SuiteConfig, problems: Sequence[Problem], pool: RewardPool | None, ranks: Ranks) -> Scorer:
    """The suite's verifier, once it has accepted the suite's own answers."""
    verifier = RewardSum([suite.reward], pool=pool)
    if ranks.is_rank_zero:  # the answers are the same on every rank
        check_golds(verifier, problems)
    if ranks.size == 1:
        return verifier
    return ShardedScorer(verifier, ranks)


def eval_sampling(config: Config, suite: SuiteConfig | None = None) -> Sampling:
    """How completions are drawn in evaluation; a suite has stop strings and a length of its own."""
    settings = suite or config.rollout
    truncation = config.eval.sampling
    return Sampling(
        temperature=config.eval.temperature,
        max_new_tokens=config.eval.max_new_tokens or settings.max_new_tokens,
        top_p=truncation.top_p,
        top_k=truncation.top_k,
        min_p=truncation.min_p,
        stop=tuple(settings.stop),
    )
