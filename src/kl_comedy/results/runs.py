"""Runs read back, as pandas frames: from an MLflow store, or from an export of one, which needs neither.

``uri`` is a store's address or the path of an export (``FILE.parquet``, ``FILE.csv``); :func:`open_runs` gives the
reader of either. A runs frame has one row per run: ``run_id``, ``run_name``, ``experiment``, ``status``,
``start_time``, ``duration_s``, ``stale``, and ``params.*``, ``tags.*``, ``metrics.*`` (the last value of each), with
``tags.kl.family``, ``tags.kl.betas`` and ``tags.code`` derived. ``stale`` names, as JSON, the metrics that the run's
last update did not measure, each with the update of its last value. Wherever a key is asked for, its short name will
do: ``seed`` for ``params.seed``, ``kl.label`` for the tag, ``train/reward`` for the metric.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import math
import operator
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kl_comedy.errors import UserError, alternatives, bad_value, meant, shown
from kl_comedy.results import database
from kl_comedy.results.database import StoredRun
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import mark_dead_runs, search_runs
from kl_comedy.tracking.tokens import PER_TOKEN

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("kl_comedy.tracking")

RUN_COLUMNS = ("run_id", "run_name", "experiment", "status", "start_time", "duration_s", "stale")
PREFIXES = ("params.", "tags.", "metrics.")
LABEL = "tags.kl.label"
"""Column: the run's KL terms in one short text."""
FAMILY = "tags.kl.family"
"""Column: the label without its betas."""
BETA = "tags.kl.betas"
"""Column: the betas of the label."""
CODE = "tags.code"
"""Column: the commit and a hash of the change to it."""

DERIVED = {FAMILY: LABEL, BETA: LABEL, CODE: "tags.git.commit"}
"""Columns that no store has, with the tag that each is computed from."""

NO_KL = "no KL"
PLUGINS = "tags.plugins"
"""Column: name and hash of the source of each plugin of the run."""

UPDATES = "train/reward"
"""The metric that every update of a training run has."""

SQL_INFINITY = 1.7976931348623157e308
"""What MLflow's database stores in place of an infinite metric value."""

ENTITIES = {
    "param": "params",
    "parameter": "params",
    "tag": "tags",
    "metric": "metrics",
    "attribute": "attributes",
    "attr": "attributes",
    "run": "attributes",
}
"""MLflow's names of what a filter asks about, without a final s."""

ATTRIBUTES = ("status", "start_time", "run_id", "run_name")
KEYWORDS = ("AND", "LIKE", "ILIKE", "IN", "NOT", "IS", "NULL")
WHERE_EXAMPLE = "example: seed = 0 and algorithm.advantage = 'rloo' and train/reward > 0.5"

_TOKEN = re.compile(
    r"""'[^']*'|"[^"]*"
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./]))
    |(?P<name>(?:\w+\.)?`[^`]+`|\w+\."[^"]+"|[A-Za-z_][\w.\-/@:]*)""",
    re.VERBOSE,
)
_CONDITION = re.compile(
    r"""\s*(?P<entity>params|tags|metrics|attributes)\.(?P<key>`[^`]+`|\w+)
    \s*(?P<sign>NOT\s+IN|IN|I?LIKE|IS\s+NOT\s+NULL|IS\s+NULL|!=|>=|<=|=|>|<)
    \s*(?P<value>'[^']*'|"[^"]*"|\((?:'[^']*'|"[^"]*"|[^)'"])*\)|[+-]?[\d.][^\s]*)?\s*(?:AND\b|$)""",
    re.VERBOSE,
)
_TEXT_COMPARISONS = {"=": operator.eq, "!=": operator.ne}
_NUMBER_COMPARISONS = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

EXPORTS = (".parquet", ".csv")
"""How the path of an export ends."""

COMPLETIONS = "completions"
PLUGIN_SOURCE = "plugin_source"
"""Columns of an export beside those of a runs frame: JSON of sampled completions, and of plugins' source by name."""

CURVE_COLUMNS = ("run_id", "metric", "step", "value", "recorded")
"""Columns of an export's curves, one row per point. ``recorded`` is the length of the whole curve."""

NEVER_THINNED = 100
"""The last points of a curve that an export never thins."""


class NoCurves(UserError):
    """An export lacks the curve that a question needs."""


def curves_file(export: Path) -> Path:
    """The file of an export's curves."""
    return export.with_suffix(".curves.parquet")


