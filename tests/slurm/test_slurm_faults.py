"""What a site does to a run, on a real SLURM: preemption, a lost node, an early signal, servers beside the trainer."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import WAITS, Command, resumed_at, run_here, waits
from kl_comedy.slurm.scripts import LAST_TASKS_S
from sites import Site, undisturbed, weights

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
STEPS = 15
SETTINGS = f"train.steps: {STEPS}, train.threads: 1, train.eval_every: 0, train.checkpoint_every: 5"
PROFILE = 'partition: main\ntime: "50"\nsignal_seconds: 60\nenvironment: {OMP_NUM_THREADS: "1"}\n'
EARLY = 0
"""The cell that is signalled while python imports."""
LOST = 1
"""The cell whose node is lost."""
PREEMPTED = 2


@pytest.fixture(scope="module")
def site(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "site.yaml").write_text(PROFILE)
    return Site(folder, cluster | waits(5, folder / "go_on-{cell}"))


def parents_in(job, cluster):
    """Process id to that of its parent, of what runs in ``job`` of this cluster, by the variables SLURM gave it."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={cluster['SLURM_CONF']}".encode()}
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            environment = set((folder / "environ").read_bytes().split(b"\0"))
            if not marks <= environment:
                continue
            # After the command's name, which may hold blanks and brackets: the state, then the parent.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    return parents


def lose(node, job, cluster):
    """Kill the node's daemon first, then the guardians of the job's steps, then all that ran: none can send word."""
    pid_file = Path(cluster["SLURM_CONF"]).parent / "pids" / f"slurmd-{node}"
    daemon = int(pid_file.read_text().split()[0])
    parents = parents_in(job, cluster)
    guardians = {parent for parent in parents.values() if parent not in parents}
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in guardians}
    assert names == {"slurmstepd"}, names
    for pid in (daemon, *guardians, *parents):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def faulty(site, cluster, revive):
    """Three cells, each on a node of its own: the first is signalled while python imports; the node of the second is
    lost, and the third is preempted, after their first checkpoints, where they wait for it. The urgent job's id, when
    the queue is empty and the lost node is back.
    """
    (site.folder / "own.yaml").write_text(PROFILE + 'extra: ["--exclusive"]\n')
    (site.folder / "faulty.yaml").write_text(f"base: {TINY}\noverrides: {{{SETTINGS}}}\nseeds: 3\n")
    (site.folder / f"go_on-{EARLY}").touch()
    array = site.kl_comedy("sweep", "faulty.yaml", "--slurm", "own.yaml", *WAITS).stdout.split()[0]
    urgent = []
    lost = []

    # Each fault answers whether it was the time for it; it is asked until it was.
    def signal_early():
        command = f"python.* -m kl_comedy.cli cell {site.folder}/sweeps/faulty {EARLY}"
        output = subprocess.run(["pgrep", "-f", "--", command], capture_output=True, text=True).stdout
        for pid in output.split():
            # Not the shell whose script holds the same words.
            if Path(f"/proc/{pid}/comm").read_text().startswith("python"):
                os.kill(int(pid), signal.SIGUSR1)
                return True
        return False

    def lose_node():
        node = training(site, LOST)
        if node is None:
            return False
        (job,) = site.run("squeue", "--noheader", f"--jobs={array}_{LOST}", "--format=%A").stdout.split()
        lost.append(node)
        lose(node, job, cluster)
        site.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
        return True

    def preempt():
        node = training(site, PREEMPTED)
        if node is None:
            return False
        where = ["--partition=urgent", f"--nodelist={node}", "--exclusive"]
        job = site.run("sbatch", "--parsable", *where, "--output=urgent.out", "--wrap=hostname").stdout.strip()
        urgent.append(job)
        return True

    faults_to_come = [signal_early, lose_node, preempt]

    def disturb():
        for fault in list(faults_to_come):
            if fault():
                faults_to_come.remove(fault)
        return not faults_to_come

    try:
        site.wait(disturb, every=0.1)
        site.wait(lambda: any("code" in line for line in lines(site, PREEMPTED)))
        (site.folder / f"go_on-{LOST}").touch()
        (site.folder / f"go_on-{PREEMPTED}").touch()
        site.wait(site.idle)
    finally:
        # The cluster is that of all modules: those that come later would have two nodes.
        for node in lost:
            revive(node)
    return urgent[0]


