"""One suite on one model, in resumable chunks of problems, with every record on disk.

    SuitePlan -> chunks -> FOLDER/  manifest.json  chunks/00000.jsonl ...  ->  items.jsonl  items.parquet  summary.json

The plan's identity names the folder, so an evaluation is resumed and never mixed with another. Each chunk has a random
seed of its own and its file is written atomically: a record depends on the plan only, not on the process that computes
it, and an interrupted evaluation ends in the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config import flatten
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.evaluation.evaluate import CHUNK
from kl_comedy.evaluation.likelihood import ChoiceScorer, tokenize_choices
from kl_comedy.evaluation.scores import EvalResult, canonical
from kl_comedy.io import atomic_write, check_tree, decode_json, file_lock, json_line, set_aside
from kl_comedy.records import Problem, Prompt, Scored
from kl_comedy.rewards import RewardSum
from kl_comedy.rewards.base import failed
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.tracking import provenance_tags

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

log = logging.getLogger("kl_comedy")
Record = dict[str, Any]
ChunkEvaluator = Callable[[int], list[Record]]
"""Returns the records of a chunk's problems, in order."""

FORMAT = 1
"""Version of the records."""
_NOT_IDENTITY = ("name", "summary", "source", "licence", "group", "data", "file", "where", "items", "template")
"""Fields of a suite that its records do not depend on, beyond the problems and prompts, which have hashes of their own.
Frozen: the identity names the folders of stored evaluations."""


@dataclass(frozen=True, kw_only=True)
class SuitePlan:
    """One suite on one model.

    ``seeds(purpose, index)`` returns the seed of a chunk; ``model`` identifies the weights and how they are computed;
    ``left_out`` counts problems whose prompt is too long or holds a control token.
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
        return range(math.ceil(len(self.prompts) / self.chunk))

    def problems_of(self, chunk: int) -> range:
        """Positions of the chunk's problems."""
        start = chunk * self.chunk
        stop = min(start + self.chunk, len(self.prompts))
        return range(start, stop)

    def prompts_of(self, chunk: int) -> Sequence[Prompt]:
        problems = self.problems_of(chunk)
        return self.prompts[problems.start : problems.stop]

    @property
    def records_per_problem(self) -> int:
        return self.samples if self.generates else 1

    def identity(self) -> dict[str, Any]:
        """Everything that the records depend on, as plain data. The folder's name is made of its hash."""
        # Text and source of a suite may be reworded without making its stored records another evaluation.
        suite = {name: value for name, value in dataclasses.asdict(self.suite).items() if name not in _NOT_IDENTITY}
        # The template that was chosen, where the suite says "auto".
        suite["prompt"]["template"] = self.template
        # Choices are compared without sampling, so its settings must not make another evaluation of it.
        sampling = dataclasses.asdict(self.sampling) if self.generates else None
        seed = self.seed if self.generates else 0
        return {
            "format": FORMAT,
            "suite": suite,
            "data": data_hash(prompt.problem for prompt in self.prompts),
            "prompts": _hash([prompt.token_ids for prompt in self.prompts]),
            "model": dict(self.model),
            "sampling": sampling,
            "samples": self.records_per_problem,
            "seed": seed,
            # Each chunk has a seed of its own, so their size decides which samples are drawn.
            "chunk": self.chunk,
        }

    @property
    def folder_name(self) -> str:
        """The suite's name and the hash of the identity."""
        return f"{self.suite.name}-{_hash(self.identity())[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, allow_nan=False, indent=indent) + "\n"


