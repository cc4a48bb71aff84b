"""What a launch script or config sets: shell, Python, notebooks, YAML, JSON and TOML to settings with their origin.

Nothing in a file is executed or imported: Python is read as a syntax tree, shell by :mod:`.launch_shell`. What a file
leaves to others (a base config, ``**options``) is in ``Parsed.unread``, so that it can be named.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from kl_comedy.errors import UserError, shown
from kl_comedy.io import MAX_FILE_BYTES, MAX_KEY_PARTS, MAX_VALUES, check_yaml, read_text, yaml_errors
from kl_comedy.lab.launch_releases import REQUIREMENT
from kl_comedy.lab.launch_shell import CERTAIN, Interpreter, Origin, Word
from kl_comedy.lab.peers import flag_key

MAX_DOTS = 200
"""Dots in one line of TOML, those within numbers aside: the parser takes memory by the square of the parts of a key."""
MAX_NESTED_COMMANDS = 3
"""Commands in words of commands: ``srun bash -c "python ..."``."""
MAX_NOTEBOOK_BYTES = 20_000_000
"""A notebook holds the pictures of its outputs; its code has the limit of any other file."""
MAX_BASES = 5
"""Base configs that name base configs."""
PROGRAMS = ("--module", "--entrypoint", "--entry-point", "--process_main")
"""Options whose value is the program that runs."""
MODULE_KEY = re.compile(r".*(path|spec|module|function|func|fn|class|cls)")
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""A value of such an option names code, by whose package the system is told."""
CONFIGS = (
    "--config",
    "--config-file",
    "--config_file",
    "--config-path",
    "--config_path",
    "--config-name",
    "--config_name",
)
"""Options whose value may be a file with more settings."""
CONFIG_NAMES = ("--config-name", "--config_name")
"""Those of them whose value is a config even without a suffix: Hydra adds it."""
CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
TAKES_CONFIG = re.compile(r"@|.*\.(py|sh)|train|rlhf|grpo|rl|axolotl\.cli\.train")
"""Words after which a config follows: ``rl @ run.toml``, ``axolotl train run.yaml``, ``train.py run.yaml``."""
MAKEFILE = re.compile(r"(GNU)?[Mm]akefile|.*\.mk|\.?justfile|.*\.just")
STARTED = re.compile(r"[^\s;|&=()\"']+\.(py|sh|bash|slurm|sbatch)")
"""Words of a command, or their last parts, that are a program."""
TRAINING = re.compile(r".*(train|run|launch|experiment|main|fit|learn).*", re.IGNORECASE)
"""Names that a program takes from a module of its own, which trains."""
PROGRAM = re.compile(
    r"(?m)(^|&& )\s*([A-Z_]+=\S+ )*(python3?|torchrun|accelerate|deepspeed|ray|srun|bash|uv|swift|trl) "
)
"""The start of a command in a list of them."""
ENVIRONMENTS = ("env", "envs", "environment", "environ", "env_vars", "envvars", "environment_variables")
"""Keys of the variables that a job gives its commands."""
OVERRIDE = re.compile(r"[+~]*[\w./@-]+")
ARRAY_END = re.compile(r"\[[@*]\]")


@dataclass(frozen=True)
class Setting:
    """A key with its text: None for a lone ``--key``. ``literal``: whether the text is the value.

    ``scope`` is the class or function of Python that gets it; empty elsewhere. ``is_added``: written as Hydra's
    ``+key``, which is an error for a key that the config has.
    """

    key: str
    text: str | None
    literal: bool = True
    origin: Origin = CERTAIN
    scope: str = ""
    is_added: bool = False


@dataclass(frozen=True)
class Unread:
    """Something that the file leaves to others: ``what`` it is, and the ``scope`` that it may set."""

    what: str
    scope: str = ""
    may_hold_all: bool = False
    """Whether it may hold all settings: a config that a command names, ``**options`` of a class."""


@dataclass
class Parsed:
    """Everything that a file sets, in order, and by which other words its system can be told."""

    settings: list[Setting] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """Programs, modules and arguments of commands, and pairs of such words, as ``swift sft``."""
    calls: list[str] = field(default_factory=list)
    """Classes and functions that Python calls, and base classes."""
    imports: list[str] = field(default_factory=list)
    sections: set[str] = field(default_factory=set)
    """Every prefix of a key."""
    unread: list[Unread] = field(default_factory=list)
    configs: list[Word] = field(default_factory=list)
    """Files that a command takes settings from."""
    started: list[str] = field(default_factory=list)
    """Scripts and modules that a command starts: what they set is not read."""
    own_modules: list[str] = field(default_factory=list)
    """Modules from which a Python program imports a function that trains, by its name."""
    is_config: bool = False
    """Whether the file is YAML, JSON or TOML, and no program."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that a job or the script around a command gives it."""
    written_files: list[str] = field(default_factory=list)
    """Words of commands that write a here-document: the file is among them."""
    origin: Origin = CERTAIN
    """That of everything which is being read: a command inside a command has the origin of its word."""
    written: int = 0

    def add(self, setting: Setting) -> None:
        if setting.key.count(".") >= MAX_KEY_PARTS:
            raise UserError(f"the key {shown(setting.key)} has more than {MAX_KEY_PARTS} parts")
        key = flag_key(setting.key)
        origin = setting.origin
        # The loop around a command bears on those of its words that are one of the loop's values.
        if self.origin.kind != "loop" or str(setting.text) in re.split(r"[ ,]", self.origin.why):
            origin = origin.within(self.origin)
        is_added = setting.key.startswith("+") and not setting.key.startswith("++")
        self.settings.append(Setting(key, setting.text, setting.literal, origin, setting.scope, is_added))
        parts = key.split(".")
        for n in range(1, len(parts)):
            self.sections.add(".".join(parts[:n]))
        if len(self.settings) > MAX_VALUES:
            raise UserError(f"sets more than {MAX_VALUES:,} keys; a launch script or config is expected")

    @contextlib.contextmanager
    def within(self, origin: Origin) -> Iterator[None]:
        """While this lasts, what is added has at most the certainty of ``origin``."""
        before = self.origin
        self.origin = origin.within(before)
        try:
            yield
        finally:
            self.origin = before

    def count_written(self, text: str) -> str:
        """``text``, the value of a variable at one place: lines such as ``a=$a$a`` double it each time."""
        self.written += len(text)
        if self.written > MAX_FILE_BYTES:
            raise UserError(f"its variables stand for more than {MAX_FILE_BYTES:,} characters")
        return text


