"""From a sparse YAML file and ``key=value`` overrides to a checked :class:`Config`.

    defaults <- files <- overrides (plain data)  -> interpolations -> parse_record -> check_combinations -> Config

Every mistake is one :class:`UserError` that names the key, what was given, what is allowed and the nearest right name.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.config.combinations import check_combinations
from kl_comedy.config.schema import Config
from kl_comedy.config.shipped import beside
from kl_comedy.config.validate import field_types, parse_record, without_none
from kl_comedy.errors import UserError, bad_value, error_prefix, shown
from kl_comedy.io import MAX_CHAIN, MAX_EXPANSIONS, MAX_FILE_BYTES, MAX_KEY_PARTS, parse_yaml, read_yaml
from kl_comedy.redaction import redact, refuse_secrets

SCHEMA_KEY = "schema"
"""The key of a stored config with the number of its layout (:data:`SCHEMA`)."""

EXTENDS = "extends"
"""The key of a file that names others, whose keys it inherits."""

MAX_FILES = 100
"""The most files of one config. They are read by a recursion, which a longer chain would drive into Python's limit."""

REQUIRED = ("model", "data", "rewards", "kl", "optimizer.lr", "train.steps")
"""What a run is; an empty file, which would train by defaults, is refused."""

REASONS = {
    **{f"rollout.{name}": f"it is rollout.truncation.{name}" for name in ("top_p", "top_k", "min_p")},
    "model.lora.dropout": "with dropout the trained policy is not the one that samples",
}
"""Why there is no such key, where users of other trainers look for it."""

SCHEMA = 1
"""The number of this layout of keys: the first line of a stored config. It grows when a key changes its meaning."""

MAY_CHANGE = (
    "output",
    "resume",
    "audit",
    "tracking",
    "train.strategy",
    "train.devices",
    "train.nodes",
    "train.shards",
    "train.replica_gib",
    "train.bucket_mib",
)
"""Keys in which two starts of one run may differ: where it is stored, what is measured on the way, and the processes
that train it."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read ``path`` (None: defaults only), apply ``key=value`` overrides, check everything.

    Raises :class:`UserError` for any mistake. Names of registered parts are checked; plugins must be loaded before.
    """
    return config_reader(path)(overrides)


def config_reader(path: str | Path | None) -> Callable[[Sequence[str]], Config]:
    """Read ``path`` once; the function returned applies overrides to it: many configs from one file.

    Where the file extends another, an error begins with the name of the file that set the key.
    """
    base = to_plain(Config())
    files: list[tuple[Path, dict[str, Any]]] = [] if path is None else _read_files(Path(path))
    for _, content in files:
        _merge_all(base, content)
    origins: dict[str, Path] = {}
    if len(files) > 1:
        for file, content in files:
            for key in flatten(content):
                origins[key] = file  # the last file that sets a key is the one whose value is used

    def read(overrides: Sequence[str]) -> Config:
        # A copy, because overrides change it, and a sweep reads one file for a thousand cells.
        try:
            return _finish(copy.deepcopy(base), overrides)
        except UserError as error:
            # Messages begin with their key. An override is on the command line, where the user looks first.
            key = str(error).partition(":")[0]
            for text in overrides:
                overridden_key = text.partition("=")[0].strip()
                if _overlap(key, overridden_key):
                    raise
            for file_key, file in reversed(origins.items()):
                if _overlap(key, file_key):
                    raise UserError(f"{file}: {error}") from error.__cause__
            raise

    return read


DEFAULT = "default"
COMMAND_LINE = "command line"


def value_origins(path: Path, overrides: Sequence[str]) -> Callable[[str], str]:
    """Where each value of the resolved config comes from: a function from its dotted key.

    A file is named by its path; ``overrides`` are the command line. A value that an interpolation stands for says so.
    The config must have been read by :func:`load_config` without an error.
    """
    # Built by the functions that build the config, of the same sections and lists, with origins in place of values:
    # so a list that a later file replaces takes the origins of its items with it.
    tree = _sections_with_origin(to_plain(Config()), DEFAULT)
    for file, content in _read_files(path):
        _merge_all(tree, _sections_with_origin(content, str(file)))
    for text in overrides:
        key, _, value = text.partition("=")
        key = key.strip()
        item = parse_override(key, value)
        _set(tree, Config, key.split("."), _with_origin(item, COMMAND_LINE), key)

    def origin(key: str) -> str:
        return _origin_at(tree, key) or DEFAULT

    return origin


