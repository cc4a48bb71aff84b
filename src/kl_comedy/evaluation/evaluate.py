"""Score a policy on held-out problems.

Records of an evaluation on disk: one file a chunk while it runs, one table when it is whole.

    FOLDER/  manifest.json  chunks/00000.jsonl ...  ->  items.jsonl  items.parquet  summary.json

A chunk's file is written beside and renamed, so a kill leaves whole chunks only, and whoever runs next goes on. Records
hold no times, so the same evaluation gives the same bytes.

What an evaluation of one suite is, as data: its identity names its folder, so it is resumed or found, never mixed.

    SuiteConfig + prompts + sampling -> Plan -> chunks of problems -> shard i of n takes the chunks i, i + n, ...

A chunk is drawn in one call with a seed of its own. So a completion depends on the plan only: not on what was drawn
before, on which process draws it, or on how many there are.

Suites by log-prob: the choices of each problem, which of them the model finds likeliest, and how often it is right.

problems with choices -> letters or texts -> tokens -> log-probs in nats -> picks -> accuracy with an interval

The records of a chunk of problems: completions drawn and judged, or the log-probs of choices compared.

An evaluation as an MLflow run: scores as metrics, identity as params, records as artifacts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kl_comedy.config import flatten
from kl_comedy.config.schema import SuiteConfig
from kl_comedy.data import data_hash
from kl_comedy.data.rows import LETTERS
from kl_comedy.errors import UserError, bad_value
from kl_comedy.evaluation.likelihood import ChoicePasses, Spelled, spell
from kl_comedy.evaluation.scores import SuiteScore, canonical
from kl_comedy.io import atomic_write, file_lock
from kl_comedy.records import Problem, Prompt, Rollout, Scored
from kl_comedy.rewards import RewardPool, RewardSum
from kl_comedy.rollouts import RolloutBackend, Sampling
from kl_comedy.tracking import provenance_tags
from kl_comedy.tracking.logger import RunLogger

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig
    from kl_comedy.models import LoadedModel


class Scorer(Protocol):
    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]: ...


class Result(Protocol):
    """What an evaluation on one set found, with or without completions."""

    @property
    def name(self) -> str: ...

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<set>/...``."""
        ...

    def line(self) -> str:
        """The few numbers worth watching."""
        ...


Measure = Callable[[Sequence[Scored]], Mapping[str, float]]
"""What else to say about completions: means by metric name, as in ``kl/exact_reverse_token``."""


@dataclass(frozen=True, kw_only=True)
class EvalSet:
    """A named set of prompts to evaluate on. ``scorer`` and ``sampling``: its own, where it has them (suites)."""

    name: str
    prompts: Sequence[Prompt]
    scorer: Scorer | None = None
    sampling: Sampling | None = None


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean reward over problems (each the mean of its samples) with a 95% normal interval over problems.

    ``measured``: what the measure says about the same completions; empty without one.
    """

    name: str
    problems: int
    samples: int
    reward: float
    half_width: float
    length: float
    truncated: float
    measured: Mapping[str, float]
    rows: tuple[Scored, ...]

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<set>/...``."""
        return {
            f"eval/{self.name}/reward": self.reward,
            f"eval/{self.name}/reward_half_width": self.half_width,
            f"eval/{self.name}/length": self.length,
            f"eval/{self.name}/truncated_share": self.truncated,
            **{f"eval/{self.name}/{name}": value for name, value in self.measured.items()},
        }

    def line(self) -> str:
        """The few numbers worth watching."""
        return f"reward {self.reward:.3f} ± {self.half_width:.3f} ({self.problems} problems, length {self.length:.1f})"


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean over problems and half of its 95% normal interval, 1.96 s / sqrt(problems)."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((x - mean) ** 2 for x in values) / max(n - 1, 1)
    return mean, 1.96 * math.sqrt(variance / n)


