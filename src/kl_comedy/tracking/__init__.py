"""Tracking: every run in MLflow with its provenance, and the tables and plots read back from there.

    Tracker -> spool.jsonl -> MLflow store -> queries -> statistics -> tables, plots

Importing this room is light: mlflow, pandas and matplotlib are imported by the functions that use them.
"""

from kl_comedy.tracking.logger import Tracker
from kl_comedy.tracking.mlflow_sync import Pushed, sync
from kl_comedy.tracking.provenance import mark_dead_runs, provenance_files, provenance_tags
from kl_comedy.tracking.spool import Event, Spool

__all__ = ["Event", "Pushed", "Spool", "Tracker", "mark_dead_runs", "provenance_files", "provenance_tags", "sync"]
