"""A run over two nodes that a person starts by srun, one process on each: weights as on one."""

import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from sites import Site

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"


def assert_close(run, other):
    two, one = (load_file(Path(path) / "policy" / "model.safetensors") for path in (run, other))
    assert two.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-4)


def test_srun_starts_whole_copies_on_two_nodes(cluster, tmp_path):
    where = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    site = Site(tmp_path, {**cluster, **where})
    words = ["train.strategy=ddp", "train.nodes=2", f"output={tmp_path / 'runs'}", *overrides(4)]
    train = (sys.executable, "-m", "kl_comedy.cli", "train", TINY)
    site.run("srun", "--nodes=2", "--ntasks-per-node=1", "--time=10", *train, *words)
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
