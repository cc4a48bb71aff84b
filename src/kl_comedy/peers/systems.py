"""The KL flags of other systems as data (``flags/NAME.yaml``), and what a setting of them means.

    "verl:use_kl_loss=true,kl_loss_type=k3" -> split, resolve -> the rules of the system -> Reading -> certificates

A rule is a mapping. It applies where every condition of its ``when`` holds, and then, in this order: ``set`` gives
values to variables, ``terms``, ``notes`` and ``no_ops`` are appended, ``switch_on`` and ``corrections`` are merged,
``policy_ratio`` and ``holds_in`` are replaced, ``refuse`` raises, ``rules`` are applied, and ``instead`` or ``stop``
ends the reading.

A condition compares a flag, a variable, or ``terms`` (the number of terms so far) with a value, a list (any of it),
``{not: ...}`` or ``{above: number}``. ``$name`` stands for the value of a flag, variable or shared sentence, ``{name}``
inside a text for the value as one types it, ``{of: name, value: result, else: result}`` for a table, and
``{twice: name}`` for twice a number. A term is ``{loss: estimator, ...}`` (differentiated), ``{cost: estimator, ...}``
(a cost in the reward, from the log-probs at rollout) or the fields of a :class:`~kl_comedy.kl.KLTerm`.

``freshness`` says how old the samples are that a system learns from; :mod:`kl_comedy.peers.freshness` computes it.

The facts are from the sources of the versions that the files name; no code of those systems is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError, bad_value, shown, unknown_key
from kl_comedy.io import load_yaml
from kl_comedy.kl import REGIMES, KLTerm
from kl_comedy.kl.beta import NEGATIVE
from kl_comedy.kl.oracle.certificate_record import Certificate
from kl_comedy.kl.oracle.stored_certificates import certificates as stored_or_enumerated
from kl_comedy.peers.advice import advised

Value = bool | float | str | None
Rules = Sequence[Mapping[str, Any]]

EFFECTS = (
    "set",
    "terms",
    "notes",
    "no_ops",
    "switch_on",
    "policy_ratio",
    "holds_in",
    "corrections",
    "refuse",
    "rules",
    "instead",
)
"""What a rule may do besides ``when`` and ``stop``, in the order in which it is done."""

NAMES = (
    "trl",
    "verl",
    "openrlhf",
    "nemo-rl",
    "slime",
    "skyrl",
    "open-instruct",
    "prime-rl",
    "pipelinerl",
    "areal",
    "roll",
    "tinker",
    "trinity",
    "oat",
    "torchforge",
    "ms-swift",
    "unsloth",
    "axolotl",
    "miles",
    "rlinf",
    "rllm",
    "tunix",
    "molt",
    "torchtitan-rl",
    "easyr1",
)
"""The systems, in the order of every table. Each has a file in ``flags``."""

KL_PART = re.compile(r"(^|[_.])(kl|beta|init_coef)([_.]|$)")
"""Words in the names of flags that say where a KL is or how much it counts."""

MAX_FLAGS = 20_000
"""Characters of flags on the command line: they are matched against every flag, and echoed in messages."""

SWITCH = {
    "true": True,
    "1": True,
    "yes": True,
    "on": True,
    "false": False,
    "0": False,
    "no": False,
    "off": False,
}
"""How the systems' own parsers (argparse, OmegaConf, YAML 1.1) spell the value of a switch."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag of a system that bears on its KL.

    ``default`` is the system's own, and its type says whether the flag is a switch, a number or a name out of
    ``choices``. ``path`` is the dotted path in the system's config or command line (default: the name). ``nullable``:
    ``none`` is a value. ``aliases`` are names of older versions and other entry points, ``synonyms`` older names of
    values.
    """

    name: str
    meaning: str
    default: Value
    path: str = ""
    choices: tuple[str, ...] = ()
    nullable: bool = False
    aliases: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """The path to write in the system's own config."""
        return self.path or self.name

    @property
    def is_of_kl(self) -> bool:
        """Whether the flag says where the KL is or how much it counts, and not another part of the objective."""
        return KL_PART.search(f"{self.name}.{self.path}") is not None

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def allowed(self) -> str:
        """The values that :meth:`parse` takes, for a message."""
        if self.choices:
            values = ", ".join(self.choices)
        elif self.is_switch:
            values = "true, false"
        else:
            values = "a number, at least 0"
        if self.nullable:
            return f"{values}, none"
        return values

    def matches(self, key: str) -> bool:
        """Whether a normalized key is the name, an alias, or a tail of the path in whole components."""
        # Exact first: a name may also be the tail of another flag's path.
        if key == self.name or key in self.aliases:
            return True
        # With the dot before both, so that `coef` is not a tail of `actor.kl_loss_coef`.
        return f".{flag_key(self.where)}".endswith(f".{key}")

    def parse(self, text: str | None, key: str) -> Value:
        """The value of a text, None for a lone ``--key``. Raises :class:`UserError`, which names ``key``."""
        if text is None and not self.is_switch:
            raise bad_value(key, "(nothing)", self.allowed, "only a switch may stand alone")
        # Quotes are those of a shell or of YAML, which a copied command line keeps.
        plain = "true" if text is None else text.strip("\"'")
        named = self._named_values()
        if plain.lower() in named:
            return named[plain.lower()]
        if not self.choices and not self.is_switch:
            # A text that is not a number is refused below, as a negative or infinite one is.
            with contextlib.suppress(ValueError):
                number = float(plain)
                if 0 <= number < math.inf:
                    return number
        # As a list where there are names, for the nearest of them.
        allowed = self.allowed.split(", ") if self.choices else self.allowed
        is_negative = self.is_of_kl and not self.choices and re.fullmatch(r"-[\d.]+(e[+-]?\d+)?", plain) is not None
        raise bad_value(key, plain, allowed, NEGATIVE if is_negative else "")

    def _named_values(self) -> dict[str, Value]:
        """The values that have a name, by the name in lower case."""
        named: dict[str, Value] = dict(self.synonyms)
        for choice in self.choices:
            # The first of several that differ in case only.
            named.setdefault(choice.lower(), choice)
        if self.is_switch:
            named |= SWITCH
        if self.nullable:
            named["none"] = None
            named["null"] = None
        return named

    def row(self) -> dict[str, str]:
        """The flag as one row of ``kl-comedy list peers``."""
        default = format_value(self.default)
        return {"flag": self.where, "allowed": self.allowed, "default": default, "meaning": self.meaning}


