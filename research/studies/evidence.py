"""The claims of results/evidence/protocol.md, decided from an export of its runs.

A claim is data: parts, each a list of contrasts. A contrast is paired by seed and computed by
:func:`kl_comedy.results.compare.compare_families` in every cell (learning rate, beta, lag) that the grids in
``configs/evidence/`` plan for both of its sides. All contrasts of a claim are one family for Holm's adjustment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError, bad_value
from kl_comedy.io import read_yaml
from kl_comedy.results import values
from kl_comedy.results.compare import SEED, EqualKL, compare_families, groups_of
from kl_comedy.results.runs import BETA, FAMILY, NO_KL, history, read_runs
from kl_comedy.slurm.grid import GridPoint, expand, read_grid
from kl_comedy.statistics import holm, parse_rule

if TYPE_CHECKING:
    import pandas as pd

GRIDS = Path(__file__).parents[2] / "configs" / "evidence"
CLAIMS = Path(__file__).with_name("claims.yaml")
REAL_MODEL = ("smollm2", "smollm2_betas", "smollm2_async")
"""Blocks with three seeds, too few to find two forms the same."""

BLOCKS = (
    "core",
    "core_betas",
    "core_seeds",
    "updates",
    "fix",
    "lags",
    "lags_parts",
    "liu",
    "paper_async",
    "lora",
    *REAL_MODEL,
    "lags_fresh",
    "lags_exact",
    "lags_baseline",
    "lags_betas",
    "lags_best",
    "async_fresh",
    "liu_bounded",
)
"""The grids of configs/evidence, in the order of the protocol."""

# The rules of docs/protocol.md. A change here would change verdicts that are published.
COLLAPSE = "eval/heldout/reward < 0.5 start last 2"
MARGIN = 0.03
"""Two rewards within it are the same."""

LEVEL = 0.05
LAST_UPDATES = 20
POWER = 0.8
MOST_PAIRS = 1000
"""Beyond it the number of seeds is not computed: nobody would run them."""

REWARD = "eval/heldout/reward"
KL = "eval/heldout/kl/exact_reverse_sequence"
OTHER_FAMILIES = ("two_terms", "four_terms", "three_digits", "subtraction")
LABELS = {
    "end": "held-out reward, end",
    "area": "held-out reward, area",
    "kl": "KL, nats per completion",
    "outside": "out-of-domain reward",
    "entropy": "held-out entropy, nats per token",
    "length_sd": f"sd of length over the last {LAST_UPDATES} updates, tokens",
    "reward_sd": f"sd of training reward over the last {LAST_UPDATES} updates",
    "collapsed": "share of runs that collapsed",
}
REWARDS = ("end", "area", "outside")
"""Outcomes with a margin within which they are the same."""

METRICS = {"end": REWARD, "area": REWARD, "kl": KL, "entropy": "eval/heldout/policy/entropy"}
"""The metrics of outcomes that are one metric."""

FORMS = {
    "none": NO_KL,
    "k1-reward": "k1 in reward",
    "k1-loss": "k1 in loss",
    "k2-loss": "k2 in loss",
    "k3-reward": "k3 in reward",
    "k3-loss": "k3 in loss",
    "k1-to-go": "k1 to go",
    "exact-to-go": "exact to go",
    "exact-to-go-own": "exact to go, own baseline",
    "k1-both": "k1 in both",
    "k3-both": "k3 in both",
    "k2-corrected": "k2 x ratio",
    "k2-clipped": "k2 x ratio, clipped",
    "k2-bounded": "k2 in loss, bounded",
    "k3-bounded": "k3 in loss, bounded",
    "k3-token": "k3 x token ratio",
    "k3-prefix": "k3 x prefix",
    "k1-sequence": "k1 x sequence ratio",
    "exact-prefix": "exact x prefix",
    "exact-robust": "exact x prefix, bounded",
    "exact-token": "exact, own token",
}
UNITS = {"lag": "lag ", "rate": "learning rate ", "beta": "beta ", "updates": "updates of a batch: "}
"""What stands before the value of each variable that contrasts are split by."""

Row = dict[str, Any]
"""One contrast in one cell, for one outcome: a row of contrasts.csv.

