"""Which KL to use and which never: the one source of the project's advice.

    advice.yaml (written by hand) -> read_advice -> situations, rules, contrasts
    advice_measured.yaml (made from the exports of results/) -> read_measured -> what training showed

docs/decision.md, docs/open_problem.md, the table of README.md, results/advice and the answers of ``kl-comedy explain``
come from these two files. :mod:`research.studies.advice` measures the contrasts; a checkout is not needed to read them.

A *reward* is verified or can be hacked: whether it needs a KL. A *situation* is what a reader has, with the KL to
use. A *rule* says which terms never to use, on which samples. A *contrast* is a difference of two sets of training
runs, in one or more cells (learning rates, ages of the samples).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import UserError, bad_value, unknown_key
from kl_comedy.io import load_yaml
from kl_comedy.kl import KLTerm
from kl_comedy.kl.recipes import resolve_terms

T = TypeVar("T")

FILE = Path(__file__).with_name("advice.yaml")
MEASURED = Path(__file__).with_name("advice_measured.yaml")

REGIME_OF_SAMPLES = {"fresh": "on_policy", "stale": "off_policy"}
"""The regime of a certificate by the age of the samples."""

PAGES = ("first_screen", "open_problem")
"""The tables in which a situation or a rule may stand, besides results/advice, which has all of them."""

UNTRAINED = "no trained contrast yet"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a reader has, and what to use. ``kl`` is config data of terms; ``config`` is for what is not a KL term.
    ``words`` describe what is not a recipe.

    ``target`` is the claim of the terms in the regime of the samples, None where they have none; ``master_row`` is its
    row in tests/exact/test_claims.py. ``contrasts`` are names of contrasts whose side ``a`` is the advised one, the
    quoted one first; empty where nothing was trained. ``candidates`` are names of :class:`Candidate` where the choice
    is open; then there is no ``kl``.
    """

    name: str
    samples: str = option(..., choices=tuple(REGIME_OF_SAMPLES))
    has: str
    why: str
    contrasts: tuple[str, ...]
    target: str | None
    reference: str = option("initial", choices=("initial", "teacher", "sampler"))
    kl: Any = None
    config: str = ""
    words: str = ""
    master_row: str = ""
    pages: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()

    @property
    def terms(self) -> tuple[KLTerm, ...]:
        """The advised terms; empty where the advice is not a KL term."""
        return resolve_terms(self.kl, f"situations.{self.name}.kl")

    @property
    def needs_full_logits(self) -> bool:
        """Whether a term reads more than the log-probs of the sampled tokens."""
        return any(term.needs != "log_ratio" for term in self.terms)

    @property
    def use(self) -> str:
        """What to write: the recipe, the terms' labels, or the config."""
        if isinstance(self.kl, str):
            return self.kl
        return self.config or " + ".join(term.label() for term in self.terms)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One form among which an open situation leaves the choice: what speaks for it, and what it risks.

    ``in_short`` is both in a few words. ``flags`` are the flags that set it,
    by system of ``kl-comedy list peers``; no flag of the others does.
    """

    name: str
    words: str
    kl: Any
    gain: str
    risk: str
    in_short: str
    contrasts: tuple[str, ...]
    flags: dict[str, dict[str, Any]]

    @property
    def terms(self) -> tuple[KLTerm, ...]:
        return resolve_terms(self.kl, f"candidates.{self.name}.kl")


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A kind of reward: whether it needs a KL. ``in_short`` is the advice in a few words.

    ``contrasts`` are names of contrasts of a form with no KL, the form as side ``a``.
    """

    name: str
    words: str
    advice: str
    in_short: str
    contrasts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Terms never to use on some samples: those for which ``why`` has the reason.

    A term is forbidden if each field of ``terms`` has the value there, or one of the values of a list, and no other
    term of the run has the values of ``unless``. ``recipe`` is an example. ``contrasts`` are names of contrasts whose
    side ``a`` is forbidden.
    """

    name: str
    words: str
    terms: dict[str, Any]
    why: dict[str, str]
    recipe: str
    contrasts: tuple[str, ...]
    unless: dict[str, Any] | None = None
    pages: tuple[str, ...] = ()

    def forbids(self, terms: Sequence[KLTerm], samples: str) -> bool:
        """Whether one of ``terms`` is never to be used on samples of this age."""
        if samples not in self.why:
            return False
        if self.unless is not None and any(_has_values(term, self.unless) for term in terms):
            return False
        # A pull towards the sampler is a trust region: no rule and no run here is about one.
        return any(_has_values(term, self.terms) for term in terms if term.reference != "sampler")

    @property
    def reasons(self) -> str:
        """Why not, for each age of the samples; a reason that is the same for both is said once."""
        return " ".join(dict.fromkeys(self.why.values()))


def _has_values(term: KLTerm, values: Mapping[str, Any]) -> bool:
    for name, allowed in values.items():
        choices = allowed if isinstance(allowed, list) else [allowed]
        if getattr(term, name) not in choices:
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Side:
    """The runs on one side of a contrast: those of a KL (config data), at ``beta`` if given, and of ``where``."""

    kl: Any = None
    beta: float | None = None
    where: dict[str, Any] = option(dict)
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Side ``a`` minus side ``b``, paired by seed, in every combination of ``cells``, among the runs of ``where``.

    ``without_kl`` replaces values of ``where`` for the runs without a KL that are counted beside them.
    """

    name: str
    export: str
    a: Side
    b: Side
    cells: dict[str, list[Any]]
    where: dict[str, Any] = option(dict)
    setting: str = ""
    metric: str = "eval/heldout/reward"
    without_kl: dict[str, Any] = option(dict)

    @property
    def samples(self) -> str:
        """``stale`` where the runs have an age of their samples or use a batch several times, else ``fresh``."""
        columns = {**self.where, **self.cells}
        if "params.lag.steps" in columns or "params.algorithm.updates_per_batch" in columns:
            return "stale"
        return "fresh"