def _flag(name: str, facts: Mapping[str, Any]) -> Flag:
    # Tuples: a flag is frozen, with all that it holds.
    lists = {list_name: tuple(facts.get(list_name, ())) for list_name in ("choices", "aliases")}
    return Flag(name=name, **{**facts, **lists})


def format_value(value: Value) -> str:
    """A value as one types it.

    >>> format_value(True), format_value(None), format_value(0.001)
    ('true', 'none', '0.001')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value
    return f"{value:g}"


@dataclass(frozen=True, kw_only=True)
class Marks:
    """By what a launch file is told: patterns of whole words of its commands, keys, sections (prefixes of keys), calls
    and imports of Python. ``config_keys`` are keys of configs and commands only, not of calls in Python; ``values`` are
    patterns of the values of a key, by the last part of the key."""

    words: Sequence[str] = ()
    keys: Sequence[str] = ()
    config_keys: Sequence[str] = ()
    sections: Sequence[str] = ()
    calls: Sequence[str] = ()
    imports: Sequence[str] = ()
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OtherRun:
    """A kind of run that has none of a system's KL flags, as SFT: its name, and by what it is told."""

    name: str
    marks: Marks


@dataclass(frozen=True, kw_only=True)
class VersionChange:
    """A default that differs between releases: what is said where a file leaves ``flag`` to it. A ``flag`` that the
    system does not have stands for what no flag sets.

    ``when`` are conditions as in a rule; ``given`` are flags that the file must set for the change to matter. ``since``
    is the first release with the change, and ``before`` are the values of flags that stand for what earlier ones do.
    ``usually_before``: a file that does not tell its release is mostly for an earlier one; ``before_if_old``: one that
    has an option which some later release dropped is. ``only_if_told``: nothing is said of files that do not tell.
    """

    flag: str
    says: str
    when: Mapping[str, Any] = field(default_factory=dict)
    given: Sequence[str] = ()
    since: str = ""
    before: Mapping[str, Value] = field(default_factory=dict)
    usually_before: bool = False
    before_if_old: bool = False
    only_if_told: bool = False

    @property
    def key(self) -> str:
        """What no other change of the system is called."""
        return f"{self.flag} {self.since}"


