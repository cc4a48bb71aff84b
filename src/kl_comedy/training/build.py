"""Config -> the objects of a run. Every mistake in the config surfaces here, before anything is trained.

Which sampler a run has, and where its batches come from: the config's ``lag`` and ``rollout.backend`` decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.config import Config
from kl_comedy.config.combinations import capabilities_of
from kl_comedy.data import PromptOrder, data_hash, decontaminate, load_problems, render
from kl_comedy.errors import bad_value
from kl_comedy.evaluation import EvalSet
from kl_comedy.evaluation.evaluate import ChoiceSet
from kl_comedy.kl import KLTerm, resolve_terms, term_warnings
from kl_comedy.models import LoadedModel
from kl_comedy.models.introspection import head_chunk
from kl_comedy.models.reference import Reference, build_reference
from kl_comedy.objective import PolicyTerm
from kl_comedy.records import Problem, Prompt, Rollout
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import RolloutBackend, Sampling, check_training_sampling, sampling_from
from kl_comedy.training.asynchronous.sampler import Asynchronous, SamplerProcess
from kl_comedy.training.critic import check_algorithm
from kl_comedy.training.distributed import ALONE, DividedScorer, World, build_backend, load_policy
from kl_comedy.training.dpo import check_dpo
from kl_comedy.training.eval_metrics import RunSuite, load_suites, suite_sets
from kl_comedy.training.experience import DrawnHere, ExperienceStream, Recorded, Scorer, Source, StreamShape

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.certificate import Certificate


log = logging.getLogger("kl_comedy")


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Training prompts and evaluation sets (``compared``: by log-prob), with what was dropped on the way."""

    train: Sequence[Prompt]
    evals: Sequence[EvalSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]
    compared: Sequence[ChoiceSet] = ()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a run is made of."""

    config: Config
    terms: tuple[KLTerm, ...]
    loaded: LoadedModel
    references: Mapping[str, Reference]
    problems: Problems
    backend: RolloutBackend
    scorer: Scorer
    rewards: RewardSum
    world: World = ALONE

    def close(self) -> None:
        """Stop worker processes and the sampler."""
        self.rewards.close()
        self.backend.close()


def check_terms(config: Config) -> tuple[KLTerm, ...]:
    """Build the KL terms and say what they descend; warns where that is not what their value suggests."""
    terms = resolve_terms(config.kl)
    for position, term in enumerate(terms):
        if term.baseline == "own" and config.rollout.group_size < 2:
            raise bad_value(
                f"kl.{position}.baseline", "own", "before or after with rollout.group_size 1 (own compares a group)"
            )
        for line in term_warnings(term, off_policy=is_off_policy(config)):
            log.warning(line)
    return terms


def is_off_policy(config: Config) -> bool:
    """Whether any update uses samples of other weights than its own."""
    several = config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch > 1
    return config.lag.steps > 0 or config.lag.max_steps > 0 or several or config.rollout.backend == "replay"


def kl_label(terms: Sequence[KLTerm]) -> str:
    """The name of a KL configuration in tables: the coefficient and the label of each term."""
    label = " + ".join(f"{term.beta if isinstance(term.beta, float) else 'scheduled'} {term.label()}" for term in terms)
    return label or "no KL"


def term_tags(config: Config, terms: Sequence[KLTerm]) -> dict[str, str]:
    """What a run says about its KL configuration: a label for tables, and its certificates by enumeration.

    ``kl.*`` is the certificate of the whole list in the run's regime, ``kl.N.*`` that of each term alone.
    What claims more than it keeps is a warning.
    """
    from kl_comedy.kl.oracle.certificate import certify

    regime = "mixed" if config.lag.in_flight else "off_policy" if is_off_policy(config) else "on_policy"
    lists = {"kl": tuple(terms), **{f"kl.{position}": (term,) for position, term in enumerate(terms)}}
    tags = {"kl.label": kl_label(terms), "kl.regime": regime}
    for name, listed in lists.items():
        (found,) = certify(name, listed, regimes=(regime,))
        tags |= {f"{name}.{fact}": value for fact, value in _certified(found).items()}
        if not found.claim_holds:
            log.warning(
                f"{name}: {kl_label(listed)} claims {found.claimed} {regime.replace('_', '-')}, and the enumeration "
                f"says: {found.verdict}"
            )
    return tags


def policy_tags(config: Config) -> dict[str, str]:
    """What a run says about its policy term: a label, and its certificate against the reward gradient in its regime."""
    from kl_comedy.kl.oracle.policy_certificate import certify_policy

    if config.algorithm.dpo is not None:
        return {"policy.label": f"dpo, beta {config.algorithm.dpo.beta:g}"}
    term = PolicyTerm.of(config.algorithm)
    regime = "off_policy" if is_off_policy(config) else "on_policy"
    (found,) = certify_policy("policy", term, regimes=(regime,))
    return {
        "policy.label": term.label(),
        "policy.verdict": found.verdict,
        "policy.relative_bias": f"{0.0 if found.relative_bias < 1e-9 else found.relative_bias:.4g}",
        "policy.cosine": f"{found.cosine:.4g}",
    }


def _certified(found: Certificate) -> dict[str, str]:
    """A certificate as tags; bias, cosine and variance are against the sequence-level reverse KL, rounding left out."""
    figures = {
        "relative_bias": found.relative_bias["sequence_reverse"],
        "cosine": found.cosine["sequence_reverse"],
        "strength": found.strength,
        "variance": found.variance,
    }
    shown = {name: f"{0.0 if abs(value) < 1e-9 else value:.4g}" for name, value in figures.items()}
    return {"verdict": f"{found.target or 'none'}: {found.verdict}", "target": found.target or "none", **shown}


def build(config: Config, world: World = ALONE) -> Parts:
    """Build every part. Raises :class:`UserError` for a mistake in the config, on every process of ``world`` alike."""
    terms = check_terms(config)
    check_training_sampling(config.rollout)
    check_algorithm(config.algorithm, terms)
    check_dpo(config.algorithm, terms, config.rollout.group_size)
    raw = world.together(lambda: load_raw(config))
    rewards = RewardSum(config.rewards)
    world.together(lambda: _check_golds(rewards, raw) if world.first else None)
    loaded = load_policy(config, world)
    parts = Parts(
        config=config,
        terms=terms,
        loaded=loaded,
        references=_references(config, terms, loaded),
        problems=world.together(lambda: _enough(_with_suites(config, raw, loaded, rewards, world), config, world)),
        backend=backend_for(config, loaded, world),
        scorer=rewards if world.size == 1 else DividedScorer(rewards, world),
        rewards=rewards,
        world=world,
    )
    if capabilities_of(config.rollout.backend).recorded:
        parts.backend.bind(
            parts.problems.train,
            weights={part.label: part.weight for part in rewards.parts},
            updates=config.train.steps,
            per_batch=config.algorithm.updates_per_batch * config.algorithm.epochs_per_batch,
        )
    return parts


def _enough(problems: Problems, config: Config, world: World) -> Problems:
    """Over several processes a batch must hold no prompt twice: both would be drawn with the same random numbers."""
    if world.size > 1 and len(problems.train) < config.rollout.prompts_per_batch:
        raise bad_value(
            "rollout.prompts_per_batch",
            config.rollout.prompts_per_batch,
            f"at most the {len(problems.train)} training prompts with more than one process",
        )
    return problems


def _with_suites(config: Config, raw: RawProblems, loaded: LoadedModel, rewards: RewardSum, world: World) -> Problems:
    """The run's sets and those of its suites, which share the workers of its rewards."""
    own = render_all(config, raw, loaded)
    found = suite_sets(config, raw.suites, loaded, pool=rewards.pool, world=world)
    return Problems(
        train=own.train,
        evals=[*own.evals, *found.drawn],
        compared=found.compared,
        counts={**own.counts, **found.counts},
        hashes={**own.hashes, **found.hashes},
    )


