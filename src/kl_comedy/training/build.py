"""From a config to its KL terms, its tags and its problems; every mistake that needs no model is raised here."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kl_comedy.config import AlgorithmConfig, Config
from kl_comedy.config.combinations import sampler_of, updates_from_a_batch
from kl_comedy.config.schema import SHARDED, SuiteConfig, TeacherConfig, ValueConfig
from kl_comedy.config.validate import parse_record
from kl_comedy.data import RenderReport, data_hash, decontaminate, load_problems, render
from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.evaluation import EvalSet, get_suite
from kl_comedy.evaluation.likelihood import ChoiceSet, tokenize_choices
from kl_comedy.evaluation.records import check_golds
from kl_comedy.evaluation.suites import resolve_template, suite_problems, suite_prompts
from kl_comedy.kl import KLTerm, resolve_terms, term_warnings
from kl_comedy.kl.term import REFERENCES
from kl_comedy.models import LoadedModel
from kl_comedy.models.load import check_source, pick_device
from kl_comedy.objective import PolicyTerm, check_policy_term
from kl_comedy.records import Problem, Prompt
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rewards import RewardPool, RewardSum, check_options
from kl_comedy.rollouts import Sampling, check_training_sampling
from kl_comedy.tracking.loggers import check_loggers
from kl_comedy.tracking.store import check_uri
from kl_comedy.training.distributed import SINGLE_PROCESS, Ranks
from kl_comedy.training.loss import uses_critic
from kl_comedy.training.models import teacher_errors
from kl_comedy.training.sampling import ShardedScorer

log = logging.getLogger("kl_comedy")

Pool = RewardPool | None
_UNUSED_BY_DPO = "reward_weight advantage value policy_loss policy_loss_options correction proximal reduction"
_UNUSED_BY_DPO += " reduction_constant"


# --- KL terms and algorithm -------------------------------------------------------------------------------------------


TRAINER_ARGUMENTS = {
    "accelerator": "model.device",
    "accumulate_grad_batches": "train.microbatch_tokens",
    "callbacks": "callbacks",
    "default_root_dir": "output",
    "deterministic": "train.deterministic",
    "devices": "train.devices",
    "enable_checkpointing": "train.checkpoint_every",
    "gradient_clip_algorithm": "optimizer.clip_norm",
    "gradient_clip_val": "optimizer.clip_norm",
    "logger": "tracking",
    **dict.fromkeys(("max_epochs", "max_steps", "min_epochs", "min_steps"), "train.steps"),
    "num_nodes": "train.nodes",
    "num_sanity_val_steps": "eval.at_start",
    "precision": "train.precision",
    "reload_dataloaders_every_n_epochs": "rollout",
    "strategy": "train.strategy",
    "use_distributed_sampler": "train.strategy",
}
"""Arguments of Lightning's Trainer that ``trainer`` may not name, and the config key that sets each."""


def check_before_loading(config: Config) -> ProblemSets | None:
    """Raise :class:`UserError` for every mistake that shows without the model, on the machine that would train.

    What a command calls before the imports that take seconds. Warnings come with :func:`check_training`. Returns the
    problems, unless several processes train, each of which loads them.
    """
    check_training(config, warn=False)
    check_parts(config)
    check_trainer_arguments(config)
    if config.model.device == "cuda":
        pick_device("cuda")
    check_source(config.model)
    if config.reference.teacher is not None:
        with teacher_errors():
            check_source(config.reference.teacher.model(config.model))
    return load_problem_sets(config) if config.train.devices * config.train.nodes == 1 else None


