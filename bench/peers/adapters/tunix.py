"""Tunix: its KL function is written in jax, which is not part of this environment."""

from __future__ import annotations

from peers.case import Adapter, Skipped
from peers.loading import Peer

PEER = Peer("google-tunix", packages=("tunix",))


def build() -> Adapter:
    """No case: the reason is a row of the page."""
    skipped = Skipped(
        system="tunix",
        version=PEER.version,
        what="tunix.rl.common.compute_kl_divergence",
        reason="needs jax and flax: a function of jax arrays, which the oracle's torch gradients cannot pass through",
    )
    return Adapter(system="tunix", version=PEER.version, cases=(), needs=PEER.pins, skipped=(skipped,))
