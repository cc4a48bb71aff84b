"""Tracking: every run in a file and in MLflow; tables and plots from MLflow.

    RunLogger -> spool.jsonl -> MLflow store -> queries -> statistics -> tables, plots

mlflow, pandas and matplotlib are imported by the functions that use them, Lightning only by ``tracking.logger``.
"""

from kl_comedy.tracking import loggers
from kl_comedy.tracking.provenance import mark_dead_runs, provenance_files, provenance_tags
from kl_comedy.tracking.upload import sync

__all__ = ["loggers", "mark_dead_runs", "provenance_files", "provenance_tags", "sync"]
