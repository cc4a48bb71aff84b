"""A sweep on this machine, by the commands a user types: one cell fails, and only that one runs again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from commands import WAITS, Command, assert_resumed, waits
from kl_comedy.cli.sweep_job import write_html_reports
from kl_comedy.config import load_config
from kl_comedy.slurm import local as local_runs
from kl_comedy.slurm.manifest import Manifest, Sweep, read_sweep
from kl_comedy.slurm.status import read_status
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


def sweep_command(*arguments, cwd):
    """A sweep's manager, and its cells, in forked processes."""
    return Command(*arguments, cwd=cwd, modules=["forked_servers"])


def run(*arguments, cwd, code=0):
    process = sweep_command(*arguments, cwd=cwd)
    assert process.wait() == code and "Traceback" not in process.output, process.output
    return process.output


def states(folder, name="grid"):
    return {row.name: row for row in read_status(read_sweep(folder / "sweeps" / name)).rows}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Run twice, the first time without the data of one cell: the folder, and messages and states of both times."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(TINY.read_text().replace(", options: {digits: 1}", "", 1))
    for name, text in (("grid.yaml", GRID), ("sums.yaml", SUITE), ("sums.jsonl", SUMS)):
        (folder / name).write_text(text)
    first = run("sweep", "grid.yaml", "--local", 2, cwd=folder, code=1), states(folder)
    assert "late" in (folder / "sweeps/grid/report/report.md").read_text()
    (folder / "late.jsonl").write_text(PROBLEMS)
    return folder, first, (run("resubmit", "grid", cwd=folder), states(folder))


def test_only_the_cell_that_failed_runs_again(sweep, kl_comedy, monkeypatch):
    folder, (first_errors, before), (second_errors, after) = sweep
    monkeypatch.chdir(folder)
    assert {name: row.state for name, row in before.items()} == {"pocket": "FINISHED", "late": "FAILED"}
    assert "late.jsonl" in before["late"].why and "late.jsonl" in first_errors and "resubmit" in first_errors
    assert before["pocket"].evaluated and not before["late"].evaluated
    assert "train cell 1 late seed 0: done" in second_errors and "cell 0" not in second_errors
    assert {row.state for row in after.values()} == {"FINISHED"} and all(row.evaluated for row in after.values())
    assert {name: row.attempts for name, row in after.items()} == {"pocket": 1, "late": 2}
    assert all(row.step == 2 and row.reward is not None for row in after.values())
    for words in (("resubmit", "grid"), ("sweep", "grid.yaml", "--local", 2)):
        assert "nothing to submit: 2 finished" in kl_comedy(*words)[2]
    code, out, _ = kl_comedy("status", "grid", "--format", "json")
    assert code == 0 and [row["state"] for row in json.loads(out)] == ["FINISHED", "FINISHED"]
    assert "2 finished" in kl_comedy("status", "grid")[1]


def test_cells_that_are_finished_in_an_export_are_left_out(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep[0])
    again = ("sweep", "grid.yaml", "--local", 1, "--output", "elsewhere", "--finished-in")
    assert kl_comedy("results", "export", "--uri", "sqlite:///store.db", "--out", "all.parquet")[0] == 0
    code, _, errors = kl_comedy(*again, "all.parquet")
    assert code == 0 and "2 of 2 cells are finished in all.parquet" in errors and "nothing to submit" in errors
    late = ("--where", "data.train.dataset = 'jsonl'", "--out", "late.parquet")
    assert kl_comedy("results", "export", "--uri", "sqlite:///store.db", *late)[0] == 0
    monkeypatch.setattr(local_runs, "run_local", lambda sweep, work, *_: trained.extend(work.train))
    trained = []
    assert "1 of 2 cells are finished in late.parquet" in kl_comedy(*again, "late.parquet", "--dry-run")[2]
    assert kl_comedy(*again, "lost.parquet", "--dry-run")[0] == 2
    assert not trained
    code, _, errors = kl_comedy(*again, "late.parquet")
    assert trained == [0] and "1 of 2 cells are finished in late.parquet" in errors
    assert code == 1 and "1 of 2 cells did not finish" in errors  # it was not run here


def test_report_evaluations_and_store_have_every_cell(sweep, kl_comedy, monkeypatch):
    folder, _, (_, rows) = sweep
    monkeypatch.chdir(folder)
    page = (folder / "sweeps/grid/report/report.html").read_text()
    assert "Sweep grid" in page and "k1_reverse_token in reward" in page
    cells = json.loads((folder / "sweeps/grid/report/cells.json").read_text())
    assert all("evaluate/heldout/reward" in row for row in cells)
    assert all(0 <= row["evaluate/sums/accuracy"] <= row["evaluate/sums/pass@2"] <= 1 for row in cells)
    assert "evaluate/sums/accuracy" in (folder / "sweeps/grid/report/report.md").read_text()

    evaluations = folder / f"sweeps/grid/evaluations/{rows['pocket'].cell:05d}"
    (suite,) = json.loads(evaluations.with_suffix(".json").read_text())[1:]
    assert suite["suite"] == "sums" and suite["problems"] == 5 and suite["samples"] == 2
    items = Path(suite["records"]) / "items.jsonl"
    assert len(items.read_text().splitlines()) == 5 * 2 and items.is_relative_to(evaluations)

    export = ("results", "export", "--uri", "sqlite:///store.db", "--format", "json")
    runs = json.loads(kl_comedy(*export)[1])
    assert {row["tags.sweep"] for row in runs} == {"grid"} and {row["tags.cell"] for row in runs} >= {"0", "1"}
    evaluated = json.loads(kl_comedy(*export, "--experiment", "kl_comedy-evaluations")[1])
    assert {row["tags.suite"] for row in evaluated} == {"sums"} and len(evaluated) == 2


