"""Mistakes with sweeps, as a user makes them: one line, exit code 2 (or 1 where SLURM refuses), nothing written."""

import json
import re
import sys
from pathlib import Path

import pytest

from kl_comedy.plugins import PLUGIN_FILES

TINY = Path(__file__).parents[1] / "support" / "tiny.yaml"
FILES = {
    "good.yaml": f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.2]}}\n",
    "key.yaml": f"base: {TINY}\ngrid: {{kl.0.betta: [0.1, 0.2]}}\n",
    "top.yaml": f"base: {TINY}\nseed: [1, 2]\n",
    "base.yaml": "base: nowhere.yaml\n",
    "two.yaml": f"base: {TINY}\nrows: {{one: {{}}, two: {{seed: 1, train.strategy: fsdp, train.nodes: 2}}}}\n",
    "site.yaml": 'time: "10"\n',
    "typo_site.yaml": 'time: "10"\npartitoin: main\n',
    "time_site.yaml": "time: 4:00:00\n",
}
MISTAKES = {
    "sweep key.yaml --local 1": r"cell 0 \(betta0.1\): kl.0.betta: no such key .* did you mean 'beta'\?",
    "sweep top.yaml --local 1": r"seed: no such key .* did you mean 'seeds'\?",
    "sweep base.yaml --local 1": r"no such config file: .*nowhere.yaml",
    "sweep folder.yaml --local 1": r"folder.yaml is a folder; a grid is a file",
    "train TINY train.strategy=fsdp train.nodes=2": r"train.nodes: got 2; allowed: 1 where nothing starts .*srun",
    "plan folder.yaml": r"folder.yaml is a folder; a config is a file",
    "sweep goood.yaml --local 1": r"no such grid file: goood.yaml; did you mean good.yaml\?",
    "sweep good.yaml kl.0.betta=1 --local 1": r"kl.0.betta: no such key",
    "sweep good.yaml": r"say where: --slurm PROFILE for a cluster, or --local N",
    "sweep good.yaml --slurm site.yaml --local 2": r"say where: --slurm PROFILE for a cluster, or --local N",
    "sweep good.yaml --slurm nowhere": r"--slurm: no profile 'nowhere' in slurm/profiles",
    "sweep good.yaml --slurm typo_site.yaml": r"partitoin: no such key .* did you mean 'partition'\?",
    "sweep good.yaml --slurm time_site.yaml": r"time: got 14400; allowed: quoted text",
    "sweep two.yaml --slurm site.yaml": r"cell 1 \(two\): train.nodes x train.devices is 2 x 1, .* site takes "
    r".* 1 x 1 only; add shapes: \[\{nodes: 2, tasks_per_node: 1\}\]",
    "sweep two.yaml --local 1": r"cell 1 \(two\): train.nodes is 2, and --local is one machine; use --slurm PROFILE",
    "sweep good.yaml --local 1 --format yaml": r"--format: got 'yaml'; allowed: table, json",
    "status nothing": r"no sweep at nothing",
    "resubmit nothing": r"no sweep at nothing",
    "resubmit good --slurm site.yaml --local 2": r"say where: either --slurm PROFILE or --local N",
    "resubmit good --slurm typo_site.yaml": r"partitoin: no such key .* did you mean 'partition'\?",
    "cancel nothing": r"no sweep at nothing",
}
"""What is typed after ``kl-comedy``, and the error; ``TINY`` stands for the path of the tests' config."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")
    return tmp_path


@pytest.mark.parametrize(("line", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder, kl_comedy, line, message):
    words = line.replace("TINY", str(TINY)).split()
    code, out, error = kl_comedy(*words)
    assert code == 2
    assert out == ""
    assert re.match(rf"error: .*{message}", error), error
    assert "\n" not in error.strip(), error
    names = {path.name for path in folder.iterdir()}
    assert names == {*FILES, "folder.yaml"}, "nothing was written"


def test_without_sbatch_nothing_is_submitted_and_a_sweep_that_never_ran_has_no_place(folder, kl_comedy, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    code, _, error = kl_comedy("sweep", "good.yaml", "--slurm", "site.yaml")
    assert code == 2
    assert error.strip().splitlines()[-1] == (
        "error: sbatch: no such command here; run this on a login node of the cluster, or use --local N"
    )
    assert not (folder / "sweeps/good/submissions.jsonl").exists()
    code, _, error = kl_comedy("resubmit", "good")
    assert code == 2
    assert "this sweep never ran; say where: --slurm PROFILE or --local N" in error


def test_a_dry_run_prints_scripts_commands_and_cells_and_writes_nothing(folder, kl_comedy):
    code, out, error = kl_comedy("sweep", "good.yaml", "--slurm", "site.yaml", "--dry-run", "--format", "json")
    assert code == 0, error
    plan = json.loads(out)
    assert set(plan) == {"name", "scripts", "commands", "cells"}
    assert set(plan["scripts"]) == {"train", "report"}
    assert [cell["name"] for cell in plan["cells"]] == ["beta0.1", "beta0.2"]
    assert len(plan["commands"]) == 2
    assert plan["cells"][0]["values"] == {"kl.0.beta": "0.1"}
    assert plan["cells"][0]["command"] == f"kl-comedy cell {folder}/sweeps/good 0"
    assert not (folder / "sweeps").exists()


def test_a_dry_run_of_a_hostile_grid_prints_no_escape_and_a_line_for_each_cell(folder, kl_comedy):
    axes = '{data.prompt.prefix: ["a\\e[31m[red]\\nb", "c"]}'
    (folder / "hostile.yaml").write_text(f"base: {TINY}\ngrid: {axes}\n")
    code, out, error = kl_comedy("sweep", "hostile.yaml", "--dry-run")
    assert code == 0, error
    assert "\x1b" not in out
    (line,) = [line for line in out.splitlines() if "a[red] b" in line]
    assert line.startswith("0 ")


def test_a_dry_run_shows_the_sizes_of_cells_of_several_nodes(folder, kl_comedy):
    code, out, _ = kl_comedy("sweep", "two.yaml", "--dry-run")
    assert code == 0
    assert "nodes x processes" in out
    assert "2 x 1" in out
    assert not (folder / "sweeps").exists()


def forget_the_plugin():
    """As in a new process: the plugin's file is read again when it is named."""
    PLUGIN_FILES.clear()
    sys.modules.pop("kl_comedy_plugin_noted", None)


