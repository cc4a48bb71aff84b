"""Print functions of the package, drawn by chance, for a reader who is shown them alone.

python research/scripts/drawn_functions.py [--count 10] [--seed HASH]

The seed is the hash of the last commit that touched src/, so that nobody chooses what is read. A function that its
reader cannot explain is rewritten.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHORTEST = 10
"""Lines, without decorators: shorter functions are read at a glance."""


def last_commit() -> str:
    """The hash of the last commit that touched src/."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%H", "--", "src"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def functions() -> list[tuple[str, str]]:
    """The place and the source of every function of at least :data:`SHORTEST` lines, in a fixed order."""
    candidates = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 >= SHORTEST:
                place = f"{file.relative_to(ROOT)}:{node.lineno}"
                lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
                candidates.append((place, "\n".join(lines)))
    return sorted(candidates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", default=None, help="default: the hash of the last commit that touched src/")
    options = parser.parse_args()
    seed = options.seed or last_commit()
    print(f"seed {seed}")
    for place, source in random.Random(seed).sample(functions(), options.count):
        print(f"\n--- {place}\n{source}")


if __name__ == "__main__":
    main()