@dataclass(frozen=True, kw_only=True)
class Export:
    """A file of runs, relative to the repository, and its rule of collapse."""

    path: str
    collapse: str


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A setting in which all KLs were trained: the range of their mean rewards is quoted."""

    export: str
    where: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AdviceTable:
    """What advice.yaml holds, by name.

    ``names`` are the words for recipes. ``forms`` are the configurations of README's table, as config data.
    """

    exports: Mapping[str, Export]
    rewards: Mapping[str, Reward]
    situations: Mapping[str, Situation]
    candidates: Mapping[str, Candidate]
    never: Mapping[str, Rule]
    contrasts: Mapping[str, Contrast]
    spreads: Mapping[str, Spread]
    names: Mapping[str, str]
    forms: Mapping[str, Any]

    def on_page(self, page: str) -> tuple[list[Situation], list[Rule]]:
        """The situations and the rules of one page, in the order of the file."""
        situations = [item for item in self.situations.values() if page in item.pages]
        rules = [item for item in self.never.values() if page in item.pages]
        return situations, rules

    def words_of(self, side: Side) -> str:
        """How pages call one side of a contrast."""
        if side.name:
            return side.name
        words = self.names[side.kl]
        if side.beta is None:
            return words
        return f"{words} (beta {side.beta:g})"

    def words_of_use(self, situation: Situation) -> str:
        """What a situation advises, in words."""
        return situation.words or self.names[situation.use]

    def candidates_of(self, situation: Situation) -> list[Candidate]:
        """The candidates of a situation that is open; else none."""
        return [self.candidates[name] for name in situation.candidates]

    def forbidding(self, terms: Sequence[KLTerm], samples: str) -> Rule | None:
        """The first rule that forbids one of ``terms`` on samples of this age."""
        for rule in self.never.values():
            if rule.forbids(terms, samples):
                return rule
        return None

    def situation_for(self, terms: Sequence[KLTerm], samples: str) -> Situation | None:
        """The situation of whoever has ``terms``: the same reference, and the same logits if there is such advice."""
        reference = _reference_of(terms)
        candidates = []
        for situation in self.situations.values():
            if situation.samples == samples and situation.reference == reference:
                candidates.append(situation)
        full_logits = any(term.needs != "log_ratio" for term in terms)
        for situation in candidates:
            if situation.needs_full_logits == full_logits:
                return situation
        return next(iter(candidates), None)


def _reference_of(terms: Sequence[KLTerm]) -> str:
    """``teacher`` where a term has one, ``sampler`` where all pull to it, else ``initial``."""
    references = {term.reference for term in terms}
    if "teacher" in references:
        return "teacher"
    if references == {"sampler"}:
        return "sampler"
    # A moving reference is a reference to a policy: the advice is the same.
    return "initial"


# --- reading ----------------------------------------------------------------------------------------------------------
def read_advice(path: Path = FILE) -> AdviceTable:
    """Read a file like advice.yaml. Raises :class:`UserError` for an unknown key, name or value."""
    raw = load_yaml(path.read_text("utf-8"))
    sections = {item.name for item in fields(AdviceTable)}
    for name, value in raw.items():
        if name not in sections:
            raise unknown_key(name, value, sorted(sections))
    table = AdviceTable(
        exports={name: parse_record(Export, item, key=f"exports.{name}") for name, item in raw["exports"].items()},
        rewards=_named(Reward, "rewards", raw),
        situations=_named(Situation, "situations", raw),
        candidates=_named(Candidate, "candidates", raw),
        never=_named(Rule, "never", raw),
        contrasts=_named(Contrast, "contrasts", raw),
        spreads={name: parse_record(Spread, item, key=f"spreads.{name}") for name, item in raw["spreads"].items()},
        names=raw["names"],
        forms=raw["forms"],
    )
    _check_names(table)
    return table


@functools.cache
def advice() -> AdviceTable:
    """The table of this package."""
    return read_advice()


def _named(schema: type[T], section: str, raw: Mapping[str, Any]) -> dict[str, T]:
    """The records of a section, each of which holds its own name."""
    records = {}
    for name, item in raw[section].items():
        records[name] = parse_record(schema, {"name": name, **item}, key=f"{section}.{name}")
    return records


def _check_names(table: AdviceTable) -> None:
    """Raise for a name that nothing in the table has: of an export, a contrast, a page, a recipe or a field."""
    for contrast in table.contrasts.values():
        if contrast.export not in table.exports:
            raise bad_value(f"contrasts.{contrast.name}.export", contrast.export, table.exports)
    with_evidence: list[Reward | Situation | Candidate | Rule] = [
        *table.rewards.values(),
        *table.situations.values(),
        *table.candidates.values(),
        *table.never.values(),
    ]
    for judged in with_evidence:
        for name in judged.contrasts:
            if name not in table.contrasts:
                raise bad_value(f"{judged.name}.contrasts", name, table.contrasts)
    _check_candidates(table)
    advised: list[Situation | Rule] = [*table.situations.values(), *table.never.values()]
    for item in advised:
        for page in item.pages:
            if page not in PAGES:
                raise bad_value(f"{item.name}.pages", page, PAGES)
    for rule in table.never.values():
        _check_rule(rule)
    for situation in table.situations.values():
        if not situation.words and situation.use not in table.names:
            raise bad_value(f"situations.{situation.name}.kl", situation.use, table.names, "or give words")


def _check_candidates(table: AdviceTable) -> None:
    for situation in table.situations.values():
        for name in situation.candidates:
            if name not in table.candidates:
                raise bad_value(f"situations.{situation.name}.candidates", name, table.candidates)


def _check_rule(rule: Rule) -> None:
    """Raise for a field that no term has, and for an age that no samples have."""
    term_fields = {"needs", *(item.name for item in fields(KLTerm))}
    for name, value in {**rule.terms, **(rule.unless or {})}.items():
        if name not in term_fields:
            raise unknown_key(f"never.{rule.name}.{name}", value, sorted(term_fields))
    for samples in rule.why:
        if samples not in REGIME_OF_SAMPLES:
            raise bad_value(f"never.{rule.name}.why", samples, REGIME_OF_SAMPLES)


def contradictions(table: AdviceTable) -> list[str]:
    """Each situation whose advised terms a rule forbids on its samples, and each rule that forbids nothing it names.

    Empty for a table that does not contradict itself.
    """
    faults = []
    for situation in table.situations.values():
        rule = table.forbidding(situation.terms, situation.samples)
        if rule is not None:
            faults.append(f"{situation.name} advises {situation.use}, which {rule.name} forbids")
        if [bool(situation.terms), bool(situation.config), bool(situation.candidates)].count(True) != 1:
            faults.append(f"{situation.name} needs either kl, config or candidates")
        for candidate in table.candidates_of(situation):
            rule = table.forbidding(candidate.terms, situation.samples)
            if rule is not None:
                faults.append(f"{situation.name} has the candidate {candidate.name}, which {rule.name} forbids")
    for rule in table.never.values():
        # The certificates and the runs of a rule are of its example: it must be one.
        example = resolve_terms(rule.recipe, f"never.{rule.name}.recipe")
        for samples in rule.why:
            if not rule.forbids(example, samples):
                faults.append(f"{rule.name} names {rule.recipe}, which it does not forbid on {samples} samples")
    return [*faults, *_strange_sides(table)]


def _strange_sides(table: AdviceTable) -> list[str]:
    """Each contrast that is not about what it is evidence for."""
    faults = []
    advised: list[Situation | Candidate] = [*table.situations.values(), *table.candidates.values()]
    for item in advised:
        for name in item.contrasts:
            side = table.contrasts[name].a
            # A side that is chosen by its name is not a KL, or is one among other settings.
            is_advised = side.kl is None or _labels(resolve_terms(side.kl)) == _labels(item.terms)
            if not is_advised:
                faults.append(f"{item.name} quotes {name}, which is about {side.kl}")
    for rule in table.never.values():
        for name in rule.contrasts:
            terms = resolve_terms(table.contrasts[name].a.kl)
            if not any(rule.forbids(terms, samples) for samples in rule.why):
                faults.append(f"{rule.name} quotes {name}, which is about {table.contrasts[name].a.kl}")
    return faults


def _without_bounds(terms: Sequence[KLTerm]) -> list[KLTerm]:
    # The mode of a cap goes with the cap: `clip` alone is no term.
    return [replace(term, input_clamp=None, output_clamp=None, cap=None, cap_mode="truncate") for term in terms]


def _labels(terms: Sequence[KLTerm]) -> list[str]:
    return [term.label() for term in terms]


# --- what training showed ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Cell:
    """One contrast in one cell: ``difference`` is the mean of a - b over ``pairs`` seeds, with its 95% interval.

    ``ahead`` and ``behind`` count the seeds in which ``a`` is above and below ``b``. ``a_collapsed`` of ``a_runs`` runs
    collapsed, and so for ``b`` and for training without a KL (None where nothing was). ``none_ess`` is the effective
    sample size of the runs without a KL, a share of the completions, over the first third of their updates (None where
    it was not kept).
    The interval is not adjusted for the number of contrasts.
    """

    setting: str
    a_mean: float
    b_mean: float
    difference: float
    low: float
    high: float
    pairs: int
    ahead: int
    behind: int
    a_collapsed: int
    a_runs: int
    b_collapsed: int
    b_runs: int
    none_collapsed: int | None = None
    none_runs: int | None = None
    none_ess: float | None = None

    @property
    def direction(self) -> int:
        """1 where the interval is above 0, -1 where it is below, else 0."""
        if self.low > 0:
            return 1
        if self.high < 0:
            return -1
        return 0


@dataclass(frozen=True, kw_only=True)
class Range:
    """The lowest and the highest mean reward of ``forms`` KL configurations, over ``runs`` runs of ``seeds`` seeds."""

    lowest: float
    highest: float
    forms: int
    seeds: int
    runs: int
    collapsed: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What advice_measured.yaml holds: cells by contrast, ranges by spread."""

    contrasts: Mapping[str, Sequence[Cell]]
    spreads: Mapping[str, Range]


