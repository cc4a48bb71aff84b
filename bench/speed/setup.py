"""Put the pinned TRL beside the project's environment: python bench/speed/setup.py

``pip install --no-deps --target bench/speed/.trl``: the environment itself is not touched, and nothing else is
fetched. Idempotent. Fails where the environment lacks something that TRL requires, and names it.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements-trl.txt"
FOLDER = HERE / ".trl"


def pins() -> list[Requirement]:
    """The pinned distributions of the requirements file."""
    lines = (line.split("#")[0].strip() for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines())
    return [Requirement(line) for line in lines if line]


def installed(pin: Requirement, folder: Path = FOLDER) -> metadata.Distribution | None:
    """The distribution in ``folder``, where it is there in the pinned version."""
    found = [item for item in metadata.distributions(path=[str(folder)]) if item.name.lower() == pin.name.lower()]
    return next((item for item in found if pin.specifier.contains(item.version)), None)


def unmet(requires: list[str]) -> list[str]:
    """Requirements (extras left out) that this environment does not meet, each with what it has."""
    missing = []
    for text in requires:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        try:
            has = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{wanted} (absent)")
            continue
        if not wanted.specifier.contains(has, prereleases=True):
            missing.append(f"{wanted} (has {has})")
    return missing


def main() -> int:
    for pin in pins():
        found = installed(pin)
        if found is None:
            command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
            subprocess.run([*command, "--upgrade", "--target", str(FOLDER), str(pin)], check=True)
            found = installed(pin)
        if found is None:
            print(f"{pin}: the index served another version", file=sys.stderr)
            return 1
        missing = unmet(found.requires or [])
        if missing:
            print(f"{pin} needs what this environment lacks: {'; '.join(missing)}", file=sys.stderr)
            return 1
        print(f"{pin}: in {FOLDER.relative_to(HERE.parents[1])}, all it requires is met", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
