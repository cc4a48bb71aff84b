"""Secrets: hidden in what is stored and shown, refused in input.

A config, a grid and a site profile are stored, uploaded and rendered, so a secret in one is refused
(:func:`refuse_secrets`). What cannot be refused (the command line, error messages, source code) is redacted. That takes
time in proportion to the length of the text, whatever the text: plugins, diffs and tags are often long or odd.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kl_comedy.errors import UserError, bad_value

HIDDEN = "***"

SECRET_KEY = re.compile(
    r"(?i)pass(word|wd|phrase)|secret|credential|private_?key|api_?key|access_?key|(^|\.)(pwd|token)(\.\d+)?$|"
    r"(auth|access|api|hf|hub|bearer|refresh|session|github|gitlab|slack|wandb|mlflow|databricks)_?token|(?-i:_TOKEN$)"
)
POINTER_KEY = re.compile(r"(?i)_(env|file|path|variable)$")
"""Keys that say where a secret is, not what it is."""
TEXT_KEY = re.compile(r"(^|\.)(prompt|stop|text|system|choice_line)(\.|$)")
"""Keys of a config that hold prose for the model, in which ``password: x`` is no secret."""

TOKEN = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|"
    r"glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|dapi[0-9a-f]{16,}|(AKIA|ASIA)[A-Z0-9]{12,}|"
    r"AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|nvapi-[\w-]{16,}|"
    r"eyJ[\w-]{8,4000}+\.[\w-]{8,}(\.[\w-]*)?"
    r")|hooks\.slack\.com/services/\S+|(?i:\b(bearer|basic) +)(?=\S*\d)[\w.~+/-]{12,}=*|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
"""Tokens of well-known shapes: Hugging Face, OpenAI, GitHub, GitLab, Slack, Databricks, AWS, Google, JWT, keys, ...

A part after which the rest may still fail is bounded (200, 4000): unbounded, ``eyJ-eyJ-...`` would be read to its end
at every ``eyJ``.
"""
ADDRESS = re.compile(r"[^\s'\"]+")
USERINFO = re.compile(r"(?<=[\w+.-])://([^/:@]*+:.*@|[^/:@]++@)", re.DOTALL)
"""In an address cut after its last ``@``. A password may contain ``@`` and ``/``; the last ``@`` counts."""
KEY = re.compile(r"""(?<![\w.\-])(?P<key>[\w.\-]++)["']?+\s*+(?P<sign>[=:])\s*+""")
"""A word and the sign after it. It begins where a word begins and gives nothing back, so each letter is read once."""
VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;&}\])]+")
FLAG = re.compile(r"(?i)(?P<left>(^|\s)--?[\w-]*(password|passwd|secret|api-?key|token)\s+)(?P<value>[^\s-]\S*)")
VARIABLE = re.compile(r"\$(\w+|\{[\w.]+\})")
"""A text that names a variable, or another key of the config."""
CONTROL = re.compile(
    r"(\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(\x07|\x1b\\)?|\x1b.?|"
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
"""Terminal escapes, control characters other than tab and newline, and marks that turn the direction of text."""


def is_secret_key(key: str) -> bool:
    """Whether ``key`` names a secret rather than where one is.

    >>> is_secret_key("model.options.hf_token"), is_secret_key("data.max_tokens"), is_secret_key("api_key_file")
    (True, False, False)
    """
    return SECRET_KEY.search(key) is not None and POINTER_KEY.search(key) is None


def redact(text: str, key: str = "") -> str:
    """``text`` without credentials in addresses, tokens of well-known shapes and values of secret keys.

    Where ``key`` names a secret, ``text`` is its value and all of it is hidden.

    >>> redact("https://me:p@w/x@host/x train model.options.token=abc seed=1")
    'https://***@host/x train model.options.token=*** seed=1'
    >>> redact("abc", "model.options.hf_token"), redact("512", "max_tokens")
    ('***', '512')
    """
    if text and is_secret_key(key):
        return HIDDEN
    return FLAG.sub(rf"\g<left>{HIDDEN}", _without_pairs(_without_tokens(text), _is_secret_value))


def redact_command(words: Sequence[str]) -> str:
    """The command as a shell takes it, without secrets.

    >>> redact_command(["train", "model.options.token=a b", "--api-key", "c"])
    "train 'model.options.token=***' --api-key ***"
    """
    parts = [word.partition("=") for word in words]
    hidden = [f"{key}={redact(value, key)}" if equals else redact(key) for key, equals, value in parts]
    return FLAG.sub(rf"\g<left>{HIDDEN}", shlex.join(hidden))


def redact_source(source: str) -> str:
    """Source code or a diff without credentials: as :func:`redact`, but a value without quotes is hidden only where it
    has letters and digits, so that ``token: str`` stays.

    >>> redact_source("api_key = 'abc'; pad_token = '<pad>'; password: hunter2; token: str")
    "api_key = '***'; pad_token = '<pad>'; password: ***; token: str"
    """
    return FLAG.sub(rf"\g<left>{HIDDEN}", _without_pairs(_without_tokens(source), _is_secret_literal))


def printable(text: str) -> str:
    """``text`` without terminal escapes and control characters."""
    return CONTROL.sub("", text)


def refuse_secrets(data: Any, key: str = "") -> None:
    """Raise :class:`UserError`, without the value, for the first text in nested ``data`` that looks like a secret."""
    for name, value in _leaves(data, key):
        if _without_tokens(name) != name:
            raise UserError(f"{redact(name)}: this key looks like a secret; {_advice(name)}")
        if value is None or isinstance(value, bool) or not str(value) or VARIABLE.fullmatch(str(value)):
            continue
        hide = _without_tokens if TEXT_KEY.search(name) else redact
        if is_secret_key(name) or hide(str(value)) != str(value):
            raise UserError(f"{name}: holds what looks like a secret (not shown here); {_advice(name)}")


def _advice(key: str) -> str:
    if re.search(r"(^|\.)uri$|--uri", key):
        http, database = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN)", "PGUSER and PGPASSWORD"
        return f"give an address without user and password, and set {http}, for a database {database}"
    if "options" in key and ("url" in key or "key" in key):
        return "give servers' keys by rollout.options.api_key_file or the variable that api_key_env names"
    if re.search(r"environment|setup|extra|command", key):
        return "scripts are stored: export it where you submit, or read it from a file that only you can read"
    return "it would be stored and uploaded: set an environment variable that your code reads (HF_TOKEN for the hub)"


