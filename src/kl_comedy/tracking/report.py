"""A study as one self-contained HTML page: results, pictures, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs; style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kl_comedy.tracking.compare import groups_of
from kl_comedy.tracking.export import LONGEST_COMPLETION
from kl_comedy.tracking.figures import svg
from kl_comedy.tracking.metric_labels import metric_label
from kl_comedy.tracking.plots import KL_KEYS, NAME, frontier, group_title, line_label, lines_and_panels, plot_curves
from kl_comedy.tracking.runs import CODE, FAMILY, LABEL, NoCurves, history, open_runs, short
from kl_comedy.tracking.store import shorten
from kl_comedy.tracking.tables import bounds, number

if TYPE_CHECKING:
    import pandas as pd

TEMPLATES = Path(__file__).parent / "templates"
CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
TARGET = "tags.kl.target"
PROVENANCE = (
    "config.",
    "git.",
    "code.",
    "plugins",
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
"""Tags with these beginnings say where a run comes from."""


class Cell(NamedTuple):
    """``value`` sorts it; ``soft`` follows the text in a softer colour; ``bar`` draws (low, mean, high) in percent;
    ``link`` leads to an id of the page; ``details`` and ``commands`` unfold below the text; ``bad`` marks it."""

    text: str
    value: float | None = None
    soft: str = ""
    bar: Sequence[float] | None = None
    link: str = ""
    details: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = ()
    bad: bool = False


class Table(NamedTuple):
    """The first cell of a row names it."""

    names: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def render_page(**page: Any) -> str:
    """The page as HTML; ``page`` has what the template ``report.html.j2`` shows, see :meth:`Study.page`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    inline: dict[str, Any] = {}
    for name, suffix in (("style", "css"), ("script", "js")):
        text = (TEMPLATES / f"report.{suffix}").read_text(encoding="utf-8")
        # The page's security policy admits style and script by their hashes alone.
        digest = base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        inline |= {name: Markup(text), f"{name}_hash": f"sha256-{digest}"}
    options: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(TEMPLATES), trim_blocks=True, lstrip_blocks=True, **options)
    return environment.get_template("report.html.j2").render(page=page, **inline)


