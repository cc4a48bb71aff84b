"""The order of rows and lines: by what the groups say, not by when their first run happened to end.

Columns that follow from others: the KL family and its beta, and the code a run ran on.

``--where``: MLflow's filter language with short names for our own keys.

``seed = 0 and algorithm.advantage = 'rloo' and eval/pocket/reward > 0.5`` becomes what MLflow reads:
``params.`seed` = '0' AND ...``. A name with a slash is a metric, a field of a run (status, start_time, ...) is an
attribute, every other bare name is a param; ``params.``, ``tags.``, ``metrics.`` and ``attributes.`` say it outright.

Many runs at once from a store that is a database.

MLflow's ``search_runs`` builds objects for every param, tag and metric: 7 CPU seconds for 1,000 runs of ours
(`python bench/results_queries.py`). Here the same tables are read column-wise through MLflow's own engine and models,
so every database MLflow supports works, and MLflow's own filter decides which runs match. A tracking server is asked
through the API, page by page.

Reading runs back from an MLflow store, as pandas frames.

A runs frame has one row per run: ``run_id``, ``run_name``, ``experiment``, ``status``, ``start_time``,
``duration_s``, and ``params.*``, ``tags.*``, ``metrics.*`` (the last value of each), with ``tags.kl.family``,
``tags.kl.betas`` and ``tags.code`` derived. Wherever a key is asked for, the
short form will do: ``seed`` for ``params.seed``, ``kl.label`` for the tag, ``train/reward`` for the metric.

What a run's value of a metric is, by a stated rule; and which runs collapsed.

Completions that a run kept as tables, read back from the store.

Runs outside their store: what an export leaves out, and an export read back as the frame it was.
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


Key = tuple[tuple[int, float, str], ...]


def in_order(frame: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """``frame`` sorted by its group columns, the first one first; runs of one group keep their order.

    Numbers are ordered as numbers, KL labels by family and then by beta, and what has no KL stands first.
    """
    if frame.empty or not groups:
        return frame
    keyed = {name: frame[name].fillna("").astype(str) for name in groups}
    orders = {name: {text: rank(name, text) for text in set(texts)} for name, texts in keyed.items()}
    keys = [tuple(orders[name][texts.iloc[at]] for name, texts in keyed.items()) for at in range(len(frame))]
    return frame.iloc[sorted(range(len(frame)), key=keys.__getitem__)]


def rank(name: str, text: str) -> Key:
    """What a group's value is sorted by.

    >>> sorted(["10", "9", "1e-3"], key=lambda text: rank("params.train.steps", text))
    ['1e-3', '9', '10']
    >>> sorted(["0.3 k3 in loss", "1.0 k1 in loss", "no KL", "0.05 k3 in loss"], key=lambda t: rank("tags.kl.label", t))
    ['no KL', '1.0 k1 in loss', '0.05 k3 in loss', '0.3 k3 in loss']
    """
    if name == LABEL:
        family, betas = family_of(text)
        return (*rank(FAMILY, family), *_words(betas))
    return ((0 if text == NO_KL else 1, 0.0, ""), *_words(text))


def _words(text: str) -> Key:
    """Runs of digits as numbers, the rest as text; a text that is a number is one."""
    number = _number(text)
    if number is not None:
        return ((0, number, ""),)
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return tuple((1, float(part), "") if at % 2 else (2, 0.0, part) for at, part in enumerate(parts) if part)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value else None


LABEL, FAMILY, BETA, CODE = "tags.kl.label", "tags.kl.family", "tags.kl.betas", "tags.code"
NO_KL = "no KL"

_TERM = re.compile(r"^(?P<beta>\S+) (?P<name>.*)$")


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
    parts = [_TERM.match(part) for part in label.split(" + ")]
    if any(part is None for part in parts):
        return label, ""
    betas = [part["beta"] for part in parts if part]
    shown = betas[:1] if len(set(betas)) == 1 else betas
    return " + ".join(part["name"] for part in parts if part), " + ".join(shown)


def code_of(commit: str, dirty: str, diff: str) -> str:
    """Commit, and the hash of the change where there was one.

    >>> code_of("0123456789abcdef", "true", "beef"), code_of("0123456789abcdef", "false", "")
    ('0123456789ab+beef', '0123456789ab')
    """
    changed = f"+{diff or 'dirty'}" if dirty == "true" else ""
    return f"{commit[:12]}{changed}"


def with_derived(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with ``kl.family``, ``kl.betas`` and ``code`` where what they follow from is there."""
    import pandas as pd

    added: dict[str, pd.Series] = {}
    if LABEL in frame:
        labels = frame[LABEL].fillna("").astype(str)
        known = {label: family_of(label) for label in labels.unique()}
        added[FAMILY] = labels.map({label: found[0] for label, found in known.items()})
        added[BETA] = labels.map({label: found[1] for label, found in known.items()})
    if "tags.git.commit" in frame:
        parts = [_texts(frame, name) for name in ("tags.git.commit", "tags.git.dirty", "tags.git.diff")]
        added[CODE] = pd.Series([code_of(*row) for row in zip(*parts, strict=True)], index=frame.index)
    return pd.concat([frame, pd.DataFrame(added, index=frame.index)], axis=1) if added else frame


