"""A run and its copy in a SQLite MLflow store: upload, resume, outages, dead runs."""

import functools
import itertools
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import time
from types import SimpleNamespace

import pytest

from kl_comedy.errors import UserError
from kl_comedy.results.runs import history, runs_frame
from kl_comedy.tracking import logger as logger_module
from kl_comedy.tracking import mark_dead_runs, provenance, store, sync
from kl_comedy.tracking.logger import ResumedFrom, RunLogger
from kl_comedy.tracking.store import connect

DEAD_URI = "http://127.0.0.1:9"
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A created, empty database; making one takes seconds, copying it does not."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    connect(f"sqlite:///{file}")
    return file


@pytest.fixture
def uri(tmp_path, empty_store):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def start(tmp_path, uri, monkeypatch):
    """Starts a run in a folder of this test."""

    def start(folder="run", *, to=uri, flush_every=2, params=None, tags=None, **options):
        monkeypatch.setattr(logger_module, "FLUSH_EVERY", flush_every)
        config = SimpleNamespace(uri=to, experiment="trial", tags={"team": "a"})
        return RunLogger(
            config,
            run_dir=tmp_path / folder,
            params={"seed": 0, "name": "x", **(params or {})},
            tags={"kl.label": "k3 loss", **(tags or {})},
            **options,
        )

    return start


def points(uri, run_id, metric="train/reward"):
    """Every stored point, duplicates included, straight from MLflow."""
    return [(point.step, point.value) for point in connect(uri).get_metric_history(run_id, metric)]


def steps(uri, run_id, metric="train/reward"):
    return [step for step, _ in points(uri, run_id, metric)]


def assert_ended(uri, run_id, status, reason):
    run = connect(uri).get_run(run_id)
    assert run.info.status == status
    assert run.data.tags["failure.reason"] == reason


def log_steps(logger, first, last, *, scale=1.0):
    for step in range(first, last + 1):
        logger.log_metrics({"train/reward": scale * step, "kl/k1_reverse_token": 0.1}, step)


def run_in_fork(*functions):
    """Run the functions in child processes at the same time; their exit codes."""
    children = [FORK.Process(target=function) for function in functions]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


def test_a_run_arrives_complete(start, uri, tmp_path):
    params = {"kl.0.beta": 0.05, "none": None, "empty": "", "long": "x" * 7000, "model.options.token": "hf_secret"}
    for n in range(250):  # more than one upload takes
        params[f"many.{n}"] = n
    logger = start(params=params, tags={"note": "y" * 9000})
    logger.log_metrics({"train/reward": 1.0, "nan": math.nan, "inf": -math.inf, "eval/x/pass@4": 0.5}, 1)
    time.sleep(0.005)
    logger.log_metrics({"train/reward": 2.0}, 1)
    logger.log_table("eval/x", [{"text": "a", "reward": 1.0}], 1)
    (tmp_path / "outside.txt").write_text("hello")
    logger.log_artifact(tmp_path / "outside.txt", "files")
    logger.finish()
    client = connect(uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "x s0"
    assert run.data.tags["run_folder"] == "run"
    expected = {"seed": "0", "kl.0.beta": "0.05", "none": "null", "empty": "", "many.249": "249"}
    assert expected.items() <= run.data.params.items()
    assert len(run.data.params["long"]) <= 6000
    assert "7000 characters" in run.data.params["long"]
    assert run.data.params["model.options.token"] == "***"
    assert run.data.tags["team"] == "a"
    assert len(run.data.tags["note"]) <= 8000
    assert run.data.tags["process.pid"] == str(os.getpid())
    assert run.data.metrics["eval/x/pass_at_4"] == 0.5
    assert math.isnan(run.data.metrics["nan"])
    paths = set()
    for folder in ("", "files", "tables/eval/x"):
        paths.update(item.path for item in client.list_artifacts(logger.run_id, folder))
    assert {"params.json", "files/outside.txt", "tables/eval/x/1.json"} <= paths
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())
    (row,) = runs_frame(uri, "trial").to_dict("records")
    assert row["metrics.inf"] == -math.inf
    assert math.isnan(row["metrics.nan"])
    assert row["duration_s"] >= 0
    # Of two values of one step the later one counts.
    assert history(uri, [logger.run_id], "train/reward")[["step", "value"]].values.tolist() == [[1.0, 2.0]]
    assert history(uri, [logger.run_id], "nothing").empty