def check_trainer_arguments(config: Config) -> None:
    """Raise :class:`UserError` for a name in ``trainer`` that Lightning's Trainer does not take or a config key sets.

    The names are read in Lightning's source: its import takes some seconds.
    """
    if not config.trainer:
        return
    (package,) = importlib.util.find_spec("lightning").submodule_search_locations
    module = ast.parse(Path(package, "pytorch", "trainer", "trainer.py").read_text(encoding="utf-8"))
    definitions = (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    allowed = {argument.arg for node in definitions for argument in node.args.kwonlyargs} - set(TRAINER_ARGUMENTS)
    for name, value in config.trainer.items():
        if name in TRAINER_ARGUMENTS:
            raise UserError(f"trainer.{name}: got {value!r}; {TRAINER_ARGUMENTS[name]} sets this argument")
        if name not in allowed:
            raise unknown_key(f"trainer.{name}", value, sorted(allowed), "an argument of lightning.Trainer")


def check_parts(config: Config) -> None:
    """Raise :class:`UserError` for options of the sampler and the rewards, and for an address of the store."""
    options = ROLLOUTS.get(sampler_of(config)).facts.get("options")
    if options is not None:
        parse_record(options, config.rollout.options, key="rollout.options")
    for position, reward in enumerate(config.rewards):
        check_options(reward.name, reward.options, key=f"rewards.{position}")
    check_uri(config.tracking.uri)
    check_loggers(config.tracking.loggers)


def check_training(config: Config, *, warn: bool = True) -> tuple[KLTerm, ...]:
    """The KL terms; warns where one optimizes something else than its value suggests.

    Raises :class:`UserError` for settings of terms, sampling and algorithm that cannot train.
    """
    algorithm, group_size = config.algorithm, config.rollout.group_size
    if config.model.dtype != "float32" and config.model.lora is None:
        why = f"updates are smaller than the rounding of {config.model.dtype} weights, which would not move; set "
        why += "train.precision=bf16 (float32 weights, products in bfloat16), or model.lora to train an adapter"
        raise bad_value("model.dtype", config.model.dtype, "float32 where all weights are trained", why)
    terms = resolve_terms(config.kl)
    check_training_sampling(config.rollout)
    check_policy_term(PolicyTerm.of(algorithm))
    critic = uses_critic(algorithm)
    if not critic and algorithm.value != ValueConfig():
        raise UserError(
            f"algorithm.value: {algorithm.advantage} has no value function, so these settings would do nothing; "
            "remove them or set algorithm.advantage=gae"
        )
    _check_references(config, terms)
    for position, term in enumerate(terms):
        if term.baseline == "own" and group_size < 2:
            allowed = "before or after with rollout.group_size 1 (own compares a group)"
            raise bad_value(f"kl.{position}.baseline", "own", allowed)
        if critic and term.baseline == "before" and term.credit == "own":
            reason = "gae itself gives later costs to earlier tokens"
            raise bad_value(f"kl.{position}.credit", "own", "to_go or total", reason)
        for line in term_warnings(term, off_policy=is_off_policy(config)) if warn else ():
            log.warning(line)
    if warn and config.lag.mode == "async" and config.lag.max_steps == 0:
        log.warning("lag.max_steps is 0: with lag.mode=async the sampler waits for every update; 1 or more overlaps")
    if algorithm.dpo is None:
        return terms
    for name in _UNUSED_BY_DPO.split():
        if getattr(algorithm, name) != getattr(AlgorithmConfig(), name):
            raise UserError(
                f"algorithm.{name}: algorithm.dpo takes the place of the policy term, so this would do nothing; "
                "remove one of the two"
            )
    if config.optimizer.ess_scaling != "none":
        why = "algorithm.dpo has no importance weights"
        raise bad_value("optimizer.ess_scaling", config.optimizer.ess_scaling, "none", why)
    if terms:
        raise UserError(
            f"kl: got {len(terms)} term(s); with algorithm.dpo it must be [] (its strength is algorithm.dpo.beta)"
        )
    if group_size < 2:
        raise bad_value("rollout.group_size", group_size, "at least 2", "algorithm.dpo compares a prompt's completions")
    return terms


def _check_references(config: Config, terms: Sequence[KLTerm]) -> None:
    """Raise :class:`UserError` where a term names a teacher that is not there, and for settings that no term uses."""
    settings = config.reference
    if settings.max_kl is not None and not any(term.reference == "periodic" for term in terms):
        raise UserError("reference.max_kl: no KL term has reference: periodic, so this would do nothing; remove it")
    if settings.period is None and settings.max_kl is None:
        why = "the periodic reference would never move, which is reference: initial"
        raise bad_value("reference.period", None, "a number of updates, or null with reference.max_kl", why)
    teacher, named = config.reference.teacher, [n for n, term in enumerate(terms) if term.reference == "teacher"]
    if named and teacher is None:
        why = "reference.teacher names no model; set reference.teacher.source"
        raise bad_value(f"kl.{named[0]}.reference", "teacher", [n for n in REFERENCES if n != "teacher"], why)
    if teacher is None:
        return
    if not named:
        raise UserError(
            "reference.teacher: no KL term has reference: teacher, so this model would do nothing; remove it or name it"
        )
    if teacher.url is not None:
        _check_served_teacher(config, teacher, {n: terms[n] for n in named})
    if teacher.adapter is not None and config.train.strategy in SHARDED:
        why = "a teacher in shards is read from its files; name the merged policy of the LoRA run in source"
        raise bad_value("reference.teacher.adapter", teacher.adapter, f"null with {config.train.strategy}", why)


def _check_served_teacher(config: Config, teacher: TeacherConfig, terms: Mapping[int, KLTerm]) -> None:
    """Raise :class:`UserError` where a term needs more than a server gives, and for settings that it has not heard."""
    unused = TeacherConfig()
    for name in ("adapter", "gguf_file", "dtype", "trust_remote_code", "options"):
        if getattr(teacher, name) != getattr(unused, name):
            why = "the server at reference.teacher.url has loaded its model"
            raise bad_value(f"reference.teacher.{name}", getattr(teacher, name), str(getattr(unused, name)), why)
    if config.rollout.temperature != 1:
        why = "a server gives a prompt's log-probs at temperature 1"
        raise bad_value("rollout.temperature", config.rollout.temperature, "1 with reference.teacher.url", why)
    for position, term in terms.items():
        needs_all = term.reads - {"log_ratio", "top_k"} - ({"certainty"} if term.weight == "policy" else set())
        if needs_all or (term.top is not None and term.top[1] != "reference"):
            why = f"{term.label()} reads the teacher's probability of every token" if needs_all else ""
            why = why or "only the teacher's likeliest tokens are known, not its log-probs of the policy's"
            allowed = "k1, k2, k3 and the like, or top_k with options.tokens: reference, with reference.teacher.url"
            raise bad_value(f"kl.{position}", term.estimator, allowed, why)


def is_off_policy(config: Config) -> bool:
    """Whether any update uses samples of other weights than its own."""
    lag, several = config.lag, updates_from_a_batch(config) > 1
    return lag.steps > 0 or lag.max_steps > 0 or several or config.rollout.backend == "replay"


def kl_label(terms: Sequence[KLTerm]) -> str:
    """The name of a KL configuration in tables: the coefficient and the label of each term."""
    label = " + ".join(f"{term.beta if isinstance(term.beta, float) else 'scheduled'} {term.label()}" for term in terms)
    return label or "no KL"


def term_tags(config: Config, terms: Sequence[KLTerm]) -> dict[str, str]:
    """A run's tags for its KL configuration: a label for tables, and its certificates by enumeration.

    ``kl.*`` is the certificate of the whole list in the run's regime, ``kl.N.*`` that of each term alone; bias, cosine
    and variance are against the sequence-level reverse KL. Warns where a declared claim does not hold.
    """
    from kl_comedy.kl.oracle.certificate import certify

    regime = "mixed" if config.lag.in_flight else "off_policy" if is_off_policy(config) else "on_policy"
    tags = {"kl.label": kl_label(terms), "kl.regime": regime}
    lists = {"kl": tuple(terms), **{f"kl.{position}": (term,) for position, term in enumerate(terms)}}
    for name, listed in lists.items():
        (certificate,) = certify(name, listed, regimes=(regime,))
        target = certificate.target or "none"
        figures = {"strength": certificate.strength, "variance": certificate.variance}
        figures |= {key: getattr(certificate, key)["sequence_reverse"] for key in ("relative_bias", "cosine")}
        tags |= {f"{name}.verdict": f"{target}: {certificate.verdict}", f"{name}.target": target}
        tags |= {f"{name}.{figure}": _without_rounding(value) for figure, value in figures.items()}
        repeated = name == "kl" and len(terms) == 1
        if not certificate.claim_holds and not repeated and any(term.beta != 0.0 for term in listed):
            claim = f"{kl_label(listed)} claims {certificate.claimed} {regime.replace('_', '-')}"
            log.warning(f"{name}: {claim}, and the enumeration says: {certificate.verdict}")
    return tags


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
    """Load every set, and remove from training what an evaluation set holds too.

    Raises :class:`UserError` for errors in the data, and for a suite named like a set or another suite.
    """
    data = config.data
    test: dict[str, Any] = {"training": False, "allow_test_split": True}
    evals = {name: load_problems(item, key=f"data.eval.{name}", **test) for name, item in data.eval.items()}
    if not train:
        return ProblemSets(train=[], evals=evals)
    root = None if config.eval.data_root is None else Path(config.eval.data_root)
    suites: list[tuple[SuiteConfig, Sequence[Problem]]] = []
    held_out: dict[str, Sequence[Problem]] = dict(evals)
    for name in config.eval.suites:
        suite = get_suite(name, key="eval.suites")
        if suite.name in held_out:
            raise bad_value("eval.suites", name, "names that neither data.eval nor another suite has")
        asked = suite_problems(suite, root=root)
        suites.append((suite, asked))
        held_out[suite.name] = [dataclasses.replace(p, text=p.meta.get("question", p.text)) for p in asked]
    problems = load_problems(data.train, key="data.train", training=True, allow_test_split=data.allow_test_split)
    removed: Mapping[str, int] = {}
    if data.decontaminate:
        problems, removed = decontaminate(problems, held_out)
    counts = {f"decontaminated.{name}": count for name, count in removed.items()}
    return ProblemSets(train=problems, evals=evals, suites=suites, counts=counts)


def render_prompts(
    config: Config, problems: ProblemSets, loaded: LoadedModel, *, pool: Pool = None, ranks: Ranks = SINGLE_PROCESS
) -> PromptSets:
    """Problems to prompts, filtered by length; counts and hashes of each set. The suites' verifiers run in ``pool``.

    Raises :class:`UserError` where a suite's verifier rejects its answers, or the tokenizer cannot encode its choices.
    """
    counts = dict(problems.counts)
    sets = {f"eval.{name}": each for name, each in problems.evals.items()}
    if problems.train:
        sets["train"] = problems.train
    prompts: dict[str, Sequence[Prompt]] = {}

    def count(name: str, report: RenderReport) -> None:
        counts[f"{name}.kept"] = report.rendered
        counts[f"{name}.too_long"], counts[f"{name}.control_tokens"] = report.too_long, report.control_tokens

    for name, each in sets.items():
        prompts[name], report = render(each, config.data.prompt, loaded.tokenizer)
        count(name, report)
    evals = [EvalSet(name=name, prompts=prompts[f"eval.{name}"]) for name in problems.evals]
    choice_sets: list[ChoiceSet] = []
    for suite, each in problems.suites:
        rendered, report = suite_prompts(suite, each, loaded.tokenizer)
        sets[f"eval.{suite.name}"] = each
        count(f"eval.{suite.name}", report)
        if suite.kind == "likelihood":
            template = resolve_template(suite, loaded.tokenizer)
            choice_sets.append(tokenize_choices(suite, rendered, loaded, template=template))
        else:
            verifier = RewardSum([suite.reward], pool=pool)
            if ranks.is_rank_zero:
                check_golds(verifier, each)
            scorer = verifier if ranks.size == 1 else ShardedScorer(verifier, ranks)
            sampling = eval_sampling(config, suite)
            evals.append(EvalSet(name=suite.name, prompts=rendered, scorer=scorer, sampling=sampling))
    hashes = {name: data_hash(each) for name, each in sets.items()}
    train = prompts.get("train", ())
    return PromptSets(train=train, evals=evals, choice_sets=choice_sets, counts=counts, hashes=hashes)


def eval_sampling(config: Config, suite: SuiteConfig | None = None) -> Sampling:
    """How completions are drawn in evaluation; a suite has stop strings and a length of its own."""
    settings = suite or config.rollout
    tokens = config.eval.max_new_tokens or settings.max_new_tokens
    return Sampling(temperature=config.eval.temperature, max_new_tokens=tokens, stop=tuple(settings.stop))
