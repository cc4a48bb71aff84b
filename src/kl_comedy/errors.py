"""Errors: a user's mistake (key, value, allowed values, nearest name), and a run that failed.

Every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

S = TypeVar("S")
R = TypeVar("R")


class UserError(ValueError):
    """A mistake in the input. The command line prints it without a traceback and exits 2."""


class RunFailed(RuntimeError):
    """A run that began and could not finish (NaN, dead sampler, ...). Printed plainly, exit code 1."""


REQUEUE_EXIT_CODE = 75
"""The exit code of :class:`RunStopped` (EX_TEMPFAIL: try again). Rendered batch scripts requeue the job on it, so with
another number here, scripts that are already submitted would stop requeueing."""


class RunInterrupted(RunFailed):
    """A run that Ctrl-C or SIGTERM ended: it finished its update and saved a checkpoint. Exit code 1."""


class RunStopped(RunFailed):
    """A run that was asked to stop: it finished its update, saved a checkpoint, and must be started again."""


SHOWN = 200
"""Characters of a value that a message repeats. A value may be a whole file."""
COMPARED = 100
"""Characters of a name that is compared with others: the comparison's time grows with the product of the lengths."""
CANDIDATES = 1000
"""Names with which one name is compared."""
LISTED = 24
"""Allowed names that a message lists; the hint stands before them."""

ALIASES: dict[str, tuple[str, ...]] = {
    "acc": ("accuracy", "reward"),
    "batch_size": ("prompts_per_batch", "rollout.prompts_per_batch"),
    "beta": ("kl.0.beta",),
    "coef": ("beta", "kl.0.beta"),
    "epochs": ("updates_per_batch", "algorithm.updates_per_batch"),
    "estimator": ("kl.0.estimator",),
    "group_size": ("rollout.group_size",),
    "k4": ("k3",),
    "kl_coef": ("beta", "kl.0.beta"),
    "learning_rate": ("lr", "optimizer.lr"),
    "lr": ("optimizer.lr",),
    "max_steps": ("train.steps",),
    "model_name": ("source", "model.source"),
    "model_name_or_path": ("source", "model.source"),
    "name": ("source",),
    "num_generations": ("group_size", "rollout.group_size"),
    "num_iterations": ("updates_per_batch", "algorithm.updates_per_batch"),
    "off_policy": ("replayed",),
    "path": ("source",),
    "steps": ("train.steps",),
    "temperature": ("rollout.temperature",),
}
"""Names of other frameworks, and ours of the same thing. A name with dots is a key of the config, from its top."""


def shown(value: object) -> str:
    """``repr(value)``, cut after :data:`SHOWN` characters.

    >>> shown("k33"), shown("x" * 1000)[-24:]
    ("'k33'", 'xx... (1,002 characters)')
    """
    # The message about a mistake must not fail itself, whatever a config or a plugin gave.
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "a number of thousands of digits"
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply"
    except Exception:  # the __repr__ of a plugin's class
        return f"a {type(value).__name__} that cannot be shown"
    return _cut(text)


