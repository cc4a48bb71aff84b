"""A database read at once gives what MLflow's client gives, in few queries."""

import math

import pandas as pd
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from kl_comedy.tracking import database
from kl_comedy.tracking.runs import history, open_runs, runs_frame
from kl_comedy.tracking.store import connect
from study_runs import EVAL, KL


@pytest.fixture
def uri(study_copy):
    """The study with what a store of years has: odd values, a step logged twice, a deleted run, other experiments."""
    client = connect(study_copy)
    experiment = client.get_experiment_by_name("study").experiment_id
    runs = client.search_runs([experiment])
    first, second, deleted = (run.info.run_id for run in runs[:3])
    for step, value in enumerate((math.nan, math.inf, -math.inf, 0.1 + 0.2)):
        client.log_metric(first, "odd", value, timestamp=1000 + step, step=step)
    client.log_metric(second, "odd", math.nan, timestamp=1000, step=7)
    # By time and not by value: the point of the resumed run counts.
    client.log_metric(first, EVAL, 9.0, timestamp=10, step=40)
    client.log_metric(second, EVAL, -9.0, timestamp=10**14, step=40)
    client.delete_run(deleted)
    other = client.create_experiment("other")
    client.create_run(other, start_time=5, run_name="bare")
    client.create_run(other, start_time=5, tags={"t": "é\n"})
    return study_copy


@pytest.fixture
def through_client(monkeypatch):
    """From now on stores are read as a server is."""

    def switch():
        monkeypatch.setattr(database, "_backend", lambda client: None)

    return switch


@pytest.fixture
def statements():
    """The SQL statements that any database has executed."""
    executed = []

    def record(connection, cursor, statement, *rest):
        executed.append(statement)

    event.listen(Engine, "before_cursor_execute", record)
    yield executed
    event.remove(Engine, "before_cursor_execute", record)


@pytest.mark.parametrize("experiment", [None, "study", "other"])
def test_runs_are_those_of_the_client(uri, through_client, experiment):
    at_once = runs_frame(uri, experiment)
    through_client()
    pd.testing.assert_frame_equal(at_once, runs_frame(uri, experiment), check_exact=True)


@pytest.mark.parametrize("metric", [EVAL, KL, "odd", "no such metric"])
def test_curves_are_those_of_the_client(uri, through_client, monkeypatch, metric):
    monkeypatch.setattr(database, "IDS_PER_QUERY", 4)
    ids = list(runs_frame(uri)["run_id"])[::-1]
    at_once = history(uri, ids, metric)
    through_client()
    pd.testing.assert_frame_equal(at_once, history(uri, ids, metric), check_exact=True)
    if metric == EVAL:
        assert -9.0 in set(at_once["value"])
        assert 9.0 not in set(at_once["value"])


def test_completions_are_those_of_the_client(uri, through_client):
    ids = list(runs_frame(uri)["run_id"])
    at_once = [open_runs(uri).completions(run_id) for run_id in ids]
    assert sum(map(bool, at_once)) == len(ids) - 2, "all but the two runs without tables"
    through_client()
    assert at_once == [open_runs(uri).completions(run_id) for run_id in ids]


def test_the_number_of_queries_does_not_grow_with_the_runs(uri, statements):
    ids = list(runs_frame(uri)["run_id"])
    numbers = []
    for some in (ids[:1], ids):
        statements.clear()
        history(uri, some, EVAL)
        numbers.append(len([statement for statement in statements if "FROM metrics" in statement]))
    assert numbers == [1, 1]
    statements.clear()
    runs_frame(uri)
    assert len([statement for statement in statements if "params" in statement]) == 1
