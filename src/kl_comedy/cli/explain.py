"""``kl-comedy explain``: what a recipe, or the KL flags or launch script of another system, optimize."""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kl_comedy.cli.certify_output import cosine_text
from kl_comedy.cli.common import Plugins, TableOrJson, load_plugins
from kl_comedy.errors import UserError, bad_value, error_prefix, shown
from kl_comedy.kl.claims import targets_of
from kl_comedy.kl.oracle.certificate_record import BATTERY_WORDS
from kl_comedy.redaction import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kl_comedy.kl import KLTerm
    from kl_comedy.kl.oracle.certificate_record import Certificate
    from kl_comedy.peers.launch_files import LaunchFile
    from kl_comedy.peers.systems import Advice, Reading

REST = "--full shows the table of all rows, notes, our config, and what else can be set (docs/decision.md)"
LEGEND = (
    "follows: the divergence whose gradient the expected gradient is. error, cosine: against the reverse KL that it is "
    "taken for, of each visited prefix (loss) or of completions (reward). noise: the variance of one completion's "
    "gradient over that of the quietest term with the same gradient, else with that of the reverse KL of completions. "
    f"Means over {BATTERY_WORDS}."
)
PASTED = "the pasted text"
OPTIONS = ("--system", "--as-config", "--full", "--plugin", "--format", "--help")
FILES = (".sh", ".bash", ".slurm", ".sbatch", ".py", ".ipynb", ".yaml", ".yml", ".json", ".toml")


def explain(
    what: Annotated[
        list[str],
        typer.Argument(
            help="A recipe (kl-comedy list recipes), SYSTEM:FLAGS (kl-comedy list peers), a launch script or config of "
            "another system (shell, Python, YAML, TOML), or the pasted text of one, such as GRPOConfig(...), in "
            "quotes; then key=value for what it leaves open"
        ),
    ],
    system: Annotated[
        str | None, typer.Option("--system", help="Framework of a file, if it cannot be detected")
    ] = None,
    as_config: Annotated[
        bool, typer.Option("--as-config", help="Print only the part of a kl_comedy config that trains the same KL")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="The table of all rows, notes, our config, all advice")] = False,
    plugin: Plugins = None,
    format: TableOrJson = "table",
) -> None:
    """Say what the KL flags of another system, or a recipe, optimize; first for your samples: fresh or stale.

    Example: `kl-comedy explain grpo`

    Example: `kl-comedy explain "verl:use_kl_loss=true,kl_loss_type=low_var_kl"`

    Example: `kl-comedy explain "GRPOConfig(beta=0.04, num_iterations=4)"`

    Example: `kl-comedy explain run_grpo.sh --full`

    Example: `kl-comedy explain run_grpo.sh --as-config`
    """
    from kl_comedy.peers.systems import is_peer, read

    load_plugins(plugin)
    text = " ".join(what)
    first, *overrides = _joined_paste(what)
    path = Path(first)
    # With a suffix it is meant as a file, so that a missing one is reported and not taken for a recipe. "verl:a.yaml"
    # has a colon.
    looks_like_a_file = path.suffix in FILES and ":" not in first
    if os.path.isfile(path) or looks_like_a_file:  # Path.is_file raises for a long text
        launch = _launch_file(path, system, overrides)
        if as_config:
            _print_config(launch)
        else:
            _explain_file(str(path), launch, format, full)
    elif is_pasted(first):
        launch = _pasted(first, system, overrides)
        if as_config:
            _print_config(launch)
        else:
            _explain_file(PASTED, launch, format, full)
    elif system is not None:
        raise UserError(f"--system needs a file; {shown(first)} is not one")
    elif as_config:
        raise UserError(f"--as-config needs a launch script or config; {shown(first)} is not one")
    elif is_peer(text):
        _explain_peer(read(text), format, full)
    else:
        _explain_recipe(text, format, full)


