"""Launch scripts and configs of other systems: shell, Python, YAML and TOML to the flags that bear on the KL.

    file -> parse (settings, words) -> recognise the system by its marks -> its flags -> peers.read_flags

Nothing in a file is executed or imported: Python is read as a syntax tree, shell line by line, and a value that is no
literal is reported. Only what the flags of the system name is used.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kl_comedy.errors import UserError, bad_value, error_prefix, shown
from kl_comedy.io import MAX_FILE_BYTES, MAX_KEY_PARTS, MAX_VALUES, check_yaml, read_text, yaml_errors
from kl_comedy.lab.peers import SWITCH, SYSTEMS, Flag, Reading, System, Value, find_system, flag_key, read_flags

MAX_LINE = 20_000
"""Characters of one command of a shell script: splitting it takes time by the square of them."""
MAX_DOTS = 200
"""Dots in one line of TOML, those within numbers aside: the parser takes memory by the square of the parts of a key."""
TRL_CONFIGS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "AsyncGRPOConfig": "async_grpo"}
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]{0,200}))?\}|(\w+))")
"""The default is bounded: without, a brace that nothing closes is looked for from every ``${A:-`` to the end."""


@dataclass(frozen=True)
class Setting:
    """A key with its text: None for a lone ``--key``. ``literal``: whether the text is the value."""

    key: str
    text: str | None
    literal: bool = True


@dataclass
class Parsed:
    """Everything that a file sets, in order, and the other words of its commands."""

    settings: list[Setting] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    written: int = 0

    def add(self, key: str, text: str | None, literal: bool = True) -> None:
        if key.count(".") >= MAX_KEY_PARTS:
            raise UserError(f"the key {shown(key)} has more than {MAX_KEY_PARTS} parts")
        self.settings.append(Setting(flag_key(key), text, literal))
        if len(self.settings) > MAX_VALUES:
            raise UserError(f"sets more than {MAX_VALUES:,} keys; a launch script or config is expected")

    def count_written(self, text: str) -> str:
        """``text``, the value of a variable at one place: lines such as ``a=$a$a`` double it each time."""
        self.written += len(text)
        if self.written > MAX_FILE_BYTES:
            raise UserError(f"its variables stand for more than {MAX_FILE_BYTES:,} characters")
        return text


@dataclass(frozen=True, kw_only=True)
class LaunchFile:
    """What a file sets of a system's KL flags. ``remarks``: values that were not literal, or given twice."""

    system: System
    given: Mapping[str, Value]
    remarks: tuple[str, ...]

    def reading(self) -> Reading:
        return read_flags(self.system, self.given)


def read_launch_file(path: Path, *, system: str | None = None, overrides: Sequence[str] = ()) -> LaunchFile:
    """Parse ``path`` and find the KL flags of its system, or of ``system``; ``overrides`` (``key=value``) come last.

    Raises :class:`UserError` for a file that is too large or cannot be parsed, a system that is not recognised, and a
    value that a flag cannot have.
    """
    with error_prefix(str(path)):
        parsed = parse(path)
        chosen = find_system(system) if system else recognise(parsed)
        for text in overrides:
            key, equals, value = text.partition("=")
            if not equals or _flag_of(chosen, flag_key(key)) is None:
                raise bad_value("override", text, [f"{flag.where}=VALUE" for flag in chosen.flags])
            parsed.add(key, value)
        given: dict[str, Value] = _trainer(parsed) if chosen.name == "trl" else {}
        remarks: list[str] = []
        unread: dict[str, str] = {}
        for setting in parsed.settings:
            flag = _flag_of(chosen, setting.key)
            if flag is None:
                continue
            if not setting.literal and not (flag.is_switch and str(setting.text).startswith("${")):
                default = "its default" if flag.name not in given else "the earlier value"
                unread[flag.name] = (
                    f"{setting.key}: {shown(setting.text)} is no literal; {default} is taken (give {flag.name}=...)"
                )
                continue
            lone = flag.is_switch and (setting.text is None or setting.text.strip("\"'").lower() not in SWITCH)
            value = flag.parse(None if lone else setting.text, setting.key)
            if given.get(flag.name, value) != value:
                remarks.append(f"{setting.key}: given more than once; the last value is taken")
            given[flag.name] = value
            unread.pop(flag.name, None)
        return LaunchFile(system=chosen, given=given, remarks=tuple(dict.fromkeys((*unread.values(), *remarks))))


def recognise(parsed: Parsed) -> System:
    """The system with most of its marks in a file.

    Raises :class:`UserError` for none, for a tie, and for a run of another kind: SFT, DPO, a reward model.
    """
    present = set(parsed.words) | {part for word in parsed.words for part in re.split(r"[/.]", word)}
    for setting in parsed.settings:
        parts = setting.key.split(".")
        present |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    counts = {name: len(present & {flag_key(mark) for mark in each.marks}) for name, each in SYSTEMS.items()}
    best = [name for name, count in counts.items() if count == max(counts.values()) and count]
    if len(best) != 1:
        which = f"could be {' or '.join(best)}" if best else f"no system of {', '.join(SYSTEMS)} recognised"
        raise UserError(f"{which}; name it with --system (a config of ours: kl-comedy certify FILE)")
    system = SYSTEMS[best[0]]
    other_runs = sorted(part for part in present if re.fullmatch(system.other_runs, part))
    if other_runs and counts[system.name] == 1:
        raise UserError(
            f"{other_runs[0]} has none of the KL flags of {system.title} that explain knows; "
            f"--system {system.name} reads the file all the same"
        )
    return system


def _trainer(parsed: Parsed) -> dict[str, Value]:
    """TRL's trainer, which is no flag but a class, a command or a script."""
    names = {name for word in parsed.words for name in TRL_CONFIGS.values() if re.search(rf"\b{name}(\.py)?$", word)}
    names |= {TRL_CONFIGS[word] for word in parsed.words if word in TRL_CONFIGS}
    return {"trainer": names.pop()} if len(names) == 1 and "grpo" not in names else {}


def _flag_of(system: System, key: str) -> Flag | None:
    """The flag that a key of a file means: its name, its path (perhaps under a root), or a tail of two components."""
    if key.rsplit(".", 1)[-1] not in _last_parts(system.name):  # most keys of a file are of no flag
        return None
    paths = {f.name: (f.where, *(alias for alias in f.aliases if "." in alias)) for f in system.flags}
    exact = [
        f
        for f in system.flags
        if key in (f.name, *f.aliases) or any(f".{key}".endswith(f".{flag_key(path)}") for path in paths[f.name])
    ]
    tail = [f for f in system.flags if "." in key and f".{flag_key(f.where)}".endswith(f".{key}")]
    nested = [f for f in system.flags if "." not in f.where and key.rsplit(".", 1)[-1] == f.name] if "." in key else []
    return next((matches[0] for matches in (exact, tail, nested) if len(matches) == 1), None)


@functools.cache
def _last_parts(system: str) -> frozenset[str]:
    """What the key of one of the system's flags may end in."""
    names = (name for flag in SYSTEMS[system].flags for name in (flag.name, flag.where, *flag.aliases))
    return frozenset(part for name in names for part in (name.rsplit(".", 1)[-1], flag_key(name).rsplit(".", 1)[-1]))


# --- parsers ------------------------------------------------------------------------------------------------------
def parse(path: Path) -> Parsed:
    """Read a file by its suffix (``.py``, ``.yaml``, ``.yml``, ``.json``, ``.toml``; else shell)."""
    reader: Callable[[str, Parsed], None] = _shell
    if path.suffix == ".py":
        reader = _python
    elif path.suffix == ".toml":
        reader = _toml
    elif path.suffix in (".yaml", ".yml", ".json"):
        reader = _yaml
    parsed = Parsed()
    try:
        reader(read_text(path), parsed)
    except UserError:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error).partition("\n")[0][:200] or "nested too deeply"
        if "integer string conversion" in reason:  # advice of Python for its programmers
            reason = "a number of more than 4,300 digits"
        raise UserError(f"cannot be read: {reason}") from None
    return parsed


