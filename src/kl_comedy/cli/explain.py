"""``explain``: a recipe of ours, or the KL flags of another system, in words, numbers and flags that do better."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.cli.common import TableOrJson, check_choice
from kl_comedy.errors import bad_value

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    format: TableOrJson = "table",
) -> None:
    """Say what a recipe, or the KL flags of another system, optimize, on- and off-policy; and which flags would.

    Example: `kl-comedy explain grpo`

    Example: `kl-comedy explain "verl:use_kl_loss=true,kl_loss_type=low_var_kl"`
    """
    check_choice("--format", format)
    from kl_comedy.lab.peers import is_peer

    text = " ".join(what)
    if is_peer(text):
        _explain_peer(text, format)
    else:
        _explain_recipe(text, format)


def _explain_recipe(name: str, format: str) -> None:
    from kl_comedy.kl import verdict
    from kl_comedy.kl.oracle.certificate import certify
    from kl_comedy.registry import RECIPES

    if name not in RECIPES:
        raise bad_value("RECIPE", name, sorted(RECIPES.names()), "or flags, as verl:use_kl_loss=true (list peers)")
    terms: tuple[KLTerm, ...] = RECIPES.get(name).fn()
    certificates = certify(name, terms) if terms else []
    rows = [
        {"term": term.label(), "beta": str(term.beta), **{r: verdict(term, r) for r in ("on_policy", "off_policy")}}
        for term in terms
    ]
    if format == "json":
        print(json.dumps({"recipe": name, "terms": rows, "certificates": [c.row() for c in certificates]}, indent=1))
        return
    console = Console()
    if not terms:
        console.print(f"{name}: no KL term")
        return
    table = Table("term", "beta", "on-policy it has", "off-policy it has", title=name)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print(_numbers(certificates))


def _explain_peer(text: str, format: str) -> None:
    from kl_comedy.lab.peers import advise, find_system, read, switched_on

    reading = read(text)
    acting = switched_on(reading)
    advice = advise(find_system(reading.system))
    if format == "json":
        rows = [_advice_row(each) for each in advice]
        plain = {**_plain(reading), "switched_on": _plain(acting) if acting else None, "advice": rows}
        print(json.dumps(plain, indent=1))
        return
    console = Console()
    _say(console, f"{reading.text}  ({reading.system} {reading.version})", style="bold")
    _show(reading, console)
    if acting is not None:
        _say(console, f"\nSwitched on, as {acting.text}:")
        _show(acting, console)
    _say(console, "\nIf you want")
    for each in advice:  # whole lines, so that flags can be copied
        flags = f"set   {each.flags}   (noise {_advised_noise(each)})" if each.flags else f"-     {each.why_not}"
        _say(console, f"  {each.goal.words}:\n    {flags}\n    ours  kl: {each.goal.recipe}")


def _show(reading: Reading, console: Console) -> None:
    from kl_comedy.kl import REGIMES

    if reading.terms is None:
        _say(console, f"No term of ours says it. What it does: {reading.instead}.")
    elif not reading.terms:
        _say(console, "No KL: nothing holds the policy to a reference.")
    else:
        _say(console, "It is: " + " + ".join(f"{term.label()}, beta {term.beta:g}" for term in reading.terms))
        certificates = list(reading.certificates().values())
        console.print(_numbers(certificates))
        for certificate in certificates:
            _say(console, f"{_dashed(certificate.regime)}: {certificate.verdict}")
        missing = [_dashed(regime) for regime in REGIMES if regime not in reading.holds_in]
        if missing:
            _say(console, f"{', '.join(missing)}: no term of ours says what happens there")
    for title, lines in (("Notes", reading.notes), ("Does nothing", reading.no_ops)):
        if lines:
            _say(console, "\n".join([f"{title}:", *(f"  - {line}" for line in lines)]))
    if reading.terms:
        _say(console, f"In our config:\n{_yaml(reading.terms)}")


def _numbers(certificates: Sequence[Certificate]) -> Table:
    """Regime by regime: the target, and how far the expected gradient is from that of the whole completion's KL."""
    table = Table("regime", "optimizes", "off the sequence-level reverse KL", "cosine", "noise")
    for c in certificates:
        if all(term.reference == "sampler" for term in c.terms):
            table.add_row(_dashed(c.regime), "towards the sampler", "-", "-", "-")
            continue
        target = c.target or (f"{c.near_target}, while no bound acts" if c.near_target else "no KL exactly")
        bias, cosine = c.relative_bias["sequence_reverse"], c.cosine["sequence_reverse"]
        table.add_row(_dashed(c.regime), target, f"{bias:.0%}", "-" if cosine != cosine else f"{cosine:.2f}", _noise(c))
    return table


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
        "certificates": [c.row() for c in reading.certificates().values()],
    }


def _advice_row(advice: Advice) -> dict[str, Any]:
    goal = advice.goal
    return {
        "goal": goal.name,
        "words": goal.words,
        "target": goal.target,
        "regime": goal.regime,
        "flags": advice.flags,
        "why_not": advice.why_not,
        "noise": _advised_noise(advice),
        "recipe": goal.recipe,
    }


def _advised_noise(advice: Advice) -> str:
    from kl_comedy.lab.peers import read

    regime = advice.goal.regime
    return "-" if advice.flags is None else _noise(read(advice.flags).certificates([regime])[regime])


def _noise(certificate: Certificate) -> str:
    """The variance over that of the least noisy term for the same target."""
    return "-" if certificate.variance_ratio is None else f"{certificate.variance_ratio:.2g}x"


def _yaml(terms: Sequence[KLTerm]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml({"kl": [term.to_mapping() for term in terms]}).rstrip()


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Print whole lines; what looks like markup is not."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _dashed(regime: str) -> str:
    return regime.replace("_", "-")
