"""Write the generated parts of docs/: `python scripts/generate_docs.py`; `--check` fails where they are stale.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; the rest of a page is written
by hand. Pages of docs/estimators/ are generated whole.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from doc_tables import kl_terms, peers, policy_terms, suites
from doc_tables.common import ROOT, built_in, options_of, shown, table

from kl_comedy.config.schema import Config
from kl_comedy.config.validate import field_types, without_none
from kl_comedy.kl import KLTerm, claimed_target, recipe, verdict
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle import Instance, Tree, expected_gradient, target_gradient
from kl_comedy.kl.term import LEVELS, PLACEMENTS
from kl_comedy.registry import ESTIMATORS, KINDS, RECIPES

SOURCE = ROOT / "src" / "kl_comedy"


# --- configuration: keys ------------------------------------------------------------------------------------
def config_keys(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """``(key, value, default, meaning)`` of every key under ``schema``, in its order."""
    hints = field_types(schema)
    for item in dataclasses.fields(schema):
        key, doc = f"{prefix}{item.name}", item.metadata.get("doc", "")
        hint, optional = without_none(hints[item.name])
        args = typing.get_args(hint)
        default = shown(_default(item))
        if dataclasses.is_dataclass(hint):
            if optional:
                yield key, "mapping or null", default, doc
            yield from config_keys(typing.cast(type, hint), f"{key}.")
        elif typing.get_origin(hint) is list and dataclasses.is_dataclass(args[0]):
            yield key, "list", default, doc
            yield from config_keys(args[0], f"{key}.N.")
        elif typing.get_origin(hint) is dict and dataclasses.is_dataclass(args[1]):
            yield key, "mapping", default, doc
            yield f"{key}.NAME", "mapping", "", "One set: the keys of `data.train`."
        else:
            yield key, _allowed(item, _type_name(hint)) + (" or null" if optional else ""), default, doc


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
        return ", ".join([*(f"`{entry.name}`" for entry in built_in(KINDS[rules["registry"]])), "+ registered"])
    bounds = [("minimum", ">="), ("above", ">"), ("maximum", "<=")]
    bounded = [f"{sign} {rules[name]:g}" for name, sign in bounds if name in rules]
    return ", ".join([*filter(None, [type_name]), *bounded])


def configuration_keys() -> str:
    """One table per top-level key; scalars of the run itself first."""
    sections: dict[str, list[Sequence[str]]] = {}
    for key, *columns in config_keys():
        if not columns[-1]:
            raise SystemExit(f"config/schema.py: {key} has no documentation")
        top = key.split(".")[0]
        section = top if "." in key or top in ("rewards", "callbacks") else "the run"
        sections.setdefault(section, []).append((f"`{key}`", *columns))
    head = ("key", "value", "default", "meaning")
    return "\n\n".join(f"### {name}\n\n{table(head, lines)}" for name, lines in sections.items())


# --- configuration: KL terms ----------------------------------------------------------------------------------
def term_fields() -> str:
    in_reward = KLTerm("k1", placement="reward")
    rows = []
    for item in dataclasses.fields(KLTerm):
        default = "required" if item.default is item.default_factory else shown(_default(item))
        if item.name in ("credit", "baseline"):
            default = f"`{getattr(in_reward, item.name)}` in reward"
        rows.append((f"`{item.name}`", _allowed(item, ""), default, item.metadata["doc"]))
    return table(("field", "values", "default", "meaning"), rows)


# --- configuration: names and recipes ---------------------------------------------------------------------------
def enumerated(terms: Sequence[KLTerm], regime: str) -> str:
    """The target that a whole list hits by exact enumeration, or ``none``. Every term at beta 1."""
    if not terms:
        return "zero"
    setting = Instance.random(Tree.build(vocabulary=3, length=3), regime=regime, seed=3)
    gradient = expected_gradient(setting, [dataclasses.replace(term, beta=1.0) for term in terms])
    hits = [name for name in TARGETS if gradient.relative_bias(target_gradient(setting, name)) < 1e-10]
    return hits[0] if hits else "none"


def recipes() -> str:
    rows = []
    for entry in built_in(RECIPES):
        terms = recipe(entry.name)
        betas = " + ".join(f"{term.beta:g}" for term in terms) or "-"
        claims = [_said(terms, regime) for regime in ("on_policy", "off_policy")]
        rows.append((f"`{entry.name}`", entry.facts["terms"], betas, *claims))
    head = ("recipe", "terms", "beta", "on-policy", "off-policy")
    return table(head, rows)


def _said(terms: Sequence[KLTerm], regime: str) -> str:
    """The verdict's target per term; for several terms also what their sum hits."""
    each = [claimed_target(term, regime) or "none" for term in terms]
    assert all(verdict(term, regime).startswith(f"{target}:") for term, target in zip(terms, each, strict=True))
    if len(terms) != 1:
        return f"{' + '.join(each)} = {enumerated(terms, regime)}" if terms else "-"
    bare = dataclasses.replace(terms[0], cap=None, window=None, input_clamp=None, output_clamp=None)
    uncapped = claimed_target(bare, regime) or "none"
    assert uncapped == enumerated([bare], regime), f"{bare.label()} {regime}"
    return each[0] if each[0] == uncapped else f"{each[0]} ({uncapped} without its bound)"


