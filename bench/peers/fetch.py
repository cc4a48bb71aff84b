"""Download and unpack the pinned wheels, each into its own folder: python bench/peers/fetch.py [DIST ...]

Runs ``pip download --no-deps``, then ``pip install --no-deps --target``; the environment is not changed. Existing
wheels are kept. A wheel that cannot be downloaded is reported and skipped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kl_comedy.io import sha256_file
from peers.wheels import FILES, Pin, pins

NOT_FETCHED = "could not be fetched"


def fetch(pin: Pin) -> str:
    """Fetch one distribution. Returns a status line."""
    name = f"{pin.dist}=={pin.version}"
    if pin.fetched:
        return f"{name}: already fetched"
    FILES.mkdir(parents=True, exist_ok=True)
    if pin.file is None:
        error = _pip("download", "--no-deps", "--dest", str(FILES), name)
        if error is not None:
            return f"{name}: {NOT_FETCHED}: {error}"
    # Looked up again: the download has put it there.
    file = pin.file
    if file is None:
        return f"{name}: {NOT_FETCHED}: the index served a file of another name"
    # Installed and not unzipped: a source archive needs to be built. Not compiled: the measured files stay as released.
    error = _pip("install", "--no-deps", "--no-compile", "--upgrade", "--target", str(pin.folder), str(file))
    if error is not None:
        return f"{name}: {NOT_FETCHED}: {error}"
    return f"{name}: fetched, sha256 {sha256_file(file)[:16]}"


def _pip(*arguments: str) -> str | None:
    """Run pip. Returns the last line of its error, or None on success."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode == 0:
        return None
    lines = completed.stderr.strip().splitlines()
    errors = [line.strip() for line in lines if line.strip().startswith("ERROR")]
    # pip may write notices after its error.
    if errors:
        return errors[-1]
    return lines[-1] if lines else "unknown error"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in pins()]
    if unknown:
        print(f"not pinned: {', '.join(unknown)}; pinned: {', '.join(pins())}", file=sys.stderr)
        return 2
    lines = [fetch(pins()[name]) for name in names or pins()]
    print("\n".join(lines))
    # One missing wheel means that its system is not measured; the others still are.
    none_fetched = all(NOT_FETCHED in line for line in lines)
    return 1 if none_fetched else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