def parse(path: Path) -> Parsed:
    """Read a file by its suffix (``.py``, ``.ipynb``, ``.yaml``, ``.yml``, ``.json``, ``.toml``; else shell)."""
    parsed = Parsed(is_config=path.suffix in CONFIG_SUFFIXES)
    try:
        limit = MAX_NOTEBOOK_BYTES if path.suffix == ".ipynb" else MAX_FILE_BYTES
        text = read_text(path, limit=limit)
        if MAKEFILE.fullmatch(path.name):
            shell(_recipes_as_shell(text), parsed)
        elif path.suffix in (".yaml", ".yml", ".json"):
            _yaml(text, parsed, path)
        else:
            reader_of(path.suffix)(text, parsed)
        _read_configs(parsed, path)
    except UserError:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error).partition("\n")[0][:200] or "nested too deeply"
        if "integer string conversion" in reason:  # advice of Python for its programmers
            reason = "a number of more than 4,300 digits"
        raise UserError(f"cannot be read: {reason}") from None
    return parsed


def _read_configs(parsed: Parsed, path: Path) -> None:
    """Read the configs that a command names, where they lie beside the file or above it; name the others.

    Their settings come first: what the command says itself counts.
    """
    configs = list(dict.fromkeys(parsed.configs))
    names_of_written = {Path(name).name for name in parsed.written_files}
    settings = parsed.settings
    parsed.settings = []
    for word in configs:
        if "accelerate" in word.text or "deepspeed" in word.text or "ds_config" in word.text:
            continue  # of the launcher, and not of the training
        found = _find_config(word.text, path)
        if found is None and Path(word.text).name in names_of_written:
            continue  # the script itself wrote it, and it was read there
        if found is None:
            parsed.unread.append(Unread(f"the config {word.text[:100]}", may_hold_all=True))
        elif found != path and found.suffix == ".toml":
            toml(read_text(found), parsed)
        elif found != path:
            _yaml(read_text(found), parsed, found)
    parsed.settings += settings


def _find_config(name: str, path: Path) -> Path | None:
    """The config that ``path`` names, beside it or above it. Hydra's names have no suffix and may lie in ``config``."""
    if "$" in name or ".." in name:
        return None
    names = [name]
    if Path(name).suffix not in CONFIG_SUFFIXES:
        names = [f"{name}.yaml", f"config/{name}.yaml"]
    for folder in [path.parent, *list(path.parents)[1 : MAX_BASES + 1]]:
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    return None


def reader_of(suffix: str) -> Callable[[str, Parsed], None]:
    """The reader of a text by the suffix of its file."""
    readers: dict[str, Callable[[str, Parsed], None]] = {".py": python, ".ipynb": notebook, ".toml": toml}
    if suffix in (".yaml", ".yml", ".json"):
        return _yaml
    return readers.get(suffix, shell)


# --- YAML, JSON and TOML ------------------------------------------------------------------------------------------
@yaml_errors()
def _yaml(text: str, parsed: Parsed, path: Path | None = None, depth: int = 0) -> None:
    check_yaml(text)
    data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    parsed.environment |= _environment_of(data)
    if isinstance(data, Mapping):
        # The base first: what the file itself says comes later, and counts.
        for name in _bases(data):
            _base(name, parsed, path, depth)
        data = {key: value for key, value in data.items() if key != "defaults"}
    _flatten(data, "", parsed)


def _environment_of(data: Any) -> dict[str, str]:
    """The variables that a job gives its commands: ``envs:`` of SkyPilot, ``env:`` of Kubernetes and of workflows."""
    names: dict[str, str] = {}
    if isinstance(data, list):
        for item in data:
            names |= _environment_of(item)
    elif isinstance(data, Mapping):
        for key, value in data.items():
            names |= _variables_of(value) if key in ENVIRONMENTS else _environment_of(value)
    return names


def _variables_of(data: Any) -> dict[str, str]:
    """Names with texts, out of ``NAME: text``, ``{name: NAME, value: text}`` or ``NAME=text``."""
    pairs: list[tuple[Any, Any]] = []
    if isinstance(data, Mapping):
        pairs += data.items()
    elif isinstance(data, list):
        for item in data:
            if isinstance(item, Mapping) and "name" in item:
                pairs.append((item["name"], item.get("value")))
            elif isinstance(item, str) and "=" in item:
                name, _, text = item.partition("=")
                pairs.append((name, text))
    return {str(name): plain_text(value)[0] for name, value in pairs if isinstance(value, str | int | float)}


def _bases(data: Mapping[str, Any]) -> list[str]:
    """The files that ``defaults:`` names: one, a list of them, or Hydra's list of groups."""
    defaults = data.get("defaults")
    if isinstance(defaults, str):
        return [defaults]
    names = []
    if isinstance(defaults, list):
        for item in defaults:
            if isinstance(item, str) and item != "_self_":
                names.append(item)
            elif isinstance(item, Mapping):
                names += [f"{group}: {choice}" for group, choice in item.items() if isinstance(choice, str)]
    return names


def _base(name: str, parsed: Parsed, path: Path | None, depth: int) -> None:
    """Read a base config that lies beside the file; name any other."""
    if path is not None and depth < MAX_BASES and ":" not in name:
        for candidate in (path.parent / name, path.parent / f"{name}.yaml"):
            if candidate.is_file() and candidate.suffix in (".yaml", ".yml") and candidate != path:
                _yaml(read_text(candidate), parsed, candidate, depth + 1)
                return
    parsed.unread.append(Unread(f"defaults: {name[:100]}"))
    parsed.words.append(f"defaults: {name[:100]}")


