"""``kl-comedy init``: every file it writes passes the command that reads it; ``--version``; the wheel installs."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kl_comedy
from commands import run_here

ROOT = Path(__file__).parents[2]


def run(*words, cwd, code=0):
    """Its stdout and stderr."""
    exit_code, out, err = run_here(*words, cwd=cwd)
    assert exit_code == code, err
    return out, err


def test_every_file_that_init_writes_passes_its_command(tmp_path):
    for kind in ("run", "grid", "plugin", "profile", "estimator"):
        assert run("init", kind, cwd=tmp_path)[0].startswith(f"my_{kind}.")
    assert "on-policy" in run("check", "my_run.yaml", "--no-memory", cwd=tmp_path)[0]
    scripts = run("sweep", "my_grid.yaml", "--slurm", "my_profile.yaml", "--dry-run", cwd=tmp_path)[0]
    assert "#SBATCH --partition=gpu" in scripts
    estimators = ("--term", "{estimator: my_k2, placement: loss}", "--plugin", "my_estimator.py")
    assert "token_reverse" in run("certify", *estimators, "--format", "json", cwd=tmp_path)[0]
    settings = ("rewards=[{name: ends_with_answer}]", "callbacks=[{name: print_reward}]")
    run("check", "my_run.yaml", *settings, "--no-memory", "--plugin", "my_plugin.py", cwd=tmp_path)
    assert "ends_with_answer" in run("list", "rewards", "--plugin", "my_plugin.py", "--format", "json", cwd=tmp_path)[0]
    assert "my_run.yaml exists" in run("init", "run", cwd=tmp_path, code=2)[1]
    assert "did you mean 'run'" in run("init", "runs", cwd=tmp_path, code=2)[1]
    assert "is a .py file" in run("init", "plugin", "a.yaml", cwd=tmp_path, code=2)[1]


def test_the_version_is_printed(tmp_path):
    assert run("--version", cwd=tmp_path)[0] == f"kl_comedy {kl_comedy.__version__}\n"


@pytest.mark.slow
def test_the_wheel_installs_with_its_data_and_extras(tmp_path):
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    copy = tmp_path / "source"  # setuptools writes build/ beside the sources
    subprocess.run(["git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", copy], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy], check=True)
    (wheel,) = tmp_path.glob("kl_comedy-*.whl")
    data = {str(file.relative_to(copy / "src")) for file in (copy / "src").rglob("*.*") if file.suffix != ".py"}
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name for name in data if "egg-info" not in name} <= set(packed)
    metadata = zipfile.ZipFile(wheel).read(next(name for name in packed if name.endswith("METADATA"))).decode()
    for extra in ("vllm", "dev", "gym"):
        assert f"Provides-Extra: {extra}\n" in metadata
    subprocess.run([*pip, "install", "--no-deps", "--target", tmp_path / "site", wheel], check=True)
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    command = [sys.executable, "-m", "kl_comedy.cli"]
    subprocess.run([*command, "init", "run", "r.yaml"], cwd=tmp_path, env=environment, check=True)
    words = [*command, "check", "r.yaml", "--no-memory", "--format", "json"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["processes"].startswith("single")
