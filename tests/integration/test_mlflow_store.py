"""Against a real SQLite MLflow store: mirror, resume, outages, dead runs, queries, and the command line."""

import json
import logging
import math
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from kl_comedy.cli import main
from kl_comedy.errors import UserError
from kl_comedy.tracking import mark_dead_runs, sync
from kl_comedy.tracking import provenance as process
from kl_comedy.tracking.logger import RunLogger
from kl_comedy.tracking.runs import history, runs_frame
from kl_comedy.tracking.spool import Spool
from kl_comedy.tracking.store import connect

DEAD_URI = "http://127.0.0.1:9"


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
def begin(tmp_path, uri):
    def start(folder="run", *, to=uri, flush_every=2, params=None, tags=None, **more):
        config = SimpleNamespace(uri=to, experiment="trial", flush_every=flush_every, tags={"team": "a"})
        return RunLogger.start(
            config,
            run_dir=tmp_path / folder,
            run_name=folder,
            params={"seed": 0, "name": "x", **(params or {})},
            tags={"kl.label": "k3 loss", **(tags or {})},
            **more,
        )

    return start


def points(uri, run_id, metric="train/reward"):
    """Every stored point, duplicates and all, straight from MLflow."""
    return [(point.step, point.value) for point in connect(uri).get_metric_history(run_id, metric)]


def steps(uri, run_id, metric="train/reward"):
    return [step for step, _ in points(uri, run_id, metric)]


def log_steps(logger, first, last, *, scale=1.0):
    for step in range(first, last + 1):
        logger.log_metrics({"train/reward": scale * step, "kl/k1_reverse_token": 0.1}, step)


