"""Which tests were skipped, and whether they may be: ``python tests/skips.py FILE``.

``FILE`` is written by pytest runs with ``KL_COMEDY_SKIPS=FILE``. A skipped test is a test that looks at nothing. A
machine without SLURM, a browser or a model would skip whole groups and stay green, so in CI every reason must be on
the committed list ``may_skip.txt``. Exit code 1 where one is not.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

ALLOWED = Path(__file__).with_name("may_skip.txt")


def note(report) -> None:
    """Append a skipped test, or a skipped file, to the file that the environment names.

    Called in every process of pytest: with xdist, files that are skipped while they are collected are known to the
    workers alone. So a test may be noted more than once.
    """
    file = os.environ.get("KL_COMEDY_SKIPS")
    if not file or not report.skipped:
        return
    if isinstance(report.longrepr, tuple):  # file, line, reason: a test that was skipped
        reason = report.longrepr[2]
    else:
        reason = str(report.longrepr)
    line = json.dumps([report.nodeid, reason.removeprefix("Skipped: ")])
    with open(file, "a") as notes:
        notes.write(line + "\n")


def groups_of(notes: Path) -> Counter[str]:
    """The number of tests, or whole files, skipped for each reason."""
    if not notes.exists():
        return Counter()
    noted = {tuple(json.loads(line)) for line in notes.read_text().splitlines()}
    return Counter(reason for _, reason in noted)


def allowed_patterns() -> list[str]:
    lines = ALLOWED.read_text().splitlines()
    return [line.partition(" | ")[0] for line in lines if line and not line.startswith("#")]


def main(notes: Path) -> int:
    patterns = allowed_patterns()
    groups = groups_of(notes)
    exit_code = 0
    for reason, count in sorted(groups.items()):
        line = f"skipped: {count:4d}  {reason}"
        if not any(re.search(pattern, reason) for pattern in patterns):
            line += "   <- not on tests/may_skip.txt"
            exit_code = 1
        print(line)
    if not groups:
        print("skipped: nothing")
    return exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
