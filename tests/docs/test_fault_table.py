"""docs/faults.md: every row names a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
ROWS = []
for line in PAGE.read_text().splitlines():
    if re.match(r"\| .*`tests/", line):
        ROWS.append([cell.strip() for cell in line.strip("|").split("|")])


def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def named_tests():
    """The file and the name of the test in each row."""
    return {tuple(row[2].strip("`").split("::")) for row in ROWS}


def test_rows_are_whole():
    assert ROWS
    for row in ROWS:
        assert len(row) == 3, row
        assert all(row), row


def test_rows_name_tests_that_exist():
    for file, name in named_tests():
        assert name in functions(file), file


@pytest.mark.parametrize("file", ["tests/training/test_faults.py", "tests/training/test_stop_phases.py"])
def test_every_test_of_a_fault_has_a_row(file):
    tests = {(file, name) for name in functions(file) if name.startswith("test_")}
    assert tests <= named_tests()
