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
    "hack_smollm2": "hack/smollm2.yaml",
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
TUNED = ("hack_tune", "hack_tune_edge", "hack_tune_edge_fast")
"""Blocks whose runs are evaluated at their end only, so that a collapse cannot be told. Their arms are in arms.csv."""
COLLAPSED = 0.5
"""A run has collapsed whose end is below this share of its start."""
FEW = 1
"""The most collapses of an arm that Z6 and Z9 allow."""
ARMS = {
    "hack_judged": ("lag", "form", "beta", "rate"),
    "hack_judged_fast": ("lag", "form", "beta"),
    "hack_target": ("lag", "form"),
    "centring": ("lag", "form"),
    "rates": ("lag", "form", "rate"),
    "hack_smollm2": ("form",),
}
"""What a row of a block's table is."""
HEAD = """\
# Evidence of 2026-12: what came out

<!-- python -m research.studies december --print -->

The claims, blocks and rules are those of [the protocol](../evidence/protocol_2026_12.md), written before the runs. Runs
are in [export.parquet](export.parquet), their hours in [hours.csv](hours.csv), the arms of tuning in
[arms.csv](arms.csv). A block is decided, and its means are shown, when all of its runs are there."""
LEAST_RUNS = 5
"""Of so many runs a mean has an interval."""
CLAIMS = {
    "H1": "bare k3, clamped or not, ends below k3 x token ratio and the exact KL; each at its best rate",
    "H2": "a KL ends above no KL; each at its best rate",
    "H3": "at one nat k3 clamped ends below k3 x token ratio and the exact KL",
    "H4": "as H1, at the rate 2e-4",
    "H5": "as H2, at the rate 2e-4",
    "R1": "with a reward that is right a form differs from no KL, each at its best rate",
    "Z1": "the exact cost to go less its group's mean (c = 1) ends above the cost itself (c = 0)",
    "Z2": "half of the mean (c = 0.5) ends between them",
    "Z3": "k1 to go gains less from c = 1 than the exact cost",
    "Z4": "at lag 20 more runs of c = 0, and of c = 0.5, collapse than of c = 1",
    "Z5": "of c = 0.5 more runs collapse at lag 20 than at lag 4",
    "Z6": "at lag 20 at most 1 of 15 runs of c = 1, and of c = 1.5, collapses",
    "Z7": "the exact cost with its score centred ends above c = 0",
    "Z8": "score centring by the 4 likeliest tokens is the same as exact",
    "Z9": "at lag 20 at most 1 of 15 runs with the score centred collapses",
}
"""The claims of the protocol, in its order."""
WORDS = {
    "hack_tune": "Block 1, tuning",
    "hack_tune_edge": "Block 1, tuning beyond the ends of its axes",
    "hack_tune_edge_fast": "Block 1, tuning beyond the ends at 2e-4",
    "hack_judged": "Block 1, judged: each form at its best rate and beta",
    "hack_judged_fast": "Block 1, judged at the rate 2e-4: each form at its best beta",
    "hack_target": "Block 1, judged at one nat",
    "centring": "Block 3: centring",
    "rates": "Block 2: the best rate, with a reward that is right",
    "hack_smollm2": "Block 1 on SmolLM2-135M, an illustration",
}
CENTRED = {
    "exact-c0": "c = 0",
    "exact-c0.5": "0.5",
    "exact-c1": "1",
    "exact-c1.5": "1.5",
    "exact-score": "score",
    "exact-score-top4": "score, top 4",
    "none": "no KL",
}
"""The arms of the figure of block 3, from left to right."""
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
    # A model that is no pocket policy has one warm start: itself.
    frame["start"] = frame["start"].fillna(0)
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


def contrasts_of(name: str, block: Block) -> Iterator[Contrast]:
    """The contrasts that the protocol names for a grid; none of tuning."""
    if name == "hack_judged":
        yield from block_1(block)
    elif name == "hack_judged_fast":
        yield from block_1(block, bounded="H4", helps="H5")
    elif name == "hack_target":
        yield from equal_kl(block)
    elif name == "rates":
        yield from block_2(block)
    elif name == "centring":
        yield from block_3(block)


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
    """Write README.md, the arms of tuning and the figures of the blocks that are whole into ``out``."""
    (out / "README.md").write_text(page(export))
    runs = read(export)
    tuned = Block(runs[runs["block"].isin(TUNED)])
    arm_table(tuned, ("lag", "form", "beta", "rate")).to_csv(out / "arms.csv", index=False)
    blocks = whole_blocks(runs)
    if "hack_judged" in blocks:
        draw_frontier(tuned, blocks["hack_judged"], out / "frontier.svg")
    if "hack_judged_fast" in blocks:
        draw_hack(blocks["hack_judged"], blocks["hack_judged_fast"], out / "hack.svg")
    if "centring" in blocks:
        draw_centring(blocks["centring"], out / "centring.svg")


def whole_blocks(runs: pd.DataFrame) -> dict[str, Block]:
    """The blocks whose runs are all there. A mean of the others would be a look at the outcome."""
    whole = {}
    for name, file in GRIDS.items():
        its_runs = runs[runs["block"] == name]
        if 0 < planned_runs(file) == len(its_runs):
            whole[name] = Block(its_runs)
    return whole