def _cut(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    # 20 characters less: they hold the remark about the length.
    return f"{text[: SHOWN - 20]}... ({len(text):,} characters)"


def nearest(given: str, allowed: Iterable[str]) -> str | None:
    """The allowed name closest to ``given``, or None when nothing is close.

    >>> nearest("k33", ["k1", "k3", "abs"])
    'k3'
    """
    names = nearest_names(given, allowed, 1)
    if not names:
        return None
    return names[0]


def nearest_names(given: str, allowed: Iterable[str], count: int) -> list[str]:
    """At most ``count`` allowed names that are close to ``given``, the closest first."""
    if len(str(given)) > COMPARED:
        return []
    names = list(allowed)[:CANDIDATES]
    # Compared without case, which is a common mistake, but suggested as it is written.
    name_of_lowered = {name.lower(): name for name in names}
    # With difflib's default of 0.6, k4 would have no suggestion: half of its letters are right, which counts as 0.5.
    matches = difflib.get_close_matches(str(given).lower(), list(name_of_lowered), n=count, cutoff=0.5)
    return [name_of_lowered[match] for match in matches]


def meant(given: str, allowed: Iterable[str], *, top_level: bool = False) -> str | None:
    """What a user meant by ``given``: the name here of what other frameworks call so, else the nearest allowed one.

    ``top_level``: the allowed names are the config's sections, so that a key below one of them may be meant.

    >>> meant("learning_rate", ["lr", "betas"]), meant("learning_rate", ["kl", "optimizer"], top_level=True)
    ('lr', 'optimizer.lr')
    """
    names = list(allowed)
    for alias in ALIASES.get(given.lower(), ()):
        section, dot, _ = alias.partition(".")
        if alias in names or (dot and top_level and section in names):
            return alias
    return nearest(given, names)


def alternatives(allowed: Iterable[str], meant_name: str | None = None, *, listed: int = LISTED) -> str:
    """``did you mean 'k3'? allowed: k1, k2, k3``: what to write comes before what might be written.

    At most ``listed`` of the allowed names are named.

    >>> alternatives(["k1", "k3"]), alternatives(["k1", "k3"], "k3")
    ('allowed: k1, k3', "did you mean 'k3'? allowed: k1, k3")
    """
    names = list(allowed)
    text = ", ".join(names[:listed]) or "(nothing)"
    if len(names) > listed:
        text += f" and {len(names) - listed} more"
    if meant_name is None:
        return f"allowed: {text}"
    return f"did you mean {meant_name!r}? allowed: {text}"


def bad_value(key: str, given: object, allowed: Iterable[str] | str, why: str = "") -> UserError:
    """Build the error for ``key`` whose value is ``given``, where only ``allowed`` is valid.

    ``allowed`` are names, of which the nearest is suggested, or a description. ``why`` is a remark in parentheses.

    >>> print(bad_value("kl.0.estimator", "k33", ["k1", "k2", "k3"]))
    kl.0.estimator: got 'k33'; did you mean 'k3'? allowed: k1, k2, k3
    """
    if isinstance(allowed, str):
        # A description holds no names, so that nothing can be suggested.
        instead = f"allowed: {allowed}"
    else:
        names = list(allowed)
        # The text of another value, as True or None, may resemble a name without meaning it.
        meant_name = meant(given, names) if isinstance(given, str) else None
        instead = alternatives(names, meant_name)
    return UserError(f"{_cut(key)}: got {shown(given)}; {instead}{_in_brackets(why)}")


def unknown_key(key: str, given: object, allowed: Iterable[str], why: str = "") -> UserError:
    """Build the error for a key that does not exist; the last part of ``key`` is what was misspelt.

    >>> print(unknown_key("optimizer.lrr", 1, ["lr", "betas"]))
    optimizer.lrr: no such key (given 1); did you mean 'lr'? allowed: lr, betas
    """
    names = list(allowed)
    # The allowed names are those of one level, so only the key's last part is compared with them.
    misspelt = key.rsplit(".", 1)[-1]
    no_such_key = f"{_cut(key)}: no such key (given {shown(given)}){_in_brackets(why)}"
    meant_name = meant(misspelt, names, top_level="." not in key)
    return UserError(f"{no_such_key}; {alternatives(names, meant_name)}")


def first_refusal(rules: Iterable[Callable[[S], R | None]], subject: S) -> R | None:
    """What the first rule that ``subject`` breaks has against it; None where it breaks none.

    A rule refuses one combination of settings. It is a function of what it reads (a term, a config, a placement) that
    returns the reason, or the whole error, where it applies, and None where it does not; its name says what it refuses.
    A table lists the rules in the order in which they are asked, so that a rule may rely on those above it.

    >>> def even(number: int) -> str | None:
    ...     return f"{number} is even" if number % 2 == 0 else None
    >>> first_refusal([even], 4), first_refusal([even], 5)
    ('4 is even', None)
    """
    # The first one only: the others often follow from it, and a user mends one thing at a time.
    for rule in rules:
        refusal = rule(subject)
        if refusal is not None:
            return refusal
    return None


def _in_brackets(remark: str) -> str:
    if not remark:
        return ""
    return f" ({remark})"


@contextmanager
def error_prefix(place: str) -> Iterator[None]:
    """Put ``place`` in front of the message of a :class:`UserError` that is raised in this context."""
    try:
        yield
    except UserError as error:
        # The cause stays the original one: the shorter message of the same error explains nothing.
        raise UserError(f"{place}: {error}") from error.__cause__
