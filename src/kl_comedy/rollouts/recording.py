"""Recorded rollouts: writing them batch by batch, reading them back, and the ``replay`` backend that trains on them.

    <folder>/batch-00000000.jsonl   one completion per line, the groups of a batch one after the other
    <folder>/batch-00000001.jsonl   ... or .parquet, with the same columns

A part is written under another name and then renamed, so that a killed run leaves whole parts only. Parts concatenated
into one file are a recording too (``cat batch-*.jsonl > all.jsonl``). Every row is checked when a recording is opened.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.config.validate import (
    Field,
    is_count,
    is_number,
    is_numbers_by_name,
    is_text,
    option,
    parse_record,
    record_fault,
)
from kl_comedy.errors import RunFailed, UserError, bad_value, error_prefix
from kl_comedy.io import atomic_write, check_tree, decode_json, json_line, open_file
from kl_comedy.models import LoadedModel
from kl_comedy.records import (
    FOREIGN_VERSION,
    GOLD,
    STATUSES,
    STOP_REASONS,
    Capabilities,
    Prompt,
    Reward,
    Rollout,
    Scored,
    turns_fault,
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
"""The place of a row for messages (file and line), and the row."""


def _is_logp(value: Any) -> bool:
    return is_number(value) and value <= LOGP_SLACK


def _is_version(value: Any) -> bool:
    return type(value) is int and value >= FOREIGN_VERSION


def _is_temperature(value: Any) -> bool:
    return is_number(value) and value > 0


def _is_flags(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is bool for item in value)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(is_count(item) for item in value)


def _is_lists_by_name(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return all(isinstance(items, list) and all(is_number(item) for item in items) for items in value.values())


def _is_restarts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(row, list) and len(row) > 1 and all(is_count(number) for number in row) for row in value)


def _list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for a list that is not empty, whose items all pass ``is_item``."""

    def is_list(value: Any) -> bool:
        if not isinstance(value, list) or not value:
            return False
        return all(is_item(item) for item in value)

    return is_list


COLUMNS: Mapping[str, Field] = {
    "batch": Field("the number of its batch, counted from 0", is_count, kind="int"),
    "group": Field("the number of its group within the batch", is_count, kind="int"),
    "problem": Field("the problem's id", is_text, kind="text"),
    "prompt_ids": Field("token ids of the prompt", _list_of(is_count), kind="ints"),
    "completion_ids": Field("token ids of the completion, the end token included", _list_of(is_count), kind="ints"),
    "logps": Field(
        "the sampler's log-prob (nats) of each token of the completion, at `temperature`",
        _list_of(_is_logp),
        kind="floats",
    ),
    "versions": Field(
        "the version of the weights that drew each token; -1: weights of another run",
        _list_of(_is_version),
        kind="ints",
    ),
    "stop_reason": Field("eos, stop, length or failed", STOP_REASONS.__contains__, kind="text"),
    "text": Field("the decoded completion, without special tokens", is_text, kind="text"),
    "reward": Field("the weighted reward", is_number, kind="float"),
    "status": Field(f"one of {', '.join(STATUSES)}", STATUSES.__contains__, kind="text"),
    "parts": Field("each reward before its weight", is_numbers_by_name, kind="parts"),
    "temperature": Field("the sampling temperature, above 0", _is_temperature, kind="float"),
    "trained": Field(
        "whether the policy drew each token, and not an environment; empty or missing where it drew all",
        _is_flags,
        required=False,
        kind="flags",
    ),
    "restarts": Field(
        "for each row after the first: the number of its first token, and the ids that it is read behind; "
        "empty or missing where a rollout is one row",
        _is_restarts,
        required=False,
        kind="lists",
    ),
    "turn_ends": Field(
        "the number of tokens up to the end of each of the policy's turns; empty or missing where there is one turn",
        _is_counts,
        required=False,
        kind="ints",
    ),
    "turn_parts": Field(
        "the parts of the reward that an environment gave, one number for each turn",
        _is_lists_by_name,
        required=False,
        kind="lists_by_name",
    ),
}
"""Columns of a recording by name. Their order is that of the stored Parquet files."""
MAPS = tuple(name for name, column in COLUMNS.items() if column.kind in ("parts", "lists_by_name"))
"""Columns that map names to numbers, or to lists of them."""


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
        "trained": list(rollout.trained),
        "restarts": [[start, *context] for start, context in rollout.restarts],
        "turn_ends": list(rollout.turn_ends),
        "turn_parts": {name: list(values) for name, values in rollout.turn_parts.items()},
    }


