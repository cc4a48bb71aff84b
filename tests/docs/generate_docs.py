"""Write the generated parts of docs/: `python tests/docs/generate_docs.py`. The tests assert that they are current.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->``; the rest of a page is
written by hand.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import algorithm_docs
import decision_docs
import evaluation_docs
import peers_docs
from open_problem_block import open_problem

from kl_comedy.config.schema import Config
from kl_comedy.errors import UserError
from kl_comedy.kl import KLTerm, claimed_target, recipe, verdict
from kl_comedy.kl.claims import TARGETS
from kl_comedy.kl.oracle import Setting, Tree, expected_gradient, target_gradient
from kl_comedy.kl.term import ANCHORS, BASELINES, CAP_MODES, CREDITS, GRADIENTS, LEVELS, PLACEMENTS, REFERENCES
from kl_comedy.registry import CORRECTIONS, ESTIMATORS, KINDS, RECIPES, Entry, Registry

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kl_comedy"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` and line breaks in a cell are escaped."""
    cells = [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    lines = [list(head), ["---"] * len(head), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def built_in(registry: Registry[Any]) -> list[Entry[Any]]:
    """The entries of the package itself: a plugin loaded in this process is not part of the pages."""
    return [entry for entry in registry if entry.origin.startswith("kl_comedy.")]


# --- configuration: keys ------------------------------------------------------------------------------------
def config_keys(node: type = Config, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """``(key, type, default, allowed)`` of every key under ``node``, in the order of the schema."""
    hints = typing.get_type_hints(node)
    for item in dataclasses.fields(node):
        key, hint = f"{prefix}{item.name}", hints[item.name]
        inner, optional = _inner(hint)
        args = typing.get_args(inner)
        if dataclasses.is_dataclass(inner):
            if optional:
                yield key, "mapping or null", _shown(_default(item)), ""
            yield from config_keys(typing.cast(type, inner), f"{key}.")
        elif typing.get_origin(inner) is list and dataclasses.is_dataclass(args[0]):
            yield key, "list", _shown(_default(item)), ""
            yield from config_keys(args[0], f"{key}.N.")
        elif typing.get_origin(inner) is dict and dataclasses.is_dataclass(args[1]):
            yield key, "mapping of names", _shown(_default(item)), "names of letters, digits, `.`, `_`, `-`"
            yield f"{key}.NAME", "mapping", "", ""
        else:
            yield key, _type_name(inner) + (" or null" if optional else ""), _shown(_default(item)), _allowed(item)


def _inner(hint: Any) -> tuple[Any, bool]:
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None)), True
    return hint, False


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _shown(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        value = value.name if hasattr(value, "name") else dataclasses.asdict(typing.cast(Any, value))
    if isinstance(value, list):
        return "`[" + ", ".join(_shown(item).strip("`") for item in value) + "]`"
    if isinstance(value, bool) or value is None or value in ("", {}):
        return (
            {True: "`true`", False: "`false`", None: "`null`", "": '`""`'}.get(value, "`{}`") if value != {} else "`{}`"
        )
    return f"`{value}`"


def _type_name(hint: Any) -> str:
    names: dict[Any, str] = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "list or text"}
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return f"list of {names[args[0]]}"
    if typing.get_origin(hint) is dict:
        return "mapping" if args[1] is Any else f"mapping to {names[args[1]]}"
    return names[hint]


def _allowed(item: dataclasses.Field[Any]) -> str:
    facts = item.metadata
    if "choices" in facts:
        return ", ".join(f"`{choice}`" for choice in facts["choices"])
    if "registry" in facts:
        return ", ".join(f"`{entry.name}`" for entry in built_in(KINDS[facts["registry"]])) + " + registered"
    bounds = [("minimum", "at least"), ("above", "above"), ("maximum", "at most")]
    return ", ".join(f"{words} {facts[name]:g}" for name, words in bounds if name in facts)


def configuration_keys() -> str:
    """One table per top-level key; scalars of the run itself first."""
    from meanings import MEANINGS

    rows = list(config_keys())
    missing = {row[0] for row in rows} ^ set(MEANINGS)
    if missing:
        raise SystemExit(f"meanings.py and the schema differ in: {', '.join(sorted(missing))}")
    sections: dict[str, list[Sequence[str]]] = {}
    for key, kind, default, allowed in rows:
        room = key.split(".")[0]
        section = room if "." in key or room in ("rewards",) else "the run"
        sections.setdefault(section, []).append((f"`{key}`", kind, default, allowed, MEANINGS[key]))
    head = ("key", "type", "default", "allowed", "meaning")
    return "\n\n".join(f"### {name}\n\n{table(head, lines)}" for name, lines in sections.items())


# --- configuration: KL terms ----------------------------------------------------------------------------------
def term_fields() -> str:
    from meanings import TERM_MEANINGS

    choices: dict[str, Sequence[str]] = {
        "estimator": [entry.name for entry in built_in(ESTIMATORS)],
        "correction": [entry.name for entry in built_in(CORRECTIONS)],
        "level": LEVELS,
        "placement": PLACEMENTS,
        "credit": CREDITS,
        "gradient": GRADIENTS,
        "anchor": ANCHORS,
        "reference": REFERENCES,
        "baseline": BASELINES,
        "cap_mode": CAP_MODES,
    }
    defaults = {
        item.name: "required" if item.name == "estimator" else _shown(_default(item))
        for item in dataclasses.fields(KLTerm)
    }
    in_reward = KLTerm("k1", placement="reward")
    for name in ("credit", "baseline"):
        defaults[name] = f"`{getattr(in_reward, name)}` in reward"
    rows = [
        (f"`{name}`", ", ".join(f"`{c}`" for c in choices.get(name, ())) or "see right", default, TERM_MEANINGS[name])
        for name, default in defaults.items()
    ]
    assert set(TERM_MEANINGS) == set(defaults)
    return table(("field", "values", "default", "meaning"), rows)


SPACE: dict[str, tuple[Any, ...]] = {
    "estimator": ("k1", "exact"),
    "level": LEVELS,
    "placement": PLACEMENTS,
    "credit": (None, *CREDITS),
    "correction": ("none", "token", "token_detached", "prefix", "prefix_previous", "sequence"),
    "gradient": GRADIENTS,
    "anchor": ANCHORS,
    "reference": ("initial", "sampler"),
    "baseline": (None, *BASELINES),
    "cap": (None, 2.0, 0.0),
}
"""Every field that :func:`_impossible` reads, one value of each kind."""


def impossible_cells() -> dict[str, dict[str, Any]]:
    """Each reason for which a cell is refused, with the shortest cell it is given for. By trying every cell."""
    plain = {"estimator": "k1", "placement": "reward", **{f.name: f.default for f in dataclasses.fields(KLTerm)[1:]}}
    found: dict[str, dict[str, Any]] = {}
    cells = [dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values())]
    short = [{name: value for name, value in cell.items() if value != plain[name]} for cell in cells]
    for cell in sorted(short, key=len):
        full = {"estimator": "k1", **cell}
        try:
            KLTerm(**full)
        except UserError as error:
            found.setdefault(_reason(str(error), full), full)
    return found


