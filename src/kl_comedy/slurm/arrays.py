"""Which arrays cells become. SLURM gives every task of an array the same nodes and tasks, and bounds its indices.

So cells of one size, and of one block of numbers, share an array; a batch script belongs to a size. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kl_comedy.errors import UserError
from kl_comedy.slurm.manifest import Cell, Sweep
from kl_comedy.slurm.profile import Profile
from kl_comedy.slurm.render import render


@dataclass(frozen=True, kw_only=True)
class Array:
    """Cells ``indices`` of one size; ``offset`` less, they are the array's own. ``share``: how many at a time."""

    shape: Profile
    suffix: str
    offset: int
    indices: tuple[int, ...]
    share: int | None

    def script(self, stage: str) -> str:
        """The name of its batch script: ``train``, or ``train-2x4`` for cells of another size than the profile's."""
        return stage + self.suffix


def arrays(cells: Iterable[Cell], profile: Profile, limit: int | None) -> list[Array]:
    """The arrays of ``cells``, at most ``limit`` tasks at a time in all (but one in each), the profile's size first.

    Raises :class:`UserError` for a cell whose size the profile has no shape for.
    """
    blocks: dict[tuple[int, int], list[Cell]] = {}
    shapes = (profile, *profile.shapes)
    for cell in cells:
        number = shapes.index(shape_of(cell, profile))
        blocks.setdefault((number, cell.index // profile.max_array * profile.max_array), []).append(cell)
    ordered = sorted(blocks)
    shares = share_out(limit, [len(blocks[key]) for key in ordered])
    return [
        Array(
            shape=shapes[number], suffix=suffix_of(shapes[number], profile), offset=offset, share=share,
            indices=tuple(cell.index for cell in blocks[number, offset]),
        )
        for (number, offset), share in zip(ordered, shares, strict=True)
    ]  # fmt: skip


def shape_of(cell: Cell, profile: Profile) -> Profile:
    """The profile, or the one of its shapes, whose nodes and tasks are those of the cell's config."""
    found = [shape for shape in (profile, *profile.shapes) if shape.size == cell.size]
    if found:
        return found[0]
    there = ", ".join("{} x {}".format(*shape.size) for shape in (profile, *profile.shapes))
    raise UserError(
        f"cell {cell.index} ({cell.name}): train.nodes x train.devices is {cell.nodes} x {cell.devices}, and profile "
        f"{profile.name} takes nodes x tasks_per_node of {there} only; add "
        f"shapes: [{{nodes: {cell.nodes}, tasks_per_node: {cell.devices}}}] to it, or set its own"
    )


def suffix_of(shape: Profile, profile: Profile) -> str:
    return "" if shape.size == profile.size else "-{}x{}".format(*shape.size)


def scripts(sweep: Sweep, profile: Profile, cells: Sequence[Cell]) -> dict[str, str]:
    """The batch scripts of ``cells`` by name: training and, where asked for, evaluation of each size; the report."""
    shapes = {suffix_of(shape, profile): shape for shape in (shape_of(cell, profile) for cell in cells)}
    stages = ("train", *(["evaluate"] if sweep.manifest.evaluate is not None else []))
    found = {
        stage + suffix: render(sweep, shapes[suffix], stage) for stage in stages for suffix in sorted(shapes)
    }  # fmt: skip
    return {**found, "report": render(sweep, profile, "report")}


def share_out(limit: int | None, lengths: Sequence[int]) -> list[int | None]:
    """``limit`` tasks at a time over arrays of so many cells: one each, then where most cells wait for a place.

    >>> share_out(4, [8, 1, 2])
    [2, 1, 1]
    >>> share_out(9, [2, 1])
    [2, 1]
    """
    if limit is None or len(lengths) == 1:
        return [limit] * len(lengths)
    shares = [1] * len(lengths)
    while sum(shares) < min(limit, sum(lengths)):
        open_ = [number for number, length in enumerate(lengths) if shares[number] < length]
        most = max(open_, key=lambda number: lengths[number] / shares[number])
        shares[most] += 1
    return list(shares)
