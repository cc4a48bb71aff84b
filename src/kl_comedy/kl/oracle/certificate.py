"""Certificates: what a list of terms optimizes in each regime, by enumeration, in a sentence a user can act on.

A target is *hit* when the exact expected gradient equals it on every instance of the battery: tabular and
shared parameters, several seeds, near the reference and far from it (where clamps and caps act), and dialogues, in
which an environment writes a part of the tokens; with a seed, also in drawn settings
(:mod:`kl_comedy.kl.oracle.drawn`). The figures of a certificate are means over the near instances with shared
parameters that have no environment, as in a language model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from kl_comedy.kl.claims import (
    SAMPLER,
    SAMPLER_TARGETS,
    TARGETS,
    claimed_target,
    own_targets,
    targets_of,
    to_the_sampler,
)
from kl_comedy.kl.oracle.certificate_record import Certificate, is_bounded, relative_terms, stated_target
from kl_comedy.kl.oracle.drawn import TOLERANCE as DRAWN_TOLERANCE
from kl_comedy.kl.oracle.drawn import Setting, drawn_settings, worst_case
from kl_comedy.kl.oracle.enumeration import REGIMES, Environment, Instance, InstanceSettings, Tree
from kl_comedy.kl.oracle.gradients import (
    TOLERANCE,
    Moments,
    exact_moments,
    target_gradient,
    terms_loss,
)
from kl_comedy.kl.pull import pull_in_words
from kl_comedy.kl.surrogate import NotFinite
from kl_comedy.kl.term import KLTerm

TREE = Tree.build(vocabulary=3, length=4)
SEEDS = (0, 1, 2)
SHARED = 6
"""Parameters of the instances whose figures are shown."""
DISTANCE = 0.5
STALENESS = 0.3
"""Logit noise (nats) of the near instances, in which no bound of a sensible size acts."""
FAR_DISTANCE = 4.0
FAR_STALENESS = 1.5
"""Logit noise (nats) of the far instance: log-ratios of several nats, ratios of a hundred."""
TOP = Tree.build(vocabulary=5, length=3)
"""Where a term reads top tokens: two of them leave a tail of three."""
BATCHES = (2, 3)
"""Completions of the batches that are enumerated with a baseline of the batch's mean."""
LONG = Tree.build(vocabulary=2, length=8, ends=False)
"""A longer tree, where a window of the last ratios leaves some out."""

YARDSTICKS: dict[str, tuple[KLTerm, ...]] = {
    "sequence_reverse": (
        KLTerm("exact", placement="loss", correction="prefix_previous"),
        KLTerm("exact", placement="reward", credit="to_go", correction="prefix_previous"),
    ),
    "token_reverse": (KLTerm("exact", placement="loss"),),
    "token_forward": (KLTerm("exact_forward", placement="loss"),),
    "sequence_forward": (KLTerm("k3", level="sequence", placement="loss"),),
}
"""Per target, the terms among which the least noisy unbiased one is chosen (tests search the whole matrix)."""


def yardsticks_of(target: str) -> tuple[KLTerm, ...]:
    """The terms of :data:`YARDSTICKS` for a target; none for one that no term there hits."""
    if target in YARDSTICKS:
        return YARDSTICKS[target]
    # To the sampler the forward KLs of visited prefixes are that of completions.
    by_target = {"sequence_sampler_forward": YARDSTICKS["token_forward"]}
    for name in ("sequence_reverse", "token_reverse"):
        by_target[to_the_sampler(name)] = YARDSTICKS[name]
    return tuple(dataclasses.replace(term, reference="sampler") for term in by_target.get(target, ()))


@dataclass(frozen=True, kw_only=True)
class BatteryInstance:
    """An instance with the gradients ``[D]`` of its targets."""

    instance: Instance
    targets: dict[str, Tensor]
    near: bool = False
    """Whether no bound of a sensible size acts on it."""
    shown: bool = False
    """Whether the figures of a certificate are averaged over it."""
    setting: Setting | None = None
    """How it was drawn; None for a fixed one."""

    @property
    def tolerance(self) -> float:
        """The relative error up to which a target counts as hit."""
        if self.setting is None:
            return TOLERANCE
        return DRAWN_TOLERANCE


