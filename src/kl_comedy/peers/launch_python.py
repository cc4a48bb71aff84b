"""What Python programs and notebooks set: read as a syntax tree, nothing is imported or run."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kl_comedy.errors import UserError
from kl_comedy.io import MAX_FILE_BYTES
from kl_comedy.peers.launch_commands import PROGRAM, command_words, shell
from kl_comedy.peers.launch_releases import REQUIREMENT
from kl_comedy.peers.launch_settings import Parsed, Setting, Unread, is_literal, plain_text
from kl_comedy.peers.launch_shell import CERTAIN, Origin, Word
from kl_comedy.peers.systems import flag_key

TRAINING = re.compile(r".*(train|run|launch|experiment|main|fit|learn).*", re.IGNORECASE)
"""Names that a program takes from a module of its own, which trains."""

STARTING = re.compile(r"(.*_)?(train|fit|run|learn|launch|start|step|steps|update|optimize|loop|main)(_.*)?")
"""Methods of a trainer that train, or may: of a trainer with a call of one of these it is not said that it is idle."""
COMMAND_DECORATOR = re.compile(r"hydra\.main|command|entrypoint|\.function|\bapp\b|\bcli\b|flow|task")
"""Decorators of functions that a command line or a cluster calls: of Hydra, click, typer, Modal, Prefect."""


def python(text: str, parsed: Parsed) -> None:
    """Keyword arguments, dictionaries, attributes and defaults of options; ``--flags`` in strings."""
    # `# dependencies = ["trl==0.17.0"]`, which uv reads.
    for comment in re.findall(r"(?m)^#.*$", text):
        parsed.words += [requirement[0] for requirement in REQUIREMENT.finditer(comment)]
    tree = ast.parse(text)
    # A here-document and a cell belong to a program that runs.
    is_a_part = bool(parsed.started or parsed.documents)
    _Module(tree, parsed).read()
    if not is_a_part:
        parsed.is_imported = not _starts(tree)
        parsed.idle_trainer = _idle_trainer(tree)


def _idle_trainer(tree: ast.Module) -> str:
    """The class of a trainer that a program makes, uses and never starts, as a test of its data does; or empty.

    Empty too where it may be started out of sight: its variable is passed on, or it has none.
    """
    trainers: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name_of(node.func).endswith("Trainer"):
            trainers[name_of(node.func)] = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and name_of(node.value.func) in trainers:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                trainers[name_of(node.value.func)] = target.id
    uses = {variable: _uses_of(variable, tree) for variable in trainers.values()}
    for methods in uses.values():
        if not methods or any(STARTING.fullmatch(method) for method in methods):
            return ""
    return next(iter(trainers), "")


def _uses_of(variable: str, tree: ast.Module) -> list[str]:
    """The attributes that are taken of a variable; none where it is also used whole."""
    attributes = []
    names = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == variable:
            attributes.append(node.attr)
        elif isinstance(node, ast.Name) and node.id == variable and isinstance(node.ctx, ast.Load):
            names += 1
    if names > len(attributes):
        return []
    return attributes


def _starts(tree: ast.Module) -> bool:
    """Whether a program does something itself: it has a main part, calls, or a decorator that makes it a command."""
    for statement in tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = " ".join(ast.unparse(decorator) for decorator in statement.decorator_list)
            if COMMAND_DECORATOR.search(names):
                return True
            continue
        if isinstance(statement, ast.If) and _is_main(statement.test):
            return True
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and TRAINING.fullmatch(name_of(node.func) or "fire"):
                return True
            if isinstance(node, ast.Call) and name_of(node.func).endswith(("Config", "Fire", "app", "cli")):
                return True
    return False


def notebook(text: str, parsed: Parsed) -> None:
    """The code cells of a notebook, in order; ``!command`` and ``%%bash`` as shell."""
    sources = _code_of(text)
    if sum(len(source) for source in sources) > MAX_FILE_BYTES:
        raise UserError(f"has more than {MAX_FILE_BYTES:,} characters of code")
    program: list[str] = []
    for source in sources:
        first, _, rest = source.lstrip().partition("\n")
        if first.startswith("%%"):
            suffix = Path(first.split()[-1]).suffix
            parsed.written_files.append(first.split()[-1])
            parsed.read(rest, suffix)
            continue
        cell_text = _without_magics(source, parsed)
        try:
            ast.parse(cell_text)
        except SyntaxError:
            parsed.unread.append(Unread("a cell in another language"))
            continue
        program.append(cell_text)
    python("\n".join(program), parsed)
    parsed.is_imported = False


def _code_of(text: str) -> list[str]:
    """The sources of the code cells of a notebook, by its format (nbformat 4): lines, or one text.

    Raises :class:`UserError` for JSON of another shape.
    """
    data = json.loads(text)
    cells = data.get("cells") if isinstance(data, dict) else None
    if not isinstance(cells, list):
        raise UserError("is not a notebook: an object with a list of cells is expected")
    sources = []
    for number, cell in enumerate(cells, start=1):
        if not isinstance(cell, dict):
            raise UserError(f"is not a notebook: cell {number} is not an object")
        if cell.get("cell_type") != "code":
            continue
        lines = cell.get("source", "")
        if isinstance(lines, str):
            lines = [lines]
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise UserError(f"is not a notebook: the source of cell {number} is neither a text nor a list of texts")
        sources.append("".join(lines))
    return sources


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


MESSAGES = re.compile(
    r"print|log|echo|debug|info|warn|warning|error|exception|critical|fail|\w*Error|\w*Exception|SystemExit"
)
"""Calls whose texts a person reads: they may name flags, as ``policy_loss_type=reinforce: ...``, and set none."""
CONVERSIONS = ("float", "int", "str", "bool")
Items = list[tuple[str, ast.expr]]
"""The items of a dictionary in the source: each key, and the expression of its value."""
OPTION_MAKERS = ("add_argument", "option", "Option")
"""Calls that declare an option: of argparse, click and typer."""
CONFIG_MAKERS = ("create", "merge", "DictConfig", "ConfigDict", "from_dict", "update")
"""Calls whose dictionaries are configs: of OmegaConf and ml_collections."""
CONFIG_NAME = re.compile(r"(.*_)?(cfg|config|conf|args|arguments|hparams)", re.IGNORECASE)
"""Names of objects whose attributes and items are settings."""
COMMAND_LINE_PARSERS = ("load_expr_config", "parse_cli_args", "entrypoint", "nested_entrypoint")
"""Functions that fill a config class from the command line: of AReaL and of chz."""


class _Names:
    """What the names, options, fields and arguments of one program stand for."""

    def __init__(self, nodes: Sequence[ast.AST], parsed: Parsed) -> None:
        self.parsed = parsed
        self.values: dict[str, ast.expr | None] = {}
        """The value of each name that is assigned once; None for a name that is assigned twice."""
        self.overridden: set[str] = set()
        """Names with a first value that the program may replace by one from elsewhere."""
        self.updates: dict[str, list[tuple[str, ast.expr]]] = {}
        """``options["beta"] = 0.04``, by the name of the dictionary."""
        self.unknown_updates: set[str] = set()
        """Dictionaries that get items from elsewhere too."""
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
        for node in nodes:
            self._collect(node)
        changes = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Call)]
        # In the order of the source: the walk has all statements of a level before the calls in them.
        for change in sorted(changes, key=lambda node: (node.lineno, node.col_offset)):
            self._collect_change(change)
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._collect_arguments(node)

    # --- what names stand for
    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._collect_assignment(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._collect_assignment(node.target, node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            # `beta *= 2` is a second value; `options |= {...}` is still the same dictionary, with other items.
            if not isinstance(node.op, ast.BitOr):
                self.values[node.target.id] = None
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._collect_loop(node.target, node.iter)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                self.calls.setdefault(node.func.id, []).append(node)
            self._collect_option(node)
        elif isinstance(node, ast.ClassDef):
            self._collect_fields(node)

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

    def _collect_change(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Call) -> None:
        """What changes the items of a dictionary."""
        if isinstance(node, ast.Call):
            self._collect_update_call(node)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._collect_update(node.target.id, node.value)
        elif isinstance(node, ast.AugAssign):
            # `options["beta"] *= 2`: a value that depends on itself is not known.
            self._collect_item(node.target, ast.BinOp(node.target, node.op, node.value))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._collect_item(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._collect_item(node.target, node.value)

    def _collect_item(self, target: ast.expr, value: ast.expr) -> None:
        """``options["beta"] = 0.04``."""
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            key = self.value(target.slice)
            if isinstance(key, str):
                self.updates.setdefault(target.value.id, []).append((key, value))

    def _collect_option(self, call: ast.Call) -> None:
        """``parser.add_argument("--beta", default=0.04)``, also of click, and absl's ``DEFINE_float("beta", 0.04)``."""
        maker = name_of(call.func)
        if maker.startswith("DEFINE_") and len(call.args) >= 2:
            flag_name = self.value(call.args[0])
            if isinstance(flag_name, str):
                self.defaults[flag_name] = call.args[1]
            return
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
        items = self._items(node) if isinstance(node, ast.Dict) else None
        if items is None:
            self.unknown_updates.add(name)
        else:
            self.updates.setdefault(name, []).extend(items)

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
        # Of several functions of one name the calls are those of the first: else the time grows with their product.
        for call in self.calls.pop(function.name, []):
            pairs = list(zip(names, call.args, strict=False))
            pairs += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
            for name, value in pairs:
                self.arguments.setdefault((function.name, name), []).append(value)
        for name, default in defaults.items():
            if (function.name, name) not in self.arguments:
                self.arguments[function.name, name] = [_default_of_field(default)]
                self.defaulted.add((function.name, name))

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
        readers: tuple[tuple[type, Callable[[Any], Any]], ...] = (
            (ast.Name, self._value_of_name),
            (ast.Attribute, self._value_of_attribute),
            (ast.Subscript, self._item),
            (ast.JoinedStr, self._joined),
            (ast.Call, self._converted),
            (ast.BinOp, self._sum),
            (ast.BoolOp, self._first_true),
        )
        for kind, value_of in readers:
            if isinstance(node, kind):
                return value_of(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self.value(node.operand)
            return UNKNOWN if value is UNKNOWN else not value
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
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

    def _value_of_attribute(self, node: ast.Attribute) -> Any:
        """``options.beta``: the default of an option or a field of that name."""
        default = self.defaults.get(node.attr)
        return UNKNOWN if default is None else self.value(default)

    def _item(self, node: ast.Subscript) -> Any:
        """``CONFIG["beta"]`` of a dictionary that the file writes, and ``os.environ["BETA"]``."""
        if ast.unparse(node.value) == "os.environ":
            text = self._environment(node.slice)
            return UNKNOWN if text is None else text
        key = self.value(node.slice)
        for name, value in reversed(self.dictionary(node.value) or []):
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

    def _sum(self, node: ast.BinOp) -> Any:
        """The text of ``"a" + "b"``; :data:`UNKNOWN` for any other operation."""
        if isinstance(node.op, ast.Add):
            left = self.value(node.left)
            right = self.value(node.right)
            if isinstance(left, str) and isinstance(right, str):
                return self.parsed.count_written(left + right)
        return UNKNOWN

    def _first_true(self, node: ast.BoolOp) -> Any:
        """``options.beta or 0.04``."""
        operands = node.values if isinstance(node.op, ast.Or) else []
        for operand in operands:
            value = self.value(operand)
            if value is not UNKNOWN and value:
                return value
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

    def dictionary(self, node: ast.expr) -> Items | None:
        """The items of a dictionary that is written in the file; None for any other."""
        if self.depth > 20:
            return None
        self.depth += 1
        items = self._items(node)
        self.depth -= 1
        return items

    def _items(self, node: ast.expr) -> Items | None:
        if isinstance(node, ast.Name):
            assigned = self.values.get(node.id)
            inner = None if assigned is None else self.dictionary(assigned)
            if inner is None:
                return None
            return [*inner, *self.updates.get(node.id, [])]
        if isinstance(node, ast.Subscript):
            # `CONFIG["grpo"]`
            key = self.value(node.slice)
            for name, value in reversed(self.dictionary(node.value) or []):
                if name == key:
                    return self.dictionary(value)
            return None
        if isinstance(node, ast.Call) and name_of(node.func) == "dict" and not node.args:
            return self._items_of_pairs([(word.arg, word.value) for word in node.keywords])
        if isinstance(node, ast.Dict):
            return self._items_of_pairs(list(zip(node.keys, node.values, strict=True)))
        return None

    def _items_of_pairs(self, pairs: Sequence[tuple[ast.expr | str | None, ast.expr]]) -> Items | None:
        """The items of ``dict(key=value)`` or ``{key: value}``; None for an unknown ``**other`` (its key is None)."""
        items: Items = []
        for key, value in pairs:
            if key is None:
                inner = self.dictionary(value)
                if inner is None:
                    return None
                items += inner
                continue
            name = key if isinstance(key, str) else self.value(key)
            if isinstance(name, str):
                items.append((name, value))
        return items

    def _environment(self, node: ast.expr) -> str | None:
        """The value of a variable that the script or the job around the program gives it."""
        name = self.value(node)
        return self.parsed.environment.get(name) if isinstance(name, str) else None

    def class_of(self, node: ast.expr) -> str:
        """The class of an object: ``GRPOConfig`` where the file has ``arguments = GRPOConfig(...)``."""
        made_by = self.values.get(node.id) if isinstance(node, ast.Name) else None
        return name_of(made_by.func) if isinstance(made_by, ast.Call) else ""

    # --- how sure they are
    def origin_of(self, node: ast.expr) -> Origin:
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
            return self.origin_of(node.args[0])
        return CERTAIN

    def _origin_of_name(self, name: str) -> Origin:
        given = self.arguments.get((self.function, name), [])
        values = self.loops.get(name, [])
        # The first seven say whether there is more than one, and are more than a remark lists.
        texts = list(dict.fromkeys(ast.unparse(value) for value in (given or values)[:7]))
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
        origin = CERTAIN if isinstance(node, ast.Name) else self.origin_of(node)
        self.function = function
        return origin


class _Module:
    """What one program sets: options of calls, fields, assignments, and the commands that it starts."""

    def __init__(self, tree: ast.Module, parsed: Parsed) -> None:
        self.tree = tree
        self.parsed = parsed
        self.nodes = list(ast.walk(tree))
        self.names = _Names(self.nodes, parsed)

    def read(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                self.parsed.imports += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                self._import(node)
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
        """Texts that may show a command that is not run: docstrings, help, messages; and parts of f-strings."""
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
            elif isinstance(node, ast.Call):
                name = name_of(node.func)
                if name in OPTION_MAKERS or MESSAGES.fullmatch(name):
                    inner = list(node.args)
            elif isinstance(node, ast.Assert) and node.msg is not None:
                inner = [node.msg]
            for part in inner:
                passed_over |= {id(nested) for nested in ast.walk(part)}
        return passed_over

    def _import(self, node: ast.ImportFrom) -> None:
        """``from module import name``: the module, the name, and both as ``module:name``."""
        module = node.module or ""
        names = [alias.name for alias in node.names]
        self.parsed.imports += [module, *names]
        self.parsed.imports += [f"{module}:{name}" for name in names]
        is_foreign = module.partition(".")[0] not in sys.stdlib_module_names
        if module and is_foreign and any(TRAINING.fullmatch(name) for name in names):
            self.parsed.own_modules.append(module)

    def _visit(self, node: ast.AST, origin: Origin) -> None:
        outside = self.names.function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.names.function = node.name
        self._visit_node(node, origin)
        self.names.function = outside

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
            key = self.names.value(call.args[1])
            if isinstance(key, str):
                self._set(key, call.args[2], origin, self.names.class_of(call.args[0]))
        if name in CONFIG_MAKERS and "wandb" not in ast.unparse(call.func):
            self._config_of_call(call, origin)
        if name == "replace" and call.args:
            # `dataclasses.replace(arguments, beta=0.04)`
            name = self.names.class_of(call.args[0]) or name
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

    def _config_of_call(self, call: ast.Call, origin: Origin) -> None:
        """``OmegaConf.create({...})``, and ``OmegaConf.update(config, "key", value)``."""
        if len(call.args) == 3 and isinstance(self.names.value(call.args[1]), str):
            self._set(self.names.value(call.args[1]), call.args[2], origin, "")
            return
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in self.names.dictionary(argument) or ():
                    self._set(key, value, origin, "")

    def _options(self, node: ast.expr, origin: Origin, scope: str) -> None:
        """``**options`` of a call."""
        options = self.names.dictionary(node)
        if options is None:
            what = f"{scope}(**{ast.unparse(node)[:60]})"
            self.parsed.unread.append(Unread(what, scope, may_hold_all=True))
            return
        if isinstance(node, ast.Name) and node.id in self.names.unknown_updates:
            self.parsed.unread.append(Unread(f"what the program adds to {node.id}", scope))
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
            name = self.names.value(keyword.value)
            if keyword.arg == "config_name" and isinstance(name, str):
                self.parsed.configs.append(Word(name))

    def _assignment(self, node: ast.Assign | ast.AnnAssign, origin: Origin) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is None:
            return
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            # `arguments.beta = 0.04`: of the class that made `arguments`.
            scope = self.names.class_of(target.value)
            if scope:
                self._set(target.attr, node.value, origin, scope)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            key = self._key_in_config(target)
            if key:
                self._set(key, node.value, origin, "")
        elif isinstance(node.value, ast.Dict) and isinstance(target, ast.Name):
            options = self.names.dictionary(node.value)
            for key, value in options or ():
                self._set(key, value, origin, f"{target.id} = {{}}")

    def _key_in_config(self, target: ast.expr) -> str:
        """``actor.beta`` for ``config.actor.beta`` and ``config["actor"]["beta"]``; empty for any other place."""
        parts: list[str] = []
        while isinstance(target, ast.Attribute | ast.Subscript):
            part = target.attr if isinstance(target, ast.Attribute) else self.names.value(target.slice)
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
        options = self.names.dictionary(node) if isinstance(node, ast.Dict) else None
        if options:
            for inner, value in options:
                self._set(f"{key}.{inner}", value, origin, scope)
            return
        if isinstance(node, ast.IfExp):
            self._set_chosen(key, node, origin, scope)
            return
        value = self.names.value(node)
        if value is UNKNOWN:
            self.parsed.add(Setting(key, ast.unparse(node)[:60], False, origin, scope))
            return
        text, literal = plain_text(value)
        origin = origin.within(self.names.origin_of(node))
        self.parsed.add(Setting(key, text, literal and is_literal(text), origin, scope))

    def _set_chosen(self, key: str, node: ast.IfExp, origin: Origin, scope: str) -> None:
        """``beta=0.0 if no_kl else 0.04``: the one that the file's own values choose, else the first."""
        condition = self.names.value(node.test)
        chosen = node.orelse if condition is not UNKNOWN and not condition else node.body
        why = f"if {ast.unparse(node.test)[:60]}"
        self._set(key, chosen, origin.within(Origin("branch", why)), scope)

    def _requirement(self, node: ast.expr) -> None:
        """``"trl==0.17.0"``: a version that the program asks for, as ``image.pip_install`` of a cluster."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and REQUIREMENT.fullmatch(node.value.strip()):
            self.parsed.words.append(node.value.strip())

    def _command_text(self, node: ast.JoinedStr | ast.Constant) -> None:
        """A command that the program starts, or flags of one: ``subprocess.run(f"python ... --beta {beta}")``."""
        text = self.names.value(node)
        if not isinstance(text, str):
            return
        if not PROGRAM.match(text) and not re.search(r"(^|\s)(--[a-z]|[+~]*[a-z_]+(\.\w+)+=\S)", text):
            return
        # A flag on its own is one of a list, which is read whole.
        if " " in text.strip() or "=" in text:
            shell(text, self.parsed)

    def _command_list(self, node: ast.List | ast.Tuple) -> None:
        """``["python", "-m", "...", "--beta", "0.04"]``."""
        values = [self.names.value(item) for item in node.elts]
        if not _is_command(values):
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


def _is_command(values: Sequence[Any]) -> bool:
    """Whether a list is a command with its arguments, or the start of one."""
    if any(isinstance(value, str) and value.startswith("--") for value in values):
        return True
    return len(values) > 1 and isinstance(values[0], str) and PROGRAM.match(f"{values[0]} ") is not None


def _mentions(node: ast.expr, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def _is_main(test: ast.expr) -> bool:
    """Whether a condition is that of a program: ``if __name__ == "__main__"``."""
    return any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(test))