- ``contrast``, ``at``, ``outcome``, ``sign``: what is compared, where, and what the claim says of it
- ``key``, ``planned``, ``pairs``: the cell, and the seeds that both sides share in the plan and among the runs
- ``forms``: the names of both sides, of which each has a look
- ``a``, ``b``, ``difference``, ``low``, ``high``, ``p``, ``p_same``, ``collapsed``: only where both sides have runs;
  ``a_low`` and so on are the intervals of the sides' means
- ``p_holm``, ``decision``: added by :func:`evaluate`
"""


# --- claims ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Contrast:
    """``a`` minus ``b``, two of :data:`FORMS`; the other fields are those of claims.yaml."""

    a: str
    b: str
    blocks: list[str]
    signs: dict[str, int | None]
    by: list[str] = field(default_factory=lambda: ["rate"])
    a_where: dict[str, str] = field(default_factory=dict)
    b_where: dict[str, str] = field(default_factory=dict)
    at_kl: list[float] = field(default_factory=list)
    label: str = ""
    ranked_as: str = ""

    def __post_init__(self) -> None:
        if self.at_kl and "collapsed" in self.signs:
            reason = "the runs without KL are points of both frontiers, and Fisher's test needs two sets of runs"
            raise bad_value("signs", "collapsed", "an outcome other than collapsed beside at_kl", reason)

    @property
    def name(self) -> str:
        """As the page shows it. Two contrasts of one form differ in what ``label`` says."""
        if self.label:
            return self.label.format(form=FORMS[self.a])
        return f"{FORMS[self.a]} - {FORMS[self.b]}"

    @property
    def sides(self) -> dict[str, Side]:
        """The runs that are compared, by the name that they have in the comparison.

        At equal KL a side is a frontier: a point per run over its KL. The runs without KL end both frontiers.
        """
        if not self.at_kl:
            # Not the forms' names: both sides may be the same form, with other settings.
            return {"a": Side(self.a, self.a_where), "b": Side(self.b, self.b_where)}
        return {FORMS[form]: Side(form, {}) for form in (self.a, self.b, "none")}

    def margin(self, outcome: str) -> float | None:
        """The difference below which the two sides are the same; None where that is not tested."""
        on_real_model = any(block in REAL_MODEL for block in self.blocks)
        if outcome not in REWARDS or on_real_model:
            return None
        return MARGIN


@dataclass(frozen=True)
class Side:
    """One side of a contrast: a form, and the values of columns to which its runs are restricted."""

    form: str
    where: Mapping[str, str]

    def rows(self, frame: pd.DataFrame, blocks: Sequence[str]) -> pd.DataFrame:
        """The rows of this side, of a plan or of runs."""
        chosen = frame["block"].isin(blocks) & (frame["form"] == self.form)
        for column, value in self.where.items():
            chosen &= frame[column] == value
        return frame[chosen]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A row of the protocol's table. ``parts``: contrasts by the name of what they decide."""

    name: str
    hypothesis: str
    remark: str | None
    parts: dict[str, list[Contrast]]

    @property
    def anchor(self) -> str:
        return self.name.lower().replace(", ", "-")

    @property
    def contrasts(self) -> list[Contrast]:
        """The contrasts of all parts."""
        return [contrast for contrasts in self.parts.values() for contrast in contrasts]


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of ``path``, a contrast for each pair of forms."""
    claims = []
    for name, raw in read_yaml(path, "table of claims").items():
        parts: dict[str, list[Contrast]] = {}
        for part, entries in raw["parts"].items():
            parts[part] = []
            for entry in entries:
                parts[part] += _contrasts(entry)
        claims.append(Claim(name=name, hypothesis=raw["hypothesis"], remark=raw.get("remark"), parts=parts))
    return claims


def _contrasts(entry: dict[str, Any]) -> list[Contrast]:
    """One per form of ``forms``, or per pair of a form of ``a`` and one of ``b``."""
    fields = dict(entry)
    if "forms" in fields:
        pairs = [(form, form) for form in fields.pop("forms")]
    else:
        pairs = list(itertools.product(fields.pop("a"), fields.pop("b")))
    return [Contrast(a=a, b=b, **fields) for a, b in pairs]


# --- runs -----------------------------------------------------------------------------------------------------------
def planned_runs() -> pd.DataFrame:
    """One row per planned run: block, name, seed, and what blocks vary as texts: form, beta, rate, lag, updates, ..."""
    import pandas as pd

    rows = []
    for block in BLOCKS:
        grid = read_grid(GRIDS / f"{block}.yaml")
        for point in expand(grid):
            rows.append({"block": block, **_planned_run(point, {**grid.overrides, **point.settings})})
    return pd.DataFrame(rows)


def _planned_run(point: GridPoint, settings: Mapping[str, Any]) -> dict[str, str]:
    """The columns of one planned run, all texts: they are matched with the texts of claims.yaml."""
    kl = settings["kl"]
    if kl == "none":
        form = "none"
        beta = 0
    else:
        # Both terms of a form in reward and loss have one beta.
        first_term = kl[0] if isinstance(kl, list) else kl
        # A grid that does not vary the KL trains k1 in reward.
        form = "k1-reward"
        beta = settings.get("kl.beta", first_term.get("beta"))
    rate = ""
    if "optimizer.lr" in settings:
        rate = f"{float(settings['optimizer.lr']):g}"
    lag = str(settings.get("lag", {}).get("steps", ""))
    updates = str(settings.get("algorithm.updates_per_batch", ""))
    parts = [label for key, label in point.values.items() if key.startswith("kl.0.")]
    return {
        "name": point.label,
        "seed": str(point.seed),
        "beta": str(beta),
        "lag": lag,
        # The labels of the grid, where it varies the key, are those of claims.yaml.
        "form": point.values.get("kl", form),
        "rate": rate,
        "updates": point.values.get("algorithm.updates_per_batch", updates),
        "parts": ", ".join(parts),
        "stale": "" if lag in ("", "0") else "yes",
    }


def measured_runs(uri: str, plan: pd.DataFrame) -> pd.DataFrame:
    """The finished runs of the plan with its columns, one column for each outcome, ``start`` and ``commit``."""
    import pandas as pd

    runs = _runs_of_protocol(uri)
    # A run that was made again counts once, with its newest finished attempt.
    runs = values.drop_repeats(runs, ("FINISHED",), ["tags.sweep"])
    runs = values.with_collapsed(uri, runs, parse_rule(COLLAPSE))

    dirty_mark = runs["tags.git.dirty"].map({"true": "+"}).fillna("")
    columns = {
        "block": runs["tags.sweep"].str.removeprefix("evidence_"),
        "name": runs["params.name"],
        "seed": runs[SEED],
        **_outcomes(uri, runs),
        SEED: runs[SEED],
        FAMILY: runs[FAMILY],
        # Empty: cells and sides say which betas are compared, and compare_families would compare each beta apart.
        BETA: "",
        "collapsed": runs["collapsed"],
        "status": runs["status"],
        "hours": runs["duration_s"] / 3600,
        "commit": runs["tags.git.commit"].str[:12] + dirty_mark,
    }
    # Runs that no grid plans (any more) have no row.
    return pd.DataFrame(columns).merge(plan, on=["block", "name", "seed"], how="inner")


def _runs_of_protocol(uri: str) -> pd.DataFrame:
    """The runs of all blocks that ended. Raises :class:`UserError` where there are none."""
    runs = read_runs(uri)
    sweeps = [f"evidence_{block}" for block in BLOCKS]
    # A store without runs has no columns.
    if not runs.empty and "tags.sweep" in runs:
        ended = runs["status"].isin(("FINISHED", "FAILED"))
        runs = runs[ended & runs["tags.sweep"].isin(sweeps)]
        if not runs.empty:
            return runs
    raise UserError(f"{uri}: no finished run of results/evidence/protocol.md")


def _outcomes(uri: str, runs: pd.DataFrame) -> dict[str, pd.Series]:
    """The outcomes of :data:`LABELS` but ``collapsed``, and ``start``: the held-out reward before training."""
    import pandas as pd

    last = values.at_last_update(runs)
    reward = f"metrics.{REWARD}"

    def at_end(metric: str) -> pd.Series:
        # A store of a few blocks may lack the metric altogether.
        missing = pd.Series(math.nan, last.index)
        return last.get(f"metrics.{metric}", missing)

    def deviation(metric: str) -> pd.Series:
        """Over the last updates of each run."""
        curves = history(uri, runs["run_id"], metric).groupby("run_id")["value"]
        return runs["run_id"].map(curves.agg(lambda curve: curve.tail(LAST_UPDATES).std()))

    outcomes: dict[str, Any] = {outcome: at_end(metric) for outcome, metric in METRICS.items()}
    outcomes["length_sd"] = deviation("train/length")
    outcomes["reward_sd"] = deviation("train/reward")
    outcomes["start"] = values.with_values(uri, runs, [reward], "first")[reward]
    # METRICS names the metric of the area too; its value is not that at the end.
    outcomes["area"] = values.with_values(uri, runs, [reward], "area")[reward]
    # Each family counts the same, whatever its number of problems.
    outcomes["outside"] = sum(at_end(f"eval/{name}/reward") for name in OTHER_FAMILIES) / len(OTHER_FAMILIES)
    return outcomes


def needed(claim: Claim, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a plan, or of runs, that the contrasts of a claim read."""
    # A set: contrasts of one claim share runs, and each counts once.
    indices: set[Any] = set()
    for contrast in claim.contrasts:
        for side in (Side(contrast.a, contrast.a_where), Side(contrast.b, contrast.b_where)):
            indices.update(side.rows(frame, contrast.blocks).index)
        if contrast.at_kl:
            indices.update(Side("none", {}).rows(frame, contrast.blocks).index)
    return frame.loc[sorted(indices)]