def evaluate(
    backend: RolloutBackend,
    scorer: Scorer,
    held_out: EvalSet,
    *,
    samples: int,
    sampling: Sampling,
    seed: int,
    measure: Measure | None = None,
) -> EvalResult:
    """Draw ``samples`` completions a problem, score and measure them. Depends on weights, prompts and seed only.

    ``scorer`` and ``sampling`` hold where the set has none of its own.
    """
    sampling = held_out.sampling or sampling
    rows = (held_out.scorer or scorer).score(
        backend.generate(held_out.prompts, group_size=samples, sampling=sampling, seed=seed)
    )
    n = len(held_out.prompts)
    means = [sum(row.reward.value for row in rows[i * samples : (i + 1) * samples]) / samples for i in range(n)]
    mean, half_width = mean_and_half_width(means)
    return EvalResult(
        name=held_out.name,
        problems=n,
        samples=samples,
        reward=mean,
        half_width=half_width,
        length=sum(len(row.rollout.completion_ids) for row in rows) / len(rows),
        truncated=sum(row.rollout.stop_reason == "length" for row in rows) / len(rows),
        measured=measure(rows) if measure else {},
        rows=tuple(rows),
    )


log = logging.getLogger("kl_comedy")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Records:
    """The folder of one suite's evaluation."""

    path: Path
    plan: Plan

    @property
    def items(self) -> Path:
        return self.path / "items.jsonl"

    @property
    def table(self) -> Path:
        return self.path / "items.parquet"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def chunk(self, number: int) -> Path:
        return self.path / "chunks" / f"{number:05d}.jsonl"

    def open(self) -> None:
        """Make the folder and say in it what it is of. Raises :class:`UserError` where it cannot be written."""
        try:
            (self.path / "chunks").mkdir(parents=True, exist_ok=True)
            atomic_write(self.path / "manifest.json", _json(self.plan.identity(), indent=1))
        except OSError as error:
            raise UserError(f"--out: cannot write {self.path}: {error.strerror or error}") from error

    @property
    def finished(self) -> bool:
        """Whether every record is there, in one file."""
        return self.items.is_file()

    def missing(self) -> list[int]:
        """Chunks without a whole file."""
        return [] if self.finished else [n for n in self.plan.chunks if not self._whole(n)]

    def write(self, number: int, rows: Sequence[Row]) -> None:
        atomic_write(self.chunk(number), b"".join(_json(row) for row in rows))

    def merge(self) -> bool:
        """Make one file of the chunks, once all are there; whether it is there. Any process may, several at a time."""
        with file_lock(self.path / ".lock"):
            if self.finished:
                return True
            if self.missing():
                return False
            atomic_write(self.items, b"".join(self.chunk(n).read_bytes() for n in self.plan.chunks))
        shutil.rmtree(self.path / "chunks", ignore_errors=True)
        return True

    def rows(self) -> list[Row]:
        """Every record, in the order of problems and samples."""
        return _parsed(self.items.read_bytes())

    def write_table(self) -> None:
        """The records as Parquet beside the JSON lines."""
        import pandas as pd

        draft = self.table.with_name(f".{self.table.name}")
        pd.DataFrame(self.rows()).to_parquet(draft, index=False)
        draft.replace(self.table)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        atomic_write(self.summary, _json(dict(summary), indent=1))

    def _whole(self, number: int) -> bool:
        """Whether a chunk's file holds what it must; one that does not is said and drawn again."""
        file = self.chunk(number)
        if not file.is_file():
            return False
        try:
            there = [row["index"] for row in _parsed(file.read_bytes())]
        except (ValueError, KeyError, TypeError):
            there = []
        per_problem = self.plan.samples if self.plan.suite.kind == "generate" else 1
        if there == [index for index in self.plan.part(number) for _ in range(per_problem)]:
            return True
        log.warning(f"{file} is damaged; its problems are evaluated again")
        return False


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, allow_nan=False, indent=indent).encode("ascii") + b"\n"


