"""Launch scripts and configs of other systems: shell, Python, YAML and TOML to the flags that bear on the KL.

    file -> parse (settings, words) -> recognise the system by its marks -> its flags -> peers.read_flags

Nothing in a file is executed or imported: Python is read as a syntax tree, shell line by line. A value that is not a
literal is reported. Only settings that a flag of the system names are used.
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
BEFORE_COMMAND = ("&&", "||", "|", ";", "then", "do", "export", "local", "else")
"""Words of a shell line after which a command begins, and with it the place of assignments."""
NOT_CONSTANT = ast.Tuple([])
"""The value of a name that is assigned twice: an empty tuple is a literal that no flag can have."""
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
    """The KL flags that a file sets. ``remarks`` name values that were not literal, or given twice."""

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
        # Named systems first: a file of a fork may have the marks of the original.
        chosen = find_system(system) if system else recognise(parsed)
        for override in overrides:
            key, equals, override_text = override.partition("=")
            if not equals or _flag_of(chosen, flag_key(key)) is None:
                raise bad_value("override", override, [f"{flag.where}=VALUE" for flag in chosen.flags])
            parsed.add(key, override_text)
        given: dict[str, Value] = _trainer(parsed) if chosen.name == "trl" else {}
        repeated: list[str] = []
        not_literal: dict[str, str] = {}
        for setting in parsed.settings:
            flag = _flag_of(chosen, setting.key)
            if flag is None:
                continue
            if not _is_readable(setting, flag):
                taken = "the earlier value" if flag.name in given else "its default"
                not_literal[flag.name] = (
                    f"{setting.key}: {shown(setting.text)} is not a literal; {taken} is taken (give {flag.name}=...)"
                )
                continue
            value = flag.parse(_text_of_flag(setting, flag), setting.key)
            if given.get(flag.name, value) != value:
                repeated.append(f"{setting.key}: given more than once; the last value is taken")
            given[flag.name] = value
            not_literal.pop(flag.name, None)  # a later literal replaces what could not be read
        remarks = dict.fromkeys([*not_literal.values(), *repeated])  # each once, in order
        return LaunchFile(system=chosen, given=given, remarks=tuple(remarks))


def _is_readable(setting: Setting, flag: Flag) -> bool:
    """Whether the value of a flag can be known from the file."""
    # A switch that is followed by a variable stands alone: `--use_kl_loss ${EXTRA_ARGS}`.
    is_lone_switch = flag.is_switch and str(setting.text).startswith("${")
    return setting.literal or is_lone_switch


def _text_of_flag(setting: Setting, flag: Flag) -> str | None:
    """The text of a flag's value; None for a switch whose next word is an argument and not its value."""
    if not flag.is_switch or setting.text is None:
        return setting.text
    if setting.text.strip("\"'").lower() in SWITCH:
        return setting.text
    return None


def recognise(parsed: Parsed) -> System:
    """The system with most of its marks in a file.

    Raises :class:`UserError` for none, for a tie, and for a run of another kind: SFT, DPO, a reward model.
    """
    # Words, their parts between / and ., and every prefix of a key: a mark may be any of them.
    present = set(parsed.words)
    for word in parsed.words:
        present.update(re.split(r"[/.]", word))
    for setting in parsed.settings:
        parts = setting.key.split(".")
        for n in range(len(parts)):
            present.add(".".join(parts[: n + 1]))

    counts = {}
    for name, candidate in SYSTEMS.items():
        marks = {flag_key(mark) for mark in candidate.marks}
        counts[name] = len(present & marks)
    most = max(counts.values())
    best = [name for name, count in counts.items() if count == most and count > 0]
    # A tie is not decided by order: the flags of two systems mean different things.
    if len(best) != 1:
        problem = f"no system of {', '.join(SYSTEMS)} recognised"
        if best:
            problem = f"could be {' or '.join(best)}"
        raise UserError(f"{problem}; name it with --system (for a kl_comedy config: kl-comedy certify FILE)")
    system = SYSTEMS[best[0]]
    # One mark may be an import of the library that another kind of run shares; more marks are its RL run.
    other_runs = sorted(part for part in present if re.fullmatch(system.other_runs, part))
    if other_runs and counts[system.name] == 1:
        raise UserError(
            f"{other_runs[0]} has none of the KL flags of {system.title} that explain knows; "
            f"--system {system.name} reads the file all the same"
        )
    return system


