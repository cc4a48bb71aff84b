"""Where a run computes, as tags: what can make the same config give other last bits."""

from __future__ import annotations

from kl_comedy.models import products
from kl_comedy.tracking import provenance_tags


def place_tags() -> dict[str, str]:
    """Commit, packages and machine, and ``host.products``: the library of float32 products on a CPU."""
    return {**provenance_tags(), "host.products": products.library()}
