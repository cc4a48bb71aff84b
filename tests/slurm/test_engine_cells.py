"""FSDP2 ranks on two nodes and two inference servers on a third, in one cell, asynchronously: preempted once.

``KL_COMEDY_KEEP_LOG=FILE`` copies the job's log, which names ranks, engines and versions.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import WAITS, assert_resumed, waits
from sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
STEPS = 20
MAX_STEPS = 2
"""How many updates old a token may be."""
GRID = f"""
base: {TINY}
overrides:
  train.steps: {STEPS}
  train.threads: 1
  train.eval_every: 0
  train.checkpoint_every: 5
  train.record_rollouts: jsonl
  train.strategy: fsdp
  train.nodes: 2
  rollout.backend: hf_server
  rollout.options: {{request_timeout_s: 60}}
  lag.mode: async
  lag.max_steps: {MAX_STEPS}
  lag.in_flight: true
seeds: 1
"""
PROFILE = """
partition: main
time: "50"
signal_seconds: 1
nodes: 2
environment: {OMP_NUM_THREADS: "1", MASTER_ADDR: 127.0.0.1, GLOO_SOCKET_IFNAME: lo}
servers: {count: 2, nodes: 1, wait_seconds: 900}
"""


VLLM_GRID = f"""
base: {TINY}
overrides:
  train.steps: 2
  train.threads: 1
  train.eval_every: 0
  train.record_rollouts: jsonl
  eval.at_start: false
  eval.at_end: false
  kl.0.reference: initial
  model.options: {{preset: tiny, heads: 2}}
  optimizer.lr: 0.01
  rollout.backend: vllm_server
grid:
  rollout.options:
    folder: {{transport: folder, kv_cache_gib: 0.1}}
    gloo: {{transport: gloo, kv_cache_gib: 0.1}}
rows:
  adapter: {{model.lora: {{rank: 4}}, optimizer.lr: 0.03, rollout.options: {{kv_cache_gib: 0.1}}}}
