"""The claims of results/evidence/protocol_2026_12.md, decided from the runs of its blocks.

Written before any judged run. Sides of a contrast are paired by warm start and seed. A contrast is decided after Holm
over the contrasts of its claim; q is the false discovery rate over all contrasts of the page.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.results.compare import verdict_on
from kl_comedy.results.figures import legend_below
from kl_comedy.results.values import with_values
from kl_comedy.slurm.grid import expand, read_grid
from kl_comedy.statistics import (
    LEVEL,
    Interval,
    Paired,
    false_discovery_rate,
    holm,
    interval,
    paired_difference,
    power,
)
from research.studies import pages

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "results" / "evidence_2026_12"
GRIDS = {
    "hack_tune": "hack/tune.yaml",
    "hack_tune_edge": "hack/tune_edge.yaml",
    "hack_tune_edge_fast": "hack/tune_edge_fast.yaml",
    "hack_judged": "hack/judged.yaml",
    "hack_judged_fast": "hack/judged_fast.yaml",
    "hack_target": "hack/target.yaml",
    "centring": "centring/centring.yaml",
    "rates": "rates/rates.yaml",
}
MARGIN = 0.015
GOLD = "metrics.eval/heldout/reward"
"""Of runs with `gold`, this is the gold reward."""
COLUMNS = {
    GOLD: "gold",
    "metrics.eval/heldout/proxy": "proxy",
    "metrics.eval/heldout/kl/exact_reverse_sequence": "kl",
    "params.model.options.seed": "start",
    "params.seed": "seed",
    "params.lag.steps": "lag",
    "params.optimizer.lr": "rate",
    "params.kl.0.beta": "beta",
    "params.name": "name",
    "tags.sweep": "block",
}
FORMS = {
    "none": "no KL",
    "k1-to-go": "k1 to go",
    "k2": "k2 in loss",
    "k3": "k3 in loss",
    "k3-clamped": "k3 in loss, clamped as in verl",
    "k3-ratio": "k3 x token ratio",
    "exact-loss": "exact, own token",
    "exact-prefix": "exact x prefix, bounded",
}
"""Each form of block 1 by its name on the pages (:data:`research.studies.pages.FAMILIES`)."""
COLLAPSED = 0.5
"""A run has collapsed whose end is below this share of its start."""
FEW = 1
"""The most collapses of an arm that Z6 and Z9 allow."""
ARMS = {
    "hack_tune": ("lag", "form", "beta", "rate"),
    "hack_tune_edge": ("lag", "form", "beta", "rate"),
    "hack_tune_edge_fast": ("lag", "form", "beta", "rate"),
    "hack_judged": ("lag", "form", "beta", "rate"),
    "hack_judged_fast": ("lag", "form", "beta"),
    "hack_target": ("lag", "form"),
    "centring": ("lag", "form"),
    "rates": ("lag", "form", "rate"),
}
"""What a row of a block's table is."""
HEAD = """\
# Evidence of 2026-12: what came out

<!-- python -m research.studies december --print -->

The claims, blocks and rules are those of [the protocol](../evidence/protocol_2026_12.md), written before the runs. Runs
are in [export.parquet](export.parquet), their hours in [hours.csv](hours.csv)."""
LEAST_RUNS = 5
"""Of so many runs a mean has an interval."""
Values = Mapping[Hashable, float]
"""Gold reward at the end, by warm start and seed."""


# --- runs ------------------------------------------------------------------------------------------------------------


def read(export: Path) -> pd.DataFrame:
    """The finished runs: a row each, with the columns named in :data:`COLUMNS`, ``form`` and ``collapsed``."""
    import pandas as pd

    runs = pd.read_parquet(export)
    runs = runs[(runs["status"] == "FINISHED") & runs["tags.sweep"].isin(GRIDS)]
    first = with_values(str(export), runs, [GOLD], "first")[GOLD]
    frame = runs.reindex(columns=list(COLUMNS)).rename(columns=COLUMNS)
    frame["collapsed"] = frame["gold"] < COLLAPSED * first
    for name in ("start", "seed", "lag"):
        frame[name] = frame[name].astype(int)
    frame["rate"] = frame["rate"].astype(float)
    forms = {block: forms_of(file) for block, file in GRIDS.items() if (frame["block"] == block).any()}
    frame["form"] = [forms[block][name] for block, name in zip(frame["block"], frame["name"], strict=True)]
    return frame.reset_index(drop=True)


def forms_of(file: str) -> dict[str, str]:
    """The form of each run's name in a grid; a row of its own has it before the lag."""
    points = expand(read_grid(ROOT / "configs" / file))
    return {point.label: point.values.get("kl") or point.label.split("-lag-")[0] for point in points}


