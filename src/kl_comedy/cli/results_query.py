"""What the ``results`` commands share: options that choose runs, groups and metrics, and notes on what is pooled."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kl_comedy.cli.common import check_choice
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.io import atomic_write

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_GROUP = ("params.name", "tags.kl.label")
DEFAULT_METRICS = ("eval/*/reward", "train/reward", "kl/exact_reverse_token")
STATUSES = ("finished", "running", "failed", "killed", "all")
DEFAULT_URI = "sqlite:///mlflow.db"

Uri = Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store or server.")]
Metrics = Annotated[list[str] | None, typer.Option(help="Metrics, comma-separated; * matches anything.")]
Baseline = Annotated[str | None, typer.Option(help="The row the others are compared with, by its name in the table.")]
Kl = Annotated[str | None, typer.Option(help="The KL metric to match or draw against; default: held-out, else train.")]
Interval = Annotated[str, typer.Option(help="95% interval: t (Student) or bootstrap.")]
Format = Annotated[str, typer.Option(help="text, markdown, csv, json, latex, or parquet with --out.")]
Out = Annotated[Path | None, typer.Option(help="File to write; default: stdout.")]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Options of every command that reads runs."""

    uri: Uri = DEFAULT_URI
    experiment: Annotated[str | None, typer.Option(help="Only this experiment; default: all.")] = None
    where: Annotated[str | None, typer.Option(help="Filter, e.g. \"seed = 0 and algorithm.advantage = 'rloo'\".")] = (
        None
    )

    def runs(self, *, mark_dead: bool = False) -> pd.DataFrame:
        """The runs frame. Raises :class:`RunFailed` where no run matches."""
        from kl_comedy.tracking.runs import runs_frame
        from kl_comedy.tracking.store import redact

        frame = runs_frame(self.uri, self.experiment, self.where, mark_dead=mark_dead)
        if frame.empty:
            store = f"{redact(self.uri)}" + (f", experiment {self.experiment!r}" if self.experiment else "")
            raise RunFailed(f"no runs in {store}" + (f" match {self.where!r}" if self.where else "; train one first"))
        return frame


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Runs with their values, in the order of panels and groups; columns of groups and metrics; what was said."""

    frame: pd.DataFrame
    groups: list[str]
    metrics: list[str]
    notes: list[str]

    def with_status(self, status: str) -> pd.DataFrame:
        return self.frame[self.frame["status"].isin(statuses_of(status))]


@dataclass(frozen=True, kw_only=True)
class Query(Source):
    """Options of every command that compares groups of runs."""

    group: Annotated[
        list[str] | None, typer.Option(help="Config keys or tags, comma-separated; default: by command.")
    ] = None
    status: Annotated[str, typer.Option(help=f"Which runs count: {', '.join(STATUSES)}.")] = "finished"
    keep_repeats: Annotated[
        bool, typer.Option("--keep-repeats", help="Count every run of the same configuration and seed.")
    ] = False
    of: Annotated[str, typer.Option(help="A run's value: last, first, best, lowest or mean:K (of the last K).")] = (
        "last"
    )
    collapse: Annotated[
        str | None, typer.Option(help="Rule of collapsed runs, as 'eval/heldout/reward < 0.5 start' (the default).")
    ] = None
    split_versions: Annotated[
        bool, typer.Option("--split-versions", help="Separate groups by the commit they ran on.")
    ] = False

    def select(
        self,
        metric: list[str] | None,
        default_group: list[str] | None = None,
        *,
        mark_dead: bool = False,
        families: bool = False,
        panels: list[str] | None = None,
        panels_option: str = "--panels",
    ) -> Selection:
        """The runs with their values of the metrics, and notes on what is left out, pooled, mixed or collapsed.

        ``families``: groups hold several betas on purpose. ``panels`` separate runs as groups do. Raises
        :class:`UserError` for a key, metric or rule that fits no run.
        """
        from kl_comedy.tracking import runs as reader

        statuses, notes = statuses_of(self.status), list[str]()
        reader.check_rule(self.of)
        frame = self.runs(mark_dead=mark_dead)
        groups, metrics = group_columns(frame, self.group or default_group), metric_columns(frame, metric)
        if self.split_versions and reader.CODE in frame:
            groups = list(dict.fromkeys([*groups, reader.CODE]))
        if not self.keep_repeats:
            every = len(frame)
            frame = reader.drop_repeats(frame, statuses)
            if every > len(frame):
                left_out = f"{every - len(frame)} runs repeat a configuration and seed and are left out"
                say(f"note: {left_out} (--keep-repeats counts them)", notes)
        separated = [*panel_columns(frame, panels, panels_option), *groups]
        separated += [reader.LABEL] if families and reader.LABEL in frame else []
        pooled = [reader.short(column) for column in reader.varying(frame, separated)]
        if pooled:
            names = ", ".join(pooled[:6]) + (f" and {len(pooled) - 6} more" if len(pooled) > 6 else "")
            say(f"note: some rows pool runs that differ in {names}; --group with the key separates them", notes)
        mixed = [reader.short(name).removeprefix("version.") for name in reader.mixed_code(frame, separated)]
        if mixed:
            names = ", ".join(mixed)
            say(
                f"warning: some rows mix runs of different code or packages ({names}); "
                "--split-versions separates them by commit",
                notes,
            )
        frame = self._with_collapsed(frame, notes)
        if self.of != "last":
            say(f"value of a run: {reader.rule_description(self.of)}", notes)
        values = reader.with_values(self.uri, reader.sort_by_groups(frame, separated), metrics, self.of)
        return Selection(frame=values, groups=groups, metrics=metrics, notes=notes)

    def _with_collapsed(self, frame: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
        """``collapsed`` by the rule asked for, or by the default one where its metric was measured."""
        from kl_comedy.statistics import DEFAULT_RULE, parse_rule
        from kl_comedy.tracking.runs import with_collapsed

        rule = parse_rule(self.collapse or DEFAULT_RULE)
        if self.collapse is None and any(f"metrics.{metric}" not in frame for metric in rule.metrics):
            return frame
        frame = with_collapsed(self.uri, frame, rule)
        count, unknown = int(frame["collapsed"].eq(True).sum()), int(frame["collapsed"].isna().sum())
        if count or self.collapse:
            more = f"; {unknown} measured nothing of it" if unknown else ""
            say(f"note: {count} of {len(frame)} runs collapsed ({rule.text}){more}; they stay in the means", notes)
        return frame


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """``function``, whose first parameter is one of the records above, as a command with the record's fields as
    options."""
    first, *others = inspect.signature(function).parameters.values()
    hints = get_type_hints(function, include_extras=True)
    record = hints[first.name]
    if not dataclasses.is_dataclass(record):
        return function
    types = get_type_hints(record, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    fields = [
        inspect.Parameter(field.name, keyword, annotation=types[field.name], default=field.default)
        for field in dataclasses.fields(record)
    ]

    @functools.wraps(function)
    def command(**options: Any) -> None:
        chosen = {field.name: options.pop(field.name) for field in fields if field.name in options}
        function(record(**chosen), **options)

    own = [parameter.replace(kind=keyword, annotation=hints[parameter.name]) for parameter in others]
    command.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    return command


def group_columns(frame: pd.DataFrame, group: list[str] | None, option: str = "--group") -> list[str]:
    from kl_comedy.tracking.runs import resolve

    if group is None:
        return [column for column in DEFAULT_GROUP if column in frame.columns]
    return list(dict.fromkeys(resolve(frame, key, option) for key in split(group)))


def panel_columns(frame: pd.DataFrame, panels: list[str] | None, option: str = "--panels") -> list[str]:
    return [] if panels is None or split(panels) == ["none"] else group_columns(frame, panels, option)


def metric_columns(frame: pd.DataFrame, metric: list[str] | None) -> list[str]:
    """Columns of the metrics asked for; by default those of ``DEFAULT_METRICS`` that exist."""
    from kl_comedy.tracking.runs import resolve

    present = [str(column) for column in frame.columns if str(column).startswith("metrics.")]
    columns: list[str] = []
    for name in split(metric) if metric else DEFAULT_METRICS:
        name = name.removeprefix("metrics.")
        hits = sorted(column for column in present if fnmatch(column, f"metrics.{name}"))
        columns += hits or ([resolve(frame[present], name, "--metric")] if metric else [])
    if not columns:
        names = ", ".join(column.removeprefix("metrics.") for column in present[:40]) or "(no metrics)"
        raise RunFailed(f"these runs have none of {', '.join(DEFAULT_METRICS)}; choose with --metric from: {names}")
    return list(dict.fromkeys(columns))


def kl_column(frame: pd.DataFrame, kl: str | None) -> str:
    """The column of the KL asked for, else the exact KL of a completion, held-out before train."""
    from kl_comedy.tracking.runs import resolve

    present = [str(name) for name in frame.columns if str(name).startswith("metrics.")]
    if kl is not None:
        return resolve(frame[present], kl, "--metric")
    for pattern in ("metrics.eval/*/kl/exact_reverse_sequence", "metrics.kl/exact_reverse_sequence"):
        hits = sorted(name for name in present if fnmatch(name, pattern))
        if hits:
            say(f"KL: {hits[0].removeprefix('metrics.')} (nats a completion)")
            return hits[0]
    raise UserError("--kl: these runs measured no exact KL of a completion; name another metric to match")


def statuses_of(status: str) -> tuple[str, ...]:
    chosen = [word.strip().lower() for word in status.split(",")]
    for word in chosen:
        check_choice("--status", word, STATUSES)
    return tuple(word.upper() for word in (STATUSES[:-1] if "all" in chosen else chosen))


def split(values: list[str]) -> list[str]:
    return [word.strip() for value in values for word in value.split(",") if word.strip()]


def check_format(format: str, out: Path | None, allowed: tuple[str, ...] | None = None) -> None:
    from kl_comedy.tracking.tables import FORMATS

    check_choice("--format", format, (*FORMATS, "parquet") if allowed is None else allowed)
    if format == "parquet" and out is None:
        raise UserError("--out: parquet is binary; name a file")


def say(message: str, notes: list[str] | None = None) -> None:
    """To stderr, and to ``notes`` where they are repeated elsewhere."""
    print(message, file=sys.stderr)
    if notes is not None:
        notes.append(message)


def write(frame: pd.DataFrame, format: str, out: Path | None) -> None:
    """``frame`` to stdout, or to ``out``, whose path is then printed."""
    from kl_comedy.tracking.tables import render

    if out is None:
        typer.echo(render(frame, format))
        return
    if format == "parquet":
        out.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(out, index=False)
    else:
        atomic_write(out, render(frame, format) + "\n")
    typer.echo(str(out))
