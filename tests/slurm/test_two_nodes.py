"""A run over two nodes that a person starts by srun, one process on each: weights as on one."""

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def weights_of(run):
    return load_file(Path(run) / "policy" / "model.safetensors")


def assert_close(run, expected_run):
    """The weights differ by rounding alone: the ranks' gradients are added in another order."""
    weights = weights_of(run)
    expected = weights_of(expected_run)
    assert weights.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=2e-4)


def test_srun_starts_whole_copies_on_two_nodes(cluster, tmp_path):
    # The nodes of the throw-away cluster are names of this machine.
    this_machine = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    site = Site(tmp_path, cluster | this_machine)
    words = ["train.strategy=ddp", "train.nodes=2", f"output={tmp_path / 'runs'}", *overrides(4)]
    train = [sys.executable, "-m", "kl_comedy.cli", "train", TINY]
    site.run("srun", "--nodes=2", "--ntasks-per-node=1", "--time=10", *train, *words)
    # One run, though two processes made it.
    (run,) = (tmp_path / "runs").glob("tiny-*")
    assert_close(run, alone(tmp_path, 4))


def overrides(steps):
    return [f"train.steps={steps}", "train.threads=1", "train.eval_every=0"]


def alone(folder, steps):
    """The folder of the same run in one process: this one."""
    from kl_comedy.config import load_config
    from kl_comedy.training.run import train

    config = load_config(TINY, [*overrides(steps), f"output={folder / 'alone'}"])
    return train(config, console=Console(quiet=True), command="alone").run.path