def planned_runs(file: str) -> int:
    """The runs of a grid; 0 for one that is not written yet."""
    grid = ROOT / "configs" / file
    return len(expand(read_grid(grid))) if grid.is_file() else 0


@dataclass(frozen=True)
class Block:
    """The runs of one grid."""

    runs: pd.DataFrame

    def of(self, form: str, **where: float) -> pd.DataFrame:
        """The runs of a form; ``where`` restricts lag or rate."""
        chosen = self.runs[self.runs["form"] == form]
        for name, value in where.items():
            chosen = chosen[chosen[name] == value]
        return chosen

    def gold(self, form: str, **where: float) -> Values:
        """Held-out gold reward at the end, by warm start and seed."""
        chosen = self.of(form, **where)
        return dict(zip(zip(chosen["start"], chosen["seed"], strict=True), chosen["gold"], strict=True))

    def best_rate(self, form: str, lag: int) -> float:
        """The rate with the highest mean."""
        means = self.of(form, lag=lag).groupby("rate")["gold"].mean()
        return float(max(means.index, key=lambda rate: means[rate]))


# --- contrasts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The mean over pairs of side ``a`` less that of side ``b``."""

    claim: str
    what: str
    a: Values
    b: Values
    expected: str
    """What the claim expects: ``above``, ``below``, ``the same`` or ``not the same``."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A contrast and its verdict."""

    contrast: Contrast
    paired: Paired
    p: float | None
    """Of no difference, adjusted by Holm over the claim."""
    q: float | None
    power: float
    """Of finding a difference of the margin as one contrast of the claim."""
    verdict: str
    """``above``, ``below``, ``the same`` or ``not resolved``."""

    @property
    def speaks(self) -> str:
        """``for`` the claim, ``against`` it, or empty."""
        if self.verdict == "not resolved":
            return ""
        expected = self.contrast.expected
        if expected == "not the same":
            return "against" if self.verdict == "the same" else "for"
        return "for" if self.verdict == expected else "against"


def block_1(judged: Block, *, bounded: str = "H1", helps: str = "H2") -> Iterator[Contrast]:
    """The claims that a bounded pull ends below the reverse forms, and that a KL ends above none."""
    for lag in (0, 10):
        for a in ("k3", "k3-clamped"):
            for b in ("k3-ratio", "exact-loss"):
                yield _contrast(bounded, judged, a, b, "below", lag=lag)
    for lag in (0, 10):
        for form in list(FORMS)[1:]:
            yield _contrast(helps, judged, form, "none", "above", lag=lag)


def equal_kl(target: Block) -> Iterator[Contrast]:
    for b in ("k3-ratio", "exact-loss"):
        yield _contrast("H3", target, "k3-clamped", b, "below")


def block_2(rates: Block) -> Iterator[Contrast]:
    for lag in (4, 10):
        for form in ("k1-to-go", "k3-clamped", "exact-loss", "exact-prefix"):
            best = rates.best_rate(form, lag)
            best_without = rates.best_rate("none", lag)
            yield Contrast(
                claim="R1",
                what=f"{form} at {best:g} - none at {best_without:g}, lag {lag}",
                a=rates.gold(form, lag=lag, rate=best),
                b=rates.gold("none", lag=lag, rate=best_without),
                expected="not the same",
            )


def block_3(centring: Block) -> Iterator[Contrast]:
    lags = (4, 10, 20)
    for lag in lags:
        yield _contrast("Z1", centring, "exact-c1", "exact-c0", "above", lag=lag)
    for lag in lags:
        yield _contrast("Z2", centring, "exact-c0.5", "exact-c0", "above", lag=lag)
        yield _contrast("Z2", centring, "exact-c0.5", "exact-c1", "below", lag=lag)
    for lag in lags:
        yield Contrast(
            claim="Z3",
            what=f"(k1-c1 - k1-c0) - (exact-c1 - exact-c0), lag {lag}",
            a=_less(centring.gold("k1-c1", lag=lag), centring.gold("k1-c0", lag=lag)),
            b=_less(centring.gold("exact-c1", lag=lag), centring.gold("exact-c0", lag=lag)),
            expected="below",
        )
    for lag in lags:
        for form in ("exact-score", "exact-score-top4"):
            yield _contrast("Z7", centring, form, "exact-c0", "above", lag=lag)
    for lag in lags:
        yield _contrast("Z8", centring, "exact-score-top4", "exact-score", "the same", lag=lag)


def _contrast(claim: str, block: Block, a: str, b: str, expected: str, **where: float) -> Contrast:
    place = "".join(f", {name} {value}" for name, value in where.items())
    return Contrast(
        claim=claim, what=f"{a} - {b}{place}", a=block.gold(a, **where), b=block.gold(b, **where), expected=expected
    )


