"""What stands on the page of a report: the runs of a study as tables, pictures, certificates and commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.derived import CODE, FAMILY, LABEL
from kl_comedy.tracking.panels import line_label, title_of
from kl_comedy.tracking.queries import history, short
from kl_comedy.tracking.report import Cell, Page, Part, Table
from kl_comedy.tracking.report_pictures import part_pictures
from kl_comedy.tracking.samples import newest_samples
from kl_comedy.tracking.stats import groups_of
from kl_comedy.tracking.tables import number

if TYPE_CHECKING:
    import pandas as pd

MOST_TEXT = 2000
"""Characters of a completion that are shown."""

CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
TARGET = "tags.kl.target"
PROVENANCE = (
    "config.", "git.", "version.", "host.", "slurm.", "data.", "reference.", "process.host", "sweep", "cell", "resume.",
    "failure.reason", "run.dir", "seed",
)  # fmt: skip

Keys = tuple[str, ...]


def build_page(
    uri: str, frame: pd.DataFrame, summary: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], *, title: str,
    command: str, rules: Sequence[str], warnings: Sequence[str], kl: str | None, parts: Sequence[str] = (),
) -> Page:  # fmt: skip
    """The page of the runs in ``frame``; ``summary`` is :func:`kl_comedy.tracking.stats.summarize` of them by
    ``groups``, of which ``parts`` are some: a table and its pictures for each of their values."""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in frame["status"].value_counts().items())
    code = f" Code: {', '.join(sorted(set(frame[CODE])))}." if CODE in frame else ""
    everyone = groups_of(frame, list(groups))
    links = {keys: f"configuration-{at}" for at, (keys, _) in enumerate(everyone, start=1)}
    points = {metric: history(uri, frame["run_id"], short(metric)) for metric in metrics}
    common = _common(frame)
    sections = [
        Part(
            title=title_of(parts, values), results=results_table(summary, frame, groups, metrics, links, parts, values),
            pictures=tuple(part_pictures(members, groups, points, metrics, kl, parts)),
        )
        for values, members in groups_of(frame, list(parts))
    ]  # fmt: skip
    return Page(
        title=title,
        summary=f"{len(frame)} runs ({counts}) of {len(everyone)} configurations.{code}",
        command=command,
        headline=tuple(headline(frame, summary, groups, metrics)),
        parts=tuple(sections),
        runs=runs_table(frame, groups, metrics, uri, links, common),
        configurations=tuple(configurations(uri, everyone, groups, metrics, links)),
        common=tuple(sorted(common.items())),
        rules=tuple(rules),
        warnings=tuple(warnings),
    )


def headline(
    frame: pd.DataFrame, summary: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str]
) -> Iterable[str]:
    """The extremes of the first metric, and how many runs collapsed where.

    A choice among many flatters: it says of how many. A mean of few seeds is extreme by chance, so only rows with at
    least as many as the median row compete.
    """
    metric = metrics[0]
    means = summary[(summary["metric"] == metric) & (summary["n"] > 0)]
    means = means[means["n"] >= means["n"].median()]
    if len(means) > 1:
        for word, at in (("Highest", means["mean"].idxmax()), ("Lowest", means["mean"].idxmin())):
            line = means.loc[at]
            name = line_label(groups, [str(line[group]) for group in groups])
            yield f"{word} mean of {short(metric)} among {len(means)}: {_mean(line)} (n={line['n']}), {name}."
    if "collapsed" in summary:
        lost = summary[summary["metric"] == metric]
        some, runs = int((lost["collapsed"] > 0).sum()), int(frame["collapsed"].eq(True).sum())
        yield f"Collapsed: {runs} of {len(frame)} runs, in {some} of {len(lost)} configurations."


def results_table(
    summary: pd.DataFrame, frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str],
    links: Mapping[Keys, str], parts: Sequence[str], values: Sequence[str],
) -> Table:  # fmt: skip
    """A row a configuration of this part, a column a metric: mean and interval; the first one drawn too. Keys of which
    the part has one value are its title's, or nobody's."""
    wanted = dict(zip(parts, values, strict=True))
    here = [keys for keys in links if all(dict(zip(groups, keys, strict=True))[part] == wanted[part] for part in parts)]
    shown = [group for at, group in enumerate(groups) if len({keys[at] for keys in here}) > 1] or list(groups)[-1:]
    shown = sorted(shown, key=lambda group: group not in (LABEL, FAMILY))
    lines: dict[Keys, dict[str, Mapping[Any, Any]]] = {keys: {} for keys in here}
    for line in summary.to_dict("records"):
        lines.get(tuple(str(line[group]) for group in groups), {})[line["metric"]] = line
    scale = _scale([lines[keys][metrics[0]]["mean"] for keys in here])
    targets = {keys: _targets(members) for keys, members in groups_of(frame, list(groups))}
    tail = [name for name in ("failed", "collapsed") if name in summary and (name != "failed" or summary[name].any())]
    rows = []
    for keys in here:
        given = dict(zip(groups, keys, strict=True))
        names = [Cell(text=given[key], value=_number(given[key])) for key in shown] or [Cell(text="all runs")]
        first = Cell(text=names[0].text or "(none)", value=names[0].value, link=links[keys])
        found = [lines[keys][metric] for metric in metrics]
        n = max(line["n"] for line in found)
        means = [_mean_cell(line, n, scale if at == 0 else None) for at, line in enumerate(found)]
        counts = [_runs_cell(n, found[0]["runs"]), *(_count_cell(name, found[0]) for name in tail)]
        rows.append((first, *names[1:], *means, *counts, Cell(text=targets[keys])))
    named = [short(key) for key in shown] or ["configuration"]
    return Table(names=(*named, *map(short, metrics), "runs", *tail, "descends"), rows=tuple(rows))


def runs_table(
    frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], uri: str, links: Mapping[Keys, str],
    common: Mapping[str, str],
) -> Table:  # fmt: skip
    """A row a run: its final metrics, where it comes from, and how to run it again."""
    rows = []
    for row in frame.to_dict("records"):
        known = {str(key): str(value) for key, value in row.items() if isinstance(value, str)}
        keys = tuple(str(known.get(group, "")) for group in groups)
        commands = filter(None, (_again(row["run_id"], uri), known.get("tags.run.command")))
        rows.append(
            (
                Cell(text=str(row["run_name"] or row["run_id"])),
                Cell(text=known.get("params.seed", ""), value=_number(known.get("params.seed"))),
                Cell(text=_status(row), bad=row.get("collapsed") is True or row["status"] == "FAILED"),
                *(_value_cell(row[metric]) for metric in metrics),
                Cell(text=line_label(groups, keys), link=links[keys]),
                Cell(text=known.get(CODE, "unknown"), details=_provenance(row["run_id"], known, common),
                     commands=tuple(commands)),
            )
        )  # fmt: skip
    names = ("run", "seed", "status", *(short(metric) for metric in metrics), "configuration", "code and provenance")
    return Table(names=names, rows=tuple(rows))


def configurations(
    uri: str, everyone: Sequence[tuple[Keys, pd.DataFrame]], groups: Sequence[str], metrics: Sequence[str],
    links: Mapping[Keys, str],
) -> Iterable[Mapping[str, Any]]:  # fmt: skip
    """Certificate, runs and completions of each group; the completions of its first finished run (else its first)."""
    for keys, members in everyone:
        finished = members[members["status"] == "FINISHED"]
        run = (finished if len(finished) else members).iloc[0]
        tags = {str(key): value for key, value in run.items() if isinstance(value, str)}
        yield {
            "id": links[keys],
            "label": line_label(groups, keys),
            "certificate": _certificate(tags),
            "runs": [
                (
                    f"seed {row.get('params.seed', '?')}, {_status(row)}: {_ends(row, metrics)}",
                    _again(row["run_id"], uri),
                )
                for row in members.to_dict("records")
            ],
            "samples": [_sample(row) for row in newest_samples(uri, str(run["run_id"]))],
        }


def _certificate(tags: Mapping[str, str]) -> list[tuple[str, str]]:
    prefixes = ["tags.kl"]
    while f"tags.kl.{len(prefixes) - 1}.verdict" in tags:
        prefixes.append(f"tags.kl.{len(prefixes) - 1}")
    found = [("terms", tags[LABEL]), ("regime", tags.get("tags.kl.regime", ""))] if LABEL in tags else []
    for prefix in prefixes if len(prefixes) > 2 else prefixes[:1]:
        name = "" if prefix == "tags.kl" else f"term {prefix.rpartition('.')[2]} "
        found += [
            (f"{name}{fact}".replace("_", " "), tags[f"{prefix}.{fact}"])
            for fact in CERTIFICATE
            if f"{prefix}.{fact}" in tags
        ]
    return [pair for pair in found if pair[1]]


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    text = str(row.get("completion", ""))
    shown = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} ... ({len(text)} characters)"
    facts = [(key, str(row[key])) for key in ("problem", "answer", "reward", "status", "stop_reason") if key in row]
    return {"text": shown, "facts": facts}


def _common(frame: pd.DataFrame) -> dict[str, str]:
    """The provenance that every run has alike; for one run, none."""
    if len(frame) < 2:
        return {}
    columns = [name for name in frame if str(name).startswith("tags.") and _is_provenance(str(name)[5:])]
    return {
        str(name)[5:]: str(frame[name].iloc[0])
        for name in columns
        if frame[name].notna().all() and frame[name].nunique() == 1
    }


def _provenance(run_id: str, known: Mapping[str, str], common: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    tags = {key.removeprefix("tags."): value for key, value in known.items() if key.startswith("tags.")}
    own = ((key, tags[key]) for key in sorted(tags) if _is_provenance(key) and key not in common)
    return (("run id", run_id), *own)


def _is_provenance(tag: str) -> bool:
    return tag.startswith(PROVENANCE)


def _targets(members: pd.DataFrame) -> str:
    """What the certificates say that the KL terms descend; ``not certified`` where no run carries one."""
    found = [str(value) for value in dict.fromkeys(members[TARGET].dropna())] if TARGET in members else []
    return " or ".join(target or "no target" for target in found) or "not certified"


def _again(run_id: Any, uri: str) -> str:
    return shlex.join(["kl-comedy", "reproduce", str(run_id), "--uri", uri])


def _ends(row: Mapping[Any, Any], metrics: Sequence[str]) -> str:
    values = [f"{short(metric)} {number(row[metric])}" for metric in metrics if not math.isnan(row[metric])]
    return f"seed {row.get('params.seed', '?')}, {_status(row)}: {', '.join(values) or 'no values'}"


def _status(row: Mapping[Any, Any]) -> str:
    collapsed = ", collapsed" if row.get("collapsed") is True else ""
    return f"{str(row['status']).lower()}{collapsed}"


def _mean(line: Mapping[Any, Any]) -> str:
    return f"{number(line['mean'])}{_bounds(line)}"


def _bounds(line: Mapping[Any, Any]) -> str:
    return "" if math.isnan(line["low"]) else f" [{number(line['low'])}, {number(line['high'])}]"


def _mean_cell(line: Mapping[Any, Any], n: int, scale: tuple[float, float] | None) -> Cell:
    if not line["n"]:
        return Cell(text="-", value=math.nan)
    count = "" if line["n"] == n else f" (n={line['n']})"
    bar = None
    if scale:
        ends = (line["mean"] if math.isnan(line[name]) else line[name] for name in ("low", "mean", "high"))
        low, mean, high = (100 * min(max((end - scale[0]) / (scale[1] - scale[0]), 0.0), 1.0) for end in ends)
        bar = (low, mean, high)
    return Cell(text=number(line["mean"]), soft=f"{_bounds(line)}{count}", value=line["mean"], bar=bar)


def _scale(found: Iterable[float]) -> tuple[float, float] | None:
    """Where bars begin and end: the range of the means, a tenth wider; None where there is none."""
    means = [value for value in found if math.isfinite(value)]
    if not means or min(means) == max(means):
        return None
    more = (max(means) - min(means)) / 10
    return min(means) - more, max(means) + more


def _runs_cell(n: int, runs: int) -> Cell:
    """How many runs the means rest on, of how many there are."""
    return Cell(text=str(n) if n == runs else f"{n} of {runs}", value=float(n))


def _count_cell(name: str, line: Mapping[Any, Any]) -> Cell:
    value = int(line[name])
    return Cell(text=str(value), value=float(value), bad=value > 0)


def _value_cell(value: float) -> Cell:
    return Cell(text="-" if math.isnan(value) else number(value), value=float(value))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None