def mixed_code(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """``code`` and ``version.*`` tags that differ between runs of one group (package versions, Python)."""
    names = [name for name in frame.columns if name in (CODE, "tags.host.python") or name.startswith("tags.version.")]
    names = [name for name in names if name not in groups]
    if frame.empty or not names:
        return []
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = frame[names].fillna("").groupby(keys).nunique()
    return [name for name in names if (counts[name] > 1).any()]


def _texts(frame: pd.DataFrame, name: str) -> list[str]:
    return list(frame[name].fillna("").astype(str)) if name in frame else [""] * len(frame)


ENTITIES = {
    "params": "params",
    "param": "params",
    "parameters": "params",
    "tags": "tags",
    "tag": "tags",
    "metrics": "metrics",
    "metric": "metrics",
    "attributes": "attributes",
    "attribute": "attributes",
    "run": "attributes",
}
ATTRIBUTES = ("status", "start_time", "end_time", "run_id", "run_name", "user_id", "artifact_uri", "created")
WORDS = ("AND", "LIKE", "ILIKE", "RLIKE", "IN", "NOT", "IS", "NULL")

_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<string>'[^']*'|"[^"]*")
    |(?P<operator>!=|<=|>=|=|<|>)
    |(?P<mark>[(),])
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w./]))
    |(?P<name>(?:\w+\.)?`[^`]+`|(?:\w+\.)?"[^"]+"|[A-Za-z_][\w.\-/@:]*)""",
    re.VERBOSE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """``text`` for MLflow; ``keys`` are the columns it asks about (``params.seed``, ...), for messages."""

    text: str
    keys: tuple[str, ...]


def translate(where: str | None) -> Filter:
    """Short names -> MLflow. Raises :class:`UserError` for what MLflow cannot ask (OR, stray characters).

    >>> translate("seed = 0 and train/reward > 0.5").text
    "params.`seed` = '0' AND metrics.`train/reward` > 0.5"
    """
    words: list[str] = []
    keys: list[str] = []
    entity = ""
    for kind, token in _tokens(where or ""):
        upper = token.upper()
        if kind == "name" and upper == "OR":
            raise UserError(f"--where: got {where!r}; MLflow filters know AND but not OR: ask twice, or group instead")
        if kind == "name" and upper in WORDS:
            words.append(upper)
        elif kind == "name":
            entity, key = _resolve(token)
            keys.append(f"{entity}.{key}")
            words.append(f"attributes.{key}" if entity == "attributes" else f"{entity}.`{key}`")
        elif kind == "number" and entity in ("params", "tags"):
            words.append(f"'{token}'")
        else:
            words.append(token)
    return Filter(text=" ".join(words).replace("( ", "(").replace(" )", ")").replace(" ,", ","), keys=tuple(keys))


def _tokens(where: str) -> list[tuple[str, str]]:
    found, at = [], 0
    while at < len(where):
        match = _TOKEN.match(where, at)
        if match is None:
            raise UserError(
                f"--where: cannot read {where!r} at {where[at:]!r}; example: seed = 0 and algorithm.advantage = 'rloo'"
            )
        if match.lastgroup != "space":
            found.append((str(match.lastgroup), match[0]))
        at = match.end()
    return found


def _resolve(name: str) -> tuple[str, str]:
    """A name as (entity, key): explicit prefix, then attribute, then slash = metric, else param."""
    head, dot, rest = name.partition(".")
    if dot and head.lower() in ENTITIES:
        return ENTITIES[head.lower()], rest.strip('`"')
    bare = name.strip('`"')
    if bare in ATTRIBUTES:
        return "attributes", bare
    return ("metrics" if "/" in bare else "params"), bare