def read_measured(path: Path = MEASURED) -> Measured:
    """Read a file like advice_measured.yaml."""
    raw = load_yaml(path.read_text("utf-8"))
    cells = {name: tuple(Cell(**cell) for cell in listed) for name, listed in raw["contrasts"].items()}
    return Measured(contrasts=cells, spreads={name: Range(**item) for name, item in raw["spreads"].items()})


@functools.cache
def measured() -> Measured:
    """What training showed, as stored in this package."""
    return read_measured()


@dataclass(frozen=True)
class Strength:
    """How many contrasts of an advice are for it and against it, of all: by whether the 95% interval contains 0."""

    supporting: int
    against: int
    of: int

    def __str__(self) -> str:
        return f"{self.supporting} / {self.against} / {self.of}"


def strength(item: Reward | Situation | Candidate | Rule, cells: Measured) -> Strength:
    """The strength of an advice over every cell of its contrasts. ``a`` should be ahead, and for a rule behind."""
    sign = -1 if isinstance(item, Rule) else 1
    directions = [sign * cell.direction for name in item.contrasts for cell in cells.contrasts[name]]
    return Strength(directions.count(1), directions.count(-1), len(directions))


def quoted(item: Situation | Candidate | Rule, table: AdviceTable, samples: str = "") -> Contrast | None:
    """The first contrast, or the first on samples of this age; None where nothing was trained."""
    for name in item.contrasts:
        contrast = table.contrasts[name]
        if samples in ("", contrast.samples):
            return contrast
    return None


