"""A cell over two nodes: shards in one process on each, the same weights as the same cell on one machine."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from sites import Site

from kl_comedy.config import schema

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TINY = Path(__file__).parents[1] / "integration" / "tiny.yaml"
PROFILE = (
    'partition: main\ntime: "10"\nnodes: 2\ntasks_per_node: 1\nsignal_seconds: 60\n'
    'environment: {OMP_NUM_THREADS: "1", MASTER_ADDR: 127.0.0.1, GLOO_SOCKET_IFNAME: lo}\n'
)


def _has_strategy():
    return "strategy" in {field.name for field in dataclasses.fields(schema.TrainConfig)}


@pytest.mark.skipif(not _has_strategy(), reason="train.strategy: fsdp is not there yet")
def test_a_cell_in_fsdp2_over_two_nodes_is_signalled_requeued_and_ends_as_on_one(cluster, tmp_path):
    from safetensors.torch import load_file

    site = Site(tmp_path, cluster)
    (tmp_path / "site.yaml").write_text(PROFILE)
    settings = "train.steps: 40, train.threads: 1, train.eval_every: 0, train.checkpoint_every: 10"
    (tmp_path / "two.yaml").write_text(
        f"base: {TINY}\noverrides: {{{settings}, train.strategy: fsdp, train.nodes: 2}}\n"
    )
    (tmp_path / "one.yaml").write_text(f"base: {TINY}\noverrides: {{{settings}}}\n")
    job = site.kl_comedy("sweep", "two.yaml", "--slurm", "site.yaml").stdout.split()[0]
    site.wait(lambda: any(row["step"] >= 2 for row in site.status("two")))
    site.run("scancel", "--signal=USR1", f"{job}_0")
    site.wait(site.idle, 400)
    (row,) = site.status("two")
    assert (row["state"], row["step"], row["attempts"]) == ("FINISHED", 40, 2), row
    journal = (tmp_path / "sweeps/two/cells/00000.jsonl").read_text().splitlines()
    assert [json.loads(line)["code"] for line in journal if "code" in json.loads(line)] == [75, 0]
    site.kl_comedy("sweep", "one.yaml", "--local", "1")
    (alone,) = site.status("one")
    two, one = (load_file(f"{found['run']}/policy/model.safetensors") for found in (row, alone))
    assert two.keys() == one.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-4)
