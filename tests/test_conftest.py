"""The fixtures of tests/conftest.py, in two small files of tests that run one after the other."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS / "support")!r}]
from tests.conftest import plugins_of_other_files
"""
PLUGIN = """
from kl_comedy.registry import ESTIMATORS

@ESTIMATORS.register("my_k1", source="test", needs="log_ratio")
def my_k1(log_ratio):
    "The log-ratio."
    return log_ratio
"""
LOADS = """
from kl_comedy.plugins import PLUGIN_FILES
from kl_comedy.registry import ESTIMATORS, load_plugin_file

def test_that_loads_a_plugin():
    load_plugin_file("plugin.py", check_names=False)
    assert ESTIMATORS.get("my_k1").fn(3.0) == 3.0
    assert list(PLUGIN_FILES) == ["plugin.py"]

def test_that_has_it_still():
    assert "my_k1" in ESTIMATORS.names()
"""
BEGINS = """
from kl_comedy.plugins import PLUGIN_FILES
from kl_comedy.registry import ESTIMATORS

@ESTIMATORS.register("collected", source="test", needs="log_ratio")
def collected(log_ratio):
    "Registered when the file is collected, before the tests of the first file."

def test_that_begins_without_the_plugin_of_the_first_file():
    assert "my_k1" not in ESTIMATORS.names()
    assert not PLUGIN_FILES
    assert "collected" in ESTIMATORS.names()
    assert "k1" in ESTIMATORS.names()
"""


def test_what_a_file_of_tests_registers_is_gone_after_it(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "test_first.py").write_text(LOADS)
    # It loads the plugin again, which is then no module that has been imported and registers nothing.
    (tmp_path / "test_second.py").write_text(BEGINS + LOADS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_first.py", "test_second.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout
