"""The claims of docs/protocol.md as a results page, from an export of its runs.

A claim is data: parts, each a list of contrasts. A contrast is paired by seed and computed by
:func:`kl_comedy.tracking.compare.compare_families` in every cell (learning rate, beta, lag) that the grids in
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
from kl_comedy.slurm.grid import expand, read_grid
from kl_comedy.statistics import holm, parse_rule
from kl_comedy.tracking import tables, values
from kl_comedy.tracking.compare import SEED, EqualKL, compare_families, groups_of
from kl_comedy.tracking.figures import legend_below, look
from kl_comedy.tracking.runs import BETA, FAMILY, NO_KL, history, read_runs
from research.studies import enumerated, pages

if TYPE_CHECKING:
    import pandas as pd

GRIDS = Path(__file__).parents[2] / "configs" / "evidence"
CLAIMS = Path(__file__).with_name("claims.yaml")
REAL_MODEL = ("smollm2", "smollm2_betas", "smollm2_async")
"""Blocks with three seeds, too few to find two forms the same."""

BLOCKS = ("core", "core_betas", "core_seeds", "updates", "fix", "lags", "lags_parts", "liu", "paper_async", "lora")
BLOCKS += (
    *REAL_MODEL,
    "lags_fresh",
    "lags_exact",
    "lags_baseline",
    "lags_betas",
    "lags_best",
    "async_fresh",
    "liu_bounded",
)
PROTOCOL = "56d1acf (second stage: S1 to S4 c77ca72, L5 fd490ac, S5 c08674d, S6 855ee8d, S7 and S8 7696b38, S9 9d9ab29)"
"""The last commits of docs/protocol.md before the runs."""

COLLAPSE = "eval/heldout/reward < 0.5 start last 2"
MARGIN, LEVEL, LAST_UPDATES = 0.03, 0.05, 20
POWER, MOST_PAIRS = 0.8, 1000
REWARD, KL = "eval/heldout/reward", "eval/heldout/kl/exact_reverse_sequence"
OTHER_FAMILIES = ("two_terms", "four_terms", "three_digits", "subtraction")
LABELS = {
    "end": "held-out reward, end",
    "area": "held-out reward, area",
    "kl": "KL, nats a completion",
    "outside": "out-of-domain reward",
    "entropy": "held-out entropy, nats a token",
    "length_sd": f"sd of length over the last {LAST_UPDATES} updates, tokens",
    "reward_sd": f"sd of training reward over the last {LAST_UPDATES} updates",
    "collapsed": "share of runs that collapsed",
}
REWARDS = ("end", "area", "outside")
"""Outcomes with a margin within which they are the same."""

METRICS = {"end": REWARD, "area": REWARD, "kl": KL, "entropy": "eval/heldout/policy/entropy"}
"""Outcomes that `kl-comedy results compare` prints."""

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
DIFFERENCE = {"difference": "minus_baseline", "low": "difference_low", "high": "difference_high"}
UNITS = {"lag": "lag ", "rate": "learning rate ", "beta": "beta ", "updates": "updates of a batch: "}


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
            why = "the runs without KL are points of both frontiers, and Fisher's test needs two sets of runs"
            raise bad_value("signs", "collapsed", "an outcome other than collapsed beside at_kl", why)

    @property
    def name(self) -> str:
        return self.label.format(form=FORMS[self.a]) if self.label else f"{FORMS[self.a]} - {FORMS[self.b]}"

    def margin(self, outcome: str) -> float | None:
        """Within what the two sides are the same; None where that is not tested."""
        return MARGIN if outcome in REWARDS and not {*self.blocks} & {*REAL_MODEL} else None


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


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of ``path``, a contrast for each pair of forms."""

    def contrasts(raw: dict[str, Any]) -> list[Contrast]:
        sides = [(form, form) for form in raw.pop("forms", ())]
        sides = sides or list(itertools.product(raw.pop("a"), raw.pop("b")))
        return [Contrast(a=a, b=b, **raw) for a, b in sides]

    return [
        Claim(
            name=name,
            hypothesis=raw["hypothesis"],
            remark=raw.get("remark"),
            parts={part: [each for row in rows for each in contrasts(row)] for part, rows in raw["parts"].items()},
        )
        for name, raw in read_yaml(path, "table of claims").items()
    ]


