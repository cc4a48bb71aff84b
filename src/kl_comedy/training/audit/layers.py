"""The parameters of a policy by layer group: embeddings, runs of neighbouring blocks, the head."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kl_comedy.models.anatomy import unwrap

RUNS_OF_BLOCKS = 6
"""Deep models are audited by at most so many runs of blocks: a table that can be read."""

_BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """A name and the trainable parameters under it, in the model's order."""

    name: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.parameters)


def layer_groups(model: nn.Module) -> list[LayerGroup]:
    """Split the trainable parameters. The block of a parameter is the first whole number in its name.

    A head that shares its weight with the embeddings is counted there.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    blocks = sorted({block for name, _ in named if (block := _block_of(name)) is not None})
    labels = _labels(blocks)
    embedding = unwrap(model).get_input_embeddings().weight
    tied = embedding is unwrap(model).get_output_embeddings().weight
    found: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        block = _block_of(name)
        if block is not None:
            label = labels[block]
        elif parameter is embedding:
            label = "embeddings and head" if tied else "embeddings"
        else:
            label = "final norm" if tied else "head"
        found.setdefault(label, []).append(parameter)
    return [LayerGroup(name=name, parameters=tuple(parameters)) for name, parameters in found.items()]


def _block_of(name: str) -> int | None:
    hit = _BLOCK.search(name)
    return None if hit is None else int(hit.group(1))


def _labels(blocks: Sequence[int]) -> Mapping[int, str]:
    """A label per block: its own where there are few, else that of its run."""
    size = -(-len(blocks) // RUNS_OF_BLOCKS) if blocks else 1
    labels = {}
    for start in range(0, len(blocks), size):
        run = blocks[start : start + size]
        label = f"block {run[0]}" if len(run) == 1 else f"blocks {run[0]}-{run[-1]}"
        labels.update(dict.fromkeys(run, label))
    return labels
