"""Problems from local files (CSV, JSONL, Parquet), saved datasets, the Hugging Face hub, and reasoning-gym's tasks.

Every loader raises :class:`UserError` for options it does not know and for settings it would ignore.

A reasoning-gym problem carries ``meta["task"]`` and ``meta["entry"]``, the task's entry, which its scorer needs. The
entry can be written as JSON. But the scorers of ``arc_agi`` and ``rearc`` compare tuples: after a round trip through
JSON, which turns tuples into lists, they give a perfect answer 0.05. Item ``i`` of most tasks is drawn from
``random.Random(seed + i)``: two splits of size ``n`` whose seeds differ by less than ``n`` share problems. Choose seeds
far apart; decontamination counts what is still shared.
"""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kl_comedy.config.schema import DatasetConfig
from kl_comedy.config.validate import option, parse_record
from kl_comedy.data.rows import RowOptions, Rows, read_rows
from kl_comedy.errors import UserError, bad_value, shown
from kl_comedy.extras import install_command
from kl_comedy.io import existing_file
from kl_comedy.records import Problem
from kl_comedy.registry import DATASETS


def refuse_unused(config: DatasetConfig, *settings: str, key: str) -> None:
    """Raise :class:`UserError` for a setting that the loader does not use."""
    for setting in settings:
        # Refused and not ignored: who sets it expects that it does something.
        value = getattr(config, setting)
        if value:
            raise UserError(f"{key}.{setting}: got {value!r}, but the dataset {config.dataset!r} does not use it")


def _check_file_settings(config: DatasetConfig, *, key: str, options: type[RowOptions] = RowOptions) -> None:
    """Raise :class:`UserError` for settings that are not those of a file; whether it exists is not asked."""
    parse_record(options, config.options, key=f"{key}.options")
    refuse_unused(config, "name", "subset", "split", key=key)
    if not config.path:
        raise UserError(f"{key}.path: the dataset {config.dataset!r} needs the path of a file")


@DATASETS.register("jsonl", source="JSON Lines: one RFC 8259 object per line, UTF-8", check=_check_file_settings)
def jsonl(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A local JSONL file; an error names the file and line of the malformed row."""
    options = parse_record(RowOptions, config.options, key=f"{key}.options")
    path = _file_of(config, key)
    return read_rows(_jsonl_rows(path), config, options, key=key, source=str(path))


@DATASETS.register("parquet", source="Apache Parquet, read with pyarrow", check=_check_file_settings)
def parquet(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A local Parquet file; an error names the file and number of the malformed row."""
    options = parse_record(RowOptions, config.options, key=f"{key}.options")
    path = _file_of(config, key)
    # Parquet has no lines: a row is named by its number.
    rows = _numbered(str(path), path.stem, _parquet_rows(path, key))
    return read_rows(rows, config, options, key=key, source=str(path))


def _file_of(config: DatasetConfig, key: str) -> Path:
    """The file that ``path`` names, in settings that were checked. Raises :class:`UserError` where there is none."""
    return existing_file(Path(str(config.path)).expanduser(), f"{key}.path")


def _delimiter(value: object, key: str) -> str:
    """``value`` where it can separate fields. Raises :class:`UserError`."""
    if isinstance(value, str) and len(value) == 1 and value not in '"\r\n':
        return value
    raise bad_value(key, value, "one character that is not a quote or a line end")


@dataclass
class CsvOptions(RowOptions):
    """Options of ``csv``."""

    delimiter: str = option(",", "The character between two fields.", parse=_delimiter)


def _check_csv_settings(config: DatasetConfig, *, key: str) -> None:
    _check_file_settings(config, key=key, options=CsvOptions)


@DATASETS.register("csv", source="RFC 4180, UTF-8, with a header", check=_check_csv_settings)
def csv_file(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A local CSV file whose first line names the columns; an error names the file and line of the malformed row."""
    options = parse_record(CsvOptions, config.options, key=f"{key}.options")
    path = _file_of(config, key)
    return read_rows(_csv_rows(path, options.delimiter), config, options, key=key, source=str(path))


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What spreadsheets write before the first column's name."""


def _csv_rows(path: Path, delimiter: str) -> Rows:
    """The rows of a file by the names in its first line. Every value is text.

    A field in quotes may hold line ends: a row is named by the line on which it begins, counted from 1.
    """
    with path.open("rb") as file:
        # strict: a quote in the wrong place would else end a field early, and the text would be wrong without a word.
        reader = csv.reader(_text_lines(file, path), delimiter=delimiter, strict=True)
        names: list[str] = []
        first_blank = None
        row_number = 0
        last_line = 0
        while True:
            place = f"{path}:{last_line + 1}"
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise UserError(f"{place}: malformed CSV: {error}") from error
            if values is None:
                return
            last_line = reader.line_num
            if not values:
                # As in JSONL: blank lines at the end are harmless, one between rows may be a lost row.
                first_blank = first_blank or place
                continue
            if first_blank:
                raise UserError(f"{first_blank}: blank line between rows; remove it")
            if not names:
                names = _column_names(values, place)
                continue
            row_number += 1
            if len(values) != len(names):
                raise UserError(
                    f"{place}: {len(values)} fields, but the first line names {len(names)} columns; a field that holds "
                    f"{delimiter!r} must be in double quotes"
                )
            yield place, f"{path.stem}/{row_number}", dict(zip(names, values, strict=True))


def _text_lines(file: Iterable[bytes], path: Path) -> Iterator[str]:
    """The lines of a file as text, with their ends. Raises :class:`UserError` for a line that is not UTF-8."""
    for number, line in enumerate(file, start=1):
        content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line: {error.reason})"
            ) from error