@lru_cache(maxsize=16)
def battery(
    regime: str, *, targets: tuple[str, ...] = TARGETS, main: Tree = TREE, seed: int | None = None
) -> tuple[BatteryInstance, ...]:
    """The instances on which a certificate of ``regime`` rests; with a seed, the drawn settings too."""
    near = InstanceSettings(regime=regime, seed=0, parameters=SHARED, distance=DISTANCE, staleness=STALENESS)
    # The same draw, farther apart: only the distance differs between near and far.
    far = dataclasses.replace(near, distance=FAR_DISTANCE, staleness=FAR_STALENESS)

    cases = []
    for instance_seed in SEEDS:
        for parameters in (None, SHARED):
            settings = dataclasses.replace(near, seed=instance_seed, parameters=parameters)
            # Tables have a gradient for each prefix by itself; a language model shares its parameters, so only
            # instances that do are averaged into figures.
            is_shown = parameters is not None
            instance = Instance.random(main, settings)
            cases.append(with_targets(instance, targets, near=True, shown=is_shown))
    # Caps, clamps and windows act on these two, which separates what always holds from what holds while none acts.
    cases.append(with_targets(Instance.random(main, far), targets))
    cases.append(with_targets(Instance.random(LONG, near), targets))
    for parameters in (None, SHARED):
        dialogue = dialogue_on(main, dataclasses.replace(near, parameters=parameters))
        cases.append(with_targets(dialogue, targets, near=True))
    if seed is not None:
        for setting in drawn_settings(seed):
            cases.append(with_targets(setting.instance(regime), targets, setting=setting))
    return tuple(cases)


def dialogue_on(main: Tree, settings: InstanceSettings) -> Instance:
    """A random instance in which an environment writes a part of the tokens, on a tree one token longer than ``main``.

    So the policy has a turn after a reply of more than one token.
    """
    tree = Tree.build(vocabulary=main.vocabulary, length=main.length + 1, ends=main.ends)
    instance = Instance.random(tree, settings)
    return dataclasses.replace(instance, environment=Environment.random(tree, settings.seed))


def with_targets(
    instance: Instance,
    targets: tuple[str, ...] = TARGETS,
    *,
    near: bool = False,
    shown: bool = False,
    setting: Setting | None = None,
) -> BatteryInstance:
    """An instance with the gradients of ``targets``."""
    # All of them, whatever is claimed: a verdict names the nearest where none is hit.
    gradients = {name: target_gradient(instance, name) for name in targets}
    return BatteryInstance(instance=instance, targets=gradients, near=near, shown=shown, setting=setting)


