"""Several processes train what one trains: equal losses, metrics and weights, whatever the strategy and KL terms."""

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from choice_suite import problem, write_suite
from safetensors.torch import load_file
from test_training import TINY, go, metrics_of

from kl_comedy.config import load_config
from kl_comedy.errors import RunFailed, UserError
from kl_comedy.training.checkpoint import damage, manifest
from kl_comedy.training.run_folder import RunDir, saved, step_of

MIXED = [
    "kl=[{estimator: exact, placement: reward, beta: 0.02, baseline: before}, "
    "{estimator: k3, placement: loss, beta: 0.02, reference: ema}, {estimator: k1, placement: reward, beta: 0.01, "
    "level: sequence, baseline: own}]",
    "algorithm.advantage=reinforce_pp_baseline",
    "reference.ema_decay=0.5",
]
PLACEMENTS = {
    "k1 in reward": ["kl=[{estimator: k1, placement: reward, beta: 0.05}]"],
    "k1 in reward, before the baseline": ["kl=[{estimator: k1, placement: reward, beta: 0.05, baseline: before}]"],
    "k1 in reward, own baseline": ["kl=[{estimator: k1, placement: reward, beta: 0.05, baseline: own}]"],
    "k1 of the sequence in reward": ["kl=[{estimator: k1, placement: reward, beta: 0.05, level: sequence}]"],
    "k2 in loss": ["kl=[{estimator: k2, placement: loss, beta: 0.05}]"],
    "k2 of the sequence in loss": ["kl=[{estimator: k2, placement: loss, beta: 0.01, level: sequence}]"],
    "exact in reward": ["kl=[{estimator: exact, placement: reward, beta: 0.05}]"],
    "exact in loss": ["kl=[{estimator: exact, placement: loss, beta: 0.05}]"],
    "exact in loss, adapter": ["kl=[{estimator: exact, placement: loss, beta: 0.05}]", "model.lora={rank: 4}"],
    "exact in loss, activation checkpointing": [
        "kl=[{estimator: exact, placement: loss, beta: 0.05}]",
        "model.gradient_checkpointing=true",
    ],
    "mixed": MIXED,
    "mixed, three layers": [*MIXED, "model.options={preset: tiny, layers: 3}", "model.gradient_checkpointing=true"],
}
COMMON = [
    "train.microbatch_tokens=96",
    "train.threads=1",
    "rollout.bucket_mib=1",
    "data.eval.heldout.limit=9",
]
PROGRAM = [sys.executable, "-m", "kl_comedy.cli", "train", str(TINY)]
DEADLINE_S = 500


def start(folder, *overrides):
    """A run in processes of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*PROGRAM, f"output={folder}", *COMMON, *overrides],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        start_new_session=True,
    )


def end(process):
    """Kill a run with every process that it started; nothing where they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def over(folder, strategy, *overrides, devices=2):
    """Train over processes to the end, within :data:`DEADLINE_S`; what hangs fails here. Returns the run."""
    process = start(folder, f"train.strategy={strategy}", f"train.devices={devices}", *overrides)
    try:
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        end(process)
    assert process.returncode == 0, said
    return run_in(folder)


def run_in(folder):
    (path,) = folder.glob("tiny-*")
    return RunDir(path=path)


def weights_of(run):
    return load_file(run.policy / "model.safetensors")


