"""docs/faults.md: every row names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
ROWS = [
    [part.strip() for part in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| .*`tests/", line)
]


def functions(file):
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_rows_are_whole_and_match_the_tests_of_faults():
    assert all(len(row) == 3 and all(row) for row in ROWS)
    named = {tuple(row[2].strip("`").split("::")) for row in ROWS}
    assert [(file, name) for file, name in named if name not in functions(file)] == []
    for file in ("tests/training/test_faults.py", "tests/training/test_stop_phases.py"):
        assert {(file, name) for name in functions(file) if name.startswith("test_")} <= named