def toml(text: str, parsed: Parsed) -> None:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > MAX_DOTS and re.sub(r"\d\.\d", "", line).count(".") > MAX_DOTS:
            raise UserError(f"cannot be read: line {number} has more than {MAX_DOTS} dots, as a key with as many parts")
    _flatten(tomllib.loads(text), "", parsed)


def _flatten(data: Any, key: str, parsed: Parsed, origin: Origin = CERTAIN, scope: str = "") -> None:
    """Mappings, also those in a list, to dotted keys; an empty one, and any other list, is a key without a literal."""
    if isinstance(data, Mapping) and data:
        if key:
            parsed.sections.add(flag_key(key))
        for name, value in data.items():
            inner_key = f"{key}.{name}" if key else str(name)
            _flatten(value, inner_key, parsed, origin, scope)
    elif _is_list_of_mappings(data):
        for item in data:
            _flatten(item, key, parsed, origin, scope)
    elif _is_list_of_arguments(data):
        command_words([Word(str(item), origin) for item in data], parsed)
    elif _is_list_of_commands(data):
        # One script: what a line exports, the next ones have.
        shell("\n".join(data), parsed)
    elif key:
        text, literal = plain_text(data)
        if isinstance(data, str) and _holds_a_command(data):
            # `run: |` of SkyPilot, `command:` of a cluster's job.
            shell(data, parsed)
        parsed.add(Setting(key, text, literal and _is_literal(text), origin, scope))


def _is_literal(text: str) -> bool:
    """Whether a value is its own text: no variable of OmegaConf, and none of a template."""
    return "${" not in text and "{{" not in text


def _holds_a_command(text: str) -> bool:
    return "\n" in text.strip() or " --" in text or re.search(r"\s[\w.]+=\S", text) is not None


def _is_list_of_mappings(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(item, Mapping) and item for item in data)


def _is_list_of_commands(data: Any) -> bool:
    """Whether a list has whole commands, as ``arguments:`` of a cluster's job."""
    if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
        return False
    return any(" --" in item or PROGRAM.search(item) for item in data)


def _is_list_of_arguments(data: Any) -> bool:
    if not isinstance(data, list) or not all(isinstance(item, str | int | float) for item in data):
        return False
    return any(isinstance(item, str) and re.match(r"--\w|[\w.+]+=", item) for item in data)


def plain_text(value: Any) -> tuple[str, bool]:
    """A value as one types it, and whether it is a literal that a flag can have."""
    if isinstance(value, str):
        return value, True
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value).replace("null", "none"), True
    return type(value).__name__, False


# --- shell --------------------------------------------------------------------------------------------------------
def shell(text: str, parsed: Parsed, depth: int = 0) -> None:
    """``key=value`` and ``--key value`` of every command; comments, quotes, variables and branches as a shell takes
    them."""

    def command(words: list[Word]) -> None:
        command_words(words, parsed, depth)

    def document(words: list[Word], content: Word) -> None:
        """A file that the script writes, or the program that it starts with it."""
        suffix = ""
        for word in words:
            suffix = Path(word.text).suffix or suffix
            parsed.written_files.append(word.text)
        if words and words[0].text.startswith("python"):
            suffix = ".py"
        names = parsed.environment
        parsed.environment = names | interpreter.texts()
        try:
            with parsed.within(content.origin):
                reader_of(suffix)(content.text, parsed)
        except (UserError, ValueError, SyntaxError):
            # A template of another language; the script itself can still be read.
            parsed.unread.append(Unread("a here-document"))
        parsed.environment = names

    interpreter = Interpreter(command, document, parsed.count_written, parsed.environment)
    interpreter.script(text)
    settings = parsed.settings
    # Arrays and texts of flags that no command here gets: a script that sources this one does. They come first, so that
    # what a command gets counts.
    parsed.settings = []
    for variable in interpreter.unused():
        words = [Word(part, word.origin) for word in variable.words for part in word.text.split()]
        if any(word.text.startswith("--") or re.match(r"[+~]*\w+(\.\w+)+=", word.text) for word in words):
            command_words([Word(":"), *words], parsed, depth)
    parsed.settings += settings


def _recipes_as_shell(text: str) -> str:
    """A makefile as a script: its variables are assigned, and the lines of all its recipes follow in order.

    A shell has ``${NAME}`` for ``$(NAME)`` of make and ``{{name}}`` of just, and ``$NAME`` for make's ``$$NAME``.
    """
    lines = []
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        assignment = re.fullmatch(r"(?:export\s+)?(\w+)\s*(?:[:?]?=|:::?=)\s*(.*)", line)
        if assignment:
            value = assignment[2].strip("\"'")
            lines.append(f'{assignment[1]}="{value}"')
        elif line.startswith(("\t", " ")):
            lines.append(line.strip().lstrip("@-+"))
    script = re.sub(r"\$\((\w+)\)|\{\{\s*(\w+)\s*\}\}", r"${\1\2}", "\n".join(lines))
    return script.replace("$$", "$")


def command_words(words: Sequence[Word], parsed: Parsed, depth: int = 0) -> None:
    """The settings among the words of one command; the others are by what its system is told."""
    before = ""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if _is_nested_command(word.text) and depth < MAX_NESTED_COMMANDS:
            _take_nested_command(word, parsed, depth)
        elif word.text.startswith("--") and len(word.text) > 2:
            _take_option(word, waiting, parsed, depth)
        elif _is_override(word.text):
            _take_override(word, parsed)
        else:
            _take_plain_word(word, before, parsed)
            before = word.text.rsplit("/", 1)[-1]


