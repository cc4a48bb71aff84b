"""Twenty runs that log into one store at the same time lose nothing: SQLite, and PostgreSQL behind an MLflow server.

PostgreSQL is skipped where it is missing (Debian: apt-get install postgresql) or psycopg2 is (psycopg2-binary).
"""

import multiprocessing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kl_comedy.errors import RunFailed
from kl_comedy.results.runs import history, runs_frame
from kl_comedy.slurm.manifest import Manifest
from kl_comedy.slurm.submit import create_stores
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.upload import sync
from mlflow_servers import empty_postgres, mlflow_server

WRITERS = 20
STEPS = 15
METRICS = 5


def manifest(folder, *stores):
    return Manifest(
        name="many",
        directory=str(folder),
        stores=stores,
        package_version="",
        plugins=(),
        evaluate=None,
        max_parallel=None,
        cells=(),
    )


def write_runs(uri, folder):
    """Log twenty runs from twenty processes at once."""
    create_stores(manifest(folder, (uri, "many"), ("none", "many")))
    create_stores(manifest(folder, (uri, "many")))  # a second time changes nothing

    def write(name):
        config = SimpleNamespace(uri=uri, experiment="many", tags={"sweep": "many"})
        logger = RunLogger(config, run_dir=folder / name, params={"seed": name}, tags={})
        for step in range(1, STEPS + 1):
            logger.log_metrics({f"train/m{n}": float(step * n) for n in range(METRICS)}, step)
            if step % 5 == 0:
                logger.commit(step)
        logger.finish()

    children = [multiprocessing.get_context("fork").Process(target=write, args=(str(n),)) for n in range(WRITERS)]
    for child in children:
        child.start()
    for child in children:
        child.join(550)
    assert [child.exitcode for child in children] == [0] * WRITERS
    # A store on a busy machine may have turned a writer away: what it refused is in the run's spool.
    for n in range(WRITERS):
        sync(folder / str(n))
    frame = runs_frame(uri, "many")
    assert sorted(frame["params.seed"], key=int) == [str(n) for n in range(WRITERS)]
    for n in range(METRICS):
        curves = history(uri, frame["run_id"], f"train/m{n}")
        assert curves["step"].tolist() == list(range(1, STEPS + 1)) * WRITERS
        assert (curves["value"] == curves["step"] * n).all()


@pytest.mark.slow
def test_twenty_writers_on_sqlite_lose_no_metric(tmp_path):
    write_runs(f"sqlite:///{tmp_path}/store.db", tmp_path)


def test_a_store_that_cannot_be_created_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    sweep = manifest(tmp_path, (f"sqlite:///{tmp_path}/file/store.db", "many"))
    with pytest.raises(RunFailed, match="the results store cannot be created"):
        create_stores(sweep)
    create_stores(replace(sweep, stores=()))


@pytest.fixture
def server(tmp_path):
    """The address of an MLflow server over a PostgreSQL database, as docs/clusters.md starts it."""
    options = ["--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "2"]
    with empty_postgres() as database, mlflow_server(database, tmp_path, *options) as uri:
        yield uri


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_writers_through_a_server_on_postgres_lose_no_metric(server, tmp_path):
    write_runs(server, tmp_path)
