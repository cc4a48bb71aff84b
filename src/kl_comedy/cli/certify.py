"""``certify``: by exact enumeration, what KL terms or (``--policy``) policy losses and corrections optimize."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console

from kl_comedy.cli.common import Plugins, check_choice, load, load_plugins, parse_yaml
from kl_comedy.errors import RunFailed, UserError, bad_value, nearest, unknown_key

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.algorithm_context import AlgorithmContext
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.objective import PolicyTerm

T = TypeVar("T")
FORMATS = ("table", "json", "csv", "latex", "markdown")
POLICY_FIELDS = {
    "policy_loss": "loss",
    "policy_loss_options": "options",
    "correction": "corrections",
    "proximal": "proximal",
}
"""Keys of a mapping after ``--policy``, as under ``algorithm`` in a config."""

Names = Annotated[list[str] | None, typer.Argument(help="Recipes, or YAML files: a config, or a list of terms")]
Terms = Annotated[list[str] | None, typer.Option("--term", help="One term, as '{estimator: k3, placement: loss}'")]
Estimators = Annotated[
    list[str] | None,
    typer.Option("--estimator", help="Every meaningful combination of an estimator, uncorrected and not"),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Instead of KL terms: a policy loss or correction, decoupled_ppo, all, a config, or "
        "'{policy_loss: reinforce, correction: {tis: {cap: 2}}}'",
    ),
]
Regimes = Annotated[
    list[str] | None, typer.Option("--regime", help="on_policy, off_policy or mixed (default: all three)")
]


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(certify)


def certify(
    names: Names = None,
    term: Terms = None,
    estimator: Estimators = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every combination of the registered parts")] = False,
    policy: Policies = None,
    regime: Regimes = None,
    format: Annotated[str, typer.Option(help="table, json, csv, latex or markdown")] = "table",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the bias-variance plane to this picture")] = None,
    plugin: Plugins = None,
) -> None:
    """Say by exact enumeration which gradient KL terms have: target, bias, cosine, variance, in each regime.

    Without names: every recipe, or every combination of the parts that a plugin registers. Exit code 1
    when a claim of a term or an estimator is false.

    Example: `kl-comedy certify grpo rb/per_decision`

    Example: `kl-comedy certify --plugin my_estimator.py`

    Example: `kl-comedy certify --policy tis --policy sequence --regime off_policy`
    """
    check_choice("--format", format, FORMATS)
    from kl_comedy.kl.oracle.enumeration import REGIMES

    for each in regime or ():
        check_choice("--regime", each, REGIMES)
    regimes = tuple(regime or REGIMES)
    if policy and (names or term or estimator or matrix or plot):
        raise UserError("--policy certifies against the reward gradient; ask for KL terms in a second call")
    if policy:
        load_plugins(plugin)
        false_claims = _certify_policies(policy, regimes, format)
    else:
        request, false_claims = _request(names or [], term or [], estimator or [], matrix, plugin or [])
        false_claims += _certify_terms(request, regimes, format, plot)
    if false_claims:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(false_claims))


# --- KL terms -----------------------------------------------------------------------------------------------------
@dataclass
class _Request:
    """What is to be certified: lists of terms by name, and the algorithms around some of them."""

    lists: dict[str, tuple[KLTerm, ...]] = field(default_factory=dict)
    around: dict[str, AlgorithmContext] = field(default_factory=dict)

    def add(self, name: str, terms: Iterable[KLTerm]) -> None:
        self.lists[name] = tuple(terms)

    def add_single(self, terms: Iterable[KLTerm], *, frozen: bool = False) -> None:
        """Each term alone; those frozen at rollout only with ``frozen``."""
        for term in terms:
            if frozen or term.anchor == "current":
                self.add(term.label(), [term])


def _certify_terms(request: _Request, regimes: Sequence[str], format: str, plot: Path | None) -> list[str]:
    """Print one certificate per list of terms and regime; the claims that are false."""
    from kl_comedy.kl.oracle.algorithm_context import effects
    from kl_comedy.kl.oracle.certificate import certify as certify_terms

    certificates = [
        certificate
        for name, listed in _progress(request.lists.items())
        for certificate in certify_terms(name, listed, regimes=regimes)
    ]
    in_training = [row for name, around in request.around.items() for row in effects(name, request.lists[name], around)]
    if format == "json":
        by_regime = {(effect.name, effect.regime): effect.row() for effect in in_training}
        rows = [{**c.row(), "in_training": by_regime.get((c.name, c.regime))} for c in certificates]
        print(json.dumps(rows, indent=1))
    else:
        print(_render([_csv_row(c) if format == "csv" else _table_row(c) for c in certificates], format))
        if in_training and format != "csv":
            plain = [effect.row() for effect in in_training]
            rows = [{k: _three_digits(v) if isinstance(v, float) else v for k, v in row.items()} for row in plain]
            print("\n" + _render(rows, format))
    if plot is not None:
        from kl_comedy.lab.certificate_plot import plot_certificates

        plot_certificates(certificates, plot)
        Console(stderr=True).print(f"figure: {plot}")
    return [
        f"{c.name}, {c.regime}: claims {c.claimed}, and the enumerated gradient "
        f"is {c.relative_bias[str(c.claimed)]:.3g} off it (relative)"
        for c in certificates
        if not c.claim_holds
    ]


def _request(
    names: list[str], terms: list[str], estimators: list[str], matrix: bool, plugins: list[Path]
) -> tuple[_Request, list[str]]:
    """What the command line asks for, and the claims of estimators that are false before any enumeration."""
    from kl_comedy.config.validate import parse_record
    from kl_comedy.kl.claims import all_terms
    from kl_comedy.kl.oracle.estimator_claims import broken_claims
    from kl_comedy.kl.term import KLTerm
    from kl_comedy.registry import CORRECTIONS, ESTIMATORS, RECIPES

    before = {*ESTIMATORS.names(), *CORRECTIONS.names()}
    load_plugins(plugins)
    new = [name for name in ESTIMATORS.names() if name not in before]
    new_corrections = [name for name in CORRECTIONS.names() if name not in before]
    request = _Request()
    for name in names:
        _add_name(request, name)
    for text in terms:
        term = parse_record(KLTerm, parse_yaml("--term", text), key="--term")
        request.add(term.label(), [term])
    if not (names or terms or estimators or matrix):
        estimators = new
        for entry in () if new or new_corrections else RECIPES:
            request.add(entry.name, entry.fn())
        request.add_single(all_terms(None, new_corrections) if new_corrections else ())
    if matrix or estimators:
        request.add_single(all_terms(None if matrix else estimators), frozen=matrix)
    checked = ESTIMATORS.names() if matrix else dict.fromkeys([*new, *estimators])
    return request, [line for name in checked for line in broken_claims(ESTIMATORS.get(name))]


def _add_name(request: _Request, name: str) -> None:
    """A recipe, a bare list of terms, or a config (whose algorithm is certified around its terms too)."""
    from kl_comedy.kl.recipes import resolve_terms
    from kl_comedy.registry import ADVANTAGES, RECIPES

    path = Path(name)
    if name in RECIPES:
        request.add(name, RECIPES.get(name).fn())
        return
    if not name.endswith((".yaml", ".yml")) and not path.is_file():
        hint = nearest(name, RECIPES.names())
        raise UserError(
            f"{name}: neither a recipe nor a file{f'; did you mean {hint!r}?' if hint else ''} (kl-comedy list recipes)"
        )
    terms = _bare_list(path) if path.is_file() else None
    if terms is not None:
        request.add(name, resolve_terms(terms, name))
        return
    config = load(path)
    refuse_dpo(name, config)
    request.add(name, resolve_terms(config.kl))
    if not ADVANTAGES.get(config.algorithm.advantage).facts.get("critic"):  # a critic's values exist in training only
        request.around[name] = _algorithm_context(config)


def _bare_list(path: Path) -> list[Any] | None:
    """The list in a YAML file; None where it holds something else."""
    from omegaconf import OmegaConf

    try:
        value: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:
        raise UserError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    return value if isinstance(value, list) else None


def _algorithm_context(config: Config) -> AlgorithmContext:
    from kl_comedy.kl.oracle.algorithm_context import LARGEST_GROUP, AlgorithmContext

    algorithm = config.algorithm
    return AlgorithmContext(
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
    biases = {f"relative_bias_{name}": value for name, value in row.pop("relative_bias").items()}
    cosines = {f"cosine_{name}": value for name, value in row.pop("cosine").items()}
    return {**row, **biases, **cosines, "terms": json.dumps(row["terms"])}


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
def _certify_policies(requested: Sequence[str], regimes: Sequence[str], format: str) -> list[str]:
    """Print one certificate per policy term and regime; the claims that are false."""
    from kl_comedy.kl.oracle.policy_certificate import UPDATES, certify_policy

    certificates = [
        certificate
        for name, term in _progress(policy_terms(requested).items())
        for certificate in certify_policy(name, term, regimes=regimes, updates=UPDATES)
    ]
    if format == "json":
        print(json.dumps([c.row() for c in certificates], indent=1))
    else:
        print(_render([_policy_row(c, full=format == "csv") for c in certificates], format))
    return [
        f"{c.name}, {c.regime}: claims the reward gradient, and the enumerated one is {c.relative_bias:.3g} off it"
        for c in certificates
        if not c.claim_holds
    ]


def policy_terms(requested: Sequence[str]) -> dict[str, PolicyTerm]:
    """Names (``all``: every one), YAML mappings and config files to policy terms. Raises :class:`UserError`."""
    from kl_comedy.kl.oracle.policy_certificate import named_policy_terms
    from kl_comedy.objective import PolicyTerm, check_policy_term

    known = dict(named_policy_terms())
    terms: dict[str, PolicyTerm] = {}
    for text in requested:
        if text == "all":
            terms |= known
        elif text in known:
            terms[text] = known[text]
        elif text.endswith((".yaml", ".yml")):
            config = load(Path(text))
            refuse_dpo(text, config)
            terms[text] = PolicyTerm.of(config.algorithm)
        elif text.lstrip().startswith("{"):
            term = _policy_of_mapping(parse_yaml("--policy", text))
            terms[term.label()] = term
        else:
            raise bad_value("--policy", text, ["all", *known])
    for term in terms.values():
        check_policy_term(term)
    return terms


def _policy_of_mapping(fields: Mapping[str, Any]) -> PolicyTerm:
    from kl_comedy.objective import PolicyTerm

    for name in fields:
        if name not in POLICY_FIELDS:
            raise unknown_key(f"--policy.{name}", fields[name], list(POLICY_FIELDS))
    return PolicyTerm(**{POLICY_FIELDS[name]: value for name, value in fields.items()})


def _policy_row(c: PolicyCertificate, *, full: bool) -> dict[str, Any]:
    if full:
        row = c.row()
        return {**row, "terms": json.dumps(row["terms"]), "relative_bias": c.relative_bias, "cosine": c.cosine}
    return {
        "name": c.name,
        "regime": c.regime,
        "update": c.update,
        "exact": "yes" if c.exact else "no",
        "bias": _three_digits(c.relative_bias),
        "cosine": f"{c.cosine:.2f}",
        "strength": f"{c.strength:.2f}",
        "variance": f"{c.variance:.3g}",
        "verdict": c.verdict,
    }


# --- both ---------------------------------------------------------------------------------------------------------
def refuse_dpo(name: str, config: Config) -> None:
    """Raise :class:`UserError` for a config that trains with DPO: it has no KL term and no policy term."""
    if config.algorithm.dpo is not None:
        raise UserError(
            f"{name}: algorithm.dpo takes the place of the policy term and of kl, so there is no KL term and no policy "
            "term to certify; its own gradient is tested in tests/unit/test_preferences.py (docs/replay.md)"
        )


def _progress(items: Iterable[T]) -> Iterable[T]:
    from rich.progress import track

    console = Console(stderr=True)
    return track(list(items), "enumerating", console=console, transient=True, disable=not console.is_terminal)


def _render(rows: list[dict[str, Any]], format: str) -> str:
    import pandas as pd

    from kl_comedy.tracking.tables import render

    return render(pd.DataFrame(rows), format)


def _three_digits(value: float) -> str:
    """Three digits; what is zero up to rounding is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"
