"""Recorded rollouts: writing them batch by batch, reading them back, and the ``replay`` backend that trains on them.

    <folder>/batch-00000000.jsonl   one completion a line, the groups of a batch one after the other
    <folder>/batch-00000001.jsonl   ... or .parquet, the same columns

A part is written under another name and renamed, so a kill leaves whole parts only. Parts concatenated into one file
are a recording too (``cat batch-*.jsonl > all.jsonl``). Every row is checked when a recording is opened.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config.validate import option, parse_record
from kl_comedy.errors import RunFailed, UserError, bad_value, error_prefix
from kl_comedy.io import atomic_write, check_tree, decode_json, encode_json, open_file
from kl_comedy.models import LoadedModel
from kl_comedy.records import (
    FOREIGN_VERSION,
    STATUSES,
    STOP_REASONS,
    Capabilities,
    Prompt,
    Reward,
    Rollout,
    Scored,
)
from kl_comedy.registry import ROLLOUTS
from kl_comedy.rollouts.hf import HFRollouts

if TYPE_CHECKING:
    from kl_comedy.config.schema import RolloutConfig

KEY = "rollout.options.path"
FORMATS = ("jsonl", "parquet")
LOGP_SLACK = 1e-4
"""Nats above 0 that rounding may leave on the log-prob of a certain token."""

Row = tuple[str, Mapping[str, Any]]
"""File and line for messages, and the row."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(fits, value))


def _is_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


FIELDS: Mapping[str, tuple[str, str, Callable[[Any], bool]]] = {
    "batch": ("the number of its batch, counted from 0", "int", _is_count),
    "group": ("the number of its group within the batch", "int", _is_count),
    "problem": ("the problem's id", "text", _is_text),
    "prompt_ids": ("token ids of the prompt", "ints", _list_of(_is_count)),
    "completion_ids": ("token ids of the completion, the end token included", "ints", _list_of(_is_count)),
    "logps": (
        "the sampler's log-prob (nats) of each of them, at `temperature`",
        "floats",
        _list_of(lambda value: _is_number(value) and value <= LOGP_SLACK),
    ),
    "versions": (
        "the version of the weights that drew each of them; -1: of another run",
        "ints",
        _list_of(lambda value: type(value) is int and value >= FOREIGN_VERSION),
    ),
    "stop_reason": ("eos, stop or length", "text", STOP_REASONS.__contains__),
    "text": ("the completion decoded, without special tokens", "text", _is_text),
    "reward": ("the weighted reward", "float", _is_number),
    "status": ("of the verifier", "text", STATUSES.__contains__),
    "parts": ("each reward before its weight", "parts", _is_parts),
    "temperature": ("of sampling", "float", lambda value: _is_number(value) and value > 0),
}
"""Columns of a recording, in order: meaning, kind, and the check of a value."""


def to_row(batch: int, scored: Scored, *, temperature: float) -> dict[str, Any]:
    """A rollout and its reward as the plain data of one row."""
    rollout, reward = scored.rollout, scored.reward
    return {
        "batch": batch,
        "group": rollout.group_id,
        "problem": rollout.prompt.problem.id,
        "prompt_ids": list(rollout.prompt.token_ids),
        "completion_ids": list(rollout.completion_ids),
        "logps": list(rollout.logps),
        "versions": list(rollout.versions),
        "stop_reason": rollout.stop_reason,
        "text": rollout.text,
        "reward": reward.value,
        "status": reward.status,
        "parts": dict(reward.parts),
        "temperature": temperature,
    }


def from_row(row: Mapping[str, Any], prompt: Prompt) -> Scored:
    """The inverse, but for the versions: they count another run's updates, so all become :data:`FOREIGN_VERSION`."""
    rollout = Rollout(
        prompt=prompt,
        group_id=row["group"],
        completion_ids=tuple(row["completion_ids"]),
        logps=tuple(row["logps"]),
        versions=(FOREIGN_VERSION,) * len(row["completion_ids"]),
        stop_reason=row["stop_reason"],
        text=row["text"],
    )
    return Scored(rollout=rollout, reward=Reward(value=row["reward"], status=row["status"], parts=dict(row["parts"])))