def test_a_run_arrives_whole(begin, uri, tmp_path):
    params = {"kl.0.beta": 0.05, "none": None, "empty": "", "long": "x" * 7000, "model.options.token": "hf_secret"}
    params |= {f"many.{at}": at for at in range(250)}
    logger = begin(params=params, tags={"note": "y" * 9000})
    logger.log_metrics({"train/reward": 1.0, "nan": math.nan, "inf": math.inf, "eval/x/pass@4": 0.5}, 1)
    logger.log_table("eval/x", [{"text": "a", "reward": 1.0}], 1)
    (tmp_path / "outside.txt").write_text("hello")
    logger.log_artifact(tmp_path / "outside.txt", "files")
    logger.finish()
    client = connect(uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert {
        "seed": "0",
        "kl.0.beta": "0.05",
        "none": "null",
        "empty": "",
        "many.249": "249",
    }.items() <= run.data.params.items()
    assert len(run.data.params["long"]) <= 6000 and "7000 characters" in run.data.params["long"]
    assert run.data.params["model.options.token"] == "***"
    assert run.data.tags["team"] == "a" and len(run.data.tags["note"]) <= 8000
    assert run.data.tags["process.pid"] == str(process.os.getpid())
    assert run.data.metrics["eval/x/pass_at_4"] == 0.5 and math.isnan(run.data.metrics["nan"])
    paths = {
        item.path for folder in ("", "files", "tables/eval/x") for item in client.list_artifacts(logger.run_id, folder)
    }
    assert {"params.json", "files/outside.txt", "tables/eval/x/1.json"} <= paths
    assert run.info.artifact_uri.startswith((tmp_path / "mlartifacts").as_uri())
    (row,) = runs_frame(uri, "trial").to_dict("records")
    assert row["metrics.inf"] == math.inf and row["params.long"] == run.data.params["long"]


def test_points_wait_for_the_checkpoint_and_live_runs_do_not(begin, uri):
    waiting, live = begin("waiting"), begin("live", live=True)
    for logger in (waiting, live):
        log_steps(logger, 1, 4)
    assert steps(uri, waiting.run_id) == [] and steps(uri, live.run_id) == [1, 2, 3, 4]
    waiting.commit(3)
    assert steps(uri, waiting.run_id) == [1, 2, 3]
    waiting.finish("KILLED", "preempted")
    assert steps(uri, waiting.run_id) == [1, 2, 3, 4]
    run = connect(uri).get_run(waiting.run_id)
    assert (run.info.status, run.data.tags["failure.reason"]) == ("KILLED", "preempted")


def test_resume_after_a_kill_continues_the_same_run_with_one_point_a_step(begin, uri):
    first = begin()
    log_steps(first, 1, 4)
    first.commit(4)
    log_steps(first, 5, 7, scale=-1.0)  # beyond the checkpoint, then killed: no finish
    second = begin(resume=True, resume_step=4)
    assert second.run_id == first.run_id
    log_steps(second, 5, 9)
    second.finish()
    assert points(uri, second.run_id) == [(step, float(step)) for step in range(1, 10)]
    data = connect(uri).get_run(second.run_id).data
    assert data.tags["resume.count"] == "1" and data.metrics["train/reward"] == 9.0


def test_resume_behind_the_mirror_replaces_the_run(begin, uri, caplog):
    first = begin()
    log_steps(first, 1, 7, scale=-1.0)
    first.finish("FAILED", "the loss is NaN")  # everything is in MLflow, steps 5 to 7 will be done again
    second = begin(resume=True, resume_step=4)
    assert second.run_id != first.run_id and "a new run takes its place" in caplog.text
    log_steps(second, 5, 6)
    second.finish()
    expected = [(step, -float(step)) for step in range(1, 5)] + [(5, 5.0), (6, 6.0)]
    assert points(uri, second.run_id) == expected
    frame = runs_frame(uri, "trial")
    assert frame["run_id"].tolist() == [second.run_id] and frame["status"].tolist() == ["FINISHED"]
    assert "tags.failure.reason" not in frame


def test_a_second_resume_and_changed_params_keep_the_history_single(begin, uri):
    begin(params={"train.steps": 5}).commit(0)
    for last in (2, 4, 6):
        logger = begin(resume=True, resume_step=last - 2, params={"train.steps": 5 + last})
        log_steps(logger, last - 1, last)
        logger.commit(last)
    logger.finish()
    assert steps(uri, logger.run_id) == [1, 2, 3, 4, 5, 6]
    run = connect(uri).get_run(logger.run_id)
    assert run.data.params["train.steps"] == "5"
    assert run.data.tags["resume.params_changed"] == "train.steps: 5 -> 11" and run.data.tags["resume.count"] == "3"


def test_an_interrupted_upload_is_repeated_without_doubles(begin, uri, monkeypatch):
    logger = begin(flush_every=100)
    log_steps(logger, 1, 600)
    real = logger._client.log_batch
    calls = []

    def fails_after_the_first(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ConnectionError("gone")
        return real(*args, **kwargs)

    monkeypatch.setattr(logger._client, "log_batch", fails_after_the_first)
    logger.commit(600)
    assert 0 < len(steps(uri, logger.run_id)) < 600
    logger.finish()
    assert Counter(steps(uri, logger.run_id)) == Counter(range(1, 601))


def test_dead_server_costs_seconds_and_loses_nothing(begin, uri, tmp_path, caplog):
    began = time.monotonic()
    logger = begin(to=DEAD_URI)
    log_steps(logger, 1, 50)
    logger.commit(50)
    logger.log_table("samples", [{"text": "a"}], 50)
    logger.finish("FAILED", "boom")
    assert time.monotonic() - began < 30
    assert logger.run_id is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "kl-comedy results sync" in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(Exception, match="127"):
        sync(tmp_path / "run")
    done = sync(tmp_path / "run", uri, "rescued")
    again = sync(tmp_path / "run", uri)
    assert again.state.run_id == done.state.run_id and again.events == 0
    assert steps(uri, done.state.run_id) == list(range(1, 51))
    run = connect(uri).get_run(done.state.run_id)
    assert (run.info.status, run.data.tags["failure.reason"]) == ("FAILED", "boom")
    assert abs(run.info.start_time / 1000 - time.time()) < 600


def test_mlflow_that_comes_back_gets_everything(begin, uri, monkeypatch, caplog):
    from kl_comedy.tracking import logger as module

    monkeypatch.setattr(module.store, "connect", lambda uri: (_ for _ in ()).throw(ConnectionError("down")))
    logger = begin()
    log_steps(logger, 1, 4)
    logger.commit(4)
    assert logger.run_id is None
    monkeypatch.undo()
    logger.finish()
    assert steps(uri, logger.run_id) == [1, 2, 3, 4] and "answers again" in caplog.text


def test_without_mlflow_the_run_is_spooled_and_says_so(begin, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    logger = begin()
    log_steps(logger, 1, 3)
    logger.finish()
    assert "mlflow is not installed" in caplog.text and logger.run_id is None
    assert sum(event.kind == "metrics" for event in Spool(tmp_path / "run").events()) == 3


def test_sync_is_idempotent_even_without_its_state(begin, uri, tmp_path):
    logger = begin()
    log_steps(logger, 1, 5)
    logger.finish()
    (tmp_path / "run/tracking.json").unlink()
    done = sync(tmp_path / "run", uri, "trial")
    assert done.state.run_id == logger.run_id and done.events == 5
    assert steps(uri, logger.run_id) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="already in experiment 'trial'"):
        sync(tmp_path / "run", uri, "other")
    with pytest.raises(UserError, match=r"no spool\.jsonl"):
        sync(tmp_path, uri)


def test_a_moved_run_folder_uploads_its_tables(begin, uri, tmp_path):
    logger = begin(to="none")
    logger.log_table("samples", [{"a": 1}], 1)
    logger.log_artifact(tmp_path / "nowhere.txt")
    logger.finish()
    (tmp_path / "run").rename(tmp_path / "moved")
    done = sync(tmp_path / "moved", uri)
    assert len(done.missing) == 1 and done.missing[0].endswith("nowhere.txt")
    assert [item.path for item in connect(uri).list_artifacts(done.state.run_id, "tables/samples")] == [
        "tables/samples/1.json"
    ]


def test_a_run_deleted_in_mlflow_is_made_anew_on_resume(begin, uri):
    first = begin()
    log_steps(first, 1, 2)
    first.commit(2)
    connect(uri).delete_run(first.run_id)
    second = begin(resume=True, resume_step=2)
    log_steps(second, 3, 3)
    second.finish()
    assert second.run_id != first.run_id and steps(uri, second.run_id) == [1, 2, 3]


def test_dead_runs_of_this_host_are_marked_and_others_left_alone(begin, uri):
    client = connect(uri)
    alive = begin("alive")
    experiment = client.get_experiment_by_name("trial").experiment_id
    tags = {**process.process_tags(), process.PID: "999999999"}
    dead = client.create_run(experiment, tags=tags).info.run_id
    elsewhere = client.create_run(experiment, tags={**tags, process.HOST: "other"}).info.run_id
    assert mark_dead_runs(client, "trial") == [dead]
    found = {run_id: client.get_run(run_id) for run_id in (dead, elsewhere, alive.run_id)}
    assert [run.info.status for run in found.values()] == ["FAILED", "RUNNING", "RUNNING"]
    assert found[dead].data.tags["failure.reason"] == "process died (pid 999999999)"
    assert mark_dead_runs(client, "no such experiment") == []


def test_a_killed_process_is_failed_in_the_next_table_and_running_again_after_resume(begin, uri, tmp_path):
    code = f"""
        import os
        from types import SimpleNamespace
        from kl_comedy.tracking.logger import RunLogger
        config = SimpleNamespace(uri={uri!r}, experiment="trial", flush_every=1, tags={{}})
        logger = RunLogger.start(config, run_dir={str(tmp_path / "run")!r}, run_name="run", params={{}}, tags={{}})
        logger.log_metrics({{"train/reward": 1.0}}, 1)
        logger.commit(1)
        logger.log_metrics({{"train/reward": 2.0}}, 2)
        os.kill(os.getpid(), 9)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -9
    (row,) = runs_frame(uri, mark_dead=True).to_dict("records")
    assert row["status"] == "FAILED" and row["tags.failure.reason"].startswith("process died (pid ")
    logger = begin(resume=True, resume_step=1)
    (row,) = runs_frame(uri, mark_dead=True).to_dict("records")
    assert (row["run_id"], row["status"]) == (logger.run_id, "RUNNING") and "tags.failure.reason" not in row
    log_steps(logger, 2, 3)
    logger.finish()
    assert steps(uri, logger.run_id) == [1, 2, 3]


def test_processes_that_start_together_on_a_fresh_store_all_arrive(tmp_path):
    uri = f"sqlite:///{tmp_path}/new/folder/mlflow.db"
    code = f"""
        import sys
        from types import SimpleNamespace
        from kl_comedy.tracking.logger import RunLogger
        config = SimpleNamespace(uri={uri!r}, experiment="trial", flush_every=1, tags={{}})
        name = sys.argv[1]
        folder = {str(tmp_path)!r} + "/" + name
        logger = RunLogger.start(config, run_dir=folder, run_name=name, params={{"seed": name}}, tags={{}})
        for step in range(5):
            logger.log_metrics({{"x": float(step)}}, step)
            logger.commit(step)
        logger.finish()
    """
    children = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(seed)], stderr=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    said = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [0] * 4 and said == [""] * 4
    frame = runs_frame(uri, "trial")
    assert sorted(frame["params.seed"]) == ["0", "1", "2", "3"] and set(frame["status"]) == {"FINISHED"}
    assert all(steps(uri, run_id, "x") == list(range(5)) for run_id in frame["run_id"])


def test_history_has_one_row_a_step_and_the_last_wins(begin, uri):
    logger = begin()
    logger.log_metrics({"x": 1.0}, 1)
    time.sleep(0.005)
    logger.log_metrics({"x": 2.0}, 1)
    logger.log_metrics({"x": math.inf}, 2)
    logger.finish()
    assert history(uri, [logger.run_id], "x")[["step", "value"]].values.tolist() == [[1.0, 2.0], [2.0, math.inf]]
    assert history(uri, [logger.run_id], "nothing").empty


@pytest.fixture(scope="module")
def filled(tmp_path_factory, empty_store):
    """Two configurations, three seeds each; one run failed."""
    folder = tmp_path_factory.mktemp("filled")
    shutil.copy(empty_store, folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    config = SimpleNamespace(uri=uri, experiment="trial", flush_every=10, tags={})
    for beta in (0.0, 0.1):
        for seed in range(3):
            logger = RunLogger.start(
                config,
                run_dir=folder / f"{beta}-{seed}",
                run_name="r",
                tags={"kl.label": f"k3 β={beta}"},
                params={"name": "demo", "seed": seed, "kl.0.beta": beta},
            )
            for step in range(1, 4):
                logger.log_metrics({"train/reward": beta + step + 0.1 * seed, "eval/pocket/reward": float(seed)}, step)
            logger.finish(*(("FAILED", "lost") if (beta, seed) == (0.1, 2) else ("FINISHED",)))
    return uri


@pytest.fixture
def cli(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["kl-comedy", "results", *map(str, words)])
        monkeypatch.setattr(main, "_quiet_libraries", lambda: None)
        code = 0
        try:
            main.run()
        except SystemExit as end:
            code = end.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_table_means_over_seeds(cli, filled):
    code, out, _ = cli("table", "--uri", filled, "--group", "kl.0.beta", "--metric", "train/reward", "--format", "json")
    assert code == 0
    by_beta = {row["kl.0.beta"]: row for row in json.loads(out)}
    zero, tenth = by_beta["0.0"], by_beta["0.1"]
    assert (zero["n"], zero["mean"], zero["failed"], zero["metric"]) == (3, pytest.approx(3.1), 0, "train/reward")
    assert zero["high"] - zero["mean"] == pytest.approx(4.302652729911275 * 0.1 / math.sqrt(3))
    assert (tenth["n"], tenth["mean"], tenth["runs"], tenth["failed"]) == (2, pytest.approx(3.15), 3, 1)


def test_table_defaults_and_formats(cli, filled):
    code, out, err = cli("table", "--uri", filled)
    assert code == 0 and err == ""
    header, _, *rows = out.splitlines()
    assert header.split() == ["name", "kl.label", "n", "eval/pocket/reward", "train/reward", "runs", "failed"]
    assert len(rows) == 2 and "3.1 [2.852, 3.348]" in out
    for format, mark in (("markdown", "|---"), ("latex", r"\toprule"), ("csv", "name,kl.label,metric,n,mean")):
        assert mark in cli("table", "--uri", filled, "--format", format)[1]
    assert "3.15" in cli("table", "--uri", filled, "--where", "kl.0.beta = 0.1", "--interval", "bootstrap")[1]


def test_table_says_what_it_pools_and_what_it_counts(cli, filled):
    code, out, err = cli("table", "--uri", filled, "--group", "name", "--metric", "*/reward", "--format", "json")
    assert code == 0 and "differ in kl.0.beta" in err and json.loads(out)[0]["n"] == 5
    _, out, _ = cli("table", "--uri", filled, "--group", "name", "--status", "all", "--format", "json")
    assert json.loads(out)[0]["n"] == 6
    _, out, err = cli("table", "--uri", filled, "--status", "running")
    assert "--status all" in err and " - " in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--group", "kl.0.bet"], 2, "did you mean 'kl.0.beta'"),
        (["--metric", "train/rewrd"], 2, "did you mean 'train/reward'"),
        (["--where", "sed = 0"], 2, "did you mean 'seed'"),
        (["--where", "seed > 'a'"], 2, "--where"),
        (["--where", "seed = 9"], 1, "no runs"),
        (["--experiment", "trail"], 2, "did you mean 'trial'"),
        (["--format", "jsn"], 2, "did you mean 'json'"),
        (["--status", "done"], 2, "--status"),
        (["--uri", "sqlite:////nowhere/mlflow.db"], 2, "no results store"),
        (["--uri", "file:///nowhere"], 2, "sqlite:///FILE"),
    ],
)
def test_misuse_is_one_clear_line(cli, filled, words, code, said):
    found, out, err = cli("table", "--uri", filled, *words)
    assert (found, out) == (code, "")
    assert said in err and len(err.strip().splitlines()) == 1


def test_an_empty_store_says_so(cli, uri, tmp_path):
    code, out, err = cli("table", "--uri", uri)
    assert (code, out) == (1, "") and "no runs" in err
    assert cli("table", "--uri", f"sqlite:///{tmp_path}/absent.db")[0] == 2
    assert not (tmp_path / "absent.db").exists()


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("deep/a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_plot_writes_the_picture(cli, filled, tmp_path, name, magic):
    words = ["--metric", "train/reward,eval/*", "--group", "kl.label", "--out", tmp_path / name]
    code, out, err = cli("plot", "--uri", filled, *words)
    assert (code, err) == (0, "") and out.strip() == str(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(magic) and len(content) > 5000


def test_plot_refuses_other_suffixes_and_unknown_metrics(cli, filled, tmp_path):
    assert cli("plot", "--uri", filled, "--metric", "train/reward", "--out", tmp_path / "a.bmp")[0] == 2
    assert cli("plot", "--uri", filled, "--metric", "nope", "--out", tmp_path / "a.png")[0] == 2
    assert not list(tmp_path.iterdir())


def test_export_has_every_run_and_param(cli, filled, tmp_path):
    import pandas as pd

    code, out, _ = cli("export", "--uri", filled, "--format", "json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 6
    assert {row["params.seed"] for row in rows} == {"0", "1", "2"} and {row["status"] for row in rows} == {
        "FINISHED",
        "FAILED",
    }
    for name, read in (("a.csv", pd.read_csv), ("a.parquet", pd.read_parquet), ("a.json", pd.read_json)):
        assert cli("export", "--uri", filled, "--out", tmp_path / name)[0] == 0
        assert sorted(read(tmp_path / name)["metrics.train/reward"]) == pytest.approx([3, 3.1, 3.1, 3.2, 3.2, 3.3])
    assert cli("export", "--uri", filled, "--format", "parquet")[0] == 2
    assert cli("export", "--uri", filled, "--out", tmp_path / "a.xls")[0] == 2


def test_sync_command(cli, begin, uri, tmp_path):
    begin("a", to="none").finish()
    code, out, err = cli("sync", tmp_path / "a", "--uri", uri)
    assert code == 0 and connect(uri).get_run(out.strip()).info.status == "FINISHED" and "uploaded" in err
    assert cli("sync", tmp_path / "nowhere", "--uri", uri)[0] == 2
    begin("b", to="none").finish()
    assert cli("sync", tmp_path / "b")[0] == 2
    code, _, err = cli("sync", tmp_path / "b", "--uri", DEAD_URI)
    assert code == 1 and "the upload failed" in err


@pytest.mark.parametrize("command", ["table", "plot", "export", "sync"])
def test_help_has_an_example_and_loads_nothing_heavy(command):
    code = (
        "import sys; sys.argv = ['kl-comedy', 'results', sys.argv[1], '--help']\n"
        "from kl_comedy.cli.main import run\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'mlflow', 'pandas', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, text=True, check=True)
    assert f"Example: kl-comedy results {command}" in " ".join(done.stdout.split()) and done.stdout.strip().endswith(
        "[]"
    )


def test_table_does_not_load_torch(filled):
    code = (
        "import sys\nfrom kl_comedy.cli.main import run\n"
        "try: run()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, "results", "table", "--uri", filled]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False") and "kl.label" in done.stdout