# --- contrasts ------------------------------------------------------------------------------------------------------
def cells_of(contrast: Contrast, plan: pd.DataFrame) -> dict[tuple[str, ...], int]:
    """The cells that are planned for both sides, with the number of common seeds."""
    a = Side(contrast.a, contrast.a_where).rows(plan, contrast.blocks)
    b = Side(contrast.b, contrast.b_where).rows(plan, contrast.blocks)
    b_of_cell = dict(groups_of(b, contrast.by))
    # Cells that only one side has, as a lag that only its block varies, cannot be paired.
    seeds = {}
    for cell, a_runs in groups_of(a, contrast.by):
        if cell in b_of_cell:
            seeds[cell] = len(set(a_runs["seed"]) & set(b_of_cell[cell]["seed"]))
    return seeds


def compare(contrast: Contrast, outcome: str, runs: pd.DataFrame, plan: pd.DataFrame) -> list[Row]:
    """A row for each planned cell (and KL): means, difference with interval, p-values, collapsed runs, pairs.

    Shares of collapsed runs are compared by Fisher's exact test.
    """
    measured = _measured(contrast, outcome, runs)
    rows = []
    for cell, planned in cells_of(contrast, plan).items():
        for nats in contrast.at_kl or (None,):
            row: Row = {
                "contrast": contrast.name,
                "at": _place(contrast, cell, nats),
                "outcome": outcome,
                "sign": contrast.signs[outcome],
                "forms": (FORMS[contrast.a], FORMS[contrast.b]),
                "planned": planned,
                "pairs": 0,
                "key": cell,
            }
            both_sides = measured.get((cell, nats))
            if both_sides is not None:
                row |= _difference(*both_sides)
                if outcome == "collapsed":
                    row |= _fisher(*both_sides)
            rows.append(_without_nan(row))

    if contrast.ranked_as:
        reference = replace(contrast, blocks=[contrast.ranked_as], ranked_as="")
        rows = _with_signs_of(rows, compare(reference, outcome, runs, plan))
    return rows


