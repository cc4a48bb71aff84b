"""``certify``: by exact enumeration, what KL terms or (``--policy``) policy losses and corrections optimize."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli import common
from kl_comedy.cli.common import Plugins, choice_option, load, load_plugins, message, progress_bar
from kl_comedy.errors import RunFailed, UserError, bad_value, nearest, unknown_key
from kl_comedy.io import parse_yaml, read_text

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.kl.oracle.part_claims import PartsCoverage
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.objective import PolicyTerm

POLICY_FIELDS = {
    "policy_loss": "loss",
    "policy_loss_options": "options",
    "correction": "corrections",
    "proximal": "proximal",
}
"""Keys of a mapping after ``--policy``, as under ``algorithm`` in a config."""

POLICY_HELP = """Instead of KL terms: a policy loss or correction, decoupled_ppo, all, a config, or
'{policy_loss: reinforce, correction: {tis: {cap: 2}}}'"""

Names = Annotated[list[str] | None, typer.Argument(help="Recipes, or YAML files: a config, or a list of terms")]
Terms = Annotated[list[str] | None, typer.Option("--term", help="One term, as '{estimator: k3, placement: loss}'")]
Estimators = Annotated[
    list[str] | None,
    typer.Option("--estimator", help="Every meaningful combination of an estimator, uncorrected and not"),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of all that is drawn: the same seed gives the same verdict")]
Search = Annotated[
    float, typer.Option("--search", min=0.0, help="Seconds for a search of settings in which a claim is false")
]
Full = Annotated[
    bool, typer.Option("--full", help="Of a plugin or --estimator: all rows, not the main ones and the failures only")
]
Policies = Annotated[list[str] | None, typer.Option("--policy", help=POLICY_HELP.replace("\n", " "))]
Regimes = Annotated[
    list[str] | None, typer.Option("--regime", help="on_policy, off_policy or mixed (default: all three)")
]


def certify(
    names: Names = None,
    term: Terms = None,
    estimator: Estimators = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every combination of the registered parts")] = False,
    policy: Policies = None,
    regime: Regimes = None,
    format: Annotated[str, choice_option("--format", "table", "json", "csv", "latex", "markdown")] = "table",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the bias-variance plane to this picture")] = None,
    full: Full = False,
    seed: Seed = 0,
    search: Search = 0.0,
    plugin: Plugins = None,
) -> None:
    """Compute by exact enumeration which gradient KL terms have: target, bias, cosine, variance, in each regime.

    Without names: every recipe and part, or every combination of the parts that a plugin registers. Exit code 1
    when a claim of a term or an estimator is false. The last line says what was checked, with which seed; another
    --seed draws other settings, and --search looks for one in which a claim fails.

    Example: `kl-comedy certify grpo rb/per_decision`

    Example: `kl-comedy certify --plugin my_estimator.py`

    Example: `kl-comedy certify --policy tis --policy sequence --regime off_policy`
    """
    from kl_comedy.kl import REGIMES

    for each in regime or ():
        common.check_choice("--regime", each, REGIMES)
    regimes = tuple(regime or REGIMES)
    if policy and (names or term or estimator or matrix or plot):
        raise UserError("--policy certifies against the reward gradient; ask for KL terms in a second call")
    if policy:
        load_plugins(plugin)
        false_claims = _certify_policies(policy, regimes, format, seed)
    else:
        request = _requested_terms(names or [], term or [], estimator or [], matrix, plugin or [])
        false_claims = _certify_terms(request, regimes, _Output(format=format, plot=plot, full=full), seed, search)
    if false_claims:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(false_claims))


def _enumerate(requested: Mapping[str, Any], certify: Callable[[str, Any], Iterable[Any]]) -> list[Any]:
    """The certificates of all that was requested, by name, behind a progress bar."""
    certificates: list[Any] = []
    with progress_bar("enumerating", len(requested)) as advance:
        for name, item in requested.items():
            certificates += certify(name, item)
            advance()
    return certificates


# --- KL terms -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Request:
    """Lists of terms by name, the algorithms around those of configs, further estimators and corrections to check.

    ``hidden``: names whose rows a table leaves out while their claims hold.
    """

    lists: dict[str, tuple[KLTerm, ...]]
    contexts: dict[str, AlgorithmContext]
    estimators: list[str]
    corrections: list[str]
    hidden: set[str] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class _Output:
    format: str
    plot: Path | None
    full: bool


@dataclass(frozen=True, kw_only=True)
class _DrawnSettings:
    """How many settings are drawn per regime, and the least and the largest of what they have."""

    number: int
    spans: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What a call checked; ``worst_error``: the largest error of a target that is hit."""

    parts: PartsCoverage
    enumerated_tokens: tuple[int, int]
    drawn: _DrawnSettings
    search_seconds: float
    worst_error: float

    def row(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **asdict(self.parts),
            "enumerated_tokens": self.enumerated_tokens,
            "drawn_settings": self.drawn.number,
            "drawn": self.drawn.spans,
            "search_seconds": self.search_seconds,
            "worst_error": self.worst_error,
        }


