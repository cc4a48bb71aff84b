"""Fetch the sources of the register: python bench/register/fetch.py DIR

Each repository of rows.yaml becomes DIR/OWNER/NAME with its pinned commit alone, by git over the network. A commit
that is there is kept; one that cannot be fetched is reported, and its rows are then re-implementations. Nothing of it
belongs into this repository.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

REMOTE = "https://github.com/{}.git"
NOT_FETCHED = "could not be fetched"


def fetch(folder: Path, repository: str, commit: str, remote: str = REMOTE) -> str:
    """Fetch one commit. Returns a status line."""
    clone = folder / repository
    name = f"{repository}@{commit[:7]}"
    clone.mkdir(parents=True, exist_ok=True)
    if not (clone / ".git").exists():
        _git(clone, "init", "--quiet")
    if _git(clone, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        return f"{name}: already fetched"
    error = _git(clone, "fetch", "--quiet", "--depth", "1", remote.format(repository), commit)
    if error is not None:
        return f"{name}: {NOT_FETCHED}: {error}"
    # Checked out, so that the newest commit of the clone is this one until someone pulls.
    error = _git(clone, "checkout", "--quiet", "--detach", commit)
    if error is not None:
        return f"{name}: {NOT_FETCHED}: {error}"
    return f"{name}: fetched"


def _git(clone: Path, *words: str) -> str | None:
    """Run git in a clone. Returns the last line of its error, or None on success."""
    completed = subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=False)
    if completed.returncode == 0:
        return None
    lines = completed.stderr.strip().splitlines()
    return lines[-1] if lines else "no output"


def main(arguments: list[str]) -> int:
    from register.run import rows_of

    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python bench/register/fetch.py DIR", file=sys.stderr)
        return 2
    commits = {(row["repository"], row["commit"]) for row in rows_of() if "repository" in row}
    failed = 0
    for repository, commit in sorted(commits):
        line = fetch(Path(arguments[0]), repository, commit)
        failed += NOT_FETCHED in line
        print(line, flush=True)
    # One missing source means that its rows are re-implementations; the others still run the released code.
    return 1 if failed == len(commits) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
