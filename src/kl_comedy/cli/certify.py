"""``certify --policy``: policy losses and their off-policy corrections under the oracle.

``certify``: recipes, config files, single terms or a plugin's estimator -> what they really descend.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.errors import RunFailed, UserError, bad_value, nearest, unknown_key

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.algorithm_context import Effect, Surroundings
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.kl.oracle.policy_certificate import PolicyCertificate
    from kl_comedy.objective import PolicyTerm


FIELDS = {"policy_loss": "loss", "policy_loss_options": "options", "correction": "corrections", "proximal": "proximal"}
"""Keys of a mapping after ``--policy``, as under ``algorithm`` in a config."""


def certify_policies(asked: Sequence[str], regimes: Sequence[str], format: str, plugins: Sequence[Path]) -> None:
    """Print one certificate per policy term and regime. Raises :class:`RunFailed` where a claim does not hold."""
    from kl_comedy.registry import load_plugin_file

    for file in plugins:
        load_plugin_file(file)
    from rich.console import Console
    from rich.progress import track

    from kl_comedy.kl.oracle.policy_certificate import UPDATES, certify_policy

    terms = policy_terms(asked)
    console = Console(stderr=True)
    found: list[PolicyCertificate] = []
    for name, term in track(
        terms.items(), "enumerating", console=console, transient=True, disable=not console.is_terminal
    ):
        found += certify_policy(name, term, regimes=regimes, updates=UPDATES)
    print(_rendered(found, format))
    broken = [
        f"{c.name}, {c.regime}: claims the reward gradient, and the enumerated one is {c.relative_bias:.3g} off it"
        for c in found
        if not c.kept
    ]
    if broken:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(broken))


def policy_terms(asked: Sequence[str]) -> dict[str, PolicyTerm]:
    """Names (``all``: every one), YAML mappings and config files to policy terms. Raises :class:`UserError`."""
    from kl_comedy.kl.oracle.policy_certificate import named_policy_terms
    from kl_comedy.objective import check_policy_term

    known = dict(named_policy_terms())
    found: dict[str, PolicyTerm] = {}
    for text in asked:
        if text == "all":
            found |= known
        elif text in known:
            found[text] = known[text]
        elif text.endswith((".yaml", ".yml")):
            found[text] = _of_config(Path(text))
        elif text.lstrip().startswith("{"):
            term = _of_mapping(text)
            found[term.label()] = term
        else:
            raise bad_value("--policy", text, ["all", *known])
    for term in found.values():
        check_policy_term(term)
    return found


def _of_config(path: Path) -> PolicyTerm:
    pass
    from kl_comedy.config import load_config
    from kl_comedy.objective import PolicyTerm

    config = load_config(path, [])
    refuse_dpo(str(path), config)
    return PolicyTerm.of(config.algorithm)


def _of_mapping(text: str) -> PolicyTerm:
    from omegaconf import OmegaConf

    from kl_comedy.objective import PolicyTerm

    try:
        value: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        raise UserError(f"--policy {text!r}: not a YAML mapping ({str(error).splitlines()[0]})") from None
    for name in value:
        if name not in FIELDS:
            raise unknown_key(f"--policy.{name}", value[name], list(FIELDS))
    return PolicyTerm(**{FIELDS[name]: given for name, given in value.items()})


def _rendered(found: Sequence[PolicyCertificate], format: str) -> str:
    import pandas as pd

    from kl_comedy.tracking.tables import render

    if format == "json":
        return json.dumps([c.row() for c in found], indent=1)
    if format == "csv":
        return render(pd.DataFrame([_flat(c) for c in found]), format)
    return render(pd.DataFrame([_short(c) for c in found]), format)


def _flat(c: PolicyCertificate) -> dict[str, Any]:
    row = c.row()
    return {
        **row,
        "terms": json.dumps(row["terms"]),
        "relative_bias": c.relative_bias,
        "cosine": c.cosine,
    }


def _short(c: PolicyCertificate) -> dict[str, Any]:
    return {
        "name": c.name,
        "regime": c.regime,
        "update": c.update,
        "exact": "yes" if c.exact else "no",
        "bias": "0" if c.relative_bias < 1e-9 else f"{c.relative_bias:.3g}",
        "cosine": f"{c.cosine:.2f}",
        "strength": f"{c.strength:.2f}",
        "variance": f"{c.variance:.3g}",
        "verdict": c.verdict,
    }


FORMATS = ("table", "json", "csv", "latex", "markdown")

Names = Annotated[list[str] | None, typer.Argument(help="Recipes, or YAML files: a config, or a list of terms")]
Terms = Annotated[list[str] | None, typer.Option("--term", help="One term, as '{estimator: k3, placement: loss}'")]
Estimators = Annotated[
    list[str] | None, typer.Option("--estimator", help="Every meaningful cell of an estimator, uncorrected and not")
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


@dataclass
class _Asked:
    """What is to be certified: named lists of terms, and the algorithms around some of them."""

    lists: dict[str, tuple[KLTerm, ...]] = field(default_factory=dict)
    around: dict[str, Surroundings] = field(default_factory=dict)

    def add(self, name: str, terms: Iterable[KLTerm]) -> None:
        self.lists[name] = tuple(terms)

    def add_cells(self, terms: Iterable[KLTerm], *, frozen: bool = False) -> None:
        """Single terms, those frozen at rollout only where asked for."""
        for term in terms:
            if frozen or term.anchor == "current":
                self.add(term.label(), [term])


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(certify)


def certify(
    names: Names = None,
    term: Terms = None,
    estimator: Estimators = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Every cell of the registry")] = False,
    policy: Policies = None,
    regime: Regimes = None,
    format: Annotated[str, typer.Option(help="table, json, csv, latex or markdown")] = "table",
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the bias-variance plane to this picture")] = None,
    plugin: Annotated[list[Path] | None, typer.Option("--plugin", help="A Python file that registers parts")] = None,
) -> None:
    """Say by exact enumeration what KL terms descend: target, bias, cosine, variance, in each regime.

    Without names: every recipe, or every cell of the parts that a plugin registers. Exit code 1
    when a term or an estimator claims what it does not keep.

    Example: `kl-comedy certify grpo rb/per_decision`

    Example: `kl-comedy certify --plugin my_estimator.py`

    Example: `kl-comedy certify --policy tis --policy sequence --regime off_policy`
    """
    if format not in FORMATS:
        raise bad_value("--format", format, FORMATS)
    regimes = _regimes(regime)
    if policy:
        pass

        if names or term or estimator or matrix or plot:
            raise UserError("--policy certifies against the reward gradient; ask for KL terms in a second call")
        certify_policies(policy, regimes, format, plugin or [])
        return
    asked, broken = _asked(names or [], term or [], estimator or [], matrix, plugin or [])
    from rich.console import Console
    from rich.progress import track

    from kl_comedy.kl.oracle.algorithm_context import effects
    from kl_comedy.kl.oracle.certificate import certify as certificates

    console = Console(stderr=True)
    found: list[Certificate] = []
    for name, terms in track(
        asked.lists.items(), "enumerating", console=console, transient=True, disable=not console.is_terminal
    ):
        found += certificates(name, terms, regimes=regimes)
    left = [row for name, around in asked.around.items() for row in effects(name, asked.lists[name], around)]
    print(_rendered_certifying(found, left, format))
    if plot is not None:
        from kl_comedy.lab.certificate_plot import plot_certificates

        plot_certificates(found, plot)
        console.print(f"figure: {plot}")
    broken += [_broken(certificate) for certificate in found if not certificate.kept]
    if broken:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(broken))


def _regimes(asked: list[str] | None) -> tuple[str, ...]:
    from kl_comedy.kl.oracle.enumeration import REGIMES

    for each in asked or ():
        if each not in REGIMES:
            raise bad_value("--regime", each, REGIMES)
    return tuple(asked or REGIMES)


def _asked(
    names: list[str], terms: list[str], estimators: list[str], matrix: bool, plugins: list[Path]
) -> tuple[_Asked, list[str]]:
    """What the command line asks for, and the claims of plugin estimators that are broken already."""
    from kl_comedy.config.validate import parse_record
    from kl_comedy.kl.claims import cells
    from kl_comedy.kl.oracle.estimator_claims import broken_claims
    from kl_comedy.kl.term import KLTerm
    from kl_comedy.registry import CORRECTIONS, ESTIMATORS, RECIPES, load_plugin_file

    known = {*ESTIMATORS.names(), *CORRECTIONS.names()}
    for file in plugins:
        load_plugin_file(file)
    new = [name for name in ESTIMATORS.names() if name not in known]
    ratios = [name for name in CORRECTIONS.names() if name not in known]
    asked = _Asked()
    for name in names:
        _add_name(asked, name)
    for text in terms:
        term = parse_record(KLTerm, _mapping(text), key="--term")
        asked.add(term.label(), [term])
    if not (names or terms or estimators or matrix):
        estimators = new
        for entry in () if new or ratios else RECIPES:
            asked.add(entry.name, entry.fn())
        asked.add_cells(cells(None, ratios) if ratios else ())
    if matrix or estimators:
        asked.add_cells(cells(None if matrix else estimators), frozen=matrix)
    checked = ESTIMATORS.names() if matrix else dict.fromkeys([*new, *estimators])
    return asked, [line for name in checked for line in broken_claims(ESTIMATORS.get(name))]


def _mapping(text: str) -> Any:
    from omegaconf import OmegaConf

    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except Exception as error:
        raise UserError(f"--term {text!r}: not a YAML mapping ({str(error).splitlines()[0]})") from None


def _add_name(asked: _Asked, name: str) -> None:
    """A recipe, or a file."""
    from kl_comedy.registry import RECIPES

    if name in RECIPES:
        asked.add(name, RECIPES.get(name).fn())
    elif name.endswith((".yaml", ".yml")) or Path(name).is_file():
        _add_file(asked, name)
    else:
        hint = nearest(name, RECIPES.names())
        raise UserError(
            f"{name}: neither a recipe nor a file{f'; did you mean {hint!r}?' if hint else ''} (kl-comedy list recipes)"
        )


def _add_file(asked: _Asked, name: str) -> None:
    """A whole config (its algorithm is certified around the terms too), or a bare list of terms."""
    from omegaconf import OmegaConf

    from kl_comedy.config import load_config
    from kl_comedy.kl.recipes import resolve_terms
    from kl_comedy.registry import ADVANTAGES

    path = Path(name)
    if not path.is_file():
        load_config(path, [])  # says which file was meant
    try:
        value: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except Exception as error:
        raise UserError(f"{name}: not YAML ({str(error).splitlines()[0]})") from None
    if isinstance(value, list):
        asked.add(name, resolve_terms(value, name))
        return
    config = load_config(path, [])
    refuse_dpo(name, config)
    asked.add(name, resolve_terms(config.kl))
    if not ADVANTAGES.get(config.algorithm.advantage).facts.get("critic"):  # whose values only training has
        asked.around[name] = _surroundings(config)


def refuse_dpo(name: str, config: Config) -> None:
    """Raise :class:`UserError` for a config that trains with DPO, which has nothing of what is certified."""
    if config.algorithm.dpo is not None:
        raise UserError(
            f"{name}: algorithm.dpo takes the place of the policy term and of kl, so there is no KL term and no policy "
            "term to certify; its own gradient is tested in tests/unit/test_preferences.py (docs/replay.md)"
        )


def _surroundings(config: Any) -> Surroundings:
    from kl_comedy.kl.oracle.algorithm_context import LARGEST_GROUP, Surroundings

    algorithm = config.algorithm
    return Surroundings(
        advantage=algorithm.advantage,
        policy_loss=algorithm.policy_loss,
        policy_loss_options=dict(algorithm.policy_loss_options),
        correction=dict(algorithm.correction),
        proximal=algorithm.proximal,
        group_size=min(config.rollout.group_size, LARGEST_GROUP),
        reduction="sequence_sum",
        drop_truncated=algorithm.mask_truncated,
    )


def _broken(certificate: Certificate) -> str:
    return (
        f"{certificate.name}, {certificate.regime}: claims {certificate.claimed}, and the enumerated gradient "
        f"is {certificate.relative_bias[str(certificate.claimed)]:.3g} off it (relative)"
    )


def _rendered_certifying(found: list[Certificate], left: list[Effect], format: str) -> str:
    import pandas as pd

    from kl_comedy.tracking.tables import render

    if format == "json":
        effects = {(e.name, e.regime): e.row() for e in left}
        return json.dumps([{**c.row(), "in_training": effects.get((c.name, c.regime))} for c in found], indent=1)
    rows = [_flat_certifying(c) if format == "csv" else _short_certifying(c) for c in found]
    text = render(pd.DataFrame(rows), format)
    if left and format != "csv":
        shown = [{k: _figure(v) if isinstance(v, float) else v for k, v in e.row().items()} for e in left]
        text += "\n\n" + render(pd.DataFrame(shown), format)
    return text


def _flat_certifying(c: Certificate) -> dict[str, Any]:
    row = c.row()
    biases = {f"relative_bias_{name}": value for name, value in row.pop("relative_bias").items()}
    cosines = {f"cosine_{name}": value for name, value in row.pop("cosine").items()}
    return {**row, **biases, **cosines, "terms": json.dumps(row["terms"])}


def _short_certifying(c: Certificate) -> dict[str, Any]:
    bias, cosine = c.relative_bias["sequence_reverse"], c.cosine["sequence_reverse"]
    return {
        "name": c.name,
        "regime": c.regime,
        "descends": c.target or "none",
        "bias": _figure(bias),
        "cosine": "-" if cosine != cosine else f"{cosine:.2f}",
        "noise": "-" if c.variance_ratio is None else f"{c.variance_ratio:.3g}x",
        "verdict": c.verdict,
    }


def _figure(value: float) -> str:
    """Three digits; what is zero up to rounding is 0."""
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"