class Runs(Protocol):
    """A reader of runs: of a store or of an export."""

    def frame(
        self, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
    ) -> pd.DataFrame:
        """All runs (or those of one experiment) that match ``where``, newest first.

        ``mark_dead`` first marks this host's dead runs as FAILED. Raises :class:`UserError` for a source that is not
        there, an unknown experiment, a filter that cannot be read, and a key in it that no run has.
        """
        ...

    def history(self, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
        """The curve of ``metric`` in each run: columns run_id, step, value; one row per step (the last logged wins).

        An export has the column ``recorded`` too: how many points the curve had before it was thinned. Raises
        :class:`NoCurves` where an export lacks the metric.
        """
        ...

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """Up to ``most`` rows of the newest evaluation table of the run, else of its newest table of samples.

        Without the numbers of their tokens.
        """
        ...

    def sample_tables(self, run_id: str, most: int) -> list[tuple[int, list[dict[str, Any]]]]:
        """The run's tables of training samples, at most ``most`` (at least 2), by their updates: the first, the last
        and others evenly between them. Empty in an export."""
        ...

    def config(self, run_id: str, folder: Path) -> Path:
        """The run's resolved config, as a file in ``folder``. Raises :class:`UserError` where there is none."""
        ...

    def plugins(self, run_id: str, folder: Path) -> list[Path]:
        """The run's plugin files and their record, written to ``folder``/plugins; empty where the source lacks them."""
        ...


def open_runs(uri: str | Path) -> Runs:
    """The reader of a store (its address) or of an export (its path). Raises :class:`UserError` for a bad export."""
    path = Path(uri)
    # An address is a store whatever it ends in: a SQLite file may be called runs.csv.
    if path.suffix not in EXPORTS or "://" in str(uri):
        return _open_store(str(uri), _identity(store.sqlite_file(str(uri))))
    return _read_export(path, _changed_at(path), _changed_at(curves_file(path)))


# A report asks one store for its runs, for each curve and for the completions of each configuration.
@functools.lru_cache(maxsize=4)
def _open_store(uri: str, *identity: object) -> Store:
    """The store at ``uri``. A file that is another one now (``identity``) is opened anew."""
    return Store(uri)


def _identity(file: Path | None) -> tuple[int, int] | None:
    """What tells a database file from another one of its name; None for a server, and where there is no file."""
    if file is None or not file.is_file():
        return None
    status = file.stat()
    return status.st_dev, status.st_ino


def _changed_at(file: Path) -> int:
    """When the file was changed, in nanoseconds; 0 for a file that is not there."""
    if not file.is_file():
        return 0
    return file.stat().st_mtime_ns


def runs_frame(
    uri: str, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
) -> pd.DataFrame:
    """:meth:`Runs.frame` of the store or export at ``uri``."""
    return open_runs(uri).frame(experiment, where, mark_dead=mark_dead)


def history(uri: str, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
    """:meth:`Runs.history` of the store or export at ``uri``."""
    return open_runs(uri).history(run_ids, metric)


def read_runs(source: str | Path) -> pd.DataFrame:
    """All runs of a store or of an export. Params and tags are texts, metrics are numbers, in either case."""
    return runs_frame(str(source))


@dataclass(frozen=True)
class Store:
    """The runs of an MLflow store. A database is read at once (:mod:`kl_comedy.results.database`), a server through
    MLflow's client.
    """

    uri: str

    @functools.cached_property
    def _client(self) -> Any:
        """The client, made at the first question. Raises :class:`UserError` where there is no such store."""
        return store.open_existing(self.uri)

    def frame(
        self, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
    ) -> pd.DataFrame:
        """:meth:`Runs.frame`."""
        # Before the store is opened, which takes seconds: some filters cannot be read whatever the runs have.
        translate(where or "")
        client = self._client
        experiments = self._experiments(client, experiment)
        if mark_dead:
            try:
                mark_dead_runs(client, experiment)
            except Exception as error:  # a store that is only readable still answers queries
                log.warning("could not mark dead runs as failed: %s", store.first_line(error))
        try:
            rows = _stored_rows(client, experiments)
        except Exception as error:
            raise store.cannot_be_read(self.uri, error) from error
        frame = _frame_of(rows)
        if not where or frame.empty:
            return frame
        # Made anew of the rows: its columns are those of the runs that match.
        return _frame_of(list(itertools.compress(rows, matching(frame, where))))

    def _experiments(self, client: Any, experiment: str | None) -> dict[str, str]:
        """Id to name of every experiment, or of the one that is asked for."""
        try:
            names = {str(item.experiment_id): item.name for item in client.search_experiments()}
        except Exception as error:
            raise store.cannot_be_read(self.uri, error) from error
        # Ids and not names: MLflow's search takes ids.
        if experiment is None:
            return names
        chosen = {key: name for key, name in names.items() if name == experiment}
        if not chosen:
            raise bad_value("--experiment", experiment, sorted(names.values()))
        return chosen

    def history(self, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
        """:meth:`Runs.history`."""
        import pandas as pd

        client = self._client
        ids = list(run_ids)
        rows = []
        with _garbage_collector_paused():
            try:
                curves = database.points(client, ids, metric)
                if curves is None:
                    curves = {run_id: _points(client, run_id, metric) for run_id in ids}
            except Exception as error:
                raise store.cannot_be_read(self.uri, error) from error
            for run_id in ids:
                # The last logged value of a step wins: a resumed run logs its first steps again.
                by_step = dict(curves.get(run_id, ()))
                rows += [(run_id, step, _logged_value(by_step[step])) for step in sorted(by_step)]
        return pd.DataFrame(rows, columns=["run_id", "step", "value"]).astype({"step": int, "value": float})

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """:meth:`Runs.completions`; empty where the run's artifacts are not where the store says they are."""
        for folder in ("tables/eval", "tables/samples"):
            step_of = self._tables(run_id, folder)
            if not step_of:
                continue
            newest = max(step_of, key=step_of.__getitem__)
            rows = self._read_table(run_id, newest)[:most]
            return [{name: value for name, value in row.items() if name != PER_TOKEN} for row in rows]
        return []

    def sample_tables(self, run_id: str, most: int) -> list[tuple[int, list[dict[str, Any]]]]:
        """:meth:`Runs.sample_tables`; without tables that cannot be read."""
        path_of = {step: path for path, step in self._tables(run_id, "tables/samples").items()}
        tables = []
        for step in evenly(path_of, most):
            try:
                tables.append((step, self._read_table(run_id, path_of[step])))
            except UserError as error:
                # A page of many runs is not lost for one damaged file.
                log.warning("%s", error)
        return tables

    def _tables(self, run_id: str, folder: str) -> dict[str, int]:
        """The paths of the run's tables in ``folder`` and below, with the update of each."""
        local = database.artifact_folder(self._client, run_id)
        if local is None:
            files = self._files_below(run_id, folder)
        else:
            # MLflow's client would read all params and tags of the run to find this folder.
            paths = sorted(file for file in (local / folder).rglob("*.json") if file.is_file())
            files = [file.relative_to(local).as_posix() for file in paths]
        return {path: int(Path(path).stem) for path in files if re.search(r"/\d+\.json$", path)}

    def _read_table(self, run_id: str, path: str) -> list[dict[str, Any]]:
        """The rows of the run's table at ``path``. Raises :class:`UserError` where none comes."""
        local = database.artifact_folder(self._client, run_id)
        if local is not None:
            return _table_rows(local / path, run_id)
        with tempfile.TemporaryDirectory() as scratch:
            try:
                fetched = self._client.download_artifacts(run_id, path, scratch)
            except Exception as error:
                # A server may have lost the file, or itself.
                raise store.cannot_be_read(self.uri, error) from error
            return _table_rows(Path(fetched), run_id)

    def _files_below(self, run_id: str, folder: str) -> list[str]:
        """The paths of the run's artifacts in ``folder`` and below."""
        files: list[str] = []
        for item in self._client.list_artifacts(run_id, folder):
            if item.is_dir:
                files += self._files_below(run_id, item.path)
            else:
                files.append(item.path)
        return files

    def config(self, run_id: str, folder: Path) -> Path:
        """:meth:`Runs.config`: the artifact that the run uploaded."""
        try:
            return Path(self._client.download_artifacts(run_id, "config/config.yaml", str(folder)))
        except Exception as error:
            problem = f"run {run_id} has no config that can be fetched ({store.first_line(error)})"
            raise UserError(f"{problem}; runs upload it when they end") from error

    def plugins(self, run_id: str, folder: Path) -> list[Path]:
        """:meth:`Runs.plugins`."""
        try:
            fetched = Path(self._client.download_artifacts(run_id, "plugins", str(folder)))
        except Exception:  # a run of an earlier version: the caller asks for the files
            return []
        return sorted(file for file in fetched.rglob("*") if file.is_file())


def evenly(steps: Iterable[int], most: int) -> list[int]:
    """At most ``most`` (at least 2) of ``steps`` in order: the first, the last, and others evenly between them.

    >>> evenly([1, 20, 40, 60, 80, 100], 4)
    [1, 40, 60, 100]
    """
    ordered = sorted(steps)
    if len(ordered) <= most:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (most - 1))] for place in range(most)]