def _take_nested_command(word: Word, parsed: Parsed, depth: int) -> None:
    with parsed.within(word.origin):
        shell(word.text, parsed, depth + 1)


def _take_option(word: Word, waiting: list[Word], parsed: Parsed, depth: int) -> None:
    """``--key=value``, or ``--key`` with the next of the ``waiting`` words, which is then taken from them."""
    key, equals, text = word.text.partition("=")
    value = Word(text, word.origin)
    # Two options in a row: the first is a switch.
    takes_next = not equals and bool(waiting) and not waiting[-1].text.startswith("--")
    if takes_next:
        value = waiting.pop()
        if _is_nested_command(value.text) and depth < MAX_NESTED_COMMANDS:
            _take_nested_command(value, parsed, depth)
    if value.text == "@" and waiting:
        # `--trainer @ train.toml` of prime-rl
        value = waiting.pop()
        parsed.configs.append(value)
    _take_named_files(key, value, parsed)
    is_lone = not equals and not takes_next
    origin = value.origin.within(word.origin)
    parsed.add(Setting(key, None if is_lone else value.text, _is_known(value.text), origin))


def _is_override(text: str) -> bool:
    """Whether a word is ``key=value``, also Hydra's ``+key=value``."""
    key, equals, value = text.partition("=")
    # `trl==0.17.0` is a requirement of pip.
    return bool(equals) and not value.startswith("=") and OVERRIDE.fullmatch(key) is not None


def _take_override(word: Word, parsed: Parsed) -> None:
    key, _, value = word.text.partition("=")
    if key == "config" and Path(value).suffix in (".yaml", ".yml"):
        parsed.configs.append(Word(value, word.origin))
    parsed.add(Setting(key, value, _is_known(value), word.origin))


def _take_plain_word(word: Word, before: str, parsed: Parsed) -> None:
    """A word that sets nothing, and with the word ``before`` it a pair, as ``swift sft``."""
    text = word.text
    parsed.words.append(text)
    if text.endswith(CONFIG_SUFFIXES) and (text.startswith("@") or TAKES_CONFIG.fullmatch(before)):
        parsed.configs.append(replace(word, text=text.lstrip("@")))
    if before:
        parsed.words.append(f"{before} {text}")
    if before == "-m":
        parsed.started.append(text)
    else:
        _add_started(text, parsed)


def _take_named_files(key: str, value: Word, parsed: Parsed) -> None:
    """Keep what the value of an option names: a program, code of a system, or a config."""
    if key in PROGRAMS:
        parsed.words.append(value.text)
        parsed.started.append(value.text)
    elif MODULE_KEY.fullmatch(key) and MODULE.fullmatch(value.text):
        parsed.words.append(value.text)
    is_config = key in CONFIG_NAMES or (key in CONFIGS and Path(value.text).suffix in CONFIG_SUFFIXES)
    # `accelerate launch --config_file` names the launcher's own.
    is_of_launcher = key in ("--config_file", "--config-file") and "accelerate launch" in parsed.words
    if is_config and value.text and not is_of_launcher:
        parsed.configs.append(value)


def _add_started(text: str, parsed: Parsed) -> None:
    """Keep a word that is a script: its path, or its name where the folder is computed."""
    if STARTED.fullmatch(text):
        parsed.started.append(text)
    elif STARTED.fullmatch(text.rsplit("/", 1)[-1]):
        parsed.started.append(text.rsplit("/", 1)[-1])


def _is_nested_command(text: str) -> bool:
    """Whether one word is a command of its own: ``bash -c "python ... --flag value"``."""
    return " " in text.strip() and re.search(r"(^|\s)(--\w|[+~]*\w+(\.\w+)+=|python)", text) is not None


def _is_known(value: str) -> bool:
    """Whether a word of a shell command is its own value: no variable that is not assigned here, no command."""
    return "$" not in value and "`" not in value and "{{" not in value


# --- Python -------------------------------------------------------------------------------------------------------
def python(text: str, parsed: Parsed) -> None:
    """Keyword arguments, dictionaries, attributes and defaults of options; ``--flags`` in strings."""
    # `# dependencies = ["trl==0.17.0"]`, which uv reads.
    for comment in re.findall(r"(?m)^#.*$", text):
        parsed.words += [requirement[0] for requirement in REQUIREMENT.finditer(comment)]
    _Module(ast.parse(text), parsed).read()


def notebook(text: str, parsed: Parsed) -> None:
    """The code cells of a notebook, in order; ``!command`` and ``%%bash`` as shell."""
    cells = json.loads(text).get("cells", [])
    sources = []
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            lines = cell.get("source", "")
            sources.append(lines if isinstance(lines, str) else "".join(map(str, lines)))
    if sum(len(source) for source in sources) > MAX_FILE_BYTES:
        raise UserError(f"has more than {MAX_FILE_BYTES:,} characters of code")
    program: list[str] = []
    for source in sources:
        first, _, rest = source.lstrip().partition("\n")
        if first.startswith("%%"):
            suffix = Path(first.split()[-1]).suffix
            reader_of(suffix)(rest, parsed)
            continue
        cell_text = _without_magics(source, parsed)
        try:
            ast.parse(cell_text)
        except SyntaxError:
            parsed.unread.append(Unread("a cell in another language"))
            continue
        program.append(cell_text)
    python("\n".join(program), parsed)


UNKNOWN = object()


def _without_magics(source: str, parsed: Parsed) -> str:
    """The Python of a cell. ``!command`` is read as shell, with the lines that continue it, and left out."""
    program = []
    command: list[str] = []
    for line in source.splitlines():
        text = line.lstrip()
        is_magic = text.startswith(("!", "%"))
        if is_magic:
            # Of the same indentation, as it may be all that a branch has.
            program.append(line[: len(line) - len(text)] + "pass")
        if is_magic and text.startswith("!"):
            command = [text[1:]]
        elif command:
            command.append(line)
        elif not is_magic:
            program.append(line)
        if command and not line.endswith("\\"):
            shell("\n".join(command), parsed)
            command = []
    if command:
        shell("\n".join(command), parsed)
    return "\n".join(program)


