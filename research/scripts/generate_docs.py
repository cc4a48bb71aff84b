"""Write the generated parts of docs/: `python research/scripts/generate_docs.py`. `--check` fails if a page is stale.

A generated part is between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; the rest of a page is written by
hand. The pages of docs/estimators/ are generated as a whole.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from doc_tables import (
    advice,
    groups_without_signal,
    kl_terms,
    matrix,
    peers,
    plans,
    policy_terms,
    rollout_rows,
    suites,
    terminal,
    turn_baselines,
)
from doc_tables.common import ROOT, built_in, code_span, format_default, options_of, table

from kl_comedy.config.schema import Config
from kl_comedy.config.validate import field_types, without_none
from kl_comedy.kl import KLTerm, claimed_target, recipe, verdict
from kl_comedy.kl.claims import (
    KIND_WORDS,
    NO_TARGET,
    TARGET_MEANINGS,
    TARGETS,
    kind_in,
    own_targets,
    words_without_target,
)
from kl_comedy.kl.oracle import Instance, InstanceSettings, Tree, expected_gradient, target_gradient
from kl_comedy.peers.advice import MEASURED, read_advice
from kl_comedy.registry import KINDS, RECIPES

# The tables of the studies come from research.studies, which is a package of the repository's root.
sys.path.insert(0, str(ROOT))

SOURCE = ROOT / "src" / "kl_comedy"


# --- configuration: keys ------------------------------------------------------------------------------------
class ConfigKey(typing.NamedTuple):
    """One row of the table of keys, in Markdown."""

    key: str
    allowed: str
    """The choices, or the type with its bounds; empty where the default shows the type."""
    default: str
    meaning: str


def config_keys(schema: type = Config, prefix: str = "") -> Iterator[ConfigKey]:
    """Every key under ``schema``, in the order of its fields."""
    hints = field_types(schema)
    for item in dataclasses.fields(schema):
        hint, optional = without_none(hints[item.name])
        yield from _keys_of_field(item, hint, optional, prefix)


def _keys_of_field(item: dataclasses.Field[Any], hint: Any, optional: bool, prefix: str) -> Iterator[ConfigKey]:
    """The key of a field and, if its values are mappings with known keys, the keys inside."""
    key = f"{prefix}{item.name}"
    meaning = item.metadata.get("doc", "")
    default = format_default(_default(item))
    container = typing.get_origin(hint)
    arguments = typing.get_args(hint)

    if dataclasses.is_dataclass(hint):
        # A section that is always there has no value of its own, only keys.
        if optional:
            yield ConfigKey(key, "mapping", default, meaning)
        yield from config_keys(typing.cast(type, hint), f"{key}.")
    elif container is list and dataclasses.is_dataclass(arguments[0]):
        yield ConfigKey(key, "list", default, meaning)
        yield from config_keys(typing.cast(type, arguments[0]), f"{key}.N.")
    elif container is dict and dataclasses.is_dataclass(arguments[1]):
        # The only such mapping is data.eval, whose values have the keys of data.train: they are not listed twice.
        yield ConfigKey(key, "mapping", default, meaning)
        yield ConfigKey(f"{key}.NAME", "", "", "One set: the keys of `data.train`.")
    else:
        default_shows_type = default not in ("`null`", "`[]`", "`{}`")
        type_name = "" if default_shows_type else _type_name(hint)
        yield ConfigKey(key, _allowed(item, type_name), default, meaning)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _type_name(hint: Any) -> str:
    """The type in the words of a user of YAML."""
    # A union has no name of its own: all unions of the schema are a list, a mapping or a text.
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "bool"}
    container = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if container is list:
        return f"list of {names[arguments[0]]}"
    if container is dict and arguments[1] is Any:
        return "mapping"
    if container is dict:
        return f"mapping to {names[arguments[1]]}"
    return names.get(hint, "list, mapping or text")


def _allowed(item: dataclasses.Field[Any], type_name: str) -> str:
    """The choices, the registered names, or the type with its bounds."""
    rules = item.metadata
    if "choices" in rules:
        return ", ".join(code_span(choice) for choice in rules["choices"])
    if "registry" in rules:
        registered = [code_span(entry.name) for entry in built_in(KINDS[rules["registry"]])]
        # A plugin may register more.
        return ", ".join([*registered, "..."])
    if "minimum" in rules and "maximum" in rules:
        return f"{rules['minimum']:g} to {rules['maximum']:g}"

    description = []
    if type_name:
        description.append(type_name)
    if "minimum" in rules:
        description.append(f"≥{rules['minimum']:g}")
    if "above" in rules:
        description.append(f">{rules['above']:g}")
    return " ".join(description)


def _default_and_allowed(default: str, allowed: str) -> str:
    """The default, then the other choices after a semicolon, or in parentheses the type and the bounds."""
    choices = allowed.split(", ")
    if default and default in choices:
        others = [choice for choice in choices if choice != default]
        return f"{default}; {', '.join(others)}"

    # `false` is a bool and `""` a text for every reader; null shows no type.
    default_shows_type = allowed in ("bool", "mapping", "text") and default != "`null`"
    if default_shows_type or not allowed:
        return default
    return f"{default} ({allowed})"


def configuration_keys() -> str:
    """One table per top-level key; scalar top-level keys come first."""
    sections: dict[str, list[Sequence[str]]] = {}
    for row in config_keys():
        if not row.meaning:
            raise SystemExit(f"config/schema.py: {row.key} has no documentation")
        top = row.key.split(".")[0]
        is_section = "." in row.key or top in ("rewards", "callbacks")
        section = top if is_section else "the run"
        cells = (code_span(row.key), _default_and_allowed(row.default, row.allowed), row.meaning)
        sections.setdefault(section, []).append(cells)

    head = ("key", "default", "meaning")
    return "\n\n".join(f"### {section}\n\n{table(head, rows)}" for section, rows in sections.items())


# --- configuration: KL terms ----------------------------------------------------------------------------------
def term_fields() -> str:
    """The fields of a KL term, with their defaults."""
    in_reward = KLTerm("k1", placement="reward")
    rows = []
    for item in dataclasses.fields(KLTerm):
        if item.name in ("credit", "baseline"):
            # Their default depends on the placement: in loss they have no meaning.
            default = f"{code_span(getattr(in_reward, item.name))} in reward"
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            default = "required"
        else:
            default = format_default(_default(item))
        allowed = _allowed(item, type_name="")
        rows.append((code_span(item.name), _default_and_allowed(default, allowed), item.metadata["doc"]))
    return table(("field", "default", "meaning"), rows)


# --- configuration: names and recipes ---------------------------------------------------------------------------
def enumerated_target(terms: Sequence[KLTerm], regime: str) -> str:
    """The target of the sum of ``terms``, each at beta 1, by exact enumeration, or ``none``."""
    instance = Instance.random(Tree.build(vocabulary=3, length=3), InstanceSettings(regime=regime, seed=3))
    gradient = expected_gradient(instance, [dataclasses.replace(term, beta=1.0) for term in terms])

    # A mixture and a weighted term have targets of their own; a sum of terms has none.
    single_term = terms[0] if len(terms) == 1 else None
    targets = list(TARGETS)
    if single_term is not None:
        targets += own_targets(single_term)

    for name in targets:
        bias = gradient.relative_bias(target_gradient(instance, name, single_term))
        if bias < 1e-10:
            return name
    return "none"


def recipes() -> str:
    """The recipes by what they optimize on-policy and off-policy."""
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in built_in(RECIPES):
        terms = recipe(entry.name)
        # The recipe `none` has no terms, and nothing to optimize.
        if not terms:
            continue
        targets = (_described_target(terms, "on_policy"), _described_target(terms, "off_policy"))
        groups.setdefault(targets, []).append(code_span(entry.name))

    rows = [(*targets, ", ".join(names)) for targets, names in groups.items()]
    return table(("on-policy", "off-policy", "recipes"), rows)


def _described_target(terms: Sequence[KLTerm], regime: str) -> str:
    """The claimed target of one term, or the enumerated one of several.

    Bounds (a cap, a window, clamps) bias a gradient. A bounded term is described as ``target (target without bounds)``
    where the two differ. Asserts that the claim without bounds is what enumeration finds.
    """
    if len(terms) > 1:
        return enumerated_target(terms, regime)
    (term,) = terms
    target = claimed_target(term, regime) or "none"
    kind = kind_in(term, regime)
    if target != "none":
        assert verdict(term, regime).startswith(f"{target}:")
    else:
        assert verdict(term, regime) == words_without_target(term, regime)

    unbounded_term = dataclasses.replace(
        term, cap=None, cap_mode="truncate", window=None, input_clamp=None, output_clamp=None
    )
    unbounded = claimed_target(unbounded_term, regime) or "none"
    assert unbounded == enumerated_target([unbounded_term], regime), f"{unbounded_term.label()} {regime}"
    if target == unbounded and kind is not None:
        return kind.kind
    if target == unbounded:
        return target
    return f"{target} ({unbounded})"


def verdicts() -> str:
    """The meaning of each target in the recipe table."""
    meanings = {**TARGET_MEANINGS, **KIND_WORDS, "none": NO_TARGET}
    return "\n".join(f"- `{name}`: {meaning}." for name, meaning in meanings.items())


def names() -> str:
    """Built-in corrections, rewards and environments, the latter two with their options."""
    # A correction has no column of options: its only option is a field of the term.
    correction_rows = []
    for entry in built_in(KINDS["corrections"]):
        correction_rows.append((code_span(entry.name), entry.summary.replace("``", "`")))
    reward_rows = []
    for entry in built_in(KINDS["rewards"]):
        reward_rows.append((code_span(entry.name), entry.summary.replace("``", "`"), options_of(entry)))

    corrections = table(("name", "what it is"), correction_rows)
    rewards = table(("name", "what it is", "options"), reward_rows)
    environment_rows = []
    for entry in built_in(KINDS["environments"]):
        environment_rows.append((code_span(entry.name), entry.summary.replace("``", "`"), options_of(entry)))
    environments = table(("name", "what it is", "options"), environment_rows)
    return f"### corrections\n\n{corrections}\n\n### rewards\n\n{rewards}\n\n### environments\n\n{environments}"


# --- architecture: packages --------------------------------------------------------------------------------------
def layers() -> dict[str, int]:
    """Layer of each package that exists, parsed from the import test: the test is the only place that lists them."""
    tree = ast.parse((ROOT / "tests/test_imports.py").read_text())
    packages_of_layer: Sequence[Sequence[str]] = ()
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            packages_of_layer = ast.literal_eval(node.value)

    layer_of_package = {}
    for layer, packages_here in enumerate(packages_of_layer):
        for package in packages_here:
            if _docstring_file(package).is_file():
                layer_of_package[package] = layer
    return layer_of_package


def _docstring_file(package: str) -> Path:
    """The file that documents a package or a module."""
    module = SOURCE / f"{package}.py"
    return module if module.is_file() else SOURCE / package / "__init__.py"


def summary_of(package: str) -> str:
    """The first sentence of the docstring of a package or module."""
    docstring = ast.get_docstring(ast.parse(_docstring_file(package).read_text())) or ""
    first_sentence = re.split(r"(?<=\w)\.\s|\n\n", docstring.strip())[0]
    return first_sentence.replace("\n", " ").rstrip(".").replace("``", "`")


def packages() -> str:
    rows = [(str(layer), code_span(package), summary_of(package)) for package, layer in layers().items()]
    return table(("layer", "package", "what it is for"), rows)


# --- tables from the committed results of studies -------------------------------------------------------------------
# pandas and the studies are imported inside: a check of one page needs neither.
def open_problem() -> str:
    """The table of docs/open_problem.md: errors at 16 tokens and 1024 completions."""
    from research.studies.open_problem import error_table
    from research.studies.pages import markdown, read_frame

    frame = read_frame(ROOT / "results" / "open_problem" / "open_problem.parquet")
    selected = frame[(frame.length == 16) & frame.staleness.isin((0.0, 0.3, 0.6, 1.0))]
    return markdown(error_table(selected, 1024))


def prefix_ratios() -> str:
    """Effective share of prefix ratios by length and divergence, in closed form."""
    from research.studies.open_problem import lognormal_ratios
    from research.studies.pages import markdown

    return markdown(lognormal_ratios())


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "index.md": terminal.PARTS,
    "architecture.md": {"packages": packages},
    "configuration.md": {
        "keys": configuration_keys,
        "term fields": term_fields,
        "recipes": recipes,
        "verdicts": verdicts,
        "names": names,
    },
    "dialogues.md": {**rollout_rows.PARTS, **turn_baselines.PARTS},
    "evaluation.md": suites.PARTS,
    "matrix.md": matrix.PARTS,
    "planning.md": plans.PARTS,
    "open_problem.md": {
        **advice.OPEN_PROBLEM,
        "open_problem": open_problem,
        "prefix ratios": prefix_ratios,
    },
    "decision.md": {**advice.DECISION, **kl_terms.PARTS},
    "loss_or_reward.md": kl_terms.PLACEMENTS,
    "references.md": {"to the sampler": kl_terms.to_the_sampler},
    "../README.md": advice.README,
    "../results/advice/README.md": advice.RESULTS,
    "algorithms.md": {**policy_terms.PARTS, **groups_without_signal.PARTS},
    "peers.md": peers.PARTS,
}
"""The generated parts of each page that is otherwise written by hand; paths are relative to docs/."""

ADVISED = ("decision.md", "open_problem.md", "../README.md", "../results/advice/README.md")
"""Pages with parts that come from the advice."""

ENUMERATED = ("decision.md", "loss_or_reward.md", "references.md", *kl_terms.WHOLE)
"""Pages that need a certificate of every term (about half a minute)."""


def render(page: str) -> str:
    """The page with its generated parts, or the whole generated page."""
    if page in kl_terms.WHOLE:
        return kl_terms.WHOLE[page]()
    text = (ROOT / "docs" / page).read_text()
    for name, make in PAGES[page].items():
        begin = f"<!-- generated: {name} -->"
        end = f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"docs/{page}: needs exactly one {begin} and one {end}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def stale_pages(pages: Sequence[str]) -> list[str]:
    """The pages whose generated parts are out of date."""
    return [page for page in pages if (ROOT / "docs" / page).read_text() != render(page)]


def measured_text() -> str:
    """What training showed of the advice, measured from the exports: the text of peers/advice_measured.yaml."""
    from research.studies.advice import measure, text_of

    return text_of(measure(read_advice()))


def main() -> None:
    """Write every page; with ``--check``, exit with the names of those that would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    parser.add_argument("--advice", action="store_true", help="only what comes from peers/advice.yaml")
    arguments = parser.parse_args()

    every_page = (*PAGES, *kl_terms.WHOLE)
    if arguments.advice:
        every_page = ADVISED
    if arguments.check:
        if MEASURED.read_text() != measured_text():
            sys.exit(f"stale: {MEASURED.name}; run python research/scripts/generate_docs.py --advice")
        stale = stale_pages(every_page)
        if stale:
            sys.exit(f"stale: {', '.join(stale)}; run python research/scripts/generate_docs.py")
        return
    # Before the pages, whose tables read it.
    MEASURED.write_text(measured_text())
    print(f"wrote {MEASURED.relative_to(ROOT)}")
    for page in every_page:
        (ROOT / "docs" / page).write_text(render(page))
        print(f"wrote docs/{page}")


if __name__ == "__main__":
    main()