def test_mistakes_beside_a_finished_sweep(sweep, kl_comedy, monkeypatch):
    monkeypatch.chdir(sweep[0])
    Path("other").mkdir()
    Path("other/grid.yaml").write_text(f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.2, 0.3]}}\n")
    code, _, errors = kl_comedy("sweep", "other/grid.yaml", "--local", 1)
    assert code == 2 and "holds another sweep" in errors and "2 cells there, 3 planned now" in " ".join(errors.split())
    for name, message in (("gsm8", "did you mean 'gsm8k'"), ("other.yaml", "an existing YAML file")):
        Path("wrong.yaml").write_text(GRID.replace("sums.yaml", name))
        code, _, errors = kl_comedy("sweep", "wrong.yaml", "--local", 1, "--dry-run")
        assert code == 2 and "evaluate: eval.suites: got" in errors and message in " ".join(errors.split())
    assert not Path("sweeps/wrong").exists()


def test_a_sweep_without_a_store_has_its_report_and_no_page(tmp_path, capsys):
    def pages(*stores):
        fields = {"name": "bare", "directory": str(tmp_path), "base": "", "base_sha256": "", "package_version": ""}
        manifest = Manifest(**fields, plugins=(), evaluate=None, max_parallel=None, stores=stores, cells=())
        return list(write_html_reports(Sweep(path=tmp_path, manifest=manifest)))

    assert pages(("none", "x")) == [] and capsys.readouterr().err == ""
    assert pages(("sqlite:///gone.db", "x")) == []
    assert "no report.html: --uri: no results store at" in capsys.readouterr().err


def wait_for(what, seconds=180):
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return result


LONG = "{train.steps: 4000, train.checkpoint_every: 1000, train.eval_every: 0}"


def first_pid(cell):
    """The process of a cell's first attempt."""
    wait_for(lambda: cell.exists() and cell.read_text().endswith("\n"))
    return int(json.loads(cell.read_text().splitlines()[0])["process"]["process.pid"])


def test_cancel_saves_a_running_cell(tmp_path, kl_comedy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("long.yaml").write_text(f"base: {TINY}\noverrides: {LONG}\nseeds: 2\n")
    process = sweep_command("sweep", "long.yaml", "--local", 1, cwd=tmp_path)
    wait_for(Path("sweeps/long/manifest.json").exists)
    sweep = read_sweep(Path("long"))
    wait_for(lambda: read_status(sweep).rows[0].step > 1)
    assert "1 running, 1 pending" in kl_comedy("status", "long")[1]
    assert "nothing to submit" in kl_comedy("resubmit", "long")[2]
    assert kl_comedy("cancel", "long")[0] == 0
    assert process.wait() == 1 and "stopped; resume with" in process.output
    rows = read_status(sweep).rows
    assert [row.state for row in rows] == ["CANCELLED", "CANCELLED"]
    assert "stopped by SIGTERM at update" in rows[0].why
    saved = list(Path(rows[0].run).glob("checkpoints/step-*.ckpt"))
    assert int(saved[-1].stem.split("-")[1]) == rows[0].step
    assert "nothing to cancel" in kl_comedy("cancel", "long")[2]


@pytest.mark.slow
def test_a_worker_killed_outright_is_reported_as_dead(tmp_path):
    (tmp_path / "dies.yaml").write_text(f"base: {TINY}\noverrides: {LONG}\n")
    process = sweep_command("sweep", "dies.yaml", "--local", 1, cwd=tmp_path)
    os.kill(first_pid(tmp_path / "sweeps/dies/cells/00000.jsonl"), signal.SIGKILL)
    assert process.wait() == 1 and "killed by SIGKILL" in process.output
    (row,) = states(tmp_path, "dies").values()
    assert (row.state, row.why) == ("DIED", "killed by SIGKILL")


@pytest.mark.slow
def test_a_preempted_cell_saves_resumes_and_ends_with_the_same_bits(tmp_path):
    """Without any periodic checkpoint: it resumes from what the signal made it save."""
    settings = "{train.steps: 20, train.checkpoint_every: 0, train.eval_every: 0, train.threads: 1}"
    (tmp_path / "grid.yaml").write_text(f"base: {TINY}\noverrides: {settings}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "kl_comedy.cli", "sweep", "grid.yaml", "--local", "1", *WAITS],
        cwd=tmp_path,
        env={**os.environ, **waits(5, tmp_path / "go_on")},
    )
    spools = wait_for(
        lambda: [path for path in tmp_path.glob("sweeps/grid/runs/*/spool.jsonl") if "kl/k1" in path.read_text()]
    )
    cell = tmp_path / "sweeps/grid/cells/00000.jsonl"
    os.kill(first_pid(cell), signal.SIGUSR1)
    wait_for(lambda: '"code"' in cell.read_text())
    (tmp_path / "go_on").touch()
    assert process.wait(timeout=180) == 0 and len(spools) == 1
    codes = [json.loads(line).get("code") for line in cell.read_text().splitlines() if "code" in line]
    assert codes == [75, 0]
    assert_resumed(tmp_path / "sweeps/grid/runs")
    sweep = read_sweep(tmp_path / "sweeps/grid")
    config = load_config(sweep.base, [*sweep.overrides(sweep.cell(0)), f"output={tmp_path / 'alone'}"])
    alone = train(config, console=Console(quiet=True), command="alone").run.path
    (ours,) = sweep.runs.glob("*/policy/model.safetensors")
    assert ours.read_bytes() == (alone / "policy/model.safetensors").read_bytes()
