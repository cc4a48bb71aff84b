"""Put the pinned peers beside the project's environment: python bench/speed/setup.py [trl|torchrl ...]

``pip install --no-deps --target bench/speed/.trl`` (and ``.torchrl``): the environment itself is not touched, and
nothing but the pinned distributions is fetched. Idempotent. Fails where something that a peer requires is in
neither, and names it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent
PEERS = ("trl", "torchrl")


def folder(peer: str) -> Path:
    """Where a peer's distributions lie."""
    return HERE / f".{peer}"


def pins(peer: str) -> list[Requirement]:
    """The pinned distributions of a peer's requirements file."""
    text = (HERE / f"requirements-{peer}.txt").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def installed(pin: Requirement, where: Path) -> metadata.Distribution | None:
    """The distribution in a folder, where it is there in the pinned version."""
    found = [item for item in metadata.distributions(path=[str(where)]) if item.name.lower() == pin.name.lower()]
    return next((item for item in found if pin.specifier.contains(item.version)), None)


def absent(peer: str) -> list[Requirement]:
    """Pinned distributions of a peer that are not in its folder."""
    return [pin for pin in pins(peer) if installed(pin, folder(peer)) is None]


def add_to_path(peer: str) -> None:
    """Make a peer importable, after everything of our environment. Raises where it was not fetched."""
    if absent(peer):
        raise SystemExit(f"{peer} is not there; fetch it with: python bench/speed/setup.py {peer}")
    sys.path.append(str(folder(peer)))


def unmet(requires: Sequence[str], where: Path) -> list[str]:
    """Requirements (extras left out) that neither this environment nor a folder meets, each with what there is."""
    missing = []
    for text in requires:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if installed(wanted, where) is not None:
            continue
        try:
            has = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{wanted} (absent)")
            continue
        if not wanted.specifier.contains(has, prereleases=True):
            missing.append(f"{wanted} (has {has})")
    return missing


def fetch(peer: str) -> str | None:
    """Install what is absent of a peer; why it cannot be used, or None."""
    wanted = [str(pin) for pin in pins(peer)]
    if absent(peer):
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", str(folder(peer)), *wanted], check=True)
    if left := absent(peer):
        return f"the index served another version of {', '.join(map(str, left))}"
    present = [found for pin in pins(peer) if (found := installed(pin, folder(peer))) is not None]
    missing = [line for found in present for line in unmet(found.requires or [], folder(peer))]
    return f"{peer} needs what is not here: {'; '.join(missing)}" if missing else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"from {', '.join(PEERS)}; default: all")
    wanted = parser.parse_args(arguments).peers or list(PEERS)
    if unknown := sorted(set(wanted) - set(PEERS)):
        parser.error(f"no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    for peer in wanted:
        if why := fetch(peer):
            print(why, file=sys.stderr)
            return 1
        names = ", ".join(map(str, pins(peer)))
        print(f"{names}: in {folder(peer).relative_to(HERE.parents[1])}, all required is met", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
