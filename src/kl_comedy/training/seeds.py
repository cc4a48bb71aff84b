"""Seeds derived from what is being drawn, so that nothing depends on how often a generator was used.

A resumed run draws the same numbers because every draw has a name: ``(seed, purpose, index)``.
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, purpose: str, index: int) -> int:
    """A 62-bit seed for one draw.

    >>> derive_seed(0, "rollout", 1) == derive_seed(0, "rollout", 1) != derive_seed(0, "rollout", 2)
    True
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2
