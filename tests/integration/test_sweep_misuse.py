"""Mistakes with sweeps, as a user makes them: one line, exit code 2 (or 1 where SLURM refuses), nothing written."""

import re
import sys
from pathlib import Path

import pytest

from kl_comedy.cli.main import run

TINY = Path(__file__).with_name("tiny.yaml")
FILES = {
    "good.yaml": f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.2]}}\n",
    "key.yaml": f"base: {TINY}\ngrid: {{kl.0.betta: [0.1, 0.2]}}\n",
    "top.yaml": f"base: {TINY}\nseed: [1, 2]\n",
    "value.yaml": f"base: {TINY}\ngrid: {{kl.0.estimator: [k1, k33]}}\n",
    "twice.yaml": f"base: {TINY}\nrows: {{a: {{optimizer.lr: 0.1}}, b: {{optimizer.lr: 0.1}}}}\n",
    "same.yaml": f"base: {TINY}\ngrid: {{kl.0.beta: [0.1, 0.1]}}\n",
    "base.yaml": "base: nowhere.yaml\n",
    "bases.yaml": "base: [a, b]\n",
    "two.yaml": f"base: {TINY}\nrows: {{one: {{}}, two: {{seed: 1, train.strategy: fsdp, train.nodes: 2}}}}\n",
    "site.yaml": 'time: "10"\n',
    "typo_site.yaml": 'time: "10"\npartitoin: main\n',
    "time_site.yaml": "time: 4:00:00\n",
    "wide_site.yaml": 'time: "10"\nshapes: [{node: 2}]\n',
    "nodes_site.yaml": 'time: "10"\nnodes: zero\n',
}
MISTAKES = {
    "sweep key.yaml --local 1": r"cell 0 \(betta0.1\): kl.0.betta: no such key .* did you mean 'beta'\?",
    "sweep top.yaml --local 1": r"seed: no such key .* did you mean 'seeds'\?",
    "sweep value.yaml --local 1": r"cell 1 \(k33\): .*'k33'.* did you mean 'k3'\?",
    "sweep twice.yaml --local 1": r"cells 0 \(a\) and 1 \(b\) are the same run",
    "sweep same.yaml --local 1": r"grid.kl.0.beta: got 0.1; allowed: each value once",
    "sweep base.yaml --local 1": r"no such config file: .*nowhere.yaml",
    "sweep bases.yaml --local 1": r"base: got \['a', 'b'\]; allowed: text",
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
    "sweep good.yaml --slurm nodes_site.yaml --dry-run": r"nodes: got 'zero'; allowed: a whole number",
    "sweep two.yaml --slurm site.yaml": r"cell 1 \(two\): train.nodes x train.devices is 2 x 1, .* site takes "
    r".* 1 x 1 only; add shapes: \[\{nodes: 2, tasks_per_node: 1\}\]",
    "sweep two.yaml --local 1": r"cell 1 \(two\): train.nodes is 2, and --local is one machine; use --slurm PROFILE",
    "sweep good.yaml --slurm wide_site.yaml --dry-run": r"shapes.0.node: no such key .* did you mean 'nodes'\?",
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


def said(monkeypatch, capsys, line):
    monkeypatch.setattr(sys, "argv", ["kl-comedy", *line.split()])
    with pytest.raises(SystemExit) as ended:
        run()
    captured = capsys.readouterr()
    return ended.value.code, captured.err.strip(), captured.out


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(folder, monkeypatch, capsys, line):
    code, error, out = said(monkeypatch, capsys, line)
    assert code == 2 and out == ""
    assert re.match(rf"error: .*{MISTAKES[line]}", error) and "\n" not in error
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "folder.yaml"]), "nothing was written"


def test_without_sbatch_nothing_is_submitted_and_the_way_out_is_said(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder))
    code, error, _ = said(monkeypatch, capsys, "sweep good.yaml --slurm site.yaml")
    assert code == 2
    assert error.splitlines()[-1] == (
        "error: sbatch: no such command here; run this on a login node of the cluster, or use --local N"
    )
    assert not (folder / "sweeps/good/submissions.jsonl").exists()


def test_a_sweep_that_never_ran_does_not_know_where(folder, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(folder))
    said(monkeypatch, capsys, "sweep good.yaml --slurm site.yaml")
    code, error, _ = said(monkeypatch, capsys, "resubmit good")
    assert code == 2 and "this sweep never ran; say where: --slurm PROFILE or --local N" in error
