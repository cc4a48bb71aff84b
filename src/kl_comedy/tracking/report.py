"""A study as one self-contained HTML page: results, pictures, certificates, completions, provenance, commands.

Nothing on it comes from a network: pictures are data URLs; style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
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
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
COMPLETION_FACTS = ("problem", "answer", "reward", "status", "stop_reason")
"""What a page shows of a sampled completion beside its text, where it was recorded."""
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

Row = Mapping[Hashable, Any]
"""A row of a frame by column."""


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

    def page(
        self,
        *,
        kl: str | None,
        parts: Sequence[str] = (),
        title: str,
        command: str,
        rules: Sequence[str],
        warnings: Sequence[str],
    ) -> str:
        """The HTML page. ``parts`` are some of ``groups``: a table and its pictures for each of their values.

        ``kl`` is the column of the KL for the frontier. ``rules`` and ``warnings`` are lines above the results, and
        ``command`` is the command that makes the page.
        """
        configurations = groups_of(self.frame, self.groups)
        links = {keys: f"configuration-{number}" for number, (keys, _) in enumerate(configurations, start=1)}
        # Read once for all parts: a curve is a query of the store per run.
        points = {metric: self.curves(metric) for metric in self.metrics}
        shared = self._shared_tags()

        sections = []
        for values, members in groups_of(self.frame, parts):
            links_inside = {keys: links[keys] for keys, _ in groups_of(members, self.groups)}
            sections.append(
                {
                    "title": group_title(parts, values),
                    "results": self.results_table(members, links_inside),
                    "pictures": list(self.pictures(members, points, kl, parts)),
                }
            )
        details = []
        for keys, members in configurations:
            label = line_label(self.groups, keys)
            details.append({"id": links[keys], "label": label, **self.configuration(members)})
        return render_page(
            title=title,
            command=command,
            rules=rules,
            warnings=warnings,
            summary=self._counts(len(configurations)),
            headline=list(self.headline()),
            parts=sections,
            runs=self.runs_table(links, shared),
            configurations=details,
            common=sorted(shared.items()),
        )

    def _counts(self, configurations: int) -> str:
        """The number of runs, by status, and the versions of the code that made them."""
        by_status = self.frame["status"].value_counts()
        counts = ", ".join(f"{count} {str(status).lower()}" for status, count in by_status.items())
        line = f"{len(self.frame)} runs ({counts}) of {configurations} configurations."
        if CODE in self.frame:
            line += f" Code: {', '.join(sorted(set(self.frame[CODE])))}."
        return line

    def _shared_tags(self) -> dict[str, str]:
        """The tags of provenance that have one value in all runs; the page shows them once. None of a single run."""
        shared: dict[str, str] = {}
        if len(self.frame) <= 1:
            return shared
        beginnings = tuple(f"tags.{tag}" for tag in PROVENANCE)
        for column in self.frame.columns:
            if not column.startswith(beginnings):
                continue
            values = self.frame[column]
            if values.notna().all() and values.nunique() == 1:
                shared[column.removeprefix("tags.")] = str(values.iloc[0])
        return shared

    def headline(self) -> Iterable[str]:
        """The extremes of the first metric, and how many runs collapsed in how many configurations.

        A choice among many flatters, so the number of candidates is stated, and from how many of them the intervals
        separate the extreme. A mean of few seeds is extreme by chance, so only rows with at least as many seeds as the
        median row compete.
        """
        metric = self.metrics[0]
        rows = self.summary[self.summary["metric"] == metric].to_dict("records")
        with_mean = [row for row in rows if row["n"] > 0]
        candidates = []
        if with_mean:
            typical_seeds = median(row["n"] for row in with_mean)
            candidates = [row for row in with_mean if row["n"] >= typical_seeds]
        if len(candidates) > 1:
            highest = max(candidates, key=itemgetter("mean"))
            lowest = min(candidates, key=itemgetter("mean"))
            for word, extreme in (("Highest", highest), ("Lowest", lowest)):
                others = [row for row in candidates if row is not extreme]
                which = f"{word} mean of {short(metric)} among {len(candidates)}"
                yield f"{which}: {self._describe(extreme)}; {self._separation(extreme, others)}."
        if "collapsed" in self.summary:
            configurations = sum(row["collapsed"] > 0 for row in rows)
            runs = int(self.frame["collapsed"].eq(True).sum())
            yield f"Collapsed: {runs} of {len(self.frame)} runs, in {configurations} of {len(rows)} configurations."

    def _separation(self, extreme: Row, others: Sequence[Row]) -> str:
        """Whether the intervals separate the extreme row from the others, and from which one they do not."""
        if math.isnan(extreme["low"]):
            return "not resolved: a single seed has no interval"
        overlapping = []
        for row in others:
            # Two intervals that do not overlap differ for certain; overlapping ones may differ too. A row of a single
            # seed has no bounds: both comparisons with NaN are false, and it counts as overlapping.
            is_apart = row["high"] < extreme["low"] or row["low"] > extreme["high"]
            if not is_apart:
                overlapping.append(row)
        if not overlapping:
            return "resolved: no other interval overlaps this one"
        nearest = min(overlapping, key=lambda row: abs(row["mean"] - extreme["mean"]))
        which = f"{len(overlapping)} of {len(others)} other intervals overlap this one"
        return f"not resolved: {which}, nearest {self._describe(nearest)}"

    def _describe(self, row: Row) -> str:
        """A row of the summary: mean, interval, seeds and name."""
        name = line_label(self.groups, [str(row[group]) for group in self.groups])
        return f"{number(row['mean'])}{bounds(row, row['n'])} (n={row['n']}), {name}"

    def results_table(self, frame: pd.DataFrame, links: Mapping[tuple[str, ...], str]) -> Table:
        """A row for each configuration in ``links``, a column for each metric: mean and interval, the first drawn too.

        Group keys of which these configurations have a single value are left out.
        """
        shown_groups = self._varying_groups(frame)
        rows_of_configuration: dict[tuple[str, ...], list[Row]] = {}
        for keys, summary in groups_of(self.summary, self.groups):
            if keys in links:
                rows_of_configuration[keys] = [*summary.to_dict("records")]
        axis = _BarAxis.of([rows[0]["mean"] for rows in rows_of_configuration.values()])
        counted = self._counted_columns()
        members_of = dict(groups_of(frame, self.groups))

        table = []
        for keys, rows in rows_of_configuration.items():
            value_of_group = dict(zip(self.groups, keys, strict=True))
            name, *more_names = [value_of_group[group] for group in shown_groups] or ["all runs"]
            cells = [Cell(name or "(none)", _number(name), link=links[keys])]
            cells += [Cell(text, _number(text)) for text in more_names]

            first = rows[0]
            most_seeds = max(row["n"] for row in rows)
            cells.append(_mean_cell(first, most_seeds, axis))
            cells += [_mean_cell(row, most_seeds) for row in rows[1:]]

            seeds = str(most_seeds)
            if most_seeds != first["runs"]:
                seeds = f"{most_seeds} of {first['runs']}"
            cells.append(Cell(seeds, float(most_seeds)))
            cells += [Cell(str(first[column]), float(first[column]), bad=first[column] > 0) for column in counted]
            cells.append(Cell(_targets(members_of[keys])))
            table.append(cells)
        names = [short(column) for column in [*(shown_groups or ["configuration"]), *self.metrics]]
        return Table([*names, "runs", *counted, "optimizes"], table)

    def _varying_groups(self, frame: pd.DataFrame) -> list[str]:
        """The group keys that tell these configurations apart, the KL first: it is what a study varies."""
        groups = list(self.groups)
        varying = [group for group in groups if frame[group].fillna("").nunique() > 1]
        # A single configuration is named by its last key.
        return sorted(varying or groups[-1:], key=lambda group: group not in (LABEL, FAMILY))

    def _counted_columns(self) -> list[str]:
        """The columns of the summary that count runs: those that failed only where any did."""
        counted = []
        if "failed" in self.summary and self.summary["failed"].any():
            counted.append("failed")
        if "collapsed" in self.summary:
            counted.append("collapsed")
        return counted

    def runs_table(self, links: Mapping[tuple[str, ...], str], shared: Mapping[str, str]) -> Table:
        """A row for each run: its final metrics, where it comes from, and the command that runs it again."""
        rows = []
        for row in self.frame.to_dict("records"):
            texts = {str(key): value for key, value in row.items() if isinstance(value, str)}
            keys = tuple(texts.get(group, "") for group in self.groups)
            seed = texts.get("params.seed", "")
            has_failed = row.get("collapsed") is True or row["status"] == "FAILED"
            cells = [
                Cell(str(row["run_name"] or row["run_id"])),
                Cell(seed, _number(seed)),
                Cell(_status(row), bad=has_failed),
            ]
            cells += [Cell(_shown(row[metric]), float(row[metric])) for metric in self.metrics]
            cells.append(Cell(line_label(self.groups, keys), link=links[keys]))

            origin = [("run id", row["run_id"])]
            # What all runs share stands once on the page and not in every row.
            for column, text in sorted(texts.items()):
                tag = column.removeprefix("tags.")
                if tag != column and tag.startswith(PROVENANCE) and tag not in shared:
                    origin.append((tag, text))
            # The second command is the one that was typed; it may name a config that has changed since.
            commands = [self.reproduce(row)]
            if texts.get("tags.run.command"):
                commands.append(texts["tags.run.command"])
            cells.append(Cell(texts.get(CODE, "unknown"), details=origin, commands=commands))
            rows.append(cells)
        names = [short(metric) for metric in self.metrics]
        return Table(["run", "seed", "status", *names, "configuration", "code and provenance"], rows)

    def configuration(self, members: pd.DataFrame) -> dict[str, Any]:
        """Certificate, runs and completions of a group; the completions of its first finished run (else its first)."""
        runs = []
        for row in members.to_dict("records"):
            values = [f"{short(name)} {number(row[name])}" for name in self.metrics if not math.isnan(row[name])]
            line = f"seed {row.get('params.seed', '?')}, {_status(row)}: {', '.join(values) or 'no values'}"
            runs.append((line, self.reproduce(row)))
        # Stable: the first of the finished runs stays first.
        run = members.sort_values("status", key=lambda status: status != "FINISHED", kind="stable").iloc[0]
        samples = []
        for completion in open_runs(self.uri).completions(str(run["run_id"])):
            text = shorten(str(completion.get("completion", "")), LONGEST_COMPLETION)
            facts = [(name, str(completion[name])) for name in COMPLETION_FACTS if name in completion]
            samples.append({"text": text, "facts": facts})
        tags = {str(key): value for key, value in run.items() if isinstance(value, str)}
        return {"certificate": _certificate(tags), "runs": runs, "samples": samples}

    def pictures(
        self, frame: pd.DataFrame, points: Mapping[str, pd.DataFrame], kl: str | None, parts: Sequence[str]
    ) -> Iterable[dict[str, str]]:
        """Curves of the metrics recorded more than twice (two points are in the table), then the frontier.

        Exact KL is on a logarithmic axis.
        """
        # Within a part its own keys have one value. KL keys stay even so: a line has its name and its look from them.
        other_keys = [key for key in self.groups if key not in (*KL_KEYS, *parts)]
        varying_keys = [key for key in other_keys if frame[key].nunique() > 1]
        varying = [key for key in self.groups if key in KL_KEYS or key in varying_keys]
        lines, panels = lines_and_panels(frame, varying)
        for metric in self.metrics:
            curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
            if not curve["value"].notna().any() or curve["step"].nunique() <= 2:
                continue
            name = short(metric)
            is_exact_kl = "kl/exact_" in metric
            # A logarithmic axis needs a value above 0.
            log = [name] if is_exact_kl and (curve["value"] > 0).any() else []
            figure = plot_curves({name: curve}, frame, lines, panels=panels, log=log)
            words, _ = metric_label(name)
            yield _picture(figure, f"{words} over updates: mean and 95% band over seeds")

        first = self.metrics[0]
        if kl is None or kl == first or FAMILY not in frame:
            return
        has_both = frame[first].notna() & frame[kl].notna()
        if has_both.any():
            groups = [FAMILY, *(key for key in varying_keys if key != NAME)]
            figure = frontier(frame, groups, [short(first)], kl)
            reward, _ = metric_label(short(first))
            distance, _ = metric_label(short(kl))
            yield _picture(figure, f"{reward} against {distance}: one line per KL family, hollow where runs collapsed")

    def curves(self, metric: str) -> pd.DataFrame:
        """The curve of each run; empty where these runs come from an export without it."""
        try:
            return history(self.uri, self.frame["run_id"], short(metric))
        except NoCurves:
            # Without runs, every export gives an empty frame with the right columns.
            return history(self.uri, [], short(metric))

    def reproduce(self, row: Row) -> str:
        """The command that runs this run again and compares its metrics."""
        return shlex.join(["kl-comedy", "reproduce", row["run_id"], "--uri", self.uri])


class _BarAxis(NamedTuple):
    """The axis of the bars in a table, from the least to the greatest mean and ``margin`` more on either side."""

    least: float
    margin: float
    """A tenth of the distance from the least to the greatest mean; 0 where there are no two different means."""

    @staticmethod
    def of(means: Iterable[float]) -> _BarAxis:
        known = [mean for mean in means if not math.isnan(mean)]
        if not known:
            return _BarAxis(least=0.0, margin=0.0)
        return _BarAxis(least=min(known), margin=(max(known) - min(known)) / 10)

    def bar(self, row: Row) -> list[float] | None:
        """Where low, mean and high of a row are, in percent of the axis; None where there is nothing to compare."""
        if self.margin == 0:
            return None
        percents = []
        for bound in ("low", "mean", "high"):
            value = row[bound]
            # A single seed has no bounds: its bar is a point.
            if math.isnan(value):
                value = row["mean"]
            # Ten margins between the least and the greatest mean and one on either side are twelve.
            share = (value - self.least + self.margin) / (12 * self.margin)
            percents.append(min(max(share, 0.0), 1.0) * 100)
        return percents


def _mean_cell(row: Row, seeds: int, axis: _BarAxis | None = None) -> Cell:
    """The mean of a row with its interval, drawn on ``axis`` if given; its n where that is not ``seeds``."""
    if not row["n"]:
        return Cell("-", math.nan)
    bar = None
    if axis is not None:
        bar = axis.bar(row)
    return Cell(number(row["mean"]), row["mean"], soft=bounds(row, seeds), bar=bar)


def _targets(members: pd.DataFrame) -> str:
    """What the runs' certificates say that they optimize."""
    if TARGET not in members:
        return "not certified"
    targets = dict.fromkeys(members[TARGET].dropna())
    return " or ".join(target or "no target" for target in targets) or "not certified"


def _certificate(tags: Mapping[str, str]) -> list[tuple[str, str]]:
    """The certificate in a run's tags, and of each term where there are several."""
    prefixes = {"": "tags.kl"}
    term_numbers = [number for number in range(len(tags)) if f"tags.kl.{number}.verdict" in tags]
    if len(term_numbers) > 1:
        for term_number in term_numbers:
            prefixes[f"term {term_number} "] = f"tags.kl.{term_number}"
    facts = []
    if LABEL in tags:
        facts.append(("terms", tags[LABEL]))
        facts.append(("regime", tags.get("tags.kl.regime", "")))
    for name, prefix in prefixes.items():
        for fact in CERTIFICATE:
            facts.append((f"{name}{fact}".replace("_", " "), tags.get(f"{prefix}.{fact}", "")))
    return [(name, text) for name, text in facts if text]


def _picture(figure: Figure, alt: str) -> dict[str, str]:
    return {"alt": alt, "data": base64.b64encode(svg(figure).encode("utf-8")).decode("ascii")}


def _status(row: Row) -> str:
    status = str(row["status"]).lower()
    if row.get("collapsed") is True:
        status += ", collapsed"
    return status


def _shown(value: float) -> str:
    if math.isnan(value):
        return "-"
    return number(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
