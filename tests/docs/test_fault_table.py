"""docs/faults.md: every row names a test that exists, and says what was lost."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
ROWS = [
    [part.strip() for part in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| .*`tests/", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_row_is_whole_and_its_test_exists(row):
    assert len(row) == 6 and all(row)
    file, _, name = row[5].strip("`").partition("::")
    defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in defined, f"{file} has no {name}"


def test_every_test_of_faults_has_its_row():
    named = {row[5].strip("`") for row in ROWS}
    for file in ("tests/integration/test_faults.py", "tests/integration/test_stop_phases.py"):
        tree = ast.parse((ROOT / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"{file}::{node.name}" in named