def _trainer(parsed: Parsed) -> dict[str, Value]:
    """TRL's trainer, which is given by a class, a command or a script, not by a flag."""
    trainers = set()
    for word in parsed.words:
        for trainer in TRL_CONFIGS.values():
            if re.search(rf"\b{trainer}(\.py)?$", word):
                trainers.add(trainer)
        if word in TRL_CONFIGS:
            trainers.add(TRL_CONFIGS[word])
    # GRPO is the default, and stays unwritten in the text that `explain` prints.
    if len(trainers) != 1 or "grpo" in trainers:
        return {}
    return {"trainer": trainers.pop()}


def _flag_of(system: System, key: str) -> Flag | None:
    """The flag that a key of a file means: its name, its path (perhaps under a root), or a tail of two components."""
    _, dot, last_part = key.rpartition(".")
    if last_part not in _last_parts(system.name):  # quick: most keys of a file are not those of a flag
        return None
    exact: list[Flag] = []
    tail: list[Flag] = []
    nested: list[Flag] = []
    for flag in system.flags:
        if _is_exact(flag, key):
            exact.append(flag)
        if dot and f".{flag_key(flag.where)}".endswith(f".{key}"):
            tail.append(flag)
        # A flag without a path, in a file that has sections.
        if dot and "." not in flag.where and last_part == flag.name:
            nested.append(flag)
    # From the surest to the least sure; several that fit equally well are none.
    for matches in (exact, tail, nested):
        if len(matches) == 1:
            return matches[0]
    return None


def _is_exact(flag: Flag, key: str) -> bool:
    """Whether a key is a flag's name, an alias, or one of its paths, perhaps under a root of the file's own."""
    if key == flag.name or key in flag.aliases:
        return True
    paths = [flag.where]
    for alias in flag.aliases:
        if "." in alias:
            paths.append(alias)
    return any(f".{key}".endswith(f".{flag_key(path)}") for path in paths)


@functools.cache
def _last_parts(system: str) -> frozenset[str]:
    """What the key of one of the system's flags may end in."""
    last_parts = set()
    for flag in SYSTEMS[system].flags:
        for name in (flag.name, flag.where, *flag.aliases):
            last_parts.add(name.rsplit(".", 1)[-1])
            last_parts.add(flag_key(name).rsplit(".", 1)[-1])
    return frozenset(last_parts)


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
            inner_key = f"{key}.{name}" if key else str(name)
            _flatten(value, inner_key, parsed)
    elif _is_list_of_mappings(data):
        for item in data:
            _flatten(item, key, parsed)
    elif key:
        text, literal = _text(data)
        parsed.add(key, text, literal and "${" not in text)


def _is_list_of_mappings(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(item, Mapping) and item for item in data)


def _text(value: Any) -> tuple[str, bool]:
    """A value as one types it, and whether it is a literal that a flag can have."""
    if isinstance(value, str):
        return value, True
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value).replace("null", "none"), True
    return type(value).__name__, False


def _shell(text: str, parsed: Parsed) -> None:
    """Assignments, ``key=value`` and ``--key value`` of every command; comments and quotes as a shell takes them."""
    variables: dict[str, str] = {}
    without_comments = re.sub(r"(?m)^[ \t]*#.*$", "", text)
    # Comments first: one between two continued lines would otherwise hide the rest of the command.
    joined = re.sub(r"\\\r?\n", " ", without_comments)
    for line in joined.splitlines():
        if len(line) > MAX_LINE:
            raise UserError(f"a command of more than {MAX_LINE:,} characters: {shown(line[:100])}")
        line = re.sub(r"^(\s*(?:export\s+|local\s+)?\w+)\+?=\(", r"\1= ", line)  # the words of an array are arguments
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # quotes that span lines
            words = line.split()
        substituted = []
        for word in words:
            if "(" not in word:
                word = word.rstrip(";)")  # ends a subshell or an array, and not the value
            substituted.append(_substitute(word, variables, parsed))
        _command(substituted, variables, parsed)