@pytest.fixture(scope="module")
def alone(site, faulty, tmp_path_factory):
    """The weights of each cell that nobody disturbed, trained in this process without a scheduler."""
    ends = undisturbed(site.folder / "sweeps/faulty", tmp_path_factory.mktemp("alone"))
    return {cell: weights(run) for cell, run in ends.items()}


def assert_ends_as_undisturbed(site, alone, cell):
    row = site.status("faulty")[cell]
    assert row["state"] == "FINISHED", row
    assert row["step"] == STEPS, row
    assert weights(row["run"]) == alone[cell]


def lines(site, cell):
    """The journal of a cell: a line when an attempt starts, and one when it ends."""
    file = site.folder / f"sweeps/faulty/cells/{cell:04d}/attempts.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def starts(site, cell):
    return [line for line in lines(site, cell) if "started" in line]


def ends(site, cell):
    return [line for line in lines(site, cell) if "code" in line]


def training(site, cell):
    """The node of the cell's first attempt once a checkpoint is there; None before."""
    for checkpoint in site.folder.glob("sweeps/faulty/cells/*/run/checkpoints/step-*.ckpt"):
        run = checkpoint.parents[1]
        if f"cell: '{cell}'" in (run / "config.yaml").read_text():
            return lines(site, cell)[0]["node"]
    return None


def test_a_preempted_cell_saves_within_its_grace_and_goes_on(site, faulty, alone):
    """SLURM ends a job that leaves within its grace, and does not requeue it; the script must."""
    first_end, second_end = ends(site, PREEMPTED)
    assert first_end["code"] == 1
    assert "stopped by SIGTERM at update" in first_end["reason"]
    assert second_end["code"] == 0
    assert [line["restart"] for line in starts(site, PREEMPTED)] == [0, 1]
    assert "COMPLETED" in site.run("squeue", "--noheader", "--states=all", f"--jobs={faulty}", "--format=%T").stdout
    assert_ends_as_undisturbed(site, alone, PREEMPTED)
    assert len(resumed_at(site.status("faulty")[PREEMPTED]["run"])) == 1


def test_a_signal_before_the_process_listens_requeues_the_job(site, faulty, alone):
    """USR1 comes while python imports; the leg has nothing to save, and the next one trains."""
    assert starts(site, EARLY)[-1]["restart"] == 1, "the second leg trained"
    assert_ends_as_undisturbed(site, alone, EARLY)


def test_a_lost_node_costs_what_came_after_the_last_checkpoint(site, faulty, alone):
    """The node's daemon, the job's steps and the training process died; the job was requeued to another node."""
    first_start, second_start = starts(site, LOST)
    assert first_start["restart"] == 0
    assert second_start["restart"] == 1
    assert second_start["node"] != first_start["node"]
    assert_ends_as_undisturbed(site, alone, LOST)
    assert len(resumed_at(site.status("faulty")[LOST]["run"])) == 1


def test_the_cluster_has_its_lost_node_back(site, faulty):
    """On each of its nodes a task of one job runs; with a node that is down srun would wait for it."""
    size = ("--nodes=3", "--ntasks-per-node=1", "--immediate=60")
    node_names = site.run("srun", *size, "printenv", "SLURMD_NODENAME").stdout.split()
    assert len(set(node_names)) == 3


def test_a_task_that_saved_first_does_not_take_the_others_with_it(site):
    """Two tasks save and exit with 75, one three seconds later; srun waits for it and says 75."""
    script = "sleep $((3 * SLURM_PROCID)); touch saved.$SLURM_PROCID; exit 75"
    step = ("--kill-on-bad-exit=0", f"--wait={LAST_TASKS_S}")
    site.run("srun", "--nodes=2", "--ntasks-per-node=1", *step, "bash", "-c", script, code=75)
    assert sorted(path.name for path in site.folder.glob("saved.*")) == ["saved.0", "saved.1"]


SERVER = """
import http.server, os, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers["Authorization"] == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(sys.argv[2].encode())

    def log_message(self, *ignored):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
PLUGIN = """
import os, urllib.request
from kl_comedy.registry import REWARDS

HEARD = set()

@REWARDS.register("asks_servers", source="this test", claims=(),
                  examples=({"completion": "1", "answer": "1", "value": 0.0},))
