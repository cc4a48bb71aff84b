"""What an evaluation of one suite is, as data: its identity names its folder, so it is resumed or found, never mixed.

    SuiteConfig + prompts + sampling -> Plan -> chunks of problems -> shard i of n takes the chunks i, i + n, ...

A chunk is drawn in one call with a seed of its own. So a completion depends on the plan only: not on what was drawn
before, on which process draws it, or on how many there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kl_comedy.config.suites import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import bad_value
from kl_comedy.records import Prompt
from kl_comedy.rollouts import Sampling

CHUNK = 32
"""Problems drawn at a time: what a kill may lose."""
FORMAT = 1
"""Of the records; a change of what they mean is another number."""
_NOT_IDENTITY = ("name", "summary", "source", "licence", "group", "data", "file", "where", "items")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This process's part: chunks ``index``, ``index + count``, ..."""

    index: int = 0
    count: int = 1

    def takes(self, chunk: int) -> bool:
        return chunk % self.count == self.index


def parse_shard(text: str | None) -> Shard:
    """``I/N`` with 0 <= I < N; None: this process's rank as torchrun or srun tells it, else the whole.

    >>> parse_shard("1/4")
    Shard(index=1, count=4)
    """
    if text is None:
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if os.environ.get(rank) and os.environ.get(size):
                return Shard(index=int(os.environ[rank]), count=int(os.environ[size]))
        return Shard()
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise bad_value("--shard", text, "I/N with I from 0 to N-1, as 0/4")
    return Shard(index=int(index), count=int(count))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One suite on one model. ``seeds(purpose, index)`` gives the seed of a draw.

    ``model``: what identifies the weights and how they are computed. ``left_out``: problems whose prompt is too long or
    spells a control token, by reason.
    """

    suite: SuiteConfig
    prompts: Sequence[Prompt]
    template: str
    samples: int
    sampling: Sampling
    seed: int
    seeds: Callable[[str, int], int]
    model: Mapping[str, Any]
    chunk: int = CHUNK
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def chunks(self) -> range:
        return range((len(self.prompts) + self.chunk - 1) // self.chunk)

    def part(self, chunk: int) -> range:
        """Positions of the chunk's problems."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, len(self.prompts)))

    def identity(self) -> dict[str, Any]:
        """What decides every record, as plain data."""
        suite = {name: item for name, item in dataclasses.asdict(self.suite).items() if name not in _NOT_IDENTITY}
        suite["prompt"]["template"] = self.template
        del suite["template"]
        drawn = self.suite.kind == "generate"
        return {
            "format": FORMAT, "suite": suite, "data": data_hash(prompt.problem for prompt in self.prompts),
            "prompts": _hash([prompt.token_ids for prompt in self.prompts]), "model": dict(self.model),
            "sampling": dataclasses.asdict(self.sampling) if drawn else None,
            "samples": self.samples if drawn else 1, "seed": self.seed if drawn else 0, "chunk": self.chunk,
        }  # fmt: skip

    @property
    def folder_name(self) -> str:
        """The suite's name and the hash of the identity."""
        return f"{self.suite.name}-{_hash(self.identity())[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
