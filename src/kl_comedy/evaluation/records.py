"""One suite on one model, in resumable chunks of problems, with every record on disk.

    SuitePlan -> chunks -> FOLDER/  manifest.json  chunks/00000.jsonl ...  ->  items.jsonl  items.parquet  summary.json

The plan's identity names the folder, so an evaluation is resumed and never mixed with another. Each chunk has a random
seed of its own and its file is written atomically: a record depends on the plan only, not on the process that computes
it, and an interrupted evaluation ends in the same bytes. Shard i of n takes the chunks i, i + n, ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config import flatten
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import UserError, bad_value
from kl_comedy.evaluation.evaluate import CHUNK
from kl_comedy.evaluation.likelihood import ChoiceScorer, tokenize_choices
from kl_comedy.evaluation.scores import EvalResult, canonical
from kl_comedy.io import atomic_write, file_lock
from kl_comedy.records import Problem, Prompt, Scored
from kl_comedy.rewards import RewardSum
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.tracking import provenance_tags
from kl_comedy.tracking.logger import RunLogger

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

log = logging.getLogger("kl_comedy")
Record = dict[str, Any]
ChunkEvaluator = Callable[[int], list[Record]]
"""Returns the records of a chunk's problems, in order."""

FORMAT = 1
"""Version of the records."""
_NOT_IDENTITY = ("name", "summary", "source", "licence", "group", "data", "file", "where", "items", "template")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """This process's part of the chunks."""

    index: int = 0
    count: int = 1

    def takes(self, chunk: int) -> bool:
        return chunk % self.count == self.index


def parse_shard(text: str | None) -> Shard:
    """``I/N`` with 0 <= I < N. None: this process's rank in the variables of torchrun or srun, else everything.

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
class SuitePlan:
    """One suite on one model. ``seeds(purpose, index)`` returns the seed of a chunk.

    ``model``: what identifies the weights and how they are computed. ``left_out``: how many problems have a prompt
    that is too long or holds a control token.
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
    def generates(self) -> bool:
        return self.suite.kind == "generate"

    @property
    def chunks(self) -> range:
        return range((len(self.prompts) + self.chunk - 1) // self.chunk)

    def problems_of(self, chunk: int) -> range:
        """Positions of the chunk's problems."""
        return range(chunk * self.chunk, min((chunk + 1) * self.chunk, len(self.prompts)))

    def prompts_of(self, chunk: int) -> Sequence[Prompt]:
        return self.prompts[chunk * self.chunk : (chunk + 1) * self.chunk]

    def identity(self) -> dict[str, Any]:
        """Everything that the records depend on, as plain data."""
        suite = {name: item for name, item in dataclasses.asdict(self.suite).items() if name not in _NOT_IDENTITY}
        suite["prompt"]["template"] = self.template
        return {
            "format": FORMAT,
            "suite": suite,
            "data": data_hash(prompt.problem for prompt in self.prompts),
            "prompts": _hash([prompt.token_ids for prompt in self.prompts]),
            "model": dict(self.model),
            "sampling": dataclasses.asdict(self.sampling) if self.generates else None,
            "samples": self.samples if self.generates else 1,
            "seed": self.seed if self.generates else 0,
            "chunk": self.chunk,
        }

    @property
    def folder_name(self) -> str:
        """The suite's name and the hash of the identity."""
        return f"{self.suite.name}-{_hash(self.identity())[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, allow_nan=False, indent=indent).encode("ascii") + b"\n"


def _parse(content: bytes) -> list[Record]:
    return [json.loads(line) for line in content.splitlines()]


@dataclass(frozen=True, kw_only=True)
class SuiteRecords:
    """The folder of one suite's evaluation."""

    path: Path
    plan: SuitePlan

    @property
    def items(self) -> Path:
        """Every record, as JSON lines; present once all chunks are."""
        return self.path / "items.jsonl"

    @property
    def table(self) -> Path:
        return self.path / "items.parquet"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def create(self) -> None:
        """Make the folder and its manifest. Raises :class:`UserError` where it cannot be written."""
        try:
            (self.path / "chunks").mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / "manifest.json", _json(self.plan.identity(), indent=1))
        except OSError as error:
            raise UserError(f"--out: cannot write {self.path}: {error.strerror or error}") from error

    def missing(self) -> list[int]:
        """Chunks without a complete file."""
        return [] if self.items.is_file() else [chunk for chunk in self.plan.chunks if not self._is_complete(chunk)]

    def evaluate(self, evaluator: ChunkEvaluator, shard: Shard, advance: Callable[[int], None]) -> None:
        """Evaluate and write the shard's missing chunks; ``advance(problems)`` is called after each."""
        for chunk in filter(shard.takes, self.missing()):
            atomic_write(self._file(chunk), b"".join(map(_json, evaluator(chunk))))
            advance(len(self.plan.problems_of(chunk)))

    def merge(self) -> bool:
        """Join the chunks in one file; False while chunks are missing. Several processes may call it at a time."""
        with file_lock(self.path / ".lock"):
            if self.items.is_file():
                return True
            if self.missing():
                return False
            atomic_write(self.items, b"".join(self._file(chunk).read_bytes() for chunk in self.plan.chunks))
        shutil.rmtree(self.path / "chunks", ignore_errors=True)
        return True

    def rows(self) -> list[Record]:
        """Every record, in the order of problems and samples."""
        return _parse(self.items.read_bytes())

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the scores, and the records as Parquet."""
        import pandas as pd

        draft = self.table.with_name(f".{self.table.name}")
        pd.DataFrame(self.rows()).to_parquet(draft, index=False)
        draft.replace(self.table)
        atomic_write(self.summary, _json(dict(summary), indent=1))

    def track(self, result: EvalResult, config: TrackingConfig, *, tags: Mapping[str, str], step: int) -> None:
        """Log the scores and the records to MLflow, once. The experiment has the suffix ``-evaluations``.

        The file ``tracked`` then holds the id of the MLflow run (None where the store is off or down; ``kl-comedy
        results sync FOLDER`` uploads the spool later).
        """
        marker = self.path / "tracked"
        if marker.exists():
            return
        tracker = RunLogger.start(
            dataclasses.replace(config, experiment=f"{config.experiment}-evaluations"),
            run_dir=self.path,
            run_name=self.path.name,
            params=flatten(self.plan.identity()),
            tags={**provenance_tags(), "kind": "evaluation", "suite": self.plan.suite.name, **tags},
        )
        tracker.log_metrics({f"eval/{result.name}/{key}": value for key, value in result.row().items()}, step=step)
        for file in (self.items, self.table, self.summary):
            tracker.log_artifact(file, folder="records")
        tracker.finish()
        marker.write_text(f"{tracker.run_id}\n")

    def _file(self, chunk: int) -> Path:
        return self.path / "chunks" / f"{chunk:05d}.jsonl"

    def _is_complete(self, chunk: int) -> bool:
        """Whether the chunk's file holds all its records; a damaged file is logged and evaluated again."""
        file = self._file(chunk)
        if not file.is_file():
            return False
        try:
            indices = [row["index"] for row in _parse(file.read_bytes())]
        except (ValueError, KeyError, TypeError):
            indices = []
        records_per_problem = self.plan.samples if self.plan.generates else 1
        if indices == [index for index in self.plan.problems_of(chunk) for _ in range(records_per_problem)]:
            return True
        log.warning(f"{file} is damaged; its problems are evaluated again")
        return False


