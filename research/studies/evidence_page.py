"""results/evidence/: README.md, all contrasts and blocks as CSV, and figures, from an export of the protocol's runs.

The page is evidence.md beside this file. ``{{name words}}`` in it calls the function of :data:`PARTS` with that name,
with the words after it: no number of an outcome is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.results import tables
from research.studies import enumerated, pages
from research.studies.evidence import (
    BLOCKS,
    COLLAPSE,
    FORMS,
    LABELS,
    LEVEL,
    MARGIN,
    POWER,
    REWARD,
    Claim,
    Row,
    Unresolved,
    evaluate,
    key_row,
    measured_runs,
    needed,
    planned_runs,
    read_claims,
    unresolved,
    verdict,
)
from research.studies.pages import two_digits

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = Path(__file__).with_name("evidence.md")
PLACE = re.compile(r"\{\{(\w+)(?: ([^{}]+))?\}\}")
FIGURES = ("S2",)
"""The claims whose figure is on the page."""

WITHOUT = "run.*,output,tracking.*,metrics.time/*,*kl_error*,tags.data.*,tags.process.*,tags.mlflow.*,tags.command"
"""Columns that the committed export leaves out: they differ between machines, or no number is computed from them."""


@dataclass(frozen=True, kw_only=True)
class DecidedClaim:
    """A claim about trained runs, decided."""

    claim: Claim
    parts: Mapping[str, Sequence[Row]]
    is_complete: bool
    """Whether every planned run has finished."""
    unresolved: Sequence[Unresolved]

    @property
    def rows(self) -> list[Row]:
        """The contrasts of all parts."""
        return [row for rows in self.parts.values() for row in rows]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The runs and what they decide; ``plan`` and ``runs`` are those of :mod:`research.studies.evidence`."""

    plan: pd.DataFrame
    runs: pd.DataFrame
    trained: dict[str, DecidedClaim]
    enumerated: dict[str, enumerated.EnumeratedClaim]


def read_evidence(uri: str) -> Evidence:
    """Decide every claim from the store or export at ``uri``.

    Raises :class:`UserError` where it has no finished run of the protocol, or lacks curves.
    """
    plan = planned_runs()
    runs = measured_runs(uri, plan)
    trained = {}
    for claim in read_claims():
        parts = evaluate(claim, runs, plan)
        trained[claim.name] = DecidedClaim(
            claim=claim,
            parts=parts,
            is_complete=len(needed(claim, runs)) >= len(needed(claim, plan)),
            unresolved=unresolved(claim, parts, runs, plan),
        )
    return Evidence(
        plan=plan,
        runs=runs,
        trained=trained,
        enumerated={claim.name: claim for claim in enumerated.read_claims()},
    )


# --- the parts of the page ------------------------------------------------------------------------------------------
def page(evidence: Evidence) -> str:
    """README.md."""

    def part(match: re.Match[str]) -> str:
        return PARTS[match[1]](evidence, match[2] or "")

    return PLACE.sub(part, TEMPLATE.read_text(encoding="utf-8"))


def claim_names(words: str) -> list[str]:
    """The claims that a part names, with semicolons between them: some names have a comma."""
    return words.split("; ")


def claims_table(evidence: Evidence, words: str) -> str:
    """The named claims: hypothesis, verdict and one number, and below the table what is to be said of each."""
    cells = []
    remarks = []
    for name in claim_names(words):
        if name in evidence.trained:
            decided = evidence.trained[name]
            hypothesis, remark = decided.claim.hypothesis, decided.claim.remark
            result = [state(decided), _key_number(decided.rows)]
        else:
            claim = evidence.enumerated[name]
            hypothesis, remark = claim.hypothesis, claim.remark
            certificates = enumerated.certificates(claim)
            result = [enumerated.decide(claim, certificates), enumerated.key_number(claim, certificates)]
        cells.append([name, hypothesis, *result])
        if remark:
            remarks.append(f"- {name}: {remark}")
    table = tables.markdown(["claim", "hypothesis", "for / against / of", "key number"], cells)
    # Other pages link to a claim. Put in afterwards: a cell's own "<" is text.
    for name in claim_names(words):
        table = table.replace(f"\n| {name} |", f'\n| <a id="{_anchor(name)}"></a>{name} |')
    return "\n\n".join([table, "\n".join(remarks)]).rstrip()


def _anchor(name: str) -> str:
    return name.lower().replace(", ", "-")


