"""What a launch file sets: shell, Python, notebooks, YAML, JSON and TOML to settings with their origin.

    shell      -> launch_shell (which words each command gets) -> launch_commands (what they set)
    Python     -> launch_python
    YAML, TOML -> here

Nothing in a file is executed or imported. What a file leaves to others (a base config, ``**options``) is in
``Parsed.unread``, so that it can be named.
"""

from __future__ import annotations

import ast
import contextlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import MAX_FILE_BYTES, check_yaml, load_yaml, read_text, yaml_errors
from kl_comedy.peers.launch_commands import CONFIG_SUFFIXES, PROGRAM, command_words, recipes_as_shell, shell
from kl_comedy.peers.launch_python import notebook, python
from kl_comedy.peers.launch_settings import Parsed, Setting, Unread, is_literal, plain_text
from kl_comedy.peers.launch_shell import CERTAIN, Origin, Word
from kl_comedy.peers.systems import flag_key

MAX_DOTS = 200
"""Dots in one line of TOML, those within numbers aside: the parser takes memory by the square of the parts of a key."""
MAX_NOTEBOOK_BYTES = 20_000_000
"""A notebook holds the pictures of its outputs; its code has the limit of any other file."""
MAX_BASES = 10
"""Base configs that name base configs."""
MAX_FOLDERS = 5
"""Folders above a file in which a config that it names is searched."""
MAX_FILES = 100
"""Files that are read for one answer: each base config may name many."""
MAKEFILE = re.compile(r"(GNU)?[Mm]akefile|.*\.mk|\.?justfile|.*\.just")
ENVIRONMENTS = ("env", "envs", "environment", "environ", "env_vars", "envvars", "environment_variables", "variables")
"""Keys of the variables that a job gives its commands."""


def parse(path: Path) -> Parsed:
    """Read a file by its suffix (``.py``, ``.ipynb``, ``.yaml``, ``.yml``, ``.json``, ``.toml``; else shell)."""
    parsed = Parsed(is_config=path.suffix in CONFIG_SUFFIXES, readers=READERS)
    with _reasons():
        limit = MAX_NOTEBOOK_BYTES if path.suffix == ".ipynb" else MAX_FILE_BYTES
        text = read_text(path, limit=limit)
        if MAKEFILE.fullmatch(path.name):
            shell(recipes_as_shell(text), parsed)
        elif path.suffix in (".yaml", ".yml", ".json"):
            _yaml(text, parsed, path)
        else:
            parsed.read(text, path.suffix)
        _read_configs(parsed, path)
    return parsed


def parse_text(text: str) -> Parsed:
    """Read a pasted command line, Python such as ``GRPOConfig(beta=0.04)``, YAML or TOML."""
    suffix = _suffix_of(text)
    parsed = Parsed(is_config=suffix in CONFIG_SUFFIXES, is_pasted=True, readers=READERS)
    with _reasons():
        parsed.read(text, suffix)
        # Configs that the command names lie where the user is.
        _read_configs(parsed, Path("pasted"))
    return parsed


def _suffix_of(text: str) -> str:
    """The suffix of a file with such a text; empty for shell."""
    if is_python(text):
        return ".py"
    # A config has several lines; one line with a colon or an equals sign may be a command's.
    if "\n" not in text.strip():
        return ""
    for suffix, reader in ((".toml", toml), (".yaml", _yaml)):
        config = Parsed(readers=READERS)
        with contextlib.suppress(UserError, ValueError, RecursionError):
            reader(text, config)
        # A command is YAML too, as one string that sets no key.
        if config.settings:
            return suffix
    return ""


def is_python(text: str) -> bool:
    """Whether a text is Python that calls something."""
    try:
        nodes = ast.walk(ast.parse(text.strip()))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Call) for node in nodes)


@contextlib.contextmanager
def _reasons() -> Iterator[None]:
    """Raise a parser's error as a :class:`UserError`, in one line."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        reason = str(error).partition("\n")[0][:200] or "nested too deeply"
        if "integer string conversion" in reason:  # advice of Python for its programmers
            reason = "a number of more than 4,300 digits"
        raise UserError(f"cannot be read: {reason}") from None


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
            toml(_read_named(found, parsed), parsed)
        elif found != path:
            _yaml(_read_named(found, parsed), parsed, found)
    parsed.settings += settings


def _find_config(name: str, path: Path) -> Path | None:
    """The config that ``path`` names, beside it or above it. Hydra's names have no suffix and may lie in ``config``."""
    if "$" in name or ".." in name:
        return None
    names = [name]
    if Path(name).suffix not in CONFIG_SUFFIXES:
        names = [f"{name}.yaml", f"config/{name}.yaml"]
    for folder in [path.parent, *list(path.parents)[1 : MAX_FOLDERS + 1]]:
        for candidate in names:
            if _is_file_within(folder, folder / candidate):
                return folder / candidate
    return None