def _substitute(word: str, variables: Mapping[str, str], parsed: Parsed) -> str:
    """``$NAME`` and ``${NAME:-default}`` with what the file assigned; others stay."""

    def value(match: re.Match[str]) -> str:
        default = match[0] if match[2] is None else match[2]
        return parsed.count_written(variables.get(match[1] or match[3], default))

    return VARIABLE.sub(value, word)


def _command(words: Sequence[str], variables: dict[str, str], parsed: Parsed) -> None:
    """The words of one line; assignments before the first command name are variables."""
    in_command = False
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        key, equals, value = word.partition("=")
        if word in BEFORE_COMMAND:
            in_command = False
        elif word.startswith("--") and len(word) > 2:
            in_command = True
            takes_next = not equals and bool(waiting) and not waiting[-1].startswith("--")
            if takes_next:
                value = waiting.pop()
            is_lone = not equals and not takes_next
            parsed.add(key, None if is_lone else value, _is_known(value))
        elif equals and not in_command and key.isidentifier():
            variables[key] = value
        elif equals and re.fullmatch(r"[+~]*[\w./-]+", key):
            in_command = True
            parsed.add(key, value, _is_known(value))
        else:
            in_command = True
            parsed.words.append(word)


def _is_known(value: str) -> bool:
    """Whether a word of a shell command is its own value: no variable that is not assigned here, no command."""
    return "$" not in value and "`" not in value


def _python(text: str, parsed: Parsed) -> None:
    """Literal keyword arguments (of TRL's configs where there are any, else of every call), ``--flags`` in strings."""
    nodes = list(ast.walk(ast.parse(text)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    config_calls = [call for call in calls if _name(call.func) in TRL_CONFIGS]
    constants = _constants(nodes)
    # A script that makes a TRL config also calls models and data sets, whose arguments have names such as `beta`.
    for call in config_calls or calls:
        _add_keywords(call, constants, parsed)
    parsed.words += [_name(call.func) for call in calls]
    parsed.words += _imported(nodes)
    for argument in _strings(nodes):
        # The command of a script that starts another program: subprocess.run(["python", "--beta", ...]).
        if argument.lstrip().startswith("--"):
            _shell(argument, parsed)


def _constants(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """The value of each name that is assigned once; a name that is assigned twice has none that could be known."""
    constants: dict[str, ast.expr] = {}
    for node in nodes:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Name):
            continue
        if target.id in constants:
            constants[target.id] = NOT_CONSTANT
        else:
            constants[target.id] = node.value
    return constants


def _add_keywords(call: ast.Call, constants: Mapping[str, ast.expr], parsed: Parsed) -> None:
    """Add the keyword arguments of one call, with the constants that they name put in."""
    for keyword in call.keywords:
        value = keyword.value
        if isinstance(value, ast.Name):
            value = constants.get(value.id, value)
        try:
            plain, literal = _text(ast.literal_eval(value))
        except (ValueError, TypeError, SyntaxError):
            plain = ast.unparse(keyword.value)[:60]
            literal = False
        parsed.add(keyword.arg or f"{_name(call.func)}(**)", plain, literal)


def _strings(nodes: Sequence[ast.AST]) -> list[str]:
    """The strings of a program other than docstrings, which may show a command that is not run."""
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = []
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in documentation and isinstance(node.value, str):
            strings.append(node.value)
    return strings


def _name(function: ast.expr) -> str:
    """The last name of what is called: ``GRPOConfig`` of ``trl.GRPOConfig(...)``; empty for anything else."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    return ""


def _imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