@dataclass(frozen=True, kw_only=True)
class SuiteRecords:
    """The folder of one suite's evaluation."""

    path: Path
    plan: SuitePlan

    @property
    def items(self) -> Path:
        """Every record, as JSON lines; present once all chunks are."""
        return self.path / "items.jsonl"

    def create(self) -> None:
        """Make the folder and its manifest.

        Raises :class:`UserError` where it cannot be written, and for a link in it that leads out of it.
        """
        # Somebody else may have prepared the folder: nothing is written through a link.
        check_tree(self.path, (".lock", "items.jsonl", "spool.jsonl", "tracking.json", "tracking.lock"), (".",))
        try:
            (self.path / "chunks").mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / "manifest.json", _json(self.plan.identity(), indent=1))
        except OSError as error:
            raise UserError(f"--out: cannot write {self.path}: {error.strerror or error}") from error

    def missing(self) -> list[int]:
        """Chunks without a complete file. A damaged file of all records is set aside, and its chunks are missing."""
        # Chunks are removed once they are joined, so a complete file of all records means that none is missing.
        if self.items.is_file():
            if self._holds(self.items, range(len(self.plan.prompts))):
                return []
            log.warning(f"{self.items} is damaged; its problems are evaluated again")
            # Another process may have been faster.
            with contextlib.suppress(FileNotFoundError):
                set_aside(self.items)
        return [chunk for chunk in self.plan.chunks if not self._is_complete(chunk)]

    def evaluate(self, evaluator: ChunkEvaluator, advance: Callable[[int], None]) -> None:
        """Evaluate and write the missing chunks; ``advance(problems)`` is called after each."""
        for chunk in self.missing():
            # The whole chunk before its file: a killed process leaves all of a chunk or nothing.
            lines = [json_line(record) for record in evaluator(chunk)]
            atomic_write(self._file(chunk), b"".join(lines))
            advance(len(self.plan.problems_of(chunk)))

    def merge(self) -> None:
        """Join the chunks in one file. Several processes may call it at once.

        Raises :class:`RunFailed` where a chunk is missing or damaged again, as on a failing disk.
        """
        # Under the lock: two that join at once would both read chunks that the first one removes.
        with file_lock(self.path / ".lock"):
            if self.items.is_file():
                return
            missing = self.missing()
            if missing:
                raise RunFailed(f"{self.path}: {len(missing)} chunks are missing or damaged; the same command resumes")
            chunks = [self._file(chunk).read_bytes() for chunk in self.plan.chunks]
            atomic_write(self.items, b"".join(chunks))
        shutil.rmtree(self.path / "chunks", ignore_errors=True)

    def rows(self) -> list[Record]:
        """Every record, in the order of problems and samples."""
        return [decode_json(line) for line in self.items.read_bytes().splitlines()]

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the scores, and the records as Parquet."""
        import pandas as pd

        # Renamed when complete: a reader must not find half a file.
        draft = self.path / ".items.parquet"
        pd.DataFrame(self.rows()).to_parquet(draft, index=False)
        draft.replace(self.path / "items.parquet")
        atomic_write(self.path / "summary.json", _json(dict(summary), indent=1))

    def track(self, result: EvalResult, config: TrackingConfig, *, tags: Mapping[str, str], step: int) -> None:
        """Log the scores and the records to MLflow, once; the experiment has the suffix ``-evaluations``.

        The file ``tracked`` then holds the id of the MLflow run (None where the store is off or down).
        """
        marker = self.path / "tracked"
        # Scores are the same at every call, and a store should have them once.
        if marker.exists():
            return
        # Imports Lightning, which takes seconds.
        from kl_comedy.tracking.logger import RunLogger

        tracker = RunLogger(
            dataclasses.replace(config, experiment=f"{config.experiment}-evaluations"),
            run_dir=self.path,
            params=flatten(self.plan.identity()),
            tags={**provenance_tags(), "kind": "evaluation", "suite": self.plan.suite.name, **tags},
        )
        tracker.log_metrics({f"eval/{result.name}/{key}": value for key, value in result.row().items()}, step=step)
        for name in ("items.jsonl", "items.parquet", "summary.json"):
            tracker.log_artifact(self.path / name, folder="records")
        tracker.finish()
        # Last: a call that is killed before is tracked again, which is better than never.
        marker.write_text(f"{tracker.run_id}\n")

    def _file(self, chunk: int) -> Path:
        return self.path / "chunks" / f"{chunk:05d}.jsonl"

    def _is_complete(self, chunk: int) -> bool:
        """Whether the chunk's file holds all its records; a damaged file is logged and evaluated again."""
        file = self._file(chunk)
        if not file.is_file():
            return False
        if self._holds(file, self.plan.problems_of(chunk)):
            return True
        log.warning(f"{file} is damaged; its problems are evaluated again")
        return False

    def _holds(self, file: Path, problems: Iterable[int]) -> bool:
        """Whether the file holds every record of these problems, undamaged."""
        expected = []
        for index in problems:
            expected.extend([index] * self.plan.records_per_problem)
        try:
            stored = [decode_json(line)["index"] for line in file.read_bytes().splitlines()]
        except (ValueError, KeyError):
            return False
        return stored == expected


def check_golds(rewards: RewardSum, problems: Sequence[Problem], count: int = 256) -> None:
    """Raise :class:`UserError` where ``rewards`` cannot judge the gold answers of ``count`` problems, evenly spaced."""
    # All of them would take minutes; sets are sorted by subject, so the first would be of one kind.
    step = max(len(problems) // count, 1)
    rewards.check(problems[::step])


@contextlib.contextmanager
def completion_evaluator(plan: SuitePlan, backend: RolloutBackend) -> Iterator[ChunkEvaluator]:
    """The evaluator of suites of kind ``generate``. Raises as :func:`check_golds` does."""
    with RewardSum([plan.suite.reward]) as scorer:
        # Before anything is sampled: a set with unreadable golds would cost the hours first.
        check_golds(scorer, [prompt.problem for prompt in plan.prompts])

        def evaluate_chunk(chunk: int) -> list[Record]:
            rollouts = backend.generate(
                plan.prompts_of(chunk),
                group_size=plan.samples,
                sampling=plan.sampling,
                seed=plan.seeds(f"suite/{plan.suite.name}", chunk),
            )
            positions = itertools.product(plan.problems_of(chunk), range(plan.samples))
            records = []
            for (index, sample), scored in zip(positions, scorer.score(rollouts), strict=True):
                records.append(_completion_record(plan.suite, index, sample, scored))
            return records

        yield evaluate_chunk


def _completion_record(suite: SuiteConfig, index: int, sample: int, scored: Scored) -> Record:
    rollout = scored.rollout
    reward = scored.reward
    problem = rollout.prompt.problem
    return {
        "index": index,
        "id": problem.id,
        "sample": sample,
        "gold": problem.answer,
        "correct": reward.value >= suite.solved_at,
        "reward": reward.value,
        "status": reward.status,
        "failed": failed(reward),
        "answer": canonical(rollout.text, suite.answer, problem.meta.get("choices", ())),
        "tokens": len(rollout.drawn_ids),
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
