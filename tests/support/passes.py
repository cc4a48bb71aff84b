"""``token_pass`` and ``head_columns`` with flat keyword arguments, for tests that try many combinations of them."""

from dataclasses import fields

from kl_comedy.models import head, logprobs
from kl_comedy.models.types import PassOptions, Wanted

QUANTITIES = ("kl", "forward_kl", "entropy", "total_variation", "certainty", "reference_certainty")


def token_pass(model, **arguments):
    """:func:`kl_comedy.models.token_pass`; the fields of its records are arguments."""
    options = PassOptions(**_taken(arguments, PassOptions))
    wanted = Wanted(**_taken(arguments, Wanted))
    return logprobs.token_pass(model, options, wanted, **arguments)


def head_columns(hidden_NH, weights, ids_N, *, requested=(), reference=None, likeliest=None, kept=None, **arguments):
    """:func:`kl_comedy.models.head.head_columns`; ``requested`` are names of :data:`QUANTITIES`."""
    arguments |= dict.fromkeys(requested, True)
    settings = head.HeadSettings(**_taken(arguments, head.HeadSettings))
    wanted = Wanted(**_taken(arguments, Wanted))
    assert not arguments, f"unknown: {arguments}"
    return head.head_columns(
        hidden_NH, weights, ids_N, settings, wanted, reference=reference, likeliest=likeliest, kept=kept
    )


def _taken(arguments, record):
    """The fields of ``record`` among the arguments, taken out of them; lists become tuples."""
    values = {}
    for field in fields(record):
        if field.name not in arguments:
            continue
        value = arguments.pop(field.name)
        if isinstance(value, list):
            value = tuple(value)
        values[field.name] = value
    return values