def assert_same(run, expected, *, atol):
    found, wanted = metrics_of(run), metrics_of(expected)
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=20 * atol, abs=20 * atol), key
    theirs = weights_of(expected)
    for name, tensor in weights_of(run).items():
        torch.testing.assert_close(tensor, theirs[name], atol=atol, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def until_checkpoint(folder, process, step):
    deadline = time.monotonic() + DEADLINE_S
    while not list(folder.glob(f"tiny-*/checkpoints/step-{step:08d}.ckpt")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_processes_train_what_one_trains(tmp_path, strategy):
    suite = write_suite(tmp_path, [problem(n) for n in range(1, 13)])  # 3 passes: one has no partner
    words = [*MIXED, "train.steps=4", f"eval.suites=[{suite}]"]
    alone = go(tmp_path / "alone", *COMMON, *words).run
    assert metrics_of(alone)[4, "eval/pick/accuracy_half_width"] > 0
    (tmp_path / strategy).mkdir()
    assert_same(over(tmp_path / strategy, strategy, *words), alone, atol=1e-5)


@pytest.fixture(scope="module")
def alone_with(tmp_path_factory):
    """Runs in a single process, each once for all strategies."""

    @functools.cache
    def run(placement):
        return go(tmp_path_factory.mktemp("alone"), *COMMON, *TWENTY, *PLACEMENTS[placement]).run

    return run


FORKS = multiprocessing.get_context("forkserver")
"""Processes that begin with everything imported: the imports take longer than twenty updates."""
FORKS.set_forkserver_preload(
    [
        "kl_comedy.training.run",
        "lightning",
        "peft",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
    ]
)


def forked(folder, strategy, *overrides, devices=2):
    """As :func:`over`, in processes that are there already, as torchrun's are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [*COMMON, *overrides, f"train.strategy={strategy}", f"train.devices={devices}"]
    processes = [FORKS.Process(target=member, args=(rank, devices, port, folder, settings)) for rank in range(devices)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0] * devices, [path.read_text() for path in folder.parent.glob("said-*.txt")]
    return run_in(folder)


def member(rank, world, port, folder, settings):
    """One process of :func:`forked`: torchrun's environment, and a run."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    with open(folder.parent / f"said-{rank}.txt", "w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        go(folder, *settings)


TWENTY = ["train.steps=20", "train.checkpoint_every=0", "optimizer.lr=3.0e-4"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_twenty_updates_equal_the_single_process_run(tmp_path, alone_with, strategy, placement):
    run = forked(tmp_path / strategy, strategy, *TWENTY, *PLACEMENTS[placement])
    assert_same(run, alone_with(placement), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_shards_under_autocast_train_what_one_process_trains(tmp_path, strategy):
    """bf16 passes of the same micro-batches on the same float32 weights; sums over processes are in float32."""
    settings = ["train.steps=4", "train.precision=bf16", "train.eval_every=0"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    assert_same(over(tmp_path / strategy, strategy, *settings), alone, atol=2e-5)


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


def test_fsdp_is_saved_in_shards_resumed_and_exported(tmp_path):
    """An adapter, activation checkpointing and a moving reference; on from the last checkpoint but one."""
    from kl_comedy.training.export import export_policy

    alone = go(tmp_path / "alone", *COMMON, *ADAPTED).run
    run = over(tmp_path / "run", "fsdp", *ADAPTED)
    assert_same(run, alone, atol=1e-5)
    export_policy(run, load_config(run.path / "config.yaml"), tmp_path / "out", which="newest")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in weights_of(run).items())
    resumed = go(shorn(tmp_path / "run", tmp_path / "in one"), *COMMON, *ADAPTED, "resume=auto").run
    assert_same(resumed, alone, atol=1e-5)
    assert writers(resumed) == {3: 2, 4: 1}


@pytest.mark.slow
@pytest.mark.parametrize(("written", "resumed"), [("fsdp", "fsdp"), ("ddp", "fsdp")])
def test_a_checkpoint_goes_on_under_another_strategy_in_more_processes(tmp_path, written, resumed):
    alone = go(tmp_path / "alone", *COMMON, *ADAPTED).run
    over(tmp_path / "run", written, *ADAPTED)
    run = over(shorn(tmp_path / "run", tmp_path / "more"), resumed, *ADAPTED, "resume=auto", devices=4)
    assert_same(run, alone, atol=1e-5)
    assert writers(run) == {3: 2, 4: 4}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 4])
def test_any_number_of_processes(tmp_path, devices):
    """Three and four ranks for few micro-batches: some have nothing to do, and nobody waits for them."""
    settings = ["rollout.prompts_per_batch=12", "train.steps=3", "train.microbatch_tokens=100000"]
    alone = go(tmp_path / "alone", *COMMON, *settings).run
    assert_same(over(tmp_path / "many", "fsdp", *settings, devices=devices), alone, atol=1e-5)


@pytest.mark.slow
def test_killed_over_two_processes_and_resumed_by_one(tmp_path):
    """kill -9 of one rank ends the run; its checkpoint, written in shards, goes on in a single process."""
    whole = go(tmp_path / "whole", *COMMON, *MIXED, "train.steps=6").run
    folder = tmp_path / "killed"
    process = start(folder, "train.strategy=fsdp", "train.devices=2", "resume=auto", *MIXED, "train.steps=6")
    until_checkpoint(folder, process, 2)
    (child,) = children(process.pid)
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    at = step_of(saved(run_in(folder).checkpoints)[-1])
    assert 2 <= at < 6 and damage(run_in(folder).checkpoint) is None
    resumed = go(folder, *COMMON, *MIXED, "train.steps=6", "resume=auto").run
    assert_same(resumed, whole, atol=1e-5)


@pytest.mark.slow
def test_a_rank_that_stands_still_keeps_the_others_waiting_and_changes_nothing(tmp_path):
    """One rank is stopped for ten seconds in the middle of an update, as on a node that swaps or shares its cores."""
    alone = go(tmp_path / "alone", *COMMON, *MIXED, "train.steps=6").run
    folder = tmp_path / "slow"
    process = start(folder, "train.strategy=fsdp", "train.devices=2", *MIXED, "train.steps=6")
    until_checkpoint(folder, process, 2)
    (child,) = children(process.pid)
    os.kill(child, signal.SIGSTOP)
    time.sleep(10)
    assert process.poll() is None and not (run_in(folder).path / "summary.json").exists(), "nobody went on without it"
    os.kill(child, signal.SIGCONT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert_same(run_in(folder), alone, atol=1e-5)


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path):
    alone = go(tmp_path / "alone", *COMMON, "train.steps=3").run
    words = ["--standalone", "--nproc-per-node=2", "-m", *PROGRAM[2:]]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *words,
            f"output={tmp_path / 'run'}",
            *COMMON,
            "train.steps=3",
            "train.strategy=ddp",
            "train.devices=2",
        ],
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
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += (task / "children").read_text().split()
    return [int(n) for n in found if b"kl_comedy.cli" in Path(f"/proc/{n}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_process_stops_all_after_the_same_update(tmp_path, strategy):
    folder = tmp_path / "run"
    how = [
        f"train.strategy={strategy}",
        "train.devices=2",
        "resume=auto",
        *MIXED,
        "train.steps=400",
        "train.eval_every=0",
    ]
    process = start(folder, *how)
    until_checkpoint(folder, process, 2)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, said
    assert said.count("stopped by SIGUSR1") == 1
    at = step_of(run_in(folder).checkpoint)
    assert json.loads((run_in(folder).path / "summary.json").read_text())["status"] == "KILLED"
    process = start(folder, *how)
    until_checkpoint(folder, process, at + 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 1
    process.stderr.close()


@pytest.mark.slow
def test_a_mistake_is_told_once(tmp_path):
    process = start(tmp_path / "run", "train.strategy=fsdp", "train.devices=2", "rollout.replica_gib=0.00001")
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2 and said.count("rollout.replica_gib: got") == 1 and "Traceback" not in said


def test_a_damaged_checkpoint_falls_back_and_goes_on_to_the_same_end(tmp_path, caplog):
    whole = go(tmp_path / "whole").run
    cut = go(tmp_path / "cut").run
    (cut.path / "summary.json").unlink()
    for path in saved(cut.checkpoints):
        if step_of(path) == 8:
            (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:1000])
    resumed = go(tmp_path / "cut", "resume=auto").run
    assert "step-00000008.ckpt is damaged (__0_0.distcp has 1000 bytes" in caplog.text
    assert resumed.path == cut.path and metrics_of(resumed) == metrics_of(whole)
    assert all(torch.equal(tensor, weights_of(whole)[name]) for name, tensor in weights_of(resumed).items())


def test_a_full_disk_ends_the_run_with_what_was_complete(tmp_path, monkeypatch):
    from kl_comedy.training import checkpoint as checkpoints

    real, calls = checkpoints.dcp.FileSystemWriter.write_data, []

    def full(self, *arguments):
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(self, *arguments)

    monkeypatch.setattr(checkpoints.dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(RunFailed, match=r"update 3 cannot be written \(No space left on device\); .* from update 2"):
        go(tmp_path, "train.steps=4")
    resumed = go(tmp_path, "train.steps=4", "resume=auto").run
    assert [step_of(path) for path in saved(resumed.checkpoints)] == [3, 4]


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_export_gives_the_policy_that_was_trained(tmp_path, lora):
    from kl_comedy.training.export import export_policy

    settings = ["train.steps=2", *(["model.lora={rank: 4}"] if lora else [])]
    run = go(tmp_path / "run", *settings).run
    config = load_config(run.path / "config.yaml")
    made = export_policy(run, config, tmp_path / "out", which="newest")
    assert step_of(made) == 2
    exported, kept = load_file(tmp_path / "out" / "model.safetensors"), weights_of(run)
    assert set(exported) == set(kept) and all(torch.equal(exported[name], kept[name]) for name in kept)
    with pytest.raises(UserError, match="not an empty folder"):
        export_policy(run, config, tmp_path / "out", which="newest")
    with pytest.raises(UserError, match="allowed: newest, best, 1, 2"):
        export_policy(run, config, tmp_path / "other", which="7")
    assert step_of(export_policy(run, config, tmp_path / "best", which="best")) == 2
    if lora:
        assert (run.adapter / "adapter_model.safetensors").is_file()
        assert (
            load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors").keys()
            == load_file(run.adapter / "adapter_model.safetensors").keys()
        )


@pytest.mark.slow
def test_the_evaluate_command_of_a_lora_run_works(tmp_path):
    summary = go(tmp_path, "train.steps=2", "model.lora={rank: 4}", "data.eval.heldout.limit=4").summary
    import shlex

    words = shlex.split(summary["evaluate_command"])
    done = subprocess.run(
        [sys.executable, "-c", "from kl_comedy.cli.main import run; run()", *words[1:], "--format", "json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    metrics = metrics_of(run_in(tmp_path))
    assert row["reward"] == metrics[2, "eval/heldout/reward"]
    assert row["kl/exact_reverse_sequence"] == pytest.approx(
        metrics[2, "eval/heldout/kl/exact_reverse_sequence"], rel=1e-3, abs=1e-6
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.devices=2"], "train.devices: got 2; allowed: 1 with train.strategy: single"),
        (["train.strategy=ddp", "train.devices=3"], "rollout.prompts_per_batch: got 4; allowed: a multiple of 3"),
        (["train.strategy=fdsp"], "did you mean 'fsdp'"),
        (["train.strategy=fsdp", "audit.every=1"], "audit.every: got 1"),
    ],
)
def test_impossible_numbers_of_processes(overrides, said):
    with pytest.raises(UserError, match=said):
        load_config(TINY, overrides)


def test_how_many_processes_is_not_what_a_run_is():
    from kl_comedy.config import config_hash

    other = load_config(TINY, ["train.strategy=fsdp", "train.devices=2", "train.nodes=2", "rollout.replica_gib=1"])
    assert config_hash(other) == config_hash(load_config(TINY, []))
