"""One self-contained HTML page per study: results, curves, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs, style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.derived import BETA, CODE, FAMILY, LABEL
from kl_comedy.tracking.plots import curves, draw
from kl_comedy.tracking.queries import short
from kl_comedy.tracking.samples import newest_samples
from kl_comedy.tracking.stats import groups_of
from kl_comedy.tracking.tables import number

if TYPE_CHECKING:
    import pandas as pd

FOLDER = Path(__file__).parent / "templates"
MOST_TEXT = 2000
"""Characters of a completion that are shown."""

CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
PROVENANCE = (
    "config.", "git.", "version.", "host.", "slurm.", "data.", "reference.", "process.host", "sweep", "cell", "resume.",
    "failure.reason", "run.dir", "seed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``value`` sorts it; ``details`` unfold below the text; ``code`` is shown as a command."""

    text: str
    value: float | None = None
    details: tuple[tuple[str, str], ...] = ()
    code: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the template shows. ``warnings`` stand at the top, ``rules`` above the table they govern."""

    title: str
    summary: str
    command: str
    results: Table
    runs: Table
    pictures: tuple[Mapping[str, str], ...]
    configurations: tuple[Mapping[str, Any], ...]
    rules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def render_page(page: Page) -> str:
    """The whole page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style, script = ((FOLDER / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("report.html.j2").render(
        page=page, style=Markup(style), script=Markup(script), style_hash=_hash(style), script_hash=_hash(script)
    )


def build_page(
    uri: str, frame: pd.DataFrame, summary: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], *, title: str,
    command: str, rules: Sequence[str], warnings: Sequence[str], kl: str | None,
) -> Page:  # fmt: skip
    """The page of the runs in ``frame``; ``summary`` is :func:`kl_comedy.tracking.stats.summarize` of them."""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in frame["status"].value_counts().items())
    code = f" Code: {', '.join(sorted(set(frame[CODE])))}." if CODE in frame else ""
    return Page(
        title=title,
        summary=f"{len(frame)} runs ({counts}) of {len(groups_of(frame, list(groups)))} configurations.{code}",
        command=command,
        results=results_table(summary, groups, metrics),
        runs=runs_table(frame, metrics, uri),
        pictures=tuple(pictures(uri, frame, groups, metrics, kl)),
        configurations=tuple(configurations(uri, frame, groups)),
        rules=tuple(rules),
        warnings=tuple(warnings),
    )


def results_table(summary: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str]) -> Table:
    """A row a group, a column a metric: mean and interval, sorted by the mean."""
    rows: dict[tuple[str, ...], list[Cell]] = {}
    tail = [name for name in ("runs", "failed", "collapsed") if name in summary]
    for line in summary.to_dict("records"):
        keys = tuple(line[group] for group in groups)
        rows.setdefault(keys, [Cell(text=str(key), value=_number(key)) for key in keys]).append(_mean_cell(line))
    for line in summary.drop_duplicates(list(groups)).to_dict("records") if groups else summary.to_dict("records")[:1]:
        keys = tuple(line[group] for group in groups)
        rows[keys] += [Cell(text=str(line[name]), value=float(line[name])) for name in tail]
    names = (*(short(group) for group in groups), *(short(metric) for metric in metrics), *tail)
    return Table(names=names, rows=tuple(tuple(row) for row in rows.values()))


def runs_table(frame: pd.DataFrame, metrics: Sequence[str], uri: str) -> Table:
    """A row a run: its final metrics, where it comes from, and how to run it again."""
    rows = []
    for row in frame.to_dict("records"):
        known = {str(key): str(value) for key, value in row.items() if isinstance(value, str)}
        again = shlex.join(["kl-comedy", "reproduce", str(row["run_id"]), "--uri", uri])
        cells = [
            Cell(text=str(row["run_name"] or row["run_id"])),
            Cell(text=known.get("params.seed", ""), value=_number(known.get("params.seed"))),
            Cell(text=_status(row)),
            *(_value_cell(row[metric]) for metric in metrics),
            Cell(text=known.get(CODE, "unknown"), details=_provenance(row["run_id"], known)),
            Cell(text="\n".join(filter(None, (again, known.get("tags.run.command")))), code=True),
        ]
        rows.append(tuple(cells))
    names = ("run", "seed", "status", *(short(metric) for metric in metrics), "code and provenance", "reproduce")
    return Table(names=names, rows=tuple(rows))


def pictures(
    uri: str, frame: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], kl: str | None
) -> Iterable[Mapping[str, str]]:
    """Learning curves of each metric, and reward against KL, as data of SVG images."""
    for metric in (short(name) for name in metrics):
        found = curves(uri, frame, list(groups), metric)
        if any(len(curve) for curve in found.values()):
            yield {"alt": f"{metric} over updates: mean and 95% band over seeds", "data": _svg(draw({metric: found}))}
    if kl is not None and FAMILY in frame and any(frame[metric].notna().any() for metric in metrics):
        from kl_comedy.tracking.pictures import frontier

        shown = [short(metric) for metric in metrics[:1] if metric != kl]
        if shown:
            kept = [group for group in groups if group not in (LABEL, BETA, FAMILY)]
            figure = frontier(frame, [FAMILY, *kept], shown, kl)
            yield {"alt": f"{shown[0]} against {short(kl)}: one line a KL family, hollow where runs collapsed",
                   "data": _svg(figure)}  # fmt: skip


def configurations(uri: str, frame: pd.DataFrame, groups: Sequence[str]) -> Iterable[Mapping[str, Any]]:
    """Certificate and completions of each group, from its first finished run (else its first)."""
    for keys, members in groups_of(frame, list(groups)):
        finished = members[members["status"] == "FINISHED"]
        run = (finished if len(finished) else members).iloc[0]
        tags = {str(key): value for key, value in run.items() if isinstance(value, str)}
        yield {
            "label": ", ".join(f"{short(group)}: {key}" for group, key in zip(groups, keys, strict=True)) or "all runs",
            "certificate": _certificate(tags),
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


def _provenance(run_id: str, known: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    tags = {key.removeprefix("tags."): value for key, value in known.items() if key.startswith("tags.")}
    return (("run id", run_id), *((key, tags[key]) for key in sorted(tags) if key.startswith(PROVENANCE)))


def _status(row: Mapping[str, Any]) -> str:
    collapsed = ", collapsed" if row.get("collapsed") is True else ""
    return f"{str(row['status']).lower()}{collapsed}"


def _mean_cell(line: Mapping[Any, Any]) -> Cell:
    if not line["n"]:
        return Cell(text="-", value=math.nan)
    bounds = "" if math.isnan(line["low"]) else f" [{number(line['low'])}, {number(line['high'])}]"
    return Cell(text=f"{number(line['mean'])}{bounds} n={line['n']}", value=line["mean"])


def _value_cell(value: float) -> Cell:
    return Cell(text="-" if math.isnan(value) else number(value), value=float(value))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "kl_comedy", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return base64.b64encode(out.getvalue()).decode("ascii")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