def is_pasted(text: str) -> bool:
    """Whether an argument is a command, a call of Python or a config, and neither flags of a system nor a recipe."""
    # `verl: use_kl_loss=true` has spaces too; its colon comes first.
    if "\n" not in text.strip() and re.match(r"\s*[\w-]+\s*:", text):
        return False
    return bool(re.search(r"\S\s+\S", text) or re.search(r"[\w.]+\(", text) or re.match(r"-[-\w]", text))


def _joined_paste(what: Sequence[str]) -> Sequence[str]:
    """The arguments; a command that was pasted without quotes around it is made one of them.

    Raises :class:`UserError` for an unknown option beside a file, flags of a system, a recipe or a pasted text.
    """
    from kl_comedy.peers.systems import is_peer
    from kl_comedy.registry import RECIPES

    options = [word for word in what if re.fullmatch(r"-\S*", word)]
    if not options:
        return what
    first = what[0]
    is_command = first in options or not (is_pasted(first) or is_peer(first) or first in RECIPES)
    if os.path.isfile(first) or not is_command:
        raise bad_value("option", options[0], OPTIONS)
    return [shlex.join(what)]


def _pasted(text: str, system: str | None, overrides: Sequence[str]) -> LaunchFile:
    from kl_comedy.peers.launch_files import read_launch_text

    with error_prefix(PASTED):
        return read_launch_text(text, system=system, overrides=overrides)


def _launch_file(path: Path, system: str | None, overrides: Sequence[str]) -> LaunchFile:
    """The file with its flags; the overrides come last, as they do on the system's own command line."""
    from kl_comedy.peers.launch_files import read_launch_file

    if not path.is_file():
        raise UserError(f"{path}: no such file")
    return read_launch_file(path, system=system, overrides=overrides)


def _print_config(launch: LaunchFile) -> None:
    """Print the part of our config that trains the same KL; remarks as comments."""
    from omegaconf import OmegaConf

    from kl_comedy.peers.systems import config_of

    reading = launch.reading()
    first_line = f"The KL of {launch.system.title} {launch.system.version} with the flags {reading.text}"
    # Remarks quote the file. What ended a comment here would let it write keys of the config.
    for line in (first_line, *launch.remarks, *reading.notes):
        print(f"# {one_line(line)}")
    print(OmegaConf.to_yaml(OmegaConf.create(config_of(reading))).rstrip())


def _explain_file(name: str, launch: LaunchFile, format: str, full: bool) -> None:
    """Print where the KL of a launch script or config is and its traps; then what its flags optimize."""
    # Its errors name a flag only; which file sets it is known here.
    with error_prefix(name):
        reading = launch.reading()
    summary: dict[str, Any] = {
        "file": name,
        "defaults_before": launch.defaults_before,
        "assumed": one_line(launch.assumed),
        "placement": placement_of(reading),
        "kl": _kl_rows(reading),
        "traps": _traps(reading),
        "remarks": [one_line(remark) for remark in launch.remarks],
    }
    read_as = f"{one_line(name)}: {launch.system.title}, read with the {_release_read(launch)}"
    _explain_peer(reading, format, full, summary, read_as)


def _release_read(launch: LaunchFile) -> str:
    """Whose flags and defaults were taken; a remark says by what an earlier release was told."""
    if launch.defaults_before:
        return f"flags of version {launch.system.version} and defaults before {launch.defaults_before}"
    return f"flags and defaults of version {launch.system.version}"


def _print_list(title: str, lines: Sequence[str]) -> None:
    """Print the lines below a title; nothing where there is no line."""
    if not lines:
        return
    print(f"{title}:")
    for line in lines:
        print(f"  - {one_line(line)}")


def placement_of(reading: Reading) -> str:
    """Where the KL is, with estimates and coefficients; a cost before the baseline is in the reward."""
    if reading.terms is None:
        return "in a form that no term of ours has"
    places = []
    for row in _kl_rows(reading):
        gradient = f", gradient of {row['gradient']}" if row["gradient"] != "own" else ""
        place = f"{row['placement']} ({row['estimator']}{gradient}, ratio {row['ratio']}, beta {row['beta']:g})"
        # Those two are no penalty towards the initial policy, which is what KL usually means here.
        if row["reference"] in ("sampler", "teacher"):
            place = f"{row['reference']}, in the {place}"
        places.append(place)
    return " and ".join(places) or "none"