HASH = "0123456789abcdef" * 4


def inputs_of(uri, run_id):
    """Name, digest and purpose of each data set of a run."""
    inputs = connect(uri).get_run(run_id).inputs.dataset_inputs
    return sorted((item.dataset.name, item.dataset.digest, item.tags[0].value) for item in inputs)


@pytest.mark.parametrize(
    ("program", "source"),
    [
        ("/some/where/kl-comedy", "kl-comedy train"),
        ("/some/where/kl_comedy/cli/__main__.py", "kl-comedy train"),
        ("/some/where/study.py", "study.py"),
        ("-c", "python"),
        ("", "python"),
    ],
)
def test_a_run_names_the_program_that_made_it(monkeypatch, program, source):
    monkeypatch.setattr(provenance.sys, "argv", [program, "train"])
    assert provenance.page_tags()["mlflow.source.name"] == source


def test_mlflows_pages_have_what_they_show(start, uri, monkeypatch):
    monkeypatch.setattr(provenance.sys, "argv", ["/some/where/kl-comedy", "train", "token=hf_0123456789abcdefgh"])
    data = {"data.train.dataset": "hub", "data.train.name": "openai/gsm8k", "data.train.split": None}
    data |= {"data.eval.mine.dataset": "jsonl", "data.eval.mine.path": "/home/me/x.jsonl"}
    hashes = {"data.hash.train": HASH, "data.hash.eval.mine": HASH[::-1], "data.hash.eval.suite": "ab" * 32}
    logger = start(params=data, tags={**hashes, "mlflow.note.content": "what it is", "data.count.train.kept": "7"})
    logger.finish()
    run = connect(uri).get_run(logger.run_id)
    assert run.data.tags["mlflow.source.name"] == "kl-comedy train"
    assert run.data.tags["mlflow.source.type"] == "LOCAL"
    assert run.data.tags["mlflow.note.content"] == "what it is"
    assert run.info.user_id == run.data.tags["mlflow.user"]
    assert inputs_of(uri, logger.run_id) == [
        ("mine: jsonl x.jsonl", HASH[::-1][:12], "evaluation"),
        ("suite", "abababababab", "evaluation"),
        ("train: hub openai/gsm8k", HASH[:12], "training"),
    ]
    profiles = [json.loads(item.dataset.profile) for item in run.inputs.dataset_inputs]
    assert {"sha256": HASH, "num_rows": 7} in profiles
    assert connect(uri).get_experiment_by_name("trial").tags["mlflow.experimentKind"] == "custom_model_development"


def test_what_the_user_writes_for_mlflows_pages_stays(start, uri, tmp_path):
    client = connect(uri)
    experiment = client.create_experiment("trial", tags={"mlflow.experimentKind": "genai_development"})
    config = SimpleNamespace(uri=uri, experiment="trial", tags={"mlflow.note.content": "mine"})
    tags = {"mlflow.note.content": "made", "data.hash.train": HASH}
    own = RunLogger(config, run_dir=tmp_path / "own", params={}, tags=tags)
    own.finish()
    assert client.get_run(own.run_id).data.tags["mlflow.note.content"] == "mine"
    assert client.get_experiment(experiment).tags["mlflow.experimentKind"] == "genai_development"

    # In the pages, between a stop and a resume.
    first = start(tags=tags)
    log_steps(first, 1, 2)
    first.commit(2)
    first.finish("KILLED", "stopped")
    client.set_tag(first.run_id, "mlflow.note.content", "edited")
    client.update_run(first.run_id, name="edited")
    second = start(tags=tags, resumed=ResumedFrom(step=2))
    second.finish()
    run = client.get_run(second.run_id)
    assert second.run_id == first.run_id
    assert run.info.run_name == "edited"
    assert run.data.tags["mlflow.note.content"] == "edited"
    assert inputs_of(uri, second.run_id) == [("train", HASH[:12], "training")]


def test_an_experiment_of_an_earlier_version_opens_as_machine_learning(start, uri):
    experiment = connect(uri).create_experiment("trial")
    start().finish()
    assert connect(uri).get_experiment(experiment).tags["mlflow.experimentKind"] == "custom_model_development"


