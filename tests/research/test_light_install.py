"""The versions that the check of the wheel knows; the check itself takes minutes and runs in CI."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "research" / "scripts" / "light_install.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("light_install", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_versions_are_those_of_pyproject(script):
    assert script.supported_versions() == ["3.11", "3.12", "3.13"]
