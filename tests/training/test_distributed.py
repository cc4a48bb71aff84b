"""Several processes train what one trains: equal losses, metrics and weights, whatever the strategy and KL terms."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from choice_suite import problem, write_suite
from commands import WAITS, Command, assert_resumed, waits
from kl_comedy.config import config_hash, load_config
from kl_comedy.errors import UserError
from kl_comedy.models import load_model
from kl_comedy.models.weights import full_weights
from kl_comedy.rollouts import Sampler
from kl_comedy.training.checkpoint import damage, manifest
from kl_comedy.training.distributed import Ranks, cluster_environment
from kl_comedy.training.models import load_policy
from kl_comedy.training.run_folder import saved, step_of
from rank_runs import COMMON, DEADLINE_S, MIXED, assert_same, over, run_in, start_ranks, weights_of
from teachers import SERVED_TERMS, save_teacher
from training_runs import TINY, go, metrics_of, sample_tables_of


def start(folder, strategy, *overrides, devices=2, env=()):
    """A run that starts its further processes itself."""
    arguments = [f"output={folder}", *COMMON, *overrides, f"train.strategy={strategy}", f"train.devices={devices}"]
    return Command("train", TINY, *arguments, cwd=folder.parent, env={"OMP_NUM_THREADS": "1", **dict(env)})


def finish(process):
    """Wait until every process of a run of :func:`start` has ended; the first one's exit code, what all printed."""
    try:
        code = process.wait(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while working_in_group(process.pid):
            assert time.monotonic() < deadline, process.output
            time.sleep(0.05)
    finally:
        process.kill()
    return code, process.output


def working_in_group(group):
    """Whether a process of this group has not ended."""
    for entry in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(entry.pid) == group and entry.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_what_one_trains(tmp_path, strategy):
    suite = write_suite(tmp_path, [problem(n) for n in range(1, 13)])  # 3 passes: one has no partner
    settings = [*MIXED, "train.steps=4", f"eval.suites=[{suite}]"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    assert metrics_of(alone)[4, "eval/pick/accuracy_half_width"] > 0
    (tmp_path / strategy).mkdir()
    assert_same(over(tmp_path / strategy, strategy, *settings), alone, atol=1e-5)


EIGHT = [
    *MIXED,
    "model.options={preset: tiny, layers: 3}",
    "model.gradient_checkpointing=true",
    "train.steps=8",
    "train.checkpoint_every=0",
    "optimizer.lr=3.0e-4",
]


@pytest.mark.slow
def test_gold_and_proxy_of_two_ranks_are_means_over_all_completions(tmp_path):
    """From the texts alone. Nine held-out problems over two ranks: the mean of the ranks' means is another number."""
    rewards = ["rewards=[{name: length, options: {full: 24}}]", "gold={name: length, options: {free: 3, full: 40}}"]
    settings = ["train.steps=2", "train.samples_every=1", "train.eval_every=2"]
    run = over(tmp_path / "ddp", "ddp", *settings, *rewards)
    logged = metrics_of(run)
    tables = [(step, "train/reward", "train/gold", 16, rows) for step, rows in sample_tables_of(run).items()]
    for line in (run.path / "spool.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event.get("kind") == "table" and event["data"]["name"] == "eval/heldout":
            rows = json.loads((run.path / event["data"]["path"]).read_text())
            tables.append((event["step"], "eval/heldout/proxy", "eval/heldout/reward", 9, rows))
    assert [step for step, *_ in tables] == [1, 2, 0, 2]
    for step, proxy, gold, count, rows in tables:
        assert len(rows) == count
        lengths = [len(row["completion"]) for row in rows]
        proxies = [min(length / 24, 1.0) for length in lengths]
        golds = [min(max(length - 3, 0) / 37, 1.0) for length in lengths]
        assert logged[step, proxy] == pytest.approx(sum(proxies) / count), (step, proxy)
        assert logged[step, gold] == pytest.approx(sum(golds) / count), (step, gold)


@pytest.mark.slow
def test_eight_updates_equal_the_single_process_run(tmp_path):
    """Other placements, adapters and bf16: tests/twin, tests/config/test_matrix.py."""
    alone = go(tmp_path / "alone", *COMMON, *EIGHT).run
    assert_same(over(tmp_path / "fsdp", "fsdp", *EIGHT), alone, atol=2e-5)


def shorn(folder, copy):
    """A copy of the run in ``folder`` as if it had been killed before its last checkpoint."""
    shutil.copytree(folder, copy)
    run = run_in(copy)
    (run.path / "summary.json").unlink()
    shutil.rmtree(saved(run.checkpoints)[-1])
    return copy


def writers(run):
    """How many processes wrote each checkpoint: those before the resumption stay as they were."""
    return {step_of(path): manifest(path)["processes"] for path in saved(run.checkpoints)}


ADAPTED = [*MIXED, "train.steps=4", "model.lora={rank: 4}", "model.gradient_checkpointing=true"]


@pytest.fixture(scope="module")
def adapted_alone(tmp_path_factory):
    """The run of one process, once for all that are compared with it; nothing is changed in its folder."""
    return go(tmp_path_factory.mktemp("alone"), *COMMON, *ADAPTED).run


@pytest.mark.slow
def test_fsdp_is_saved_in_shards_resumed_and_exported(tmp_path, adapted_alone):
    """An adapter, activation checkpointing and a moving reference; on from the last checkpoint but one."""
    from kl_comedy.training.export import export_policy

    run = over(tmp_path / "run", "fsdp", *ADAPTED)
    assert_same(run, adapted_alone, atol=1e-5)
    export_policy(run, load_config(run.path / "config.yaml"), tmp_path / "out", which="newest")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in weights_of(run).items():
        assert torch.equal(exported[name], tensor), name
    resumed = go(shorn(tmp_path / "run", tmp_path / "in one"), *COMMON, *ADAPTED, "resume=auto").run
    assert_resumed(tmp_path / "in one", at=3)
    assert_same(resumed, adapted_alone, atol=1e-5)
    assert writers(resumed) == {3: 2, 4: 1}


@pytest.mark.slow
def test_a_run_of_two_processes_is_extended_by_two(tmp_path):
    """Every process begins with its part of the earlier run's checkpoint; the folder is filled by the first."""
    setup = [*MIXED, "train.eval_every=2", "eval.at_start=false"]
    alone = go(tmp_path / "alone", *COMMON, *setup, "train.steps=4").run
    first = over(tmp_path / "first", "fsdp", *setup, "train.steps=2")
    weights_before = weights_of(first)
    extended = over(tmp_path / "longer", "fsdp", *setup, "train.steps=4", f"resume={first.path}")
    assert extended.summary()["extends"] == {"run": first.path.name, "update": 2}
    assert_resumed(tmp_path / "longer", at=2)
    assert_same(extended, alone, atol=1e-5)
    for name, tensor in weights_of(first).items():
        assert torch.equal(weights_before[name], tensor), name


@pytest.mark.slow
def test_a_finished_run_is_left_alone_by_processes_that_are_there_already(tmp_path):
    """Rank 0 tells the others when they are connected; each ends with code 0, and with 2 where the config differs."""
    run = over(tmp_path / "run", "ddp", "train.steps=1", "resume=auto")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    ranks = start_ranks(tmp_path / "run", "ddp", "train.steps=1", "resume=auto")
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert sum(rank.output.count("is already finished") for rank in ranks) == 1
    ranks = start_ranks(tmp_path / "run", "ddp", "train.steps=1", "seed=7", f"resume={run.path}")
    assert [rank.wait(DEADLINE_S) for rank in ranks] == [2, 2], [rank.output for rank in ranks]
    assert "was trained with another seed" in ranks[0].output
    assert all("Traceback" not in rank.output for rank in ranks)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert run_in(tmp_path / "run").path == run.path


@pytest.mark.slow
def test_fsdp_resumes_with_its_teacher_and_refuses_another(tmp_path):
    folder = tmp_path / "teacher"
    teacher_hash = save_teacher(folder)
    settings = [f"reference.teacher.source={folder}", "algorithm.reward_weight=0", "kl=opd/reverse", "train.steps=3"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    run = over(tmp_path / "run", "fsdp", *settings)
    assert teacher_hash in (run.path / "spool.jsonl").read_text(), "of the whole weights, sharded or not"
    earlier = shorn(tmp_path / "run", tmp_path / "more")
    shutil.copytree(earlier, tmp_path / "other")
    assert_same(over(earlier, "fsdp", *settings, "resume=auto"), alone, atol=1e-5)
    assert_resumed(earlier, at=2)
    save_teacher(folder, factor=1.01)
    ranks = start_ranks(tmp_path / "other", "fsdp", *settings, "resume=auto")
    codes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert codes == [1, 1]
    for rank in ranks:
        assert rank.output.count("failed: the teacher reference is not the one this run began with") == 1
        assert "Traceback" not in rank.output


@pytest.mark.slow
@pytest.mark.parametrize("microbatch", [96, 100_000])
def test_every_rank_asks_the_teacher_behind_a_server(tmp_path, teacher_url, microbatch):
    """100,000 tokens: one micro-batch, so that the second rank has no row to ask for."""
    settings = [f"reference.teacher={{source: pocket, url: '{teacher_url}'}}", *SERVED_TERMS, "train.steps=3"]
    settings += [f"train.microbatch_tokens={microbatch}"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    assert_same(over(tmp_path / "run", "fsdp", *settings), alone, atol=2e-5)


@pytest.mark.slow
def test_a_teacher_that_fails_one_rank_ends_all_with_its_reason(tmp_path, teacher_url):
    settings = [f"reference.teacher={{source: pocket, url: '{teacher_url}'}}", *SERVED_TERMS, "train.steps=3"]
    ranks = start_ranks(tmp_path / "run", "fsdp", *settings, modules=["failing_teacher"])
    codes = [rank.wait(DEADLINE_S) for rank in ranks]
    assert codes == [1, 1], [rank.output for rank in ranks]
    for rank in ranks:
        assert rank.output.count("reference.teacher.url") == 1, rank.output
        assert "Traceback" not in rank.output, rank.output


@pytest.mark.slow
@pytest.mark.parametrize(("written", "devices"), [("ddp", 4), ("single", 2)])
def test_a_checkpoint_goes_on_under_another_strategy_in_more_processes(tmp_path, adapted_alone, written, devices):
    """One in shards goes on in one process: test_fsdp_is_saved_in_shards_resumed_and_exported."""
    if written == "single":
        first_folder = adapted_alone.path.parent
        first_writers = 1
    else:
        first_folder = tmp_path / "run"
        first_writers = 2
        over(first_folder, written, *ADAPTED)
    earlier = shorn(first_folder, tmp_path / "more")
    run = over(earlier, "fsdp", *ADAPTED, "resume=auto", devices=devices)
    assert_resumed(earlier, at=3)
    assert_same(run, adapted_alone, atol=1e-5)
    assert writers(run) == {3: first_writers, 4: devices}


@pytest.mark.slow
def test_ranks_that_have_nothing_to_do_are_not_waited_for(tmp_path):
    """Three ranks for few micro-batches."""
    settings = ["rollout.prompts_per_batch=12", "train.steps=3", "train.microbatch_tokens=100000"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    assert_same(over(tmp_path / "many", "fsdp", *settings, devices=3), alone, atol=1e-5)


@pytest.mark.slow
def test_copies_on_two_nodes_each_in_two_shards_train_what_one_process_trains(tmp_path):
    """HSDP, 2 x 2; audits too, whose gradients come from shards of which there are copies."""
    settings = [*MIXED, "train.steps=3", "audit.every=1", "audit.terms=[own,grpo]"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    run = over(tmp_path / "four", "fsdp", *settings, "train.shards=node", nodes=2)
    assert writers(run)[3] == 4
    assert_same(run, alone, atol=1e-5)


@pytest.mark.slow
def test_killed_over_two_processes_and_resumed_by_one(tmp_path):
    """kill -9 of one rank ends the run; its checkpoint, written in shards, goes on in a single process."""
    whole = go(tmp_path / "whole", *COMMON, *MIXED, "train.steps=6").run
    folder = tmp_path / "killed"
    go_on = tmp_path / "go_on"
    process = start(folder, "fsdp", "resume=auto", *MIXED, "train.steps=6", *WAITS, env=waits(2, go_on))
    deadline = time.monotonic() + DEADLINE_S
    while not list(folder.glob("tiny-*/checkpoints/step-00000002.ckpt")):
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline, "no checkpoint in time"
        time.sleep(0.005)
    (child,) = children(process.pid)
    os.kill(child, signal.SIGKILL)
    go_on.touch()
    code, output = finish(process)
    assert code == 1
    assert "Traceback" not in output
    assert re.search(
        rf"^failed: rank 1 \(process {child}\) was killed by SIGKILL at update 2 of 6; resume with: ", output, re.M
    )
    assert step_of(saved(run_in(folder).checkpoints)[-1]) == 2
    assert damage(run_in(folder).checkpoint) is None
    arguments = [f"output={folder}", *COMMON, *MIXED, "train.steps=6", "resume=auto"]
    Command("train", TINY, *arguments, *WAITS, cwd=tmp_path).finish()
    assert_resumed(folder, at=2)
    assert_same(run_in(folder), whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_each_other_one_in_one_line(tmp_path, victim):
    """Rank 1 dies while rank 0 does not listen to it; rank 0 dies, which started rank 1."""
    folder = tmp_path / "killed"
    where = waits(1, tmp_path / "go_on")
    process = start(folder, "ddp", "resume=auto", "train.steps=3", *WAITS, env=where)
    deadline = time.monotonic() + DEADLINE_S
    while not list(folder.glob("tiny-*/checkpoints/step-00000001.ckpt")):
        assert process.poll() is None, process.output
        assert time.monotonic() < deadline, process.output
        time.sleep(0.01)
    (child,) = children(process.pid)
    if victim == 0:
        killed = process.pid
        os.kill(killed, signal.SIGKILL)
        (tmp_path / "go_on").touch()
        end = "has ended"  # rank 1 did not start rank 0, so it cannot know by which signal
        expected_code = -signal.SIGKILL
    else:
        killed = child
        os.kill(killed, signal.SIGKILL)
        end = "was killed by SIGKILL"
        expected_code = 1
    code, output = finish(process)
    expected = f"failed: rank {victim} (process {killed}) {end} at update 1 of 3; resume with: kl-comedy train "
    (line,) = [line for line in output.splitlines() if "failed: " in line]
    assert line.removeprefix("rank 1 ").startswith(expected), output
    assert " resume=auto " in line, output
    assert "Traceback" not in output
    assert "Killed" not in output
    assert code == expected_code
    if victim == 1:  # rank 0 writes the summary
        assert json.loads((run_in(folder).path / "summary.json").read_text())["status"] == "FAILED"


@pytest.mark.slow
def test_a_rank_that_stands_still_keeps_the_others_waiting_and_changes_nothing(tmp_path):
    """One rank is stopped for five seconds in the other's update, as on a node that swaps or shares its cores."""
    alone = go(tmp_path / "alone", *COMMON, *MIXED, "train.steps=6").run
    folder = tmp_path / "slow"
    go_on = tmp_path / "go_on"
    ranks = start_ranks(folder, "fsdp", *MIXED, "train.steps=6", *WAITS, env=waits(2, go_on))
    ranks[0].wait_for(folder, "tiny-*/checkpoints/step-00000002.ckpt")
    ranks[1].send_signal(signal.SIGSTOP)
    go_on.touch()
    time.sleep(5)
    assert ranks[0].poll() is None, "rank 0 did not wait"
    assert not (run_in(folder).path / "summary.json").exists(), "rank 0 continued alone"
    ranks[1].send_signal(signal.SIGCONT)
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
    assert_same(run_in(folder), alone, atol=1e-5)


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path):
    alone = go(tmp_path / "alone", *COMMON, "train.steps=3").run
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    overrides = [f"output={tmp_path / 'run'}", *COMMON, "train.steps=3", "train.strategy=ddp", "train.devices=2"]
    done = subprocess.run(
        [*launcher, "-m", "kl_comedy.cli", "train", str(TINY), *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert_same(run_in(tmp_path / "run"), alone, atol=1e-5)


def children(pid):
    """Processes started by ``pid`` that are kl-comedy too (not its reward workers)."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        pids += (task / "children").read_text().split()
    return [int(child) for child in pids if b"kl-comedy\0train" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_update(tmp_path):
    folder = tmp_path / "run"
    settings = ["resume=auto", *MIXED, "train.steps=5000", "train.eval_every=0"]
    ranks = start_ranks(folder, "fsdp", *settings)
    ranks[0].wait_for(folder, "tiny-*/checkpoints/step-00000002.ckpt")
    ranks[1].send_signal(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [75, 75], [rank.output for rank in ranks]
    assert sum(rank.output.count("stopped by SIGUSR1") for rank in ranks) == 1
    step = step_of(run_in(folder).checkpoint)
    assert json.loads((run_in(folder).path / "summary.json").read_text())["status"] == "KILLED"
    ranks = start_ranks(folder, "fsdp", *settings)
    ranks[0].wait_for(folder, f"tiny-*/checkpoints/step-{step + 2:08d}.ckpt")
    ranks[0].send_signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [1, 1], [rank.output for rank in ranks]
    assert_resumed(folder, at=step)


@pytest.mark.slow
def test_a_mistake_is_told_once(tmp_path):
    code, output = finish(start(tmp_path / "run", "fsdp", "train.replica_gib=0.00001"))
    assert code == 2
    assert output.count("train.replica_gib: got") == 1
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_taken_port_is_one_line_and_no_rank_waits_at_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        process = start(tmp_path / "run", "fsdp", env=address)
        code, output = finish(process)
    assert code == 2, output
    assert output.count("error: MASTER_ADDR:MASTER_PORT: got '127.0.0.1:") == 1, output
    assert "Traceback" not in output
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {".output"}


@pytest.mark.parametrize(
    ("overrides", "env", "message"),
    [
        ([], {"WORLD_SIZE": "4"}, "train.devices: got 2; allowed: train.devices x train.nodes = 4 (WORLD_SIZE"),
        (["rollout.prompts_per_batch=3"], {}, "rollout.prompts_per_batch: got 3; allowed: a multiple of 2"),
        pytest.param(
            ["model.source=/nowhere"],
            {},
            "model.source: got '/nowhere'",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["WORLD_SIZE", "batch", "no policy"],
)
def test_a_mistake_over_ranks_is_one_line_and_leaves_nothing(tmp_path, overrides, env, message):
    ranks = start_ranks(tmp_path, "ddp", *overrides, env=env)
    codes = [rank.wait() for rank in ranks]
    output = "".join(rank.output for rank in ranks)
    assert codes == [2, 2], output
    assert output.count("error: ") == 1, output
    assert message in output, output
    assert "Traceback" not in output, output
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {".output"}
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.killpg(rank.pid, 0)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.strategy=fsdp", "train.devices=4"], r"train\.devices: got 4; allowed: at most 2"),
        (
            ["rollout.backend=hf_server", "rollout.options={servers: 3}"],
            r"rollout\.options\.servers: got 3; allowed: at most 1 \(a node has 2 GPUs",
        ),
        (
            ["rollout.backend=hf_server", "train.strategy=fsdp", "train.devices=2"],
            r"train\.devices: got 2; allowed: at most 1 \(a node has 2 GPUs, 2 of them for train.devices, and a server",
        ),
        (
            ["rollout.backend=vllm_server", "rollout.options={tensor_parallel_size: 2}"],
            r"rollout\.options\.tensor_parallel_size: got 2; allowed: at most 1",
        ),
    ],
    ids=["ranks", "servers", "ranks beside a server", "a server of two GPUs"],
)
def test_more_processes_or_engines_than_gpus_are_refused_before_anything_starts(
    tmp_path, monkeypatch, overrides, message
):
    monkeypatch.setattr("kl_comedy.training.fit.pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(Sampler, "check_installed", lambda self: None)  # vLLM may be missing here
    with pytest.raises(UserError, match=message):
        go(tmp_path, *overrides)
    assert not list(tmp_path.iterdir())


def test_a_rank_without_gpu_is_refused_on_all_ranks():
    class OneWithGpu(Ranks):
        def gather(self, item):
            return ["cuda", item]

    with pytest.raises(UserError, match=r"model\.device: got 'auto'; allowed: cpu \(torch sees no GPU on rank 1\)"):
        load_policy(load_config(TINY, []), OneWithGpu(size=2))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("1", r"train\.devices: got 2; .* = 1 \(SLURM_NTASKS"),
        ("2", "train.devices, train.nodes: .*--ntasks-per-node=2"),
    ],
    ids=["one task", "the tasks of another step"],
)
def test_other_numbers_of_processes_than_srun_started_are_refused(monkeypatch, tasks, message):
    monkeypatch.setenv("SLURM_NTASKS", tasks)
    with pytest.raises(UserError, match=message) as error:
        cluster_environment(load_config(TINY, ["train.strategy=ddp", "train.devices=2"]))
    assert "\n" not in str(error.value)


@pytest.fixture
def two_tasks_of_srun(monkeypatch):
    """The environment of two tasks on a node whose name in SLURM is none of the network."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        # Set first, so that what the code sets is removed after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    values = {
        "NTASKS": "2",
        "NTASKS_PER_NODE": "2",
        "JOB_NUM_NODES": "1",
        "NNODES": "1",
        "NODELIST": "no-such-host[1-2]",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def test_the_ranks_of_one_node_of_slurm_meet_on_loopback(two_tasks_of_srun):
    environment = cluster_environment(load_config(TINY, ["train.strategy=ddp", "train.devices=2"]))
    assert environment.main_address == "127.0.0.1"


def test_nodes_of_slurm_whose_name_cannot_be_resolved_are_refused(two_tasks_of_srun, monkeypatch):
    config = load_config(TINY, ["train.strategy=ddp", "train.devices=1", "train.nodes=2"])
    for name, value in {"NTASKS_PER_NODE": "1", "JOB_NUM_NODES": "2", "NNODES": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(
        UserError, match=r"^MASTER_ADDR: got 'no-such-host1'; allowed: an address of the first node"
    ) as error:
        cluster_environment(config)
    assert "\n" not in str(error.value)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert cluster_environment(config).main_address == "10.0.0.1"


def test_a_damaged_checkpoint_falls_back_and_goes_on_to_the_same_end(tmp_path, caplog):
    run = go(tmp_path, "train.steps=4").run
    metrics = metrics_of(run)
    weights = weights_of(run)
    (run.path / "summary.json").unlink()
    shard = saved(run.checkpoints)[-1] / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:1000])
    resumed = go(tmp_path, "train.steps=4", "resume=auto").run
    assert "step-00000004.ckpt is damaged (__0_0.distcp has 1000 bytes" in caplog.text
    assert_resumed(tmp_path, at=3)
    assert resumed.path == run.path
    assert metrics_of(resumed) == metrics
    for name, tensor in weights_of(resumed).items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_export_gives_the_policy_that_was_trained(tmp_path, lora):
    from kl_comedy.training.export import export_policy

    settings = ["train.steps=2"]
    if lora:
        # Alpha over rank is not its inverse, and not PEFT's default.
        settings += ["model.lora={rank: 4, alpha: 6}", "optimizer.lr=1e-2"]
    run = go(tmp_path / "run", *settings).run
    config = load_config(run.path / "config.yaml")
    made = export_policy(run, config, tmp_path / "out", which="newest")
    assert step_of(made) == 2
    exported = load_file(tmp_path / "out" / "model.safetensors")
    trained = weights_of(run)
    assert set(exported) == set(trained)
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"
    for folder in (run.policy, tmp_path / "out"):
        card = (folder / "README.md").read_text()
        assert "library_name: transformers" in card
        assert "sequence_reverse" in card
        assert config_hash(config) in card
        assert "heldout, reward" in card
        bars_per_row = {line.count("|") for line in card.splitlines() if line.startswith("|")}
        assert bars_per_row == {3}, "tables of two columns"
    with pytest.raises(UserError, match="not an empty folder"):
        export_policy(run, config, tmp_path / "out", which="newest")
    with pytest.raises(UserError, match="allowed: newest, best, 1, 2"):
        export_policy(run, config, tmp_path / "other", which="7")
    assert step_of(export_policy(run, config, tmp_path / "best", which="best")) == 2
    if lora:
        assert (run.adapter / "adapter_model.safetensors").is_file()
        exported_adapter = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
        assert exported_adapter.keys() == load_file(run.adapter / "adapter_model.safetensors").keys()
        # The run's own policy was merged by the same code: what is right is W + alpha / rank B A.
        base = dict(full_weights(load_model(dataclasses.replace(config.model, lora=None)).model))
        for adapter in (exported_adapter, load_file(run.adapter / "adapter_model.safetensors")):
            expected = with_products(base, adapter, scaling=6 / 4)
            assert set(exported) == set(expected)
            for name, weight in expected.items():
                torch.testing.assert_close(exported[name].double(), weight, atol=1e-7, rtol=1e-6, msg=name)
        settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"]) == (4, 6)


def with_products(base, adapter, *, scaling):
    """Every weight in float64, with ``scaling`` B A added where the file ``adapter`` has factors."""
    weights = {name: weight.double() for name, weight in base.items()}
    factors = {name.removeprefix("base_model.model."): factor.double() for name, factor in adapter.items()}
    modules = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    assert modules
    assert len(factors) == 2 * len(modules)
    for module in modules:
        update = scaling * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        assert update.abs().max() > 1e-4, "training has moved the adapter"
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + update
    return weights


@pytest.mark.slow
def test_the_evaluate_command_of_a_lora_run_works(tmp_path, kl_comedy):
    summary = go(tmp_path, "train.steps=2", "model.lora={rank: 4}", "data.eval.heldout.limit=4").summary
    code, stdout, errors = kl_comedy(*shlex.split(summary["evaluate_command"])[1:], "--format", "json")
    assert code == 0, errors
    (row,) = json.loads(stdout)
    metrics = metrics_of(run_in(tmp_path))
    assert row["reward"] == metrics[2, "eval/heldout/reward"]
    assert row["kl/exact_reverse_sequence"] == pytest.approx(
        metrics[2, "eval/heldout/kl/exact_reverse_sequence"], rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.devices=2"], "train.devices: got 2; allowed: 1 with train.strategy: single"),
        (["train.strategy=ddp", "train.devices=3"], "rollout.prompts_per_batch: got 4; allowed: a multiple of 3"),
        (["train.strategy=fdsp"], "did you mean 'fsdp'"),
    ],
    ids=["two of a single strategy", "a batch that does not divide", "a misspelt strategy"],
)
def test_impossible_numbers_of_processes(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(TINY, overrides)


def test_the_number_of_processes_is_not_part_of_the_config_hash():
    other = load_config(TINY, ["train.strategy=fsdp", "train.devices=2", "train.nodes=2", "train.replica_gib=1"])
    assert config_hash(other) == config_hash(load_config(TINY, []))