def _reason(message: str, cell: dict[str, Any]) -> str:
    reason = message.split(": ", 1)[1]
    reason = re.sub(rf"\b{cell['estimator']}\b(?= (sums|needs|already))", "ESTIMATOR", reason)
    reason = re.sub(r"not (to_go|own)$", "not NAME", reason)
    return re.sub(r"correction (token_detached|token|prefix_previous|prefix|sequence)\b", "correction NAME", reason)


def impossible() -> str:
    def written(cell: dict[str, Any]) -> str:
        return "`{" + ", ".join(f"{name}: {value}" for name, value in cell.items()) + "}`"

    return table(("for example", "why not"), [(written(cell), why) for why, cell in impossible_cells().items()])


# --- configuration: names and recipes ---------------------------------------------------------------------------
def enumerated(terms: Sequence[KLTerm], regime: str) -> str:
    """The target that a whole list hits by exact enumeration, or ``none``. Every term at beta 1."""
    if not terms:
        return "zero"
    setting = Setting.random(Tree.build(vocabulary=3, length=3), regime=regime, seed=3)
    gradient = expected_gradient(setting, [dataclasses.replace(term, beta=1.0) for term in terms])
    hits = [name for name in TARGETS if gradient.relative_bias(target_gradient(setting, name)) < 1e-10]
    return hits[0] if hits else "none"


def recipes() -> str:
    rows = []
    for entry in built_in(RECIPES):
        terms = recipe(entry.name)
        betas = " + ".join(f"{term.beta:g}" for term in terms) or "-"
        claims = [_said(terms, regime) for regime in ("on_policy", "off_policy")]
        rows.append((f"`{entry.name}`", entry.facts["terms"], betas, *claims, entry.source))
    head = ("recipe", "terms", "beta", "on-policy", "off-policy", "source")
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
    return each[0] if each[0] == uncapped else f"{each[0]} ({uncapped} while no bound acts)"