GOLDS_CHECKED = 256
"""Gold answers, evenly spaced, that the verifier must be able to judge before anything is sampled."""


def check_golds(rewards: RewardSum, problems: Sequence[Problem]) -> None:
    """Raise :class:`UserError` where ``rewards`` cannot judge the gold answers of some of ``problems``."""
    rewards.check(problems[:: max(len(problems) // GOLDS_CHECKED, 1)])


@contextlib.contextmanager
def completion_evaluator(plan: SuitePlan, backend: RolloutBackend) -> Iterator[ChunkEvaluator]:
    """The evaluator of suites of kind ``generate``. Raises as :func:`check_golds` does."""
    with RewardSum([plan.suite.reward]) as scorer:
        check_golds(scorer, [prompt.problem for prompt in plan.prompts])

        def evaluate_chunk(chunk: int) -> list[Record]:
            rollouts = backend.generate(
                plan.prompts_of(chunk),
                group_size=plan.samples,
                sampling=plan.sampling,
                seed=plan.seeds(f"suite/{plan.suite.name}", chunk),
            )
            positions = [(index, sample) for index in plan.problems_of(chunk) for sample in range(plan.samples)]
            return [
                _completion_record(plan.suite, index, sample, scored)
                for (index, sample), scored in zip(positions, scorer.score(rollouts), strict=True)
            ]

        yield evaluate_chunk


def _completion_record(suite: SuiteConfig, index: int, sample: int, scored: Scored) -> Record:
    rollout, reward = scored.rollout, scored.reward
    problem = rollout.prompt.problem
    return {
        "index": index,
        "id": problem.id,
        "sample": sample,
        "gold": problem.answer,
        "correct": reward.value >= suite.solved_at,
        "reward": reward.value,
        "status": reward.status,
        "answer": canonical(rollout.text, suite.answer, problem.meta.get("choices", ())),
        "tokens": len(rollout.completion_ids),
        "stop_reason": rollout.stop_reason,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
    }


def choice_evaluator(plan: SuitePlan, scorer: ChoiceScorer) -> ChunkEvaluator:
    """The evaluator of suites of kind ``likelihood``."""

    def evaluate_chunk(chunk: int) -> list[Record]:
        choices = tokenize_choices(plan.suite, plan.prompts_of(chunk), scorer.loaded, template=plan.template)
        return choices.records(scorer.log_probs(choices), first=plan.problems_of(chunk).start)

    return evaluate_chunk
