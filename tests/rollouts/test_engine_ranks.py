"""Two FSDP2 ranks and two inference servers of ours, asynchronously: what a fault costs, and how old samples get.

Every batch is recorded with the version of each token, so the recording says which prompts were used and how old they
were. The rows of docs/faults.md name these tests.
"""

import itertools
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

STEPS = 10
MAX_STEPS = 2
"""How many updates old a token may be (``lag.max_steps``)."""
RECORDED = ["train.eval_every=0", "train.samples_every=0", "train.record_rollouts=jsonl", f"train.steps={STEPS}"]
SERVERS = [*RECORDED, "rollout.backend=hf_server", "resume=auto"]
ASYNC = [*SERVERS, "lag.mode=async", f"lag.max_steps={MAX_STEPS}"]
TWO = "rollout.options={servers: 2, transport: folder, request_timeout_s: 20}"


def batches(run):
    """The rows of each batch that was trained on."""
    batches = []
    for file in sorted((run.path / "rollouts").glob("batch-*.jsonl")):
        batches.append([json.loads(line) for line in file.read_text().splitlines()])
    return batches


def prompts(run):
    """The problems of each batch, in order; each has a group of four rows."""
    return [[row["problem"] for row in rows[::4]] for rows in batches(run)]


def ages(run):
    """The age of every token, in updates."""
    ages = []
    for update, rows in enumerate(batches(run)):
        for row in rows:
            ages.extend(update - version for version in row["versions"])
    return ages


@pytest.fixture(scope="module")
def order(tmp_path_factory):
    """The prompts of an undisturbed run of one process."""
    return prompts(go(tmp_path_factory.mktemp("order"), *RECORDED).run)


def started(folder, *overrides, **env):
    return start_ranks(folder, "fsdp", TWO, *overrides, modules=["dying_leader"], env=env)


def started_and_waiting(folder, *overrides):
    """Ranks after three updates or more, which wait in their sixth transfer of weights for the file returned.

    Without that wait a fast machine ends the run before the test has done anything to it.
    """
    go_on = folder / "go_on"
    ranks = started(folder, *overrides, KL_TEST_WAITS=str(go_on))
    ranks[0].wait_for(folder, "tiny-*/checkpoints/step-00000003.ckpt")
    return ranks, go_on


def finished(ranks, folder):
    """Wait until both ranks have ended well; the run."""
    try:
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], [rank.output[-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return run_in(folder)


def servers_of(rank):
    """Children of rank 0 that lead a session of their own and serve."""
    servers = []
    for child in psutil.Process(rank.pid).children():
        leads_a_session = os.getsid(child.pid) == child.pid
        if leads_a_session and listens(child):
            servers.append(child)
    return servers


def listens(process):
    return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))


def is_alive(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def assert_gone(processes):
    deadline = time.monotonic() + 30
    alive = [process for process in processes if is_alive(process)]
    while alive:
        assert time.monotonic() < deadline, f"{alive} outlived the run"
        time.sleep(0.05)
        alive = [process for process in alive if is_alive(process)]


def assert_nothing_lost(run, order):
    """Every prompt was used once, in order, and no token is older than allowed or from the future."""
    assert prompts(run) == order
    assert min(ages(run)) >= 0
    assert max(ages(run)) <= MAX_STEPS
    assert json.loads((run.path / "summary.json").read_text())["status"] == "FINISHED"
    assert not list((run.path / "sampler").glob("weights-*")), "weights for engines are removed"


def metrics_without_the_streams(run):
    return {(step, name): value for (step, name), value in metrics_of(run).items() if "stream/" not in name}


def test_no_lag_is_the_on_policy_run_to_the_bit(tmp_path, order):
    on_policy = over(tmp_path / "on", "fsdp", TWO, *SERVERS)
    waiting = over(tmp_path / "async", "fsdp", TWO, *SERVERS, "lag.mode=async")
    assert prompts(on_policy) == order
    assert prompts(waiting) == order
    assert set(ages(waiting)) == {0}
    on_policy_weights = (on_policy.policy / "model.safetensors").read_bytes()
    assert (waiting.policy / "model.safetensors").read_bytes() == on_policy_weights
    assert metrics_without_the_streams(waiting) == metrics_without_the_streams(on_policy)


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["rank 0", "rank 1", "both"])
def test_killed_ranks_resume_without_losing_or_repeating_a_prompt(tmp_path, order, victims):
    ranks, go_on = started_and_waiting(tmp_path, *ASYNC)
    servers = servers_of(ranks[0])
    assert len(servers) == 2
    # The ranks wait in a transfer of weights: the kill falls in the middle of it.
    for victim in victims:
        ranks[victim].send_signal(signal.SIGKILL)
    go_on.touch()
    codes = [rank.wait(120) for rank in ranks]
    assert 0 not in codes, [rank.output[-3000:] for rank in ranks]
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
    killed_code, other_code = [rank.wait(240) for rank in ranks]
    assert killed_code == -signal.SIGKILL
    assert other_code != 0
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
        # Several updates' time: without the limit the other server's tokens would grow older than allowed.
        time.sleep(3)
        server.send_signal(signal.SIGCONT)
    run = finished(ranks, tmp_path)
    assert len(batches(run)) == 14
    assert min(ages(run)) >= 0
    assert max(ages(run)) >= 1, "some tokens are old"
    assert max(ages(run)) <= MAX_STEPS
    if policy == "wait":
        problems = list(itertools.chain.from_iterable(prompts(run)))
        assert len(set(problems)) == len(problems), "no prompt is used twice in the first pass"