def _certify_terms(request: _Request, regimes: Sequence[str], output: _Output, seed: int, search: float) -> list[str]:
    """Check the parts, print one certificate per list of terms and regime; return the false claims."""
    from kl_comedy.kl.oracle.algorithm_context import effects
    from kl_comedy.kl.oracle.certificate import LONG, TREE
    from kl_comedy.kl.oracle.certificate import certify as certify_terms

    false_claims, parts = _check_parts(request, seed)
    share = search / max(1, len(request.lists) * len(regimes))
    certificates: list[Certificate] = _enumerate(
        request.lists,
        lambda name, terms: certify_terms(name, terms, regimes=regimes, seed=seed, search_seconds=share),
    )
    checked = _Checked(
        parts=parts,
        enumerated_tokens=(TREE.length, LONG.length),
        drawn=_drawn(regimes, seed),
        search_seconds=search,
        worst_error=max((c.worst_error for c in certificates if c.target), default=0.0),
    )
    in_training = [
        effect for name, context in request.contexts.items() for effect in effects(name, request.lists[name], context)
    ]
    if output.format == "json":
        by_regime = {(effect.name, effect.regime): effect.row() for effect in in_training}
        shared = {"checked": checked.row()}
        rows = [{**c.row(), "in_training": by_regime.get((c.name, c.regime)), **shared} for c in certificates]
        print(json.dumps(rows, indent=1))
    elif output.format == "csv":
        _print_table([_csv_row(c) for c in certificates], "csv")
        message(_covered(checked))
    else:
        shown = [c for c in certificates if output.full or c.name not in request.hidden or not c.claim_holds]
        notes = [TERM_LEGEND] if shown else []
        if len(shown) < len(certificates):
            notes.append(f"{len(shown)} of {len(certificates)} rows: the main ones and the failures; --full prints all")
        if shown:
            _print_table([_table_row(c) for c in shown], output.format, [*notes, _covered(checked)])
        if in_training:
            print()
            _print_table([_rounded(effect.row()) for effect in in_training], output.format, [STRENGTH_LEGEND])
    if output.plot is not None:
        from kl_comedy.lab.certificate_plot import plot_certificates

        plot_certificates(certificates, output.plot)
        message(f"figure: {output.plot}")
    for certificate in certificates:
        if certificate.false_claim is not None:
            false_claims.append(certificate.false_claim)
    return false_claims


def _requested_terms(
    names: list[str], terms: list[str], estimators: list[str], matrix: bool, plugins: list[Path]
) -> _Request:
    from kl_comedy.config.validate import parse_record
    from kl_comedy.kl.claims import all_terms
    from kl_comedy.kl.term import KLTerm
    from kl_comedy.registry import CORRECTIONS, ESTIMATORS, RECIPES

    before = {*ESTIMATORS.names(), *CORRECTIONS.names()}
    load_plugins(plugins)
    new, new_corrections = ([name for name in kind.names() if name not in before] for kind in (ESTIMATORS, CORRECTIONS))
    lists: dict[str, tuple[KLTerm, ...]] = {}
    contexts: dict[str, AlgorithmContext] = {}
    for name in names:
        _add_name(name, lists, contexts)
    single = [parse_record(KLTerm, common.parse_yaml("--term", text), key="--term") for text in terms]
    lists |= {term.label(): (term,) for term in single}
    combinations: list[KLTerm] = []
    every_part = matrix
    if not (names or terms or estimators or matrix):
        estimators = new
        every_part = not (new or new_corrections)
        if new_corrections:
            combinations += all_terms(None, new_corrections)
        elif not new:
            lists |= {entry.name: entry.fn() for entry in RECIPES}
    if matrix or estimators:
        combinations += all_terms(None if matrix else estimators)
    by_label = {term.label(): term for term in combinations if matrix or term.anchor == "current"}
    hidden = {
        label for label, term in by_label.items() if not (matrix or label in lists or _is_main(term, new_corrections))
    }
    lists |= {label: (term,) for label, term in by_label.items()}
    return _Request(
        lists=lists,
        contexts=contexts,
        estimators=ESTIMATORS.names() if every_part else [*new, *estimators],
        corrections=CORRECTIONS.names() if every_part else new_corrections,
        hidden=hidden,
    )


