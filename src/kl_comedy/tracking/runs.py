"""Runs read back from an MLflow store, as pandas frames.

A runs frame has one row per run: ``run_id``, ``run_name``, ``experiment``, ``status``, ``start_time``,
``duration_s``, and ``params.*``, ``tags.*``, ``metrics.*`` (the last value of each), with ``tags.kl.family``,
``tags.kl.betas`` and ``tags.code`` derived. Wherever a key is asked for, its short name will do: ``seed`` for
``params.seed``, ``kl.label`` for the tag, ``train/reward`` for the metric.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value, nearest
from kl_comedy.statistics import CollapseRule
from kl_comedy.tracking import store
from kl_comedy.tracking.provenance import mark_dead_runs, search_runs

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger("kl_comedy.tracking")

RUN_COLUMNS = ("run_id", "run_name", "experiment", "status", "start_time", "duration_s")
PREFIXES = ("params.", "tags.", "metrics.")
LABEL, FAMILY, BETA, CODE = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "tags.code"
"""Columns: the run's KL terms in one short text, the same without betas, the betas, and commit plus change."""

NO_KL = "no KL"

SQL_INFINITY = 1.7976931348623157e308
"""What MLflow's database keeps in place of an infinite metric value."""

ENTITIES = {
    **dict.fromkeys(("params", "param", "parameters"), "params"),
    **dict.fromkeys(("tags", "tag"), "tags"),
    **dict.fromkeys(("metrics", "metric"), "metrics"),
    **dict.fromkeys(("attributes", "attribute", "run"), "attributes"),
}
ATTRIBUTES = ("status", "start_time", "end_time", "run_id", "run_name", "user_id", "artifact_uri", "created")
KEYWORDS = ("AND", "LIKE", "ILIKE", "RLIKE", "IN", "NOT", "IS", "NULL")

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>'[^']*'|"[^"]*")
    |(?P<operator>!=|<=|>=|=|<|>)
    |(?P<mark>[(),])
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./]))
    |(?P<name>(?:\w+\.)?`[^`]+`|(?:\w+\.)?"[^"]+"|[A-Za-z_][\w.\-/@:]*)""",
    re.VERBOSE,
)

RULES = {
    "last": "the last recorded value",
    "first": "the first recorded value",
    "best": "the highest recorded value: chosen in hindsight, so optimistic, the more the noisier the curve",
    "lowest": "the lowest recorded value: chosen in hindsight",
    "mean:K": "the mean of the last K recorded values",
}
"""Which of its recorded values a run's value of a metric is."""


def runs_frame(
    uri: str, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
) -> pd.DataFrame:
    """All runs of the store (or of one experiment) that match ``where``, newest first.

    ``mark_dead`` first marks this host's dead runs as FAILED. Raises :class:`UserError` for a store that is not
    there, an unknown experiment or a filter that cannot be read.
    """
    condition = translate(where)
    client = store.open_existing(uri)
    experiments = store.experiment_names(client, experiment)
    if mark_dead:
        try:
            mark_dead_runs(client, experiment)
        except Exception as error:  # a store that is only readable still answers queries
            log.warning("could not mark dead runs as failed: %s", store.first_line(error))
    try:
        frame = _query(client, experiments, condition.text)
    except Exception as error:
        if not where:
            raise
        raise UserError(
            f"--where: MLflow cannot read {where!r}: {store.first_line(error)}; "
            "example: seed = 0 and algorithm.advantage = 'rloo' and train/reward > 0.5"
        ) from error
    if not frame.empty:
        return with_derived(frame)
    if condition.keys:  # say so when nothing matched because no run has such a key
        columns = [str(name) for name in _query(client, experiments, "").columns]
        for key in condition.keys:
            if columns and key not in columns and not key.startswith("attributes."):
                near = nearest(short(key), {short(name) for name in columns})
                hint = f"; did you mean {near!r}?" if near else ""
                raise UserError(f"--where: got {where!r}; no run has {key!r}{hint}")
    return frame


def _query(client: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    """The runs of ``experiments`` (id to name) that match MLflow's filter ``where``, newest first, one row each."""
    import pandas as pd

    rows = []
    with _garbage_collector_paused():
        for run in search_runs(client, list(experiments), where):
            info, data = run.info, run.data
            ended = info.status != "RUNNING" and info.end_time
            seconds = (info.end_time - info.start_time) / 1000 if ended else None
            experiment = experiments[str(info.experiment_id)]
            head = (info.run_id, info.run_name, experiment, info.status, info.start_time, seconds)
            row = dict(zip(RUN_COLUMNS, head, strict=True))
            row |= {f"params.{key}": value for key, value in data.params.items()}
            row |= {f"tags.{key}": value for key, value in data.tags.items()}
            rows.append(row | {f"metrics.{key}": _logged_value(value) for key, value in data.metrics.items()})
    frame = pd.DataFrame(rows)
    keys = [name for prefix in PREFIXES for name in sorted(frame.columns) if name.startswith(prefix)]
    return frame[[*RUN_COLUMNS, *keys]] if rows else frame


def _logged_value(value: float) -> float:
    return value if abs(value) < SQL_INFINITY or math.isnan(value) else math.copysign(math.inf, value)


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """MLflow makes an object of every param, tag and metric; collecting garbage meanwhile takes 60% of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def history(uri: str, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
    """The curve of ``metric`` in each run: columns run_id, step, value; one row a step (the last logged wins)."""
    import pandas as pd

    client = store.open_existing(uri)
    rows = []
    with _garbage_collector_paused():
        for run_id in run_ids:
            points = sorted(client.get_metric_history(run_id, metric), key=lambda point: point.timestamp)
            by_step = {point.step: _logged_value(point.value) for point in points}
            rows += [(run_id, step, by_step[step]) for step in sorted(by_step)]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def read_runs(source: str | Path) -> pd.DataFrame:
    """The runs of a store (its address) or of a file that ``kl-comedy results export`` wrote (.parquet, .csv).

    Params and tags are texts, metrics are numbers, in either case. Raises :class:`UserError` for anything else.
    """
    import pandas as pd

    path = Path(source)
    if path.suffix not in (".parquet", ".csv"):
        return runs_frame(str(source))
    if not path.is_file():
        raise UserError(f"no such export: {path}")
    try:
        if path.suffix == ".parquet":
            frame = pd.read_parquet(path)
        else:
            texts = pd.read_csv(path, dtype=str, keep_default_na=False)
            numeric = [name for name in texts if str(name).startswith(("metrics.", "duration_s"))]
            frame = texts.mask(texts == "").assign(**{name: pd.to_numeric(texts[name]) for name in numeric})
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as an export: {str(error).splitlines()[0]}") from None
    if "run_id" not in frame or "status" not in frame:
        raise UserError(f"{path}: is no export of runs (it lacks run_id or status)")
    return frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """``text`` for MLflow; ``keys`` are the columns it names (``params.seed``, ...), for messages."""

    text: str
    keys: tuple[str, ...]


def translate(where: str | None) -> Filter:
    """``--where``, which is MLflow's filter language with short names, as a filter for MLflow.

    A name with a slash is a metric, a field of a run (status, start_time, ...) is an attribute, every other bare name
    is a param; ``params.``, ``tags.``, ``metrics.`` and ``attributes.`` are explicit. Raises :class:`UserError` for
    what MLflow cannot read (OR, stray characters).

    >>> translate("seed = 0 and train/reward > 0.5").text
    "params.`seed` = '0' AND metrics.`train/reward` > 0.5"
    """
    where = where or ""
    words: list[str] = []
    keys: list[str] = []
    entity = ""
    position = 0
    while position < len(where):
        match = _TOKEN.match(where, position)
        if match is None:
            example = "example: seed = 0 and algorithm.advantage = 'rloo'"
            raise UserError(f"--where: cannot read {where!r} at {where[position:]!r}; {example}")
        position, kind, token = match.end(), match.lastgroup, match[0]
        if kind == "name" and token.upper() == "OR":
            raise UserError(f"--where: got {where!r}; MLflow filters know AND but not OR: ask twice, or group instead")
        if kind == "name" and token.upper() in KEYWORDS:
            words.append(token.upper())
        elif kind == "name":
            entity, key = _entity_and_key(token)
            keys.append(f"{entity}.{key}")
            words.append(f"attributes.{key}" if entity == "attributes" else f"{entity}.`{key}`")
        elif kind == "number" and entity in ("params", "tags"):
            words.append(f"'{token}'")
        elif kind != "space":
            words.append(token)
    return Filter(text=" ".join(words).replace("( ", "(").replace(" )", ")").replace(" ,", ","), keys=tuple(keys))


def _entity_and_key(name: str) -> tuple[str, str]:
    prefix, _, rest = name.partition(".")
    if rest and prefix.lower() in ENTITIES:
        return ENTITIES[prefix.lower()], rest.strip('`"')
    key = name.strip('`"')
    if key in ATTRIBUTES:
        return "attributes", key
    return ("metrics" if "/" in key else "params"), key


