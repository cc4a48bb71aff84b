"""A sweep on this machine, by the commands a user types: one cell fails, and only that one runs again."""

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from commands import WAITS, Command, assert_resumed, waits
from fake_slurm import plan_sweep
from kl_comedy.cli.sweep_job import write_html_reports
from kl_comedy.config import load_config
from kl_comedy.slurm import local as local_runs
from kl_comedy.slurm.manifest import Manifest, Sweep, read_sweep
from kl_comedy.slurm.status import read_status
from kl_comedy.slurm.submit import Work
from kl_comedy.training.run import train

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
PROBLEMS = "".join(json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n), "id": n}) + "\n" for n in range(1, 5))
GRID = """
base: base.yaml
overrides: {train.steps: 2, train.threads: 1, train.eval_every: 0, "tracking.uri": "sqlite:///store.db"}
grid:
  data.train:
    pocket: {dataset: pocket, split: train, limit: 64}
    late: {dataset: jsonl, path: late.jsonl, split: null, fields: {text: question}}
evaluate: {eval.samples: 2, eval.suites: [sums.yaml]}
"""
SUITE = """
file: {path: sums.jsonl}
prompt: {suffix: ""}
reward: {name: exact_answer}
answer: number
max_new_tokens: 24
"""
SUMS = "".join(json.dumps({"problem": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(1, 6))


def sweep_command(*arguments, cwd, env=None):
    """A sweep's manager, and its cells, in forked processes."""
    return Command(*arguments, cwd=cwd, env=env, modules=["forked_servers"])


def run(*arguments, cwd, code=0):
    process = sweep_command(*arguments, cwd=cwd)
    assert process.wait() == code, process.output
    assert "Traceback" not in process.output, process.output
    return process.output


def states(folder, name="grid"):
    return {row.name: row for row in read_status(read_sweep(folder / "sweeps" / name)).rows}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The folder of a sweep that was run twice, the first time without the data of its cell ``late``.

    ``first`` and ``second`` hold what each time printed and the rows of the cells afterwards.
    """
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(TINY.read_text().replace(", options: {digits: 1}", "", 1))
    (folder / "grid.yaml").write_text(GRID)
    (folder / "sums.yaml").write_text(SUITE)
    (folder / "sums.jsonl").write_text(SUMS)
    output = run("sweep", "grid.yaml", "--local", 2, cwd=folder, code=1)
    first = SimpleNamespace(output=output, rows=states(folder))
    assert "late" in (folder / "sweeps/grid/report/report.md").read_text()
    (folder / "late.jsonl").write_text(PROBLEMS)
    output = run("resubmit", "grid", cwd=folder)
    second = SimpleNamespace(output=output, rows=states(folder))
    return SimpleNamespace(folder=folder, first=first, second=second)


def test_a_cell_without_its_data_fails_and_the_other_finishes(sweep):
    first = sweep.first
    assert {name: row.state for name, row in first.rows.items()} == {"pocket": "FINISHED", "late": "FAILED"}
    assert "late.jsonl" in first.rows["late"].why
    assert "late.jsonl" in first.output
    assert "resubmit" in first.output
    assert first.rows["pocket"].evaluated
    assert not first.rows["late"].evaluated


def test_only_the_cell_that_failed_runs_again(sweep):
    second = sweep.second
    assert "train cell 1 late seed 0: done" in second.output
    assert "cell 0" not in second.output
    assert {name: row.attempts for name, row in second.rows.items()} == {"pocket": 1, "late": 2}
    for row in second.rows.values():
        assert row.state == "FINISHED"
        assert row.evaluated
        assert row.step == 2
        assert row.reward is not None


def test_nothing_is_left_to_submit(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep.folder)
    assert "nothing to submit: 2 finished" in kl_comedy("resubmit", "grid")[2]
    assert "nothing to submit: 2 finished" in kl_comedy("sweep", "grid.yaml", "--local", 2)[2]
    code, out, _ = kl_comedy("status", "grid", "--format", "json")
    assert code == 0
    assert [row["state"] for row in json.loads(out)] == ["FINISHED", "FINISHED"]
    assert "2 finished" in kl_comedy("status", "grid")[1]


def test_cells_that_are_finished_in_an_export_are_left_out(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep.folder)
    export = ("results", "export", "--uri", "sqlite:///store.db")
    assert kl_comedy(*export, "--out", "all.parquet")[0] == 0
    assert kl_comedy(*export, "--where", "data.train.dataset = 'jsonl'", "--out", "late.parquet")[0] == 0

    elsewhere = ("sweep", "grid.yaml", "--local", 1, "--output", "elsewhere", "--finished-in")
    code, _, errors = kl_comedy(*elsewhere, "all.parquet")
    assert code == 0
    assert "2 of 2 cells are finished in all.parquet" in errors
    assert "nothing to submit" in errors

    cells_to_train = []
    # Which cells would be trained, without the training.
    monkeypatch.setattr(local_runs, "run_local", lambda sweep, work, *_: cells_to_train.extend(work.train))
    assert "1 of 2 cells are finished in late.parquet" in kl_comedy(*elsewhere, "late.parquet", "--dry-run")[2]
    assert kl_comedy(*elsewhere, "lost.parquet", "--dry-run")[0] == 2
    assert not cells_to_train, "a dry run trains nothing"
    code, _, errors = kl_comedy(*elsewhere, "late.parquet")
    assert cells_to_train == [0]
    assert "1 of 2 cells are finished in late.parquet" in errors
    # The replaced run_local trained nothing, so that cell 0 is reported as missing.
    assert code == 1
    assert "1 of 2 cells did not finish" in errors


def test_the_report_has_every_cell(sweep):
    report = sweep.folder / "sweeps/grid/report"
    page = (report / "report.html").read_text()
    assert "Sweep grid" in page
    assert "k1_reverse_token in reward" in page
    assert "evaluate/sums/accuracy" in (report / "report.md").read_text()
    for row in json.loads((report / "cells.json").read_text()):
        assert "evaluate/heldout/reward" in row
        accuracy = row["evaluate/sums/accuracy"]
        pass_at_2 = row["evaluate/sums/pass@2"]
        assert accuracy >= 0
        assert accuracy <= pass_at_2
        assert pass_at_2 <= 1


def test_a_suites_items_are_beside_the_cells_evaluation(sweep):
    cell = sweep.second.rows["pocket"].cell
    evaluations = sweep.folder / f"sweeps/grid/cells/{cell:04d}/evaluation"
    (suite,) = json.loads(evaluations.with_suffix(".json").read_text())[1:]
    assert suite["suite"] == "sums"
    assert suite["problems"] == 5
    assert suite["samples"] == 2
    items = Path(suite["records"]) / "items.jsonl"
    assert len(items.read_text().splitlines()) == 5 * 2
    assert items.is_relative_to(evaluations)


def test_the_store_has_the_runs_and_evaluations_of_every_cell(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep.folder)
    export = ("results", "export", "--uri", "sqlite:///store.db", "--format", "json")
    runs = json.loads(kl_comedy(*export)[1])
    assert {row["tags.sweep"] for row in runs} == {"grid"}
    assert {row["tags.cell"] for row in runs} >= {"0", "1"}
    evaluations = json.loads(kl_comedy(*export, "--experiment", "kl_comedy-evaluations")[1])
    assert {row["tags.suite"] for row in evaluations} == {"sums"}
    assert len(evaluations) == 2


def test_another_grid_of_the_same_name_is_refused(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep.folder)
    Path("other").mkdir()
    Path("other/grid.yaml").write_text(f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.2, 0.3]}}\n")
    code, _, errors = kl_comedy("sweep", "other/grid.yaml", "--local", 1)
    assert code == 2
    assert "holds another sweep" in errors
    assert "2 cells there, 3 planned now" in " ".join(errors.split())


@pytest.mark.parametrize(
    ("suite", "message"), [("gsm8", "did you mean 'gsm8k'"), ("other.yaml", "an existing YAML file")]
)
def test_a_suite_that_does_not_exist_is_refused(sweep, kl_comedy, monkeypatch, suite, message):
    monkeypatch.chdir(sweep.folder)
    Path("wrong.yaml").write_text(GRID.replace("sums.yaml", suite))
    code, _, errors = kl_comedy("sweep", "wrong.yaml", "--local", 1, "--dry-run")
    assert code == 2
    assert "evaluate: eval.suites: got" in errors
    assert message in " ".join(errors.split())
    assert not Path("sweeps/wrong").exists()


def html_reports(folder, store):
    """The HTML reports of a sweep without cells whose runs are in ``store``."""
    fields = {"name": "bare", "directory": str(folder), "package_version": ""}
    manifest = Manifest(**fields, plugins=(), evaluate=None, max_parallel=None, stores=(store,), cells=())
    return list(write_html_reports(Sweep(path=folder, manifest=manifest)))


def test_a_sweep_without_a_store_has_its_report_and_no_page(tmp_path, capsys):
    assert html_reports(tmp_path, ("none", "x")) == []
    assert capsys.readouterr().err == ""


def test_a_sweep_whose_store_is_gone_has_no_page_and_says_so(tmp_path, capsys):
    assert html_reports(tmp_path, ("sqlite:///gone.db", "x")) == []
    assert "no report.html: --uri: no results store at" in capsys.readouterr().err


class FakeWorker:
    """A worker that ends at the second look at it, with the next code of its cell (default: 0)."""

    codes: dict[str, list[int]]
    running: list["FakeWorker"]
    most = 0
    started: list[tuple[str, str, str]]

    def __init__(self, command, *, log, env, cwd):
        self.pid = 1
        self.looks = 0
        self.cell = command[-1]
        words = [word for word in command[3:] if not word.startswith("/") and not word.isdigit()]
        FakeWorker.started.append((" ".join(words), self.cell, env["OMP_NUM_THREADS"]))
        FakeWorker.running.append(self)
        FakeWorker.most = max(FakeWorker.most, len(FakeWorker.running))

    @property
    def alive(self):
        self.looks += 1
        return self.looks < 2

    def wait(self, timeout_s):
        return True

    def kill(self):
        FakeWorker.running.remove(self)
        return FakeWorker.codes.get(self.cell, [0]).pop(0)


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setattr(FakeWorker, "codes", {}, raising=False)
    monkeypatch.setattr(FakeWorker, "running", [], raising=False)
    monkeypatch.setattr(FakeWorker, "started", [], raising=False)
    monkeypatch.setattr(FakeWorker, "most", 0)
    monkeypatch.setattr(local_runs, "ChildProcess", FakeWorker)
    monkeypatch.setattr(local_runs, "POLL_S", 0.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return FakeWorker


@pytest.mark.parametrize(
    ("asked", "limit", "most"), [(3, "", 3), (3, "max_parallel: 2\n", 2), (2, "max_parallel: 3\n", 2)]
)
def test_the_smaller_of_max_parallel_and_the_workers_bounds_the_cells(tmp_path, workers, asked, limit, most):
    """A cell of two processes counts once; the cores are shared by processes."""
    sweep = plan_sweep(tmp_path, f"overrides: {{train.strategy: ddp, train.devices: 2}}\nseeds: 6\n{limit}")
    lines = []
    local_runs.run_local(sweep, Work(train=(0, 1, 2, 3, 4, 5), evaluate=()), asked, lines.append)
    assert workers.most == most
    assert {threads for command, _, threads in workers.started if command == "cell"} == {str(8 // (2 * most))}
    assert ("2 cells at a time, by the grid's max_parallel" in lines) == (asked > most)
    assert len(workers.started) == 6 + 1, "the cells and the report"


def test_cells_start_by_seed_and_resume_behind_those_that_have_not_started(tmp_path, workers):
    sweep = plan_sweep(tmp_path, "grid: {optimizer.lr: [0.1, 0.2]}\nseeds: 2\nevaluate: {}\n")
    workers.codes = {"0": [75, 0, 0], "3": [1], "1": [-10, 0, 0]}
    lines = []
    local_runs.run_local(sweep, Work(train=(0, 1, 2, 3), evaluate=()), 1, lines.append)
    trained = [cell for command, cell, _ in workers.started if command == "cell"]
    evaluated = [cell for command, cell, _ in workers.started if command == "cell --evaluate"]
    # Cells 0 and 2 have seed 0. Cell 3 fails, and is not evaluated.
    assert trained == ["0", "2", "1", "3", "0", "1"]
    assert evaluated == ["0", "2", "1"]
    assert "train cell 3 lr0.2 seed 1: failed: exit code 1" in lines
    assert "train cell 0 lr0.1 seed 0: stopped, resumes later" in lines


def wait_for(what, seconds=180):
    """Call ``what`` until its result is true, and return that."""
    deadline = time.monotonic() + seconds
    result = what()
    while not result:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        result = what()
    return result


LONG = "{train.steps: 4000, train.checkpoint_every: 1000, train.eval_every: 0}"


def first_pid(journal):
    """The process of a cell's first attempt, once its journal has a whole line."""
    wait_for(lambda: journal.exists() and journal.read_text().endswith("\n"))
    first_line = journal.read_text().splitlines()[0]
    return int(json.loads(first_line)["process"]["process.pid"])


def test_cancel_saves_a_running_cell(tmp_path, kl_comedy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("long.yaml").write_text(f"base: {TINY}\noverrides: {LONG}\nseeds: 2\n")
    process = sweep_command("sweep", "long.yaml", "--local", 1, cwd=tmp_path)
    wait_for(Path("sweeps/long/manifest.json").exists)
    sweep = read_sweep(Path("long"))
    # One cell at a time: the second still waits when the first trains.
    wait_for(lambda: read_status(sweep).rows[0].step > 1)
    assert "1 running, 1 pending" in kl_comedy("status", "long")[1]
    assert "nothing to submit" in kl_comedy("resubmit", "long")[2]
    assert kl_comedy("cancel", "long")[0] == 0
    assert process.wait() == 1, process.output
    assert "stopped; resume with" in process.output
    rows = read_status(sweep).rows
    assert [row.state for row in rows] == ["STOPPED", "PLANNED"]
    assert rows[1].why == "its local manager ended before it began"
    assert "stopped by SIGTERM at update" in rows[0].why
    saved = max(Path(rows[0].run).glob("checkpoints/step-*.ckpt"))
    assert int(saved.stem.removeprefix("step-")) == rows[0].step
    assert "nothing to cancel" in kl_comedy("cancel", "long")[2]


@pytest.mark.slow
def test_a_worker_killed_outright_is_reported_as_dead(tmp_path):
    (tmp_path / "dies.yaml").write_text(f"base: {TINY}\noverrides: {LONG}\n")
    process = sweep_command("sweep", "dies.yaml", "--local", 1, cwd=tmp_path)
    os.kill(first_pid(tmp_path / "sweeps/dies/cells/0000/attempts.jsonl"), signal.SIGKILL)
    assert process.wait() == 1, process.output
    assert "killed by SIGKILL" in process.output
    (row,) = states(tmp_path, "dies").values()
    assert row.state == "FAILED"
    assert row.why == "killed by SIGKILL"


@pytest.mark.slow
def test_a_preempted_cell_saves_resumes_and_ends_with_the_same_bits(tmp_path):
    """Without any periodic checkpoint: it resumes from what the signal made it save."""
    settings = "{train.steps: 20, train.checkpoint_every: 0, train.eval_every: 0, train.threads: 1}"
    (tmp_path / "grid.yaml").write_text(f"base: {TINY}\noverrides: {settings}\n")
    environment = waits(5, tmp_path / "go_on")
    process = sweep_command("sweep", "grid.yaml", "--local", "1", *WAITS, cwd=tmp_path, env=environment)

    def spools_with_metrics():
        spools = tmp_path.glob("sweeps/grid/cells/*/run/spool.jsonl")
        return [spool for spool in spools if "kl/k1" in spool.read_text()]

    spools = wait_for(spools_with_metrics)
    journal = tmp_path / "sweeps/grid/cells/0000/attempts.jsonl"
    os.kill(first_pid(journal), signal.SIGUSR1)
    wait_for(lambda: '"code"' in journal.read_text())
    (tmp_path / "go_on").touch()
    process.finish()
    assert len(spools) == 1
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [event["code"] for event in events if "code" in event] == [75, 0], "saved and requeued, then finished"
    assert_resumed(tmp_path / "sweeps/grid/cells/0000")
    sweep = read_sweep(tmp_path / "sweeps/grid")
    config = load_config(sweep.config(0), [f"output={tmp_path / 'alone'}"])
    alone = train(config, console=Console(quiet=True), command="alone").run.path
    ours = sweep.run(0) / "policy/model.safetensors"
    assert ours.read_bytes() == (alone / "policy/model.safetensors").read_bytes()
