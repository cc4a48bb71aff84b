"""A linear sketch of a long vector that keeps inner products, so that many gradients fit in memory.

Coordinate i is added, with a random sign, to one of ``size`` buckets (Charikar et al. 2002, Count Sketch). For fixed
vectors the sketched inner product is unbiased over the signs, with a standard deviation of at most
``|x| |y| sqrt(2 / size)``: 0.6% of ``|x| |y|`` at the default. Sums of sketches are the sketch of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Sketch:
    """A fixed linear map from ``dimension`` to ``width`` numbers.

    The identity where ``dimension <= size`` or ``size`` is 0; else blocks of ``size`` coordinates are signed, rotated
    by a random shift each, and summed. The map depends on ``(dimension, size, generator)`` only.
    """

    def __init__(self, dimension: int, size: int, generator: torch.Generator) -> None:
        self.dimension = dimension
        self.exact = size == 0 or dimension <= size
        self.width = dimension if self.exact else size
        self._signs: Tensor | None = None
        self._shifts: list[int] = []
        if not self.exact:
            blocks = -(-dimension // size)
            signs = torch.randint(0, 2, (dimension,), generator=generator, dtype=torch.int8)
            self._signs = signs * 2 - 1
            self._shifts = torch.randint(0, size, (blocks,), generator=generator).tolist()

    def __call__(self, vector: Tensor) -> Tensor:
        """``[dimension]`` to ``[width]``, float32, on the vector's device."""
        if vector.shape != (self.dimension,):
            raise ValueError(f"a vector of {self.dimension} numbers was promised, got {tuple(vector.shape)}")
        vector = vector.float()
        if self._signs is None:
            return vector
        self._signs = self._signs.to(vector.device)
        folded = vector.new_zeros(self.width)
        for block, shift in enumerate(self._shifts):
            part = slice(block * self.width, (block + 1) * self.width)
            signed = vector[part] * self._signs[part]
            split = min(self.width - shift, len(signed))
            folded[shift : shift + split] += signed[:split]
            folded[: len(signed) - split] += signed[split:]
        return folded