def _column_names(names: list[str], place: str) -> list[str]:
    """The names of the columns. Raises :class:`UserError` for one that is empty or occurs twice."""
    known = set()
    for number, name in enumerate(names, start=1):
        if not name.strip():
            raise UserError(f"{place}: column {number} has no name; the first line must name every column")
        if name in known:
            raise UserError(f"{place}: the column {shown(name)} occurs twice")
        known.add(name)
    return names


def _check_saved_settings(config: DatasetConfig, *, key: str) -> None:
    """As :func:`_check_file_settings`; the folder says whether ``split`` is used."""
    parse_record(RowOptions, config.options, key=f"{key}.options")
    refuse_unused(config, "name", "subset", key=key)
    if not config.path:
        raise UserError(f"{key}.path: the dataset 'saved' needs the path of a folder")


@DATASETS.register("saved", source="datasets.load_from_disk; no code is run", check=_check_saved_settings)
def saved(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A folder that ``save_to_disk`` of the library datasets wrote: path, and split where it holds several."""
    options = parse_record(RowOptions, config.options, key=f"{key}.options")
    folder = Path(str(config.path)).expanduser()
    if not is_saved(folder):
        raise bad_value(f"{key}.path", config.path, "a folder that save_to_disk wrote (with state.json)")
    label = str(folder)
    # A DatasetDict is a folder of datasets, one per split.
    if (folder / SPLITS).is_file():
        splits = _saved_splits(folder / SPLITS, key)
        if config.split not in splits:
            raise bad_value(f"{key}.split", config.split, splits)
        label = f"{folder}[{config.split}]"
        folder = folder / str(config.split)
    else:
        refuse_unused(config, "split", key=key)
    rows = _numbered(label, folder.name, _saved_rows(folder, key))
    return read_rows(rows, config, options, key=key, source=label)


SPLITS = "dataset_dict.json"
"""Names the splits of a saved DatasetDict."""


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder, of one dataset or of several."""
    return (folder / "state.json").is_file() or (folder / SPLITS).is_file()


def _saved_splits(file: Path, key: str) -> list[str]:
    """The names of the splits. Raises :class:`UserError` for a file that does not list them."""
    try:
        splits = json.loads(file.read_text("utf-8"))["splits"]
        # Names of folders below this one, not paths that lead elsewhere.
        return [Path(str(split)).name for split in splits]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{key}.path: {file} does not list the splits: {type(error).__name__}: {error}") from error


def _saved_rows(folder: Path, key: str) -> Any:
    """The rows of a saved dataset. Raises :class:`UserError` where it cannot be read."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:
        # A missing file, a schema of a newer library, a broken Arrow file: dozens of classes.
        reason = (str(error).strip() or "no reason given").split("\n")[0]
        raise UserError(f"{key}.path: {folder} cannot be read: {type(error).__name__}: {reason}") from error


def _numbered(label: str, stem: str, rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Rows with their number, counted from 1, as place and id."""
    for number, row in enumerate(rows, start=1):
        yield f"{label} row {number}", f"{stem}/{number}", row


def _jsonl_rows(path: Path) -> Rows:
    """The rows of a file. Lines count from 1 and end in ``\\n`` only (U+2028 is text)."""
    # In bytes: text mode would end a line at more characters, and a wrong byte would have no line number.
    with path.open("rb") as file:
        first_blank = None
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            if not line.strip():
                first_blank = first_blank or place
                continue
            # Blank lines at the end are common and harmless; one between rows may be a lost row.
            if first_blank:
                raise UserError(f"{first_blank}: blank line between rows; remove it")
            yield place, f"{path.stem}/{number}", _json_object(line, place)


def _json_object(line: bytes, place: str) -> dict[str, Any]:
    """The object that a line holds. Raises :class:`UserError` for anything else."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8 (byte {error.start + 1} of the line: {error.reason})") from error
    except RecursionError as error:
        raise UserError(f"{place}: malformed JSON: nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{place}: malformed JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: a row must be a JSON object, got {type(row).__name__}")
    return row


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of ``pairs``. Raises ValueError for a repeated field, of which json would keep the last."""
    row: dict[str, Any] = {}
    for name, value in pairs:
        if name in row:
            raise ValueError(f"the field {shown(name)} occurs twice")
        row[name] = value
    return row


def _no_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which json reads and RFC 8259 does not know."""
    raise ValueError(f"{name} is not a JSON number")


MAX_UNPACKED = 2**30
"""Bytes that a Parquet file of any size may unpack to; a large one, to :data:`MAX_RATIO` times its size. A text that is
stored once and referred to by each row takes less than a byte per row in the file."""
MAX_RATIO = 100
ROW_BYTES = 500
"""Memory of a row beside its values, in bytes: 2**30 rows of one short text fit into a file of some kilobytes."""
MAX_ROWS_AT_ONCE = 1024
MAX_AT_ONCE = 2**26
"""Bytes of the rows that are unpacked at once, where each has the largest value; one row at least."""


def _parquet_rows(path: Path, key: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a file, which must not unpack to more than its limit. Raises :class:`UserError`."""
    import pyarrow
    import pyarrow.parquet

    # A small file that unpacks to all of the memory would end the process, not the command.
    limit = max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size)
    too_large = UserError(
        f"{key}.path: {path} unpacks to more than {limit / 2**30:.3g} GiB, from {path.stat().st_size:,} bytes; "
        "such rows may be given as JSONL"
    )
    unpacked = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            sizes = _column_sizes(table.metadata)
            if sum(sizes) > limit:
                raise too_large
            # The footer does not count a value as often as rows name it, and may be wrong. At worst each row of a batch
            # holds all of the largest column, so that many rows fit into the limit.
            largest = max(sizes, default=1)
            rows_at_once = max(1, min(MAX_ROWS_AT_ONCE, MAX_AT_ONCE // largest))
            # Counted to the end before a row is used: what is made of rows takes far longer than to unpack them.
            for batch in table.iter_batches(batch_size=rows_at_once):
                unpacked += batch.nbytes + ROW_BYTES * batch.num_rows
                if unpacked > limit:
                    raise too_large
            for batch in table.iter_batches(batch_size=rows_at_once):
                yield from batch.to_pylist()
    except MemoryError:
        raise too_large from None
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UserError(f"{key}.path: {path} is not a readable Parquet file: {reason}") from error


def _column_sizes(metadata: Any) -> list[int]:
    """The unpacked bytes of each column of each row group, as the file's footer states them."""
    sizes = []
    for group_index in range(metadata.num_row_groups):
        group = metadata.row_group(group_index)
        for column_index in range(group.num_columns):
            sizes.append(group.column(column_index).total_uncompressed_size)
    return sizes


class DatasetUnavailable(UserError):
    """A hub dataset that could not be loaded; ``what`` names it and the reason, without the advice.

    A suite gives advice of its own: it has options for local files.
    """

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}. {advice}")
        self.what = what


@dataclass
class HubOptions(RowOptions):
    """Options of ``hub``."""

    revision: str | None = option(None, "The commit, tag or branch.")


def _check_hub_settings(config: DatasetConfig, *, key: str) -> None:
    """Raise :class:`UserError` for settings that name no dataset of the hub; the hub is not asked."""
    parse_record(HubOptions, config.options, key=f"{key}.options")
    refuse_unused(config, "path", key=key)
    for setting, example in (("name", "openai/gsm8k"), ("split", "train")):
        if not getattr(config, setting):
            raise UserError(f"{key}.{setting}: the dataset 'hub' needs it, for example {key}.{setting}={example}")


@DATASETS.register("hub", source="datasets.load_dataset; no code from the hub is run", check=_check_hub_settings)
def hub(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A dataset by hub name: name, subset, split, and the option revision to pin it."""
    options = parse_record(HubOptions, config.options, key=f"{key}.options")
    if is_saved(Path(str(config.name)).expanduser()):
        raise UserError(
            f"{key}.name: {config.name} is a folder that save_to_disk wrote; set {key}.dataset=saved "
            f"{key}.path={config.name} and leave {key}.name out"
        )
    label = f"{config.name}[{config.split}]"
    rows = _numbered(label, label, _download(config, options.revision, key=key))
    return read_rows(rows, config, options, key=key, source=label)


def _download(config: DatasetConfig, revision: str | None, *, key: str) -> Any:
    """The rows of the split. Raises :class:`DatasetUnavailable` for every failure."""
    import datasets

    try:
        # Without trust_remote_code: a dataset that is a program is refused by the library.
        return datasets.load_dataset(config.name, config.subset, split=config.split, revision=revision)
    except Exception as error:
        # Network, authentication, a missing subset, a disk: the library raises dozens of classes.
        reason = str(error).strip().split("\n")[0] or "no reason given"
        settings = {"name": config.name, "subset": config.subset, "split": config.split, "revision": revision}
        given = ", ".join(f"{name}={value}" for name, value in settings.items() if value)
        raise DatasetUnavailable(
            f"{key}: could not load the hub dataset ({given}): {type(error).__name__}: {reason}",
            "Without network access, download it once elsewhere and use a local file: "
            f"{key}.dataset=jsonl (or csv, parquet) {key}.path=FILE",
        ) from error


TEXT_OPTIONS = ("text_field", "text_after")


def _check_gym_settings(config: DatasetConfig, *, key: str) -> None:
    refuse_unused(config, "path", "subset", "split", "fields", key=key)


@DATASETS.register("reasoning_gym", source="open-thought/reasoning-gym (Apache-2.0)", check=_check_gym_settings)
def reasoning_gym(config: DatasetConfig, *, key: str) -> list[Problem]:
    """A reasoning-gym task: name = the task, options = its settings (size, seed, min_terms, ...).

    ``size`` defaults to ``limit`` and ``seed`` to ``config.seed``. The text is the task's question; with ``text_field``
    a string of its metadata, with ``text_after`` what follows a marker in the question. Where several solutions are
    right the answer is ``""``: only the task's own scorer can judge them.
    """
    task = _build(config, key=key)
    count = task.size
    if config.limit is not None:
        count = min(task.size, config.limit)
    problems = []
    for index in range(count):
        entry = _entry(task, index, key=key)
        # None where several solutions are right.
        answer = ""
        if entry["answer"] is not None:
            answer = str(entry["answer"])
        problem = Problem(
            id=f"{config.name}/{task.seed}/{index}",
            text=_text(entry, config, key=key),
            answer=answer,
            meta={"task": config.name, "entry": entry},
        )
        problems.append(problem)
    return problems


def _build(config: DatasetConfig, *, key: str) -> Any:
    """The task's dataset. Raises :class:`UserError` for an unknown task or option, or settings it rejects."""
    try:
        # Whatever a library prints on import must not reach stdout, whose tables and JSON other programs read.
        with contextlib.redirect_stdout(sys.stderr):
            from reasoning_gym.factory import DATASETS as TASKS
    except ImportError as error:
        raise UserError(f"{key}.dataset: reasoning_gym is not installed; {install_command('gym')}") from error
    # The settings of a composite are specifications of other tasks, which options of a config cannot hold.
    names = sorted(name for name in TASKS if name != "composite")
    if config.name not in names:
        raise bad_value(f"{key}.name", config.name, names)
    build, settings_type = TASKS[config.name]
    settings = _task_settings(config, settings_type, key=key)
    try:
        chosen = settings_type(**settings)
        # Tasks check their settings by assertions, which say more than a failed item later.
        chosen.validate()
        return build(config=chosen)
    except Exception as error:
        # Settings out of range show as errors of any class, also as bugs of a task; either way others must be chosen.
        reason = str(error) or type(error).__name__
        raise UserError(f"{key}.options: the task {config.name!r} rejects {settings}: {reason}") from error


def _task_settings(config: DatasetConfig, settings_type: Any, *, key: str) -> dict[str, Any]:
    """The task's settings from options, ``seed`` and ``limit``. Raises :class:`UserError` for an unknown option."""
    allowed = [field.name for field in fields(settings_type) if field.init]
    settings = {name: value for name, value in config.options.items() if name not in TEXT_OPTIONS}
    for name in settings:
        if name not in allowed:
            raise bad_value(f"{key}.options", name, [*allowed, *TEXT_OPTIONS])
    # limit and seed mean the same for every dataset; a task's own options only refine them.
    seed = settings.setdefault("seed", config.seed)
    if config.seed and seed != config.seed:
        raise UserError(f"{key}: seed={config.seed} and options.seed={seed} contradict each other; keep one")
    if config.limit is not None:
        settings.setdefault("size", config.limit)
    return settings


def _entry(task: Any, index: int, *, key: str) -> dict[str, Any]:
    """Item ``index`` of the task. Raises :class:`UserError` where it cannot be made, or not written as JSON."""
    try:
        # Some tasks print while they generate, which must not reach the output of a command.
        with contextlib.redirect_stdout(sys.stderr):
            entry = dict(task[index])
        # Records are JSON; a value that is not would end the run much later.
        json.dumps(entry)
        return entry
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{key}: the task could not make item {index} with these options: {reason}") from error


def _text(entry: dict[str, Any], config: DatasetConfig, *, key: str) -> str:
    """The problem's text: the question, what follows a marker in it, or a string of the metadata."""
    field = config.options.get("text_field")
    marker = config.options.get("text_after")
    if field is not None and marker is not None:
        raise UserError(f"{key}.options: text_field and text_after exclude each other; keep one")
    if field is not None:
        strings = [name for name, value in entry["metadata"].items() if isinstance(value, str)]
        if field not in strings:
            raise bad_value(f"{key}.options.text_field", field, strings, f"metadata strings of {config.name}")
        return str(entry["metadata"][field])
    question = str(entry["question"])
    if marker is None:
        return question
    tail = ""
    is_text = isinstance(marker, str) and marker != ""
    if is_text and marker in question:
        tail = question.rpartition(marker)[2].strip()
    if not tail:
        allowed = "a marker with text after it"
        raise bad_value(f"{key}.options.text_after", marker, allowed, f"question: {shown(question)}")
    return tail