def _measured(
    contrast: Contrast, outcome: str, runs: pd.DataFrame
) -> dict[tuple[tuple[str, ...], float | None], tuple[Row, Row]]:
    """The compared rows of ``a`` and ``b``, by cell and KL (None without ``at_kl``), where both have runs."""
    import pandas as pd

    sides = contrast.sides
    a, b, *_ = sides
    chosen = [side.rows(runs, contrast.blocks).assign(**{FAMILY: name}) for name, side in sides.items()]
    if chosen[0].empty or chosen[1].empty:
        return {}

    frame = pd.concat(chosen).astype({outcome: float})
    options: dict[str, Any] = {"margin": contrast.margin(outcome)}
    if contrast.at_kl:
        options["at_kl"] = EqualKL(column="kl", nats=contrast.at_kl, start="start")
    table: dict[tuple[tuple[str, ...], str, str], Any] = {}
    for row in compare_families(frame, contrast.by, outcome, b, "t", **options).to_dict("records"):
        cell = tuple(row[variable] for variable in contrast.by)
        table[cell, row["at"], row["kl.family"]] = row

    # The places as compare_families writes them; the beta is the empty one of `measured_runs`.
    places: dict[float | None, str] = {None: "beta "}
    if contrast.at_kl:
        places = {nats: f"KL {nats:g}" for nats in contrast.at_kl}
    cells = {cell for cell, _, _ in table}
    measured = {}
    for cell in cells:
        for nats, place in places.items():
            # A frontier may not reach a KL, and then has no row there.
            a_row = table.get((cell, place, a))
            b_row = table.get((cell, place, b))
            if a_row is not None and b_row is not None:
                measured[cell, nats] = (a_row, b_row)
    return measured


