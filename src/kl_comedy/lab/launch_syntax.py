"""What a launch script or config sets: shell, Python, notebooks, YAML, JSON and TOML to settings with their origin.

Nothing in a file is executed or imported: Python is read as a syntax tree, shell by :mod:`.launch_shell`. What a file
leaves to others (a base config, ``**options``) is in ``Parsed.unread``, so that it can be named.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
STARTED = re.compile(r"[^\s;|&=()\"']+\.(py|sh|bash|slurm|sbatch)")
"""Words of a command, or their last parts, that are a program."""
TRAINING = re.compile(r".*(train|run|launch|experiment|main|fit|learn).*", re.IGNORECASE)
"""Names that a program takes from a module of its own, which trains."""
OVERRIDE = re.compile(r"[+~]*[\w./@-]+")
ARRAY_END = re.compile(r"\[[@*]\]")


@dataclass(frozen=True)
class Setting:
    """A key with its text: None for a lone ``--key``. ``literal``: whether the text is the value.

    ``scope`` is the class or function of Python that gets it; empty elsewhere.
    """

    key: str
    text: str | None
    literal: bool = True
    origin: Origin = CERTAIN
    scope: str = ""


@dataclass(frozen=True)
class Unread:
    """Something that the file leaves to others: ``what`` it is, and the ``scope`` that it may set."""

    what: str
    scope: str = ""


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
    written: int = 0

    def add(self, setting: Setting) -> None:
        if setting.key.count(".") >= MAX_KEY_PARTS:
            raise UserError(f"the key {shown(setting.key)} has more than {MAX_KEY_PARTS} parts")
        key = flag_key(setting.key)
        self.settings.append(Setting(key, setting.text, setting.literal, setting.origin, setting.scope))
        parts = key.split(".")
        for n in range(1, len(parts)):
            self.sections.add(".".join(parts[:n]))
        if len(self.settings) > MAX_VALUES:
            raise UserError(f"sets more than {MAX_VALUES:,} keys; a launch script or config is expected")

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
        if path.suffix in (".yaml", ".yml", ".json"):
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
    settings = parsed.settings
    parsed.settings = []
    for word in configs:
        if "accelerate" in word.text or "deepspeed" in word.text or "ds_config" in word.text:
            continue  # of the launcher, and not of the training
        found = _find_config(word.text, path)
        if found is None:
            parsed.unread.append(Unread(f"the config {word.text[:100]}"))
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
    if isinstance(data, Mapping):
        # The base first: what the file itself says comes later, and counts.
        for name in _bases(data):
            _base(name, parsed, path, depth)
        data = {key: value for key, value in data.items() if key != "defaults"}
    _flatten(data, "", parsed)


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
        for item in data:
            shell(item, parsed)
    elif key:
        text, literal = plain_text(data)
        if isinstance(data, str) and _holds_a_command(data):
            # `run: |` of SkyPilot, `command:` of a cluster's job.
            shell(data, parsed)
        parsed.add(Setting(key, text, literal and "${" not in text, origin, scope))


def _holds_a_command(text: str) -> bool:
    return "\n" in text.strip() or " --" in text or re.search(r"\s[\w.]+=\S", text) is not None


def _is_list_of_mappings(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(item, Mapping) and item for item in data)


def _is_list_of_commands(data: Any) -> bool:
    """Whether a list has whole commands, as ``arguments:`` of a cluster's job."""
    if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
        return False
    return any(" --" in item for item in data)


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

    def document(words: list[Word], content: str) -> None:
        """A file that the script writes, or the program that it starts with it."""
        suffix = ""
        for word in words:
            suffix = Path(word.text).suffix or suffix
        if words and words[0].text.startswith("python"):
            suffix = ".py"
        try:
            reader_of(suffix)(content, parsed)
        except (UserError, ValueError, SyntaxError):
            # A template of another language; the script itself can still be read.
            parsed.unread.append(Unread("a here-document"))

    interpreter = Interpreter(command, document, parsed.count_written)
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


def command_words(words: Sequence[Word], parsed: Parsed, depth: int = 0) -> None:
    """The settings among the words of one command; the others are by what its system is told."""
    before = ""
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if _is_nested_command(word.text) and depth < MAX_NESTED_COMMANDS:
            shell(word.text, parsed, depth + 1)
        elif word.text.startswith("--") and len(word.text) > 2:
            _take_option(word, waiting, parsed, depth)
        elif _is_override(word.text):
            _take_override(word, parsed)
        else:
            _take_plain_word(word.text, before, parsed)
            before = word.text.rsplit("/", 1)[-1]


def _take_option(word: Word, waiting: list[Word], parsed: Parsed, depth: int) -> None:
    """``--key=value``, or ``--key`` with the next of the ``waiting`` words, which is then taken from them."""
    key, equals, text = word.text.partition("=")
    value = Word(text, word.origin)
    # Two options in a row: the first is a switch.
    takes_next = not equals and bool(waiting) and not waiting[-1].text.startswith("--")
    if takes_next:
        value = waiting.pop()
        if _is_nested_command(value.text) and depth < MAX_NESTED_COMMANDS:
            shell(value.text, parsed, depth + 1)
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


