"""Runs over several processes, started as torchrun starts them."""

import pytest
import torch
from safetensors.torch import load_file

from commands import Command, ranks_environment
from kl_comedy.processes import free_port
from kl_comedy.training.run_folder import RunDir
from training_runs import TINY, metrics_of

MIXED = [
    "kl=[{estimator: exact, placement: reward, beta: 0.02, baseline: before}, "
    "{estimator: k3, placement: loss, beta: 0.02, reference: ema}, {estimator: k1, placement: reward, beta: 0.01, "
    "level: sequence, baseline: own}]",
    "algorithm.advantage=reinforce_pp_baseline",
    "reference.ema_decay=0.5",
]
COMMON = [
    "train.microbatch_tokens=96",
    "train.threads=1",
    "train.bucket_mib=1",
    "data.eval.heldout.limit=9",
]
MODULES = ["memory_engines", "forked_servers"]
"""Imported by every rank first."""
DEADLINE_S = 400


def start_ranks(folder, strategy, *overrides, devices=2, nodes=1, env=(), modules=()):
    """A run whose processes are there already, as torchrun's are, with everything imported."""
    folder.mkdir(exist_ok=True)
    size = [f"train.strategy={strategy}", f"train.devices={devices}", f"train.nodes={nodes}"]
    words = ["train", TINY, f"output={folder}", *COMMON, *overrides, *size]
    world = devices * nodes
    port = free_port()
    ranks = []
    for rank in range(world):
        environment = ranks_environment(rank, world, port, nodes=nodes) | dict(env)
        ranks.append(Command(*words, cwd=folder, env=environment, modules=[*MODULES, *modules]))
    return ranks


def over(folder, strategy, *overrides, devices=2, nodes=1):
    """Train over processes to the end; the run."""
    ranks = start_ranks(folder, strategy, *overrides, devices=devices, nodes=nodes)
    try:
        codes = [rank.wait(DEADLINE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * len(ranks), [rank.output for rank in ranks]
    return run_in(folder)


def run_in(folder):
    (path,) = folder.glob("tiny-*")
    return RunDir(path=path)


def weights_of(run):
    return load_file(run.policy / "model.safetensors")


def assert_same(run, expected, *, atol):
    """Fails where a metric or a weight of ``run`` differs from that of the run ``expected``.

    Metrics may differ by 20 times as much as weights: they are sums over many tokens.
    """
    metrics = metrics_of(run)
    expected_metrics = metrics_of(expected)
    assert set(metrics) == set(expected_metrics)
    for key, value in expected_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=20 * atol, abs=20 * atol), key
    expected_weights = weights_of(expected)
    for name, tensor in weights_of(run).items():
        torch.testing.assert_close(
            tensor, expected_weights[name], atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