def verdicts() -> str:
    """What each target in the recipe table means, in the verdict's own words."""
    sampled = [entry.name for entry in built_in(ESTIMATORS) if entry.facts["needs"] == "log_ratio"]
    seen: dict[str, str] = {}
    for estimator, level, placement in itertools.product(sampled, LEVELS, PLACEMENTS):
        name, words = verdict(KLTerm(estimator, level=level, placement=placement), "on_policy").split(": ", 1)
        seen[name] = words
    return "\n".join(f"- `{name}`: {seen[name]}." for name in (*TARGETS, "none"))


def names() -> str:
    """Built-in parts a config may name, with their options; those of other pages are left out."""
    parts = []
    for kind in ("corrections", "rewards", "datasets", "rollouts"):
        rows = [
            (f"`{entry.name}`", entry.summary.replace("``", "`"), options_of(entry)) for entry in built_in(KINDS[kind])
        ]
        width = 3 if any(row[-1] for row in rows) else 2
        head = ("name", "what it is", "options")[:width]
        parts.append(f"### {kind}\n\n" + table(head, [row[:width] for row in rows]))
    return "\n\n".join(parts)


# --- architecture: packages --------------------------------------------------------------------------------------
def layers() -> dict[str, int]:
    """The layer table of the import test, read without running it."""
    tree = ast.parse((ROOT / "tests/unit/test_imports.py").read_text())
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


def imports_of(package: str) -> list[str]:
    """The other packages whose modules ``package`` imports, anywhere in its files."""
    imported: set[str] = set()
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(file.read_text())) for file in files_of(package)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kl_comedy"):
            imported |= {f"{node.module}.{alias.name}".split(".")[1] for alias in node.names}
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("kl_comedy.")}
    return sorted(imported - {package})


def summary_of(package: str) -> str:
    """The first sentence of the docstring of a package or module."""
    file = SOURCE / f"{package}.py"
    doc = ast.get_docstring(ast.parse((file if file.is_file() else SOURCE / package / "__init__.py").read_text()))
    return re.split(r"(?<=\w)\.\s|\n\n", (doc or "").strip())[0].replace("\n", " ").rstrip(".").replace("``", "`")


def packages() -> str:
    layer_of, rows = layers(), []
    for package, layer in layer_of.items():
        others = [f"**{other}**" if layer_of[other] == layer else other for other in imports_of(package)]
        rows.append((str(layer), f"`{package}`", summary_of(package), ", ".join(others) or "nothing"))
    return table(("layer", "package", "what it is for", "imports"), rows)


def open_problem() -> str:
    """The table of docs/open_problem.md, from the data of the study as it is committed."""
    import pandas as pd

    from kl_comedy.lab.open_problem import error_table
    from kl_comedy.lab.pages import markdown

    frame = pd.read_csv(ROOT / "results" / "open_problem" / "open_problem.csv")
    shown = frame[frame.length.isin((8, 16)) & frame.staleness.isin((0.0, 0.3, 0.6, 1.0))]
    return markdown(error_table(shown, 1024))


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
    "open_problem.md": {"open_problem": open_problem},
    "decision.md": {**kl_terms.PARTS, **policy_terms.DECISION},
    "algorithms.md": policy_terms.PARTS,
    "peers.md": peers.PARTS,
}


def render(page: str) -> str:
    """The page with its generated parts made anew, or all of it."""
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
"""Pages with a certificate of every term, which take half a minute."""


def stale_pages(pages: Sequence[str]) -> list[str]:
    """The pages whose generated parts differ from what the code says now."""
    return [page for page in pages if (ROOT / "docs" / page).read_text() != render(page)]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        stale = stale_pages((*PAGES, *kl_terms.WHOLE))
        sys.exit(f"stale: {', '.join(stale)}; run python scripts/generate_docs.py" if stale else 0)
    for name in (*PAGES, *kl_terms.WHOLE):
        (ROOT / "docs" / name).write_text(render(name))
        print(f"wrote docs/{name}")