def _is_main(term: KLTerm, new_corrections: Sequence[str]) -> bool:
    """Whether a combination is one that is commonly trained: per token, uncorrected or per decision."""
    usual = term.level == "token" and term.credit in (None, "to_go") and term.gradient == "natural"
    if term.correction in new_corrections:
        return usual and term.estimator in ("k1", "k3", "exact")
    return usual and term.correction in ("none", "prefix" if term.needs == "log_ratio" else "prefix_previous")


def _check_parts(request: _Request, seed: int) -> tuple[list[str], PartsCoverage]:
    """Check every estimator, with its options, and correction of the request: the false claims, what was covered."""
    from kl_comedy.kl.oracle.part_claims import check_parts

    options: dict[str, list[Mapping[str, Any]]] = {name: [] for name in request.estimators}
    corrections = dict.fromkeys(request.corrections)
    for term in (term for terms in request.lists.values() for term in terms):
        options.setdefault(term.estimator, []).append(term.options)
        corrections[term.correction] = None
    return check_parts(options, corrections, seed=seed)


def _covered(checked: _Checked) -> str:
    """What was checked, in a sentence."""
    sentences = [*_estimators_covered(checked.parts), *_corrections_covered(checked.parts)]
    sentences.append(
        f"gradients enumerated in float64 over {_listed(checked.enumerated_tokens)} tokens, {_in_drawn(checked.drawn)}"
        f": largest error of a target that is hit {checked.worst_error:.1g}"
    )
    if checked.search_seconds:
        sentences.append(f"searched for {checked.search_seconds:g} s")
    return f"checked (seed {checked.parts.seed}): " + "; ".join(sentences)


def _estimators_covered(parts: PartsCoverage) -> list[str]:
    """The log-ratios, the distributions of top-k estimators, and the options."""
    low, high = parts.log_ratios
    dtypes = " and ".join(parts.dtypes)
    by_log_ratio = {name: covered.float32 for name, covered in parts.estimators.items() if covered.float32 is not None}
    overflows: dict[str, list[str]] = {}
    for name, (smallest, largest) in by_log_ratio.items():
        if smallest not in (low, 0.0):  # an exact KL begins at 0
            overflows.setdefault(f"below {smallest:.1f}", []).append(name)
        if largest != high:
            overflows.setdefault(f"above {largest:.1f}", []).append(name)
    sentences = []
    if by_log_ratio:
        sentences = [f"estimators at {parts.points:,} log-ratios from {low:g} to {high:g} nats in {dtypes}"]
    if overflows:
        places = ", ".join(f"{where}: {', '.join(names)}" for where, names in overflows.items())
        sentences[0] += f" (float32 overflows {places})"
    for name, covered in parts.estimators.items():
        if covered.distributions:
            sentences.append(f"{name} on {covered.distributions} distributions of {covered.vocabulary} tokens")
        for option, values in covered.options.items():
            texts = [value if isinstance(value, str) else f"{value:.3g}" for value in values]
            sentences.append(f"{name} with {option} = {', '.join(texts)}")
    return sentences


def _corrections_covered(parts: PartsCoverage) -> list[str]:
    """The lengths of the completions in which corrections were checked."""
    lengths = {length: None for covered in parts.corrections.values() for length in covered.tokens}
    if not lengths:
        return []
    largest = max(covered.float32[1] for covered in parts.corrections.values())
    return [f"corrections over {_listed(lengths)} tokens (in float32 up to {largest:g} nats)"]


