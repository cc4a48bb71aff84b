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

import pytest

from commands import WAITS, assert_resumed, waits
from sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
STEPS, MAX_STEPS = 40, 2
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
time: "15"
signal_seconds: 1
nodes: 2
environment: {OMP_NUM_THREADS: "1", MASTER_ADDR: 127.0.0.1, GLOO_SOCKET_IFNAME: lo}
servers: {count: 2, nodes: 1, wait_seconds: 300}
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
    return Site(folder, {**cluster, **waits(5, folder / "go_on")})


@pytest.fixture(scope="module")
def cell(site):
    """Submit, preempt it where it waits for that, after its first checkpoint, and wait for an empty queue. The run's
    folder, and the log."""
    job = site.kl_comedy("sweep", "engines.yaml", "--slurm", "three.yaml", *WAITS).stdout.split()[0]
    site.wait(lambda: list(site.folder.glob("sweeps/engines/runs/*/checkpoints/step-00000005.ckpt")), every=0.1)
    time.sleep(2)  # so that an update takes longer than signal_seconds
    (node,) = {json.loads(line)["node"] for line in journal(site)}
    options = f"--parsable --partition=urgent --nodelist={node} --exclusive --output=urgent.out --wrap=hostname"
    site.run("sbatch", *options.split())
    site.wait(lambda: any('"code"' in line for line in journal(site)))
    (site.folder / "go_on").touch()
    site.wait(site.idle, 600)
    (run,) = site.folder.glob("sweeps/engines/runs/*")
    log = site.folder / f"sweeps/engines/logs/train-{job}_0.out"
    if target := os.environ.get("KL_COMEDY_KEEP_LOG"):
        shutil.copy(log, target)
    return run, log.read_text()


def journal(site):
    return (site.folder / "sweeps/engines/cells/00000.jsonl").read_text().splitlines()


def test_the_preempted_cell_finishes_and_uses_every_prompt_once(site, cell):
    run, log = cell
    assert_resumed(run.parent)
    (row,) = site.status("engines")
    assert (row["state"], row["step"]) == ("FINISHED", STEPS), (row, log)
    lines = [json.loads(line) for line in journal(site)]
    ends = [(line["code"], line["reason"]) for line in lines if "code" in line]
    assert [code for code, _ in ends] == [1, 0] and "stopped by SIGTERM at update" in ends[0][1]
    batches = [file.read_text().splitlines() for file in sorted((run / "rollouts").glob("batch-*.jsonl"))]
    assert len(batches) == STEPS
    rows = [[json.loads(line) for line in lines] for lines in batches]
    used = [row["problem"] for batch in rows for row in batch[::4]]
    assert len(used) == STEPS * 4 and len(set(used)) == len(used), "each prompt once: 160 of 256"
    ages = [n - version for n, batch in enumerate(rows) for row in batch for version in row["versions"]]
    assert min(ages) >= 0 and max(ages) <= MAX_STEPS


def test_its_log_shows_ranks_engines_versions_and_that_a_stop_needs_longer_than_its_signal(cell):
    _, log = cell
    assert log.count("fsdp, 2 processes on 2 nodes; samples from hf_server") == 2, log
    assert log.count("weights of version 0 confirmed") == 1 and log.count("confirmed") == 2
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
    logs = [(tmp_path / f"sweeps/vllm/logs/train-{job}_{cell}.out").read_text() for cell in range(3)]
    states = [(row["state"], row["step"]) for row in site.status("vllm")]
    assert states == [("FINISHED", 2)] * 3, (states, *logs)
    servers = [
        next((tmp_path / "sweeps/vllm/logs").glob(f"train-*_{cell}.server-0.log")).read_text() for cell in range(3)
    ]
    assert ["Loaded new LoRA adapter" in text for text in servers] == [False, False, True]
    for log in logs:
        assert "samples from vllm_server" in log and log.count("weights of version 0 confirmed") == 1, log
    for run in tmp_path.glob("sweeps/vllm/runs/*"):
        events = [json.loads(line) for line in (run / "spool.jsonl").read_text().splitlines()]
        gaps = [event["data"].get("policy/behaviour_gap_max") for event in events if event.get("kind") == "metrics"]
        assert len(gaps) == 2 and max(gaps) < 1e-4, "it drew from the weights that were trained"
        for n, batch in enumerate(sorted((run / "rollouts").glob("batch-*.jsonl"))):
            rows = [json.loads(line) for line in batch.read_text().splitlines()]
            assert {version for row in rows for version in row["versions"]} == {n}
    assert not list((tmp_path / "sweeps/vllm/servers").iterdir())
    assert not processes_in(tmp_path)


def processes_in(folder):
    """What works in ``folder``, as all processes of its jobs do."""
    working = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if str(link.readlink()).startswith(str(folder)):
                working.append((link.parent / "cmdline").read_bytes())
    return working
