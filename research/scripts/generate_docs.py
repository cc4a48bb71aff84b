"""Write the generated parts of docs/: `python research/scripts/generate_docs.py`. `--check` fails if a page is stale.

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; the rest of a page is written by
hand. The pages of docs/estimators/ are generated as a whole.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from doc_tables import kl_terms, matrix, peers, plans, policy_terms, suites
from doc_tables.common import ROOT, built_in, format_default, options_of, table

from kl_comedy.config.schema import Config
from kl_comedy.config.validate import field_types, without_none
from kl_comedy.kl import KLTerm, claimed_target, recipe, verdict
from kl_comedy.kl.claims import TARGET_MEANINGS, TARGETS, own_targets
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.registry import KINDS, RECIPES

SOURCE = ROOT / "src" / "kl_comedy"


# --- configuration: keys ------------------------------------------------------------------------------------
def config_keys(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """``(key, value, default, meaning)`` of every key under ``schema``, in order."""
    hints = field_types(schema)
    for item in dataclasses.fields(schema):
        key, doc = f"{prefix}{item.name}", item.metadata.get("doc", "")
        hint, optional = without_none(hints[item.name])
        args = typing.get_args(hint)
        default = format_default(_default(item))
        if dataclasses.is_dataclass(hint):
            if optional:
                yield key, "mapping", default, doc
            yield from config_keys(typing.cast(type, hint), f"{key}.")
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(args[0]):
            yield key, "list", default, doc
            yield from config_keys(args[0], f"{key}.N.")
        elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(args[1]):
            yield key, "mapping", default, doc
            yield f"{key}.NAME", "", "", "One set: the keys of `data.train`."
        else:
            evident = default not in ("`null`", "`[]`", "`{}`")
            yield key, _allowed(item, "" if evident else _type_name(hint)), default, doc


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _type_name(hint: Any) -> str:
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "bool"}
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return f"list of {names[args[0]]}"
    if typing.get_origin(hint) is dict:
        return "mapping" if args[1] is Any else f"mapping to {names[args[1]]}"
    return names.get(hint, "list, mapping or text")


def _allowed(item: dataclasses.Field[Any], type_name: str) -> str:
    """The choices, the registered names, or the type with its bounds."""
    rules = item.metadata
    if "choices" in rules:
        return ", ".join(f"`{choice}`" for choice in rules["choices"])
    if "registry" in rules:
        return ", ".join([*(f"`{entry.name}`" for entry in built_in(KINDS[rules["registry"]])), "..."])
    if "minimum" in rules and "maximum" in rules:
        return f"{rules['minimum']:g} to {rules['maximum']:g}"
    bounds = [f"{sign}{rules[name]:g}" for name, sign in (("minimum", "≥"), ("above", ">")) if name in rules]
    return " ".join(filter(None, [type_name, *bounds]))


def _default_and_allowed(default: str, allowed: str) -> str:
    """The default, then the other choices after a semicolon, or in parentheses the type and the bounds."""
    names = allowed.split(", ")
    if default and default in names:
        return f"{default}; {', '.join(name for name in names if name != default)}"
    return default if allowed in ("", "bool", "mapping", "text") and default != "`null`" else f"{default} ({allowed})"


def configuration_keys() -> str:
    """One table per top-level key; scalar top-level keys come first."""
    sections: dict[str, list[Sequence[str]]] = {}
    for key, allowed, default, doc in config_keys():
        if not doc:
            raise SystemExit(f"config/schema.py: {key} has no documentation")
        top = key.split(".")[0]
        section = top if "." in key or top in ("rewards", "callbacks") else "the run"
        sections.setdefault(section, []).append((f"`{key}`", _default_and_allowed(default, allowed), doc))
    head = ("key", "default", "meaning")
    return "\n\n".join(f"### {name}\n\n{table(head, lines)}" for name, lines in sections.items())


# --- configuration: KL terms ----------------------------------------------------------------------------------
def term_fields() -> str:
    in_reward = KLTerm("k1", placement="reward")
    rows = []
    for item in dataclasses.fields(KLTerm):
        default = "required" if item.default is item.default_factory else format_default(_default(item))
        if item.name in ("credit", "baseline"):
            default = f"`{getattr(in_reward, item.name)}` in reward"
        rows.append((f"`{item.name}`", _default_and_allowed(default, _allowed(item, "")), item.metadata["doc"]))
    return table(("field", "default", "meaning"), rows)


# --- configuration: names and recipes ---------------------------------------------------------------------------
def enumerated(terms: Sequence[KLTerm], regime: str) -> str:
    """The target of the sum of ``terms``, each at beta 1, by exact enumeration, or ``none``."""
    setting = Instance.random(Tree.build(vocabulary=3, length=3), InstanceSettings(regime=regime, seed=3))
    gradient = expected_gradient(setting, [dataclasses.replace(term, beta=1.0) for term in terms])
    own = terms[0] if len(terms) == 1 else None
    targets = (*TARGETS, *(own_targets(own) if own else ()))
    hits = [name for name in targets if gradient.relative_bias(target_gradient(setting, name, own)) < 1e-10]
    return hits[0] if hits else "none"


def recipes() -> str:
    """The recipes by what they optimize on-policy and off-policy."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for entry in built_in(RECIPES):
        if terms := recipe(entry.name):
            groups.setdefault(tuple(_claim(terms, regime) for regime in ("on_policy", "off_policy")), []).append(
                entry.name
            )
    rows = [(*targets, ", ".join(f"`{name}`" for name in names)) for targets, names in groups.items()]
    return table(("on-policy", "off-policy", "recipes"), rows)


