"""Install the pinned TRL and TorchRL into folders of their own: python bench/speed/setup.py [trl|torchrl ...]

It runs ``pip install --no-deps --target bench/speed/.trl`` (and ``.torchrl``): the environment is not changed, and
only the pinned distributions are downloaded. A second run does nothing. It fails if a requirement of a peer is not
met, and names it.
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
    """The folder of a peer's distributions."""
    return HERE / f".{peer}"


def pins(peer: str) -> list[Requirement]:
    """The pinned distributions of a peer's requirements file."""
    text = (HERE / f"requirements-{peer}.txt").read_text(encoding="utf-8")
    requirements = []
    for line in text.splitlines():
        without_comment = line.split("#")[0].strip()
        if without_comment:
            requirements.append(Requirement(without_comment))
    return requirements


def installed(pin: Requirement, path: Path) -> metadata.Distribution | None:
    """The distribution in folder ``path`` if it has the pinned version, else None."""
    # pip --target leaves the metadata of a replaced version behind, so that a name may be there twice.
    for distribution in metadata.distributions(path=[str(path)]):
        same_name = distribution.name.lower() == pin.name.lower()
        if same_name and pin.specifier.contains(distribution.version):
            return distribution
    return None


def absent(peer: str) -> list[Requirement]:
    """Pinned distributions of a peer that are not in its folder."""
    return [pin for pin in pins(peer) if installed(pin, folder(peer)) is None]


def add_to_path(peer: str) -> None:
    """Append a peer's folder to ``sys.path``. Raises :class:`SystemExit` if it is not installed."""
    if absent(peer):
        raise SystemExit(f"{peer} is not installed; run python bench/speed/setup.py {peer}")
    # At the end of the path: the environment's versions are the ones that all systems are measured with.
    sys.path.append(str(folder(peer)))


def unmet(requires: Sequence[str], path: Path) -> list[str]:
    """Requirements, extras excluded, that neither this environment nor folder ``path`` meets."""
    missing = []
    for text in requires:
        requirement = Requirement(text)
        # The empty extra: a requirement that belongs to an extra of the peer does not count.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if installed(requirement, path) is not None:
            continue
        try:
            installed_version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement} (absent)")
            continue
        if not requirement.specifier.contains(installed_version, prereleases=True):
            missing.append(f"{requirement} (installed: {installed_version})")
    return missing


def fetch(peer: str) -> str | None:
    """Install the missing distributions of a peer. Returns an error message, or None."""
    requirements = [str(pin) for pin in pins(peer)]
    if absent(peer):
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        subprocess.run([*command, "--upgrade", "--target", str(folder(peer)), *requirements], check=True)
    remaining = absent(peer)
    if remaining:
        return f"the index served another version of {', '.join(map(str, remaining))}"

    # --no-deps checked nothing, so that what the peer requires of the environment is checked here.
    missing = []
    for pin in pins(peer):
        distribution = installed(pin, folder(peer))
        if distribution is not None:
            missing += unmet(distribution.requires or [], folder(peer))
    if missing:
        return f"unmet requirements of {peer}: {'; '.join(missing)}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"from {', '.join(PEERS)}; default: all")
    selected = parser.parse_args(arguments).peers or list(PEERS)
    unknown = sorted(set(selected) - set(PEERS))
    if unknown:
        parser.error(f"unknown peer {', '.join(unknown)}; expected one of {', '.join(PEERS)}")
    for peer in selected:
        error = fetch(peer)
        if error is not None:
            print(error, file=sys.stderr)
            return 1
        names = ", ".join(map(str, pins(peer)))
        print(f"{names}: in {folder(peer).relative_to(HERE.parents[1])}, all requirements are met", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
