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


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to ``given``, or None when nothing is close.

    >>> nearest("k33", ["k1", "k3", "abs"])
    'k3'
    """
    names = list(allowed)
    lowered = {name.lower(): name for name in names}
    hits = difflib.get_close_matches(str(given).lower(), list(lowered), n=1, cutoff=0.5)
    return lowered[hits[0]] if hits else None


def _hint(given: object, names: Iterable[str]) -> str:
    near = nearest(given, names) if isinstance(given, str) else None
    return f"; did you mean {near!r}?" if near else ""


def bad_value(key: str, given: object, allowed: Iterable[str] | str, why: str = "") -> UserError:
    """Build the error for ``key`` holding ``given`` where only ``allowed`` fits.

    >>> print(bad_value("kl.0.estimator", "k33", ["k1", "k2", "k3"]))
    kl.0.estimator: got 'k33'; allowed: k1, k2, k3; did you mean 'k3'?
    """
    names = [] if isinstance(allowed, str) else list(allowed)
    text = allowed if isinstance(allowed, str) else ", ".join(names) or "(nothing)"
    reason = f" ({why})" if why else ""
    return UserError(f"{key}: got {given!r}; allowed: {text}{_hint(given, names)}{reason}")


def unknown_key(key: str, given: object, allowed: Iterable[str], why: str = "") -> UserError:
    """Build the error for a key that does not exist; the last part of ``key`` is what was misspelt.

    >>> print(unknown_key("optimizer.lrr", 1, ["lr", "betas"]))
    optimizer.lrr: no such key (given 1); allowed: lr, betas; did you mean 'lr'?
    """
    names, reason = list(allowed), f" ({why})" if why else ""
    allowed_names, hint = ", ".join(names) or "(none)", _hint(key.rsplit(".", 1)[-1], names)
    return UserError(f"{key}: no such key (given {given!r}){reason}; allowed: {allowed_names}{hint}")


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Begin the message of a :class:`UserError` that is raised inside with ``place``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}: {error}") from error.__cause__