SQL_INFINITY = 1.7976931348623157e308
"""What MLflow's database keeps in place of an infinite metric value."""


def read_runs(client: Any, experiments: dict[str, str], where: str) -> pd.DataFrame:
    """The runs of ``experiments`` (id to name) that match MLflow's filter ``where``, newest first, one row each."""
    import pandas as pd

    rows = []
    with _garbage_collector_paused():
        for run in search_runs(client, list(experiments), where):
            info, data = run.info, run.data
            ended = info.status != "RUNNING" and info.end_time
            row = {
                "run_id": info.run_id,
                "run_name": info.run_name,
                "experiment": experiments[str(info.experiment_id)],
                "status": info.status,
                "start_time": info.start_time,
                "duration_s": (info.end_time - info.start_time) / 1000 if ended else None,
            }
            row |= {f"params.{key}": value for key, value in sorted(data.params.items())}
            row |= {f"tags.{key}": value for key, value in sorted(data.tags.items())}
            rows.append(row | {f"metrics.{key}": logged_value(value) for key, value in sorted(data.metrics.items())})
    return pd.DataFrame(rows)


def logged_value(value: float) -> float:
    """A metric's value as it was logged: MLflow's databases keep the largest float in place of infinity."""
    return value if abs(value) < SQL_INFINITY else math.copysign(math.inf, value)


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    """MLflow makes an object for every param, tag and metric; collecting in between takes 60% of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


log = logging.getLogger("kl_comedy.tracking")

PREFIXES = ("params.", "tags.", "metrics.")
KL_TAG = "tags.kl.label"
"""The column that ``kl`` means: the tag that spells the run's KL terms in one short text."""


def runs_frame(
    uri: str, experiment: str | None = None, where: str | None = None, *, mark_dead: bool = False
) -> pd.DataFrame:
    """All runs of the store (or of one experiment) that match ``where``, newest first.

    ``mark_dead`` first marks this host's dead runs as FAILED. Raises :class:`UserError` for a store that is not
    there, an unknown experiment or a filter that cannot be read.
    """
    import pandas as pd

    wanted = translate(where)
    client = store.open_existing(uri)
    names = store.experiment_names(client, experiment)
    if mark_dead:
        _mark_dead(client, experiment)
    frame = _search(client, names, wanted, where)
    if frame.empty:
        if wanted.keys:
            _explain_nothing(client, names, wanted, where)
        return pd.DataFrame()
    return with_derived(frame).copy()  # in one piece: hundreds of columns added one by one are slow to add to


def history(uri: str, run_ids: Iterable[str], metric: str) -> pd.DataFrame:
    """The curve of ``metric`` in each run: columns run_id, step, value; one row a step (the last logged wins)."""
    import pandas as pd

    client = store.open_existing(uri)
    rows = []
    for run_id in run_ids:
        points = sorted(client.get_metric_history(run_id, metric), key=lambda point: point.timestamp)
        by_step = {point.step: logged_value(point.value) for point in points}
        rows += [(run_id, step, by_step[step]) for step in sorted(by_step)]
    return pd.DataFrame(rows, columns=["run_id", "step", "value"])