@yaml_errors()
def _yaml(text: str, parsed: Parsed) -> None:
    check_yaml(text)
    _flatten(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), "", parsed)


def _toml(text: str, parsed: Parsed) -> None:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS and re.sub(r"\d\.\d", "", line).count(".") > MAX_DOTS:
            raise UserError(f"cannot be read: line {number} has more than {MAX_DOTS} dots, as a key with as many parts")
    _flatten(tomllib.loads(text), "", parsed)


def _flatten(data: Any, key: str, parsed: Parsed) -> None:
    """Mappings, also those in a list, to dotted keys; an empty one, and any other list, is a key without a literal."""
    if isinstance(data, Mapping) and data:
        for name, value in data.items():
            _flatten(value, f"{key}.{name}" if key else str(name), parsed)
    elif isinstance(data, list) and data and all(isinstance(item, Mapping) and item for item in data):
        for item in data:
            _flatten(item, key, parsed)
    elif key:
        text, literal = _text(data)
        parsed.add(key, text, literal and "${" not in text)


def _text(value: Any) -> tuple[str, bool]:
    """A value as one types it, and whether it is a literal that a flag can have."""
    if isinstance(value, str):
        return value, True
    literal = value is None or isinstance(value, bool | int | float)
    return (json.dumps(value).replace("null", "none"), True) if literal else (type(value).__name__, False)


