"""A mistake in commands, arguments and options as one line, like a mistake in a config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import alternatives, meant, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import typer

EXAMPLE = re.compile(r"Examples?: (`[^`]+`)")
NO_SUCH_COMMAND = re.compile(r"No such command '(.*?)'\..*", re.DOTALL)


def usage_line(error: typer.TyperException) -> str:
    """What is wrong, the nearest name and what is allowed; empty where typer has printed a page of help instead.

    typer's own classes of mistakes are private: they are told by their names.
    """
    message = str(error.format_message()).rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None or not message:
        return message
    kind = type(error).__name__
    parameter = getattr(error, "param", None)
    command = NO_SUCH_COMMAND.fullmatch(error.format_message())
    if command is not None:
        names = [name for name, entry in context.command.commands.items() if not entry.hidden]
        message = f"no such command {shown(command[1])}; {_nearest(command[1], names)}"
    elif kind == "NoSuchOption":
        option = getattr(error, "option_name", "")
        message = f"no such option {shown(option)}; {_allowed_options(context, option)}"
    elif kind == "MissingParameter" and parameter is not None:
        message = f"{_name_of(parameter)} is missing{_example(context)}"
    elif parameter is not None:
        message = f"{_name_of(parameter)}: {str(error).rstrip('.')}"
    return f"{context.command_path}: {message}"


def _allowed_options(context: Any, given: str) -> str:
    options = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    text = _nearest(given, options)
    if any(parameter.name == "overrides" for parameter in context.command.params):
        text += " (a key of the config has no dashes: key=value)"
    return text


def _nearest(given: str, names: Sequence[str]) -> str:
    return alternatives(names, meant(given, names))


def _name_of(parameter: Any) -> str:
    """As the help has it: an argument in capitals, or the longest name of an option."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return str(max(parameter.opts, key=len))


def _example(context: Any) -> str:
    """The first example of the command's help."""
    for text in (context.command.help, context.command.epilog):
        found = EXAMPLE.search(text or "")
        if found is not None:
            return f"; for example {found[1]}"
    return ""
