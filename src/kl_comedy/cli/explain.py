"""``explain``: a recipe of ours, or the KL flags or a launch script of another system, and flags that do better."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kl_comedy.cli.common import Plugins, TableOrJson, load_plugins
from kl_comedy.errors import UserError, bad_value, error_prefix, shown
from kl_comedy.redaction import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate import Certificate
    from kl_comedy.lab.peers import Advice, Reading

FILES = (".sh", ".bash", ".slurm", ".sbatch", ".py", ".yaml", ".yml", ".json", ".toml")


def explain(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A recipe (kl-comedy list recipes), SYSTEM:FLAGS (kl-comedy list peers), or a launch script or config "
            "of another system (shell, Python, YAML, TOML), then key=value for what it leaves open"
        ),
    ],
    system: Annotated[str | None, typer.Option("--system", help="Of a file: its system, where it is not seen")] = None,
    plugin: Plugins = None,
    format: TableOrJson = "table",
) -> None:
    """Say what a recipe, or the KL flags of another system, optimize, on- and off-policy; and which flags would.

    Example: `kl-comedy explain grpo`

    Example: `kl-comedy explain "verl:use_kl_loss=true,kl_loss_type=low_var_kl"`

    Example: `kl-comedy explain run_grpo.sh`
    """
    from kl_comedy.lab.peers import is_peer, read

    load_plugins(plugin)
    text, path = " ".join(what), Path(what[0])
    if os.path.isfile(path) or (path.suffix in FILES and ":" not in what[0]):  # Path.is_file raises for a long text
        _explain_file(path, system, what[1:], format)
    elif system is not None:
        raise UserError(f"--system is for a file, and {shown(what[0])} is none")
    elif is_peer(text):
        _explain_peer(read(text), format)
    else:
        _explain_recipe(text, format)


def _explain_file(path: Path, system: str | None, overrides: Sequence[str], format: str) -> None:
    """What a launch script or config sets, where its KL is, its traps; then as for flags."""
    from kl_comedy.lab.launch_files import read_launch_file

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    launch = read_launch_file(path, system=system, overrides=overrides)
    with error_prefix(str(path)):
        reading = launch.reading()
    summary = {
        "file": str(path),
        "placement": _placement(reading),
        "traps": _traps(reading),
        "remarks": [printable(remark) for remark in launch.remarks],
    }
    if format == "table":
        print(f"{path}: {launch.system.title}, read with the flags and defaults of version {launch.system.version}")
        print(f"KL is on: {summary['placement']}")
        if reading.corrections:
            print(f"The policy loss has: {_corrections(reading)}")
        for title in ("traps", "remarks"):
            if summary[title]:
                print("\n".join([f"{title.capitalize()}:", *(f"  - {line}" for line in summary[title])]))
        print()
    _explain_peer(reading, format, summary)


def _placement(reading: Reading) -> str:
    """Where the KL is, with estimates and coefficients; a cost before the baseline is in the reward."""
    if reading.terms is None:
        return "in a form that no term of ours has"
    words = [
        f"{f'{term.reference}, in the ' if term.reference in ('sampler', 'teacher') else ''}{term.placement} "
        f"({term.estimator}, {term.beta:g})"
        for term in reading.terms
    ]
    return " and ".join(words) or "none"


def _corrections(reading: Reading) -> str:
    """As ``algorithm.correction`` of our config takes them, in one line."""
    words = [
        f"{name}: {{{', '.join(f'{key}: {value:g}' for key, value in options.items())}}}"
        for name, options in reading.corrections.items()
    ]
    return f"{{{', '.join(words)}}}"


def _traps(reading: Reading) -> list[str]:
    """Counted twice, does nothing, wrong gradient."""
    from kl_comedy.kl.claims import TARGET_MEANINGS
    from kl_comedy.kl.oracle.certificate import pulls_to_sampler
    from kl_comedy.lab.peers import SENTENCES

    traps = [f"counted twice: {SENTENCES['both']}"] if SENTENCES["both"] in reading.notes else []
    traps += [f"does nothing: {line}" for line in reading.no_ops]
    if pulls_to_sampler(reading.terms or ()):
        return [*traps, "no reference: the KL is to the sampler, a trust region"]
    for regime, certificate in reading.certificates(("on_policy", "off_policy")).items():
        target = certificate.target or certificate.near_target
        if target not in ("sequence_reverse", "token_reverse"):
            words = TARGET_MEANINGS[target] if target else certificate.verdict.partition(";")[0]
            traps.append(f"wrong gradient {_dashed(regime)}: {words}")
    return traps


def _explain_recipe(name: str, format: str) -> None:
    from kl_comedy.kl import verdict
    from kl_comedy.kl.oracle.certificate import certify
    from kl_comedy.registry import OWN_PART, RECIPES

    if name not in RECIPES:
        why = f"or flags, as verl:use_kl_loss=true (list peers); {OWN_PART}"
        raise bad_value("RECIPE", name, sorted(RECIPES.names()), why)
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


def _explain_peer(reading: Reading, format: str, summary: Mapping[str, Any] | None = None) -> None:
    from kl_comedy.lab.peers import advise, find_system, switched_on

    acting = switched_on(reading)
    advice = advise(find_system(reading.system))
    if format == "json":
        rows = [_advice_row(each) for each in advice]
        plain = {
            **(summary or {}),
            **_plain(reading),
            "switched_on": _plain(acting) if acting else None,
            "advice": rows,
        }
        print(json.dumps(plain, indent=1))
        return
    print(f"{reading.text}  ({reading.system} {reading.version})")
    _show(reading)
    if reading.corrections:
        print("The policy loss, in our config:\nalgorithm:\n  policy_loss: reinforce")
        print(f"  correction: {_corrections(reading)}")
    if acting is not None:
        print(f"\nSwitched on, as {acting.text}:")
        _show(acting, known=(*reading.notes, *reading.no_ops))
    print("\nIf you want")
    for each in advice:  # whole lines, so that flags can be copied
        flags = f"set   {each.flags}   (noise {_advised_noise(each)})" if each.flags else f"-     {each.why_not}"
        print(f"  {each.goal.words}:\n    {flags}\n    ours  kl: {each.goal.recipe}")
    print("\nTargets and recipes: docs/decision.md; this system: docs/peers.md")


def _show(reading: Reading, known: Sequence[str] = ()) -> None:
    """Print a reading, without the lines in ``known``."""
    from kl_comedy.kl import REGIMES

    if reading.terms is None:
        print(f"No term of ours is equivalent. What it does: {reading.instead}.")
    elif not reading.terms:
        print("No KL: nothing regularizes the policy toward a reference.")
    else:
        print("It is: " + " + ".join(f"{term.label()}, beta {term.beta:g}" for term in reading.terms))
        certificates = list(reading.certificates().values())
        Console().print(_numbers(certificates))
        for certificate in certificates:
            print(f"{_dashed(certificate.regime)}: {certificate.verdict}")
        missing = [_dashed(regime) for regime in REGIMES if regime not in reading.holds_in]
        if missing:
            print(f"{', '.join(missing)}: no term of ours is equivalent there")
    for title, lines in (("Notes", reading.notes), ("Does nothing", reading.no_ops)):
        if new := [line for line in lines if line not in known]:
            print("\n".join([f"{title}:", *(f"  - {line}" for line in new)]))
    if reading.terms:
        print(f"In our config:\n{_yaml(reading.terms)}")


def _numbers(certificates: Sequence[Certificate]) -> Table:
    """Regime by regime: the target, and how far the expected gradient is from that of the whole completion's KL."""
    table = Table("regime", "optimizes", "off the sequence-level reverse KL", "cosine", "noise")
    for c in certificates:
        if all(term.reference == "sampler" for term in c.terms):
            pull = "zero" if c.regime == "on_policy" else "towards the sampler"
            table.add_row(_dashed(c.regime), pull, "-", "-", "-")
            continue
        target = c.target or (f"{c.near_target}, while no bound acts" if c.near_target else "no KL exactly")
        bias, cosine = c.relative_bias["sequence_reverse"], c.cosine["sequence_reverse"]
        table.add_row(_dashed(c.regime), target, f"{bias:.0%}", "-" if cosine != cosine else f"{cosine:.2f}", _noise(c))
    return table


def _plain(reading: Reading) -> dict[str, Any]:
    """A reading with its certificates as plain data."""
    names = ("text", "system", "version", "source", "given", "flags", "instead", "notes", "no_ops", "holds_in")
    return {
        **{name: getattr(reading, name) for name in names},
        "terms": None if reading.terms is None else [term.to_mapping() for term in reading.terms],
        "yaml": _yaml(reading.terms) if reading.terms else None,
        "policy_ratio": reading.policy_ratio,
        "corrections": reading.corrections,
        "certificates": [c.row() for c in reading.certificates().values()],
    }


def _advice_row(advice: Advice) -> dict[str, Any]:
    goal = asdict(advice.goal)
    recipe = goal.pop("recipe")
    answer = {"flags": advice.flags, "why_not": advice.why_not, "noise": _advised_noise(advice)}
    return {"goal": goal.pop("name"), **goal, **answer, "recipe": recipe}


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


def _dashed(regime: str) -> str:
    return regime.replace("_", "-")