def test_a_server_that_takes_no_data_sets_gets_the_rest(start, uri, monkeypatch, caplog):
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
    from mlflow.tracking import MlflowClient

    def refuse(self, run_id, inputs):
        raise MlflowException("no such endpoint", error_code=ENDPOINT_NOT_FOUND)

    monkeypatch.setattr(MlflowClient, "log_inputs", refuse)
    logger = start(tags={"data.hash.train": HASH})
    log_steps(logger, 1, 2)
    logger.finish()
    assert steps(uri, logger.run_id) == [1, 2]
    assert "fails" not in caplog.text


def test_points_wait_for_the_checkpoint_and_those_of_live_runs_do_not(start, uri, caplog):
    waiting = start("waiting")
    live = start("live", live=True)
    for logger in (waiting, live):
        log_steps(logger, 1, 4)
    assert steps(uri, waiting.run_id) == []
    assert steps(uri, live.run_id) == [1, 2, 3, 4]
    waiting.commit(3)
    assert steps(uri, waiting.run_id) == [1, 2, 3]
    waiting.finish("KILLED", "preempted")
    assert steps(uri, waiting.run_id) == [1, 2, 3], "a resumed run computes update 4 again"
    assert "points after the checkpoint of update 3 (to update 4) are in" in caplog.text
    live.finish("FAILED", "the loss is NaN")
    early = start("early")
    log_steps(early, 1, 2)
    early.finish("FAILED", "the loss is NaN")
    assert steps(uri, early.run_id) == [1, 2], "there is no checkpoint to resume from"
    done = start("done")
    done.commit(1)
    log_steps(done, 1, 3)
    done.finish()
    assert steps(uri, done.run_id) == [1, 2, 3]
    assert_ended(uri, waiting.run_id, "KILLED", "preempted")