def verdicts() -> str:
    """What each target in the recipe table means, in the verdict's own words."""
    sampled = [entry.name for entry in built_in(ESTIMATORS) if entry.facts["needs"] == "log_ratio"]
    seen: dict[str, str] = {}
    for estimator, level, placement in itertools.product(sampled, LEVELS, PLACEMENTS):
        name, words = verdict(KLTerm(estimator, level=level, placement=placement), "on_policy").split(": ", 1)
        seen[name] = words
    return "\n".join(f"- `{name}`: {seen[name]}." for name in (*TARGETS, "none"))


def names() -> str:
    """Every built-in part a config may name, with its options."""
    parts = []
    for kind in (
        "estimators",
        "corrections",
        "advantages",
        "policy_losses",
        "policy_corrections",
        "rewards",
        "datasets",
        "rollouts",
    ):
        rows = [
            (f"`{entry.name}`", entry.summary.replace("``", "`"), ", ".join(entry.claims), options_of(entry))
            for entry in built_in(KINDS[kind])
        ]
        head: tuple[str, ...] = ("name", "what it is", "claims", "options")
        keep = [n for n, title in enumerate(head) if title in ("name", "what it is") or any(row[n] for row in rows)]
        parts.append(f"### {kind}\n\n" + table([head[n] for n in keep], [[row[n] for n in keep] for row in rows]))
    return "\n\n".join(parts)


def options_of(entry: Entry[Any]) -> str:
    """Keyword options with their defaults; datasets and rollouts read theirs from the config."""
    if entry.kind in ("datasets", "rollouts"):
        return ""
    parameters = [
        p for p in inspect.signature(entry.fn).parameters.values() if p.default is not inspect.Parameter.empty
    ]
    options = [f"`{p.name}={_shown(p.default).strip('`')}`" for p in parameters]
    if entry.kind == "rewards" and entry.facts.get("isolated"):
        from kl_comedy.rewards.pool import TIMEOUT_S

        options.append(f"`timeout_s={TIMEOUT_S:g}`")
    return ", ".join(options)


# --- architecture: rooms ----------------------------------------------------------------------------------------
def layers() -> dict[str, int]:
    """The layer table of the import test, read without running it."""
    tree = ast.parse((ROOT / "tests/unit/test_imports.py").read_text())
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: dict[str, int] = ast.literal_eval(assigned["LAYERS"])
    return found


def files_of(room: str) -> list[Path]:
    file = SOURCE / f"{room}.py"
    return [file] if file.is_file() else sorted((SOURCE / room).rglob("*.py"))


def imports_of(room: str) -> list[str]:
    """The other rooms whose modules ``room`` imports, anywhere in its files."""
    found: set[str] = set()
    for node in itertools.chain.from_iterable(ast.walk(ast.parse(file.read_text())) for file in files_of(room)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kl_comedy"):
            found |= {f"{node.module}.{alias.name}".split(".")[1] for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("kl_comedy.")}
    return sorted(found - {room})


def rooms() -> str:
    from meanings import ROOMS

    order = layers()
    there = {room: layer for room, layer in order.items() if files_of(room)}
    assert set(there) <= set(ROOMS), set(there) - set(ROOMS)
    rows = []
    for room, layer in sorted(there.items(), key=lambda item: item[1]):
        others = [f"**{other}**" if order[other] == layer else other for other in imports_of(room)]
        rows.append((str(layer), f"`{room}`", ROOMS[room], ", ".join(others) or "nothing of ours"))
    return table(("layer", "room", "what it is for", "imports"), rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "architecture.md": {"rooms": rooms},
    "configuration.md": {
        "keys": configuration_keys,
        "term fields": term_fields,
        "impossible": impossible,
        "recipes": recipes,
        "verdicts": verdicts,
        "names": names,
    },
    "evaluation.md": evaluation_docs.PARTS,
    "open_problem.md": {"open_problem": open_problem},
    "decision.md": {**decision_docs.PARTS, **algorithm_docs.DECISION},
    "algorithms.md": algorithm_docs.PARTS,
    "peers.md": peers_docs.PARTS,
}


def render(page: str) -> str:
    """The page with its generated parts made anew, or all of it."""
    if page in decision_docs.WHOLE:
        return decision_docs.WHOLE[page]()
    text = (ROOT / "docs" / page).read_text()
    for name, make in PAGES[page].items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"docs/{page}: needs exactly one {begin} and one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    for name in (*PAGES, *decision_docs.WHOLE):
        (ROOT / "docs" / name).parent.mkdir(exist_ok=True)
        (ROOT / "docs" / name).write_text(render(name))
        print(f"wrote docs/{name}")
