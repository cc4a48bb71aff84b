"""What a site does to a run, on a real SLURM: preemption, a lost node, an early signal, servers beside the trainer."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sites import Site, undisturbed, weights

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TINY = Path(__file__).parents[1] / "integration" / "tiny.yaml"
STEPS = 60
SETTINGS = f"train.steps: {STEPS}, train.threads: 1, train.eval_every: 0, train.checkpoint_every: 5"
PROFILE = 'partition: main\ntime: "10"\nsignal_seconds: 60\nenvironment: {OMP_NUM_THREADS: "1"}\n'


@pytest.fixture(scope="module")
def site(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "site.yaml").write_text(PROFILE)
    return Site(folder, cluster)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights that nobody disturbed, trained in this process without a scheduler."""
    ends = []

    def train(site, name):
        if not ends:
            (run,) = undisturbed(site.folder / "sweeps" / name, tmp_path_factory.mktemp("alone")).values()
            ends.append(weights(run))
        return ends[0]

    return train


def start(site, name, *where, more=""):
    (site.folder / f"{name}.yaml").write_text(f"base: {TINY}\noverrides: {{{SETTINGS}{more}}}\n")
    site.kl_comedy("sweep", f"{name}.yaml", *where)
    return name


def run_of(site, name):
    (row,) = site.status(name)
    assert (row["state"], row["step"]) == ("FINISHED", STEPS), row
    return weights(row["run"])


def lines(site, name):
    file = site.folder / f"sweeps/{name}/cells/00000.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def training(site, name):
    """The first line of the cell's journal once a checkpoint is there; None before."""
    saved = list(site.folder.glob(f"sweeps/{name}/runs/*/checkpoints/step-*.ckpt"))
    return lines(site, name)[0] if saved else None


def test_a_preempted_cell_saves_within_its_grace_and_goes_on(site, alone):
    """SLURM ends a job that leaves within its grace, and does not requeue it; the script must."""
    name = start(site, "preempted", "--slurm", "site.yaml")
    site.wait(lambda: training(site, name))
    urgent = site.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=3",
        "--exclusive",
        "--output=urgent.out",
        "--wrap=hostname",
    ).stdout.strip()
    site.wait(site.idle)
    ends = [(line["code"], line["reason"]) for line in lines(site, name) if "code" in line]
    assert [code for code, _ in ends] == [1, 0] and "stopped by SIGTERM at update" in ends[0][1]
    assert [line["restart"] for line in lines(site, name) if "started" in line] == [0, 1]
    assert "COMPLETED" in site.run("squeue", "--noheader", "--states=all", f"--jobs={urgent}", "--format=%T").stdout
    assert run_of(site, name) == alone(site, name)


def test_a_signal_before_the_process_listens_requeues_the_job(site, alone):
    """USR1 comes while python imports; the leg has nothing to save, and the next one trains."""
    name = start(site, "early", "--slurm", "site.yaml")
    wanted = f"kl_comedy.cli cell {site.folder}/sweeps/early 0"

    def worker():
        found = subprocess.run(["pgrep", "-f", "--", f"python.* -m {wanted}"], capture_output=True, text=True).stdout
        pids = [int(pid) for pid in found.split()]
        return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().startswith("python")]

    (pid,) = site.wait(worker)
    os.kill(pid, signal.SIGUSR1)
    site.wait(site.idle)
    started = [line["restart"] for line in lines(site, name) if "started" in line]
    assert started[-1] == 1, "the second leg trained"
    assert run_of(site, name) == alone(site, name)


def test_a_task_that_saved_first_does_not_take_the_others_with_it(site):
    """Two tasks save and exit with 75, one three seconds later; srun waits for it and says 75."""
    from kl_comedy.slurm.render import Resources, worker_step

    script = "sleep $((3 * SLURM_PROCID)); touch saved.$SLURM_PROCID; exit 75"
    step = worker_step(Resources(nodes=2, tasks=1, cpus=1, gpus=0), None).split()
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
    """Two servers and a trainer in one allocation; every reward asks both."""
    (site.folder / "server.py").write_text(SERVER)
    (site.folder / "plugin.py").write_text(PLUGIN)
    (site.folder / "servers.yaml").write_text(
        PROFILE + f"servers: {{command: '{sys.executable} server.py {{port}} number-{{index}}', count: 2}}\n"
    )
    (site.folder / "served.yaml").write_text(
        f"base: {TINY}\noverrides: {{train.steps: 2, train.eval_every: 0, rewards: [{{name: exact_answer}}, "
        "{name: asks_servers}]}\n"
    )
    site.kl_comedy("sweep", "served.yaml", "--slurm", "servers.yaml", "--plugin", "plugin.py")
    site.wait(site.idle)
    (row,) = site.status("served")
    assert row["state"] == "FINISHED", row
    assert (site.folder / "heard.txt").read_text() == "number-0 number-1"
    assert not list((site.folder / "sweeps/served/servers").iterdir())
    words = subprocess.run(["pgrep", "-f", "server.py .* number-"], capture_output=True, text=True).stdout
    assert words == "", "no server outlives its job"


def test_a_server_that_never_comes_up_fails_the_cell_in_one_line(site):
    (site.folder / "broken.yaml").write_text(PROFILE + "servers: {command: 'false {port}'}\n")
    (site.folder / "unserved.yaml").write_text(f"base: {TINY}\noverrides: {{train.steps: 2}}\n")
    site.kl_comedy("sweep", "unserved.yaml", "--slurm", "broken.yaml")
    site.wait(site.idle)
    (row,) = site.status("unserved")
    assert (row["state"], row["why"]) == ("FAILED", "server 0 of this job ended with code 1; the job's log says more")


def processes_of(job, cluster):
    """What runs in ``job`` of this cluster, as (process id, its parent's), by the variables SLURM gave it."""
    marks = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_CONF={cluster['SLURM_CONF']}".encode()}
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and marks <= set((folder / "environ").read_bytes().split(b"\0")):
                found.append((int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])))
    return found


def lose(node, job, cluster):
    """Kill the node's daemon first, then the guardians of the job's steps, then all that ran: none can send word."""
    daemon = int((Path(cluster["SLURM_CONF"]).parent / "pids" / f"slurmd-{node}").read_text().split()[0])
    inside = dict(processes_of(job, cluster))
    guardians = {parent for parent in inside.values() if parent not in inside}
    names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in guardians}
    assert names == {"slurmstepd"}, names
    for pid in (daemon, *guardians, *inside):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_lost_node_costs_what_came_after_the_last_checkpoint(site, alone, cluster):
    """The node's daemon, the job's steps and the training process die; the job goes on elsewhere."""
    name = start(site, "lost", "--slurm", "site.yaml")
    first = site.wait(lambda: training(site, name))
    node = first["node"]
    (job,) = site.run("squeue", "--noheader", "--name=lost-train", "--format=%A").stdout.split()
    lose(node, job, cluster)
    site.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    site.wait(site.idle)
    begun = [line for line in lines(site, name) if "started" in line]
    assert [line["restart"] for line in begun] == [0, 1] and begun[1]["node"] != node
    assert run_of(site, name) == alone(site, name)
