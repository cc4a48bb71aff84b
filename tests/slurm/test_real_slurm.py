"""A sweep on a real SLURM: an array of four cells, two at a time, and one in FSDP2 shards over two nodes.

One is killed, two are signalled, one fails; after ``resubmit`` all end in the same bits as undisturbed.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import WAITS, resumed_at, waits
from sites import Site, undisturbed, weights

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
STEPS = 12
GRID = f"""
base: base.yaml
overrides: {{train.steps: {STEPS}, train.threads: 1, train.eval_every: 0}}
grid:
  kl.0.estimator: [k1, k3]
  kl.0.beta: [0.1]
  optimizer.lr: [1.0e-3, 3.0e-4]
  data.train.options: {{easy: {{digits: 1}}}}
exclude: [{{kl.0.estimator: k3, optimizer.lr: 3.0e-4}}]
rows:
  late:
    tracking.uri: "sqlite:///store.db"
    data.train: {{dataset: jsonl, path: late.jsonl, split: null, fields: {{text: question}}}}
  shards:
    tracking.uri: "sqlite:///store.db"
    train.strategy: fsdp
    train.nodes: 2
    data.train.options: {{digits: 1}}
"""
PROBLEMS = "".join(json.dumps({"question": f"{n}+{n}=", "answer": str(2 * n), "id": n}) + "\n" for n in range(1, 9))
PROFILE = """
partition: main
time: "50"
signal_seconds: 60
max_parallel: 2
environment: {OMP_NUM_THREADS: "1"}
"""
WIDE = (
    PROFILE.replace("max_parallel: 2", "max_parallel: 3")
    + """
shapes:
  - nodes: 2
    environment: {OMP_NUM_THREADS: "1", MASTER_ADDR: 127.0.0.1, GLOO_SOCKET_IFNAME: lo}
