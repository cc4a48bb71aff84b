"""A database read at once gives what MLflow's client gives, in few queries."""

import contextlib
import itertools
import math
import sys

import pandas as pd
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from kl_comedy.results import database
from kl_comedy.results.database import StoredRun, active_runs, artifact_folder, points
from kl_comedy.results.runs import history, open_runs, runs_frame
from kl_comedy.tracking.store import connect
from mlflow_servers import empty_postgres, mlflow_server
from study_runs import EVAL, FAMILIES, KL, track


@pytest.fixture
def uri(study_copy):
    """The study with what a store of years has: odd values, a step logged twice, a deleted run, other experiments."""
    client = connect(study_copy)
    add_odd_things(client)
    return study_copy


def add_odd_things(client):
    """Change some of the runs of the experiment ``study``, and add another experiment."""
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


# --- stores that it does not know -------------------------------------------------------------------------------------


def all_experiments(client):
    return [experiment.experiment_id for experiment in client.search_experiments()]


def test_the_schema_of_the_installed_mlflow_is_known(uri):
    """A migration that nobody has read since an update of MLflow makes every report slow: read it, then add it."""
    client = connect(uri)
    assert active_runs(client, all_experiments(client)) is not None


@pytest.fixture
def unknown(uri):
    """A client of a database that a later MLflow has migrated after this process opened it."""
    client = connect(uri)
    store = client._tracking_client.store
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'f00000000000'")
    return client


def test_a_schema_that_nobody_has_read_is_left_to_the_client(unknown):
    run_id = unknown.search_runs(all_experiments(unknown))[0].info.run_id
    assert active_runs(unknown, all_experiments(unknown)) is None
    assert points(unknown, [run_id], EVAL) is None
    assert artifact_folder(unknown, run_id) is None


def test_what_is_read_is_the_same_where_the_schema_is_unknown(uri, monkeypatch):
    ids = list(runs_frame(uri)["run_id"])
    frame = runs_frame(uri)
    curves = history(uri, ids, EVAL)
    monkeypatch.setattr(database, "KNOWN_SCHEMAS", frozenset())
    pd.testing.assert_frame_equal(runs_frame(uri), frame, check_exact=True)
    pd.testing.assert_frame_equal(history(uri, ids, EVAL), curves, check_exact=True)


def test_a_store_that_restricts_what_a_reader_sees_is_left_to_the_client(uri):
    """As that of workspaces, which is a subclass of the store of databases."""
    client = connect(uri)
    store = client._tracking_client.store
    restricted = type("Restricted", (type(store),), {})
    unrestricted_class = type(store)
    store.__class__ = restricted
    try:
        assert active_runs(client, all_experiments(client)) is None
    finally:
        # MLflow keeps the store for later clients of this address.
        store.__class__ = unrestricted_class


def test_artifacts_that_are_not_on_this_machine_are_left_to_the_client(uri):
    client = connect(uri)
    run_id = client.search_runs(all_experiments(client))[0].info.run_id
    assert artifact_folder(client, run_id).is_absolute()
    with client._tracking_client.store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET artifact_uri = 's3://bucket/' || run_uuid")
    assert artifact_folder(client, run_id) is None


def test_a_run_without_a_name_has_that_of_its_tag(uri):
    """As MLflow's early versions stored it."""
    client = connect(uri)
    run = client.search_runs(all_experiments(client))[0]
    with client._tracking_client.store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE runs SET name = NULL")
    records = {record.run_id: record for record in active_runs(client, all_experiments(client))}
    assert run.data.tags["mlflow.runName"]
    assert records[run.info.run_id].name == run.data.tags["mlflow.runName"]
    assert records[run.info.run_id].name == client.get_run(run.info.run_id).info.run_name


# --- real stores ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def store_of_kind(kind, folder, monkeypatch):
    """The address of an empty store: PostgreSQL read directly, or a server over the store that ``kind`` names."""
    if kind == "postgresql":
        with empty_postgres() as address:
            credentials, _, place = address.removeprefix("postgresql+psycopg2://").partition("@")
            # An address with a password is refused.
            user, _, password = credentials.partition(":")
            monkeypatch.setenv("PGUSER", user)
            monkeypatch.setenv("PGPASSWORD", password)
            yield f"postgresql+psycopg2://{place}"
        return
    backend = {"server over sqlite": f"sqlite:///{folder}/mlflow.db", "server over files": f"file://{folder}/mlruns"}
    with mlflow_server(
        backend[kind], folder, "--workers", "1", "--artifacts-destination", str(folder / "artifacts")
    ) as address:
        yield address


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["postgresql", "server over sqlite", "server over files"])
def test_a_real_store_is_read_as_its_client_reads_it_run_by_run(kind, tmp_path, monkeypatch):
    # MLflow has announced the end of its stores of files, and asks who starts a server over one to say so.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with store_of_kind(kind, tmp_path, monkeypatch) as address:
        for seed, (family, betas) in itertools.product((0, 1), FAMILIES.items()):
            beta, (reward, kl) = next(iter(betas.items()))
            track(tmp_path, address, family, beta, seed, reward=reward, kl=kl)
        client = connect(address)
        add_odd_things(client)
        listed = client.search_runs(all_experiments(client))
        assert len(listed) == 5 + 2, "one is deleted"
        reads_itself = kind == "postgresql"
        assert (active_runs(client, all_experiments(client)) is not None) == reads_itself

        frame = runs_frame(address).set_index("run_id")
        # MLflow's order among runs that began in the same millisecond is that of their ids.
        assert list(frame.index) == [run.info.run_id for run in listed]
        for run_id, row in frame.iterrows():
            run = client.get_run(run_id)
            expected = StoredRun.of(run)
            assert (row["run_name"], row["status"]) == (expected.name, expected.status)
            assert row["start_time"] == expected.start_time
            for section in ("params", "tags"):
                stored = row[[name for name in frame if name.startswith(f"{section}.")]].dropna()
                own = {name.removeprefix(f"{section}."): value for name, value in stored.items()}
                assert getattr(expected, section).items() <= own.items()
            for metric, value in expected.metrics.items():
                check_equal(row[f"metrics.{metric}"], value)
                history_of_run = client.get_metric_history(run_id, metric)
                # A store of files lists them as they were logged; of two points of one step the later time counts.
                in_time = sorted(history_of_run, key=lambda point: point.timestamp)
                by_step = {point.step: point.value for point in in_time}
                curve = history(address, [run_id], metric)
                assert list(curve["step"]) == sorted(by_step)
                for step, read in zip(curve["step"], curve["value"], strict=True):
                    check_equal(read, by_step[step])


def check_equal(read, stored):
    """NaN equals NaN; a database holds its largest number in place of an infinite one, which we undo."""
    if math.isnan(stored):
        assert math.isnan(read)
    elif abs(stored) == sys.float_info.max:
        assert read == math.copysign(math.inf, stored)
    else:
        assert read == stored
