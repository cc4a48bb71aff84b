"""Tracking: every run in a file and in MLflow with its provenance; tables and plots are read back from MLflow.

    RunLogger -> spool.jsonl -> MLflow store -> queries -> statistics -> tables, plots

mlflow, pandas and matplotlib are imported by the functions that use them. Only :mod:`kl_comedy.tracking.logger`
imports Lightning, and this package does not import it.
"""

from kl_comedy.tracking.mlflow_sync import SyncResult, sync
from kl_comedy.tracking.provenance import mark_dead_runs, provenance_files, provenance_tags
from kl_comedy.tracking.spool import Event, Spool

__all__ = ["Event", "Spool", "SyncResult", "mark_dead_runs", "provenance_files", "provenance_tags", "sync"]
