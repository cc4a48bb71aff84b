"""Completions in equal blocks of whole groups."""

from __future__ import annotations

from collections.abc import Sequence

from kl_comedy.records import Scored


def equal_blocks(rows: Sequence[Scored], blocks: int) -> list[list[Scored]]:
    """At most ``blocks`` blocks of as many whole groups each; groups that are left over are left out.

    Rows of a group stand together. Blocks must be equal, for their gradients are means over completions.
    """
    groups: list[list[Scored]] = []
    for row in rows:
        if not groups or groups[-1][0].rollout.group_id != row.rollout.group_id:
            groups.append([])
        groups[-1].append(row)
    count = min(blocks, len(groups))
    size = len(groups) // count
    return [[row for group in groups[n * size : (n + 1) * size] for row in group] for n in range(count)]