def _parsed(content: bytes) -> list[Row]:
    return [json.loads(line) for line in content.splitlines()]


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
            "format": FORMAT,
            "suite": suite,
            "data": data_hash(prompt.problem for prompt in self.prompts),
            "prompts": _hash([prompt.token_ids for prompt in self.prompts]),
            "model": dict(self.model),
            "sampling": dataclasses.asdict(self.sampling) if drawn else None,
            "samples": self.samples if drawn else 1,
            "seed": self.seed if drawn else 0,
            "chunk": self.chunk,
        }

    @property
    def folder_name(self) -> str:
        """The suite's name and the hash of the identity."""
        return f"{self.suite.name}-{_hash(self.identity())[:12]}"


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class ChoiceSet:
    """Problems of a suite, asked: ``texts`` are what is compared after each prompt, ``spelled`` their tokens."""

    name: str
    prompts: Sequence[Prompt]
    texts: Sequence[Sequence[str]]
    spelled: Spelled


def ask(suite: SuiteConfig, prompts: Sequence[Prompt], loaded: LoadedModel, *, template: str) -> ChoiceSet:
    """The choices of each prompt as ``suite`` spells them. ``template``: ``plain`` or ``chat``, as the prompts are.

    Raises :class:`~kl_comedy.errors.UserError` as :func:`~kl_comedy.evaluation.likelihood.spell` does.
    """
    texts = [_continuations(suite, prompt.problem.meta["choices"]) for prompt in prompts]
    spelled = spell(
        loaded, prompts, [[suite.delimiter + text for text in row] for row in texts], special=template == "plain"
    )
    return ChoiceSet(name=suite.name, prompts=prompts, texts=texts, spelled=spelled)


def _continuations(suite: SuiteConfig, choices: Sequence[str]) -> list[str]:
    return list(choices) if suite.score == "texts" else list(LETTERS[: len(choices)])


def compared(asked: ChoiceSet, logps: Sequence[Sequence[float]], *, first: int = 0) -> list[Row]:
    """A record for each problem, from the log-probs of its choices; ``first``: the position of the first problem."""
    return [
        _record(first + place, prompt.problem, texts, row, prompt.text)
        for place, (prompt, texts, row) in enumerate(zip(asked.prompts, asked.texts, logps, strict=True))
    ]


def _record(index: int, problem: Problem, texts: Sequence[str], logps: Sequence[float], prompt: str) -> Row:
    """The likeliest choice, by log-prob and by log-prob per character; the first of equals."""
    per_character = [logp / len(text) for logp, text in zip(logps, texts, strict=True)]
    picked, picked_norm = (LETTERS[max(range(len(row)), key=row.__getitem__)] for row in (logps, per_character))
    return {
        "index": index,
        "id": problem.id,
        "gold": problem.answer,
        "picked": picked,
        "picked_norm": picked_norm,
        "correct": picked == problem.answer,
        "correct_norm": picked_norm == problem.answer,
        "logps": list(logps),
        "prompt": prompt,
    }


@dataclass(frozen=True, kw_only=True)
class ChoiceResult:
    """Share of problems whose right choice is the likeliest, by log-prob and per character, with 95% normal intervals.

    There are no completions, so neither reward nor length. ``rows``: a record for each problem.
    """

    name: str
    accuracy: float
    half_width: float
    accuracy_norm: float
    half_width_norm: float
    rows: tuple[Row, ...]

    def metrics(self) -> dict[str, float]:
        """Under ``eval/<suite>/...``."""
        return {
            f"eval/{self.name}/accuracy": self.accuracy,
            f"eval/{self.name}/accuracy_half_width": self.half_width,
            f"eval/{self.name}/accuracy_norm": self.accuracy_norm,
            f"eval/{self.name}/accuracy_norm_half_width": self.half_width_norm,
        }

    def line(self) -> str:
        """The few numbers worth watching."""
        return f"accuracy {self.accuracy:.3f} ± {self.half_width:.3f} ({len(self.rows)} problems, by log-prob)"


def compare(passes: ChoicePasses, asked: ChoiceSet) -> ChoiceResult:
    """Evaluate ``asked``, batched as ``kl-comedy evaluate`` does in its chunks: the same weights, the same bits."""
    rows = compared(asked, passes(asked.spelled, chunk=CHUNK))
    accuracy, half_width = _share(rows, "correct")
    accuracy_norm, half_width_norm = _share(rows, "correct_norm")
    return ChoiceResult(
        name=asked.name,
        accuracy=accuracy,
        half_width=half_width,
        accuracy_norm=accuracy_norm,
        half_width_norm=half_width_norm,
        rows=tuple(rows),
    )


