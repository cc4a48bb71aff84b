"""What CI may skip is on a list; the list's patterns are those of skips that exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests import skips

TESTS = Path(__file__).parent
SKIPPED_FILE = "import pytest\npytest.importorskip('a_module_that_does_not_exist', reason='no such tool')\n"
SKIPPED_TEST = "import pytest\n\n@pytest.mark.skipif(True, reason='torch sees no GPU here')\ndef test_gpu(): ...\n"


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_skip_that_is_not_on_the_list_fails_and_one_on_the_list_does_not(tmp_path, workers, capsys):
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS.parent)!r})\nfrom tests import skips\n"
        "def pytest_runtest_logreport(report): skips.note(report)\n"
        "def pytest_collectreport(report): skips.note(report)\n"
    )
    (tmp_path / "test_gpu.py").write_text(SKIPPED_TEST)
    notes = tmp_path / "skips.txt"

    def run_tests():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, str(tmp_path)]
        subprocess.run(command, cwd=tmp_path, env={"KL_COMEDY_SKIPS": str(notes)}, capture_output=True)

    run_tests()
    assert skips.main(notes) == 0
    assert "1  torch sees no GPU here\n" in capsys.readouterr().out
    (tmp_path / "test_tool.py").write_text(SKIPPED_FILE)
    run_tests()
    assert skips.main(notes) == 1
    assert "1  no such tool   <- not on" in capsys.readouterr().out


def test_every_pattern_of_the_list_is_the_reason_of_a_skip_that_exists():
    sources = "\n".join(file.read_text() for file in TESTS.rglob("*.py") if file.name != Path(__file__).name)
    assert [pattern for pattern in skips.allowed_patterns() if not re.search(pattern, sources)] == []