def _points(client: Any, run_id: str, metric: str) -> list[tuple[int, float]]:
    """Step and value of every point of a run's ``metric``, in the order of logging."""
    points = sorted(client.get_metric_history(run_id, metric), key=lambda point: point.timestamp)
    return [(point.step, point.value) for point in points]


def _table_rows(file: Path, run_id: str) -> list[dict[str, Any]]:
    """The rows of a stored table. Raises :class:`UserError` for a file that is none."""
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} of run {run_id} is not a readable table ({error})") from error
    if not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict)]


# A report asks for the frame, each curve and each run's completions of one file.
@functools.lru_cache(maxsize=4)
def _read_export(path: Path, *changed_at: int) -> Export:
    """The export at ``path``. Files that changed (``changed_at``) are read again."""
    import pandas as pd

    frame = read_table(path)
    if "run_id" not in frame or "status" not in frame:
        raise UserError(f"{path}: is not an export of runs (it lacks run_id or status)")
    if path.suffix == ".csv":
        # A CSV holds texts alone, and nothing for a missing value.
        numeric = [name for name in frame.columns if name.startswith(("metrics.", "duration_s"))]
        try:
            numbers = {name: pd.to_numeric(frame[name]) for name in numeric}
            frame = frame.mask(frame == "").assign(**numbers)
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: metrics are not numbers: {store.first_line(error)}") from None
    file = curves_file(path)
    if file.is_file():
        points = read_table(file)
    else:
        points = pd.DataFrame(columns=CURVE_COLUMNS)
    missing = [name for name in CURVE_COLUMNS if name not in points]
    if missing:
        raise UserError(f"{file}: lacks {', '.join(missing)}")
    curves = {str(metric): curve for metric, curve in points.groupby("metric", sort=False)}
    return Export(path, frame, curves)


