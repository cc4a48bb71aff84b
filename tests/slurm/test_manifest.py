"""The manifest is written once; the scripts are exactly the golden ones; profiles are checked."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import run_here
from fake_slurm import plan_sweep
from kl_comedy.config import flatten, load_config, to_plain
from kl_comedy.config.load import differing_keys
from kl_comedy.errors import UserError
from kl_comedy.plugins import PluginSet
from kl_comedy.slurm import manifest as manifest_module
from kl_comedy.slurm.local import by_seed
from kl_comedy.slurm.manifest import Plan, Sweep, read_sweep, write_sweep
from kl_comedy.slurm.profile import Container, Profile, Servers, read_profile
from kl_comedy.slurm.scripts import array_ranges, render, report_limits, share_out

GOLDEN = Path(__file__).parents[1] / "golden"
PROFILES = Path(__file__).parents[2] / "slurm" / "profiles"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of ten cells; for reading."""
    folder = tmp_path_factory.mktemp("planned")
    return plan_sweep(
        folder,
        "grid: {optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01]}\nevaluate: {}\n",
    )


@pytest.fixture
def sweep_copy(sweep, tmp_path):
    """A copy whose files a test may change."""
    shutil.copytree(sweep.path, tmp_path / "sweeps" / "grid")
    return replace(sweep, path=tmp_path / "sweeps" / "grid")


def planned_again(sweep, *, cells=None, **changes):
    """The plan of the sweep, of fewer cells or with another config of cell 3."""
    configs = [sweep.read_config(index) for index in range(len(sweep.manifest.cells))]
    if changes:
        configs[3] = replace(configs[3], **changes)
    manifest = replace(sweep.manifest, cells=sweep.manifest.cells[:cells])
    return Plan(manifest=manifest, configs=tuple(configs[:cells]), evaluation=None, plugins=PluginSet())


def files_of(sweep):
    return {path: path.read_bytes() for path in sweep.path.rglob("*") if path.is_file()}


def test_it_is_written_once_and_read_back(sweep):
    before = files_of(sweep)
    file = sweep.path / "manifest.json"
    written_at = file.stat().st_mtime_ns
    assert write_sweep(sweep.path, planned_again(sweep)) == sweep
    assert file.stat().st_mtime_ns == written_at
    assert files_of(sweep) == before
    assert read_sweep(sweep.path) == sweep


def test_another_sweep_in_its_place_is_refused(sweep):
    before = files_of(sweep)
    with pytest.raises(UserError, match="10 cells there, 3 planned now"):
        write_sweep(sweep.path, planned_again(sweep, cells=3))
    cells = list(sweep.manifest.cells)
    longer = replace(sweep.manifest, cells=(*cells[:3], replace(cells[3], steps=7), *cells[4:]))
    with pytest.raises(UserError, match=f"cell 3 has another steps: {cells[3].steps} there, 7 now"):
        write_sweep(sweep.path, replace(planned_again(sweep), manifest=longer))
    with pytest.raises(UserError, match=r"holds another sweep of this name \(cell 3 has another seed\); give the grid"):
        write_sweep(sweep.path, planned_again(sweep, seed=5))
    assert files_of(sweep) == before