@dataclass(frozen=True)
class Study:
    """The runs of a report, and :func:`kl_comedy.tracking.compare.summarize` of them by ``groups``."""

    uri: str
    frame: pd.DataFrame
    summary: pd.DataFrame
    groups: Sequence[str]
    metrics: Sequence[str]

    def page(self, *, kl: str | None, parts: Sequence[str] = (), **texts: Any) -> str:
        """The HTML page. ``parts`` are some of ``groups``: a table and its pictures for each of their values.

        ``texts``: ``title``, ``command``, and the lines ``rules`` and ``warnings``.
        """
        frame, groups = self.frame, self.groups
        counts = ", ".join(f"{count} {name.lower()}" for name, count in frame["status"].value_counts().items())
        code = f" Code: {', '.join(sorted(set(frame[CODE])))}." if CODE in frame else ""
        configurations = groups_of(frame, groups)
        links = {keys: f"configuration-{at}" for at, (keys, _) in enumerate(configurations, start=1)}
        points = {metric: self.curves(metric) for metric in self.metrics}
        columns = [name for name in frame if name.startswith(tuple(f"tags.{tag}" for tag in PROVENANCE))]
        alike = [name for name in columns if frame[name].notna().all() and frame[name].nunique() == 1]
        shared = {name.removeprefix("tags."): str(frame[name].iloc[0]) for name in alike} if len(frame) > 1 else {}
        sections = []
        for values, members in groups_of(frame, parts):
            inside = {keys: links[keys] for keys, _ in groups_of(members, groups)}
            pictures = list(self.pictures(members, points, kl, parts))
            results = self.results_table(members, inside)
            sections.append({"title": group_title(parts, values), "results": results, "pictures": pictures})
        return render_page(
            summary=f"{len(frame)} runs ({counts}) of {len(configurations)} configurations.{code}",
            headline=list(self.headline()),
            parts=sections,
            runs=self.runs_table(links, shared),
            configurations=[
                {"id": links[keys], "label": line_label(groups, keys), **self.configuration(members)}
                for keys, members in configurations
            ],
            common=sorted(shared.items()),
            **texts,
        )

    def headline(self) -> Iterable[str]:
        """The extremes of the first metric, and how many runs collapsed in how many configurations.

        A choice among many flatters, so the number of candidates is stated, and from how many of them the intervals
        separate the extreme. A mean of few seeds is extreme by chance, so only rows with at least as many seeds as the
        median row compete.
        """
        metric = self.metrics[0]
        lines = self.summary[self.summary["metric"] == metric]
        means = lines[lines["n"] > 0]
        means = means[means["n"] >= means["n"].median()]
        if len(means) > 1:
            for word, index in (("Highest", means["mean"].idxmax()), ("Lowest", means["mean"].idxmin())):
                line = means.loc[index]
                others = means.drop(index=index)
                # Two intervals that do not overlap differ for certain; overlapping ones may differ too.
                apart = (others["high"] < line["low"]) | (others["low"] > line["high"])
                verdict = "resolved: no other interval overlaps this one"
                if math.isnan(line["low"]):
                    verdict = "not resolved: a single seed has no interval"
                elif not apart.all():
                    near = others[~apart]
                    next_one = self._describe(near.loc[(near["mean"] - line["mean"]).abs().idxmin()])
                    which = f"{len(near)} of {len(others)} other intervals overlap this one"
                    verdict = f"not resolved: {which}, nearest {next_one}"
                yield f"{word} mean of {short(metric)} among {len(means)}: {self._describe(line)}; {verdict}."
        if "collapsed" in self.summary:
            some, runs = int((lines["collapsed"] > 0).sum()), int(self.frame["collapsed"].eq(True).sum())
            yield f"Collapsed: {runs} of {len(self.frame)} runs, in {some} of {len(lines)} configurations."

    def _describe(self, line: pd.Series) -> str:
        """A row of the summary: mean, interval, seeds and name."""
        name = line_label(self.groups, [str(line[group]) for group in self.groups])
        return f"{number(line['mean'])}{bounds(line, line['n'])} (n={line['n']}), {name}"

    def results_table(self, frame: pd.DataFrame, links: Mapping[tuple[str, ...], str]) -> Table:
        """A row for each configuration in ``links``, a column for each metric: mean and interval, the first drawn too.

        Group keys of which these configurations have a single value are left out.
        """
        groups, summary = list(self.groups), self.summary
        shown = [group for group in groups if frame[group].fillna("").nunique() > 1] or groups[-1:]
        # KL first: it is what the study varies.
        shown = sorted(shown, key=lambda group: group not in (LABEL, FAMILY))
        lines = {keys: side.to_dict("records") for keys, side in groups_of(summary, groups) if keys in links}
        means = [mean for of_metrics in lines.values() if not math.isnan(mean := of_metrics[0]["mean"])]
        # Without two different means there is nothing to draw a bar between.
        margin = (max(means) - min(means)) / 10 if means else 0.0
        counted = [name for name in ("failed", "collapsed") if name in summary]
        counted = [name for name in counted if name == "collapsed" or summary[name].any()]
        members_of = dict(groups_of(frame, groups))
        rows = []
        for keys, of_metrics in lines.items():
            given = dict(zip(groups, keys, strict=True))
            name, *more = [given[key] for key in shown] or ["all runs"]
            n, first = max(line["n"] for line in of_metrics), of_metrics[0]
            cells = [Cell(name or "(none)", _number(name), link=links[keys])]
            cells += [Cell(text, _number(text)) for text in more]
            for line in of_metrics:
                bar = None
                if margin and line is first:
                    # The bar's axis runs from the least to the greatest mean, a tenth wider on either side.
                    ends = [line["mean"] if math.isnan(line[end]) else line[end] for end in ("low", "mean", "high")]
                    bar = [min(max((end - min(means) + margin) / (12 * margin), 0.0), 1.0) * 100 for end in ends]
                mean = Cell(number(line["mean"]), line["mean"], soft=bounds(line, n), bar=bar)
                cells.append(mean if line["n"] else Cell("-", math.nan))
            cells.append(Cell(str(n) if n == first["runs"] else f"{n} of {first['runs']}", float(n)))
            cells += [Cell(str(first[name]), float(first[name]), bad=first[name] > 0) for name in counted]
            targets = members_of[keys].get(TARGET, default=frame["run_id"][:0]).dropna()
            optimizes = " or ".join(target or "no target" for target in dict.fromkeys(targets)) or "not certified"
            rows.append((*cells, Cell(optimizes)))
        heads = map(short, [*(shown or ["configuration"]), *self.metrics])
        return Table((*heads, "runs", *counted, "optimizes"), rows)

    def runs_table(self, links: Mapping[tuple[str, ...], str], shared: Mapping[str, str]) -> Table:
        """A row for each run: its final metrics, where it comes from, and the command that runs it again."""
        rows = []
        for row in self.frame.to_dict("records"):
            texts = {str(key): value for key, value in row.items() if isinstance(value, str)}
            keys = tuple(texts.get(group, "") for group in self.groups)
            tags = {key[5:]: value for key, value in sorted(texts.items()) if key.startswith("tags.")}
            origin = [(key, tags[key]) for key in tags if key.startswith(PROVENANCE) and key not in shared]
            commands = [command for command in (self.reproduce(row), tags.get("run.command")) if command]
            seed, bad = texts.get("params.seed", ""), row.get("collapsed") is True or row["status"] == "FAILED"
            cells = [
                Cell(str(row["run_name"] or row["run_id"])),
                Cell(seed, _number(seed)),
                Cell(_status(row), bad=bad),
            ]
            cells += [Cell(_shown(row[metric]), float(row[metric])) for metric in self.metrics]
            cells.append(Cell(line_label(self.groups, keys), link=links[keys]))
            code = Cell(texts.get(CODE, "unknown"), details=[("run id", row["run_id"]), *origin], commands=commands)
            rows.append([*cells, code])
        heads = map(short, self.metrics)
        return Table(("run", "seed", "status", *heads, "configuration", "code and provenance"), rows)

    def configuration(self, members: pd.DataFrame) -> dict[str, Any]:
        """Certificate, runs and completions of a group; the completions of its first finished run (else its first)."""
        runs = []
        for row in members.to_dict("records"):
            ends = [f"{short(name)} {number(row[name])}" for name in self.metrics if not math.isnan(row[name])]
            line = f"seed {row.get('params.seed', '?')}, {_status(row)}: {', '.join(ends) or 'no values'}"
            runs.append((line, self.reproduce(row)))
        run = members.sort_values("status", key=lambda status: status != "FINISHED", kind="stable").iloc[0]
        samples = []
        for row in open_runs(self.uri).completions(str(run["run_id"])):
            text = shorten(str(row.get("completion", "")), LONGEST_COMPLETION)
            names = [name for name in ("problem", "answer", "reward", "status", "stop_reason") if name in row]
            samples.append({"text": text, "facts": [(name, str(row[name])) for name in names]})
        tags = {str(key): value for key, value in run.items() if isinstance(value, str)}
        return {"certificate": _certificate(tags), "runs": runs, "samples": samples}

    def pictures(
        self, frame: pd.DataFrame, points: Mapping[str, pd.DataFrame], kl: str | None, parts: Sequence[str]
    ) -> Iterable[dict[str, str]]:
        """Curves of the metrics recorded more than twice (two points are in the table), then the frontier.

        Exact KL is on a logarithmic axis.
        """
        varying = [key for key in self.groups if key in KL_KEYS or (key not in parts and frame[key].nunique() > 1)]
        lines, panels = lines_and_panels(frame, varying)
        for metric in self.metrics:
            curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
            if curve["value"].notna().any() and curve["step"].nunique() > 2:
                log = [short(metric)] if "kl/exact_" in metric and (curve["value"] > 0).any() else []
                figure = plot_curves({short(metric): curve}, frame, lines, panels=panels, log=log)
                words, _ = metric_label(short(metric))
                yield _picture(figure, f"{words} over updates: mean and 95% band over seeds")
        first = self.metrics[0]
        if kl not in (None, first) and FAMILY in frame and (frame[first].notna() & frame[kl].notna()).any():
            others = [key for key in varying if key not in (*KL_KEYS, NAME)]
            figure = frontier(frame, [FAMILY, *others], [short(first)], str(kl))
            reward, distance = metric_label(short(first))[0], metric_label(short(str(kl)))[0]
            yield _picture(figure, f"{reward} against {distance}: one line per KL family, hollow where runs collapsed")

    def curves(self, metric: str) -> pd.DataFrame:
        """The curve of each run; empty where these runs come from an export without it."""
        try:
            return history(self.uri, self.frame["run_id"], short(metric))
        except NoCurves:
            return history(self.uri, [], short(metric))

    def reproduce(self, row: Mapping[Any, Any]) -> str:
        return shlex.join(["kl-comedy", "reproduce", row["run_id"], "--uri", self.uri])


def _certificate(tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """The certificate in a run's tags, and of each term where there are several."""
    numbers = [number for number in range(len(tags)) if f"tags.kl.{number}.verdict" in tags]
    terms = {"": "tags.kl"} | {f"term {at} ": f"tags.kl.{at}" for at in numbers if len(numbers) > 1}
    facts = [("terms", tags[LABEL]), ("regime", tags.get("tags.kl.regime"))] if LABEL in tags else []
    for name, prefix in terms.items():
        facts += [(f"{name}{fact}".replace("_", " "), tags.get(f"{prefix}.{fact}")) for fact in CERTIFICATE]
    return [(name, text) for name, text in facts if text]


def _picture(figure: Any, alt: str) -> dict[str, str]:
    return {"alt": alt, "data": base64.b64encode(svg(figure).encode("utf-8")).decode("ascii")}


def _status(row: Mapping[Any, Any]) -> str:
    status = str(row["status"]).lower()
    if row.get("collapsed") is True:
        status += ", collapsed"
    return status


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else number(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
