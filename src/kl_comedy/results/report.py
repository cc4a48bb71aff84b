"""A study as one self-contained HTML page: results, pictures, certificates, completions, tokens, provenance, commands.

Nothing on it comes from a network: pictures are data URLs; style and script are inline and the only ones its content
security policy admits. Whatever comes from the store (labels, tags, completions) is text, escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import shlex
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from kl_comedy.results.compare import by_seed, groups_of
from kl_comedy.results.export import LONGEST_COMPLETION
from kl_comedy.results.figures import COLUMN, svg
from kl_comedy.results.looks import looks_of_families
from kl_comedy.results.metric_labels import column_head, key_label, metric_label, metric_range
from kl_comedy.results.plots import (
    KL_KEYS,
    NAME,
    SEEDS_OF_AN_INTERVAL,
    frontier,
    group_title,
    line_label,
    line_of,
    lines_and_panels,
    plain_words,
    plot_curves,
)
from kl_comedy.results.runs import CODE, FAMILY, LABEL, NoCurves, history, open_runs, short
from kl_comedy.results.tables import number
from kl_comedy.results.token_view import ShownRun, Viewer, viewer_of
from kl_comedy.tracking.store import shorten
from kl_comedy.tracking.tokens import USES

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

TEMPLATES = Path(__file__).parent / "templates"
CERTIFICATE = ("verdict", "target", "relative_bias", "cosine", "strength", "variance")
COMPLETION_FACTS = ("problem", "answer", "reward", "gold", "status", "stop_reason")
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


class Bar(NamedTuple):
    """A small picture in a cell, in percent of its width: the mean, its interval or its single seeds."""

    mean: float
    low: float
    high: float
    seeds: Sequence[float] = ()
    """The single seeds where there are too few for an interval; ``low`` and ``high`` are the mean then."""
    colour: str = ""
    """That of the row's KL family in the figures; empty: the page's own."""


class Cell(NamedTuple):
    """``value`` sorts it; ``soft`` follows the text in a softer colour; ``bar`` is drawn below it;
    ``link`` leads to an id of the page; ``details`` and ``commands`` unfold below the text; ``bad`` marks it."""

    text: str
    value: float | None = None
    soft: str = ""
    bar: Bar | None = None
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
    # JSON for a script element that is not run: it is escaped for that place, and not as text.
    inline["token_data"] = Markup(page["tokens"].data)
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
    """The runs of a report, and :func:`kl_comedy.results.compare.summarize` of them by ``groups``."""

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

        ``kl`` is the column of the KL for the frontier. ``warnings`` are lines above the results, ``rules`` lines below
        the tables, and ``command`` is the command that makes the page. A part has its headline picture, its table, and
        its other pictures folded.
        """
        configurations = groups_of(self.frame, self.groups)
        links = {keys: f"configuration-{number}" for number, (keys, _) in enumerate(configurations, start=1)}
        # Read once for all parts: a curve is a query of the store per run.
        points = {metric: self.curves(metric) for metric in self.metrics}
        shared = self._shared_tags()

        sections = []
        for values, members in groups_of(self.frame, parts):
            links_inside = {keys: links[keys] for keys, _ in groups_of(members, self.groups)}
            pictures = list(self.pictures(members, points, kl, parts))
            sections.append(
                {
                    "title": plain_words(group_title(parts, values)),
                    "headline": pictures[:1],
                    "results": self.results_table(members, links_inside),
                    "pictures": pictures[1:],
                }
            )
        details = []
        for keys, members in configurations:
            label = plain_words(line_label(self.groups, keys))
            details.append({"id": links[keys], "label": label, **self.configuration(members)})
        return render_page(
            title=title,
            command=command,
            rules=rules,
            warnings=warnings,
            seeds_of_an_interval=SEEDS_OF_AN_INTERVAL,
            summary=self._counts(len(configurations)),
            headline=list(self.headline()),
            parts=sections,
            runs=self.runs_table(links, shared),
            configurations=details,
            tokens=self.tokens(configurations),
            token_uses=USES,
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
                which = f"{word} mean {column_head(short(metric))} among {len(candidates)} configurations"
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
        name = plain_words(line_label(self.groups, [str(row[group]) for group in self.groups]))
        interval = ""
        if not math.isnan(row["low"]):
            metric = self.metrics[0]
            interval = f" {_interval(row, metric_range(short(metric), self.frame.get(metric, ())))}"
        return f"{number(row['mean'])}{interval} (n={row['n']}), {name}"

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
        ranges = {metric: metric_range(short(metric), frame[metric]) for metric in self.metrics}
        colours = self._colours(members_of)

        table = []
        for keys, rows in rows_of_configuration.items():
            value_of_group = dict(zip(self.groups, keys, strict=True))
            name, *more_names = [value_of_group[group] for group in shown_groups] or ["all runs"]
            cells = [Cell(plain_words(name) or "(none)", _number(name), link=links[keys])]
            cells += [Cell(plain_words(text), _number(text)) for text in more_names]

            most_seeds = max(row["n"] for row in rows)
            for place, row in enumerate(rows):
                seeds = by_seed(members_of[keys], row["metric"])
                # The mean may leave out runs by their status; the seeds of others are not its seeds.
                if len(seeds) != row["n"]:
                    seeds = []
                cell = _mean_cell(row, most_seeds, seeds, ranges[row["metric"]])
                # The bars of the first metric are enough: every other column would need a scale of its own.
                if place == 0 and row["n"]:
                    cell = cell._replace(bar=axis.bar(row, seeds, colours[keys]))
                cells.append(cell)

            first = rows[0]
            count = str(most_seeds)
            if most_seeds != first["runs"]:
                count = f"{most_seeds} of {first['runs']}"
            cells.append(Cell(count, float(most_seeds)))
            cells += [Cell(str(first[column]), float(first[column]), bad=first[column] > 0) for column in counted]
            cells.append(Cell(_targets(members_of[keys])))
            table.append(cells)
        heads = [key_label(short(group)) for group in shown_groups] or ["configuration"]
        heads += [column_head(short(metric)) for metric in self.metrics]
        return Table([*heads, "runs", *counted, "optimizes"], table)

    def _colours(self, members_of: Mapping[tuple[str, ...], pd.DataFrame]) -> dict[tuple[str, ...], str]:
        """The colour of each configuration's KL family in the figures; empty where it has none."""
        from matplotlib.colors import to_hex

        families = {keys: line_of(self.groups, keys, members).family for keys, members in members_of.items()}
        looks = looks_of_families(family for family in families.values() if family)
        colours = dict.fromkeys(families, "")
        for keys, family in families.items():
            if family:
                # Matplotlib's 0.45 is a grey that HTML does not know.
                colours[keys] = to_hex(looks[family].colour)
        return colours

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
            cells.append(Cell(plain_words(line_label(self.groups, keys)), link=links[keys]))

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
        names = [column_head(short(metric)) for metric in self.metrics]
        return Table(["run", "seed", "status", *names, "configuration", "code and provenance"], rows)

    def configuration(self, members: pd.DataFrame) -> dict[str, Any]:
        """Certificate, runs and completions of a group; the completions of its first finished run (else its first)."""
        runs = []
        for row in members.to_dict("records"):
            known = [metric for metric in self.metrics if not math.isnan(row[metric])]
            values = [f"{column_head(short(metric))} {number(row[metric])}" for metric in known]
            line = f"seed {row.get('params.seed', '?')}, {_status(row)}: {', '.join(values) or 'no values'}"
            runs.append((line, self.reproduce(row)))
        run = _finished_first(members).iloc[0]
        samples = []
        for completion in open_runs(self.uri).completions(str(run["run_id"])):
            text = shorten(str(completion.get("completion", "")), LONGEST_COMPLETION)
            facts = [(name, str(completion[name])) for name in COMPLETION_FACTS if name in completion]
            samples.append({"text": text, "facts": facts})
        tags = {str(key): value for key, value in run.items() if isinstance(value, str)}
        return {"certificate": _certificate(tags), "runs": runs, "samples": samples}

    def tokens(self, configurations: Sequence[tuple[tuple[str, ...], pd.DataFrame]]) -> Viewer:
        """The tokens of some runs: by turns one of each configuration, its finished runs first."""
        rows_of = []
        for keys, members in configurations:
            label = plain_words(line_label(self.groups, keys))
            ordered = _finished_first(members)
            rows_of.append([(label, row) for row in ordered.to_dict("records")])
        candidates = []
        for turn in itertools.zip_longest(*rows_of):
            for label_and_row in turn:
                # A configuration with fewer runs than others has none left.
                if label_and_row is None:
                    continue
                label, row = label_and_row
                run_id = str(row["run_id"])
                candidates.append(ShownRun(run_id, str(row["run_name"] or run_id), label))
        return viewer_of(open_runs(self.uri), candidates)

    def pictures(
        self, frame: pd.DataFrame, points: Mapping[str, pd.DataFrame], kl: str | None, parts: Sequence[str]
    ) -> Iterable[dict[str, Any]]:
        """The frontier where there is one, then curves of the metrics recorded more than twice (two points are in the
        table). The first picture is the headline of its part. Exact KL is on a logarithmic axis."""
        # Within a part its own keys have one value. KL keys stay even so: a line has its name and its look from them.
        other_keys = [key for key in self.groups if key not in (*KL_KEYS, *parts)]
        varying_keys = [key for key in other_keys if frame[key].nunique() > 1]
        yield from self._frontier(frame, kl, [key for key in varying_keys if key != NAME])

        varying = [key for key in self.groups if key in KL_KEYS or key in varying_keys]
        lines, panels = lines_and_panels(frame, varying)
        for metric in self.metrics:
            curve = points[metric][points[metric]["run_id"].isin(list(frame["run_id"]))]
            if not curve["value"].notna().any() or curve["step"].nunique() <= 2:
                continue
            name = short(metric)
            log: list[str] = []
            # A logarithmic axis needs a value above 0.
            if "kl/exact_" in metric and (curve["value"] > 0).any():
                log.append(name)
            figure = plot_curves({name: curve}, frame, lines, panels=panels, log=log)
            narrow = figure
            if figure.get_figwidth() > COLUMN:
                # On a phone the panels stand below one another: side by side their texts would be too small to read.
                narrow = plot_curves({name: curve}, frame, lines, panels=panels, log=log, columns=1)
            words, _ = metric_label(name)
            yield _picture(figure, f"{words} over updates, a line for each configuration", narrow)

    def _frontier(self, frame: pd.DataFrame, kl: str | None, keys: Sequence[str]) -> Iterable[dict[str, Any]]:
        """The first metric against KL, a line for each KL family and value of ``keys``; nothing without both."""
        first = self.metrics[0]
        if kl is None or kl == first or FAMILY not in frame:
            return
        has_both = frame[first].notna() & frame[kl].notna()
        if not has_both.any():
            return
        figure = frontier(frame, [FAMILY, *keys], [short(first)], kl)
        reward, _ = metric_label(short(first))
        distance, _ = metric_label(short(kl))
        alt = f"{reward} against {distance}: one line per KL family, hollow where runs collapsed"
        yield _picture(figure, alt, figure)

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


def _finished_first(members: pd.DataFrame) -> pd.DataFrame:
    # Stable: the first of the finished runs stays first.
    return members.sort_values("status", key=lambda status: status != "FINISHED", kind="stable")


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

    def bar(self, row: Row, seeds: Sequence[float], colour: str) -> Bar | None:
        """Where the mean of a row is and its interval, or its ``seeds`` where they are too few for an interval; None
        where there is nothing to compare."""
        if self.margin == 0:
            return None
        mean = self._percent(row["mean"])
        if row["n"] < SEEDS_OF_AN_INTERVAL:
            single = [self._percent(value) for value in seeds]
            return Bar(mean=mean, low=mean, high=mean, seeds=single, colour=colour)
        return Bar(mean=mean, low=self._percent(row["low"]), high=self._percent(row["high"]), colour=colour)

    def _percent(self, value: float) -> float:
        # Ten margins between the least and the greatest mean and one on either side are twelve.
        share = (value - self.least + self.margin) / (12 * self.margin)
        return min(max(share, 0.0), 1.0) * 100


def _mean_cell(row: Row, most_seeds: int, seeds: Sequence[float], bounds: tuple[float, float]) -> Cell:
    """The mean of a row with its interval, cut at ``bounds``, or its single ``seeds`` where they are too few.

    Its n is added where that is not ``most_seeds``.
    """
    if not row["n"]:
        return Cell("-", math.nan)
    soft = ""
    if row["n"] >= SEEDS_OF_AN_INTERVAL:
        soft = _interval(row, bounds)
    elif len(seeds) > 1:
        soft = f"runs: {', '.join(number(value) for value in seeds)}"
    if row["n"] != most_seeds:
        soft = f"{soft} (n={row['n']})".strip()
    return Cell(number(row["mean"]), row["mean"], soft=soft)


def _interval(row: Row, bounds: tuple[float, float]) -> str:
    """The interval of a row, cut at the ``bounds`` of its metric."""
    low, high = bounds
    return f"[{number(max(row['low'], low))}, {number(min(row['high'], high))}]"


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


def _picture(figure: Figure, alt: str, narrow: Figure) -> dict[str, Any]:
    """A picture for the page; ``narrow`` is its form for a phone, or the same figure."""
    picture: dict[str, Any] = {"alt": alt, "data": _encoded(figure), "narrow": "", "is_wide": narrow is not figure}
    if narrow is not figure:
        picture["narrow"] = _encoded(narrow)
    return picture


def _encoded(figure: Figure) -> str:
    return base64.b64encode(svg(figure).encode("utf-8")).decode("ascii")


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