def from_row(row: Mapping[str, Any], prompt: Prompt) -> Scored:
    """The inverse of :func:`to_row`, except for versions.

    Versions count the updates of the run that recorded, so that all become :data:`FOREIGN_VERSION`.
    """
    rollout = Rollout(
        prompt=prompt,
        group_id=row["group"],
        completion_ids=tuple(row["completion_ids"]),
        logps=tuple(row["logps"]),
        versions=(FOREIGN_VERSION,) * len(row["completion_ids"]),
        stop_reason=row["stop_reason"],
        text=row["text"],
        trained=_trained(row),
        restarts=_restarts(row),
        turn_ends=tuple(row.get("turn_ends") or ()),
        turn_parts={name: tuple(values) for name, values in (row.get("turn_parts") or {}).items()},
    )
    reward = Reward(value=row["reward"], status=row["status"], parts=dict(row["parts"]))
    return Scored(rollout=rollout, reward=reward)


def _trained(row: Mapping[str, Any]) -> tuple[bool, ...]:
    """The column ``trained`` of a row, which may be missing."""
    return tuple(row.get("trained") or ())


def _restarts(row: Mapping[str, Any]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The column ``restarts`` of a row, which may be missing."""
    return tuple((start, tuple(context)) for start, *context in row.get("restarts") or ())


class RecordingWriter:
    """Writes the batches of one run. A resumed run draws some batches again and replaces their parts."""

    def __init__(self, folder: Path, format: str, *, temperature: float) -> None:
        self._folder = folder
        self._format = format
        self._temperature = temperature

    def write(self, batch: int, rows: Sequence[Scored]) -> None:
        """Write or replace the part of one batch. Raises :class:`RunFailed` where it cannot be written."""
        plain_rows = [to_row(batch, row, temperature=self._temperature) for row in rows]
        try:
            # One file for a batch: writing it again replaces it, and a reader finds a batch by one name.
            if self._format == "jsonl":
                content = _jsonl_bytes(plain_rows)
            else:
                content = _parquet_bytes(plain_rows)
            atomic_write(self._folder / f"batch-{batch:08d}.{self._format}", content)
        except OSError as error:
            message = f"the rollouts of batch {batch} cannot be written to {self._folder}"
            raise RunFailed(f"{message} ({error.strerror or error})") from error

    def remove_from(self, batch: int) -> None:
        """Remove ``batch`` and all later ones: what a run drew after the checkpoint from which it resumes."""
        for part in self._folder.glob(f"batch-*.{self._format}"):
            # A file of the user's may match the pattern too.
            number = part.stem.removeprefix("batch-")
            if number.isdecimal() and int(number) >= batch:
                part.unlink()


def _jsonl_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join(json_line(row) for row in rows)


def _parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    types = {
        "int": pa.int64(),
        "ints": pa.list_(pa.int64()),
        "flags": pa.list_(pa.bool_()),
        "lists": pa.list_(pa.list_(pa.int64())),
        "float": pa.float64(),
        "floats": pa.list_(pa.float64()),
        "text": pa.string(),
        "parts": pa.map_(pa.string(), pa.float64()),
        "lists_by_name": pa.map_(pa.string(), pa.list_(pa.float64())),
    }
    schema = pa.schema([(name, types[column.kind]) for name, column in COLUMNS.items()])
    # Arrow takes a map as its list of pairs.
    arrow_rows = [{**row, **{name: list(row[name].items()) for name in MAPS}} for row in rows]
    # With the schema: types that Arrow would infer depend on the rows, and an empty list has none.
    table = pa.Table.from_pylist(arrow_rows, schema=schema)
    buffer = io.BytesIO()
    # With checksums, because a damaged page can decode to other numbers without an error.
    pyarrow.parquet.write_table(table, buffer, write_page_checksum=True)
    return buffer.getvalue()


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Raise :class:`UserError` for the first thing that makes a row unusable, naming ``place`` and the field."""
    fault = record_fault(row, COLUMNS, others=True)
    if fault is not None:
        raise UserError(f"{place}: {fault}; a run records such rows with train.record_rollouts")
    # After the columns: each is a list now.
    tokens = len(row["completion_ids"])
    for name in ("logps", "versions"):
        if len(row[name]) != tokens:
            raise UserError(f"{place}: {name} has {len(row[name])} numbers for the {tokens} tokens of completion_ids")
    trained = _trained(row)
    if trained and len(trained) != tokens:
        raise UserError(f"{place}: trained has {len(trained)} entries for the {tokens} tokens of completion_ids")
    if trained and not any(trained):
        raise UserError(f"{place}: trained is false for every token: the policy drew none of them")
    if not all(trained) and not row.get("turn_ends"):
        raise UserError(f"{place}: turn_ends is missing: trained has a false, and nothing says where a turn ends")
    fault = turns_fault(row.get("turn_ends") or (), row.get("turn_parts") or {}, trained or (True,) * tokens)
    if fault:
        raise UserError(f"{place}: {fault}")
    starts = [start for start, _ in _restarts(row)]
    if starts != sorted(set(starts)) or not all(0 < start < tokens for start in starts):
        raise UserError(
            f"{place}: restarts begins rows at {starts}; expected ascending numbers of the {tokens} tokens after the "
            "first of completion_ids"
        )


@dataclass(frozen=True, kw_only=True)
class _StoredRow:
    """A row as it was read."""

    file: Path
    start: int
    """Where the row begins in ``file``: a byte of a JSONL file, a row number of a Parquet file."""
    place: str
    """File and row for messages."""
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _StoredBatch:
    """Where a batch is stored: its rows follow each other in one file."""

    file: Path
    start: int
    """As in :class:`_StoredRow`, of the first row."""
    rows: int


class Recording:
    """Batches of recorded rollouts, read one at a time. Opening reads everything once and checks every row.

    ``check`` gets each whole batch, and may raise. Raises :class:`UserError` for the first fault.
    """

    def __init__(self, path: Path, *, check: Callable[[Sequence[Row]], None]) -> None:
        # Only places are remembered: a recording may be larger than memory.
        self._batches: list[_StoredBatch] = []
        previous: int | None = None
        # Rows of a batch follow each other, so that one batch at a time is in memory.
        for number, batch_rows in itertools.groupby(_all_rows(path), key=lambda row: row.content.get("batch")):
            rows = _checked_rows(number, batch_rows)
            first = rows[0]
            # A gap is a lost file: the learner would replay another order of batches than the recording run had.
            if previous is not None and number != previous + 1:
                fault = f"batch {number} comes after batch {previous}"
                raise UserError(f"{first.place}: {fault}; a recording holds every batch, in order")
            # The caller's check needs whole groups, which are never larger than a batch.
            check([(row.place, row.content) for row in rows])
            self._batches.append(_StoredBatch(file=first.file, start=first.start, rows=len(rows)))
            previous = number
        if not self._batches:
            raise UserError(f"{KEY}: {path} holds no rollouts")

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, batch: int) -> list[Mapping[str, Any]]:
        """The rows of one batch, by its position. Raises :class:`RunFailed` where they have changed since."""
        stored = self._batches[batch]
        rows: list[Mapping[str, Any]] = []
        try:
            # From the place of the batch on: the rows before it are not read again.
            for row in itertools.islice(_rows(stored.file, stored.start), stored.rows):
                # Checked again: the file may have changed since it was opened.
                check_row(row.content, row.place)
                rows.append(row.content)
        except (UserError, OSError, ValueError) as error:
            raise RunFailed(f"{KEY}: batch {batch} of the recording cannot be read any more: {error}") from error
        if len(rows) != stored.rows:
            raise RunFailed(f"{KEY}: {stored.file} has changed since this run began")
        return rows


