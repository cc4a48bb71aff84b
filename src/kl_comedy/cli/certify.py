"""``kl-comedy certify``: what KL terms optimize, or with ``--policy`` policy losses and corrections, by enumeration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kl_comedy.cli import certify_output as output
from kl_comedy.cli import common
from kl_comedy.cli.common import Plugins, choice_option, load, load_plugins, message, options_in_a_record, progress_bar
from kl_comedy.config.shipped import shipped_config
from kl_comedy.errors import RunFailed, UserError, bad_value, nearest, shown, unknown_key
from kl_comedy.extras import require_module
from kl_comedy.io import check_writable, parse_yaml, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from kl_comedy.config import Config
    from kl_comedy.config.schema import RolloutConfig
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext, Effect
    from kl_comedy.kl.oracle.certificate_record import Certificate
    from kl_comedy.kl.oracle.part_claims import PartsCoverage
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.kl.oracle.ranges import Ranges
    from kl_comedy.objective import PolicyTerm

Item = TypeVar("Item")
AnyCertificate = TypeVar("AnyCertificate")

TRUNCATED_VOCABULARY = 100
"""Tokens of the tree on which kept masses are shown: so many that a common top_k leaves some out."""

POLICY_FIELDS = {
    "policy_loss": "loss",
    "policy_loss_options": "options",
    "correction": "corrections",
    "proximal": "proximal",
}
"""Keys of a mapping after ``--policy``, as under ``algorithm`` in a config."""

POLICY_HELP = (
    "Instead of KL terms: a policy loss or correction, decoupled_ppo, all, a config, or "
    "'{policy_loss: reinforce, correction: {tis: {cap: 2}}}'"
)

Names = Annotated[list[str] | None, typer.Argument(help="Recipes, or YAML files: a config, or a list of terms")]
Terms = Annotated[list[str] | None, typer.Option("--term", help="One term, as '{estimator: k3, placement: loss}'")]
Estimators = Annotated[
    list[str] | None,
    typer.Option("--estimator", help="Certify every valid combination that uses this estimator"),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="Seed of the drawn settings: the same seed gives the same verdict")
]
Search = Annotated[
    float, typer.Option("--search", min=0.0, help="Seconds to search for a setting in which a claim is false")
]
Range = Annotated[
    bool,
    typer.Option(
        "--range",
        help="Error, strength and noise as ranges over 50 drawn policies of 4 and 8 tokens; "
        "off-policy also over trained ones, drawn from as they were 1, 4 and 10 updates before",
    ),
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Show every combination of a plugin or --estimator, not only main ones and failures"),
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help=POLICY_HELP)]
Regimes = Annotated[
    list[str] | None, typer.Option("--regime", help="on_policy, off_policy or mixed (default: all three)")
]


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """Options of ``kl-comedy certify``."""

    names: Names = None
    term: Terms = None
    estimator: Estimators = None
    matrix: Annotated[bool, typer.Option("--matrix", help="Every combination of the registered parts")] = False
    policy: Policies = None
    regime: Regimes = None
    format: Annotated[str, choice_option("--format", "table", "json", "csv", "latex", "markdown")] = "table"
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the bias-variance plane to this picture")] = None
    full: Full = False
    range: Range = False
    seed: Seed = 0
    search: Search = 0.0
    plugin: Plugins = None

    @property
    def regimes(self) -> tuple[str, ...]:
        """The regimes to certify in."""
        from kl_comedy.kl import REGIMES

        return tuple(self.regime or REGIMES)

    @property
    def names_terms(self) -> bool:
        """Whether any term is named; else the new parts of the plugins are meant, or all recipes."""
        return bool(self.names or self.term or self.estimator or self.matrix)


@options_in_a_record
def certify(wanted: CertifyOptions) -> None:
    """Compute the exact expected gradient of KL terms by enumeration: target, bias, cosine, variance, in each regime.

    Without names: every recipe and part, or every combination of the parts that a plugin registers. Exit code 1
    when a claim of a term or an estimator is false. The last line says what was checked, with which seed; another
    --seed draws other settings, and --search looks for one in which a claim fails.

    Example: `kl-comedy certify grpo rb/per_decision`

    Example: `kl-comedy certify grpo --regime off_policy --range`

    Example: `kl-comedy certify --plugin my_estimator.py`

    Example: `kl-comedy certify --policy tis --policy sequence --regime off_policy`
    """
    from kl_comedy.kl import REGIMES

    for name in wanted.regimes:
        common.check_choice("--regime", name, REGIMES)
    if wanted.policy:
        if wanted.range:
            raise UserError("--range is of KL terms, whose figures are against the reverse KL; leave --policy out")
        if wanted.names_terms or wanted.plot:
            raise UserError("--policy certifies against the reward gradient; ask for KL terms in a second call")
        load_plugins(wanted.plugin)
        false_claims = _certify_policies(wanted)
    else:
        if wanted.plot is not None:
            _check_plot(wanted.plot)  # before the enumeration, which takes seconds to minutes
        false_claims = _certify_terms(_requested_terms(wanted), wanted)
    if false_claims:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(false_claims))


def _check_plot(plot: Path) -> None:
    """Raise :class:`UserError` where the picture could not be drawn or written, or has an unknown format."""
    from kl_comedy.results.figures import check_suffix

    require_module("matplotlib", "--plot")
    check_suffix(plot, "--plot")
    check_writable(plot, "--plot")


def _with_progress(
    requested: Mapping[str, Item], certify_one: Callable[[str, Item], Iterable[AnyCertificate]]
) -> list[AnyCertificate]:
    """The certificates of all items, by name, with a progress bar."""
    certificates: list[AnyCertificate] = []
    with progress_bar("enumerating", len(requested)) as advance:
        for name, item in requested.items():
            certificates += certify_one(name, item)
            advance()
    return certificates


# --- which KL terms -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Request:
    """What is certified: lists of terms that act together, and parts.

    ``lists``: the terms by name. ``configs``: those that they are from, by the same name. ``estimators`` and
    ``corrections``: parts to check even if no list uses them. ``hidden``: names whose rows a table leaves out while
    their claims hold. ``is_brief``: many rows of terms that nobody named, for which a text has one line each.
    """

    lists: dict[str, tuple[KLTerm, ...]]
    configs: dict[str, Config]
    estimators: list[str]
    corrections: list[str]
    hidden: set[str] = field(default_factory=set)
    is_brief: bool = False


def _named_lists(wanted: CertifyOptions) -> tuple[dict[str, tuple[KLTerm, ...]], dict[str, Config]]:
    """The lists of terms that are named, and the configs among them. Raises :class:`UserError`."""
    from kl_comedy.config.validate import parse_record
    from kl_comedy.kl.term import KLTerm

    lists: dict[str, tuple[KLTerm, ...]] = {}
    configs: dict[str, Config] = {}
    for name in wanted.names or ():
        _add_name(name, lists, configs)
    for text in wanted.term or ():
        # Under its label, so that a term that is named twice is certified once.
        term = parse_record(KLTerm, common.parse_yaml("--term", text), key="--term")
        lists[term.label()] = (term,)
    return lists, configs


def _requested_terms(wanted: CertifyOptions) -> _Request:
    """Load the plugins, and turn what is asked into terms. Raises :class:`UserError`."""
    from kl_comedy.registry import CORRECTIONS, ESTIMATORS, RECIPES

    # A plugin does not say what it brings: that is what the tables have more of once it is loaded.
    built_in = {*ESTIMATORS.names(), *CORRECTIONS.names()}
    load_plugins(wanted.plugin)
    new_estimators = [name for name in ESTIMATORS.names() if name not in built_in]
    new_corrections = [name for name in CORRECTIONS.names() if name not in built_in]

    lists, configs = _named_lists(wanted)
    brings_new_parts = bool(new_estimators or new_corrections)
    # Whoever writes a plugin asks about its parts, and not about the recipes that come with the package.
    all_recipes = not wanted.names_terms and not brings_new_parts
    if all_recipes:
        lists |= {entry.name: entry.fn() for entry in RECIPES}

    hidden: set[str] = set()
    combinations = _combinations(wanted, new_estimators, new_corrections)
    for label, term in combinations.items():
        shown = wanted.matrix or label in lists or _is_main(term, new_corrections)
        if not shown:
            hidden.add(label)
    # After what was named: a name keeps its own terms.
    lists |= {label: (term,) for label, term in combinations.items()}

    estimators = [*new_estimators, *(wanted.estimator or ())]
    corrections = new_corrections
    if wanted.matrix or all_recipes:
        # A part that no recipe uses is checked all the same.
        estimators = ESTIMATORS.names()
        corrections = CORRECTIONS.names()
    return _Request(
        lists=lists,
        configs=configs,
        estimators=estimators,
        corrections=corrections,
        hidden=hidden,
        is_brief=brings_new_parts and not wanted.names_terms,
    )


def _combinations(
    wanted: CertifyOptions, new_estimators: Sequence[str], new_corrections: Sequence[str]
) -> dict[str, KLTerm]:
    """The valid combinations that are asked for, by label: the whole matrix, or those of some parts."""
    from kl_comedy.kl.claims import all_terms

    if wanted.matrix:
        return {term.label(): term for term in all_terms(None)}
    terms: list[KLTerm] = []
    if wanted.estimator:
        terms += all_terms(wanted.estimator)
    elif not wanted.names_terms:
        if new_corrections:
            terms += all_terms(None, new_corrections)
        if new_estimators:
            terms += all_terms(new_estimators)
    # Another anchor changes the reference of a term, not which parts it is made of: the matrix alone has those.
    return {term.label(): term for term in terms if term.anchor == "current"}


def _is_main(term: KLTerm, new_corrections: Sequence[str]) -> bool:
    """Whether a combination is one that is commonly trained: per token, uncorrected or per decision."""
    usual_credit = term.credit in (None, "to_go")
    if term.level != "token" or not usual_credit or term.gradient != "natural":
        return False
    if term.correction in new_corrections:
        return term.estimator in ("k1", "k3", "exact")
    # An exact KL at a prefix has no token of its own to correct.
    per_decision = "prefix" if term.needs == "log_ratio" else "prefix_previous"
    return term.correction in ("none", per_decision)


def _add_name(name: str, lists: dict[str, tuple[KLTerm, ...]], configs: dict[str, Config]) -> None:
    """Add a recipe, a bare list of terms, or a config and its terms."""
    from kl_comedy.kl.recipes import meant_estimator, recipe, resolve_terms
    from kl_comedy.registry import OWN_PART, RECIPES

    path = Path(name)
    if name in RECIPES:
        lists[name] = RECIPES.get(name).fn()
        return
    is_config = name.endswith((".yaml", ".yml"))
    if not is_config and not path.is_file() and shipped_config(name) is None:
        if meant_estimator(name) is not None:
            recipe(name, key="NAME")  # raises: it says what to write instead
        if ":" in name:
            raise UserError(f"{name}: the flags of another system are read by `kl-comedy explain {shown(name)}`")
        near = nearest(name, RECIPES.names())
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{name}: neither a recipe nor a file{hint} (kl-comedy list recipes; {OWN_PART})")
    if path.is_file():
        # A file is a config unless its top level is a list: a list is the value of a config's `kl`.
        content = _read_yaml(path)
        if isinstance(content, list):
            lists[name] = resolve_terms(content, name)
            return
    configs[name] = _load_without_dpo(name)
    lists[name] = resolve_terms(configs[name].kl)


def _read_yaml(path: Path) -> Any:
    try:
        return parse_yaml(read_text(path))
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not YAML ({error})") from None


def _context_of(config: Config) -> AlgorithmContext | None:
    """The algorithm around the terms of a config; None where it cannot be enumerated."""
    from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext
    from kl_comedy.registry import ADVANTAGES

    algorithm = config.algorithm
    facts = ADVANTAGES.get(algorithm.advantage).facts
    signal_only = algorithm.groups_without_signal != "keep"
    # A critic's values exist in training only, and a batch is enumerated as one group, of which none is left out.
    if facts.get("critic") or (facts.get("batch") and signal_only):
        return None
    group_size = config.rollout.group_size
    if facts.get("batch"):
        group_size *= config.rollout.prompts_per_batch // algorithm.updates_per_batch
    return AlgorithmContext(
        advantage=algorithm.advantage,
        policy_loss=algorithm.policy_loss,
        policy_loss_options=dict(algorithm.policy_loss_options),
        correction=dict(algorithm.correction),
        proximal=algorithm.proximal,
        group_size=group_size,
        # That of the objective: other reductions weight completions by their length, which is no property of the
        # terms.
        reduction="sequence_sum",
        drop_truncated=algorithm.mask_truncated,
        # Of one group, shrink and refill are the same: what it is where it has a signal.
        signal_only=signal_only,
        credit=config.environment.credit if config.environment is not None else "dialogue",
    )


def _load_without_dpo(name: str) -> Config:
    config = load(Path(name))
    if config.algorithm.dpo is not None:
        raise UserError(
            f"{name}: algorithm.dpo takes the place of the policy term and of kl, so there is no KL term and no policy "
            "term to certify (docs/replay.md)"
        )
    return config


# --- certificates of KL terms ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _TermResults:
    """What was found about the lists of terms of a request. ``ranges`` is by name and regime of a certificate."""

    certificates: Sequence[Certificate]
    checked: output.Checked
    ranges: Mapping[tuple[str, str], list[Ranges]]
    in_training: Sequence[Effect]
    """What the terms of each config do in its algorithm."""
    truncated: Mapping[str, str]
    """By name, where a sampler truncates, a line about that."""


def _certify_terms(request: _Request, wanted: CertifyOptions) -> list[str]:
    """Check the parts, print one certificate per list of terms and regime, and return the false claims."""
    # Before the terms: a part whose claim is false explains the terms that fail.
    false_claims, parts = _check_parts(request, wanted.seed)
    results = _term_results(request, wanted, parts)
    if wanted.format == "json":
        _print_json(results)
    elif wanted.format == "csv":
        _print_csv(results)
    else:
        _print_tables(results, request, wanted)
    for name, words in results.truncated.items():
        message(f"{name}: {words}")
    if wanted.plot is not None:
        from kl_comedy.cli.certify_plot import plot_certificates  # imports matplotlib

        plot_certificates(results.certificates, wanted.plot)
        message(f"figure: {wanted.plot}")
    for certificate in results.certificates:
        if certificate.false_claim is not None:
            false_claims.append(certificate.false_claim)
    return false_claims


def _term_results(request: _Request, wanted: CertifyOptions, parts: PartsCoverage) -> _TermResults:
    """The certificate of each list of terms in each regime, and what else the options ask of them."""
    from kl_comedy.kl.oracle.certificate import LONG, TREE
    from kl_comedy.kl.oracle.certificate import certify as certify_terms

    # --search is the time of the whole call: each list of terms gets the same part of it in each regime.
    searches = max(1, len(request.lists) * len(wanted.regimes))
    certificates: list[Certificate] = _with_progress(
        request.lists,
        lambda name, terms: certify_terms(
            name,
            terms,
            regimes=wanted.regimes,
            seed=wanted.seed,
            search_seconds=wanted.search / searches,
        ),
    )
    ranges: dict[tuple[str, str], list[Ranges]] = {}
    if wanted.range:
        ranges = _ranges(certificates, wanted.seed)
    in_training, truncated = _of_configs(request, wanted.regimes)
    checked = output.Checked(
        parts=parts,
        enumerated_tokens=(TREE.length, LONG.length),
        drawn=output.drawn_settings(wanted.regimes, wanted.seed),
        search_seconds=wanted.search,
        # Only of terms that hit a target: the others are not meant to be near one.
        worst_error=max((c.worst_error for c in certificates if c.target), default=0.0),
    )
    return _TermResults(
        certificates=certificates, checked=checked, ranges=ranges, in_training=in_training, truncated=truncated
    )


def _check_parts(request: _Request, seed: int) -> tuple[list[str], PartsCoverage]:
    """Check every estimator, with its options, and correction of the request: the false claims, what was covered."""
    from kl_comedy.kl.oracle.part_claims import check_parts

    options: dict[str, list[Mapping[str, Any]]] = {name: [] for name in request.estimators}
    corrections = dict.fromkeys(request.corrections)
    for terms in request.lists.values():
        for term in terms:
            # With the options of every term, since a claim may hold for the defaults only.
            options.setdefault(term.estimator, []).append(term.options)
            corrections[term.correction] = None
    return check_parts(options, corrections, seed=seed)


def _ranges(certificates: Sequence[Certificate], seed: int) -> dict[tuple[str, str], list[Ranges]]:
    """The ranges of each certificate, by its name and regime."""
    from kl_comedy.kl.oracle.ranges import all_ranges

    by_row = {}
    with progress_bar("drawing policies", len(certificates)) as advance:
        for certificate in certificates:
            by_row[certificate.name, certificate.regime] = all_ranges(certificate, seed=seed)
            advance()
    return by_row


def _of_configs(request: _Request, regimes: Sequence[str]) -> tuple[list[Effect], dict[str, str]]:
    """What the terms of each config do in its algorithm; and by name, where a sampler truncates, a line about that."""
    from kl_comedy.kl.oracle.algorithm_context import effects

    in_training: list[Effect] = []
    truncated: dict[str, str] = {}
    for name, config in request.configs.items():
        terms = request.lists[name]
        context = _context_of(config)
        if context is not None:
            in_training += effects(name, terms, context)
        if config.rollout.truncation.is_on:
            truncated[name] = _truncation_words(terms, config.rollout, regimes)
    return in_training, truncated


def _truncation_words(terms: Sequence[KLTerm], rollout: RolloutConfig, regimes: Sequence[str]) -> str:
    """What the terms of a config are where its sampler truncates, and how much is kept, in a line."""
    from kl_comedy.kl.claims import TRUNCATED_WORDS, verdict
    from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree
    from kl_comedy.rollouts import sampling_from
    from kl_comedy.rollouts.decoding import warpers

    meanings = []
    for position, term in enumerate(terms):
        of_term = [f"{regime.replace('_', '-')} {verdict(term, regime, truncated=True)}" for regime in regimes]
        meanings.append(f"kl.{position} is then {', '.join(of_term)}")
    sampling = sampling_from(rollout)

    def truncate(logp_NV: Tensor) -> Tensor:
        for warp in warpers(sampling):
            logp_NV = warp(None, logp_NV)
        return logp_NV

    tree = Tree.build(vocabulary=TRUNCATED_VOCABULARY, length=2)
    instance = Instance.random(tree, InstanceSettings(regime="on_policy", seed=0)).truncated(truncate)
    mass, missing = instance.kept_masses()
    setting = ", ".join(f"{name} {value:g}" for name, value in asdict(rollout.truncation).items())
    numbers = (
        f"On {TRUNCATED_VOCABULARY} enumerated tokens the sets keep {mass:.3f} of the policy's mass, the mean ratio "
        f"of a learner that does not renormalize; minus the log of the reference's mass is {missing:.3f} nats a token. "
        "Of a run these are policy/kept_mass and kl/truncation_token"
    )
    whole = "The rows above are of a sampler that keeps all tokens"
    return f"rollout.truncation ({setting}): {TRUNCATED_WORDS}. {'; '.join(meanings)}. {numbers}. {whole}"


def _print_json(results: _TermResults) -> None:
    effect_rows = {(effect.name, effect.regime): effect.row() for effect in results.in_training}
    checked_row = results.checked.row()
    rows = []
    for certificate in results.certificates:
        effect_row = effect_rows.get((certificate.name, certificate.regime))
        # In every row, though it is the same: a row is often all that is kept of a call.
        row = {**certificate.row(), "in_training": effect_row, "checked": checked_row}
        if certificate.name in results.truncated:
            row["truncation"] = results.truncated[certificate.name]
        spans = results.ranges.get((certificate.name, certificate.regime))
        if spans is not None:
            row["range"] = [asdict(of_age) for of_age in spans]
        rows.append(row)
    print(json.dumps(rows, indent=1))


def _print_csv(results: _TermResults) -> None:
    rows = []
    for certificate in results.certificates:
        row = output.term_csv_row(certificate)
        # One row for each age of the sampler; without --range the row as it is.
        spans = results.ranges.get((certificate.name, certificate.regime), [])
        rows += [row | output.range_csv_cells(of_age) for of_age in spans] or [row]
    output.print_table(rows, "csv")
    message(output.checked_sentence(results.checked))  # to stderr: stdout stays a table that a program can read


def _print_tables(results: _TermResults, request: _Request, wanted: CertifyOptions) -> None:
    """Print the main certificates, or all of them with ``--full``, and what they become in the algorithms of configs.

    A claim that fails is shown whether its row is a main one or not.
    """
    hidden = set() if wanted.full else request.hidden
    shown = [c for c in results.certificates if c.name not in hidden or not c.claim_holds]
    is_brief = request.is_brief and wanted.format in ("text", "table")
    if shown:
        _print_certificates(shown, results, wanted.format, is_brief=is_brief)
    if results.in_training:
        print()
        rows = [output.rounded(effect.row()) for effect in results.in_training]
        output.print_table(rows, wanted.format, [output.STRENGTH_LEGEND])


def _print_certificates(shown: Sequence[Certificate], results: _TermResults, format: str, *, is_brief: bool) -> None:
    """Print the certificates ``shown`` of all, one row each."""
    ranges = results.ranges
    total = len(results.certificates)
    notes = [output.TERM_LEGEND]
    row_of = output.term_table_row
    if is_brief:
        row_of = output.term_brief_row
    if is_brief and not ranges:
        notes.append(output.BRIEF_LEGEND)
    rows = [row_of(certificate) for certificate in shown]
    if ranges:
        rows = []
        for certificate in shown:
            spans = ranges[certificate.name, certificate.regime]
            rows += [output.range_table_row(certificate, of_age) for of_age in spans]
        notes[0] = output.range_legend(ranges.values())
    if any(certificate.kind is not None for certificate in shown):
        notes.append(output.KIND_LEGEND)
    if not is_brief and len(shown) == total:
        notes += output.pull_notes(shown)
    if len(shown) < total:
        notes.append(f"{len(shown)} of {total} rows: the main ones and the failures; --full prints all")
    notes.append(output.checked_sentence(results.checked))
    output.print_table(rows, format, notes)


# --- policy terms ---------------------------------------------------------------------------------------------------
def _certify_policies(wanted: CertifyOptions) -> list[str]:
    """Print one certificate per policy term and regime; return the false claims."""
    from kl_comedy.kl.oracle.certificate import LONG, TREE
    from kl_comedy.kl.oracle.policy_certificate import UPDATES, certify_policy

    certificates: list[PolicyCertificate] = _with_progress(
        _policy_terms(wanted.policy or ()),
        lambda name, term: certify_policy(name, term, regimes=wanted.regimes, updates=UPDATES, seed=wanted.seed),
    )
    if wanted.format == "json":
        print(json.dumps([certificate.row() for certificate in certificates], indent=1))
    elif wanted.format == "csv":
        output.print_table([output.policy_csv_row(certificate) for certificate in certificates], "csv")
    else:
        drawn = output.drawn_settings(wanted.regimes, wanted.seed)
        checked = (
            f"checked (seed {wanted.seed}): gradients enumerated in float64 over {TREE.length} and {LONG.length} "
            f"tokens, {output.drawn_sentence(drawn)}"
        )
        rows = [output.policy_table_row(certificate) for certificate in certificates]
        output.print_table(rows, wanted.format, [output.POLICY_LEGEND, checked])
    return [_false_policy_claim(certificate) for certificate in certificates if not certificate.claim_holds]


def _false_policy_claim(certificate: PolicyCertificate) -> str:
    if certificate.missed_in:
        difference = f"not it in a drawn setting: {certificate.missed_in}"
    else:
        difference = f"{certificate.relative_bias:.3g} off it"
    claim = "claims the reward gradient, and the enumerated one is"
    return f"{certificate.name}, {certificate.regime}: {claim} {difference}"


def _policy_terms(requested: Sequence[str]) -> dict[str, PolicyTerm]:
    """Names (``all``: every one), YAML mappings and config files to policy terms. Raises :class:`UserError`."""
    from kl_comedy.kl.oracle.policy_certificate import named_policy_terms
    from kl_comedy.objective import PolicyTerm, check_policy_term
    from kl_comedy.registry import OWN_PART

    known = dict(named_policy_terms())
    terms: dict[str, PolicyTerm] = {}
    for text in requested:
        if text == "all":
            terms |= known
        elif text in known:
            terms[text] = known[text]
        elif text.endswith((".yaml", ".yml")):
            terms[text] = PolicyTerm.of(_load_without_dpo(text).algorithm)
        elif text.lstrip().startswith("{"):
            term = _parse_policy_term(text)
            terms[term.label()] = term
        else:
            raise bad_value("--policy", text, ["all", *known], OWN_PART)
    # All of them before the first is enumerated, so that a mistake is not reported after seconds of work.
    for term in terms.values():
        check_policy_term(term)
    return terms


def _parse_policy_term(text: str) -> PolicyTerm:
    """A policy term from a YAML mapping with the keys of a config's ``algorithm``. Raises :class:`UserError`."""
    from kl_comedy.objective import PolicyTerm

    fields = common.parse_yaml("--policy", text)
    for name in fields:
        if name not in POLICY_FIELDS:
            raise unknown_key(f"--policy.{name}", fields[name], list(POLICY_FIELDS))
    return PolicyTerm(**{POLICY_FIELDS[name]: value for name, value in fields.items()})