def evidence_in_words(
    item: Situation | Candidate | Rule, table: AdviceTable, cells: Measured, samples: str = ""
) -> str:
    """What training showed: the difference of reward of an advice, the collapsed runs of a rule, in one setting."""
    contrast = quoted(item, table, samples)
    if contrast is None:
        return UNTRAINED
    cell = cells.contrasts[contrast.name][0]
    other = table.words_of(contrast.b)
    if isinstance(item, Rule):
        text = (
            f"collapsed in {cell.a_collapsed} of {cell.a_runs} runs ({cell.setting}), "
            f"{other} in {cell.b_collapsed} of {cell.b_runs}"
        )
        # Without it a reader takes for harm what is only no help.
        if cell.none_runs is None:
            return f"{text}; without a KL nothing was trained there"
        return f"{text}, no KL in {cell.none_collapsed} of {cell.none_runs}"
    return f"{with_interval(cell)} against {other}; {cell.setting}, {cell.pairs} seeds"


def with_interval(cell: Cell) -> str:
    """The difference as ``+0.026 [0.011, 0.040]``."""
    return f"{cell.difference:+.3f} [{cell.low:.3f}, {cell.high:.3f}]"


# --- answers of `kl-comedy explain` -----------------------------------------------------------------------------------
def what_to_use(terms: Sequence[KLTerm], regimes: Sequence[str] = tuple(REGIME_OF_SAMPLES.values())) -> list[str]:
    """One line for fresh and one for stale samples: whether ``terms`` are advised, and what to use instead.

    Empty without terms. There is no line for a regime that is not among ``regimes`` (those in which the terms hold),
    nor where no advice has the reference of these terms.

    >>> print(what_to_use(resolve_terms("comedy/k1_in_loss"))[0].partition(".")[0])
    fresh samples: never
    """
    if not terms:
        return []
    lines = []
    for samples, regime in REGIME_OF_SAMPLES.items():
        answer = ""
        if regime in regimes:
            answer = _answer(terms, samples)
        if answer:
            lines.append(f"{samples} samples: {answer}")
    return lines


