"""Pinned wheels of the peers and their folders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
FOLDER = HERE / ".wheels"
FILES = FOLDER / "files"
UNPACKED = FOLDER / "unpacked"


@dataclass(frozen=True, kw_only=True)
class Pin:
    """One pinned distribution: ``dist==version``."""

    dist: str
    version: str

    @property
    def folder(self) -> Path:
        """The folder that the distribution alone is installed into."""
        return UNPACKED / f"{self.dist}-{self.version}"

    @property
    def fetched(self) -> bool:
        """Whether it has been downloaded and unpacked."""
        return self.file is not None and any(self.folder.glob("*.dist-info"))

    @property
    def file(self) -> Path | None:
        """The downloaded wheel or source archive, or None."""
        # Names of wheels have underscores. After the version comes "-" in a wheel, "." in a source archive; without it,
        # version 1.1 would match 1.10.
        stem = f"{self.dist.replace('-', '_')}-{self.version}".lower()
        for path in sorted(FILES.glob("*")):
            if path.name.lower().startswith((f"{stem}-", f"{stem}.")):
                return path
        return None


# Read once: every adapter asks for its pins while it is imported.
@lru_cache(maxsize=1)
def pins() -> dict[str, Pin]:
    """The pinned distributions by name, in the order of the file."""
    pinned = {}
    for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
        without_comment = line.split("#")[0].strip()
        if without_comment:
            dist, version = without_comment.split("==")
            pinned[dist] = Pin(dist=dist, version=version)
    return pinned
