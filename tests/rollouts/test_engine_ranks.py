"""Two FSDP2 ranks and two inference servers of ours, asynchronously: what a fault costs, and how old samples get.

Every batch is recorded with the version of each token, so the recording says which prompts were used and how old they
were. The rows of docs/faults.md name these tests.
"""

import json
import os
import signal
import time

import psutil
import pytest

from commands import assert_resumed
from rank_runs import over, run_in, start_ranks
from training_runs import go, metrics_of

pytestmark = pytest.mark.slow

STEPS, MAX_STEPS = 10, 2
RECORDED = ["train.eval_every=0", "train.samples_every=0", "train.record_rollouts=jsonl", f"train.steps={STEPS}"]
SERVERS = [*RECORDED, "rollout.backend=hf_server", "resume=auto"]
ASYNC = [*SERVERS, "lag.mode=async", f"lag.max_steps={MAX_STEPS}"]
TWO = "rollout.options={servers: 2, transport: folder, request_timeout_s: 20}"


def batches(run):
    """The rows of each batch that was trained on."""
    files = sorted((run.path / "rollouts").glob("batch-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def prompts(run):
    """The problems of each batch, in order."""
    return [[row["problem"] for row in rows[::4]] for rows in batches(run)]


def ages(run):
    """Of every token, in updates."""
    return [n - version for n, rows in enumerate(batches(run)) for row in rows for version in row["versions"]]


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    """The prompts of an undisturbed run of one process."""
    return prompts(go(tmp_path_factory.mktemp("order"), *RECORDED).run)


def started(folder, *overrides, **env):
    return start_ranks(folder, "fsdp", TWO, *overrides, modules=["dying_leader"], env=env)


def started_and_waiting(folder, *overrides):
    """Ranks after three updates or more, which wait in their sixth transfer of weights for the file returned."""
    go_on = folder / "go_on"
    ranks = started(folder, *overrides, KL_TEST_WAITS=str(go_on))
    ranks[0].wait_for(folder, "tiny-*/checkpoints/step-00000003.ckpt")
    return ranks, go_on


def finished(ranks, folder):
    """Wait until both ranks have ended well; the run."""
    try:
        assert [rank.wait() for rank in ranks] == [0, 0], [rank.output[-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return run_in(folder)


def servers_of(rank):
    """Children of rank 0 that lead a session of their own and serve."""
    children = psutil.Process(rank.pid).children()
    return [each for each in children if os.getsid(each.pid) == each.pid and listens(each)]


def listens(process):
    return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))


def assert_gone(processes):
    deadline = time.monotonic() + 30
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"{left} outlived the run"
        time.sleep(0.05)


def assert_nothing_lost(run, order):
    """Every prompt was used once, in order, and no token is older than allowed or from the future."""
    assert prompts(run) == order
    assert min(ages(run)) >= 0 and max(ages(run)) <= MAX_STEPS
    assert json.loads((run.path / "summary.json").read_text())["status"] == "FINISHED"
    assert not list((run.path / "sampler").glob("weights-*")), "weights for engines are removed"


def test_no_lag_is_the_on_policy_run_to_the_bit(tmp_path, order):
    on_policy = over(tmp_path / "on", "fsdp", TWO, *SERVERS)
    waiting = over(tmp_path / "async", "fsdp", TWO, *SERVERS, "lag.mode=async")
    assert prompts(waiting) == prompts(on_policy) == order and set(ages(waiting)) == {0}
    files = [(run.policy / "model.safetensors").read_bytes() for run in (on_policy, waiting)]
    assert files[0] == files[1]
    points = [{key: v for key, v in metrics_of(run).items() if "stream/" not in key[1]} for run in (on_policy, waiting)]
    assert points[0] == points[1]


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_killed_ranks_resume_without_losing_or_repeating_a_prompt(tmp_path, order, victims):
    ranks, go_on = started_and_waiting(tmp_path, *ASYNC)
    servers = servers_of(ranks[0])
    assert len(servers) == 2
    for victim in victims:
        ranks[victim].send_signal(signal.SIGKILL)
    go_on.touch()
    codes = [rank.wait(120) for rank in ranks]
    assert all(codes), [rank.output[-3000:] for rank in ranks]
    assert_gone(servers)
    assert_nothing_lost(finished(started(tmp_path, *ASYNC), tmp_path), order)
    assert_resumed(tmp_path)


def test_a_killed_engine_is_replaced_while_the_ranks_go_on(tmp_path, order):
    ranks, go_on = started_and_waiting(tmp_path, *ASYNC)
    os.killpg(servers_of(ranks[0])[1].pid, signal.SIGKILL)
    go_on.touch()
    run = finished(ranks, tmp_path)
    assert_nothing_lost(run, order)
    restarts = [value for (_, name), value in sorted(metrics_of(run).items()) if name == "stream/sampler_restarts"]
    assert restarts[-1] >= 1


@pytest.mark.parametrize("moment", ["gathering", "sending"])
def test_rank_zero_killed_in_a_weight_transfer(tmp_path, order, moment):
    """In flight: the servers draw meanwhile. One of them has the new weights, the other has not, or all ranks wait."""
    settings = [*ASYNC, "lag.in_flight=true"]
    ranks = started(tmp_path, *settings, KL_TEST_DIES=moment)
    codes = [rank.wait(240) for rank in ranks]
    assert codes[0] == -signal.SIGKILL and codes[1] != 0
    assert not (run_in(tmp_path).path / "summary.json").exists(), "it was killed in the middle"
    assert_nothing_lost(finished(started(tmp_path, *settings), tmp_path), order)
    assert_resumed(tmp_path)


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_no_token_is_older_than_allowed_while_servers_stand_still(tmp_path, policy):
    """One server is stopped twice, in turns, while the other goes on and weights change between tokens."""
    settings = [*ASYNC, "lag.in_flight=true", f"lag.policy={policy}", "train.steps=14"]
    ranks, go_on = started_and_waiting(tmp_path, *settings)
    for server in servers_of(ranks[0]):
        server.send_signal(signal.SIGSTOP)
        go_on.touch()
        time.sleep(3)
        server.send_signal(signal.SIGCONT)
    run = finished(ranks, tmp_path)
    assert len(batches(run)) == 14 and min(ages(run)) >= 0 and 1 <= max(ages(run)) <= MAX_STEPS
    used = [problem for batch in prompts(run) for problem in batch]
    if policy == "wait":
        assert len(set(used)) == len(used), "no prompt is used twice in the first pass"