GOLDS_CHECKED = 256
"""Answers per set that the rewards must be able to judge before a run begins: evenly spaced, a few seconds."""


def _check_golds(scorer: RewardSum, raw: RawProblems) -> None:
    """Raise :class:`UserError` naming problems whose answers the rewards cannot judge."""
    for problems in (raw.train, *raw.evals.values()):
        stride = max(len(problems) // GOLDS_CHECKED, 1)
        scorer.check(problems[::stride])


@dataclass(frozen=True, kw_only=True)
class RawProblems:
    """Problems before the tokenizer: loaded and decontaminated, with what was removed; suites in training only."""

    train: Sequence[Problem]
    evals: Mapping[str, Sequence[Problem]]
    counts: Mapping[str, int]
    suites: Sequence[RunSuite] = ()


def load_raw(config: Config, *, train: bool = True) -> RawProblems:
    """Load every set, and remove from training what an evaluation set holds too."""
    data = config.data
    evals = {
        name: load_problems(item, key=f"data.eval.{name}", training=False, allow_test_split=True)
        for name, item in data.eval.items()
    }
    problems: Sequence[Problem] = []
    removed: Mapping[str, int] = {}
    suites = load_suites(config) if train else []
    if train:
        problems = load_problems(data.train, key="data.train", training=True, allow_test_split=data.allow_test_split)
        if data.decontaminate:
            problems, removed = decontaminate(problems, evals | {one.suite.name: one.unrendered() for one in suites})
    return RawProblems(
        train=problems,
        evals=evals,
        suites=suites,
        counts={f"decontaminated.{name}": count for name, count in removed.items()},
    )


def render_all(config: Config, raw: RawProblems, loaded: LoadedModel) -> Problems:
    """Problems to prompts, filtered by length; counts and hashes of each set."""
    counts = dict(raw.counts)

    def rendered(name: str, problems: Sequence[Problem]) -> Sequence[Prompt]:
        prompts, report = render(problems, config.data.prompt, loaded.tokenizer)
        counts.update(
            {
                f"{name}.kept": report.kept,
                f"{name}.too_long": report.too_long,
                f"{name}.control_tokens": report.control_tokens,
            }
        )
        return prompts

    sets = {f"eval.{name}": problems for name, problems in raw.evals.items()}
    if raw.train:
        sets["train"] = raw.train
    prompts = {name: rendered(name, problems) for name, problems in sets.items()}
    return Problems(
        train=prompts.get("train", ()),
        evals=[EvalSet(name=name, prompts=prompts[f"eval.{name}"]) for name in raw.evals],
        counts=counts,
        hashes={name: data_hash(problems) for name, problems in sets.items()},
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(
        temperature=config.eval.temperature,
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        stop=tuple(config.rollout.stop),
    )


def _references(config: Config, terms: Sequence[KLTerm], loaded: LoadedModel) -> dict[str, Reference]:
    """The initial reference always (what KL is reported against), moving ones where a term names them."""
    names = ["initial", *sorted({term.reference for term in terms} - {"initial", "sampler"})]
    shared = {
        "temperature": config.rollout.temperature,
        "chunk_elements": head_chunk(config.model.head_chunk_elements, loaded.device),
        "keep_hidden": True,
        "share_prompt": config.model.share_prompt,
    }
    return {name: build_reference(name, loaded, config.reference, **shared) for name in names}


def backend_for(config: Config, loaded: LoadedModel, world: World) -> RolloutBackend:
    """The sampler: in this process, divided over the run's processes, or with ``lag.mode: async`` in one of its own."""
    if config.lag.mode == "async":
        return SamplerProcess(config, loaded)
    return build_backend(config, loaded, world)


def stream_for(parts: Parts, context: Callable[[], AbstractContextManager[Any]]) -> ExperienceStream:
    """The updates of a run; ``context`` is the trainer's precision, under which its own sampler draws."""
    config = parts.config
    shape = StreamShape(
        updates=config.train.steps,
        updates_per_batch=config.algorithm.updates_per_batch,
        epochs_per_batch=config.algorithm.epochs_per_batch,
        seed=config.seed,
    )
    return ExperienceStream(shape, prompts=parts.problems.train, source=_source(parts, shape, context))


def _source(parts: Parts, shape: StreamShape, context: Callable[[], AbstractContextManager[Any]]) -> Source:
    config, prompts = parts.config, parts.problems.train
    indices = PromptOrder(len(prompts), config.rollout.prompts_per_batch, config.seed).indices
    if config.lag.mode == "async":
        return Asynchronous(config, shape, prompts=prompts, indices=indices, sampler=parts.backend)
    if capabilities_of(config.rollout.backend).recorded:
        return Recorded(parts.backend, parts.scorer)
    sampling, group_size = sampling_from(config.rollout), config.rollout.group_size

    def generate(prompts: Sequence[Prompt], *, seed: int) -> list[Rollout]:
        return parts.backend.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)

    return DrawnHere(
        shape,
        lag=config.lag.steps // shape.per_iteration,
        prompts=prompts,
        indices=indices,
        generate=generate,
        scorer=parts.scorer,
        context=context,
    )
