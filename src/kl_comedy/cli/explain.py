"""``explain``: a recipe of ours, or the KL flags of another system, in words, numbers and flags that do better."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.cli.catalog import FormatOption, check_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.lab.peers import Advice, Reading


def mount(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(explain)


def explain(
    what: Annotated[
        list[str], typer.Argument(help="A recipe (kl-comedy list recipes) or SYSTEM:FLAGS (kl-comedy list peers)")
    ],
    format: FormatOption = "table",
) -> None:
    """Say what a recipe, or the KL flags of another system, descend, on- and off-policy; and which flags would.

    Example: `kl-comedy explain grpo`

    Example: `kl-comedy explain "verl:use_kl_loss=true,kl_loss_type=low_var_kl"`
    """
    check_format(format)
    from kl_comedy.lab.peers import is_peer

    text = " ".join(what)
    if is_peer(text):
        _explain_peer(text, format)
    else:
        _explain_recipe(text, format)


# --- a recipe -------------------------------------------------------------------------------------------------
def _explain_recipe(name: str, format: str) -> None:
    from kl_comedy.errors import bad_value
    from kl_comedy.kl import verdict
    from kl_comedy.kl.oracle.certificate import certify
    from kl_comedy.registry import RECIPES

    if name not in RECIPES:
        raise bad_value("RECIPE", name, sorted(RECIPES.names()), "or flags, as verl:use_kl_loss=true (list peers)")
    terms: tuple[KLTerm, ...] = RECIPES.get(name).fn()
    found = certify(name, terms) if terms else []
    rows = [
        {"term": term.label(), "beta": str(term.beta), **{r: verdict(term, r) for r in ("on_policy", "off_policy")}}
        for term in terms
    ]
    if format == "json":
        print(json.dumps({"recipe": name, "terms": rows, "certificates": [c.row() for c in found]}, indent=1))
        return
    console = Console()
    if not terms:
        console.print(f"{name}: no KL term")
        return
    table = Table("term", "beta", "on-policy it has", "off-policy it has", title=name)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print(_numbers(found))


# --- another system's flags -------------------------------------------------------------------------------------
def _explain_peer(text: str, format: str) -> None:
    from kl_comedy.lab.peers import advise, find_system, read, switched_on

    reading = read(text)
    other = switched_on(reading)
    advice = advise(find_system(reading.system))
    if format == "json":
        plain = {**_plain(reading), "switched_on": _plain(other) if other else None, "advice": _advice_rows(advice)}
        print(json.dumps(plain, indent=1))
        return
    console = Console()
    _show(reading, console)
    if other is not None:
        _say(console, f"\nSwitched on, as {other.text}:")
        _show(other, console, head=False)
    _show_advice(advice, console)


def _show(reading: Reading, console: Console, *, head: bool = True) -> None:
    if head:
        _say(console, f"{reading.text}  ({reading.system} {reading.version})", style="bold")
    if reading.terms is None:
        _say(console, f"No term of ours says it. What it does: {reading.instead}.")
    elif not reading.terms:
        _say(console, "No KL: nothing holds the policy to a reference.")
    else:
        words = " + ".join(f"{term.label()}, beta {term.beta:g}" for term in reading.terms)
        _say(console, f"It is: {words}")
        certificates = list(reading.certificates().values())
        console.print(_numbers(certificates))
        for found in certificates:
            _say(console, f"{_dashed(found.regime)}: {found.verdict}")
        missing = _not_certified(reading)
        if missing:
            _say(console, f"{missing}: no term of ours says what happens there")
    _list(console, "Notes", reading.notes)
    _list(console, "Does nothing", reading.no_ops)
    if reading.terms:
        _say(console, "In our config:")
        _say(console, _yaml(reading.terms))


def _show_advice(advice: Iterable[Advice], console: Console) -> None:
    """Whole lines, so that flags can be copied."""
    _say(console, "\nIf you want")
    for each in advice:
        _say(console, f"  {each.goal.words}:")
        _say(
            console,
            f"    set   {each.flags}   (noise {_advised_noise(each)})" if each.flags else f"    -     {each.why_not}",
        )
        _say(console, f"    ours  kl: {each.goal.recipe}")


def _numbers(certificates: Sequence[Certificate]) -> Table:
    """Regime by regime: the target, and how far the expected gradient is from that of the whole completion's KL."""
    table = Table("regime", "descends", "off the sequence-level reverse KL", "cosine", "noise")
    for found in certificates:
        table.add_row(_dashed(found.regime), *_cells(found))
    return table


def _cells(found: Certificate) -> tuple[str, str, str, str]:
    if all(term.reference == "sampler" for term in found.terms):
        return "towards the sampler", "-", "-", "-"
    words = found.target or (f"{found.near_target}, while no bound acts" if found.near_target else "no KL exactly")
    bias, cosine = found.relative_bias["sequence_reverse"], found.cosine["sequence_reverse"]
    return words, f"{bias:.0%}", "-" if cosine != cosine else f"{cosine:.2f}", _noise(found)


def _not_certified(reading: Reading) -> str:
    from kl_comedy.kl import REGIMES

    return ", ".join(_dashed(regime) for regime in REGIMES if regime not in reading.holds_in)


def _plain(reading: Reading) -> dict[str, Any]:
    """A reading with its certificates as plain data."""
    return {
        "text": reading.text,
        "system": reading.system,
        "version": reading.version,
        "source": reading.source,
        "given": dict(reading.given),
        "flags": dict(reading.flags),
        "terms": None if reading.terms is None else [term.to_mapping() for term in reading.terms],
        "yaml": _yaml(reading.terms) if reading.terms else None,
        "instead": reading.instead,
        "notes": list(reading.notes),
        "no_ops": list(reading.no_ops),
        "holds_in": list(reading.holds_in),
        "policy_ratio": reading.policy_ratio,
        "certificates": [found.row() for found in reading.certificates().values()],
    }


def _advised_noise(advice: Advice) -> str:
    from kl_comedy.lab.peers import read

    regime = advice.goal.regime
    return "-" if advice.flags is None else _noise(read(advice.flags).certificates([regime])[regime])


def _noise(found: Certificate) -> str:
    """The variance over that of the least noisy term for the same target."""
    return "-" if found.variance_ratio is None else f"{found.variance_ratio:.2g}x"


def _advice_rows(advice: Iterable[Advice]) -> list[dict[str, Any]]:
    return [
        {
            "goal": each.goal.name,
            "words": each.goal.words,
            "target": each.goal.target,
            "regime": each.goal.regime,
            "flags": each.flags,
            "why_not": each.why_not,
            "noise": _advised_noise(each),
            "recipe": each.goal.recipe,
        }
        for each in advice
    ]


def _yaml(terms: Sequence[KLTerm]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml({"kl": [term.to_mapping() for term in terms]}).rstrip()


def _list(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        _say(console, f"{title}:")
    for line in lines:
        _say(console, f"  - {line}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Text as it is, whole lines: what looks like markup is not."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _dashed(regime: str) -> str:
    return regime.replace("_", "-")


# --- what there is ------------------------------------------------------------------------------------------------
def peer_rows() -> list[dict[str, str]]:
    """Every flag of every system that ``explain`` reads, for ``kl-comedy list peers``."""
    from kl_comedy.lab.peers import SYSTEMS

    return [
        {"system": system.name, "version": system.version, **flag.row()}
        for system in SYSTEMS.values()
        for flag in system.flags
    ]