def _without_nan(row: Row) -> Row:
    """The row with None where pandas wrote NaN for what was not computed."""
    cleaned: Row = {}
    for name, value in row.items():
        is_nan = isinstance(value, float) and math.isnan(value)
        cleaned[name] = None if is_nan else value
    return cleaned


def _place(contrast: Contrast, cell: tuple[str, ...], nats: float | None) -> str:
    """The cell in words, as ``learning rate 0.0001, 0.5 nats``."""
    parts = [f"{UNITS.get(variable, '')}{value}" for variable, value in zip(contrast.by, cell, strict=True)]
    if nats is not None:
        parts.append(f"{nats:g} nats")
    return ", ".join(parts)


def _difference(a: Row, b: Row) -> Row:
    """Means, difference with its interval, p-values and counts of two compared families."""
    return {
        "a": a["mean"],
        "b": b["mean"],
        "a_low": a["low"],
        "a_high": a["high"],
        "b_low": b["low"],
        "b_high": b["high"],
        "pairs": int(a["pairs"]),
        "p": a["p"],
        "difference": a["minus_baseline"],
        "low": a["difference_low"],
        "high": a["difference_high"],
        "p_same": a.get("p_equivalent"),
        "collapsed": f"{a['collapsed']}, {b['collapsed']}",
    }


def _fisher(a: Row, b: Row) -> Row:
    """Fisher's test of two shares of collapsed runs, in place of the paired t-test; it has no interval."""
    from scipy.stats import fisher_exact

    counts = [[side["collapsed"], side["runs"] - side["collapsed"]] for side in (a, b)]
    return {"p": float(fisher_exact(counts).pvalue), "low": None, "high": None}


def _with_signs_of(rows: list[Row], reference: list[Row]) -> list[Row]:
    """The rows with the signs of the differences in ``reference``, whose learning rates are five times smaller."""
    difference_at_rate = {float(row["key"][0]): row.get("difference") for row in reference}
    signed = []
    for row in rows:
        # The quotient of two decimals: without rounding it would miss the key.
        rate = round(float(row["key"][0]) / 5, 9)
        difference = difference_at_rate[rate]
        if difference is None or difference == 0:
            # There is no order to follow.
            sign = difference
        else:
            sign = math.copysign(1, difference)
        signed.append({**row, "sign": sign})
    return signed


# --- verdicts -------------------------------------------------------------------------------------------------------
def evaluate(claim: Claim, runs: pd.DataFrame, plan: pd.DataFrame) -> dict[str, list[Row]]:
    """The rows of each part, with p-values adjusted over the whole claim, and decided."""
    parts: dict[str, list[Row]] = {}
    all_rows: list[Row] = []
    for part, contrasts in claim.parts.items():
        parts[part] = []
        for contrast in contrasts:
            for outcome in contrast.signs:
                parts[part] += compare(contrast, outcome, runs, plan)
        all_rows += parts[part]

    # The protocol: all contrasts of a claim are one family, whatever part they decide.
    adjusted = holm([_tested_p(row) for row in all_rows])
    for row, p in zip(all_rows, adjusted, strict=True):
        row["p_holm"] = p
        row["decision"] = decide(row)
    return parts


def _tested_p(row: Row) -> float | None:
    """The p-value of a contrast with a hypothesis; None for one that is only shown."""
    if row["sign"] is None:
        return None
    return row.get("p")


def decide(row: Row) -> str:
    """What one contrast says about the claim: ``for``, ``against``, ``the same`` or nothing."""
    if row["pairs"] == 0:
        return ""
    p_same = row.get("p_same")
    is_same = p_same is not None and p_same < LEVEL
    if is_same and row["sign"] == 0:
        return "for"
    # Before "the same": a difference can be resolved and lie within the margin, and then it decides.
    if row["sign"] is not None and row["p_holm"] is not None and row["p_holm"] < LEVEL:
        as_claimed = row["sign"] * row["difference"] > 0
        return "for" if as_claimed else "against"
    return "the same" if is_same else ""


