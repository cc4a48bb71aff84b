"""Tests that need a GPU, all marked ``gpu``: ``make gpu`` runs them and the bench.

They need torch, transformers, lightning, peft, accelerate, omegaconf, rich, typer, psutil and pytest, and no network.
``KL_COMEDY_GPU_TESTS_DEVICE=cpu`` rehearses the same tests on a CPU; without it they are skipped where there is no GPU.
"""

import os
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first product on a GPU

import pytest
import torch
import torch.distributed as dist

from machine_runs import DEVICE, save_policy

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    gpu_is_missing = DEVICE == "cuda" and not torch.cuda.is_available()
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if gpu_is_missing:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU here"))


@pytest.fixture
def device():
    if DEVICE == "cuda":
        return torch.device(DEVICE, 0)
    return torch.device(DEVICE)


@pytest.fixture
def deterministic():
    """As ``train.deterministic`` does; no TF32."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """A folder with a small policy of Qwen2.5's shape, and a tokenizer with as many entries as its vocabulary."""
    folder = tmp_path_factory.mktemp("qwen")
    save_policy(folder)
    return folder


@pytest.fixture
def one_process(tmp_path):
    """The default process group, of this process alone."""
    backend = "gloo"
    if DEVICE == "cuda":
        # gloo too: some of what the ranks exchange is on the CPU.
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
