"""``certify``: recipes, config files, single terms or a plugin's estimator -> what they really descend."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.errors import RunFailed, UserError, bad_value, nearest

if TYPE_CHECKING:
    from kl_comedy.config import Config
    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.kl.oracle.in_training import Effect
    from kl_comedy.kl.oracle.surroundings import Surroundings

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
        from kl_comedy.cli.policy_terms import certify_policies

        if names or term or estimator or matrix or plot:
            raise UserError("--policy certifies against the reward gradient; ask for KL terms in a second call")
        certify_policies(policy, regimes, format, plugin or [])
        return
    asked, broken = _asked(names or [], term or [], estimator or [], matrix, plugin or [])
    from rich.console import Console
    from rich.progress import track

    from kl_comedy.kl.oracle.certificate import certify as certificates
    from kl_comedy.kl.oracle.in_training import effects

    console = Console(stderr=True)
    found: list[Certificate] = []
    for name, terms in track(
        asked.lists.items(), "enumerating", console=console, transient=True, disable=not console.is_terminal
    ):
        found += certificates(name, terms, regimes=regimes)
    left = [row for name, around in asked.around.items() for row in effects(name, asked.lists[name], around)]
    print(_rendered(found, left, format))
    if plot is not None:
        from kl_comedy.laboratory.certificate_plot import plot_certificates

        plot_certificates(found, plot)
        console.print(f"figure: {plot}")
    broken += [_broken(certificate) for certificate in found if not certificate.kept]
    if broken:
        raise RunFailed("claims that do not hold:\n  " + "\n  ".join(broken))


def _regimes(asked: list[str] | None) -> tuple[str, ...]:
    from kl_comedy.kl.oracle.setting import REGIMES

    for each in asked or ():
        if each not in REGIMES:
            raise bad_value("--regime", each, REGIMES)
    return tuple(asked or REGIMES)


def _asked(
    names: list[str], terms: list[str], estimators: list[str], matrix: bool, plugins: list[Path]
) -> tuple[_Asked, list[str]]:
    """What the command line asks for, and the claims of plugin estimators that are broken already."""
    import kl_comedy.training.rooms  # noqa: F401  (fills the registries)
    from kl_comedy.kl.matrix import cells
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
        term = KLTerm.from_mapping(_mapping(text), "--term")
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
    from kl_comedy.kl.oracle.in_training import LARGEST_GROUP
    from kl_comedy.kl.oracle.surroundings import Surroundings

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


def _rendered(found: list[Certificate], left: list[Effect], format: str) -> str:
    import pandas as pd

    from kl_comedy.tracking.tables import render

    if format == "json":
        effects = {(e.name, e.regime): e.row() for e in left}
        return json.dumps([{**c.row(), "in_training": effects.get((c.name, c.regime))} for c in found], indent=1)
    rows = [_flat(c) if format == "csv" else _short(c) for c in found]
    text = render(pd.DataFrame(rows), format)
    if left and format != "csv":
        shown = [{k: _figure(v) if isinstance(v, float) else v for k, v in e.row().items()} for e in left]
        text += "\n\n" + render(pd.DataFrame(shown), format)
    return text


def _flat(c: Certificate) -> dict[str, Any]:
    row = c.row()
    biases = {f"relative_bias_{name}": value for name, value in row.pop("relative_bias").items()}
    cosines = {f"cosine_{name}": value for name, value in row.pop("cosine").items()}
    return {**row, **biases, **cosines, "terms": json.dumps(row["terms"])}


def _short(c: Certificate) -> dict[str, Any]:
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
