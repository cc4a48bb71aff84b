"""What training showed of each advice: the contrasts of ``kl_comedy/peers/advice.yaml``, from the exports of results/.

:func:`measure` computes every number; :func:`text_of` is the file in which the package stores them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kl_comedy.errors import UserError
from kl_comedy.kl.recipes import resolve_terms
from kl_comedy.peers.advice import AdviceTable, Cell, Contrast, Export, Measured, Range, Side, Spread
from kl_comedy.results import values
from kl_comedy.results.compare import SEED
from kl_comedy.results.runs import BETA, FAMILY, NO_KL, curves_file, read_runs
from kl_comedy.statistics import paired_difference, parse_rule

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).parents[2]
REWARD = "metrics.eval/heldout/reward"
EFFECTIVE_SIZE = "policy/ess"
WARM_START = "params.model.options.seed"
DIGITS = 6
"""Digits after the point that are stored: more than any page shows, fewer than differ between machines."""

HEAD = """\
# Made by `python research/scripts/generate_docs.py --advice` from the exports of results/: do not edit.
# A cell is a contrast of advice.yaml in one setting: held-out reward of a minus b over seeds, with its 95% interval.
"""


# --- runs -----------------------------------------------------------------------------------------------------------
@functools.cache
def runs_of(path: Path, collapse: str) -> pd.DataFrame:
    """The finished runs of an export, each configuration and seed once, with ``collapsed``."""
    runs = read_runs(path)
    # Runs of the first studies have no sweep.
    groups = [name for name in ("tags.sweep", "experiment") if name in runs]
    runs = values.drop_repeats(runs[runs["status"] == "FINISHED"], ("FINISHED",), groups)
    runs = values.with_collapsed(str(path), runs, parse_rule(collapse))
    runs = values.at_last_update(runs)
    runs["ess"] = runs["run_id"].map(effective_sizes(path))
    # Contrasts are of evaluations. With the hundreds of other metrics each restriction would copy them all.
    others = [name for name in runs.columns if name.startswith("metrics.") and not name.startswith("metrics.eval/")]
    return runs.drop(columns=others)


def effective_sizes(path: Path) -> pd.Series:
    """The effective sample size of each run of an export, over the first third of its updates, as a share of the
    completions; no run where the export has no curve of it. What follows depends on whether the run collapses."""
    import pandas as pd

    columns = ["run_id", "step", "value"]
    curves = pd.read_parquet(curves_file(path), columns=columns, filters=[("metric", "==", EFFECTIVE_SIZE)])
    last = curves.groupby("run_id")["step"].transform("max")
    first_third = curves[curves["step"] <= last / 3]
    return first_third.groupby("run_id")["value"].mean()


def restricted(runs: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
    """The runs whose columns have these values, or one of the values of a list. Raises for an unknown column."""
    chosen = runs["status"].notna()
    for column, value in where.items():
        if column not in runs:
            raise UserError(f"advice.yaml: no run has {column}")
        allowed = value if isinstance(value, list) else [value]
        texts = {_as_text(item) for item in allowed}
        chosen &= runs[column].map(_as_text).isin(texts)
    return runs[chosen]


def _as_text(value: Any) -> str:
    """A value as a text that is the same for ``0.0002``, ``"2.0e-4"`` and ``"0.0002"``."""
    try:
        return f"{float(value):g}"
    except (TypeError, ValueError):
        return str(value)


def side_of(runs: pd.DataFrame, side: Side) -> pd.DataFrame:
    """The runs of one side of a contrast."""
    where = dict(side.where)
    if side.kl is not None:
        where[FAMILY] = family(side.kl)
    if side.beta is not None:
        where[BETA] = side.beta
    return restricted(runs, where)


def family(kl: Any) -> str:
    """The label under which runs of a KL are stored, without its betas."""
    return " + ".join(term.label() for term in resolve_terms(kl)) or NO_KL


# --- contrasts ------------------------------------------------------------------------------------------------------
def measure(table: AdviceTable, root: Path = ROOT) -> Measured:
    """Every contrast in every cell, and every spread. Raises :class:`UserError` where a side has no runs."""
    contrasts = {}
    for name, contrast in table.contrasts.items():
        contrasts[name] = tuple(cells_of(contrast, _runs(table.exports[contrast.export], root)))
    spreads = {}
    for name, spread in table.spreads.items():
        spreads[name] = range_of(spread, _runs(table.exports[spread.export], root))
    return Measured(contrasts=contrasts, spreads=spreads)


def _runs(export: Export, root: Path) -> pd.DataFrame:
    return runs_of(root / export.path, export.collapse)


def cells_of(contrast: Contrast, runs: pd.DataFrame) -> Iterable[Cell]:
    """The contrast in each combination of the values of its cells, in their order."""
    chosen = restricted(runs, contrast.where)
    for combination in itertools.product(*contrast.cells.values()):
        place = dict(zip(contrast.cells, combination, strict=True))
        members = restricted(chosen, place)
        a = side_of(members, contrast.a)
        b = side_of(members, contrast.b)
        setting = setting_in_words(contrast, place)
        if a.empty or b.empty:
            raise UserError(f"contrasts.{contrast.name}: no runs on one side of {setting}")
        cell = _cell(setting, a, b, f"metrics.{contrast.metric}")
        without_kl = _without_kl(contrast, runs, place)
        if not without_kl.empty:
            collapsed = int(without_kl["collapsed"].sum())
            cell = dataclasses.replace(cell, none_collapsed=collapsed, none_runs=len(without_kl))
            size = float(without_kl["ess"].mean())
            if not math.isnan(size):
                cell = dataclasses.replace(cell, none_ess=round(size, DIGITS))
        yield cell


def _without_kl(contrast: Contrast, runs: pd.DataFrame, place: Mapping[str, Any]) -> pd.DataFrame:
    """The runs without a KL in the setting of a cell; beta is not a part of it."""
    where = {**contrast.where, **contrast.without_kl, **place}
    where.pop(BETA, None)
    return side_of(restricted(runs, where), Side(kl="none"))


def _cell(setting: str, a: pd.DataFrame, b: pd.DataFrame, metric: str) -> Cell:
    a_by_seed = _by_pair(a, metric)
    b_by_seed = _by_pair(b, metric)
    paired = paired_difference(a_by_seed, b_by_seed)
    difference = paired.difference
    if difference.low is None or difference.high is None:
        raise UserError(f"{setting}: {difference.n} common seeds give no interval")
    differences = [value - b_by_seed[seed] for seed, value in a_by_seed.items() if seed in b_by_seed]
    return Cell(
        setting=setting,
        a_mean=round(float(a[metric].mean()), DIGITS),
        b_mean=round(float(b[metric].mean()), DIGITS),
        difference=round(difference.mean, DIGITS),
        low=round(difference.low, DIGITS),
        high=round(difference.high, DIGITS),
        pairs=difference.n,
        ahead=sum(1 for value in differences if value > 0),
        behind=sum(1 for value in differences if value < 0),
        a_collapsed=int(a["collapsed"].sum()),
        a_runs=len(a),
        b_collapsed=int(b["collapsed"].sum()),
        b_runs=len(b),
    )


def _by_pair(runs: pd.DataFrame, metric: str) -> dict[Hashable, float]:
    """The metric by seed and warm start. Several runs of both are averaged: they are not independent."""
    if WARM_START not in runs:
        return dict(runs.groupby(SEED)[metric].mean())
    return dict(runs.groupby([SEED, runs[WARM_START].fillna("")])[metric].mean())


def range_of(spread: Spread, runs: pd.DataFrame) -> Range:
    """The lowest and the highest mean reward of a setting's KL configurations."""
    chosen = restricted(runs, spread.where)
    if chosen.empty:
        raise UserError(f"advice.yaml: no runs of {spread.where}")
    means = chosen.groupby([FAMILY, BETA])[REWARD].mean()
    return Range(
        lowest=round(float(means.min()), DIGITS),
        highest=round(float(means.max()), DIGITS),
        forms=len(means),
        seeds=int(chosen[SEED].nunique()),
        runs=len(chosen),
        collapsed=int(chosen["collapsed"].sum()),
    )


