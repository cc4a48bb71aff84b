"""One self-contained HTML page per study: results, curves, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs, style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
What stands on the page is gathered by :mod:`kl_comedy.tracking.report`.

The pictures of a report, as data of SVG images: learning curves, and the first metric against KL.

What stands on the page of a report: the runs of a study as tables, pictures, certificates and commands.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.plots import NAME, draw_panels, line_label, of_many, title_of
from kl_comedy.tracking.runs import BETA, CODE, FAMILY, LABEL, history, newest_samples, short
from kl_comedy.tracking.tables import number

if TYPE_CHECKING:
    import pandas as pd


FOLDER = Path(__file__).parent / "templates"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``value`` sorts it; ``soft`` follows the text in a softer colour; ``bar`` draws (low, mean, high) in percent;
    ``link`` leads to an id of the page; ``details`` and ``commands`` unfold below the text; ``bad`` marks it."""

    text: str
    value: float | None = None
    soft: str = ""
    bar: tuple[float, float, float] | None = None
    link: str = ""
    details: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of a row names it."""

    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table of results with the pictures of the same runs; ``title`` is empty where the page has one part."""

    title: str
    results: Table
    pictures: tuple[Mapping[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the template shows. ``headline`` and ``warnings`` stand at the top, ``rules`` above the tables they govern,
    ``common`` is what all runs share."""

    title: str
    summary: str
    command: str
    parts: tuple[Part, ...]
    runs: Table
    configurations: tuple[Mapping[str, Any], ...]
    common: tuple[tuple[str, str], ...] = ()
    headline: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def render_page(page: Page) -> str:
    """The whole page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style, script = ((FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        page=page, style=Markup(style), script=Markup(script), style_hash=_hash(style), script_hash=_hash(script)
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def part_pictures(
    frame: pd.DataFrame,
    groups: Sequence[str],
    points: Mapping[str, pd.DataFrame],
    metrics: Sequence[str],
    kl: str | None,
    parts: Sequence[str],
) -> Iterable[Mapping[str, str]]:
    """Curves of the metrics recorded more than twice (a beginning and an end are in the table), then the frontier."""
    kl_keys = (LABEL, BETA, FAMILY)
    own = [group for group in groups if group in kl_keys or (group not in parts and frame[group].nunique() > 1)]
    lines, panels = of_many(frame, own)
    for metric in metrics:
        curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
        if curve["value"].notna().any() and curve["step"].nunique() > 2:
            figure = draw_panels({short(metric): curve}, frame, lines, panels=panels)
            yield {"alt": f"{short(metric)} over updates: mean and 95% band over seeds", "data": _svg(figure)}
    first = [metric for metric in metrics[:1] if metric != kl]
    if kl is not None and FAMILY in frame and first and (frame[first[0]].notna() & frame[kl].notna()).any():
        from kl_comedy.tracking.plots import frontier

        kept = [group for group in own if group not in (*kl_keys, NAME)]
        figure = frontier(frame, [FAMILY, *kept], [short(first[0])], kl)
        yield {
            "alt": f"{short(first[0])} against {short(kl)}: one line a KL family, hollow where runs collapsed",
            "data": _svg(figure),
        }


def _svg(figure: Any) -> str:
    """The figure as base64 of SVG, coordinates to a hundredth of a point: half the size, no visible difference."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kl_comedy", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = re.sub(r' d="[^"]*"', lambda found: _rounded(found[0]), out.getvalue().decode("utf-8"))
    return base64.b64encode(text.encode("utf-8")).decode("ascii")


def _rounded(path: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", path)


MOST_TEXT = 2000
"""Characters of a completion that are shown."""

CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
TARGET = "tags.kl.target"
PROVENANCE = (
    "config.",
    "git.",
    "version.",
    "host.",
    "slurm.",
    "data.",
    "reference.",
    "process.host",
    "sweep",
    "cell",
    "resume.",
    "failure.reason",
    "run.dir",
    "seed",
)

Keys = tuple[str, ...]


def build_page(
    uri: str,
    frame: pd.DataFrame,
    summary: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    *,
    title: str,
    command: str,
    rules: Sequence[str],
    warnings: Sequence[str],
    kl: str | None,
    parts: Sequence[str] = (),
) -> Page:
    """The page of the runs in ``frame``; ``summary`` is :func:`kl_comedy.tracking.compare.summarize` of them by
    ``groups``, of which ``parts`` are some: a table and its pictures for each of their values."""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in frame["status"].value_counts().items())
    code = f" Code: {', '.join(sorted(set(frame[CODE])))}." if CODE in frame else ""
    everyone = groups_of(frame, list(groups))
    links = {keys: f"configuration-{at}" for at, (keys, _) in enumerate(everyone, start=1)}
    points = {metric: history(uri, frame["run_id"], short(metric)) for metric in metrics}
    common = _common(frame)
    sections = [
        Part(
            title=title_of(parts, values),
            results=results_table(summary, frame, groups, metrics, links, parts, values),
            pictures=tuple(part_pictures(members, groups, points, metrics, kl, parts)),
        )
        for values, members in groups_of(frame, list(parts))
    ]
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
    summary: pd.DataFrame,
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    links: Mapping[Keys, str],
    parts: Sequence[str],
    values: Sequence[str],
) -> Table:
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
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    uri: str,
    links: Mapping[Keys, str],
    common: Mapping[str, str],
) -> Table:
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
                Cell(
                    text=known.get(CODE, "unknown"),
                    details=_provenance(row["run_id"], known, common),
                    commands=tuple(commands),
                ),
            )
        )
    names = ("run", "seed", "status", *(short(metric) for metric in metrics), "configuration", "code and provenance")
    return Table(names=names, rows=tuple(rows))


def configurations(
    uri: str,
    everyone: Sequence[tuple[Keys, pd.DataFrame]],
    groups: Sequence[str],
    metrics: Sequence[str],
    links: Mapping[Keys, str],
) -> Iterable[Mapping[str, Any]]:
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