seeds: 1
max_parallel: 1
"""
VLLM_PROFILE = """
partition: main
time: "15"
memory: 1500M
environment: {OMP_NUM_THREADS: "1"}
servers: {count: 1, nodes: 0, wait_seconds: 500}
"""


@pytest.fixture(scope="module")
def site(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    (folder / "three.yaml").write_text(PROFILE)
    (folder / "engines.yaml").write_text(GRID)
    return Site(folder, cluster | waits(5, folder / "go_on"))


@pytest.fixture(scope="module")
def cell(site):
    """Submit, preempt it where it waits for that, after its first checkpoint, and wait for an empty queue.

    Its ``run``, the run's folder, and the text of its ``log``.
    """
    job = site.kl_comedy("sweep", "engines.yaml", "--slurm", "three.yaml", *WAITS).stdout.split()[0]
    site.wait(lambda: list(site.folder.glob("sweeps/engines/cells/*/run/checkpoints/step-00000005.ckpt")), every=0.1)
    time.sleep(2)  # so that an update takes longer than signal_seconds
    (node,) = {line["node"] for line in journal(site)}
    where = ["--partition=urgent", f"--nodelist={node}", "--exclusive"]
    site.run("sbatch", "--parsable", *where, "--output=urgent.out", "--wrap=hostname")
    site.wait(lambda: '"code"' in journal_file(site).read_text())
    (site.folder / "go_on").touch()
    site.wait(site.idle, 1200)
    (run,) = site.folder.glob("sweeps/engines/cells/*/run")
    log = site.folder / f"sweeps/engines/logs/train-{job}_0.out"
    kept_log = os.environ.get("KL_COMEDY_KEEP_LOG")
    if kept_log:
        shutil.copy(log, kept_log)
    return SimpleNamespace(run=run, log=log.read_text())


def journal_file(site):
    return site.folder / "sweeps/engines/cells/0000/attempts.jsonl"


def journal(site):
    """A line when an attempt of the cell starts, and one when it ends."""
    return [json.loads(line) for line in journal_file(site).read_text().splitlines()]


def batches(run):
    """The rows of each batch that was trained on."""
    batches = []
    for file in sorted((run / "rollouts").glob("batch-*.jsonl")):
        batches.append([json.loads(line) for line in file.read_text().splitlines()])
    return batches


def test_the_preempted_cell_saves_resumes_and_finishes(site, cell):
    assert_resumed(cell.run.parent)
    (row,) = site.status("engines")
    assert row["state"] == "FINISHED", (row, cell.log)
    assert row["step"] == STEPS, (row, cell.log)
    first_end, second_end = [line for line in journal(site) if "code" in line]
    assert first_end["code"] == 1
    assert "stopped by SIGTERM at update" in first_end["reason"]
    assert second_end["code"] == 0


def test_the_preempted_cell_finishes_and_uses_every_prompt_once(cell):
    problems = []
    ages = []
    for update, rows in enumerate(batches(cell.run)):
        problems.extend(row["problem"] for row in rows[::4])  # groups of four
        for row in rows:
            ages.extend(update - version for version in row["versions"])
    assert len(batches(cell.run)) == STEPS
    assert len(problems) == STEPS * 4
    assert len(set(problems)) == len(problems), "each prompt once: 80 of 256"
    assert min(ages) >= 0
    assert max(ages) <= MAX_STEPS


def test_its_log_shows_ranks_engines_versions_and_that_a_stop_needs_longer_than_its_signal(cell):
    log = cell.log
    assert log.count("fsdp, 2 processes on 2 nodes; samples from hf_server") == 2, log
    assert log.count("weights of version 0 confirmed") == 1
    assert log.count("confirmed") == 2, "once per start"
    # One second's warning is less than an update takes: the run says so when it is stopped.
    assert "raise signal_seconds in the profile" in log
    assert "Unauthorized" not in log


def test_no_server_and_no_key_is_left(site, cell):
    assert not list((site.folder / "sweeps/engines/servers").iterdir())
    assert not processes_in(site.folder)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: run it from .venv-vllm")
def test_a_job_starts_vllm_and_sends_it_every_version(cluster, tmp_path):
    """Three cells, each with a real vLLM server: weights by a folder, over TCP, and of LoRA the adapter alone."""
    (tmp_path / "beside.yaml").write_text(VLLM_PROFILE)
    (tmp_path / "vllm.yaml").write_text(VLLM_GRID)
    site = Site(tmp_path, cluster)
    job = site.kl_comedy("sweep", "vllm.yaml", "--slurm", "beside.yaml").stdout.split()[0]
    site.wait(site.idle, 1500)
    folder = tmp_path / "sweeps/vllm/logs"
    logs = [(folder / f"train-{job}_{cell}.out").read_text() for cell in range(3)]
    states = [(row["state"], row["step"]) for row in site.status("vllm")]
    assert states == [("FINISHED", 2)] * 3, (states, *logs)
    loaded_adapters = []
    for cell in range(3):
        server_log = next(folder.glob(f"train-*_{cell}.server-0.log")).read_text()
        loaded_adapters.append("Loaded new LoRA adapter" in server_log)
    assert loaded_adapters == [False, False, True]
    for log in logs:
        assert "samples from vllm_server" in log, log
        assert log.count("weights of version 0 confirmed") == 1, log
    for run in tmp_path.glob("sweeps/vllm/cells/*/run"):
        assert_drawn_by_the_newest_weights(run)
    assert not list((tmp_path / "sweeps/vllm/servers").iterdir())
    assert not processes_in(tmp_path)


def assert_drawn_by_the_newest_weights(run):
    """The learner computes the recorded log-probs, and each batch has the version of its update."""
    events = [json.loads(line) for line in (run / "spool.jsonl").read_text().splitlines()]
    gaps = [event["data"].get("policy/behaviour_gap_max") for event in events if event.get("kind") == "metrics"]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4, "it drew from the weights that were trained"
    for update, rows in enumerate(batches(run)):
        for row in rows:
            assert set(row["versions"]) == {update}


def processes_in(folder):
    """What works in ``folder``, as all processes of its jobs do."""
    working = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(link.readlink()).startswith(str(folder)):
                working.append((link.parent / "cmdline").read_bytes())
    return working