def page(export: Path) -> str:
    """The page: claims, figures, contrasts and arms of the blocks that are whole; how far the others are."""
    runs = read(export)
    blocks = whole_blocks(runs)
    decided = decide([contrast for name, block in blocks.items() for contrast in contrasts_of(name, block)])
    collapses = collapse_claims(blocks["centring"]) if "centring" in blocks else []
    parts: list[str | pd.DataFrame] = [HEAD, progress_table(runs)]
    if decided:
        parts += ["## Claims", summary_table(decided, collapses)]
    if "hack_judged" in blocks:
        parts.append("![gold reward against the exact KL, by form](frontier.svg)")
    if "hack_judged_fast" in blocks:
        parts.append("![gold reward of every judged run at the end, by form](hack.svg)")
    if "centring" in blocks:
        parts.append("![gold reward at the end by what is taken off the cost, a panel a lag](centring.svg)")
    if decided:
        parts += ["## Contrasts", contrast_table(decided)]
    if collapses:
        parts += ["## Collapses", collapse_table(collapses)]
    for name, by in ARMS.items():
        if name in blocks:
            parts += [f"## {WORDS[name]}", arm_table(blocks[name], by)]
    return pages.page(parts)


def progress_table(runs: pd.DataFrame) -> pd.DataFrame:
    """How many runs of each block have ended."""
    import pandas as pd

    rows = []
    for name, file in GRIDS.items():
        rows.append({"block": WORDS[name], "runs": int((runs["block"] == name).sum()), "of": planned_runs(file)})
    return pd.DataFrame(rows)


def summary_table(decided: Sequence[Decided], collapses: Sequence[Collapses]) -> pd.DataFrame:
    """Each claim: contrasts for it, against it, of how many."""
    import pandas as pd

    speaks = [(item.contrast.claim, item.speaks) for item in decided] + [(row.claim, row.speaks) for row in collapses]
    rows = []
    for claim, text in CLAIMS.items():
        words = [word for name, word in speaks if name == claim]
        if words:
            counts = {"for": words.count("for"), "against": words.count("against"), "of": len(words)}
            rows.append({"claim": claim, "says": text, **counts})
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
    for keys, runs in block.runs.groupby(list(by), dropna=False):
        row: dict[str, Any] = dict(zip(by, keys, strict=True), runs=len(runs))
        for name in ("gold", "proxy", "kl"):
            if runs[name].notna().all():
                row[name] = _with_bounds(interval(list(runs[name])))
        if not runs["block"].isin(TUNED).any():
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
            axes.set(xscale="symlog", xlabel="exact KL, nats per completion, log axis", title=f"lag {lag}")
        panels[0].set_ylabel("held-out gold reward")
        legend_below(drawing, "small: tuning runs (2 seeds); large: mean of the judged ones (4 seeds, 5 warm starts)")


def draw_hack(judged: Block, fast: Block, path: Path) -> None:
    """Gold reward of every judged run at the end, by form: a row a rate, a panel an age of the samples."""
    rows = {"each form at its own best rate": judged, "at the rate 2e-4": fast}
    ages = {0: "fresh samples", 10: "samples 10 updates old"}
    with pages.figure(path, 2, 2, 2.6, sharey=True) as (drawing, panels):
        for across, (words, block) in zip(panels, rows.items(), strict=True):
            for axes, (lag, age) in zip(across, ages.items(), strict=True):
                _draw_runs(axes, block, lag)
                axes.set_title(f"{age}, {words}")
            across[0].set_ylabel("held-out gold reward")
        for axes in panels[-1]:
            axes.set_xticks(range(len(FORMS)), list(FORMS.values()), rotation=60, ha="right")
        legend_below(drawing, "a dot: one run (4 seeds, 5 warm starts; below 2 and 5); each form at its own best beta")


def _draw_runs(axes: Any, block: Block, lag: int) -> None:
    """A dot for each run, its form along the axis, and a bar at the mean."""
    looks = pages.looks_of(list(FORMS.values()))
    axes.set_xticks(range(len(FORMS)), [])
    for place, (form, name) in enumerate(FORMS.items()):
        gold = block.of(form, lag=lag)["gold"]
        # Side by side, so that runs of one reward can be told apart.
        shift = [place + 0.5 * ((index + 0.5) / len(gold) - 0.5) for index in range(len(gold))]
        axes.plot(shift, gold, "o", ms=3, color=looks[name]["color"])
        axes.plot([place - 0.35, place + 0.35], [gold.mean()] * 2, lw=2, color="black", label="mean")


def draw_centring(centring: Block, path: Path) -> None:
    """Gold reward of every run at the end, by what is taken off the exact cost; a panel a lag, a bar the mean."""
    families = ("exact to go", FORMS["none"])
    looks = pages.looks_of(families)
    with pages.figure(path, 1, 3, 2.6, sharey=True) as (drawing, (panels,)):
        for axes, lag in zip(panels, (4, 10, 20), strict=True):
            for place, form in enumerate(CENTRED):
                gold = centring.of(form, lag=lag)["gold"]
                # Side by side, so that runs of one reward can be told apart.
                shift = [place + 0.4 * ((index + 0.5) / len(gold) - 0.5) for index in range(len(gold))]
                family = families[form == "none"]
                axes.plot(shift, gold, "o", ms=3, color=looks[family]["color"], label=family)
                axes.plot([place - 0.3, place + 0.3], [gold.mean()] * 2, lw=2, color="black", label="mean")
            axes.set(title=f"samples {lag} updates old")
            axes.set_xticks(range(len(CENTRED)), list(CENTRED.values()), rotation=60, ha="right")
        panels[0].set_ylabel("held-out reward")
        legend_below(drawing, "a dot: one run (3 seeds, 5 warm starts)")