def _less(a: Values, b: Values) -> Values:
    return {key: a[key] - b[key] for key in a if key in b}


def decide(contrasts: Sequence[Contrast]) -> list[Decided]:
    """Decide all contrasts of the page, in their order."""
    paired = [paired_difference(contrast.a, contrast.b, margin=MARGIN) for contrast in contrasts]
    q = false_discovery_rate([pair.p for pair in paired])
    decided: list[Decided] = []
    for claim in dict.fromkeys(contrast.claim for contrast in contrasts):
        places = [place for place, contrast in enumerate(contrasts) if contrast.claim == claim]
        p = holm([paired[place].p for place in places])
        p_same = holm([paired[place].p_equivalent for place in places])
        level = (1 - LEVEL) / len(places)
        for place, p_place, p_same_place in zip(places, p, p_same, strict=True):
            pair = paired[place]
            its_power = 0.0 if pair.deviation is None else power(MARGIN, pair.deviation, pair.difference.n, level)
            decided.append(
                Decided(
                    contrast=contrasts[place],
                    paired=pair,
                    p=p_place,
                    q=q[place],
                    power=its_power,
                    verdict=verdict_on(
                        pair.difference.mean or 0.0, pair.deviation, p=p_place, p_same=p_same_place, power=its_power
                    ),
                )
            )
    return decided


# --- collapses -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Collapses:
    """A claim about how many runs collapsed."""

    claim: str
    what: str
    p: float | None
    """Of Fisher's exact test, not adjusted; None for a claim about one arm."""
    speaks: str


def collapse_claims(centring: Block) -> list[Collapses]:
    """Z4, Z5, Z6 and Z9."""
    rows = []
    for form in ("exact-c0", "exact-c0.5"):
        rows.append(_more_collapses("Z4", centring, (form, 20), ("exact-c1", 20)))
    rows.append(_more_collapses("Z5", centring, ("exact-c0.5", 20), ("exact-c0.5", 4)))
    for claim, forms in {"Z6": ("exact-c1", "exact-c1.5"), "Z9": ("exact-score", "exact-score-top4")}.items():
        for form in forms:
            count, runs = _collapses(centring, form, 20)
            speaks = "for" if count <= FEW else "against"
            rows.append(Collapses(claim=claim, what=f"{form}: {count} of {runs}, lag 20", p=None, speaks=speaks))
    return rows


def _collapses(block: Block, form: str, lag: int) -> tuple[int, int]:
    runs = block.of(form, lag=lag)
    return int(runs["collapsed"].sum()), len(runs)


def _more_collapses(claim: str, block: Block, a: tuple[str, int], b: tuple[str, int]) -> Collapses:
    """Whether more runs of ``a`` (form and lag) collapsed than of ``b``, by Fisher's exact test, two-sided."""
    from scipy.stats import fisher_exact

    counts = [_collapses(block, form, lag) for form, lag in (a, b)]
    p = float(fisher_exact([[count, runs - count] for count, runs in counts]).pvalue)
    speaks = ""
    if p < 1 - LEVEL:
        (count_a, runs_a), (count_b, runs_b) = counts
        speaks = "for" if count_a / runs_a > count_b / runs_b else "against"
    sides = [f"{form} {count} of {runs} (lag {lag})" for (form, lag), (count, runs) in zip((a, b), counts, strict=True)]
    return Collapses(claim=claim, what=" - ".join(sides), p=p, speaks=speaks)


# --- the page --------------------------------------------------------------------------------------------------------


def write_page(export: Path, out: Path) -> None:
    """Write README.md and the figures of the blocks that have runs into ``out``."""
    (out / "README.md").write_text(page(export, out))