def run_folder(sweep, cell):
    return sweep / f"cells/{cell:04d}/run"


def test_a_name_is_given_and_a_changed_plugin_refused(folder, kl_comedy, monkeypatch):
    """Refused while a cell needs the older source to resume; a note where all cells have finished with it."""
    (folder / "noted.py").write_text("FIRST = 1\n")
    words = ("sweep", "good.yaml", "--name", "second", "--plugin", "noted.py")
    code, out, error = kl_comedy(*words, "--dry-run", "--format", "json")
    assert code == 0, error
    assert json.loads(out)["name"] == "second"

    monkeypatch.setenv("PATH", str(folder))  # without sbatch the sweep is written and nothing runs
    assert kl_comedy(*words, "--slurm", "site.yaml")[0] == 2
    sweep = folder / "sweeps/second"
    assert json.loads((sweep / "plugins.json").read_text())["files"] == ["noted.py"]
    assert (sweep / "plugins/noted.py").read_text() == "FIRST = 1\n"

    run_folder(sweep, 1).mkdir()
    (folder / "noted.py").write_text("SECOND = 1\n")
    forget_the_plugin()
    for command in (words, ("resubmit", "second")):
        code, _, error = kl_comedy(*command, "--slurm", "site.yaml")
        assert code == 2, command
        assert "noted.py changed since" in error, error
        assert "cells 1 were trained with the older" in error, error
        assert "kl-comedy sweep GRID --name ANOTHER" in error, error
    code, _, error = kl_comedy("cell", "second", "0")
    assert code == 2
    assert "noted.py changed since" in error, error
    assert "put the older source back" in error, error

    run_folder(sweep, 0).mkdir()
    for cell in (0, 1):
        (run_folder(sweep, cell) / "summary.json").write_text('{"status": "FINISHED"}')
    code, _, error = kl_comedy("resubmit", "second")
    assert code == 0, error
    assert "note: noted.py changed since" in error, error
    assert "cells 0-1 were trained" in error, error
    forget_the_plugin()


def test_a_name_that_is_a_path_is_refused(folder, kl_comedy):
    assert kl_comedy("sweep", "good.yaml", "--name", "a/b", "--local", 1)[0] == 2