def _drawn(regimes: Sequence[str], seed: int) -> _DrawnSettings:
    """How many settings are drawn per regime, and what they cover."""
    from kl_comedy.kl.oracle.certificate import battery
    from kl_comedy.kl.oracle.drawn import coverage

    instances = [each.instance for regime in regimes for each in battery(regime, seed=seed) if each.setting]
    return _DrawnSettings(number=len(instances) // len(regimes), spans=coverage(instances))


def _in_drawn(drawn: _DrawnSettings) -> str:
    texts = {name: f"{low:g} to {high:g}" for name, (low, high) in drawn.spans.items()}
    return (
        f"and in {drawn.number} drawn settings per regime (vocabulary {texts['vocabulary']}, {texts['steps']} steps, "
        f"log-ratios {texts['log_ratios']} nats, token log-probs from {drawn.spans['log_probs'][0]:.3g}; 1e4 nats "
        "stand for a token that is impossible under the reference)"
    )


def _listed(items: Iterable[object]) -> str:
    *others, last = map(str, items)
    return f"{', '.join(others)} and {last}" if others else last


def _add_name(name: str, lists: dict[str, tuple[KLTerm, ...]], contexts: dict[str, AlgorithmContext]) -> None:
    """Add a recipe, a bare list of terms, or a config (whose algorithm is certified around its terms too)."""
    from kl_comedy.kl.oracle.algorithm_context import LARGEST_GROUP, AlgorithmContext
    from kl_comedy.kl.recipes import resolve_terms
    from kl_comedy.registry import ADVANTAGES, OWN_PART, RECIPES

    path = Path(name)
    if name in RECIPES:
        lists[name] = RECIPES.get(name).fn()
        return
    if not name.endswith((".yaml", ".yml")) and not path.is_file():
        near = nearest(name, RECIPES.names())
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{name}: neither a recipe nor a file{hint} (kl-comedy list recipes; {OWN_PART})")
    if path.is_file():
        try:
            content = parse_yaml(read_text(path))
        except (ValueError, OSError) as error:
            raise UserError(f"{path}: not YAML ({error})") from None
        if isinstance(content, list):
            lists[name] = resolve_terms(content, name)
            return
    config = _load_without_dpo(name)
    algorithm = config.algorithm
    lists[name] = resolve_terms(config.kl)
    if not ADVANTAGES.get(algorithm.advantage).facts.get("critic"):  # a critic's values exist in training only
        contexts[name] = AlgorithmContext(
            advantage=algorithm.advantage,
            policy_loss=algorithm.policy_loss,
            policy_loss_options=dict(algorithm.policy_loss_options),
            correction=dict(algorithm.correction),
            proximal=algorithm.proximal,
            group_size=min(config.rollout.group_size, LARGEST_GROUP),
            reduction="sequence_sum",
            drop_truncated=algorithm.mask_truncated,
        )


def _csv_row(c: Certificate) -> dict[str, Any]:
    row = c.row()
    for measure in ("relative_bias", "cosine"):
        row |= {f"{measure}_{name}": value for name, value in row.pop(measure).items()}
    return {**row, "terms": json.dumps(row["terms"])}


def _table_row(c: Certificate) -> dict[str, Any]:
    bias, cosine = c.relative_bias["sequence_reverse"], c.cosine["sequence_reverse"]
    return {
        "name": c.name,
        "regime": c.regime,
        "optimizes": c.target or "none",
        "bias": _three_digits(bias),
        "cosine": "-" if cosine != cosine else f"{cosine:.2f}",
        "noise": "-" if c.variance_ratio is None else f"{c.variance_ratio:.3g}x",
        "verdict": c.verdict,
    }


# --- policy terms ---------------------------------------------------------------------------------------------------
def _certify_policies(requested: Sequence[str], regimes: Sequence[str], format: str, seed: int) -> list[str]:
    """Print one certificate per policy term and regime; return the false claims."""
    from kl_comedy.kl.oracle.certificate import LONG, TREE
    from kl_comedy.kl.oracle.policy_certificate import UPDATES, certify_policy

    certificates: list[PolicyCertificate] = _enumerate(
        _policy_terms(requested),
        lambda name, term: certify_policy(name, term, regimes=regimes, updates=UPDATES, seed=seed),
    )
    if format == "json":
        print(json.dumps([c.row() for c in certificates], indent=1))
    elif format == "csv":
        _print_table([_policy_csv_row(c) for c in certificates], format)
    else:
        covered = (
            f"checked (seed {seed}): gradients enumerated in float64 over {TREE.length} and {LONG.length} tokens, "
        )
        covered += _in_drawn(_drawn(regimes, seed))
        _print_table([_policy_table_row(c) for c in certificates], format, [POLICY_LEGEND, covered])
    return [
        f"{c.name}, {c.regime}: claims the reward gradient, and the enumerated one is "
        + (f"not it in a drawn setting: {c.missed_in}" if c.missed_in else f"{c.relative_bias:.3g} off it")
        for c in certificates
        if not c.claim_holds
    ]


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
            fields = common.parse_yaml("--policy", text)
            for name in fields:
                if name not in POLICY_FIELDS:
                    raise unknown_key(f"--policy.{name}", fields[name], list(POLICY_FIELDS))
            term = PolicyTerm(**{POLICY_FIELDS[name]: value for name, value in fields.items()})
            terms[term.label()] = term
        else:
            raise bad_value("--policy", text, ["all", *known], OWN_PART)
    for term in terms.values():
        check_policy_term(term)
    return terms


def _policy_csv_row(c: PolicyCertificate) -> dict[str, Any]:
    row = c.row()
    return {**row, "terms": json.dumps(row["terms"]), "relative_bias": c.relative_bias, "cosine": c.cosine}


def _policy_table_row(c: PolicyCertificate) -> dict[str, Any]:
    return {
        "name": c.name,
        "regime": c.regime,
        "update": c.update,
        "exact": "yes" if c.exact else "no",
        "bias": _three_digits(c.relative_bias),
        "cosine": f"{c.cosine:.2f}",
        "strength": f"{c.strength:.2f}",
        "variance": f"{c.variance:.3g}",
        "dropped": f"{c.dropped_share:.0%}",
        "verdict": c.verdict,
    }


# --- both ---------------------------------------------------------------------------------------------------------
TERM_LEGEND = (
    "bias, cosine: of the expected gradient, against that of the sequence-level reverse KL; noise: the variance of one "
    "completion's gradient over that of the least noisy unbiased term"
)
STRENGTH_LEGEND = (
    "strength: how much of the sequence-level reverse-KL gradient is left, the beta one gets for a beta of 1"
)
POLICY_LEGEND = (
    "bias, cosine: of the expected gradient, against the gradient of the reward; strength: how much of that is "
    "left; variance: of one completion's gradient, over its square; dropped: share of tokens without gradient"
)


def _print_table(rows: Sequence[Mapping[str, Any]], format: str, notes: Sequence[str] = ()) -> None:
    """Print rows and notes; as text, no line is wider than the terminal: long cells follow beneath their row."""
    import pandas as pd

    from kl_comedy.tracking.tables import render

    width = shutil.get_terminal_size((0, 0)).columns
    if format in ("csv", "latex", "markdown"):
        print(render(pd.DataFrame(rows), format, notes))
        return
    lines = render(pd.DataFrame(rows), format).splitlines()
    if width and max(map(len, lines)) > width:
        lines = _narrow(rows, width)
    notes = [textwrap.fill(note, width) if width else note for note in notes]
    print("\n".join([*lines, *(f"\n{note}" for note in notes)]))


def _narrow(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """The rows as text of at most ``width`` columns: names wrapped, sentences beneath their row."""
    import pandas as pd

    from kl_comedy.tracking.tables import render

    beneath = [name for name in rows[0] if name in ("verdict", "around")]
    short = [{name: value for name, value in row.items() if name not in beneath} for row in rows]
    others = render(pd.DataFrame([{**row, "name": ""} for row in short]), "table").splitlines()
    room = max(20, width - max(map(len, others)) + len("name"))
    names = [textwrap.wrap(str(row["name"]), room) for row in short]
    first = [
        {**row, "name": name[0].ljust(room if len(name) > 1 else 0)} for row, name in zip(short, names, strict=True)
    ]
    head, rule, *lines = render(pd.DataFrame(first), "table").splitlines()
    printed = [head, rule]
    for line, name, row in zip(lines, names, rows, strict=True):
        printed += [line, *name[1:]]
        for key in beneath:
            printed += textwrap.wrap(str(row[key]), width, initial_indent="    ", subsequent_indent="    ")
    return printed


def _load_without_dpo(name: str) -> Config:
    config = load(Path(name))
    if config.algorithm.dpo is not None:
        raise UserError(
            f"{name}: algorithm.dpo takes the place of the policy term and of kl, so there is no KL term and no policy "
            "term to certify (docs/replay.md)"
        )
    return config


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _three_digits(value) if isinstance(value, float) else value for name, value in row.items()}


def _three_digits(value: float) -> str:
    """Three digits; what is zero up to rounding is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"