def _kl_rows(reading: Reading) -> list[dict[str, Any]]:
    """Each term in the words of the first lines: placement, estimator, gradient, ratio, beta and reference.

    The ratio is that of the policy to the one that sampled, by which the term is multiplied; a cost before the baseline
    has the one of the policy loss.
    """
    rows = []
    for term, certified in zip(reading.terms or (), reading.certified_terms(), strict=True):
        ratio = certified.correction
        if certified.cap is not None and ratio != "none":
            ratio = f"{ratio} capped at {certified.cap:g}"
        rows.append(
            {
                "placement": term.placement,
                "estimator": term.estimator,
                "gradient": "own" if term.gradient == "natural" else term.gradient,
                "ratio": ratio,
                "beta": term.beta,
                "reference": term.reference,
            }
        )
    return rows


def _corrections(reading: Reading) -> str:
    """As ``algorithm.correction`` of our config takes them: a YAML mapping in one line."""
    items = []
    for name, options in reading.corrections.items():
        values = ", ".join(f"{key}: {value:g}" for key, value in options.items())
        items.append(f"{name}: {{{values}}}")
    return f"{{{', '.join(items)}}}"


def _traps(reading: Reading) -> list[str]:
    """What a user of these flags may not expect: a KL counted twice, a flag that does nothing, a wrong gradient."""
    from kl_comedy.kl.claims import TARGET_MEANINGS
    from kl_comedy.kl.oracle.certificate_record import pulls_to_sampler
    from kl_comedy.peers.systems import SENTENCES

    traps = []
    if SENTENCES["both"] in reading.notes:
        traps.append(f"counted twice: {SENTENCES['both']}")
    traps += [f"does nothing: {line}" for line in reading.no_ops]
    # A certificate against the reference would call it wrong, and it is only something else.
    if pulls_to_sampler(reading.terms or ()):
        return [*traps, "no reference: the KL is to the sampler, a trust region"]
    for regime, certificate in reading.certificates(("on_policy", "off_policy")).items():
        target = certificate.target or certificate.near_target
        # The two that people mean by a KL to the reference; everything else is worth a line.
        if target in ("sequence_reverse", "token_reverse"):
            continue
        if target:
            traps.append(f"wrong gradient {_dashed(regime)}: {TARGET_MEANINGS[target]}")
        else:
            traps.append(f"no KL {_dashed(regime)}: {certificate.verdict.partition(';')[0]}")
    return traps


def _explain_recipe(name: str, format: str, full: bool) -> None:
    """Print what a recipe follows on fresh and on stale samples; all rows with ``full``."""
    from kl_comedy.cli.first_answer import candidates_in_recipes, recipe_answer, wrapped
    from kl_comedy.kl import verdict
    from kl_comedy.kl.oracle.stored_certificates import certificates as stored_or_enumerated
    from kl_comedy.kl.recipes import meant_estimator, recipe
    from kl_comedy.peers.advice import what_to_use
    from kl_comedy.registry import OWN_PART, RECIPES

    if name not in RECIPES and meant_estimator(name) is None:
        hint = f"or flags, as verl:use_kl_loss=true (list peers), a file, or a pasted command in quotes; {OWN_PART}"
        raise bad_value("RECIPE", name, sorted(RECIPES.names()), hint)
    terms = recipe(name, key="RECIPE")
    # Together: the bias of a recipe is that of the sum of its terms.
    certificates = stored_or_enumerated(name, terms) if terms else []
    lines = what_to_use(terms)
    if format == "json":
        rows = []
        for term in terms:
            verdicts = {regime: verdict(term, regime) for regime in ("on_policy", "off_policy")}
            rows.append({"term": term.label(), "beta": str(term.beta), **verdicts})
        plain = {"recipe": name, "terms": rows, "certificates": [c.row() for c in certificates], "what_to_use": lines}
        print(json.dumps(plain, indent=1))
        return
    if not terms:
        print(f"{name}: no KL term")
        return
    print("\n".join(recipe_answer(terms, certificates)))
    if not full:
        print("\n".join(("", *wrapped(REST))))
        return
    print("\n".join(("", *candidates_in_recipes(terms), "")).rstrip("\n"))
    print()
    _print_numbers(certificates)
    _print_list("What to use (docs/decision.md)", lines)