@dataclass(frozen=True, kw_only=True)
class Releases:
    """By what a file tells its release: patterns of keys and classes that end with a release (``until``), and of those
    that one is the first to have (``since``). ``package`` is the name whose version a file may pin."""

    package: str = ""
    until: tuple[tuple[str, Sequence[str]], ...] = ()
    since: tuple[tuple[str, Sequence[str]], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Freshness:
    """What decides how old a system's samples are: ``options``, which are no flags of the KL, and the cases to compute.

    The first case of ``updates`` and of ``lag`` counts whose ``when`` holds and whose ``given`` options are set. The
    updates per batch are the product of ``times`` over that of ``over``; ``times_unknown`` and ``over_unknown`` are
    factors that no option names. ``versions`` is how many versions older samples may be: a number, an option, or null
    for no bound; ``by`` is the option that switches this on, ``mixed`` whether one completion may have several
    versions, ``unit`` what is counted. ``told_by`` are switches that a file gives by a command or a section.
    The record's own ``versions`` are defaults of options that changed between releases.
    """

    source: str = ""
    options: tuple[Flag, ...] = ()
    updates: Rules = ()
    lag: Rules = ()
    told_by: Mapping[str, Marks] = field(default_factory=dict)
    versions: Sequence[VersionChange] = ()

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Freshness:
        """The record of a ``freshness`` section."""
        options = [_flag(name, {"meaning": "", **facts}) for name, facts in data.get("options", {}).items()]
        told_by = {name: Marks(**marks) for name, marks in data.get("told_by", {}).items()}
        cases = {name: tuple(data.get(name, ())) for name in ("updates", "lag")}
        versions = tuple(VersionChange(**change) for change in data.get("versions", ()))
        return cls(source=data["source"], options=tuple(options), told_by=told_by, versions=versions, **cases)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What was given of a system's freshness options.

    ``given`` are values by option. ``unknown`` are options that are given by something else than a value, as a
    variable, with that text. ``unused`` are other options that the system is known to have, and no answer needs.
    ``without`` are the changes of defaults that the file's release does not have, as ``option since``, each with why it
    is for such a release; ``having`` are those that it has.
    """

    given: Mapping[str, Value] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    having: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class System:
    """A system: its KL flags, and the rules that say what they do.

    ``advice`` holds, per goal of :data:`GOALS`, the flags that reach it, or why none do.

    For launch scripts and configs: ``marks`` belong to this system alone, ``hints`` to few, and ``config_hints`` to few
    in a config that stands alone, since programs of many kinds have arguments of the same names. ``needs_config`` are
    marks of a program that takes all settings from a config of its caller, and ``own_configs`` patterns of configs of
    the system itself, which have its defaults. ``over`` are the systems of
    which this is a fork or a patch, whose marks its files have too. ``rl_runs`` tell a run with these flags, and where
    none is there, ``other_runs`` one without. ``told_by`` are values of flags that a file gives by a class or a
    command. ``classes`` are the patterns of the Python classes whose arguments are flags. ``versions`` are defaults
    that changed between ``releases``. ``trainers`` are the patterns of the programs whose trainers the rules describe:
    any other program that gets the flags has a trainer of its own.
    """

    name: str
    title: str
    version: str
    source: str
    marks: Marks
    flags: tuple[Flag, ...]
    rules: Rules
    advice: Mapping[str, Mapping[str, Value] | str]
    hints: Marks = field(default_factory=Marks)
    config_hints: Marks = field(default_factory=Marks)
    needs_config: Marks = field(default_factory=Marks)
    own_configs: Sequence[str] = ()
    over: Sequence[str] = ()
    rl_runs: Marks = field(default_factory=Marks)
    other_runs: Sequence[OtherRun] = ()
    told_by: Mapping[str, Mapping[str, Marks]] = field(default_factory=dict)
    classes: Sequence[str] = ()
    trainers: Sequence[str] = ()
    versions: Sequence[VersionChange] = ()
    releases: Releases = field(default_factory=Releases)
    freshness: Freshness = field(default_factory=Freshness)

    @classmethod
    def load(cls, name: str) -> System:
        """Read the system's file in ``flags``."""
        data = _load_yaml(name)
        for marks in ("marks", "hints", "config_hints", "needs_config", "rl_runs"):
            data[marks] = Marks(**data.get(marks, {}))
        other_runs = []
        for run in data.get("other_runs", ()):
            other_runs.append(OtherRun(name=run.pop("name"), marks=Marks(**run)))
        data["other_runs"] = tuple(other_runs)
        told_by = {}
        for flag_name, values in data.get("told_by", {}).items():
            told_by[flag_name] = {value: Marks(**marks) for value, marks in values.items()}
        data["told_by"] = told_by
        data["versions"] = tuple(VersionChange(**change) for change in data.get("versions", ()))
        releases = data.get("releases", {})
        for end in ("until", "since"):
            releases[end] = tuple(releases.get(end, {}).items())
        data["releases"] = Releases(**releases)
        data["freshness"] = Freshness.from_plain(data["freshness"])
        flags = [_flag(flag_name, facts) for flag_name, facts in data.pop("flags").items()]
        return cls(name=name, flags=tuple(flags), **data)

    def knows(self, key: str) -> bool:
        """Whether a key that is no flag is an option by which files of this system are told.

        A key of a KL is not: it is a misspelled flag, or one of an author's own.
        """
        if KL_PART.search(key):
            return False
        lists = [self.marks.keys, self.hints.keys, self.config_hints.keys, self.rl_runs.keys, self.rl_runs.config_keys]
        for _, patterns in (*self.releases.until, *self.releases.since):
            lists.append(patterns)
        return any(re.fullmatch(pattern, key) for patterns in lists for pattern in patterns)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a system does with its flags set.

    - ``flags``: all of them, defaults included; ``given``: those of the text.
    - ``terms``: the equivalent terms; empty where no KL acts; None where none is equivalent (``instead`` then says
      what the system does).
    - ``notes``: what a user has to know beside the terms. ``no_ops``: flags that are set and have no effect.
    - ``holds_in``: the regimes in which the terms are what the system does.
    - ``policy_ratio``: the ratio with which the policy loss weights a cost inside the reward (``none``, ``token`` or
      ``sequence``). Certificates include it, and leave its clip out.
    - ``corrections``: this project's policy corrections, with options, that make its ``reinforce`` the system's policy
      loss; empty where none is stated.
    - ``switch_on``: the flags that turn the KL on, where it is off.
    - ``sampling``: what was given of the options that decide how old the samples are.
    """

    system: str
    version: str
    source: str
    text: str
    flags: Mapping[str, Value]
    given: Mapping[str, Value]
    terms: tuple[KLTerm, ...] | None
    instead: str
    notes: tuple[str, ...]
    no_ops: tuple[str, ...]
    holds_in: tuple[str, ...]
    policy_ratio: str
    corrections: Mapping[str, Mapping[str, float]]
    switch_on: Mapping[str, Value]
    sampling: Sampling = field(default_factory=Sampling)

    def certified_terms(self) -> tuple[KLTerm, ...]:
        """The terms as the policy loss leaves them: a cost inside the reward carries its ratio."""
        if self.terms is None:
            return ()
        if self.policy_ratio == "none":
            return self.terms
        terms = []
        for term in self.terms:
            if term.baseline == "before":
                # The certificate has no policy loss around the term, so the term must carry the loss's ratio itself.
                terms.append(dataclasses.replace(term, baseline="after", correction=self.policy_ratio))
            else:
                terms.append(term)
        return tuple(terms)

    def certificates(self, regimes: Sequence[str] = REGIMES) -> dict[str, Certificate]:
        """By regime, for those in which the terms hold; empty where there are no terms."""
        if not self.terms:
            return {}
        # Where a reading does not hold, a certificate of its terms would be one of something else.
        covered = [regime for regime in regimes if regime in self.holds_in]
        return {c.regime: c for c in stored_or_enumerated(self.text, self.certified_terms(), covered)}


@dataclass(frozen=True)
class Goal:
    """What a user may want: an unbiased gradient of ``target`` in ``regime``. ``recipe`` is this project's for it.

    The fields are keys of ``kl-comedy explain --format json``; ``words`` describe the goal.
    """

    name: str
    target: str
    regime: str
    recipe: str
    words: str


# The recipes are those of the advice, so that this table cannot recommend something else.
GOALS = {
    "sequence": Goal(
        name="sequence",
        target="sequence_reverse",
        regime="on_policy",
        recipe=advised("fresh_full"),
        words="the reverse KL of whole completions, on-policy",
    ),
    "off_policy": Goal(
        name="off_policy",
        target="token_reverse",
        regime="off_policy",
        recipe=advised("stale_full"),
        words="a per-token reverse KL, right on stale batches",
    ),
    "low_noise": Goal(
        name="low_noise",
        target="token_reverse",
        regime="on_policy",
        recipe=advised("stale_full"),
        words="little noise, per token, on-policy",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """How to reach one goal: ``flags`` that :func:`read` reads, or None and ``why_not``.

    A test certifies that the flags reach the goal.
    """

    goal: Goal
    flags: str | None
    why_not: str


def is_peer(text: str) -> bool:
    """Whether a text is about another system: it has a colon, or is the bare name of one."""
    return ":" in text or _system_key(text) in SYSTEMS


def find_system(name: str) -> System:
    """The system called ``name``; case and underscores do not matter. A miss names the nearest.

    >>> find_system("NeMo_RL").name
    'nemo-rl'
    """
    if _system_key(name) not in SYSTEMS:
        raise bad_value("system", name, SYSTEMS)
    return SYSTEMS[_system_key(name)]


def read(text: str) -> Reading:
    """Read ``system:key=value,...``; ``system:`` alone is the system with its defaults.

    A key may be the flag's name, an alias, or any tail of its dotted path; ``--key value`` and a lone ``--key`` (true)
    are read too. Raises :class:`UserError` for an unknown system, flag or value, or flags that the system refuses.

    >>> read("verl:use_kl_loss=true,kl_loss_type=k3+").terms[0].label()
    'k3_reverse_token in loss gradient=k2'
    """
    name, pairs = split(text)
    system = find_system(name)
    options = {option.name for option in system.freshness.options}
    given = {}
    of_samples = {}
    for key, value in resolve(system, [pair for pair in pairs if not _is_unused(system, pair[0])]).items():
        if key in options:
            of_samples[key] = value
        else:
            given[key] = value
    unused = tuple(key for key, _ in pairs if _is_unused(system, key))
    return read_flags(system, given, Sampling(given=of_samples, unused=unused))


def _is_unused(system: System, key: str) -> bool:
    """Whether a key is a known option of the system that no answer needs."""
    flags = (*system.flags, *system.freshness.options)
    return not any(flag.matches(key) for flag in flags) and system.knows(key)


def read_flags(system: System, given: Mapping[str, Value], sampling: Sampling | None = None) -> Reading:
    """Apply the rules of a system to its flags, defaults included. Raises :class:`UserError` where a rule refuses."""
    # Defaults first: what a user did not set acts too.
    flags: dict[str, Value] = {flag.name: flag.default for flag in system.flags}
    flags.update(given)
    unset_variables = dict.fromkeys(variables(system.rules))
    # In this order: a flag is never hidden by a variable or a sentence of the same name.
    result = _RuleInterpreter({**SENTENCES, **unset_variables, **flags}, system.name)
    result.apply(system.rules)
    if _has_kl_twice(result.terms):
        result.notes.append(SENTENCES["both"])
    terms = None
    if not result.instead:
        terms = tuple(result.terms)
    return Reading(
        system=system.name,
        version=system.version,
        source=system.source,
        text=render(system, given),
        flags=flags,
        given=given,
        terms=terms,
        instead=result.instead,
        notes=tuple(result.notes),
        no_ops=tuple(result.no_ops),
        holds_in=tuple(result.holds_in),
        policy_ratio=result.policy_ratio,
        corrections=result.corrections,
        switch_on=result.switch_on,
        sampling=sampling or Sampling(),
    )


def _has_kl_twice(terms: Sequence[KLTerm]) -> bool:
    """Whether one reference's KL is both in the loss and in the reward."""
    placements: dict[str, set[str]] = {}
    for term in terms:
        # NeMo-RL differentiates one KL with a weight, whose gradient is written as a term in the loss and a term in the
        # reward at the current log-probs: that is no second penalty.
        if term.placement == "loss" or term.anchor == "behaviour":
            placements.setdefault(term.reference, set()).add(term.placement)
    return any(len(places) > 1 for places in placements.values())


def switched_on(reading: Reading) -> Reading | None:
    """The same flags with the KL turned on, where it is off and a flag turns it on; else None."""
    if not reading.switch_on:
        return None
    return read_flags(SYSTEMS[reading.system], {**reading.given, **reading.switch_on}, reading.sampling)


def config_of(reading: Reading) -> dict[str, Any]:
    """The part of a config of ours that trains the KL of a reading: its terms, and the ratio of the policy loss.

    Raises :class:`UserError` where no term of ours is equivalent.
    """
    if reading.terms is None:
        raise UserError(f"no config of ours trains this KL: {reading.instead}")
    config: dict[str, Any] = {"kl": [term.to_mapping() for term in reading.terms]}
    corrections = {name: dict(options) for name, options in reading.corrections.items()}
    in_reward = any(term.baseline == "before" for term in reading.terms)
    if in_reward and not corrections and reading.policy_ratio != "none":
        # The cost is part of the returns, so it has the ratio that the policy loss gives them.
        corrections = {reading.policy_ratio: {}}
    if corrections:
        config["algorithm"] = {"policy_loss": "reinforce", "correction": corrections}
    if any(term.reference == "teacher" for term in reading.terms):
        # The user names the model; OmegaConf refuses the config until then.
        config["reference"] = {"teacher": {"source": "???"}}
    return config


def advise(system: System) -> tuple[Advice, ...]:
    """The advice of a system, in the order of :data:`GOALS`."""
    advice = []
    for name, goal in GOALS.items():
        answer = system.advice[name]
        # The system cannot reach the goal by its flags, and the file says why.
        if isinstance(answer, str):
            advice.append(Advice(goal=goal, flags=None, why_not=answer))
        else:
            advice.append(Advice(goal=goal, flags=render(system, answer), why_not=""))
    return tuple(advice)


# --- text ---------------------------------------------------------------------------------------------------------
def split(text: str) -> tuple[str, list[tuple[str, str | None]]]:
    """``system:flags`` to the system's name and pairs of key and text; None for a lone switch.

    >>> split("verl: use_kl_loss=true, kl_loss_type = k3")
    ('verl', [('use_kl_loss', 'true'), ('kl_loss_type', 'k3')])
    >>> split("openrlhf:--algo.kl.use_loss --algo.kl.estimator k3")
    ('openrlhf', [('algo.kl.use_loss', None), ('algo.kl.estimator', 'k3')])
    """
    if len(text) > MAX_FLAGS:
        raise UserError(f"flags of {len(text):,} characters; allowed: at most {MAX_FLAGS:,} (a file may hold more)")
    system, _, rest = text.partition(":")
    system = system.strip()
    pairs: list[tuple[str, str | None]] = []
    # Spaces around an equals sign are dropped first, so that `key = value` is one word of the split. The lookbehind
    # lets a run of spaces match once: without it, the time would grow with the square of the run.
    words = re.sub(r"(?<!\s)\s*=\s*", "=", rest).replace(",", " ").split()
    for word in words:
        key, equals, value = word.partition("=")
        follows_lone_key = bool(pairs) and pairs[-1][1] is None
        if equals:
            pairs.append((flag_key(key), value))
        elif word.startswith("--"):
            pairs.append((flag_key(key), None))
        elif follows_lone_key:
            lone_key, _ = pairs.pop()
            pairs.append((lone_key, word))
        else:
            raise bad_value(system, word, "key=value, --key value or --switch, with commas or spaces between")
    return system, pairs


def resolve(system: System, pairs: Sequence[tuple[str, str | None]]) -> dict[str, Value]:
    """The values of the flags that were given, by name. Raises :class:`UserError` for a wrong key or value."""
    given: dict[str, Value] = {}
    for key, text in pairs:
        flag = _find_flag(system, key, text)
        # Systems differ in which of two values wins; so neither is guessed.
        if flag.name in given:
            raise UserError(f"{system.name}.{key}: given twice (flag {flag.where})")
        given[flag.name] = flag.parse(text, f"{system.name}.{key}")
    return given


def render(system: System, given: Mapping[str, Value]) -> str:
    """Values back to the text that :func:`read` reads, with the system's own paths."""
    paths = {flag.name: flag.where for flag in system.flags}
    settings = [f"{paths[name]}={format_value(value)}" for name, value in given.items()]
    return f"{system.name}:{','.join(settings)}"


def _find_flag(system: System, key: str, text: str | None) -> Flag:
    """The flag that ``key`` means. Raises :class:`UserError` for none and for several; ``text`` is for the message."""
    full_key = f"{system.name}.{key}"
    flags = (*system.flags, *system.freshness.options)
    matching = [flag for flag in flags if key == flag.name]
    if not matching:
        matching = [flag for flag in flags if flag.matches(key)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        paths = ", ".join(flag.where for flag in matching)
        raise bad_value(full_key, "the bare key", paths, "several flags end like this")

    # A known name under another path: the place is wrong and not the spelling.
    _, dot, last_part = key.rpartition(".")
    # With a dot only: a bare name that fits is not misplaced.
    misplaced = [flag.where for flag in flags if dot and flag.matches(last_part)]
    if misplaced:
        raise UserError(f"{full_key}: no such key (given {shown(text)}); the flag is at {' or '.join(misplaced)}")
    given = "true" if text is None else text
    raise unknown_key(full_key, given, [flag.name for flag in flags])


def flag_of_key(flags: Sequence[Flag], key: str) -> Flag | None:
    """The flag that a key of a file means: its name, its path (perhaps under a root), or a tail of two components."""
    _, dot, last_part = key.rpartition(".")
    exact: list[Flag] = []
    tail: list[Flag] = []
    nested: list[Flag] = []
    for flag in flags:
        if _is_exact(flag, key):
            exact.append(flag)
        if dot and f".{flag_key(flag.where)}".endswith(f".{key}"):
            tail.append(flag)
        # A flag without a path, or an older bare name of one, in a file that has sections.
        is_bare = "." not in flag.where and last_part == flag.name
        if dot and (is_bare or last_part in flag.aliases):
            nested.append(flag)
    # From the surest to the least sure; several that fit equally well are none.
    for matches in (exact, tail, nested):
        if len(matches) == 1:
            return matches[0]
    return None


def _is_exact(flag: Flag, key: str) -> bool:
    """Whether a key is a flag's name, an alias, or one of its paths, perhaps under a root of the file's own."""
    if key == flag.name or key in flag.aliases:
        return True
    paths = [flag.where]
    for alias in flag.aliases:
        if "." in alias:
            paths.append(alias)
    return any(f".{key}".endswith(f".{flag_key(path)}") for path in paths)


def flag_key(key: str) -> str:
    """``--kl-loss-type`` and ``+kl_loss_type`` are ``kl_loss_type``."""
    return key.strip("\"' ").lstrip("-+").replace("-", "_")


def _system_key(name: str) -> str:
    return name.strip().rstrip(":").lower().replace("_", "-")


# --- rules --------------------------------------------------------------------------------------------------------
@dataclass
class _RuleInterpreter:
    """Applies the rules of one system. ``values`` are flags, variables and sentences by name; the rest is collected."""

    values: dict[str, Any]
    system: str
    terms: list[KLTerm] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    no_ops: list[str] = field(default_factory=list)
    switch_on: dict[str, Value] = field(default_factory=dict)
    policy_ratio: str = "none"
    corrections: dict[str, dict[str, float]] = field(default_factory=dict)
    holds_in: Sequence[str] = REGIMES
    instead: str = ""

    def apply(self, rules: Rules) -> bool:
        """Apply rules in order. Returns False where one of them ends the reading."""
        for rule in rules:
            if not self._applies(rule):
                continue
            # The order is that of EFFECTS: terms and notes read variables that the same rule sets.
            for name, value in rule.get("set", {}).items():
                self.values[name] = self._value(value)
            self._collect(rule)
            if "refuse" in rule:
                raise UserError(f"{self.system}: {rule['refuse']}")
            continues = self.apply(rule.get("rules", ()))
            if not continues:
                return False
            self.instead = self._value(rule.get("instead", ""))
            if self.instead or rule.get("stop"):
                return False
        return True

    def _collect(self, rule: Mapping[str, Any]) -> None:
        for fields in rule.get("terms", ()):
            self.terms.append(self._term(fields))
        for text in rule.get("notes", ()):
            self.notes.append(self._value(text))
        for text in rule.get("no_ops", ()):
            self.no_ops.append(self._value(text))
        for name, value in rule.get("switch_on", {}).items():
            self.switch_on[name] = self._value(value)
        self.policy_ratio = rule.get("policy_ratio", self.policy_ratio)
        self.holds_in = rule.get("holds_in", self.holds_in)
        for name, options in rule.get("corrections", {}).items():
            # A correction's own name may be a variable: several policy losses of a system differ in it only.
            self.corrections[self._value(name)] = {key: self._value(value) for key, value in options.items()}

    def _applies(self, rule: Mapping[str, Any]) -> bool:
        return all(self._holds(name, wanted) for name, wanted in rule.get("when", {}).items())

    def _holds(self, name: str, wanted: Any) -> bool:
        """Whether a flag, a variable or ``terms`` is what one condition of a ``when`` wants."""
        value = len(self.terms) if name == "terms" else self.values[name]
        if isinstance(wanted, dict):
            # Numbers are compared, so that a rule can say: where the coefficient is not 0.
            if "above" in wanted:
                # A coefficient of none is that of the trainer.
                return value is not None and bool(value > wanted["above"])
            return not self._holds(name, wanted["not"])
        if isinstance(wanted, list):
            return value in wanted
        return bool(value == self._value(wanted))

    def _value(self, value: Any) -> Any:
        """A value of a rule with everything that stands for something else put in."""
        if isinstance(value, dict):
            # Some systems' k2 lacks the half of ours.
            if "twice" in value:
                return 2 * self.values[value["twice"]]
            selector = self.values[value["of"]]
            return value.get(selector, value.get("else"))
        if not isinstance(value, str):
            return value
        if value.startswith("$"):
            return self.values[value[1:]]
        return re.sub(r"\{(\w+)\}", lambda match: format_value(self.values[match[1]]), value)

    def _term(self, item: Mapping[str, Any]) -> KLTerm:
        fields = {name: self._value(value) for name, value in item.items()}
        if "loss" in fields:
            return KLTerm(fields.pop("loss"), placement="loss", **fields)
        if "cost" in fields:
            # After the baseline a cost stands alone, and carries the token ratio itself. Before it, the cost is part of
            # the advantage, and `policy_ratio` says with which ratio the policy loss weights that.
            correction = "token" if fields["baseline"] == "after" else "none"
            estimator = fields.pop("cost")
            return KLTerm(estimator, placement="reward", correction=correction, anchor="behaviour", **fields)
        return KLTerm(**fields)


def conditions_hold(when: Mapping[str, Any], flags: Mapping[str, Value]) -> bool:
    """Whether the conditions of a ``when`` hold with the values of the flags."""
    return _RuleInterpreter(dict(flags), "")._applies({"when": when})


def variables(rules: Rules) -> set[str]:
    """Every name that a rule sets; it is None until then."""
    names = set()
    for rule in rules:
        names.update(rule.get("set", {}))
        names |= variables(rule.get("rules", ()))
    return names


def _load_yaml(name: str) -> Any:
    path = Path(__file__).parent / "flags" / f"{name}.yaml"
    return load_yaml(path.read_text("utf-8"))


SENTENCES: dict[str, str] = _load_yaml("sentences")
SYSTEMS: dict[str, System] = {name: System.load(name) for name in NAMES}