@dataclass(frozen=True, eq=False)
class Export:
    """Runs that ``kl-comedy results export`` wrote; ``curves`` has the points of each metric that it kept."""

    path: Path
    runs: pd.DataFrame
    curves: Mapping[str, pd.DataFrame]

    def frame(
        self, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
    ) -> pd.DataFrame:
        """:meth:`Runs.frame`; without the columns that none of these runs has."""
        # These are no columns of a runs frame, and hold megabytes.
        frame = self.runs.drop(columns=[COMPLETIONS, PLUGIN_SOURCE], errors="ignore")
        if experiment is not None:
            if experiment not in set(frame["experiment"]):
                raise bad_value("--experiment", experiment, sorted(set(frame["experiment"])))
            frame = frame[frame["experiment"] == experiment]
        frame = frame[matching(frame, where or "")]
        if len(frame) > 0:
            # As in a store, whose runs have the columns of their own keys alone.
            empty = [name for name in frame.columns if name.startswith(PREFIXES) and frame[name].isna().all()]
            frame = frame.drop(columns=empty)
        return frame.reset_index(drop=True).copy()

    def history(self, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
        """:meth:`Runs.history`."""
        import pandas as pd

        ids = list(run_ids)
        curves: list[pd.DataFrame] = []
        # A question about no runs needs no curves, so that it has an answer whether the export has the metric or not.
        if ids:
            if metric not in self.curves:
                problem = f"the export has no curve of {metric}"
                raise NoCurves(f"{problem}; `kl-comedy results export --curves` writes curves")
            curve_of_run = {str(run_id): curve for run_id, curve in self.curves[metric].groupby("run_id", sort=False)}
            curves = [curve_of_run[run_id] for run_id in ids if run_id in curve_of_run]
        columns = [name for name in CURVE_COLUMNS if name != "metric"]
        points = pd.DataFrame(columns=columns)
        if curves:
            points = pd.concat(curves, ignore_index=True)[columns]
        return points.astype({"step": int, "value": float})

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """:meth:`Runs.completions`."""
        rows: list[dict[str, Any]] = json.loads(self._cell(run_id, COMPLETIONS) or "[]")
        return rows[:most]

    def sample_tables(self, run_id: str, most: int) -> list[tuple[int, list[dict[str, Any]]]]:
        """:meth:`Runs.sample_tables`."""
        return []

    def config(self, run_id: str, folder: Path) -> Path:
        """:meth:`Runs.config`, from the run's params; those that the export lacks are at their defaults."""
        from omegaconf import OmegaConf

        # Every run has each param's column here; the ones that are missing are other runs'.
        row = self.runs[self.runs["run_id"] == run_id].iloc[0].dropna()
        params = {str(name): str(text) for name, text in row.items() if str(name).startswith("params.")}
        file = folder / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(nested(params)["params"])), encoding="utf-8")
        return file

    def plugins(self, run_id: str, folder: Path) -> list[Path]:
        """:meth:`Runs.plugins`."""
        sources: dict[str, str] = json.loads(self._cell(run_id, PLUGIN_SOURCE) or "{}")
        files = []
        for name, text in sources.items():
            file = folder / "plugins" / name
            # An export may come from somebody else: it writes no file elsewhere.
            if not file.resolve().is_relative_to((folder / "plugins").resolve()):
                raise UserError(f"{self.path}: a plugin of run {run_id} is named {name!r}, outside its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            files.append(file)
        return files

    def _cell(self, run_id: str, column: str) -> str:
        """The text in a column of the run; empty where it has none."""
        if column not in self.runs:
            return ""
        for value in self.runs.loc[self.runs["run_id"] == run_id, column]:
            if isinstance(value, str):
                return value
        return ""


def nested(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values that dotted keys and texts as MLflow's params stand for; keys 0, 1, ... are a list.

    >>> nested({"kl.0.beta": "0.1", "kl.0.estimator": "k1", "lora": "null"})
    {'kl': [{'beta': 0.1, 'estimator': 'k1'}], 'lora': None}
    """

    def with_lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        values = {name: with_lists(value) for name, value in node.items()}
        positions = [str(position) for position in range(len(values))]
        # Keys 0 to n - 1 without a gap. Nothing else says that a node was a list; empty ones are values of their own.
        if values and set(values) == set(positions):
            return [values[position] for position in positions]
        return values

    # First as dictionaries, because a list's length is known only when all of its keys have been read.
    root: dict[str, Any] = {}
    for key, text in texts.items():
        *parents, name = key.split(".")
        node = root
        for parent in parents:
            node = node.setdefault(parent, {})
        # As store.param_texts writes them: JSON, except for texts, which are as they are.
        try:
            node[name] = json.loads(text)
        except ValueError:
            node[name] = text
    return {name: with_lists(value) for name, value in root.items()}


def _stored_rows(client: Any, experiments: dict[str, str]) -> list[dict[str, Any]]:
    """The runs of ``experiments`` (id to name), newest first, each as a row of a runs frame."""
    with _garbage_collector_paused():
        runs = database.active_runs(client, list(experiments))
        if runs is None:
            runs = [StoredRun.of(run) for run in search_runs(client, list(experiments))]
        return [_run_row(run, experiments[run.experiment_id]) for run in runs]


def _frame_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The runs frame of these rows; without rows it has no columns."""
    import pandas as pd

    with _garbage_collector_paused():
        frame = pd.DataFrame(rows)
    if not rows:
        return frame
    columns = list(RUN_COLUMNS)
    for prefix in PREFIXES:
        columns += sorted(name for name in frame.columns if name.startswith(prefix))
    return with_derived(frame[columns])


def _run_row(run: StoredRun, experiment: str) -> dict[str, Any]:
    """The row of a run of ``experiment`` in a runs frame."""
    duration_s = None
    # A run that was resumed has the end of its first attempt until it ends again.
    if run.status != "RUNNING" and run.end_time:
        duration_s = (run.end_time - run.start_time) / 1000
    row = {
        "run_id": run.run_id,
        "run_name": run.name,
        "experiment": experiment,
        "status": run.status,
        "start_time": run.start_time,
        "duration_s": duration_s,
        "stale": _stale(run.steps),
    }
    row |= {f"params.{key}": text for key, text in run.params.items()}
    row |= {f"tags.{key}": text for key, text in run.tags.items()}
    row |= {f"metrics.{key}": _logged_value(value) for key, value in run.metrics.items()}
    return row


def _stale(steps: Mapping[str, int]) -> str:
    """The metrics whose last value is older than the run's last update, with that value's update; JSON or empty.

    ``steps``: the update of each metric's last value.
    """
    # Without training's own metric, as in an evaluation, the run's last step is that of any metric.
    last = steps.get(UPDATES, max(steps.values(), default=0))
    stale = {name: step for name, step in sorted(steps.items()) if step < last}
    if not stale:
        return ""
    return json.dumps(stale)


def _logged_value(value: float) -> float:
    """The value that was logged, where MLflow's database holds its largest number in place of an infinite one."""
    if math.isnan(value) or abs(value) < SQL_INFINITY:
        return value
    return math.copysign(math.inf, value)


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """MLflow makes an object of every param, tag and metric; collecting garbage meanwhile takes 60% of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def read_table(path: Path) -> pd.DataFrame:
    """A CSV (every cell a text), JSON or Parquet table. Raises :class:`UserError` for another file."""
    import pandas as pd

    # By the suffix alone: a file's content is not guessed.
    if path.suffix not in (".csv", ".json", ".parquet"):
        raise UserError(f"{path}: allowed: a table that ends in .csv, .json or .parquet")
    if not path.is_file():
        raise UserError(f"no such table: {path}")
    try:
        if path.suffix == ".json":
            return pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
        if path.suffix == ".csv":
            return pd.read_csv(path, dtype=str, keep_default_na=False)
        return pd.read_parquet(path)
    except Exception as error:  # readers of damaged files raise what they trip over
        raise UserError(f"{path} cannot be read as a table: {store.first_line(error)}") from None


def translate(where: str, columns: Collection[str] = ()) -> tuple[str, list[str]]:
    """``--where``, which is MLflow's filter language with short names, as MLflow's filter, and the columns it names.

    Its runs are chosen by :func:`matching`, in a store as in an export; MLflow's own pages get the filter.
    A name with a slash is a metric, a field of a run (status, start_time, ...) is an attribute, every other bare name
    is a param, or else a tag of ``columns``; ``params.``, ``tags.``, ``metrics.`` and ``attributes.`` are explicit.
    Raises :class:`UserError` for OR.

    >>> translate("seed = 0 and train/reward > 0.5")
    ("params.`seed` = '0' AND metrics.`train/reward` > 0.5", ['params.seed', 'metrics.train/reward'])
    """
    named_columns: list[str] = []

    def translated(match: re.Match[str]) -> str:
        token = match[0]
        if match["number"]:
            # MLflow compares params and tags as texts, so a number after one of them needs quotes.
            follows_text = len(named_columns) > 0 and named_columns[-1].startswith(("params.", "tags."))
            if follows_text:
                return f"'{token}'"
            return token
        if not match["name"]:
            return token
        if token.upper() in KEYWORDS:
            return token.upper()
        # MLflow would take it for a name and complain about what follows.
        if token.upper() == "OR":
            problem = "filters know AND but not OR, as MLflow's: ask twice, or group instead"
            raise UserError(f"--where: got {where!r}; {problem}")
        entity, key = _entity_and_key(token, columns)
        column = f"{entity}.{key}"
        named_columns.append(column)
        if entity == "attributes":
            return column
        # Without the backticks MLflow would read the slash or the dot of a key as its own syntax.
        return f"{entity}.`{key}`"

    return _TOKEN.sub(translated, where), named_columns


def _entity_and_key(token: str, columns: Collection[str]) -> tuple[str, str]:
    """What a name in a filter asks about: ``params``, ``tags``, ``metrics`` or ``attributes``, and the key in it."""
    prefix, _, rest = token.partition(".")
    explicit_entity = ENTITIES.get(prefix.lower().removesuffix("s"))
    if rest and explicit_entity is not None:
        return explicit_entity, rest.strip('`"')
    key = token.strip('`"')
    if token in ATTRIBUTES:
        return "attributes", key
    if "/" in token:
        return "metrics", key
    is_tag_only = f"tags.{token}" in columns and f"params.{token}" not in columns
    if is_tag_only:
        return "tags", key
    return "params", key


def matching(frame: pd.DataFrame, where: str) -> list[bool]:
    """Whether each run of ``frame`` satisfies ``--where``, as MLflow decides; one without a value only IS NULL.

    Raises :class:`UserError` for what is not a condition, and for a key that no run has.

    >>> import pandas as pd
    >>> matching(pd.DataFrame({"params.seed": ["0", "1", None]}), "seed != 0")
    [False, True, False]
    """
    text, _ = translate(where, frame.columns)
    # As it was typed: in the translation a number beside a param has quotes.
    unreadable = f"--where: cannot read {shown(where)}; {WHERE_EXAMPLE} (texts have quotes)"
    matches = [True] * len(frame)
    position = 0
    while position < len(text.rstrip()):
        match = _CONDITION.match(text, position)
        if match is None:
            raise UserError(unreadable)
        position = match.end()
        key = match["key"].strip("`")
        if match["entity"] != "attributes":
            key = f"{match['entity']}.{key}"
        column = resolve(frame, key, "--where")
        sign = " ".join(match["sign"].upper().split())
        value = match["value"] or ""
        is_number = match["entity"] == "metrics" or column == "start_time"
        try:
            if is_number and value:
                condition = _condition(sign, float(value))
            else:
                quoted = re.findall(r"'[^']*'|\"[^\"]*\"", value)
                condition = _condition(sign, [word[1:-1] for word in quoted])
        except (ValueError, IndexError, KeyError):
            raise UserError(unreadable) from None
        matches = [
            matches_so_far and condition(value) for matches_so_far, value in zip(matches, frame[column], strict=True)
        ]
    return matches


def _condition(sign: str, given: float | list[str]) -> Callable[[Any], bool]:
    """What a value must satisfy: a comparison with a number, or with the first of several texts.

    Raises ValueError, IndexError or KeyError for a sign that does not fit what is given.
    """
    if sign == "IS NULL":
        return _is_missing
    if sign == "IS NOT NULL":
        return lambda value: not _is_missing(value)
    if isinstance(given, float):
        satisfies = _number_condition(sign, given)
    else:
        satisfies = _text_condition(sign, given)
    # As in SQL, a missing value satisfies no other condition, not even !=.
    return lambda value: not _is_missing(value) and satisfies(value)


def _number_condition(sign: str, right: float) -> Callable[[Any], bool]:
    compare = _NUMBER_COMPARISONS[sign]
    return lambda value: bool(compare(value, right))


def _text_condition(sign: str, texts: Sequence[str]) -> Callable[[Any], bool]:
    if sign == "IN":
        return lambda value: value in texts
    if sign == "NOT IN":
        return lambda value: value not in texts
    right = texts[0]
    if sign in ("LIKE", "ILIKE"):
        pattern = _sql_pattern(right, ignore_case=sign == "ILIKE")
        return lambda value: pattern.fullmatch(value) is not None
    compare = _TEXT_COMPARISONS[sign]
    return lambda value: bool(compare(value, right))


def _is_missing(value: Any) -> bool:
    """Whether a cell holds nothing: None, or NaN, which alone differs from itself."""
    return value is None or bool(value != value)


def _sql_pattern(like: str, *, ignore_case: bool) -> re.Pattern[str]:
    """SQL's LIKE as a regular expression: ``%`` is any text, ``_`` any character."""
    wildcards = {"%": ".*", "_": "."}
    parts = [wildcards.get(character, re.escape(character)) for character in like]
    # SQL's % matches a line end too.
    flags = re.DOTALL
    if ignore_case:
        flags |= re.IGNORECASE
    return re.compile("".join(parts), flags)


def matching_metrics(frame: pd.DataFrame, pattern: str) -> list[str]:
    """The columns of the metrics that ``pattern`` names, in the order of the alphabet; ``*`` matches anything.

    >>> import pandas as pd
    >>> matching_metrics(pd.DataFrame({"metrics.eval/a/reward": [1.0], "params.seed": ["0"]}), "eval/*/reward")
    ['metrics.eval/a/reward']
    """
    # A pattern may have the prefix or not, as other keys.
    column_pattern = f"metrics.{pattern.removeprefix('metrics.')}"
    return sorted(column for column in frame.columns if fnmatch(column, column_pattern))


def resolve(frame: pd.DataFrame, key: str, option: str) -> str:
    """The column that ``key`` means. Raises :class:`UserError` naming the nearest where there is none.

    >>> import pandas as pd
    >>> resolve(pd.DataFrame({"params.seed": ["0"]}), "seed", "--group")
    'params.seed'
    """
    candidates = [key, *(prefix + key for prefix in PREFIXES)]
    if key == "kl":
        candidates.append(LABEL)
    for column in candidates:
        if column in frame.columns:
            return column

    message = f"{option}: got {key!r}; no such key in these runs"
    if short(key) == "train/gold" or key.endswith("/proxy"):
        raise UserError(f"{message}: they trained on the reward that they were judged by (config key `gold`)")
    if option in ("--metric", "--kl", "metrics"):
        metrics = {short(name) for name in frame.columns if name.startswith("metrics.")}
        # A metric of every evaluation set is one entry, and * is what the option takes.
        patterns = {re.sub("^eval/[^/]+/", "eval/*/", name) for name in metrics}
        # Held-out scores first, which is what most tables are of.
        listed = sorted(patterns, key=lambda name: (not name.startswith("eval/"), name.count("/"), name))
        raise UserError(f"{message}; {alternatives(listed, _meant_metric(frame, key, metrics, listed), listed=8)}")
    names = sorted({short(name) for name in frame.columns})
    keys_below = [name for name in names if name.startswith(f"{key}.")]
    if keys_below:
        raise UserError(f"{message}; it is a group of keys: {', '.join(keys_below[:8])}")
    meant_name = _meant_column(frame, key, names)
    if meant_name is None:
        raise UserError(message)
    raise UserError(f"{message}; did you mean {meant_name!r}?")


def _meant_column(frame: pd.DataFrame, key: str, names: Iterable[str]) -> str | None:
    """What a user may have meant by ``key``, which no column has: one of the short ``names``."""
    near = meant(short(key), names)
    if near == short(key):
        # The name is right and its prefix wrong: name the column with its own prefix.
        for prefix in PREFIXES:
            if prefix + near in frame.columns:
                return prefix + near
    return near


def _meant_metric(frame: pd.DataFrame, key: str, metrics: Iterable[str], patterns: Sequence[str]) -> str | None:
    """The metric that is meant, by its whole name, else by its last part: ``acc`` is the accuracy of every set."""
    near = _meant_column(frame, key, sorted(metrics))
    if near is not None:
        return near
    pattern_of_part: dict[str, str] = {}
    for pattern in patterns:
        pattern_of_part.setdefault(pattern.rpartition("/")[2], pattern)
    part = meant(key.rpartition("/")[2], pattern_of_part)
    if part is None:
        return None
    return pattern_of_part[part]


def short(column: str) -> str:
    """A column's name without ``params.``, ``tags.`` or ``metrics.``."""
    for prefix in PREFIXES:
        column = column.removeprefix(prefix)
    return column


def drop_columns(frame: pd.DataFrame, patterns: Sequence[str]) -> pd.DataFrame:
    """``frame`` without the columns whose name or short name matches a pattern; ``*`` matches anything.

    Raises :class:`UserError` for a pattern that matches none, and for ``run_id``, which identifies the rows.
    """
    dropped: set[str] = set()
    for pattern in patterns:
        matches = [name for name in frame.columns if fnmatch(name, pattern) or fnmatch(short(name), pattern)]
        if not matches:
            matches = [resolve(frame, pattern, "--without")]
        dropped.update(matches)
    if "run_id" in dropped:
        raise UserError("--without: run_id stays, because it identifies the rows")
    return frame.drop(columns=list(dropped))


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``tags.kl.family``, ``tags.kl.betas`` and ``tags.code`` where their sources are present."""
    derived: dict[str, Any] = {}
    if LABEL in frame:
        families_and_betas = [family_of(label) for label in frame[LABEL].fillna("").astype(str)]
        derived[FAMILY] = [family for family, _ in families_and_betas]
        derived[BETA] = [beta for _, beta in families_and_betas]
    if "tags.git.commit" in frame:
        # Runs of a store in which none was dirty lack the two other tags.
        git = frame.reindex(columns=["tags.git.commit", "tags.git.dirty", "tags.git.diff"], fill_value="").fillna("")
        commit = git["tags.git.commit"].str[:12]
        change = git["tags.git.diff"].mask(git["tags.git.diff"] == "", "dirty")
        derived[CODE] = commit + ("+" + change).where(git["tags.git.dirty"] == "true", "")
    return frame.assign(**derived)


def family_of(label: str) -> tuple[str, str]:
    """A label without its coefficients, and the coefficients.

    >>> family_of("0.1 k1_reverse_token in reward total + 0.05 k1_reverse_token in loss")
    ('k1_reverse_token in reward total + k1_reverse_token in loss', '0.1 + 0.05')
    >>> family_of("0.1 k3_reverse_token in loss + 0.1 abs_reverse_token in loss"), family_of("no KL")
    (('k3_reverse_token in loss + abs_reverse_token in loss', '0.1'), ('no KL', '0'))
    """
    if label == NO_KL:
        return NO_KL, "0"
    betas = []
    names = []
    for term in label.split(" + "):
        beta, space, name = term.partition(" ")
        # A label of another program is its own family, without a beta.
        if not beta or not space:
            return label, ""
        betas.append(beta)
        names.append(name)
    # Terms with one beta have one axis in figures.
    if len(set(betas)) == 1:
        betas = betas[:1]
    return " + ".join(names), " + ".join(betas)


def sort_by_groups(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """``frame`` sorted by its group columns, the first one first; runs of one group stay in order.

    Numbers are ordered as numbers, KL labels by family and then by beta, and runs without KL come first.
    """
    if not groups:
        return frame
    columns: list[str] = []
    for group in groups:
        if group == LABEL:
            # A label begins with its beta, so that sorting labels would tear families apart.
            columns += [FAMILY, BETA]
        else:
            columns.append(group)
    keys = list(frame[columns].fillna("").astype(str).map(sort_key).itertuples(index=False, name=None))
    return frame.iloc[sorted(range(len(keys)), key=keys.__getitem__)]


def sort_key(text: str) -> tuple[tuple[int, float, str], ...]:
    """The key by which values of a group are sorted.

    >>> sorted(["10", "9", "no KL", "a10", "a9", "1e-3"], key=sort_key)
    ['no KL', '1e-3', '9', '10', 'a9', 'a10']
    """
    if text == NO_KL:
        return ((0, 0.0, ""),)
    after_no_kl = (1, 0.0, "")
    # A whole number comes before a number within a text, and that before text.
    with contextlib.suppress(ValueError):
        number = float(text)
        if not math.isnan(number):
            return (after_no_kl, (0, number, ""))
    keys = [after_no_kl]
    # re.split gives the texts at even places and the numbers between them at odd ones.
    for place, part in enumerate(re.split(r"(\d+(?:\.\d+)?)", text)):
        is_number = place % 2 == 1
        if is_number:
            keys.append((1, float(part), ""))
        elif part:
            keys.append((2, 0.0, part))
    return tuple(keys)
