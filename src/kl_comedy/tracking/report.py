"""A study as one self-contained HTML page: results, pictures, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs; style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.plots import NAME, frontier, group_title, line_label, lines_and_panels, plot_curves
from kl_comedy.tracking.runs import BETA, CODE, FAMILY, LABEL, history, newest_samples, short
from kl_comedy.tracking.tables import bounds, number

if TYPE_CHECKING:
    import pandas as pd

TEMPLATES = Path(__file__).parent / "templates"
LONGEST_COMPLETION = 2000
"""Characters of a completion that are shown."""

CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
TARGET = "tags.kl.target"
PROVENANCE = (
    *("config.", "git.", "version.", "host.", "slurm.", "data.", "reference.", "process.host", "sweep", "cell"),
    *("resume.", "failure.reason", "run.dir", "seed"),
)
"""Tags with these beginnings say where a run comes from."""

Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``value`` sorts it; ``soft`` follows the text in a softer colour; ``bar`` draws (low, mean, high) in percent;
    ``link`` leads to an id of the page; ``details`` and ``commands`` unfold below the text; ``bad`` marks it."""

    text: str
    value: float | None = None
    soft: str = ""
    bar: tuple[float, ...] | None = None
    link: str = ""
    details: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    bad: bool = False


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of a row names it."""

    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def render_page(**page: Any) -> str:
    """The page as HTML; ``page`` has what the template ``report.html.j2`` shows, see :func:`build_page`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    inline: dict[str, Any] = {}
    for name, suffix in (("style", "css"), ("script", "js")):
        text = (TEMPLATES / f"report.{suffix}").read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        inline |= {name: Markup(text), f"{name}_hash": f"sha256-{digest}"}
    loader = FileSystemLoader(TEMPLATES)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2").render(page=page, **inline)


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
) -> str:
    """The page of the runs in ``frame``; ``summary`` is :func:`kl_comedy.tracking.compare.summarize` of them by
    ``groups``, of which ``parts`` are some: a table and its pictures for each of their values."""
    counts = ", ".join(f"{count} {name.lower()}" for name, count in frame["status"].value_counts().items())
    code = f" Code: {', '.join(sorted(set(frame[CODE])))}." if CODE in frame else ""
    configurations = groups_of(frame, groups)
    links = {keys: f"configuration-{at}" for at, (keys, _) in enumerate(configurations, start=1)}
    points = {metric: history(uri, frame["run_id"], short(metric)) for metric in metrics}
    shared = _shared_provenance(frame)
    sections = []
    for values, members in groups_of(frame, parts):
        wanted = dict(zip(parts, values, strict=True))
        inside = [keys for keys in links if wanted.items() <= dict(zip(groups, keys, strict=True)).items()]
        results = results_table(summary, frame, groups, metrics, {keys: links[keys] for keys in inside})
        pictures = list(_pictures(members, groups, points, metrics, kl, parts))
        sections.append({"title": group_title(parts, values), "results": results, "pictures": pictures})
    return render_page(
        title=title,
        summary=f"{len(frame)} runs ({counts}) of {len(configurations)} configurations.{code}",
        command=command,
        headline=list(headline(frame, summary, groups, metrics)),
        parts=sections,
        runs=runs_table(frame, groups, metrics, uri, links, shared),
        configurations=[
            _configuration(uri, keys, members, groups, metrics, links[keys]) for keys, members in configurations
        ],
        common=sorted(shared.items()),
        rules=rules,
        warnings=warnings,
    )


def headline(
    frame: pd.DataFrame, summary: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str]
) -> Iterable[str]:
    """The extremes of the first metric, and how many runs collapsed in how many configurations.

    A choice among many flatters, so the number of candidates is stated. A mean of few seeds is extreme by chance, so
    only rows with at least as many seeds as the median row compete.
    """
    metric = metrics[0]
    lines = summary[summary["metric"] == metric]
    means = lines[lines["n"] > 0]
    means = means[means["n"] >= means["n"].median()]
    if len(means) > 1:
        for word, at in (("Highest", means["mean"].idxmax()), ("Lowest", means["mean"].idxmin())):
            line = means.loc[at]
            name = line_label(groups, [str(line[group]) for group in groups])
            value = f"{number(line['mean'])}{bounds(line, line['n'])} (n={line['n']})"
            yield f"{word} mean of {short(metric)} among {len(means)}: {value}, {name}."
    if "collapsed" in summary:
        some, runs = int((lines["collapsed"] > 0).sum()), int(frame["collapsed"].eq(True).sum())
        yield f"Collapsed: {runs} of {len(frame)} runs, in {some} of {len(lines)} configurations."