def certify(
    name: str,
    terms: Sequence[KLTerm],
    *,
    regimes: Sequence[str] = REGIMES,
    seed: int | None = None,
    search_seconds: float = 0.0,
) -> list[Certificate]:
    """One certificate per regime for a list of terms, the largest beta counted as 1.

    With ``seed``, targets must be hit in drawn settings too; ``search_seconds`` per regime go into a search for the
    setting in which the claimed target is missed most.
    """
    certificates = []
    for regime in regimes:
        question = Question.of(tuple(terms), regime)
        measured = _measure(question, seed, search_seconds)
        judged = _judge(question, measured)
        certificates.append(_certificate(name, question, measured, judged))
    return certificates


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is certified: the terms as a user wrote them, and as they are enumerated."""

    terms: tuple[KLTerm, ...]
    regime: str
    relative: tuple[KLTerm, ...]
    """The terms with betas relative to the largest, which counts as 1."""
    enumerated: tuple[KLTerm, ...]
    """The same without the mean of the batch, because an expectation over one completion has no batch; ``_batch_bias``
    measures what the mean adds."""
    claimed: str | None
    """The target that the term claims; None for several terms, whose sum claims nothing."""
    tree: Tree

    @classmethod
    def of(cls, terms: tuple[KLTerm, ...], regime: str) -> Question:
        relative = relative_terms(terms)
        enumerated = []
        for term in relative:
            if term.baseline == "batch":
                enumerated.append(dataclasses.replace(term, baseline="after"))
            else:
                enumerated.append(term)
        claimed = None
        # The claim is that of one term. A sum of terms may hit a target that none of them hits.
        if len(terms) == 1:
            claimed = claimed_target(terms[0], regime)
        tree = TREE
        # The usual tree has too few tokens to leave a tail outside the top ones.
        if any(term.top is not None or term.score_centring not in (None, "exact") for term in terms):
            tree = TOP
        return cls(
            terms=terms, regime=regime, relative=relative, enumerated=tuple(enumerated), claimed=claimed, tree=tree
        )

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that the terms are compared with."""
        return targets_of(self.terms)

    @property
    def stated(self) -> str:
        """The target that errors, cosines and noise are against."""
        return stated_target(self.terms)

    @property
    def centred(self) -> bool:
        """Whether a baseline is the mean of the batch, which contains the completion itself."""
        return any(term.baseline == "batch" for term in self.terms)

    @property
    def exceeds_every_instance(self) -> bool:
        """Whether a window is longer than all completions here, so that no instance shows what it leaves out."""
        return any(term.window is not None and term.window >= LONG.length - 1 for term in self.terms)

    def with_own_targets(self, case: BatteryInstance) -> BatteryInstance:
        """The instance with the gradients of the term's own divergence too (:func:`own_targets`), before the others."""
        if len(self.terms) != 1:
            return case
        (term,) = self.terms
        own_gradients = {name: target_gradient(case.instance, name, term) for name in own_targets(term)}
        # First, because of several targets that coincide the first one is reported.
        return dataclasses.replace(case, targets={**own_gradients, **case.targets})


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The exact moments of a question's gradient on each instance of the battery."""

    moments: tuple[tuple[BatteryInstance, Moments], ...]
    near_target: str | None
    """The target hit on every near instance."""
    not_finite: bool
    """Whether drawn instances were left out, in which an impossible token of the reference has no gradient."""

    @property
    def shown(self) -> list[tuple[BatteryInstance, Moments]]:
        """The instances whose figures are averaged into the certificate."""
        return [(case, moments) for case, moments in self.moments if case.shown]

    def mean(self, target: str, figure: str) -> float:
        """The mean of a figure of :meth:`Moments.figures` against a target, over the instances that are shown."""
        values = [moments.figures(case.targets[target])[figure] for case, moments in self.shown]
        return sum(values) / len(values)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the moments say: the target hit everywhere, and how badly the claim is missed in drawn settings."""

    target: str | None
    worst_error: float
    worst_setting: str


def _measure(question: Question, seed: int | None, search_seconds: float) -> Measured:
    """Enumerate the terms on the battery, and on the worst setting that a search of ``search_seconds`` finds."""
    cases = battery(question.regime, targets=question.targets, main=question.tree, seed=seed)
    # One loss for all instances: betas are relative, and nothing in it belongs to an instance.
    loss = terms_loss(question.enumerated)
    pairs = []
    not_finite = False
    for fixed_case in cases:
        case = question.with_own_targets(fixed_case)
        try:
            pairs.append((case, exact_moments(case.instance, loss)))
        except NotFinite:
            # ``log(exp(-l))`` is right at any log-ratio of a language model, and has no value at 1e4 nats, which is
            # what an impossible token has. Anywhere else a gradient that is not finite is an error.
            if case.setting is None or case.setting.impossible != "reference":
                raise
            not_finite = True
    # Before the search: a setting that it finds is no near instance, and decides only what is hit everywhere.
    near = [pair for pair in pairs if pair[0].near]
    near_target = _target_hit(near, question.claimed)
    if question.claimed is not None and search_seconds and not is_bounded(question.terms):
        worst = _search(question, not_finite, seed, search_seconds)
        if worst is not None:
            pairs.append((worst, exact_moments(worst.instance, loss)))
    return Measured(moments=tuple(pairs), near_target=near_target, not_finite=not_finite)


def _search(question: Question, not_finite: bool, seed: int | None, seconds: float) -> BatteryInstance | None:
    """The setting, of those drawn in ``seconds``, in which the claimed target is missed most; None without any."""
    claimed = question.claimed
    assert claimed is not None

    def case_of(setting: Setting) -> BatteryInstance:
        case = with_targets(setting.instance(question.regime), question.targets, setting=setting)
        return question.with_own_targets(case)

    def error_of(setting: Setting) -> float:
        case = case_of(setting)
        if not_finite and setting.impossible == "reference":
            return 0.0  # known to have no gradient there; the certificate says so already
        return exact_moments(case.instance, terms_loss(question.enumerated)).error(case.targets[claimed])

    worst, _, _ = worst_case(error_of, seed=seed or 0, seconds=seconds)
    if worst is None:
        return None
    return case_of(worst)


def _judge(question: Question, measured: Measured) -> Judged:
    """Which target is hit on every instance, and the largest error from the claimed one in a drawn setting."""
    # On every instance, those where bounds act included.
    target = _target_hit(measured.moments, measured.near_target)
    # No instance contradicts such a term, although it misses the target: longer completions, or a batch, would.
    if question.exceeds_every_instance or question.centred:
        target = None
    # A term without a claim is compared with what it should be.
    compared = question.claimed or measured.near_target or question.stated
    worst_error = 0.0
    worst_setting = ""
    for case, moments in measured.moments:
        if case.setting is None:
            continue
        error = (moments.error(case.targets[compared]), str(case.setting))
        # Equal errors: the setting that is last in the alphabet, so that the same seed names the same one.
        worst_error, worst_setting = max((worst_error, worst_setting), error)
    return Judged(target=target, worst_error=worst_error, worst_setting=worst_setting)


def _certificate(name: str, question: Question, measured: Measured, judged: Judged) -> Certificate:
    """The certificate: the judgement, and figures that are means over the instances that are shown."""
    targets = list(measured.moments[0][0].targets)
    relative_bias = {}
    cosine = {}
    for target in targets:
        relative_bias[target] = measured.mean(target, "relative_bias")
        # The figures are of the near instances, whatever a clamp does far from the reference.
        if measured.near_target == "zero":
            cosine[target] = math.nan  # the direction of rounding errors means nothing
        else:
            cosine[target] = measured.mean(target, "cosine")
    variance = measured.mean(question.stated, "variance")
    variance_ratio = None
    # Noise is compared among terms that regularize, and not with zero.
    if judged.target != "zero":
        target_of_best = judged.target or measured.near_target or question.stated
        # Against the best term for what is hit, or a term for an easy target would look quiet.
        least = _least_variance(target_of_best, question.regime, question.tree)
        if least:
            variance_ratio = variance / least
    pull = ""
    if len(question.terms) == 1:
        pull = pull_in_words(question.terms[0], question.regime)
    batch_bias = {}
    if question.centred:
        for completions in BATCHES:
            batch_bias[completions] = _batch_bias(question.relative, measured.shown, completions)
    return Certificate(
        name=name,
        terms=question.terms,
        regime=question.regime,
        target=judged.target,
        near_target=measured.near_target,
        claimed=question.claimed,
        relative_bias=relative_bias,
        cosine=cosine,
        variance=variance,
        variance_ratio=variance_ratio,
        strength=measured.mean(question.stated, "strength"),
        worst_error=judged.worst_error,
        worst_setting=judged.worst_setting,
        not_finite=measured.not_finite,
        pull=pull,
        batch_bias=batch_bias,
    )


def _batch_bias(terms: Sequence[KLTerm], shown: Sequence[tuple[BatteryInstance, Moments]], completions: int) -> float:
    """The mean relative distance of the expected gradients from those in ``shown``, in batches of ``completions``."""
    distances = []
    for case, moments in shown:
        # Enumerated too: the product of all completions of a small batch.
        in_batches = exact_moments(case.instance, terms_loss(terms), group_size=completions)
        distances.append(in_batches.relative_bias(moments.gradient_D))
    return sum(distances) / len(distances)


def _target_hit(pairs: Sequence[tuple[BatteryInstance, Moments]], preferred: str | None) -> str | None:
    """The target hit on every instance; where several coincide, the preferred one."""
    hits = []
    for name in pairs[0][0].targets:
        if all(moments.equals(case.targets[name], case.tolerance) for case, moments in pairs):
            hits.append(name)
    # On-policy several targets have one gradient; the claimed name is the one to report.
    if preferred in hits:
        return preferred
    if hits:
        return hits[0]
    return None


# Cached, because a matrix of hundreds of terms asks for the same few.
@lru_cache(maxsize=64)
def _least_variance(target: str, regime: str, main: Tree) -> float | None:
    """The variance of the least noisy yardstick that hits ``target`` in a regime, in the certificate's unit."""
    variances = []
    targets = SAMPLER_TARGETS if SAMPLER in target else TARGETS
    cases = battery(regime, targets=targets, main=main)
    for term in yardsticks_of(target):
        pairs = [(case, exact_moments(case.instance, terms_loss((term,)))) for case in cases]
        if _target_hit(pairs, target) == target:
            shown = [moments.figures(case.targets[targets[0]]) for case, moments in pairs if case.shown]
            variances.append(sum(figures["variance"] for figures in shown) / len(shown))
    return min(variances, default=None)