def state(decided: DecidedClaim) -> str:
    """The counts of all parts; preliminary where runs are missing, unless all of them are."""
    verdicts = {part: verdict(rows) for part, rows in decided.parts.items()}
    text = "; ".join(f"{part}: {counts}" if part else counts for part, counts in verdicts.items())
    no_runs = set(verdicts.values()) == {"runs missing"}
    if decided.is_complete or no_runs:
        return text
    return f"preliminary: {text}"


def _key_number(rows: Sequence[Row]) -> str:
    row = key_row(rows)
    if row is None:
        return "-"
    parts = [row["contrast"], _short_place(row["at"])]
    if row["outcome"] != "end":
        parts.append(LABELS[row["outcome"]])
    text = f"{', '.join(parts)}: {two_digits(row['difference'])}"
    if row["low"] is not None:
        text += f" [{two_digits(row['low'])}, {two_digits(row['high'])}]"
    return text


def _short_place(place: str) -> str:
    """The cell of a contrast, with the learning rate as ``2e-4``.

    >>> _short_place("lag 10, learning rate 0.0002, beta 0.1")
    'lag 10, rate 2e-4, beta 0.1'
    """
    return re.sub(r"learning rate ([\d.e-]+)", lambda match: f"rate {_rate(match[1])}", place)


def _rate(rate: str) -> str:
    mantissa, exponent = f"{float(rate):e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


@dataclass(frozen=True)
class Levels:
    """A table of levels: a column for each name, of the runs that have one of the values of each key."""

    columns: dict[str, dict[str, list[str]]]
    with_kl: bool = field(default=False, kw_only=True)


_OLD = ["lags_fresh", "lags_exact", "lags_baseline"]
LEVELS = {
    "fresh": Levels({rate: {"block": ["core"], "rate": [f"{float(rate):g}"]} for rate in ("1e-4", "3e-4", "8e-4")}),
    "updates": Levels(
        {
            "1 of 192": {"block": ["core"], "rate": ["0.0003"]},
            "4 of 192": {"block": ["updates"], "updates": ["reused"]},
            "1 of 48": {"block": ["updates"], "updates": ["fresh"]},
        }
    ),
    "stale": Levels(
        {
            "4 updates old": {"block": _OLD, "lag": ["4"]},
            "10 updates old": {"block": _OLD, "lag": ["10"]},
            "10 updates old, beta 0.2": {"block": ["lags_best"], "beta": ["0.2"]},
            "asynchronous": {"block": ["async_fresh"]},
        }
    ),
    "real": Levels(
        {
            "beta 0.03": {"block": ["smollm2"], "lag": ["0"], "beta": ["0", "0.03"]},
            "beta 0.1": {"block": ["smollm2"], "lag": ["0"], "beta": ["0", "0.1"]},
            "beta 0.1, 4 updates old": {"block": ["smollm2"], "lag": ["4"], "beta": ["0", "0.1"]},
        },
        with_kl=True,
    ),
}


def levels_table(evidence: Evidence, words: str) -> str:
    """The mean reward at the end by form, with the collapsed runs where there are any, and the KL where it is asked."""
    levels = LEVELS[words]
    chosen = {}
    for column, where in levels.columns.items():
        runs = evidence.runs
        for key, allowed in where.items():
            runs = runs[runs[key].isin(allowed)]
        chosen[f"{column} ({runs['seed'].nunique()} seeds)"] = runs
    present = set().union(*(set(runs["form"]) for runs in chosen.values()))
    cells = []
    for form, name in FORMS.items():
        if form in present:
            of_form = [runs[runs["form"] == form] for runs in chosen.values()]
            cells.append([name, *[_level(runs, with_kl=levels.with_kl) for runs in of_form]])
    return tables.markdown(["KL", *chosen], cells)


def _level(runs: pd.DataFrame, *, with_kl: bool) -> str:
    if runs.empty:
        return "-"
    text = f"{runs['end'].mean():.2f}"
    if with_kl:
        text += f", {runs['kl'].mean():.1f} nats"
    collapsed = int(runs["collapsed"].eq(True).sum())
    if collapsed:
        text += f" ({collapsed} of {len(runs)} collapsed)"
    return text


def unresolved_sentences(evidence: Evidence, words: str) -> str:
    """How many parts are not resolved, and what each would take."""
    seeds = []
    cheap = []
    dear = []
    for name, decided in evidence.trained.items():
        for part in decided.unresolved:
            seeds.append(part.seeds)
            claims = cheap if part.hours <= 1 else dear
            claims.append(f"{name} ({two_digits(part.hours)})")
    if not seeds:
        return "Every part of a claim that has all of its runs is resolved."
    sentences = [
        f"{len(seeds)} parts of claims have all of their runs and are not resolved.",
        "If the difference with the least p is the true one,",
        f"{min(seeds)} to {max(seeds)} seeds a side find it with probability {POWER}.",
        f"In hours of this machine: {'; '.join(cheap)}.",
    ]
    if dear:
        sentences.append(f"More than one: {'; '.join(dear)}.")
    return "\n".join(sentences)


