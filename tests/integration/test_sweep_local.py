"""A sweep on this machine, by the commands a user types: four cells, one that fails, and only that one run again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = Path(__file__).with_name("tiny.yaml")
PROBLEMS = "".join(json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n), "id": n}) + "\n" for n in range(1, 5))
GRID = """
base: base.yaml
overrides: {train.steps: 3, train.threads: 1, train.eval_every: 0, "tracking.uri": "sqlite:///store.db"}
grid:
  kl.0.estimator: [k1, k3]
  data.train:
    pocket: {dataset: pocket, split: train, limit: 64}
    late: {dataset: jsonl, path: late.jsonl, split: null, fields: {text: question}}
exclude: [{kl.0.estimator: k3, data.train: late}]
rows:
  no-kl: {kl: none}
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


def kl_comedy(*arguments, cwd, code=0):
    command = [sys.executable, "-m", "kl_comedy.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def states(folder, name="grid"):
    rows = json.loads(kl_comedy("status", name, "--format", "json", cwd=folder).stdout)
    return {row["name"]: row for row in rows}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Run once, with one cell whose data is not there yet."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "base.yaml").write_text(TINY.read_text().replace(", options: {digits: 1}", "", 1))
    (folder / "grid.yaml").write_text(GRID)
    (folder / "sums.yaml").write_text(SUITE)
    (folder / "sums.jsonl").write_text(SUMS)
    said = kl_comedy("sweep", "grid.yaml", "--local", 2, cwd=folder, code=1).stderr
    return folder, said, states(folder)


def test_cells_finish_and_the_one_without_data_fails_with_its_reason(swept):
    folder, said, rows = swept
    assert {name: row["state"] for name, row in rows.items()} == {
        "k1-pocket": "FINISHED",
        "k1-late": "FAILED",
        "k3-pocket": "FINISHED",
        "no-kl": "FINISHED",
    }
    assert "late.jsonl" in rows["k1-late"]["why"] and "late.jsonl" in said and "resubmit" in said
    assert all(row["step"] == 3 and row["reward"] is not None for name, row in rows.items() if name != "k1-late")
    assert rows["k1-pocket"]["evaluated"] and not rows["k1-late"]["evaluated"]
    assert "k1-late" in (folder / "sweeps/grid/report/report.md").read_text()
    page = (folder / "sweeps/grid/report/report.html").read_text()
    assert "Sweep grid" in page and "k1_reverse_token in reward" in page


def test_a_sweep_without_a_store_has_its_report_and_no_page(tmp_path, capsys):
    from kl_comedy.cli.sweep_job import write_html_reports
    from kl_comedy.slurm.manifest import Manifest, Sweep

    def of(*stores):
        return Sweep(
            path=tmp_path,
            manifest=Manifest(
                name="bare",
                directory=str(tmp_path),
                base="",
                base_sha256="",
                plugins=(),
                evaluate=None,
                max_parallel=None,
                stores=stores,
                package_version="",
                cells=(),
            ),
        )

    assert list(write_html_reports(of(("none", "x")))) == [] and capsys.readouterr().err == ""
    assert list(write_html_reports(of(("sqlite:///gone.db", "x")))) == []
    assert "no report.html: --uri: no results store at" in capsys.readouterr().err


def test_resubmit_runs_only_what_failed_and_then_nothing(swept):
    folder, _, before = swept
    (folder / "late.jsonl").write_text(PROBLEMS)
    kl_comedy("resubmit", "grid", cwd=folder)
    after = states(folder)
    assert {row["state"] for row in after.values()} == {"FINISHED"}
    assert {name: row["attempts"] - before[name]["attempts"] for name, row in after.items()} == {
        "k1-pocket": 0,
        "k1-late": 1,
        "k3-pocket": 0,
        "no-kl": 0,
    }
    assert all(row["evaluated"] for row in after.values())
    assert "nothing to submit" in kl_comedy("resubmit", "grid", cwd=folder).stderr
    assert "nothing to submit" in kl_comedy("sweep", "grid.yaml", "--local", 2, cwd=folder).stderr
    rows = json.loads((folder / "sweeps/grid/report/cells.json").read_text())
    assert all("evaluate/heldout/reward" in row for row in rows)
    assert all(0 <= row["evaluate/sums/accuracy"] <= row["evaluate/sums/pass@2"] <= 1 for row in rows)
    assert "evaluate/sums/accuracy" in (folder / "sweeps/grid/report/report.md").read_text()


def test_the_evaluation_job_keeps_the_samples_of_its_suites(swept):
    folder, _, rows = swept
    cell = rows["k1-pocket"]["cell"]
    (kept,) = json.loads((folder / f"sweeps/grid/evaluations/{cell:05d}.json").read_text())[1:]
    assert kept["suite"] == "sums" and kept["problems"] == 5 and kept["samples"] == 2
    lines = (Path(kept["records"]) / "items.jsonl").read_text().splitlines()
    assert len(lines) == 5 * 2 and Path(kept["records"]).is_relative_to(folder / f"sweeps/grid/evaluations/{cell:05d}")
    found = json.loads(
        kl_comedy(
            "results",
            "export",
            "--uri",
            "sqlite:///store.db",
            "--experiment",
            "kl_comedy-evaluations",
            "--format",
            "json",
            cwd=folder,
        ).stdout
    )
    assert {row["tags.suite"] for row in found} == {"sums"} and len(found) >= 3


def test_every_run_is_in_the_one_store_under_the_sweeps_name(swept):
    folder, _, _ = swept
    rows = json.loads(
        kl_comedy("results", "export", "--uri", "sqlite:///store.db", "--format", "json", cwd=folder).stdout
    )
    assert {row["tags.sweep"] for row in rows} == {"grid"}
    assert {row["tags.cell"] for row in rows} >= {"0", "2", "3"}


def test_another_grid_of_the_same_name_is_refused(swept):
    folder, _, _ = swept
    (folder / "other").mkdir()
    (folder / "other/grid.yaml").write_text(f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.2]}}\n")
    said = kl_comedy("sweep", "other/grid.yaml", "--local", 1, cwd=folder, code=2).stderr
    assert "holds another sweep" in said and "4 cells there, 2 planned now" in said