def results_table(
    summary: pd.DataFrame,
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    links: Mapping[Keys, str],
) -> Table:
    """A row for each configuration in ``links``, a column for each metric: mean and interval, the first drawn too.

    Group keys of which these configurations have a single value are left out.
    """
    shown = [group for at, group in enumerate(groups) if len({keys[at] for keys in links}) > 1] or list(groups)[-1:]
    shown = sorted(shown, key=lambda group: group not in (LABEL, FAMILY))
    lines: dict[Keys, dict[str, Any]] = {keys: {} for keys in links}
    for line in summary.to_dict("records"):
        lines.get(tuple(str(line[group]) for group in groups), {})[line["metric"]] = line
    means = [mean for keys in links if not math.isnan(mean := lines[keys][metrics[0]]["mean"])]
    margin = (max(means) - min(means)) / 10 if means else 0.0
    counted = [name for name in ("failed", "collapsed") if name in summary]
    counted = [name for name in counted if name == "collapsed" or summary[name].any()]
    members_of = dict(groups_of(frame, groups))
    rows = []
    for keys, link in links.items():
        given = dict(zip(groups, keys, strict=True))
        names = [given[key] for key in shown] or ["all runs"]
        cells = [Cell(text=names[0] or "(none)", value=_number(names[0]), link=link)]
        cells += [Cell(text=name, value=_number(name)) for name in names[1:]]
        n, first = max(line["n"] for line in lines[keys].values()), lines[keys][metrics[0]]
        for metric in metrics:
            line = lines[keys][metric]
            bar = None
            if margin and metric == metrics[0]:  # from the least to the greatest mean, a tenth wider
                ends = [line["mean"] if math.isnan(line[name]) else line[name] for name in ("low", "mean", "high")]
                bar = tuple(min(max((end - min(means) + margin) / (12 * margin), 0.0), 1.0) * 100 for end in ends)
            mean = Cell(text=number(line["mean"]), soft=bounds(line, n), value=line["mean"], bar=bar)
            cells.append(mean if line["n"] else Cell(text="-", value=math.nan))
        cells.append(Cell(text=str(n) if n == first["runs"] else f"{n} of {first['runs']}", value=float(n)))
        cells += [Cell(text=str(first[name]), value=float(first[name]), bad=first[name] > 0) for name in counted]
        rows.append((*cells, Cell(text=_targets(members_of[keys]))))
    heads = map(short, [*(shown or ["configuration"]), *metrics])
    return Table(names=(*heads, "runs", *counted, "optimizes"), rows=tuple(rows))


def runs_table(
    frame: pd.DataFrame,
    groups: Sequence[str],
    metrics: Sequence[str],
    uri: str,
    links: Mapping[Keys, str],
    shared: Mapping[str, str],
) -> Table:
    """A row for each run: its final metrics, where it comes from, and the command that runs it again."""
    rows = []
    for row in frame.to_dict("records"):
        texts = {str(key): value for key, value in row.items() if isinstance(value, str)}
        keys = tuple(texts.get(group, "") for group in groups)
        tags = {key[5:]: value for key, value in sorted(texts.items()) if key.startswith("tags.")}
        details = [(key, tags[key]) for key in tags if key.startswith(PROVENANCE) and key not in shared]
        commands = filter(None, (_reproduce(row["run_id"], uri), tags.get("run.command")))
        seed = texts.get("params.seed", "")
        rows.append(
            (
                Cell(text=str(row["run_name"] or row["run_id"])),
                Cell(text=seed, value=_number(seed)),
                Cell(text=_status(row), bad=row.get("collapsed") is True or row["status"] == "FAILED"),
                *(Cell(text=_shown(row[metric]), value=float(row[metric])) for metric in metrics),
                Cell(text=line_label(groups, keys), link=links[keys]),
                Cell(
                    text=texts.get(CODE, "unknown"),
                    details=(("run id", row["run_id"]), *details),
                    commands=tuple(commands),
                ),
            )
        )
    names = ("run", "seed", "status", *map(short, metrics), "configuration", "code and provenance")
    return Table(names=names, rows=tuple(rows))


