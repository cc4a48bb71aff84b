"""Systems that are not measured, and why: no usable distribution on the package index, or no adapter."""

from __future__ import annotations

from peers.case import Skipped

_OTHER_PROJECT = "the distribution of this name on the index is another project, without reinforcement learning"
_UNPUBLISHED = "no distribution of these names found on the index, and only released wheels are measured"
_UNWRITTEN = "has a release; no adapter has been written for it"
_PLACEHOLDER = "the distribution on the index is a placeholder: no algorithm in its modules"


def unavailable() -> tuple[Skipped, ...]:
    """The systems without an adapter."""
    # Looked up on the package index; a release of one of them is a reason to look again.
    systems = (
        ("nemo-rl", "0.0.0", _PLACEHOLDER),
        ("slime", "0.0.0", _OTHER_PROJECT),
        ("ragen", "0.1.0", _OTHER_PROJECT),
        ("prime-rl, PipelineRL, open-instruct, rLLM, compose-rl", "", _UNPUBLISHED),
        ("oat-llm", "0.2.4", _UNWRITTEN),
        ("cosmos-rl", "0.4.7", _UNWRITTEN),
        ("torchforge", "0.0.1", _UNWRITTEN),
    )
    skipped = []
    for name, version, reason in systems:
        skipped.append(Skipped(system=name, version=version, what="all of it", reason=reason))
    return tuple(skipped)
