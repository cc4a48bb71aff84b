"""The build step that puts configs/ and slurm/profiles into the wheel; everything else is said in pyproject.toml.

The folders stay at the root of the checkout, where they are edited. ``kl_comedy.config.shipped`` finds them in both.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("configs", "slurm/profiles")


def shipped_files() -> list[Path]:
    """The files of :data:`SHIPPED`, from the root of the checkout."""
    files: list[Path] = []
    for folder in SHIPPED:
        files += sorted(Path(folder).rglob("*.yaml"))
    return files


class BuildWithConfigs(build_py):
    """Copies :data:`SHIPPED` into the built package, as ``kl_comedy/shipped``."""

    def get_source_files(self) -> list[str]:
        # A source distribution has these files, for a wheel is built from it.
        return [*super().get_source_files(), *map(str, shipped_files())]

    def run(self) -> None:
        super().run()
        # An editable install reads them where they are edited; a copy would become stale.
        if self.editable_mode:
            return
        for file in shipped_files():
            target = Path(self.build_lib, "kl_comedy", "shipped", file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithConfigs})
