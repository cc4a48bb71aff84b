"""Keep secrets out of what is tracked: credentials in addresses, values of keys that name a secret."""

from __future__ import annotations

import re

SECRET_KEY = re.compile(
    r"(?i)(password|passwd|secret|credential|api_?key|access_?key|auth_?token|hf_?token)|(^|[._-])token$"
)
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{12,})")
CREDENTIALS = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)[^/@\s]+@")
HIDDEN = "***"
_PAIR = re.compile(r"(?P<key>[\w.\-]+)=(?P<value>[^\s'\"]+)")


def redact(text: str) -> str:
    """``text`` without credentials in addresses, tokens of well-known shapes and ``secret_key=value`` pairs.

    >>> redact("https://me:pw@host/x train model.options.token=abc seed=1")
    'https://***@host/x train model.options.token=*** seed=1'
    """
    text = SECRET_VALUE.sub(HIDDEN, CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text))
    return _PAIR.sub(lambda pair: f"{pair['key']}={HIDDEN}" if SECRET_KEY.search(pair["key"]) else pair[0], text)


def redact_pair(key: str, text: str) -> str:
    """The value of ``key``, hidden where the key names a secret.

    >>> redact_pair("model.options.hf_token", "abc"), redact_pair("max_tokens", "512")
    ('***', '512')
    """
    return HIDDEN if text and SECRET_KEY.search(key) else redact(text)


def redact_argument(argument: str) -> str:
    """A command-line word: ``key=value`` is judged by its key.

    >>> redact_argument("model.options.token=abc")
    'model.options.token=***'
    """
    key, equals, value = argument.partition("=")
    return f"{key}={redact_pair(key, value)}" if equals else redact(argument)