def _checked_rows(batch: Any, rows: Iterable[_StoredRow]) -> list[_StoredRow]:
    """The rows of one batch. Raises :class:`UserError` for an unusable row and for a batch in two files."""
    checked: list[_StoredRow] = []
    for row in rows:
        check_row(row.content, row.place)
        if checked and row.file != checked[0].file:
            first_name = checked[0].file.name
            raise UserError(f"{row.place}: batch {batch} began in {first_name}; keep a batch in one file")
        checked.append(row)
    return checked


def _all_rows(path: Path) -> Iterator[_StoredRow]:
    for file in _files(path):
        yield from _rows(file, 0)


def _files(path: Path) -> list[Path]:
    """The parts of a folder, in order, or the one file. Raises :class:`UserError` where ``path`` is neither."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{KEY}: no such file or folder: {path}")
        if path.suffix.removeprefix(".") not in FORMATS:
            raise bad_value(KEY, str(path), "a folder of parts, a .jsonl or a .parquet file")
        return [path]
    files: list[Path] = []
    for format in FORMATS:
        files += path.glob(f"batch-*.{format}")
    # Numbers in the names have eight digits, so that the order of the text is that of the batches.
    files.sort()
    if not files:
        raise UserError(f"{KEY}: {path} holds no batch-*.jsonl or batch-*.parquet (train.record_rollouts writes them)")
    # A batch may be there in both, and nothing says which of the two is newer.
    if len({file.suffix for file in files}) > 1:
        raise UserError(f"{KEY}: {path} holds both JSONL and Parquet parts; keep one kind")
    with error_prefix(KEY):
        check_tree(path, [file.name for file in files])
    return files


def _rows(file: Path, start: int) -> Iterator[_StoredRow]:
    """Rows from ``start`` on. Raises :class:`UserError` for what cannot be read as a row."""
    if file.suffix == ".parquet":
        return _parquet_rows(file, start)
    return _jsonl_rows(file, start)


def _jsonl_rows(file: Path, start: int) -> Iterator[_StoredRow]:
    # A batch that is read again begins at a byte, where the number of the line is not known.
    suffix = f" after byte {start}" if start else ""
    with open(open_file(file), "rb") as lines:
        lines.seek(start)
        for number, line in enumerate(lines, 1):
            place = f"{KEY}: {file}, row {number}{suffix}"
            try:
                content = decode_json(line)
            except ValueError as error:
                raise UserError(f"{place}: no readable row ({error})") from error
            yield _StoredRow(file=file, start=start, place=place, content=content)
            start += len(line)


def _parquet_rows(file: Path, start: int) -> Iterator[_StoredRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, page_checksum_verification=True) as table:
            group_start = 0
            for group in range(table.num_row_groups):
                group_rows = table.metadata.row_group(group).num_rows
                skipped = max(start - group_start, 0)
                # A row group is the least that Parquet can read; groups before the start are not read at all.
                if skipped < group_rows:
                    contents = table.read_row_group(group).slice(skipped).to_pylist()
                    for number, content in enumerate(contents, group_start + skipped):
                        yield _parquet_row(file, number, content)
                group_start += group_rows
    # A damaged file raises any of these, whichever of its bytes are wrong.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{KEY}: {file} is not a readable Parquet file: {reason}") from error


def _parquet_row(file: Path, number: int, content: dict[str, Any]) -> _StoredRow:
    # Arrow gives a map as its list of pairs.
    for name in MAPS:
        if isinstance(content.get(name), list):
            content[name] = dict(content[name])
    place = f"{KEY}: {file}, row {number + 1}"
    return _StoredRow(file=file, start=number, place=place, content=content)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """``rollout.options`` of the backend."""

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
        self._config = config
        self._options = options
        self._loaded = loaded
        self.judges_again = options.rewards == "again"
        # By problem id. bind sets it and the recording: prompts are known after the model is loaded.
        self._prompts: Mapping[str, Prompt] = {}
        self._recording: Recording | None = None
        # Evaluation cannot be replayed: the recording has no completions of the policy that is trained now.
        self._sampler = HFRollouts(loaded, batch_sequences=config.batch_sequences)
        self.generate = self._sampler.generate
        self.generate_part = self._sampler.generate_part
        self.update_weights = self._sampler.update_weights
        self.close = self._sampler.close

    @property
    def version(self) -> int:
        """Version of the weights that evaluation samples from."""
        return self._sampler.version

    def bind(
        self,
        prompts: Sequence[Prompt],
        *,
        weights: Mapping[str, float],
        has_gold: bool = False,
        updates: int,
        per_batch: int,
    ) -> None:
        """Open the recording and check it against this run, before anything is trained.

        ``weights`` are those of the run's rewards by label, ``has_gold``: the run has a gold verdict beside them. It
        makes ``updates`` updates, ``per_batch`` of them from each batch. Raises :class:`UserError` for the first thing
        that does not fit.
        """
        self._prompts = {prompt.problem.id: prompt for prompt in prompts}

        def check(batch: Sequence[Row]) -> None:
            self._check_groups(batch)
            self._check_tokens(batch)
            # Rewards that this run computes itself need not fit those that were recorded.
            if not self.judges_again:
                _check_rewards(batch, weights, has_gold=has_gold)

        self._recording = Recording(Path(self._options.path), check=check)
        batches = len(self._recording)
        # Checked now, and not when the recording ends in the middle of a run.
        most_updates = batches * per_batch
        if updates > most_updates and not self._options.repeat:
            reason = (
                f"the recording holds {batches} batches, and {per_batch} updates are made from each; "
                "rollout.options.repeat=true starts over after the last batch"
            )
            raise bad_value("train.steps", updates, f"at most {most_updates}", reason)

    def batch(self, number: int) -> list[Scored]:
        """The rows of the run's batch ``number`` with their recorded rewards; after the last comes the first again."""
        if self._recording is None:
            raise RuntimeError("bind must be called before batches are read")
        # By the number of the batch, so that a resumed run reads the batch at which it was interrupted.
        rows = self._recording.read(number % len(self._recording))
        return [from_row(row, self._prompts[row["problem"]]) for row in rows]

    def _check_groups(self, batch: Sequence[Row]) -> None:
        """Raise :class:`UserError` unless the batch has the groups and the temperature of this run.

        There must be ``prompts_per_batch`` groups, one after the other, of ``group_size`` completions of one problem.
        """
        prompts = self._config.prompts_per_batch
        size = self._config.group_size
        temperature = self._config.temperature
        if len(batch) != prompts * size:
            place, first_row = batch[0]
            groups = {row["group"] for _, row in batch}
            raise UserError(
                f"{place}: batch {first_row['batch']} holds {len(batch)} completions in {len(groups)} groups, and "
                f"rollout.prompts_per_batch {prompts} x rollout.group_size {size} is {prompts * size}"
            )
        for position, (place, row) in enumerate(batch):
            group = position // size
            _, first_of_group = batch[group * size]
            problem = first_of_group["problem"]
            if row["group"] != group or row["problem"] != problem:
                raise UserError(
                    f"{place}: completion {position} of batch {row['batch']} is of group {row['group']}, problem "
                    f"{row['problem']!r}; expected group {group}, problem {problem!r} (groups of rollout.group_size "
                    f"{size}, one after the other)"
                )
            if row["temperature"] != temperature:
                reason = f"{place}: the recorded log-probs are at that temperature"
                raise bad_value("rollout.temperature", temperature, f"{row['temperature']}", reason)

    def _check_tokens(self, batch: Sequence[Row]) -> None:
        """Raise :class:`UserError` unless this run's data, template and tokenizer give the same prompts and texts.

        A log-prob belongs to token ids: with other ids for the same text, the learner would score other tokens.
        """
        tokenizer = self._loaded.tokenizer
        vocabulary = int(self._loaded.causal.config.get_text_config().vocab_size)
        for place, row in batch:
            prompt = self._prompts.get(row["problem"])
            if prompt is None:
                raise UserError(f"{place}: data.train has no problem {row['problem']!r}, which the recording has")
            # Token by token: two templates may differ by a space that the text would not show.
            if tuple(row["prompt_ids"]) != prompt.token_ids:
                raise UserError(
                    f"{place}: the prompt of {row['problem']!r} has other token ids than this config gives it: "
                    "recorded with another tokenizer (model.source), template (data.prompt) or data (data.train)"
                )
            ids = row["completion_ids"]
            largest = max([*ids, *(max(context) for _, context in _restarts(row))])
            if largest >= vocabulary:
                raise UserError(f"{place}: token id {largest}, and the model's vocabulary has {vocabulary} entries")
            # As Converter decodes, from which the recorded text came. The text is of the policy's own tokens.
            drawn_ids = list(itertools.compress(ids, _trained(row) or (True,) * len(ids)))
            text = tokenizer.decode(drawn_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if text != row["text"]:
                raise UserError(
                    f"{place}: this tokenizer does not decode completion_ids to the recorded text; the recording was "
                    "made with another one (model.source, model.tokenizer)"
                )


def _check_rewards(batch: Sequence[Row], weights: Mapping[str, float], *, has_gold: bool) -> None:
    """Raise :class:`UserError` unless each recorded reward is the weighted sum that this run's ``rewards`` describe.

    With ``has_gold`` each needs a gold verdict beside it.
    """
    hint = "rollout.options.rewards=again judges the recorded texts anew"
    for place, row in batch:
        parts: Mapping[str, float] = row["parts"]
        # A name with a slash is a detail of a reward, which is not in the sum.
        names = sorted(name for name in parts if "/" not in name and name != GOLD)
        if names != sorted(weights):
            raise UserError(
                f"{place}: judged by {', '.join(names) or 'no reward'}, and rewards says {', '.join(weights)}; {hint}"
            )
        if has_gold and GOLD not in parts:
            raise UserError(f"{place}: has no gold verdict, and gold names one; {hint}")
        total = math.fsum(weight * parts[name] for name, weight in weights.items())
        # Not to the bit: another version may have added the parts in another order.
        if not math.isclose(total, row["reward"], rel_tol=1e-9, abs_tol=1e-9):
            raise UserError(
                f"{place}: reward is {row['reward']}, and its parts under the weights of rewards sum to {total}; {hint}"
            )
