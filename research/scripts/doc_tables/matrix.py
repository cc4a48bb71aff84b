"""The generated part of docs/matrix.md: which settings work together, by the checks of the config."""

from __future__ import annotations

from doc_tables.common import built_in, code_span, table

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.registry import ROLLOUTS

# tests/config/test_matrix.py trains the allowed cells of these for two updates.
STRATEGIES = ("single", "ddp", "fsdp")
LAGS = {
    "on-policy": (),
    "replayed": ("lag.mode=replayed", "lag.steps=2"),
    "async, wait": ("lag.mode=async", "lag.max_steps=2"),
    "async, drop": ("lag.mode=async", "lag.max_steps=2", "lag.policy=drop"),
    "async, in flight": ("lag.mode=async", "lag.max_steps=2", "lag.in_flight=true"),
}
ALGORITHMS = {
    "LoRA": ("model.lora={rank: 8}",),
    "value head (`gae`)": ("algorithm.advantage=gae",),
    "exact KL": ("kl=[{estimator: exact, placement: loss, beta: 0.1}]",),
    "KL to a teacher": ("reference.teacher={source: pocket}", "kl=opd/reverse"),
    "adaptive beta": ("kl=[{estimator: k1, placement: reward, beta: {target: 0.1}}]",),
    "dialogues": ("environment.name=calculator",),
    "DPO": ("algorithm.dpo={}",),
    "audit": ("audit.every=10",),
}


def config_error(strategy: str, *overrides: str) -> str | None:
    """The key and reason of the config error, or None if the settings work together."""
    # The page cannot contradict the program: it asks the checks that a run meets.
    try:
        load_config(None, [f"train.strategy={strategy}", *overrides])
    except UserError as error:
        # The message is "key: what is wrong (the reason)".
        key, _, text = str(error).partition(": ")
        reason = text[text.rindex("(") + 1 : text.rindex(")")]
        return f"{code_span(key)}: {reason}"
    return None


class Notes:
    """The reasons against settings, numbered from 1 in the order in which they first come up."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def number_of(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 1

    def text(self) -> str:
        return "\n".join(f"{number}. {reason}." for number, reason in enumerate(self.reasons, 1))


def matrix() -> str:
    """Samplers by lags, then algorithms, then the notes that both tables number."""
    notes = Notes()

    sampler_rows = []
    for entry in built_in(ROLLOUTS):
        cells = [strategies_cell(notes, f"rollout.backend={entry.name}", *overrides) for overrides in LAGS.values()]
        sampler_rows.append((code_span(entry.name), *cells))

    algorithm_rows = [(name, strategies_cell(notes, *overrides)) for name, overrides in ALGORITHMS.items()]

    parts = [
        table(("`rollout.backend`", *LAGS), sampler_rows),
        "With every sampler and lag:",
        table(("algorithm", "`train.strategy`"), algorithm_rows),
        notes.text(),
    ]
    return "\n\n".join(parts)


def strategies_cell(notes: Notes, *overrides: str) -> str:
    """The strategies that work with ``overrides``, and the numbers of the notes about those that do not."""
    allowed = []
    numbers = set()
    for strategy in STRATEGIES:
        reason = config_error(strategy, *overrides)
        if reason is None:
            allowed.append(strategy)
        else:
            numbers.add(notes.number_of(reason))

    parts = []
    if len(allowed) == len(STRATEGIES):
        parts.append("all")
    elif allowed:
        parts.append(", ".join(allowed))
    if numbers:
        parts.append(", ".join(f"({number})" for number in sorted(numbers)))
    return " ".join(parts)


PARTS = {"matrix": matrix}