def _explain_peer(
    reading: Reading, format: str, full: bool, summary: Mapping[str, Any] | None = None, read_as: str = ""
) -> None:
    """Print what another system's flags do on the reader's samples; all rows and advice with ``full``.

    ``summary`` is what JSON has besides, of a file, and ``read_as`` the line that says as what it was read.
    """
    from kl_comedy.cli.first_answer import first_answer, what_was_left_out, wrapped
    from kl_comedy.peers.freshness import freshness_of
    from kl_comedy.peers.systems import find_system

    if format == "json":
        print(json.dumps({**(summary or {}), **_peer_row(reading)}, indent=1))
        return
    remarks = list((summary or {}).get("remarks", ()))
    # The first of the remarks, and above all lines.
    assumed = remarks.pop(0) if (summary or {}).get("assumed") else ""
    freshness = freshness_of(reading)
    print("\n".join(first_answer(reading, freshness, remarks, assumed=assumed)))
    if read_as:
        print(f"\n{read_as}")
        _print_list("Remarks", remarks)
    for key in reading.sampling.unused:
        print(f"{key}: an option of {find_system(reading.system).title} that this answer does not use")
    if full:
        left_out = what_was_left_out(reading, freshness, is_assumed=bool(assumed))
        if left_out:
            print("\n".join(("", *left_out)))
        _print_all(reading, summary)
    else:
        print("\n".join(("", *wrapped(REST))))


def _peer_row(reading: Reading) -> dict[str, Any]:
    """The whole answer as plain data."""
    from kl_comedy.peers.freshness import freshness_of
    from kl_comedy.peers.systems import advise, find_system, switched_on

    acting = switched_on(reading)
    acting_plain = None
    if acting is not None:
        acting_plain = _plain(acting)
    return {
        **_plain(reading),
        "freshness": {**asdict(freshness_of(reading)), **asdict(reading.sampling)},
        "switched_on": acting_plain,
        "advice": [_advice_row(item) for item in advise(find_system(reading.system))],
        "what_to_use": _what_to_use(reading, acting),
    }


def _what_to_use(reading: Reading, acting: Reading | None) -> list[str]:
    """Flags without a KL say nothing to advise against; what they would be switched on does."""
    from kl_comedy.peers.advice import what_to_use

    asked = acting or reading
    return what_to_use(asked.terms or (), asked.holds_in)


def _print_all(reading: Reading, summary: Mapping[str, Any] | None) -> None:
    """Print what is behind the first answer: all rows, notes, our config, and what else can be set."""
    from kl_comedy.peers.systems import advise, find_system, switched_on

    # Many users ask about flags that turn the KL off by default: what they would get is shown too.
    acting = switched_on(reading)
    print(f"\n{one_line(reading.text)}  ({reading.system} {reading.version})")
    if summary is not None:
        print(f"KL is on: {summary['placement']}")
        if reading.corrections:
            print(f"The policy loss has: {_corrections(reading)}")
        _print_list("Traps", summary["traps"])
    _show(reading)
    if reading.corrections:
        print("The policy loss, in our config:\nalgorithm:\n  policy_loss: reinforce")
        print(f"  correction: {_corrections(reading)}")
    if acting is not None:
        print(f"\nSwitched on, as {one_line(acting.text)}:")
        # Notes that were printed above are not repeated.
        _show(acting, known=(*reading.notes, *reading.no_ops))
    _print_list("\nWhat to use", _what_to_use(reading, acting))
    print("\nIf you want")
    for item in advise(find_system(reading.system)):
        _print_advice(item)
    print("\nTargets and recipes: docs/decision.md; this system: docs/peers.md")


