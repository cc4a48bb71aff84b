"""Plant one bug at a time and run the tests that must find it: ``make mutation`` or ``python tests/mutation.py``.

Each mutant is a rule of tests/mutants.py, planted at the one place of a copy of src/ that it fits, whatever variables
and files are called. A mutant survives when all of its test files pass; then the suite has a hole. The table says which
test failed first. Mutants are of the kind a maintainer makes: a wrong sign, mask, bound, index or argument, an option
that is ignored, state that goes stale.

    python tests/mutation.py                    all mutants
    python tests/mutation.py k3 resume          those whose name contains one of the words
    python tests/mutation.py --markdown FILE    also write the table; rows of mutants that are not run stay as they are
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:  # run as a program
    sys.path.insert(0, str(ROOT))
from tests.mutants import MUTANTS, Mutant  # noqa: E402
from tests.mutation_rules import Place, places, replaced  # noqa: E402

SRC = ROOT / "src" / "kl_comedy"
SURVIVED = "**survived**"


ALSO_TESTED_IN = {
    "kl": ["exact", "training/test_loss.py", "training/test_padding.py"],
    "objective": ["exact/test_policy_certificates.py", "training/test_padding.py"],
    "lab": ["exact/test_peers_readings.py"],
    "statistics": ["evaluation/test_scores.py", "tracking/test_tables.py"],
    "tracking": ["cli/test_results.py", "cli/test_results_export.py"],
}
"""Tests below tests/ of a package or module, beside those of its own folder or file."""


def place_of(mutant: Mutant) -> Place:
    """Where the mutant is planted. Raises ValueError where it fits no place, or more than one."""
    candidates = list(places(mutant.old, SRC, mutant.inside))
    if len(candidates) == 1:
        return candidates[0]
    files = ", ".join(str(place.file.relative_to(SRC)) for place in candidates)
    if not candidates:
        files = "none"
    raise ValueError(f"{mutant.name}: {mutant.old!r} must fit one place of the package; it fits {files}")


def tests_of(mutant: Mutant, file: Path) -> list[str]:
    """The words for pytest: the mutant's own, or the tests of the package that ``file`` is in."""
    if mutant.tests:
        return mutant.tests.split()
    name = file.relative_to(SRC).parts[0]
    if name.endswith(".py"):
        mirrored = f"tests/test_{name}"
    else:
        mirrored = f"tests/{name}"
    others = ALSO_TESTED_IN.get(name.removesuffix(".py"), [])
    return [mirrored, *[f"tests/{other}" for other in others]]


def first_failure(mutant: Mutant) -> tuple[Path, str | None]:
    """The file that ``mutant`` is planted in, and the first test that fails then; None where it survives."""
    place = place_of(mutant)
    # A test that is named may be slow; of a whole package only the fast ones are run.
    selected = "not slow and not gpu"
    if "::" in mutant.tests:
        selected = "not gpu"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", selected]
    command += tests_of(mutant, place.file)
    with tempfile.TemporaryDirectory(prefix="kl_comedy_mutant_") as folder:
        copy = Path(folder) / "kl_comedy"
        shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / place.file.relative_to(SRC)).write_text(replaced(place, mutant.new))
        environment = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode == 0:
        return place.file, None
    if result.returncode not in (1, 2):  # 2: a test file that cannot be imported
        output = f"{result.stdout[-1000:]}{result.stderr}"
        raise RuntimeError(f"{mutant.name}: pytest ended with {result.returncode}\n{output}")
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, flags=re.MULTILINE)
    if match is None:
        return place.file, "(a test)"
    return place.file, match[1]


def update_table(file: Path, name: str, row: str) -> None:
    """Write the table in ``file`` with the new ``row`` of one mutant; rows of mutants that are gone are dropped."""
    rows = {}
    if file.is_file():
        for line in file.read_text().splitlines():
            rows[line.split(" | ")[0].removeprefix("| ")] = line
    rows[name] = row
    table = [rows[mutant.name] for mutant in MUTANTS if mutant.name in rows]
    killed = sum(SURVIVED not in line for line in table)
    summary = f"`python tests/mutation.py --markdown results/mutation/README.md`: {killed} of {len(table)} found, "
    summary += "each in its last run."
    missing = len(MUTANTS) - len(table)
    if missing:
        summary += f" {missing} more rules of tests/mutants.py have no row: they have not been run."
    head = ["# Planted bugs and the tests that find them", "", summary, "", "<!-- unchecked: rerun -->", ""]
    columns = ["| bug | file | first test that fails |", "|---|---|---|"]
    file.write_text("\n".join([*head, *columns, *table]) + "\n")


def selected_mutants(words: list[str]) -> list[Mutant]:
    if not words:
        return list(MUTANTS)
    return [mutant for mutant in MUTANTS if any(word in mutant.name for word in words)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--check", action="store_true", help="only check that every mutant can be planted")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="mutants at a time")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    mutants = selected_mutants(options.words)
    if options.check:
        for mutant in mutants:
            replaced(place_of(mutant), mutant.new)
        return 0
    # A command in the background of a script ignores interrupts, and so would the tests, some of which interrupt a run.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    outcomes = ThreadPoolExecutor(options.jobs).map(first_failure, mutants)
    survivors = 0
    for mutant, (file, failure) in zip(mutants, outcomes, strict=True):
        if failure is None:
            survivors += 1
            outcome = SURVIVED
        else:
            outcome = f"`{failure}`"
        row = f"| {mutant.name} | `{file.relative_to(SRC)}` | {outcome} |"
        print(row, flush=True)
        if options.markdown:
            update_table(options.markdown, mutant.name, row)
    print(f"{len(mutants) - survivors} of {len(mutants)} mutants found")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())