def resolve(frame: pd.DataFrame, key: str, option: str) -> str:
    """The column that ``key`` means. Raises :class:`UserError` naming the nearest where there is none.

    >>> import pandas as pd
    >>> resolve(pd.DataFrame({"params.seed": ["0"]}), "seed", "--group")
    'params.seed'
    """
    for column in (key, *(prefix + key for prefix in PREFIXES), *([LABEL] if key == "kl" else [])):
        if column in frame.columns:
            return column
    columns = [str(column) for column in frame.columns]
    names = {short(column) for column in columns if option != "--metric" or column.startswith("metrics.")}
    near = nearest(key, names)
    hint = f"; did you mean {near!r}?" if near else ""
    if below := sorted(name for name in names if name.startswith(f"{key}.")):
        hint = f"; it is a group of keys: {', '.join(below[:8])}"
    if option == "--metric":
        hint += f"; these runs have: {', '.join(sorted(names)[:40]) or '(no metrics)'}"
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
    names = [str(name) for name in frame.columns]
    dropped: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if fnmatch(name, pattern) or fnmatch(short(name), pattern)]
        dropped |= set(matches or [resolve(frame, pattern, "--without")])
    if "run_id" in dropped:
        raise UserError("--without: run_id stays, because it identifies the rows")
    return frame[[name for name in names if name not in dropped]]


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``tags.kl.family``, ``tags.kl.betas`` and ``tags.code`` where their sources are present."""
    import pandas as pd

    derived: dict[str, list[str]] = {}
    if LABEL in frame:
        split = [family_of(label) for label in frame[LABEL].fillna("").astype(str)]
        derived |= {FAMILY: [family for family, _ in split], BETA: [betas for _, betas in split]}
    if "tags.git.commit" in frame:
        git = frame.reindex(columns=["tags.git.commit", "tags.git.dirty", "tags.git.diff"], fill_value="").fillna("")
        derived[CODE] = [code_of(*map(str, row)) for row in git.itertuples(index=False)]
    return pd.concat([frame, pd.DataFrame(derived, index=frame.index)], axis=1)


def family_of(label: str) -> tuple[str, str]:
    """A label without its coefficients, and the coefficients.

    >>> family_of("0.1 k1_reverse_token in reward total + 0.05 k1_reverse_token in loss")
    ('k1_reverse_token in reward total + k1_reverse_token in loss', '0.1 + 0.05')
    >>> family_of("0.1 k3_reverse_token in reward total + 0.1 k3_reverse_token in loss")
    ('k3_reverse_token in reward total + k3_reverse_token in loss', '0.1')
    >>> family_of("no KL")
    ('no KL', '0')
    """
    if label == NO_KL:
        return NO_KL, "0"
    terms = [term.split(" ", 1) for term in label.split(" + ")]
    if any(len(term) != 2 or not term[0] for term in terms):
        return label, ""
    betas = [beta for beta, _ in terms]
    return " + ".join(name for _, name in terms), " + ".join(betas[:1] if len(set(betas)) == 1 else betas)


def code_of(commit: str, dirty: str, diff: str) -> str:
    """Commit, and the hash of the change where there was one.

    >>> code_of("0123456789abcdef", "true", "beef"), code_of("0123456789abcdef", "false", "")
    ('0123456789ab+beef', '0123456789ab')
    """
    return commit[:12] + (f"+{diff or 'dirty'}" if dirty == "true" else "")


def sort_by_groups(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """``frame`` sorted by its group columns, the first one first; runs of one group keep their order.

    Numbers are ordered as numbers, KL labels by family and then by beta, and runs without KL come first.
    """
    if frame.empty or not groups:
        return frame
    values = frame[list(groups)].fillna("").astype(str).itertuples(index=False)
    keys = [[sort_key(name, text) for name, text in zip(groups, row, strict=True)] for row in values]
    return frame.iloc[sorted(range(len(frame)), key=keys.__getitem__)]


def sort_key(name: str, text: str) -> tuple[tuple[int, float, str], ...]:
    """The key by which values of group ``name`` are sorted.

    >>> sorted(["10", "9", "1e-3"], key=lambda text: sort_key("params.train.steps", text))
    ['1e-3', '9', '10']
    >>> labels = ["0.3 k3 in loss", "1.0 k1 in loss", "no KL", "0.05 k3 in loss"]
    >>> sorted(labels, key=lambda text: sort_key("tags.kl.label", text))
    ['no KL', '1.0 k1 in loss', '0.05 k3 in loss', '0.3 k3 in loss']
    """
    if name == LABEL:
        family, betas = family_of(text)
        return (*sort_key(FAMILY, family), *sort_key(BETA, betas))
    first = (0 if text == NO_KL else 1, 0.0, "")
    with contextlib.suppress(ValueError):
        if not math.isnan(float(text)):
            return (first, (0, float(text), ""))
    parts = re.split(r"(\d+(?:\.\d+)?)", text)  # text and numbers in turn
    return (first, *((1, float(part), "") if at % 2 else (2, 0.0, part) for at, part in enumerate(parts) if part))


def drop_repeats(frame: pd.DataFrame, statuses: Sequence[str] = ("FINISHED",)) -> pd.DataFrame:
    """Keep one run of each configuration and seed: a repeat is no new evidence in an interval over seeds.

    The newest of those with one of ``statuses`` stays, else the newest. Two runs are repeats when all params agree
    but those that say where a run writes (output, tracking.*, resume).
    """
    ignored = ("params.tracking.", "params.output", "params.resume")
    params = [name for name in frame.columns if name.startswith("params.") and not name.startswith(ignored)]
    if frame.empty or not params:
        return frame
    ranked = frame.assign(counted=frame["status"].isin(list(statuses)))
    newest = ranked.sort_values(["counted", "start_time"], ascending=False).drop(columns="counted")
    return newest[~newest[params].fillna("\0").duplicated()].sort_index()


def varying(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """Params, besides the seed, that differ between runs of one group: what a mean over the group pools."""
    ignored = ("params.tracking.", "params.output", "params.resume", "params.name")
    params = [name for name in frame.columns if name.startswith("params.") and not name.startswith(ignored)]
    return _differing(frame, [name for name in params if name.rpartition(".")[2] != "seed"], groups)


def mixed_code(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """``code`` and ``version.*`` tags that differ between runs of one group (package versions, Python)."""
    names = [name for name in frame.columns if name in (CODE, "tags.host.python") or name.startswith("tags.version.")]
    return _differing(frame, names, groups)


def _differing(frame: pd.DataFrame, columns: Sequence[str], groups: Sequence[str]) -> list[str]:
    """Those of ``columns`` that have several values within a group."""
    columns = [name for name in columns if name not in groups]
    if frame.empty or not columns:
        return []
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = frame[columns].fillna("\0").groupby(keys).nunique()
    return [name for name in columns if (counts[name] > 1).any()]


def tidy(uri: str, frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], of: str = "last") -> pd.DataFrame:
    """One row a run and metric: ``run_id``, ``status``, ``seed``, the short names of ``keys``, ``metric``, ``value``.

    ``of`` is one of :data:`RULES`. A run without a metric has NaN. Raises :class:`UserError` for a key or metric that
    no run has.
    """
    columns = [resolve(frame, metric, "--metric") for metric in metrics]
    groups = [resolve(frame, key, "--group") for key in dict.fromkeys(["seed", *keys])]
    wide = with_values(uri, frame, columns, of)[["run_id", "status", *groups, *columns]]
    long = wide.melt(id_vars=["run_id", "status", *groups], var_name="metric", value_name="value")
    return long.rename(columns=short).assign(metric=long["metric"].map(short))


def check_rule(of: str) -> str:
    """``of`` if it names a rule. Raises :class:`UserError`."""
    if of not in RULES and not re.fullmatch(r"mean:[1-9]\d*", of):
        raise bad_value("--of", of, [*RULES], "mean:5 is the mean of the last five")
    return of


def rule_description(of: str) -> str:
    """The rule in words."""
    return RULES["mean:K"].replace("K", of.split(":")[1]) if of.startswith("mean:") else RULES[of]


def with_values(uri: str, frame: pd.DataFrame, columns: Sequence[str], of: str) -> pd.DataFrame:
    """``frame`` with the metric ``columns`` replaced by each run's value under the rule ``of``.

    Points that are not finite take no part in best, lowest and mean; the last and first value are as recorded.
    """
    if check_rule(of) == "last":
        return frame
    values = {}
    for column in columns:
        points = history(uri, frame["run_id"], column.removeprefix("metrics."))
        values[column] = frame["run_id"].map(_values_by_run(points, of)).astype(float)
    return frame.assign(**values)


def _values_by_run(points: pd.DataFrame, of: str) -> dict[str, float]:
    """Run id to value; ``points`` has columns run_id, step, value, steps ascending within a run."""
    if of == "first":
        return dict(points.groupby("run_id")["value"].first())
    by_run = points[points["value"].map(math.isfinite)].groupby("run_id")["value"]
    if of.startswith("mean:"):
        return dict(by_run.apply(lambda values: values.tail(int(of.split(":")[1])).mean()))
    return dict(by_run.max() if of == "best" else by_run.min())


def with_collapsed(uri: str, frame: pd.DataFrame, rule: CollapseRule) -> pd.DataFrame:
    """``frame`` with ``collapsed``: True, False, or None for runs that measured nothing of what ``rule`` names.

    Raises :class:`UserError` where no run has a metric of the rule.
    """
    metrics = frame[[name for name in frame.columns if name.startswith("metrics.")]]
    for metric in rule.metrics:
        resolve(metrics, metric, "--collapse")
    starts = {metric: _values_by_run(history(uri, frame["run_id"], metric), "first") for metric in rule.starts}
    recorded = {}  # a missing last value is NaN whether NaN was logged or nothing
    for metric in rule.metrics:
        missing = frame.loc[frame[f"metrics.{metric}"].isna(), "run_id"]
        logged_nan = set(history(uri, missing, metric)["run_id"])
        recorded[metric] = set(frame["run_id"]) - set(missing) | logged_nan
    collapsed = []
    needed = ("run_id", "status", "tags.failure.reason", *(f"metrics.{metric}" for metric in rule.metrics))
    for row in frame[[name for name in frame.columns if name in needed]].to_dict("records"):
        run_id, reason = row["run_id"], row.get("tags.failure.reason")
        last = {metric: row[f"metrics.{metric}"] for metric in rule.metrics if run_id in recorded[metric]}
        first = {metric: values[run_id] for metric, values in starts.items() if run_id in values}
        reason = reason if isinstance(reason, str) else ""
        collapsed.append(rule.collapsed(last=last, first=first, status=row["status"], reason=reason))
    return frame.assign(collapsed=collapsed)


def newest_samples(uri: str, run_id: str, most: int = 4) -> list[dict[str, Any]]:
    """Up to ``most`` rows of the newest evaluation table of the run, else of its newest table of samples.

    Empty where the run kept none, or where its artifacts are not where the store says they are.
    """
    client = store.open_existing(uri)

    def json_files(folder: str) -> list[str]:
        items = client.list_artifacts(run_id, folder)
        return [path for item in items for path in (json_files(item.path) if item.is_dir else [item.path])]

    for folder in ("tables/eval", "tables/samples"):
        steps = {path: int(Path(path).stem) for path in json_files(folder) if re.search(r"/\d+\.json$", path)}
        if steps:
            with tempfile.TemporaryDirectory() as scratch:
                file = client.download_artifacts(run_id, max(steps, key=steps.__getitem__), scratch)
                return list(json.loads(Path(file).read_bytes()))[:most]
    return []