def _sections_with_origin(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """A config's keys with ``origin`` in place of each leaf; a file may have none, as one that only extends others."""
    return {name: _with_origin(item, origin) for name, item in content.items()}


def _with_origin(value: Any, origin: str) -> Any:
    """``value`` with ``origin`` in place of each leaf."""
    if isinstance(value, Mapping) and value:
        return {name: _with_origin(item, origin) for name, item in value.items()}
    if isinstance(value, list) and value:
        return [_with_origin(item, origin) for item in value]
    if isinstance(value, str) and "${" in value:
        return f"{origin}, {redact(value)}"
    return origin


def _origin_at(tree: Any, key: str) -> str | None:
    """The origin of a key, or of what it is a part of; None where there is nothing."""
    node = tree
    for part in key.split("."):
        if isinstance(node, list):
            node = {str(position): item for position, item in enumerate(node)}
        if not isinstance(node, Mapping):
            break  # the whole was set, as a null that the schema fills with defaults
        node = node.get(part)
    if isinstance(node, str):
        return node
    return None


def _read_files(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files that ``path`` extends and it itself, each with the keys that it sets; later ones win.

    Raises :class:`UserError` for a missing file, a file that extends itself, and an empty one.
    """
    files: list[tuple[Path, dict[str, Any]]] = []
    _add_file(path, read_yaml(path), [], files)
    if not any(content for _, content in files):
        raise UserError(f"{path}: is empty; a run needs {', '.join(REQUIRED)} (`kl-comedy init run` writes one)")
    return files


def _add_file(
    file: Path, content: dict[str, Any], extended_by: Sequence[Path], files: list[tuple[Path, dict[str, Any]]]
) -> None:
    """Append to ``files`` what ``file`` extends, in that order, and then the file. ``extended_by``: how it was reached.

    A file that is reached twice is read at its first place only. At its second it would undo what the files in between
    changed: of two files that extend one base, the second would bring back the base's values.
    """
    _check_schema(file, content.pop(SCHEMA_KEY, SCHEMA))
    bases: list[Path] = []
    if EXTENDS in content:
        with error_prefix(f"{file}: {EXTENDS}"):
            bases = _bases(file, content.pop(EXTENDS))
    chain = [file, *extended_by]
    for base in bases:
        with error_prefix(f"{file}: {EXTENDS}"):
            # Resolved, because a link can give one file two names, and the recursion would not end.
            if base.resolve() in [earlier.resolve() for earlier in chain]:
                names = " <- ".join(str(link) for link in [base, *chain])
                raise UserError(f"{names}: a config cannot extend itself")
            if len(files) + len(chain) > MAX_FILES:
                raise UserError(f"leads to more than {MAX_FILES} files")
            if base.resolve() in [earlier.resolve() for earlier, _ in files]:
                continue
            base_content = read_named_config(base, apart_from=chain)
        _add_file(base, base_content, chain, files)
    files.append((file, content))


def _check_schema(file: Path, number: Any) -> None:
    """Raise :class:`UserError` for a layout that this code does not know: its keys may mean other things."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= SCHEMA:
        why = "it was written by another version of kl_comedy"
        raise UserError(f"{file}: {bad_value(SCHEMA_KEY, number, str(SCHEMA), why)}")


def _bases(file: Path, names: Any) -> list[Path]:
    """The files that the value of ``extends`` in ``file`` names: one, or a list."""
    if not isinstance(names, list):
        names = [names]
    for name in names:
        if not isinstance(name, str) or not name:
            allowed = (
                "the path of a config, from the folder of this file, a name of `kl-comedy list configs`, or a list"
            )
            raise UserError(f"got {shown(name)}; allowed: {allowed}")
    return [beside(file.parent, name) for name in names]


def read_named_config(path: Path, *, apart_from: Sequence[Path] = ()) -> dict[str, Any]:
    """The mapping in a config that another file names (``extends``, a grid's ``base``).

    Where it is missing, the message suggests none of the files ``apart_from``, which are those that name it.

    Raises :class:`UserError`, without any of the content, for a file that is something else: a config or grid from
    elsewhere may name every file that its user can read, and messages go to logs and job outputs.
    """
    content = read_yaml(path, apart_from=apart_from)
    known = [SCHEMA_KEY, EXTENDS, *field_types(Config)]
    if content and not set(content) & set(known):
        raise UserError(f"{path}: is not a config: it has none of the keys {', '.join(known)}")
    return content


def _overlap(key: str, other: str) -> bool:
    """Whether one dotted key is the other or within it."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _merge_all(base: dict[str, Any], content: Mapping[str, Any]) -> None:
    for name, item in content.items():
        _merge(base, name, item, _schema_within(Config, name))


def _finish(plain: dict[str, Any], overrides: Sequence[str]) -> Config:
    """Apply the overrides to ``plain`` (which is changed), resolve interpolations and check the result."""
    override_values = []
    for text in overrides:
        override_values.append(_override(plain, text))
    _refuse_lost(plain, override_values)
    # An interpolation may refer to a key that an override sets, so overrides come first.
    resolved = _resolve(plain)
    # After the interpolations, which may put a secret together from parts.
    refuse_secrets(resolved)
    for key, reason in REASONS.items():
        value = _value_at(resolved, key)
        if value is not None:
            raise UserError(f"{key}: no such key (given {shown(value)}): {reason}")
    config = parse_record(Config, resolved)
    check_combinations(config)
    return config


def _resolve(plain: dict[str, Any]) -> dict[str, Any]:
    """``plain`` with its interpolations written out. Raises :class:`UserError`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key, value in flatten(plain).items():
        if isinstance(value, str) and _calls_resolver(value):
            raise UserError(
                f"{key}: got {shown(redact(value))}; ${{a.key}} takes another key's value; resolvers such as oc.env "
                "are off: write the value itself, or let your code read a secret's variable"
            )
    # Before OmegaConf, which would write out a text that doubles with every line until memory is full.
    _Expansions(plain).check()
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        first_line = str(error).strip().splitlines()[0]
        raise UserError(f"{key}: {first_line}") from None
    return typing.cast(dict[str, Any], resolved)


_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
"""An interpolation with no other one in its name."""


class _Expansions:
    """Counts what the interpolations of a config stand for, before OmegaConf writes them out.

    ``a: ${b}${b}``, ``b: ${c}${c}``, ... doubles with every line, and so do lists and mappings. Each is followed here
    as OmegaConf does, and the first that is over a limit raises :class:`UserError`.
    """

    def __init__(self, plain: dict[str, Any]) -> None:
        self._plain = plain
        self._leaves = flatten(plain)
        self._values = 0
        self._characters = 0

    def check(self) -> None:
        for key in self._leaves:
            self._text(key, key, 0)

    def _text(self, key: str, start: str, chain: int) -> str:
        """The text of a leaf, written out. ``start``: the key with which this began, for messages."""
        text = str(self._leaves[key])
        if chain > MAX_CHAIN:
            raise UserError(f"{start}: its interpolations lead through more than {MAX_CHAIN} keys, or back to it")
        while _INNERMOST.search(text):
            text = _INNERMOST.sub(lambda name: self._value(name[1].strip(), key, start, chain), text)
        return text

    def _value(self, name: str, key: str, start: str, chain: int) -> str:
        """What ``${name}`` in the value of ``key`` stands for; "" for a section, and where there is no such key."""
        # OmegaConf reads a[0] as a.0, .a beside this key, and ..a in the section above.
        path = re.sub(r"\[([^\]]*)\]", r".\1", name)
        relative = len(path) - len(path.lstrip("."))
        if relative:
            path = ".".join([*key.split(".")[:-relative], path[relative:]])
        if path in self._leaves:
            leaves = [path]
        else:
            section = _value_at(self._plain, path)
            leaves = []
            if isinstance(section, dict | list) and section:
                leaves = list(flatten(section, path))
        text = ""
        # A name that leads nowhere counts as one value; OmegaConf reports it later, with its own message.
        for leaf in leaves or [path]:
            self._values += 1
            text = ""
            if leaf in self._leaves:
                text = self._text(leaf, start, chain + 1)
            self._characters += len(text)
            if self._values > MAX_EXPANSIONS or self._characters > MAX_FILE_BYTES:
                limits = f"{MAX_EXPANSIONS:,} values and {MAX_FILE_BYTES:,} characters"
                raise UserError(f"{start}: the config's interpolations stand for more than {limits}")
        if leaves == [path]:
            return text
        return ""


def _calls_resolver(text: str) -> bool:
    """Whether an interpolation in ``text`` is more than the name of a key.

    >>> _calls_resolver("${seed}: ${name}"), _calls_resolver("x-${oc.env:HOME}")
    (False, True)
    """
    # A colon outside every ${...} is text, as in a name or an address.
    depth = 0
    for part in re.findall(r"\$\{|[}:]", text):
        if part == ":" and depth:
            return True
        if part == "${":
            depth += 1
        elif part == "}":
            depth = max(depth - 1, 0)
    return False


def to_plain(config: Config) -> dict[str, Any]:
    """The resolved config as plain data."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved config as YAML that :func:`load_config` reads back."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def stored_text(config: Config) -> str:
    """As :func:`to_yaml`, for the folder of a run: the first line is the number of the layout of keys."""
    return f"{SCHEMA_KEY}: {SCHEMA}\n{to_yaml(config)}"


def stored_reader(file: Path) -> Callable[[Sequence[str]], Config]:
    """As :func:`config_reader`, for what :func:`stored_text` wrote.

    Raises :class:`UserError` also where a section is missing: it would be one of defaults, and another run's.
    """
    read = config_reader(file)
    missing = {SCHEMA_KEY, *(field.name for field in dataclasses.fields(Config))} - read_yaml(file).keys()
    if missing:
        raise UserError(f"{file} is damaged: it does not have {sorted(missing)[0]}, which the config of a run has")
    return read


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys to leaves.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c.0': 2}
    """
    # An empty mapping or list is a leaf: without it, a key that is set to nothing would be in no table of params.
    if isinstance(value, Mapping) and value:
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple) and value:
        items = [(str(position), item) for position, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for name, item in items:
        key = name
        if prefix:
            key = f"{prefix}.{name}"
        flat |= flatten(item, key)
    return flat


def differing_keys(stored: Config, given: Config) -> list[str]:
    """The dotted keys in which two configs are different runs; none where they differ in :data:`MAY_CHANGE` alone.

    Both have their defaults filled in, so that a config from before a key existed is equal to one with its default.
    """
    stored_values = identity(stored)
    given_values = identity(given)
    keys = []
    for key in dict.fromkeys([*given_values, *stored_values]):
        in_both = key in stored_values and key in given_values
        if not in_both or stored_values[key] != given_values[key]:
            keys.append(key)
    # An empty section beside one with keys: those are named.
    return [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]


def identity(config: Config) -> dict[str, Any]:
    """The values that make ``config`` the run that it is, by dotted key: all but :data:`MAY_CHANGE`."""
    return {key: value for key, value in flatten(to_plain(config)).items() if not may_change(key)}


def may_change(key: str) -> bool:
    """Whether the dotted ``key`` is one of :data:`MAY_CHANGE`, or within one."""
    return any(f"{key}.".startswith(f"{name}.") for name in MAY_CHANGE)


def config_hash(config: Config, *, without: Sequence[str] = ()) -> str:
    """sha256 (first 12 hex digits) of what the run is; ``without=("seed",)`` gives all seeds one hash.

    It is a tag for readers. Nothing is found by it, so that another version may hash the same config to another value.
    """
    values = {key: value for key, value in identity(config).items() if key not in without}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _refuse_lost(plain: Mapping[str, Any], values: Sequence[tuple[str, Any]]) -> None:
    """Raise :class:`UserError` where an override sets a part of what a later one replaces, as ``kl.beta=1 kl=grpo``."""
    for position, (key, value) in enumerate(values):
        for later_key, later_value in values[position + 1 :]:
            if key.startswith(f"{later_key}.") and _value_at(plain, key) != value:
                raise UserError(
                    f"{key}: got {redact(str(value))}, but the later {later_key}={redact(str(later_value))} "
                    "replaces it; set it after that, or within it"
                )


def _value_at(node: Any, key: str) -> Any:
    """What a dotted key leads to; None where there is nothing."""
    for part in key.split("."):
        if isinstance(node, list):
            node = {str(position): item for position, item in enumerate(node)}
        if not isinstance(node, Mapping):
            return None
        node = node.get(part)
    return node


def _override(plain: dict[str, Any], text: str) -> tuple[str, Any]:
    """Set what ``text`` says; its key and value."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"override {shown(redact(text))}: write key=value, as in optimizer.lr=1e-4")
    refuse_secrets({key: value})
    if key.count(".") >= MAX_KEY_PARTS:
        raise UserError(f"{shown(key)}: no such key; a key has at most {MAX_KEY_PARTS} parts")
    item = parse_override(key, value)
    # A copy: a later override may set a key within it, and _refuse_lost compares with what was given here.
    _set(plain, Config, key.split("."), copy.deepcopy(item), key)
    return key, item


def parse_override(key: str, value: str) -> Any:
    """What ``value`` says as the value of ``key``. Raises :class:`UserError`."""
    try:
        # As YAML, so that a value means the same on the command line and in a file.
        item = parse_yaml(value, lone_value=True)
    except ValueError as error:
        raise UserError(f"{key}: cannot read the value {shown(value)}: {error}") from None
    # YAML 1.1 reads on, off, yes and no as true and false, which no key of text can be.
    if isinstance(item, bool) and _schema_of(key) is str:
        return value.strip()
    return item


def _schema_of(key: str) -> Any:
    """The type of what a dotted key leads to; Any where there is none."""
    schema: Any = Config
    for part in key.split("."):
        schema = _schema_within(schema, part)
    return schema


def _set(node: Any, schema: Any, parts: Sequence[str], item: Any, key: str) -> None:
    """Set what ``parts`` names within ``node``. Setting ``kl.beta`` on a recipe's name makes it a mapping."""
    name: Any = parts[0]
    if isinstance(node, list):
        if not name.isdigit() or int(name) >= len(node):
            raise _not_a_position(key, item, parts, len(node))
        name = int(name)
    part_schema = _schema_within(schema, parts[0])
    if len(parts) == 1:
        _merge(node, name, item, part_schema)
        return
    child = _item(node, name)
    # `kl: grpo` with kl.beta=0.1 is the recipe at another beta.
    if isinstance(child, str) and key.startswith("kl."):
        child = {"recipe": child}
    # Null, or a section that no file sets, as model.lora.
    if not isinstance(child, dict | list):
        child = {}
    node[name] = child
    _set(child, part_schema, parts[1:], item, key)


def _not_a_position(key: str, item: Any, parts: Sequence[str], length: int) -> UserError:
    """The error for a ``key`` whose last ``parts`` begin within a list of ``length`` and name none of its items."""
    if length == 0:
        return bad_value(key, item, "a position in the list", "which has 0 item(s)")
    above = key.split(".")[: -len(parts)]
    if parts[0].isdigit():
        parts = parts[1:]
    meant_key = ".".join([*above, "0", *parts])
    return UserError(
        f"{key}: got {shown(item)}; did you mean {meant_key}? ({'.'.join(above)} is a list of {length}, counted from 0)"
    )


def _item(node: Any, name: Any) -> Any:
    """``node[name]`` of a list (where the position exists) or a mapping (None without the key)."""
    if isinstance(node, list):
        return node[name]
    return node.get(name)


def _merge(node: Any, name: Any, item: Any, schema: Any) -> None:
    """Set ``node[name]``. A mapping with a schema is merged; a list or a free-form mapping replaces what was there.

    In a mapping of names to records (``data.eval``), null removes a name.
    """
    current = _item(node, name)
    maps_names_to_records = typing.get_origin(schema) is dict and dataclasses.is_dataclass(typing.get_args(schema)[1])
    has_schema = dataclasses.is_dataclass(schema) or maps_names_to_records
    if not (has_schema and isinstance(item, dict) and isinstance(current, dict)):
        node[name] = item
        return
    for part, value in item.items():
        if maps_names_to_records and value is None:
            current.pop(part, None)
        else:
            _merge(current, part, value, _schema_within(schema, part))


def _schema_within(schema: Any, name: str) -> Any:
    """The type of a field of a dataclass, or of an item of a mapping or list; Any where there is none."""
    if dataclasses.is_dataclass(schema):
        return without_none(field_types(typing.cast(type, schema)).get(name, Any))[0]
    args = typing.get_args(schema)
    if args and typing.get_origin(schema) in (dict, list):
        return args[-1]
    return Any