def _print_advice(advice: Advice) -> None:
    """Print a goal, the flags for it, and our recipe; in whole lines, so that flags can be copied."""
    flags = f"-     {advice.why_not}"
    if advice.flags:
        flags = f"set   {advice.flags}   (noise {_advised_noise(advice)})"
    print(f"  {advice.goal.words}:\n    {flags}\n    ours  kl: {advice.goal.recipe}")


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
        _print_numbers(certificates)
        # A framework may treat stale samples in a way that no term of ours has, and yet be one of ours on-policy.
        missing = [_dashed(regime) for regime in REGIMES if regime not in reading.holds_in]
        if missing:
            print(f"{', '.join(missing)}: no term of ours is equivalent there")
    _print_list("Notes", [line for line in reading.notes if line not in known])
    _print_list("Does nothing", [line for line in reading.no_ops if line not in known])
    if reading.terms:
        print(f"In our config:\n{_yaml(reading.terms)}")


def _print_numbers(certificates: Sequence[Certificate]) -> None:
    """The table of all rows, with its legend."""
    rows = [("row", "follows", "error", "cosine", "noise"), *(_numbers(certificate) for certificate in certificates)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(textwrap.fill(LEGEND, 100))


def _numbers(certificate: Certificate) -> tuple[str, ...]:
    from kl_comedy.cli.first_answer import hit_in_words, nearest_in_words

    row = _dashed(certificate.regime)
    target = certificate.target or certificate.near_target
    follows = hit_in_words(certificate)
    if not follows:
        follows = f"{certificate.untargeted}; {nearest_in_words(certificate)}"
    meant = _meant(certificate, target)
    cosine = cosine_text(certificate.cosine[meant])
    return (row, follows, f"{certificate.relative_bias[meant]:.0%}", cosine, _noise(certificate))


def _meant(certificate: Certificate, target: str | None) -> str:
    """The reverse KL that a term is taken for, as in the register: the one that it hits, else by its placement."""
    sequence, token = targets_of(certificate.terms)[:2]
    if target in (sequence, token):
        return target
    per_token = all(term.placement == "loss" or term.credit == "own" for term in certificate.terms)
    return token if per_token else sequence


def _plain(reading: Reading) -> dict[str, Any]:
    """A reading with its certificates as plain data."""
    terms = None
    if reading.terms is not None:
        terms = [term.to_mapping() for term in reading.terms]
    yaml = None
    if reading.terms:
        yaml = _yaml(reading.terms)
    names = ("text", "system", "version", "source", "given", "flags", "instead", "notes", "no_ops", "holds_in")
    return {
        **{name: getattr(reading, name) for name in names},
        "terms": terms,
        "yaml": yaml,
        "policy_ratio": reading.policy_ratio,
        "corrections": reading.corrections,
        "certificates": [c.row() for c in reading.certificates().values()],
    }


def _advice_row(advice: Advice) -> dict[str, Any]:
    """Advice as plain data: the goal, the flags for it or why there are none, and our recipe."""
    goal = asdict(advice.goal)
    recipe = goal.pop("recipe")
    answer = {"flags": advice.flags, "why_not": advice.why_not, "noise": _advised_noise(advice)}
    return {"goal": goal.pop("name"), **goal, **answer, "recipe": recipe}


def _advised_noise(advice: Advice) -> str:
    from kl_comedy.peers.systems import read

    if advice.flags is None:
        return "-"
    # Its own regime only: each certificate takes time.
    regime = advice.goal.regime
    return _noise(read(advice.flags).certificates([regime])[regime])


def _noise(certificate: Certificate) -> str:
    """The variance over that of the least noisy term for the same target."""
    # No other term has this target, so that there is nothing to compare with.
    if certificate.variance_ratio is None:
        return "-"
    return f"{certificate.variance_ratio:.2g}x"


def _yaml(terms: Sequence[KLTerm]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml({"kl": [term.to_mapping() for term in terms]}).rstrip()


def _dashed(regime: str) -> str:
    return regime.replace("_", "-")
