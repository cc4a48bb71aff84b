"""The generated part of docs/matrix.md: which settings work together, by the checks of the config."""

from __future__ import annotations

from doc_tables.common import built_in, table

from kl_comedy.config import load_config
from kl_comedy.errors import UserError
from kl_comedy.registry import ROLLOUTS

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
    "DPO": ("algorithm.dpo={}",),
    "audit": ("audit.every=10",),
}


def config_error(strategy: str, *overrides: str) -> str | None:
    """The key and reason of the config error, or None if the settings work together."""
    try:
        load_config(None, [f"train.strategy={strategy}", *overrides])
    except UserError as error:
        key, _, text = str(error).partition(": ")
        return f"`{key}`: {text[text.rindex('(') + 1 : text.rindex(')')]}"
    return None


def matrix() -> str:
    notes: list[str] = []

    def cell(*overrides: str) -> str:
        """The strategies that work, and the numbers of the notes for those that do not."""
        works, numbers = [], set[int]()
        for strategy in STRATEGIES:
            reason = config_error(strategy, *overrides)
            if reason is None:
                works.append(strategy)
            else:
                notes.extend({reason} - set(notes))
                numbers.add(notes.index(reason) + 1)
        names = "all" if len(works) == len(STRATEGIES) else ", ".join(works)
        return " ".join(filter(None, [names, ", ".join(f"({number})" for number in sorted(numbers))]))

    backends = [entry.name for entry in built_in(ROLLOUTS)]
    samplers = [
        (f"`{name}`", *(cell(f"rollout.backend={name}", *overrides) for overrides in LAGS.values()))
        for name in backends
    ]
    algorithms = [(name, cell(*overrides)) for name, overrides in ALGORITHMS.items()]
    return "\n\n".join(
        [
            table(("`rollout.backend`", *LAGS), samplers),
            "With every sampler and lag:",
            table(("algorithm", "`train.strategy`"), algorithms),
            "\n".join(f"{number}. {reason}." for number, reason in enumerate(notes, 1)),
        ]
    )


PARTS = {"matrix": matrix}