def _share(rows: Sequence[Row], field: str) -> tuple[float, float]:
    return mean_and_half_width([float(row[field]) for row in rows])


GOLDS_CHECKED = 256
"""Answers that the verifier must be able to judge before anything is drawn: evenly spaced, a few seconds."""


class Drawer(Protocol):
    def __call__(self, chunk: int) -> list[Row]:
        """The records of a chunk's problems, in order."""
        ...


def run_chunks(records: Records, drawer: Drawer, shard: Shard, advance: Callable[[int], None]) -> int:
    """Draw and write the shard's chunks that are missing; ``advance(problems)`` after each. How many there were."""
    todo = [chunk for chunk in records.missing() if shard.takes(chunk)]
    for chunk in todo:
        records.write(chunk, drawer(chunk))
        advance(len(records.plan.part(chunk)))
    return len(todo)


@contextmanager
def generating(plan: Plan, backend: RolloutBackend, pool: RewardPool | None = None) -> Iterator[Drawer]:
    """A drawer for suites of kind ``generate``.

    Raises :class:`~kl_comedy.errors.UserError` where the verifier cannot judge the gold answers.
    """
    suite = plan.suite
    with RewardSum([suite.reward], pool=pool) as scorer:
        problems = [prompt.problem for prompt in plan.prompts]
        scorer.check(problems[:: max(len(problems) // GOLDS_CHECKED, 1)])

        def draw(chunk: int) -> list[Row]:
            part = plan.part(chunk)
            rollouts = backend.generate(
                plan.prompts[part.start : part.stop],
                group_size=plan.samples,
                sampling=plan.sampling,
                seed=plan.seeds(f"suite/{suite.name}", chunk),
            )
            places = [(index, sample) for index in part for sample in range(plan.samples)]
            return [
                _record_drawing(plan, index, sample, scored)
                for (index, sample), scored in zip(places, scorer.score(rollouts), strict=True)
            ]

        yield draw


def _record_drawing(plan: Plan, index: int, sample: int, scored: Scored) -> Row:
    rollout, reward = scored.rollout, scored.reward
    problem = rollout.prompt.problem
    return {
        "index": index,
        "id": problem.id,
        "sample": sample,
        "gold": problem.answer,
        "correct": reward.value >= plan.suite.solved_at,
        "reward": reward.value,
        "status": reward.status,
        "answer": canonical(rollout.text, plan.suite.answer, problem.meta.get("choices", ())),
        "tokens": len(rollout.completion_ids),
        "stop_reason": rollout.stop_reason,
        "prompt": rollout.prompt.text,
        "completion": rollout.text,
    }


def likelihood_drawer(plan: Plan, passes: ChoicePasses) -> Drawer:
    """A drawer for suites of kind ``likelihood``."""

    def draw(chunk: int) -> list[Row]:
        part = plan.part(chunk)
        prompts = plan.prompts[part.start : part.stop]
        asked = ask(plan.suite, prompts, passes.loaded, template=plan.template)
        return compared(asked, passes(asked.spelled), first=part.start)

    return draw


EXPERIMENT = "evaluations"
"""Joined to the experiment's name: an evaluation is no training run, and tables of runs do not hold it."""


def track(
    records: Records, score: SuiteScore, config: TrackingConfig, *, tags: Mapping[str, str], step: int
) -> str | None:
    """Log a finished evaluation, its records included. The MLflow run's id; None where the store is off or down.

    The folder holds a spool as a run's does: ``kl-comedy results sync FOLDER`` uploads what a store missed.
    """
    plan = records.plan
    tracker = RunLogger.start(
        replace(config, experiment=f"{config.experiment}-{EXPERIMENT}"),
        run_dir=records.path,
        run_name=records.path.name,
        params=flatten(plan.identity()),
        tags={**provenance_tags(), "kind": "evaluation", "suite": plan.suite.name, **tags},
    )
    tracker.log_metrics(score.metrics(), step=step)
    for file in (records.items, records.table, records.summary):
        tracker.log_artifact(file, folder="records")
    tracker.finish()
    return tracker.run_id
