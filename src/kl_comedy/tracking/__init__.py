"""Tracking: every run in a file and in MLflow. What reads them is in :mod:`kl_comedy.results`.

    RunLogger -> spool.jsonl -> MLflow store

mlflow is imported by the functions that use it, Lightning only by ``tracking.logger``.
"""

from kl_comedy.tracking import loggers
from kl_comedy.tracking.provenance import mark_dead_runs, provenance_files, provenance_tags
from kl_comedy.tracking.upload import sync

__all__ = ["loggers", "mark_dead_runs", "provenance_files", "provenance_tags", "sync"]