def _configuration(
    uri: str, keys: Keys, members: pd.DataFrame, groups: Sequence[str], metrics: Sequence[str], link: str
) -> dict[str, Any]:
    """Certificate, runs and completions of a group; the completions of its first finished run (else its first)."""
    finished = members[members["status"] == "FINISHED"]
    run = (finished if len(finished) else members).iloc[0]
    runs = []
    for row in members.to_dict("records"):
        ends = ", ".join(f"{short(metric)} {_shown(row[metric])}" for metric in metrics if not math.isnan(row[metric]))
        line = f"seed {row.get('params.seed', '?')}, {_status(row)}: {ends or 'no values'}"
        runs.append((line, _reproduce(row["run_id"], uri)))
    samples = []
    for row in newest_samples(uri, str(run["run_id"])):
        text = str(row.get("completion", ""))
        cut = f"{text[:LONGEST_COMPLETION]} ... ({len(text)} characters)" if len(text) > LONGEST_COMPLETION else text
        facts = [(key, str(row[key])) for key in ("problem", "answer", "reward", "status", "stop_reason") if key in row]
        samples.append({"text": cut, "facts": facts})
    certificate = _certificate({str(key): value for key, value in run.items() if isinstance(value, str)})
    label = line_label(groups, keys)
    return {"id": link, "label": label, "certificate": certificate, "runs": runs, "samples": samples}


def _certificate(tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """The certificate in a run's tags, and of each term where there are several."""
    numbers = [number for number in range(len(tags)) if f"tags.kl.{number}.verdict" in tags]
    terms = {"": "tags.kl"}
    if len(numbers) > 1:
        terms |= {f"term {number} ": f"tags.kl.{number}" for number in numbers}
    facts = [("terms", tags[LABEL]), ("regime", tags.get("tags.kl.regime", ""))] if LABEL in tags else []
    for name, prefix in terms.items():
        facts += [(f"{name}{fact}".replace("_", " "), tags.get(f"{prefix}.{fact}", "")) for fact in CERTIFICATE]
    return [(name, text) for name, text in facts if text]


def _targets(members: pd.DataFrame) -> str:
    """What the KL terms optimize by their certificates; ``not certified`` where no run carries one."""
    targets = [str(value) for value in dict.fromkeys(members[TARGET].dropna())] if TARGET in members else []
    return " or ".join(target or "no target" for target in targets) or "not certified"


def _shared_provenance(frame: pd.DataFrame) -> dict[str, str]:
    """The provenance that all runs have alike; for a single run, none."""
    columns = [str(name) for name in frame if str(name).startswith(tuple(f"tags.{tag}" for tag in PROVENANCE))]
    alike = [name for name in columns if frame[name].notna().all() and frame[name].nunique() == 1]
    return {name.removeprefix("tags."): str(frame[name].iloc[0]) for name in alike} if len(frame) > 1 else {}


def _pictures(
    frame: pd.DataFrame,
    groups: Sequence[str],
    points: Mapping[str, pd.DataFrame],
    metrics: Sequence[str],
    kl: str | None,
    parts: Sequence[str],
) -> Iterable[dict[str, str]]:
    """Curves of the metrics recorded more than twice (a beginning and an end are in the table), then the frontier."""
    kl_keys = (LABEL, BETA, FAMILY)
    varying = [key for key in groups if key in kl_keys or (key not in parts and frame[key].nunique() > 1)]
    lines, panels = lines_and_panels(frame, varying)
    for metric in metrics:
        curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
        if curve["value"].notna().any() and curve["step"].nunique() > 2:
            figure = plot_curves({short(metric): curve}, frame, lines, panels=panels)
            yield {"alt": f"{short(metric)} over updates: mean and 95% band over seeds", "data": _svg(figure)}
    first = metrics[0]
    if kl not in (None, first) and FAMILY in frame and (frame[first].notna() & frame[kl].notna()).any():
        others = [key for key in varying if key not in (*kl_keys, NAME)]
        figure = frontier(frame, [FAMILY, *others], [short(first)], str(kl))
        alt = f"{short(first)} against {short(str(kl))}: one line a KL family, hollow where runs collapsed"
        yield {"alt": alt, "data": _svg(figure)}


def _svg(figure: Any) -> str:
    """The figure as base64 of SVG, coordinates to a hundredth of a point: half the size, no visible difference."""
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "kl_comedy", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = re.sub(
        r' d="[^"]*"',
        lambda path: re.sub(r"-?\d+\.\d{3,}", lambda digits: f"{float(digits[0]):.2f}", path[0]),
        out.getvalue(),
    )
    return base64.b64encode(text.encode("utf-8")).decode("ascii")


def _reproduce(run_id: str, uri: str) -> str:
    return shlex.join(["kl-comedy", "reproduce", run_id, "--uri", uri])


def _status(row: Mapping[Any, Any]) -> str:
    return f"{str(row['status']).lower()}{', collapsed' if row.get('collapsed') is True else ''}"


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else number(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