def page(export: Path, figures: Path | None = None) -> str:
    """The page, of the blocks whose runs are all there; its figures go into ``figures``.

    Of a block that is still running only the number of runs is shown: its means would be a look at the outcome.
    """
    runs = read(export)
    blocks = {name: Block(runs[runs["block"] == name]) for name in GRIDS}
    planned = {name: planned_runs(file) for name, file in GRIDS.items()}
    is_whole = {name: 0 < planned[name] == len(block.runs) for name, block in blocks.items()}
    contrasts: list[Contrast] = []
    collapses: list[Collapses] = []
    if is_whole["hack_judged"]:
        contrasts += block_1(blocks["hack_judged"])
    if is_whole["hack_target"]:
        contrasts += equal_kl(blocks["hack_target"])
    if is_whole["hack_judged_fast"]:
        contrasts += block_1(blocks["hack_judged_fast"], bounded="H4", helps="H5")
    if is_whole["rates"]:
        contrasts += block_2(blocks["rates"])
    if is_whole["centring"]:
        contrasts += block_3(blocks["centring"])
        collapses = collapse_claims(blocks["centring"])
    decided = decide(contrasts)
    parts: list[str | pd.DataFrame] = [HEAD]
    if decided:
        parts += ["## Claims", summary_table(decided, collapses), "## Contrasts", contrast_table(decided)]
    if collapses:
        parts += ["## Collapses", collapse_table(collapses)]
    for name, block in blocks.items():
        if is_whole[name]:
            parts += [f"## Runs of {name}", arm_table(block, ARMS[name])]
        elif planned[name]:
            parts.append(f"{name}: {len(block.runs)} of {planned[name]} runs.")
    if figures is not None and is_whole["hack_judged"]:
        is_tuned = runs["block"].isin(["hack_tune", "hack_tune_edge", "hack_tune_edge_fast"])
        draw_frontier(Block(runs[is_tuned]), blocks["hack_judged"], figures / "frontier.svg")
    return pages.page(parts)


def summary_table(decided: Sequence[Decided], collapses: Sequence[Collapses]) -> pd.DataFrame:
    """Each claim: contrasts for it, against it, of how many."""
    import pandas as pd

    speaks = [(item.contrast.claim, item.speaks) for item in decided] + [(row.claim, row.speaks) for row in collapses]
    rows = []
    for claim in sorted({claim for claim, _ in speaks}):
        words = [word for name, word in speaks if name == claim]
        rows.append({"claim": claim, "for": words.count("for"), "against": words.count("against"), "of": len(words)})
    return pd.DataFrame(rows)


def contrast_table(decided: Sequence[Decided]) -> pd.DataFrame:
    """Each contrast: difference with its interval, p, q, power and verdict."""
    import pandas as pd

    rows = []
    for item in decided:
        difference = item.paired.difference
        rows.append(
            {
                "claim": item.contrast.claim,
                "contrast": item.contrast.what,
                "difference of gold reward": _with_bounds(difference),
                "pairs": difference.n,
                "p (Holm)": _small(item.p),
                "q": _small(item.q),
                "power at the margin": f"{item.power:.2f}",
                "verdict": item.verdict,
            }
        )
    return pd.DataFrame(rows)


def collapse_table(collapses: Sequence[Collapses]) -> pd.DataFrame:
    import pandas as pd

    rows = [{"claim": row.claim, "collapsed": row.what, "p": _small(row.p), "says": row.speaks} for row in collapses]
    return pd.DataFrame(rows)


def arm_table(block: Block, by: Sequence[str]) -> pd.DataFrame:
    """Each arm of a block: gold, proxy and exact KL at the end, and how many runs collapsed."""
    import pandas as pd

    rows = []
    for keys, runs in block.runs.groupby(list(by), sort=False):
        row: dict[str, Any] = dict(zip(by, keys, strict=True))
        for name in ("gold", "proxy", "kl"):
            if runs[name].notna().all():
                row[name] = _with_bounds(interval(list(runs[name])))
        row["collapsed"] = f"{int(runs['collapsed'].sum())} of {len(runs)}"
        rows.append(row)
    return pd.DataFrame(rows)


def _with_bounds(value: Interval) -> str:
    if value.mean is None:
        return ""
    # Of two seeds an interval says nothing.
    if value.n < LEAST_RUNS or value.low is None or value.high is None:
        return f"{value.mean:.3f}"
    return f"{value.mean:.3f} [{value.low:.3f}, {value.high:.3f}]"


def _small(p: float | None) -> str:
    return "" if p is None else f"{p:.2g}"


def draw_frontier(tuned: Block, judged: Block, path: Path) -> None:
    """Gold reward against exact KL at the end: tuning runs small, the mean of each judged form large; a panel a lag."""
    looks = pages.looks_of(list(FORMS.values()))
    with pages.figure(path, 1, 2, 3.2, sharey=True) as (drawing, (panels,)):
        for axes, lag in zip(panels, (0, 10), strict=True):
            for form, name in FORMS.items():
                look = looks[name]
                runs = tuned.of(form, lag=lag)
                axes.scatter(runs["kl"], runs["gold"], s=8, color=look["color"], alpha=0.5)
                best = judged.of(form, lag=lag)
                marker = look.get("marker", "o")
                label = name if lag == 0 else None
                axes.plot(best["kl"].mean(), best["gold"].mean(), marker, ms=9, color=look["color"], label=label)
            axes.set(xscale="symlog", xlabel="exact KL, nats per completion", title=f"lag {lag}")
        panels[0].set_ylabel("held-out gold reward")
        legend_below(drawing, "small: tuning runs; large: mean of the judged ones")