def planned_runs() -> pd.DataFrame:
    """One row a planned run: block, name, seed, and the text of what blocks vary: kl, beta, rate, lag, updates, ..."""
    import pandas as pd

    rows = []
    for block in BLOCKS:
        grid = read_grid(GRIDS / f"{block}.yaml")
        for point in expand(grid):
            settings = {**grid.overrides, **point.settings}
            kl, lag = settings["kl"], str(settings.get("lag", {}).get("steps", ""))
            terms = kl if isinstance(kl, list) else [kl]
            beta = 0 if kl == "none" else settings.get("kl.beta", terms[0].get("beta"))
            row = {"block": block, "name": point.label, "seed": str(point.seed), "beta": str(beta), "lag": lag}
            row |= {"form": point.values.get("kl", "none" if kl == "none" else "k1-reward")}
            row |= {"rate": f"{float(settings['optimizer.lr']):g}" if "optimizer.lr" in settings else ""}
            updates = settings.get("algorithm.updates_per_batch", "")
            row |= {"updates": point.values.get("algorithm.updates_per_batch", str(updates))}
            row |= {"parts": ", ".join(value for key, value in point.values.items() if key.startswith("kl.0."))}
            rows.append(row | {"stale": "yes" if lag not in ("", "0") else ""})
    return pd.DataFrame(rows)


def measured_runs(uri: str, plan: pd.DataFrame) -> pd.DataFrame:
    """The finished runs of the plan with its columns, one column for each outcome, ``start`` and ``commit``."""
    import pandas as pd

    runs = read_runs(uri)
    runs = runs[runs["status"].isin(("FINISHED", "FAILED"))] if len(runs) else runs
    sweeps = [f"evidence_{block}" for block in BLOCKS]
    if runs.empty or "tags.sweep" not in runs or not runs["tags.sweep"].isin(sweeps).any():
        raise UserError(f"{uri}: no finished run of docs/protocol.md")
    runs = values.drop_repeats(runs[runs["tags.sweep"].isin(sweeps)], ("FINISHED",), ["tags.sweep"])
    runs = values.with_collapsed(uri, runs, parse_rule(COLLAPSE))
    keys = {"block": runs["tags.sweep"].str.removeprefix("evidence_"), "name": runs["params.name"], "seed": runs[SEED]}
    reward = f"metrics.{REWARD}"
    first, area = (values.with_values(uri, runs, [reward], rule)[reward] for rule in ("first", "area"))
    last = values.at_last_update(runs)

    def at_end(name: str) -> pd.Series:
        return last.get(f"metrics.{name}", pd.Series(math.nan, last.index))

    def deviation(name: str) -> pd.Series:
        curves = history(uri, runs["run_id"], name).groupby("run_id")["value"]
        return runs["run_id"].map(curves.agg(lambda curve: curve.tail(LAST_UPDATES).std()))

    outcomes = {
        **{outcome: at_end(metric) for outcome, metric in METRICS.items()},
        **{f"{name}_sd": deviation(f"train/{name}") for name in ("length", "reward")},
        **{"start": first, "area": area},
        "outside": sum(at_end(f"eval/{name}/reward") for name in OTHER_FAMILIES) / len(OTHER_FAMILIES),
    }
    commits = runs["tags.git.commit"].str[:12] + runs["tags.git.dirty"].map({"true": "+"}).fillna("")
    own = {SEED: runs[SEED], FAMILY: runs[FAMILY], BETA: "", "collapsed": runs["collapsed"], "status": runs["status"]}
    own["hours"] = runs["duration_s"] / 3600
    frame = pd.DataFrame({**keys, **outcomes, **own, "commit": commits})
    return frame.merge(plan, on=["block", "name", "seed"], how="inner")


