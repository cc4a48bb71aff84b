"""Secrets: hidden in stored and printed text, refused in input.

A config, a grid and a site profile are stored, uploaded and rendered, so a secret in one is refused
(:func:`refuse_secrets`). Text that cannot be refused (the command line, error messages, source code) is redacted. The
time is proportional to the length of the text, whatever the text: plugins, diffs and tags are often long or odd. Each
pattern below is therefore bounded or possessive (``++``) where the rest of it may still fail.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kl_comedy.errors import UserError, bad_value

HIDDEN = "***"
"""What stands in a secret's place; stored runs contain it."""

# `token` and `pwd` count only as the last part of a key: `max_tokens` and `tokenizer` are common and no secrets.
SECRET_KEY = re.compile(
    r"(?i)pass(word|wd|phrase)|secret|credential|private_?key|api_?key|access_?key|(^|\.)(pwd|token)(\.\d+)?$|"
    r"(auth|access|api|hf|hub|bearer|refresh|session|github|gitlab|slack|wandb|mlflow|databricks)_?token|(?-i:_TOKEN$)"
)
"""Keys whose values are secrets."""
POINTER_KEY = re.compile(r"(?i)_(env|file|path|variable)$")
"""Keys that say where a secret is, and do not hold it."""
TEXT_KEY = re.compile(r"(^|\.)(prompt|stop|text|system|choice_line)(\.|$)")
"""Keys of a config that hold prose for the model, where ``password: x`` is not a secret."""

TOKEN = re.compile(
    r"(?<![A-Za-z0-9])("
    r"hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|"
    r"glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|xapp-[\w-]{10,}|dapi[0-9a-f]{16,}|(AKIA|ASIA)[A-Z0-9]{12,}|"
    r"AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{16,}|nvapi-[\w-]{16,}"
    r")|hooks\.slack\.com/services/\S+|(?i:\b(bearer|basic) +)(?=\S*\d)[\w.~+/-]{12,}=*|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
"""Tokens of well-known shapes: Hugging Face, OpenAI, GitHub, GitLab, Slack, Databricks, AWS, Google, keys, ...

A part after which the rest may still fail is bounded (200): unbounded, it would be read to its end at every start.
"""
WEB_TOKEN = re.compile(r"(?<![\w-])(?P<before>(?:(?!(?<![A-Za-z0-9])eyJ)[\w-])*+)eyJ[\w-]{8,}+\.[\w-]{8,}(?:\.[\w-]*)?")
"""A JSON web token. The match begins where its word begins, and only the first ``eyJ`` of a word is tried: from each
``eyJ`` of ``eyJ-eyJ-...`` the word would be read to its end, and no later one can match where the first does not."""
ADDRESS = re.compile(r"[^\s'\"]+")
"""A word that may be an address."""
USERINFO = re.compile(r"(?<=[\w+.-])://([^/:@]*+:.*@|[^/:@]++@)", re.DOTALL)
"""In an address cut after its last ``@``. A password may contain ``@`` and ``/``; the last ``@`` counts."""
KEY = re.compile(r"""(?<![\w.\-])(?P<key>[\w.\-]++)["']?+\s*+(?P<sign>[=:])\s*+""")
"""A word and the sign after it. It begins where a word begins and gives nothing back, so each letter is read once."""
# A quoted text, or everything up to a space, a quote or a sign that ends a value in Python, YAML and JSON.
VALUE = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|[^\s'\",;&}\])]+")
# The value of `--api-key VALUE`, which has no sign between the two.
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
    text = _without_tokens(text)
    text = _without_pairs(text, _is_secret_value)
    return _without_flag_values(text)


def redact_command(words: Sequence[str]) -> str:
    """The command as one types it in a shell, without secrets.

    >>> redact_command(["train", "model.options.token=a b", "--api-key", "c"])
    "train 'model.options.token=***' --api-key ***"
    """
    hidden = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            # By word: a value with spaces would otherwise be hidden up to its first space only.
            hidden.append(f"{key}={redact(value, key)}")
        else:
            hidden.append(redact(word))
    # Last, on the whole line: a flag and its value are two words.
    return _without_flag_values(shlex.join(hidden))


def redact_source(source: str) -> str:
    """Source code or a diff without credentials.

    Unlike :func:`redact`, a value without quotes is hidden only where it has letters and digits: ``token: str`` stays.

    >>> redact_source("api_key = 'abc'; pad_token = '<pad>'; password: hunter2; token: str")
    "api_key = '***'; pad_token = '<pad>'; password: ***; token: str"
    """
    source = _without_tokens(source)
    source = _without_pairs(source, _is_secret_literal)
    return _without_flag_values(source)


def printable(text: str) -> str:
    """``text`` without terminal escapes and control characters."""
    return CONTROL.sub("", text)


JOINERS = "\u200c\u200d"
"""Marks without width that belong to the spelling of Persian and Indic words, and to emoji."""


def one_line(text: str) -> str:
    """``text`` of somebody else (a file's name, a flag, a cell) as one line of printable characters.

    Terminal escapes are removed, and whitespace with a line end in it becomes one space. Other characters are allowed
    by what Unicode says of them, not refused by a list: what ends a line for some reader is no printable character.

    >>> one_line("a\\u2028kl:\\x85  b\\x1b[31m\\r\\n")
    'a kl:  b '
    """
    # Spaces alone stay: a path may have two.
    spaced = re.sub(r"\s++", lambda gap: gap[0] if not gap[0].strip(" ") else " ", printable(text))
    return "".join(letter for letter in spaced if letter.isprintable() or letter in JOINERS)


def refuse_secrets(data: Any, key: str = "") -> None:
    """Raise :class:`UserError`, without the value, for the first text in nested ``data`` that looks like a secret.

    ``key`` is the dotted key of ``data`` itself.
    """
    for name, value in _leaves(data, key):
        if _without_tokens(name) != name:
            raise UserError(f"{redact(name)}: this key looks like a secret; {_advice(name)}")
        if value is None or isinstance(value, bool):
            continue
        text = str(value)
        # A variable says where the secret is: it is read when the run starts, and never stored.
        if not text or VARIABLE.fullmatch(text):
            continue
        if is_secret_key(name) or _looks_secret(name, text):
            raise UserError(f"{name}: holds what looks like a secret (not shown here); {_advice(name)}")


def _looks_secret(name: str, text: str) -> bool:
    # In prose for the model, only a token is a secret for certain.
    if TEXT_KEY.search(name):
        return _without_tokens(text) != text
    return redact(text) != text


def _advice(key: str) -> str:
    """How to give the secret that ``key`` holds."""
    if re.search(r"(^|\.)uri$|--uri", key):
        server = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or _TOKEN)"
        database = "PGUSER and PGPASSWORD"
        return f"give an address without user and password, and set {server}, for a database {database}"
    is_of_server = "url" in key or "key" in key
    if "options" in key and is_of_server:
        return "give servers' keys by rollout.options.api_key_file or the variable that api_key_env names"
    if re.search(r"environment|setup|extra|command", key):
        return "scripts are stored: export it where you submit, or read it from a file that only you can read"
    return "it would be stored and uploaded: set an environment variable that your code reads (HF_TOKEN for the hub)"


def _without_flag_values(text: str) -> str:
    """``text`` without what follows flags such as ``--api-key``."""
    return FLAG.sub(rf"\g<left>{HIDDEN}", text)


def _without_tokens(text: str) -> str:
    """``text`` without passwords in addresses and without tokens of well-known shapes."""
    if "://" in text:
        text = ADDRESS.sub(_without_userinfo, text)
    text = WEB_TOKEN.sub(rf"\g<before>{HIDDEN}", text)
    return TOKEN.sub(HIDDEN, text)


def _without_userinfo(address: re.Match[str]) -> str:
    # Cut after the last @, so that a search for one from any :// finds it. Otherwise each search would read to the end,
    # and the time would grow with the square of the number of :// in the text.
    head, at, tail = address[0].rpartition("@")
    return USERINFO.sub(f"://{HIDDEN}@", head + at) + tail


def _without_pairs(text: str, is_secret: Callable[[str, str], bool]) -> str:
    """``text`` without the values after the names of secrets for which ``is_secret`` of sign and value holds."""
    pieces = []
    end = 0
    for key in KEY.finditer(text):
        is_inside_value = key.start() < end  # `password: 'token=x'`
        if is_inside_value or not is_secret_key(key["key"]):
            continue
        match = VALUE.match(text, key.end())
        if match is None:
            continue
        value = match[0]
        # A variable says where the secret is.
        if not value.startswith("$") and is_secret(key["sign"], value):
            value = _hidden(value)
        pieces.append(text[end : key.end()])
        pieces.append(value)
        end = match.end()
    pieces.append(text[end:])
    return "".join(pieces)


def _hidden(value: str) -> str:
    """What stands in place of ``value``: in the same quotes, so that redacted source can still be parsed."""
    if value[0] not in "'\"":
        return HIDDEN
    quote = value[0]
    return f"{quote}{HIDDEN}{quote}"


def _is_secret_value(sign: str, value: str) -> bool:
    """Whether the value of a secret's name is hidden in prose: all but the number of ``per token: 0.1``."""
    if sign == "=":
        return True
    is_number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value) is not None
    return not is_number


