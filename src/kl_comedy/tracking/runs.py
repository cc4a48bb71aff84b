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

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import mark_dead_runs, search_runs

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("kl_comedy.tracking")

RUN_COLUMNS = ("run_id", "run_name", "experiment", "status", "start_time", "duration_s", "stale")
PREFIXES = ("params.", "tags.", "metrics.")
LABEL, FAMILY, BETA, CODE = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "tags.code"
"""Columns: the run's KL terms in one short text, the same without betas, the betas, and commit plus change."""

DERIVED = {FAMILY: LABEL, BETA: LABEL, CODE: "tags.git.commit"}

NO_KL = "no KL"
PLUGINS = "tags.plugins"
"""Column: name and hash of the source of each plugin of the run."""

UPDATES = "train/reward"
"""The metric that every update of a training run has."""

SQL_INFINITY = 1.7976931348623157e308
"""What MLflow's database stores in place of an infinite metric value."""

ENTITIES = {"param": "params", "parameter": "params", "tag": "tags", "metric": "metrics"}
ENTITIES |= dict.fromkeys(("attribute", "attr", "run"), "attributes")
"""MLflow's names of what a filter asks about, without a final s."""

ATTRIBUTES = ("status", "start_time", "end_time", "run_id", "run_name", "user_id", "artifact_uri", "created")
KEYWORDS = ("AND", "LIKE", "ILIKE", "RLIKE", "IN", "NOT", "IS", "NULL")
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
_COMPARE = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le}
_COMPARE |= {">": operator.gt, ">=": operator.ge}

EXPORTS = (".parquet", ".csv")
"""How the path of an export ends."""

COMPLETIONS, PLUGIN_SOURCE = "completions", "plugin_source"
"""Columns of an export beside those of a runs frame: JSON of sampled completions, and of plugins' source by name."""