def _claim(terms: Sequence[KLTerm], regime: str) -> str:
    """The claimed target of one term, or the enumerated one of several."""
    if len(terms) > 1:
        return enumerated(terms, regime)
    (term,) = terms
    target = claimed_target(term, regime) or "none"
    assert verdict(term, regime).startswith(f"{target}:")
    bare = dataclasses.replace(term, cap=None, cap_mode="truncate", window=None, input_clamp=None, output_clamp=None)
    unbounded = claimed_target(bare, regime) or "none"
    assert unbounded == enumerated([bare], regime), f"{bare.label()} {regime}"
    return target if target == unbounded else f"{target} ({unbounded})"


def verdicts() -> str:
    """The meaning of each target in the recipe table."""
    none, meaning = verdict(KLTerm("k3", placement="reward"), "on_policy").split(": ", 1)
    return "\n".join(f"- `{name}`: {text}." for name, text in {**TARGET_MEANINGS, none: meaning}.items())


def names() -> str:
    """Built-in corrections, and rewards with their options."""
    parts = []
    for kind, width in (("corrections", 2), ("rewards", 3)):  # the option of a correction is a field of the term
        rows = [
            (f"`{entry.name}`", entry.summary.replace("``", "`"), options_of(entry)) for entry in built_in(KINDS[kind])
        ]
        head = ("name", "what it is", "options")[:width]
        parts.append(f"### {kind}\n\n" + table(head, [row[:width] for row in rows]))
    return "\n\n".join(parts)


# --- architecture: packages --------------------------------------------------------------------------------------
def layers() -> dict[str, int]:
    """Layer of each package, parsed from the import test."""
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return {
        name: layer
        for layer, names in enumerate(ast.literal_eval(assigned["LAYERS"]))
        for name in names
        if files_of(name)
    }


def files_of(package: str) -> list[Path]:
    file = SOURCE / f"{package}.py"
    return [file] if file.is_file() else sorted((SOURCE / package).rglob("*.py"))


def summary_of(package: str) -> str:
    """The first sentence of the docstring of a package or module."""
    file = SOURCE / f"{package}.py"
    doc = ast.get_docstring(ast.parse((file if file.is_file() else SOURCE / package / "__init__.py").read_text()))
    return re.split(r"(?<=\w)\.\s|\n\n", (doc or "").strip())[0].replace("\n", " ").rstrip(".").replace("``", "`")


def packages() -> str:
    rows = [(str(layer), f"`{package}`", summary_of(package)) for package, layer in layers().items()]
    return table(("layer", "package", "what it is for"), rows)


def open_problem() -> str:
    """The table of docs/open_problem.md, from the committed results of the study."""
    import pandas as pd

    sys.path.insert(0, str(ROOT))
    from research.studies.open_problem import error_table
    from research.studies.pages import markdown

    frame = pd.read_csv(ROOT / "results" / "open_problem" / "open_problem.csv")
    selected = frame[(frame.length == 16) & frame.staleness.isin((0.0, 0.3, 0.6, 1.0))]
    return markdown(error_table(selected, 1024))


def prefix_ratios() -> str:
    """Effective share of prefix ratios by length and divergence, in closed form."""
    sys.path.insert(0, str(ROOT))
    from research.studies.open_problem import lognormal_ratios
    from research.studies.pages import markdown

    return markdown(lognormal_ratios())


def long_audit(name: str) -> str:
    """A table of gradients and ratios on a real model, from the committed results of the study."""
    import pandas as pd

    sys.path.insert(0, str(ROOT))
    from research.studies.long_audit import ratio_summary, summary
    from research.studies.pages import markdown

    frame = pd.read_csv(ROOT / "results" / "long_audit" / f"{name}.csv")
    return markdown({"terms": summary, "ratios": ratio_summary}[name](frame))


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {"packages": packages},
    "configuration.md": {
        "keys": configuration_keys,
        "term fields": term_fields,
        "recipes": recipes,
        "verdicts": verdicts,
        "names": names,
    },
    "evaluation.md": suites.PARTS,
    "matrix.md": matrix.PARTS,
    "planning.md": plans.PARTS,
    "open_problem.md": {
        "open_problem": open_problem,
        "prefix ratios": prefix_ratios,
        "measured ratios": partial(long_audit, "ratios"),
        "measured terms": partial(long_audit, "terms"),
    },
    "decision.md": {**kl_terms.PARTS, **policy_terms.DECISION},
    "algorithms.md": policy_terms.PARTS,
    "peers.md": peers.PARTS,
}


def render(page: str) -> str:
    """The page with its generated parts, or the whole generated page."""
    if page in kl_terms.WHOLE:
        return kl_terms.WHOLE[page]()
    text = (ROOT / "docs" / page).read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"docs/{page}: needs exactly one {begin} and one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


ENUMERATED = ("decision.md", *kl_terms.WHOLE)
"""Pages that need a certificate of every term (about half a minute)."""


def stale_pages(pages: Sequence[str]) -> list[str]:
    """The pages whose generated parts are out of date."""
    return [page for page in pages if (ROOT / "docs" / page).read_text() != render(page)]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        stale = stale_pages((*PAGES, *kl_terms.WHOLE))
        sys.exit(f"stale: {', '.join(stale)}; run python research/scripts/generate_docs.py" if stale else 0)
    for name in (*PAGES, *kl_terms.WHOLE):
        (ROOT / "docs" / name).write_text(render(name))
        print(f"wrote docs/{name}")