def test_a_suite_that_is_not_there_is_told_before_anything_is_submitted(swept):
    folder, _, _ = swept
    for name, said in (("gsm8", "did you mean 'gsm8k'"), ("other.yaml", "an existing YAML file")):
        (folder / "wrong.yaml").write_text(GRID.replace("sums.yaml", name))
        told = kl_comedy("sweep", "wrong.yaml", "--local", 1, "--dry-run", cwd=folder, code=2).stderr
        assert "evaluate: eval.suites: got" in told and said in told
    assert not (folder / "sweeps/wrong").exists()


def wait_for(what, seconds=180):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_cancel_saves_a_running_cell_and_resubmit_goes_on_from_there(tmp_path):
    (tmp_path / "long.yaml").write_text(
        f"base: {TINY}\noverrides: {{train.steps: 4000, train.checkpoint_every: 1000, train.eval_every: 0}}\nseeds: 2\n"
    )
    command = [sys.executable, "-m", "kl_comedy.cli", "sweep", "long.yaml", "--local", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for((tmp_path / "sweeps/long/manifest.json").exists)
    wait_for(
        lambda: (
            (found := json.loads(kl_comedy("status", "long", "--format", "json", cwd=tmp_path).stdout))
            and found[0]["step"] > 1
        )
    )
    running = kl_comedy("status", "long", cwd=tmp_path).stdout
    assert "1 running, 1 pending" in running
    assert "nothing to submit" in kl_comedy("resubmit", "long", cwd=tmp_path).stderr
    kl_comedy("cancel", "long", cwd=tmp_path)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "stopped; resume with" in said
    rows = json.loads(kl_comedy("status", "long", "--format", "json", cwd=tmp_path).stdout)
    assert [row["state"] for row in rows] == ["CANCELLED", "CANCELLED"]
    assert "stopped by SIGTERM at update" in rows[0]["why"]
    saved = list(Path(rows[0]["run"]).glob("checkpoints/step-*.ckpt"))
    assert int(saved[-1].stem.split("-")[1]) == rows[0]["step"]
    assert "nothing to cancel" in kl_comedy("cancel", "long", cwd=tmp_path).stderr


@pytest.mark.slow
def test_a_worker_killed_outright_is_seen_as_dead(tmp_path):
    (tmp_path / "dies.yaml").write_text(
        f"base: {TINY}\noverrides: {{train.steps: 4000, train.checkpoint_every: 0, train.eval_every: 0}}\n"
    )
    command = [sys.executable, "-m", "kl_comedy.cli", "sweep", "dies.yaml", "--local", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    cell = tmp_path / "sweeps/dies/cells/00000.jsonl"
    wait_for(cell.exists)
    wait_for(lambda: cell.read_text().endswith("\n"))
    os.kill(int(json.loads(cell.read_text().splitlines()[0])["process"]["process.pid"]), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "killed by SIGKILL" in said
    (row,) = states(tmp_path, "dies").values()
    assert (row["state"], row["why"]) == ("DIED", "killed by SIGKILL")


@pytest.mark.slow
def test_a_cell_asked_to_make_room_saves_goes_on_and_ends_with_the_same_bits(tmp_path):
    """Without any periodic checkpoint: what it goes on from is what the signal made it save."""
    (tmp_path / "grid.yaml").write_text(
        f"base: {TINY}\noverrides: {{train.steps: 120, train.checkpoint_every: 0, train.eval_every: 0, "
        "train.threads: 1}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kl_comedy.cli", "sweep", "grid.yaml", "--local", "1"], cwd=tmp_path
    )
    spools = wait_for(
        lambda: [path for path in tmp_path.glob("sweeps/grid/runs/*/spool.jsonl") if "kl/k1" in path.read_text()]
    )
    cell = tmp_path / "sweeps/grid/cells/00000.jsonl"
    os.kill(int(json.loads(cell.read_text().splitlines()[0])["process"]["process.pid"]), signal.SIGUSR1)
    assert process.wait(timeout=180) == 0 and len(spools) == 1
    codes = [json.loads(line).get("code") for line in cell.read_text().splitlines() if "code" in line]
    assert codes == [75, 0]
    kl_comedy("sweep", "grid.yaml", "--local", 1, "--output", "alone", cwd=tmp_path)
    one, other = (
        next((tmp_path / place / "runs").glob("*/policy/model.safetensors")) for place in ("sweeps/grid", "alone")
    )
    assert one.read_bytes() == other.read_bytes()