def _without_tokens(text: str) -> str:
    if "://" in text:
        text = ADDRESS.sub(_without_userinfo, text)
    return TOKEN.sub(HIDDEN, text)


def _without_userinfo(address: re.Match[str]) -> str:
    # Cut after the last @, so that a search for one from any :// finds it: without, each would read on to the end.
    head, at, tail = address[0].rpartition("@")
    return USERINFO.sub(f"://{HIDDEN}@", head + at) + tail


def _without_pairs(text: str, is_secret: Callable[[str, str], bool]) -> str:
    """``text`` without the values after the names of secrets for which ``is_secret`` of sign and value holds."""
    pieces = []
    end = 0
    for key in KEY.finditer(text):
        if key.start() < end or not is_secret_key(key["key"]):
            continue
        value = VALUE.match(text, key.end())
        if value is None:
            continue
        pieces.append(text[end : key.end()])
        if value[0].startswith("$") or not is_secret(key["sign"], value[0]):
            pieces.append(value[0])
        else:
            quote = value[0][0] if value[0][0] in "'\"" else ""
            pieces.append(f"{quote}{HIDDEN}{quote}")
        end = value.end()
    return "".join([*pieces, text[end:]])


def _is_secret_value(sign: str, value: str) -> bool:
    """Not the number of ``per token: 0.1``."""
    return sign == "=" or not re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value)


def _is_secret_literal(sign: str, value: str) -> bool:
    if value[0] in "'\"":
        return len(value) > 2
    return bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value) and not re.search(r"[(\[.]", value))


def _leaves(data: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(data, Mapping | list | tuple):
        items = data.items() if isinstance(data, Mapping) else enumerate(data)
        for name, item in items:
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, data


def check_address(url: str, key: str) -> None:
    """Raise :class:`UserError` that names ``key`` where ``url`` is no plain address of an HTTP server."""
    parts, port = urlsplit(url), 0
    with contextlib.suppress(ValueError):  # no number, or above 65535
        port = parts.port or 80
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or not port:
        raise bad_value(key, redact(url), "addresses such as http://127.0.0.1:8000, without user or key")