def test_a_cell_holds_the_config_that_it_trains(sweep):
    """All of it: what a default is when the cell starts does not matter."""
    plain = load_config(None, ["model.options={preset: tiny}", "optimizer.lr=0.004"])
    config = sweep.read_config(3)
    assert differing_keys(config, replace(plain, name=config.name)) == []
    assert config.output == str(sweep.path / "cells/0003")
    assert config.tracking.tags == {"sweep": "grid", "cell": "3"}
    text = sweep.config(3).read_text()
    assert text.splitlines()[0] == "schema: 1"
    for key in flatten(to_plain(config)):
        name = key.split(".")[0]
        assert f"\n{name}:" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: text.index("tracking:")], r"config.yaml is damaged: it does not have tracking, which"),
        (lambda text: "", r"config.yaml: is empty; "),
        (None, r"^no such config file: "),
    ],
    ids=["cut short", "empty", "gone"],
)
def test_a_cell_whose_config_is_damaged_is_not_trained(sweep_copy, change, message):
    file = sweep_copy.config(2)
    if change is None:
        file.unlink()
    else:
        file.write_text(change(file.read_text()))
    code, _, error = run_here("cell", sweep_copy.path, 2)
    assert code == 2
    (line,) = error.splitlines()
    assert re.search(message, line.removeprefix("error: "))
    assert not sweep_copy.run(2).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema: 1", "schema: 2"), r"schema: got 2; allowed: 1 \(it was written by another version of kl_comedy\)"),
        (("\nseed: 0", "\nseed: 0\nlater: 1"), r"later: no such key \(given 1\)"),
    ],
)
def test_a_cell_of_a_later_version_is_not_trained(sweep_copy, change, message):
    file = sweep_copy.config(2)
    file.write_text(file.read_text().replace(*change))
    code, _, error = run_here("cell", sweep_copy.path, 2)
    assert code == 2
    (line,) = error.splitlines()
    assert re.search(message, line)
    assert not sweep_copy.run(2).exists()


def test_two_sweeps_planned_at_the_same_moment_do_not_share_a_folder(sweep, tmp_path, monkeypatch):
    """The second comes while the first writes its files: it waits, and then finds another sweep there."""
    folder = tmp_path / "grid"
    first_writes = threading.Event()
    second_begins = threading.Event()
    write = manifest_module.atomic_write

    def slow_write(path, *rest, **options):
        if path.parent.name == "0000":
            first_writes.set()
            second_begins.wait(60)
            # Time for the second to look for a manifest, which it must not do yet.
            time.sleep(0.3)
        write(path, *rest, **options)

    first_plan = planned_again(sweep)
    second_plan = planned_again(sweep, cells=3)
    monkeypatch.setattr(manifest_module, "atomic_write", slow_write)
    first = threading.Thread(target=write_sweep, args=(folder, first_plan))
    first.start()
    assert first_writes.wait(60)
    second_begins.set()
    with pytest.raises(UserError, match="10 cells there, 3 planned now"):
        write_sweep(folder, second_plan)
    first.join()
    assert read_sweep(folder).manifest == sweep.manifest


def test_a_sweep_is_found_by_its_name_below_the_working_folder(sweep_copy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert read_sweep(Path("grid")) == sweep_copy
    with pytest.raises(UserError, match="no sweep at gird; did you mean 'grid'"):
        read_sweep(Path("gird"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "another version of kl_comedy"),
        ({"name": "other"}, "changed by hand"),
        ({"cells": None}, "manifest.json: cells: got None"),
    ],
    ids=["another version", "a hand edit", "no cells"],
)
def test_a_changed_manifest_is_refused(sweep_copy, change, message):
    file = sweep_copy.path / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | change))
    with pytest.raises(UserError, match=message):
        read_sweep(sweep_copy.path)


def test_a_damaged_manifest_is_refused(sweep_copy):
    (sweep_copy.path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="is not a readable manifest"):
        read_sweep(sweep_copy.path)


def test_on_this_machine_every_cell_gets_its_first_seed_before_any_gets_its_second(tmp_path):
    sweep = plan_sweep(tmp_path, "grid: {optimizer.lr: [0.001, 0.01]}\nseeds: [7, 3]\n")
    cells = [sweep.cell(index) for index in by_seed(sweep, (3, 2, 1, 0))]
    order = [(cell.seed, cell.values["optimizer.lr"]) for cell in cells]
    assert order == [(3, "0.001"), (3, "0.01"), (7, "0.001"), (7, "0.01")]


