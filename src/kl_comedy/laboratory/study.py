"""The synthetic study: measure, write data and figures, and put the tables into the page beside them."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kl_comedy.errors import bad_value
from kl_comedy.laboratory import distance, length, modes, optimum, plots, summaries
from kl_comedy.laboratory.configurations import DESCENDED, RECOVERING
from kl_comedy.laboratory.descent import Descent

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("length", "distance", "optimum", "modes")
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"
SEEDS = {"length": 5, "distance": 20, "optimum": 5, "modes": 5}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a part is measured; ``quick`` shrinks every axis. ``seeds`` overrides the part's own number."""

    quick: bool = False
    seeds: int | None = None

    def of(self, part: str) -> int:
        return self.seeds if self.seeds is not None else (2 if self.quick else SEEDS[part])

    def steps(self, part: str) -> int:
        """How many times a part reports progress."""
        if part == "length":
            return len(self.lengths) * self.of(part)
        if part == "distance":
            return len(distance.DISTANCES)
        if part == "optimum":
            return len(self.descents(optimum.SETTINGS)) * len(DESCENDED)
        return len(self.descents(modes.SETTINGS)) * len(modes.KINDS) * len(RECOVERING)

    @property
    def lengths(self) -> tuple[int, ...]:
        return (5, 7, 9) if self.quick else length.LENGTHS

    def descents(self, settings: dict[str, Descent]) -> dict[str, Descent]:
        """With a tenth of the steps where quick."""
        if not self.quick:
            return settings
        return {name: Descent(**{**how.__dict__, "steps": how.steps // 10}) for name, how in settings.items()}


def run_part(part: str, out: Path, size: Size, *, command: str, done: Callable[[], None] = lambda: None) -> None:
    """Measure one part into ``out``: CSV, PNG, its block of README.md. Raises :class:`UserError` for another name."""
    if part not in PARTS:
        raise bad_value("part", part, (*PARTS, "all"))
    out.mkdir(parents=True, exist_ok=True)
    began, commit = time.monotonic(), _commit()
    table = {"length": _length, "distance": _distance, "optimum": _optimum, "modes": _modes}[part](out, size, done)
    made = provenance(command, time.monotonic() - began, commit)
    update_page(out / "README.md", part, f"{table}\n\n{made}")


def _length(out: Path, size: Size, done: Callable[[], None]) -> str:
    rounds, samples = (20, 200) if size.quick else (length.ROUNDS, length.SAMPLES)
    frame = length.length_study(
        lengths=size.lengths, seeds=size.of("length"), rounds=rounds, samples=samples, done=done
    )
    memory = length.memory_study(lengths=size.lengths if size.quick else length.MEMORY_LENGTHS, seeds=size.of("length"))
    _save(frame, out / "length.csv")
    _save(memory, out / "memory.csv")
    plots.plot_length(frame, out / "length.png")
    plots.plot_monte_carlo(frame, out / "length_monte_carlo.png")
    return summaries.length_tables(frame, memory)


def _distance(out: Path, size: Size, done: Callable[[], None]) -> str:
    frame = distance.distance_study(seeds=size.of("distance"), done=done)
    gaps = distance.gap_study(seeds=10 if size.quick else 100)
    _save(frame, out / "distance.csv")
    _save(gaps, out / "gaps.csv")
    plots.plot_distance(frame, out / "distance.png")
    return summaries.distance_tables(frame, gaps)


def _optimum(out: Path, size: Size, done: Callable[[], None]) -> str:
    ends, paths = optimum.optimum_study(seeds=size.of("optimum"), settings=size.descents(optimum.SETTINGS), done=done)
    _save(ends, out / "optimum.csv")
    _save(_over_games(paths), out / "optimum_paths.csv")
    plots.plot_optimum(paths, out / "optimum.png")
    return summaries.optimum_tables(ends)


def _over_games(paths: pd.DataFrame) -> pd.DataFrame:
    """Median, least and greatest KL to the optimum over the games of a beta; each game's end is in the other table."""
    keys = ["setting", "configuration", "beta", "step"]
    return paths.groupby(keys, sort=False).to_optimum.agg(["median", "min", "max"]).reset_index()


def _modes(out: Path, size: Size, done: Callable[[], None]) -> str:
    frame = modes.mode_study(seeds=size.of("modes"), settings=size.descents(modes.SETTINGS), done=done)
    _save(frame, out / "modes.csv")
    plots.plot_modes(frame, out / "modes.png")
    return summaries.modes_tables(frame)


def _save(frame: pd.DataFrame, path: Path) -> None:
    frame.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")


def provenance(command: str, seconds: float, commit: str) -> str:
    """What made a block: command, time, versions, commit."""
    names = ("torch", "numpy", "pandas", "matplotlib")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return (
        f"Made by `{command}` in {seconds:.0f} s on one core, at commit {commit} with Python "
        f"{platform.python_version()}, {versions}; float64."
    )


def _commit() -> str:
    """The commit of the checkout the package lies in, ``+`` where its sources differ from it, or ``unknown``."""
    here = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        rooms = [str(here / name) for name in ("laboratory", "kl", "objective")]
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "--", *rooms) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def update_page(path: Path, part: str, text: str) -> None:
    """Replace the generated block of ``part``, or append one; what a person wrote around it stays."""
    begin, end = (mark.replace("generated", f"generated {part}") for mark in (BEGIN, END))
    page = path.read_text() if path.exists() else "# The synthetic study\n"
    block = f"{begin}\n\n{text}\n\n{end}"
    before, found, rest = page.partition(begin)
    if not found:
        page = f"{page.rstrip()}\n\n## {part.capitalize()}\n\n{block}\n"
    else:
        page = before + block + rest.partition(end)[2]
    path.write_text(page)
