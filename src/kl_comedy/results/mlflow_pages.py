"""Links into MLflow's pages that show an experiment with columns and charts of our choice.

The pages of MLflow 3 read such a choice from a tag of the experiment, ``mlflow.sharedViewState.KEY``, where an address
ends in ``?viewStateShareKey=KEY``: it is what their button Share writes. A column is named by its kind and key, as
``metrics.`train/reward```.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kl_comedy.results.runs import DERIVED, LABEL, PREFIXES, short
from kl_comedy.results.selection import DEFAULT_METRICS, columns, metric_columns
from kl_comedy.results.values import separating_keys
from kl_comedy.tracking import store

if TYPE_CHECKING:
    import pandas as pd

LOCAL_PAGES = "http://127.0.0.1:5000"
"""Where ``mlflow server`` serves its pages unless it is told otherwise."""

VIEW = "mlflow.sharedViewState."
"""The beginning of the tags of an experiment that hold a view."""

METRICS = (*DEFAULT_METRICS, "eval/*/kl/exact_reverse_sequence", "kl/exact_reverse_sequence")
"""The metrics of a view, where the runs have them."""

TAGS = (LABEL, "tags.kl.verdict", "tags.policy.label")
"""The tags of a view, where the runs have them."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A choice of columns and charts for an experiment's pages."""

    columns: Sequence[str]
    """Columns of a runs frame, in the order of the page."""
    charts: Sequence[str]
    """Metrics, each with a chart of its own above those that the page makes itself."""
    filter: str = ""
    """Which runs are listed, in MLflow's filter language."""

    def state(self) -> dict[str, Any]:
        """The view as the pages of MLflow store it."""
        section = "kl_comedy"
        charts = [_chart(metric, section) for metric in self.charts]
        return {
            "selectedColumns": [_page_column(column) for column in self.columns],
            "compareRunSections": [{"uuid": section, "name": "Overview", "display": True, "isReordered": True}],
            "compareRunCharts": charts,
            # The pages would sort the sections by name, and those of metrics are many.
            "isAccordionReordered": True,
            "hideEmptyCharts": True,
            "runsHiddenMode": "SHOW_ALL",
            "searchFilter": self.filter,
        }

    def write(self, client: Any, experiment_id: str) -> str:
        """Store the view in the experiment; its key. A view has one key, whoever writes it."""
        text = json.dumps(self.state())
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        client.set_experiment_tag(experiment_id, f"{VIEW}{key}", text)
        return key


def _page_column(column: str) -> str:
    """A column of a runs frame as MLflow's pages name it.

    >>> _page_column("metrics.train/reward"), _page_column("tags.kl.label")
    ('metrics.`train/reward`', 'tags.`kl.label`')
    """
    kind, _, key = column.partition(".")
    return f"{kind}.`{key}`"


def _chart(metric: str, section: str) -> dict[str, Any]:
    """A line chart of the metric over updates, with the fields that the pages expect of one."""
    return {
        "uuid": f"{section}-{metric}",
        "type": "LINE",
        "metricSectionId": section,
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "displayName": metric,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        "lineSmoothness": 0,
        "scaleType": "linear",
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def choose_view(frame: pd.DataFrame, keys: Sequence[str], metrics: Sequence[str], where: str = "") -> View:
    """The view of the runs in ``frame``: the keys and metrics asked for, else the usual ones that these runs have.

    Usual keys are the KL label and verdict, the seed and the params in which the runs differ. ``where`` is the filter
    that the runs satisfy, as MLflow writes it. Raises :class:`UserError` for a key or metric that no run has.
    """
    if keys:
        chosen = []
        for column in columns(frame, keys, "--columns"):
            # The pages know what the store has, and have the fields of every run anyway.
            stored = DERIVED.get(column, column)
            if stored.startswith(PREFIXES):
                chosen.append(stored)
    else:
        chosen = [name for name in (*TAGS, "params.seed") if name in frame]
        chosen += separating_keys(frame, [name for name in (LABEL,) if name in frame])
    metric_names = metric_columns(frame, metrics, default=METRICS)
    charts = [short(name) for name in metric_names]
    return View(columns=list(dict.fromkeys([*chosen, *metric_names])), charts=charts, filter=where)


def addresses(server: str, experiment_id: str, key: str) -> tuple[str, str]:
    """The addresses of the list of runs and of its charts, under a view."""
    # Without the workflow, MLflow 3.17 shows pages for agents beside the runs, whatever the kind of the experiment.
    query = f"workflowType=machine_learning&viewStateShareKey={key}"
    page = f"{server.rstrip('/')}/#/experiments/{experiment_id}/runs?{query}"
    return page, f"{page}&compareRunsMode=CHART"


def serve_command(uri: str) -> str:
    """The command that serves the pages of a store that is a database, at :data:`LOCAL_PAGES`."""
    return shlex.join(["mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1"])


def share(uri: str, experiment: str, view: View, server: str) -> tuple[str, str]:
    """Store the view in the experiment of the store ``uri``; its addresses on ``server``.

    Raises :class:`UserError` where the store cannot be read or does not take the view.
    """
    client = store.open_existing(uri)
    try:
        experiment_id = str(client.get_experiment_by_name(experiment).experiment_id)
        key = view.write(client, experiment_id)
    except Exception as error:
        raise store.cannot_be_read(uri, error) from error
    return addresses(server, experiment_id, key)