class RecordingWriter:
    """Writes the batches of one run, each once or again: a resumed run replaces what it draws anew."""

    def __init__(self, folder: Path, format: str, *, temperature: float) -> None:
        self._folder, self._format, self._temperature = folder, format, temperature

    def write(self, batch: int, rows: Sequence[Scored]) -> None:
        """Write one batch whole. Raises :class:`RunFailed` where the disk refuses."""
        plain = [to_row(batch, row, temperature=self._temperature) for row in rows]
        try:
            content = _jsonl_bytes(plain) if self._format == "jsonl" else _parquet_bytes(plain)
            atomic_write(self._folder / f"batch-{batch:08d}.{self._format}", content)
        except OSError as error:
            what = f"the rollouts of batch {batch} cannot be written to {self._folder}"
            raise RunFailed(f"{what} ({error.strerror or error})") from error

    def remove_from(self, batch: int) -> None:
        """Remove batches from this one on: what a run drew after the checkpoint from which it resumes."""
        for part in self._folder.glob(f"batch-*.{self._format}"):
            number = part.stem.removeprefix("batch-")
            if number.isdecimal() and int(number) >= batch:
                part.unlink()


def _jsonl_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(map(encode_json, rows))


def _parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    types = {
        "int": pa.int64(),
        "ints": pa.list_(pa.int64()),
        "float": pa.float64(),
        "floats": pa.list_(pa.float64()),
        "text": pa.string(),
        "parts": pa.map_(pa.string(), pa.float64()),
    }
    schema = pa.schema([(name, types[kind]) for name, (_, kind, _) in FIELDS.items()])
    columns = [{**row, "parts": list(row["parts"].items())} for row in rows]
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(columns, schema=schema)
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    return buffer.getvalue()


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raise :class:`UserError` for the first thing that makes a row unusable, naming ``place`` and the field."""
    for name, (meaning, _, fits) in FIELDS.items():
        if row.get(name) is None:
            raise UserError(f"{place}: {name} is missing ({meaning}); a run records it with train.record_rollouts")
        if not fits(row[name]):
            raise UserError(f"{place}: {name} is not {meaning}: {str(row[name])[:60]}")
    tokens = len(row["completion_ids"])
    for name in ("logps", "versions"):
        if len(row[name]) != tokens:
            raise UserError(f"{place}: {name} has {len(row[name])} numbers for the {tokens} tokens of completion_ids")


class Recording:
    """Batches of recorded rollouts, read one at a time. Opening reads everything once and checks every row.

    ``check`` gets each whole batch, and may raise.
    """

    def __init__(self, path: Path, *, check: Callable[[Sequence[Row]], None]) -> None:
        self._batches: list[tuple[Path, int, int]] = []
        """Of each batch: its file, where its first row begins there (see :func:`_rows`), and its number of rows."""
        rows = ((file, *row) for file in _files(path) for row in _rows(file, 0))
        previous: int | None = None
        for number, group in itertools.groupby(rows, key=lambda item: item[3].get("batch")):
            batch: list[Row] = []
            for file, start, place, row in group:
                check_row(row, place)
                if not batch:
                    first_file, first_start = file, start
                elif file != first_file:
                    raise UserError(f"{place}: batch {number} began in {first_file.name}; keep a batch in one file")
                batch.append((place, row))
            if previous is not None and number != previous + 1:
                wrong = f"batch {number} comes after batch {previous}"
                raise UserError(f"{batch[0][0]}: {wrong}; a recording holds every batch, in order")
            check(batch)
            self._batches.append((first_file, first_start, len(batch)))
            previous = number
        if not self._batches:
            raise UserError(f"{KEY}: {path} holds no rollouts")

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, batch: int) -> list[Mapping[str, Any]]:
        """The rows of one batch, by its position. Raises :class:`RunFailed` where they have changed since."""
        file, start, count = self._batches[batch]
        rows = []
        try:
            for _, place, row in itertools.islice(_rows(file, start), count):
                check_row(row, place)
                rows.append(row)
        except (UserError, OSError, ValueError) as error:
            raise RunFailed(f"{KEY}: batch {batch} of the recording cannot be read any more: {error}") from error
        if len(rows) != count:
            raise RunFailed(f"{KEY}: {file} has changed since this run began")
        return rows


def _files(path: Path) -> list[Path]:
    """The parts of a folder, in order, or the one file."""
    if path.is_dir():
        files = sorted(file for format in FORMATS for file in path.glob(f"batch-*.{format}"))
        if not files:
            written = "(train.record_rollouts writes them)"
            raise UserError(f"{KEY}: {path} holds no batch-*.jsonl or batch-*.parquet {written}")
        if len({file.suffix for file in files}) > 1:
            raise UserError(f"{KEY}: {path} holds both JSONL and Parquet parts; keep one kind")
        with error_prefix(KEY):
            check_tree(path, [file.name for file in files])
        return files
    if not path.is_file():
        raise UserError(f"{KEY}: no such file or folder: {path}")
    if path.suffix.removeprefix(".") not in FORMATS:
        raise bad_value(KEY, str(path), "a folder of parts, a .jsonl or a .parquet file")
    return [path]


def _rows(file: Path, start: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Rows from ``start`` on: where each begins (byte of a JSONL file, row of a Parquet file), its name, the row."""
    if file.suffix == ".parquet":
        for number, row in _parquet_rows(file, start):
            if isinstance(row.get("parts"), list):
                row["parts"] = dict(row["parts"])
            yield number, f"{KEY}: {file}, row {number + 1}", row
        return
    with open(open_file(file), "rb") as lines:
        lines.seek(start)
        suffix = f" after byte {start}" if start else ""
        for number, line in enumerate(lines, 1):
            place = f"{KEY}: {file}, row {number}{suffix}"
            try:
                row = decode_json(line)
            except ValueError as error:
                raise UserError(f"{place}: no readable row ({error})") from error
            yield start, place, row
            start += len(line)


