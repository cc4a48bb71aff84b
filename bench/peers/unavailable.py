"""Systems whose KL code the package index does not have, and what stands under their names there."""

from __future__ import annotations

from peers.case import Skipped

_OTHER_PROJECT = "the distribution of this name on the index is another project, without reinforcement learning"
_UNPUBLISHED = "no release on the index; only its repository has the code, and only released wheels are measured"
_HELD_NAME = "the distribution on the index holds the name only: no algorithm in its modules"


def unavailable() -> tuple[Skipped, ...]:
    """What was looked for and is not there."""
    found = (
        ("nemo-rl", "0.0.0", _HELD_NAME),
        ("slime", "0.0.0", _OTHER_PROJECT),
        ("ragen", "0.1.0", _OTHER_PROJECT),
        ("prime-rl, PipelineRL, open-instruct, ROLL", "", _UNPUBLISHED),
    )
    return tuple(Skipped(system=name, version=version, what="all of it", reason=why) for name, version, why in found)
