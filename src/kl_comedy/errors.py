"""Errors: a user's mistake (key, value, what is allowed, nearest name), and a run that failed.

Everything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake in the input. The command line prints it without a traceback and exits 2."""


class RunFailed(RuntimeError):
    """A run that began and could not finish (NaN, dead sampler, ...). Printed plainly, exit code 1."""


REQUEUE_EXIT_CODE = 75
"""What :class:`RunStopped` exits with (EX_TEMPFAIL: try again); a batch script requeues the job on it."""


class RunStopped(RunFailed):
    """A run that was asked to stop: it finished its update, saved a checkpoint, and must be started again."""


SHOWN = 200
"""Characters of a value that a message repeats. A value may be a whole file."""
COMPARED = 100
"""Characters of a name that is compared with others: the comparison's time grows with the product of the lengths."""


CANDIDATES = 1000
"""Names with which one is compared."""


def shown(value: object) -> str:
    """``repr(value)``, cut after :data:`SHOWN` characters.

    >>> shown("k33"), shown("x" * 1000)[-24:]
    ("'k33'", 'xx... (1,002 characters)')
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}... ({len(text):,} characters)"


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to ``given``, or None when nothing is close.

    >>> nearest("k33", ["k1", "k3", "abs"])
    'k3'
    """
    names = list(allowed)[:CANDIDATES]
    if len(str(given)) > COMPARED:
        return None
    lowered = {name.lower(): name for name in names}
    hits = difflib.get_close_matches(str(given).lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[hits[0]] if hits else None


def _hint(given: object, names: Iterable[str]) -> str:
    near = nearest(given, names) if isinstance(given, str) else None
    return f"; did you mean {near!r}?" if near else ""


def _short(key: str) -> str:
    return key if len(key) <= SHOWN else f"{key[: SHOWN - 20]}... ({len(key):,} characters)"


def bad_value(key: str, given: object, allowed: Iterable[str] | str, why: str = "") -> UserError:
    """Build the error for ``key`` holding ``given`` where only ``allowed`` fits.

    >>> print(bad_value("kl.0.estimator", "k33", ["k1", "k2", "k3"]))
    kl.0.estimator: got 'k33'; allowed: k1, k2, k3; did you mean 'k3'?
    """
    names = [] if isinstance(allowed, str) else list(allowed)
    text = allowed if isinstance(allowed, str) else ", ".join(names) or "(nothing)"
    reason = f" ({why})" if why else ""
    return UserError(f"{_short(key)}: got {shown(given)}; allowed: {text}{_hint(given, names)}{reason}")


def unknown_key(key: str, given: object, allowed: Iterable[str], why: str = "") -> UserError:
    """Build the error for a key that does not exist; the last part of ``key`` is what was misspelt.

    >>> print(unknown_key("optimizer.lrr", 1, ["lr", "betas"]))
    optimizer.lrr: no such key (given 1); allowed: lr, betas; did you mean 'lr'?
    """
    names, reason = list(allowed), f" ({why})" if why else ""
    allowed_names, hint = ", ".join(names) or "(none)", _hint(key.rsplit(".", 1)[-1], names)
    return UserError(f"{_short(key)}: no such key (given {shown(given)}){reason}; allowed: {allowed_names}{hint}")


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Begin the message of a :class:`UserError` that is raised inside with ``place``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error.__cause__
