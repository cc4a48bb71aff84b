"""What the API pages show of our docstrings: an extension of griffe, which reads the source for mkdocstrings.

- Roles, as ``:func:`certify` ``, become links where the site has the object, else code.
- Doctests become blocks with highlighting and a copy button.
- A field of a record shows the ``doc`` of its ``option(...)``, what is allowed, and its default.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Callable
from typing import Any

ROLE = re.compile(r":(?:func|class|mod|meth|data|attr|exc|obj):`(?P<short>~?)(?P<name>[^`]+)`")
RELATIVE_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?![a-z]+://)[^)\s]+\)")
"""A link of a configuration page, whose target is relative to that page."""

PAGE = re.compile(r"(?<![`\w/])docs/([\w/]+)\.md\b(?:#[\w-]+)?")
"""A page of ours that a docstring names by its path."""

BOUNDS = {"minimum": "at least", "above": "above", "maximum": "at most"}
"""Rules of ``option`` about numbers, in words."""


def with_links(text: str, path_of: Callable[[str], str | None]) -> str:
    """Replace every role by a link that mkdocs-autorefs drops where the object is on no page.

    ``path_of`` gives the full path of a name as it stands in the docstring, or None.

    >>> with_links("Raises :class:`~errors.UserError`.", {"errors.UserError": None}.get)
    'Raises `UserError`.'
    """

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        shown = name.rpartition(".")[2] if match["short"] else name
        path = path_of(name)
        if path is None:
            return f"`{shown}`"
        return f'<autoref identifier="{html.escape(path)}" optional><code>{html.escape(shown)}</code></autoref>'

    return ROLE.sub(link, text)


def with_page_links(text: str) -> str:
    """Make a link of every page that the text names by its path; from a page of docs/api/.

    >>> with_page_links("as docs/metrics.md says")
    'as <a href="../../metrics/">docs/metrics.md</a> says'
    """
    return PAGE.sub(r'<a href="../../\1/">\g<0></a>', text)


def with_fenced_doctests(text: str) -> str:
    """Put every doctest, up to the blank line after it, between fences.

    >>> with_fenced_doctests("Add.\\n\\n>>> 1 + 1\\n2")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    lines = []
    # The indentation of the doctest whose lines are being read; None between doctests.
    indent = None
    # The last, empty line ends a doctest at the end of the text.
    for line in [*text.split("\n"), ""]:
        stripped = line.lstrip()
        if indent is None and stripped.startswith(">>> "):
            indent = line[: len(line) - len(stripped)]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not stripped:
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])


def field_text(doc: str, rules: dict[str, Any]) -> str:
    """The meaning of a field, then what is allowed.

    >>> field_text("Which way.", {"choices": ("up", "down")})
    'Which way. Allowed: `up`, `down`.'
    >>> field_text("[Ratio](#names) of two policies.", {"above": 0, "maximum": 1})
    'Ratio of two policies. A number above 0 and at most 1.'
    """
    text = RELATIVE_LINK.sub(r"\1", doc)
    if "choices" in rules:
        allowed = ", ".join(f"`{choice}`" for choice in rules["choices"])
        return f"{text} Allowed: {allowed}."
    if "registry" in rules:
        return f"{text} Allowed: a registered name (`kl-comedy list {rules['registry']}`)."
    bounds = [f"{words} {rules[rule]:g}" for rule, words in BOUNDS.items() if rule in rules]
    if bounds:
        return f"{text} A number {' and '.join(bounds)}."
    return text


# --- called by griffe ---------------------------------------------------------------------------------------------
def _constant(value: Any, module: Any) -> Any:
    """The value of an expression of the source: a literal, or the name of a constant of its module.

    Raises ValueError for anything else.
    """
    text = str(value)
    member = module.members.get(text)
    if member is not None and getattr(member, "value", None) is not None:
        text = str(member.value)
    return ast.literal_eval(text)


def _rules(call: Any, module: Any) -> dict[str, Any]:
    """The arguments of ``option(default, doc, rule=...)``; those that are no constants are left out."""
    rules = {}
    positional = ["default", "doc"]
    for argument in call.arguments:
        name = getattr(argument, "name", None)
        # A positional argument may itself be a name, which has a ``name`` too.
        is_keyword = type(argument).__name__ == "ExprKeyword"
        value = argument.value if is_keyword else argument
        if not is_keyword:
            name = positional.pop(0)
        if name == "default":
            rules["default"] = value
            continue
        try:
            rules[str(name)] = _constant(value, module)
        except (ValueError, SyntaxError):
            continue
    return rules


def _default(value: Any) -> Any:
    """What a reader sees as the default of a field: the value, or what a callable makes."""
    if str(value) == "...":
        return None
    if type(value).__name__ == "ExprLambda":
        return value.body
    if str(value) in ("dict", "list"):
        return f"{value}()"
    return value


def _show_field(attribute: Any, docstring_class: type) -> None:
    """Give a field that ``option`` made its docstring and its default."""
    call = attribute.value
    if type(call).__name__ != "ExprCall":
        return
    called = str(call.function)
    if called == "option":
        rules = _rules(call, attribute.module)
        attribute.value = _default(rules["default"])
    elif called == "dataclasses.field" and "'doc'" in str(call):
        arguments = {getattr(argument, "name", ""): argument.value for argument in call.arguments}
        rules = ast.literal_eval(str(arguments["metadata"]))
        attribute.value = f"{arguments['default_factory']}()"
    else:
        return
    if attribute.docstring is None and rules.get("doc"):
        text = field_text(rules["doc"], rules)
        attribute.docstring = docstring_class(text, parent=attribute)


def _rewrite(item: Any) -> None:
    """Rewrite the docstrings of an object and of everything in it."""
    from griffe import NameResolutionError

    def path_of(name: str) -> str | None:
        if name.startswith("kl_comedy."):
            return name
        first, dot, rest = name.partition(".")
        try:
            path = item.resolve(first)
        except NameResolutionError:
            return None
        # A name of another package or of Python is on no page of ours.
        return f"{path}{dot}{rest}" if path.startswith("kl_comedy") else None

    if item.docstring is not None:
        text = with_page_links(with_links(item.docstring.value, path_of))
        item.docstring.value = with_fenced_doctests(text)
    for member in list(item.members.values()):
        if not member.is_alias:
            _rewrite(member)


def _extension() -> type:
    # In a function, so that the tests of the text above need no griffe.
    from griffe import Docstring, Extension

    class ApiPages(Extension):  # type: ignore[misc, unused-ignore]
        """Registered in mkdocs.yml."""

        def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
            # Before griffe's own extension makes the signature of the class from the fields' defaults.
            _show_field(attr, Docstring)

        def on_package(self, *, pkg: Any, **_: Any) -> None:
            _rewrite(pkg)

    return ApiPages


def __getattr__(name: str) -> Any:
    """``ApiPages``, by which mkdocs.yml names the extension."""
    if name == "ApiPages":
        return _extension()
    raise AttributeError(name)