CURVE_COLUMNS = ("run_id", "metric", "step", "value", "recorded")
"""Columns of an export's curves, one row a point. ``recorded`` is the length of the whole curve."""

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
        """The curve of ``metric`` in each run: columns run_id, step, value; one row a step (the last logged wins).

        An export has the column ``recorded`` too: how many points the curve had before it was thinned. Raises
        :class:`NoCurves` where an export lacks the metric.
        """
        ...

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """Up to ``most`` rows of the newest evaluation table of the run, else of its newest table of samples."""
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
    if path.suffix not in EXPORTS or "://" in str(uri):
        return Store(str(uri))
    return _read_export(path, *(file.stat().st_mtime_ns if file.is_file() else 0 for file in (path, curves_file(path))))


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
    """The runs of an MLflow store, read through MLflow's client."""

    uri: str

    def frame(
        self, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
    ) -> pd.DataFrame:
        """:meth:`Runs.frame`; MLflow filters."""
        text, keys = translate(where or "")
        client = store.open_existing(self.uri)
        try:
            every = {str(item.experiment_id): item.name for item in client.search_experiments()}
        except Exception as error:
            raise store.cannot_be_read(self.uri, error) from error
        experiments = {key: name for key, name in every.items() if experiment in (None, name)}
        if experiment is not None and not experiments:
            raise bad_value("--experiment", experiment, sorted(every.values()))
        if mark_dead:
            try:
                mark_dead_runs(client, experiment)
            except Exception as error:  # a store that is only readable still answers queries
                log.warning("could not mark dead runs as failed: %s", store.first_line(error))
        try:
            frame = _query(client, experiments, text)
        except Exception as error:
            if not where:
                raise store.cannot_be_read(self.uri, error) from error
            problem = f"MLflow cannot read {where!r}: {store.first_line(error)}"
            raise UserError(f"--where: {problem}; {WHERE_EXAMPLE}") from error
        if frame.empty and keys:
            unfiltered = _query(client, experiments, "")
            text, keys = translate(where or "", unfiltered.columns)  # a bare name that no run has as a param: a tag
            for key in keys if len(unfiltered) else ():
                if key in DERIVED:
                    name, source = short(key), short(DERIVED[key])
                    why = f"{name} is derived from {source}, and MLflow, which filters, does not have it"
                    raise UserError(f"--where: {why}; filter by {source}, as in {source} LIKE '%...%'")
                if not key.startswith("attributes."):
                    resolve(unfiltered, key, "--where")
            frame = _query(client, experiments, text)
        return frame

    def history(self, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
        """:meth:`Runs.history`."""
        import pandas as pd

        client = store.open_existing(self.uri)
        rows = []
        with _garbage_collector_paused():
            for run_id in run_ids:
                try:
                    points = sorted(client.get_metric_history(run_id, metric), key=lambda point: point.timestamp)
                except Exception as error:
                    raise store.cannot_be_read(self.uri, error) from error
                by_step = {point.step: _logged_value(point.value) for point in points}
                rows += [(run_id, step, by_step[step]) for step in sorted(by_step)]
        return pd.DataFrame(rows, columns=["run_id", "step", "value"]).astype({"step": int, "value": float})

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """:meth:`Runs.completions`; empty where the run's artifacts are not where the store says they are."""
        client = store.open_existing(self.uri)

        def json_files(folder: str) -> list[str]:
            items = client.list_artifacts(run_id, folder)
            return [path for item in items for path in (json_files(item.path) if item.is_dir else [item.path])]

        for folder in ("tables/eval", "tables/samples"):
            steps = {path: int(Path(path).stem) for path in json_files(folder) if re.search(r"/\d+\.json$", path)}
            if steps:
                with tempfile.TemporaryDirectory() as scratch:
                    file = client.download_artifacts(run_id, max(steps, key=steps.__getitem__), scratch)
                    try:
                        rows = json.loads(Path(file).read_bytes())
                    except (ValueError, RecursionError) as error:
                        raise UserError(f"{file} of run {run_id} is no readable table ({error})") from error
                    return [row for row in rows if isinstance(row, dict)][:most] if isinstance(rows, list) else []
        return []

    def config(self, run_id: str, folder: Path) -> Path:
        """:meth:`Runs.config`: the artifact that the run uploaded."""
        try:
            client = store.open_existing(self.uri)
            return Path(client.download_artifacts(run_id, "config/config.yaml", str(folder)))
        except Exception as error:
            reason = f"{store.first_line(error)}); runs upload it when they end"
            raise UserError(f"run {run_id} has no config that can be fetched ({reason}") from error

    def plugins(self, run_id: str, folder: Path) -> list[Path]:
        """:meth:`Runs.plugins`."""
        try:
            fetched = Path(store.open_existing(self.uri).download_artifacts(run_id, "plugins", str(folder)))
        except Exception:  # a run of an earlier version: the caller asks for the files
            return []
        return sorted(file for file in fetched.rglob("*") if file.is_file())


@functools.lru_cache(maxsize=4)
def _read_export(path: Path, *changed_at: int) -> Export:
    """The export at ``path``. Files that changed (``changed_at``) are read again."""
    import pandas as pd

    frame = read_table(path)
    if "run_id" not in frame or "status" not in frame:
        raise UserError(f"{path}: is no export of runs (it lacks run_id or status)")
    if path.suffix == ".csv":
        numeric = [name for name in frame if str(name).startswith(("metrics.", "duration_s"))]
        try:
            frame = frame.mask(frame == "").assign(**{name: pd.to_numeric(frame[name]) for name in numeric})
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: metrics are no numbers: {store.first_line(error)}") from None
    file = curves_file(path)
    points = read_table(file) if file.is_file() else pd.DataFrame(columns=CURVE_COLUMNS)
    if missing := [name for name in CURVE_COLUMNS if name not in points]:
        raise UserError(f"{file}: lacks {', '.join(missing)}")
    return Export(path, frame, dict(iter(points.groupby("metric", sort=False))))


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
        frame = self.runs.drop(columns=[COMPLETIONS, PLUGIN_SOURCE], errors="ignore")
        if experiment is not None:
            if experiment not in set(frame["experiment"]):
                raise bad_value("--experiment", experiment, sorted(set(frame["experiment"])))
            frame = frame[frame["experiment"] == experiment]
        for column, holds in conditions(frame, where or ""):
            frame = frame[[holds(value) for value in frame[column]]]
        empty = [name for name in frame if name.startswith(PREFIXES) and frame[name].isna().all()]
        return frame.drop(columns=empty if len(frame) else []).reset_index(drop=True).copy()

    def history(self, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
        """:meth:`Runs.history`."""
        import pandas as pd

        ids = list(run_ids)
        if ids and metric not in self.curves:
            raise NoCurves(f"the export has no curve of {metric}; `kl-comedy results export --curves` writes curves")
        of_run = dict(iter(self.curves[metric].groupby("run_id", sort=False))) if ids else {}
        curves = [of_run[run_id] for run_id in ids if run_id in of_run]
        names = [name for name in CURVE_COLUMNS if name != "metric"]
        points = pd.concat(curves, ignore_index=True)[names] if curves else pd.DataFrame(columns=names)
        return points.astype({"step": int, "value": float})

    def completions(self, run_id: str, most: int = 4) -> list[dict[str, Any]]:
        """:meth:`Runs.completions`."""
        rows: list[dict[str, Any]] = json.loads(self._cell(run_id, COMPLETIONS) or "[]")
        return rows[:most]

    def config(self, run_id: str, folder: Path) -> Path:
        """:meth:`Runs.config`, from the run's params; those that the export lacks are at their defaults."""
        from omegaconf import OmegaConf

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
            if not file.resolve().is_relative_to((folder / "plugins").resolve()):
                raise UserError(f"{self.path}: a plugin of run {run_id} is named {name!r}, outside its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            files.append(file)
        return files

    def _cell(self, run_id: str, column: str) -> str:
        values = self.runs.loc[self.runs["run_id"] == run_id, column] if column in self.runs else []
        return next((value for value in values if isinstance(value, str)), "")


def nested(texts: Mapping[str, str]) -> dict[str, Any]:
    """The values that dotted keys and texts as MLflow's params stand for; keys 0, 1, ... are a list.

    >>> nested({"kl.0.beta": "0.1", "kl.0.estimator": "k1", "lora": "null"})
    {'kl': [{'beta': 0.1, 'estimator': 'k1'}], 'lora': None}
    """

    def with_lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        values = {name: with_lists(value) for name, value in node.items()}
        is_list = values and set(values) == set(map(str, range(len(values))))
        return [values[str(at)] for at in range(len(values))] if is_list else values

    root: dict[str, Any] = {}
    for key, text in texts.items():
        node, (*parents, name) = root, key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        try:
            node[name] = json.loads(text)
        except ValueError:
            node[name] = text
    return {name: with_lists(value) for name, value in root.items()}


def _query(client: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    """The runs of ``experiments`` (id to name) that match MLflow's filter ``where``, newest first, one row each."""
    import pandas as pd

    rows = []
    with _garbage_collector_paused():
        for run in search_runs(client, list(experiments), where):
            info, data = run.info, run.data
            seconds = (info.end_time - info.start_time) / 1000 if info.status != "RUNNING" and info.end_time else None
            head = (info.run_id, info.run_name, experiments[str(info.experiment_id)], info.status, info.start_time)
            row = dict(zip(RUN_COLUMNS, (*head, seconds, _stale(data)), strict=True))
            metrics = {key: _logged_value(value) for key, value in data.metrics.items()}
            for prefix, values in zip(PREFIXES, (data.params, data.tags, metrics), strict=True):
                row |= {prefix + key: value for key, value in values.items()}
            rows.append(row)
    frame = pd.DataFrame(rows)
    keys = [name for prefix in PREFIXES for name in sorted(frame.columns) if name.startswith(prefix)]
    return with_derived(frame[[*RUN_COLUMNS, *keys]]) if rows else frame


def _stale(data: Any) -> str:
    """The metrics of a run whose last value is older than its last update, with that value's update; JSON or empty."""
    steps = {metric.key: metric.step for metric in data._metric_objs}  # no public attribute has the steps
    last = steps.get(UPDATES, max(steps.values(), default=0))
    stale = {name: step for name, step in sorted(steps.items()) if step < last}
    return json.dumps(stale) if stale else ""


def _logged_value(value: float) -> float:
    return value if abs(value) < SQL_INFINITY or math.isnan(value) else math.copysign(math.inf, value)


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

    if path.suffix not in (".csv", ".json", ".parquet"):
        raise UserError(f"{path}: allowed: a table that ends in .csv, .json or .parquet")
    if not path.is_file():
        raise UserError(f"no such table: {path}")
    try:
        if path.suffix == ".json":
            return pd.DataFrame(json.loads(path.read_text(encoding="utf-8")))
        csv = path.suffix == ".csv"
        return pd.read_csv(path, dtype=str, keep_default_na=False) if csv else pd.read_parquet(path)
    except Exception as error:  # readers of damaged files raise what they trip over
        raise UserError(f"{path} cannot be read as a table: {store.first_line(error)}") from None


def translate(where: str, columns: Collection[str] = ()) -> tuple[str, list[str]]:
    """``--where``, which is MLflow's filter language with short names, as MLflow's filter, and the columns it names.

    A name with a slash is a metric, a field of a run (status, start_time, ...) is an attribute, every other bare name
    is a param, or else a tag of ``columns``; ``params.``, ``tags.``, ``metrics.`` and ``attributes.`` are explicit.
    Raises :class:`UserError` for OR.

    >>> translate("seed = 0 and train/reward > 0.5")
    ("params.`seed` = '0' AND metrics.`train/reward` > 0.5", ['params.seed', 'metrics.train/reward'])
    """
    keys: list[str] = []

    def translated(match: re.Match[str]) -> str:
        token = match[0]
        if match["number"]:
            return f"'{token}'" if keys and keys[-1].startswith(("params.", "tags.")) else token
        if not match["name"] or token.upper() in KEYWORDS:
            return token.upper() if match["name"] else token
        if token.upper() == "OR":
            why = "MLflow filters know AND but not OR: ask twice, or group instead"
            raise UserError(f"--where: got {where!r}; {why}")
        prefix, _, key = token.partition(".")
        entity = ENTITIES.get(prefix.lower().removesuffix("s"))
        if not key or entity is None:
            entity, key = "metrics" if "/" in token else "params", token
            entity = "attributes" if token in ATTRIBUTES else entity
            if entity == "params" and f"tags.{key}" in columns and f"params.{key}" not in columns:
                entity = "tags"
        key = key.strip('`"')
        keys.append(f"{entity}.{key}")
        return keys[-1] if entity == "attributes" else f"{entity}.`{key}`"

    return _TOKEN.sub(translated, where), keys


def conditions(frame: pd.DataFrame, where: str) -> list[tuple[str, Callable[[Any], bool]]]:
    """``--where`` as columns of ``frame``, each with what its value must satisfy; as MLflow decides.

    A run without a value satisfies only IS NULL. Raises :class:`UserError` for what is no condition, and for a key
    that no run has.
    """
    text, _ = translate(where, frame.columns)
    clauses: list[tuple[str, Callable[[Any], bool]]] = []
    at = 0
    while at < len(text.rstrip()):
        match = _CONDITION.match(text, at)
        if match is None:
            raise UserError(f"--where: cannot read {text[at:].strip()!r}; {WHERE_EXAMPLE}")
        at = match.end()
        key = match["key"].strip("`")
        column = resolve(frame, key if match["entity"] == "attributes" else f"{match['entity']}.{key}", "--where")
        sign, value = " ".join(match["sign"].upper().split()), match["value"] or ""
        number = match["entity"] == "metrics" or column == "start_time"
        words = [word[1:-1] for word in re.findall(r"'[^']*'|\"[^\"]*\"", value)]
        try:
            clauses.append((column, _condition(sign, float(value) if number and value else words)))
        except (ValueError, IndexError, KeyError):
            raise UserError(f"--where: cannot read {match[0].strip()!r}; {WHERE_EXAMPLE}") from None
    return clauses


def _condition(sign: str, given: float | list[str]) -> Callable[[Any], bool]:
    """What a value must satisfy: a comparison with a number, or with the first of several texts."""

    def missing(value: Any) -> bool:
        return value is None or value != value

    if sign in ("IS NULL", "IS NOT NULL"):
        return lambda value: missing(value) == (sign == "IS NULL")
    if isinstance(given, list) and sign in ("IN", "NOT IN"):
        return lambda value: not missing(value) and (value in given) == (sign == "IN")
    if isinstance(given, list) and sign in ("LIKE", "ILIKE"):
        parts = (".*" if part == "%" else "." if part == "_" else re.escape(part) for part in given[0])
        pattern = re.compile("".join(parts), re.DOTALL | (re.IGNORECASE if sign == "ILIKE" else 0))
        return lambda value: not missing(value) and pattern.fullmatch(value) is not None
    right = given if isinstance(given, float) else given[0]
    compare = {name: _COMPARE[name] for name in (_COMPARE if isinstance(right, float) else ("=", "!="))}[sign]
    return lambda value: not missing(value) and bool(compare(value, right))


def matching_metrics(frame: pd.DataFrame, pattern: str) -> list[str]:
    """The columns of the metrics that ``pattern`` names, in the order of the alphabet; ``*`` matches anything.

    >>> import pandas as pd
    >>> matching_metrics(pd.DataFrame({"metrics.eval/a/reward": [1.0], "params.seed": ["0"]}), "eval/*/reward")
    ['metrics.eval/a/reward']
    """
    column_pattern = f"metrics.{pattern.removeprefix('metrics.')}"
    return sorted(column for column in frame.columns if fnmatch(column, column_pattern))


def resolve(frame: pd.DataFrame, key: str, option: str) -> str:
    """The column that ``key`` means. Raises :class:`UserError` naming the nearest where there is none.

    >>> import pandas as pd
    >>> resolve(pd.DataFrame({"params.seed": ["0"]}), "seed", "--group")
    'params.seed'
    """
    for column in (key, *(prefix + key for prefix in PREFIXES), *([LABEL] if key == "kl" else [])):
        if column in frame.columns:
            return column
    of_metric = option in ("--metric", "--kl", "metrics")
    names = sorted({short(name) for name in frame if not of_metric or name.startswith("metrics.")})
    near, below = nearest(short(key), names), [name for name in names if name.startswith(f"{key}.")]
    near = next((prefix + near for prefix in PREFIXES if near == short(key) and prefix + near in frame), near)
    hint = f"; did you mean {near!r}?" if near else ""
    if below:
        hint = f"; it is a group of keys: {', '.join(below[:8])}"
    if of_metric:
        hint += f"; these runs have: {', '.join(names[:40]) or '(no metrics)'}"
    raise UserError(f"{option}: got {key!r}; no such key in these runs{hint}")


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
        matches = [name for name in frame if fnmatch(name, pattern) or fnmatch(short(name), pattern)]
        dropped |= set(matches or [resolve(frame, pattern, "--without")])
    if "run_id" in dropped:
        raise UserError("--without: run_id stays, because it identifies the rows")
    return frame.drop(columns=list(dropped))


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``tags.kl.family``, ``tags.kl.betas`` and ``tags.code`` where their sources are present."""
    derived: dict[str, Any] = {}
    if LABEL in frame:
        derived[FAMILY], derived[BETA] = zip(*map(family_of, frame[LABEL].fillna("").astype(str)), strict=True)
    if "tags.git.commit" in frame:
        git = frame.reindex(columns=["tags.git.commit", "tags.git.dirty", "tags.git.diff"], fill_value="").fillna("")
        commit, dirty, diff = (git[name] for name in git)
        derived[CODE] = commit.str[:12] + ("+" + diff.mask(diff == "", "dirty")).where(dirty == "true", "")
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
    terms = [term.partition(" ") for term in label.split(" + ")]
    if not all(beta and space for beta, space, _ in terms):
        return label, ""
    betas = [beta for beta, _, _ in terms]
    return " + ".join(name for _, _, name in terms), " + ".join(betas[:1] if len(set(betas)) == 1 else betas)


def sort_by_groups(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """``frame`` sorted by its group columns, the first one first; runs of one group stay in order.

    Numbers are ordered as numbers, KL labels by family and then by beta, and runs without KL come first.
    """
    columns = [column for group in groups for column in ((FAMILY, BETA) if group == LABEL else (group,))]
    keys = list(frame[columns].fillna("").astype(str).map(sort_key).itertuples(index=False, name=None))
    return frame.iloc[sorted(range(len(keys)), key=keys.__getitem__)] if groups else frame


def sort_key(text: str) -> tuple[tuple[int, float, str], ...]:
    """The key by which values of a group are sorted.

    >>> sorted(["10", "9", "no KL", "a10", "a9", "1e-3"], key=sort_key)
    ['no KL', '1e-3', '9', '10', 'a9', 'a10']
    """
    first = (0 if text == NO_KL else 1, 0.0, "")
    with contextlib.suppress(ValueError):
        if not math.isnan(float(text)):
            return (first, (0, float(text), ""))
    parts = re.split(r"(\d+(?:\.\d+)?)", text)  # text and numbers in turn
    return (first, *((1, float(part), "") if at % 2 else (2, 0.0, part) for at, part in enumerate(parts) if part))
