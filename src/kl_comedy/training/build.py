"""From a config to its KL terms, its tags and its problems; every mistake that needs no model is raised here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kl_comedy.config import Config
from kl_comedy.data import data_hash, decontaminate, load_problems, render
from kl_comedy.errors import bad_value
from kl_comedy.evaluation import EvalSet
from kl_comedy.evaluation.likelihood import ChoiceSet
from kl_comedy.evaluation.records import check_golds
from kl_comedy.kl import KLTerm, resolve_terms, term_warnings
from kl_comedy.models import LoadedModel
from kl_comedy.objective import PolicyTerm
from kl_comedy.records import Problem, Prompt
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import Sampling, check_training_sampling
from kl_comedy.training.critic import check_algorithm
from kl_comedy.training.dpo import check_dpo
from kl_comedy.training.eval_metrics import RunSuite, load_suites

if TYPE_CHECKING:
    from kl_comedy.kl.oracle.certificate import Certificate

log = logging.getLogger("kl_comedy")


# --- KL terms ---------------------------------------------------------------------------------------------------------


def check_terms(config: Config) -> tuple[KLTerm, ...]:
    """Build the KL terms; warns where one optimizes something else than its value suggests."""
    terms = resolve_terms(config.kl)
    for position, term in enumerate(terms):
        if term.baseline == "own" and config.rollout.group_size < 2:
            raise bad_value(
                f"kl.{position}.baseline", "own", "before or after with rollout.group_size 1 (own compares a group)"
            )
        for line in term_warnings(term, off_policy=is_off_policy(config)):
            log.warning(line)
    return terms


def check_training(config: Config) -> tuple[KLTerm, ...]:
    """The KL terms. Raises :class:`UserError` for settings of terms, sampling and algorithm that cannot train."""
    terms = check_terms(config)
    check_training_sampling(config.rollout)
    check_algorithm(config.algorithm, terms)
    check_dpo(config.algorithm, terms, config.rollout.group_size)
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
    """A run's tags for its KL configuration: a label for tables, and its certificates by enumeration.

    ``kl.*`` is the certificate of the whole list in the run's regime, ``kl.N.*`` that of each term alone. Warns where
    a declared claim does not hold.
    """
    from kl_comedy.kl.oracle.certificate import certify

    regime = "mixed" if config.lag.in_flight else "off_policy" if is_off_policy(config) else "on_policy"
    lists = {"kl": tuple(terms), **{f"kl.{position}": (term,) for position, term in enumerate(terms)}}
    tags = {"kl.label": kl_label(terms), "kl.regime": regime}
    for name, listed in lists.items():
        (certificate,) = certify(name, listed, regimes=(regime,))
        tags |= {f"{name}.{fact}": value for fact, value in _certificate_tags(certificate).items()}
        if not certificate.claim_holds:
            log.warning(
                f"{name}: {kl_label(listed)} claims {certificate.claimed} {regime.replace('_', '-')}, and the "
                f"enumeration says: {certificate.verdict}"
            )
    return tags


def _certificate_tags(certificate: Certificate) -> dict[str, str]:
    """Bias, cosine and variance are against the sequence-level reverse KL, without rounding."""
    figures = {
        "relative_bias": certificate.relative_bias["sequence_reverse"],
        "cosine": certificate.cosine["sequence_reverse"],
        "strength": certificate.strength,
        "variance": certificate.variance,
    }
    target = certificate.target or "none"
    return {
        "verdict": f"{target}: {certificate.verdict}",
        "target": target,
        **{name: _without_rounding(value) for name, value in figures.items()},
    }


def policy_tags(config: Config) -> dict[str, str]:
    """A run's tags for its policy term: a label, and its certificate against the reward gradient in its regime."""
    from kl_comedy.kl.oracle.policy_certificate import certify_policy

    if config.algorithm.dpo is not None:
        return {"policy.label": f"dpo, beta {config.algorithm.dpo.beta:g}"}
    term = PolicyTerm.of(config.algorithm)
    regime = "off_policy" if is_off_policy(config) else "on_policy"
    (certificate,) = certify_policy("policy", term, regimes=(regime,))
    return {
        "policy.label": term.label(),
        "policy.verdict": certificate.verdict,
        "policy.relative_bias": _without_rounding(certificate.relative_bias),
        "policy.cosine": f"{certificate.cosine:.4g}",
    }


def _without_rounding(value: float) -> str:
    return f"{0.0 if abs(value) < 1e-9 else value:.4g}"


# --- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProblemSets:
    """Problems before the tokenizer: loaded and decontaminated, with what was removed; suites in training only."""

    train: Sequence[Problem]
    evals: Mapping[str, Sequence[Problem]]
    counts: Mapping[str, int]
    suites: Sequence[RunSuite] = ()


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """Training prompts and evaluation sets (``choice_sets``: by log-prob), counts of dropped problems, and hashes."""

    train: Sequence[Prompt]
    evals: Sequence[EvalSet]
    counts: Mapping[str, int]
    hashes: Mapping[str, str]
    choice_sets: Sequence[ChoiceSet] = ()


def load_problem_sets(config: Config, *, train: bool = True) -> ProblemSets:
    """Load every set, and remove from training what an evaluation set holds too."""
    data = config.data
    evals = {
        name: load_problems(item, key=f"data.eval.{name}", training=False, allow_test_split=True)
        for name, item in data.eval.items()
    }
    if not train:
        return ProblemSets(train=[], evals=evals, counts={})
    suites = load_suites(config)
    problems = load_problems(data.train, key="data.train", training=True, allow_test_split=data.allow_test_split)
    removed: Mapping[str, int] = {}
    if data.decontaminate:
        asked = evals | {each.suite.name: each.unrendered() for each in suites}
        problems, removed = decontaminate(problems, asked)
    counts = {f"decontaminated.{name}": count for name, count in removed.items()}
    return ProblemSets(train=problems, evals=evals, suites=suites, counts=counts)


def check_answers(rewards: RewardSum, problems: ProblemSets) -> None:
    """Raise :class:`UserError` naming problems whose answers the rewards cannot judge."""
    for each in (problems.train, *problems.evals.values()):
        check_golds(rewards, each)


def render_prompts(config: Config, problems: ProblemSets, loaded: LoadedModel) -> PromptSets:
    """Problems to prompts, filtered by length; counts and hashes of each set. Suites are left out."""
    counts = dict(problems.counts)
    sets = {f"eval.{name}": each for name, each in problems.evals.items()}
    if problems.train:
        sets["train"] = problems.train
    prompts: dict[str, Sequence[Prompt]] = {}
    for name, each in sets.items():
        prompts[name], report = render(each, config.data.prompt, loaded.tokenizer)
        counts |= {f"{name}.{key}": getattr(report, key) for key in ("kept", "too_long", "control_tokens")}
    return PromptSets(
        train=prompts.get("train", ()),
        evals=[EvalSet(name=name, prompts=prompts[f"eval.{name}"]) for name in problems.evals],
        counts=counts,
        hashes={name: data_hash(each) for name, each in sets.items()},
    )


def eval_sampling(config: Config) -> Sampling:
    """How completions are drawn in evaluation."""
    return Sampling(
        temperature=config.eval.temperature,
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        stop=tuple(config.rollout.stop),
    )