def _parquet_rows(file: Path, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:
            number = 0
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                if number + rows > start:
                    first = max(start - number, 0)
                    yield from enumerate(table.read_row_group(group).slice(first).to_pylist(), number + first)
                number += rows
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{KEY}: {file} is not a readable Parquet file: {reason}") from error


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    path: str = option(MISSING, "what is replayed: a folder of parts, a .jsonl or a .parquet file")
    rewards: str = option(
        "recorded", "as they were judged then, or judged anew by this run's `rewards`", choices=("recorded", "again")
    )
    repeat: bool = option(False, "start over after the last batch")


@ROLLOUTS.register(
    "replay",
    source="rollouts that a run recorded",
    summary="Batches recorded by another run.",
    capabilities=Capabilities(recorded=True, draws_parts=True),
    options=ReplayOptions,
)
def build_replay(config: RolloutConfig, *, loaded: LoadedModel) -> ReplayRollouts:
    """Build the backend. Raises :class:`UserError` for an unknown or missing option, or a wrong value."""
    options = parse_record(ReplayOptions, config.options, key="rollout.options")
    return ReplayRollouts(config, options, loaded=loaded)


class ReplayRollouts:
    """A backend whose training batches come from a recording, the same for every configuration.

    The recorded log-probs must be of the tokens that the learner sees, so tokenizer, prompts, temperature, groups and
    rewards are checked before a run begins. ``generate`` (evaluation) samples afresh, as the ``hf`` backend does.
    """

    def __init__(self, config: RolloutConfig, options: ReplayOptions, *, loaded: LoadedModel) -> None:
        self._config, self._options, self._loaded = config, options, loaded
        self._sampler = HFRollouts(loaded, batch_sequences=config.batch_sequences)
        self.generate, self.generate_part = self._sampler.generate, self._sampler.generate_part
        self.update_weights, self.close = self._sampler.update_weights, self._sampler.close
        self._recording: Recording | None = None
        self._prompts: Mapping[str, Prompt] = {}
        self.judges_again = options.rewards == "again"

    @property
    def version(self) -> int:
        """Of the weights that evaluation samples from."""
        return self._sampler.version

    def bind(self, prompts: Sequence[Prompt], *, weights: Mapping[str, float], updates: int, per_batch: int) -> None:
        """Open the recording and check it against this run, before anything is trained.

        ``weights`` are those of the run's rewards by label; the run makes ``updates`` updates, ``per_batch`` of them
        from each batch. Raises :class:`UserError` for the first thing that does not fit.
        """
        self._prompts = {prompt.problem.id: prompt for prompt in prompts}

        def check(batch: Sequence[Row]) -> None:
            self._check_groups(batch)
            self._check_tokens(batch)
            if not self.judges_again:
                _check_rewards(batch, weights)

        self._recording = Recording(Path(self._options.path), check=check)
        batches = len(self._recording)
        if batches * per_batch < updates and not self._options.repeat:
            why = f"the recording holds {batches} batches, and {per_batch} updates are made from each; "
            why += "rollout.options.repeat=true goes through it again"
            raise bad_value("train.steps", updates, f"at most {batches * per_batch}", why)

    def batch(self, number: int) -> list[Scored]:
        """The rows of one batch with their recorded rewards; the first again after the last."""
        if self._recording is None:
            raise RuntimeError("a replay is bound to the run's prompts before batches are read")
        rows = self._recording.read(number % len(self._recording))
        return [from_row(row, self._prompts[row["problem"]]) for row in rows]

    def _check_groups(self, batch: Sequence[Row]) -> None:
        """``prompts_per_batch`` groups, one after the other, of ``group_size`` completions of one problem."""
        prompts, size = self._config.prompts_per_batch, self._config.group_size
        place, first = batch[0]
        if len(batch) != prompts * size:
            sizes = {row["group"] for _, row in batch}
            raise UserError(
                f"{place}: batch {first['batch']} holds {len(batch)} completions in {len(sizes)} groups, and "
                f"rollout.prompts_per_batch {prompts} x rollout.group_size {size} is {prompts * size}"
            )
        for n, (place, row) in enumerate(batch):
            group, problem = n // size, batch[n - n % size][1]["problem"]
            if row["group"] != group or row["problem"] != problem:
                raise UserError(
                    f"{place}: completion {n} of batch {row['batch']} is of group {row['group']}, problem "
                    f"{row['problem']!r}; expected group {group}, problem {problem!r} (groups of rollout.group_size "
                    f"{size}, one after the other)"
                )
            if row["temperature"] != self._config.temperature:
                why = f"{place}: the recorded log-probs are at that temperature"
                raise bad_value("rollout.temperature", self._config.temperature, f"{row['temperature']}", why)

    def _check_tokens(self, batch: Sequence[Row]) -> None:
        """Prompts and completions are what this tokenizer, template and data make of them."""
        tokenizer = self._loaded.tokenizer
        entries = int(self._loaded.causal.config.get_text_config().vocab_size)
        for place, row in batch:
            prompt = self._prompts.get(row["problem"])
            if prompt is None:
                raise UserError(f"{place}: data.train has no problem {row['problem']!r}, which the recording asks")
            if tuple(row["prompt_ids"]) != prompt.token_ids:
                raise UserError(
                    f"{place}: the prompt of {row['problem']!r} has other token ids than this config gives it: "
                    "recorded with another tokenizer (model.source), template (data.prompt) or data (data.train)"
                )
            ids = row["completion_ids"]
            if max(ids) >= entries:
                raise UserError(f"{place}: token id {max(ids)}, and the model's vocabulary has {entries} entries")
            if tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) != row["text"]:
                raise UserError(
                    f"{place}: this tokenizer does not decode completion_ids to the recorded text; the recording was "
                    "made with another one (model.source, model.tokenizer)"
                )


def _check_rewards(batch: Sequence[Row], weights: Mapping[str, float]) -> None:
    """The recorded rewards are the weighted sum that this config's ``rewards`` describe."""
    for place, row in batch:
        parts: Mapping[str, Any] = row["parts"]
        names = sorted(name for name in parts if "/" not in name)
        hint = "rollout.options.rewards=again judges the recorded texts anew"
        if names != sorted(weights):
            raise UserError(
                f"{place}: judged by {', '.join(names) or '?'}, and rewards says {', '.join(weights)}; {hint}"
            )
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        if not math.isclose(total, row["reward"], rel_tol=1e-9, abs_tol=1e-9):
            raise UserError(
                f"{place}: reward is {row['reward']}, and its parts under the weights of rewards sum to {total}; {hint}"
            )
