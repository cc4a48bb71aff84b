"""Fetch the pinned wheels beside this file, each into a folder of its own: python bench/peers/fetch.py [DIST ...]

The environment is not touched: ``pip download --no-deps``, then ``pip install --no-deps --target``. What is
there already is left alone. A wheel that cannot be fetched is said and skipped; its rows then say why.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.wheels import FILES, Pin, pins, sha256


def fetch(pin: Pin) -> str:
    """Fetch one distribution; returns the line that says what was done."""
    name = f"{pin.dist}=={pin.version}"
    if pin.fetched:
        return f"{name}: there already"
    FILES.mkdir(parents=True, exist_ok=True)
    failed = _pip("download", "--no-deps", "--dest", str(FILES), name) if pin.file is None else None
    if failed is None and pin.file is None:
        failed = "the index served a file of another name"
    if failed is None:
        failed = _pip("install", "--no-deps", "--no-compile", "--upgrade", "--target", str(pin.folder), str(pin.file))
    if failed is not None or pin.file is None:
        return f"{name}: could not be fetched: {failed}"
    return f"{name}: fetched, sha256 {sha256(pin.file)[:16]}"


def _pip(*arguments: str) -> str | None:
    """Run pip; the last line of its error where it fails."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("ERROR")]
    return (lines or done.stderr.strip().splitlines() or ["no reason given"])[-1]


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in pins()]
    if unknown:
        print(f"not pinned: {', '.join(unknown)}; pinned: {', '.join(pins())}", file=sys.stderr)
        return 2
    lines = [fetch(pins()[name]) for name in names or pins()]
    print("\n".join(lines))
    return 1 if all("could not be fetched" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