def _answer(terms: Sequence[KLTerm], samples: str) -> str:
    """The line on samples of one age; empty where there is neither advice nor a rule."""
    table = advice()
    rule = table.forbidding(terms, samples)
    situation = table.situation_for(terms, samples)
    instead = ""
    if situation is not None and situation.candidates:
        choice = "; ".join(f"{item.words} ({item.risk})" for item in table.candidates_of(situation))
        instead = f"open, of {choice}"
    elif situation is not None:
        instead = f"{table.words_of_use(situation)} ({situation.use}; needs {situation.has})"
    if rule is not None:
        text = f"never. {rule.why[samples]} In training: {evidence_in_words(rule, table, measured(), samples)}."
        if instead:
            text += f" Use instead: {instead}."
        return text
    if situation is None:
        return ""
    if situation.candidates:
        return _open_answer(candidate_of(terms, situation), situation)
    shown = f"held-out reward {evidence_in_words(situation, table, measured())}"
    if not situation.contrasts:
        shown = UNTRAINED
    if _labels(situation.terms) == _labels(terms):
        return f"this is what we advise. In training: {shown}."
    # Frameworks clamp k3 far from the reference. It is the same form there, and the runs are not theirs.
    if _labels(situation.terms) == _labels(_without_bounds(terms)):
        return f"this is what we advise, with clamps that our runs did not have. In training: {shown}."
    return f"we advise {instead}. In training: {shown}."


def candidate_of(terms: Sequence[KLTerm], situation: Situation) -> Candidate | None:
    """The candidate of an open situation whose expected gradient ``terms`` have, bounds aside."""
    mine = _labels([_plain_form(term) for term in _without_bounds(terms)])
    for candidate in advice().candidates_of(situation):
        if _labels(candidate.terms) == mine:
            return candidate
    return None


def _plain_form(term: KLTerm) -> KLTerm:
    """The term as candidates are written, with the same expected gradient (tests/register/test_one_voice.py)."""
    if term.placement == "reward":
        # Every system takes its cost from the log-probs of the rollout.
        return replace(term, anchor="current")
    if term.gradient == "k2" and term.correction == "none":
        return replace(term, estimator="k2", gradient="natural")
    if term.gradient == "k2" and term.correction == "token_detached":
        return replace(term, estimator="k3", gradient="natural", correction="token")
    if term.estimator == "k1" and term.correction == "token":
        # k3 is k1 and the ratio to the reference less 1, whose mean under the policy is 0.
        return replace(term, estimator="k3")
    return term


def _open_answer(mine: Candidate | None, situation: Situation) -> str:
    others = []
    for candidate in advice().candidates_of(situation):
        if candidate is not mine:
            others.append(f"{candidate.words}: {candidate.gain}; its risk: {candidate.risk}")
    if mine is None:
        return f"open, and this is none of the candidates. {'. '.join(others)}."
    return f"open, and this is one candidate: {mine.gain}; its risk: {mine.risk}. Others: {'. '.join(others)}."


def advised(name: str) -> str:
    """The recipe of the situation ``name``. Raises :class:`UserError` where its advice is not a recipe."""
    situations = advice().situations
    if name not in situations:
        raise bad_value("situation", name, situations)
    kl = situations[name].kl
    if not isinstance(kl, str):
        raise UserError(f"situations.{name}.kl: is not a recipe")
    return kl