# --- words ----------------------------------------------------------------------------------------------------------
def setting_in_words(contrast: Contrast, place: Mapping[str, Any]) -> str:
    """As ``learning rate 2e-4, samples 10 updates old``."""
    parts = []
    if contrast.setting:
        parts.append(contrast.setting)
    where = {**contrast.where, **place}
    if "params.optimizer.lr" in where:
        parts.append(f"learning rate {rate(where['params.optimizer.lr'])}")
    if "tags.kl.betas" in where:
        parts.append(f"beta {where['tags.kl.betas']:g}")
    if "params.lag.steps" in where:
        lag = where["params.lag.steps"]
        parts.append(f"samples {lag} {'update' if lag == 1 else 'updates'} old")
    if "params.algorithm.updates_per_batch" in where:
        parts.append(f"{where['params.algorithm.updates_per_batch']} updates of each batch")
    return ", ".join(parts)


def rate(value: float) -> str:
    """A learning rate as ``2e-4``.

    >>> rate(0.0002), rate(5e-05)
    ('2e-4', '5e-5')
    """
    digits, _, exponent = f"{value:e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


# --- the stored file ------------------------------------------------------------------------------------------------
def text_of(measured: Measured) -> str:
    """The text of advice_measured.yaml: one line per cell, so that a change of one shows as one line."""
    lines = [HEAD.rstrip(), "contrasts:"]
    for name, cells in measured.contrasts.items():
        lines.append(f"  {name}:")
        lines += [f"    - {_flow(cell)}" for cell in cells]
    lines.append("spreads:")
    lines += [f"  {name}: {_flow(item)}" for name, item in measured.spreads.items()]
    return "\n".join(lines) + "\n"


def _flow(record: Cell | Range) -> str:
    """A record as a YAML mapping in one line."""
    parts = []
    for name, value in dataclasses.asdict(record).items():
        if value is None:
            continue
        text = f'"{value}"' if isinstance(value, str) else repr(value)
        parts.append(f"{name}: {text}")
    return "{" + ", ".join(parts) + "}"