def asks_servers(completion, answer, meta):
    '''Ask every server of the job.'''
    for url in os.environ["KL_COMEDY_SERVER_URLS"].split(","):
        asked = urllib.request.Request(url, headers={"Authorization": "Bearer " + os.environ["VLLM_API_KEY"]})
        with urllib.request.urlopen(asked, timeout=10) as reply:
            HEARD.add(reply.read().decode())
    with open("heard.txt", "w") as file:
        file.write(" ".join(sorted(HEARD)))
    return 0.0
"""


def test_servers_beside_the_trainer_answer_it_while_it_trains(site):
    """Two servers and a trainer in one allocation whose memory both steps need; every reward asks both."""
    (site.folder / "server.py").write_text(SERVER)
    (site.folder / "plugin.py").write_text(PLUGIN)
    command = f"{sys.executable} server.py {{port}} number-{{index}}"
    servers = f"memory: 400M\nservers: {{command: '{command}', count: 2}}\n"
    (site.folder / "servers.yaml").write_text(PROFILE + servers)
    settings = "train.steps: 2, train.eval_every: 0, rewards: [{name: exact_answer}, {name: asks_servers}]"
    (site.folder / "served.yaml").write_text(f"base: {TINY}\noverrides: {{{settings}}}\n")
    words = ["sweep", "served.yaml", "--slurm", "servers.yaml", "--plugin", "plugin.py"]
    Command(*words, cwd=site.folder, env=site.environment).finish()  # not in this process, where the reward would stay
    site.wait(site.idle)
    (row,) = site.status("served")
    assert row["state"] == "FINISHED", row
    assert (site.folder / "heard.txt").read_text() == "number-0 number-1"
    assert not list((site.folder / "sweeps/served/servers").iterdir())
    running = subprocess.run(["pgrep", "-f", "server.py .* number-"], capture_output=True, text=True).stdout
    assert running == "", "no server outlives its job"


def test_a_server_that_never_comes_up_fails_the_cell_in_one_line(site):
    (site.folder / "broken.yaml").write_text(PROFILE + "servers: {command: 'false {port}'}\n")
    (site.folder / "unserved.yaml").write_text(f"base: {TINY}\noverrides: {{train.steps: 2}}\n")
    site.kl_comedy("sweep", "unserved.yaml", "--slurm", "broken.yaml")
    site.wait(site.idle)
    (row,) = site.status("unserved")
    assert row["state"] == "FAILED"
    assert "server 0 of this job ended with code 1: (its log is empty)" in row["why"]
    (log,) = (site.folder / "sweeps/unserved/logs").glob("train-*.server-0.log")
    assert str(log) in row["why"]


def site_in(folder, cluster):
    """A folder with a profile whose python prints its words, and a grid of one cell."""
    folder.mkdir()
    (folder / "site.yaml").write_text(PROFILE.replace("time: ", "python: /bin/echo\ntime: "))
    (folder / "named.yaml").write_text(f"base: {TINY}\n")
    return Site(folder, cluster)


SUBMIT = ("sweep", "named.yaml", "--slurm", "site.yaml")


@pytest.mark.parametrize("name", ["a;b (c) & d é #1 50%", "50%j"])
def test_a_sweep_in_a_folder_of_any_name_logs_there_or_is_refused_in_one_line(cluster, tmp_path, name):
    """What a shell reads in another way than sbatch does; those of the next test are refused."""
    site = site_in(tmp_path / name, cluster)
    code, out, error = run_here(*SUBMIT, cwd=site.folder, env=site.environment)
    assert code == 0, error
    site.wait(site.idle)
    job, report = out.split()
    logs = {path.name: path.read_text() for path in (site.folder / "sweeps/named/logs").iterdir()}
    assert set(logs) == {f"train-{job}_0.out", f"report-{report}.out"}
    assert f"-m kl_comedy.cli cell {site.folder}/sweeps/named 0" in logs[f"train-{job}_0.out"]


@pytest.mark.parametrize("name", ["a$(b)", "o'brien", 'a"b', "a`b"])
def test_a_sweep_in_a_folder_whose_name_no_quotes_make_safe_is_refused(cluster, tmp_path, name):
    site = site_in(tmp_path / name, cluster)
    code, _, error = run_here(*SUBMIT, cwd=site.folder, env=site.environment)
    assert code == 2
    assert re.fullmatch(r"error: --output: got .* without quotes, backslashes, \$ .*\n", error), error