CONVERSIONS = ("float", "int", "str", "bool")
OPTION_MAKERS = ("add_argument", "option", "Option")
"""Calls that declare an option: of argparse, click and typer."""
CONFIG_MAKERS = ("create", "merge", "DictConfig", "ConfigDict", "from_dict", "update")
"""Calls whose dictionaries are configs: of OmegaConf and ml_collections."""
CONFIG_NAME = re.compile(r"(.*_)?(cfg|config|conf|args|arguments|hparams)", re.IGNORECASE)
"""Names of objects whose attributes and items are settings."""
COMMAND_LINE_PARSERS = ("load_expr_config", "parse_cli_args", "entrypoint", "nested_entrypoint")
"""Functions that fill a config class from the command line: of AReaL and of chz."""


class _Module:
    """One program: what its names, options and fields stand for, and then what it sets."""

    def __init__(self, tree: ast.Module, parsed: Parsed) -> None:
        self.tree = tree
        self.parsed = parsed
        self.nodes = list(ast.walk(tree))
        self.values: dict[str, ast.expr | None] = {}
        """The value of each name that is assigned once; None for a name that is assigned twice."""
        self.overridden: set[str] = set()
        """Names with a first value that the program may replace by one from elsewhere."""
        self.updates: dict[str, list[tuple[str, ast.expr]]] = {}
        """``options["beta"] = 0.04``, by the name of the dictionary."""
        self.defaults: dict[str, ast.expr] = {}
        """Defaults of ``add_argument`` and of the fields of classes, by name."""
        self.loops: dict[str, list[ast.expr]] = {}
        """The values that the variable of a loop takes."""
        self.calls: dict[str, list[ast.Call]] = {}
        """By the name of the function."""
        self.arguments: dict[tuple[str, str], list[ast.expr]] = {}
        """What the functions of the file get, by function and parameter: of their calls, else the default."""
        self.defaulted: set[tuple[str, str]] = set()
        """Those of them that no call of the file gives."""
        self.function = ""
        """The function whose body is being read."""
        self.depth = 0

    def read(self) -> None:
        for node in self.nodes:
            self._collect(node)
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._collect_arguments(node)
        for statement in self.tree.body:
            self._visit(statement, CERTAIN)
        passed_over = self._no_commands()
        for node in self.nodes:
            if id(node) in passed_over:
                continue
            if isinstance(node, ast.JoinedStr | ast.Constant):
                self._requirement(node)
                self._command_text(node)
            elif isinstance(node, ast.List | ast.Tuple):
                self._command_list(node)

    def _no_commands(self) -> set[int]:
        """Texts that may show a command that is not run: docstrings, help of options; and parts of an f-string."""
        passed_over = set()
        for node in self.nodes:
            if isinstance(node, ast.Expr):
                passed_over.add(id(node.value))
                continue
            inner: list[ast.AST] = []
            if isinstance(node, ast.JoinedStr):
                inner = list(node.values)
            elif isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog", "metadata"):
                inner = [node.value]
            elif isinstance(node, ast.Call) and name_of(node.func) in OPTION_MAKERS:
                inner = list(node.args)
            for part in inner:
                passed_over |= {id(nested) for nested in ast.walk(part)}
        return passed_over

    # --- what names stand for
    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self.parsed.imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            self._collect_import(node)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._collect_assignment(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._collect_assignment(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._collect_update(node.target.id, node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._collect_loop(node.target, node.iter)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                self.calls.setdefault(node.func.id, []).append(node)
            self._collect_option(node)
            self._collect_update_call(node)
        elif isinstance(node, ast.ClassDef):
            self._collect_fields(node)

    def _collect_import(self, node: ast.ImportFrom) -> None:
        """``from module import name``: the module, the name, and both as ``module:name``."""
        module = node.module or ""
        names = [alias.name for alias in node.names]
        self.parsed.imports += [module, *names]
        self.parsed.imports += [f"{module}:{name}" for name in names]
        is_foreign = module.partition(".")[0] not in sys.stdlib_module_names
        if module and is_foreign and any(TRAINING.fullmatch(name) for name in names):
            self.parsed.own_modules.append(module)

    def _collect_fields(self, node: ast.ClassDef) -> None:
        """The defaults of a class's fields, as of a dataclass."""
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                self.defaults[item.target.id] = _default_of_field(item.value)
            elif isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                self.defaults[item.targets[0].id] = item.value

    def _collect_assignment(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and target.id in self.values and _mentions(value, target.id):
            # `beta = float(config.get("beta", beta))`: the first value is the default.
            self.overridden.add(target.id)
        elif isinstance(target, ast.Name):
            self.values[target.id] = None if target.id in self.values else value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            key = self.value(target.slice)
            if isinstance(key, str):
                self.updates.setdefault(target.value.id, []).append((key, value))

    def _collect_option(self, call: ast.Call) -> None:
        """``parser.add_argument("--beta", default=0.04)``, also of click, and absl's ``DEFINE_float("beta", 0.04)``."""
        maker = name_of(call.func)
        if maker.startswith("DEFINE_") and len(call.args) >= 2:
            name = self.value(call.args[0])
            if isinstance(name, str):
                self.defaults[name] = call.args[1]
        if maker not in OPTION_MAKERS or not call.args:
            return
        names = [self.value(argument) for argument in call.args]
        long_names = [name for name in names if isinstance(name, str) and name.startswith("--")]
        name = long_names[0] if long_names else names[-1]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if "dest" in keywords:
            name = self.value(keywords["dest"])
        default = keywords.get("default")
        action = self.value(keywords["action"]) if "action" in keywords else None
        if default is None and action in ("store_true", "store_false"):
            default = ast.Constant(action == "store_false")
        if isinstance(name, str) and default is not None:
            # `--kl/--no-kl` of click.
            self.defaults[flag_key(name.partition("/")[0])] = default

    def _collect_update_call(self, call: ast.Call) -> None:
        """``options.update(beta=0.04)``."""
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "update"
            and isinstance(call.func.value, ast.Name)
        ):
            name = call.func.value.id
            for argument in call.args:
                self._collect_update(name, argument)
            for keyword in call.keywords:
                if keyword.arg is not None:
                    self.updates.setdefault(name, []).append((keyword.arg, keyword.value))

    def _collect_update(self, name: str, node: ast.expr) -> None:
        """``options |= {"beta": 0.04}``."""
        if isinstance(node, ast.Dict):
            self.updates.setdefault(name, []).extend(self._items(node) or [])

    def _collect_loop(self, target: ast.expr, iterated: ast.expr) -> None:
        """``for beta in (0.01, 0.1)``, and with several variables: of tuples, ``zip`` and ``product``."""
        if isinstance(target, ast.Name):
            self.loops[target.id] = self._members(iterated)
        elif isinstance(target, ast.Tuple):
            for number, part in enumerate(target.elts):
                if not isinstance(part, ast.Name):
                    continue
                if isinstance(iterated, ast.Call) and name_of(iterated.func) in ("zip", "product"):
                    sources = iterated.args[number : number + 1]
                    self.loops[part.id] = [value for source in sources for value in self._members(source)]
                else:
                    rows = [self._members(row) for row in self._members(iterated)]
                    self.loops[part.id] = [row[number] for row in rows if number < len(row)]

    def _members(self, node: ast.expr) -> list[ast.expr]:
        """The members of a list that is written in the file."""
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            return [] if value is None or isinstance(value, ast.Name) else self._members(value)
        return list(node.elts) if isinstance(node, ast.List | ast.Tuple) else []

    def _collect_arguments(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """What calls in the file give the parameters of a function; their defaults where none gives any."""
        parameters = [*function.args.posonlyargs, *function.args.args]
        defaults = dict(zip([p.arg for p in parameters[::-1]], function.args.defaults[::-1], strict=False))
        for parameter, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if default is not None:
                defaults[parameter.arg] = default
        names = [parameter.arg for parameter in parameters]
        for call in self.calls.get(function.name, []):
            pairs = list(zip(names, call.args, strict=False))
            pairs += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
            for name, value in pairs:
                self.arguments.setdefault((function.name, name), []).append(value)
        for name, default in defaults.items():
            if (function.name, name) not in self.arguments:
                self.arguments[function.name, name] = [_default_of_field(default)]
                self.defaulted.add((function.name, name))

    # --- what is set
    def _visit(self, node: ast.AST, origin: Origin) -> None:
        outside = self.function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function = node.name
        self._visit_node(node, origin)
        self.function = outside

    def _visit_node(self, node: ast.AST, origin: Origin) -> None:
        if isinstance(node, ast.If) and not _is_main(node.test):
            self._visit(node.test, origin)
            reason = f"if {ast.unparse(node.test)[:60]}"
            for branch, why in ((node.body, reason), (node.orelse, f"else of {reason}")):
                for statement in branch:
                    self._visit(statement, Origin("branch", why))
            return
        if isinstance(node, ast.Call):
            self._call(node, origin)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            self._assignment(node, origin)
        elif isinstance(node, ast.ClassDef):
            self._class(node, origin)
        for child in ast.iter_child_nodes(node):
            self._visit(child, origin)

    def _call(self, call: ast.Call, origin: Origin) -> None:
        name = name_of(call.func)
        if name:
            self.parsed.calls.append(name)
        if name in OPTION_MAKERS:
            return
        if name == "setattr" and len(call.args) == 3:
            key = self.value(call.args[1])
            if isinstance(key, str):
                self._set(key, call.args[2], origin, self._class_of(call.args[0]))
        if name in CONFIG_MAKERS and "wandb" not in ast.unparse(call.func):
            self._config_of_call(call, origin)
        if name == "replace" and call.args:
            # `dataclasses.replace(arguments, beta=0.04)`
            name = self._class_of(call.args[0]) or name
        if ast.unparse(call.func) == "hydra.main":
            self._hydra_config(call)
            return
        for keyword in call.keywords:
            if keyword.arg is None:
                self._options(keyword.value, origin, name)
            else:
                self._set(keyword.arg, keyword.value, origin, name)
        if name.endswith(("ArgumentParser", "TrlParser")) or name in COMMAND_LINE_PARSERS:
            self._filled_by_command_line(call, name)

    def _class_of(self, node: ast.expr) -> str:
        """The class of an object: ``GRPOConfig`` where the file has ``arguments = GRPOConfig(...)``."""
        made_by = self.values.get(node.id) if isinstance(node, ast.Name) else None
        return name_of(made_by.func) if isinstance(made_by, ast.Call) else ""

    def _config_of_call(self, call: ast.Call, origin: Origin) -> None:
        """``OmegaConf.create({...})``, and ``OmegaConf.update(config, "key", value)``."""
        if len(call.args) == 3 and isinstance(self.value(call.args[1]), str):
            self._set(self.value(call.args[1]), call.args[2], origin, "")
            return
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in self._dictionary(argument) or ():
                    self._set(key, value, origin, "")

    def _options(self, node: ast.expr, origin: Origin, scope: str) -> None:
        """``**options`` of a call."""
        options = self._dictionary(node)
        if options is None:
            what = f"{scope}(**{ast.unparse(node)[:60]})"
            self.parsed.unread.append(Unread(what, scope, may_hold_all=True))
            return
        for key, value in options:
            self._set(key, value, origin, scope)

    def _filled_by_command_line(self, call: ast.Call, parser: str) -> None:
        """``HfArgumentParser((ScriptArguments, GRPOConfig))``: the command line fills these classes."""
        for argument in ast.walk(call):
            if isinstance(argument, ast.Name) and argument.id.endswith(("Config", "Arguments")):
                self.parsed.calls.append(argument.id)
                self.parsed.unread.append(Unread(f"{argument.id} of the command line ({parser})", argument.id))

    def _hydra_config(self, call: ast.Call) -> None:
        """``@hydra.main(config_name="ppo_trainer")``: all settings of the program stand in that config."""
        self.parsed.calls.append("hydra.main")
        for keyword in call.keywords:
            name = self.value(keyword.value)
            if keyword.arg == "config_name" and isinstance(name, str):
                self.parsed.configs.append(Word(name))

    def _assignment(self, node: ast.Assign | ast.AnnAssign, origin: Origin) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is None:
            return
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            # `arguments.beta = 0.04`: of the class that made `arguments`.
            scope = self._class_of(target.value)
            if scope:
                self._set(target.attr, node.value, origin, scope)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            key = self._key_in_config(target)
            if key:
                self._set(key, node.value, origin, "")
        elif isinstance(node.value, ast.Dict) and isinstance(target, ast.Name):
            options = self._dictionary(node.value)
            for key, value in options or ():
                self._set(key, value, origin, f"{target.id} = {{}}")

    def _key_in_config(self, target: ast.expr) -> str:
        """``actor.beta`` for ``config.actor.beta`` and ``config["actor"]["beta"]``; empty for any other place."""
        parts: list[str] = []
        while isinstance(target, ast.Attribute | ast.Subscript):
            part = target.attr if isinstance(target, ast.Attribute) else self.value(target.slice)
            if not isinstance(part, str):
                return ""
            parts.insert(0, part)
            target = target.value
        is_config = isinstance(target, ast.Name) and CONFIG_NAME.fullmatch(target.id)
        return ".".join(parts) if is_config and len(parts) > 1 else ""

    def _class(self, node: ast.ClassDef, origin: Origin) -> None:
        """Fields with defaults: of the class that it extends, or of its own name."""
        bases = [name_of(base) for base in node.bases]
        self.parsed.calls += bases
        scope = bases[0] if bases else node.name
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value is not None:
                self._set(item.target.id, _default_of_field(item.value), origin.within(Origin("default")), scope)

    def _set(self, key: str, node: ast.expr, origin: Origin, scope: str) -> None:
        """Add a setting; a dictionary becomes dotted keys."""
        options = self._dictionary(node) if isinstance(node, ast.Dict) else None
        if options:
            for inner, value in options:
                self._set(f"{key}.{inner}", value, origin, scope)
            return
        if isinstance(node, ast.IfExp):
            self._set_chosen(key, node, origin, scope)
            return
        value = self.value(node)
        if value is UNKNOWN:
            self.parsed.add(Setting(key, ast.unparse(node)[:60], False, origin, scope))
            return
        text, literal = plain_text(value)
        self.parsed.add(Setting(key, text, literal and _is_literal(text), origin.within(self._origin_of(node)), scope))

    def _set_chosen(self, key: str, node: ast.IfExp, origin: Origin, scope: str) -> None:
        """``beta=0.0 if no_kl else 0.04``: the one that the file's own values choose, else the first."""
        condition = self.value(node.test)
        chosen = node.orelse if condition is not UNKNOWN and not condition else node.body
        why = f"if {ast.unparse(node.test)[:60]}"
        self._set(key, chosen, origin.within(Origin("branch", why)), scope)

    def _origin_of(self, node: ast.expr) -> Origin:
        """How sure it is that an expression has the value that the file gives it."""
        if isinstance(node, ast.Name):
            return self._origin_of_name(node.id)
        if isinstance(node, ast.Attribute) and node.attr in self.defaults:
            return Origin("default", f"the default of {node.attr}, an option of the file")
        if isinstance(node, ast.Call) and name_of(node.func) in ("get", "getenv") and len(node.args) == 2:
            if self._environment(node.args[0]) is not None:
                return CERTAIN
            return Origin("default", f"the default of {ast.unparse(node.args[0])[:40]}")
        if isinstance(node, ast.Call) and name_of(node.func) in CONVERSIONS and len(node.args) == 1:
            return self._origin_of(node.args[0])
        return CERTAIN

    def _origin_of_name(self, name: str) -> Origin:
        given = self.arguments.get((self.function, name), [])
        values = self.loops.get(name, [])
        texts = list(dict.fromkeys(ast.unparse(value) for value in given or values))
        if self.values.get(name) is not None and not given:
            if name in self.overridden:
                return Origin("default", f"the default of {name}, which the program may replace")
            return CERTAIN
        if len(texts) > 1:
            return Origin("loop", f"one of {', '.join(texts[:6])}"[:100])
        if (self.function, name) in self.defaulted:
            return Origin("default", f"the default of {name}, an argument of {self.function}")
        if given:
            return self._origin_of_argument(given[0])
        if name in self.defaults:
            return Origin("default", f"the default of {name}, an option of the file")
        return CERTAIN

    def _origin_of_argument(self, node: ast.expr) -> Origin:
        """That of what a call gives: a name there is not one of the function that is called."""
        function, self.function = self.function, ""
        origin = CERTAIN if isinstance(node, ast.Name) else self._origin_of(node)
        self.function = function
        return origin

    def _environment(self, node: ast.expr) -> str | None:
        """The value of a variable that the script or the job around the program gives it."""
        name = self.value(node)
        return self.parsed.environment.get(name) if isinstance(name, str) else None

    def _dictionary(self, node: ast.expr) -> list[tuple[str, ast.expr]] | None:
        """The items of a dictionary that is written in the file; None for any other."""
        if self.depth > 20:
            return None
        self.depth += 1
        items = self._items(node)
        self.depth -= 1
        return items

    def _items(self, node: ast.expr) -> list[tuple[str, ast.expr]] | None:
        items: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            inner = None if value is None else self._dictionary(value)
            if inner is None:
                return None
            return [*inner, *self.updates.get(node.id, [])]
        if isinstance(node, ast.Call) and name_of(node.func) == "dict" and not node.args:
            pairs: list[tuple[ast.expr | str | None, ast.expr]] = [(word.arg, word.value) for word in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values, strict=True))
        else:
            return None
        for key, value in pairs:
            if key is None:
                inner = self._dictionary(value)
                if inner is None:
                    return None
                items += inner
                continue
            name = key if isinstance(key, str) else self.value(key)
            if isinstance(name, str):
                items.append((name, value))
        return items

    # --- values
    def value(self, node: ast.expr) -> Any:
        """The value of an expression; :data:`UNKNOWN` where the file does not say."""
        if self.depth > 20:
            return UNKNOWN
        self.depth += 1
        value = self._value(node)
        self.depth -= 1
        return value

    def _value(self, node: ast.expr) -> Any:
        for kind, value_of in (
            (ast.Name, self._value_of_name),
            (ast.Attribute, self._value_of_attribute),
            (ast.Subscript, self._item),
            (ast.JoinedStr, self._joined),
            (ast.Call, self._converted),
            (ast.BinOp, self._sum),
            (ast.BoolOp, self._first_true),
        ):
            if isinstance(node, kind):
                return value_of(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.value(node.operand)
            return UNKNOWN if value is UNKNOWN else not value
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            return UNKNOWN

    def _value_of_attribute(self, node: ast.Attribute) -> Any:
        """``options.beta``: the default of an option or a field of that name."""
        default = self.defaults.get(node.attr)
        return UNKNOWN if default is None else self.value(default)

    def _sum(self, node: ast.BinOp) -> Any:
        """Two texts in a row."""
        if isinstance(node.op, ast.Add):
            left = self.value(node.left)
            right = self.value(node.right)
            if isinstance(left, str) and isinstance(right, str):
                return self.parsed.count_written(left + right)
        return UNKNOWN

    def _value_of_name(self, node: ast.Name) -> Any:
        """What a name stands for: an argument of the function, an assignment, a loop, or an option of click."""
        name = node.id
        given = self.arguments.get((self.function, name))
        if given:
            # The arguments of a call are not names of the function that it calls.
            function, self.function = self.function, ""
            value = self.value(given[0])
            self.function = function
            return value
        assigned = self.values.get(name)
        if assigned is not None:
            return self.value(assigned)
        if name in self.values:
            return UNKNOWN
        if self.loops.get(name):
            return self.value(self.loops[name][0])
        if name in self.defaults:
            return self.value(self.defaults[name])
        return UNKNOWN

    def _first_true(self, node: ast.BoolOp) -> Any:
        """``options.beta or 0.04``."""
        operands = node.values if isinstance(node.op, ast.Or) else []
        for operand in operands:
            value = self.value(operand)
            if value is not UNKNOWN and value:
                return value
        return UNKNOWN

    def _item(self, node: ast.Subscript) -> Any:
        """``CONFIG["beta"]`` of a dictionary that the file writes, and ``os.environ["BETA"]``."""
        if ast.unparse(node.value) == "os.environ":
            text = self._environment(node.slice)
            return UNKNOWN if text is None else text
        key = self.value(node.slice)
        for name, value in reversed(self._dictionary(node.value) or []):
            if name == key:
                return self.value(value)
        return UNKNOWN

    def _converted(self, call: ast.Call) -> Any:
        """``float("0.04")``, and ``os.environ.get("BETA", "0.04")`` with its default."""
        name = name_of(call.func)
        if name in CONVERSIONS and len(call.args) == 1 and not call.keywords:
            return self.value(call.args[0])
        if name in ("get", "getenv") and len(call.args) == 2:
            text = self._environment(call.args[0])
            return self.value(call.args[1]) if text is None else text
        return UNKNOWN

    def _joined(self, node: ast.JoinedStr) -> str:
        """An f-string; a value that is not known stays as a variable."""
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                parts.append("${unknown}" if value is UNKNOWN else plain_text(value)[0])
            else:
                parts.append(str(self.value(part)))
        return self.parsed.count_written("".join(parts))

    # --- commands
    def _requirement(self, node: ast.expr) -> None:
        """``"trl==0.17.0"``: a version that the program asks for, as ``image.pip_install`` of a cluster."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REQUIREMENT.fullmatch(node.value.strip()):
            self.parsed.words.append(node.value.strip())

    def _command_text(self, node: ast.JoinedStr | ast.Constant) -> None:
        """A command that the program starts, or flags of one: ``subprocess.run(f"python ... --beta {beta}")``."""
        text = self.value(node)
        if not isinstance(text, str):
            return
        if not PROGRAM.match(text) and not re.search(r"(^|\s)(--[a-z]|[+~]*[a-z_]+(\.\w+)+=\S)", text):
            return
        # A flag on its own is one of a list, which is read whole.
        if " " in text.strip() or "=" in text:
            shell(text, self.parsed)

    def _command_list(self, node: ast.List | ast.Tuple) -> None:
        """``["python", "-m", "...", "--beta", "0.04"]``."""
        values = [self.value(item) for item in node.elts]
        if not any(isinstance(value, str) and value.startswith("--") for value in values):
            return
        words = []
        for value in values:
            text = "${unknown}" if value is UNKNOWN else plain_text(value)[0]
            # Those with an equals sign, and whole commands, were read as texts.
            if "=" not in text and " " not in text:
                words.append(Word(text))
        command_words(words, self.parsed)


def name_of(function: ast.expr | None) -> str:
    """The last name of what is called: ``GRPOConfig`` of ``trl.GRPOConfig(...)``; empty for anything else."""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Subscript):
        return name_of(function.value)
    return ""


def _default_of_field(node: ast.expr) -> ast.expr:
    """The default in ``field(default=0.04, metadata=...)``; any other value is its own."""
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == "default":
                return keyword.value
        if name_of(node.func) in ("Option", "Argument", "Field") and node.args:
            return node.args[0]
    return node


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is that of a program: ``if __name__ == "__main__"``."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
