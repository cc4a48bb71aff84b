"""Cells of several sizes in one sweep: an array and a script for each size; the profile must have a shape for all."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st

from kl_comedy.errors import UserError
from kl_comedy.slurm import submit
from kl_comedy.slurm.grid import read_grid
from kl_comedy.slurm.manifest import plan, read_sweep, write_sweep
from kl_comedy.slurm.profile import Profile, read_profile
from kl_comedy.slurm.render import scripts, share_out
from kl_comedy.slurm.status import read_status

BASE = "model: {options: {preset: tiny}}\n"
GRID = """
base: base.yaml
grid: {optimizer.lr: [0.001, 0.01, 0.1]}
rows:
  shards: {seed: 1, train.strategy: fsdp, train.nodes: 2, train.devices: 4}
  copies: {seed: 2, train.strategy: ddp, train.devices: 2}
evaluate: {}
"""
PROFILE = """
time: "60"
memory: 8G
max_parallel: 4
python: python
shapes:
  - {nodes: 2, tasks_per_node: 4, memory: 64G, partition: wide}
  - {tasks_per_node: 2}
"""


@pytest.fixture
def made(tmp_path):
    for name, text in (("base", BASE), ("grid", GRID), ("site", PROFILE)):
        (tmp_path / f"{name}.yaml").write_text(text)
    manifest = plan(read_grid(tmp_path / "grid.yaml"), directory=tmp_path)
    return write_sweep(tmp_path / "sweeps" / "grid", manifest, BASE)


def test_each_size_is_an_array_of_its_own_and_the_report_waits_for_all(made, monkeypatch, tmp_path):
    slurm = FakeSlurm(monkeypatch)
    work = submit.Work(train=(0, 1, 2, 3, 4), evaluate=())
    submit.submit(made, read_profile(str(tmp_path / "site.yaml")), tmp_path / "site.yaml", work)
    shown = [" ".join(words[3:]).replace(f"{made.path}/", "") for words in slurm.calls]
    dep = "--kill-on-invalid-dep=yes"
    assert shown == [
        "--array=0-2%2 train.sbatch 0",
        f"--array=0-2%2 --dependency=aftercorr:1 {dep} evaluate.sbatch 0",
        "--array=3%1 train-2x4.sbatch 0",
        f"--array=3%1 --dependency=aftercorr:3 {dep} evaluate-2x4.sbatch 0",
        "--array=4%1 train-1x2.sbatch 0",
        f"--array=4%1 --dependency=aftercorr:5 {dep} evaluate-1x2.sbatch 0",
        f"--dependency=afterany:1:2:3:4:5:6 {dep} report.sbatch",
    ]
    asked = {
        file.name: [line.removeprefix("#SBATCH --") for line in file.read_text().splitlines() if "#SBATCH" in line]
        for file in made.path.glob("*.sbatch")
    }
    assert {"nodes=2", "ntasks-per-node=4", "mem=64G", "partition=wide"} <= set(asked["train-2x4.sbatch"])
    assert {"nodes=1", "ntasks-per-node=2", "mem=8G"} <= set(asked["train-1x2.sbatch"])
    assert {"nodes=1", "ntasks-per-node=1", "mem=8G"} <= set(asked["train.sbatch"])
    assert {"nodes=1", "ntasks-per-node=1", "mem=64G"} <= set(asked["evaluate-2x4.sbatch"])

    slurm.queue = "".join(f"{job}|{task}|RUNNING|n1||None\n" for job, task in ((1, 0), (1, 1), (1, 2), (3, 3), (5, 4)))
    seen = read_status(made)
    assert [row.job for row in seen.rows] == ["1_0", "1_1", "1_2", "3_3", "5_4"]
    assert seen.counts() == {"RUNNING": 5} and not submit.missing_work(made, seen)
    assert submit.active_jobs(made) == ["1_0", "1_1", "1_2", "3_3", "5_4"]
    submit.cancel(made, submit.active_jobs(made))
    assert slurm.calls[-1] == ["scancel", "1", "3", "5"]


def test_scripts_are_those_of_the_sizes_that_are_asked_for(made, tmp_path):
    profile = read_profile(str(tmp_path / "site.yaml"))
    found = scripts(made, profile, made.manifest.cells[3:])
    assert list(found) == ["train-1x2", "train-2x4", "evaluate-1x2", "evaluate-2x4", "report"]
    for text in found.values():
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_cell_without_a_shape_is_refused_before_anything_is_submitted(made, monkeypatch):
    slurm = FakeSlurm(monkeypatch)
    profile = Profile(name="p", time="1", shapes=[Profile(name="p", time="1", nodes=2, tasks_per_node=4)])
    words = (
        r"cell 4 \(copies\): .* is 1 x 2, .* takes .* 1 x 1, 2 x 4 only; add shapes: \[\{nodes: 1, tasks_per_node: 2"
    )
    with pytest.raises(UserError, match=words):
        submit.submit(made, profile, Path("p.yaml"), submit.Work(train=(0, 4), evaluate=()))
    assert slurm.calls == [] and not list(made.path.glob("*.sbatch"))
    submit.submit(made, profile, Path("p.yaml"), submit.Work(train=(0, 3), evaluate=()))
    assert len(slurm.calls) == 5


MISTAKES = {
    "shapes: {nodes: 2}": r"shapes: got \{'nodes': 2\}; allowed: a list of mappings",
    "shapes: [{node: 2}]": r"shapes\.0\.node: no such key .* did you mean 'nodes'\?",
    "shapes: [{nodes: 2}, {nodes: 2}]": r"shapes\.1: got '2 nodes with 1 tasks on each'; allowed: another size",
    "shapes: [{memory: 1G}]": r"shapes\.0: got '1 nodes with 1 tasks on each'; allowed: another size",
    "shapes: [{nodes: 2, max_parallel: 3}]": r"shapes\.0\.max_parallel: no such key .*belongs to the whole profile",
    "shapes: [{nodes: 0}]": r"shapes\.0: nodes: got 0; allowed: at least 1",
    "servers: {command: 'x {port}'}\nshapes: [{nodes: 2}]": r"shapes\.0: servers\.nodes: .* nodes of their own",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_shape_is_one_clear_error(tmp_path, text):
    (tmp_path / "p.yaml").write_text("time: '1'\n" + text)
    with pytest.raises(UserError, match=MISTAKES[text]):
        read_profile(str(tmp_path / "p.yaml"))


def test_a_sweep_from_before_cells_had_sizes_is_read_as_it_was(made, tmp_path):
    """Its digest, which was made without them, still holds; and planned again it is the same sweep."""
    old = Path(__file__).parents[1] / "golden" / "sweep_manifest.json"
    (tmp_path / "old").mkdir()
    shutil.copy(old, tmp_path / "old" / "manifest.json")
    found = read_sweep(tmp_path / "old")
    assert found.cell(0).size == (1, 1)
    assert found.manifest.digest == json.loads(old.read_text())["digest"]
    assert write_sweep(tmp_path / "old", found.manifest, "") == found
    assert read_sweep(made.path) == made and made.cell(3).size == (2, 4)


@given(st.one_of(st.none(), st.integers(1, 40)), st.lists(st.integers(1, 30), min_size=2, max_size=6))
def test_places_are_shared_out_without_waste(limit, lengths):
    shares = share_out(limit, lengths)
    if limit is None:
        assert shares == [None] * len(lengths)
        return
    assert all(1 <= share <= length for share, length in zip(shares, lengths, strict=True))
    assert sum(shares) == max(len(lengths), min(limit, sum(lengths)))
