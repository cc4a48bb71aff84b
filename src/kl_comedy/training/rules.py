"""Which settings of terms, references and algorithm cannot train together.

A rule returns the error, or None (:func:`kl_comedy.errors.first_refusal`). ``tests/training/test_rules.py`` has
settings for each rule, by its name.

Contradictions inside one KL term are in :mod:`kl_comedy.kl.term_rules`; those of sampling, batches and processes in
:mod:`kl_comedy.config.combinations`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from kl_comedy.config import AlgorithmConfig, Config
from kl_comedy.config.combinations import updates_from_a_batch
from kl_comedy.config.schema import SHARDED, TeacherConfig, ValueConfig
from kl_comedy.errors import UserError, bad_value
from kl_comedy.kl import KLTerm
from kl_comedy.kl.beta import BetaTarget
from kl_comedy.kl.term import REFERENCES
from kl_comedy.registry import ESTIMATORS
from kl_comedy.rollouts.sampler import capabilities_of, sampler_name
from kl_comedy.training.loss import uses_critic

UNUSED_BY_DPO = (
    "reward_weight",
    "advantage",
    "value",
    "policy_loss",
    "policy_loss_options",
    "correction",
    "proximal",
    "reduction",
    "reduction_constant",
)
"""Fields of ``algorithm`` that have no meaning beside ``algorithm.dpo``."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """What the rules read: the config, and its KL terms in order."""

    config: Config
    terms: tuple[KLTerm, ...]

    @property
    def teacher_terms(self) -> Mapping[int, KLTerm]:
        """The terms with ``reference: teacher``, by their position in ``kl``."""
        return {position: term for position, term in enumerate(self.terms) if term.reference == "teacher"}

    @property
    def served_teacher(self) -> TeacherConfig | None:
        """The teacher, where it is behind a server."""
        teacher = self.config.reference.teacher
        if teacher is None or teacher.url is None:
            return None
        return teacher


# --- model and value function ---------------------------------------------------------------------------------------


def trained_weights_in_16_bit(settings: TrainingSettings) -> UserError | None:
    model = settings.config.model
    # An adapter is trained in float32 beside its base, which may be in 16 bits.
    if model.dtype == "float32" or model.lora is not None:
        return None
    reason = (
        f"updates are smaller than the rounding of {model.dtype} weights, which would not move; set "
        "train.precision=bf16 (float32 weights, products in bfloat16), or model.lora to train an adapter"
    )
    return bad_value("model.dtype", model.dtype, "float32 where all weights are trained", reason)


def value_settings_without_critic(settings: TrainingSettings) -> UserError | None:
    algorithm = settings.config.algorithm
    if uses_critic(algorithm) or algorithm.value == ValueConfig():
        return None
    return UserError(
        f"algorithm.value: {algorithm.advantage} has no value function, so these would do "
        "nothing; remove them or set algorithm.advantage=gae"
    )


# --- references -----------------------------------------------------------------------------------------------------


def max_kl_without_periodic_term(settings: TrainingSettings) -> UserError | None:
    # A setting without effect is refused: whoever reads the config would think that it acts.
    if settings.config.reference.max_kl is None:
        return None
    if any(term.reference == "periodic" for term in settings.terms):
        return None
    return UserError("reference.max_kl: no KL term has reference: periodic, so this would do nothing; remove it")


def periodic_reference_that_never_moves(settings: TrainingSettings) -> UserError | None:
    reference = settings.config.reference
    if reference.period is not None or reference.max_kl is not None:
        return None
    allowed = "a number of updates, or null with reference.max_kl"
    return bad_value(
        "reference.period",
        None,
        allowed,
        "the periodic reference would never move, which is reference: initial",
    )


def term_without_teacher(settings: TrainingSettings) -> UserError | None:
    if settings.config.reference.teacher is not None or not settings.teacher_terms:
        return None
    first_position = min(settings.teacher_terms)
    allowed = [reference for reference in REFERENCES if reference != "teacher"]
    reason = "reference.teacher names no model; set reference.teacher.source"
    return bad_value(f"kl.{first_position}.reference", "teacher", allowed, reason)


def teacher_without_term(settings: TrainingSettings) -> UserError | None:
    if settings.config.reference.teacher is None or settings.teacher_terms:
        return None
    return UserError(
        "reference.teacher: no KL term has reference: teacher, so this model would do nothing; remove it or name it "
        "in a term"
    )


def loading_options_of_a_served_teacher(settings: TrainingSettings) -> UserError | None:
    teacher = settings.served_teacher
    if teacher is None:
        return None
    reason = "the server at reference.teacher.url has loaded its model"
    if teacher.dtype is not None:
        return bad_value("reference.teacher.dtype", teacher.dtype, "null", reason)
    # The tokenizer is loaded here, at the teacher's revision.
    for name in ("adapter", "gguf_file", "trust_remote_code", "options"):
        value = getattr(teacher, name)
        default = getattr(TeacherConfig(), name)
        if value != default:
            return bad_value(f"reference.teacher.{name}", value, f"{default} with reference.teacher.url", reason)
    return None


def server_options_of_a_loaded_teacher(settings: TrainingSettings) -> UserError | None:
    teacher = settings.config.reference.teacher
    if teacher is None or teacher.url is not None:
        return None
    for name in ("server_model", "api_key_env"):
        value = getattr(teacher, name)
        default = getattr(TeacherConfig(), name)
        if value != default:
            reason = "it says which server has the teacher"
            allowed = f"{default} without reference.teacher.url"
            return bad_value(f"reference.teacher.{name}", value, allowed, reason)
    return None


def temperature_of_a_served_teacher(settings: TrainingSettings) -> UserError | None:
    # At another temperature the KL would compare the policy with a teacher of another sharpness.
    temperature = settings.config.rollout.temperature
    if settings.served_teacher is None or temperature == 1:
        return None
    reason = "a server gives a prompt's log-probs at temperature 1"
    return bad_value("rollout.temperature", temperature, "1 with reference.teacher.url", reason)


def term_needs_more_than_a_server_gives(settings: TrainingSettings) -> UserError | None:
    if settings.served_teacher is None:
        return None
    allowed = "k1, k2, k3 and the like, or top_k with options.tokens: reference, with reference.teacher.url"
    for position, term in settings.teacher_terms.items():
        # A server gives the log-prob of the sampled token and of its own likeliest tokens.
        unavailable = term.reads - {"log_ratio", "top_k", "sampler_top"}
        if term.weight == "policy":
            unavailable -= {"certainty"}  # of the policy, which is here
        if unavailable:
            reason = f"{term.label()} reads the teacher's probability of every token"
            return bad_value(f"kl.{position}", term.estimator, allowed, reason)
        if term.top is not None and term.top.whose != "reference":
            reason = "only the teacher's likeliest tokens are known, not its log-probs of the policy's"
            return bad_value(f"kl.{position}", term.estimator, allowed, reason)
    return None


def adapter_of_a_sharded_teacher(settings: TrainingSettings) -> UserError | None:
    strategy = settings.config.train.strategy
    teacher = settings.config.reference.teacher
    if teacher is None or teacher.adapter is None or strategy not in SHARDED:
        return None
    reason = "a teacher in shards is read from its files; name the merged policy of the LoRA run in source"
    return bad_value("reference.teacher.adapter", teacher.adapter, f"null with {strategy}", reason)


# --- past policies ---------------------------------------------------------------------------------------------------


def old_policy_that_is_the_policy(settings: TrainingSettings) -> UserError | None:
    if updates_from_a_batch(settings.config) > 1:
        return None
    for position, term in enumerate(settings.terms):
        if term.reference == "old":
            allowed = [reference for reference in REFERENCES if reference != "old"]
            reason = (
                "with one update a batch the old policy is the policy itself, and the KL is 0; more updates a batch "
                "are algorithm.updates_per_batch or algorithm.epochs_per_batch"
            )
            return bad_value(f"kl.{position}.reference", "old", allowed, reason)
    return None


def past_policy_of_another_engine(settings: TrainingSettings) -> UserError | None:
    name = sampler_name(settings.config)
    if capabilities_of(name).draws_with_policy:
        return None
    reason = f"{name} does not draw with the learner's module: of its distributions the drawn tokens alone are known"
    return _no_past_policies(settings, reason)


def past_policy_of_truncated_samples(settings: TrainingSettings) -> UserError | None:
    if not settings.config.rollout.truncation.is_on:
        return None
    reason = "with rollout.truncation the sampler is a past policy renormalized over the tokens that it kept"
    return _no_past_policies(settings, reason)


def past_policies_in_shards(settings: TrainingSettings) -> UserError | None:
    strategy = settings.config.train.strategy
    if strategy not in SHARDED:
        return None
    reason = f"with {strategy} the sampler is a whole copy, and past policies are not kept in shards"
    return _no_past_policies(settings, reason)


def _no_past_policies(settings: TrainingSettings, reason: str) -> UserError | None:
    """The error of the first term that reads distributions of the sampler."""
    for position, term in enumerate(settings.terms):
        if term.reads_past_policy:
            allowed = "another one, or sampler with an estimator of sampled tokens, as k1, k2 or k3"
            reason = f"{term.label()} reads the sampler's probability of every token; {reason}"
            return bad_value(f"kl.{position}.reference", "sampler", allowed, reason)
    return None


# --- terms and advantage --------------------------------------------------------------------------------------------


def own_baseline_without_group(settings: TrainingSettings) -> UserError | None:
    if settings.config.rollout.group_size >= 2:
        return None
    for position, term in enumerate(settings.terms):
        if term.baseline == "own":
            allowed = "before or after with rollout.group_size 1 (own compares a group)"
            return bad_value(f"kl.{position}.baseline", "own", allowed)
    return None


def score_centring_without_top_logps(settings: TrainingSettings) -> UserError | None:
    name = sampler_name(settings.config)
    if capabilities_of(name).gives_top_logps:
        return None
    for position, term in enumerate(settings.terms):
        if term.score_centring is not None:
            reason = f"{name} does not give the log-probs of its likeliest tokens; hf in the trainer's process does"
            return bad_value(f"kl.{position}.score_centring", term.score_centring, "null", reason)
    return None


def own_credit_before_gae(settings: TrainingSettings) -> UserError | None:
    if not uses_critic(settings.config.algorithm):
        return None
    for position, term in enumerate(settings.terms):
        # GAE sums later returns itself, so that the cost of a token alone would become a cost to go, discounted.
        if term.baseline == "before" and term.credit == "own":
            reason = "gae itself gives later costs to earlier tokens"
            return bad_value(f"kl.{position}.credit", "own", "to_go or total", reason)
    return None


# --- truncated sampling ---------------------------------------------------------------------------------------------


def truncation_without_kept_sets(settings: TrainingSettings) -> UserError | None:
    truncation = settings.config.rollout.truncation
    name = sampler_name(settings.config)
    if not truncation.is_on or capabilities_of(name).gives_kept:
        return None
    reason = f"{name} does not say which tokens it kept, and without these the policy cannot be renormalized"
    return bad_value("rollout.truncation", asdict(truncation), f"off with the sampler {name}", reason)


def term_of_what_truncation_leaves_out(settings: TrainingSettings) -> UserError | None:
    if not settings.config.rollout.truncation.is_on:
        return None
    for position, term in enumerate(settings.terms):
        key = f"kl.{position}"
        reason = f"with rollout.truncation {term.label()} would read tokens that the policy never draws"
        # Allowed is what an estimator claims of a renormalized policy and a whole reference. A forward KL is infinite
        # there, and a list of top tokens has some that the policy never draws.
        allowed = [entry.name for entry in ESTIMATORS if "claims_truncated" in entry.facts]
        if term.estimator not in allowed:
            return bad_value(f"{key}.estimator", term.estimator, allowed, reason)
        if term.weight != "none":
            return bad_value(f"{key}.weight", term.weight, "none", reason)
        if term.score_centring is not None:
            return bad_value(f"{key}.score_centring", term.score_centring, "null", reason)
        if isinstance(term.beta, BetaTarget):
            reason = "with rollout.truncation the KL has a part that no beta takes away (kl/truncation_token)"
            return bad_value(f"{key}.beta", asdict(term.beta), "a number or a schedule", reason)
    return None


def setting_that_does_not_know_kept_sets(settings: TrainingSettings) -> UserError | None:
    config = settings.config
    if not config.rollout.truncation.is_on:
        return None
    settings_at_fault: tuple[tuple[str, object, object, str, str], ...] = (
        (
            "algorithm.dpo",
            config.algorithm.dpo and asdict(config.algorithm.dpo),
            None,
            "null",
            "its implicit reward is of the whole policy",
        ),
        (
            "algorithm.value.bootstrap_truncated",
            config.algorithm.value.bootstrap_truncated,
            False,
            "false",
            "the token after the last one has no kept set",
        ),
        ("reference.max_kl", config.reference.max_kl, None, "null", "the KL to a whole reference is never 0"),
        ("audit.every", config.audit.every, 0, "0", "its targets are of the whole policy"),
        ("train.record_rollouts", config.train.record_rollouts, "none", "none", "a recording has no kept sets"),
    )
    for key, value, default, allowed, reason in settings_at_fault:
        if value != default:
            return bad_value(key, value, f"{allowed} with rollout.truncation", reason)
    return None


# --- DPO ------------------------------------------------------------------------------------------------------------


def setting_unused_by_dpo(settings: TrainingSettings) -> UserError | None:
    algorithm = settings.config.algorithm
    if algorithm.dpo is None:
        return None
    # Compared with the defaults, because a resolved config does not say which of its values a user wrote.
    for name in UNUSED_BY_DPO:
        if getattr(algorithm, name) != getattr(AlgorithmConfig(), name):
            return UserError(
                f"algorithm.{name}: algorithm.dpo takes the place of the policy term, so this would do nothing; "
                "remove one of the two"
            )
    return None


def ess_scaling_of_dpo(settings: TrainingSettings) -> UserError | None:
    scaling = settings.config.optimizer.ess_scaling
    if settings.config.algorithm.dpo is None or scaling == "none":
        return None
    return bad_value("optimizer.ess_scaling", scaling, "none", "algorithm.dpo has no importance weights")


def terms_beside_dpo(settings: TrainingSettings) -> UserError | None:
    if settings.config.algorithm.dpo is None or not settings.terms:
        return None
    return UserError(
        f"kl: got {len(settings.terms)} term(s); with algorithm.dpo it must be [] (its strength is algorithm.dpo.beta)"
    )


RULES: tuple[Callable[[TrainingSettings], UserError | None], ...] = (
    trained_weights_in_16_bit,
    value_settings_without_critic,
    max_kl_without_periodic_term,
    periodic_reference_that_never_moves,
    term_without_teacher,
    teacher_without_term,
    loading_options_of_a_served_teacher,
    server_options_of_a_loaded_teacher,
    temperature_of_a_served_teacher,
    term_needs_more_than_a_server_gives,
    adapter_of_a_sharded_teacher,
    old_policy_that_is_the_policy,
    past_policy_of_another_engine,
    past_policy_of_truncated_samples,
    past_policies_in_shards,
    own_baseline_without_group,
    score_centring_without_top_logps,
    own_credit_before_gae,
    truncation_without_kept_sets,
    term_of_what_truncation_leaves_out,
    setting_that_does_not_know_kept_sets,
    setting_unused_by_dpo,
    ess_scaling_of_dpo,
    terms_beside_dpo,
)
"""In the order in which they are asked."""