def side(frame: pd.DataFrame, contrast: Contrast, form: str, where: Mapping[str, str]) -> pd.DataFrame:
    """The rows of one side of a contrast, of a plan or of runs."""
    chosen = frame["block"].isin(contrast.blocks) & (frame["form"] == form)
    for column, value in where.items():
        chosen &= frame[column] == value
    return frame[chosen]


def cells_of(contrast: Contrast, plan: pd.DataFrame) -> dict[tuple[str, ...], int]:
    """The cells that are planned for both sides, with the number of common seeds."""
    sides = ((contrast.a, contrast.a_where), (contrast.b, contrast.b_where))
    left, right = (dict(groups_of(side(plan, contrast, *each), contrast.by)) for each in sides)
    return {key: len({*left[key]["seed"]} & {*right[key]["seed"]}) for key in left if key in right}


def compare(contrast: Contrast, outcome: str, runs: pd.DataFrame, plan: pd.DataFrame) -> list[dict[str, Any]]:
    """A row for each planned cell (and KL): means, difference with interval, p-values, collapsed runs, pairs.

    Shares of collapsed runs are compared by Fisher's exact test.
    """
    import pandas as pd

    a, b, by = "a", "b", list(contrast.by)
    sides = {a: (contrast.a, contrast.a_where), b: (contrast.b, contrast.b_where)}
    if contrast.at_kl:  # runs without KL are points of both frontiers
        a, b, none = (FORMS[form] for form in (contrast.a, contrast.b, "none"))
        sides = {a: (contrast.a, {}), b: (contrast.b, {}), none: ("none", {})}
    chosen = pd.concat([side(runs, contrast, *each).assign(**{FAMILY: name}) for name, each in sides.items()])
    table = {}
    if {a, b} <= {*chosen[FAMILY]}:
        options: dict[str, Any] = {"margin": contrast.margin(outcome)}
        if contrast.at_kl:
            options["at_kl"] = EqualKL(column="kl", nats=contrast.at_kl, start="start")
        compared = compare_families(chosen.astype({outcome: float}), by, outcome, b, "t", **options)
        table = {(*(row[key] for key in by), row["at"], row["kl.family"]): row for row in compared.to_dict("records")}
    rows = []
    for (key, planned), nats in itertools.product(cells_of(contrast, plan).items(), contrast.at_kl or (None,)):
        place = [f"{UNITS.get(name, '')}{value}" for name, value in zip(by, key, strict=True)]
        row = {"contrast": contrast.name, "at": ", ".join([*place, *([] if nats is None else [f"{nats:g} nats"])])}
        row |= {"outcome": outcome, "sign": contrast.signs[outcome], "planned": planned, "pairs": 0, "key": key}
        at = "beta " if nats is None else f"KL {nats:g}"
        left, right = (table.get((*key, at, name), {}) for name in (a, b))
        if left and right:
            row |= {"a": left["mean"], "b": right["mean"], "pairs": int(left["pairs"]), "p": left["p"]}
            row |= {name: left[key] for name, key in DIFFERENCE.items()}
            row |= {"p_same": left.get("p_equivalent"), "collapsed": f"{left['collapsed']}, {right['collapsed']}"}
        if left and right and outcome == "collapsed":
            from scipy.stats import fisher_exact

            counts = [[each["collapsed"], each["runs"] - each["collapsed"]] for each in (left, right)]
            row |= {"p": float(fisher_exact(counts).pvalue), "low": None, "high": None}
        rows.append({name: None if value != value else value for name, value in row.items()})
    if contrast.ranked_as:
        full = replace(contrast, blocks=(contrast.ranked_as,), ranked_as="")
        order = {float(row["key"][0]): row.get("difference") for row in compare(full, outcome, runs, plan)}
        signs = [order[round(float(row["key"][0]) / 5, 9)] for row in rows]
        rows = [row | {"sign": sign and math.copysign(1, sign)} for row, sign in zip(rows, signs, strict=True)]
    return rows