def tidy(uri: str, frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], of: str = "last") -> pd.DataFrame:
    """One row a run and metric: ``run_id``, ``status``, ``seed``, the short names of ``keys``, ``metric``, ``value``.

    ``of`` says which of a run's values counts (``kl_comedy.tracking.runs.RULES``). A run without a metric has NaN.
    Raises :class:`UserError` for a key or metric that no run has.
    """
    pass

    columns = [resolve(frame, metric, "--metric") for metric in metrics]
    groups = [resolve(frame, key, "--group") for key in dict.fromkeys(["seed", *keys])]
    kept = with_values(uri, frame, columns, of)[["run_id", "status", *groups, *columns]]
    long = kept.melt(id_vars=["run_id", "status", *groups], var_name="metric", value_name="value")
    return long.rename(columns=short).assign(metric=long["metric"].map(short))


def resolve(frame: pd.DataFrame, key: str, option: str) -> str:
    """The column that ``key`` means. Raises :class:`UserError` naming the nearest where there is none.

    >>> import pandas as pd
    >>> resolve(pd.DataFrame({"params.seed": ["0"]}), "seed", "--group")
    'params.seed'
    """
    if key in frame.columns:
        return key
    for prefix in PREFIXES:
        if prefix + key in frame.columns:
            return prefix + key
    if key == "kl" and KL_TAG in frame.columns:
        return KL_TAG
    columns = [str(column) for column in frame.columns]
    if option == "--metric":
        columns = [column for column in columns if column.startswith("metrics.")]
    names = {short(column) for column in columns}
    below = sorted(name for name in names if name.startswith(f"{key}."))
    near = nearest(key, names)
    hint = f"; did you mean {near!r}?" if near else ""
    hint = f"; it is a group of keys: {', '.join(below[:8])}" if below else hint
    if option == "--metric":
        hint += f"; these runs have: {', '.join(sorted(names)[:40]) or '(no metrics)'}"
    raise UserError(f"{option}: got {key!r}; no such key in these runs{hint}")


def short(column: str) -> str:
    """A column's name without ``params.``, ``tags.`` or ``metrics.``."""
    for prefix in PREFIXES:
        column = column.removeprefix(prefix)
    return column


def drop_repeats(frame: pd.DataFrame, statuses: Sequence[str] = ("FINISHED",)) -> pd.DataFrame:
    """Keep one run of each configuration and seed: a repeat is no new evidence in an interval over seeds.

    Kept is the newest of those with one of ``statuses``, else the newest. Two runs are repeats when all params agree
    but those that say where a run writes (output, tracking.*, resume).
    """
    if frame.empty:
        return frame
    params = [
        column
        for column in frame.columns
        if column.startswith("params.")
        and not column.startswith(("params.tracking.", "params.output", "params.resume"))
    ]
    if not params:
        return frame
    ranked = frame.assign(counted=frame["status"].isin(list(statuses)))
    newest = ranked.sort_values(["counted", "start_time"], ascending=False).drop(columns="counted")
    return newest[~newest[params].fillna("\0").duplicated()].sort_index()


