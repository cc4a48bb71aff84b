"""Which Pythons the check of the wheel finds; the check itself takes minutes and runs in CI."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "research" / "scripts" / "light_install.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("light_install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def machine(script, monkeypatch, tmp_path):
    """A machine whose path and pyenv have nothing but what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_the_versions_are_those_of_pyproject(script):
    assert script.supported_versions() == ["3.11", "3.12", "3.13"]


def test_this_python_is_found_first(script, machine):
    executable(machine / "bin" / "python3.11", "echo 3.11")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert script.find_python(version) == sys.executable


def test_what_is_on_the_path_but_does_not_run_is_passed_over(script, machine):
    # As pyenv's, where the version is not selected, and as a Python without ensurepip.
    executable(machine / "bin" / "python3.98", "echo 'command not found' >&2; exit 127")
    works = executable(machine / "pyenv" / "versions" / "3.98.1" / "bin" / "python", "echo 3.98")
    assert script.find_python("3.98") == works
    executable(Path(works), "echo 3.97")
    assert script.find_python("3.98") is None


def test_pyenv_says_where_its_versions_are(script, machine):
    executable(machine / "bin" / "pyenv", f"echo {machine}/elsewhere")
    works = executable(machine / "elsewhere" / "versions" / "3.98.1" / "bin" / "python", "echo 3.98")
    assert script.find_python("3.98") == works


def test_the_newest_version_of_this_machine_is_taken(script, machine, monkeypatch):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(script, "supported_versions", lambda: ["3.97", version, "3.98"])
    assert script.newest_python() == sys.executable
    monkeypatch.setattr(script, "supported_versions", lambda: ["3.98"])
    with pytest.raises(SystemExit, match=r"no Python of 3\.98"):
        script.newest_python()


def test_cuda_packages_are_passed_on_and_nothing_else(script, tmp_path):
    source = tmp_path / "first"
    target = tmp_path / "second"
    target.mkdir()
    for name in ("nvidia", "nvidia_cublas-13.1.dist-info", "torch", "triton"):
        (source / name).mkdir(parents=True)
    script.move_cuda(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["nvidia", "nvidia_cublas-13.1.dist-info"]
    assert sorted(path.name for path in source.iterdir()) == ["torch", "triton"]
