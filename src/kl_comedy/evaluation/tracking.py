"""An evaluation as an MLflow run: scores as metrics, identity as params, records as artifacts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kl_comedy.config import flatten
from kl_comedy.evaluation.records import Records
from kl_comedy.evaluation.scores import SuiteScore
from kl_comedy.tracking import Tracker, provenance_tags

if TYPE_CHECKING:
    from kl_comedy.config.schema import TrackingConfig

EXPERIMENT = "evaluations"
"""Joined to the experiment's name: an evaluation is no training run, and tables of runs do not hold it."""


def track(
    records: Records, score: SuiteScore, config: TrackingConfig, *, tags: Mapping[str, str], step: int
) -> str | None:  # fmt: skip
    """Log a finished evaluation, its records included. The MLflow run's id; None where the store is off or down.

    The folder holds a spool as a run's does: ``kl-comedy results sync FOLDER`` uploads what a store missed.
    """
    plan = records.plan
    tracker = Tracker.start(
        replace(config, experiment=f"{config.experiment}-{EXPERIMENT}"),
        run_dir=records.path,
        run_name=records.path.name,
        params=flatten(plan.identity()),
        tags={**provenance_tags(), "kind": "evaluation", "suite": plan.suite.name, **tags},
    )
    tracker.log(score.metrics(), step=step)
    for file in (records.items, records.table, records.summary):
        tracker.artifact(file, folder="records")
    tracker.finish()
    return tracker.run_id
