"""Mistakes with sweeps, as a user makes them: one line, exit code 2 (or 1 where SLURM refuses), nothing written."""

import json
import re
import sys
from pathlib import Path

import pytest

from kl_comedy.registry import PLUGIN_FILES

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
    f"train {TINY} train.strategy=fsdp train.nodes=2": r"train.nodes: got 2; allowed: 1 where nothing starts .*srun",
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "2000")
    return tmp_path


def test_a_mistake_is_one_line_and_exit_code_2(folder, kl_comedy):
    for line, message in MISTAKES.items():
        code, out, error = kl_comedy(*line.split())
        assert code == 2 and out == "", line
        assert re.match(rf"error: .*{message}", error) and "\n" not in error.strip(), error
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "folder.yaml"]), "nothing was written"


def test_without_sbatch_nothing_is_submitted_and_a_sweep_that_never_ran_has_no_place(folder, kl_comedy, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    code, _, error = kl_comedy("sweep", "good.yaml", "--slurm", "site.yaml")
    assert code == 2 and error.strip().splitlines()[-1] == (
        "error: sbatch: no such command here; run this on a login node of the cluster, or use --local N"
    )
    assert not (folder / "sweeps/good/submissions.jsonl").exists()
    code, _, error = kl_comedy("resubmit", "good")
    assert code == 2 and "this sweep never ran; say where: --slurm PROFILE or --local N" in error


def test_a_dry_run_prints_scripts_commands_and_cells_and_writes_nothing(folder, kl_comedy):
    code, out, error = kl_comedy("sweep", "good.yaml", "--slurm", "site.yaml", "--dry-run", "--format", "json")
    plan = json.loads(out)
    assert code == 0, error
    assert set(plan) == {"name", "scripts", "commands", "cells"} and set(plan["scripts"]) == {"train", "report"}
    assert [cell["name"] for cell in plan["cells"]] == ["beta0.1", "beta0.2"] and len(plan["commands"]) == 2
    assert "resume=auto" in plan["cells"][0]["command"] and "kl.0.beta=0.1" in plan["cells"][0]["command"]
    code, out, _ = kl_comedy("sweep", "two.yaml", "--dry-run")
    assert code == 0 and "nodes x processes" in out and "2 x 1" in out
    assert not (folder / "sweeps").exists()


def test_a_name_is_given_and_a_changed_plugin_refused(folder, kl_comedy, monkeypatch):
    (folder / "noted.py").write_text("FIRST = 1\n")
    words = ("sweep", "good.yaml", "--name", "second", "--plugin", "noted.py")
    code, out, error = kl_comedy(*words, "--dry-run", "--format", "json")
    assert code == 0 and json.loads(out)["name"] == "second", error
    monkeypatch.setenv("PATH", str(folder))  # without sbatch the sweep is written and nothing runs
    assert kl_comedy(*words, "--slurm", "site.yaml")[0] == 2
    sweep = folder / "sweeps/second"
    manifest = json.loads((sweep / "manifest.json").read_text())
    assert set(manifest["plugin_hashes"]) == {"noted.py"} and (sweep / "plugins/noted.py").read_text() == "FIRST = 1\n"
    run = sweep / "runs" / f"{manifest['cells'][1]['name']}-{manifest['cells'][1]['config_hash']}-1"
    run.mkdir()

    (folder / "noted.py").write_text("SECOND = 1\n")
    PLUGIN_FILES.clear()
    sys.modules.pop("kl_comedy_plugin_noted")
    for command in ((*words, "--slurm", "site.yaml"), ("resubmit", "second", "--slurm", "site.yaml")):
        code, _, error = kl_comedy(*command)
        assert code == 2 and "noted.py changed since" in error and "cells 1 were trained with the older" in error
        assert "kl-comedy sweep GRID --name ANOTHER" in error, error
    code, _, error = kl_comedy("cell", "second", "0")
    assert code == 2 and "noted.py changed since" in error and "put the older source back" in error
    (run / "summary.json").write_text('{"status": "FINISHED"}')
    other = sweep / "runs" / f"{manifest['cells'][0]['name']}-{manifest['cells'][0]['config_hash']}-1"
    other.mkdir()
    (other / "summary.json").write_text('{"status": "FINISHED"}')
    code, _, error = kl_comedy("resubmit", "second")
    assert code == 0 and "note: noted.py changed since" in error and "cells 0-1 were trained" in error
    assert kl_comedy("sweep", "good.yaml", "--name", "a/b", "--local", 1)[0] == 2
    PLUGIN_FILES.clear()
    sys.modules.pop("kl_comedy_plugin_noted")