def _shell(text: str, parsed: Parsed) -> None:
    """Assignments, ``key=value`` and ``--key value`` of every command; comments and quotes as a shell takes them."""
    variables: dict[str, str] = {}
    text = re.sub(r"\\\r?\n", " ", re.sub(r"(?m)^[ \t]*#.*$", "", text))
    for line in text.splitlines():
        if len(line) > MAX_LINE:
            raise UserError(f"a command of more than {MAX_LINE:,} characters: {shown(line[:100])}")
        line = re.sub(r"^(\s*(?:export\s+|local\s+)?\w+)\+?=\(", r"\1= ", line)  # the words of an array are arguments
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # quotes that span lines
            words = line.split()
        _command(
            [_substitute(word.rstrip(";)") if "(" not in word else word, variables, parsed) for word in words],
            variables,
            parsed,
        )


def _substitute(word: str, variables: Mapping[str, str], parsed: Parsed) -> str:
    """``$NAME`` and ``${NAME:-default}`` with what the file assigned; others stay."""

    def value(match: re.Match[str]) -> str:
        default = match[0] if match[2] is None else match[2]
        return parsed.count_written(variables.get(match[1] or match[3], default))

    return VARIABLE.sub(value, word)


def _command(words: Sequence[str], variables: dict[str, str], parsed: Parsed) -> None:
    """The words of one line; assignments before the first command name are variables."""
    started, at = False, 0
    while at < len(words):
        word, at = words[at], at + 1
        key, equals, value = word.partition("=")
        if word in ("&&", "||", "|", ";", "then", "do", "export", "local", "else"):
            started = False
        elif word.startswith("--") and len(word) > 2:
            started = True
            if not equals and at < len(words) and not words[at].startswith("--"):
                value, equals, at = words[at], "=", at + 1
            parsed.add(key, value if equals else None, "$" not in value and "`" not in value)
        elif equals and not started and key.isidentifier():
            variables[key] = value
        elif equals and re.fullmatch(r"[+~]*[\w./-]+", key):
            started = True
            parsed.add(key, value, "$" not in value and "`" not in value)
        else:
            started = True
            parsed.words.append(word)


def _python(text: str, parsed: Parsed) -> None:
    """Literal keyword arguments (of TRL's configs where there are any, else of every call), ``--flags`` in strings."""
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    constants: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            constants[name] = ast.Tuple([]) if name in constants else node.value  # assigned twice: no constant
    calls = [(_name(node.func), node) for node in nodes if isinstance(node, ast.Call)]
    configs = [(name, call) for name, call in calls if name in TRL_CONFIGS]
    for name, call in configs or calls:
        for keyword in call.keywords:
            value = constants.get(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
            try:
                plain, literal = _text(ast.literal_eval(value if value is not None else keyword.value))
            except (ValueError, TypeError, SyntaxError):
                plain, literal = ast.unparse(keyword.value)[:60], False
            parsed.add(keyword.arg or f"{name}(**)", plain, literal)
    parsed.words += [name for name, _ in calls] + list(_imported(nodes))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documentation]
    for text in (constant.value for constant in constants):
        if isinstance(text, str) and text.lstrip().startswith("--"):
            _shell(text, parsed)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