def verdict(rows: Sequence[Row]) -> str:
    """How many contrasts of a part with a hypothesis are resolved for the claim, and against it, and of how many."""
    measured = [row for row in rows if row["pairs"]]
    if not measured:
        return "runs missing"
    decisions = [row["decision"] for row in measured if row["sign"] is not None]
    text = f"{decisions.count('for')} / {decisions.count('against')} / {len(decisions)}"
    same = decisions.count("the same")
    if same:
        text += f" ({same} the same)"
    return text


def is_resolved(rows: Sequence[Row]) -> bool:
    """Whether some contrast of a part is for or against its claim, or every one of rewards is the same."""
    measured = [row for row in rows if row["pairs"]]
    if any(row["decision"] in ("for", "against") for row in measured):
        return True
    # Only rewards have a margin within which they are the same.
    about_rewards = {row["decision"] for row in measured if row["outcome"] in REWARDS}
    return about_rewards == {"the same"}


def key_row(rows: Iterable[Row]) -> Row | None:
    """The contrast with the least adjusted p among those that decide, else among all; None where none is measured."""
    measured = [row for row in rows if row.get("difference") is not None]
    deciding = [row for row in measured if row["decision"] in ("for", "against")]
    candidates = deciding or measured
    return min(candidates, key=_adjusted_p, default=None)


def _adjusted_p(row: Row) -> float:
    """1 for a contrast that is not tested, so that it comes last."""
    p: float | None = row["p_holm"]
    return 1.0 if p is None else p


# --- what would resolve a claim -------------------------------------------------------------------------------------
def pairs_needed(difference: float, deviation: float, level: float) -> int:
    """Pairs at which a two-sided paired t-test at ``level`` finds ``difference`` with probability :data:`POWER`.

    ``deviation``: of the paired differences, in the unit of ``difference``. At most :data:`MOST_PAIRS`.

    >>> [pairs_needed(difference, 0.04, 0.05) for difference in (0.067, 0.040)]
    [5, 10]
    """
    from scipy.stats import nct, t

    for pairs in range(2, MOST_PAIRS):
        # The statistic of a true difference has a noncentral t distribution.
        bound = t.ppf(1 - level / 2, pairs - 1)
        power = nct.sf(bound, pairs - 1, abs(difference) / deviation * math.sqrt(pairs))
        # Written so that a power of NaN, which the tails of `nct` can have, ends the search.
        if not power < POWER:
            return pairs
    return MOST_PAIRS


@dataclass(frozen=True, kw_only=True)
class Unresolved:
    """A part of a claim that has all of its runs and is not resolved, and what would resolve its nearest contrast."""

    part: str
    row: Row
    """The contrast with the least p."""
    seeds: int
    """Per side, at which that difference is found with probability :data:`POWER`, if it is the true one."""
    hours: float
    """Wall times of the further runs, at the mean of those that there are."""


def unresolved(
    claim: Claim, parts: Mapping[str, Sequence[Row]], runs: pd.DataFrame, plan: pd.DataFrame
) -> list[Unresolved]:
    """The parts of a claim that are complete and not resolved."""
    tested = [row for rows in parts.values() for row in rows if _tested_p(row) is not None]
    open_parts = []
    for part, rows in parts.items():
        claim_of_part = replace(claim, parts={part: claim.parts[part]})
        part_runs = needed(claim_of_part, runs)
        is_complete = len(part_runs) >= len(needed(claim_of_part, plan))
        # A contrast without an interval has no deviation: that of shares of collapsed runs.
        candidates = [row for row in rows if row.get("low") is not None and row["p_holm"] is not None]
        if not is_resolved(rows) and is_complete and candidates:
            row = min(candidates, key=lambda row: row["p"])
            seeds = _seeds_needed(row, len(tested))
            hours = 2 * (seeds - row["pairs"]) * part_runs["hours"].mean()  # both sides
            open_parts.append(Unresolved(part=part, row=row, seeds=seeds, hours=hours))
    return open_parts


def _seeds_needed(row: Row, family: int) -> int:
    """Seeds that would resolve the contrast among ``family`` tests."""
    from scipy.stats import t

    pairs = row["pairs"]
    # The interval is difference +- t deviation / sqrt(pairs).
    deviation = (row["high"] - row["low"]) / 2 * math.sqrt(pairs) / t.ppf(1 - LEVEL / 2, pairs - 1)
    # Bonferroni over the claim: the first step of Holm, which has to be passed by the least p.
    return pairs_needed(row["difference"], deviation, LEVEL / family)