def start(evidence: Evidence, words: str) -> str:
    """The mean reward before training of the runs of a block."""
    runs = evidence.runs[evidence.runs["block"] == words]
    return f"{runs['start'].mean():.2f}"


PARTS: dict[str, Callable[[Evidence, str], str]] = {
    "claims": claims_table,
    "levels": levels_table,
    "unresolved": unresolved_sentences,
    "start": start,
    "margin": lambda evidence, words: str(MARGIN),
    "level": lambda evidence, words: str(LEVEL),
    "power": lambda evidence, words: str(POWER),
    "runs": lambda evidence, words: f"{len(evidence.runs):,} of {len(evidence.plan):,}",
    "hours": lambda evidence, words: f"{evidence.runs['hours'].sum():.0f}",
    "blocks": lambda evidence, words: " ".join(BLOCKS),
    "reward": lambda evidence, words: REWARD,
    "collapse": lambda evidence, words: COLLAPSE,
    "without": lambda evidence, words: WITHOUT,
}
"""What stands between double braces in the template, by its first word."""


# --- the files beside it --------------------------------------------------------------------------------------------
def contrasts(evidence: Evidence) -> pd.DataFrame:
    """Every contrast of every claim, a row each.

    ``seeds_needed`` and ``hours``: what would resolve the part, at its contrast with the least p.
    """
    import pandas as pd

    rows = []
    for name, decided in evidence.trained.items():
        missing = {id(part.row): part for part in decided.unresolved}
        for part, rows_of_part in decided.parts.items():
            for row in rows_of_part:
                cost = missing.get(id(row))
                rows.append(
                    {
                        "claim": name,
                        "part": part,
                        "contrast": row["contrast"],
                        "at": row["at"],
                        "outcome": LABELS[row["outcome"]],
                        "mean_a": _cell(row.get("a")),
                        "mean_b": _cell(row.get("b")),
                        "difference": _cell(row.get("difference")),
                        "low": _cell(row.get("low")),
                        "high": _cell(row.get("high")),
                        "p": _cell(row.get("p")),
                        "p_holm": _cell(row["p_holm"]),
                        "p_same": _cell(row.get("p_same")),
                        "collapsed": row.get("collapsed"),
                        "pairs": f"{row['pairs']} of {row['planned']}",
                        "says": row["decision"],
                        "seeds_needed": str(cost.seeds) if cost else "",
                        "hours": f"{cost.hours:.1f}" if cost else "",
                    }
                )
    return pd.DataFrame(rows)


def _cell(value: float | None) -> str:
    """Three digits: more would differ between CPUs. Empty for what was not computed."""
    if value is None:
        return ""
    return pages.three_digits(value)


def blocks(evidence: Evidence) -> pd.DataFrame:
    """The runs of each block, their wall times added, and the commits of which they are."""
    import pandas as pd

    rows = []
    for block in BLOCKS:
        runs = evidence.runs[evidence.runs["block"] == block]
        rows.append(
            {
                "block": block,
                "runs": len(runs),
                "planned": int((evidence.plan["block"] == block).sum()),
                "failed": int((runs["status"] == "FAILED").sum()),
                "collapsed": int(runs["collapsed"].eq(True).sum()),
                "hours": f"{runs['hours'].sum():.1f}",
                "commits": " ".join(sorted(set(runs["commit"]))),
            }
        )
    return pd.DataFrame(rows)


def texts(evidence: Evidence) -> dict[str, str]:
    """The text files of the folder, by name."""
    files = {"README.md": page(evidence)}
    for name, frame in (("contrasts.csv", contrasts(evidence)), ("blocks.csv", blocks(evidence))):
        files[name] = frame.to_csv(index=False, lineterminator="\n")
    return files


def draw_figures(evidence: Evidence, names: Sequence[str], folder: Path) -> None:
    """The figure of each named claim, in ``folder``; none for a claim without runs."""
    # Imported here: matplotlib, which the page does not need.
    from research.studies.claim_figures import draw

    for name in names:
        rows = evidence.trained[name].rows
        if any(row.get("difference") is not None for row in rows):
            draw(rows, folder / f"{_anchor(name)}.svg")