PYXIS = Profile(
    name="pyxis",
    time="30",
    nodes=2,
    tasks_per_node=4,
    gpus_per_node=4,
    gpu_type="h100",
    container=Container(image="nvcr.io#site/kl:1", runtime="pyxis", mounts=["/data", "/a:/b"]),
    extra=["--exclusive"],
    qos="high",
    environment={"A": 'say "hi" `x` $(y) $HOME'},
)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("sweep_*.sbatch")), ids=lambda file: file.stem)
def test_scripts_are_the_golden_ones(sweep, file):
    """KL_COMEDY_GOLDEN=write renews them; read the diff."""
    manifest = replace(sweep.manifest, directory="/home/ada/work", name="beta")
    golden_sweep = Sweep(path=Path("/home/ada/work/sweeps/beta"), manifest=manifest)
    name, _, stage = file.stem.removeprefix("sweep_").rpartition("_")
    if name == "pyxis":
        profile = PYXIS
    else:
        profile = read_profile(str(PROFILES / f"{name}.yaml"))
    if profile.python == sys.executable:
        profile = replace(profile, python="/home/ada/.venv/bin/python")
    text = render(golden_sweep, profile, stage)
    if os.environ.get("KL_COMEDY_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


LIMITS = {
    ("30", "8G"): ("30", "8G"),
    ("1-00:00:00", "64G"): ("01:00:00", "16G"),
    ("01:00:00", None): ("01:00:00", None),
    # Without a limit, and with all memory of the node.
    ("0", "0"): ("01:00:00", "16G"),
    ("2:00:00", "9000"): ("01:00:00", "9000"),
}
"""Time limit and memory of a profile, and those of its report."""


@pytest.mark.parametrize("asked", LIMITS, ids=str)
def test_the_report_is_a_small_job(asked):
    time, memory = asked
    assert report_limits(Profile(name="p", time=time, memory=memory, signal_seconds=0)) == LIMITS[asked]


SIZES = {"gpu_1_node": (1, 8, 4, 4), "gpu_2_plus_1_nodes": (3, 8, 16, 8), "gpu_4_plus_2_nodes": (6, 8, 32, 16)}
"""Nodes and GPUs of each that are asked for; processes of the trainer and servers."""


@pytest.mark.parametrize("name", SIZES)
def test_profiles_with_servers_ask_for_whole_nodes_and_show_no_key(sweep, name):
    nodes, gpus, processes, servers = SIZES[name]
    text = render(sweep, read_profile(str(PROFILES / f"{name}.yaml")), "train")
    assert f"#SBATCH --nodes={nodes}\n" in text
    assert f"#SBATCH --gres=gpu:{gpus}\n" in text
    steps = steps_of(text)
    servers_step, trainer_step = steps[:2]
    assert f"--ntasks={servers} " in servers_step
    assert "kl_comedy.slurm.servers" in servers_step
    assert "vllm" not in servers_step
    assert servers_step.endswith(f'--cell {sweep.path} "$index" &')
    assert f"--ntasks={processes} " in trainer_step
    for step in steps:
        assert "KEY" not in step
    # An activation script may use variables that are not set, which ``set -u`` forbids.
    assert text.index("source .venv") < text.index("set -uo pipefail")
    assert text.index("set -uo pipefail") < text.index("srun ")


def steps_of(text):
    """The commands of a script that start processes on the job's nodes."""
    return [line for line in text.splitlines() if line.startswith("srun ")]


def test_a_command_of_your_own_stands_in_the_script(sweep):
    profile = Profile(name="p", time="10", servers=Servers(command="serve 'my model' --port {port}"))
    assert "-- serve 'my model' --port '{port}' &" in render(sweep, profile, "train")


PROFILE_MISTAKES = {
    "partition: gpu": "needs time",
    "time: 4:00:00": "quoted text",
    "time: '10'\npartitoin: gpu": "did you mean 'partition'",
    "time: '10'\nnodes: 0": "nodes: got 0; allowed: at least 1",
    "time: '10'\nsetup: source x": "setup: got 'source x'; allowed: a list",
    "time: '10'\npartition: \"a\\n#SBATCH --uid=0\"": "one line",
    "time: '10'\nenvironment: {A: \"a\\nb\"}": "environment.A: .*one line",
    "time: '10'\nenvironment: {'A B': 1}": "names of variables",
    "time: '10'\ncontainer: {image: x, runtime: docker}": "apptainer, pyxis",
    "time: '10'\ncontainer: {runtime: pyxis}": "container: needs image",
    "time: '10'\ntasks_per_node: 4\ngpus_per_node: 2": "gpus_per_node: got 2; allowed: 0, or at least 4",
    "time: '10'\nservers: {command: 'x {port}', gpu: 1}": "did you mean 'gpus'",
    "time: '10'\nservers: {command: 'x {port}', count: 0}": "servers.count: got 0",
    "time: '10'\nservers: {command: vllm serve}": "with {port} in it",
    "time: '10'\nservers: {command: 'vllm serve x --port {port}'}": "RequireKey .every route must require the key",
    "time: '10'\nservers: {command: 'x --api-key abc1 {port}'}": "servers.command: holds what looks like a secret",
    "time: '10'\nservers: {command: 'x --api-key=$VLLM_API_KEY {port}'}": "its key from the variable VLLM_API_KEY",
    "time: '10'\npartition: 'gpu --wrap=x'": "partition: got .* without spaces",
    "time: '10'\ncontainer: {image: x, mounts: [\"a\\nb\"]}": "container.mounts.0: .*one line",
    "time: '10'\nservers: {command: \"x ' {port}\"}": "No closing quotation",
    "time: '10'\nservers: {command: 'x {port}', ready: health}": "servers.ready: .*a path, as in /health",
    "time: '10'\nnodes: 2\nservers: {command: 'x {port}'}": "give the servers nodes of their own",
    "time: '10'\nshapes: {nodes: 2}": r"shapes: got \{'nodes': 2\}; allowed: a list of mappings",
    "time: '10'\nshapes: [{node: 2}]": r"shapes\.0\.node: no such key .* did you mean 'nodes'\?",
    "time: '10'\nshapes: [{nodes: 2}, {nodes: 2}]": r"shapes\.1: got '2 nodes with 1 tasks on each'; .* another size",
    "time: '10'\nshapes: [{memory: 1G}]": r"shapes\.0: got '1 nodes with 1 tasks on each'; allowed: another size",
    "time: '10'\nshapes: [{nodes: 2, max_parallel: 3}]": r"shapes\.0\.max_parallel: no such key",
    "time: '10'\nshapes: [{nodes: 0}]": r"shapes\.0\.nodes: got 0; allowed: at least 1",
    "time: '10'\nsignal_seconds: 900": r"signal_seconds: got 900; allowed: 0, or less than 600 \(time is 10, 600 s: ",
    "time: '0:30'\nsignal_seconds: 30": "signal_seconds: got 30; allowed: 0, or less than 30",
    "time: '2'": "signal_seconds: got 120; allowed: 0, or less than 120",
    "time: '1-0'\nsignal_seconds: 65536": "signal_seconds: got 65536; allowed: .*65535",
    "time: '1-0'\nshapes: [{nodes: 2, time: '1'}]": r"shapes\.0\.signal_seconds: got 120; allowed: 0, or less than 60",
    "time: '10'\nservers: {command: 'x {port}'}\nshapes: [{nodes: 2}]": r"shapes\.0\.servers\.nodes: .* of their own",
}


NAMES = "cpu_test, gpu, gpu_1_node, gpu_2_plus_1_nodes, gpu_4_plus_2_nodes, gpu_container; did you mean 'gpu'"


@pytest.mark.parametrize(("text", "message"), PROFILE_MISTAKES.items())
def test_a_mistake_in_a_profile_is_one_clear_error(tmp_path, text, message):
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_profile(str(file))
    assert "p.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_that_does_not_exist_names_the_nearest_one(monkeypatch):
    monkeypatch.chdir(PROFILES.parents[1])
    with pytest.raises(UserError, match=NAMES):
        read_profile("gpuu")
    with pytest.raises(UserError, match="no such profile file"):
        read_profile("nowhere/x.yaml")


@pytest.mark.parametrize("settings", ["time: '0'", "time: '1'\nsignal_seconds: 0", "time: '2:01'\nsignal_seconds: 120"])
def test_a_signal_that_never_comes_or_comes_after_the_start_is_allowed(tmp_path, settings):
    (tmp_path / "p.yaml").write_text(settings)
    assert read_profile(str(tmp_path / "p.yaml")).name == "p"


@pytest.mark.parametrize("stage", ["train", "evaluate"])
@pytest.mark.parametrize("nodes", [0, 1])
def test_steps_that_share_a_job_claim_none_of_its_memory(sweep, stage, nodes):
    """By default each claims all of it, and the second waits for the first, which waits for the second."""
    profile = Profile(name="p", time="10", memory="8G", servers=Servers(nodes=nodes))
    steps = steps_of(render(sweep, profile, stage))
    assert len(steps) == 2
    for step in steps:
        assert " --mem=0 " in step


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
@pytest.mark.parametrize("directory", ["/data/a:b", "/data/a,b"])
def test_a_folder_that_a_container_would_mount_elsewhere_is_refused(sweep, runtime, directory):
    profile = Profile(name="p", time="10", container=Container(image="x", runtime=runtime))
    with pytest.raises(UserError, match=r"the folder: got .* without : and ,"):
        render(in_directory(sweep, directory), profile, "train")


QUOTED = Profile(name="site", time="10", modules=["a b;touch x"], scratch="/s/`touch x`")


def in_directory(sweep, directory):
    """The sweep, planned in another working folder."""
    return replace(sweep, manifest=replace(sweep.manifest, directory=directory))


def test_a_path_in_a_script_is_quoted_or_refused(sweep, tmp_path):
    path = tmp_path / "my sweep #1 50%"
    text = render(replace(in_directory(sweep, "/data/my work"), path=path), QUOTED, "train")
    assert f'#SBATCH --output="{tmp_path}/my sweep #1 50%%/logs/train-%A_%a.out"\n' in text
    assert '#SBATCH --chdir="/data/my work"\n' in text
    assert "module load 'a b;touch x'\n" in text
    assert f"cell '{path}' \"$index\"" in text
    assert "\\`touch x\\`" in text
    script = tmp_path / "script"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a'b", 'a"b', "a$(x)b", "a`x`b", "a\\b", "a\x1b[2Jb"])
def test_a_name_that_no_quotes_make_safe_is_refused(sweep, tmp_path, name):
    """sbatch reads its own lines in another way than the shell does: no quoting is right for both."""
    with pytest.raises(UserError, match=r"^(--output|the working folder): got .* without quotes"):
        render(replace(sweep, path=tmp_path / name), QUOTED, "train")
    with pytest.raises(UserError, match=r"^(--output|the working folder): got .* without quotes"):
        render(in_directory(sweep, f"/{name}"), QUOTED, "train")


def test_a_shape_has_the_keys_of_its_profile_that_it_does_not_change(tmp_path):
    (tmp_path / "p.yaml").write_text(
        "time: '10'\nmemory: 8G\nenvironment: {A: true, B: null, C: 7}\ncontainer: {image: x}\n"
        "shapes: [{nodes: 2, memory: 64G}, {nodes: 3, container: null}]\n"
    )
    profile = read_profile(str(tmp_path / "p.yaml"))
    assert profile.environment == {"A": "true", "B": "", "C": "7"}
    assert [shape.memory for shape in profile.all_shapes] == ["8G", "64G", "8G"]
    assert [shape.python == "python" for shape in profile.all_shapes] == [True, True, False]
    assert {shape.time for shape in profile.all_shapes} == {"10"}


@given(st.sets(st.integers(0, 300)))
def test_ranges_cover_exactly_their_indices(indices):
    covered = set()
    text = array_ranges(indices)
    parts = text.split(",") if text else []
    for part in parts:
        first, _, last = part.partition("-")
        if not last:
            last = first
        covered.update(range(int(first), int(last) + 1))
    assert covered == indices


@given(st.one_of(st.none(), st.integers(1, 40)), st.lists(st.integers(1, 30), min_size=2, max_size=6))
def test_places_are_shared_out_without_waste(limit, lengths):
    shares = share_out(limit, lengths)
    if limit is None:
        assert shares == [None] * len(lengths)
        return
    for share, length in zip(shares, lengths, strict=True):
        assert share >= 1
        assert share <= length
    # Each has a place, also where there are fewer; no place is given that nobody can use.
    assert sum(shares) == max(len(lengths), min(limit, sum(lengths)))
