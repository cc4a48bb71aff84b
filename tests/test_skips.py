"""What CI may skip is on a list; the list's patterns are those of skips that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import skips

TESTS = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(TESTS.parent)!r})
from tests import skips
def pytest_runtest_logreport(report): skips.note(report)
def pytest_collectreport(report): skips.note(report)
"""
ALLOWED_SKIP = "import pytest\n\n@pytest.mark.skipif(True, reason='torch sees no GPU here')\ndef test_gpu(): ...\n"
REFUSED_SKIP = "import pytest\npytest.importorskip('a_module_that_does_not_exist', reason='no such tool')\n"


def notes_of(folder, workers):
    """The file of skips that the tests of the folder write."""
    notes = folder / "skips.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(folder)]
    subprocess.run(command, cwd=folder, env={"KL_COMEDY_SKIPS": str(notes)}, capture_output=True)
    return notes


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one process", "xdist"]
)
def test_a_skip_that_is_not_on_the_list_fails_and_one_on_the_list_does_not(tmp_path, workers, capsys):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_gpu.py").write_text(ALLOWED_SKIP)
    assert skips.main(notes_of(tmp_path, workers)) == 0
    assert "1  torch sees no GPU here\n" in capsys.readouterr().out

    (tmp_path / "test_tool.py").write_text(REFUSED_SKIP)
    assert skips.main(notes_of(tmp_path, workers)) == 1
    assert "1  no such tool   <- not on" in capsys.readouterr().out


def test_every_pattern_of_the_list_is_the_reason_of_a_skip_that_exists():
    other_files = [file for file in TESTS.rglob("*.py") if file.name != Path(__file__).name]
    sources = "\n".join(file.read_text() for file in other_files)
    for pattern in skips.allowed_patterns():
        assert re.search(pattern, sources), f"no test is skipped for {pattern}"