def _take_plain_word(text: str, before: str, parsed: Parsed) -> None:
    """A word that sets nothing, and with the word ``before`` it a pair, as ``swift sft``."""
    parsed.words.append(text)
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
    if is_config and value.text:
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
    return "$" not in value and "`" not in value


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
        kept = []
        for line in source.splitlines():
            if line.lstrip().startswith("!"):
                shell(line.lstrip()[1:], parsed)
            if line.lstrip().startswith(("!", "%")):
                # Of the same indentation, as it may be all that a branch has.
                line = line[: len(line) - len(line.lstrip())] + "pass"
            kept.append(line)
        cell_text = "\n".join(kept)
        try:
            ast.parse(cell_text)
        except SyntaxError:
            parsed.unread.append(Unread("a cell in another language"))
            continue
        program.append(cell_text)
    python("\n".join(program), parsed)


UNKNOWN = object()
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
        self.updates: dict[str, list[tuple[str, ast.expr]]] = {}
        """``options["beta"] = 0.04``, by the name of the dictionary."""
        self.defaults: dict[str, ast.expr] = {}
        """Defaults of ``add_argument`` and of the fields of classes, by name."""
        self.depth = 0

    def read(self) -> None:
        for node in self.nodes:
            self._collect(node)
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
            elif isinstance(node, ast.Call) and name_of(node.func) == "add_argument":
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
        elif isinstance(node, ast.Call):
            self._collect_option(node)
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
        if isinstance(target, ast.Name):
            self.values[target.id] = None if target.id in self.values else value
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            key = self.value(target.slice)
            if isinstance(key, str):
                self.updates.setdefault(target.value.id, []).append((key, value))

    def _collect_option(self, call: ast.Call) -> None:
        """``parser.add_argument("--beta", default=0.04)``."""
        if name_of(call.func) != "add_argument" or not call.args:
            return
        name = self.value(call.args[-1])
        for keyword in call.keywords:
            if keyword.arg == "default" and isinstance(name, str):
                self.defaults[flag_key(name)] = keyword.value

    # --- what is set
    def _visit(self, node: ast.AST, origin: Origin) -> None:
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
        if name == "add_argument":
            return
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

    def _options(self, node: ast.expr, origin: Origin, scope: str) -> None:
        """``**options`` of a call."""
        options = self._dictionary(node)
        if options is None:
            self.parsed.unread.append(Unread(f"{scope}(**{ast.unparse(node)[:60]})", scope))
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
            made_by = self.values.get(target.value.id)
            scope = name_of(made_by.func) if isinstance(made_by, ast.Call) else ""
            if scope:
                self._set(target.attr, node.value, origin, scope)
        elif isinstance(node.value, ast.Dict) and isinstance(target, ast.Name):
            options = self._dictionary(node.value)
            for key, value in options or ():
                self._set(key, value, origin, f"{target.id} = {{}}")

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
        value = self.value(node)
        if value is UNKNOWN:
            self.parsed.add(Setting(key, ast.unparse(node)[:60], False, origin, scope))
            return
        text, literal = plain_text(value)
        why = self._option_of(node)
        if why:
            origin = origin.within(Origin("default", why))
        self.parsed.add(Setting(key, text, literal and "${" not in text, origin, scope))

    def _option_of(self, node: ast.expr) -> str:
        """Where a value is the default of an option, its name."""
        if isinstance(node, ast.Attribute) and node.attr in self.defaults:
            return f"the default of {node.attr}, an option of the file"
        if isinstance(node, ast.Call) and name_of(node.func) in ("get", "getenv") and len(node.args) == 2:
            return f"the default of {ast.unparse(node.args[0])[:40]}"
        return ""

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
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            if value is None:
                return UNKNOWN
            return self.value(value)
        if isinstance(node, ast.Attribute):
            default = self.defaults.get(node.attr)
            return UNKNOWN if default is None else self.value(default)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        if isinstance(node, ast.JoinedStr):
            return self._joined(node)
        if isinstance(node, ast.Call):
            return self._converted(node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left), self.value(node.right)
            if isinstance(left, str) and isinstance(right, str):
                return self.parsed.count_written(left + right)
            return UNKNOWN
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            return UNKNOWN

    def _item(self, node: ast.Subscript) -> Any:
        """``CONFIG["beta"]`` of a dictionary that the file writes."""
        key = self.value(node.slice)
        for name, value in reversed(self._dictionary(node.value) or []):
            if name == key:
                return self.value(value)
        return UNKNOWN

    def _converted(self, call: ast.Call) -> Any:
        """``float("0.04")``, and ``os.environ.get("BETA", "0.04")`` with its default."""
        name = name_of(call.func)
        if name in ("float", "int", "str", "bool") and len(call.args) == 1 and not call.keywords:
            return self.value(call.args[0])
        if name in ("get", "getenv") and len(call.args) == 2:
            return self.value(call.args[1])
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
        if not isinstance(text, str) or not re.search(r"(^|\s)(--[a-z]|[+~]*[a-z_]+(\.\w+)+=\S)", text):
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
    return node


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is that of a program: ``if __name__ == "__main__"``."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