def _is_secret_literal(sign: str, value: str) -> bool:
    """Whether the value of a secret's name is hidden in source code: a text that is not empty, or like a password."""
    if value[0] in "'\"":
        return len(value) > len("''")
    # Without quotes it is code: a call, an index, an attribute are expressions, and a type or a name has no digits.
    if re.search(r"[(\[.]", value):
        return False
    has_digit = re.search(r"\d", value) is not None
    has_letter = re.search(r"[A-Za-z]", value) is not None
    return has_digit and has_letter


def _leaves(data: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every value in nested ``data`` that is not a container, with its dotted key."""
    if isinstance(data, Mapping):
        items = list(data.items())
    elif isinstance(data, list | tuple):
        items = list(enumerate(data))
    else:
        yield key, data
        return
    prefix = ""
    if key:
        prefix = f"{key}."
    for name, item in items:
        yield from _leaves(item, f"{prefix}{name}")


def check_address(url: str, key: str) -> None:
    """Raise :class:`UserError` that names ``key`` where ``url`` is not a plain address of an HTTP server."""
    try:
        is_plain = url.isprintable() and _is_plain_address(urlsplit(url))
    except ValueError:  # as a host in one bracket
        is_plain = False
    if not is_plain:
        raise bad_value(key, redact(url), "addresses such as http://127.0.0.1:8000, without user or key")


def _is_plain_address(parts: SplitResult) -> bool:
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return False
    # A user or a query may hold a key, and the address is stored with the run.
    if "@" in parts.netloc or parts.query:
        return False
    try:
        _ = parts.port
    except ValueError:  # not a number, or above 65535
        return False
    return True