def _is_file_within(folder: Path, path: Path) -> bool:
    """Whether ``path`` is a file that lies in ``folder`` or below it, links and ``..`` followed.

    A file from elsewhere may name every file that its reader can read, and remarks quote what is in it.
    """
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # a name that is too long, or has a null character
        return False


def _repository_of(path: Path) -> Path:
    """The folder of the repository that has the file; the file's own folder where none is around it."""
    folder = path.absolute().parent
    for parent in (folder, *folder.parents):
        if (parent / ".git").exists():
            return parent
    return folder


def _read_named(path: Path, parsed: Parsed) -> str:
    """The text of a file that the file of the answer names. Raises :class:`UserError` for too many, or too much."""
    parsed.files += 1
    if parsed.files > MAX_FILES:
        raise UserError(f"leads to more than {MAX_FILES} other configs")
    text = read_text(path)
    parsed.characters += len(text)
    if parsed.characters > MAX_FILE_BYTES:
        raise UserError(f"leads to other configs of more than {MAX_FILE_BYTES:,} characters together")
    return text


# --- YAML, JSON and TOML ------------------------------------------------------------------------------------------
@yaml_errors()
def _yaml(text: str, parsed: Parsed, path: Path | None = None, depth: int = 0) -> None:
    check_yaml(text)
    data = load_yaml(text)
    parsed.environment |= _environment_of(data)
    if isinstance(data, Mapping):
        # The base first: what the file itself says comes later, and counts.
        for name in _bases(data):
            _base(name, parsed, path, depth)
        data = {key: value for key, value in data.items() if key != "defaults"}
        _sweep(data, parsed)
    _flatten(data, "", parsed)


def _sweep(data: Mapping[str, Any], parsed: Parsed) -> None:
    """A sweep of Weights & Biases: a program, and its parameters with their values."""
    parameters = data.get("parameters")
    program = data.get("program")
    if not isinstance(parameters, Mapping) or not isinstance(program, str):
        return
    command_words([Word(program)], parsed)
    for key, parameter in parameters.items():
        if not isinstance(parameter, Mapping):
            continue
        values = parameter.get("values", [parameter.get("value")])
        if isinstance(values, list) and values:
            text, literal = plain_text(values[0])
            texts = ", ".join(plain_text(value)[0] for value in values[:6])
            origin = Origin("loop", f"one of {texts}") if len(values) > 1 else CERTAIN
            parsed.add(Setting(str(key), text, literal, origin))


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
    """Read a base config that lies beside the file, or above it in the same repository; name any other."""
    if path is not None and depth < MAX_BASES and ":" not in name:
        for candidate in (path.parent / name, path.parent / f"{name}.yaml"):
            is_yaml = candidate.suffix in (".yaml", ".yml")
            if is_yaml and candidate != path and _is_file_within(_repository_of(path), candidate):
                _yaml(_read_named(candidate, parsed), parsed, candidate, depth + 1)
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
        if _is_list_of_values(data):
            # A sweep of the author's own: `init_kl_coef: [0, 0.001]`. A flag takes the first, with a remark.
            text, literal = ", ".join(plain_text(value)[0] for value in data), True
        parsed.add(Setting(key, text, literal and is_literal(text), origin, scope))


def _holds_a_command(text: str) -> bool:
    return "\n" in text.strip() or " --" in text or re.search(r"\s[\w.]+=\S", text) is not None


def _is_list_of_mappings(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(item, Mapping) and item for item in data)


def _is_list_of_values(data: Any) -> bool:
    """Whether a list is of numbers, or of one value."""
    if not isinstance(data, list) or not data:
        return False
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in data)
    return are_numbers or (len(data) == 1 and isinstance(data[0], str | bool))


def _is_list_of_commands(data: Any) -> bool:
    """Whether a list has whole commands, as ``arguments:`` of a cluster's job."""
    if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
        return False
    return any(" --" in item or PROGRAM.search(item) for item in data)


def _is_list_of_arguments(data: Any) -> bool:
    if not isinstance(data, list) or not all(isinstance(item, str | int | float) for item in data):
        return False
    return any(isinstance(item, str) and re.match(r"--\w|[\w.+]+=", item) for item in data)


READERS = {".py": python, ".ipynb": notebook, ".toml": toml, ".yaml": _yaml, ".yml": _yaml, ".json": _yaml, "": shell}