def varying(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """Params, besides the seed, that differ between runs of one group: what a mean over the group pools."""
    ignored = ("params.tracking.", "params.output", "params.resume", "params.name")
    columns = [
        column
        for column in frame.columns
        if column.startswith("params.")
        and column not in groups
        and column.rpartition(".")[2] != "seed"
        and not column.startswith(ignored)
    ]
    if frame.empty or not columns:
        return []
    keys = [frame[group].fillna("") for group in groups] or [frame["status"].map(lambda _: "")]
    counts = frame[columns].fillna("\0").groupby(keys).nunique()
    return [column for column in columns if (counts[column] > 1).any()]


def _mark_dead(client: Any, experiment: str | None) -> None:
    """Best effort: a store one may only read still answers questions."""
    try:
        mark_dead_runs(client, experiment)
    except Exception as error:
        log.warning("could not mark dead runs as failed: %s", store.first_line(error))


def _search(client: Any, experiments: dict[str, str], wanted: Filter, where: str | None) -> pd.DataFrame:
    import pandas as pd

    if not experiments:
        return pd.DataFrame()
    try:
        return read_runs(client, experiments, wanted.text)
    except Exception as error:
        if not where:
            raise
        raise UserError(
            f"--where: MLflow cannot read {where!r}: {store.first_line(error)}; "
            "example: seed = 0 and algorithm.advantage = 'rloo' and train/reward > 0.5"
        ) from error


def _explain_nothing(client: Any, experiments: dict[str, str], wanted: Filter, where: str | None) -> None:
    """Nothing matched: say so when it is because a key does not exist in any run."""
    known = [str(name) for name in read_runs(client, experiments, "").columns] if experiments else []
    for key in wanted.keys:
        if known and key not in known and not key.startswith("attributes."):
            near = nearest(short(key), {short(name) for name in known})
            raise UserError(
                f"--where: got {where!r}; no run has {key!r}" + (f"; did you mean {near!r}?" if near else "")
            )


RULES = {
    "last": "the last recorded value",
    "first": "the first recorded value",
    "best": "the highest recorded value: chosen in hindsight, so optimistic, the more the noisier the curve",
    "lowest": "the lowest recorded value: chosen in hindsight",
    "mean:K": "the mean of the last K recorded values",
}


def check_rule(of: str) -> str:
    """``of`` if it names a rule. Raises :class:`UserError`."""
    if of not in RULES and not re.fullmatch(r"mean:[1-9]\d*", of):
        raise bad_value("--of", of, [*RULES], "mean:5 is the mean of the last five")
    return of


def meaning(of: str) -> str:
    """The rule in words."""
    return RULES["mean:K"].replace("K", of.split(":")[1]) if of.startswith("mean:") else RULES[of]


def with_values(uri: str, frame: pd.DataFrame, columns: Sequence[str], of: str) -> pd.DataFrame:
    """``frame`` with the metric ``columns`` replaced by each run's value under the rule ``of``.

    Points that are not finite take no part in best, lowest and mean; the last and first value are what they are.
    """
    if check_rule(of) == "last":
        return frame
    found = {}
    for column in columns:
        points = history(uri, frame["run_id"], column.removeprefix("metrics."))
        found[column] = frame["run_id"].map(_by_rule(points, of)).astype(float)
    return frame.assign(**found)


def with_collapsed(uri: str, frame: pd.DataFrame, rule: CollapseRule) -> pd.DataFrame:
    """``frame`` with ``collapsed``: True, False, or None for runs that measured nothing of what ``rule`` names.

    Raises :class:`UserError` where no run has a metric of the rule.
    """
    for metric in rule.metrics:
        resolve(frame[[name for name in frame.columns if name.startswith("metrics.")]], metric, "--collapse")
    starts = {metric: _by_rule(history(uri, frame["run_id"], metric), "first") for metric in rule.starts}
    last = {metric: frame[f"metrics.{metric}"].tolist() for metric in rule.metrics}
    reasons = frame["tags.failure.reason"].fillna("").tolist() if "tags.failure.reason" in frame else [""] * len(frame)
    absent = _never_logged(uri, frame, rule)
    judged = []
    for at, (run_id, status, reason) in enumerate(zip(frame["run_id"], frame["status"], reasons, strict=True)):
        ends = {metric: values[at] for metric, values in last.items() if (run_id, metric) not in absent}
        begins = {metric: values[run_id] for metric, values in starts.items() if run_id in values}
        judged.append(rule.collapsed(last=ends, first=begins, status=status, reason=reason))
    return frame.assign(collapsed=judged)


def _never_logged(uri: str, frame: pd.DataFrame, rule: CollapseRule) -> set[tuple[str, str]]:
    """(run, metric) whose empty cell means that nothing was logged, not that NaN was."""
    found = set()
    for metric in rule.metrics:
        empty = frame.loc[frame[f"metrics.{metric}"].isna(), "run_id"]
        logged = set(history(uri, empty, metric)["run_id"]) if len(empty) else set()
        found |= {(run_id, metric) for run_id in empty if run_id not in logged}
    return found


def _by_rule(points: pd.DataFrame, of: str) -> dict[str, float]:
    """Run id to value; ``points`` has columns run_id, step, value, steps ascending within a run."""
    if of == "first":
        return dict(points.groupby("run_id")["value"].first())
    finite = points[points["value"].map(math.isfinite)]
    by_run = finite.groupby("run_id")["value"]
    if of == "best":
        return dict(by_run.max())
    if of == "lowest":
        return dict(by_run.min())
    return dict(by_run.apply(lambda values: values.tail(int(of.split(":")[1])).mean()))


FOLDERS = ("tables/eval", "tables/samples")
MOST_ROWS = 4


def newest_samples(uri: str, run_id: str, most: int = MOST_ROWS) -> list[dict[str, Any]]:
    """Up to ``most`` rows of the newest evaluation table of the run, else of its newest table of samples.

    Nothing where the run kept none, or where its artifacts are not where the store says they are.
    """
    client = store.open_existing(uri)
    for folder in FOLDERS:
        files = _files(client, run_id, folder)
        if files:
            return _rows(client, run_id, max(files, key=_step))[:most]
    return []


def _files(client: Any, run_id: str, folder: str) -> list[str]:
    found = []
    for item in client.list_artifacts(run_id, folder):
        found += _files(client, run_id, item.path) if item.is_dir else [item.path]
    return [path for path in found if path.endswith(".json")]


def _step(path: str) -> int:
    stem = Path(path).stem
    return int(stem) if stem.isdigit() else -1


def _rows(client: Any, run_id: str, path: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        content = Path(client.download_artifacts(run_id, path, scratch)).read_bytes()
    try:
        rows = json.loads(content)
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


SUFFIXES = (".parquet", ".csv")
NUMBERS = ("metrics.", "duration_s")


def without(frame: pd.DataFrame, patterns: Sequence[str]) -> pd.DataFrame:
    """``frame`` less the columns whose name or short name matches a pattern; ``*`` matches anything.

    Raises :class:`UserError` for a pattern that matches none, and for ``run_id``, by which rows are known.
    """
    names = [str(name) for name in frame.columns]
    dropped: set[str] = set()
    for pattern in patterns:
        hits = [name for name in names if fnmatch(name, pattern) or fnmatch(short(name), pattern)]
        dropped |= set(hits or [resolve(frame, pattern, "--without")])
    if "run_id" in dropped:
        raise UserError("--without: run_id stays: rows are known by it")
    return frame[[name for name in names if name not in dropped]]


def read_runs_exports(source: str | Path) -> pd.DataFrame:
    """The runs of a store (its address) or of a file that ``kl-comedy results export`` wrote (.parquet, .csv).

    Params and tags are texts, metrics are numbers, whichever it came from. Raises :class:`UserError` for what is
    neither.
    """
    import pandas as pd

    path = Path(source)
    if path.suffix not in SUFFIXES:
        return runs_frame(str(source))
    if not path.is_file():
        raise UserError(f"no such export: {path}")
    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read as an export: {str(error).splitlines()[0]}") from None
    if "run_id" not in frame or "status" not in frame:
        raise UserError(f"{path}: is no export of runs (it lacks run_id or status)")
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    import pandas as pd

    texts = pd.read_csv(path, dtype=str, keep_default_na=False)
    numbers = {name: pd.to_numeric(texts[name]) for name in texts if str(name).startswith(NUMBERS)}
    return texts.mask(texts == "").assign(**numbers)