def decide(row: Mapping[str, Any]) -> str:
    """What one contrast says of the claim: ``for``, ``against``, ``the same`` or nothing."""
    same = row.get("p_same") is not None and row["p_same"] < LEVEL
    if row["sign"] == 0 and same:
        return "for"
    if row["sign"] is not None and row["p_holm"] is not None and row["p_holm"] < LEVEL:
        return "for" if row["sign"] * row["difference"] > 0 else "against"
    return "the same" if same else ""


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The protocol's verdict of a part from its decided contrasts."""
    says = [row["decision"] for row in rows if row["pairs"]]
    if not says:
        return "runs missing"
    if "for" in says or "against" in says:
        both = "for" in says and "against" in says
        return "mixed" if both else "confirmed" if "for" in says else "contradicted"
    of_rewards = {row["decision"] for row in rows if row["outcome"] in REWARDS}
    return "the same" if of_rewards == {"the same"} else "not resolved"


def evaluate(claim: Claim, runs: pd.DataFrame, plan: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The rows of each part, with p-values adjusted over the whole claim, and decided."""
    parts = {
        part: [row for each in contrasts for outcome in each.signs for row in compare(each, outcome, runs, plan)]
        for part, contrasts in claim.parts.items()
    }
    every = [row for rows in parts.values() for row in rows]
    for row, p in zip(every, holm([_tested(row) for row in every]), strict=True):
        row["p_holm"] = p
        row["decision"] = decide(row) if row["pairs"] else ""
    return parts


def _tested(row: Mapping[str, Any]) -> float | None:
    """The p-value of a contrast with a hypothesis."""
    return None if row["sign"] is None else row.get("p")


def needed(claim: Claim, frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a plan, or of runs, that the contrasts of a claim read."""
    sides = []
    for contrast in itertools.chain.from_iterable(claim.parts.values()):
        wanted = [(contrast.a, contrast.a_where), (contrast.b, contrast.b_where)]
        sides += [side(frame, contrast, *each) for each in [*wanted, *[("none", {})] * bool(contrast.at_kl)]]
    return frame.loc[sorted({at for each in sides for at in each.index})]


def key_number(rows: Sequence[Mapping[str, Any]]) -> str:
    """The contrast with the least adjusted p among those that decide, else among all."""
    measured = [row for row in rows if row.get("difference") is not None]
    decided = [row for row in measured if row["decision"] in ("for", "against")] or measured
    if not decided:
        return ""
    row = min(decided, key=lambda row: 1.0 if row["p_holm"] is None else row["p_holm"])
    p = "" if row["p_holm"] is None else f", adjusted p {pages.three_digits(row['p_holm'])}"
    return f"{row['contrast']}, {row['at']}, {LABELS[row['outcome']]}: {_interval(row)}{p}"


def pairs_needed(difference: float, deviation: float, level: float) -> int:
    """Pairs at which a two-sided paired t-test at ``level`` finds ``difference`` with probability :data:`POWER`.

    ``deviation``: of the paired differences, in the unit of ``difference``.

    >>> [pairs_needed(difference, 0.04, 0.05) for difference in (0.067, 0.040)]
    [5, 10]
    """
    from scipy.stats import nct, t

    def missed(n: int) -> bool:
        bound = t.ppf(1 - level / 2, n - 1)
        return bool(nct.sf(bound, n - 1, abs(difference) / deviation * math.sqrt(n)) < POWER)

    return next(itertools.dropwhile(missed, range(2, MOST_PAIRS)), MOST_PAIRS)


def unresolved(
    claim: Claim, parts: Mapping[str, Sequence[Mapping[str, Any]]], runs: pd.DataFrame, plan: pd.DataFrame
) -> list[list[str]]:
    """For each part that is whole and not resolved, its contrast nearest to it, and what would resolve that."""
    from scipy.stats import t

    family = sum(_tested(row) is not None for rows in parts.values() for row in rows)
    cells = []
    for part, rows in parts.items():
        mine = replace(claim, parts={part: claim.parts[part]})
        done = needed(mine, runs)
        near = [row for row in rows if row.get("low") is not None and row["p_holm"] is not None]
        if verdict(rows) != "not resolved" or not near or len(done) < len(needed(mine, plan)):
            continue
        row = min(near, key=lambda row: row["p"])
        pairs = row["pairs"]
        deviation = (row["high"] - row["low"]) / 2 * math.sqrt(pairs) / t.ppf(1 - LEVEL / 2, pairs - 1)
        seeds = pairs_needed(row["difference"], deviation, LEVEL / family)
        at = f"{row['contrast']}, {row['at']}, {LABELS[row['outcome']]}"
        hours = 2 * (seeds - pairs) * done["hours"].mean()
        needs = (str(seeds), f"{hours:.1f}") if seeds < MOST_PAIRS else (f"over {seeds}", "-")
        cells.append([f"[{claim.name}](#{claim.anchor})", part or "-", at, _interval(row), str(pairs), *needs])
    return cells


def _interval(row: Mapping[str, Any]) -> str:
    difference, low, high = (row.get(name) for name in ("difference", "low", "high"))
    if difference is None:
        return "runs missing" if row["pairs"] == 0 and "a" not in row else "none"
    bounds = "" if low is None else f" [{pages.three_digits(low)}, {pages.three_digits(high)}]"
    return pages.three_digits(difference) + bounds


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The contrasts as Markdown."""

    def text(value: float | None) -> str:
        return "-" if value is None else pages.three_digits(value)

    header = ["contrast", "at", "outcome", "means", "difference [95%]", "p", "p, Holm", "p, the same"]
    header += ["collapsed", "n", "says"]
    cells = [
        [
            row["contrast"],
            row["at"],
            LABELS[row["outcome"]],
            f"{text(row.get('a'))}, {text(row.get('b'))}",
            _interval(row),
            *(text(row.get(name)) for name in ("p", "p_holm", "p_same")),
            row.get("collapsed", "-"),
            f"{row['pairs']} of {row['planned']}",
            row["decision"] or "-",
        ]
        for row in rows
    ]
    return tables.markdown(header, cells)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Differences with intervals over cells, a panel an outcome; filled where a contrast decides."""
    shown = [row for row in rows if row.get("difference") is not None]
    outcomes, names = (list(dict.fromkeys(row[key] for row in shown)) for key in ("outcome", "contrast"))
    with pages.figure(path, len(outcomes), 1, 2.0) as (drawing, panels):
        for axes, outcome in zip(panels.flat, outcomes, strict=True):
            here = [row for row in shown if row["outcome"] == outcome]
            places = list(dict.fromkeys(row["at"] for row in here))
            axes.axhline(0.0, color="0.3", linewidth=0.8)
            if outcome in REWARDS:
                axes.axhspan(-MARGIN, MARGIN, color="0.9", linewidth=0)
            for at, name in enumerate(names):
                mine = [row for row in here if row["contrast"] == name]
                x = [places.index(row["at"]) + 0.7 * ((at + 0.5) / len(names) - 0.5) for row in mine]
                y = [row["difference"] for row in mine]
                ends = [
                    [row["difference"] if row.get(end) is None else row[end] for row in mine] for end in ("low", "high")
                ]
                error = [[abs(bound - middle) for bound, middle in zip(each, y, strict=True)] for each in ends]
                style = look(at) | {"linestyle": ""}
                axes.errorbar(x, y, yerr=error, capsize=2, label=name, markerfacecolor="white", **style)
                filled = [(left, up) for left, up, row in zip(x, y, mine, strict=True) if row["decision"]]
                axes.plot([left for left, _ in filled], [up for _, up in filled], **style)
            axes.set(title=LABELS[outcome], ylabel="difference", xticks=range(len(places)))
            axes.set_xticklabels([place.replace("learning rate ", "").replace(", ", "\n") for place in places])
        legend_below(drawing, "difference with 95% interval; filled: resolved after Holm, or the same")


GROUPS = {"rate": "optimizer.lr", "lag": "lag.steps", "updates": "algorithm.updates_per_batch"}


def commands(claim: Claim, runs: pd.DataFrame) -> list[str]:
    """The commands that print the differences of a claim, of those contrasts whose sides differ in their KL only."""
    lines = []
    for contrast in itertools.chain.from_iterable(claim.parts.values()):
        family = runs.loc[runs["form"] == contrast.b, FAMILY]
        if family.empty or contrast.label or {*contrast.a_where} - {"stale"}:
            continue
        where = "tags.sweep IN (" + ", ".join(f"'evidence_{block}'" for block in contrast.blocks) + ")"
        where += " and lag.mode = 'replayed'" if contrast.a_where else ""
        words = ["--where", where, "--group", ",".join(GROUPS[name] for name in contrast.by if name in GROUPS)]
        words += ["--baseline", str(family.iloc[0]), "--collapse", COLLAPSE]
        words += ["--at-kl", ",".join(map(str, contrast.at_kl)), "--from-start"] if contrast.at_kl else []
        for outcome in contrast.signs:
            if outcome in METRICS:
                more = ["--of", "area"] if outcome == "area" else []
                more += ["--margin", str(MARGIN)] if contrast.margin(outcome) else []
                lines.append(" ".join(map(_quoted, [*COMPARE, METRICS[outcome], *more, *words])))
    return ["\n".join(f"    {line}" for line in dict.fromkeys(lines))] if lines else []


def _quoted(word: str) -> str:
    return f'"{word}"' if " " in word else word


WITHOUT = "run.*,output,tracking.*,metrics.time/*,*kl_error*,tags.data.*,tags.process.*,tags.mlflow.*,tags.command"
COMPARE = ("kl-comedy", "results", "compare", "--uri", "results/evidence/export.parquet", "--metric")
SUMMARY = ["claim", "hypothesis", "verdict", "key number", "runs"]


def page(uri: str, command: str, figures: Path | None = None) -> tuple[str, str]:
    """README.md and its table of verdicts, from the store or export at ``uri``.

    ``command`` prints the page again. With a folder ``figures``, they are drawn there. Raises :class:`UserError` where
    ``uri`` has no finished run of the protocol, or lacks curves.
    """
    plan = planned_runs()
    runs = measured_runs(uri, plan)
    sections, verdicts, open_parts = list[str](), list[list[str]](), list[list[str]]()
    for claim in sorted([*enumerated.read_claims(), *read_claims()], key=_place):
        if isinstance(claim, enumerated.EnumeratedClaim):
            row, section = enumerated.section(claim)
            verdicts.append(row)
            sections += section
            continue
        parts = evaluate(claim, runs, plan)
        rows = [row for each in parts.values() for row in each]
        done, all_runs = len(needed(claim, runs)), len(needed(claim, plan))
        anchor = claim.anchor
        decided = {part: verdict(each) for part, each in parts.items()}
        state = "; ".join(f"{part}: {word}" if part else word for part, word in decided.items())
        if done < all_runs and set(decided.values()) != {"runs missing"}:
            state = f"preliminary: {state}"
        numbers = [key_number(each) for each in parts.values()]
        count = f"{done} of {all_runs}" + (", runs missing" if done < all_runs else "")
        link, number = f"[{claim.name}](#{anchor})", "; ".join(filter(None, numbers))
        noted = state if claim.remark is None else f"{state}, with a remark"
        verdicts.append([link, claim.hypothesis, noted, number, count])
        sentence = f"{claim.hypothesis[0].upper()}{claim.hypothesis[1:]}."
        sections += [f"## {claim.name}", sentence, f"**Verdict: {state}.** Runs: {count}."]
        sections += [claim.remark] * (claim.remark is not None)
        keyed = [f"- {part or 'key number'}: {text}" for part, text in zip(parts, numbers, strict=True) if text]
        sections += ["\n".join(keyed)] * bool(keyed) + [table(rows)]
        if any(row.get("difference") is not None for row in rows):
            sections.append(f"![{claim.hypothesis}]({anchor}.svg)")
            if figures is not None:
                draw(rows, figures / f"{anchor}.svg")
        sections += commands(claim, runs)
        open_parts += unresolved(claim, parts, runs, plan)
    summary = tables.markdown(SUMMARY, verdicts)
    facts = {"command": command, "protocol": PROTOCOL, "level": LEVEL, "margin": MARGIN}
    header = HEADER.format(**facts, summary=summary, blocks=block_table(runs, plan))
    sections += [UNRESOLVED.format(power=POWER, level=LEVEL), tables.markdown(COSTS, open_parts)]
    return "\n\n".join([header, *sections, FOOTER]) + "\n", summary


def _place(claim: Claim | enumerated.EnumeratedClaim) -> tuple[int, int]:
    """Papers in the protocol's order, then our own claims; by number."""
    letter, number = claim.name[0], claim.name.partition(",")[0][1:]
    return "CTLPS".index(letter), int(number)


HEADER = """# The claims of the protocol

<!-- {command} -->

The hypotheses of [the protocol](../../docs/protocol.md), with its outcomes, statistics and verdicts, at its commit
{protocol}, and the papers' claims that need no training, which are enumerated (bias and variance of one completion's
gradient, against the KL of completions) or numbers of a study. `python -m research.studies evidence`
computes every number, those of runs from [export.parquet](export.parquet).

- *Verdict*: confirmed, contradicted, mixed, the same or not resolved; preliminary where runs of the plan are missing.
- *says*: "for" or "against" the claim where p, adjusted by Holm over all contrasts of the claim, is below {level};
  "the same" where two one-sided tests find a difference of reward within {margin}.
- *means*: of either side, over all its runs. *n*: pairs of runs of one seed. *collapsed*: runs of either side; their
  shares are compared by Fisher's exact test. *hours*: wall times of a block's runs, added, on busy machines.

{summary}

## Runs

{blocks}"""
UNRESOLVED = """## What is not resolved, and what would resolve it

Of each claim whose runs are all in: the contrast with the least p, and the seeds a side at which a test at {level} over
the number of the claim's contrasts finds that difference with probability {power}, if it is the true one. *Hours*: wall
times of the further runs, at the mean of those that there are."""
COSTS = ["claim", "part", "contrast", "difference [95%]", "seeds", "seeds needed", "hours"]
FOOTER = f"""## Commands

Without `--finished-in` all runs are made again. The blocks on SmolLM2 need `make smollm2` first, 1.4 GB of
disk a run, and `model.source=models/SmolLM2-135M-Instruct` at the end of their command.

    for block in {" ".join(BLOCKS)}; do
      kl-comedy sweep configs/evidence/$block.yaml --local 2 --finished-in results/evidence/export.parquet \\
        tracking.uri=sqlite:///evidence.db
    done
    kl-comedy results export --uri sqlite:///evidence.db --experiment evidence --append \\
      --out results/evidence/export.parquet --curves {REWARD},train/reward,train/length --without '{WITHOUT}'
    python -m research.studies evidence
    kl-comedy results verify results/evidence"""


def block_table(runs: pd.DataFrame, plan: pd.DataFrame) -> str:
    """Of each block the finished runs of those planned, those that failed, collapsed, their hours and their commits."""
    rows = []
    for block in BLOCKS:
        mine, planned = runs[runs["block"] == block], int((plan["block"] == block).sum())
        counts = [
            f"{len(mine)} of {planned}",
            *(str(int(flag.sum())) for flag in (mine["status"] == "FAILED", mine["collapsed"].eq(True))),
            f"{mine['hours'].sum():.1f}",
        ]
        rows.append(
            [f"[{block}](../../configs/evidence/{block}.yaml)", *counts, ", ".join(sorted({*mine["commit"]})) or "-"]
        )
    return tables.markdown(["block", "runs", "failed", "collapsed", "hours", "commit"], rows)