def test_a_resume_after_a_kill_continues_the_same_run_with_one_point_per_step(start, uri, tmp_path):
    def killed():
        logger = start(params={"train.steps": 5})
        log_steps(logger, 1, 4)
        logger.commit(4)
        log_steps(logger, 5, 7, scale=-1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_in_fork(killed) == [-signal.SIGKILL]
    (row,) = runs_frame(uri, mark_dead=True).to_dict("records")
    assert row["status"] == "FAILED"
    assert row["tags.failure.reason"].startswith("process died (pid ")
    run_id = row["run_id"]
    for first, last in ((5, 6), (7, 9)):
        logger = start(resumed=ResumedFrom(step=first - 1), params={"train.steps": 5 + last})
        (row,) = runs_frame(uri, mark_dead=True).to_dict("records")
        assert row["run_id"] == run_id
        assert row["status"] == "RUNNING"
        assert "tags.failure.reason" not in row
        log_steps(logger, first, last)
        logger.commit(last)
    logger.finish()
    assert points(uri, run_id) == [(step, float(step)) for step in range(1, 10)]
    data = connect(uri).get_run(run_id).data
    assert data.params["train.steps"] == "5"
    assert data.metrics["train/reward"] == 9.0
    assert data.tags["resume.params_changed"] == "train.steps: 5 -> 14"
    assert data.tags["resume.count"] == "2"


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_resume_after_an_early_end_continues_the_same_run_with_one_point_per_step(start, uri, status, caplog):
    first = start()
    log_steps(first, 1, 4)
    first.commit(4)
    log_steps(first, 5, 7, scale=-1.0)
    first.finish(status, "rank 1 was killed by SIGKILL")
    assert_ended(uri, first.run_id, status, "rank 1 was killed by SIGKILL")
    second = start(resumed=ResumedFrom(step=4))
    assert second.run_id == first.run_id
    assert "takes its place" not in caplog.text
    log_steps(second, 5, 9)
    second.finish()
    assert points(uri, first.run_id) == [(step, float(step)) for step in range(1, 10)]
    frame = runs_frame(uri, "trial")
    assert frame["run_id"].tolist() == [first.run_id]
    assert frame["status"].tolist() == ["FINISHED"]


def test_a_resume_from_before_what_mlflow_holds_replaces_the_run(start, uri, caplog, tmp_path):
    """As does the resume of a run that was deleted in MLflow."""
    first = start()
    log_steps(first, 1, 4, scale=-1.0)
    first.commit(4)
    log_steps(first, 5, 7, scale=-1.0)
    first.finish("FAILED", "the loss is NaN")
    sync(tmp_path / "run")  # everything is in MLflow, steps 5 to 7 will be done again
    second = start(resumed=ResumedFrom(step=4))
    assert second.run_id != first.run_id
    assert "a new run takes its place" in caplog.text
    assert connect(uri).get_run(second.run_id).data.tags["resume.replaces"] == first.run_id
    log_steps(second, 5, 6)
    second.finish()
    # Updates 1 to 4 are those before the checkpoint, 5 and 6 were computed again.
    expected = [(1, -1.0), (2, -2.0), (3, -3.0), (4, -4.0), (5, 5.0), (6, 6.0)]
    assert points(uri, second.run_id) == expected
    frame = runs_frame(uri, "trial")
    assert frame["run_id"].tolist() == [second.run_id]
    assert frame["status"].tolist() == ["FINISHED"]
    assert "tags.failure.reason" not in frame
    connect(uri).delete_run(second.run_id)
    third = start(resumed=ResumedFrom(step=6))
    third.finish()
    assert third.run_id not in (first.run_id, second.run_id)
    assert steps(uri, third.run_id) == list(range(1, 7))


def test_more_than_a_request_holds_is_uploaded_in_parts_each_once(start, uri, monkeypatch):
    """More parameters, tags and points than MLflow takes in one request."""
    many = {f"p{n:03}": str(n) for n in range(205)}
    logger = start(flush_every=10**6, params=many, tags=many)
    log_steps(logger, 1, 600)
    sent = {"params": [], "tags": [], "metrics": []}
    log_batch = logger._uploader.client.log_batch

    def record(run_id, **items):
        for kind, entries in items.items():
            sent[kind] += [(entry.key, getattr(entry, "step", None)) for entry in entries]
        return log_batch(run_id, **items)

    monkeypatch.setattr(logger._uploader.client, "log_batch", record)
    logger.finish()
    for kind, entries in sent.items():
        assert len(entries) == len(set(entries)), f"{kind} are sent again"
    run = connect(uri).get_run(logger.run_id)
    assert run.data.params.items() >= many.items()
    assert run.data.tags.items() >= many.items()
    assert steps(uri, logger.run_id) == list(range(1, 601))


def test_an_interrupted_upload_is_repeated_without_duplicates(start, uri, monkeypatch):
    logger = start(flush_every=100)
    log_steps(logger, 1, 600)
    log_batch = logger._uploader.client.log_batch
    calls = []

    def fail_the_second_time(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("gone")
        return log_batch(*args, **kwargs)

    monkeypatch.setattr(logger._uploader.client, "log_batch", fail_the_second_time)
    run_id = logger.run_id
    logger.commit(600)
    assert 0 < len(steps(uri, run_id)) < 600
    logger.finish()
    assert sorted(steps(uri, logger.run_id)) == list(range(1, 601))


def test_a_server_that_is_down_costs_seconds_and_loses_nothing(start, uri, tmp_path, caplog):
    began = time.monotonic()
    logger = start(to=DEAD_URI)
    log_steps(logger, 1, 50)
    logger.commit(50)
    logger.log_table("samples", [{"text": "a"}], 50)
    logger.log_artifact(tmp_path / "nowhere.txt")
    logger.finish("FAILED", "boom")
    assert time.monotonic() - began < 30
    assert logger.run_id is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "kl-comedy results sync" in warnings[0]
    assert "\n" not in warnings[0]
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(Exception, match="127"):
        sync(tmp_path / "moved")
    first = sync(tmp_path / "moved", uri, "rescued")
    second = sync(tmp_path / "moved", uri)
    run_id = first.state.run_id
    assert second.state.run_id == run_id
    assert second.events == 0
    assert len(first.left_out) == 1
    assert "nowhere.txt is gone" in first.left_out[0]
    assert steps(uri, run_id) == list(range(1, 51))
    client = connect(uri)
    assert [item.path for item in client.list_artifacts(run_id, "tables/samples")] == ["tables/samples/50.json"]
    assert_ended(uri, run_id, "FAILED", "boom")
    assert abs(client.get_run(run_id).info.start_time / 1000 - time.time()) < 600


@pytest.mark.parametrize(
    "error", [ConnectionError("down"), ImportError("no mlflow")], ids=["server down", "mlflow not installed"]
)
def test_a_store_that_answers_again_gets_everything(start, uri, monkeypatch, caplog, error):
    def fail(uri):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(store, "connect", fail)
        logger = start()
        log_steps(logger, 1, 4)
        logger.commit(4)
    assert logger.run_id is None
    if isinstance(error, ImportError):
        assert "mlflow is not installed" in caplog.text
    else:
        assert "mlflow is not installed" not in caplog.text
    logger.finish()
    assert steps(uri, logger.run_id) == [1, 2, 3, 4]
    assert "answers again" in caplog.text


def test_sync_gives_the_same_run_without_its_state(start, uri, tmp_path):
    logger = start()
    log_steps(logger, 1, 5)
    logger.finish()
    (tmp_path / "run/tracking.json").unlink()
    result = sync(tmp_path / "run", uri, "trial")
    assert result.state.run_name == "x s0"
    assert result.state.run_id == logger.run_id
    assert result.events == 5
    assert steps(uri, logger.run_id) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="already in experiment 'trial'"):
        sync(tmp_path / "run", uri, "other")


def test_a_folder_without_a_spool_is_not_synced(uri, tmp_path):
    with pytest.raises(UserError, match=r"no spool\.jsonl"):
        sync(tmp_path, uri)


def test_sync_reads_older_spools(uri, tmp_path):
    """Whose state has no id of the run, and fields that this version does not know."""
    old = tmp_path / "old"
    old.mkdir()
    rows = [
        {"kind": "params", "time": 1000, "step": None, "data": {"seed": "7"}},
        {"kind": "tags", "time": 1000, "step": None, "data": {"spool.id": "f00"}},
        {"kind": "metrics", "time": 2000, "step": 1, "data": {"x": "inf"}},
    ]
    (old / "spool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {
        "uri": uri,
        "experiment": "old",
        "run_name": "first",
        "run_id": None,
        "mirrored_step": None,
        "offset": 0,
        "replaced": [],
        "field_of_another_version": 1,
    }
    (old / "tracking.json").write_text(json.dumps(state))
    sync(old)
    (row,) = runs_frame(uri, "old").to_dict("records")
    assert row["run_name"] == "first"
    assert row["params.seed"] == "7"
    assert row["metrics.x"] == math.inf
    assert row["start_time"] == 1000


def test_dead_runs_of_this_host_are_marked_and_others_left_alone(start, uri):
    client = connect(uri)
    alive = start("alive").run_id
    experiment = client.get_experiment_by_name("trial").experiment_id
    tags = {**provenance.process_tags(), provenance.PID: "999999999"}
    dead = client.create_run(experiment, tags=tags).info.run_id
    elsewhere = client.create_run(experiment, tags={**tags, provenance.HOST: "other"}).info.run_id
    assert mark_dead_runs(client, "no such experiment") == []
    assert mark_dead_runs(client, "trial") == [dead]
    assert_ended(uri, dead, "FAILED", "process died (pid 999999999)")
    assert client.get_run(elsewhere).info.status == "RUNNING"
    assert client.get_run(alive).info.status == "RUNNING"


@pytest.mark.parametrize("then", ["ends", "is resumed"])
def test_a_run_that_changes_while_dead_ones_are_looked_for_is_left_alone(start, uri, monkeypatch, then):
    """It was RUNNING in the search; when its process is looked at, that one has ended the run, or another goes on."""
    client = connect(uri)
    start("any")
    experiment = client.get_experiment_by_name("trial").experiment_id
    run = client.create_run(experiment, tags=provenance.process_tags()).info.run_id

    def changes_before_the_look(tags):
        if then == "ends":
            client.set_terminated(run, status="FINISHED")
        else:
            client.set_tag(run, provenance.PID, "999999999")
        return True

    monkeypatch.setattr(provenance, "is_dead", changes_before_the_look)
    assert run not in mark_dead_runs(client, "trial")
    assert client.get_run(run).info.status == {"ends": "FINISHED", "is resumed": "RUNNING"}[then]


def test_processes_that_start_together_on_a_fresh_store_all_arrive(start, tmp_path):
    uri = f"sqlite:///{tmp_path}/new/folder/mlflow.db"

    def run(seed):
        logger = start(str(seed), to=uri, flush_every=1, params={"seed": seed})
        assert logger.run_id is not None, "the store was created and answered the first time"
        for step in range(3):
            logger.log_metrics({"x": float(step)}, step)
            logger.commit(step)
        logger.finish()

    processes = [functools.partial(run, seed) for seed in range(3)]
    assert run_in_fork(*processes) == [0, 0, 0]
    frame = runs_frame(uri, "trial")
    assert sorted(frame["params.seed"]) == ["0", "1", "2"]
    assert set(frame["status"]) == {"FINISHED"}
    for run_id in frame["run_id"]:
        assert steps(uri, run_id, "x") == [0, 1, 2]


# --- a first start that is killed ------------------------------------------------------------------------------------


def connect_until(uri, statement):
    """Connect, and kill this process before the SQL statement of this number; then there is none to clean up."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    numbers = itertools.count(1)

    @event.listens_for(Engine, "before_cursor_execute")
    def count(*arguments):
        if next(numbers) == statement:
            os.kill(os.getpid(), signal.SIGKILL)

    connect(uri)


def check_usable(uri, tmp_path):
    """A run can be logged and read; in a process of its own, which has no database open."""

    def use():
        config = SimpleNamespace(uri=uri, experiment="trial", tags={})
        logger = RunLogger(config, run_dir=tmp_path / "a run", params={}, tags={})
        logger.log_metrics({"x": 1.0}, 1)
        logger.finish()
        assert logger.run_id is not None
        assert runs_frame(uri)["metrics.x"].tolist() == [1.0]

    assert run_in_fork(use) == [0]


STATEMENTS = 1650
"""Of the creation of a store by MLflow 3.17: 1,680; the test below needs no exact number."""


@pytest.mark.slow
def test_a_store_whose_creation_is_killed_does_not_exist_and_the_next_start_makes_it(tmp_path):
    file = tmp_path / "new" / "mlflow.db"
    for statement in range(1, STATEMENTS, STATEMENTS // 13):
        killed = functools.partial(connect_until, f"sqlite:///{file}", statement)
        assert run_in_fork(killed) == [-signal.SIGKILL]
        assert not file.exists(), f"killed at statement {statement}"
        assert len(list(file.parent.glob(".mlflow.db.*.new"))) <= 1, "the next start removes what the killed one left"
    check_usable(f"sqlite:///{file}", tmp_path)
    assert sorted(path.name for path in file.parent.iterdir()) == ["mlflow.db", "mlflow.db.lock"]


def test_a_store_that_appears_meanwhile_is_not_replaced(tmp_path, empty_store, monkeypatch):
    file = tmp_path / "mlflow.db"
    fsync_path = store.fsync_path
    with sqlite3.connect(empty_store) as database:
        (before,) = database.execute("SELECT creation_time FROM experiments").fetchone()

    def slow(path):  # as another program that has no lock
        if not file.exists():
            shutil.copy(empty_store, file)
        fsync_path(path)

    monkeypatch.setattr(store, "fsync_path", slow)
    connect(f"sqlite:///{file}")
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT creation_time FROM experiments").fetchone() == (before,)
    assert not list(tmp_path.glob(".mlflow*"))


HALF_MADE = {
    "nothing yet": "DROP TABLE workspaces",
    "in a migration": "CREATE TABLE _alembic_tmp_experiments (experiment_id INTEGER, name TEXT)",
    "no version": "DELETE FROM alembic_version",
    "no table of versions": "DROP TABLE alembic_version",
    "no experiment yet": "DELETE FROM experiments",
}
"""What a first start that was killed leaves in a store of an earlier version of kl_comedy, made from a whole one."""


def leave_half_made(file, kind):
    with sqlite3.connect(file) as database:
        database.execute(HALF_MADE[kind])
    if kind == "nothing yet":
        file.write_bytes(b"")
    os.utime(file, (0, 0))  # long ago


@pytest.mark.parametrize("kind", HALF_MADE)
def test_a_half_made_store_is_one_line_to_a_reader_and_set_aside_by_the_next_run(
    tmp_path, empty_store, monkeypatch, caplog, kind
):
    file = tmp_path / "mlflow.db"
    shutil.copy(empty_store, file)
    leave_half_made(file, kind)
    content = file.read_bytes()
    with pytest.raises(UserError, match=r"is half made .* makes it anew") as raised:
        runs_frame(f"sqlite:///{file}")
    assert "\n" not in str(raised.value)
    assert file.read_bytes() == content
    created = []

    def create(file):
        created.append(shutil.copy(empty_store, file))  # faster than to make one

    monkeypatch.setattr(store, "_create", create)
    assert connect(f"sqlite:///{file}").search_experiments()[0].name == "Default"
    assert len(created) == 1
    assert (tmp_path / "mlflow.db.half-made-1").read_bytes() == content
    assert "it is now mlflow.db.half-made-1" in caplog.text


def test_a_half_made_store_that_holds_runs_is_left_as_it_is(start, uri, tmp_path):
    logger = start()
    logger.finish()
    file = tmp_path / "mlflow.db"
    leave_half_made(file, "in a migration")
    content = file.read_bytes()
    with pytest.raises(UserError, match=r"1 rows of experiments.*results sync.*nothing was changed") as raised:
        connect(uri)
    assert "\n" not in str(raised.value)
    assert file.read_bytes() == content
    assert not list(tmp_path.glob("*half-made*"))


def test_a_store_that_another_program_is_making_is_waited_for(tmp_path, empty_store, monkeypatch):
    file = tmp_path / "mlflow.db"
    file.write_bytes(b"")
    waits = []

    def finished_meanwhile(seconds):
        waits.append(seconds)
        shutil.copy(empty_store, file)

    monkeypatch.setattr(store.time, "sleep", finished_meanwhile)
    connect(f"sqlite:///{file}")
    assert len(waits) == 1
    assert not list(tmp_path.glob("*half-made*"))


def test_the_sync_command_prints_the_run(kl_comedy, start, uri, tmp_path):
    start("run", to="none").finish()
    code, out, err = kl_comedy("results", "sync", tmp_path / "run", "--uri", uri)
    assert code == 0
    assert connect(uri).get_run(out.strip()).info.status == "FINISHED"
    assert "uploaded" in err


def test_the_sync_command_refuses_a_folder_that_is_not_there(kl_comedy, uri, tmp_path):
    assert kl_comedy("results", "sync", tmp_path / "nowhere", "--uri", uri)[0] == 2


def test_the_sync_command_needs_a_store_for_a_run_without_one(kl_comedy, start, tmp_path):
    start("run", to="none").finish()
    assert kl_comedy("results", "sync", tmp_path / "run")[0] == 2


def test_the_sync_command_reports_a_server_that_is_down(kl_comedy, start, tmp_path):
    start("run", to="none").finish()
    code, _, err = kl_comedy("results", "sync", tmp_path / "run", "--uri", DEAD_URI)
    assert code == 1
    assert "the upload failed" in err


def test_a_store_deleted_in_the_middle_of_a_run_is_one_line_and_sync_restores_it(
    start, uri, tmp_path, empty_store, caplog, capfd
):
    logger = start()
    log_steps(logger, 1, 4)
    logger.commit(4)
    gone = logger.run_id
    assert gone is not None
    (tmp_path / "mlflow.db").unlink()
    log_steps(logger, 5, 8)
    logger.commit(8)
    logger.finish()
    assert logger.run_id is None, "a run that is gone is named"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "\n" not in line
    assert "kl-comedy results sync" in line
    assert "Traceback" not in "".join(capfd.readouterr())
    assert "attempt to write a readonly database" in line
    shutil.copy(empty_store, tmp_path / "new.db")  # of another name: this process has the old one open
    new_uri = uri.replace("mlflow.db", "new.db")
    result = sync(tmp_path / "run", new_uri)
    assert result.state.run_id != gone
    assert steps(new_uri, result.state.run_id) == list(range(1, 9))


def test_a_damaged_database_is_read_or_is_one_line(start, uri, tmp_path):
    logger = start()
    log_steps(logger, 1, 4)
    logger.finish()
    file = tmp_path / "mlflow.db"
    whole = file.read_bytes()
    chance = random.Random(0)
    for number in range(12):
        place = chance.randrange(100, len(whole))
        if number % 2 == 1:
            file.write_bytes(whole[:place])
        else:
            file.write_bytes(whole[:place] + chance.randbytes(4096) + whole[place + 4096 :])
        try:
            runs_frame(uri)
            history(uri, [logger.run_id], "train/reward")
        except UserError as error:
            assert "\n" not in str(error)
            assert "--uri" in str(error)