"""
)
# Cells, and what is done to them.
KILLED = 0
SIGNALLED = 1
PLAIN = 2
LATE = 3
"""Its data is not there at first."""
SHARDS = 4
"""On two nodes; signalled too."""
CELLS = 5


@pytest.fixture(scope="module")
def site(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    (folder / "base.yaml").write_text(TINY.read_text().replace(", options: {digits: 1}", "", 1))
    (folder / "grid.yaml").write_text(GRID)
    (folder / "site.yaml").write_text(PROFILE)
    (folder / "wide.yaml").write_text(WIDE)
    return Site(folder, cluster | waits(2, folder / "go_on-{cell}"))


def journal(site, cell):
    return (site.folder / f"sweeps/grid/cells/{cell:04d}/attempts.jsonl").read_text()


def has_ended(site, cell):
    """Whether an attempt of ``cell`` has ended."""
    file = site.folder / f"sweeps/grid/cells/{cell:04d}/attempts.jsonl"
    return file.exists() and '"code"' in file.read_text()


def logs(site):
    """The ends of the logs of all jobs."""
    texts = [f"{file.name}:\n{file.read_text()[-3000:]}" for file in sorted(site.folder.glob("sweeps/grid/logs/*.out"))]
    return "\n".join(texts)


def pid_at_step(site, cell, step):
    """The process that trains ``cell``, once a checkpoint of ``step`` or later is there; None before."""
    for config in site.folder.glob("sweeps/grid/cells/*/run/config.yaml"):
        if f"cell: '{cell}'" not in config.read_text():
            continue
        steps = [int(path.stem.removeprefix("step-")) for path in config.parent.glob("checkpoints/step-*.ckpt")]
        if max(steps, default=0) >= step:
            started = journal(site, cell).splitlines()[0]
            return int(json.loads(started)["process"]["process.pid"])
    return None


@pytest.fixture(scope="module")
def disturbed(site):
    """Submit; kill one cell outright, signal two to make room, one of them on two nodes; wait for an empty queue.

    Each of the three waits for it after its second checkpoint. The ``rows`` of all cells, the ``jobs`` (the array of
    one node, that of two, the report), and ``most_at_once``, how many cells of the first array ran at a time.
    """
    disturbed_cells = (KILLED, SIGNALLED, SHARDS)
    for cell in range(CELLS):
        if cell not in disturbed_cells:
            (site.folder / f"go_on-{cell}").touch()
    jobs = site.kl_comedy("sweep", "grid.yaml", "--slurm", "wide.yaml", *WAITS).stdout.split()
    array, wide_array, _ = jobs
    task = {SIGNALLED: f"{array}_{SIGNALLED}", SHARDS: f"{wide_array}_{SHARDS}"}
    not_yet_disturbed = set(disturbed_cells)

    def disturb():
        for cell in sorted(not_yet_disturbed):
            assert not has_ended(site, cell), f"cell {cell} ended before it was disturbed:\n{logs(site)}"
            pid = pid_at_step(site, cell, 2)
            if pid is None:
                continue
            if cell == KILLED:
                os.kill(pid, signal.SIGKILL)
            else:
                # scancel (22.05) signals again for minutes where the job is requeued while it looks
                words = ["timeout", "2", "scancel", "--signal=USR1", task[cell]]
                subprocess.Popen(words, env=site.environment)
            not_yet_disturbed.remove(cell)
        return not not_yet_disturbed

    site.wait(disturb, 1800)
    (site.folder / f"go_on-{KILLED}").touch()
    for cell in (SIGNALLED, SHARDS):
        site.wait(lambda cell=cell: '"code"' in journal(site, cell), 900)
        (site.folder / f"go_on-{cell}").touch()
    counts = []

    def count_running():
        running = site.run("squeue", "--noheader", "--array", "--states=RUNNING", f"--jobs={array}").stdout
        counts.append(len(running.splitlines()))
        return site.idle()

    site.wait(count_running, 1800)
    rows = {row["cell"]: row for row in site.status("grid")}
    return SimpleNamespace(rows=rows, jobs=jobs, most_at_once=max(counts))


def test_two_at_a_time(disturbed):
    assert len(disturbed.jobs) == 3
    assert disturbed.most_at_once == 2


def test_every_cell_ends_in_its_state(disturbed):
    expected = dict.fromkeys(range(CELLS), "FINISHED") | {KILLED: "FAILED", LATE: "FAILED"}
    assert {cell: row["state"] for cell, row in disturbed.rows.items()} == expected
    assert "late.jsonl" in disturbed.rows[LATE]["why"]
    for row in disturbed.rows.values():
        assert row["node"] in ("n1", "n2", "n3")
        if row["state"] == "FINISHED":
            assert row["step"] == STEPS
            assert row["reward"] is not None


def test_the_cell_of_two_nodes_has_a_job_of_two_nodes(site, disturbed):
    job = f"{disturbed.jobs[1]}_{SHARDS}"
    assert disturbed.rows[SHARDS]["job"] == job
    assert "NumNodes=2" in site.run("scontrol", "show", "job", job).stdout


@pytest.mark.parametrize("cell", [SIGNALLED, SHARDS], ids=["one node", "two nodes"])
def test_the_signalled_cell_saved_at_once_and_resumed(site, disturbed, cell):
    row = disturbed.rows[cell]
    assert row["attempts"] == 2
    lines = [json.loads(line) for line in journal(site, cell).splitlines()]
    first_end, second_end = [line for line in lines if "code" in line]
    assert first_end["code"] == 75, "saved, to be started again"
    assert "stopped by SIGUSR1 at update" in first_end["reason"]
    assert second_end["code"] == 0
    assert [line["restart"] for line in lines if "started" in line] == [0, 1]
    assert len(resumed_at(row["run"])) == 1


def test_resubmit_runs_what_is_missing_and_every_cell_ends_as_undisturbed(site, disturbed):
    (site.folder / "late.jsonl").write_text(PROBLEMS)
    attempts_before = {row["cell"]: row["attempts"] for row in site.status("grid")}
    resubmit = site.kl_comedy("resubmit", "grid")
    assert "train: job" in resubmit.stderr
    assert "2 cells" in resubmit.stderr
    assert "nothing to submit" in site.kl_comedy("resubmit", "grid").stderr
    site.wait(site.idle, 1800)
    rows = site.status("grid")
    assert {row["state"] for row in rows} == {"FINISHED"}
    started_again = {row["cell"] for row in rows if row["attempts"] > attempts_before[row["cell"]]}
    assert started_again == {KILLED, LATE}
    assert len(resumed_at(rows[KILLED]["run"])) == 1
    assert f"{CELLS} finished" in (site.folder / "sweeps/grid/report/report.md").read_text()

    assert_stored(site)

    compared = {KILLED, SIGNALLED, SHARDS}
    alone = undisturbed(site.folder / "sweeps/grid", site.folder / "alone", only=compared, environment=site.environment)
    for cell, run in alone.items():
        assert weights(rows[cell]["run"]) == weights(run), rows[cell]
    assert len({weights(row["run"]) for row in rows}) == CELLS, "every cell is another run"


def assert_stored(site):
    """The two cells with a store have their finished runs there, with a reward, and in a table."""
    runs = json.loads(site.kl_comedy("results", "export", "--uri", "sqlite:///store.db", "--format", "json").stdout)
    assert sorted(run["tags.cell"] for run in runs if run["status"] == "FINISHED") == [str(LATE), str(SHARDS)]
    for run in runs:
        assert run["metrics.train/reward"] is not None
    words = ["--uri", "sqlite:///store.db", "--metric", "train/reward", "--format", "json"]
    table = json.loads(site.kl_comedy("results", "table", *words).stdout)
    assert sum(row["n"] for row in table) == 2


def test_cancel_takes_waiting_and_running_cells_out(site):
    settings = "{train.steps: 4000, train.checkpoint_every: 0, train.eval_every: 0}"
    (site.folder / "long.yaml").write_text(f"base: {TINY}\noverrides: {settings}\nseeds: 2\nmax_parallel: 1\n")
    site.kl_comedy("sweep", "long.yaml", "--slurm", "site.yaml")
    site.wait(lambda: any(row["step"] > 0 for row in site.status("long")), every=1)
    assert {row["state"] for row in site.status("long")} == {"PENDING", "RUNNING"}
    site.kl_comedy("cancel", "long")
    site.wait(site.idle)
    assert {row["state"] for row in site.status("long")} == {"STOPPED"}
    assert site.run("squeue", "--noheader").stdout == ""


def test_a_refused_submission_is_one_line(site):
    (site.folder / "wrong.yaml").write_text(PROFILE.replace("main", "nowhere"))
    (site.folder / "one.yaml").write_text(f"base: {TINY}\n")
    error = site.kl_comedy("sweep", "one.yaml", "--slurm", "wrong.yaml", code=1).stderr
    assert "invalid partition specified: nowhere" in error


def test_evaluation_and_report_depend_on_training_and_accounting_says_why(site, accounting, monkeypatch):
    (site.folder / "pair.yaml").write_text(
        f"base: {TINY}\noverrides: {{train.steps: 2, train.eval_every: 0}}\n"
        "rows:\n  good: {seed: 0}\n  lost: {seed: 1, model.source: nowhere}\n"
        "evaluate: {eval.samples: 2}\n"
    )
    jobs = site.kl_comedy("sweep", "pair.yaml", "--slurm", "site.yaml").stdout.split()
    assert len(jobs) == 3
    site.wait(site.idle)
    # The accounting learns of a job's end a while after the queue.
    site.wait(lambda: "FAILED" in site.run("sacct", "-n", "-X", "-P", f"-j{jobs[0]}", "--format=State").stdout)
    from kl_comedy.slurm import submit

    monkeypatch.setenv("SLURM_CONF", site.environment["SLURM_CONF"])
    states = submit.accounting(jobs)
    assert states[f"{jobs[0]}_0"].state == "COMPLETED"
    assert states[f"{jobs[0]}_1"].why == "FAILED, exit code 2:0"
    rows = {row["name"]: row for row in site.status("pair")}
    assert rows["good"]["evaluated"]
    assert not rows["lost"]["evaluated"]
    assert (site.folder / "sweeps/pair/report/report.md").exists()
    # max_parallel bounds both together: the evaluation of one cell waits for the training of all.
    site.wait(lambda: "Unknown" not in site.run("sacct", "-n", "-X", "-P", f"-j{jobs[1]}_0", "--format=End").stdout)
    trained = site.run("sacct", "-n", "-X", "-P", f"-j{jobs[0]}", "--format=End").stdout.split()
    (began,) = site.run("sacct", "-n", "-X", "-P", f"-j{jobs[1]}_0", "--format=Start").stdout.split()
    assert len(trained) == 2
    assert max(trained) <= began, "in ISO's form, so that text is ordered as time"


def test_hundreds_of_cells_are_submitted_queried_and_cancelled(site):
    """Held, so that none of them runs."""
    (site.folder / "held.yaml").write_text(PROFILE + 'extra: ["--hold"]\n')
    betas = [step / 10 for step in range(1, 11)]
    (site.folder / "hundreds.yaml").write_text(
        f"base: {TINY}\ngrid: {{kl.0.estimator: [k1, k3], kl.0.beta: {betas}}}\nseeds: 15\n"
    )
    submission = site.kl_comedy("sweep", "hundreds.yaml", "--slurm", "held.yaml").stderr
    assert "train: job" in submission
    assert "300 cells" in submission
    assert {row["state"] for row in site.status("hundreds")} == {"PENDING"}
    assert "nothing to submit: 300 pending" in site.kl_comedy("resubmit", "hundreds").stderr
    # As if the command had been killed before it wrote down the job: it is found in the queue.
    (site.folder / "sweeps/hundreds/submissions.jsonl").unlink()
    resubmission = site.kl_comedy("resubmit", "hundreds", "--slurm", "held.yaml").stderr
    assert "from a submission that was not recorded" in resubmission
    assert "nothing to submit" in resubmission
    site.kl_comedy("cancel", "hundreds")
    site.wait(site.idle)
    assert {row["state"] for row in site.status("hundreds")} == {"STOPPED"}
